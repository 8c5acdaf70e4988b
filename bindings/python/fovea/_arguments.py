"""The arguments of attention beside q, k and v: the one list of them, and what all front ends do with it.

The list drives the signatures of the public functions, the schemas of PyTorch's operators, the call through XLA, and the tests of
the documentation. The compiled part takes all of them by these names. This file imports nothing of the package.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

if TYPE_CHECKING:
    from typing_extensions import Unpack

Array = Any
Pair = Sequence[int]
Expression = str | Callable[..., Any] | None
Tensors = dict[str, Any] | None


class Options(TypedDict, total=False):
    """Name and type of each; fovea.attend says what they mean. Numbers stand in the order of the call through XLA."""

    bias: Array
    mask: Array
    block_mask: Array
    alibi: Array
    sink: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    seqused_q: Array
    seqused_k: Array
    keys: Array
    page_table: Array
    cache_batch: Array
    leftpad_k: Array
    q_descale: Array
    k_descale: Array
    v_descale: Array
    qv: Array
    scale: float | None
    causal: bool
    window: Pair
    softcap: float
    dropout: float
    block_size: Pair
    max_seqlen_q: int
    max_seqlen_k: int
    seed: int
    offset: int
    deterministic: bool
    backend: str | None
    num_threads: int
    num_splits: int
    batch_invariant: bool
    sm_margin: int
    score: Expression
    sees: Expression
    tensors: Tensors


class Number(NamedTuple):
    """An argument that is no array."""

    schema: str
    """Its type in the schema of an operator of PyTorch."""
    default: Any


_NUMBERS_OF_TYPES = {
    float | None: Number("float?", None),
    float: Number("float", 0.0),
    bool: Number("bool", False),
    int: Number("SymInt", 0),
    Pair: Number("SymInt[2]", (0, 0)),
    str | None: Number("str?", None),
}
_TYPES = get_type_hints(Options)
EXPRESSIONS = ("score", "sees", "tensors")
"""Two texts or functions (expressions.py), and the tensors that they read."""
TENSORS = tuple(name for name, kind in _TYPES.items() if kind is Array)
NUMBERS = {name: _NUMBERS_OF_TYPES[kind] for name, kind in _TYPES.items() if kind in _NUMBERS_OF_TYPES}
NUMBERS["window"] = Number("SymInt[2]", (-1, -1))  # unlimited
DEFAULTS: dict[str, Any] = dict.fromkeys(TENSORS) | {name: number.default for name, number in NUMBERS.items()}
DEFAULTS |= dict.fromkeys(EXPRESSIONS)
PAIRS = tuple(name for name, number in NUMBERS.items() if number.schema == "SymInt[2]")

Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(function: Function) -> Function:
    """Shows Options with their defaults in the signature of `function`, which takes them as **options."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = {p.name for p in own}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in DEFAULTS.items()
        if name not in named
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def pair(value: Any, name: str) -> tuple[int, int]:
    """The two integers in `value`: a tuple, list, array or tensor. Raises ValueError or TypeError for anything else."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise ValueError(f"{name}: got {value!r}; expected two integers; give them as a tuple") from None
    if isinstance(first, int) and isinstance(second, int):
        return first, second
    try:
        return operator.index(first), operator.index(second)
    except TypeError:
        raise TypeError(f"{name}: got {value!r}; expected two integers; give them as a tuple") from None


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """All options but expressions in the order of the list: those in `options`, and defaults for those that are left out
    or None.

    Raises TypeError for a name that is not in the list, ValueError or TypeError for a wrong pair or scale,
    NotImplementedError for an expression.
    """
    for name, value in options.items():
        if name not in DEFAULTS:
            raise TypeError(f"unexpected argument {name!r}")
        if name in EXPRESSIONS and value:
            raise NotImplementedError(
                f"{name}: got an expression; expected none under JAX, torch.func, vmap and tensor subclasses; call fovea.attend "
                "with arrays of numpy, or with plain tensors of PyTorch"
            )
    found = {}
    for name in (*TENSORS, *NUMBERS):
        default = DEFAULTS[name]
        value = options.get(name)
        found[name] = default if value is None else value
    for name in PAIRS:
        found[name] = pair(found[name], name)
    if found["scale"] == 0:  # to XLA's handler it is the default
        raise ValueError("scale: got 0; expected another number, or None for 1/sqrt(head size)")
    return found


def shape_of(array: Any, name: str) -> tuple[int, ...]:
    try:
        return tuple(array.shape)
    except AttributeError:
        raise TypeError(
            f"{name}: got {type(array).__name__}; expected an array of numpy, PyTorch, JAX, CuPy, or another with "
            "__dlpack__; convert it, for instance by numpy.asarray"
        ) from None


def output_shapes(q: Any, v: Any, packed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of o and lse for arrays q and v. Raises ValueError where they have not the rank of attention."""
    shape_q, shape_v = shape_of(q, "q"), shape_of(v, "v")
    rank = 3 if packed else 4
    # Packed queries may attend to keys of a cache, which are not packed.
    if len(shape_q) != rank or len(shape_v) not in (rank, 4):
        name, shape = ("q", shape_q) if len(shape_q) != rank else ("v", shape_v)
        expected = "(total, heads, size), as there is cu_seqlens" if packed else "(batch, seqlen, heads, size)"
        raise ValueError(f"{name}: got shape {shape}; expected {expected}; reshape it")
    o = (*shape_q[:-1], shape_v[-1])
    return (o, (shape_q[1], shape_q[0])) if packed else (o, (shape_q[0], shape_q[2], shape_q[1]))
