"""Recovery: states, signals, the lock, rollbacks, rotation, what --resume means."""

import errno
import json
import os
import signal

import pytest
import torch
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tensors_of,
)

from mamba3lite.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_state,
    step_of,
)
from mamba3lite.training.metrics import MetricsError, read_metrics
from mamba3lite.training.pretrain import Pretrainer
from mamba3lite.training.recovery import (
    BadStepGuard,
    RunError,
    StopSignals,
    TrainingFailed,
    choose_checkpoint,
    require_run_folder,
    require_space,
    run_lock,
)
from mamba3lite.training.side_files import MetricsLog, SampleLog, sample_header


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    """A run from start to end, to compare with."""
    folder = tmp_path_factory.mktemp("whole")
    run = new_run(run_config(prepared, folder, eval_interval=4))
    assert run.run() is True
    return run


def losses(run) -> dict[int, float]:
    rows = read_metrics(run.metrics.path)
    pairs = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(pairs) == len(dict(pairs)), "a step appears twice"
    return dict(pairs)


def kept_steps(run) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run.run_dir / "checkpoints")]


# --------------------------------------------------------------------------------------
# What a checkpoint says


def test_threads_are_recorded_and_restored(prepared, tmp_path, capsys):
    config = run_config(prepared, tmp_path)
    threads = torch.get_num_threads()
    new_run(config, StopsAfter).run()
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    state = read_state(newest)
    assert state["threads"] == threads
    try:
        torch.set_num_threads(threads + 1)
        again = new_run(config)
        again.restore(newest)
        assert torch.get_num_threads() == threads
        assert (
            f"threads: {threads}, as the checkpoint was made, for the same bits; "
            f"without it they were {threads + 1} (OMP_NUM_THREADS, or the processors)\n"
        ) in capsys.readouterr().out
        again.restore(newest)
        assert "threads: " not in capsys.readouterr().out
    finally:
        torch.set_num_threads(threads)


def test_state_says_what_a_run_was(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path), StopsAfter)
    run.run()
    state = read_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert (state["step"], state["skipped"], state["windows"]) == (5, 0, 5 * 4)
    assert state["world_size"] == 1
    assert state["config"] == run.config.model_dump(mode="json")
    assert state["data"]["fingerprint"] == run.train_data.fingerprint
    assert state["versions"]["torch"] == torch.__version__


# --------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_second_signal_ends_at_once(number, code):
    child = os.fork()
    if child == 0:
        try:
            with StopSignals() as stop:
                os.kill(os.getpid(), number)
                assert stop.requested
                os.kill(os.getpid(), number)
        finally:
            os._exit(1)  # not reached after a second signal
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


@pytest.fixture
def no_nohup():
    """Also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("no_nohup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with StopSignals() as stop:
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("no_nohup")
def test_a_terminal_that_closes_asks_more_than_once(capfd):
    """Its SIGHUPs are one request; a person may ask after it, and insist."""
    child = os.fork()
    if child == 0:
        try:
            with StopSignals() as stop:
                for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                    os.kill(os.getpid(), number)
                assert stop.received == signal.SIGTERM
                os.kill(os.getpid(), signal.SIGHUP)
                os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os._exit(1)  # not reached after a second SIGTERM
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 143
    assert capfd.readouterr().err == (
        "SIGHUP: finishing this step, then saving\n"
        "SIGTERM: finishing this step, then saving; again: quit\n"
    )


def test_under_nohup_a_terminal_may_close():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_note_that_nobody_reads_is_lost(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as broken, StopSignals() as stop:
        monkeypatch.setattr("sys.stderr", broken)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


# --------------------------------------------------------------------------------------
# Rollbacks and rotation


def test_the_guard_counts_in_a_row_and_gives_up_in_time():
    guard = BadStepGuard(limit=2, max_rollbacks=1)
    assert guard.bad() is False
    guard.good()
    assert [guard.bad(), guard.bad()] == [False, True]
    guard.roll_back(3, "loss is nan")
    assert (guard.consecutive, guard.rollbacks) == (0, 1)
    assert [guard.bad(), guard.bad()] == [False, True]
    with pytest.raises(TrainingFailed, match="step 4: loss is nan, 2 times in a row"):
        guard.roll_back(4, "loss is nan")


def test_a_run_begins_with_a_checkpoint(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path), StopsAfter)
    run.at_step = 1
    run.run()
    first = tmp_path / "checkpoints" / "step_00000000"
    assert kept_steps(run) == [0, 1]
    state = read_state(first)
    assert (state["step"], state["windows"], state["losses"]) == (0, 0, [])
    assert state["validation"] is None and state["rollbacks"] == 0
    again = new_run(run_config(prepared, tmp_path, seed=5))
    again.restore(first)
    untrained = new_run(run_config(prepared, tmp_path))
    assert_same_bits(tensors_of(again), tensors_of(untrained))


def test_the_best_by_validation_and_milestones_outlive_the_rest(prepared, tmp_path):
    scores = {2: 5.0, 4: 1.0, 6: 3.0, 8: 2.0, 10: 4.0}

    class Scored(Pretrainer):
        def evaluation(self, windows):
            row = super().evaluation(windows)
            return row | {"val_bpb": scores.get(self.step, row["val_bpb"])}

    lengths = {"total_steps": 12, "eval_interval": 2, "save_interval": 2}
    config = run_config(prepared, tmp_path, **lengths, keep_every=6)
    run = new_run(config, Scored)
    run.run()
    # The best is that of step 4; 6 and 12 are multiples of 6; 10 and 12 the newest.
    assert kept_steps(run) == [4, 6, 10, 12]
    state = read_state(tmp_path / "checkpoints" / "step_00000004")
    assert state["validation"] == {"step": 4, "val_bpb": 1.0}


# --------------------------------------------------------------------------------------
# One trainer a folder, and what --resume means


def test_the_lock_refuses_a_second_trainer_and_frees_itself(tmp_path):
    with (
        run_lock(tmp_path, print),
        pytest.raises(RunError, match="another trainer"),
        run_lock(tmp_path, print),
    ):
        pass
    with run_lock(tmp_path, print):
        pass


def test_a_file_system_without_locks_is_one_line(
    prepared, tmp_path, monkeypatch, capsys
):
    def lacking(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", lacking)
    assert new_run(run_config(prepared, tmp_path)).run() is True
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "lock" in line] == [
        f"[warn] {tmp_path}: no locks on this file system; nothing keeps a second "
        "process from writing here at the same time"
    ]
    dry = tmp_path / "dry"
    require_run_folder(dry)
    assert not dry.exists()


def test_a_locked_folder_is_left_alone(prepared, tmp_path):
    with run_lock(tmp_path, print), pytest.raises(RunError, match="another trainer"):
        new_run(run_config(prepared, tmp_path)).run()
    assert [path.name for path in tmp_path.iterdir()] == ["run.lock"]


@pytest.fixture
def stopped(prepared, tmp_path):
    """A run folder with checkpoints of steps 3 and 5."""
    run = new_run(run_config(prepared, tmp_path / "run"), StopsAfter)
    run.run()
    return run


def resume(stopped, choice: str, **training) -> Pretrainer:
    data = stopped.data_folder
    run = new_run(run_config(data, stopped.run_dir, **training), StopsAfter)
    run.at_step = 6
    run.run(choice)
    return run


def test_never_proposes_a_free_name(stopped):
    with pytest.raises(RunError) as error:
        resume(stopped, "never")
    assert str(error.value) == (
        f"--resume never: {stopped.run_dir} holds 2 checkpoints; a free name is --set "
        f"training.save_dir={stopped.run_dir}-2"
    )
    assert kept_steps(stopped) == [3, 5]


def test_must_fails_without_a_checkpoint(prepared, tmp_path):
    with pytest.raises(RunError, match=r"--resume must: .* holds no checkpoint"):
        new_run(run_config(prepared, tmp_path)).run("must")


@pytest.mark.parametrize("as_path", [False, True])
def test_an_older_step_sets_the_newer_ones_aside(stopped, uninterrupted, as_path):
    root = stopped.run_dir / "checkpoints"
    run = resume(stopped, str(root / "step_00000003") if as_path else "3")
    assert (root / "aside_step_00000005").is_dir()
    assert kept_steps(run) == [3, 6]
    whole = losses(uninterrupted)
    assert losses(run) == {step: whole[step] for step in range(1, 7)}


def test_a_step_that_does_not_exist_lists_those_that_do(stopped):
    with pytest.raises(CheckpointError, match=r"steps in .*: 3, 5\)"):
        resume(stopped, "4")


def test_a_checkpoint_of_another_run_starts_a_new_folder(stopped, prepared, tmp_path):
    path = stopped.run_dir / "checkpoints" / "step_00000003"
    run = new_run(run_config(prepared, tmp_path / "branch"))
    run.run(str(path))
    assert set(losses(run)) == {4, 5, 6, 7, 8}
    with pytest.raises(RunError, match="has checkpoints of its own"):
        new_run(run_config(prepared, tmp_path / "branch")).run(str(path))


def test_a_finished_run_says_so_and_stays_as_it_is(uninterrupted, capsys):
    files = [p for p in uninterrupted.run_dir.rglob("*") if p.is_file()]
    before = {path: path.read_bytes() for path in files}
    again = new_run(uninterrupted.config)
    assert again.run() is True
    assert "this run is already finished" in capsys.readouterr().out
    assert all(path.read_bytes() == data for path, data in before.items())


def test_a_longer_budget_continues_a_finished_run(prepared, tmp_path):
    new_run(run_config(prepared, tmp_path)).run()
    longer = new_run(run_config(prepared, tmp_path, total_steps=10))
    assert longer.run() is True
    assert set(losses(longer)) == set(range(1, 11))


def test_a_run_folder_is_no_checkpoint_to_resume_from(prepared, tmp_path):
    """One line names the newest that lies in it."""
    new_run(run_config(prepared, tmp_path)).run()
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError) as refused:
            choose_checkpoint(tmp_path / "other", str(folder), print)
        assert str(refused.value).endswith(f"name one, such as {newest}")


def test_prepared_data_are_no_run_folder(prepared, tmp_path):
    before = {path: path.read_bytes() for path in prepared.rglob("*.json")}
    with pytest.raises(RunError, match=r"save_dir: .*: prepared data lie there"):
        require_run_folder(prepared)
    assert all(path.read_bytes() == data for path, data in before.items())


def test_too_little_space_is_refused_before_training(tmp_path):
    require_space(tmp_path, 1)
    with pytest.raises(RunError, match=r"GB free, the checkpoints of this run need"):
        require_space(tmp_path, 10**18)


# --------------------------------------------------------------------------------------
# metrics.jsonl and samples.txt


def test_a_torn_last_line_and_later_steps_are_cut(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", print)
    for step in (1, 2, 3):
        log.append({"step": step, "loss": float("nan") if step == 2 else 0.5})
    with log.path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(log.path)] == [1, 2, 3]
    log.keep_until(2)
    lines = log.path.read_text().splitlines()
    expected = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    assert [json.loads(line) for line in lines] == expected


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2 is not JSON"):
        read_metrics(path)


DAMAGED_LINES = {
    "5": "is not a JSON object",
    "[" * 100_000: "is not JSON",
    '{"loss": 1}': "has no step",
    '{"step": "1"}': "has a step that is no count",
    '{"step": true}': "has a step that is no count",
    '{"step": 1, "loss": "low"}': "has a loss that is neither a finite number nor null",
    '{"step": 1, "lr": NaN}': "has a lr that is neither a finite number nor null",
    '{"step": 1, "val_windows": "all", "zlib_bpb": 2}': "evaluates the whole split "
    "without val_bpb",
    '{"step": 1, "val_windows": "all", "val_bpb": 2}': "evaluates the whole split "
    "without zlib_bpb",
}


@pytest.mark.parametrize("line", DAMAGED_LINES, ids=range(len(DAMAGED_LINES)))
def test_a_line_that_is_no_metrics_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(MetricsError) as error:
        read_metrics(path)
    assert str(error.value) == (
        f"{path}: line 2 {DAMAGED_LINES[line]}; repair the line or move the file away "
        "(the checkpoints are intact and do not need it)"
    )


def test_later_samples_are_cut(tmp_path):
    path = tmp_path / "samples.txt"
    early = f"{sample_header(5)}some text\n===== not a header\n"
    path.write_text(f"{early}{sample_header(10)}later\n")
    SampleLog(path, print).keep_until(9)
    assert path.read_text() == early


def test_lines_of_metrics_have_the_documented_keys(uninterrupted):
    rows = read_metrics(uninterrupted.metrics.path)
    training = [row for row in rows if "loss" in row]
    keys = ["step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "mfu", "time"]
    assert [list(row) for row in training] == [keys] * 8
    assert training[-1]["tokens"] == 8 * 4 * 32
    assert training[-1]["mfu"] is None  # no peak is invented for a CPU
    subset, final = [row for row in rows if "val_bpb" in row]
    assert subset["val_windows"] == "3 evenly spaced" and subset["step"] == 4
    assert final["val_windows"] == "all" and final["step"] == 8
