"""Rotary position embeddings with flash-attn's names, arguments and results, on any device.

Common to all:
    cos, sin: (positions, rotary_dim / 2): the tables; rotary_dim is at most headdim, and numbers behind it stay.
    interleaved: pairs are neighbours (GPT-J) and not halves of the row (GPT-NeoX).
    seqlen_offsets: an integer or (batch): the position of each sequence's first row.

Gradients arrive at what is turned, not at cos and sin. Functions that work in place (their names end in _, or
inplace=True) change what they are given; gradients flow through what they return. Errors: ValueError naming the argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fovea import _rotary


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(a, b) -> (-b, a) for all pairs of x (..., headdim)."""
    a, b = _rotary.halves(x, x.shape[-1], interleaved)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (batch, seqlen, nheads, headdim), turned, in the type of x and with gradients of cos and sin, too.

    cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), one row for each row of x.
    """
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise ValueError(f"cos: got {cos.shape[-1]} columns; expected at most {x.shape[-1] // 2}, half of headdim")
    a, b = _rotary.halves(x, size, interleaved)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = a * cos - b * sin, a * sin + b * cos
    rotated = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((rotated, x[..., size:]), -1)


class _Rotate(torch.autograd.Function):
    """Turns x[part] for each of `parts`, by two of `tables` (cos, sin) each, in place or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interleaved: bool, inplace: bool, parts: tuple[Any, ...], *tables: Tensor) -> Tensor:
        ctx.save_for_backward(*tables)
        ctx.interleaved, ctx.parts = interleaved, parts
        # x is not marked as changed: autograd would refuse parameters, and the views that unbind gives.
        return _rotate_parts(x if inplace else x.clone(), interleaved, parts, tables)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        turned = _rotate_parts(gradient.clone(), ctx.interleaved, ctx.parts, ctx.saved_tensors, conjugate=True)
        return (turned, None, None, None, *(None for _ in ctx.saved_tensors))


def _rotate_parts(x: Tensor, interleaved: bool, parts: Any, tables: tuple[Tensor, ...], conjugate: bool = False) -> Tensor:
    for part, cos, sin in zip(parts, tables[0::2], tables[1::2], strict=True):
        _rotary.rotate(x[part], cos, sin, interleaved, True, conjugate)
    return x


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x (batch, seqlen, nheads, headdim), or packed (total, nheads, headdim) with cu_seqlens (batch + 1), turned by its
    positions; the result has its shape and type. max_seqlen is a hint that Fovea does not need."""
    tables = _rotary.angles_of_rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    return _Rotate.apply(x, interleaved, inplace, (...,), *tables)


apply_rotary_emb_func = apply_rotary_emb  # its name in earlier versions


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turns queries and keys of qkv in place, and returns qkv.

    qkv: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q + 2 nheads_k, headdim) with num_heads_q.
    cos_k, sin_k: the tables of keys; None: those of queries.
    """
    q, k = _queries_and_keys(qkv, num_heads_q)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    tables_q = _rotary.angles_of_rows(qkv[q], cos, sin, seqlen_offsets, None)
    tables_k = _rotary.angles_of_rows(qkv[k], cos_k, sin_k, seqlen_offsets, None)
    return _Rotate.apply(qkv, interleaved, True, (q, k), *tables_q, *tables_k)


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Any, Any]:
    """Indices of q (batch, seqlen, nheads, headdim) and k (batch, seqlen, nheads_k, headdim) in qkv."""
    every = slice(None)
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        return (every, every, 0), (every, every, 1)
    if qkv.ndim == 4 and num_heads_q is not None:
        heads_k, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if heads_k > 0 and not odd:
            return (every, every, slice(0, num_heads_q)), (every, every, slice(num_heads_q, num_heads_q + heads_k))
    raise ValueError(
        f"qkv: got shape {tuple(qkv.shape)} and num_heads_q={num_heads_q}; expected (batch, seqlen, 3, nheads, headdim), "
        "or (batch, seqlen, num_heads_q + 2 nheads_k, headdim) with num_heads_q; reshape it"
    )


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Turns the keys of kv (batch, seqlen, 2, nheads, headdim) in place, and returns kv."""
    if kv.ndim != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: got shape {tuple(kv.shape)}; expected (batch, seqlen, 2, nheads, headdim); reshape it")
    keys = (slice(None), slice(None), 0)
    tables = _rotary.angles_of_rows(kv[keys], cos, sin, seqlen_offsets, None)
    return _Rotate.apply(kv, interleaved, True, (keys,), *tables)


class RotaryEmbedding(torch.nn.Module):
    """Turns queries and keys by position p times theta_i = base^(-2 i / dim), i < dim / 2.

    dim: rotary_dim. scale_base: not None adds XPos (https://arxiv.org/abs/2212.10554): row p of queries is scaled by
    s_i^((p - rows / 2) / scale_base) and that of keys by its inverse, s_i = (2 i + 0.4 dim) / (1.4 dim).

    The tables are kept for the longest sequence so far, per device and type.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._compute_scale(device), persistent=False)
        # Under these names models read them.
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        """Makes tables of at least `seqlen` rows on this device, of this type."""
        kept = self._cos_cached
        if (
            kept is not None
            and seqlen <= self._seq_len_cached
            and kept.device == device
            and kept.dtype == dtype
            and not (self.training and kept.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # Angles are float32 even where the model was cast: 16 bits do not hold a large position.
        place = torch.arange(seqlen, device=device, dtype=torch.float32)
        exact = self.inv_freq.dtype == torch.float32
        angle = torch.outer(place, self.inv_freq.to(device) if exact else self._compute_inv_freq(device))
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self._compute_scale(device) ** ((place - seqlen // 2) / self.scale_base).unsqueeze(1)
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Turns queries and keys in place, and returns what it was given: qkv, or (q, kv).

        qkv: as apply_rotary_emb_qkv_ takes it; with kv (batch, seqlen, 2, nheads_k, headdim) the queries alone, (batch,
        seqlen, nheads, headdim). seqlen_offset: an integer or (batch). max_seqlen: rows of the tables; give it with a
        tensor of offsets.
        """
        if max_seqlen is not None or not isinstance(seqlen_offset, Tensor):
            rows = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
            self._update_cos_sin_cache(rows, device=qkv.device, dtype=qkv.dtype)
        cos, sin, cos_k, sin_k = self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen: got None beside a tensor of offsets; expected the rows that the tables need; give it")
        settings = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **settings)
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **settings)
        return q, apply_rotary_emb_kv_(
            kv, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, **settings
        )
