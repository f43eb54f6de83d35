"""`make check` and `make test` run every stage, time it, and fail loudly."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def stages(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("stages", ROOT / "tools/stages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    for name, status in {"good": 0, "bad": 3}.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\necho "$#: $1" >> ran\nexit {status}\n')
        script.chmod(0o755)
    monkeypatch.setattr(module, "BIN", folder)
    monkeypatch.setattr(module, "ROOT", folder)
    return module


def test_a_failing_stage_is_named_and_the_rest_still_runs(stages, capfd):
    status = stages.run({"first": "bad -m 'not slow'", "second": "good one"})
    assert status == 1
    assert (stages.ROOT / "ran").read_text() == "2: -m\n1: one\n"
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("first") and line.endswith("FAILED") for line in lines)
    assert any(line.startswith("second") and line.endswith("ok") for line in lines)


def test_all_stages_passing_is_success(stages):
    assert stages.run({"only": "good x"}) == 0


def test_the_whole_test_holds_the_check(stages):
    assert stages.CHECK.items() <= stages.TEST.items()
