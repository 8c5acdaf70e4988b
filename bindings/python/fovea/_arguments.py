"""The arguments of attention, in one list, and what every front end asks of them. Imports nothing of the package."""

from __future__ import annotations

import operator
from typing import Any


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
