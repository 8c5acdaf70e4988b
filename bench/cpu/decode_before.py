"""Two builds of the library over the same key-value caches: what a change of decoding brings.

    python3 bench/cpu/decode_before.py OLD/libfovea.so                     every row of decode.py: time over that of the old build
    python3 bench/cpu/decode_before.py OLD/libfovea.so --rows bfloat16_bshd --groups 4,16 --from-memory

Calls of the two alternate one by one in one process, who begins in turn, each over the cache that was read longest ago, so that whatever else
the machine does meets both: two copies of one build are within 2 % of each other, where whole runs of a benchmark differ by 20. Results of
both are compared before they are timed. Needs NumPy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compare import find
from decode import HEAD_DIM, HEADS_KV, KEYS, Row, add_row_arguments, chosen_rows
from fovea_ctypes import FORWARD, Library, Plan, View

Numbers = np.ndarray[Any, Any]

PAGE_BYTES = 4096
LEAST_TURNS = 20
# Of the largest value: what results of two builds may differ by, as each may round once more than the other.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


def elements_of(values: Numbers, dtype: str) -> Numbers:
    """Float32 numbers as the bytes of `dtype`; those of 8 bits are taken as their upper bits, which are finite."""
    if dtype == "float8_e4m3fn":
        return (values.astype(np.float16).view(np.uint16) >> 8).astype(np.uint8)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def numbers_of(elements: Numbers, dtype: str) -> Numbers:
    if dtype == "bfloat16":
        return (elements.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return elements.view(dtype).astype(np.float32)


class Caches:
    """The caches of a row in one piece of memory: random numbers, each cache those of the first moved on by some rows."""

    def __init__(self, row: Row, count: int) -> None:
        generator = np.random.default_rng(1)
        self.dtype = row.dtype if row.cache == "q" else row.cache
        self.size = row.cache_bytes // 2
        memory = np.empty(2 * count * self.size + PAGE_BYTES, np.uint8)
        self.memory = memory[-memory.ctypes.data % PAGE_BYTES :]
        first = elements_of(generator.standard_normal(KEYS * HEADS_KV * HEAD_DIM, dtype=np.float32), self.dtype)
        for i in range(2 * count):
            self.memory[i * self.size : (i + 1) * self.size] = np.roll(first, i * PAGE_BYTES)
        self.pages = generator.permutation(KEYS // row.page).astype(np.int32) if row.page else None
        self.used = np.array([KEYS], np.int32)
        self.row = row
        self.count = count

    def tensors(self, i: int) -> dict[str, View]:
        """K and V of cache i."""
        row_elements = HEADS_KV * HEAD_DIM
        shape: tuple[int, ...] = (1, KEYS, HEADS_KV, HEAD_DIM)
        strides: tuple[int, ...] = (KEYS * row_elements, row_elements, HEAD_DIM, 1)
        if self.row.layout == "bhsd":
            strides = (KEYS * row_elements, HEAD_DIM, KEYS * HEAD_DIM, 1)
        tensors = {}
        if self.pages is not None:
            shape, strides = (KEYS // self.row.page, self.row.page, HEADS_KV, HEAD_DIM), (self.row.page * row_elements, *strides[1:])
            tensors["page_table"] = View(self.pages.ctypes.data, "int32", (1, len(self.pages)), (len(self.pages), 1))
            tensors["seqused_k"] = View(self.used.ctypes.data, "int32", (1,), (1,))
        key = self.memory.ctypes.data + 2 * i * self.size
        return tensors | {name: View(key + x * self.size, self.dtype, shape, strides) for x, name in enumerate("kv")}


class Side:
    """A build with a plan for each cache."""

    def __init__(self, library: Library, caches: Caches, args: argparse.Namespace) -> None:
        self.dtype = caches.row.dtype
        heads = HEADS_KV * caches.row.group
        self.q = elements_of(np.random.default_rng(2).standard_normal(heads * HEAD_DIM, dtype=np.float32), self.dtype)
        self.o = np.zeros_like(self.q)
        shape, strides = (1, 1, heads, HEAD_DIM), (heads * HEAD_DIM, heads * HEAD_DIM, HEAD_DIM, 1)
        own = {name: View(x.ctypes.data, self.dtype, shape, strides) for name, x in (("q", self.q), ("o", self.o))}
        options = {"num_threads": args.threads, "backend": args.backend}
        self.plans: list[Plan] = [library.plan(FORWARD, own | caches.tensors(i), **options) for i in range(caches.count)]
        self.seconds: list[float] = []

    def result(self) -> Numbers:
        self.plans[0].run()
        return numbers_of(self.o, self.dtype)

    def run(self, cache: int) -> None:
        start = time.perf_counter()
        self.plans[cache].run()
        self.seconds.append(time.perf_counter() - start)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def compare_builds(row: Row, sides: tuple[Side, Side], caches: int, seconds: float) -> None:
    """Calls of both for so many seconds. Two calls of each are four turns: who begins alternates, and each turn has the next cache."""
    before, now = (side.result() for side in sides)
    difference = float(np.abs(before - now).max() / np.abs(before).max())
    if not difference <= TOLERANCE[row.dtype]:
        sys.exit(f"decode_before.py: {row.name}: the builds differ by {difference:.1e} of the largest value")
    end, turn = time.perf_counter() + seconds, 0
    while turn % 4 != 0 or turn < LEAST_TURNS or time.perf_counter() < end:
        sides[(0, 1, 1, 0)[turn % 4]].run(turn % caches)
        turn += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, metavar="OLD", help="libfovea.so of the build before")
    parser.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so of the build now")
    parser.add_argument("--min-time", type=float, default=2, metavar="S", help="seconds a row, both builds (2)")
    add_row_arguments(parser)
    return parser.parse_args()


def main() -> int:
    args = parse_arguments()
    now = find("libfovea.so", args.lib)
    if now is None:
        sys.exit("decode_before.py: no libfovea.so here; build the target fovea, or give --lib")
    libraries = Library(find("libfovea.so", args.before)), Library(now)
    print(f"{'row':52} {'before ms':>10} {'ms':>10} {'time of before':>15} {'calls':>6}")
    ratios = []
    for row in chosen_rows(args):
        caches = Caches(row, row.caches(args))
        before, now_side = sides = tuple(Side(library, caches, args) for library in libraries)
        compare_builds(row, sides, caches.count, args.min_time)
        ratios.append(now_side.median / before.median)
        print(f"{row.name:52} {1e3 * before.median:10.3f} {1e3 * now_side.median:10.3f} {ratios[-1]:15.3f} {len(before.seconds):6}",
              flush=True)  # fmt: skip
    if not ratios:
        sys.exit(f"decode_before.py: --rows {args.rows}: no row is named so; decode.py lists them")
    print(f"time of before: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}, largest {max(ratios):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
