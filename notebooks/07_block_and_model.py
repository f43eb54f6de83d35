# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:transformer"]
# # A block, and a language model
# The language model from its parts: a head mixer, the Mamba-3-Lite block, and a stack
# of blocks between an embedding and an output head. The scan of notebooks 01 to 03 is a
# sequence layer; here it becomes a model that assigns a probability to the next token.
#
# **After this notebook you can**
#
# - write RMSNorm and SwiGLU from memory, and say what each leaves out;
# - say which of the 5,136 columns of the input projection feeds what, and prove it;
# - count the 433,662,400 parameters of the default model by hand, to the last unit;
# - train on a vocabulary of 50,257 without ever holding the logits of a batch;
# - pack documents into one row so that nothing leaks between them, and continue a
#   sequence from its state alone.
#
# **You need** the chunkwise scan of
# [notebook 03](03_chunkwise_ssd.ipynb); from PyTorch, `nn.Module` and autograd.
#
# **It takes** about 20 seconds to run on two CPU cores, and about ninety
# minutes to read with care.
#
# **Its exported cells build** five modules: `config.py`, `mimo.py`, `row_kernels.py`,
# `mamba_block.py` and `transformer.py`, all in `mamba3lite/models`. Where an exported
# cell imports from another of the five, it gets the same code from the package.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %%
import math
import warnings

import matplotlib.pyplot as plt
import torch.nn.functional as F
from IPython.display import SVG
from torch import nn

torch.set_num_threads(1)  # the tensors here are small: a second thread costs time
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"  # Okabe and Ito's palette, which
GREEN, BLUE, RED = "#009E73", "#0072B2", "#D55E00"  # all kinds of eyes tell apart
plt.rcParams.update(
    {
        "figure.dpi": 60,
        "figure.constrained_layout.use": True,
        "figure.facecolor": "white",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "font.size": 9.5,
    }
)


def distance(got, expected):
    """How far two tensors are apart, relative to the norm of the expected one."""
    return ((got - expected).norm() / expected.norm()).item()


# %% [markdown]
# ## Keeping the scale: RMSNorm
# A model of this kind is a long sum. Every block adds something to a vector $u$ per
# token, the *residual stream*, and the next block reads the sum. What happens to the
# size of $u$ after 28 additions?
#
# The experiment below adds 28 random feed-forward branches, once to the stream as it
# is, once with a normalization in front of each branch.


# %%
def loudness(start, normalize, layers=28, d=64, f=128):
    """Root mean square of the residual stream before layer 1 and after every layer."""
    torch.manual_seed(0)
    u = start * torch.randn(256, d)
    heard = [u.square().mean().sqrt().item()]
    for _ in range(layers):
        v = F.rms_norm(u, (d,)) if normalize else u
        gate, up = (v @ torch.randn(d, 2 * f) / d**0.5).chunk(2, dim=-1)
        u = u + (F.silu(gate) * up) @ torch.randn(f, d) / f**0.5
        heard.append(u.square().mean().sqrt().item())
    return heard


starts = (0.1, 1.0, 3.0)
plain = {start: loudness(start, normalize=False) for start in starts}
normed = {start: loudness(start, normalize=True) for start in starts}
assert plain[0.1][-1] / plain[0.1][0] < 1.5, "a quiet stream: the branches are silent"
assert not math.isfinite(plain[3.0][-1]), "a loud one leaves float32"
assert max(normed[start][-1] for start in starts) < 10
assert 1.7 < normed[0.1][28] / normed[0.1][7] < 2.3, "four times as deep, twice as loud"

# %%
fig, axis = plt.subplots(figsize=(6.2, 2.9))
for name, heard, style in ("no norm", plain, "--"), ("RMSNorm", normed, "-"):
    for start, color in zip(starts, (BLUE, ORANGE, RED), strict=True):
        label = f"{name}, from {start}"
        axis.plot(heard[start], color=color, ls=style, label=label)
axis.set(yscale="log", ylim=(0.05, 1e8), xlabel="layer", ylabel="RMS of u (no unit)")
axis.set_title("Without a norm the start decides: silence or overflow")
axis.legend(ncol=2, frameon=False, fontsize=9)
plt.show()

# %% [markdown]
# A feed-forward branch of the kind used here is roughly quadratic in its input. A quiet
# stream gets almost nothing added, a loud one runs away. With a norm in front, every
# branch sees an input of size 1 and adds something of size about 1, so the stream grows
# like the square root of the depth, wherever it started.
#
# The norm divides by the root mean square over the channels and multiplies by one
# learned gain $g$ per channel:
# $$v = \frac{u}{\sqrt{\frac{1}{d} \sum_{i=1}^{d} u_i^2 + \varepsilon}} \cdot g .$$


# %%
def rms_norm(u, g, eps=1e-5):
    return u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps) * g


torch.manual_seed(1)
u, g = torch.randn(2, 5, 64), torch.rand(64)
module = nn.RMSNorm(64, 1e-5)
module.load_state_dict({"weight": g})
assert distance(rms_norm(u, g), module(u)) < 1e-6, "this is nn.RMSNorm"
assert [name for name, _ in module.named_parameters()] == ["weight"], "there is no bias"

# %% [markdown]
# What it leaves out, against LayerNorm: the subtraction of the mean, and the bias. A
# constant added to every channel therefore passes through; a factor does not. Where the
# mean is already zero the two agree.

# %%
one = torch.ones(64)
layer_norm = F.layer_norm(u, (64,))
assert distance(F.layer_norm(u + 3, (64,)), layer_norm) < 1e-4
assert distance(rms_norm(u + 3, one), rms_norm(u, one)) > 0.5, "the mean stays visible"
assert distance(rms_norm(1000 * u, one), rms_norm(u, one)) < 1e-4, "the scale is gone"
assert distance(rms_norm(u - u.mean(-1, keepdim=True), one), layer_norm) < 1e-6

# What breaks: without eps a vector of zeros (padding, a dead unit) divides 0 by 0.
zero = torch.zeros(1, 64)
assert rms_norm(zero, one).eq(0).all()
assert rms_norm(zero, one, eps=0.0).isnan().all()

# %% [markdown]
# ## A gate: SwiGLU
# The scan moves information between tokens. What is done *with* it at one token,
# channel by channel, is the work of the feed-forward branch. Each of its inner channels
# is a product: one linear map says *what*, a second one *how much*.

# %%
gate = torch.linspace(-6, 4, 401, requires_grad=True)
(slope,) = torch.autograd.grad(F.silu(gate).sum(), gate)
lowest = F.silu(gate).argmin()
assert abs(gate[lowest] + 1.278) < 0.02 and abs(F.silu(gate[lowest]) + 0.278) < 1e-3
assert slope[gate < -2].abs().min() > 1e-2, "a closed gate still learns"
assert torch.autograd.grad(F.relu(gate).sum(), gate)[0][gate < 0].eq(0).all()

# %%
fig, axis = plt.subplots(figsize=(6.0, 2.6))
open_ = gate.detach()
axis.plot(open_, F.silu(open_), color=BLUE, label="silu(gate)")
axis.plot(open_, slope, color=BLUE, ls="--", label="its slope")
axis.plot(open_, F.relu(open_), color=ORANGE, label="relu(gate)")
axis.plot(open_, (open_ > 0).float(), color=ORANGE, ls="--", label="its slope")
axis.set(xlabel="gate before the nonlinearity (no unit)", ylabel="value (no unit)")
axis.set(ylim=(-0.6, 3))
axis.set_title("A closed silu gate keeps a slope, a closed relu has none")
axis.legend(frameon=False, ncol=2)
plt.show()

# %% [markdown]
# With $\operatorname{silu}(a) = a / (1 + e^{-a})$ the branch is
# $$F(v) = W_{\mathrm{down}} \left( \operatorname{silu}(W_{\mathrm{gate}} v) \cdot
# W_{\mathrm{up}} v \right),$$
# the gated unit of Shazeer 2020 (arXiv 2002.05202). The two inner matrices read the
# same $v$, so they are stored as one, gate first: one matrix product instead of two.

# %%
d, f = 64, 128
gate_up, down = nn.Linear(d, 2 * f, bias=False), nn.Linear(f, d, bias=False)
W_gate, W_up = gate_up.weight[:f], gate_up.weight[f:]
v = torch.randn(3, d)
gate, up = gate_up(v).chunk(2, dim=-1)
together = down(F.silu(gate) * up)
apart = (F.silu(v @ W_gate.T) * (v @ W_up.T)) @ down.weight.T
assert distance(together, apart) < 1e-6
assert sum(p.numel() for p in (gate_up.weight, down.weight)) == 3 * d * f
loud, louder = (down(F.silu(k * gate) * k * up).norm() for k in (5, 10))
assert 3.0 < louder / loud < 4.2, "twice the input, about four times the output"

# What breaks: reading the halves the other way round. Shapes fit, nothing is raised,
# and weights trained by one convention are noise under the other.
up, gate = gate_up(v).chunk(2, dim=-1)
print(f"halves swapped: off by {distance(down(F.silu(gate) * up), together):.0%}")
assert distance(down(F.silu(gate) * up), together) > 0.5

# %% [markdown]
# ## A mixer across heads
# The scan runs in $H$ heads that never look at each other: head 3 has its own $A$, its
# own state, its own output. Where do they meet? Here in one matrix over all $H D$
# channels, which starts as the identity. Below: how strongly each head's output depends
# on each head's input, at the start and once training has moved the matrix.

# %% tags=["export:mimo"]
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class MIMO(nn.Module):
    """Mix the channels of all heads with one dense matrix, the identity at first.

    A linear map between two linear maps: a head mixer, not the rank-R recurrence that
    the Mamba-3 paper calls MIMO.

    Args:
        n_heads: number of heads H.
        head_dim: channels per head D.

    `forward` takes, after y, what multiplies it by the weight, as `F.linear` does.

    Shapes: (B, T, H, D) -> (B, T, H, D), in the dtype of the weight.

    Source: notebook 07, "A mixer across heads".
    """

    def __init__(self, n_heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads * head_dim, n_heads * head_dim))
        self.weight._identity_init = True  # no initializer of matrices may touch it
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make it the identity."""
        nn.init.eye_(self.weight)

    def forward(
        self, y: Float[Tensor, "B T H D"], product=F.linear
    ) -> Float[Tensor, "B T H D"]:
        return product(y.flatten(-2), self.weight).view_as(y)


# %%
torch.manual_seed(2)
H, D = 4, 3
mixer = MIMO(H, D)
y = torch.randn(64, 7, H, D)
assert torch.equal(mixer(y), y), "at the start it changes nothing"


def head_blocks(weight, heads):
    """Norm of the block of a mixer that leads from each head to each other head."""
    blocks = weight.detach().unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
    return blocks.permute(0, 2, 1, 3).flatten(2).norm(dim=-1)


at_start = head_blocks(mixer.weight, H)
assert at_start.fill_diagonal_(0).eq(0).all(), "no head hears another"
loss = (mixer(y) - y.roll(1, dims=2)).square().mean()  # a wish: hear your neighbor
loss.backward()
moved = head_blocks(mixer.weight - 3 * mixer.weight.grad, H)
neighbors = moved[torch.arange(H), torch.arange(H) - 1]
assert neighbors.min() > 1.5 * moved[0, 1:3].max(), "row 0 hears head 3 most of all"

# %%
fig, axes = plt.subplots(1, 2, figsize=(6.0, 2.8))
titles = "Start: each head hears itself", "One step later: its neighbor too"
for axis, weight, title in zip(
    axes, (head_blocks(torch.eye(H * D), H), moved), titles, strict=True
):
    image = axis.imshow(weight, cmap="cividis", vmin=0, vmax=3**0.5)
    axis.set(xlabel="from head", ylabel="to head", xticks=range(H), yticks=range(H))
    axis.set_title(title)
fig.colorbar(image, ax=axes, label="norm of the block (no unit)", shrink=0.8)
plt.show()

# %% [markdown]
# ### What it is not
# The class is called MIMO, many inputs and many outputs, and the name needs a warning.
# In the Mamba-3 paper (Lahoti et al. 2026, arXiv 2603.15569) MIMO changes the
# *recurrence*: a token writes a matrix of rank $R$ into the state, $B_t X_t^{\top}$
# with $B_t \in \mathbf{C}^{N \times R}$, where the plain recurrence writes an outer
# product, rank 1. **Nothing of that happens here.** This mixer acts on what was read
# out of the state, after the scan. It is a linear map between two linear maps (the
# read-out before it, `out_proj` after it), so a single matrix could do the work of
# mixer and `out_proj` together. What it changes is where training starts and how the
# gradient flows, not what the model can express.
#
# Of that paper's three ideas this model has one, the complex state, in a simpler form:
# the angle of $A$ is learned per head, but does not depend on the token. It has neither
# the trapezoidal rule nor MIMO in the recurrence.

# %%
from mamba3lite.models.ssd_complex import ssd_complex_chunkwise, ssd_naive_complex

torch.manual_seed(3)
N, T = 5, 2
x, dt = torch.randn(1, T, H, D), torch.randn(1, T, H)
B_t, C_t = (torch.randn(1, T, H, N, dtype=torch.complex64) for _ in "BC")
A = torch.full((H,), -1.0 + 0.5j)
for tokens in (1, 2):
    short = (z[:, :tokens] for z in (B_t, C_t, dt))
    _, state = ssd_naive_complex(x[:, :tokens], A, *short, return_final_states=True)
    assert torch.linalg.matrix_rank(state).eq(tokens).all(), "one token writes rank 1"

W_out = torch.randn(6, H * D)
in_two_steps = mixer(y).flatten(-2) @ W_out.T
in_one = y.flatten(-2) @ (W_out @ mixer.weight).T
assert distance(in_two_steps, in_one) < 1e-6, "mixer and out_proj are one linear map"

# %% [markdown]
# ## The configuration
# Every number that follows comes from one small dataclass. It checks each value as it
# enters, because a wrong one would otherwise surface as a shape error ten calls deeper.
# It stands in a module of its own that knows nothing of PyTorch: a mistyped setting is
# named before PyTorch has been loaded.

# %% tags=["export:config"]
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar


@dataclass
class ModelConfig:
    """The shape of a model and how it computes.

    Raises:
        TypeError: a field that does not exist.
        ValueError: a value out of range, naming field, value and what is allowed.

    Source: notebook 07, "The configuration".
    """

    vocab_size: int = 50257
    d_model: int = 1024
    n_layers: int = 28
    n_heads: int = 16
    head_dim: int = 64
    state_dim: int = 64
    chunk_size: int = 64
    ssd_dispatch: str = "pytorch"
    ssd_precision: str = "tf32"
    ffn_dim: int = 2048
    max_seq_len: int = 2048
    weight_tying: bool = True
    rms_norm_eps: float = 1e-5
    init_std: float = 0.02
    grad_checkpoint: bool = False
    batch_invariant: bool = False
    a_init: str = "decay"

    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }
    _CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "ssd_dispatch": ("pytorch", "triton", "fused"),
        "ssd_precision": ("ieee", "tf32", "bf16"),
        "a_init": ("decay", "spectrum"),
    }

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name, type(field.default), getattr(self, field.name))
        if self.state_dim % 2:
            raise ValueError(f"state_dim is {self.state_dim}; it must be even")
        if self.batch_invariant and self.ssd_dispatch == "triton":
            raise ValueError(
                "batch_invariant is True; it goes with ssd_dispatch 'pytorch' or "
                "'fused', not 'triton'"
            )

    def _check(self, name: str, kind: type, value: object) -> None:
        if name in self._CHOICES:
            if value not in self._CHOICES[name]:
                allowed = ", ".join(self._CHOICES[name])
                raise ValueError(f"{name} is {value!r}; wanted one of {allowed}")
        elif kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; wanted True or False")
        elif kind is int:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; wanted an integer, at least 1")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r}; wanted a number above 0")
        elif not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value!r}; wanted a finite number above 0")

    @classmethod
    def of(cls, config: "ModelConfig | Mapping[str, Any]") -> "ModelConfig":
        """A config as it is, or one built from a mapping of its fields."""
        return cls(**config) if isinstance(config, Mapping) else config


# %%
def refused(kind, **fields):
    """The message with which ModelConfig refuses these fields."""
    try:
        ModelConfig(**fields)
    except kind as error:
        return str(error)
    raise AssertionError(f"{fields} was accepted")


print(refused(ValueError, state_dim=63))
print(refused(ValueError, a_init="random"))
print(refused(ValueError, n_layers=True))
assert "d_modl" in refused(TypeError, d_modl=512)
assert ModelConfig.of({"d_model": 512}) == ModelConfig(d_model=512)

# %% [markdown]
# `state_dim` counts complex numbers: 64 of them are 128 real coordinates. `max_seq_len`
# is for data and logs; the recurrence itself knows no longest sequence.
#
# ## Where a head starts
# Each layer holds one complex $A$ per head. Its real part says how fast the head
# forgets, its imaginary part how fast it turns. Which values should training begin
# with? Two answers are on offer. `"decay"` gives every head $A = -1$: no rotation, one
# rate.
# `"spectrum"` spreads both over the heads,
# $$\operatorname{Im} A_h = \pi \frac{h}{H}, \qquad
# \operatorname{Re} A_h = -10^{-3 + 3 \operatorname{frac}(0.618\, h)} .$$
# Multiples of $0.618$, the golden ratio's fractional part, fall evenly into $[0, 1)$ in
# an order that has nothing to do with $h$: slow heads are found at every angle.

# %% tags=["export:mamba_block"]
import math
import warnings
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mamba3lite.models.config import ModelConfig
from mamba3lite.models.mimo import MIMO
from mamba3lite.models.ssd_complex import (
    KernelUnavailable,
    autocast_dtype,
    ssd_complex_chunkwise,
)


def init_decay(n_heads: int, a_init: str) -> Complex[Tensor, "H"]:
    """The complex decay rate A that every head starts from.

    Args:
        n_heads: number of heads H.
        a_init: "decay" is A = -1 on every head. "spectrum" gives head h the angle
            Im A = pi h / H and Re A = -10^(-3 + 3 frac(0.618 h)), so that rates and
            angles are spread and uncorrelated.

    Returns: A, complex64, Re(A) < 0.

    Source: notebook 07, "Where a head starts".
    """
    if a_init == "decay":
        return torch.full((n_heads,), -1.0, dtype=torch.complex64)
    head = torch.arange(n_heads, dtype=torch.float64)
    rate = 10.0 ** (-3 + 3 * (0.618 * head).frac())
    return torch.complex(-rate, math.pi * head / n_heads).to(torch.complex64)


# %% [markdown]
# How long does a head remember? The step is $\delta = \operatorname{softplus}(dt)$, and
# $\operatorname{softplus}(0) = \ln 2$. A token written now is left with the factor
# $e^{-\delta |\operatorname{Re} A|}$ after one step, so at $dt = 0$ it is halved after
# $\ln 2 / (\delta |\operatorname{Re} A|) = 1 / |\operatorname{Re} A|$ tokens.

# %%
decay, spectrum = init_decay(16, "decay"), init_decay(16, "spectrum")
assert spectrum.dtype == torch.complex64 and spectrum.real.max() < 0
half_life = -1 / spectrum.real
step = F.softplus(torch.zeros(()))
left = (step * spectrum.real * half_life).exp()
assert left.sub(0.5).abs().max() < 1e-6, "half is left after one half-life"
assert half_life.max().round() == 1000 and half_life.min() < 1.5
gaps = half_life.log10().sort().values.diff()
assert gaps.max() < 3 * gaps.min(), "evenly spread"
assert torch.allclose(-1 / decay.real, torch.ones(16)), "one token, every head"
assert distance(spectrum.imag, torch.arange(16) * math.pi / 16) < 1e-6


def correlation(A):
    """Between the logarithm of the rate and the angle, over the heads."""
    return torch.corrcoef(torch.stack([(-A.real).log(), A.imag]))[0, 1].item()


head = torch.arange(16)
ordered = torch.complex(-(10.0 ** (-3 + 3 * head / 16)), head * math.pi / 16)
print(f"rate against angle: {correlation(spectrum):+.2f}")
print(f"had we taken h/H for both: {correlation(ordered):+.2f}")
assert abs(correlation(spectrum)) < 0.2 and correlation(ordered) > 0.99


# %%
def inverse(rate):
    return 1 / rate.clip(min=1e-9)  # matplotlib tries 0 as well


fig, plane = plt.subplots(figsize=(6.2, 3.4))
plane.scatter(-spectrum.real, spectrum.imag, color=BLUE, zorder=3)
for h, value in enumerate(spectrum.tolist()):
    plane.annotate(f" {h}", (-value.real, value.imag), va="center")
plane.scatter([1], [0], color=RED, marker="D", zorder=4)
plane.annotate('  all heads of "decay"', (1, 0), color=RED, va="center")
plane.set(xscale="log", xlim=(1.6, 7e-4), ylim=(-0.15, 3.2))
plane.set(xlabel="-Re A (1 per unit of step)", ylabel="Im A (rad per unit of step)")
memory = plane.secondary_xaxis("top", functions=(inverse, inverse))
memory.set_xlabel("half-life at dt = 0 (tokens)")
plane.set_title('Heads of "spectrum": each memory, from short to long, at any angle')
plt.show()

# %% [markdown]
# $A$ belongs to a layer, not to the model: the default, 28 layers of 16 heads, has
# **448** of these complex numbers.
#
# One more fact about the start. With $A = -1$ the factor kept at a step is a plain
# sigmoid, the forget gate of recurrent networks (Gu and Dao 2023, arXiv 2312.00752,
# make the connection):
# $$e^{-\operatorname{softplus}(dt)} = \frac{1}{1 + e^{dt}} =
# \operatorname{sigmoid}(-dt) .$$
# So it is *not* true that a fresh model forgets at least half at each step. That holds
# for $dt \ge 0$, and the projection that makes $dt$ is centered on 0.

# %%
dt = torch.linspace(-4, 4, 9)
kept = (F.softplus(dt) * -1.0).exp()
assert distance(kept, torch.sigmoid(-dt)) < 1e-6
assert kept[dt >= 0].max() <= 0.5 and kept[dt < 0].min() > 0.5

# %% [markdown]
# ## Fewer passes over the same rows
# A matrix product of the default model has 2,000 operations for every number that it
# reads, and a GPU is built for that. A norm has five. What a norm, a gate or the sum at
# a branch costs is the traffic, and every operation of PyTorch reads all of its input
# from memory and writes all of its output back. $\operatorname{silu}(g) \odot u$ is
# two operations, and its backward six; under autocast an RMSNorm writes float32, and
# the cast to bfloat16 reads that again.
#
# A compiler fuses such chains. Without one, three kernels do, each with a row or a part
# of one in registers. They are used where the fused scan is, and where nobody needs to
# see single operators; the compiler gets the operations themselves.


# %% tags=["export:row_kernels"]
import torch
from jaxtyping import Float
from torch import Tensor, nn

from mamba3lite.models.ssd_complex import autocast_dtype
from mamba3lite.models.ssd_fused import _start, _watched
from mamba3lite.models.ssd_triton import HAS_TRITON, _interpreted

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice


def fuses_rows(z: Float[Tensor, "*rows width"]) -> bool:
    """Whether operations on rows of z go through these kernels."""
    return HAS_TRITON and z.is_cuda and not _watched(z)


# %% [markdown]
# ### The sum and its norm
# At a branch three things follow each other: the branch is added to the stream, the sum
# is kept, its norm is the input of the next product. One kernel reads both terms and
# writes the sum, and the norm in the dtype of the product.
#
# Back come two gradients, of the sum and of the norm. With $\hat u = r u$, $r = 1 /
# \sqrt{\operatorname{mean}(u^2) + \epsilon}$ and $g = \mathrm{d}\,\text{out} \odot
# \text{gain}$,
# $$\mathrm{d}u = \mathrm{d}\,\text{sum} + r \left(g - \hat u \,
# \operatorname{mean}(g \odot \hat u)\right), \qquad
# \mathrm{d}\,\text{gain} = \sum_{\text{rows}} \mathrm{d}\,\text{out} \odot \hat u .$$
# A program takes every 1,024th row, so that it can keep its part of
# $\mathrm{d}\,\text{gain}$ in registers; the parts are summed afterwards, in one order.


# %% tags=["export:row_kernels"]
if HAS_TRITON:

    @triton.jit
    def _normed(u, gain, eps, WIDTH: tl.constexpr):
        """u, WIDTH numbers and zeros, over its root mean square, times gain."""
        return u * (1.0 / tl.sqrt(tl.sum(u * u, 0) / WIDTH + eps)) * gain

    @triton.jit
    def _norm_kernel(
        u_ptr, branch_ptr, gain_ptr, sum_ptr, out_ptr, eps,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    ):  # fmt: skip
        """out = u / sqrt(mean(u^2) + eps) * gain for u, or u + branch, which is kept.

        One program a row.
        """
        i = tl.arange(0, BLOCK)
        here, at = i < WIDTH, tl.program_id(0).to(tl.int64) * WIDTH + i
        u = tl.load(u_ptr + at, mask=here, other=0.0).to(tl.float32)
        if ADD:
            u += tl.load(branch_ptr + at, mask=here, other=0.0).to(tl.float32)
            tl.store(sum_ptr + at, u.to(sum_ptr.dtype.element_ty), mask=here)
        gain = tl.load(gain_ptr + i, mask=here, other=0.0).to(tl.float32)
        out = _normed(u, gain, eps, WIDTH)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=here)

    @triton.jit(do_not_specialize=["rows"])
    def _norm_backward_kernel(
        u_ptr, gain_ptr, dout_ptr, dsum_ptr, du_ptr, dbranch_ptr, dgain_ptr, eps, rows,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, FROM_SUM: tl.constexpr,
        ADD: tl.constexpr,
    ):  # fmt: skip
        """du, its copy in the dtype of the branch, and a program's share of dgain."""
        i = tl.arange(0, BLOCK)
        here = i < WIDTH
        gain = tl.load(gain_ptr + i, mask=here, other=0.0).to(tl.float32)
        dgain = tl.zeros((BLOCK,), tl.float32)
        at = tl.program_id(0).to(tl.int64) * WIDTH + i
        for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
            u = tl.load(u_ptr + at, mask=here, other=0.0).to(tl.float32)
            dout = tl.load(dout_ptr + at, mask=here, other=0.0).to(tl.float32)
            r = 1.0 / tl.sqrt(tl.sum(u * u, 0) / WIDTH + eps)
            unit, g = u * r, dout * gain
            dgain += dout * unit
            du = (g - unit * (tl.sum(g * unit, 0) / WIDTH)) * r
            if FROM_SUM:
                du += tl.load(dsum_ptr + at, mask=here, other=0.0).to(tl.float32)
            tl.store(du_ptr + at, du.to(du_ptr.dtype.element_ty), mask=here)
            if ADD:
                dbranch = du.to(dbranch_ptr.dtype.element_ty)
                tl.store(dbranch_ptr + at, dbranch, mask=here)
            at += tl.num_programs(0).to(tl.int64) * WIDTH
        tl.store(dgain_ptr + tl.program_id(0) * WIDTH + i, dgain, mask=here)


def _refuse_second_derivative() -> None:
    """A kernel's gradient is a constant to autograd, and would differentiate to 0."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the fused row kernels have no second derivative; leave create_graph out, "
            "or use ssd_dispatch='pytorch'"
        )


_SHARES = 1024  # programs of a norm's backward, and of sums that dgain is made of


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, branch, gain, eps, dtype):
        ctx.set_materialize_grads(False)
        u, rows, width = u.contiguous(), u.numel() // u.shape[-1], u.shape[-1]
        total = u.view_as(u) if branch is None else torch.empty_like(u)
        out = torch.empty_like(u, dtype=dtype)
        ctx.branch_dtype = None if branch is None else branch.dtype
        block, eps = triton.next_power_of_2(width), float(eps)
        with torch.cuda.device_of(u):
            _start(
                _norm_kernel, (rows, 1, 1),
                (u, u if branch is None else branch.contiguous(), gain, total, out),
                (eps,), 0, WIDTH=width, BLOCK=block, ADD=branch is not None,
                num_warps=4,
            )  # fmt: skip
        ctx.save_for_backward(total if branch is not None else u, gain)
        ctx.eps = eps
        return total, out

    @staticmethod
    def backward(ctx, dsum, dout):
        _refuse_second_derivative()
        u, gain = ctx.saved_tensors
        width, add = u.shape[-1], ctx.branch_dtype is not None
        if dout is None:
            dout = torch.zeros_like(u)
        du = torch.empty_like(u)
        dbranch = torch.empty_like(u, dtype=ctx.branch_dtype) if add else du
        rows = u.numel() // width
        shares = min(rows, _SHARES)
        dgain = u.new_empty(shares, width, dtype=torch.float32)
        with torch.cuda.device_of(u):
            _start(
                _norm_backward_kernel, (shares, 1, 1),
                (u, gain, dout.contiguous(), du if dsum is None else dsum.contiguous(),
                 du, dbranch, dgain), (ctx.eps, rows), 0, WIDTH=width,
                BLOCK=triton.next_power_of_2(width), FROM_SUM=dsum is not None,
                ADD=add, num_warps=4,
            )  # fmt: skip
        dgain = dgain.sum(0).to(gain.dtype)
        return du, dbranch if add else None, dgain, None, None


def add_norm(
    u: Float[Tensor, "*rows width"],
    branch: Float[Tensor, "*rows width"] | None,
    norm: nn.RMSNorm,
) -> tuple[Float[Tensor, "*rows width"], Float[Tensor, "*rows width"]]:
    """u + branch in the dtype of u, and its RMSNorm as a product will read it.

    Args: branch: None for nothing to add. norm: its weight and eps.
    Returns: the sum, and the norm in the dtype of autocast where that is on.

    Source: notebook 07, "The sum and its norm".
    """
    dtype = autocast_dtype(u.device.type) or u.dtype
    return _AddNorm.apply(u, branch, norm.weight, norm.eps, dtype)


# %% [markdown]
# ### The gate
# With $s = \sigma(g)$: $\;\mathrm{d}g = \mathrm{d}\,\text{out}\; u\, s\, (1 + g (1 -
# s))$ and $\mathrm{d}u = \mathrm{d}\,\text{out}\; g\, s$. Both halves are read where
# the product left them, side by side, and their gradients go there too.


# %% tags=["export:row_kernels"]
if HAS_TRITON:

    @triton.jit
    def _gated(gate, up):
        """silu(gate) up, in float32."""
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        return gate / (1.0 + tl.exp(-gate)) * up

    @triton.jit
    def _swiglu_kernel(both_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
        """out = silu(gate) up for both = [gate, up]; one program BLOCK of a row."""
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row, here = tl.program_id(0).to(tl.int64), i < WIDTH
        gate_ptr = both_ptr + row * 2 * WIDTH + i
        gate = tl.load(gate_ptr, mask=here, other=0.0)
        up = tl.load(gate_ptr + WIDTH, mask=here, other=0.0)
        out = _gated(gate, up).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * WIDTH + i, out, mask=here)

    @triton.jit
    def _swiglu_backward_kernel(
        both_ptr, dout_ptr, dboth_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Gradients of both halves; one program BLOCK of a row."""
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row, here = tl.program_id(0).to(tl.int64), i < WIDTH
        at = row * 2 * WIDTH + i
        gate = tl.load(both_ptr + at, mask=here, other=0.0).to(tl.float32)
        up = tl.load(both_ptr + at + WIDTH, mask=here, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * WIDTH + i, mask=here, other=0.0)
        dout, s = dout.to(tl.float32), 1.0 / (1.0 + tl.exp(-gate))
        dgate, dup = dout * up * s * (1.0 + gate * (1.0 - s)), dout * gate * s
        dtype = dboth_ptr.dtype.element_ty
        tl.store(dboth_ptr + at, dgate.to(dtype), mask=here)
        tl.store(dboth_ptr + at + WIDTH, dup.to(dtype), mask=here)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        both, width = both.contiguous(), both.shape[-1] // 2
        ctx.save_for_backward(both)
        out = both.new_empty(*both.shape[:-1], width)
        _over_rows(_swiglu_kernel, width, both, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        _refuse_second_derivative()
        (both,) = ctx.saved_tensors
        dboth = torch.empty_like(both)
        _over_rows(
            _swiglu_backward_kernel, dout.shape[-1], both, dout.contiguous(), dboth
        )
        return dboth


def _over_rows(kernel, width: int, *tensors: Tensor) -> None:
    """One program for 1,024 numbers of a row."""
    rows, block = tensors[0].numel() // (2 * width), 1024
    with torch.cuda.device_of(tensors[0]):
        _start(
            kernel, (rows, triton.cdiv(width, block), 1), tensors, (), 0,
            WIDTH=width, BLOCK=block, num_warps=4,
        )  # fmt: skip


def swiglu(both: Float[Tensor, "*rows two_f"]) -> Float[Tensor, "*rows f"]:
    """silu(gate) up for both = [gate, up], in the dtype of both.

    Source: notebook 07, "The gate".
    """
    return _SwiGLU.apply(both)


# %% [markdown]
# ### The softmax in place
# For the next section: a row of logits becomes its softmax minus 1 at the target, which
# is the gradient of the loss, where the logits were. The first pass finds the maximum
# and the sum at once, correcting the sum whenever the maximum grows (Milakov and
# Gimelshein, arXiv 1805.02867).


# %% tags=["export:row_kernels"]
if HAS_TRITON:

    @triton.jit
    def _expm1(x, EMULATE: tl.constexpr):
        return tl.exp(x) - 1.0 if EMULATE else libdevice.expm1(x)

    @triton.jit
    def _softmax_kernel(
        z_ptr, index_ptr, log_p_ptr, WIDTH: tl.constexpr, VOCAB: tl.constexpr,
        BLOCK: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Row z becomes softmax(z) - [target], 0 from VOCAB on; and log p(target)."""
        row, i = tl.program_id(0), tl.arange(0, BLOCK)
        z_ptr += row.to(tl.int64) * WIDTH
        target = tl.load(index_ptr + row)
        at_target = tl.load(z_ptr + target).to(tl.float32)
        most = tl.full((BLOCK,), -3.4e38, tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            here = start + i < VOCAB
            z = tl.load(z_ptr + start + i, mask=here, other=float("-inf"))
            z = z.to(tl.float32)
            higher = tl.maximum(most, z)
            total = total * tl.exp(most - higher) + tl.exp(z - higher)
            most = higher
        top = tl.max(most, 0)
        log_total = tl.log(tl.sum(total * tl.exp(most - top), 0))
        log_p = at_target - top - log_total
        tl.store(log_p_ptr + row, log_p)
        less_one = _expm1(log_p, EMULATE)
        for start in range(0, WIDTH, BLOCK):
            here = start + i < VOCAB
            z = tl.load(z_ptr + start + i, mask=here, other=float("-inf"))
            p = tl.exp(z.to(tl.float32) - top - log_total)
            p = tl.where(start + i == target, less_one, p)
            p = p.to(z_ptr.dtype.element_ty)
            tl.store(z_ptr + start + i, p, mask=start + i < WIDTH)


def softmax_less_target_(
    logits: Float[Tensor, "n rows"], index: Tensor, vocab: int
) -> Float[Tensor, "n 1"]:
    """Turn logits into the gradient of the cross-entropy in them.

    Args: logits: overwritten; columns from vocab on count for nothing and become 0.
        index: (n, 1) integers below vocab, the targets.
    Returns: log-probability of each target, float32.

    Source: notebook 07, "The softmax in place".
    """
    log_p = logits.new_empty(index.shape, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        _start(
            _softmax_kernel, (len(logits), 1, 1), (logits, index.contiguous(), log_p),
            (), 0, WIDTH=logits.shape[1], VOCAB=vocab, BLOCK=4096,
            EMULATE=_interpreted(), num_warps=8,
        )  # fmt: skip
    return log_p


# %% [markdown]
# Against autograd through PyTorch's operations, in float64: widths that are no power of
# two, a row of zeros, a branch and none, targets that are nearly certain.

# %%
torch.manual_seed(9)


def gradients_of(outputs, leaves, seeds):
    return torch.autograd.grad(outputs, leaves, [z.to(outputs[0]) for z in seeds])


rows, width = 70, 40
u, branch, *seeds = torch.randn(4, rows, width)
u[3], branch[3] = 0, 0
norm = nn.RMSNorm(width, 1e-5)
nn.init.normal_(norm.weight)
for added in (None, branch):
    leaves = [z.clone().requires_grad_() for z in (u, added) if z is not None]
    exact = [z.detach().double().requires_grad_() for z in leaves]
    gain = norm.weight.detach().double().requires_grad_()
    got = add_norm(leaves[0], leaves[1] if added is not None else None, norm)
    total = sum(exact)
    wanted = total, F.rms_norm(total, (width,), gain, 1e-5)
    assert all(distance(a, b) < 1e-6 for a, b in zip(got, wanted, strict=True))
    got = gradients_of(got, [*leaves, norm.weight], seeds)
    wanted = gradients_of(wanted, [*exact, gain], seeds)
    assert all(distance(a, b) < 1e-6 for a, b in zip(got, wanted, strict=True))

both = torch.randn(rows, 2 * width).requires_grad_()
exact = both.detach().double().requires_grad_()
wanted = F.silu(exact[:, :width]) * exact[:, width:]
assert distance(swiglu(both), wanted) < 1e-6
got, wanted = (
    gradients_of([out], [z], seeds[:1])[0]
    for out, z in ((swiglu(both), both), (wanted, exact))
)
assert distance(got, wanted) < 1e-6

logits, index = 5 * torch.randn(rows, 104), torch.randint(101, (rows, 1))
logits[0, index[0]] += 60  # certain: its gradient is 0 and not lost in rounding
leaf = logits[:, :101].double().requires_grad_()
loss = F.cross_entropy(leaf, index[:, 0], reduction="none")
log_p = softmax_less_target_(logits, index, 101)
assert distance(log_p[:, 0], -loss) < 1e-6
assert distance(logits[:, :101], torch.autograd.grad(loss.sum(), leaf)[0]) < 1e-6
assert logits[:, 101:].eq(0).all()
print("sums, norms, gates and softmax agree with PyTorch's, gradients included")

# %% [markdown]
# ## The block
# Two branches, each with a norm in front, each added to the residual stream:
# $$\begin{aligned}
# u' &= u + W_{\mathrm{out}} \operatorname{MIMO}(\operatorname{SSD}(W_{\mathrm{in}}
# \operatorname{RMSNorm}(u))), \\
# u'' &= u' + F(\operatorname{RMSNorm}(u')) .
# \end{aligned}$$
# No attention, no convolution, no bias, no positional embedding. Only one box of the
# diagram moves anything from one token to another: SSD, the scan.

# %%
H, D, N, d, f = 16, 64, 64, 1024, 2048  # the default model
columns = {
    "x": H * D,
    "B real": H * N,
    "B imag": H * N,
    "C real": H * N,
    "C imag": H * N,
    "dt": H,
}
assert sum(columns.values()) == H * (D + 4 * N + 1) == 5136
lanes = [
    [
        ("RMSNorm", f"{d:,}"),
        ("in_proj", f"{d:,} → {sum(columns.values()):,}"),
        ("SSD", f"→ {H} × {D}"),
        ("MIMO", f"{H * D:,} → {H * D:,}"),
        ("out_proj", f"{H * D:,} → {d:,}"),
    ],
    [
        ("RMSNorm", f"{d:,}"),
        ("ffn_gate_up", f"{d:,} → 2 × {f:,}"),
        ("silu(gate) · up", f"→ {f:,}"),
        ("ffn_down", f"{f:,} → {d:,}"),
    ],
]


# %%
def box(x, y, name, widths):
    fill = {"SSD": "#CDE7F7", "silu(gate) · up": "#EEEEEE"}.get(name, "#FBE7C0")
    return f"""<rect x="{x}" y="{y}" width="108" height="46" rx="7" fill="{fill}"
      stroke="#333"/><text x="{x + 54}" y="{y + 19}" font-weight="600">{name}</text>
      <text x="{x + 54}" y="{y + 36}" font-size="11">{widths}</text>"""


def lane(y, boxes, before, after):
    """One residual stream from left to right, and the branch that leaves it."""
    last = 70 + 126 * len(boxes)
    arrows = [f"M60 {y + 90}V{y + 23}H70"]
    arrows += [f"M{178 + 126 * i} {y + 23}h14" for i in range(len(boxes) - 1)]
    arrows += [f"M{last - 18} {y + 23}H{last + 20}V{y + 79}"]
    arrows += [f"M30 {y + 90}H{last + 9}", f"M{last + 31} {y + 90}H800"]
    paths = "".join(f'<path d="{a}" marker-end="url(#tip)"/>' for a in arrows)
    drawn = "".join(box(70 + 126 * i, y, *parts) for i, parts in enumerate(boxes))
    return f"""<g fill="none" stroke="#333" stroke-width="1.4">{paths}
      <circle cx="{last + 20}" cy="{y + 90}" r="11" fill="#fff"/></g>{drawn}
      <text x="{last + 20}" y="{y + 95}" font-size="17">+</text>
      <text x="18" y="{y + 95}">{before}</text>
      <text x="816" y="{y + 95}">{after}</text>"""


# %%
SVG(f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 262" width="840"
  font-family="sans-serif" font-size="13" text-anchor="middle" fill="#111">
  <title>The block: a scan branch and a feed-forward branch, each added to u</title>
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6"
   orient="auto" stroke="none"><path d="M0 0L8 4L0 8z" fill="#333"/></marker>
  <rect width="840" height="262" rx="10" fill="#fff"/>
  {lane(20, lanes[0], "u", "u′")}{lane(146, lanes[1], "u′", "u″")}</svg>""")

# %% [markdown]
# Orange boxes hold weights. The blue one holds a single complex number per head.
#
# ### Six streams from one matrix
# The scan needs an input $x$, complex vectors $B$ and $C$, and a step $dt$, for each
# head and token. All are linear in the normalized stream, so one product makes them
# all, $H (D + 4 N + 1) = 5136$ numbers per token. The order of the columns is a
# convention that nothing enforces; every weight ever saved depends on it.

# %%
edges = [0]
for width in columns.values():
    edges.append(edges[-1] + width)
assert edges == [0, 1024, 2048, 3072, 4096, 5120, 5136]
colors = dict(zip(columns, (BLUE, GREEN, SKY, RED, ORANGE, BLACK), strict=True))
last_head = columns["C imag"] // H  # channels of the last head's C imag
assert edges[-1] - edges[-2] + last_head == 80

# %%
fig, axes = plt.subplots(2, 1, figsize=(7.6, 2.7))
for name, start in zip(columns, edges[:-1], strict=True):
    axes[0].barh(0, columns[name], left=start, color=colors[name], edgecolor="white")
    middle = start + columns[name] / 2
    if name != "dt":
        ink = BLACK if name.endswith("imag") else "white"
        axes[0].text(middle, 0, name, ha="center", va="center", color=ink, size=12)
axes[0].set(xticks=edges[:-1], xlim=(0, 5136), xlabel="column of in_proj")
axes[0].set_title("Five equal slices, and a sliver for dt")
axes[1].barh(0, last_head, left=5056, color=ORANGE, edgecolor="white")
axes[1].text(5088, 0, "C imag, head 15", ha="center", va="center", color=BLACK)
axes[1].barh([0] * H, [1] * H, left=range(5120, 5136), color=BLACK, edgecolor="white")
axes[1].set(xticks=[5056, 5120, 5135], xlim=(5056, 5136), xlabel="column of in_proj")
axes[1].set_title("The last 80 columns: 64 of one head's C, then one dt per head")
for axis in axes:
    axis.set(yticks=[])
    axis.spines["left"].set_visible(False)
plt.show()

# %% [markdown]
# Within a slice heads come one after the other: column $1024 + 64 h + n$ is the real
# part of $B_n$ in head $h$. Note that the two parts of a complex number are *not*
# neighbors; all real parts come first. (PyTorch stores the matrix transposed: a column
# of the projection is a row of `in_proj.weight`.)
#
# `_add_norm` and `_swiglu` are the operations of the section before as PyTorch has
# them. The class has five parts. `__init__` makes the boxes of the diagram. `forward`
# decides whether to keep the activations or compute them again. `_forward_impl` is the
# two lines of the formula, with `_project` before the scan and `_finish` behind it;
# `row_operations` chooses what they are made of.
# `_ssd_with_dispatch` is the only place that slices the projection and the only one
# that chooses an implementation of the scan.


# %% tags=["export:mamba_block"]
def _unavailable(
    dispatch: str, shapes: tuple[int, int, int], dtype: torch.dtype, device
) -> str | None:
    """Why this dispatch cannot run here, or None when it can.

    Args: shapes: head_dim, state_dim and chunk_size. dtype: of x. device: of x.
    """
    if dispatch == "pytorch":
        return None
    # Only now: they import triton.
    from mamba3lite.models import ssd_fused, ssd_triton

    name, check_dims = "per_chunk_ssd_triton", ssd_triton._check_block_dims
    if dispatch == "fused":
        name, check_dims = "ssd_fused", ssd_fused._check_fused_dims
        if dtype.is_complex:
            return f"ssd_fused takes a real x, and x is {dtype}"
    try:
        ssd_triton._check_triton(name)
        check_dims(*shapes)
        ssd_triton._check_device(device, name)
    except (ImportError, KernelUnavailable) as error:
        return str(error)
    return None


def _add_norm(
    u: Float[Tensor, "B T d"], branch: Float[Tensor, "B T d"] | None, norm: nn.RMSNorm
) -> tuple[Float[Tensor, "B T d"], Float[Tensor, "B T d"]]:
    """The stream with a branch added to it, and its norm."""
    total = u if branch is None else u + branch
    return total, norm(total)


def _swiglu(both: Float[Tensor, "B T two_f"]) -> Float[Tensor, "B T f"]:
    """silu(gate) up, for both side by side."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


class Mamba3Block(nn.Module):
    """One pre-norm block: the scan and a head mixer, then a SwiGLU, each residual.

    Args:
        cfg: a `ModelConfig` or a mapping of its fields; never changed.
        layer_idx: position in the stack, named in warnings.

    Shapes: (B, T, d_model) -> (B, T, d_model).

    Raises: TypeError when A is no longer complex.

    Source: notebook 07, "The block".
    """

    def __init__(self, cfg, layer_idx: int = 0) -> None:
        super().__init__()
        self.cfg = cfg = ModelConfig.of(cfg)
        self.layer_idx = layer_idx
        heads, width = cfg.n_heads, cfg.n_heads * cfg.head_dim
        self._columns = [width, *[heads * cfg.state_dim] * 4, heads]
        self.norm_ssd = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.in_proj = nn.Linear(cfg.d_model, sum(self._columns), bias=False)
        self.A = nn.Parameter(init_decay(heads, cfg.a_init))
        self.mimo = MIMO(heads, cfg.head_dim)
        self.out_proj = nn.Linear(width, cfg.d_model, bias=False)
        self.norm_ffn = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.ffn_gate_up = nn.Linear(cfg.d_model, 2 * cfg.ffn_dim, bias=False)
        self.ffn_down = nn.Linear(cfg.ffn_dim, cfg.d_model, bias=False)
        self._triton_fallback_warned = False
        self._refusals: dict[torch.device, str] = {}  # what a launch said there

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start: A by a_init, the mixer as the identity, gains of 1, matrices normal.

        Their deviation is init_std; of what writes into the residual stream,
        init_std / sqrt(2 n_layers).
        """
        cfg = self.cfg
        self.A.copy_(init_decay(cfg.n_heads, cfg.a_init))
        for module in (self.norm_ssd, self.mimo, self.norm_ffn):
            module.reset_parameters()
        narrow = cfg.init_std / (2 * cfg.n_layers) ** 0.5
        self.in_proj.weight.normal_(0.0, cfg.init_std)
        self.out_proj.weight.normal_(0.0, narrow)
        self.ffn_gate_up.weight.normal_(0.0, cfg.init_std)
        self.ffn_down.weight.normal_(0.0, narrow)

    def forward(
        self,
        u: Float[Tensor, "B T d_model"],
        reset: Bool[Tensor, "B T"] | None = None,
        initial_states: Complex[Tensor, "B H D N"] | None = None,
        return_final_states: bool = False,
    ):
        """Apply the block; with return_final_states also return the scan's state."""
        run = self._forward_impl
        if self.cfg.grad_checkpoint and self.training:
            run = partial(checkpoint, self._forward_impl, use_reentrant=False)
        fused = self.fuses(u)
        out = run(u, reset, initial_states, return_final_states)
        if fused and not self.fuses(u):  # a launch was refused: none of it is fused
            out = run(u, reset, initial_states, return_final_states)
        return out

    def _forward_impl(self, u, reset, initial_states, return_final_states):
        u, proj = self._project(u)
        y, final_states = self._ssd_with_dispatch(
            proj, reset, initial_states=initial_states, return_final_states=True
        )
        u = self._finish(u, y)
        return (u, final_states) if return_final_states else u

    def _project(self, u):
        """The stream, and from it the streams of the scan."""
        add_norm, _ = self.row_operations(u)
        u, normed = add_norm(u, None, self.norm_ssd)
        return u, self._times(self.in_proj, normed)

    def _finish(self, u, y):
        """Add both branches, the first from the output of the scan."""
        add_norm, swiglu = self.row_operations(u)
        if autocast_dtype(y.device.type) is None:  # which converts by itself
            y = y.to(self.mimo.weight.dtype)
        mixed = self._times(self.mimo, y).flatten(-2)
        u, normed = add_norm(u, self._times(self.out_proj, mixed), self.norm_ffn)
        both = self._times(self.ffn_gate_up, normed)
        return u + self._times(self.ffn_down, swiglu(both))

    def _times(self, module: nn.Module, x: Tensor) -> Tensor:
        """What a module multiplies; each row by itself where that is promised."""
        if not self.by_rows(x):
            return module(x)
        from mamba3lite.models.batch_invariant import linear  # it imports triton

        return module(x, linear) if module is self.mimo else linear(x, module.weight)

    def row_operations(self, u: Tensor):
        """How to add and norm, and how to gate: by PyTorch, fused, or by single rows.

        Args: u: what they are for; its device and whether anybody watches decide.
        """
        if self.by_rows(u):
            from mamba3lite.models import batch_invariant  # it imports triton

            return batch_invariant.add_norm, batch_invariant.swiglu
        if self.fuses(u):
            from mamba3lite.models import row_kernels  # it imports triton

            if row_kernels.fuses_rows(u):
                return row_kernels.add_norm, row_kernels.swiglu
        return _add_norm, _swiglu

    def by_rows(self, z: Tensor) -> bool:
        """Whether kernels compute each row of z by itself; see `batch_invariant`."""
        return self.cfg.batch_invariant and self.fuses(z)

    def fuses(self, z: Tensor) -> bool:
        """Whether the fused kernels run where z is."""
        # By name too: a compiled graph checks that, and not what it led to.
        wanted = self.cfg.ssd_dispatch == "fused"
        return wanted and self._usable_dispatch(z.device) == "fused"

    def _ssd_with_dispatch(
        self,
        proj: Float[Tensor, "B T columns"],
        reset: Bool[Tensor, "B T"] | None = None,
        *,
        initial_states: Complex[Tensor, "B H D N"] | None = None,
        return_final_states: bool = False,
    ) -> (
        Float[Tensor, "B T H D"]
        | tuple[Float[Tensor, "B T H D"], Complex[Tensor, "B H D N"]]
    ):
        """Scan the projection by the configured dispatch, or fall back to PyTorch."""
        if not self.A.is_complex():
            raise TypeError(
                f"layer {self.layer_idx}: A is {self.A.dtype}, its rotation is gone; "
                "keep parameters in float32 and use autocast for bfloat16"
            )
        dispatch = self.cfg.ssd_dispatch
        if dispatch != "pytorch":
            dispatch = self._usable_dispatch(proj.device)
        scan = partial(
            self._scan,
            proj,
            initial_states=initial_states,
            return_final_states=return_final_states,
            reset=reset,
        )
        # A compiled graph holds one path: there, what a kernel raises propagates.
        if dispatch == "pytorch" or torch.compiler.is_compiling():
            return scan(dispatch)
        try:
            return scan(dispatch)
        except (ImportError, KernelUnavailable) as error:
            self._refusals[proj.device] = str(error)
            self._warn_fallback(str(error))
            return scan("pytorch")

    def _scan(self, proj, dispatch, **options):
        """The scan of one dispatch; "fused" reads the projection as it lies."""
        cfg = self.cfg
        if dispatch == "fused":
            from mamba3lite.models.ssd_fused import ssd_fused  # it imports triton

            sizes = {"n_heads": cfg.n_heads, "head_dim": cfg.head_dim}
            sizes |= {"state_dim": cfg.state_dim, "chunk_size": cfg.chunk_size}
            options |= {"walk": False} if cfg.batch_invariant else {}
            return ssd_fused(
                proj, self.A, **sizes, precision=cfg.ssd_precision, **options
            )
        # torch.complex refuses bf16, and the state is kept in float32 in any case.
        x, B_re, B_im, C_re, C_im, dt = proj.float().split(self._columns, dim=-1)
        heads = (cfg.n_heads, -1)
        return ssd_complex_chunkwise(
            x.unflatten(-1, heads),
            self.A,
            torch.complex(B_re, B_im).unflatten(-1, heads),
            torch.complex(C_re, C_im).unflatten(-1, heads),
            dt,
            cfg.chunk_size,
            dispatch,
            **options,
        )

    def __getstate__(self):
        """A copy has not warned anybody yet, and may be meant for another machine."""
        return self.__dict__ | {"_triton_fallback_warned": False, "_refusals": {}}

    def _usable_dispatch(self, device: torch.device) -> str:
        """The configured dispatch, or "pytorch" with one warning when it cannot run."""
        cfg = self.cfg
        shapes = (cfg.head_dim, cfg.state_dim, cfg.chunk_size)
        reason = self._refusals.get(device)
        if reason is None:
            reason = _unavailable(cfg.ssd_dispatch, shapes, torch.float32, device)
        if reason is None:
            return cfg.ssd_dispatch
        self._warn_fallback(reason)
        return "pytorch"

    def _warn_fallback(self, reason: str) -> None:
        if not self._triton_fallback_warned:
            self._triton_fallback_warned = True
            warnings.warn(
                f"layer {self.layer_idx}: ssd_dispatch={self.cfg.ssd_dispatch!r} "
                f"unavailable ({reason}); falling back to 'pytorch'",
                RuntimeWarning,
                stacklevel=2,
            )

    # The mark of torch.compiler.assume_constant_result, which would import the compiler
    # and triton with this module.
    _usable_dispatch._dynamo_marked_constant = True


# %% [markdown]
# ### Which column moves which stream
# Reading the slices off the code is easy and proves little. A check that could fail:
# listen at the entrance of the scan, nudge a single column of the projection, and see
# which of the six streams moves. A small block has 24 columns, so all can be tried.

# %%
tiny = ModelConfig(d_model=8, n_heads=2, head_dim=3, state_dim=2, ffn_dim=8)
torch.manual_seed(4)
block, u = Mamba3Block(tiny, 0), torch.randn(1, 6, 8)
scan = ssd_complex_chunkwise


def streams_of(block, u):
    """The six real streams that reach the scan: time and column, in the given order."""
    global ssd_complex_chunkwise
    heard = []

    def listen(x, A, B, C, dt, *rest, **options):
        heard.extend([x, B.real, B.imag, C.real, C.imag, dt])
        return scan(x, A, B, C, dt, *rest, **options)

    ssd_complex_chunkwise = listen
    block(u)
    ssd_complex_chunkwise = scan
    return [stream.detach().flatten(2).clone() for stream in heard]


# %%
before = streams_of(block, u)
widths = [stream.shape[-1] for stream in before]
assert widths == [6, 4, 4, 4, 4, 2] and sum(widths) == block.in_proj.out_features
stairs = torch.zeros(6, 24)
for column in range(24):
    with torch.no_grad():
        block.in_proj.weight[column] += 1
    after = streams_of(block, u)
    with torch.no_grad():
        block.in_proj.weight[column] -= 1
    changes = [(a - b).abs() for a, b in zip(after, before, strict=True)]
    moved = [change.amax((0, 1)) > 1e-3 for change in changes]
    stairs[:, column] = torch.tensor([m.sum() for m in moved])
    stream = next(i for i in range(6) if column < sum(widths[: i + 1]))
    assert moved[stream].nonzero().tolist() == [[column - sum(widths[:stream])]]
assert stairs.sum(0).eq(1).all(), "one column moves one channel of one stream"

# %%
fig, axis = plt.subplots(figsize=(7.0, 2.6))
axis.imshow(stairs, cmap="cividis", aspect="auto")
axis.set(yticks=range(6), yticklabels=columns, xticks=range(0, 24, 2))
axis.set(xlabel="column that was nudged", ylabel="stream that moved")
axis.set_title("One column moves one stream: a staircase without gaps or overlaps")
plt.show()

# %% [markdown]
# With the streams known, the two lines of the formula can be written out with bare
# matrices, and the block must agree.

# %%
W = {name: weight.detach() for name, weight in block.named_parameters()}
v = rms_norm(u, W["norm_ssd.weight"])
y = block._ssd_with_dispatch(v @ W["in_proj.weight"].T)
u1 = u + y.flatten(-2) @ W["mimo.weight"].T @ W["out_proj.weight"].T
gate, up = (rms_norm(u1, W["norm_ffn.weight"]) @ W["ffn_gate_up.weight"].T).split(8, -1)
u2 = u1 + (F.silu(gate) * up) @ W["ffn_down.weight"].T
assert distance(block(u), u2) < 1e-6
assert distance(u1, u2) > 1e-2 < distance(u, u1), "both branches have a say"

# %% [markdown]
# ### What breaks when the layout is misread
# Anyone who loads these weights elsewhere has to slice them again. Two honest mistakes:
# to take $B$ as (re, im) pairs, as `torch.view_as_complex` likes them, and to swap
# $B$'s imaginary slice with $C$'s real one. The oracle of notebook 02 tells all apart.


# %%
def by_hand(proj, B, C):
    """The block's scan from its projection, sliced here, through the naive loop."""
    x, dt = proj[..., :6].unflatten(-1, (2, 3)), proj[..., 22:]
    B, C = (z.unflatten(-1, (2, 2)) for z in (B, C))
    return ssd_naive_complex(x, block.A, B, C, dt).real


proj = block.in_proj(block.norm_ssd(u)).detach()
B_re, B_im, C_re, C_im = proj[..., 6:22].split(4, dim=-1)
C_t = torch.complex(C_re, C_im)
y = block._ssd_with_dispatch(proj)
assert y.dtype == torch.float32 and y.shape == (1, 6, 2, 3)
assert distance(by_hand(proj, torch.complex(B_re, B_im), C_t), y) < 1e-5

pairs = torch.view_as_complex(proj[..., 6:14].unflatten(-1, (-1, 2)).contiguous())
swapped = by_hand(proj, torch.complex(B_re, C_re), torch.complex(B_im, C_im))
for name, wrong in ("pairs", by_hand(proj, pairs, C_t)), ("swapped", swapped):
    print(f"{name}: off by {distance(wrong, y):.0%}, and no error is raised")
    assert distance(wrong, y) > 0.3

# %% [markdown]
# ### When A loses its rotation
# Half-precision training is often written as `model.to(torch.bfloat16)`. PyTorch has no
# complex bfloat16, so it keeps the real part of $A$. It warns once per process, and
# never again. The model would go on with every head turned into pure decay; this block
# refuses.

# %%
turning = ModelConfig.of({**vars(tiny), "a_init": "spectrum"})
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    halves = [Mamba3Block(turning, layer).to(torch.bfloat16) for layer in (0, 1)]
assert [w.category for w in heard] == [UserWarning], "two casts, one warning"
assert halves[0].A.dtype == torch.bfloat16 and not halves[0].A.is_complex()
print("before:", [f"{a:.3f}" for a in Mamba3Block(turning).A.tolist()])
print("after: ", [f"{a:.3f}" for a in halves[0].A.tolist()])
try:
    halves[1](u.bfloat16())
    raise AssertionError("the block ran without its rotation")
except TypeError as error:
    print(error)

# %% [markdown]
# (`.bfloat16()` is another spelling with another meaning: it leaves complex tensors
# alone.) For training the way is autocast: parameters stay in float32, matrix products
# run in bfloat16, and the projection is cast back to float32 before complex numbers are
# put together.

# %%
turning_block = Mamba3Block(turning)
expected = turning_block(u)
with torch.autocast("cpu", dtype=torch.bfloat16):
    got = turning_block(u)
assert turning_block.A.dtype == torch.complex64
assert 1e-5 < distance(got, expected) < 2e-2, "bfloat16 rounds, and no more than that"
assert Mamba3Block(turning).bfloat16().A.dtype == torch.complex64

# %% [markdown]
# ### A dispatch that is not there
# `ssd_dispatch` names an implementation of the same scan. If the named one cannot run,
# a block says so once and computes the same numbers in plain PyTorch.

# %%
wish = Mamba3Block({**vars(tiny), "ssd_dispatch": "triton"}, layer_idx=3)
wish.load_state_dict(block.state_dict())
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    outputs = [wish(u), wish(u)]
assert [w.category for w in heard] == [RuntimeWarning], "two calls, one warning"
assert all(torch.equal(out, block(u)) for out in outputs)
assert str(heard[0].message).startswith("layer 3: ssd_dispatch='triton' unavailable")

# %% [markdown]
# ### Results that do not depend on the batch
# Ask the model about one sequence, then about the same one among others. The bits of
# the answer may differ: a matrix library picks its kernel by shape. `batch_invariant`
# rules that out. `_operations` then hands out products and norms that compute each row
# by itself, where there are kernels for that ([notebook 09](09_decoding.ipynb) writes
# them); elsewhere the model takes one sequence and one window of `chunk_size` tokens
# at a time, so that every operation always has the same shape. It is the same model:

# %%
from mamba3lite.models.transformer import Mamba3Transformer as Packaged

wide = {**vars(tiny), "vocab_size": 11, "n_layers": 2, "chunk_size": 16}
wide["batch_invariant"] = True
torch.manual_seed(4)
invariant = Packaged(wide).requires_grad_(False)
ordinary = Packaged({**wide, "batch_invariant": False}).requires_grad_(False)
ordinary.load_state_dict(invariant.state_dict())
ids = torch.randint(11, (5, 41))
answers = invariant(ids)
assert distance(answers, ordinary(ids)) < 1e-5
assert torch.equal(invariant(ids[2:3]), answers[2:3]), "alone or among others"
assert torch.equal(invariant(ids[:, :30]), answers[:, :30]), "cut or not"

# %% [markdown]
# ### Computing again instead of keeping
# For the backward pass autograd keeps the activations of every layer. Unlike the
# weights they grow with the batch and with the length of its rows. With
# `grad_checkpoint` a block keeps its input alone and runs a second time when its
# gradient is due. Same gradients, one more forward pass.


# %%
def trained_once(grad_checkpoint):
    """Gradients of a block, how often it ran, how many numbers autograd kept."""
    torch.manual_seed(5)
    cfg = {**vars(tiny), "grad_checkpoint": grad_checkpoint}
    block, runs, kept = Mamba3Block(cfg), [], []
    body = block._forward_impl
    block._forward_impl = lambda *args: runs.append(1) or body(*args)
    u = torch.randn(2, 100, 8, requires_grad=True)
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    )
    with keep:
        out = block(u).square().sum()
    out.backward()
    return [u.grad, *(p.grad for p in block.parameters())], len(runs), sum(kept)


kept_grads, kept_runs, kept_numbers = trained_once(False)
again_grads, again_runs, again_numbers = trained_once(True)
assert all(map(torch.equal, kept_grads, again_grads)), "the same, bit for bit"
assert (kept_runs, again_runs) == (1, 2)
assert kept_numbers > 10 * (again_numbers + 2 * 100 * 8), "its input, and little else"

# %% [markdown]
# ## The loss without the logits
# The last layer of a language model is its widest. What does the loss of one batch
# occupy, 16 rows of 2,048 tokens over a vocabulary of 50,257? The logits alone hold
# $16 \cdot 2048 \cdot 50257$ numbers. The textbook cross-entropy makes two
# more tensors of that size: the log-softmax, kept for the backward pass, and the
# gradient of the logits.
#
# Nothing needs them all at once: the loss is a sum over tokens, so it can be summed
# over chunks of them. Two ways to forget a chunk's logits are open. One computes them
# again when their gradient is due, four matrix products in all. The other notices that
# the gradient can be had at once. With logits $z = W h$ and target $t$,
# $$\ell = \ln \sum_v e^{z_v} - z_t, \qquad
# \frac{\partial \ell}{\partial z_v} = \operatorname{softmax}(z)_v - [v = t], \qquad
# \frac{\partial \ell}{\partial h} = W^{\top} \frac{\partial \ell}{\partial z}, \qquad
# \frac{\partial \ell}{\partial W} = \frac{\partial \ell}{\partial z}\, h^{\top} .$$
# Nothing on the right waits for the backward pass. All that arrives there is one
# number, the derivative of whatever is minimized by $\ell$, and it multiplies. So the
# *forward* pass computes the gradients of $h$ and $W$ while a chunk's logits are there,
# with three products, and keeps these gradients alone.
#
# For one chunk: `dlogits` overwrites the logits, which are no longer needed. At the
# target it is $p - 1$, and the 1 has to go before $p$ is rounded to the dtype of the
# products: in bfloat16 every $p$ above 0.998 is 1, and a token that is nearly right
# would teach nothing.


# %% tags=["export"]
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Complex, Float, Int, Shaped
from torch import Tensor, nn

from mamba3lite.models.config import ModelConfig
from mamba3lite.models.mamba_block import Mamba3Block
from mamba3lite.models.ssd_complex import autocast_dtype

_TOKENS_AT_ONCE = 2048  # whose logits exist; 412 MB in float32 for the default model


def _chunk_log_p_and_dlogits(
    h: Float[Tensor, "n d_model"],
    head: Float[Tensor, "rows d_model"],
    index: Int[Tensor, "n 1"],
    vocab: int,
    dtype: torch.dtype,
    by_rows: bool | None,
    fused: bool,
) -> tuple[Float[Tensor, "n 1"], Float[Tensor, "n rows"]]:
    """Log-probability of each target, in dtype; gradient of the loss in the logits.

    Args: head: what h is multiplied by; rows from vocab on are padding. by_rows: None
        for any fast way; else the log-probabilities are those of `token_log_probs`.
        fused: softmax and gradient in one kernel.
    """
    logits = _logits(h, head, bool(by_rows))
    if fused:
        from mamba3lite.models.row_kernels import softmax_less_target_  # needs triton

        return softmax_less_target_(logits, index, vocab), logits
    logits[:, vocab:] = float("-inf")
    if by_rows is None:
        log_p = logits.log_softmax(-1, dtype=dtype)
    else:
        from mamba3lite.models.batch_invariant import log_softmax  # it imports triton

        log_p = log_softmax(logits)
    at_target = log_p.gather(1, index)
    room = logits if logits.dtype == h.dtype else h.new_empty(0)
    del logits  # two of this size at once, not three
    dlogits = torch.exp(log_p, out=room)
    return at_target, dlogits.scatter_(1, index, at_target.expm1().to(h.dtype))


def _logits(
    h: Float[Tensor, "n d_model"], head: Float[Tensor, "rows d_model"], by_rows: bool
) -> Float[Tensor, "n rows"]:
    """h head^T; by_rows: each row by itself, and in float32."""
    if not by_rows:
        return h @ head.T
    from mamba3lite.models.batch_invariant import _linear  # it imports triton

    return _linear(h, head, True)


def _padded_head(weight: Float[Tensor, "V d_model"], dtype: torch.dtype) -> Tensor:
    """The output embedding in dtype; on a GPU with zeros up to 64 rows or a multiple.

    There a row of logits then starts on a boundary that fast products need.
    """
    head = weight.to(dtype)
    return F.pad(head, (0, 0, 0, -len(head) % 64)) if head.is_cuda else head


# %% [markdown]
# The vocabulary 50,257 is odd. A row of logits in bfloat16 is then $2 \cdot 50257$
# bytes long, not a multiple of the 16 bytes that a GPU loads at a time, and the product
# takes a slower kernel. The copy that is multiplied gets rows of zeros up to 50,304.
# Their logits are set to $-\infty$, so their probability is exactly 0; parameter and
# checkpoint know nothing of them.
#
# The loop over the chunks keeps the loss and the gradient of $W$ in float32, whatever
# the products run in. A token whose target is $-100$ counts for nothing: its $h$ is
# multiplied by 0 and so is the gradient in it.


# %% tags=["export"]
def _loss_and_gradients(
    hidden, weight, targets, dtype, hidden_grad, weight_grad, fused=False,
    by_rows=None, window=0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Summed loss and its gradients in hidden and weight; empty if not asked for.

    window: how many tokens at once, always that many; 0 for a large number.
    """
    vocab, width = weight.shape
    exact = torch.promote_types(hidden.dtype, torch.float32)
    head = _padded_head(weight, dtype)
    dhidden = hidden.new_empty(hidden.shape if hidden_grad else 0)
    dweight = weight.new_zeros(head.shape if weight_grad else 0, dtype=exact)
    flat, targets = hidden.reshape(-1, width).to(dtype), targets.reshape(-1, 1)
    losses = hidden.new_empty(targets.shape, dtype=exact)
    at_once = window or _TOKENS_AT_ONCE
    for start in range(0, len(targets), at_once):
        chunk = slice(start, start + at_once)
        valid = targets[chunk] != -100
        keep = valid.to(dtype)
        h = flat[chunk] * keep
        index = targets[chunk].where(valid, 0).long()
        at_target, dlogits = _chunk_log_p_and_dlogits(
            h, head, index, vocab, exact, by_rows, fused
        )
        losses[chunk] = at_target.neg().where(valid, 0)
        if hidden_grad:
            out = dhidden.view(-1, width)[chunk]
            torch.mul(dlogits @ head, keep, out=out)
        if weight_grad and dtype == exact:
            dweight.addmm_(dlogits.T, h)
        elif weight_grad:
            dweight += dlogits.T @ h
        del dlogits  # or it lives on beside the logits of the next chunk
    return losses.sum(), dhidden, dweight[:vocab].to(weight.dtype)


# %% [markdown]
# Autograd and the compiler should see none of this. An *operator* has a name, a schema
# and three parts: a body, a fake one that knows shapes alone and is all that
# `torch.compile` traces, and what to do in the backward pass, here a multiplication.
#
# One thing is given up. To autograd the saved gradients are constants, so a second
# derivative through them would come out as zero. It is refused instead.


# %% tags=["export"]
_cross_entropy = torch.library.custom_op(
    "mamba3lite::cross_entropy_sum",
    _loss_and_gradients,
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor weight, Tensor targets, ScalarType dtype, "
        "bool hidden_grad, bool weight_grad, bool fused=False, bool? by_rows=None, "
        "int window=0) "
        "-> (Tensor, Tensor, Tensor)"
    ),
)


@_cross_entropy.register_fake
def _fake_cross_entropy(
    hidden, weight, targets, dtype, hidden_grad, weight_grad, fused=False,
    by_rows=None, window=0,
):  # fmt: skip
    exact = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=exact),
        hidden.new_empty(hidden.shape if hidden_grad else 0),
        weight.new_empty(weight.shape if weight_grad else 0),
    )


def _save_gradients(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, dloss, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the loss has no second derivative: its gradients are computed in the "
            "forward pass; leave create_graph out, or call the model without targets "
            "and use torch.nn.functional.cross_entropy"
        )
    if dloss is None:
        return (None,) * 9
    wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    return *(z * dloss if needed else None for z, needed in wanted), *[None] * 7


_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


# %% [markdown]
# What the model calls decides two things that an operator cannot see for itself: in
# which dtype the products run, and whether anyone will ask for the gradients. An
# evaluation under `torch.no_grad` pays for the loss alone, one product of the three.


# %% tags=["export"]
def _cross_entropy_sum(
    hidden: Float[Tensor, "B T d_model"],
    weight: Float[Tensor, "V d_model"],
    targets: Int[Tensor, "B T"],
    fused: bool = False,
    by_rows: bool | None = None,
    window: int = 0,
) -> Float[Tensor, ""]:
    """Sum of the cross-entropy over valid targets; logits of a chunk at a time.

    Products run in the autocast dtype. Their gradients are computed here, in the
    forward pass, and kept instead of logits. The same bits every time.

    Args:
        hidden: output of the last norm.
        weight: output embedding.
        targets: token ids already shifted; -100 is ignored.
        fused: take the softmax in one kernel.
        by_rows: None, or how a batch-invariant model computes: True where kernels
            take each row by itself, False where windows of `window` tokens are.

    Returns: a scalar, float32, or float64 for hidden in float64.

    Raises: RuntimeError for a second derivative, when the first is taken.

    Source: notebook 07, "The loss without the logits".
    """
    device, dtype = hidden.device.type, hidden.dtype
    if dtype != torch.float64:
        dtype = autocast_dtype(device) or dtype
    learns = torch.is_grad_enabled()
    wanted = [learns and z.requires_grad for z in (hidden, weight)]
    if window:  # the place of a token in its window is that in the full forward
        missing = -targets.shape[1] % window
        hidden = F.pad(hidden, (0, 0, 0, missing))
        targets = F.pad(targets, (0, missing), value=-100)
    how = fused, by_rows, window
    return _cross_entropy(hidden, weight, targets, dtype, *wanted, *how)[0]


# %% [markdown]
# Sizes, derived from shapes, for everything in float32. Kept until the backward pass:
# one vector a token, and one matrix as large as $W$.

# %%
batch, time, vocab, d = 16, 2048, 50257, 1024
logits = 4 * batch * time * vocab
chunk = 4 * _TOKENS_AT_ONCE * vocab
dhidden, dweight = 4 * batch * time * d, 4 * vocab * d
at_once = {"logits": logits, "log-softmax": logits, "gradient of the logits": logits}
chunked = {"logits": chunk, "log-softmax": chunk}  # the gradient overwrites the logits
chunked |= {"gradients of h and W": dhidden + dweight}
assert round(logits / 1e9, 1) == 6.6 and round(chunk / 1e6) == 412
print(f"logits {logits / 1e9:.1f} GB, of one chunk {chunk / 1e6:.0f} MB")
print(f"kept: {dhidden / 1e6:.0f} MB for h, {dweight / 1e6:.0f} MB for W")
assert 16 < sum(at_once.values()) / sum(chunked.values()) < 18
assert 2 * vocab % 16 and 2 * 50304 % 16 == 0 == 50304 % 64

# %%
fig, axis = plt.subplots(figsize=(7.2, 2.3))
names = {**at_once, **chunked}
colors = dict(zip(names, (BLUE, ORANGE, GREEN, RED), strict=True))
for row, parts in enumerate((at_once, chunked)):
    left = 0.0
    for name, size in parts.items():
        axis.barh(row, size / 1e9, left=left, color=colors[name])
        left += size / 1e9
    axis.text(left + 0.2, row, f"{left:.1f} GB", va="center")
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
axis.legend(handles, colors, frameon=False, loc="lower right", ncol=2)
axis.set(yticks=[0, 1], yticklabels=["all at once", "2,048 tokens\nat a time"])
axis.set(xlabel="memory of the loss (GB, derived from shapes)")
axis.set(xlim=(0, 23), ylim=(1.8, -0.5))
axis.set_title("Chunk by chunk: 17 times less, and its logits are not kept")
plt.show()

# %% [markdown]
# Is that what happens? What autograd keeps can be counted as it is saved. Inside an
# operator nobody can look, but its body is a function like any other: under a
# `TorchDispatchMode` every operation in it is seen. For a small case, 32 tokens at a
# time instead of 2,048, look for the largest tensor that any operation returns.

# %%
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """Remembers the most numbers in any tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return result


def plain_sum(hidden, weight, targets):
    """The textbook loss: all logits first."""
    logits = hidden @ weight.T
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten().long(), reduction="sum"
    )


def both_ways(loss_sum, hidden, weight, targets):
    """The loss and its gradients in hidden and weight."""
    hidden, weight = (z.clone().requires_grad_() for z in (hidden, weight))
    loss = loss_sum(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


# %%
torch.manual_seed(6)
B, T, V, d = 2, 64, 101, 8
hidden, weight = torch.randn(B, T, d), torch.randn(V, d)
targets = torch.randint(V, (B, T))
targets[0, 40:] = -100  # padding
_TOKENS_AT_ONCE = 32  # the exported function reads this name
chunked = both_ways(_cross_entropy_sum, hidden, weight, targets)
plain = both_ways(plain_sum, hidden, weight, targets)
assert all(distance(a, b) < 1e-6 for a, b in zip(chunked, plain, strict=True))
with Largest() as at_once:
    both_ways(plain_sum, hidden, weight, targets)
with Largest() as by_chunks:
    _loss_and_gradients(hidden, weight, targets, torch.float32, True, True)
assert at_once.numbers == B * T * V and by_chunks.numbers == 32 * V
print(f"largest tensor: {at_once.numbers:,} numbers, {by_chunks.numbers:,} in chunks")

kept = []
keep = torch.autograd.graph.saved_tensors_hooks(
    lambda z: kept.append(z.numel()) or z, lambda z: z
)
leaves = [z.clone().requires_grad_() for z in (hidden, weight)]
with keep:
    loss = _cross_entropy_sum(*leaves, targets)
assert kept == [B * T * d, V * d], "one vector a token, one matrix"
try:
    torch.autograd.grad(loss, leaves, create_graph=True)
    raise AssertionError("a second derivative was promised")
except RuntimeError as error:
    print(error)

# %% [markdown]
# What breaks: two ways to average. Averaging the chunks' *means* weighs a chunk with
# few valid targets like a full one. And the mean over no valid target is 0/0: a batch
# that is all padding would put NaN into every weight. The exported function returns a
# sum; the model divides it by the number of valid targets, or by 1 when there are none.

# %%
losses = []
for h, t in zip(hidden.split(20, 1), targets.split(20, 1), strict=True):
    losses.append(plain_sum(h, weight, t) / (t != -100).sum())
mean = plain[0] / (targets != -100).sum()
print(f"mean of means {sum(losses) / len(losses):.3f}, the mean {mean:.3f}")
assert abs(sum(losses) / len(losses) - mean) > 0.01

padding = torch.full((B, T), -100)
assert F.cross_entropy(hidden.flatten(0, 1) @ weight.T, padding.flatten()).isnan()
loss, *gradients = both_ways(_cross_entropy_sum, hidden, weight, padding)
assert loss == 0 and all(gradient.eq(0).all() for gradient in gradients)
_TOKENS_AT_ONCE = 2048

# %% [markdown]
# ## The whole model
# A table of vectors, one per token id; a stack of blocks; a last norm; and an output
# head that compares the result with every vector of a table. With `weight_tying` it is
# the *same* table: what a token means when read is what it means when predicted.
#
# Two details of the initialization. A matrix that writes into the residual stream
# starts narrower, by $1 / \sqrt{2 L}$ for the $2 L$ branches of $L$ layers, so that
# their sum does not grow with depth. And every module knows its own start:
# `reset_parameters` of the model goes through them, so that a model made on the device
# `meta`, or a copy, can be started too.


# %% tags=["export"]
class Mamba3Transformer(nn.Module):
    """Embedding, a stack of `Mamba3Block`, a final norm and an output head.

    No positional embedding: order enters only through decay and rotation.

    Args:
        cfg: a `ModelConfig` or a mapping of its fields; never changed.

    Source: notebook 07, "The whole model".
    """

    def __init__(self, cfg) -> None:
        super().__init__()
        self.cfg = cfg = ModelConfig.of(cfg)
        self.embed = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.layers = nn.ModuleList(Mamba3Block(cfg, i) for i in range(cfg.n_layers))
        self.norm_f = nn.RMSNorm(cfg.d_model, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.d_model, cfg.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start every parameter anew: `Mamba3Block.reset_parameters`, tables likewise.

        Ties the output head where the config asks for it.
        """
        if self.cfg.weight_tying:
            self.lm_head.weight = self.embed.weight
        self.embed.weight.normal_(0.0, self.cfg.init_std)
        for layer in self.layers:
            layer.reset_parameters()
        self.norm_f.reset_parameters()
        if not self.cfg.weight_tying:
            self.lm_head.weight.normal_(0.0, self.cfg.init_std)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        targets: Int[Tensor, "B T"] | None = None,
        doc_ids: Int[Tensor, "B T"] | None = None,
        reduction: str = "mean",
        states: list[Complex[Tensor, "B H D N"]] | None = None,
        return_states: bool = False,
        previous_doc_ids: Int[Tensor, "B"] | None = None,
    ):
        """Logits, or the loss when targets are given.

        Args:
            tokens: token ids in [0, vocab_size).
            targets: the token after each token, already shifted; -100 is ignored.
            doc_ids: the document of each token; the state is dropped wherever they
                change, so that packed documents never see one another.
            reduction: "mean" over valid targets (0 when there is none), or "sum" for
                `(loss_sum, n_valid)`.
            states: one state per layer to continue from, as return_states gave them.
            return_states: return `(logits, states)`; not together with targets.
            previous_doc_ids: the document of the token before each row, where rows
                continue sequences; without it the first token goes on with its states.

        Returns:
            logits (B, T, V) float32; a scalar loss; `(loss_sum, n_valid)`; or
            `(logits, states)` with states a list of (B, H, D, N) complex64.

        Raises:
            TypeError: tokens, targets or document ids neither int64 nor int32.
            ValueError: an unknown reduction, shapes that differ, no token, ids out of
                range (on a CPU, in eager mode), states that are not one per layer and
                row, previous_doc_ids without doc_ids, or targets together with
                return_states.
        """
        self._check_call(tokens, targets, doc_ids, reduction, return_states)
        reset = self._resets(tokens, doc_ids, previous_doc_ids)
        states = self._checked_states(tokens, states)
        hidden, states = self._hidden(tokens, reset, states, return_states)
        if targets is None:
            logits = self._head(hidden)
            return (logits, states) if return_states else logits
        by_rows = self.by_rows() if self.cfg.batch_invariant else None
        loss_sum = _cross_entropy_sum(
            *(hidden, self.lm_head.weight, targets),
            fused=by_rows is None and hidden.is_cuda and self.layers[0].fuses(hidden),
            by_rows=by_rows,
            window=self.cfg.chunk_size if by_rows is False else 0,
        )
        n_valid = (targets != -100).sum()
        if reduction == "sum":
            return loss_sum, n_valid
        return loss_sum / n_valid.clamp(min=1)

    def by_rows(self) -> bool:
        """Whether kernels compute each row by itself; see `batch_invariant`."""
        return self.layers[0].by_rows(self.embed.weight)

    def chunk(self) -> int:
        """Tokens after which a state is passed on, by the scan that runs here."""
        cfg = self.cfg
        if not self.by_rows():
            return cfg.chunk_size
        from mamba3lite.models.ssd_fused import _chunk_of  # it imports triton

        sizes = (cfg.chunk_size, cfg.head_dim, cfg.state_dim)
        return _chunk_of(*sizes, cfg.ssd_precision)

    def _head(self, hidden: Float[Tensor, "B T d_model"]) -> Float[Tensor, "B T V"]:
        """Logits in float32."""
        if not self.cfg.batch_invariant:
            return self.lm_head(hidden).float()
        if self.by_rows():
            from mamba3lite.models.batch_invariant import linear  # it imports triton

            return linear(hidden, self.lm_head.weight, in_float32=True)
        time, window = hidden.shape[1], self.cfg.chunk_size
        padded = F.pad(hidden, (0, 0, 0, -time % window)).unflatten(1, (-1, window))
        logits = [torch.cat([h @ self.lm_head.weight.T for h in row]) for row in padded]
        return torch.stack(logits)[:, :time].float()

    def _resets(self, tokens, doc_ids, previous) -> Bool[Tensor, "B T"] | None:
        """Where a document starts; None when all is one."""
        if doc_ids is None:
            if previous is not None:
                raise ValueError("previous_doc_ids goes with doc_ids; got it alone")
            return None
        if previous is None:
            previous = doc_ids[:, 0]
        elif previous.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"previous_doc_ids is {previous.dtype}; wanted integers")
        elif previous.shape != tokens.shape[:1]:
            raise ValueError(
                f"previous_doc_ids has shape {tuple(previous.shape)}; wanted "
                f"{tuple(tokens.shape[:1])}, one for every row"
            )
        first = torch.arange(doc_ids.shape[1], device=doc_ids.device) == 0
        before = torch.where(first, previous.unsqueeze(-1), doc_ids.roll(1, 1))
        return doc_ids != before

    def _checked_states(self, tokens, states):
        """One state, or None, for each layer; each with a row for each sequence."""
        if states is None:
            return [None] * len(self.layers)
        if len(states) != len(self.layers):
            raise ValueError(
                f"states holds {len(states)}; wanted {len(self.layers)}, one per layer"
            )
        cfg = self.cfg
        wanted = (len(tokens), cfg.n_heads, cfg.head_dim, cfg.state_dim)
        for number, state in enumerate(states):
            if state is None:
                continue
            if not isinstance(state, Tensor):
                raise TypeError(
                    f"states[{number}] is {type(state).__name__}; wanted a tensor"
                )
            if tuple(state.shape) != wanted:
                raise ValueError(
                    f"states[{number}] has shape {tuple(state.shape)}; wanted {wanted}"
                )
        return states

    def _hidden(self, tokens, reset, states, return_states=False):
        """The last norm's output, and the state that every layer ends in."""
        if self.cfg.batch_invariant and not self.by_rows():
            return self._in_windows(tokens, reset, states, return_states)
        result = self._through_layers(tokens, reset, states)
        if self.cfg.batch_invariant and not self.by_rows():  # a launch was refused
            return self._in_windows(tokens, reset, states, return_states)
        return result

    def _in_windows(self, tokens, reset, states, return_states):
        """One sequence and one window of chunk_size tokens at a time, padded to it.

        Every operation always has the same shape; what it computes for a token can then
        not depend on how long the sequence is or on the batch.
        """
        window, hidden, final_states = self.cfg.chunk_size, [], []
        for b in range(len(tokens)):
            rows, carried = [], [self._row_state(state, b) for state in states]
            for start in range(0, tokens.shape[1], window):
                here = (slice(b, b + 1), slice(start, start + window))
                part, entering = tokens[here], carried
                fresh = None if reset is None else reset[here]
                missing = window - part.shape[1]
                row, carried = self._through_layers(
                    F.pad(part, (0, missing)),
                    None if fresh is None else F.pad(fresh, (0, missing)),
                    entering,
                )
                rows.append(row[:, : part.shape[1]])
                if missing and return_states:  # the state before the padding
                    _, carried = self._through_layers(part, fresh, entering)
            hidden.append(torch.cat(rows, dim=1))
            final_states.append(carried)
        per_layer = zip(*final_states, strict=True)
        return torch.cat(hidden), [torch.cat(states) for states in per_layer]

    def _row_state(self, state, b: int) -> Complex[Tensor, "1 H D N"]:
        """The state of one sequence; zero when there is none."""
        cfg = self.cfg
        if state is None:
            shape = (1, cfg.n_heads, cfg.head_dim, cfg.state_dim)
            device = self.embed.weight.device
            return torch.zeros(shape, dtype=torch.complex64, device=device)
        return state[b : b + 1]

    def _through_layers(self, tokens, reset, states):
        u, final_states = self.embed(tokens), []
        for layer, state in zip(self.layers, states, strict=True):
            u, state = layer(u, reset, state, return_final_states=True)
            final_states.append(state)
        add_norm, _ = self.layers[0].row_operations(u)
        return add_norm(u, None, self.norm_f)[1], final_states

    def _check_call(self, tokens, targets, doc_ids, reduction, return_states) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; wanted 'mean' or 'sum'")
        if targets is not None and return_states:
            raise ValueError("return_states goes with logits; leave targets out")
        given = {"tokens": tokens, "targets": targets, "doc_ids": doc_ids}
        for name, ids in given.items():
            if not isinstance(ids, Tensor) and (ids is not None or name == "tokens"):
                raise TypeError(f"{name} is {type(ids).__name__}; wanted a tensor")
        if tokens.ndim != 2 or not tokens.numel():
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; wanted (B, T), neither 0"
            )
        for name, ids in given.items():
            if ids is None:
                continue
            if ids.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} is {ids.dtype}; wanted int64 or int32")
            if ids.shape != tokens.shape:
                raise ValueError(
                    f"{name} has shape {tuple(ids.shape)}; wanted {tuple(tokens.shape)}"
                    ", one for every token"
                )
        # Reading the values would wait for a device; fake tensors have none.
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            return
        if type(tokens) is not Tensor:
            return
        self._check_ids("tokens", tokens)
        if targets is not None:
            self._check_ids("targets", targets[targets != -100])

    def _check_ids(self, name: str, ids: Shaped[Tensor, "..."]) -> None:
        vocab = self.cfg.vocab_size
        if ids.numel() and not 0 <= ids.min() <= ids.max() < vocab:
            bad = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(f"{name} holds the id {bad}; wanted 0 to {vocab - 1}")


# %%
small = ModelConfig(
    **dict(vocab_size=32, d_model=64, n_layers=2, n_heads=4, head_dim=16),
    **dict(state_dim=8, ffn_dim=128, chunk_size=16, a_init="spectrum"),
)
torch.manual_seed(8)
model = Mamba3Transformer(small)
tokens, targets = torch.randint(32, (2, 3, 40))
logits, loss = model(tokens), model(tokens, targets)
assert logits.shape == (3, 40, 32) and logits.dtype == torch.float32
plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
assert abs(loss - plain) < 1e-6
assert abs(loss - math.log(32)) < 0.1, "an untrained model knows nothing: ln 32"
layer = model.layers[0]
narrower = layer.out_proj.weight.std() / layer.in_proj.weight.std()
assert abs(narrower - 1 / (2 * small.n_layers) ** 0.5) < 0.03
loss_sum, n_valid = model(tokens, targets, reduction="sum")
assert n_valid == 120 and abs(loss_sum / n_valid - loss) < 1e-6

loss = model(tokens, torch.full_like(targets, -100))
loss.backward()
assert loss == 0 and all(p.grad.eq(0).all() for p in model.parameters())
try:
    model(tokens + 1)
    raise AssertionError("an id outside the vocabulary was accepted")
except ValueError as error:
    print(error)

# %% [markdown]
# ### One table, two uses
# Tying is one line, and it changes what the table learns from: its gradient is the sum
# of what the embedding and the head would receive apart.

# %%
untied = Mamba3Transformer({**vars(small), "weight_tying": False})
untied.load_state_dict(model.state_dict())
for m in (model, untied):
    m.zero_grad()
    m(tokens, targets).backward()
assert model.embed.weight is model.lm_head.weight
assert untied.embed.weight is not untied.lm_head.weight
both = untied.embed.weight.grad + untied.lm_head.weight.grad
assert distance(model.embed.weight.grad, both) < 1e-5
assert distance(untied.lm_head.weight.grad, both) > 0.1, "neither use alone gives it"

# %% [markdown]
# ### Where the order of words comes from
# There is no positional embedding. Order enters through decay and rotation alone, and
# that can be put to the test: in a single layer with $A = 0$ nothing decays and nothing
# turns, so the state is a plain sum, and a sum does not know in which order it was
# made.

# %%
one_layer = Mamba3Transformer({**vars(small), "n_layers": 1}).eval()
sentence = torch.randint(32, (1, 12))
shuffled = torch.cat([sentence[:, torch.randperm(11)], sentence[:, 11:]], dim=1)
with torch.no_grad():
    for layer in one_layer.layers:
        layer.out_proj.weight.mul_(20)  # make the effect of the scan visible
    ordered = distance(one_layer(shuffled)[:, -1], one_layer(sentence)[:, -1])
    one_layer.layers[0].A.zero_()
    unordered = distance(one_layer(shuffled)[:, -1], one_layer(sentence)[:, -1])
print(f"last logits after a shuffle: {ordered:.0%} off; if A = 0: {unordered:.0%} off")
assert ordered > 0.05 and unordered < 1e-5

# %% [markdown]
# ## Counting to the last unit
# How large is the default model? From the shapes, by hand, and then against the model
# itself. On PyTorch's `meta` device a module has shapes and no storage, so the 1.7 GB
# of the real one are never touched.

# %%
d, H, D, N, f, V, L = 1024, 16, 64, 64, 2048, 50257, 28
per_layer = {
    "in_proj": d * H * (D + 4 * N + 1),
    "mimo": (H * D) ** 2,
    "out_proj": H * D * d,
    "ffn_gate_up, ffn_down": d * 2 * f + f * d,
    "two norms": 2 * d,
    "A": H,  # complex numbers, each counted once
}
for name, count in per_layer.items():
    print(f"{name:22}{count:>12,}")
assert sum(per_layer.values()) == 13_649_936
assert L * sum(per_layer.values()) == 382_198_208
assert L * sum(per_layer.values()) + V * d + d == 433_662_400
assert L * sum(per_layer.values()) + 2 * V * d + d == 485_125_568


# %%
def count(module):
    return sum(p.numel() for p in module.parameters())


with torch.device("meta"):
    full = Mamba3Transformer(ModelConfig())
    full_untied = Mamba3Transformer(ModelConfig(weight_tying=False))
assert count(full) == 433_662_400 and count(full_untied) == 485_125_568
assert count(full.layers[0]) == sum(per_layer.values())
assert {p.device.type for p in full.parameters()} == {"meta"}
assert sum(layer.A.numel() for layer in full.layers) == 448

# The diagram and the column chart show this model.
first = full.layers[0]
assert first.in_proj.weight.shape == (edges[-1], d) and first._columns == [
    *columns.values()
]
assert first.mimo.weight.shape == (H * D, H * D) and first.ffn_down.in_features == f

# %% [markdown]
# Two ways to get it wrong. `state_dict()` lists a tied table under both of its names,
# 227 entries for 226 tensors, so summing over it counts the table twice and lands on
# the *untied* number. And a complex number viewed as two reals counts twice.

# %%
entries = full.state_dict()
assert len(entries) == 227 == L * 8 + 3
assert len({id(p) for p in full.parameters()}) == 226
assert sum(t.numel() for t in entries.values()) == 485_125_568
as_reals = sum(p.numel() * (2 if p.is_complex() else 1) for p in full.parameters())
assert as_reals == 433_662_400 + 448

parts = {name: L * n for name, n in per_layer.items()}
parts |= {"embedding and head, tied": V * d, "last norm": d}
assert sum(parts.values()) == 433_662_400

# %%
fig, axis = plt.subplots(figsize=(7.4, 3.2))
scan_parts = ("in_proj", "mimo", "out_proj", "A")
kinds = [BLUE if n in scan_parts else ORANGE if "ffn" in n else GREEN for n in parts]
bars = axis.barh(list(parts), [n / 1e6 for n in parts.values()], color=kinds)
axis.bar_label(bars, [f"{n:,}" for n in parts.values()], padding=4)
axis.set(xlabel="parameters (millions)", xlim=(0, 225))
axis.set_title("433,662,400 parameters; the 448 complex numbers of A do not show")
axis.invert_yaxis()
plt.show()

# %% [markdown]
# ## Starting as the identity
# What if the mixer were drawn like any other matrix? It would then be random, of size
# $0.02 \sqrt{H D}$: at $H D = 64$ the branch comes out at 16% of its size, and no
# channel arrives where it left.

# %%
torch.manual_seed(9)
scrambled = Mamba3Transformer(small)
for layer in scrambled.layers:
    assert torch.equal(layer.mimo.weight, torch.eye(64))
    nn.init.normal_(layer.mimo.weight, 0.0, small.init_std)
y = torch.randn(1, 500, 4, 16)
mixed = scrambled.layers[0].mimo(y).detach()
gain = (mixed.norm() / y.norm()).item()
alike = F.cosine_similarity(mixed.flatten(), y.flatten(), dim=0).item()
print(f"size {gain:.2f}, likeness {alike:.2f}; the identity: size 1, likeness 1")
assert abs(gain - 0.02 * 64**0.5) < 0.02 and abs(alike) < 0.1
model_mixer = Mamba3Transformer(small).layers[0].mimo
assert torch.equal(model_mixer(y), y), "it starts as the identity"

# %% [markdown]
# What this costs in training is measured in the last section.
#
# ## Nothing from the future, nothing from the neighbor
# A language model that sees the token it should predict learns nothing. And a row of
# training data usually holds several documents, end to end; the state must not carry
# one into the next. Both are statements about influence, so let us draw it: how much
# does each logit change with each input vector? The row below holds a document of 9
# tokens, then one of 15, in chunks of 16, so that neither boundary falls on the other.

# %%
torch.manual_seed(10)
model = Mamba3Transformer(small).eval()
with torch.no_grad():
    for layer in model.layers:
        layer.out_proj.weight.mul_(3)  # as after training: the scan has a say
row = torch.randint(32, (1, 24))
doc_ids = torch.tensor([[0] * 9 + [1] * 15])


def influence(doc_ids):
    """Norm of d logits[t] / d embedding[s] for every t and s; the largest is 1."""
    read = []
    hook = model.embed.register_forward_hook(lambda m, i, out: read.append(out) or out)
    logits = model(row, doc_ids=doc_ids)
    hook.remove()
    weights = torch.randn(32)
    rows = []
    for logit in logits[0] @ weights:
        (gradient,) = torch.autograd.grad(logit, read, retain_graph=True)
        rows.append(gradient[0].norm(dim=-1))
    seen = torch.stack(rows)
    return seen / seen.max()


as_one, packed = influence(None), influence(doc_ids)
future = torch.ones(24, 24).triu(1).bool()
assert as_one[future].eq(0).all() and packed[future].eq(0).all(), "causal, exactly"
print(f"second document on the first: {as_one[9:, :9].min():.0e} or more,")
print(f"with doc_ids {packed[9:, :9].max().item():.0f}")
assert as_one[9:, :9].min() > 1e-4, "without doc_ids the second sees the first"
assert packed[9:, :9].eq(0).all(), "with them it does not, exactly"
assert packed.diagonal().min() > 1e-3

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.6, 3.4))
titles = "One document: only the past", "Packed: each sees only itself"
for axis, seen, title in zip(axes, (as_one, packed), titles, strict=True):
    shown = seen.log10().masked_fill(seen < 1e-6, torch.nan)
    image = axis.imshow(shown, cmap="viridis", vmin=-1.2, vmax=0)
    axis.axhline(8.5, color=RED, lw=1)
    axis.axvline(8.5, color=RED, lw=1)
    axis.set(xlabel="input token s", ylabel="logits at token t")
    axis.set_title(title)
fig.colorbar(image, ax=axes, label="log10 of the influence; white: none")
plt.show()

# %% [markdown]
# White is exactly zero, above the diagonal and in the lower left of the packed row: no
# pair of tokens from two documents is in any sum (notebook 03, "Boundaries").
#
# The same statements without derivatives. A changed token changes nothing before it.
# The second document's logits are those it has alone. And leaving `doc_ids` out is the
# classic silent fault of packed training: nothing is raised, the logits are just of
# another text.

# %%
with torch.no_grad():
    other = row.clone()
    other[0, 17] = (row[0, 17] + 1) % 32
    before, after = model(row), model(other)
    assert distance(after[:, :17], before[:, :17]) < 1e-6
    assert (after[:, 17:] - before[:, 17:]).abs().amax((0, 2)).min() > 1e-4
    alone = model(row[:, 9:])
    together = model(row, doc_ids=doc_ids)[:, 9:]
    leaked = model(row)[:, 9:]
assert distance(together, alone) < 1e-5
print(f"doc_ids left out: logits of the second {distance(leaked, alone):.0%} off")
assert distance(leaked, alone) > 0.05

# %% [markdown]
# ## Going on from a state
# Everything the model knows about the past is one state per layer, $H D N$ complex
# numbers each, however long the past. Read 33 tokens at once, then go on one by one:
# the logits are those of the whole sequence.

# %%
text = torch.randint(32, (2, 48))
with torch.no_grad():
    whole = model(text)
    logits, states = model(text[:, :33], return_states=True)
    stepwise = [logits]
    for t in range(33, 48):
        logits, states = model(text[:, t : t + 1], states=states, return_states=True)
        stepwise.append(logits)
    forgetful = [model(text[:, t : t + 1]) for t in range(33, 48)]
assert distance(torch.cat(stepwise, dim=1), whole) < 1e-5
assert [tuple(state.shape) for state in states] == [(2, 4, 16, 8)] * 2
lost = distance(torch.cat(forgetful, dim=1), whole[:, 33:])
print(f"the states dropped at every step: {lost:.0%} off")
assert lost > 0.05
state_bytes = 28 * 16 * 64 * 64 * torch.zeros((), dtype=torch.complex64).nbytes
print(f"the default model remembers in {state_bytes / 1e6:.1f} MB, at any length")
assert state_bytes == 14_680_064

# %% [markdown]
# ## The target is the next token
# `targets[:, t]` is the token *after* `tokens[:, t]`: the caller shifts, the model does
# not. Forget the shift, and each token is asked to predict itself. How would you
# notice? By a loss that is too good. On tokens drawn at random there is nothing to
# learn, and no honest model gets below $\ln V$ on fresh data.


# %%
def random_text_loss(shift, steps=40, V=16):
    """Loss on fresh random tokens during training; shift 1 is right, 0 forgets it."""
    torch.manual_seed(11)
    model = Mamba3Transformer({**vars(small), "vocab_size": V, "n_layers": 1})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        text = torch.randint(V, (8, 33))
        loss = model(text[:, :32], text[:, shift : shift + 32])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
honest_model, honest = random_text_loss(shift=1)
copying_model, copying = random_text_loss(shift=0)
floor = math.log(16)
assert min(honest) > floor - 0.1, "random text cannot be predicted"
assert copying[-1] < 0.1, "unless the answer is in the question"
answers = copying_model(torch.arange(16)[None]).argmax(-1)
assert torch.equal(answers, torch.arange(16)[None]), "it repeats what it is given"

# %%
fig, axis = plt.subplots(figsize=(6.0, 2.8))
axis.plot(honest, color=BLUE, label="targets shifted by one")
axis.plot(copying, color=RED, label="shift forgotten")
axis.axhline(floor, color=BLACK, ls="--", lw=1, label="ln 16: all there is to know")
axis.set(xlabel="optimizer step", ylabel="loss (nats per token)", ylim=(0, 3.4))
axis.set_title("A loss below the entropy of the data is a leak, not a success")
axis.legend(frameon=False, loc="center right")
plt.show()

# %% [markdown]
# ## It can learn
# The closing check of any new model: can it memorize a single batch? If 50 steps do not
# bring the loss near zero, a gradient is missing somewhere. The batch is random, so
# this is memory and nothing else. We run it twice, the second time with the mixer drawn
# at random, the fault of the section on starting as the identity.


# %%
def memorize(respect_mark, steps=50):
    """Loss on one fixed batch, step by step."""
    torch.manual_seed(12)
    model = Mamba3Transformer({**vars(small), "a_init": "decay"})
    if not respect_mark:
        for layer in model.layers:
            nn.init.normal_(layer.mimo.weight, 0.0, small.init_std)
    text = torch.randint(32, (4, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = model(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


# %%
learned, losses = memorize(respect_mark=True)
_, scrambled_losses = memorize(respect_mark=False)
assert losses[-1] < 0.1 < 3 < losses[0]
assert sum(scrambled_losses) > 1.1 * sum(losses), "a random mixer learns later"
heads = head_blocks(learned.layers[0].mimo.weight - torch.eye(64), 4)
assert heads.min() > 0.1, "every head now hears every other"

# %%
fig, (curve, grid) = plt.subplots(1, 2, figsize=(7.6, 2.9), width_ratios=(1.6, 1))
curve.plot(losses, color=BLUE, label="mixer starts as the identity")
curve.plot(scrambled_losses, color=RED, label="mixer drawn at random")
curve.axhline(0.1, color=BLACK, ls="--", lw=1)
curve.set(xlabel="optimizer step", ylabel="loss (nats per token)", ylim=(0, 3.6))
curve.set_title("One batch is memorized in 50 steps")
curve.legend(frameon=False)
image = grid.imshow(heads, cmap="cividis", vmin=0)
grid.set(xlabel="from head", ylabel="to head", xticks=range(4), yticks=range(4))
grid.set_title("What the mixer learned")
fig.colorbar(image, ax=grid, label="norm of block minus start", shrink=0.8)
plt.show()

# %% [markdown]
# ## Pitfalls
#
# - **The layout of `in_proj` is a contract with every saved weight.** A wrong slice has
#   the right shape. Test it by nudging columns, not by reading.
# - **`.to(torch.bfloat16)` takes the imaginary part of $A$.** Use autocast.
# - **Initialize by module, not by tensor.** A mark on a tensor is lost where the tensor
#   is made anew, by `copy.deepcopy` or by `to_empty` (checked below), and so is a tie.
# - **Sum, then divide.** A mean of means is not the mean, and the mean of nothing is
#   NaN.
# - **Count parameters, not entries** of the state dict: tied tensors appear twice
#   there.
# - **`doc_ids` see changes inside one call only.** Whether its first token goes on with
#   the document that the states come from, `previous_doc_ids` says.
# - **A loss that is too good is a bug** until shown otherwise.

# %%
import copy

copied = copy.deepcopy(learned)
assert not hasattr(copied.layers[0].mimo.weight, "_identity_init"), "the mark is lost"
with torch.device("meta"):
    empty = Mamba3Transformer(small)  # shapes without numbers
empty = empty.to_empty(device="cpu")
assert empty.lm_head.weight is not empty.embed.weight, "the tie is lost"
for start in (copied, empty):
    start.reset_parameters()
    assert start.lm_head.weight is start.embed.weight
    assert torch.equal(start.layers[1].mimo.weight, torch.eye(64))
    assert torch.equal(start.layers[1].A, init_decay(4, start.cfg.a_init))

# %% [markdown]
# **Next:** [notebook 08](08_training.ipynb) trains this model on real text, with the
# trainer of the package.
