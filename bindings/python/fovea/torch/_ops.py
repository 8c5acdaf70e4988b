"""The operators fovea::forward, fovea::backward, fovea::append and fovea::merge: what torch.compile, torch.func and tensor subclasses see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _core
from .._arguments import NUMBERS, TENSORS, output_shapes
from ._arrays import output_type

# What both operators take after their own arguments.
_COMMON = ", ".join([f"Tensor? {name}" for name in TENSORS] + [f"{number.schema} {name}" for name, number in NUMBERS.items()])

_library = torch.library.Library("fovea", "DEF")
# draw_seed: True draws the seed from PyTorch's generator, False takes `seed`. rng_state holds (seed, offset) under dropout. It lies
# on the CPU, so that torch.compile puts no random draw into a CUDA graph. Without dropout it is empty and on the device of q.
_library.define(
    f"forward(Tensor q, Tensor k, Tensor v, bool draw_seed, {_COMMON}) -> (Tensor o, Tensor lse, Tensor rng_state)",
    tags=[torch.Tag.needs_fixed_stride_order],
)
_library.define(
    "backward(Tensor d_o, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor rng_state, "
    f"bool need_dbias, bool need_dsink, {_COMMON}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    tags=[torch.Tag.needs_fixed_stride_order],
)
# Attention over a cache, behind rows that are appended to it (fovea/_cache.py).
_library.define(
    "append(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor k_new, Tensor v_new, Tensor? cu_seqlens_k_new, Tensor? rotary_cos, "
    f"Tensor? rotary_sin, Tensor? rotary_positions, bool rotary_interleaved, {_COMMON}) -> (Tensor o, Tensor lse)",
    tags=[torch.Tag.needs_fixed_stride_order],
)
# Results over disjoint keys (fovea.merge); `dtype`: of o, None for that of the first part. Not differentiable.
_library.define("merge(Tensor[] o_parts, Tensor[] lse_parts, ScalarType? dtype) -> (Tensor o, Tensor lse)")
NEW_ROWS = (
    "k_new", "v_new", "cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_positions", "rotary_interleaved",
)  # fmt: skip


def contiguous_rows(x: Tensor | None) -> Tensor | None:
    """`x`, or a copy of it whose last dimension is contiguous."""
    return x if x is None or x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def draw_seed() -> int:
    """63 bits from PyTorch's default generator: torch.manual_seed repeats them."""
    return int(torch.randint(0, 2**63 - 1, ()).item())


def named(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Options by name, from the positional arguments of an operator."""
    return dict(zip((*TENSORS, *NUMBERS), arguments, strict=True))


def _readable(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The same, with rows that the compiled part can read."""
    options = named(arguments)
    return options | {"qv": contiguous_rows(options["qv"])}


def _outputs(q: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor]:
    o_shape, lse_shape = output_shapes(q, v, packed)
    return q.new_empty(o_shape, dtype=output_type(q)), q.new_empty(lse_shape, dtype=torch.float32)


def _forward(q: Tensor, k: Tensor, v: Tensor, draw: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = _readable(rest)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    o, lse = _outputs(q, v, arguments["cu_seqlens_q"] is not None)
    seed = draw_seed() if draw else arguments["seed"]
    _core.forward(q=q, k=k, v=v, o=o, lse=lse, **(arguments | {"seed": seed}))
    if arguments["dropout"] > 0:
        return o, lse, torch.tensor([seed, arguments["offset"]], dtype=torch.int64, device="cpu")
    return o, lse, q.new_empty(0, dtype=torch.int64)


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, draw: bool, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    arguments = named(rest)
    o, lse = _outputs(q, v, arguments["cu_seqlens_q"] is not None)
    if arguments["dropout"] > 0:
        return o, lse, torch.empty(2, dtype=torch.int64, device="cpu")
    return o, lse, q.new_empty(0, dtype=torch.int64)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, need_dbias: bool, need_dsink: bool, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, ...]:
    dbias = q.new_empty(bias.shape if need_dbias else (0,), dtype=bias.dtype if need_dbias else None)
    dsink = q.new_empty(sink.shape if need_dsink else (0,), dtype=torch.float32)
    return (*(q.new_empty(x.shape) for x in (q, k, v)), dbias, dsink)


def _backward(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rng_state: Tensor,
    need_dbias: bool,
    need_dsink: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    arguments = named(rest)
    gradients = _gradients(q, k, v, need_dbias, need_dsink, arguments["bias"], arguments["sink"])
    if arguments["dropout"] > 0:
        arguments["seed"], arguments["offset"] = rng_state.tolist()
    dq, dk, dv, dbias, dsink = gradients
    _core.backward(
        q=contiguous_rows(q),
        k=contiguous_rows(k),
        v=contiguous_rows(v),
        o=o,
        lse=lse,
        d_o=contiguous_rows(d_o),
        dlse=dlse,
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=dbias if need_dbias else None,
        dsink=dsink if need_dsink else None,
        **arguments,
    )
    return gradients


def _backward_fake(
    d_o: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rng_state: Tensor,
    need_dbias: bool,
    need_dsink: bool,
    *rest: Any,
) -> tuple[Tensor, ...]:
    arguments = named(rest)
    return _gradients(q, k, v, need_dbias, need_dsink, arguments["bias"], arguments["sink"])


def _append(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    new = dict(zip(NEW_ROWS, rest[: len(NEW_ROWS)], strict=True))
    arguments = _readable(rest[len(NEW_ROWS) :])
    o, lse = _outputs(q, v, arguments["cu_seqlens_q"] is not None)
    _core.forward(q=contiguous_rows(q), k=k, v=v, o=o, lse=lse, **new, **arguments)
    return o, lse


def _append_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, named(rest[len(NEW_ROWS) :])["cu_seqlens_q"] is not None)


def _merged(o_parts: list[Tensor], lse_parts: list[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    first = o_parts[0]
    return (
        torch.empty(first.shape, dtype=dtype or first.dtype, device=first.device),
        torch.empty(lse_parts[0].shape, dtype=torch.float32, device=first.device),
    )


def _merge(o_parts: list[Tensor], lse_parts: list[Tensor], dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    o, lse = _merged(o_parts, lse_parts, dtype)
    _core.merge(tuple(contiguous_rows(x) for x in o_parts), tuple(lse_parts), o, lse)
    return o, lse


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, *rest = inputs
    o, lse, rng_state = output
    ctx.save_for_backward(q, k, v, o, lse, rng_state, *rest[: len(TENSORS)])
    ctx.numbers = rest[len(TENSORS) :]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rng_state)


def differentiate(
    ctx: Any, d_o: Tensor | None, dlse: Tensor | None, _: Any, *, call: Any = torch.ops.fovea.backward
) -> tuple[Tensor | None, ...]:
    """The backward of fovea::forward; `call` computes gradients."""
    q, k, v, o, lse, rng_state, *tensors = ctx.saved_tensors
    numbers = dict(zip(NUMBERS, ctx.numbers, strict=True))
    if torch.are_deterministic_algorithms_enabled():
        numbers["deterministic"] = True
    bias_at, sink_at = TENSORS.index("bias"), TENSORS.index("sink")
    first = 4  # q, k, v, draw_seed come before the optional tensors
    need_dbias = ctx.needs_input_grad[first + bias_at]
    need_dsink = ctx.needs_input_grad[first + sink_at]
    if d_o is None:
        d_o = torch.zeros_like(o)
    dq, dk, dv, dbias, dsink = call(d_o, dlse, q, k, v, o, lse, rng_state, need_dbias, need_dsink, *tensors, *numbers.values())
    others: list[Tensor | None] = [None] * (len(TENSORS) + len(NUMBERS))
    if need_dbias:
        others[bias_at] = dbias
    if need_dsink:
        others[sink_at] = dsink
    return (dq, dk, dv, None, *others)


def refuse_second_derivative(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "fovea::backward: got a second derivative; expected first derivatives only; compute it with "
        "torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH)"
    )


def no_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    pass


_library.impl("forward", _forward, "CPU")
_library.impl("forward", _forward, "CUDA")
_library.impl("append", _append, "CPU")
_library.impl("append", _append, "CUDA")
_library.impl("merge", _merge, "CPU")
_library.impl("merge", _merge, "CUDA")
_library.impl("backward", _backward, "CPU")
_library.impl("backward", _backward, "CUDA")
torch.library.register_fake("fovea::forward", _forward_fake, lib=_library)
torch.library.register_fake("fovea::append", _append_fake, lib=_library)
torch.library.register_fake("fovea::merge", _merged, lib=_library)
torch.library.register_fake("fovea::backward", _backward_fake, lib=_library)
torch.library.register_autograd("fovea::forward", differentiate, setup_context=setup_context, lib=_library)
torch.library.register_autograd("fovea::backward", refuse_second_derivative, setup_context=no_context, lib=_library)
