#!/usr/bin/env python3
"""Fails on an include against the order of the layers.

    core <- tile <- {cpu, cuda/ptx <- cuda/warp <- cuda/kernels <- cuda/launch} <- plan <- capi <- {cli, bindings, bench}

A file may include its own layer and those below it. src/io stands apart: it sees only itself. The command line, the
bindings and the benchmarks see the public headers, and io, the command line the ladder too; the public headers see only each other; a rung of the ladder
sees nothing of the library.

    check_includes.py REPOSITORY     prints each violation, exit status 1 when there is any
    check_includes.py --self-test    checks that the rules catch what they should
"""
import pathlib
import re
import sys
import tempfile

ORDERED = {  # layer -> layers of src/ that it may include, beside itself
    "core": [],
    "tile": ["core"],
    "cpu": ["core", "tile"],
    "cuda/ptx": ["core", "tile"],
    "cuda/warp": ["core", "tile", "cuda/ptx"],
    "cuda/kernels": ["core", "tile", "cuda/ptx", "cuda/warp"],
    "cuda/launch": ["core", "tile", "cuda/ptx", "cuda/warp", "cuda/kernels"],
    "plan": ["core", "tile", "cpu", "cuda/launch"],
    "distributed": ["core", "tile", "cpu", "cuda/launch", "plan"],
    "capi": ["core", "tile", "cpu", "cuda/launch", "plan", "distributed"],
    "io": [],
}
OUTSIDE = {"cli": ["io"], "bindings": ["io"], "bench": ["io"], "ladder": [], "include": []}
PUBLIC_HEADERS_FOR = {"capi", "cli", "bindings", "bench", "include"}
SOURCES = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


def layer_of_path(path):
    """The layer that holds a repository path, or None (tests, tools)."""
    parts = path.parts
    if parts[0] == "src":
        if parts[1] == "cuda" and len(parts) > 3:
            return "cuda/" + parts[2]
        return parts[1] if len(parts) > 2 else None
    return parts[0] if parts[0] in OUTSIDE else None


def layer_of_include(name):
    """The layer of src/ that an include path such as "tile/kv_range.hpp" names, "public", or None."""
    if name.startswith("fovea/"):
        return "public"
    for layer in sorted(ORDERED, key=len, reverse=True):
        if name.startswith(layer + "/"):
            return layer
    return None


def violations(root):
    found = []
    for top in ["src", *OUTSIDE]:
        for path in sorted((root / top).rglob("*")):
            if path.suffix not in SOURCES:
                continue
            relative = path.relative_to(root)
            layer = layer_of_path(relative)
            if layer is None or layer not in {**ORDERED, **OUTSIDE}:
                found.append(f"{relative}: belongs to no layer that tools/check_includes.py knows")
                continue
            text = path.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                name = match.group(1)
                # A path with ../ is judged by where it leads, and one without by the folder it names.
                if name.startswith("."):
                    beside = (path.parent / name).resolve()
                    target = layer_of_path(beside.relative_to(root.resolve())) if beside.is_relative_to(
                        root.resolve()) else None
                else:
                    target = layer_of_include(name)
                if target is None or target == layer:
                    continue
                allowed = ORDERED.get(layer, OUTSIDE.get(layer))
                if target == "public":
                    fine = layer in PUBLIC_HEADERS_FOR
                else:
                    fine = target in allowed
                if not fine:
                    line = text.count("\n", 0, match.start(1)) + 1
                    found.append(f"{relative}:{line}: {layer} includes \"{name}\", but may see only "
                                 f"{', '.join([layer, *allowed])}"
                                 f"{' and the public headers' if layer in PUBLIC_HEADERS_FOR else ''}")
    return found


def self_test():
    cases = [  # file, include, whether it is a violation
        ("src/core/a.hpp", "tile/layout.hpp", True),
        ("src/tile/a.hpp", "core/dtype.hpp", False),
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
        ("bench/a.cpp", "cpu/backends.hpp", True),
        ("ladder/01_naive/a.cu", "tile/layout.hpp", True),
        ("include/fovea/a.hpp", "core/problem.hpp", True),
        ("src/stray/a.cpp", "vector", True),
    ]
    failed = 0
    for name, include, bad in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / name).parent.mkdir(parents=True)
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
