"""compile: the kernels of a problem, made ahead of time for a GPU that need not be here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _core
from ._arguments import TENSORS, Options, output_shapes, shape_of, takes_options
from ._arrays import Form
from .expressions import float_tensors, traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CompiledKernel(NamedTuple):
    """A kernel that `compile` has put into the folder, or found there."""

    kernel: str
    """Its name, as in explain and profiles."""
    registers: int
    """Of a thread; -1: not known."""
    spilled_bytes: int
    """Of a thread; -1: not known."""
    seconds: float
    """What it took, with reading or writing the file."""
    state: str
    """ "compiled", or "kept" where the folder had it."""
    file: str
    """Where it is."""


def _type_name(array: Any, name: str) -> str:
    """ "bfloat16" of the types of any library: numpy's have a name, PyTorch's is the end of their text."""
    dtype = getattr(array, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name}: got {type(array).__name__} without dtype; expected an array, or a fovea.Form of its shape and type")
    return str(getattr(dtype, "name", None) or str(dtype).rpartition(".")[2])


def _described(array: Any, name: str) -> Any:
    """`array`, or its Form where it has no memory: PyTorch's device "meta", jax.ShapeDtypeStruct."""
    has_memory = hasattr(array, "__dlpack__") and getattr(getattr(array, "device", None), "type", "") != "meta"
    if array is None or has_memory or isinstance(array, Form):
        return array
    return Form(shape_of(array, name), _type_name(array, name))


def _wanted(gradients: Sequence[str] | None, known: dict[str, Any]) -> dict[str, Any]:
    """Those of `known` that get gradients: the names in `gradients`, or all."""
    if gradients is None:
        return known
    if isinstance(gradients, str):
        raise TypeError(f"gradients: got {gradients!r}; expected a sequence of names; give it as a tuple")
    for name in gradients:
        if name not in known:
            raise ValueError(
                f"gradients: got {name!r}; expected names out of {', '.join(known) or 'none, as there is nothing that has one'}; "
                "these are bias, sink, and the float tensors that score reads"
            )
    return {name: known[name] for name in known if name in gradients}


def _gradients(arrays: dict[str, Any], options: dict[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Forms of what the backward reads and writes beside the forward's arguments and results; those of tensors by their names
    in "tensor_gradients"."""
    terms = {name: options[name] for name in ("bias", "sink") if options.get(name) is not None}
    tensors = float_tensors(options)
    known = _wanted(wanted, terms | tensors)
    sources = {name: arrays[name] for name in ("q", "k", "v")} | {name: x for name, x in terms.items() if name in known}
    forms = {f"d{name}": Form(shape_of(x, name), _type_name(x, name)) for name, x in sources.items()}
    named = {name: Form(shape_of(x, name), "float32") for name, x in tensors.items() if name in known}
    return {"d_o": arrays["o"], **forms, "tensor_gradients": named}


@takes_options
def compile(
    q: Any,
    k: Any,
    v: Any,
    *,
    chip: str,
    num_sms: int = 0,
    folder: str | os.PathLike[str] | None = None,
    backward: bool = False,
    return_lse: bool = False,
    gradients: Sequence[str] | None = None,
    **options: Unpack[Options],
) -> list[CompiledKernel]:
    """Compiles what attend(q, k, v, ...), or its backward, would compile on a GPU of `chip`, into a folder that programs without
    NVRTC find through FOVEA_CACHE_DIR.

    It needs NVRTC for kernels that the folder lacks, and no GPU. Arguments are those of attend, and

        q, k, v, and other arrays: nothing is read but shapes, strides and types, wherever they lie. fovea.Form(shape, type)
            stands for an array that does not exist; so do PyTorch's tensors on the device "meta" and jax.ShapeDtypeStruct.
        chip: "sm_80", "sm_90", ...
        num_sms: of the GPU, which decide among tile sizes; 0 takes those of the chip's usual GPU.
        folder: where kernels are kept; None is the user's cache.
        backward: the backward in place of the forward.
        return_lse: whether the forward gives lse, as it does for attend(..., return_lse=True) and where gradients follow.
        gradients: names of what the backward gives gradients of beside q, k and v: "bias", "sink", and float tensors that score
            reads; None is all, as in attend_backward. PyTorch asks for those that require gradients.

    Returns a CompiledKernel for each kernel; an empty list where the library holds all of them.

    Raises as attend does; ValueError says what is missing where NVRTC is.
    """
    options = traced({name: _described(x, name) if name in TENSORS else x for name, x in options.items()})
    if options.get("tensors"):
        options["tensors"] = {name: _described(x, f"tensors.{name}") for name, x in options["tensors"].items()}
    arrays = {name: _described(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
    o_shape, lse_shape = output_shapes(arrays["q"], arrays["v"], options.get("cu_seqlens_q") is not None)
    type_of_q = _type_name(arrays["q"], "q")
    arrays["o"] = Form(o_shape, "bfloat16" if type_of_q == "float8_e4m3fn" else type_of_q)
    arrays["lse"] = Form(lse_shape, "float32") if return_lse or backward else None
    more = _gradients(arrays, options, gradients) if backward else {}
    place = None if folder is None else os.fsencode(os.path.abspath(folder))
    report = _core.compile(backward, chip, num_sms, place, **arrays, **options, **more)
    return [_kernel(line) for line in report.split("\n") if line]


def _kernel(line: str) -> CompiledKernel:
    kernel, registers, spilled_bytes, seconds, state, file = line.split("\t", 5)
    return CompiledKernel(kernel, int(registers), int(spilled_bytes), float(seconds), state, file)
