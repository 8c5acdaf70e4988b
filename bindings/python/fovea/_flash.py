"""The code under fovea.flash_attn and fovea.flash_attn_interface."""

from __future__ import annotations

import operator
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
_FLOAT8 = torch.float8_e4m3fn
# The largest head size of the library: so many columns of a value matrix fit one call.
_MOST_COLUMNS = 576


def one_of(first: Tensor | None, second: Tensor | None, names: str) -> Tensor | None:
    """The one that is given, for it is one thing of two names."""
    if first is None:
        return second
    if second is not None:
        raise ValueError(f"{names}: got both; expected one of the two, as they are one thing; leave one out")
    return first


def sink_of(s_aux: Tensor | None, sinks: Tensor | None) -> Tensor | None:
    """The one that is given, in float32."""
    sink = one_of(s_aux, sinks, "s_aux, sinks")
    return None if sink is None else sink.float()


def options_of(
    q: Tensor,
    k: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    attention_chunk: int,
    sm_margin: int,
) -> dict[str, Any]:
    """Options of fovea.attend: the factors of what has 8 bits, and what is not 0. flash-attn ignores other factors; vLLM always gives
    them."""
    options: dict[str, Any] = {}
    if k.dtype == _FLOAT8:
        options = {"k_descale": k_descale, "v_descale": v_descale}
        if q.dtype == _FLOAT8:
            options["q_descale"] = q_descale
    if attention_chunk:
        # Both sides round down, so queries in front of the first key lie in chunks without keys.
        chunk = _keys_of_chunk(attention_chunk)
        options["sees"] = f"k / {chunk} == (q + nk - nq) / {chunk}"
    if sm_margin:
        options["sm_margin"] = sm_margin
    return options


def _keys_of_chunk(attention_chunk: int) -> int:
    try:
        chunk = operator.index(attention_chunk)
    except TypeError:
        raise TypeError(f"attention_chunk: got {attention_chunk!r}; expected an integer; convert it") from None
    if chunk <= 0:
        raise ValueError(f"attention_chunk: got {chunk}; expected how many keys a chunk has, or 0 for none; correct it")
    return chunk


def within_chunk(window_size: Sequence[int] | None, attention_chunk: int) -> tuple[int, int]:
    """The part of window_size that a query's chunk may reach to: a window bounds the keys that kernels go through, `sees` alone does
    not."""
    longest = _keys_of_chunk(attention_chunk) - 1
    left, right = (-1, -1) if window_size is None else pair(window_size, "window_size")
    return longest if left < 0 else min(left, longest), longest if right < 0 else min(right, longest)


def check_chunks(options: dict[str, Any], *tensors: Tensor) -> None:
    """Raises NotImplementedError where a mask of chunks meets tensors that the host cannot read."""
    if options.get("sees") is not None and not _is_compiling() and not _is_plain(*tensors):
        raise NotImplementedError(
            "attention_chunk: got it under torch.func, a dispatch mode, or with a subclass of tensors; expected plain tensors; leave "
            "it out, and give fovea.attend a mask of the chunks"
        )


def refuse_ranks(cp_world_size: int, cp_rank: int) -> None:
    """Raises NotImplementedError: keys are spread over ranks, key j on rank j % cp_world_size."""
    raise NotImplementedError(
        f"cp_world_size, cp_rank: got {cp_world_size} and {cp_rank}; expected 1 and 0, as the keys of a call lie on one rank; "
        "gather them, or use fovea.torch.distributed"
    )


def checked(q: Any, k: Any, v: Any, softmax_scale: float | None, window_size: Sequence[int] | None) -> tuple[int, int]:
    """window_size as two integers, None as unlimited; raises ValueError or TypeError, by flash-attn's names of arguments."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor; convert it")
    if softmax_scale == 0:
        raise ValueError("softmax_scale: got 0; expected another number, or None for 1/sqrt(head size)")
    return (-1, -1) if window_size is None else pair(window_size, "window_size")


def splits_of(num_splits: int, k: Tensor) -> int:
    """num_splits of flash-attn as fovea.attend takes it: less than 1 leaves the number to the library. So do keys of 8 bits on GPUs:
    the kernels for few queries divide keys themselves, and a given number would choose slower ones."""
    return 0 if k.dtype == _FLOAT8 and k.is_cuda else max(int(num_splits), 0)


def packed(
    starts_q: Tensor,
    starts_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    used_k: Tensor | None,
    pages: Tensor | None,
) -> dict[str, Any]:
    """Options of fovea.attend for packed queries over keys that are packed, or in pages: then starts_k tells lengths alone."""
    options = {"cu_seqlens_q": starts_q, "max_seqlen_q": int(longest_q or 0), "seqused_k": used_k}
    if pages is not None:
        if used_k is None and starts_k is None:
            raise ValueError("seqused_k: got None beside a table of pages; expected the length of each sequence; give it")
        used = starts_k.diff() if used_k is None else used_k
        return options | {"seqused_k": used.to(torch.int32), "page_table": pages.to(torch.int32).contiguous()}
    if starts_k is None:
        return options
    return options | {"cu_seqlens_k": starts_k, "max_seqlen_k": int(longest_k or 0)}


def packed_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    need_lse: bool,
    starts_q: Tensor,
    starts_k: Tensor | None,
    longest_q: int | None,
    longest_k: int | None,
    used_q: Tensor | None,
    used_k: Tensor | None,
    pages: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | None,
    softcap: float,
    alibi: Tensor | None,
    sink: Tensor | None,
    options: dict[str, Any],
    out: Tensor | None,
    qv: Tensor | None,
    num_splits: int,
) -> Any:
    """o, or (o, lse), of packed queries without gradients by one call of the compiled part; None where it takes more."""
    if _dynamo_compiling() or (pages is not None and used_k is None):
        return None
    if pages is not None:
        starts_k = None
    try:
        return _attend_now(
            q,
            k,
            v,
            need_lse,
            False,
            _CHECKS,
            options,
            o=out,
            alibi=alibi,
            sink=sink,
            cu_seqlens_q=starts_q,
            cu_seqlens_k=starts_k,
            seqused_q=used_q,
            seqused_k=used_k,
            page_table=pages,
            qv=qv,
            num_splits=num_splits,
            scale=softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap,
            max_seqlen_q=longest_q,
            max_seqlen_k=None if starts_k is None else longest_k,
        )
    except (TypeError, ValueError):
        return None  # the general path converts tensors, or gives the error flash-attn's names


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
    num_splits: int = 0,
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
            num_splits=num_splits if num_splits > 0 else None,
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
                "num_splits": max(num_splits, 0),
            }
            return _attend_output(q, k, v, options), None
    settings = (softmax_scale, causal, window_size, softcap, deterministic)
    return general(q, k, v, *settings, need_lse, num_splits=max(num_splits, 0))


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
    window = checked(q, k, v, softmax_scale, window_size)
    check_chunks(others, q, k, v)
    options = {
        "scale": softmax_scale,
        "causal": causal,
        "window": window,
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
    if starts_q is not None and starts_k is None:
        raise NotImplementedError("fovea: S_dmask of keys that are not packed is not there; leave out return_attn_probs or dropout_p")
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
        "window": checked(q, k, v, softmax_scale, window_size),
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
