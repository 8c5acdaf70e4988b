"""Nsight Compute's raw page as one table: the metrics, the CSV reader, the figures derived from them. Needs no GPU."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Label -> metric of Nsight Compute. Those of tensor operations differ from chip to chip: what a chip lacks is left out.
METRICS = {
    "duration_ns": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory_pct": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "occupancy_limit_pct": "sm__maximum_warps_per_active_cycle_pct",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "special_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l1_hit_pct": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_pct": "lts__t_sector_hit_rate.pct",
    "bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block_dynamic",
    "block": "launch__block_size",
    "grid": "launch__grid_size",
    "local_loads": "smsp__sass_inst_executed_op_local_ld.sum",
    "local_stores": "smsp__sass_inst_executed_op_local_st.sum",
    "ffma": "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    "fadd": "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum",
    "fmul": "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum",
    "flop_bf16": "sm__ops_path_tensor_src_bf16_dst_fp32.sum",
    "flop_fp16": "sm__ops_path_tensor_src_fp16.sum",
    "flop_tf32": "sm__ops_path_tensor_src_tf32_dst_fp32.sum",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "dram_peak_per_cycle": "dram__bytes.sum.peak_sustained",
    "dram_hz": "dram__cycles_elapsed.avg.per_second",
    "sm_hz": "sm__cycles_elapsed.avg.per_second",
    # FLOP a cycle of the whole chip: by warpgroup instructions, and by those of one warp.
    "peak_hgmma": "sm__ops_path_tensor_op_hgmma_src_bf16_dst_fp32_sparsity_off.sum.peak_sustained",
    "peak_hmma": "sm__ops_path_tensor_op_hmma_src_bf16_dst_fp32_sparsity_off.sum.peak_sustained",
}
# Kernels that stand before each profiled run: of compare.py --once (torch.cuda._sleep), and of fovea ladder --profile.
MARKERS = ("spin_kernel", "profile_marker")


@dataclass
class Kernel:
    name: str
    values: dict[str, float] = field(default_factory=dict)  # by the labels of METRICS, what was measured

    def get(self, label: str) -> float:
        return self.values.get(label, math.nan)

    @property
    def tensor_flop(self) -> float:
        return sum(self.values.get(label, 0.0) for label in ("flop_bf16", "flop_fp16", "flop_tf32"))

    @property
    def flop(self) -> float:
        """Executed FLOPs: on tensor cores, and float32 on CUDA cores. Repeated work counts each time."""
        v = self.values
        return self.tensor_flop + 2 * v.get("ffma", 0.0) + v.get("fadd", 0.0) + v.get("fmul", 0.0)

    @property
    def dram_bytes(self) -> float:
        return self.get("dram_read") + self.get("dram_write")

    @property
    def intensity(self) -> float:
        """FLOP for each byte of device memory."""
        return self.flop / self.dram_bytes if self.dram_bytes > 0 else math.nan

    @property
    def roofline(self) -> tuple[float, str]:
        """Share of what memory or the tensor cores allow at this intensity and at the clocks of the run, and which of
        the two limits. The ceiling of tensor cores is that of the chip's fastest bf16 instruction; tf32 has half."""
        seconds = self.get("duration_ns") * 1e-9
        peaks = [p for label in ("peak_hgmma", "peak_hmma") if not math.isnan(p := self.get(label))]
        arithmetic = max(peaks, default=math.nan) * self.get("sm_hz")
        if self.values.get("flop_tf32", 0.0) > self.tensor_flop / 2:
            arithmetic /= 2
        bandwidth = self.get("dram_peak_per_cycle") * self.get("dram_hz")
        if math.isnan(arithmetic) or math.isnan(bandwidth) or math.isnan(self.dram_bytes) or not seconds > 0:
            return math.nan, ""
        # At this intensity the lower of the two ceilings is the one of which the kernel reaches the larger share.
        of_tensor, of_memory = self.flop / seconds / arithmetic, self.dram_bytes / seconds / bandwidth
        return max(of_tensor, of_memory), "memory" if of_memory > of_tensor else "tensor"


def number(text: str) -> float | None:
    """A value of the CSV, with its thousands separators; None for "no data" and the like."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def read_csv(text: str) -> list[Kernel]:
    """`ncu --csv --page raw --print-units base`: a line of names, a line of units, one line per kernel. Lines before the
    table (the tool's own messages start with ==) are skipped."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError('no line that starts with "ID": this is not the raw page of ncu --csv')
    table = list(csv.reader(io.StringIO("\n".join(lines[start:]))))
    names, units = table[0], table[1]
    column = {name: i for i, name in enumerate(names)}
    if "Kernel Name" not in column:
        raise ValueError("no column 'Kernel Name'")
    scaled = [m for m in ("gpu__time_duration.sum", "dram__bytes_read.sum") if m in column]
    for metric in scaled:
        unit = units[column[metric]]
        if unit not in ("ns", "nsecond", "byte"):
            raise ValueError(f"{metric} is in '{unit}': make the table with --print-units base")
    kernels = []
    for line in table[2:]:
        if len(line) != len(names):
            continue
        kernel = Kernel(short_name(line[column["Kernel Name"]]))
        for label, metric in METRICS.items():
            if metric in column and (value := number(line[column[metric]])) is not None:
                kernel.values[label] = value
        kernels.append(kernel)
    return kernels


def short_name(name: str) -> str:
    """The function's name and template arguments, without return type, parameters and namespaces."""
    name = re.sub(r"^void |(<unnamed>|\(anonymous namespace\))::", "", name)
    depth = 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and i > 0:
            name = name[:i]
            break
    head, _, rest = name.partition("<")
    return head.rsplit("::", 1)[-1] + ("<" + rest if rest else "")


def is_marker(kernel: Kernel) -> bool:
    return any(marker in kernel.name for marker in MARKERS)


def split_at_markers(kernels: Iterable[Kernel], titles: Sequence[str]) -> list[tuple[str, list[Kernel]]]:
    """The kernels of each run; a marker kernel precedes each run."""
    runs: list[list[Kernel]] = []
    for kernel in kernels:
        if is_marker(kernel):
            runs.append([])
        elif runs:
            runs[-1].append(kernel)
        else:
            raise ValueError(f"{kernel.name} runs before the first marker")
    if len(runs) != len(titles):
        raise ValueError(f"{len(runs)} runs were profiled, {len(titles)} were announced")
    return list(zip(titles, runs, strict=True))


def short(value: float, digits: int = 0) -> str:
    if math.isnan(value):
        return "-"
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g} {unit}"
    return f"{value:.{digits}f}"


HEAD = (
    "kernel", "µs", "SM %", "memory %", "DRAM %", "tensor %", "exp unit %", "issue %", "occupancy % (limit)",
    "L1 hit %", "L2 hit %", "bank conflicts (of wavefronts)", "registers", "shared, KiB", "local ld / st", "FLOP", "TFLOP/s",
    "DRAM bytes", "FLOP/byte", "roofline",
)  # fmt: skip


def cells(kernel: Kernel) -> list[str]:
    def percent(label: str) -> str:
        value = kernel.get(label)
        return "-" if math.isnan(value) else f"{value:.1f}"

    get = kernel.get
    conflicts, wavefronts = get("bank_conflicts"), get("shared_wavefronts")
    share, limit = kernel.roofline
    name = kernel.name if len(kernel.name) <= 80 else kernel.name[:77] + "..."
    return [
        f"`{name}`",
        f"{get('duration_ns') / 1e3:.1f}",
        *(percent(label) for label in ("sm_pct", "memory_pct", "dram_pct", "tensor_pct", "special_pct", "issue_pct")),
        f"{percent('occupancy_pct')} ({percent('occupancy_limit_pct')})",
        percent("l1_hit_pct"),
        percent("l2_hit_pct"),
        short(conflicts) + (f" ({conflicts / wavefronts:.1%})" if wavefronts > 0 else ""),
        short(get("registers")),
        "-" if math.isnan(get("shared_bytes")) else f"{get('shared_bytes') / 1024:.1f}",
        f"{short(get('local_loads'))} / {short(get('local_stores'))}",
        short(kernel.flop),
        f"{kernel.flop / get('duration_ns') * 1e-3:.1f}",
        short(kernel.dram_bytes),
        short(kernel.intensity, 1),
        "-" if math.isnan(share) else f"{share:.1%} of {limit}",
    ]


def table(runs: Iterable[tuple[str, list[Kernel]]]) -> list[str]:
    """Markdown, one table per run."""
    text: list[str] = []
    for title, kernels in runs:
        text += [
            "",
            f"{title}: {sum(k.get('duration_ns') for k in kernels) / 1e3:.1f} µs in {len(kernels)} kernels",
            "",
        ]
        text.append("| " + " | ".join(HEAD) + " |")
        text.append("| --- |" + " ---: |" * (len(HEAD) - 1))
        text += ["| " + " | ".join(cells(kernel)) + " |" for kernel in kernels]
    return text[1:]


def as_json(runs: Iterable[tuple[str, list[Kernel]]]) -> list[dict[str, Any]]:
    found = []
    for title, kernels in runs:
        for kernel in kernels:
            share, limit = kernel.roofline
            derived = {
                "flop": kernel.flop,
                "dram_bytes": kernel.dram_bytes,
                "intensity": kernel.intensity,
                "roofline": share,
            }
            there = {name: value for name, value in derived.items() if not math.isnan(value)}
            found.append({"run": title, "kernel": kernel.name, **kernel.values, **there, "limit": limit})
    return found
