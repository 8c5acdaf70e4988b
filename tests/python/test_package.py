"""The package as a whole: which file imports which, the one list of arguments, and what an import costs."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fovea
from fovea import _arguments, _core

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "bindings/python"


def module_of(path):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.glob("fovea/**/*.py"))} | {"fovea._core": None}


def imported(name, path):
    """Modules of the package that the file names in an import anywhere, in functions as well. A package stands for its
    __init__.py: it is among them wherever a module inside of it is, unless the importing file is inside, too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(x for x in (base, node.module) if x)
            below = {f"{source}.{alias.name}" for alias in node.names}
            found |= {x if x in MODULES else source for x in below}
    found &= set(MODULES)
    for module in tuple(found):
        parents = module.split(".")
        found |= {".".join(parents[:i]) for i in range(2, len(parents))}
    return {x for x in found if x != "fovea" and not f"{name}.".startswith(f"{x}.")}


def test_imports_have_no_circle():
    edges = {name: imported(name, path) if path else set() for name, path in MODULES.items()}
    assert edges["fovea._attend"] >= {"fovea._core", "fovea.torch._attend", "fovea.jax"}, "the test reads lazy imports"
    assert edges["fovea.torch"] >= {"fovea.torch._attend"} and "fovea.torch" in edges["fovea._arrays"]
    assert not edges["fovea._arguments"]
    while edges:
        ready = [name for name, needed in edges.items() if not needed & set(edges)]
        assert ready, f"a circle among {sorted(edges)}: {edges}"
        for name in ready:
            del edges[name]


def test_import_is_light():
    code = "import sys; before = set(sys.modules); import fovea; print(*sorted(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"numpy", "torch", "jax", "cupy", "transformers", "typing_extensions", "asyncio", "ctypes"}
    assert not heavy & set(loaded)
    ours = [name for name in loaded if name.startswith("fovea")]
    assert ours == ["fovea", "fovea._arguments", "fovea._arrays", "fovea._attend", "fovea._cache", "fovea._cascade", "fovea._compile", "fovea._core", "fovea._types", "fovea.expressions"]


FRONT_ENDS = [fovea.attend, fovea.attend_backward, fovea.compile, fovea.plan, fovea.explain]
for library in ("torch", "jax"):
    if importlib.util.find_spec(library):
        FRONT_ENDS.append(importlib.import_module(f"fovea.{library}").attend)


@pytest.mark.parametrize("function", FRONT_ENDS, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_signatures_show_every_argument(function):
    parameters = inspect.signature(function).parameters
    for name, default in _arguments.DEFAULTS.items():
        parameter = parameters[name]
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default == default or (name == "seed" and parameter.default is None)
    assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_every_argument_is_documented():
    page = (ROOT / "docs/guide/python.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"^        ([a-z_, ]+): ", fovea.attend.__doc__, re.MULTILINE))
    names = {name for group in explained for name in group.split(", ")}
    assert names == {"q", "k", "v", "return_lse", "cache", "rotary", *_arguments.DEFAULTS}
    missing = [name for name in _arguments.DEFAULTS if f"`{name}`" not in page]
    assert not missing, f"docs/guide/python.md does not name {missing}"


def test_the_compiled_part_takes_the_same_names():
    np = pytest.importorskip("numpy")
    x = np.zeros((1, 2, 1, 8), np.float32)
    tensors = {"q": x, "k": x, "v": x, "o": x}
    _core.plan_forward(**tensors, **{name: default for name, default in _arguments.DEFAULTS.items()})
    with pytest.raises(TypeError, match="unexpected argument 'windows'"):
        fovea.attend(x, x, x, windows=(1, 1))
    with pytest.raises(TypeError, match="unexpected argument 'windows'"):
        _arguments.complete({"windows": (1, 1)})
    assert set(_arguments.TENSORS) < set(_core.roles())
    for name in _core.roles():
        with pytest.raises((TypeError, ValueError)):
            _core.plan_forward(**{**tensors, name: "no array"})


def test_options_may_be_none_or_of_other_kinds():
    np = pytest.importorskip("numpy")
    x = np.random.default_rng(0).standard_normal((1, 9, 1, 8)).astype(np.float32)
    expected = fovea.attend(x, x, x, window=(2, 1))
    for window in ([2, 1], np.array([2, 1]), (np.int32(2), 1)):
        assert np.array_equal(fovea.attend(x, x, x, window=window, scale=None, backend=None, bias=None), expected)
    assert not np.array_equal(fovea.attend(x, x, x, window=None), expected)
    o = fovea.attend(x.transpose(0, 2, 1, 3)[:, :, ::1].transpose(0, 2, 1, 3), x, x)
    assert o.flags.c_contiguous
