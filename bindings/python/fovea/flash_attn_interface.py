"""The functions of flash-attn 3 (its module flash_attn_interface), on CPU and CUDA tensors, computed by Fovea.

`import fovea.flash_attn_interface as flash_attn_interface` runs programs that were written for it.

Common to all:
    softmax_scale: of the scores; None is 1/sqrt(headdim).
    causal: aligned at the last query and the last key.
    window_size: (left, right) keys seen beside the diagonal, as a tuple, list, array or tensor; -1 is unlimited.
    softcap: c > 0 makes scores c tanh(score / c).
    deterministic: the backward gives the same bits each time.
    return_attn_probs: returns (out, softmax_lse), lse (batch, nheads, seqlen_q) float32, packed (nheads, total_q).
    num_splits: parts of the keys that are computed apart and merged, at most; 1 is none, 0 as many as pay. On GPUs keys of 8 bits are
        always divided as it pays, as their fast kernels divide them themselves.
    sm_margin: multiprocessors of a GPU that are left to kernels that run beside; kernels of Hopper heed it.
    pack_gqa, scheduler_metadata: taken and ignored.
    qv: as q with headdim_v: scores are softmax_scale (q k^T + qv v^T), softmax_scale None 1/sqrt(headdim + headdim_v); no gradients.
    q_descale, k_descale, v_descale (batch, nheads_k): what the elements of q, k and v of float8_e4m3fn are multiplied by; beside other
        types they are ignored.
    attention_chunk: n > 0 cuts keys, and the positions of queries among them, into chunks of n from the first key on: a query sees keys
        of its own chunk alone, of those that causal and window_size leave. With gradients, too. On GPUs it takes NVRTC, as
        expressions of fovea.attend do, and keys of 8 bits then run on CUDA cores. Not under torch.func.

Types: float16, bfloat16, float32; float64 slowly on the CPU. k and v may be float8_e4m3fn without gradients, and q beside them: then out
and qv are bfloat16. Head sizes to 576, those of k and v need not be equal.
Errors: ValueError or TypeError naming the argument; NotImplementedError for what Fovea does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _flash, _flash_cache
from .torch import _merge


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention over q (batch, seqlen_q, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim) and v (batch, seqlen_k,
    nheads_k, headdim_v), where nheads is a multiple of nheads_k. s_aux (nheads): a logit of each head that takes part in the softmax
    and has no value. Returns out (batch, seqlen_q, nheads, headdim_v)."""
    if attention_chunk:
        window_size = _flash.within_chunk(window_size, attention_chunk)
    settings = (softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    has_no_more = s_aux is None and qv is None and not attention_chunk and not sm_margin
    if has_no_more and getattr(k, "dtype", None) is not torch.float8_e4m3fn:
        o, lse = _flash.dense(q, k, v, *settings, num_splits)
    else:
        sink = None if s_aux is None else s_aux.float()
        more = _flash.options_of(q, k, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
        o, lse = _flash.general(q, k, v, *settings, sink=sink, qv=qv, num_splits=_flash.splits_of(num_splits, k), **more)
    return (o, lse) if return_attn_probs else o


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func with qkv (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, nheads + 2 nheads_k, headdim) with
    num_heads_q = nheads."""
    if qkv.ndim == 5:
        q, k, v = qkv.unbind(2)
    else:
        if qkv.ndim != 4 or num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2 or qkv.shape[2] <= num_heads_q:
            raise ValueError(
                f"qkv: got shape {tuple(qkv.shape)} and num_heads_q={num_heads_q}; expected (batch, seqlen, 3, nheads, "
                "headdim), or (batch, seqlen, num_heads_q + 2 nheads_k, headdim) with num_heads_q; reshape it"
            )
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    block_table: Tensor | None = None,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_softmax_lse: bool = False,
    scheduler_metadata: Tensor | None = None,
    fa_version: int | None = None,
    ver: int | None = None,
    q_v: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attention over packed sequences: q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim); sequence b holds
    rows cu_seqlens[b] to cu_seqlens[b + 1] (int32, batch + 1 elements, from 0), of which the first seqused[b] (batch, int32)
    take part. max_seqlen_q and max_seqlen_k are their greatest lengths. Returns out (total_q, nheads, headdim_v).

    What vLLM and SGLang call beside these: block_table (batch, most_pages) int32: k and v are pages (pages, page_size, nheads_k,
    headdim), without gradients, and seqused_k, or cu_seqlens_k, tells lengths; without both cu_seqlens_k and block_table k and v are
    (batch, seqlen_k, nheads_k, headdim). out gets the result. s_aux or sinks (nheads): a logit of each head that takes part in the softmax
    and has no value. alibi_slopes: as in fovea.flash_attn. return_softmax_lse: as return_attn_probs.
    q_v: as qv. cp_world_size and cp_rank: 1 and 0, as the keys of a call lie on one rank; cp_tot_seqused_k then says nothing new.
    window_size may be None. scheduler_metadata, fa_version and ver are taken and ignored."""
    if cp_world_size != 1 or cp_rank:
        _flash.refuse_ranks(cp_world_size, cp_rank)
    if q_v is not None:
        qv = _flash.one_of(qv, q_v, "qv, q_v")
    if attention_chunk:
        window_size = _flash.within_chunk(window_size, attention_chunk)
    return_attn_probs = return_attn_probs or return_softmax_lse
    more = _flash.options_of(q, k, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
    sink = _flash.sink_of(s_aux, sinks)
    made = _flash.packed_now(
        q,
        k,
        v,
        return_attn_probs,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        block_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        sink,
        more,
        out,
        qv,
        _flash.splits_of(num_splits, k),
    )
    if made is not None:
        return made
    o, lse = _flash.general(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        softcap,
        deterministic,
        return_attn_probs,
        seqused_q=seqused_q,
        sink=sink,
        alibi=alibi_slopes,
        num_splits=_flash.splits_of(num_splits, k),
        qv=qv,
        **more,
        **_flash.packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, block_table),
    )
    if out is not None:
        o = out.copy_(o)
    return (o, lse) if return_attn_probs else o


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Joins results over disjoint sets of keys. out_partial (splits, batch, seqlen, nheads, headdim) float32, lse_partial
    (splits, batch, seqlen, nheads) float32. Returns (out (batch, seqlen, nheads, headdim) of out_dtype (None: float32),
    softmax_lse (batch, seqlen, nheads))."""
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"out_partial, lse_partial: got shapes {tuple(out_partial.shape)} and {tuple(lse_partial.shape)}; expected "
            "(splits, batch, seqlen, nheads, headdim) and the same without headdim"
        )
    dtype = out_dtype or (out.dtype if out is not None else None)
    merged, lse = _merge.merge(tuple(out_partial), tuple(lse_partial.transpose(2, 3)), dtype)
    if out is not None:
        merged = out.copy_(merged)
    return merged, lse.transpose(1, 2)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    sinks: Tensor | None = None,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
    ver: int | None = None,
) -> Any:
    """Attention over a cache, as fovea.flash_attn.flash_attn_with_kvcache, without gradients; page_table is its block_table.

    cu_seqlens_q (batch + 1) int32: q is packed (total_q, nheads, headdim); max_seqlen_q is the greatest length. cu_seqlens_k_new
    (batch + 1) int32: so are k and v. rotary_seqlens (batch): position of the first new row of each sequence, in place of
    cache_seqlens. sinks or s_aux (nheads): a logit of each head that takes part in the softmax and has no value. out gets the result.
    Where k_cache and v_cache are float8_e4m3fn, rows of k and v of that type are written as they are, but for the rotation; k_descale and
    v_descale divide those of others. scheduler_metadata and ver are taken and ignored. qv is not rotated.
    Under attention_chunk q is rotated by its positions, as under a window, where a chunk has fewer keys than the cache has rows.

    Returns out (batch, seqlen_q, nheads, headdim_v), or (out, softmax_lse (batch, nheads, seqlen_q)), packed (total_q, nheads,
    headdim_v) and (nheads, total_q)."""
    call = _flash_cache.attend
    if attention_chunk:
        window_size = _flash.within_chunk(window_size, attention_chunk)
        call = _flash_cache.attend_outside_graph
    more = _flash.options_of(q, k_cache, q_descale, k_descale, v_descale, attention_chunk, sm_margin)
    return call(
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
        page_table,
        softmax_scale,
        causal,
        window_size,
        softcap,
        return_softmax_lse,
        cu_seqlens_q,
        max_seqlen_q,
        None if k is None else cu_seqlens_k_new,
        rotary_seqlens,
        more.pop("k_descale", None),
        more.pop("v_descale", None),
        out,
        sink=_flash.sink_of(s_aux, sinks),
        num_splits=_flash.splits_of(num_splits, k_cache),
        qv=qv,
        **more,
    )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A tensor without elements: Fovea's plans hold what this would."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
