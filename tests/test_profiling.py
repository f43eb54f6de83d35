"""A profile of some steps, into the run folder, without changing what is trained."""

import json

import pytest
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tensors_of,
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def names_in(trace) -> list[str]:
    """What a trace has seen, by name."""
    events = json.loads(trace.read_text())["traceEvents"]
    return [event.get("name", "") for event in events]


def steps_in(trace) -> int:
    """Optimizer steps that a trace has seen."""
    return sum(name.startswith("Optimizer.step#") for name in names_in(trace))


def test_the_window_is_profiled_and_nothing_else_changes(prepared, tmp_path, capsys):
    window = {"profile_start": 3, "profile_steps": 2}
    run = new_run(run_config(prepared, tmp_path / "run", **window))
    assert run.run() is True
    folder = tmp_path / "run" / "profile"
    assert sorted(p.name for p in folder.iterdir()) == ["ops.txt", "trace.json"]
    assert steps_in(folder / "trace.json") == 2
    assert "mamba3lite::cross_entropy_sum" in names_in(folder / "trace.json")
    # The table holds what took longest, which on a busy machine may be anything.
    assert "Self CPU" in (folder / "ops.txt").read_text()
    assert f"profiled: {folder}\n" in capsys.readouterr().out
    plain = new_run(run_config(prepared, tmp_path / "plain"))
    plain.run()
    assert not (tmp_path / "plain" / "profile").exists()
    assert_same_bits(tensors_of(run), tensors_of(plain))


def test_a_stop_inside_the_window_writes_what_there_is(prepared, tmp_path):
    config = run_config(prepared, tmp_path, profile_start=2, profile_steps=5)
    run = new_run(config, StopsAfter)
    run.at_step = 4
    assert run.run() is False
    assert steps_in(tmp_path / "profile" / "trace.json") == 3


def test_a_memory_snapshot_without_a_gpu_is_one_warning(prepared, tmp_path, capsys):
    config = run_config(prepared, tmp_path, profile_start=2, memory_snapshot=True)
    assert new_run(config).run() is True
    out = capsys.readouterr().out
    if "on the cpu" in out:
        (line,) = [x for x in out.splitlines() if x.startswith("[warn]")]
        assert line.startswith("[warn] training.memory_snapshot: records the allocator")
    else:
        assert (tmp_path / "profile" / "memory.pickle").stat().st_size > 0


def test_a_profile_that_cannot_be_written_is_a_warning(prepared, tmp_path, capsys):
    (tmp_path / "profile").write_text("in the way")
    assert new_run(run_config(prepared, tmp_path, profile_start=2)).run() is True
    assert f"[warn] {tmp_path / 'profile'}: File exists; no" in capsys.readouterr().out
