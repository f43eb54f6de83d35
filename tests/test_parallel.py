"""Several ranks make the run that one process makes: data, steps, files, decisions."""

import json
import math

import pytest
import torch
from fault_cases import (
    contents,
    finished,
    in_child,
    losses,
    on_cpu,
    problems,
    saved_steps,
)
from rank_cases import (
    Noted,
    all_ended_well,
    in_ranks,
    train,
    windows_read,
)
from safetensors.torch import load_file
from test_fault_steps import Poisoned
from trainer_cases import (
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    write_config,
)

from mamba3lite.data import DataError
from mamba3lite.training.checkpoint import list_checkpoints, read_state
from mamba3lite.training.config import ConfigError
from mamba3lite.training.data import PretrainDataset
from mamba3lite.training.metrics import read_metrics
from mamba3lite.training.parallel import Ranks, Watch, rows_of_rank
from mamba3lite.training.pretrain import Pretrainer

pytestmark = [on_cpu, pytest.mark.slow]
KINDS = ["ddp", "fsdp2"]
STEPS = {
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "total_steps": 6,
    "lr": 1e-3,
    "eval_interval": 2,
    "sample_interval": 2,
    "keep_last": 9,
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def alone(prepared, tmp_path_factory):
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run = new_run(run_config(prepared, folder, **STEPS), Noted)
    run.sample_tokens = run.final_sample_tokens = 4
    assert run.run() is True
    return folder


@pytest.fixture(scope="module")
def together(prepared, tmp_path_factory):
    """The folders of the same run in two processes, by kind."""
    base, folders = tmp_path_factory.mktemp("together"), {}
    for kind in KINDS:
        folders[kind] = base / kind
        config = write_config(
            base / f"{kind}.yaml", prepared, folders[kind], parallel=kind, **STEPS
        )
        ended = in_ranks(train(config, kind=Noted))
        all_ended_well(ended)
        assert f"2 processes ({kind})" in ended[0].out and not ended[1].out
    return folders


def tensors_at(run_dir, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    return load_file(folder / "model.safetensors") | load_file(
        folder / "optimizer.safetensors"
    )


def assert_close(left: dict, right: dict, atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name],
            right[name],
            rtol=0,
            atol=atol,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def assert_close_losses(left, right) -> None:
    """The same steps, and at each a loss within 1e-6."""
    left, right = losses(left), losses(right)
    assert left.keys() == right.keys()
    assert max(abs(left[step] - right[step]) for step in left) <= 1e-6


# --------------------------------------------------------------------------------------
# Shares


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_rows_of_the_ranks_are_the_global_batch(prepared, tmp_path, size):
    shape = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}
    config = run_config(prepared, tmp_path, **shape)
    data = PretrainDataset(prepared, config.model.max_seq_len, 0, "train")
    whole = data.batch(3, range(16), 16)
    shares = [data.batch(3, rows_of_rank(config, r, size), 16) for r in range(size)]
    for part, expected in zip(zip(*shares, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(part), expected)


def test_rows_that_cannot_be_shared_are_refused_with_both_numbers(prepared, tmp_path):
    shape = {"micro_batch_size": 3, "gradient_accumulation_steps": 5}
    with pytest.raises(ConfigError, match="are 15 rows a step, which 4 processes"):
        rows_of_rank(run_config(prepared, tmp_path, **shape), 0, 4)


@pytest.mark.parametrize("windows", [None, range(0, 7, 2), [3]])
@pytest.mark.parametrize("size", [2, 3])
def test_each_target_is_evaluated_by_one_rank(prepared, windows, size):
    data = PretrainDataset(prepared, 32, 0, "val")
    ranks = [list(data.eval_batches(2, windows, rank, size)) for rank in range(size)]
    assert len({len(batches) for batches in ranks}) == 1, "or one waits for the others"
    rows = [
        (tuple(t.tolist()), tuple(y.tolist()))
        for batches in ranks
        for tokens, targets, _ in batches
        for t, y in zip(tokens, targets, strict=True)
        if (y != -100).any()
    ]
    expected = [
        (tuple(t.tolist()), tuple(y.tolist()))
        for tokens, targets, _ in data.eval_batches(5, windows)
        for t, y in zip(tokens, targets, strict=True)
    ]
    assert sorted(rows) == sorted(expected)


# --------------------------------------------------------------------------------------
# The same run


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_read_what_one_reads_and_come_to_its_losses(alone, together, kind):
    assert windows_read(together[kind]) == windows_read(alone)
    assert len(list(together[kind].glob("windows_*"))) == 2
    assert_close_losses(together[kind], alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_of_clipped_steps_have_the_bits_of_one_process(
    alone, together, kind
):
    """However a gradient is cut, its norm is the same, and so is what it scales."""
    rows = read_metrics(alone / "metrics.jsonl")
    clipped = [row["step"] for row in rows if row.get("grad_norm", 0) > 1]
    assert clipped == [2, 3, 4, 5, 6]
    assert losses(together[kind]) == losses(alone)


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_alone_writes_and_writes_what_one_process_writes(alone, together, kind):
    def names(folder):
        found = (p.relative_to(folder) for p in contents(folder))
        return sorted(str(p) for p in found if not p.name.startswith("windows_"))

    assert names(together[kind]) == names(alone)
    rows, expected = (
        read_metrics(folder / "metrics.jsonl") for folder in (together[kind], alone)
    )
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected, strict=True):
        for key in ("grad_norm", "val_loss", "val_bpb"):
            assert row.get(key) == pytest.approx(other.get(key), abs=2e-6)
        assert row.get("zlib_bpb") == other.get("zlib_bpb")
    samples = [(f / "samples.txt").read_text() for f in (together[kind], alone)]
    assert samples[0] == samples[1] and samples[0].count("=====") == 6
    state = read_state(list_checkpoints(together[kind] / "checkpoints")[-1])
    assert (state["step"], state["windows"], state["world_size"]) == (6, 6 * 4, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_that_of_one_process(alone, together, kind):
    left, right = tensors_at(together[kind], 0), tensors_at(alone, 0)
    assert_same_bits(left, right)
    left, right = (
        {n: (t.shape, t.dtype) for n, t in tensors_at(folder, 6).items()}
        for folder in (together[kind], alone)
    )
    assert left == right


SMALL = {"total_steps": 1, "lr": 1e-4, "warmup_steps": 0, "eval_windows": 1}


def test_one_step_of_fsdp2_is_one_of_ddp(prepared, tmp_path):
    shape = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}
    for kind in KINDS:
        settings = SMALL | shape | {"parallel": kind}
        config = write_config(
            tmp_path / f"{kind}.yaml", prepared, tmp_path / kind, **settings
        )
        all_ended_well(in_ranks(train(config)))
    left, right = (tensors_at(tmp_path / kind, 1) for kind in KINDS)
    assert_close(left, right, 1e-6)
    before = tensors_at(tmp_path / "ddp", 0)
    assert not torch.equal(before["layers.0.A"], left["layers.0.A"])


# --------------------------------------------------------------------------------------
# The same decisions


class PoisonedRank(Poisoned):
    """The last rank, and no other, meets the faults."""

    def _poison(self):
        if self.ranks.rank == self.ranks.size - 1:
            return super()._poison()
        return self.model.register_forward_hook(lambda *_: None)


class BadLoss(PoisonedRank):
    what, bad = "loss", (1, 4, 5)


class BadGradient(PoisonedRank):
    what, bad = "gradient", (1, 4, 5)


@pytest.mark.parametrize("parallel", KINDS)
@pytest.mark.parametrize("kind", [BadLoss, BadGradient])
def test_a_fault_of_one_rank_is_passed_by_and_rolled_back_on_all(
    prepared, tmp_path, parallel, kind
):
    settings = STEPS | {"nan_guard_max_consecutive": 2, "eval_interval": 100}
    whole = finished(prepared, tmp_path / "alone", kind, **settings)
    config = write_config(
        tmp_path / "a.yaml", prepared, tmp_path / "run", parallel=parallel, **settings
    )
    ended = in_ranks(train(config, kind=kind))
    all_ended_well(ended)
    assert ended[0].out.count("[warn] rollback 1 of 3: back to step 3") == 1
    assert problems(tmp_path / "run") == problems(whole.run_dir)
    assert_close_losses(tmp_path / "run", whole.run_dir)
    assert saved_steps(tmp_path / "run") == saved_steps(whole.run_dir)


class OtherLogits(Pretrainer):
    """The last rank is sure that every sample ends at once."""

    def sample(self, n_tokens):
        def end_it(module, arguments, output):
            if self.ranks.rank == self.ranks.size - 1:
                output[0][..., self.train_data.eos_id] = 1e9

        handle = self.model.register_forward_hook(end_it)
        text = super().sample(n_tokens)
        handle.remove()
        return text


def test_all_ranks_draw_from_the_logits_of_rank_0(alone, prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run", **STEPS)
    all_ended_well(in_ranks(train(config, kind=OtherLogits)))
    texts = [(f / "samples.txt").read_text() for f in (tmp_path / "run", alone)]
    assert texts[0] == texts[1]


def test_a_mistake_of_all_is_told_once_and_one_of_a_rank_names_it(prepared, tmp_path):
    class NoData(Pretrainer):
        def _open_data(self):
            super()._open_data()
            if self.ranks.rank == 1:
                raise DataError("tokens: not on this host")

    class OtherData(Pretrainer):
        def _open_data(self):
            super()._open_data()
            if self.ranks.rank == 1:
                self.train_data.fingerprint = "f" * 64

    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    first, second = in_ranks(train(config, kind=NoData))
    assert (first.code, second.code) == (2, 2)
    assert first.err == "mamba3lite train: rank 1: tokens: not on this host\n"
    assert not second.err
    first, second = in_ranks(train(config, kind=OtherData))
    assert (first.code, second.code) == (2, 2) and not second.err
    assert "rank 1: " in first.err and "copy one folder to every host" in first.err
    first, second = in_ranks(train(config, "training.lr=-1"))
    assert (first.code, second.code) == (2, 2) and not second.err
    assert first.err.count("\n") == 1 and "training.lr: got -1" in first.err
    assert not (tmp_path / "run").exists()


def test_agreement_by_hand():
    def action(rank: int) -> int:
        from mamba3lite.training.config import TrainingConfig

        ranks = Ranks.join(TrainingConfig(total_steps=1, dist_timeout_s=20), "test")
        assert ranks.gather(rank) == [0, 1]
        assert ranks.sums(1.5, rank) == [3.0, 1.0]
        assert ranks.first(lambda: rank + 7) == 7
        try:
            ranks.first(lambda: 1 // rank)
        except ZeroDivisionError:
            pass
        else:
            return 1
        loss, norm = ranks.control(torch.tensor(0.25 + rank), torch.tensor(2.0 + rank))
        assert (loss, norm) == (1.5, 2.0), "the sum of the losses, rank 0's norm"
        assert math.isnan(
            ranks.control(torch.tensor(rank * math.nan), torch.ones(()))[0]
        )
        assert ranks.poll() is False and ranks.stopping is False
        ranks.asked = lambda: rank == 1
        assert ranks.stopping is False, "not agreed yet"
        assert ranks.poll() is True and ranks.stopping is True
        ranks.close()
        return 0

    all_ended_well(in_ranks(action))


def test_the_watch_ends_a_process_that_does_not_move():
    def action(beats: int) -> int:
        import time

        watch = Watch(0.3, "nothing moved")
        for _ in range(beats):
            time.sleep(0.1)
            watch.beat()
        if beats:
            watch.close()
        time.sleep(1)
        return 0

    stuck, moving = in_child(lambda: action(0)), in_child(lambda: action(6))
    assert (stuck.code, stuck.err) == (1, "nothing moved\n")
    assert (moving.code, moving.err) == (0, "")


# --------------------------------------------------------------------------------------
# What a step is made of

FUSED = ["head_dim=16", "state_dim=16", "chunk_size=16", "n_layers=1", "max_seq_len=16"]
FUSED += ["ssd_dispatch=fused", "ssd_precision=ieee"]


def first_loss(prepared, folder, size: int, overrides, **settings) -> float:
    """The loss of the second of two steps, which depends on the first one's update."""
    settings = {"micro_batch_size": 2, "total_steps": 3, "warmup_steps": 1} | settings
    folder.mkdir()
    config = write_config(folder / "a.yaml", prepared, folder / "run", **settings)

    class TwoSteps(Pretrainer):
        def run(self, resume):
            results = [self.next_step() for _ in range(2)]
            if self.ranks.main:
                text = json.dumps([self.model.cfg.ssd_dispatch, results[1].loss])
                (folder / "result.json").write_text(text)
            return False

    action = train(config, *overrides, kind=TwoSteps)
    if size == 1:
        assert in_child(lambda: action(0)).code == 0
    else:
        all_ended_well(in_ranks(action, size))
    dispatch, loss = json.loads((folder / "result.json").read_text())
    assert dispatch == ("fused" if overrides else "pytorch")
    return loss


def test_the_fused_operator_under_both(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
    over = [f"model.{setting}" for setting in FUSED]
    settings = {"grad_checkpoint": True}
    alone = first_loss(prepared, tmp_path / "alone", 1, over, **settings)
    for kind in KINDS:
        loss = first_loss(prepared, tmp_path / kind, 2, over, parallel=kind, **settings)
        assert loss == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize("grad_checkpoint", [False, True])
def test_compile_and_bf16_under_both(prepared, tmp_path, monkeypatch, grad_checkpoint):
    compile_model, compiled = torch.compile, []

    def without_code(function, options):
        # The graphs of the compiler, without the minute that their code takes.
        compiled.append(function)
        return compile_model(function, backend="eager")

    monkeypatch.setattr(torch, "compile", without_code)
    settings = {"compile": True, "precision": "bf16", "micro_batch_size": 1}
    settings |= {"gradient_accumulation_steps": 2, "grad_checkpoint": grad_checkpoint}
    results = {
        kind: first_loss(prepared, tmp_path / kind, 2, [], parallel=kind, **settings)
        for kind in KINDS
    }
    plain = first_loss(
        prepared, tmp_path / "alone", 1, [], **settings | {"compile": False}
    )
    for kind in KINDS:
        assert results[kind] == pytest.approx(plain, abs=2e-3), kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_ends_with_its_run(prepared, tmp_path, kind):
    # Taken down with the interpreter, a process that is done aborts now and then.
    config = write_config(
        tmp_path / "a.yaml", prepared, tmp_path / "run", parallel=kind, total_steps=2
    )
    action = train(config)

    def with_more_to_do(rank: int) -> int:
        action(rank)
        return 77

    assert [end.code for end in in_ranks(with_more_to_do)] == [0, 0]
