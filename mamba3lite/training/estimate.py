"""Sizes derived from shapes, not measured: parameters, FLOPs, memory, disk."""

from collections import Counter

import torch
from torch import nn

from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3lite.training.config import RunConfig

# Dense bf16 FLOP/s without sparsity, from the vendor's data sheets. A device that is
# not listed has no MFU rather than an invented one.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}


def parameters_by_module(model: nn.Module) -> dict[str, int]:
    """Parameters summed over layers, each tensor once, a complex number counted once.

    Returns: {"embed": ..., "layers x in_proj": ..., ...} in the model's order.
    """
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        module = parts[0] if parts[0] != "layers" else f"layers x {parts[2]}"
        counts[module] += parameter.numel()
    return dict(counts)


def parameter_floats(model: nn.Module) -> int:
    """Real numbers in the parameters; a complex one is two."""
    return sum(p.numel() * (2 if p.is_complex() else 1) for p in model.parameters())


def flops_per_token(model: nn.Module) -> int:
    """Training FLOPs a token: 6 for each entry of a matrix that multiplies it.

    The embedding counts once, as the output matrix. The scan is left out, so that MFU
    compares matrix work alone, as the usual 6N rule does.
    """
    matrices = {n: p.numel() for n, p in model.named_parameters() if p.ndim == 2}
    if "lm_head.weight" in matrices:  # untied: the embedding is a lookup
        matrices.pop("embed.weight", None)
    return 6 * sum(matrices.values())


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak, or None when it is not a known GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


def activation_bytes(config: ModelConfig, rows: int, half: bool) -> int:
    """Bytes kept for the backward pass of one micro-batch, roughly.

    Counts what the block saves on the PyTorch path: inputs of norms and linear layers
    (2 bytes each under bf16 autocast, 4 otherwise), float32 and complex64 tensors of
    the scan, one chunk's decay, scores and mixing matrix for each token. With
    checkpointing: one residual a layer, and one layer at full size.
    """
    size = 2 if half else 4
    d, inner = config.d_model, config.n_heads * config.head_dim
    bc = config.n_heads * config.state_dim
    linear = size * (2 * d + (inner + 4 * bc) + 3 * inner + 4 * config.ffn_dim)
    states = 2 * 8 * inner * config.state_dim / config.chunk_size
    scan = 4 * 2 * inner + 2 * 2 * 8 * bc + states
    scan += config.n_heads * config.chunk_size * (8 + 8 + 4)
    layer = 4 * 2 * d + linear + scan
    if config.grad_checkpoint:
        per_token = config.n_layers * 4 * d + layer
    else:
        per_token = config.n_layers * layer
    return int(rows * config.max_seq_len * per_token)


def memory_table(
    config: ModelConfig, model: nn.Module, rows: int, half: bool
) -> dict[str, int]:
    """Bytes of a training step by purpose: derived from shapes, not measured."""
    floats = parameter_floats(model)
    table = {
        "parameters (float32)": 4 * floats,
        "gradients (float32)": 4 * floats,
        "AdamW moments (float32)": 8 * floats,
        "activations (rough)": activation_bytes(config, rows, half),
    }
    return table | {"total": sum(table.values())}


def checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of one checkpoint: weights and two moments in float32."""
    return 12 * parameter_floats(model)


def describe(config: RunConfig) -> str:
    """The sizes of a run as text, without allocating the model."""
    with torch.device("meta"):
        model = Mamba3Transformer(config.model_fields_of_run())
    steps, per_step = config.total_steps, config.tokens_per_step
    total = sum(p.numel() for p in model.parameters())
    lines = ["parameters (a complex number counted once)"]
    lines += _table(parameters_by_module(model) | {"total": total})
    lines += [
        "",
        f"tokens per step  {per_step:,} = {config.training.micro_batch_size} rows x "
        f"{config.training.gradient_accumulation_steps} accumulated x "
        f"{config.model.max_seq_len} tokens",
        f"steps            {steps:,} = {steps * per_step:,} tokens",
        f"training FLOPs   {steps * per_step * flops_per_token(model):.3g} in matrices",
    ]
    for half, name in ((False, "float32"), (True, "bf16 autocast")):
        sizes = memory_table(model.cfg, model, config.training.micro_batch_size, half)
        lines += ["", f"memory of a step in bytes, {name} (derived from shapes)"]
        lines += _table(sizes)
    kept = config.training.keep_last
    one = checkpoint_bytes(model)
    lines += [
        "",
        f"disk             {(kept + 1) * one:,} bytes for checkpoints: {kept} kept and "
        f"one being written, {one:,} each (derived)",
    ]
    return "\n".join(lines)


def _table(sizes: dict[str, int]) -> list[str]:
    return [f"  {name:<26} {size:>18,}" for name, size in sizes.items()]
