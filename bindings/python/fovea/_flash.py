"""What fovea.flash_attn and fovea.flash_attn_interface share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _core
from ._arguments import pair
from .torch import _attend, _ops

_is_compiling = torch.compiler.is_compiling
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_attend_now = _core.attend
_attend_output = _attend.attend_output
# How many columns of a value matrix the library takes (its largest head size).
_MOST_COLUMNS = 576


def refuse(**arguments: Any) -> None:
    """NotImplementedError for arguments that are given and that Fovea does not have."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(f"fovea: got {', '.join(given)}, which Fovea does not have; leave it out")


def _checked(q: Any, k: Any, v: Any, softmax_scale: float | None, window_size: Sequence[int]) -> tuple[int, int]:
    """window_size as two integers."""
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
    """(o, lse) without dropout and ALiBi: the way that has to be short."""
    if (
        not _dynamo_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and softmax_scale != 0
        and type(window_size) is tuple
        and len(window_size) == 2
        and not _functorch_active()
        and not _dispatch_modes()
    ):
        left, right = window_size
        if not _is_grad_enabled() or not (q.requires_grad or k.requires_grad or v.requires_grad):
            made = _attend_now(
                q,
                k,
                v,
                need_lse,
                False,
                scale=softmax_scale,
                causal=causal,
                window_left=left,
                window_right=right,
                softcap=softcap if softcap > 0 else None,
            )
            if made is not None:
                return made if need_lse else (made, None)
        elif not need_lse:
            arguments = {
                "scale": softmax_scale,
                "causal": causal,
                "window_left": left,
                "window_right": right,
                "softcap": max(softcap, 0.0),
                "deterministic": deterministic,
            }
            return _attend_output(q, k, v, arguments), None
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
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """(o, lse), in every way that Fovea has; `others` are named as the compiled part names them."""
    left, right = _checked(q, k, v, softmax_scale, window_size)
    arguments = {
        "scale": softmax_scale,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "softcap": max(softcap, 0.0),
        "deterministic": deterministic,
        **others,
    }
    return _attend.attend_any(q, k, v, arguments, need_lse=need_lse)


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
    if dropout_p > 0 and (return_attn_probs or not _is_compiling()):
        others |= {"dropout": dropout_p, "seed": _ops.draw_seed()}
        o, lse = general(q, k, v, *settings, return_attn_probs, **others)
    elif dropout_p > 0:
        left, right = _checked(q, k, v, softmax_scale, window_size)
        arguments = {
            "scale": softmax_scale,
            "causal": causal,
            "window_left": left,
            "window_right": right,
            "softcap": max(softcap, 0.0),
            "deterministic": deterministic,
            "dropout": dropout_p,
            **others,
        }
        o, lse = _attend.attend_any(q, k, v, arguments, draw_seed=True)
    else:
        o, lse = general(q, k, v, *settings, return_attn_probs, **others)
    if not return_attn_probs:
        return o
    with torch.no_grad():
        mask = _weights(q, k, settings, others) if dropout_p > 0 else q.new_empty(0)
    return o, lse, mask


def _weights(q: Tensor, k: Tensor, settings: tuple[Any, ...], others: dict[str, Any]) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k): the softmax's weights, negative where they were dropped.

    Attention over values that are columns of the identity is the matrix of weights itself. Done once with dropout and once
    without, as the sign tells them apart; some columns at a time.
    """
    starts_q, starts_k = others.get("cu_seqlens_q"), others.get("cu_seqlens_k")
    heads_k = k.shape[-2]
    if starts_q is None:
        batch, longest_q, longest_k = q.shape[0], q.shape[1], k.shape[1]
        column = torch.arange(longest_k, device=q.device).expand(batch, -1)
    else:
        batch, longest_q, longest_k = len(starts_q) - 1, others["max_seqlen_q"], others["max_seqlen_k"]
        sequence_k, column = _places(starts_k, k.shape[0])
        sequence_q, row = _places(starts_q, q.shape[0])
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


def _places(starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each packed row its sequence and its place there; rows past the last sequence get the last one."""
    rows = torch.arange(total, device=starts.device)
    sequence = (torch.searchsorted(starts[1:].contiguous(), rows, right=True)).clamp(max=len(starts) - 2)
    return sequence, rows - starts[sequence]


# ---- key-value caches


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of (batch, seqlen, heads, size) by (batch, seqlen, size of rotation / 2), in float32."""
    size = 2 * cos.shape[-1]
    turned, rest = x[..., :size].float(), x[..., size:]
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


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
    window_size = _checked(q, k_cache, v_cache, softmax_scale, window_size)
    if (k is None) != (v is None):
        raise ValueError("k, v: got one of the two; expected both or neither; give the new keys with their values")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos, rotary_sin: got one of the two; expected both or neither")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos: got a tensor without k and v; expected new keys to rotate; rotate q before the call")
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ValueError("k_cache, v_cache: the last dimension is not contiguous; expected it to be; copy the cache")
    batch, seqlen_q = q.shape[0], q.shape[1]
    used = cache_seqlens
    if isinstance(used, int):
        used = torch.full((batch,), used, dtype=torch.int32, device=q.device)
    added = 0 if k is None else k.shape[1]
    if added:
        if used is None:
            raise ValueError("cache_seqlens: got None beside new keys; expected how much of the cache is in use; give it")
        used = used.expand(batch)
        if used.device.type == "cpu" and batch and int(used.max()) + added > k_cache.shape[1]:
            raise ValueError(
                f"k: got {added} new keys behind {int(used.max())}; expected at most {k_cache.shape[1]} together, the "
                "size of the cache; make the cache larger"
            )
        places = used.long().unsqueeze(1) + torch.arange(added, device=q.device)
        if rotary_cos is not None:
            k = _rotate(k, rotary_cos[places], rotary_sin[places], rotary_interleaved)
            if causal or window_size != (-1, -1):
                at = used.long().unsqueeze(1) + torch.arange(seqlen_q, device=q.device)
            else:
                at = used.long().unsqueeze(1).expand(-1, seqlen_q)
            q = _rotate(q, rotary_cos[at], rotary_sin[at], rotary_interleaved)
        rows = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx.long()
        k_cache[rows.unsqueeze(1), places] = k.to(k_cache.dtype)
        v_cache[rows.unsqueeze(1), places] = v.to(v_cache.dtype)
        used = used + added
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[cache_batch_idx.long()], v_cache[cache_batch_idx.long()]
    o, lse = general(
        q,
        k_cache,
        v_cache,
        softmax_scale,
        causal,
        window_size,
        softcap,
        False,
        return_softmax_lse,
        alibi=alibi_slopes,
        seqused_k=None if used is None else used.to(torch.int32),
    )
    return (o, lse) if return_softmax_lse else o
