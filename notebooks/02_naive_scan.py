# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_complex"]
# # The naive scan
# One Python loop over time, nothing rearranged: the oracle for everything after it.

# %%
from mamba3lite.models.ssd_complex import _discretise

# %% [markdown]
# ## What the scan accepts

# %% tags=["export"]
_PRECISIONS = {
    torch.float32: torch.float32,
    torch.complex64: torch.float32,
    torch.float64: torch.float64,
    torch.complex128: torch.float64,
}


def _check_scan_inputs(x, A, B_t, C_t, dt, initial_states=None, reset=None) -> None:
    """Refuse what the scan is not defined for.

    Raises:
        TypeError: dt not real, A, B_t, C_t or initial_states not complex, reset not
            bool, half precision, or single and double precision mixed.
        ValueError: T = 0, a wrong shape, or tensors on different devices.
    """
    named = {"x": x, "A": A, "B_t": B_t, "C_t": C_t, "dt": dt}
    if initial_states is not None:
        named["initial_states"] = initial_states
    for name, tensor in named.items():
        if tensor.dtype not in _PRECISIONS:
            raise TypeError(
                f"{name} is {tensor.dtype}; the scan takes float32, float64, "
                "complex64 or complex128"
            )
        if name == "dt" and tensor.is_complex():
            raise TypeError(f"dt is {tensor.dtype}; it must be real")
        if name not in ("x", "dt") and not tensor.is_complex():
            raise TypeError(f"{name} is {tensor.dtype}; it must be complex")
        if _PRECISIONS[tensor.dtype] != _PRECISIONS[x.dtype]:
            raise TypeError(
                f"{name} is {tensor.dtype} but x is {x.dtype}; "
                "all tensors must share one precision"
            )
    if reset is not None:
        if reset.dtype != torch.bool:
            raise TypeError(f"reset is {reset.dtype}; it must be torch.bool")
        named["reset"] = reset
    _check_scan_shapes(named)


def _check_scan_shapes(named: dict[str, Tensor]) -> None:
    """Refuse shapes that do not fit x (B, T, H, D), T = 0 and mixed devices."""
    x, B_t = named["x"], named["B_t"]
    if x.ndim != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; wanted (B, T, H, D)")
    batch, time, heads, dim = x.shape
    if time == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; T must be at least 1")
    states = B_t.shape[-1] if B_t.ndim else 0
    wanted = {
        "A": (heads,),
        "B_t": (batch, time, heads, states),
        "C_t": (batch, time, heads, states),
        "dt": (batch, time, heads),
        "initial_states": (batch, heads, dim, states),
        "reset": (batch, time),
    }
    for name, shape in wanted.items():
        if name in named and tuple(named[name].shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(named[name].shape)}; wanted {shape} "
                f"to fit x of shape {tuple(x.shape)}"
            )
    for name, tensor in named.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}")

# %% [markdown]
# ## The loop

# %% tags=["export"]
def ssd_naive_complex(
    x: Inexact[Tensor, "B T H D"],
    A: Complex[Tensor, "H"],
    B_t: Complex[Tensor, "B T H N"],
    C_t: Complex[Tensor, "B T H N"],
    dt: Float[Tensor, "B T H"],
    *,
    initial_states: Complex[Tensor, "B H D N"] | None = None,
    return_final_states: bool = False,
    reset: Bool[Tensor, "B T"] | None = None,
) -> (
    Complex[Tensor, "B T H D"]
    | tuple[Complex[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]
):
    """The state-space recurrence, one step at a time: the oracle.

    h_t = abar_t h_{t-1} + B_t x_t^T and y_t = sum_n C_{t,n} h_{t,n}, with
    abar_t = exp(softplus(dt_t) A). Works in complex64 and complex128; the dtype
    follows the inputs.

    Args:
        x: input, real or complex.
        A: decay rate per head, Re(A) < 0.
        B_t, C_t: write and read vectors of every step.
        dt: raw step parameter, real.
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last token.
        reset: True where a document starts: the state arriving there is dropped.

    Returns: y, complex, or `(y, final_states)`.

    Raises: TypeError, ValueError as in "What the scan accepts".

    Source: notebook 02, "The loop".
    """
    _check_scan_inputs(x, A, B_t, C_t, dt, initial_states, reset)
    abar = _discretise(dt, A)
    if initial_states is None:
        batch, _, heads, dim = x.shape
        initial_states = B_t.new_zeros(batch, heads, dim, B_t.shape[-1])
    h = initial_states.mT  # (B, H, N, D): one row of D channels per state
    y = []
    for t in range(x.shape[1]):
        arriving = abar[:, t, :, None, None] * h
        if reset is not None:
            arriving = torch.where(reset[:, t, None, None, None], 0, arriving)
        h = arriving + B_t[:, t, :, :, None] * x[:, t, :, None, :]
        y.append((C_t[:, t, :, :, None] * h).sum(-2))
    y = torch.stack(y, dim=1)
    return (y, h.mT) if return_final_states else y
