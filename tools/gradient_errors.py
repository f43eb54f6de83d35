"""How exact the gradients of dt and A are, by decay, way and precision.

    python tools/gradient_errors.py [--json docs/benchmarks/runs/h200-gradients.json]
    python tools/gradient_errors.py --draw docs/benchmarks/runs/h200-gradients.json

Every dispatch and precision that runs here, and the loop in float32, against the loop
in complex128 on the same numbers. y, x, B and C: relative by norm. dt and A: the
largest error of one, relative to the largest gradient. `leak`: the largest gradient
that reaches a document from what follows it; 0 is right. `--draw` makes a picture of
what such a file holds, the error against the decay of a step.
"""

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from mamba3lite.bench import this_machine, versions
from mamba3lite.files import write_whole
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex
from mamba3lite.models.ssd_triton import HAS_TRITON, _interpreted
from mamba3lite.reference import in_double, relative_error

NAMES = ("x", "A", "B", "C", "dt")
BATCH, HEADS, SEED = 2, 4, 0
DECAYS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
INPUTS = ("reference", "strong", "stronger", "mixed", "documents", *DECAYS)
WAYS = (
    ("loop", None), ("pytorch", None), ("triton", "ieee"), ("triton", "tf32"),
    ("fused", "ieee"), ("fused", "tf32"), ("fused", "bf16"),
)  # fmt: skip


def inputs(
    name: str | float, time: int, side: int
) -> tuple[list[Tensor], Tensor | None]:
    """x, A, B, C and dt in single precision, and where documents start.

    A number is the decay of a step, give or take a third. "reference" is the
    distribution that the tests share: dt ~ N(0, 1), log(-Re A) uniform from log 1e-3 to
    log 2, Im A from -pi to pi, the rest N(0, 1).
    """
    g = torch.Generator().manual_seed(SEED)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=g, dtype=dtype)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=g)

    steps = BATCH, time, HEADS
    angle = uniform(-math.pi, math.pi, HEADS)
    rate = uniform(math.log(1e-3), math.log(2), HEADS).exp()
    dt, reset = normal(*steps), None
    if name == "strong":
        rate, angle, dt = (
            torch.full((HEADS,), 10.0),
            0 * angle + 3,
            uniform(0, 5, *steps),
        )
    elif name == "stronger":
        rate, dt = torch.linspace(1, 17, HEADS), uniform(8, 20, *steps)
    elif name == "mixed":
        rate = torch.linspace(0.5, 8, HEADS)
        kind = torch.randint(0, 4, steps, generator=g)
        dt = torch.tensor([-8.0, -3.0, 2.0, 300.0])[kind] + normal(*steps)
    elif isinstance(name, float):
        rate, dt = torch.full((HEADS,), name), uniform(0, 1, *steps)
    elif name == "documents":
        reset = torch.rand(BATCH, time, generator=g) < 0.08
    B, C = (normal(*steps, side, dtype=torch.complex64) for _ in range(2))
    return [normal(*steps, side), torch.complex(-rate, angle), B, C, dt], reset


def run(scan: Callable, case: list[Tensor], weights: Tensor, reset) -> list[Tensor]:
    """y and the gradients of <weights, y>."""
    leaves = [z.detach().requires_grad_() for z in case]
    y = scan(*leaves, reset=reset)
    y = y.real if y.is_complex() else y
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


def leak(scan: Callable, case: list[Tensor], weights: Tensor, reset: Tensor) -> float:
    """The largest gradient of dt in the first documents from all later ones."""
    leaves = [z.detach().requires_grad_() for z in case]
    y = scan(*leaves, reset=reset)
    y = y.real if y.is_complex() else y
    starts = reset.cumsum(1)
    cut = starts[:, starts.shape[1] // 2, None]
    loss = (y * weights * (starts > cut)[..., None, None]).sum()
    (found,) = torch.autograd.grad(loss, leaves[4])
    return found[(starts <= cut) & ~reset].abs().max().item()


def exact(case: list[Tensor], weights: Tensor, reset) -> list[Tensor]:
    """The same of the loop in complex128."""
    return run(ssd_naive_complex, [*map(in_double, case)], in_double(weights), reset)


def errors(got: list[Tensor], wanted: list[Tensor]) -> dict[str, float]:
    """One number for y and each gradient."""
    found = {}
    for name, mine, truth in zip(("y", *NAMES), got, wanted, strict=True):
        if name in ("dt", "A"):
            off = in_double(mine) - truth
            off, whole = (
                torch.view_as_real(z) if z.is_complex() else z for z in (off, truth)
            )
            found[name] = (off.abs().max() / whole.abs().max()).item()
        else:
            found[name] = relative_error(mine, truth)
    return found


def measure(device: str, time: int, side: int) -> list[dict]:
    """A row for each input and way."""
    rows = []
    for name in INPUTS:
        case, reset = inputs(name, time, side)
        g = torch.Generator().manual_seed(SEED + 1)
        weights = torch.randn(case[0].shape, generator=g)
        # What the projection of a model would hold, for bf16.
        cases = {True: [z if z is case[1] else _rounded(z) for z in case], False: case}
        flags = None if reset is None else reset.to(device)
        cases = {half: [z.to(device) for z in case] for half, case in cases.items()}
        weights = weights.to(device)
        truths = {half: exact(z, weights, flags) for half, z in cases.items()}
        for dispatch, precision in WAYS:
            kernels = dispatch in ("triton", "fused")
            if kernels and not (HAS_TRITON and (device == "cuda" or _interpreted())):
                continue
            half = precision == "bf16"

            def scan(*leaves, dispatch=dispatch, precision=precision, **options):
                if dispatch == "loop":
                    return ssd_naive_complex(*leaves, **options)
                return ssd_complex_chunkwise(
                    *leaves, 64, dispatch, precision=precision, **options
                )

            got = run(scan, cases[half], weights, flags)
            row = {"input": name, "dispatch": dispatch, "precision": precision}
            row["errors"] = errors(got, truths[half])
            if reset is not None:
                row["leak"] = leak(scan, cases[half], weights, flags)
            found = " ".join(f"{k} {v:.1e}" for k, v in row["errors"].items())
            print(name, dispatch, precision, found, row.get("leak", ""), flush=True)
            rows.append(row)
    return rows


def _rounded(z: Tensor) -> Tensor:
    """z in the numbers that bfloat16 has."""
    if z.is_complex():
        return torch.view_as_complex(_rounded(torch.view_as_real(z)))
    return z.bfloat16().float()


def draw(report: dict, path: Path) -> None:
    """The error of dt and of A against the decay of a step, by way, and before."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "decay"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    colors = dict(zip(WAYS, plt.colormaps["tab10"].colors, strict=False))
    lines = [("", report["rows"], "-"), (" before", report.get("before", []), ":")]
    for axis, name in zip(axes, ("dt", "A"), strict=True):
        for when, rows, style in lines:
            for way in WAYS:
                found = [
                    (row["input"], row["errors"][name])
                    for row in rows
                    if isinstance(row["input"], float)
                    and (row["dispatch"], row["precision"]) == way
                ]
                if found:
                    label = " ".join(filter(None, way)) + when
                    axis.loglog(*zip(*found, strict=True), style, label=label,
                                color=colors[way], marker=".")  # fmt: skip
        axis.axhline(1, color="#999999", lw=0.8)
        axis.set(xlabel="decay of a step [nats]", title=f"gradient of {name}")
        axis.set_ylim(1e-8, 1e4)
    axes[0].set_ylabel("largest error / largest gradient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
    figure.tight_layout(rect=(0, 0, 0.83, 1))
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--time", type=int, default=512, help="steps (default 512)")
    parser.add_argument("--side", type=int, default=64, help="D and N (default 64)")
    parser.add_argument("--draw", type=Path, help="a file to make a picture of")
    args = parser.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".svg"))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(device.type, args.time, args.side)
    if args.json is not None:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "device": this_machine(device),
            "versions": versions(),
            "rows": rows,
        }
        write_whole(args.json, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
