#!/usr/bin/env python3
"""Runs the parts of `make test`, two at a time, and prints a table of what each took.

    run_tests.py [--rotation 1|2|3|4|5|all] [PART...]     all parts without names
    run_tests.py --list
    run_tests.py --self-test

All is too long for every run, so it is divided into five rotations. A run takes one of them, by the number of commits of HEAD: six
commits in a row take all but the tests that have thirds (tests/CMakeLists.txt), three in a row compile the kernels for every
chip. `make test-all` takes all five at once, and all thirds.

Each part is a target of the Makefile, `part-NAME`, and its output goes to build/test-logs/NAME.log. Downloads start at once
and use no place of the two, so that they go on while compilers run. Exit status 0: every part passed.
"""
import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "test-logs"
ROTATIONS = (1, 2, 3, 4, 5)
TURNS = (1, 2, 3, 5, 4, 3)
OLDER_CHIPS = (75, 80, 86, 89)
CHIPS = {1: OLDER_CHIPS, 3: (90,), 5: OLDER_CHIPS}  # whose kernels a rotation compiles: each every three commits
AT_A_TIME = 2


@dataclasses.dataclass
class Part:
    name: str
    what: str
    has: dict  # rotation -> what it has of the part
    needs: tuple = ()
    download: bool = False


ABOUT_OLDER_CHIPS = "sm_75 to sm_89; the ladder"
PARTS = [
    Part("packages", "compiler, libraries, nvcc, disassembler", dict.fromkeys(ROTATIONS, ""), download=True),
    Part("get-clang", "packages: clang with sanitizers and fuzzer", {1: "", 5: ""}, ("packages",), download=True),
    Part("get-python", "PyTorch, JAX, transformers from PyPI", {2: "", 3: ""}, ("get-clang",), download=True),
    Part("get-browser", "packages: Chromium; Selenium from PyPI", {5: ""}, ("get-python",), download=True),
    Part("build", "libraries, programs and tests",
         {2: "all but CUDA", 3: "CUDA kernels for sm_90, linked, and what meets CUDA", 4: "emulated kernels"}, ("packages",)),
    Part("tests", "ctest: host, emulated kernels, conformance, command line, docs",
         {2: "every suite on CPUs", 3: "machine code for sm_90, ranks, command line",
          4: "kernels and rungs on the emulated device"}, ("build",)),
    Part("sanitizers", "errors, ABI, conformance under ASan and UBSan; fuzzing", {1: "the suites", 5: "fuzzing"}, ("get-clang",)),
    Part("python", "the Python package beside PyTorch and JAX", {2: "all but CUDA", 3: "kernels made ahead of time"},
         ("get-python", "build")),
    Part("report", "the page of `fovea report` in a browser", {5: "all of it"}, ("get-browser",)),
    Part("threads", "one plan from many threads, ThreadSanitizer", {5: "all of it"}, ("packages",)),
    Part("chips", "CUDA kernels for further chips, machine code only",
         {1: ABOUT_OLDER_CHIPS, 5: ABOUT_OLDER_CHIPS}, ("packages",)),
]


def git(*arguments):
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""


def number_of_run():
    """(number, why): the number of commits, or the date where there is no history to count."""
    commits = git("rev-list", "--count", "HEAD")
    if commits and git("rev-parse", "--is-shallow-repository") == "false":
        return int(commits), f"{commits} commits"
    return datetime.date.today().toordinal(), "today's date: no full history here"


def choose_rotation():
    """(rotation, why)"""
    number, why = number_of_run()
    return TURNS[number % len(TURNS)], why


def choose_third():
    """0, 1 or 2: which third of its longest tests a rotation takes. A rotation that is taken again has the next one."""
    return number_of_run()[0] // 3 % 3


class Run:
    """One part while it runs and afterwards."""

    def __init__(self, part, rotations):
        self.part, self.rotations = part, rotations
        self.state, self.seconds, self.processor, self.skipped = "waiting", 0.0, 0.0, []

    def execute(self):
        log = LOGS / f"{self.part.name}.log"
        start = time.monotonic()
        with log.open("w", encoding="utf-8") as output:
            which = ["ROTATION=all"] if len(self.rotations) > 1 else [f"ROTATION={self.rotations[0]}", f"THIRD={choose_third()}"]
            process = subprocess.Popen(["make", "--no-print-directory", f"part-{self.part.name}", *which],
                                       cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        self.processor = usage.ru_utime + usage.ru_stime
        self.seconds = time.monotonic() - start
        text = log.read_text(encoding="utf-8", errors="replace")
        self.skipped = skipped_in(text)
        self.state = "passed" if process.returncode == 0 else "FAILED"
        print(f"{self.part.name}: {self.state}, {self.seconds:.0f} s", flush=True)
        if process.returncode != 0:
            print(text[-20000:], flush=True)


def skipped_in(text):
    """Names of ctest's entries that did not run, and pytest's counts."""
    names = re.findall(r"^\s*\d+ - (\S+) \(Skipped\)", text, re.MULTILINE)
    return names + [f"{count} of pytest" for count in re.findall(r"\b(\d+) skipped\b", text)]


def run_all(parts, rotations):
    """Runs the parts in the order of the list as far as what they need allows; stops starting after a failure."""
    runs = {part.name: Run(part, rotations) for part in parts}
    changed = threading.Condition()

    def execute(run):
        run.execute()
        with changed:
            changed.notify_all()

    with changed:
        while True:
            states = [run.state for run in runs.values()]
            failed = "FAILED" in states
            for run in runs.values():
                busy = sum(r.state == "running" and not r.part.download for r in runs.values())
                ready = all(runs[n].state == "passed" for n in run.part.needs if n in runs)
                if run.state == "waiting" and ready and not failed and (run.part.download or busy < AT_A_TIME):
                    run.state = "running"
                    threading.Thread(target=execute, args=(run,)).start()
            if not any(run.state == "running" for run in runs.values()):
                break
            changed.wait()
    return list(runs.values())


def table(runs, wall):
    """The lines of the table: seconds by the clock, and of processor, of each part."""
    lines = [f"{'part':<12} {'result':<8} {'seconds':>8} {'processor':>10}  what"]
    for run in runs:
        state = "not run" if run.state == "waiting" else run.state
        lines.append(f"{run.part.name:<12} {state:<8} {run.seconds:>8.0f} {run.processor:>10.0f}  {run.part.what}")
    total = sum(run.processor for run in runs)
    lines.append(f"{'all':<12} {'':<8} {wall:>8.0f} {total:>10.0f}  parts overlap, so their seconds add up to more")
    return lines


def parts_of(parts, rotations):
    """The parts that at least one of the rotations has."""
    return [part for part in parts if set(part.has) & set(rotations)]


def rotation_lines(parts, rotations, why):
    lines = [f"Rotation {', '.join(map(str, rotations))} of {len(ROTATIONS)} ({why}; "
             f"ROTATION={'|'.join(map(str, ROTATIONS))}|all chooses):"]
    for part in parts:
        for what in dict.fromkeys(filter(None, part.has.values())):
            verb = "runs" if any(part.has.get(rotation) == what for rotation in rotations) else "left to another run"
            lines.append(f"  {part.name}: {what}: {verb}")
    return lines


def self_test():
    assert skipped_in("  12 - gpu.runs (Skipped)\n 13 - io (Failed)\n== 8 passed, 3 skipped in 2 s\n") == ["gpu.runs", "3 of pytest"]
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for index, part in enumerate(PARTS):
        assert set(part.needs) <= set(names[:index]), part.name
        assert part.has and set(part.has) <= set(ROTATIONS), part.name
        # What a part needs is in the same rotation, but for the order of downloads.
        assert part.download or all(set(part.has) <= set(PARTS[names.index(need)].has) for need in part.needs), part.name
    rotation, _ = choose_rotation()
    assert rotation in ROTATIONS
    assert set(TURNS) == set(ROTATIONS), "a cycle has every rotation, so every part"
    assert choose_third() in range(3)
    for rotation in ROTATIONS:
        turns = {i // 3 % 3 for i in range(9 * len(TURNS)) if TURNS[i % len(TURNS)] == rotation}
        assert turns == {0, 1, 2}, f"rotation {rotation} has the thirds {sorted(turns)}"
    for first in range(len(TURNS)):
        chips = {chip for turn in range(first, first + 3) for chip in CHIPS.get(TURNS[turn % len(TURNS)], ())}
        assert chips == {75, 80, 86, 89, 90}, f"the commits {first} to {first + 2} of a cycle compile {sorted(chips)}"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in names:
        assert f"\npart-{name}:" in makefile, f"the Makefile has no target part-{name}"
    compiled = re.search(r"^part-chips:\n.*FOVEA_CUDA_ARCHITECTURES=\"([\d;]+)\"", makefile, re.MULTILINE)[1]
    with_chips = next(part.has for part in PARTS if part.name == "chips")
    assert OLDER_CHIPS == tuple(map(int, compiled.split(";")))
    assert {rotation for rotation, chips in CHIPS.items() if chips == OLDER_CHIPS} == set(with_chips)
    assert {rotation for rotation, chips in CHIPS.items() if 90 in chips} == {3}, "rotation 3 builds the preset test-cuda"
    presets = json.loads((ROOT / "CMakePresets.json").read_text(encoding="utf-8"))["configurePresets"]
    trees = {preset["name"]: preset.get("cacheVariables", {}) for preset in presets}
    assert trees["test-cuda"].get("FOVEA_CUDA_ARCHITECTURES", trees["test-all"]["FOVEA_CUDA_ARCHITECTURES"]) == "90"
    run = Run(PARTS[0], (1,))
    run.state, run.seconds, run.processor = "passed", 1.6, 12.4
    lines = table([run, Run(PARTS[1], (1,))], 3)
    assert lines[1].split()[:4] == ["packages", "passed", "2", "12"] and "not run" in lines[2] and lines[3].split()[:3] == ["all", "3", "12"]
    lines = rotation_lines(PARTS, (1,), "5 commits")
    assert "  chips: sm_75 to sm_89; the ladder: runs" in lines and "  build: emulated kernels: left to another run" in lines
    assert "  chips: sm_75 to sm_89; the ladder: left to another run" in rotation_lines(PARTS, (2,), "")
    assert [part.name for part in parts_of(PARTS, (3,)) if part.name in ("build", "chips")] == ["build"]
    assert parts_of(PARTS, ROTATIONS) == PARTS
    assert all(parts_of(PARTS, (rotation,)) for rotation in ROTATIONS)
    print("run_tests.py: nothing wrong")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotation", default="", help="1, 2, 3, 4, 5 or all; without it, from the number of commits")
    parser.add_argument("--list", action="store_true", help="the parts and what each is")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("parts", nargs="*", metavar="PART")
    arguments = parser.parse_args()
    if arguments.self_test:
        self_test()
        return 0
    if arguments.list:
        print("\n".join(f"{part.name:<12} {part.what}" for part in PARTS))
        return 0
    known = {part.name for part in PARTS}
    if unknown := [name for name in arguments.parts if name not in known]:
        parser.error(f"part: got {unknown[0]!r}, expected one of {', '.join(sorted(known))}")
    parts = [part for part in PARTS if not arguments.parts or part.name in arguments.parts]
    if arguments.rotation == "all":
        rotations, why = ROTATIONS, "all, as asked"
    elif arguments.rotation in map(str, ROTATIONS):
        rotations, why = (int(arguments.rotation),), "as asked"
    elif not arguments.rotation:
        rotation, why = choose_rotation()
        rotations = (rotation,)
    else:
        parser.error(f"--rotation: got {arguments.rotation!r}, expected 1, 2, 3, 4, 5 or all")

    LOGS.mkdir(parents=True, exist_ok=True)
    print("\n".join(rotation_lines(parts, rotations, why)), flush=True)
    parts = parts_of(parts, rotations)
    start = time.monotonic()
    runs = run_all(parts, rotations)
    print("\n".join(table(runs, time.monotonic() - start)))
    if skipped := [f"{run.part.name}: {', '.join(run.skipped)}" for run in runs if run.skipped]:
        print("Skipped (the logs in build/test-logs say why):\n  " + "\n  ".join(skipped))
    return 0 if all(run.state == "passed" for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
