"""The head mixer: one dense matrix over all channels of all heads."""

from __future__ import annotations

import pytest
import torch
from cases import relative_error

from mamba3lite.models.mimo import MIMO


def random_mixer(heads: int = 3, dim: int = 4) -> MIMO:
    torch.manual_seed(0)
    mixer = MIMO(heads, dim)
    torch.nn.init.normal_(mixer.weight)
    return mixer


def test_it_starts_as_the_identity_and_says_so():
    mixer = MIMO(3, 4)
    y = torch.randn(2, 5, 3, 4)
    assert torch.equal(mixer(y), y)
    assert mixer.weight._identity_init is True
    assert torch.equal(mixer.weight, torch.eye(12))


def test_it_is_one_square_matrix_without_a_bias():
    assert {name: tuple(p.shape) for name, p in MIMO(3, 4).named_parameters()} == {
        "weight": (12, 12)
    }
    assert sum(p.numel() for p in MIMO(16, 64).parameters()) == 1_048_576


def test_every_output_channel_sums_over_all_heads():
    """out[h, d] = sum over (g, e) of weight[(h, d), (g, e)] y[g, e]."""
    mixer, y = random_mixer(), torch.randn(2, 5, 3, 4)
    weight = mixer.weight.view(3, 4, 3, 4)
    expected = torch.einsum("hdge,btge->bthd", weight.double(), y.double())
    out = mixer(y)
    assert out.shape == y.shape
    assert relative_error(out, expected) < 1e-6


def test_it_mixes_heads_and_not_time():
    mixer, y = random_mixer(), torch.zeros(1, 5, 3, 4)
    y[0, 2, 1, 3] = 1.0
    out = mixer(y)
    assert (out[0, 2] != 0).all()  # one channel reaches every channel of every head
    out[0, 2] = 0
    assert not out.any()


def test_it_is_linear():
    mixer, u, v = random_mixer(), *torch.randn(2, 1, 5, 3, 4)
    assert relative_error(mixer(2 * u - v), 2 * mixer(u) - mixer(v)) < 1e-6


def test_gradients_reach_the_weight_and_the_input():
    mixer = random_mixer(2, 2).double()
    y = torch.randn(1, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(mixer, y)
    mixer(y).sum().backward()
    expected = y.detach().sum((0, 1)).flatten().expand(4, 4)
    torch.testing.assert_close(mixer.weight.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_it_follows_the_dtype_of_its_weight(dtype):
    mixer = MIMO(3, 4).to(dtype)
    assert mixer(torch.randn(1, 2, 3, 4, dtype=dtype)).dtype == dtype


def test_it_takes_a_view_that_is_not_contiguous():
    mixer, y = random_mixer(), torch.randn(2, 3, 5, 4)
    assert torch.equal(mixer(y.transpose(1, 2)), mixer(y.transpose(1, 2).contiguous()))
