"""The hash of the kernels' sources, by which results tell what they were measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sources_hash(root: Path, parts: Iterable[str], below: str = "src", names: str = "*") -> str | None:
    """SHA-256 over the names and contents of the files below src/PART (or another folder) for each part, in the order of their
    names; None where there are none."""
    files = sorted(path for part in parts for path in (root / below / part).rglob(names) if path.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
