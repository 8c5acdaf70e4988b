#!/usr/bin/env python3
"""Writes the translation units of chosen kernels, as tools/make_instances.py does for all.

    select_instances.py INSTANCES OUTPUT [PATTERN...]

A kernel is chosen when one of the patterns (of fnmatch, as in "fwd_sm80_*_d64*") matches its name; all without patterns.
A pattern that matches nothing is a mistake.
"""
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import make_instances  # noqa: E402


def compiled_here(rows):
    """Without rows made for an expression, by a compiler that knows no emulated device. Others that are made at run time are made here."""
    for row in rows:
        if not (row.get("runtime", False) and row.get("config", {"expression": True}).get("expression")):
            yield {name: value for name, value in row.items() if name != "runtime"}


def main():
    instances, output, patterns = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    try:
        families = make_instances.families_of(instances)
        families = {key: dict(family, instances=list(compiled_here(family["instances"]))) for key, family in families.items()}
        families = make_instances.picked(families, patterns)
        # Without libraries, whose kernels are for the same chips: kernels of emulated chips are compiled alike.
        families = {key: {name: value for name, value in family.items() if name != "library"} for key, family in families.items()}
    except make_instances.Mistake as mistake:
        sys.exit(f"{instances}: {mistake}")
    # Every row, whatever chip it is for: the emulated device can be any of them.
    make_instances.write(output, make_instances.outputs(families, [75, 80, 86, 89, 90]))


if __name__ == "__main__":
    main()
