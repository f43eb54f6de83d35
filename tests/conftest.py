"""Set up every test process: Triton's interpreter, threads, hypothesis, gpu tests."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads it at its first import; nothing above imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tensors here are small: a second thread costs more than it computes, and the
# order of sums should not depend on the machine.
torch.set_num_threads(1)

settings.register_profile("dev", deadline=None, max_examples=25)
settings.register_profile(
    "ci", deadline=None, max_examples=25, derandomize=True, database=None
)
settings.register_profile(
    "shapes", deadline=None, max_examples=3, derandomize=True, database=None
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev")
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    ready = HAS_CUDA and importlib.util.find_spec("triton") is not None
    if item.get_closest_marker("gpu") and not ready:
        pytest.skip("requires triton + CUDA")


@pytest.fixture
def full_precision():
    """Building a trainer lets PyTorch multiply in tf32 from then on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
