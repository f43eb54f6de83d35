"""Each classic mistake in a chunked scan, made on purpose and seen to be wrong.

`chunked` is the textbook form of the algorithm, in double precision and without any
of the package's numerical care. Without a trap it equals the oracle; with one it does
not. Several traps are invisible when every step has the same length: those are shown
to pass at dt = 0, so that nobody tests there alone.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

CHUNK = 4


def case(batch=2, time=16, heads=2, dim=4, states=4, dt=None):
    """Random inputs in double precision; dt varies with time unless it is given."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=torch.complex128):
        return torch.randn(*shape, dtype=dtype, generator=random)

    x = normal(batch, time, heads, dim, dtype=torch.float64)
    A = normal(heads) - 1
    B_t, C_t = normal(batch, time, heads, states), normal(batch, time, heads, states)
    steps = normal(batch, time, heads, dtype=torch.float64)
    return x, A, B_t, C_t, steps if dt is None else torch.full_like(steps, dt)


def cut(z, chunk):
    """(B, T, ...) to (B, nc, C, ...), padded with zeros on the right."""
    missing = -z.shape[1] % chunk
    z = torch.cat([z, z.new_zeros(z.shape[0], missing, *z.shape[2:])], dim=1)
    return z.unflatten(1, (-1, chunk))


def chunked(x, A, B_t, C_t, dt, *, chunk=CHUNK, trap=None):
    """y and the final state (B, H, D, N), with at most one mistake."""
    if trap == "pad dt":
        dt = cut(dt, chunk).flatten(1, 2)
    log_decay = (dt if trap == "raw dt" else F.softplus(dt)) * A
    X, B, C, log = (cut(z, chunk) for z in (x.to(B_t.dtype), B_t, C_t, log_decay))
    total = log.cumsum(2)  # inclusive
    L = causal_matrix(total - log if trap == "exclusive sum" else total, trap)
    Y_diag = torch.einsum("bzlhn,bzshn,bzlsh,bzshd->bzlhd", C, B, L, X)
    last = total[:, :, -1] if trap == "no keepdim" else total[:, :, -1:]
    S = torch.einsum("bzsh,bzshd,bzshn->bzhdn", (last - total).exp(), X, B)
    entering, final = pass_states(S, total[:, :, -1], trap)
    Y_off = torch.einsum("bzlhn,bzlh,bzhdn->bzlhd", C, total.exp(), entering)
    y = (Y_diag + Y_off).flatten(1, 2)
    return (y if trap == "no cut" else y[:, : x.shape[1]]), final


def causal_matrix(total, trap):
    span = total.unsqueeze(3) - total.unsqueeze(2)
    keep = torch.ones(span.shape[2:4], dtype=torch.bool).tril(-(trap == "strict"))
    keep = keep[:, :, None]
    if trap == "exp before select":
        return span.exp() * keep
    return torch.where(keep, torch.where(keep, span, 0).exp(), 0)


def pass_states(S, chunk_total, trap):
    """G_z = sum over c < z of exp(CD[z-1] - CD[c]) S_c, and G behind the last chunk."""
    CD = torch.cat([torch.zeros_like(chunk_total[:, :1]), chunk_total.cumsum(1)], dim=1)
    G = []
    for z in range(S.shape[1] + 1):
        G.append(torch.zeros_like(S[:, 0]))
        for c in range(z):
            late, early = CD[:, z], CD[:, c + 1]  # CD[i + 1] in code is CD[i] above
            if trap == "window through z" and z < S.shape[1]:
                late = CD[:, z + 1]
            if trap == "shifted window" and z < S.shape[1]:
                late, early = CD[:, z + 1], CD[:, c + 2]
            G[z] = G[z] + (late - early).exp()[..., None, None] * S[:, c]
    return torch.stack(G[:-1], dim=1), G[-1]


def error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("time", [1, 4, 16, 18])
def test_without_a_trap_the_textbook_form_is_the_oracle(time):
    inputs = case(time=time)
    y, final = chunked(*inputs)
    wanted, wanted_final = ssd_naive_complex(*inputs, return_final_states=True)
    assert error(y, wanted) < 1e-12 and error(final, wanted_final) < 1e-12


@pytest.mark.parametrize("trap", ["strict", "window through z", "raw dt"])
def test_some_traps_are_visible_at_once(trap):
    inputs = case(dt=0.0)
    assert error(chunked(*inputs, trap=trap)[0], ssd_naive_complex(*inputs)) > 0.01


@pytest.mark.parametrize("trap", ["exclusive sum", "shifted window"])
def test_some_traps_are_invisible_while_dt_is_constant(trap):
    same, varying = case(dt=0.0), case()
    assert error(chunked(*same, trap=trap)[0], ssd_naive_complex(*same)) < 1e-12
    assert error(chunked(*varying, trap=trap)[0], ssd_naive_complex(*varying)) > 0.01


def test_last_value_without_keepdim_passes_silently_when_chunks_are_as_many_as_steps():
    inputs = case(batch=1, time=CHUNK * CHUNK)
    wrong, _ = chunked(*inputs, trap="no keepdim")  # (1, nc, H) against (1, nc, C, H)
    assert error(wrong, ssd_naive_complex(*inputs)) > 0.01
    with pytest.raises(RuntimeError, match="size"):
        chunked(*case(time=12), trap="no keepdim")


def test_forgetting_to_cut_leaves_the_padding_in_the_output():
    inputs = case(time=18)
    wrong, _ = chunked(*inputs, trap="no cut")
    assert wrong.shape[1] == 20
    assert ssd_complex_chunkwise(*inputs, chunk_size=CHUNK).shape[1] == 18


def test_exp_before_select_overflows_where_the_package_does_not():
    inputs = (
        z.to(torch.complex64 if z.is_complex() else torch.float32) for z in case()
    )
    x, A, B_t, C_t, dt = inputs
    A, dt = torch.full_like(A, -1), torch.full_like(dt, 60.0)
    wrong, _ = chunked(x, A, B_t, C_t, dt, trap="exp before select")
    assert not wrong.isfinite().all()
    assert chunked(x, A, B_t, C_t, dt)[0].isfinite().all()
    assert ssd_complex_chunkwise(x, A, B_t, C_t, dt, chunk_size=CHUNK).isfinite().all()


def test_padding_dt_decays_the_final_state():
    x, A, B_t, C_t, dt = case(time=18)
    _, wanted = ssd_naive_complex(x, A, B_t, C_t, dt, return_final_states=True)
    _, wrong = chunked(x, A, B_t, C_t, dt, trap="pad dt")
    assert error(wrong, wanted) > 0.01
    lost = torch.exp(2 * F.softplus(torch.zeros(())) * A)  # two padded steps of ln 2
    torch.testing.assert_close(wrong, wanted * lost[:, None, None])


def test_the_oracle_is_complex_and_only_its_real_part_is_comparable():
    inputs = case()
    oracle, y = ssd_naive_complex(*inputs), ssd_complex_chunkwise(*inputs)
    assert error(y, oracle) > 0.01 and error(y, oracle.real) < 1e-12


def test_states_are_dim_before_state_and_a_square_hides_the_difference():
    x, A, B_t, C_t, dt = case()
    halves = [[z[:, :8], z[:, 8:]] for z in (x, B_t, C_t, dt)]
    (x1, x2), (B1, B2), (C1, C2), (dt1, dt2) = halves
    wanted = ssd_naive_complex(x, A, B_t, C_t, dt)[:, 8:]
    _, state = ssd_naive_complex(x1, A, B1, C1, dt1, return_final_states=True)
    right = ssd_naive_complex(x2, A, B2, C2, dt2, initial_states=state)
    wrong = ssd_naive_complex(x2, A, B2, C2, dt2, initial_states=state.mT)
    assert error(right, wanted) < 1e-12 and error(wrong, wanted) > 0.01
    x, A, B_t, C_t, dt = case(dim=3)
    _, state = ssd_naive_complex(x, A, B_t, C_t, dt, return_final_states=True)
    with pytest.raises(ValueError, match="initial_states"):
        ssd_naive_complex(x, A, B_t, C_t, dt, initial_states=state.mT)
