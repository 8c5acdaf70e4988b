"""flash-attn 2's interface: names, defaults and results of arguments are those of its functions.

Common to all:
    dropout_p: probability of dropping a weight; the seed comes from PyTorch's generator of the CPU.
    softmax_scale: of the scores; None is 1/sqrt(headdim).
    causal: aligned at the last query and the last key.
    window_size: (left, right) keys seen beside the diagonal, as a tuple, list, array or tensor; -1 is unlimited.
    softcap: c > 0 makes scores c tanh(score / c).
    alibi_slopes: (nheads) or (batch, nheads) float32.
    deterministic: the backward gives the same bits each time.
    return_attn_probs: returns (out, softmax_lse, S_dmask) in place of out. softmax_lse is (batch, nheads, seqlen_q)
        float32, packed (nheads, total_q), and differentiable. S_dmask is (batch, nheads, seqlen_q, seqlen_k): the weights,
        negative where they were dropped; without dropout it has no elements. It takes memory quadratic in the length.

Types: float16, bfloat16, float32; float64 slowly on the CPU. Head sizes to 576, those of k and v need not be equal.
Errors: ValueError or TypeError naming the argument.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fovea import _flash, _flash_cache


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), where nheads is
    a multiple of nheads_k. Returns out (batch, seqlen_q, nheads, headdim)."""
    if dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs:
        return _flash.dense(q, k, v, softmax_scale, causal, window_size, softcap, deterministic, False)[0]
    return _flash.with_dropout(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        alibi=alibi_slopes,
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with qkv (batch, seqlen, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention over packed sequences: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim); sequence b holds
    rows cu_seqlens[b] to cu_seqlens[b + 1] (int32, batch + 1 elements, from 0). max_seqlen_q and max_seqlen_k are their
    greatest lengths. Returns out (total_q, nheads, headdim).

    block_table: (batch, most_pages) int32: k and v are pages (pages, page_size, nheads_k, headdim), without gradients, and the
        lengths of the sequences are seqused_k, or those that cu_seqlens_k tells.
    seqused_k: (batch) int32: how many keys of each sequence take part.
    out: gets the result. s_aux: (nheads): a logit of each head that takes part in the softmax and has no value.
    """
    result = _flash.with_dropout(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        alibi=alibi_slopes,
        sink=None if s_aux is None else s_aux.float(),
        **_flash.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table),
    )
    if out is None:
        return result
    return (out.copy_(result[0]), *result[1:]) if return_attn_probs else out.copy_(result)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with kv (total_k, 2, nheads_k, headdim)."""
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func with qkv (total, 3, nheads, headdim)."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q (batch, seqlen_q, nheads, headdim) over a cache, without gradients.

    k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim).
    k, v: (batch, seqlen_new, nheads_k, headdim): new keys and values; the call writes them into the cache behind cache_seqlens
        and attends over them, too.
    cache_seqlens: an int or (batch) int32: how many rows of the cache are in use before the call.
    cache_batch_idx: (batch): the row of the cache of each sequence.
    cache_leftpad: (batch) int32: rows in front of the first key of each sequence.
    block_table: (batch, most_pages) int32: k_cache and v_cache are pages (pages, page_size, nheads_k, headdim) of any size.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2): rotate k by its positions; q by its positions under causal or a window,
        else all of q by position cache_seqlens.
    num_splits: parts of the keys that are computed apart and merged, at most; 1 is none, 0 as many as pay.

    Returns out (batch, seqlen_q, nheads, headdim), or (out, softmax_lse (batch, nheads, seqlen_q)).
    """
    return _flash_cache.attend(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        return_softmax_lse,
        alibi=alibi_slopes,
        num_splits=_flash.splits_of(num_splits, k_cache),
    )


# ---- the two passes one by one: ring attention and the like call them by these names


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy of it whose last dimension is contiguous."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """flash_attn_func without autograd: (out, softmax_lse, S_dmask, rng_state); rng_state is for _flash_attn_backward."""
    window = (window_size_left, window_size_right)
    return _flash.forward_pass(
        q, k, v, dropout_p, softmax_scale, causal, window, softcap, return_softmax, alibi=alibi_slopes
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients of _flash_attn_forward into dq, dk and dv. Returns softmax_d without elements."""
    return _flash.backward_pass(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        (dq, dk, dv),
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        deterministic,
        rng_state,
        alibi=alibi_slopes,
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """_flash_attn_forward of packed sequences, as flash_attn_varlen_func takes them; zero_tensors is a hint that Fovea does not
    need."""
    return _flash.forward_pass(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        return_softmax,
        alibi=alibi_slopes,
        leftpad_k=leftpad_k,
        num_splits=_flash.splits_of(num_splits, k),
        **_flash.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table),
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes the gradients of _flash_attn_varlen_forward into dq, dk and dv. Returns softmax_d without elements."""
    return _flash.backward_pass(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        (dq, dk, dv),
        dropout_p,
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        deterministic,
        rng_state,
        alibi=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=int(max_seqlen_q),
        max_seqlen_k=int(max_seqlen_k),
    )


_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
