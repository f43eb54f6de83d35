"""`make gpu` and `make gpu-all`: how tests are shared out, and what is recorded."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import gate  # noqa: E402
from gate_plugin import shared_out  # noqa: E402

TESTS = [f"tests/test_a.py::test_{i}[{case}]" for i in range(20) for case in "ab"]
TIMED = {test: 1.0 + 3 * (index % 7) for index, test in enumerate(TESTS[:30])}


@pytest.mark.parametrize("seconds", [{}, TIMED], ids=["by count", "by seconds"])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_shares_are_whole_apart_and_always_the_same(seconds, count):
    shares = shared_out(TESTS, seconds, count)
    assert len(shares) == count
    assert sorted(test for share in shares for test in share) == sorted(TESTS)
    functions = [{test.partition("[")[0] for test in share} for share in shares]
    assert sum(map(len, functions)) == 20, "a function is in one share"
    shuffled = random.Random(0).sample(TESTS, len(TESTS))
    again = shared_out(shuffled, seconds, count)
    assert [set(share) for share in again] == [set(share) for share in shares]


def test_shares_take_about_as_long():
    seconds = {test: 30.0 if "test_0[" in test else 1.0 for test in TESTS}
    loads = [sum(seconds[t] for t in share) for share in shared_out(TESTS, seconds, 2)]
    assert loads == [60, 38]
    assert [len(share) for share in shared_out(TESTS, {}, 2)] == [20, 20]


REPOSITORY = {
    "test_one.py": """
import os, pytest
pytestmark = pytest.mark.gpu

@pytest.mark.gate
@pytest.mark.parametrize("n", [1, 2])
def test_good(n):
    pass

@pytest.mark.gate
def test_wrong():
    assert 1 == 2, "not equal"

@pytest.mark.gate
def test_skipped():
    pytest.skip("of no use here")

def test_only_in_all():
    pass
""",
    "test_two.py": """
import pytest
pytest.importorskip("not_there")
pytestmark = pytest.mark.gpu
""",
    "test_three.py": "import not_there_and_without_a_test_for_a_gpu",
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of a few tests, on a machine that says it has a GPU."""
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    for name, text in REPOSITORY.items():
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    device = {"name": "NVIDIA Pretended 9"}
    versions = {"python": "3", "torch": "2", "mamba3lite": "0"}
    monkeypatch.setattr(gate, "ROOT", tmp_path)
    monkeypatch.setattr(gate, "machine", lambda: (device, versions))
    monkeypatch.setattr(gate, "CORES_A_PROCESS", (os.cpu_count() or 1) // 2 or 1)
    monkeypatch.setenv("COMMIT", "abc")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    return tmp_path / "docs" / "benchmarks" / "pretended-9-gate.json"


def test_what_failed_and_what_was_left_out_is_recorded(repository, capsys):
    assert gate.main([]) == 1
    content = json.loads(repository.read_text())
    run = content["runs"]["make gpu"]
    good = [f"tests/test_one.py::test_good[{n}]" for n in (1, 2)]
    assert run["counts"] == {"passed": 2, "failed": 1, "skipped": 2, "not_run": 0}
    assert {*good} < run["tests"].keys()
    assert run["failed"] == [
        {
            "test": "tests/test_one.py::test_wrong",
            "why": "AssertionError: not equal",
        }
    ]
    assert [line["test"] for line in run["skipped"]] == [
        "tests/test_one.py::test_skipped",
        "tests/test_two.py",
    ]
    assert run["skipped"][0]["why"] == "of no use here"
    assert "not_there" in run["skipped"][1]["why"]
    assert run["commit"] == "abc"
    assert gate_faults(content) == []
    out = capsys.readouterr().out
    assert "failed: tests/test_one.py::test_wrong: AssertionError: not equal\n" in out
    assert "make gpu: 2 passed, 1 failed, 2 skipped, 0 not_run, " in out


def test_the_parts_are_cut_alike_until_all_were_run(repository):
    everything = set()
    for number in (1, 2):
        assert json.loads(repository.read_text())["times"] == {} if number > 1 else True
        gate.main(["--all", f"{number}/2"])
        content = json.loads(repository.read_text())
        everything |= content["runs"][f"make gpu-all PART={number}/2"]["tests"].keys()
    assert len(everything) == 5
    assert content["times"].keys() == everything
    assert gate_faults(content) == []


def test_a_process_that_dies_is_a_failure_and_what_it_left_is_named(repository):
    path = repository.parents[2] / "tests" / "test_one.py"
    text = path.read_text().replace('pytest.skip("of no use here")', "os._exit(9)")
    path.write_text(text)
    assert gate.main([]) == 1
    run = json.loads(repository.read_text())["runs"]["make gpu"]
    assert run["failed"][0]["why"] == "the process ended with status 9"
    assert "tests/test_one.py::test_skipped" in run["not_run"]


def test_a_machine_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="PyTorch finds no GPU here"):
        gate.main([])


@pytest.mark.parametrize("given", ["0/2", "3/2", "half", "1/0"])
def test_a_part_that_is_none_is_refused(given, capsys):
    with pytest.raises(SystemExit):
        gate.main(["--all", given])
    assert f"argument --all: invalid part value: '{given}'" in capsys.readouterr().err


# ----------------------------------------------------------------- the recorded results


def gate_faults(content: dict) -> list[str]:
    """What a file of results lacks, or says twice in different ways."""
    faults = [] if content["format"] == gate.FORMAT else ["format"]
    for command, run in content["runs"].items():
        if not re.fullmatch(r"make gpu|make gpu-all PART=\d+/\d+", command):
            faults.append(f"{command}: no command of the Makefile")
        date.fromisoformat(run["date"])
        for section, keys in {
            "device": ["name"],
            "versions": ["python", "torch", "mamba3lite"],
        }.items():
            faults += [f"{command}: no {key}" for key in keys if not run[section][key]]
        for kind in ("failed", "skipped", "not_run"):
            if run["counts"][kind] != len(run[kind]):
                faults.append(f"{command}: {run['counts'][kind]} {kind}, as counted")
        for line in run["failed"] + run["skipped"]:
            if not line["why"] or re.search(r"(^|\s)[/~]\w", line["why"]):
                faults.append(f"{command}: {line['test']}: no reason, or a path in it")
        ended = run["counts"]["passed"] + run["counts"]["failed"]
        if not ended or not run["seconds"] > 0:
            faults.append(f"{command}: nothing was run")
    return faults


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "docs" / "benchmarks").glob("*-gate.json")),
    ids=lambda path: path.name,
)
def test_a_recorded_gate_is_whole_and_green(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert gate_faults(content) == []
    for command, run in content["runs"].items():
        assert run["finished"], command
        assert run["failed"] == run["not_run"] == [], command
        assert run["commit"], command
