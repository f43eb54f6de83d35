"""The per-chunk Triton kernel: values, gradients, refusals, and when it is not there.

Without a GPU the kernel runs in Triton's interpreter, on one it is compiled; the class
at the end runs only there. Expected values come from `per_chunk_ssd_pytorch`, itself
held against a loop in test_ssd.py, and from the naive scan in complex128.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import warnings
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import kernel_cases
import pytest
import torch
import torch.nn.functional as F
from cases import (
    Case,
    complex_normal,
    in_double,
    random_case,
    random_state,
    relative_error,
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
from trainer_cases import new_run, prepare_corpus, raw_config

from mamba3lite.cli import load_for_generation
from mamba3lite.models import ssd_triton
from mamba3lite.models.ssd_complex import (
    KernelUnavailable,
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)
from mamba3lite.models.ssd_triton import (
    _check_block_dims,
    _per_chunk_ssd_triton_forward,
    _PerChunkSSDTriton,
    _view_real_imag,
    per_chunk_ssd_triton,
)
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3lite.training.config import ConfigError, TrainingConfig, check_config
from mamba3lite.training.optim import build_optimizer, learning_rate, set_learning_rate
from mamba3lite.training.pretrain import _enforce_triton_env_var, train_step

pytestmark = pytest.mark.usefixtures("full_precision")

# Forward in float32 sums against complex128; gradients against the other dispatch.
FORWARD_LIMIT = 2e-5
GRADIENT_TOLERANCE = 1e-2 if COMPILED else 1e-4

triton_scan = partial(ssd_complex_chunkwise, chunk_size=16, ssd_dispatch="triton")
pytorch_scan = partial(ssd_complex_chunkwise, chunk_size=16)


class Chunks(NamedTuple):
    """The five tensors of the per-chunk functions, in their order."""

    Bc: Tensor
    Cc: Tensor
    Xc: Tensor
    A_log: Tensor
    decay_states: Tensor

    def map(self, change) -> Chunks:
        return Chunks(*map(change, self))

    def leaves(self, *names: str) -> Chunks:
        """Copies, of which those named (all, without names) collect gradients."""
        copies = self.map(lambda z: z.detach().clone())
        for name in names or self._fields:
            getattr(copies, name).requires_grad_()
        return copies


def random_chunks(
    C: int = 16,
    P: int = 16,
    N: int = 16,
    *,
    lead: tuple[int, int, int] = (2, 3, 2),
    seed: int = 0,
    device: torch.device = DEVICE,
) -> Chunks:
    """N(0, 1) throughout, the log decay negative; decay_states not those of A_log."""
    batch, n_chunks, heads = lead
    g = torch.Generator().manual_seed(seed)
    rows = (batch, n_chunks, C, heads)
    A_log = complex_normal(*rows, generator=g)
    return Chunks(
        Bc=complex_normal(*rows, N, generator=g),
        Cc=complex_normal(*rows, N, generator=g),
        Xc=complex_normal(*rows, P, generator=g),
        A_log=torch.complex(-A_log.real.abs(), A_log.imag),
        decay_states=complex_normal(*rows, generator=g),
    ).map(lambda z: z.to(device))


# ---------------------------------------------------------------- the reference


class TestPerChunkSsdPytorchReference:
    def test_reference_shape_and_finite(self):
        outputs = per_chunk_ssd_pytorch(*random_chunks(C=8, P=5, N=3))
        assert [z.shape for z in outputs] == [(2, 3, 8, 2, 5), (2, 3, 2, 5, 3)]
        for z in outputs:
            assert z.dtype == torch.complex64
            assert torch.isfinite(torch.view_as_real(z)).all()

    def test_reference_matches_ssd_complex_chunkwise(self):
        """With the states passed on by hand it is the whole scan."""
        case = random_case(24, 1, complex_x=True).double()
        split = [z.unflatten(1, (3, 8)) for z in (case.B_t, case.C_t, case.x)]
        log_decay = (F.softplus(case.dt) * case.A).unflatten(1, (3, 8))
        total = log_decay.cumsum(2)
        decay_states = (total[:, :, -1:] - total).exp()
        Y_diag, state = per_chunk_ssd_pytorch(*split, log_decay, decay_states)
        entering, y = torch.zeros_like(state[:, 0]), []
        for c in range(3):
            read = split[1][:, c] * total[:, c].exp().unsqueeze(-1)
            y.append(Y_diag[:, c] + torch.einsum("bchn,bhpn->bchp", read, entering))
            decay = total[:, c, -1].exp()[..., None, None]
            entering = decay * entering + state[:, c]
        y = torch.cat(y, 1).real
        whole, final = ssd_complex_chunkwise(*case, 8, return_final_states=True)
        assert relative_error(y, whole) < 1e-12
        assert relative_error(entering, final) < 1e-12
        assert relative_error(y, ssd_naive_complex(*case).real) < 1e-12


# ---------------------------------------------------------------- without triton


CHUNKS_OF_ZEROS = """
import torch
B = torch.zeros(1, 1, 16, 1, 16, dtype=torch.complex64)
chunks = (B, B, B, B[..., 0], B[..., 0])
"""

WITHOUT_TRITON = (
    """
import sys, warnings
sys.modules["triton"] = None  # what import finds where there is none
from mamba3lite.models import ssd_triton as module
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise
from mamba3lite.models.transformer import Mamba3Transformer
"""
    + CHUNKS_OF_ZEROS
    + """
print(module.HAS_TRITON, hasattr(module, "_ssd_per_chunk_fwd_kernel"))
names = ("_MAX_BLOCK", "_check_block_dims", "_view_real_imag", "_PerChunkSSDTriton",
         "_per_chunk_ssd_triton_forward", "per_chunk_ssd_triton")
print(*(hasattr(module, name) for name in names))
module._check_block_dims(64, 64, 64)
module._view_real_imag(B)

def scan():
    case = (B[0], B[0, 0, 0, :, 0] - 1, B[0], B[0], B[0, ..., 0].real)
    return ssd_complex_chunkwise(*case, ssd_dispatch="triton")

for call in (lambda: module.per_chunk_ssd_triton(*chunks),
             lambda: module._per_chunk_ssd_triton_forward(*chunks), scan):
    try:
        call()
    except ImportError as error:
        print(error)
config = dict(vocab_size=7, d_model=16, n_layers=1, n_heads=1, head_dim=16, ffn_dim=8,
              state_dim=16, chunk_size=16, ssd_dispatch="triton")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Mamba3Transformer(config)(torch.zeros(1, 16, dtype=torch.long))
print(*(w.message for w in caught if w.category is RuntimeWarning))
"""
)


class TestPerChunkSsdImportSurface:
    def test_module_imports_without_triton(self):
        """All names but the kernel are there, and each call says what is missing."""
        has_triton, names, *errors, warning = run_python(WITHOUT_TRITON).splitlines()
        assert has_triton == "False False"
        assert names == " ".join(["True"] * 6)
        assert len(errors) == 3 and len(set(errors)) == 1
        for part in ("triton", "pip install triton", "ssd_dispatch='pytorch'"):
            assert part in errors[0]
        assert warning.startswith("layer 0: ssd_dispatch='triton' unavailable (")
        assert errors[0] in warning

    def test_kernel_call_raises_clean_import_error_when_no_triton(self, monkeypatch):
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        for function in (per_chunk_ssd_triton, _per_chunk_ssd_triton_forward):
            with pytest.raises(ImportError) as error:
                function(*random_chunks())
            for part in ("triton", "pip install triton", "ssd_dispatch='pytorch'"):
                assert part in str(error.value)
            assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["P", "N", "chunk_size"])
    def test_check_block_dims_raises_value_error_on_too_large_dim(self, name):
        assert ssd_triton._MAX_BLOCK == 256
        dims = {"P": 64, "N": 64, "chunk_size": 64}
        _check_block_dims(**dims | {name: 256})
        with pytest.raises(ValueError) as error:
            _check_block_dims(**dims | {name: 512})
        assert str(error.value) == (
            f"per_chunk_ssd_triton: {name}=512 exceeds the 256-cap. "
            "Use ssd_dispatch='pytorch' for this config."
        )

    @pytest.mark.parametrize("dim", [48, 3, 0, 255])
    @pytest.mark.parametrize("name", ["P", "N", "chunk_size"])
    def test_check_block_dims_wants_powers_of_two(self, name, dim):
        with pytest.raises(ValueError, match=rf"{name}={dim} is not a power of two"):
            _check_block_dims(**{"P": 64, "N": 64, "chunk_size": 64} | {name: dim})

    @pytest.mark.parametrize("name", ["P", "N", "chunk_size"])
    def test_check_block_dims_below_16_needs_the_interpreter(self, name, monkeypatch):
        dims = {"P": 16, "N": 16, "chunk_size": 16} | {name: 8}
        monkeypatch.setattr(ssd_triton, "_interpreted", lambda: True)
        _check_block_dims(**dims)
        monkeypatch.setattr(ssd_triton, "_interpreted", lambda: False)
        with pytest.raises(ValueError, match=rf"{name}=8 is below 16.*'pytorch'"):
            _check_block_dims(**dims)

    def test_check_block_dims_accepts_production_shape(self, monkeypatch):
        monkeypatch.setattr(ssd_triton, "_interpreted", lambda: False)
        _check_block_dims(64, 64, 64)

    def test_unavailable_is_a_value_error(self):
        assert issubclass(KernelUnavailable, ValueError)

    @needs_triton
    def test_whether_triton_is_interpreted(self):
        """The answer decides which sizes and devices are refused."""
        assert ssd_triton._interpreted() is not COMPILED


# ---------------------------------------------------------------- autograd


@pytest.fixture
def reference_forward(monkeypatch):
    """The launcher replaced by PyTorch, which also takes complex128."""
    monkeypatch.setattr(
        ssd_triton,
        "_per_chunk_ssd_triton_forward",
        lambda *inputs: per_chunk_ssd_pytorch(*inputs[:-1]),  # without a precision
    )


@pytest.mark.usefixtures("reference_forward")
class TestPerChunkSsdAutogradPlumbing:
    def test_backward_is_the_gradient_by_finite_differences(self):
        """In complex128, every step with its own decay, decay_states independent."""
        chunks = random_chunks(C=3, P=2, N=2, lead=(1, 2, 1), device="cpu")
        assert chunks.A_log.imag.unique().numel() == chunks.A_log.numel()
        assert torch.autograd.gradcheck(
            _PerChunkSSDTriton.apply, tuple(chunks.map(in_double).leaves())
        )

    def test_backward_propagates_to_content_path_cpu(self):
        chunks = random_chunks(device="cpu").leaves()
        functional(_PerChunkSSDTriton.apply(*chunks)).backward()
        expected = random_chunks(device="cpu").leaves()
        functional(per_chunk_ssd_pytorch(*expected)).backward()
        for name, z in chunks._asdict().items():
            assert torch.isfinite(torch.view_as_real(z.grad)).all(), name
            torch.testing.assert_close(z.grad, getattr(expected, name).grad)
        assert chunks.Xc.grad.norm() > 1

    @pytest.mark.parametrize("used", [0, 1], ids=["Y_diag", "state"])
    def test_each_output_unused_in_turn(self, used, monkeypatch):
        """The other's gradient arrives as None, and no input is left without one."""
        arrived, backward = [], _PerChunkSSDTriton.backward

        def recorded(ctx, *grads):
            arrived.append([grad is None for grad in grads])
            return backward(ctx, *grads)

        monkeypatch.setattr(_PerChunkSSDTriton, "backward", staticmethod(recorded))
        chunks, expected = (random_chunks(device="cpu").leaves() for _ in range(2))
        functional(_PerChunkSSDTriton.apply(*chunks)[used : used + 1]).backward()
        functional(per_chunk_ssd_pytorch(*expected)[used : used + 1]).backward()
        assert arrived == [[used == 1, used == 0]]
        for name, z in chunks._asdict().items():
            wanted = getattr(expected, name).grad
            wanted = torch.zeros_like(z) if wanted is None else wanted
            torch.testing.assert_close(z.grad, wanted)

    @pytest.mark.parametrize("alone", Chunks._fields)
    def test_an_input_may_be_the_only_one_that_wants_a_gradient(self, alone):
        """Y_diag does not depend on decay_states, nor the state on Cc and A_log."""
        chunks = random_chunks(device="cpu").leaves(alone)
        functional(_PerChunkSSDTriton.apply(*chunks)).backward()
        expected = random_chunks(device="cpu").leaves()
        functional(per_chunk_ssd_pytorch(*expected)).backward()
        torch.testing.assert_close(
            getattr(chunks, alone).grad, getattr(expected, alone).grad
        )
        assert [z.grad is None for z in chunks].count(False) == 1

    def test_without_gradients_nothing_is_recorded(self):
        for z in _PerChunkSSDTriton.apply(*random_chunks()):
            assert not z.requires_grad
        with torch.no_grad():
            for z in _PerChunkSSDTriton.apply(*random_chunks().leaves()):
                assert not z.requires_grad

    def test_a_second_derivative_is_refused(self):
        chunks = random_chunks(device="cpu").leaves()
        Y_diag, state = _PerChunkSSDTriton.apply(*chunks)
        loss = Y_diag.abs().sum() + state.abs().sum()
        for z in chunks:
            with pytest.raises(RuntimeError, match=r"again.*ssd_dispatch='pytorch'"):
                torch.autograd.grad(loss, z, create_graph=True, retain_graph=True)
        torch.autograd.grad(loss, chunks)


# ---------------------------------------------------------------- the kernel

# P, N, C: no two alike, so that no side can stand in for another; the last is long
# enough for a second step over positions and over states in either precision.
TILES = [
    (16, 32, 64),
    (16, 64, 32),
    (32, 16, 64),
    (32, 64, 16),
    (64, 16, 32),
    (64, 32, 16),
    (128, 16, 32),
    (16, 128, 32),
    (16, 128, 128),
]


def assert_forward_matches_pytorch(chunks: Chunks, atol: float) -> None:
    for got, wanted in zip(
        per_chunk_ssd_triton(*chunks), per_chunk_ssd_pytorch(*chunks), strict=True
    ):
        torch.testing.assert_close(got, wanted, atol=atol, rtol=0)


def gradients(scan, case: Case, **options) -> dict[str, Tensor]:
    """Of one fixed functional of the output and the final state."""
    inputs = case.leaves()
    y, final = scan(*inputs, return_final_states=True, **options)
    grads = torch.autograd.grad(functional((y.real, final)), inputs)
    return dict(zip(Case._fields, grads, strict=True))


def assert_backward_matches_pytorch(case: Case, tolerance: float, **options) -> None:
    got = gradients(partial(triton_scan, **options), case)
    for name, wanted in gradients(partial(pytorch_scan, **options), case).items():
        assert wanted.norm() > 0, name
        difference = (got[name] - wanted).abs()
        assert (difference <= tolerance * (1 + wanted.abs())).all(), name


@needs_triton
class TestPerChunkSsdKernel:
    """Interpreted on a CPU, compiled on a GPU."""

    @pytest.mark.parametrize(("P", "N", "C"), [(16, 16, 16), (64, 64, 64), *TILES])
    def test_forward_in_ieee(self, P, N, C):
        chunks = random_chunks(C, P, N, lead=(1, 3, 2))
        assert_forward_matches_pytorch(chunks, atol=1e-3)
        exact = per_chunk_ssd_pytorch(*chunks.map(in_double))
        for got, wanted in zip(per_chunk_ssd_triton(*chunks), exact, strict=True):
            assert relative_error(got, wanted) < FORWARD_LIMIT

    @pytest.mark.parametrize("heads_first", [False, True])
    @pytest.mark.parametrize("C", [16, 64])
    def test_documents(self, C, heads_first):
        """In both layouts; a log decay that is not used spoils no sum."""
        chunks = random_chunks(C, lead=(1, 3, 2))
        g = torch.Generator().manual_seed(2)
        starts = (torch.rand(chunks.A_log.shape, generator=g) < 0.1).to(DEVICE)
        chunks = chunks._replace(A_log=chunks.A_log.masked_fill(starts, -1e6))
        documents = starts.cumsum(2, dtype=torch.int32)
        exact = per_chunk_ssd_pytorch(*chunks.map(in_double), documents)
        if heads_first:
            chunks = chunks.map(
                lambda z: z.transpose(2, 3).contiguous().transpose(2, 3)
            )
        got = per_chunk_ssd_triton(*chunks, documents)
        for z, wanted in zip(got, exact, strict=True):
            assert relative_error(z, wanted) < FORWARD_LIMIT

    def test_forward_on_inputs_rounded(self):
        chunks = random_chunks(64, 64, 64, lead=(1, 3, 2)).map(rounded)
        assert_forward_matches_pytorch(chunks, atol=1e-2)

    @pytest.mark.parametrize(("P", "N", "C"), [(64, 64, 64), (16, 128, 128)])
    def test_forward_in_tf32(self, P, N, C):
        chunks = random_chunks(C, P, N, lead=(1, 3, 2))
        faster = per_chunk_ssd_triton(*chunks, input_precision="tf32")
        exact = per_chunk_ssd_pytorch(*chunks.map(in_double))
        for got, wanted in zip(faster, exact, strict=True):
            error = relative_error(got, wanted)
            assert error < 2e-3
            # Ten bits of mantissa show; the interpreter multiplies in float32 always.
            assert error > 1e-5 or not COMPILED

    @pytest.mark.parametrize("lead", [(1, 1, 1), (3, 1, 2), (1, 4, 1)], ids=str)
    def test_every_chunk_and_head_is_its_own(self, lead):
        assert_forward_matches_pytorch(random_chunks(lead=lead), atol=1e-4)

    def test_every_element_is_written(self, monkeypatch):
        """Outputs start as NaN, as the kernel that writes nothing shows."""
        chunks = random_chunks(32, 16, 64)
        expected = per_chunk_ssd_triton(*chunks)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            outputs = per_chunk_ssd_triton(*chunks)
            monkeypatch.setattr(
                *(ssd_triton, "_ssd_per_chunk_fwd_kernel"),
                kernel_that(lambda *args, **options: None),
            )
            poisoned = per_chunk_ssd_triton(*chunks)
        finally:
            torch.use_deterministic_algorithms(False)
        for got, poison, wanted in zip(outputs, poisoned, expected, strict=True):
            assert poison.isnan().all()
            assert torch.equal(got, wanted)

    @pytest.mark.parametrize("layout", ["contiguous", "heads first", "cut", "conj"])
    @pytest.mark.parametrize("name", Chunks._fields)
    def test_inputs_in_any_layout(self, name, layout):
        """One of them at a time: the answer is the same in every bit."""
        chunks = random_chunks(16, 16, 32)
        other = {
            "contiguous": lambda z: z,
            "heads first": lambda z: z.transpose(2, 3).contiguous().transpose(2, 3),
            "cut": lambda z: torch.stack([z, z + 1], -1)[..., 0],
            "conj": lambda z: z.conj().resolve_conj().conj(),
        }[layout](getattr(chunks, name))
        assert other.is_contiguous() == (layout in ("contiguous", "conj"))
        assert other.is_conj() == (layout == "conj")
        outputs = per_chunk_ssd_triton(**chunks._asdict() | {name: other})
        for got, wanted in zip(outputs, per_chunk_ssd_triton(*chunks), strict=True):
            assert torch.equal(got, wanted)

    def test_inputs_of_mixed_layouts(self):
        """Transposed, conjugated by a flag, cut from something larger and expanded."""
        plain = random_chunks(16, 16, 32)
        wider = complex_normal(2, 3, 16, 4, 16, generator=torch.Generator())
        odd = Chunks(
            Bc=plain.Bc.transpose(2, 3).contiguous().transpose(2, 3),
            Cc=plain.Cc.conj(),
            Xc=wider.to(DEVICE)[:, :, :, ::2].conj(),
            A_log=plain.A_log[:, :1].expand(-1, 3, -1, -1),
            decay_states=plain.decay_states.mT.contiguous().mT.conj(),
        )
        assert_forward_matches_pytorch(odd, atol=1e-3)

    def test_halves_of_a_complex_tensor(self):
        z = random_chunks().Bc.conj().transpose(1, 4)
        for half, wanted in zip(_view_real_imag(z), (z.real, z.imag), strict=True):
            assert half.dtype == torch.float32 and half.is_contiguous()
            assert torch.equal(half, wanted)

    def test_inputs_are_left_as_they_were(self):
        chunks = random_chunks()
        copies = chunks.map(torch.clone)
        per_chunk_ssd_triton(*chunks)
        for z, before in zip(chunks, copies, strict=True):
            assert torch.equal(z, before)

    def test_decay_states_are_taken_as_given(self):
        """Each of the two decays moves its own output, and in no bit the other's."""
        chunks = random_chunks()
        Y_diag, state = per_chunk_ssd_triton(*chunks)
        other = chunks._replace(decay_states=2j * chunks.decay_states)
        same, moved = per_chunk_ssd_triton(*other)
        assert torch.equal(same, Y_diag)
        torch.testing.assert_close(moved, 2j * state)
        moved, same = per_chunk_ssd_triton(*chunks._replace(A_log=2 * chunks.A_log))
        assert torch.equal(same, state)
        assert relative_error(moved, Y_diag) > 0.1

    def test_backward_gives_each_decay_its_own_gradient(self):
        chunks, expected = (random_chunks().leaves() for _ in range(2))
        functional(per_chunk_ssd_triton(*chunks)).backward()
        functional(per_chunk_ssd_pytorch(*expected)).backward()
        for name, z in chunks._asdict().items():
            torch.testing.assert_close(z.grad, getattr(expected, name).grad)

    @pytest.mark.parametrize("autocast", ["around both passes", "around forward"])
    def test_autocast_does_not_reach_it(self, autocast):
        chunks, plain = (random_chunks().leaves() for _ in range(2))
        outputs = per_chunk_ssd_triton(*plain)
        functional(outputs).backward()
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            cast = per_chunk_ssd_triton(*chunks)
            if autocast == "around both passes":
                functional(cast).backward()
        if autocast == "around forward":
            functional(cast).backward()
        for z, same in zip(outputs, cast, strict=True):
            assert torch.equal(same, z)
        for z, same in zip(plain, chunks, strict=True):
            torch.testing.assert_close(same.grad, z.grad, rtol=1e-5, atol=1e-5)


@needs_triton
class TestTritonScan:
    """`ssd_complex_chunkwise` with the kernel inside."""

    @pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
    @pytest.mark.parametrize(
        ("time", "chunk"), [(1, 16), (15, 16), (16, 16), (17, 16), (65, 32), (129, 64)]
    )
    def test_any_length_matches_the_oracle(self, time, chunk, complex_x):
        case = wide_case(time, time, states=32, complex_x=complex_x)
        state = random_state(case)
        expected_y, expected_final = ssd_naive_complex(
            *case.double(), initial_states=in_double(state), return_final_states=True
        )
        y, final = triton_scan(
            *on_device(case),
            chunk_size=chunk,
            initial_states=state.to(DEVICE),
            return_final_states=True,
        )
        assert (y.dtype, final.dtype) == (torch.float32, torch.complex64)
        assert y.shape == case.x.shape
        assert relative_error(y.cpu(), expected_y.real) < FORWARD_LIMIT
        assert relative_error(final.cpu(), expected_final) < FORWARD_LIMIT

    @pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
    def test_precision_reaches_the_kernel(self, precision, monkeypatch):
        seen = []
        monkeypatch.setattr(
            *(ssd_triton, "_ssd_per_chunk_fwd_kernel"),
            kernel_that(lambda *args, **options: seen.append(options["PRECISION"])),
        )
        triton_scan(*on_device(wide_case(16)), precision=precision)
        per_chunk_ssd_triton(*random_chunks(), input_precision=precision)
        assert seen == [precision or "ieee"] * 2

    def test_strong_decay(self):
        """Rate -1 at dt = 1.5: a mask after exp is inf * 0 = NaN inside 64 steps."""
        case = wide_case(128)
        case = case._replace(
            A=torch.full((2,), -1 + 0j), dt=torch.full_like(case.dt, 1.5)
        )
        y = triton_scan(*on_device(case), chunk_size=64)
        expected = ssd_naive_complex(*case.double()).real
        assert relative_error(y.cpu(), expected) < FORWARD_LIMIT
        assert_backward_matches_pytorch(
            on_device(case), GRADIENT_TOLERANCE, chunk_size=64
        )

    @pytest.mark.parametrize("dt", ["uniform", "low", "high", "switching"])
    def test_the_whole_range_is_finite_and_within_its_bound(self, dt):
        extreme = whole_range_case(129, 1, dt=dt)
        case = wide_case(129, 1, heads=6)._replace(A=extreme.A, dt=extreme.dt)
        scan = partial(triton_scan, chunk_size=64)
        y, final = scan(*on_device(case), return_final_states=True)
        expected_y, expected_final = ssd_naive_complex(
            *case.double(), return_final_states=True
        )
        assert relative_error(y.cpu(), expected_y.real) < 2e-3
        assert relative_error(final.cpu(), expected_final) < 2e-3
        for name, z in gradients(scan, on_device(case)).items():
            assert torch.isfinite(torch.view_as_real(z + 0j)).all(), name

    def test_packed_documents(self):
        """At and inside the edges of chunks."""
        case, documents = wide_case(75, batch=2), [0, 16, 21, 22, 60, 75]
        reset = torch.zeros(2, 75, dtype=torch.bool)
        reset[:, documents[:-1]] = True
        state = random_state(case).to(DEVICE)
        options = {"initial_states": state, "reset": reset.to(DEVICE)}
        y = triton_scan(*on_device(case), **options)
        torch.testing.assert_close(
            y, pytorch_scan(*on_device(case), **options), atol=1e-3, rtol=0
        )
        for start, end in pairwise(documents):
            alone = ssd_naive_complex(*case.cut(start, end).double()).real
            assert relative_error(y[:, start:end].cpu(), alone) < FORWARD_LIMIT
        assert_backward_matches_pytorch(
            on_device(case), GRADIENT_TOLERANCE, reset=options["reset"]
        )

    def test_no_output_sees_the_future(self):
        case, step = on_device(wide_case(40)), 21
        later = on_device(wide_case(40, 9))
        changed = Case(
            *(
                z if z is case.A else torch.cat([z[:, :step], new[:, step:]], 1)
                for z, new in zip(case, later, strict=True)
            )
        )
        y, other = triton_scan(*case), triton_scan(*changed)
        assert relative_error(other[:, :step], y[:, :step]) < 1e-6
        assert not torch.equal(other[:, step], y[:, step])

    def test_a_number_that_is_not_finite_propagates(self):
        case = on_device(wide_case(20))
        case.x[0, 5, 1, 2] = math.nan
        y, final = triton_scan(*case, return_final_states=True)
        assert y[0, 5:, 1, 2].isnan().all()
        assert torch.view_as_real(final[0, 1, 2]).isnan().any(-1).all()
        assert y[0, :, 0].isfinite().all()

    @pytest.mark.parametrize("complex_x", [False, True], ids=["real", "complex"])
    def test_backward_on_x_A_B_t_C_t_dt(self, complex_x):
        case = wide_case(40, batch=2, states=32, complex_x=complex_x)
        state = random_state(case)
        assert_backward_matches_pytorch(
            on_device(case), GRADIENT_TOLERANCE, initial_states=state.to(DEVICE)
        )
        exact = gradients(
            ssd_naive_complex, case.double(), initial_states=in_double(state)
        )
        got = gradients(triton_scan, on_device(case), initial_states=state.to(DEVICE))
        for name, wanted in exact.items():
            limit = 1e-3 if name in ("A", "dt") else 1e-4
            assert relative_error(got[name].cpu(), wanted) < limit, name

    @pytest.mark.slow
    def test_warm_up_run_stays_finite(self):
        """Fifty steps of a growing learning rate, from random weights and downhill."""
        large = {"chunk_size": 64, "head_dim": 64, "state_dim": 64}
        model = small_model("triton", **large if COMPILED else {"n_layers": 1})
        time = 256 if COMPILED else 32
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, SMALL["vocab_size"], (1, time + 1), generator=g)
        tokens = tokens.to(DEVICE)
        batch = (tokens[:, :-1], tokens[:, 1:], torch.zeros_like(tokens[:, 1:]))
        training = TrainingConfig(total_steps=100, warmup_steps=50, lr=1e-2)
        optimizer = build_optimizer(model, training)
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for step in range(1, 51):
                set_learning_rate(optimizer, learning_rate(step, 100, training))
                result = train_step(model, optimizer, [batch])
                assert result.problem is None
                losses.append(result.loss)
        assert all(map(math.isfinite, losses))
        assert losses[-1] < 0.7 * losses[0]


# ---------------------------------------------------------------- refusals


CHUNKS = random_chunks(device="cpu")
DOCUMENTS = torch.zeros(2, 3, 16, 2, dtype=torch.int32)

WRONG_CHUNKS = {
    "real Xc": ({"Xc": CHUNKS.Xc.real}, TypeError, "Xc: expected complex64.*float32"),
    "double Bc": (
        {"Bc": in_double(CHUNKS.Bc)},
        TypeError,
        "Bc: expected complex64, got torch.complex128",
    ),
    "double A_log": (
        {"A_log": in_double(CHUNKS.A_log)},
        TypeError,
        "A_log: expected complex64.*complex128",
    ),
    "Xc without heads": (
        {"Xc": CHUNKS.Xc[:, :, :, 0]},
        ValueError,
        r"Xc has shape \(2, 3, 16, 16\); wanted \(B, nc, C, H, P\)",
    ),
    "Bc without states": (
        {"Bc": CHUNKS.Bc[..., 0]},
        ValueError,
        r"Bc has shape \(2, 3, 16, 2\); wanted \(B, nc, C, H, N\)",
    ),
    "Bc of one batch row": (
        {"Bc": CHUNKS.Bc[:1]},
        ValueError,
        r"Bc has shape \(1, 3, 16, 2, 16\); wanted \(2, 3, 16, 2, 16\)",
    ),
    "Cc of other states": (
        {"Cc": CHUNKS.Cc[..., :8]},
        ValueError,
        r"Cc has shape .* 8\); wanted .* 16\)",
    ),
    "A_log of one head": (
        {"A_log": CHUNKS.A_log[..., :1]},
        ValueError,
        r"A_log has shape \(2, 3, 16, 1\); wanted \(2, 3, 16, 2\)",
    ),
    "decay_states without chunks": (
        {"decay_states": CHUNKS.decay_states[:, 0]},
        ValueError,
        r"decay_states has shape \(2, 16, 2\); wanted \(2, 3, 16, 2\)",
    ),
    "documents of int64": (
        {"documents": DOCUMENTS.long()},
        TypeError,
        "documents: expected int32, got torch.int64",
    ),
    "documents of one head": (
        {"documents": DOCUMENTS[..., :1]},
        ValueError,
        r"documents has shape \(2, 3, 16, 1\); wanted \(2, 3, 16, 2\)",
    ),
    "documents on another device": (
        {"documents": DOCUMENTS.to("meta")},
        ValueError,
        "documents is on meta but Xc is on cpu",
    ),
    "Cc on another device": (
        {"Cc": CHUNKS.Cc.to("meta")},
        ValueError,
        "Cc is on meta but Xc is on cpu",
    ),
}


@needs_triton
class TestPerChunkSsdRefusals:
    @pytest.mark.parametrize("wrong", WRONG_CHUNKS.values(), ids=WRONG_CHUNKS.keys())
    def test_wrong_chunks_are_named(self, wrong):
        changes, kind, words = wrong
        with pytest.raises(kind, match=f"^per_chunk_ssd_triton: {words}") as error:
            per_chunk_ssd_triton(**CHUNKS._asdict() | changes)
        assert not isinstance(error.value, KernelUnavailable)  # nothing to fall back on
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("dtype", [torch.complex128, torch.float32])
    def test_halves_want_complex64(self, dtype):
        with pytest.raises(TypeError, match=rf"expected complex64, got {dtype}"):
            _view_real_imag(torch.zeros(3, dtype=dtype))

    @pytest.mark.parametrize("precision", ["bf16", "float32", ""])
    def test_an_unknown_precision_is_refused(self, precision):
        with pytest.raises(ValueError, match="precision") as error:
            per_chunk_ssd_triton(*random_chunks(), input_precision=precision)
        assert repr(precision) in str(error.value)
        assert "'ieee'" in str(error.value) and "'tf32'" in str(error.value)

    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"N": 512}, "N=512 exceeds the 256-cap"),
            ({"P": 512}, "P=512 exceeds the 256-cap"),
            ({"C": 512}, "chunk_size=512 exceeds the 256-cap"),
            ({"N": 48}, "N=48 is not a power of two"),
            ({"P": 24}, "P=24 is not a power of two"),
        ],
        ids=str,
    )
    def test_tiles_that_do_not_fit_are_refused(self, sizes, words):
        with pytest.raises(KernelUnavailable, match=words):
            per_chunk_ssd_triton(*random_chunks(**sizes, lead=(1, 1, 1)))

    def test_more_chunks_than_a_launch_takes_are_refused(self, monkeypatch):
        assert ssd_triton._MAX_CHUNKS == 65_535
        monkeypatch.setattr(ssd_triton, "_MAX_CHUNKS", 2)
        per_chunk_ssd_triton(*random_chunks(lead=(1, 2, 1)))
        with pytest.raises(KernelUnavailable, match="nc=3 chunks exceed the 2"):
            per_chunk_ssd_triton(*random_chunks(lead=(1, 3, 1)))

    def test_the_scan_refuses_sizes_too(self):
        case = on_device(wide_case(16, states=48))
        with pytest.raises(ValueError, match=r"N=48.*ssd_dispatch='pytorch'"):
            triton_scan(*case)

    def test_the_scan_takes_single_precision_only(self):
        with pytest.raises(TypeError, match=r"B_t is .*complex128.*use .*'pytorch'"):
            triton_scan(*on_device(wide_case(16)).double())

    def test_cpu_tensors_need_the_interpreter(self):
        code = (
            "import torch\n"
            "from mamba3lite.models.ssd_triton import per_chunk_ssd_triton\n"
            f"{CHUNKS_OF_ZEROS}"
            "try:\n    per_chunk_ssd_triton(*chunks)\n"
            "except ValueError as error:\n    print(type(error).__name__, error)"
        )
        message = run_python(code, TRITON_INTERPRET=None)
        assert message.startswith("KernelUnavailable per_chunk_ssd_triton: ")
        for part in ("cpu", "CUDA", "TRITON_INTERPRET=1", "ssd_dispatch='pytorch'"):
            assert part in message

    @pytest.mark.parametrize("value", ["many", "2.5", "", "0", "-1"])
    @pytest.mark.parametrize(
        "name", ["TRITON_PER_CHUNK_NUM_WARPS", "TRITON_PER_CHUNK_NUM_STAGES"]
    )
    def test_a_launch_option_that_is_no_integer_is_named(
        self, name, value, monkeypatch
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=f"^{name} is '{value}'") as error:
            per_chunk_ssd_triton(*random_chunks())
        assert not isinstance(error.value, KernelUnavailable)

    def test_launch_options_are_read_at_launch(self, monkeypatch):
        seen = []
        monkeypatch.setattr(
            *(ssd_triton, "_ssd_per_chunk_fwd_kernel"),
            kernel_that(lambda *args, **options: seen.append(options)),
        )
        for name in ("WARPS", "STAGES"):
            monkeypatch.delenv(f"TRITON_PER_CHUNK_NUM_{name}", raising=False)
        for precision in ("ieee", "tf32"):
            per_chunk_ssd_triton(*random_chunks(), input_precision=precision)
        monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "2")
        monkeypatch.setenv("TRITON_PER_CHUNK_NUM_STAGES", "2")
        per_chunk_ssd_triton(*random_chunks())
        chosen = [(options["num_warps"], options["num_stages"]) for options in seen]
        assert chosen == [(8, 1), (4, 1), (2, 2)]

    def test_a_launch_that_does_not_fit_names_the_sizes(self, monkeypatch):
        monkeypatch.setattr(
            ssd_triton, "_ssd_per_chunk_fwd_kernel", kernel_that(raises(TOO_LARGE))
        )
        with pytest.raises(KernelUnavailable) as error:
            per_chunk_ssd_triton(*random_chunks(C=64, P=16, N=32))
        for part in ("P=16", "N=32", "chunk_size=64", "ssd_dispatch='pytorch'"):
            assert part in str(error.value)
        assert error.value.__cause__ is TOO_LARGE


# ---------------------------------------------------------------- dispatch


@pytest.fixture
def launches(monkeypatch) -> list[tuple]:
    """One entry for every launch of the kernel."""
    launched, launch = [], _per_chunk_ssd_triton_forward

    def counted(*args):
        launched.append(args)
        return launch(*args)

    monkeypatch.setattr(ssd_triton, "_per_chunk_ssd_triton_forward", counted)
    return launched


class TestPerChunkSsdDispatchWiring:
    def test_default_dispatch_is_pytorch(self, launches):
        assert ModelConfig().ssd_dispatch == "pytorch"
        default = inspect.signature(ssd_complex_chunkwise).parameters["ssd_dispatch"]
        assert default.default == "pytorch"
        Mamba3Transformer(SMALL).to(DEVICE)(small_tokens())
        assert launches == []

    def test_triton_fallback_warning_is_one_shot_per_instance(self, monkeypatch):
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        assert_fell_back(
            small_model("triton"), "triton, which is not installed", "pip install"
        )

    def test_a_copy_warns_for_itself(self, monkeypatch):
        """What a copied or unpickled model falls back from is news to its owner."""
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        model = small_model("triton")
        assert_fell_back(model, "not installed")
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_fell_back(again, "not installed")

    @needs_triton
    def test_triton_path_output_matches_pytorch_path(self, launches):
        model = small_model("triton")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            logits = model(small_tokens())
        assert len(launches) == SMALL["n_layers"]
        assert not any(layer._triton_fallback_warned for layer in model.layers)
        expected = small_model("pytorch")(small_tokens())
        tolerance = 1e-3 if COMPILED else 1e-5
        torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)

    @needs_triton
    def test_gradients_of_the_model_match_the_pytorch_path(self, launches):
        models = [small_model("triton"), small_model("pytorch")]
        for model in models:
            model(small_tokens(), targets=small_tokens().roll(-1, 1)).backward()
        assert len(launches) == SMALL["n_layers"]
        got, expected = (dict(model.named_parameters()) for model in models)
        for name, p in expected.items():
            assert relative_error(got[name].grad, p.grad) < 1e-4, name

    @needs_triton
    @pytest.mark.parametrize(
        ("sizes", "words"),
        [
            ({"state_dim": 512}, "N=512 exceeds the 256-cap"),
            ({"chunk_size": 24}, "chunk_size=24 is not a power of two"),
        ],
        ids=str,
    )
    def test_sizes_are_refused_before_a_launch(self, sizes, words, launches):
        assert_fell_back(
            small_model("triton", **sizes), f"per_chunk_ssd_triton: {words}"
        )
        assert launches == []

    @needs_triton
    def test_a_device_is_refused_before_a_launch(self, launches, monkeypatch):
        monkeypatch.setattr(ssd_triton, "_interpreted", lambda: False)
        monkeypatch.setattr(kernel_cases, "DEVICE", torch.device("cpu"))
        assert_fell_back(
            small_model("triton"), "tensors are on cpu", "TRITON_INTERPRET=1"
        )
        assert launches == []

    @pytest.mark.gate
    @needs_triton
    def test_a_launch_that_does_not_fit_falls_back(self, launches, monkeypatch):
        monkeypatch.setattr(
            ssd_triton, "_ssd_per_chunk_fwd_kernel", kernel_that(raises(TOO_LARGE))
        )
        assert_fell_back(small_model("triton"), "P=16, N=16, chunk_size=16", "232448")
        assert len(launches) == SMALL["n_layers"], "asked once, and remembered"

    @needs_triton
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
        monkeypatch.setattr(
            ssd_triton, "_ssd_per_chunk_fwd_kernel", kernel_that(raises(error))
        )
        with pytest.raises(type(error)) as caught:
            small_model("triton")(small_tokens())
        assert caught.value is error

    @needs_triton
    def test_a_bad_launch_option_is_no_reason_to_fall_back(self, monkeypatch):
        monkeypatch.setenv("TRITON_PER_CHUNK_NUM_WARPS", "lots")
        with pytest.raises(ValueError, match="TRITON_PER_CHUNK_NUM_WARPS"):
            small_model("triton")(small_tokens())

    @needs_triton
    def test_the_scan_itself_never_falls_back(self, monkeypatch):
        case = on_device(wide_case(16))
        monkeypatch.setattr(
            ssd_triton, "_ssd_per_chunk_fwd_kernel", kernel_that(raises(TOO_LARGE))
        )
        with pytest.raises(KernelUnavailable):
            triton_scan(*case)
        monkeypatch.setattr(ssd_triton, "HAS_TRITON", False)
        with pytest.raises(ImportError, match="ssd_dispatch='pytorch'"):
            triton_scan(*case)


@needs_triton
@pytest.mark.filterwarnings("ignore::UserWarning")
class TestCompiled:
    """torch.compile keeps the kernel outside its graphs."""

    @pytest.fixture(autouse=True)
    def fresh_compiler(self):
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.slow
    def test_loss_and_gradients_are_the_same(self, launches):
        models = [small_model("triton"), small_model("triton")]
        compiled = torch.compile(models[0], backend="aot_eager")
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            for model in (compiled, models[1]):
                model(small_tokens(), targets=small_tokens()).backward()
        assert len(launches) == 2 * SMALL["n_layers"]
        got, expected = (dict(model.named_parameters()) for model in models)
        for name, p in expected.items():
            assert relative_error(got[name].grad, p.grad) < 1e-4, name

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (TOO_LARGE, "P=16, N=16, chunk_size=16"),
            (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        ],
        ids=["does not fit", "out of memory"],
    )
    def test_a_launch_failure_propagates(self, error, words, monkeypatch):
        monkeypatch.setattr(
            ssd_triton, "_ssd_per_chunk_fwd_kernel", kernel_that(raises(error))
        )
        model = small_model("triton")
        compiled = torch.compile(model, backend="aot_eager")
        kind = KernelUnavailable if error is TOO_LARGE else type(error)
        with pytest.raises(kind, match=words):
            compiled(small_tokens())
        assert not any(layer._triton_fallback_warned for layer in model.layers)


# ---------------------------------------------------------------- the environment


class TestEnableTritonKernelsForceBack:
    @pytest.mark.parametrize("dispatch", ["triton", "fused"])
    @pytest.mark.parametrize("value", [None, "", "0", "true", "11", " 1"])
    def test_only_the_exact_value_enables_kernels(self, value, dispatch, monkeypatch):
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        if value is not None:
            monkeypatch.setenv("ENABLE_TRITON_KERNELS", value)
        lines, fields = [], SMALL | {"ssd_dispatch": dispatch}
        _enforce_triton_env_var(fields, lines.append)
        assert fields == SMALL | {"ssd_dispatch": "pytorch"}
        assert lines == [
            f"[warn] ssd_dispatch='{dispatch}' requires ENABLE_TRITON_KERNELS=1; "
            "forcing ssd_dispatch='pytorch' for this run."
        ]

    def test_a_launch_variable_that_is_no_number_is_refused(self, monkeypatch):
        """Before a model is built, in training and in generation."""
        monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
        monkeypatch.setenv("TRITON_PER_CHUNK_NUM_STAGES", "two")
        with pytest.raises(ConfigError, match="NUM_STAGES is 'two'"):
            _enforce_triton_env_var(SMALL | {"ssd_dispatch": "triton"}, print)
        _enforce_triton_env_var(SMALL | {"ssd_dispatch": "fused"}, print)

    @pytest.mark.parametrize("dispatch", ["triton", "fused"])
    def test_an_enabled_kernel_passes(self, dispatch, monkeypatch):
        monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
        lines, fields = [], {"ssd_dispatch": dispatch}
        _enforce_triton_env_var(fields, lines.append)
        assert fields == {"ssd_dispatch": dispatch} and lines == []

    @pytest.mark.parametrize("fields", [{}, {"ssd_dispatch": "pytorch"}], ids=str)
    def test_pytorch_is_never_touched(self, fields, monkeypatch):
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        lines, before = [], dict(fields)
        _enforce_triton_env_var(fields, lines.append)
        assert fields == before and lines == []

    def test_training_and_generation_apply_it(self, tmp_path, monkeypatch, capsys):
        """To their own copy of the fields; the run keeps what was asked for."""
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        raw = raw_config(prepare_corpus(tmp_path), tmp_path / "run")
        raw["model"]["ssd_dispatch"] = "triton"
        config = check_config(raw, "test")
        run = new_run(config)
        assert capsys.readouterr().out.count("[warn] ssd_dispatch='triton'") == 1
        assert run.model.cfg.ssd_dispatch == "pytorch"
        assert config.model.ssd_dispatch == "triton"
        run.save()
        lines = []
        model, _ = load_for_generation(tmp_path / "run", lines.append)
        assert model.cfg.ssd_dispatch == "pytorch"
        assert len(lines) == 1 and lines[0].startswith("[warn] ssd_dispatch='triton'")
        monkeypatch.setenv("ENABLE_TRITON_KERNELS", "1")
        assert new_run(config).model.cfg.ssd_dispatch == "triton"
        model, _ = load_for_generation(tmp_path / "run", lines.append)
        assert model.cfg.ssd_dispatch == "triton" and len(lines) == 1

    @needs_triton
    def test_direct_calls_do_not_ask(self, launches, monkeypatch):
        monkeypatch.delenv("ENABLE_TRITON_KERNELS", raising=False)
        small_model("triton")(small_tokens())
        assert len(launches) == SMALL["n_layers"]


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.gate
class TestPerChunkSsdKernelGPU:
    """At sizes too slow for the interpreter, and what only a GPU can fail."""

    def test_forward_matches_pytorch_tiny(self):
        assert_forward_matches_pytorch(random_chunks(lead=(1, 1, 1)), atol=1e-3)

    def test_forward_matches_pytorch_bf16(self):
        chunks = random_chunks(64, 64, 64, lead=(2, 4, 4)).map(rounded)
        assert_forward_matches_pytorch(chunks, atol=1e-2)

    def test_forward_production_shape(self):
        assert_forward_matches_pytorch(
            random_chunks(64, 64, 64, lead=(2, 8, 16)), atol=1e-3
        )

    def test_forward_within_its_bound_on_the_reference_distribution(self):
        case = random_case(2048, batch=2, heads=4, dim=64, states=64)
        expected_y, expected_final = ssd_naive_complex(
            *on_device(case.double()), return_final_states=True
        )
        for precision, limit in (("ieee", FORWARD_LIMIT), ("tf32", 2e-3)):
            y, final = triton_scan(
                *on_device(case),
                chunk_size=64,
                precision=precision,
                return_final_states=True,
            )
            assert relative_error(y, expected_y.real) < limit
            assert relative_error(final, expected_final) < limit

    def test_autograd_backward_runs(self):
        chunks = random_chunks(64, 64, 64).leaves()
        functional(per_chunk_ssd_triton(*chunks)).backward()
        for name, z in chunks._asdict().items():
            assert z.grad.is_cuda and z.grad.norm() > 0, name
            assert torch.isfinite(torch.view_as_real(z.grad)).all(), name

    def test_backward_matches_pytorch_dispatch(self):
        case = on_device(random_case(256, dim=64, states=64, heads=4))
        assert_backward_matches_pytorch(case, 1e-2, chunk_size=64)

    def test_the_same_launch_gives_the_same_bits(self):
        chunks = random_chunks(64, 64, 64, lead=(2, 8, 16))
        first, second = (per_chunk_ssd_triton(*chunks) for _ in range(2))
        for z, same in zip(first, second, strict=True):
            assert torch.equal(z, same)
