"""One optimizer step, and the loss over validation windows.

A step is an optimizer step everywhere: its batch, its learning rate and everything else
that decides the result are functions of the step number.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mamba3lite.training.data import IGNORED_TARGET, PretrainDataset
from mamba3lite.training.optim import (
    project_decay_rates,
)
from mamba3lite.training.parallel import (
    ALONE,
    Ranks,
)

Batch = tuple[Tensor, Tensor, Tensor]


class StepResult(NamedTuple):
    """Mean loss in nats per valid target, norm before clipping, why it was skipped."""

    loss: float
    grad_norm: float
    problem: str | None


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    grad_clip: float = 1.0,
    bf16: bool = False,
    nan_guard: bool = True,
    spike: Callable[[float], str | None] = lambda loss: None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """One optimizer step over the micro-batches of a global batch.

    The loss is normalized by the valid targets of the whole global batch, so cutting
    it into micro-batches changes nothing. With ``nan_guard``, a loss or gradient norm
    that is not finite leaves parameters and optimizer as they were.

    Args: batches: (tokens, targets, doc_ids), each (rows, T) integers; targets are
    already shifted, -100 is ignored. bf16: run the forward pass under autocast. spike:
    why a step with this loss must not be applied either, or None. ranks: who has the
    other micro-batches of the global batch.
    """
    valid = sum(int((targets != IGNORED_TARGET).sum()) for _, targets, _ in batches)
    n_valid = int(ranks.sums(valid)[0])
    loss = torch.zeros((), device=batches[0][0].device)
    for number, (tokens, targets, doc_ids) in enumerate(batches, 1):
        with ranks.accumulating(model, last=number == len(batches)):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
                loss_sum, _ = model(
                    tokens, targets=targets, doc_ids=doc_ids, reduction="sum"
                )
            mean = loss_sum / max(1, n_valid)
            # Gradients are averaged over the ranks, and their sum is wanted.
            (mean * ranks.size).backward()
        loss += mean.detach()
    norm = ranks.clip(model, grad_clip)
    result = StepResult(*ranks.control(loss, norm), None)
    problem = find_problem(result, n_valid, nan_guard) or spike(result.loss)
    if problem is None:
        optimizer.step()
        project_decay_rates(model)
    optimizer.zero_grad(set_to_none=True)
    return result._replace(problem=problem)


def find_problem(
    result: StepResult, n_valid: int, nan_guard: bool = True
) -> str | None:
    """Why a step must not be applied, or None."""
    if n_valid == 0:
        return "no valid target in the batch"
    if not nan_guard:
        return None
    if not math.isfinite(result.loss):
        return f"loss is {result.loss}"
    if not math.isfinite(result.grad_norm):
        return f"gradient norm is {result.grad_norm}"
    return None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: PretrainDataset,
    *,
    batch_rows: int,
    windows: Sequence[int] | None = None,
    bf16: bool = False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = ALONE,
) -> tuple[float, int] | None:
    """Summed loss in nats and number of targets over a validation split.

    Every window starts from a zero state, and the state resets at documents.

    Args: windows: some of the windows; all of them when None. progress: called after
    each batch as progress(windows done, windows in all). ranks: who shares the windows.
    Returns: (loss_sum, n_targets), or None when ``stop`` asked to give up.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    loss_sum, n_targets, done = 0.0, 0, 0
    total = data.n_eval_windows if windows is None else len(windows)
    try:
        for batch in data.eval_batches(batch_rows, windows, ranks.rank, ranks.size):
            if stop():
                return None
            tokens, targets, doc_ids = (part.to(device) for part in batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                part, n = model(
                    tokens, targets=targets, doc_ids=doc_ids, reduction="sum"
                )
            loss_sum += float(part)
            n_targets += int(n)
            done += len(tokens) * ranks.size
            progress(min(done, total), total)
    finally:
        model.train(training)
    loss_sum, n_targets = ranks.sums(loss_sum, n_targets)
    return loss_sum, int(n_targets)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters: tied tensors once, a complex number counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
