"""What `fovea report` reads: files of results, each told apart by what it holds. Needs Python's standard library alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class WrongFile(ValueError):
    """A file that is none of results; the text names it and says why."""


@dataclass
class Results:
    """Files of results by kind, in the order of their names; each with its own name under "file"."""

    ladder: list[Row] = field(default_factory=list)  # fovea ladder --json
    memory: list[Row] = field(default_factory=list)  # fovea ladder --memory --json
    profile: list[Row] = field(default_factory=list)  # bench/gpu/counters.py --ladder --json
    gpu: list[Row] = field(default_factory=list)  # bench/gpu/compare.py --json
    cpu: list[Row] = field(default_factory=list)  # bench/cpu/compare.py --json
    python: list[Row] = field(default_factory=list)  # bench/python_call.py --json
    ranks: list[Row] = field(default_factory=list)  # bench/gpu/ranks.py --json
    left_out: list[Path] = field(default_factory=list)  # of a folder: JSON, but none of these

    def all(self) -> list[Row]:
        return [*self.ladder, *self.memory, *self.profile, *self.gpu, *self.cpu, *self.python, *self.ranks]


def kind_of(result: Any) -> str | None:
    """The field of Results that a file belongs to; None for anything else."""
    if not isinstance(result, dict):
        return None
    if "microseconds" in result:
        return "python"
    if "kernels" in result and "profiler" in result:
        return "profile"
    rows = result.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    if "ranks" in result:
        return "ranks"
    if isinstance(result.get("machine"), dict):
        return "cpu"
    if isinstance(result.get("gpu"), dict):
        return "gpu"
    if "host" in result and any("rung" in row for row in rows):
        return "memory" if any("peak_bytes" in row for row in rows) else "ladder"
    return None


def files_of(paths: Iterable[Path]) -> dict[Path, bool]:
    """Folders stand for the .json files in them. The value: whether the file itself was named."""
    found: dict[Path, bool] = {}
    for path in paths:
        if path.is_dir():
            found |= {file: found.get(file, False) for file in sorted(path.glob("*.json"))}
        elif path.exists():
            found[path] = True
        else:
            raise WrongFile(f"{path}: no such file or folder")
    return found


def read(paths: Iterable[Path]) -> Results:
    """Raises WrongFile for what is not JSON, and for a named file that holds no results."""
    results = Results()
    for path, is_named in files_of(paths).items():
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise WrongFile(f"{path}: cannot be read ({error})") from error
        except json.JSONDecodeError as error:
            raise WrongFile(f"{path}: not JSON ({error})") from error
        kind = kind_of(result)
        if kind is not None:
            getattr(results, kind).append(result | {"file": path.name})
        elif is_named:
            raise WrongFile(
                f"{path}: not a file of results; expected what --json of fovea ladder, or of bench/gpu/compare.py, bench/gpu/ranks.py, "
                "bench/cpu/compare.py, bench/python_call.py or bench/gpu/counters.py --ladder writes"
            )
        else:
            results.left_out.append(path)
    return results


def machine_of(result: Row) -> str:
    """The machine of a file, in one line."""
    gpu, machine = result.get("gpu"), result.get("machine")
    if isinstance(gpu, dict):
        limit = f", power limit {gpu['power_limit_w']} W" if "power_limit_w" in gpu else ""
        return f"{gpu['name']}{limit}"
    if isinstance(machine, dict):
        return f"{machine['cpu']}, {result['threads']} threads"
    if isinstance(machine, str):
        return machine
    return ", ".join(text for text in (gpu, result.get("host")) if text)


def chip_of(result: Row) -> str:
    """The name of the chip alone: the same in files of different programs."""
    gpu = result.get("gpu")
    return (gpu["name"] if isinstance(gpu, dict) else str(gpu)).split(",")[0] if gpu else ""


def rows_like(gpu: Row, ladder: Row) -> list[Row]:
    """Rows of bench/gpu/compare.py of the passes and types of a file of the ladder: attention, so none beside other groups."""
    types = {"float32": "fp32", "bfloat16": "bf16"}
    kinds = {("bwd" if row["group"] == "backward" else "fwd", types.get(row["dtype"], "")) for row in ladder["rows"]
             if row["group"] not in ("matmul", "softmax")}  # fmt: skip
    return [row for row in gpu["rows"] if (row["pass"], row["dtype"]) in kinds]


def version_of(result: Row) -> str:
    software = result.get("software")
    version = software.get("fovea") if isinstance(software, dict) else result.get("fovea", result.get("version"))
    return str(version) if version else "-"


# ---- the ladder


def timed(result: Row) -> list[Row]:
    return [row for row in result["rows"] if "median_seconds" in row]


def group_rows(rows: Iterable[Row]) -> dict[str, dict[str, list[Row]]]:
    """group -> shape -> rows, in the order of the file."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row["group"], {}).setdefault(row["shape"], []).append(row)
    return groups


# As `fovea ladder` titles them; a group that is not here goes by its name.
GROUPS = {
    "cpu": "Attention on the CPU, float32",
    "matmul": "Matrix product, float32",
    "softmax": "Softmax, float32",
    "attention": "Attention on CUDA cores, float32",
    "tensor": "Attention on tensor cores, bfloat16",
    "hopper": "Attention on Hopper's tensor cores, bfloat16",
    "causal": "Causal attention on tensor cores, bfloat16",
    "backward": "Gradients of attention, bfloat16 to float32",
}


def shape_words(group: str, shape: str) -> str:
    """The sizes of a shape, each with its name."""
    sizes = [f"{int(size):,}" for size in shape.split("x")]
    if group == "softmax":
        return f"{sizes[0]} rows of {sizes[1]}"
    if group == "matmul":
        return " × ".join(sizes)
    return f"{sizes[0]} {'head' if sizes[0] == '1' else 'heads'}, length {sizes[1]}, size {sizes[2]}"


def length_of(shape: str) -> int:
    """The length of a shape of attention, "BATCHxLENGTHxSIZE"."""
    return int(shape.split("x")[1])


def peak_rate(row: Row) -> float | None:
    """The peak that a row's share is of, in the row's unit."""
    share = row.get("share_of_peak")
    return row["rate"] / share if share else None


def library_peer(row: Row) -> Row | None:
    """The library among the peers of a rung."""
    return next((peer for peer in row.get("peers", []) if str(peer["name"]).startswith("fovea ")), None)


def peer_rate(row: Row, peer: Row) -> float:
    """In the row's unit."""
    return float(row["rate"] * row["median_seconds"] / peer["seconds"])


def rate_in_turns(row: Row, peer: Row) -> float | None:
    """The rung's own rate while it took turns with the peer; None where each was timed alone. A share is of the same turns."""
    rate = peer_rate(row, peer) * peer["share"]
    return None if math.isclose(rate, row["rate"], rel_tol=1e-6) else rate


def is_on_cpu(row: Row) -> bool:
    return str(row["group"]) == "cpu"


def machine_of_group(result: Row, on_cpu: bool) -> str:
    return str(result["host"] if on_cpu or "gpu" not in result else result["gpu"])


# ---- registers, shared memory and occupancy: docs/kernels/resources.md


def resources(page: str) -> list[tuple[str, list[list[str]]]]:
    """The families of kernels on the page that tools/resources.py writes, each with its table; the first row is the head."""
    families: list[tuple[str, list[list[str]]]] = []
    for line in page.splitlines():
        if line.startswith("## "):
            families.append((line[3:].strip(), []))
        elif line.startswith("|") and families and not line.startswith("|---"):
            families[-1][1].append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return [(family, without_empty_columns(table)) for family, table in families if len(table) > 1]


def without_empty_columns(table: list[list[str]]) -> list[list[str]]:
    """A table with a head: its columns in which some row says something."""
    used = [any(row[i] for row in table[1:]) for i in range(len(table[0]))]
    return [[cell for cell, is_used in zip(row, used, strict=True) if is_used] for row in table]


def compiler(page: str) -> str:
    """That of the page, "nvcc 13.0.88"; empty where it does not say."""
    found = re.search(r"^Compiler: (.+?)\.?$", page, re.MULTILINE)
    return found[1] if found else ""
