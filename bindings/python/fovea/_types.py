"""Types of arrays, and what computes attend for them. Imports nothing of the package, so that every front end may."""

import sys
from collections.abc import Callable
from typing import Any

attend_of_types: dict[type, Callable[..., Any]] = {}
"""Type of q -> (q, k, v, return_lse, options) -> o or (o, lse)."""

append_of_types: dict[type, Callable[..., Any]] = {}
"""The same for a cache that is appended to: (q, k, v, return_lse, options with the new rows), or None where the general path has to."""


def framework(array: Any) -> str:
    """ "torch" or "jax" where `array` is theirs, else ""."""
    for name, cls in (("torch", "Tensor"), ("jax", "Array")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, cls, ())):
            return name
    return ""
