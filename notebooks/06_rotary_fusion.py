# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_fused"]
# # Rotation, fused
# The whole scan on a GPU in a few launches, forward and backward.
#
# **After it you can**
# - turn a complex scan into a real one with twice the state, and say what that saves;
# - write its forward and its backward by hand, and name the term that everybody
#   forgets;
# - build the scan from device functions that forward and backward share, and test each
#   of them alone;
# - register kernels as an operator that autograd, `torch.compile` and checkpointing
#   understand;
# - count what each launch reads and writes, and compare that with the least possible.
#
# **Before it** you need the chunkwise scan of [notebook 03](03_chunkwise_ssd.ipynb),
# what a gradient of a complex number is ([04](04_complex_autograd.ipynb)), and
# programs, tiles and precision modes ([05](05_triton_kernel.ipynb)). No GPU: without
# one, Triton interprets.
#
# **How long**: about an hour and a half to read, an estimate; the last cell prints how
# long the notebook ran.
#
# **Where its cells go**: the exported cells make `mamba3lite/models/ssd_fused.py`,
# which is behind `ssd_dispatch="fused"`.

# %% [markdown]
# ## The tools
# As in notebook 05, whether Triton compiles or interprets is decided before its first
# import.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %%
import json
import math
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mamba3lite.models.ssd_fused  # before its operators are registered here again
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

started = time.perf_counter()
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update(
    {
        "figure.dpi": 72,
        "figure.figsize": (7.8, 2.9),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

# %% tags=["export"]
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from mamba3lite.models.ssd_complex import KernelUnavailable, _check_precision
from mamba3lite.models.ssd_triton import (
    HAS_TRITON,
    _check_device,
    _check_triton,
    _interpreted,
)

if HAS_TRITON:
    import triton
    import triton.language as tl

    from mamba3lite.models.ssd_triton import _turn

# %% [markdown]
# The first half of the notebook is mathematics, in double precision, one head of one
# sequence at a time. Steps differ from token to token: with equal steps half of the
# possible mistakes are invisible.


# %%
class Head(NamedTuple):
    """One head of one sequence: what the scan of this notebook reads."""

    x: Tensor  # (T, D)
    A: Tensor  # complex scalar
    B: Tensor  # (T, N)
    C: Tensor  # (T, N)
    dt: Tensor  # (T,)
    G: Tensor  # (D, N), the state before the first token
    reset: Tensor  # (T,), True where a document starts


def random_head(T, D=3, N=5, rate=0.1, angle=2.0, documents=True):
    def complex_normal(*shape):
        return torch.randn(*shape, dtype=torch.complex128)

    reset = torch.rand(T) < (0.1 if documents else 0.0)
    A = torch.tensor(complex(-rate, angle), dtype=torch.complex128)
    x, dt = torch.randn(T, D).double(), torch.randn(T).double()
    B, C, G = complex_normal(T, N), complex_normal(T, N), complex_normal(D, N)
    return Head(x, A, B, C, dt, G, reset)


def oracle(head):
    """The loop of notebook 02 on one head: y (T, D) and the last state (D, N)."""
    x, A, B, C, dt, G, reset = head
    lifted = [z[None, :, None] for z in (B, C, dt)]
    y, final = ssd_naive_complex(
        *(x[None, :, None], A[None], *lifted),
        initial_states=G[None, None], return_final_states=True, reset=reset[None],
    )  # fmt: skip
    return y.real[0, :, 0], final[0, 0]


def relative_error(got, wanted):
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    got, wanted = got.detach().cpu().to(kind), wanted.detach().cpu().to(kind)
    assert got.shape == wanted.shape
    return ((got - wanted).norm() / wanted.norm()).item()


def with_names(function, *arguments, **names):
    """Call it while names of this notebook mean something else."""
    with patch.dict(globals(), **names):
        return function(*arguments)


# %% [markdown]
# ## Rotate once
# *A complex scan costs four real products wherever a real one costs one. Does it have
# to?* Split a step's log decay into $\Delta_t A = u_t + i v_t$, with cumulative sums
# $U$ and $V$ inside a chunk. Notebook 03 split the turn, not the magnitude:
#
# $$e^{i (V_l - V_s)} = e^{i V_l} e^{-i V_s}, \qquad
# \tilde C_l = e^{i V_l} C_l , \quad \tilde B_s = e^{-i V_s} B_s .$$
#
# $x$ is real, and of $y$ only the real part is wanted. Then only the real part of the
# score $\tilde C_l \cdot \tilde B_s$ matters, and that is one inner product of *real*
# vectors of length $2N$:
#
# $$\operatorname{Re}\big( C_l \cdot B_s \, e^{i (V_l - V_s)} \big) = q_l \cdot k_s ,
# \qquad k = [\operatorname{Re} \tilde B, \ \operatorname{Im} \tilde B], \quad
# q = [\operatorname{Re} \tilde C, \ -\operatorname{Im} \tilde C] .$$
#
# Here $q$ and $k$ are named as in attention, and the rotation is that of rotary
# embeddings ([Su et al. 2021](https://arxiv.org/abs/2104.09864)), with two differences:
# the angle depends on the data, through $\Delta$, and all states of a head share it.


# %%
def pair(z):
    """A complex vector as its real half and its imaginary half."""
    return torch.cat([z.real, z.imag], -1)


def queries_keys(B, C, V):
    """q and k of every step, (T, 2N): the minus in q is a conjugate."""
    phase = torch.exp(1j * V)[:, None]
    return pair((phase * C).conj()), pair(phase.conj() * B)


head = random_head(T=48)
V = (F.softplus(head.dt) * head.A.imag).cumsum(0)
scores = (head.C @ head.B.mT) * torch.exp(1j * (V[:, None] - V))
q, k = queries_keys(head.B, head.C, V)
assert q.dtype == torch.float64 and q.shape == (48, 10)
assert torch.allclose(q @ k.mT, scores.real, rtol=0, atol=1e-12)

# %% [markdown]
# Two signs can be wrong, and both errors are as large as the scores: $q$ without its
# minus (a product with a conjugate, as in attention over complex vectors), and $B$
# turned forward instead of back.

# %%
no_minus = pair(torch.exp(1j * V)[:, None] * head.C)
forward_too = queries_keys(head.B, head.C, -V)[1]
assert relative_error(no_minus @ k.mT, scores.real) > 0.5
assert relative_error(q @ forward_too.mT, scores.real) > 0.5

# %% [markdown]
# The picture is a change of frame. Follow one state. In the frame of the recurrence the
# state turns, and at step $l$ what token $s$ wrote stands at $B_s e^{i(V_l - V_s)}$;
# the reader looks along the real axis. In the rotated frame the state stands still:
# token $s$ writes once at $\tilde B_s$, and it is the reader who turns, to the
# direction $e^{-iV_l}$. One frame is the other, rigidly turned, so every projection is
# the same.

# %%
T = 24
V_few = (F.softplus(torch.randn(T, dtype=torch.float64)) * 0.3).cumsum(0)
B_few = torch.linspace(0.25, 1, T, dtype=torch.complex128)  # so that order shows
late = T - 1
moving = B_few * torch.exp(1j * (V_few[late] - V_few))
still = B_few * torch.exp(-1j * V_few)
reader = torch.exp(-1j * V_few[late])
assert torch.allclose(moving * reader, still), "the same picture, rigidly turned"
seen = still.real * reader.real + still.imag * reader.imag  # projected on the reader
assert torch.allclose(seen, moving.real, rtol=0, atol=1e-12)
assert V_few[late] > math.pi and seen.min() < -0.2 and seen.max() > 0.5

# %%
figure, axes = plt.subplots(1, 3, figsize=(7.8, 2.6), width_ratios=[1, 1, 1.25])
frames = [(moving, 1 + 0j, "the state turns"), (still, reader, "the reader turns")]
for axis, (points, look, title) in zip(axes, frames, strict=False):
    axis.plot(points.real, points.imag, color="#bbbbbb", zorder=1)
    axis.scatter(points.real, points.imag, 22, range(T), cmap="cividis", zorder=2)
    tip = {"color": RED, "arrowstyle": "->", "lw": 2}
    axis.annotate("", (1.35 * look.real, 1.35 * look.imag), (0, 0), arrowprops=tip)
    axis.set(xlim=(-1.2, 1.4), ylim=(-1.0, 1.2), aspect="equal", title=title)
    axis.set(xlabel="real part [1]", ylabel="imaginary part [1]")
axes[2].plot(moving.real, "o", color=SKY, ms=8, label="real part, left")
axes[2].plot(seen, "x", color=BLACK, label="along the arrow, middle")
axes[2].set(xlabel="source step s", ylabel="score at l = 23 [1]")
axes[2].set_title("and the scores are equal")
axes[2].legend(fontsize=8)
plt.show()

# %% [markdown]
# What it saves, counted by PyTorch. Sines and cosines: with a factor on each side there
# is one pair per token and head, instead of one per pair of tokens. (Were there an
# angle per state, it would be one per token, head *and state*. Ours belongs to the
# head, so it is computed once and used for all $2N$ numbers.) Products: four real ones
# of length $N$ become one of length $2N$. That is half of the operations, and a quarter
# of the accumulators.


# %%
class Meter(TorchDispatchMode):
    """Elements made by the operations of these names."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.elements = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.names:
            self.elements += out.numel()
        return out


def four_products(B, C, V):
    angle = V[:, None] - V
    re = C.real @ B.real.mT - C.imag @ B.imag.mT
    im = C.real @ B.imag.mT + C.imag @ B.real.mT
    return re * angle.cos() - im * angle.sin()


def one_product(B, C, V):
    cos, sin = V.cos()[:, None], V.sin()[:, None]
    k = [B.real * cos + B.imag * sin, B.imag * cos - B.real * sin]
    q = [C.real * cos - C.imag * sin, -C.imag * cos - C.real * sin]
    return torch.cat(q, -1) @ torch.cat(k, -1).mT


counts = {}
for name, function in [("four", four_products), ("one", one_product)]:
    with Meter("cos", "sin") as meter, FlopCounterMode(display=False) as flops:
        result = function(head.B, head.C, V)
    assert torch.allclose(result, scores.real, rtol=0, atol=1e-12)
    counts[name] = meter.elements, flops.get_total_flops()
    print(f"{name:4s}: {counts[name][0]:5d} sines and cosines, {counts[name][1]} FLOP")
assert counts["four"][0] == 48 * counts["one"][0] == 2 * 48 * 48
assert counts["four"][1] == 2 * counts["one"][1] == 4 * 2 * 48 * 48 * 5

# %% [markdown]
# ## A real scan with twice the state
# Put $q$ and $k$ into the chunkwise algorithm. The state becomes real too: $D \times
# 2N$, a real half and an imaginary half. Write $\operatorname{rot}_V (a, b) = (a
# \cos V - b \sin V,\ a \sin V + b \cos V)$ for the turn of such a pair. Per chunk,
# with $G$ the state that enters it:
#
# $$\begin{aligned}
# Y_{\text{diag}} &= \big( (q k^\top) \odot L \big) X ,
# & L_{ls} &= e^{U_l - U_s} \ (s \le l) \\
# S &= \operatorname{rot}_{V_{\text{last}}} \Big( \sum_s e^{U_{\text{last}} - U_s}
# \, x_s k_s^\top \Big) \\
# G' &= \operatorname{rot}_{V_{\text{last}}} \big( e^{U_{\text{last}}} G \big) + S
# & Y_{\text{off}, l} &= e^{U_l} \, G q_l
# \end{aligned}$$
#
# Why is the sum turned by $V_{\text{last}}$? The keys are turned back to the start of
# the chunk, $e^{-iV_s}$; the state belongs at its end, $e^{i(V_{\text{last}} - V_s)}$.
# And $Y_{\text{off}}$ needs no rotation of its own: $q_l$ has it.
#
# Several documents in a sequence add a number: how many starts were seen in this chunk
# so far. Pairs with different numbers are masked; the entering state reaches only the
# tokens with number 0, and only the last document reaches the end. A start itself has
# no decay to contribute: whatever it would multiply is masked.


# %%
def rotate(z, angle):
    a, b = z.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def chunk_factors(A, B, C, dt, reset):
    """Step sizes, V, q, k, the masked decay L, decay from the entry and to the end."""
    step = F.softplus(dt).masked_fill(reset, 0)
    U, V = (step * A.real).cumsum(0), (step * A.imag).cumsum(0)
    document = reset.cumsum(0)
    seen = document[:, None] == document
    seen = seen & torch.ones_like(seen).tril()
    L = (U[:, None] - U).masked_fill(~seen, -torch.inf).exp()
    entry = U.exp() * (document == 0)
    left = (U[-1] - U).exp() * (document == document[-1])
    q, k = queries_keys(B, C, V)
    return step, V, q, k, L, entry[:, None], left[:, None]


def scan_forward(head, chunk):
    """y (T, D), and the states (D, 2N): entering each chunk, then the last one."""
    x, A, B, C, dt, G, reset = head
    y, states = [], [pair(G)]
    for start in range(0, len(x), chunk):
        at = slice(start, start + chunk)
        _, V, q, k, L, entry, left = chunk_factors(A, B[at], C[at], dt[at], reset[at])
        Y_diag = (q @ k.mT * L) @ x[at]
        Y_off = entry * (q @ states[-1].mT)
        S = rotate(x[at].mT @ (left * k), V[-1])
        states.append(rotate(entry[-1] * states[-1], V[-1]) + S)
        y.append(Y_diag + Y_off)
    return torch.cat(y), states


# %% [markdown]
# The oracle knows nothing of chunks, pairs or rotations. Weak decay, where the state
# matters, and strong decay, where exponents are large; an odd length; a state that
# enters; documents or none.

# %%
RATES = {"weak": 1e-3, "strong": 16.0}
for rate in RATES.values():
    for documents in (False, True):
        head = random_head(T=77, rate=rate, documents=documents)
        assert head.reset.any() == documents
        wanted, final = oracle(head)
        for chunk in (16, 77):
            y, states = scan_forward(head, chunk)
            assert relative_error(y, wanted) < 1e-12
            assert relative_error(states[-1], pair(final)) < 1e-12

# %% [markdown]
# Without the rotation of the state, everything inside chunks is right and everything
# between them is wrong. And without the masks, documents leak.

# %%
head = random_head(T=77, rate=1e-3)
wanted, _ = oracle(head)
still, _ = with_names(scan_forward, head, 16, rotate=lambda z, angle: z)
assert relative_error(still[:16], wanted[:16]) < 1e-12
assert relative_error(still[16:], wanted[16:]) > 0.1
leaking, _ = scan_forward(head._replace(reset=torch.zeros_like(head.reset)), 16)
assert relative_error(leaking, wanted) > 0.1

# %% [markdown]
# ## The backward, by hand
# A fused kernel has no autograd inside. So: given $dY$ and $E$, the gradient of the
# state that *leaves* the chunk, find all gradients of the chunk and the one of the
# state that *entered* it, and walk from the last chunk to the first.
#
# The products are ordinary. With $M = q k^\top$, $P = M \odot L$ and $\tilde E =
# \operatorname{rot}_{-V_{\text{last}}} E$, the adjoint of a rotation being the rotation
# back, and with $e_l$ and $w_s$ for the decays from the entry and to the end:
#
# $$\begin{aligned}
# dM &= (dY\, X^\top) \odot L & dX &= P^\top dY + w \odot (k \tilde E^\top) \\
# dq &= dM\, k + e \odot (dY\, G) & dk &= dM^\top q + w \odot (X \tilde E) \\
# dG &= e_{\text{last}} \tilde E + (e \odot dY)^\top q
# \end{aligned}$$
#
# Now the cumulative sums. *Where does $V_t$ enter?* It turns $q_t$ and $k_t$ and
# nothing else in the chunk. The derivative of $e^{-iV} B$ is $-i e^{-iV} B$: on pairs,
# $(a, b) \mapsto (b, -a) =: J(a, b)$. The one of $e^{iV} C$ is $i e^{iV} C$, and
# because of the minus in $q$ that is the same $J$. And $U_t$? In all formulas above
# $e^{U_t}$ multiplies $q_t$ and $e^{-U_t}$ multiplies $k_t$. So
#
# $$dV_t = \langle dq_t, J q_t \rangle + \langle dk_t, J k_t \rangle , \qquad
# dU_t = \langle dq_t, q_t \rangle - \langle dk_t, k_t \rangle .$$
#
# One thing is missing. $U_{\text{last}}$ and $V_{\text{last}}$ are cumulative sums too,
# those of the last position, and they enter once more: the whole state that leaves,
# $G'$, carries the factor $e^{U_{\text{last}} + i V_{\text{last}}}$. Multiplying by
# $i$ is $-J$. At the **last position** of the chunk add
#
# $$\langle E, G' \rangle \text{ to } dU, \qquad
# \langle E, -J G' \rangle \text{ to } dV .$$
#
# The rest is a chain. Step $t$ is part of every sum from $t$ on, so $du$ and $dv$ are
# *reverse* cumulative sums, and then
#
# $$\begin{aligned}
# d\Delta &= du \operatorname{Re} A + dv \operatorname{Im} A &
# dA &= \textstyle\sum \Delta\, (du + i\, dv) & d(dt) &= \sigma(dt)\, d\Delta \\
# dB &= e^{iV} (dk_{\text{re}} + i\, dk_{\text{im}}) &
# dC &= e^{-iV} (dq_{\text{re}} - i\, dq_{\text{im}})
# \end{aligned}$$


# %%
def J(z):
    a, b = z.chunk(2, -1)
    return torch.cat([b, -a], -1)


def unpair(z):
    return torch.complex(*z.contiguous().chunk(2, -1))


def chunk_backward(x, factors, dY, E, G, G_next, last_term=True):
    """Gradients of one chunk: x, q, k, u, v, and the entering state."""
    _, V, q, k, L, entry, left = factors
    back = rotate(E, -V[-1])
    dM = (dY @ x.mT) * L
    dx = (q @ k.mT * L).mT @ dY + left * (k @ back.mT)
    dq = dM @ k + entry * (dY @ G)
    dk = dM.mT @ q + left * (x @ back)
    dU = (dq * q).sum(-1) - (dk * k).sum(-1)
    dV = (dq * J(q)).sum(-1) + (dk * J(k)).sum(-1)
    if last_term:
        dU[-1] += (E * G_next).sum()
        dV[-1] += (E * -J(G_next)).sum()
    du, dv = (z.flip(0).cumsum(0).flip(0) for z in (dU, dV))
    return dx, dq, dk, du, dv, entry[-1] * back + (entry * dY).mT @ q


def scan_backward(head, chunk, dy, E, last_term=True):
    """Gradients in the order of Head, and E of every chunk from the first on."""
    x, A, B, C, dt, _, reset = head
    states = scan_forward(head, chunk)[1]
    grads, dA, leaving = [], 0, [E]
    for c in reversed(range(len(states) - 1)):
        at = slice(c * chunk, (c + 1) * chunk)
        factors = chunk_factors(A, B[at], C[at], dt[at], reset[at])
        dx, dq, dk, du, dv, E = chunk_backward(
            x[at], factors, dy[at], E, states[c], states[c + 1], last_term
        )
        step, phase = factors[0], torch.exp(1j * factors[1])[:, None]
        dA = dA + (step * torch.complex(du, dv)).sum()
        dstep = (du * A.real + dv * A.imag).masked_fill(reset[at], 0)
        ddt = dstep * dt[at].sigmoid()
        grads.append((dx, phase * unpair(dk), phase.conj() * unpair(dq).conj(), ddt))
        leaving.append(E)
    dx, dB, dC, ddt = (torch.cat(z[::-1]) for z in zip(*grads, strict=True))
    return (dx, dA, dB, dC, ddt, unpair(E)), leaving[::-1]


# %% [markdown]
# The truth comes from autograd through the *loop*, with a random gradient at every
# output and at the last state. Notebook 04 says what PyTorch's gradient of a complex
# number is: $\partial / \partial \operatorname{Re} + i\, \partial / \partial
# \operatorname{Im}$, so a pair of gradients is the gradient of the pair. (At strong
# decay $dt$ and $A$ get one digit less: something cancels, which comes below.)


# %%
def oracle_gradients(head, dy, dfinal):
    leaves = [z.detach().clone().requires_grad_() for z in head[:-1]]
    outputs = oracle(Head(*leaves, head.reset))
    return torch.autograd.grad(outputs, leaves, (dy, dfinal))


def random_gradients(head):
    return torch.randn_like(head.x), torch.randn_like(head.G)


for rate in RATES.values():
    for documents in (False, True):
        head = random_head(T=77, rate=rate, documents=documents)
        dy, dfinal = random_gradients(head)
        wanted = oracle_gradients(head, dy, dfinal)
        for chunk in (16, 77):
            got, _ = scan_backward(head, chunk, dy, pair(dfinal))
            for name, mine, theirs in zip(Head._fields, got, wanted, strict=False):
                close = 1e-11 if rate > 1 and name in ("A", "dt") else 1e-12
                assert relative_error(mine, theirs) < close, (name, rate, chunk)
print("x, A, B, C, dt and the initial state: all gradients agree with autograd")

# %% [markdown]
# ### What breaks: the last position
# Leave out the extra term and see who notices. $dx$, $dB$, $dC$ and the gradient of the
# initial state do not: they stay right to the last digit, and so do their tests. Only
# $dt$ and $A$ are wrong, by about as much as they are large: the median over a dozen
# random heads.

# %%
errors = []
for _ in range(12):
    head = random_head(T=48, rate=0.02, angle=0.5, documents=False)
    dy, dfinal = random_gradients(head)
    wanted = oracle_gradients(head, dy, dfinal)
    without, _ = scan_backward(head, 16, dy, pair(dfinal), last_term=False)
    errors.append(
        [relative_error(*pair_of) for pair_of in zip(without, wanted, strict=True)]
    )
middle = dict(zip(Head._fields, torch.tensor(errors).median(0).values, strict=False))
print({name: f"{error:.0%}" for name, error in middle.items()})
wrong = {name for name, error in middle.items() if error > 1e-12}
assert wrong == {"A", "dt"} and 0.5 < min(middle["A"], middle["dt"]) < 2

# %%
figure, axis = plt.subplots(figsize=(7.2, 2.6))
axis.plot(wanted[4], color=BLACK, lw=2.5, label="autograd through the loop")
axis.plot(without[4], color=RED, ls=":", lw=2, label="without the last position")
for edge in (16, 32):
    axis.axvline(edge - 0.5, color="#bbbbbb", lw=1)
axis.set(xlabel="step t", ylabel="gradient of dt [1]")
axis.set_title("A chunk's last position speaks to all its steps (gray: chunk edges)")
axis.legend(fontsize=9)
plt.show()

# %% [markdown]
# ### A difference that cancels
# $dU_t$ is a difference. Under strong decay a token sees little but itself, and what it
# gains as a query it loses as a key: both inner products are large and nearly equal.
# Round their factors to bfloat16 and the rounding is what remains. There is another
# way to the same number: $dU$ is the row sums minus the column sums of $dM \odot M$,
# plus what the states say. There the diagonal is subtracted from *itself*, and cancels
# exactly. We build both in float64, with the inputs of the last products rounded.


# %%
def bf16(z):
    return z.bfloat16().to(z.dtype)


head = random_head(T=64, rate=4.0, documents=False)
factors = chunk_factors(*head[1:5], head.reset)
_, V, q, k, L, _, _ = factors
dM = (torch.randn_like(head.x) @ head.x.mT) * L
dU = (dM @ k * q).sum(-1) - (dM.mT @ q * k).sum(-1)
inner = (bf16(dM @ k) * bf16(q)).sum(-1) - (bf16(dM.mT @ q) * bf16(k)).sum(-1)
table = bf16(dM) * (bf16(q) @ bf16(k).mT)
sums = table.sum(1) - table.sum(0)
exact_table = dM * (q @ k.mT)
assert torch.allclose(exact_table.sum(1) - exact_table.sum(0), dU)
assert relative_error(inner, dU) > 3 * relative_error(sums, dU)
for name, z in (("inner products", inner), ("row minus column sums", sums)):
    print(f"{name}: error {relative_error(z, dU):.0e}")

# %% [markdown]
# The kernel below takes the inner products, but of float32 numbers: $q$, $k$, $dq$ and
# $dk$ are in registers before anything rounds them, and only what the matrix units
# multiply is rounded. Whether that is enough is measured at the end, on $dt$ and $A$.

# %% [markdown]
# ## Why fuse
# *The kernel of notebook 05 is faster than PyTorch. Why is the scan around it not?*
# Here is the whole call, from $x$, $A$, $B$, $C$, $dt$ to $y$, *measured* on an H200
# (`docs/benchmarks/h200-per-chunk.json`), beside the part of it that the kernel
# computes. All products in tf32. "Replayed" times leave the launches from Python out.

# %%
report = json.loads(
    next(
        path / "docs/benchmarks/h200-per-chunk.json"
        for path in (Path.cwd(), *Path.cwd().parents)
        if (path / "docs/benchmarks").is_dir()
    ).read_text()
)
rows = {
    (row["part"], row["version"]): row
    for row in report["rows"]
    if row["precision"] == "tf32"
}


def median(part, version, name):
    return rows[part, version][f"{name}_ms"]["median"]


kernel, whole = (median(part, "triton", "forward") for part in ("per_chunk", "scan"))
eager = median("scan", "triton", "forward_eager")
both = median("scan", "triton", "forward_backward")
print(f"the kernel {kernel:.2f} ms, the scan {whole:.2f}, from Python {eager:.2f};")
print(f"the scan forward and backward {both:.2f} ms")
assert kernel < 0.25 * whole and eager > 2 * whole
assert both > max(median("scan", v, "forward_backward") for v in ("einsum", "pytorch"))

# %% [markdown]
# Three quarters of the forward are not in the kernel. They are in PyTorch: padding and
# cutting into chunks, log decays in float64, their sums and exponentials, the states
# passed on, $Y_{\text{off}}$, the addition. Each of these reads its operands from far
# memory and writes its result there. From Python they cost more than twice as much
# again, one launch after the other. And the backward computes the PyTorch reference a
# second time.
#
# **The floor.** What must move at least? Per token and head, in elements: the inputs,
# $D + 4N + 1$ of them, and $D$ outputs; the backward reads the inputs again and $dy$,
# and writes one gradient per input. *Derived*, at the copy rate which the same file
# reports for this card:

# %%
sizes = report["shape"]
copy_rate = report["ceilings"]["copy_tb_s"] * 1e12


def floors(width, sizes=sizes):
    """Forward, and forward + backward, in ms, with elements of so many bytes."""
    D, columns = sizes["D"], sizes["D"] + 4 * sizes["N"] + 1
    tokens = sizes["B"] * sizes["T"] * sizes["H"]  # of one head each
    forward, backward = columns + D, 2 * columns + D
    moved = [width * tokens * n for n in (forward, forward + backward)]
    return [1e3 * bytes_moved / copy_rate for bytes_moved in moved]


assert math.isclose(floors(4)[0], rows["scan", "triton"]["forward_floor_ms"])
for name, width in (("float32", 4), ("bfloat16", 2)):
    once, twice = floors(width)
    print(f"{name:8s}: {once:.3f} ms forward, {twice:.3f} ms with backward")
assert 0.04 < floors(2)[0] < 0.05 and 0.13 < floors(2)[1] < 0.14
assert whole > 10 * floors(4)[0] and both > 20 * floors(4)[1]

# %%
figure, axes = plt.subplots(1, 2, sharey=True)
names = ("forward", "forward_backward")
versions = {"einsum": SKY, "pytorch": PINK, "triton": BLUE}
for axis, name, *pair_of in zip(axes, names, floors(4), floors(2), strict=True):
    times = [median("scan", version, name) for version in versions]
    axis.barh(list(versions), times, color=versions.values(), edgecolor=BLACK)
    axis.barh(["floor, float32", "floor, bfloat16"], pair_of, color=RED)
    ratio = min(times) / pair_of[0]
    axis.set(xlabel=f"{name.replace('_', ' + ')}, median [ms]")
    axis.set_title(f"the fastest is {ratio:.0f} times above its floor")
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# So the plan: everything from the projection's output to $y$ in kernels, which read
# each input where it lies, in the type it has, turn and exponentiate in registers, and
# write only what another kernel needs. That is one thing, the **states between
# chunks**: a chunk cannot be finished before the state that enters it is known.
#
# | launch | reads | writes |
# |---|---|---|
# | states | $x$, $B$, $dt$ | what enters every chunk, or: what every chunk adds |
# | pass, if needed | what every chunk adds and keeps | what enters every chunk |
# | outputs | all inputs, what enters every chunk | $y$ |
# | states, reversed | $dy$, $C$, $dt$ | $E$ of every chunk, or its parts |
# | pass, if needed | as above | $E$ of every chunk |
# | gradients | all inputs, $dy$, states, $E$ | all gradients, shares of $dA$ |
#
# Two or three launches forward, two or three backward and a small sum for $dA$. "If
# needed" is a choice between two ways to the states, which comes below. For the
# backward the forward keeps nothing but the inputs and the states: $q$, $k$, $M$ and
# $L$ are computed again, since arithmetic on the SM is cheap. How many bytes is that,
# at the shape above, with bfloat16 inputs and a bfloat16 copy of the states? *Derived*;
# each launch counts what it reads once.


# %%
def launches(walk, width=2, copy=2, sizes=sizes):
    """Bytes of each launch as (forward, backward), two dicts by name."""
    tokens = sizes["B"] * sizes["T"] * sizes["H"]
    D, N = sizes["D"], sizes["N"]
    states = tokens // sizes["chunk"] * 2 * N * D
    x_like, vectors, steps = (width * tokens * n for n in (D, 2 * N, 1))
    summed = x_like + vectors + steps  # x, B, dt; or dy, C, dt
    if walk:
        ways = {"states": summed + copy * states}
    else:  # float32 between the two launches
        ways = {"states": summed + 4 * states, "pass": (4 + copy) * states}
    inputs = x_like + 2 * vectors + steps
    forward = ways | {"last": inputs + copy * states + x_like}
    backward = ways | {"last": 2 * inputs + 2 * copy * states + x_like}
    return forward, backward


def in_ms(moved):
    return 1e3 * sum(moved) / copy_rate


for walk, name in ((True, "walk"), (False, "parallel")):
    forward, backward = (in_ms(part.values()) for part in launches(walk))
    print(f"{name:8s} {forward:.3f} ms forward, {forward + backward:.3f} with backward")
walking = in_ms(n for part in launches(True) for n in part.values())
passing = in_ms(n for part in launches(False) for n in part.values())
wide = in_ms(n for part in launches(True, copy=4) for n in part.values())
assert 1.8 * floors(2)[1] < walking < passing < 0.1 * both and walking < wide

# %%
figure, axis = plt.subplots(figsize=(7.8, 2.4))
colors = {"states": ORANGE, "pass": SKY, "last": GREEN}
labels = {"states": "states", "pass": "pass", "last": "outputs; gradients"}
for place, walk in enumerate((True, False)):
    start = 0
    for moved, hatch in zip(launches(walk), (None, "//"), strict=True):
        for name, count in moved.items():
            style = {"color": colors[name], "edgecolor": BLACK, "label": labels[name]}
            axis.barh(place, in_ms([count]), left=start, hatch=hatch, **style)
            start += in_ms([count])
axis.axvline(floors(2)[1], color=RED, ls="--", label="floor, both")
axis.set(yticks=[0, 1], yticklabels=["walk", "parallel"], ylim=(1.6, -0.6))
axis.set(xlabel="forward, then backward (hatched), at the copy rate [ms], derived")
axis.set_title("States cost as much as inputs, and more when they are passed on alone")
shown = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
axis.legend(shown.values(), shown.keys(), fontsize=8, loc="upper right")
plt.show()

# %% [markdown]
# ## One place in memory for all inputs
# The block that uses the scan computes all its inputs by one matrix product, and its
# result has the columns $x$ ($HD$), $\operatorname{Re} B$, $\operatorname{Im} B$,
# $\operatorname{Re} C$, $\operatorname{Im} C$ ($HN$ each) and $dt$ ($H$), in one row
# per token. Our kernels read from this row as it is: no split, no complex tensor, no
# float32 copy. The width of a row is $W = H (D + 4N + 1)$.
#
# The tests need the way back: one head of one sequence out of the columns, in double
# precision, so that everything can be compared with the first half of the notebook.


# %%
def random_inputs(B, T, H, D, N, rate=None, dtype=torch.float32, documents=True):
    """proj, A, initial states and reset, on the device; rates from slow to fast."""
    low, high = (rate, rate) if rate else (1e-3, 2)
    rates = torch.empty(H).uniform_(math.log(low), math.log(high)).exp()
    A = torch.complex(-rates, torch.empty(H).uniform_(-math.pi, math.pi))
    proj = torch.randn(B, T, H * (D + 4 * N + 1)).to(dtype)
    initial = torch.randn(B, H, D, N, dtype=torch.complex64)
    reset = torch.rand(B, T) < (0.1 if documents else 0)
    return [z.to(device) for z in (proj, A, initial, reset)]


def cut_columns(proj, H, D, N):
    """x, Re B, Im B, Re C, Im C as (B, T, H, .), and dt (B, T, H)."""
    widths = [H * D, *[H * N] * 4, H]
    *vectors, dt = proj.split(widths, -1)
    return *(z.unflatten(-1, (H, -1)) for z in vectors), dt


def heads_of(proj, A, initial, reset, D, N):
    """(b, h) and the Head it is, in double precision, for all of them."""
    proj, A, initial, reset = (z.cpu() for z in (proj, A, initial, reset))
    H = len(A)
    x, B_re, B_im, C_re, C_im, dt = cut_columns(proj.double(), H, D, N)
    B, C = torch.complex(B_re, B_im), torch.complex(C_re, C_im)
    A, initial = A.to(torch.complex128), initial.to(torch.complex128)
    for b in range(len(proj)):
        for h in range(H):
            own = (z[b, :, h] for z in (x, B, C, dt))
            x_h, B_h, C_h, dt_h = own
            yield (b, h), Head(x_h, A[h], B_h, C_h, dt_h, initial[b, h], reset[b])


def planes(state):
    """(D, 2N) as the kernels store it: real plane, imaginary plane, each (N, D)."""
    return state.unflatten(-1, (2, -1)).permute(1, 2, 0)


proj, A, initial, reset = random_inputs(B=2, T=5, H=3, D=2, N=4)
(where, head), *others = list(heads_of(proj, A, initial, reset, 2, 4))[4:]
assert where == (1, 1) and len(others) == 1
row = proj[1, 3].cpu().double()
assert torch.equal(head.x[3], row[2:4]) and head.dt[3] == row[3 * (2 + 16) + 1]
assert torch.equal(head.C[3].imag, row[6 + 3 * 12 + 4 : 6 + 3 * 12 + 8])

# %% [markdown]
# ## What the matrix units read
# Three modes. In **ieee** the products are of float32 numbers. In **tf32**, the
# default, operands keep 10 bits of mantissa, in **bf16** they keep 7. All sums,
# exponentials and carried states are float32 in every mode.
#
# A matrix unit given a float32 in tf32 mode ignores the low 13 bits, it *cuts*, and
# notebook 05 found the error of cutting up to twice as large. So `_operand` rounds:
# half a unit is added before the bits go. For bf16 the GPU has an instruction. The
# interpreter has not: it multiplies bfloat16 tiles wrongly, so under it `EMULATE`
# rounds in the bits and stays in float32. The products are the same, and the CPU can
# test the accuracy of a mode that it does not have. One difference is left: a float32
# *stored* as bfloat16 is rounded on a GPU and cut by the interpreter.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _operand(z, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
        """z as a product reads it: rounded to bfloat16 or to tf32, or in float32.

        EMULATE keeps a rounded bfloat16 in float32; the interpreter multiplies bfloat16
        wrongly. tf32 is rounded here because the units only cut.
        """
        if PRECISION == "ieee":
            return z.to(tl.float32)
        elif PRECISION == "tf32":
            z = z.to(tl.float32)
            bits = z.to(tl.int32, bitcast=True)
            near = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
            # The sum would carry a NaN of all ones, which a GPU makes, into a zero.
            return tl.where(z == z, near, z)
        elif EMULATE:
            z = z.to(tl.float32)
            bits = z.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            return tl.where(z == z, bits.to(tl.float32, bitcast=True), z)
        else:
            return z.to(tl.bfloat16)

    @triton.jit
    def _dot(a, b, acc, PRECISION: tl.constexpr):
        """acc + a b in float32; a and b come from `_operand`."""
        if PRECISION == "bf16":
            return tl.dot(a, b, acc=acc)
        else:
            return tl.dot(a, b, acc=acc, input_precision=PRECISION)


# %% [markdown]
# The rounding is checked on bits: against PyTorch for bf16, against a rounding with
# integers for tf32 (ties away from zero, as the units' own conversion `cvt.rna` does;
# [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/)). And NaN stays NaN
# whatever its bits: adding half a unit to 31 ones carries into the sign, and
# the result would be a zero.


# %%
@triton.jit
def operand_alone(
    z_ptr, out_ptr, LENGTH: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr
):
    at = tl.arange(0, LENGTH)
    z = _operand(tl.load(z_ptr + at), PRECISION, EMULATE)
    tl.store(out_ptr + at, z.to(tl.float32))


def rounded(z, precision):
    out = torch.empty_like(z)
    modes = {"PRECISION": precision, "EMULATE": _interpreted()}
    operand_alone[(1,)](z, out, LENGTH=len(z), **modes)
    return out


ulp = 2.0**-10
ties = [1 + ulp / 2, -1 - ulp / 2, 1 + 0.499 * ulp, 1 + 1.5 * ulp, 0.0, -0.0]
ties = torch.tensor([*ties, math.inf, -math.inf])
z = torch.cat([ties, torch.randn(1016)]).to(device)
assert torch.equal(rounded(z, "ieee"), z)
assert torch.equal(rounded(z, "bf16"), z.bfloat16().float())
near = rounded(z, "tf32")
assert near[:4].tolist() == [1 + ulp, -1 - ulp, 1, 1 + 2 * ulp]
assert torch.equal(near[4:8], z[4:8]) and (near.view(torch.int32) % 2**13 == 0).all()
assert ((near - z)[8:].abs() <= z[8:].abs() * ulp / 2).all()
cut = (z.view(torch.int32) >> 13 << 13).view(torch.float32)
assert (cut - z)[8:].abs().mean() > 1.9 * (near - z)[8:].abs().mean()

nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001] * 4, dtype=torch.int32)
for precision in ("ieee", "tf32", "bf16"):
    assert rounded(nans.view(torch.float32).to(device), precision).isnan().all()

# %% [markdown]
# And the product, one tile, against float64. The bounds are those of a sum of 64
# products whose operands have 24, 11 or 8 significant bits.


# %%
@triton.jit
def product_alone(
    a_ptr, b_ptr, out_ptr, SIDE: tl.constexpr, PRECISION: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    a = _operand(tl.load(a_ptr + at), PRECISION, EMULATE)
    b = _operand(tl.load(b_ptr + at), PRECISION, EMULATE)
    out = _dot(a, b, tl.zeros((SIDE, SIDE), tl.float32), PRECISION)
    tl.store(out_ptr + at, out)


a, b = torch.randn(2, 64, 64, device=device)
for precision, low, high in [
    ("ieee", 0, 1e-6), ("tf32", 1e-4, 1e-3), ("bf16", 1e-3, 5e-3)
]:  # fmt: skip
    out = torch.full_like(a, math.nan)
    modes = {"PRECISION": precision, "EMULATE": _interpreted()}
    product_alone[(1,)](a, b, out, SIDE=64, **modes)
    assert low < relative_error(out, a.double() @ b.double()) < high

# %% [markdown]
# ## Gates
# From $dt$ to step size, log decay and angle, for one chunk and head, in registers.
# Three things can go wrong in float32:
#
# - $\log(1 + e^{dt})$ is *zero* from $dt = -17$ down, because $1 + e^{dt}$ is 1. Where
#   $e^{dt}$ is small, four terms of the series are exact enough. (Just before they
#   take over, the logarithm has an absolute error of 1e-7, of a number of 1e-2.)
# - The angle reaches $30 \pi \approx 94$, and fifteen turns times a rounded $2\pi$ is
#   not exact. So $2\pi$ comes in two parts, the first with so few bits that its
#   multiples are exact (Cody and Waite). Each step's angle is reduced to half a turn
#   *before* angles are summed.
# - Steps past the end of the sequence must not decay or turn a state: their $\Delta$ is
#   0, their $dt$ is never read. The same holds for a reset.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _softplus(dt):
        """log(1 + exp(dt)), accurate also where it is tiny."""
        e = tl.exp(-tl.abs(dt))
        series = e * (1.0 - e * (1.0 / 2.0 - e * (1.0 / 3.0 - e * (1.0 / 4.0))))
        return tl.maximum(dt, 0.0) + tl.where(e < 1e-2, series, tl.log(1.0 + e))

    @triton.jit
    def _gates(
        dt_ptr, reset_ptr, A_ptr, h, at, here, W, HAS_RESET: tl.constexpr
    ):  # fmt: skip
        """dt, step size, log decay u + i v, and the number of resets up to each step.

        The angle v is within half a turn. Steps past the end, where `here` is false,
        neither decay nor turn, nor does the step of a reset: what it forgets is masked.
        """
        A_re = tl.load(A_ptr + 2 * h)
        A_im = tl.load(A_ptr + 2 * h + 1)
        dt = tl.load(dt_ptr + at * W, mask=here, other=0.0).to(tl.float32)
        delta = _softplus(dt)
        counts = here
        document = tl.zeros_like(at)
        if HAS_RESET:
            fresh = tl.load(reset_ptr + at, mask=here, other=0).to(tl.int32)
            document = tl.cumsum(fresh, 0)
            counts = here & (fresh == 0)
        delta = tl.where(counts, delta, 0.0)
        u, v = delta * A_re, delta * A_im
        # 2 pi in two parts, the first of few bits, so that turns times it is exact.
        turns = tl.floor(v * 0.15915494309189535 + 0.5)
        v = (v - turns * 6.28125) - turns * 0.0019353071795864769
        return dt, delta, u, v, document


# %% [markdown]
# The test has two heads with columns of a wider row, more steps than tokens, NaN after
# the end, and $dt$ all over $[-30, 30]$.


# %%
@triton.jit
def gates_alone(
    dt_ptr, reset_ptr, A_ptr, out_ptr, T, W, C: tl.constexpr, HAS_RESET: tl.constexpr
):
    h, step = tl.program_id(0), tl.arange(0, C)
    dt, delta, u, v, document = _gates(
        dt_ptr + h, reset_ptr, A_ptr, h, step, step < T, W, HAS_RESET
    )
    at = h * 5 * C + step
    tl.store(out_ptr + at, dt)
    tl.store(out_ptr + at + C, delta)
    tl.store(out_ptr + at + 2 * C, u)
    tl.store(out_ptr + at + 3 * C, v)
    tl.store(out_ptr + at + 4 * C, document.to(tl.float32))


T, C = 121, 128
A = torch.tensor([-0.01 + math.pi * 1j, -16 - 3j], device=device)
dt = torch.full((C, 3), math.nan, device=device)
dt[:T] = torch.linspace(-30, 30, T, device=device)[:, None]
reset = torch.zeros(C, dtype=torch.bool, device=device)
reset[[40, 41, 100, 125]] = True  # the last one lies past the end
for flagged in (False, True):
    out = torch.full((2, 5, C), math.nan, device=device)
    flags, A_pairs = reset.view(torch.uint8), torch.view_as_real(A)
    gates_alone[(2,)](dt, flags, A_pairs, out, T, 3, C=C, HAS_RESET=flagged)
    counts = torch.arange(C) < T
    if flagged:
        counts &= ~reset.cpu()
    raw, delta, u, v, document = out.double().cpu().unbind(1)
    exact = F.softplus(dt[:, :2].T.double().cpu(), threshold=40)[:, counts]
    rate = A.cpu().to(torch.complex128)[:, None]
    assert (exact * rate.imag).max() > 94, "radians"
    assert ((delta[:, counts] - exact).abs() < 2e-7 * (1 + exact)).all()
    assert (delta[:, counts] / exact - 1).abs().max() < 1e-4, "small steps too"
    assert relative_error(u[:, counts], exact * rate.real) < 1e-6
    turn = torch.exp(1j * exact * rate.imag)
    reached = torch.exp(1j * v[:, counts])
    assert (reached - turn).abs().max() < 2e-5 and v.abs().max() < math.pi + 1e-6
    assert (out[:, 1:4].cpu()[..., ~counts] == 0).all() and (raw[:, T:] == 0).all()
    wanted = (reset.cpu() & (torch.arange(C) < T)).cumsum(0) * flagged
    assert torch.equal(document, wanted.double().expand(2, -1))

# %% [markdown]
# ### What breaks: the obvious formulas
# In PyTorch, float32, on the same range. The logarithm loses small steps altogether.
# And with $2\pi$ in one part, the reduction adds an error as large as that of rounding
# 94 to float32; in two parts it adds next to nothing.

# %%
raw = torch.linspace(-30, 30, 10_001)
lost = torch.log(1 + torch.exp(raw)) == 0
assert lost[raw < -18].all() and not lost[raw > -15].any()

v = F.softplus(raw) * math.pi
turns = torch.floor(v / (2 * math.pi) + 0.5)
exact = v.double() - turns.double() * 2 * math.pi
one_part = v - turns * 6.2831855
two_parts = (v - turns * 6.28125) - turns * 0.0019353071795864769
error_one, error_two = ((z - exact).abs().max() for z in (one_part, two_parts))
print(f"the reduction adds {error_one:.0e} in one part, {error_two:.0e} in two")
assert error_one > 5 * error_two and error_two < 5e-7

# %% [markdown]
# ## Decay with documents
# $L$ of notebook 03, and three factors for states: from the chunk's entry to each step,
# from each step to the end, and all the way through. A pair of different documents
# is masked in the exponent, like the future.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _decay(U, document, BLOCK_C: tl.constexpr):
        """exp(U[l] - U[s]) for s <= l in one document, else 0."""
        step = tl.arange(0, BLOCK_C)
        seen = step[:, None] >= step[None, :]
        seen = seen & (document[:, None] == document[None, :])
        # Select before exp: above the diagonal the exponent is positive and overflows.
        return tl.exp(tl.where(seen, U[:, None] - U[None, :], float("-inf")))

    @triton.jit
    def _edges(U, document):
        """Decay from the chunk's entry to each step, to its end, and all through."""
        end = tl.arange(0, U.shape[0]) == U.shape[0] - 1
        U_last, last = tl.sum(tl.where(end, U, 0.0), 0), tl.max(document, 0)
        grown = tl.where(document == 0, tl.exp(U), 0.0)
        left = tl.where(document == last, tl.exp(U_last - U), 0.0)
        return grown, left, tl.where(last == 0, tl.exp(U_last), 0.0)


# %%
@triton.jit
def decay_alone(U_ptr, document_ptr, L_ptr, edges_ptr, C: tl.constexpr):
    step = tl.arange(0, C)
    U, document = tl.load(U_ptr + step), tl.load(document_ptr + step)
    L = _decay(U, document, C)
    grown, left, keep = _edges(U, document)
    tl.store(L_ptr + step[:, None] * C + step[None, :], L)
    tl.store(edges_ptr + step, grown)
    tl.store(edges_ptr + C + step, left)
    tl.store(edges_ptr + 2 * C, keep)


for rate in RATES.values():
    for starts in ([], [0], [5, 6, 40]):
        head = random_head(T=64, rate=rate, documents=False)
        head.reset[starts] = True
        _, _, _, _, L, entry, left = chunk_factors(*head[1:5], head.reset)
        U = -(rate * F.softplus(head.dt).masked_fill(head.reset, 0)).cumsum(0)
        document = head.reset.cumsum(0).int().to(device)
        got = torch.full((64, 64), math.nan, device=device)
        edges = torch.full((129,), math.nan, device=device)
        decay_alone[(1,)](U.float().to(device), document, got, edges, C=64)
        assert (got.cpu() - L).abs().max() < 2e-5 and (got.diagonal() == 1).all()
        assert (got.cpu()[L == 0] == 0).all(), "masked is exactly 0"
        wanted = torch.cat([entry.flatten(), left.flatten(), entry[-1]])
        assert (edges.cpu() - wanted).abs().max() < 2e-5
        assert (edges[128] == 0).item() == (bool(starts) or rate == 16)

# %% [markdown]
# ## Rotation in registers
# A complex tile lies in two halves, $HN$ columns apart: planar, so that each half is
# read in whole rows. `_turned` loads both and turns each row by a complex number of its
# own, and `_store_turned` is the way back for gradients. No rotated copy of $B$ or $C$
# is ever in memory.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _turned(ptr, width, at, here, turn_re, turn_im):
        """A complex tile, its halves `width` columns apart, times turn, row by row."""
        re = tl.load(ptr + at, mask=here[:, None], other=0.0).to(tl.float32)
        im = tl.load(ptr + width + at, mask=here[:, None], other=0.0).to(tl.float32)
        return _turn(re, im, turn_re, turn_im)

    @triton.jit
    def _store_turned(ptr, width, at, here, re, im, turn_re, turn_im):
        """The way back: (re + i im) times turn, stored as two halves."""
        kind = ptr.dtype.element_ty
        re, im = _turn(re, im, turn_re, turn_im)
        tl.store(ptr + at, re.to(kind), mask=here[:, None])
        tl.store(ptr + width + at, im.to(kind), mask=here[:, None])


# %%
@triton.jit
def turned_alone(
    z_ptr, out_ptr, V_ptr, T, W, C: tl.constexpr, N: tl.constexpr, BACK: tl.constexpr
):
    step = tl.arange(0, C)
    at, here = step[:, None] * W + tl.arange(0, N)[None, :], step < T
    V = tl.load(V_ptr + step)
    cos, sin = tl.cos(V), tl.sin(V)
    re, im = _turned(z_ptr, N, at, here, cos, sin)
    if BACK:
        _store_turned(out_ptr, N, at, here, re, im, cos, -sin)
    else:
        _store_turned(out_ptr, N, at, here, re, im, cos * 0 + 1, sin * 0)


T, C, N, W = 29, 32, 16, 40
V = torch.randn(C, device=device).cumsum(0)
for kind, bound in [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)]:
    z = torch.randn(C, W, device=device).to(kind)
    z[T:] = math.nan
    for back in (False, True):
        out = torch.full_like(z, 7)
        turned_alone[(1,)](z, out, V, T, W, C=C, N=N, BACK=back)
        z_exact = torch.complex(*z[:T, : 2 * N].double().cpu().chunk(2, -1))
        phase = torch.exp(1j * V[:T].double().cpu())[:, None]
        wanted = z_exact if back else z_exact * phase
        assert relative_error(unpair(out[:T, : 2 * N].double()), wanted) < bound
        assert (out[T:] == 7).all() and (out[:, 2 * N :] == 7).all(), "nothing else"

# %% [markdown]
# ## What a chunk adds
# The heart of the state kernel, forward and backward in one function. A state $S$ (a
# tile of $n$ and $d$) goes through a chunk:
#
# $$S \leftarrow e^{\Lambda} S + \sum_s e^{\Lambda - \Lambda_s} B_s x_s^\top ,
# \qquad \Lambda_t = U_t + i V_t , \quad \Lambda = \Lambda_{\text{last}} .$$
#
# The gradient of a state goes back through it, and that is the same sum with
# conjugates, as notebook 04 would have it:
#
# $$E \leftarrow e^{\bar \Lambda} E
# + \sum_l e^{\bar \Lambda_l} \, \bar C_l \, dy_l^\top .$$
#
# So `REVERSE` changes which columns are read ($C$ for $B$, $dy$ for $x$), which decay
# belongs to a row ($e^{U_l}$ from the entry for $e^{U_{\text{last}} - U_s}$ to the
# end), and two signs. The magnitude and the turn of a row are one complex number. The
# state is a sum in float32, `acc` of the dot; only the operands are rounded.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _chunk_sum(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, S_re, S_im, h, first, n, d, T, H, W,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        REVERSE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """The (n, d) tile of a state, carried through one chunk that adds to it.

        Forward, S becomes e^L S + sum_s e^(L - L_s) B_s x_s with L_s the summed log
        decay and L its total; in reverse, a gradient becomes
        e^conj(L) S + sum_l e^conj(L_l) conj(C_l) dy_l.
        Also returns L as two numbers.
        """
        step = tl.arange(0, BLOCK_C)
        here = first + step < T
        base = proj_ptr + first * W
        _, _, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + first, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        V, V_last = tl.cumsum(v, 0), tl.sum(v, 0)
        grown, left, keep = _edges(tl.cumsum(u, 0), document)
        if REVERSE:
            size, angle = grown, V
            column = H * (D + 2 * N) + h * N
            x_ptr = dy_ptr + first * H * D + step[:, None] * H * D
        else:
            size, angle = left, V_last - V
            column = H * D + h * N
            x_ptr = base + step[:, None] * W
        x = tl.load(x_ptr + h * D + d[None, :], mask=here[:, None], other=0.0)
        K_re, K_im = _turned(
            base + column, H * N, step[:, None] * W + n[None, :], here,
            size * tl.cos(angle), size * tl.sin(angle),
        )  # fmt: skip
        keep_re, keep_im = keep * tl.cos(V_last), keep * tl.sin(V_last)
        if REVERSE:
            K_im, keep_im = -K_im, -keep_im
        S_re, S_im = S_re * keep_re - S_im * keep_im, S_re * keep_im + S_im * keep_re
        x = _operand(x, PRECISION, EMULATE)
        K_re = tl.trans(_operand(K_re, PRECISION, EMULATE))
        K_im = tl.trans(_operand(K_im, PRECISION, EMULATE))
        S_re, S_im = _dot(K_re, x, S_re, PRECISION), _dot(K_im, x, S_im, PRECISION)
        return S_re, S_im, keep_re, keep_im


# %% [markdown]
# One program, one ragged chunk, the second of two heads, every combination of direction
# and reset, against the formulas of the first half. The tile is a part of the state: 16
# of 32 rows.


# %%
@triton.jit
def chunk_sum_alone(
    proj_ptr, A_ptr, reset_ptr, dy_ptr, S_ptr, first, T, H, W,
    D: tl.constexpr, N: tl.constexpr, C: tl.constexpr, PART: tl.constexpr,
    REVERSE: tl.constexpr, HAS_RESET: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    n, d = N - PART + tl.arange(0, PART), tl.arange(0, D)
    at = S_ptr + n[:, None] * D + d[None, :]
    S_re, S_im, _, _ = _chunk_sum(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, tl.load(at), tl.load(at + N * D), 1,
        first, n, d, T, H, W, D, N, C, REVERSE, HAS_RESET, "ieee", EMULATE,
    )  # fmt: skip
    tl.store(at, S_re)
    tl.store(at + N * D, S_im)


T, H, D, N, C = 29, 2, 16, 32, 16
proj, A, initial, reset = random_inputs(B=1, T=T, H=H, D=D, N=N)
reset[0, 20] = True
dy = torch.randn(1, T, H, D, device=device)
rest = slice(16, T)  # the second chunk alone, 13 steps of it
for flagged in (False, True):
    flags = reset & flagged
    own = dict(heads_of(proj, A, initial, flags, D, N))[0, 1]
    head = Head(*(z[rest] if len(z.shape) and len(z) == T else z for z in own))
    G = head.G
    dy_head = dy[0, rest, 1].double().cpu()
    for reverse in (False, True):
        state = planes(pair(G)).float().contiguous().to(device)
        before = state.clone()
        chunk_sum_alone[(1,)](
            proj, torch.view_as_real(A), flags.view(torch.uint8), dy, state, 16, T, H,
            proj.shape[2], D=D, N=N, C=C, PART=16, REVERSE=reverse, HAS_RESET=flagged,
            EMULATE=_interpreted(),
        )  # fmt: skip
        if reverse:
            wanted = scan_backward(head, C, dy_head, pair(G))[1][0]
        else:
            wanted = scan_forward(head, C)[1][-1]
        assert relative_error(state[:, 16:], planes(wanted)[:, 16:]) < 5e-6
        assert torch.equal(state[:, :16], before[:, :16]), "the other part of the tile"

# %% [markdown]
# ## States between chunks
# There are two ways from one chunk to the next.
#
# - **Walk**: one program takes all chunks of a sequence and head in turn and keeps its
#   tile of the state in registers. It writes what enters each chunk, once. But $T / C$
#   steps follow each other, and there are only as many programs as tiles.
# - **Parallel**: one program per chunk writes what the chunk adds to a state of zero,
#   and the factor that it keeps. A second, light kernel passes the states along: one
#   complex multiply-add per number and chunk.
#
# Both call `_chunk_sum`, and `WALK` decides when compiling. The state is stored
# *before* the chunk is added: what *enters* it. In reverse the last chunk comes first,
# and what is stored is the gradient of the state that *leaves*.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _states_kernel(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, edge_ptr, states_ptr, keep_ptr, out_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WALK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """States of one (batch, head), a (BLOCK_N, BLOCK_D) tile of them a program.

        WALK: one program takes all chunks in turn, from `edge` on; it stores the state
        that enters each, and the last one in `out`. Otherwise a program takes one
        chunk and stores what it adds to a zero state, and the factor by which it
        multiplies one; `_pass_kernel` does the rest. REVERSE: gradients, from the last
        chunk back.
        """
        parts: tl.constexpr = (D // BLOCK_D) * (N // BLOCK_N)
        # One axis for all: the second one of a grid ends at 65,535.
        start, stop, program = 0, n_chunks, tl.program_id(0)
        if not WALK:
            start = program % n_chunks
            stop, program = start + 1, program // n_chunks
        part, sequence = program % parts, program // parts
        b, h = sequence // H, sequence % H
        d = part % (D // BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
        n = part // (D // BLOCK_D) * BLOCK_N + tl.arange(0, BLOCK_N)
        proj_ptr += b.to(tl.int64) * T * W
        reset_ptr += b.to(tl.int64) * T
        dy_ptr += b.to(tl.int64) * T * H * D
        at_edge = sequence.to(tl.int64) * D * N * 2
        at_edge += (d[None, :] * N + n[:, None]) * 2
        tile = n[:, None] * D + d[None, :]
        S_re = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        S_im = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        if WALK and HAS_EDGE:
            S_re = tl.load(edge_ptr + at_edge)
            S_im = tl.load(edge_ptr + at_edge + 1)
        kind = states_ptr.dtype.element_ty
        for i in range(start, stop):
            chunk = i
            if WALK and REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            if WALK:
                tl.store(states_ptr + index * 2 * N * D + tile, S_re.to(kind))
                tl.store(states_ptr + (index * 2 + 1) * N * D + tile, S_im.to(kind))
            S_re, S_im, keep_re, keep_im = _chunk_sum(
                proj_ptr, A_ptr, reset_ptr, dy_ptr, S_re, S_im, h,
                chunk.to(tl.int64) * BLOCK_C, n, d, T, H, W,
                D, N, BLOCK_C, REVERSE, HAS_RESET, PRECISION, EMULATE,
            )  # fmt: skip
            if not WALK:
                tl.store(states_ptr + index * 2 * N * D + tile, S_re)
                tl.store(states_ptr + (index * 2 + 1) * N * D + tile, S_im)
                tl.store(keep_ptr + 2 * index, keep_re)
                tl.store(keep_ptr + 2 * index + 1, keep_im)
        if WALK:
            tl.store(out_ptr + at_edge, S_re)
            tl.store(out_ptr + at_edge + 1, S_im)

    @triton.jit
    def _pass_kernel(
        added_ptr, keep_ptr, edge_ptr, states_ptr, out_ptr, H, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr,
    ):  # fmt: skip
        """What enters each chunk, from what each chunk adds and keeps.

        Grid (B H, D N / BLOCK): a program passes BLOCK numbers of a state along.
        """
        sequence = tl.program_id(0)
        b, h = sequence // H, sequence % H
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # n D + d
        at_edge = sequence.to(tl.int64) * D * N * 2 + (at % D * N + at // D) * 2
        S_re = tl.zeros((BLOCK,), tl.float32)
        S_im = tl.zeros((BLOCK,), tl.float32)
        if HAS_EDGE:
            S_re = tl.load(edge_ptr + at_edge)
            S_im = tl.load(edge_ptr + at_edge + 1)
        kind = states_ptr.dtype.element_ty
        for i in range(0, n_chunks):
            chunk = i
            if REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            keep_re = tl.load(keep_ptr + 2 * index)
            keep_im = tl.load(keep_ptr + 2 * index + 1)
            at_re = index * 2 * N * D + at
            tl.store(states_ptr + at_re, S_re.to(kind))
            tl.store(states_ptr + at_re + N * D, S_im.to(kind))
            add_re = tl.load(added_ptr + at_re)
            add_im = tl.load(added_ptr + at_re + N * D)
            S_re, S_im = (
                S_re * keep_re - S_im * keep_im + add_re,
                S_re * keep_im + S_im * keep_re + add_im,
            )
        tl.store(out_ptr + at_edge, S_re)
        tl.store(out_ptr + at_edge + 1, S_im)


# %% [markdown]
# ## The launch table
# Every number that tunes a launch is here: sizes of tiles, warps, stages of the
# pipeline, by kernel and precision, and the number of sequences times heads from which
# on walking is chosen. More precision takes more registers, so the tiles are smaller.

# %% tags=["export"]
# (BLOCK_D, BLOCK_N, warps, stages) of a kernel, by precision; a block is cut to what it
# is a part of. States of one sequence and head are walked in one program when there are
# enough of those to fill the device, and computed chunk by chunk when there are not.
_LAUNCH = {
    "states": {"bf16": (64, 32, 4, 2), "tf32": (64, 32, 4, 2), "ieee": (32, 16, 8, 1)},
    "output": {"bf16": (0, 64, 4, 1), "tf32": (0, 32, 4, 1), "ieee": (0, 16, 8, 1)},
    "backward": {"bf16": (0, 16, 4, 1), "tf32": (0, 16, 4, 1), "ieee": (0, 16, 8, 1)},
}
_WALK_FROM = 96  # sequences times heads
_PASS_BLOCK = 256


def _launch(kernel: str, precision: str, D: int, N: int) -> dict[str, int]:
    """Block sizes and launch parameters of a kernel."""
    block_d, block_n, warps, stages = _LAUNCH[kernel][precision]
    blocks = {"BLOCK_D": min(block_d, D)} if block_d else {}
    return {
        **blocks,
        "BLOCK_N": min(block_n, N),
        "num_warps": warps,
        "num_stages": stages,
    }


def _modes(precision: str, reset: Tensor | None) -> dict[str, object]:
    """What every kernel is compiled for."""
    return {
        "PRECISION": precision,
        "EMULATE": _interpreted(),
        "HAS_RESET": reset is not None,
    }


# %% [markdown]
# ## Walk or pass
# The host side of both directions: allocate, choose, launch. `edge` is what stands at
# the border: the initial state, or the gradient of the final one. And `copy` and carry
# are two things: in bf16 mode `states`, which outputs and gradients read, is bfloat16,
# but what is carried from chunk to chunk never is.


# %% tags=["export"]
@contextmanager
def _launching(proj: Tensor, D: int, N: int, chunk_size: int):
    """Launch on the device of proj; a tile that it cannot hold is KernelUnavailable."""
    try:
        with torch.cuda.device_of(proj):
            yield
    except triton.OutOfResources as error:
        raise KernelUnavailable(
            f"ssd_fused: head_dim={D}, state_dim={N}, chunk_size={chunk_size} do not "
            f"fit this GPU ({error}). Use ssd_dispatch='pytorch' for this config."
        ) from error


def _states(proj, A, reset, edge, dy, D, N, chunk_size, precision, reverse):
    """The state entering every chunk and the last one; or, reversed, their gradients.

    Args: edge: the initial state, or the gradient of the final one, (B, H, D, N).
    dy: for the reverse.

    Returns: (B, nc, H, 2, N, D), bfloat16 in bf16 mode, and float32 (B, H, D, N, 2).
    """
    batch, time, width = proj.shape
    H, n_chunks = A.shape[0], -(-time // chunk_size)
    options = _launch("states", precision, D, N)
    parts = D // options["BLOCK_D"] * (N // options["BLOCK_N"])
    walk = batch * H >= _WALK_FROM or n_chunks == 1
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    states = proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind)
    out = proj.new_empty(batch, H, D, N, 2, dtype=torch.float32)
    added, keep = states, out
    if not walk:
        added = proj.new_empty(states.shape, dtype=torch.float32)
        keep = proj.new_empty(batch, n_chunks, H, 2, dtype=torch.float32)
    edge_ptr = out if edge is None else torch.view_as_real(edge.contiguous())
    _states_kernel[(batch * H * parts * (1 if walk else n_chunks),)](
        proj, torch.view_as_real(A), proj if reset is None else reset,
        proj if dy is None else dy, edge_ptr, added, keep, out,
        time, H, width, n_chunks, D=D, N=N, BLOCK_C=chunk_size, WALK=walk,
        REVERSE=reverse, HAS_EDGE=edge is not None, **_modes(precision, reset),
        **options,
    )  # fmt: skip
    if not walk:
        block = min(_PASS_BLOCK, D * N)
        _pass_kernel[(batch * H, D * N // block)](
            added, keep, edge_ptr, states, out, H, n_chunks, D=D, N=N, BLOCK=block,
            REVERSE=reverse, HAS_EDGE=edge is not None,
        )  # fmt: skip
    return states, out


# %% [markdown]
# The test runs both ways in both directions, in all chunks of all sequences and heads,
# from fresh memory, against the first half. Two more properties: both ways give the
# same, and the bytes that the table above derived are those of the tensor.


# %%
def all_states(direction, inputs, D, N, C, dy, edge):
    """The truth for `_states`: (B, nc, H, 2, N, D), and the last, (B, H, D, N)."""
    batch, heads = inputs[0].shape[0], len(inputs[1])
    chunks, last = {}, {}
    for (b, h), head in heads_of(*inputs, D, N):
        if direction == "forward":
            states = scan_forward(head, C)[1]
            last[b, h], states = unpair(states[-1]), states[:-1]
        else:
            dy_head, E = dy[b, :, h].double().cpu(), pair(edge[b, h].cpu()).double()
            states = scan_backward(head, C, dy_head, E)[1]
            last[b, h], states = unpair(states[0]), states[1:]
        chunks[b, h] = torch.stack([planes(z) for z in states])
    stacked = torch.stack([z for z in chunks.values()]).unflatten(0, (batch, heads))
    final = torch.stack([z for z in last.values()]).unflatten(0, (batch, heads))
    return stacked.transpose(1, 2), final


T, D, N, C = 45, 16, 32, 16
ALWAYS, NEVER = {"_WALK_FROM": 0}, {"_WALK_FROM": 10**9}
inputs = proj, A, initial, reset = random_inputs(B=2, T=T, H=2, D=D, N=N)
dy = torch.randn(2, T, 2, D, device=device)
edge = torch.randn_like(initial)
flags = reset.view(torch.uint8)
for direction, border in (("forward", initial), ("reverse", edge)):
    wanted = all_states(direction, inputs, D, N, C, dy, edge)
    reverse = direction == "reverse"
    arguments = proj, A, flags, border, dy, D, N, C
    for precision, bound in (("ieee", 5e-6), ("tf32", 1e-3), ("bf16", 6e-3)):
        results = []
        for names in (ALWAYS, NEVER):
            got, last = with_names(_states, *arguments, precision, reverse, **names)
            last = torch.view_as_complex(last)
            assert relative_error(got, wanted[0]) < bound, (direction, precision)
            assert relative_error(last, wanted[1]) < bound, (direction, precision)
            results.append((got, last))
        (walked, last), (passed, last_passed) = results
        assert relative_error(last, last_passed) < 1e-6
        width = 2 if precision == "bf16" else 4
        assert walked.nbytes == width * 2 * 3 * 2 * (2 * N * D), "B nc H states"
print("walked and passed states agree, forward and in reverse")

# %% [markdown]
# ## The outputs
# One program per chunk and head:
# $Y = ((q k^\top) \odot L) X + e \odot (q\, G^\top)$. The sum over the state is cut
# into blocks of $n$; each block of $q$ and $k$ is turned in registers, used for the
# scores *and* for the states, and forgotten. Everything is in the frame of the rotated
# state, so there is no rotation after the products.
#
# Programs with neighboring numbers run at the same time. Heads are the fastest index,
# because heads are neighbors in a row of columns: together they read whole rows.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _keys_queries(
        base, H, W, h, n, here, cos, sin, D: tl.constexpr, N: tl.constexpr,
        BLOCK_C: tl.constexpr,
    ):  # fmt: skip
        """k = (Re, Im) of e^(-iV) B, q = (Re, -Im) of e^(iV) C; columns n of each."""
        at = tl.arange(0, BLOCK_C)[:, None] * W + h * N + n[None, :]
        k_re, k_im = _turned(base + H * D, H * N, at, here, cos, -sin)
        q_re, q_im = _turned(base + H * (D + 2 * N), H * N, at, here, cos, sin)
        return k_re, k_im, q_re, -q_im

    @triton.jit
    def _add_scores(
        M, k_re, k_im, q_re, q_im, PRECISION: tl.constexpr, EMULATE: tl.constexpr
    ):
        """M + q k^T, one real product of vectors twice as long."""
        q_re, k_re = (
            _operand(q_re, PRECISION, EMULATE),
            _operand(k_re, PRECISION, EMULATE),
        )
        q_im, k_im = (
            _operand(q_im, PRECISION, EMULATE),
            _operand(k_im, PRECISION, EMULATE),
        )
        M = _dot(q_re, tl.trans(k_re), M, PRECISION)
        return _dot(q_im, tl.trans(k_im), M, PRECISION)

    @triton.jit
    def _output_kernel(
        proj_ptr, A_ptr, reset_ptr, states_ptr, y_ptr, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """y of one chunk and head: from its own tokens, and from the entering state.

        Grid (B nc H), heads fastest: neighbors read neighboring columns of one row.
        """
        h, chunk = tl.program_id(0) % H, tl.program_id(0) // H
        b = chunk // n_chunks
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = first + step < T
        token = b.to(tl.int64) * T + first
        base = proj_ptr + token * W
        _, _, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + token, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        U, V = tl.cumsum(u, 0), tl.cumsum(v, 0)
        cos, sin = tl.cos(V), tl.sin(V)
        G_ptr = states_ptr + (chunk.to(tl.int64) * H + h) * 2 * N * D
        Y = tl.zeros((BLOCK_C, D), tl.float32)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n, here, cos, sin, D, N, BLOCK_C
            )
            M = _add_scores(M, k_re, k_im, q_re, q_im, PRECISION, EMULATE)
            G_re = tl.load(G_ptr + n[:, None] * D + d[None, :])
            G_im = tl.load(G_ptr + N * D + n[:, None] * D + d[None, :])
            q_re, G_re = (
                _operand(q_re, PRECISION, EMULATE),
                _operand(G_re, PRECISION, EMULATE),
            )
            q_im, G_im = (
                _operand(q_im, PRECISION, EMULATE),
                _operand(G_im, PRECISION, EMULATE),
            )
            Y = _dot(q_im, G_im, _dot(q_re, G_re, Y, PRECISION), PRECISION)
        x_at = step[:, None] * W + h * D + d[None, :]
        x = tl.load(base + x_at, mask=here[:, None], other=0.0)
        P = _operand(M * _decay(U, document, BLOCK_C), PRECISION, EMULATE)
        Y = Y * _edges(U, document)[0][:, None]
        Y = _dot(P, _operand(x, PRECISION, EMULATE), Y, PRECISION)
        y_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        tl.store(y_ptr + y_at, Y.to(y_ptr.dtype.element_ty), mask=here[:, None])


# %% [markdown]
# Tested alone: it gets the states from the first half, so an error here is an error of
# this kernel. The output starts as NaN, and a fence around it shows writes outside.

# %%
T, D, N, C = 45, 16, 32, 16
inputs = proj, A, initial, reset = random_inputs(B=2, T=T, H=2, D=D, N=N)
for flagged in (False, True):
    flags = reset if flagged else torch.zeros_like(reset)
    inputs = proj, A, initial, flags
    states = all_states("forward", inputs, D, N, C, None, None)[0]
    fenced = torch.full((2 * T * 2 * D + 200,), math.nan, device=device)
    y = fenced[100:-100].view(2, T, 2, D)
    options = _modes("ieee", flags if flagged else None)
    options |= _launch("output", "ieee", D, N)
    _output_kernel[(2 * 3 * 2,)](
        proj, torch.view_as_real(A), flags.view(torch.uint8),
        states.float().contiguous().to(device), y, T, 2, proj.shape[2], 3,
        D=D, N=N, BLOCK_C=C, **options,
    )  # fmt: skip
    assert fenced[:100].isnan().all() and fenced[-100:].isnan().all()
    for (b, h), head in heads_of(*inputs, D, N):
        assert relative_error(y[b, :, h], scan_forward(head, C)[0]) < 5e-6

# %% [markdown]
# ## The gradients
# The first half again, line by line, for one chunk and head; $E$ and $G$ are read, all
# else is computed from the columns. In the order of the kernel:
#
# 1. gates, $X$, $dY$; the scores $M$, block by block of $n$; $L$; $dM = (dY X^\top)
#    \odot L$; the part of $dX$ inside the chunk.
# 2. Once more over blocks of $n$: $dq$ from $dM$ and $G$, stored as $dC$; $\tilde E$,
#    turned back in registers; $dk$ from $\tilde E$ and $dM$, stored as $dB$; what $dU$
#    and $dV$ get from both, row by row.
# 3. $dX$; the reverse sums; $ddt$; the chunk's share of $dA$.
#
# The term of the last position needs $G'$, which this program has not read. It has the
# two things that $G'$ is made of: what entered, decayed, and what the keys added.
# Inner products with $\tilde E$ of both are what `dU_last` and `dV_last` collect:
#
# $$\langle E, G' \rangle = e_{\text{last}} \langle \tilde E, G \rangle
# + \sum_s \langle w_s \tilde E^\top x_s, k_s \rangle .$$
#
# The first part of $dk$ is exactly that last bracket.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _total(z):
        """The sum of a tile."""
        return tl.sum(tl.sum(z, 1), 0)

    @triton.jit
    def _backward_kernel(
        proj_ptr, A_ptr, reset_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr, dA_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Every gradient of one chunk and head, columns of dproj and a share of dA.

        From dy, the state G that entered the chunk and the gradient E of the state that
        left it. Grid (B nc H), heads fastest.
        """
        h, chunk = tl.program_id(0) % H, tl.program_id(0) // H
        b = chunk // n_chunks
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = first + step < T
        token = b.to(tl.int64) * T + first
        base, dbase = proj_ptr + token * W, dproj_ptr + token * W
        dt, delta, u, v, document = _gates(
            base + H * (D + 4 * N) + h, reset_ptr + token, A_ptr, h, step, here, W,
            HAS_RESET,
        )  # fmt: skip
        U, V = tl.cumsum(u, 0), tl.cumsum(v, 0)
        cos, sin = tl.cos(V), tl.sin(V)
        V_last = tl.sum(v, 0)
        cos_last, sin_last = tl.cos(V_last), tl.sin(V_last)
        grown, left, keep = _edges(U, document)
        grown, left = grown[:, None], left[:, None]

        x_at = step[:, None] * W + h * D + d[None, :]
        x = tl.load(base + x_at, mask=here[:, None], other=0.0)
        x = _operand(x, PRECISION, EMULATE)
        y_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        dy = tl.load(dy_ptr + y_at, mask=here[:, None], other=0.0)
        dy = _operand(dy, PRECISION, EMULATE)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dM = _dot(dy, tl.trans(x), M, PRECISION)
        for n0 in range(0, N, BLOCK_N):
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n0 + tl.arange(0, BLOCK_N), here, cos, sin, D, N, BLOCK_C
            )
            M = _add_scores(M, k_re, k_im, q_re, q_im, PRECISION, EMULATE)
        L = _decay(U, document, BLOCK_C)
        dM = _operand(dM * L, PRECISION, EMULATE)
        P = tl.trans(_operand(M * L, PRECISION, EMULATE))
        dx = _dot(P, dy, tl.zeros((BLOCK_C, D), tl.float32), PRECISION)

        dU = tl.zeros((BLOCK_C,), tl.float32)
        dV = tl.zeros((BLOCK_C,), tl.float32)
        dU_last, dV_last = 0.0, 0.0
        zero = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
        state_at = (chunk.to(tl.int64) * H + h) * 2 * N * D
        for n0 in range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            k_re, k_im, q_re, q_im = _keys_queries(
                base, H, W, h, n, here, cos, sin, D, N, BLOCK_C
            )
            at = step[:, None] * W + h * N + n[None, :]
            tile = state_at + n[:, None] * D + d[None, :]
            # What the outputs say about the queries.
            G_re = tl.load(states_ptr + tile).to(tl.float32)
            G_im = tl.load(states_ptr + tile + N * D).to(tl.float32)
            dq_re = tl.trans(_operand(G_re, PRECISION, EMULATE))
            dq_im = tl.trans(_operand(G_im, PRECISION, EMULATE))
            dq_re = _dot(dy, dq_re, zero, PRECISION) * grown
            dq_im = _dot(dy, dq_im, zero, PRECISION) * grown
            dq_re = _dot(dM, _operand(k_re, PRECISION, EMULATE), dq_re, PRECISION)
            dq_im = _dot(dM, _operand(k_im, PRECISION, EMULATE), dq_im, PRECISION)
            dU += tl.sum(dq_re * q_re + dq_im * q_im, 1)
            dV += tl.sum(dq_re * q_im - dq_im * q_re, 1)
            _store_turned(
                dbase + H * (D + 2 * N), H * N, at, here, dq_re, -dq_im, cos, -sin
            )
            # The state that left: what of it entered, and what the keys added.
            E_re = tl.load(dstates_ptr + tile).to(tl.float32)
            E_im = tl.load(dstates_ptr + tile + N * D).to(tl.float32)
            E_re, E_im = (
                E_re * cos_last + E_im * sin_last,
                E_im * cos_last - E_re * sin_last,
            )
            dU_last += keep * _total(E_re * G_re + E_im * G_im)
            dV_last += keep * _total(E_im * G_re - E_re * G_im)
            E_re, E_im = (
                _operand(E_re, PRECISION, EMULATE),
                _operand(E_im, PRECISION, EMULATE),
            )
            dx = _dot(_operand(k_re * left, PRECISION, EMULATE), E_re, dx, PRECISION)
            dx = _dot(_operand(k_im * left, PRECISION, EMULATE), E_im, dx, PRECISION)
            dk_re = _dot(x, tl.trans(E_re), zero, PRECISION) * left
            dk_im = _dot(x, tl.trans(E_im), zero, PRECISION) * left
            dU_last += _total(dk_re * k_re + dk_im * k_im)
            dV_last += _total(dk_im * k_re - dk_re * k_im)
            q_re, q_im = (
                _operand(q_re, PRECISION, EMULATE),
                _operand(q_im, PRECISION, EMULATE),
            )
            dk_re = _dot(tl.trans(dM), q_re, dk_re, PRECISION)
            dk_im = _dot(tl.trans(dM), q_im, dk_im, PRECISION)
            dU -= tl.sum(dk_re * k_re + dk_im * k_im, 1)
            dV += tl.sum(dk_re * k_im - dk_im * k_re, 1)
            _store_turned(dbase + H * D, H * N, at, here, dk_re, dk_im, cos, sin)
        kind = dproj_ptr.dtype.element_ty
        tl.store(dbase + x_at, dx.to(kind), mask=here[:, None])

        # The total is the last sum; and a step is part of every later sum of its chunk.
        dU += tl.where(step == BLOCK_C - 1, dU_last, 0.0)
        dV += tl.where(step == BLOCK_C - 1, dV_last, 0.0)
        du = tl.sum(dU, 0) - tl.cumsum(dU, 0) + dU
        dv = tl.sum(dV, 0) - tl.cumsum(dV, 0) + dV
        ddt = du * tl.load(A_ptr + 2 * h) + dv * tl.load(A_ptr + 2 * h + 1)
        # delta is 0 at a reset and past the end: there, no gradient either.
        ddt = tl.where(delta == 0.0, 0.0, ddt * tl.sigmoid(dt))
        tl.store(dbase + H * (D + 4 * N) + h + step * W, ddt.to(kind), mask=here)
        share = tl.program_id(0).to(tl.int64) * 2
        tl.store(dA_ptr + share, tl.sum(delta * du, 0))
        tl.store(dA_ptr + share + 1, tl.sum(delta * dv, 0))


# %% [markdown]
# Alone again, with states and their gradients from the first half. Every column of the
# gradient is written, and no more.

# %%
H = 2
dy, edge = torch.randn(2, T, H, D, device=device), torch.randn_like(initial)
for flagged in (False, True):
    flags = reset if flagged else torch.zeros_like(reset)
    inputs = proj, A, initial, flags
    both_ways = [
        all_states(way, inputs, D, N, C, dy, edge)[0].float().contiguous().to(device)
        for way in ("forward", "reverse")
    ]
    fenced = torch.full((proj.numel() + 200,), math.nan, device=device)
    dproj = fenced[100:-100].view(proj.shape)
    shares = torch.full((2 * 3, H, 2), math.nan, device=device)
    options = _modes("ieee", flags if flagged else None)
    options |= _launch("backward", "ieee", D, N)
    _backward_kernel[(2 * 3 * H,)](
        proj, torch.view_as_real(A), flags.view(torch.uint8), *both_ways, dy, dproj,
        shares, T, H, proj.shape[2], 3, D=D, N=N, BLOCK_C=C, **options,
    )  # fmt: skip
    assert fenced[:100].isnan().all() and fenced[-100:].isnan().all()
    dx, dB_re, dB_im, dC_re, dC_im, ddt = cut_columns(dproj, H, D, N)
    dB, dC = torch.complex(dB_re, dB_im), torch.complex(dC_re, dC_im)
    dA_wanted = torch.zeros(H, dtype=torch.complex128)
    for (b, h), head in heads_of(*inputs, D, N):
        E = pair(edge[b, h].cpu()).double()
        wanted, _ = scan_backward(head, C, dy[b, :, h].double().cpu(), E)
        got = (z[b, :, h] for z in (dx, dB, dC, ddt))
        for mine, theirs in zip(got, (wanted[0], *wanted[2:5]), strict=True):
            assert relative_error(mine, theirs) < 1e-5
        dA_wanted[h] += wanted[1]
    assert relative_error(torch.view_as_complex(shares.sum(0)), dA_wanted) < 1e-5

# %% [markdown]
# ## Two operators
# Autograd, `torch.compile`, checkpointing and autocast all look at *operators*. A
# Python function that launches kernels is a wall for them; notebook 05 had to declare
# its call off limits. `torch.library.custom_op` makes an operator of it: a schema, what
# it computes, and a **fake** version that knows shapes and types alone, from which a
# compiler plans.
#
# The operator returns three things: $y$, the final states, and the states that enter
# each chunk, which only the backward reads. An output may not be a view of an input,
# and no input is changed.


# %% tags=["export"]
@torch.library.custom_op(
    "mamba3lite::ssd_fused",
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? initial_states, Tensor? reset, int head_dim, "
        "int state_dim, int chunk_size, str precision) -> (Tensor, Tensor, Tensor)"
    ),
)
def _ssd_fused(
    proj, A, initial_states, reset, head_dim, state_dim, chunk_size, precision
):
    """y, the final states, and the states entering each chunk, which backward reads."""
    batch, time, width = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    proj, A = proj.contiguous(), A.contiguous()
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    y = proj.new_empty(batch, time, H, D)
    with _launching(proj, D, N, chunk_size):
        states, final = _states(
            proj, A, flags, initial_states, None, D, N, chunk_size, precision, False
        )
        _output_kernel[(states.shape[1] * batch * H,)](
            proj, torch.view_as_real(A), proj if reset is None else flags, states, y,
            time, H, width, states.shape[1], D=D, N=N, BLOCK_C=chunk_size,
            **_modes(precision, reset), **_launch("output", precision, D, N),
        )  # fmt: skip
    return y, torch.view_as_complex(final), states


@_ssd_fused.register_fake
def _fake_ssd_fused(
    proj, A, initial_states, reset, head_dim, state_dim, chunk_size, precision
):
    batch, time, _ = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    n_chunks = -(-time // chunk_size)
    return (
        proj.new_empty(batch, time, H, D),
        A.new_empty(batch, H, D, N),
        proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind),
    )


# %% [markdown]
# The backward is an operator of its own, so that a compiler can plan it too. It writes
# *one* gradient with the layout of the columns, which goes straight into the backward
# of the projection. $dA$ has one share per chunk, summed in a fixed order: adding from
# many programs at once, with atomics, would be a different sum each time.


# %% tags=["export"]
@torch.library.custom_op(
    "mamba3lite::ssd_fused_backward",
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? reset, Tensor states, Tensor dy, "
        "Tensor? dfinal, int head_dim, int state_dim, int chunk_size, str precision) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)
def _ssd_fused_backward(
    proj, A, reset, states, dy, dfinal, head_dim, state_dim, chunk_size, precision
):
    """Gradients of proj, A and the initial states."""
    time, width = proj.shape[1:]
    D, N, H = head_dim, state_dim, A.shape[0]
    batch, n_chunks = states.shape[:2]
    proj, A, dy = proj.contiguous(), A.contiguous(), dy.contiguous()
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    dproj = torch.empty_like(proj)
    shares = proj.new_empty(batch * n_chunks, H, 2, dtype=torch.float32)
    with _launching(proj, D, N, chunk_size):
        dstates, dinitial = _states(
            proj, A, flags, dfinal, dy, D, N, chunk_size, precision, True
        )
        _backward_kernel[(batch * n_chunks * H,)](
            proj, torch.view_as_real(A), proj if reset is None else flags, states,
            dstates, dy, dproj, shares, time, H, width, n_chunks, D=D, N=N,
            BLOCK_C=chunk_size, **_modes(precision, reset),
            **_launch("backward", precision, D, N),
        )  # fmt: skip
    return dproj, torch.view_as_complex(shares.sum(0)), torch.view_as_complex(dinitial)


@_ssd_fused_backward.register_fake
def _fake_ssd_fused_backward(
    proj, A, reset, states, dy, dfinal, head_dim, state_dim, chunk_size, precision
):
    shape = proj.shape[0], A.shape[0], head_dim, state_dim
    return proj.new_empty(proj.shape), A.new_empty(A.shape), A.new_empty(shape)


# %% [markdown]
# And their connection. Without `set_materialize_grads(False)` an unused final state
# would cost a tensor of zeros, and its pass.


# %% tags=["export"]
def _save(ctx, inputs, output):
    proj, A, initial_states, reset, *ctx.sizes = inputs
    ctx.has_initial = initial_states is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(proj, A, reset, output[2])


def _differentiate(ctx, dy, dfinal, _dstates):
    proj, A, reset, states = ctx.saved_tensors
    if dy is None:
        dy = proj.new_zeros(*proj.shape[:2], A.shape[0], ctx.sizes[0])
    dproj, dA, dinitial = _ssd_fused_backward(
        proj, A, reset, states, dy, dfinal, *ctx.sizes
    )
    return dproj, dA, dinitial if ctx.has_initial else None, *[None] * 5


_ssd_fused.register_autograd(_differentiate, setup_context=_save)


# %% [markdown]
# ## What it refuses
# Tiles are powers of two from 16, the smallest side of a dot, to 128. What does not fit
# is refused with a `KernelUnavailable`, and a block that asked for the kernel takes the
# PyTorch path. Wrong arguments are errors as everywhere: the name, what was got, what
# is wanted.

# %% tags=["export"]
_SIDES = (16, 32, 64, 128)


def _check_fused_dims(head_dim: int, state_dim: int, chunk_size: int) -> None:
    """Refuse tiles that the kernels are not made for.

    Raises: KernelUnavailable, a ValueError, naming the dimension.
    """
    sides = {"head_dim": head_dim, "state_dim": state_dim, "chunk_size": chunk_size}
    for name, side in sides.items():
        if side not in _SIDES:
            raise KernelUnavailable(
                f"ssd_fused: {name}={side}; the kernels take "
                f"{', '.join(map(str, _SIDES))}. "
                "Use ssd_dispatch='pytorch' for this config."
            )


def _check_proj(proj, A, n_heads, head_dim, state_dim, initial_states, reset) -> None:
    """Refuse dtypes, shapes and devices that do not fit each other.

    Raises: TypeError, ValueError, naming the argument.
    """
    if proj.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"ssd_fused: proj is {proj.dtype}; wanted float32, bfloat16 or float16"
        )
    columns = n_heads * (head_dim + 4 * state_dim + 1)
    if proj.ndim != 3 or proj.shape[2] != columns or proj.shape[1] == 0:
        raise ValueError(
            f"ssd_fused: proj has shape {tuple(proj.shape)}; wanted (B, T, {columns}) "
            f"with T at least 1, for n_heads={n_heads}, head_dim={head_dim}, "
            f"state_dim={state_dim}"
        )
    batch, time, _ = proj.shape
    wanted = {
        "A": (A, torch.complex64, (n_heads,)),
        "initial_states": (
            initial_states, torch.complex64, (batch, n_heads, head_dim, state_dim)
        ),
        "reset": (reset, torch.bool, (batch, time)),
    }  # fmt: skip
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"ssd_fused: {name} is {tensor.dtype}; wanted {dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"ssd_fused: {name} has shape {tuple(tensor.shape)}; wanted {shape}"
            )
        if tensor.device != proj.device:
            raise ValueError(
                f"ssd_fused: {name} is on {tensor.device} but proj is on {proj.device}"
            )


# %% [markdown]
# ## The whole function


# %% tags=["export"]
def ssd_fused(
    proj: Float[Tensor, "B T columns"],
    A: Complex[Tensor, "H"],
    *,
    n_heads: int,
    head_dim: int,
    state_dim: int,
    chunk_size: int = 64,
    precision: str | None = "tf32",
    initial_states: Complex[Tensor, "B H D N"] | None = None,
    return_final_states: bool = False,
    reset: Bool[Tensor, "B T"] | None = None,
) -> (
    Float[Tensor, "B T H D"]
    | tuple[Float[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]
):
    """The chunkwise scan on the output of `in_proj` as it lies in memory.

    Args:
        proj: columns x (H D), Re B, Im B, Re C, Im C (H N each) and dt (H); float32,
            bfloat16 or float16.
        A: decay rate per head, complex64, Re(A) < 0.
        n_heads, head_dim, state_dim: H, D and N; D and N are 16, 32, 64 or 128.
        chunk_size: 16, 32, 64 or 128; T need not be a multiple.
        precision: operands of the products: "tf32" (also None), "bf16", or "ieee" for
            float32.
            Sums, exponentials and states are float32 in all of them; in "bf16" mode the
            copies of the states that outputs and gradients read are bfloat16.
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last token, complex64.
        reset: True where a document starts: the state arriving there is dropped.

    Returns: y in the dtype of proj, or `(y, final_states)`. Gradients of proj, A and
        initial_states; the same bits every time.

    Raises:
        ImportError: triton is not installed.
        TypeError: a dtype that is not listed above.
        ValueError: a shape or device that does not fit, an unknown precision;
            KernelUnavailable, a ValueError, for sizes and devices without a kernel.

    Source: notebook 06, "The whole function".
    """
    _check_triton("ssd_fused")
    precision = _check_precision("fused", precision)
    _check_fused_dims(head_dim, state_dim, chunk_size)
    _check_proj(proj, A, n_heads, head_dim, state_dim, initial_states, reset)
    _check_device(proj.device, "ssd_fused")
    y, final_states, _ = _ssd_fused(
        *(proj, A, initial_states, reset),
        *(head_dim, state_dim, chunk_size, precision),
    )
    return (y, final_states) if return_final_states else y


# %% [markdown]
# Every claim at once: odd length, $D \ne N$, initial states, a gradient at the final
# states, documents, both ways to the states, three precisions. The truth is the *loop*,
# in complex128, on the same inputs.


# %%
SIZES = {"n_heads": 2, "head_dim": 32, "state_dim": 16, "chunk_size": 32}


def fused_gradients(inputs, dy, dfinal, precision):
    proj, A, initial, reset = inputs
    leaves = [z.detach().clone().requires_grad_() for z in (proj, A, initial)]
    outputs = ssd_fused(
        *leaves[:2], **SIZES, precision=precision, initial_states=leaves[2],
        return_final_states=True, reset=reset,
    )  # fmt: skip
    dproj, dA, dinitial = torch.autograd.grad(outputs, leaves, (dy, dfinal))
    dx, dB_re, dB_im, dC_re, dC_im, ddt = cut_columns(dproj, 2, 32, 16)
    return {
        "y": outputs[0], "final state": outputs[1], "dx": dx,
        "dB": torch.stack([dB_re, dB_im]), "dC": torch.stack([dC_re, dC_im]),
        "ddt": ddt, "dA": dA, "d initial": dinitial,
    }  # fmt: skip


def loop_gradients(inputs, dy, dfinal):
    proj, A, initial, reset = (z.cpu() for z in inputs)
    *vectors, dt = cut_columns(proj.double(), 2, 32, 16)
    A, initial = A.to(torch.complex128), initial.to(torch.complex128)
    leaves = [z.clone().requires_grad_() for z in (*vectors, dt, A, initial)]
    x, B_re, B_im, C_re, C_im, dt, A, initial = leaves
    y, final = ssd_naive_complex(
        x, A, torch.complex(B_re, B_im), torch.complex(C_re, C_im), dt,
        initial_states=initial, return_final_states=True, reset=reset,
    )  # fmt: skip
    weights = dy.cpu().double(), dfinal.cpu().to(torch.complex128)
    grads = torch.autograd.grad((y.real, final), leaves, weights)
    dx, *halves, ddt, dA, dinitial = grads
    return {
        "y": y.real, "final state": final, "dx": dx, "dB": torch.stack(halves[:2]),
        "dC": torch.stack(halves[2:]), "ddt": ddt, "dA": dA, "d initial": dinitial,
    }  # fmt: skip


# %% [markdown]
# The bounds are those that the package promises for 2048 steps. Here there are 77,
# errors average less, and half as much again is allowed. In bf16 mode the columns are
# numbers that bfloat16 holds. Once they are *stored* as bfloat16, as in training; there
# the interpreter, which cuts where a GPU rounds, gets twice the bound. And once they
# are stored as float32, and so are $y$ and the gradients: then the products alone are
# judged, and that is what the figure shows.

# %%
BOUNDS = {  # most tensors, ddt, dA
    "ieee": (2e-5, 1e-4, 1e-3), "tf32": (1e-3, 5e-3, 1e-2), "bf16": (5e-3, 1e-2, 3e-2)
}  # fmt: skip
errors = {}
for precision, (most, for_dt, for_A) in BOUNDS.items():
    held = torch.bfloat16 if precision == "bf16" else torch.float32
    proj, *rest = random_inputs(B=2, T=77, H=2, D=32, N=16, dtype=held)
    dy = torch.randn(2, 77, 2, 32, device=device).to(held)
    dfinal = torch.randn_like(rest[1])
    wanted = loop_gradients([proj, *rest], dy, dfinal)
    for kind, way in ((held, ALWAYS), (torch.float32, NEVER)):
        inputs = [proj.to(kind), *rest]
        got = with_names(fused_gradients, inputs, dy.to(kind), dfinal, precision, **way)
        assert got["y"].dtype == got["dx"].dtype == kind
        slack = 1.5 * (2 if kind == torch.bfloat16 and _interpreted() else 1)
        own = {name: relative_error(got[name], wanted[name]) for name in wanted}
        for name, error in own.items():
            assert error < slack * {"ddt": for_dt, "dA": for_A}.get(name, most), name
        errors[precision] = own
largest = {precision: max(own.values()) for precision, own in errors.items()}
assert 30 * largest["ieee"] < largest["tf32"] and 3 * largest["tf32"] < largest["bf16"]
print("y, the final state and", ", ".join(list(wanted)[2:]), "agree with the loop")

# %%
figure, axis = plt.subplots(figsize=(7.8, 3.1))
marks = {"ieee": ("o", GREEN), "tf32": ("s", ORANGE), "bf16": ("^", BLUE)}
for precision, (mark, color) in marks.items():
    style = {"ls": "", "ms": 8, "color": color, "markeredgecolor": BLACK}
    values = [errors[precision][name] for name in wanted]
    axis.semilogy(list(wanted), values, mark, **style, label=precision)
    most, for_dt, for_A = BOUNDS[precision]
    limits = [{"ddt": for_dt, "dA": for_A}.get(name, most) for name in wanted]
    axis.semilogy(list(wanted), limits, "_", color=color, ms=22, mew=2)
axis.set(ylabel="error, relative by norm [1]", ylim=(1e-8, 1e-1))
axis.set_xlabel("result")
axis.set_title("Dashes: what is promised. Marks: the fused scan against the loop")
axis.legend(ncols=3, fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# Through the front door: the same function as any other dispatch, on separate tensors,
# float32 out. And what is refused.


# %%
def separate(H=2, D=16, N=32, T=37):
    complex_normal = [torch.randn(2, T, H, N, dtype=torch.complex64) for _ in range(2)]
    A = torch.complex(-torch.rand(H), torch.randn(H))
    tensors = torch.randn(2, T, H, D), A, *complex_normal, torch.randn(2, T, H)
    return [z.to(device) for z in tensors]


def refused(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}\n")
        return str(error)
    raise AssertionError("went through")


case = separate()
leaves = [z.clone().requires_grad_() for z in case]
kinds = [torch.complex128 if z.is_complex() else torch.float64 for z in case]
exact = [z.cpu().to(kind) for z, kind in zip(case, kinds, strict=True)]
exact = [z.requires_grad_() for z in exact]
fused = {"chunk_size": 16, "ssd_dispatch": "fused"}
y = ssd_complex_chunkwise(*leaves, **fused, precision="ieee")
wanted = ssd_naive_complex(*exact).real
assert y.dtype == torch.float32 and relative_error(y, wanted) < 2e-5
dy = torch.randn_like(y)
mine = torch.autograd.grad(y, leaves, dy)
theirs = torch.autograd.grad(wanted, exact, dy.double().cpu())
assert max(map(relative_error, mine, theirs)) < 1e-4
tf32 = ssd_complex_chunkwise(*case, **fused)
assert 2e-5 < relative_error(tf32, wanted) < 1e-3, "the default is tf32"

complex_x = case[0].to(torch.complex64), *case[1:]
assert "'triton'" in refused(ssd_complex_chunkwise, *complex_x, **fused)
proj, A, *_ = random_inputs(B=1, T=9, H=2, D=32, N=16)
assert "head_dim=48" in refused(ssd_fused, proj, A, **SIZES | {"head_dim": 48})
assert "194" in refused(ssd_fused, proj[..., 1:], A, **SIZES)
assert "float64" in refused(ssd_fused, proj.double(), A, **SIZES)

# %% [markdown]
# ## Deterministic, and one operator
# Every number is written by one program, and every sum has an order. So two backwards
# of the same inputs agree to the last bit, and a run can be repeated.

# %%
inputs = proj, A, initial, reset = random_inputs(B=2, T=77, H=2, D=32, N=16)
dy, dfinal = torch.randn(2, 77, 2, 32, device=device), torch.randn_like(initial)
for way in (ALWAYS, NEVER):
    first, second = (
        with_names(fused_gradients, inputs, dy, dfinal, "tf32", **way) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)

# %% [markdown]
# `opcheck` asks an operator whether it is what it says: that its schema is true, that
# the fake has the shapes and types of the real one, that autograd is connected. And a
# compiler no longer stops at it: `fullgraph=True` refuses any function that it cannot
# see through, and notebook 05's kernel was refused.

# %%
small = random_inputs(B=1, T=20, H=1, D=16, N=16)
leaves = [z.requires_grad_() for z in small[:3]]
for precision in ("tf32", "bf16"):
    arguments = *leaves, small[3], 16, 16, 16, precision
    report_of = torch.library.opcheck(_ssd_fused, arguments)
    assert set(report_of.values()) == {"SUCCESS"}
gradient = torch.randn(1, 20, 1, 16, device=device)
states = torch.randn(1, 2, 1, 2, 16, 16, device=device)
detached = [z.detach() for z in leaves[:2]]
arguments = *detached, small[3], states, gradient, None, 16, 16, 16, "tf32"
report_of = torch.library.opcheck(_ssd_fused_backward, arguments)
assert set(report_of.values()) == {"SUCCESS"}
print(", ".join(report_of))

# %%
small_sizes = {"n_heads": 1, "head_dim": 16, "state_dim": 16, "chunk_size": 16}


def around(u, weight, A):
    return torch.sin(ssd_fused(u @ weight, A, **small_sizes)).sum()


u = torch.randn(1, 20, 8, device=device)
weight = torch.randn(8, 81, device=device).requires_grad_()
rate = torch.tensor([-0.2 + 1j], device=device).requires_grad_()
compiled = torch.compile(around, fullgraph=True, backend="aot_eager")
expected = torch.autograd.grad(around(u, weight, rate), (weight, rate))
got = torch.autograd.grad(compiled(u, weight, rate), (weight, rate))
assert max(map(relative_error, got, expected)) < 1e-5
print("compiled with fullgraph=True, gradients included")

# %% [markdown]
# How many launches are there? A stand-in for each kernel notes that it was called.


# %%
class Counted:
    """A kernel that notes its launches in `noted`."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        noted.append(self.kernel.__name__)
        return self.kernel[grid]


noted = []
names = ("_states_kernel", "_pass_kernel", "_output_kernel", "_backward_kernel")
counted = {name: Counted(globals()[name]) for name in names}
for way, most in ((ALWAYS, 2), (NEVER, 3)):
    noted.clear()
    with_names(fused_gradients, inputs, dy, dfinal, "tf32", **way, **counted)
    forward = 1 + noted.index("_output_kernel")
    print(forward, "launches forward,", len(noted) - forward, "backward")
    assert forward == len(noted) - forward == most

# %% [markdown]
# ## Walk, or all chunks at once?
# Walking moves fewer bytes. Its weakness is the number of programs: one per tile of a
# state of a sequence and head, whatever the length. An H200 has 132 SMs. A training
# batch of 8 sequences with 16 heads is 128 walks, times the tiles of a state, and has
# work for all. One long sequence has not, and while its few programs walk through 512
# chunks, most of the chip waits. All *derived*, with tiles as in the launch table:


# %%
def way_of(B, T, H, walk, D=64, N=64, C=64):
    """Programs of the state kernel, chunks one after the other, ms at the copy rate."""
    options = _launch("states", "bf16", D, N)
    tiles = (D // options["BLOCK_D"]) * (N // options["BLOCK_N"])
    shape = {"B": B, "T": T, "H": H, "D": D, "N": N, "chunk": C}
    moved = sum(launches(walk, sizes=shape)[0].values())
    programs = B * H * tiles * (1 if walk else T // C)
    return programs, T // C if walk else 1, 1e3 * moved / copy_rate


print("  B      T   H    programs, walk / parallel    serial chunks    bytes: forward")
table = {}
for B, T, H in [(8, 2048, 16), (1, 2048, 16), (1, 32768, 16), (64, 512, 16)]:
    walk, parallel = (way_of(B, T, H, walk) for walk in (True, False))
    table[B, T] = walk, parallel
    print(
        f"{B:3d} {T:6d} {H:3d}   {walk[0]:10d} / {parallel[0]:<12d}  {walk[1]:10d} / 1"
        f"      {walk[2]:.3f} / {parallel[2]:.3f} ms"
    )
for (_, T), (walk, parallel) in table.items():
    assert parallel[0] == walk[0] * T // 64 and parallel[2] > 1.5 * walk[2]
assert table[1, 2048][0][0] == table[1, 32768][0][0], "length fills nothing"
assert table[1, 32768][0][0] < table[8, 2048][0][0]

# %% [markdown]
# Both ways are one kernel, so the choice costs a number in the launch table and no
# second implementation. (A chain of chunks in a single pass, each program waiting for
# its neighbor, would have both advantages. It needs programs that talk to each other
# while they run, and care about the order in which they start; we have not built it.)
#
# ## What breaks: angles over the whole sequence
# Why restart $V$ in each chunk? One cumulative sum over the sequence would do without
# the rotation of states. In exact arithmetic it is the same; in float32 the sum
# grows, and its last digits with it. The score of two *neighbors* needs only a small
# difference of two large angles. Here is its error along 4096 steps, for a state that
# hardly forgets.

# %%
T, C = 4096, 64
v = F.softplus(torch.randn(T, dtype=torch.float64)) * 3.0
exact = torch.polar(torch.ones(T - 1, dtype=torch.float64), v[1:])  # e^(i(V_l - V_l-1))
v32 = v.float()
turns = torch.floor(v32 / (2 * math.pi) + 0.5)
small = (v32 - turns * 6.28125) - turns * 0.0019353071795864769


def neighbor_error(V):
    """Of the score of each step with the one before it, from float32 factors."""
    phase = torch.complex(V.cos(), V.sin())
    return (phase[1:] * phase[:-1].conj() - exact).abs()


along = neighbor_error(v32.cumsum(0))
inside = neighbor_error(small.unflatten(0, (-1, C)).cumsum(1).flatten())
inside = inside[torch.arange(1, T) % C != 0]  # across an edge it is the state's turn
window = {name: z.unflatten(0, (21, -1)).amax(1) for name, z in [
    ("one sum", along), ("per chunk", inside)]}  # fmt: skip
assert window["one sum"][-1] > 10 * window["one sum"][0]
assert along.max() > 30 * inside.max() and inside.max() < 2e-5

# %%
figure, axis = plt.subplots(figsize=(7.2, 2.6))
position = (torch.arange(21) + 0.5) * T / 21
axis.semilogy(position, window["one sum"], color=RED, label="one sum for the sequence")
axis.semilogy(position, window["per chunk"], color=BLUE, ls="--", label="per chunk")
axis.set(xlabel="step l", ylabel="largest error of a score [1]")
axis.set_title("A growing angle loses digits, a restarted one does not (float32)")
axis.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## What breaks: carrying a rounded state
# In bf16 mode the states that outputs read are stored in bfloat16: one rounding, as of
# every other operand. It is tempting to carry that copy on to the next chunk. Then the
# rounding of *every* chunk is carried too, and a state that forgets slowly adds them
# all up. Worse, what a chunk adds to a large state may be less than half a unit of
# bfloat16, and is lost. Emulated: real states, float64 but for the rounding.

# %%
chunks, keep = 512, math.exp(-1e-4 * 64 * 0.8)  # 64 steps at the slowest decay
added = torch.randn(chunks, 512, dtype=torch.float64) + 0.2
exact = carried = torch.zeros(512, dtype=torch.float64)
of_copy, of_carry = [], []
for S in added:
    exact = keep * exact + S
    carried = bf16(keep * carried + S)
    of_copy.append(relative_error(bf16(exact), exact))
    of_carry.append(relative_error(carried, exact))
assert max(of_copy) < 3e-3, "one rounding, however long the sequence"
assert of_carry[-1] > 5 * of_copy[-1] and of_carry[-1] > 2 * of_carry[15]

# %%
figure, axis = plt.subplots(figsize=(7.2, 2.6))
shown = range(0, chunks, 8)
axis.semilogy(shown, of_carry[::8], color=RED, label="bfloat16 carried")
axis.semilogy(shown, of_copy[::8], color=BLUE, ls="--", label="a bfloat16 copy read")
axis.set(xlabel="chunk", ylabel="error of the state, by norm [1]", ylim=(1e-3, 3e-2))
axis.set_title("Round what is read, never what is carried")
axis.legend(fontsize=9, loc="center right")
plt.show()

# %% [markdown]
# ## Pitfalls
# - **The term of the last position.** Without it four gradients are perfect, and $dt$
#   and $A$ learn something else.
# - **A chunk's keys belong to its start, its state to its end.** Turn the sum by
#   $V_{\text{last}}$, and the gradient of the state back.
# - **Reduce angles, then add them.** And start again in every chunk.
# - **$\log(1 + e^{dt})$ is zero** for small steps. Use the series.
# - **A reset is a mask**, not a log decay of $-\infty$: that minus itself is NaN.
# - **Steps past the end** neither decay nor turn. A padded $dt$ of 0 would.
# - **Round operands to the nearest**, matrix units cut. And let NaN through.
# - **Round the copy, carry float32.**
# - **No atomics** if two runs shall agree.
# - **Test parts with exact inputs.** When the backward gets its states from the forward
#   under test, two errors can hide each other.
# - **`EMULATE` belongs to the interpreter.** What it computes is what the GPU computes;
#   how fast, only a GPU can say.
#
# The scan stands, and it reads the output of a projection. Next:
# [07, a block and a language model](07_block_and_model.ipynb) makes that projection,
# and chooses there who computes the scan.

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran for {time.perf_counter() - started:.1f} s")
