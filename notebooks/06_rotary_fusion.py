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
import itertools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import matplotlib.pyplot as plt
import numpy as np
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
        "figure.dpi": 52,
        "figure.figsize": (7.8, 2.9),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

# %% tags=["export"]
import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from mamba3lite.models.ssd_complex import _FADED, KernelUnavailable, _check_precision
from mamba3lite.models.ssd_triton import (
    HAS_TRITON,
    _check_device,
    _check_triton,
    _interpreted,
)

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

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
# so far (notebook 03, "Boundaries"). Pairs with different numbers are masked; the
# entering state reaches only the tokens with number 0, and only the last document
# reaches the end. A start itself has no decay to contribute: whatever it would multiply
# is masked.


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
figure, axis = plt.subplots(figsize=(6.6, 2.4))
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
# What a step decays by $e^{u}$ has a gradient that is $e^{u}$ times as small. It comes
# out of differences of numbers that are *not* small, and what cancels on paper must
# cancel in the arithmetic. Three things do:
#
# - **Pairs.** The entry $(l, s)$ of $dM \odot M$ is in $dU_l$, and in $dU_s$ with a
#   minus. A step before both gets both, and nothing must be left. In bfloat16 something
#   is, if $\langle dq_l, q_l \rangle$ takes rounded $dM$ and $k$ and an exact $q$, and
#   $\langle dk_s, k_s \rangle$ rounded $dM$ and $q$ and an exact $k$. So both take what
#   the matrix units read: $\hat q$ and $\hat k$.
# - **The last term.** $\langle E, G' \rangle$ holds all that the keys have written, and
#   $-\langle dk_t, k_t \rangle$ takes it away again, the last key's in full. Take $dk =
#   dk^{\circ} + w \odot (X \tilde E)$ apart instead: with $P_t = w_t \langle x_t \tilde
#   E, k_t \rangle$, what step $u$ decays of the state that leaves is what the keys
#   *before* it wrote, and what is left of the state that entered.
# - **The diagonal.** Between a token and itself nothing decays; it is in $dU_t$ twice,
#   and cancels to the last digits of float32. Under strong decay that is more than all
#   the rest. Leave it out of both.
#
# $$du_u = \sum_{t \ge u} \bigl( \langle dq_t, q_t \rangle - \langle dk^{\circ}_t, k_t
# \rangle \bigr) + \sum_{t < u} P_t + e_{\text{last}} \langle \tilde E, G \rangle ,$$
#
# where $dq$ and $dk^{\circ}$ are without the diagonal. $dv$ has $Jq$, $Jk$ and $JG$ in
# their places, and the opposite sign wherever there is no $q$. Here in float32, with
# operands in bfloat16, one after the other. (Notebook 03, "The gradient of a step", has
# the same as one matrix: there nothing is computed twice.)


# %%
def bf16(z):
    return z.bfloat16().to(z.dtype)


def step_gradients(x, factors, dY, E, G, G_next, pairs, apart, strict):
    """du of a chunk in single precision, by as many of the three as are asked for."""
    _, V, q, k, L, entry, left = (z.float() for z in factors)
    x, dY, E, G, G_next, q_read, k_read = map(bf16, (x, dY, E, G, G_next, q, k))
    back = bf16(rotate(E, -V[-1]))
    dM = bf16((dY @ x.mT) * (L.tril(-1) if strict else L))
    dq = dM @ k_read + entry * (dY @ G)
    inside, to_state = dM.mT @ q_read, left * (x @ back)
    q, k = (q_read, k_read) if pairs else (q, k)
    P = (to_state * k).sum(-1)
    dU = (dq * q).sum(-1) - (inside * k).sum(-1)
    if apart:
        before = F.pad(P.cumsum(0)[:-1], (1, 0)) + entry[-1] * (back * G).sum()
    else:
        before, dU = 0, dU - P
        dU[-1] += (E * G_next).sum()
    return dU.flip(0).cumsum(0).flip(0) + before


ways = {
    "as above": (False, False, False), "pairs": (True, False, False),
    "and the last term": (True, True, False), "and the diagonal": (True, True, True),
}  # fmt: skip
errors = {}
for rate in (0.1, 1.0, 4.0, 16.0):
    for _ in range(8):
        head = random_head(T=64, rate=rate, documents=False)
        head = head._replace(dt=torch.rand_like(head.dt))  # steps of 0.7 to 1.3
        dY, E = torch.randn_like(head.x), pair(torch.randn_like(head.G))
        of_chunk = chunk_factors(*head[1:5], head.reset)
        states = scan_forward(head, 64)[1]
        *_, truth, _, _ = chunk_backward(head.x, of_chunk, dY, E, *states)
        inputs = [z.float() for z in (head.x, dY, E, *states)]
        for way, options in ways.items():
            du = step_gradients(inputs[0], of_chunk, *inputs[1:], *options).double()
            largest = ((du - truth).abs().max() / truth.abs().max()).item()
            errors.setdefault(way, {}).setdefault(rate, []).append(largest)
for way, found in errors.items():
    middle = {rate: torch.tensor(z).median().item() for rate, z in found.items()}
    print(f"{way:18}", "  ".join(f"{z:.0e}" for z in middle.values()))
    if way == "and the diagonal":
        assert max(middle.values()) < 1e-2, "at any decay"
    else:
        assert middle[16.0] > 1e-2

# %% [markdown]
# The columns are decays of 0.1, 1, 4 and 16 a step; the numbers, the largest error of
# $du$ relative to the largest $du$. The first two cost next to nothing. The third needs
# a matrix more in two places, and below a decay of $e^{-2}$ a step nobody would notice:
# so it is for those chunks alone that need it, which comes with the kernels.

# %% [markdown]
# ## Why fuse
# *The kernel of notebook 05 is faster than PyTorch. Why is the scan around it not?*
# Here is the whole call, from $x$, $A$, $B$, $C$, $dt$ to $y$, *measured* on an H200
# (`docs/benchmarks/h200-per-chunk.json`), beside the part of it that the kernel
# computes. All products in tf32. "Replayed" times leave the launches from Python out.

# %%
folders = (path / "docs/benchmarks" for path in (Path.cwd(), *Path.cwd().parents))
folder = next(path for path in folders if path.is_dir())
report = json.loads((folder / "h200-per-chunk.json").read_text())
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
# each input where it lies, in the type it has, turn it in registers, and write only
# what another kernel needs. That is two things:
#
# - the **states between chunks**: a chunk cannot be finished before the state that
#   enters it is known;
# - the **gates**, $\cos V$, $\sin V$, $U$ and the number of documents so far, of each
#   step and head. Every program below needs those of its chunk. They are 16 bytes a
#   step, and a chain of instructions, softplus, two sums and two sines, that has no
#   matrix unit. So they are computed once.
#
# | launch | reads | writes |
# |---|---|---|
# | gates | $dt$ | the gates |
# | states | $x$, $B$, gates | what enters every chunk, or: what every chunk adds |
# | pass, if needed | what every chunk adds, gates | what enters every chunk |
# | outputs | $x$, $B$, $C$, gates, what enters every chunk | $y$ |
# | states, reversed | $dy$, $C$, gates | $E$ of every chunk, or its parts |
# | pass, if needed | as above | $E$ of every chunk |
# | gradients | $x$, $B$, $C$, $dy$, gates, states, $E$ | $dx$, $dB$, $dC$; sums |
# | gradients, strong decay | the same, of chunks that the launch before left out | |
# | steps | $dt$, sums | $d(dt)$, shares of $dA$ |
#
# "If needed" is a choice between two ways to the states, which comes below. On the way
# that needs it, the programs of the states are one per chunk, and compute its gates
# themselves. So there are three launches forward either way, and four or five
# backward, then a small sum for $dA$. For the backward the forward keeps the inputs,
# the states and the gates: $q$, $k$, $M$ and $L$ are computed again, since arithmetic
# on the SM is cheap.
#
# How many bytes is that, at the shape above, with bfloat16 inputs and a bfloat16 copy
# of the states? *Derived*, from the table: each launch counts what it reads once. For
# the gradients that is the best case: three kinds of programs, for $dC$, $dB$ and
# $dx$, read much the same, and only the L2 cache saves them from fetching it again. So
# the worst case is counted too.


# %%
def launches(walk, width=2, copy=2, again=False, sizes=sizes):
    """Bytes of each launch as (forward, backward), two dicts by name.

    again: no cache helps where programs of one launch read the same.
    """
    tokens = sizes["B"] * sizes["T"] * sizes["H"]
    D, N = sizes["D"], sizes["N"]
    states = copy * tokens // sizes["chunk"] * 2 * N * D
    x, pairs, steps = (width * tokens * n for n in (D, 2 * N, 1))
    gates, sums = 4 * 4 * tokens, 6 * 4 * tokens
    if walk:
        forward = {"gates": steps + gates, "states": x + pairs + gates + states}
        backward = {"states": x + pairs + gates + states}
    else:
        forward = {"states": x + pairs + steps + gates + states, "pass": 2 * states}
        backward = {"states": x + pairs + gates + states, "pass": 2 * states}
    forward["last"] = 2 * x + 2 * pairs + gates + states
    read = 2 * x + 2 * pairs + 2 * states + gates  # x, dy; B, C; G, E
    if again:  # dC: x, dy, B, C, G; dB: x, dy, B, C, E; dx: dy, B, C, E and G
        read = 5 * x + 6 * pairs + 4 * states + 3 * gates
    backward["last"] = read + x + 2 * pairs + sums
    backward["steps"] = sums + 2 * steps
    return forward, backward


def in_ms(moved):
    return 1e3 * sum(moved) / copy_rate


def total_ms(walk, **options):
    return in_ms(n for part in launches(walk, **options) for n in part.values())


for walk, name in ((True, "walk"), (False, "parallel")):
    forward, backward = (in_ms(part.values()) for part in launches(walk))
    print(f"{name:8s} {forward:.3f} ms forward, {forward + backward:.3f} with backward")
walking, passing = total_ms(True), total_ms(False)
uncached = total_ms(True, again=True)
print(f"walk, if nothing is found in the cache: {uncached:.3f}")
share = {walk: 1 - total_ms(walk, copy=0) / total_ms(walk) for walk in (True, False)}
assert 1.8 * floors(2)[1] < walking < passing < 0.1 * both and uncached < 0.1 * both
assert uncached > 1.3 * walking and walking < total_ms(True, copy=4)
assert 0.25 < share[True] < 0.35 and 0.4 < share[False] < 0.5, "of states"

# %%
figure, axis = plt.subplots(figsize=(7.8, 2.4))
colors = {"states": ORANGE, "pass": SKY, "last": GREEN} | dict.fromkeys(
    ("gates", "steps"), PINK
)
labels = {"states": "states", "pass": "pass", "last": "outputs; gradients"}
for place, walk in enumerate((True, False)):
    start = 0
    for moved, hatch in zip(launches(walk), (None, "//"), strict=True):
        for name, count in moved.items():
            style = {"color": colors[name], "edgecolor": BLACK}
            style["label"] = labels.get(name, "gates; steps")
            axis.barh(place, in_ms([count]), left=start, hatch=hatch, **style)
            start += in_ms([count])
    rest = total_ms(walk, again=True) - start
    style = {"color": "white", "edgecolor": BLACK, "ls": ":"}
    axis.barh(place, rest, left=start, label="if no cache helps", **style)
axis.axvline(floors(2)[1], color=RED, ls="--", label="floor, both")
axis.set(yticks=[0, 1], yticklabels=["walk", "parallel"], ylim=(1.6, -1.3))
axis.set(xlabel="forward, then backward (hatched), at the copy rate [ms], derived")
axis.set_title("States are a third of what moves, and more when passed on alone")
shown = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
axis.legend(shown.values(), shown.keys(), fontsize=8, loc="upper right", ncols=3)
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


def gates_of(head, C):
    """cos V, sin V, U in two parts and the document, (chunks, 5, C), float64."""
    step = F.softplus(head.dt, threshold=40).masked_fill(head.reset, 0)
    step, fresh = (
        F.pad(z, (0, -len(step) % C)).unflatten(0, (-1, C))
        for z in (step, head.reset.double())
    )
    U, V = (step * head.A.real).clamp(min=-104).cumsum(1), step * head.A.imag
    V, rounded = V.cumsum(1), U.float().double()
    return torch.stack([V.cos(), V.sin(), rounded, U - rounded, fresh.cumsum(1)], 1)


def all_gates(inputs, D, N, C):
    """The same of all heads, (B, chunks, H, 5, C)."""
    gates = [gates_of(head, C) for _, head in heads_of(*inputs, D, N)]
    return torch.stack(gates).unflatten(0, (-1, len(inputs[1]))).transpose(1, 2)


def on_device(z):
    return z.float().contiguous().to(device)


def poisoned(*shape):
    """NaN, with a fence of NaN around it: the tensor, and whether the fence stands."""
    fenced = torch.full((math.prod(shape) + 200,), math.nan, device=device)
    inside = fenced[100:-100].view(shape)
    return inside, lambda: bool(fenced.isnan().sum() - inside.isnan().sum() == 200)


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
# A matrix unit given a float32 in tf32 mode ignores the low 13 bits, it *cuts*. That
# makes every operand smaller, by half a unit of its last kept bit on average and by one
# at most; notebook 05 found the error of cutting up to twice as large as that of
# rounding. To round, one adds half a unit to the bits, cuts, and looks after NaN: a
# handful of instructions for every number that enters a product. One multiplication
# does nearly the same. In proportion to $z$, half a unit is between $2^{-12}$ and
# $2^{-11}$, so multiply by
#
# $$1 + \tfrac{2}{3} \, 2^{-11}$$
#
# and let the unit cut. It gives back a third of a unit to a mantissa near 1 and two
# thirds to one near 2. The errors then center on zero, and none is above two thirds of
# a unit. What tf32 holds exactly comes out as it was, since less than one unit was
# added; NaN and infinity do too. And where a tile is rotated before its product,
# `_turned` puts the factor into $\cos V$ and $\sin V$, one per row: it costs nothing.
#
# For bf16 the GPU has an instruction that rounds. The interpreter has no matrix units:
# it multiplies float32 in full and bfloat16 tiles wrongly. So under it `EMULATE` cuts
# or rounds in the bits and stays in float32. The products are the same, and the CPU can
# test the accuracy of a mode that it does not have. One difference is left: a float32
# *stored* as bfloat16 is rounded on a GPU and cut by the interpreter.

# %% tags=["export"]
if HAS_TRITON:
    # Cutting loses half a unit of tf32 on average; in proportion, a third to two thirds
    # of a unit is given back before. What tf32 holds exactly stays as it is.
    _ROUNDING = tl.constexpr(1.0 + 2.0**-11 / 1.5)

    @triton.jit
    def _cut(z, EMULATE: tl.constexpr):
        """z without the 13 bits that a unit ignores in tf32, where there is no unit."""
        if EMULATE:
            bits = z.to(tl.int32, bitcast=True) & -0x2000
            z = bits.to(tl.float32, bitcast=True)
        return z

    @triton.jit
    def _operand(z, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
        """z as a product reads it: as bfloat16, ready to be cut to tf32, or float32.

        EMULATE keeps a rounded bfloat16 in float32; the interpreter multiplies bfloat16
        wrongly.
        """
        if PRECISION == "ieee":
            return z.to(tl.float32)
        elif PRECISION == "tf32":
            return _cut(z.to(tl.float32) * _ROUNDING, EMULATE)
        elif EMULATE:
            z = z.to(tl.float32)
            bits = z.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            return tl.where(z == z, bits.to(tl.float32, bitcast=True), z)
        else:
            return z.to(tl.bfloat16)

    @triton.jit
    def _operands(re, im, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
        """Both halves of a complex tile."""
        return _operand(re, PRECISION, EMULATE), _operand(im, PRECISION, EMULATE)

    @triton.jit
    def _turned(re, im, cos, sin, PRECISION: tl.constexpr, EMULATE: tl.constexpr):
        """Both halves of a complex tile, each row times cos + i sin of its own."""
        if PRECISION == "tf32":  # what rounds is one factor more
            re, im = _turn(re, im, cos * _ROUNDING, sin * _ROUNDING)
            return _cut(re, EMULATE), _cut(im, EMULATE)
        else:
            re, im = _turn(re, im, cos, sin)
            return _operands(re, im, PRECISION, EMULATE)

    @triton.jit
    def _dot(a, b, acc, PRECISION: tl.constexpr):
        """acc + a b in float32; a and b come from the functions above."""
        if PRECISION == "bf16":
            return tl.dot(a, b, acc=acc)
        else:
            return tl.dot(a, b, acc=acc, input_precision=PRECISION)


# %% [markdown]
# The rounding is checked on bits: against PyTorch for bf16, and for tf32 against what
# the paragraph above says. Near 1 a number goes up from two thirds of a unit on, near
# 1.5 from one half on, near 2 from one third on.


# %%
@triton.jit
def operand_alone(
    z_ptr, out_ptr, LENGTH: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr
):
    at = tl.arange(0, LENGTH)
    z = _operand(tl.load(z_ptr + at), PRECISION, EMULATE)
    tl.store(out_ptr + at, z.to(tl.float32))


def cut(z):
    """What a matrix unit reads of a float32 in tf32 mode."""
    return (z.view(torch.int32) & -0x2000).view(torch.float32)


def rounded(z, precision):
    out = torch.empty_like(z)
    modes = {"PRECISION": precision, "EMULATE": _interpreted()}
    operand_alone[(1,)](z, out, LENGTH=len(z), **modes)
    return cut(out) if precision == "tf32" else out


ulp = 2.0**-10
low = torch.tensor([1, -1, 1.5, 2 - ulp], device=device)
for part in (0.3, 0.36, 0.45, 0.55, 0.63, 0.7):
    goes_up = torch.tensor([part > 2 / 3, part > 2 / 3, part > 0.5, part > 1 / 3])
    wanted = low + goes_up.to(device) * ulp * low.sign()
    assert torch.equal(rounded(low + part * ulp * low.sign(), "tf32"), wanted), part

special = [0.0, -0.0, math.inf, -math.inf, 1 + 2.0**-8, 1 + 3 * 2.0**-8]
z = torch.cat([torch.tensor(special), torch.randn(1018)]).to(device)
assert torch.equal(rounded(z, "ieee"), z)
assert torch.equal(rounded(z, "bf16"), z.bfloat16().float()), "ties go to even"
assert torch.equal(rounded(z, "tf32")[:4], z[:4])
assert torch.equal(rounded(cut(z), "tf32"), cut(z)), "exact ones stay"

nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1, 0x7F800001] * 4, dtype=torch.int32)
with np.errstate(invalid="ignore"):  # the interpreter's NumPy would warn
    for precision in ("ieee", "tf32", "bf16"):
        assert rounded(nans.view(torch.float32).to(device), precision).isnan().all()

# %% [markdown]
# The errors of many numbers, by their mantissa. The mean of those that were only cut is
# half a unit below zero; in a sum of products that does not average out.

# %%
z = 1 + torch.rand(2**15)
nearest = ((z.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
ways = {
    "cut": (cut(z), RED),
    "to the nearest": (nearest, BLACK),
    "this factor, then cut": (rounded(z.to(device), "tf32").cpu(), BLUE),
}
off = {name: (got.double() - z) / ulp for name, (got, _) in ways.items()}
assert off["cut"].max() <= 0 and off["cut"].min() < -0.99
assert abs(off["cut"].mean() + 0.5) < 0.01
ours = off["this factor, then cut"]
assert ours.abs().max() < 0.67 and abs(ours.mean()) < 0.01
assert ours.abs().mean() < 1.1 * off["to the nearest"].abs().mean()

# %%
figure, axes = plt.subplots(1, 3, sharey=True, figsize=(7.8, 2.5))
bins = ((z - 1) * 32).long()
middle = 1 + (torch.arange(32) + 0.5) / 32
for axis, (name, (_, color)) in zip(axes, ways.items(), strict=True):
    each = [off[name][bins == i] for i in range(32)]
    lowest, mean, highest = (
        torch.stack([f(e) for e in each]) for f in (torch.min, torch.mean, torch.max)
    )
    axis.fill_between(middle, lowest, highest, color=color, alpha=0.25, lw=0)
    axis.plot(middle, mean, color=color, lw=2)
    axis.axhline(0, color="#bbbbbb", lw=1)
    axis.set(xlabel="mantissa [1]", title=name)
axes[0].set(ylabel="error [units of tf32]")
figure.suptitle("Range (shaded) and mean of the error", fontsize=11)
plt.show()

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
# From $dt$ to what all other kernels read: $\cos V$, $\sin V$, $U$ and the document, at
# every step. Six things can go wrong in float32:
#
# - $\log(1 + e^{dt})$ is *zero* from $dt = -17$ down, because $1 + e^{dt}$ is 1. A GPU
#   has a function for it, `log1p`. The interpreter has not, but where $e^{dt}$ is
#   small, four terms of the series are exact enough. (Just before they take over, the
#   logarithm has an absolute error of 1e-7, of a number of 1e-2.)
# - The angle of a step reaches $30 \pi \approx 94$, and whole turns are to be dropped.
#   $2\pi$ is not a float32. One turn is, if turns are what is counted: then the whole
#   part is subtracted without an error.
# - A sum of angles grows, and rounds at every step. A sum of **integers** does not. Let
#   $2^{32}$ be one turn: then an angle is a 32-bit integer, and what overflows is whole
#   turns, which nobody misses. Only the sum becomes a float again, within half a turn,
#   and sine and cosine get an angle that they need not reduce.
# - $U$ has no turns to drop, so it does grow, and a large float32 has lost the digits
#   that the difference of two neighbors needs. Integers again, of 64 bits, with
#   $2^{44}$ for 1. The sum is handed on as *two* float32 numbers, $U$ and what it
#   lacks. Products in ieee mode want both; in tf32 and bf16 mode their operands are
#   rounded harder than that.
# - Below $-104$ a log decay counts as $-104$: the factor is 0 in float32 either way,
#   and one enormous step costs nobody else a digit.
# - Steps past the end of the sequence must not decay or turn a state: their $\Delta$ is
#   0, their $dt$ is never read. The same holds for a reset.
#
# And a $dt$ that is not finite has to show: from there to the end of its document, not
# further, $U$ is NaN. That is a sum in segments. Triton's `associative_scan` makes it
# of a rule for two neighboring sums: added, if both are of one document.
#
# A program of `_gates_kernel` takes one chunk of several heads, because the $dt$ of
# neighboring heads are neighbors in memory.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _softplus(dt, EMULATE: tl.constexpr):
        """log(1 + exp(dt)), accurate also where it is tiny."""
        if EMULATE:  # the interpreter has no log1p
            e = tl.exp(-tl.abs(dt))
            series = e * (1.0 - e * (1.0 / 2.0 - e * (1.0 / 3.0 - e * (1.0 / 4.0))))
            log1p = tl.where(e < 1e-2, series, tl.log(1.0 + e))
        else:
            log1p = libdevice.log1p(libdevice.exp(-tl.abs(dt)))
        return tl.maximum(dt, 0.0) + log1p

    # Below it, exp is 0: such a step forgets all that was before.
    _LEAST = tl.constexpr(_FADED[torch.float32])
    _FIXED = tl.constexpr(2.0**44)  # what counts as 1 in a sum of log decays

    @triton.jit
    def _in_document(sum_a, document_a, sum_b, document_b):
        """Two sums, one after the other, as one: the later alone if it starts anew."""
        return tl.where(document_a == document_b, sum_a + sum_b, sum_b), document_b

    @triton.jit
    def _gates(
        dt, counts, document, A_re, A_im, HAS_RESET: tl.constexpr, EMULATE: tl.constexpr
    ):
        """Step size, cos V, sin V, and U and what it lacks; steps are the first axis.

        Where `counts` is false, past the end and at a reset, nothing decays or turns.
        What is not finite makes U NaN, up to the end of its document.
        """
        delta = tl.where(counts, _softplus(dt, EMULATE), 0.0)
        log_decay, angle = delta * A_re, delta * A_im
        lost = (log_decay + angle) * 0.0  # 0, or NaN
        finite = lost == 0.0
        turns = tl.where(finite, delta, 0.0)
        turns *= A_im * 0.15915494309189535  # 1 / (2 pi)
        turns -= tl.floor(turns + 0.5)
        # 2^32 is one turn: integers sum without rounding, and overflow drops turns.
        V = tl.cumsum((turns * 4294967296.0).to(tl.int32), 0)
        V = V.to(tl.float32) * 1.4629180792671596e-09  # radians, half a turn at most
        # Log decays are integers, too, so that a large one does not cost small digits.
        log_decay = tl.where(finite, tl.maximum(log_decay, _LEAST), 0.0)
        total = tl.cumsum((log_decay * _FIXED).to(tl.int64), 0)
        U = total.to(tl.float32)
        low = (total - U.to(tl.int64)).to(tl.float32) * (1.0 / _FIXED)
        if HAS_RESET:
            document = document + tl.zeros_like(V).to(tl.int32)
            lost, _ = tl.associative_scan((lost, document), 0, _in_document)
        else:
            lost = tl.cumsum(lost, 0)
        return delta, tl.cos(V), tl.sin(V), U * (1.0 / _FIXED) + lost, low

    @triton.jit
    def _fresh(reset_ptr, step, here, HAS_RESET: tl.constexpr):
        """1 at a reset, else 0."""
        if HAS_RESET:
            return tl.load(reset_ptr + step, mask=here, other=0).to(tl.int32)
        else:
            return tl.zeros_like(step)

    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _gates_kernel(
        proj_ptr, A_ptr, reset_ptr, gates_ptr, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
        HAS_RESET: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Gates of one chunk, BLOCK_H heads: cos V, sin V, U in two rows, document.

        Grid (B nc, H / BLOCK_H). Neighboring heads are read in one piece.
        """
        chunk = tl.program_id(0)
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        token = (chunk // n_chunks).to(tl.int64) * T + first
        step = tl.arange(0, BLOCK_C)
        here = first + step < T
        dt = tl.load(
            proj_ptr + (token + step[:, None]) * W + H * (D + 4 * N) + h[None, :],
            mask=here[:, None] & (h < H)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        A_re = tl.load(A_ptr + 2 * h, mask=h < H, other=0.0)
        A_im = tl.load(A_ptr + 2 * h + 1, mask=h < H, other=0.0)
        fresh = _fresh(reset_ptr + token, step, here, HAS_RESET)
        counts, document = (here & (fresh == 0))[:, None], tl.cumsum(fresh, 0)[:, None]
        _, cos, sin, U, low = _gates(
            dt, counts, document, A_re[None, :], A_im[None, :], HAS_RESET, EMULATE
        )
        index = chunk.to(tl.int64) * H + h
        at = gates_ptr + index[None, :] * 5 * BLOCK_C + step[:, None]
        exists = (h < H)[None, :] & (step >= 0)[:, None]
        tl.store(at, cos, mask=exists)
        tl.store(at + BLOCK_C, sin, mask=exists)
        tl.store(at + 2 * BLOCK_C, U, mask=exists)
        tl.store(at + 3 * BLOCK_C, low, mask=exists)
        document = document.to(tl.float32) + tl.zeros_like(cos)
        tl.store(at + 4 * BLOCK_C, document, mask=exists)


# %% [markdown]
# First the step size alone, over all that it is made for.


# %%
@triton.jit
def softplus_alone(dt_ptr, out_ptr, LENGTH: tl.constexpr, EMULATE: tl.constexpr):
    at = tl.arange(0, LENGTH)
    tl.store(out_ptr + at, _softplus(tl.load(dt_ptr + at), EMULATE))


dt = torch.linspace(-30, 30, 4096, device=device)
out = torch.full_like(dt, math.nan)
softplus_alone[(1,)](dt, out, LENGTH=4096, EMULATE=_interpreted())
softplus, exact = out.double(), F.softplus(dt.double(), threshold=40)
assert ((softplus - exact).abs() < 2e-7 * (1 + exact)).all()
assert (softplus / exact - 1).abs().max() < 1e-4, "small steps too"

# %% [markdown]
# Then one chunk of two heads, with $dt$ all over $[-30, 30]$ in a random order. From
# the float32 step sizes that it returns we make the turns of each step in the same way,
# and sum them in float64: the 128th angle is off by no more than the first. (A GPU may
# fuse a product with a subtraction, so there each *step* differs in its last bit.) The
# log decays too: to $10^{-9}$, where a float32 of that size has steps of $5 \cdot
# 10^{-4}$.


# %%
@triton.jit
def gates_alone(
    dt_ptr, counts_ptr, A_ptr, out_ptr, C: tl.constexpr, H: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    step, h = tl.arange(0, C), tl.arange(0, H)
    at = step[:, None] * H + h[None, :]
    counts = (tl.load(counts_ptr + step) != 0)[:, None]
    A_re, A_im = tl.load(A_ptr + 2 * h)[None, :], tl.load(A_ptr + 2 * h + 1)[None, :]
    delta, cos, sin, U, low = _gates(
        tl.load(dt_ptr + at), counts, 0 * step, A_re, A_im, False, EMULATE
    )
    tl.store(out_ptr + at, delta)
    tl.store(out_ptr + C * H + at, cos)
    tl.store(out_ptr + 2 * C * H + at, sin)
    tl.store(out_ptr + 3 * C * H + at, U)
    tl.store(out_ptr + 4 * C * H + at, low)


C = 128
A = torch.tensor([-0.01 + math.pi * 1j, -16 - 3j], device=device)
dt = torch.linspace(-30, 30, C)[torch.randperm(C)].to(device)[:, None].repeat(1, 2)
counts = torch.ones(C, dtype=torch.int32, device=device)
counts[[7, 8, 100]] = 0
out = torch.full((5, C, 2), math.nan, device=device)
A_pairs = torch.view_as_real(A)
gates_alone[(1,)](dt, counts, A_pairs, out, C=C, H=2, EMULATE=_interpreted())
delta, cos, sin, U, low = out
assert (delta[counts == 0] == 0).all() and (delta[counts == 1] > 0).all()
U_exact = (delta * A.real).clamp(min=-104).double().cumsum(0)
assert U_exact[-1, 1] < -5000
assert (U.double() + low.double() - U_exact).abs().max() < 1e-9
assert (delta * A.imag).abs().max() > 94, "radians"
turns = delta * (A.imag * 0.15915494309189535)
V = 2 * math.pi * (turns - torch.floor(turns + 0.5)).double().cumsum(0)
off = (torch.complex(cos, sin) - torch.exp(1j * V)).abs()
assert off.max() < (1e-6 if _interpreted() else 1e-4)

# %% [markdown]
# And the kernel, all of it: chunks with a ragged end, five heads where a program takes
# four, a reset past a chunk's edge, NaN in every column that it has no business with,
# and a fence. The truth is in double precision.

# %%
T, H, D, N, C = 121, 5, 16, 16, 64
inputs = proj, A, initial, reset = random_inputs(B=2, T=T, H=H, D=D, N=N)
proj[..., :-H] = math.nan
proj[..., -H:] *= 8  # dt, to about 30
for flagged in (False, True):
    flags = reset if flagged else torch.zeros_like(reset)
    wanted = all_gates((proj, A, initial, flags), D, N, C)
    gates, fence_stands = poisoned(2, 2, H, 5, C)
    _gates_kernel[(2 * 2, 2)](
        proj, torch.view_as_real(A), flags.view(torch.uint8), gates, T, H,
        proj.shape[2], 2, D=D, N=N, BLOCK_C=C, BLOCK_H=4, HAS_RESET=flagged,
        EMULATE=_interpreted(),
    )  # fmt: skip
    assert fence_stands()
    cos, sin, U, low, document = gates.double().cpu().unbind(3)
    assert (cos - wanted[..., 0, :]).abs().max() < 5e-5
    assert (sin - wanted[..., 1, :]).abs().max() < 5e-5
    assert torch.allclose(U + low, wanted[..., 2, :], rtol=1e-5, atol=1e-6)
    assert torch.equal(document, wanted[..., 4, :]) and document.any() == flagged

# %% [markdown]
# ### What breaks: the obvious formulas
# In PyTorch, float32. The logarithm loses small steps altogether. And angles as floats
# lose digits: the score of two *neighbors* needs only a small difference of two angles,
# but each of them is a long sum. Here is its error along 4096 steps, for a state that
# hardly forgets: from one sum over the sequence; from sums that start again in each
# chunk, of angles within half a turn; and from one sum of integers.

# %%
raw = torch.linspace(-30, 30, 10_001)
lost = torch.log(1 + torch.exp(raw)) == 0
assert lost[raw < -18].all() and not lost[raw > -15].any()

T, C = 4096, 64
v = F.softplus(torch.randn(T, dtype=torch.float64)) * 3.0
exact = torch.polar(torch.ones(T - 1, dtype=torch.float64), v[1:])  # e^(i(V_l - V_l-1))
turns = (v / (2 * math.pi)).float()
turns -= torch.floor(turns + 0.5)
small = (turns * 2 * math.pi).unflatten(0, (-1, C))
count = (turns * 2.0**32).to(torch.int32).cumsum(0, dtype=torch.int32)  # it overflows


def neighbor_error(V):
    """Of the score of each step with the one before it, from float32 factors."""
    phase = torch.complex(V.cos(), V.sin())
    return (phase[1:] * phase[:-1].conj() - exact).abs()


along = neighbor_error(v.float().cumsum(0))
inside = neighbor_error(small.cumsum(1).flatten())
inside = inside[torch.arange(1, T) % C != 0]  # across an edge it is the state's turn
counted = neighbor_error(count.float() * (2 * math.pi / 2**32))
window = {name: z.unflatten(0, (21, -1)).amax(1) for name, z in [
    ("one sum", along), ("per chunk", inside), ("integers", counted)]}  # fmt: skip
assert window["one sum"][-1] > 10 * window["one sum"][0]
assert along.max() > 30 * inside.max() and inside.max() > 3 * counted.max()
assert counted.max() < 2e-6

# %%
figure, axis = plt.subplots(figsize=(6.6, 2.6))
position = (torch.arange(21) + 0.5) * T / 21
axis.semilogy(position, window["one sum"], color=RED, label="one sum of floats")
axis.semilogy(position, window["per chunk"], color=BLUE, ls="--", label="per chunk")
axis.semilogy(position, window["integers"], color=BLACK, ls=":", label="integers")
axis.set(xlabel="step l", ylabel="largest error of a score [1]", ylim=(2e-7, 1e-2))
axis.set_title("A sum of angles in float32 loses digits as it grows, integers do not")
axis.legend(fontsize=8, ncols=3, loc="upper left")
plt.show()

# %% [markdown]
# Then why does $V$ still start again in each chunk? Because $U$ has to, whose sum has
# no turns to drop; because chunks that know their gates without each other can be
# computed at once; and because the state is turned by $V_{\text{last}}$ in the same
# multiplication that lets it decay.

# %% [markdown]
# ## Decay with documents
# $L$ of notebook 03, and the factors for states: from the chunk's entry to each step
# (at the last one, all the way through), and from each step to the end. `_decayed`
# multiplies a matrix by $L$. A pair of different documents is masked in the exponent,
# like the future, and in the matrix too: its entry may be NaN, and documents do not
# meet. All of them come from gates that are read: where there are no resets, the
# document is not even loaded.
#
# The backward has a function of its own. `TURNED` takes the transposed matrix and
# transposes nothing; `STRICT` leaves the diagonal out. And outside of ieee it saves
# instructions, of which it has no end: the GPU's own exponential is that of base 2, so
# $U$ is scaled once a step and not once a pair, and a decay below $10^{-38}$, which
# takes four instructions to be right, becomes 0. The forward cannot do the same: decode
# repeats its bits (notebook 09).

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _read_gates(ptr, at, BLOCK_C: tl.constexpr, HAS_RESET: tl.constexpr):
        """cos V, sin V, U in two parts and the document: of steps, or of one step."""
        document = 0 * at
        if HAS_RESET:
            document = tl.load(ptr + 4 * BLOCK_C + at).to(tl.int32)
        U, low = tl.load(ptr + 2 * BLOCK_C + at), tl.load(ptr + 3 * BLOCK_C + at)
        return tl.load(ptr + at), tl.load(ptr + BLOCK_C + at), U, low, document

    @triton.jit
    def _from_entry(U, document):
        """Decay from the chunk's entry to a step; 0 once a document has started."""
        return tl.where(document == 0, tl.exp(U), 0.0)

    @triton.jit
    def _span(U, low, U_0, low_0, PRECISION: tl.constexpr):
        """The log decay between two steps; what U lacks is below the digits of tf32."""
        if PRECISION == "ieee":
            return (U - U_0) + (low - low_0)
        else:
            return U - U_0

    @triton.jit
    def _to_end(U, low, document, U_last, low_last, last, PRECISION: tl.constexpr):
        """Decay from each step to the chunk's end; 0 but in the last document."""
        span = _span(U_last, low_last, U, low, PRECISION)
        return tl.where(document == last, tl.exp(span), 0.0)

    @triton.jit
    def _decayed(
        M, U, low, document, BLOCK_C: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr,
    ):  # fmt: skip
        """M[l, s] exp(U[l] - U[s]) for s <= l in a document, else 0."""
        step = tl.arange(0, BLOCK_C)
        span = _span(U[:, None], low[:, None], U[None, :], low[None, :], PRECISION)
        seen = step[:, None] >= step[None, :]
        if HAS_RESET:  # M may be NaN in another document
            seen = seen & (document[:, None] == document[None, :])
            M = tl.where(seen, M, 0.0)
        # Select before exp: in the future the exponent is positive and overflows.
        return M * tl.exp(tl.where(seen, span, float("-inf")))

    @triton.jit
    def _exp2(x, EMULATE: tl.constexpr):
        """2^x, and 0 where that is below the least normal number."""
        if EMULATE:
            return tl.exp2(x)
        else:
            return tl.inline_asm_elementwise(
                "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x],
                dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip

    @triton.jit
    def _decayed_back(
        M, U, low, document, BLOCK_C: tl.constexpr, TURNED: tl.constexpr,
        STRICT: tl.constexpr, HAS_RESET: tl.constexpr, PRECISION: tl.constexpr,
        EMULATE: tl.constexpr,
    ):  # fmt: skip
        """The same in the backward; M^T if TURNED, without its diagonal if STRICT."""
        step = tl.arange(0, BLOCK_C)
        if PRECISION != "ieee":
            U *= 1.4426950408889634  # to base 2
        span = _span(U[:, None], low[:, None], U[None, :], low[None, :], PRECISION)
        seen = step[:, None] >= step[None, :] + STRICT
        if TURNED:
            span = -span
            seen = step[:, None] + STRICT <= step[None, :]
        if HAS_RESET:
            seen = seen & (document[:, None] == document[None, :])
            M = tl.where(seen, M, 0.0)
        span = tl.where(seen, span, float("-inf"))
        return M * (tl.exp(span) if PRECISION == "ieee" else _exp2(span, EMULATE))


# %%
@triton.jit
def decay_alone(
    gates_ptr, out_ptr, C: tl.constexpr, HAS_RESET: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, C)
    at = step[:, None] * C + step[None, :]
    cos, sin, U, low, document = _read_gates(gates_ptr, step, C, HAS_RESET)
    _, _, U_last, low_last, last = _read_gates(gates_ptr, C - 1, C, HAS_RESET)
    one = tl.zeros((C, C), tl.float32) + 1.0
    if HAS_RESET:  # what must not be seen
        same = document[:, None] == document[None, :]
        one = tl.where(same, one, float("nan"))
    L = _decayed(one, U, low, document, C, HAS_RESET, "ieee")
    tl.store(out_ptr + at, L)
    L = _decayed_back(
        one, U, low, document, C, False, True, HAS_RESET, PRECISION, EMULATE
    )
    tl.store(out_ptr + C * C + at, L)
    L = _decayed_back(
        one, U, low, document, C, True, False, HAS_RESET, PRECISION, EMULATE
    )
    tl.store(out_ptr + 2 * C * C + at, L)
    edges_ptr = out_ptr + 3 * C * C + step
    tl.store(edges_ptr, _from_entry(U, document))
    left = _to_end(U, low, document, U_last, low_last, last, "ieee")
    tl.store(edges_ptr + C, left)
    through = _from_entry(U_last, last)
    tl.store(edges_ptr + 2 * C, through + tl.zeros_like(U))
    tl.store(edges_ptr + 3 * C, cos)
    tl.store(edges_ptr + 4 * C, sin)


for rate in RATES.values():
    for starts in ([], [0], [5, 6, 40]):
        head = random_head(T=64, rate=rate, documents=False)
        head.reset[starts] = True
        _, _, _, _, L, entry, left = chunk_factors(*head[1:5], head.reset)
        gates = gates_of(head, 64)[0]
        read = on_device(gates if starts else gates[:4])  # no document is read
        keep = entry[-1].expand(64)
        wanted = torch.stack([entry[:, 0], left[:, 0], keep, *gates[:2]])
        for precision in ("ieee", "bf16"):
            out = torch.full((197, 64), math.nan, device=device)
            decay_alone[(1,)](
                read, out, C=64, HAS_RESET=bool(starts), PRECISION=precision,
                EMULATE=_interpreted(),
            )  # fmt: skip
            *tiles, edges = out.double().cpu().split([64, 64, 64, 5])
            close = 1e-6 if precision == "ieee" else 1e-6 * max(1, -gates[2].min())
            for got, truth in zip(tiles, (L, L.tril(-1), L.T), strict=True):
                assert (got - truth).abs().max() < close
                assert (got[truth == 0] == 0).all(), "masked is exactly 0"
            assert (edges - wanted).abs().max() < 1e-6
        assert (edges[2] == 0).all() == (bool(starts) or rate == 16)

# %% [markdown]
# ## Rotation in registers
# A complex tile lies in two halves, $HN$ columns apart: planar, so that each half is
# read in whole rows. `_load_pair` reads both, `_turned` of above turns each row by a
# complex number of its own, and `_store_pair` is the way back for gradients. No rotated
# copy of $B$ or $C$ is ever in memory.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _load_pair(ptr, width, at, mask):
        """The halves of a complex tile, `width` numbers apart, in float32."""
        other = None if mask is None else 0.0
        re = tl.load(ptr + at, mask=mask, other=other).to(tl.float32)
        return re, tl.load(ptr + width + at, mask=mask, other=other).to(tl.float32)

    @triton.jit
    def _store_pair(ptr, width, at, mask, re, im):
        """The way back, in the type of the memory."""
        kind = ptr.dtype.element_ty
        tl.store(ptr + at, re.to(kind), mask=mask)
        tl.store(ptr + width + at, im.to(kind), mask=mask)


# %%
@triton.jit
def turned_alone(
    z_ptr, out_ptr, V_ptr, T, W, C: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, C)
    at = step[:, None] * W + tl.arange(0, N)[None, :]
    here = (step < T)[:, None]
    V = tl.load(V_ptr + step)
    re, im = _load_pair(z_ptr, N, at, here)
    re, im = _turned(re, im, tl.cos(V), tl.sin(V), PRECISION, EMULATE)
    _store_pair(out_ptr, N, at, here, re, im)


def turned(z, V, precision):
    out = torch.full(z.shape, 7.0, device=device)
    modes = {"PRECISION": precision, "EMULATE": _interpreted()}
    turned_alone[(1,)](z, out, V, T, W, C=C, N=N, **modes)
    return cut(out) if precision == "tf32" else out


T, C, N, W = 29, 32, 16, 40
V = torch.randn(C, device=device).cumsum(0)
for kind in (torch.float32, torch.bfloat16):
    z = torch.randn(C, W, device=device).to(kind)
    z[T:] = math.nan
    z_exact = unpair(z[:T, : 2 * N].double().cpu())
    wanted = z_exact * torch.exp(1j * V[:T].double().cpu())[:, None]
    for precision, bound in (("ieee", 1e-6), ("tf32", 4e-4), ("bf16", 3e-3)):
        out = turned(z, V, precision)
        assert relative_error(unpair(out[:T, : 2 * N].double()), wanted) < bound
        assert (out[T:] == 7).all() and (out[:, 2 * N :] == 7).all(), "nothing else"
        still = turned(z, 0 * V, precision)[:T, : 2 * N]
        unturned = z[:T, : 2 * N].float().reshape(-1)
        padded = F.pad(unturned, (0, 1024 - len(unturned)))
        assert torch.equal(still.reshape(-1), rounded(padded, precision)[: 29 * 32])

# %% [markdown]
# Stored in another type, in place of other numbers: `_store_pair` alone.


# %%
@triton.jit
def pair_alone(z_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    re, im = _load_pair(z_ptr, N, at, None)
    _store_pair(out_ptr, 2 * N, at, at < N - 3, im, re)


z = torch.randn(32, device=device)
out = torch.full((48,), 7, dtype=torch.float16, device=device)
pair_alone[(1,)](z, out, N=16)
assert torch.equal(out[:13], z[16:29].half()) and torch.equal(out[32:45], z[:13].half())
assert (out[13:32] == 7).all() and (out[45:] == 7).all()

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
# So carry $\bar E$ in place of $E$, and the conjugates are gone: the reverse has the
# very form of the forward, with $C$ for $B$ and $dy$ for $x$. What differs is the
# factor of a row, $e^{\Lambda_l}$ from the entry for $e^{\Lambda - \Lambda_s}$ to the
# end, and when the state turns by $V_{\text{last}}$. Turned, $\bar E$ is the conjugate
# of the $\tilde E$ of the first half: what the products of the backward read. So the
# caller turns it and stores it *then*, and no program that reads it has to. The
# magnitude and the turn of a row are one complex number. The state is a sum in float32,
# `acc` of the dot; only the operands are rounded.
#
# Where a document starts in the chunk, rows of other documents have the factor 0. That
# is not enough if one of them is NaN, so there the rows themselves become 0, and the
# state that arrived.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _turned_all(re, im, cos, sin):
        """A complex tile, all of it times cos + i sin."""
        return re * cos - im * sin, re * sin + im * cos

    @triton.jit
    def _chunk_sum(
        x, K_re, K_im, S_re, S_im, gates, BLOCK_C: tl.constexpr,
        REVERSE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """The (n, d) tile of a state, carried through one chunk that adds to it.

        Forward, S becomes e^L S + sum_s e^(L - L_s) B_s x_s with L_s the summed log
        decay and L its total. In reverse it is the conjugate of a gradient, turned by
        the angle of L already; it becomes |e^L| S + sum_l e^L_l C_l dy_l.
        """
        step = tl.arange(0, BLOCK_C)
        cos, sin, U, low, document = _read_gates(gates, step, BLOCK_C, HAS_RESET)
        cos_last, sin_last, U_last, low_last, last = _read_gates(
            gates, BLOCK_C - 1, BLOCK_C, HAS_RESET
        )
        keep = _from_entry(U_last, last)
        if HAS_RESET and last > 0:  # 0 times NaN is NaN, and must not be
            counts = (document == (0 if REVERSE else last))[:, None]
            x = tl.where(counts, x, 0.0)
            S_re, S_im = tl.zeros_like(S_re), tl.zeros_like(S_im)
            K_re, K_im = tl.where(counts, K_re, 0.0), tl.where(counts, K_im, 0.0)
        size, turn_re, turn_im = _from_entry(U, document), cos, sin
        if not REVERSE:  # to the end of the chunk
            S_re, S_im = _turned_all(S_re, S_im, cos_last, sin_last)
            size = _to_end(U, low, document, U_last, low_last, last, PRECISION)
            turn_re = tl.fma(cos_last, cos, sin_last * sin)
            turn_im = tl.fma(sin_last, cos, -(cos_last * sin))
        K_re, K_im = _turned(
            K_re, K_im, size * turn_re, size * turn_im, PRECISION, EMULATE
        )
        x = _operand(x, PRECISION, EMULATE)
        S_re = _dot(tl.trans(K_re), x, S_re * keep, PRECISION)
        S_im = _dot(tl.trans(K_im), x, S_im * keep, PRECISION)
        return S_re, S_im


# %% [markdown]
# One program, one chunk with a ragged end, every combination of direction and reset,
# against the formulas of the first half. The tile is a part of the state: 16 of 32
# rows.


# %%
@triton.jit
def chunk_sum_alone(
    x_ptr, K_ptr, gates_ptr, S_ptr, D: tl.constexpr, N: tl.constexpr, C: tl.constexpr,
    PART: tl.constexpr, REVERSE: tl.constexpr, HAS_RESET: tl.constexpr,
    EMULATE: tl.constexpr,
):  # fmt: skip
    step, d = tl.arange(0, C), tl.arange(0, D)
    n = N - PART + tl.arange(0, PART)
    x = tl.load(x_ptr + step[:, None] * D + d[None, :])
    K_re, K_im = _load_pair(K_ptr, N, step[:, None] * 2 * N + n[None, :], None)
    tile = n[:, None] * D + d[None, :]
    S_re, S_im = _load_pair(S_ptr, N * D, tile, None)
    S_re, S_im = _chunk_sum(
        x, K_re, K_im, S_re, S_im, gates_ptr, C, REVERSE, HAS_RESET, "ieee", EMULATE
    )
    _store_pair(S_ptr, N * D, tile, None, S_re, S_im)


T, D, N, C = 13, 16, 32, 16
for flagged in (False, True):
    head = random_head(T=T, D=D, N=N, documents=False)
    head.reset[4] = flagged
    dy = torch.randn_like(head.x)
    for reverse in (False, True):
        if reverse:
            V_last = chunk_factors(*head[1:5], head.reset)[1][-1]
            x, K, G = dy, head.C, head.G.conj() * torch.exp(1j * V_last)
            wanted = unpair(scan_backward(head, C, dy, pair(head.G))[1][0]).conj()
        else:
            x, K, G = head.x, head.B, head.G
            wanted = unpair(scan_forward(head, C)[1][-1])
        state = on_device(planes(pair(G)))
        before = state.clone()
        x, K = (on_device(F.pad(z, (0, 0, 0, C - T))) for z in (x, pair(K)))
        chunk_sum_alone[(1,)](
            x, K, on_device(gates_of(head, C)), state, D=D, N=N, C=C, PART=16,
            REVERSE=reverse, HAS_RESET=flagged, EMULATE=_interpreted(),
        )  # fmt: skip
        assert relative_error(state[:, 16:], planes(pair(wanted))[:, 16:]) < 5e-6
        assert torch.equal(state[:, :16], before[:, :16]), "the other part of the tile"

# %% [markdown]
# ## States between chunks
# There are two ways from one chunk to the next.
#
# - **Walk**: one program takes all chunks of a sequence and head in turn and keeps its
#   tile of the state in registers. It writes what enters each chunk, once. But $T / C$
#   steps follow each other, and there are only as many programs as tiles.
# - **Parallel**: one program per chunk writes what the chunk adds to a state of zero. A
#   second, light kernel passes the states along: one complex multiply-add per number
#   and chunk, and what enters a chunk is written in place of what it adds. The factor
#   that a chunk keeps is in its gates.
#
# Both call `_chunk_sum`, and `WALK` decides when compiling. A walk finds its gates
# ready; programs that take one chunk compute them, which saves a launch. The state is
# stored *before* the chunk is added: what *enters* it. In reverse the last chunk comes
# first, and what is stored is $\tilde E$, of the state that *leaves*.
# `_load_edge` and `_store_edge` are where a sequence begins and ends: there states are
# complex numbers as PyTorch has them, and gradients are no longer conjugates.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _load_edge(ptr, at, REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr):
        """A complex state, or the conjugate of a gradient; zero if there is none."""
        re, im = tl.zeros(at.shape, tl.float32), tl.zeros(at.shape, tl.float32)
        if HAS_EDGE:
            re, im = tl.load(ptr + 2 * at), tl.load(ptr + 2 * at + 1)
            if REVERSE:
                im = -im
        return re, im

    @triton.jit
    def _store_edge(ptr, at, re, im, REVERSE: tl.constexpr):
        """The way back."""
        if REVERSE:
            im = -im
        tl.store(ptr + 2 * at, re)
        tl.store(ptr + 2 * at + 1, im)

    @triton.jit
    def _store_gates(
        dt_ptr, A_ptr, reset_ptr, gates, step, here, W,
        BLOCK_C: tl.constexpr, HAS_RESET: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Gates of one chunk and head, by the program that reads them next."""
        dt = tl.load(dt_ptr + step * W, mask=here, other=0.0).to(tl.float32)
        fresh = _fresh(reset_ptr, step, here, HAS_RESET)
        A_re, A_im = tl.load(A_ptr), tl.load(A_ptr + 1)
        counts, document = here & (fresh == 0), tl.cumsum(fresh, 0)
        _, cos, sin, U, low = _gates(
            dt, counts, document, A_re, A_im, HAS_RESET, EMULATE
        )
        tl.store(gates + step, cos)
        tl.store(gates + BLOCK_C + step, sin)
        tl.store(gates + 2 * BLOCK_C + step, U)
        tl.store(gates + 3 * BLOCK_C + step, low)
        tl.store(gates + 4 * BLOCK_C + step, document.to(tl.float32))
        tl.debug_barrier()

    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _states_kernel(
        proj_ptr, A_ptr, reset_ptr, dy_ptr, gates_ptr, edge_ptr, states_ptr, out_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WALK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """States of one (batch, head), a (BLOCK_N, BLOCK_D) tile of them a program.

        WALK: one program takes all chunks in turn, from `edge` on; it stores the state
        that enters each, and the last one in `out`. Otherwise a program takes one chunk
        and stores what it adds to a zero state, for `_pass_kernel`; forward, it also
        computes the gates of its chunk. REVERSE: gradients, from the last chunk back.
        What is carried is their conjugate; what is stored, the gradient of the state
        that leaves a chunk, turned back to its start, where its keys are.
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
        step = tl.arange(0, BLOCK_C)
        proj_ptr += b.to(tl.int64) * T * W
        dy_ptr += b.to(tl.int64) * T * H * D
        reset_ptr += b.to(tl.int64) * T
        column, x_ptr, x_row = H * D, proj_ptr, W
        if REVERSE:
            column, x_ptr, x_row = H * (D + 2 * N), dy_ptr, H * D
        at = step[:, None] * W + column + h * N + n[None, :]
        x_at = step[:, None] * x_row + h * D + d[None, :]
        tile = n[:, None] * D + d[None, :]
        at_edge = sequence.to(tl.int64) * D * N + d[None, :] * N + n[:, None]
        S_re, S_im = _load_edge(edge_ptr, at_edge, REVERSE, WALK and HAS_EDGE)
        for i in range(start, stop):
            chunk = i
            if WALK and REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            first = chunk.to(tl.int64) * BLOCK_C
            here = (first + step < T)[:, None]
            gates, states = gates_ptr + index * 5 * BLOCK_C, index * 2 * N * D
            x = tl.load(x_ptr + first * x_row + x_at, mask=here, other=0.0)
            K_re, K_im = _load_pair(proj_ptr + first * W, H * N, at, here)
            if WALK and REVERSE:
                cos, sin, _, _, _ = _read_gates(gates, BLOCK_C - 1, BLOCK_C, False)
                S_re, S_im = _turned_all(S_re, S_im, cos, sin)
                _store_pair(states_ptr + states, N * D, tile, None, S_re, -S_im)
            elif WALK:
                _store_pair(states_ptr + states, N * D, tile, None, S_re, S_im)
            elif not REVERSE:
                _store_gates(
                    proj_ptr + first * W + H * (D + 4 * N) + h, A_ptr + 2 * h,
                    reset_ptr + first, gates, step, first + step < T, W, BLOCK_C,
                    HAS_RESET, EMULATE,
                )  # fmt: skip
            S_re, S_im = _chunk_sum(
                x, K_re, K_im, S_re, S_im, gates, BLOCK_C, REVERSE, HAS_RESET,
                PRECISION, EMULATE,
            )  # fmt: skip
            if not WALK:
                _store_pair(states_ptr + states, N * D, tile, None, S_re, S_im)
        if WALK:
            _store_edge(out_ptr, at_edge, S_re, S_im, REVERSE)

    @triton.jit
    def _passed_on(S_re, S_im, cos, sin, keep, added_re, added_im):
        """The state that leaves a chunk: what is left of the one before, and what came.

        cos, sin and keep: of the whole chunk.
        """
        # Written out: of two products in a sum a compiler may fuse either one, and not
        # the same one in the row kernel of notebook 09.
        re = tl.fma(S_re, cos, -(S_im * sin))
        im = tl.fma(S_re, sin, S_im * cos)
        return tl.fma(re, keep, added_re), tl.fma(im, keep, added_im)

    @triton.jit(do_not_specialize=["n_chunks"])
    def _pass_kernel(
        states_ptr, gates_ptr, edge_ptr, out_ptr, H, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
        REVERSE: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_RESET: tl.constexpr,
    ):  # fmt: skip
        """What enters each chunk, in place of what each chunk adds.

        Grid (B H, D N / BLOCK): a program passes BLOCK numbers of a state along.
        """
        sequence = tl.program_id(0)
        b, h = sequence // H, sequence % H
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # n D + d
        at_edge = sequence.to(tl.int64) * D * N + at % D * N + at // D
        S_re, S_im = _load_edge(edge_ptr, at_edge, REVERSE, HAS_EDGE)
        for i in tl.range(0, n_chunks, num_stages=4):
            chunk = i
            if REVERSE:
                chunk = n_chunks - 1 - i
            index = (b.to(tl.int64) * n_chunks + chunk) * H + h
            added_re, added_im = _load_pair(
                states_ptr + index * 2 * N * D, N * D, at, None
            )
            cos, sin, U, _, last = _read_gates(
                gates_ptr + index * 5 * BLOCK_C, BLOCK_C - 1, BLOCK_C, HAS_RESET
            )
            keep = _from_entry(U, last)
            stored = states_ptr + index * 2 * N * D
            if REVERSE:
                S_re, S_im = _turned_all(S_re, S_im, cos, sin)
                _store_pair(stored, N * D, at, None, S_re, -S_im)
            else:
                _store_pair(stored, N * D, at, None, S_re, S_im)
            if HAS_RESET:
                S_re = tl.where(last == 0, S_re, 0.0)
                S_im = tl.where(last == 0, S_im, 0.0)
            if REVERSE:
                S_re = tl.fma(S_re, keep, added_re)
                S_im = tl.fma(S_im, keep, added_im)
            else:
                S_re, S_im = _passed_on(S_re, S_im, cos, sin, keep, added_re, added_im)
        _store_edge(out_ptr, at_edge, S_re, S_im, REVERSE)


# %% [markdown]
# ## The launch table
# Every number that tunes a launch is here: sizes of tiles, warps, stages of the
# pipeline, registers, by kernel and precision, and the number of sequences times heads
# from which on walking is chosen. More precision takes more registers, so the tiles are
# smaller.
#
# *Why a limit on registers?* An SM has 65,536 of them. A program of 4 warps, 128
# threads, that takes the 255 a thread may have fits twice; with 168 it fits three
# times, and while one waits for memory, two others compute. Left alone the compiler
# takes what it can get.
#
# The chunk is a tile too, and `_chunk_of` cuts it where the one asked for is
# impossible.

# %% tags=["export"]
# (BLOCK_D, BLOCK_N, warps, stages, registers) of a kernel, by precision. A block is cut
# to what it is a part of; registers 0: as many as the compiler likes. "walk" and
# "chunks" are the two ways to the states.
_LAUNCH = {
    "walk": {
        "bf16": (64, 32, 4, 3, 0), "tf32": (64, 32, 4, 3, 0), "ieee": (32, 16, 8, 1, 0)
    },
    "chunks": {
        "bf16": (64, 64, 4, 1, 0), "tf32": (64, 32, 4, 1, 0), "ieee": (32, 16, 8, 1, 0)
    },
    "output": {
        "bf16": (0, 64, 4, 1, 168), "tf32": (0, 32, 4, 1, 168), "ieee": (0, 16, 8, 1, 0)
    },
    "backward": {
        "bf16": (0, 64, 4, 1, 168), "tf32": (0, 32, 4, 1, 0), "ieee": (0, 16, 8, 1, 0)
    },
    "strong": {
        "bf16": (0, 64, 4, 1, 0), "tf32": (0, 32, 4, 1, 0), "ieee": (0, 16, 8, 1, 0)
    },
}  # fmt: skip
# States of one sequence and head are walked in one program when there are enough of
# those to fill the device, and computed chunk by chunk when there are not.
_WALK_FROM = 96  # sequences times heads
_PASS_BLOCK, _GATE_HEADS = 256, 4
# Chunks and heads that one program looks through, and how many such programs to have.
_GROUP, _GROUPS = 16, 256


def _launch(kernel: str, precision: str, D: int, N: int) -> dict[str, int]:
    """Block sizes and launch parameters of a kernel."""
    block_d, block_n, warps, stages, registers = _LAUNCH[kernel][precision]
    options = {
        "BLOCK_N": min(block_n, N),
        "num_warps": warps,
        "num_stages": stages,
    }
    if block_d:
        options["BLOCK_D"] = min(block_d, D)
    if registers and max(D, N) <= 64:  # tiles that fit them
        options["maxnreg"] = registers
    return options


def _chunk_of(chunk_size: int, D: int, N: int, precision: str) -> int:
    """Steps per chunk in the kernels, at most those asked for.

    The chunk changes results by rounding only, and not every tile is possible: wide
    ones of float32 overflow shared memory, and Triton 3.6 multiplies 64 rows by fewer
    than 64 columns of bfloat16 wrongly when the rows come from registers.
    """
    if precision == "bf16":
        return min(chunk_size, 32) if min(D, N) < 64 else chunk_size
    return min(chunk_size, 64 if max(D, N) <= 64 else 32)


# %%
per_program = 128 * _LAUNCH["backward"]["bf16"][-1]
assert 65536 // per_program == 3 and 65536 // (128 * 255) == 2
for precision in ("ieee", "tf32", "bf16"):
    for C, D, N in itertools.product((16, 32, 64, 128), repeat=3):
        short = _chunk_of(C, D, N, precision)
        assert 16 <= short <= C and C % short == 0
        assert short == C or precision != "bf16" or min(D, N) < 64
assert _chunk_of(64, 64, 64, "bf16") == _chunk_of(64, 64, 64, "tf32") == 64

# %% [markdown]
# ## Started again
# A launch as Triton offers it, `kernel[grid](...)`, looks at every argument: its type,
# whether a pointer is a multiple of 16, whether a number is one, and whether something
# was compiled for all of that. Eight launches make a scan and its backward, and on a
# fast GPU looking takes longer than computing. What it looks up is returned, and can be
# started itself: `compiled[grid](...)`, then with the constants of the signature in
# their places. So only the first launch of a kind asks Triton; `_start` remembers the
# answer under all that the answer depends on. (Lengths are numbers that these kernels
# are not specialized on; the width of a row follows from the number of heads.)


# %% tags=["export"]
_COMPILED: dict[tuple, tuple] = {}  # what Triton found, and constants by position


def _start(kernel, grid: tuple, tensors: tuple, sizes: tuple, H: int, **constants):
    """Launch a kernel on the current device, which is that of its tensors.

    Args: tensors, sizes: what it takes first, in order. H: what the sizes that it is
        specialized on follow from. constants: what it is compiled for, and launch
        options.
    """
    known = [(z.dtype, z.data_ptr() % 16 == 0) for z in tensors]
    device = tensors[0].get_device()
    key = (kernel, H, device, *known, *constants.items())
    if found := _COMPILED.get(key):
        compiled, by_position = found
        compiled[grid](*tensors, *sizes, *by_position)
        return
    compiled = kernel[grid](*tensors, *sizes, **constants)
    if not _interpreted():
        names = kernel.arg_names[len(tensors) + len(sizes) :]
        _COMPILED[key] = compiled, [constants[name] for name in names]


def _too_large(D: int, N: int, C: int, error: Exception) -> KernelUnavailable:
    """What to say when this device cannot hold the tiles of a kernel."""
    return KernelUnavailable(
        f"ssd_fused: head_dim={D}, state_dim={N}, chunk_size={C} do not "
        f"fit this GPU ({error}). Use ssd_dispatch='pytorch' for this config."
    )


# %% [markdown]
# ## Walk or pass
# The host side of both directions: allocate, choose, launch. `edge` is what stands at
# the border: the initial state, or the gradient of the final one. And copy and carry
# are two things: in bf16 mode what chunks add, and what outputs and gradients read, is
# bfloat16, but what is carried from chunk to chunk never is.


# %% tags=["export"]
def _walks(batch: int, heads: int, n_chunks: int) -> bool:
    """Whether one program takes all chunks of a sequence and head."""
    return batch * heads >= _WALK_FROM or n_chunks == 1


def _new_gates(proj, A, reset, D, N, C, walk=None):
    """Gates of every chunk and head, (B, nc, H, 5, C), float32: cos V, sin V, U, what U
    lacks, and the resets so far in the chunk; not yet computed when chunks will do it.
    """
    batch, time, width = proj.shape
    H, n_chunks = A.shape[0], -(-time // C)
    gates = proj.new_empty(batch, n_chunks, H, 5, C, dtype=torch.float32)
    if _walks(batch, H, n_chunks) if walk is None else walk:
        _start(
            _gates_kernel, (batch * n_chunks, -(-H // _GATE_HEADS), 1),
            (proj, torch.view_as_real(A), proj if reset is None else reset, gates),
            (time, H, width, n_chunks), H, D=D, N=N, BLOCK_C=C, BLOCK_H=_GATE_HEADS,
            HAS_RESET=reset is not None, EMULATE=_interpreted(), num_warps=1,
        )  # fmt: skip
    return gates


def _states(proj, A, reset, gates, edge, dy, D, N, precision, reverse, walk=None):
    """The state entering every chunk and the last one; or, reversed, their gradients.

    Args: edge: the initial state, or the gradient of the final one, (B, H, D, N).
    dy: for the reverse. walk: which way to them; None for the faster one.

    Returns: (B, nc, H, 2, N, D), bfloat16 in bf16 mode, turned back to the start of the
        chunk if reversed; and float32 (B, H, D, N, 2).
    """
    batch, time, width = proj.shape
    n_chunks, H, _, C = gates.shape[1:]
    walk = _walks(batch, H, n_chunks) if walk is None else walk
    options = _launch("walk" if walk else "chunks", precision, D, N)
    parts = D // options["BLOCK_D"] * (N // options["BLOCK_N"])
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    states = proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind)
    out = proj.new_empty(batch, H, D, N, 2, dtype=torch.float32)
    edge_ptr = out if edge is None else torch.view_as_real(edge)
    _start(
        _states_kernel, (batch * H * parts * (1 if walk else n_chunks), 1, 1),
        (proj, torch.view_as_real(A), proj if reset is None else reset,
         proj if dy is None else dy, gates, edge_ptr, states, out),
        (time, H, width, n_chunks), H, D=D, N=N, BLOCK_C=C, WALK=walk,
        REVERSE=reverse, HAS_EDGE=edge is not None, HAS_RESET=reset is not None,
        PRECISION=precision, EMULATE=_interpreted(), **options,
    )  # fmt: skip
    if not walk:
        block = min(_PASS_BLOCK, D * N)
        _start(
            _pass_kernel, (batch * H, D * N // block, 1),
            (states, gates, edge_ptr, out), (H, n_chunks), H, D=D, N=N, BLOCK_C=C,
            BLOCK=block, REVERSE=reverse, HAS_EDGE=edge is not None,
            HAS_RESET=reset is not None,
        )  # fmt: skip
    return states, out


# %% [markdown]
# The test runs both ways in both directions, in all chunks of all sequences and heads,
# from fresh memory, against the first half. More properties: both ways give the same
# (in bf16 mode, but for the rounding of what chunks add); programs that take one chunk
# find no gates and leave them behind; and the bytes that the table above derived are
# those of the tensor.


# %%
def chunks_of(head, C):
    """Where each chunk lies in a head, and its factors."""
    for first in range(0, len(head.x), C):
        at = slice(first, first + C)
        own = (head.B[at], head.C[at], head.dt[at], head.reset[at])
        yield at, chunk_factors(head.A, *own)


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
            last[b, h] = unpair(states[0])
            angles = [-factors[1][-1] for _, factors in chunks_of(head, C)]
            states = [rotate(*z) for z in zip(states[1:], angles, strict=True)]
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
known = with_names(_new_gates, proj, A, flags, D, N, C, **ALWAYS)
exact = on_device(all_gates(inputs, D, N, C))
assert torch.allclose(known, exact, rtol=1e-5, atol=2e-5)
for direction, border in (("forward", initial), ("reverse", edge)):
    wanted = all_states(direction, inputs, D, N, C, dy, edge)
    reverse = direction == "reverse"
    for precision, bound in (("ieee", 5e-6), ("tf32", 1e-3), ("bf16", 8e-3)):
        results = []
        for names in (ALWAYS, NEVER):
            gates = known.clone()
            if names is NEVER and not reverse:
                gates.fill_(math.nan)
            arguments = proj, A, flags, gates, border, dy, D, N, precision, reverse
            got, last = with_names(_states, *arguments, **names)
            last = torch.view_as_complex(last)
            assert relative_error(got, wanted[0]) < bound, (direction, precision)
            assert relative_error(last, wanted[1]) < bound, (direction, precision)
            assert torch.allclose(gates, exact, rtol=1e-5, atol=2e-5)
            results.append((got, last))
        (walked, last), (passed, last_passed) = results
        close = bound if precision == "bf16" else min(bound, 1e-4)
        assert relative_error(last, last_passed) < close
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
#
# A row of $x$ that is not finite would spoil all rows of the product. In a chunk with
# several documents it is taken out, and its column of scores is NaN in its place: that
# column is masked where another document reads.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _output_kernel(
        proj_ptr, gates_ptr, states_ptr, y_ptr, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """y of one chunk and head: from its own tokens, and from the entering state.

        Grid (B nc H), heads fastest: neighbors read neighboring columns of one row.
        """
        h, chunk = tl.program_id(0) % H, tl.program_id(0) // H
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = (first + step < T)[:, None]
        token = (chunk // n_chunks).to(tl.int64) * T + first
        index = chunk.to(tl.int64) * H + h
        base, G_ptr = proj_ptr + token * W, states_ptr + index * 2 * N * D
        cos, sin, U, low, document = _read_gates(
            gates_ptr + index * 5 * BLOCK_C, step, BLOCK_C, HAS_RESET
        )
        Y = tl.zeros((BLOCK_C, D), tl.float32)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        for n0 in tl.static_range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            at = step[:, None] * W + h * N + n[None, :]
            tile = n[:, None] * D + d[None, :]
            B_re, B_im = _load_pair(base + H * D, H * N, at, here)
            C_re, C_im = _load_pair(base + H * (D + 2 * N), H * N, at, here)
            G_re, G_im = tl.load(G_ptr + tile), tl.load(G_ptr + N * D + tile)
            k_re, k_im = _turned(B_re, B_im, cos, -sin, PRECISION, EMULATE)
            # The conjugate: q is the real half and minus the imaginary one.
            q_re, q_im = _turned(C_re, -C_im, cos, -sin, PRECISION, EMULATE)
            G_re, G_im = _operands(G_re, G_im, PRECISION, EMULATE)
            M = _dot(q_re, tl.trans(k_re), M, PRECISION)
            M = _dot(q_im, tl.trans(k_im), M, PRECISION)
            Y = _dot(q_im, G_im, _dot(q_re, G_re, Y, PRECISION), PRECISION)
        x_at = step[:, None] * W + h * D + d[None, :]
        x = tl.load(base + x_at, mask=here, other=0.0)
        Y = Y * _from_entry(U, document)[:, None]
        if HAS_RESET and tl.max(document, 0) > 0:  # 0 times NaN is NaN, and must not be
            Y = tl.where((document == 0)[:, None], Y, 0.0)
            lost = x.to(tl.float32) * 0.0
            M += tl.sum(lost, 1)[None, :]  # a score of NaN, in the document of that x
            x = tl.where(lost == 0.0, x, 0.0)
        M = _decayed(M, U, low, document, BLOCK_C, HAS_RESET, PRECISION)
        x = _operand(x, PRECISION, EMULATE)
        Y = _dot(_operand(M, PRECISION, EMULATE), x, Y, PRECISION)
        y_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        tl.store(y_ptr + y_at, Y.to(y_ptr.dtype.element_ty), mask=here)


# %% [markdown]
# Tested alone: it gets gates and states from the first half, so an error here is an
# error of this kernel. The output starts as NaN, and a fence around it shows writes
# outside.

# %%
T, H, D, N, C = 45, 2, 16, 32, 16
proj, A, initial, reset = random_inputs(B=2, T=T, H=H, D=D, N=N)
for flagged in (False, True):
    flags = reset if flagged else torch.zeros_like(reset)
    inputs = proj, A, initial, flags
    states = all_states("forward", inputs, D, N, C, None, None)[0]
    y, fence_stands = poisoned(2, T, H, D)
    options = {"PRECISION": "ieee", "EMULATE": _interpreted(), "HAS_RESET": flagged}
    options |= _launch("output", "ieee", D, N)
    _output_kernel[(2 * 3 * H,)](
        proj, on_device(all_gates(inputs, D, N, C)), on_device(states), y, T, H,
        proj.shape[2], 3, D=D, N=N, BLOCK_C=C, **options,
    )  # fmt: skip
    assert fence_stands()
    for (b, h), head in heads_of(*inputs, D, N):
        assert relative_error(y[b, :, h], scan_forward(head, C)[0]) < 5e-6

# %% [markdown]
# ## The gradients
# The first half again, line by line; $\tilde E$ and $G$ are read, all else is computed
# from the columns and gates. *One program for a chunk and head?* It would hold $M$,
# $dM$, $dx$, the halves of $q$, $k$, $dq$ and $dk$. A tile of 64 by 64 in float32 takes
# 32 registers of each of 128 threads, and a thread has 255, with addresses and operands
# among them. What does not fit is spilled to memory. So the work is split by what is
# written, into three kinds of programs:
#
# | kind | reads | writes |
# |---|---|---|
# | queries | $x, dy, B, C, G$ | $dC$, of $dq = dM\, k + e \odot (dY\, G)$ |
# | keys | $x, dy, B, C, \tilde E$ | $dB$, of $dk = dM^\top q + w \odot (X \tilde E)$ |
# | inputs | $dy, B, C, \tilde E, G$ | $dX = P^\top dY + w \odot (k \tilde E^\top)$ |
#
# It costs one product more, $dY X^\top$ is computed twice, and a second rotation of $q$
# and $k$. Both $dM^\top$ and $P^\top$ stand on the *left* of the next product, where an
# accumulator can be used as it lies in registers; transposing one would lead through
# shared memory. So they are computed transposed from the start: $X\, dY^\top$ and
# $k q^\top$.
#
# The first two kinds also leave their parts of $du$ and $dv$, row by row: inner
# products with $q$ in a program that multiplies only $k$, and with $k$ in one that
# multiplies only $q$. For the pairs to cancel, both take the numbers that the *other*
# program's products read. `_as_read` says which: what a matrix unit cuts is cut here,
# too.
#
# And `STRONG` is for chunks with strong decay: $dM$ without its diagonal until the sums
# are done, then the diagonal, a matrix of its own, in a second product.
#
# *Why is $C$ loaded before the last product and not where it is used?* A sum over the
# columns of a tile needs a layout, and Triton takes that of the last source before it.
# After a load the two tiles of $dq$ would go through shared memory for each sum, as
# rows lie in far memory; after a product they are summed where they are.
#
# The queries. `G_re` and `G_im` come in as they are stored, and $e_l$ multiplies the
# rows of the product.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _diagonal(M, BLOCK_C: tl.constexpr):
        """The diagonal of a square tile, 0 elsewhere; or of a column, as a tile."""
        step = tl.arange(0, BLOCK_C)
        return tl.where(step[:, None] == step[None, :], M, 0.0)

    @triton.jit
    def _own_scores(
        dM, BLOCK_C: tl.constexpr, PRECISION: tl.constexpr, EMULATE: tl.constexpr
    ):
        """The diagonal of dM, as an operand."""
        own = tl.sum(_diagonal(dM, BLOCK_C), 1)
        return _operand(_diagonal(own[:, None], BLOCK_C), PRECISION, EMULATE)

    @triton.jit
    def _inner(d_re, d_im, z_re, z_im):
        """<d, z> and -<d, J z> of every row, z and d in halves."""
        return (
            tl.sum(d_re * z_re + d_im * z_im, 1),
            tl.sum(d_im * z_re - d_re * z_im, 1),
        )

    @triton.jit
    def _as_read(re, im, PRECISION: tl.constexpr):
        """Operands as the numbers that a product takes them for, in float32."""
        return (
            _cut(re.to(tl.float32), PRECISION == "tf32"),
            _cut(im.to(tl.float32), PRECISION == "tf32"),
        )

    @triton.jit
    def _query_gradients(
        base, dbase, x_at, dy_ptr, dy_at, G_ptr, gates, sums, h, H, W, here,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, STRONG: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """dC of one chunk and head, and its share of dU and dV."""
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        cos, sin, U, low, document = _read_gates(gates, step, BLOCK_C, HAS_RESET)
        grown = _from_entry(U, document)[:, None]
        x = _operand(tl.load(base + x_at, mask=here, other=0.0), PRECISION, EMULATE)
        dy = _operand(tl.load(dy_ptr + dy_at, mask=here, other=0.0), PRECISION, EMULATE)
        dM = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dM = _dot(dy, tl.trans(x), dM, PRECISION)
        if STRONG:
            own = _own_scores(dM, BLOCK_C, PRECISION, EMULATE)
        dM = _decayed_back(
            dM, U, low, document, BLOCK_C, False, STRONG, HAS_RESET, PRECISION, EMULATE
        )
        dM = _operand(dM, PRECISION, EMULATE)
        zero = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
        dU, dV = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
        for n0 in tl.static_range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            at = step[:, None] * W + h * N + n[None, :]
            tile = n[:, None] * D + d[None, :]
            B_re, B_im = _load_pair(base + H * D, H * N, at, here)
            k_re, k_im = _turned(B_re, B_im, cos, -sin, PRECISION, EMULATE)
            G_re, G_im = tl.load(G_ptr + tile), tl.load(G_ptr + N * D + tile)
            G_re, G_im = _operands(G_re, G_im, PRECISION, EMULATE)
            dq_re = _dot(dy, tl.trans(G_re), zero, PRECISION) * grown
            dq_re = _dot(dM, k_re, dq_re, PRECISION)
            dq_im = _dot(dy, tl.trans(G_im), zero, PRECISION) * grown
            C_re, C_im = _load_pair(base + H * (D + 2 * N), H * N, at, here)
            dq_im = _dot(dM, k_im, dq_im, PRECISION)
            q_re, q_im = _turned(C_re, -C_im, cos, -sin, PRECISION, EMULATE)
            u, v = _inner(dq_re, dq_im, *_as_read(q_re, q_im, PRECISION))
            dU, dV = dU + u, dV - v
            if STRONG:
                dq_re = _dot(own, k_re, dq_re, PRECISION)
                dq_im = _dot(own, k_im, dq_im, PRECISION)
            dC_re, dC_im = _turn(dq_re, -dq_im, cos, -sin)
            _store_pair(dbase + H * (D + 2 * N), H * N, at, here, dC_re, dC_im)
        tl.store(sums + step, dU)
        tl.store(sums + BLOCK_C + step, dV)


# %% [markdown]
# ### Of the keys
# The mirror image, with the rows of $dk$ in two parts: $P$ first, what the state
# carries on, and then all of $dk$ less that. In a chunk with strong decay the last row
# of the difference is 0, since nothing in the chunk comes after it, and is set to 0:
# there even the rounding of $P$ would count.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _key_gradients(
        base, dbase, x_at, dy_ptr, dy_at, E_ptr, gates, sums, h, H, W, here, seen,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, STRONG: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """dB of one chunk and head, and its share of dU and dV."""
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        cos, sin, U, low, document = _read_gates(gates, step, BLOCK_C, HAS_RESET)
        _, _, U_last, low_last, last = _read_gates(
            gates, BLOCK_C - 1, BLOCK_C, HAS_RESET
        )
        left = _to_end(U, low, document, U_last, low_last, last, PRECISION)[:, None]
        x = _operand(tl.load(base + x_at, mask=here, other=0.0), PRECISION, EMULATE)
        dy = _operand(tl.load(dy_ptr + dy_at, mask=here, other=0.0), PRECISION, EMULATE)
        dM = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dM = _dot(x, tl.trans(dy), dM, PRECISION)
        if STRONG:
            own = _own_scores(dM, BLOCK_C, PRECISION, EMULATE)
        dM = _decayed_back(
            dM, U, low, document, BLOCK_C, True, STRONG, HAS_RESET, PRECISION, EMULATE
        )
        dM = _operand(dM, PRECISION, EMULATE)
        zero = tl.zeros((BLOCK_C, BLOCK_N), tl.float32)
        dU, dV = tl.zeros((BLOCK_C,), tl.float32), tl.zeros((BLOCK_C,), tl.float32)
        kept_U, kept_V = dU, dV
        for n0 in tl.static_range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            at = step[:, None] * W + h * N + n[None, :]
            tile = n[:, None] * D + d[None, :]
            E_re, E_im = tl.load(E_ptr + tile), tl.load(E_ptr + N * D + tile)
            E_re, E_im = _operands(E_re, E_im, PRECISION, EMULATE)
            C_re, C_im = _load_pair(base + H * (D + 2 * N), H * N, at, here)
            q_re, q_im = _turned(C_re, -C_im, cos, -sin, PRECISION, EMULATE)
            B_re, B_im = _load_pair(base + H * D, H * N, at, here)
            k_re, k_im = _turned(B_re, B_im, cos, -sin, PRECISION, EMULATE)
            k_re, k_im = _as_read(k_re, k_im, PRECISION)
            dk_re = _dot(x, tl.trans(E_re), zero, PRECISION) * left
            dk_im = _dot(x, tl.trans(E_im), zero, PRECISION) * left
            u, v = _inner(dk_re, dk_im, k_re, k_im)
            kept_U, kept_V = kept_U + u, kept_V + v
            dk_re = _dot(dM, q_re, dk_re, PRECISION)
            dk_im = _dot(dM, q_im, dk_im, PRECISION)
            u, v = _inner(dk_re, dk_im, k_re, k_im)
            dU, dV = dU - u, dV - v
            if STRONG:
                dk_re = _dot(own, q_re, dk_re, PRECISION)
                dk_im = _dot(own, q_im, dk_im, PRECISION)
            dB_re, dB_im = _turn(dk_re, dk_im, cos, sin)
            _store_pair(dbase + H * D, H * N, at, here, dB_re, dB_im)
        dU, dV = dU + kept_U, dV + kept_V
        if STRONG:  # no step sees the last one, and here a rounding error would count
            dU, dV = tl.where(seen, dU, 0.0), tl.where(seen, dV, 0.0)
        tl.store(sums + step, dU)
        tl.store(sums + BLOCK_C + step, dV)
        tl.store(sums + 2 * BLOCK_C + step, kept_U)
        tl.store(sums + 3 * BLOCK_C + step, kept_V)


# %% [markdown]
# ### Of the inputs
# Besides $dx$, this kind computes $e_{\text{last}} \langle \tilde E, G \rangle$,
# because it is the one that reads $\tilde E$ without an $x$ or $dM$ to keep beside it.
# The last chunk is no exception: its $\tilde E$ is the gradient of the final state.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _total(z):
        """The sum of a tile."""
        return tl.sum(tl.sum(z, 1), 0)

    @triton.jit
    def _input_gradients(
        base, dbase, x_at, dy_ptr, dy_at, E_ptr, G_ptr, gates, totals, h, H, W, here,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """dx of one chunk and head, and the share in dU and dV of what passes it."""
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        cos, sin, U, low, document = _read_gates(gates, step, BLOCK_C, HAS_RESET)
        _, _, U_last, low_last, last = _read_gates(
            gates, BLOCK_C - 1, BLOCK_C, HAS_RESET
        )
        keep = _from_entry(U_last, last)
        dx = tl.zeros((BLOCK_C, D), tl.float32)
        M = tl.zeros((BLOCK_C, BLOCK_C), tl.float32)
        dU, dV = 0.0, 0.0
        for n0 in tl.static_range(0, N, BLOCK_N):
            n = n0 + tl.arange(0, BLOCK_N)
            at = step[:, None] * W + h * N + n[None, :]
            tile = n[:, None] * D + d[None, :]
            E_re, E_im = tl.load(E_ptr + tile), tl.load(E_ptr + N * D + tile)
            G_re, G_im = _load_pair(G_ptr, N * D, tile, None)
            dU += _total(E_re * G_re + E_im * G_im)
            dV += _total(E_im * G_re - E_re * G_im)
            E_re, E_im = _operands(E_re, E_im, PRECISION, EMULATE)
            B_re, B_im = _load_pair(base + H * D, H * N, at, here)
            k_re, k_im = _turned(B_re, B_im, cos, -sin, PRECISION, EMULATE)
            C_re, C_im = _load_pair(base + H * (D + 2 * N), H * N, at, here)
            q_re, q_im = _turned(C_re, -C_im, cos, -sin, PRECISION, EMULATE)
            M = _dot(k_re, tl.trans(q_re), M, PRECISION)
            M = _dot(k_im, tl.trans(q_im), M, PRECISION)
            dx = _dot(k_im, E_im, _dot(k_re, E_re, dx, PRECISION), PRECISION)
        dy = _operand(tl.load(dy_ptr + dy_at, mask=here, other=0.0), PRECISION, EMULATE)
        M = _decayed_back(
            M, U, low, document, BLOCK_C, True, False, HAS_RESET, PRECISION, EMULATE
        )
        dx = dx * _to_end(U, low, document, U_last, low_last, last, PRECISION)[:, None]
        dx = _dot(_operand(M, PRECISION, EMULATE), dy, dx, PRECISION)
        tl.store(dbase + x_at, dx.to(dbase.dtype.element_ty), mask=here)
        tl.store(totals, dU * keep)
        tl.store(totals + 1, dV * keep)


# %% [markdown]
# ### Side by side
# Three kinds in one launch: a program learns from its number which one it is. Heads
# count fastest and kinds next, so the three that read the same columns of the same
# chunk run at about the same time, and two of them find in the L2 cache what the first
# one fetched. In three launches one after the other they would find what the *end* of
# the launch before had left there. (Each branch is compiled into the same kernel, which
# has the registers of the largest: this is why all three had to become small.)
#
# *And the chunks with strong decay?* A branch for them would slow down all others: it
# takes registers, and time to step over. So they have a launch of their own, and the
# programs of the first one pass them by. In most models there are few or none: then a
# program of the second launch looks at 16 chunks and heads, and is done.

# %% tags=["export"]
if HAS_TRITON:
    # Nats. What is left on the diagonal is 1e-7 of it, and a gradient e^-2 of it.
    _STRONG = tl.constexpr(2.0)

    @triton.jit
    def _is_strong(gates_ptr, index, H, T, n_chunks, BLOCK_C: tl.constexpr):
        """Whether the steps of a chunk decay by more than _STRONG nats on average."""
        first = index // H % n_chunks * BLOCK_C
        at = index.to(tl.int64) * 5 * BLOCK_C
        U_last = tl.load(gates_ptr + at + 3 * BLOCK_C - 1)
        return U_last < tl.minimum(T - first, BLOCK_C) * -_STRONG

    @triton.jit
    def _chunk_gradients(
        proj_ptr, gates_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr, sums_ptr,
        totals_ptr, kind, index, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, STRONG: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """dC, dB or dx of one chunk and head."""
        h, chunk = index % H, index // H
        b, first = chunk // n_chunks, (chunk % n_chunks).to(tl.int64) * BLOCK_C
        step, d = tl.arange(0, BLOCK_C), tl.arange(0, D)
        here = (first + step < T)[:, None]
        token = b.to(tl.int64) * T + first
        index = index.to(tl.int64)
        base, dbase = proj_ptr + token * W, dproj_ptr + token * W
        x_at = step[:, None] * W + h * D + d[None, :]
        dy_at = (token * H + h) * D + step[:, None] * H * D + d[None, :]
        gates = gates_ptr + index * 5 * BLOCK_C
        sums = sums_ptr + index * 6 * BLOCK_C
        E_ptr = dstates_ptr + index * 2 * N * D
        G_ptr = states_ptr + index * 2 * N * D
        if kind == 0:
            _query_gradients(
                base, dbase, x_at, dy_ptr, dy_at, G_ptr, gates, sums, h, H, W, here,
                D, N, BLOCK_C, BLOCK_N, STRONG, HAS_RESET, PRECISION, EMULATE,
            )  # fmt: skip
        elif kind == 1:
            seen = first + step + 1 < tl.minimum(first + BLOCK_C, T)
            _key_gradients(
                base, dbase, x_at, dy_ptr, dy_at, E_ptr, gates, sums + 2 * BLOCK_C,
                h, H, W, here, seen, D, N, BLOCK_C, BLOCK_N, STRONG, HAS_RESET,
                PRECISION, EMULATE,
            )  # fmt: skip
        else:
            _input_gradients(
                base, dbase, x_at, dy_ptr, dy_at, E_ptr, G_ptr, gates,
                totals_ptr + index * 2, h, H, W, here, D, N, BLOCK_C, BLOCK_N,
                HAS_RESET, PRECISION, EMULATE,
            )  # fmt: skip

    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _backward_kernel(
        proj_ptr, gates_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr, sums_ptr,
        totals_ptr, T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """dC, dB or dx of one chunk and head, if its decay is not strong.

        Grid (B nc 3 H), heads fastest: the three kinds of programs of a chunk run side
        by side and find what the others have read in the cache.
        """
        program = tl.program_id(0)
        kind, index = program // H % 3, program // (3 * H) * H + program % H
        if not _is_strong(gates_ptr, index, H, T, n_chunks, BLOCK_C):
            _chunk_gradients(
                proj_ptr, gates_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr,
                sums_ptr, totals_ptr, kind, index, T, H, W, n_chunks, D, N, BLOCK_C,
                BLOCK_N, False, HAS_RESET, PRECISION, EMULATE,
            )  # fmt: skip

    @triton.jit(do_not_specialize=["T", "n_chunks", "group", "total"])
    def _strong_kernel(
        proj_ptr, gates_ptr, states_ptr, dstates_ptr, dy_ptr, dproj_ptr, sums_ptr,
        totals_ptr, T, H, W, n_chunks, group, total,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, GROUP: tl.constexpr, HAS_RESET: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """The same where it is: of `group` chunks and heads, at most GROUP.

        Grid (ceil(total / group), 3), total chunks times heads. Most of the time there
        is nothing to do, and few programs find that out sooner than many.
        """
        first = tl.program_id(0) * group
        one = tl.arange(0, GROUP)
        mine = tl.minimum(first + one, total - 1)
        strong = _is_strong(gates_ptr, mine, H, T, n_chunks, BLOCK_C)
        if tl.max((strong & (one < group)).to(tl.int32), 0) > 0:
            for i in range(tl.minimum(group, total - first)):
                index = first + i
                if _is_strong(gates_ptr, index, H, T, n_chunks, BLOCK_C):
                    _chunk_gradients(
                        proj_ptr, gates_ptr, states_ptr, dstates_ptr, dy_ptr,
                        dproj_ptr, sums_ptr, totals_ptr, tl.program_id(1), index, T, H,
                        W, n_chunks, D, N, BLOCK_C, BLOCK_N, True, HAS_RESET, PRECISION,
                        EMULATE,
                    )  # fmt: skip


# %% [markdown]
# Alone again, with gates, states and their gradients from the first half. $dx$, $dB$,
# $dC$ and the sums are to be right, the columns of $dt$ stay NaN, nothing else is
# written. Once with resets, once with a gradient of the final state; and the second
# head decays so much that it is for the second launch.


# %%
def all_sums(inputs, D, N, C, dy, edge):
    """U and V of queries, keys and what the state keeps of them, (B, nc, H, 6, C); and
    of what passes a chunk, (B, nc, H, 2)."""
    sums, totals = [], []
    for (b, h), head in heads_of(*inputs, D, N):
        dy_head, E = dy[b, :, h].double().cpu(), pair(edge[b, h].cpu()).double()
        states = scan_forward(head, C)[1]
        leaving = scan_backward(head, C, dy_head, E)[1][1:]
        for (at, factors), E, G in zip(
            chunks_of(head, C), leaving, states, strict=False
        ):
            step, V, q, k, L, entry, left = factors
            x, dY, back = head.x[at], dy_head[at], rotate(E, -V[-1])
            if (step * head.A.real).mean() < -2:
                L = L.tril(-1)
            dM, to_state = (dY @ x.mT) * L, left * (x @ back)
            dq, inside = dM @ k + entry * (dY @ G), dM.mT @ q
            rows = [dq * q, dq * J(q), -inside * k, inside * J(k)]
            rows += [to_state * k, -to_state * J(k)]
            sums.append(F.pad(torch.stack(rows).sum(-1), (0, C - len(x))))
            passing = back * G, back * -J(G)
            totals.append(torch.stack([entry[-1, 0] * z.sum() for z in passing]))
    shape = len(inputs[0]), len(inputs[1]), -1
    stacked = (torch.stack(z).unflatten(0, shape) for z in (sums, totals))
    return [z.transpose(1, 2) for z in stacked]


CASES = {}
dy = torch.randn(2, T, H, D, device=device)
A.real[1] = -6
for flagged, ends in ((False, True), (True, False)):
    flags = reset if flagged else torch.zeros_like(reset)
    edge = torch.randn_like(initial) * ends
    inputs = proj, A, initial, flags
    states, _ = all_states("forward", inputs, D, N, C, dy, edge)
    dstates, _ = all_states("reverse", inputs, D, N, C, dy, edge)
    dproj, dproj_fence = poisoned(*proj.shape)
    sums, sums_fence = poisoned(2, 3, H, 6, C)
    totals, totals_fence = poisoned(2, 3, H, 2)
    read = [on_device(z) for z in (all_gates(inputs, D, N, C), states, dstates)]
    options = {"PRECISION": "ieee", "EMULATE": _interpreted(), "HAS_RESET": flagged}
    options |= _launch("backward", "ieee", D, N) | {"D": D, "N": N, "BLOCK_C": C}
    arguments = proj, *read, dy, dproj, sums, totals, T, H, proj.shape[2], 3
    _backward_kernel[(2 * 3 * 3 * H,)](*arguments, **options)
    assert sums[:, :, 1].isnan().all() and not sums[:, :, 0].isnan().any()
    total, group = 2 * 3 * H, 5
    grid = -(-total // group), 3
    _strong_kernel[grid](*arguments, group, total, GROUP=16, **options)
    assert dproj_fence() and sums_fence() and totals_fence()
    wanted = all_sums(inputs, D, N, C, dy, edge)
    CASES[flagged] = edge, *wanted
    for got, truth in zip((sums, totals), wanted, strict=True):
        assert relative_error(got, truth) < 1e-5
    dx, dB_re, dB_im, dC_re, dC_im, ddt = cut_columns(dproj, H, D, N)
    dB, dC = torch.complex(dB_re, dB_im), torch.complex(dC_re, dC_im)
    assert ddt.isnan().all()
    for (b, h), head in heads_of(*inputs, D, N):
        E = pair(edge[b, h].cpu()).double()
        truth, _ = scan_backward(head, C, dy[b, :, h].double().cpu(), E)
        for mine, theirs in zip((dx, dB, dC), (truth[0], *truth[2:4]), strict=True):
            assert relative_error(mine[b, :, h], theirs) < 1e-5

# %% [markdown]
# ### Of the steps
# $d(dt)$ needs sums from all three kinds, so it is the one thing that none of them can
# finish. A small kernel adds their parts as in "A difference that cancels": queries and
# keys from the end of the chunk, what the state keeps from its start, each key read by
# the step after it. Then it follows the chain to $d(dt)$ and to the chunk's share of
# $dA$. Like the gates it takes several heads at once, and $\Delta$ is computed again:
# it is cheaper than to keep it.
#
# The sums from the end start anew at every boundary. One sum over the whole chunk
# holds, for a step of the first document, the queries of the second one less its keys:
# 0 on paper, and what rounding leaves of it in float32. A boundary is a reset, or a
# step so long that its factor is 0.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit(do_not_specialize=["T", "n_chunks"])
    def _steps_kernel(
        proj_ptr, A_ptr, reset_ptr, sums_ptr, totals_ptr, dproj_ptr, dA_ptr,
        T, H, W, n_chunks,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
        HAS_RESET: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """ddt of one chunk and BLOCK_H heads, and their share of dA.

        Grid (B nc, H / BLOCK_H).
        """
        chunk = tl.program_id(0)
        h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        first = (chunk % n_chunks).to(tl.int64) * BLOCK_C
        token = (chunk // n_chunks).to(tl.int64) * T + first
        step = tl.arange(0, BLOCK_C)
        here, known = first + step < T, h < H
        at = (token + step[:, None]) * W + H * (D + 4 * N) + h[None, :]
        mask = here[:, None] & known[None, :]
        dt = tl.load(proj_ptr + at, mask=mask, other=0.0).to(tl.float32)
        A_re = tl.load(A_ptr + 2 * h, mask=known, other=0.0)[None, :]
        A_im = tl.load(A_ptr + 2 * h + 1, mask=known, other=0.0)[None, :]
        fresh = _fresh(reset_ptr + token, step, here, HAS_RESET)
        delta = _softplus(dt, EMULATE)
        # At a reset, past the end and where all is forgotten there is no gradient.
        smooth = (here & (fresh == 0))[:, None] & (delta * A_re >= _LEAST)
        index = chunk.to(tl.int64) * H + h
        own = index[None, :] * 6 * BLOCK_C + step[:, None]
        exists = known[None, :] & (step >= 0)[:, None]
        du, dv = _load_pair(sums_ptr, BLOCK_C, own, exists)
        from_keys = _load_pair(sums_ptr + 2 * BLOCK_C, BLOCK_C, own, exists)
        du, dv = du + from_keys[0], dv + from_keys[1]
        last = _load_pair(totals_ptr, 1, 2 * index, known)
        # A step is part of every later sum of its document in the chunk.
        document = tl.cumsum((here[:, None] & ~smooth).to(tl.int32), 0)
        du, _ = tl.associative_scan((du, document), 0, _in_document, reverse=True)
        dv, _ = tl.associative_scan((dv, document), 0, _in_document, reverse=True)
        before = exists & (step > 0)[:, None]
        kept = _load_pair(sums_ptr + 4 * BLOCK_C - 1, BLOCK_C, own, before)
        du += tl.cumsum(kept[0], 0) + last[0][None, :]
        dv += tl.cumsum(kept[1], 0) + last[1][None, :]
        ddt = (du * A_re + dv * A_im) * tl.sigmoid(dt)
        ddt = tl.where(smooth, ddt, 0.0)
        tl.store(dproj_ptr + at, ddt.to(dproj_ptr.dtype.element_ty), mask=mask)
        delta = tl.where(smooth, delta, 0.0)
        tl.store(dA_ptr + 2 * index, tl.sum(delta * du, 0), mask=known)
        tl.store(dA_ptr + 2 * index + 1, tl.sum(delta * dv, 0), mask=known)


# %% [markdown]
# The same again: sums from the first half, NaN in every other column, and a program for
# four heads where there are two.

# %%
for flagged in (False, True):
    flags = reset if flagged else torch.zeros_like(reset)
    edge, sums, totals = CASES[flagged]
    inputs = proj, A, initial, flags
    dproj, dproj_fence = poisoned(*proj.shape)
    shares, shares_fence = poisoned(2 * 3, H, 2)
    only_dt = torch.full_like(proj, math.nan)
    only_dt[..., -H:] = proj[..., -H:]
    _steps_kernel[(2 * 3, 1)](
        only_dt, torch.view_as_real(A), flags.view(torch.uint8), on_device(sums),
        on_device(totals), dproj, shares, T, H, proj.shape[2], 3, D=D, N=N, BLOCK_C=C,
        BLOCK_H=_GATE_HEADS, HAS_RESET=flagged, EMULATE=_interpreted(),
    )  # fmt: skip
    assert dproj_fence() and shares_fence() and dproj[..., :-H].isnan().all()
    dA_wanted = torch.zeros(H, dtype=torch.complex128)
    for (b, h), head in heads_of(*inputs, D, N):
        E = pair(edge[b, h].cpu()).double()
        truth, _ = scan_backward(head, C, dy[b, :, h].double().cpu(), E)
        ddt = dproj[b, :, h - H].cpu()
        assert relative_error(ddt, truth[4]) < 1e-5
        assert (ddt[head.reset] == 0).all()
        dA_wanted[h] += truth[1]
    assert relative_error(torch.view_as_complex(shares.sum(0)), dA_wanted) < 1e-5

# %% [markdown]
# ## Two operators
# Autograd, `torch.compile`, checkpointing and autocast all look at *operators*. A
# Python function that launches kernels is a wall for them; notebook 05 had to declare
# its call off limits. `torch.library.custom_op` makes an operator of it: a schema, what
# it computes, and a **fake** version that knows shapes and types alone, from which a
# compiler plans.
#
# The operator returns $y$, the final states, and two things that only the backward
# reads: the states that enter each chunk, and the gates. An output may not be a view of
# an input, and no input is changed.


# %% tags=["export"]
def _as_it_lies(z: Tensor | None) -> Tensor | None:
    """z in memory as a kernel reads it: in order, no conjugate or sign left to do."""
    if z is None or (z.is_contiguous() and not (z.is_conj() or z.is_neg())):
        return z
    return z.resolve_conj().resolve_neg().contiguous()


def _forward(
    proj, A, initial_states, reset, head_dim, state_dim, chunk, precision, walk=None
):
    """y, the final states; and for the backward the states entering each chunk and the
    gates.
    """
    batch, time, width = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    proj, A, edge = map(_as_it_lies, (proj, A, initial_states))
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    y = proj.new_empty(batch, time, H, D)
    try:
        with torch.cuda.device_of(proj):
            gates = _new_gates(proj, A, flags, D, N, chunk, walk)
            states, final = _states(
                proj, A, flags, gates, edge, None, D, N, precision, False, walk
            )
            n_chunks = states.shape[1]
            _start(
                _output_kernel, (n_chunks * batch * H, 1, 1), (proj, gates, states, y),
                (time, H, width, n_chunks), H, D=D, N=N, BLOCK_C=chunk,
                HAS_RESET=reset is not None, PRECISION=precision,
                EMULATE=_interpreted(), **_launch("output", precision, D, N),
            )  # fmt: skip
    except triton.OutOfResources as error:
        raise _too_large(D, N, chunk, error) from error
    return y, torch.view_as_complex(final), states, gates


_ssd_fused = torch.library.custom_op(
    "mamba3lite::ssd_fused",
    _forward,
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? initial_states, Tensor? reset, int head_dim, "
        "int state_dim, int chunk, str precision, bool? walk=None) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_ssd_fused.register_fake
def _fake_ssd_fused(
    proj, A, initial_states, reset, head_dim, state_dim, chunk, precision, walk=None
):
    batch, time, _ = proj.shape
    D, N, H = head_dim, state_dim, A.shape[0]
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    n_chunks = -(-time // chunk)
    return (
        proj.new_empty(batch, time, H, D),
        A.new_empty(batch, H, D, N),
        proj.new_empty(batch, n_chunks, H, 2, N, D, dtype=kind),
        proj.new_empty(batch, n_chunks, H, 5, chunk, dtype=torch.float32),
    )


# %% [markdown]
# The backward is an operator of its own, so that a compiler can plan it too. It writes
# *one* gradient with the layout of the columns, which goes straight into the backward
# of the projection. $dA$ has one share per chunk, summed in a fixed order: adding from
# many programs at once, with atomics, would be a different sum each time.


# %% tags=["export"]
def _backward(
    proj, A, reset, states, gates, dy, dfinal, head_dim, state_dim, precision
):
    """Gradients of proj, A and the initial states."""
    time, width = proj.shape[1:]
    D, N = head_dim, state_dim
    batch, n_chunks, H, _, C = gates.shape
    proj, A, dy, dfinal = map(_as_it_lies, (proj, A, dy, dfinal))
    flags = None if reset is None else reset.contiguous().view(torch.uint8)
    dproj = torch.empty_like(proj)
    sums = gates.new_empty(batch, n_chunks, H, 6, C)
    totals, shares = sums.new_empty(2, batch * n_chunks, H, 2).unbind()
    shape = {"D": D, "N": N, "BLOCK_C": C, "HAS_RESET": reset is not None}
    shape["EMULATE"] = _interpreted()
    sizes = time, H, width, n_chunks
    try:
        with torch.cuda.device_of(proj):
            dstates, dinitial = _states(
                proj, A, flags, gates, dfinal, dy, D, N, precision, True
            )
            tensors = proj, gates, states, dstates, dy, dproj, sums, totals
            total = batch * n_chunks * H
            _start(
                _backward_kernel, (3 * total, 1, 1), tensors, sizes, H, **shape,
                PRECISION=precision, **_launch("backward", precision, D, N),
            )  # fmt: skip
            group = max(1, min(_GROUP, total // _GROUPS))
            _start(
                _strong_kernel, (-(-total // group), 3, 1), tensors,
                (*sizes, group, total), H, **shape, GROUP=_GROUP,
                PRECISION=precision, **_launch("strong", precision, D, N),
            )  # fmt: skip
            _start(
                _steps_kernel, (batch * n_chunks, -(-H // _GATE_HEADS), 1),
                (proj, torch.view_as_real(A), proj if reset is None else flags, sums,
                 totals, dproj, shares), sizes, H, **shape, BLOCK_H=_GATE_HEADS,
                num_warps=1,
            )  # fmt: skip
    except triton.OutOfResources as error:
        raise _too_large(D, N, C, error) from error
    return dproj, torch.view_as_complex(shares.sum(0)), torch.view_as_complex(dinitial)


_ssd_fused_backward = torch.library.custom_op(
    "mamba3lite::ssd_fused_backward",
    _backward,
    mutates_args=(),
    schema=(
        "(Tensor proj, Tensor A, Tensor? reset, Tensor states, Tensor gates, "
        "Tensor dy, Tensor? dfinal, int head_dim, int state_dim, str precision) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)


@_ssd_fused_backward.register_fake
def _fake_ssd_fused_backward(
    proj, A, reset, states, gates, dy, dfinal, head_dim, state_dim, precision
):
    dinitial = A.new_empty(len(proj), *A.shape, head_dim, state_dim)
    return proj.new_empty(proj.shape), A.new_empty(A.shape), dinitial


# %% [markdown]
# And their connection. Without `set_materialize_grads(False)` an unused final state
# would cost a tensor of zeros, and its pass.


# %% tags=["export"]
def _save(ctx, inputs, output):
    proj, A, initial_states, reset, head_dim, state_dim, _, precision, *_ = inputs
    ctx.options = head_dim, state_dim, precision
    ctx.has_initial = initial_states is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(proj, A, reset, *output[2:])


def _differentiate(ctx, dy, dfinal, _dstates, _dgates, backward=_ssd_fused_backward):
    proj, A, reset, states, gates = ctx.saved_tensors
    if dy is None:
        dy = proj.new_zeros(*proj.shape[:2], A.shape[0], ctx.options[0])
    dproj, dA, dinitial = backward(
        proj, A, reset, states, gates, dy, dfinal, *ctx.options
    )
    return dproj, dA, dinitial if ctx.has_initial else None, *[None] * 6


_ssd_fused.register_autograd(_differentiate, setup_context=_save)


# %% [markdown]
# An operator has its price: every call is dispatched several times, through Python, so
# that whoever asks can watch it. When nobody watches, because nothing compiles and no
# mode looks at operators, the same two functions are connected by a plain
# `autograd.Function`.


# %% tags=["export"]
class _Unwatched(torch.autograd.Function):
    # One method, not `setup_context` beside it: that one costs a look at signatures.
    @staticmethod
    def forward(ctx, *inputs):
        outputs = _forward(*inputs)
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        # A second derivative has no formula, and the operator says so.
        run = _ssd_fused_backward if torch.is_grad_enabled() else _backward
        return _differentiate(ctx, *gradients, backward=run)


def _watched(proj: Tensor) -> bool:
    """Whether a compiler, a tracer or a mode has to see an operator."""
    return (
        torch.compiler.is_compiling()
        or type(proj) not in (Tensor, torch.nn.Parameter)
        or is_in_torch_dispatch_mode()
    )


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
    walk: bool | None = None,
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
        chunk_size: 16, 32, 64 or 128, the longest chunk that the kernels take; where
            such a tile is impossible theirs are shorter. T need not be a multiple.
        precision: operands of the products: "tf32" (also None), "bf16", or "ieee" for
            float32.
            Sums, exponentials and states are float32 in all of them; in "bf16" mode the
            copies of the states that outputs and gradients read are bfloat16.
        initial_states: the state before the first token; zero when None.
        return_final_states: also return the state after the last token, complex64.
        reset: True where a document starts: the state arriving there is dropped.
        walk: the way to the states in the forward pass: one program for all chunks of a
            head, or one for each chunk; None for the faster. They round differently.

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
    chunk = _chunk_of(chunk_size, head_dim, state_dim, precision)
    run = _ssd_fused if _watched(proj) else _Unwatched.apply
    y, final_states, _, _ = run(
        *(proj, A, initial_states, reset),
        *(head_dim, state_dim, chunk, precision, walk),
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
proj_1, A_1, initial_1 = (z.detach() for z in leaves)
forward_of = proj_1, A_1, initial_1, small[3], 16, 16, 16, "tf32"
y, _, *for_backward = _ssd_fused(*forward_of)
arguments = proj_1, A_1, small[3], *for_backward, y, None, 16, 16, "tf32"
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
# How many launches are there? A stand-in for `_start` notes each.


# %%
def noting(kernel, *arguments, started=_start, **constants):
    noted.append(kernel.__name__)
    started(kernel, *arguments, **constants)


noted, seen = [], set()
for way, most in ((ALWAYS, 4), (NEVER, 5)):
    noted.clear()
    with_names(fused_gradients, inputs, dy, dfinal, "tf32", **way, _start=noting)
    seen |= set(noted)
    forward = 1 + noted.index("_output_kernel")
    print(forward, "launches forward,", len(noted) - forward, "backward, and a sum")
    assert forward == 3 and len(noted) - forward == most
kinds = ("gates", "states", "pass", "output", "backward", "strong", "steps")
assert seen == {f"_{kind}_kernel" for kind in kinds}

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
    options = _launch("walk" if walk else "chunks", "bf16", D, N)
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
for walk, parallel in table.values():
    assert parallel[0] > 3 * walk[0] and parallel[2] > 1.2 * walk[2]
assert table[1, 2048][0][0] == table[1, 32768][0][0], "length fills nothing"
assert table[1, 32768][0][0] < table[8, 2048][0][0]

# %% [markdown]
# Both ways are one kernel, so the choice costs a number in the launch table and no
# second implementation. (A chain of chunks in a single pass, each program waiting for
# its neighbor, would have both advantages. It needs programs that talk to each other
# while they run, and care about the order in which they start; we have not built it.)
#
# ## What it gains
# *Measured* on an H200 (`docs/benchmarks/h200-fused.json`): what a block of the model
# asks for, from the bfloat16 output of `in_proj` to $y$ in bfloat16, at the shape of
# the table above. The bar under each is the floor of its precision: every input read
# once and every output written once at the copy rate of that device, or the products at
# its matmul rate, whichever takes longer.

# %%
fused = json.loads((folder / "h200-fused.json").read_text())
shown = [("pytorch", "tf32"), ("triton", "tf32"), ("fused", "tf32"), ("fused", "bf16")]
timed = {
    (row["version"], row["precision"]): row
    for row in fused["rows"]
    if row["part"] == "block_bf16"
}
labels = ["notebook 03\nin PyTorch", "notebook 05\nper chunk"]
labels += ["this page\ntf32", "this page\nbf16"]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
for axis, name in zip(axes, ("forward", "forward_backward"), strict=True):
    rows = [timed[key] for key in shown]
    ms = [row[f"{name}_ms"]["median"] for row in rows]
    floor = [row[f"{name}_floor_ms"] for row in rows]
    bars = axis.bar(range(4), ms, color=[PINK, BLUE, ORANGE, GREEN], width=0.6)
    axis.bar(range(4), floor, color="black", width=0.6)
    axis.bar_label(bars, [f"{value:.2f} ms" for value in ms], padding=2)
    axis.set(xticks=range(4), yscale="log", ylim=(0.02, 20), ylabel="ms")
    axis.set_xticklabels(labels)
    title = {"forward": "forward", "forward_backward": "with backward"}[name]
    axis.set_title(f"{title}; black: the floor")
plt.show()
scan = timed["fused", "bf16"]
for name in ("forward", "forward_backward"):
    plain, ours = (row[f"{name}_ms"]["median"] for row in (timed[shown[0]], scan))
    gain, share = plain / ours, scan[f"{name}_floor_ms"] / ours
    print(f"{name}: {gain:.0f} times as fast as PyTorch, {share:.0%} of the floor")
    assert gain > 10 and share < 1

# %% [markdown]
# Where is the rest? The floor counts the projection and $y$. The states that enter the
# chunks, written once and read twice, are as many bytes again; and the rows of the
# projection, 10,272 bytes long, start off a 128-byte line three times in four, so that
# lines at both ends of a piece are fetched for a part of them.
#
# ## What breaks: carrying a rounded state
# In bf16 mode the states that outputs read are stored in bfloat16: one rounding, as of
# every other operand. It is tempting to carry that copy on to the next chunk. Then the
# rounding of *every* chunk is carried too, and a state that forgets slowly adds them
# all up. Worse, what a chunk adds to a large state may be less than half a unit of
# bfloat16, and is lost. What chunks *add* may be rounded, as on the parallel way: each
# error is in proportion to what is added, and later ones do not depend on it. Emulated:
# real states, float64 but for the rounding.

# %%
chunks, keep = 512, math.exp(-1e-4 * 64 * 0.8)  # 64 steps at the slowest decay
added = torch.randn(chunks, 512, dtype=torch.float64) + 0.2
exact = carried = summed = torch.zeros(512, dtype=torch.float64)
of_copy, of_carry, of_added = [], [], []
for S in added:
    exact = keep * exact + S
    carried = bf16(keep * carried + S)
    summed = keep * summed + bf16(S)
    of_copy.append(relative_error(bf16(exact), exact))
    of_carry.append(relative_error(carried, exact))
    of_added.append(relative_error(summed, exact))
assert max(of_added) < 3e-3, "nor here"
assert max(of_copy) < 3e-3, "one rounding, however long the sequence"
assert of_carry[-1] > 5 * of_copy[-1] and of_carry[-1] > 2 * of_carry[15]

# %%
figure, axis = plt.subplots(figsize=(7.2, 2.6))
shown = range(0, chunks, 8)
axis.semilogy(shown, of_carry[::8], color=RED, label="bfloat16 carried")
axis.semilogy(shown, of_copy[::8], color=BLUE, ls="--", label="a bfloat16 copy read")
axis.semilogy(shown, of_added[::8], color=BLACK, ls=":", label="bfloat16 added")
axis.set(xlabel="chunk", ylabel="error of the state, by norm [1]", ylim=(1e-4, 3e-2))
axis.set_title("Round what is read or added, never what is carried")
axis.legend(fontsize=8, ncols=3, loc="lower left")
plt.show()

# %% [markdown]
# ## Pitfalls
# - **The term of the last position.** Without it four gradients are perfect, and $dt$
#   and $A$ learn something else.
# - **A chunk's keys belong to its start, its state to its end.** Turn the sum by
#   $V_{\text{last}}$, and the gradient of the state back.
# - **Count angles in turns, and add integers.** Sums of floats lose digits.
# - **$\log(1 + e^{dt})$ is zero** for small steps. Use the series.
# - **A reset is a mask**, not a log decay of $-\infty$: that minus itself is NaN.
# - **Steps past the end** neither decay nor turn. A padded $dt$ of 0 would.
# - **Give back what matrix units cut**, half a unit on average. And let NaN through.
# - **Round the copy, carry float32.**
# - **What is carried back is a conjugate.** At the border it has to be turned around.
# - **What cancels on paper must cancel in bits**: the same rounding on both sides, or
#   it is not computed at all.
# - **Compute once what many programs need**, if it is few bytes and many instructions.
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
