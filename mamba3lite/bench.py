"""Measure the scan on this machine: speed, error, memory, and the floor under them.

    python -m mamba3lite.bench
    python -m mamba3lite.bench --tune --json docs/benchmarks/NAME.json

Every number was measured in the run that prints it, or is derived on the spot from the
shape and from the ceilings measured first: the copy rate and the matmul rates.
"""

import json
import math
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import mamba3lite
from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import (
    _exp,
    _log_decay,
    _to_chunks,
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)

FORMAT = 1
PRECISIONS = ("ieee", "tf32")


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement; D channels, N complex states, `chunk` steps a chunk."""

    B: int
    T: int
    H: int
    D: int
    N: int
    chunk: int


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


def triton_reason(shape: Shape, device: torch.device) -> str | None:
    """Why the Triton kernel cannot be measured here, or None."""
    if not ssd_triton.HAS_TRITON:
        return "triton is not installed"
    if device.type != "cuda":
        return "no CUDA device; the interpreter says nothing about speed"
    try:
        ssd_triton._check_block_dims(shape.D, shape.N, shape.chunk)
    except ValueError as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------
# Inputs


def random_inputs(shape: Shape, device: torch.device, seed: int = 0) -> list[Tensor]:
    """x, A, B_t, C_t, dt of the reference distribution, single precision.

    dt ~ N(0, 1), log(-Re A) ~ U[log 1e-3, log 2], Im A ~ U[-pi, pi], the rest N(0, 1).
    """
    g = torch.Generator(device).manual_seed(seed)
    make = partial(torch.randn, device=device, generator=g)
    uniform = torch.rand(2, shape.H, device=device, generator=g)
    low, high = math.log(1e-3), math.log(2)
    rate = (low + (high - low) * uniform[0]).exp()
    A = torch.complex(-rate, math.pi * (2 * uniform[1] - 1))
    rows = (shape.B, shape.T, shape.H)
    B_t, C_t = (make(*rows, shape.N, dtype=torch.complex64) for _ in range(2))
    return [make(*rows, shape.D), A, B_t, C_t, make(*rows)]


def chunk_inputs(inputs: list[Tensor], chunk: int) -> list[Tensor]:
    """Bc, Cc, Xc, A_log, decay_states, all complex, cut from the inputs of a scan."""
    x, A, B_t, C_t, dt = inputs
    parts = (x.to(B_t.dtype), B_t, C_t, _log_decay(dt, A, None))
    Xc, Bc, Cc, A_log = (_to_chunks(z, chunk) for z in parts)
    total = A_log.cumsum(2)
    decay_states = _exp(total[:, :, -1:] - total, B_t.dtype)
    return [Bc, Cc, Xc, A_log.to(B_t.dtype), decay_states]


def in_double(z: Tensor) -> Tensor:
    """The same numbers in double precision."""
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


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


def with_gradients(function: Callable, inputs: list[Tensor]) -> Callable[[], Any]:
    """A run of function and of its backward for all inputs, seeded with noise."""
    leaves = [z.detach().clone().requires_grad_() for z in inputs]
    seeds: list[Tensor] = []

    def run() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        out = function(*leaves)
        outputs = out if isinstance(out, tuple) else (out,)
        if not seeds:
            g = torch.Generator(outputs[0].device).manual_seed(1)
            # Drawn in single precision, so that the oracle gets the same numbers.
            for o in outputs:
                dtype = torch.complex64 if o.is_complex() else torch.float32
                noise = torch.randn(o.shape, dtype=dtype, device=o.device, generator=g)
                seeds.append(noise.to(o.dtype))
        return outputs, torch.autograd.grad(outputs, leaves, seeds)

    return run


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


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in double precision."""
    wanted = wanted.detach()
    distance = torch.linalg.vector_norm(in_double(got.detach()) - wanted)
    return float(distance / torch.linalg.vector_norm(wanted))


def errors(got: tuple, wanted: tuple, names: tuple[str, ...]) -> dict[str, float]:
    """Relative error by norm of every output and gradient."""
    pairs = zip(names, [*got[0], *got[1]], [*wanted[0], *wanted[1]], strict=True)
    return {name: relative_error(a, b) for name, a, b in pairs}


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
    counted as twice its forward; float32, one complex product as four real ones, which
    is also what a scan of a real x needs.
    """
    rows = shape.B * shape.T * shape.H
    chunks = rows // shape.chunk
    C, D, N = shape.chunk, shape.D, shape.N
    if part == "per_chunk":
        inputs = 8 * rows * (2 * N + D + 2)
        outputs = 8 * (rows * D + chunks * D * N)
        flops = chunks * 8 * (C * C * (N + D) + C * N * D)
    else:
        inputs = 4 * rows * (4 * N + D + 1)
        outputs = 4 * rows * D
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


# --------------------------------------------------------------------------------------
# The run


def versions_of(part: str, shape: Shape, precision: str, kernel: bool) -> dict:
    """Name to function: every version of this part that this machine can run."""
    if part == "per_chunk":
        found = {"einsum": einsum_per_chunk, "pytorch": per_chunk_ssd_pytorch}
        if kernel:
            found["triton"] = partial(
                ssd_triton.per_chunk_ssd_triton, input_precision=precision
            )
        return found
    found = {"einsum": partial(einsum_scan, chunk=shape.chunk)}
    scan = partial(ssd_complex_chunkwise, chunk_size=shape.chunk)
    found["pytorch"] = scan
    if kernel:
        found["triton"] = partial(scan, ssd_dispatch="triton", precision=precision)
    return found


ERROR_NAMES = {
    "per_chunk": ("Y_diag", "state", "dB", "dC", "dX", "dA_log", "ddecay_states"),
    "scan": ("y", "dx", "dA", "dB", "dC", "ddt"),
}


def oracle(part: str, inputs: list[Tensor]) -> tuple:
    """Outputs and gradients in double precision, by the plainest function there is."""
    double = list(map(in_double, inputs))
    if part == "per_chunk":
        return with_gradients(per_chunk_ssd_pytorch, double)()
    return with_gradients(lambda *args: ssd_naive_complex(*args).real, double)()


def measure_rows(
    shape: Shape, checked: Shape, device: torch.device, ceiling: dict, say: Callable
) -> list[dict]:
    """One row for every part, version and precision."""
    precisions = PRECISIONS if device.type == "cuda" else PRECISIONS[:1]
    reason = triton_reason(shape, device)
    if reason:
        say(f"triton not measured: {reason}")
    rows = []
    for part in ("per_chunk", "scan"):
        inputs, small = random_inputs(shape, device), random_inputs(checked, device)
        if part == "per_chunk":
            inputs = chunk_inputs(inputs, shape.chunk)
            small = chunk_inputs(small, shape.chunk)
        wanted, need = oracle(part, small), cost(part, shape)
        for precision in precisions:
            versions = versions_of(part, shape, precision, kernel=reason is None)
            for version, function in versions.items():
                with products_in(precision):
                    row = time_row(function, inputs, device)
                    got = with_gradients(function, small)()
                row |= {"part": part, "version": version, "precision": precision}
                row["errors"] = errors(got, wanted, ERROR_NAMES[part])
                for name in ("forward", "forward_backward"):
                    row[f"{name}_floor_ms"] = floor_ms(need, ceiling, name, precision)
                rows.append(row)
                say(describe(row))
    return rows


def describe(row: dict) -> str:
    """One line of progress."""
    return (
        f"{row['part']:>9} {row['version']:>7} {row['precision']}: "
        f"forward {row['forward_ms']['median']:.3f} ms, with backward "
        f"{row['forward_backward_ms']['median']:.3f} ms"
    )


def ratios_of(rows: list[dict]) -> list[dict]:
    """How much faster the kernel is than each other version, in the same run."""
    found = []
    for row in (row for row in rows if row["version"] == "triton"):
        same = {"part": row["part"], "precision": row["precision"]}
        for other in rows:
            if other["version"] != "triton" and same.items() <= other.items():
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
    for precision, warps, stages in product(PRECISIONS, (2, 4, 8), (1, 2)):
        os.environ |= dict(zip(knobs, (str(warps), str(stages)), strict=True))
        run = partial(
            ssd_triton.per_chunk_ssd_triton, *inputs, input_precision=precision
        )
        row = {"precision": precision, "warps": warps, "stages": stages}
        row["forward_ms"] = measure(captured(run), device)
        rows.append(row)
        say(f"{row | {'forward_ms': row['forward_ms']['median']}}")
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    return rows


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


def run_bench(
    shape: Shape, checked: Shape, device: torch.device, tune: bool, say: Callable
) -> dict[str, Any]:
    """Measure everything; returns what `--json` writes."""
    ceiling = ceilings(device)
    say(", ".join(f"{name} {value:.3g}" for name, value in ceiling.items()))
    rows = measure_rows(shape, checked, device, ceiling, say)
    report = {
        "format": FORMAT,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "mamba3lite.bench", *sys.argv[1:]]),
        "device": this_machine(device),
        "versions": versions(),
        "ceilings": ceiling,
        "shape": asdict(shape),
        "error_shape": asdict(checked),
        "rows": rows,
        "ratios": ratios_of(rows),
    }
    if tune and triton_reason(shape, device) is None:
        report["launches"] = sweep_launches(shape, device, say)
    return report


def main(
    batch: Annotated[
        int | None, typer.Option(help="Sequences B; 8 on a GPU, 1 on a CPU.", min=1)
    ] = None,
    time_steps: Annotated[
        int | None,
        typer.Option("--time", help="Steps T; 2048 on a GPU, 512 on a CPU.", min=1),
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads H.", min=1)] = 16,
    head_dim: Annotated[int, typer.Option(help="Channels D per head.", min=1)] = 64,
    state_dim: Annotated[int, typer.Option(help="Complex states N.", min=1)] = 64,
    chunk_size: Annotated[int, typer.Option(help="Steps per chunk.", min=1)] = 64,
    tune: Annotated[
        bool, typer.Option("--tune", help="Also sweep the launch parameters.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all numbers to this file.")
    ] = None,
) -> None:
    """Measure the scan: every version, forward and backward, against its floor."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    batch = batch or (8 if on_gpu else 1)
    time_steps = time_steps or (2048 if on_gpu else 512)
    if time_steps % chunk_size:
        raise typer.BadParameter(
            f"--time {time_steps} is not a multiple of --chunk-size {chunk_size}"
        )
    if json_file and json_file.exists():
        raise typer.BadParameter(f"{json_file} exists; name a new file for --json")
    if json_file and not json_file.parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} is not a folder")
    shape = Shape(batch, time_steps, heads, head_dim, state_dim, chunk_size)
    # The oracle is a loop over time in double precision: a smaller batch for it.
    few = (
        {"B": 2, "T": 2048, "H": 4} if on_gpu else {"B": 1, "T": 2 * chunk_size, "H": 2}
    )
    checked = replace(shape, **few)
    report = run_bench(shape, checked, device, tune, Console(stderr=True).print)
    if json_file:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    console = Console()
    console.width = max(console.width, 100)
    console.print(table_of(report["rows"]))
    for ratio in report["ratios"]:
        print(
            f"{ratio['part']} {ratio['precision']}: triton against {ratio['against']} "
            f"{ratio['forward']:.2f}x forward, {ratio['forward_backward']:.2f}x with "
            "backward"
        )


if __name__ == "__main__":
    typer.run(main)
