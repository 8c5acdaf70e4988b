"""The part of fovea.h that benchmarks need, over ctypes: plans, and runs on raw pointers. The structs are read from the
header, where alone they are written."""

from __future__ import annotations

import ctypes
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORWARD, BACKWARD = 0, 1
CPU, CUDA = 1, 2
_ALIGNMENT = 64
_DTYPES = {"float32": (2, 32), "float64": (2, 64), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "bool": (6, 8), "float8_e4m3fn": (10, 8)}

_HEADERS = Path(__file__).resolve().parents[1] / "include" / "fovea"
_HEADER = _HEADERS / "fovea.h"
_CONSTANTS = {
    name: int(value)
    for name, value in re.findall(r"#define (FOVEA_\w+) (\d+)$", _HEADER.read_text(encoding="utf-8"), flags=re.MULTILINE)
}
_TYPES: dict[str, Any] = {
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
    "char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "int64_t*": ctypes.POINTER(ctypes.c_int64),
    "int32_t*": ctypes.POINTER(ctypes.c_int32),
    **{f"{sign}int{bits}_t": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def _structure(name: str) -> type[ctypes.Structure]:
    """The struct of fovea.h or fovea_distributed.h as it stands there. A field named by a keyword of Python ("pass") gets a
    trailing "_"."""
    headers = "".join((_HEADERS / file).read_text(encoding="utf-8") for file in ("fovea.h", "fovea_distributed.h"))
    text = re.sub(r"/\*.*?\*/", "", headers, flags=re.DOTALL)
    (body,) = re.findall(rf"typedef struct {name} {{(.*?)}} {name};", text, flags=re.DOTALL)
    fields = []
    for declaration in body.split(";"):
        if not declaration.strip():
            continue
        type_name, rest = re.fullmatch(r"\s*(?:const\s+)?(\w+)\s*(.*?)\s*", declaration, flags=re.DOTALL).groups()
        for declarator in rest.split(","):
            pointer, field = "*" * declarator.count("*"), declarator.replace("*", "").strip()
            field, _, length = field.partition("[")
            type_ = _TYPES[type_name + pointer]
            if length:
                type_ = type_ * _CONSTANTS[length.removesuffix("]")]
            fields.append((field + "_" * keyword.iskeyword(field), type_))
    structure = type(name, (ctypes.Structure,), {"_fields_": fields})
    _TYPES[name], _TYPES[name + "*"] = structure, ctypes.POINTER(structure)
    return structure


_DType = _structure("fovea_dtype")
_Device = _structure("fovea_device")
_Tensor = _structure("fovea_tensor")
_NamedTensor = _structure("fovea_named_tensor")
_Problem = _structure("fovea_problem")
_Options = _structure("fovea_options")
_Buffers = _structure("fovea_buffers")


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
        softcap: float = 0,
        dropout: float = 0,
        max_seqlen: int = 0,
        deterministic: bool = False,
        score: str = "",
        sees: str = "",
        named: Mapping[str, View] | None = None,
        device: tuple[int, int] = (CPU, 0),
        allocate: Callable[[int], int] | None = None,
    ) -> Plan:
        """`named` are the tensors of the expressions. `allocate` gives the address of so many bytes of the device's memory, which the caller keeps; left out, the
        workspace is memory of the host. `max_seqlen` is of packed sequences."""
        problem = _Problem(
            struct_size=ctypes.sizeof(_Problem),
            pass_=pass_,
            causal=causal,
            window_left=window_left,
            window_right=-1,
            softcap=softcap,
            dropout=dropout,
            max_seqlen_q=max_seqlen,
            max_seqlen_k=max_seqlen,
            score=score.encode() or None,
            sees=sees.encode() or None,
        )
        options = _Options(
            struct_size=ctypes.sizeof(_Options),
            backend=backend.encode() if backend else None,
            num_threads=num_threads,
            deterministic=deterministic,
        )
        return Plan(self, tensors, named or {}, problem, options, device, allocate)


class Plan:
    """A validated problem with its workspace; run() executes it on the memory that it was planned with."""

    def __init__(
        self,
        library: Library,
        tensors: Mapping[str, View],
        named: Mapping[str, View],
        problem: _Problem,
        options: _Options,
        device: tuple[int, int],
        allocate: Callable[[int], int] | None,
    ) -> None:
        self._library = library
        self._plan = ctypes.c_void_p()

        def tensor(view: View) -> Any:
            return ctypes.pointer(
                _Tensor(
                    data=view.pointer,
                    device=_Device(*device),
                    ndim=len(view.shape),
                    dtype=_DType(*_DTYPES[view.dtype], 1),
                    shape=(ctypes.c_int64 * len(view.shape))(*view.shape),
                    strides=(ctypes.c_int64 * len(view.strides))(*view.strides),
                )
            )

        for name, view in tensors.items():
            setattr(problem, name, tensor(view))
        all_named = (_NamedTensor * len(named))(
            *(_NamedTensor(name=name.encode(), tensor=tensor(view)) for name, view in named.items())
        )
        if named:
            problem.named, problem.num_named = all_named, len(named)
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
        for number, view in enumerate(named.values()):
            self._buffers.named[number] = view.pointer
        self._run: Callable[..., int] = c.fovea_run
        self._argument = ctypes.byref(self._buffers)

    def run(self, stream: int = 0) -> None:
        """On a GPU, enqueues the work on `stream`, a cudaStream_t, and returns."""
        self._buffers.stream = stream or None
        status = self._run(self._plan, self._argument)
        if status != 0:
            self._library.check(status)

    def __del__(self) -> None:
        if self._plan:
            self._library._c.fovea_plan_destroy(self._plan)
