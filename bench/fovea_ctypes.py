"""The least of fovea.h that a benchmark needs, over ctypes: plans, and runs on raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FORWARD, BACKWARD = 0, 1
CPU, CUDA = 1, 2
_ALIGNMENT = 64
_DTYPES = {"float32": (2, 32), "float64": (2, 64), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32)}

# The tensors of fovea_problem and the pointers of fovea_buffers, in the order of both structs.
_TENSORS = (
    "q k v o lse d_o dlse dq dk dv dbias dsink bias mask block_mask alibi sink cu_seqlens_q cu_seqlens_k seqused_q "
    "seqused_k rng_state"
).split()


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Problem(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("pass_", ctypes.c_int32),
        *((name, ctypes.POINTER(_Tensor)) for name in _TENSORS),
        ("scale", ctypes.c_double),
        ("causal", ctypes.c_int32),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("dropout", ctypes.c_double),
        ("block_q", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
    ]


class _Options(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("backend", ctypes.c_char_p),
        ("num_threads", ctypes.c_int32),
        ("deterministic", ctypes.c_int32),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_void_p) for name in _TENSORS),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
    ]


class FoveaError(RuntimeError):
    """A call that did not return FOVEA_OK; the text is the library's."""


@dataclass(frozen=True)
class View:
    """A tensor as fovea.h wants it: (batch, seqlen, heads, size), lse (batch, heads, seqlen); strides in elements."""

    pointer: int
    dtype: str
    shape: Sequence[int]
    strides: Sequence[int]


class Library:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._c = ctypes.CDLL(str(path))
        for name in ("version", "machine", "last_error"):
            getattr(self._c, f"fovea_{name}").restype = ctypes.c_char_p
        plan_pointer = ctypes.c_void_p
        self._c.fovea_plan_create.argtypes = [
            ctypes.POINTER(_Problem),
            ctypes.POINTER(_Options),
            ctypes.POINTER(plan_pointer),
        ]
        self._c.fovea_plan_destroy.argtypes = [plan_pointer]
        self._c.fovea_plan_destroy.restype = None
        self._c.fovea_plan_workspace_size.argtypes = [plan_pointer]
        self._c.fovea_plan_workspace_size.restype = ctypes.c_size_t
        self._c.fovea_plan_backend.argtypes = [plan_pointer]
        self._c.fovea_plan_backend.restype = ctypes.c_char_p
        self._c.fovea_run.argtypes = [plan_pointer, ctypes.POINTER(_Buffers)]

    def _text(self, name: str) -> str:
        return str(getattr(self._c, f"fovea_{name}")().decode())

    @property
    def version(self) -> str:
        return self._text("version")

    @property
    def machine(self) -> str:
        """Processor, instruction sets and threads, as the library sees them."""
        return self._text("machine")

    @property
    def default_threads(self) -> int:
        return int(self._c.fovea_default_threads())

    def check(self, status: int) -> None:
        if status != 0:
            raise FoveaError(self._text("last_error"))

    def plan(
        self,
        pass_: int,
        tensors: Mapping[str, View],
        *,
        causal: bool = False,
        num_threads: int = 0,
        backend: str | None = None,
        window_left: int = -1,
        max_seqlen: int = 0,
        deterministic: bool = False,
        device: tuple[int, int] = (CPU, 0),
        allocate: Callable[[int], int] | None = None,
    ) -> Plan:
        """`allocate` gives the address of so many bytes of the device's memory, which the caller keeps; left out, the
        workspace is memory of the host. `max_seqlen` is of packed sequences."""
        problem = _Problem(
            struct_size=ctypes.sizeof(_Problem),
            pass_=pass_,
            causal=causal,
            window_left=window_left,
            window_right=-1,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
        )
        options = _Options(
            struct_size=ctypes.sizeof(_Options),
            backend=backend.encode() if backend else None,
            num_threads=num_threads,
            deterministic=deterministic,
        )
        return Plan(self, tensors, problem, options, device, allocate)


class Plan:
    """A validated problem with its workspace; run() executes it on the memory that it was planned with."""

    def __init__(
        self,
        library: Library,
        tensors: Mapping[str, View],
        problem: _Problem,
        options: _Options,
        device: tuple[int, int],
        allocate: Callable[[int], int] | None,
    ) -> None:
        self._library = library
        self._plan = ctypes.c_void_p()
        for name, view in tensors.items():
            sizes = (ctypes.c_int64 * len(view.shape))(*view.shape)
            strides = (ctypes.c_int64 * len(view.strides))(*view.strides)
            tensor = _Tensor(
                data=view.pointer,
                device=_Device(*device),
                ndim=len(view.shape),
                dtype=_DType(*_DTYPES[view.dtype], 1),
                shape=sizes,
                strides=strides,
            )
            setattr(problem, name, ctypes.pointer(tensor))
        c = library._c
        library.check(c.fovea_plan_create(ctypes.byref(problem), ctypes.byref(options), ctypes.byref(self._plan)))
        self.workspace_size = int(c.fovea_plan_workspace_size(self._plan))
        self.backend = str(c.fovea_plan_backend(self._plan).decode())
        if allocate is None:
            self._memory = ctypes.create_string_buffer(self.workspace_size + _ALIGNMENT)
            start = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        else:
            start = allocate(self.workspace_size)
        self._buffers = _Buffers(
            struct_size=ctypes.sizeof(_Buffers), workspace=start, workspace_size=self.workspace_size
        )
        for name, view in tensors.items():
            setattr(self._buffers, name, view.pointer)
        self._run: Callable[..., int] = c.fovea_run
        self._argument = ctypes.byref(self._buffers)

    def run(self, stream: int = 0) -> None:
        """On a GPU the run is only put into `stream`, a cudaStream_t."""
        self._buffers.stream = stream or None
        status = self._run(self._plan, self._argument)
        if status != 0:
            self._library.check(status)

    def __del__(self) -> None:
        if self._plan:
            self._library._c.fovea_plan_destroy(self._plan)
