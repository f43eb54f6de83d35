"""What the tests of the triton kernels share: the device, inputs and a small model."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from cases import Case, complex_normal, random_case
from torch import Tensor

from mamba3lite.models.transformer import Mamba3Transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COMPILED = DEVICE.type == "cuda"

# On a GPU `pytest -m gpu` runs them all. Triton is made for Linux alone, so that its
# absence there is a failure and not a skip.
needs_triton = (
    pytest.mark.gpu
    if COMPILED
    else pytest.mark.skipif(sys.platform != "linux", reason="requires triton")
)

try:
    from triton import OutOfResources

    TOO_LARGE = OutOfResources(300_000, 232_448, "shared memory")
except ImportError:
    TOO_LARGE = None  # only in tests that need triton


def wide_case(time: int, seed: int = 0, **changes) -> Case:
    """The reference distribution at the smallest sizes that a GPU takes."""
    return random_case(time, seed, **({"batch": 1, "dim": 16, "states": 16} | changes))


def on_device(case: Case) -> Case:
    return Case(*(z.to(DEVICE) for z in case))


def rounded(z: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The nearest numbers that dtype has, in the dtype of z."""
    if z.is_complex():
        return torch.view_as_complex(torch.view_as_real(z).to(dtype).to(z.real.dtype))
    return z.to(dtype).to(z.dtype)


def functional(outputs: tuple) -> Tensor:
    """One fixed random real functional of all that a function returns.

    Its weights are numbers of bfloat16, so that an output of any dtype gets the same
    gradient.
    """
    g = torch.Generator().manual_seed(7)
    total = 0
    for z in outputs:
        weight = rounded(complex_normal(*z.shape, generator=g))
        weight = weight if z.is_complex() else weight.real
        total = total + (z * weight.to(z)).real.sum()
    return total


def kernel_that(act):
    """A stand-in for a JIT kernel: launching it calls `act` with the arguments."""

    class Kernel:
        __name__ = "stand_in"

        def __getitem__(self, grid):
            return act

    return Kernel()


def raises(error: Exception):
    def act(*args, **options):
        raise error

    return act


def run_python(code: str, **environment: str | None) -> str:
    """What a fresh interpreter prints; None takes a variable out of its environment."""
    changed = os.environ | {k: v for k, v in environment.items() if v is not None}
    for name in (k for k, v in environment.items() if v is None):
        changed.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=changed
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- a model

SMALL = {
    "vocab_size": 37,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "head_dim": 16,
    "state_dim": 16,
    "chunk_size": 16,
    "ffn_dim": 24,
    "init_std": 0.3,
    "a_init": "spectrum",
}


def small_model(ssd_dispatch: str, **changes) -> Mamba3Transformer:
    torch.manual_seed(0)
    fields = SMALL | {"ssd_dispatch": ssd_dispatch} | changes
    return Mamba3Transformer(fields).to(DEVICE)


def small_tokens() -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, SMALL["vocab_size"], (2, 20), generator=g).to(DEVICE)


def three_forwards(model: Mamba3Transformer) -> tuple[list[Tensor], list[str]]:
    """Logits of three forward passes, and the RuntimeWarnings they gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = [model(small_tokens()) for _ in range(3)]
    return logits, [str(w.message) for w in caught if w.category is RuntimeWarning]


def assert_fell_back(model: Mamba3Transformer, *reason: str) -> None:
    """One warning per block over three forwards, and the PyTorch path in every bit."""
    logits, messages = three_forwards(model)
    assert len(messages) == SMALL["n_layers"]
    for layer, message in enumerate(messages):
        dispatch = model.cfg.ssd_dispatch
        assert message.startswith(
            f"layer {layer}: ssd_dispatch={dispatch!r} unavailable ("
        )
        assert message.endswith("); falling back to 'pytorch'")
        for part in reason:
            assert part in message
    sizes = ("head_dim", "state_dim", "chunk_size")
    plain = small_model("pytorch", **{name: getattr(model.cfg, name) for name in sizes})
    for got in logits:
        torch.testing.assert_close(got, plain(small_tokens()), atol=1e-5, rtol=0)
        assert torch.equal(got, plain(small_tokens()))
    assert all(layer._triton_fallback_warned for layer in model.layers)
    assert not any(layer.fuses(logits[0]) for layer in model.layers), "no part of it"
