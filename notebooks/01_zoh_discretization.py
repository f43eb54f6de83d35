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
# This notebook lays the first stone, the step from continuous time to tokens.
#
# **After it you can**
# - turn $h' = A h + B x$ into a recurrence in three ways, and say for each how exact it
#   is and for which steps it is stable;
# - say what the raw number `dt` of a token does, and why it passes through softplus
#   before it meets $A$;
# - defend, or attack, a choice of this model: it has no input factor, $B$ absorbs it.
#
# **Before it** you need complex numbers in polar form, the exponential function, a
# derivative or two, and enough PyTorch to read `torch.where`.
#
# **How long**: about forty minutes to read, an estimate; the last cell prints how long
# the notebook ran.
#
# **Where its cells go**: the cells marked *export* are the head of
# `mamba3lite/models/ssd_complex.py`. They are not a simplified version of it. They are
# the file.

# %% [markdown]
# ## The tools
# The imports of the exported code come first, and are exported too.

# %% tags=["export"]
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Inexact, Int, Shaped
from torch import Tensor

# %% [markdown]
# The rest of the notebook also draws. The colors are those of Okabe and Ito,
# which readers with any kind of color vision can tell apart.

# %%
import cmath
import math
import time
from itertools import pairwise

import matplotlib.pyplot as plt

started = time.perf_counter()
torch.manual_seed(0)
BLACK, ORANGE, GREEN = "#000000", "#E69F00", "#009E73"
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
# ## What a state does between two samples
# Take one complex number $h(t)$, the state, that obeys
# $$h'(t) = A\,h(t) + B\,x(t).$$
# What does it do while no input arrives? The equation $h' = A h$ has the solution
# $$h(t) = e^{At} h(0) = e^{\mathrm{Re}(A)\,t}\; e^{i\,\mathrm{Im}(A)\,t}\; h(0) .$$
# The real part of $A$ is a decay rate (per second, if time is in seconds) and the
# imaginary part an angular speed (radians per second). A real $A$ makes a bucket that
# leaks. A complex one makes a phasor, an arrow that turns while it shrinks.
#
# Complex numbers are shorthand here. The same motion in real numbers needs two
# states and the matrix below, and that gives a way to check the shorthand.
# $$\frac{d}{dt}\begin{pmatrix} u \\ v \end{pmatrix} =
# \begin{pmatrix} \alpha & -\omega \\ \omega & \alpha \end{pmatrix}
# \begin{pmatrix} u \\ v \end{pmatrix}, \qquad A = \alpha + i\omega,\quad h = u + iv .$$

# %%
seconds = torch.linspace(0, 8, 400, dtype=torch.float64)
leaky, turning = -0.5, -0.5 + 4j
bucket, phasor = (torch.exp(A * seconds) for A in (leaky, turning))

generator = torch.tensor([[-0.5, -4.0], [4.0, -0.5]], dtype=torch.float64)
in_reals = torch.linalg.matrix_exp(seconds[:, None, None] * generator)[:, :, 0]
assert torch.allclose(torch.view_as_real(phasor), in_reals, atol=1e-12)
assert torch.allclose(phasor.abs(), bucket), "turning does not change the decay"

# %%
figure, (left, right) = plt.subplots(1, 2, width_ratios=[1.7, 1])
left.plot(seconds, bucket, color=BLUE, label="A = -0.5")
left.plot(seconds, phasor.real, color=RED, label="A = -0.5 + 4i, real part")
left.plot(seconds, -bucket, color=BLUE, ls=":", lw=1)
left.set(xlabel="time t [s]", ylabel="state h(t) [1]")
left.set_title("Both fade at the same rate, one turns")
left.legend()
right.plot(phasor.real, phasor.imag, color=RED)
right.plot(1, 0, "o", color=RED)
right.set(xlabel="Re h [1]", ylabel="Im h [1]", aspect="equal")
right.set_title("The complex state spirals in")
plt.show()

# %% [markdown]
# ## From one sample to the next
# A sequence has no time between its tokens, so we must invent it. Let token $t$ last a
# step $\Delta$, and ask for the state at its end. Multiply the differential equation by
# $e^{-As}$ and integrate over the step:
# $$h(\Delta) = e^{A\Delta} h(0) + \int_0^{\Delta} e^{A(\Delta - s)}\, B\, x(s)\, ds .$$
# This is exact for every input. What the input does *inside* the step is unknown, and
# each rule below guesses. Whatever the guess, the answer has one form,
# $$h_t = \bar a\, h_{t-1} + \bar b\, B\, x_t ,$$
# a factor $\bar a$ for what the state keeps and a factor $\bar b$ for what the input
# adds. In code they are `abar` and `bbar_factor`, and $\Delta$ is `delta`.

# %% [markdown]
# ## Three rules
# **Zero-order hold.** Hold $x$ at $x_t$ during the whole step. Then $B x_t$ leaves the
# integral, and what remains can be solved:
# $$\bar a = e^{A\Delta}, \qquad
# \bar b = \int_0^{\Delta} e^{A(\Delta - s)}\, ds = \frac{e^{A\Delta} - 1}{A} .$$
#
# The hold divides by $A$. At $A = 0$ the quotient is $0/0$ and its limit is $\Delta$;
# close to $0$ it loses digits. The function below therefore switches to the power
# series $\frac{e^z - 1}{z} = 1 + \frac{z}{2} + \frac{z^2}{6} + \dots$ for a small $z$.
# Why it takes that much care is the subject of the section "Near A = 0".


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
        bbar_factor = (exp(A delta) - 1) / A, which tends to delta as A tends to 0;
        values and gradients are accurate there too.
        Stable for every delta when Re(A) < 0.

    Source: notebook 01, "Three rules".
    """
    z = A * delta
    small = z.abs() < 1e-2
    # The quotient has no value at 0, and near 0 its gradient is the difference of two
    # huge numbers. The inner where keeps the branch that is not taken finite.
    quotient = torch.expm1(z) / torch.where(small, 1, z)
    series = 1 + z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5 * (1 + z / 6))))
    return z.exp(), delta * torch.where(small, series, quotient)


# %% [markdown]
# **Forward Euler.** Take the slope at the start of the step and follow it:
# $h_t = h_{t-1} + \Delta\,(A h_{t-1} + B x_t)$, hence
# $$\bar a = 1 + A\Delta, \qquad \bar b = \Delta .$$


# %% tags=["export"]
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


# %% [markdown]
# **Bilinear** (trapezoid, Tustin). Take the mean of the slopes at both ends,
# $h_t = h_{t-1} + \frac{\Delta}{2}\,(A h_{t-1} + A h_t) + \Delta\, B x_t$, and
# solve for $h_t$:
# $$\bar a = \frac{1 + A\Delta/2}{1 - A\Delta/2}, \qquad
# \bar b = \frac{\Delta}{1 - A\Delta/2} .$$


# %% tags=["export"]
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
# All three agree with $e^{z} = 1 + z + z^2/2 + \dots$ at $z = A\Delta$ in their first
# terms. They differ in where they stop: Euler after $z$, bilinear after $z^2/2$, the
# hold never.
#
# Numbers that can be worked out by hand: $A = -1$ and $\Delta = \ln 2$ make the hold
# keep one half and add one half. At $\Delta = 2$ the bilinear rule forgets everything
# and Euler flips the sign for ever.

# %%
RULES = {
    "zero-order hold": discretise_zoh,
    "forward Euler": discretise_euler,
    "bilinear": discretise_bilinear,
}


def factors(rule, A, delta):
    """`(abar, bbar_factor)` of one rule as Python numbers, in double precision."""
    delta = torch.tensor(delta, dtype=torch.float64)
    return [complex(z) for z in rule(torch.tensor(A, dtype=torch.complex128), delta)]


for rule, delta, expected in [
    (discretise_zoh, math.log(2), (1 / 2, 1 / 2)),
    (discretise_euler, math.log(2), (1 - math.log(2), math.log(2))),
    (discretise_euler, 2.0, (-1, 2)),
    (discretise_bilinear, 2.0, (0, 1)),
]:
    for got, wanted in zip(factors(rule, -1, delta), expected, strict=True):
        assert abs(got - wanted) < 1e-15

# %% [markdown]
# Is the hold really exact? We ask a method that knows nothing of it: the classical
# Runge-Kutta method, with a thousand small steps inside each of ours. For comparison we
# ask it about the other two rules as well.


# %%
def run(rule, A, delta, x):
    """The states h_0 = 0, h_1, ... of h_t = abar h_{t-1} + bbar_factor x_t."""
    abar, bbar = factors(rule, A, delta)
    h = [0j]
    for x_t in x:
        h.append(abar * h[-1] + bbar * x_t)
    return torch.tensor(h, dtype=torch.complex128)


def integrate(A, delta, x, substeps=1000):
    """The same states by Runge-Kutta; also the path between them."""
    s, path = delta / substeps, [0j]
    for x_t in x:
        for _ in range(substeps):
            h = path[-1]
            k1 = A * h + x_t
            k2 = A * (h + s / 2 * k1) + x_t
            k3 = A * (h + s / 2 * k2) + x_t
            k4 = A * (h + s * k3) + x_t
            path.append(h + s / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    path = torch.tensor(path, dtype=torch.complex128)
    return path[::substeps], path


# %% [markdown]
# The system decays slowly and turns fast, $A = -0.4 + 3i$. The input is a pulse of one
# second, then nothing, watched for six seconds in steps of 0.05 s and of 0.25 s.

# %%
A = -0.4 + 3j
trajectories, paths, worst = {}, {}, {}
for delta in (0.05, 0.25):
    pulse = [1.0 if k * delta < 1 else 0.0 for k in range(round(6 / delta))]
    exact, paths[delta] = integrate(A, delta, pulse, round(200 * delta))
    for name, rule in RULES.items():
        h = run(rule, A, delta, pulse)
        trajectories[name, delta] = h
        worst[name, delta] = float((h - exact).abs().max() / exact.abs().max())

for delta in (0.05, 0.25):
    assert worst["zero-order hold", delta] < 1e-7, "exact, up to Runge-Kutta's error"
    assert worst["zero-order hold", delta] < worst["bilinear", delta] / 1000
    assert worst["bilinear", delta] < worst["forward Euler", delta] / 10
grown = trajectories["forward Euler", 0.25].abs()
assert grown[-1] > 5 * grown[4], "Euler explodes after the pulse is over"
for key, error in worst.items():
    print(f"{key[0]:16s} step {key[1]:.2f} s: largest error {error:.0%} of the peak")

# %%
figure, axes = plt.subplots(1, 2)
for axis, delta in zip(axes, (0.05, 0.25), strict=True):
    steps = torch.linspace(0, 6, round(6 / delta) + 1)
    fine = torch.linspace(0, 6, len(paths[delta]))
    axis.plot(fine, paths[delta].real, color=BLACK, lw=1, label="exact")
    every = round(0.1 / delta) or 1
    for name, color, mark in zip(RULES, (BLUE, RED, GREEN), "os^", strict=True):
        h = trajectories[name, delta].real
        axis.plot(steps[::every], h[::every], mark, ms=3.5, color=color, label=name)
    axis.set(xlabel="time t [s]", ylabel="Re h(t) [s]", ylim=(-1, 0.7))
axes[0].set_title("Step 0.05 s: Euler is off, but fades")
axes[1].set_title("Step 0.25 s: Euler explodes, bilinear lags")
axes[0].legend(fontsize=7, loc="lower right", ncols=2)
plt.show()

# %% [markdown]
# The bilinear dots fall behind because the rule turns too little: its angle per step is
# close to $2\arctan(\omega\Delta/2)$ instead of $\omega\Delta$. It *warps* frequencies,
# and can never turn by more than half a circle in one step.
#
# The hold has one more property that the other two lack, and the whole of
# [notebook 03](03_chunkwise_ssd.ipynb) rests on it. Two steps in a row multiply to one
# long step:
# $$e^{A\Delta_1} e^{A\Delta_2} = e^{A(\Delta_1 + \Delta_2)} .$$
# In the logarithm, steps *add*.

# %%
for name, rule in RULES.items():
    (one, _), (two, _), (both, _) = (factors(rule, A, d) for d in (0.2, 0.3, 0.5))
    assert (abs(one * two - both) < 1e-15) == (name == "zero-order hold")

turned = {name: cmath.phase(factors(rule, A, 1.0)[0]) for name, rule in RULES.items()}
assert abs(turned["zero-order hold"] - 3.0) < 1e-12, "Im(A) delta = 3 radians"
assert turned["bilinear"] < 2.1, "almost a radian behind"

# %% [markdown]
# ## Which steps are stable
# Without input, $h_t = \bar a^t h_0$. The state fades exactly when $|\bar a| < 1$. For
# which $z = A\Delta$ is that so?
#
# For the hold $|e^{z}| = e^{\mathrm{Re}\, z}$: every $z$ in the left half plane. For
# the bilinear rule $|1 + z/2| < |1 - z/2|$ says that $z$ is closer to $-2$ than to $2$:
# the left half plane again. For Euler $|1 + z| < 1$ is a disk of radius 1 around $-1$,
# and a slow decay with a fast rotation leaves it at once. Written out,
# $$|1 + A\Delta|^2 = 1 + 2\,\mathrm{Re}(A)\,\Delta + |A|^2 \Delta^2 < 1
# \quad\Longleftrightarrow\quad \Delta < \frac{-2\,\mathrm{Re}(A)}{|A|^2} .$$
# For a real $A$ this is the familiar $2/|A|$. For a complex one it is not, and the
# difference is no detail: the bound falls to zero with the decay, while $2/|A|$ does
# not notice the decay at all.


# %%
def euler_bound(A):
    """The step below which forward Euler is stable."""
    return -2 * A.real / abs(A) ** 2


decay = -torch.logspace(-3, 1, 41, dtype=torch.float64)
speed = torch.linspace(-math.pi, math.pi, 33, dtype=torch.float64)
A_grid = decay[:, None] + 1j * speed
bound = euler_bound(A_grid)
assert (discretise_euler(A_grid, 0.999 * bound)[0].abs() < 1).all()
assert (discretise_euler(A_grid, 1.001 * bound)[0].abs() > 1).all()
for delta in (1e-3, 1.0, 1e3):
    delta = torch.tensor(delta, dtype=torch.float64)
    assert (discretise_zoh(A_grid, delta)[0].abs() < 1).all()
    assert (discretise_bilinear(A_grid, delta)[0].abs() < 1).all()

# %% [markdown]
# The picture shows the three regions and the path of three systems through the plane as
# $\Delta$ grows from 0: straight lines, $z = A\Delta$.

# %%
re, im = torch.meshgrid(
    torch.linspace(-3, 1, 161), torch.linspace(-2, 2, 161), indexing="xy"
)
one = torch.ones(())
regions = [rule(torch.complex(re, im), one)[0].abs() for rule in RULES.values()]
left_half = re < -1e-6
for region in (regions[0], regions[2]):
    assert torch.equal((region < 1 - 1e-6), left_half)
inside = (re + 1) ** 2 + im**2
off_border = (inside - 1).abs() > 1e-5
assert torch.equal((regions[1] < 1)[off_border], (inside < 1)[off_border])

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.8, 3.1), sharey=True)
titles = ("Hold: the left half", "Euler: only a disk", "Bilinear: the left half")
for axis, region, title in zip(axes, regions, titles, strict=True):
    axis.contourf(re, im, region, [0, 0.25, 0.5, 0.75, 1.0], cmap="Blues_r", vmax=1.3)
    axis.contour(re, im, region, [1.0], colors=BLACK, linewidths=1)
    for A, color in (("-1", GREEN), ("-1+1j", ORANGE), ("-0.1+2j", RED)):
        z = complex(A) * torch.linspace(0, 3.0, 13)
        label = f"A = {A}".replace("j", "i")
        axis.plot(z.real, z.imag, ".-", color=color, lw=1, label=label)
    axis.set(xlim=(-3, 1), ylim=(-2, 2), aspect="equal", xlabel="Re(A delta) [1]")
    axis.set_title(title)
axes[0].set_ylabel("Im(A delta) [1]")
axes[0].legend(fontsize=7, loc="lower left")
plt.show()

# %% [markdown]
# Shaded means that the state fades, darker means faster; the dots are steps of 0.25.
# The red system never has a dot inside Euler's disk. Now trust the wrong bound and see:
# $A = -0.1 + 2i$ and $\Delta = 0.5$, half of $2/|A| = 1$.

# %%
A, delta = -0.1 + 2j, 0.5
assert delta < 2 / abs(A), "the tempting bound says: stable"
assert delta > 10 * euler_bound(A), "the right one says: ten times too long"
impulse = [1.0] + [0.0] * 199
size = {name: run(rule, A, delta, impulse)[-1].abs() for name, rule in RULES.items()}
assert size["forward Euler"] > 1e25, "nearly doubled every second step"
assert size["zero-order hold"] < 1e-4 and size["bilinear"] < 1e-3

# %% [markdown]
# Stable is not the same as good. For a very long step the hold forgets,
# $e^{A\Delta} \to 0$, as the true system does. The bilinear factor tends to $-1$: it
# rings, with a change of sign at every step, and hardly fades. A model that wants to
# *clear* its state by a large step must not use it.

# %%
assert factors(discretise_zoh, -1, 1000.0)[0] == 0
assert abs(factors(discretise_bilinear, -1, 1000.0)[0] + 1) < 0.01

# %% [markdown]
# ## How the error shrinks when the step is halved
# A rule of order $p$ has an error proportional to $\Delta^p$: halve the step, and the
# error falls by $2^p$. That makes the order something to measure,
# $$p \approx \log_2 \frac{\mathrm{error}(\Delta)}{\mathrm{error}(\Delta/2)} .$$
# For a constant input the differential equation has the solution
# $h(t) = (e^{At} - 1)/A$. For $x(t) = \cos \omega t$ it has
# $$h(t) = \frac12 \left( \frac{e^{i\omega t} - e^{At}}{i\omega - A}
# + \frac{e^{-i\omega t} - e^{At}}{-i\omega - A} \right) .$$
# (Insert them to check.) We compare at $t = 2$ s.

# %%
A, omega, t_end = -1 + 2j, 3.0, 2.0


def waves(t):
    """The exact state at time t when x(t) = cos(omega t) from h(0) = 0."""
    fade = torch.exp(torch.tensor(A * t, dtype=torch.complex128))
    turn = torch.exp(torch.tensor(1j * omega * t, dtype=torch.complex128))
    up, down = turn - fade, turn.conj() - fade
    return (up / (1j * omega - A) + down / (-1j * omega - A)) / 2


# %%
constant = factors(discretise_zoh, A, t_end)[1]
counts = [16, 32, 64, 128, 256, 512]
error = {}
for n in counts:
    delta = t_end / n
    samples = [math.cos(omega * k * delta) for k in range(n + 1)]
    means = [(a + b) / 2 for a, b in pairwise(samples)]
    for name, rule in RULES.items():
        for kind, x, exact in [
            ("constant", [1.0] * n, constant),
            ("start", samples[:-1], waves(t_end)),
            ("mean", means, waves(t_end)),
        ]:
            h = run(rule, A, delta, x)[-1]
            error.setdefault((name, kind), []).append(abs(complex(h - exact)))


# %%
def order(errors):
    """The order that the last halving of the step shows."""
    return math.log2(errors[-2] / errors[-1])


assert max(error["zero-order hold", "constant"]) < 1e-14, "exact at every step"
expected = {
    ("forward Euler", "constant"): 1,
    ("bilinear", "constant"): 2,
    ("zero-order hold", "start"): 1,
    ("forward Euler", "start"): 1,
    ("bilinear", "start"): 1,
    ("zero-order hold", "mean"): 2,
    ("forward Euler", "mean"): 1,
    ("bilinear", "mean"): 2,
}
for key, p in expected.items():
    assert abs(order(error[key]) - p) < 0.1
    print(f"{key[0]:16s} x: {key[1]:9s} order {order(error[key]):.1f}")

# %%
figure, (left, right) = plt.subplots(1, 2)
deltas = [t_end / n for n in counts]
colors = dict(zip(RULES, (BLUE, RED, GREEN), strict=True))
for name, color in colors.items():
    left.loglog(deltas, error[name, "constant"], "o-", color=color, label=name)
    right.loglog(deltas, error[name, "start"], "o-", color=color, label=name)
for name in ("zero-order hold", "bilinear"):
    style = {"color": colors[name], "mfc": "w", "label": f"{name}, mean of ends"}
    right.loglog(deltas, error[name, "mean"], "o--", **style)
left.set(xlabel="step delta [s]", ylabel="error at t = 2 s [s]", ylim=(1e-17, 1))
left.set_title("Constant input: orders 1, 2, exact")
right.set(xlabel="step delta [s]", ylabel="error at t = 2 s [s]")
right.set_title("Cosine input: the hold itself costs an order")
left.legend(fontsize=8, loc="center right")
right.legend(fontsize=7, loc="lower right")
plt.show()

# %% [markdown]
# The right panel is the sobering one. When the input moves, all three rules have order
# one, because the *hold* is wrong by an amount proportional to $\Delta$: the sample at
# the start of a step stands for all of it. Give the hold and the bilinear rule the mean
# of both ends and they reach order two (the two dashed lines lie on each other).
# (Mamba-3, Lahoti et al. 2026, [arXiv 2603.15569](https://arxiv.org/abs/2603.15569),
# makes an input rule of second order out of this observation. The model built here does
# not have it.)
#
# For tokens there is no true signal between the samples, so order of accuracy alone
# decides nothing. What decides here is stability at every step, the right limits and
# $\bar a(\Delta_1)\,\bar a(\Delta_2) = \bar a(\Delta_1 + \Delta_2)$. The hold has all
# three.

# %% [markdown]
# ## Near A = 0
# What does $(e^{z} - 1)/z$ become on a machine when $z$ is small? Say $z = 10^{-6}$ in
# float32, which keeps about seven digits. Then $e^z = 1.000001$ is stored with an error
# near $6 \cdot 10^{-8}$, the subtraction removes the 1, and what is left, $10^{-6}$,
# still carries that error: six percent. The function `expm1` computes $e^z - 1$ without
# the detour and is accurate.
#
# But training needs the gradient too. Automatic differentiation applies the quotient
# rule,
# $$\frac{d}{dz}\,\frac{e^z - 1}{z} = \frac{e^z}{z} - \frac{e^z - 1}{z^2} ,$$
# two numbers near $1/z$ whose difference is near $\frac12$. The cancellation is back,
# `expm1` or not. The power series has neither problem. Its remainder after six terms is
# below $z^6/5040$, less than $2 \cdot 10^{-16}$ for $|z| < 10^{-2}$.
#
# Three versions, then, in complex64, against a long series in complex128:


# %%
def naive(A, delta):
    return (torch.exp(A * delta) - 1) / A


def with_expm1(A, delta):
    return torch.expm1(A * delta) / A


def with_series(A, delta):
    return discretise_zoh(A, delta)[1]


sizes = torch.logspace(-10, 0, 51, dtype=torch.float64)
z = sizes * torch.exp(torch.tensor(2.5j))
term = [z**k / math.factorial(k + 1) for k in range(20)]
value, slope = sum(term), sum(k * term[k] / z for k in range(1, 20))

lost = {}
for version in (naive, with_expm1, with_series):
    A = z.to(torch.complex64).requires_grad_()
    out = version(A, torch.ones(()))
    # For a holomorphic function PyTorch's gradient is the conjugate of the derivative.
    (grad,) = torch.autograd.grad(out.real.sum(), A)
    lost[version.__name__, "value"] = (out.detach() - value).abs() / value.abs()
    lost[version.__name__, "slope"] = (grad.conj() - slope).abs() / slope.abs()

# %%
tiny = sizes < 1e-7
assert lost["naive", "value"][tiny].max() > 0.5, "not one digit left"
assert lost["with_expm1", "value"].max() < 1e-6
assert lost["with_expm1", "slope"][tiny].max() > 0.5, "the gradient is worthless"
assert lost["with_series", "value"].max() < 1e-6
assert lost["with_series", "slope"].max() < 3e-5

# %%
figure, axes = plt.subplots(1, 2, sharey=True)
styles = {"naive": (RED, "-"), "with_expm1": (ORANGE, "-"), "with_series": (BLUE, "-")}
for axis, kind in zip(axes, ("value", "slope"), strict=True):
    for name, (color, style) in styles.items():
        shown = lost[name, kind].clamp(1e-9, 10)
        axis.loglog(sizes, shown, style, color=color, label=name)
    axis.axvline(1e-2, color=BLACK, lw=1, ls=":")
    axis.set(xlabel="|A delta| [1]", ylabel="relative error [1]", ylim=(5e-10, 20))
axes[0].set_title("The value: expm1 is enough")
axes[1].set_title("The gradient: only the series is right")
axes[0].legend(fontsize=8)
plt.show()

# %% [markdown]
# And at $A = 0$ exactly? The limits are known: $\bar b = \Delta$,
# $\partial \bar b/\partial A = \Delta^2/2$, $\partial \bar b/\partial \Delta = 1$. A
# single `torch.where` that picks the limit gets the value right and the gradient NaN,
# because the branch *not* taken still computes $0/0$, and $0 \cdot \mathrm{NaN}$ is
# NaN. That is what the inner `where` of `discretise_zoh` is for.


# %%
def one_where(A, delta):
    return torch.where(A == 0, delta.to(A.dtype), torch.expm1(A * delta) / A)


for version, healthy in ((one_where, False), (with_series, True)):
    A = torch.zeros((), dtype=torch.complex64, requires_grad=True)
    delta = torch.tensor(0.7, requires_grad=True)
    out = version(A, delta)
    assert out.item() == delta.item(), "the value is right in both"
    grad_A, grad_delta = torch.autograd.grad(out.real, (A, delta))
    assert bool(torch.isfinite(grad_A) & torch.isfinite(grad_delta)) == healthy
assert abs(grad_A.item() - 0.7**2 / 2) < 1e-7
assert grad_delta.item() == 1

around = torch.tensor([0, 1e-9, -0.005, 0.02j, -1 + 2j], dtype=torch.complex128)
steps = torch.full((5,), 0.7, dtype=torch.float64)
assert torch.autograd.gradcheck(
    discretise_zoh, (around.requires_grad_(), steps.requires_grad_())
)

# %% [markdown]
# ## Where dt enters
# So far $\Delta$ was one number. In a *selective* model (Mamba, Gu and Dao 2023,
# [arXiv 2312.00752](https://arxiv.org/abs/2312.00752)) every token chooses its own. The
# network computes a raw number $\mathrm{dt}_t$ from token $t$, any real number, and
# $$\Delta_t = \operatorname{softplus}(\mathrm{dt}_t) = \ln(1 + e^{\mathrm{dt}_t}),
# \qquad \bar a_t = e^{\Delta_t A} .$$
# $A$ stays the same for all tokens. It says how the state fades *per unit of time*; the
# token says how much time passes. A large step ends what came before, a small one keeps
# it.


# %% tags=["export"]
def _discretise(
    dt: Float[Tensor, "B T H"], A: Complex[Tensor, "H"]
) -> Complex[Tensor, "B T H"]:
    """Decay factor of every step: abar = exp(softplus(dt) * A).

    Args:
        dt: raw step parameter, any real number; softplus makes it positive.
        A: one complex decay rate per head, Re(A) < 0.

    Returns: abar, complex; |abar| < 1, or 1 where the step is too small to count.

    Source: notebook 01, "Where dt enters".
    """
    return torch.exp(F.softplus(dt) * A)


# %% [markdown]
# Softplus at 0 is $\ln 2 \approx 0.69$. So `dt = 0` is *not* "no step": with $A = -1$
# it keeps exactly one half of the state. "No step" lies at minus infinity, and a wanted
# step has to be inverted, $\mathrm{dt} = \ln(e^{\Delta} - 1)$.
#
# With $A = -1$ there is more to see. $e^{-\operatorname{softplus}(\mathrm{dt})}$ is
# $1/(1 + e^{\mathrm{dt}})$, a logistic gate, and the hold's input factor is the rest:
# $$h_t = (1 - g_t)\, h_{t-1} + g_t\, x_t, \qquad g_t = \sigma(\mathrm{dt}_t) .$$
# A gated recurrent unit without the nonlinear part (Theorem 1 of the Mamba paper): the
# step size is a gate.

# %%
dt = torch.linspace(-30, 30, 121).reshape(1, 121, 1)
minus_one = torch.tensor([-1 + 0j])
abar = _discretise(dt, minus_one)
assert abar.shape == dt.shape and abar.dtype == torch.complex64
assert torch.allclose(abar.real, torch.sigmoid(-dt))
gate = discretise_zoh(minus_one, F.softplus(dt))[1].real
assert torch.allclose(gate, torch.sigmoid(dt))

assert abs(_discretise(torch.zeros(1, 1, 1), minus_one).item() - 0.5) < 1e-7
wanted = torch.tensor([[[0.01], [0.5], [3.0]]])
assert torch.allclose(F.softplus(torch.expm1(wanted).log()), wanted)

A = -torch.rand(8) * 4 - 1e-3 + 1j * (torch.rand(8) * 6 - 3)
assert (_discretise(dt.expand(1, 121, 8), A).abs() <= 1).all()

# %% [markdown]
# ## Why softplus
# The step must be positive. Other functions give positive numbers too. What would a
# network learn with $e^{\mathrm{dt}}$ or with $\max(0, \mathrm{dt})$?

# %%
POSITIVE = {"softplus": F.softplus, "exp": torch.exp, "relu": F.relu}
dt = torch.linspace(-6, 6, 241, dtype=torch.float64, requires_grad=True)
shape, grad = {}, {}
for name, function in POSITIVE.items():
    delta = function(dt)
    (grad[name],) = torch.autograd.grad(delta.sum(), dt)
    shape[name] = delta.detach()
axis_dt = dt.detach()

assert torch.allclose(grad["softplus"], torch.sigmoid(axis_dt)), "between 0 and 1"
assert torch.equal(grad["exp"], shape["exp"]), "as large as the step itself"
assert (grad["relu"][axis_dt < 0] == 0).all(), "a dead half"
assert (shape["relu"][axis_dt < 0] == 0).all(), "and no step at all there"

# %%
figure, axes = plt.subplots(1, 2)
for (name, y), color in zip(shape.items(), (BLUE, RED, ORANGE), strict=True):
    axes[0].plot(axis_dt, y, color=color, label=name)
    axes[1].plot(axis_dt, grad[name], color=color, label=name)
axes[0].plot(0, math.log(2), "o", color=BLUE)
axes[0].text(-0.2, math.log(2) + 0.2, "softplus(0) = ln 2", ha="right")
axes[0].set(xlabel="dt [1]", ylabel="step delta [1]", ylim=(-0.2, 6))
axes[0].set_title("Three ways to a positive step")
axes[1].set(xlabel="dt [1]", ylabel="d delta / d dt [1]", ylim=(-0.1, 3))
axes[1].set_title("Gradients: bounded, exploding, dead")
axes[1].legend()
plt.show()

# %% [markdown]
# To feel it, let gradient descent look for the step that keeps half of the state,
# $e^{-\Delta} = \frac12$, once from a step that is too short (`dt = -2`) and once from
# one that is too long (`dt = 5`).

# %%
reached = {}
for name, function in POSITIVE.items():
    dt = torch.tensor([-2.0, 5.0], dtype=torch.float64)
    for _ in range(600):
        dt.requires_grad_()
        loss = ((torch.exp(-function(dt)) - 0.5) ** 2).sum()
        (slope,) = torch.autograd.grad(loss, dt)
        dt = dt.detach() - 2.0 * slope
    reached[name] = torch.exp(-function(dt)).tolist()
    low, high = reached[name]
    print(f"{name:8s} keeps {low:.2f} from dt = -2, {high:.2f} from dt = 5")

assert all(abs(kept - 0.5) < 1e-3 for kept in reached["softplus"])
assert reached["relu"][0] == 1, "relu: dt = -2 has no gradient and never moves"
assert reached["exp"][1] < 1e-60, "exp: delta = 148 has forgotten even its gradient"

# %% [markdown]
# Relu is stuck below, the exponential above. Softplus arrives from both sides: on the
# left it behaves like $e^{\mathrm{dt}}$, which can make a step as small as it likes
# without reaching zero, and on the right like $\mathrm{dt}$ itself, so that a step of
# five stays a step of five.

# %% [markdown]
# ## Softplus first, then A
# One line, two readings: $e^{\operatorname{softplus}(\mathrm{dt})\,A}$ or
# $e^{\operatorname{softplus}(\mathrm{dt}\,A)}$? In the second the nonlinearity acts on
# a *complex* number and the positive result lands in the exponent. It can be written
# down,
# $$e^{\operatorname{softplus}(\mathrm{dt}\,A)} = 1 + e^{\mathrm{dt}\,A} ,$$
# and for a real $A$ it is larger than 1 for every `dt` there is. PyTorch refuses
# the complex softplus, which is kind of it. For the real one nobody warns you.

# %%
dt = torch.randn(1, 200, 1, dtype=torch.float64)
A = torch.tensor([-1 + 0j], dtype=torch.complex128)
right = _discretise(dt, A).abs()
swapped = torch.exp(F.softplus(dt * A.real))
without = torch.exp(dt * A.real)

assert (right < 1).all()
assert (swapped > 1).all() and torch.allclose(swapped, 1 + torch.exp(dt * A.real))
assert swapped.prod() > 1e30, "after 200 tokens the first one is 10^30 times as large"
assert without.max() > 1, "and raw dt lets every negative dt make the state grow"
try:
    F.softplus(dt * A)
except RuntimeError as error:
    assert "not implemented" in str(error)
else:
    raise AssertionError("softplus of a complex number went through")

# %% [markdown]
# ## Why B absorbs the input factor
# The hold says $h_t = \bar a_t h_{t-1} + \bar b_t B_t x_t$. The recurrence of this
# model, which [notebook 02](02_naive_scan.ipynb) builds, says
# $$h_t = \bar a_t\, h_{t-1} + B_t\, x_t .$$
# Where did $\bar b_t$ go? Look at it first.

# %%
delta = torch.logspace(-3, 2, 200, dtype=torch.float64)
shown = {}
for text in ("-1", "-1+3j", "-0.1"):
    A = torch.tensor(complex(text), dtype=torch.complex128)
    size = discretise_zoh(A, delta)[1].abs()
    assert (size <= delta * (1 + 1e-12)).all(), "never more than delta"
    assert abs(size[0] / delta[0] - 1) < 2e-3, "delta, when the step is short"
    assert abs(size[-1] * A.abs() - 1) < 1e-4, "1/|A|, when it is long"
    shown[text] = size, 1 / A.abs()

# %%
figure, axis = plt.subplots(figsize=(5.8, 2.9))
for text, color in zip(shown, (BLUE, RED, GREEN), strict=True):
    size, limit = shown[text]
    axis.loglog(delta, size, color=color, label=f"A = {text}".replace("j", "i"))
    axis.axhline(limit, color=color, ls=":", lw=1)
axis.loglog(delta, delta, color=BLACK, ls="--", lw=1, label="delta (Euler)")
axis.set(xlabel="step delta [s]", ylabel="|input factor| [s]", ylim=(1e-3, 30))
axis.set_title("The input factor grows like delta, then stops at 1/|A|")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# **When the step is constant** the factor is one number for all tokens, and
# $B' = \bar b B$ makes the two recurrences the same. Nothing is lost: $B$ is learned,
# and whatever the hold would have multiplied in, learning can.


# %%
def scan(abar, b):
    """h_t = abar_t h_{t-1} + b_t for scalars, from h = 0."""
    h, states = torch.zeros((), dtype=torch.complex128), []
    for a, added in zip(abar, b, strict=True):
        h = a * h + added
        states.append(h)
    return torch.stack(states)


def distance(got, wanted):
    return float((got - wanted).norm() / wanted.norm())


A, B = torch.tensor([-0.5 + 1j, 0.8 - 0.6j], dtype=torch.complex128)
x = torch.randn(60, dtype=torch.float64)
abar, factor = discretise_zoh(A, torch.full((60,), 0.3, dtype=torch.float64))
with_factor = scan(abar, factor * B * x)
absorbed = scan(abar, (factor[0] * B) * x)
assert distance(absorbed, with_factor) < 1e-14

# %% [markdown]
# **When the step varies** the factor
# $\bar b_t = A^{-1}(e^{A\Delta_t} - 1)$ varies with it, and *no* fixed $B'$ does
# the same. The states are linear in $B'$, so the best one is a least-squares fit; it
# misses. A $B_t$ that changes with the token can carry the factor exactly.

# %%
dt = 2 * torch.randn(60, dtype=torch.float64)
abar, factor = discretise_zoh(A, F.softplus(dt))
with_factor = scan(abar, factor * B * x)

unit = scan(abar, x.to(torch.complex128))
best = torch.vdot(unit, with_factor) / torch.vdot(unit, unit)
assert distance(best * unit, with_factor) > 0.2, "the best fixed B is still far off"

B_t = factor * B
assert distance(scan(abar, B_t * x), with_factor) < 1e-14, "one B for each token is not"

# %% [markdown]
# So this is **a modeling choice, not an identity**. $B_t$ and $\mathrm{dt}_t$ are both
# computed from token $t$, so $B_t$ *can* know the step and scale itself. Whether it
# does is left to learning. In this model both are linear in the same normalized token
# ([notebook 07](07_block_and_model.ipynb)), while $\bar b$ is a curved function of
# $\mathrm{dt}$. So even a $B_t$ that wanted to follow it could do so only
# approximately:

# %%
dt = torch.linspace(-4, 4, 201, dtype=torch.float64)
curve = discretise_zoh(torch.tensor(-1.0, dtype=torch.float64), F.softplus(dt))[1]
assert torch.allclose(curve, torch.sigmoid(dt))
line = torch.stack([dt, torch.ones_like(dt)], dim=1)
fitted = line @ torch.linalg.lstsq(line, curve[:, None]).solution
left_over = float((fitted[:, 0] - curve).abs().max())
print(f"largest miss of the best straight line: {left_over:.2f} of a full gate")
assert 0.05 < left_over < 0.2

# %% [markdown]
# What does the choice change? Picture a token that wants to be passed over and asks for
# a tiny step, `dt = -20`. With the factor it leaves no trace: the step scales both the
# forgetting and the writing. Without it, the token forgets nothing *and writes in
# full*, unless its $B_t$ is small as well. Forgetting and writing are two separate
# decisions here. That is more freedom, and one more thing to learn.

# %%
h = torch.tensor(1 + 1j, dtype=torch.complex128)
abar, factor = discretise_zoh(A, F.softplus(torch.tensor(-20.0, dtype=torch.float64)))
passed_over = abar * h + factor * B * 5.0
written = abar * h + B * 5.0
assert (passed_over - h).abs() < 1e-7
assert (written - h - 5 * B).abs() < 1e-7, "the whole input arrived"

# %% [markdown]
# ## Pitfalls
# - **The Euler bound** for a complex $A$ is $-2\,\mathrm{Re}(A)/|A|^2$. The $2/|A|$ of
#   the real case lets $A = -0.1 + 2i$ explode at half of it.
# - **`dt = 0` is a step** of $\ln 2$. Code that "switches time off" with zeros does
#   not.
# - **Softplus acts on the real `dt`**, before $A$. Afterwards it turns decay into
#   growth.
# - **A `where` does not protect a gradient.** Make the branch that is not taken finite
#   as well.
# - **The bilinear factor tends to -1, not to 0.** It cannot clear a state.
# - **There is no input factor in this model.** A tiny step does not mean a tiny write.
#
# Next: [02, the naive scan](02_naive_scan.ipynb), where the recurrence becomes a
# function of whole sequences.

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran for {time.perf_counter() - started:.1f} s")
