"""Fovea against PyTorch's attention backends, and FlashAttention-3 and -4 where installed, on an NVIDIA GPU.

    python3 bench/gpu/compare.py                          forward and backward of the grid (bf16; 16,384 tokens a batch)
    python3 bench/gpu/compare.py --rows special           what the grid does not show; --rows wide: head sizes above 256;
                                                          --rows terms: biases, masks, documents, softcap, dropout at
                                                          512 and 16,384; --rows decode: few queries over a cache,
                                                          pages; --rows latent: v is the first columns of k; --rows
                                                          fp8: q, k and v of 8 bits; --rows all: all of these
    python3 bench/gpu/compare.py --d 128 --s 4096 --pass bwd_det --causal yes
    python3 bench/gpu/compare.py --shape bwd,b4,s4096,h32,hkv8,d128,causal
    python3 bench/gpu/compare.py --before OLD/libfovea.so  two builds of the library in turn
    python3 bench/gpu/compare.py --json auto              and writes bench/results/<gpu>_<what>.json
    python3 bench/gpu/compare.py --tables FILE            the tables of stored results; needs no GPU

README.md beside this file tells how it measures. `fovea bench --device cuda` times ours alone, without Python.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # fovea_ctypes, sources

import tables
from device import Gpu
from shapes import DTYPES, GRID_HEAD_DIMS, GRID_LENGTHS, PASSES, Shape, decode, fp8, grid, latent, parse, special, terms, wide
from sources import sources_hash

if TYPE_CHECKING:
    from fovea_ctypes import Library
    from contenders import Call, Inputs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = ("cuda", "tile")  # of the kernels, below src
CONTENDERS = ("ours", "fa2", "cudnn", "efficient", "flex", "fa3", "fa4")

# Launches a turn: as many as fill this time, so that a replay of the graph is long beside its start and the clock's tick.
TURN_SECONDS = 0.008
MOST_LAUNCHES = 200
ROUNDS = 7


# ---- where things are


def find_library(given: Path | None) -> Path | None:
    if given is not None:
        if not given.is_file():
            sys.exit(f"compare.py: {given}: no such file")
        return given.resolve()
    builds = sorted(ROOT.glob("build/*"), key=lambda path: path.name != "release")
    places = [HERE, *(build / "lib" for build in [ROOT / "build", *builds])]
    return next((place / "libfovea.so" for place in places if (place / "libfovea.so").is_file()), None)


# ---- one cell


class Entrant:
    """One contender on one shape: its calls, captured in a CUDA graph."""

    def __init__(self, name: str, prepare: Any, inputs: list[Inputs], stream: Any) -> None:
        import torch

        self.name = name
        self.calls: list[Call] = [prepare(one) for one in inputs]
        self.calls[0].run()  # compiles, picks algorithms, loads modules
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.calls[-1].run()
        end.record()
        end.synchronize()
        seconds = max(begin.elapsed_time(end) * 1e-3, 1e-6)
        turn = math.ceil(TURN_SECONDS / seconds)
        # Every set of inputs takes part equally often.
        self.launches = len(inputs) * math.ceil(min(max(turn, 1), MOST_LAUNCHES) / len(inputs))
        self.graph: Any = torch.cuda.CUDAGraph()
        self.why_events = ""
        self.milliseconds: list[float] = []
        try:
            with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
                self._launch_all()
        except RuntimeError as error:
            self.graph, self.why_events = None, str(error).split("\n")[0]
            torch.cuda.synchronize()

    def _launch_all(self) -> None:
        for number in range(self.launches):
            self.calls[number % len(self.calls)].run()

    def turn(self) -> None:
        """Puts all launches on the current stream."""
        if self.graph is not None:
            self.graph.replay()
        else:
            self._launch_all()


def in_context(shape: Shape) -> Any:
    import contenders

    return contenders.deterministic_torch() if shape.deterministic else contextlib.nullcontext()


def repeats(entrant: Entrant, stream: Any) -> str:
    """Empty if two runs give the same bits, else names the outputs that differ."""
    import torch

    before = {name: t.clone() for name, t in entrant.calls[0].outputs().items()}
    entrant.turn()
    stream.synchronize()
    for name, t in entrant.calls[0].outputs().items():
        if not torch.equal(t, before[name]):
            return f"wrong: {name} differs from run to run"
    return ""


def reason_of(error: BaseException, warned: Sequence[Any] = ()) -> str:
    """Why PyTorch refuses a shape: the reasons are in warnings, the error says only that no kernel is available."""
    reasons = [str(warning.message).split(" (Triggered internally")[0] for warning in warned]
    reasons = [text for text in reasons if text and not re.search(r"not used because:|runtime disabled", text)]
    text = reasons[-1] if reasons else str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def measure(shape: Shape, args: argparse.Namespace, library: Library | None, gpu: Gpu) -> dict[str, Any]:
    import contenders
    import verify
    import torch

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    sets = 1
    if args.flush_l2:
        # So many sets that twice the size of the L2 passes through it before a set's turn comes again.
        sets = 1 + math.ceil(2 * l2 / shape.tensor_bytes)
    stream = torch.cuda.Stream()
    row: dict[str, Any] = {
        "name": shape.name,
        "group": shape.group,
        "pass": shape.pass_,
        "dtype": shape.dtype,
        "b": shape.b,
        "s_q": shape.s_q,
        "s_k": shape.s_k,
        "h_q": shape.h_q,
        "h_kv": shape.h_kv,
        "d": shape.d,
        "d_v": shape.d_v,
        "causal": shape.causal,
        "window": shape.window,
        "softcap": shape.softcap,
        "alibi": shape.alibi,
        "lengths": list(shape.lengths),
        "page": shape.page,
        "used": list(shape.used),
        "append": shape.append,
        "e4m3": shape.e4m3,
        "e4m3_q": shape.e4m3_q,
        "flops": shape.flops,
        "bytes": shape.tensor_bytes,
        "l2": "cold" if sets > 1 else "larger than L2" if shape.tensor_bytes > l2 else "warm",
        "contenders": {},
    }
    prepares: dict[str, Any] = {}
    if library is not None and "ours" in args.contenders:
        prepares |= contenders.ours(library, args.backend, shape, args.kernels)
        if args.before_library is not None:
            prepares["ours:before"] = contenders.ours(args.before_library, args.backend, shape, [])["ours"]
        if args.stored_otherwise:
            prepares |= contenders.ours_stored_otherwise(library, shape)
    prepares |= contenders.peers(args.contenders, args.fa3_library)
    entrants: list[Entrant] = []
    before = gpu.reading()
    with torch.cuda.stream(stream), in_context(shape):
        inputs = [contenders.Inputs(shape, seed + 1) for seed in range(sets)]
        expected = verify.slices(inputs[0])
        for name, prepare in prepares.items():
            entry: dict[str, Any] = {}
            row["contenders"][name] = entry
            try:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    entrant = Entrant(name, prepare, inputs, stream)
                first = entrant.calls[0]
                first.poison()
                entrant.turn()
                stream.synchronize()
                found = verify.errors(expected, first.outputs())
                wrong = verify.wrong(shape, found, first.outputs())
                entry["backend"], entry["error"] = first.backend, found
                if not wrong and shape.deterministic and not name.endswith("fast"):
                    wrong = repeats(entrant, stream)
            except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
                wrong = reason_of(error, warned)
            if wrong:
                entry["failed"] = wrong
            else:
                entrants.append(entrant)
        del expected
        for number in range(-1, args.rounds):  # the first round warms up
            at = number % max(len(entrants), 1)
            events = []
            for entrant in entrants[at:] + entrants[:at]:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                entrant.turn()
                end.record()
                events.append((entrant, begin, end))
            if number == args.rounds // 2:
                row["during"] = gpu.reading()
            for entrant, begin, end in events:
                end.synchronize()
                if number >= 0:
                    entrant.milliseconds.append(begin.elapsed_time(end) / entrant.launches)
    row["before"], row["after"] = before, gpu.reading()
    for entrant in entrants:
        entry = row["contenders"][entrant.name]
        entry |= tables.summary(entrant.milliseconds, shape.flops, shape.tensor_bytes)
        entry |= {"launches": entrant.launches, "timer": "graph" if entrant.graph is not None else "events"}
        if entrant.why_events:
            entry["no_graph"] = entrant.why_events
    return row


def once(shape: Shape, args: argparse.Namespace, library: Library | None) -> None:
    """One run between cudaProfilerStart and -Stop, for Nsight Compute; an earlier run triggers lazy loading."""
    import contenders
    import torch

    prepares = contenders.peers(args.contenders, args.fa3_library)
    if library is not None and "ours" in args.contenders:
        prepares = contenders.ours(library, args.backend, shape, args.kernels) | prepares
    with in_context(shape):
        inputs = contenders.Inputs(shape, 1)
        for name, prepare in prepares.items():
            try:
                call = prepare(inputs)
                call.run()
            except RuntimeError as error:
                print(f"{shape.name}, {name}: left out: {reason_of(error)}", flush=True)
                continue
            torch.cuda.synchronize()
            print(f"profile: {shape.name}, {name} ({call.backend})", flush=True)
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)  # the marker that ncu.py looks for
            call.run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


# ---- the run


def line_of(row: dict[str, Any]) -> str:
    text = f"{row['name']:42}"
    for name, entry in row["contenders"].items():
        if "ms" in entry:
            text += f"  {name} {entry['ms']:.4f} ms {entry['tflops']:.0f} TF ±{entry['spread'] / 2:.1%}"
            text += " (events)" if entry["timer"] == "events" else ""
        else:
            text += f"  {name} -"
    found = [
        best for name in row["contenders"] if tables.is_ours(name) and (best := tables.best_ratio(row, name))
    ]
    if found:
        text += f"  x{found[0]:.2f} ({tables.best_peer(row)})"
    during = row.get("during", {})
    return text + f"  {during.get('sm_mhz', '?')} MHz {during.get('power_w', '?')} W"


def about_software(library: Library | None) -> dict[str, Any]:
    import torch

    versions: dict[str, Any] = {
        "fovea": library.version if library is not None else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.release()}",
    }
    from importlib import metadata

    for package in ("flash-attn-3", "flash_attn_3", "flash-attn-4"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package.replace("_", "-")] = metadata.version(package)
    return versions


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def words(allowed: Iterable[str]) -> Any:
    allowed = tuple(allowed)

    def parse_words(text: str) -> list[str]:
        parts = text.split(",")
        for part in parts:
            if part not in allowed:
                raise argparse.ArgumentTypeError(f"got '{part}', expected one of {', '.join(allowed)}")
        return parts

    return parse_words


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_argument_group("which rows")
    which.add_argument("--rows", choices=("grid", "special", "wide", "terms", "decode", "latent", "fp8", "all"), default="grid")
    which.add_argument("--pass", dest="passes", type=words(PASSES), default=["fwd", "bwd"], metavar="PASS,...",
                       help="fwd, fwd_lse, bwd, bwd_det (fwd,bwd)")  # fmt: skip
    which.add_argument("--dtype", type=words(DTYPES), default=["bf16"], metavar="TYPE,...", help="of the grid, and of the rows of wide, terms, decode and latent (bf16)")
    which.add_argument("--d", type=numbers, default=GRID_HEAD_DIMS, metavar="N,...", help="head sizes of the grid")
    which.add_argument("--s", type=numbers, default=GRID_LENGTHS, metavar="N,...", help="lengths of the grid")
    which.add_argument("--causal", choices=("yes", "no", "both"), default="both", help="of the grid")
    which.add_argument("--shape", action="append", default=[], metavar="WORDS",
                       help="this shape, as in bf16,bwd,b4,s4096,h32,hkv8,d128,causal,w1023,softcap30; again for more")  # fmt: skip
    which.add_argument("--name", default="", metavar="TEXT", help="only rows whose name contains TEXT (or TEXT,TEXT)")
    which.add_argument("--list", action="store_true", help="print the rows and stop; needs no GPU")
    how = parser.add_argument_group("how")
    how.add_argument("--contenders", type=words(CONTENDERS), default=list(CONTENDERS),
                     metavar="NAME,...", help=f"{','.join(CONTENDERS)} (all that are installed)")  # fmt: skip
    how.add_argument("--backend", default="", metavar="NAME,...",
                     help="backends of ours, each a contender of its own (the library's choice)")  # fmt: skip
    how.add_argument("--kernels", default="", metavar="PATTERN,...",
                     help="kernels of ours, each pattern of their names (FOVEA_KERNEL) a contender of its own")  # fmt: skip
    how.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each contender that count ({ROUNDS})")
    how.add_argument("--quick", action="store_true", help="three rounds, lengths 1024 and 8192 of the grid")
    how.add_argument("--flush-l2", action="store_true", help="several sets of inputs in turn: none is in the L2 cache")
    how.add_argument("--once", action="store_true", help="run each row once between profiler marks, time nothing")
    how.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so")
    how.add_argument("--fa3-library", type=Path, metavar="PATH", help="FlashAttention-3's forward: _vllm_fa3_C.abi3.so of the wheel of vllm 0.33")
    how.add_argument("--before", type=Path, metavar="PATH", help="another libfovea.so, timed in turn as ours:before")
    how.add_argument("--stored-otherwise", action="store_true",
                     help="beside pages the same row in one piece, beside keys of 8 bits 16 of them, in turn: ours:one_piece, ours:lengths, ours:16_bits")  # fmt: skip
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="PATH", help="write the results; 'auto' names a file in bench/results")
    out.add_argument("--what", default=None, help="last part of that name (grid, special, wide, terms, decode, latent, all, shapes)")
    out.add_argument("--merge", action="store_true", help="keep the other rows of an existing file")
    out.add_argument("--sources-hash", metavar="HEX", help="where the sources are not at hand; see --print-hash")
    out.add_argument("--print-hash", action="store_true", help="print the hash of the kernels' sources, and stop")
    out.add_argument("--tables", type=Path, metavar="FILE", help="print the tables of stored results, and stop")
    args = parser.parse_args(arguments)
    args.backend = args.backend.split(",")
    args.kernels = [pattern for pattern in args.kernels.split(",") if pattern]
    if args.quick:
        args.rounds = 3
        args.s = tuple(s for s in args.s if s in (1024, 8192)) or args.s
    if args.rounds < 1:
        parser.error(f"--rounds: got {args.rounds}, expected at least 1")
    return args


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    if args.shape:
        shapes = [parse(text) for text in args.shape]
    else:
        causal = {"yes": (True,), "no": (False,), "both": (False, True)}[args.causal]
        groups = {
            "grid": lambda: grid(args.passes, args.dtype, args.d, causal, args.s),
            "special": lambda: special(args.passes),
            "wide": lambda: wide(args.passes, args.dtype),
            "terms": lambda: terms(args.passes, args.dtype),
            "decode": lambda: decode(args.dtype) if "fwd" in args.passes else [],
            "latent": lambda: latent(args.passes, args.dtype),
            "fp8": lambda: fp8(args.passes, args.dtype),
        }
        shapes = [shape for name, rows in groups.items() if args.rows in (name, "all") for shape in rows()]
    return [shape for shape in shapes if any(text in shape.name for text in args.name.split(","))]


def write_results(results: dict[str, Any], target: Path, *, merge: bool, whole: bool) -> Path:
    """Writes to `target`, with the other rows that it has where `merge`; returns where. A run that was stopped writes a file
    `.partial` beside it, so that an existing one stays whole. ValueError: an existing file is of another run."""
    if merge and target.exists():
        results = tables.merged(json.loads(target.read_text()), results)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text(tables.dump(results))
    if not whole:
        return partial
    os.replace(partial, target)
    return target


def main() -> int:
    args = parse_arguments()
    if args.print_hash:
        print(sources_hash(ROOT, SOURCES))
        return 0
    if args.tables:
        print("\n".join(tables.ratio_tables(json.loads(args.tables.read_text()))))
        return 0
    try:
        shapes = shapes_of(args)
    except ValueError as error:
        sys.exit(f"compare.py: {error}")
    if args.list:
        for shape in shapes:
            print(f"{shape.name:44} {shape.flops * 1e-9:12.1f} GFLOP {shape.tensor_bytes / 1e6:10.1f} MB")
        return 0
    if not shapes:
        sys.exit("compare.py: no row is left; --list shows what the options choose")
    try:
        import torch
    except ImportError:
        sys.exit("compare.py: PyTorch is not installed; `fovea bench --device cuda` times ours alone without it")
    if not torch.cuda.is_available():
        sys.exit("compare.py: PyTorch sees no GPU; nvidia-smi tells whether the driver does, --list and --tables need none")
    from fovea_ctypes import Library

    path = find_library(args.lib) if "ours" in args.contenders else None
    if path is None and "ours" in args.contenders:
        print("no libfovea.so: the others alone; build the target fovea, or give --lib", flush=True)
    library = Library(path) if path is not None else None
    args.before_library = Library(find_library(args.before)) if args.before is not None else None
    if args.once:
        for shape in shapes:
            once(shape, args, library)
        return 0

    properties = torch.cuda.get_device_properties(0)
    gpu = Gpu(0, str(properties.uuid) if hasattr(properties, "uuid") else None)
    # nvidia-smi's name comes first: PyTorch's is that of the CUDA runtime.
    about = {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "compute_capability": f"{properties.major}.{properties.minor}",
        **gpu.about(),
    }
    stored = tables.STORED_BEST
    results: dict[str, Any] = {
        "gpu": about,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "software": about_software(library),
        "sources_sha256": args.sources_hash or sources_hash(ROOT, SOURCES),
        "protocol": {
            "rounds": args.rounds,
            "turn": f"one replay of a CUDA graph of {TURN_SECONDS * 1e3:g} ms of launches, at most {MOST_LAUNCHES}",
            "order": "contenders take turns, a different one first in each round",
            "l2": "cold: inputs rotate" if args.flush_l2 else "natural: launches follow each other on the same inputs",
            "inputs": "normal random",
            "ratio": "median milliseconds of theirs over ours",
            "spread": "distance of the quartiles over the median",
            "flops": "2 (d + d_v) forward, 6 d + 4 d_v backward, a query head and pair; half of all pairs when causal",
        },
        "stored_best_over_cudnn": stored.is_file() and json.loads(stored.read_text())["gpu"] == properties.name,
        "rows": [],
    }
    limit = about.get("power_limit_w", "?")
    print(f"{about['name']}, power limit {limit} W, driver {about.get('driver', '?')}; torch {torch.__version__}, CUDA "
          f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; fovea {library.version if library else '-'}; "
          f"{len(shapes)} rows, {args.rounds} rounds", flush=True)  # fmt: skip
    stopped = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is measured is kept
    for shape in shapes:
        try:
            row = measure(shape, args, library, gpu)
        except KeyboardInterrupt:
            stopped = True
            print(f"stopped in {shape.name}, row {len(results['rows']) + 1} of {len(shapes)}", flush=True)
            break
        except torch.cuda.OutOfMemoryError as error:
            print(f"{shape.name:42}  left out: {reason_of(error)}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        results["rows"].append(row)
        print(line_of(row), flush=True)
    print()
    print("\n".join(tables.ratio_tables(results)))
    left_out = tables.failures(results)
    if left_out:
        print("\nLeft out:\n" + "\n".join("  " + line for line in left_out))
    if args.json:
        what = args.what or ("shapes" if args.shape else args.rows)
        name = re.sub(r"[^a-z0-9]+", "_", str(about["name"]).lower()).strip("_")
        target = ROOT / "bench" / "results" / f"{name}_{what}.json" if args.json == "auto" else Path(args.json)
        try:
            print(f"\nwrote {write_results(results, target, merge=args.merge, whole=not stopped)}")
        except ValueError as error:
            sys.exit(f"compare.py: {error}")
    if stopped:
        return 130
    ours_wrong = any(
        "failed" in entry
        for row in results["rows"]
        for name, entry in row["contenders"].items()
        if tables.is_ours(name)
    )
    return 1 if ours_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
