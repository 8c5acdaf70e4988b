"""What callers name a group of processes by."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

if not dist.is_available():
    raise ImportError("fovea.torch.distributed: got a PyTorch without torch.distributed; expected one with it; install another")


def group_of(group: Any) -> dist.ProcessGroup:
    """The ProcessGroup of a DeviceMesh of one dimension, of Ranks, of a ProcessGroup; None is all processes."""
    given = group
    if not dist.is_initialized():
        raise RuntimeError(
            "group: got one before torch.distributed was started; expected it at work; call torch.distributed.init_process_group"
        )
    if group is None:
        group = dist.group.WORLD
    elif hasattr(group, "process_group"):
        group = group.process_group()
    elif hasattr(group, "get_group") and hasattr(group, "ndim"):
        if group.ndim != 1:
            raise ValueError(
                f"group: got a mesh of {group.ndim} dimensions; expected 1; choose the dimension of the sequence, as in mesh['cp']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group: got {given!r}; expected a ProcessGroup or DeviceMesh that this process belongs to; name one, or leave it out"
        )
    return group
