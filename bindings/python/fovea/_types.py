"""Types of arrays, and what computes attend for them. Imports nothing of the package, so that every front end may."""

import sys
from collections.abc import Callable
from typing import Any

attend_of_types: dict[type, Callable[..., Any]] = {}
"""Type of q -> (q, k, v, return_lse, options) -> o or (o, lse)."""

checks_of_types: dict[type, tuple[Callable[[], bool], tuple[Callable[[], bool], ...] | None]] = {}
"""Type of q -> whether the call is traced by a compiler, and the checks of _core.attend."""


def framework(array: Any) -> str:
    """ "torch" or "jax" where `array` is theirs, else ""."""
    for name, cls in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, cls, ())):
            return name
    return ""
