#!/usr/bin/env python3
"""Lists of keys on a GPU: forward and backward of random top-k lists, in turns, by CUDA events.

    python3 bench/gpu/lists.py [--lib LIB] [--before LIB] [--rounds 7] [--json PATH]

Each row says the time of the forward, of the backward, of the backward with `deterministic`, and of these with --before of an
earlier build; rates count 4 (10 in the backward) times heads, queries, entries and the head size. The deterministic backward has
to give the same bits twice, and gradients that differ from the other's by rounding alone."""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]
from device import Gpu
from fovea_ctypes import BACKWARD, CUDA, FORWARD, Library, Plan, View
from sources import sources_hash

# heads of queries, heads of keys, queries, keys, entries, head size
SHAPES = (
    (16, 16, 4096, 4096, 2048, 128),
    (16, 1, 4096, 4096, 2048, 128),
    (16, 4, 4096, 16384, 2048, 128),
    (16, 1, 4096, 65536, 2048, 128),
    (16, 16, 4096, 4096, 256, 128),
    (32, 8, 8192, 8192, 512, 64),
    (64, 1, 1024, 16384, 2048, 576),
)
TURN_SECONDS = 0.02


def view(t: Any) -> View:
    return View(t.data_ptr(), str(t.dtype).removeprefix("torch."), tuple(t.shape), tuple(t.stride()))


def tensors_of(shape: tuple[int, ...]) -> dict[str, Any]:
    heads, heads_kv, queries, keys, entries, d = shape
    d_v = 512 if d == 576 else d
    g = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int) -> Any:
        return torch.randn(size, generator=g, device="cuda").to(torch.bfloat16)

    t = {"q": normal(1, queries, heads, d), "k": normal(1, keys, heads_kv, d), "v": normal(1, keys, heads_kv, d_v)}
    t |= {"o": torch.empty_like(t["q"][..., :d_v]).contiguous(), "d_o": normal(1, queries, heads, d_v)}
    t["lse"] = torch.empty((1, heads, queries), device="cuda")
    t |= {f"d{name}": torch.empty_like(t[name]) for name in "qkv"}
    lists = [
        torch.rand((min(512, queries), keys), generator=g, device="cuda").topk(entries, sorted=False).indices.int()
        for _ in range(heads_kv * queries // min(512, queries))
    ]
    t["keys"] = torch.cat(lists).reshape(1, heads_kv, queries, entries)
    return t


class Entrant:
    def __init__(self, library: Library, t: dict[str, Any], pass_: int, deterministic: bool) -> None:
        self.memory: Any = None
        names = ("q", "k", "v", "keys", "o", "lse") + (("d_o", "dq", "dk", "dv") if pass_ == BACKWARD else ())

        def allocate(size: int) -> int:
            self.memory = torch.empty(size + 256, dtype=torch.uint8, device="cuda")
            return -(-self.memory.data_ptr() // 256) * 256

        self.plan: Plan = library.plan(
            pass_, {n: view(t[n]) for n in names}, deterministic=deterministic, device=(CUDA, 0), allocate=allocate
        )
        self.plan.run(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        self.times: list[float] = []
        self.launches = 1
        self.turn()
        self.launches = max(1, round(TURN_SECONDS / self.times[0]))
        self.times = []

    def turn(self) -> None:
        stream = torch.cuda.current_stream()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        for _ in range(self.launches):
            self.plan.run(stream.cuda_stream)
        end.record(stream)
        end.synchronize()
        self.times.append(begin.elapsed_time(end) / 1e3 / self.launches)


def gradients(entrant: Entrant, t: dict[str, Any]) -> list[Any]:
    entrant.plan.run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return [t[n].clone() for n in ("dq", "dk", "dv")]


def measure(libraries: dict[str, Library], shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    t = tensors_of(shape)
    entrants: dict[str, Entrant] = {}
    for name, library in libraries.items():
        entrants[f"{name}fwd"] = Entrant(library, t, FORWARD, False)
        for key, deterministic in (("bwd", False), ("bwd same bits", True)):
            try:
                entrants[name + key] = Entrant(library, t, BACKWARD, deterministic)
            except (RuntimeError, ValueError) as error:
                print(f"  {name}{key}: {error}")
    if "bwd same bits" in entrants:
        plain = gradients(entrants["bwd"], t)
        same = [gradients(entrants["bwd same bits"], t) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*same)), "not the same bits"
        for a, b in zip(plain, same[0]):
            difference = (a.float() - b.float()).norm() / a.float().norm()
            assert difference < 4e-3, f"gradients differ by {difference:.2e}"
    for _ in range(rounds):
        for entrant in entrants.values():
            entrant.turn()
    heads, _, queries, _, entries, d = shape
    row: dict[str, Any] = {"shape": shape}
    for name, entrant in entrants.items():
        seconds = statistics.median(entrant.times)
        flops = (4 if name.endswith("fwd") else 10) * heads * queries * entries * d
        row[name] = {"ms": seconds * 1e3, "tflops": flops / seconds / 1e12, "workspace_mb": entrant.plan.workspace_size / 1e6}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", type=Path, default=Path("build/release/lib/libfovea.so"))
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", type=str, default="", help="numbers of rows, as in 0,2; all when left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    libraries = {"": Library(args.lib)}
    if args.before:
        libraries["before "] = Library(args.before)
    shapes = [SHAPES[int(n)] for n in args.shapes.split(",")] if args.shapes else SHAPES
    rows = []
    for shape in shapes:
        rows.append(measure(libraries, shape, args.rounds))
        texts = [f"{k} {v['ms']:.3f} ms {v['tflops']:.1f} ({v['workspace_mb']:.0f} MB)" for k, v in rows[-1].items() if k != "shape"]
        print(f"{shape}: " + ", ".join(texts), flush=True)
    if args.json:
        report = {
            "date": datetime.date.today().isoformat(),
            "gpu": Gpu(0).about(),
            "pytorch": torch.__version__,
            "kernels": sources_hash(ROOT, ["core", "tile", "cuda"]),
            "rounds": args.rounds,
            "rows": rows,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
