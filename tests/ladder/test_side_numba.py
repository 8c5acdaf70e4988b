"""The kernel against float64, every row: on a GPU, or in numba's simulator (NUMBA_ENABLE_CUDASIM=1), where a thread of a block
is one of Python's and only small sizes are quick."""

import importlib.util
import pathlib

import numba
import numpy as np
import pytest
from numba import cuda

KERNEL = pathlib.Path(__file__).resolve().parents[2] / "ladder/33_side_numba/kernel.py"
SPEC = importlib.util.spec_from_file_location("side_numba", KERNEL)
side_numba = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(side_numba)

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
# The shapes of tests/ladder/shapes.hpp; in the simulator those with fewer steps: tails of queries, keys and columns, at each padded size.
SHAPES = [(1, 1, 1), (2, 5, 3), (1, 32, 32), (2, 65, 33), (3, 100, 64), (1, 129, 96), (1, 257, 128), (2, 128, 128), (1, 1, 128),
          (1, 15, 128), (2, 191, 128), (1, 193, 64), (1, 320, 64)]  # fmt: skip
SMALL = [(1, 1, 1), (2, 5, 3), (1, 34, 33), (1, 33, 65)]
TOLERANCE = 1e-5  # that of rung 32, as a share of the largest value


def shfl_xor_sync(self, mask, value, bit):
    """What the simulator lacks. Every thread of the block comes here equally often, so the block's barrier does."""
    place, thread = self.blockIdx.x, self.threadIdx.x
    EXCHANGED[place, thread] = value
    self.syncthreads()
    other = EXCHANGED[place, thread ^ bit]
    self.syncthreads()
    return other


EXCHANGED = {}
if SIMULATED:
    from numba.cuda.simulator.kernelapi import FakeCUDAModule

    FakeCUDAModule.shfl_xor_sync = shfl_xor_sync
elif not cuda.is_available():
    pytest.skip("no GPU, and NUMBA_ENABLE_CUDASIM=1 is not set", allow_module_level=True)


def reference(q, k, v):
    """O and L in float64."""
    scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) / np.sqrt(q.shape[2])
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    return weights @ v.astype(np.float64) / total, (largest + np.log(total))[..., 0]


def attended(q, k, v):
    """O and L of the kernel, over arrays that were full of NaN."""
    inputs = [cuda.to_device(t) for t in (q, k, v)]
    o, lse = (cuda.to_device(np.full(shape, np.nan, np.float32)) for shape in (q.shape, q.shape[:2]))
    side_numba.attend(*inputs, o, lse)
    return o.copy_to_host(), lse.copy_to_host()


def distance(got, expected):
    """The largest error, as a share of the largest value; NaN where an element is."""
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("shape", SMALL if SIMULATED else SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_agrees_with_float64(shape):
    random = np.random.default_rng(shape[1])
    q, k, v = (random.standard_normal(shape, np.float32) for _ in range(3))
    for got, expected in zip(attended(q, k, v), reference(q, k, v), strict=True):
        assert distance(got, expected) <= TOLERANCE


def test_scores_that_leap_up_between_tiles():
    shape = (1, 70, 4)  # two tiles of keys
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal(shape, np.float32) for _ in range(3))
    k[:, 64:] *= 60
    for got, expected in zip(attended(q, k, v), reference(q, k, v), strict=True):
        assert distance(got, expected) <= TOLERANCE


@pytest.mark.parametrize(("shape", "words"), [((1, 2, 129), "got head size 129"), ((65536, 1, 1), "got a batch of 65536")])
def test_says_what_it_does_not_take(shape, words):
    tensors = [np.zeros(shape, np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match=words):
        side_numba.attend(*tensors, np.zeros(shape[:2], np.float32))
