"""Fovea: exact attention, tile by tile, on CPUs and NVIDIA GPUs.

    o = fovea.attend(q, k, v, causal=True)

takes and returns arrays of numpy, PyTorch, JAX, CuPy, or another library with DLPack. Beside it:

    fovea.expressions    scores and masks of one's own, as functions
    fovea.torch          autograd, torch.compile, scaled_dot_product_attention
    fovea.flash_attn     the functions of the packages flash-attn 2 and 3
    fovea.transformers   the attention implementation "fovea" of Hugging Face's transformers
    fovea.jax            jit and grad

`python -m fovea` is the command line.
"""

from __future__ import annotations

from typing import Any

from . import _core
from ._arrays import Form
from ._attend import Gradients, Plan, attend, attend_backward, explain, merge, plan, seen_blocks
from ._cache import Cache, Rotary
from ._cascade import CascadeLevel, cascade
from ._compile import CompiledKernel, compile
from .expressions import named, where

__version__: str = _core.version()
__all__ = [
    "Cache", "CascadeLevel", "CompiledKernel", "Form", "Gradients", "Plan", "Rotary", "attend", "attend_backward", "cascade", "compile", "explain", "info", "merge", "named", "plan",
    "seen_blocks", "where",
]  # fmt: skip


def info() -> dict[str, Any]:
    """The library and the machine as it sees them: version, processor, threads, cuda, gpus, and backends (name -> why it
    is not available here, or "")."""
    processor, threads, cuda, gpus = _core.machine()
    return {
        "version": __version__,
        "processor": processor,
        "threads": threads,
        "cuda": cuda,
        "gpus": gpus,
        "backends": {name: because for name, _, because in _core.backends()},
    }
