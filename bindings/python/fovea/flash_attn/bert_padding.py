"""Between padded and packed sequences, with flash-attn's names, arguments and results, on any device and with gradients.

A padded tensor is (batch, seqlen, ...) with a mask (batch, seqlen); packed it is (total, ...): the rows that the mask keeps,
one sequence after the other. `indices` (total) int64 are their places in (batch * seqlen, ...).
"""

from __future__ import annotations

import torch
from torch import Tensor

try:  # Programs import these names from here, where flash-attn has them by accident.
    from einops import rearrange, repeat  # noqa: F401
except ImportError:
    pass


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002: its name in flash-attn
    """Rows `indices` (n) of input (rows, ...): (n, ...)."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...): zeros, but for values (n, ...) in the rows `indices` (n), each of which occurs once."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.long(), values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """(index_first_axis(input, indices), input)."""
    return index_first_axis(input, indices), input


class IndexFirstAxis:
    """IndexFirstAxis.apply is index_first_axis."""

    apply = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """IndexPutFirstAxis.apply is index_put_first_axis."""

    apply = staticmethod(index_put_first_axis)


def _starts(lengths: Tensor) -> Tensor:
    """cu_seqlens (n + 1) int32 of lengths (n)."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _places(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().flatten()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of hidden_states (batch, seqlen, ...) that a mask keeps.

    attention_mask: (batch, seqlen) bool or integers: 1 is a row that counts. unused_mask: the same: 1 is a row that is
    packed, too, but counts for nothing.

    Returns (rows (total, ...), indices (total), cu_seqlens (batch + 1) int32, the greatest length, seqused (batch) int32:
    how many rows of each sequence count).
    """
    packed = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, indices = packed.sum(-1, dtype=torch.int32), _places(packed)
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _starts(lengths), int(lengths.max()), attention_mask.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs the rows of hidden_states (batch, seqlen, ...), of which each may hold several sequences, one behind the other.

    attention_mask_in_length: (batch, seqlen) integers: the lengths of the sequences of each row, and zeros behind them:
    [[2, 3, 0, 0, 0, 0]] is a row of 6 with sequences of 2 and 3.

    Returns (rows (total, ...), indices (total), cu_seqlens (sequences + 1) int32, the greatest length).
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    column = torch.arange(attention_mask_in_length.shape[-1], device=used.device)
    indices = _places(column < used)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, _starts(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...): the packed rows of hidden_states (total, ...) at their places `indices` (total), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
