"""The scan: discretization, the naive oracle and the chunkwise algorithm.

An expected value comes from a closed form, or from `ssd_naive_complex` in complex128;
the oracle itself is held against a matrix written from the formula, and against finite
differences.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from cases import (
    SPOILED,
    Case,
    complex_normal,
    in_double,
    random_case,
    random_state,
    relative_error,
    spoil,
    spoiled_steps,
    whole_range_case,
)
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import (
    _discretise,
    causal_decay,
    discretise_bilinear,
    discretise_euler,
    discretise_zoh,
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)

FORWARD_LIMIT = 2e-5
GRADIENT_LIMITS = {
    "x": 1e-4,
    "B_t": 1e-4,
    "C_t": 1e-4,
    "initial_states": 1e-4,
    "A": 1e-3,
    "dt": 1e-3,
}
DOUBLE_LIMIT = 1e-10

SCANS = {
    "naive": ssd_naive_complex,
    "chunkwise": partial(ssd_complex_chunkwise, chunk_size=16),
}
both_scans = pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS.keys())

lengths = st.integers(1, 130)
chunk_sizes = st.sampled_from([1, 3, 16, 64, 200])
seeds = st.integers(0, 2**16)


def random_options(case: Case, seed: int, carried: bool, packed: bool) -> dict:
    """initial_states and reset for a case, or None where the flag is off."""
    g = torch.Generator().manual_seed(seed + 20_000)
    reset = torch.rand(case.x.shape[:2], generator=g) < 0.1
    return {
        "initial_states": random_state(case, seed) if carried else None,
        "reset": reset if packed else None,
    }


def oracle(case: Case, initial_states=None, reset=None) -> tuple:
    """Output and final state of the recurrence, in complex128."""
    if initial_states is not None:
        initial_states = in_double(initial_states)
    return ssd_naive_complex(
        *case.double(),
        initial_states=initial_states,
        reset=reset,
        return_final_states=True,
    )


def gradients(scan, case: Case, initial_states=None, reset=None) -> dict:
    """Gradients of one fixed random functional of the output and the final state."""
    inputs = case.leaves()._asdict()
    if initial_states is not None:
        inputs["initial_states"] = initial_states.detach().clone().requires_grad_()
    y, final = scan(**inputs, reset=reset, return_final_states=True)
    g = torch.Generator().manual_seed(7)
    y_weight = torch.randn(y.shape, generator=g).to(y.real.dtype)
    final_weight = complex_normal(*final.shape, generator=g).to(final.dtype)
    loss = (y.real * y_weight).sum() + (final * final_weight).real.sum()
    return dict(zip(inputs, torch.autograd.grad(loss, inputs.values()), strict=True))


def oracle_gradients(case: Case, initial_states=None, reset=None) -> dict:
    if initial_states is not None:
        initial_states = in_double(initial_states)
    return gradients(ssd_naive_complex, case.double(), initial_states, reset)


def gradient_errors(got: dict, expected: dict) -> dict:
    """Relative by norm; a gradient far smaller than the rest counts as 1e-3 of it.

    With one step the gradient of dt is exactly zero, and rounding is not.
    """
    norms = {name: torch.linalg.vector_norm(z).item() for name, z in expected.items()}
    floor = 1e-3 * max(norms.values())
    return {
        name: relative_error(got[name], z) * norms[name] / max(norms[name], floor)
        if norms[name]
        else torch.linalg.vector_norm(got[name]).item() / floor
        for name, z in expected.items()
    }


# ---------------------------------------------------------------- discretization

decay_rates = st.builds(complex, st.floats(-16, -1e-2), st.floats(-math.pi, math.pi))
step_sizes = st.floats(1e-3, 4)


def as_tensors(A: complex, *deltas: float) -> tuple:
    A = torch.tensor(A, dtype=torch.complex128)
    return A, *(torch.tensor(d, dtype=torch.float64) for d in deltas)


def test_discretise_zoh_at_points_done_by_hand():
    """e^(-ln 2) = 1/2, and half a turn is -1."""
    abar, factor = discretise_zoh(*as_tensors(-1, math.log(2)))
    torch.testing.assert_close(abar.item(), 0.5 + 0j)
    torch.testing.assert_close(factor.item(), 0.5 + 0j)
    abar, factor = discretise_zoh(*as_tensors(math.pi * 1j, 1.0))
    torch.testing.assert_close(abar.item(), -1 + 0j)
    torch.testing.assert_close(factor.item(), 2j / math.pi)


def test_discretise_euler_and_bilinear_at_points_done_by_hand():
    abar, factor = discretise_euler(*as_tensors(-1 + 2j, 0.25))
    assert (abar.item(), factor.item()) == (0.75 + 0.5j, 0.25)
    abar, factor = discretise_bilinear(*as_tensors(-2, 1.0))
    assert (abar.item(), factor.item()) == (0, 0.5)
    abar, factor = discretise_bilinear(*as_tensors(2j, 1.0))
    torch.testing.assert_close(abar.item(), (1 + 1j) / (1 - 1j))
    torch.testing.assert_close(factor.item(), 1 / (1 - 1j))


@given(A=decay_rates, first=step_sizes, second=step_sizes)
def test_two_zoh_steps_equal_one_longer_step(A, first, second):
    """What makes it exact: time can be cut anywhere while the input is held."""
    A, first, second = as_tensors(A, first, second)
    (a1, b1), (a2, b2) = discretise_zoh(A, first), discretise_zoh(A, second)
    abar, factor = discretise_zoh(A, first + second)
    torch.testing.assert_close(a2 * a1, abar)
    torch.testing.assert_close(a2 * b1 + b2, factor)


@pytest.mark.parametrize(
    ("rule", "order"), [(discretise_euler, 2), (discretise_bilinear, 3)]
)
def test_error_of_a_step_shrinks_with_its_order(rule, order):
    def error(delta):
        A, delta = as_tensors(-1 + 2j, delta)
        return (rule(A, delta)[0] - discretise_zoh(A, delta)[0]).abs().item()

    assert error(1e-2) / error(5e-3) == pytest.approx(2**order, rel=0.05)


@pytest.mark.parametrize("rule", [discretise_zoh, discretise_bilinear])
@given(A=decay_rates, delta=st.floats(1e-3, 1e3))
def test_zoh_and_bilinear_are_stable_for_every_step(rule, A, delta):
    abar, _ = rule(*as_tensors(A, delta))
    assert abar.abs() < 1


@given(A=decay_rates, ratio=st.floats(0.01, 3))
def test_euler_is_stable_below_its_bound_only(A, ratio):
    assume(abs(ratio - 1) > 1e-6)
    bound = -2 * A.real / abs(A) ** 2
    abar, _ = discretise_euler(*as_tensors(A, ratio * bound))
    assert (abar.abs() < 1) == (ratio < 1)


def test_zoh_at_rate_zero_is_an_integrator_with_its_gradients():
    """exp(A d) and (exp(A d) - 1)/A at A = 0: 1 and d; slopes in A: d and d^2/2."""
    A = torch.zeros(3, dtype=torch.complex128, requires_grad=True)
    delta = torch.tensor([0.1, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    abar, factor = discretise_zoh(A, delta)
    assert torch.equal(abar, torch.ones_like(abar))
    torch.testing.assert_close(factor, delta.to(factor.dtype))
    slope_A, slope_delta = torch.autograd.grad(factor.real.sum(), (A, delta))
    torch.testing.assert_close(slope_A, (delta**2 / 2).to(slope_A.dtype))
    torch.testing.assert_close(slope_delta, torch.ones_like(delta))
    (slope_A,) = torch.autograd.grad(discretise_zoh(A, delta)[0].real.sum(), A)
    torch.testing.assert_close(slope_A, delta.to(slope_A.dtype))


@pytest.mark.parametrize("A", [-1e-7 + 0j, -1e-7 + 1e-7j, 1e-9j])
def test_zoh_keeps_its_digits_near_rate_zero(A):
    """(exp(z) - 1)/A taken literally loses all of float32 here."""
    A, delta = torch.tensor(A, dtype=torch.complex64), torch.tensor(0.5)
    _, factor = discretise_zoh(A, delta)
    torch.testing.assert_close(factor, torch.tensor(0.5 + 0j), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "rule", [discretise_zoh, discretise_euler, discretise_bilinear]
)
def test_discretise_rules_broadcast_and_accept_real_rates(rule):
    A, delta = torch.tensor([-1.0, -2.0]), torch.rand(5, 1) + 0.1
    abar, factor = rule(A, delta)
    assert abar.shape == factor.shape == (5, 2)
    assert not abar.is_complex()
    same, _ = rule(A.to(torch.complex64), delta)
    torch.testing.assert_close(same.real, abar)


def test_dt_zero_is_not_no_step():
    """softplus(0) = ln 2, so a rate of -1 halves the state."""
    abar = _discretise(torch.zeros(1, 1, 2), torch.tensor([-1, math.pi * 1j]))
    expected = torch.tensor([0.5, complex(math.e) ** (math.log(2) * math.pi * 1j)])
    torch.testing.assert_close(abar.flatten(), expected.to(torch.complex64))


def test_softplus_acts_on_dt_before_the_rate():
    case = random_case(9).double()
    delta = torch.log1p(case.dt.exp())
    torch.testing.assert_close(_discretise(case.dt, case.A), (delta * case.A).exp())
    wrong = torch.exp(-torch.log1p((case.dt * case.A.abs()).exp()))
    assert not torch.allclose(_discretise(case.dt, case.A).abs(), wrong)


# ---------------------------------------------------------------- the oracle


def scan_by_matrix(case: Case, initial_states: torch.Tensor | None = None):
    """y = sum_{s <= t} exp(L(t) - L(s)) (C_t . B_s) x_s, as one T x T matrix."""
    total = (F.softplus(case.dt) * case.A).cumsum(1)
    span = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
    keep = torch.ones(span.shape[-2:]).tril().bool()
    weight = torch.where(keep, span, -torch.inf).exp()
    weight = weight * torch.einsum("bthn,bshn->bhts", case.C_t, case.B_t)
    y = torch.einsum("bhts,bshd->bthd", weight, case.x.to(weight.dtype))
    if initial_states is not None:
        read = case.C_t * total.exp().unsqueeze(-1)
        y = y + torch.einsum("bthn,bhdn->bthd", read, initial_states)
    return y


@given(time=st.integers(1, 40), seed=seeds, complex_x=st.booleans())
def test_naive_scan_is_the_sum_over_the_past(time, seed, complex_x):
    case = random_case(time, seed, complex_x=complex_x).double()
    state = random_state(case, seed)
    y = ssd_naive_complex(*case, initial_states=state)
    assert y.dtype == torch.complex128
    assert relative_error(y, scan_by_matrix(case, state)) < 1e-12


def test_naive_scan_by_hand():
    """Rate -1 at dt = 0 halves: 1, then 1/2 + 2, then 5/4 + 3, read out times i."""
    ones = torch.ones(1, 3, 1, 1, dtype=torch.complex64)
    x = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    A = torch.tensor([-1 + 0j])
    y, final = ssd_naive_complex(
        x, A, ones, 1j * ones, torch.zeros(1, 3, 1), return_final_states=True
    )
    torch.testing.assert_close(y.flatten(), torch.tensor([1j, 2.5j, 4.25j]))
    torch.testing.assert_close(final, torch.tensor(4.25 + 0j).view(1, 1, 1, 1))


@pytest.mark.parametrize("complex_x", [False, True])
def test_naive_scan_keeps_the_dtype_of_its_inputs(complex_x):
    case = random_case(5, complex_x=complex_x)
    y, final = ssd_naive_complex(*case, return_final_states=True)
    assert y.dtype == final.dtype == torch.complex64
    assert y.shape == case.x.shape
    assert relative_error(y, oracle(case)[0]) < 1e-6


def test_naive_gradients_against_finite_differences():
    case = random_case(5, complex_x=True, batch=1, dim=1, states=2).double()
    reset = torch.tensor([[False, False, True, False, False]])
    inputs = (*case.leaves(), random_state(case).requires_grad_())

    def scan(x, A, B_t, C_t, dt, state):
        return ssd_naive_complex(
            *(x, A, B_t, C_t, dt),
            initial_states=state,
            reset=reset,
            return_final_states=True,
        )

    assert torch.autograd.gradcheck(scan, inputs)


# ---------------------------------------------------------------- the contract's four


def assert_chunkwise_matches_naive(time: int, chunk: int, dt: torch.Tensor) -> None:
    """Complex x, A = randn - 1; values against the oracle's real part."""
    g = torch.Generator().manual_seed(1)
    A = complex_normal(2, generator=g) - 1
    shape = (2, time, 2, 4)
    x, B_t, C_t = (complex_normal(*shape, generator=g) for _ in range(3))
    assert (A.real < 0).all()
    naive = ssd_naive_complex(x, A, B_t, C_t, dt)
    y = ssd_complex_chunkwise(x, A, B_t, C_t, dt, chunk_size=chunk)
    assert y.shape == naive.shape == shape
    assert (y.dtype, naive.dtype) == (torch.float32, torch.complex64)
    torch.testing.assert_close(y, naive.real, atol=1e-4, rtol=0)


SIZES = [(16, 4), *((time, 64) for time in (128, 129, 192, 256))]


@pytest.mark.parametrize(("time", "chunk"), SIZES)
def test_chunkwise_matches_naive_complex(time, chunk):
    assert_chunkwise_matches_naive(time, chunk, torch.zeros(2, time, 2))


@pytest.mark.parametrize(("time", "chunk"), SIZES)
def test_chunkwise_matches_naive_time_varying_dt(time, chunk):
    g = torch.Generator().manual_seed(2)
    dt = torch.randn(2, time, 2, generator=g)
    assert_chunkwise_matches_naive(time, chunk, dt)


@pytest.mark.parametrize(("time", "chunk"), [(18, 4), (129, 64), (100, 64)])
def test_chunkwise_handles_uneven_T(time, chunk):
    assert time % chunk
    g = torch.Generator().manual_seed(3)
    dt = torch.randn(2, time, 2, generator=g)
    assert_chunkwise_matches_naive(time, chunk, dt)


@pytest.mark.parametrize("time", [4, 64, 128, 192, 256])
def test_chunkwise_handles_T_equal_to_chunk(time):
    g = torch.Generator().manual_seed(4)
    dt = torch.randn(2, time, 2, generator=g)
    assert_chunkwise_matches_naive(time, time, dt)


# ---------------------------------------------------------------- chunkwise = naive


@given(
    time=lengths,
    chunk=chunk_sizes,
    seed=seeds,
    complex_x=st.booleans(),
    carried=st.booleans(),
    packed=st.booleans(),
)
def test_chunking_never_changes_the_answer(
    time, chunk, seed, complex_x, carried, packed
):
    case = random_case(time, seed, complex_x=complex_x)
    options = random_options(case, seed, carried, packed)
    expected_y, expected_final = oracle(case, **options)
    y, final = ssd_complex_chunkwise(*case, chunk, return_final_states=True, **options)
    assert (y.dtype, final.dtype) == (torch.float32, torch.complex64)
    assert relative_error(y, expected_y.real) < FORWARD_LIMIT
    assert relative_error(final, expected_final) < FORWARD_LIMIT
    if carried:
        options["initial_states"] = in_double(options["initial_states"])
    y, final = ssd_complex_chunkwise(
        *case.double(), chunk, return_final_states=True, **options
    )
    assert (y.dtype, final.dtype) == (torch.float64, torch.complex128)
    assert relative_error(y, expected_y.real) < DOUBLE_LIMIT
    assert relative_error(final, expected_final) < DOUBLE_LIMIT


@given(
    time=lengths,
    chunk=chunk_sizes,
    seed=seeds,
    complex_x=st.booleans(),
    carried=st.booleans(),
    packed=st.booleans(),
)
def test_chunking_never_changes_a_gradient(
    time, chunk, seed, complex_x, carried, packed
):
    """Of x, A, B_t, C_t, dt and initial_states, through outputs and final states."""
    scan = partial(ssd_complex_chunkwise, chunk_size=chunk)
    case = random_case(time, seed, complex_x=complex_x)
    options = random_options(case, seed, carried, packed)
    expected = oracle_gradients(case, **options)
    got = gradients(scan, case, **options)
    for name, error in gradient_errors(got, expected).items():
        assert got[name].dtype == getattr(case, name, case.A).dtype, name
        assert error < GRADIENT_LIMITS[name], name
    if carried:
        options["initial_states"] = in_double(options["initial_states"])
    got = gradients(scan, case.double(), **options)
    for name, error in gradient_errors(got, expected).items():
        assert error < DOUBLE_LIMIT, name


@given(
    time=lengths,
    chunk=chunk_sizes,
    seed=seeds,
    A=st.tuples(
        *[st.builds(complex, st.floats(-16, -1e-4), st.floats(-math.pi, math.pi))] * 2
    ),
    dt=st.tuples(st.floats(-30, 30), st.floats(-30, 30)),
)
def test_chunking_holds_over_the_whole_range(time, chunk, seed, A, dt):
    case = random_case(time, seed)
    low, high = sorted(dt)
    spread = low + (high - low) * torch.sigmoid(case.dt)
    case = case._replace(A=torch.tensor(A, dtype=torch.complex64), dt=spread)
    expected_y, expected_final = oracle(case)
    y, final = ssd_complex_chunkwise(*case, chunk, return_final_states=True)
    assert relative_error(y, expected_y.real) < FORWARD_LIMIT
    assert relative_error(final, expected_final) < FORWARD_LIMIT
    scan = partial(ssd_complex_chunkwise, chunk_size=chunk)
    for name, got in gradients(scan, case).items():
        assert torch.isfinite(torch.view_as_real(got + 0j)).all(), name


def test_chunkwise_gradients_against_finite_differences():
    case = random_case(5, complex_x=True, batch=1, dim=1, states=2).double()
    reset = torch.tensor([[False, False, False, True, False]])
    inputs = (*case.leaves(), random_state(case).requires_grad_())

    def scan(x, A, B_t, C_t, dt, state):
        return ssd_complex_chunkwise(
            *(x, A, B_t, C_t, dt, 2),
            initial_states=state,
            reset=reset,
            return_final_states=True,
        )

    assert torch.autograd.gradcheck(scan, inputs)


# ------------------------------------------------------- mistakes these tests can see


def textbook_scan(
    case: Case, chunk: int, mistake: str = "", initial_states=None
) -> torch.Tensor:
    """The chunkwise algorithm spelled out, with one mistake on request."""
    split = [z.unflatten(1, (-1, chunk)) for z in (case.x, case.B_t, case.C_t)]
    x, B, C = (z.transpose(2, 3) for z in split)  # (B, nc, H, C, .)
    log = (F.softplus(case.dt) * case.A).unflatten(1, (-1, chunk)).transpose(2, 3)
    total = log.cumsum(-1)
    if mistake == "exclusive cumulative sum":
        total = total - log
    last = log.sum(-1)
    keep = torch.ones(chunk, chunk).tril(-1 if mistake == "strict triangle" else 0)
    L = (total[..., :, None] - total[..., None, :]).exp() * keep
    y = ((C @ B.mT) * L) @ x.to(B.dtype)
    S = x.to(B.dtype).mT @ ((last[..., None] - total).exp()[..., None] * B)
    CD = F.pad(last.cumsum(1), (0, 0, 1, 0))  # CD[z + 1] sums chunks 0..z
    if initial_states is None:
        initial_states = torch.zeros_like(S[:, 0])
    for z in range(x.shape[1]):
        start, shift = {"decays through z": (z + 1, 1), "shifted list": (z + 1, 2)}.get(
            mistake, (z, 1)
        )
        first = CD[:, 1] if mistake == "shifted list" else CD[:, 0]
        G = (CD[:, start] - first).exp()[..., None, None] * initial_states
        for c in range(z):
            G = G + (CD[:, start] - CD[:, c + shift]).exp()[..., None, None] * S[:, c]
        y[:, z] += (C[:, z] * total[:, z].exp()[..., None]) @ G.mT
    return y.transpose(2, 3).flatten(1, 2).real


def textbook_error(mistake: str, dt: torch.Tensor) -> float:
    case = random_case(32, 5, complex_x=True).double()._replace(dt=dt.double())
    state = random_state(case)
    expected, _ = oracle(case, state)
    return relative_error(textbook_scan(case, 8, mistake, state), expected.real)


MISTAKES = [
    "decays through z",
    "shifted list",
    "strict triangle",
    "exclusive cumulative sum",
]


def test_the_textbook_without_a_mistake_passes():
    assert textbook_error("", random_case(32, 5).dt) < DOUBLE_LIMIT


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_classic_mistake_fails_the_comparison(mistake):
    assert textbook_error(mistake, random_case(32, 5).dt) > 100 * FORWARD_LIMIT


def test_the_shifted_window_is_invisible_when_every_chunk_decays_alike():
    """Why no comparison here rests on dt = 0 alone."""
    constant = torch.zeros(2, 32, 2)
    assert textbook_error("shifted list", constant) < DOUBLE_LIMIT
    assert textbook_error("decays through z", constant) > 100 * FORWARD_LIMIT


def test_padding_dt_instead_of_the_log_decay_spoils_the_final_state():
    """The comparison of final states sees a padded step that still decays."""
    case = random_case(18, 3)
    _, expected = oracle(case)
    _, final = ssd_complex_chunkwise(*case, 4, return_final_states=True)
    assert relative_error(final, expected) < FORWARD_LIMIT
    padded = Case(
        *(
            z if z is case.A else F.pad(z, pad)
            for z, pad in zip(
                case, [(0, 0, 0, 0, 0, 2)] * 4 + [(0, 0, 0, 2)], strict=True
            )
        )
    )
    _, decayed = ssd_complex_chunkwise(*padded, 4, return_final_states=True)
    assert relative_error(decayed, expected) > 100 * FORWARD_LIMIT


# ---------------------------------------------------------------- numerical rules


def test_select_before_exp():
    """Rate -1, dt = 1.5, one chunk of 256: a mask after exp is inf * 0 = NaN."""
    case = random_case(256, 1)._replace(A=torch.tensor([-1 + 0j, -1 + 0j]))
    case = case._replace(dt=torch.full_like(case.dt, 1.5))
    y, final = ssd_complex_chunkwise(*case, 256, return_final_states=True)
    expected_y, expected_final = oracle(case)
    assert relative_error(y, expected_y.real) < FORWARD_LIMIT
    assert relative_error(final, expected_final) < FORWARD_LIMIT
    expected = oracle_gradients(case)
    for name, got in gradients(
        partial(SCANS["chunkwise"], chunk_size=256), case
    ).items():
        assert relative_error(got, expected[name]) < GRADIENT_LIMITS[name], name


def test_a_mask_after_exp_is_not_a_number():
    log_decay = torch.full((256,), -1.0) * F.softplus(torch.tensor(1.5))
    total = log_decay.cumsum(0)
    wrong = (total[:, None] - total).exp() * torch.ones(256, 256).tril()
    assert not torch.isfinite(wrong).all()
    log_decay = log_decay.double().requires_grad_()
    right = causal_decay(log_decay, torch.float32)
    assert torch.isfinite(right).all()
    right.sum().backward()
    assert torch.isfinite(log_decay.grad).all()


@given(steps=st.integers(1, 80), seed=seeds)
def test_causal_decay_multiplies_the_steps_between(steps, seed):
    g = torch.Generator().manual_seed(seed)
    log_decay = -torch.rand(steps, generator=g, dtype=torch.float64)
    D = causal_decay(log_decay, torch.float64)
    assert torch.equal(D.diagonal(), torch.ones(steps, dtype=torch.float64))
    assert torch.equal(D, D.tril())
    if steps > 1:
        torch.testing.assert_close(D.diagonal(-1), log_decay[1:].exp())
        row = log_decay.exp()[1:].flip(0).cumprod(0).flip(0)
        torch.testing.assert_close(D[-1, :-1], row)


def test_states_pass_between_chunks_without_losing_digits():
    """4096 steps at -0.001 + 3i: a cumulative angle of thousands in float32 is lost."""
    case = random_case(4096, 8, batch=1, heads=1)
    case = case._replace(A=torch.tensor([-0.001 + 3j]))
    expected_y, expected_final = oracle(case)
    y, final = ssd_complex_chunkwise(*case, return_final_states=True)
    error = relative_error(y, expected_y.real)
    assert error < 2e-6
    assert relative_error(final, expected_final) < 2e-6
    assert relative_error(textbook_scan(case, 64), expected_y.real) > 10 * error


def test_a_prefix_is_computed_the_same_within_a_longer_sequence():
    case = random_case(4096, 8, batch=1)._replace(A=torch.tensor([-1e-3 + 3j, -1e-4]))
    whole, prefix = (ssd_complex_chunkwise(*case.cut(0, t)) for t in (4096, 1024))
    assert relative_error(whole[:, :1024], prefix) < 1e-6


@pytest.mark.parametrize(("seed", "complex_x"), [(0, False), (1, True)])
def test_error_bounds_on_the_reference_distribution(seed, complex_x):
    case = random_case(2048, seed, batch=1, heads=4, dim=8, complex_x=complex_x)
    options = random_options(case, seed, carried=True, packed=False)
    expected_y, expected_final = oracle(case, **options)
    y, final = ssd_complex_chunkwise(*case, return_final_states=True, **options)
    assert relative_error(y, expected_y.real) <= FORWARD_LIMIT
    assert relative_error(final, expected_final) <= FORWARD_LIMIT
    expected = oracle_gradients(case, **options)
    for name, got in gradients(ssd_complex_chunkwise, case, **options).items():
        assert relative_error(got, expected[name]) <= GRADIENT_LIMITS[name], name


def lengths_and_steps() -> list:
    """Every length with every kind of dt; three of the longest are slow."""
    return [
        pytest.param(time, dt, marks=[pytest.mark.slow] * (time == 8192 and slow))
        for time in (1, 63, 64, 65, 127, 128, 129, 2048, 8192)
        for dt, slow in {"uniform": 0, "low": 1, "high": 1, "switching": 1}.items()
    ]


@pytest.mark.parametrize(("time", "dt"), lengths_and_steps())
def test_whole_range_is_finite_and_within_the_forward_bound(time, dt):
    case = whole_range_case(time, time, dt=dt)
    with torch.no_grad():
        expected_y, expected_final = oracle(case)
    y, final = ssd_complex_chunkwise(*case, return_final_states=True)
    assert relative_error(y, expected_y.real) <= FORWARD_LIMIT
    assert relative_error(final, expected_final) <= FORWARD_LIMIT
    for name, got in gradients(ssd_complex_chunkwise, case).items():
        assert torch.isfinite(torch.view_as_real(got + 0j)).all(), name


class SeenTensors(TorchDispatchMode):
    """Every tensor that an operator returns, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for z in tree_leaves(out):
            if isinstance(z, torch.Tensor):
                self.seen.append((z.dtype, tuple(z.shape)))
        return out


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_a_real_x_is_never_promoted(complex_x):
    """No complex tensor of x's size appears, forward or backward, unless x is one."""
    case = random_case(21, complex_x=complex_x, dim=5, states=3)
    with SeenTensors() as mode:
        gradients(partial(ssd_complex_chunkwise, chunk_size=7), case)
    promoted = [
        shape for dtype, shape in mode.seen if dtype.is_complex and shape[-2:] == (7, 5)
    ]
    assert bool(promoted) == complex_x


def test_no_intermediate_has_five_indices():
    """Nothing larger than the causal matrices or two reals per state coordinate."""
    case = random_case(512, batch=1, dim=16, states=16)
    with SeenTensors() as mode:
        gradients(partial(ssd_complex_chunkwise, chunk_size=16), case)
    assert max(math.prod(shape) for _, shape in mode.seen) <= 2 * 512 * 2 * 16


@both_scans
def test_a_number_that_is_not_finite_propagates(scan):
    for bad in (math.nan, math.inf):
        case = random_case(20)
        case.x[0, 5, 1, 2] = bad
        y, final = scan(*case, return_final_states=True)
        assert not torch.isfinite(y.real[0, 5:, 1, 2]).any()
        assert not torch.isfinite(torch.view_as_real(final[0, 1, 2])).any()


@both_scans
def test_inputs_are_left_as_they_were(scan):
    case = random_case(20)
    options = random_options(case, 0, carried=True, packed=True)
    copies = [z.clone() for z in (*case, *options.values())]
    scan(*case, return_final_states=True, **options)
    for z, copy in zip((*case, *options.values()), copies, strict=True):
        assert torch.equal(z, copy)


@both_scans
def test_autocast_does_not_reach_the_scan(scan):
    case = random_case(40)
    plain = scan(*case, return_final_states=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = scan(*case, return_final_states=True)
    for z, same in zip(plain, cast, strict=True):
        assert same.dtype == z.dtype
        assert torch.equal(same, z)


# ---------------------------------------------------------------- causality, batch


def with_another_future(case: Case, step: int) -> Case:
    """Other values at every time after step, the same A."""
    other = random_case(case.x.shape[1], 99)
    return Case(
        *(
            z
            if z is case.A
            else torch.cat([z[:, : step + 1], 5 * new[:, step + 1 :]], 1)
            for z, new in zip(case, other, strict=True)
        )
    )


@given(time=st.integers(2, 130), seed=seeds, data=st.data())
def test_the_naive_past_does_not_depend_on_the_future_in_any_bit(time, seed, data):
    step = data.draw(st.integers(0, time - 2))
    case = random_case(time, seed)
    y = ssd_naive_complex(*case)
    changed = ssd_naive_complex(*with_another_future(case, step))
    assert torch.equal(y[:, : step + 1], changed[:, : step + 1])
    assert not torch.equal(y[:, step + 1], changed[:, step + 1])


@given(time=st.integers(2, 130), chunk=chunk_sizes, seed=seeds, data=st.data())
def test_the_chunkwise_past_does_not_depend_on_the_future(time, chunk, seed, data):
    step = data.draw(st.integers(0, time - 2))
    case = random_case(time, seed)
    y = ssd_complex_chunkwise(*case, chunk)
    changed = ssd_complex_chunkwise(*with_another_future(case, step), chunk)
    assert relative_error(changed[:, : step + 1], y[:, : step + 1]) < 1e-6
    leaves = case.leaves()
    y = ssd_complex_chunkwise(*leaves, chunk)
    y[:, : step + 1].sum().backward()
    for name, z in leaves._asdict().items():
        assert name == "A" or not z.grad[:, step + 1 :].any(), name


@both_scans
@given(time=st.integers(1, 80), seed=seeds)
def test_a_batch_element_does_not_see_its_neighbors(scan, time, seed):
    case = random_case(time, seed, batch=3)
    whole, whole_state = scan(*case, return_final_states=True)
    for b in range(3):
        row = Case(*(z if z is case.A else z[b : b + 1] for z in case))
        alone, state = scan(*row, return_final_states=True)
        assert relative_error(whole[b : b + 1], alone) < 1e-5
        assert relative_error(whole_state[b : b + 1], state) < 1e-5


@both_scans
def test_a_head_does_not_see_the_others(scan):
    case = random_case(50, heads=3)
    whole = scan(*case)
    for h in range(3):
        x, A, B_t, C_t, dt = case
        head = slice(h, h + 1)
        alone = scan(
            x[:, :, head], A[head], B_t[:, :, head], C_t[:, :, head], dt[:, :, head]
        )
        assert relative_error(whole[:, :, head], alone) < 1e-6


# ---------------------------------------------------------------- states in and out


@both_scans
@given(time=st.integers(2, 130), seed=seeds, data=st.data())
def test_a_sequence_cut_anywhere_continues(scan, time, seed, data):
    step = data.draw(st.integers(1, time - 1))
    case = random_case(time, seed)
    state = random_state(case, seed)
    expected_y, expected_final = oracle(case, state)
    first, state = scan(
        *case.cut(0, step), initial_states=state, return_final_states=True
    )
    second, final = scan(
        *case.cut(step, time), initial_states=state, return_final_states=True
    )
    y = torch.cat([first, second], 1).real
    assert relative_error(y, expected_y.real) < FORWARD_LIMIT
    assert relative_error(final, expected_final) < FORWARD_LIMIT


@both_scans
def test_a_gradient_flows_through_the_handed_over_state(scan):
    def in_two_parts(x, A, B_t, C_t, dt, *, initial_states, reset, **options):
        case = Case(x, A, B_t, C_t, dt)
        first, state = scan(*case.cut(0, 33), initial_states=initial_states, **options)
        second, final = scan(*case.cut(33, 75), initial_states=state, **options)
        return torch.cat([first, second], 1), final

    case = random_case(75, 6).double()
    state = random_state(case)
    expected = oracle_gradients(case, state)
    for name, got in gradients(in_two_parts, case, state).items():
        assert relative_error(got, expected[name]) < DOUBLE_LIMIT, name


@both_scans
def test_no_initial_state_is_a_state_of_zeros(scan):
    case = random_case(30)
    zeros = torch.zeros_like(random_state(case))
    assert torch.equal(scan(*case), scan(*case, initial_states=zeros))


# ---------------------------------------------------------------- packed documents


@both_scans
@given(
    documents=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    seed=seeds,
    at_zero=st.booleans(),
    carried=st.booleans(),
)
def test_packed_documents_equal_each_alone(scan, documents, seed, at_zero, carried):
    """A reset at position 0 also drops the initial states."""
    ends = torch.tensor(documents).cumsum(0).tolist()
    case = random_case(ends[-1], seed)
    state = random_state(case, seed) if carried else None
    reset = torch.zeros(2, ends[-1], dtype=torch.bool)
    reset[:, ends[:-1]] = True
    reset[:, 0] = at_zero
    y, final = scan(*case, initial_states=state, reset=reset, return_final_states=True)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        arriving = state if start == 0 and not at_zero else None
        alone, last = oracle(case.cut(start, end), arriving)
        assert relative_error(y[:, start:end].real, alone.real) < FORWARD_LIMIT
    assert relative_error(final, last) < FORWARD_LIMIT


class TestDocuments:
    """Documents at 0, 20 and 41 of 50 steps, in chunks of 16."""

    @both_scans
    @pytest.mark.parametrize(("place", "steps"), SPOILED.values(), ids=SPOILED)
    def test_a_number_that_is_none_stays_in_its_document(self, scan, place, steps):
        case = random_case(50)
        inputs = case._asdict() | {"initial_states": random_state(case)}
        spoil(inputs, place)
        reset = torch.zeros(2, 50, dtype=torch.bool)
        reset[:, [20, 41]] = True
        y, final = scan(**inputs, reset=reset, return_final_states=True)
        whole, last = scan(
            **case._asdict(),
            initial_states=random_state(case),
            reset=reset,
            return_final_states=True,
        )
        assert spoiled_steps(y) == list(steps)
        assert not last.isnan().any() and last.isfinite().all()
        assert final.isfinite().all() == (49 not in steps)
        sound = [t for t in range(50) if t not in steps]
        assert relative_error(y[:, sound].real, whole[:, sound].real) < 1e-6

    @both_scans
    def test_large_numbers_are_numbers(self, scan):
        """Their sum is not."""
        case = random_case(50)
        case.x[:, 3], case.B_t[:, 3] = 3e38, 1e-38
        reset = torch.zeros(2, 50, dtype=torch.bool)
        reset[:, 20] = True
        assert scan(*case, reset=reset).isfinite().all()

    def test_an_infinite_step_spoils_no_other_document(self):
        """The loop forgets everything in it; the angles of a chunk have no such sum."""
        case = random_case(50)
        case.dt[:, 22] = torch.inf
        reset = torch.zeros(2, 50, dtype=torch.bool)
        reset[:, [20, 41]] = True
        y = ssd_complex_chunkwise(*case, 16, reset=reset)
        assert spoiled_steps(y) == list(range(22, 41))

    def test_no_gradient_comes_from_what_is_no_number(self):
        case = random_case(50).leaves()
        x = case.x.detach().clone()
        x[:, 18] = torch.nan
        x.requires_grad_()
        reset = torch.zeros(2, 50, dtype=torch.bool)
        reset[:, 20] = True
        y = ssd_complex_chunkwise(x, *case[1:], 16, reset=reset)
        y[:, 20:].sum().backward()
        for z in (x, case.B_t, case.C_t, case.dt, case.A):
            assert z.grad.isfinite().all()
        assert x.grad[:, 20:].any() and not x.grad[:, :20].any()


@both_scans
@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
def test_no_gradient_leaks_into_an_earlier_document(scan, double):
    """Exactly zero, of dt as of x, B_t, C_t and the initial states."""
    case = random_case(50, 4)
    case = (case.double() if double else case).leaves()
    state = random_state(case).requires_grad_()
    reset = torch.zeros(2, 50, dtype=torch.bool)
    reset[:, 23] = True
    y, final = scan(*case, initial_states=state, reset=reset, return_final_states=True)
    (y.real[:, 23:].sum() + final.abs().sum()).backward()
    assert not state.grad.any()
    assert not case.dt.grad[:, 23].any()  # no step leads into a document
    for z in (case.x, case.B_t, case.C_t, case.dt):
        assert not z.grad[:, :23].any()
        assert z.grad[:, 23:].any()


@both_scans
def test_each_row_resets_on_its_own(scan):
    case = random_case(40)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[1, 17] = True
    y, plain = scan(*case, reset=reset), scan(*case)
    assert relative_error(y[0], plain[0]) < 1e-6
    assert relative_error(y[1, :17], plain[1, :17]) < 1e-6
    assert relative_error(y[1, 17:], plain[1, 17:]) > 1e-2


@both_scans
def test_a_reset_everywhere_leaves_no_memory(scan):
    """y_t = (C_t . B_t) x_t, whatever the initial states hold."""
    case = random_case(20)
    reset = torch.ones(2, 20, dtype=torch.bool)
    y = scan(*case, initial_states=1e6 * random_state(case), reset=reset)
    expected = (case.C_t * case.B_t).sum(-1, keepdim=True) * case.x
    assert relative_error(y.real, expected.real) < 1e-5


# ---------------------------------------------------------------- inside a chunk


def chunk_inputs(complex_x: bool, dtype: torch.dtype = torch.complex64) -> tuple:
    g = torch.Generator().manual_seed(0)
    lead = (2, 3, 7, 2)  # B, nc, C, H
    Bc, Cc = (complex_normal(*lead, 4, generator=g) for _ in range(2))
    Xc = complex_normal(*lead, 5, generator=g)
    A_log = complex_normal(*lead, generator=g)
    A_log = torch.complex(-A_log.real.abs(), A_log.imag)
    decay_states = complex_normal(*lead, generator=g)  # not those of A_log, on purpose
    inputs = (Bc, Cc, Xc if complex_x else Xc.real, A_log, decay_states)
    single = {torch.complex64: lambda z: z, torch.complex128: in_double}
    return tuple(single[dtype](z).contiguous() for z in inputs)


def chunks_by_loop(Bc, Cc, Xc, A_log, decay_states):
    """Y_diag by the recurrence from a zero state, and the weighted sum of writes."""
    h = torch.zeros(2, 3, 2, 4, 5, dtype=torch.complex128)
    Y_diag = []
    for t in range(7):
        write = Bc[:, :, t, :, :, None] * Xc[:, :, t, :, None]
        h = A_log[:, :, t, :, None, None].exp() * h + write
        Y_diag.append(torch.einsum("bchn,bchnp->bchp", Cc[:, :, t], h))
    state = torch.einsum("bclh,bclhn,bclhp->bchpn", decay_states, Bc, Xc.to(Bc.dtype))
    return torch.stack(Y_diag, 2), state


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_per_chunk_values_shapes_and_dtypes(complex_x):
    inputs = chunk_inputs(complex_x)
    Y_diag, state = per_chunk_ssd_pytorch(*inputs)
    assert Y_diag.dtype == (torch.complex64 if complex_x else torch.float32)
    assert state.dtype == torch.complex64
    assert (Y_diag.shape, state.shape) == ((2, 3, 7, 2, 5), (2, 3, 2, 5, 4))
    expected_Y, expected_state = chunks_by_loop(*map(in_double, inputs))
    expected_Y = expected_Y if complex_x else expected_Y.real
    assert relative_error(Y_diag, expected_Y) < 1e-6
    assert relative_error(state, expected_state) < 1e-6


def test_per_chunk_takes_decay_states_as_given():
    """The state does not depend on A_log, nor Y_diag on decay_states."""
    inputs = [z.requires_grad_() for z in chunk_inputs(complex_x=True)]
    Y_diag, state = per_chunk_ssd_pytorch(*inputs)
    for out, used, unused in ((state, 4, 3), (Y_diag, 3, 4)):
        grads = torch.autograd.grad(out.abs().sum(), inputs, allow_unused=True)
        assert grads[used].any()
        assert grads[unused] is None or not grads[unused].any()


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_per_chunk_gradients_against_finite_differences(complex_x):
    inputs = [z[:1, :2, :3, :1] for z in chunk_inputs(complex_x, torch.complex128)]
    inputs = [z.detach().requires_grad_() for z in inputs]
    assert torch.autograd.gradcheck(per_chunk_ssd_pytorch, inputs)


@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_per_chunk_documents_do_not_meet(complex_x):
    """Each is as if alone; the log decay of a step that starts one is not used."""
    inputs = chunk_inputs(complex_x, torch.complex128)
    documents = torch.zeros(2, 3, 7, 2, dtype=torch.int32)
    documents[:, :, 2:, 0] = 1
    documents[:, :, 3:, 0] = 2  # of one step, before it
    documents[0, 1, :, 1] = 1  # from the first position on
    Y_diag, state = per_chunk_ssd_pytorch(*inputs, documents)
    for number in (0, 1, 2):
        here = documents == number
        Bc, Cc, Xc, A_log, decay_states = inputs
        alone = (Bc * here.unsqueeze(-1), Cc, Xc, A_log, decay_states)
        expected, _ = per_chunk_ssd_pytorch(*alone)
        assert torch.allclose(Y_diag[here], expected[here])
    assert torch.equal(state, per_chunk_ssd_pytorch(*inputs)[1])
    starts = documents.diff(dim=2, prepend=torch.zeros_like(documents[:, :, :1])) != 0
    A_log = inputs[3].masked_fill(starts, torch.nan).requires_grad_()
    changed = (*inputs[:3], A_log, inputs[4])
    assert torch.equal(per_chunk_ssd_pytorch(*changed, documents)[0], Y_diag)
    (grad,) = torch.autograd.grad(
        per_chunk_ssd_pytorch(*changed, documents)[0].abs().sum(), A_log
    )
    assert grad.isfinite().all() and not grad[starts].any()
    inputs = [z[:1, :2, :4, :1].detach().requires_grad_() for z in inputs]
    documents = documents[:1, :2, :4, :1]
    assert torch.autograd.gradcheck(per_chunk_ssd_pytorch, (*inputs, documents))


# ---------------------------------------------------------------- errors


def small() -> dict[str, torch.Tensor]:
    """B=2, T=5, H=2, D=4, N=3."""
    return random_case(5, states=3)._asdict()


def nothing() -> dict[str, torch.Tensor]:
    return {k: z if k == "A" else z[:, :0] for k, z in small().items()}


WRONG_VALUES = {
    "x with three axes": ({"x": torch.zeros(2, 5, 8)}, "x (2, 5, 8) (B, T, H, D)"),
    "no steps": (nothing(), "x (2, 0, 2, 4) T 1"),
    "A of one head": ({"A": torch.zeros(1) - 1 + 0j}, "A (1,) (2,)"),
    "A without an axis": ({"A": torch.tensor(-1 + 0j)}, "A () (2,)"),
    "A per step": ({"A": torch.zeros(5, 2) - 1 + 0j}, "A (5, 2) (2,)"),
    "B_t too short": ({"B_t": small()["B_t"][:, :4]}, "B_t (2, 4, 2, 3) (2, 5, 2, 3)"),
    "C_t of other states": (
        {"C_t": small()["C_t"][..., :2]},
        "C_t (2, 5, 2, 2) (2, 5, 2, 3)",
    ),
    "C_t of one head": ({"C_t": small()["C_t"][:, :, :1]}, "C_t (2, 5, 1, 3)"),
    "dt without heads": ({"dt": torch.zeros(2, 5)}, "dt (2, 5) (2, 5, 2)"),
    "dt of other batch": ({"dt": torch.zeros(1, 5, 2)}, "dt (1, 5, 2) (2, 5, 2)"),
    "states with N before D": (
        {"initial_states": torch.zeros(2, 2, 3, 4) + 0j},
        "initial_states (2, 2, 3, 4) (2, 2, 4, 3)",
    ),
    "reset per sequence": (
        {"reset": torch.zeros(2, dtype=torch.bool)},
        "reset (2,) (2, 5)",
    ),
    "A on another device": ({"A": small()["A"].to("meta")}, "A meta cpu"),
    "reset on another device": (
        {"reset": torch.zeros(2, 5, dtype=torch.bool, device="meta")},
        "reset meta cpu",
    ),
}

WRONG_DTYPES = {
    "complex dt": ({"dt": small()["dt"] + 0j}, "dt complex64 real"),
    "integer dt": ({"dt": torch.zeros(2, 5, 2, dtype=torch.int64)}, "dt int64"),
    "integer x": ({"x": torch.zeros(2, 5, 2, 4, dtype=torch.int32)}, "x int32"),
    "real A": ({"A": small()["A"].real}, "A float32 complex"),
    "real B_t": ({"B_t": small()["B_t"].real}, "B_t float32 complex"),
    "real C_t": ({"C_t": small()["C_t"].real}, "C_t float32 complex"),
    "real states": (
        {"initial_states": torch.zeros(2, 2, 4, 3)},
        "initial_states float32 complex",
    ),
    "half x": ({"x": small()["x"].half()}, "x float16"),
    "bfloat16 dt": ({"dt": small()["dt"].bfloat16()}, "dt bfloat16"),
    "double dt": ({"dt": small()["dt"].double()}, "dt float64 x float32"),
    "double A": ({"A": in_double(small()["A"])}, "A complex128 x float32"),
    "single states with double inputs": (
        {**random_case(5, states=3).double()._asdict()}
        | {"initial_states": torch.zeros(2, 2, 4, 3) + 0j},
        "initial_states complex64 x float64",
    ),
    "integer reset": (
        {"reset": torch.zeros(2, 5, dtype=torch.int64)},
        "reset int64 bool",
    ),
}


def assert_names(error: pytest.ExceptionInfo, words: str) -> None:
    """One line, opening with the argument's name, holding what was got and wanted."""
    message = str(error.value)
    assert "\n" not in message
    name, *rest = words.split(" ", 1)
    assert message.startswith(f"{name} "), message
    for piece in " ".join(rest).replace(") ", ")|").split("|"):
        for part in [piece] if piece.startswith("(") else piece.split():
            assert part in message, (part, message)


@pytest.mark.bad_input
@both_scans
@pytest.mark.parametrize("change", WRONG_VALUES.values(), ids=WRONG_VALUES.keys())
def test_wrong_shapes_and_devices_are_refused(scan, change):
    values, words = change
    with pytest.raises(ValueError) as error:
        scan(**(small() | values))
    assert_names(error, words)


@pytest.mark.bad_input
@both_scans
@pytest.mark.parametrize("change", WRONG_DTYPES.values(), ids=WRONG_DTYPES.keys())
def test_wrong_dtypes_are_refused(scan, change):
    values, words = change
    with pytest.raises(TypeError) as error:
        scan(**(small() | values))
    assert_names(error, words)


@pytest.mark.bad_input
@both_scans
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_half_precision_is_refused(scan):
    with pytest.raises(TypeError, match=r"^A is torch\.complex32; .*complex64"):
        scan(**small() | {"A": small()["A"].to(torch.complex32)})


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"chunk_size": 0}, "chunk_size 0 1"),
        ({"chunk_size": -64}, "chunk_size -64 1"),
        ({"ssd_dispatch": "cuda"}, "ssd_dispatch 'cuda' pytorch triton fused"),
        ({"precision": "tf32"}, "precision 'tf32' None 'ieee'"),
        ({"precision": "bf16"}, "precision 'bf16' None 'ieee'"),
        ({"precision": "float32"}, "precision 'float32' None 'ieee'"),
        (
            {"ssd_dispatch": "triton", "precision": "bf16"},
            "precision 'bf16' None 'ieee' 'tf32'",
        ),
        (
            {"ssd_dispatch": "fused", "precision": "fp16"},
            "precision 'fp16' None 'ieee' 'tf32' 'bf16'",
        ),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(option, words):
    with pytest.raises(ValueError) as error:
        ssd_complex_chunkwise(**small(), **option)
    assert_names(error, words)


def test_precision_ieee_is_the_default():
    case = random_case(20)
    expected = ssd_complex_chunkwise(*case)
    assert torch.equal(ssd_complex_chunkwise(*case, precision="ieee"), expected)
    assert torch.equal(ssd_complex_chunkwise(*case, precision=None), expected)


@pytest.mark.parametrize("dispatch", ["triton", "fused"])
def test_a_kernel_that_is_not_there_is_an_import_error(dispatch, monkeypatch):
    """The function itself never falls back; the message says what runs instead."""
    monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
    with pytest.raises(ImportError, match=r"triton.*ssd_dispatch='pytorch'"):
        ssd_complex_chunkwise(**small(), ssd_dispatch=dispatch)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.gate
@pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
def test_error_bounds_hold_on_a_gpu(complex_x):
    case = random_case(2048, batch=1, heads=4, dim=8, complex_x=complex_x)
    options = random_options(case, 0, carried=True, packed=True)
    expected = oracle_gradients(case, **options)
    expected_y, expected_final = oracle(case, **options)
    case = Case(*(z.cuda() for z in case))
    options = {name: z.cuda() for name, z in options.items()}
    y, final = ssd_complex_chunkwise(*case, return_final_states=True, **options)
    assert relative_error(y.cpu(), expected_y.real) <= FORWARD_LIMIT
    assert relative_error(final.cpu(), expected_final) <= FORWARD_LIMIT
    gradient_case = random_case(2048, batch=1, heads=4, dim=8, complex_x=complex_x)
    scan = on_gpu(ssd_complex_chunkwise)
    options = random_options(gradient_case, 0, carried=True, packed=True)
    for name, got in gradients(scan, gradient_case, **options).items():
        assert relative_error(got, expected[name]) <= GRADIENT_LIMITS[name], name


def on_gpu(scan):
    """The scan run on the GPU, its inputs and results on the CPU."""

    def moved(**inputs):
        inputs = {
            name: z.cuda() if isinstance(z, torch.Tensor) else z
            for name, z in inputs.items()
        }
        return tuple(z.cpu() for z in scan(**inputs))

    return moved
