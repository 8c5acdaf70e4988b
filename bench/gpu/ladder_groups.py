"""The groups of the ladder, from `fovea ladder --list --json`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[2] / "build/release/bin/fovea"


def list_groups(program: Path, where: str) -> dict[str, list[str]]:
    """name -> shapes of the groups on "cpu" or "gpu". Raises ValueError."""
    try:
        done = subprocess.run([program, "ladder", "--list", "--json"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"{error}; --fovea PATH names the program that `make build` makes") from error
    rungs: list[dict[str, Any]] = json.loads(done.stdout)
    return {rung["group"]: rung["shapes"] for rung in rungs if rung["where"] == where}
