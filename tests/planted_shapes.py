"""Wrong shapes that must be refused while annotations are checked.

Not collected by itself: tests/test_shapes.py runs it, first, under the import hook of
jaxtyping with beartype. Each call here would pass without the hook, by broadcasting.
"""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from cases import random_case
from jaxtyping import TypeCheckError

from mamba3lite.models import (
    mamba_block,
    ssd_complex,
    ssd_fused,
    ssd_triton,
    transformer,
)

MODULES = [
    *("ssd_complex", "ssd_triton", "ssd_fused"),
    *("mimo", "mamba_block", "transformer"),
]
SMALL = {"vocab_size": 37, "d_model": 16, "n_layers": 1, "n_heads": 2, "head_dim": 4}
SMALL |= {"state_dim": 4, "chunk_size": 8, "ffn_dim": 24}


def chunk_inputs() -> tuple:
    case = random_case(24, states=3)
    B, C, x = (z.unflatten(1, (3, 8)) for z in (case.B_t, case.C_t, case.x))
    A_log = -torch.rand(2, 3, 8, 2) + 0j
    return B, C, x, A_log, A_log.exp()


def test_the_right_shapes_pass():
    ssd_complex.per_chunk_ssd_pytorch(*chunk_inputs())


@pytest.mark.parametrize(
    ("position", "name"), [(0, "Bc"), (3, "A_log"), (4, "decay_states")]
)
def test_an_argument_of_one_head_for_all_is_refused(position, name):
    inputs = list(chunk_inputs())
    inputs[position] = inputs[position][:, :, :, :1]
    with pytest.raises(TypeCheckError, match=f"'{name}'"):
        ssd_complex.per_chunk_ssd_pytorch(*inputs)


def test_a_real_tensor_for_a_complex_one_is_refused():
    inputs = list(chunk_inputs())
    inputs[4] = inputs[4].real
    with pytest.raises(TypeCheckError, match="'decay_states'"):
        ssd_complex.per_chunk_ssd_pytorch(*inputs)


def test_a_result_of_the_wrong_shape_is_refused(monkeypatch):
    """The scan forgets to cut the padding off."""

    def uncut(x, B_t, C_t, log_decay, initial_states, *options):
        return torch.zeros(2, 24, 2, 4), initial_states

    monkeypatch.setattr(ssd_complex, "_scan_chunks", uncut)
    with pytest.raises(TypeCheckError, match="return value"):
        ssd_complex.ssd_complex_chunkwise(*random_case(18), 8)


def test_a_fused_result_of_the_wrong_shape_is_refused(monkeypatch):
    """The operator hands back y with its heads flattened; the arguments are right."""
    proj, A = torch.zeros(2, 18, 2 * 81), torch.zeros(2, dtype=torch.complex64)
    sizes = {"n_heads": 2, "head_dim": 16, "state_dim": 16, "chunk_size": 16}
    y = torch.zeros(2, 18, 2, 16)
    monkeypatch.setattr(ssd_triton, "HAS_TRITON", True)
    monkeypatch.setattr(ssd_fused, "_check_device", lambda *args: None)
    monkeypatch.setattr(ssd_fused, "_forward", lambda *args: (y, *[None] * 3))
    monkeypatch.setattr(ssd_fused, "_save", lambda *args: None)
    ssd_fused.ssd_fused(proj, A, **sizes)
    y = y.flatten(2)
    with pytest.raises(TypeCheckError, match="return value"):
        ssd_fused.ssd_fused(proj, A, **sizes)


def test_a_wrong_shape_inside_the_model_is_refused(monkeypatch):
    """The scan hands the block one head for all; the mixer would take it."""
    monkeypatch.setattr(
        mamba_block.Mamba3Block,
        "_ssd_with_dispatch",
        lambda self, proj, reset=None, **options: (
            torch.zeros(*proj.shape[:2], 8),
            None,
        ),
    )
    with pytest.raises(TypeCheckError, match="'y'"):
        transformer.Mamba3Transformer(SMALL)(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("module", MODULES)
def test_every_annotated_function_is_checked(module):
    module = importlib.import_module(f"mamba3lite.models.{module}")
    own = [
        o
        for o in vars(module).values()
        if getattr(o, "__module__", "") == module.__name__
    ]
    functions = [f for f in own if inspect.isfunction(f)]
    for kind in filter(inspect.isclass, own):
        functions += [f for f in vars(kind).values() if inspect.isfunction(f)]
    annotated = [f for f in functions if "Tensor" in str(inspect.signature(f))]
    assert annotated
    for function in annotated:
        assert hasattr(function, "__wrapped__"), function.__qualname__
