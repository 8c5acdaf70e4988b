"""cascade: queries of several sequences attend once to the keys that they share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _cache, _core
from ._arguments import output_shapes, shape_of
from ._arrays import results_like


class CascadeLevel(NamedTuple):
    """Keys of groups of neighbouring queries, which each group shares."""

    cache: _cache.Cache
    """One sequence of keys for each group."""
    starts: Any
    """(groups + 1) int32: group g has the rows starts[g] to starts[g + 1] of q, from 0 on."""
    longest: int = 0
    """Rows of the largest group; 0 reads it from `starts`, or on a GPU takes all rows."""


def cascade(
    q: Any,
    levels: Sequence[CascadeLevel],
    *,
    return_lse: bool = False,
    scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sink: Any = None,
    qv: Any = None,
    backend: str | None = None,
    num_threads: int = 0,
) -> Any:
    """Attention of packed queries over keys in levels, each read once for all queries that share it.

    A row of q attends to the keys of its group in every level. The result is that of one call over the keys of all levels, one level
    behind the other: each level is a call with float32 results, and the results are merged. On a GPU nothing synchronises. Arrays as
    attend takes them, but those of JAX; no gradients.

    Arguments:
        q: (total_q, heads_q, d): the queries of all sequences, packed.
        levels: the keys: those that most queries share come first, each sequence's own last.
        return_lse: returns (o, lse) with lse (heads_q, total_q) float32.
        causal: of the last level: query i of a group sees key j when j <= i + keys - queries. It has at least as many keys as the group
            has queries, less one; those of the levels before are seen by all.
        sink: (heads_q) float32: counts once, in the last level, whose groups then have all rows of q.
        scale, softcap, qv, backend, num_threads: as attend.

    Returns o: (total_q, heads_q, d_v), as q. Under torch.compile the results of levels are rounded to the type of q before.

    Raises as attend does.
    """
    levels = tuple(levels)
    _check(q, levels)
    common = {"scale": scale, "softcap": softcap, "qv": qv, "backend": backend, "num_threads": num_threads}
    calls = [
        common | {"cu_seqlens_q": level.starts, "max_seqlen_q": level.longest} | _cache.options_of(level.cache) for level in levels
    ]
    calls[-1] |= {"causal": causal, "sink": sink}
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor) and not _is_run_now(torch, q, levels):
        o, lse = _in_graph(q, levels, calls)
        return (o, lse) if return_lse else o
    o_shape, lse_shape = output_shapes(q, levels[0].cache.v, True)
    results = results_like(q)
    o_parts, lse_parts = ([results.empty((1, *shape)) for _ in levels] for shape in (o_shape, lse_shape))
    for level, options, o_part, lse_part in zip(levels, calls, o_parts, lse_parts, strict=True):
        _core.forward(q=q, k=level.cache.k, v=level.cache.v, o=o_part[0], lse=lse_part[0], **options)
    o = results.output((1, *o_shape), q)
    lse = results.empty((1, *lse_shape))
    _core.merge(tuple(o_parts), tuple(lse_parts), o, lse)
    return (results.done(o[0]), results.done(lse[0])) if return_lse else results.done(o[0])


def _check(q: Any, levels: tuple[CascadeLevel, ...]) -> None:
    from ._attend import framework

    if framework(q) == "jax":
        raise TypeError("q: got an array of JAX; expected another library's; call attend for each level, and merge")
    if not levels:
        raise ValueError("levels: got none; expected 1 or more; give each set of keys a level")
    for place, level in enumerate(levels):
        if not isinstance(level, CascadeLevel) or not isinstance(level.cache, _cache.Cache):
            raise TypeError(f"levels[{place}]: got {type(level).__name__}; expected fovea.CascadeLevel(fovea.Cache(...), starts)")
    if len(shape_of(q, "q")) != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}; expected (total, heads, size), packed; reshape it")


def _is_run_now(torch: Any, q: Any, levels: tuple[CascadeLevel, ...]) -> bool:
    from .torch import _attend

    rows = [q, *(x for level in levels for x in (level.cache.k, level.cache.v))]
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in rows):
        raise ValueError("levels: got tensors that need gradients; expected none, as a cascade has none; use torch.no_grad()")
    return not torch.compiler.is_compiling() and all(_attend.is_plain(x, x, x) for x in rows)


def _in_graph(q: Any, levels: tuple[CascadeLevel, ...], calls: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Through the operators of PyTorch."""
    from .torch import _attend, _merge

    parts = [
        _attend.through_operator(q, level.cache.k, level.cache.v, False, options) for level, options in zip(levels, calls, strict=True)
    ]
    o, lse = _merge.merge([o[None] for o, _ in parts], [lse[None] for _, lse in parts])
    return o[0], lse[0]
