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
#
# **After it you can**
# - say what a state remembers, for how long, and to which frequency it listens;
# - compute the recurrence in three orders (a loop, a convolution, a tree) and say when
#   each is allowed;
# - stop a sequence, carry its state, continue it, and pack documents that must not see
#   each other;
# - count what a step costs, and see why nobody trains with this loop.
#
# **Before it** you need [notebook 01](01_zoh_discretization.ipynb): the decay factor
# $\bar a_t = e^{\Delta_t A}$ with $\Delta_t = \operatorname{softplus}(\mathrm{dt}_t)$,
# and why there is no input factor.
#
# **How long**: about forty-five minutes to read, an estimate; the last cell prints how
# long the notebook ran.
#
# **Where its cells go**: the exported cells continue
# `mamba3lite/models/ssd_complex.py`. Every faster path of this project is tested
# against the function that is built here.

# %%
import math
import time
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Inexact
from torch import Tensor

from mamba3lite.models.ssd_complex import _discretise

# %%
started = time.perf_counter()
torch.manual_seed(0)
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED = "#0072B2", "#D55E00"
plt.rcParams.update(
    {
        "figure.dpi": 72,
        "figure.figsize": (7.8, 2.9),
        "figure.constrained_layout.use": True,
        "axes.grid": True,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.3,
    }
)

# %% [markdown]
# ## What a state remembers
# Send one input of size 1 into a single state, then nothing. What is left after $t$
# tokens? With a constant step, $h_t = \bar a\, h_{t-1}$ leaves
# $$h_t = \bar a^{\,t} = e^{\mathrm{Re}(A)\,\Delta\, t}\;
# e^{i\,\mathrm{Im}(A)\,\Delta\, t} .$$
# The size halves every
# $$n_{1/2} = \frac{\ln 2}{-\mathrm{Re}(A)\,\Delta} \quad\text{tokens}$$
# and the direction comes round every
# $$n_{\mathrm{turn}} = \frac{2\pi}{|\mathrm{Im}(A)|\,\Delta} \quad\text{tokens.}$$
# A state with a real $A$ is a **leaky integrator**: under a constant input of 1 it
# settles at $1/(1 - \bar a)$, the sum of what it still remembers. A state with a
# complex $A$ is a **damped phasor**.


# %%
def step_factor(A, dt=0.0):
    """The decay factor of one step, as a Python number."""
    A = torch.tensor([A], dtype=torch.complex128)
    return complex(_discretise(torch.full((1, 1, 1), dt, dtype=torch.float64), A))


def impulse_response(A, length):
    return step_factor(A) ** torch.arange(length, dtype=torch.float64)


# dt = 0 is a step of ln 2, so that A = -1 halves the state at every token.
fading = {half: impulse_response(-1 / half, 33) for half in (1, 4, 16)}
for half, h in fading.items():
    assert torch.allclose(h[half::half], h[:-half:half] / 2), "halved once a half-life"

eighth = 2 * math.pi / (8 * math.log(2))  # an eighth of a turn in every step
turning = impulse_response(-1 / 16 + 1j * eighth, 33)
assert torch.allclose(turning.abs(), fading[16].abs())
assert torch.allclose(turning[8::8].real, fading[16][8::8].real), "back after 8 tokens"
assert torch.allclose(turning[4::8].real, -fading[16][4::8].real), "opposite after 4"

# %%
h = 0
for _ in range(400):
    h = step_factor(-1 / 16) * h + 1
assert abs(h - 1 / (1 - step_factor(-1 / 16))) < 1e-6, "the leaky integrator settles"

# %%
figure, (left, right) = plt.subplots(1, 2, sharey=True)
for (half, h), color in zip(fading.items(), (BLUE, GREEN, ORANGE), strict=True):
    left.plot(h.real, ".-", color=color, lw=1, label=f"half-life {half}")
left.set(xlabel="tokens after the impulse", ylabel="state [size of the impulse]")
left.set_title("Real A: the state fades")
left.legend()
right.plot(turning.real, ".-", color=RED, lw=1, label="real part")
right.plot(turning.imag, ".-", color=SKY, lw=1, label="imaginary part")
right.plot(turning.abs(), color=BLACK, ls=":", label="size, half-life 16")
right.set(xlabel="tokens after the impulse")
right.set_title("Complex A: it also turns, once in 8 tokens")
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## A damped phasor
# What is turning good for? Drive the state with a wave $x_t = e^{i\omega t}$ of
# $\omega$ radians per token. After a while it swings along with the input at the size
# $$\left| \sum_{j \ge 0} \bar a^{\,j} e^{-i\omega j} \right|
# = \frac{1}{|1 - \bar a\, e^{-i\omega}|} ,$$
# which is largest where $\omega$ equals the angle of $\bar a$: every push comes at the
# right moment of the turn, as with a swing. A phasor is a *tuned* integrator, and a
# leaky integrator is the one tuned to frequency zero. The longer the memory, the
# sharper the tuning.

# %%
omegas = torch.linspace(-math.pi, math.pi, 241, dtype=torch.float64)
tuned = {
    "half-life 4, no turn": (step_factor(-1 / 4), BLUE),
    "half-life 4, 1/8 turn": (step_factor(-1 / 4 + 1j * eighth), ORANGE),
    "half-life 16, 1/8 turn": (step_factor(-1 / 16 + 1j * eighth), RED),
}
gain = {}
for name, (abar, _) in tuned.items():
    h = torch.zeros(241, dtype=torch.complex128)
    for t in range(500):
        h = abar * h + torch.exp(1j * omegas * t)
    gain[name] = h.abs()
    formula = 1 / (1 - abar * torch.exp(-1j * omegas)).abs()
    assert torch.allclose(gain[name], formula, rtol=1e-6)

loudest = {name: float(omegas[g.argmax()]) for name, g in gain.items()}
assert abs(loudest["half-life 4, no turn"]) < 1e-9
assert abs(loudest["half-life 16, 1/8 turn"] - math.pi / 4) < 0.03
sharp, blunt = gain["half-life 16, 1/8 turn"], gain["half-life 4, 1/8 turn"]
assert (sharp > sharp.max() / 2).sum() < (blunt > blunt.max() / 2).sum() / 2

# %%
figure, (left, right) = plt.subplots(1, 2, width_ratios=[1, 1.8])
left.plot(turning.real, turning.imag, ".-", color=RED, lw=0.8)
for t in range(4):
    end = (turning[t].real, turning[t].imag)
    left.annotate(f"t = {t}", end, (4, 4), textcoords="offset points", fontsize=8)
left.set(xlabel="Re h [1]", ylabel="Im h [1]", aspect="equal", xlim=(-1, 1.4))
left.set_title("Path of the phasor")
for name, (_, color) in tuned.items():
    right.plot(omegas, gain[name], color=color, label=name)
right.axvline(math.pi / 4, color=BLACK, lw=1, ls=":")
right.set(xlabel="input frequency [rad/token]", ylabel="gain [1]")
right.set_title("It answers loudest at its own speed, pi/4")
right.legend(fontsize=8, loc="upper left")
plt.show()

# %% [markdown]
# What breaks if the imaginary part is thrown away "because the output is real anyway"?
# The phase lives in it. Take the real part *inside* the loop and the state no longer
# turns, it only shrinks by $\mathrm{Re}(\bar a)$. Take it *after* the loop and all is
# well.

# %%
abar = step_factor(-1 / 16 + 1j * eighth)
h, cut = 1, 1
for _ in range(8):
    h, cut = abar * h, (abar * cut).real
assert abs(h.real - 2 ** (-8 / 16)) < 1e-12, "a full turn: 0.71 of the impulse is back"
assert abs(cut - abar.real**8) < 1e-12 and cut < 0.05, "cut early: nothing comes back"

# %% [markdown]
# ## One head: write, fade, read
# A head holds not one number but a table of them, $N$ states for each of $D$ channels,
# $h_t \in \mathbb{C}^{N \times D}$. At every token three things happen:
# $$
# \begin{aligned}
# h_t &= \bar a_t\, h_{t-1} + B_t \otimes x_t && \text{fade and turn, then write}\\
# y_t &= \sum_{n=1}^{N} C_{t,n}\, h_{t,n} && \text{read}
# \end{aligned}
# $$
# $B_t$ says into *which rows* the vector $x_t$ is written, $C_t$ says which rows are
# read. Substituting the recurrence into itself gives
# $$y_t = \sum_{s \le t} e^{\Sigma_t - \Sigma_s}\,(C_t \cdot B_s)\, x_s ,
# \qquad \Sigma_t = \sum_{u \le t} \Delta_u A .$$
# Token $t$ reads from token $s$ as much as $C_t$ and $B_s$ agree, times the decay of
# all that lies between. This is the shape of linear attention, with $C$ as the
# query, $B$ as the key, $x$ as the value, the duality of Dao and Gu 2024
# ([arXiv 2405.21060](https://arxiv.org/abs/2405.21060)). Two details to keep:
# $C_t \cdot B_s$ has *no* complex conjugate, and the sum includes $s = t$, because the
# model writes first and reads after.
#
# | in code | shape | what it is |
# |---|---|---|
# | `x` | (B, T, H, D) | what is written, real or complex |
# | `A` | (H,) | one complex rate per head; all its $N$ states fade and turn alike |
# | `B_t`, `C_t` | (B, T, H, N) | where to write, where to read, complex |
# | `dt` | (B, T, H) | raw step, real |
# | `initial_states` | (B, H, D, N) | the state before the first token |
# | `reset` | (B, T) | True where a document starts |
#
# In shapes, B is the batch. Mind the state: arguments and results have the channel
# before the state, (D, N); inside the loop it is (N, D), as in the formula.

# %% [markdown]
# ## What the scan accepts
# An oracle that guesses is none. A real `A` might be a forgotten imaginary part, a
# `float16` tensor would make the reference less exact than what it judges. So the scan
# refuses what it is not defined for, in one line that names the argument.

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


# %% [markdown]
# Shapes are judged by that of `x`, and the message says so.


# %% tags=["export"]
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
# A valid call first, as a dictionary that the next cells break in one place each. The
# sizes differ from one another on purpose: with $N = D$ a mixed-up axis passes
# unnoticed.


# %%
def random_case(B=2, T=12, H=3, D=4, N=5, double=True):
    """Random arguments of a scan: log-uniform decay rates, any angle."""
    real = torch.float64 if double else torch.float32
    cplx = torch.complex128 if double else torch.complex64
    rate = torch.exp(math.log(1e-3) + torch.rand(H, dtype=real) * math.log(2e3))
    angle = (torch.rand(H, dtype=real) * 2 - 1) * math.pi
    return {
        "x": torch.randn(B, T, H, D, dtype=real),
        "A": torch.complex(-rate, angle),
        "B_t": torch.randn(B, T, H, N, dtype=cplx),
        "C_t": torch.randn(B, T, H, N, dtype=cplx),
        "dt": torch.randn(B, T, H, dtype=real),
    }


# %%
good = random_case()
_check_scan_inputs(**good)
for name, broken in [
    ("A", good["A"].real),
    ("dt", good["dt"] + 0j),
    ("x", good["x"].half()),
    ("x", good["x"].float()),
    ("A", good["A"][:2]),
    ("B_t", good["B_t"].transpose(1, 2)),
    ("reset", torch.zeros(2, 12)),
]:
    try:
        _check_scan_inputs(**{**good, name: broken})
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}")
        assert name in str(error)
    else:
        raise AssertionError(f"a broken {name} went through")

# %% [markdown]
# ## The loop
# The formula, read aloud. `arriving` is what is left of the old state; the outer
# product $B_t \otimes x_t$ is a broadcast of (N, 1) against (1, D); the read-out sums
# over the rows.


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


# %% [markdown]
# ### Three tokens by hand
# One head, one state, one channel. Choose $A$ such that a step with `dt = 0` halves the
# state and turns it by a quarter: $\bar a = i/2$, from
# $A = -1 + i\,\frac{\pi}{2 \ln 2}$. Let $B_t = 1$, $x = (1, 2, 4)$ and
# $C = (1, 1, i)$. With pencil and paper,
# $$
# \begin{aligned}
# h_1 &= 1, & y_1 &= 1,\\
# h_2 &= \tfrac{i}{2} \cdot 1 + 2 = 2 + \tfrac{i}{2}, & y_2 &= 2 + \tfrac{i}{2},\\
# h_3 &= \tfrac{i}{2}\,(2 + \tfrac{i}{2}) + 4 = \tfrac{15}{4} + i, &
# y_3 &= i\, h_3 = -1 + \tfrac{15}{4} i .
# \end{aligned}
# $$

# %%
quarter = torch.tensor([-1 + 0.5j * math.pi / math.log(2)], dtype=torch.complex128)
x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).reshape(1, 3, 1, 1)
ones = torch.ones(1, 3, 1, 1, dtype=torch.complex128)
C_t = torch.tensor([1, 1, 1j], dtype=torch.complex128).reshape(1, 3, 1, 1)
dt = torch.zeros(1, 3, 1, dtype=torch.float64)

y, state = ssd_naive_complex(x, quarter, ones, C_t, dt, return_final_states=True)
by_hand = torch.tensor([1, 2 + 0.5j, -1 + 3.75j], dtype=torch.complex128)
assert (y.flatten() - by_hand).abs().max() < 1e-15
assert abs(state.item() - (3.75 + 1j)) < 1e-15

# %% [markdown]
# ### Two slots
# $B$ and $C$ as addresses, $\bar a = \frac12$: the first token writes 8 into row 0, the
# second writes 6 into row 1, the third writes nothing. Reading at the third token finds
# $8/4 = 2$ in row 0 and $6/2 = 3$ in row 1.

# %%
half = torch.tensor([-1 + 0j], dtype=torch.complex128)
x = torch.tensor([8.0, 6.0, 0.0], dtype=torch.float64).reshape(1, 3, 1, 1)
B_t = torch.tensor([[1, 0], [0, 1], [0, 0]], dtype=torch.complex128).reshape(1, 3, 1, 2)
for row, expected in ((0, 2), (1, 3)):
    C_t = torch.zeros(1, 3, 1, 2, dtype=torch.complex128)
    C_t[..., row] = 1
    y = ssd_naive_complex(x, half, B_t, C_t, dt)
    assert abs(y[0, 2, 0, 0].item() - expected) < 1e-14

# %% [markdown]
# ### The unrolled sum
# The loop multiplies one factor per step. The unrolled formula above adds logarithms
# and takes one exponential per pair. Different arithmetic, same numbers, for decays
# that vary, several heads, any angle:


# %%
def unrolled(x, A, B_t, C_t, dt):
    """y_t = sum over s <= t of exp(Sigma_t - Sigma_s) (C_t . B_s) x_s."""
    total = (F.softplus(dt) * A).cumsum(1)
    y = torch.zeros_like(x, dtype=B_t.dtype)
    for t in range(x.shape[1]):
        for s in range(t + 1):
            decay = (total[:, t] - total[:, s]).exp()
            match = (C_t[:, t] * B_t[:, s]).sum(-1)
            y[:, t] += (decay * match)[..., None] * x[:, s]
    return y


def error(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


case = random_case()
assert error(ssd_naive_complex(**case), unrolled(**case)) < 1e-13

# %% [markdown]
# Two mistakes that look right in a notebook and are wrong in every value: conjugating
# $C$, as a textbook inner product would, and reading *before* writing, which loses the
# token itself.

# %%
conjugated = ssd_naive_complex(**{**case, "C_t": case["C_t"].conj()})
assert error(conjugated, unrolled(**case)) > 0.5

own = (case["C_t"] * case["B_t"]).sum(-1, keepdim=True) * case["x"]
read_first = ssd_naive_complex(**case) - own
assert error(read_first, unrolled(**case)) > 0.3
assert read_first[:, 0].abs().max() < 1e-12, "the first token reads nothing at all"

# %% [markdown]
# ## Nothing looks ahead
# A language model that sees the next token has nothing to learn. Causality is not a
# matter of taste, so test it the hard way: change everything after token $t$, and
# demand the *same bits* up to it.

# %%
case, other = random_case(), random_case()
y = ssd_naive_complex(**case)
for t in range(1, 12):
    mixed = {"A": case["A"]}
    for name in ("x", "B_t", "C_t", "dt"):
        mixed[name] = torch.cat([case[name][:, :t], other[name][:, t:]], dim=1)
    changed = ssd_naive_complex(**mixed)
    assert torch.equal(changed[:, :t], y[:, :t]), "the past is the same bit for bit"
    assert not torch.equal(changed[:, t:], y[:, t:])

x = case["x"].clone().requires_grad_()
(into_x,) = torch.autograd.grad(
    ssd_naive_complex(**{**case, "x": x})[:, 4].abs().sum(), x
)
assert (into_x[:, 5:] == 0).all() and (into_x[:, :5] != 0).all()

# %% [markdown]
# The test is only worth something if it can fail. A harmless looking line, "center the
# input over time", is enough:


# %%
def centered(x, **rest):
    return ssd_naive_complex(x - x.mean(1, keepdim=True), **rest)


later = case["x"].clone()
later[:, -1] += 1
before, after = centered(**case), centered(**{**case, "x": later})
assert not torch.allclose(before[:, 0], after[:, 0]), "token 0 felt the last token"

# %% [markdown]
# ## Stop and go on
# The state is everything the past has to say. So a sequence can be cut anywhere: run
# the first piece, keep the state, hand it to the next. Generation is the extreme case,
# one token at a time, with a memory that never grows.

# %%
case = random_case(T=20)
whole, last = ssd_naive_complex(**case, return_final_states=True)
assert last.shape == (2, 3, 4, 5), "(B, H, D, N)"

for lengths in ([7, 13], [1] * 20, [19, 1], [3, 8, 9]):
    state, pieces = None, []
    split = {k: case[k].split(lengths, dim=1) for k in ("x", "B_t", "C_t", "dt")}
    for i in range(len(lengths)):
        piece = {k: v[i] for k, v in split.items()}
        y, state = ssd_naive_complex(
            A=case["A"], **piece, initial_states=state, return_final_states=True
        )
        pieces.append(y)
    assert error(torch.cat(pieces, dim=1), whole) < 1e-14
    assert error(state, last) < 1e-14

# %% [markdown]
# The layout of the state is (D, N). Hand it over as (N, D) and a check saves you,
# unless $N = D$, as in the default model, where both are 64. Then nothing is refused
# and everything is wrong:

# %%
try:
    ssd_naive_complex(**case, initial_states=last.mT)
except ValueError as refused:
    print(refused)
else:
    raise AssertionError("a transposed state went through")

square = random_case(D=4, N=4)
_, state = ssd_naive_complex(**square, return_final_states=True)
right = ssd_naive_complex(**square, initial_states=state)
silently_wrong = ssd_naive_complex(**square, initial_states=state.mT)
assert error(silently_wrong, right) > 0.1

# %% [markdown]
# ## Documents that must not meet
# Training packs short documents into one row. The state must not carry one into the
# next. `reset` is True where a document starts: what arrives there is dropped, the
# decay factor is exactly 0.

# %%
case = random_case(T=12)
reset = torch.zeros(2, 12, dtype=torch.bool)
reset[:, 5] = True
packed = ssd_naive_complex(**case, reset=reset)


def tokens(case, start, stop):
    """The arguments of a scan over tokens start..stop-1."""
    return {k: v if k == "A" else v[:, start:stop] for k, v in case.items()}


first, second = tokens(case, 0, 5), tokens(case, 5, 12)
assert error(packed[:, :5], ssd_naive_complex(**first)) < 1e-14
assert error(packed[:, 5:], ssd_naive_complex(**second)) < 1e-14

old = torch.randn(2, 3, 4, 5, dtype=torch.complex128)
at_once = torch.zeros(2, 12, dtype=torch.bool)
at_once[:, 0] = True
dropped = ssd_naive_complex(**case, initial_states=old, reset=at_once)
assert torch.equal(dropped, ssd_naive_complex(**case)), "initial_states are dropped too"

# %%
x = case["x"].clone().requires_grad_()
alone = ssd_naive_complex(**{**case, "x": x}, reset=reset)[:, 5:].abs().sum()
(into_x,) = torch.autograd.grad(alone, x)
assert (into_x[:, :5] == 0).all(), "no gradient flows into the first document"

# %% [markdown]
# What breaks without it, or with the clever substitute "let the token forget by a very
# long step"? A head with $\mathrm{Re}(A) = -0.001$ keeps 97 percent of its state even
# at `dt = 30`: a long step is not a reset.

# %%
assert error(ssd_naive_complex(**case)[:, 5:], packed[:, 5:]) > 0.1, "a leak"

slow = {**case, "A": torch.full((3,), -0.001 + 0.5j, dtype=torch.complex128)}
forget = slow["dt"].clone()
forget[:, 5] = 30.0
kept = step_factor(-0.001, dt=30.0).real
assert abs(kept - math.exp(-0.03)) < 1e-12 and kept > 0.97
leaky = ssd_naive_complex(**{**slow, "dt": forget})
clean = ssd_naive_complex(**{**slow, "dt": forget}, reset=reset)
assert error(leaky[:, 5:], clean[:, 5:]) > 0.1

# %% [markdown]
# ## When nothing varies: a convolution
# Let $\Delta$, $B$ and $C$ be the same at every token. Then the weight of $x_s$ in
# $y_t$ depends on the distance alone,
# $$y_t = \sum_{j \ge 0} k_j\, x_{t-j}, \qquad k_j = (C \cdot B)\, \bar a^{\,j} ,$$
# and the whole layer is one convolution with the impulse response as its kernel. S4
# (Gu, Goel, Ré 2021, [arXiv 2111.00396](https://arxiv.org/abs/2111.00396)) trains this
# way. The fast Fourier transform computes it in $O(T \log T)$.

# %%
T = 50
case = random_case(B=1, T=T, H=1)
for name in ("B_t", "C_t", "dt"):
    case[name] = case[name][:, :1].expand_as(case[name])
y = ssd_naive_complex(**case)[0, :, 0].mT  # (D, T)
x = case["x"][0, :, 0].mT

abar = _discretise(case["dt"], case["A"])[0, 0, 0]
match = (case["C_t"] * case["B_t"])[0, 0, 0].sum()
kernel = match * abar ** torch.arange(T)

# conv1d slides without flipping: the kernel goes in backwards, the past is padded.
padded = F.pad(x, (T - 1, 0))[:, None]
sliding = F.conv1d(padded, kernel.real.flip(0)[None, None])[:, 0]
assert error(sliding, y.real) < 1e-13

fourier = torch.fft.ifft(torch.fft.fft(kernel, 2 * T) * torch.fft.fft(x, 2 * T))
assert error(fourier[:, :T], y) < 1e-13

# %% [markdown]
# Two ways to get it wrong. Without padding, the Fourier transform closes the sequence
# to a ring and the *end* of the text leaks into its *beginning*. And as soon as one
# factor depends on the token there is no kernel at all: an impulse fades differently
# depending on when it comes.

# %%
ring = torch.fft.ifft(torch.fft.fft(kernel) * torch.fft.fft(x))
assert error(ring, y) > 1e-3
assert (ring[:, 0] - y[:, 0]).abs().max() > (ring[:, -1] - y[:, -1]).abs().max()

selective = {**case, "dt": torch.randn(1, T, 1, dtype=torch.float64)}
answers = []
for when in (5, 15):
    impulse = torch.zeros_like(case["x"])
    impulse[:, when] = 1
    answers.append(
        ssd_naive_complex(**{**selective, "x": impulse})[0, when : when + 30]
    )
assert error(answers[1], answers[0]) > 0.1, "no shift invariance, no convolution"

# %% [markdown]
# ## When everything varies: a tree
# The loop has $T$ steps in a row. Must it? One step is the map $f_t(h) = a_t h + b_t$
# with $a_t = \bar a_t$ and $b_t = B_t \otimes x_t$. Two steps are a map of the same
# kind,
# $$(a_2, b_2) \bullet (a_1, b_1) = (a_2 a_1,\; a_2 b_1 + b_2) ,$$
# later map on the left. Composition of maps is associative, so brackets may be moved,
# and maps can be merged in a tree. It is *not* commutative: late and early must not be
# swapped.


# %%
def compose(late, early):
    """The map that applies `early`, then `late`; a map is a pair (a, b)."""
    return late[0] * early[0], late[0] * early[1] + late[1]


f, g, k = torch.randn(3, 2, dtype=torch.complex128).unbind()
for one, two in zip(compose(compose(f, g), k), compose(f, compose(g, k)), strict=True):
    assert abs(one - two) < 1e-14, "associative"
h = torch.tensor(0.3 - 2j, dtype=torch.complex128)
twice = compose(g, f)
assert abs(twice[0] * h + twice[1] - (g[0] * (f[0] * h + f[1]) + g[1])) < 1e-14
assert abs(compose(f, g)[1] - compose(g, f)[1]) > 0.1, "not commutative"

# %% [markdown]
# **By doubling.** In each round every position merges with the one `reach` places to
# its left, then `reach` doubles. After $\lceil \log_2 T \rceil$ rounds each position
# has merged with everything before it. Odd lengths need no care: who has no partner is
# already done.
#
# **By halves.** Doubling does about $T \log_2 T$ merges. Fewer suffice: merge neighbors
# in pairs, solve the sequence of pairs, which is half as long, and fill in the
# positions between. That takes about $2 \log_2 T$ rounds and fewer than $2T$ merges.
# Mamba's kernel scans with a tree of this family inside each block of tokens (Gu and
# Dao 2023, [arXiv 2312.00752](https://arxiv.org/abs/2312.00752)); S5 (Smith et al.
# 2022, [arXiv 2208.04933](https://arxiv.org/abs/2208.04933)) uses one for the whole
# sequence.


# %%
def scan_by_doubling(a, b):
    """All prefixes f_t o ... o f_1 of maps in dimension 0, and the merges per round."""
    reach, merges = 1, []
    while reach < len(a):
        new = compose((a[reach:], b[reach:]), (a[:-reach], b[:-reach]))
        a, b = torch.cat([a[:reach], new[0]]), torch.cat([b[:reach], new[1]])
        merges.append(len(new[0]))
        reach *= 2
    return a, b, merges


def scan_by_halves(a, b):
    """The same prefixes with fewer than two merges a position."""
    if len(a) == 1:
        return a, b, []
    pairs = compose((a[1::2], b[1::2]), (a[:-1:2], b[:-1:2]))
    done_a, done_b, merges = scan_by_halves(*pairs)
    rest = len(a[2::2])
    between = compose((a[2::2], b[2::2]), (done_a[:rest], done_b[:rest]))
    a, b = a.clone(), b.clone()
    a[1::2], b[1::2] = done_a, done_b
    a[2::2], b[2::2] = between
    return a, b, [len(pairs[0]), *merges, rest]


# %%
def maps(x, A, B_t, C_t, dt):
    """The map of every token, time in front: a (T, B, H, 1, 1), b (T, B, H, N, D)."""
    a = _discretise(dt, A)[..., None, None]
    b = B_t[..., :, None] * x[..., None, :]
    return a.transpose(0, 1), b.transpose(0, 1)


def scan_in_a_tree(scan, x, A, B_t, C_t, dt):
    """What `ssd_naive_complex` returns, with the final state, and the merges."""
    _, h, merges = scan(*maps(x, A, B_t, C_t, dt))
    y = (C_t.transpose(0, 1)[..., None] * h).sum(-2)
    return y.transpose(0, 1), h[-1].mT, merges


for T in (1, 2, 3, 5, 7, 8, 9, 31, 64, 100):
    case = random_case(T=T)
    y, last = ssd_naive_complex(**case, return_final_states=True)
    for scan in (scan_by_doubling, scan_by_halves):
        tree_y, tree_last, merges = scan_in_a_tree(scan, **case)
        assert error(tree_y, y) < 1e-13 and error(tree_last, last) < 1e-13
        if scan is scan_by_doubling:
            assert len(merges) == math.ceil(math.log2(T))
        else:
            assert sum(merges) < 2 * T

# %%
print("   T   steps of the loop   rounds / merges: by doubling    by halves")
for T in (64, 1000, 2048):
    a, b = torch.ones(T), torch.ones(T)
    double, halves = scan_by_doubling(a, b)[2], scan_by_halves(a, b)[2]
    assert sum(double) == T * len(double) - (2 ** len(double) - 1)
    columns = [f"{len(m):11d} / {sum(m):5d}" for m in (double, halves)]
    print(f"{T:4d}   {T:17d}   {'':10s}{'  '.join(columns)}")

# %% [markdown]
# What does each position know after each round of doubling? The picture follows eight
# tokens; the assertion below follows the same wires with sets.

# %%
reach, known = 1, [[{t} for t in range(8)]]
while reach < 8:
    now = known[-1]
    known.append([now[t] | now[t - reach] if t >= reach else now[t] for t in range(8)])
    reach *= 2
assert len(known) == 4, "three rounds for eight tokens"
assert all(known[3][t] == set(range(t + 1)) for t in range(8)), "everything before it"
assert all(len(known[r][7]) == 2**r for r in range(4)), "twice as much every round"

# %%
figure, axis = plt.subplots(figsize=(6.2, 2.9))
for r in range(1, 4):
    reach = 2 ** (r - 1)
    for t in range(8):
        axis.plot([t, t], [r - 1, r], color=BLACK, lw=0.8)
        if t >= reach:
            axis.plot([t - reach, t], [r - 1, r], color=BLUE, lw=1.2)
for r, row in enumerate(known):
    for t, seen in enumerate(row):
        color = RED if len(seen) == t + 1 else SKY
        axis.plot(t, r, "o", ms=17, color=color)
        axis.text(t, r, len(seen), ha="center", va="center", fontsize=9)
axis.set(xlabel="token t", ylabel="round", yticks=range(4), ylim=(3.5, -0.5))
axis.grid(False)
axis.set_title("Doubling: tokens merged so far; red has all of its past")
plt.show()

# %% [markdown]
# There is a shortcut that tempts everybody once. With the running product
# $P_t = \bar a_1 \cdots \bar a_t$, the unrolled sum is
# $h_t = P_t \sum_s b_s / P_s$: a cumulative product, a cumulative sum, done. But $P_s$
# shrinks exponentially, $b_s/P_s$ overflows, and zero times infinity is NaN. The tree
# never divides.

# %%
a = torch.full((256,), 0.5 + 0j, dtype=torch.complex64)
b = torch.ones(256, dtype=torch.complex64)
product = a.cumprod(0)
shortcut = product * (b / product).cumsum(0)
assert torch.allclose(shortcut[:100], scan_by_doubling(a, b)[1][:100])
assert not torch.isfinite(torch.view_as_real(shortcut)).all(), "NaN before token 256"
assert torch.allclose(scan_by_doubling(a, b)[1][-1].real, torch.tensor(2.0))

# %% [markdown]
# ## How many digits
# The loop runs in complex64 or complex128, whichever comes in. Which is the oracle? A
# rounding error of $6 \cdot 10^{-8}$ in a factor $\bar a_t$ is forgotten with the
# state. So the error should grow with the *length of the memory*, not with $T$. We
# measure it over 1000 tokens, for half-lives from 1 to 1000 tokens at an angle of one
# radian per unit of time.

# %%
half_lives = torch.logspace(0, 3, 13, dtype=torch.float64)
double = random_case(B=1, T=1000, H=13, D=4, N=4)
double["dt"] = torch.zeros(1, 1000, 13, dtype=torch.float64)
double["A"] = -1 / half_lives + 1j
single = {
    k: v.to(torch.complex64 if v.is_complex() else torch.float32)
    for k, v in double.items()
}
# Both must see the same numbers: round first, then compare.
double = {k: v.to(double[k].dtype) for k, v in single.items()}
oracle, rounded = ssd_naive_complex(**double), ssd_naive_complex(**single)
assert oracle.dtype == torch.complex128 and rounded.dtype == torch.complex64

off = torch.tensor([error(rounded[:, :, h], oracle[:, :, h]) for h in range(13)])
assert off[0] < 3e-7, "short memory: the precision of float32 itself"
early = error(rounded[:, :500, 0], oracle[:, :500, 0])
late = error(rounded[:, 500:, 0], oracle[:, 500:, 0])
assert late < 2 * early, "and it does not grow along the sequence"
assert off[-1] > 10 * off[0], "long memory: more than a digit is gone"
assert off.max() < 1e-4

# %%
figure, axis = plt.subplots(figsize=(5.8, 2.7))
axis.loglog(half_lives, off, "o-", color=BLUE)
axis.axhline(6e-8, color=BLACK, ls=":", lw=1, label="one rounding in float32")
axis.set(xlabel="half-life of the state [tokens]", ylabel="relative error [1]")
axis.set_title("complex64 loses digits with the length of the memory")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# The oracle is therefore the complex128 loop. Whoever compares a fast path with the
# complex64 one cannot tell its errors from the reference's.

# %% [markdown]
# ## What it costs
# **Arithmetic** (derived). Per token, head and state entry: $\bar a h$ is a complex
# product (6 operations), $B x$ with a real $x$ takes 2, adding them 2, $C h$ takes 6
# and the sum over rows 2. Together $18\,N D$.
#
# **Memory** (derived). The state takes $8 N D$ bytes in complex64. If it lives in main
# memory, every token reads and writes it: $16 N D$ bytes. That is about one operation
# per byte, and a processor that can do tens of operations in the time of one byte
# mostly waits. The token itself is small: $4 D + 16 N + 4$ bytes in, $8 D$ out.
#
# The loop in PyTorch is worse than that, because every operation on the way writes a
# result as large as the state and the next one reads it back. Five operations
# ($\bar a h$, $B x$, their sum, $C h$, its sum) move
# $$8 N D\,(2 + 1 + 3 + 2 + 1) + 16 N + 12 D + 8 \quad\text{bytes}$$
# per token and head. Do we believe it? PyTorch can be asked: a dispatch mode sees every
# operation with its operands.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts operations, and the bytes that products and sums read and write."""

    def __init__(self):
        super().__init__()
        self.operations, self.moved = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if func.overloadpacket.__name__ in ("mul", "add", "sum"):
            for leaf in tree_leaves((args, kwargs, out)):
                if isinstance(leaf, Tensor):
                    self.moved += leaf.nbytes
        return out


def metered(T, **sizes):
    case = random_case(T=T, double=False, **sizes)
    with Meter() as meter:
        ssd_naive_complex(**case)
    return meter


# %%
N, D, H, B = 16, 8, 3, 2
meters = {T: metered(T, B=B, H=H, D=D, N=N) for T in (1, 2, 10, 20, 40)}
per_step = meters[2].operations - meters[1].operations
for T, meter in meters.items():
    assert meter.operations - meters[1].operations == (T - 1) * per_step, "linear in T"

derived = 8 * N * D * 9 + 16 * N + 12 * D + 8
discretise = 4 + 8  # softplus(dt) * A reads 4 bytes and writes 8
extra = meters[40].moved - meters[20].moved
assert extra == 20 * B * H * (derived + discretise)
ideal = 4 * D + 16 * N + 4 + 8 * D
print(f"{per_step} PyTorch operations a token")
print(f"bytes a token and head at N = {N}, D = {D}: {derived} moved by the loop")
print(
    f"  {16 * N * D} if only the state moved, {ideal} if the state stayed on the chip"
)

# %% [markdown]
# For a head of the default model, $N = D = 64$, a token takes 73,728 operations. The
# loop moves 294,912 bytes for them. 65,536 would do if only the state moved, once in
# and once out, and 1,796 if it stayed on the chip. Between the first number and the
# last lies a factor of 164, and the fast orders of computing live on it.
#
# The tree saves *steps*, not bytes: its $b_t$ is a whole state per token, $8 T N D$
# bytes per head, and every round goes over all of them.

# %%
N = D = 64
assert 18 * N * D == 73_728
assert 8 * N * D * 9 == 294_912 and 16 * N * D == 65_536
assert 4 * D + 16 * N + 4 + 8 * D == 1_796
assert round(294_912 / 1_796) == 164
case = random_case(B=1, T=2, H=1, D=64, N=64, double=False)
_, state = ssd_naive_complex(**case, return_final_states=True)
assert state.nbytes == 8 * N * D
assert maps(**case)[1].nbytes == 2 * 8 * N * D

# %% [markdown]
# And the clock? What follows is measured on the machine that ran this notebook. Nothing
# is asserted about it, because a busy machine would make the assertion lie; the number
# of operations above is exact.


# %% tags=["nbval-ignore-output"]
def milliseconds(function):
    start = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - start)


lengths = [32, 64, 128, 256, 512, 1024]
loop_ms, tree_ms = [math.inf] * 6, [math.inf] * 6
# The best of many rounds: a pause of the machine spoils one round, not one length.
for _ in range(12):
    for i, T in enumerate(lengths):
        case = random_case(B=1, T=T, H=2, D=16, N=16, double=False)
        loop = partial(ssd_naive_complex, **case)
        tree = partial(scan_in_a_tree, scan_by_halves, **case)
        loop_ms[i] = min(loop_ms[i], milliseconds(loop))
        tree_ms[i] = min(tree_ms[i], milliseconds(tree))
print(f"T = 1024, on this CPU: loop {loop_ms[-1]:.0f} ms, tree {tree_ms[-1]:.0f} ms")

# %%
assert len(loop_ms) == len(tree_ms) == len(lengths) and min(loop_ms + tree_ms) > 0
figure, axis = plt.subplots(figsize=(5.8, 2.9))
axis.loglog(lengths, loop_ms, "o-", color=RED, label="loop")
axis.loglog(lengths, tree_ms, "s-", color=BLUE, label="tree by halves")
slope = [loop_ms[-1] * T / lengths[-1] for T in lengths]
axis.loglog(lengths, slope, ":", color=BLACK, lw=1, label="proportional to T")
axis.set(xlabel="sequence length T [tokens]", ylabel="time [ms]")
axis.set_title("Twice the tokens, twice the time")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# The loop pays for its steps one after the other. The tree pays for memory. What
# remains is an order that has few steps in a row *and* leaves the state where it is for
# many tokens: cut time into chunks, solve each chunk by matrix products, loop over
# chunks.
#
# ## Pitfalls
# - **No conjugate.** The read-out is $\sum_n C_n h_n$, not $\sum_n \overline{C_n} h_n$.
# - **Write, then read.** $y_t$ contains token $t$.
# - **The real part comes last.** Inside the loop it destroys the phase.
# - **States are (B, H, D, N)** outside. With $N = D$ a transposed state is accepted.
# - **A long step is not a reset.** Use `reset`.
# - **A convolution needs constancy**, and its Fourier form needs padding.
# - **Do not divide by running products.** They vanish.
# - **Judge in complex128.** The complex64 loop has errors of its own.
#
# Next: [03, the chunkwise scan](03_chunkwise_ssd.ipynb), the same numbers from matrix
# products.

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran for {time.perf_counter() - started:.1f} s")
