# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_complex"]
# # From a differential equation to a recurrence
# The state-space scan: discretization, the naive loop and the chunkwise algorithm.

# %% [markdown]
# ## The tools

# %% tags=["export"]
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Inexact, Shaped
from torch import Tensor

# %% [markdown]
# ## Three rules

# %% tags=["export"]
def discretise_zoh(
    A: Inexact[Tensor, "..."], delta: Float[Tensor, "..."]
) -> tuple[Inexact[Tensor, "..."], Inexact[Tensor, "..."]]:
    """Solve h' = A h + B x over one step exactly, for an input held constant.

    Args:
        A: decay rate, real or complex, in 1 / (unit of delta); broadcasts with delta.
        delta: step size, real, > 0.

    Returns:
        `(abar, bbar_factor)` with abar = exp(A delta) and
        bbar_factor = (exp(A delta) - 1) / A, which tends to delta as A tends to 0.
        Stable for every delta when Re(A) < 0.

    Source: notebook 01, "Three rules".
    """
    z = A * delta
    at_zero = A == 0
    # expm1 keeps the digits that exp(z) - 1 cancels for a small step.
    bbar_factor = torch.expm1(z) / torch.where(at_zero, 1, A)
    # At A = 0 this is delta; the term in z is there for its slope, delta^2 / 2.
    return z.exp(), torch.where(at_zero, delta * (1 + z / 2), bbar_factor)


def discretise_euler(
    A: Inexact[Tensor, "..."], delta: Float[Tensor, "..."]
) -> tuple[Inexact[Tensor, "..."], Inexact[Tensor, "..."]]:
    """Follow the slope at the start of the step (forward Euler).

    Args: as `discretise_zoh`.

    Returns:
        `(abar, bbar_factor)` = (1 + A delta, delta).
        Stable only for delta < -2 Re(A) / |A|^2.

    Source: notebook 01, "Three rules".
    """
    z = A * delta
    return 1 + z, delta.to(z.dtype).expand_as(z)


def discretise_bilinear(
    A: Inexact[Tensor, "..."], delta: Float[Tensor, "..."]
) -> tuple[Inexact[Tensor, "..."], Inexact[Tensor, "..."]]:
    """Average the slopes at both ends of the step (trapezoid, Tustin).

    Args: as `discretise_zoh`.

    Returns:
        `(abar, bbar_factor)` = ((1 + A delta/2) / (1 - A delta/2),
        delta / (1 - A delta/2)). Stable for every delta when Re(A) < 0.

    Source: notebook 01, "Three rules".
    """
    half = A * delta / 2
    return (1 + half) / (1 - half), delta / (1 - half)

# %% [markdown]
# ## Where dt enters

# %% tags=["export"]
def _discretise(
    dt: Float[Tensor, "B T H"], A: Complex[Tensor, "H"]
) -> Complex[Tensor, "B T H"]:
    """Decay factor of every step: abar = exp(softplus(dt) * A).

    Args:
        dt: raw step parameter, any real number; softplus makes it positive.
        A: one complex decay rate per head, Re(A) < 0.

    Returns: abar, complex; |abar| < 1.

    Source: notebook 01, "Where dt enters".
    """
    return torch.exp(F.softplus(dt).unsqueeze(-1) * A.unsqueeze(-1)).squeeze(-1)
