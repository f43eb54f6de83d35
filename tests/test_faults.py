"""Faults 1 to 5: a run that is interrupted, however, ends like one that was not."""

import hashlib
import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fault_cases import (
    Child,
    command,
    contents,
    copy_of,
    finished,
    in_child,
    losses,
    on_cpu,
    packed_corpus,
    results,
    saved_bytes,
    saved_steps,
    wait_for_step,
)
from trainer_cases import (
    StopsAfter,
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    write_config,
    write_corpus,
)

from mamba3lite.data.prepare import prepare
from mamba3lite.training import checkpoint as checkpoint_module
from mamba3lite.training import pretrain
from mamba3lite.training.pretrain import Pretrainer
from mamba3lite.training.side_files import sample_header

pytestmark = [on_cpu, pytest.mark.slow]
ACCUMULATED = {"micro_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return packed_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(prepared, tmp_path_factory):
    return finished(prepared, tmp_path_factory.mktemp("whole"), eval_interval=4)


@pytest.fixture(scope="module")
def packed_whole(packed, tmp_path_factory):
    return finished(packed, tmp_path_factory.mktemp("whole"), **ACCUMULATED)


def assert_ended_alike(run: Pretrainer, whole: Pretrainer) -> None:
    """The same loss at every step and the same bits in every tensor."""
    assert losses(run.run_dir) == losses(whole.run_dir)
    assert_same_bits(results(run), results(whole))


# --------------------------------------------------------------------------------------
# 1: resumed equals uninterrupted


@pytest.mark.parametrize("stops", [(1,), (5,), (3, 4, 7)])
@pytest.mark.parametrize("kind", ["plain", "accumulated and packed"])
def test_fault_01_resumed_equals_uninterrupted(request, tmp_path, kind, stops):
    plain = kind == "plain"
    whole = request.getfixturevalue("uninterrupted" if plain else "packed_whole")
    settings = {} if plain else ACCUMULATED
    config = run_config(whole.data_folder, tmp_path, **settings)
    for at_step in stops:
        part = new_run(config, StopsAfter)
        part.at_step = at_step
        assert part.run() is False
        assert saved_steps(tmp_path)[-1] == at_step
    last = new_run(config)
    assert last.run("must") is True
    assert_ended_alike(last, whole)


def test_fault_01_the_packed_runs_have_several_documents_a_row(packed_whole):
    batches = packed_whole.batches(0)
    assert len(batches) == 2
    per_row = [len(row.unique()) for _, _, doc_ids in batches for row in doc_ids]
    assert min(per_row) > 1


# --------------------------------------------------------------------------------------
# 2: the data after a resume


class Hashes(StopsAfter):
    """Notes a hash of each batch that it reads, by position."""

    def batches(self, position):
        batches = super().batches(position)
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t, _, _ in batches))
        self.seen.append((position, digest.hexdigest()))
        return batches


def hashes_of(config, at_step=None) -> list:
    run = new_run(config, Hashes)
    run.seen, run.at_step = [], at_step
    run.run()
    return run.seen


def test_fault_02_the_batches_are_the_same_across_epochs(tmp_path):
    source = write_corpus(tmp_path / "text", documents=6, words=9)
    tokens = tmp_path / "tokens"
    prepare(source, "byte", tokens, val_fraction=0.5, progress=lambda *_: None)
    one_row = {"micro_batch_size": 1, "total_steps": 40}
    config = run_config(tokens, tmp_path / "whole", **one_row)
    n = new_run(config).train_data.n_windows
    assert 4 <= n <= 18
    whole = hashes_of(config)
    first, second = ([h for _, h in whole[i : i + n]] for i in (0, n))
    assert len(set(first)) == n, "an epoch visits every window once"
    assert set(first) == set(second) and first != second
    parts = []
    config = run_config(tokens, tmp_path / "parts", **one_row)
    for at_step in (1, 3, n, n + 2, None):  # twice in epoch 1, its edge, in epoch 2
        parts += hashes_of(config, at_step)
    assert parts == whole


# --------------------------------------------------------------------------------------
# 3: SIGKILL after every file write of a save


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """A run folder with checkpoints of steps 3 and 5; the next save is that of 6."""
    folder = tmp_path_factory.mktemp("stopped")
    part = new_run(run_config(prepared, folder), StopsAfter)
    assert part.run() is False and saved_steps(folder) == [3, 5]
    return folder


def die_after_writing(limit: int) -> None:
    """From here on, SIGKILL comes right after the limit-th change of the disk."""
    calls = itertools.count(1)

    def deadly(function):
        def wrapped(*arguments, **options):
            result = function(*arguments, **options)
            if next(calls) == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for name in ("save_file", "_write_json", "_fsync", "flush_folder"):
        function = getattr(checkpoint_module, name)
        setattr(checkpoint_module, name, deadly(function))
    os.rename, shutil.rmtree = deadly(os.rename), deadly(shutil.rmtree)


def one_more_save(config, prepare_to_die) -> int:
    """Continue to step 6 and save; returns 0 when nothing killed it."""

    class Dies(StopsAfter):
        at_step = 6

        def save(self):
            if self.step == 6:
                prepare_to_die()
            super().save()

    new_run(config, Dies).run("must")
    return 0


# Three tensors or texts are written, flushed and listed, two folders are flushed, one
# is renamed, and a checkpoint is renamed and deleted.
WRITES = 13


@pytest.mark.parametrize("limit", range(1, WRITES + 2))
def test_fault_03_killed_after_any_write_of_a_save(
    stopped, prepared, tmp_path, uninterrupted, limit
):
    folder = copy_of(stopped, tmp_path / "run")
    before = saved_bytes(folder)
    config = run_config(prepared, folder)
    ended = in_child(lambda: one_more_save(config, lambda: die_after_writing(limit)))
    assert ended.code == (-signal.SIGKILL if limit <= WRITES else 0), ended
    steps = saved_steps(folder)
    assert steps in ([3, 5], [3, 5, 6], [5, 6]), "an old one goes after the new one"
    kept = {p: data for p, data in before.items() if p.parent.is_dir()}
    assert {p: p.read_bytes() for p in kept} == kept
    last = new_run(config)
    assert last.run("must") is True
    assert_ended_alike(last, uninterrupted)
    assert not list((folder / "checkpoints").glob(".tmp-*"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_fault_03_killed_while_a_file_is_written(
    stopped, prepared, tmp_path, uninterrupted, name
):
    folder = copy_of(stopped, tmp_path / "run")
    size = (folder / "checkpoints" / "step_00000005" / name).stat().st_size
    config = run_config(prepared, folder)

    def die_inside():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # the kernel ends the process
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, size - 1000))

    ended = in_child(lambda: one_more_save(config, die_inside))
    assert ended.code == -signal.SIGXFSZ, ended
    (begun,) = folder.glob("checkpoints/.tmp-step_00000006-*")
    assert begun.is_dir() and not (begun / name).exists()
    assert saved_steps(folder) == [3, 5]
    last = new_run(config)
    assert last.run("must") is True
    assert_ended_alike(last, uninterrupted)


# --------------------------------------------------------------------------------------
# 4: five random SIGKILLs


def test_fault_04_five_random_kills(prepared, tmp_path):
    settings = {"total_steps": 90, "eval_interval": 20, "sample_interval": 30}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **settings)
    draw, reached = random.Random(4), 0
    for _ in range(5):
        child = Child(command(config))
        wait_for_step(tmp_path / "run", reached + draw.randint(4, 12), child)
        time.sleep(draw.uniform(0, 0.03))
        child.kill(signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
        reached = saved_steps(tmp_path / "run")[-1]
    ended = in_child(command(config))
    assert ended.code == 0, ended
    whole = finished(prepared, tmp_path / "whole", **settings)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    newest = "checkpoints/step_00000090"
    for name in ("model.safetensors", "optimizer.safetensors"):
        left = (tmp_path / "run" / newest / name).read_bytes()
        assert left == (whole.run_dir / newest / name).read_bytes()


# --------------------------------------------------------------------------------------
# 5: SIGTERM, and a second signal

PLACES = {
    "in the first step": 1,
    "in a step": 3,
    "in an evaluation": 4,
    "in a sample": 4,
    "in the final evaluation": 8,
    "in the final sample": 8,
}


def interrupted(config, place: str, signals: int) -> int:
    """A run that gets real signals at a place; its exit code."""

    def interrupt(here: bool):
        for _ in range(signals if here else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    class Interrupted(Pretrainer):
        sample_tokens = final_sample_tokens = 5

        def batches(self, position):
            interrupt(place.endswith("step") and self.step + 1 == PLACES[place])
            return super().batches(position)

        def evaluation(self, windows):
            final = windows is None
            interrupt(place == f"in {'the final' if final else 'an'} evaluation")
            return super().evaluation(windows)

        def sample(self, n_tokens):
            final = self.step == self.total_steps
            interrupt(place == f"in {'the final' if final else 'a'} sample")
            return super().sample(n_tokens)

    pretrain.Pretrainer = Interrupted
    return pretrain.run_training(str(config))


@pytest.mark.parametrize("place", PLACES)
def test_fault_05_sigterm_anywhere_saves(prepared, tmp_path, uninterrupted, place):
    settings = {"eval_interval": 4, "sample_interval": 4}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **settings)
    ended = in_child(lambda: interrupted(config, place, 1))
    assert ended.code == 0, ended
    assert ended.err == "SIGTERM: finishing this step, then saving; again: quit\n"
    step = PLACES[place]
    stopped = f"Stopped at step {step} of 8 and saved in {tmp_path / 'run'}; the same "
    assert stopped in ended.out
    assert saved_steps(tmp_path / "run")[-1] == step
    last = new_run(run_config(prepared, tmp_path / "run", **settings))
    assert last.run("must") is True
    assert_ended_alike(last, uninterrupted)
    text = (tmp_path / "run" / "samples.txt").read_text()
    assert text.count(sample_header(8)) == 1


def test_fault_05_a_terminal_that_closes(prepared, tmp_path, uninterrupted):
    """SIGHUP, more than once, and nobody is there any more to read a line."""

    class HungUp(Pretrainer):
        def batches(self, position):
            if self.step == 4:
                for number in (1, 2):
                    os.dup2(os.open("/dev/full", os.O_WRONLY), number)
                for _ in range(3):
                    os.kill(os.getpid(), signal.SIGHUP)
            return super().batches(position)

    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def action() -> int:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        pretrain.Pretrainer = HungUp
        return command(config)()

    assert in_child(action).code == 0
    assert saved_steps(tmp_path / "run")[-1] == 5
    last = new_run(run_config(prepared, tmp_path / "run"))
    assert last.run("must") is True
    assert_ended_alike(last, uninterrupted)


def test_fault_05_ctrl_c_saves_and_says_so_to_scripts(prepared, tmp_path):
    class Interrupted(Pretrainer):
        def batches(self, position):
            if self.step == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return super().batches(position)

    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")

    def action() -> int:
        pretrain.Pretrainer = Interrupted
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return command(config)()

    assert in_child(action).code == 130
    assert saved_steps(tmp_path / "run")[-1] == 5


@pytest.mark.parametrize("place", PLACES)
def test_fault_05_a_second_signal_ends_at_once(prepared, tmp_path, place):
    settings = {"eval_interval": 4, "sample_interval": 4}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **settings)
    ended = in_child(lambda: interrupted(config, place, 2))
    assert ended.code == 128 + signal.SIGTERM, ended
    assert "Stopped at" not in ended.out
    before = contents(tmp_path / "run" / "checkpoints")
    assert saved_steps(tmp_path / "run"), "what was saved is intact"
    assert contents(tmp_path / "run" / "checkpoints") == before


def test_fault_05_a_real_process(prepared, tmp_path):
    steps = {"total_steps": 60, "eval_interval": 1000, "save_interval": 1000}
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **steps)
    script = [sys.executable, "-m", "mamba3lite.training.pretrain"]
    process = subprocess.Popen(
        [*script, "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and '{"step": 5,' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "SIGTERM: finishing this step, then saving" in err
    assert "the same command continues" in out
    last = new_run(run_config(prepared, tmp_path / "run", **steps))
    assert 5 <= saved_steps(tmp_path / "run")[-1] < 60
    last.run("must")
    assert_ended_alike(last, finished(prepared, tmp_path / "whole", **steps))
