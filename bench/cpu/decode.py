"""Few queries over key-value caches on this machine's processor cores, beside a plain read of the caches in the same run.

    python3 bench/cpu/decode.py                one query of 8 to 128 heads over 8 key heads of 16,384 keys
    python3 bench/cpu/decode.py --json auto    and writes bench/results/decode/cpu_<machine>.json
    python3 bench/cpu/decode.py --from-memory  over several caches in turn, as those of a model's layers are: together twice what the
                                               last-level cache holds
    python3 bench/cpu/decode.py --rows page16,float16 --groups 8   only some
    python3 bench/cpu/decode.py --json auto --again   rows that the written file leaves out

Needs the program fovea; finds it as compare.py does. Each row is timed by `fovea bench --decode`, in turns with the plain read: the same
bytes, as many threads, in the fastest of the ways that read_memory.cpp knows. A row is right, or the run ends. A row whose plain read was
disturbed is timed again, up to twice, and left out where it stays so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compare import QUIET, ROOT, SOURCES, Others, cpu_fields, find, quietest, results_of_machine, write
from sources import sources_hash

HEADS_KV, HEAD_DIM, KEYS = 8, 128, 16384
GROUPS = (1, 4, 8, 16)
# Caches of the type of the queries, and of 8 bits under queries of either.
TYPES = (("float32", "q"), ("float16", "q"), ("bfloat16", "q"), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn"))
# Whole caches in both orders, and pages.
FORMS = (("bhsd", 0), ("bshd", 0), ("bshd", 16), ("bshd", 256))
TARGET = 0.9
# A plain read is disturbed where its turns differ by so much, or where it is so much slower than the median of those of as many bytes.
MOST_SPREAD, LEAST_OF_MEDIAN = 0.3, 2 / 3
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
TRIES_AGAIN = 2


@dataclass(frozen=True)
class Row:
    dtype: str
    cache: str  # q or float8_e4m3fn
    layout: str
    page: int
    group: int

    @property
    def name(self) -> str:
        types = self.dtype if self.cache == "q" else f"{self.cache}_under_{self.dtype}"
        return f"{types}_{self.layout}" + (f"_page{self.page}" if self.page else "") + f"_group{self.group}"

    @property
    def cache_bytes(self) -> int:
        """K and V of one cache."""
        return 2 * KEYS * HEADS_KV * HEAD_DIM * ELEMENT_BYTES[self.dtype if self.cache == "q" else self.cache]

    def caches(self, args: argparse.Namespace) -> int:
        return -(-2 * last_level_cache() // self.cache_bytes) if args.from_memory else 1

    def command(self, program: Path, args: argparse.Namespace) -> list[str]:
        sizes = {"batch": 1, "seqlen": 1, "seqlen-k": KEYS, "heads": HEADS_KV * self.group, "heads-kv": HEADS_KV, "head-dim": HEAD_DIM}
        what = {"dtype": self.dtype, "cache-dtype": self.cache, "page": self.page, "layout": self.layout, "caches": self.caches(args)}
        what["seconds"] = args.min_time
        command = [str(program), "bench", "--decode", "--json"]
        for option, value in (sizes | what).items():
            command += [f"--{option}", str(value)]
        command += ["--threads", str(args.threads)] if args.threads else []
        return command + (["--backend", args.backend] if args.backend else [])


def last_level_cache() -> int:
    """Bytes of the last-level caches of all cores, each counted once."""
    caches = {}
    for core in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
        folders = sorted((core / "cache").glob("index[0-9]"))
        if not folders:
            sys.exit("decode.py: --from-memory: this system does not tell the size of the last-level cache")
        size = (folders[-1] / "size").read_text().strip()
        caches[(folders[-1] / "shared_cpu_list").read_text().strip()] = int(size.rstrip("K")) * 1024
    return sum(caches.values())


def measure(row: Row, program: Path, args: argparse.Namespace) -> dict[str, Any]:
    others = Others()
    done = subprocess.run(row.command(program, args), check=True, stdout=subprocess.PIPE, text=True)
    share = others.share()
    told = json.loads(done.stdout)
    (timed,) = told["rows"]
    read = timed["read"]
    return {
        "name": row.name,
        "dtype": row.dtype,
        "cache_dtype": timed["cache_dtype"],
        "layout": row.layout,
        "page": row.page,
        "caches": timed["caches"],
        "group": row.group,
        "backend": timed["backend"],
        "threads": told["threads"],
        "ms": round(1e3 * timed["median_seconds"], 5),
        "spread": round(timed["spread"], 4),
        "runs": timed["runs"],
        "gb_s": round(timed["key_gb_s"], 2),
        "read_ms": round(1e3 * read["median_seconds"], 5),
        "read_spread": round(read["spread"], 4),
        "read_gb_s": round(read["gb_s"], 2),
        "read_way": read["way"],
        "share_of_read": round(read["share"], 4),
        "error": float(f"{timed['relative_error']:.3g}"),
        "others": share,
    }


def machine() -> dict[str, Any]:
    fields = cpu_fields()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    sets = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        **{key: fields[key] for key in ("cpu family", "model", "stepping") if key in fields},
        "isa": [name for name in sets if name in flags],
    }


def add_row_arguments(parser: argparse.ArgumentParser) -> None:
    """Which rows, and how they run."""
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains TEXT (or TEXT,TEXT)")
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)), help="query heads of a key head (1,4,8,16)")
    parser.add_argument("--threads", type=int, default=0, help="threads of both sides (all cores)")
    parser.add_argument("--from-memory", action="store_true", help="caches in turn, together twice the size of the last-level cache")
    parser.add_argument("--backend", help="this backend of ours and not the first that can")


def all_rows(groups: Sequence[int] = GROUPS) -> list[Row]:
    return [Row(dtype, cache, layout, page, group) for dtype, cache in TYPES for layout, page in FORMS for group in groups]


def chosen_rows(args: argparse.Namespace) -> list[Row]:
    grid = all_rows([int(text) for text in args.groups.split(",")])
    return [row for row in grid if any(text in row.name for text in args.rows.split(","))]


def left_out_of(path: Path, rows: list[Row]) -> list[Row]:
    """Those of `rows` that a written file lacks, or has disturbed."""
    if not path.exists():
        sys.exit(f"decode.py: --again: there is no {path}")
    old = json.loads(path.read_text())["caches"]
    there = {row["name"] for row in old} - set(disturbed(old))
    return [row for row in rows if row.name not in there]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_row_arguments(parser)
    parser.add_argument("--min-time", type=float, default=0.5, metavar="S", help="seconds a row, both sides (0.5)")
    parser.add_argument("--json", metavar="PATH", help="write the results; 'auto' names a file in bench/results/decode")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of an existing file, of the same machine and sources")
    parser.add_argument("--again", action="store_true", help="only the rows that an existing file leaves out; keeps the others, as --merge")
    parser.add_argument("--fovea", type=Path, metavar="PATH", help="the program fovea")
    return parser.parse_args()


def disturbed(rows: list[dict[str, Any]]) -> list[str]:
    """Names of the rows whose plain read tells what else the machine did, and not how fast its memory is."""
    reads: dict[int, list[float]] = {}
    for row in rows:
        reads.setdefault(ELEMENT_BYTES[row["cache_dtype"]], []).append(row["read_gb_s"])
    least = {size: LEAST_OF_MEDIAN * statistics.median(rates) for size, rates in reads.items()}
    return [
        row["name"]
        for row in rows
        if row["read_spread"] > MOST_SPREAD or row["read_gb_s"] < least[ELEMENT_BYTES[row["cache_dtype"]]] or row["others"] > QUIET
    ]


def target_of(threads: int, args: argparse.Namespace) -> Path:
    if args.json != "auto":
        return Path(args.json)
    target = results_of_machine("decode", machine(), threads)
    return target.with_stem(target.stem + "_memory") if args.from_memory else target


def store(rows: list[dict[str, Any]], args: argparse.Namespace, finished: bool = False) -> Path:
    """Writes what there is of the rows, so that a run that is cut off keeps those that it has; at the end without the disturbed ones."""
    results: dict[str, Any] = {
        "machine": machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "software": {"os": f"{platform.system()} {platform.release()}"},
        "sources_sha256": sources_hash(ROOT, SOURCES),
        "threads": rows[0]["threads"],
        "problem": f"one query of {HEADS_KV} * group heads of {HEAD_DIM} over {HEADS_KV} key heads of {KEYS} keys",
        "share_of_read": "rate of K and V over that of the fastest plain read of them, medians of alternating turns",
        "from_memory": args.from_memory,
        "caches": rows,
    }
    target = target_of(results["threads"], args)
    if (args.merge or args.again) and target.exists():
        old = json.loads(target.read_text())
        if any(old.get(key) != results[key] for key in ("machine", "sources_sha256", "threads", "from_memory")):
            sys.exit("decode.py: --merge, --again: the file is of another machine, sources, threads or way (--from-memory)")
        known = {row["name"]: row for row in old["caches"]} | {row["name"]: row for row in rows}
        results["caches"] = [known[row.name] for row in all_rows() if row.name in known]
    if finished:
        out = disturbed(results["caches"])
        results["left_out"] = [row.name for row in all_rows() if row.name in out]
        results["caches"] = [row for row in results["caches"] if row["name"] not in out]
    write(target, results)
    return target


def time_rows(rows: list[Row], program: Path, args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    for row in rows:
        result = quietest(lambda: measure(row, program, args))  # noqa: B023
        results[row.name] = result
        by_others = "  disturbed by others" if result["others"] > QUIET else ""
        print(f"{row.name:52} {result['backend']:16} {result['ms']:8.3f} ms  {result['gb_s']:5.1f} GB/s, "
              f"{result['share_of_read']:4.0%} of a plain read at {result['read_gb_s']:5.1f}{by_others}", flush=True)  # fmt: skip
        if args.json:
            store(list(results.values()), args)


def main() -> int:
    args = parse_arguments()
    program = find("fovea", args.fovea)
    if program is None:
        sys.exit("decode.py: no program fovea here; build the target fovea_cli, or give --fovea")
    rows = chosen_rows(args)
    if args.again:
        if not args.json:
            sys.exit("decode.py: --again: which file? Give --json")
        rows = left_out_of(target_of(args.threads or len(os.sched_getaffinity(0)), args), rows)
    results: dict[str, dict[str, Any]] = {}
    time_rows(rows, program, args, results)
    for _ in range(TRIES_AGAIN):
        again = disturbed(list(results.values()))
        time_rows([row for row in rows if row.name in again], program, args, results)
    below = [name for name, row in results.items() if row["share_of_read"] < TARGET]
    print(f"{len(results) - len(below)} of {len(results)} rows reach {TARGET:.0%} of a plain read")
    for name in disturbed(list(results.values())):
        print(f"{name}: the plain read stayed disturbed")
    if args.json and results:
        print(f"wrote {store(list(results.values()), args, finished=True)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
