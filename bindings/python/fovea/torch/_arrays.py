"""How the compiled part reads tensors and makes results."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

_CODES = {
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float64: (2, 64),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
}
_DEVICES = {"cpu": 1, "cuda": 2}
PLAIN = (torch.Tensor, torch.nn.Parameter)


def output_type(q: torch.Tensor) -> torch.dtype:
    """The type that o has beside q."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def _describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise TypeError(
            f"got a tensor of {tensor.dtype}; expected float32, float16, bfloat16 or float64 (q, k, v: float8_e4m3fn; "
            "masks: bool or uint8; lengths: int32); convert it"
        )
    device = tensor.device
    kind = _DEVICES.get(device.type)
    if kind is None or tensor.layout is not torch.strided:
        raise TypeError(f"got a tensor of {tensor.layout} on {device}; expected a strided one on cpu or cuda; convert it")
    return (tensor.data_ptr(), *code, kind, device.index or 0, tuple(tensor.shape), tensor.stride(), True)


def _allocate(size: int, device: int) -> tuple[torch.Tensor, int]:
    # The caching allocator reuses this memory only for later work on the same stream.
    memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))
    return memory, memory.data_ptr()


def _stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def on_new_type(cls: type) -> tuple[Any, ...]:
    """How arrays of `cls` are read and made, as fovea._arrays tells the compiled part.

    Plain tensors are read through `__dlpack_c_exchange_api__` where this PyTorch has it. Subclasses are read by their
    attributes: a fake tensor has no memory, and data_ptr says so. PyTorch's own functions make results, because
    Tensor.record_stream accepts memory of PyTorch's allocator only.
    """
    if cls not in PLAIN:
        return (_describe, _allocate, _stream, True)
    of_type = (partial(torch.Tensor.new_empty, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    makers = (torch.empty_like, torch.Tensor.new_empty, *of_type)
    return (_describe, _allocate, _stream, not hasattr(cls, "__dlpack_c_exchange_api__"), *makers)


class Results:
    """Makes tensors on the device of `like`."""

    def __init__(self, like: torch.Tensor) -> None:
        self._like = like

    def empty(self, shape: tuple[int, ...], like: torch.Tensor | None = None) -> torch.Tensor:
        return self._like.new_empty(shape, dtype=torch.float32 if like is None else like.dtype)

    def output(self, shape: tuple[int, ...], q: torch.Tensor) -> torch.Tensor:
        """A tensor for o."""
        return self._like.new_empty(shape, dtype=output_type(q))

    def cast(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return tensor.to(like.dtype)

    def done(self, tensor: Any) -> Any:
        return tensor
