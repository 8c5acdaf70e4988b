"""Hugging Face transformers: the attention implementation "fovea".

    import fovea.transformers
    model = AutoModel.from_pretrained(..., attn_implementation="fovea")

Importing the module registers it. Needs transformers 4.48 or newer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from .torch import attend


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that models call. query, key, value: (batch, heads, seqlen, size); key and value may have fewer heads.

    attention_mask: (batch|1, heads|1, seqlen_q, seqlen_k), bool (True: the key is seen) or added to the scores; it contains
    the causal mask and the window. Without it is_causal, or the module's, decides. s_aux: (heads): sinks.

    Returns ((batch, seqlen_q, heads, size), None). Raises NotImplementedError for a paged cache.
    """
    if cache is not None:
        raise NotImplementedError("fovea: got a paged cache, which Fovea does not have; generate without continuous batching")
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    causal = False
    if attention_mask is None and seqlen_q > 1:
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        if causal and seqlen_k > seqlen_q:
            # A static cache that is filled for the first time: keys behind the last query are empty.
            key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
    mask, bias = None, position_bias
    if attention_mask is not None:
        attention_mask = attention_mask[..., :seqlen_k]
        if not attention_mask.is_floating_point():
            mask = attention_mask
        else:
            bias = attention_mask if bias is None else bias + attention_mask
    options = {"bias": bias, "mask": mask, "sink": None if s_aux is None else s_aux.float(), "dropout": dropout or None}
    given = {name: value for name, value in options.items() if value is not None}
    rows = (x.transpose(1, 2) for x in (query, key, value))
    return attend(*rows, scale=scaling, causal=causal, softcap=softcap or 0.0, **given).contiguous(), None


def register(name: str = "fovea") -> None:
    """Makes `name` an attn_implementation of transformers' models; importing this module does so for "fovea"."""
    AttentionInterface.register(name, attention_forward)
    try:
        from transformers import AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # before 4.53 models make their masks themselves
        return
    AttentionMaskInterface.register(name, sdpa_mask)


register()
