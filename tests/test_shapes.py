"""The shapes in the signatures hold: tests run again with every annotation checked.

In a process of its own, because jaxtyping's hook works on the import of a module, and
torch.compile fails under it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HOOK = "--jaxtyping-packages=mamba3lite.models,beartype.beartype"


def run_pytest(*arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest over the tests that fit their annotations."""
    environment = os.environ | {"HYPOTHESIS_PROFILE": "shapes", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-m", "not slow and not gpu and not bad_input", "--color=no"),
            *arguments,
        ],
        cwd=TESTS.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_the_scan_and_the_model_keep_their_annotations():
    """The planted faults come first: without the hook the run stops at them."""
    status, output = run_pytest(
        # Under the hook Triton's interpreter does not find what a kernel calls.
        *(HOOK, "-x", "-k", "not kernels", "tests/planted_shapes.py"),
        *("tests/test_ssd.py", "tests/test_transformer.py", "tests/test_decode.py"),
    )
    assert status == 0, output[-6000:]
    assert "failed" not in output
    assert passed(output) > 200, output[-6000:]


@pytest.mark.slow
def test_without_the_hook_the_planted_shapes_pass_unseen():
    """So it is the hook that refuses them, not the code."""
    status, output = run_pytest("tests/planted_shapes.py")
    assert status == 1, output[-6000:]
    assert passed(output) == 1, output[-6000:]  # the right shapes
