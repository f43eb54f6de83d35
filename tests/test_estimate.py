"""The memory estimate: against shadows of the real step, and against the allocator."""

import json
import re
import weakref
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trainer_cases import (
    MODEL,
    new_run,
    prepare_corpus,
    run_config,
    write_config,
)
from typer.testing import CliRunner

from mamba3lite.cli import app
from mamba3lite.models.mamba_block import Mamba3Block
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3lite.training.config import check_config, load_config
from mamba3lite.training.estimate import (
    Setting,
    checkpoint_bytes,
    checkpoints_at_once,
    kept_by_layer,
    memory_of_step,
    scan_bytes,
    setting_of,
)
from mamba3lite.training.optim import build_optimizer
from mamba3lite.training.pretrain import train_step
from mamba3lite.training.profiling import allocator_peak


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most so far."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage):
        key, size = id(storage), storage.nbytes()
        if key in self.alive:
            return

        def gone(_):
            self.now -= size
            del self.alive[key]

        self.alive[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


APART = "mamba3lite.models.ssd_complex._keep_documents_apart"


def simulated_peak(fields: dict, setting: Setting, training, copies=False) -> int:
    """Peak bytes of a second step on tensors that have shapes and no numbers.

    copies: as on a GPU, which copies what it would have to wait for to look at.
    """
    finite = nullcontext() if copies else patch(APART, lambda *inputs: None)
    with FakeTensorMode(), Live() as live, finite:
        model = Mamba3Transformer(fields)
        optimizer = build_optimizer(model, training)
        for _ in range(2):
            live.peak = live.now
            for _ in range(training.gradient_accumulation_steps):
                shape = (setting.rows, model.cfg.max_seq_len)
                ids = [torch.zeros(shape, dtype=torch.int64) for _ in range(3)]
                with torch.autocast("cpu", torch.bfloat16, enabled=setting.half):
                    loss, _ = model(
                        ids[0], targets=ids[1], doc_ids=ids[2], reduction="sum"
                    )
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
        return live.peak


LARGE = [
    (name, dispatch, checkpointing)
    for name in ("small_gpu", "pretrain_434m")
    for dispatch in ("pytorch", "fused")
    for checkpointing in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dispatch", "checkpointing"), LARGE)
def test_the_estimate_of_the_large_models(monkeypatch, name, dispatch, checkpointing):
    config = load_config(
        name,
        [
            f"model.ssd_dispatch={dispatch}",
            f"training.grad_checkpoint={str(checkpointing).lower()}",
            "model.n_layers=6",  # the same tensors, fewer times
            "model.vocab_size=2048",  # the loss has a test of its own
        ],
    )
    setting = setting_of(config, on_gpu=True)._replace(on_gpu=False)
    assert setting.half is True
    fields = config.model_fields_of_run()
    # Which path is taken is not looked up on a machine that has no GPU.
    monkeypatch.setattr(Mamba3Block, "_usable_dispatch", lambda self, device: dispatch)
    monkeypatch.setattr("mamba3lite.models.ssd_fused._check_device", lambda *a: None)
    wanted = simulated_peak(fields, setting, config.training)
    got = memory_of_step(ModelConfig.of(fields), setting).peak
    assert got == pytest.approx(wanted, rel=0.05)


@pytest.mark.slow
def test_what_a_gpu_copies_to_keep_documents_apart():
    """In the backward pass, where the last layer is computed again."""
    config = load_config(
        "small_gpu",
        ["model.ssd_dispatch=pytorch", "training.grad_checkpoint=true",
         "model.n_layers=2", "model.vocab_size=2048"],
    )  # fmt: skip
    on_gpu = setting_of(config, on_gpu=True)
    fields = config.model_fields_of_run()
    peaks = [
        simulated_peak(fields, on_gpu, config.training, copies)
        for copies in (True, False)
    ]
    derived = [
        scan_bytes(ModelConfig.of(fields), on_gpu._replace(on_gpu=copies))[1]
        for copies in (True, False)
    ]
    copied = derived[0] - derived[1]
    assert peaks[0] - peaks[1] == pytest.approx(copied, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_accumulation_steps": 2, "micro_batch_size": 4},
        {"chunk_size": 64, "state_dim": 16, "n_heads": 4, "head_dim": 32},
    ],
)
def test_the_estimate_of_tiny_ones(changes, half, checkpointing):
    overrides = [
        f"{'training' if 'batch' in key or 'accum' in key else 'model'}.{key}={value}"
        for key, value in changes.items()
    ]
    overrides.append(f"training.grad_checkpoint={str(checkpointing).lower()}")
    config = load_config("tiny", overrides)
    setting = setting_of(config, on_gpu=False)._replace(half=half)
    fields = config.model_fields_of_run()
    wanted = simulated_peak(fields, setting, config.training)
    got = memory_of_step(ModelConfig.of(fields), setting).peak
    assert got == pytest.approx(wanted, rel=0.1)


MEASURED = Path(__file__).parents[1] / "docs/benchmarks/runs/h200-memory.json"


@pytest.mark.parametrize(
    "row",
    json.loads(MEASURED.read_text())["peak_bytes_of_the_tensors_in_a_step"],
    ids=lambda row: f"{row['config']}-{row['grad_checkpoint']}",
)
def test_the_estimate_of_what_a_gpu_was_seen_to_use(row):
    checkpointing = str(row["grad_checkpoint"]).lower()
    config = load_config(row["config"], [f"training.grad_checkpoint={checkpointing}"])
    model = ModelConfig.of(config.model_fields_of_run())
    got = memory_of_step(model, setting_of(config, on_gpu=True)).peak
    assert got == pytest.approx(row["measured"], rel=0.05)


def saved_bytes(block: Mamba3Block, rows: int, half: bool) -> int:
    """Bytes of the distinct storages that a block keeps for its backward pass."""
    kept = {}
    own = {p.untyped_storage().data_ptr() for p in block.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = tensor, storage.nbytes()
        return tensor

    cfg = block.cfg
    u = torch.randn(rows, cfg.max_seq_len, cfg.d_model, requires_grad=True)
    reset = torch.zeros(rows, cfg.max_seq_len, dtype=torch.bool)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=half),
    ):
        block(u, reset)
    return sum(size for _, size in kept.values())


SIZES = {"head_dim": 32, "state_dim": 16, "chunk_size": 16, "max_seq_len": 64}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("dispatch", "precision"),
    [("pytorch", "tf32"), ("triton", "tf32"), ("fused", "tf32"), ("fused", "bf16")],
)
def test_what_a_layer_keeps_is_what_autograd_saves(dispatch, precision, half):
    scan = {"ssd_dispatch": dispatch, "ssd_precision": precision}
    cfg = ModelConfig(**MODEL | SIZES | scan)
    block = Mamba3Block(cfg)
    setting = Setting(rows=2, accumulated=False, half=half, on_gpu=False)
    wanted = saved_bytes(block, 2, half)
    assert sum(kept_by_layer(cfg, setting).values()) == pytest.approx(wanted, rel=0.02)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiny_takes_what_is_estimated(prepared, tmp_path, checkpointing):
    fields = load_config("tiny").model_dump(mode="json", exclude_none=True)
    fields["training"] |= {
        "save_dir": str(tmp_path), "grad_checkpoint": checkpointing
    }  # fmt: skip
    fields["data"] = {"train_data_path": str(prepared)}
    run = new_run(check_config(fields, "test"))
    run.next_step()  # allocates the moments
    measured = allocator_peak(run.model, run.optimizer, run.next_step)
    setting = setting_of(run.config, on_gpu=False)
    assert memory_of_step(run.model.cfg, setting).peak == pytest.approx(measured, 0.3)


@pytest.mark.parametrize(
    ("half", "invariant"), [(False, False), (True, False), (False, True)]
)
def test_the_loss_is_part_of_the_estimate(half, invariant):
    # The shadows do not see inside an operator; the allocator does.
    changes = ["model.vocab_size=20000", "model.n_layers=1"]
    changes.append(f"model.batch_invariant={str(invariant).lower()}")
    config = load_config("tiny", changes)
    model = Mamba3Transformer(config.model_fields_of_run())
    optimizer = build_optimizer(model, config.training)
    setting = setting_of(config, on_gpu=False)._replace(half=half)
    ids = torch.randint(0, 20_000, (setting.rows, config.model.max_seq_len))

    def step():
        train_step(model, optimizer, [(ids, ids, torch.zeros_like(ids))], bf16=half)

    step()
    estimate = memory_of_step(model.cfg, setting)
    assert estimate.peak == estimate.phases["loss"]
    measured = allocator_peak(model, optimizer, step)
    assert estimate.peak == pytest.approx(measured, rel=0.1)


def floats_of(run) -> int:
    return sum(torch.view_as_real(p).numel() if p.is_complex() else p.numel()
               for p in run.model.parameters())  # fmt: skip


def test_the_allocator_is_measured_by_hand(prepared, tmp_path):
    run = new_run(run_config(prepared, tmp_path))
    run.next_step()

    def step():
        first = torch.empty(1000, 1000)
        del first
        second = torch.empty(2000, 1000)
        return second

    # Weights and two moments in float32, and a step count for each tensor.
    held = 12 * floats_of(run) + 4 * len(list(run.model.parameters()))
    assert allocator_peak(run.model, run.optimizer, step) == held + 8_000_000


def test_a_dry_run_compares_the_estimate_with_the_allocator(prepared, tmp_path):
    config = write_config(tmp_path / "a.yaml", prepared, tmp_path / "run")
    result = CliRunner().invoke(app, ["train", "--config", str(config), "--dry-run"])
    assert result.exit_code == 0, result.output
    pattern = r"in a step: ([\d,]+) bytes derived, ([\d,]+) measured \([+-].*%\)"
    found = re.search(pattern, result.stdout)
    derived, measured = (int(number.replace(",", "")) for number in found.groups())
    assert derived == pytest.approx(measured, rel=0.3)


def test_disk_is_counted_at_its_fullest(prepared, tmp_path):
    def at_once(**training):
        return checkpoints_at_once(run_config(prepared, tmp_path, **training))

    # The newest, the best, and the one that is being written.
    assert at_once(total_steps=100, save_interval=10, keep_last=3) == 5
    assert at_once(total_steps=100, save_interval=10, keep_last=3, keep_every=50) == 7
    assert at_once(total_steps=8, save_interval=3, keep_last=30) == 4  # 0, 3, 6, 8
    run = new_run(run_config(prepared, tmp_path))
    assert checkpoint_bytes(run.model) == 12 * floats_of(run)
