"""The functions of the package flash-attn 2, on CPU and CUDA tensors, computed by Fovea.

`import fovea.flash_attn as flash_attn` runs programs that were written for it. For those that say
`from flash_attn import flash_attn_func` themselves, this comes first:

    import sys, fovea.flash_attn; sys.modules["flash_attn"] = fovea.flash_attn
"""

from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The version of flash-attn whose functions these are: programs ask for it.
__version__ = "2.8.4"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
