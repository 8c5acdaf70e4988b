"""`python -m fovea`: the same program as the command line, with what it needs beside it."""

import subprocess
import sys

import fovea
import pytest


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "fovea", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def _needs_the_command_line():
    if not hasattr(fovea._core, "main"):
        pytest.skip("built without the command line")


def test_version():
    assert run("--version").stdout == f"fovea {fovea.__version__}\n"


def test_report_is_in_the_package(tmp_path):
    """The Python program refuses files that hold no results, so the refusal shows that it was started; where the libraries that
    draw are not installed, it says so."""
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    done = run("report", str(wrong), "--output", str(tmp_path / "page.html"))
    assert done.returncode in (3, 6)
    assert "not a file of results" in done.stderr or "pip install plotly jinja2" in done.stderr
    assert not (tmp_path / "page.html").exists()
