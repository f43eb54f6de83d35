# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:ssd_triton"]
# # Complex autograd
# The per-chunk Triton kernel, and the gradient that goes with it.
#
# **After it you can**
# - say what `.grad` of a complex parameter is, check it by hand, and know why a step
#   along $-$`.grad` goes downhill;
# - hand a complex tensor to code that only knows pointers, without the bug that raises
#   no error;
# - write a `torch.autograd.Function` that keeps its inputs only, and prove its backward
#   right before the kernel behind it exists;
# - recognize the wrong backwards that a test with `y.sum()` accepts.
#
# **Before it** you need [notebook 03](03_chunkwise_ssd.ipynb): `per_chunk_ssd_pytorch`,
# the two tensors that leave a chunk, and the five that enter it.
#
# **How long**: about an hour to read, an estimate; the last cell prints how long the
# notebook ran.
#
# **Where its cells go**: the exported cells open `mamba3lite/models/ssd_triton.py`.
# The kernel, its launch and the function that users call follow from
# [notebook 05](05_triton_kernel.ipynb).

# %% [markdown]
# ## The tools
# What the module imports, and then what only this notebook needs.

# %% tags=["export"]
import torch
from jaxtyping import Complex, Float
from torch import Tensor

from mamba3lite.models.ssd_complex import per_chunk_ssd_pytorch

# %%
import time
import warnings

import matplotlib.pyplot as plt
from torch.autograd.function import once_differentiable

from mamba3lite.models.ssd_complex import ssd_complex_chunkwise

started = time.perf_counter()
torch.manual_seed(0)
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED = "#0072B2", "#D55E00"
plt.rcParams.update(
    {
        "figure.dpi": 72,
        "figure.figsize": (7.8, 3.1),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.alpha": 0.3,
    }
)

# %% [markdown]
# Much below is shown by an error that must come. This helper fails if it does not.


# %%
def refused(function, *args, **kwargs):
    """The first line of the error that a call raises; no error is a failure."""
    try:
        function(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error).split("\n")[0]
    raise AssertionError("no error")


assert refused(int, "seven").startswith("invalid literal")

# %% [markdown]
# ## Two slopes at one point
# What is the slope of a function at a complex number? It depends on the direction in
# which we go. Write $z = x + iy$ and step by $dz = dx + i\,dy$. To first order
# $$df = \frac{\partial f}{\partial x}\,dx + \frac{\partial f}{\partial y}\,dy
# = \frac{\partial f}{\partial z}\,dz + \frac{\partial f}{\partial z^*}\,dz^* ,$$
# where the second form replaces $dx = \tfrac12(dz + dz^*)$ and
# $dy = \tfrac1{2i}(dz - dz^*)$ and collects terms. The two coefficients are the
# **Wirtinger derivatives**
# $$\frac{\partial f}{\partial z}
# = \frac12 \Big(\frac{\partial f}{\partial x}
# - i\,\frac{\partial f}{\partial y}\Big), \qquad
# \frac{\partial f}{\partial z^*} = \frac12 \Big(\frac{\partial f}{\partial x}
# + i\,\frac{\partial f}{\partial y}\Big) .$$
# In practice: differentiate as if $z$ and $z^*$ were two independent variables. So
# $z^2$ has the pair $(2z, 0)$, $z^*$ has $(0, 1)$, and $|z|^2 = z z^*$ has $(z^*, z)$.
# A function without a $z^*$ in it, whose second slope is zero, is the *holomorphic*
# function of the textbooks. (A derivation at leisure: Kreutz-Delgado 2009,
# [arXiv 0906.4835](https://arxiv.org/abs/0906.4835).)


# %%
def wirtinger(f, z, eps=1e-6):
    """Both Wirtinger derivatives of f at the numbers z, by central differences."""
    along_x = (f(z + eps) - f(z - eps)) / (2 * eps)
    along_y = (f(z + 1j * eps) - f(z - 1j * eps)) / (2 * eps)
    return (along_x - 1j * along_y) / 2, (along_x + 1j * along_y) / 2


z = torch.randn(50, dtype=torch.complex128)
zero, one = torch.zeros_like(z), torch.ones_like(z)
pairs = {
    "z^2": (lambda z: z**2, (2 * z, zero)),
    "conj z": (lambda z: z.conj(), (zero, one)),
    "|z|^2": (lambda z: z.abs() ** 2, (z.conj(), z)),
    "exp z": (torch.exp, (z.exp(), zero)),
    "Re z": (lambda z: z.real, (one / 2, one / 2)),
}
for f, by_hand in pairs.values():
    for slope, wanted in zip(wirtinger(f, z), by_hand, strict=True):
        assert torch.allclose(slope + 0j, wanted, atol=1e-8)

# %% [markdown]
# ## What `.grad` means
# A loss $\ell$ is real. Then $\partial \ell/\partial x$ and $\partial \ell/\partial y$
# are real, the two slopes are conjugates of each other, and one of them is enough.
# PyTorch gives
# $$g = \frac{\partial \ell}{\partial\,\mathrm{Re}\,z}
# + i\,\frac{\partial \ell}{\partial\,\mathrm{Im}\,z}
# = 2\,\frac{\partial \ell}{\partial z^*} .$$
# That is the ordinary gradient of a function of two real variables, packed into one
# complex number. The change of the loss is its inner product with the step,
# $$d\ell = \mathrm{Re}\big(g^*\,dz\big) ,$$
# which is largest, for a step of a given length, along $g$ itself, and
# $dz = -\eta\,g$ changes the loss by $-\eta\,|g|^2$: downhill. PyTorch's manual
# describes the choice under
# [autograd for complex numbers](https://docs.pytorch.org/docs/stable/notes/autograd.html#autograd-for-complex-numbers);
# it speaks of $\partial \ell/\partial z^*$ and is silent about the 2. We measure.

# %%
losses = {
    "|z|^2": lambda z: z.abs() ** 2,
    "Re z^3": lambda z: (z**3).real,
    "Im exp z": lambda z: z.exp().imag,
    "|z^3 - 1|^2": lambda z: (z**3 - 1).abs() ** 2,
    "angle z": lambda z: z.angle(),
}
z = (torch.randn(50, dtype=torch.complex128) + 2).requires_grad_()
for name, loss in losses.items():
    (g,) = torch.autograd.grad(loss(z).sum(), z)
    slope, conjugate_slope = wirtinger(loss, z.detach())
    assert torch.allclose(slope, conjugate_slope.conj()), "one slope is enough"
    assert torch.allclose(g, 2 * conjugate_slope, rtol=1e-5, atol=1e-7), name
    step = 1e-4 * torch.randn_like(g) / (1 + g.abs())
    change = loss(z + step) - loss(z)
    assert torch.allclose(change, (g.conj() * step).real, atol=1e-5)
    downhill = loss(z - 1e-5 * g) - loss(z)
    assert torch.allclose(downhill, -1e-5 * g.abs() ** 2, rtol=0.05)

(g,) = torch.autograd.grad((z.abs() ** 2).sum(), z)
assert torch.allclose(g, 2 * z), "2z; the slope along conj z is z"
assert "real scalar" in refused((z**2).sum().backward), "a complex loss has no downhill"

# %% [markdown]
# **The chain rule.** Let $s = f(z)$ be a step somewhere in the middle, and write
# $\bar s$ for the gradient that arrives at $s$. Insert
# $ds = f_z\,dz + f_{z^*}\,dz^*$ into $d\ell = \mathrm{Re}(\bar s^*\,ds)$ and collect
# what multiplies $dz$:
# $$\bar z = \big(f_z\big)^*\,\bar s + f_{z^*}\,\bar s^{\,*} .$$
# A holomorphic step multiplies the gradient by the *conjugate* of its derivative. The
# decay factor $e^{\Delta A}$ is such a step, and so are all products of this project.

# %%
seed = torch.randn_like(z)
for name, (f, _) in pairs.items():
    if name == "Re z":
        continue  # a real output takes a real seed
    s = f(z) + 0j
    (g,) = torch.autograd.grad(s, z, grad_outputs=seed)
    f_z, f_conj = wirtinger(f, z.detach())
    wanted = f_z.conj() * seed + f_conj * seed.conj()
    assert torch.allclose(g, wanted, rtol=1e-5, atol=1e-7), name

# %% [markdown]
# How does such a gradient look? Take $\ell(z) = |z^3 - 1|^2$, which is zero at the
# three cube roots of 1. With the chain rule, $g = 2\,(z^3 - 1)\,(3 z^2)^*$. We follow
# $-g$ from three starts, and then once more with the conjugate forgotten,
# $-2\,(z^3 - 1)^*\,3 z^2 = -g^*$. That is the sign of the imaginary part, nothing
# else. It is an easy slip: other libraries hand out $g^*$ (JAX does, and
# [says so](https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html#complex-numbers-and-differentiation)).
# In the picture the arrows point along $-g$ on both sides, and squares are starts.


# %%
def cube_gradient(z):
    return 2 * (z**3 - 1) * (3 * z**2).conj()


def descend(start, gradient, rate=0.01, steps=60):
    path = [torch.tensor(start, dtype=torch.complex128)]
    while len(path) <= steps and path[-1].abs() < 2:
        path.append(path[-1] - rate * gradient(path[-1]))
    return torch.stack(path)


loss = losses["|z^3 - 1|^2"]
(g,) = torch.autograd.grad(loss(z).sum(), z)
assert torch.allclose(g, cube_gradient(z))

starts = [0.9 + 0.8j, -1.1 + 0.3j, 0.2 - 1.2j]
right = [descend(start, cube_gradient) for start in starts]
wrong = [descend(start, lambda z: cube_gradient(z).conj()) for start in starts]
for path in right:
    assert (loss(path).diff() <= 0).all() and loss(path[-1]) < 1e-6
assert all(loss(path[-1]) > 0.5 for path in wrong), "not one of them arrives"
thrown_out = [bool(path[-1].abs() > 2) for path in wrong]
assert thrown_out == [True, False, True], "two go up and away, one is stuck"

# %%
x, y = torch.linspace(-1.5, 1.5, 121), torch.linspace(-1.4, 1.4, 113)
plane = torch.complex(*torch.meshgrid(x, y, indexing="xy"))
coarse = plane[4::8, 4::8]
arrow = -cube_gradient(coarse)
arrow = arrow / arrow.abs()

# %%
figure, axes = plt.subplots(1, 2, sharey=True, figsize=(7.8, 3.8))
titles = ["Along -grad: every path ends at a root", "Along -conj(grad): not one does"]
for axis, paths, title in zip(axes, (right, wrong), titles, strict=True):
    levels = [-2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5]
    height = axis.contourf(
        x, y, loss(plane).log10(), levels, cmap="Blues", extend="both"
    )
    field = (coarse.real, coarse.imag, arrow.real, arrow.imag)
    axis.quiver(*field, color=BLACK, alpha=0.6, scale=24, width=0.005, pivot="mid")
    for path, color in zip(paths, (ORANGE, RED, GREEN), strict=True):
        axis.plot(path.real, path.imag, ".-", color=color, ms=5)
        axis.plot(path[0].real, path[0].imag, "s", color=color, mec=BLACK)
    axis.set(xlabel="Re z [1]", title=title, aspect="equal")
    axis.set(xlim=(-1.5, 1.5), ylim=(-1.4, 1.4))
axes[0].set_ylabel("Im z [1]")
figure.colorbar(height, ax=axes, label="log10 of the loss [1]", shrink=0.8)
plt.show()

# %% [markdown]
# ## A frequency that learns
# The decay rate $A$ of a head is a complex parameter, the output of the scan is real.
# Does the loss see $\mathrm{Im}\,A$ at all? With $B = C = 1$, one token after an
# impulse the output is $\mathrm{Re}\,e^{\Delta A}$ and
# $$\frac{\partial}{\partial\,\mathrm{Im} A}\,\mathrm{Re}\,e^{\Delta A}
# = \mathrm{Re}\big(i \Delta\, e^{\Delta A}\big)
# = -\Delta\, e^{\Delta \mathrm{Re} A} \sin(\Delta\,\mathrm{Im} A) .$$
# That is zero only where the phasor points along the real axis. Among them is
# $\mathrm{Im}\,A = 0$: a head that starts real, with real $B$ and $C$, stays real.

# %%
T = 64
noise = torch.randn(8, T, 1, 1)
dt = torch.randn(8, T, 1)
ones = torch.ones(8, T, 1, 1, dtype=torch.complex64)


def response(A):
    """What one head with a single state makes of the noise; real."""
    return ssd_complex_chunkwise(noise, A, ones, ones, dt, chunk_size=16)


def rate_gradient(A, target):
    A = torch.tensor([A], dtype=torch.complex64, requires_grad=True)
    loss = (response(A) - target).square().mean()
    loss.backward()
    return loss.item(), A.grad.item()


# %%
true_rate = torch.tensor([-0.2 + 0.9j], dtype=torch.complex64)
target = response(true_rate)
assert target.dtype == torch.float32
_, g = rate_gradient(-0.3 + 0.6j, target)
assert abs(g.imag) > 0.1, "a real loss moves the imaginary part"
for part, direction in ((g.real, 1), (g.imag, 1j)):
    up = rate_gradient(-0.3 + 0.6j + 1e-3 * direction, target)[0]
    down = rate_gradient(-0.3 + 0.6j - 1e-3 * direction, target)[0]
    assert abs((up - down) / 2e-3 - part) < 0.01 * abs(g), "and by the right amount"
assert rate_gradient(-0.3 + 0j, target)[1].imag == 0, "a real start stays real"

A = torch.tensor(-0.3 + 0.6j, requires_grad=True)
(g,) = torch.autograd.grad((2 * A).exp().real, A)
assert torch.isclose(g.imag, -2 * (2 * A.real).exp() * (2 * A.imag).sin())

# %% [markdown]
# Then gradient descent must find a frequency from real outputs. `torch.optim.SGD` takes
# the complex parameter as it is, a step being `A - lr * A.grad`. AdamW takes it too,
# but scales the two parts separately, as if they were two real parameters: its first
# step is `lr` long in *each* of them.

# %%
A = torch.nn.Parameter(torch.tensor([-0.3 + 0.5j], dtype=torch.complex64))
optimizer = torch.optim.SGD([A], lr=0.02)
track, heights = [], []
for _ in range(60):
    optimizer.zero_grad()
    loss = (response(A) - target).square().mean()
    loss.backward()
    track.append(A.item())
    heights.append(loss.item())
    before, g = A.item(), A.grad.item()
    optimizer.step()
    assert abs(A.item() - (before - 0.02 * g)) < 1e-6
print(f"found {A.item():.2f}, true rate {true_rate.item():.2f}")
assert abs(A.item() - true_rate.item()) < 0.02
assert heights[-1] < 1e-3 * heights[0]

adam = torch.nn.Parameter(torch.tensor([-0.3 + 0.5j], dtype=torch.complex64))
optimizer = torch.optim.AdamW([adam], lr=0.01, weight_decay=0)
(response(adam) - target).square().mean().backward()
optimizer.step()
moved = adam.item() - (-0.3 + 0.5j)
assert abs(abs(moved.real) - 0.01) < 1e-6 and abs(abs(moved.imag) - 0.01) < 1e-6

# %%
decays, angles = torch.linspace(-0.6, -0.05, 23), torch.linspace(0.3, 1.3, 31)
with torch.no_grad():
    valley = torch.tensor(
        [
            [
                (response(torch.complex(u, v)[None]) - target).square().mean().item()
                for u in decays
            ]
            for v in angles
        ]
    )
lowest = divmod(int(valley.argmin()), len(decays))
assert abs(angles[lowest[0]] - 0.9) < 0.05 and abs(decays[lowest[1]] + 0.2) < 0.05
path = torch.tensor(track)

# %%
figure, (left, right) = plt.subplots(1, 2, width_ratios=[1, 1.2])
height = left.contourf(decays, angles, valley.log10(), 8, cmap="Blues")
left.plot(path.real, path.imag, ".-", color=RED, ms=4)
left.plot(-0.2, 0.9, "*", color=ORANGE, ms=14, mec=BLACK)
left.set(xlabel="Re A [1/time]", ylabel="Im A [rad/time]")
left.set_title("Down the valley to the true rate")
figure.colorbar(height, ax=left, label="log10 of the loss [1]")
right.plot(path.imag, color=BLUE, label="Im A")
right.plot(path.real, color=RED, label="Re A")
for level in (0.9, -0.2):
    right.axhline(level, color=BLACK, ls=":", lw=1)
right.set(xlabel="step of SGD", ylabel="A [1/time], true values dotted")
right.set_title("Both parts are learned from real outputs")
right.legend()
plt.show()

# %% [markdown]
# ### What breaks: `t * 0.1` of a leaf is no leaf
# Autograd stores `.grad` in *leaves*, tensors that no recorded operation made. Scaling
# a fresh parameter "to start small" records an operation. The product has no `.grad`;
# the gradient went to a tensor that nobody holds. PyTorch warns when `.grad` is read,
# and its optimizers refuse the tensor, but a hand-written update loop reads `None` and
# may well skip it.

# %%
scaled = torch.randn(4, dtype=torch.complex64, requires_grad=True) * 0.1
assert scaled.requires_grad and not scaled.is_leaf
scaled.abs().square().sum().backward()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert scaled.grad is None, "no gradient here"
assert "not a leaf" in str(caught[0].message)
print(refused(torch.optim.SGD, [scaled], lr=0.1))

leaf = (torch.randn(4, dtype=torch.complex64) * 0.1).requires_grad_()
assert leaf.is_leaf, "scale first, then ask for gradients"
leaf.abs().square().sum().backward()
assert torch.allclose(leaf.grad, 2 * leaf)

# %% [markdown]
# ## Two real tensors from one complex one
# A GPU kernel knows no complex numbers. It gets a pointer and counts floats. Where do
# the floats of a complex tensor lie? In pairs: real part, imaginary part, real part,
# imaginary part. `torch.view_as_real(z)` shows that memory without moving anything.
# `z.real` is a view of the same memory too, every *second* float of it.

# %%
z = torch.tensor([1 + 10j, 2 + 20j, 3 + 30j, 4 + 40j], dtype=torch.complex64)
memory = torch.view_as_real(z).flatten()
assert memory.tolist() == [1, 10, 2, 20, 3, 30, 4, 40]
assert memory.data_ptr() == z.data_ptr() == z.real.data_ptr(), "nothing was copied"
assert z.imag.data_ptr() == z.data_ptr() + 4, "four bytes on"
assert z.real.stride() == z.imag.stride() == (2,)
assert not z.real.is_contiguous()

# %% [markdown]
# Now hand `z.real` to a kernel that walks its pointer one float at a time, as kernels
# do unless they are told the strides. `torch.as_strided` does the same walk on the CPU.
# It raises nothing, stays inside the tensor's own memory, and returns good-looking
# numbers: half of them from the wrong part, and nothing from the second half of the
# tensor.


# %%
def walk(half):
    """What a kernel reads that takes the pointer of `half` and ignores its strides."""
    return torch.as_strided(half, half.shape, torch.empty(half.shape).stride())


assert walk(z.real).tolist() == [1, 10, 2, 20], "interleaved, without an error"
assert walk(z.imag).tolist() == [10, 2, 20, 3]
assert z.real.tolist() == [1, 2, 3, 4], "PyTorch itself follows the strides"

# %% [markdown]
# PyTorch's own door in the other direction is guarded: `torch.view_as_complex` refuses
# a pair whose two floats are not neighbors.

# %%
halves_first = torch.stack([z.real, z.imag])
assert torch.equal(torch.view_as_complex(memory.view(4, 2)), z)
print(refused(torch.view_as_complex, halves_first.T))

# %% [markdown]
# The cure is one copy per half.


# %% tags=["export"]
def _view_real_imag(
    z: Complex[Tensor, "*shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The real and the imaginary half of z, each a contiguous float32 tensor.

    Args: z: complex64. Its own halves are strided views; a kernel that walks a pointer
    would read the two interleaved.

    Raises: TypeError for any other dtype.

    Source: notebook 04, "Two real tensors from one complex one".
    """
    if z.dtype != torch.complex64:
        raise TypeError(f"expected complex64, got {z.dtype}")
    halves = torch.view_as_real(z.resolve_conj()).movedim(-1, 0).contiguous()
    return halves[0], halves[1]


# %% [markdown]
# The check walks both halves, for tensors that are whole, transposed, sliced, expanded
# and empty of axes.

# %%
whole = torch.randn(3, 4, 5, dtype=torch.complex64)
kinds = [whole, whole.transpose(0, 2), whole[:, ::2, 1:], whole[:1].expand(6, 4, 5)]
for w in [*kinds, whole[0, 0, 0]]:
    re, im = _view_real_imag(w)
    assert re.is_contiguous() and im.is_contiguous()
    assert re.shape == im.shape == w.shape and re.dtype == im.dtype == torch.float32
    assert torch.equal(walk(re), w.real) and torch.equal(walk(im), w.imag)
assert any(not torch.equal(walk(w.real), w.real) for w in kinds)
print(refused(_view_real_imag, whole.to(torch.complex128)))

# %%
rows = {
    "z in memory": (range(8), memory.tolist()),
    "z.real, stride 2": (range(0, 8, 2), z.real.tolist()),
    "kernel, pointer of z.real": (range(4), walk(z.real).tolist()),
    "kernel, pointer of the copy": (range(4), walk(_view_real_imag(z)[0]).tolist()),
}
values = [numbers for _, numbers in rows.values()]
assert values[1] == values[3] == [1, 2, 3, 4]
assert values[2] == memory[:4].tolist() != values[1]

# %%
figure, axis = plt.subplots(figsize=(7.4, 2.6))
for height, (places, numbers) in enumerate(rows.values()):
    for place, number in zip(places, numbers, strict=True):
        color = ORANGE if number >= 10 else SKY
        box = plt.Rectangle((place - 0.5, height - 0.35), 1, 0.7, fc=color, ec=BLACK)
        axis.add_patch(box)
        axis.text(place, height, f"{number:.0f}", ha="center", va="center")
axis.set(xlim=(-0.6, 7.6), ylim=(3.5, -0.5), xlabel="place in memory [float32]")
axis.set_yticks(range(4), list(rows))
axis.set_title("Real parts are blue, imaginary ones orange: row three mixes them")
plt.show()

# %% [markdown]
# ### What breaks: the conjugate that has not happened yet
# `z.conj()` moves no memory. It sets a bit, *read me as a conjugate*, and shares the
# floats with `z`. A kernel sees the floats and not the bit: every imaginary part has
# the wrong sign. And `.contiguous()`, which cured the strides, does nothing here, for
# the tensor *is* contiguous. Only `resolve_conj()` writes the conjugate down, and where
# there is nothing to write it costs nothing. That is why the function above calls it.

# %%
lazy = z.conj()
assert lazy.is_conj() and lazy.data_ptr() == z.data_ptr()
assert lazy.contiguous().is_conj(), "contiguous, and still not conjugated"
print(refused(torch.view_as_real, lazy))

resolved = lazy.resolve_conj()
assert not resolved.is_conj() and resolved.data_ptr() != z.data_ptr()
assert torch.equal(_view_real_imag(lazy)[1], -z.imag)

blind = walk(torch.view_as_real(z)[..., 1].contiguous())
assert torch.equal(blind, -lazy.imag), "the memory alone has the other sign"
assert z.resolve_conj().data_ptr() == z.data_ptr(), "no bit, no copy"

# %% [markdown]
# ## The seed of a backward
# The kernel of notebook 05 computes two tensors, $Y$ (`Y_diag`) and $S$ (`state`), from
# five, all complex. PyTorch cannot look into it. What do we have to tell autograd?
#
# Let $\theta$ be one of the five, and $J_Y, J_S$ what a small step $d\theta$ does to
# the outputs, $dY = J_Y\,d\theta$ and $dS = J_S\,d\theta$. (Both are linear in each of
# the five for a small step, and holomorphic, so these are ordinary complex matrices.)
# Somewhere later a real loss is made of $Y$ and $S$. With the inner product
# $\langle a, b \rangle = \mathrm{Re} \sum a^* b$ and the gradients
# $\bar Y, \bar S$ of that loss,
# $$d\ell = \langle \bar Y, J_Y\,d\theta \rangle + \langle \bar S, J_S\,d\theta \rangle
# = \langle J_Y^{H}\,\bar Y + J_S^{H}\,\bar S,\; d\theta \rangle
# \quad\Longrightarrow\quad
# \bar\theta = J_Y^{H}\,\bar Y + J_S^{H}\,\bar S .$$
# This is the **vector-Jacobian product**. Everything a backward has to know of the
# loss, of all the layers after it, is in the two tensors it is handed. It does not know
# the loss, it need not know it, and it must not make one up.
# `torch.autograd.grad(outputs, inputs, grad_outputs=seeds)` computes just this product
# for anything that PyTorch can look into.
#
# First the inputs: log decays that differ from token to token, an odd number of chunks,
# sizes that all differ, so that no mixed-up axis fits by chance.

# %%
NAMES = ("Bc", "Cc", "Xc", "A_log", "decay_states")


def chunk_case(rate, B=1, nc=3, C=5, H=2, N=4, P=6, dtype=torch.complex128):
    """Five leaves; `rate` is the largest decay of a step."""
    row = (B, nc, C, H)
    shapes = [(*row, N), (*row, N), (*row, P)]
    Bc, Cc, Xc = (torch.randn(*shape, dtype=dtype) for shape in shapes)
    A_log = torch.complex(
        -rate * torch.rand(*row, dtype=torch.float64),
        (2 * torch.rand(*row, dtype=torch.float64) - 1) * torch.pi,
    )
    total = A_log.cumsum(2)
    decay_states = (total[:, :, -1:] - total).exp()
    case = (Bc, Cc, Xc, A_log.to(dtype), decay_states.to(dtype))
    return [z.clone().requires_grad_() for z in case]


def inner(a, b):
    """The real inner product of two complex tensors."""
    return (a.conj() * b).real.sum()


# %% [markdown]
# Three checks. By hand, for the state alone: $S = \sum_s d_s\, x_s B_s^\top$ is linear
# in $B$, and so $\bar B_s = d_s^* \sum_p x_{s,p}^* \bar S_p$, with the conjugates that
# the $H$ in $J^H$ stands for. Then by finite steps in random directions, for all five
# at once; a step turned by $i$ turns the movement by $i$, which is what *holomorphic*
# promised. Then against a whole loss.

# %%
case = chunk_case(rate=1.0)
assert len({*case[0].shape, case[2].shape[-1]}) == 6
Y, S = per_chunk_ssd_pytorch(*case)
Bc, _, Xc, _, decay_states = case
seed_Y, seed_S = torch.randn_like(Y), torch.randn_like(S)
(got,) = torch.autograd.grad(S, Bc, grad_outputs=seed_S, retain_graph=True)
by_hand = torch.einsum("bchpn,bclhp->bclhn", seed_S, Xc.conj())
assert torch.allclose(got, by_hand * decay_states.conj().unsqueeze(-1))


# %%
def movement(case, step):
    """How the two outputs move with a small step of the five inputs."""
    with torch.no_grad():
        later = per_chunk_ssd_pytorch(*map(torch.add, case, step))
        sooner = per_chunk_ssd_pytorch(*map(torch.sub, case, step))
    return [(b - a) / 2 for a, b in zip(sooner, later, strict=True)]


grads = torch.autograd.grad((Y, S), case, grad_outputs=(seed_Y, seed_S))
for _ in range(5):
    step = [1e-6 * torch.randn_like(z) for z in case]
    dY, dS = movement(case, step)
    of_outputs = inner(seed_Y, dY) + inner(seed_S, dS)
    of_inputs = sum(map(inner, grads, step))
    assert torch.isclose(of_outputs, of_inputs, rtol=1e-6, atol=1e-11)
    turned = movement(case, [1j * d for d in step])
    assert torch.allclose(turned[0], 1j * dY, rtol=1e-5, atol=1e-11)
    assert torch.allclose(turned[1], 1j * dS, rtol=1e-5, atol=1e-11)


# %%
def some_loss(Y, S):
    """Any real loss that depends on both outputs, in no simple way."""
    return (
        Y.abs().pow(3).mean() + (Y[0, 0] * S.sum()).real.sum().tanh() + S[0].imag.sum()
    )


Y, S = per_chunk_ssd_pytorch(*case)
whole = torch.autograd.grad(some_loss(Y, S), case, retain_graph=True)
cut = [out.detach().requires_grad_() for out in (Y, S)]
seeds = torch.autograd.grad(some_loss(*cut), cut)
halfway = torch.autograd.grad((Y, S), case, grad_outputs=seeds)
assert all(torch.allclose(a, b) for a, b in zip(whole, halfway, strict=True))

# %% [markdown]
# ## Recompute and inject
# The plan for the kernel. Forward: run it, keep the five inputs. Backward: compute the
# same two outputs once more, in PyTorch, from *detached* copies of the inputs, so that
# a small graph of its own arises; seed it with the gradients that arrive; hand out what
# comes back. The kernel may be as opaque as it likes, its backward never looks at it.
# The price is a second forward; the gain, next to a backward for free, is memory. This
# is the trade of gradient checkpointing (Chen et al. 2016,
# [arXiv 1604.06174](https://arxiv.org/abs/1604.06174)).
#
# It also means that the backward can be proven right before there is a kernel. Notebook
# 05 builds its launcher, for complex64 alone. Here a stand-in takes its place that also
# works in complex128.


# %%
def _per_chunk_ssd_triton_forward(
    Bc, Cc, Xc, A_log, decay_states, documents=None, input_precision="ieee"
):
    return per_chunk_ssd_pytorch(Bc, Cc, Xc, A_log, decay_states, documents)


# %% [markdown]
# The class, part by part:
#
# - `save_for_backward` keeps the inputs, and remembers their version, so that a change
#   in place is noticed.
# - `set_materialize_grads(False)`: an output that the loss never used brings `None`,
#   and *we* say what that means.
# - `detach().requires_grad_()`: the graph begins here and not in the rest of the model,
#   for all five, whichever are wanted.
# - `enable_grad()`: backward runs with recording off.
# - `needs_input_grad` says which inputs somebody wants. Gradients for the others are
#   not computed.
# - Gradients are enabled inside a backward only when somebody asked for a graph of it,
#   for a second derivative. The result carries none, so that is refused.
# - The last two `None` belong to `documents`, whole numbers, and `input_precision`,
#   which have no gradient: backward returns one value for every argument of forward.


# %% tags=["export"]
class _PerChunkSSDTriton(torch.autograd.Function):
    """The kernel forward; a backward that runs `per_chunk_ssd_pytorch` once more.

    Forward keeps the inputs and nothing else. Backward computes the same two outputs
    again in PyTorch and lets autograd carry the incoming gradients through
    them.

    Source: notebook 04, "Recompute and inject".
    """

    @staticmethod
    def forward(
        ctx, Bc, Cc, Xc, A_log, decay_states, documents=None, input_precision="ieee"
    ):
        ctx.save_for_backward(Bc, Cc, Xc, A_log, decay_states, documents)
        # An output that the loss does not use comes back as None, not as zeros.
        ctx.set_materialize_grads(False)
        return _per_chunk_ssd_triton_forward(
            Bc, Cc, Xc, A_log, decay_states, documents, input_precision
        )

    @staticmethod
    def backward(ctx, grad_y_diag, grad_state):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of ssd_dispatch='triton' cannot be differentiated again "
                "(create_graph=True); use ssd_dispatch='pytorch'"
            )
        # All five: C alone does not reach the state, and an output that depends on no
        # leaf has no graph to seed.
        *inputs, documents = ctx.saved_tensors
        leaves = [z.detach().requires_grad_() for z in inputs]
        with torch.enable_grad():
            outputs = per_chunk_ssd_pytorch(*leaves, documents)
        incoming = [
            torch.zeros_like(out) if grad is None else grad
            for out, grad in zip(outputs, (grad_y_diag, grad_state), strict=True)
        ]
        wanted = ctx.needs_input_grad[:5]
        used = [z for z, needed in zip(leaves, wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(outputs, used, grad_outputs=incoming))
        return *(next(found) if needed else None for needed in wanted), None, None


# %% [markdown]
# ### The check: every entry of every Jacobian
# `torch.autograd.gradcheck` moves each input entry a little, along the real and along
# the imaginary axis, and compares the movement of every output entry with the backward,
# seeded with one output entry at a time. Nothing can hide: five inputs, two outputs,
# weak decay and strong. It needs double precision, where a finite difference has digits
# to spare.


# %%
def check(function, case):
    """gradcheck for the five inputs, tighter than its default of 1e-5."""
    return torch.autograd.gradcheck(function.apply, case, atol=1e-7, rtol=1e-5)


DECAYS = {"weak": 1e-3, "middling": 1.0, "strong": 12.0}
for rate in DECAYS.values():
    case = chunk_case(rate)
    assert check(_PerChunkSSDTriton, case)
    grads = torch.autograd.grad(some_loss(*_PerChunkSSDTriton.apply(*case)), case)
    assert all(g.norm() > 1e-3 for g in grads), "far above the tolerance"
print("gradcheck holds at", ", ".join(DECAYS), "decay")

# %% [markdown]
# ### What breaks: a seed of its own
# The first classic. The author recomputes the outputs, needs a scalar to call
# backward on, and takes the nearest: the sum. That seeds with ones. The gradients are
# finite, nonzero, have the right shapes, and are *right whenever the loss is the sum*,
# which is what a quick test would take. They are wrong for any other loss: they do not
# even depend on it.


# %%
class SeedsWithOnes(_PerChunkSSDTriton):
    @staticmethod
    def backward(ctx, grad_y_diag, grad_state):
        *inputs, _ = ctx.saved_tensors
        leaves = [z.detach().requires_grad_() for z in inputs]
        with torch.enable_grad():
            Y, S = per_chunk_ssd_pytorch(*leaves)
            made_up = Y.real.sum() + S.real.sum()
        return *torch.autograd.grad(made_up, leaves), None


def gradients(function, loss, case):
    return torch.autograd.grad(loss(*function(*case)), case, materialize_grads=True)


def agree(function, loss, case):
    """Whether `function` gives the gradients that autograd gives."""
    got = gradients(function.apply, loss, case)
    wanted = gradients(per_chunk_ssd_pytorch, loss, case)
    return all(torch.allclose(a, b) for a, b in zip(got, wanted, strict=True))


# %%
def sum_loss(Y, S):
    return Y.real.sum() + S.real.sum()


def nothing(Y, S):
    return 0 * sum_loss(Y, S)


case = chunk_case(rate=1.0)
assert agree(SeedsWithOnes, sum_loss, case), "y.sum() cannot see it"
assert not agree(SeedsWithOnes, some_loss, case)
assert all(g.norm() > 1 for g in gradients(SeedsWithOnes.apply, nothing, case))
for loss in (sum_loss, some_loss, nothing):
    assert agree(_PerChunkSSDTriton, loss, case)
print(refused(check, SeedsWithOnes, case))

# %% [markdown]
# ### What breaks: no gradient for the tokens
# The second classic. $X$ is "only data", so its place in the returned tuple is `None`.
# PyTorch accepts that without a word, for `None` is the lawful answer for an input that
# needs no gradient. But $X$ is the output of the layer below, and everything below it,
# down to the embedding, loses this path. The other four learn as before, so the loss
# may well fall.


# %%
class NoTokenGradient(_PerChunkSSDTriton):
    @staticmethod
    def backward(ctx, *incoming):
        grads = _PerChunkSSDTriton.backward(ctx, *incoming)
        return *grads[:2], None, *grads[3:]


embedding = torch.randn_like(case[2]).requires_grad_()
for function, reaches in ((_PerChunkSSDTriton, True), (NoTokenGradient, False)):
    below = torch.tanh(embedding.real) + 0j
    outputs = function.apply(*case[:2], below, *case[3:])
    (g,) = torch.autograd.grad(
        some_loss(*outputs), embedding, allow_unused=True, materialize_grads=True
    )
    assert (g.norm() > 1e-3) == reaches
got, wanted = (
    gradients(function.apply, some_loss, case)
    for function in (NoTokenGradient, _PerChunkSSDTriton)
)
same = [torch.allclose(a, b) for a, b in zip(got, wanted, strict=True)]
assert same == [True, True, False, True, True]
print(refused(check, NoTokenGradient, case))

# %% [markdown]
# ## An output nobody uses, an input nobody asks about
# In the last chunk of a sequence nobody reads the state. If a loss uses only one of the
# two outputs, the other one's incoming gradient is `None`. It means zero: the loss does
# not change with it. `torch.autograd.grad` would not take `None` for a tensor of many
# entries, it would want to make up a seed of 1 and refuses. So the backward replaces
# it. (PyTorch would do the same unasked, had we not switched that off. We prefer to see
# the decision in the code.) The gradients that follow are zeros too, not `None`.


# %%
class Witness(_PerChunkSSDTriton):
    seen = None

    @staticmethod
    def backward(ctx, *incoming):
        Witness.seen = [grad is None for grad in incoming]
        return _PerChunkSSDTriton.backward(ctx, *incoming)


only = {
    "Y_diag": (lambda Y, S: Y.abs().pow(3).sum(), [False, True], ["decay_states"]),
    "state": (lambda Y, S: S.abs().pow(3).sum(), [True, False], ["Cc", "A_log"]),
}
for used, (loss, missing, untouched) in only.items():
    got = gradients(Witness.apply, loss, case)
    assert Witness.seen == missing
    assert agree(_PerChunkSSDTriton, loss, case)
    zero = [name for name, g in zip(NAMES, got, strict=True) if not g.any()]
    assert zero == untouched
    print(f"only {used} used: zero gradient for {', '.join(zero)}")
Y, S = per_chunk_ssd_pytorch(*case)
seeds = (torch.ones_like(Y), None)
print(refused(torch.autograd.grad, (Y, S), case, grad_outputs=seeds))

# %% [markdown]
# The other side: somebody trains only a few of the five, the rest is frozen. Each
# subset must give the gradients it would give among all five. There are 31 subsets.
# And what is not wanted gets `None`, not work in vain.

# %%
full = dict(zip(NAMES, gradients(per_chunk_ssd_pytorch, some_loss, case), strict=True))
for subset in range(1, 32):
    wanted = [bool(subset >> i & 1) for i in range(5)]
    some = [z.detach().requires_grad_(w) for z, w in zip(case, wanted, strict=True)]
    some_loss(*_PerChunkSSDTriton.apply(*some)).backward()
    for name, z, w in zip(NAMES, some, wanted, strict=True):
        assert torch.allclose(z.grad, full[name]) if w else z.grad is None

# %% [markdown]
# ### What breaks: freezing before the recomputation
# It seems thrifty to ask for gradients only on the wanted leaves. Train $C$ alone that
# way, say to adapt a finished model. The state does not depend on $C$. It then has no
# graph, and autograd will not take a seed for it. The error comes in backward, in a
# setting that no test with five leaves reaches. With all five as leaves nothing is
# lost: the engine walks only the paths that lead to the wanted ones.

# %%
frozen = [z.detach() for z in case]
frozen[1].requires_grad_()  # Cc
Y, S = per_chunk_ssd_pytorch(*frozen)
assert Y.requires_grad and not S.requires_grad
seeds = (torch.ones_like(Y), torch.zeros_like(S))
print(refused(torch.autograd.grad, (Y, S), frozen[1], grad_outputs=seeds))

# %% [markdown]
# ### What breaks: differentiating twice
# The recomputed graph is gone when backward returns. A second derivative, for a penalty
# on the gradient of $\ell + |B|^2$ say, would treat all that came from $\ell$ as a
# constant, and be wrong without a word. So the request itself is refused. PyTorch has a
# decorator for this, `once_differentiable`, and it is not enough: it plants an error on
# the way back, which leads to no input. `torch.autograd.grad(penalty, B)` walks only
# the ways that lead to $B$, and passes it by.


# %%
class OnlyDecorated(_PerChunkSSDTriton):
    backward = staticmethod(once_differentiable(_PerChunkSSDTriton.backward))


def penalty(function, case):
    """|d(loss + |B|^2)/dB|^2."""
    Y, _ = function(*case)
    loss = Y.abs().square().sum() + case[0].abs().square().sum()
    (first,) = torch.autograd.grad(loss, case[0], create_graph=True)
    return first.abs().square().sum()


wanted = torch.autograd.grad(penalty(per_chunk_ssd_pytorch, case), case[0])[0]
assert "differentiated again" in refused(penalty, _PerChunkSSDTriton.apply, case)
passed_by = torch.autograd.grad(penalty(OnlyDecorated.apply, case), case[0])[0]
assert passed_by.norm() > 0
assert (passed_by - wanted).norm() > 0.5 * wanted.norm(), "wrong, without a word"

# %% [markdown]
# ## What is kept
# How much memory lies between forward and backward? Count it: PyTorch calls a hook for
# every tensor that is saved. The Function must save five tensors, and they must be the
# inputs themselves, not copies. Per token and head that is
# $$8\,(2N + P + 2) \quad\text{bytes}$$
# in complex64, whatever the chunk length $C$. Autograd through `per_chunk_ssd_pytorch`
# also saves two $C \times C$ matrices of every chunk and head: the magnitude $D$, real,
# and $M = D \odot \tilde C \tilde B^\top$, complex. That is $C$ entries of each per
# token, together $(4 + 8)\,C$ bytes.


# %%
def saved(function, case):
    """Storage address -> bytes of what the forward of `function` keeps."""
    kept, alive = {}, []

    def pack(z):
        alive.append(z)  # or its memory could be reused and counted once
        kept[z.untyped_storage().data_ptr()] = z.untyped_storage().nbytes()
        return z

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda z: z):
        outputs = function(*case)
    return kept, outputs


# %%
T, H, N, P = 512, 2, 64, 64
lengths = [16, 32, 64, 128, 256]
ours, plain = [], []
for C in lengths:
    case = chunk_case(1.0, nc=T // C, C=C, H=H, N=N, P=P, dtype=torch.complex64)
    kept, _ = saved(_PerChunkSSDTriton.apply, case)
    assert set(kept) == {z.data_ptr() for z in case}, "the inputs, not copies"
    ours.append(sum(kept.values()) / (T * H))
    kept, _ = saved(per_chunk_ssd_pytorch, case)
    plain.append(sum(kept.values()) / (T * H))
assert ours == [8 * (2 * N + P + 2)] * len(lengths)
matrices = [12 * C for C in lengths]
rest = {kept - square for kept, square in zip(plain, matrices, strict=True)}
assert len(rest) == 1, "beyond the matrices nothing depends on C"
print(f"C = 64: {ours[2]:.0f} bytes against {plain[2]:.0f} per token and head")
assert plain[2] > 1.8 * ours[2], "at the default C = 64 almost twice as much"

# %%
figure, axis = plt.subplots(figsize=(5.8, 2.8))
axis.plot(lengths, plain, "o-", color=RED, label="autograd through the PyTorch path")
axis.plot(lengths, ours, "s-", color=BLUE, label="five inputs, then recompute")
axis.axvline(64, color=BLACK, ls=":", lw=1)
axis.set_xscale("log", base=2)
axis.set_xticks(lengths, lengths)
axis.set(xlabel="chunk length C [tokens]", ylabel="kept [bytes per token and head]")
axis.set(ylim=(0, None))
axis.set_title("Recomputing keeps the same few bytes at every C (N = P = 64)")
axis.legend(fontsize=8)
plt.show()

# %% [markdown]
# ### What breaks: inputs that change in between
# Recomputing is right only if the inputs are still what they were. `save_for_backward`
# keeps a version number with each, and an operation in place in between is caught. A
# tensor hung on `ctx` as an attribute has no such guard, and the backward would
# differentiate at the wrong place.


# %%
class KeepsOnContext(_PerChunkSSDTriton):
    @staticmethod
    def forward(ctx, *case):
        ctx.case = case
        return per_chunk_ssd_pytorch(*case)

    @staticmethod
    def backward(ctx, *incoming):
        leaves = [z.detach().requires_grad_() for z in ctx.case]
        with torch.enable_grad():
            outputs = per_chunk_ssd_pytorch(*leaves)
        return torch.autograd.grad(outputs, leaves, grad_outputs=incoming)


# %%
case = chunk_case(rate=1.0)
wanted = gradients(per_chunk_ssd_pytorch, sum_loss, case)[0]
assert torch.allclose(gradients(KeepsOnContext.apply, sum_loss, case)[0], wanted)
for function, guarded in ((_PerChunkSSDTriton, True), (KeepsOnContext, False)):
    inputs = [case[0], *(z.detach().clone() for z in case[1:])]
    loss = sum_loss(*function.apply(*inputs))
    inputs[2].mul_(2)  # somebody reuses Xc as a buffer
    if guarded:
        message = refused(torch.autograd.grad, loss, case[0])
        assert "modified by an inplace operation" in message
    else:
        (g,) = torch.autograd.grad(loss, case[0])
        assert torch.allclose(g, 2 * wanted), "wrong by a factor of two, no error"

# %% [markdown]
# ## Pitfalls
# - **`.grad` is $2\,\partial\ell/\partial z^*$**, the real gradient in two halves. A
#   formula for $\partial\ell/\partial z$ from a book is half of its conjugate.
# - **A holomorphic step multiplies by the conjugate** of its derivative. A backward
#   without a `.conj()` in it deserves a second look.
# - **Do not drop the imaginary part of a gradient** because the loss is real. It is how
#   a frequency learns.
# - **Scale first, then `requires_grad_()`.** `t * 0.1` of a leaf is no leaf.
# - **`z.real` has stride 2.** Pass a pointer only of what `_view_real_imag` returns.
# - **`.contiguous()` does not resolve a conjugate.** `resolve_conj()` does.
# - **Seed with what arrives.** A backward that makes up a loss passes every test with
#   `y.sum()`.
# - **`None` for an input is silent.** Check that the gradient reaches the layer below.
# - **Test each output unused, and each input frozen,** not only all at once.
# - **gradcheck wants double precision.** If the kernel has none, put a stand-in in its
#   place and check the backward around it.
#
# Next: [05, a Triton kernel](05_triton_kernel.ipynb), the forward that this backward
# was waiting for.

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran for {time.perf_counter() - started:.1f} s")
