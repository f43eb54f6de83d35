"""Measure the scan on this machine: speed, error, memory, and the floor under them.

    mamba3lite bench
    mamba3lite bench --tune --json docs/benchmarks/NAME.json
    mamba3lite bench --decode --model pretrain_434m

Every number was measured in the run that prints it, or is derived on the spot from the
shape and from the ceilings measured first: the copy rate and the matmul rates.
"""

if __name__ == "__main__":  # a slip of the keyboard is answered before torch loads
    from mamba3lite.bench_command import app

    app(prog_name="python -m mamba3lite.bench")

import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mamba3lite
from mamba3lite.files import write_whole
from mamba3lite.models import ssd_fused, ssd_triton
from mamba3lite.models.mamba_block import _unavailable
from mamba3lite.models.ssd_complex import (
    _PRECISIONS_OF,
    KernelUnavailable,
    _as_columns,
    _exp,
    _log_decay,
    _to_chunks,
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
)
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.reference import (
    Shape,
    errors,
    oracle,
    random_inputs,
    relative_error,
    streams_of,
    with_gradients,
)

FORMAT = 1
PRECISIONS = ("ieee", "tf32", "bf16")
KERNELS = ("triton", "fused")


# --------------------------------------------------------------------------------------
# What is measured: two transcriptions as baselines, and what the package offers


def einsum_per_chunk(
    Bc: Tensor, Cc: Tensor, Xc: Tensor, A_log: Tensor, decay_states: Tensor
) -> tuple[Tensor, Tensor]:
    """The inside of all chunks as the formulas have it, in complex einsums.

    Arguments and results as `per_chunk_ssd_pytorch`, for complex Xc.
    """
    total = A_log.cumsum(2).transpose(2, 3)  # (B, nc, H, C)
    span = total.unsqueeze(-1) - total.unsqueeze(-2)
    past = torch.ones(span.shape[-2:], dtype=torch.bool, device=span.device).tril()
    L = torch.where(past, torch.where(past, span, 0).exp(), 0)
    scores = torch.einsum("bclhn,bcshn->bchls", Cc, Bc)
    Y_diag = torch.einsum("bchls,bcshp->bclhp", scores * L, Xc)
    kept = decay_states.unsqueeze(-1) * Bc
    return Y_diag, torch.einsum("bcshn,bcshp->bchpn", kept, Xc)


def einsum_scan(
    x: Tensor, A: Tensor, B_t: Tensor, C_t: Tensor, dt: Tensor, chunk: int
) -> Tensor:
    """The whole chunkwise scan in complex einsums, x complex; T a multiple of chunk.

    The baseline of the whole call: no packed documents, no initial state.
    """
    log_decay = F.softplus(dt) * A
    Bc, Cc, Xc, A_log = (
        z.unflatten(1, (-1, chunk)) for z in (B_t, C_t, x.to(A.dtype), log_decay)
    )
    total = A_log.cumsum(2)
    Y_diag, state = einsum_per_chunk(
        Bc, Cc, Xc, A_log, (total[:, :, -1:] - total).exp()
    )
    between = total[:, :, -1].cumsum(1)  # (B, nc, H)
    # Chunk z is entered by what is left of chunk c < z after the chunks between them.
    span = (between - total[:, :, -1])[:, :, None] - between[:, None]
    n = span.shape[1]
    past = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)[..., None]
    window = torch.where(past, torch.where(past, span, 0).exp(), 0)
    entering = torch.einsum("bzch,bchpn->bzhpn", window, state)
    read = Cc * total.exp().unsqueeze(-1)
    Y_off = torch.einsum("bclhn,bchpn->bclhp", read, entering)
    return (Y_diag + Y_off).real.flatten(1, 2)


def block_scan(
    proj: Tensor, A: Tensor, *, shape: Shape, ssd_dispatch: str, precision: str
) -> Tensor:
    """The scan as a block of the model calls it: from the projection to y.

    The fused kernels read the projection as it lies. For the others it is cast to
    float32, cut into streams and assembled into complex tensors; that time is theirs.
    """
    if ssd_dispatch == "fused":
        sizes = {"n_heads": shape.H, "head_dim": shape.D, "state_dim": shape.N}
        return ssd_fused.ssd_fused(
            proj, A, **sizes, chunk_size=shape.chunk, precision=precision
        )
    x, B_t, C_t, dt = streams_of(proj.float(), shape)
    # PyTorch's own products follow the process-wide setting instead.
    precision = precision if ssd_dispatch == "triton" else None
    y = ssd_complex_chunkwise(
        x, A, B_t, C_t, dt, shape.chunk, ssd_dispatch, precision=precision
    )
    return y.to(proj.dtype)


def rotated(
    proj: Tensor, A: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The scan as one with a real decay: q, k (B, T, H, 2 N), v and log decays g.

    The rotation is done here, over the whole sequence in float64 (notebook 06); a
    kernel for real decays gives the same y from these four.
    """
    x, B_t, C_t, dt = streams_of(proj.double(), shape)
    log_decay = _log_decay(dt.float(), A)
    turn = torch.polar(torch.ones_like(log_decay.imag), log_decay.imag.cumsum(1))
    k, q = B_t * turn.conj().unsqueeze(-1), C_t * turn.unsqueeze(-1)
    q, k = torch.cat([q.real, -q.imag], -1), torch.cat([k.real, k.imag], -1)
    q, k, v = (z.to(proj.dtype).contiguous() for z in (q, k, x))
    return q, k, v, log_decay.real.float()


def peers_here() -> dict[str, tuple[Callable, Callable]]:
    """Scans of other projects that are installed.

    Returns: for each, what makes its inputs from q, k, v and g of `rotated`, and the
    scan of those inputs, which gives y.
    """
    found: dict[str, tuple[Callable, Callable]] = {}
    try:
        from fla.ops.simple_gla import chunk_simple_gla

        found["fla"] = (
            lambda q, k, v, g: [q, k, v, g],
            lambda q, k, v, g: chunk_simple_gla(q, k, v, g, scale=1.0)[0],
        )
    except ImportError:
        pass
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        scan = partial(mamba_chunk_scan_combined, chunk_size=64)
        found["mamba_ssm"] = as_mamba2, scan
    except ImportError:
        pass
    return found


def as_mamba2(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
    """x, dt, A, B and C of Mamba-2 with one group of B and C a head.

    Its decay is exp(dt A), so that A is -1 and dt the size of a log decay; and it
    multiplies what is added by dt, which is divided out of x before.
    """
    x = (v.float() / -g.unsqueeze(-1)).to(v.dtype)
    return [x, -g, -torch.ones_like(g[0, 0]), k, q]


def unavailable(kernel: str, shape: Shape, device: torch.device) -> str | None:
    """Why a kernel ("triton", "fused") cannot be measured here, or None."""
    if not ssd_triton.HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda" or ssd_triton._interpreted():
        return "no compiled kernels here; the interpreter says nothing about speed"
    sizes = (shape.D, shape.N, shape.chunk)
    return _unavailable(kernel, sizes, torch.float32, device)


# --------------------------------------------------------------------------------------
# Inputs


def part_inputs(part: str, shape: Shape, device: torch.device) -> list[Tensor]:
    """The arguments of the functions of a part."""
    inputs = random_inputs(shape, device)
    if part == "scan":
        return inputs
    if part == "per_chunk":
        return chunk_inputs(inputs, shape.chunk)
    x, A, B_t, C_t, dt = inputs
    proj = _as_columns(x, B_t, C_t, dt)
    return [proj.bfloat16() if part == "block_bf16" else proj, A]


def chunk_inputs(inputs: list[Tensor], chunk: int) -> list[Tensor]:
    """Bc, Cc, Xc, A_log, decay_states, all complex, cut from the inputs of a scan."""
    x, A, B_t, C_t, dt = inputs
    parts = (x.to(B_t.dtype), B_t, C_t, _log_decay(dt, A))
    Xc, Bc, Cc, A_log = (_to_chunks(z, chunk) for z in parts)
    total = A_log.cumsum(2)
    decay_states = _exp(total[:, :, -1:] - total, B_t.dtype)
    return [Bc, Cc, Xc, A_log.to(B_t.dtype), decay_states]


# --------------------------------------------------------------------------------------
# The clock


def measure(run: Callable[[], Any], device: torch.device, seconds: float = 0.3) -> dict:
    """Milliseconds of one run(): median, 10th and 90th percentile, number of runs."""
    run()
    start = time.perf_counter()
    run()
    synchronize(device)
    once = time.perf_counter() - start
    runs = max(7, min(200, int(seconds / once)))
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        synchronize(device)
        times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    else:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
    tenths = statistics.quantiles(times, n=10)
    return {
        "median": statistics.median(times),
        "low": tenths[0],
        "high": tenths[-1],
        "runs": runs,
    }


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """The CUDA graph of run(): its replay has no launch cost in it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def synchronize(device: torch.device) -> None:
    """Wait until the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Let PyTorch's own float32 matmuls use tf32, or not, for the time of a block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# --------------------------------------------------------------------------------------
# One row


def time_row(function: Callable, inputs: list[Tensor], device: torch.device) -> dict:
    """Time and memory of one version: forward, and forward with backward."""

    def forward() -> None:
        with torch.no_grad():
            function(*inputs)

    both = with_gradients(function, inputs)
    row: dict[str, Any] = {}
    for name, run in (("forward", forward), ("forward_backward", both)):
        eager = measure(run, device)
        if device.type == "cuda":
            row[f"{name}_ms"] = measure(captured(run), device)
            row[f"{name}_eager_ms"] = eager
        else:
            row[f"{name}_ms"] = eager
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        both()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        row["peak_mb"] = peak / 1e6
    return row


# --------------------------------------------------------------------------------------
# Ceilings and floors


def ceilings(device: torch.device) -> dict[str, float]:
    """Measured on this device: bytes copied and FLOPs multiplied per second."""
    on_gpu = device.type == "cuda"
    source = torch.randn(2**30 if on_gpu else 2**25, device=device)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device)
    found = {"copy_tb_s": 2 * source.nbytes / copy["median"] / 1e9}
    del source, target
    side = 8192 if on_gpu else 1024
    rates = [("fp32", torch.float32, "ieee")]
    if on_gpu:
        rates += [("tf32", torch.float32, "tf32"), ("bf16", torch.bfloat16, "ieee")]
    for name, dtype, precision in rates:
        a, b = torch.randn(2, side, side, device=device).to(dtype)
        with products_in(precision):
            ms = measure(partial(torch.mm, a, b), device)["median"]
        found[f"{name}_tflop_s"] = 2 * side**3 / ms / 1e9
    return found


def cost(part: str, shape: Shape) -> dict[str, float]:
    """Bytes that must move and FLOPs that must be done, derived from the shape.

    Every input is read once and every output written once; the backward reads inputs
    and incoming gradients and writes one gradient per input. Products only, a backward
    counted as twice its forward; a complex product of chunks is four real ones, and a
    scan of a real x needs real products of vectors twice as long.
    """
    rows = shape.B * shape.T * shape.H
    chunks = rows // shape.chunk
    C, D, N = shape.chunk, shape.D, shape.N
    if part == "per_chunk":
        inputs = 8 * rows * (2 * N + D + 2)
        outputs = 8 * (rows * D + chunks * D * N)
        flops = chunks * 8 * (C * C * (N + D) + C * N * D)
    else:
        size = 2 if part == "block_bf16" else 4
        inputs = size * rows * (4 * N + D + 1)
        outputs = size * rows * D
        flops = chunks * 2 * (C * C * (2 * N + D) + 2 * C * 2 * N * D)
    return {
        "forward_bytes": inputs + outputs,
        "forward_flops": flops,
        "forward_backward_bytes": 3 * inputs + 2 * outputs,
        "forward_backward_flops": 3 * flops,
    }


def floor_ms(need: dict, ceiling: dict, name: str, precision: str) -> float:
    """No version can run faster: the larger of memory time and matmul time."""
    rate = ceiling.get(f"{precision}_tflop_s", ceiling["fp32_tflop_s"])
    memory = need[f"{name}_bytes"] / ceiling["copy_tb_s"] / 1e9
    return max(memory, need[f"{name}_flops"] / rate / 1e9)


def floors(need: dict, ceiling: dict, precision: str) -> dict[str, float]:
    """The floors of a row."""
    return {
        f"{name}_floor_ms": floor_ms(need, ceiling, name, precision)
        for name in ("forward", "forward_backward")
    }


# --------------------------------------------------------------------------------------
# The run


def versions_of(
    part: str, shape: Shape, precision: str, device: torch.device
) -> dict[str, Callable]:
    """Name to function: every version of this part that runs here in this precision."""
    kernels = [k for k in KERNELS if not unavailable(k, shape, device)]
    if precision == "bf16":
        names = [] if part in ("per_chunk", "block_fp32") else ["fused"]
    elif part == "block_bf16" and precision == "ieee":
        names = []
    else:
        names = ["einsum", "pytorch", "triton", "fused"]
    names = [n for n in names if n in ("einsum", "pytorch") or n in kernels]
    if part == "per_chunk":
        functions = {"einsum": einsum_per_chunk, "pytorch": per_chunk_ssd_pytorch}
        functions["triton"] = partial(
            ssd_triton.per_chunk_ssd_triton, input_precision=precision
        )
    elif part == "scan":
        scan = partial(ssd_complex_chunkwise, chunk_size=shape.chunk)
        functions = {"einsum": partial(einsum_scan, chunk=shape.chunk), "pytorch": scan}
        for name in ("triton", "fused"):
            functions[name] = partial(scan, ssd_dispatch=name, precision=precision)
    else:
        functions = {
            name: partial(
                block_scan, shape=shape, ssd_dispatch=name, precision=precision
            )
            for name in ("pytorch", "triton", "fused")
        }
    return {name: functions[name] for name in names if name in functions}


def measure_rows(
    parts: Sequence[str], shape: Shape, checked: Shape, device: torch.device,
    ceiling: dict, say: Callable,
) -> list[dict]:  # fmt: skip
    """One row for every precision and version of these parts."""
    precisions = PRECISIONS if device.type == "cuda" else PRECISIONS[:1]
    for kernel in KERNELS:
        if reason := unavailable(kernel, shape, device):
            say(f"{kernel} not measured: {reason}")
    rows = []
    for part in parts:
        inputs = part_inputs(part, shape, device)
        small = part_inputs(part, checked, device)
        wanted, need = oracle(part, small, checked), cost(part, shape)
        for precision in precisions:
            small_versions = versions_of(part, checked, precision, device)
            for name, run in versions_of(part, shape, precision, device).items():
                try:
                    with products_in(precision):
                        row = time_row(run, inputs, device)
                        got = with_gradients(small_versions[name], small)()
                except KernelUnavailable as error:
                    say(f"{part} {name} {precision} not measured: {error}")
                    continue
                row |= {"part": part, "version": name, "precision": precision}
                row["errors"] = errors(part, got, wanted, checked)
                rows.append(row | floors(need, ceiling, precision))
                say(describe(row))
    return rows


def measure_peers(
    shape: Shape, checked: Shape, device: torch.device, ceiling: dict, say: Callable
) -> tuple[list[dict], dict[str, str]]:
    """Rows of other projects' scans, bfloat16, on the same numbers.

    Rotation and softplus were done before and are not in these times; they are in ours.
    Their error is that of y alone.

    Returns: the rows, and why a peer that is installed has none.
    """
    rows, refused, part = [], {}, "block_bf16"
    need = cost(part, shape)
    proj, A = part_inputs(part, checked, device)
    wanted = oracle(part, [proj, A], checked)[0][0]
    for name, (prepare, run) in peers_here().items():
        try:
            inputs = prepare(*rotated(*part_inputs(part, shape, device), shape))
            row = time_row(run, inputs, device)
            with torch.no_grad():
                y = run(*prepare(*rotated(proj, A, checked)))
        # Another project's code: whatever it raises is its answer, not our fault.
        except Exception as error:
            refused[name] = " ".join(str(error).split()) or type(error).__name__
            say(f"{name} was not measured: {refused[name]}")
            continue
        row |= {"part": part, "version": name, "precision": "bf16"}
        row["errors"] = {"y": relative_error(y, wanted)}
        rows.append(row | floors(need, ceiling, "bf16"))
        say(describe(row))
    return rows, refused


def describe(row: dict) -> str:
    """One line of progress."""
    return (
        f"{row['part']:>10} {row['version']:>7} {row['precision']}: "
        f"forward {row['forward_ms']['median']:.3f} ms, with backward "
        f"{row['forward_backward_ms']['median']:.3f} ms"
    )


def kernel_of(part: str, rows: list[dict]) -> str | None:
    """The kernel that a part is measured for: the fused one where it has a row."""
    measured = {row["version"] for row in rows if row["part"] == part}
    return next((k for k in reversed(KERNELS) if k in measured), None)


def ratios_of(rows: list[dict]) -> list[dict]:
    """How many times as fast a part's kernel is as each other version, in one run."""
    found = []
    for row in rows:
        if row["version"] != kernel_of(row["part"], rows):
            continue
        same = {"part": row["part"], "precision": row["precision"]}
        for other in rows:
            if other is not row and same.items() <= other.items():
                times = {
                    name: other[f"{name}_ms"]["median"] / row[f"{name}_ms"]["median"]
                    for name in ("forward", "forward_backward")
                }
                found.append({**same, "against": other["version"], **times})
    return found


def sweep_launches(shape: Shape, device: torch.device, say: Callable) -> list[dict]:
    """Forward time of the per-chunk kernel for every number of warps and stages."""
    inputs = chunk_inputs(random_inputs(shape, device), shape.chunk)
    knobs = ("TRITON_PER_CHUNK_NUM_WARPS", "TRITON_PER_CHUNK_NUM_STAGES")
    before = {name: os.environ.get(name) for name in knobs}
    rows = []
    choices = product(_PRECISIONS_OF["triton"], (2, 4, 8), (1, 2))
    try:
        for precision, warps, stages in choices:
            os.environ |= dict(zip(knobs, (str(warps), str(stages)), strict=True))
            run = partial(
                ssd_triton.per_chunk_ssd_triton, *inputs, input_precision=precision
            )
            row = {"precision": precision, "warps": warps, "stages": stages}
            try:
                row["forward_ms"] = measure(captured(run), device)
            except KernelUnavailable as error:
                say(f"{row} does not fit: {error}")
                continue
            rows.append(row)
            say(f"{row | {'forward_ms': row['forward_ms']['median']}}")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return rows


_BACKWARD = ("backward", "strong")  # kernels that only a backward pass launches


def candidates(kernel: str, precision: str, shape: Shape) -> Iterator[tuple]:
    """Launches of a fused kernel worth trying, as the table has them.

    In bf16 the products of the backward have 64 columns: fewer are compiled wrongly
    (`ssd_fused._chunk_of`).
    """
    sides = (shape.D,) if kernel in ("walk", "chunks") else (0,)
    least = 64 if precision == "bf16" and kernel in _BACKWARD else 16
    blocks = [n for n in (16, 32, 64) if min(least, shape.N) <= n <= shape.N]
    stages = (2, 3, 4) if kernel == "walk" else (1,)
    registers = (0, 168) if kernel in ("output", *_BACKWARD) else (0,)
    return product(sides, blocks, (4,), stages, registers)


def time_launch(
    kernel: str, precision: str, launch: tuple, run: Callable, device: torch.device
) -> dict:
    """One row of the sweep: the time, or why this launch cannot be."""
    row = {"kernel": kernel, "precision": precision, "launch": list(launch)}
    try:
        return row | {"ms": measure(captured(run), device, 0.05)}
    except KernelUnavailable as error:
        return row | {"fault": str(error)}


def sweep_fused(shape: Shape, device: torch.device, say: Callable) -> list[dict]:
    """Time of the whole fused scan for every launch of each of its kernels.

    A launch that this device cannot hold is listed with its fault and no time.
    """
    rows = []
    walk_from = ssd_fused._WALK_FROM
    for precision in ("bf16", "tf32"):
        part = "block_bf16" if precision == "bf16" else "block_fp32"
        proj, A = part_inputs(part, shape, device)
        run = partial(
            block_scan, shape=shape, ssd_dispatch="fused", precision=precision
        )
        for kernel, table in ssd_fused._LAUNCH.items():
            # What is for chunks of strong decay needs some.
            inputs = [proj, A - 10 if kernel == "strong" else A]
            backward = kernel in _BACKWARD
            timed = with_gradients(run, inputs) if backward else partial(run, *inputs)
            shipped = table[precision]
            try:
                ssd_fused._WALK_FROM = math.inf if kernel == "chunks" else 0
                for launch in candidates(kernel, precision, shape):
                    table[precision] = launch
                    rows.append(time_launch(kernel, precision, launch, timed, device))
                    say(str(rows[-1]))
            finally:
                table[precision], ssd_fused._WALK_FROM = shipped, walk_from
    return rows


def measure_model(
    config: str, overrides: list[str], steps: int, device: torch.device, say: Callable
) -> Iterator[dict]:
    """Training steps of a whole model on random tokens, by the trainer's own step.

    Yields: one row for every dispatch that runs here, the fused one first, eager and
    compiled: ms a step, tokens/s, MFU where the device's peak is known, peak memory,
    first and last loss. One that is out of memory is said, and has no row.
    """
    from mamba3lite.training.config import load_config

    settings = load_config(config, overrides)
    fields, training = settings.model_fields_of_run(), settings.training
    shape = Shape(
        training.micro_batch_size, fields["max_seq_len"], fields["n_heads"],
        fields["head_dim"], fields["state_dim"], fields["chunk_size"],
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(fields["vocab_size"], (shape.B, shape.T + 1), generator=g)
    tokens = tokens.to(device)
    batch = (tokens[:, :-1], tokens[:, 1:], torch.zeros_like(tokens[:, 1:]))
    dispatches = [
        name
        for name in ("fused", "pytorch", "triton")
        if name == "pytorch" or not unavailable(name, shape, device)
    ]
    for dispatch, compiled in product(dispatches, (False, True)):
        # Only the fused scan is one operator; the others are complex arithmetic, which
        # the compiler cannot generate for a GPU.
        if compiled and (dispatch != "fused" or device.type != "cuda"):
            continue
        fields["ssd_dispatch"] = dispatch
        try:
            row = time_steps(fields, training, batch, compiled, steps, device)
        except torch.OutOfMemoryError:
            say(f"{config}: {dispatch} is out of memory")
            continue
        row = {"dispatch": dispatch, "compiled": compiled} | row
        how = "compiled" if compiled else "eager"
        say(
            f"{config}, {dispatch}, {how}: {row['step_ms']:.1f} ms a step, "
            f"{row['tokens_per_s']:,.0f} tokens/s, peak {row['peak_gb']:.1f} GB, "
            f"loss {row['first_loss']:.2f} to {row['last_loss']:.2f}"
        )
        yield row


def time_steps(
    fields: dict,
    training: Any,
    batch: tuple,
    compiled: bool,
    steps: int,
    device: torch.device,
) -> dict:
    """The numbers of a row of `measure_model`, of one new model."""
    from mamba3lite.training.estimate import flops_per_token, peak_flops
    from mamba3lite.training.optim import build_optimizer
    from mamba3lite.training.parallel import compiled_for_training
    from mamba3lite.training.profiling import peak_memory
    from mamba3lite.training.step import train_step

    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    model = Mamba3Transformer(fields).to(device)
    optimizer = build_optimizer(model, training)
    stepped = compiled_for_training(model, fullgraph=True) if compiled else model
    step = partial(train_step, stepped, optimizer, [batch], bf16=on_gpu)
    losses = [step().loss for _ in range(3)]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(step().loss)  # reading the loss waits for the device
        times.append((time.perf_counter() - start) * 1e3)
    ms = statistics.median(times)
    rate = batch[0].numel() / ms * 1e3
    peak = peak_flops(device)
    return {
        "step_ms": ms,
        "tokens_per_s": rate,
        "mfu": rate * flops_per_token(model) / peak if peak else None,
        "peak_gb": peak_memory(device) / 1e9,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def this_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers belong to."""
    on_gpu = device.type == "cuda"
    facts: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "threads": torch.get_num_threads(),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        facts["capability"] = [properties.major, properties.minor]
        facts["memory_gb"] = properties.total_memory / 1e9
    return facts


def versions() -> dict[str, str | None]:
    """The software the numbers belong to."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": ssd_triton.triton.__version__ if ssd_triton.HAS_TRITON else None,
        "cuda": torch.version.cuda,
        "mamba3lite": mamba3lite.__version__,
    }


def table_of(rows: list[dict]) -> Table:
    """The rows as the reader sees them last."""
    table = Table(title="median ms; floor = share of the floor reached")
    heads = ("part", "version", "precision", "forward", "floor", "with backward")
    for head in (*heads, "floor", "peak MB", "worst error"):
        table.add_column(head, justify="left" if head in heads[:3] else "right")
    for row in rows:
        cells = [row["part"], row["version"], row["precision"]]
        for name in ("forward", "forward_backward"):
            median = row[f"{name}_ms"]["median"]
            cells += [f"{median:.3f}", f"{row[f'{name}_floor_ms'] / median:.0%}"]
        worst = max(row["errors"], key=row["errors"].__getitem__)
        peak = f"{row['peak_mb']:.0f}" if "peak_mb" in row else "-"
        table.add_row(*cells, peak, f"{row['errors'][worst]:.1e} ({worst})")
    return table


def command_line() -> str:
    """What was typed to start this run."""
    started_as_module = Path(sys.argv[0]).name == "bench.py"
    start = (
        ["python", "-m", "mamba3lite.bench"] if started_as_module else ["mamba3lite"]
    )
    return shlex.join([*start, *sys.argv[1:]])


def run_bench(
    shape: Shape,
    checked: Shape,
    device: torch.device,
    *,
    tune: bool = False,
    peers: bool = False,
    parts: Sequence[str],
    model: str | None = None,
    overrides: list[str] | None = None,
    say: Callable = print,
    save: Callable[[dict], None] = lambda report: None,
) -> dict[str, Any]:
    """Measure everything; returns what `--json` writes.

    Args: parts: those of the scan to measure. save: called with what is there after
    each step, so that nothing measured is lost by a later one.
    """
    ceiling = ceilings(device)
    say(", ".join(f"{name} {value:.3g}" for name, value in ceiling.items()))
    rows = measure_rows(parts, shape, checked, device, ceiling, say)
    report = {
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command_line(),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("TRITON_PER_CHUNK_")
        },
        "device": this_machine(device),
        "versions": versions(),
        "ceilings": ceiling,
        "shape": asdict(shape),
        "error_shape": asdict(checked),
        "rows": rows,
        "ratios": ratios_of(rows),
    }
    save(report)
    if peers:
        if device.type != "cuda" or not peers_here():
            say("no peer measured: they need a CUDA device, and fla or mamba_ssm")
        else:
            found, refused = measure_peers(shape, checked, device, ceiling, say)
            report |= {"rows": rows + found, "refused": refused}
            report["ratios"] = ratios_of(report["rows"])
            save(report)
    if model:
        report["model"] = []
        for row in measure_model(model, overrides or [], 20, device, say):
            report["model"].append(row)
            save(report)
    if tune and not unavailable("triton", shape, device):
        report["launches"] = sweep_launches(shape, device, say)
        save(report)
    if tune and not unavailable("fused", shape, device):
        report["fused_launches"] = sweep_fused(shape, device, say)
        save(report)
    return report


def write_report(file: Path | None, report: dict[str, Any]) -> str | None:
    """Write the report where it was asked for; returns why it could not be."""
    if file is None:
        return None
    try:
        write_whole(file, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        return f"bench: {file}: {error.strerror}; nothing written"
    return None


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table of all rows, and how the kernel compares."""
    if report["rows"]:
        console.print(table_of(report["rows"]))
    elif not report.get("model"):
        console.print("nothing of this can be measured here")
    for ratio in report["ratios"]:
        kernel = kernel_of(ratio["part"], report["rows"])
        print(
            f"{ratio['part']} {ratio['precision']}: {kernel} is "
            f"{ratio['forward']:.2f} times as fast as {ratio['against']} forward, "
            f"{ratio['forward_backward']:.2f} times with backward"
        )
