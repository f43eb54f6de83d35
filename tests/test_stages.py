"""`make check` and `make test` run every stage, time it, and fail loudly."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LEFT_OUT

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


def test_no_module_of_tests_was_left_out(request):
    assert request.config.stash[LEFT_OUT] == {}, "install the extra dev"


def test_a_missing_import_is_a_skip_with_its_name_and_ours_an_error(tmp_path):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    for name, imports in {
        "good": "math",
        "direct": "not_there",
        "helped": "helper_cases",
        "ours": "mamba3lite.gone",
    }.items():
        text = f"import {imports}\n\ndef test_it():\n    pass\n"
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "helper_cases.py").write_text("import not_there.either\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    run = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert "test_direct.py needs not_there, which is not installed" in run.stdout
    assert "test_helped.py needs not_there, which is not installed" in run.stdout
    assert "No module named 'mamba3lite.gone'" in run.stdout
    assert "2 skipped, 1 error" in run.stdout
    (tmp_path / "test_ours.py").unlink()
    run = subprocess.run([*command, tmp_path], capture_output=True, text=True)
    assert "1 passed, 2 skipped" in run.stdout
    assert run.returncode == 0
