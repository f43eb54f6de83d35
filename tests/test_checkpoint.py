"""Checkpoints: exact copies, whole or absent, and never a silent restart."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import assert_same_bits, tiny_model

from mamba3lite.models.transformer import ModelConfig
from mamba3lite.training import checkpoint as module
from mamba3lite.training.checkpoint import (
    FILES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    CheckpointError,
    best_checkpoint,
    find_checkpoint,
    list_checkpoints,
    load_model,
    load_optimizer,
    newest_checkpoint,
    read_state,
    remove_temporary,
    restore_rng,
    rng_state,
    rotate,
    save_checkpoint,
    set_aside,
    verify_checkpoint,
)
from mamba3lite.training.config import TrainingConfig
from mamba3lite.training.optim import build_optimizer
from mamba3lite.training.pretrain import train_step

TRAINING = TrainingConfig(total_steps=10, lr=1e-2)


def batch():
    tokens = torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:], torch.zeros(2, 16, dtype=torch.int64)


def trained(seed: int = 0, **changes):
    """A model and its optimizer after two steps."""
    model = tiny_model(seed, **changes)
    optimizer = build_optimizer(model, TRAINING)
    for _ in range(2):
        assert train_step(model, optimizer, [batch()]).problem is None
    return model, optimizer


@pytest.fixture
def three(tmp_path):
    """Three checkpoints of different weights; returns their folder."""
    for step in (1, 2, 3):
        model, optimizer = trained(seed=step)
        save_checkpoint(tmp_path, model, optimizer, {"step": step})
    return tmp_path


def steps(root) -> list[int]:
    return [int(path.name[5:]) for path in list_checkpoints(root)]


# --------------------------------------------------------------------------------------
# Exact copies


@pytest.mark.parametrize("tied", [True, False])
def test_every_bit_comes_back(tmp_path, tied):
    model, optimizer = trained(weight_tying=tied)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2, "note": "x"})
    other = tiny_model(seed=9, weight_tying=tied)
    restored = build_optimizer(other, TRAINING)
    load_model(path, other)
    load_optimizer(path, other, restored)
    assert path.name == "step_00000002"
    assert read_state(path) == {"format": 2, "step": 2, "note": "x"}
    assert_same_bits(model.state_dict(), other.state_dict())
    for name, parameter in model.named_parameters():
        twin = other.get_parameter(name)
        assert_same_bits(optimizer.state[parameter], restored.state[twin])
    assert (other.lm_head.weight is other.embed.weight) is tied


def test_the_next_step_is_the_same_after_loading(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2})
    other = tiny_model(seed=9)
    restored = build_optimizer(other, TRAINING)
    load_model(path, other)
    load_optimizer(path, other, restored)
    first = train_step(model, optimizer, [batch()])
    assert train_step(other, restored, [batch()]) == first
    assert_same_bits(model.state_dict(), other.state_dict())


def test_tied_storage_is_written_once(tmp_path):
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 2})
    stored = load_file(path / MODEL)
    assert set(stored) == set(model.state_dict()) - {"lm_head.weight"}
    assert stored["layers.0.A"].dtype == torch.complex64
    assert len(load_file(path / OPTIMIZER)) == 3 * len(list(model.parameters()))


def test_the_default_model_has_226_tensors():
    state = tiny_model(n_layers=ModelConfig().n_layers).state_dict()
    unique, ties = module.split_tied(state)
    assert len(state) == 227 and len(unique) == 226
    assert ties == {"lm_head.weight": "embed.weight"}


def test_an_optimizer_that_has_not_stepped_is_saved_too(tmp_path):
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    path = save_checkpoint(tmp_path, model, optimizer, {"step": 0})
    restored = build_optimizer(model, TRAINING)
    load_optimizer(path, model, restored)
    assert not restored.state


def test_random_numbers_continue():
    states = json.loads(json.dumps(rng_state()))
    expected = torch.rand(5)
    restore_rng(states)
    assert torch.equal(torch.rand(5), expected)


# --------------------------------------------------------------------------------------
# Damage


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped bit": flip_a_bit,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(three, name, damage):
    newest = three / "step_00000003"
    DAMAGE[damage](newest / name)
    lines = []
    assert newest_checkpoint(three, lines.append) == three / "step_00000002"
    assert len(lines) == 1 and str(newest) in lines[0]
    with pytest.raises(CheckpointError, match="step_00000003"):
        verify_checkpoint(newest)


@pytest.mark.parametrize(
    "entry",
    [5, None, [], {}, {"bytes": 5}, {"bytes": "5", "sha256": "x"},
     {"bytes": 5, "sha256": 5}, {"bytes": True, "sha256": "x"}],
)  # fmt: skip
def test_a_manifest_of_other_types_is_damage_too(three, entry):
    manifest = three / "step_00000003" / MANIFEST
    whole = json.loads(manifest.read_text())
    whole["files"][MODEL] = entry
    manifest.write_text(json.dumps(whole))
    lines = []
    assert newest_checkpoint(three, lines.append) == three / "step_00000002"
    fault = f"{manifest.parent}: {MANIFEST} should give bytes and sha256 of {MODEL}"
    assert len(lines) == 1 and lines[0].endswith(fault)


def test_a_manifest_nested_too_deeply_is_damage_too(three):
    (three / "step_00000003" / MANIFEST).write_text("[" * 100_000)
    assert newest_checkpoint(three, lambda line: None) == three / "step_00000002"


def test_the_reason_names_the_file(three):
    newest = three / "step_00000003"
    flip_a_bit(newest / MODEL)
    with pytest.raises(CheckpointError) as error:
        verify_checkpoint(newest)
    assert str(error.value) == f"{newest}: {MODEL} does not have its SHA-256"


def test_a_future_format_is_refused(three):
    path = three / "step_00000003" / MANIFEST
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    told = "has format 3, this version reads 1 and 2"
    with pytest.raises(CheckpointError, match=told):
        verify_checkpoint(path.parent)


def test_none_intact_is_an_error_not_a_restart(three):
    for path in list_checkpoints(three):
        (path / STATE).unlink()
    with pytest.raises(CheckpointError, match="none of its 3 checkpoints is intact"):
        newest_checkpoint(three, lambda line: None)


def test_no_checkpoint_at_all_is_a_fresh_start(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere", print) is None


# --------------------------------------------------------------------------------------
# Crashes


@pytest.mark.parametrize("writes", range(8))
def test_a_save_that_fails_leaves_the_older_ones(three, monkeypatch, writes):
    model, optimizer = trained()
    before = {p: p.read_bytes() for p in three.rglob("*") if p.is_file()}
    calls = []

    def full_disk(path):
        calls.append(path)
        if len(calls) > writes:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_fsync", full_disk)
    if writes >= 6:  # files, manifest, folder and parent were all flushed
        save_checkpoint(three, model, optimizer, {"step": 4})
        assert steps(three) == [1, 2, 3, 4]
    else:
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(three, model, optimizer, {"step": 4})
    assert not list(three.glob(".tmp-*"))
    assert all(path.read_bytes() == data for path, data in before.items())


def test_what_a_killed_save_leaves_is_no_checkpoint(three):
    killed = three / ".tmp-step_00000004"
    shutil.copytree(three / "step_00000003", killed)
    assert steps(three) == [1, 2, 3]
    remove_temporary(three)
    assert not killed.exists() and steps(three) == [1, 2, 3]


def test_what_was_written_wrongly_is_noticed_at_once(tmp_path, monkeypatch):
    model, optimizer = trained()
    rename = os.rename

    def corrupting_rename(source, target):
        rename(source, target)
        flip_a_bit(target / OPTIMIZER)

    monkeypatch.setattr(module.os, "rename", corrupting_rename)
    with pytest.raises(CheckpointError, match=OPTIMIZER):
        save_checkpoint(tmp_path, model, optimizer, {"step": 1})


def test_rotation_keeps_the_newest(three):
    deleted = rotate(three, 2)
    assert [path.name for path in deleted] == ["step_00000001"]
    assert steps(three) == [2, 3]
    assert rotate(three, 2) == []


def test_rotation_keeps_milestones_and_the_best(tmp_path):
    model, optimizer = trained()
    scores = {0: None, 2: 3.0, 4: 3.0, 6: 9.0, 8: None, 10: 8.0, 12: 7.0}
    for step, score in scores.items():
        validation = None if score is None else {"step": step, "val_bpb": score}
        state = {"step": step, "validation": validation}
        save_checkpoint(tmp_path, model, optimizer, state)
    assert best_checkpoint(list_checkpoints(tmp_path)) == tmp_path / "step_00000002"
    rotate(tmp_path, 2, keep_every=4)
    # 2 is the best (the older of two alike), 4, 8 and 12 are multiples; 0 is not one.
    assert steps(tmp_path) == [2, 4, 8, 10, 12]
    (tmp_path / "step_00000002" / STATE).write_text("{")
    assert best_checkpoint(list_checkpoints(tmp_path)) == tmp_path / "step_00000004"
    assert best_checkpoint([]) is None


def test_names_sort_like_numbers(tmp_path):
    others = ("step_x", "aside_step_00000001", "step_²", "step_٣", "step_" + "1" * 200)
    for name in ("step_100000000", "step_00000009", *others):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [9, 100000000]


def test_set_aside_never_overwrites(three):
    first = set_aside(three / "step_00000003")
    shutil.copytree(three / "step_00000002", three / "step_00000003")
    second = set_aside(three / "step_00000003")
    assert first != second and first.exists() and second.exists()
    assert steps(three) == [1, 2]


# --------------------------------------------------------------------------------------
# Finding and fitting


def test_a_checkpoint_is_found_from_each_level(three, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(three, run / "checkpoints", ignore=lambda *_: ["run"])
    newest = run / "checkpoints" / "step_00000003"
    for path in (run, run / "checkpoints", newest):
        assert find_checkpoint(path, print) == newest
    older = run / "checkpoints" / "step_00000001"
    assert find_checkpoint(older, print) == older


def test_finding_nothing_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "nowhere", print)
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(CheckpointError, match=r"text\.txt: is a file, wants a folder"):
        find_checkpoint(tmp_path / "text.txt", print)
    with pytest.raises(CheckpointError, match="no checkpoint here; wants"):
        find_checkpoint(tmp_path, print)


def test_another_shape_is_refused_by_name(three):
    path = three / "step_00000003"
    with pytest.raises(CheckpointError) as error:
        load_model(path, tiny_model(ffn_dim=32))
    assert str(error.value) == (
        f"{path / MODEL}: does not fit this model: layers.0.ffn_down.weight: stored "
        "(16, 24), model (16, 32), layers.0.ffn_gate_up.weight: stored (48, 16), model "
        "(64, 16), layers.1.ffn_down.weight: stored (16, 24), model (16, 32) and 1 more"
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: stored nothing"):
        load_model(path, tiny_model(weight_tying=False))
    other = tiny_model(n_layers=1)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        load_optimizer(path, other, build_optimizer(other, TRAINING))
