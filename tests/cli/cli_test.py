#!/usr/bin/env python3
"""Runs the program `fovea` as a user does: every subcommand, files that come and go, exit codes and messages.

    FOVEA_PROGRAM=build/release/bin/fovea FOVEA_SOURCE=. cli_test.py [Suite ...]
"""
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import attention
from formats import Array, read_npy, read_png, read_safetensors, read_svg, write_npy, write_safetensors

PROGRAM = os.environ["FOVEA_PROGRAM"]
SAMPLE = pathlib.Path(os.environ["FOVEA_SOURCE"]) / "data" / "minilm_layer3_qkv.safetensors"
PICTURES = os.environ.get("FOVEA_TEST_PICTURES", "yes") == "yes"
SANITIZED = os.environ.get("FOVEA_TEST_SANITIZED", "") != ""
SUBCOMMANDS = ["demo", "attend", "look", "explain", "compile", "bench", "check", "ladder", "report", "info"]
OK, CHECK_FAILED, USAGE, INPUT, PROBLEM, OUTPUT, RESOURCES = range(7)


def fovea(*arguments, **options):
    return subprocess.run([PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=250, **options)


def has_living_children(process):
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rsplit(")", 1)[1].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == process and state != "Z":
            return True
    return False


def launched(command, timeout=100, alone=10):
    """Runs the program, which mpiexec may start. When a process failed, Open MPI 4.1's mpiexec can hang after all processes are gone (in
    PMIx_server_finalize; once in 54 runs): a launcher that stays alone for `alone` seconds is killed, and has failed."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=err)
        begin = seen = time.monotonic()
        while True:
            try:
                process.wait(timeout=1)
                break
            except subprocess.TimeoutExpired:
                now = time.monotonic()
                seen = now if command[0] == PROGRAM or has_living_children(process.pid) else seen
                if now - begin < timeout and now - seen < alone:
                    continue
                process.kill()
                process.wait()
                if now - seen < alone:
                    raise
                break
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), err.read())


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="fovea_cli_"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.random = random.Random(1)

    def ok(self, *arguments, **options):
        done = fovea(*arguments, **options)
        self.assertEqual(done.returncode, OK, f"{arguments}: {done.stderr}{done.stdout}")
        self.assertEqual(done.stderr, "")
        return done.stdout

    def json(self, *arguments, **options):
        return json.loads(self.ok(*arguments, "--json", **options))

    def fails(self, code, *arguments, says=(), **options):
        """The exit code, one line on stderr that holds each of `says`, nothing on stdout."""
        done = fovea(*arguments, **options)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stderr}{done.stdout}")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertTrue(done.stderr.startswith("fovea"), done.stderr)
        self.assertEqual(done.stdout, "")
        for text in says:
            self.assertIn(str(text), done.stderr)

    def numbers(self, *shape, dtype="f4"):
        count = math.prod(shape)
        # Multiples of 1/64 of small size: exact in every type.
        return Array([self.random.randint(-128, 128) / 64 for _ in range(count)], shape, dtype)

    def qkv(self, shape_q, shape_k, shape_v=None, dtype="f4"):
        return {"q": self.numbers(*shape_q, dtype=dtype), "k": self.numbers(*shape_k, dtype=dtype),
                "v": self.numbers(*(shape_v or shape_k), dtype=dtype)}

    def save(self, arrays, name="qkv.safetensors", metadata=None):
        write_safetensors(self.folder / name, arrays, metadata)
        return self.folder / name

    def close(self, got, expected, tolerance=2e-5):
        self.assertEqual(len(got), len(expected))
        for a, b in zip(got, expected):
            if math.isinf(b):
                self.assertEqual(a, b)
            else:
                self.assertLessEqual(abs(a - b), tolerance * max(1, abs(b)), (a, b))


def head_rows(array, head, batch=0):
    """Rows of one head of an array (batch, seqlen, heads, size)."""
    _, seqlen, heads, size = array.shape
    start = [((batch * seqlen + s) * heads + head) * size for s in range(seqlen)]
    return [array.values[at:at + size] for at in start]


def rows(array):
    size = array.shape[-1]
    return [array.values[at:at + size] for at in range(0, len(array.values), size)]


def flat(table):
    return [x for row in table for x in row]


class Help(ProgramTest):
    def test_help_needs_no_manual(self):
        text = self.ok("--help")
        for word in [*SUBCOMMANDS, "Exit codes", "0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "6 "]:
            self.assertIn(word, text)
        for name in SUBCOMMANDS:
            help_text = self.ok(name, "--help")
            self.assertIn("--json", help_text)
            if name != "info":
                self.assertIn("Example", help_text)

    def test_version(self):
        self.assertRegex(self.ok("--version"), r"^fovea \d+\.\d+\.\d+\n$")


class Usage(ProgramTest):
    def test_nonsense(self):
        self.fails(USAGE, says=["--help"])
        self.fails(USAGE, "conquer")
        self.fails(USAGE, "info", "--sing", says=["--sing", "fovea info"])
        self.fails(USAGE, "attend", "--input", "x.safetensors", says=["--output"])
        self.fails(USAGE, "look", "--input", SAMPLE, "--output", "x.jpg",
                   says=["--output", "x.jpg", ".png or .svg"])
        self.fails(USAGE, "demo", "--input", SAMPLE, "--output", "x.pdf", says=["--output", "x.pdf", ".png or .svg"])
        self.fails(USAGE, "explain", "--window", "seven", says=["--window", "seven", "LEFT,RIGHT"])
        self.fails(USAGE, "explain", "--dtype", "int3", says=["--dtype", "int3", "bfloat16"])
        self.fails(USAGE, "explain", "--pass", "sideways", says=["--pass", "sideways"])
        self.fails(USAGE, "explain", "--with", "magic", says=["--with", "magic"])
        self.fails(USAGE, "bench", "--seqlen", "many", says=["--seqlen"])
        self.fails(USAGE, "check", "--backend", "gpu_of_dreams", says=["gpu_of_dreams", "reference"])

    def test_inputs(self):
        out = self.folder / "o.npy"
        self.fails(USAGE, "attend", "--output", out, says=["--input"])
        self.fails(USAGE, "attend", "--q", "q.npy", "--k", "k.npy", "--output", out, says=["--v"])
        self.fails(USAGE, "attend", "--input", SAMPLE, "--q", "q.npy", "--output", out, says=["--input", "--q"])
        self.fails(USAGE, "attend", "--input", "qkv.npz", "--output", out, says=["qkv.npz", "safetensors"])
        self.fails(USAGE, "attend", "--input", SAMPLE, "--output", self.folder / "o.txt", says=["--output", "o.txt"])
        self.fails(USAGE, "attend", "--input", SAMPLE, "--output", out, "--lse-output", out, says=["--lse-output"])
        self.fails(USAGE, "attend", "--input", SAMPLE, "--output", out, "--block-size", "8,8", says=["--block-mask"])
        self.fails(USAGE, "explain", "--input", SAMPLE, "--seqlen", "8", says=["sizes"])
        self.assertFalse(out.exists())


class Info(ProgramTest):
    def test_text_and_json(self):
        self.assertIn("reference", self.ok("info"))
        info = self.json("info")
        names = [backend["name"] for backend in info["backends"]]
        self.assertEqual(names[-1], "reference")
        self.assertGreaterEqual(info["threads"], 1)
        for backend in info["backends"]:
            self.assertEqual(backend["available"], backend["unavailable_because"] == "")

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_full_disk_is_noticed(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            done = subprocess.run([PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
        self.assertEqual(done.returncode, OUTPUT)
        self.assertIn("stdout", done.stderr)


class Attend(ProgramTest):
    def attend(self, arrays, *options):
        """o and lse through .safetensors; the same o must come through .npy."""
        path = self.save(arrays)
        self.ok("attend", "--input", path, "--output", self.folder / "o.safetensors", *options)
        for name in "qkv":
            write_npy(self.folder / f"{name}.npy", arrays[name])
        self.ok("attend", *[x for n in "qkv" for x in (f"--{n}", self.folder / f"{n}.npy")], "--output",
                self.folder / "o.npy", "--lse-output", self.folder / "lse.npy", *options)
        result = read_safetensors(self.folder / "o.safetensors")
        self.assertEqual(set(result), {"o", "lse"})
        for name in result:
            other = read_npy(self.folder / f"{name}.npy")
            self.assertEqual((other.shape, other.dtype, other.to_bytes()),
                             (result[name].shape, result[name].dtype, result[name].to_bytes()))
        return result["o"], result["lse"]

    def test_two_dimensions(self):
        x = self.qkv((5, 8), (7, 8), (7, 3))
        o, lse = self.attend(x, "--causal")
        p, expected_lse = attention.weights(rows(x["q"]), rows(x["k"]), causal=True)
        self.assertEqual((o.shape, lse.shape), ((5, 3), (5,)))
        self.close(o.values, flat(attention.output(p, rows(x["v"]))))
        self.close(lse.values, expected_lse)

    def test_three_dimensions_and_grouped_heads(self):
        x = self.qkv((6, 4, 8), (9, 2, 8))
        o, lse = self.attend(x, "--window", "3,1", "--scale", "-0.5", "--threads", "2")
        self.assertEqual((o.shape, lse.shape), ((6, 4, 8), (4, 6)))
        full = {name: Array(a.values, (1, *a.shape)) for name, a in {**x, "o": o}.items()}
        for head in range(4):
            p, expected_lse = attention.weights(head_rows(full["q"], head), head_rows(full["k"], head // 2), -0.5,
                                                window=(3, 1))
            self.close(flat(head_rows(full["o"], head)), flat(attention.output(p, head_rows(full["v"], head // 2))))
            self.close(lse.values[head * 6:head * 6 + 6], expected_lse)

    def test_four_dimensions_in_every_type(self):
        for dtype, name, tolerance in (("f4", "float32", 2e-5), ("f2", "float16", 4e-3), ("bf16", "bfloat16", 3e-2),
                                       ("f8", "float64", 1e-6)):
            x = self.qkv((2, 4, 3, 16), (2, 4, 3, 16))
            path = self.save(x)
            out = self.folder / "o.safetensors"
            told = self.json("attend", "--input", path, "--dtype", name, "--output", out, "--softcap", "2")
            o = read_safetensors(out)["o"]
            self.assertEqual((o.dtype, o.shape), (dtype, (2, 4, 3, 16)))
            self.assertEqual(told["q"], {"type": name, "shape": [2, 4, 3, 16]})
            self.assertEqual([array["name"] for array in told["outputs"]], ["o", "lse"])
            self.assertGreater(told["passes"][0]["flops"], 0)
            for batch in range(2):
                p, _ = attention.weights(head_rows(x["q"], 1, batch), head_rows(x["k"], 1, batch), softcap=2)
                self.close(flat(head_rows(o, 1, batch)), flat(attention.output(p, head_rows(x["v"], 1, batch))), tolerance)

    def test_arrays_of_terms(self):
        x = self.qkv((1, 5, 2, 8), (1, 6, 2, 8))
        bias, mask = self.numbers(5, 6), Array([self.random.random() < 0.7 for _ in range(60)], (2, 5, 6), "b1")
        mask.values[:6] = [False] * 6  # a row without keys
        write_npy(self.folder / "bias.npy", bias)
        write_npy(self.folder / "mask.npy", mask)
        write_safetensors(self.folder / "more.safetensors",
                          {"alibi": Array([0.5, 0.25], (2,), "f8"), "logits": Array([0.5, -1.0], (2,))})
        more = self.folder / "more.safetensors"
        out = self.folder / "o.safetensors"
        self.ok("attend", "--input", self.save(x), "--bias", self.folder / "bias.npy", "--mask", self.folder / "mask.npy",
                "--alibi", more, "--output", out)
        result = read_safetensors(out)
        self.assertEqual(result["lse"].shape, (1, 2, 5))
        for head in range(2):
            p, lse = attention.weights(head_rows(x["q"], head), head_rows(x["k"], head), bias=rows(bias),
                                       mask=rows(mask)[5 * head:5 * head + 5], slope=[0.5, 0.25][head])
            self.close(flat(head_rows(result["o"], head)), flat(attention.output(p, head_rows(x["v"], head))))
            self.close(result["lse"].values[5 * head:5 * head + 5], lse)
        self.ok("attend", "--input", self.save(x), "--sink", f"{more}:logits", "--output", out)
        p, lse = attention.weights(head_rows(x["q"], 1), head_rows(x["k"], 1), sink=-1.0)
        self.close(read_safetensors(out)["lse"].values[5:], lse)

    def test_queries_of_values(self):
        x = self.qkv((1, 5, 2, 8), (1, 6, 2, 8), (1, 6, 2, 12))
        x["qv"] = self.numbers(1, 5, 2, 12)
        out = self.folder / "o.safetensors"
        told = json.loads(self.ok("attend", "--input", self.save(x), "--qv", self.save(x), "--output", out, "--json"))
        self.assertEqual(told["passes"][0]["flops"], 5 * 6 * 2 * 2 * (8 + 2 * 12))
        result = read_safetensors(out)
        for head in range(2):
            joined = [[a + b for a, b in zip(head_rows(x[one], head), head_rows(x[other], head))] for one, other in (("q", "qv"), ("k", "v"))]
            p, lse = attention.weights(*joined)
            self.close(flat(head_rows(result["o"], head)), flat(attention.output(p, head_rows(x["v"], head))))
            self.close(result["lse"].values[5 * head:5 * head + 5], lse)
        write_npy(self.folder / "qv.npy", self.numbers(1, 5, 2, 8))
        self.fails(PROBLEM, "attend", "--input", self.save(x), "--qv", self.folder / "qv.npy", "--output", out,
                   says=["qv: got shape (1, 5, 2, 8)", "(1, 5, 2, 12)", "qv.npy"])
        write_npy(self.folder / "flat.npy", self.numbers(5, 12))
        self.fails(INPUT, "attend", "--input", self.save(x), "--qv", self.folder / "flat.npy", "--output", out, says=["--qv", "flat.npy"])
        self.ok("explain", "--seqlen", "1024", "--with", "qv,pages")

    def test_8_bits(self):
        x = {name: Array.from_bytes(array.to_bytes(), array.shape, "e4m3")
             for name, array in self.qkv((1, 5, 4, 8), (1, 6, 2, 8), dtype="e4m3").items()}
        factors = {"q_descale": Array([0.5, 2], (1, 2)), "k_descale": Array([1.5], (1, 1)), "v_descale": Array([0.25], (1, 1))}
        out = self.folder / "o.safetensors"
        more = self.save(factors, "factors.safetensors")
        given = ["--q-descale", more, "--k-descale", more, "--v-descale", more]
        told = json.loads(self.ok("attend", "--input", self.save(x), *given, "--output", out, "--json"))
        self.assertEqual(told["q"], {"type": "float8_e4m3fn", "shape": [1, 5, 4, 8]})
        result = read_safetensors(out)
        self.assertEqual(result["o"].dtype, "bf16")
        for head in range(4):
            q, k, v = ([[factor * element for element in row] for row in head_rows(x[name], head // (1 if name == "q" else 2))]
                       for name, factor in (("q", [0.5, 2][head // 2]), ("k", 1.5), ("v", 0.25)))
            p, lse = attention.weights(q, k)
            self.close(flat(head_rows(result["o"], head)), flat(attention.output(p, v)), 1e-2)
            self.close(result["lse"].values[5 * head:5 * head + 5], lse)
        for name, array in x.items():
            write_npy(self.folder / f"{name}.npy", array)
        self.ok("attend", *(word for name in x for word in (f"--{name}", self.folder / f"{name}.npy")), *given, "--output-dtype", "float32",
                "--output", out)
        self.close(read_safetensors(out)["o"].values, result["o"].values, 1e-2)
        wide = self.qkv((1, 5, 2, 8), (1, 6, 2, 8))
        self.ok("attend", "--input", self.save(wide), "--dtype", "float8_e4m3fn", "--output", out)
        self.fails(PROBLEM, "attend", "--input", self.save(wide), "--q-descale", more, "--output", out,
                   says=["q_descale: got a tensor, expected none, as q is float32"])
        self.ok("explain", "--seqlen", "64", "--dtype", "float8_e4m3fn", "--with", "descale,pages,append")

    def test_lists_of_keys(self):
        x = self.qkv((1, 5, 2, 8), (1, 6, 2, 8))
        lists = [[0, 3], [5, -1], [-1, -1], [2, 4], [1, 0]]
        write_npy(self.folder / "keys.npy", Array([j for row in lists for j in row], (5, 2), "i8"))
        out = self.folder / "o.safetensors"
        told = json.loads(self.ok("attend", "--input", self.save(x), "--keys", self.folder / "keys.npy", "--output", out, "--json"))
        self.assertEqual(told["passes"][0]["flops"], 5 * 2 * 2 * 4 * 8)
        result = read_safetensors(out)
        for head in range(2):
            p, lse = attention.weights(head_rows(x["q"], head), head_rows(x["k"], head),
                                       mask=[[j in row for j in range(6)] for row in lists])
            self.close(flat(head_rows(result["o"], head)), flat(attention.output(p, head_rows(x["v"], head))))
            self.close(result["lse"].values[5 * head:5 * head + 5], lse)
        write_npy(self.folder / "keys.npy", Array([0, 3, 6, -1] + 6 * [0], (5, 2), "i4"))
        self.fails(PROBLEM, "attend", "--input", self.save(x), "--keys", self.folder / "keys.npy", "--output", out,
                   says=["keys: got 6 at entry 0 of query 1", "-1 to 5", "keys.npy"])
        self.ok("explain", "--seqlen", "1024", "--with", "keys")

    def test_packed_sequences(self):
        x = self.qkv((9, 1, 8), (11, 1, 8))
        write_npy(self.folder / "cu_q.npy", Array([0, 4, 9], (3,), "i8"))
        write_npy(self.folder / "cu_k.npy", Array([0, 6, 11], (3,), "i4"))
        out = self.folder / "o.safetensors"
        self.ok("attend", "--input", self.save(x), "--causal", "--cu-seqlens-q", self.folder / "cu_q.npy",
                "--cu-seqlens-k", self.folder / "cu_k.npy", "--output", out)
        result = read_safetensors(out)
        self.assertEqual((result["o"].shape, result["lse"].shape), ((9, 1, 8), (1, 9)))
        expected, lse = [], []
        for q, k in ((slice(0, 4), slice(0, 6)), (slice(4, 9), slice(6, 11))):
            p, part = attention.weights(rows(x["q"])[q], rows(x["k"])[k], causal=True)
            expected += flat(attention.output(p, rows(x["v"])[k]))
            lse += part
        self.close(result["o"].values, expected)
        self.close(result["lse"].values, lse)
        self.fails(PROBLEM, "attend", "--input", self.save(x), "--cu-seqlens-q", self.folder / "cu_q.npy", "--output", out,
                   says=["cu_seqlens_k"])

    def test_dropout_repeats_by_its_seed(self):
        path = self.save(self.qkv((16, 8), (16, 8)))
        outs = []
        for seed in (5, 5, 6):
            self.ok("attend", "--input", path, "--dropout", "0.5", "--seed", seed, "--output", self.folder / "o.npy")
            outs.append((self.folder / "o.npy").read_bytes())
        self.assertEqual(outs[0], outs[1])
        self.assertNotEqual(outs[0], outs[2])

    def test_backends_agree(self):
        path = self.save(self.qkv((33, 2, 16), (40, 2, 16)))
        results = []
        for backend in [b["name"] for b in self.json("info")["backends"] if b["available"] and "bf16" not in b["name"]]:
            told = self.json("attend", "--input", path, "--causal", "--backend", backend, "--output", self.folder / "o.npy")
            self.assertEqual(told["passes"][0]["backend"], backend)
            results.append(read_npy(self.folder / "o.npy").values)
        for other in results[1:]:
            self.close(other, results[0])


class Gradients(ProgramTest):
    def test_against_the_formulas(self):
        x = self.qkv((6, 8), (9, 8), (9, 4))
        d_o = self.numbers(6, 4)
        write_npy(self.folder / "d_o.npy", d_o)
        out = self.folder / "gradients.safetensors"
        told = self.json("attend", "--input", self.save(x), "--causal", "--grad", self.folder / "d_o.npy", "--output", out,
                         "--deterministic")
        self.assertEqual([step["pass"] for step in told["passes"]], ["forward", "backward"])
        result = read_safetensors(out)
        self.assertEqual(set(result), {"o", "lse", "dq", "dk", "dv"})
        expected = attention.gradients(rows(x["q"]), rows(x["k"]), rows(x["v"]), rows(d_o), causal=True)
        for name, values in zip(("dq", "dk", "dv"), expected):
            self.assertEqual(result[name].shape, x[name[1]].shape)
            self.close(result[name].values, flat(values))

    def test_of_bias_and_sink(self):
        x = self.qkv((1, 4, 2, 8), (1, 5, 2, 8))
        write_npy(self.folder / "bias.npy", self.numbers(2, 4, 5))
        write_npy(self.folder / "sink.npy", Array([0.0, 0.0], (2,)))
        write_npy(self.folder / "d_o.npy", Array([0.0] * 64, (1, 4, 2, 8)))
        out = self.folder / "gradients.safetensors"
        self.ok("attend", "--input", self.save(x), "--bias", self.folder / "bias.npy", "--sink", self.folder / "sink.npy",
                "--grad", self.folder / "d_o.npy", "--output", out)
        result = read_safetensors(out)
        for name, shape in (("dbias", (2, 4, 5)), ("dsink", (2,)), ("dq", (1, 4, 2, 8))):
            self.assertEqual(result[name].shape, shape)
            self.assertEqual(set(result[name].values), {0.0})

    def test_errors(self):
        path = self.save(self.qkv((6, 8), (9, 8)))
        write_npy(self.folder / "d_o.npy", self.numbers(6, 7))
        out = self.folder / "g.safetensors"
        self.fails(INPUT, "attend", "--input", path, "--grad", self.folder / "d_o.npy", "--output", out,
                   says=["--grad", "(6, 7)", "(6, 8)"])
        write_npy(self.folder / "d_o.npy", self.numbers(6, 8))
        self.fails(USAGE, "attend", "--input", path, "--grad", self.folder / "d_o.npy", "--output", self.folder / "g.npy",
                   says=["--output", ".safetensors"])


class Ranks(ProgramTest):
    """One problem over several ranks: as without them."""
    TOLERANCE = 1e-5

    def compare(self, *options, command=(PROGRAM,), one=(), many=("--ranks", "3")):
        """All outputs over ranks beside those of one; what the program printed with --json."""
        alone, together = self.folder / "alone.safetensors", self.folder / "together.safetensors"
        self.ok("attend", *options, *one, "--output", alone)
        done = launched([*command, "attend", *options, *many, "--output", together, "--json"], timeout=250)
        self.assertEqual(done.returncode, OK, done.stderr + done.stdout)
        expected, got = read_safetensors(alone), read_safetensors(together)
        self.assertEqual(list(got), list(expected))
        for name, array in expected.items():
            self.assertEqual((got[name].shape, got[name].dtype), (array.shape, array.dtype))
            self.close(got[name].values, array.values, self.TOLERANCE)
        return json.loads(done.stdout)

    def save_gradient(self, *shape):
        write_npy(self.folder / "d_o.npy", self.numbers(*shape))
        return self.folder / "d_o.npy"

    def test_forward_and_gradients(self):
        path = self.save(self.qkv((2, 13, 4, 8), (2, 17, 2, 8)))
        grad = self.save_gradient(2, 13, 4, 8)
        write_npy(self.folder / "sink.npy", self.numbers(4))
        for terms in ((), ("--causal",), ("--window", "3,2", "--softcap", "2"), ("--sink", self.folder / "sink.npy")):
            told = self.compare("--input", path, "--grad", grad, *terms)
            for step in told["passes"]:
                self.assertEqual(step["ranks"]["count"], 3)
                self.assertTrue(step["ranks"]["reason"].startswith("chosen: "))

    def test_dropout(self):
        path = self.save(self.qkv((2, 45, 4, 8), (2, 50, 2, 8)))
        self.compare("--input", path, "--grad", self.save_gradient(2, 45, 4, 8), "--dropout", "0.4", "--seed", "9", "--causal")

    def test_terms_by_positions(self):
        path = self.save(self.qkv((2, 13, 4, 8), (2, 17, 2, 8)))
        grad = self.save_gradient(2, 13, 4, 8)
        for name, shape in (("slopes", (4,)), ("bias", (2, 4, 13, 17)), ("table", (4, 31)), ("factor", (4,))):
            write_npy(self.folder / f"{name}.npy", self.numbers(*shape))
        write_npy(self.folder / "doc.npy", Array([row // 5 for row in (*range(17), *range(17))], (2, 17), "i4"))
        tensors = [option for name in ("table", "factor", "doc") for option in ("--tensor", f"{name}={self.folder / name}.npy")]
        self.compare("--input", path, "--grad", grad, "--alibi", self.folder / "slopes.npy", "--causal")
        self.compare("--input", path, "--grad", grad, "--bias", self.folder / "bias.npy")
        told = self.compare("--input", path, "--grad", grad, "--score", "s * factor[h] + table[h, clamp(k - q, -15, 15) + 15]",
                            "--sees", "doc[b, q] == doc[b, k] || k <= q", *tensors)
        for step in told["passes"]:
            self.assertIn("terms of the whole problem: score s * factor[h] + table[h, ", step["ranks"]["reason"])

    def test_every_method(self):
        path = self.save(self.qkv((11, 4, 8), (11, 4, 8)))
        grad = self.save_gradient(11, 4, 8)
        for heads_ranks, stages in ((1, 1), (1, 4), (2, 2), (4, 1)):
            self.compare("--input", path, "--grad", grad, "--causal",
                         many=("--ranks", "4", "--heads-ranks", str(heads_ranks), "--stages", str(stages)))

    def test_packed_sequences(self):
        path = self.save(self.qkv((12, 2, 8), (12, 2, 8)))
        write_npy(self.folder / "starts.npy", Array([0, 5, 5, 12], (4,), "i4"))
        starts = ("--cu-seqlens-q", self.folder / "starts.npy", "--cu-seqlens-k", self.folder / "starts.npy")
        self.compare("--input", path, "--grad", self.save_gradient(12, 2, 8), "--causal", *starts)

    def test_fewer_queries_than_ranks(self):
        self.compare("--input", self.save(self.qkv((1, 2, 8), (40, 2, 8))), "--causal")

    def test_more_ranks_than_rows(self):
        path = self.save(self.qkv((3, 2, 8), (2, 2, 8)))
        self.compare("--input", path, "--grad", self.save_gradient(3, 2, 8), many=("--ranks", "7"))

    def test_text(self):
        text = self.ok("attend", "--input", SAMPLE, "--ranks", "2", "--threads", "2", "--output", self.folder / "o.npy")
        self.assertIn("2 ranks of 1 threads", text)

    def test_explain(self):
        text = self.ok("explain", "--seqlen", "4096", "--heads", "8", "--heads-kv", "2", "--causal", "--ranks", "4", "--pass", "bwd")
        self.assertIn("over 4 ranks\n  chosen: ", text)
        self.assertIn("passed over: ", text)
        told = self.json("explain", "--input", SAMPLE, "--ranks", "2", "--heads-ranks", "2")
        self.assertEqual(told["ranks"]["count"], 2)
        self.assertIn("rank 0: ", told["ranks"]["reason"])

    def test_methods_on_paper(self):
        command = ("explain", "--seqlen", "65536", "--heads", "16", "--head-dim", "128", "--dtype", "bfloat16", "--causal", "--ranks", "16",
                   "--ranks-per-host", "8", "--on-paper", "gpu")  # fmt: skip
        near = self.json(*command, "--host-link", "400")["ranks"]["reason"].splitlines()
        far = self.json(*command, "--host-link", "1")["ranks"]["reason"].splitlines()
        self.assertEqual(len(near), len(far))
        self.assertTrue(all("; simulated " in line for line in near + far))
        times = [float(lines[0].split("simulated ")[1].split()[0]) for lines in (near, far)]
        self.assertLess(times[0], times[1])

    def test_packed_sequences_on_paper(self):
        command = ("explain", "--heads", "16", "--head-dim", "128", "--dtype", "bfloat16", "--causal", "--ranks", "8", "--on-paper", "gpu")
        apart = self.json(*command, "--lengths", "16x2048")["ranks"]["reason"].splitlines()
        mixed = self.json(*command, "--lengths", "20000,4x3000,768")["ranks"]["reason"].splitlines()
        whole = self.json(*command, "--lengths", "32768")["ranks"]["reason"].splitlines()
        self.assertIn("messages 0, moving 0), 0 MB sent", apart[0])
        times = [float(lines[0].split("simulated ")[1].split()[0]) for lines in (apart, mixed, whole)]
        self.assertEqual(times, sorted(times))
        sizes = self.json(*command, "--seqlen", "32768")["ranks"]["reason"].splitlines()
        self.assertEqual([line.split(" (")[0] for line in sizes], [line.split(" (")[0] for line in whole])
        for lengths in ("3x", "x3", "0x3", "-1", "a", "2147483648", "2x1073741824"):
            self.fails(USAGE, "explain", f"--lengths={lengths}", says=["--lengths"])
        for other in (("--batch", "2"), ("--seqlen", "3"), ("--with", "packed"), ("--input", SAMPLE)):
            self.fails(USAGE, "explain", "--lengths", "3", *other, says=["lengths" if other[0] != "--input" else "inputs"])

    def test_bench(self):
        sizes = ("--seqlen", "300", "--heads", "4", "--head-dim", "16", "--causal", "--seconds", "0.02", "--pass", "fwd,bwd")
        told = self.json("bench", *sizes, "--ranks", "2", "--threads", "2", "--stages", "2", "--heads-ranks", "1")
        for row in told["rows"]:
            self.assertTrue(row["right"])
            self.assertEqual(row["ranks"]["count"], 2)
            self.assertAlmostEqual(row["ranks"]["share"], row["ranks"]["single_median_seconds"] / row["median_seconds"], places=6)
        self.assertIn("2 ranks at ", self.ok("bench", *sizes, "--ranks", "2", "--layout", "bhsd"))

    def test_errors(self):
        path, out = self.save(self.qkv((6, 4, 8), (9, 4, 8))), self.folder / "o.npy"
        attend = ("attend", "--input", path, "--output", out)
        self.fails(USAGE, *attend, "--ranks", "0", says=["--ranks", "1"])
        self.fails(USAGE, *attend, "--stages", "2", says=["--stages", "without --ranks"])
        self.fails(USAGE, "bench", "--heads-ranks", "2", says=["--heads-ranks", "without --ranks"])
        for option in (("--on-paper", "gpu"), ("--ranks-per-host", "8"), ("--link", "400"), ("--host-link", "50")):
            self.fails(USAGE, "explain", *option, says=[option[0], "without --ranks"])
        self.fails(PROBLEM, *attend, "--ranks", "4", "--heads-ranks", "3", says=["heads_ranks", "divisor of 4"])
        self.fails(PROBLEM, *attend, "--ranks", "2", "--stages", "5", says=["stages", "5"])
        self.fails(PROBLEM, *attend, "--ranks", "2", "--dropout", "1.5", says=["dropout", "[0, 1)"])
        write_npy(self.folder / "bias.npy", self.numbers(3, 9))
        self.fails(PROBLEM, *attend, "--ranks", "2", "--bias", self.folder / "bias.npy", says=["bias", "3, 9)", "(1, 4, 6, 9)", "bias.npy"])
        self.fails(PROBLEM, *attend, "--ranks", "2", "--dtype", "float64", says=["q", "float32"])
        self.fails(USAGE, "explain", "--with", "packed", "--ranks", "2", says=["packed", "--cu-seqlens-q"])
        for command in ("explain", "bench"):
            self.fails(USAGE, command, "--ranks", "2", "--device", "cuda", says=["--ranks", "--device cpu"])
        self.assertFalse(out.exists())


@unittest.skipUnless(os.environ.get("FOVEA_TEST_MPIEXEC"), "MPI was not found")
class Mpi(Ranks):
    """Ranks that are processes, which open libfovea_mpi; the inherited problems, over three of them."""
    MPIEXEC = os.environ.get("FOVEA_TEST_MPIEXEC", "").split()

    def compare(self, *options, **ignored):
        return super().compare(*options, command=(*self.MPIEXEC, "-n", "3", PROGRAM), many=("--mpi", "--ranks", "3"))

    def test_every_method(self):
        pass  # the transport knows nothing of methods

    test_text = test_explain = test_packed_sequences_on_paper = test_methods_on_paper = test_every_method

    def test_errors(self):
        path, out = self.save(self.qkv((6, 4, 8), (9, 4, 8))), self.folder / "o.npy"
        for options, says in ((("--ranks", "3"), "got 3, expected 2"), (("--dropout", "1.5"), "dropout")):
            done = launched([*self.MPIEXEC, "-n", "2", PROGRAM, "attend", "--mpi", "--input", path, "--output", out, *options])
            self.assertNotEqual(done.returncode, OK)
            self.assertIn(says, done.stderr)
        self.assertFalse(out.exists())

    def test_one_process_fails(self):
        """Others wait for no deadline, whatever a process does when it fails."""
        path = self.save(self.qkv((6, 4, 8), (6, 4, 8)))
        attend = f"attend --input {path} --output {self.folder / 'o.npy'}"
        for command in (attend, "bench --seqlen 64 --heads 2 --head-dim 16 --seconds 0.01"):
            begin = time.monotonic()
            program = f"exec {PROGRAM} {command} --mpi"
            by_rank = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && {program} --backend none; {program}'
            done = launched([*self.MPIEXEC, "-n", "3", "sh", "-c", by_rank], timeout=50)
            self.assertNotEqual(done.returncode, OK)
            self.assertIn('backend: got "none"', done.stderr)
            self.assertLess(time.monotonic() - begin, 40)

    def test_processes_that_differ(self):
        path, out = self.save(self.qkv((6, 4, 8), (6, 4, 8))), self.folder / "o.npy"
        for option, says in (("--scale 0.$OMPI_COMM_WORLD_RANK", "scale: got 0.35355339059327373 on rank 0 and 0.1 on rank 1 and 0.2 on rank 2"),
                             ("--dropout 0.5 --seed $OMPI_COMM_WORLD_RANK", "seed: got 0 on rank 0 and 1 on rank 1 and 2 on rank 2")):  # fmt: skip
            program = f"exec {PROGRAM} attend --mpi --input {path} --output {out} {option}"
            done = launched([*self.MPIEXEC, "-n", "3", "sh", "-c", program], alone=3)
            self.assertNotEqual(done.returncode, OK)
            self.assertIn(f"{says}, expected the same on all ranks; pass one value on every rank", done.stderr)
        self.assertFalse(out.exists())

    def test_one_process_is_killed(self):
        """In the middle of its work: the launcher ends the others, or they end by themselves. No output is there; a process that is killed
        cannot remove the hidden file that it was about to put in place."""
        path, out = self.folder / "qkv.safetensors", self.folder / "out"
        out.mkdir()
        values = Array([0.25, -0.5] * (4096 * 64), (4096, 2, 64))
        write_safetensors(path, dict.fromkeys("qkv", values))  # seconds of work
        for output in ("o.npy", "o.safetensors.index.json"):
            program = f"exec {PROGRAM} attend --mpi --input {path} --backend reference --output {out / output}"
            by_rank = f'[ "$OMPI_COMM_WORLD_RANK" = 1 ] && (sleep 1; kill -9 $$) & {program}'
            begin = time.monotonic()
            done = launched([*self.MPIEXEC, "-n", "3", "sh", "-c", by_rank], timeout=90, alone=3)
            self.assertNotEqual(done.returncode, OK)
            self.assertLess(time.monotonic() - begin, 80)
            self.assertEqual([file.name for file in out.iterdir() if not file.name.startswith(".")], [])

    def test_one_process(self):
        path, out = self.save(self.qkv((6, 4, 8), (9, 4, 8))), self.folder / "o.npy"
        self.ok("attend", "--mpi", "--input", path, "--output", out)
        self.assertEqual(read_npy(out).shape, (6, 4, 8))

    def test_bench(self):
        command = (*self.MPIEXEC, "-n", "2", PROGRAM, "bench", "--seqlen", "300,200", "--heads", "4", "--head-dim", "16", "--causal",
                   "--seconds", "0.02", "--threads", "2")  # fmt: skip
        for options in (("--json", "--pass", "fwd,bwd"), ("--json", "--pass", "fwd,bwd", "--mpi", "--layout", "bhsd")):
            done = launched([*command, *options])
            self.assertEqual(done.returncode, OK, done.stderr + done.stdout)
            rows = json.loads(done.stdout)["rows"]  # the first process prints alone
            self.assertEqual(len(rows), 4)
            for row in rows:
                self.assertTrue(row["right"])
                self.assertEqual(row["ranks"]["count"], 2)
        for options, says in ((("--ranks", "3"), "got 3, expected 2"), (("--decode",), "--no-mpi"), (("--heads-ranks", "3"), "heads_ranks")):
            done = launched([*command, *options])
            self.assertNotEqual(done.returncode, OK)
            self.assertIn(says, done.stderr)

    def test_processes_are_recognised(self):
        path = self.save(self.qkv((13, 4, 8), (13, 4, 8)))
        for many in ((), ("--ranks", "3")):
            told = Ranks.compare(self, "--input", path, "--causal", command=(*self.MPIEXEC, "-n", "3", PROGRAM), many=many)
            self.assertEqual(told["passes"][0]["ranks"]["count"], 3)

    def test_processes_that_compute_alone(self):
        path, out = self.save(self.qkv((13, 4, 8), (13, 4, 8))), self.folder / "o.npy"
        done = launched([*self.MPIEXEC, "-n", "2", PROGRAM, "attend", "--input", path, "--output", out, "--no-mpi", "--ranks", "3",
                         "--threads", "3"])  # fmt: skip
        self.assertEqual(done.returncode, OK, done.stderr)
        self.assertEqual(done.stdout.count("3 ranks of 1 threads"), 2)

    def test_launchers(self):
        attend = ("attend", "--input", self.save(self.qkv((6, 4, 8), (6, 4, 8))), "--output", self.folder / "o.npy")
        bare = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PM", "SLURM", "MV2"))}
        for count, beside in (("PMI_SIZE", {}), ("MV2_COMM_WORLD_SIZE", {}), ("SLURM_STEP_NUM_TASKS", {"PMIX_RANK": "0"})):
            done = fovea(*attend, env={**bare, count: "4", **beside})
            self.assertNotEqual(done.returncode, OK)
            self.assertFalse((self.folder / "o.npy").exists())
        for beside in ({"SLURM_STEP_NUM_TASKS": "4"}, {"PMI_SIZE": "1"}, {"PMI_SIZE": "many"}):
            self.ok(*attend, env={**bare, **beside})
        self.fails(USAGE, *attend, "--mpi", "--no-mpi", says=["--mpi", "--no-mpi"])
        self.fails(RESOURCES, *attend, env={**bare, "MV2_COMM_WORLD_SIZE": "4"},
                   says=["got 1 processes of MPI, expected 4 (MV2_COMM_WORLD_SIZE)", "--no-mpi"])


def sliced(array, axis, begin, end):
    """Indices [begin, end) of one dimension."""
    inner = math.prod(array.shape[axis + 1:])
    outer, size = math.prod(array.shape[:axis]), array.shape[axis]
    values = [x for i in range(outer) for x in array.values[(i * size + begin) * inner:(i * size + end) * inner]]
    return Array(values, (*array.shape[:axis], end - begin, *array.shape[axis + 1:]), array.dtype)


def joined(arrays, axis):
    """Arrays behind each other along one dimension."""
    first = arrays[0]
    outer = math.prod(first.shape[:axis])
    values = []
    for i in range(outer):
        for array in arrays:
            count = len(array.values) // outer
            values += array.values[i * count:(i + 1) * count]
    return Array(values, (*first.shape[:axis], sum(array.shape[axis] for array in arrays), *first.shape[axis + 1:]), first.dtype)


class Shards(ProgramTest):
    """q, k and v from sets of files, results as a set of files: as from one file and to one."""
    LAUNCH, MANY = (), ("--ranks", "3")

    def run_many(self, *options):
        return launched([*self.LAUNCH, PROGRAM, "attend", *options, *self.MANY])

    def many(self, *options):
        done = self.run_many(*options)
        self.assertEqual(done.returncode, OK, done.stderr + done.stdout)
        return done.stdout

    def refused(self, *options, says):
        before = sorted(path.name for path in self.folder.iterdir())
        done = self.run_many(*options)
        self.assertNotEqual(done.returncode, OK)
        for text in says:
            self.assertIn(str(text), done.stderr)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), before)

    def cut(self, arrays, ends, stem="parts"):
        """Shards of arrays with as many rows each, and the name of the set."""
        for number, (begin, end) in enumerate(zip((0, *ends), ends), 1):
            rows = {name: sliced(array, 1 if len(array.shape) > 3 else 0, begin, end) for name, array in arrays.items()}
            self.save(rows, f"{stem}-{number:05}-of-{len(ends):05}.safetensors")
        return self.folder / f"{stem}.safetensors"

    def whole(self, index):
        """What a set of results holds, put together; every file is named by the index."""
        weight_map = json.loads(index.read_text())["weight_map"]
        named = [name for files in weight_map.values() for name in ([files] if isinstance(files, str) else files)]
        there = {path.name for path in self.folder.glob(index.name.replace(".safetensors.index.json", "-*-of-*.safetensors"))}
        self.assertEqual(set(named), there)
        arrays = {}
        for name, files in weight_map.items():
            parts = [read_safetensors(self.folder / file)[name] for file in ([files] if isinstance(files, str) else files)]
            axis = len(parts[0].shape) - 1 if name == "lse" else 1 if len(parts[0].shape) > 3 else 0
            arrays[name] = joined(parts, axis) if len(parts) > 1 else parts[0]
        return arrays

    def same(self, got, expected):
        self.assertEqual(set(got), set(expected))
        for name, array in expected.items():
            self.assertEqual((got[name].shape, got[name].dtype), (array.shape, array.dtype), name)
            # Tables of bfloat16 round weights against maxima of their own blocks of keys, which a cut moves: a place of the result.
            self.close(got[name].values, array.values, 2**-7 if array.dtype == "bf16" else 1e-5)

    def test_rows_that_are_cut(self):
        alone, out = self.folder / "alone.safetensors", self.folder / "o.safetensors"
        for shape in ((13, 8), (13, 2, 8), (2, 13, 2, 8)):
            arrays = self.qkv(shape, shape)
            parts = self.cut(arrays, (1, 6, 6, 13))
            for terms in ((), ("--causal", "--dtype", "bfloat16")):
                self.ok("attend", "--input", self.save(arrays), *terms, "--output", alone)
                self.many("--input", parts, *terms, "--output", out)
                self.same(read_safetensors(out), read_safetensors(alone))
                self.ok("attend", "--input", parts, *terms, "--output", out)
                self.same(read_safetensors(out), read_safetensors(alone))

    def test_an_index_of_whole_tensors(self):
        arrays, out, alone = self.qkv((9, 2, 8), (9, 2, 8)), self.folder / "o.npy", self.folder / "alone.npy"
        self.save({"q": arrays["q"], "other": self.numbers(3)}, "model-00001-of-00002.safetensors")
        self.save({"k": arrays["k"], "layer.v": arrays["v"]}, "model-00002-of-00002.safetensors")
        weight_map = {"q": "model-00001-of-00002.safetensors", "other": "model-00001-of-00002.safetensors",
                      "k": "model-00002-of-00002.safetensors", "layer.v": "model-00002-of-00002.safetensors"}
        model = self.folder / "model.safetensors"
        index = self.folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 1740}, "weight_map": weight_map}))
        self.ok("attend", "--input", self.save(arrays), "--output", alone)
        for name in (index, model):
            self.many("--q", name, "--k", name, "--v", f"{name}:layer.v", "--output", out)
            self.close(read_npy(out).values, read_npy(alone).values, 1e-5)
        self.ok("attend", "--q", model, "--k", model, "--v", f"{model}:layer.v", "--output", out)
        write_npy(self.folder / "bias.npy", self.numbers(9, 9))
        self.refused("--input", index, "--output", out, says=["model.safetensors.index.json", "names no tensor 'v'", "'layer.v'"])

    def test_results_stay_with_their_ranks(self):
        alone, index = self.folder / "alone.safetensors", self.folder / "o.safetensors.index.json"
        write_npy(self.folder / "sink.npy", self.numbers(2))
        write_npy(self.folder / "factor.npy", self.numbers(2))
        for shape_q, shape_k in (((13, 8), (13, 8)), ((13, 2, 8), (13, 2, 8)), ((2, 13, 2, 8), (2, 17, 2, 8)), ((2, 2, 8), (5, 2, 8))):
            arrays = self.qkv(shape_q, shape_k)
            path = self.save(arrays)
            self.ok("attend", "--input", path, "--causal", "--output", alone)
            self.many("--input", path, "--causal", "--output", index)
            self.same(self.whole(index), read_safetensors(alone))
            for old in self.folder.glob("o-*"):
                old.unlink()
            if len(shape_q) == 2:
                continue
            grad = self.save({"d_o": self.numbers(*shape_q)}, "d_o.safetensors")
            terms = ("--sink", self.folder / "sink.npy", "--score", "s * factor[h]", "--tensor", f"factor={self.folder / 'factor.npy'}")
            self.ok("attend", "--input", path, "--grad", grad, *terms, "--output", alone)
            self.many("--input", path, "--grad", grad, *terms, "--output", index)
            self.same(self.whole(index), read_safetensors(alone))
            for old in self.folder.glob("o-*"):
                old.unlink()

    def test_results_are_inputs_again(self):
        arrays, index, alone = self.qkv((13, 2, 8), (13, 2, 8)), self.folder / "o.safetensors.index.json", self.folder / "alone.safetensors"
        parts, path = self.cut(arrays, (4, 13)), self.save(arrays)
        self.assertIn("shards: o float32 (13, 2, 8), lse", self.many("--input", parts, "--output", index))
        self.many("--input", parts, "--grad", f"{index}:o", "--output", self.folder / "g.safetensors.index.json")
        self.ok("attend", "--input", path, "--output", self.folder / "first.safetensors")
        self.ok("attend", "--input", path, "--grad", f"{self.folder / 'first.safetensors'}:o", "--output", alone)
        self.same(self.whole(self.folder / "g.safetensors.index.json"), read_safetensors(alone))
        self.refused("--input", parts, "--grad", f"{index}:o", "--output", index, says=["o.safetensors.index.json", "same file as the input"])

    def test_bad_sets(self):
        arrays, out = self.qkv((9, 2, 8), (9, 2, 8)), self.folder / "o.safetensors"
        parts = self.cut(arrays, (4, 6, 9))
        second = self.folder / "parts-00002-of-00003.safetensors"
        good = read_safetensors(second)
        refused = lambda *says: self.refused("--input", parts, "--output", out, says=["parts-00002-of-00003.safetensors", *says])
        second.unlink()
        refused("is missing, expected all 3 shards")
        self.save({"q": good["q"], "k": good["k"]}, second.name)
        refused("has no tensor 'v'; it has 'q', 'k'")
        self.save({**good, "k": self.numbers(2, 3, 8)}, second.name)
        refused("tensor 'k' has shape (2, 3, 8), expected (2, 2, 8)", "parts-00001-of-00003.safetensors")
        self.save({**good, "q": self.numbers(2, 2, 8, dtype="f8")}, second.name)
        refused("tensor 'q' is F64, expected F32")
        self.save(good, second.name)
        self.save(good, "parts-00001-of-00002.safetensors")
        self.refused("--input", parts, "--output", out, says=["shards of 2 and of 3"])

    def test_bad_indexes(self):
        arrays, out = self.qkv((9, 2, 8), (9, 2, 8)), self.folder / "o.safetensors"
        self.save(arrays, "all.safetensors")
        self.save({"q": arrays["q"]}, "some.safetensors")
        index = self.folder / "bad.safetensors.index.json"
        good = {"q": "all.safetensors", "k": "all.safetensors", "v": "all.safetensors"}
        for content, says in (("{", "not valid JSON"), ("[]", "no object weight_map"), ('{"weight_map": 3}', "no object weight_map"),
                              ({"k": "gone.safetensors"}, "'gone.safetensors', which is missing"), ({"v": "some.safetensors"}, "has no tensor 'v'"),
                              ({"v": "../all.safetensors"}, "a .safetensors file beside the index"), ({"v": 3}, "neither the name of a file"),
                              ({"v": []}, "no file"), ({"v": ["all.safetensors", "all.safetensors"]}, "twice")):
            index.write_text(content if isinstance(content, str) else json.dumps({"weight_map": {**good, **content}}))
            self.refused("--input", index, "--output", out, says=["bad.safetensors.index.json" if "no tensor" not in says else "some", says])

    def test_outputs_that_cannot_be_written(self):
        path, index = self.save(self.qkv((9, 2, 8), (9, 2, 8))), self.folder / "o.safetensors.index.json"
        (self.folder / "o-00002-of-00003.safetensors").mkdir()
        self.refused("--input", path, "--output", index, says=["o-00002-of-00003.safetensors", "not a regular file"])
        self.refused("--input", path, "--output", index, "--lse-output", self.folder / "lse.npy", says=["--lse-output"])

    def test_an_input_is_no_output(self):
        parts = self.cut(self.qkv((9, 2, 8), (9, 2, 8)), (3, 6, 9))
        self.refused("--input", parts, "--output", f"{parts}.index.json", says=["parts-0000", "same file as the input"])


@unittest.skipUnless(os.environ.get("FOVEA_TEST_MPIEXEC"), "MPI was not found")
class MpiShards(Shards):
    LAUNCH, MANY = (*os.environ.get("FOVEA_TEST_MPIEXEC", "").split(), "-n", "3"), ()


class Files(ProgramTest):
    def test_bad_inputs(self):
        out = self.folder / "o.npy"
        self.fails(INPUT, "attend", "--input", self.folder / "none.safetensors", "--output", out, says=["none.safetensors"])
        damaged = self.folder / "damaged.safetensors"
        damaged.write_bytes(SAMPLE.read_bytes()[:5000])
        self.fails(INPUT, "attend", "--input", damaged, "--output", out, says=["damaged.safetensors"])
        self.fails(INPUT, "demo", "--input", damaged, says=["damaged.safetensors"])
        self.fails(INPUT, "look", "--input", damaged, "--output", self.folder / "x.png", says=["damaged.safetensors"])
        self.fails(INPUT, "attend", "--input", self.save({"q": self.numbers(3, 8)}), "--output", out, says=["k"])
        whole = {name: Array([1] * 24, (3, 8), "i4") for name in "qkv"}
        self.fails(INPUT, "attend", "--input", self.save(whole), "--output", out, says=["--q", "int32", "float32"])
        flat_input = {name: self.numbers(8) for name in "qkv"}
        self.fails(INPUT, "attend", "--input", self.save(flat_input), "--output", out, says=["--q", "(8,)", "seqlen"])
        self.fails(INPUT, "attend", "--input", SAMPLE, "--bias", f"{SAMPLE}:nothing", "--output", out, says=["nothing"])
        self.assertFalse(out.exists())

    def test_errors_name_argument_and_file(self):
        out = self.folder / "o.npy"
        for name, array in self.qkv((4, 8), (5, 6)).items():
            write_npy(self.folder / f"{name}.npy", array)
        separate = [word for name in "qkv" for word in (f"--{name}", self.folder / f"{name}.npy")]
        together = self.save(self.qkv((4, 8), (5, 6)))
        for command in ("attend", "explain"):
            to = ["--output", out] if command == "attend" else []
            self.fails(PROBLEM, command, *separate, *to, says=["k: ", self.folder / "k.npy"])
            self.fails(PROBLEM, command, "--input", together, *to, says=["k: ", f"{together}:k"])
        bad = Array([1] * 8, (8,), "f4")
        write_npy(self.folder / "bad.npy", bad)
        write_safetensors(self.folder / "bad.safetensors", {"x": bad, "mask": bad})
        fine = self.save(self.qkv((4, 8), (5, 8)))
        self.fails(INPUT, "attend", *separate[2:], "--q", self.folder / "bad.npy", "--output", out,
                   says=["--q ", self.folder / "bad.npy", "(8,)"])
        self.fails(INPUT, "attend", "--input", fine, "--bias", f"{self.folder / 'bad.safetensors'}:x", "--output", out,
                   says=["--bias ", f"{self.folder / 'bad.safetensors'}:x", "(8,)"])
        self.fails(INPUT, "attend", "--input", fine, "--block-mask", self.folder / "bad.safetensors", "--block-size", "1,1",
                   "--output", out, says=["--block-mask", "bad.safetensors", "block_mask"])
        self.fails(INPUT, "attend", "--input", fine, "--mask", self.folder / "bad.safetensors", "--output", out,
                   says=["--mask ", f"{self.folder / 'bad.safetensors'}:mask"])
        self.fails(INPUT, "attend", "--input", fine, "--cu-seqlens-q", self.folder / "bad.npy", "--output", out,
                   says=["--cu-seqlens-q ", self.folder / "bad.npy", "float32", "int32"])
        self.fails(INPUT, "attend", "--input", fine, "--grad", self.folder / "none.npy", "--output",
                   self.folder / "g.safetensors", says=["--grad: ", self.folder / "none.npy"])
        write_npy(self.folder / "slopes.npy", self.numbers(3))
        self.fails(PROBLEM, "attend", "--input", fine, "--alibi", self.folder / "slopes.npy", "--output", out,
                   says=["alibi: ", self.folder / "slopes.npy"])
        self.assertFalse(out.exists())

    def test_errors_of_pictures_name_argument_and_file(self):
        picture = self.folder / "x.png"
        for name, array in {"q": self.numbers(4, 2, 8), "k": self.numbers(4, 2, 8), "wide": self.numbers(4, 2, 6),
                            "slopes": self.numbers(3), "pairs": self.numbers(9, 9)}.items():
            write_npy(self.folder / f"{name}.npy", array)
        q = ["--q", self.folder / "q.npy"]
        self.fails(PROBLEM, "look", *q, "--k", self.folder / "wide.npy", "--output", picture,
                   says=["k: ", "(4, 2, 6)", self.folder / "wide.npy"])
        for tensor, name in {"bias": "pairs", "alibi": "slopes", "sink": "slopes"}.items():
            self.fails(PROBLEM, "look", *q, "--k", self.folder / "k.npy", f"--{tensor}", self.folder / f"{name}.npy",
                       "--output", picture, says=[f"{tensor}: ", self.folder / f"{name}.npy"])
        short_v = self.save(self.qkv((4, 2, 8), (4, 2, 8), (5, 2, 8)), "short_v.safetensors")
        self.fails(PROBLEM, "demo", "--input", short_v, "--output", picture, says=["v: ", f"{short_v}:v"])
        cross = self.save(self.qkv((4, 2, 8), (5, 2, 8)), "cross.safetensors")
        self.fails(PROBLEM, "demo", "--input", cross, says=["k: ", "self-attention", f"{cross}:k"])
        self.assertFalse(picture.exists())

    def test_bad_problems(self):
        out = self.folder / "o.npy"
        path = self.save(self.qkv((4, 8), (5, 6)))
        self.fails(PROBLEM, "attend", "--input", path, "--output", out, says=["k:"])
        path = self.save(self.qkv((4, 3, 8), (5, 2, 8)))
        self.fails(PROBLEM, "attend", "--input", path, "--output", out, says=["heads"])
        path = self.save(self.qkv((4, 8), (5, 8)))
        self.fails(PROBLEM, "attend", "--input", path, "--backend", "nobody", "--output", out, says=["nobody", "reference"])
        self.fails(PROBLEM, "attend", "--input", path, "--backend", "cpu_amx_bf16", "--output", out, says=["cpu_amx_bf16"])
        self.fails(PROBLEM, "attend", "--input", path, "--dropout", "2", "--output", out, says=["dropout"])
        self.fails(PROBLEM, "attend", "--input", path, "--threads", "-4", "--output", out, says=["num_threads"])
        self.assertFalse(out.exists())

    def test_output_never_replaces_an_input(self):
        path = self.save(self.qkv((4, 8), (5, 8)))
        before = path.read_bytes()
        (self.folder / "soft.safetensors").symlink_to(path)
        os.link(path, self.folder / "hard.safetensors")
        for name in ("qkv", "soft", "hard"):
            self.fails(OUTPUT, "attend", "--input", path, "--output", self.folder / f"{name}.safetensors", says=[name])
            self.assertEqual(path.read_bytes(), before)
        q, k, v = (self.folder / f"{name}.npy" for name in "qkv")
        for file in (q, k, v):
            write_npy(file, self.numbers(4, 8))
        self.fails(OUTPUT, "attend", "--q", q, "--k", k, "--v", v, "--output", v, says=["v.npy"])

    def test_output_directory(self):
        missing = self.folder / "no" / "o.npy"
        self.fails(OUTPUT, "attend", "--input", SAMPLE, "--output", missing, says=["--output", missing.parent, "create"])
        self.fails(OUTPUT, "demo", "--input", SAMPLE, "--output", missing.with_suffix(".png"), says=[missing.parent])
        self.fails(OUTPUT, "look", "--input", SAMPLE, "--output", missing.with_suffix(".png"), says=[missing.parent])

    def test_an_older_output_is_replaced_whole(self):
        path = self.save(self.qkv((4, 8), (5, 8)))
        out = self.folder / "o.npy"
        out.write_bytes(b"x" * 100000)
        self.ok("attend", "--input", path, "--output", out)
        self.assertEqual(read_npy(out).shape, (4, 8))
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["o.npy", "qkv.safetensors"])


class Demo(ProgramTest):
    @unittest.skipUnless(PICTURES, "built without Cairo and Pango")
    def test_picture_and_report(self):
        out = self.folder / "attention.png"
        text = self.ok("demo", "--input", SAMPLE, "--output", out)
        for word in ("GFLOP/s", "float16", "float32", "largest error", "1.00 MiB", "12.00 MiB", "chosen", "alice", "tokens 214 to"):
            self.assertIn(word, text)
        width, height, pixels = read_png(out)
        self.assertGreater(min(width, height), 800)
        self.assertGreater(len({pixel for row in pixels for pixel in row}), 100)
        told = self.json("demo", "--input", SAMPLE, "--output", out, "--head", "11", "--tokens", "0:20", "--threads", "1")
        self.assertEqual(told["picture"]["tokens"], [0, 20])

    @unittest.skipUnless(PICTURES, "built without Cairo and Pango")
    def test_svg(self):
        out = self.folder / "attention.svg"
        told = self.json("demo", "--input", SAMPLE, "--output", out, "--tokens", "0:20")
        self.assertEqual(told["picture"]["file"], str(out))
        width, height, images = read_svg(out)
        self.assertGreater(min(width, height), 400)
        self.assertEqual(len(images), 3)  # the window, all tokens, the colour bar
        self.assertTrue(all(image.startswith("data:image/png;base64,") for image in images))

    @unittest.skipUnless(PICTURES, "built without Cairo and Pango")
    def test_tokens_of_any_script(self):
        tokens = ["watch", "日本語", "العربية", "😀", "हिन्दी", "Ελληνικά", "привет", "\n", "\t", " ", "", "\u202eab", "x" * 500, "한국어", 7]
        path = self.save(self.qkv((len(tokens), 2, 8), (len(tokens), 2, 8)), metadata={"tokens": json.dumps(tokens), "model": "模型"})
        plain = self.save(self.qkv((len(tokens), 2, 8), (len(tokens), 2, 8)), name="plain.safetensors")
        for ending in (".png", ".svg"):
            self.ok("demo", "--input", path, "--head", "1", "--output", (self.folder / "x").with_suffix(ending))
            self.ok("demo", "--input", plain, "--head", "1", "--output", (self.folder / "plain").with_suffix(ending))
        width, _, _ = read_png(self.folder / "x.png")
        plain_width, _, _ = read_png(self.folder / "plain.png")
        # A long name is cut.
        self.assertTrue(plain_width < width < plain_width + 250, (width, plain_width))

    def test_numbers(self):
        told = self.json("demo", "--input", SAMPLE)
        self.assertEqual([run["type"] for run in told["runs"]], ["float16", "float32"])
        for run in told["runs"]:
            self.assertGreater(run["gflops"], 0)
            self.assertLess(run["relative_error"], 1e-3 if run["type"] == "float16" else 2e-6)
        self.assertLess(told["textbook"]["relative_error"], 1e-5)
        self.assertEqual(told["matrix_bytes"], 12 * 512 * 512 * 4)
        self.assertNotIn("picture", told)

    def test_without_names(self):
        path = self.save(self.qkv((70, 2, 8), (70, 2, 8)))
        self.ok("demo", "--input", path, "--head", "1", *(("--output", self.folder / "x.png") if PICTURES else ()))

    def test_errors(self):
        out = self.folder / "x.png"
        self.fails(USAGE, "demo", "--input", SAMPLE, "--output", out, "--head", "12", says=["--head", "0 to 11"])
        self.fails(USAGE, "demo", "--input", SAMPLE, "--output", out, "--tokens", "9:3", says=["--tokens", "512"])
        self.fails(PROBLEM, "demo", "--input", self.save(self.qkv((4, 8), (5, 8))), says=["self-attention"])


@unittest.skipIf(PICTURES, "built with Cairo and Pango")
class NoPictures(ProgramTest):
    def test_what_is_missing_is_named(self):
        for command in ("demo", "look"):
            self.fails(RESOURCES, command, "--input", SAMPLE, "--output", self.folder / "x.png",
                       says=["libcairo2-dev", "libpango1.0-dev"])


@unittest.skipUnless(PICTURES, "built without Cairo and Pango")
class Look(ProgramTest):
    def test_sample(self):
        out = self.folder / "map.png"
        told = self.json("look", "--input", SAMPLE, "--head", "9", "--size", "128", "--output", out)
        self.assertEqual((told["rows"], told["columns"], told["pool"]), (128, 128, "max"))
        self.assertTrue(0.3 < told["largest_weight"] <= 1)
        width, height, pixels = read_png(out)
        self.assertEqual((width, height), (told["width"], told["height"]))
        # The paper surrounds the picture on all sides, and the map has the colours of its weights.
        border = {pixel for row in (pixels[0], pixels[-1]) for pixel in row} | {row[i] for row in pixels for i in (0, -1)}
        self.assertEqual(len(border), 1)
        self.assertGreater(len({pixel for row in pixels for pixel in row}), 100)

    def test_svg(self):
        out = self.folder / "map.svg"
        told = self.json("look", "--input", SAMPLE, "--head", "9", "--size", "128", "--output", out)
        width, height, images = read_svg(out)
        self.assertEqual((width, height), (told["width"], told["height"]))
        self.assertEqual(len(images), 2)

    def test_sizes(self):
        """The smallest map, single tokens, long and flat ones."""
        for queries, keys in ((1, 1), (1, 300), (300, 1), (40, 700)):
            path = self.save({"q": self.numbers(queries, 8), "k": self.numbers(keys, 8)})
            for size in ("16", "200"):
                told = self.json("look", "--input", path, "--size", size, "--output", self.folder / "x.png")
                self.assertEqual(told["columns"], min(keys, int(size)))
                self.assertEqual(read_png(self.folder / "x.png")[:2], (told["width"], told["height"]))

    def test_what_is_missing_is_named(self):
        out = self.folder / "x.png"
        library = self.folder / "libpangocairo-1.0.so.0"
        library.write_bytes(b"")
        self.fails(RESOURCES, "look", "--input", SAMPLE, "--output", out, says=["Cairo and Pango", "libpangocairo-1.0-0"],
                   env={**os.environ, "LD_LIBRARY_PATH": str(self.folder)})
        fonts = self.folder / "fonts.conf"
        fonts.write_text(f"<fontconfig><dir>{self.folder}</dir><cachedir>{self.folder}</cachedir></fontconfig>")
        self.fails(RESOURCES, "look", "--input", SAMPLE, "--output", out, says=["font", "fonts-dejavu-core"],
                   env={**os.environ, "FONTCONFIG_FILE": str(fonts)})
        self.assertFalse(out.exists())

    def test_weights(self):
        x = {"q": self.numbers(9, 2, 8), "k": self.numbers(12, 1, 8)}
        bias = self.numbers(9, 12)
        write_npy(self.folder / "bias.npy", bias)
        write_npy(self.folder / "alibi.npy", Array([1.0, 0.25], (2,)))
        write_npy(self.folder / "sink.npy", Array([0.0, 1.0], (2,)))
        full = {name: Array(a.values, (1, *a.shape)) for name, a in x.items()}
        cases = [((), {}), (("--causal",), {"causal": True}), (("--window", "2,3"), {"window": (2, 3)}),
                 (("--softcap", "0.5", "--scale", "1.5"), {"softcap": 0.5, "scale": 1.5}),
                 (("--bias", self.folder / "bias.npy"), {"bias": rows(bias)}),
                 (("--alibi", self.folder / "alibi.npy"), {"slope": 0.25}), (("--sink", self.folder / "sink.npy"), {"sink": 1.0})]
        path = self.save(x)
        for options, terms in cases:
            p, _ = attention.weights(head_rows(full["q"], 1), head_rows(full["k"], 0), **terms)
            told = self.json("look", "--input", path, "--head", "1", "--output", self.folder / "x.png", *options)
            self.close([told["largest_weight"]], [max(flat(p))])
            told = self.json("look", "--input", path, "--head", "1", "--queries", "4:5", "--keys", "3:7", "--pool", "mean",
                             "--output", self.folder / "x.png", *options)
            self.close([told["largest_weight"]], [max(p[4][3:7])])

    def test_mean_of_all_weights(self):
        x = {"q": self.numbers(64, 8), "k": self.numbers(64, 8)}
        told = self.json("look", "--input", self.save(x), "--size", "16", "--pool", "mean", "--output", self.folder / "x.png")
        p, _ = attention.weights(rows(x["q"]), rows(x["k"]))
        means = [sum(p[4 * r + i][4 * c + j] for i in range(4) for j in range(4)) / 16 for r in range(16) for c in range(16)]
        self.close([told["largest_weight"]], [max(means)])

    def test_long_sequence_in_little_memory(self):
        tokens = 2000 if SANITIZED else 20000
        x = {"q": self.numbers(tokens, 8, dtype="f2"), "k": self.numbers(tokens, 8, dtype="f2")}
        limit = 400 << 20  # the matrix alone would take 1.6 GB

        def limited():
            if not SANITIZED:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

        told = self.json("look", "--input", self.save(x), "--causal", "--size", "256", "--threads", "2", "--output",
                         self.folder / "x.png", preexec_fn=limited)
        self.assertEqual((told["seqlen_q"], told["rows"]), (tokens, 256))

    def test_errors(self):
        out = self.folder / "x.png"
        self.fails(USAGE, "look", "--input", SAMPLE, "--head", "12", "--output", out, says=["--head", "12"])
        self.fails(USAGE, "look", "--input", SAMPLE, "--batch-index", "1", "--output", out, says=["--batch-index"])
        self.fails(USAGE, "look", "--input", SAMPLE, "--pool", "min", "--output", out, says=["--pool"])
        self.fails(USAGE, "look", "--input", SAMPLE, "--size", "3", "--output", out, says=["--size"])
        self.fails(USAGE, "look", "--input", SAMPLE, "--keys", "5:600", "--output", out, says=["--keys", "512"])
        self.fails(PROBLEM, "look", "--input", self.save({"q": self.numbers(3, 8), "k": self.numbers(3, 4)}), "--output", out)


class Compile(ProgramTest):
    """Kernels of expressions made ahead of time. No GPU takes part."""

    PROBLEM = ("compile", "--chip", "sm_90", "--batch", "4", "--seqlen", "4096", "--head-dim", "128", "--score",
               "s + t[h, clamp(q - k, 0, 31)]", "--sees", "doc[b, q] == doc[b, k]", "--tensor", "t=float32:16,32", "--tensor",
               "doc=int32:4,4096")

    def compiled(self, *arguments, nvrtc=None):
        """The JSON; a skip where the machine lacks what compiles."""
        environment = {**os.environ, **({} if nvrtc is None else {"FOVEA_NVRTC": nvrtc})}
        done = fovea(*self.PROBLEM, "--cache", self.folder / "cache", *arguments, "--json", env=environment)
        for missing in ("needs NVRTC", "made without CUDA"):
            if nvrtc is None and missing in done.stderr:
                self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, OK, done.stderr)
        return json.loads(done.stdout)["kernels"]

    def test_a_process_without_nvrtc_finds_every_kernel(self):
        made = self.compiled("--pass", "fwd,bwd")
        names = [kernel["name"] for kernel in made]
        for part in ("fwd_sm90", "bwd_sm90", "fwd_sm80", "bwd_sm80", "named_gradients"):
            self.assertTrue(any(name.startswith(part) for name in names), (part, names))
        for kernel in made:
            self.assertFalse(kernel["was_there"])
            self.assertGreater(kernel["registers"], 0)
            self.assertTrue(pathlib.Path(kernel["file"]).is_file())
        found = self.compiled("--pass", "fwd,bwd", nvrtc="/none")
        self.assertEqual([kernel["name"] for kernel in found], names)
        self.assertTrue(all(kernel["was_there"] for kernel in found))

    def test_errors(self):
        self.compiled()
        self.fails(PROBLEM, "compile", "--chip", "sm_1", "--score", "s", says=["chip: got \"sm_1\", expected one of sm_75, sm_80"])
        self.fails(PROBLEM, "compile", "--chip", "sm_80", "--score", "s * 3.0", "--cache", self.folder / "other",
                   says=["needs NVRTC", "install nvidia-cuda-nvrtc"], env={**os.environ, "FOVEA_NVRTC": "/none"})
        self.fails(PROBLEM, "compile", "--chip", "sm_80", "--backend", "reference", says=["backend: got \"reference\""])
        self.fails(PROBLEM, "compile", "--chip", "sm_80", "--sms", "-1", says=["num_sms: got -1"])
        self.fails(OUTPUT, "compile", "--chip", "sm_80", "--score", "s * 3.0", "--cache", SAMPLE, says=["--cache: folder"])
        self.fails(USAGE, "compile", "--score", "s", says=["--chip"])
        self.fails(USAGE, "compile", "--chip", "sm_80", "--score", "s + t[h]", "--tensor", "t=float32:x",
                   says=["--tensor: got 't=float32:x', expected NAME=FILE or NAME=TYPE:SIZE"])


class Expressions(ProgramTest):
    """--score, --sees and --tensor, and the blocks that they leave."""

    def inputs(self, shape=(1, 8, 2, 4)):
        self.arrays = self.qkv(shape, shape)
        return self.save(self.arrays)

    def saved(self, name, array):
        write_npy(self.folder / name, array)
        return self.folder / name

    def outputs(self, *arguments):
        self.ok("attend", *arguments, "--output", self.folder / "o.safetensors")
        return read_safetensors(self.folder / "o.safetensors")

    def test_terms_that_the_library_knows(self):
        qkv = self.inputs()
        slopes = self.saved("slopes.npy", Array([0.5, 0.25], (2,), "f4"))
        mine = self.outputs("--input", qkv, "--score", "s - slope[h] * abs(q - k)", "--tensor", f"slope={slopes}",
                            "--sees", "k <= q")
        theirs = self.outputs("--input", qkv, "--alibi", slopes, "--causal")
        self.close(mine["o"].values, theirs["o"].values)
        self.close(mine["lse"].values, theirs["lse"].values)

    def test_tensors_of_other_types_are_converted(self):
        qkv = self.inputs()
        documents = self.saved("documents.npy", Array([0, 0, 0, 1, 1, 1, 1, 2], (1, 8), "i8"))
        factors = self.saved("factors.npy", Array([2.0, 0.5], (2,), "f8"))
        mine = self.outputs("--input", qkv, "--sees", "doc[b, q] == doc[b, k]", "--score", "s * f[h]", "--tensor",
                            f"doc={documents}", "--tensor", f"f={factors}")
        mask = [int(a == b) for a in (0, 0, 0, 1, 1, 1, 1, 2) for b in (0, 0, 0, 1, 1, 1, 1, 2)]
        theirs = self.outputs("--input", qkv, "--mask", self.saved("mask.npy", Array(mask, (8, 8), "u1")), "--score",
                              "s * where(h == 0, 2, 0.5)")
        self.close(mine["o"].values, theirs["o"].values)

    def test_gradients_of_float_tensors(self):
        qkv = self.inputs()
        bias = self.saved("bias.npy", self.numbers(1, 2, 8, 8))
        d_o = self.saved("d_o.npy", self.numbers(1, 8, 2, 4))
        mine = self.outputs("--input", qkv, "--score", "s + term[b, h, q, k]", "--tensor", f"term={bias}", "--grad", d_o)
        theirs = self.outputs("--input", qkv, "--bias", bias, "--grad", d_o)
        self.close(mine["dterm"].values, theirs["dbias"].values)
        self.close(mine["dq"].values, theirs["dq"].values)
        self.fails(USAGE, "attend", "--input", qkv, "--score", "s + v[q]", "--tensor", f"v={bias}", "--grad", d_o, "--output",
                   self.folder / "x.safetensors", says=["--tensor", "'v'", "dv"])

    # Scores and masks of known models on 8 tokens and 2 heads: options, tensors of --tensor, and what they add to a score or see.
    PARENTS = [-1, 0, 1, 1, 0, 4, -1, 6]  # a tree of guesses, in the order of a walk
    HOPS = [(3 * i + 5 * j) % 4 for i in range(8) for j in range(8)]
    MODELS = {
        "alibi": (("--score", "s - slope[h] * abs(q - k)"), {"slope": Array([0.5, 0.25], (2,), "f4")},
                  lambda h, i, j: -abs(i - j) / 2 ** (h + 1), None),
        "graph": (("--score", "s + near[h, hops[q, k]]"),
                  {"hops": Array(HOPS, (8, 8), "u1"), "near": Array([x / 4 for x in range(8)], (2, 4), "f4")},
                  lambda h, i, j: h + (3 * i + 5 * j) % 4 / 4, None),
        "documents": (("--sees", "doc[q] == doc[k]"), {"doc": Array([0, 0, 0, 1, 1, 2, 2, 2], (8,), "i4")}, None,
                      lambda i, j: "00011222"[i] == "00011222"[j]),
        "prefix": (("--sees", "k < prompt[b] || k <= q"), {"prompt": Array([3], (1,), "i4")}, None, lambda i, j: j < 3 or j <= i),
        "tree": (("--sees", "k <= q && q < end[k]"), {"end": Array([6, 4, 3, 4, 6, 6, 8, 8], (8,), "i4")}, None,
                 lambda i, j: i == j or Expressions.above(j, i)),
        "dilated": (("--sees", "(q / 2 - k / 2) % 2 == 0 && k <= q"), {}, None, lambda i, j: (i // 2 - j // 2) % 2 == 0 and j <= i),
    }

    @staticmethod
    def above(other, node):
        while (node := Expressions.PARENTS[node]) >= 0:
            if node == other:
                return True
        return False

    def test_known_models(self):
        qkv = self.inputs()
        for name, (options, tensors, term, sees) in self.MODELS.items():
            with self.subTest(name):
                files = [x for key, array in tensors.items() for x in ("--tensor", f"{key}={self.saved(key + '.npy', array)}")]
                mine = self.outputs("--input", qkv, *options, *files)
                pairs = [(i, j) for i in range(8) for j in range(8)]
                if term:
                    bias = Array([term(h, i, j) for h in range(2) for i, j in pairs], (1, 2, 8, 8), "f4")
                    theirs = self.outputs("--input", qkv, "--bias", self.saved("terms.npy", bias))
                else:
                    mask = Array([int(sees(i, j)) for i, j in pairs], (8, 8), "u1")
                    theirs = self.outputs("--input", qkv, "--mask", self.saved("seen.npy", mask))
                self.close(mine["o"].values, theirs["o"].values)
                self.close(mine["lse"].values, theirs["lse"].values)

    def test_gradients_of_a_table_and_of_temperatures(self):
        qkv = self.inputs()
        d_o = self.saved("d_o.npy", self.numbers(1, 8, 2, 4))
        table = Array([x / 8 for x in range(10)], (2, 5), "f4")
        mine = self.outputs("--input", qkv, "--causal", "--grad", d_o, "--score", "s + table[h, clamp(q - k, 0, 4)]", "--tensor",
                            f"table={self.saved('table.npy', table)}")
        places = [5 * h + min(max(i - j, 0), 4) for h in range(2) for i in range(8) for j in range(8)]
        bias = Array([table.values[at] for at in places], (1, 2, 8, 8), "f4")
        theirs = self.outputs("--input", qkv, "--causal", "--grad", d_o, "--bias", self.saved("terms.npy", bias))
        sums = [0.0] * 10
        for at, value in zip(places, theirs["dbias"].values):
            sums[at] += value
        self.close(mine["o"].values, theirs["o"].values)
        self.close(mine["dtable"].values, sums)

        mine = self.outputs("--input", qkv, "--grad", d_o, "--score", "s * t[h]", "--tensor",
                            f"t={self.saved('t.npy', Array([0.5, 2.0], (2,), 'f4'))}")
        products = [0.0, 0.0]  # t dt = q dq, summed over the rows of a head
        for at, (value, slope) in enumerate(zip(self.arrays["q"].values, mine["dq"].values)):
            products[at // 4 % 2] += value * slope
        self.close(mine["dt"].values, [products[0] / 0.5, products[1] / 2.0])

    def test_explain(self):
        text = self.ok("explain", "--seqlen", "512", "--heads", "2", "--sees", "k<=q", "--score", "(s)*2.0 + t[h]", "--tensor",
                       f"t={self.saved('t.npy', self.numbers(2))}")
        self.assertRegex(text, r"reads +t +\(2,\) +read by expressions\n")
        self.assertIn("score             s * 2.0 + t[h]\nd score / d s     2.0\nd score / d t[h]  1.0\nsees              k <= q\n", text)
        self.assertIn("blocks of 128 x 128: 12 not seen (38 %), 12 seen whole, 8 in part\n", text)
        told = self.json("explain", "--seqlen", "512", "--heads", "2", "--sees", "k <= q")
        self.assertEqual(told["expressions"], [{"name": "sees", "text": "k <= q"}])
        self.assertEqual(told["blocks"], {"size": 128, "every_head": True, "none": 12, "all": 12, "some": 8})
        self.assertEqual(self.json("explain", "--seqlen", "8")["expressions"], [])

    def test_bench_checks_parts_that_count_from_their_origin(self):
        documents = self.saved("documents.npy", Array([i // 20 for i in range(128)], (1, 128), "i4"))
        slopes = self.saved("slopes.npy", Array([0.5, 0.25, 0.125, 2.0], (4,), "f4"))
        told = self.json("bench", "--batch", "2", "--seqlen", "96", "--seqlen-k", "128", "--heads", "4", "--heads-kv", "2",
                         "--head-dim", "16", "--dtype", "float32", "--pass", "fwd,bwd", "--seconds", "0.01", "--score",
                         "s - slope[h] * abs(q + nk - nq - k) + 1e-2 * q * hk * b", "--sees",
                         "doc[b, q] == doc[b, k] || k % 3 == q % 3", "--tensor", f"doc={documents}", "--tensor", f"slope={slopes}")
        for row in told["rows"]:
            self.assertGreater(row["rows_checked"], 0)

    def test_picture_of_blocks(self):
        self.assertEqual(self.ok("look", "--blocks", "--seqlen", "6", "--block-size", "2,3", "--sees", "q - k < 3", "--causal"),
                         "+ .\n+ +\n+ +\n# all pairs, + some, . none; blocks of 2 queries (down) and 3 keys, head 0\n")
        documents = self.saved("documents.npy", Array([0, 0, 1, 1, 2, 2, 2, 2], (1, 8), "i4"))
        picture = self.json("look", "--blocks", "--input", self.inputs(), "--block-size", "2,2", "--sees",
                            "doc[b, q] == doc[b, k]", "--tensor", f"doc={documents}", "--head", "1")
        self.assertEqual(picture["blocks"], [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]])
        self.assertEqual((picture["head"], picture["block_size"]), (1, [2, 2]))

    def test_errors(self):
        qkv = self.inputs()
        rest = ("--input", qkv, "--output", self.folder / "o.npy")
        done = fovea("attend", *rest, "--score", "s + foo")
        self.assertEqual(done.returncode, PROBLEM)
        self.assertTrue(done.stderr.startswith("fovea attend: score, character 5: got 'foo'"), done.stderr)
        self.assertTrue(done.stderr.endswith("\n  s + foo\n      ^\n"), done.stderr)
        numbers = self.saved("x.npy", self.numbers(3))
        self.fails(USAGE, "attend", *rest, "--tensor", "slope", says=["--tensor: got 'slope', expected NAME=FILE"])
        self.fails(INPUT, "attend", *rest, "--tensor", "x=none.npy", "--score", "s", says=["--tensor: ", "none.npy"])
        self.fails(PROBLEM, "attend", *rest, "--tensor", f"x={numbers}", says=["named.x", "there is no expression"])
        self.fails(PROBLEM, "attend", *rest, "--tensor", f"x={numbers}", "--score", "s * x[q]",
                   says=["named.x: got shape (3)", "x.npy"])
        self.fails(USAGE, "look", "--seqlen", "8", says=["--blocks"])
        self.fails(USAGE, "look", "--input", qkv, says=["--output"])
        self.fails(USAGE, "look", "--blocks", "--seqlen", "65536", says=["--block-size"])
        self.fails(PROBLEM, "look", "--blocks", "--seqlen", "8", "--head", "16", says=["head: got 16, expected 0 to 15"])


class Explain(ProgramTest):
    def test_sizes(self):
        text = self.ok("explain", "--seqlen", "128", "--heads", "8", "--heads-kv", "2", "--dtype", "float32", "--causal")
        self.assertIn("chosen", text)
        self.assertRegex(text, r"reads +k +\(1, 128, 2, 64\) +keys\n")
        self.assertRegex(text, r"writes +lse +\(1, 8, 128\) +log-sum-exp of each row's scores\n")
        self.assertNotRegex(text, r"reads +bias")
        told = self.json("explain", "--seqlen", "128", "--seqlen-k", "256", "--heads", "4", "--head-dim", "32")
        self.assertEqual((told["q"], told["k"]), ([1, 128, 4, 32], [1, 256, 4, 32]))
        self.assertEqual(told["flops"], 4 * 128 * 256 * 4 * 32)
        chosen = [b["name"] for b in told["backends"] if b["chosen"]]
        self.assertEqual(chosen, [told["backend"]])
        self.assertEqual([b["name"] for b in told["backends"]], [b["name"] for b in self.json("info")["backends"]])

    def test_everything_at_once(self):
        told = self.json("explain", "--pass", "bwd", "--with", "dbias,mask,block_mask,alibi,sink,seqused", "--dropout", "0.1",
                         "--seqlen", "100", "--window", "5,-1", "--backend", "reference")
        self.assertEqual((told["pass"], told["backend"]), ("backward", "reference"))
        tensors = {tensor["name"]: tensor for tensor in told["tensors"]}
        self.assertEqual(tensors["block_mask"], {"name": "block_mask", "access": "read", "shape": [1, 16, 2, 2],
                                                 "meaning": "nonzero where a block of queries attends to a block of keys"})
        self.assertEqual([name for name, tensor in tensors.items() if tensor["access"] == "write"], ["dq", "dk", "dv", "dbias"])
        told = self.json("explain", "--with", "packed", "--batch", "3", "--seqlen", "64")
        self.assertEqual(told["q"], [192, 16, 64])

    def test_files(self):
        told = self.json("explain", "--input", SAMPLE, "--pass", "bwd")
        self.assertEqual(told["q"], [1, 512, 12, 32])
        self.assertEqual(told["flops"], 10 * 512 * 512 * 12 * 32)

    def test_errors(self):
        self.fails(PROBLEM, "explain", "--heads", "6", "--heads-kv", "4", says=["heads"])
        self.fails(PROBLEM, "explain", "--backend", "cpu_amx_bf16", "--dtype", "float64", says=["cpu_amx_bf16"])
        self.fails(PROBLEM, "explain", "--head-dim", "1000", says=["1000"])

    def test_splits(self):
        decode = ["explain", "--backend", "cpu_generic", "--seqlen", "1", "--seqlen-k", "5000", "--heads", "2"]
        self.assertIn("keys split in 3", self.ok(*decode, "--num-splits", "3"))
        self.assertNotIn("keys split", self.ok(*decode, "--num-splits", "1"))
        alone = self.ok(*decode, "--batch-invariant")
        self.assertIn("keys split in 4, the same in any batch", alone)
        self.assertIn("keys split in 4, one after the other, the same in any batch",
                      self.ok(*decode, "--batch-invariant", "--batch", "100"))
        self.ok("explain", "--with", "packed", "--batch-invariant")
        self.fails(PROBLEM, *decode, "--num-splits", "-1", says=["num_splits", "-1", "0 or more"])


class Bench(ProgramTest):
    def test_json(self):
        told = self.json("bench", "--seqlen", "64,96", "--heads", "2", "--heads-kv", "1", "--head-dim", "32", "--pass",
                         "fwd,bwd", "--dtype", "float32,bfloat16", "--seconds", "0.01", "--causal", "--threads", "1")
        self.assertEqual(len(told["rows"]), 8)
        for row in told["rows"]:
            self.assertTrue(row["right"])
            self.assertEqual(row["rows_checked"], row["seqlen"])
            self.assertGreater(row["gflops"], 0)
            self.assertLessEqual(row["fastest_seconds"], row["median_seconds"])

    def test_decode(self):
        sizes = ["--batch", "2", "--seqlen", "3", "--seqlen-k", "300", "--heads", "4", "--heads-kv", "2", "--head-dim", "32",
                 "--seconds", "0.01"]
        told = self.json("bench", "--decode", *sizes, "--dtype", "float32,bfloat16", "--page", "0,16,7")
        self.assertEqual([(row["dtype"], row["cache_dtype"], row["page"]) for row in told["rows"]],
                         [(dtype, cache, page) for dtype in ("float32", "bfloat16") for cache in (dtype, "float8_e4m3fn")
                          for page in (0, 16, 7)])
        for row in told["rows"]:
            self.assertTrue(row["right"], row)
            self.assertGreater(row["relative_error"], 0)
            element = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[row["cache_dtype"]]
            self.assertEqual(row["key_bytes"], 2 * 300 * 2 * 64 * element)
            self.assertAlmostEqual(row["key_gb_s"], row["key_bytes"] / row["median_seconds"] * 1e-9)
            self.assertAlmostEqual(row["read"]["share"], row["key_gb_s"] / row["read"]["gb_s"])
        names = [row["name"] for row in told["rows"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual(names[1], "decode_float32_b2_q3_k300_h4_2_d32_page16")
        told = self.json("bench", "--decode", *sizes, "--page", "0,16", "--cache-dtype", "q", "--layout", "bhsd")
        self.assertEqual([(row["name"].endswith("_bhsd"), row["layout"], row["right"]) for row in told["rows"]], [(True, "bhsd", True)] * 2)
        [row] = self.json("bench", "--decode", *sizes, "--page", "16", "--cache-dtype", "q", "--caches", "3")["rows"]
        self.assertEqual((row["name"], row["caches"], row["key_bytes"]),
                         ("decode_bfloat16_b2_q3_k300_h4_2_d32_page16_caches3", 3, 2 * 300 * 2 * 64 * 2))
        self.assertAlmostEqual(row["read"]["share"], row["key_gb_s"] / row["read"]["gb_s"])
        text = self.ok("bench", "--decode", *sizes, "--page", "16", "--cache-dtype", "q", "--causal", "--window", "200,0",
                       "--num-splits", "2")
        self.assertIn("decode_bfloat16_b2_q3_k300_h4_2_d32_page16", text)
        self.assertIn("of a plain read", text)

    def test_8_bits(self):
        sizes = ["--batch", "1", "--seqlen", "64", "--heads", "2", "--head-dim", "32", "--dtype", "float8_e4m3fn", "--seconds", "0.01"]
        for row in self.json("bench", *sizes, "--pass", "fwd")["rows"]:
            self.assertTrue(row["right"], row)
        rows = self.json("bench", "--decode", *sizes, "--page", "0")["rows"]
        self.assertEqual([(row["dtype"], row["cache_dtype"], row["right"]) for row in rows], [("float8_e4m3fn", "float8_e4m3fn", True)])
        self.fails(PROBLEM, "bench", *sizes, "--pass", "bwd", says=["float8_e4m3fn"])

    def test_decode_of_nothing(self):
        for size in ("--batch", "--seqlen", "--seqlen-k"):
            told = self.json("bench", "--decode", "--heads", "2", "--seqlen-k", "9", "--batch", "1", "--seconds", "0.001", size, "0")
            for row in told["rows"]:
                self.assertTrue(row["right"], row)

    def test_decode_refuses(self):
        self.fails(USAGE, "bench", "--page", "16", says=["--page", "--decode"])
        self.fails(USAGE, "bench", "--caches", "2", says=["--caches", "--decode"])
        self.fails(USAGE, "bench", "--decode", "--caches", "0", says=["--caches"])
        self.fails(USAGE, "bench", "--decode", "--page", "-1", says=["--page"])
        self.fails(USAGE, "bench", "--decode", "--cache-dtype", "int8", says=["--cache-dtype", "int8", "float8_e4m3fn"])
        self.fails(USAGE, "bench", "--decode", "--rows", "decode", says=["--rows", "--decode"])
        self.fails(USAGE, "bench", "--decode", "--pass", "bwd", says=["--pass", "fwd", "--decode"])
        self.fails(USAGE, "bench", "--decode", "--sees", "k <= q", says=["--sees", "--decode"])
        self.fails(PROBLEM, "bench", "--decode", "--heads", "6", "--heads-kv", "4", says=["heads"])

    def test_slices_of_large_problems(self):
        told = self.json("bench", "--batch", "2", "--seqlen", "1100", "--heads", "2", "--head-dim", "64", "--pass", "bwd",
                         "--window", "200,10", "--dtype", "float32", "--seconds", "0.01")
        row = told["rows"][0]
        self.assertLess(row["rows_checked"], 1100)
        self.assertTrue(row["right"])

    def test_table(self):
        text = self.ok("bench", "--seqlen", "1", "--seqlen-k", "300", "--batch", "2", "--heads", "2", "--seconds", "0.01")
        self.assertIn("GFLOP/s", text)
        self.assertNotIn("WRONG", text)

    def test_errors(self):
        self.fails(PROBLEM, "bench", "--heads", "6", "--heads-kv", "4", says=["heads"])
        self.fails(PROBLEM, "bench", "--batch", "-1")
        self.fails(USAGE, "bench", "--device", "cuda:x", says=["--device", "cuda:x", "cuda:N"])
        self.fails(USAGE, "bench", "--layout", "hbsd", says=["--layout", "hbsd", "bhsd"])
        self.fails(USAGE, "bench", "--rows", "of nothing", says=["--rows", "of nothing", "--list"])
        self.fails(USAGE, "bench", "--rows", "fwd", "--seqlen", "64", says=["--rows", "sizes"])

    def test_listed_rows(self):
        names = self.ok("bench", "--list").split()
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("float32_fwd_b1_s512_h16_d64_causal", names)
        self.assertEqual(names[-1], "bfloat16_fwd_b1_s65536_h16_d128_decode")
        self.assertEqual(self.ok("bench", "--list", "--rows", "b8_s128_h12_d32_causal").split(),
                         [name for name in names if "b8_s128_h12_d32_causal" in name])
        told = self.json("bench", "--rows", "b8_s128_h12_d32_causal", "--layout", "bhsd", "--min-time", "0.01")
        self.assertEqual([(row["dtype"], row["pass"]) for row in told["rows"]],
                         [(dtype, pass_) for dtype in ("float32", "bfloat16") for pass_ in ("fwd", "bwd")])
        for row in told["rows"]:
            self.assertTrue(row["right"])
            self.assertTrue(row["causal"])
            self.assertIn(row["name"], names)
        self.assertIn("float32_fwd_b8_s128_h12_d32_full",
                      self.ok("bench", "--rows", "float32_fwd_b8_s128_h12_d32_full", "--seconds", "0.01"))

    def test_layouts(self):
        told = self.json("bench", "--batch", "2", "--seqlen", "1100", "--heads", "4", "--heads-kv", "2", "--head-dim", "64",
                         "--pass", "fwd,bwd", "--window", "200,10", "--dtype", "float32", "--seconds", "0.01", "--layout", "bhsd")
        for row in told["rows"]:
            self.assertTrue(row["right"], row)

    def test_device(self):
        sizes = ["--seqlen", "300", "--heads", "2", "--seconds", "0.01", "--pass", "fwd,bwd"]
        self.fails(PROBLEM, "bench", "--device", "cuda", *sizes, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        if not self.json("info")["gpus"]:
            return
        told = self.json("bench", "--device", "cuda:0", *sizes)
        for row in told["rows"]:
            self.assertTrue(row["right"], row)
            self.assertTrue(row["backend"].startswith("cuda_"), row)
            self.assertGreater(row["host_nanoseconds"], 0)


class Check(ProgramTest):
    def test_stops_by_itself(self):
        told = self.json("check", "--backend", "reference", "--problems", "5", "--seed", "3")
        self.assertEqual((told["problems"], told["failures"]), (5, []))
        self.assertEqual(told["backends"][0]["name"], "reference")
        self.assertGreater(told["backends"][0]["passes"], 5)
        text = self.ok("check", "--backend", "reference", "--seconds", "0.5", "--forward-only")
        self.assertIn("0 failures", text)

    def test_one_problem_repeats(self):
        first, again = (self.json("check", "--backend", "reference", "--problem", "11", "--seed", "3") for _ in range(2))
        self.assertEqual(first["problems"], 1)
        self.assertEqual(first["largest_share_of_allowed_error"], again["largest_share_of_allowed_error"])

    def test_stops_when_told(self):
        process = subprocess.Popen([PROGRAM, "check", "--backend", "reference"], stdout=subprocess.PIPE, text=True)
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=60)
        self.assertEqual(process.returncode, OK, text)
        self.assertIn("0 failures", text)

    def test_expressions_of_ones_own(self):
        write_npy(self.folder / "slope.npy", Array([0.5, 0.25, 0.125, 0.0625], (4,), "f4"))
        own = ("--score", "s - slope[h] * abs(q - k)", "--sees", "k <= q + 2", "--tensor", f"slope={self.folder / 'slope.npy'}")
        told = self.json("check", "--problems", "3", "--seqlen", "40", "--head-dim", "16", *own)
        self.assertEqual((told["problems"], told["failures"]), (3, []))
        self.assertIn("named_gradients[0]", told["largest_share_of_allowed_error"])
        forward = self.json("check", "--problem", "1", "--backend", "reference", "--forward-only", "--seqlen", "40", *own)
        self.assertNotIn("dq", forward["largest_share_of_allowed_error"])
        done = fovea("check", "--score", "s + foo")
        self.assertEqual(done.returncode, PROBLEM)
        self.assertIn("score, character 5: got 'foo'", done.stderr)
        self.fails(PROBLEM, "check", "--heads", "5", *own, says=["slope", "got"])
        self.fails(INPUT, "check", "--score", "s + t[h]", "--tensor", "t=none.npy", says=["--tensor", "none.npy"])
        self.fails(USAGE, "check", "--score", "s + t[h]", "--tensor", "t", says=["--tensor: got 't', expected NAME=FILE"])

    def test_expressions_of_random_problems(self):
        for which in ("none", "softplus", "documents"):
            told = self.json("check", "--backend", "reference", "--problems", "2", "--expressions", which)
            self.assertEqual(told["failures"], [])
        self.fails(USAGE, "check", "--expressions", "foo", says=["--expressions: got 'foo', expected one of drawn, none, alibi"])
        self.fails(USAGE, "check", "--expressions", "none", "--score", "s", says=["--expressions: got none beside --score"])

    def test_exit_code_and_lines_agree(self):
        done = fovea("check", "--problems", "10", "--forward-only", "--json")
        failures = json.loads(done.stdout)["failures"]
        self.assertEqual(done.returncode, CHECK_FAILED if failures else OK)
        for failure in failures:
            self.assertTrue(failure["reproduce"].startswith("fovea check --seed 1 --problem "), failure)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
