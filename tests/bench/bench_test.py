#!/usr/bin/env python3
"""The parts of bench/gpu that need no GPU."""

import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
BENCH = HERE.parent.parent / "bench" / "gpu"
sys.path.insert(0, str(BENCH))
sys.path.insert(0, str(HERE.parent.parent / "tools"))

import compare  # noqa: E402
import make_instances  # noqa: E402
import ncu  # noqa: E402
import tables  # noqa: E402
import shapes  # noqa: E402


def run(script, *arguments, **more):
    return subprocess.run([sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True, **more)


class Shapes(unittest.TestCase):
    def test_grid_is_the_field_s(self):
        rows = shapes.grid()
        self.assertEqual(len(rows), 72)
        self.assertEqual(len({row.name for row in rows}), 72)
        for row in rows:
            self.assertEqual(row.b * row.s_q, 16384)
            self.assertEqual(row.h_q * row.d, 2048)
            self.assertEqual((row.s_q, row.h_q, row.d), (row.s_k, row.h_kv, row.d_v))

    def test_flops(self):
        fwd, bwd = (shapes.parse(f"{p},b4,s4096,h16,d128") for p in ("fwd", "bwd"))
        self.assertEqual(fwd.flops, 4 * 4 * 16 * 4096**2 * 128)
        self.assertEqual(bwd.flops, 2.5 * fwd.flops)
        self.assertEqual(shapes.parse("b4,s4096,h16,d128,causal").flops, fwd.flops / 2)
        # Different sizes of values: 2 (d + d_v) and 6 d + 4 d_v a pair.
        self.assertEqual(shapes.parse("s2,h1,d192,dv128").flops, 4 * 2 * (192 + 128))
        self.assertEqual(shapes.parse("bwd,s2,h1,d192,dv128").flops, 4 * (6 * 192 + 4 * 128))

    def test_pairs_are_counted_where_no_convention_holds(self):
        def brute(shape):
            return sum(
                (not shape.causal or j <= i + shape.s_k - shape.s_q)
                and (shape.window < 0 or j >= i + shape.s_k - shape.s_q - shape.window)
                for i in range(shape.s_q)
                for j in range(shape.s_k)
            )

        for text in ("s9,d8,w3", "s9,d8,w3,causal", "s5,sk9,d8,causal", "s9,sk5,d8,causal", "s9,sk5,d8,w2,causal"):
            shape = shapes.parse(text)
            self.assertEqual(shape.pairs, brute(shape), text)

    def test_packed(self):
        lengths = shapes.packed_lengths(16384, 64, 4096)
        self.assertEqual(sum(lengths), 16384)
        self.assertTrue(all(64 <= n <= 4096 + 64 for n in lengths))
        self.assertEqual(lengths, shapes.packed_lengths(16384, 64, 4096))
        shape = next(row for row in shapes.special() if row.lengths)
        self.assertEqual(shape.sequences[0], (0, shape.lengths[0]))
        self.assertEqual(shape.sequences[-1][1], shape.s_q)
        self.assertEqual(shape.pairs, sum(n * n for n in shape.lengths) / 2)

    def test_special_rows(self):
        names = [row.name for row in shapes.special()]
        for name in ("fp32_fwd_b4_s4096_h32_d64", "fp32_fwd_b100_s4096_h1_d32", "bf16_fwd_b4_s4096_h32kv8_d128_causal",
                     "bf16_bwd_b1_s16384_h16_d128_causal_w1023", "bf16_fwd_b1_s1k65536_h32kv8_d128"):  # fmt: skip
            self.assertIn(name, names)
        self.assertEqual(len(set(names)), len(names))
        self.assertFalse(any("_fwd_" in row.name for row in shapes.special(["bwd_det"])))

    def test_terms_at_both_ends_of_the_grid(self):
        names = [row.name for row in shapes.terms()]
        self.assertEqual(len(names), 2 * 2 * (len(shapes.TERMS) + 2))
        self.assertEqual(len(set(names) | {row.name for row in shapes.special()}), len(names) + len(shapes.special()))
        for name in ("bf16_fwd_b32_s512_h16_d128_bias", "bf16_bwd_b1_s16384_h16_d128_mask", "bf16_fwd_b1_s16384_h16_d128_softcap30",
                     "bf16_bwd_b32_s512_h16_d128_dropout"):  # fmt: skip
            self.assertIn(name, names)
            self.assertEqual(shapes.parse(name.replace("_", ",")).name, name)

    def test_softcap(self):
        shape = shapes.parse("b4,s512,h16,d128,causal,softcap30")
        self.assertEqual((shape.softcap, shape.name), (30, "bf16_fwd_b4_s512_h16_d128_causal_softcap30"))
        self.assertEqual(shapes.parse("s512,d128").softcap, 0)

    def test_latent_rows_have_values_in_keys(self):
        (row,) = [row for row in shapes.latent() if row.name == "bf16_fwd_b64_s1k8192_h16kv1_d576v512_latent"]
        self.assertEqual(row.tensor_bytes, 64 * (8192 * 576 + 16 * (576 + 512)) * 2)
        (apart,) = [row for row in shapes.latent() if row.name == "bf16_fwd_b64_s1k8192_h16kv1_d576v512"]
        self.assertEqual(apart.tensor_bytes - row.tensor_bytes, 64 * 8192 * 512 * 2)

    def test_parse_refuses(self):
        for text in ("b4,d64", "s64", "s64,d64,x3", "s64,d64,h3,hkv2", "s64,d64,full", "s64,d64,softcap"):
            with self.assertRaises(ValueError, msg=text):
                shapes.parse(text)

    def test_options_choose_rows(self):
        def names(*arguments):
            return [row.name for row in compare.shapes_of(compare.parse_arguments(list(arguments)))]

        self.assertEqual(len(names()), 72)
        self.assertEqual(names("--pass", "bwd_det", "--d", "128", "--s", "4096", "--causal", "yes"),
                         ["bf16_bwd_det_b4_s4096_h16_d128_causal"])  # fmt: skip
        others = (shapes.special(), shapes.wide(), shapes.terms(), shapes.decode(), shapes.latent(), shapes.fp8())
        self.assertEqual(len(names("--rows", "all")), 72 + sum(map(len, others)))
        self.assertEqual(names("--rows", "fp8", "--name", "page64"), ["bf16_fwd_b1_s512k16384_h16_d128_causal_page64_fp8"])
        self.assertEqual(names("--shape", "s64,d64,fp8"), ["bf16_fwd_b1_s64_h16_d64_fp8"])
        self.assertEqual(names("--rows", "decode", "--name", "mixed_page16"), ["bf16_fwd_b64_s1k32768_h32kv8_d128_mixed_page16"])
        self.assertEqual(names("--shape", "s1,sk4096,d128,page64"), ["bf16_fwd_b1_s1k4096_h16_d128_page64"])
        self.assertEqual(names("--rows", "terms", "--pass", "bwd", "--name", "documents"),
                         ["bf16_bwd_b32_s512_h16_d128_documents", "bf16_bwd_b1_s16384_h16_d128_documents"])  # fmt: skip
        self.assertEqual(len(names("--quick")), 24)
        self.assertEqual(names("--shape", "s64,d64"), ["bf16_fwd_b1_s64_h16_d64"])
        with self.assertRaises(ValueError):
            names("--s", "1000")


class Numbers(unittest.TestCase):
    def test_quantiles(self):
        self.assertEqual(tables.quantile([3, 1, 2], 0.5), 2)
        self.assertEqual(tables.quantile([4, 1, 2, 3], 0.5), 2.5)
        self.assertEqual(tables.quantile([7], 0.75), 7)
        self.assertEqual([tables.quantile(range(5), x) for x in (0, 0.25, 0.75, 1)], [0, 1, 3, 4])

    def test_summary(self):
        found = tables.summary([1.0, 2.0, 3.0], flops=4e12, tensor_bytes=6e9)
        self.assertEqual((found["ms"], found["q1"], found["q3"], found["spread"]), (2, 1.5, 2.5, 0.5))
        self.assertEqual((found["tflops"], found["gb_s"]), (2000, 3000))

    def test_geometric_mean(self):
        self.assertAlmostEqual(tables.geometric_mean([2, 8]), 4)


def row(s, d=64, causal=False, group="grid", pass_="fwd", **times):
    return {
        "name": f"row_s{s}_d{d}" + ("_causal" if causal else ""),
        "group": group,
        "pass": pass_,
        "dtype": "bf16",
        "s_q": s,
        "d": d,
        "causal": causal,
        "contenders": {
            name: {"failed": time} if isinstance(time, str) else {"ms": time, "tflops": 1 / time, "spread": 0}
            for name, time in times.items()
        },
    }


class Tables(unittest.TestCase):
    results = {
        "stored_best_over_cudnn": False,
        "rows": [
            row(512, ours=1.0, fa2=1.5, cudnn=1.25),
            row(1024, ours=2.0, fa2=4.0, cudnn="no such kernel"),
            row(512, causal=True, ours="wrong: o", fa2=1.0, cudnn=1.0),
            row(77, group="special", ours=1.0, fa2=3.0, cudnn=2.0),
        ],
    }

    def test_ratios(self):
        text = tables.ratio_tables(self.results)
        at = text.index("Forward, bf16: ours over FlashAttention-2 (PyTorch):")
        self.assertEqual(text[at + 2], "| d | causal | 512 | 1024 |")
        self.assertEqual(text[at + 4], "| 64 | no | 1.50 | 2.00 |")
        self.assertEqual(text[at + 5], "| 64 | yes | - | - |")
        self.assertEqual(text[at + 7], f"Geometric mean {math.sqrt(3):.3f}, least 1.500 (row_s512_d64), 2 of 3 cells.")
        at = text.index("Forward, bf16: ours over the best peer of this run:")
        self.assertEqual(text[at + 4], "| 64 | no | 1.25 | 2.00 |")
        self.assertIn("| `row_s77_d64` | 1.000 (1) | 3.000 (0) | 2.000 (0) | 2.00 |", text)

    def test_summary_rows(self):
        self.assertEqual(
            tables.summary_rows(self.results),
            [
                ["bf16", "forward", "FlashAttention-2 (PyTorch)", "2", "1.73", "1.50", "2.00"],
                ["bf16", "forward", "cuDNN (PyTorch)", "1", "1.25", "1.25", "1.25"],
                ["bf16", "forward", "the best of them", "2", "1.58", "1.25", "2.00"],
            ],
        )

    def test_best(self):
        self.assertEqual(tables.best_peer(self.results["rows"][0]), "cudnn")
        self.assertEqual(tables.best_peer(self.results["rows"][1]), "fa2")
        self.assertIsNone(tables.best_peer(row(1, ours=1.0)))
        self.assertIsNone(tables.ratio(self.results["rows"][2], "ours", "fa2"))

    def test_versions_of_ours_and_determinism(self):
        results = {"rows": [row(512, pass_="bwd_det", **{"ours": 2.0, "ours:fast": 1.9, "fa2": 3.0})]}
        text = tables.ratio_tables(results)
        at = text.index("Backward, deterministic, bf16: ours over ours:fast:")
        self.assertEqual(text[at + 4], "| 64 | no | 0.95 |")

    def test_stored_ratios(self):
        stored = tables.stored_best_over_cudnn()
        self.assertEqual(len(stored), 72)
        self.assertTrue(all(1 <= value < 2 for value in stored.values()))
        results = {"stored_best_over_cudnn": True, "rows": [row(16384, d=128, causal=True, ours=1.0, cudnn=1.258)]}
        text = "\n".join(tables.ratio_tables(results))
        self.assertIn("taken as cuDNN in this run times the stored ratio", text)
        self.assertIn("| 128 | yes | 1.00 |", text)
        # Where the peer itself was timed, nothing is taken from the file.
        results["rows"][0]["contenders"]["fa3"] = {"ms": 1.0, "tflops": 1.0, "spread": 0}
        self.assertNotIn("stored ratio", "\n".join(tables.ratio_tables(results)))

    def test_failures(self):
        self.assertEqual(tables.failures(self.results),
                         ["cudnn: no such kernel (row_s1024_d64)", "ours: wrong: o (row_s512_d64_causal)"])  # fmt: skip

    def test_file(self):
        text = tables.dump(self.results)
        self.assertEqual(json.loads(text), self.results)
        self.assertEqual(sum(line.startswith('  {"name"') for line in text.splitlines()), 4)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "r.json"
            path.write_text(text)
            done = run("compare.py", "--tables", str(path))
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("| 64 | no | 1.25 | 2.00 |", done.stdout)

    def test_a_stopped_run_leaves_the_file_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "deeper" / "r.json"
            self.assertEqual(compare.write_results(self.results, path, merge=False, whole=True), path)
            part = {**self.results, "rows": self.results["rows"][:1]}
            kept = compare.write_results(part, path, merge=False, whole=False)
            self.assertEqual(json.loads(path.read_text()), self.results)
            self.assertEqual(json.loads(kept.read_text()), part)
            self.assertEqual(compare.write_results(self.results, path, merge=True, whole=True), path)
            self.assertEqual(sorted(p.name for p in path.parent.iterdir()), ["r.json"])

    def test_merge(self):
        about = {"gpu": {"name": "G"}, "software": {}, "sources_sha256": "a", "protocol": {}}
        old = {**about, "rows": [row(1, ours=1.0), row(2, ours=1.0)]}
        new = {**about, "rows": [row(2, ours=9.0)]}
        self.assertEqual([r["contenders"]["ours"]["ms"] for r in tables.merged(old, new)["rows"]], [1.0, 9.0])
        with self.assertRaisesRegex(ValueError, "sources_sha256"):
            tables.merged({**old, "sources_sha256": "b"}, new)


class Counters(unittest.TestCase):
    """ncu_raw.csv holds the columns in question of what Nsight Compute 2025.3 wrote for FlashAttention-2 of PyTorch."""

    def setUp(self):
        self.text = (HERE / "ncu_raw.csv").read_text()
        self.kernels = ncu.read_csv(self.text)

    def test_read(self):
        self.assertEqual([k.name.split("<")[0] for k in self.kernels],
                         ["flash_fwd_kernel", "flash_bwd_dot_do_o_kernel",
                          "flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "flash_bwd_convert_dq_kernel"])  # fmt: skip
        fwd = self.kernels[0]
        self.assertEqual(fwd.get("duration_ns"), 107104)
        self.assertEqual(fwd.get("local_loads"), 466944)
        self.assertEqual(fwd.get("registers"), 255)
        self.assertTrue(math.isnan(fwd.get("ffma")))  # this page lacks the column

    def test_derived(self):
        fwd = self.kernels[0]
        self.assertEqual(fwd.flop, 4 * 16 * 2048**2 * 128)
        self.assertEqual(fwd.dram_bytes, 25222912 + 1570816)
        share, limit = fwd.roofline
        # 34.36 GFLOP in 107.1 us, of 540,672 FLOP a cycle at 1.736 GHz.
        self.assertEqual(limit, "tensor")
        self.assertAlmostEqual(share, 34359738368 / 107104e-9 / (540672 * 1.736283e9), places=4)
        share, limit = self.kernels[1].roofline
        self.assertEqual(limit, "memory")
        self.assertAlmostEqual(share, 0.379, places=2)

    def test_messages_before_the_table_are_skipped(self):
        self.assertEqual(len(ncu.read_csv("==PROF== Connected to process 1\nhello\n" + self.text)), 4)

    def test_no_data(self):
        kernels = ncu.read_csv(self.text.replace('"466,944"', '"no data"'))
        self.assertTrue(math.isnan(kernels[0].get("local_loads")))
        self.assertIn("- / 464 k", "\n".join(ncu.table([("x", kernels)])))

    def test_wrong_files(self):
        with self.assertRaisesRegex(ValueError, "raw page"):
            ncu.read_csv("==ERROR== nothing\n")
        with self.assertRaisesRegex(ValueError, "print-units base"):
            ncu.read_csv(self.text.replace('"ns"', '"us"'))

    def test_markers(self):
        marker = ncu.Kernel("spin_kernel")
        kernels = [marker, self.kernels[0], marker, *self.kernels[1:]]
        runs = ncu.split_at_markers(kernels, ["forward", "backward"])
        self.assertEqual([(title, len(part)) for title, part in runs], [("forward", 1), ("backward", 3)])
        with self.assertRaises(ValueError):
            ncu.split_at_markers(kernels, ["forward"])
        with self.assertRaises(ValueError):
            ncu.split_at_markers(self.kernels, [])

    def test_short_names(self):
        self.assertEqual(ncu.short_name("void a::b::f<g(1), h<2>>(int, k<3>)"), "f<g(1), h<2>>")
        self.assertEqual(ncu.short_name("fill(float*)"), "fill")
        for unnamed in ("<unnamed>", "(anonymous namespace)"):
            self.assertEqual(ncu.short_name(f"void a::{unnamed}::f<a::{unnamed}::g>(a::h)"), "f<a::g>")

    def test_table_and_json(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "out.json"
            done = run("counters.py", "--csv", str(HERE / "ncu_raw.csv"), "--json", str(path))
            self.assertEqual(done.returncode, 0, done.stderr)
            lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
            self.assertEqual(len(lines), 6)
            self.assertTrue(all(line.count("|") == len(ncu.HEAD) + 1 for line in lines))
            self.assertIn("| 107.1 | 51.3 | 50.4 | 5.2 | 51.3 |", lines[2])
            stored = json.loads(path.read_text())
            self.assertEqual(stored[0]["registers"], 255)
            self.assertNotIn("ffma", stored[0])


FAKE_NCU = """#!{python}
# Runs the program as ncu does and keeps what was profiled; --import prints it.
import pathlib, subprocess, sys
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print("NVIDIA (R) Nsight Compute Command Line Profiler\\nVersion 2025.3.1.0")
elif "--import" in arguments:
    print(pathlib.Path(arguments[arguments.index("--import") + 1]).read_text())
else:
    program = arguments[arguments.index("--metrics") + 2:]
    pathlib.Path(arguments[arguments.index("--export") + 1] + ".ncu-rep").write_text(pathlib.Path({csv!r}).read_text())
    print("==PROF== a message that belongs into the log", file=open(arguments[arguments.index("--log-file") + 1], "w"))
    sys.exit(subprocess.run(program).returncode)
"""
FAKE_FOVEA = """#!{python}
import json, sys
if "--list" in sys.argv:
    lengths = ["512x512x128", "256x1024x128", "128x2048x128", "64x4096x128", "32x8192x128", "16x16384x128"]
    print(json.dumps([{{"group": "cpu", "where": "cpu", "shapes": ["4x1024x64"]}},
                      {{"group": "softmax", "where": "gpu", "shapes": ["1024x1024", "16384x16384"]}},
                      {{"group": "tensor", "where": "gpu", "shapes": lengths}}]))
    sys.exit()
group = sys.argv[sys.argv.index("--group") + 1]
shapes = sys.argv[sys.argv.index("--shape") + 1]
if group != "softmax":
    sys.exit("fovea ladder: the GPU fell off the bus at " + shapes)
assert shapes == "1024x1024,16384x16384", shapes
row = {{"rung": "22_softmax_warp", "group": group, "shape": "1024x1024", "right": True, "profiled": True}}
rows = [row, {{"rung": "23_softmax_registers", "group": group, "shape": "8x99999", "skipped": "too long"}},
        row | {{"rung": "30_attention_three_kernels"}}]
print(json.dumps({{"version": "0.1.0", "date": "2026-01-01", "host": "a host", "gpu": "A GPU, compute capability 9.0",
                  "protocol": "one run", "rows": rows}}))
"""


class LadderProfile(unittest.TestCase):
    """The whole of counters.py --ladder around programs that stand for ncu, nvidia-smi and fovea."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        names, units, *kernels = (HERE / "ncu_raw.csv").read_text().splitlines()
        marker = kernels[0].replace(kernels[0].split('","')[4], "ladder::<unnamed>::profile_marker()")
        self.assertIn("profile_marker", marker)
        # One kernel for the first rung, three for the second.
        page = "\n".join([names, units, marker, kernels[0], marker, *kernels[1:]]) + "\n"
        (self.folder / "page.csv").write_text(page)
        for name, text in (("ncu", FAKE_NCU), ("fovea", FAKE_FOVEA), ("nvidia-smi", "#!/bin/sh\n")):
            text = text.format(python=sys.executable, csv=str(self.folder / "page.csv")) if "{" in text else text
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def profile(self, *arguments):
        return run("counters.py", "--ladder", "--ncu", str(self.folder / "ncu"), "--fovea", str(self.folder / "fovea"),
                   *arguments, env={"PATH": str(self.folder) + ":/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip

    def test_kernels_go_to_their_rungs(self):
        done = self.profile("--json", str(self.folder / "out.json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        stored = json.loads((self.folder / "out.json").read_text())
        self.assertEqual((stored["gpu"], stored["profiler"]), ("A GPU, compute capability 9.0", "Version 2025.3.1.0"))
        rungs = [kernel["rung"] for kernel in stored["kernels"]]
        self.assertEqual(rungs, ["22_softmax_warp"] + ["30_attention_three_kernels"] * 3)
        first = stored["kernels"][0]
        self.assertEqual((first["group"], first["shape"], first["registers"]), ("softmax", "1024x1024", 255))
        self.assertTrue(first["kernel"].startswith("flash_fwd_kernel"), first)
        self.assertIn("23_softmax_registers 8x99999: left out: too long", done.stdout)
        self.assertIn("22_softmax_warp 1024x1024: 107.1 µs in 1 kernels", done.stdout)
        # What fails in one group is told and stops no other.
        self.assertIn("group tensor: nothing was profiled", done.stderr)
        self.assertIn("fell off the bus at 64x4096x128", done.stderr)

    def test_nothing_is_written_when_nothing_was_profiled(self):
        done = self.profile("--group", "tensor", "--json", str(self.folder / "out.json"))
        self.assertEqual(done.returncode, 1)
        self.assertFalse((self.folder / "out.json").exists())

    def test_usage(self):
        for arguments in (["--rung", "22"], ["--shape", "1x2x3"], ["--group", "tensor", "--json", "auto"],
                          ["--csv", "x"]):  # fmt: skip
            done = self.profile(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn("counters.py: error: ", done.stderr)
        self.assertEqual(run("counters.py", "--group", "tensor").returncode, 2)
        self.assertIn("make build", self.profile("--fovea", str(self.folder / "none")).stderr)
        self.assertIn("'cpu', expected one of softmax, tensor", self.profile("--group", "cpu").stderr)


FAKE_NCU_OF_CYCLES = """#!{python}
# Prints what compare.py --once would, and a page of three runs; the cycles are larger for the library called now.so.
import pathlib, sys
arguments = sys.argv[1:]
if "--import" in arguments:
    print(pathlib.Path(arguments[arguments.index("--import") + 1]).read_text())
    sys.exit()
assert arguments[arguments.index("--metrics") + 1] == "sm__cycles_elapsed.max", arguments
assert arguments[-4:] == ["--d", "128", "--kernels", "*80"], arguments
for title in ("bf16_fwd, ours (cuda_sm90)", "bf16_fwd, ours:*80 (cuda_sm90)", "bf16_bwd, ours (cuda_sm80)"):
    print("profile: " + title)
print("bf16_bwd, ours:*80: left out: no such kernel")
more = 1000 if any(word.endswith("now.so") for word in arguments) else 0
kernels = [("spin_kernel", 7), ("fwd", 50000 + more), ("spin_kernel", 7), ("fwd", 40000), ("spin_kernel", 7),
           ("prepare", 1000), ("bwd", 2000)]
lines = ['"ID","Kernel Name","sm__cycles_elapsed.max"', '"","","cycle"']
lines += [f'"{{i}}","{{name}}","{{cycles:,}}"' for i, (name, cycles) in enumerate(kernels)]
pathlib.Path(arguments[arguments.index("--export") + 1] + ".ncu-rep").write_text("\\n".join(lines))
"""


class Cycles(unittest.TestCase):
    """bench/gpu/cycles.py around a program that stands for ncu."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name, text in (("ncu", FAKE_NCU_OF_CYCLES.format(python=sys.executable)), ("nvidia-smi", "#!/bin/sh\necho A GPU\n"),
                           ("before.so", ""), ("now.so", "")):  # fmt: skip
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)

    def cycles(self, *arguments):
        return run("cycles.py", "--ncu", str(self.folder / "ncu"), *arguments, "--", "--d", "128", "--kernels", "*80",
                   env={"PATH": str(self.folder) + ":/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip

    def test_sums_and_table(self):
        path = self.folder / "out.json"
        path.write_text(json.dumps({"gpu": "old", "variants": {"kept": {"library": {"bf16_fwd": 1}}}}))
        libraries = [f"--lib={name}={self.folder / name}.so" for name in ("before", "now")]
        done = self.cycles(*libraries, "--json", str(path))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| bf16_fwd | 50 | 40 (0.800) | 51 (1.020) | 40 (0.800) |", done.stdout)
        self.assertIn("| bf16_bwd | 3 | - | 3 (1.000) | - |", done.stdout)
        self.assertIn("left out: no such kernel", done.stdout)
        stored = json.loads(path.read_text())
        self.assertEqual(stored["gpu"], "A GPU")
        self.assertEqual(stored["variants"]["kept"], {"library": {"bf16_fwd": 1}})
        self.assertEqual(stored["variants"]["now"], {"library": {"bf16_fwd": 51000, "bf16_bwd": 3000}, "*80": {"bf16_fwd": 40000}})

    def test_usage(self):
        done = self.cycles("--lib", "x=none.so")
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected NAME=PATH of a library that exists", done.stderr)


class Power(unittest.TestCase):
    """bench/gpu/power.py without PyTorch."""

    def test_usage(self):
        with tempfile.NamedTemporaryFile(suffix=".so") as library:
            lib = f"--lib=now={library.name}"
            for arguments, text in ((["--lib=x=none.so", "--shape=bf16,bwd,b1,s64,h1,d64"], "expected NAME=PATH of a library that exists"),
                                    ([lib, "--shape=bf16,bwx"], "power.py: shape: got 'bwx'"),
                                    ([lib, "--shape=bf16,bwd", "--contenders=ours"], "got 'ours', expected one of fa2"),
                                    ([lib], "required: --shape")):  # fmt: skip
                done = run("power.py", *arguments)
                self.assertNotEqual(done.returncode, 0, arguments)
                self.assertIn(text, done.stderr)

    def test_without_pytorch(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "torch.py").write_text("raise ImportError")
            done = run("power.py", f"--lib=now={__file__}", "--shape=bf16,bwd,b1,s64,h1,d64", env={"PYTHONPATH": folder, "PATH": "/usr/bin:/bin"})
        self.assertEqual(done.returncode, 1)
        self.assertIn("power.py: PyTorch is not installed", done.stderr)

    def test_line(self):
        code = (f"import sys; sys.path[:0] = ['{BENCH}', '{BENCH.parent}']; import power; from shapes import parse; s = parse('bf16,bwd,b1,s64,h1,d64');"
                "print(power.line_of(s, 'a', {'ms': 2.5, 'sm_mhz': 1700.0, 'power_w': 700.0, 'mj': 1750.0, 'ms_after_a_pause': 2.25}));"
                "print(power.line_of(s, 'b', {'failed': 'wrong: dq'}))")  # fmt: skip
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertIn("2.500 ms at 1700 MHz and 700 W, 1750 mJ; 2.250 ms after a pause", done.stdout)
        self.assertIn("-  wrong: dq", done.stdout)


class LadderPeers(unittest.TestCase):
    """bench/gpu/ladder_peers.py without PyTorch; with one, its peers on the tensors of a CPU."""

    def test_usage(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "fovea"
            rows = [{"group": "cpu", "where": "cpu", "shapes": ["1x2x3"]}, {"group": "tensor", "where": "gpu", "shapes": []}]
            program.write_text(f"#!/bin/sh\necho '{json.dumps(rows)}'\n")
            program.chmod(0o755)
            (pathlib.Path(folder) / "torch.py").write_text("raise ImportError")

            def peers(*arguments, fovea=program):
                done = run("ladder_peers.py", "--fovea", str(fovea), *arguments,
                           env={"PATH": "/usr/bin:/bin", "PYTHONPATH": folder})  # fmt: skip
                self.assertNotEqual(done.returncode, 0)
                return done.stderr

            self.assertIn("expected one of tensor with --device cuda", peers("--group", "cpu"))
            self.assertIn("--shape: name the group", peers("--device", "cuda", "--group", "tensor", "--group", "tensor",
                                                             "--shape", "1x2x3"))  # fmt: skip
            self.assertIn("PyTorch is not installed", peers())
            self.assertIn("`make build` makes", peers(fovea=pathlib.Path(folder) / "none"))

    def test_peers_are_right_on_a_cpu(self):
        import ladder_peers

        try:
            import torch
        except ImportError:
            self.skipTest("PyTorch is not installed")
        torch.manual_seed(1)
        found = {}
        for group, shape in (("cpu", (3, 70, 40)), ("matmul", (65, 70, 40)), ("softmax", (70, 40)), ("tensor", (16, 70, 128)),
                             ("causal", (16, 70, 128)),
                             ("backward", (3, 70, 64))):  # fmt: skip
            for prepare in ladder_peers.peers_of(group, shape, "cpu"):
                try:
                    peers = prepare()
                except RuntimeError:  # a backend that CPUs lack
                    continue
                for peer in peers:
                    with contextlib.suppress(RuntimeError):
                        peer.run()
                        found.setdefault(group, []).append(peer.name)
                        self.assertLessEqual(peer.error(), peer.tolerance, peer.name)
        self.assertEqual(found["matmul"], ["cuBLAS fp32", "cuBLAS tf32", "cuBLAS bf16"])
        for group, name in (("cpu", "PyTorch"), ("softmax", "PyTorch softmax"), ("tensor", "FlashAttention-2"),
                            ("causal", "FlashAttention-2"),
                            ("backward", "FlashAttention-2")):  # fmt: skip
            self.assertEqual(found[group], [name])

    def test_rows(self):
        import ladder_peers

        row = ladder_peers.summary([0.004, 0.002, 0.003])
        self.assertEqual(row, {"median_seconds": 0.003, "spread": 0.3333, "runs": 3})
        self.assertRegex(ladder_peers.host_text(), r"\S, \d+ threads$")


class Pick(unittest.TestCase):
    """bench/experiments/pick.py."""

    PICK = HERE.parent.parent / "bench" / "experiments" / "pick.py"
    ROW = '{dtypes = ["bf16"], head_dim = 64, variant = "more", terms = "plain", config = {head_dim = 64, head_dim_v = 64, tile_m = 64}}'

    def pick(self, *arguments):
        return subprocess.run([sys.executable, str(self.PICK), *arguments], capture_output=True, text=True)

    def test_rows_before_those_that_are_chosen(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "list.toml")
            done = self.pick(str(path), "bwd_sm90_bf16_d64", "bwd_sm90_bf16_d128*", "merge", "--add", "bwd_sm90", self.ROW)
            self.assertEqual(done.returncode, 0, done.stderr)
            families = make_instances.families_of(path)
            self.assertEqual(set(families), {"bwd_sm90", "merge"})
            names = [kernel["name"] for kernel in make_instances.kernels_of("bwd_sm90", families["bwd_sm90"])]
            self.assertEqual(names[0], "bwd_sm90_bf16_d64_more")
            self.assertIn("bwd_sm90_bf16_d64", names)
            self.assertIn("bwd_sm90_bf16_d128_small", names)
            self.assertTrue(all("_bf16_d" in name for name in names))
            library = make_instances.families_of(self.PICK.parent.parent.parent / "src/cuda/kernels/instances.toml")
            row = next(r for r in library["bwd_sm90"]["instances"] if r.get("variant") == "small" and r["head_dim"] == 128)
            self.assertIn(dict(row, dtypes=["bf16"]), families["bwd_sm90"]["instances"])

    def test_parts_of_a_library(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "list.toml")
            done = self.pick(str(path), "bwd_p*process_bf16", "clear_counter")  # of one library, from sm_80 and from sm_75 on
            self.assertEqual(done.returncode, 0, done.stderr)
            for chips in ([75, 80, 86, 89, 90], [90]):
                make_instances.outputs(make_instances.families_of(path), chips)

    def test_mistakes(self):
        with tempfile.TemporaryDirectory() as folder:
            path = str(pathlib.Path(folder, "list.toml"))
            for arguments, what in (
                (["nothing_like_it"], "no kernel is called nothing_like_it"),
                (["merge", "--add", "bwd_sm91", self.ROW], "got family bwd_sm91"),
                (["merge", "--add", "bwd_sm90", "{head_dim = }"], "pick.py: "),
                (["merge", "--add", "bwd_sm90", self.ROW.replace("plain", "pain")], "pick.py: "),
            ):
                done = self.pick(path, *arguments)
                self.assertNotEqual(done.returncode, 0, arguments)
                self.assertIn(what, done.stderr)
                self.assertFalse(pathlib.Path(path).exists())


class WithoutGpu(unittest.TestCase):
    """What is missing is said, with a remedy, and the exit status is not 0."""

    def test_profile(self):
        done = run("counters.py", "--ncu", str(HERE / "no-such-program"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("Install Nsight Compute", done.stderr)

    def test_profile_of_a_file_that_is_none(self):
        done = run("counters.py", "--csv", str(HERE / "CMakeLists.txt"))
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("raw page", done.stderr)

    def test_gpu(self):
        with tempfile.TemporaryDirectory() as folder:
            # A torch that sees no GPU, whatever this machine has.
            (pathlib.Path(folder) / "torch.py").write_text(
                "class cuda:\n    is_available = staticmethod(lambda: False)\n"
            )
            done = run("compare.py", "--quick", env={"PYTHONPATH": folder, "PATH": ""})
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("sees no GPU", done.stderr)

    def test_usage(self):
        self.assertEqual(run("compare.py", "--list").returncode, 0)
        for arguments in (["--pass", "sideways"], ["--s", "1000"], ["--name", "nothing-like-it"], ["--rounds", "0"]):
            done = run("compare.py", *arguments)
            self.assertNotEqual(done.returncode, 0, arguments)
            self.assertTrue(done.stderr.startswith(("compare.py: ", "usage: ")), done.stderr)


if __name__ == "__main__":
    unittest.main()
