# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_triton"]
# # A Triton kernel
# The inside of a chunk, in one program of a GPU kernel.
#
# **After it you can**
# - say where a number lives on a GPU, and what it costs to move it;
# - write a kernel in Triton from programs, tiles, masks and `tl.dot`, and test each of
#   its parts alone;
# - choose a precision knowing its error, and refuse what a kernel cannot do in a line
#   that helps;
# - count the bytes, the registers and the operations of a kernel, and read from them
#   what limits it.
#
# **Before it** you need [notebook 03](03_chunkwise_ssd.ipynb): the causal matrix $L$,
# $Y_{\text{diag}}$ and the state of a chunk; and
# [notebook 04](04_complex_autograd.ipynb): how a complex tensor lies in memory, and the
# `autograd.Function` around the kernel. No GPU: on a CPU Triton *interprets* the
# kernel, program by program, with NumPy.
#
# **How long**: about an hour to read, an estimate; the last cell prints how long the
# notebook ran.
#
# **Where its cells go**: the exported cells finish `mamba3lite/models/ssd_triton.py`,
# the kernel behind `ssd_dispatch="triton"`.

# %% [markdown]
# ## The tools
# Triton decides when it is imported whether it compiles or interprets, from the
# environment variable `TRITON_INTERPRET`. So this comes first; set later, it would
# change nothing. On a machine with a GPU everything below is compiled and run there.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %% [markdown]
# The package has to be importable where there is no Triton, so the import may fail, and
# every kernel stands under `if HAS_TRITON`.

# %% tags=["export"]
import os

import torch
from jaxtyping import Complex, Int
from torch import Tensor

from mamba3lite.models.ssd_complex import KernelUnavailable, _check_precision

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

# %%
import json
import math
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mamba3lite.models.ssd_triton as package
from mamba3lite.models.ssd_complex import (
    _to_chunks,
    per_chunk_ssd_pytorch,
    ssd_complex_chunkwise,
    ssd_naive_complex,
)
from mamba3lite.models.ssd_triton import _PerChunkSSDTriton, _view_real_imag

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

# %% [markdown]
# ## Where the numbers live
# *What does a GPU spend its time on?* Rarely on arithmetic. A GPU is some hundred
# processors, each with a little memory of its own, around one large memory that all of
# them share. Closer is faster and smaller:
#
# | memory | size on an H200 | shared by | source |
# |---|---|---|---|
# | registers | 65,536 of 32 bits on each of 132 SMs | nobody | tuning guide |
# | shared memory | 228 KB an SM, 227 KB of it usable | one program | tuning guide |
# | L2 cache | 50 MB on the H100, 60 MB on the full chip | all programs | white paper |
# | HBM, "global memory" | 141 GB at 4.8 TB/s | all programs | data sheet |
#
# An SM, a streaming multiprocessor, is one of those processors: 128 lanes of float32
# arithmetic and four matrix units. The sources are NVIDIA's
# [Hopper tuning guide](https://docs.nvidia.com/cuda/hopper-tuning-guide/index.html),
# the [H100 white
# paper](https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper)
# and the [H200 data sheet](https://www.nvidia.com/en-us/data-center/h200/). The data
# sheet also says 67 TFLOP/s in float32, and 989 TFLOP/s in TF32 "with sparsity", which
# is half of that, 494, for ordinary dense matrices. For the L2 cache of an H200 we take
# the 50 MB; `torch.cuda.get_device_properties(0).L2_cache_size` says what yours has.
#
# Speeds of the inner levels are not in those papers, but follow from them. A lane does
# a multiply-add, two operations, in a clock cycle; that gives the clock. Shared memory
# serves 32 words of 4 bytes a cycle and SM (CUDA programming guide). And a multiply-add
# reads three registers and writes one.

# %%
SMS, LANES = 132, 128
HBM_SPEED, FP32_SPEED, TF32_SPEED = 4.8e12, 67e12, 494e12  # bytes, operations a second
clock = FP32_SPEED / (SMS * LANES * 2)
assert 1.9e9 < clock < 2.0e9, "cycles a second"

levels = ["registers", "shared memory", "L2 cache", "HBM"]
sizes = [SMS * 65_536 * 4, SMS * 228 * 1024, 50 * 1024**2, 141e9]
speeds = [FP32_SPEED / 2 * 16, SMS * 32 * 4 * clock, math.nan, HBM_SPEED]
assert sizes[0] + sizes[1] > sizes[2], "the SMs hold more than the cache between them"
assert sizes[3] > 2000 * (sizes[0] + sizes[1])
assert 6 < speeds[1] / HBM_SPEED < 8 and 100 < speeds[0] / HBM_SPEED < 120
for level, size, speed in zip(levels, sizes, speeds, strict=True):
    told = "not published" if math.isnan(speed) else f"{speed / 1e12:6.1f} TB/s"
    print(f"{level:14s} {size / 2**20:9,.0f} MiB   {told}")

# %%
figure, (left, right) = plt.subplots(1, 2, sharey=True)
colors = [GREEN, SKY, ORANGE, RED]
left.barh(levels, [size / 2**20 for size in sizes], color=colors, edgecolor=BLACK)
left.set(xscale="log", xlabel="size on the whole chip [MiB]", xlim=(10, 1e6))
left.set_title("The far memory holds 2000 times more,")
right.barh(levels, [s / 1e12 for s in speeds], color=colors, edgecolor=BLACK)
right.text(1.2, 2, "not published", va="center", fontsize=9)
right.set(xscale="log", xlabel="bandwidth [TB/s]", xlim=(1, 2000))
right.set_title("the near one is 100 times faster")
left.invert_yaxis()
plt.show()

# %% [markdown]
# So fetch a number from HBM once, do everything with it that needs doing, and write
# back only results. For us: load $B$, $C$ and $X$ of a chunk, build $L$ and $C B^\top$
# *on the SM*, and let them die there. Nobody outside needs a $C \times C$ matrix.
#
# Does a chunk of one head fit on an SM? Counted with all tiles held at once, in bytes:
# three complex inputs, the complex $C B^\top$, and the magnitude of $L$, which is real.


# %%
def working_set(C, P, N):
    """Bytes of B, C, X, C B^T (complex64) and |L| (float32) of one chunk and head."""
    return 8 * (2 * C * N + C * P + C * C) + 4 * C * C


registers, shared = 65_536 * 4, 227 * 1024
assert working_set(64, 64, 64) == 144 * 1024 < registers
assert working_set(128, 128, 128) == 576 * 1024 > registers + shared

# %% [markdown]
# A chunk of 64 with $N = P = 64$ fits into the registers of one SM. With 128 it does
# not fit into registers and shared memory together. And a program cannot use all the
# registers as it likes: that gets a section of its own, when its parts are there.

# %% [markdown]
# ## Programs, tiles, masks
# *How does one write for 132 processors?* Not for threads. In Triton one writes a
# **program** that works on **tiles**, and launches many copies of it, a grid. A program
# asks which copy it is (`tl.program_id`), computes the *addresses* of its tile
# (`tl.arange` makes 0, 1, 2, ... in registers), loads, computes, stores. How the tile
# is spread over threads is left to the compiler (Tillet, Kung and Cox 2019,
# [doi 10.1145/3315508.3329973](https://doi.org/10.1145/3315508.3329973)).
#
# Sides of a tile are powers of two, known when compiling: `tl.constexpr`. A length of
# 100 in tiles of 32 leaves a last tile that hangs over the edge. A **mask** says which
# of its elements exist.


# %%
@triton.jit
def double_all(x_ptr, y_ptr, length, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if MASKED:
        x = tl.load(x_ptr + at, mask=at < length)
        tl.store(y_ptr + at, 2 * x, mask=at < length)
    else:
        tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


x = torch.randn(128, device=device)
for masked in (True, False):
    y = torch.full((128,), -1.0, device=device)  # 100 are ours, 28 somebody else's
    double_all[(triton.cdiv(100, 32),)](x, y, 100, BLOCK=32, MASKED=masked)
    assert torch.equal(y[:100], 2 * x[:100])
    untouched = bool((y[100:] == -1).all())
    assert untouched == masked
    print(f"mask {masked!s:5}: the neighbor's memory is as it was: {untouched}")

# %% [markdown]
# Without the mask the 100 results are right and 28 numbers of somebody else are gone.
# Nothing reports it: in this cell the neighbor is our own buffer, in a program it is
# whatever was allocated next.

# %% [markdown]
# ## Two layouts, one formula
# Our kernel will need no mask, because the tile *is* the chunk: the host has padded
# time to whole chunks, and refuses sides that are no powers of two. What it does need
# is the right addresses. All inputs have the shape (B, nc, C, H, ·), the last axis
# fastest, so they are lists of *rows* of $N$ or $P$ numbers. Two orders of rows occur:
#
# - **contiguous**, steps before heads, as the shape says: neighbors in time lie $H$
#   rows apart;
# - **heads before steps**, which is what the chunkwise scan hands over (`_to_chunks`
#   of notebook 03): neighbors in time are neighbors in memory.
#
# A program owns one (b, chunk, head). With two numbers, the distance of two steps and
# the distance of two heads, one formula serves both:
# $$\mathrm{first} = (b \, n_c + \mathrm{chunk}) \, C H
# \; + \; \mathrm{head} \cdot \mathrm{row\_head} ,$$
# $$\mathrm{row}(l) = \mathrm{first} + l \cdot \mathrm{row\_step} .$$
# The state, (B, nc, H, P, N), is one block. The formula is checked against PyTorch's
# own indexing, for every program and both layouts.

# %%
B, nc, C, H, P, N = 1, 2, 4, 3, 5, 6
place = torch.arange(B * nc * C * H * N)
LAYOUTS = {  # name: row_step, row_head, the number in each place as (B, nc, C, H, N)
    "contiguous": (H, 1, place.view(B, nc, C, H, N)),
    "heads first": (1, C, place.view(B, nc, H, C, N).transpose(2, 3)),
}
place_of_state = torch.arange(B * nc * H * P * N).view(B, nc, H, P, N)
owners = {name: torch.full((B * nc * C * H,), -1) for name in LAYOUTS}
owners["state"] = torch.full((B * nc * H * P,), -1)
step, n, p = torch.arange(C), torch.arange(N), torch.arange(P)
for program, (b, chunk, head) in enumerate(
    torch.cartesian_prod(*map(torch.arange, (B, nc, H)))
):
    for name, (row_step, row_head, places) in LAYOUTS.items():
        row = (b * nc + chunk) * C * H + head * row_head + step * row_step
        assert torch.equal(row[:, None] * N + n, places[b, chunk, :, head])
        assert (owners[name][row] == -1).all(), "no row belongs to two programs"
        owners[name][row] = program
    row = ((b * nc + chunk) * H + head) * P + p
    assert torch.equal(row[:, None] * N + n, place_of_state[b, chunk, head])
    owners["state"][row] = program
assert all((owner >= 0).all() for owner in owners.values()), "and none is left out"

z = _to_chunks(torch.randn(B, nc * C, H, N), C)
assert z.shape == (B, nc, C, H, N) and z.transpose(2, 3).is_contiguous()

# %%
shown = 4  # (b, chunk, head) = (0, 1, 1)
figure, axes = plt.subplots(1, 3, figsize=(7.8, 3.9))
palette = plt.matplotlib.colors.ListedColormap(["#f4f4f4", "#d9d9d9", BLUE])
labels = ["(b, chunk, step, head)", "(b, chunk, head, step)", "(b, chunk, head, p)"]
titles = ["B, contiguous: stripes", "B, heads first: a block", "the state: a block"]
for axis, owner, label, title in zip(
    axes, owners.values(), labels, titles, strict=True
):
    look = torch.where(owner == shown, 2, owner % 2)[:, None].expand(-1, N)
    axis.pcolormesh(look, cmap=palette, vmin=0, vmax=2, edgecolors="white", lw=0.6)
    axis.set(title=title, xlabel="n [index]", xticks=[], ylabel=f"row = {label}")
    axis.invert_yaxis()
figure.suptitle("Blue: what program (0, 1, 1) of 6 touches", fontsize=11)
plt.show()

# %% [markdown]
# ## A complex number is one word
# Triton has no complex numbers and no complex pointers. The first version of this
# kernel therefore did what notebook 04 prepares: split every input into two contiguous
# halves, launch, and zip the halves of the outputs together again. Each of these copies
# reads every byte and writes it again, next to a kernel that reads or writes it once.
# As in notebook 02, PyTorch is asked what it moves.


# %%
class Meter(TorchDispatchMode):
    """Elements made, and bytes read and written, by the operations of these names."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.elements, self.bytes = names, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.names:
            leaves = [z for z in tree_leaves((args, out)) if isinstance(z, Tensor)]
            self.bytes += sum(z.nbytes for z in leaves)
            self.elements += out.numel()
        return out


tensors = [torch.randn(2, 3, side, dtype=torch.complex64) for side in (64, 64, 64, 1)]
with Meter("clone", "complex") as meter:
    halves = [_view_real_imag(z) for z in tensors]
    zipped = [torch.complex(*pair) for pair in halves]
assert all(map(torch.equal, zipped, tensors))
assert meter.bytes == 2 * 2 * sum(z.nbytes for z in tensors), "there, and back"

# %% [markdown]
# With inputs split and outputs zipped, every byte crosses three times. The copies cost
# twice as much as the kernel, and a faster kernel would not help.
#
# They are not needed. A complex64 number is eight bytes, the real part first. Read as
# *one* 64-bit integer, on a little-endian machine, its low 32 bits are the real part
# and its high 32 bits the imaginary one. `z.view(torch.int64)` is such a tensor of
# words, of the same shape and in the same memory. So the kernel loads words and takes
# them apart in registers: `.to(tl.int32)` keeps the low half, `>> 32` brings the high
# one down, and `bitcast=True` reads the bits as a float32.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _load_complex(ptr, at):
        """A complex64 tile as two float32 tiles: one number is one 64-bit word."""
        word = tl.load(ptr + at)
        re = word.to(tl.int32).to(tl.float32, bitcast=True)
        im = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        return re, im

    @triton.jit
    def _store_complex(ptr, at, re, im):
        """The way back: two float32 tiles become one tile of 64-bit words."""
        low = re.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = im.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(ptr + at, low | high)

# %% [markdown]
# Bits are moved here, not numbers, so the check is on bits: zeros of either sign,
# infinities, NaN, and numbers below the normal range, in all combinations. Whatever the
# layout, one number is one word.


# %%
@triton.jit
def copy_words(z_ptr, out_ptr, LENGTH: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, LENGTH)
    re, im = _load_complex(z_ptr, at)
    if MASKED:
        _store_complex(out_ptr, at, re, im)
    else:
        low = re.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(out_ptr + at, low | (im.to(tl.int32, bitcast=True).to(tl.int64) << 32))


odd = torch.tensor([0.0, -0.0, 1.5, -1.5, 1e-40, math.inf, -math.inf, math.nan])
z = torch.complex(*torch.cartesian_prod(odd, odd).T.contiguous()).to(device)
words = z.view(torch.int64)
assert words.data_ptr() == z.data_ptr() and words.shape == z.shape, "no copy"
one = torch.tensor([1 + 2j], dtype=torch.complex64).view(torch.int64).item()
low, high = torch.tensor([1.0, 2.0]).view(torch.int32).tolist()
assert one == high * 2**32 + low, "little-endian: the real part is the low half"

out, bad = torch.zeros_like(words), torch.zeros_like(words)
copy_words[(1,)](words, out, LENGTH=64, MASKED=True)
copy_words[(1,)](words, bad, LENGTH=64, MASKED=False)
assert torch.equal(out, words), "bit for bit"
broken = bad != words
assert torch.equal(broken, z.real.signbit()) and 0 < broken.sum() < len(z)
assert bad.view(torch.complex64)[broken].imag.isnan().all()

# %% [markdown]
# What breaks is the way back without `& 0xFFFFFFFF`. Widening a negative 32-bit integer
# fills the upper half with ones, to keep the sign; the *or* then burns them into the
# imaginary part. It happens just where the real part is negative.
#
# One more trap of notebook 04 is still there: a conjugate that has not happened yet.
# Here PyTorch guards the door, and `resolve_conj()` opens it.

# %%
lazy = z.conj()
try:
    lazy.view(torch.int64)
except RuntimeError as error:
    assert "conjugate" in str(error)
else:
    raise AssertionError("words of a conjugate that was never written down")
assert lazy.resolve_conj().view(torch.int64).shape == z.shape

# %% [markdown]
# ## What the parts are tested against
# Four steps make the kernel: the decay, $C B^\top$, the output, the state. Each gets a
# little kernel of its own that calls the exported part, runs *one* program, and is
# compared with the formula in complex128 on random inputs whose steps and angles differ
# from token to token. Two decays: weak, where everything is still there at the end of
# the chunk, and strong, where nothing is and exponents are large. The output starts as
# NaN, so that an element nobody writes shows.

# %%
RATES = {"weak": 1e-3, "strong": 16.0}


def random_chunks(B=1, nc=1, C=64, H=1, P=64, N=64, rate=0.1):
    """Bc, Cc, Xc, A_log, decay_states, complex64, as the chunkwise scan makes them."""
    steps = F.softplus(torch.randn(B, nc, C, H))
    angles = math.pi * (2 * torch.rand(B, nc, C, H) - 1)
    A_log = torch.complex(-rate * steps, angles)
    total = A_log.to(torch.complex128).cumsum(2)
    decay_states = (total[:, :, -1:] - total).exp().to(torch.complex64)
    Bc, Cc, Xc = (
        torch.randn(B, nc, C, H, side, dtype=torch.complex64) for side in (N, N, P)
    )
    return [z.to(device) for z in (Bc, Cc, Xc, A_log, decay_states)]


def words_of(z):
    return z.view(torch.int64) if z.is_complex() else z


def run_one(kernel, inputs, shape, **constants):
    """One program; complex tensors go in as words. Its output was NaN before."""
    nan = complex(math.nan, math.nan)
    out = torch.full(shape, nan, dtype=torch.complex64, device=device)
    kernel[(1,)](*map(words_of, [*inputs, out]), **constants)
    return out


def exact(*tensors):
    return [z.cpu().to(torch.complex128) for z in tensors]


def relative_error(got, wanted):
    return ((got.cpu() - wanted).norm() / wanted.norm()).item()


# %% [markdown]
# ## Step one: decay
# The factors of one chunk, from its log decays $a_t = u_t + i v_t$. With the cumulative
# sums $U$ and $V$,
# $$L_{ls} = e^{U_l - U_s} \, e^{i (V_l - V_s)} \ \ (s \le l), \qquad
# L_{ls} = 0 \ \ (s > l) .$$
# How many sines does that take? Notebook 03 says: *a phase factors, a magnitude must
# not*. Written as one $C \times C$ tile of angles, $2 C^2$ sines and cosines. Written
# as $e^{i V_l} \, e^{-i V_s}$, a factor on each side, $2 C$: one pair for every step.
# Both are written down in PyTorch, and counted.

# %%
A_log = exact(random_chunks(C=64)[3].flatten())[0]
U, V = A_log.real.cumsum(0), A_log.imag.cumsum(0)
magnitude = (U[:, None] - U).masked_fill(U[:, None] > U, -math.inf).exp()
with Meter("cos", "sin") as direct:
    angle = V[:, None] - V
    L_direct = magnitude * torch.complex(angle.cos(), angle.sin())
with Meter("cos", "sin") as factored:
    phase = torch.complex(V.cos(), V.sin())
    L_factored = magnitude * phase[:, None] * phase.conj()
assert torch.allclose(L_direct, L_factored, rtol=0, atol=1e-12)
assert direct.elements == 2 * 64 * 64 and factored.elements == 2 * 64
print(f"sines and cosines: {direct.elements} direct, {factored.elements} factored")

# %% [markdown]
# So `_decay` returns the magnitude $|L|$ alone, a real tile, and `_turn` multiplies
# each row of a complex tile by a complex number of its own. There are no complex
# numbers in Triton, so a complex tile is two real ones. In the magnitude the exponent
# is *selected* before `tl.exp` sees it: where $s > l$ it becomes $-\infty$, and so it
# does between two documents. What documents are, notebook 03 says: the steps between
# two boundaries, counted within a chunk, and the count is what the kernel is given. The
# sources are arguments of their own, because later only some of them are looked at at a
# time.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _decay(U, U_source, step, source, document, document_source):
        """exp(U[l] - U[s]) for s <= l in one document, else 0; exactly 1 at l = s."""
        seen = step[:, None] >= source[None, :]
        seen = seen & (document[:, None] == document_source[None, :])
        # Select before exp: above the diagonal the exponent is positive and overflows.
        return tl.exp(tl.where(seen, U[:, None] - U_source[None, :], float("-inf")))

    @triton.jit
    def _turn(re, im, turn_re, turn_im):
        """Each row of a complex tile times a complex number of its own."""
        turn_re, turn_im = turn_re[:, None], turn_im[:, None]
        # Written out, since a compiler may fuse either product into the sum.
        out_re = tl.fma(re, turn_re, -(im * turn_im))
        return out_re, tl.fma(re, turn_im, im * turn_re)

# %% [markdown]
# The test puts the three factors together again. `tl.cumsum` runs along the tile.
# Alone, the magnitude is exactly 1 on the diagonal: nothing lies between a token and
# itself.


# %%
@triton.jit
def turned(L, V):
    cos, sin = tl.cos(V), tl.sin(V)
    return _turn(L * cos[None, :], -L * sin[None, :], cos, sin)


@triton.jit
def decay_alone(A_ptr, L_ptr, C: tl.constexpr, TURNED: tl.constexpr):
    step = tl.arange(0, C)
    A_re, A_im = _load_complex(A_ptr, step)
    U, V = tl.cumsum(A_re, 0), tl.cumsum(A_im, 0)
    one = tl.zeros((C,), tl.float32)  # all in one document
    L_re = _decay(U, U, step, step, one, one)
    L_im = tl.zeros((C, C), tl.float32)
    if TURNED:
        L_re, L_im = turned(L_re, V)
    _store_complex(L_ptr, step[:, None] * C + step[None, :], L_re, L_im)


def decay_exact(A_log):
    total = A_log.cumsum(0)
    span = total[:, None] - total
    future = torch.ones(len(span), len(span), dtype=torch.bool).triu(1)
    return span.masked_fill(future, 0).exp().masked_fill(future, 0)


for rate in RATES.values():
    for C in (16, 64, 128):
        A_log = random_chunks(C=C, rate=rate)[3].flatten()
        wanted = decay_exact(*exact(A_log))
        L = run_one(decay_alone, [A_log], (C, C), C=C, TURNED=True)
        assert (L.cpu() - wanted).abs().max() < 2e-5, "absolute; entries are at most 1"
        L = run_one(decay_alone, [A_log], (C, C), C=C, TURNED=False)
        assert (L.cpu() - wanted.abs()).abs().max() < 2e-5
        assert (L.diagonal() == 1).all() and (L.real.triu(1) == 0).all()

# %% [markdown]
# ### What breaks: the mask after exp
# Above the diagonal the exponent runs backwards in time and is positive. At strong
# decay $e^{U_l - U_s}$ overflows there, and infinity times the mask's zero is NaN. (A
# `tl.where` *after* `tl.exp` throws the infinity away and is finite in the forward
# pass. Notebook 03 showed what it does to gradients, so we do not start with it.)


# %%
@triton.jit
def decay_too_late(A_ptr, L_ptr, C: tl.constexpr, HOW: tl.constexpr):
    step = tl.arange(0, C)
    A_re, A_im = _load_complex(A_ptr, step)
    U, V = tl.cumsum(A_re, 0), tl.cumsum(A_im, 0)
    causal = step[:, None] >= step[None, :]
    grown = tl.exp(U[:, None] - U[None, :])
    if HOW == "multiply":
        magnitude = grown * causal.to(tl.float32)
    else:
        magnitude = tl.where(causal, grown, 0.0)
    L_re, L_im = turned(magnitude, V)
    _store_complex(L_ptr, step[:, None] * C + step[None, :], L_re, L_im)


# 48 steps that forget, then 80 that remember.
rates = torch.cat([2.5 + torch.rand(48), 0.03 + 0.02 * torch.rand(80)])
A_log = torch.complex(-rates, torch.full((128,), 0.15)).to(device)
good = run_one(decay_alone, [A_log], (128, 128), C=128, TURNED=True)
with warnings.catch_warnings():  # NumPy, which interprets, reports what a GPU does not
    warnings.simplefilter("ignore", RuntimeWarning)
    bad = run_one(decay_too_late, [A_log], (128, 128), C=128, HOW="multiply")
    late = run_one(decay_too_late, [A_log], (128, 128), C=128, HOW="select")
overflow = math.log(torch.finfo(torch.float32).max)
assert -A_log.real[1:].sum() > overflow, "the exponent in the upper right corner"
assert good.isfinite().all() and late.isfinite().all()
broken = bad.real.isnan()
assert broken.any() and not broken.tril().any(), "NaN, and only above the diagonal"
Y_row = bad.real[0] @ torch.ones(128, device=device)
assert Y_row.isnan(), "one NaN in a row takes the whole output of that step with it"

# %%
figure, axes = plt.subplots(1, 2, figsize=(7.8, 3.4), sharey=True)
warm = plt.matplotlib.colormaps["PuOr"].with_extremes(bad=BLACK)
titles = ["mask, then exp: finite", "exp, then mask: black is NaN"]
for axis, values, title in zip(axes, (good, bad), titles, strict=True):
    image = axis.imshow(values.real.cpu(), cmap=warm, vmin=-1, vmax=1)
    axis.set(xlabel="source step s", title=title)
axes[0].set_ylabel("output step l")
figure.colorbar(image, ax=axes, label="Re L[l, s] [1]")
plt.show()

# %% [markdown]
# ## Step two: scores
# $G_{ls} = \sum_n C_{ln} \, e^{-iV_s} B_{sn}$, complex and without a conjugate, the
# rows of $B$ turned back. `tl.dot` multiplies real tiles whose sides are at least 16,
# so one complex product is four real ones:
# $$\mathrm{Re}(ab) = a_r b_r - a_i b_i, \qquad \mathrm{Im}(ab) = a_r b_i + a_i b_r .$$
# `acc=` adds a product to a float32 tile: nothing is rounded in between, and the sum so
# far, `re` and `im`, can come from a product before. And `input_precision` is always
# said. On a GPU with matrix units the default of `tl.dot` for float32 is "tf32", ten
# bits of mantissa; more about it below.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _complex_dot(a_re, a_im, b_re, b_im, re, im, PRECISION: tl.constexpr):
        """(re, im) + a b for complex tiles: four real products, float32 sums."""
        re = tl.dot(a_re, b_re, acc=re, input_precision=PRECISION)
        re = tl.dot(-a_im, b_im, acc=re, input_precision=PRECISION)
        im = tl.dot(a_re, b_im, acc=im, input_precision=PRECISION)
        im = tl.dot(a_im, b_re, acc=im, input_precision=PRECISION)
        return re, im


# %%
@triton.jit
def scores_alone(
    B_ptr, C_ptr, A_ptr, G_ptr,
    C: tl.constexpr, N: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, C)
    at_n = step[:, None] * N + tl.arange(0, N)[None, :]
    _, A_im = _load_complex(A_ptr, step)
    V = tl.cumsum(A_im, 0)
    B_re, B_im = _load_complex(B_ptr, at_n)
    if CONJUGATE:
        B_im = -B_im
    B_re, B_im = _turn(B_re, B_im, tl.cos(V), -tl.sin(V))
    C_re, C_im = _load_complex(C_ptr, at_n)
    zero = tl.zeros((C, C), tl.float32)
    G_re, G_im = _complex_dot(
        C_re, C_im, tl.trans(B_re), tl.trans(B_im), zero, zero, "ieee"
    )
    _store_complex(G_ptr, step[:, None] * C + step[None, :], G_re, G_im)


for C, N in [(16, 32), (64, 16), (32, 32)]:
    Bc, Cc, _, A_log, _ = random_chunks(C=C, N=N)
    inputs = [Bc.view(C, N), Cc.view(C, N), A_log.flatten()]
    b, c, a = exact(*inputs)
    back = torch.exp(-1j * a.imag.cumsum(0))[:, None]
    sizes = {"C": C, "N": N}
    G = run_one(scores_alone, inputs, (C, C), **sizes, CONJUGATE=False)
    assert relative_error(G, c @ (b * back).mT) < 5e-6
    G = run_one(scores_alone, inputs, (C, C), **sizes, CONJUGATE=True)
    assert relative_error(G, c @ (b.conj() * back).mT) < 5e-6
    assert relative_error(G, c @ (b * back).mT) > 0.5

# %% [markdown]
# What breaks is one sign. Attention over complex vectors would take $C B^H$;
# the recurrence reads $\sum_n C_n h_n$, without a conjugate, and the version with a
# minus before $B_i$ is not a little wrong.

# %% [markdown]
# ## Step three: the output
# $$Y_l = e^{iV_l} \sum_{s \le l} |L_{ls}| \, G_{ls} \, x_s .$$
# The magnitude is real, so $|L| \odot G$ is two real products, and the last turn is one
# per row of the result. That would be a line each, if the tiles were always small
# enough. They are not (the section after the next one counts), so the sum over $s$ goes
# in steps of `BLOCK_S` source positions, and the sum over $n$ inside $G$ in steps of
# `BLOCK_K` states. Sums may be cut anywhere.
#
# One thing is not obvious. $U$ and $V$ are tiles in registers, and a tile has no index:
# the entries of 16 positions cannot be taken out of it. `_pick` compares all positions
# with the wanted ones and adds up where they agree, one number and many zeros, which
# changes no value.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _pick(z, step, source, WHOLE: tl.constexpr):
        """z at the positions `source` of the chunk, without rounding."""
        if WHOLE:
            return z
        return tl.sum(tl.where(step[:, None] == source[None, :], z[:, None], 0.0), 0)

    @triton.jit
    def _chunk_output(
        B_ptr, C_ptr, X_ptr, U, V, document, row_step,
        BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Y = ((C B^T) * L) X, from BLOCK_S positions and BLOCK_K states at a time.

        The phase of L is a factor on either side: row s of B turns back by V[s], row l
        of the result forward by V[l].
        """
        WHOLE: tl.constexpr = BLOCK_S == BLOCK_C
        step = tl.arange(0, BLOCK_C)
        k = tl.arange(0, BLOCK_K)
        p = tl.arange(0, BLOCK_P)
        turn_re, turn_im = tl.cos(V), tl.sin(V)
        Y_re = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        Y_im = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
        for s0 in range(0, BLOCK_C, BLOCK_S):
            source = s0 + tl.arange(0, BLOCK_S)
            back_re = _pick(turn_re, step, source, WHOLE)
            back_im = -_pick(turn_im, step, source, WHOLE)
            G_re = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
            G_im = tl.zeros((BLOCK_C, BLOCK_S), tl.float32)
            for n0 in range(0, BLOCK_N, BLOCK_K):
                at_n = (n0 + k)[None, :]
                C_re, C_im = _load_complex(
                    C_ptr, (step * row_step)[:, None] * BLOCK_N + at_n
                )
                B_re, B_im = _load_complex(
                    B_ptr, (source * row_step)[:, None] * BLOCK_N + at_n
                )
                B_re, B_im = _turn(B_re, B_im, back_re, back_im)
                G_re, G_im = _complex_dot(
                    C_re, C_im, tl.trans(B_re), tl.trans(B_im), G_re, G_im, PRECISION
                )
            L = _decay(
                U, _pick(U, step, source, WHOLE), step, source,
                document, _pick(document, step, source, WHOLE),
            )  # fmt: skip
            X_re, X_im = _load_complex(
                X_ptr, (source * row_step)[:, None] * BLOCK_P + p[None, :]
            )
            Y_re, Y_im = _complex_dot(
                L * G_re, L * G_im, X_re, X_im, Y_re, Y_im, PRECISION
            )
        return _turn(Y_re, Y_im, turn_re, turn_im)

# %% [markdown]
# Why not sum the log decays of the 16 positions again, starting from the total before
# them? Because additions in another order round differently. Then $U_l - U_l$, from two
# sums, is not 0, and the diagonal of the decay not 1.


# %%
@triton.jit
def pick_alone(z_ptr, out_ptr, C: tl.constexpr, S: tl.constexpr):
    WHOLE: tl.constexpr = S == C
    step = tl.arange(0, C)
    z = tl.load(z_ptr + step)
    for s0 in range(0, C, S):
        source = s0 + tl.arange(0, S)
        tl.store(out_ptr + source, _pick(z, step, source, WHOLE))


z = (torch.randn(64) * torch.logspace(-30, 30, 64)).to(device)
for S in (16, 32, 64):
    out = torch.full_like(z, math.nan)
    pick_alone[(1,)](z, out, C=64, S=S)
    assert torch.equal(out, z), "not one value has changed"

logs = -torch.rand(64)
total = logs.cumsum(0)
again = logs[:16].sum() + logs[16:].cumsum(0)
assert torch.allclose(again, total[16:]) and not torch.equal(again, total[16:])

# %% [markdown]
# Now the output, with three different sides, so that no two axes can be mixed up
# unseen, and with tiles whole and in pieces.


# %%
@triton.jit
def output_alone(
    B_ptr, C_ptr, X_ptr, A_ptr, Y_ptr,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    S: tl.constexpr, K: tl.constexpr, FORGOTTEN: tl.constexpr,
):  # fmt: skip
    step = tl.arange(0, C)
    A_re, A_im = _load_complex(A_ptr, step)
    U, V = tl.cumsum(A_re, 0), tl.cumsum(A_im, 0)
    one = tl.zeros((C,), tl.float32)
    Y_re, Y_im = _chunk_output(B_ptr, C_ptr, X_ptr, U, V, one, 1, C, P, N, S, K, "ieee")
    if FORGOTTEN:  # as if the turn in the last line were missing
        Y_re, Y_im = _turn(Y_re, Y_im, tl.cos(V), -tl.sin(V))
    at = step[:, None] * P + tl.arange(0, P)[None, :]
    _store_complex(Y_ptr, at, Y_re, Y_im)


sizes = {"C": 32, "N": 64, "P": 16}
for rate in RATES.values():
    chunks = random_chunks(**sizes, rate=rate)
    Y_exact = per_chunk_ssd_pytorch(*exact(*chunks))[0].view(32, 16)
    for S, K in [(16, 16), (16, 32), (32, 16), (32, 32)]:
        pieces = sizes | {"S": S, "K": K}
        Y = run_one(output_alone, chunks[:4], (32, 16), **pieces, FORGOTTEN=False)
        assert relative_error(Y, Y_exact) < 5e-6
    Y = run_one(output_alone, chunks[:4], (32, 16), **pieces, FORGOTTEN=True)
    assert relative_error(Y, Y_exact) > 0.3
    assert relative_error(Y.abs(), Y_exact.abs()) < 5e-6, "every magnitude is right"

# %% [markdown]
# What breaks: a forgotten turn. The shape is right, the numbers are finite, and *every
# magnitude is right*. A test of norms sees nothing.

# %% [markdown]
# ## Step four: the state
# $S = \sum_s d_s\, x_s B_s^\top = X^\top K$ with $K = d \odot B$, where $d$, the decay
# from each step to the right edge of the chunk, is given, and its phase with it: this
# $B$ is not turned back first. The result is (P, N), head dimension first. The sum over
# $s$ again goes in steps of `BLOCK_S`.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _chunk_state(
        B_ptr, X_ptr, D_re_ptr, D_im_ptr, row_step,
        BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """S = X^T (decay_states * B), from BLOCK_S positions at a time."""
        n = tl.arange(0, BLOCK_N)
        p = tl.arange(0, BLOCK_P)
        S_re = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        S_im = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
        for s0 in range(0, BLOCK_C, BLOCK_S):
            row = (s0 + tl.arange(0, BLOCK_S)) * row_step
            X_re, X_im = _load_complex(X_ptr, row[:, None] * BLOCK_P + p[None, :])
            B_re, B_im = _load_complex(B_ptr, row[:, None] * BLOCK_N + n[None, :])
            K_re, K_im = _turn(
                B_re, B_im, tl.load(D_re_ptr + row), tl.load(D_im_ptr + row)
            )
            S_re, S_im = _complex_dot(
                tl.trans(X_re), tl.trans(X_im), K_re, K_im, S_re, S_im, PRECISION
            )
        return S_re, S_im


# %%
@triton.jit
def state_alone(
    B_ptr, X_ptr, D_re_ptr, D_im_ptr, S_ptr,
    C: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BLOCK_S: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    if SWAPPED:
        S_re, S_im = _chunk_state(
            X_ptr, B_ptr, D_re_ptr, D_im_ptr, 1, C, N, P, BLOCK_S, "ieee"
        )
    else:
        S_re, S_im = _chunk_state(
            B_ptr, X_ptr, D_re_ptr, D_im_ptr, 1, C, P, N, BLOCK_S, "ieee"
        )
    at = tl.arange(0, P)[:, None] * N + tl.arange(0, N)[None, :]
    _store_complex(S_ptr, at, S_re, S_im)


for rate in RATES.values():
    for P, N, BLOCK_S in [(32, 16, 16), (16, 32, 32), (32, 32, 16)]:
        sizes = {"C": 64, "N": N, "P": P}
        Bc, _, Xc, _, D = chunks = random_chunks(**sizes, rate=rate)
        S_exact = per_chunk_ssd_pytorch(*exact(*chunks))[1].view(P, N)
        inputs = [Bc, Xc, *_view_real_imag(D)]
        sizes["BLOCK_S"] = BLOCK_S
        S = run_one(state_alone, inputs, (P, N), **sizes, SWAPPED=False)
        assert relative_error(S, S_exact) < 2e-6
S = run_one(state_alone, inputs, (P, N), **sizes, SWAPPED=True)
assert S.isfinite().all() and relative_error(S, S_exact) > 1, "shape right, numbers not"
assert relative_error(S, S_exact.mT) < 2e-6

# %% [markdown]
# What breaks: (N, P) for (P, N). With the usual $N = P$ the shape is accepted; only
# numbers tell.

# %% [markdown]
# ## What fits into registers
# *Why steps of 16, why not everything at once?* A thread has at most 255 registers
# (tuning guide). What does not fit is spilled: written to slow memory and read back. So
# count, for $C = P = N = 64$. A tile of $64^2$ over 4 warps, 128 threads, is 32
# registers a thread; a complex one is 64.
#
# **On the matrix units (tf32)** the operands of a product lie in shared memory.
# Registers hold the sums, and the one complex tile that is just being loaded or turned
# on its way there. All three sums together, $S$, $G$ and $Y$, and one tile under way:
# one register more than there are, before a single address. The state first, and then
# the output, needs half, and then three quarters of that.
#
# **On the float32 lanes (ieee)** Triton gives each thread a patch of $r \times c$
# outputs and keeps in registers *all* operand entries that the patch needs, $r$ rows
# and $c$ columns over the whole inner side of the product ([its
# source](https://github.com/triton-lang/triton/blob/main/lib/Conversion/TritonGPUToLLVM/DotOpToLLVM/FMADotUtility.cpp)).
# A patch of $m = rc$ outputs has $r + c \ge 2\sqrt{m}$, so there are at least
# $2 \sqrt{m}$ times the inner side of them, next to the complex sum. That bounds the
# inner side: `BLOCK_S` for $Y$ and $S$, `BLOCK_K` for $G$.

# %%
LIMIT = 255
complex_tile = 2 * 64 * 64 // (4 * 32)
on_matrix_units = {
    "all at once": 3 * complex_tile + complex_tile,
    "the state": complex_tile + complex_tile,
    "then the output": 2 * complex_tile + complex_tile,
}
assert list(on_matrix_units.values()) == [256, 128, 192]


def on_lanes(rows, columns, inner, warps):
    """Registers a thread needs at least: a complex sum, the operands of one product."""
    outputs = rows * columns / (32 * warps)
    return 2 * outputs + 2 * math.sqrt(outputs) * inner


of_Y = {S: on_lanes(64, 64, S, warps=8) for S in (16, 32, 64)}
of_G = {K: on_lanes(64, 16, K, warps=8) + 2 * 64 * 64 / 256 for K in (16, 32, 64)}
assert of_Y[16] < LIMIT < of_Y[32] and of_G[32] < LIMIT < of_G[64]
assert on_lanes(64, 64, 64, warps=4) > 3 * LIMIT, "tiles of 64 are hopeless"
# With 4 warps 16 positions leave ten registers for everything else.
assert 0 < LIMIT - on_lanes(64, 64, 16, warps=4) < 11

# %%
counts = {f"tf32, {name}": count for name, count in on_matrix_units.items()}
counts["ieee, 64 positions, 4 warps"] = on_lanes(64, 64, 64, warps=4)
counts |= {f"ieee, {S} positions, 8 warps": of_Y[S] for S in (32, 16)}
counts |= {f"ieee, 16 positions, {K} states": of_G[K] for K in (64, 32)}
figure, axis = plt.subplots(figsize=(7.8, 3.1))
colors = [GREEN if count <= LIMIT else RED for count in counts.values()]
hatches = ["" if count <= LIMIT else "//" for count in counts.values()]
axis.barh(list(counts), counts.values(), color=colors, edgecolor=BLACK, hatch=hatches)
axis.axvline(LIMIT, color=BLACK, ls="--", label="255, the limit")
axis.set(xlabel="registers per thread, at least [32 bits]")
axis.set_title("Plain bars fit: one part after the other, and small steps for ieee")
axis.invert_yaxis()
axis.legend(loc="upper right")
plt.show()

# %% [markdown]
# ## The whole kernel
# Now the four steps in one program, with the addresses of the picture above. The
# launch grid is (B, nc, H): a program for each chunk of each head, none of which waits
# for another. In its order of lines: first the addresses, the base pointers moved to
# the first row of this program; then the state, stored as soon as it is done; then the
# output. $B$ and $X$ are loaded once in each part, $C$ and $B$ in pieces. The second
# load of a row comes moments after the first; the last section says where from.
#
# `_load_steps` makes $U$ and $V$. Where a document starts, the number before it is
# another one, and the log decay, which no pair of its document holds, counts 0: a
# factor of $e^{-2000}$ in the sums would cost all that come after it their digits.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _load_steps(A_re_ptr, A_im_ptr, documents_ptr, step, row_step):
        """U, V, the sums of the log decays, and the document of every step (float)."""
        row = step * row_step
        A_re, A_im = tl.load(A_re_ptr + row), tl.load(A_im_ptr + row)
        document = tl.zeros_like(A_re)
        if documents_ptr is not None:
            document = tl.load(documents_ptr + row).to(tl.float32)
            before = tl.load(documents_ptr + row - row_step, mask=step > 0, other=0)
            starts = document != before.to(tl.float32)
            A_re, A_im = tl.where(starts, 0.0, A_re), tl.where(starts, 0.0, A_im)
        return tl.cumsum(A_re, 0), tl.cumsum(A_im, 0), document

    @triton.jit
    def _ssd_per_chunk_fwd_kernel(
        B_ptr, C_ptr, X_ptr, A_re_ptr, A_im_ptr, D_re_ptr, D_im_ptr, Y_ptr, S_ptr,
        documents_ptr, n_chunks, n_heads, row_step, row_head,
        BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One chunk of one head: Y = ((C B^T) * L) X and S = X^T (decay_states * B).

        Grid (B, nc, H). Reads rows of B, C (N) and X (P) as 64-bit words, the halves of
        A_log and decay_states, and the documents, if any; writes rows of Y (P) and one
        tile S (P, N). Rows of a chunk lie row_step apart; the first row of a head is
        row_head after the last's.
        """
        chunk = tl.program_id(0).to(tl.int64) * n_chunks + tl.program_id(1)
        head = tl.program_id(2)
        first = chunk * BLOCK_C * n_heads + head * row_head
        step = tl.arange(0, BLOCK_C)
        row = step * row_step
        n = tl.arange(0, BLOCK_N)
        p = tl.arange(0, BLOCK_P)
        B_ptr += first * BLOCK_N
        C_ptr += first * BLOCK_N
        X_ptr += first * BLOCK_P
        Y_ptr += first * BLOCK_P
        S_ptr += (chunk * n_heads + head) * BLOCK_P * BLOCK_N

        # One after the other: together, their tiles do not fit into the registers.
        S_re, S_im = _chunk_state(
            B_ptr, X_ptr, D_re_ptr + first, D_im_ptr + first, row_step,
            BLOCK_C, BLOCK_P, BLOCK_N, BLOCK_S, PRECISION,
        )  # fmt: skip
        _store_complex(S_ptr, p[:, None] * BLOCK_N + n[None, :], S_re, S_im)

        if documents_ptr is not None:
            documents_ptr += first
        U, V, document = _load_steps(
            A_re_ptr + first, A_im_ptr + first, documents_ptr, step, row_step
        )
        Y_re, Y_im = _chunk_output(
            B_ptr, C_ptr, X_ptr, U, V, document, row_step,
            BLOCK_C, BLOCK_P, BLOCK_N, BLOCK_S, BLOCK_K, PRECISION,
        )  # fmt: skip
        _store_complex(Y_ptr, row[:, None] * BLOCK_P + p[None, :], Y_re, Y_im)


# %% [markdown]
# Does it write every element, and nothing else? Values cannot tell: memory fresh from
# an allocator may hold the right answer of the call before. So we **poison** the
# outputs, fill them with NaN, and put a fence of NaN around them. Afterwards the inside
# must be finite and the fence untouched, in both layouts, with documents that differ
# from head to head. A grid that forgets the last head shows that the poison works.

# %%
B, nc, C, H, P, N = sides = 2, 2, 32, 3, 16, 64
FENCE = 64


def fenced(*shape):
    """NaN everywhere: the whole buffer, and a view of its inside of this shape."""
    size = math.prod(shape) + 2 * FENCE
    nan = complex(math.nan, math.nan)
    whole = torch.full((size,), nan, dtype=torch.complex64, device=device)
    return whole, whole[FENCE:-FENCE].view(shape)


def launch_poisoned(chunks, documents, heads, heads_first):
    """Y and S as (B, nc, C, H, P) and (B, nc, H, P, N), from that many heads."""
    if heads_first:
        *chunks, documents = (
            z.transpose(2, 3).contiguous() for z in (*chunks, documents)
        )
    row_step, row_head = (1, C) if heads_first else (H, 1)
    halves = [half for z in chunks[3:] for half in _view_real_imag(z)]
    Y_whole, Y = fenced(*chunks[2].shape)
    S_whole, S = fenced(B, nc, H, P, N)
    _ssd_per_chunk_fwd_kernel[(B, nc, heads)](
        *map(words_of, [*chunks[:3], *halves, Y, S]), documents,
        nc, H, row_step, row_head, BLOCK_C=C, BLOCK_P=P, BLOCK_N=N,
        BLOCK_S=16, BLOCK_K=32, PRECISION="ieee",
    )  # fmt: skip
    for whole in (Y_whole, S_whole):
        assert whole[:FENCE].real.isnan().all() and whole[:FENCE].imag.isnan().all()
        assert whole[-FENCE:].real.isnan().all() and whole[-FENCE:].imag.isnan().all()
    return Y.transpose(2, 3) if heads_first else Y, S


chunks = random_chunks(*sides)
starts = torch.rand(B, nc, C, H) < 0.1
documents = starts.cumsum(2, dtype=torch.int32)
chunks[3][starts.to(device)] = -2000  # to be left out of the sums
Y_exact, S_exact = per_chunk_ssd_pytorch(*exact(*chunks), documents)
documents = documents.to(device)
for heads_first in (False, True):
    Y, S = launch_poisoned(chunks, documents, H, heads_first)
    assert Y.isfinite().all() and S.isfinite().all(), "every element is written"
    assert relative_error(Y, Y_exact) < 5e-6 and relative_error(S, S_exact) < 2e-6

    Y, S = launch_poisoned(chunks, documents, H - 1, heads_first)
    assert Y[..., -1, :].isnan().all() and Y[..., :-1, :].isfinite().all()
    assert S[..., -1, :, :].isnan().all() and S[..., :-1, :, :].isfinite().all()

# %% [markdown]
# ### What breaks: an offset in 32 bits
# `tl.program_id` is a 32-bit integer, and so is a product of two of them. A tensor of
# $2^{31}$ elements is not exotic: $B = 32$ sequences of 65,536 tokens with 16 heads of
# 64 have that many. Beyond, the offset turns negative, and the kernel reads and writes
# *before* the tensor. That is why the first line of the kernel says `.to(tl.int64)`,
# and says it before the multiplication.
#
# One 64-bit number is enough: `first`, by which the base pointers are moved. Inside the
# tile an offset is at most $C \cdot H \cdot N$, and 32 bits, one register in the place
# of two, hold that for any number of heads that a model has.


# %%
@triton.jit
def offsets(wide_ptr, narrow_ptr, row):
    program = tl.program_id(0)
    tl.store(wide_ptr + program, program.to(tl.int64) * row)
    tl.store(narrow_ptr + program, (program * row).to(tl.int64))


assert 32 * 65_536 * 16 * 64 == 2**31
wide, narrow = torch.zeros(2, 3, dtype=torch.int64, device=device)
offsets[(3,)](wide, narrow, 2**30)
print("64 bits:", wide.tolist())
print("32 bits:", narrow.tolist())
assert wide.tolist() == [0, 2**30, 2**31]
assert narrow.tolist() == [0, 2**30, -(2**31)]
assert 256 * 32_767 * 256 < 2**31, "inside a tile, at the largest sides: 32,767 heads"

# %% [markdown]
# ## What the kernel accepts
# A kernel does not check anything: given a wrong shape it computes a wrong address.
# Whatever it is not made for must be refused before it starts, in a line that names the
# argument and says what to do instead. There are two kinds of refusal:
#
# - **Mistakes**, a dtype or a shape that does not fit: TypeError, ValueError.
# - **Limits of the kernel**, a side or a device it cannot serve: `KernelUnavailable`.
#   A model that asked for the kernel catches this one and takes the PyTorch path.

# %% tags=["export"]
_MAX_BLOCK = 256
_MAX_CHUNKS = 65_535  # the second axis of a CUDA grid


def _interpreted() -> bool:
    """Whether triton runs its kernels on the CPU (TRITON_INTERPRET=1)."""
    return HAS_TRITON and not isinstance(_ssd_per_chunk_fwd_kernel, triton.JITFunction)


def _check_block_dims(P: int, N: int, chunk_size: int) -> None:
    """Refuse tiles that the kernel cannot hold: a side becomes one `tl.arange`.

    Raises: KernelUnavailable, a ValueError, naming the dimension.
    """
    for name, dim in {"P": P, "N": N, "chunk_size": chunk_size}.items():
        if dim > _MAX_BLOCK:
            fault = f"exceeds the {_MAX_BLOCK}-cap"
        elif dim < 1 or dim & (dim - 1):
            fault = "is not a power of two"
        elif dim < 16 and not _interpreted():
            fault = "is below 16, the smallest side of tl.dot"
        else:
            continue
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: {name}={dim} {fault}. "
            "Use ssd_dispatch='pytorch' for this config."
        )


def _check_device(device: torch.device, name: str = "per_chunk_ssd_triton") -> None:
    """Refuse tensors that no kernel can reach; `name` is the function that asks.

    Raises: KernelUnavailable, a ValueError.
    """
    if device.type != "cuda" and not _interpreted():
        raise KernelUnavailable(
            f"{name}: tensors are on {device}; the kernel takes CUDA "
            "tensors, or set TRITON_INTERPRET=1 before starting Python to run it on "
            "the CPU, slowly. Use ssd_dispatch='pytorch' for this device."
        )


def _check_triton(name: str = "per_chunk_ssd_triton") -> None:
    """Raises: ImportError, for the function `name`, when triton is not installed."""
    if not HAS_TRITON:
        raise ImportError(
            f"{name} needs triton, which is not installed: "
            "pip install triton, or use ssd_dispatch='pytorch'"
        )


def _check_chunks(named: dict[str, Tensor]) -> None:
    """Refuse dtypes, shapes and devices that do not fit each other.

    Raises: TypeError, ValueError, naming the argument.
    """
    for name, z in named.items():
        kind = "int32" if name == "documents" else "complex64"
        if z.dtype != getattr(torch, kind):
            raise TypeError(
                f"per_chunk_ssd_triton: {name}: expected {kind}, got {z.dtype}"
            )
    Xc, Bc = named["Xc"], named["Bc"]
    if Xc.ndim != 5 or Bc.ndim != 5:
        name = "Bc" if Bc.ndim != 5 else "Xc"
        raise ValueError(
            f"per_chunk_ssd_triton: {name} has shape {tuple(named[name].shape)}; "
            f"wanted (B, nc, C, H, {'N' if name == 'Bc' else 'P'})"
        )
    rows, states = tuple(Xc.shape[:4]), Bc.shape[-1]
    wanted = {"Bc": (*rows, states), "Cc": (*rows, states), "Xc": tuple(Xc.shape)}
    wanted |= {"A_log": rows, "decay_states": rows}
    if "documents" in named:
        wanted["documents"] = rows
    for name, shape in wanted.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(
                f"per_chunk_ssd_triton: {name} has shape {tuple(named[name].shape)}; "
                f"wanted {shape} to fit Xc of shape {tuple(Xc.shape)}"
            )
        if named[name].device != Xc.device:
            raise ValueError(
                f"per_chunk_ssd_triton: {name} is on {named[name].device} but Xc is on "
                f"{Xc.device}"
            )


# %%
def refused(function, *arguments):
    try:
        function(*arguments)
    except (TypeError, ValueError) as error:
        print(f"{type(error).__name__}: {error}\n")
        return str(error)
    raise AssertionError("went through")


names = ("Bc", "Cc", "Xc", "A_log", "decay_states")
named = dict(zip(names, random_chunks(), strict=True))
_check_chunks(named)
_check_block_dims(P=64, N=64, chunk_size=64)
assert "N=512" in refused(_check_block_dims, 64, 512, 64)
assert "N=48" in refused(_check_block_dims, 64, 48, 64)
for name, broken in [
    ("Bc", named["Bc"].to(torch.complex128)),
    ("Xc", named["Xc"].real),
    ("A_log", named["A_log"][:, :, :32]),
    ("documents", torch.zeros(1, 1, 64, 1, device=device)),
]:
    assert name in refused(_check_chunks, named | {name: broken})

# %% [markdown]
# Why these limits? A side becomes one `tl.arange`, which takes powers of two; the
# matrix units want 16 at least; and beyond 256 the working set is hopeless: sides of
# 512 would need nine megabytes.
#
# CPU tensors have no address that a GPU kernel could read. Triton's interpreter runs on
# them, for learning and testing, one program after the other. It also *accepts* what a
# GPU refuses: sides below 16, for one. A kernel that passes its tests here has its
# formula right; whether it compiles is another question. The next cell pretends that
# the interpreter is off.

# %%
assert working_set(512, 512, 512) == 9 * 2**20
if _interpreted():
    _check_device(torch.device("cpu"))
    _check_block_dims(P=4, N=4, chunk_size=4)
with patch.dict(globals(), _interpreted=lambda: False):
    assert "TRITON_INTERPRET=1" in refused(_check_device, torch.device("cpu"))
    assert "P=4 is below 16" in refused(_check_block_dims, 4, 4, 4)

# %% [markdown]
# ## The launch
# What the host does around the kernel: find the layout, allocate the outputs
# *uninitialized*, because we know that every element is written, and hand over words.
# Nothing of size $N$ or $P$ is copied if the inputs come in one of the two layouts.
# Only the two short vectors, `A_log` and `decay_states`, one number a step, are still
# split by `_view_real_imag` of notebook 04.
#
# How a program is run is in the table `_LAUNCH`. `BLOCK_S` and `BLOCK_K` are the steps
# from above. `num_warps` says over how many groups of 32 threads the tiles are spread,
# `num_stages` how many iterations of a loop are loaded ahead; ours is one, because what
# is loaded ahead takes room. The last two can be set from the environment, to try them
# without editing. Triton can also search by itself, with `@triton.autotune`, which
# times all variants at the first call with new sizes; we prefer a first call that is
# fast and a choice that is the same tomorrow.


# %% tags=["export"]
def _launch_option(option: str, default: int, largest: int) -> int:
    """num_warps or num_stages, unless TRITON_PER_CHUNK_NUM_WARPS or _STAGES says else.

    Raises: ValueError naming the variable, for what is not an allowed integer.
    """
    variable = f"TRITON_PER_CHUNK_{option.upper()}"
    text = os.environ.get(variable, str(default)).strip()
    value = int(text) if text.isdecimal() else 0
    powers = option == "num_warps"
    if not 1 <= value <= largest or (powers and value & (value - 1)):
        raise ValueError(
            f"{variable} is {text!r}; it must be "
            f"{'a power of two' if powers else 'an integer'} from 1 to {largest}"
        )
    return value


# Positions and states per step, and warps; for C = P = N = 64 on an H200, where other
# numbers of warps are slower (docs/benchmarks/h200-per-chunk.json).
# Plain float32 products keep their operands in registers, so they go in small steps.
_LAUNCH = {
    "ieee": {"BLOCK_S": 16, "BLOCK_K": 32, "num_warps": 8},
    "tf32": {"BLOCK_S": 64, "BLOCK_K": 64, "num_warps": 4},
}


def _launch_options(precision: str) -> dict[str, int]:
    """The launch of a precision, with what the environment says.

    Raises: ValueError naming the variable, for what is not an allowed integer.
    """
    launch = dict(_LAUNCH[precision], num_stages=1)
    for option, largest in {"num_warps": 32, "num_stages": 8}.items():
        launch[option] = _launch_option(option, launch[option], largest)
    return launch


def _per_chunk_ssd_triton_forward(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Complex[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
    documents: Int[Tensor, "B nc C H"] | None = None,
    input_precision: str = "ieee",
) -> tuple[Complex[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """Lay out the inputs, allocate the outputs, launch.

    Two layouts need no copy: contiguous, and heads before steps in memory, which is
    what `ssd_complex_chunkwise` hands over. The outputs have the layout of Bc.

    Raises:
        ImportError: triton is not installed.
        TypeError: an input is not complex64.
        KernelUnavailable: a tile does not fit this device.
        ValueError: an environment variable of the launch is not an allowed integer.

    Source: notebook 05, "The launch".
    """
    _check_triton()
    batch, n_chunks, chunk, heads, P = Xc.shape
    N = Bc.shape[-1]
    launch = _launch_options(input_precision)
    launch["BLOCK_S"] = min(launch["BLOCK_S"], chunk)
    launch["BLOCK_K"] = min(launch["BLOCK_K"], N)
    heads_first = Bc.transpose(2, 3).is_contiguous()
    row_step, row_head = (1, chunk) if heads_first else (heads, 1)
    Bc, Cc, Xc, A_log, decay_states, documents = (
        z if z is None else (z.transpose(2, 3) if heads_first else z).contiguous()
        for z in (Bc, Cc, Xc, A_log, decay_states, documents)
    )
    Y = torch.empty_like(Xc)
    S = Xc.new_empty(batch, n_chunks, heads, P, N)
    # Triton has no complex pointers; a complex64 number is one 64-bit word.
    words = [z.resolve_conj().view(torch.int64) for z in (Bc, Cc, Xc, Y, S)]
    halves = *_view_real_imag(A_log), *_view_real_imag(decay_states)
    try:
        with torch.cuda.device_of(Xc):
            _ssd_per_chunk_fwd_kernel[(batch, n_chunks, heads)](
                *words[:3], *halves, *words[3:], documents,
                n_chunks, heads, row_step, row_head, BLOCK_C=chunk, BLOCK_P=P,
                BLOCK_N=N, PRECISION=input_precision, **launch,
            )  # fmt: skip
    except triton.OutOfResources as error:
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: P={P}, N={N}, chunk_size={chunk} do not fit this "
            f"GPU ({error}). Use ssd_dispatch='pytorch' for this config."
        ) from error
    return Y.transpose(2, 3) if heads_first else Y, S


# %% [markdown]
# The table against the count of registers: the largest steps that fit.

# %%
assert max(S for S, count in of_Y.items() if count <= LIMIT) == 16
assert max(K for K, count in of_G.items() if count <= LIMIT) == 32
assert _LAUNCH["ieee"] == {"BLOCK_S": 16, "BLOCK_K": 32, "num_warps": 8}
assert _LAUNCH["tf32"]["BLOCK_S"] == 64 and _LAUNCH["tf32"]["num_warps"] == 4

# %% [markdown]
# The launcher itself: both layouts, a mixture of the two, and a conjugate that has not
# happened yet give the same numbers. The output lies in memory as `Bc` does. And the
# copies are metered: none but those of the two short vectors, except for the mixture.

# %%
for name, value in [("NUM_WARPS", "3"), ("NUM_STAGES", "two")]:
    with patch.dict(os.environ, {f"TRITON_PER_CHUNK_{name}": value}):
        assert name in refused(_per_chunk_ssd_triton_forward, *random_chunks(C=16))

chunks = random_chunks(nc=2, C=32, H=2, P=16, N=16)
turned_chunks = [
    z.transpose(2, 3).contiguous().transpose(2, 3) for z in chunks
]  # heads before steps in memory, the same numbers
Bc, *rest = chunks
ways = {
    "contiguous": chunks,
    "heads first": turned_chunks,
    "mixed": [turned_chunks[0], *rest],
    "lazy conjugate": [Bc.conj().resolve_conj().conj(), *rest],
}
short_bytes = 2 * sum(z.nbytes for z in chunks[3:])
Y_exact, S_exact = per_chunk_ssd_pytorch(*exact(*chunks))
for name, tensors in ways.items():
    with Meter("clone") as meter:
        Y, S = _per_chunk_ssd_triton_forward(*tensors)
    assert relative_error(Y, Y_exact) < 5e-6 and relative_error(S, S_exact) < 2e-6
    assert (
        Y.transpose(2, 3).is_contiguous() == tensors[0].transpose(2, 3).is_contiguous()
    )
    copied = meter.bytes - short_bytes
    assert (copied == 0) == (name in ("contiguous", "heads first"))
    print(f"{name:15s} {copied:6d} bytes moved by copies of B, C and X")

with patch.dict(os.environ, {"TRITON_PER_CHUNK_NUM_WARPS": "4"}):
    Y_4, S_4 = _per_chunk_ssd_triton_forward(*chunks)
assert relative_error(Y_4, Y_exact) < 5e-6 and relative_error(S_4, S_exact) < 2e-6

# %% [markdown]
# ## The whole function
# Checks, then `_PerChunkSSDTriton` of notebook 04: the kernel forward, the PyTorch
# reference once more backward. Its forward looks the launcher up in the package when it
# is called. The cell after the next one puts *this page's* launcher there, with a
# counter, so that what is tested is what you just read, and so that we know the kernel
# ran.


# %% tags=["export"]
def per_chunk_ssd_triton(
    Bc: Complex[Tensor, "B nc C H N"],
    Cc: Complex[Tensor, "B nc C H N"],
    Xc: Complex[Tensor, "B nc C H P"],
    A_log: Complex[Tensor, "B nc C H"],
    decay_states: Complex[Tensor, "B nc C H"],
    documents: Int[Tensor, "B nc C H"] | None = None,
    *,
    input_precision: str | None = "ieee",
) -> tuple[Complex[Tensor, "B nc C H P"], Complex[Tensor, "B nc H P N"]]:
    """`per_chunk_ssd_pytorch` for complex64 chunks, its forward in one kernel.

    Args:
        Bc, Cc: write and read vectors, complex64. N, P and C are powers of two from
            16 (1 under the interpreter) to 256.
        Xc: input, complex64.
        A_log: log decay of each step, complex64, Re <= 0; small angles keep precision.
        decay_states: factor from each position to the right edge of its chunk, taken
            as given.
        documents: how many documents have started in the chunk so far, int32, as for
            `per_chunk_ssd_pytorch`.
        input_precision: "ieee" for float32 products, "tf32" for the matrix units'
            faster ones with ten bits of mantissa; None is "ieee". Sums are float32 in
            both.

    Returns: `(Y_diag, state)`, complex64. All but documents get gradients, from
        `per_chunk_ssd_pytorch`.

    Raises:
        ImportError: triton is not installed.
        TypeError: an input is not complex64, or documents not int32.
        ValueError: shapes or devices that do not fit each other, an unknown precision
            or launch option; KernelUnavailable, a ValueError, for a tile that the
            kernel or this GPU cannot hold and for CPU tensors without the interpreter.

    Source: notebook 05, "The whole function".
    """
    _check_triton()
    named = {"Bc": Bc, "Cc": Cc, "Xc": Xc, "A_log": A_log, "decay_states": decay_states}
    if documents is not None:
        named["documents"] = documents
    _check_chunks(named)
    input_precision = _check_precision("triton", input_precision)
    n_chunks = Xc.shape[1]
    if n_chunks > _MAX_CHUNKS:
        raise KernelUnavailable(
            f"per_chunk_ssd_triton: nc={n_chunks} chunks exceed the {_MAX_CHUNKS} of a "
            "launch. Use a larger chunk_size or ssd_dispatch='pytorch'."
        )
    _check_block_dims(Xc.shape[-1], Bc.shape[-1], Xc.shape[2])
    _check_device(Xc.device)
    return _apply(Bc, Cc, Xc, A_log, decay_states, documents, input_precision)


# The compiler can trace neither 64-bit views of complex tensors nor a backward that
# calls autograd: a compiled model runs this one call as it is.
_apply = torch.compiler.disable(_PerChunkSSDTriton.apply)


# %%
launches = []


def counted(*arguments):
    with Meter("clone") as meter:
        results = _per_chunk_ssd_triton_forward(*arguments)
    copied = meter.bytes - 2 * sum(z.nbytes for z in arguments[3:5])
    launches.append((tuple(arguments[0].shape), copied))
    return results


package._per_chunk_ssd_triton_forward = counted

for rate in RATES.values():
    chunks = random_chunks(B=2, nc=2, H=2, rate=rate)  # C = P = N = 64
    Y, S = per_chunk_ssd_triton(*chunks)
    Y_exact, S_exact = per_chunk_ssd_pytorch(*exact(*chunks))
    assert Y.shape == Y_exact.shape and S.shape == S_exact.shape
    assert relative_error(Y, Y_exact) < 5e-6
    assert relative_error(S, S_exact) < 2e-6
assert len(launches) == 2

# %% [markdown]
# And from outside, as a model uses it: `ssd_dispatch="triton"`, a length that is no
# multiple of the chunk, real `x`, random steps; the output and all five gradients
# against the loop of notebook 02 in complex128. The meter says whether the scan really
# hands over a layout that needs no copy.

# %%
T, H, D, N = 137, 2, 64, 64
rate = torch.exp(torch.empty(H).uniform_(math.log(1e-3), math.log(2)))
case = {
    "x": torch.randn(2, T, H, D),
    "A": torch.complex(-rate, torch.empty(H).uniform_(-math.pi, math.pi)),
    "B_t": torch.randn(2, T, H, N, dtype=torch.complex64),
    "C_t": torch.randn(2, T, H, N, dtype=torch.complex64),
    "dt": torch.randn(2, T, H),
}
leaves = {k: z.to(device).requires_grad_() for k, z in case.items()}
oracle = {
    k: z.to(torch.complex128 if z.is_complex() else torch.float64).requires_grad_()
    for k, z in case.items()
}
weights = torch.randn(2, T, H, D)

before = len(launches)
y = ssd_complex_chunkwise(**leaves, chunk_size=64, ssd_dispatch="triton")
grads = torch.autograd.grad(y, list(leaves.values()), weights.to(device))
assert launches[before:] == [((2, 3, 64, H, N), 0)], "one launch, nothing copied"

wanted = ssd_naive_complex(**oracle).real
wanted_grads = torch.autograd.grad(wanted, list(oracle.values()), weights.double())
assert relative_error(y, wanted) < 2e-5
for name, got, want in zip(case, grads, wanted_grads, strict=True):
    assert relative_error(got, want) < 1e-4, name
print("y and the gradients of", ", ".join(case), "agree with the loop")

# %% [markdown]
# `torch.compile` cannot look inside: it can trace neither 64-bit views of complex
# tensors nor a backward that calls autograd. `_apply` says so beforehand, and a
# compiled model runs this one call as it is, between two compiled halves: a *graph
# break*. What that rules out is `fullgraph=True`, which promises that there is none.


# %%
def twice(*chunks):
    Y, S = per_chunk_ssd_triton(*chunks)
    return 2 * Y, 2 * S


def seen(graph, inputs):
    """A compiler that compiles nothing and says what it was given."""
    print("given:", [node.name for node in graph.graph.nodes if "call" in node.op])
    return graph.forward


chunks = random_chunks(C=16, P=16, N=16)
before = len(launches)
compiled = torch.compile(twice, backend=seen)(*chunks)
assert len(launches) == before + 1 and all(map(torch.equal, compiled, twice(*chunks)))

torch._dynamo.reset()
try:
    torch.compile(twice, backend=seen, fullgraph=True)(*chunks)
except torch._dynamo.exc.Unsupported as error:
    assert "torch.compiler.disable" in str(error)
    print("fullgraph=True is refused")
else:
    raise AssertionError("the compiler went through")

# %% [markdown]
# ## Precision modes
# *What may a product round away?* The matrix units of a GPU do not multiply float32.
# They take shorter numbers and add up in float32:
#
# | mode | bits of mantissa | an operand's own error, at most | where |
# |---|---|---|---|
# | ieee | 23 | $2^{-24}$ | the float32 lanes |
# | tf32 | 10 | $2^{-11}$ | matrix units |
# | bf16 | 7 | $2^{-8}$ | matrix units, for comparison: this kernel has no such mode |
#
# "ieee" is the default of `per_chunk_ssd_triton`, "tf32" is given on request. The
# interpreter computes in float32 whatever the mode says. So we round ourselves. The
# rounding is done on the bits: a float32 seen as an integer has its mantissa at the low
# end, so adding almost half of the last kept bit, plus one if that bit is odd, and
# cutting, rounds to nearest, ties to even.


# %%
def keep_bits(x, bits, nearest=True):
    """float32 rounded to `bits` of its 23 bits of mantissa, or cut when not nearest."""
    drop = 23 - bits
    pattern = x.contiguous().view(torch.int32)
    if nearest:
        pattern = pattern + ((1 << (drop - 1)) - 1) + ((pattern >> drop) & 1)
    return (pattern >> drop << drop).view(torch.float32)


x = torch.randn(100_000)
assert torch.equal(keep_bits(x, 7), x.bfloat16().float()), "PyTorch rounds bf16 so too"
ulp = 2.0**-10
ties = torch.tensor([1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, 1 + 0.5001 * ulp])
rounded = torch.tensor([1, 1 + 2 * ulp, -1, 1 + ulp])
assert torch.equal(keep_bits(ties, 10), rounded), "ties to even"
assert ((keep_bits(x, 10) - x).abs() <= x.abs() * 2**-11).all()
cut = keep_bits(x, 10, nearest=False)
assert (cut.abs() <= x.abs()).all() and ((cut - x).abs() < x.abs() * 2**-10).all()

# %% [markdown]
# Now the formula of the kernel in PyTorch, with the operands of its products rounded,
# at the size that a model uses. Nearest is the better case. A matrix unit that simply
# ignores the low 13 bits *cuts*: the error of an operand is up to twice as large, and
# always towards zero, so that errors add up instead of averaging out. Both are
# computed. Turns are not products of matrices and stay in float32.


# %%
def with_operands(rounding, Bc, Cc, Xc, A_log, decay_states):
    """Y_diag and state in float32, `rounding` applied to what the products multiply."""

    def dot(a, b):
        a, b = (torch.complex(rounding(z.real), rounding(z.imag)) for z in (a, b))
        return a @ b

    Bc, Cc, Xc = (z.transpose(2, 3) for z in (Bc, Cc, Xc))
    A_log, decay_states = A_log.transpose(2, 3), decay_states.transpose(2, 3)
    total = A_log.to(torch.complex128).cumsum(-1)
    turn = torch.exp(1j * total.imag).to(torch.complex64)[..., None]
    span = total.real[..., :, None] - total.real[..., None, :]
    future = torch.ones(span.shape[-2:], dtype=torch.bool).triu(1)
    L = span.masked_fill(future, -math.inf).exp().float()
    Y = turn * dot(L * dot(Cc, (turn.conj() * Bc).mT), Xc)
    return Y.transpose(2, 3), dot(Xc.mT, decay_states[..., None] * Bc)


ROUNDINGS = {
    "ieee": lambda x: x,
    "tf32, nearest": lambda x: keep_bits(x, 10),
    "tf32, cut": lambda x: keep_bits(x, 10, nearest=False),
    "bf16, nearest": lambda x: keep_bits(x, 7),
}
chunks = [z.cpu() for z in random_chunks(nc=2, H=4, rate=0.1)]
outputs_exact = per_chunk_ssd_pytorch(*exact(*chunks))
errors = {
    name: [
        relative_error(got, want)
        for got, want in zip(
            with_operands(rounding, *chunks), outputs_exact, strict=True
        )
    ]
    for name, rounding in ROUNDINGS.items()
}
ieee, nearest, cut, bf16 = (max(pair) for pair in errors.values())
assert ieee < 2e-6
assert 1e-4 < nearest < 1e-3 < cut < 2e-3 and 2.5 < cut / nearest < 5
assert 6 < bf16 / nearest < 10, "three bits less: eight times the error"
print(", ".join(f"{name} {max(pair):.1e}" for name, pair in errors.items()))

# %%
figure, axis = plt.subplots(figsize=(7.8, 2.7))
for i, (name, color) in enumerate(zip(errors, (GREEN, ORANGE, RED, BLUE), strict=True)):
    bars = axis.bar(
        [i - 0.2, i + 0.2], errors[name], 0.36, color=color, edgecolor=BLACK
    )
    bars[1].set_hatch("//")
axis.set_xticks(range(4), list(errors))
axis.set(yscale="log", ylabel="relative error [1]", ylim=(1e-8, 1e-1))
axis.set_title("tf32 costs three digits, cutting half a digit more (hatched: state)")
plt.show()

# %% [markdown]
# Relative to the norm of the result, tf32 is off in the fourth digit when operands are
# rounded and in the third when they are cut. That is far beyond every tolerance on this
# page: a comparison with the reference belongs in "ieee".
#
# Which of the two does a GPU do? *Measured* on an H200, in
# `docs/benchmarks/h200-per-chunk.json`: in tf32 the kernel has the error of cutting,
# and PyTorch's own products have that of rounding. Triton hands the 32 bits over as
# they are, and the matrix units ignore the last 13; PyTorch's library rounds first
# *[INFERENCE]*. A tolerance for the kernel in "tf32" has to allow for cutting; ours, in
# the package's tests, is $2 \cdot 10^{-3}$.

# %%
folder = Path(package.__file__).parents[2] / "docs" / "benchmarks"
report = json.loads((folder / "h200-per-chunk.json").read_text())
measured = {
    (row["version"], row["precision"]): row
    for row in report["rows"]
    if row["part"] == "per_chunk"
}
for version, rounding in [("triton", "tf32, cut"), ("pytorch", "tf32, nearest")]:
    for output, emulated in zip(("Y_diag", "state"), errors[rounding], strict=True):
        found = measured[version, "tf32"]["errors"][output]
        print(f"{version:8s}{output:7s} {found:.1e}, {rounding} here {emulated:.1e}")
        assert 0.8 < found / emulated < 1.25

# %% [markdown]
# The kernel of this page, in both modes, on the device of this run:

# %% tags=["nbval-ignore-output"]
chunks = [z.to(device) for z in chunks]
by_mode = {
    m: per_chunk_ssd_triton(*chunks, input_precision=m) for m in ("ieee", "tf32")
}
off = {
    mode: max(map(relative_error, outputs, outputs_exact))
    for mode, outputs in by_mode.items()
}
assert off["ieee"] < 5e-6
if _interpreted():
    assert off["tf32"] < 5e-6, "the interpreter computes float32 whatever the mode"
else:
    assert 1e-4 < off["tf32"] < 2e-3
where = "the CPU, interpreted" if _interpreted() else torch.cuda.get_device_name()
print(f"on {where}:", ", ".join(f"{mode} {error:.1e}" for mode, error in off.items()))

# %% [markdown]
# ## Reading the cost
# *What can this kernel hope for?* Two ceilings, and both can be counted. How many bytes
# cross between HBM and the SMs, and how many operations are done? For a batch of
# $B = 8$ sequences, $T = 2048$, $H = 16$, $D = N = C = 64$; by hand per program, then
# from the sizes of the tensors, which PyTorch will tell for tensors that do not exist
# (`device="meta"`).
#
# Per program: $B$, $C$ and $X$ in, $Y$ and $S$ out, five complex tiles of $64^2$, and
# two complex vectors of 64. Three complex products of $64^3$, each four real ones of
# two operations. The elementwise rest is about one percent of that, an exponential
# counted as one operation, and left out.

# %%
B, nc, C, H, P, N = 8, 32, 64, 16, 64, 64


def meta(*shape):
    return torch.empty(*shape, dtype=torch.complex64, device="meta")


inputs = [meta(B, nc, C, H, side) for side in (N, N, P)] + [meta(B, nc, C, H)] * 2
outputs = [meta(B, nc, C, H, P), meta(B, nc, H, P, N)]
bytes_in = sum(z.nbytes for z in inputs)
bytes_out = sum(z.nbytes for z in outputs)
programs = 8 * 32 * 16
kernel_bytes = programs * (5 * 8 * 64**2 + 2 * 8 * 64)
assert kernel_bytes == bytes_in + bytes_out == 675_282_944

scores = meta(B, nc, H, C, C)
operations = programs * 3 * 4 * 2 * 64**3
Y_numel, S_numel = (z.numel() for z in outputs)
assert operations == 8 * (scores.numel() * N + Y_numel * C + S_numel * C)
elementwise = programs * (6 * C * N + 2 * C * C + 2 * C * C + 6 * C * P + 6 * C * N)
assert 0.01 < elementwise / operations < 0.02  # B, |L|, |L| * G, Y, K
print(f"{programs} programs, {kernel_bytes / 1e9:.2f} GB, {operations / 1e9:.1f} GFLOP")

# %% [markdown]
# That counts each input once, but a program loads $B$ and $X$ twice, for the state and
# for the output, and in steps of 16 positions $C$ four times. Do the repetitions reach
# HBM? They come soon after. With all 255 registers of a thread in use, an SM runs one
# program at a time in ieee and two in tf32. What all running programs read, together,
# is half of the L2 cache at most, so the cache can serve the repetitions, and HBM is
# read once *[INFERENCE]*.

# %%
for mode, limit in (("ieee", 1), ("tf32", 2)):
    threads = 32 * _LAUNCH[mode]["num_warps"]
    running = SMS * (65_536 // (threads * LIMIT))
    assert running == SMS * limit
    assert running * 3 * 8 * 64**2 < 0.5 * 50 * 1024**2

# %% [markdown]
# The kernel is not alone. The launcher splits the two short vectors, which is about one
# percent more. Had it split all inputs before the kernel and zipped all outputs after
# it, as the first version did, each of these copies would read every byte and write it
# again: $2 \cdot \text{in} + 2 \cdot \text{out}$. The meter confirmed both above.

# %%
short_bytes = 2 * sum(z.nbytes for z in inputs[3:])
words_bytes = short_bytes + kernel_bytes
split_bytes, zip_bytes = 2 * bytes_in, 2 * bytes_out
halves_bytes = split_bytes + kernel_bytes + zip_bytes
assert 1.01 < words_bytes / kernel_bytes < 1.02
assert halves_bytes == 3 * kernel_bytes, "every byte three times over"

# %% [markdown]
# And without a kernel? Written as separate PyTorch operations, each of them reads its
# operands from HBM and writes its result there, $C \times C$ matrices included. The
# next cell writes down that list, checks on small real tensors that it computes the
# same, and then adds up the bytes on tensors of the full size.


# %%
def separately(Bc, Cc, Xc, A_log, decay_states):
    """Y_diag, state, and the bytes of each operation; inputs as (B, nc, H, C, .)."""
    moved = {}

    def do(name, operation, *operands):
        result = operation(*operands)
        moved[name] = sum(z.nbytes for z in (*operands, result))
        return result

    future = torch.ones(A_log.shape[-1], A_log.shape[-1], dtype=torch.bool).triu(1)
    total = do("cumsum", lambda a: a.cumsum(-1), A_log)
    span = do("differences", lambda a: a[..., :, None] - a[..., None, :], total)
    span = do("mask", lambda a: a.masked_fill(future.to(a.device), -math.inf), span)
    L = do("exp", torch.exp, span)
    G = do("C B^T", lambda c, b: c @ b.mT, Cc, Bc)
    M = do("L * G", torch.mul, L, G)
    Y = do("M X", torch.matmul, M, Xc)
    K = do("d * B", lambda d, b: d[..., None] * b, decay_states, Bc)
    S = do("X^T K", lambda x, k: x.mT @ k, Xc, K)
    return Y, S, moved


chunks = random_chunks(nc=2, C=16, H=2, P=32, N=16)
Y, S, _ = separately(*(z.transpose(2, 3) for z in chunks))
Y_exact, S_exact = per_chunk_ssd_pytorch(*exact(*chunks))
assert relative_error(Y.transpose(2, 3), Y_exact) < 5e-6
assert relative_error(S, S_exact) < 2e-6

moved = separately(*(z.transpose(2, 3) for z in inputs))[2]
separate_bytes = sum(moved.values())
floors = {}
for name, amount in [
    ("separate operations", separate_bytes),
    ("halves, split and zipped", halves_bytes),
    ("words", words_bytes),
]:
    floors[name] = 1e3 * amount / HBM_SPEED
    print(f"{name:25s} {amount / 1e9:.2f} GB, at least {floors[name]:.2f} ms")
assert 0.75 < halves_bytes / separate_bytes < 0.8, "with copies a fifth is saved"
assert 0.2 < words_bytes / separate_bytes < 0.3, "without, three quarters"
assert 0.42 < floors["halves, split and zipped"] < 0.43
assert 0.14 < floors["words"] < 0.15

# %%
decay_names = ("cumsum", "differences", "mask", "exp")
rows = {
    "separate operations": {
        "decay matrix": sum(moved[name] for name in decay_names),
        "C B^T, L * G, M X": sum(moved[name] for name in ("C B^T", "L * G", "M X")),
        "state": moved["d * B"] + moved["X^T K"],
    },
    "kernel of halves": {
        "split": split_bytes,
        "kernel": kernel_bytes,
        "zip": zip_bytes,
    },
    "kernel of words": {"": short_bytes, "kernel": kernel_bytes},
}
totals = [sum(parts.values()) for parts in rows.values()]
assert totals == [separate_bytes, halves_bytes, words_bytes]

# %%
figure, axis = plt.subplots(figsize=(7.8, 2.6))
others = iter((SKY, ORANGE, GREEN, PINK, PINK, PINK))
for row, parts in rows.items():
    start = 0
    for name, amount in parts.items():
        color = BLUE if name == "kernel" else next(others)
        axis.barh(row, amount / 1e9, left=start, color=color, edgecolor=BLACK)
        ink = "white" if color == BLUE else BLACK
        middle = start + amount / 2e9
        axis.text(middle, row, name, ha="center", va="center", fontsize=8, color=ink)
        start += amount / 1e9
note = "(the sliver at 0: two short vectors are split)"
axis.text(start + 0.03, "kernel of words", note, va="center", fontsize=8)
axis.invert_yaxis()
axis.set(xlabel="bytes between HBM and the SMs [GB], B=8 T=2048 H=16 D=N=C=64")
axis.set_title("A kernel of words moves a quarter; copies gave most of that back")
plt.show()

# %% [markdown]
# The kernel moves about a quarter of what the separate operations do. With copies
# around it, the call saved a fifth. (The package's own PyTorch path,
# `per_chunk_ssd_pytorch`, is a third list, with a real decay matrix; it is not counted
# here. And a real $x$ is made complex before the call: a copy of $X$ that is left.)
#
# **The roofline** (Williams, Waterman and Patterson 2009,
# [doi 10.1145/1498765.1498785](https://doi.org/10.1145/1498765.1498785)) puts both
# counts into one picture. The *intensity* of a kernel is its operations per byte. Left
# of the ridge the memory is the limit, $4.8$ TB/s times the intensity; right of it the
# arithmetic is.

# %%
intensity = {
    "kernel of words": operations / words_bytes,
    "kernel of halves, with copies": operations / halves_bytes,
    "separate operations": operations / separate_bytes,
}
peaks = {"ieee": FP32_SPEED, "tf32": TF32_SPEED}
ridges = {mode: peak / HBM_SPEED for mode, peak in peaks.items()}
assert ridges["ieee"] < intensity["kernel of words"] < ridges["tf32"]
assert max(list(intensity.values())[1:]) < ridges["ieee"]
ceiling = {
    (name, mode): min(peak, HBM_SPEED * value)
    for name, value in intensity.items()
    for mode, peak in peaks.items()
}
assert ceiling["kernel of words", "ieee"] == FP32_SPEED, "limited by arithmetic"
assert ceiling["kernel of words", "tf32"] < TF32_SPEED / 2, "limited by memory"
for (name, mode), rate in ceiling.items():
    print(f"{name:29s} {mode}: at most {rate / 1e12:3.0f} TFLOP/s", end=", ")
    print(f"so at least {1e3 * operations / rate:.2f} ms")

# %% [markdown]
# And what it reached, *measured* on an H200: `docs/benchmarks/h200-per-chunk.json`.

# %%
sizes = {"B": B, "T": nc * C, "H": H, "D": P, "N": N, "chunk": C}
assert report["shape"] == sizes and "H200" in report["device"]["name"]
forward = {key: row["forward_ms"]["median"] for key, row in measured.items()}
reached = {mode: operations / (1e-3 * forward["triton", mode]) for mode in peaks}
share = {mode: reached[mode] / ceiling["kernel of words", mode] for mode in peaks}
for mode in peaks:
    time_taken = f"{forward['triton', mode]:.2f} ms"
    print(f"{mode}: {time_taken}, {share[mode]:.0%} of the data sheet's ceiling")
assert 0.3 < share["tf32"] < 1 and 0.1 < share["ieee"] < 0.3

# %%
figure, axis = plt.subplots(figsize=(7.8, 3.6))
span = torch.logspace(0, 3, 200)
for mode, color in (("tf32", ORANGE), ("ieee", GREEN)):
    roof = (HBM_SPEED * span).clamp(max=peaks[mode]) / 1e12
    label = f"{mode}: {peaks[mode] / 1e12:.0f} TFLOP/s at most"
    axis.loglog(span, roof, color=color, lw=2, label=label)
markers = dict(zip(intensity, ("o", "s", "^"), strict=True))
for mode, rate in reached.items():
    color = GREEN if mode == "ieee" else ORANGE
    style = {"color": color, "markeredgecolor": BLACK, "markersize": 11, "zorder": 5}
    axis.plot(intensity["kernel of words"], rate / 1e12, "X", **style)
axis.plot([], [], "kX", ms=11, label="kernel of words, measured")
for (name, mode), rate in ceiling.items():
    face = GREEN if mode == "ieee" else ORANGE
    label = name if mode == "ieee" else None
    size = 13 if mode == "ieee" else 7  # where both have the same ceiling, both show
    style = {"color": face, "markeredgecolor": BLACK, "markersize": size, "ls": ""}
    axis.plot(intensity[name], rate / 1e12, markers[name], label=label, **style)
axis.set(xlabel="intensity [FLOP/byte]", ylabel="speed [TFLOP/s]", ylim=(4, 1000))
axis.set_title("The ceiling: memory in tf32, arithmetic in ieee. Crosses: reached")
axis.grid(alpha=0.3)
axis.legend(fontsize=8, loc="upper left", markerscale=0.6)
plt.show()

# %% [markdown]
# The lines and the points on them are **derived**: counts of bytes and operations,
# divided by the ceilings of a data sheet. A ceiling says what cannot be exceeded, not
# what is reached: real transfers stay below 4.8 TB/s. The crosses are *measured*
# (`docs/benchmarks/h200-per-chunk.json`), and they tell two stories. In tf32 the kernel
# gets near half of what the memory allows. In ieee it is far below both ceilings, so
# neither bytes nor peak arithmetic explain its time. What does is not measured; many
# small steps, each through shared memory, are a suspect *[INFERENCE]*.
#
# ## Is it faster?
# Against PyTorch, from the same run: the formulas as complex einsums, and
# `per_chunk_ssd_pytorch`. *Precision* holds for both sides.

# %%
ratios = {
    (row["precision"], row["against"]): row
    for row in report["ratios"]
    if row["part"] == "per_chunk"
}
for (mode, other), row in ratios.items():
    both = f"{row['forward']:.2f} forward, {row['forward_backward']:.2f} with backward"
    print(f"{mode}: times as fast as {other:8s}{both}")
assert all(ratios["tf32", other]["forward"] > 2 for other in ("einsum", "pytorch"))
assert all(ratios["ieee", other]["forward"] < 1 for other in ("einsum", "pytorch"))
assert all(row["forward_backward"] < 1 for row in ratios.values())

# %%
figure, axes = plt.subplots(1, 2, sharey=True)
versions = {"einsum": SKY, "pytorch": PINK, "triton": BLUE}
for axis, mode in zip(axes, ("tf32", "ieee"), strict=True):
    times = [forward[version, mode] for version in versions]
    axis.barh(list(versions), times, color=versions.values(), edgecolor=BLACK)
    floor = measured["triton", mode]["forward_floor_ms"]
    axis.axvline(floor, color=BLACK, ls="--", label="floor")
    axis.set(xlabel="forward, median [ms]", xlim=(0, 2.4))
    times_as_fast = ratios[mode, "pytorch"]["forward"]
    axis.set_title(f"{mode}: {times_as_fast:.1f} times as fast as pytorch")
axes[0].invert_yaxis()
axes[0].legend(loc="lower right")
plt.show()

# %% [markdown]
# *Measured* (`docs/benchmarks/h200-per-chunk.json`): in tf32 the kernel's forward is
# more than twice as fast as either; in ieee, the default, it is *slower* than both. And
# forward and backward together are slower in both modes, since the backward pass
# computes the PyTorch reference once more. Who wants speed from this kernel needs a
# forward pass alone and `precision="tf32"`, with its error. The default is "ieee",
# because a result should not lose three digits unasked.
#
# The file also holds the register count against the clock: with 2 warps nothing fits.

# %%
ms_of = {
    (row["precision"], row["warps"]): row["forward_ms"]["median"]
    for row in report["launches"]
    if row["stages"] == 1
}
output_at_2 = 3 * 2 * 64 * 64 / (2 * 32)  # as in "then the output", above
assert output_at_2 > LIMIT and on_lanes(64, 64, 16, warps=2) > LIMIT
for mode, launch in _LAUNCH.items():
    best = min(ms for (m, _), ms in ms_of.items() if m == mode)
    assert ms_of[mode, launch["num_warps"]] < 1.05 * best, "the table's choice"
    assert ms_of[mode, 2] > 5 * best, "what does not fit is spilled"
    print(f"{mode}: 2 warps take {ms_of[mode, 2] / best:.0f} times as long as the best")

# %% [markdown]
# `python -m mamba3lite.bench --tune` makes such a file on your GPU.
#
# ## Pitfalls
# - **`TRITON_INTERPRET` before the first import of triton.** Later it is ignored.
# - **The interpreter accepts what a GPU refuses**: sides below 16, and more. It checks
#   formulas, not kernels.
# - **Count the copies around a kernel**, not the kernel alone.
# - **Mask the low half** before two halves become a word: a sign is 32 ones.
# - **A lazy conjugate** is not in the words. `resolve_conj()` first.
# - **Select before exp.** The mask after it makes NaN from infinity times zero. A phase
#   may be split in two factors, a magnitude must not.
# - **A forgotten turn leaves every magnitude right.** Compare numbers, not norms.
# - **Say `input_precision`.** `tl.dot` of float32 is tf32 on a GPU unless told "ieee",
#   and a test against the reference then fails in the third digit, on the GPU only.
# - **Count registers.** Too large a tile is no error. It spills, and is slow to compile
#   and slow to run.
# - **64-bit offsets**, widened before the product.
# - **Poison the outputs** in tests. Fresh memory may hold yesterday's right answer.
# - **(P, N), not (N, P)**, and no conjugate: at $N = P$ only numbers tell.
# - **Autotuning moves time and bits**: the first call is slow, and another variant may
#   add in another order.
# - **The first call compiles.** Never time it.
# - **A kernel is not faster because it is a kernel.** Measure, in the precision and in
#   the direction that you need.
#
# The kernel stands. Next: [06, rotation, fused](06_rotary_fusion.ipynb) turns the
# complex scan into a real one with rotated vectors, and puts all of it into a few
# kernels, gradients included.

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran for {time.perf_counter() - started:.1f} s")
