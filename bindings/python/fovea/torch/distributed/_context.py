"""PyTorch's context_parallel, computed by Fovea."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._routing import SdpaMode
from ._attend import attend
from ._pieces import Pieces, rows_of, shard, unshard, zigzag
from ._ranks import Ranks, ranks_of

Placement = Callable[[int, int], Pieces]

_SEEDS = r"dropout_p: got the seeds \1; call torch.manual_seed with one number on every rank"


def _total_of(buffers: list[Tensor], dims: list[int]) -> int | None:
    """How long the sequence is."""
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffer_seq_dims: got {len(dims)}; expected {len(buffers)}, one for each of the buffers; say which dimension is cut"
        )
    lengths = {x.shape[dim] for x, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers: got sequences of {sorted(lengths)}; expected one length; cut others by shard")
    return lengths.pop() if lengths else None


@contextlib.contextmanager
def _cut(buffers: list[Tensor], dims: list[int], kept: Collection[Tensor], pieces: Pieces, rank: int) -> Iterator[None]:
    """The buffers are this rank's rows inside, in place, and whole again behind it but for those in `kept`."""
    whole = [None if any(x is y for y in kept) else x.detach().clone() for x in buffers]
    try:
        with torch.no_grad():
            for x, dim in zip(buffers, dims, strict=True):
                rows = shard(x, dim, pieces, rank).clone()
                x.resize_(rows.shape).copy_(rows)
        yield
    finally:
        with torch.no_grad():
            for x, before in zip(buffers, whole, strict=True):
                if before is not None:
                    x.resize_(before.shape).copy_(before)


def _placed(ranks: Ranks, placement: Placement, rows: int) -> Pieces:
    """Where the rows of all ranks lie that have been cut by `placement`."""
    every = [each for (each,) in ranks.gather([rows])]
    pieces = placement(sum(every), ranks.size)
    expected = [rows_of(pieces, rank) for rank in range(ranks.size)]
    if every != expected:
        raise ValueError(f"buffers: got {every} rows on the ranks; expected {expected}; cut them by shard, or choose a placement")
    return pieces


def _sdpa(
    ranks: Ranks,
    pieces: Pieces | None,
    placement: Placement,
    method: dict[str, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention of this rank's rows, (batch, heads, rows, size) or without the batch."""
    with ranks.telling():
        if attn_mask is not None:
            raise ValueError("attn_mask: got one in context_parallel; expected none; call attention with it outside of the block")
        if query.ndim not in (3, 4) or key.ndim != query.ndim or value.ndim != query.ndim:
            raise ValueError(
                f"query: got shape {tuple(query.shape)}; expected (batch, heads, rows, size), as key and value; reshape them"
            )
        if not enable_gqa and query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"key: got {key.shape[-3]} heads; expected {query.shape[-3]}, as query; set enable_gqa=True for grouped heads"
            )
        rows = query.shape[-2]
        if pieces is None:
            pieces = _placed(ranks, placement, rows)
        for name, got in (("query", rows), ("key", key.shape[-2])):
            if got != rows_of(pieces, ranks.rank):
                raise ValueError(
                    f"{name}: got {got} rows in context_parallel; expected {rows_of(pieces, ranks.rank)}, those of rank "
                    f"{ranks.rank}; compute attention to other rows outside of the block"
                )
    q, k, v = (x.transpose(-2, -3) if x.ndim == 4 else x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    try:
        o = attend(q, k, v, group=ranks, pieces=pieces, causal=is_causal, scale=scale, dropout=dropout_p, **method)
    except ValueError as error:
        raise ValueError(re.sub(r"^seed: got (.*);.*", _SEEDS, str(error))) from None
    return o.transpose(1, 2) if query.ndim == 4 else o[0].transpose(0, 1)


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
    placement: Placement = zigzag,
    heads_ranks: int = 0,
    stages: int = 0,
) -> Iterator[None]:
    """torch.distributed.tensor.experimental.context_parallel, computed by Fovea, for sequences of any length.

    Inside, `buffers` hold this rank's rows, and torch.nn.functional.scaled_dot_product_attention, in this thread and in
    recomputation by autograd, attends to the rows of all ranks. All ranks of `mesh` enter it together.

    Arguments:
        mesh: a DeviceMesh of one dimension; also a ProcessGroup, or Ranks.
        buffers: tensors with a dimension of the sequence, cut in place and restored at the end, after an error, too.
        buffer_seq_dims: that dimension, for each buffer.
        no_restore_buffers: those of the buffers that stay cut.
        placement: (length, ranks) -> pieces; zigzag gives the rows that PyTorch's own gives where 2 * ranks divides the length.
        heads_ranks, stages: as in attend.

    scaled_dot_product_attention takes query, key and value of the sequence, is_causal, scale, enable_gqa and dropout_p there;
    attn_mask raises ValueError, on all ranks. The seed of dropout_p comes from PyTorch's generators, which are in the same state on
    all ranks; else all raise ValueError. What is dropped is what one device drops. Without buffers the ranks ask each other for their rows in each call.
    """
    buffers, dims, kept = list(buffers or ()), list(buffer_seq_dims or ()), tuple(no_restore_buffers or ())
    total = _total_of(buffers, dims)
    if not all(any(x is y for y in buffers) for x in kept):
        raise ValueError("no_restore_buffers: got a tensor that is not among buffers; expected some of them; leave it out")
    ranks = ranks_of(mesh)
    pieces = None if total is None else placement(total, ranks.size)
    method = {"heads_ranks": heads_ranks, "stages": stages}
    with _cut(buffers, dims, kept, pieces or (), ranks.rank), SdpaMode(partial(_sdpa, ranks, pieces, placement, method)):
        yield


def context_parallel_unshard(
    mesh: Any,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Any = None,
    *,
    placement: Placement = zigzag,
) -> list[Tensor]:
    """PyTorch's function of this name: the whole of tensors, results among them, that context_parallel has cut; without
    gradients. A load_balancer is PyTorch's own and raises ValueError."""
    if load_balancer is not None:
        raise ValueError("load_balancer: got one; expected None; give the placement of context_parallel instead")
    ranks = ranks_of(mesh)
    return [
        unshard(x, dim, _placed(ranks, placement, x.shape[dim]), ranks) for x, dim in zip(buffers, seq_dims, strict=True)
    ]
