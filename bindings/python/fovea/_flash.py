"""The code under fovea.flash_attn and fovea.flash_attn_interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _core, _rotary
from ._arguments import pair
from .torch import _attend, _ops

# Bound once: each attribute look-up would cost a call about 30 ns.
_is_compiling = torch.compiler.is_compiling
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_attend_now = _core.attend
_CHECKS = _attend.CHECKS_WITHOUT_AUTOCAST  # flash-attn casts nothing under torch.autocast
_attend_output = _attend.attend_output
_is_plain = _attend.is_plain
_is_grad_enabled = torch.is_grad_enabled
# The largest head size of the library: so many columns of a value matrix fit one call.
_MOST_COLUMNS = 576


def refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for arguments that are not None: Fovea does not have them."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(f"fovea: got {', '.join(given)}, which Fovea does not have; leave it out")


def _checked(q: Any, k: Any, v: Any, softmax_scale: float | None, window_size: Sequence[int]) -> tuple[int, int]:
    """window_size as two integers; raises ValueError or TypeError, by flash-attn's names of arguments."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor; convert it")
    if softmax_scale == 0:
        raise ValueError("softmax_scale: got 0; expected another number, or None for 1/sqrt(head size)")
    return pair(window_size, "window_size")


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    deterministic: bool,
    need_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(o, lse) without dropout and ALiBi. This is the fast path: few Python calls, most checks in the compiled part."""
    if not _dynamo_compiling() and softmax_scale != 0 and type(window_size) is tuple and len(window_size) == 2:
        made = _attend_now(
            q,
            k,
            v,
            need_lse,
            False,
            _CHECKS,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap if softcap > 0 else None,
        )
        if made is not None:
            return made if need_lse else (made, None)
        if not need_lse and _is_grad_enabled() and _is_plain(q, k, v) and (q.requires_grad or k.requires_grad or v.requires_grad):
            options = {
                "scale": softmax_scale,
                "causal": causal,
                "window": window_size,
                "softcap": max(softcap, 0.0),
                "deterministic": deterministic,
            }
            return _attend_output(q, k, v, options), None
    return general(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, need_lse)


def general(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    deterministic: bool,
    need_lse: bool,
    draw_seed: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(o, lse) with any other option of fovea.attend in `others`; draw_seed: the seed comes from PyTorch's generator."""
    options = {
        "scale": softmax_scale,
        "causal": causal,
        "window": _checked(q, k, v, softmax_scale, window_size),
        "softcap": max(softcap, 0.0),
        "deterministic": deterministic,
        **others,
    }
    return _attend.attend_any(q, k, v, options, draw_seed=draw_seed, need_lse=need_lse)


def with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    deterministic: bool,
    return_attn_probs: bool,
    **others: Any,
) -> Any:
    """What flash-attn 2 returns: o, or (o, lse, S_dmask)."""
    settings = (softmax_scale, causal, window_size, softcap, deterministic)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}; expected a probability in [0, 1); 0 is none")
    draw_seed = False
    if dropout_p > 0:
        others["dropout"] = dropout_p
        # S_dmask is computed by further calls, which need the seed; a program that compiles cannot draw it here.
        draw_seed = _is_compiling() and not return_attn_probs
        if not draw_seed:
            others["seed"] = _ops.draw_seed()
    o, lse = general(q, k, v, *settings, return_attn_probs, draw_seed, **others)
    if not return_attn_probs:
        return o
    with torch.no_grad():
        mask = _weights(q, k, settings, others) if dropout_p > 0 else q.new_empty(0)
    return o, lse, mask


def _weights(q: Tensor, k: Tensor, settings: tuple[Any, ...], others: dict[str, Any]) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k): the softmax's weights, negative where dropout dropped them.

    With the identity as V, attention returns its weights. One run with dropout and one without give the sign. Works on
    _MOST_COLUMNS columns at a time.
    """
    starts_q, starts_k = others.get("cu_seqlens_q"), others.get("cu_seqlens_k")
    heads_k = k.shape[-2]
    if starts_q is None:
        batch, longest_q, longest_k = q.shape[0], q.shape[1], k.shape[1]
        column = torch.arange(longest_k, device=q.device).expand(batch, -1)
    else:
        batch, longest_q, longest_k = len(starts_q) - 1, others["max_seqlen_q"], others["max_seqlen_k"]
        sequence_k, column = _rotary.sequence_and_place(starts_k, k.shape[0])
        sequence_q, row = _rotary.sequence_and_place(starts_q, q.shape[0])
    weights = q.new_zeros((batch, q.shape[-2], longest_q, longest_k))
    without = {name: value for name, value in others.items() if name not in ("dropout", "seed")}
    for first in range(0, longest_k, _MOST_COLUMNS):
        columns = torch.arange(first, min(first + _MOST_COLUMNS, longest_k), device=q.device)
        identity = (column.unsqueeze(-1) == columns).to(q.dtype).unsqueeze(-2)
        v = identity.expand(*identity.shape[:-2], heads_k, len(columns))
        kept, _ = general(q, k, v, *settings, False, **others)
        whole, _ = general(q, k, v, *settings, False, **without)
        signed = torch.where((kept == 0) & (whole > 0), -whole, whole)
        if starts_q is None:
            weights[..., first : first + len(columns)] = signed.transpose(1, 2)
        else:
            used = row < longest_q
            weights[sequence_q[used], :, row[used], first : first + len(columns)] = signed[used]
    return weights


# ---- the two passes one by one: what programs that join attention over several GPUs call


def forward_pass(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax: bool,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask, rng_state) without autograd. rng_state: (2,) int64 on the CPU, for backward_pass."""
    settings = (softmax_scale, causal, window_size, softcap, False)
    seed = 0
    if dropout_p > 0:
        seed = _ops.draw_seed()
        others |= {"dropout": dropout_p, "seed": seed}
    with torch.no_grad():
        o, lse = general(q, k, v, *settings, True, **others)
        mask = _weights(q, k, settings, others) if return_softmax and dropout_p > 0 else q.new_empty(0)
    return o, lse, mask, torch.tensor([seed, 0])


def backward_pass(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    deterministic: bool,
    rng_state: Tensor | None,
    **others: Any,
) -> Tensor:
    """Writes into `gradients` (dq, dk, dv). Returns softmax_d without elements: Fovea keeps it to itself."""
    options = {
        "scale": softmax_scale,
        "causal": causal,
        "window": _checked(q, k, v, softmax_scale, window_size),
        "softcap": max(softcap, 0.0),
        "deterministic": deterministic,
        **others,
    }
    if dropout_p > 0:
        if rng_state is None:
            raise ValueError("rng_state: got None beside dropout; expected what the forward returned; give it")
        options |= {"dropout": dropout_p, "seed": int(rng_state[0])}
    with torch.no_grad():
        _attend.backward_pass(dout, q, k, v, out, softmax_lse, options, gradients)
    return softmax_lse.new_empty(0)


# ---- key-value caches


@torch.no_grad()
def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    rotary_interleaved: bool,
    alibi_slopes: Tensor | None,
    return_softmax_lse: bool,
) -> Any:
    """o, or (o, lse): rotates q and k, writes k and v into the cache behind cache_seqlens, and attends over the cache.

    Shapes are those of fovea.flash_attn.flash_attn_with_kvcache.
    """
    window_size = _checked(q, k_cache, v_cache, softmax_scale, window_size)
    _check_cache(k_cache, v_cache, k, v, rotary_cos, rotary_sin)
    used = cache_seqlens
    if isinstance(used, int):
        used = torch.full((q.shape[0],), used, dtype=torch.int32, device=q.device)
    if k is not None and k.shape[1] > 0:
        used = _check_room(used, q.shape[0], k.shape[1], k_cache.shape[1])
        if rotary_cos is not None:
            every_row = causal or window_size != (-1, -1)
            q = _rotate_behind(q, used, rotary_cos, rotary_sin, rotary_interleaved, every_row)
            k = _rotate_behind(k, used, rotary_cos, rotary_sin, rotary_interleaved, True)
        _append(k_cache, k, used, cache_batch_idx)
        _append(v_cache, v, used, cache_batch_idx)
        used = used + k.shape[1]
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
    settings = (softmax_scale, causal, window_size, softcap, False)
    seqused_k = None if used is None else used.to(torch.int32)
    o, lse = general(q, k_cache, v_cache, *settings, return_softmax_lse, alibi=alibi_slopes, seqused_k=seqused_k)
    return (o, lse) if return_softmax_lse else o


def _check_cache(
    k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> None:
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of the two; expected both or neither; give the new keys with their values")
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos, rotary_sin: got one of the two; expected both or neither")
    if cos is not None and k is None:
        raise ValueError("rotary_cos: got a tensor without k and v; expected new keys to rotate; rotate q before the call")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("k_cache, v_cache: the last dimension is not contiguous; expected it to be; copy the cache")


def _check_room(used: Tensor | None, batch: int, added: int, size: int) -> Tensor:
    """used (batch): how much of a cache of `size` rows is in use, where `added` rows fit behind."""
    if used is None:
        raise ValueError("cache_seqlens: got None beside new keys; expected how much of the cache is in use; give it")
    used = used.expand(batch)
    if used.device.type == "cpu" and batch and int(used.max()) + added > size:
        raise ValueError(
            f"k: got {added} new keys behind {int(used.max())}; expected at most {size} together, the "
            "size of the cache; make the cache larger"
        )
    return used


def _rotate_behind(x: Tensor, used: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, every_row: bool) -> Tensor:
    """x (batch, rows, heads, size) turned by the positions behind `used`; not every_row: all rows by the first of them."""
    position = used.long().unsqueeze(1)
    if every_row:
        position = position + torch.arange(x.shape[1], device=x.device)
    return _rotary.rotate(x, cos[position], sin[position], interleaved)


def _append(cache: Tensor, new: Tensor, used: Tensor, rows: Tensor | None) -> None:
    """Writes new (batch, n, heads, size) into the rows of the cache (batch_cache, seqlen_cache, heads, size) behind `used`."""
    rows = torch.arange(len(used), device=cache.device) if rows is None else rows.long()
    places = used.long().unsqueeze(1) + torch.arange(new.shape[1], device=cache.device)
    cache[rows.unsqueeze(1), places] = new.to(cache.dtype)
