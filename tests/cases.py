"""Random inputs of the scan, and how far two results are apart."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """The five tensors every scan function takes, in its order."""

    x: Tensor
    A: Tensor
    B_t: Tensor
    C_t: Tensor
    dt: Tensor

    def double(self) -> Case:
        """The same numbers in double precision: what the oracle runs on."""
        return Case(*map(in_double, self))

    def leaves(self) -> Case:
        """Copies that collect gradients."""
        return Case(*(z.detach().clone().requires_grad_() for z in self))

    def cut(self, start: int, stop: int) -> Case:
        """The steps start to stop; A has no time axis."""
        return Case(*(z if z is self.A else z[:, start:stop] for z in self))


def in_double(z: Tensor) -> Tensor:
    return z.to(torch.complex128 if z.is_complex() else torch.float64)


def complex_normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64, generator=generator)


def uniform(low: float, high: float, *shape: int, generator: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(*shape, generator=generator)


def random_case(
    time: int,
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 2,
    dim: int = 4,
    states: int = 4,
    complex_x: bool = False,
) -> Case:
    """The reference distribution, in single precision.

    dt ~ N(0, 1), log(-Re A) ~ U[log 1e-3, log 2], Im A ~ U[-pi, pi], the rest N(0, 1).
    """
    g = torch.Generator().manual_seed(seed)
    rate = uniform(math.log(1e-3), math.log(2), heads, generator=g).exp()
    angle = uniform(-math.pi, math.pi, heads, generator=g)
    x = torch.randn(batch, time, heads, dim, generator=g)
    if complex_x:
        x = torch.complex(x, torch.randn(x.shape, generator=g)) / math.sqrt(2)
    return Case(
        x=x,
        A=torch.complex(-rate, angle),
        B_t=complex_normal(batch, time, heads, states, generator=g),
        C_t=complex_normal(batch, time, heads, states, generator=g),
        dt=torch.randn(batch, time, heads, generator=g),
    )


def whole_range_case(time: int, seed: int = 0, *, dt: str = "uniform") -> Case:
    """Six heads over Re(A) in [-16, -1e-4], Im(A) in [-pi, pi]; dt in [-30, 30].

    Args: dt: "uniform" over the range, or "low", "high", "switching" at its ends.
    """
    g = torch.Generator().manual_seed(seed)
    case = random_case(time, seed, batch=1, heads=6, dim=2, states=2)
    A = torch.tensor([-16 + math.pi * 1j, -16 - math.pi * 1j, -1e-4 + math.pi * 1j])
    A = torch.cat([A, torch.tensor([-1e-4 - math.pi * 1j, -1e-4 + 0j, -1 + 1j])])
    steps = {
        "uniform": uniform(-30, 30, *case.dt.shape, generator=g),
        "low": torch.full_like(case.dt, -30),
        "high": torch.full_like(case.dt, 30),
        "switching": 30 * torch.randn(case.dt.shape, generator=g).sign(),
    }[dt]
    return case._replace(A=A, dt=steps)


def random_state(case: Case, seed: int = 0) -> Tensor:
    """A state that fits the case: (B, H, D, N), N(0, 1)."""
    batch, _, heads, dim = case.x.shape
    g = torch.Generator().manual_seed(seed + 10_000)
    state = complex_normal(batch, heads, dim, case.B_t.shape[-1], generator=g)
    return state.to(case.B_t.dtype)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN stays NaN."""
    dtype = torch.complex128 if wanted.is_complex() else torch.float64
    got, wanted = got.detach().to(dtype), wanted.detach().to(dtype)
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    distance = torch.linalg.vector_norm(got - wanted).item()
    if distance == 0:
        return 0.0
    return distance / max(torch.linalg.vector_norm(wanted).item(), 1e-300)


NOWHERE = torch.tensor(torch.nan)
# Where: (name, step, value); and the steps of 50 that the loop then spoils, with
# documents from 0, 20 and 41 on.
SPOILED = {
    "x": (("x", 18, NOWHERE), range(18, 20)),
    "one channel of x": (("x", (18, 0, 0), NOWHERE), range(18, 20)),
    "an infinite x": (("x", 0, torch.tensor(torch.inf)), range(20)),
    "B": (("B_t", 25, NOWHERE), range(25, 41)),
    "C": (("C_t", 25, NOWHERE), range(25, 26)),
    "dt": (("dt", 41 + 3, NOWHERE), range(44, 50)),
    "dt of a first step": (("dt", 20, NOWHERE), range(0)),
    "the state before": (("initial_states", 0, NOWHERE), range(20)),
}


def spoil(inputs: dict[str, Tensor], place: tuple) -> None:
    """Put the value of a row of SPOILED in its place, in every batch row."""
    name, at, value = place
    inputs[name] = inputs[name].clone()
    inputs[name][(slice(None), *(at if isinstance(at, tuple) else (at,)))] = value


def spoiled_steps(y: Tensor) -> list[int]:
    """Steps at which some number is not finite."""
    return (~y.isfinite()).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
