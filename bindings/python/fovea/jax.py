"""Attention for JAX, through XLA's foreign-function interface on CPUs and NVIDIA GPUs: under jit and differentiable.

    o = fovea.jax.attend(q, k, v, causal=True)  # (batch, seqlen, heads, size)

Needs JAX 0.5 or newer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from ._arrays import Form
from ._attend import numbers, output_shapes

_TARGET = "fovea_attend"
for _platform, _name in (("cpu", "cpu"), ("cuda", "CUDA")):  # the latter as JAX's plugin for CUDA spells it
    jax.ffi.register_ffi_target(_TARGET, _core.xla_handler(_platform), platform=_name)

# In the order of the compiled part.
_ROLES = (
    "q k v o lse d_o dlse dq dk dv dbias dsink bias mask block_mask alibi sink cu_seqlens_q cu_seqlens_k seqused_q seqused_k"
).split()
_INTEGERS = (
    "causal window_left window_right block_q block_k max_seqlen_q max_seqlen_k seed offset deterministic num_threads"
).split()
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sink")


def _form(x: Any) -> Form:
    return Form(tuple(x.shape), str(x.dtype))


def _call(backward: bool, settings: dict[str, Any], inputs: dict[str, Any], outputs: dict[str, Any]) -> list[Any]:
    """Results in the order of `outputs` (name -> shape and type)."""
    given = {name: x for name, x in inputs.items() if x is not None}
    # Errors come here, while the program is traced, and not from XLA.
    check = _core.plan_backward if backward else _core.plan_forward
    forms = {name: _form(x) for name, x in (given | outputs).items()}
    if settings["backend"] is None:
        check(**forms, **settings)
    integers = [int(backward), *(int(settings[name]) for name in _INTEGERS)]
    integers = [x - 2**64 if x >= 2**63 else x for x in integers]
    call = jax.ffi.ffi_call(_TARGET, list(outputs.values()), vmap_method="sequential")
    return call(
        *given.values(),
        roles=np.array([_ROLES.index(name) for name in (*given, *outputs)], np.int64),
        numbers=np.array([settings["scale"] or 0.0, settings["softcap"], settings["dropout"]], np.float64),
        integers=np.array(integers, np.int64),
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
            "o": jax.ShapeDtypeStruct(o_shape, q.dtype),
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


def _check_static(**given: Any) -> None:
    for name, value in given.items():
        if isinstance(value, jax.core.Tracer):
            raise TypeError(f"{name}: got a traced value; expected a number that is known under jit; use static_argnames")


def _attend(
    q: Any, k: Any, v: Any, tensors: dict[str, Any], settings: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    arrays = {"q": q, "k": k, "v": v, **tensors}
    for name, x in arrays.items():
        if x is not None and not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{name}: got {type(x).__name__}; expected an array of JAX; use jax.numpy.asarray")
    settings = {"deterministic": False} | settings | options
    differentiable = {name: arrays.pop(name) for name in _DIFFERENTIABLE}
    return _function(tuple(sorted(settings.items())))(differentiable, arrays)


def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi: Any = None,
    bias: Any = None,
    mask: Any = None,
    block_mask: Any = None,
    block_size: Sequence[int] = (0, 0),
    sink: Any = None,
    dropout: float = 0.0,
    seed: int = 0,
    offset: int = 0,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    seqused_q: Any = None,
    seqused_k: Any = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
    num_threads: int = 0,
) -> Any:
    """fovea.attend for arrays of JAX, with gradients of q, k, v, bias and sink; lse is differentiable, too.

    Arguments and results are those of fovea.attend; numbers are static under jit. deterministic: the backward gives the same
    bits each time on a GPU, too. vmap computes one element after the other. Second derivatives are not there.

    Raises as fovea.attend does, while the program is traced; what only the contents of cu_seqlens and seqused tell comes
    from XLA, as jax.errors.JaxRuntimeError.
    """
    _check_static(scale=scale, causal=causal, softcap=softcap, dropout=dropout, seed=seed, offset=offset)
    settings = numbers(scale, causal, window, softcap, dropout, seed, offset, block_size)
    settings |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "deterministic": deterministic}
    tensors = {
        "bias": bias,
        "mask": mask,
        "block_mask": block_mask,
        "alibi": alibi,
        "sink": sink,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
    }
    o, lse = _attend(q, k, v, tensors, settings, {"backend": backend, "num_threads": num_threads})
    return (o, lse) if return_lse else o
