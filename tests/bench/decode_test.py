#!/usr/bin/env python3
"""What bench/cpu/decode.py does with rows whose plain read was disturbed, with a program in place of fovea."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "cpu"

# Runs the script on a machine where nothing else runs, whatever this one does.
QUIETLY = """
import sys
import decode
class Nobody:
    def share(self):
        return 0.0
decode.Others = Nobody
sys.exit(decode.main())
"""

# Tells rates of reads that the folder's file names for the next calls, and 40 GB/s behind those.
PROGRAM = """#!{python}
import json, pathlib, sys
def option(name):
    return sys.argv[sys.argv.index("--" + name) + 1]
reads = pathlib.Path(__file__).with_name("reads.json")
left = json.loads(reads.read_text())
rate, spread = left.pop(0) if left else (40.0, 0.1)
reads.write_text(json.dumps(left))
cache = option("dtype") if option("cache-dtype") == "q" else option("cache-dtype")
row = dict(cache_dtype=cache, caches=1, backend="cpu_none", median_seconds=1e-3, spread=0.1, runs=5, key_gb_s=20.0,
           relative_error=1e-7, read=dict(median_seconds=1e-3, spread=spread, gb_s=rate, way="one", share=20 / rate))
print(json.dumps(dict(threads=2, rows=[row])))
"""


class Disturbed(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.program = self.folder / "fovea"
        self.program.write_text(PROGRAM.replace("{python}", sys.executable))
        self.program.chmod(0o755)
        self.file = self.folder / "results.json"

    def run_rows(self, reads, *arguments):
        (self.folder / "reads.json").write_text(json.dumps(reads))
        command = [sys.executable, "-c", QUIETLY, "--fovea", self.program, "--json", self.file, "--rows", "float32_bhsd", *arguments]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SCRIPTS)})

    def stored(self):
        results = json.loads(self.file.read_text())
        return [row["name"] for row in results["caches"]], results["left_out"]

    def names(self, *groups):
        return [f"float32_bhsd_group{group}" for group in groups]

    def test_timed_again(self):
        done = self.run_rows([(40.0, 0.1), (10.0, 0.1), (41.0, 0.1), (40.0, 0.9)])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.stored(), (self.names(1, 4, 8, 16), []))
        self.assertEqual(done.stdout.count("GB/s, "), 6)

    def test_left_out_and_timed_later(self):
        done = self.run_rows([(40.0, 0.1), (40.0, 0.1), (40.0, 0.1), (9.0, 0.1), (9.0, 0.1), (9.0, 0.1)])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("float32_bhsd_group16: the plain read stayed disturbed", done.stdout)
        self.assertEqual(self.stored(), (self.names(1, 4, 8), self.names(16)))
        done = self.run_rows([], "--again", "--threads", "2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("GB/s, "), 1)
        self.assertEqual(self.stored(), (self.names(1, 4, 8, 16), []))

    def test_again_of_no_file(self):
        done = self.run_rows([], "--again")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("there is no", done.stderr)
        self.assertFalse(self.file.exists())


if __name__ == "__main__":
    unittest.main()
