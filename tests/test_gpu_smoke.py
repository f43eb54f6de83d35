"""Training on a GPU, end to end and small: every dispatch, steps, a checkpoint."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from trainer_cases import assert_same_bits, tiny_model

from mamba3lite.models import ssd_fused, ssd_triton
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.training.checkpoint import (
    load_model,
    load_optimizer,
    read_state,
    save_checkpoint,
)
from mamba3lite.training.config import TrainingConfig
from mamba3lite.training.optim import build_optimizer
from mamba3lite.training.pretrain import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gate,
    pytest.mark.usefixtures("full_precision"),
]

# The smallest tiles that compile; 40 tokens end inside a chunk.
SIZES = {"head_dim": 16, "state_dim": 16, "chunk_size": 16}
TRAINING = TrainingConfig(total_steps=10, lr=1e-2)

every_dispatch = pytest.mark.parametrize("dispatch", ["pytorch", "triton", "fused"])
every_precision = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


def gpu_model(dispatch: str, seed: int = 0) -> Mamba3Transformer:
    return tiny_model(seed, ssd_dispatch=dispatch, **SIZES).cuda()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, shifted targets, and a document that ends inside a chunk."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 257, (2, 41), generator=g).cuda()
    doc_ids = (torch.arange(40) > 21).long().expand(2, -1).cuda()
    return tokens[:, :-1], tokens[:, 1:], doc_ids


def four_steps(model, optimizer, bf16: bool) -> list[float]:
    """Losses of four steps on one batch."""
    results = [train_step(model, optimizer, [batch()], bf16=bf16) for _ in range(4)]
    assert [result.problem for result in results] == [None] * 4
    return [result.loss for result in results]


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The dispatch of every kernel launched forward that writes outputs."""
    launched, launch = [], ssd_triton._per_chunk_ssd_triton_forward
    start = ssd_fused._start

    def counted(*args):
        launched.append("triton")
        return launch(*args)

    def started(kernel, *args, **constants):
        if kernel is ssd_fused._output_kernel:
            launched.append("fused")
        start(kernel, *args, **constants)

    monkeypatch.setattr(ssd_triton, "_per_chunk_ssd_triton_forward", counted)
    monkeypatch.setattr(ssd_fused, "_start", started)
    return launched


@every_dispatch
@every_precision
def test_every_dispatch_runs_without_warning(dispatch, bf16, launches):
    model = gpu_model(dispatch)
    tokens, targets, doc_ids = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            logits, states = model(tokens, doc_ids=doc_ids, return_states=True)
            model(tokens, targets=targets, doc_ids=doc_ids).backward()
    assert logits.dtype == torch.float32
    assert {state.dtype for state in states} == {torch.complex64}
    runs = 0 if dispatch == "pytorch" else 2 * len(model.layers)
    assert launches == [dispatch] * runs
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.norm() > 0, name


@every_dispatch
@every_precision
def test_four_training_steps(dispatch, bf16):
    model = gpu_model(dispatch)
    losses = four_steps(model, build_optimizer(model, TRAINING), bf16)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.complex64}


@every_precision
@pytest.mark.parametrize("dispatch", ["triton", "fused"])
def test_the_dispatches_train_alike(dispatch, bf16):
    losses = []
    for model in (gpu_model("pytorch"), gpu_model(dispatch)):
        losses.append(four_steps(model, build_optimizer(model, TRAINING), bf16))
    assert losses[1] == pytest.approx(losses[0], rel=2e-2 if bf16 else 1e-3)


@every_dispatch
def test_a_checkpoint_comes_back_and_goes_on(dispatch, tmp_path):
    model = gpu_model(dispatch)
    optimizer = build_optimizer(model, TRAINING)
    four_steps(model, optimizer, bf16=True)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 4})
    before = copy.deepcopy(model.state_dict())
    other = gpu_model(dispatch, seed=9)
    restored = build_optimizer(other, TRAINING)
    load_model(path, other)
    load_optimizer(path, other, restored)
    assert read_state(path)["step"] == 4
    assert_same_bits(before, other.state_dict())
    for name, parameter in model.named_parameters():
        twin = restored.state[other.get_parameter(name)]
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(twin[key].to(value.device), value), (name, key)
    # A GPU adds the gradients of a token in any order: equal to rounding, not to bits.
    first = train_step(model, optimizer, [batch()], bf16=True)
    second = train_step(other, restored, [batch()], bf16=True)
    assert second.loss == pytest.approx(first.loss, rel=1e-3)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-2)
