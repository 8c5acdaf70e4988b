"""How the compiled part reads arrays of each library, and how results of each library are made."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

from . import _core

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL, _FLOAT8_E4M3FN = 0, 1, 2, 4, 6, 10
_CPU, _CUDA = 1, 2


def _on_new_type(cls: type) -> tuple[Any, ...] | None:
    """What the compiled part needs for arrays of `cls`, or None where `__dlpack__` is enough.

    A tuple: describe(array), allocate(bytes, device), stream(device), whether describe comes before `__dlpack__`; then, where
    the compiled part is to make results, four functions: like(array), and empty, float32 and bfloat16 of (array, shape).
    """
    if cls is Form:
        return (_describe_form, None, None, True)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(cls, torch.Tensor):
        from .torch import _arrays

        return _arrays.on_new_type(cls)
    if cls.__module__.split(".")[0] == "cupy":
        return _cupy()
    for base in cls.__mro__:
        if base.__module__ == "numpy" and base.__name__ == "ndarray":
            return (_describe_numpy, None, None, False, *(_makers_of_numpy() if base is cls else ()))
    return None


def _makers_of_numpy() -> tuple[Any, ...]:
    """like(array) in C order, empty(array, shape) of the array's type, float32(array, shape), bfloat16(array, shape)."""
    import numpy

    def new_empty(like: Any, shape: tuple[int, ...]) -> Any:
        return numpy.empty(shape, like.dtype)

    def new_float32(like: Any, shape: tuple[int, ...]) -> Any:
        return numpy.empty(shape, numpy.float32)

    def new_bfloat16(like: Any, shape: tuple[int, ...]) -> Any:
        return numpy.empty(shape, _bfloat16_of_numpy())

    return (partial(numpy.empty_like, order="C"), new_empty, new_float32, new_bfloat16)


def _bfloat16_of_numpy() -> Any:
    import ml_dtypes  # it has made the caller's types of 8 bits

    return ml_dtypes.bfloat16


def _describe_numpy(array: Any) -> tuple[Any, ...]:
    """Serves arrays that numpy's DLPack refuses: bfloat16 and float8_e4m3fn of ml_dtypes, and read-only memory before numpy 2.1."""
    dtype = array.dtype
    if dtype.name in ("bfloat16", "float8_e4m3fn"):
        code = _DTYPES[dtype.name][0]
    elif dtype.kind in "iufb":
        code = {"i": _INT, "u": _UINT, "f": _FLOAT, "b": _BOOL}[dtype.kind]
    else:
        raise TypeError(
            f"got a numpy array of {dtype}; expected float32, float16, bfloat16 or float64 (masks: bool; "
            "lengths: int32); convert it by astype"
        )
    size = dtype.itemsize
    if not dtype.isnative or any(stride % size for stride in array.strides):
        raise ValueError("got a numpy array with unaligned strides or foreign byte order; give a copy of it")
    strides = tuple(stride // size for stride in array.strides)
    return (array.ctypes.data, code, 8 * size, _CPU, 0, array.shape, strides, array.flags.writeable)


class Form(NamedTuple):
    """An array without memory: enough to make a plan, or to compile."""

    shape: tuple[int, ...]
    dtype: str
    """ "float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "bool" or "float8_e4m3fn"."""
    device: int = _CPU
    """As in DLPack: 1 is the CPU, 2 CUDA."""


_DTYPES = {
    "float32": (_FLOAT, 32),
    "float16": (_FLOAT, 16),
    "bfloat16": (_BFLOAT, 16),
    "float64": (_FLOAT, 64),
    "int32": (_INT, 32),
    "int64": (_INT, 64),
    "uint8": (_UINT, 8),
    "bool": (_BOOL, 8),
    "float8_e4m3fn": (_FLOAT8_E4M3FN, 8),
}


def _describe_form(form: Form) -> tuple[Any, ...]:
    if form.dtype not in _DTYPES:
        raise TypeError(
            f"got an array of {form.dtype}; expected float32, float16, bfloat16 or float64 (masks: bool or uint8; lengths: "
            "int32); convert it by astype"
        )
    strides = [1]
    for size in reversed(form.shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return (0, *_DTYPES[form.dtype], form.device, 0, form.shape, tuple(reversed(strides[: len(form.shape)])), True)


def _cupy() -> tuple[Any, Any, Any, bool]:
    import cupy

    def allocate(size: int, device: int) -> tuple[Any, int]:
        with cupy.cuda.Device(device):
            memory = cupy.cuda.alloc(size)
        return memory, memory.ptr

    def stream(device: int) -> int:
        return int(cupy.cuda.get_current_stream(device).ptr)

    return (None, allocate, stream, False)


_core.on_new_type(_on_new_type)


class Results:
    """Makes arrays of the library and on the device of `like`."""

    def __init__(self, like: Any) -> None:
        cls = type(like)
        self._like = like
        self._convert = None
        if cls.__module__.split(".")[0] == "cupy":
            import cupy

            self._module: Any = cupy
            self._device: Any = like.device
            return
        import numpy

        self._module = numpy
        self._device = None
        if isinstance(like, numpy.ndarray):
            return
        kind, _ = like.__dlpack_device__() if hasattr(like, "__dlpack_device__") else (_CPU, 0)
        if kind != _CPU:
            raise TypeError(
                f"q: got {cls.__module__}.{cls.__name__} in memory of a GPU; expected an array of PyTorch, CuPy or JAX "
                "there; hand it over to one of them by from_dlpack"
            )
        # Memory of numpy, in the form of the caller's library where that library can take it over.
        namespace = getattr(like, "__array_namespace__", None)
        if namespace is not None:
            self._convert = getattr(namespace(), "from_dlpack", None)

    def empty(self, shape: tuple[int, ...], like: Any = None) -> Any:
        """An array of this shape; its elements have the type of `like`, or are float32."""
        return self._empty(shape, self._module.float32 if like is None else like.dtype)

    def output(self, shape: tuple[int, ...], q: Any) -> Any:
        """An array for o: of the type of q, or of bfloat16 where q has 8 bits."""
        of_8_bits = getattr(q.dtype, "name", "") == "float8_e4m3fn"
        return self._empty(shape, _bfloat16_of_numpy() if of_8_bits else q.dtype)

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        if self._device is not None:
            with self._device:
                return self._module.empty(shape, dtype)
        return self._module.empty(shape, dtype)

    def cast(self, array: Any, like: Any) -> Any:
        """`array` in the type of `like`, which may be of another library."""
        dtype = getattr(like, "dtype", array.dtype)
        return array if str(dtype) == str(array.dtype) else array.astype(dtype)

    def done(self, array: Any) -> Any:
        return array if self._convert is None or array is None else self._convert(array)


def results_like(array: Any) -> Any:
    """The Results that makes arrays of the library of `array`."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        from .torch._arrays import Results as of_torch

        return of_torch(array)
    return Results(array)
