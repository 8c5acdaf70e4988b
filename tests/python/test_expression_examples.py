"""examples/expressions: each of its scores and masks against its formula."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples/expressions/expressions.py"
SPEC = importlib.util.spec_from_file_location("expressions_example", PATH)
PROGRAM = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(PROGRAM)


@pytest.mark.parametrize("example", PROGRAM.EXAMPLES, ids=lambda example: example.__name__)
def test_equals_its_formula(example):
    found, expected = example(np.random.default_rng(0))
    assert found.shape == expected.shape
    assert abs(found - expected).max() < 2e-6 * max(1, abs(expected).max())


def test_program_prints_a_line_for_each(capsys):
    PROGRAM.main()
    assert len(capsys.readouterr().out.splitlines()) == len(PROGRAM.EXAMPLES)
