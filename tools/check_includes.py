#!/usr/bin/env python3
"""Fails on an include against the order of the layers.

    core <- tile <- {cpu, cuda/ptx <- cuda/warp <- cuda/kernels <- cuda/launch} <- plan <- capi <- distributed <- public headers
    public headers <- {verify, io, bindings, integrations, bench}; {verify, io, ladder} <- cli; everything <- tests

A file may include its own layer and those that SEES lists. src/expr sees core alone, src/io only itself, the public headers see only each other, and a
rung of the ladder sees nothing of the library. Nothing includes the tests.

    check_includes.py REPOSITORY     prints each violation, exit status 1 when there is any
    check_includes.py --self-test    checks that the rules catch what they should
"""
import pathlib
import re
import sys
import tempfile

SEES = {  # layer -> layers that it may include, beside itself
    "core": ["include"],
    "tile": ["core"],
    "expr": ["core"],
    "cpu": ["core", "tile", "expr"],
    "cuda/ptx": ["core", "tile"],
    "cuda/warp": ["core", "tile", "cuda/ptx"],
    "cuda/kernels": ["core", "tile", "cuda/ptx", "cuda/warp"],
    "cuda/launch": ["core", "tile", "expr", "cuda/ptx", "cuda/warp", "cuda/kernels"],
    "plan": ["core", "tile", "expr", "cpu", "cuda/launch"],
    "capi": ["core", "tile", "expr", "cpu", "cuda/launch", "plan", "include"],
    "distributed": ["core", "expr", "cuda/launch", "plan", "capi", "include"],
    "include": [],
    "io": [],
    "verify": ["include"],
    "ladder": [],
    "bindings": ["include", "io"],
    "integrations": ["include"],
    "bench": ["include", "io", "verify"],
    "cli": ["include", "io", "verify", "ladder"],
}
SEES["tests"] = list(SEES)
OUTSIDE_SRC = ["include", "ladder", "bindings", "integrations", "bench", "cli", "tests"]
NAMES = {"include": "the public headers"}
SOURCES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def layer_of_path(path):
    """The layer that holds a path relative to the repository, or None (tools, for example)."""
    parts = path.parts
    if parts[0] == "src":
        if parts[1] == "cuda" and len(parts) > 3:
            return "cuda/" + parts[2]
        return parts[1] if len(parts) > 2 else None
    return parts[0] if parts[0] in OUTSIDE_SRC else None


def layer_of_include(root, file, name):
    """The layer that an include of `file` leads to, or None (headers of the system and of other libraries)."""
    if name.startswith("."):
        beside = (file.parent / name).resolve()
        return layer_of_path(beside.relative_to(root)) if beside.is_relative_to(root) else None
    if name.startswith("fovea/"):
        return "include"
    for layer in sorted(SEES, key=len, reverse=True):
        if name.startswith(layer + "/"):
            return layer
    return "tests" if (root / "tests" / name).is_file() else None


def violations(root):
    root = root.resolve()
    found = []
    for top in ["src", *OUTSIDE_SRC]:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            relative = path.relative_to(root)
            layer = layer_of_path(relative)
            if layer not in SEES:
                found.append(f"{relative}: belongs to no layer that tools/check_includes.py knows")
                continue
            text = path.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                target = layer_of_include(root, path, match.group(1))
                if target in (None, layer, *SEES[layer]):
                    continue
                line = text.count("\n", 0, match.start(1)) + 1
                sees = ", ".join(NAMES.get(seen, seen) for seen in [layer, *SEES[layer]])
                found.append(f"{relative}:{line}: {layer} includes \"{match.group(1)}\", but may see only {sees}")
    return found


def self_test():
    cases = [  # file, include, whether it is a violation
        ("src/core/a.hpp", "tile/layout.hpp", True),
        ("src/tile/a.hpp", "core/dtype.hpp", False),
        ("src/expr/a.cpp", "core/dtype.hpp", False),
        ("src/expr/a.cpp", "tile/kv_range.hpp", True),
        ("src/cpu/a.cpp", "plan/validate.hpp", True),
        ("src/cpu/a.cpp", "fovea/fovea.h", True),
        ("src/cpu/a.cpp", "../plan/validate.hpp", True),
        ("src/cuda/warp/a.cuh", "cuda/ptx/mma.cuh", False),
        ("src/cuda/ptx/a.cuh", "cuda/warp/mma.cuh", True),
        ("src/plan/a.cpp", "cpu/backends.hpp", False),
        ("src/plan/a.cpp", "capi/convert.hpp", True),
        ("src/capi/a.cpp", "fovea/fovea.h", False),
        ("src/capi/a.cpp", "plan/make_plan.hpp", False),
        ("src/io/a.cpp", "core/dtype.hpp", True),
        ("cli/a.cpp", "io/npy.hpp", False),
        ("cli/a.cpp", "fovea/fovea.hpp", False),
        ("cli/a.cpp", "core/problem.hpp", True),
        ("cli/a.cpp", "verify/check.hpp", False),
        ("cli/a.cpp", "ladder/harness/run.hpp", False),
        ("cli/a.cpp", "conformance/suite.hpp", True),
        ("cli/a.cpp", "tests/conformance/suite.hpp", True),
        ("cli/commands/a.cpp", "../../tests/conformance/suite.hpp", True),
        ("src/verify/a.hpp", "fovea/fovea.h", False),
        ("src/verify/a.hpp", "core/dtype.hpp", True),
        ("src/verify/a.hpp", "conformance/suite.hpp", True),
        ("src/cpu/a.cpp", "verify/check.hpp", True),
        ("bench/a.cpp", "verify/check.hpp", False),
        ("bench/a.cpp", "cpu/backends.hpp", True),
        ("bench/a.cpp", "cli/terminal/text.hpp", True),
        ("tests/host/a.cpp", "cpu/backends.hpp", False),
        ("tests/host/a.cpp", "conformance/suite.hpp", False),
        ("tests/conformance/a.cpp", "verify/check.hpp", False),
        ("tests/cli/a.cpp", "cli/terminal/text.hpp", False),
        ("ladder/01_naive/a.cu", "tile/layout.hpp", True),
        ("ladder/01_naive/a.cu", "fovea/fovea.h", True),
        ("include/fovea/a.hpp", "core/problem.hpp", True),
        ("integrations/ggml/a.cpp", "fovea/fovea.h", False),
        ("integrations/ggml/a.cpp", "cpu/ops.hpp", True),
        ("src/stray/a.cpp", "vector", True),
    ]
    failed = 0
    for name, include, bad in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tests" / "conformance").mkdir(parents=True)
            (root / "tests" / "conformance" / "suite.hpp").write_text("", encoding="utf-8")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f'#include "{include}"\n', encoding="utf-8")
            if bool(violations(root)) != bad:
                print(f"{name} including {include}: expected {'a violation' if bad else 'none'}")
                failed += 1
    print(f"{len(cases)} rules checked, {failed} wrong")
    return 1 if failed else 0


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if sys.argv[1] == "--self-test":
        return self_test()
    found = violations(pathlib.Path(sys.argv[1]))
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
