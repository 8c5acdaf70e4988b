#!/usr/bin/env python3
"""Writes the tables of the documentation from what was measured.

    docs/make_tables.py                 writes every table whose sources are at hand
    docs/make_tables.py --check         writes nothing; exit status 1 when a table is not what its sources say
    docs/make_tables.py --fovea PATH    the command line, which the tables of workspace sizes are asked from; without
                                        it those tables are left as they are

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end of table -->`. Tables whose name begins with
`bench` come from bench/results/cpu_*.json, expressions/ and decode/, with `gpu` from the results of bench/gpu/compare.py there, with `llama` from bench/results/llama_cpp (integrations/ggml/llama.py),
with `memory` from `fovea explain --json`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench" / "gpu"))
sys.dont_write_bytecode = True
import tables  # noqa: E402

PAGES = ["README.md", "docs/benchmarks.md", "docs/kernels/cpu.md", "docs/guide/attention.md", "docs/guide/llama_cpp.md"]
TABLE = re.compile(r"(<!-- table: ([a-z-]+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
NO_RESULTS = "_No results are stored in this version of the tree._\n"


def table(head: list[str], rows: list[list[str]], numbers_from: int) -> str:
    """Markdown; columns from `numbers_from` on are aligned to the right."""
    line = [("---:" if i >= numbers_from else "---") for i in range(len(head))]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [head, line, *rows])


# ---- bench/results/cpu_*.json


def stored_results() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) | {"file": path.name} for path in sorted(ROOT.glob("bench/results/cpu_*.json"))]


def groups_of(result: dict[str, Any]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(type, pass, rows), in the order of the file."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["dtype"], row["pass"]), []).append(row)
    return [(dtype, pass_, rows) for (dtype, pass_), rows in groups.items()]


def pass_name(pass_: str) -> str:
    return {"fwd": "forward", "bwd": "backward"}[pass_]


def title(result: dict[str, Any]) -> str:
    software = result["software"]
    torch = software["torch"].split("+")[0]
    return (
        f"**{result['machine']['cpu']}**, {result['threads']} threads, {result['date']}; Fovea {software['fovea']}, "
        f"PyTorch {torch} (`bench/results/{result['file']}`)\n\n"
    )


def rate(gflops: float) -> str:
    return f"{gflops:,.0f}" if gflops >= 9.95 else f"{gflops:.1f}"


def bench_summary() -> str:
    text = ""
    for result in stored_results():
        rows = []
        for dtype, pass_, group in groups_of(result):
            ratios = [row["ratio"] for row in group]
            mean = math.exp(sum(math.log(x) for x in ratios) / len(ratios))
            rates = [[row[side]["gflops"] for row in group] for side in ("ours", "torch")]
            rows.append(
                [
                    dtype,
                    pass_name(pass_),
                    ", ".join(f"`{name}`" for name in dict.fromkeys(row["backend"] for row in group)),
                    str(len(group)),
                    *(f"{rate(min(side))} to {rate(max(side))}" for side in rates),
                    f"{mean:.2f}",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                ]
            )
        head = ["type", "pass", "backend", "shapes", "Fovea, GFLOP/s", "PyTorch, GFLOP/s", "times as fast (geometric mean)", "least to most"]
        text += title(result) + table(head, rows, 3) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


def bench_rows() -> str:
    text = ""
    for result in stored_results():
        rows = [
            [
                row["dtype"],
                pass_name(row["pass"]),
                f"{row['b']} x {row['s']} x {row['h']} x {row['d']}",
                "causal" if row["causal"] else "full",
                f"`{row['backend']}`",
                f"{row['ours']['ms']:.2f}",
                rate(row["ours"]["gflops"]),
                rate(row["torch"]["gflops"]),
                f"{row['ratio']:.2f}",
            ]
            for row in result["rows"]
        ]
        head = ["type", "pass", "batch x length x heads x size", "mask", "backend", "ms", "GFLOP/s", "PyTorch", "ratio"]
        text += title(result) + table(head, rows, 5) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


def bench_decode() -> str:
    rows = []
    for result in stored_results():
        for row in result.get("decode", []):
            read = row["read_gb_s"]
            rows.append(
                [
                    result["machine"]["cpu"],
                    str(result["threads"]),
                    f"`{row['name']}`",
                    f"{row['ms']:.2f}",
                    f"{read * row['share_of_read']:.1f}",
                    f"{read:.1f}",
                    f"{100 * row['share_of_read']:.0f} %",
                ]
            )
    head = ["machine", "threads", "row", "ms", "GB/s of K and V", "plain read, GB/s", "share"]
    return table(head, rows, 3) if rows else NO_RESULTS


def bench_caches() -> str:
    text = ""
    for path in sorted(ROOT.glob("bench/results/decode/cpu_*.json")):
        result = json.loads(path.read_text())
        groups = sorted({row["group"] for row in result["caches"]})
        rows: dict[tuple[str, ...], dict[int, str]] = {}
        for row in result["caches"]:
            form = f"pages of {row['page']}" if row["page"] else row["layout"]
            key = (row["cache_dtype"], row["dtype"], form)
            rows.setdefault(key, {})[row["group"]] = f"{row['gb_s']:.1f}, {100 * row['share_of_read']:.0f} %"
        head = ["K and V", "queries", "layout", *(f"group {group}" for group in groups)]
        lines = [[*key, *(cells.get(group, "") for group in groups)] for key, cells in rows.items()]
        backends = ", ".join(f"`{name}`" for name in sorted({row["backend"] for row in result["caches"]}))
        of = f"{result['machine']['cpu']}, {result['threads']} threads, {backends}"
        if result.get("from_memory"):
            of += ", several caches in turn, from memory"
        text += f"{of}; GB/s of K and V, and the share:\n\n" + table(head, lines, 3) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


def bench_expressions() -> str:
    text = ""
    for path in sorted(ROOT.glob("bench/results/expressions/cpu_*.json")):
        result = json.loads(path.read_text())
        columns = list(dict.fromkeys((row["dtype"], row["pass"], row["backend"]) for row in result["rows"]))
        cells: dict[str, dict[tuple[str, ...], str]] = {}
        for row in result["rows"]:
            wanted = f" (wanted {row['must']:g})" if row["must"] else ""
            cells.setdefault(row["term"], {})[row["dtype"], row["pass"], row["backend"]] = f"{row['share']:.2f}{wanted}"
        head = ["term", *(f"{dtype}, {pass_}, `{backend}`" for dtype, pass_, backend in columns)]
        lines = [[term.replace("_", ", "), *(of.get(column, "") for column in columns)] for term, of in cells.items()]
        text += f"{result['machine']['cpu']}, {result['threads']} threads, {result['date']}; {result['problem']}:\n\n" + table(head, lines, 1) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


# ---- bench/results of bench/gpu/compare.py


def gpu_results() -> list[dict[str, Any]]:
    found = []
    for path in sorted(ROOT.glob("bench/results/*.json")):
        if not path.name.startswith(("cpu_", "ladder_", "python_", "ranks_")):
            found.append(json.loads(path.read_text()) | {"file": path.name})
    return found


def gpu_title(result: dict[str, Any]) -> str:
    gpu, software = result["gpu"], result["software"]
    others = [f"{name} {software[key]}" for key, name in (("torch", "PyTorch"), ("cudnn", "cuDNN")) if software.get(key)]
    return (
        f"**{gpu['name']}**, power limit {gpu.get('power_limit_w', '?')} W, {result['date']}; Fovea {software['fovea']}, "
        f"{', '.join(others)}, CUDA {software['cuda']}, driver {gpu.get('driver', '?')} (`bench/results/{result['file']}`)\n\n"
    )


def gpu_summary() -> str:
    """A line a type, pass and opponent: geometric mean and least over the grid."""
    text = ""
    for result in gpu_results():
        lines = tables.summary_rows(result)
        if lines:
            head = ["type", "pass", "Fovea over", "cells", "times as fast (geometric mean)", "least", "most"]
            text += gpu_title(result) + table(head, lines, 3) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


def gpu_ratios() -> str:
    text = "".join(gpu_title(result) + "\n".join(tables.ratio_tables(result)) + "\n\n" for result in gpu_results())
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


# ---- bench/results/llama_cpp


def llama_tables(head: list[str], numbers_from: int, rows: Callable[[dict[str, Any]], list[list[str]]]) -> str:
    """A table of each file that has such rows, under the machine's name."""
    text = ""
    for path in sorted(ROOT.glob("bench/results/llama_cpp/*.json")):
        result = json.loads(path.read_text())
        body = rows(result)
        if not body:
            continue
        package = result["software"]["llama_cpp_python"]
        isa = result.get("machine", {}).get("isa")  # files of before 2026-12-03 do not tell
        without = "" if isa is None or "amx_bf16" in isa else ", AVX-512 without AMX" if "avx512f" in isa else ", AVX2 alone"
        text += f"**{result['host']}**{without}, {result['date']}; llama_cpp_python {package} (`{path.relative_to(ROOT).as_posix()}`)\n\n"
        text += table(head, body, numbers_from) + "\n"
    return text.rstrip("\n") + "\n" if text else NO_RESULTS


def milliseconds(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def llama_operations() -> str:
    def rows(result: dict[str, Any]) -> list[list[str]]:
        return [
            [f"{row['queries']:,} x {row['keys']:,}", f"{row['heads']}:{row['key_heads']} of {row['d']}", row["type"],
             row["mask"] + (", softcap" if row["softcap"] else ""), milliseconds(row["ggml_ms"]), milliseconds(row["fovea_ms"]), f"{row['ratio']:.1f}"]
            for row in result.get("operations", [])
        ]

    return llama_tables(["queries x keys", "heads", "cache", "mask", "ggml, ms", "Fovea, ms", "times as fast"], 4, rows)


def llama_model() -> str:
    def rows(result: dict[str, Any]) -> list[list[str]]:
        return [
            [row["what"], f"{row['ggml_tokens_per_second']:.1f}", f"{row['fovea_tokens_per_second']:.1f}", f"{row['ratio']:.2f}"]
            for row in result.get("llama_bench", [])
        ]

    return llama_tables(["tokens", "ggml, tokens/s", "Fovea, tokens/s", "times as fast"], 1, rows)


def llama_logits() -> str:
    def rows(result: dict[str, Any]) -> list[list[str]]:
        return [
            [f"{row['tokens']:,}", row["cache"], f"{row['fovea']:.1e}",
             f"{row['ggml_without_the_operation']:.1e}" if "ggml_without_the_operation" in row else "-"]
            for row in result.get("logits", [])
        ]

    return llama_tables(["tokens", "cache", "Fovea", "ggml without the operation"], 2, rows)


def llama_tests() -> str:
    def rows(result: dict[str, Any]) -> list[list[str]]:
        body = []
        for kind, counts in sorted(result.get("tests", {}).get("kinds", {}).items()):
            cases = counts["cases"]
            outcomes = {"passed": counts["passed"], "failed": counts["failed"]}
            outcomes |= {f"declined: {reason}": count for reason, count in sorted(counts["declined"].items())}
            body += [[kind, outcome, f"{count:,}", f"{100 * count / cases:.1f} %"] for outcome, count in outcomes.items()]
            body.append([kind, "all", f"{cases:,}", ""])
        masks = result.get("tests", {}).get("masks")
        if masks:
            others = {"agree": masks["agree"], "declined": masks["declined"], "all": masks["cases"]}
            body += [["masks of real models", outcome, f"{count:,}", ""] for outcome, count in others.items()]
        return body

    return llama_tables(["keys and values", "outcome", "cases", "share"], 2, rows)


def llama_perplexity() -> str:
    def rows(result: dict[str, Any]) -> list[list[str]]:
        return [
            [row["cache"], f"{row['ggml']:.4f} ± {row['ggml_error']:.2f}", f"{row['fovea']:.4f} ± {row['fovea_error']:.2f}",
             f"{100 * row['difference']:+.3f} ± {100 * row['difference_error']:.3f} %",
             f"{100 * row['difference_without_the_operation']:+.3f} ± {100 * row['difference_without_the_operation_error']:.3f} %"
             if "difference_without_the_operation" in row else "-", f"{row['taken']:,} of {row['operations']:,}"]
            for row in result.get("perplexity", {}).get("rows", [])
        ]

    return llama_tables(["cache", "ggml", "Fovea", "difference", "ggml without the operation", "attentions taken"], 1, rows)


# ---- fovea explain --json


def size_text(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "bytes" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def memory_growth(fovea: Path) -> str:
    heads, size, threads = 16, 64, 8

    def workspace(pass_: str, length: int) -> int:
        command = [str(fovea), "explain", "--pass", pass_, "--seqlen", str(length), "--heads", str(heads)]
        command += ["--head-dim", str(size), "--dtype", "float32", "--threads", str(threads)]
        command += ["--backend", "cpu_generic", "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(json.loads(done.stdout)["workspace_bytes"])

    rows = []
    for length in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        rows.append(
            [
                f"{length:,}",
                size_text(4 * length * heads * size * 4),
                size_text(4 * length * length * heads),
                size_text(workspace("fwd", length)),
                size_text(workspace("bwd", length)),
            ]
        )
    head = ["tokens N", "Q, K, V and O", "N x N scores of all heads", "Fovea, forward", "Fovea, backward"]
    return table(head, rows, 0)


# ---- the pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and tell of tables that differ")
    parser.add_argument("--fovea", type=Path, metavar="PATH", help="the command line program")
    args = parser.parse_args()

    makers: dict[str, Callable[[], str]] = {
        "bench-summary": bench_summary,
        "bench-rows": bench_rows,
        "bench-decode": bench_decode,
        "bench-caches": bench_caches,
        "bench-expressions": bench_expressions,
        "gpu-summary": gpu_summary,
        "gpu-ratios": gpu_ratios,
        "llama-operations": llama_operations,
        "llama-model": llama_model,
        "llama-logits": llama_logits,
        "llama-tests": llama_tests,
        "llama-perplexity": llama_perplexity,
    }
    if args.fovea is not None:
        makers["memory-growth"] = lambda: memory_growth(args.fovea)
    stale = 0
    for name in PAGES:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")

        def replace(match: re.Match[str]) -> str:
            if match[2] == "memory-growth" and args.fovea is None:
                return match[0]
            return match[1] + makers[match[2]]() + match[4]

        new = TABLE.sub(replace, old)
        if new == old:
            continue
        stale += 1
        if args.check:
            print(f"{name}: a table is not what its sources say; run docs/make_tables.py")
        else:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: written")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
