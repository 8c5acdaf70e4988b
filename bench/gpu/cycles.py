"""Cycles of kernels by Nsight Compute, for experiments: power limits change a card's clock and its times, but not cycles.

    python3 bench/gpu/cycles.py --lib before=OLD/libfovea.so --lib now=build/cuda-dev/lib/libfovea.so -- --d 128 --s 512,4096
    python3 bench/gpu/cycles.py --lib tiles=PATH --json FILE -- --d 128 --kernels '*128x128_s2_queued_qreg,*192x80_s3_queued'

What stands behind `--` goes to compare.py --once, whose contender is ours: which problems (--rows, --pass, --d, --s, --causal,
--shape) and which kernels. One run each, under the profiler, which takes a third of a second; the cycles of all its kernels
are added up. --json keeps what FILE holds of other libraries.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from counters import HERE, RUN, Failed, find_tools, profile, runs_of
from tables import write_whole

TITLE = re.compile(r"(.+), ours(?::(.+?))? \(")
METRIC = "sm__cycles_elapsed.max of Nsight Compute, clocks as they are"


def named_libraries(parser: argparse.ArgumentParser, texts: list[str]) -> dict[str, Path]:
    """What --lib names, NAME=PATH each; ends the program where that is no library."""
    libraries = dict(text.partition("=")[::2] for text in texts)
    for name, path in libraries.items():
        if not name or not Path(path).is_file():
            parser.error(f"--lib: got '{name}={path}', expected NAME=PATH of a library that exists")
    return {name: Path(path) for name, path in libraries.items()}


def cycles_of(ncu: str, library: Path, arguments: list[str]) -> dict[str, dict[str, int]]:
    """Kernel's pattern ("library": its own choice) -> problem -> cycles. Raises Failed and ValueError."""
    program = [sys.executable, str(HERE / "compare.py"), "--once", "--contenders", "ours", "--lib", str(library), *arguments]
    printed, page = profile(ncu, program, ("cycles",))
    for line in printed.splitlines():
        if "left out" in line:
            print(line)
    titles = RUN.findall(printed)
    if not titles:
        raise Failed("compare.py ran nothing")
    found: dict[str, dict[str, int]] = {}
    for title, kernels in runs_of(page, titles):
        told = TITLE.match(title)
        if told is None:
            raise ValueError(f"compare.py told of a run '{title}', expected 'PROBLEM, ours (BACKEND)'")
        found.setdefault(told[2] or "library", {})[told[1]] = int(sum(kernel.get("cycles") for kernel in kernels))
    return found


def table(variants: dict[str, Any]) -> list[str]:
    """One line per problem, one column per kernel: thousands of cycles, and their ratio to the first column."""
    columns = [(library, kernel) for library, kernels in variants.items() for kernel in kernels]
    problems = dict.fromkeys(problem for library, kernel in columns for problem in variants[library][kernel])
    lines = ["| problem | " + " | ".join(f"{library}: {kernel}" for library, kernel in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    for problem in problems:
        counts = [variants[library][kernel].get(problem) for library, kernel in columns]
        cells = ["-" if x is None else f"{x / 1e3:.0f}" + (f" ({x / counts[0]:.3f})" if i and counts[0] else "")
                 for i, x in enumerate(counts)]  # fmt: skip
        lines.append(f"| {problem} | " + " | ".join(cells) + " |")
    return lines


def about_gpu() -> str:
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return smi.stdout.splitlines()[0].strip() if smi.stdout.strip() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", action="append", required=True, metavar="NAME=PATH", help="a libfovea.so; again for more")
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's command line")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the cycles; other libraries of FILE are kept")
    own, behind = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, behind = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    libraries = named_libraries(parser, args.lib)
    result: dict[str, Any] = {"gpu": "", "date": "", "metric": METRIC, "command": "", "variants": {}}
    if args.json is not None and args.json.is_file():
        result |= json.loads(args.json.read_text(encoding="utf-8"))
    ncu = find_tools(args.ncu)
    try:
        measured = {name: cycles_of(ncu, path, behind) for name, path in libraries.items()}
    except (Failed, ValueError) as error:
        sys.exit(f"cycles.py: {error}")
    print("\n".join(table(measured)))
    if args.json is not None:
        for name, kernels in measured.items():
            kept = result["variants"].setdefault(name, {})
            for kernel, counts in kernels.items():
                kept[kernel] = kept.get(kernel, {}) | counts
        result |= {"gpu": about_gpu(), "date": datetime.date.today().isoformat(),
                   "command": "python3 bench/gpu/cycles.py --lib NAME=PATH -- " + " ".join(behind)}  # fmt: skip
        write_whole(args.json, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
