"""How threads wait is chosen before PyTorch is loaded, and never against the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mamba3lite import threads

# What a command loads in the place of PyTorch: it says what PyTorch would have read.
STAND_IN = "import os; print(os.environ.get('GOMP_SPINCOUNT')); os._exit(7)"


@pytest.fixture
def unset(monkeypatch):
    for name in threads.SETTINGS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "command",
    [
        ["mamba3lite.training.pretrain"],
        ["mamba3lite.cli", "train"],
        ["mamba3lite.cli", "doctor"],
    ],
    ids=" ".join,
)
def test_a_command_decides_before_it_loads_torch(command, tmp_path, unset):
    (tmp_path / "torch.py").write_text(STAND_IN)
    places = [str(tmp_path), os.getcwd()]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == (f"{threads.SPINS}\n", 7), done.stderr


@pytest.mark.parametrize("name", threads.SETTINGS)
def test_what_the_user_chose_stays(name, unset, monkeypatch):
    monkeypatch.setenv(name, "ACTIVE")
    threads.spin_briefly()
    other = {*threads.SETTINGS} - {name}
    assert os.environ[name] == "ACTIVE"
    assert not other & os.environ.keys()


def test_the_line_says_what_was_chosen_and_how_to_change_it(unset, monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    monkeypatch.setattr(sys, "platform", "linux")
    line = threads.how_threads_wait(2)
    assert "\n" not in line
    for part in ("2 threads", "GOMP_SPINCOUNT=77", "OMP_NUM_THREADS", "WAIT_POLICY"):
        assert part in line
    alone = threads.how_threads_wait(1)
    assert alone.startswith("1 thread computes") and "OMP_NUM_THREADS" in alone
    assert "GOMP" not in alone, "nobody to wait for"


def test_the_tests_themselves_wait_this_way():
    """conftest decides before torch: a second process must not be spun away."""
    assert any(name in os.environ for name in threads.SETTINGS)
