"""Gradients of dt and A where little is left of the state, and of nothing at all.

At strong decay they are small next to what a sum over all pairs of a chunk holds, and
must come out of the pairs that decay. Across a boundary, a document's start or a factor
that is 0, they are exactly 0. Truth is the loop in complex128.
"""

from __future__ import annotations

import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from cases import Case, in_double, random_case, random_state, uniform
from kernel_cases import DEVICE, functional, needs_triton, on_device
from torch import Tensor

from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

pytestmark = pytest.mark.usefixtures("full_precision")


class Dispatch(NamedTuple):
    """What to call, and what a gradient of dt or A may be off by, of the largest."""

    options: dict
    limit: float


DISPATCHES = {
    "pytorch": Dispatch({"ssd_dispatch": "pytorch"}, 1e-5),
    "triton": Dispatch({"ssd_dispatch": "triton", "precision": "ieee"}, 1e-4),
    # Sums in float32: a step that keeps nothing, between steps that keep all, gets what
    # rounding leaves of theirs.
    "fused-ieee": Dispatch({"ssd_dispatch": "fused", "precision": "ieee"}, 3e-4),
    "fused-tf32": Dispatch({"ssd_dispatch": "fused", "precision": "tf32"}, 1e-2),
    "fused-bf16": Dispatch({"ssd_dispatch": "fused", "precision": "bf16"}, 3e-2),
}
KERNELS = DISPATCHES.keys() - {"pytorch"}
every_dispatch = pytest.mark.parametrize(
    "dispatch",
    [
        pytest.param(d, id=name, marks=[needs_triton] if name in KERNELS else [])
        for name, d in DISPATCHES.items()
    ],
)
CHUNK = 32


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def base(time: int) -> Case:
    """The reference distribution, at the smallest sizes that a kernel takes."""
    return random_case(time, batch=1, dim=16, states=16)


def strong(time: int = 512) -> Case:
    case = base(time)
    dt = uniform(0, 5, *case.dt.shape, generator=generator())
    return case._replace(A=torch.full((2,), -10 + 3j), dt=dt)


def stronger() -> Case:
    case, g = base(512), generator()
    rate = uniform(-17, -1, 2, generator=g)
    angle = uniform(-math.pi, math.pi, 2, generator=g)
    dt = uniform(8, 20, *case.dt.shape, generator=g)
    return case._replace(A=torch.complex(rate, angle), dt=dt)


def mixed(time: int = 200) -> Case:
    """Faded steps, strong ones and weak ones in every chunk."""
    case, g = base(time), generator()
    weak = torch.rand(case.dt.shape, generator=g) < 0.7
    dt = torch.where(weak, -6.0, uniform(0, 25, *case.dt.shape, generator=g))
    return case._replace(A=torch.full((2,), -8 + 2j), dt=dt)


def enormous() -> Case:
    """Weak decay after single steps that leave nothing."""
    case = base(131)
    dt = torch.randn(case.dt.shape, generator=generator()) - 5
    dt[:, [20, 70, 71, 96]] = 1000.0
    return case._replace(A=torch.tensor([-0.3 + 2j, -0.4 + 3j]), dt=dt)


def some_starts(time: int, *starts: int) -> Tensor:
    reset = torch.zeros(1, time, dtype=torch.bool)
    reset[:, list(starts)] = True
    return reset


INPUTS = {
    "reference": (base(512), {}),
    "strong": (strong(), {}),
    "stronger": (stronger(), {}),
    "mixed": (mixed(), {}),
    "one enormous step": (enormous(), {}),
    "an odd length": (strong(131), {}),
    "shorter than a chunk": (strong(7), {}),
    "documents": (strong(131), {"reset": some_starts(131, 5, 40, 47, 48, 63, 64, 96)}),
    "mixed documents": (mixed(75), {"reset": some_starts(75, 0, 3, 20, 21, 64)}),
    "carried": (strong(75), {"initial_states": random_state(base(75))}),
    "mixed, carried": (mixed(75), {"initial_states": random_state(base(75))}),
}


def gradients(scan, case: Case, **options) -> dict[str, Tensor]:
    """Of one functional of all outputs and the final state."""
    inputs = case.leaves()
    y, final = scan(*inputs, return_final_states=True, **options)
    grads = torch.autograd.grad(functional((y.real, final)), inputs)
    return dict(zip(Case._fields, grads, strict=True))


def moved(options: dict, change) -> dict:
    return {k: change(z) if isinstance(z, Tensor) else z for k, z in options.items()}


def double(z: Tensor) -> Tensor:
    return z if z.dtype == torch.bool else in_double(z)


def largest_error(got: Tensor, wanted: Tensor) -> float:
    error = (double(got.cpu()) - wanted).abs().max()
    return (error / wanted.abs().max()).item()


@every_dispatch
@pytest.mark.parametrize(("case", "options"), INPUTS.values(), ids=INPUTS)
def test_gradients_are_those_of_the_loop(dispatch, case, options):
    """Of dt and A too, however little of the state is left for them to change."""
    wanted = gradients(ssd_naive_complex, case.double(), **moved(options, double))
    got = gradients(
        ssd_complex_chunkwise,
        on_device(case),
        chunk_size=CHUNK,
        **dispatch.options,
        **moved(options, lambda z: z.to(DEVICE)),
    )
    for name, truth in wanted.items():
        assert truth.abs().max() > 0, name
        assert largest_error(got[name], truth) <= dispatch.limit, name


def test_gradients_in_double_precision():
    """Where they are smaller than float64 resolves of a sum over all pairs."""
    case = stronger().double()
    got = gradients(ssd_complex_chunkwise, case, chunk_size=CHUNK)
    for name, truth in gradients(ssd_naive_complex, case).items():
        assert largest_error(got[name], truth) <= 1e-10, name


# ---------------------------------------------------------------- exactly nothing

BOUNDARIES = {
    "reset": ([40], False),
    "resets in a chunk": ([33, 40, 47], False),
    "reset at a chunk's edge": ([64], False),
    "faded": ([40], True),
    "faded in a row": ([39, 40], True),
    "faded at a chunk's edge": ([64], True),
}


@every_dispatch
@pytest.mark.parametrize("rate", [0.05, 8.0], ids=["weak", "strong"])
@pytest.mark.parametrize(("steps", "faded"), BOUNDARIES.values(), ids=BOUNDARIES)
def test_nothing_before_a_boundary_has_a_gradient(dispatch, steps, faded, rate):
    """Not even a step of dt, not even in the last bit."""
    case, state = base(100), random_state(base(100)).to(DEVICE).requires_grad_()
    case = case._replace(
        A=torch.complex(torch.full((2,), -rate), torch.tensor([1.0, 3.0]))
    )
    reset, last = some_starts(100, *([] if faded else steps)).to(DEVICE), steps[-1]
    if faded:
        case.dt[:, steps] = 5000.0
    case = on_device(case).leaves()
    y, final = ssd_complex_chunkwise(
        *case, CHUNK, reset=reset, initial_states=state, return_final_states=True,
        **dispatch.options,
    )  # fmt: skip
    inputs = [*case, state]
    grads = torch.autograd.grad(functional((y[:, last:], final)), inputs)
    x, _, B_t, C_t, dt, initial_states = grads
    assert not initial_states.any()
    assert not dt[:, last].any(), "a longer step would still leave nothing"
    for z in (x, B_t, C_t, dt):
        assert not z[:, :last].any()
        assert z[:, last + 1 :].any()


@every_dispatch
def test_nothing_passes_one_head_alone(dispatch):
    """A step that fades in one head is no boundary of the other."""
    case = base(60)._replace(A=torch.tensor([-1 + 1j, -1e-3 + 1j]))
    case.dt[:, 40] = 2000.0
    case = on_device(case).leaves()
    y = ssd_complex_chunkwise(*case, CHUNK, **dispatch.options)
    (grad,) = torch.autograd.grad(functional((y[:, 40:],)), case.dt)
    assert not grad[:, :41, 0].any() and grad[:, 1:41, 1].all()


def test_nothing_before_a_boundary_has_a_gradient_in_double():
    case = base(60).double()
    case.dt[:, 20] = 5000.0
    case = case._replace(A=torch.full((2,), -2 + 1j, dtype=torch.complex128)).leaves()
    y = ssd_complex_chunkwise(*case, CHUNK, reset=some_starts(60, 45))
    for first, last in ((20, 45), (45, 60)):
        wanted = functional((y[:, first:last],))
        (grad,) = torch.autograd.grad(wanted, case.dt, retain_graph=True)
        assert not grad[:, : first + 1].any() and not grad[:, last:].any()
        assert grad[:, first + 1 : last].any()


# ---------------------------------------------------------------- other ways to them


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_second_derivatives_with_boundaries(complex_x):
    case = random_case(7, batch=1, heads=1, dim=2, states=2, complex_x=complex_x)
    scan = partial(
        ssd_complex_chunkwise,
        chunk_size=4,
        reset=some_starts(7, 5),
        return_final_states=True,
    )
    case.dt[:, 2] = 1.0
    inputs = tuple(case.double().leaves())
    assert torch.autograd.gradcheck(scan, inputs)
    assert torch.autograd.gradgradcheck(scan, inputs)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_scan_has_the_same_gradients():
    case = strong(70)
    wanted = gradients(ssd_naive_complex, case.double())
    torch._dynamo.reset()
    scan = torch.compile(
        partial(ssd_complex_chunkwise, chunk_size=CHUNK),
        fullgraph=True,
        backend="aot_eager",
    )
    for name, got in gradients(scan, case).items():
        assert largest_error(got, wanted[name]) <= 1e-5, name


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_a_backward_pass_under_autocast_keeps_the_gradients_of_the_decay(complex_x):
    case = random_case(70, batch=1, dim=16, states=16, complex_x=complex_x)
    case = case._replace(A=torch.full((2,), -10 + 3j))
    inputs, weights = case.leaves(), torch.randn(case.x.shape, generator=generator())
    (ssd_naive_complex(*inputs).real * weights).sum().backward()
    wanted = [z.grad.clone() for z in inputs]
    inputs = case.leaves()
    y = ssd_complex_chunkwise(*inputs, CHUNK)
    with torch.autocast("cpu", torch.bfloat16):
        (y * weights).sum().backward()
    for z, truth in zip(inputs, wanted, strict=True):
        assert z.grad.dtype == z.dtype
        assert largest_error(z.grad, double(truth)) < 2e-2


# ---------------------------------------------------------------- what is measured

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs/benchmarks/runs/h200-gradients.json"


def test_the_measured_errors_are_within_the_bounds():
    rows = json.loads(MEASURED.read_text())["rows"]
    assert len(rows) == 5 * 7
    for row in rows:
        assert row.get("leak", 0) == 0
        way = row["dispatch"], row["precision"]
        if way in (("pytorch", None), ("triton", "ieee")):
            limit = DISPATCHES[row["dispatch"]].limit
            assert max(row["errors"].values()) < limit, row


def test_the_tool_measures_what_runs_here():
    spec = importlib.util.spec_from_file_location(
        "gradient_errors", ROOT / "tools/gradient_errors.py"
    )
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    case, reset = tool.inputs("documents", 40, 4)
    weights = torch.randn(case[0].shape, generator=generator())
    exact = tool.run(
        ssd_naive_complex, [double(z) for z in case], weights.double(), reset
    )
    found = tool.errors(tool.run(ssd_naive_complex, case, weights, reset), exact)
    assert 0 < max(found.values()) < 1e-5
    assert tool.errors(exact, exact) == dict.fromkeys(("y", *tool.NAMES), 0)
    assert tool.leak(ssd_naive_complex, case, weights, reset) == 0
    nowhere = torch.zeros_like(reset)

    def leaking(*inputs, reset):
        return ssd_naive_complex(*inputs, reset=nowhere)

    assert tool.leak(leaking, case, weights, reset) > 0
