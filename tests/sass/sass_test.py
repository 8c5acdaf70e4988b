#!/usr/bin/env python3
"""Reads the machine code of kernels whose speed depends on whether the compiler proves their loop warp-uniform.

    sass_test.py --list KERNELS.JSON --family FAMILY... [--tools FOLDER] --objects OBJECT...
        all kernels of these families that the list has, which are to be in the object files
    sass_test.py --self-test

Between the first and the last HGMMA of a kernel (its products, PTX: wgmma.mma_async) lies its loop over blocks of keys. If the compiler
takes that loop for one that all lanes go through together, nothing in it makes lanes meet (BSSY, WARPSYNC); if not, all of
it is slower by a tenth, and nothing says so (docs/kernels/fwd_sm90.md, "Traps of the compiler"). Exit status 77: neither
cuobjdump nor nvdisasm is here.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

NO_TOOLS = 77
FORBIDDEN = {
    "BSSY": "a place where lanes meet again",
    "WARPSYNC": "a wait for the other lanes",
    "LDL": "a load of local memory",
    "STL": "a store to local memory",
}
SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,]+),", re.MULTILINE)
INSTANCE = re.compile(r"9instances(\d+)(\w+)")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")


def find(tool, folder):
    places = [folder, os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = [pathlib.Path(place) / "bin" / tool for place in places if place]
    return next((str(path) for path in paths if os.access(path, os.X_OK)), shutil.which(tool))


def kernels(text):
    """What nvdisasm prints of a file: [(mangled name, [operation])]."""
    parts = SECTION.split(text)
    return [(name, INSTRUCTION.findall(code)) for name, code in zip(parts[1::2], parts[2::2], strict=True)]


def problems(operations):
    """What is wrong with one kernel, in words."""
    products = [i for i, operation in enumerate(operations) if operation == "HGMMA"]
    if not products:
        return ["no HGMMA"]
    loop = operations[products[0] : products[-1]]
    return [f"{loop.count(operation)} {operation} ({what}) between its products"
            for operation, what in FORBIDDEN.items() if operation in loop]  # fmt: skip


def name_of(symbol):
    """The name of a kernel in the list of instances, of its mangled one; '' where there is none."""
    match = INSTANCE.search(symbol)
    return match[2][: int(match[1])] if match else ""


def check(path, wanted, cuobjdump, nvdisasm):
    """Those of the wanted kernels that an object file has, and what is wrong with them."""
    looked, wrong = set(), []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump, "--extract-elf", "all", str(path.resolve())], cwd=folder, check=True, capture_output=True)
        for cubin in sorted(pathlib.Path(folder).glob("*sm_90a*.cubin")):
            done = subprocess.run([nvdisasm, "--print-code", str(cubin)], check=True, capture_output=True, text=True)
            for name, operations in kernels(done.stdout):
                if name_of(name) not in wanted:
                    continue
                looked.add(name_of(name))
                wrong += [f"{path.name}: {name}: {problem}" for problem in problems(operations)]
    return looked, wrong


def self_test():
    code = ("\t.section\t.text.{name},\"ax\",@progbits\n.text.{name}:\n        /*0000*/  {before} R1 ;\n"
            "        /*0010*/                   HGMMA.64x128x16.F32.BF16 R24, R152, gdesc[UR16], RZ, !UPT ;\n"
            "        /*0020*/              @!P0 {inside} R2, P1 ;\n"
            "        /*0030*/                   HGMMA.64x128x16.F32.BF16 R88, R184, gdesc[UR8].tnspB, R88 ;\n")  # fmt: skip
    good, bad = code.format(name="good", before="BSSY", inside="FADD"), code.format(name="bad", before="MOV", inside="BSSY")
    found = {name: problems(operations) for name, operations in kernels(good + bad)}
    assert found["good"] == [], found
    assert len(found["bad"]) == 1 and found["bad"][0].startswith("1 BSSY"), found
    assert problems(["FADD"]) == ["no HGMMA"]
    assert name_of("_ZN5fovea4cuda8fwd_sm90INS0_9instances17fwd_sm90_bf16_d64EEEvNS0_14TmaForwardArgsE") == "fwd_sm90_bf16_d64"
    assert name_of("_ZN5fovea4cuda4moveEv") == ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=pathlib.Path, metavar="FOLDER", help="its bin/ may have cuobjdump and nvdisasm")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--list", type=pathlib.Path, metavar="KERNELS.JSON", help="kernels.json of the build")
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--objects", nargs="+", type=pathlib.Path, metavar="OBJECT", default=[])
    args = parser.parse_args()
    if args.self_test:
        self_test()
        return 0
    cuobjdump, nvdisasm = find("cuobjdump", args.tools), find("nvdisasm", args.tools)
    if cuobjdump is None or nvdisasm is None:
        print("neither cuobjdump nor nvdisasm here: tools/setup.sh disassembler installs them")
        return NO_TOOLS
    # cuobjdump starts nvdisasm by name for some of what it prints.
    os.environ["PATH"] = f"{pathlib.Path(nvdisasm).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    units = {kernel["name"]: kernel["unit"] for kernel in json.loads(args.list.read_text(encoding="utf-8")) if kernel["family"] in args.family}
    wanted = units.keys()
    objects = [path for path in args.objects if path.name.removesuffix(".cu.o") in units.values()]
    looked, wrong = set(), []
    for path in objects:
        names, found = check(path, wanted, cuobjdump, nvdisasm)
        looked |= names
        wrong += found
    wrong += [f"{name}: in none of the files" for name in sorted(wanted - looked)]
    print("\n".join([*wrong, f"{len(looked)} kernels of {len(objects)} files, {len(wrong)} findings"]))
    return 1 if wrong or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
