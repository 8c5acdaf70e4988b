"""Hugging Face transformers: the attention implementations "fovea" and "fovea_flash_attention_3".

    import fovea.transformers
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fovea")
    fovea.transformers.use_for_serving(model)  # before model.generate_batch(...)

Importing the module registers both. "fovea" is for models that are trained or that generate, with masks and biases of any kind; it needs
transformers 4.48 or newer. "fovea_flash_attention_3" is for continuous batching: transformers knows by the name that it needs no
masks, and calls the functions of fovea.flash_attn_interface over pages of its cache; it needs transformers 5.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import AttentionInterface

from . import flash_attn_interface

from .torch import attend


FLASH_NAME = "fovea_flash_attention_3"  # continuous batching takes "flash", and its fast path for decoding "flash" before a 2 or 3


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
        raise NotImplementedError(
            'fovea: got a cache of continuous batching; expected none; call fovea.transformers.use_for_serving(model)'
        )
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


def use_for_serving(model: Any) -> None:
    """model.set_attn_implementation("fovea_flash_attention_3"), also for models that list the kernels of flash-attn that they know, such
    as those with sinks: their lists get this one."""
    for module in model.modules():
        known = getattr(module, "_compatible_flash_implementations", None)
        if known is not None and FLASH_NAME not in known and any("flash" in name for name in known):
            module._compatible_flash_implementations = [*known, FLASH_NAME]
    model.set_attn_implementation(FLASH_NAME)


def _register_flash() -> None:
    """Makes FLASH_NAME an attn_implementation of transformers' models, for which transformers calls flash-attn's functions."""
    try:
        from transformers import AttentionMaskInterface, modeling_flash_attention_utils
        from transformers.integrations.flash_attention import flash_attention_forward
        from transformers.masking_utils import flash_attention_mask

        theirs = modeling_flash_attention_utils._lazy_imports
        padding = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
        modeling_flash_attention_utils._flash_with_kvcache_fn  # noqa: B018
    except (ImportError, AttributeError):  # before transformers 5
        return
    ours = flash_attn_interface
    functions = (ours.flash_attn_func, ours.flash_attn_varlen_func, ours.flash_attn_with_kvcache, *padding)

    def lazy_imports(implementation: str | None, *arguments: Any, **settings: Any) -> Any:
        """The functions of an implementation of flash-attn: transformers asks here for them by its name."""
        return functions if implementation == FLASH_NAME else theirs(implementation, *arguments, **settings)

    modeling_flash_attention_utils._lazy_imports = lazy_imports
    AttentionInterface.register(FLASH_NAME, flash_attention_forward)
    AttentionMaskInterface.register(FLASH_NAME, flash_attention_mask)


register()
_register_flash()
