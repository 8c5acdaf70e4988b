"""scaled_dot_product_attention with PyTorch's signature, layout and meaning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from ._attend import CHECKS, attend_checked

def _with_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(..., heads, seqlen, size) as (batch, seqlen, heads, size) without a copy where strides allow."""
    if len(batch) != 1 or x.shape[:-3] != batch:
        x = x.expand(*batch, *x.shape[-3:])
        x = x.reshape(-1, *x.shape[-3:])
    return x.transpose(1, 2)


def _with_heads_of(key: Tensor, query: Tensor) -> Tensor:
    """query, expanded to the heads of key where it has one head for all of them."""
    heads_q, heads_k = query.shape[-3], key.shape[-3]
    if heads_q == heads_k or heads_k == 1:
        return query
    if heads_q != 1:
        raise ValueError(f"key: got {heads_k} heads; expected {heads_q}, as query; set enable_gqa=True for grouped heads")
    return query.expand(*query.shape[:-3], heads_k, *query.shape[-2:])


def _causal_from_the_first_query(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """(k, v, options) for PyTorch's causal mask: its diagonal begins at the first key, Fovea's ends at the last one."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if seqlen_k < seqlen_q:
        return k, v, {"window": (-1, seqlen_q - seqlen_k)}
    if seqlen_k > seqlen_q:
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]
    return k, v, {"causal": True}


def _mask_option(attn_mask: Tensor, batch: tuple[int, ...], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """attn_mask as the option mask or bias, (batch|1, heads|1, seqlen_q|1, seqlen_k|1)."""
    while attn_mask.ndim < 4:
        attn_mask = attn_mask.unsqueeze(0)
    if len(batch) > 1:
        attn_mask = attn_mask.expand(*batch, *attn_mask.shape[-3:]).reshape(-1, *attn_mask.shape[-3:])
    if attn_mask.dtype == torch.bool:
        return {"mask": attn_mask}
    if attn_mask.is_floating_point():
        return {"bias": attn_mask}
    raise TypeError(
        f"attn_mask: got {attn_mask.dtype}; expected bool or a floating-point type, broadcastable to {shape}; convert it"
    )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed by Fovea.

    Arguments:
        query: (..., heads, seqlen_q, size); also (seqlen_q, size).
        key: (..., heads, seqlen_k, size), value: (..., heads, seqlen_k, size_v); with enable_gqa their heads may divide
            those of query.
        attn_mask: broadcastable to (..., heads, seqlen_q, seqlen_k); bool: True is seen; else added to the scores, and
            differentiable.
        dropout_p: probability of dropping a weight (applied whenever it is not 0); the seed comes from PyTorch's generator.
        is_causal: query i sees keys 0 to i: aligned at the first query and key, unlike fovea.torch.attend.
        scale: of the scores; None is 1/sqrt(size).

    Returns (..., heads, seqlen_q, size_v). A query that sees no key gets 0.

    Raises ValueError or TypeError naming the argument, what came, what was expected and the remedy.
    """
    if not torch.compiler.is_dynamo_compiling() and attn_mask is None and dropout_p == 0 and scale != 0:
        if query.shape == key.shape == value.shape:
            o = _core.attend(query, key, value, False, True, CHECKS, scale=scale, causal=is_causal)
            if o is not None:
                return o
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}; expected (..., seqlen, size); reshape it")
    if attn_mask is not None and is_causal:
        raise ValueError("is_causal: got True beside an attn_mask; expected one of the two; put the causal mask into attn_mask")
    rank = query.ndim
    while query.ndim < 3:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
    if not enable_gqa and rank >= 3:
        query = _with_heads_of(key, query)
    batch = query.shape[:-3]
    if key.shape[:-3] != batch or value.shape[:-3] != batch:
        batch = torch.broadcast_shapes(batch, key.shape[:-3], value.shape[:-3])
    q, k, v = (_with_batch(x, batch or (1,)) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scale, "dropout": dropout_p}
    if is_causal:
        k, v, causal = _causal_from_the_first_query(q, k, v)
        options = {**options, **causal}
    elif attn_mask is not None:
        shape = (*batch, query.shape[-3], query.shape[-2], key.shape[-2])
        options = {**options, **_mask_option(attn_mask, batch, shape)}  # Dynamo of PyTorch 2.4 has no |
    o, _ = attend_checked(q, k, v, options, need_lse=False, draw_seed=dropout_p > 0)
    o = o.transpose(1, 2)
    if rank == 2:
        return o[0, 0]
    return o.reshape(*batch, *o.shape[1:]) if len(batch) != 1 else o
