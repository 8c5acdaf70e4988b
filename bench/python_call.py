#!/usr/bin/env python3
"""What a call from Python costs: a tiny problem, beside PyTorch's scaled_dot_product_attention and, where they are
installed, flash-attn 2 and 3; or with --decode a step of decoding over a cache in pages.

    build/venv/bin/python bench/python_call.py [--decode] [--device cuda] [--json FILE]

Contenders take turns, and each round gives each of them its best of several batches of calls; the table has the median of the
rounds. On the CPU the arithmetic of one query and one key is a few nanoseconds, and what fovea_run alone takes (through the
C ABI, from the compiled part) is shown beside. On a GPU only the host's time counts: nothing waits for the device within a
batch, which is short enough for the queue of launches.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import fovea
import fovea.flash_attn
import fovea.flash_attn_interface
import fovea.torch
import torch
from fovea import _core


def contenders(device: str) -> dict[str, Callable[[], object]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, 1, 64, device=device, dtype=dtype) for _ in range(3))
    trained = [x.clone().requires_grad_() for x in (q, k, v)]
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out = torch.empty_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    ours = fovea.flash_attn.flash_attn_func
    found: dict[str, Callable[[], object]] = {
        "the compiled part alone": lambda: _core.forward(q=q, k=k, v=v, o=out),
        "torch.empty_like": lambda: torch.empty_like(q),
        "fovea.flash_attn.flash_attn_func": lambda: ours(q, k, v),
        "fovea.flash_attn.flash_attn_func, causal": lambda: ours(q, k, v, causal=True),
        "fovea.flash_attn.flash_attn_func, gradients": lambda: ours(*trained),
        "fovea.attend": lambda: fovea.attend(q, k, v),
        "fovea.attend, causal": lambda: fovea.attend(q, k, v, causal=True),
        "fovea.torch.attend": lambda: fovea.torch.attend(q, k, v),
        "fovea.torch.scaled_dot_product_attention": lambda: fovea.torch.scaled_dot_product_attention(*turned),
        "PyTorch's scaled_dot_product_attention": lambda: sdpa(*turned),
        "PyTorch's scaled_dot_product_attention, gradients": lambda: sdpa(*(x.transpose(1, 2) for x in trained)),
    }
    if device == "cpu":
        import numpy as np

        a = np.zeros((1, 1, 1, 64), np.float32)
        found["fovea.attend, numpy"] = lambda: fovea.attend(a, a, a)
    else:
        for name, module in (("flash-attn 2", "flash_attn"), ("flash-attn 3", "flash_attn_interface")):
            try:
                theirs = importlib.import_module(module).flash_attn_func
            except (ImportError, AttributeError):  # FlashAttention-4 is a package flash_attn, too, without the function
                continue
            found[name] = lambda theirs=theirs: theirs(q, k, v)
            found[f"{name}, gradients"] = lambda theirs=theirs: theirs(*trained)
    return found


def decode_contenders(device: str) -> dict[str, Callable[[], object]]:
    """One query over a cache in pages of 16 rows: alone, behind a new row, and behind one that is rotated."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 1, 1, 64, device=device, dtype=dtype) for _ in range(3))
    pages = [torch.randn(4, 16, 1, 64, device=device, dtype=dtype) for _ in range(2)]
    used, table = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1], [[2, 0]]))
    tables = [torch.randn(32, 32, device=device, dtype=dtype) for _ in range(2)]
    out = torch.empty_like(q)
    cache, rotary = fovea.Cache(*pages, used, table), fovea.Rotary(*tables)
    turned = {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": False}
    where = {"seqused_k": used, "page_table": table}
    new = {"k_new": k, "v_new": v}
    found: dict[str, Callable[[], object]] = {
        "the compiled part alone": lambda: _core.forward(q=q, k=pages[0], v=pages[1], o=out, causal=True, **where),
        "the compiled part alone, appending": lambda: _core.forward(q=q, k=pages[0], v=pages[1], o=out, causal=True, **where, **new),
        "the compiled part alone, rotating": lambda: _core.forward(
            q=q, k=pages[0], v=pages[1], o=out, causal=True, **where, **new, **turned
        ),
        "fovea.attend": lambda: fovea.attend(q, None, None, cache=cache, causal=True),
        "fovea.attend, appending": lambda: fovea.attend(q, k, v, cache=cache, causal=True),
        "fovea.attend, rotating": lambda: fovea.attend(q, k, v, cache=cache, rotary=rotary, causal=True),
    }
    rows, out_rows, longest = q[0], out[0], {"max_seqlen_q": 1, "max_seqlen_k": 32}
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    found["fovea.flash_attn_interface.flash_attn_varlen_func, out"] = lambda: fovea.flash_attn_interface.flash_attn_varlen_func(
        rows, *pages, cu_seqlens_q=starts, seqused_k=used, block_table=table, causal=True, out=out_rows, fa_version=3, **longest
    )
    for name, module, pages_are in (
        ("fovea.flash_attn", fovea.flash_attn, "block_table"),
        ("fovea.flash_attn_interface", fovea.flash_attn_interface, "page_table"),
    ):
        call = functools.partial(
            module.flash_attn_with_kvcache, q, *pages, cache_seqlens=used, causal=True, **{pages_are: table}
        )
        found[f"{name}.flash_attn_with_kvcache"] = call
        found[f"{name}.flash_attn_with_kvcache, appending"] = functools.partial(call, k=k, v=v)
        found[f"{name}.flash_attn_with_kvcache, rotating"] = functools.partial(call, k=k, v=v, **turned)
    return found


def microseconds(call: Callable[[], object], calls: int, batches: int, wait: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(batches):
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - begin)
    return best / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--decode", action="store_true", help="steps of decoding over a cache in pages")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the medians here, with the machine")
    options = parser.parse_args()
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    torch.set_num_threads(1)
    calls = decode_contenders(options.device) if options.decode else contenders(options.device)
    for call in calls.values():
        for _ in range(50):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call, 200, 5, wait))
    medians = {name: round(statistics.median(t), 2) for name, t in times.items()}
    machine = fovea.info()["gpus"][0] if options.device == "cuda" else fovea.info()["processor"]
    print(f"{machine}\nPython {platform.python_version()}, PyTorch {torch.__version__}, Fovea {fovea.__version__}\n")
    for name, value in medians.items():
        print(f"{value:8.2f} us  {name}")
    if options.json:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "python": platform.python_version(),
            "pytorch": torch.__version__,
            "fovea": fovea.__version__,
            "rounds": options.rounds,
            "microseconds": medians,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
