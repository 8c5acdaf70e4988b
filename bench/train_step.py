#!/usr/bin/env python3
"""Forward and backward of attention through PyTorch's autograd, by the wall clock, as a training step meets them.

    python bench/train_step.py [--shape b4,s4096,h16,d128,causal] [--json FILE]

Contenders: fovea.torch.attend, scaled_dot_product_attention over cuDNN and over FlashAttention-2, and FlashAttention-3 and -4
where they are installed. Each compares its gradients with the first's before it is timed. They take turns; a turn is as many
steps as fill a tenth of a second, queued without a wait, from an idle GPU to an idle GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fovea
import fovea.torch
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parent / "gpu"))
import shapes

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
TURN_SECONDS, TOLERANCE = 0.1, 0.02


def contenders(shape: shapes.Shape) -> dict[str, Attention]:
    def sdpa(backend: SDPBackend) -> Attention:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            with sdpa_kernel(backend):
                o = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=shape.causal, enable_gqa=shape.h_q != shape.h_kv
                )
            return o.transpose(1, 2)

        return run

    found: dict[str, Attention] = {
        "fovea": lambda q, k, v: fovea.torch.attend(q, k, v, causal=shape.causal),
        "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
        "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    }
    for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        try:
            theirs = __import__(module, fromlist=["flash_attn_func"]).flash_attn_func
        except ImportError:
            continue

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, theirs=theirs) -> torch.Tensor:
            o = theirs(q, k, v, causal=shape.causal)
            return o[0] if isinstance(o, tuple) else o

        found[name] = run
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=shapes.parse, default="b4,s4096,h16,d128,causal", help="bench/gpu/shapes.py")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the medians here, with the machine")
    options = parser.parse_args()
    shape = options.shape
    if shape.window >= 0 or shape.softcap or shape.pass_ != "fwd":
        parser.error(f"--shape: got {shape.name}, expected sizes, a type and causal: a step is both passes, without other terms")
    if not torch.cuda.is_available():
        sys.exit("train_step.py: PyTorch sees no GPU; nvidia-smi tells whether the driver does")
    torch.manual_seed(1)
    dtype = getattr(torch, shapes.DTYPES[shape.dtype])
    q = torch.randn(shape.b, shape.s_q, shape.h_q, shape.d, device="cuda").to(dtype).requires_grad_()
    k = torch.randn(shape.b, shape.s_k, shape.h_kv, shape.d, device="cuda").to(dtype).requires_grad_()
    v = torch.randn(shape.b, shape.s_k, shape.h_kv, shape.d_v, device="cuda").to(dtype).requires_grad_()
    d_o = torch.randn(shape.b, shape.s_q, shape.h_q, shape.d_v, device="cuda").to(dtype)

    def step(attend: Attention) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v), (q, k, v), d_o)

    attentions = contenders(shape)
    expected = step(attentions["fovea"])
    steps: dict[str, int] = {}
    for name, attend in attentions.items():
        for got, want in zip(step(attend), expected, strict=True):
            error = ((got.float() - want.float()).norm() / want.float().norm()).item()
            if not error <= TOLERANCE:
                sys.exit(f"train_step.py: {name}: a gradient is {error:.1e} of its norm away from Fovea's")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            step(attend)
        torch.cuda.synchronize()
        steps[name] = max(5, round(5 * TURN_SECONDS / (time.perf_counter() - begin)))
    times: dict[str, list[float]] = {name: [] for name in attentions}
    for _ in range(options.rounds):
        for name, attend in attentions.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps[name]):
                step(attend)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / steps[name] * 1e3)
    medians = {name: round(statistics.median(t), 4) for name, t in times.items()}
    print(f"{fovea.info()['gpus'][0]}, PyTorch {torch.__version__}: {shape.name}, milliseconds of a step")
    for name, value in medians.items():
        print(f"{value:8.3f}  {name}")
    if options.json:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": fovea.info()["gpus"][0],
            "pytorch": torch.__version__,
            "fovea": fovea.__version__,
            "shape": shape.name.replace("_fwd", ""),
            "rounds": options.rounds,
            "milliseconds": medians,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
