"""attend, attend_backward, plan, explain and merge for arrays of any library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _core
from ._arrays import Results


class Gradients(NamedTuple):
    """What attend_backward returns: each has the shape and type of its tensor; None where there is no such tensor."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None


class Plan(NamedTuple):
    """What a call would do."""

    backend: str
    """Name of the backend that computes."""
    reason: str
    """One line for each backend, in order of preference: chosen, or what rules it out."""
    workspace_size: int
    """Bytes of memory beside inputs and outputs."""
    flops: float
    """Floating-point operations of the products over the pairs that causal and window keep."""


def framework(array: Any) -> str:
    """ "torch" or "jax" where `array` is theirs, else ""."""
    for name, cls in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, cls, ())):
            return name
    return ""


def _shape(array: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(array.shape)
    except AttributeError:
        raise TypeError(
            f"{name}: got {type(array).__name__}; expected an array of numpy, PyTorch, JAX, CuPy, or another with "
            "__dlpack__; convert it, for instance by numpy.asarray"
        ) from None


def output_shapes(q: Any, v: Any, packed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse."""
    shape_q, shape_v = _shape(q, "q"), _shape(v, "v")
    rank = 3 if packed else 4
    if len(shape_q) != rank or len(shape_v) != rank:
        name, shape = ("q", shape_q) if len(shape_q) != rank else ("v", shape_v)
        expected = "(total, heads, size), as there is cu_seqlens" if packed else "(batch, seqlen, heads, size)"
        raise ValueError(f"{name}: got shape {shape}; expected {expected}; reshape it")
    o = (*shape_q[:-1], shape_v[-1])
    return (o, (shape_q[1], shape_q[0])) if packed else (o, (shape_q[0], shape_q[2], shape_q[1]))


def numbers(
    scale: float | None,
    causal: bool,
    window: Sequence[int],
    softcap: float,
    dropout: float,
    seed: int,
    offset: int,
    block_size: Sequence[int],
) -> dict[str, Any]:
    """Arguments of the compiled part that are not arrays."""
    try:
        left, right = window
        block_q, block_k = block_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window, block_size: got {window!r} and {block_size!r}; expected two integers each; -1 in window is unlimited"
        ) from None
    if scale == 0:
        raise ValueError("scale: got 0; expected another number, or None for 1/sqrt(head size)")
    return {
        "scale": scale,
        "causal": causal,
        "window_left": left,
        "window_right": right,
        "softcap": softcap,
        "dropout": dropout,
        "seed": seed,
        "offset": offset,
        "block_q": block_q,
        "block_k": block_k,
    }


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
    backend: str | None = None,
    num_threads: int = 0,
) -> Any:
    """Exact attention: o = softmax(scale q k^T + terms) v.

    Arrays of numpy, PyTorch, JAX, CuPy, or another library with DLPack; all of one call lie on one device. Nothing is
    copied; on a GPU the work goes to the current stream of the arrays' library. With PyTorch and JAX the result is
    differentiable; elsewhere attend_backward gives gradients.

    Arguments:
        q: (batch, seqlen_q, heads_q, d), float32, float16, bfloat16, or float64 (slow: the reference computes it).
        k: (batch, seqlen_k, heads_kv, d), as q; heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, d_v), as q.
        scale: of the scores; None is 1/sqrt(d).
        causal: query i sees key j when j <= i + seqlen_k - seqlen_q (aligned at the last query and key).
        window: (left, right) keys that are seen beside the diagonal; -1 is unlimited.
        softcap: c makes scores c tanh(score / c); 0 is none.
        alibi: (heads_q) or (batch, heads_q) float32: slopes; score -= slope |i + seqlen_k - seqlen_q - j|.
        bias: (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), float32 or the type of q, added to the scores.
        mask: the same shapes, bool or uint8: not 0 means that the key is seen.
        block_mask: (batch|1, heads_q|1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)), bool or uint8.
        block_size: (block_q, block_k) of block_mask.
        sink: (heads_q) float32: a logit of each head that takes part in the softmax and has no value.
        dropout: probability of dropping a weight; seed and offset (64 bits each) decide which.
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32: sequences are packed, q is (total_q, heads_q, d) and so on.
        max_seqlen_q, max_seqlen_k: longest packed sequence; 0 reads it from cu_seqlens, or on a GPU takes the total.
        seqused_q, seqused_k: (batch) int32: how many rows of each sequence take part.
        return_lse: returns (o, lse) with lse (batch, heads_q, seqlen_q) float32, packed (heads_q, total_q): the natural
            logarithm of the softmax's denominator.
        backend: its name (see explain); None takes the first that can.
        num_threads: of the CPU; 0 takes all that the process may use.

    Returns o: (batch, seqlen_q, heads_q, d_v), as q; packed (total_q, heads_q, d_v). A query that sees no key gets 0.

    Raises ValueError or TypeError naming the argument, what came, what was expected and the remedy.
    """
    options = {"backend": backend, "num_threads": num_threads}
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
    settings = numbers(scale, causal, window, softcap, dropout, seed, offset, block_size)
    settings.update(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    name = framework(q)
    if name == "torch":
        from .torch._attend import attend_checked

        o, lse = attend_checked(q, k, v, tensors, settings, options, need_lse=return_lse)
    elif name == "jax":
        from . import jax

        o, lse = jax._attend(q, k, v, tensors, settings, options)
    else:
        o_shape, lse_shape = output_shapes(q, v, cu_seqlens_q is not None)
        results = Results(q)
        o = results.empty(o_shape, q)
        lse = results.empty(lse_shape) if return_lse else None
        _core.forward(q=q, k=k, v=v, o=o, lse=lse, **tensors, **settings, **options)
        o, lse = results.done(o), results.done(lse)
    return (o, lse) if return_lse else o


def attend_backward(
    d_o: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
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
    deterministic: bool = False,
    backend: str | None = None,
    num_threads: int = 0,
) -> Gradients:
    """Gradients of attend, for arrays of numpy, PyTorch, CuPy, or another library with DLPack.

    Arguments:
        d_o: as o: the gradient that arrives at o.
        q, k, v, and all that is not named here: as they were given to attend.
        o, lse: what attend(..., return_lse=True) returned.
        dlse: as lse: the gradient that arrives at lse; None is 0.
        deterministic: the same bits each time on a GPU, too (they are on the CPU).

    Returns Gradients(dq, dk, dv, dbias, dsink); dbias and dsink are None where there was no bias or sink.

    Raises as attend does.
    """
    name = framework(q)
    if name == "jax":
        raise TypeError("q: got an array of JAX; expected another library's; differentiate attend by jax.grad or jax.vjp")
    settings = numbers(scale, causal, window, softcap, dropout, seed, offset, block_size)
    if name == "torch":
        from .torch import _arrays

        results: Any = _arrays.Results(q)
    else:
        results = Results(q)
    dq, dk, dv = (results.empty(_shape(x, n), x) for n, x in (("q", q), ("k", k), ("v", v)))
    dbias = None if bias is None else results.empty(_shape(bias, "bias"), bias)
    dsink = None if sink is None else results.empty(_shape(sink, "sink"), sink)
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
        mask=mask,
        block_mask=block_mask,
        alibi=alibi,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        **settings,
        deterministic=deterministic,
        backend=backend,
        num_threads=num_threads,
    )
    return Gradients(*(results.done(x) for x in (dq, dk, dv, dbias, dsink)))


def plan(q: Any, k: Any, v: Any, *, backward: bool = False, **arguments: Any) -> Plan:
    """What attend(q, k, v, ...), or its backward, would do: backend, workspace, floating-point operations.

    Arguments are those of attend; `deterministic` is taken, too. The arrays' shapes, strides, types and device count, not
    what is in them. Plans are kept, so a later attend of the same form starts at once.

    Raises as attend does.
    """
    given = dict(arguments)
    return_lse = given.pop("return_lse", False)
    names = ("scale", "causal", "window", "softcap", "dropout", "seed", "offset", "block_size")
    defaults = (None, False, (-1, -1), 0.0, 0.0, 0, 0, (0, 0))
    settings = numbers(*(given.pop(name, default) for name, default in zip(names, defaults, strict=True)))
    o_shape, lse_shape = output_shapes(q, v, given.get("cu_seqlens_q") is not None)
    if framework(q) == "torch":
        from .torch import _arrays

        results: Any = _arrays.Results(q)
    else:
        results = Results(q)
    o = results.empty(o_shape, q)
    lse = results.empty(lse_shape) if return_lse or backward else None
    if not backward:
        return Plan(*_core.plan_forward(q=q, k=k, v=v, o=o, lse=lse, **settings, **given))
    return Plan(*_core.plan_backward(q=q, k=k, v=v, o=o, lse=lse, d_o=o, dq=q, dk=k, dv=v, **settings, **given))


def explain(q: Any, k: Any, v: Any, *, backward: bool = False, **arguments: Any) -> str:
    """One line for each backend, in order of preference: whether attend(q, k, v, ...) would take it, or why not.

    Arguments and errors are those of plan.
    """
    return plan(q, k, v, backward=backward, **arguments).reason


def merge(o_parts: Sequence[Any], lse_parts: Sequence[Any]) -> tuple[Any, Any]:
    """Joins attention over disjoint sets of keys: o = sum exp(lse_i - lse) o_i, lse = log sum exp(lse_i).

    Arguments:
        o_parts: arrays (batch, seqlen, heads, d_v) of one type: float32, float16 or bfloat16.
        lse_parts: for each of them (batch, heads, seqlen) float32, as attend(..., return_lse=True) gave it.

    Returns (o, lse) of the same shapes and types. Computes on the CPU; tensors of PyTorch on a GPU, and those that need
    gradients, are merged by PyTorch's operations.

    Raises as attend does.
    """
    o_parts, lse_parts = tuple(o_parts), tuple(lse_parts)
    if not o_parts or len(o_parts) != len(lse_parts):
        raise ValueError(
            f"o_parts, lse_parts: got {len(o_parts)} and {len(lse_parts)} parts; expected as many of both, one at least"
        )
    first = o_parts[0]
    if framework(first) == "torch":
        from .torch import _arrays

        if first.device.type != "cpu" or any(x.requires_grad for x in (*o_parts, *lse_parts)):
            return _arrays.merge(o_parts, lse_parts)
        results: Any = _arrays.Results(first)
    else:
        results = Results(first)
    o = results.empty(_shape(first, "o_parts"), first)
    lse = results.empty(_shape(lse_parts[0], "lse_parts"))
    _core.merge(o_parts, lse_parts, o, lse)
    return results.done(o), results.done(lse)
