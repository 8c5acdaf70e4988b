"""Files of results as a machine with a GPU would write them. Their numbers are made up: they are for these tests alone."""

import json

GPU = "NVIDIA Made Up, compute capability 9.0, 132 SMs up to 1980 MHz"
HOST = "A Processor, 8 threads"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEAKS = {"cpu": 550.0, "matmul": 66900.0, "softmax": 4200.0, "attention": 66900.0, "tensor": 989000.0, "backward": 66900.0}
BOUNDS = {
    "cpu": "multiply-adds of all processors", "matmul": "multiply-adds of all CUDA cores", "softmax": "memory, copied",
    "attention": "multiply-adds of all CUDA cores", "tensor": "tensor cores, bf16", "backward": "multiply-adds of all CUDA cores",
}  # fmt: skip
RUNGS = {
    "cpu": ["01_cpu_textbook", "03_cpu_online", "06_cpu_packed"],
    "matmul": ["10_matmul_naive", "12_matmul_shared", "14_matmul_registers"],
    "softmax": ["20_softmax_thread", "23_softmax_registers"],
    "attention": ["30_attention_three_kernels", "31_attention_flash1", "32_attention_flash2"],
    "tensor": [f"{40 + i}_tensor_{name}" for i, name in enumerate(
        ["mma", "ldmatrix", "swizzle", "cp_async", "prefetch", "fragments", "exponent", "lazy", "tiles", "persistent", "tuned"])],
    "backward": ["70_backward_textbook", "72_backward_atomics"],
}  # fmt: skip
SHAPES = {
    "cpu": ["4x1024x64"],
    "matmul": ["4096x4096x4096"],
    "softmax": ["1024x1024", "16384x16384"],
    "attention": ["100x4096x32"],
    "tensor": [f"{16384 * 16 // n}x{n}x128" for n in LENGTHS],
    "backward": ["32x2048x64"],
}
PEERS = {
    "cpu": ["fovea cpu_avx512"],
    "matmul": ["cuBLAS fp32", "cuBLAS tf32", "cuBLAS bf16"],
    "softmax": ["PyTorch softmax"],
    "attention": ["fovea cuda_simt", "PyTorch efficient"],
    "tensor": ["fovea cuda_sm90", "FlashAttention-2", "cuDNN"],
    "backward": ["fovea cuda_sm80", "FlashAttention-2"],
}


def costs(group, shape):
    """(operations, bytes)"""
    a, b, *c = map(int, shape.split("x"))
    if group == "matmul":
        return 2 * a * b * c[0], 4 * (a * c[0] + c[0] * b + a * b)
    if group == "softmax":
        return 4 * a * b, 8 * a * b
    return 4 * a * b * b * c[0] * (2.5 if group == "backward" else 1), a * b * (4 * c[0] * (2 if group == "tensor" else 4) + 4)


def peer(name, seconds, share, in_turns):
    """Of a rung that takes `seconds` alone, and a tenth more in turns with the library, as a GPU's clock falls."""
    beside = seconds * (1.1 if in_turns else 1)
    return {"name": name, "seconds": beside * share, "rung_seconds": beside, "share": share}


def ladder():
    rows = []
    for group, rungs in RUNGS.items():
        unit = "GB/s" if group == "softmax" else "GFLOP/s"
        for shape in SHAPES[group]:
            flops, count = costs(group, shape)
            before = None
            for i, rung in enumerate(rungs):
                share = 0.03 + 0.6 * (i + 1) / len(rungs)
                rate = PEAKS[group] * share * (0.8 if shape.startswith("512x") else 1)
                seconds = (count if group == "softmax" else flops) / rate * 1e-9
                row = {
                    "rung": rung, "group": group, "shape": shape, "dtype": "bfloat16" if group == "tensor" else "float32",
                    "right": True, "rows_checked": 128, "tolerance": 1e-5, "errors": {"o": {"largest": 1e-6, "relative": 1e-6}},
                    "runs": 11, "median_seconds": seconds, "fastest_seconds": seconds, "spread": 0.01, "rate": rate,
                    "unit": unit, "flops": flops, "bytes": count, "bound": BOUNDS[group], "share_of_peak": share,
                }  # fmt: skip
                if before:
                    row["times_the_rung_before"] = before / seconds
                row["peers"] = [peer(name, seconds, factor, name.startswith("fovea cuda"))
                                for name, factor in zip(PEERS[group], (0.6 * share / 0.63, 0.9, 0.4), strict=False)]  # fmt: skip
                before = seconds
                rows.append(row)
    rows.append({"rung": "15_matmul_tensor", "group": "matmul", "shape": "4096x4096x4096", "dtype": "float32",
                 "skipped": "needs compute capability 8.0"})  # fmt: skip
    peaks = [{"where": "cpu", "bound": BOUNDS["cpu"], "rate": PEAKS["cpu"], "unit": "GFLOP/s"},
             {"where": "cpu", "bound": "memory, copied", "rate": 40.0, "unit": "GB/s"},
             {"where": "gpu", "bound": BOUNDS["matmul"], "rate": PEAKS["matmul"], "unit": "GFLOP/s"},
             {"where": "gpu", "bound": "memory, copied", "rate": PEAKS["softmax"], "unit": "GB/s"},
             {"where": "gpu", "bound": BOUNDS["tensor"], "rate": PEAKS["tensor"], "unit": "GFLOP/s"}]  # fmt: skip
    return {"version": "0.1.0", "date": "2026-01-02", "host": HOST, "protocol": "2 warm-ups, 11 runs", "gpu": GPU, "peaks": peaks,
            "peers": {"date": "2026-01-01", "software": {"torch": "2.11", "cuda": None}}, "rows": rows}  # fmt: skip


def memory():
    rows = []
    for group, batch in (("cpu", 1), ("attention", 8), ("tensor", 8), ("matmul", 0)):
        for n in LENGTHS:
            for rung in RUNGS[group]:
                tensors = batch * n * 64 * 4 * 4
                peak = tensors + (batch * n * n * 4 if rung[:2] in ("01", "30") else 2**21)
                if group == "matmul":
                    rows.append({"rung": rung, "group": group, "shape": "64x64x64", "dtype": "float32", "peak_bytes": 2**20})
                    continue
                rows.append({"rung": rung, "group": group, "shape": f"{batch}x{n}x64", "dtype": "float32", "peak_bytes": peak,
                             "library": {"name": "fovea x", "peak_bytes": tensors + 2**22}})  # fmt: skip
    return {"version": "0.1.0", "date": "2026-01-02", "host": HOST, "gpu": GPU, "protocol": "the most bytes", "rows": rows}


def profile():
    kernels = []
    for group in ("matmul", "softmax", "attention", "tensor"):
        for i, rung in enumerate(RUNGS[group]):
            flops, count = costs(group, SHAPES[group][0])
            kernels.append({
                "rung": rung, "group": group, "shape": SHAPES[group][0], "kernel": f"kernel<{i}, (Layout)1>", "duration_ns": 1e6,
                "registers": 128, "shared_bytes": 49152, "block": 128, "occupancy_pct": 24.6, "occupancy_limit_pct": 25,
                "tensor_pct": 40.1, "dram_pct": 12.0, "issue_pct": 33.0, "local_loads": 0, "local_stores": 0, "flop": flops * 1.1,
                "intensity": flops / count / 1.5, "limit": "tensor",
            })  # fmt: skip
    return {"version": "0.1.0", "date": "2026-01-02", "host": HOST, "gpu": GPU, "protocol": "one run", "profiler": "Version 2025.3",
            "kernels": kernels}  # fmt: skip


def gpu():
    rows = []
    for pass_ in ("fwd", "bwd"):
        for d in (64, 128, 256):
            for causal in (False, True):
                for i, s in enumerate(LENGTHS):
                    flops = 4 * 16384 * s * 2048 * (0.5 if causal else 1) * (2.5 if pass_ == "bwd" else 1)
                    entries = {}
                    for name, rate in (("ours", 640e12), ("fa2", 360e12), ("cudnn", 600e12), ("fa3", 630e12)):
                        ms = flops / (rate * (0.6 + 0.08 * i) * (0.8 if causal else 1)) * 1e3
                        entries[name] = {"ms": ms, "q1": ms, "q3": ms, "spread": 0.01, "tflops": flops / ms * 1e-9, "gb_s": 1.0,
                                         "timer": "graph"}  # fmt: skip
                    if d == 256:
                        entries["cudnn"] = {"failed": "no kernel for <this> head size"}
                    rows.append({
                        "name": f"bf16_{pass_}_b{16384 // s}_s{s}_h{2048 // d}_d{d}" + ("_causal" if causal else ""), "group": "grid",
                        "pass": pass_, "dtype": "bf16", "b": 16384 // s, "s_q": s, "s_k": s, "h_q": 2048 // d, "d": d,
                        "causal": causal, "flops": flops, "bytes": 4 * 16384 * 2048 * 2, "contenders": entries,
                    })  # fmt: skip
    special = rows[0] | {"name": "fp32_fwd_b4_s4096_h32_d64", "group": "special", "dtype": "fp32"}
    return {"gpu": {"name": "NVIDIA Made Up", "sms": 132, "power_limit_w": 700, "driver": "580.1"}, "date": "2026-01-02",
            "software": {"fovea": "0.1.0", "torch": "2.11.0"}, "sources_sha256": "0" * 64,
            "protocol": {"rounds": 7, "turn": "one replay"}, "stored_best_over_cudnn": False, "rows": [*rows, special]}  # fmt: skip


def ranks():
    def times(ms):
        return {"fovea": {"ms": ms, "share": 0.9}, "pytorch": {"ms": ms * 1.5, "share": 0.6}, "one GPU": {"ms": ms * 1.8}}

    rows = [{"row": f"{length} tokens", "method": "all-to-all over <heads>",
             "passes": {"forward": times(length / 1e4), "forward and backward": times(length / 3e3)}} for length in LENGTHS]  # fmt: skip
    del rows[0]["passes"]["forward"]["pytorch"]
    return {"gpu": {"name": "NVIDIA Made Up", "power_limit_w": 700, "driver": "580.1"}, "machine": ["NVIDIA Made Up"] * 2,
            "date": "2026-01-02", "pytorch": "2.11.0", "kernels": "0" * 64, "type": "bfloat16", "head_dim": 128, "causal": True,
            "ranks": 2, "rows": rows}  # fmt: skip


def write_all(folder):
    for name, made in (("ladder_made_up", ladder), ("ladder_memory_made_up", memory), ("ladder_profile_made_up", profile),
                       ("made_up_all", gpu), ("ranks_made_up", ranks)):  # fmt: skip
        (folder / f"{name}.json").write_text(json.dumps(made()))
