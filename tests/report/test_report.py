"""`fovea report` without a browser: what it reads, what it refuses, what it writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fixtures
import pytest
import report
import charts
import data

ROOT = Path(__file__).resolve().parents[2]
MADE = {"ladder": fixtures.ladder, "memory": fixtures.memory, "profile": fixtures.profile, "gpu": fixtures.gpu,
        "ranks": fixtures.ranks}  # fmt: skip
SECTIONS = {"ladder": {"ladder", "rooflines"}, "memory": {"memory"}, "profile": set(), "gpu": {"speed"}, "ranks": {"ranks"}}


def run(*arguments, **options):
    return subprocess.run([sys.executable, str(ROOT / "bench/report/report.py"), *map(str, arguments)], capture_output=True, text=True,
                          **options)  # fmt: skip


def put(folder, name, value):
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


@pytest.mark.parametrize("kind", MADE)
def test_each_kind_of_file_makes_a_page(tmp_path, kind):
    results = data.read([put(tmp_path, f"{kind}.json", MADE[kind]())])
    assert len(getattr(results, kind)) == 1
    found = {section.name for section in report.sections(results, resources=None)}
    assert SECTIONS[kind] | ({"kernels"} if kind == "profile" else set()) == found
    page = report.rendered(results, None, "A title with <angles>")
    assert "A title with &lt;angles&gt;" in page
    assert f"{kind}.json" in page
    assert kind != "ladder" or "peers by torch 2.11, 2026-01-01" in page


def test_what_is_drawn_of_a_folder(tmp_path):
    committed = ROOT / "bench" / "results"
    results = data.read([committed])
    assert len(results.all()) + len(results.left_out) == len(list(committed.glob("*.json")))
    assert results.ladder and results.memory and results.cpu and results.python and results.ranks
    # A folder may hold other JSON files: they are skipped. Such a file given by name is an error.
    other = put(tmp_path, "other.json", {"a": 1})
    put(tmp_path, "ladder.json", fixtures.ladder())
    assert data.read([tmp_path]).left_out == [other]
    with pytest.raises(data.WrongFile, match="other.json: not a file of results"):
        data.read([tmp_path, other])


def test_resources_of_the_library():
    page = (ROOT / "docs/kernels/resources.md").read_text()
    assert data.compiler(page).startswith("nvcc 1")
    families = dict(data.resources(page))
    assert {"fwd_sm90", "fwd_sm80", "bwd_sm80"} <= families.keys()
    head, first, *_ = families["fwd_sm80"]
    assert head[:3] == ["kernel", "threads", "shared memory"]
    assert first[0].startswith("fwd_sm80_")
    assert "sm_75" not in head and "sm_80" in head  # nothing of it is compiled for the former
    assert data.without_empty_columns([["a", "b", "c"], ["1", "", ""], ["", "", "2"]]) == [["a", "c"], ["1", ""], ["", "2"]]


def test_what_cannot_be_read(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("an older page")
    ladder = put(tmp_path, "ladder.json", fixtures.ladder())
    broken = fixtures.ladder()
    del broken["rows"][0]["unit"]
    cases = [
        ([tmp_path / "none.json"], 3, "none.json: no such file"),
        ([put(tmp_path, "text.json", "{")], 3, "text.json: not JSON"),
        ([put(tmp_path, "list.json", [1])], 3, "list.json: not a file of results"),
        ([put(tmp_path, "other.json", {"rows": [{"a": 1}], "host": "x"})], 3, "other.json: not a file of results"),
        ([put(tmp_path, "old.json", broken)], 3, "lacks what its kind has (KeyError: 'unit')"),
        ([ROOT / "tests/report"], 3, "no file of results in"),
        ([ladder, "--output", tmp_path / "page.pdf"], 2, ".html"),
        ([ladder, "--output", tmp_path / "none" / "page.html"], 5, "No such file or directory"),
    ]
    for arguments, code, words in cases:
        done = run(*([*arguments, "--output", page] if "--output" not in arguments else arguments))
        assert (done.returncode, done.stdout) == (code, ""), (arguments, done.stderr)
        assert done.stderr.startswith("fovea report: ") and done.stderr.count("\n") == 1, done.stderr
        assert words in done.stderr
    assert page.read_text() == "an older page"
    done = run(ladder, "--output", page)
    assert done.returncode == 0, done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_missing_libraries_are_named(tmp_path):
    (tmp_path / "plotly.py").write_text("raise ImportError('No module named plotly')")
    done = run(put(tmp_path, "ladder.json", fixtures.ladder()), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 6
    assert "pip install plotly jinja2" in done.stderr


def test_memory_lines():
    square, line = {n: n * n + 1e5 for n in fixtures.LENGTHS}, {n: 256 * n + 1e5 for n in fixtures.LENGTHS}
    assert charts.keeps_matrix(square) and not charts.keeps_matrix(line)
    assert not charts.keeps_matrix({512: 1.0})
    same = charts.alike({"a": line, "b": {n: y * 1.01 for n, y in line.items()}, "c": square})
    assert same == {"a": ["a", "b"], "c": ["c"]}
    assert report.peer_share(data.group_rows(fixtures.ladder()["rows"][:3])["cpu"]) is None
    tensor = data.group_rows(row for row in fixtures.ladder()["rows"] if row["group"] == "tensor")["tensor"]
    assert report.peer_share(tensor) == (pytest.approx(0.9), "FlashAttention-2")
    gain, words = report.least_memory(fixtures.memory())
    assert gain > 30 and "30_attention_three_kernels at length 16,384" in words


def test_rates_and_words():
    assert charts.scaled([999], "GFLOP/s") == (1.0, "GFLOP/s")
    assert charts.scaled([1000], "GB/s") == (1e3, "TB/s")
    assert [charts.short(x) for x in (512, 1024, 16384, 2**20, 1500)] == ["512", "1k", "16k", "1M", "1,500"]
    assert [charts.bytes_text(x) for x in (512, 2**20, 1000 * 2**20, 3 * 2**40)] == ["512 B", "1 MiB", "1000 MiB", "3072 GiB"]
    assert [charts.seconds_text(x) for x in (1.5, 0.0015, 2e-6, 5e-9)] == ["1.5 s", "1.5 ms", "2 µs", "5 ns"]
    assert data.shape_words("tensor", "1x4096x128") == "1 head, length 4,096, size 128"
    assert data.shape_words("softmax", "8x16384") == "8 rows of 16,384"


def test_rooflines_have_rows_of_their_own_kind():
    gpu = {"rows": [{"pass": p, "dtype": t} for p in ("fwd", "bwd", "bwd_det") for t in ("bf16", "fp32")]}
    kinds = lambda group, dtype: [
        (row["pass"], row["dtype"]) for row in data.rows_like(gpu, {"rows": [{"group": group, "dtype": dtype}]})
    ]
    assert kinds("hopper", "bfloat16") == [("fwd", "bf16")]
    assert kinds("attention", "float32") == [("fwd", "fp32")]
    assert kinds("backward", "bfloat16") == [("bwd", "bf16")]
    assert kinds("matmul", "float32") == []


def test_roofline_needs_its_ceilings():
    result = fixtures.ladder()
    assert charts.roofline(result, False, [], []) is not None
    assert charts.roofline(result | {"peaks": []}, False, [], []) is None
    only_memory = [peak for peak in result["peaks"] if peak["unit"] == "GB/s"]
    assert charts.roofline(result | {"peaks": only_memory}, False, [], []) is None


def rows_of(group):
    return [row for row in fixtures.ladder()["rows"] if row["group"] == group and "rate" in row]


def test_bars_are_the_rates_of_the_file():
    rows = rows_of("attention")
    bar = charts.ladder_bars(rows).data[0]
    assert list(bar.y) == [row["rung"] for row in rows] + ["PyTorch efficient", "peak, CUDA cores"]
    assert bar.x[0] == pytest.approx(rows[0]["rate"] / 1e3)
    peer = rows[-1]["peers"][1]
    assert bar.x[3] == pytest.approx(rows[-1]["flops"] / peer["seconds"] * 1e-12)
    assert bar.x[4] == pytest.approx(fixtures.PEAKS["attention"] / 1e3)


def test_rung_and_library_stand_beside_each_other_in_the_rates_of_the_same_turns():
    rows = rows_of("attention")
    alone, rungs, library = charts.ladder_bars(rows).data
    assert list(rungs.y) == list(library.y) == [row["rung"] for row in rows]
    for i, row in enumerate(rows):
        peer = row["peers"][0]
        assert rungs.x[i] == pytest.approx(row["flops"] / peer["rung_seconds"] * 1e-12)
        assert rungs.x[i] == pytest.approx(alone.x[i] / 1.1)
        assert library.x[i] == pytest.approx(row["flops"] / peer["seconds"] * 1e-12)
        assert rungs.x[i] / library.x[i] == pytest.approx(peer["share"])
        assert library.text[i] == f"{peer['share']:.2f}×"
        del peer["rung_seconds"]  # files of older versions have none
    assert [bar.to_plotly_json() for bar in charts.ladder_bars(rows).data[1:]] == [rungs.to_plotly_json(), library.to_plotly_json()]
    assert report.picture("", charts.ladder_bars(rows)).legend == [
        ("rung, alone", charts.RUNG), ("rung, in turns with the library", charts.LIGHT_RUNG),
        ("the library, in the same turns; rung ÷ library", charts.OURS),
    ]  # fmt: skip


def test_on_a_cpu_the_library_is_one_bar():
    rows = rows_of("cpu")
    [bar] = charts.ladder_bars(rows).data
    assert list(bar.y) == [row["rung"] for row in rows] + ["fovea cpu_avx512", "peak"]
    assert bar.x[3] == pytest.approx(rows[-1]["flops"] / rows[-1]["peers"][0]["seconds"] * 1e-9)


def test_a_rung_without_turns_stands_beside_the_library_alone():
    rows = rows_of("attention")
    rows[1]["peers"][0] |= {"rung_seconds": rows[1]["median_seconds"], "seconds": rows[1]["median_seconds"] * rows[1]["peers"][0]["share"]}
    _, rungs, library = charts.ladder_bars(rows).data
    assert rungs.x[1] is None and rungs.x[2] is not None
    assert library.x[1] == pytest.approx(rows[1]["flops"] / rows[1]["peers"][0]["seconds"] * 1e-12)


def test_lines_of_the_last_rung_and_the_library_are_of_the_same_turns():
    shapes = data.group_rows(rows_of("tensor"))["tensor"]
    lines = {line.name: dict(zip(line.x, line.y, strict=True)) for line in charts.ladder_lengths(shapes).data}
    for rows in shapes.values():
        last = rows[-1]
        length, peer = data.length_of(last["shape"]), last["peers"][0]
        assert lines[last["rung"]][length] == pytest.approx(last["rate"] / 1e3)
        beside = lines[f"{last['rung']}, in turns with Fovea"][length]
        assert beside / lines["Fovea, in the same turns"][length] == pytest.approx(peer["share"])
        assert beside == pytest.approx(last["rate"] / 1.1e3)


def test_tables_name_what_took_turns():
    assert "of fovea cuda_simt, in turns" in report.ladder_table(rows_of("attention")).head
    assert "of fovea cpu_avx512" in report.ladder_table(rows_of("cpu")).head
