"""Recovery: exact resume, signals, the lock, bad steps, and what --resume means."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tensors_of,
    write_config,
    write_corpus,
)

from mamba3lite.data.prepare import prepare
from mamba3lite.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_state,
    step_of,
)
from mamba3lite.training.metrics import (
    MetricsError,
    MetricsLog,
    keep_samples_until,
    read_metrics,
    sample_header,
)
from mamba3lite.training.pretrain import Pretrainer, config_changes
from mamba3lite.training.recovery import (
    BadStepGuard,
    RunError,
    RunLock,
    StopSignals,
    TrainingFailed,
    require_space,
)


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
# Exact resume


@pytest.mark.parametrize("stops", [(1,), (5,), (3, 4, 7)])
def test_resumed_equals_uninterrupted(prepared, tmp_path, uninterrupted, stops):
    config = run_config(prepared, tmp_path)
    for at_step in stops:
        part = new_run(config, StopsAfter)
        part.at_step = at_step
        assert part.run() is False
        assert kept_steps(part)[-1] == at_step
    last = new_run(config)
    assert last.run("must") is True
    assert losses(last) == losses(uninterrupted)
    assert_same_bits(tensors_of(last), tensors_of(uninterrupted))


def test_resume_without_a_signal_repeats_the_lost_steps(
    prepared, tmp_path, uninterrupted
):
    config = run_config(prepared, tmp_path)

    class Dies(Pretrainer):
        def next_step(self):
            if self.step == 5:
                raise ZeroDivisionError("like a kill: no last save")
            return super().next_step()

    with pytest.raises(ZeroDivisionError):
        new_run(config, Dies).run()
    metrics = tmp_path / "metrics.jsonl"
    assert read_metrics(metrics)[-1]["step"] == 5
    with metrics.open("a") as file:
        file.write('{"step": 6, "lo')
    last = new_run(config)
    assert last.run() is True
    assert losses(last) == losses(uninterrupted)
    assert_same_bits(tensors_of(last), tensors_of(uninterrupted))


def test_an_epoch_edge_is_crossed_alike(tmp_path):
    source = write_corpus(tmp_path / "text", documents=12, words=20)
    tokens = tmp_path / "tokens"
    prepare(source, "byte", tokens, val_fraction=0.3, progress=lambda *_: None)
    whole = new_run(run_config(tokens, tmp_path / "whole", total_steps=16))
    per_epoch = whole.train_data.n_windows / whole.config.global_rows
    assert 1 < per_epoch < 7
    whole.run()
    config = run_config(tokens, tmp_path / "parts", total_steps=16)
    for at_step in (7, 13):
        part = new_run(config, StopsAfter)
        part.at_step = at_step
        part.run()
    last = new_run(config)
    last.run()
    assert losses(last) == losses(whole)
    assert_same_bits(tensors_of(last), tensors_of(whole))


def test_threads_are_recorded_and_restored(prepared, tmp_path):
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
    finally:
        torch.set_num_threads(threads)


def test_state_says_what_a_run_was(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path), StopsAfter)
    run.run()
    state = read_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert (state["step"], state["skipped"], state["position"]) == (5, 0, 5)
    assert state["world_size"] == 1
    assert state["config"] == run.config.model_dump(mode="json")
    assert state["data"]["fingerprint"] == run.train_data.fingerprint
    assert state["versions"]["torch"] == torch.__version__


# --------------------------------------------------------------------------------------
# A real process


def launch(config, **environment) -> subprocess.Popen:
    command = [sys.executable, "-m", "mamba3lite.training.pretrain"]
    return subprocess.Popen(
        [*command, "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def wait_for_step(metrics, step: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and f'{{"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    process.kill()
    pytest.fail(f"never reached step {step}: {process.communicate()}")


def test_a_real_sigterm_saves_and_the_rest_is_the_same(prepared, tmp_path):
    steps = {"total_steps": 60, "eval_interval": 1000, "save_interval": 1000}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **steps)
    process = launch(config)
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 5, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "SIGTERM: finishing this step, then saving" in err
    assert "the same command continues" in out
    last = new_run(run_config(prepared, tmp_path / "run", **steps))
    assert 5 <= kept_steps(last)[-1] < 60
    last.run("must")
    whole = new_run(run_config(prepared, tmp_path / "whole", **steps))
    whole.run()
    assert losses(last) == losses(whole)
    assert_same_bits(tensors_of(last), tensors_of(whole))


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


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
    assert signal.getsignal(signal.SIGINT) is before


class StopsInside(Pretrainer):
    """Gets its signal while it evaluates or samples, not in a step."""

    inside = "evaluation"

    def evaluation(self, windows):
        if self.inside == "evaluation":
            self.stop.received = signal.SIGTERM
        return super().evaluation(windows)

    def sample(self, n_tokens):
        if self.inside == "sample":
            self.stop.received = signal.SIGTERM
        return super().sample(n_tokens)


@pytest.mark.parametrize("inside", ["evaluation", "sample"])
@pytest.mark.parametrize("last_step", [False, True])
def test_a_signal_inside_evaluation_or_sampling(
    prepared, tmp_path, uninterrupted, inside, last_step
):
    interval = 100 if last_step else 4
    lengths = {"eval_interval": interval, "sample_interval": interval}
    config = run_config(prepared, tmp_path, **lengths)
    part = new_run(config, StopsInside)
    part.inside = inside
    assert part.run() is False
    assert kept_steps(part)[-1] == (8 if last_step else 4)
    last = new_run(config)
    assert last.run() is True
    assert_same_bits(tensors_of(last), tensors_of(uninterrupted))
    final = [r for r in read_metrics(last.metrics.path) if "zlib_bpb" in r]
    assert len(final) == 1
    samples = (tmp_path / "samples.txt").read_text()
    assert samples.count(sample_header(8)) == 1


# --------------------------------------------------------------------------------------
# Bad steps


class MaskedBatches(Pretrainer):
    """Some positions of the sampler give batches without a target."""

    bad = frozenset({2, 3})

    def batches(self, position):
        batches = super().batches(position)
        if position not in self.bad:
            return batches
        return [(t, torch.full_like(y, -100), d) for t, y, d in batches]


def test_bad_steps_are_skipped_and_recorded(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path), MaskedBatches)
    assert run.run() is True
    assert run.step == 8 and run.skipped == 2
    rows = [row for row in read_metrics(run.metrics.path) if "problem" in row]
    assert [(row["step"], row["skipped"]) for row in rows] == [(2, 1), (2, 2)]
    newest = read_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert (newest["step"], newest["position"]) == (8, 10)


def test_skipped_batches_count_after_a_resume(prepared, tmp_path):
    class Both(MaskedBatches, StopsAfter):
        at_step = 4

    whole = new_run(run_config(prepared, tmp_path / "whole"), MaskedBatches)
    whole.run()
    config = run_config(prepared, tmp_path / "parts")
    new_run(config, Both).run()
    last = new_run(config, MaskedBatches)
    last.run()
    assert last.skipped == 2
    assert_same_bits(tensors_of(last), tensors_of(whole))


def test_too_many_bad_steps_end_the_run_with_a_good_checkpoint(prepared, tmp_path):
    class Hopeless(MaskedBatches):
        bad = frozenset(range(2, 100))

    config = run_config(prepared, tmp_path, nan_guard_max_consecutive=3)
    run = new_run(config, Hopeless)
    with pytest.raises(TrainingFailed, match="step 3: no valid target in the batch, 3"):
        run.run()
    assert kept_steps(run) == [2]
    good = new_run(run_config(prepared, tmp_path / "good", total_steps=8), StopsAfter)
    good.at_step = 2
    good.run()
    assert_same_bits(tensors_of(run), tensors_of(good))


def test_the_guard_counts_in_a_row():
    guard = BadStepGuard(2)
    guard.bad(1, "loss is nan")
    guard.good()
    guard.bad(2, "loss is nan")
    with pytest.raises(TrainingFailed, match="step 3: loss is nan, 2 times in a row"):
        guard.bad(3, "loss is nan")


# --------------------------------------------------------------------------------------
# One trainer a folder, and what --resume means


def test_the_lock_refuses_a_second_trainer_and_frees_itself(tmp_path):
    with (
        RunLock(tmp_path),
        pytest.raises(RunError, match="another trainer"),
        RunLock(tmp_path),
    ):
        pass
    with RunLock(tmp_path):
        pass


def test_a_locked_folder_is_left_alone(prepared, tmp_path):
    with RunLock(tmp_path), pytest.raises(RunError, match="another trainer"):
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


def test_a_damaged_newest_checkpoint_costs_steps_not_the_run(
    stopped, uninterrupted, capsys
):
    newest = stopped.run_dir / "checkpoints" / "step_00000005"
    (newest / "model.safetensors").unlink()
    last = new_run(run_config(stopped.data_folder, stopped.run_dir))
    assert last.run() is True
    assert f"{newest}: model.safetensors is missing" in capsys.readouterr().out
    assert losses(last) == losses(uninterrupted)
    assert_same_bits(tensors_of(last), tensors_of(uninterrupted))


def test_other_data_is_refused(stopped, tmp_path):
    source = write_corpus(tmp_path / "text", documents=30)
    prepare(source, "byte", tmp_path / "other", val_fraction=0.2, progress=print)
    run = new_run(run_config(tmp_path / "other", stopped.run_dir))
    with pytest.raises(CheckpointError, match=r"trained on data .* but .*other is"):
        run.run()
    assert kept_steps(stopped) == [3, 5]


def test_a_new_learning_rate_and_budget_are_taken_and_told(stopped, capsys):
    run = resume(stopped, "auto", lr=2e-2, total_steps=12)
    out = capsys.readouterr().out
    assert "changed since the checkpoint: training.lr: 0.01 -> 0.02" in out
    assert "changed since the checkpoint: training.total_steps: 8 -> 12" in out
    assert run.optimizer.param_groups[0]["lr"] > 1e-2
    before = stopped.config.model_dump(mode="json")
    assert config_changes(before, stopped.config) == []


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


def test_too_little_space_is_refused_before_training(tmp_path):
    require_space(tmp_path, 1)
    with pytest.raises(RunError, match=r"GB free, the checkpoints of this run need"):
        require_space(tmp_path, 10**18)


# --------------------------------------------------------------------------------------
# metrics.jsonl and samples.txt


def test_a_torn_last_line_and_later_steps_are_cut(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
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


def test_a_run_goes_on_after_damaged_metrics_are_moved_away(stopped):
    stopped.metrics.path.write_text('{"step": 1}\n5\n{"step": 3}\n')
    with pytest.raises(MetricsError, match="line 2 is not a JSON object"):
        resume(stopped, "auto")
    stopped.metrics.path.unlink()
    assert set(losses(resume(stopped, "auto"))) == {6}


def test_later_samples_are_cut(tmp_path):
    path = tmp_path / "samples.txt"
    early = f"{sample_header(5)}some text\n===== not a header\n"
    path.write_text(f"{early}{sample_header(10)}later\n")
    keep_samples_until(path, 9)
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
