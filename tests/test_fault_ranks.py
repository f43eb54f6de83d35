"""Faults 11 and 18: another number of processes, and one that dies, hangs or leaves."""

import os
import signal
import subprocess
import sys
import time

import pytest
from fault_cases import (
    copy_of,
    finished,
    in_child,
    losses,
    on_cpu,
    one_line,
    saved_bytes,
    saved_steps,
    wait_for_step,
)
from rank_cases import (
    AskedToStop,
    Noted,
    all_ended_well,
    in_ranks,
    kill_the_rest,
    start_ranks,
    train,
    windows_read,
)
from trainer_cases import new_run, prepare_corpus, run_config, write_config

from mamba3lite.training.checkpoint import list_checkpoints, read_state
from mamba3lite.training.data import PretrainDataset
from mamba3lite.training.pretrain import Pretrainer, run_training

pytestmark = [on_cpu, pytest.mark.slow]
SHAPE = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "lr": 1e-3}
KINDS = ["ddp", "fsdp2"]
GO_ON = "the checkpoints are as they were, and the same command continues from them"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A run of 8 steps in one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return finished(prepared, folder, Noted, **SHAPE).run_dir


def assert_ended_like(run_dir, whole) -> None:
    """The same windows, and at every step a loss within 1e-6."""
    assert windows_read(run_dir) == windows_read(whole)
    left, right = losses(run_dir), losses(whole)
    assert left.keys() == right.keys()
    assert max(abs(left[step] - right[step]) for step in left) <= 1e-6


# --------------------------------------------------------------------------------------
# 11: another number of processes


@pytest.mark.parametrize("kind", KINDS)
def test_fault_11_world_1_to_2_to_1(prepared, tmp_path, whole, kind):
    config = write_config(
        tmp_path / "a.yaml", prepared, tmp_path / "run", parallel=kind, **SHAPE
    )
    for size, at_step in ((1, 3), (2, 5), (1, 6), (2, 0)):
        stops = type("Stops", (AskedToStop,), {"at_step": at_step})
        action = train(config, kind=stops)
        ended = (
            in_ranks(action, size) if size > 1 else [in_child(lambda a=action: a(0))]
        )
        assert [end.code for end in ended] == [0] * size, ended
        newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
        state = read_state(newest)
        assert (state["step"], state["world_size"]) == (at_step or 8, size)
    assert_ended_like(tmp_path / "run", whole)


def test_fault_11_ddp_to_fsdp2_and_back(prepared, tmp_path, whole):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **SHAPE)
    for kind, at_step in (("fsdp2", 2), ("ddp", 4), ("fsdp2", 0)):
        stops = type("Stops", (AskedToStop,), {"at_step": at_step})
        ended = in_ranks(train(config, f"training.parallel={kind}", kind=stops))
        all_ended_well(ended)
    assert "changed since the checkpoint: training.parallel: ddp -> fsdp2" in (
        ended[0].out
    )
    assert_ended_like(tmp_path / "run", whole)


def test_fault_11_another_batch_and_another_number_of_processes(prepared, tmp_path):
    """Each window once, in the order of the data: 3 steps of 4 rows, then of 8."""
    run_dir, shape = tmp_path / "run", SHAPE | {"total_steps": 6}
    config = write_config(tmp_path / "a.yaml", prepared, run_dir, **shape)
    kind = type("Stops", (AskedToStop,), {"at_step": 3})
    assert in_child(lambda: train(config, kind=kind)(0)).code == 0
    all_ended_well(in_ranks(train(config, "training.micro_batch_size=4", kind=Noted)))
    read = windows_read(run_dir)
    assert [len(read[position]) for position in sorted(read)] == [4] * 3 + [8] * 3
    data = PretrainDataset(prepared, 32, 0, "train")
    order = data.batch(0, range(36), 36)[3].tolist()
    assert [w for position in sorted(read) for w in read[position]] == order


def test_fault_11_rows_that_cannot_be_shared(prepared, tmp_path, whole):
    folder = copy_of(whole, tmp_path / "run")
    before = saved_bytes(folder)
    config = write_config(
        tmp_path / "a.yaml", prepared, folder, **SHAPE | {"micro_batch_size": 3}
    )
    first, second, third, fourth = in_ranks(train(config), 4)
    line = one_line(first, 2)
    assert "are 6 rows a step, which 4 processes cannot share equally" in line
    assert line.endswith("a multiple of 4, such as training.micro_batch_size=4")
    assert {(end.code, end.err) for end in (second, third, fourth)} == {(2, "")}
    assert saved_bytes(folder) == before


# --------------------------------------------------------------------------------------
# 18: a process that dies, hangs, or is asked to stop

LONG = SHAPE | {
    "total_steps": 2000,
    "save_interval": 10,
    "eval_interval": 10**6,
    "sample_interval": 10**6,
}


def started(prepared, tmp_path, **settings):
    """Two ranks that have come to step 12, after their checkpoint of step 10."""
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "a.yaml", prepared, run_dir, **LONG | settings)
    children = start_ranks(train(config))
    wait_for_step(run_dir, 12, children[0])
    return run_dir, children


def assert_goes_on(prepared, run_dir) -> None:
    """What was saved is intact, and a run continues from it."""
    newest = saved_steps(run_dir)[-1]
    assert newest >= 10
    run = new_run(run_config(prepared, run_dir, **LONG))
    run.restore(list_checkpoints(run_dir / "checkpoints")[-1])
    assert run.next_step().problem is None and run.step == newest + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", [0, 1])
def test_fault_18_a_dead_rank_ends_the_other(prepared, tmp_path, kind, victim):
    run_dir, children = started(prepared, tmp_path, parallel=kind)
    children[victim].kill(signal.SIGKILL)
    begin = time.monotonic()
    ended = [child.wait() for child in children]
    assert time.monotonic() - begin < 10
    assert ended[victim].code == -signal.SIGKILL
    line = one_line(ended[1 - victim], 1)
    assert line.startswith(f"rank {1 - victim}: another rank died or left (")
    assert line.endswith(GO_ON)
    assert_goes_on(prepared, run_dir)


@pytest.mark.parametrize("victim", [0, 1])
def test_fault_18_a_hung_rank_ends_the_other_in_time(prepared, tmp_path, victim):
    run_dir, children = started(prepared, tmp_path, dist_timeout_s=2)
    children[victim].kill(signal.SIGSTOP)
    begin = time.monotonic()
    ended = children[1 - victim].wait()
    assert 1 < time.monotonic() - begin < 10
    line = one_line(ended, 1)
    reason = f"rank {1 - victim}: nothing moved for training.dist_timeout_s=2 s: "
    assert line.startswith(reason) and line.endswith(GO_ON)
    kill_the_rest([children[victim]])
    assert children[victim].wait().code == -signal.SIGKILL
    assert_goes_on(prepared, run_dir)


def test_fault_18_a_rank_that_never_comes(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **LONG)

    def action(rank: int) -> int:
        return train(config, "training.dist_timeout_s=1")(rank) if rank == 0 else 0

    first, second = in_ranks(action)
    assert second.code == 0
    assert one_line(first, 1).startswith("rank 0: nothing moved for training.dist_time")
    assert not (tmp_path / "run").exists()


def test_fault_18_processes_that_torchrun_did_not_start(
    prepared, tmp_path, monkeypatch
):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **LONG)
    monkeypatch.setenv("WORLD_SIZE", "2")
    line = one_line(in_child(lambda: train(config)(0)), 2)
    assert line.endswith("; start the processes with torchrun")


NUMBERS = {
    "WORLD_SIZE": ["two", "", "0", "-1", "1.0", "9" * 11, "\u0662"],
    "RANK": ["first", "2", "-1"],
    "LOCAL_RANK": ["x", "2"],
    "LOCAL_WORLD_SIZE": ["x", "0", "3"],
    "MASTER_PORT": ["port", "65536"],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_fault_18_an_environment_without_numbers(prepared, tmp_path, capsys, name):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **LONG)
    sound = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1"}
    for value in NUMBERS[name]:
        with pytest.MonkeyPatch.context() as patch:
            for key, number in (sound | {name: value}).items():
                patch.setenv(key, number)
            assert run_training(str(config)) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"mamba3lite train: {name}={value} in the ")
        assert "should be a number from " in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


class DiesSaving(Pretrainer):
    """Rank 0 dies while it writes the checkpoint of step 20."""

    def write(self, weights, moments):
        if self.step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(weights, moments)


class FailsInStep(Pretrainer):
    """Rank 1 runs out of memory in step 12."""

    def batches(self, position):
        if self.ranks.rank == 1 and self.step == 11:
            raise MemoryError("of this rank")
        return super().batches(position)


@pytest.mark.parametrize("kind", KINDS)
def test_fault_18_rank_0_dies_while_it_saves(prepared, tmp_path, kind):
    config = write_config(
        tmp_path / "a.yaml", prepared, tmp_path / "run", parallel=kind, **LONG
    )
    first, second = in_ranks(train(config, kind=DiesSaving))
    assert first.code == -signal.SIGKILL
    assert "rank 1: another rank died or left" in one_line(second, 1)
    assert saved_steps(tmp_path / "run") == [0, 10]
    assert_goes_on(prepared, tmp_path / "run")


def test_fault_18_what_a_rank_fails_of_it_says_itself(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **LONG)
    first, second = in_ranks(train(config, kind=FailsInStep))
    assert one_line(second, 1).startswith("rank 1: out of memory: of this rank; lower")
    assert one_line(first, 1).startswith("rank 0: another rank died or left")
    assert_goes_on(prepared, tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", [0, 1])
def test_fault_18_a_rank_that_is_asked_to_stop_stops_all(
    prepared, tmp_path, kind, victim
):
    run_dir, children = started(prepared, tmp_path, parallel=kind)
    children[victim].kill(signal.SIGTERM)
    first, second = (child.wait() for child in children)
    assert (first.code, second.code) == (0, 0), (first, second)
    note = "SIGTERM: finishing this step, then saving; again: quit\n"
    assert (first.err, second.err) == (note if victim == 0 else "", "")
    last = saved_steps(run_dir)[-1]
    assert f"Stopped at step {last} of 2,000 and saved in {run_dir}" in first.out
    assert first.out.count(f"saved {run_dir}/checkpoints/step_{last:08d}\n") == 1
    assert ("Another rank was asked to stop" in first.out) == (victim == 1)
    assert_goes_on(prepared, run_dir)


def test_fault_18_asked_to_stop_while_evaluating_and_sampling(prepared, tmp_path):
    class AskedLate(Pretrainer):
        """Rank 1 is asked to stop in the final evaluation, then in the sample."""

        def evaluation(self, windows):
            self._ask("evaluation")
            return super().evaluation(windows)

        def sample(self, n_tokens):
            self._ask("sample")
            return super().sample(n_tokens)

        def _ask(self, where):
            if self.ranks.rank == 1 and where == self.where and self.step == 8:
                os.kill(os.getpid(), signal.SIGTERM)

    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **SHAPE)
    for where in ("evaluation", "sample"):
        AskedLate.where = where
        first, second = in_ranks(train(config, kind=AskedLate))
        assert (first.code, second.code) == (0, 0), (first, second)
        assert "Stopped at step 8 of 8" in first.out
        assert not (tmp_path / "run" / "samples.txt").exists()
    ended = in_ranks(train(config))
    all_ended_well(ended)
    assert "validation " in ended[0].out, "the final evaluation was still to come"


def test_fault_18_sigterm_to_torchrun(prepared, tmp_path):
    run_dir = tmp_path / "run"
    config = write_config(tmp_path / "a.yaml", prepared, run_dir, **LONG)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    script = ["--standalone", "-m", "mamba3lite.training.pretrain"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [*torchrun, *script, "--config", str(config)],
            stdout=out,
            stderr=err,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and '{"step": 12,' in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    text = (tmp_path / "out").read_text()
    last = saved_steps(run_dir)[-1]
    assert f"Stopped at step {last} of 2,000 and saved" in text
    assert text.count(f"step_{last:08d}\n") == 1
    assert_goes_on(prepared, run_dir)
