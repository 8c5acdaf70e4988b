#!/usr/bin/env python3
"""Checks that each wrapper of src/cuda/ptx is called by the device tests.

    check_wrappers.py REPOSITORY
"""

import pathlib
import re
import sys

WRAPPER = re.compile(r"__device__ __forceinline__ [\w:]+\*? ?(\w+)\(")


def main(root):
    wrappers = {}
    for header in sorted((root / "src/cuda/ptx").glob("*.cuh")):
        for name in WRAPPER.findall(header.read_text(encoding="utf-8")):
            wrappers[name] = header.name
    if not wrappers:
        sys.exit("found no wrapper in src/cuda/ptx")
    tests = "".join(p.read_text(encoding="utf-8") for p in sorted((root / "tests/gpu").glob("*.cu")))
    called = set(re.findall(r"\bptx::(\w+)\b", tests))
    untested = [f"{header}: {name} has no device test" for name, header in wrappers.items() if name not in called]
    if untested:
        sys.exit("\n".join(untested))
    print(f"{len(wrappers)} wrappers, each has a device test")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
