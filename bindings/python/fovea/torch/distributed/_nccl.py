"""Communicators of NCCL of our own: one that a deadline aborts must not be PyTorch's."""

from __future__ import annotations

import ctypes
import threading

import torch
import torch.distributed as dist

from ._channel import Channel

_ID_BYTES = 128


class _UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * _ID_BYTES)]


def _library() -> ctypes.CDLL:
    """PyTorch's own, which the process has loaded."""
    if not dist.is_nccl_available():
        raise RuntimeError("group: got tensors of a GPU with a PyTorch that lacks NCCL; expected one with it; install another")
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        library = ctypes.CDLL(None)  # a PyTorch that has NCCL inside
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


class Communicator:
    """Of this rank on CUDA device `device`. All ranks make it."""

    def __init__(self, channel: Channel, device: int, deadline: float) -> None:
        self._library = _library()
        self._handle = ctypes.c_void_p()
        unique_id = _UniqueId()
        if channel.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique_id)))
        first = channel.gather(list(bytes(unique_id)))[0]
        self._join(_UniqueId.from_buffer_copy(bytes(first)), channel, device, deadline)

    @property
    def address(self) -> int:
        return self._handle.value or 0

    def destroy(self) -> None:
        self._check(self._library.ncclCommDestroy(self._handle))
        self._handle = ctypes.c_void_p()

    def _join(self, unique_id: _UniqueId, channel: Channel, device: int, deadline: float) -> None:
        """On a thread of its own, as NCCL waits for a rank that is gone without an end."""
        ended: list[int | Exception] = []

        def join() -> None:
            try:
                with torch.cuda.device(device):
                    ended.append(self._library.ncclCommInitRank(ctypes.byref(self._handle), channel.size, unique_id, channel.rank))
            except Exception as error:
                ended.append(error)

        thread = threading.Thread(target=join, name="fovea ncclCommInitRank", daemon=True)
        thread.start()
        thread.join(deadline)
        if not ended:
            raise RuntimeError(f"group: ncclCommInitRank of rank {channel.rank} did not end within {deadline:g} s; a rank is gone")
        if isinstance(ended[0], Exception):
            raise ended[0]
        self._check(ended[0])

    def _check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")
