"""Hardware counters of chosen kernels as one table, by Nsight Compute: `make profile`.

    python3 bench/gpu_profile.py                                     ours: forward and backward, d 128, 4,096 tokens
    python3 bench/gpu_profile.py --shape fwd,b4,s4096,h32,d64,causal --contenders ours,fa2
    python3 bench/gpu_profile.py --csv FILE                          a raw page made elsewhere; needs no GPU

Each problem runs once to warm up and once under the profiler, which repeats every kernel as often as its counters need
(caches are flushed and clocks left alone, so times are somewhat above those of gpu.py).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import gpu_ncu

HERE = Path(__file__).resolve().parent
DEFAULT_SHAPES = [
    "fwd,b4,s4096,h16,d128",
    "fwd,b4,s4096,h16,d128,causal",
    "bwd,b4,s4096,h16,d128",
    "bwd,b4,s4096,h16,d128,causal",
]
WHERE_NCU_IS = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
RUN = re.compile(r"^profile: (.+)$", re.MULTILINE)


def find_ncu(given: str | None) -> str | None:
    if given is not None:
        return given if Path(given).is_file() else None
    on_path = shutil.which("ncu")
    if on_path is not None:
        return on_path
    for pattern in WHERE_NCU_IS:
        found = sorted(Path("/").glob(pattern.lstrip("/")))
        if found:
            return str(found[-1])
    return None


def last_lines(text: str, count: int = 12) -> str:
    return "\n".join("  " + line for line in text.strip().splitlines()[-count:])


def profile(ncu: str, args: argparse.Namespace) -> tuple[str, list[str]]:
    """The raw page as CSV, and the titles of the runs in it."""
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "report")
        program = [sys.executable, str(HERE / "gpu.py"), "--once", "--contenders", args.contenders]
        for shape in args.shape:
            program += ["--shape", shape]
        if args.backend:
            program += ["--backend", args.backend]
        if args.lib:
            program += ["--lib", str(args.lib)]
        command = [
            ncu,
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--export",
            report,
            "--force-overwrite",
        ]
        command += ["--metrics", ",".join(gpu_ncu.METRICS.values()), *program]
        done = subprocess.run(command, capture_output=True, text=True)
        output = done.stdout + done.stderr
        if "ERR_NVGPUCTRPERM" in output:
            sys.exit(
                "gpu_profile.py: the driver keeps its counters from this user; run as root, or load its kernel module "
                "with NVreg_RestrictProfilingToAdminUsers=0"
            )
        titles = RUN.findall(done.stdout)
        if done.returncode != 0 or not titles or not Path(report + ".ncu-rep").is_file():
            sys.exit("gpu_profile.py: nothing was profiled. Try without the profiler: "
                     f"python3 {' '.join(program[1:])}\n{last_lines(output)}")  # fmt: skip
        page = [ncu, "--import", report + ".ncu-rep", "--csv", "--page", "raw", "--print-units", "base"]
        imported = subprocess.run(page, capture_output=True, text=True)
        if imported.returncode != 0:
            sys.exit(
                f"gpu_profile.py: ncu could not read its own report\n{last_lines(imported.stdout + imported.stderr)}"
            )
        return imported.stdout, titles


def collect(args: argparse.Namespace) -> tuple[str, list[str]]:
    ncu = find_ncu(args.ncu)
    if ncu is None:
        sys.exit(
            "gpu_profile.py: no ncu here. Install Nsight Compute (it is part of the CUDA toolkit; Debian: "
            "nvidia-nsight-compute), or give --ncu PATH; --csv FILE reads a page made elsewhere"
        )
    smi = shutil.which("nvidia-smi")
    if smi is None or subprocess.run([smi, "-L"], capture_output=True).returncode != 0:
        sys.exit("gpu_profile.py: nvidia-smi sees no GPU here; --csv FILE reads a page made elsewhere")
    return profile(ncu, args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", metavar="WORDS", help="as of gpu.py; may be repeated")
    parser.add_argument("--contenders", default="ours", metavar="NAME,...", help="as of gpu.py (ours)")
    parser.add_argument("--backend", metavar="NAME,...", help="backends of ours")
    parser.add_argument("--lib", type=Path, metavar="PATH", help="libfovea.so")
    parser.add_argument("--ncu", metavar="PATH", help="Nsight Compute's command line")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="read this raw page and profile nothing")
    parser.add_argument("--save-csv", type=Path, metavar="FILE", help="keep the raw page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, a line a kernel")
    args = parser.parse_args()
    args.shape = args.shape or DEFAULT_SHAPES
    titles: list[str] = []
    if args.csv is not None:
        text = args.csv.read_text()
    else:
        text, titles = collect(args)
    if args.save_csv:
        args.save_csv.write_text(text)
    try:
        kernels = gpu_ncu.read_csv(text)
        markers = sum(gpu_ncu.MARKER in kernel.name for kernel in kernels)
        titles = titles or [f"run {number + 1}" for number in range(markers)]
        runs = gpu_ncu.split_at_markers(kernels, titles) if markers else [("kernels", kernels)]
    except ValueError as error:
        sys.exit(f"gpu_profile.py: {args.csv or 'ncu'}: {error}")
    print("\n".join(gpu_ncu.table(runs)))
    if args.json:
        lines = ",\n".join("  " + json.dumps(line) for line in gpu_ncu.as_json(runs))
        args.json.write_text(f"[\n{lines}\n]\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
