"""Sum and norm, gate, and softmax in one pass: values, gradients, and where they run.

Without a GPU the kernels run in Triton's interpreter, on one they are compiled. What is
expected comes from PyTorch's operations in float64, on the numbers that are read.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from kernel_cases import DEVICE, needs_triton, small_model, small_tokens
from torch import nn

from mamba3lite.models import row_kernels

pytestmark = needs_triton
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
every_dtype = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)


def noise(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)


def leaf(z):
    return z.detach().clone().requires_grad_()


def in_double(z):
    return z.detach().double().requires_grad_()


def assert_close(got, wanted, bound):
    for one, other in zip(got, wanted, strict=True):
        assert one.shape == other.shape and relative_error(one, other) < bound


def norm_of(width, seed=3):
    norm = nn.RMSNorm(width, 1e-5).to(DEVICE)
    norm.weight.data = 1 + 0.3 * noise(width, seed=seed)
    return norm


class TestAddNorm:
    @every_dtype
    @pytest.mark.parametrize("width", [64, 40, 3])
    @pytest.mark.parametrize("shape", [(1, 1), (2, 35)], ids=str)
    def test_value_and_gradients(self, shape, width, dtype):
        """Of the sum and its norm, as autocast has it: stream and gain in float32."""
        u, norm = noise(*shape, width), norm_of(width)
        branch = noise(*shape, width, seed=1, dtype=dtype)
        dsum, dout = noise(2, *shape, width, seed=2)
        leaves = leaf(u), leaf(branch), norm.weight
        with torch.autocast(
            DEVICE.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16
        ):
            got = row_kernels.add_norm(*leaves[:2], norm)
        assert [z.dtype for z in got] == [torch.float32, dtype]
        exact = [in_double(z) for z in leaves]
        total = exact[0] + exact[1]
        wanted = total, F.rms_norm(total, (width,), exact[2], norm.eps)
        assert_close(got[:1], wanted[:1], 1e-6)
        assert_close(got[1:], wanted[1:], ROUNDING[dtype])
        seeds = dsum, dout.to(dtype)
        got = torch.autograd.grad(got, leaves, seeds)
        assert [z.dtype for z in got] == [torch.float32, dtype, torch.float32]
        seeds = [z.double() for z in seeds]
        assert_close(got, torch.autograd.grad(wanted, exact, seeds), ROUNDING[dtype])

    @pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
    @pytest.mark.parametrize("adds", [True, False])
    def test_either_output_alone_has_its_gradient(self, adds, used):
        u, branch, norm = noise(9, 32), noise(9, 32, seed=1), norm_of(32)
        leaves = [leaf(u), leaf(branch)] if adds else [leaf(u)]
        got = row_kernels.add_norm(leaves[0], leaves[1] if adds else None, norm)
        exact = [in_double(z) for z in leaves]
        total = sum(exact)
        gain = in_double(norm.weight)
        wanted = total, F.rms_norm(total, (32,), gain, norm.eps)
        dout = noise(2, 9, 32, seed=2)
        got, wanted = (
            torch.autograd.grad(sum((outputs[i] * dout[i]).sum() for i in used), inputs)
            for outputs, inputs in ((got, leaves), (wanted, exact))
        )
        assert_close(got, wanted, 2e-6)

    @pytest.mark.gate
    def test_more_rows_than_programs_and_the_same_bits_twice(self, monkeypatch):
        """dgain is the sum of every program's share."""
        monkeypatch.setattr(row_kernels, "_SHARES", 4)
        u, norm = leaf(noise(35, 16)), norm_of(16)
        dout = noise(35, 16, seed=2)
        once, again = (
            torch.autograd.grad(
                row_kernels.add_norm(u, None, norm)[1], (u, norm.weight), dout
            )
            for _ in range(2)
        )
        exact = in_double(u), in_double(norm.weight)
        out = F.rms_norm(exact[0], (16,), exact[1], norm.eps)
        assert_close(once, torch.autograd.grad(out, exact, dout.double()), 2e-6)
        assert all(map(torch.equal, once, again))

    def test_a_second_derivative_is_refused(self):
        u = leaf(noise(4, 16))
        for out in (
            row_kernels.add_norm(u, None, norm_of(16))[1],
            row_kernels.swiglu(u),
        ):
            with pytest.raises(RuntimeError, match="no second derivative"):
                torch.autograd.grad(out.sum(), u, create_graph=True)


class TestSwiGLU:
    @every_dtype
    @pytest.mark.parametrize("shape", [(1, 2), (2, 5, 24), (3, 2 * 1500)], ids=str)
    def test_value_and_gradients(self, shape, dtype):
        both = leaf(4 * noise(*shape, dtype=dtype))
        exact = in_double(both)
        gate, up = exact.chunk(2, dim=-1)
        got, wanted = row_kernels.swiglu(both), F.silu(gate) * up
        dout = noise(*wanted.shape, seed=1, dtype=dtype)
        assert got.dtype == dtype
        assert_close([got], [wanted], ROUNDING[dtype])
        got = torch.autograd.grad(got, both, dout)
        wanted = torch.autograd.grad(wanted, exact, dout.double())
        assert_close(got, wanted, ROUNDING[dtype])

    @pytest.mark.filterwarnings("ignore:overflow encountered in exp")
    def test_a_gate_far_from_zero(self):
        """silu(-200) is 0, not a division by infinity; silu(200) is 200."""
        both = torch.tensor([[-200.0, 200.0, 3.0, 3.0]], device=DEVICE)
        assert row_kernels.swiglu(both).tolist() == [[0.0, 600.0]]


class TestSoftmax:
    @every_dtype
    @pytest.mark.parametrize("vocab", [1, 101, 5000])
    def test_gradient_of_the_cross_entropy(self, vocab, dtype):
        """In place, in the dtype of the logits; padding becomes 0."""
        width = -(-vocab // 64) * 64
        logits = 3 * noise(5, width, dtype=dtype)
        index = torch.randint(vocab, (5, 1), device=DEVICE)
        exact = in_double(logits[:, :vocab])
        loss = F.cross_entropy(exact, index[:, 0], reduction="none")
        (wanted,) = torch.autograd.grad(loss.sum(), exact)
        log_p = row_kernels.softmax_less_target_(logits, index, vocab)
        assert log_p.dtype == torch.float32 and log_p.shape == (5, 1)
        assert (log_p[:, 0] + loss.detach()).abs().max() < 1e-5
        assert (logits[:, :vocab] - wanted).abs().max() < ROUNDING[dtype]
        assert logits[:, vocab:].eq(0).all()

    def test_extremes(self):
        """Far apart, all equal, one impossible; NaN stays in its row."""
        logits = torch.zeros(4, 64, device=DEVICE)
        logits[0, 1] = 1e30
        logits[2, 5] = float("-inf")
        logits[3, 0] = float("nan")
        index = torch.tensor([[1], [2], [3], [4]], device=DEVICE)
        log_p = row_kernels.softmax_less_target_(logits, index, 40)[:, 0]
        assert log_p[0] == 0 and logits[0].eq(0).all()
        assert torch.allclose(log_p[1].exp(), torch.tensor(1 / 40).to(DEVICE))
        assert torch.allclose(log_p[2].exp(), torch.tensor(1 / 39).to(DEVICE))
        assert logits[2, 5] == 0 and log_p[3].isnan() and not log_p[:3].isnan().any()


class TestInTheModel:
    @pytest.fixture
    def gradients(self, monkeypatch):
        """Loss and gradients of a model, with these kernels or without."""

        def run(fused, dispatch="fused"):
            monkeypatch.setattr(row_kernels, "fuses_rows", lambda z: fused)
            calls = []
            start = row_kernels._start
            with monkeypatch.context() as patch:
                patch.setattr(
                    row_kernels,
                    "_start",
                    lambda kernel, *args, **constants: (
                        calls.append(kernel.__name__),
                        start(kernel, *args, **constants),
                    ),
                )
                model = small_model(dispatch, ssd_precision="ieee")
                tokens = small_tokens()
                loss = model(tokens, targets=tokens)
                loss.backward()
            named = {n: p.grad for n, p in model.named_parameters()}
            return loss.detach(), named, calls

        return run

    def test_same_loss_and_gradients(self, gradients):
        loss, fused, calls = gradients(True)
        plain_loss, plain, none = gradients(False)
        names = {"_norm_kernel", "_norm_backward_kernel"}
        names |= {"_swiglu_kernel", "_swiglu_backward_kernel"}
        assert names <= set(calls)
        if DEVICE.type == "cpu":
            assert not none
        assert relative_error(loss, plain_loss) < 1e-6
        for name, grad in plain.items():
            assert relative_error(fused[name], grad) < 1e-4, name

    def test_another_dispatch_keeps_to_pytorch(self, gradients):
        assert not gradients(True, "pytorch")[2]

    @pytest.mark.skipif(DEVICE.type == "cuda", reason="says what a CPU does")
    def test_a_cpu_takes_pytorchs_operations(self):
        assert not row_kernels.fuses_rows(torch.zeros(1, 4))
