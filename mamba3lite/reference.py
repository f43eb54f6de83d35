"""What a scan is compared with: one distribution of inputs, an oracle, its errors.

`mamba3lite bench` and `mamba3lite doctor` measure against it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mamba3lite.models.ssd_complex import (
    per_chunk_ssd_pytorch,
    ssd_naive_complex,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement; D channels, N complex states, `chunk` steps a chunk."""

    B: int
    T: int
    H: int
    D: int
    N: int
    chunk: int


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


def cut_columns(proj: Tensor, shape: Shape) -> list[Tensor]:
    """x, Re B, Im B, Re C, Im C, dt of a projection, each (B, T, H, columns)."""
    columns = [shape.H * n for n in (shape.D, *[shape.N] * 4, 1)]
    return [z.unflatten(-1, (shape.H, -1)) for z in proj.split(columns, dim=-1)]


def streams_of(proj: Tensor, shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, B_t, C_t and dt of a projection in single or double precision."""
    x, B_re, B_im, C_re, C_im, dt = cut_columns(proj, shape)
    return x, torch.complex(B_re, B_im), torch.complex(C_re, C_im), dt.squeeze(-1)


def in_double(z: Tensor) -> Tensor:
    """The same numbers in double precision."""
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


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


ERROR_NAMES = {
    "per_chunk": ("Y_diag", "state", "dB", "dC", "dX", "dA_log", "ddecay_states"),
    "scan": ("y", "dx", "dA", "dB", "dC", "ddt"),
    "block": ("y", "dx", "dB", "dC", "ddt", "dA"),
}


def oracle(part: str, inputs: list[Tensor], shape: Shape) -> tuple:
    """Outputs and gradients in double precision, by the plainest function there is."""
    double = list(map(in_double, inputs))
    if part == "per_chunk":
        return with_gradients(per_chunk_ssd_pytorch, double)()
    if part == "scan":
        return with_gradients(lambda *args: ssd_naive_complex(*args).real, double)()

    def naive(proj: Tensor, A: Tensor) -> Tensor:
        x, B_t, C_t, dt = streams_of(proj, shape)
        return ssd_naive_complex(x, A, B_t, C_t, dt).real

    return with_gradients(naive, double)()


def parts_of(part: str, result: tuple, shape: Shape) -> list[Tensor]:
    """Outputs and gradients, the gradient of a projection cut into its streams."""
    outputs, gradients = result
    if not part.startswith("block"):
        return [*outputs, *gradients]
    return [*outputs, *streams_of(in_double(gradients[0]), shape), gradients[1]]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted, in double precision."""
    wanted = wanted.detach()
    distance = torch.linalg.vector_norm(in_double(got.detach()) - wanted)
    return float(distance / torch.linalg.vector_norm(wanted))


def errors(part: str, got: tuple, wanted: tuple, shape: Shape) -> dict[str, float]:
    """Relative error by norm of every output and gradient."""
    names = ERROR_NAMES[part.split("_bf")[0].split("_fp")[0]]
    pairs = zip(
        names, parts_of(part, got, shape), parts_of(part, wanted, shape), strict=True
    )
    return {name: relative_error(a, b) for name, a, b in pairs}
