"""Attention for PyTorch, on tensors of CPUs and NVIDIA GPUs: differentiable, and one operator for torch.compile.

o = fovea.torch.attend(q, k, v, causal=True)                      # (batch, seqlen, heads, size)
o = fovea.torch.scaled_dot_product_attention(q, k, v)             # PyTorch's signature and layout
with fovea.torch.replace_sdpa():                                  # PyTorch's own calls inside go to Fovea
    model(x)

fovea.torch.distributed, which is imported by itself, computes one sequence over several processes.
"""

import torch as _torch

from .._types import attend_of_types as _attend_of_types
from .._types import checks_of_types as _checks_of_types
from ._attend import CHECKS as _CHECKS
from ._attend import attend, attend_options
from ._routing import register_flash_attention_impl, replace_sdpa
from ._sdpa import scaled_dot_product_attention

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"fovea.torch: got PyTorch {_torch.__version__}; expected 2.4 or newer; upgrade it")

# fovea.attend finds these without a look at sys.modules, which torch.compile of PyTorch 2.11 cannot trace.
_attend_of_types.update({_torch.Tensor: attend_options, _torch.nn.Parameter: attend_options})
_checks_of_types.update(dict.fromkeys((_torch.Tensor, _torch.nn.Parameter), (_torch.compiler.is_dynamo_compiling, _CHECKS)))

__all__ = ["attend", "register_flash_attention_impl", "replace_sdpa", "scaled_dot_product_attention"]
