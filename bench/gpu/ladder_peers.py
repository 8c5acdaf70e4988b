"""Times of other libraries for the problems of the ladder: cuBLAS, PyTorch's softmax, FlashAttention-2, cuDNN; and of the
rung in Python (33), where numba-cuda is installed.

    python3 bench/gpu/ladder_peers.py --json peers.json          on a GPU, where PyTorch is installed
    python3 bench/gpu/ladder_peers.py --device cpu --json peers.json
    fovea ladder --peers peers.json                          the rungs beside them

Groups and shapes are those of `fovea ladder --list --json`. A peer solves the same problem as the rungs: its output is compared
with float64 on some rows before it is timed. GPUs: seven replays of a CUDA graph of 8 ms of launches (compare.py's clock);
CPUs: 2 runs that do not count and 11 that do. The median is written, with the distance of the quartiles over it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare
import tables
from ladder_groups import PROGRAM, list_groups

Tensor = Any
CPU_WARMUPS, CPU_RUNS = 2, 11
ROWS = 128  # of the outputs of a rung, as `fovea ladder` compares them
SAMPLED = 64  # rows of an output, or queries of a sequence, that are compared with float64
# In the ladder a head is an entry of the batch. Programs call peers with a batch and heads: with this many, where it divides.
HEADS = 16


@dataclass
class Peer:
    """A call, and the error of a part of its last output against float64."""

    name: str
    run: Callable[[], None]
    error: Callable[[], float]
    tolerance: float  # as a share of the largest value
    # Fields that the row of a rung in Python has and a peer's lacks; `error` fills them.
    rung: dict[str, Any] | None = None


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


def matmul_peers(shape: tuple[int, ...], device: str) -> list[Peer]:
    import torch

    m, n, k = shape
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)

    def peer(name: str, dtype: Any, precision: str, tolerance: float) -> Peer:
        x, y = a.to(dtype), b.to(dtype)
        c = torch.empty(m, n, dtype=dtype, device=device)

        def run() -> None:
            torch.set_float32_matmul_precision(precision)
            torch.matmul(x, y, out=c)

        return Peer(name, run, lambda: distance(c[:SAMPLED], a[:SAMPLED].double() @ b.double()), tolerance)

    return [
        peer("cuBLAS fp32", torch.float32, "highest", 1e-5),
        peer("cuBLAS tf32", torch.float32, "high", 2e-3),
        peer("cuBLAS bf16", torch.bfloat16, "highest", 1e-2),
    ]


def softmax_peers(shape: tuple[int, ...], device: str) -> list[Peer]:
    import torch

    x = torch.randn(shape, device=device)
    y = torch.empty_like(x)

    def run() -> None:
        torch.softmax(x, -1, out=y)

    return [Peer("PyTorch softmax", run, lambda: distance(y[:SAMPLED], x[:SAMPLED].double().softmax(-1)), 1e-5)]


def exact_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention over (n, d) matrices in float64. Causal: row i of q sees keys 0 to i."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape, dtype=bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def attention_peers(
    shape: tuple[int, ...],
    device: str,
    dtype: Any,
    backends: dict[str, Any],
    tolerance: float,
    *,
    backward: bool = False,
    causal: bool = False,
) -> list[Peer]:
    import torch
    from torch.nn.attention import sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    batch, length, size = shape
    heads = HEADS if batch % HEADS == 0 else 1
    q, k, v, d_o = (torch.randn(batch // heads, heads, length, size, device=device).to(dtype) for _ in range(4))

    def peer(name: str, backend: Any) -> Peer:
        inputs = tuple(t.detach().requires_grad_(backward) for t in (q, k, v))
        outputs: list[Tensor] = []

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(*inputs, is_causal=causal)

        kept = forward() if backward else None

        def run() -> None:
            if backward:
                outputs[:] = torch.autograd.grad(kept, inputs, d_o, retain_graph=True)
                return
            with torch.no_grad():
                outputs[:] = [forward()]

        def error() -> float:
            found = []
            for i, h in ((0, 0), (-1, -1)):  # the first and the last sequence
                exact = [t[i, h].double().detach().requires_grad_(backward) for t in (q, k, v)]
                if backward:
                    expected = torch.autograd.grad(exact_attention(*exact, causal=causal), exact, d_o[i, h].double())
                    found += [distance(got[i, h], e) for got, e in zip(outputs, expected, strict=True)]
                else:
                    sample = exact[0][:SAMPLED]
                    found.append(distance(outputs[0][i, h, :SAMPLED], exact_attention(sample, *exact[1:], causal=causal)))
            return max(found)

        return Peer(name, run, error, tolerance)

    return [peer(name, backend) for name, backend in backends.items()]


def numba_rung(shape: tuple[int, ...], device: str) -> list[Peer]:
    """Rung 33: timed like the peers, listed among the rungs."""
    import torch

    try:
        from numba import cuda
    except ImportError:
        raise RuntimeError("rung 33 needs numba-cuda: pip install numba-cuda") from None
    path = Path(__file__).resolve().parents[2] / "ladder/33_side_numba/kernel.py"
    spec = importlib.util.spec_from_file_location("side_numba", path)
    assert spec is not None and spec.loader is not None
    side_numba = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(side_numba)
    batch, n, d = shape
    q, k, v = (torch.randn(shape, device=device) for _ in range(3))
    o, lse = torch.full_like(q, torch.nan), torch.full((batch, n), torch.nan, device=device)
    torch.cuda.synchronize()
    arrays = [cuda.as_cuda_array(t, sync=False) for t in (q, k, v, o, lse)]
    found: dict[str, Any] = {}

    def run() -> None:
        try:
            side_numba.attend(*arrays, cuda.external_stream(torch.cuda.current_stream().cuda_stream))
        except Exception as error:  # those of numba and of CUDA's bindings have no class in common
            raise RuntimeError(f"numba: {error}") from error

    def error() -> float:
        if not (o.isfinite().all() and lse.isfinite().all()):
            return float("inf")
        largest, expected = {"o": 0.0, "lse": 0.0}, {"o": 0.0, "lse": 0.0}
        count = min(ROWS, batch * n)
        for row in (i * (batch * n - 1) // max(count - 1, 1) for i in range(count)):
            b, i = divmod(row, n)
            scores = k[b].double() @ q[b, i].double() * d**-0.5
            for name, got, exact in (("o", o[b, i], scores.softmax(0) @ v[b].double()), ("lse", lse[b, i], scores.logsumexp(0))):
                largest[name] = max(largest[name], float((got.double() - exact).abs().max()))
                expected[name] = max(expected[name], float(exact.abs().max()))
        errors = {name: {"largest": largest[name], "relative": largest[name] / expected[name]} for name in largest}
        found.update(rows_checked=count, errors=errors)
        return max(each["relative"] for each in errors.values())

    return [Peer("33_side_numba", run, error, 1e-5, found)]


def peers_of(group: str, shape: tuple[int, ...], device: str) -> list[Callable[[], list[Peer]]]:
    """The peers of a group. Each is prepared alone, so that a missing one stops no other."""
    import torch
    from torch.nn.attention import SDPBackend as Backend

    def attention(name: str, backend: Any, dtype: Any, tolerance: float, **options: bool) -> Any:
        return lambda: attention_peers(shape, device, dtype, {name: backend}, tolerance, **options)

    if group == "cpu":
        return [attention("PyTorch", Backend.FLASH_ATTENTION, torch.float32, 1e-5)]
    if group == "matmul":
        return [lambda: matmul_peers(shape, device)]
    if group == "softmax":
        return [lambda: softmax_peers(shape, device)]
    if group == "attention":
        return [attention("PyTorch efficient", Backend.EFFICIENT_ATTENTION, torch.float32, 2e-3),
                lambda: numba_rung(shape, device)]  # fmt: skip
    both = {"FlashAttention-2": Backend.FLASH_ATTENTION, "cuDNN": Backend.CUDNN_ATTENTION}
    if group in ("tensor", "hopper", "causal", "backward"):
        options = {"backward": group == "backward", "causal": group == "causal"}
        return [attention(name, backend, torch.bfloat16, 2e-2, **options) for name, backend in both.items()]
    return []


def time_on_gpu(run: Callable[[], None], stream: Any) -> tuple[list[float], str]:
    """Seconds per launch in each round, and the clock that measured them; see compare.py."""
    import torch

    class Call:
        def __init__(self) -> None:
            self.run = run

    entrant = gpu.Entrant("peer", lambda _: Call(), [None], stream)  # type: ignore[list-item]
    seconds = []
    for number in range(-1, gpu.ROUNDS):  # the first warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        entrant.turn()
        end.record()
        end.synchronize()
        if number >= 0:
            seconds.append(begin.elapsed_time(end) * 1e-3 / entrant.launches)
    return seconds, "graph" if entrant.graph is not None else "events"


def time_on_cpu(run: Callable[[], None]) -> tuple[list[float], str]:
    seconds = []
    for number in range(-CPU_WARMUPS, CPU_RUNS):
        start = time.perf_counter()
        run()
        if number >= 0:
            seconds.append(time.perf_counter() - start)
    return seconds, "clock"


def measure(group: str, text: str, device: str) -> list[dict[str, Any]]:
    """A row for each peer of a shape that this machine has; the others are named on stderr, with the reason."""
    import torch

    rows = []
    shape = tuple(int(part) for part in text.split("x"))
    # Forwards too: a backward runs where its forward ran, and only this stream is captured.
    stream = torch.cuda.Stream() if device == "cuda" else None
    for prepare in peers_of(group, shape, device):
        try:
            with torch.cuda.stream(stream):
                for peer in prepare():
                    peer.run()
                    error = peer.error()
                    if not error <= peer.tolerance:
                        print(f"{group} {text}: {peer.name} is wrong by {error:.1e}", file=sys.stderr)
                        continue
                    seconds, timer = time_on_gpu(peer.run, stream) if stream is not None else time_on_cpu(peer.run)
                    row = {"group": group, "shape": text, **summary(seconds), "timer": timer}
                    if peer.rung is None:
                        rows.append({**row, "peer": peer.name, "error": float(f"{error:.2g}")})
                    else:
                        rows.append({**row, "rung": peer.name, "fastest_seconds": min(seconds), **peer.rung})
                    median, spread = rows[-1]["median_seconds"], rows[-1]["spread"]
                    print(f"{group:10}{text:18}{peer.name:20}{median * 1e3:10.4f} ms  ±{spread / 2:.1%}", flush=True)
        except RuntimeError as error:
            print(f"{group} {text}: left out: {compare.reason_of(error)}", file=sys.stderr)
    return rows


def summary(seconds: list[float]) -> dict[str, Any]:
    median, q1, q3 = (tables.quantile(seconds, share) for share in (0.5, 0.25, 0.75))
    return {"median_seconds": float(f"{median:.6g}"), "spread": round((q3 - q1) / median, 4), "runs": len(seconds)}


def host_text() -> str:
    """The host's name, as `fovea ladder` gives it."""
    name = "a processor without a name"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name") and ": " in line:
            name = line.split(": ", 1)[1]
            break
    return f"{name}, {os.cpu_count()} threads"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="groups of the GPU (cuda) or the CPU")
    parser.add_argument("--group", action="append", metavar="NAME", help="only this group; may be repeated")
    parser.add_argument("--shape", action="append", metavar="SIZES", help="other sizes than the ladder's, of one --group")
    parser.add_argument("--fovea", type=Path, default=PROGRAM, metavar="PATH",
                        help="the program, asked for the groups and their shapes")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times, for fovea ladder --peers")
    args = parser.parse_args()
    try:
        groups = list_groups(args.fovea, "cpu" if args.device == "cpu" else "gpu")
    except ValueError as error:
        sys.exit(f"ladder_peers.py: {error}")
    for name in args.group or []:
        if name not in groups:
            parser.error(f"--group: got '{name}', expected one of {', '.join(groups)} with --device {args.device}")
    chosen = args.group or list(groups)
    if args.shape and len(chosen) != 1:
        parser.error("--shape: name the group that it is for, with --group")
    try:
        import torch
    except ImportError:
        sys.exit("ladder_peers.py: PyTorch is not installed, and the peers are taken from it: pip install torch")
    about: dict[str, Any] = {"host": host_text()}
    if args.device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("ladder_peers.py: PyTorch sees no GPU; --device cpu times the peer of the CPU's rungs")
        about = {"gpu": torch.cuda.get_device_name()}
    torch.manual_seed(1)
    rows = [row for name in chosen for shape in args.shape or groups[name]
            for row in measure(name, shape, args.device)]  # fmt: skip
    if args.json:
        results = {
            **about,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "software": {"torch": torch.__version__, "cuda": torch.version.cuda},
            "rows": rows,
        }
        args.json.write_text(tables.dump(results))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
