#!/usr/bin/env python3
"""Tests and measures the ggml backend in an unchanged llama.cpp, which it loads from PyPI and builds in build/llama.

    llama.py test                      builds; ggml's own tests of FLASH_ATTN_EXT, masks of real models, foreign versions of ggml
    llama.py bench [--long]            single operations, llama-bench, logits and perplexity of a text, with and without Fovea;
             [--parts PART,PART]       --long: 16,384 tokens too; it fails where logits or perplexities differ
             [--rounds N] [--rows TEXT] [--chunks N]
    llama.py versions                  builds the ggml of other packages: it is served, or declines the library in one line
    llama.py --self-test               checks the counting on a few lines

Results are written to --output FILE. It needs pip, a C++ compiler, CMake and ninja; 77 MB are loaded, and 240 MB of a model for the
perplexity; 3 GB are written. Other folders: --build FOLDER.
"""
import argparse
import array
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

import perplexity

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.append(str(ROOT / "bench"))
from sources import sources_hash  # noqa: E402

PACKAGE = "llama_cpp_python-0.3.36"
# Other packages: PyPI's hash, and whether their ggml can load the library that is built for the one above.
OTHERS = {"0.3.35": ("1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12", True),
          "0.3.12": ("0c977101a46ce6fa363e63a0b33413f29deab9772be24a6c551458fc386f4725", False)}

# Flags of /proc/cpuinfo and ggml's options. A library that ggml loads cannot be built with -march=native. AMX is left out: some virtual
# machines show its flags and refuse its instructions for int8.
FEATURES = {"sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx512vl": "AVX512",
            "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16"}
FOUR_TYPES = {"f16", "bf16", "f32", "q8_0"}
LEAST_SHARE = 0.95  # of the cases of these types that are taken
# Flags of /proc/cpuinfo that a result tells of.
ISA = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def run(*command, **more):
    print("+", " ".join(str(part) for part in command), flush=True)
    return subprocess.run([str(part) for part in command], check=True, **more)


def quiet(log, *command):
    """Runs a command whose output goes to a file that is shown when it fails."""
    with open(log, "w", encoding="utf-8") as out:
        try:
            run(*command, stdout=out, stderr=subprocess.STDOUT)
        except subprocess.CalledProcessError:
            print("\n".join(pathlib.Path(log).read_text(encoding="utf-8").splitlines()[-40:]))
            raise


class Llama:
    """The package in a folder, and what is built of it."""

    def __init__(self, folder):
        self.folder = folder
        self.source = folder / PACKAGE / "vendor" / "llama.cpp"
        self.binaries = folder / "llama" / "bin"
        self.fovea = folder / "fovea"
        self.backend = self.fovea / "lib" / "libggml-fovea.so"

    def fetch(self, package=PACKAGE, requirement=HERE / "requirements.txt"):
        if (self.folder / package).exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary",
            "llama_cpp_python", "--require-hashes", "--requirement", requirement, "--dest", self.folder)
        with tarfile.open(self.folder / f"{package}.tar.gz") as archive:
            archive.extractall(self.folder, filter="data")

    def build(self, *targets, jobs):
        self.build_of(self.source, self.folder / "llama", targets, jobs)

    def build_of(self, source, build, targets, jobs):
        flags = re.search(r"flags\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        flags = set(flags[1].split() if flags else [])
        features = [f"-DGGML_{option}={'ON' if flag in flags else 'OFF'}" for flag, option in FEATURES.items()]
        quiet(self.folder / f"{build.name}-configure.log", "cmake", "-S", source, "-B", build, "-G", "Ninja",
              "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_NATIVE=OFF", "-DGGML_CCACHE=OFF",
              "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_CURL=OFF",
              *features)
        quiet(self.folder / f"{build.name}-build.log", "cmake", "--build", build, "--parallel", jobs, "--target", *targets)

    def build_fovea(self, jobs):
        quiet(self.folder / "fovea-configure.log", "cmake", "-S", ROOT, "-B", self.fovea, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
              "-DFOVEA_CUDA=OFF", "-DFOVEA_TESTS=OFF", "-DFOVEA_CLI=OFF", f"-DFOVEA_GGML={self.source / 'ggml'}",
              f"-DFOVEA_GGML_LIBRARIES={self.binaries}")
        quiet(self.folder / "fovea-build.log", "cmake", "--build", self.fovea, "--parallel", jobs, "--target", "ggml_fovea",
              "ggml_fovea_other_interface", "ggml_fovea_other_operations", "ggml_compare", "ggml_model")

    def environment(self, backend):
        """With an empty `backend` ggml is by itself."""
        return {**os.environ, "GGML_BACKEND_PATH": str(backend or "")}


def about():
    """Machine, date, software and a hash of the sources, the head of every result."""
    fields = {}
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    version = re.search(r"project\(fovea VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1]
    return {"date": datetime.date.today().isoformat(),
            "host": f"{fields.get('model name', 'a processor without a name')}, {os.cpu_count()} threads",
            "machine": {**{key: fields[key] for key in ("cpu family", "model", "stepping") if key in fields},
                        "isa": [name for name in ISA if name in fields.get("flags", "").split()]},
            "software": {"llama_cpp_python": PACKAGE.rsplit("-", 1)[1], "fovea": version},
            "sources_sha256": sources_hash(ROOT, ("cpu", "tile")),
            "backend_sha256": sources_hash(ROOT, ("ggml",), below="integrations", names="*.[ch]pp")}


def written(path, result):
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("written:", path)


# --- tests ---

CASE = re.compile(r"FLASH_ATTN_EXT\((.*)\): .*?(OK|FAIL|not supported)")
DECLINED = re.compile(r"fovea: declined (\d+) times: K (\w+), V (\w+): (.*)")


def kind_of(types):
    return "f16, bf16, f32, q8_0" if set(types) <= FOUR_TYPES else "other types"


def count_cases(told, reported):
    """{kind of types: {"cases", "passed", "failed", "declined": {the backend's reason: cases}}} of what test-backend-ops prints and of the
    backend's report, whose numbers of declined cases must be the same."""
    counts, unsupported = {}, {}
    for case, outcome in CASE.findall(told):
        kind = kind_of(re.findall(r"type_[KV]=(\w+)", case))
        of_kind = counts.setdefault(kind, {"cases": 0, "passed": 0, "failed": 0, "declined": {}})
        of_kind["cases"] += 1
        if outcome == "not supported":
            unsupported[kind] = unsupported.get(kind, 0) + 1
        else:
            of_kind["passed" if outcome == "OK" else "failed"] += 1
    for times, k, v, reason in DECLINED.findall(reported):
        declined = counts[kind_of((k, v))]["declined"]
        declined[reason] = declined.get(reason, 0) + int(times)
    for kind, of_kind in counts.items():
        if sum(of_kind["declined"].values()) != unsupported.get(kind, 0):
            raise SystemExit(f"{kind}: {unsupported.get(kind, 0)} cases are not supported, {of_kind['declined']} declined by the backend")
    return counts


def test_operations(llama):
    print("test-backend-ops: some minutes", flush=True)
    told = subprocess.run([llama.binaries / "test-backend-ops", "test", "-o", "FLASH_ATTN_EXT", "-b", "Fovea", "-j", str(os.cpu_count())],
                          env={**llama.environment(llama.backend), "FOVEA_GGML_REPORT": "1"}, capture_output=True, text=True, check=False)
    (llama.folder / "test-backend-ops.log").write_text(told.stdout + told.stderr, encoding="utf-8")
    counts = count_cases(told.stdout, told.stderr)
    for kind, of_kind in sorted(counts.items()):
        print(f"  {kind}:", of_kind)
    four = counts["f16, bf16, f32, q8_0"]
    share = (four["passed"] + four["failed"]) / four["cases"]
    print(f"  {100 * share:.1f} % of the cases of f16, bf16, f32 and q8_0 are taken")
    failed = sum(of_kind["failed"] for of_kind in counts.values())
    good = told.returncode == 0 and four["passed"] > 0 and share >= LEAST_SHARE and failed == 0
    return good, {"share_of_four_types": share, "kinds": counts}


def test_masks(llama):
    told = subprocess.run([llama.binaries / "ggml_compare", "check"], env=llama.environment(llama.backend), capture_output=True, text=True,
                          check=False)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    for row in rows:
        if not row.get("same", True):
            print("  differs:", row)
    counts = {"cases": len(rows), "agree": sum(row.get("same", False) for row in rows), "declined": sum("declined" in row for row in rows)}
    print(f"  masks of real models: {counts}")
    return told.returncode == 0 and len(rows) > 100, counts


def test_foreign(llama):
    """A ggml of another version gets one line and goes on by itself."""
    good = True
    for other, says in (("interface", "incompatible API version"), ("operations", "fovea: declined: built for ggml")):
        library = llama.fovea / "lib" / f"libggml-fovea-other-{other}.so"
        told = subprocess.run([llama.binaries / "ggml_compare", "check"], env=llama.environment(library), capture_output=True, text=True,
                              check=False)
        lines = [line for line in told.stderr.splitlines() if says in line]
        print(f"  other {other}:", *lines)
        good = good and told.returncode == 2 and len(lines) == 1
    return good


def test_version(llama, version, jobs):
    """The library in the ggml of another package: masks of real models agree, or one line declines it."""
    sha256, serves = OTHERS[version]
    package = f"llama_cpp_python-{version}"
    llama.folder.mkdir(parents=True, exist_ok=True)
    requirement = llama.folder / f"requirements-{version}.txt"
    requirement.write_text(f"llama_cpp_python=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    llama.fetch(package, requirement)
    build = llama.folder / f"llama-{version}"
    llama.build_of(llama.folder / package / "vendor" / "llama.cpp", build, ("ggml", "ggml-cpu"), jobs)
    for library in (build / "bin").glob("libggml*.so"):
        if not library.with_name(library.name + ".0").exists():  # the older ones have no version in their names
            library.with_name(library.name + ".0").symlink_to(library.name)
    program = shutil.copy(llama.binaries / "ggml_compare", build / "bin")  # ggml looks for its own backend beside the program
    told = subprocess.run([program, "check"], env={**llama.environment(llama.backend), "LD_LIBRARY_PATH": str(build / "bin")},
                          capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    lines = [line for line in told.stderr.splitlines() if "fovea: declined: built for ggml" in line or "incompatible API version" in line]
    agree = sum(row.get("same", False) for row in rows)
    print(f"  llama_cpp_python {version}:", *(lines or [f"{agree} of {len(rows)} masks agree"]))
    if serves:
        return told.returncode == 0 and len(rows) > 100
    return told.returncode == 2 and len(lines) == 1


# --- measurements ---

def measured_cases(llama, rounds):
    told = subprocess.run([llama.binaries / "ggml_compare", "time", str(rounds)], env=llama.environment(llama.backend),
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    rows = [json.loads(line) for line in told.stdout.splitlines()]
    for row in rows:
        print(f"  {row['case']} {row['type']} d {row['d']} {row['heads']}:{row['key_heads']} {row['queries']} x {row['keys']} "
              f"{row['mask']}: {row['ggml_ms']:.3g} ms, Fovea {row['fovea_ms']:.3g} ms, {row['ratio']:.2f} x", flush=True)
    return rows


def tokens_per_second(llama, model, backend, arguments, repeats):
    """The rate of each of `repeats` runs in one process of llama-bench."""
    told = subprocess.run([llama.binaries / "llama-bench", "-m", model, "-fa", "on", "-r", str(repeats), "--no-warmup", "-t",
                           str(os.cpu_count()), "-o", "json", *arguments], env=llama.environment(backend), stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, check=True)
    [row] = json.loads(told.stdout)
    return row["samples_ts"]


def measured_model(llama, model, long, rounds, rows_with):
    """Yields rows of llama-bench with and without Fovea, the median of each. Prompts are read in turns. What is generated behind a prompt is
    repeated in one process, which keeps the cache that the prompt fills: ggml takes 20 minutes to fill one of 16,384 tokens of q8_0 on two
    cores. `rows_with`: only rows whose names hold one of these texts."""
    jobs = [(f"prompt {n}", ["-p", str(n), "-n", "0"]) for n in [512, 4096] + [16384] * long]
    for depth in [4096] + [16384] * long:
        for cache in ("f16", "q8_0"):
            jobs.append((f"generation behind {depth}, cache {cache}",
                         ["-p", "0", "-n", "16", "-d", str(depth), "-ctk", cache, "-ctv", cache]))
    for name, arguments in jobs:
        if not any(text in name for text in rows_with.split(";")):
            continue
        turns, repeats = (1, rounds) if "-d" in arguments else (rounds, 1)
        rates = {"ggml": [], "fovea": []}
        for _ in range(turns):
            rates["ggml"] += tokens_per_second(llama, model, None, arguments, repeats)
            rates["fovea"] += tokens_per_second(llama, model, llama.backend, arguments, repeats)
        ggml, fovea = (sorted(rates[who])[rounds // 2] for who in ("ggml", "fovea"))
        print(f"  {name}: {ggml:.2f} tokens/s, Fovea {fovea:.2f}, {fovea / ggml:.2f} x", flush=True)
        yield {"what": name, "ggml_tokens_per_second": ggml, "fovea_tokens_per_second": fovea, "ratio": fovea / ggml, "rounds": rounds}


# Of what ggml differs from itself without the operation; docs/guide/llama_cpp.md says why.
MOST_LOGITS = 2.0


def compared_logits(llama, model, tokens=1024):
    """Squared difference over squared length of the last two logits: of Fovea's from ggml's, and of ggml's own attention without the
    operation from ggml's with it, which says how much of a difference this model makes of none. That needs values of 16 or 32 bits, so
    q8_0 for both is held to what q8_0 keys alone make. True when no difference is more than MOST_LOGITS of it."""
    def logits(backend, caches, flash_attention="on"):
        told = subprocess.run([llama.binaries / "ggml_model", "logits", model, str(tokens), *caches, flash_attention],
                              env=llama.environment(backend), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
        return array.array("f", told.stdout)

    def error(x, expected):
        return sum((a - b) ** 2 for a, b in zip(x, expected)) / sum(b * b for b in expected)

    rows, reference = [], 0.0
    for caches in (("f16", "f16"), ("q8_0", "f16"), ("q8_0", "q8_0")):
        expected = logits(None, caches)
        row = {"tokens": tokens, "cache": caches[0] if caches[0] == caches[1] else f"{caches[0]}, values {caches[1]}",
               "fovea": error(logits(llama.backend, caches), expected)}
        if caches[1] == "f16":
            reference = row["ggml_without_the_operation"] = error(logits(None, caches, "off"), expected)
        row["most"] = MOST_LOGITS * reference
        rows.append(row)
        print("  logits:", row, flush=True)
    return rows, all(row["fovea"] <= row["most"] for row in rows)


PARTS = ("operations", "llama_bench", "logits", "perplexity")


def bench(llama, arguments):
    model = llama.folder / "model.gguf"
    if not model.exists() and {"llama_bench", "logits"} & set(arguments.parts):
        run(llama.binaries / "ggml_model", "make", model, stderr=subprocess.DEVNULL)
    result = {**about(), "protocol": "with and without Fovea in turns; medians of rounds"}
    same = {}
    if "operations" in arguments.parts:
        result["operations"] = measured_cases(llama, max(3, arguments.rounds))
    target = arguments.output or llama.folder / "results.json"
    if "llama_bench" in arguments.parts:
        result["llama_bench"] = []
        for row in measured_model(llama, model, arguments.long, arguments.rounds, arguments.rows):
            result["llama_bench"].append(row)
            written(target, result)  # a run that is cut off keeps the rows that it has: one takes up to half an hour
    if "logits" in arguments.parts:
        result["logits"], same["logits"] = compared_logits(llama, model)
    if "perplexity" in arguments.parts:
        result["perplexity"], same["perplexities"] = perplexity.measured_perplexity(llama, arguments.chunks)
    written(target, result)
    for what in (what for what, are_same in same.items() if not are_same):
        print("FAILED:", what, "differ")
    return None if all(same.values()) else 1


def test(llama, arguments):
    operations, counts = test_operations(llama)
    masks, mask_counts = test_masks(llama)
    good = operations and masks and test_foreign(llama)
    written(arguments.output or llama.folder / "tests.json", {**about(), "tests": {**counts, "masks": mask_counts, "passed": good}})
    print("passed" if good else "FAILED")
    return None if good else 1


def versions(llama, arguments):
    good = [test_version(llama, version, arguments.jobs) for version in OTHERS]
    print("passed" if all(good) else "FAILED")
    return None if all(good) else 1


def self_test():
    case = "FLASH_ATTN_EXT(hsk=64,nr23=[{},1],kv=512,nb={},type_K={},type_V=f16,n_kv_max={}): {}"
    text = "\n".join([case.format(1, 1, "f16", 0, "\x1b[1;32mOK\x1b[0m"), case.format(1, 1, "q5_1", 0, "not supported [Fovea]"),
                      case.format(8, 1, "q8_0", 512, "not supported [Fovea]"), case.format(4, 3, "f16", 0, "\x1b[1;31mFAIL\x1b[0m")])
    report = "fovea: computed 2 times\nfovea: declined 1 times: K q5_1, V f16: one row\nfovea: declined 1 times: K q8_0, V f16: few keys\n"
    assert count_cases(text, report) == {
        "f16, bf16, f32, q8_0": {"cases": 3, "passed": 1, "failed": 1, "declined": {"few keys": 1}},
        "other types": {"cases": 1, "passed": 0, "failed": 0, "declined": {"one row": 1}}}
    perplexity.self_test()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("test", "bench", "versions"))
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "llama")
    parser.add_argument("--jobs", default=str(os.cpu_count()))
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", default="", help="only rows of llama-bench whose names contain TEXT (or TEXT;TEXT)", metavar="TEXT")
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: text.split(","), metavar="PART,PART",
                        help=f"of {','.join(PARTS)}")
    parser.add_argument("--chunks", type=int, default=8, help="of 2,048 tokens, for the perplexity (8)")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    if arguments.command is None:
        parser.error("give test, bench or versions")
    if not set(arguments.parts) <= set(PARTS):
        parser.error(f"--parts are some of {','.join(PARTS)}")
    if arguments.chunks < 2:
        parser.error("--chunks are at least 2, for an error of their mean")
    llama = Llama(arguments.build.resolve())
    llama.fetch()
    llama.build("ggml", "ggml-cpu", "llama", "test-backend-ops", "llama-bench", "llama-perplexity", jobs=arguments.jobs)
    llama.build_fovea(arguments.jobs)
    return {"test": test, "bench": bench, "versions": versions}[arguments.command](llama, arguments)


if __name__ == "__main__":
    sys.exit(main())
