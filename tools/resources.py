#!/usr/bin/env python3
"""Reads ptxas's report of each kernel: fails on spills and local memory, and writes docs/kernels/resources.md.

    resources.py compile [--report-only] [--device-only] -- NVCC ARGUMENTS
        runs the compiler with its arguments, which ask for `ptxas -v`, and keeps what it says of each kernel beside the
        object (OBJECT.ptxas). Fails, and removes the object, on spills, local memory, and remarks of ptxas about lost
        performance (C75xx); with --report-only these are printed. With --device-only the object holds machine code only:
        no host code is compiled, and nothing can link it.
    resources.py table --kernels KERNELS.JSON [--list LIST] --version VERSION [--chips N,...] --page PAGE [--write] REPORTS...
        compares PAGE with the kernels that were built, or writes it. LIST is the output of the program list_kernels; without
        it, threads and shared memory are those of PAGE. REPORTS are the files that `compile` left. Kernels have to be the
        same, but those for other chips than N may be missing; numbers and what `compile` fails on too, unless the page was made by another version of the compiler.
    resources.py --self-test
"""
import argparse
import json
import pathlib
import re
import resource
import subprocess
import sys
import tempfile

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '([^']+)' for 'sm_(\d+)a?'")
FUNCTION = re.compile(r"ptxas info\s*: Function properties for (\S+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"ptxas info\s*: Used (\d+) registers")
STATIC = re.compile(r"(\d+) bytes smem")
LOCAL = re.compile(r"(\d+) bytes lmem")
REMARK = re.compile(r"\(C7\d\d\d\)|Potential Performance Loss")
SECONDS = "seconds of processor:"
CHATTER = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame")


class Usage:
    """One function on one architecture."""

    def __init__(self, symbol, arch):
        self.symbol, self.arch = symbol, arch
        self.registers = self.static_shared = self.stack = self.stores = self.loads = self.local = 0

    def complaints(self):
        found = []
        if self.stores or self.loads:
            found.append(f"spills registers ({self.stores} bytes stored, {self.loads} loaded)")
        if self.stack or self.local:
            found.append(f"uses local memory ({max(self.stack, self.local)} bytes a thread)")
        return found


def parse(text):
    """([Usage], [line]): what ptxas says of each function, and its warnings and remarks."""
    usages, remarks = [], []
    arch, symbol, current = 0, None, None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            symbol, arch = match[1], int(match[2])
        elif match := FUNCTION.search(line):
            current = Usage(match[1], arch)
            usages.append(current)
        elif match := FRAME.search(line):
            if current is None:  # older versions print this line after the entry
                current = Usage(symbol, arch)
                usages.append(current)
            current.stack, current.stores, current.loads = map(int, match.groups())
        elif match := USED.search(line):
            # Called functions are listed between an entry and this line, which belongs to the entry.
            for usage in usages:
                if usage.symbol == symbol and usage.arch == arch:
                    usage.registers = int(match[1])
                    usage.static_shared = int(m[1]) if (m := STATIC.search(line)) else 0
                    usage.local = int(m[1]) if (m := LOCAL.search(line)) else 0
            current = None
        if REMARK.search(line) or re.match(r"ptxas\b.*\b[Ww]arning\s*:", line):
            remarks.append(line.strip())
    return usages, remarks


def waste(text):
    """A line for each thing that fails the build."""
    usages, remarks = parse(text)
    found = [f"{short_name(u.symbol)}, sm_{u.arch}: {complaint}" for u in usages for complaint in u.complaints()]
    return list(dict.fromkeys(found + remarks))


def short_name(symbol):
    """A name of instances.toml if the symbol has one (see make_instances.py), else the symbol."""
    match = re.search(r"9instances(\d+)(\w+)", symbol)
    return match[2][:int(match[1])] if match else symbol


def compile_kernels(arguments, report_only, device_only=False):
    output = pathlib.Path(arguments[arguments.index("-o") + 1]) if "-o" in arguments else None
    command = ["--fatbin" if device_only and argument == "-c" else argument for argument in arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    for line in result.stderr.splitlines():
        if not CHATTER.search(line):
            print(line, file=sys.stderr)
    found = waste(result.stderr)
    for line in found:
        print(f"{'note' if report_only else 'error'}: {line}", file=sys.stderr)
    failed = result.returncode or (1 if found and not report_only else 0)
    if output is not None:
        if failed:
            output.unlink(missing_ok=True)
        elif "-c" in arguments:
            lines = [line for line in result.stderr.splitlines() if CHATTER.search(line) and "Compile time" not in line]
            spent = resource.getrusage(resource.RUSAGE_CHILDREN)
            lines.append(f"{SECONDS} {spent.ru_utime + spent.ru_stime:.1f}")
            output.with_name(output.name + ".ptxas").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return failed


# --- occupancy ---


class Limits:
    """What one SM has (CUDA C++ programming guide, compute capabilities). Shared memory in bytes; from sm_80 on, the
    system takes 1 KB for each CTA."""

    registers = 65536
    register_unit = 256  # a warp's registers are handed out in these
    partitions = 4       # each holds a quarter of the registers and its own warps

    def __init__(self, shared, shared_cta, reserved, shared_unit, warps, ctas):
        self.shared, self.shared_cta, self.reserved = shared * 1024, shared_cta * 1024, reserved
        self.shared_unit, self.warps, self.ctas = shared_unit, warps, ctas


LIMITS = {
    75: Limits(64, 64, 0, 256, 32, 16),
    80: Limits(164, 163, 1024, 128, 64, 32),
    86: Limits(100, 99, 1024, 128, 48, 16),
    87: Limits(164, 163, 1024, 128, 48, 16),
    89: Limits(100, 99, 1024, 128, 48, 24),
    90: Limits(228, 227, 1024, 128, 64, 32),
    100: Limits(228, 227, 1024, 128, 64, 32),
    120: Limits(100, 99, 1024, 128, 48, 24),
}


def round_up(x, unit):
    return -(-x // unit) * unit


def occupancy(arch, registers, shared, threads):
    """(CTAs an SM, what limits them): r registers, s shared memory, w warps, c CTAs. (0, _): it does not run."""
    limits = LIMITS[max(known for known in LIMITS if known <= arch)]  # a chip that is not listed has the limits of the one before
    warps = -(-threads // 32)
    warp_registers = round_up(max(registers, 1) * 32, limits.register_unit)
    warps_of_registers = limits.registers // limits.partitions // warp_registers * limits.partitions
    if shared > limits.shared_cta:
        return 0, "s"
    taken = round_up(shared, limits.shared_unit) + limits.reserved
    candidates = [(limits.ctas, "c"), (limits.warps // warps, "w"), (warps_of_registers // warps, "r")]
    if taken:
        candidates.append((limits.shared // taken, "s"))
    return min(candidates, key=lambda candidate: candidate[0])


# --- the page ---


LITERAL = re.compile(r"L(?:[a-z]|S\w?_|N(?:S\w?_)?(?:\d+[A-Za-z_]\w*?)+E)(n?\d+)E")
MANGLED_TYPE = {"f16": "6__half", "bf16": "13__nv_bfloat16", "f32": "f"}


def is_symbol_of(kernel, symbol):
    """Whether a mangled name is that of a kernel of kernels.json."""
    function = kernel["function"]
    if f"{len(function)}{function}" not in symbol:
        return False
    if "9instances" in symbol:
        return short_name(symbol) == kernel["name"]
    arguments = symbol.split(f"{len(function)}{function}", 1)[1]
    if kernel["type"] and not arguments.startswith("I" + MANGLED_TYPE[kernel["type"]]):
        return False
    values = [-int(v[1:]) if v[0] == "n" else int(v) for v in LITERAL.findall(arguments)]
    expected = kernel["literals"]
    return len(values) == len(expected) and all(e is None or e == v for e, v in zip(expected, values))


def code_on(arch, found, first, last):
    """What a chip runs of a kernel for chips from `first` to `last`: its machine code, or that of an earlier chip of its generation
    (`code_for` of make_instances.py); None where there is neither. found: usage by architecture."""
    able = [a for a in found if a <= arch and a // 10 == arch // 10]
    return found[max(able)] if able and first <= arch <= last else None


def page_of(kernels, listed, reports, version, totals=None):
    """The text of the page. kernels: kernels.json. listed: name -> (threads, dynamic shared memory). reports: unit -> text.
    totals, in place of listed: name -> (threads, shared memory), for a build without host code."""
    usages = {unit: parse(text)[0] for unit, text in reports.items()}
    archs = sorted({u.arch for functions in usages.values() for u in functions})
    families = {}
    for kernel in kernels:
        name = kernel["name"]
        if name not in (listed if totals is None else totals):
            where = "the library's table" if totals is None else "the page; `make resources` rewrites it"
            raise SystemExit(f"{name} is in kernels.json but not in {where}")
        found = {u.arch: u for u in usages.get(kernel["unit"], []) if is_symbol_of(kernel, u.symbol)}
        if not found:
            raise SystemExit(f"{name}: no function in the compiler's report of {kernel['unit']} goes by its name; "
                             f"templates that take their config by value need `fields` in instances.toml")
        static = max(u.static_shared for u in found.values())
        threads, dynamic = listed[name] if totals is None else (totals[name][0], totals[name][1] - static)
        cells = []
        for arch in archs:
            usage = code_on(arch, found, *kernel["chips"])
            if not usage:
                cells.append("PTX" if kernel["chips"][0] <= arch <= kernel["chips"][1] else "")
                continue
            ctas, limit = occupancy(arch, usage.registers, usage.static_shared + dynamic, threads)
            cell = f"{usage.registers}, {ctas}{limit}" if ctas else f"{usage.registers}, –"
            if spilled := usage.stores + usage.loads + usage.stack:
                cell += f", {spilled} B spilled"
            cells.append(cell)
        families.setdefault(kernel["family"], []).append(
            f"| {name} | {threads} | {static + dynamic:,} | " + " | ".join(cells) + " |")
    extra = set(listed or {}) - {k["name"] for k in kernels}
    if extra:
        raise SystemExit(f"the library's table has kernels that kernels.json lacks: {', '.join(sorted(extra))}")

    lines = ["# Registers, shared memory and occupancy of the CUDA kernels", "",
             "Written by `make resources` (`tools/resources.py`) from what ptxas says; a test compares it with the build.",
             f"Compiler: nvcc {version}.", "",
             "Under an architecture: registers a thread, then CTAs that fit one SM and what limits them: **r**egisters,",
             "**s**hared memory, **w**arps, **c**TA slots. Chips of one generation run the same machine code unless a kernel has its own.",
             "A dash: its shared memory is more than a CTA may have there, so that the plan takes another kernel. PTX: no machine code",
             "for it, the driver compiles the PTX. Empty: not for that chip. No kernel spills or uses local memory, on which the build",
             "fails. Shared memory in bytes (static and dynamic) of one CTA.", ""]
    for family, rows in families.items():
        lines += [f"## {family}", "",
                  "| kernel | threads | shared memory | " + " | ".join(f"sm_{a}" for a in archs) + " |",
                  "|---|---|---|" + "---|" * len(archs), *rows, ""]
    return "\n".join(lines)


def rows_of(page):
    """({kernel: {column: cell}}, version) of a page."""
    rows, header = {}, []
    for line in page.splitlines():
        cells = [c.strip() for c in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] == "kernel":
            header = cells
        elif cells and not cells[0].startswith("---"):
            rows[cells[0]] = dict(zip(header, cells))
    version = re.search(r"Compiler: nvcc (\S+?)\.?$", page, re.MULTILINE)
    return rows, version[1] if version else "unknown"


def differences(committed, built, chips=()):
    """(errors, notes) of a committed page beside what was built, perhaps for fewer architectures. chips: those that it was built for, which
    may run machine code of others; without them, those whose code there is."""
    old, old_version = rows_of(committed)
    new, new_version = rows_of(built)
    errors = [f"{name} was built but is not on the page" for name in new if name not in old]
    # A build for fewer architectures lacks the kernels of others.
    columns = {f"sm_{chip}" for chip in chips} or {column for cells in new.values() for column in cells if column.startswith("sm_")}
    errors += [f"{name} is on the page but was not built" for name in old
               if name not in new and any(old[name].get(column) for column in columns)]
    changed = []
    for name in new.keys() & old.keys():
        for column, cell in new[name].items():
            # A build for fewer architectures may have machine code where the page has PTX, or none.
            if column in old[name] and old[name][column] != cell and "PTX" not in (old[name][column], cell):
                changed.append(f"{name}, {column}: the page says {old[name][column]}, the build {cell}")
    notes = []
    if changed and old_version != new_version:
        notes = [f"{len(changed)} numbers differ: the page is of nvcc {old_version}, this build of {new_version}"]
    else:
        errors += sorted(changed)
    return errors, notes


def table(arguments):
    kernels = json.loads(arguments.kernels.read_text(encoding="utf-8"))
    listed, totals = {}, None
    if arguments.list:
        for line in arguments.list.read_text(encoding="utf-8").splitlines():
            name, threads, shared = line.split("\t")
            listed[name] = (int(threads), int(shared))
    else:
        rows = rows_of(arguments.page.read_text(encoding="utf-8"))[0]
        totals = {name: (int(row["threads"]), int(row["shared memory"].replace(",", ""))) for name, row in rows.items()}
    reports = {}
    for path in arguments.reports:
        reports[path.name.removesuffix(".cu.o.ptxas")] = path.read_text(encoding="utf-8")
    page = page_of(kernels, listed, reports, arguments.version, totals)
    if arguments.write:
        arguments.page.write_text(page, encoding="utf-8")
        seconds = sorted((float(text.rpartition(SECONDS)[2]), unit) for unit, text in reports.items())
        slowest = ", ".join(f"{unit} {spent:.0f} s" for spent, unit in reversed(seconds[-5:]))
        print(f"{arguments.page}: {len(kernels)} kernels, {sum(s for s, _ in seconds):.0f} s of processor; the slowest units: "
              f"{slowest}")
        return 0
    if not arguments.page.exists():
        print(f"{arguments.page} is missing; `make resources` writes it")
        return 1
    committed = arguments.page.read_text(encoding="utf-8")
    errors, notes = differences(committed, page, arguments.chips)
    wasteful = [line for text in reports.values() for line in waste(text)]
    (errors if rows_of(committed)[1] == arguments.version else notes).extend(wasteful)
    for line in errors + notes:
        print(line)
    hint = "; `make resources` rewrites the page" if errors else ""
    print(f"{len(kernels)} kernels compared, {len(errors)} differences{hint}")
    return 1 if errors else 0


# --- self-test ---

GOOD = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3fwdIXtl3CfgLi64ELb1EEEEvPfi' for 'sm_80'
ptxas info    : Function properties for _Z3fwdIXtl3CfgLi64ELb1EEEEvPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 2.616 ms
ptxas info    : Compiling entry function '_Z3fwdIXtl3CfgLi64ELb1EEEEvPfi' for 'sm_90'
ptxas info    : Function properties for _Z3fwdIXtl3CfgLi64ELb1EEEEvPfi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
"""


def self_test():
    wrong = 0

    def expect(what, condition):
        nonlocal wrong
        if not condition:
            print(f"wrong: {what}")
            wrong += 1

    usages, remarks = parse(GOOD)
    expect("functions", [(u.arch, u.registers, u.static_shared) for u in usages] == [(80, 168, 16), (90, 128, 0)])
    expect("no remarks", not remarks and not waste(GOOD))
    bad = [
        ("0 bytes spill stores, 0", "8 bytes spill stores, 0", "spills"),
        ("0 bytes spill loads", "4 bytes spill loads", "spills"),
        ("0 bytes stack frame", "32 bytes stack frame", "local memory"),
        ("16 bytes smem", "16 bytes smem, 24 bytes lmem", "local memory"),
        ("ptxas info    : Compile time", "ptxas info    : (C7510) Potential Performance Loss: serialized\nptxas", "C7510"),
        ("ptxas info    : Compile time", "ptxas warning : Value of threads per SM is out of range\nptxas", "out of range"),
        ("ptxas info    : Used 168", "ptxas info    : Function properties for helper\n    8 bytes stack frame, 0 bytes spill "
         "stores, 0 bytes spill loads\nptxas info    : Used 168", "helper"),
    ]
    for old, new, message in bad:
        assert old in GOOD
        found = waste(GOOD.replace(old, new, 1))
        expect(f"{new!r} gave {found}", any(message in line for line in found))

    # The launcher itself, around programs that say what a compiler would.
    with tempfile.TemporaryDirectory() as folder:
        for name, text, status, fails in [("good", GOOD, 0, False), ("broken", GOOD, 2, True),
                                          ("spills", GOOD.replace("0 bytes spill loads", "4 bytes spill loads"), 0, True)]:
            output = pathlib.Path(folder) / f"{name}.o"
            program = (f"import pathlib, sys; pathlib.Path({str(output)!r}).touch(); sys.stderr.write({text!r}); "
                       f"sys.exit({status})")
            run = subprocess.run([sys.executable, __file__, "compile", "--", sys.executable, "-c", program, "-o", str(output)],
                                 stderr=subprocess.PIPE, text=True, check=False)
            expect(f"status of {name}", bool(run.returncode) == fails)
            expect(f"object of {name}", output.exists() != fails)
            expect(f"time of {name}", fails or SECONDS in pathlib.Path(f"{output}.ptxas").read_text("utf-8"))
            expect(f"report of {name}", fails or parse(pathlib.Path(f"{output}.ptxas").read_text("utf-8"))[0])
            expect(f"quiet about {name}", "Used 168" not in run.stderr)

    # NVIDIA's occupancy calculator gives these.
    for arch, registers, shared, threads, ctas, limit in [
            (80, 168, 0, 128, 3, "r"), (80, 128, 48 * 1024, 128, 3, "s"), (90, 255, 100 * 1024, 256, 1, "r"),
            (80, 32, 0, 1024, 2, "w"), (86, 32, 0, 32, 16, "c"), (75, 64, 64 * 1024, 256, 1, "s"),
            (86, 128, 100 * 1024, 128, 0, "s"), (89, 40, 0, 256, 6, "w"), (90, 64, 0, 512, 2, "r")]:
        result = occupancy(arch, registers, shared, threads)
        expect(f"occupancy of sm_{arch}, {registers} registers, {shared} bytes, {threads} threads: {result}",
               result == (ctas, limit))

    kernel = {"name": "fwd_f16_d64", "family": "fwd", "unit": "fwd_f16_d64", "chips": [80, 1000], "function": "fwd", "type": None,
              "literals": [64, 1]}
    expect("symbol", is_symbol_of(kernel, "_Z3fwdIXtl3CfgLi64ELb1EEEEvPfi"))
    expect("symbol of another", not is_symbol_of(kernel, "_Z3fwdIXtl3CfgLi64ELb0EEEEvPfi"))
    expect("symbol with a type", is_symbol_of({**kernel, "type": "f16", "literals": [-3, None]},
                                              "_ZN5fovea4cuda3fwdI6__halfXtlNS0_3CfgELin3ELNS_5DTypeE1EEEEEvi"))
    expect("symbol with another type", not is_symbol_of({**kernel, "type": "bf16"}, "_Z3fwdI6__halfXtl3CfgLi64ELb1EEEEvPfi"))
    named = "_ZN5fovea4cuda3fwdI6__halfL_ZNS0_9instances11fwd_f16_d64EEEEvi"
    expect("symbol with a name", is_symbol_of(kernel, named) and not is_symbol_of({**kernel, "name": "fwd_f16_d6"}, named))

    expect("code of its generation", [code_on(arch, {75: "a", 80: "b", 89: "c"}, 75, 90) for arch in (75, 80, 86, 89, 90)] ==
           ["a", "b", "b", "c", None] and code_on(86, {80: "b"}, 80, 80) is None)
    page = page_of([kernel], {"fwd_f16_d64": (128, 49152)}, {"fwd_f16_d64": GOOD}, "13.0.88")
    expect("row", "| fwd_f16_d64 | 128 | 49,168 | 168, 3r | 128, 4r |" in page)
    expect("same page", differences(page, page) == ([], []))
    expect("page without host code", page == page_of([kernel], {}, {"fwd_f16_d64": GOOD}, "13.0.88", {"fwd_f16_d64": (128, 49168)}))
    expect("fewer architectures", differences(page, page_of([kernel], {"fwd_f16_d64": (128, 49168)}, {
        "fwd_f16_d64": GOOD[GOOD.index("ptxas info    : Compile time"):]}, "13.0.88")) == ([], []))
    expect("changed number", len(differences(page.replace("168, 3r", "170, 2r"), page)[0]) == 1)
    expect("changed number of another version",
           [len(x) for x in differences(page.replace("168, 3r", "170, 2r").replace("13.0.88", "13.1.1"), page)] == [0, 1])
    expect("kernel for other chips", differences(page + "| other | 128 | 0 | 32, 1s | |\n", page)[0] and not differences(
        page + "| other | 128 | 0 | 32, 1s | |\n", page_of([kernel], {"fwd_f16_d64": (128, 49168)}, {
            "fwd_f16_d64": GOOD[GOOD.index("ptxas info    : Compile time"):]}, "13.0.88"))[0])
    expect("kernel for the chip alone whose code others run",
           not differences(page + "| other | 128 | 0 |  | 128, 4r |\n", page, (86, 89))[0] and
           differences(page + "| other | 128 | 0 |  | 128, 4r |\n", page, (90,))[0])
    expect("missing kernel", len(differences(page.replace("fwd_f16_d64", "fwd_f16_d63"), page)[0]) == 2)
    print(f"resources.py: {len(bad)} bad outputs tried, {wrong} wrong")
    return 1 if wrong else 0


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:2] == ["compile"] and "--" in sys.argv:
        split = sys.argv.index("--")
        options = sys.argv[2:split]
        return compile_kernels(sys.argv[split + 1:], "--report-only" in options, "--device-only" in options)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("table")
    for option in ("--kernels", "--list", "--page"):
        command.add_argument(option, type=pathlib.Path, required=option != "--list")
    command.add_argument("--version", required=True)
    command.add_argument("--chips", default=(), type=lambda text: tuple(int(chip) for chip in text.split(",")))
    command.add_argument("--write", action="store_true")
    command.add_argument("reports", nargs="+", type=pathlib.Path)
    return table(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
