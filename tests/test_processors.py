"""tools/processors.py: which kernels were asked for, and that every one of them ran."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import processors  # noqa: E402


def line(kernel: str) -> str:
    return f"numpy 2 with OpenBLAS {kernel}, torch 2 with X\n"


@pytest.fixture
def runs(monkeypatch):
    """Pretend to run; returns the kernels for which tests were started."""
    started = []

    def asked(command, env, text):
        return line(env.get("OPENBLAS_CORETYPE", "SkylakeX").replace("Zen", "Haswell"))

    class Ended:
        returncode = 0

    def run(command, cwd, env):
        started.append({name: env.get(name) for name in processors.CHOICES})
        return Ended

    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    monkeypatch.setenv("OPENBLAS_L2_SIZE", "512")
    monkeypatch.setattr(processors.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processors.subprocess, "check_output", asked)
    monkeypatch.setattr(processors.subprocess, "run", run)
    return started


def test_the_machines_own_choice_is_made_without_the_callers(runs, capsys):
    assert processors.main() == 0
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    unset = dict.fromkeys(processors.CHOICES)
    assert runs == [
        unset,
        unset | avx2 | {"OPENBLAS_CORETYPE": "Haswell"},
        unset | avx2 | {"OPENBLAS_CORETYPE": "Sandybridge"},
    ], "Zen is Haswell to this OpenBLAS, and not run again"
    out = capsys.readouterr().out
    assert "OpenBLAS SkylakeX, torch 2 with X: ok in " in out
    assert "not run: Linux arm64, Windows, macOS\n" in out


def test_a_choice_that_is_not_obeyed_is_a_failure(runs, monkeypatch, capsys):
    monkeypatch.setattr(
        processors.subprocess, "check_output", lambda *_, **__: line("SkylakeX")
    )
    assert processors.main() == 1
    assert "OpenBLAS SkylakeX, torch 2 with X: FAILED: " in capsys.readouterr().out


def test_failing_tests_are_a_failure(runs, monkeypatch, capsys):
    monkeypatch.setattr(
        processors.subprocess,
        "run",
        lambda *_, **__: type("Ended", (), {"returncode": 1}),
    )
    assert processors.main() == 1
    assert capsys.readouterr().out.count(": FAILED in ") == 3


def test_there_are_tests_of_the_kind():
    names = [Path(path).name for path in processors.marked_tests()]
    assert names == ["test_decode.py", "test_exact_decode.py", "test_notebooks.py"]
