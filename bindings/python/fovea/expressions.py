"""Expressions of scores and masks, from Python functions that are called once with symbols.

    slope = fovea.named(slopes)
    fovea.attend(q, k, v, score=lambda s, h, q, k: s - slope[h] * abs(q - k))
    fovea.attend(q, k, v, sees=lambda b, q, k, doc: doc[b, q] == doc[b, k], tensors={"doc": documents})

Parameters are known by their names: s, b, h, hk, q, k, nq, nk, or a tensor of `tensors`. Operators are Python's, with & | ~ for
and, or, not: // and % round down, / gives a float. Functions are those of this module, and numpy's and PyTorch's of the same
meaning. The text that comes out is that of docs/expressions.md, which may be given instead.

Imports nothing of the package.
"""

from __future__ import annotations

import inspect
import math
import numbers
import operator
import threading
from collections.abc import Callable
from typing import Any

_REMEDY = (
    "write & | ~ for and, or, not, fovea.where(condition, x, y) for if, two comparisons joined by & for a chain, and "
    "fovea.expressions.minimum and maximum for min and max"
)
_NOT_NAMED = (
    "got a symbol as the index of an array; expected an array that expressions know; wrap it by fovea.named(array), or give it "
    "by tensors={...}"
)
_FLOAT, _INT, _BOOL = "float", "int", "bool"
_NAMES = {"s": _FLOAT} | dict.fromkeys(("b", "h", "hk", "q", "k", "nq", "nk"), _INT)
_OR, _AND, _EQUALITY, _RELATION, _SUM, _PRODUCT, _PREFIX, _PRIMARY = range(1, 9)


class Symbol:
    """A part of an expression while it is traced: its text, its type, and how tight it binds."""

    __slots__ = ("_precedence", "_text", "_type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: str, kind: str, precedence: int = _PRIMARY) -> None:
        self._text = text
        self._type = kind
        self._precedence = precedence

    def __repr__(self) -> str:
        return f"<{self._type} {self._text}>"

    def _inside(self, precedence: int) -> str:
        return f"({self._text})" if self._precedence < precedence else self._text

    # What needs a value, which a symbol has not.

    def __bool__(self) -> bool:
        raise TypeError(f"got the truth of {self._text!r}, which has no value while it is traced; {_REMEDY}")

    def _no_value(self, *_: Any) -> Any:
        raise TypeError(
            f"got {self._text!r} where Python needs a number; expected operators and the functions of fovea.expressions "
            "(exp, log, tanh, sqrt, floor, where, minimum, maximum, clamp, to_float)"
        )

    __float__ = __int__ = __complex__ = __round__ = __len__ = _no_value

    def __index__(self) -> int:
        raise TypeError(_NOT_NAMED)

    def __iter__(self) -> Any:
        return self._no_value()

    def __pow__(self, exponent: Any) -> Any:
        raise TypeError(f"got {self._text!r} ** {exponent!r}; expressions have no power; multiply, or use exp and log")

    def __rpow__(self, base: Any) -> Any:
        raise TypeError(f"got {base!r} ** {self._text!r}; expressions have no power; use exp(x * log(base))")

    # Operators.

    def __add__(self, other: Any) -> Any:
        return _infix(self, "+", other, _SUM)

    def __radd__(self, other: Any) -> Any:
        return _infix(other, "+", self, _SUM)

    def __sub__(self, other: Any) -> Any:
        return _infix(self, "-", other, _SUM)

    def __rsub__(self, other: Any) -> Any:
        return _infix(other, "-", self, _SUM)

    def __mul__(self, other: Any) -> Any:
        return _infix(self, "*", other, _PRODUCT)

    def __rmul__(self, other: Any) -> Any:
        return _infix(other, "*", self, _PRODUCT)

    def __truediv__(self, other: Any) -> Any:
        return _divided(self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _divided(other, self)

    def __floordiv__(self, other: Any) -> Any:
        return _divided_down(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided_down(other, self)

    def __mod__(self, other: Any) -> Any:
        return _infix(self, "%", other, _PRODUCT)

    def __rmod__(self, other: Any) -> Any:
        return _infix(other, "%", self, _PRODUCT)

    def __neg__(self) -> Any:
        return Symbol(f"-{self._inside(_PREFIX)}", self._type, _PREFIX)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return Symbol(f"abs({self._text})", self._type)

    def __invert__(self) -> Any:
        _need_bool(self, "~")
        return Symbol(f"!{self._inside(_PREFIX)}", _BOOL, _PREFIX)

    def __and__(self, other: Any) -> Any:
        return _logic(self, "&&", other, _AND)

    def __rand__(self, other: Any) -> Any:
        return _logic(other, "&&", self, _AND)

    def __or__(self, other: Any) -> Any:
        return _logic(self, "||", other, _OR)

    def __ror__(self, other: Any) -> Any:
        return _logic(other, "||", self, _OR)

    def __lt__(self, other: Any) -> Any:
        return _compared(self, "<", other, _RELATION)

    def __le__(self, other: Any) -> Any:
        return _compared(self, "<=", other, _RELATION)

    def __gt__(self, other: Any) -> Any:
        return _compared(self, ">", other, _RELATION)

    def __ge__(self, other: Any) -> Any:
        return _compared(self, ">=", other, _RELATION)

    def __eq__(self, other: Any) -> Any:
        return _compared(self, "==", other, _EQUALITY)

    def __ne__(self, other: Any) -> Any:
        return _compared(self, "!=", other, _EQUALITY)

    def __floor__(self) -> Any:
        return floor(self)

    # The functions of numpy and PyTorch.

    def __array_ufunc__(self, function: Any, method: str, *arguments: Any, **options: Any) -> Any:
        return _foreign(function, arguments, options if method == "__call__" else {"method": method})

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        return _foreign(function, arguments, options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return _foreign(function, arguments, options or {})


def _symbol(value: Any) -> Symbol:
    """`value` as a symbol: numbers are written so that they read back as the same."""
    if isinstance(value, Symbol):
        return value
    if isinstance(value, Named):
        return value._scalar()
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return Symbol("true" if value else "false", _BOOL)
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return Symbol(str(whole), _INT, _PREFIX if whole < 0 else _PRIMARY)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isnan(number):
            return Symbol("0.0 / 0.0", _FLOAT, _PRODUCT)
        if math.isinf(number):
            return Symbol("-1.0 / 0.0" if number < 0 else "1.0 / 0.0", _FLOAT, _PRODUCT)
        return Symbol(repr(number), _FLOAT, _PREFIX if math.copysign(1, number) < 0 else _PRIMARY)
    raise TypeError(
        f"got {type(value).__name__} in an expression; expected a symbol or a number; give an array by fovea.named(array) or "
        "tensors={...}, and index it"
    )


def _need_number(x: Symbol, op: str) -> None:
    if x._type == _BOOL:
        raise TypeError(f"{op}: got the bool {x._text!r}; expected a number; use fovea.where(condition, x, y)")


def _need_bool(x: Symbol, op: str) -> None:
    if x._type != _BOOL:
        raise TypeError(f"{op}: got the {x._type} {x._text!r}; expected a bool; compare it: parentheses around both sides of {op}")


def _joined(x: Symbol, op: str, y: Symbol, kind: str, precedence: int) -> Symbol:
    return Symbol(f"{x._inside(precedence)} {op} {y._inside(precedence + 1)}", kind, precedence)


def _infix(left: Any, op: str, right: Any, precedence: int) -> Symbol:
    x, y = _symbol(left), _symbol(right)
    _need_number(x, op)
    _need_number(y, op)
    if op == "%" and _FLOAT in (x._type, y._type):
        raise TypeError(f"%: got a float in '{x._text} % {y._text}'; expected ints; subtract a multiple, found by floor")
    return _joined(x, op, y, _FLOAT if _FLOAT in (x._type, y._type) else _INT, precedence)


def _divided(left: Any, right: Any) -> Symbol:
    """Python's /, which is a float: between ints the language would round down."""
    x, y = _symbol(left), _symbol(right)
    return _infix(to_float(x) if x._type == y._type == _INT else x, "/", y, _PRODUCT)


def _divided_down(left: Any, right: Any) -> Symbol:
    quotient = _infix(left, "/", right, _PRODUCT)
    return floor(quotient) if quotient._type == _FLOAT else quotient


def _compared(left: Any, op: str, right: Any, precedence: int) -> Symbol:
    x, y = _symbol(left), _symbol(right)
    _need_number(x, op)
    _need_number(y, op)
    return _joined(x, op, y, _BOOL, precedence)


def _logic(left: Any, op: str, right: Any, precedence: int) -> Symbol:
    x, y = _symbol(left), _symbol(right)
    _need_bool(x, op[0])
    _need_bool(y, op[0])
    return _joined(x, op, y, _BOOL, precedence)


def _call(name: str, *arguments: Any, kind: str | None = None) -> Symbol:
    given = [_symbol(x) for x in arguments]
    for x in given:
        _need_number(x, name)
    common = _FLOAT if any(x._type == _FLOAT for x in given) else _INT
    return Symbol(f"{name}({', '.join(x._text for x in given)})", kind or common)


def where(condition: Any, x: Any, y: Any) -> Symbol:
    """x where the condition is true, else y; two numbers or two bools. What is not chosen is not computed."""
    c, first, second = _symbol(condition), _symbol(x), _symbol(y)
    _need_bool(c, "where")
    if (first._type == _BOOL) != (second._type == _BOOL):
        raise TypeError(f"where: got {first!r} and {second!r}; expected two numbers or two bools")
    kind = first._type if first._type == second._type else _FLOAT
    return Symbol(f"where({c._text}, {first._text}, {second._text})", kind)


def minimum(x: Any, y: Any) -> Symbol:
    """The smaller; NaN when one of them is."""
    return _call("min", x, y)


def maximum(x: Any, y: Any) -> Symbol:
    """The larger; NaN when one of them is."""
    return _call("max", x, y)


def clamp(x: Any, low: Any, high: Any) -> Symbol:
    """min(max(x, low), high)."""
    return _call("clamp", x, low, high)


def exp(x: Any) -> Symbol:
    return _call("exp", x, kind=_FLOAT)


def log(x: Any) -> Symbol:
    """The natural logarithm."""
    return _call("log", x, kind=_FLOAT)


def tanh(x: Any) -> Symbol:
    return _call("tanh", x, kind=_FLOAT)


def sqrt(x: Any) -> Symbol:
    return _call("sqrt", x, kind=_FLOAT)


def floor(x: Any) -> Symbol:
    """Rounds down; the result is a float."""
    return _call("floor", x, kind=_FLOAT)


def to_float(x: Any) -> Symbol:
    """An int as a float."""
    given = _symbol(x)
    return given if given._type == _FLOAT else _call("float", given, kind=_FLOAT)


_FOREIGN: dict[str, Callable[..., Any]] = {
    "where": where, "exp": exp, "log": log, "tanh": tanh, "sqrt": sqrt, "floor": floor,
    "minimum": minimum, "maximum": maximum, "clip": clamp, "clamp": clamp,
    "abs": operator.abs, "absolute": operator.abs, "fabs": operator.abs, "negative": operator.neg, "neg": operator.neg,
    "add": operator.add, "subtract": operator.sub, "sub": operator.sub, "multiply": operator.mul, "mul": operator.mul,
    "divide": operator.truediv, "true_divide": operator.truediv, "floor_divide": operator.floordiv,
    "remainder": operator.mod, "less": operator.lt, "less_equal": operator.le, "greater": operator.gt,
    "greater_equal": operator.ge, "equal": operator.eq, "not_equal": operator.ne, "logical_and": operator.and_,
    "logical_or": operator.or_, "logical_not": operator.invert, "bitwise_and": operator.and_, "bitwise_or": operator.or_,
}  # fmt: skip


def _foreign(function: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A function of numpy or PyTorch, of symbols."""
    name = getattr(function, "__name__", str(function))
    if name == "__getitem__":
        raise TypeError(_NOT_NAMED)
    mine = _FOREIGN.get(name)
    if mine is None or options:
        what = f"{name}({', '.join(options)}=...)" if mine else name
        raise TypeError(f"got {what} of an expression; expected one of {', '.join(sorted(_FOREIGN))}, without options")
    symbols = [_symbol(x) for x in arguments]
    return mine(*symbols)


# ---- tensors


def _type_of(array: Any) -> str:
    return _FLOAT if "float" in str(getattr(array, "dtype", "")) else _INT


class Named:
    """A tensor that expressions read: tensor[i, j] is an element, with ints or symbols as indices."""

    __slots__ = ("_array", "_name")

    def __init__(self, array: Any, name: str | None) -> None:
        self._array = array
        self._name = name

    def __repr__(self) -> str:
        return f"<tensor {self._name or 'without a name'}>"

    def __getitem__(self, index: Any) -> Symbol:
        rank = len(self._array.shape)
        given = index if isinstance(index, tuple) else (index,)
        if len(given) != rank or rank == 0:
            raise TypeError(f"got {len(given)} indices of a tensor of shape {tuple(self._array.shape)}; expected {rank}")
        at = [_symbol(x) for x in given]
        for x in at:
            if x._type != _INT:
                raise TypeError(f"got {x!r} as an index; expected ints")
        return Symbol(f"{_trace().name_of(self)}[{', '.join(x._text for x in at)}]", _type_of(self._array))

    def __iter__(self) -> Any:
        raise TypeError("got a loop over a tensor in an expression; expected its elements by index")

    def _scalar(self) -> Symbol:
        if len(self._array.shape) != 0:
            raise TypeError(f"got {self!r} of shape {tuple(self._array.shape)} without an index; expected one, as in tensor[h]")
        return Symbol(_trace().name_of(self), _type_of(self._array))


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Named, *arguments: Any) -> Any:
        return getattr(self._scalar(), name)(*arguments)

    return method


# A tensor without dimensions is a number by itself.
for _name in """add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod neg abs lt le gt ge eq ne pow
        bool float index array_ufunc""".split():
    setattr(Named, f"__{_name}__", _delegate(f"__{_name}__"))


def named(array: Any, name: str | None = None) -> Named:
    """`array` for expressions: named(x)[h, q] is an element of it. Float tensors get gradients.

    Arguments:
        array: of 0 to 4 dimensions: float32, float16, bfloat16, int32, uint8 or bool; any library and any strides, as the
            other arrays of the call.
        name: what messages call it; None takes one that is free.
    """
    if not hasattr(array, "shape"):
        raise TypeError(f"array: got {type(array).__name__}; expected an array; convert it, for instance by numpy.asarray")
    return Named(array, name)


# ---- tracing


class _Trace:
    """The names of the tensors that the expressions of one call read."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = dict(tensors)

    def name_of(self, tensor: Named) -> str:
        for name, array in self.tensors.items():
            if array is tensor._array and tensor._name in (None, name):
                return name
        name = tensor._name
        if name is None:
            name = next(f"t{i}" for i in range(len(self.tensors) + 1) if f"t{i}" not in self.tensors)
        if name in self.tensors:
            raise ValueError(f"tensors: got two tensors of the name {name!r}; expected one name for each; rename one of them")
        self.tensors[name] = tensor._array
        return name


_now = threading.local()


def _trace() -> _Trace:
    trace: _Trace | None = getattr(_now, "trace", None)
    if trace is None:
        raise TypeError("got an element of a tensor outside of a score or sees function; expected it inside, as in score=lambda ...")
    return trace


def _arguments_for(function: Callable[..., Any], use: str, tensors: dict[str, Any]) -> dict[str, Any]:
    """What the parameters of `function` get, by their names."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in tensors:
            found[name] = Named(tensors[name], name)
        elif name in _NAMES and not (name == "s" and use == "sees"):
            found[name] = Symbol(name, _NAMES[name])
        elif parameter.default is parameter.empty:
            known = [x for x in _NAMES if use == "score" or x != "s"] + list(tensors)
            raise TypeError(
                f"{use}: got a function with the parameter {name!r}; expected names out of {', '.join(known)}; rename it, or "
                "give a tensor of this name by tensors={...}"
            )
        if name in found and parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{use}: got the positional-only parameter {name!r}; expected parameters that have names")
    return found


def _text_of(function: Any, use: str, trace: _Trace) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise TypeError(f"{use}: got {type(function).__name__}; expected text, or a function of symbols")
    arguments = _arguments_for(function, use, trace.tensors)
    try:
        result = _symbol(function(**arguments))
    except IndexError as error:  # numpy's, which hides ours
        raise TypeError(f"{use}: {_NOT_NAMED}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{use}: {error}") from error
    return result._text


def traced(options: dict[str, Any]) -> dict[str, Any]:
    """`options` with functions as text, and all tensors that they read in `tensors`."""
    score, sees, tensors = options.get("score"), options.get("sees"), options.get("tensors")
    if score is None and sees is None and not tensors:
        return options
    if tensors is not None and not isinstance(tensors, dict):
        raise TypeError(f"tensors: got {type(tensors).__name__}; expected a dict of names and arrays")
    trace = _Trace({name: x._array if isinstance(x, Named) else x for name, x in (tensors or {}).items()})
    before = getattr(_now, "trace", None)
    _now.trace = trace
    try:
        texts = {use: None if f is None else _text_of(f, use, trace) for use, f in (("score", score), ("sees", sees))}
    finally:
        _now.trace = before
    return {**options, **texts, "tensors": trace.tensors}


def float_tensors(options: dict[str, Any]) -> dict[str, Any]:
    """The tensors of traced options that may have gradients."""
    if options.get("score") is None:
        return {}
    return {name: x for name, x in (options.get("tensors") or {}).items() if _type_of(x) == _FLOAT}
