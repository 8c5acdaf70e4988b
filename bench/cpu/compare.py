"""Fovea against PyTorch's scaled_dot_product_attention on this machine's processor cores.

    python3 bench/cpu/compare.py                    all rows, both sides; ours alone where PyTorch is not installed
    python3 bench/cpu/compare.py --json auto        and writes bench/results/cpu_<machine>.json
    python3 bench/cpu/compare.py --before OLD/libfovea.so   an earlier build in PyTorch's place

Needs libfovea.so, and the program fovea for decoding and for ours alone; finds them beside this file, in a build directory
of the repository, or where --lib and --fovea say. bench/README.md says how it measures.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from fovea_ctypes import BACKWARD, FORWARD, Library, Plan, View
from rows import ATTENTION, DECODE, Row, expand
from sources import sources_hash

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention
except ImportError:
    torch = None

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ("cpu", "tile")  # of the kernels, below src

MIN_ROUNDS = 5
# A turn of one side lasts at least this long. Its first call is not timed, unless one call lasts longer than a turn.
TURN_SECONDS = 0.02
# Pause between turns, in which worker threads of the other side stop spinning.
PAUSE_SECONDS = 0.01
# A row is measured again, this often at most, while other processes take more than this share of the cores.
QUIET, TRIES = 0.02, 3
# Largest difference from float64 allowed, over the largest value of the tensor.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
# Geometric mean and least of theirs over ours, by what the backend of the row computes with.
TARGETS: dict[tuple[str, str, bool], tuple[float, float]] = {
    # (type, pass, AMX)
    ("float32", "fwd", False): (2.2, 1.7),
    ("float32", "bwd", False): (2.2, 1.7),
    ("bfloat16", "fwd", False): (3.2, 2.5),
    ("bfloat16", "bwd", False): (2.2, 1.6),
    ("float32", "fwd", True): (1.7, 1.2),
    ("bfloat16", "fwd", True): (2.0, 1.3),
    ("bfloat16", "bwd", True): (2.5, 1.5),
}
DECODE_TARGET = 0.9


# ---- where things are


def candidates(name: str) -> Iterable[Path]:
    yield HERE / name
    yield ROOT / name
    builds = sorted(ROOT.glob("build/*"), key=lambda path: path.name != "release")
    for build in [ROOT / "build", *builds]:
        yield build / "lib" / name
        yield build / "bin" / name


def find(name: str, given: Path | None) -> Path | None:
    if given is not None:
        if not given.is_file():
            sys.exit(f"compare.py: {given}: no such file")
        return given.resolve()
    return next((path for path in candidates(name) if path.is_file()), None)


def compiler_of(library: Path) -> str:
    found = re.search(rb"(GCC: \([^)]*\) [\d.]+|clang version [\d.]+)", library.read_bytes())
    return found.group(1).decode() if found else "unknown"


def cpu_fields() -> dict[str, str]:
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def machine(library: Library) -> dict[str, Any]:
    fields = cpu_fields()
    sets = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    numbers: dict[str, Any] = {key: fields[key] for key in ("cpu family", "model", "stepping") if key in fields}
    return {
        "cpu": fields.get("model name", platform.processor() or platform.machine()),
        **numbers,
        "cores": library.default_threads,
        "isa": [name for name in sets if name in flags],
        "as_fovea_sees_it": library.machine,
    }


# ---- the two sides


class Case:
    """One row: the tensors that both sides share, a call of ours and a call of theirs: PyTorch's, or an earlier build's."""

    def __init__(
        self, library: Library, row: Row, layout: str, threads: int, backend: str | None, before: Library | None
    ) -> None:
        self.row = row
        dtype = getattr(torch, row.dtype)
        generator = torch.Generator().manual_seed(1)

        def tensor(length: int, *, random: bool) -> Any:
            """(b, h, s, d), PyTorch's order of dimensions, in either memory order."""
            sizes = (row.b, row.h, length, row.d) if layout == "bhsd" else (row.b, length, row.h, row.d)
            t = torch.randn(sizes, generator=generator).to(dtype) if random else torch.zeros(sizes, dtype=dtype)
            return t if layout == "bhsd" else t.transpose(1, 2)

        self.q = tensor(row.seqlen_q, random=True)
        self.k, self.v = tensor(row.s, random=True), tensor(row.s, random=True)
        self.o = tensor(row.seqlen_q, random=False)
        self.lse = torch.zeros(row.b, row.h, row.seqlen_q)
        tensors = {name: self._view(t) for name, t in zip("qkvo", (self.q, self.k, self.v, self.o), strict=True)}
        tensors["lse"] = View(self.lse.data_ptr(), "float32", tuple(self.lse.shape), self.lse.stride())
        options = {"causal": row.causal, "num_threads": threads, "backend": backend}
        self.plan: Plan = library.plan(FORWARD, tensors, **options)  # type: ignore[arg-type]
        self.plan.run()
        if row.pass_ == "bwd":
            self.d_o = tensor(row.s, random=True)
            self.gradients = [tensor(row.s, random=False) for _ in "qkv"]
            tensors["d_o"] = self._view(self.d_o)
            tensors |= {f"d{name}": self._view(t) for name, t in zip("qkv", self.gradients, strict=True)}
            self.plan = library.plan(BACKWARD, tensors, **options)  # type: ignore[arg-type]
            self.inputs = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
            self.their_o = scaled_dot_product_attention(*self.inputs, is_causal=row.causal)
        self.ours: Callable[[], Any] = self.plan.run
        self.before: Callable[[], Any] | None = None
        if before is not None:
            self.before = before.plan(FORWARD if row.pass_ == "fwd" else BACKWARD, tensors, **options).run  # type: ignore[arg-type]

    def _view(self, t: Any) -> View:
        """A (b, h, s, d) tensor as (b, s, h, d)."""
        t = t.transpose(1, 2)
        return View(t.data_ptr(), self.row.dtype, tuple(t.shape), t.stride())

    def theirs(self) -> Any:
        if self.row.pass_ == "bwd":
            return torch.autograd.grad(self.their_o, self.inputs, self.d_o, retain_graph=True)
        with torch.no_grad():
            return (scaled_dot_product_attention(self.q, self.k, self.v, is_causal=self.row.causal),)

    def errors(self) -> tuple[float, float]:
        """Errors of ours and theirs against float64, on the last head of the last batch."""
        row = self.row
        q, k, v = (t[-1, -1].double() for t in (self.q, self.k, self.v))
        scale = 1 / math.sqrt(row.d)
        s = q @ k.T * scale
        if row.causal:
            s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu_(1), -math.inf)
        lse = s.logsumexp(-1, keepdim=True)
        p = s.sub_(lse).exp_()
        o = p @ v
        self.ours()
        theirs = [t[-1, -1] for t in self.theirs()]
        if row.pass_ == "fwd":
            worst_lse = (self.lse[-1, -1].double() - lse[:, 0]).abs().max().item() / lse.abs().max().item()
            ours, expected = [self.o[-1, -1]], [o]
        else:
            worst_lse = 0.0
            d_o = self.d_o[-1, -1].double()
            d_s = (d_o @ v.T).sub_((d_o * o).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            expected = [d_s @ k, d_s.T @ q, p.T @ d_o]
            ours = [t[-1, -1] for t in self.gradients]

        def worst(got: list[Any]) -> float:
            pairs = zip(got, expected, strict=True)
            return max(float((g.double() - e).abs().max() / e.abs().max()) for g, e in pairs)

        return max(worst(ours), worst_lse), worst(theirs)


# ---- time


class Others:
    """Share of the machine's cores used by other processes, or by guests of the same host, since this object was made."""

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float]:
        try:
            ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            ticks = [0] * 8
        total = sum(ticks) / os.sysconf("SC_CLK_TCK")
        busy = total - (ticks[3] + ticks[4]) / os.sysconf("SC_CLK_TCK")
        return total, busy, sum(os.times()[:4])

    def share(self) -> float:
        total, busy, own = (now - then for now, then in zip(self._read(), self._start, strict=True))
        return round(max(0.0, busy - own) / total, 4) if total > 0 else 0.0


def turn(call: Callable[[], Any], calls: int) -> float:
    """Seconds per call over `calls` calls, after one untimed call (none if calls are long)."""
    time.sleep(PAUSE_SECONDS)
    if calls > 1:
        call()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def calls_of_a_turn(call: Callable[[], Any]) -> int:
    call()
    start = time.perf_counter()
    call()
    seconds = max(time.perf_counter() - start, 1e-7)
    return max(1, math.ceil(TURN_SECONDS / seconds))


def seconds_in_turns(sides: dict[str, Callable[[], Any]], min_time: float) -> dict[str, list[float]]:
    """Seconds of a call of each side, a number for each round: the sides run in turns, every other round in the other order."""
    calls = {name: calls_of_a_turn(call) for name, call in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in itertools.count():
        spent = min(sum(times) * calls[name] for name, times in seconds.items())
        if number >= MIN_ROUNDS and spent >= min_time:
            return seconds
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(turn(sides[name], calls[name]))
    raise AssertionError


def summary(seconds: list[float], flops: float) -> dict[str, Any]:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {
        "ms": round(1e3 * median, 5),
        "gflops": round(flops / median * 1e-9, 2),
        "spread": round((high - low) / median, 4),
        "min_ms": round(1e3 * min(seconds), 5),
        "max_ms": round(1e3 * max(seconds), 5),
    }


def compare(case: Case, min_time: float) -> dict[str, Any]:
    """Alternates turns of ours and theirs, and who begins, until each has run for `min_time` seconds."""
    row = case.row
    our_error, their_error = case.errors()
    if not our_error <= TOLERANCE[row.dtype]:
        sys.exit(f"compare.py: {row.name}: differs from float64 by {our_error:.1e} of the largest value")
    sides = {"ours": case.ours, "theirs": case.before or case.theirs}
    others = Others()
    seconds = seconds_in_turns(sides, min_time)
    ours, theirs = summary(seconds["ours"], row.flops), summary(seconds["theirs"], row.flops)
    return {
        "name": row.name,
        "dtype": row.dtype,
        "pass": row.pass_,
        "b": row.b,
        "s": row.s,
        "h": row.h,
        "d": row.d,
        "causal": row.causal,
        "backend": case.plan.backend,
        "ours": ours,
        "torch": theirs,
        "ratio": round(theirs["ms"] / ours["ms"], 4),
        "rounds": len(seconds["ours"]),
        "others": others.share(),
        "workspace_bytes": case.plan.workspace_size,
        "error": float(f"{our_error:.3g}"),
        "torch_error": float(f"{their_error:.3g}"),
    }


def quietest(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Repeats `measure` while other processes disturb it, and returns the least disturbed result."""
    best = measure()
    for _ in range(TRIES - 1):
        if best["others"] <= QUIET:
            break
        best = min(best, measure(), key=lambda result: float(result["others"]))
    return best


def compare_all(library: Library, rows: list[Row], args: argparse.Namespace) -> list[dict[str, Any]]:
    other = "before ms" if args.before else "torch ms"
    print(f"{'row':44} {'backend':16} {'ours ms':>10} {'GFLOP/s':>8} {'spread':>7} {other:>10} {'GFLOP/s':>8} "
          f"{'spread':>7} {'ratio':>6} {'error':>8} {'torch':>8} {'others':>6}")  # fmt: skip
    results = []
    for row in rows:
        case = Case(library, row, args.layout, args.threads, args.backend, args.before)
        result = quietest(lambda: compare(case, args.min_time))  # noqa: B023
        results.append(result)
        ours, theirs = result["ours"], result["torch"]
        print(f"{row.name:44} {result['backend']:16} {ours['ms']:10.3f} {ours['gflops']:8.1f} {ours['spread']:7.1%} "
              f"{theirs['ms']:10.3f} {theirs['gflops']:8.1f} {theirs['spread']:7.1%} {result['ratio']:6.2f} "
              f"{result['error']:8.1e} {result['torch_error']:8.1e} {result['others']:6.1%}", flush=True)  # fmt: skip
    return results


# ---- fovea bench


def bench_command(program: Path, args: argparse.Namespace, filter_: str) -> list[str]:
    """The rows with `filter_` in their names, by `fovea bench`."""
    command = [str(program), "bench", "--rows", filter_, "--seconds", str(args.min_time), "--layout", args.layout]
    command += ["--threads", str(args.threads)] if args.threads else []
    return command + (["--backend", args.backend] if args.backend else [])


def decode_row(program: Path, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Times one decoding row by `fovea bench`, and prints it."""
    others = Others()
    done = subprocess.run([*bench_command(program, args, name), "--json"], check=True, stdout=subprocess.PIPE, text=True)
    share = others.share()
    (row,) = json.loads(done.stdout)["rows"]
    read = row["read"]
    print(f"{name}: {1e3 * row['median_seconds']:.3f} ms, {read['share']:.1%} of a plain read ({read['gb_s']:.1f} GB/s; "
          f"{read['way']})", flush=True)  # fmt: skip
    return {
        "name": name,
        "backend": row["backend"],
        "ms": 1e3 * row["median_seconds"],
        "spread": row["spread"],
        "runs": row["runs"],
        "gflops": row["gflops"],
        "workspace_bytes": row["workspace_bytes"],
        "error": row["relative_error"],
        "read_ms": 1e3 * read["median_seconds"],
        "read_spread": read["spread"],
        "read_gb_s": read["gb_s"],
        "read_way": read["way"],
        "share_of_read": read["share"],
        "others": share,
    }


# ---- report


def report(results: dict[str, Any]) -> list[str]:
    """Geometric mean and least ratio of each (type, pass), and decoding, beside the targets."""
    lines = []
    means: dict[str, Any] = {}
    for (dtype, pass_), group in itertools.groupby(results["rows"], key=lambda row: (row["dtype"], row["pass"])):
        rows = list(group)
        amx = any("amx" in row["backend"] for row in rows)
        geo = math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))
        least = min(rows, key=lambda row: row["ratio"])
        wanted_geo, wanted_least = TARGETS[dtype, pass_, amx]
        passed = geo >= wanted_geo and least["ratio"] >= wanted_least
        means[f"{dtype}_{pass_}"] = {
            "geometric_mean": round(geo, 4),
            "min": least["ratio"],
            "min_row": least["name"],
            "rows": len(rows),
            "target_geometric_mean": wanted_geo,
            "target_min": wanted_least,
            "below_target_min": [row["name"] for row in rows if row["ratio"] < wanted_least],
            "pass": passed,
        }
        lines.append(
            f"{dtype} {pass_}: geometric mean {geo:.2f} (target {wanted_geo}), least {least['ratio']:.2f} "
            f"(target {wanted_least}) at {least['name']}, {len(rows)} rows: {'pass' if passed else 'FAIL'}"
        )
        lines += [f"    below: {r['name']} {r['ratio']:.2f}" for r in rows if r["ratio"] < wanted_least]
    for row in results["decode"]:
        passed = row["share_of_read"] >= DECODE_TARGET
        row["pass"] = passed
        lines.append(
            f"{row['name']}: {row['share_of_read']:.1%} of a plain read (target {DECODE_TARGET:.0%}): "
            f"{'pass' if passed else 'FAIL'}"
        )
    disturbed = [row["name"] for row in [*results["rows"], *results["decode"]] if row["others"] > QUIET]
    if disturbed:
        lines.append(
            f"{len(disturbed)} rows were disturbed by others (over {QUIET:.0%} of the cores); measure them again:"
        )
        lines += [f"    {name}" for name in disturbed]
    results["means"] = means
    return lines


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new` with the rows of `old` that it lacks, in the order of rows.py; of the same machine and sources only.

    A row of both is the new one, unless that was disturbed and the old one less so.
    """
    same = ("machine", "software", "sources_sha256", "threads", "layout")
    if any(old.get(key) != new[key] for key in same):
        sys.exit("compare.py: --merge: the file is of another machine, software, sources, threads or layout")
    for part, table in (("rows", ATTENTION), ("decode", DECODE)):
        by_name = {row["name"]: row for row in old[part]}
        for row in new[part]:
            before = by_name.get(row["name"], row)
            by_name[row["name"]] = row if row["others"] <= max(QUIET, before["others"]) else before
        new[part] = [by_name[row.name] for row in expand(table) if row.name in by_name]
    return new


def write(path: Path, results: dict[str, Any]) -> None:
    """JSON with one row per line."""
    text = "{\n"
    for number, (key, value) in enumerate(results.items()):
        text += ",\n" if number else ""
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text += f"{json.dumps(key)}: [\n" + ",\n".join("  " + json.dumps(row) for row in value) + "\n]"
        elif key == "means":
            lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(mean)}" for name, mean in value.items())
            text += f"{json.dumps(key)}: {{\n{lines}\n}}"
        else:
            text += f"{json.dumps(key)}: {json.dumps(value)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n}\n")


def kind_of(about: dict[str, Any]) -> str:
    return "_amx" if "amx_bf16" in about["isa"] else "_avx512bf16" if "avx512_bf16" in about["isa"] else ""


def results_of_machine(folder: str, about: dict[str, Any], cores: int) -> Path:
    """bench/results/FOLDER/cpu_<maker>_<instructions>_<cores>core.json"""
    vendor = next((name for name in ("xeon", "epyc") if name in about["cpu"].lower()), "other")
    return ROOT / "bench" / "results" / folder / f"cpu_{vendor}{kind_of(about)}_{cores}core.json"


def default_json(about: dict[str, Any]) -> Path:
    name = re.sub(r"[^a-z0-9]+", "_", about["cpu"].lower()).strip("_")
    return ROOT / "bench" / "results" / f"cpu_{name}_{about['cores']}core{kind_of(about)}.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains TEXT (or TEXT,TEXT)")
    parser.add_argument("--min-time", type=float, default=0.5, metavar="S", help="seconds a row and side (0.5)")
    parser.add_argument("--threads", type=int, default=0, help="threads of both sides (all cores)")
    parser.add_argument("--json", metavar="PATH", help="write the results; 'auto' names a file in bench/results")
    parser.add_argument("--merge", action="store_true", help="keep the other rows of an existing file")
    parser.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd", help="order in memory, both sides")
    parser.add_argument("--backend", help="this backend of ours and not the first that can")
    parser.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so")
    parser.add_argument("--before", type=Path, metavar="PATH",
                        help="another libfovea.so in PyTorch's place: prints the ratios, writes nothing")  # fmt: skip
    parser.add_argument("--fovea", type=Path, metavar="PATH", help="the program fovea")
    parser.add_argument("--sources-hash", metavar="HEX", help="where the sources are not at hand; see --print-hash")
    parser.add_argument("--print-hash", action="store_true", help="print the hash of the kernels' sources, and stop")
    parser.add_argument("--no-decode", action="store_true", help="leave out the decode rows")
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    if args.print_hash:
        print(sources_hash(ROOT, SOURCES))
        return 0
    program = find("fovea", args.fovea)
    if torch is None:
        if program is None:
            sys.exit("compare.py: neither PyTorch nor the program fovea is here; build the target fovea_cli, or give --fovea")
        print("PyTorch is not installed: ours alone", flush=True)
        if args.json:
            sys.exit("compare.py: --json: results are of both sides, and PyTorch is not installed; fovea bench --json prints "
                     "those of ours alone")  # fmt: skip
        for text in args.rows.split(","):
            subprocess.run(bench_command(program, args, text), check=True)
        return 0
    path = find("libfovea.so", args.lib)
    if path is None:
        sys.exit("compare.py: no libfovea.so; build the target fovea, or give --lib")
    library = Library(path)
    if args.before is not None:
        args.before = Library(find("libfovea.so", args.before))
        if args.json:
            sys.exit("compare.py: --before: the results of a file are beside PyTorch's; leave out --json")
    args.threads = args.threads or library.default_threads
    torch.set_num_threads(args.threads)
    about = machine(library)

    def wanted(row: Row) -> bool:
        return any(text in row.name for text in args.rows.split(","))

    # Where both sides found the same libgomp they share one pool of workers.
    maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
    runtimes = {line.split()[-1] for line in maps.splitlines() if re.search(r"lib(g|i|)omp[^/]*\.so", line)}
    results: dict[str, Any] = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "software": {
            "fovea": library.version,
            "compiler": compiler_of(path),
            "torch": torch.__version__,
            "openmp_runtimes": len(runtimes),
            "python": platform.python_version(),
            "os": f"{platform.system()} {platform.release()}",
        },
        "sources_sha256": args.sources_hash or sources_hash(ROOT, SOURCES),
        "threads": args.threads,
        "layout": args.layout,
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "flops": "4 b h s^2 d, half of it when causal, 2.5 times that for the backward",
        "ratio": "milliseconds of torch over ours, medians of alternating turns",
        "spread": "interquartile range over median",
        "others": "share of the cores that other processes, or guests of the same host, took during the row",
        "means": {},
        "rows": [],
        "decode": [],
    }
    print(f"fovea {library.version}, torch {torch.__version__}; {library.machine}; {args.threads} threads, "
          f"{len(runtimes)} OpenMP runtime(s)")  # fmt: skip
    results["rows"] = compare_all(library, [row for row in expand(ATTENTION) if wanted(row)], args)
    if args.before is not None:
        ratios = [row["ratio"] for row in results["rows"]]
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(f"times as fast as before: geometric mean {mean:.3f}, least {min(ratios):.3f}, {len(ratios)} rows")
        return 0
    decode = [] if args.no_decode else [row.name for row in expand(DECODE) if wanted(row)]
    if decode and program is None:
        print("no program fovea here: decode rows left out")
    elif program is not None:
        for name in decode:
            results["decode"].append(quietest(lambda: decode_row(program, args, name)))  # noqa: B023
    target = default_json(about) if args.json == "auto" else Path(args.json) if args.json else None
    if target is not None and args.merge and target.exists():
        results = merged(json.loads(target.read_text()), results)
    print("\n".join(report(results)))
    if target is not None:
        write(target, results)
        print(f"wrote {target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
