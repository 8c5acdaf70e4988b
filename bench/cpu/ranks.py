"""One sequence over two ranks of one thread each, on this machine's processor cores, beside one process of two threads.

    python3 bench/cpu/ranks.py                 ranks that are threads, and processes of MPI where mpirun is
    python3 bench/cpu/ranks.py --json auto     and writes bench/results/ranks/cpu_<machine>.json
    python3 bench/cpu/ranks.py --ranks 4 --seqlen 8192,32768 --heads 16 --types bfloat16

Needs the program fovea; finds it as compare.py does. `fovea bench` verifies each row, then times both sides in turns; share: the rate
of all ranks together over that of the one process.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compare import QUIET, ROOT, SOURCES, Others, find, quietest, results_of_machine, write
from decode import machine
from sources import sources_hash

TYPES, PASSES = ("float32", "bfloat16"), ("fwd", "bwd")
HEAD_DIM = 64
TARGET = 0.95


def command(program: Path, transport: str, row: dict[str, Any], args: argparse.Namespace) -> list[str]:
    sizes = {"seqlen": row["seqlen"], "heads": args.heads, "head-dim": HEAD_DIM, "dtype": row["dtype"], "pass": row["pass"]}
    made = [str(program), "bench", "--causal", "--json", "--seconds", str(args.min_time), "--threads", str(args.ranks)]
    for option, value in sizes.items():
        made += [f"--{option}", str(value)]
    if transport == "threads":
        return [*made, "--no-mpi", "--ranks", str(args.ranks)]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *as_root, "-n", str(args.ranks), "--bind-to", "none", *made]


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Of a row among all."""
    return row["dtype"], PASSES.index(row["pass"]), row["seqlen"], row["transport"]


def measure(program: Path, transport: str, row: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    others = Others()
    done = subprocess.run(command(program, transport, row, args), check=True, stdout=subprocess.PIPE, text=True)
    disturbed = others.share()
    (timed,) = json.loads(done.stdout)["rows"]
    ranks = timed["ranks"]
    return {
        **row,
        "transport": transport,
        "backend": timed["backend"],
        "method": ranks["reason"].split(": ")[1],
        "ms": round(1e3 * timed["median_seconds"], 3),
        "spread": round(timed["spread"], 4),
        "single_ms": round(1e3 * ranks["single_median_seconds"], 3),
        "single_spread": round(ranks["single_spread"], 4),
        "share": round(ranks["share"], 4),
        "error": float(f"{timed['relative_error']:.3g}"),
        "others": disturbed,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="ranks of one thread, and threads of the one process (2)")
    parser.add_argument("--seqlen", default="4096,8192,16384", metavar="N,...", help="tokens (4096,8192,16384)")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="heads (8)")
    parser.add_argument("--types", default=",".join(TYPES), metavar="T,...", help="types (float32,bfloat16)")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of a file of the same machine and sources")
    parser.add_argument("--min-time", type=float, default=1.5, metavar="S", help="seconds a row, both sides (1.5)")
    parser.add_argument("--json", metavar="PATH", help="write the results; 'auto' names a file in bench/results/ranks")
    parser.add_argument("--fovea", type=Path, metavar="PATH", help="the program fovea")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    program = find("fovea", args.fovea)
    if program is None:
        sys.exit("ranks.py: no program fovea here; build the target fovea_cli, or give --fovea")
    transports = ["threads", "mpi"] if shutil.which("mpirun") else ["threads"]
    types, tokens = args.types.split(","), [int(n) for n in args.seqlen.split(",")]
    grid = [{"dtype": t, "pass": p, "seqlen": n} for t in types for p in PASSES for n in tokens]
    rows = []
    for row in grid:
        for transport in transports:
            result = quietest(lambda: measure(program, transport, row, args))  # noqa: B023
            rows.append(result)
            disturbed = "  disturbed by others" if result["others"] > QUIET else ""
            print(f"{row['dtype']:9} {row['pass']} {row['seqlen']:6} {transport:8} {result['ms']:9.2f} ms, one process "
                  f"{result['single_ms']:9.2f}: {result['share']:.3f}  {result['method']}{disturbed}", flush=True)  # fmt: skip
    reached = sum(row["share"] >= TARGET for row in rows)
    print(f"{reached} of {len(rows)} rows reach {TARGET} of the rate of one process")
    if not args.json:
        return 0
    about = machine()
    results: dict[str, Any] = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "software": {"os": f"{platform.system()} {platform.release()}"},
        "sources_sha256": sources_hash(ROOT, (*SOURCES, "distributed")),
        "ranks": args.ranks,
        "problem": f"causal, one sequence, {args.heads} heads of {HEAD_DIM}, zigzag pieces",
        "rows": rows,
    }
    target = results_of_machine("ranks", about, args.ranks)
    target = target if args.json == "auto" else Path(args.json)
    if args.merge and target.exists():
        old = json.loads(target.read_text())
        if any(old[key] != results[key] for key in ("machine", "sources_sha256", "ranks", "problem")):
            sys.exit("ranks.py: --merge: the file is of another machine, other sources, ranks or heads")
        known = {place(row): row for row in (*old["rows"], *rows)}
        results["rows"] = [known[key] for key in sorted(known)]
    write(target, results)
    print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
