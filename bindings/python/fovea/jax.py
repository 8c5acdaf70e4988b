"""Attention for JAX, through XLA's foreign-function interface on CPUs and NVIDIA GPUs: under jit and differentiable.

    o = fovea.jax.attend(q, k, v, causal=True)  # (batch, seqlen, heads, size)

Needs JAX 0.5 or newer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._arguments import NUMBERS, TENSORS, Options, complete, output_shapes, takes_options
from ._arrays import Form

if TYPE_CHECKING:
    from typing_extensions import Unpack

_TARGET = "fovea_attend"
for _platform, _name in (("cpu", "cpu"), ("cuda", "CUDA")):  # the latter as JAX's plugin for CUDA spells it
    jax.ffi.register_ffi_target(_TARGET, _core.xla_handler(_platform), platform=_name)

_ROLES = _core.roles()
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


def _form(x: Any) -> Form:
    return Form(tuple(x.shape), str(x.dtype))


def _numbers(backward: bool, settings: dict[str, Any]) -> tuple[Any, Any]:
    """(floats, integers) for the compiled part: the pass, then the numbers in the order of their list, pairs as two."""
    floats, integers = [], [int(backward)]
    for name, number in NUMBERS.items():
        value = settings[name]
        if number.schema.startswith("float"):
            floats.append(value or 0.0)
        elif name != "backend":
            integers += value if isinstance(value, tuple) else [int(value)]
    words = [x - 2**64 if x >= 2**63 else x for x in integers]
    return np.array(floats, np.float64), np.array(words, np.int64)


def _call(backward: bool, settings: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> list[Any]:
    """Results in the order of `outputs` (name -> shape and type)."""
    given = {name: x for name, x in inputs.items() if x is not None}
    # Errors come here, while the program is traced, and not from XLA.
    check = _core.plan_backward if backward else _core.plan_forward
    forms = {name: _form(x) for name, x in (given | outputs).items()}
    if settings["backend"] is None:
        check(**forms, **settings)
    floats, integers = _numbers(backward, settings)
    call = jax.ffi.ffi_call(_TARGET, list(outputs.values()), vmap_method="sequential")
    return call(
        *given.values(),
        roles=np.array([_ROLES.index(name) for name in (*given, *outputs)], np.int64),
        numbers=floats,
        integers=integers,
        backend=settings["backend"] or "",
    )


@functools.lru_cache(maxsize=1024)
def _function(frozen: tuple[tuple[str, Any], ...]) -> Any:
    """(differentiable arrays, others) -> (o, lse), for one set of numbers."""
    settings = dict(frozen)

    def forward(arrays: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any]:
        q, v = arrays["q"], arrays["v"]
        o_shape, lse_shape = output_shapes(q, v, others["cu_seqlens_q"] is not None)
        outputs = {
            "o": jax.ShapeDtypeStruct(o_shape, jnp.bfloat16 if q.dtype == jnp.float8_e4m3fn else q.dtype),
            "lse": jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        }
        o, lse = _call(False, settings, arrays | others, outputs)
        return o, lse

    def forward_and_residuals(arrays: dict[str, Any], others: dict[str, Any]) -> tuple[Any, Any]:
        o, lse = forward(arrays, others)
        return (o, lse), (arrays, others, o, lse)

    def backward(residuals: Any, gradients: Any) -> tuple[Any, Any]:
        arrays, others, o, lse = residuals
        d_o, dlse = gradients
        inputs = arrays | others | {"o": o, "lse": lse, "d_o": d_o, "dlse": dlse}
        outputs = {f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items() if x is not None}
        found = dict(zip(outputs, _call(True, settings, inputs, outputs), strict=True))
        return {name: found.get(f"d{name}") for name in arrays}, None

    call = jax.custom_vjp(forward)
    call.defvjp(forward_and_residuals, backward)
    return call


def _check_static(options: dict[str, Any]) -> None:
    for name in NUMBERS:
        if isinstance(options.get(name), jax.core.Tracer):
            raise TypeError(f"{name}: got a traced value; expected a number that is known under jit; use static_argnames")


def attend_options(q: Any, k: Any, v: Any, return_lse: bool, options: dict[str, Any]) -> Any:
    """attend of what a user gave: o, or (o, lse)."""
    _check_static(options)
    settings = complete(options)
    arrays = {"q": q, "k": k, "v": v} | {name: settings.pop(name) for name in TENSORS}
    for name, x in arrays.items():
        if x is not None and not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: got {type(x).__name__}; expected an array of JAX; use jax.numpy.asarray")
    differentiable = {name: arrays.pop(name) for name in _DIFFERENTIABLE}
    o, lse = _function(tuple(settings.items()))(differentiable, arrays)
    return (o, lse) if return_lse else o


@takes_options
def attend(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[Options]) -> Any:
    """fovea.attend for arrays of JAX, with gradients of q, k, v, bias and sink; lse is differentiable, too.

    Arguments and results are those of fovea.attend; numbers are static under jit. vmap computes one element after the other.
    Second derivatives are not there.

    Raises as fovea.attend does, while the program is traced; what only the contents of cu_seqlens and seqused tell comes
    from XLA, as jax.errors.JaxRuntimeError.
    """
    return attend_options(q, k, v, return_lse, options)
