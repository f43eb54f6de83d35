"""The fused kernels: values, gradients, refusals, and two operators for the compiler.

Without a GPU the kernels run in Triton's interpreter, on one they are compiled; the
class at the end runs only there. Expected values come from the naive scan in
complex128, on the numbers that the kernels read.
"""

from __future__ import annotations

import math
import warnings
from functools import partial

import kernel_cases
import pytest
import torch
from cases import (
    SPOILED,
    Case,
    in_double,
    random_case,
    random_state,
    relative_error,
    spoil,
    spoiled_steps,
    whole_range_case,
)
from kernel_cases import (
    COMPILED,
    DEVICE,
    SMALL,
    TOO_LARGE,
    assert_fell_back,
    functional,
    kernel_that,
    needs_triton,
    on_device,
    raises,
    rounded,
    run_python,
    small_model,
    small_tokens,
    wide_case,
)
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from mamba3lite.models import ssd_fused as module
from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import (
    KernelUnavailable,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)
from mamba3lite.models.ssd_fused import _check_fused_dims, ssd_fused
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig

pytestmark = pytest.mark.usefixtures("full_precision")

# Relative by norm: y, the states and their gradients and those of x, B and C; then the
# gradient of dt; then that of A. The oracle reads the same rounded inputs.
TABLE = {
    "ieee": (2e-5, 1e-4, 1e-3),
    "tf32": (1e-3, 5e-3, 1e-2),
    "bf16": (5e-3, 1e-2, 3e-2),
}
# In bf16 mode the projection is bfloat16 too, and with it y and its own gradient.
DTYPES = {"ieee": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Where a GPU rounds what it stores in bfloat16, the interpreter cuts.
SLACK = {"ieee": 1, "tf32": 1, "bf16": 1 if COMPILED else 2}
every_precision = pytest.mark.parametrize("precision", TABLE)

PARALLEL, WALKING = 10**9, 0  # for _WALK_FROM, in sequences times heads


def columns(case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    """The output of `in_proj` that holds a case."""
    x, _, B_t, C_t, dt = case
    parts = (x, B_t.real, B_t.imag, C_t.real, C_t.imag, dt.unsqueeze(-1))
    return torch.cat([z.flatten(2) for z in parts], dim=-1).to(dtype)


def sizes(case: Case) -> dict[str, int]:
    return {
        "n_heads": case.x.shape[2],
        "head_dim": case.x.shape[3],
        "state_dim": case.B_t.shape[3],
    }


def fused(x, A, B_t, C_t, dt, *, dtype=torch.float32, chunk_size=16, **options):
    """`ssd_fused` with the arguments of a scan, its projection rounded to dtype."""
    case = Case(x, A, B_t, C_t, dt)
    return ssd_fused(
        columns(case, dtype), A, **sizes(case), chunk_size=chunk_size, **options
    )


def as_read(case: Case, dtype: torch.dtype) -> Case:
    """The numbers that the kernels find in a projection of dtype."""
    return Case(*(z if z is case.A else rounded(z, dtype) for z in case))


def outcome(scan, case: Case, initial_states: Tensor | None = None, **options) -> dict:
    """y, the final states, and the gradients of one functional of both."""
    inputs = case.leaves()._asdict()
    if initial_states is not None:
        inputs["initial_states"] = initial_states.detach().clone().requires_grad_()
    y, final = scan(**inputs, return_final_states=True, **options)
    y = y.real
    grads = torch.autograd.grad(functional((y, final)), inputs.values())
    return {"y": y.detach(), "final": final.detach()} | dict(
        zip(inputs, grads, strict=True)
    )


def oracle(case: Case, initial_states: Tensor | None = None, **options) -> dict:
    """The same of the recurrence, in complex128."""
    if initial_states is not None:
        initial_states = in_double(initial_states)
    return outcome(ssd_naive_complex, case.double(), initial_states, **options)


def errors(got: dict, expected: dict) -> dict[str, float]:
    assert got.keys() == expected.keys()
    return {
        name: relative_error(got[name].cpu(), z.cpu()) for name, z in expected.items()
    }


def assert_within(got: dict, expected: dict, precision: str) -> None:
    rest, of_dt, of_A = TABLE[precision]
    limits = dict.fromkeys(expected, rest) | {"dt": of_dt, "A": of_A}
    found = errors(got, expected)
    for name, limit in limits.items():
        assert found[name] < SLACK[precision] * limit, (name, found)


def assert_equal_bits(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, z in expected.items():
        assert got[name].dtype == z.dtype, name
        assert torch.equal(got[name], z), name


def resets(case: Case, *starts: int) -> Tensor:
    """Documents that start at these steps, in every batch row."""
    reset = torch.zeros(case.x.shape[:2], dtype=torch.bool)
    reset[:, list(starts)] = True
    return reset.to(DEVICE)


FORWARD = ("_gates_kernel", "_states_kernel", "_pass_kernel", "_output_kernel")
KERNELS = (*FORWARD, "_backward_kernel", "_strong_kernel", "_steps_kernel")


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The name of every kernel that is launched."""
    launched, start = [], module._start

    def counted(kernel, *args, **constants):
        launched.append(kernel.__name__)
        start(kernel, *args, **constants)

    monkeypatch.setattr(module, "_start", counted)
    return launched


@pytest.fixture
def grids(monkeypatch) -> list[tuple]:
    """Name and grid of every launch; nothing is computed."""
    seen = []

    def recorded(kernel, grid, *args, **constants):
        seen.append((kernel.__name__, grid))

    monkeypatch.setattr(module, "_start", recorded)
    return seen


def replace_kernels(monkeypatch, act) -> None:
    """Launching any of them calls act instead."""
    import mamba3lite.models.row_kernels  # noqa: F401  takes _start by name, as it was

    def start(kernel, grid, tensors, sizes, H, **constants):
        act(*tensors, *sizes, **constants)

    monkeypatch.setattr(module, "_start", start)


# ---------------------------------------------------------------- values and gradients


@needs_triton
class TestAgainstTheOracle:
    """y, final states and every gradient, relative to the recurrence in complex128."""

    @every_precision
    @pytest.mark.parametrize("time", [1, 15, 16, 17, 50])
    def test_any_length(self, time, precision):
        dtype = DTYPES[precision]
        case = as_read(wide_case(time, 2), dtype)
        state = random_state(case)
        got = outcome(
            partial(fused, dtype=dtype, precision=precision),
            *(on_device(case), state.to(DEVICE)),
        )
        assert got["y"].dtype == dtype and got["final"].dtype == torch.complex64
        assert_within(got, oracle(case, state), precision)

    @pytest.mark.gate
    @every_precision
    def test_at_the_sizes_of_the_default_model(self, precision):
        """Two chunks of 64, the second of them not full."""
        dtype = DTYPES[precision]
        case = as_read(wide_case(100, 2, heads=1, dim=64, states=64), dtype)
        got = outcome(
            partial(fused, dtype=dtype, precision=precision, chunk_size=64),
            on_device(case),
        )
        assert_within(got, oracle(case), precision)

    @pytest.mark.parametrize(
        ("D", "N", "C"), [(16, 32, 64), (32, 64, 16), (64, 16, 32), (128, 32, 16)]
    )
    def test_no_side_stands_in_for_another(self, D, N, C):
        case = wide_case(C + 5, 3, heads=1, dim=D, states=N)
        state = random_state(case)
        scan = partial(fused, chunk_size=C, precision="ieee")
        got = outcome(scan, on_device(case), state.to(DEVICE))
        assert_within(got, oracle(case, state), "ieee")

    def test_the_rounding_of_a_precision_shows(self):
        """So that no bound above is met because everything ran in float32."""
        case = wide_case(40, 4, heads=1)
        exact = oracle(case)
        for precision, least in (("tf32", 1e-4), ("bf16", 1e-3)):
            got = outcome(partial(fused, precision=precision), on_device(case))
            found = errors(got, exact)
            assert min(found[name] for name in ("y", "final", "x", "B_t")) > least

    def test_tf32_is_the_default(self):
        case = on_device(wide_case(20, heads=1))
        expected = outcome(partial(fused, precision="tf32"), case)
        scan = partial(ssd_complex_chunkwise, chunk_size=16, ssd_dispatch="fused")
        for options in ({}, {"precision": None}):
            assert_equal_bits(outcome(fused, case, **options), expected)
            assert_equal_bits(outcome(scan, case, **options), expected)

    def test_strong_decay(self):
        """Rate -1 at dt = 1.5: a mask after exp is inf * 0 = NaN inside 64 steps."""
        case = wide_case(128, heads=1)
        case = case._replace(
            A=torch.full((1,), -1 + 0j), dt=torch.full_like(case.dt, 1.5)
        )
        scan = partial(fused, chunk_size=64, precision="ieee")
        assert_within(outcome(scan, on_device(case)), oracle(case), "ieee")

    @pytest.mark.parametrize("dt", ["uniform", "low", "high", "switching"])
    def test_the_whole_range_is_finite_and_within_its_bound(self, dt):
        extreme, heads = whole_range_case(80, 1, dt=dt), [0, 3, 4, 5]
        case = wide_case(80, 1, heads=4)
        case = case._replace(A=extreme.A[heads], dt=extreme.dt[..., heads])
        scan = partial(fused, chunk_size=64, precision="ieee")
        got = outcome(scan, on_device(case))
        for name, z in got.items():
            assert torch.isfinite(torch.view_as_real(z + 0j)).all(), name
        found = errors(got, oracle(case))
        for name in ("y", "final", "x", "B_t", "C_t"):
            assert found[name] < 2e-3, found

    def test_growth_instead_of_decay(self):
        """Nothing keeps a trained Re(A) below 0."""
        case = wide_case(40, 5)
        case = case._replace(A=torch.tensor([0.02 + 1j, 0.1 - 2j]))
        state = random_state(case)
        scan = partial(fused, precision="ieee")
        got = outcome(scan, on_device(case), state.to(DEVICE))
        assert_within(got, oracle(case, state), "ieee")

    @every_precision
    def test_a_number_that_is_not_finite_propagates(self, precision):
        """Also a NaN of all ones, which a GPU makes and which rounding may overflow."""
        case = on_device(wide_case(20))
        ones = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32).item()
        for name, number in (
            ("x", ones),
            ("B_t", math.nan),
            ("C_t", ones),
            ("dt", ones),
        ):
            broken = getattr(case, name).clone()
            broken[0, 5, 1] = number
            y = fused(**case._asdict() | {name: broken}, precision=precision)
            assert y[0, 5, 1].isnan().all(), name
            assert y[0, :, 0].isfinite().all(), name
            # What is read at step 5 alone does not reach the state.
            assert y[0, 16:, 1].isnan().all() == (name != "C_t"), name


DISPATCHES = {
    "pytorch": ("pytorch", "ieee"),
    "triton": ("triton", "ieee"),
    "fused": ("fused", "ieee"),
    "fused in tf32": ("fused", "tf32"),
    "fused in bf16": ("fused", "bf16"),
}


@needs_triton
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dispatch", DISPATCHES.values(), ids=DISPATCHES.keys())
def test_all_dispatches_agree(dispatch, packed):
    """One signature, one grid of cases, one truth."""
    ssd_dispatch, precision = dispatch
    case = as_read(wide_case(37, 6, heads=1), DTYPES[precision])
    state = random_state(case)
    options = {"reset": resets(case, 16, 29)} if packed else {}
    scan = partial(ssd_complex_chunkwise, chunk_size=16, ssd_dispatch=ssd_dispatch)
    got = outcome(
        *(scan, on_device(case), state.to(DEVICE)), precision=precision, **options
    )
    assert (got["y"].dtype, got["final"].dtype) == (torch.float32, torch.complex64)
    expected = oracle(case, state, **{k: z.cpu() for k, z in options.items()})
    assert_within(got, expected, precision)


@needs_triton
class TestDocuments:
    """A reset drops the state that arrives: initial, from this chunk, or an earlier."""

    # At step 0, on a chunk edge and before one, consecutive; two chunks without any.
    starts = (0, 16, 21, 22, 31)
    ends = (*starts[1:], 53)

    @pytest.mark.parametrize(
        ("precision", "start"),
        [("ieee", PARALLEL), ("ieee", WALKING), ("bf16", PARALLEL), ("tf32", WALKING)],
        ids=["ieee-parallel", "ieee-walking", "bf16-parallel", "tf32-walking"],
    )
    def test_documents_are_scanned_as_if_alone(self, start, precision, monkeypatch):
        monkeypatch.setattr(module, "_WALK_FROM", start)
        dtype = DTYPES[precision]
        case = as_read(wide_case(53, 7, heads=1), dtype)
        got = outcome(
            partial(fused, dtype=dtype, precision=precision),
            *(on_device(case), random_state(case).to(DEVICE)),
            reset=resets(case, *self.starts),
        )
        assert not got.pop("initial_states").any()
        expected = oracle(case, reset=resets(case, *self.starts).cpu())
        assert_within(got, expected, precision)
        alone = [
            ssd_naive_complex(*case.cut(begin, end).double()).real
            for begin, end in zip(self.starts, self.ends, strict=True)
        ]
        error = relative_error(got["y"].cpu(), torch.cat(alone, 1))
        assert error < SLACK[precision] * TABLE[precision][0]

    def test_a_reset_at_a_chunk_edge_alone(self):
        """The first of the chunk: nothing of the state that enters is left."""
        case = wide_case(40, 8, heads=1)
        state = random_state(case)
        for step in (0, 16, 32):
            reset = resets(case, step)
            scan = partial(fused, precision="ieee", reset=reset)
            got = outcome(scan, on_device(case), state.to(DEVICE))
            assert got["initial_states"].any() == (step > 0)
            expected = oracle(case, state, reset=reset.cpu())
            if step == 0:
                got.pop("initial_states"), expected.pop("initial_states")
            assert_within(got, expected, "ieee")

    @every_precision
    @pytest.mark.parametrize("faded", [False, True], ids=["reset", "faded"])
    def test_no_gradient_crosses_a_boundary(self, faded, precision):
        """Exactly zero, of dt too: a document's start, or a factor that is 0."""
        case = wide_case(53, 9, heads=1)
        starts = self.starts[1:]
        if faded:
            case.dt[:, starts] = 3e5
        case = on_device(case).leaves()
        state = random_state(case).to(DEVICE).requires_grad_()
        options = {} if faded else {"reset": resets(case, *starts)}
        y = fused(*case, initial_states=state, precision=precision, **options)
        scale = torch.autograd.grad(functional((y,)), case.dt, retain_graph=True)[0]
        inside = 0
        for begin, end in zip(self.starts, self.ends, strict=True):
            grads = torch.autograd.grad(
                functional((y[:, begin:end],)), (*case, state), retain_graph=True
            )
            grads = dict(zip((*Case._fields, "state"), grads, strict=True))
            assert grads["state"].any() == (begin == 0)
            for name in ("x", "B_t", "C_t", "dt"):
                grad = grads[name].clone()
                # A document of one step has nothing that decays.
                assert grad[:, begin:end].any() or (name == "dt" and end - begin == 1)
                grad[:, begin:end] = 0
                assert not grad.any(), name
            inside += grads["dt"][:, begin:end].norm()
        assert inside > 0.5 * scale.norm()

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
    @pytest.mark.parametrize("walk", [False, True], ids=["parallel", "walking"])
    @pytest.mark.parametrize(("place", "steps"), SPOILED.values(), ids=SPOILED)
    @every_precision
    def test_a_number_that_is_none_stays_in_its_document(
        self, precision, place, steps, walk
    ):
        """In chunks of 16, some with two documents."""
        case = wide_case(50, heads=1)
        inputs = case._asdict() | {"initial_states": random_state(case)}
        spoil(inputs, place)
        scan = partial(
            fused,
            dtype=DTYPES[precision],
            precision=precision,
            walk=walk,
            reset=resets(case, 20, 41),
            return_final_states=True,
        )
        y, final = scan(**{k: z.to(DEVICE) for k, z in inputs.items()})
        whole, last = scan(
            **on_device(case)._asdict(), initial_states=random_state(case).to(DEVICE)
        )
        assert spoiled_steps(y) == list(steps)
        assert last.isfinite().all()
        assert final.isfinite().all() == (49 not in steps)
        sound = [t for t in range(50) if t not in steps]
        assert torch.equal(y[:, sound], whole[:, sound])

    def test_at_a_reset_dt_has_no_gradient(self):
        case = on_device(wide_case(40, 10))
        got = outcome(fused, case, reset=resets(case, 7, 16))
        assert not got["dt"][:, [7, 16]].any()
        assert got["dt"][:, 8].all()


@needs_triton
class TestStates:
    @pytest.mark.parametrize("precision", ["ieee", "bf16"])
    @pytest.mark.parametrize("cut", [16, 21])
    def test_a_final_state_continues_the_sequence(self, cut, precision):
        """Gradients too: they flow back from one piece into the other."""

        def in_pieces(return_final_states, initial_states, x, A, B_t, C_t, dt):
            case, y = Case(x, A, B_t, C_t, dt), []
            for begin, end in ((0, cut), (cut, 50)):
                part, initial_states = fused(
                    *case.cut(begin, end),
                    initial_states=initial_states,
                    return_final_states=True,
                    precision=precision,
                )
                y.append(part)
            return torch.cat(y, 1), initial_states

        case = as_read(wide_case(50, 11, heads=1), DTYPES[precision])
        state = random_state(case)
        got = outcome(in_pieces, on_device(case), state.to(DEVICE))
        assert_within(got, oracle(case, state), precision)

    @every_precision
    def test_walking_and_parallel_states_agree(self, precision, launches, monkeypatch):
        case = on_device(wide_case(40, 12, heads=1))
        found = []
        for start in (PARALLEL, WALKING):
            monkeypatch.setattr(module, "_WALK_FROM", start)
            found.append(
                outcome(
                    *(fused, case, random_state(case).to(DEVICE)),
                    reset=resets(case, 35),
                    precision=precision,
                )
            )
        assert launches == [
            *("_states_kernel", "_pass_kernel", "_output_kernel"),
            *("_states_kernel", "_pass_kernel"),
            *("_backward_kernel", "_strong_kernel", "_steps_kernel"),
            *("_gates_kernel", "_states_kernel", "_output_kernel"),
            *("_states_kernel", "_backward_kernel", "_strong_kernel", "_steps_kernel"),
        ]
        if precision == "bf16":  # passed on alone, what a chunk adds is rounded too
            assert_within(*found, precision)
        else:
            limit = 1e-5 if precision == "ieee" else 1e-3
            assert max(errors(*found).values()) < limit

    @pytest.mark.parametrize(
        ("batch", "heads", "time", "walks"),
        [(12, 8, 17, True), (1, 2, 17, False), (1, 2, 16, True), (1, 1, 2**20, False)],
    )
    def test_when_states_are_walked(self, batch, heads, time, walks, grids):
        """With sequences enough to fill a GPU, or one chunk; any number fits a grid."""
        proj = torch.empty(batch, time, heads * 81, dtype=torch.bfloat16, device=DEVICE)
        shape = {"n_heads": heads, "head_dim": 16, "state_dim": 16, "chunk_size": 16}
        ssd_fused(proj, torch.zeros(heads, device=DEVICE) + 0j, **shape)
        assert ("_pass_kernel" not in dict(grids)) == walks
        for _, grid in grids:
            assert max(grid[1:], default=1) <= 65535

    def test_no_output_sees_the_future(self):
        case, step = on_device(wide_case(40, heads=1)), 21
        later = on_device(wide_case(40, 9, heads=1))
        changed = Case(
            *(
                z if z is case.A else torch.cat([z[:, :step], new[:, step:]], 1)
                for z, new in zip(case, later, strict=True)
            )
        )
        y, other = fused(*case), fused(*changed)
        assert relative_error(other[:, :step], y[:, :step]) < 1e-6
        assert not torch.equal(other[:, step], y[:, step])

    @pytest.mark.gate
    def test_a_row_does_not_depend_on_its_neighbors(self):
        case = on_device(wide_case(20, 13, batch=3, heads=1))
        state, reset = random_state(case).to(DEVICE), resets(case, 18)
        reset[1] = False
        whole = outcome(fused, case, state, reset=reset)
        for row in range(3):
            alone = Case(*(z if z is case.A else z[row : row + 1] for z in case))
            y, final = fused(
                *alone,
                initial_states=state[row : row + 1],
                reset=reset[row : row + 1],
                return_final_states=True,
            )
            assert relative_error(y[0], whole["y"][row]) < 1e-6
            assert relative_error(final[0], whole["final"][row]) < 1e-6


# ---------------------------------------------------------------- gradients


@needs_triton
class TestGradients:
    @pytest.mark.gate
    @pytest.mark.parametrize("precision", ["ieee", "bf16"])
    def test_the_same_bits_every_time(self, precision):
        case = on_device(wide_case(35, 14, heads=1))
        options = {"reset": resets(case, 20), "precision": precision}
        first, second = (
            outcome(fused, case, random_state(case).to(DEVICE), **options)
            for _ in range(2)
        )
        assert_equal_bits(second, first)

    @pytest.mark.parametrize("used", [0, 1], ids=["y", "final states"])
    def test_each_output_unused_in_turn(self, used):
        def grads(scan, case, state):
            inputs = (*case.leaves(), state.detach().clone().requires_grad_())
            outputs = scan(
                *inputs[:5], initial_states=inputs[5], return_final_states=True
            )
            loss = functional((outputs[used],)) if used else outputs[0].real.square()
            return torch.autograd.grad(
                *(loss.sum(), inputs), allow_unused=True, materialize_grads=True
            )

        case = wide_case(40, 15, heads=1)
        state = random_state(case)
        got = grads(partial(fused, precision="ieee"), on_device(case), state.to(DEVICE))
        wanted = grads(ssd_naive_complex, case.double(), in_double(state))
        for name, z, exact in zip((*Case._fields, "state"), got, wanted, strict=True):
            if used and name == "C_t":
                assert not z.any() and not exact.any()
            else:
                assert relative_error(z.cpu(), exact) < 1e-4, name

    @pytest.mark.parametrize("alone", ["proj", "A", "initial_states"])
    def test_an_input_may_be_the_only_one_that_wants_a_gradient(self, alone):
        case = on_device(wide_case(12, 16, heads=1))
        inputs = {
            "proj": columns(case),
            "A": case.A,
            "initial_states": random_state(case).to(DEVICE),
        }

        def grads(*names):
            leaves = {name: z.detach().clone() for name, z in inputs.items()}
            for name in names:
                leaves[name].requires_grad_()
            outputs = ssd_fused(
                **(leaves | sizes(case)), chunk_size=16, return_final_states=True
            )
            functional(outputs).backward()
            return {name: z.grad for name, z in leaves.items()}

        got, expected = grads(alone), grads(*inputs)
        assert torch.equal(got.pop(alone), expected[alone])
        assert set(got.values()) == {None}

    def test_without_gradients_nothing_is_recorded(self):
        case = on_device(wide_case(16))
        assert not fused(*case).requires_grad
        with torch.no_grad():
            assert not fused(*case.leaves()).requires_grad

    def test_a_second_derivative_is_refused(self):
        case = on_device(wide_case(16)).leaves()
        loss = fused(*case).square().sum()
        grads = torch.autograd.grad(loss, case.x, create_graph=True)
        with pytest.raises(RuntimeError, match="ssd_fused_backward"):
            grads[0].sum().backward()

    def test_a_gradient_of_any_layout_arrives(self):
        """Of y.sum(), expanded from one number; transposed; through a conjugate."""
        case = on_device(wide_case(20, 17))
        weight = torch.randn(1, 16, 20, 2, device=DEVICE).transpose(1, 3).mT
        assert weight.shape == (1, 2, 16, 20)
        weight = weight.permute(0, 3, 1, 2)
        assert not weight.is_contiguous()

        def grads(copy):
            leaves = case.leaves()
            y, final = fused(*leaves, return_final_states=True)
            incoming = (copy(weight), copy(final.detach().conj()))
            total = torch.autograd.grad(y.sum(), leaves.x, retain_graph=True)
            return *torch.autograd.grad((y, final), leaves, incoming), *total

        for got, wanted in zip(
            grads(lambda z: z),
            grads(lambda z: z.resolve_conj().contiguous()),
            strict=True,
        ):
            assert torch.equal(got, wanted)

    def test_an_input_of_any_layout_is_read(self):
        """Transposed, or with a conjugate or a sign that is not yet in memory."""
        case = on_device(wide_case(20, 18))
        proj, state = columns(case), random_state(case).to(DEVICE)

        def run(proj, A, state):
            options = sizes(case) | {"chunk_size": 16, "initial_states": state}
            return ssd_fused(proj, A, **options)

        lazy = torch.complex(torch.zeros_like(proj), -proj).conj().imag
        assert lazy.is_neg()
        lazy_A, lazy_state = (z.conj_physical().conj() for z in (case.A, state))
        assert lazy_A.is_conj() and lazy_state.is_conj()
        wanted = run(proj, case.A, state)
        for z in (lazy, proj.mT.contiguous().mT):
            assert torch.equal(run(z, lazy_A, lazy_state), wanted)


# ---------------------------------------------------------------- memory


@needs_triton
class TestMemory:
    """What is read, what is written, and in which dtype."""

    @pytest.mark.parametrize(
        ("precision", "start"),
        [("ieee", PARALLEL), ("bf16", WALKING)],
        ids=["ieee-parallel", "bf16-walking"],
    )
    def test_every_element_is_written(self, precision, start, monkeypatch):
        """Outputs start as NaN, as kernels that write nothing show."""
        monkeypatch.setattr(module, "_WALK_FROM", start)
        case = on_device(wide_case(20, 18, dim=32))
        proj, reset = columns(case, DTYPES[precision]), resets(case, 0, 9)

        def both():
            options = (32, 16, 16, precision)
            y, final, *kept = module._ssd_fused(proj, case.A, None, reset, *options)
            return (
                *(y, final, *kept),
                *module._ssd_fused_backward(
                    *(proj, case.A, reset, *kept, y, final), 32, 16, precision
                ),
            )

        expected = both()
        assert expected[2].dtype == DTYPES[precision]  # the states that backward reads
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            outputs = both()
            replace_kernels(monkeypatch, lambda *args, **options: None)
            poisoned = both()
        finally:
            torch.use_deterministic_algorithms(False)
        assert len(outputs) == 7
        for got, poison, wanted in zip(outputs, poisoned, expected, strict=True):
            assert poison.isnan().all()
            assert torch.isfinite(torch.view_as_real(wanted + 0j)).all()
            assert torch.equal(got, wanted)

    @pytest.mark.parametrize("precision", ["tf32", "bf16"])
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
    )
    def test_y_and_the_gradient_have_the_dtype_of_the_projection(
        self, dtype, precision
    ):
        case = wide_case(20, 19, heads=1)
        proj = columns(on_device(case), dtype).requires_grad_()
        y, final = ssd_fused(
            *(proj, case.A.to(DEVICE)),
            **sizes(case),
            chunk_size=16,
            precision=precision,
            return_final_states=True,
        )
        assert (y.dtype, final.dtype) == (dtype, torch.complex64)
        functional((y, final)).backward()
        assert proj.grad.dtype == dtype and proj.grad.shape == proj.shape
        exact = oracle(as_read(case, dtype))
        # A stored bfloat16 has eight bits, whatever the products had.
        limit = TABLE["bf16" if dtype == torch.bfloat16 else precision][0]
        limit *= SLACK["bf16"]
        assert relative_error(y.cpu(), exact["y"]) < limit
        wanted = columns(Case(*(exact[name] for name in Case._fields)), torch.float64)
        width = y[0, 0].numel()
        for part in (slice(0, width), slice(width, -1)):  # x; B and C
            error = relative_error(proj.grad[..., part].cpu(), wanted[..., part])
            assert error < limit

    @pytest.mark.parametrize("layout", ["sliced", "every second", "time first", "row"])
    def test_a_projection_in_any_layout(self, layout):
        case = on_device(wide_case(12, 20, batch=2, heads=1))
        proj = columns(case)
        other = {
            "sliced": lambda z: torch.cat([z, z + 1], -1)[..., : z.shape[-1]],
            "every second": lambda z: torch.stack([z, z + 1], -1)[..., 0],
            "time first": lambda z: z.transpose(0, 1).contiguous().transpose(0, 1),
            "row": lambda z: z[:1].expand(2, -1, -1),
        }[layout](proj)
        proj = other.contiguous()
        assert not other.is_contiguous()
        results = []
        for z in (other, proj):
            z = z.detach().requires_grad_()
            y = ssd_fused(z, case.A, **sizes(case), chunk_size=16)
            functional((y,)).backward()
            results.append((y, z.grad))
        for got, wanted in zip(*results, strict=True):
            assert torch.equal(got, wanted)

    def test_other_inputs_in_any_layout(self):
        """Strided, transposed, conjugated by a flag."""
        case = on_device(wide_case(20, 21, batch=2))
        A = torch.stack([case.A, case.A + 1], -1)[:, 0].conj()
        state = random_state(case).to(DEVICE).mT.contiguous().mT.conj()
        reset = resets(case, 9).T.contiguous().T
        assert A.is_conj() and state.is_conj()
        assert not (A.is_contiguous() or state.is_contiguous() or reset.is_contiguous())
        got = outcome(fused, case._replace(A=A), state, reset=reset)
        plain = case._replace(A=A.resolve_conj().contiguous())
        state = state.resolve_conj().contiguous()
        assert_equal_bits(got, outcome(fused, plain, state, reset=reset.contiguous()))
        y = ssd_fused(columns(case), A, **sizes(case), chunk_size=16)
        assert torch.equal(y, fused(*plain))

    def test_inputs_are_left_as_they_were(self):
        case = on_device(wide_case(20))
        inputs = (columns(case), case.A, random_state(case).to(DEVICE), resets(case, 3))
        copies = [z.clone() for z in inputs]
        options = {"initial_states": inputs[2], "reset": inputs[3]}
        ssd_fused(*inputs[:2], **sizes(case), chunk_size=16, **options)
        for z, copy in zip(inputs, copies, strict=True):
            assert torch.equal(z, copy)

    @pytest.mark.parametrize("start", [PARALLEL, WALKING], ids=["parallel", "walking"])
    def test_few_launches(self, start, grids, monkeypatch):
        """At most three forward and five backward, before the sum over shares of dA."""
        monkeypatch.setattr(module, "_WALK_FROM", start)
        y = fused(*on_device(wide_case(50)).leaves())
        assert 0 < len(grids) <= 3
        grids.clear()
        y.sum().backward()
        assert 0 < len(grids) <= 5


# ---------------------------------------------------------------- one operator


def operator_inputs(optional: bool) -> tuple[tuple, tuple]:
    """Arguments of the two operators; with the optional ones, in another layout."""
    case = on_device(wide_case(17, 22, heads=1))
    proj, A = columns(case), case.A.clone()
    initial, reset, dfinal, precision = None, None, None, "tf32"
    if optional:
        proj = proj.mT.contiguous().mT
        initial, reset = random_state(case).to(DEVICE), resets(case, 9)
        dfinal, precision = initial.clone(), "bf16"
    options = (16, 16, 16, precision)
    y, _, *kept = module._ssd_fused(proj, A, initial, reset, *options)
    backward = (proj.clone(), A.clone(), reset, *kept, y, dfinal, 16, 16, precision)
    for z in (proj, A, initial):
        if z is not None:
            z.requires_grad_()
    return (proj, A, initial, reset, *options), backward


class Found:
    """A stand-in for a kernel: what it was asked to look up, and what was started."""

    arg_names = ("z_ptr", "size", "D", "BLOCK_C", "N")
    __name__ = "found"

    def __init__(self):
        self.looked_up, self.started = [], []

    def __getitem__(self, grid):
        outer = self

        class Compiled:
            def __getitem__(self, grid):
                return lambda *args: outer.started.append((grid, *args))

        def look_up(*args, **constants):
            outer.looked_up.append((grid, args, constants))
            return Compiled()

        return look_up


class TestStart:
    @pytest.fixture
    def kernel(self, monkeypatch) -> Found:
        monkeypatch.setattr(module, "_COMPILED", {})
        monkeypatch.setattr(module, "_interpreted", lambda: False)
        return Found()

    def test_what_was_found_is_started_with_constants_by_position(self, kernel):
        first, second = torch.zeros(8), torch.ones(8)
        constants = {"BLOCK_C": 16, "D": 64, "num_warps": 4, "N": 32}
        module._start(kernel, (3, 1, 1), (first,), (20,), 2, **constants)
        assert kernel.looked_up == [((3, 1, 1), (first, 20), constants)]
        assert not kernel.started
        module._start(kernel, (5, 1, 1), (second,), (37,), 2, **constants)
        assert len(kernel.looked_up) == 1
        [(grid, got, *rest)] = kernel.started
        assert grid == (5, 1, 1) and got is second and rest == [37, 64, 16, 32]

    def test_whatever_is_compiled_for_is_looked_up(self, kernel):
        """A type, an alignment, the number of heads, constants, launch options."""
        z, shape = torch.zeros(9), {"D": 64, "N": 32, "BLOCK_C": 16}
        kinds = [
            ((z[:8],), 2, shape),
            ((z[:8].half(),), 2, shape),
            ((z[1:],), 2, shape),
            ((z[:8],), 16, shape),
            ((z[:8],), 2, shape | {"N": 64}),
            ((z[:8],), 2, shape | {"num_warps": 8}),
        ]
        for tensors, H, constants in kinds * 2:
            module._start(kernel, (1, 1, 1), tensors, (9,), H, **constants)
        assert len(kernel.looked_up) == len(kernel.started) == len(kinds)


class Operators(TorchDispatchMode):
    """Notes the operators that a mode can see."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), str(op)]
        return op(*args, **(kwargs or {}))


@needs_triton
class TestUnwatched:
    def gradients(self, case, **options):
        leaves = case.leaves()
        y = fused(*leaves, **options)
        return y, *torch.autograd.grad(y.square().sum(), leaves)

    @pytest.mark.gate
    def test_an_operator_is_seen_by_a_mode_and_gives_the_same_bits(self):
        case = on_device(wide_case(40, 27))
        options = {"reset": resets(case, 9), "precision": "bf16"}
        plain = self.gradients(case, **options)
        with Operators() as seen:
            watched = self.gradients(case, **options)
        for one, other in zip(plain, watched, strict=True):
            assert torch.equal(one, other)
        for name in ("ssd_fused", "ssd_fused_backward"):
            assert seen.names.count(f"mamba3lite.{name}.default") == 1

    def test_nobody_watches_a_plain_call(self, monkeypatch):
        monkeypatch.setattr(module, "_ssd_fused", None)
        monkeypatch.setattr(module, "_ssd_fused_backward", None)
        self.gradients(on_device(wide_case(40, 28)))


@needs_triton
@pytest.mark.filterwarnings("ignore")
class TestOneOperator:
    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.slow
    @pytest.mark.parametrize("optional", [False, True], ids=["without", "with"])
    def test_opcheck(self, optional):
        """Schema, fake tensors (sizes, strides, dtypes), autograd, dynamic shapes."""
        forward, backward = operator_inputs(optional)
        torch.library.opcheck(module._ssd_fused, forward)
        torch.library.opcheck(module._ssd_fused_backward, backward)

    def test_compiled_once_for_any_length(self):
        def loss(proj, A, state, reset):
            y, final = ssd_fused(
                *(proj * 1.5, A),
                **sizes(case),
                chunk_size=16,
                initial_states=state,
                return_final_states=True,
                reset=reset,
            )
            return y.square().sum() + final.abs().square().sum()

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=counter)
        for time in (20, 37):
            case = on_device(wide_case(time, 23, heads=1))
            reset = resets(case, 9)
            inputs = (columns(case), case.A, random_state(case).to(DEVICE))
            results = []
            for function in (compiled, loss):
                leaves = [z.clone().requires_grad_() for z in inputs]
                value = function(*leaves, reset)
                results.append((value, *torch.autograd.grad(value, leaves)))
            for got, wanted in zip(*results, strict=True):
                assert relative_error(got, wanted) < 1e-6
        assert counter.frame_count == 1

    def test_the_compiled_model_is_one_graph_with_the_same_loss(self, launches):
        models = [small_model("fused", n_layers=1) for _ in range(2)]
        compiled = torch.compile(models[0], fullgraph=True, backend="aot_eager")
        ids = (small_tokens() > 20).cumsum(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for model in (compiled, models[1]):
                model(small_tokens(), targets=small_tokens(), doc_ids=ids).backward()
        assert launches.count("_output_kernel") == 2
        assert launches.count("_backward_kernel") == 2
        got, expected = (dict(model.named_parameters()) for model in models)
        for name, p in expected.items():
            assert relative_error(got[name].grad, p.grad) < 1e-4, name

    @pytest.mark.slow
    @pytest.mark.parametrize("order", ["pytorch fused", "fused pytorch"])
    def test_a_graph_serves_models_of_its_dispatch_alone(self, order, launches):
        """The code of two models is the same; what is compiled for one is checked."""
        for dispatch in order.split():
            launches.clear()
            model = small_model(dispatch, n_layers=1)
            torch.compile(model, backend="aot_eager")(small_tokens())
            assert launches.count("_output_kernel") == (dispatch == "fused")

    def test_a_launch_failure_propagates_from_a_compiled_model(self, monkeypatch):
        replace_kernels(monkeypatch, raises(TOO_LARGE))
        model = small_model("fused")
        compiled = torch.compile(model, backend="aot_eager")
        with pytest.raises(KernelUnavailable, match="head_dim=16"):
            compiled(small_tokens())
        assert not any(layer._triton_fallback_warned for layer in model.layers)

    def test_checkpointing_sees_one_operator(self, launches):
        """Recomputed, or kept by a policy that names it; the same gradients."""
        case = on_device(wide_case(20, 24, heads=1)).leaves()
        operator = torch.ops.mamba3lite.ssd_fused.default

        def keep(ctx, op, *args, **options):
            kept = op == operator
            names = ("PREFER_RECOMPUTE", "MUST_SAVE")
            return getattr(CheckpointPolicy, names[kept])

        plain = torch.autograd.grad(fused(*case).square().sum(), case)
        contexts = partial(create_selective_checkpoint_contexts, keep)
        for options, runs in (({}, 2), ({"context_fn": contexts}, 1)):
            launches.clear()
            y = checkpoint(fused, *case, use_reentrant=False, **options)
            got = torch.autograd.grad(y.square().sum(), case)
            assert launches.count("_output_kernel") == runs
            for z, same in zip(plain, got, strict=True):
                assert torch.equal(same, z)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_autocast_does_not_reach_it(self, dtype):
        case = on_device(wide_case(20, 25, heads=1))

        def scan(*args, **options):
            return fused(*args, dtype=dtype, **options)

        expected = outcome(scan, case)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            assert_equal_bits(outcome(scan, case), expected)
        assert expected["y"].dtype == dtype


# ---------------------------------------------------------------- refusals

CASE = wide_case(20, batch=2)
CALL = {"proj": columns(CASE), "A": CASE.A, **sizes(CASE), "chunk_size": 16}
WIDTH = CALL["proj"].shape[-1]
STATE = random_state(CASE)

WRONG_CALLS = {
    "double proj": (
        {"proj": CALL["proj"].double()},
        TypeError,
        r"proj is torch\.float64; wanted float32, bfloat16 or float16",
    ),
    "complex proj": ({"proj": CALL["proj"] + 0j}, TypeError, r"proj is .*complex64"),
    "integer proj": ({"proj": CALL["proj"].long()}, TypeError, r"proj is .*int64"),
    "proj without batch": (
        {"proj": CALL["proj"][0]},
        ValueError,
        rf"proj has shape \(20, {WIDTH}\); wanted \(B, T, {WIDTH}\)",
    ),
    "proj of other columns": (
        {"proj": CALL["proj"][..., 1:]},
        ValueError,
        rf"proj has shape \(2, 20, {WIDTH - 1}\); wanted \(B, T, {WIDTH}\).*n_heads=2",
    ),
    "proj of no steps": (
        {"proj": CALL["proj"][:, :0]},
        ValueError,
        rf"proj has shape \(2, 0, {WIDTH}\).*T at least 1",
    ),
    "more heads": (
        {"n_heads": 3},
        ValueError,
        rf"proj has shape .*; wanted \(B, T, {3 * WIDTH // 2}\).*n_heads=3",
    ),
    "real A": ({"A": CASE.A.real}, TypeError, r"A is .*float32; wanted .*complex64"),
    "double A": ({"A": in_double(CASE.A)}, TypeError, r"A is .*complex128; wanted"),
    "A of three heads": (
        {"A": torch.cat([CASE.A, CASE.A[:1]])},
        ValueError,
        r"A has shape \(3,\); wanted \(2,\)",
    ),
    "A of two axes": (
        {"A": CASE.A[None]},
        ValueError,
        r"A has shape \(1, 2\); wanted \(2,\)",
    ),
    "A elsewhere": (
        {"A": CASE.A.to("meta")},
        ValueError,
        "A is on meta but proj is on cpu",
    ),
    "real initial_states": (
        {"initial_states": STATE.real},
        TypeError,
        r"initial_states is .*float32; wanted .*complex64",
    ),
    "initial_states of one row": (
        {"initial_states": STATE[:1]},
        ValueError,
        r"initial_states has shape \(1, 2, 16, 16\); wanted \(2, 2, 16, 16\)",
    ),
    "initial_states elsewhere": (
        {"initial_states": STATE.to("meta")},
        ValueError,
        "initial_states is on meta but proj is on cpu",
    ),
    "integer reset": (
        {"reset": torch.zeros(2, 20, dtype=torch.long)},
        TypeError,
        r"reset is .*int64; wanted .*bool",
    ),
    "reset of one row": (
        {"reset": torch.zeros(1, 20, dtype=torch.bool)},
        ValueError,
        r"reset has shape \(1, 20\); wanted \(2, 20\)",
    ),
    "reset elsewhere": (
        {"reset": torch.zeros(2, 20, dtype=torch.bool, device="meta")},
        ValueError,
        "reset is on meta but proj is on cpu",
    ),
}

ZEROS = """
import torch
proj = torch.zeros(1, 20, 81)
call = dict(proj=proj, A=torch.ones(1) - 2 + 0j, n_heads=1, head_dim=16, state_dim=16,
            chunk_size=16)
"""

WITHOUT_TRITON = f"""
import sys, warnings
sys.modules["triton"] = None  # what import finds where there is none
from mamba3lite.models import ssd_fused as module
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise
from mamba3lite.models.transformer import Mamba3Transformer
{ZEROS}
print(*(hasattr(module, name) for name in ("ssd_fused", "_check_fused_dims")))
module._check_fused_dims(64, 64, 64)

def scan():
    z = torch.zeros(1, 20, 1, 16)
    return ssd_complex_chunkwise(z, call["A"], z + 0j, z + 0j, z[..., 0],
                                 ssd_dispatch="fused")

for function in (lambda: module.ssd_fused(**call), scan):
    try:
        function()
    except ImportError as error:
        print(error)
config = dict(vocab_size=7, d_model=16, n_layers=1, n_heads=1, head_dim=16, ffn_dim=8,
              state_dim=16, chunk_size=16, ssd_dispatch="fused")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Mamba3Transformer(config)(torch.zeros(1, 16, dtype=torch.long))
print(*(w.message for w in caught if w.category is RuntimeWarning))
"""


class TestRefusals:
    @needs_triton
    @pytest.mark.parametrize("wrong", WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
    def test_wrong_inputs_are_named(self, wrong):
        changes, kind, words = wrong
        with pytest.raises(kind, match=f"^ssd_fused: {words}") as error:
            ssd_fused(**CALL | changes)
        assert not isinstance(error.value, KernelUnavailable)  # nothing to fall back on
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("side", [0, 8, 24, 48, 256])
    @pytest.mark.parametrize("name", ["head_dim", "state_dim", "chunk_size"])
    def test_sizes_without_a_kernel_are_refused(self, name, side):
        right = {"head_dim": 16, "state_dim": 32, "chunk_size": 128}
        _check_fused_dims(**right)
        _check_fused_dims(**right | {name: 64})
        with pytest.raises(KernelUnavailable) as error:
            _check_fused_dims(**right | {name: side})
        assert str(error.value) == (
            f"ssd_fused: {name}={side}; the kernels take 16, 32, 64, 128. "
            "Use ssd_dispatch='pytorch' for this config."
        )

    @needs_triton
    def test_the_scan_refuses_sizes_too(self):
        for case, chunk, words in (
            (wide_case(16, states=48), 16, "state_dim=48"),
            (wide_case(16, dim=8), 16, "head_dim=8"),
            (wide_case(16), 24, "chunk_size=24"),
        ):
            with pytest.raises(KernelUnavailable, match=words):
                ssd_complex_chunkwise(*on_device(case), chunk, "fused")

    @needs_triton
    def test_a_complex_x_is_refused(self):
        """One line, with the dispatches that take it."""
        case = on_device(wide_case(16, complex_x=True))
        with pytest.raises(KernelUnavailable, match=r"^x is .*complex64") as error:
            ssd_complex_chunkwise(*case, 16, "fused")
        for part in ("ssd_dispatch='fused'", "'pytorch'", "'triton'"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)

    @needs_triton
    def test_double_precision_is_refused(self):
        with pytest.raises(TypeError, match="float64"):
            ssd_complex_chunkwise(*on_device(wide_case(16)).double(), 16, "fused")

    @needs_triton
    @pytest.mark.parametrize("precision", ["fp16", "float32", "", "TF32"])
    def test_an_unknown_precision_is_refused(self, precision):
        case = on_device(wide_case(16))
        scan = partial(ssd_complex_chunkwise, ssd_dispatch="fused")
        for function in (fused, scan):
            with pytest.raises(ValueError, match=r"^precision is ") as error:
                function(*case, precision=precision)
            for part in (precision, "ieee", "tf32", "bf16"):
                assert repr(part) in str(error.value)

    @pytest.mark.slow
    def test_without_triton(self):
        """The module imports, and each call says what is missing."""
        names, *messages, warning = run_python(WITHOUT_TRITON).splitlines()
        assert names == "True True"
        assert len(messages) == 2 and len(set(messages)) == 1
        for part in ("ssd_fused", "pip install triton", "ssd_dispatch='pytorch'"):
            assert part in messages[0]
        assert warning.startswith("layer 0: ssd_dispatch='fused' unavailable (")
        assert messages[0] in warning

    @needs_triton
    def test_cpu_tensors_need_the_interpreter(self):
        code = (
            "from mamba3lite.models.ssd_fused import ssd_fused\n"
            f"{ZEROS}"
            "try:\n    ssd_fused(**call)\n"
            "except ValueError as error:\n    print(type(error).__name__, error)"
        )
        message = run_python(code, TRITON_INTERPRET=None)
        assert message.startswith("KernelUnavailable ssd_fused: ")
        for part in ("cpu", "CUDA", "TRITON_INTERPRET=1", "ssd_dispatch='pytorch'"):
            assert part in message

    @needs_triton
    @pytest.mark.parametrize("name", KERNELS)
    def test_a_launch_that_does_not_fit_names_the_sizes(self, name, monkeypatch):
        case = on_device(wide_case(40, dim=32, states=64)).leaves()
        walks = WALKING if name == "_gates_kernel" else PARALLEL
        monkeypatch.setattr(module, "_WALK_FROM", walks)
        monkeypatch.setattr(module, name, kernel_that(raises(TOO_LARGE)))
        with pytest.raises(KernelUnavailable) as error:
            fused(*case).sum().backward()
        for part in ("head_dim=32", "state_dim=64", "chunk_size=16", "'pytorch'"):
            assert part in str(error.value)
        assert error.value.__cause__ is TOO_LARGE


# ---------------------------------------------------------------- dispatch


@needs_triton
class TestDispatchWiring:
    """`ssd_dispatch="fused"` in the model: the same results, or one warning."""

    def test_the_default_is_another(self, launches):
        assert ModelConfig().ssd_dispatch == "pytorch"
        Mamba3Transformer(SMALL).to(DEVICE)(small_tokens())
        assert launches == []

    @every_precision
    def test_the_precision_of_the_model_reaches_every_kernel(
        self, precision, monkeypatch
    ):
        seen = []

        def act(proj, *args, **options):
            if "PRECISION" in options:  # what only passes states on multiplies nothing
                seen.append((options["PRECISION"], proj.dtype))

        replace_kernels(monkeypatch, act)
        model = small_model("fused", ssd_precision=precision)
        model(small_tokens(), targets=small_tokens()).backward()
        assert seen == [(precision, torch.float32)] * 5 * SMALL["n_layers"]
        seen.clear()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            model(small_tokens())
        assert seen == [(precision, torch.bfloat16)] * 2 * SMALL["n_layers"]

    def test_logits_states_and_gradients_match_the_pytorch_path(self, launches):
        """Of two calls, the second with documents, from the states of the first."""
        models = [small_model("fused", ssd_precision="ieee"), small_model("pytorch")]
        ids = (small_tokens() > 20).cumsum(1)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for model in models:
                logits, states = model(small_tokens()[:, :9], return_states=True)
                more = model(small_tokens(), doc_ids=ids, states=states)
                functional((logits, more, *states)).backward()
                found.append((logits, more, *states))
        assert launches.count("_output_kernel") == 2 * SMALL["n_layers"]
        assert not any(layer._triton_fallback_warned for layer in models[0].layers)
        for got, wanted in zip(*found, strict=True):
            assert relative_error(got, wanted) < 1e-5
        got, expected = (dict(model.named_parameters()) for model in models)
        for name, p in expected.items():
            assert relative_error(got[name].grad, p.grad) < 1e-4, name

    def test_under_autocast_the_projection_is_read_in_bf16(self):
        """y goes on in its dtype, and the states stay in complex64."""
        logits = {}
        for dispatch in ("fused", "pytorch"):
            model = small_model(dispatch, n_layers=1)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                logits[dispatch], states = model(small_tokens(), return_states=True)
                model(small_tokens(), targets=small_tokens()).backward()
            assert logits[dispatch].dtype == torch.float32
            assert {state.dtype for state in states} == {torch.complex64}
            for name, p in model.named_parameters():
                assert p.grad.dtype == p.dtype and p.grad.norm() > 0, name
        assert relative_error(logits["fused"], logits["pytorch"]) < 2e-2

    def test_checkpointed_blocks_run_it_again(self, launches):
        ids = (small_tokens() > 20).cumsum(1)
        grads = {}
        for kept in (True, False):
            launches.clear()
            model = small_model("fused", grad_checkpoint=not kept, n_layers=1)
            model(small_tokens(), targets=small_tokens(), doc_ids=ids).backward()
            assert launches.count("_output_kernel") == (1 if kept else 2)
            grads[kept] = {name: p.grad for name, p in model.named_parameters()}
        for name, grad in grads[True].items():
            assert relative_error(grads[False][name], grad) < 1e-6, name

    def test_without_triton_one_warning_a_block(self, launches, monkeypatch):
        for owner in (module, ssd_triton):
            monkeypatch.setattr(owner, "HAS_TRITON", False)
        assert_fell_back(
            small_model("fused"), "triton, which is not installed", "pip install"
        )
        assert launches == []

    @pytest.mark.parametrize(
        "changes", [{"state_dim": 256}, {"chunk_size": 24}, {"head_dim": 4}], ids=str
    )
    def test_sizes_are_refused_before_a_launch(self, changes, launches):
        ((name, side),) = changes.items()
        assert_fell_back(small_model("fused", **changes), f"ssd_fused: {name}={side};")
        assert launches == []

    def test_a_device_is_refused_before_a_launch(self, launches, monkeypatch):
        monkeypatch.setattr(ssd_triton, "_interpreted", lambda: False)
        monkeypatch.setattr(kernel_cases, "DEVICE", torch.device("cpu"))
        assert_fell_back(
            small_model("fused"), "tensors are on cpu", "TRITON_INTERPRET=1"
        )
        assert launches == []

    @pytest.mark.gate
    def test_a_launch_that_does_not_fit_falls_back(self, monkeypatch):
        replace_kernels(monkeypatch, raises(TOO_LARGE))
        assert_fell_back(
            small_model("fused"), "head_dim=16, state_dim=16, chunk_size=16", "232448"
        )

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("an illegal memory access was encountered"),
            ValueError("a plain one"),
            TypeError("another"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_any_other_failure_propagates(self, error, monkeypatch):
        replace_kernels(monkeypatch, raises(error))
        with pytest.raises(type(error)) as caught:
            small_model("fused")(small_tokens())
        assert caught.value is error

    def test_the_scan_itself_never_falls_back(self, monkeypatch):
        case = on_device(wide_case(16))
        replace_kernels(monkeypatch, raises(TOO_LARGE))
        with pytest.raises(KernelUnavailable):
            ssd_complex_chunkwise(*case, 16, "fused")


# ---------------------------------------------------------------- on a GPU


# Sizes and chunks: every side of head_dim and state_dim twice, in every precision.
COVERING = [
    (16, 128, 64, "tf32"),
    (128, 16, 64, "ieee"),
    (32, 64, 128, "bf16"),
    (64, 32, 32, "tf32"),
    (128, 128, 64, "bf16"),
    (16, 16, 128, "tf32"),
    (32, 32, 16, "bf16"),
    (64, 64, 128, "bf16"),
]


@pytest.mark.gpu
@pytest.mark.gate
class TestFusedGPU:
    """At sizes too slow for the interpreter, and what only a GPU can fail."""

    @every_precision
    def test_the_accuracy_table(self, precision):
        """B=2, T=2048, H=4, D=N=64; and the same bits the second time."""
        dtype = DTYPES[precision]
        case = random_case(2048, batch=2, heads=4, dim=64, states=64)
        case = on_device(as_read(case, dtype))
        scan = partial(fused, dtype=dtype, precision=precision, chunk_size=64)
        got = outcome(scan, case)
        assert_within(got, oracle(case), precision)
        assert_equal_bits(outcome(scan, case), got)

    @pytest.mark.parametrize("start", [PARALLEL, WALKING], ids=["parallel", "walking"])
    @pytest.mark.parametrize("time", [1, 63, 64, 65, 2048, 32768])
    def test_any_length_in_chunks_of_64(self, time, start, monkeypatch):
        """Against the chunkwise scan in complex128, 1e-10 from the oracle."""
        monkeypatch.setattr(module, "_WALK_FROM", start)
        case = on_device(wide_case(time, 1, dim=64, states=64))
        state = random_state(case).to(DEVICE)
        got = outcome(partial(fused, chunk_size=64), case, state)
        exact = outcome(ssd_complex_chunkwise, case.double(), in_double(state))
        assert_within(got, exact, "tf32")

    @pytest.mark.parametrize(("D", "N", "C", "precision"), COVERING, ids=str)
    def test_every_size(self, D, N, C, precision):
        dtype = DTYPES[precision]
        case = random_case(200, 2, batch=2, heads=4, dim=D, states=N)
        case = on_device(as_read(case, dtype))
        state, reset = random_state(case).to(DEVICE), resets(case, 90)
        scan = partial(fused, dtype=dtype, precision=precision, chunk_size=C)
        got = outcome(scan, case, state, reset=reset)
        assert_within(got, oracle(case, state, reset=reset), precision)

    @pytest.mark.parametrize("start", [PARALLEL, WALKING], ids=["parallel", "walking"])
    def test_offsets_beyond_32_bits(self, start, monkeypatch):
        """The last document of each row, in a projection of more than 2^31 numbers.

        Nothing reaches it from before and nothing follows: a scan of it alone is the
        whole truth.
        """
        monkeypatch.setattr(module, "_WALK_FROM", start)
        batch, time, heads, side, last = 2, 2**20 - 24, 2, 128, 200
        width = heads * (5 * side + 1)
        assert batch * time * width > 2**31
        g = torch.Generator(DEVICE).manual_seed(0)
        random = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16, generator=g)
        proj = random(batch, time, width).requires_grad_()
        dy = random(batch, time, heads, side)
        reset = torch.zeros(batch, time, dtype=torch.bool, device=DEVICE)
        reset[:, -last] = True
        A = on_device(wide_case(1, 3)).A
        shape = {"n_heads": heads, "head_dim": side, "state_dim": side}
        y, final = ssd_fused(
            *(proj, A),
            **shape,
            chunk_size=64,
            precision="bf16",
            reset=reset,
            return_final_states=True,
        )
        (dproj,) = torch.autograd.grad(y, proj, dy)
        tail = proj.detach()[:, -last:].double().requires_grad_()
        x, B_re, B_im, C_re, C_im, dt = tail.split([heads * side] * 5 + [heads], dim=-1)
        split = partial(torch.unflatten, dim=-1, sizes=(heads, side))
        exact, exact_final = ssd_naive_complex(
            *(split(x), A.to(torch.complex128)),
            *(torch.complex(split(B_re), split(B_im)),),
            *(torch.complex(split(C_re), split(C_im)), dt),
            return_final_states=True,
        )
        (wanted,) = torch.autograd.grad(exact.real, tail, dy[:, -last:].double())
        for row in range(batch):
            assert relative_error(y[row, -last:], exact.real[row]) < 5e-3
            assert relative_error(final[row], exact_final[row]) < 5e-3
            got, expected = dproj[row, -last:], wanted[row]
            assert relative_error(got[:, :-heads], expected[:, :-heads]) < 5e-3
            assert relative_error(got[:, -heads:], expected[:, -heads:]) < 2e-2

    @pytest.mark.filterwarnings("ignore")
    @every_precision
    def test_the_compiled_model_trains_alike(self, precision):
        """One graph with inductor, in bf16 as in training."""
        torch._dynamo.reset()
        large = {"head_dim": 64, "state_dim": 64, "chunk_size": 64}
        model, plain = (
            small_model("fused", ssd_precision=precision, **large) for _ in range(2)
        )
        tokens = torch.randint(0, SMALL["vocab_size"], (2, 200), device=DEVICE)
        ids = (tokens > 35).cumsum(1)
        losses = []
        for run in (torch.compile(model, fullgraph=True), plain):
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens, targets=tokens, doc_ids=ids)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
        got, expected = (dict(z.named_parameters()) for z in (model, plain))
        for name, p in expected.items():
            assert relative_error(got[name].grad, p.grad) < 5e-2, name
        torch._dynamo.reset()

    @pytest.mark.filterwarnings("ignore")
    def test_the_compiled_scan_has_the_same_gradients(self):
        torch._dynamo.reset()
        case = on_device(wide_case(200, 4, dim=64, states=64))
        state = random_state(case).to(DEVICE)

        def scan(**inputs):
            return fused(**inputs, chunk_size=64)

        got = outcome(torch.compile(scan, fullgraph=True), case, state)
        found = errors(got, outcome(scan, case, state))
        assert max(found.values()) < 1e-5, found
        torch._dynamo.reset()
