#!/usr/bin/env python3
"""What each rank's GPU does in a call over several GPUs, and when: kernels, copies and the gaps between them, by stream.

    python bench/gpu/ranks_profile.py [--lib FILE] [--ranks 2] [--tokens 16384] [--methods 2x1,2x4] [--json FILE]

Each rank is a process with a GPU, as in ranks.py, whose problems these are. CUPTI, by PyTorch's profiler, gives begin and end of
each kernel and copy. Of several calls back to back one in the middle is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "gpu")]
import fovea_ctypes
import fovea_ranks
import ranks
from sources import sources_hash

CALLS = 8  # of which the last but two is shown: others are in flight before and after it


def short(name: str) -> str:
    """What a kernel is called, without its template's arguments."""
    name = name.replace("(anonymous namespace)::", "")
    for end in ("<", "("):
        name = name.split(end)[0]
    return name.split("::")[-1].split()[-1]


def events_of(trace: Path) -> list[dict[str, Any]]:
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") in kinds]
    return sorted(
        (
            {
                "what": short(e["name"]) if e["cat"] == "kernel" else e["name"],
                "stream": e["args"].get("stream"),
                "begin": e["ts"],
                "us": e["dur"],
                "bytes": e["args"].get("bytes", 0),
            }
            for e in events
        ),
        key=lambda e: e["begin"],
    )


def is_attention(event: dict[str, Any]) -> bool:
    return event["what"].startswith(("fwd_", "bwd_"))


def busy(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events runs."""
    total, end = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e["begin"]):
        total += max(0.0, e["begin"] + e["us"] - max(end, e["begin"]))
        end = max(end, e["begin"] + e["us"])
    return total


def summary(events: list[dict[str, Any]], calls: int) -> dict[str, Any]:
    """Of one call by the order of events: all calls have the same ones."""
    each = len(events) // calls
    if each == 0 or each * calls != len(events):
        return {"error": f"{len(events)} events are no multiple of {calls} calls"}
    # Streams run beside each other, so a call's events are counted on each.
    one: list[dict[str, Any]] = []
    for stream in sorted({e["stream"] for e in events}):
        own = [e for e in events if e["stream"] == stream]
        per_call = len(own) // calls
        one += own[(calls - 3) * per_call : (calls - 2) * per_call]
    first = min(e["begin"] for e in one)
    attention = [e for e in one if is_attention(e)]
    others = [e for e in one if not is_attention(e)]
    begin, end = min(e["begin"] for e in events), max(e["begin"] + e["us"] for e in events)
    hidden = busy(attention) + busy(others) - busy(one)
    return {
        "us_a_call": round((end - begin) / calls, 1),
        "attention_us": round(busy(attention), 1),
        "other_us": round(busy(others), 1),
        "of_which_beside_attention_us": round(hidden, 1),
        "idle_us": round(max(e["begin"] + e["us"] for e in one) - first - busy(one), 1),
        "events": [
            {"at_us": round(e["begin"] - first, 1), "us": round(e["us"], 1), "stream": e["stream"], "what": e["what"]}
            | ({"GB_s": round(e["bytes"] / e["us"] / 1e3, 0)} if e["bytes"] and e["us"] else {})
            for e in sorted(one, key=lambda e: e["begin"])
        ],
    }


def process(rank: int, options: argparse.Namespace, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port), NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.ranks, device_id=torch.device("cuda", rank))
    library, transport = ranks.join(options, rank)
    made: list[dict[str, Any]] = []
    for tokens in options.tokens:
        for chosen in options.methods or [ranks.Method()]:
            p = ranks.Problem(tokens, 16, 16, [], rank, options.ranks, f"cuda:{rank}", options.zigzag)
            forward, step, method = ranks.our_ranks(library, transport, p, chosen)
            for name, run in (("forward", forward), ("forward and backward", step)):
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
                dist.barrier()
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    for _ in range(CALLS):
                        run()
                    torch.cuda.synchronize()
                trace = Path(folder) / f"trace_{rank}.json"
                profiler.export_chrome_trace(str(trace))
                made.append({"tokens": tokens, "pass": name, "method": method, "as": chosen.text, "rank": rank} | summary(events_of(trace), CALLS))
            torch.cuda.empty_cache()
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(made), encoding="utf-8")
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ranks.add_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (options, folder), nprocs=options.ranks)
        every = [made for rank in range(options.ranks) for made in json.loads((Path(folder) / f"rank_{rank}.json").read_text())]
    every.sort(key=lambda r: (r["tokens"], r["as"], r["pass"], r["rank"]))
    for r in every:
        print({k: v for k, v in r.items() if k != "events"})
        if r["rank"] == 0:
            for e in r.get("events", []):
                print("   ", *e.values())
    if options.json:
        report = {
            "machine": [torch.cuda.get_device_name(i) for i in range(options.ranks)],
            "kernels": sources_hash(ROOT, ["core", "tile", "cuda", "distributed"]),
            "calls": every,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
