"""Sizes derived from shapes, not measured: parameters, FLOPs, memory, disk."""

import dataclasses
import os
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn

from mamba3lite.models.transformer import (
    _TOKENS_AT_ONCE,
    Mamba3Transformer,
    ModelConfig,
)
from mamba3lite.training.config import RunConfig, parameter_count

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


# --------------------------------------------------------------------------------------
# Memory of a step


class Setting(NamedTuple):
    """How a step runs, as far as its memory depends on it.

    rows: of one forward pass. accumulated: gradients of earlier passes are there
    already. half: bf16 autocast. on_gpu: the norms and the output matrix differ.
    """

    rows: int
    accumulated: bool
    half: bool
    on_gpu: bool


class StepMemory(NamedTuple):
    """Bytes of a training step: derived from shapes, not measured.

    resident: between steps. kept: for the backward pass, by module over all layers.
    phases: the most that is held at once, by phase.
    """

    resident: dict[str, int]
    kept: dict[str, int]
    phases: dict[str, int]

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.phases.values())


def kept_by_layer(model: ModelConfig, setting: Setting) -> dict[str, int]:
    """Bytes that one layer keeps for its backward pass, by module.

    Counted from what each operation saves; ``size`` is what a matrix product reads,
    2 bytes under autocast and 4 otherwise. A norm keeps its input and one number a
    token, and on a CPU its result before the weight; a matrix product keeps its
    operand, and under autocast a copy of its weight; the SwiGLU keeps both halves and
    their product, and the gate after silu unless the row kernels compute it again.
    """
    size = 2 if setting.half else 4
    tokens, d = setting.rows * model.max_seq_len, model.d_model
    width = model.n_heads * model.head_dim
    norm = tokens * (4 * d + 4 + (0 if setting.on_gpu else 4 * d))
    return {
        "norm_ssd": norm,
        "in_proj": size * tokens * d,
        "scan": scan_bytes(model, setting)[0],
        "mimo": size * tokens * width,
        "out_proj": size * tokens * width,
        "norm_ffn": norm,
        "ffn_gate_up": size * tokens * d,
        "ffn_down": (3 if fused_rows(model, setting) else 4)
        * (size * tokens * model.ffn_dim),
        "bf16 weights": 2 * layer_matrices(model) if setting.half else 0,
    }


def fused_rows(model: ModelConfig, setting: Setting) -> bool:
    """Whether a step runs through ``models.row_kernels``."""
    fused = setting.on_gpu and model.ssd_dispatch == "fused"
    return fused and not model.batch_invariant


def scan_bytes(model: ModelConfig, setting: Setting) -> tuple[int, int]:
    """Bytes that the scan of one layer keeps, and that it needs besides while it runs.

    fused: the projection, the states that enter the chunks, and five numbers a step and
    head. pytorch: the projection in float32; B and C cut into
    chunks, and as the real operands of the products with states; two C x C matrices a
    chunk; x; log decays in double precision; the states twice. triton: that without
    what is inside the chunks, and x complex.
    """
    size = 2 if setting.half else 4
    heads, width = model.n_heads, model.n_heads * model.head_dim
    bc = heads * model.state_dim
    columns = width + 4 * bc + heads
    chunk = model.chunk_size
    if model.ssd_dispatch == "pytorch":
        chunk = min(chunk, model.max_seq_len)
    elif model.ssd_dispatch == "fused":
        from mamba3lite.models.ssd_fused import _chunk_of  # it imports triton

        sides = model.head_dim, model.state_dim
        chunk = _chunk_of(chunk, *sides, model.ssd_precision or "tf32")
    chunks = setting.rows * -(-model.max_seq_len // chunk)
    tokens = setting.rows * model.max_seq_len
    padded, state = chunks * chunk, width * model.state_dim
    if model.ssd_dispatch == "fused":
        entry = 2 if model.ssd_precision == "bf16" else 4
        kept = size * tokens * columns + 2 * entry * chunks * state
        return kept + 20 * padded * heads, size * tokens * width
    if model.ssd_dispatch == "pytorch":
        inside = 32 * bc + 8 * heads * chunk + 4 * width + 88 * heads
    else:
        inside = 24 * bc + 8 * width + 79 * heads
    kept = 4 * tokens * columns + padded * inside + 16 * chunks * state
    # The projection, complex B, C and what C reads, and y four times over.
    passing = tokens * (24 * bc + 16 * width + 48 * heads) + 8 * chunks * state
    if setting.on_gpu:  # which does not look whether x, B, C and y need their copies
        passing += tokens * (16 * bc + 8 * width)
    return kept, passing + (2 * tokens * columns if setting.half else 0)


def layer_matrices(model: ModelConfig) -> int:
    """Entries of the matrices of one layer."""
    d, heads, width = model.d_model, model.n_heads, model.n_heads * model.head_dim
    in_proj = d * (width + 4 * heads * model.state_dim + heads)
    return in_proj + width**2 + width * d + 3 * d * model.ffn_dim


def loss_bytes(model: ModelConfig, setting: Setting) -> tuple[int, int]:
    """Bytes of the loss operator: its gradients, and what it needs while it runs.

    The gradients are those of the last norm's output and of the output matrix, both
    float32. The rest is that matrix as products read it, the hidden vectors likewise,
    and logits and log-probabilities of some tokens at a time. A CPU first widens
    logits in bf16; a GPU does so as it reads them, and the row kernels keep no
    log-probabilities. A batch-invariant model has float32 logits where kernels compute
    rows by themselves, and elsewhere those of one window at a time.
    """
    size = 2 if setting.half else 4
    tokens, d = setting.rows * model.max_seq_len, model.d_model
    vocab = model.vocab_size
    padded = -(-vocab // 64) * 64 if setting.on_gpu else vocab
    gradients = 4 * tokens * d + 4 * vocab * d
    at_once = min(tokens, _TOKENS_AT_ONCE)
    by_rows = model.batch_invariant and setting.on_gpu and model.ssd_dispatch == "fused"
    if model.batch_invariant and not by_rows:
        at_once = min(tokens, model.chunk_size)
    logits = (4 if by_rows else size) * at_once * padded
    log_p = 4 * at_once * padded * (2 if setting.half and not setting.on_gpu else 1)
    if fused_rows(model, setting):
        log_p = 0
    product = 2 * vocab * d if setting.half else 0
    copies = size * (padded * d + tokens * d) if setting.half else 0
    return gradients, copies + logits + max(log_p, product)


def memory_of_step(model: ModelConfig, setting: Setting) -> StepMemory:
    """Where the bytes of a step are, and how many at most.

    The phases: the scan of the last layer in the forward pass; the loss; the backward
    pass where the last layer differentiates its SwiGLU, or with grad_checkpoint where
    it computes that layer again; the update. Fixed buffers of libraries and what an
    allocator rounds up are not counted.
    """
    floats = parameter_count(model) + model.n_layers * model.n_heads
    resident = {
        "parameters": 4 * floats,
        "AdamW moments": 8 * floats,
        "gradients": 4 * floats,
    }
    layer = kept_by_layer(model, setting)
    kept = _kept_by_model(model, setting, layer)
    held = 12 * floats + 4 * floats * setting.accumulated
    peaks = _phases(model, setting, layer, sum(kept.values()))
    phases = {name: held + size for name, size in peaks.items()}
    return StepMemory(resident, kept, phases | {"update": 16 * floats})


def memory_of(device: torch.device) -> int | None:
    """Bytes of memory that a device has, a GPU's own or all of this machine's.

    Returns: None where the system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # Windows has no sysconf
        return None


def _kept_by_model(model: ModelConfig, setting: Setting, layer: dict) -> dict[str, int]:
    """What the layers keep, times their number; only their inputs with checkpoints."""
    if model.grad_checkpoint:
        inputs = 4 * setting.rows * model.max_seq_len * model.d_model
        return {"inputs of the layers": model.n_layers * inputs}
    return {name: model.n_layers * size for name, size in layer.items()}


def _phases(
    model: ModelConfig, setting: Setting, layer: dict[str, int], kept: int
) -> dict[str, int]:
    """The most that each phase holds beside parameters, moments and older gradients."""
    size = 2 if setting.half else 4
    tokens, vocab = setting.rows * model.max_seq_len, model.vocab_size
    hidden, matrix = 4 * tokens * model.d_model, 4 * vocab * model.d_model
    state = model.n_heads * model.head_dim * model.state_dim
    states = 8 * setting.rows * state * model.n_layers
    gradients, passing = loss_bytes(model, setting)
    whole, beside = sum(layer.values()), scan_bytes(model, setting)[1]
    until_scan = layer["norm_ssd"] + layer["in_proj"] + layer["scan"] + beside
    swiglu = whole + 2 * size * tokens * model.ffn_dim
    # The last norm keeps what a norm keeps, and its output is the hidden vectors.
    loss = layer["norm_ssd"] + hidden + states + gradients + passing
    batch = 24 * tokens
    if not model.grad_checkpoint:
        return {
            "forward": kept - whole + until_scan + states + batch,
            "loss": kept + loss + batch,
            "backward": kept - whole + swiglu + hidden + matrix + batch,
        }
    copies = model.n_layers * layer["bf16 weights"]  # autocast keeps them until its end
    again = max(until_scan + layer["bf16 weights"], swiglu)
    return {
        "loss": kept + copies + loss + batch,
        "backward": kept + again + hidden + matrix + batch,
    }


# --------------------------------------------------------------------------------------
# Disk


def checkpoint_bytes(model: nn.Module) -> int:
    """Bytes of one checkpoint: weights and two moments in float32."""
    return 12 * parameter_floats(model)


def checkpoints_at_once(config: RunConfig) -> int:
    """Checkpoint folders at the fullest moment, the one being written included."""
    training = config.training
    saves = config.total_steps // training.save_interval + 2  # step 0, and the last
    milestones = config.total_steps // (training.keep_every or config.total_steps + 1)
    kept = training.keep_last + milestones + 1  # the best by validation
    return min(saves, kept + 1)


# --------------------------------------------------------------------------------------
# As text


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
    on_cpu = dataclasses.replace(model.cfg, ssd_dispatch="pytorch")
    for cfg, on_gpu in ((model.cfg, True), (on_cpu, False)):
        lines += ["", *memory_lines(cfg, setting_of(config, on_gpu))]
    count, one = checkpoints_at_once(config), checkpoint_bytes(model)
    lines += [
        "",
        f"disk             {count * one:,} bytes for checkpoints: at most {count} at "
        f"once, {one:,} each (derived)",
    ]
    return "\n".join(lines)


def setting_of(config: RunConfig, on_gpu: bool) -> Setting:
    """How a run's steps go on a GPU or a CPU."""
    training = config.training
    return Setting(
        rows=training.micro_batch_size,
        accumulated=training.gradient_accumulation_steps > 1,
        half=training.precision == "bf16" or (training.precision == "auto" and on_gpu),
        on_gpu=on_gpu,
    )


def memory_lines(model: ModelConfig, setting: Setting) -> list[str]:
    """The memory table of a step as text, with the peak of both grad_checkpoint."""
    memory = memory_of_step(model, setting)
    on, device = model.grad_checkpoint, "GPU" if setting.on_gpu else "CPU"
    other = dataclasses.replace(model, grad_checkpoint=not on)
    peaks = {"peak": memory.peak}
    label = f"peak, grad_checkpoint {str(not on).lower()}"
    peaks[label] = memory_of_step(other, setting).peak
    products = "bf16 autocast" if setting.half else "float32"
    return [
        f"memory of a step in bytes on a {device} (derived from shapes): {products}, "
        f"scan by {model.ssd_dispatch}, grad_checkpoint {str(on).lower()}",
        *_table(memory.resident),
        "  kept for the backward pass",
        *_table({f"  {name}": size for name, size in memory.kept.items() if size}),
        "  most at once",
        *_table({f"  in the {name}": size for name, size in memory.phases.items()}),
        *_table(peaks),
    ]


def _table(sizes: dict[str, int]) -> list[str]:
    return [f"  {name:<26} {size:>18,}" for name, size in sizes.items()]
