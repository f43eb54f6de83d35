"""The step: accumulation, bad steps, groups, schedule, the bound on decay, bits."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from trainer_cases import (
    assert_same_bits,
    new_run,
    prepare_corpus,
    run_config,
    tiny_model,
)

from mamba3lite.training.config import TrainingConfig
from mamba3lite.training.data import PretrainDataset
from mamba3lite.training.estimate import flops_per_token, parameters_by_module
from mamba3lite.training.metrics import bits_per_byte
from mamba3lite.training.optim import (
    MAX_REAL_A,
    build_optimizer,
    learning_rate,
    next_learning_rate,
    parameter_groups,
    project_decay_rates,
    steps_in_all,
)
from mamba3lite.training.pretrain import (
    count_parameters,
    evaluate,
    train_step,
)

TRAINING = TrainingConfig(total_steps=10, lr=1e-2)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def batch(rows: int = 4, seed: int = 0, masked: int = 0):
    """Random tokens; the first ``masked`` targets of row 0 are ignored."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 257, (rows, 33), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[0, :masked] = -100
    return tokens[:, :-1], targets, torch.zeros(rows, 32, dtype=torch.int64)


def gradients(model, batches) -> dict:
    """The gradients that one step applies, seen just before the update."""
    seen = {}
    optimizer = build_optimizer(model, TRAINING)
    optimizer.step = lambda: seen.update(
        {n: p.grad.clone() for n, p in model.named_parameters()}
    )
    result = train_step(model, optimizer, batches, grad_clip=1e9)
    assert result.problem is None
    return seen | {"loss": torch.tensor(result.loss)}


def snapshot(model, optimizer) -> dict:
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = value.clone()
    return state


# --------------------------------------------------------------------------------------
# Accumulation


def test_micro_batches_with_unequal_masks_equal_one_big_batch():
    whole = batch(rows=4, masked=29)
    halves = [tuple(x[:2] for x in whole), tuple(x[2:] for x in whole)]
    together = gradients(tiny_model(), [whole])
    apart = gradients(tiny_model(), halves)
    for name, expected in together.items():
        torch.testing.assert_close(apart[name], expected, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_valid_targets():
    model, (tokens, targets, doc_ids) = tiny_model(), batch(masked=7)
    logits = model(tokens, doc_ids=doc_ids)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    got = train_step(
        model, build_optimizer(model, TRAINING), [(tokens, targets, doc_ids)]
    )
    assert got.loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_gradient_is_clipped_to_the_norm():
    model, limit = tiny_model(), 1e-3
    optimizer = build_optimizer(model, TRAINING)
    norms = []
    optimizer.step = lambda: norms.append(
        math.sqrt(sum(p.grad.abs().square().sum().item() for p in model.parameters()))
    )
    result = train_step(model, optimizer, [batch()], grad_clip=limit)
    assert result.grad_norm > 10 * limit
    assert norms[0] == pytest.approx(limit, rel=1e-2)


# --------------------------------------------------------------------------------------
# Bad steps


def poison_loss(model):
    model.register_forward_hook(lambda m, i, out: (out[0] * float("nan"), out[1]))


def poison_gradient(model):
    model.norm_f.weight.register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize(
    ("poison", "reason"),
    [(poison_loss, "loss is nan"), (poison_gradient, "gradient norm is")],
)
def test_a_step_that_is_not_finite_changes_nothing(poison, reason):
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    assert train_step(model, optimizer, [batch()]).problem is None
    before = snapshot(model, optimizer)
    poison(model)
    result = train_step(model, optimizer, [batch(seed=1)])
    assert result.problem.startswith(reason)
    assert_same_bits(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())


def test_without_the_guard_the_same_step_is_applied():
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    poison_loss(model)
    assert train_step(model, optimizer, [batch()], nan_guard=False).problem is None
    assert all(p.isnan().all() for p in model.parameters() if not p.is_complex())


def test_a_batch_without_targets_is_skipped():
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    train_step(model, optimizer, [batch()])
    before = snapshot(model, optimizer)
    tokens, targets, doc_ids = batch()
    empty = [(tokens, torch.full_like(targets, -100), doc_ids)]
    result = train_step(model, optimizer, empty)
    assert result.problem == "no valid target in the batch"
    assert_same_bits(before, snapshot(model, optimizer))


# --------------------------------------------------------------------------------------
# Optimizer groups, bound on decay, schedule


@pytest.mark.parametrize("tied", [True, False])
def test_groups_by_name(tied):
    model = tiny_model(weight_tying=tied)
    groups = {g["name"]: g for g in parameter_groups(model, 0.1, fused=True)}
    layers = [f"layers.{i}." for i in range(2)]
    assert set(groups["complex"]["param_names"]) == {f"{x}A" for x in layers}
    norms = {"norm_f.weight"}
    norms |= {f"{x}{n}.weight" for x in layers for n in ("norm_ssd", "norm_ffn")}
    assert set(groups["no_decay"]["param_names"]) == norms
    decayed = groups["decay"]["param_names"]
    assert "embed.weight" in decayed and "layers.0.mimo.weight" in decayed
    assert ("lm_head.weight" in decayed) is not tied
    decay = {name: group["weight_decay"] for name, group in groups.items()}
    assert decay == {"decay": 0.1, "no_decay": 0.0, "complex": 0.0}
    fused = {name: group["fused"] for name, group in groups.items()}
    assert fused == {"decay": True, "no_decay": True, "complex": False}


def test_each_parameter_is_in_exactly_one_group():
    model = tiny_model()
    groups = parameter_groups(model, 0.1, fused=False)
    placed = [id(p) for group in groups for p in group["params"]]
    assert sorted(placed) == sorted(id(p) for p in model.parameters())


def test_weight_decay_moves_only_its_group():
    model = tiny_model()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, TRAINING)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrink = 1 - TRAINING.lr * TRAINING.weight_decay if parameter.ndim == 2 else 1
        torch.testing.assert_close(parameter.detach(), before[name] * shrink)


def test_fused_adamw_takes_the_groups_and_agrees():
    plain, fused = tiny_model(), tiny_model()
    optimizers = [
        torch.optim.AdamW(parameter_groups(model, 0.1, fused=use), lr=1e-2)
        for model, use in ((plain, False), (fused, True))
    ]
    for _ in range(3):
        for model, optimizer in zip((plain, fused), optimizers, strict=True):
            train_step(model, optimizer, [batch()])
    for left, right in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_complex_rates_move_as_two_real_numbers():
    model, training = tiny_model(), TRAINING
    rates = model.layers[0].A
    pair = torch.nn.Parameter(torch.view_as_real(rates.detach()).clone())
    optimizer = build_optimizer(model, training)
    betas = (training.beta1, training.beta2)
    mirror = torch.optim.AdamW([pair], lr=training.lr, betas=betas, weight_decay=0)
    draw = torch.Generator().manual_seed(0)
    for _ in range(5):
        rates.grad = torch.randn(2, dtype=torch.complex64, generator=draw)
        pair.grad = torch.view_as_real(rates.grad).clone()
        optimizer.step()
        mirror.step()
    assert torch.equal(torch.view_as_real(rates.detach()), pair.detach())


def test_projection_bounds_the_real_part_alone():
    model = tiny_model()
    with torch.no_grad():
        model.layers[0].A.copy_(torch.tensor([0.5 + 2j, -3 - 1j]))
        model.layers[1].A.copy_(torch.tensor([-1e-5 + 1j, -1e-4 + 0j]))
    project_decay_rates(model)
    expected = torch.tensor([MAX_REAL_A + 2j, -3 - 1j])
    assert torch.equal(model.layers[0].A.detach(), expected)
    expected = torch.tensor([MAX_REAL_A + 1j, MAX_REAL_A + 0j])
    assert torch.equal(model.layers[1].A.detach(), expected)


def test_every_step_ends_inside_the_bound():
    model = tiny_model()
    optimizer = build_optimizer(model, TRAINING)
    with torch.no_grad():
        model.layers[0].A.copy_(torch.tensor([0.5 + 2j, -3 - 1j]))
    train_step(model, optimizer, [batch()])
    assert all(layer.A.real.max() <= MAX_REAL_A for layer in model.layers)


def test_schedule_in_closed_form():
    training = TrainingConfig(
        total_steps=100, lr=2.0, warmup_steps=10, min_lr_ratio=0.1
    )
    lr = [learning_rate(step, 100, training) for step in range(1, 101)]
    assert lr[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert max(lr) == lr[9] == 2.0
    assert lr[54] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))  # half-way: cos = 0
    assert lr[99] == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(lr[9:]))


def test_wsd_in_closed_form():
    training = TrainingConfig(
        total_steps=100, lr=2.0, warmup_steps=10, min_lr_ratio=0.1, schedule="wsd",
        decay_fraction=0.25,
    )  # fmt: skip
    lr = [learning_rate(step, 100, training) for step in range(1, 101)]
    assert lr[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert lr[9:75] == [2.0] * 66, "stable from the warm-up to the last quarter"
    # A quarter of the decay is over: half of what can fall has fallen, by the root.
    over = [0.2 + 1.8 * (1 - math.sqrt(n / 25)) for n in range(1, 26)]
    assert lr[75:] == pytest.approx(over)
    assert lr[99] == pytest.approx(0.2)
    assert learning_rate(101, 100, training) == pytest.approx(0.2)


@pytest.mark.parametrize("fraction", [0.001, 1.0])
def test_wsd_of_extreme_shares(fraction):
    training = TrainingConfig(
        total_steps=5, lr=1.0, schedule="wsd", decay_fraction=fraction
    )
    lr = [learning_rate(step, 5, training) for step in range(1, 6)]
    assert lr[-1] == pytest.approx(training.min_lr_ratio)
    assert (lr[:4] == [1.0] * 4) is (fraction < 1)
    assert all(a >= b for a, b in itertools.pairwise(lr))


@pytest.mark.parametrize("warmup", [0, 5])
def test_schedule_without_a_cosine_or_without_a_warm_up(warmup):
    training = TrainingConfig(total_steps=5, lr=1.0, warmup_steps=warmup)
    lr = [learning_rate(step, 5, training) for step in range(1, 6)]
    assert all(0 < value <= 1 for value in lr)
    assert lr[-1] == pytest.approx(1.0 if warmup else training.min_lr_ratio)


def test_a_budget_of_tokens_by_hand(prepared, tmp_path):
    tokens = {"total_steps": None, "total_tokens": 1000, "micro_batch_size": 4}
    config = run_config(prepared, tmp_path, **tokens)  # 128 tokens a step
    assert [steps_in_all(config, n, n * 128) for n in range(9)] == [8] * 9
    # 3 steps of 64 are behind: 808 tokens are left, 7 steps of 128.
    assert steps_in_all(config, 3, 192) == 10
    assert steps_in_all(config, 12, 1001) == 12, "nothing is left"
    rates = [next_learning_rate(config, 3, behind) for behind in (192, 256, 999)]
    wanted = [learning_rate(step, 8, config.training) for step in (3, 3, 9)]
    assert rates == wanted, "2 steps of 128, the second begun or done; all of them"
    by_steps = run_config(prepared, tmp_path, total_steps=8)
    assert steps_in_all(by_steps, 3, 10**6) == 8
    assert next_learning_rate(by_steps, 3, 10**6) == learning_rate(
        4, 8, by_steps.training
    )


# --------------------------------------------------------------------------------------
# Evaluation and counts


def test_bits_per_byte_count_every_target_once(prepared):
    model = tiny_model()
    data = PretrainDataset(prepared, 32, 0, "val")
    loss_sum, n_targets = evaluate(model, data, batch_rows=3)
    stream = torch.as_tensor(data.stream.tokens(0, data.n_tokens).astype("int64"))
    expected = 0.0
    for start in range(0, len(stream) - 1, 32):
        piece = stream[start : start + 33]
        doc_ids = (piece[:-1] == data.eos_id).cumsum(0)
        with torch.no_grad():
            logits = model(piece[None, :-1], doc_ids=doc_ids[None])[0]
        expected += F.cross_entropy(logits, piece[1:], reduction="sum").item()
    assert n_targets == len(stream) - 1
    assert loss_sum == pytest.approx(expected, rel=1e-5)


def test_bits_per_byte_by_hand(prepared):
    assert bits_per_byte(8 * math.log(2), 2) == pytest.approx(4.0)
    run = new_run(run_config(prepared, prepared / "none"))
    with torch.no_grad():
        run.model.embed.weight.zero_()  # tied: every prediction is uniform
    row = run.evaluation(None)
    data = run.val_data
    assert row["val_loss"] == pytest.approx(math.log(257), rel=1e-5)
    expected = math.log2(257) * (data.n_tokens - 1) / data.n_bytes
    assert row["val_bpb"] == pytest.approx(expected, rel=1e-5)


def test_evaluation_leaves_training_mode_as_it_was(prepared):
    model = tiny_model().train()
    data = PretrainDataset(prepared, 32, 0, "val")
    evaluate(model, data, batch_rows=3, windows=[0])
    assert model.training
    assert evaluate(model, data, batch_rows=3, stop=lambda: True) is None
    assert model.training


def test_counts_by_hand():
    model = tiny_model()
    by_module = parameters_by_module(model)
    in_proj = 16 * (16 + 4 * 2 * 4 + 2)
    assert by_module["embed"] == 257 * 16
    assert by_module["layers x in_proj"] == 2 * in_proj
    assert by_module["layers x A"] == 2 * 2
    assert sum(by_module.values()) == count_parameters(model)
    matrices = 257 * 16 + 2 * (in_proj + 16 * 16 + 16 * 16 + 3 * 16 * 24)
    assert flops_per_token(model) == 6 * matrices
    assert flops_per_token(tiny_model(weight_tying=False)) == 6 * matrices


def test_checkpointing_gives_the_same_gradients():
    plain = gradients(tiny_model(), [batch()])
    saving = gradients(tiny_model(grad_checkpoint=True), [batch()])
    for name, expected in plain.items():
        torch.testing.assert_close(saving[name], expected)


def test_autocast_keeps_float32_parameters_and_comes_close():
    full, half = tiny_model(), tiny_model()
    results = [
        train_step(model, build_optimizer(model, TRAINING), [batch()], bf16=use)
        for model, use in ((full, False), (half, True))
    ]
    assert results[0].loss != results[1].loss
    assert results[1].loss == pytest.approx(results[0].loss, rel=2e-2)
    assert {p.dtype for p in half.parameters()} == {torch.float32, torch.complex64}


def test_adamw_fused_by_hand_refuses_the_complex_A_and_ours_takes_it():
    model = tiny_model()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(RuntimeError, match="complex64"):  # as the guide says
        train_step(model, fused, [batch()])
    ours = build_optimizer(model, TRAINING)
    assert train_step(model, ours, [batch()]).problem is None
