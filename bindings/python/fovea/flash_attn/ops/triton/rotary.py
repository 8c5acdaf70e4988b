"""apply_rotary: rotary position embedding without gradients, by operations of PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from fovea import _rotary


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """x (batch, seqlen, nheads, headdim), or packed (total, nheads, headdim) with cu_seqlens (batch + 1), turned by its
    positions: a new tensor, or x itself where `inplace`.

    cos, sin: (positions, rotary_dim / 2) of any floating-point type; rotary_dim is at most headdim. seqlen_offsets: an
    integer or (batch): the position of each sequence's first row. interleaved: pairs are neighbours. conjugate: turns
    back. max_seqlen is a hint that Fovea does not need.

    Raises ValueError for shapes that do not fit and positions behind the tables (on a GPU seqlen_offsets and cu_seqlens are
    not read by the host: such rows get the angles of position 0).
    """
    cos, sin = _rotary.angles_of_rows(x, cos, sin, seqlen_offsets, cu_seqlens)
    return _rotary.rotate(x, cos, sin, interleaved, inplace, conjugate)
