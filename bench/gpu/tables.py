"""Statistics of times, tables of ratios, and files of results. Needs no GPU."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PASS_NAMES = {
    "fwd": "Forward",
    "fwd_lse": "Forward with lse",
    "bwd": "Backward",
    "bwd_det": "Backward, deterministic",
}
PEER_NAMES = {
    "fa2": "FlashAttention-2 (PyTorch)",
    "cudnn": "cuDNN (PyTorch)",
    "efficient": "memory-efficient (PyTorch)",
    "flex": "FlexAttention (PyTorch)",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}
STORED_BEST = Path(__file__).resolve().parent / "peers_h200.json"


def quantile(values: Sequence[float], share: float) -> float:
    """Interpolates linearly between the two nearest sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(milliseconds: Sequence[float], flops: float, tensor_bytes: float) -> dict[str, float]:
    """Median, quartiles, and the spread: interquartile range over the median."""
    median, q1, q3 = (quantile(milliseconds, share) for share in (0.5, 0.25, 0.75))
    return {
        "ms": float(f"{median:.6g}"),
        "q1": float(f"{q1:.6g}"),
        "q3": float(f"{q3:.6g}"),
        "spread": round((q3 - q1) / median, 4),
        "tflops": round(flops / median * 1e-9, 2),
        "gb_s": round(tensor_bytes / median * 1e-6, 1),
    }


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def is_ours(name: str) -> bool:
    return name == "ours" or name.startswith("ours:")


def milliseconds(row: Row, name: str) -> float | None:
    """None if the contender did not run, or was wrong."""
    found = row["contenders"].get(name, {}).get("ms")
    return None if found is None else float(found)


def ratio(row: Row, ours: str, peer: str) -> float | None:
    """How many times as fast as `peer`: above 1, ours is faster."""
    mine, theirs = milliseconds(row, ours), milliseconds(row, peer)
    return None if mine is None or theirs is None else theirs / mine


def best_peer(row: Row) -> str | None:
    """The fastest peer of this run."""
    times = {name: milliseconds(row, name) for name in row["contenders"] if not is_ours(name)}
    there = {name: time for name, time in times.items() if time is not None}
    return min(there, key=lambda name: there[name]) if there else None


def best_ratio(row: Row, ours: str) -> float | None:
    best = best_peer(row)
    return None if best is None else ratio(row, ours, best)


def stored_best_over_cudnn(path: Path = STORED_BEST) -> dict[tuple[str, int, bool, int], float]:
    """(pass, d, causal, s) -> rate of the best peer ever timed on this kind of GPU over cuDNN's in the same run."""
    if not path.is_file():
        return {}
    stored = json.loads(path.read_text())
    found = {}
    for line in stored["best_over_cudnn"]:
        for s, value in zip(stored["s"], line["ratios"], strict=True):
            found[line["pass"], line["d"], bool(line["causal"]), s] = float(value)
    return found


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> list[str]:
    line = ["---:" if i >= numbers_from else "---" for i in range(len(head))]
    return ["| " + " | ".join(cells) + " |" for cells in (head, line, *rows)]


def cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def grid_table(rows: list[Row], value: Callable[[Row], float | None]) -> list[str]:
    """One line per head size and mask, one column per length; below, the geometric mean and the minimum."""
    lengths = sorted({row["s_q"] for row in rows})
    lines = {}
    for row in rows:
        lines.setdefault((row["d"], row["causal"]), {})[row["s_q"]] = value(row)
    body = [
        [str(d), "yes" if causal else "no", *(cell(by_length.get(s)) for s in lengths)]
        for (d, causal), by_length in sorted(lines.items())
    ]
    if all(text == "-" for line in body for text in line[2:]):
        return []
    text = markdown(["d", "causal", *map(str, lengths)], body, 2)
    there = [(found, row["name"]) for row in rows if (found := value(row)) is not None]
    least, where = min(there)
    text.append("")
    text.append(
        f"Geometric mean {geometric_mean(found for found, _ in there):.3f}, least {least:.3f} ({where}), "
        f"{len(there)} of {len(rows)} cells."
    )
    return text


def contenders_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row["contenders"]))


def ratio_tables(results: dict[str, Any]) -> list[str]:
    """One table for each type, pass, version of ours and opponent of the grid."""
    text: list[str] = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results["rows"]:
        if row["group"] == "grid":
            groups.setdefault((row["dtype"], row["pass"]), []).append(row)
    for (dtype, pass_), rows in groups.items():
        names = contenders_of(rows)
        peers = [name for name in names if not is_ours(name)]
        versions = [name for name in names if is_ours(name)]
        title = f"{PASS_NAMES[pass_]}, {dtype}"

        def add(caption: str, value: Callable[[Row], float | None], rows: list[Row] = rows) -> None:
            table = grid_table(rows, value)
            if table:
                text.extend(["", f"{caption}:", "", *table])

        for ours in versions:
            for peer in peers:
                add(f"{title}: {ours} over {PEER_NAMES.get(peer, peer)}", lambda row, o=ours, p=peer: ratio(row, o, p))
            if len(peers) > 1:
                add(f"{title}: {ours} over the best peer of this run", lambda row, o=ours: best_ratio(row, o))
            stored = results.get("stored_best_over_cudnn")
            if stored and "cudnn" in peers and not {"fa3", "fa4"} & set(peers):
                known = stored_best_over_cudnn()

                def against_stored(row: Row, o: str = ours, known: Any = known) -> float | None:
                    over_cudnn = ratio(row, o, "cudnn")
                    best = known.get((row["pass"].removesuffix("_lse"), row["d"], row["causal"], row["s_q"]))
                    return None if over_cudnn is None or best is None else over_cudnn / best

                add(
                    f"{title}: {ours} over the best peer, taken as cuDNN in this run times the stored ratio",
                    against_stored,
                )
            for other in versions:
                if other != ours and ours == versions[0]:
                    add(f"{title}: {ours} over {other}", lambda row, o=ours, p=other: ratio(row, o, p))
        if not versions and len(peers) > 1:
            for peer in peers[1:]:
                add(f"{title}: {peer} over {peers[0]}", lambda row, o=peer, p=peers[0]: ratio(row, o, p))
    others = [row for row in results["rows"] if row["group"] != "grid"]
    if others:
        text.extend(
            ["", "Other rows, milliseconds (TFLOP/s) and times as fast as the best peer:", "", *other_rows(others)]
        )
    return text[1:] if text else []


def summary_rows(results: dict[str, Any]) -> list[list[str]]:
    """Type, pass, opponent, cells, geometric mean, least and most of the ratios of the grid; of the first of ours."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results["rows"]:
        if row["group"] == "grid":
            groups.setdefault((row["dtype"], row["pass"]), []).append(row)
    lines = []
    for (dtype, pass_), rows in groups.items():
        names = contenders_of(rows)
        opponents = [(PEER_NAMES.get(name, name), name) for name in names if not is_ours(name)]
        values = [(title, [ratio(row, "ours", name) for row in rows]) for title, name in opponents]
        if len(opponents) > 1:
            values.append(("the best of them", [best_ratio(row, "ours") for row in rows]))
        for title, found in values:
            there = [value for value in found if value is not None]
            if there:
                mean = geometric_mean(there)
                numbers = [f"{mean:.2f}", f"{min(there):.2f}", f"{max(there):.2f}"]
                lines.append([dtype, PASS_NAMES[pass_].lower(), title, str(len(there)), *numbers])
    return lines


def other_rows(rows: list[Row]) -> list[str]:
    names = contenders_of(rows)
    versions = [name for name in names if is_ours(name)]
    body = []
    for row in rows:
        line = [f"`{row['name']}`"]
        for name in names:
            entry = row["contenders"].get(name, {})
            line.append(f"{entry['ms']:.3f} ({entry['tflops']:.0f})" if "ms" in entry else "-")
        line += [cell(best_ratio(row, ours)) for ours in versions]
        body.append(line)
    return markdown(["row", *names, *(f"{ours} / best" for ours in versions)], body, 1)


def failures(results: dict[str, Any]) -> list[str]:
    """Every contender that was left out of a row, and why."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in results["rows"]:
        for name, entry in row["contenders"].items():
            if "failed" in entry:
                lines.setdefault((name, entry["failed"]), []).append(row["name"])
    return [
        f"{name}: {reason} ({rows[0]}" + (f" and {len(rows) - 1} more)" if len(rows) > 1 else ")")
        for (name, reason), rows in lines.items()
    ]


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a run that is cut short leaves the old one whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with the rows of `old` that it lacks; only where both are of the same machine, software and sources."""
    same = ("gpu", "software", "sources_sha256", "protocol")
    differing = [key for key in same if old.get(key) != new.get(key)]
    if differing:
        raise ValueError(f"--merge: the file differs in {', '.join(differing)}; its rows may not stand beside these")
    names = {row["name"] for row in new["rows"]}
    return {**new, "rows": [row for row in old["rows"] if row["name"] not in names] + new["rows"]}


def dump(results: dict[str, Any]) -> str:
    """JSON with one row per line."""
    parts = []
    for key, value in results.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(f"{json.dumps(key)}: [\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
