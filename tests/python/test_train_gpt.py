"""examples/train_gpt: a short training on the CPU, what it writes, and its errors."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

PROGRAM = Path(__file__).resolve().parents[2] / "examples/train_gpt/train_gpt.py"
TEXT = PROGRAM.parents[2] / "data/sample_text.txt"
TINY = "--device cpu --layers 2 --heads 2 --width 64 --context 64 --batch 8 --steps 40".split()


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("train_gpt", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operations this small gain nothing from a second, and wait for it where a machine is busy
    yield module
    torch.set_num_threads(threads)


def curve(program, options, name, dtype=torch.float32, attend=None):
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8)
    training = program.Training(options, text, attend or program.ATTENTIONS[name], dtype)
    program.train({name: training})
    return training.losses


def test_both_learn_the_same(program):
    """PyTorch's own rounding sets the allowed difference: what float32 changes in its curve against float64, the larger of two
    ways to compute its attention. Fovea's error may be four times that, since roundings elsewhere grow differently in training
    (seen: 0.8 to 1.3 times over eight seeds), and the two curves may be off to opposite sides."""
    options, _ = program.parse([*TINY, "--text", str(TEXT)])
    exact = curve(program, options, "pytorch-math", torch.float64)
    theirs = [curve(program, options, name) for name in ("pytorch", "pytorch-math")]
    ours = curve(program, options, "fovea")
    rounding = max(float((each - exact).abs().max()) for each in theirs)
    assert 0 < rounding < 1e-3
    assert float((ours - exact).abs().max()) <= 4 * rounding
    assert float((ours - theirs[0]).abs().max()) <= 5 * rounding
    bytes_that_occur = len(set(TEXT.read_bytes()))
    for each in (exact, ours, *theirs):
        assert abs(float(each[0]) - math.log(program.VOCABULARY)) < 0.2  # the start knows nothing of the text
        tens = each.view(-1, 10).mean(1)
        assert (tens[1:] < tens[:-1]).all()
        assert float(each[-1]) < math.log(bytes_that_occur)  # what knowing these alone would give


class Scaled(torch.autograd.Function):
    """x, with a gradient that is wrong by one part in 10,000."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x):
        return d_x * 1.0001


def test_a_wrong_gradient_shows(program):
    """What the test above allows is little: a slightly wrong gradient of v moves the curve ten times as far."""
    options, _ = program.parse(TINY)
    right, rounded = (curve(program, options, "pytorch-math", dtype) for dtype in (torch.float64, torch.float32))
    wrong = curve(program, options, "fovea", attend=lambda q, k, v: program.ATTENTIONS["fovea"](q, k, Scaled.apply(v)))
    assert float((wrong - right).abs().max()) > 10 * 4 * float((rounded - right).abs().max())


def test_what_it_writes(program, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    program.main([*TINY, "--steps", "12", "--text", str(TEXT), str(TEXT), "--output", str(tmp_path / "new/folder")])
    found = json.loads((tmp_path / "new/folder/result.json").read_text())
    assert list(found["attention"]) == ["pytorch", "fovea"]
    theirs, ours = found["attention"].values()
    assert len(theirs["losses"]) == len(ours["losses"]) == found["steps"] == 12
    apart = [abs(a - b) for a, b in zip(theirs["losses"], ours["losses"], strict=True)]
    assert ours["largest_difference"] == pytest.approx(max(apart), abs=2e-8)  # losses in the file have nine digits
    assert theirs["largest_difference"] == 0
    assert min(theirs["tokens_a_second"], ours["tokens_a_second"]) > 0
    assert found["text"]["bytes"] == 2 * TEXT.stat().st_size + 1
    assert ours["kernels"].startswith("cpu_")
    picture = tmp_path / "new/folder/loss.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert str(picture) in out and "largest difference" in out and "tokens/s" in out

    picture.unlink()
    program.main(["--draw", str(tmp_path / "new/folder/result.json"), "--output", str(tmp_path)])
    assert (tmp_path / "loss.png").is_file()


def test_under_torchrun(program, tmp_path, monkeypatch):
    """As one process of one; tests/python/test_distributed.py trains on several."""
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    store = torch.distributed.HashStore()
    begin = torch.distributed.init_process_group
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: begin(backend, rank=0, world_size=1, store=store))
    program.main([*TINY, "--steps", "3", "--text", str(TEXT), "--output", str(tmp_path)])
    assert not torch.distributed.is_initialized()
    theirs, ours = json.loads((tmp_path / "result.json").read_text())["attention"].values()
    assert ours["kernels"].endswith("1 ranks") and theirs["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    monkeypatch.setenv("RANK", "1")  # the others write nothing
    (tmp_path / "result.json").unlink()
    store = torch.distributed.HashStore()
    program.main([*TINY, "--steps", "1", "--text", str(TEXT), "--output", str(tmp_path)])
    assert not (tmp_path / "result.json").exists()


def test_the_same_seed_is_the_same_run(program):
    options, _ = program.parse([*TINY, "--steps", "3"])
    first, again = (curve(program, options, "fovea") for _ in range(2))
    assert torch.equal(first, again)
    options.seed = 1
    assert not torch.equal(first, curve(program, options, "fovea"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--steps", "0"], ["--steps", "'0'", "1 or more"]),
        (["--heads", "3"], ["--heads", "got 3", "--width, 64"]),
        (["--context", "4000"], ["--text", "2,379 bytes", "--context 4000"]),
        (["--text", "no-such.txt"], ["--text", "no-such.txt", "No such file"]),
        (["--text", "."], ["--text", "directory"]),
        (["--attention", "fovea", "fovea"], ["--attention", "once"]),
        (["--attention", "none"], ["--attention", "none", "pytorch-math"]),
        (["--draw", str(TEXT)], ["--draw", "sample_text.txt"]),
        (["--output", str(TEXT)], ["--output", "sample_text.txt"]),
    ],
)
def test_errors(program, arguments, named, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        program.main([*TINY, "--text", str(TEXT), "--output", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert all(part in message for part in named), message
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_stops_it(program, tmp_path, monkeypatch):
    monkeypatch.setitem(program.ATTENTIONS, "fovea", lambda q, k, v: q * math.nan)
    with pytest.raises(SystemExit, match="fovea: the loss is not finite"):
        program.main([*TINY, "--text", str(TEXT), "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())
