"""attend, attend_backward, plan, explain and merge for arrays of any library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _cache, _core
from ._arguments import Options, output_shapes, pair, shape_of, takes_options
from ._arrays import results_like
from ._types import attend_of_types, framework
from .expressions import float_tensors, traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Gradients(NamedTuple):
    """What attend_backward returns: each has the shape and type of its tensor; None where there is no such tensor."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsink: Any = None
    dtensors: Any = None
    """The gradients of the float tensors that `score` reads, by their names."""


class Plan(NamedTuple):
    """What a call would do."""

    backend: str
    """Name of the backend that computes."""
    reason: str
    """One line for each backend, in order of preference: chosen, or what rules it out."""
    workspace_size: int
    """Bytes of memory beside inputs and outputs."""
    flops: float
    """Floating-point operations of the products over the pairs that causal and window keep, or that keys lists."""
    expressions: str = ""
    """score and sees as the library reads them, and derivatives of the score: a name, a tab and a text in each line."""


def _attend_arrays(q: Any, k: Any, v: Any, return_lse: bool, options: dict[str, Any]) -> Any:
    """attend for arrays without gradients: those of numpy, and of other libraries with DLPack."""
    made = _core.attend(q, k, v, return_lse, False, None, options)
    if made is not None:
        return made
    options = traced(options)
    o_shape, lse_shape = output_shapes(q, v, options.get("cu_seqlens_q") is not None)
    results = results_like(q)
    o = results.output(o_shape, q)
    lse = results.empty(lse_shape) if return_lse else None
    _core.forward(q=q, k=k, v=v, o=o, lse=lse, **options)
    return (results.done(o), results.done(lse)) if return_lse else results.done(o)


def _find_attend(q: Any) -> Callable[..., Any]:
    """For a type seen for the first time; PyTorch and JAX are imported only where their arrays are given."""
    name = framework(q)
    if name == "torch":
        from .torch._attend import attend_options as found
    elif name == "jax":
        from .jax import attend_options as found
    else:
        found = _attend_arrays
    attend_of_types[type(q)] = found
    return found


@takes_options
def attend(
    q: Any,
    k: Any,
    v: Any,
    *,
    return_lse: bool = False,
    cache: _cache.Cache | None = None,
    rotary: _cache.Rotary | None = None,
    **options: Unpack[Options],
) -> Any:
    """Exact attention: o = softmax(scale q k^T + terms) v.

    Arrays of numpy, PyTorch, JAX, CuPy, or another library with DLPack; all of one call lie on one device. Nothing is
    copied; on a GPU the work goes to the current stream of the arrays' library. With PyTorch and JAX the result is
    differentiable; elsewhere attend_backward gives gradients.

    Arguments:
        q: (batch, seqlen_q, heads_q, d), float32, float16, bfloat16, or float64 (slow: the reference computes it). Beside k and v of
            float8_e4m3fn it may have that type, too: then o is bfloat16, and so is what below has the type of q.
        k: (batch, seqlen_k, heads_kv, d), as q, or float8_e4m3fn without gradients; heads_q is a multiple of heads_kv.
        v: (batch, seqlen_k, heads_kv, d_v), as k.
        return_lse: returns (o, lse) with lse (batch, heads_q, seqlen_q) float32, packed (heads_q, total_q): the natural
            logarithm of the softmax's denominator.
        cache: attends over this fovea.Cache in place of k and v. These are then rows that each sequence appends to it before, behind
            those in use, (batch, new, heads_kv, d) and (batch, new, heads_kv, d_v), packed (total_new, heads_kv, d) with
            cu_seqlens_k; or None. The cache is written; no gradients.
        rotary: with cache: rotates q and the new rows of k by this fovea.Rotary.
        qv: (batch, seqlen_q, heads_q, d_v), packed as q, in its type: queries that meet the values: scores are scale (q k^T + qv v^T), as in
            latent attention, whose values are a part of its keys; no gradients.
        scale: of the scores; None is 1/sqrt(d), with qv 1/sqrt(d + d_v).
        causal: query i sees key j when j <= i + seqlen_k - seqlen_q (aligned at the last query and key).
        window: (left, right) keys that are seen beside the diagonal; -1 is unlimited.
        softcap: c makes scores c tanh(score / c); 0 is none.
        alibi: (heads_q) or (batch, heads_q) float32: slopes; score -= slope |i + seqlen_k - seqlen_q - j|.
        bias: (batch|1, heads_q|1, seqlen_q|1, seqlen_k|1), float32 or the type of q, added to the scores.
        mask: the same shapes, bool or uint8: not 0 means that the key is seen.
        block_mask: (batch|1, heads_q|1, ceil(seqlen_q / block_q), ceil(seqlen_k / block_k)), bool or uint8.
        block_size: (block_q, block_k) of block_mask.
        sink: (heads_q) float32: a logit of each head that takes part in the softmax and has no value.
        dropout: probability of dropping a weight.
        seed, offset: 64 bits each, which decide what is dropped.
        cu_seqlens_q, cu_seqlens_k: (batch + 1) int32: sequences are packed, q is (total_q, heads_q, d) and so on. Without
            cu_seqlens_k, packed queries attend to k and v as they are without cu_seqlens; no gradients.
        max_seqlen_q, max_seqlen_k: longest packed sequence; 0 reads it from cu_seqlens, or on a GPU takes the total.
        seqused_q, seqused_k: (batch) int32: how many rows of each sequence take part.
        keys: (batch|1, heads_kv|1, seqlen_q, count) int32, packed (heads_kv|1, total_q, count): the positions of the keys that
            each query attends to, and -1 for none, such as torch.topk(...).indices.int(). One that stands twice has twice the
            weight.
        page_table: (batch, most_pages) int32: k and v are (pages, page_size, heads_kv, d) and (pages, page_size, heads_kv, d_v), and
            row r of sequence b is row r % page_size of page page_table[b, r // page_size]; takes seqused_k, and has no gradients.
        cache_batch: (batch) int32: the sequence of k and v that each sequence of q reads; no gradients.
        leftpad_k: (batch) int32: rows in front of the first key of each sequence, which seqused_k counts, too; no gradients.
        q_descale, k_descale, v_descale: (batch|1, heads_kv|1) float32: what the elements of q, k and v of float8_e4m3fn are multiplied
            by. Query heads that share a key head share a factor.
        deterministic: gradients are the same bits each time on a GPU, too (on the CPU they always are).
        score: what the score is, as text of docs/expressions.md, or as a function that is called once with symbols
            (fovea.expressions), such as `lambda s, h, q, k: s - slope[h] * abs(q - k)`.
        sees: which keys a query sees, of those that the other arguments leave: `lambda q, k: (k <= q) & (q - k < 128)`.
        tensors: dict of the tensors that score and sees read by their names, 8 at most: of 0 to 4 dimensions, float32, float16,
            bfloat16, int32, uint8 or bool. fovea.named(array) in a function adds one.
        backend: its name (see explain); None takes the first that can.
        num_threads: of the CPU; 0 takes all that the process may use.
        num_splits: parts of the keys that are computed apart and merged, at most; 0 is as many as pay, 1 none. Not of gradients.
        batch_invariant: the bits of a sequence's o and lse do not depend on the rest of the batch. Packed sequences then need
            max_seqlen_q and max_seqlen_k, the same in each call. Not of gradients.
        sm_margin: multiprocessors of a GPU that are left to kernels that run beside, as those of NCCL; kernels of Hopper heed it.

    Returns o: (batch, seqlen_q, heads_q, d_v), as q, or bfloat16; packed (total_q, heads_q, d_v). A query that sees no key gets 0.

    Raises ValueError or TypeError naming the argument, what came, what was expected and the remedy.
    """
    if cache is not None and k is not None:
        return _cache.attend(q, k, v, return_lse, cache, rotary, options)
    if cache is not None:
        k, v, options = cache.k, cache.v, _cache.read_options(v, cache, rotary, options)  # type: ignore[assignment]
    elif rotary is not None:
        raise ValueError("rotary: got angles without cache; expected a cache, whose new rows it rotates; rotate q and k before the call")
    return (attend_of_types.get(type(q)) or _find_attend(q))(q, k, v, return_lse, options)


@takes_options
def attend_backward(
    d_o: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, *, dlse: Any = None, **options: Unpack[Options]
) -> Gradients:
    """Gradients of attend, for arrays of numpy, PyTorch, CuPy, or another library with DLPack.

    Arguments:
        d_o: as o: the gradient that arrives at o.
        q, k, v, and all that is not named here: as they were given to attend.
        o, lse: what attend(..., return_lse=True) returned.
        dlse: as lse: the gradient that arrives at lse; None is 0.

    Returns Gradients(dq, dk, dv, dbias, dsink, dtensors); dbias and dsink are None where there was no bias or sink. dtensors is a
    dict with the gradients of the float tensors that `score` reads, None without score. A function gets names for the tensors of
    fovea.named in the order in which it reads them: t0, t1, ...

    Raises as attend does.
    """
    if framework(q) == "jax":
        raise TypeError("q: got an array of JAX; expected another library's; differentiate attend by jax.grad or jax.vjp")
    results = results_like(q)
    sources = {"dq": q, "dk": k, "dv": v, "dbias": options.get("bias"), "dsink": options.get("sink")}
    gradients = {
        name: None if x is None else results.empty(shape_of(x, name[1:]), x) for name, x in sources.items()
    }
    options = traced(options)
    tensors = {name: results.empty(shape_of(x, name)) for name, x in float_tensors(options).items()}
    _core.backward(q=q, k=k, v=v, o=o, lse=lse, d_o=d_o, dlse=dlse, **gradients, **options, tensor_gradients=tensors)
    found = [results.done(x) for x in gradients.values()]
    if options.get("score") is None:
        return Gradients(*found)
    return Gradients(*found, {name: results.done(results.cast(x, options["tensors"][name])) for name, x in tensors.items()})


@takes_options
def plan(q: Any, k: Any, v: Any, *, backward: bool = False, return_lse: bool = False, **options: Unpack[Options]) -> Plan:
    """What attend(q, k, v, ...), or its backward, would do: backend, workspace, floating-point operations.

    Arguments are those of attend. The arrays' shapes, strides, types and device count, not what is in them. Plans are kept,
    so a later attend of the same form starts at once.

    Raises as attend does.
    """
    o_shape, lse_shape = output_shapes(q, v, options.get("cu_seqlens_q") is not None)
    options = traced(options)
    results = results_like(q)
    o = results.output(o_shape, q)
    lse = results.empty(lse_shape) if return_lse or backward else None
    if not backward:
        return Plan(*_core.plan_forward(q=q, k=k, v=v, o=o, lse=lse, **options))
    return Plan(*_core.plan_backward(q=q, k=k, v=v, o=o, lse=lse, d_o=o, dq=q, dk=k, dv=v, **options))


@takes_options
def explain(
    q: Any, k: Any, v: Any, *, backward: bool = False, return_lse: bool = False, **options: Unpack[Options]
) -> str:
    """One line for each backend, in order of preference: whether attend(q, k, v, ...) would take it, or why not.

    Arguments and errors are those of plan.
    """
    return plan(q, k, v, backward=backward, return_lse=return_lse, **options).reason


@takes_options
def seen_blocks(
    q: Any, k: Any, v: Any, *, batch_index: int = 0, head: int = 0, size: Sequence[int] = (128, 128), **options: Unpack[Options]
) -> memoryview:
    """Which blocks of queries and keys are seen, as far as causal, window and sees tell without computing a score.

    Arguments: those of attend, and

        batch_index, head: of which sequence and query head.
        size: queries and keys of a block.

    Returns rows x columns bytes: 0 where no pair of the block is seen, 1 where all are, 2 for some, which may stand for either.
    numpy.asarray makes an array of it. Masks and keys take no part. Tensors count with their values where they lie on the CPU.

    Raises as attend does.
    """
    o_shape, _ = output_shapes(q, v, options.get("cu_seqlens_q") is not None)
    o = results_like(q).output(o_shape, q)
    found, rows, columns = _core.seen_blocks(batch_index, head, *pair(size, "size"), q=q, k=k, v=v, o=o, **traced(options))
    if rows * columns == 0:
        return memoryview(found)
    return memoryview(found).cast("B", (rows, columns))


def merge(o_parts: Sequence[Any], lse_parts: Sequence[Any]) -> tuple[Any, Any]:
    """Joins attention over disjoint sets of keys: o = sum exp(lse_i - lse) o_i, lse = log sum exp(lse_i).

    Arguments:
        o_parts: arrays (batch, seqlen, heads, d_v) of one type: float32, float16 or bfloat16.
        lse_parts: for each of them (batch, heads, seqlen) float32, as attend(..., return_lse=True) gave it.

    Returns (o, lse) of the same shapes and types, on the same device. Tensors of PyTorch that need gradients are merged by
    PyTorch's operations.

    Raises as attend does.
    """
    o_parts, lse_parts = tuple(o_parts), tuple(lse_parts)
    if not o_parts or len(o_parts) != len(lse_parts):
        raise ValueError(
            f"o_parts, lse_parts: got {len(o_parts)} and {len(lse_parts)} parts; expected as many of both, one at least"
        )
    first = o_parts[0]
    if framework(first) == "torch":
        from .torch._merge import merge as merge_tensors

        return merge_tensors(o_parts, lse_parts)
    results = results_like(first)
    o = results.empty(shape_of(first, "o_parts"), first)
    lse = results.empty(shape_of(lse_parts[0], "lse_parts"))
    _core.merge(o_parts, lse_parts, o, lse)
    return results.done(o), results.done(lse)
