"""Faults 12, 16 and 17: another configuration, steps that are not finite, spikes."""

import hashlib
import json
import os
import signal

import pytest
import torch
from fault_cases import (
    contents,
    copy_of,
    finished,
    in_child,
    losses,
    on_cpu,
    problems,
    results,
    saved_bytes,
    saved_steps,
)
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    raw_config,
    run_config,
    write_corpus,
)

from mamba3lite.data.prepare import prepare
from mamba3lite.training.checkpoint import (
    CheckpointError,
    list_checkpoints,
    read_state,
)
from mamba3lite.training.config import check_config
from mamba3lite.training.pretrain import Pretrainer
from mamba3lite.training.recovery import LossHistory, RunError, TrainingFailed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """A run folder with checkpoints of steps 3 and 5."""
    folder = tmp_path_factory.mktemp("stopped")
    part = new_run(run_config(prepared, folder), StopsAfter)
    assert part.run() is False
    return folder


# --------------------------------------------------------------------------------------
# 12: another configuration on resume


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ffn_dim": 32}, "model.ffn_dim: 24 -> 32"),
        ({"n_layers": 1, "d_model": 32}, "model.d_model: 16 -> 32, model.n_layers: "),
        ({"weight_tying": False}, "model.weight_tying: True -> False"),
    ],
)
def test_fault_12_another_shape_is_refused_with_the_difference(
    stopped, prepared, tmp_path, changes, told
):
    folder = copy_of(stopped, tmp_path / "run")
    raw = raw_config(prepared, folder)
    raw["model"] |= changes
    before = saved_bytes(folder)
    with pytest.raises(CheckpointError) as error:
        new_run(check_config(raw, "test")).run()
    line = str(error.value)
    assert line.startswith(f"{folder / 'checkpoints' / 'step_00000005'}: holds a model")
    assert told in line and line.endswith("or start a new training.save_dir")
    assert saved_bytes(folder) == before


def test_fault_12_other_data_is_refused_with_the_difference(
    stopped, prepared, tmp_path
):
    folder = copy_of(stopped, tmp_path / "run")
    source = write_corpus(tmp_path / "text", documents=30)
    other = tmp_path / "other"
    prepare(source, "byte", other, val_fraction=0.2, progress=lambda *_: None)
    before = contents(folder)
    with pytest.raises(CheckpointError) as error:
        new_run(run_config(other, folder)).run()
    line = str(error.value)
    assert "trained on data " in line and f"but {other} is" in line
    assert f"(data.train_data_path: {prepared} -> {other})" in line
    now = contents(folder)
    now.pop(folder / "run.lock", None)
    before.pop(folder / "run.lock", None)
    assert now == before


def test_fault_12_learning_rate_and_budget_are_allowed_and_told(
    stopped, prepared, tmp_path, capsys
):
    folder = copy_of(stopped, tmp_path / "run")
    changed = {"lr": 2e-2, "total_steps": 12}
    run = new_run(run_config(prepared, folder, **changed), StopsAfter)
    run.at_step = 6
    run.run()
    out = capsys.readouterr().out
    assert "changed since the checkpoint: training.lr: 0.01 -> 0.02" in out
    assert "changed since the checkpoint: training.total_steps: 8 -> 12" in out
    assert run.optimizer.param_groups[0]["lr"] > 1e-2


class Windows(StopsAfter):
    """Notes the numbers of the windows of each batch, and its learning rate."""

    def batches(self, position):
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        share = (self.rows, self.config.global_rows, self.shift)
        self.seen += self.train_data.batch(position, *share)[3].tolist()
        return super().batches(position)


def in_pieces(prepared, folder, pieces, kind=Windows) -> Pretrainer:
    """A run that goes on with other settings after each step that is named."""
    seen, rates = [], []
    for at_step, training in pieces:
        run = new_run(run_config(prepared, folder, **training), kind)
        run.at_step, run.seen, run.rates = at_step, seen, rates
        run.run()
    return run


def first_windows(run: Pretrainer, count: int) -> list[int]:
    """The first windows of the order of the data, read as one batch."""
    return run.train_data.batch(0, range(count), count)[3].tolist()


TOKENS = {"total_steps": None, "warmup_steps": 0}


@pytest.mark.parametrize(
    ("after", "steps"),
    [
        ({"micro_batch_size": 8}, 4 + 2),
        ({"micro_batch_size": 2}, 4 + 8),
        ({"gradient_accumulation_steps": 4}, 4 + 1),
        ({"micro_batch_size": 3}, 4 + 6),  # 18 rows for the 16 that are left
    ],
)
def test_fault_12_another_batch_reads_each_window_once(
    prepared, tmp_path, after, steps
):
    """Rows of a step may change: no window twice, none left out, all tokens trained."""
    budget = TOKENS | {"total_tokens": 32 * 32}
    run = in_pieces(prepared, tmp_path, [(4, budget), (None, budget | after)])
    read = 16 + (steps - 4) * run.config.global_rows
    assert run.seen == first_windows(run, read) and len(set(run.seen)) == read
    assert (run.step, run.total_steps, run.tokens) == (steps, steps, read * 32)
    assert set(losses(tmp_path)) == set(range(1, steps + 1))
    state = read_state(list_checkpoints(tmp_path / "checkpoints")[-1])
    assert (state["windows"], state["tokens"]) == (read, read * 32)
    assert run.rates[-1] == pytest.approx(1e-2 * 0.05), "the schedule ends as well"
    again = new_run(run.config)
    assert again.run() is True and again.step == steps, "and so it is finished"


def test_fault_12_the_schedule_of_tokens_goes_by_tokens(prepared, tmp_path):
    budget = TOKENS | {"total_tokens": 32 * 32}
    larger = budget | {"micro_batch_size": 8}
    run = in_pieces(prepared, tmp_path / "run", [(4, budget), (None, larger)])
    rates = [
        in_pieces(prepared, tmp_path / name, [(None, settings)]).rates
        for name, settings in (("small", budget), ("large", larger))
    ]
    assert run.rates == rates[0][:4] + rates[1][2:]


def test_fault_12_skipped_batches_are_windows_behind(prepared, tmp_path):
    kind = type("Run", (Poisoned, Windows), {"what": "gradient", "bad": (1, 2)})
    pieces = [(4, {}), (6, {"micro_batch_size": 8}), (None, {"micro_batch_size": 2})]
    run = in_pieces(prepared, tmp_path, pieces, kind)
    read = (4 + 2) * 4 + 2 * 8 + 2 * 2
    assert (run.step, run.skipped, run.windows) == (8, 2, read)
    assert run.seen == first_windows(run, read)


def test_fault_12_a_rollback_behind_another_batch_goes_on_past_it(prepared, tmp_path):
    settings = {"nan_guard_max_consecutive": 2, "save_interval": 100}
    kind = type("Run", (Poisoned, Windows), {"what": "gradient", "bad": (4, 5)})
    pieces = [(3, settings), (None, settings | {"micro_batch_size": 8})]
    run = in_pieces(prepared, tmp_path, pieces, kind)
    # Steps 1 to 3, one more of 8 rows, two bad ones; back to step 3, five steps on.
    assert (run.step, run.skipped, run.guard.rollbacks) == (8, 3, 1)
    read = 3 * 4 + (1 + 2 + 5) * 8
    assert run.windows == read and run.seen == first_windows(run, read)
    assert run.tokens == (3 * 4 + 5 * 8) * 32


def as_format_1(folder) -> None:
    """Rewrite a checkpoint as the first version of the format had it."""
    state = json.loads((folder / "state.json").read_text()) | {"format": 1}
    del state["windows"]
    state["position"] = state["step"] + state["skipped"]
    (folder / "state.json").write_text(json.dumps(state))
    manifest = json.loads((folder / "manifest.json").read_text()) | {"format": 1}
    data = (folder / "state.json").read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"]["state.json"] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_fault_12_a_checkpoint_that_counts_batches_is_read(prepared, tmp_path):
    """Its windows are those of as many batches of the size that it was saved with."""
    in_pieces(prepared, tmp_path, [(4, {})])
    as_format_1(list_checkpoints(tmp_path / "checkpoints")[-1])
    run = in_pieces(prepared, tmp_path, [(None, {"micro_batch_size": 8})])
    assert run.seen == first_windows(run, 16 + 4 * 8)[16:]


@pytest.mark.parametrize("section", ["model", "training"])
def test_fault_12_windows_that_would_be_cut_or_ordered_anew_are_refused(
    stopped, prepared, tmp_path, section
):
    folder = copy_of(stopped, tmp_path / "run")
    raw = raw_config(prepared, folder)
    change = {"model": {"max_seq_len": 16}, "training": {"seed": 5}}[section]
    raw[section] |= change
    before = saved_bytes(folder)
    with pytest.raises(CheckpointError) as error:
        new_run(check_config(raw, "test")).run()
    told = {"model": "model.max_seq_len: 32 -> 16", "training": "training.seed: 0 -> 5"}
    assert str(error.value) == (
        f"{folder / 'checkpoints' / 'step_00000005'}: has read 20 windows of another "
        f"length or order ({told[section]}), so text would be read twice or never; set "
        "it back, or start a new training.save_dir"
    )
    assert saved_bytes(folder) == before


def test_fault_12_fewer_tokens_than_a_run_has_are_refused(prepared, tmp_path):
    budget = TOKENS | {"total_tokens": 32 * 32}
    in_pieces(prepared, tmp_path, [(6, budget)])
    shorter = run_config(prepared, tmp_path, **budget | {"total_tokens": 5 * 128})
    with pytest.raises(RunError, match="at token 768, but the run asked for has 640"):
        new_run(shorter).run()
    reached = run_config(prepared, tmp_path, **budget | {"total_tokens": 6 * 128 - 5})
    run = new_run(reached)
    assert run.run() is True and run.step == 6, "its last step went beyond it"


# --------------------------------------------------------------------------------------
# 16: steps that are not finite


class Poisoned(Pretrainer):
    """Some positions give a loss or a gradient that is not finite, or no target."""

    what = "loss"
    bad: range | tuple[int, ...] = (2, 3)

    def next_step(self):
        position = self.step + self.skipped
        handle = self._poison() if position in self.bad else None
        result = super().next_step()
        if handle is not None:
            handle.remove()
        return result

    def _poison(self):
        def spoil_loss(module, arguments, output):
            return output[0] * float("nan"), output[1]

        def spoil_gradient(gradient):
            gradient = gradient.clone()
            gradient[0] = float("nan")
            return gradient

        if self.what == "loss":
            return self.model.register_forward_hook(spoil_loss)
        if self.what == "gradient":
            return self.model.norm_f.weight.register_hook(spoil_gradient)
        return None

    def batches(self, position):
        batches = super().batches(position)
        if self.what != "targets" or position not in self.bad:
            return batches
        return [(t, torch.full_like(y, -100), d) for t, y, d in batches]


REASONS = {
    "loss": "loss is nan",
    "gradient": "gradient norm is nan",
    "targets": "no valid target in the batch",
}


def poisoned(what: str, bad, base: type[Pretrainer] = Pretrainer) -> type[Pretrainer]:
    """A run with bad positions of one kind."""
    return type("Run", (Poisoned, base), {"what": what, "bad": bad})


class Elsewhere(Pretrainer):
    """A run without faults that reads other positions: what skipping comes to."""

    where = staticmethod(lambda position: position)

    def batches(self, position):
        return super().batches(self.where(position))


def oracle(prepared, folder, where, **training) -> Pretrainer:
    """The end of a run that reads the positions where(0), where(1), ..."""
    kind = type("Run", (Elsewhere,), {"where": staticmethod(where)})
    return finished(prepared, folder, kind, **training)


@pytest.mark.parametrize("what", REASONS)
def test_fault_16_a_bad_step_is_passed_by_and_recorded(prepared, tmp_path, what):
    run = finished(prepared, tmp_path / "run", poisoned(what, (2, 3)))
    assert (run.step, run.skipped) == (8, 2)
    rows = problems(tmp_path / "run")
    assert [(row["step"], row["skipped"]) for row in rows] == [(2, 1), (2, 2)]
    assert {row["problem"] for row in rows} == {REASONS[what]}
    newest = read_state(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    assert (newest["step"], newest["windows"]) == (8, 10 * 4)
    wanted = oracle(prepared, tmp_path / "other", lambda p: p if p < 2 else p + 2)
    assert_same_bits(results(run), results(wanted))


@pytest.mark.parametrize("what", REASONS)
def test_fault_16_many_in_a_row_roll_back_and_skip_past(prepared, tmp_path, what):
    # Steps 1 to 4 are taken, position 4 to 7 are bad: back to step 3, on at position 7
    # (all three that were tried are passed by), where one more is bad.
    settings = {"nan_guard_max_consecutive": 3}
    run = new_run(
        run_config(prepared, tmp_path / "run", **settings), poisoned(what, range(4, 8))
    )
    assert run.run() is True
    assert (run.step, run.skipped, run.guard.rollbacks) == (8, 5, 1)
    rows = [{k: row[k] for k in row if k != "problem"} for row in problems(run.run_dir)]
    assert rows == [
        {"step": 3, "skipped": 4, "rollback": 1},
        {"step": 3, "skipped": 5},
    ]
    assert set(losses(run.run_dir)) == set(range(1, 9)), "each step once"
    wanted = oracle(prepared, tmp_path / "other", lambda p: p if p < 3 else p + 5)
    assert_same_bits(results(run), results(wanted))
    state = read_state(list_checkpoints(run.run_dir / "checkpoints")[-1])
    assert (state["windows"], state["rollbacks"]) == (13 * 4, 1)


class Diverges(Pretrainer):
    """Its weights are no numbers from step 2 on, and nobody guards."""

    def next_step(self):
        result = super().next_step()
        if self.step == 2:
            with torch.no_grad():
                self.model.norm_f.weight.fill_(float("nan"))
        return result


def test_fault_16_weights_without_numbers_give_no_sample_and_no_traceback(
    prepared, tmp_path, capsys
):
    settings = {"nan_guard": False, "sample_interval": 2, "total_steps": 4}
    run = new_run(run_config(prepared, tmp_path / "run", **settings), Diverges)
    assert run.run() is True
    said = capsys.readouterr().out.splitlines()
    warned = [line for line in said if line.startswith("[warn] no sample of step")]
    assert [line.split(":")[0][-1] for line in warned] == ["2", "4"]
    assert "weights diverged" in (run.run_dir / "samples.txt").read_text()


def test_fault_16_a_run_without_a_save_rolls_back_to_its_beginning(prepared, tmp_path):
    settings = {"nan_guard_max_consecutive": 2}
    run = new_run(
        run_config(prepared, tmp_path / "run", **settings), poisoned("loss", (1, 2))
    )
    assert run.run() is True
    assert (run.skipped, run.guard.rollbacks) == (3, 1)
    wanted = oracle(prepared, tmp_path / "other", lambda p: p + 3)
    assert_same_bits(results(run), results(wanted))


def test_fault_16_rollbacks_are_bounded_and_lose_nothing(prepared, tmp_path, capsys):
    settings = {"nan_guard_max_consecutive": 2, "max_rollbacks": 2}
    run = new_run(
        run_config(prepared, tmp_path, **settings), poisoned("loss", range(4, 99))
    )
    with pytest.raises(TrainingFailed) as error:
        run.run()
    line = str(error.value)
    assert line.startswith("step 4: loss is nan, 2 times in a row on different batches")
    assert "after 2 of training.max_rollbacks=2" in line and "training.lr" in line
    assert capsys.readouterr().out.count("[warn] rollback") == 2
    assert saved_steps(tmp_path) == [0, 3]
    again = new_run(run_config(prepared, tmp_path, **settings))
    assert again.run("must") is True, "without the fault, the same command goes on"
    whole = finished(prepared, tmp_path / "whole", **settings)
    assert_same_bits(results(again), results(whole))


@on_cpu
def test_fault_16_killed_after_a_rollback_ends_alike(prepared, tmp_path):
    settings = {"nan_guard_max_consecutive": 2}
    kind = poisoned("gradient", (4, 5))
    whole = finished(prepared, tmp_path / "whole", kind, **settings)
    assert whole.guard.rollbacks == 1
    config = run_config(prepared, tmp_path / "run", **settings)

    class Killed(kind):
        def roll_back(self, problem):
            super().roll_back(problem)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: new_run(config, Killed).run()).code == -signal.SIGKILL
    last = new_run(config, kind)
    assert last.run("must") is True
    assert_same_bits(results(last), results(whole))
    assert problems(tmp_path / "run") == problems(tmp_path / "whole")


# --------------------------------------------------------------------------------------
# 17: loss spikes

SPIKES = {"spike_zscore": 3.0, "spike_window": 5, "total_steps": 14}


class Junk(Pretrainer):
    """One position gives random bytes that the text never has."""

    at = 9

    def batches(self, position):
        batches = super().batches(position)
        if position != self.at:
            return batches
        draw = torch.Generator().manual_seed(0)
        shape = batches[0][0].shape
        junk = torch.randint(150, 256, (2, *shape), generator=draw)
        return [(*junk, batches[0][2])]


def test_fault_17_a_spike_is_passed_by(prepared, tmp_path):
    run = finished(prepared, tmp_path / "run", Junk, **SPIKES)
    assert (run.step, run.skipped) == (14, 1)
    (row,) = problems(run.run_dir)
    assert (
        row["step"] == 9 and "a spike: the 5 steps before had a mean" in row["problem"]
    )
    wanted = oracle(
        prepared, tmp_path / "other", lambda p: p + (p >= 9), total_steps=14
    )
    assert_same_bits(results(run), results(wanted))
    without = SPIKES | {"spike_zscore": None}
    assert finished(prepared, tmp_path / "off", Junk, **without).skipped == 0


def test_fault_17_a_resumed_run_judges_alike(prepared, tmp_path):
    class Both(Junk, StopsAfter):
        at_step = 8  # the window then lies across the resume

    config = run_config(prepared, tmp_path / "run", **SPIKES)
    assert new_run(config, Both).run() is False
    state = read_state(list_checkpoints(tmp_path / "run" / "checkpoints")[-1])
    taken = losses(tmp_path / "run")
    assert state["losses"] == [taken[step] for step in range(4, 9)]
    last = new_run(config, Junk)
    assert last.run("must") is True and last.skipped == 1
    whole = finished(prepared, tmp_path / "whole", Junk, **SPIKES)
    assert_same_bits(results(last), results(whole))
    assert problems(tmp_path / "run") == problems(tmp_path / "whole")


def test_fault_17_what_a_spike_is_by_hand():
    history = LossHistory(zscore=2.0, window=4)
    for loss in (9.0, 3.0, 1.0, 3.0):
        assert history.spike(1e9) is None, "too few losses to compare with"
        history.add(loss)
    history.add(1.0)  # 3, 1, 3, 1: mean 2, standard deviation 2 / sqrt(3)
    history.add(float("nan"))
    assert history.losses == [3.0, 1.0, 3.0, 1.0]
    edge = 2 + 2 * 2 / 3**0.5
    assert history.spike(edge - 1e-9) is None
    assert history.spike(edge + 1e-9).startswith("loss is 4.3094, a spike: the 4 steps")
    off = LossHistory(zscore=None, window=2)
    off.add(1.0)
    assert off.losses == [] and off.spike(1e9) is None
