"""Key-value caches under fovea.flash_attn and fovea.flash_attn_interface: rotates, appends, and attends over the cache.

A cache is (sequences, rows, heads, size), or with a table of pages (pages, page, heads, size).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _flash, _rotary


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


@torch.no_grad()
def attend(
    queries: Queries,
    cache: Cache,
    new: New,
    rotary: Rotary,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    return_softmax_lse: bool,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """o, or (o, lse): rotates q and k, writes k and v into the cache behind the rows in use, and attends over the cache.

    Shapes are those of fovea.flash_attn.flash_attn_with_kvcache and of the one of fovea.flash_attn_interface. `others`: further
    options of fovea.attend.
    """
    q = queries.q
    window_size = _flash.checked(q, cache.k, cache.v, softmax_scale, window_size)
    _check(cache, new, rotary)
    used = _used(cache, queries.batch(), q.device)
    if new.k is not None and new.k.shape[-3] > 0:
        if used is None:
            raise ValueError("cache_seqlens: got None beside new keys; expected how much of the cache is in use; give it")
        sequence, place, kept, lengths = _rows(new.k, new.starts)
        rows = used.long()[sequence] + place
        at = _places(cache, sequence, rows, kept, used, lengths)
        k = new.k
        if rotary.cos is not None:
            first = (used if rotary.positions is None else rotary.positions).long()
            q_sequence, q_place, *_ = _rows(q, queries.starts)
            every_row = causal or window_size != (-1, -1)
            q = _rotated(q, first[q_sequence] + q_place * int(every_row), rotary)
            k = _rotated(k, first[sequence] + place, rotary)
        for pool, x in ((cache.k, k), (cache.v, new.v)):
            pool[at] = (x if kept is None else x[kept]).to(pool.dtype)
        used = used + lengths
    options = {"seqused_k": None if used is None else used.to(torch.int32), **others}
    if queries.starts is not None:
        options |= {"cu_seqlens_q": queries.starts, "max_seqlen_q": int(queries.longest or 0)}
    places = _as_options(cache)
    o, lse = _flash.general(
        q, cache.k, cache.v, softmax_scale, causal, window_size, softcap, False, return_softmax_lse, **options, **places
    )
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if return_softmax_lse else o


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


def _used(cache: Cache, batch: int, device: torch.device) -> Tensor | None:
    """(batch) rows in use. A table of pages always comes with them."""
    used = cache.used
    if used is None and cache.pages is not None:
        used = cache.capacity()
    if isinstance(used, int):
        return torch.full((batch,), used, dtype=torch.int32, device=device)
    return None if used is None else used.expand(batch)


def _rows(x: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, int | Tensor]:
    """For the rows of x: sequence, place in it, which of them count (None: all), and how many each sequence has."""
    if starts is None:
        sequence = torch.arange(x.shape[0], device=x.device).unsqueeze(1).expand(x.shape[:2])
        return sequence, torch.arange(x.shape[1], device=x.device).expand(x.shape[:2]), None, x.shape[1]
    sequence, place = _rotary.sequence_and_place(starts, x.shape[0])
    kept = torch.arange(x.shape[0], device=x.device) < starts[-1]
    return sequence, place.masked_fill(~kept, 0), kept, starts.diff()


def _places(
    cache: Cache, sequence: Tensor, rows: Tensor, kept: Tensor | None, used: Tensor, lengths: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Indices into the cache of `rows` of sequences. Raises ValueError where the host may look and they do not fit."""
    on_host = rows.device.type == "cpu"
    behind = used + lengths
    if on_host and len(behind) and int(behind.max()) > cache.capacity():
        b = int(behind.argmax())
        raise ValueError(
            f"k: got {int(behind[b] - used[b])} new keys behind {int(used[b])} of sequence {b}; expected at most "
            f"{cache.capacity()} together, the size of the cache; make the cache larger"
        )
    if kept is not None:
        sequence, rows = sequence[kept], rows[kept]
    place = sequence if cache.chosen is None else cache.chosen.long()[sequence]
    name, argument = "cache_batch_idx", "sequences"
    if cache.pages is not None:
        place = cache.pages.long()[sequence, rows // cache.k.shape[1]]
        rows = rows % cache.k.shape[1]
        name, argument = "page table", "pages"
    wrong = (place < 0) | (place >= cache.k.shape[0])
    if on_host and bool(wrong.any()):
        raise ValueError(
            f"{name}: got {int(place[wrong][0])} for new keys of sequence {int(sequence[wrong][0])}; expected 0 to "
            f"{cache.k.shape[0] - 1}, the {argument} of the cache"
        )
    return place, rows


def _rotated(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    return _rotary.rotate(x, rotary.cos[positions], rotary.sin[positions], rotary.interleaved)


def _as_options(cache: Cache) -> dict[str, Tensor]:
    """The options of fovea.attend that say where the rows of k and v lie."""
    given = {"page_table": cache.pages, "cache_batch": cache.chosen, "leftpad_k": cache.leftpad}
    return {name: x.to(torch.int32).contiguous() for name, x in given.items() if x is not None}
