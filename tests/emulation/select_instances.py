#!/usr/bin/env python3
"""Writes the translation units of chosen kernels, as tools/make_instances.py does for all.

    select_instances.py INSTANCES OUTPUT [PATTERN...]

A kernel is chosen when one of the patterns (of fnmatch, as in "fwd_sm80_*_d64*") matches its name; all without patterns.
A pattern that matches nothing is a mistake.
"""
import fnmatch
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import make_instances  # noqa: E402


def main():
    instances, output, patterns = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    families = make_instances.families_of(instances)
    unused = set(patterns)

    def chosen(name):
        matching = [p for p in patterns if fnmatch.fnmatchcase(name, p)]
        unused.difference_update(matching)
        return matching or not patterns

    for key in list(families):
        family, rows = families[key], []
        for row in family["instances"]:
            for dtype in row.get("dtypes", [None]):
                one = dict(row, dtypes=[dtype]) if dtype else dict(row)
                # Made for an expression, by a compiler that knows no emulated device; others are compiled here.
                if one.pop("runtime", False) and one.get("config", {"expression": True}).get("expression"):
                    continue
                (kernel,) = make_instances.kernels_of(key, dict(family, instances=[one]))
                if chosen(kernel["name"]):
                    rows.append(one)
        family["instances"] = rows
        if not rows:
            del families[key]
    if unused:
        sys.exit(f"{instances}: no kernel is called {', '.join(sorted(unused))}")
    # Every row, whatever chip it is for: the emulated device can be any of them.
    make_instances.write(output, make_instances.outputs(families, [75, 80, 86, 89, 90]))


if __name__ == "__main__":
    main()
