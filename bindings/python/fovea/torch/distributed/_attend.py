"""attend over ranks: one problem of all, planned together and kept, and its gradients."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import _core
from ..._arguments import DEFAULTS, NUMBERS, PAIRS, TENSORS, Options, pair, takes_options
from ..._attend import Gradients
from ...expressions import float_tensors, traced
from .. import _attend as _single
from .._ops import contiguous_rows, draw_seed
from ._pieces import Pieces, behind_each_other
from ._ranks import Ranks, ranks_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

EVERYWHERE = "everywhere"
"""For `pieces`: every rank has all queries."""

_NAMES = {"queries": "pieces", "keys": "key_pieces"}
# Shapes that a program has at a time; all ranks forget them in the same call. On GPUs plans may have memory of their own.
_MOST_PLANS = {"cpu": 256, "cuda": 16}


@dataclass(frozen=True)
class Call:
    """What all ranks pass alike."""

    ranks: Ranks
    pieces: Pieces | None
    key_pieces: Pieces | None
    starts_q: tuple[int, ...] | None
    starts_k: tuple[int, ...] | None
    method: tuple[int, int, int, int]
    numbers: dict[str, Any]
    stream: dict[str, int]
    """Seed and offset of dropout, which come with each run."""
    tensors: dict[str, Tensor]
    """Those beside q, k, v, the sink and the bias, for the library to take or to refuse."""
    names: tuple[str, ...]
    """Of the tensors of expressions, which come with each call."""
    return_lse: bool


class _Key(NamedTuple):
    """What a plan is kept by: the same on all ranks, so that all have a plan, or all make it. It is without the rows of this rank,
    which the pieces tell; where there are none, all queries are everywhere."""

    backward: bool
    qkv: tuple[Any, ...]
    """Of each, the sizes beside the rows."""
    forms: tuple[Any, ...]
    others: tuple[Any, ...]
    whole: tuple[str, ...]
    where: tuple[Any, ...]
    method: tuple[int, int, int, int]
    numbers: tuple[tuple[str, Any], ...]

    def named(self) -> list[tuple[str, Any]]:
        """Every part under the name that attend has for it."""
        numbers = dict(self.numbers)
        given = {name: DEFAULTS[name] if number == DEFAULTS[name] else number for name, number in numbers.items()}
        options = [(name, given.get(name, DEFAULTS[name])) for name in (*NUMBERS, "score", "sees")]
        places = zip(("pieces", "key_pieces", "cu_seqlens_q", "cu_seqlens_k", "q's rows"), self.where, strict=True)
        return [
            ("backward", self.backward), ("shapes of q, k, v without rows", self.qkv), *options, *places,
            ("heads_ranks, stages, ranks_per_host, memory_limit", self.method),
            ("tensors", (self.forms, self.others, self.whole)),
        ]  # fmt: skip


class _Planned(NamedTuple):
    plan: Any
    number: int
    """The same on all ranks, which make their plans together: how many were made before."""
    forms: dict[str, tuple[torch.Size, tuple[int, ...]]]
    """Shape and strides of each tensor of this rank."""


def _strides(x: Tensor) -> tuple[int, ...]:
    """Of the dimensions that have any."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))


def _with_rows_apart(x: Tensor) -> Tensor:
    """`x`, or a copy of it where elements share memory or a row is not contiguous."""
    end = 1
    for stride, size in sorted((stride, size) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        if stride < end:
            return x.contiguous()
        end = stride * (size - 1) + end
    return contiguous_rows(x)


def _as_planned(x: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """`x` with the strides of the plan, which is this rank's part of one that all ranks share: it cannot be made anew for other
    strides. Another shape is left to the compiled part, which tells the other ranks."""
    if x.shape != shape or _strides(x) == strides:
        return x
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _with_names_of_attend(message: str) -> str:
    """The C ABI's error, which may be another rank's, with arguments as they are called here."""
    message = message.replace("local.", "")
    if message.startswith("seed: got"):
        message = message.replace(
            "pass one value on every rank", "pass one seed on every rank, or none behind the same torch.manual_seed"
        )
    return re.sub(r"\b(queries|keys)((\[\d+\])?: got)", lambda found: _NAMES[found[1]] + found[2], message)


def _key(call: Call, backward: bool, given: dict[str, Tensor], whole: dict[str, dict[str, Tensor]]) -> _Key:
    qkv = tuple((x.shape[:-3], x.shape[-2:]) for x in (given["q"], given["k"], given["v"]))
    queries = given["q"].shape[-3] if call.pieces is None else None
    forms = tuple((name, x.dtype, x.device) for name, x in given.items())
    bias = {"bias": given["bias"]} if "bias" in given else {}
    others = [tuple((name, x.dtype, x.device, x.shape) for name, x in some.items()) for some in (bias, call.tensors, *whole.values())]
    where = (call.pieces, call.key_pieces, call.starts_q, call.starts_k, queries)
    return _Key(backward, qkv, forms, tuple(others), tuple(whole), where, call.method, tuple(sorted(call.numbers.items())))


def _run(
    call: Call,
    backward: bool,
    arrays: dict[str, Tensor | None],
    named: dict[str, Tensor],
    gradients: dict[str, Tensor] | None = None,
) -> None:
    """One pass, over the plan that is kept for it. `named`: tensors of expressions, and those of them that get gradients."""
    given = {name: x for name, x in arrays.items() if x is not None}
    whole = {use: some for use, some in (("tensors", named), ("tensor_gradients", gradients)) if some}
    key = _key(call, backward, given, whole)
    plans = call.ranks.plans
    planned = plans.get(key)
    if planned is None:
        transport = call.ranks.transport(given["q"].device)
        # Ranks of one host share its cores, which PyTorch's number of threads respects.
        threads = {"num_threads": torch.get_num_threads()} if given["q"].device.type == "cpu" else {}
        try:
            plan = _core.plan_ranks(
                transport, backward, call.pieces, call.key_pieces, call.starts_q, call.starts_k, call.method,
                **given, **call.tensors, **threads | call.numbers, **whole,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(_with_names_of_attend(str(error))) from None
        except TypeError as error:  # before the ranks agree on a plan
            call.ranks.stop(str(error))
            raise
        if len(plans) >= _MOST_PLANS[given["q"].device.type]:
            plans.clear()
        forms = {name: (x.shape, _strides(x)) for name, x in given.items()}
        planned = plans[key] = _Planned(plan, call.ranks.next_number(), forms)
    with call.ranks.telling():
        ready = {name: _as_planned(x, *planned.forms[name]) for name, x in given.items()}
    try:
        if given["q"].device.type == "cuda" and call.numbers.get("dropout"):
            call.ranks.require_same(call.stream)  # on CPUs the library does it
        with call.ranks.calling(planned.number):
            _core.run_ranks(planned.plan, **ready, **call.tensors, **whole, **call.stream)
    except ValueError as error:  # all ranks have it, or the library has told them
        raise ValueError(_with_names_of_attend(str(error))) from None
    except Exception as error:
        call.ranks.stop(str(error))
        raise


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: Tensor | None, named: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    with call.ranks.telling():
        o = q.new_empty((*q.shape[:-1], v.shape[-1]))
        lse = _single.new_lse(q)
    _run(call, False, {"q": q, "k": k, "v": v, "o": o, "lse": lse, "sink": sink, "bias": bias}, named)
    return o, lse


class _Attend(torch.autograd.Function):
    """(o, lse), both differentiable. Tensors of expressions come last, in the order of the call's names."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, bias: Tensor | None, call: Call, *tensors: Tensor
    ) -> Any:
        o, lse = _forward(call, q, k, v, sink, bias, dict(zip(call.names, tensors, strict=True)))
        ctx.save_for_backward(q, k, v, sink, bias, o, lse, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_o: Tensor | None, dlse: Tensor | None) -> Any:
        q, k, v, sink, bias, o, lse, *tensors = ctx.saved_tensors
        call: Call = ctx.call
        named = dict(zip(call.names, tensors, strict=True))
        # Whether a rank's loss depends on o or on lse, it makes the plan that all make.
        d_o = torch.zeros_like(o) if d_o is None else d_o.contiguous()
        if call.return_lse:
            dlse = torch.zeros_like(lse) if dlse is None else dlse.contiguous()
        arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "d_o": d_o, "dlse": dlse, "sink": sink, "bias": bias}
        wanted = tuple(name for name, need in zip(named, ctx.needs_input_grad[6:], strict=True) if need)
        found = _backward(call, arrays, named, ctx.needs_input_grad[3], ctx.needs_input_grad[4], wanted)
        tensor_gradients = found.dtensors or {}
        return found.dq, found.dk, found.dv, found.dsink, found.dbias, None, *(tensor_gradients.get(name) for name in named)


def _backward(
    call: Call,
    arrays: dict[str, Tensor | None],
    named: dict[str, Tensor],
    need_dsink: bool,
    need_dbias: bool,
    wanted: tuple[str, ...],
) -> Gradients:
    """Those of this rank's rows, and its share of those of tensors that all ranks have. `wanted`: of the named tensors."""
    with call.ranks.telling():
        if torch.are_deterministic_algorithms_enabled():
            call = replace(call, numbers={**call.numbers, "deterministic": True})
        q, k, v, sink, bias = (arrays[name] for name in ("q", "k", "v", "sink", "bias"))
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        dsink = torch.empty_like(sink) if need_dsink else None
        dbias = torch.empty_like(bias) if need_dbias else None
        gradients = _gradients_of(call, named, wanted)
    _run(call, True, {**arrays, "dq": dq, "dk": dk, "dv": dv, "dsink": dsink, "dbias": dbias}, named, gradients)
    # Each rank has the whole of these. The gradient of a parameter that all hold is summed over the ranks, as a weight's is.
    dsink, dbias = (None if x is None else x / call.ranks.size for x in (dsink, dbias))
    shares = {name: (x / call.ranks.size).to(named[name].dtype) for name, x in gradients.items()}
    return Gradients(dq, dk, dv, dbias, dsink, shares if call.numbers.get("score") else None)


def _gradients_of(call: Call, named: dict[str, Tensor], wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Memory for the gradients of tensors of expressions."""
    readable = float_tensors({"score": call.numbers.get("score"), "tensors": named})
    return {
        name: torch.empty(named[name].shape, dtype=torch.float32, device=named[name].device)
        for name in wanted
        if name in readable
    }


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, others: dict[str, Any]) -> None:
    for name, x in {"q": q, "k": k, "v": v, **others}.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; expected a torch.Tensor; convert it")
    if not _single.is_plain(q, k, v):
        raise TypeError(
            f"q, k, v: got {type(q).__name__}, {type(k).__name__}, {type(v).__name__}; expected plain tensors outside of torch.func; "
            "give to_local() of a DTensor"
        )
    if q.device.type not in ("cpu", "cuda"):
        raise ValueError(f"q: got a tensor on {q.device}; expected cpu or cuda; move it")


def _starts(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    return tuple(given.tolist() if isinstance(given, Tensor) else map(int, given))


def _normal(pieces: Pieces) -> Pieces:
    return tuple((int(rank), int(begin), int(end)) for rank, begin, end in pieces)


def _placements(
    ranks: Ranks, q: Tensor, k: Tensor, pieces: Any, key_pieces: Pieces | None
) -> tuple[Pieces | None, Pieces | None]:
    """(pieces, key_pieces) as the library takes them: None for queries everywhere, and for keys that lie as the queries do."""
    if pieces is not None and not isinstance(pieces, str):
        return _normal(pieces), None if key_pieces is None else _normal(key_pieces)
    if pieces not in (None, EVERYWHERE):
        raise ValueError(f"pieces: got {pieces!r}; expected pieces, None, or EVERYWHERE; make them by contiguous or zigzag")
    if pieces == EVERYWHERE and key_pieces is not None:
        return None, _normal(key_pieces)
    rows_q, rows_k = zip(*ranks.gather([q.shape[-3], k.shape[-3]]), strict=True)
    keys = behind_each_other(rows_k) if key_pieces is None else _normal(key_pieces)
    if pieces == EVERYWHERE:
        return None, keys
    return behind_each_other(rows_q), None if key_pieces is None and rows_q == rows_k else keys


def _number(name: str, value: Any) -> int:
    """The low 64 bits of an integer, as numbers of torch.int64."""
    try:
        word = operator.index(value) % 2**64
    except TypeError:
        raise TypeError(f"{name}: got {value!r}; expected an integer; convert it") from None
    return word - 2**64 if word >= 2**63 else word


def _stream(options: dict[str, Any], rng_state: Tensor | None, is_backward: bool) -> dict[str, int]:
    """Takes seed and offset of dropout out of the options. A forward without a seed draws one, as fovea.torch.attend does: ranks
    whose generators are in different states find out when they run."""
    given = {name: options.pop(name) for name in ("seed", "offset") if options.get(name) is not None}
    if rng_state is not None:
        if given:
            raise ValueError(f"rng_state: got one beside {' and '.join(given)}; expected one of the two; leave the numbers out")
        if not isinstance(rng_state, Tensor) or rng_state.numel() != 2 or rng_state.dtype not in (torch.int64, torch.uint64):
            got = rng_state.dtype if isinstance(rng_state, Tensor) else type(rng_state).__name__
            raise ValueError(f"rng_state: got {got}; expected (2,) int64 or uint64; give what the forward returned")
        given = dict(zip(("seed", "offset"), rng_state.tolist(), strict=True))
    if not options.get("dropout"):
        return {}
    if "seed" not in given:
        if is_backward:
            raise ValueError("rng_state: got None beside dropout; expected what the forward returned; give it, or its seed")
        given["seed"] = draw_seed()
    return {name: _number(name, given.get(name, 0)) for name in ("seed", "offset")}


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """(numbers and texts, tensors, tensors of expressions) of the options that are not their defaults."""
    if options.get("score") or options.get("sees") or options.get("tensors"):
        options = traced(options)
    given = {}
    for name, value in options.items():
        if name not in DEFAULTS:
            raise TypeError(f"unexpected argument {name!r}")
        if name in PAIRS and value is not None:
            value = pair(value, name)
        if value is not None and (name in TENSORS or value != DEFAULTS[name]):
            given[name] = value
    named = given.pop("tensors", None) or {}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"tensors[{name!r}]: got {type(x).__name__}; expected a torch.Tensor; convert it")
    tensors = {name: given.pop(name).contiguous() for name in TENSORS if name in given}
    return given, tensors, {name: x.contiguous() for name, x in named.items()}


class _Inputs(NamedTuple):
    call: Call
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    bias: Tensor | None
    named: dict[str, Tensor]


def _inputs(
    ranks: Ranks,
    qkv: tuple[Tensor, Tensor, Tensor],
    where: tuple[Any, Pieces | None],
    return_lse: bool,
    method: tuple[int, int, int, int],
    options: dict[str, Any],
    rng_state: Tensor | None = None,
    is_backward: bool = False,
) -> _Inputs:
    """What a call is given, checked. `where`: pieces and key_pieces."""
    q, k, v = qkv
    sink, bias = options.pop("sink", None), options.pop("bias", None)
    starts = [_starts(options.pop(name, None)) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    _check_tensors(q, k, v, {name: x for name, x in (("sink", sink), ("bias", bias)) if x is not None})
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) < 3:
        dimensions = f"{q.ndim}, {k.ndim} and {v.ndim} dimensions"
        raise ValueError(f"q, k, v: got {dimensions}; expected 4, or 3 with cu_seqlens_q; reshape them")
    placements = _placements(ranks, q, k, *where)
    stream = _stream(options, rng_state, is_backward)
    numbers, tensors, named = _split(options)
    call = Call(ranks, *placements, *starts, method, numbers, stream, tensors, tuple(named), return_lse)
    q, k, v = (_with_rows_apart(x) for x in (q, k, v))
    return _Inputs(call, q, k, v, sink, None if bias is None else bias.contiguous(), named)


_EVERYWHERE_FORWARD = "pieces: got EVERYWHERE; expected pieces where gradients are wanted; call it under torch.no_grad()"


@torch.compiler.disable
def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    group: Any,
    where: tuple[Any, Pieces | None],
    return_lse: bool,
    method: tuple[int, int, int, int],
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """(o, lse, the seed and offset of dropout)."""
    ranks = ranks_of(group)
    with ranks.telling():
        given = _inputs(ranks, qkv, where, return_lse, method, options)
        call, q, k, v, sink, bias, named = given
        needs_grad = _single.needs_grad(q, k, v, sink, bias, *named.values())
        if call.pieces is None and needs_grad:
            raise ValueError(_EVERYWHERE_FORWARD)
    if needs_grad:
        o, lse = _Attend.apply(q, k, v, sink, bias, call, *named.values())
    else:
        o, lse = _forward(call, q, k, v, sink, bias, named)
    return o, lse, call.stream


@takes_options
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    pieces: Pieces | str | None = None,
    key_pieces: Pieces | None = None,
    return_lse: bool = False,
    return_rng_state: bool = False,
    heads_ranks: int = 0,
    stages: int = 0,
    ranks_per_host: int = 0,
    memory_limit: int = 0,
    **options: Unpack[Options],
) -> Any:
    """fovea.torch.attend of a problem whose rows lie on the ranks of `group`; all of them call it.

    Arguments:
        q, k, v: this rank's rows: (batch, rows, heads, size), or (rows, heads, size) with cu_seqlens_q; on CUDA devices, messages
            go by NCCL, on CPUs by gloo.
        group: a ProcessGroup, a DeviceMesh of one dimension, Ranks, or None for all processes.
        pieces: which rows lie where, by contiguous, zigzag, or a list of (rank, begin, end). None: each rank's rows stand behind
            those of the ranks before it, as torch.chunk or torch.tensor_split gave them; the ranks then ask each other for
            their numbers of rows in each call. EVERYWHERE: each rank has all queries and gets the whole result: decoding over
            a cache that is divided, forward only.
        key_pieces: the same of keys, where they do not lie as the queries.
        cu_seqlens_q, cu_seqlens_k: where the sequences of all ranks' rows together start, and the end: a list, or a tensor on
            the CPU; one on a GPU is waited for.
        heads_ranks, stages: the method, see docs/distributed.md; 0 chooses, knowing that ranks_per_host ranks in a row share a host
            (0: all do) and that the workspace of a rank has memory_limit bytes (0: any).
        sink, bias, mask, alibi, block_mask, tensors: whole, and the same on all ranks; score and sees name positions of the whole
            problem, and may be functions as in fovea.torch.attend.
        dropout: what is dropped is what one device drops with the same seed and offset. Without seed each rank draws it from
            PyTorch's generator of the CPU; where seeds or offsets differ, all ranks raise ValueError, which says who got what.
        return_rng_state: returns the seed and offset of dropout, too: (2,) int64 on the CPU, for attend_backward.
        num_threads: on CPUs; 0 is torch.get_num_threads() of the first call of its kind.
        Other options as in fovea.torch.attend, where docs/distributed.md has them; others are refused by name.

    Returns o, or a tuple of o, lse with return_lse and rng_state with return_rng_state, for this rank's queries. Differentiable
    where one call of backward reaches it on all ranks: d_o is that of the sum of all ranks' losses. The gradients of sink, bias
    and tensors of a score are to be summed over the ranks, as those of any parameter that all of them hold.

    Raises ValueError or TypeError naming the argument, on the rank with the fault, and RuntimeError with the reason on the
    others; RuntimeError for a rank that is gone or late. On GPUs Ranks.check tells of the latter.
    """
    method = (heads_ranks, stages, ranks_per_host, memory_limit)
    o, lse, stream = _attend((q, k, v), group, (pieces, key_pieces), return_lse, method, dict(options))
    results = [o]
    if return_lse:
        results.append(lse)
    if return_rng_state:
        results.append(torch.tensor([stream.get("seed", 0), stream.get("offset", 0)]))
    return tuple(results) if len(results) > 1 else o


@takes_options
def attend_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    rng_state: Tensor | None = None,
    group: Any = None,
    pieces: Pieces | None = None,
    key_pieces: Pieces | None = None,
    heads_ranks: int = 0,
    stages: int = 0,
    ranks_per_host: int = 0,
    memory_limit: int = 0,
    **options: Unpack[Options],
) -> Gradients:
    """Gradients of attend without autograd, for programs that have their own; all ranks call it.

    Arguments:
        d_o: as o: the gradient that arrives at this rank's rows.
        q, k, v, and all that is not named here: as they were given to attend.
        o, lse: what attend returned with return_lse.
        dlse: as lse: the gradient that arrives at lse; None is 0, on all ranks or on none.
        rng_state: of a forward with dropout, what attend returned with return_rng_state, or a state of PyTorch or flash_attn that
            has seed and offset: (2,) int64 or uint64; one on a GPU is waited for. Instead of it seed and offset may be given.

    Returns fovea.Gradients for this rank's rows; dbias, dsink and dtensors are to be summed over the ranks.

    Raises as attend does.
    """
    ranks = ranks_of(group)
    method = (heads_ranks, stages, ranks_per_host, memory_limit)
    with torch.no_grad():
        with ranks.telling():
            tensors = {"d_o": d_o, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
            _check_tensors(q, k, v, tensors)
            if isinstance(pieces, str):
                raise ValueError(f"pieces: got {pieces!r}; expected pieces, as the forward alone has queries on every rank; pass them")
            given = _inputs(ranks, (q, k, v), (pieces, key_pieces), dlse is not None, method, dict(options), rng_state, True)
            call, q, k, v, sink, bias, named = given
            arrays = {name: x.contiguous() for name, x in tensors.items()} | {"q": q, "k": k, "v": v, "sink": sink, "bias": bias}
        return _backward(call, arrays, named, sink is not None, bias is not None, tuple(named))
