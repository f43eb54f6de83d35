# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_complex"]
# # The chunkwise scan
# The same numbers as the loop, from matrix products over chunks of time.

# %%
from mamba3lite.models.ssd_complex import _check_scan_inputs, ssd_naive_complex

# %% [markdown]
# ## The causal matrix

# %% tags=["export"]
def causal_decay(
    log_magnitude: Float[Tensor, "*batch C"], dtype: torch.dtype
) -> Float[Tensor, "*batch C C"]:
    """How much of every earlier position is left at every later one.

    Args:
        log_magnitude: real log decay of each step, <= 0, in float64.
        dtype: real dtype of the result.

    Returns:
        D with D[l, s] = exp(sum of log_magnitude over s+1..l) for s <= l, else 0;
        the diagonal is exactly 1.

    Source: notebook 03, "The causal matrix"; arXiv 2405.21060, section 6.
    """
    total = log_magnitude.cumsum(-1)
    span = total.unsqueeze(-1) - total.unsqueeze(-2)
    steps = span.shape[-1]
    future = torch.ones(steps, steps, dtype=torch.bool, device=span.device).triu(1)
    # Select before exp: above the diagonal the exponent is positive and exp overflows.
    return span.masked_fill_(future, -torch.inf).to(dtype).exp()

# %% [markdown]
# ## A phase factors, a magnitude must not

# %% tags=["export"]
def _unit_phase(angle: Float[Tensor, "*shape"], dtype: torch.dtype) -> Tensor:
    """exp(i angle), computed in the precision of angle and cast to complex dtype."""
    return torch.complex(angle.cos(), angle.sin()).to(dtype)


def _pairs(z: Complex[Tensor, "*batch N"]) -> Float[Tensor, "*batch 2*N"]:
    """A complex vector as one real vector (re, im, re, im, ...) of twice the length."""
    return torch.view_as_real(z).flatten(-2)


def _real_product(
    u: Complex[Tensor, "*batch L N"], v: Complex[Tensor, "*batch S N"]
) -> Float[Tensor, "*batch L S"]:
    """Re(u v^T) as one real matrix product: Re(a b) = <conj(a), b> over (re, im)."""
    return _pairs(u.conj().resolve_conj()) @ _pairs(v).mT

# %% [markdown]
# ## One chunk

# %% tags=["export"]
def per_chunk_ssd_pytorch(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Inexact[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
) -> tuple[Inexact[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """Everything that happens inside a chunk, for all chunks at once.

    Y_diag = ((C B^T) * L) X and state = sum_s decay_states[s] B_s x_s^T, with
    L[l, s] = exp(sum of A_log over s+1..l) for s <= l, else 0.

    Args:
        Bc, Cc: write and read vectors.
        Xc: input, real or complex.
        A_log: log decay of each step, Re <= 0, each angle within [-pi, pi]. Sums are
            taken in float64; complex128 keeps them exact to that precision.
        decay_states: factor from each position to the right edge of its chunk, taken
            as given.

    Returns:
        `(Y_diag, state)`: Y_diag complex for complex Xc, and Re(L * C B^T) X, real,
        for real Xc; state at the right edge of each chunk, with nothing carried in.

    Source: notebook 03, "One chunk".
    """
    Bc, Cc, Xc = (z.transpose(2, 3) for z in (Bc, Cc, Xc))  # (B, nc, H, C, .)
    A_log, decay_states = A_log.transpose(2, 3), decay_states.transpose(2, 3)
    magnitude = causal_decay(A_log.real.double(), Bc.real.dtype)
    phase = _unit_phase(A_log.imag.double().cumsum(-1), Bc.dtype).unsqueeze(-1)
    read, write = Cc * phase, Bc * phase.conj()
    kept = Bc * decay_states.to(Bc.dtype).unsqueeze(-1)
    if Xc.is_complex():
        Y_diag = (magnitude * (read @ write.mT)) @ Xc
        state = Xc.mT @ kept
    else:
        Y_diag = (magnitude * _real_product(read, write)) @ Xc
        state = torch.view_as_complex((Xc.mT @ _pairs(kept)).unflatten(-1, (-1, 2)))
    return Y_diag.transpose(2, 3), state

# %% [markdown]
# ## Between chunks

# %% tags=["export"]
def _pass_states(
    state: Complex[Tensor, "B nc H P N"],
    chunk_decay: Complex[Tensor, "B nc H"],
    initial_states: Complex[Tensor, "B H P N"],
) -> tuple[Complex[Tensor, "B nc H P N"], Complex[Tensor, "B H P N"]]:
    """The state entering every chunk, and the one that leaves the last.

    Args:
        state: what each chunk adds by its right edge.
        chunk_decay: what each chunk leaves of the state that enters it; magnitude
            <= 1, so that no product can overflow.
        initial_states: the state entering the first chunk.

    Source: notebook 03, "Between chunks".
    """
    entering, carry = [], initial_states
    for decay, added in zip(chunk_decay.unbind(1), state.unbind(1), strict=True):
        entering.append(carry)
        carry = decay[..., None, None] * carry + added
    return torch.stack(entering, dim=1), carry

# %% [markdown]
# ## Log decays that stay small

# %% tags=["export"]
def _log_decay(
    dt: Float[Tensor, "B T H"],
    A: Complex[Tensor, "H"],
    reset: Bool[Tensor, "B T"] | None,
) -> Complex[Tensor, "B T H"]:
    """Log decay of each step in complex128, its angle reduced to [-pi, pi].

    At a reset the log decay is a constant so negative that its exponential is exactly
    0 in the working precision: -200, or -800 for double inputs.
    """
    log_decay = F.softplus(dt.double()).unsqueeze(-1) * A.to(torch.complex128)[:, None]
    log_decay = log_decay.squeeze(-1)
    turns = (log_decay.imag.detach() / (2 * torch.pi)).round()
    log_decay = log_decay - torch.complex(torch.zeros_like(turns), turns * 2 * torch.pi)
    if reset is not None:
        forget = -200.0 if dt.dtype == torch.float32 else -800.0
        log_decay = log_decay.masked_fill(reset.unsqueeze(-1), forget)
    return log_decay


def _exp(log_factor: Complex[Tensor, "*shape"], dtype: torch.dtype) -> Tensor:
    """exp of a complex128 log factor, cast to the complex working dtype."""
    return log_factor.exp().to(dtype)

# %% [markdown]
# ## The whole scan

# %% tags=["export"]
_DISPATCHES = ("pytorch", "triton", "fused")


def _check_dispatch(ssd_dispatch: str, chunk_size: int, precision: str | None) -> None:
    """Refuse an unknown dispatch, a chunk size below 1 or a precision not on offer."""
    if ssd_dispatch not in _DISPATCHES:
        raise ValueError(
            f"ssd_dispatch is {ssd_dispatch!r}; wanted one of {', '.join(_DISPATCHES)}"
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    if ssd_dispatch != "pytorch":
        raise ImportError(
            f"ssd_dispatch={ssd_dispatch!r} needs a kernel that this version of "
            "mamba3lite does not have; use ssd_dispatch='pytorch'"
        )
    if precision not in (None, "ieee"):
        raise ValueError(
            f"precision is {precision!r}; ssd_dispatch='pytorch' takes None or 'ieee'"
        )


def _to_chunks(
    z: Shaped[Tensor, "B T H *rest"], chunk: int
) -> Shaped[Tensor, "B nc C H *rest"]:
    """Pad time on the right with zeros to whole chunks, and cut it into them."""
    missing = -z.shape[1] % chunk
    if missing:
        z = torch.cat([z, z.new_zeros(z.shape[0], missing, *z.shape[2:])], dim=1)
    # One copy puts heads before time in memory; every matrix product profits.
    return z.unflatten(1, (-1, chunk)).transpose(2, 3).contiguous().transpose(2, 3)


def ssd_complex_chunkwise(
    x: Inexact[Tensor, "B T H D"],
    A: Complex[Tensor, "H"],
    B_t: Complex[Tensor, "B T H N"],
    C_t: Complex[Tensor, "B T H N"],
    dt: Float[Tensor, "B T H"],
    chunk_size: int = 64,
    ssd_dispatch: str = "pytorch",
    *,
    precision: str | None = None,
    initial_states: Complex[Tensor, "B H D N"] | None = None,
    return_final_states: bool = False,
    reset: Bool[Tensor, "B T"] | None = None,
) -> (
    Float[Tensor, "B T H D"]
    | tuple[Float[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]
):
    """The real part of `ssd_naive_complex`, computed chunk by chunk.

    Args:
        x: input, real or complex; a real x is never promoted.
        A: decay rate per head, Re(A) < 0.
        B_t, C_t: write and read vectors of every step.
        dt: raw step parameter, real.
        chunk_size: steps per chunk; T need not be a multiple.
        ssd_dispatch: "pytorch"; "triton" and "fused" name kernels.
        precision: None for the default of the dispatch, or "ieee".
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last real token; fed back
            as initial_states it continues the sequence.
        reset: True where a document starts: the state arriving there is dropped.

    Returns:
        y, real float32 (float64 for double inputs), or `(y, final_states)`.

    Raises:
        TypeError: a dtype the scan is not defined for, or mixed precision.
        ValueError: a shape, device, chunk_size, dispatch or precision that does not
            fit, or T = 0.
        ImportError: the kernel behind ssd_dispatch is not there.

    Source: notebook 03, "The whole scan"; arXiv 2405.21060, section 6.
    """
    _check_scan_inputs(x, A, B_t, C_t, dt, initial_states, reset)
    _check_dispatch(ssd_dispatch, chunk_size, precision)
    batch, time, heads, dim = x.shape
    if initial_states is None:
        initial_states = B_t.new_zeros(batch, heads, dim, B_t.shape[-1])
    # States stay in float32: autocast must not reach the products below.
    with torch.autocast(x.device.type, enabled=False):
        y, final_states = _scan_chunks(
            x, B_t, C_t, _log_decay(dt, A, reset), min(chunk_size, time), initial_states
        )
    return (y, final_states) if return_final_states else y


def _scan_chunks(x, B_t, C_t, log_decay, chunk, initial_states):
    """Cut into chunks, solve each, pass the states, add what they read."""
    dtype = B_t.dtype
    # Padding the log decay with 0 leaves the final state alone; dt = 0 would decay it.
    Xc, Bc, Cc, A_log = (_to_chunks(z, chunk) for z in (x, B_t, C_t, log_decay))
    A_cumsum = A_log.cumsum(2)
    total = A_cumsum[:, :, -1:]
    Y_diag, state = per_chunk_ssd_pytorch(
        Bc, Cc, Xc, A_log, _exp(total - A_cumsum, dtype)
    )
    entering, final_states = _pass_states(
        state, _exp(total.squeeze(2), dtype), initial_states
    )
    read = Cc * _exp(A_cumsum, dtype).unsqueeze(-1)
    Y_off = _real_product(read.transpose(2, 3), entering).transpose(2, 3)
    y = Y_diag.real + Y_off if Y_diag.is_complex() else Y_diag + Y_off
    return y.flatten(1, 2)[:, : x.shape[1]], final_states
