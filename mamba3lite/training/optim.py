"""AdamW groups, the learning rate as a function of the step, the bound on decay."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mamba3lite.training.config import RunConfig, TrainingConfig

MAX_REAL_A = -1e-4


def group_of(parameter: Tensor) -> str:
    """The optimizer group of one parameter: ``decay``, ``no_decay`` or ``complex``.

    Matrices decay, the embedding included. Norm weights do not. The complex decay rates
    A do not either (A = 0, a state that never forgets, is no neutral point), and have a
    group of their own, because the fused AdamW takes no complex numbers.
    """
    if parameter.is_complex():
        return "complex"
    return "decay" if parameter.ndim >= 2 else "no_decay"


def parameter_groups(model: nn.Module, weight_decay: float, fused: bool) -> list[dict]:
    """AdamW groups in which every trainable parameter stands exactly once.

    Returns: dicts with ``name``, ``params``, ``param_names``, ``weight_decay`` and
    ``fused``; empty groups are left out.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = []
    for group in ("decay", "no_decay", "complex"):
        names = [n for n, p in named.items() if group_of(p) == group]
        options = {
            "name": group,
            "params": [named[n] for n in names],
            "param_names": names,
            "weight_decay": weight_decay if group == "decay" else 0.0,
            "fused": fused and group != "complex",
        }
        groups += [options] if names else []
    placed = [id(p) for group in groups for p in group["params"]]
    expected = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(placed) == len(set(placed)) and set(placed) == expected
    return groups


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """AdamW over the groups; real parameters take the fused kernel on a GPU."""
    fused = next(model.parameters()).is_cuda
    groups = parameter_groups(model, training.weight_decay, fused)
    betas = (training.beta1, training.beta2)
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas)


def learning_rate(step: int, total_steps: int, training: TrainingConfig) -> float:
    """Learning rate of optimizer step ``step``, counted from 1 to ``total_steps``.

    Linear from lr / warmup_steps up to lr at step ``warmup_steps``; then, for
    ``cosine``, half a cosine down to min_lr_ratio * lr at the last step; for ``wsd``,
    lr until the last ``decay_fraction`` of the run, and there down to the same value by
    1 - sqrt(share of the decay that is over). It depends on nothing else, so a resumed
    run continues on the same curve.

    Source: Hu et al., MiniCPM, arXiv 2404.06395 (warm-up, stable, decay); Haegele et
    al., arXiv 2405.18392 (the square root).
    """
    warmup = training.warmup_steps
    if step <= warmup:
        return training.lr * step / warmup
    floor = training.min_lr_ratio
    if training.schedule == "wsd":
        falling = training.decay_steps(total_steps)
        over = min(1.0, max(0, step - (total_steps - falling)) / falling)
        left = 1 - math.sqrt(over)
    else:
        progress = (step - warmup) / max(1, total_steps - warmup)
        left = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return training.lr * (floor + (1 - floor) * left)


def steps_in_all(config: RunConfig, step: int, tokens: int) -> int:
    """Steps of a run that has behind it ``step`` of them, on ``tokens`` tokens.

    A budget in tokens leaves what its remaining tokens need, however large the steps
    behind were: they may have had other settings.
    """
    budget = config.training.total_tokens
    if budget is None:
        return config.total_steps
    return step + math.ceil(max(0, budget - tokens) / config.tokens_per_step)


def next_learning_rate(config: RunConfig, step: int, tokens: int) -> float:
    """Learning rate of the step after ``step`` steps on ``tokens`` tokens.

    A budget in tokens is scheduled by tokens: the rate is that of a run which had the
    present settings from its start, after as many tokens.
    """
    if config.training.total_tokens is not None:
        step = math.ceil(tokens / config.tokens_per_step)
    return learning_rate(step + 1, config.total_steps, config.training)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use one learning rate in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def decay_rates(model: nn.Module) -> Iterator[nn.Parameter]:
    """The complex parameters A, one (H,) vector per layer."""
    return (p for p in model.parameters() if p.is_complex())


@torch.no_grad()
def project_decay_rates(model: nn.Module) -> None:
    """Keep Re(A) <= -1e-4, so that every state decays; Im(A) is left alone."""
    parts = [torch.view_as_real(rates)[..., 0] for rates in decay_rates(model)]
    torch._foreach_clamp_max_(parts, MAX_REAL_A)
