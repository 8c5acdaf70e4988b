"""Hardware counters of chosen kernels as one table, by Nsight Compute: `make profile`.

    python3 bench/gpu/counters.py                                     ours: forward and backward, d 128, 4,096 tokens
    python3 bench/gpu/counters.py --shape fwd,b4,s4096,h32,d64,causal --contenders ours,fa2
    python3 bench/gpu/counters.py --csv FILE                          a raw page made elsewhere; needs no GPU
    python3 bench/gpu/counters.py --ladder --json auto                the rungs of the ladder: `make profile-ladder`

Each problem runs once to warm up and once under the profiler, which repeats every kernel as often as its counters need
(caches are flushed and clocks left alone, so times are somewhat above those of compare.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ncu
import tables
from ladder_groups import PROGRAM, list_groups

HERE = Path(__file__).resolve().parent
DEFAULT_SHAPES = [
    "fwd,b4,s4096,h16,d128",
    "fwd,b4,s4096,h16,d128,causal",
    "bwd,b4,s4096,h16,d128",
    "bwd,b4,s4096,h16,d128,causal",
]
WHERE_NCU_IS = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
RUN = re.compile(r"^profile: (.+)$", re.MULTILINE)


class Failed(RuntimeError):
    """Profiling failed; the text says why, in several lines."""


def find_ncu(given: str | None) -> str | None:
    if given is not None:
        return given if Path(given).is_file() else None
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in WHERE_NCU_IS:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return str(found[-1])
    return None


def last_lines(text: str, count: int = 12) -> str:
    return "\n".join("  " + line for line in text.strip().splitlines()[-count:])


def profile(profiler: str, program: list[str], labels: Iterable[str] = ncu.METRICS) -> tuple[str, str]:
    """Runs a program that marks what to profile. Returns what it prints, and the raw page of its kernels as CSV with
    the metrics of these labels. Raises Failed."""
    with tempfile.TemporaryDirectory() as folder:
        report, log = str(Path(folder) / "report"), Path(folder) / "log"
        command = [
            profiler,
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--log-file",
            str(log),
            "--export",
            report,
            "--force-overwrite",
        ]
        command += ["--metrics", ",".join(ncu.METRICS[label] for label in labels), *program]
        done = subprocess.run(command, capture_output=True, text=True)
        output = done.stdout + done.stderr + (log.read_text() if log.is_file() else "")
        if "ERR_NVGPUCTRPERM" in output:
            raise Failed(
                "the driver keeps its counters from this user; run as root, or load its kernel module "
                "with NVreg_RestrictProfilingToAdminUsers=0"
            )
        if done.returncode != 0 or not Path(report + ".ncu-rep").is_file():
            words = program[1:] if program[0] == sys.executable else program
            start = "python3 " if program[0] == sys.executable else ""
            raise Failed("nothing was profiled. Try without the profiler: "
                     f"{start}{' '.join(words)}\n{last_lines(output)}")  # fmt: skip
        page = [profiler, "--import", report + ".ncu-rep", "--csv", "--page", "raw", "--print-units", "base"]
        imported = subprocess.run(page, capture_output=True, text=True)
        if imported.returncode != 0:
            raise Failed(f"ncu could not read its own report\n{last_lines(imported.stdout + imported.stderr)}")
        return done.stdout, imported.stdout


def find_tools(given: str | None) -> str:
    """The path of Nsight Compute; exits where it or a GPU is missing."""
    profiler = find_ncu(given)
    program = Path(sys.argv[0]).name
    if profiler is None:
        sys.exit(
            f"{program}: no ncu here. Install Nsight Compute (it is part of the CUDA toolkit; Debian: "
            "nvidia-nsight-compute), or give --ncu PATH; counters.py --csv FILE reads a page made elsewhere"
        )
    smi = shutil.which("nvidia-smi")
    if smi is None or subprocess.run([smi, "-L"], capture_output=True).returncode != 0:
        sys.exit(f"{program}: nvidia-smi sees no GPU here; counters.py --csv FILE reads a page made elsewhere")
    return profiler


def profile_contenders(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The raw page of the problems of --shape as CSV, and the titles of the runs in it."""
    program = [sys.executable, str(HERE / "compare.py"), "--once", "--contenders", args.contenders]
    for shape in args.shape or DEFAULT_SHAPES:
        program += ["--shape", shape]
    if args.backend:
        program += ["--backend", args.backend]
    if args.lib:
        program += ["--lib", str(args.lib)]
    printed, page = profile(find_tools(args.ncu), program)
    titles = RUN.findall(printed)
    if not titles:
        raise Failed(f"compare.py profiled nothing\n{last_lines(printed)}")
    return page, titles


def runs_of(text: str, titles: list[str]) -> list[tuple[str, list[ncu.Kernel]]]:
    """The kernels of each run; runs without titles are numbered. Raises ValueError."""
    kernels = ncu.read_csv(text)
    markers = sum(map(ncu.is_marker, kernels))
    titles = titles or [f"run {number + 1}" for number in range(markers)]
    return ncu.split_at_markers(kernels, titles) if markers else [("kernels", kernels)]


def profile_ladder(args: argparse.Namespace) -> dict[str, Any]:
    """Counters of the rungs, group by group, in the form of bench/results/ladder_profile_*.json."""
    profiler = find_tools(args.ncu)
    version = subprocess.run([profiler, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1:]
    result: dict[str, Any] = {}
    kernels: list[dict[str, Any]] = []
    groups = list_groups(args.fovea, "gpu")
    for name in args.group or []:
        if name not in groups:
            raise ValueError(f"--group: got '{name}', expected one of {', '.join(groups)}")
    for group in args.group or groups:
        # The middle one of the many lengths of a group: the kernel is the same at each.
        shapes = groups[group] if len(groups[group]) < 3 else [groups[group][len(groups[group]) // 2]]
        program = [str(args.fovea), "ladder", "--profile", "--json", "--no-peer", "--group", group]
        program += ["--shape", ",".join(args.shape or shapes)]
        for rung in args.rung or []:
            program += ["--rung", rung]
        try:
            printed, page = profile(profiler, program)
            told = json.loads(printed)
        except (Failed, json.JSONDecodeError) as error:  # the others may do
            print(f"counters.py: group {group}: {error}", file=sys.stderr)
            continue
        rows = [row for row in told["rows"] if row.get("profiled")]
        for row in told["rows"]:
            if row not in rows:
                print(f"{row['rung']} {row['shape']}: left out: {row.get('skipped', 'its results are wrong')}")
        runs = runs_of(page, [f"{row['rung']} {row['shape']}" for row in rows]) if rows else []
        print("\n".join(ncu.table(runs)) + "\n", flush=True)
        result = {key: told[key] for key in ("version", "date", "host", "gpu", "protocol") if key in told}
        for row, run in zip(rows, runs, strict=True):
            of_rung = {key: row[key] for key in ("rung", "group", "shape")}
            # The name of a run repeats its rung, group and shape.
            kernels += [of_rung | {k: v for k, v in line.items() if k != "run"} for line in ncu.as_json([run])]
    return {**result, "profiler": "".join(version), "kernels": kernels}


def write_ladder(result: dict[str, Any], where: str) -> None:
    name = re.sub(r"[^a-z0-9]+", "_", result["gpu"].split(",")[0].lower()).strip("_")
    path = HERE.parent / "results" / f"ladder_profile_{name}.json" if where == "auto" else Path(where)
    tables.write_whole(path, tables.dump(result))
    print(f"wrote {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="WORDS",
                        help="as of compare.py, or with --ladder as of fovea ladder; may be repeated")  # fmt: skip
    parser.add_argument("--contenders", default="ours", metavar="NAME,...", help="as of compare.py (ours)")
    parser.add_argument("--backend", metavar="NAME,...", help="backends of ours")
    parser.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so")
    parser.add_argument("--ladder", action="store_true", help="the rungs of the ladder, by fovea ladder --profile")
    parser.add_argument("--group", action="append", metavar="NAME", help="of the ladder (all on GPUs); may be repeated")
    parser.add_argument("--rung", action="append", metavar="NAME", help="of the ladder, in one --group; may be repeated")
    parser.add_argument("--fovea", type=Path, metavar="PATH", default=PROGRAM, help="the program, for --ladder")
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's command line")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="read this raw page and profile nothing")
    parser.add_argument("--save-csv", type=Path, metavar="FILE", help="keep the raw page")
    parser.add_argument("--json", metavar="FILE",
                        help="write the numbers, a line a kernel; 'auto', with --ladder: in bench/results")  # fmt: skip
    args = parser.parse_args()
    if not args.ladder and (args.group or args.rung or args.json == "auto"):
        parser.error("--group, --rung and --json auto go with --ladder")
    if args.ladder and (args.csv or args.save_csv or args.backend or args.lib):
        parser.error("--csv, --save-csv, --backend and --lib do not go with --ladder")
    if args.json == "auto" and args.group:
        parser.error("--json auto holds all groups, and --group leaves some out; name a file")
    if (args.rung or args.ladder and args.shape) and len(args.group or []) != 1:
        parser.error("--rung and --shape: name the group of the ladder that they are for, with --group")
    if args.ladder:
        try:
            result = profile_ladder(args)
        except ValueError as error:
            sys.exit(f"counters.py: {error}")
        if args.json and result["kernels"]:
            write_ladder(result, args.json)
        return 0 if result["kernels"] else 1
    titles: list[str] = []
    if args.csv is not None:
        text = args.csv.read_text()
    else:
        try:
            text, titles = profile_contenders(args)
        except Failed as error:
            sys.exit(f"counters.py: {error}")
    if args.save_csv:
        args.save_csv.write_text(text)
    try:
        runs = runs_of(text, titles)
    except ValueError as error:
        sys.exit(f"counters.py: {args.csv or 'ncu'}: {error}")
    print("\n".join(ncu.table(runs)))
    if args.json:
        lines = ",\n".join("  " + json.dumps(line) for line in ncu.as_json(runs))
        Path(args.json).write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
