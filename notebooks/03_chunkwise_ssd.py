# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_complex"]
# # The chunkwise scan
# The same numbers as the loop, from a few matrix products over chunks of time.
#
# **After it you can**
# - unroll a recurrence into a matrix, and cut that matrix into chunks that a processor
#   likes;
# - write the four parts of the chunkwise algorithm from memory: the causal matrix, the
#   output inside a chunk, the state of a chunk, the state passed between chunks;
# - recognize the three mistakes that everybody makes, and know which of them no test
#   with constant steps can see.
#
# **Before it** you need notebooks
# [01](01_zoh_discretization.ipynb) and [02](02_naive_scan.ipynb): the decay factor
# $\bar a_t = e^{\Delta_t A}$ with $\Delta_t = \operatorname{softplus}(dt_t)$, and the
# loop that we now call the oracle.
#
# **How long**: about an hour to read, an estimate; the last cell prints how long the
# notebook ran.
#
# **Where its cells go**: the cells marked *export* finish
# `mamba3lite/models/ssd_complex.py`, the file that trains the model.

# %% [markdown]
# ## The tools
# Everything exported here builds on the imports of notebook 01. The seven colors are
# those of Okabe and Ito, which readers with any kind of color vision can tell apart.

# %%
import math
import time

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Inexact, Int, Shaped
from torch import Tensor

from mamba3lite.models.ssd_complex import _check_scan_inputs, ssd_naive_complex

started = time.perf_counter()
torch.manual_seed(0)
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update(
    {
        "figure.dpi": 80,
        "figure.figsize": (8.4, 3.2),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
    }
)

# %% [markdown]
# Random inputs come from one place: steps that differ from token to token, decays from
# slow to fast, and rotations all around the circle. Double precision first; we round
# when we want to see rounding.


# %%
def random_case(B, T, H, D, N):
    """x, A, B_t, C_t, dt in double precision, with a step of its own per token."""

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    rate = torch.empty(H, dtype=torch.float64).uniform_(math.log(1e-3), math.log(2))
    angle = torch.empty(H, dtype=torch.float64).uniform_(-math.pi, math.pi)
    B_t = torch.complex(normal(B, T, H, N), normal(B, T, H, N))
    C_t = torch.complex(normal(B, T, H, N), normal(B, T, H, N))
    A = torch.complex(-rate.exp(), angle)
    return normal(B, T, H, D), A, B_t, C_t, normal(B, T, H)


def single(case):
    """The same case rounded to float32 and complex64."""
    return [z.to(torch.complex64 if z.is_complex() else torch.float32) for z in case]


def relative_error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


# %% [markdown]
# ## Unroll the loop
# The loop takes $T$ steps one after another, and each of them is a little work on a big
# state: read $N D$ numbers per head, multiply, add, write them back. Processors are bad
# at this. They are good at matrix products. *Where is the matrix?*
#
# Put the recurrence into itself until only inputs are left:
#
# $$h_t = \bar a_t h_{t-1} + B_t x_t^\top
# \quad\Longrightarrow\quad
# h_t = \sum_{s \le t} \Big( \prod_{u=s+1}^{t} \bar a_u \Big) B_s x_s^\top .$$
#
# The product telescopes in the log domain. With the cumulative log decay
# $\Sigma_t = \sum_{u \le t} \Delta_u A$ it is $e^{\Sigma_t - \Sigma_s}$, and the output
# is
#
# $$y_t = \sum_{s \le t} e^{\Sigma_t - \Sigma_s} \, (C_t \cdot B_s) \, x_s ,
# \qquad\text{in short}\qquad y = \big( L \odot C B^\top \big) X .$$
#
# One matrix, lower triangular, $T \times T$: the whole sequence mixer. It looks like
# attention without softmax, with a decay in the place of a mask. Dao and Gu call this
# *state-space duality* ([arXiv 2405.21060](https://arxiv.org/abs/2405.21060)). The cell
# below builds it literally and compares it with the loop.

# %%
x, A, B_t, C_t, dt = random_case(B=1, T=12, H=1, D=3, N=4)
Sigma = (F.softplus(dt[0, :, 0]) * A[0]).cumsum(0)
M = torch.zeros(12, 12, dtype=torch.complex128)
for t in range(12):
    for s in range(t + 1):
        M[t, s] = (Sigma[t] - Sigma[s]).exp() * (C_t[0, t, 0] * B_t[0, s, 0]).sum()
y_matrix = M @ x[0, :, 0].to(M.dtype)
y_loop = ssd_naive_complex(x, A, B_t, C_t, dt)[0, :, 0]
assert torch.allclose(y_matrix, y_loop, rtol=0, atol=1e-12)

# %% [markdown]
# Now neither extreme is what we want. The loop does $T$ serial steps of cheap work; the
# matrix does one step, but $T^2$ of work. Cut time into chunks of $C$ steps and use
# both: the matrix *inside* a chunk, where it is small, and the loop *between* chunks,
# where it is short. Every entry of the big matrix belongs to one of the two.

# %%
T, C = 16, 4
row, column = torch.arange(T)[:, None], torch.arange(T)[None]
future = column > row
same_chunk = (column // C == row // C) & ~future
through_state = ~future & ~same_chunk
kind = same_chunk + 2 * through_state
assert int(same_chunk.sum()) == (T // C) * C * (C + 1) // 2
assert int(same_chunk.sum() + through_state.sum()) == T * (T + 1) // 2

# %%
fig, ax = plt.subplots(figsize=(5.6, 4.4))
colors = plt.matplotlib.colors.ListedColormap(["#ffffff", ORANGE, SKY])
ax.pcolormesh(kind, cmap=colors, edgecolors="#bbbbbb", linewidth=0.5)
for edge in range(0, T + 1, C):
    ax.axhline(edge, color=BLACK, lw=1)
    ax.axvline(edge, color=BLACK, lw=1)
ax.invert_yaxis()
ax.set_aspect("equal")
ax.set(xlabel="source step s", ylabel="output step t")
ax.set_title("Each output: its own chunk directly, all earlier ones through the state")
handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (ORANGE, SKY)]
names = ["inside a chunk: Y_diag", "through the entering state: Y_off"]
ax.legend(handles, names, loc="upper right", fontsize=9)
plt.show()

# %% [markdown]
# ## The causal matrix
# How much of token $s$ is left in the state when token $l$ reads it? Everything between
# them multiplies, so in the log domain everything between them *adds*:
#
# $$L_{ls} = e^{\Sigma_l - \Sigma_s}\ \ (s \le l), \qquad L_{ls} = 0 \ \ (s > l) .$$
#
# Split $\Delta_u A = u_u + i v_u$ into a real part $u \le 0$, which shrinks, and an
# imaginary part $v$, which turns. The magnitude of $L$ comes from $u$ alone. The
# function below computes that magnitude,
#
# $$D_{ls} = e^{U_l - U_s}\ \ (s \le l), \qquad U = \text{cumulative sum of } u ,$$
#
# and the order of its steps matters more than anything else in this notebook: it
# decides which entries count *before* it takes an exponential. Its second half takes
# the sums $U$ as they are, and the `documents` that the section on boundaries explains.


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
    return _decay_between(log_magnitude.cumsum(-1), None, dtype)


def _decay_between(
    total: Float[Tensor, "*batch C"],
    documents: Int[Tensor, "*batch C"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "*batch C C"]:
    """`causal_decay` from running sums of the log decays.

    Args: documents: the document of every position; 0 between two of them.
    """
    span = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(dtype)
    steps = span.shape[-1]
    apart = torch.ones(steps, steps, dtype=torch.bool, device=span.device).triu(1)
    if documents is not None:
        apart = apart | (documents.unsqueeze(-1) != documents.unsqueeze(-2))
    # Select before exp: above the diagonal the exponent is positive and exp overflows.
    return span.masked_fill_(apart, -torch.inf).exp_()


# %% [markdown]
# First a check that could fail: by hand, and against products of the factors
# themselves. The diagonal is exactly 1, because nothing lies between a token and
# itself; an *exclusive* cumulative sum or a strict triangle would break just that.

# %%
u = torch.tensor([-0.5, -1.0, -0.25], dtype=torch.float64)
by_hand = [[0, -99, -99], [-1.0, 0, -99], [-1.25, -0.25, 0]]
by_hand = torch.tensor(by_hand, dtype=torch.float64).exp().tril()
assert torch.allclose(causal_decay(u, torch.float64), by_hand)

u = -torch.rand(64, dtype=torch.float64)
L = causal_decay(u, torch.float64)
for late, early in [(63, 0), (40, 39), (17, 17)]:
    between = u[early + 1 : late + 1].exp().prod()
    assert torch.isclose(L[late, early], between)

# %% [markdown]
# What does it look like? With a real $A$ it is a fading shadow of the past. With a
# complex $A$ the same shadow is crossed by waves: a token read at the right moment
# counts with a plus sign, half a turn later with a minus sign.

# %%
steps = torch.full((64,), -0.06, dtype=torch.float64)
turns = torch.full((64,), 0.35, dtype=torch.float64).cumsum(0)
shadow = causal_decay(steps, torch.float64)
waves = shadow * (turns[:, None] - turns[None]).cos()
assert (shadow >= 0).all() and (waves < -0.3).any()
assert (waves.abs() <= shadow).all()

# %%
fig, axes = plt.subplots(1, 2, figsize=(8.6, 3.7), sharey=True)
titles = ["real A: the past fades", "complex A: the past fades and turns"]
for ax, values, title in zip(axes, [shadow, waves], titles, strict=True):
    image = ax.imshow(values, cmap="PuOr", vmin=-1, vmax=1)
    ax.set(xlabel="source step s", title=title)
axes[0].set_ylabel("output step l")
fig.colorbar(image, ax=axes, label="Re L[l, s]")
plt.show()

# %% [markdown]
# ### What breaks: the mask after exp
# The tempting version takes the exponential of all differences and multiplies by the
# mask. Above the diagonal the difference is *positive*: it runs backwards in time. In
# float32 $e^{88.8}$ is already infinite, and infinity times the mask's zero is not
# zero, it is NaN. With $A = -1$ and $dt = 0$ a step has $u = -\ln 2$, so 129 steps are
# enough.


# %%
def mask_after_exp(log_magnitude):
    total = log_magnitude.cumsum(-1)
    span = total.unsqueeze(-1) - total.unsqueeze(-2)
    return span.exp() * torch.ones_like(span).tril()


per_step = -F.softplus(torch.tensor(0.0)).item()
print(f"one step at dt = 0: log decay {per_step:.4f}; softplus(0) is ln 2, not 0")
for length in (64, 256):
    u = torch.full((length,), per_step)
    bad = mask_after_exp(u).isnan().any().item()
    good = causal_decay(u.double(), torch.float32).isnan().any().item()
    print(f"T = {length:3d}: NaN with the mask after exp {bad}, before it {good}")
assert mask_after_exp(torch.full((256,), per_step)).isnan().any()
assert not mask_after_exp(torch.full((64,), per_step)).isnan().any()
u = torch.full((256,), per_step, dtype=torch.float64)
assert causal_decay(u, torch.float32).isfinite().all()

# %% [markdown]
# Chunks of 64 do not save us. The exponent at the corner is $(T - 1)\,\Delta\,|A|$, and
# it passes $\ln(\text{largest float32}) \approx 88.72$ inside one chunk of 64 once
# $dt \ge 1.13$, a value that any trained model reaches. The gradient is worse: it is
# NaN as soon as one masked entry is infinite, even where the output looks fine.

# %%
lengths = torch.arange(8, 265, 8)
raw_steps = torch.linspace(-2, 3, 41, dtype=torch.float64)
steps = -F.softplus(raw_steps).float()
broken = torch.tensor(
    [[mask_after_exp(u.expand(n)).isnan().any() for n in lengths] for u in steps]
)
corner = (lengths - 1) * F.softplus(raw_steps)[:, None]
limit = math.log(torch.finfo(torch.float32).max)
surely = (corner - limit).abs() > 0.01  # away from the last bit
assert (broken == (corner > limit))[surely].all()
chunk_of_64 = mask_after_exp(-F.softplus(torch.tensor(1.13)).expand(64))
assert chunk_of_64.isnan().any()

# %%
fig, ax = plt.subplots()
colors = plt.matplotlib.colors.ListedColormap(["#ffffff", RED])
ax.pcolormesh(lengths, raw_steps, broken, cmap=colors, vmin=0, vmax=1)
boundary = torch.expm1(limit / (lengths - 1)).log()
ax.plot(lengths, boundary, color=BLACK, label="(T - 1) softplus(dt) = 88.72")
ax.axvline(64, color=BLUE, ls="--", label="one chunk of 64")
ax.set(xlabel="length T (steps)", ylabel="raw step dt", ylim=(-2, 3))
ax.set_title("Mask after exp: NaN everywhere in the red region (A = -1, float32)")
ax.legend(loc="lower left")
plt.show()

# %% [markdown]
# The cure costs nothing: replace the exponent above the diagonal by $-\infty$, then
# take the exponential. $e^{-\infty}$ is exactly 0 and so is its gradient.

# %%
u = torch.full((256,), -1.7, dtype=torch.float64, requires_grad=True)
causal_decay(u, torch.float32).sum().backward()
assert u.grad.isfinite().all()
u32 = torch.full((256,), -1.7, requires_grad=True)
mask_after_exp(u32).nan_to_num().sum().backward()
assert u32.grad.isnan().any(), "repairing the output does not repair the gradient"

# %% [markdown]
# ## A phase factors, a magnitude must not
# The other half of $L$ is the turn $e^{i (V_l - V_s)}$, with $V$ the cumulative sum of
# the angles $v$. A turn has magnitude 1: it cannot overflow, in either direction of
# time. So here we *may* do what was forbidden a moment ago, split the difference:
#
# $$e^{i (V_l - V_s)} = e^{i V_l} \, e^{-i V_s}
# \quad\Longrightarrow\quad
# L \odot C B^\top = D \odot \big( (e^{iV} C)\,(e^{-iV} B)^\top \big) .$$
#
# $C$ and $B$ are each turned once, one factor per token, and what is left of $L$ is
# real. (Notebook 02 drew the state as a phasor. This is the same picture from the
# outside: instead of turning the state, turn those who write to it and read from it.)
#
# A second saving: the input $x$ is real, and only the real part of the output is
# wanted. Then only $\operatorname{Re}(\tilde C \tilde B^\top)$ matters, and a sum of
# $\operatorname{Re}(c\,b) = c_r b_r - c_i b_i$ over $N$ complex numbers is one real
# inner product over $2N$: one real matrix product in the place of four.


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


# %%
left = torch.randn(5, 7, 4, dtype=torch.complex128)
right = torch.randn(5, 6, 4, dtype=torch.complex128)
assert torch.allclose(_real_product(left, right), (left @ right.mT).real)
assert _pairs(left).data_ptr() == left.data_ptr(), "a view, nothing is copied"

angle = torch.linspace(-200, 200, 401, dtype=torch.float64)
late, early = (_unit_phase(sign * angle, torch.complex128) for sign in (1, -1))
assert torch.allclose(late * early, torch.ones_like(late))

# %% [markdown]
# ### What breaks: splitting the magnitude too
# The same trick on $U$ would turn the masked $C \times C$ matrix into two cheap
# vectors. It is the mask after exp in another dress: $e^{-U_s}$ grows without bound.

# %%
U = torch.full((64,), -1.5).cumsum(0)
split = (U.exp()[:, None] * (-U).exp()[None]).tril()
assert not split.isfinite().all(), "infinite where the true value is below 1"
assert causal_decay(torch.full((64,), -1.5).double(), torch.float32).isfinite().all()

# %% [markdown]
# ## Boundaries
# Two kinds of steps let nothing through. Where packed documents meet, the state must be
# dropped. And where a factor is smaller than any number of the working precision, it
# *is* 0, in the loop as well: in float32 from a log decay of $-104$ on, which a step of
# $dt = 13$ has at $A = -8$. Both are **boundaries**, and what lies between two of them
# is a document, whichever kind they are.
#
# A boundary cannot take part in a sum of logarithms. Its own is $-\infty$, and
# $-\infty - (-\infty)$ is NaN. A large number in its place, $-200$ say, would sit in
# every sum after it, in the place of digits, and hang gradients of every later document
# on the steps before. So it counts 0, and two things keep documents apart:
#
# - positions have the *number* of their document, the boundaries met in the chunk so
#   far, and a pair with two different numbers is masked like one from the future;
# - sums *start anew* at each boundary.
#
# The second is a cumulative sum in segments. It takes $\log_2 C$ passes: after the
# first every position holds the sum of two steps, its own and the one before, after the
# second of four, and so on. What lies in another document is never added. Its gradient
# is the same sum from the right: a step is in the sums of all that follow it, to the
# end of its document.


# %% tags=["export"]
# Below these real log decays the exponential is 0 in the dtype.
_FADED = {torch.float32: -104.0, torch.float64: -745.2}


def _boundaries(
    log_decay: Complex[Tensor, "B T H"],
    reset: Bool[Tensor, "B T"] | None,
    dtype: torch.dtype,
) -> Bool[Tensor, "B T H"]:
    """Steps that nothing passes: a document starts, or the factor is 0 in dtype, real.

    Source: notebook 03, "Boundaries".
    """
    faded = log_decay.real < _FADED[dtype]
    return faded if reset is None else faded | reset.unsqueeze(-1)


class _SegmentedSum(torch.autograd.Function):
    """Running sums that begin anew with each document; (*batch, C), both arguments.

    The gradient is the same sum from right to left.

    Source: notebook 03, "Boundaries".
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(z, documents):
        total, step = z.clone(), 1
        while step < total.shape[-1]:
            same = documents[..., step:] == documents[..., :-step]
            total[..., step:] += torch.where(same, total[..., :-step], 0)
            step *= 2
        return total

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx, grad):
        (documents,) = ctx.saved_tensors
        return _SegmentedSum.apply(grad.flip(-1), documents.flip(-1)).flip(-1), None


def _sums_within(
    log_decay: Complex[Tensor, "*batch C"], documents: Int[Tensor, "*batch C"] | None
) -> Complex[Tensor, "*batch C"]:
    """Running sums of the log decays that begin at 0 where a document starts.

    A sum never holds what lies before its start, so that no rounding and no gradient
    of one document reaches another; a running sum less its value at the start would.

    Args: documents: the number of boundaries met in the chunk so far; None for none.

    Source: notebook 03, "Boundaries".
    """
    if documents is None:
        return log_decay.cumsum(-1)
    starts = documents.diff(dim=-1, prepend=torch.zeros_like(documents[..., :1])) != 0
    return _SegmentedSum.apply(log_decay.masked_fill(starts, 0), documents)


# %%
boundary = torch.tensor([0, 0, 1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)
documents = boundary.cumsum(0)
a = -torch.rand(10, dtype=torch.complex128)
sums = _sums_within(a, documents)
for t in range(10):
    after = [
        u for u in range(t + 1) if documents[u] == documents[t] and not boundary[u]
    ]
    assert torch.isclose(sums[t], a[after].sum())
apart = documents[:, None] != documents
decay = _decay_between(sums.real, documents, torch.float64)
assert (decay[apart] == 0).all() and (decay.diagonal() == 1).all()

log_decay = torch.tensor([[[-103.0], [-105.0]]], dtype=torch.complex128)
assert _boundaries(log_decay, None, torch.float32).flatten().tolist() == [False, True]
assert torch.tensor([-103.0, -105.0]).exp().bool().tolist() == [True, False]

# %% [markdown]
# ### What breaks: the sum at the start, taken away again
# One `cumsum` for all, less its value where the document starts, is the same number up
# to rounding. Its gradient is not: what a document sends back to the steps before it is
# a sum minus the same sum in another order. That is $10^{-16}$ of something, and not 0.


# %%
def sums_by_difference(log_decay, documents):
    total = log_decay.cumsum(-1)
    first = [documents.tolist().index(number) for number in documents.tolist()]
    return total - (total - log_decay)[first]


boundary = torch.zeros(64, dtype=torch.bool)
boundary[[20, 35]] = True
documents = boundary.cumsum(0)
a = -torch.rand(64, dtype=torch.complex128)
a = a.masked_fill(boundary, 0).requires_grad_()
weights, leaks = torch.rand(64, dtype=torch.float64), {}
for sums in (_sums_within, sums_by_difference):
    got = sums(a, documents)
    assert torch.allclose(got, _sums_within(a, documents))
    (grad,) = torch.autograd.grad((got.real * weights)[20:].sum(), a)
    leaks[sums.__name__] = grad[:20].abs().max().item()
print(leaks)
assert leaks["_sums_within"] == 0 < leaks["sums_by_difference"] < 1e-14

# %% [markdown]
# ## The gradient of a step
# How does the loss change with the log decay $a_u$ of *one* step? Write $M_{ls} =
# L_{ls}\, (C_l \cdot B_s)$ for the whole matrix of a chunk, so that $Y = M X$. Step $u$
# lies between $s$ and $l$ if $s < u \le l$. Those entries of $M$ have a factor
# $e^{a_u}$, all others do not know it:
#
# $$\frac{\partial M_{ls}}{\partial a_u} = M_{ls} \ \ (s < u \le l)
# \quad\Longrightarrow\quad
# g_u = \sum_{l \ge u > s} T_{ls} , \qquad T = G \odot M^* ,$$
#
# with the gradient $G$ of $M$, in PyTorch's convention, which conjugates (notebook 04).
# The real part of $g_u$ says what a slower decay does, the imaginary part what a larger
# angle does. The pairs of a step are a *rectangle* below the diagonal, and the diagonal
# is in no rectangle: between a token and itself nothing decays.

# %%
steps, u = 16, 6
row, column = torch.arange(steps)[:, None], torch.arange(steps)[None]
rectangle = (row >= u) & (column < u)
assert not rectangle.diagonal().any() and int(rectangle.sum()) == (steps - u) * u
kind = torch.where(rectangle, 3, (row >= column) + (row == column).int())

# %%
fig, ax = plt.subplots(figsize=(4.6, 4.0))
colors = plt.matplotlib.colors.ListedColormap(["#ffffff", "#dddddd", BLACK, ORANGE])
ax.pcolormesh(kind, cmap=colors, edgecolors="#bbbbbb", linewidth=0.5)
ax.invert_yaxis()
ax.set_aspect("equal")
ax.set(xlabel="source step s", ylabel="output step l")
ax.set_title(f"The pairs that step {u} decays; the diagonal is not among them")
plt.show()

# %% [markdown]
# Nobody sums $C$ rectangles. With the row sums $r_l = \sum_s T_{ls}$ and column sums
# $c_s = \sum_l T_{ls}$,
#
# $$g_u = \sum_{t \ge u} (r_t - c_t) ,$$
#
# because rows from $u$ on hold the rectangle and the triangle below it, and columns
# from $u$ on hold that triangle. So $r - c$ is the gradient of the running sums, and
# the sum over $t$ is what autograd makes of a `cumsum`. The diagonal is in $r_t$ and in
# $c_t$, and cancels.
#
# *On paper.* After ten steps at $A = -10$ the entries below the diagonal are $10^{-4}$
# and less of those on it, and so are the gradients. If $r$ and $c$ are two float32
# sums, each with the diagonal in it, then what is left of their difference is rounding.
# And this is what autograd does when the phases are factors of $C$ and of $B$: the
# angle gets one sum from the turned queries and another from the turned keys. So $M$ is
# made by a function with a backward of its own: one matrix $T$, its diagonal left out,
# both sums of the same numbers, in double precision.
#
# For a real $x$ there is no complex $M$. Its real part is the output, which is there
# already; its imaginary part costs one more product, in the backward pass alone.


# %% tags=["export"]
from contextlib import nullcontext


def _without_autocast(device_type: str):
    if device_type == "meta":  # it has no autocast
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def _rows_less_columns(
    pairs: Inexact[Tensor, "*batch C C"],
) -> Inexact[Tensor, "*batch C"]:
    """Row sums less column sums below the diagonal, in double; overwrites pairs."""
    dtype = torch.complex128 if pairs.is_complex() else torch.float64
    pairs = pairs.tril_(-1).to(dtype)
    return pairs.sum(-1) - pairs.sum(-2)


def _turned(C, B, angle):
    """conj(e^(i angle) C), e^(-i angle) B, and e^(i angle)."""
    turn = _unit_phase(angle, B.dtype).unsqueeze(-1)
    return (C * turn).conj_physical_(), B * turn.conj(), turn


class _DecayedScores(torch.autograd.Function):
    """M = L * (C B^T) of every chunk, its real part or all of it, and D = |L|.

    L[l, s] = exp(total[l] - total[s]) for s <= l in one document, else 0. The gradient
    of `total` is summed over pairs s < l: the diagonal, on which nothing decays, would
    cancel between two sums, but to rounding only. D has no gradient.

    Args:
        C, B: (*batch, C, N), read and write vectors.
        total: (*batch, C) complex128, running sums of the log decays.
        documents: (*batch, C), the document of every position, or None.
        real: whether M is Re(L * C B^T).

    Source: notebook 03, "The gradient of a step".
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(C, B, total, documents, real):
        read, write, _ = _turned(C, B, total.imag)
        D = _decay_between(total.real, documents, B.real.dtype)
        if real:
            return (_pairs(read) @ _pairs(write).mT).mul_(D), D
        return (read.conj_physical_() @ write.mT).mul_(D), D

    @staticmethod
    def setup_context(ctx, inputs, output):
        *kept, ctx.real = inputs
        ctx.save_for_backward(*kept, *output)
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, _):
        if grad is None:
            return None, None, None, None, None
        # Also where the backward pass itself is run under autocast.
        with _without_autocast(grad.device.type):
            return *_DecayedScores._gradients(ctx, grad), None, None

    @staticmethod
    def _gradients(ctx, grad):
        C, B, total, documents, M, D = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative needs to know where D is from
            D = _decay_between(total.real, documents, B.real.dtype)
        read, write, turn = _turned(C, B, total.imag)
        if not ctx.real:
            steps = _rows_less_columns(grad.conj() * M).conj()
            inside = grad * D
            to_C = (inside @ write.conj_physical()) * turn.conj()
            return to_C, (inside.mT @ read) * turn, steps
        shrinks = _rows_less_columns(grad * M)
        inside, u, v = grad * D, _pairs(read), _pairs(write)
        to_C = torch.view_as_complex((inside @ v).unflatten(-1, (-1, 2))) * turn
        to_B = torch.view_as_complex((inside.mT @ u).unflatten(-1, (-1, 2))) * turn
        # Re(i read write^T), what a larger angle between the two adds to their product.
        inside = inside * (_pairs(read * -1j) @ v.mT)
        steps = torch.complex(shrinks, _rows_less_columns(inside))
        return to_C.conj_physical_(), to_B, steps


# %% [markdown]
# First the rectangles: the backward against their literal sums, with two documents. A
# second derivative works too, since everything in it is computed from what was saved.

# %%
C_, B_ = (torch.randn(2, 6, 3, dtype=torch.complex128) for _ in range(2))
documents = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
a = torch.complex(-torch.rand(2, 6), torch.randn(2, 6)).to(torch.complex128)
a.requires_grad_()
for real in (True, False):
    M, _ = _DecayedScores.apply(C_, B_, _sums_within(a, documents), documents, real)
    G = torch.randn_like(M)
    (grad,) = torch.autograd.grad(M, a, G)
    whole, _ = _DecayedScores.apply(
        C_, B_, _sums_within(a, documents), documents, False
    )
    T = G * whole.detach().conj()
    for u in range(6):
        rectangle = T[:, u:, :u].sum((-2, -1))
        assert torch.allclose(grad[:, u], rectangle)

    def scores(C, B, a, real=real):
        return _DecayedScores.apply(C, B, _sums_within(a, documents), documents, real)[
            0
        ]

    inputs = [z.detach().requires_grad_() for z in (C_, B_, a)]
    assert torch.autograd.gradcheck(scores, inputs)
    assert torch.autograd.gradgradcheck(scores, inputs)

# %% [markdown]
# ### What breaks: the diagonal in two sums
# The forward of the function is ordinary PyTorch, so autograd can differentiate it as
# well. Compare both with double precision, as the decay of a step grows.


# %%
def angle_gradient(scores, rate, dtype):
    """Of the angles of 64 steps, each of a log decay of -rate."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 1, 64, 64, dtype=torch.complex64, generator=g)
    C_, B_, G = drawn.to(dtype)
    angle = torch.randn(1, 64, dtype=torch.float64, generator=g)
    a = torch.complex(torch.full_like(angle, -rate), angle).requires_grad_()
    M = scores(C_, B_, a.cumsum(-1), None, True)[0]
    return torch.autograd.grad(M, a, G.real.contiguous())[0].imag[:, 1:]


rates = list(range(0, 41, 2))
by = {"autograd": _DecayedScores.forward, "pairs below it": _DecayedScores.apply}
lost = {name: [] for name in by}
for rate in rates:
    wanted = angle_gradient(by["pairs below it"], rate, torch.complex128)
    for name, scores in by.items():
        got = angle_gradient(scores, rate, torch.complex64)
        lost[name].append(((got - wanted).abs().max() / wanted.abs().max()).item())
assert max(lost["pairs below it"]) < 1e-5, "at any decay"
assert lost["autograd"][0] < 1e-5 and lost["autograd"][10] > 1, "nothing but rounding"

# %%
fig, ax = plt.subplots()
ax.semilogy(
    rates, lost["autograd"], "s-", color=RED, label="two sums with the diagonal"
)
ax.semilogy(rates, lost["pairs below it"], "o-", color=BLUE, label="the pairs below it")
ax.axhline(1, color=BLACK, lw=0.8, ls=":")
ax.set(xlabel="decay of a step, -Re a", ylabel="error / largest gradient")
ax.set_title("Gradient of the angles in float32: at strong decay the diagonal is all")
ax.legend(loc="center right")
plt.show()

# %% [markdown]
# ## One chunk
# Two results leave a chunk. The output that its own tokens cause,
#
# $$Y_{\text{diag}} = \big( D \odot \tilde C \tilde B^\top \big) X ,$$
#
# and the state that its own tokens leave at its right edge,
#
# $$S = \sum_s e^{\Sigma_{\text{last}} - \Sigma_s} \, x_s B_s^\top .$$
#
# Both pretend that nothing was carried in. The factor
# $e^{\Sigma_{\text{last}} - \Sigma_s}$ (`decay_states`) is an argument of its own: the
# caller has it anyway. The function works on all chunks of all heads at once, as
# batched matrix products over (batch, chunk, head). It is also the reference, and the
# backward pass, of the kernel that replaces it on a GPU.


# %% tags=["export"]
def per_chunk_ssd_pytorch(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Inexact[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
    documents: Int[Tensor, "B nc C H"] | None = None,
) -> tuple[Inexact[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """Everything that happens inside a chunk, for all chunks at once.

    Y_diag = ((C B^T) * L) X and state = sum_s decay_states[s] B_s x_s^T, with
    L[l, s] = exp(sum of A_log over s+1..l) for s <= l in one document, else 0.

    Args:
        Bc, Cc: write and read vectors.
        Xc: input, real or complex.
        A_log: log decay of each step, Re <= 0, each angle within [-pi, pi]. Sums are
            taken in float64; complex128 keeps them exact to that precision.
        decay_states: factor from each position to the right edge of its chunk, taken
            as given.
        documents: how many documents have started in the chunk so far, per head; the
            A_log of a step with which one starts is not used. None for no start.

    Returns:
        `(Y_diag, state)`: Y_diag complex for complex Xc, and Re(L * C B^T) X, real,
        for real Xc; state at the right edge of each chunk, with nothing carried in.

    Source: notebook 03, "One chunk".
    """
    Bc, Cc, Xc = (z.transpose(2, 3) for z in (Bc, Cc, Xc))  # (B, nc, H, C, .)
    A_log, decay_states = A_log.transpose(2, 3), decay_states.transpose(2, 3)
    documents = None if documents is None else documents.transpose(2, 3)
    total = _sums_within(A_log.to(torch.complex128), documents)
    real = not Xc.is_complex()
    M, _ = _DecayedScores.apply(Cc, Bc, total, documents, real)
    Y_diag = M @ Xc
    kept = Bc * decay_states.to(Bc.dtype).unsqueeze(-1)
    if real:
        state = torch.view_as_complex((Xc.mT @ _pairs(kept)).unflatten(-1, (-1, 2)))
    else:
        state = Xc.mT @ kept
    return Y_diag.transpose(2, 3), state


# %% [markdown]
# The check: take chunks as they come, and run the oracle on each of them *alone*. Its
# output must be $Y_{\text{diag}}$ and its final state $S$.

# %%
x, A, B_t, C_t, dt = random_case(B=2, T=24, H=3, D=5, N=4)
chunks = [z.unflatten(1, (3, 8)) for z in (x, B_t, C_t, dt)]
Xc, Bc, Cc, dtc = chunks
A_log = F.softplus(dtc) * A
A_cumsum = A_log.cumsum(2)
decay_states = (A_cumsum[:, :, -1:] - A_cumsum).exp()
Y_diag, state = per_chunk_ssd_pytorch(Bc, Cc, Xc, A_log, decay_states)
for c in range(3):
    alone, final = ssd_naive_complex(
        Xc[:, c], A, Bc[:, c], Cc[:, c], dtc[:, c], return_final_states=True
    )
    assert torch.allclose(Y_diag[:, c], alone.real)
    assert torch.allclose(state[:, c], final)
print("Y_diag", tuple(Y_diag.shape), Y_diag.dtype, "| state", tuple(state.shape))

# %% [markdown]
# ## Between chunks
# *What state enters chunk $z$?* Let $\Lambda_c$ be the total log decay of chunk $c$ and
# $S_c$ what it adds. The same recurrence again, one level up, with chunks for tokens:
#
# $$G_0 = H_{\text{init}}, \qquad G_{z+1} = e^{\Lambda_z} G_z + S_z .$$
#
# Unrolled, with the running totals $K_k = \Lambda_0 + \dots + \Lambda_k$ and
# $K_{-1} = 0$:
#
# $$G_z = \sum_{c < z} e^{K_{z-1} - K_c} \, S_c + e^{K_{z-1}} H_{\text{init}} .$$
#
# Read the window $K_{z-1} - K_c$ aloud: the chunks *strictly between* $c$ and $z$.
# Chunk $c$ has decayed its own tokens to its right edge already; chunk $z$ has not
# begun. And the token $l$ of chunk $z$ reads
# $Y_{\text{off}}[l] = C_l \cdot (e^{\Sigma_l} G_z)$, with $\Sigma$ counted from the
# left edge of its chunk.
#
# We pass the state with the recurrence, not with the unrolled sum: it needs no matrix
# over pairs of chunks, and every factor $e^{\Lambda}$ has magnitude at most 1. One
# thing a loop cannot do: be written down for a number of chunks that is not known yet.
# `torch.export` wants a program for *every* length, and gets the unrolled sum, which is
# the causal matrix of the section above with chunks for tokens.


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


def _pass_states_at_once(
    state: Complex[Tensor, "B nc H P N"],
    total: Complex[Tensor, "B nc H"],
    closed: Bool[Tensor, "B nc H"],
    initial_states: Complex[Tensor, "B H P N"],
) -> tuple[Complex[Tensor, "B nc H P N"], Complex[Tensor, "B H P N"]]:
    """`_pass_states` in one product, for a number of chunks that is not known.

    Args:
        total: log decay of each chunk, complex128.
        closed: chunks with a boundary, which nothing passes.
    """
    dtype = state.dtype
    # The initial state is a chunk, too.
    total, closed = (F.pad(z.transpose(1, 2), (1, 0)) for z in (total, closed))
    steps = total.cumsum(-1)
    magnitude = _decay_between(steps.real, closed.cumsum(-1), state.real.dtype)
    angle = steps.imag
    added = torch.cat([initial_states.unsqueeze(1), state], dim=1).transpose(1, 2)
    turned = added.flatten(-2) * _unit_phase(-angle, dtype).unsqueeze(-1)
    carry = torch.view_as_complex((magnitude @ _pairs(turned)).unflatten(-1, (-1, 2)))
    carry = carry * _unit_phase(angle, dtype).unsqueeze(-1)
    carry = carry.unflatten(-1, state.shape[-2:]).transpose(1, 2)
    return carry[:, :-1], carry[:, -1]


# %%
totals = A_cumsum[:, :, -1]
zero = torch.zeros_like(state[:, 0])
entering, last = _pass_states(state, totals.exp(), zero)
whole, final = ssd_naive_complex(x, A, B_t, C_t, dt, return_final_states=True)
assert torch.allclose(last, final)
looped = _pass_states(state, totals.exp(), zero + 1j)
at_once = _pass_states_at_once(state, totals, totals.real > 0, zero + 1j)
for got, want in zip(at_once, looped, strict=True):
    assert torch.allclose(got, want), "a product instead of the loop"
read = Cc * A_cumsum.exp().unsqueeze(-1)
Y_off = torch.einsum("bclhn,bchpn->bclhp", read, entering).real
assert torch.allclose((Y_diag + Y_off).flatten(1, 2), whole.real)
print("inside + through the state = the loop")

# %% [markdown]
# ### What breaks: two wrong windows
# The unrolled form tempts to two slips of one index. The first decays through chunk $z$
# as well, $K_z - K_c$: wrong at once. The second, $K_z - K_{c+1}$, shifts both ends. It
# holds the right *number* of chunks, so if all chunks decay alike it is exactly right.
# With $dt = 0$ everywhere all chunks do decay alike. A whole test suite built on
# $dt = 0$ will pass.

# %%
WINDOWS = {
    "right: K[z-1] - K[c]": lambda K, z, c: K[z - 1] - K[c],
    "wrong: K[z] - K[c]": lambda K, z, c: K[z] - K[c],
    "wrong: K[z] - K[c+1]": lambda K, z, c: K[z] - K[c + 1],
}


def scan_with_window(case, C, window):
    """The chunkwise scan with the state between chunks from the unrolled sum."""
    x, A, B_t, C_t, dt = case
    Xc, Bc, Cc, A_log = (
        z.unflatten(1, (-1, C)) for z in (x, B_t, C_t, F.softplus(dt) * A)
    )
    A_cumsum = A_log.cumsum(2)
    decay_states = (A_cumsum[:, :, -1:] - A_cumsum).exp()
    Y_diag, S = per_chunk_ssd_pytorch(Bc, Cc, Xc, A_log, decay_states)
    K = A_cumsum[:, :, -1].cumsum(1).unbind(1)
    G = [torch.zeros_like(S[:, 0])]
    for z in range(1, S.shape[1]):
        terms = [window(K, z, c).exp()[..., None, None] * S[:, c] for c in range(z)]
        G.append(sum(terms))
    read = Cc * A_cumsum.exp().unsqueeze(-1)
    Y_off = torch.einsum("bclhn,bchpn->bclhp", read, torch.stack(G, 1)).real
    return (Y_diag + Y_off).flatten(1, 2)


# %%
case = random_case(B=1, T=64, H=2, D=4, N=4)
still = (*case[:-1], torch.zeros_like(case[-1]))
errors = {
    name: [
        (scan_with_window(c, 8, window) - ssd_naive_complex(*c).real).abs().max().item()
        for c in (still, case)
    ]
    for name, window in WINDOWS.items()
}
for name, (at_zero, at_random) in errors.items():
    verdict = ["right" if e < 1e-9 else "WRONG" for e in (at_zero, at_random)]
    print(f"{name:22s} dt = 0: {verdict[0]}   random dt: {verdict[1]}")
right, visible, invisible = errors.values()
assert max(right) < 1e-9
assert min(visible) > 0.1
assert invisible[0] < 1e-9 < 0.1 < invisible[1], "no test at dt = 0 sees this one"

# %%
fig, ax = plt.subplots(figsize=(8.4, 3.0))
for i, (name, color) in enumerate(zip(errors, (GREEN, RED, ORANGE), strict=True)):
    place = [i - 0.2, i + 0.2]
    bars = ax.bar(place, errors[name], 0.36, color=color, edgecolor=BLACK)
    bars[0].set_hatch("//")
ax.axhline(1e-9, color=BLACK, lw=0.8, ls=":")
ax.set_yscale("log")
ax.set(ylabel="largest error in y (absolute)", ylim=(1e-16, 1e4))
ax.set_xticks(range(3), list(errors))
ax.set_title("Hatched: dt = 0 everywhere. Plain: random dt. Only one window is right")
plt.show()

# %% [markdown]
# The rule that follows, for every test in this repository: steps are random and differ
# from token to token. A test at $dt = 0$ proves nothing.
#
# ## Log decays that stay small
# Two more things happen before the products.
#
# **Angles.** A step's angle $\Delta_u \operatorname{Im} A$ can be many turns; whole
# turns are dropped first, so that each stays within $[-\pi, \pi]$, and sums begin anew
# in every chunk. The sums run in float64: per token and head this is one number, next
# to the $N$ and $D$ numbers that everything else costs.
#
# **What is not a number.** Zero times NaN is NaN, and a product over a chunk multiplies
# *every* pair of its tokens, by 0 where nothing may pass: a NaN in one document would
# reach the next, and even the tokens before it, which in the loop it cannot. So where
# there are documents, what is not finite is taken out before the products, and NaN is
# written where the loop would have shown it: from there to the end of its document.


# %% tags=["export"]
def _log_decay(
    dt: Float[Tensor, "B T H"], A: Complex[Tensor, "H"]
) -> Complex[Tensor, "B T H"]:
    """Log decay of each step in complex128, its angle reduced to [-pi, pi]."""
    log_decay = F.softplus(dt.double()) * A.to(torch.complex128)
    turns = (log_decay.imag.detach() / (2 * torch.pi)).round()
    return log_decay - torch.complex(torch.zeros_like(turns), turns * 2 * torch.pi)


@torch.no_grad()
def _not_finite(z: Inexact[Tensor, "B T H *rest"]) -> Bool[Tensor, "B T H"]:
    """Where some number of a head is not finite."""
    z = torch.view_as_real(z) if z.is_complex() else z
    least, most = z.flatten(3).aminmax(dim=-1)  # a sum might overflow
    return ~(least.isfinite() & most.isfinite())


def _keep_documents_apart(
    x: Inexact[Tensor, "B T H D"],
    B_t: Complex[Tensor, "B T H N"],
    C_t: Complex[Tensor, "B T H N"],
    dt: Float[Tensor, "B T H"],
    initial_states: Complex[Tensor, "B H D N"],
    reset: Bool[Tensor, "B T"],
) -> tuple[list[Tensor], Bool[Tensor, "B T H 1"], Bool[Tensor, "B H 1 1"]] | None:
    """The inputs with 0 for what is not finite, and where the loop would show it.

    A step of -inf is one of no length and stays.

    Returns: the five, where y is no number, and which final states are none; None
        where all is finite, which is looked up on a CPU alone.

    Source: notebook 03, "Log decays that stay small".
    """
    written, read = _not_finite(x) | _not_finite(B_t), _not_finite(C_t)
    entering = _not_finite(initial_states.unsqueeze(1))
    step = dt.isnan() | (dt == torch.inf)
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    looks = plain and not torch.compiler.is_compiling()
    if looks and not any(map(torch.any, (written, read, entering, step))):
        return None
    start = reset.unsqueeze(-1)
    bad = written | (step & ~start)
    count = bad.cumsum(1) + entering
    before = torch.where(start, count - bad.int(), 0).cummax(1).values
    spoiled = count > before
    masks = *(written.unsqueeze(-1),) * 2, read.unsqueeze(-1), step
    clean = [z.masked_fill(m, 0) for z, m in zip((x, B_t, C_t, dt), masks, strict=True)]
    clean.append(initial_states.masked_fill(entering.mT.unsqueeze(-1), 0))
    return clean, (spoiled | read).unsqueeze(-1), spoiled[:, -1, :, None, None]


def _exp(
    log_factor: Complex[Tensor, "*shape"],
    dtype: torch.dtype,
    apart: Bool[Tensor, "*shape"] | None = None,
) -> Complex[Tensor, "*shape"]:
    """exp of a complex128 log factor, cast to the complex working dtype; 0 if apart."""
    if apart is None:
        return log_factor.exp().to(dtype)
    return log_factor.masked_fill(apart, 0).exp().to(dtype).masked_fill(apart, 0)


# %%
A = torch.tensor([-0.5 + 3.0j], dtype=torch.complex64)
dt = torch.tensor([[[2.0], [30.0], [-30.0]]])
log_decay = _log_decay(dt, A)
assert log_decay.imag.abs().max() <= math.pi
turned = (F.softplus(dt.double()) * A.to(torch.complex128)).exp()
assert torch.allclose(log_decay.exp(), turned), "dropping whole turns changes nothing"

# %% [markdown]
# ### What breaks: one cumulative sum for the whole sequence
# Why not compute all factors between chunks as $e^{K_{z-1} - K_c}$ from one running
# total in float32? Because a total over thousands of steps is a large number, and the
# difference of two large numbers has lost the small digits. $A = -0.001 + 3i$ hardly
# forgets, so its angles pile up.

# %%
steps, A = 4096, torch.tensor(-0.001 + 3j, dtype=torch.complex128)
log_decay = F.softplus(torch.randn(steps, dtype=torch.float64)) * A
chunks = log_decay.unflatten(0, (-1, 64))
exact = chunks.sum(1).exp()

ends = log_decay.to(torch.complex64).cumsum(0)[63::64]
global_sum = torch.cat([ends[:1], ends.diff()]).exp()
turns = (chunks.imag / (2 * math.pi)).round() * 2 * math.pi
small = torch.complex(chunks.real, chunks.imag - turns).to(torch.complex64)
per_chunk = small.sum(1).exp()

late = slice(48, 64)  # the last quarter of the sequence
global_error = relative_error(global_sum[late], exact[late])
local_error = relative_error(per_chunk[late], exact[late])
lost = math.log10(global_error / local_error)
print(f"digits lost by the global sum: about {lost:.0f}")
assert lost > 1
assert local_error < 1e-5 < global_error

# %% [markdown]
# ## The whole scan
# Everything is there: pad, cut, solve each chunk, pass the states, add what they read.
# Three details that are easy to miss:
#
# - Padding to a whole chunk pads the *log decay* with 0. Padding `dt` with 0 would be
#   another thing: softplus(0) is $\ln 2$, and the final state would decay through steps
#   that do not exist.
# - Three factors end at a boundary: the state that enters reaches document 0 of a chunk
#   alone, only the last document reaches its right edge, and the state passes a chunk
#   only if it holds no boundary. From the last position to the edge there is nothing to
#   decay: that 0 is put there, not computed, or its gradient would be a difference.
# - Autocast is switched off inside: a state rounded to bfloat16 at every chunk would
#   carry its errors along forever.

# %% tags=["export"]
# What each dispatch can multiply in; the default comes first.
_PRECISIONS_OF = {
    "pytorch": ("ieee",),
    "triton": ("ieee", "tf32"),
    "fused": ("tf32", "ieee", "bf16"),
}


class KernelUnavailable(ValueError):
    """A kernel that cannot run: its tile sizes, the device, or a complex x.

    The block that asked for it takes the PyTorch path instead, with one warning.
    """


def _check_precision(ssd_dispatch: str, precision: str | None) -> str:
    """The precision, or the default of the dispatch for None; refuses what it lacks."""
    offered = _PRECISIONS_OF[ssd_dispatch]
    precision = offered[0] if precision is None else precision
    if precision not in offered:
        raise ValueError(
            f"precision is {precision!r}; ssd_dispatch={ssd_dispatch!r} takes None or "
            + " or ".join(map(repr, offered))
        )
    return precision


def _check_dispatch(ssd_dispatch: str, chunk_size: int, precision: str | None) -> None:
    """Refuse an unknown dispatch, a chunk size below 1 or a precision not on offer."""
    if ssd_dispatch not in _PRECISIONS_OF:
        raise ValueError(
            f"ssd_dispatch is {ssd_dispatch!r}; wanted one of "
            + ", ".join(_PRECISIONS_OF)
        )
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
    _check_precision(ssd_dispatch, precision)


def _to_chunks(
    z: Shaped[Tensor, "B T H *rest"], chunk: int
) -> Shaped[Tensor, "B nc C H *rest"]:
    """Pad time on the right with zeros to whole chunks, and cut it into them."""
    time = z.shape[1]
    count = (time + chunk - 1) // chunk
    if torch.compiler.is_exporting():
        # The length is a symbol: nothing may depend on what is missing, and a symbol
        # that can be 1 would be a case of its own.
        count = (time + 2 * chunk - 1) // chunk
        place = torch.arange(count * chunk, device=z.device)
        z = z.index_select(1, place.clamp(max=time - 1))
        z = z.masked_fill((place >= time).view(-1, *[1] * (z.ndim - 2)), 0)
    elif missing := count * chunk - time:
        z = torch.cat([z, z.new_zeros(z.shape[0], missing, *z.shape[2:])], dim=1)
    # One copy puts heads before time in memory; every matrix product profits.
    return z.unflatten(1, (count, chunk)).transpose(2, 3).contiguous().transpose(2, 3)


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
        ssd_dispatch: "pytorch", "triton" for the kernel of notebook 05, or "fused" for
            those of notebook 06. The kernels take float32 and complex64 alone, and
            "fused" takes a real x.
        precision: None for the default of the dispatch, or "ieee"; "triton" also takes
            "tf32", and "fused", whose default that is, "bf16".
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last real token; fed back
            as initial_states it continues the sequence.
        reset: True where a document starts: the state arriving there is dropped. Not
            even a NaN passes.

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
    if ssd_dispatch == "fused":
        y, final_states = _scan_fused(
            x, A, B_t, C_t, dt, chunk_size, precision, initial_states, reset
        )
        return (y, final_states) if return_final_states else y
    if initial_states is None:
        batch, _, heads, dim = x.shape
        initial_states = B_t.new_zeros(batch, heads, dim, B_t.shape[-1])
    apart = None
    if reset is not None:
        apart = _keep_documents_apart(x, B_t, C_t, dt, initial_states, reset)
    if apart is not None:
        (x, B_t, C_t, dt, initial_states), no_output, no_state = apart
    log_decay = _log_decay(dt, A)
    boundary = _boundaries(log_decay, reset, dt.dtype)
    # States stay in float32: autocast must not reach the products below.
    with _without_autocast(x.device.type):
        y, final_states = _scan_chunks(
            *(x, B_t, C_t, log_decay, boundary, initial_states),
            *(chunk_size, ssd_dispatch, precision),
        )
    if apart is not None:
        y = y.masked_fill(no_output, torch.nan)
        final_states = final_states.masked_fill(no_state, torch.nan)
    return (y, final_states) if return_final_states else y


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast multiplies in on a device now; None where it is off."""
    # Meta has no autocast to ask about.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _scan_chunks(
    x, B_t, C_t, log_decay, boundary, initial_states, chunk_size, ssd_dispatch,
    precision,
):  # fmt: skip
    """Cut into chunks, solve each, pass the states, add what they read."""
    dtype, time, chunk = B_t.dtype, x.shape[1], chunk_size
    exporting = torch.compiler.is_exporting()
    # A kernel is compiled for one chunk size; PyTorch takes any.
    if ssd_dispatch == "pytorch" and not exporting:
        chunk = min(chunk_size, time)
    # Padding the log decay with 0 leaves the final state alone; dt = 0 would decay it.
    Xc, Bc, Cc, A_log = (_to_chunks(z, chunk) for z in (x, B_t, C_t, log_decay))
    # Heads before steps, as everything lies in memory.
    documents = _to_chunks(boundary, chunk).mT.cumsum(-1, dtype=torch.int32)
    A_cumsum = _sums_within(A_log.mT, documents)
    total, last = A_cumsum[..., -1:], documents[..., -1:]
    # From the last position to the edge nothing decays: 0, and no gradient.
    to_edge = F.pad(total - A_cumsum[..., :-1], (0, 1))
    decay_states = _exp(to_edge, dtype, documents != last)
    Y_diag, state = _solve_chunks(
        *(ssd_dispatch, precision),
        *(Bc, Cc, Xc, A_log, decay_states.mT, documents.mT),
    )
    total, closed = total.squeeze(-1), last.squeeze(-1) > 0
    if exporting:
        entering, final_states = _pass_states_at_once(
            state, total, closed, initial_states
        )
    else:
        decay = _exp(total, dtype, closed)
        entering, final_states = _pass_states(state, decay, initial_states)
    read = Cc.transpose(2, 3) * _exp(A_cumsum, dtype, documents > 0).unsqueeze(-1)
    Y_off = _real_product(read, entering).transpose(2, 3)
    y = Y_diag.real + Y_off if Y_diag.is_complex() else Y_diag + Y_off
    y = y.flatten(1, 2)
    if exporting:
        return y.index_select(1, torch.arange(time, device=y.device)), final_states
    return y[:, :time], final_states


def _as_columns(x, B_t, C_t, dt) -> Float[Tensor, "B T columns"]:
    """The streams side by side, as the projection of a block has them."""
    streams = (x, B_t.real, B_t.imag, C_t.real, C_t.imag, dt.unsqueeze(-1))
    return torch.cat([z.flatten(2) for z in streams], dim=-1)


def _scan_fused(x, A, B_t, C_t, dt, chunk_size, precision, initial_states, reset):
    """The scan of notebook 06, on columns laid out as it reads them."""
    from mamba3lite.models.ssd_fused import ssd_fused  # only now: it imports triton

    if x.is_complex():
        raise KernelUnavailable(
            f"x is {x.dtype}; ssd_dispatch='fused' takes a real x; use 'pytorch' or "
            "'triton'"
        )
    return ssd_fused(
        _as_columns(x, B_t, C_t, dt),
        A,
        n_heads=x.shape[2],
        head_dim=x.shape[3],
        state_dim=B_t.shape[3],
        chunk_size=chunk_size,
        precision=precision,
        initial_states=initial_states,
        return_final_states=True,
        reset=reset,
    )


def _solve_chunks(ssd_dispatch, precision, Bc, Cc, Xc, A_log, decay_states, documents):
    """The inside of all chunks, by the function that the dispatch names."""
    if ssd_dispatch == "pytorch":
        return per_chunk_ssd_pytorch(Bc, Cc, Xc, A_log, decay_states, documents)
    if Bc.dtype != torch.complex64:
        raise TypeError(
            f"B_t is {Bc.dtype}; ssd_dispatch={ssd_dispatch!r} takes single precision "
            "(complex64, float32); use ssd_dispatch='pytorch' for double"
        )
    # Here and not above: the model must import without triton.
    from mamba3lite.models.ssd_triton import per_chunk_ssd_triton

    Xc, A_log = Xc.to(Bc.dtype), A_log.to(Bc.dtype)
    return per_chunk_ssd_triton(
        Bc, Cc, Xc, A_log, decay_states, documents, input_precision=precision
    )


# %% [markdown]
# The check that matters: random steps, a length that is no multiple of the chunk, every
# gradient, against the loop in complex128.


# %%
def compare(T, C, precision):
    case = [z.requires_grad_() for z in precision(random_case(B=2, T=T, H=2, D=4, N=4))]
    exact = [
        z.detach().to(torch.complex128 if z.is_complex() else torch.float64)
        for z in case
    ]
    exact = [z.requires_grad_() for z in exact]
    weights = torch.randn(2, T, 2, 4, dtype=torch.float64)
    y = ssd_complex_chunkwise(*case, chunk_size=C)
    wanted = ssd_naive_complex(*exact).real
    grads = torch.autograd.grad(y, case, weights.to(y.dtype))
    wanted_grads = torch.autograd.grad(wanted, exact, weights)
    pairs = zip((y, *grads), (wanted, *wanted_grads), strict=True)
    return [relative_error(got, want) for got, want in pairs]


for T, C in [(18, 4), (64, 64), (130, 64), (257, 32)]:
    assert max(compare(T, C, precision=list)) < 1e-10
    assert max(compare(T, C, precision=single)) < 2e-5
print("y, dx, dA, dB, dC, ddt agree with the loop")

# %% [markdown]
# States in and out: cut a sequence anywhere, hand the state over, and nothing changes.
# Packed documents: a reset in the middle of a chunk hides everything before it.

# %%
x, A, B_t, C_t, dt = random_case(B=1, T=50, H=2, D=4, N=4)
whole = ssd_complex_chunkwise(x, A, B_t, C_t, dt, chunk_size=16)
first = [z[:, :21] for z in (x, B_t, C_t, dt)]
rest = [z[:, 21:] for z in (x, B_t, C_t, dt)]
y1, carried = ssd_complex_chunkwise(
    first[0], A, *first[1:], chunk_size=16, return_final_states=True
)
y2 = ssd_complex_chunkwise(rest[0], A, *rest[1:], chunk_size=16, initial_states=carried)
assert torch.allclose(torch.cat([y1, y2], 1), whole)

reset = torch.zeros(1, 50, dtype=torch.bool)
reset[0, 21] = True
packed = ssd_complex_chunkwise(x, A, B_t, C_t, dt, chunk_size=16, reset=reset)
alone = ssd_complex_chunkwise(rest[0], A, *rest[1:], chunk_size=16)
assert torch.allclose(packed[:, 21:], alone)
assert torch.allclose(packed[:, :21], y1)

spoiled = x.clone()
spoiled[0, 18] = torch.nan
packed = ssd_complex_chunkwise(spoiled, A, B_t, C_t, dt, chunk_size=16, reset=reset)
looped = ssd_naive_complex(spoiled, A, B_t, C_t, dt, reset=reset).real
lost = packed.isnan().all((0, 2, 3))
assert lost.nonzero().flatten().tolist() == [18, 19, 20], "to the end of its document"
assert torch.allclose(packed, looped, equal_nan=True)

# %% [markdown]
# ## What it costs
# Count multiply-adds per head over a sequence of $T$ steps (complex ones, as if nothing
# were saved by real inputs):
#
# | part | multiply-adds | why |
# |---|---|---|
# | $Y_{\text{diag}}$ | $T C (N + D)$ | two products with a $C^2$ matrix |
# | chunk states | $T N D$ | one outer product per token |
# | $Y_{\text{off}}$ | $T N D$ | one read per token |
# | passing states | $(T / C)\, N D$ | one update per chunk |
#
# Work grows with $C$, the number of serial steps $T / C$ falls with it. With
# $N = D = 64$ the two halves meet near $C = 64$, and that is the default.

# %%
T, N, D = 2048, 64, 64
sizes = [8, 16, 32, 64, 128, 256, 512]
inside = [T * C * (N + D) / 1e6 for C in sizes]
outside = [(2 * T * N * D + T / C * N * D) / 1e6 for C in sizes]
serial = [T // C for C in sizes]
assert inside[3] == 2048 * 64 * 128 / 1e6
assert 0.9 < inside[3] / outside[3] < 1.1, "at C = 64 both halves cost the same"

# %%
fig, ax = plt.subplots()
ax.plot(sizes, inside, "o-", color=ORANGE, label="inside chunks: Y_diag")
ax.plot(sizes, outside, "s-", color=SKY, label="states: build, pass, read")
ax.set(xlabel="chunk length C (steps)", ylabel="multiply-adds per head (millions)")
ax.set_xscale("log", base=2)
depth = ax.twinx()
depth.plot(sizes, serial, "^--", color=BLACK, label="serial steps (right)")
depth.set(ylabel="serial steps T / C", yscale="log")
lines = ax.get_lines() + depth.get_lines()
ax.legend(lines, [line.get_label() for line in lines], loc="upper center")
ax.set_title("Longer chunks: more work, fewer serial steps (T = 2048, N = D = 64)")
plt.show()

# %% [markdown]
# And in seconds, on this machine: the loop against the chunks, forward only.


# %% tags=["nbval-ignore-output"]
def seconds(scan, case):
    scan(*case)
    start = time.perf_counter()
    scan(*case)
    return time.perf_counter() - start


lengths = [128, 256, 512, 1024]
cases = [single(random_case(B=1, T=T, H=4, D=32, N=32)) for T in lengths]
loop = [seconds(ssd_naive_complex, case) * 1e3 for case in cases]
chunked = [seconds(ssd_complex_chunkwise, case) * 1e3 for case in cases]
for T, slow, fast in zip(lengths, loop, chunked, strict=True):
    print(f"T = {T:4d}: loop {slow:6.1f} ms, chunks {fast:5.1f} ms")

# %% [markdown]
# ## Pitfalls
# - **Mask before exp**, on the chunk axis too. A finite output with a NaN gradient is
#   the usual first sign.
# - **The window between chunks is strictly between.** Test with random steps.
# - **The diagonal is 1.** An exclusive cumulative sum, or a strict triangle, loses the
#   token itself.
# - **The diagonal has no gradient.** Where it takes part, what is small beside it is
#   lost.
# - **A boundary is a number of a document**, not a large log decay.
# - **Pad the log decay, not `dt`.**
# - **Raw `dt` never meets the exponential**: softplus first.
# - **Compare with `ssd_naive_complex(...).real`.** The chunkwise scan returns the real
#   part; the oracle returns the complex number.
# - **States are (D, N)** at the border of both functions, head dimension first,
#   whatever order the loop keeps inside.
#
# Each of them is a test in `tests/test_ssd.py` or `tests/test_ssd_traps.py`.
#
# The scan is done. Next: [04, complex autograd](04_complex_autograd.ipynb) asks what a
# gradient of a complex number is, and prepares the kernel of notebook 05. Whoever wants
# the language model first goes on with [07](07_block_and_model.ipynb).

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran in {time.perf_counter() - started:.0f} s")
