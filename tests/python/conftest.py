"""Devices, and what more than one file of tests needs. A test with the argument `device` runs once on the CPU and once on
CUDA tensors; the latter is skipped by name where there is no GPU, or no CUDA in the library."""

import sys

import fovea
import pytest


def pytest_generate_tests(metafunc):
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", "cuda"])


@pytest.fixture(autouse=True)
def _needs_its_device(request):
    if "device" in request.fixturenames and request.getfixturevalue("device") == "cuda" and not fovea.info()["gpus"]:
        pytest.skip("no GPU, or a library without CUDA: " + fovea.info()["cuda"])


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)
