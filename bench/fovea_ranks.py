"""The part of fovea_distributed.h that benchmarks need, over ctypes: NCCL communicators, threads, transports, distributed plans."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fovea_ctypes
from fovea_ctypes import CUDA, Library, View

_Piece = fovea_ctypes._structure("fovea_piece")
_Problem = fovea_ctypes._structure("fovea_distributed_problem")
_Options = fovea_ctypes._structure("fovea_distributed_options")


class _Transport(ctypes.Structure):
    """fovea_transport, whose functions are only handed on."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("context", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("device", fovea_ctypes._Device),
        *((name, ctypes.c_void_p) for name in ("start", "finish", "stop", "error")),
        ("peer_copies", ctypes.c_int32),
        ("deadline_ms", ctypes.c_int64),
    ]


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Nccl:
    """A communicator of one rank; the library is the one that the process has loaded."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnccl.so.2")
        self.communicator = ctypes.c_void_p()

    def unique_id(self) -> bytes:
        made = UniqueId()
        self._check(self.library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, size: int) -> None:
        """On the current device; all ranks call it."""
        self.library.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, UniqueId, ctypes.c_int]
        self._check(
            self.library.ncclCommInitRank(ctypes.byref(self.communicator), size, UniqueId.from_buffer_copy(unique_id), rank)
        )

    def _check(self, result: int) -> None:
        if result != 0:
            self.library.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL: {self.library.ncclGetErrorString(result).decode()}")


class Threads:
    """Ranks that are threads of this process, a GPU each: messages are copies from GPU to GPU."""

    def __init__(self, library: Library, ranks: int) -> None:
        self.library, self._c, self.group = library, library._c, ctypes.c_void_p()
        devices = (fovea_ctypes._Device * ranks)(*(fovea_ctypes._Device(CUDA, i) for i in range(ranks)))
        self._c.fovea_thread_group_create.argtypes = [ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        library.check(self._c.fovea_thread_group_create(ranks, devices, None, ctypes.byref(self.group)))
        self._c.fovea_thread_transport.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)


class ThreadTransport:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads = threads
        self.memory = _Transport()
        threads.library.check(threads._c.fovea_thread_transport(threads.group, rank, ctypes.byref(self.memory)))

    def check(self, library: Library) -> None:
        """Errors are those of the calls themselves."""

    def close(self) -> None:
        """The group owns it."""


class Transport:
    def __init__(self, library: Library, nccl: Nccl, device: int, deadline_ms: int = 60_000) -> None:
        self._c = library._c
        self.memory = _Transport()
        self._c.fovea_nccl_transport_open.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p]
        library.check(self._c.fovea_nccl_transport_open(nccl.communicator, device, deadline_ms, ctypes.byref(self.memory)))

    def check(self, library: Library) -> None:
        library.check(self._c.fovea_nccl_transport_check(ctypes.byref(self.memory)))

    def close(self) -> None:
        self._c.fovea_nccl_transport_close(ctypes.byref(self.memory))


class DistributedPlan:
    """One rank's part of a problem whose rows lie on several; run() is called by all ranks."""

    def __init__(
        self,
        library: Library,
        transport: Transport | ThreadTransport,
        pass_: int,
        tensors: Mapping[str, View],
        pieces: Sequence[tuple[int, int, int]],
        allocate: Callable[[int], int],
        *,
        device: int = 0,
        causal: bool = False,
        starts: Sequence[int] = (),
        heads_ranks: int = 0,
        stages: int = 0,
        sm_margin: int = 0,
        peer_copies: bool = True,
    ) -> None:
        self._library, self._tensors = library, []
        c = library._c
        problem = fovea_ctypes._Problem(
            struct_size=ctypes.sizeof(fovea_ctypes._Problem), pass_=pass_, causal=causal, window_left=-1, window_right=-1
        )
        self._buffers = fovea_ctypes._Buffers(struct_size=ctypes.sizeof(fovea_ctypes._Buffers))
        for name, view in tensors.items():
            setattr(problem, name, ctypes.pointer(self._tensor(view, device)))
            setattr(self._buffers, name, view.pointer)
        self._pieces = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
        self._starts = (ctypes.c_int32 * max(1, len(starts)))(*starts)
        whole = _Problem(
            struct_size=ctypes.sizeof(_Problem),
            local=ctypes.pointer(problem),
            queries=self._pieces,
            num_queries=len(pieces),
            num_sequences=max(0, len(starts) - 1),
            cu_seqlens_q=ctypes.cast(self._starts, type(_Problem().cu_seqlens_q)) if starts else None,
        )
        attention = fovea_ctypes._Options(struct_size=ctypes.sizeof(fovea_ctypes._Options), sm_margin=sm_margin)
        options = _Options(
            struct_size=ctypes.sizeof(_Options), attention=ctypes.pointer(attention), heads_ranks=heads_ranks, stages=stages
        )
        self._plan = ctypes.c_void_p()
        # A plan keeps a copy of the transport.
        link = _Transport.from_buffer_copy(transport.memory)
        link.peer_copies = link.peer_copies if peer_copies else 0
        library.check(
            c.fovea_distributed_plan_create(
                ctypes.byref(link), ctypes.byref(whole), ctypes.byref(options), ctypes.byref(self._plan)
            )
        )
        c.fovea_distributed_plan_workspace_size.restype = ctypes.c_size_t
        c.fovea_distributed_plan_workspace_size.argtypes = [ctypes.c_void_p]
        c.fovea_distributed_plan_reason.restype = ctypes.c_char_p
        c.fovea_distributed_plan_reason.argtypes = [ctypes.c_void_p]
        c.fovea_distributed_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        size = int(c.fovea_distributed_plan_workspace_size(self._plan))
        self._buffers.workspace, self._buffers.workspace_size = allocate(size), size
        self.reason = str(c.fovea_distributed_plan_reason(self._plan).decode())

    @staticmethod
    def _tensor(view: View, device: int) -> Any:
        return fovea_ctypes._Tensor(
            data=view.pointer,
            device=fovea_ctypes._Device(CUDA, device),
            ndim=len(view.shape),
            dtype=fovea_ctypes._DType(*fovea_ctypes._DTYPES[view.dtype], 1),
            shape=(ctypes.c_int64 * len(view.shape))(*view.shape),
            strides=(ctypes.c_int64 * len(view.strides))(*view.strides),
        )

    def run(self, stream: int) -> None:
        self._buffers.stream = stream or None
        self._library.check(self._library._c.fovea_distributed_run(self._plan, ctypes.byref(self._buffers)))

    def close(self) -> None:
        self._library._c.fovea_distributed_plan_destroy.argtypes = [ctypes.c_void_p]
        self._library._c.fovea_distributed_plan_destroy(self._plan)
        self._plan = ctypes.c_void_p()
