"""Key-value caches under fovea.flash_attn and fovea.flash_attn_interface: rotates, appends, and attends over the cache.

A cache is (sequences, rows, heads, size), or with a table of pages (pages, page, heads, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _cache, _core, _flash, _rotary
from .torch import _attend, _ops
from .torch._arrays import output_type

# Bound once: each attribute look-up would cost a call about 30 ns.
_attend_now = _core.attend
_CHECKS = _attend.CHECKS_WITHOUT_GRADIENTS
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_FLOAT8 = torch.float8_e4m3fn


class Cache(NamedTuple):
    """The cache, and what says where the rows of each sequence lie in it."""

    k: Tensor
    v: Tensor
    used: int | Tensor | None
    """Rows of each sequence before the call; None: all."""
    chosen: Tensor | None
    """(batch): the sequence of the cache of each sequence."""
    leftpad: Tensor | None
    pages: Tensor | None
    """(batch, most pages)."""
    k_descale: Tensor | None = None
    """(batch, heads): what the elements of k of float8_e4m3fn are multiplied by."""
    v_descale: Tensor | None = None

    def capacity(self) -> int:
        return self.k.shape[1] if self.pages is None else self.pages.shape[1] * self.k.shape[1]


class New(NamedTuple):
    """Keys and values to append, (batch, rows, heads, size), or packed (total, heads, size) with `starts`."""

    k: Tensor | None
    v: Tensor | None
    starts: Tensor | None = None


class Rotary(NamedTuple):
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    positions: Tensor | None = None
    """(batch): of the first new row of each sequence; None: the rows of the cache in use."""


class Queries(NamedTuple):
    """(batch, rows, heads, size), or packed (total, heads, size) with `starts`."""

    q: Tensor
    starts: Tensor | None = None
    longest: int | None = None

    def batch(self) -> int:
        return self.q.shape[0] if self.starts is None else len(self.starts) - 1


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    pages: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | None,
    softcap: float,
    return_softmax_lse: bool,
    starts_q: Tensor | None = None,
    longest_q: int | None = None,
    starts_new: Tensor | None = None,
    rotary_positions: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """o, or (o, lse): rotates q and k, writes k and v into the cache behind the rows in use, and attends over the cache.

    Arguments are those of fovea.flash_attn.flash_attn_with_kvcache and of the one of fovea.flash_attn_interface, in the shapes that the
    classes above tell. `others`: further options of fovea.attend. This is the fast path: one call of the compiled part.
    """
    if type(cache_seqlens) is Tensor and not _dynamo_compiling():
        try:
            made = _attend_now(
                q,
                k_cache,
                v_cache,
                return_softmax_lse,
                False,
                _CHECKS,
                others,
                o=out,
                cu_seqlens_q=starts_q,
                seqused_k=cache_seqlens,
                page_table=pages,
                cache_batch=cache_batch_idx,
                leftpad_k=cache_leftpad,
                k_descale=k_descale,
                v_descale=v_descale,
                k_new=k,
                v_new=v,
                cu_seqlens_k_new=starts_new,
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_positions=rotary_positions,
                scale=softmax_scale,
                causal=causal,
                window=window_size,
                softcap=softcap,
                max_seqlen_q=longest_q,
                rotary_interleaved=rotary_interleaved,
            )
        except (TypeError, ValueError):
            made = None  # nothing is written; below tensors are converted, or the error gets flash-attn's names
        if made is not None:
            return made
    return _attend_converted(
        Queries(q, starts_q, longest_q),
        Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, pages, k_descale, v_descale),
        New(k, v, starts_new),
        Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_positions),
        {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap, **others},
        return_softmax_lse,
        out,
    )


# Rows cannot be appended by an operator of a graph where expressions say which keys are seen.
attend_outside_graph = torch.compiler.disable(attend)


@torch.no_grad()
def _attend_converted(
    queries: Queries, cache: Cache, new: New, rotary: Rotary, options: dict[str, Any], need_lse: bool, out: Tensor | None
) -> Any:
    """attend, of tensors that have to be converted first, under torch.compile, and with an int for the rows in use."""
    q = queries.q
    window = _flash.checked(q, cache.k, cache.v, options["scale"], options["window"])
    _check(cache, new, rotary)
    _flash.check_chunks(options, q, cache.k, cache.v)
    options |= {"window": window, "softcap": max(options["softcap"], 0.0)}
    if queries.starts is not None:
        options |= {"cu_seqlens_q": queries.starts, "max_seqlen_q": int(queries.longest or 0)}
    places = _places(cache, queries.batch(), q.device)
    if new.k is not None:
        return _appended(q, new, places, rotary, options, need_lse, out)
    o, lse = _attend.attend_any(q, cache.k, cache.v, options | _cache.options_of(places), need_lse=need_lse)
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if need_lse else o


def _appended(
    q: Tensor, new: New, cache: _cache.Cache, rotary: Rotary, options: dict[str, Any], need_lse: bool, out: Tensor | None
) -> Any:
    """The same behind new rows."""
    if cache.seqused is None:
        raise ValueError("cache_seqlens: got None beside new keys; expected how much of the cache is in use; give it")
    kind = output_type(q)
    turned = None
    if rotary.cos is not None:
        positions = None if rotary.positions is None else rotary.positions.to(torch.int32)
        turned = _cache.Rotary(_angles(rotary.cos, kind), _angles(rotary.sin, kind), rotary.interleaved, positions)
    if cache.k.dtype != _FLOAT8:
        kind = cache.k.dtype
    k, v = (
        _ops.contiguous_rows((x if x.dtype != _FLOAT8 else _described_by(x, factors, new.starts)).to(kind))
        for x, factors in ((new.k, cache.k_descale), (new.v, cache.v_descale))
    )
    q = _ops.contiguous_rows(q)
    o, lse = _cache.append_and_attend(q, k, v, cache, turned, options, starts=new.starts, need_lse=need_lse, out=out)
    return (o, lse) if need_lse else o


def _described_by(new: Tensor, factors: Tensor | None, starts: Tensor | None) -> Tensor:
    """What rows of 8 bits stand for: the library divides by the factors, and rounds to what they were."""
    if factors is None:
        return new
    if starts is None:
        return new.float() * factors[:, None, :, None]
    sequence, _ = _rotary.sequence_and_place(starts, new.shape[0])
    return new.float() * factors.expand(len(starts) - 1, -1)[sequence][..., None]


def _angles(table: Tensor, kind: torch.dtype) -> Tensor:
    return _ops.contiguous_rows(table if table.dtype in (kind, torch.float32) else table.float())


def _check(cache: Cache, new: New, rotary: Rotary) -> None:
    if (new.k is None) != (new.v is None):
        raise ValueError("k, v: got one of the two; expected both or neither; give the new keys with their values")
    if (rotary.cos is None) != (rotary.sin is None):
        raise ValueError("rotary_cos, rotary_sin: got one of the two; expected both or neither")
    if rotary.cos is not None and new.k is None:
        raise ValueError("rotary_cos: got a tensor without k and v; expected new keys to rotate; rotate q before the call")
    if cache.k.stride(-1) != 1 or cache.v.stride(-1) != 1:
        raise ValueError("k_cache, v_cache: the last dimension is not contiguous; expected it to be; copy the cache")
    if cache.chosen is not None and cache.pages is not None:
        raise ValueError("cache_batch_idx: got a tensor beside a table of pages; expected one of the two; leave one out")


def _places(cache: Cache, batch: int, device: torch.device) -> _cache.Cache:
    """The cache as fovea.attend takes it. A table of pages always comes with the rows in use."""
    used = cache.used
    if used is None and cache.pages is not None:
        used = cache.capacity()
    if isinstance(used, int):
        used = torch.full((batch,), used, dtype=torch.int32, device=device)
    elif used is not None:
        used = used.expand(batch)
    lists = (None if x is None else x.to(torch.int32).contiguous() for x in (used, cache.pages, cache.chosen, cache.leftpad))
    return _cache.Cache(cache.k, cache.v, *lists, cache.k_descale, cache.v_descale)
