"""Types of arrays, and what computes attend for them. Imports nothing, so that every front end may."""

from collections.abc import Callable
from typing import Any

attend_of_types: dict[type, Callable[..., Any]] = {}
"""Type of q -> (q, k, v, return_lse, options) -> o or (o, lse)."""
