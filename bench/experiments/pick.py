#!/usr/bin/env python3
"""Writes a list of a few kernels of the library, and of variants of them, which compile in a minute or two.

    python3 bench/experiments/pick.py LIST.toml PATTERN... [--add FAMILY ROW]...

PATTERN chooses kernels by their names (fnmatch). ROW is a row of instances.toml, which comes before the others of its family:

    python3 bench/experiments/pick.py build/list.toml 'bwd_sm90_bf16_d128*' 'fwd_sm90_bf16_d128' 'bwd_p*process_bf16' clear_counter \\
        'fwd_sm80_bf16_d128_general' 'bwd_sm80_bf16_d128_general' \\
        --add bwd_sm90 '{dtypes = ["bf16"], head_dim = 128, variant = "three", terms = "plain", config = {head_dim = 128, head_dim_v = 128, tile_m = 64, q_stages = 3, do_stages = 3, one_gradient = true}}'
    cmake --preset cuda-dev -B build/picked -DFOVEA_INSTANCES=$PWD/build/list.toml -DFOVEA_CUDA_ARCHITECTURES=90 -DFOVEA_CUDA_STRICT=OFF

A backward is timed behind a forward, and a plan holds kernels for any pointers: so much has to be in the list (README.md).
"""

import argparse
import json
import pathlib
import sys
import tomllib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))
import make_instances  # noqa: E402

INSTANCES = ROOT / "src/cuda/kernels/instances.toml"


def toml_of(value: Any) -> str:
    """A value in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_of(x)}" for key, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)  # strings, numbers and booleans are the same in both


def list_of(families: dict[str, Any]) -> str:
    text = ""
    for key, family in families.items():
        text += f"[{key}]\n"
        text += "".join(f"{name} = {toml_of(value)}\n" for name, value in family.items() if name != "instances")
        text += "instances = [\n" + "".join(f"  {toml_of(row)},\n" for row in family["instances"]) + "]\n\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=pathlib.Path, metavar="LIST.toml")
    parser.add_argument("patterns", nargs="+", metavar="PATTERN")
    parser.add_argument("--add", nargs=2, action="append", default=[], metavar=("FAMILY", "ROW"))
    options = parser.parse_args()
    try:
        known = make_instances.families_of(INSTANCES)
        families = make_instances.picked(known, options.patterns)
        for key, row in reversed(options.add):
            if key not in known:
                sys.exit(f"pick.py: --add: got family {key}, expected one of {', '.join(known)}")
            rows = families.get(key, {"instances": []})["instances"]
            families[key] = dict(known[key], instances=[tomllib.loads(f"row = {row}")["row"], *rows])
        # What is left of the families of a library may be for different chips.
        families = {key: {name: x for name, x in family.items() if name != "library"} for key, family in families.items()}
        make_instances.outputs(families, [75, 80, 86, 89, 90])  # which says what is wrong with a row
    except (make_instances.Mistake, ValueError) as mistake:
        sys.exit(f"pick.py: {mistake}")
    options.list.write_text(list_of(families), encoding="utf-8")


if __name__ == "__main__":
    main()
