"""attend for tensors. Eager calls go straight to the compiled part; torch.compile, torch.func and subclasses get the operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import _core
from .._arguments import TENSORS, Options, complete, output_shapes, takes_options
from ..expressions import float_tensors, traced
from . import _ops, _transforms
from ._arrays import PLAIN

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Bound once: each attribute look-up would cost a call about 30 ns.
_functorch_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
# torch.compile replaces its call by True. Other tracers use fake tensors, which CHECKS and is_plain refuse.
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
_attend_now = _core.attend
_empty_like = torch.empty_like
_FLOAT32 = torch.float32
# _core.attend calls these before it reads memory: the first says whether gradients are recorded, each other one that is true
# sends the call to the general path.
CHECKS = (_is_grad_enabled, _functorch_active, _dispatch_modes, torch._C._is_any_autocast_enabled)
CHECKS_WITHOUT_AUTOCAST = CHECKS[:3]
CHECKS_WITHOUT_GRADIENTS = (lambda: False, *CHECKS[1:3])


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True when the host may read the memory of these now: plain tensors, no dispatch mode, no transform of torch.func."""
    return (
        type(q) in PLAIN
        and type(k) in PLAIN
        and type(v) in PLAIN
        and not _functorch_active()
        and not _dispatch_modes()
    )


def new_output(q: Tensor, v: Tensor) -> Tensor:
    """Memory for o: strides as q has them where it lies without gaps."""
    size = v.shape[-1]
    return _empty_like(q) if size == q.shape[-1] else q.new_empty((*q.shape[:-1], size))


def new_lse(q: Tensor) -> Tensor:
    shape = q.shape
    if len(shape) == 3:
        return q.new_empty((shape[1], shape[0]), dtype=_FLOAT32)
    return q.new_empty((shape[0], shape[2], shape[1]), dtype=_FLOAT32)


def compute(q: Tensor, k: Tensor, v: Tensor, need_lse: bool, arguments: dict[str, Any]) -> tuple[Any, Tensor, Tensor, Tensor]:
    """(o or (o, lse), q, k, v) of plain tensors. Copies q, k and v where a last dimension is not contiguous."""
    made = _attend_now(q, k, v, need_lse, False, None, arguments)
    if made is None:
        output_shapes(q, v, arguments.get("cu_seqlens_q") is not None)
        q, k, v = _ops.contiguous_rows(q), _ops.contiguous_rows(k), _ops.contiguous_rows(v)
        if arguments.get("qv") is not None:
            arguments = {**arguments, "qv": _ops.contiguous_rows(arguments["qv"])}
        made = _attend_now(q, k, v, need_lse, False, None, arguments)
    if made is None:
        raise ValueError(f"k: got shape {tuple(k.shape)}; expected {q.ndim} dimensions, as q; reshape it")
    return made, q, k, v


def backward_pass(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    options: dict[str, Any],
    into: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a forward with these options, without autograd; written into `into` where it is given."""
    q, k, v = _ops.contiguous_rows(q), _ops.contiguous_rows(k), _ops.contiguous_rows(v)
    dq, dk, dv = (_empty_like(x) if made is None else made for x, made in zip((q, k, v), into, strict=True))
    d_o = _ops.contiguous_rows(d_o)
    _core.backward(q=q, k=k, v=v, o=o, lse=lse.contiguous(), d_o=d_o, dq=dq, dk=dk, dv=dv, **options)
    return dq, dk, dv


def _gradients(
    ctx: Any,
    d_o: Tensor | None,
    dlse: Tensor | None,
    bias: Tensor | None,
    sink: Tensor | None,
    need_dbias: bool,
    need_dsink: bool,
    gradients: dict[str, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dbias, dsink) for the context of Attend or _Output; None where there is nothing to differentiate. `gradients`
    gets those of the tensors of expressions."""
    q, k, v, o, lse = ctx.saved_tensors[:5]
    arguments = ctx.arguments
    if torch.are_deterministic_algorithms_enabled():
        arguments = arguments | {"deterministic": True}
    d_o = torch.zeros_like(o) if d_o is None else _ops.contiguous_rows(d_o)
    if torch.is_grad_enabled():  # create_graph=True: the operator refuses second derivatives, and says so
        common = complete(arguments | {"bias": bias, "sink": sink}).values()
        seed = torch.tensor([arguments.get("seed") or 0, arguments.get("offset") or 0], dtype=torch.int64)
        dq, dk, dv, dbias, dsink = torch.ops.fovea.backward(
            d_o, dlse, q, k, v, o, lse, seed, need_dbias, need_dsink, *common
        )
        return dq, dk, dv, dbias if need_dbias else None, dsink if need_dsink else None
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if need_dbias else None
    dsink = _empty_like(sink) if need_dsink else None
    _core.backward(
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        d_o=d_o,
        dlse=dlse,
        dq=dq,
        dk=dk,
        dv=dv,
        dbias=dbias,
        dsink=dsink,
        bias=bias,
        sink=sink,
        **arguments,
        tensor_gradients=gradients,
    )
    return dq, dk, dv, dbias, dsink


class Attend(torch.autograd.Function):
    """(o, lse) of plain tensors. `arguments` are the options without bias and sink, which may need gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, arguments: dict[str, Any]) -> Any:
        (o, lse), q, k, v = compute(q, k, v, True, {**arguments, "bias": bias, "sink": sink})
        ctx.save_for_backward(q, k, v, o, lse, bias, sink)
        ctx.arguments = arguments
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, dlse: Tensor | None) -> Any:
        bias, sink = ctx.saved_tensors[5:]
        return (*_gradients(ctx, d_o, dlse, bias, sink, *ctx.needs_input_grad[3:5]), None)


class _AttendByExpressions(torch.autograd.Function):
    """Attend with traced expressions: their tensors come last, in the order of the names in arguments["tensors"]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, sink: Any, arguments: dict[str, Any], *tensors: Any) -> Any:
        (o, lse), q, k, v = compute(q, k, v, True, {**arguments, "bias": bias, "sink": sink})
        ctx.save_for_backward(q, k, v, o, lse, bias, sink, *tensors)
        ctx.names = tuple(arguments["tensors"])
        ctx.arguments = {name: x for name, x in arguments.items() if name != "tensors"}
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, dlse: Tensor | None) -> Any:
        bias, sink, *tensors = ctx.saved_tensors[5:]
        named = dict(zip(ctx.names, tensors, strict=True))
        readable = float_tensors({**ctx.arguments, "tensors": named})
        gradients = {
            name: torch.empty(named[name].shape, dtype=_FLOAT32, device=named[name].device)
            for name, needed in zip(ctx.names, ctx.needs_input_grad[6:], strict=True)
            if needed and name in readable
        }
        arguments, ctx.arguments = ctx.arguments, {**ctx.arguments, "tensors": named}
        try:
            found = _gradients(ctx, d_o, dlse, bias, sink, *ctx.needs_input_grad[3:5], gradients)
        finally:
            ctx.arguments = arguments
        others = (gradients[name].to(x.dtype) if name in gradients else None for name, x in named.items())
        return (*found, None, *others)


class _Output(torch.autograd.Function):
    """o of plain tensors, without lse, bias and sink: each tensor that autograd tracks costs a part of a microsecond."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> Any:
        made = _attend_now(q, k, v, True, False, None, arguments)
        if made is None:
            made, q, k, v = compute(q, k, v, True, arguments)
        o, lse = made
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.arguments = arguments
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> Any:
        return (*_gradients(ctx, d_o, None, None, None, False, False)[:3], None)


# torch.autograd.Function.apply without its Python code, which serves torch.func only: is_plain has excluded that.
attend_output = super(torch.autograd.Function, _Output).apply


def through_operator(q: Tensor, k: Tensor, v: Tensor, draw_seed: bool, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    common = complete(arguments).values()
    transformed = not torch.compiler.is_compiling() and _functorch_active()
    call = _transforms.Forward.apply if transformed else torch.ops.fovea.forward
    o, lse, _ = call(q, k, v, draw_seed, *common)
    return o, lse


def needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def attend_by_expressions(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], *, need_lse: bool) -> tuple[Tensor, Any]:
    """attend_any with score or sees."""
    if not is_plain(q, k, v):
        complete(arguments)  # refuses, and says so
    arguments = traced(arguments)
    tensors = arguments["tensors"]
    _check_tensors({f"tensors[{name!r}]": x for name, x in tensors.items()})
    bias, sink = arguments.get("bias"), arguments.get("sink")
    if needs_grad(q, k, v, bias, sink, *tensors.values()):
        rest = {name: value for name, value in arguments.items() if name not in ("bias", "sink")}
        o, lse = _AttendByExpressions.apply(q, k, v, bias, sink, rest, *tensors.values())
        return o, lse
    made = compute(q, k, v, need_lse, arguments)[0]
    return made if need_lse else (made, None)


# Dynamo leaves the graph here and comes back after it.
_attend_outside_graph = torch.compiler.disable(attend_by_expressions)


def attend_any(
    q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], *, draw_seed: bool = False, need_lse: bool = True
) -> tuple[Tensor, Tensor | None]:
    """(o, lse) with gradients; lse may be None unless need_lse. `arguments`: options of fovea.attend."""
    if needs_grad(arguments.get("qv")):
        raise ValueError(
            "qv: got a tensor that needs gradients; expected none, as there are none of qv; use torch.no_grad(), or give rows "
            "[q, qv] as q and [k, v] as k"
        )
    if arguments.get("score") or arguments.get("sees") or arguments.get("tensors"):
        if draw_seed:
            arguments = {**arguments, "seed": _ops.draw_seed()}
        return _attend_outside_graph(q, k, v, arguments, need_lse=need_lse)
    if torch.compiler.is_compiling() or not is_plain(q, k, v):
        return through_operator(q, k, v, draw_seed, arguments)
    if draw_seed:
        arguments = {**arguments, "seed": _ops.draw_seed()}
    bias, sink = arguments.get("bias"), arguments.get("sink")
    if needs_grad(q, k, v, bias, sink):
        rest = {name: value for name, value in arguments.items() if name not in ("bias", "sink")}
        if not need_lse and bias is None and sink is None:
            return attend_output(q, k, v, rest), None
        o, lse = Attend.apply(q, k, v, bias, sink, rest)
        return o, lse
    made = compute(q, k, v, need_lse, arguments)[0]
    return made if need_lse else (made, None)


def _check_tensors(named: dict[str, Any]) -> None:
    for name, x in named.items():
        if x is not None and not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor, as q; use torch.from_numpy or the like")


def attend_checked(
    q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], *, need_lse: bool, draw_seed: bool = False
) -> tuple[Tensor, Tensor | None]:
    """attend_any with checks of types and ranks, and with the casts of torch.autocast."""
    _check_tensors({"q": q, "k": k, "v": v, **{name: options[name] for name in TENSORS if name in options}})
    output_shapes(q, v, options.get("cu_seqlens_q") is not None)
    if q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x if x.dtype == torch.float8_e4m3fn else x.to(dtype) for x in (q, k, v))
        if options.get("qv") is not None:
            options = {**options, "qv": options["qv"].to(dtype)}
        bias = options.get("bias")
        if bias is not None and bias.dtype != dtype:
            options = {**options, "bias": bias.float()}
    return attend_any(q, k, v, options, draw_seed=draw_seed, need_lse=need_lse)


def attend_options(
    q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: dict[str, Any], draw_seed: bool = False
) -> Any:
    """o, or (o, lse) with return_lse. draw_seed: the seed of dropout comes from PyTorch's generator."""
    if not draw_seed and not _dynamo_compiling():
        made = _attend_now(q, k, v, return_lse, False, CHECKS, options)
        if made is not None:
            return made
    o, lse = attend_checked(q, k, v, options, need_lse=return_lse, draw_seed=draw_seed)
    return (o, lse) if return_lse else o


@takes_options
def attend(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, seed: int | None = None, **options: Unpack[Options]
) -> Any:
    """fovea.attend for tensors, with gradients of q, k, v, bias and sink; lse is differentiable, too.

    Arguments and results are those of fovea.attend, but for two:
        seed: of dropout; None draws it from PyTorch's generator of the CPU, so torch.manual_seed repeats it.
        deterministic: the backward gives the same bits each time on a GPU, too; torch.use_deterministic_algorithms(True)
            asks for the same.

    Under torch.autocast q, k and v are cast to its type, but for those of 8 bits. A tensor whose last dimension is not contiguous is copied; other
    strides are taken as they are. Raises as fovea.attend does.
    """
    if seed is not None:
        return attend_options(q, k, v, return_lse, {**options, "seed": seed})
    return attend_options(q, k, v, return_lse, options, bool(options.get("dropout")))
