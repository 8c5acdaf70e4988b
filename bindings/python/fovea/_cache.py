"""Attention over a key-value cache that grows: fovea.attend with `cache`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _core
from ._arguments import complete, output_shapes
from ._arrays import results_like
from ._types import checks_of_types, framework
from .expressions import traced


class Cache(NamedTuple):
    """A key-value cache, and where the rows of each sequence lie in it."""

    k: Any
    """(batch, rows, heads_kv, d), or with page_table (pages, page_size, heads_kv, d)."""
    v: Any
    """The same with d_v."""
    seqused: Any = None
    """(batch) int32: rows in use, before those that a call appends; None: all. It stays as it is."""
    page_table: Any = None
    """(batch, most_pages) int32: row r of sequence b is row r % page_size of page page_table[b, r // page_size]."""
    batch: Any = None
    """(batch) int32: the sequence of k and v of each sequence of q; k and v may have more then."""
    leftpad: Any = None
    """(batch) int32: rows in front of the first key of each sequence."""
    k_descale: Any = None
    """(batch|1, heads_kv|1) float32, with k and v of float8_e4m3fn: what the elements of k are multiplied by; None: 1."""
    v_descale: Any = None
    """The same for v."""


class Rotary(NamedTuple):
    """Rotary position embedding of q and of the rows that are appended (RoFormer, https://arxiv.org/abs/2104.09864, equation 34)."""

    cos: Any
    """(positions, r / 2), float32 or the type of q: the first r elements of each row are rotated."""
    sin: Any
    """As cos."""
    interleaved: bool = False
    """Pairs are elements 2j and 2j + 1; else j and j + r / 2."""
    positions: Any = None
    """(batch) int32: of the first row that each sequence appends, and of its first query; None: the rows in use. Without causal and
    window all queries of a sequence are rotated as the first."""


_NO_ROTATION = Rotary(None, None)
_PLACES = frozenset(("seqused_k", "page_table", "cache_batch", "leftpad_k", "k_descale", "v_descale"))


def options_of(cache: Cache) -> dict[str, Any]:
    """The options of attend that say where the rows of each sequence lie."""
    return {
        "seqused_k": cache.seqused,
        "page_table": cache.page_table,
        "cache_batch": cache.batch,
        "leftpad_k": cache.leftpad,
        "k_descale": cache.k_descale,
        "v_descale": cache.v_descale,
    }


def append_and_attend(
    q: Any,
    k: Any,
    v: Any,
    cache: Cache,
    rotary: Rotary | None,
    options: dict[str, Any],
    *,
    starts: Any = None,
    need_lse: bool = True,
    out: Any = None,
) -> tuple[Any, Any]:
    """(o, lse), lse None unless need_lse: writes the rows of k and v behind those in use of the cache, then attends over it.

    q, k, v: (batch, rows, heads, size); k and v packed (total, heads, size) with `starts` (batch + 1), q with cu_seqlens_q among the
    `options` of attend. out: as o, gets the result. Arrays of PyTorch under torch.compile, and subclasses of tensors, go through
    its operator.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor) and not _is_run_now(torch, q, k, v):
        o, lse = _append_in_graph(q, k, v, cache, rotary, options, starts)
        return (o if out is None else out.copy_(o)), lse
    new = {"k_new": k, "v_new": v, "cu_seqlens_k_new": starts}
    if rotary is not None:
        new |= {
            "rotary_cos": rotary.cos,
            "rotary_sin": rotary.sin,
            "rotary_positions": rotary.positions,
            "rotary_interleaved": rotary.interleaved,
        }
    options = {**options, **options_of(cache)}
    o_shape, lse_shape = output_shapes(q, cache.v, options.get("cu_seqlens_q") is not None)
    results = results_like(q)
    o = results.output(o_shape, q) if out is None else out
    lse = results.empty(lse_shape) if need_lse else None
    _core.forward(q=q, k=cache.k, v=cache.v, o=o, lse=lse, **new, **traced(options))
    return (o if out is not None else results.done(o)), (results.done(lse) if need_lse else None)


def _is_run_now(torch: Any, *tensors: Any) -> bool:
    from .torch import _attend

    return not torch.compiler.is_compiling() and _attend.is_plain(*tensors)


def _append_in_graph(
    q: Any, k: Any, v: Any, cache: Cache, rotary: Rotary | None, options: dict[str, Any], starts: Any
) -> tuple[Any, Any]:
    """append_and_attend as an operator of PyTorch; always with lse."""
    import torch

    options = complete({**options, **options_of(cache)})
    turned = (None, None, None, False) if rotary is None else (rotary.cos, rotary.sin, rotary.positions, rotary.interleaved)
    found = torch.ops.fovea.append(q, cache.k, cache.v, k, v, starts, *turned, *options.values())
    return found[0], found[1]


def read_options(v: Any, cache: Cache, rotary: Rotary | None, options: dict[str, Any]) -> dict[str, Any]:
    """The options of attend over a cache that is only read: q, cache.k and cache.v with them. `v`: beside k, which is None."""
    if v is not None:
        _refuse_one_of_two()
    if rotary is not None:
        raise ValueError("rotary: got angles without k and v; expected new keys to rotate; rotate q before the call")
    _check_options(cache, options)
    return {**options, **options_of(cache)}


def _is_not_traced() -> bool:
    return False


def _find_checks(q: Any) -> tuple[Callable[[], bool], tuple[Callable[[], bool], ...] | None]:
    """For a type seen for the first time: the checks of arrays without gradients, or of PyTorch, which brings them when it is imported."""
    checks_of_types.setdefault(type(q), (_is_not_traced, None))
    if framework(q) == "torch":
        from . import torch as _  # noqa: F401
    return checks_of_types[type(q)]


def attend(q: Any, k: Any, v: Any, return_lse: bool, cache: Cache, rotary: Rotary | None, options: dict[str, Any]) -> Any:
    """fovea.attend with `cache` and new keys; takes cu_seqlens_k out of the options."""
    if v is None:
        _refuse_one_of_two()
    _check_options(cache, options)
    starts = options.pop("cu_seqlens_k", None)
    is_traced, checks = checks_of_types.get(type(q)) or _find_checks(q)
    if not is_traced():
        turned = _NO_ROTATION if rotary is None else rotary
        made = _core.attend(
            q,
            cache.k,
            cache.v,
            return_lse,
            False,
            checks,
            options,
            seqused_k=cache.seqused,
            page_table=cache.page_table,
            cache_batch=cache.batch,
            leftpad_k=cache.leftpad,
            k_descale=cache.k_descale,
            v_descale=cache.v_descale,
            k_new=k,
            v_new=v,
            cu_seqlens_k_new=starts,
            rotary_cos=turned.cos,
            rotary_sin=turned.sin,
            rotary_positions=turned.positions,
            rotary_interleaved=turned.interleaved,
        )
        if made is not None:
            return made
    return _attend_generally(q, k, v, return_lse, cache, rotary, starts, options)


def _attend_generally(
    q: Any, k: Any, v: Any, return_lse: bool, cache: Cache, rotary: Rotary | None, starts: Any, options: dict[str, Any]
) -> Any:
    """attend, of arrays of any library, under torch.compile, and with functions for expressions."""
    name = framework(q)
    if name == "jax":
        raise TypeError("cache: got arrays of JAX, which cannot be written; expected another library's")
    if name == "torch":
        import torch

        if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, cache.k, cache.v)):
            raise ValueError("cache: got tensors that need gradients; expected none, as the cache is written; use torch.no_grad()")
    o, lse = append_and_attend(q, k, v, cache, rotary, options, starts=starts, need_lse=return_lse)
    return (o, lse) if return_lse else o


def _refuse_one_of_two() -> None:
    raise ValueError("k, v: got one of the two; expected both or neither, as there is cache; give the new keys with their values")


def _check_options(cache: Cache, options: dict[str, Any]) -> None:
    if _PLACES.isdisjoint(options):
        return
    for argument, value in options_of(cache).items():
        if value is not None and options.get(argument) is not None:
            raise ValueError(f"{argument}: got an array beside cache; expected it in the cache")
