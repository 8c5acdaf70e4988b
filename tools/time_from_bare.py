#!/usr/bin/env python3
"""Times a target of the Makefile from a bare clone of HEAD, on two cores, and writes the seconds into bench/results/house/seconds.json.

    time_from_bare.py run|test [--cores N] [--keep]

The clone lies in a temporary folder (--keep leaves it there), without compiler caches and without pip's. apt packages that
are installed already stay installed; the file says so. tools/house.py puts the numbers on the page of the architecture.
"""
import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "house" / "seconds.json"


def machine(cores):
    """Cores, memory and processor in words."""
    names = [line.partition(":")[2].strip() for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
             if line.startswith("model name")]
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{cores} cores, {gigabytes:.0f} GiB, {names[0] if names else os.uname().machine}, apt packages installed before"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=("run", "test"))
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()

    cpus = sorted(os.sched_getaffinity(0))[:arguments.cores]
    if len(cpus) < arguments.cores:
        sys.exit(f"--cores: got {arguments.cores}, expected at most {len(cpus)}: this process may use no more")
    os.sched_setaffinity(0, cpus)
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith(("CMAKE_", "CCACHE_", "MAKE", "MFLAGS"))}
    environment |= {"CCACHE_DISABLE": "1", "PIP_NO_CACHE_DIR": "1"}

    folder = tempfile.mkdtemp(prefix="fovea-bare-")
    try:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        start = time.monotonic()
        status = subprocess.run(["make", arguments.target], cwd=folder, env=environment, check=False).returncode
        seconds = time.monotonic() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    finally:
        if arguments.keep:
            print(f"the clone is {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    processor = usage.ru_utime + usage.ru_stime
    print(f"make {arguments.target} from a bare clone: {seconds:.0f} s, {processor:.0f} s of processor, exit status {status}")
    if status != 0:
        return status
    measured = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    measured |= {"machine": machine(arguments.cores), f"make_{arguments.target}_seconds": round(seconds),
                 f"make_{arguments.target}_processor_seconds": round(processor)}
    RESULTS.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    print(f"written to {RESULTS.relative_to(ROOT)}; `python3 tools/house.py . --write` puts it on the page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
