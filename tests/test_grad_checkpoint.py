"""grad_checkpoint: each block runs again in the backward pass, nothing else changes.

The count of scans tells whether a block ran again; equality is in every bit, since the
second run repeats the first.
"""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from cases import relative_error

from mamba3lite.models import mamba_block, ssd_triton
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise
from mamba3lite.models.transformer import Mamba3Transformer

CONFIG = {
    "vocab_size": 37,
    "d_model": 16,
    "n_layers": 3,
    "n_heads": 2,
    "head_dim": 4,
    "state_dim": 6,
    "chunk_size": 8,
    "ffn_dim": 24,
    "init_std": 0.3,
    "a_init": "spectrum",
}


def model(**changes) -> Mamba3Transformer:
    torch.manual_seed(0)
    return Mamba3Transformer(CONFIG | changes)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, shifted targets, and documents that change inside a chunk."""
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 37, (2, 30), generator=g)
    return tokens, tokens.roll(-1, 1), (torch.arange(30) > 12).long().expand(2, -1)


@pytest.fixture
def scans(monkeypatch) -> list[int]:
    """One entry for every scan that runs."""
    ran = []

    def counted(*args, **options):
        ran.append(1)
        return ssd_complex_chunkwise(*args, **options)

    monkeypatch.setattr(mamba_block, "ssd_complex_chunkwise", counted)
    return ran


def loss_and_gradients(model, packed: bool) -> tuple[torch.Tensor, dict]:
    device = next(model.parameters()).device
    tokens, targets, doc_ids = (ids.to(device) for ids in batch())
    loss = model(tokens, targets=targets, doc_ids=doc_ids if packed else None)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_loss_and_every_gradient_are_the_same(packed):
    loss, plain = loss_and_gradients(model(), packed)
    same_loss, checkpointed = loss_and_gradients(model(grad_checkpoint=True), packed)
    assert torch.equal(same_loss, loss)
    for name, grad in plain.items():
        assert grad.any(), name
        assert torch.equal(checkpointed[name], grad), name


def test_documents_matter_to_the_comparison():
    (one, _), (two, _) = (loss_and_gradients(model(), packed) for packed in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.parametrize(("grad_checkpoint", "runs"), [(False, 3), (True, 6)])
def test_a_training_step_scans_again_in_its_backward_pass(scans, grad_checkpoint, runs):
    loss_and_gradients(model(grad_checkpoint=grad_checkpoint), packed=True)
    assert len(scans) == runs


def test_outside_training_mode_every_block_runs_once(scans):
    evaluated = model(grad_checkpoint=True).eval()
    tokens, targets, _ = batch()
    evaluated(tokens, targets=targets).backward()
    assert len(scans) == 3


def saved_bytes(model) -> int:
    """What the forward pass keeps for the backward pass, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(z):
        storage = z.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), z)
        return z

    tokens, targets, _ = batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
        loss = model(tokens, targets=targets)
    del loss
    return sum(size for size, _ in kept.values())


def test_far_less_is_kept_for_the_backward_pass():
    assert saved_bytes(model(grad_checkpoint=True)) < saved_bytes(model()) / 5


def test_states_are_handed_on_in_training_mode_too():
    tokens, _, _ = batch()
    logits, states = model()(tokens, return_states=True)
    same, same_states = model(grad_checkpoint=True)(tokens, return_states=True)
    assert torch.equal(same, logits)
    for got, wanted in zip(same_states, states, strict=True):
        assert torch.equal(got, wanted)


def test_under_autocast_the_second_run_is_cast_as_the_first():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, plain = loss_and_gradients(model(), packed=True)
        same_loss, again = loss_and_gradients(model(grad_checkpoint=True), packed=True)
    assert torch.equal(same_loss, loss)
    for name, grad in plain.items():
        assert torch.equal(again[name], grad), name


@pytest.mark.parametrize("dispatch", ["triton", "fused"])
def test_a_fallback_warns_once_although_blocks_run_twice(dispatch):
    """Six states are no tile of a kernel."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss_and_gradients(model(grad_checkpoint=True, ssd_dispatch=dispatch), True)
    assert sum(issubclass(w.category, RuntimeWarning) for w in caught) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="requires triton")
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_the_triton_kernel_runs_again_too(packed, monkeypatch):
    """Forward twice a block, with the gradients that PyTorch has."""
    sizes = {"head_dim": 16, "state_dim": 16, "chunk_size": 16}
    launched, launch = [], ssd_triton._per_chunk_ssd_triton_forward

    def counted(*args):
        launched.append(1)
        return launch(*args)

    monkeypatch.setattr(ssd_triton, "_per_chunk_ssd_triton_forward", counted)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loss, plain = loss_and_gradients(
        model(ssd_dispatch="triton", **sizes).to(device), packed
    )
    assert len(launched) == 3
    same_loss, again = loss_and_gradients(
        model(ssd_dispatch="triton", grad_checkpoint=True, **sizes).to(device), packed
    )
    assert len(launched) == 9
    _, expected = loss_and_gradients(model(**sizes).to(device), packed)
    assert torch.equal(same_loss, loss)
    for name, grad in plain.items():
        assert relative_error(again[name], grad) < 1e-6, name
        assert relative_error(grad, expected[name]) < 1e-4, name
