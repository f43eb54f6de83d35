"""Set up every test process: Triton's interpreter, threads, hypothesis, gpu tests."""

from __future__ import annotations

import getpass
import importlib.util
import os
import tempfile

import pytest
from hypothesis import settings

from mamba3lite.threads import spin_briefly

spin_briefly()  # read when torch loads, by this process and those that it starts
import torch  # noqa: E402

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads it at its first import; nothing above imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What Inductor compiled for another set of instructions it would take from its cache,
# and compute nonsense with it.
if instructions := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault(
        "TORCHINDUCTOR_CACHE_DIR",
        f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{instructions}",
    )

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


LEFT_OUT = pytest.StashKey[dict[str, str]]()


class TestModule(pytest.Module):
    """A module of tests that is skipped, and says why, where an import is missing.

    A machine with a GPU may lack what only the trainer, the notebooks or the site need.
    That `make check` left nothing out is a test of its own, in test_stages.py.
    """

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            missing = isinstance(cause, ModuleNotFoundError) and cause.name
            if not missing or missing.startswith("mamba3lite"):
                raise
            self.config.stash[LEFT_OUT][self.path.name] = missing
            reason = f"{self.path.name} needs {missing}, which is not installed"
            pytest.skip(reason, allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = {}


def pytest_pycollect_makemodule(module_path, parent) -> pytest.Module:
    return TestModule.from_parent(parent, path=module_path)


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
