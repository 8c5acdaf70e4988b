"""Rotary position embedding of queries and keys, for tensors of PyTorch on any device.

A row of `rotary_dim` numbers is rotary_dim / 2 pairs (a, b); the row at position p turns pair i by the angle p theta_i:

    (a, b)  ->  (a cos - b sin,  a sin + b cos)

Pairs are (x[i], x[i + rotary_dim / 2]), or, interleaved, (x[2 i], x[2 i + 1]). Numbers behind rotary_dim stay as they are.
Source: RoFormer, https://arxiv.org/abs/2104.09864, equation 34.
"""

from __future__ import annotations

import torch
from torch import Tensor


def halves(x: Tensor, size: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and the second numbers of all pairs in x[..., :size], each (..., size / 2)."""
    if interleaved:
        return x[..., 0:size:2], x[..., 1:size:2]
    return x[..., : size // 2], x[..., size // 2 : size]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool = False, conjugate: bool = False) -> Tensor:
    """x turned by the angles of its rows: x itself where `inplace`, else a new tensor.

    x: (..., rows, heads, size). cos, sin: (rows, rotary_dim / 2), or with the dimensions before `rows`. Computes in float32
    at least. conjugate: turns back, which is the gradient.
    """
    size = 2 * cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(wide).unsqueeze(-2), sin.to(wide).unsqueeze(-2)
    if conjugate:
        sin = -sin
    a, b = (half.to(wide) for half in halves(x, size, interleaved))
    turned = a * cos - b * sin, a * sin + b * cos
    if not inplace:
        rest = x[..., size:]
        x = torch.empty_like(x)
        x[..., size:] = rest
    for half, values in zip(halves(x, size, interleaved), turned, strict=True):
        half.copy_(values)
    return x


def sequence_and_place(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` packed rows its sequence and its place there; rows behind the last sequence count as its."""
    rows = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp(max=len(starts) - 2)
    return sequence, rows - starts[sequence]


def angles_of_rows(
    x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows of the tables cos and sin (positions, rotary_dim / 2) for each row of x, as rotate takes them.

    x: (batch, rows, heads, size), or (total, heads, size) with cu_seqlens (batch + 1). Row i of sequence b is at position
    offsets + i, or offsets[b] + i. Rows behind the last packed sequence get the angle 0.

    Raises ValueError for shapes that do not fit and, where no GPU has to be asked, for positions behind the table.
    """
    _check_shapes(x, cos, sin, offsets, cu_seqlens)
    if cu_seqlens is None:
        if not isinstance(offsets, Tensor):
            used = slice(offsets, offsets + x.shape[1])
            if offsets < 0 or used.stop > cos.shape[0]:
                _refuse_positions(used.stop, cos.shape[0])
            return cos[used], sin[used]
        place = offsets.long().unsqueeze(1) + torch.arange(x.shape[1], device=x.device)
        used = torch.ones_like(place, dtype=torch.bool)
    else:
        sequence, place = sequence_and_place(cu_seqlens, x.shape[0])
        used = torch.arange(x.shape[0], device=x.device) < cu_seqlens[-1]
        place = place + (offsets.long()[sequence] if isinstance(offsets, Tensor) else offsets)
    outside = used & ((place < 0) | (place >= cos.shape[0]))
    if outside.device.type == "cpu" and bool(outside.any()):
        _refuse_positions(int(place[used].max()) + 1, cos.shape[0])
    place = place.masked_fill(~used | outside, 0)
    unused = ~used.unsqueeze(-1)
    return cos[place].masked_fill(unused, 1.0), sin[place].masked_fill(unused, 0.0)


def _check_shapes(x: Tensor, cos: Tensor, sin: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> None:
    rank = 4 if cu_seqlens is None else 3
    if x.ndim != rank:
        expected = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim), as there is cu_seqlens"
        raise ValueError(f"x: got shape {tuple(x.shape)}; expected {expected}; reshape it")
    if cos.ndim != 2 or sin.shape != cos.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos, sin: got shapes {tuple(cos.shape)} and {tuple(sin.shape)}; expected (positions, rotary_dim / 2) for both, "
            f"and rotary_dim at most {x.shape[-1]}, the size of a head"
        )
    batch = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if isinstance(offsets, Tensor) and offsets.shape != (batch,):
        raise ValueError(
            f"seqlen_offsets: got shape {tuple(offsets.shape)}; expected an integer or ({batch},), one for each sequence"
        )


def _refuse_positions(wanted: int, rows: int) -> None:
    raise ValueError(
        f"cos, sin: got {rows} rows; expected at least {wanted}, as many as the last position needs (and no negative "
        "seqlen_offsets); make the tables longer"
    )
