#!/usr/bin/env python3
"""One sequence over several GPUs of this machine: Fovea over NCCL beside PyTorch's context parallelism, and both beside one GPU.

    python bench/gpu/ranks.py [--lib FILE] [--ranks 2] [--threads] [--tokens 8192,16384,65536,131072] [--json FILE]

Each rank is a process with a GPU, or a thread of one process (then without PyTorch's). A row is a problem (bfloat16, causal, heads of 128): the time of a forward, and of a forward and
a backward, of the slowest rank, as the share of one GPU's rate that each GPU keeps: time of one GPU / (ranks * time). Results
are compared with those of one GPU before anything is timed. Contenders take turns; a turn is as many calls as fill a
tenth of a second, between two barriers, behind a quarter of them untimed: a GPU that has waited for others begins at low clocks.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]
import fovea_ctypes
import fovea_ranks
from device import Gpu
from fovea_ctypes import BACKWARD, CUDA, FORWARD, View
from sources import sources_hash


@dataclasses.dataclass(frozen=True)
class Method:
    heads_ranks: int = 0
    stages: int = 0
    sm_margin: int = 0
    messages: bool = False
    text: str = "fovea"

    @classmethod
    def of(cls, text: str) -> Method:
        found = re.fullmatch(r"(\d+)x(\d+)(m?)@?(\d+)?", text)
        if found is None:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected heads_ranks x stages, as 2x4")
        return cls(int(found[1]), int(found[2]), int(found[4] or 0), bool(found[3]), text)


AnyTransport = fovea_ranks.Transport | fovea_ranks.ThreadTransport
TOLERANCE, TURN_SECONDS, HEAD_DIM = 0.01, 0.1, 128


class Processes:
    """What ranks say to each other beside their messages: ranks that are processes."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def most(self, number: float) -> float:
        """The largest of all ranks' numbers."""
        numbers = torch.tensor(number, device="cuda", dtype=torch.float64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return numbers.item()


class Threads:
    """The same of ranks that are threads."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, numbers: list[float]) -> None:
        self.rank, self.size, self._meeting, self._numbers = rank, size, meeting, numbers

    def barrier(self) -> None:
        self._meeting.wait()

    def most(self, number: float) -> float:
        self._numbers[self.rank] = number
        self.barrier()
        most = max(self._numbers)
        self.barrier()  # the list may be written again
        return most


def view(x: torch.Tensor, dtype: str = "bfloat16") -> View:
    return View(x.data_ptr(), dtype, tuple(x.shape), tuple(x.stride()))


class Problem:
    """Whole tensors, the same on all ranks by the seed, and this rank's rows."""

    def __init__(
        self, tokens: int, heads: int, heads_kv: int, starts: list[int], rank: int, ranks: int, device: str, zigzag: bool = False
    ) -> None:
        self.tokens, self.starts, self.rank, self.ranks, self.device = tokens, starts, rank, ranks, device
        generator = torch.Generator(device).manual_seed(7)

        def rows(count: int) -> torch.Tensor:
            shape = (tokens, count, HEAD_DIM) if starts else (1, tokens, count, HEAD_DIM)
            return torch.randn(shape, device=device, generator=generator).bfloat16()

        self.whole = {"q": rows(heads), "k": rows(heads_kv), "v": rows(heads_kv), "d_o": rows(heads)}
        # Under a causal mask early and late rows together are the same work for all.
        owners = [*range(ranks), *reversed(range(ranks))] if zigzag else range(ranks)
        count = len(owners)
        self.pieces = [(r, tokens * i // count, tokens * (i + 1) // count) for i, r in enumerate(owners)]
        self.own = {name: self.own_rows(x) for name, x in self.whole.items()}
        for tensors in (self.whole, self.own):
            tensors["o"] = torch.empty_like(tensors["q"])
            lse = (heads, tensors["q"].shape[0]) if starts else (1, heads, tensors["q"].shape[1])
            tensors["lse"] = torch.empty(lse, device=device)
            for gradient, of in (("dq", "q"), ("dk", "k"), ("dv", "v")):
                tensors[gradient] = torch.empty_like(tensors[of])

    def own_rows(self, x: torch.Tensor) -> torch.Tensor:
        axis = 0 if self.starts else 1
        return torch.cat([x.narrow(axis, begin, end - begin) for r, begin, end in self.pieces if r == self.rank], axis)

    def views(self, tensors: dict[str, torch.Tensor], pass_: int) -> dict[str, View]:
        names = ["q", "k", "v", "o", "lse"] + (["d_o", "dq", "dk", "dv"] if pass_ == BACKWARD else [])
        return {name: view(tensors[name], "float32" if name == "lse" else "bfloat16") for name in names}

    def allocate(self, size: int) -> int:
        self.kept = getattr(self, "kept", [])
        self.kept.append(torch.empty(size + 256, dtype=torch.uint8, device=self.device))
        return -(-self.kept[-1].data_ptr() // 256) * 256


def both(forward: Callable[[], None], backward: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        forward()
        backward()

    return run


def one_gpu(library: fovea_ctypes.Library, p: Problem) -> tuple[Callable[[], None], Callable[[], None]]:
    device = torch.cuda.current_device()
    starts = torch.tensor(p.starts, dtype=torch.int32, device=p.device) if p.starts else None
    runs = []
    for pass_ in (FORWARD, BACKWARD):
        views = p.views(p.whole, pass_)
        longest = 0
        if starts is not None:
            views["cu_seqlens_q"] = views["cu_seqlens_k"] = view(starts, "int32")
            longest = max(b - a for a, b in zip(p.starts, p.starts[1:], strict=False))
        plan = library.plan(pass_, views, causal=True, max_seqlen=longest, device=(CUDA, device), allocate=p.allocate)
        runs.append(lambda plan=plan, starts=starts: plan.run(torch.cuda.current_stream().cuda_stream))
    return runs[0], both(*runs)


def our_ranks(
    library: fovea_ctypes.Library, transport: AnyTransport, p: Problem, method: Method
) -> tuple[Callable[[], None], Callable[[], None], str]:
    plans = [
        fovea_ranks.DistributedPlan(
            library, transport, pass_, p.views(p.own, pass_), p.pieces, p.allocate,
            device=torch.cuda.current_device(), causal=True, starts=p.starts, heads_ranks=method.heads_ranks,
            stages=method.stages, sm_margin=method.sm_margin, peer_copies=not method.messages,
        )
        for pass_ in (FORWARD, BACKWARD)
    ]  # fmt: skip
    runs = [lambda plan=plan: plan.run(torch.cuda.current_stream().cuda_stream) for plan in plans]
    return runs[0], both(*runs), plans[0].reason.split(":")[1].strip()


def check(library: fovea_ctypes.Library, transport: AnyTransport, p: Problem, run: Callable[[], None]) -> float:
    """The largest distance of a tensor of the ranks from that of one GPU, as a share of its norm."""
    for name in ("o", "dq", "dk", "dv"):
        p.own[name].fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    transport.check(library)
    worst = 0.0
    for name in ("o", "dq", "dk", "dv"):
        want = p.own_rows(p.whole[name]).float()
        error = ((p.own[name].float() - want).norm() / want.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def pytorch_ranks(p: Problem) -> tuple[Callable[[], None], Callable[[], None]]:
    """Context parallelism over cuDNN: heads before rows, the rows of each rank by zigzag."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (p.ranks,))
    q, k, v = (p.whole[name].transpose(1, 2).contiguous() for name in ("q", "k", "v"))
    d_o = p.own["d_o"].transpose(1, 2).contiguous()
    stack = contextlib.ExitStack()
    stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    with torch.no_grad():
        stack.enter_context(context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2], no_restore_buffers={q, k, v}))

    for x in (q, k, v):
        x.requires_grad_()  # now that each is this rank's rows

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_only() -> None:
        with torch.no_grad():
            forward()

    def step() -> None:
        torch.autograd.grad(forward(), (q, k, v), d_o)

    p.stack = stack
    return forward_only, step


def times_in_turns(crew: Processes | Threads, runs: dict[str, Callable[[], None]], rounds: int, alone: set[str]) -> dict[str, float]:
    """Median milliseconds of a call, those of the slowest rank. `alone`: what rank 0 runs while others wait."""
    calls: dict[str, int] = {}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            count = calls.get(name, 3)
            takes_part = name not in alone or crew.rank == 0
            for _ in range(count // 4 if takes_part else 0):
                run()
            torch.cuda.synchronize()
            crew.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count if takes_part else 0):
                run()
            torch.cuda.synchronize()
            slowest = crew.most((time.perf_counter() - begin) / count)
            if turn == 0:
                calls[name] = max(3, min(200, round(TURN_SECONDS / slowest)))
            else:
                times[name].append(slowest * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"name": f"{tokens} tokens", "tokens": tokens, "heads": 16, "heads_kv": 16, "starts": []} for tokens in options.tokens
    ]
    if options.more:
        made.append({"name": "65536 tokens, 32:8 heads", "tokens": 65536, "heads": 32, "heads_kv": 8, "starts": []})
        random_lengths, starts = random.Random(3), [0]
        while starts[-1] < 65536:
            starts.append(min(65536, starts[-1] + random_lengths.randint(100, 20_000)))
        made.append({"name": "packed, 65536 in sequences of 100 to 20000", "tokens": 65536, "heads": 16, "heads_kv": 16, "starts": starts})
    return made


def measure(
    options: argparse.Namespace, library: fovea_ctypes.Library, crew: Processes | Threads, transport: AnyTransport, row: dict[str, Any]
) -> dict[str, Any]:
    rank, ranks = crew.rank, crew.size
    p = Problem(row["tokens"], row["heads"], row["heads_kv"], row["starts"], rank, ranks, f"cuda:{rank}", options.zigzag)
    single = one_gpu(library, p)
    single[1]()
    forward, steps = {"one GPU": single[0]}, {"one GPU": single[1]}
    errors, method = {}, ""
    for chosen in [Method(), *options.methods]:
        name = chosen.text
        try:
            forward[name], steps[name], described = our_ranks(library, transport, p, chosen)
        except fovea_ctypes.FoveaError as failure:
            if not chosen.heads_ranks:
                raise
            errors[name] = str(failure)  # of all ranks alike: a method that this problem cannot have
            continue
        method = method or described
        error = errors[name] = crew.most(check(library, transport, p, steps[name]))
        if not error <= TOLERANCE:
            raise RuntimeError(f"{row['name']}, {name}: a tensor of the ranks is {error:.1e} of its norm away from one GPU's")
    missing = ""
    if not row["starts"] and row["heads"] == row["heads_kv"] and options.peers:
        try:
            theirs = pytorch_ranks(p)
            theirs[1]()
            forward["pytorch"], steps["pytorch"] = theirs
        except Exception as failure:  # noqa: BLE001  what a version of PyTorch lacks is said, not fatal
            missing = f"{type(failure).__name__}: {failure}"
    result = {"row": row["name"], "method": method, "errors": errors, "passes": {}}
    if missing:
        result["pytorch_missing"] = missing[:300]
    for name, runs in (("forward", forward), ("forward and backward", steps)):
        medians = times_in_turns(crew, runs, options.rounds, {"one GPU"})
        result["passes"][name] = {
            who: {"ms": round(ms, 4), "share": round(medians["one GPU"] / (ranks * ms), 4)} for who, ms in medians.items() if who != "one GPU"
        } | {"one GPU": {"ms": round(medians["one GPU"], 4)}}
    with contextlib.suppress(AttributeError):
        p.stack.close()
    return result


def join(options: argparse.Namespace, rank: int) -> tuple[fovea_ctypes.Library, fovea_ranks.Transport]:
    """The library, and the transport of a process of PyTorch's group."""
    nccl = fovea_ranks.Nccl()
    shared = [nccl.unique_id() if rank == 0 else b""]
    dist.broadcast_object_list(shared, 0)
    nccl.join(shared[0], rank, options.ranks)
    library = fovea_ctypes.Library(options.lib)
    return library, fovea_ranks.Transport(library, nccl, rank)


def process(rank: int, options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks, device_id=torch.device("cuda", rank))
    library, transport = join(options, rank)
    measure_all(options, library, Processes(), transport)
    transport.close()
    dist.destroy_process_group()


def threads(options: argparse.Namespace) -> None:
    library = fovea_ctypes.Library(options.lib)
    group = fovea_ranks.Threads(library, options.ranks)
    meeting, numbers = threading.Barrier(options.ranks), [0.0] * options.ranks
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            torch.cuda.set_device(rank)
            measure_all(options, library, Threads(rank, options.ranks, meeting, numbers), group.transport(rank))
        except BaseException as failure:  # noqa: BLE001  the main thread raises it
            failures.append(failure)
            meeting.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(options.ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if failures:
        raise failures[0]


def measure_all(options: argparse.Namespace, library: fovea_ctypes.Library, crew: Processes | Threads, transport: AnyTransport) -> None:
    results = []
    for row in rows(options):
        result = measure(options, library, crew, transport, row)
        results.append(result)
        torch.cuda.empty_cache()
        if crew.rank != 0:
            continue
        for name, contenders in result["passes"].items():
            text = ", ".join(f"{who} {c['ms']:.3f} ms" + (f" ({c['share']:.2f})" if "share" in c else "") for who, c in contenders.items())
            print(f"{result['row']}, {name}: {text}; {result['method']}", flush=True)
        if options.json:
            write(options, results)


def write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": [torch.cuda.get_device_name(i) for i in range(options.ranks)],
        "gpu": Gpu(0).about(),
        "pytorch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "kernels": sources_hash(ROOT, ["core", "tile", "cuda", "distributed"]),
        "type": "bfloat16",
        "head_dim": HEAD_DIM,
        "causal": True,
        "ranks": options.ranks,
        "rows_of_a_rank": "early and late ones (zigzag)" if options.zigzag else "those in a row",
        "transport": "threads" if options.threads else "NCCL",
        "rows": results,
    }
    options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Those of profiles, too (ranks_profile.py)."""
    parser.add_argument("--lib", type=Path, default=ROOT / "build/release/lib/libfovea.so")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--zigzag", action="store_true", help="each rank has early and late rows, instead of those in a row")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",") if n], default=[8192, 16384, 65536, 131072])
    parser.add_argument(
        "--methods",
        type=lambda text: [Method.of(method) for method in text.split(",") if method],
        default=[],
        help="further methods to time, as heads_ranks x stages, m for messages instead of copies, and @ the SMs that attention leaves "
        "free: 2x1,2x4m@8,1x2",
    )
    parser.add_argument("--port", type=int, default=29513)
    parser.add_argument("--json", type=Path, help="write the results here, with machine, date and a hash of the sources")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--threads", action="store_true", help="ranks are threads, and messages copies from GPU to GPU")
    parser.add_argument("--no-more", dest="more", action="store_false", help="leave out grouped heads and packed sequences")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave out PyTorch's context parallelism")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.ranks:
        sys.exit(f"ranks.py: --ranks: got {options.ranks}, but PyTorch sees {torch.cuda.device_count()} GPUs")
    if options.threads:
        options.peers = False
        threads(options)
    else:
        mp.spawn(process, (options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
