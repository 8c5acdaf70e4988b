"""fovea.compile: kernels made ahead of time, of arrays that need not exist. No GPU takes part; where the machine lacks NVRTC,
or the library CUDA, what needs them is skipped by name."""

import os
import subprocess
import sys

import numpy as np
import pytest

import fovea
from fovea.expressions import clamp

SHAPE = (4, 4096, 16, 128)
TABLE = {"table": fovea.Form((16, 32), "float32")}
RELATIVE = {"score": "s + table[h, clamp(q - k, 0, 31)]", "tensors": TABLE}


def form(shape=SHAPE, dtype="bfloat16"):
    return fovea.Form(shape, dtype)


def compiled(folder, *arrays, **options):
    """fovea.compile for one chip; a skip where the machine lacks what compiles."""
    try:
        return fovea.compile(*(arrays or (form(), form(), form())), chip="sm_90", folder=folder, **options)
    except ValueError as error:
        if "needs NVRTC" in str(error) or "made without CUDA" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A folder that tests share, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("kernels")


def test_kernels_are_compiled_once_and_then_kept(tmp_path):
    folder = tmp_path / "kernels"
    made = compiled(folder, **RELATIVE)
    assert made and all(isinstance(kernel, fovea.CompiledKernel) for kernel in made)
    for kernel in made:
        assert kernel.kernel.startswith("fwd_") and kernel.state == "compiled"
        assert kernel.registers > 0 and kernel.spilled_bytes >= 0 and kernel.seconds > 0
        assert os.path.dirname(kernel.file) == str(folder) and os.path.getsize(kernel.file) > 0
    again = compiled(folder, **RELATIVE)
    assert [(kernel.kernel, kernel.file) for kernel in again] == [(kernel.kernel, kernel.file) for kernel in made]
    assert all(kernel.state == "kept" for kernel in again)


def files(kernels):
    return [kernel.file for kernel in kernels]


def test_functions_and_arrays_mean_the_same_as_text_and_forms(kept):
    table = fovea.named(np.zeros((16, 32), np.float32), "table")
    arrays = [np.empty(SHAPE, np.float16)] * 3  # pages that nobody touches
    made = compiled(kept, *arrays, score=lambda s, h, q, k: s + table[h, clamp(q - k, 0, 31)])
    assert files(made) == files(compiled(kept, *[form(dtype="float16")] * 3, **RELATIVE))


def test_meta_tensors(kept):
    torch = pytest.importorskip("torch")
    q = torch.empty(SHAPE, dtype=torch.bfloat16, device="meta")
    found = compiled(kept, q, q, q, score=RELATIVE["score"], tensors={"table": torch.empty(16, 32, device="meta")})
    assert files(found) == files(compiled(kept, **RELATIVE))


def test_shapes_of_jax(kept):
    jax = pytest.importorskip("jax")
    q = jax.ShapeDtypeStruct(SHAPE, jax.numpy.bfloat16)
    assert files(compiled(kept, q, q, q, **RELATIVE)) == files(compiled(kept, **RELATIVE))


def test_the_backward_of_what_needs_gradients(kept):
    every = compiled(kept, backward=True, **RELATIVE)
    none = compiled(kept, backward=True, gradients=(), **RELATIVE)
    names = [kernel.kernel for kernel in every]
    assert any(name.startswith("bwd_sm90") for name in names) and any("named_gradients" in name for name in names)
    assert none and not any("named_gradients" in kernel.kernel for kernel in none)
    assert files(compiled(kept, backward=True, gradients=["table"], **RELATIVE)) == files(every)


def test_packed_sequences(kept):
    rows, starts = form((4096, 16, 128)), np.array([0, 1000, 4096], np.int32)
    packed = compiled(kept, rows, rows, rows, cu_seqlens_q=starts, cu_seqlens_k=starts, **RELATIVE)
    assert any(kernel.kernel.startswith("fwd_sm90") for kernel in packed)


def test_the_library_holds_the_kernels_of_plain_attention(kept):
    assert compiled(kept) == []


def test_without_nvrtc_it_says_what_is_missing(kept):
    """What was kept is found, and the rest is refused."""
    compiled(kept, **RELATIVE)
    code = f"""
import fovea
q = fovea.Form({SHAPE}, "bfloat16")
tensors = {{"table": fovea.Form((16, 32), "float32")}}
found = fovea.compile(q, q, q, chip="sm_90", folder={str(kept)!r}, score={RELATIVE["score"]!r}, tensors=tensors)
assert found and all(kernel.state == "kept" for kernel in found)
try:
    fovea.compile(q, q, q, chip="sm_90", folder={str(kept)!r}, score="s * 3.0")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "FOVEA_NVRTC": "/none"})
    assert done.returncode == 0, done.stderr
    assert "needs NVRTC" in done.stdout and "/none" in done.stdout and "install nvidia-cuda-nvrtc" in done.stdout


def test_errors(kept, tmp_path):
    q = form()
    with pytest.raises(TypeError, match="chip: got 90; expected a name"):
        fovea.compile(q, q, q, chip=90)
    with pytest.raises(ValueError, match="num_sms: got -1; expected 0 to"):
        fovea.compile(q, q, q, chip="sm_90", num_sms=-1)
    with pytest.raises(ValueError, match="q: got shape"):
        fovea.compile(form((4, 4096)), q, q, chip="sm_90")
    with pytest.raises(TypeError, match="k: got _Shaped without dtype; expected an array, or a fovea.Form"):
        fovea.compile(q, _Shaped((1, 2)), q, chip="sm_90")
    with pytest.raises(TypeError, match="got an array of complex64; expected float32"):
        fovea.compile(form(dtype="complex64"), q, q, chip="sm_90")
    with pytest.raises(ValueError, match="gradients: got 'slope'; expected names out of table"):
        fovea.compile(q, q, q, chip="sm_90", backward=True, gradients=["slope"], **RELATIVE)
    with pytest.raises(TypeError, match="gradients: got 'table'; expected a sequence"):
        fovea.compile(q, q, q, chip="sm_90", backward=True, gradients="table", **RELATIVE)
    with pytest.raises(TypeError, match="unexpected argument 'windows'"):
        fovea.compile(q, q, q, chip="sm_90", windows=(1, 1))
    with pytest.raises(ValueError, match="score, character 5: got 'foo'"):
        compiled(kept, score="s + foo")
    compiled(kept, **RELATIVE)  # from here on the library has to have CUDA
    with pytest.raises(ValueError, match='chip: got "sm_1", expected one of sm_75, sm_80'):
        fovea.compile(q, q, q, chip="sm_1")
    with pytest.raises(ValueError, match='backend: got "reference"'):
        fovea.compile(q, q, q, chip="sm_90", backend="reference")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="folder: got one in which nothing can be kept"):
        fovea.compile(q, q, q, chip="sm_90", folder=file, score="s * 3.0")


class _Shaped(list):
    """Has a shape, and no type of elements."""

    shape = (1, 2)
