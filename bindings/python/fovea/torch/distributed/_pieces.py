"""Which rows lie where: lists of pieces, and tensors cut and joined by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import group_of


class Piece(NamedTuple):
    """Rows [begin, end) lie on `rank`, behind those of the rank's pieces that stand before this one."""

    rank: int
    begin: int
    end: int


Pieces = Sequence[tuple[int, int, int]]


def _chunks(total: int, ranks: int, count: int) -> list[tuple[int, int]]:
    """[begin, end) of each chunk; they differ by a row at most, the longer ones come first."""
    if total < 0 or ranks < 1:
        name, got, least = ("total", total, 0) if total < 0 else ("ranks", ranks, 1)
        raise ValueError(f"{name}: got {got}; expected {least} or more; say how many there are")
    size, longer = divmod(total, count)
    begins = [size * i + min(i, longer) for i in range(count + 1)]
    return list(zip(begins, begins[1:], strict=False))


def contiguous(total: int, ranks: int) -> tuple[Piece, ...]:
    """Rank r has the r-th of as many chunks as ranks, those of torch.tensor_split."""
    return tuple(Piece(rank, *rows) for rank, rows in enumerate(_chunks(total, ranks, ranks)))


def zigzag(total: int, ranks: int) -> tuple[Piece, ...]:
    """Of twice as many chunks as ranks, rank r has the r-th from the front and the r-th from the back: under a causal mask all
    ranks have as much to compute. Where 2 * ranks divides total, these are the rows of PyTorch's context_parallel."""
    chunks = _chunks(total, ranks, 2 * ranks)
    return tuple(Piece(min(i, 2 * ranks - 1 - i), *rows) for i, rows in enumerate(chunks))


def behind_each_other(rows: Iterable[int]) -> tuple[Piece, ...]:
    """Rank after rank, each with so many rows."""
    pieces, begin = [], 0
    for rank, count in enumerate(rows):
        pieces.append(Piece(rank, begin, begin + count))
        begin += count
    return tuple(pieces)


def rows_of(pieces: Pieces, rank: int) -> int:
    return sum(end - begin for owner, begin, end in pieces if owner == rank)


def total_of(pieces: Pieces) -> int:
    return max((end for _, _, end in pieces), default=0)


def shard(tensor: Tensor, dim: int, pieces: Pieces, rank: int) -> Tensor:
    """The rows of `rank` along `dim`; differentiable. Not a copy where they lie in one piece."""
    if tensor.shape[dim] != total_of(pieces):
        raise ValueError(
            f"tensor: got {tensor.shape[dim]} rows along dimension {dim}; expected {total_of(pieces)}, those of the pieces; make "
            "pieces for this length"
        )
    parts = [tensor.narrow(dim, begin, end - begin) for owner, begin, end in pieces if owner == rank]
    if not parts:
        return tensor.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@torch.no_grad()
def unshard(tensor: Tensor, dim: int, pieces: Pieces, group: Any = None) -> Tensor:
    """All rows along `dim` in their order, of tensors that `shard` cut; without gradients. All ranks of the group call it."""
    group = group_of(group)
    size, rank = group.size(), group.rank()
    if tensor.shape[dim] != rows_of(pieces, rank):
        raise ValueError(
            f"tensor: got {tensor.shape[dim]} rows along dimension {dim}; expected {rows_of(pieces, rank)}, those of rank {rank}; "
            "give what shard gave"
        )
    rows = tensor.movedim(dim, 0).contiguous()
    # Equal sizes for all_gather, and bytes, since backends differ in the types that they know.
    most = max(rows_of(pieces, each) for each in range(size))
    sent = rows.new_zeros((most, *rows.shape[1:]))
    sent[: len(rows)] = rows
    received = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather([_bytes(x) for x in received], _bytes(sent), group=group)
    whole = rows.new_empty((total_of(pieces), *rows.shape[1:]))
    begins = [0] * size
    for owner, begin, end in pieces:
        whole[begin:end] = received[owner][begins[owner] : begins[owner] + end - begin]
        begins[owner] += end - begin
    return whole.movedim(0, dim)


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
