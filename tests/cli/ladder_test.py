#!/usr/bin/env python3
"""`fovea ladder` and `fovea report`, run as a user runs them; see cli_test.py."""
import json
import os
import pathlib
import sys
import unittest

from cli_test import INPUT, PROGRAM, RESOURCES, SAMPLE, SANITIZED, USAGE, ProgramTest, fovea


class Ladder(ProgramTest):
    few = ["--runs", "3", "--warmups", "0", "--shape", "2x70x40"]

    def test_list(self):
        rungs = self.json("ladder", "--list")
        names = [rung["rung"] for rung in rungs]
        self.assertEqual(names, sorted(names))
        folders = [path.parent.name for path in (SAMPLE.parent.parent / "ladder").glob("[0-9]*/kernel.*")]
        self.assertEqual(names, sorted(folders))
        for name in names:
            self.assertIn(name, self.ok("ladder", "--list"))

    def test_json(self):
        told = self.json("ladder", "--group", "cpu", *self.few)
        self.assertIn("3 runs", told["protocol"])
        rows = told["rows"]
        self.assertGreaterEqual(len(rows), 6)
        self.assertEqual([(peak["where"], peak["unit"]) for peak in told["peaks"]], [("cpu", "GFLOP/s"), ("cpu", "GB/s")])
        self.assertTrue(all(peak["rate"] > 0 for peak in told["peaks"]))
        for row in rows:
            self.assertTrue(row["right"], row)
            self.assertEqual((row["shape"], row["runs"]), ("2x70x40", 3))
            self.assertEqual(row["rows_checked"], 128)
            self.assertEqual((row["flops"], row["bytes"]), (4 * 2 * 70 * 70 * 40, 4 * (4 * 2 * 70 * 40 + 2 * 70)))
            self.assertEqual(set(row["errors"]), {"o", "lse"})
            self.assertGreater(row["share_of_peak"], 0)
            [peer] = row["peers"]
            self.assertTrue(peer["name"].startswith("fovea cpu_"), row)
            self.assertAlmostEqual(peer["share"] * peer["rung_seconds"] / peer["seconds"], 1, places=4)
            self.assertLessEqual(row["fastest_seconds"], row["median_seconds"])
        self.assertNotIn("times_the_rung_before", rows[0])
        for before, row in zip(rows, rows[1:]):
            ratio = before["median_seconds"] / row["median_seconds"]
            self.assertAlmostEqual(row["times_the_rung_before"] / ratio, 1, places=4)

    def test_table(self):
        text = self.ok("ladder", "--rung", "03,04", "--no-peer", *self.few)
        self.assertIn("04_cpu_vector", text)
        self.assertNotIn("05_cpu_threads", text)
        self.assertNotIn("of fovea", text)

    def test_peers(self):
        host = self.json("ladder", "--rung", "03", *self.few)["host"]
        file = self.folder / "peers.json"
        row = {"group": "cpu", "shape": "2x70x40", "peer": "another library", "median_seconds": 0.5}
        rows = [row, {**row, "shape": "2x71x40", "peer": "of another shape"}, {**row, "group": "tensor"}]
        about = {"date": "2026-01-02", "software": {"torch": "2.11"}}
        file.write_text(json.dumps({"host": host, **about, "rows": rows}))
        told = self.json("ladder", "--rung", "03", *self.few, "--no-peer", "--peers", file)
        self.assertEqual(told["peers"], about)
        [found] = told["rows"]
        [peer] = found["peers"]
        self.assertEqual((peer["name"], peer["seconds"]), ("another library", 0.5))
        text = self.ok("ladder", "--rung", "03", *self.few, "--peers", file)
        self.assertRegex(text, "of fovea +of another library +error")

        for told, says in (
            ({"host": "a machine elsewhere", "rows": []}, ["a machine elsewhere", "measure again"]),
            ({"gpu": "a GPU elsewhere", "rows": []}, ["a GPU elsewhere"]),
            ({**about, "rows": [{**row, "median_seconds": 0}]}, ["median_seconds", "more than 0"]),
            ({**about, "rows": [{}]}, ["median_seconds", "ladder_peers.py"]),
            ({**about, "rows": [{"rung": "33_side_numba", "shape": "1x2x3", "median_seconds": 1, "group": "attention"}]}, ["runs", "ladder_peers.py"]),
            ([], ["ladder_peers.py"]),
        ):
            file.write_text(json.dumps(told))
            self.fails(INPUT, "ladder", "--rung", "03", *self.few, "--peers", file, says=["peers.json", *says])
        self.fails(INPUT, "ladder", "--peers", self.folder / "none.json", says=["none.json", "cannot be read"])

    def test_memory(self):
        told = self.json("ladder", "--rung", "01,03", "--memory", "--shape", "1x2048x64")
        self.assertIn("VmHWM", told["protocol"])
        textbook, online = told["rows"]
        matrix, tensors = 2048 * 2048 * 4, 4 * 2048 * 64 * 4
        self.assertGreater(textbook["peak_bytes"], 0.9 * (matrix + tensors))
        if not SANITIZED:  # sanitizers keep memory of their own
            self.assertLess(textbook["peak_bytes"], 1.2 * matrix + 2 * tensors)
            self.assertLess(online["peak_bytes"], 2 * tensors)
            self.assertLess(online["library"]["peak_bytes"], matrix / 2)
        # Linux counts pages apart on each processor and adds 32 or more at a time (mm_counter): half a megabyte on two of
        # them, before and after. Eight megabytes of tensors show all the same.
        [online] = self.json("ladder", "--rung", "03", "--memory", "--shape", "8x512x128")["rows"]
        self.assertGreater(online["peak_bytes"], 0.9 * 4 * 8 * 512 * 128 * 4)
        self.assertIn(online["library"]["name"], self.ok("ladder", "--rung", "03", "--memory", "--shape", "1x2048x64"))
        self.fails(USAGE, "ladder", "--memory", "--profile", says=["--memory", "--profile"])

    def test_profile(self):
        [row] = self.json("ladder", "--rung", "03", "--profile", *self.few)["rows"]
        self.assertTrue(row["right"] and row["profiled"], row)
        self.assertNotIn("median_seconds", row)

    def test_rungs_that_cannot_run_tell_why(self):
        for row in self.json("ladder", "--device", "cpu", "--group", "softmax")["rows"]:
            self.assertIn("skipped", row)
        row = self.json("ladder", "--rung", "06", "--shape", "1x8x200")["rows"][0]
        self.assertIn("up to 128", row["skipped"])

    def test_errors(self):
        self.fails(USAGE, "ladder", "--rung", "99", says=["--rung", "99", "--list"])
        self.fails(USAGE, "ladder", "--group", "gpu", says=["--group", "cpu", "tensor"])
        self.fails(USAGE, "ladder", "--group", "softmax", "--rung", "01", says=["--rung"])
        self.fails(USAGE, "ladder", "--rung", "01", "--shape", "1x2", says=["1x2", "BATCHxLENGTHxSIZE"])
        self.fails(USAGE, "ladder", "--runs", "2", says=["--runs", "3"])
        self.fails(USAGE, "ladder", "--warmups", "-1", says=["--warmups"])
        self.fails(USAGE, "ladder", "--rows", "0", says=["--rows"])
        self.fails(USAGE, "ladder", "--device", "gpu", says=["--device"])


class Report(ProgramTest):
    """How `fovea report` starts the program that makes the page; tests/report has what that does."""

    def setUp(self):
        super().setUp()
        python = self.folder / "python"
        python.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\nexit 5\n')
        python.chmod(0o755)
        self.env = {**os.environ, "FOVEA_PYTHON": str(python)}
        self.env.pop("FOVEA_SHARE", None)

    def test_starts_the_program_beside_it(self):
        done = fovea("report", "a.json", "--output", "page.html", "b folder", "--title", "A title", env=self.env)
        script, *words = done.stdout.splitlines()
        self.assertEqual(words, ["--output", "page.html", "--title", "A title", "--", "a.json", "b folder"])
        self.assertEqual(done.returncode, 5)
        self.assertEqual(pathlib.Path(script), pathlib.Path(PROGRAM).resolve().parent.parent / "share/fovea/report/report.py")
        self.assertTrue(pathlib.Path(script).is_file())
        self.assertEqual(fovea("report", env=self.env).stdout.splitlines()[1:], ["--output", "report.html", "--"])

    def test_what_is_missing_is_named(self):
        env = {**self.env, "FOVEA_PYTHON": str(self.folder / "none")}
        self.fails(RESOURCES, "report", env=env, says=[self.folder / "none", "FOVEA_PYTHON"])
        env = {**self.env, "FOVEA_SHARE": str(self.folder)}
        self.fails(RESOURCES, "report", env=env, says=[self.folder / "report/report.py", "FOVEA_SHARE"])
        self.fails(USAGE, "report", "--pages", env=self.env, says=["--pages"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
