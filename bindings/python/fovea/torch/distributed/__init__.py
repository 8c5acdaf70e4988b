"""Attention of one sequence whose rows lie on several processes of torch.distributed: on GPUs over NCCL, on CPUs over gloo.

o = fovea.torch.distributed.attend(q, k, v, group=mesh, causal=True)           # this rank's rows, differentiable
with fovea.torch.distributed.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
    model(x)                                                                   # scaled_dot_product_attention over the ranks

All ranks of the group make the same calls in the same order.
"""

from ._attend import EVERYWHERE, attend, attend_backward
from ._context import context_parallel, context_parallel_unshard
from ._pieces import Piece, contiguous, shard, unshard, zigzag
from ._ranks import Ranks

__all__ = [
    "EVERYWHERE", "Piece", "Ranks", "attend", "attend_backward", "context_parallel", "context_parallel_unshard", "contiguous",
    "shard", "unshard", "zigzag",
]  # fmt: skip
