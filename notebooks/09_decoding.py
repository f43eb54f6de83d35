# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["module:decode"]
# # One token at a time
# Decoding: a recurrent step whose cost does not grow, and its hand-over from the scan.
#
# A trained model reads a prompt at once and writes its answer token by token. The scan
# of notebooks 03 to 06 is made for reading; for writing, the recurrence it came from is
# enough.
#
# **After this notebook you can**
#
# - derive the step of decoding from the scan, and say what it must remember;
# - hand a prompt over from the scan to the step, padding and all;
# - compare its memory with a key-value cache, and say from which length on it wins;
# - explain why decoding and training agree to rounding and not in bits;
# - find the floor under the time of a step, and the reason why launches are in the way.
#
# **You need** the loop of [notebook 02](02_naive_scan.ipynb), the chunks of
# [notebook 03](03_chunkwise_ssd.ipynb) and the block of
# [notebook 07](07_block_and_model.ipynb); for the last third, Triton as in
# [notebook 05](05_triton_kernel.ipynb).
#
# **It takes** about 20 seconds to run on two CPU cores, and about an hour to read with
# care.
#
# **Where its cells go**: the exported cells make `mamba3lite/models/decode.py`, which
# `mamba3lite generate` runs on.

# %% [markdown]
# ## The tools
# The kernels of this notebook are compiled on a GPU and interpreted elsewhere, which
# is decided before triton is imported. The models stay on the processor up to there.

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %%
import time
from functools import partial
from unittest.mock import patch

import matplotlib.pyplot as plt

from mamba3lite.models.ssd_complex import ssd_naive_complex
from mamba3lite.models.transformer import Mamba3Transformer

torch.set_num_threads(1)  # the tensors here are small: a second thread costs time
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update(
    {
        "figure.dpi": 64,
        "figure.figsize": (7.8, 2.9),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def distance(got, expected):
    """How far two tensors are apart, relative to the norm of the expected one."""
    return ((got - expected).norm() / expected.norm()).item()


# %% tags=["export"]
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from mamba3lite.models.ssd_complex import _discretise, _real_product
from mamba3lite.models.ssd_triton import HAS_TRITON, _interpreted

if HAS_TRITON:
    import triton
    import triton.language as tl

    from mamba3lite.models.ssd_fused import _softplus


# %% [markdown]
# ## What the next token needs
# Unroll the scan of one head up to token $t$, and cut the sum in front of its last
# term:
# $$y_t = \mathrm{Re}\, C_t \Big( \sum_{s \le t} e^{\Sigma_t - \Sigma_s} B_s x_s^\top
# \Big) = \mathrm{Re}\, C_t \Big( e^{\Delta_t A}
# \underbrace{\sum_{s \le t-1} e^{\Sigma_{t-1} - \Sigma_s} B_s x_s^\top}_{h_{t-1}}
# + B_t x_t^\top \Big) .$$
#
# Everything that happened before enters through one matrix, $h_{t-1}$. The chunkwise
# scan goes to some length not to compute it at every position; a decoder reads one
# position at a time, and so the loop of notebook 02 is the better algorithm again:
# $$h_t = \bar a_t h_{t-1} + B_t x_t^\top, \qquad y_t = \mathrm{Re}\, C_t h_t, \qquad
# \bar a_t = e^{\mathrm{softplus}(dt_t) A} .$$
#
# A small model shows what is at stake. Without a state, every new token calls for the
# whole text again. We count operations rather than seconds:

# %%
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)
small = {
    "vocab_size": 61, "d_model": 32, "n_layers": 2, "n_heads": 2, "head_dim": 16,
    "state_dim": 8, "chunk_size": 16, "ffn_dim": 64, "a_init": "spectrum",
}  # fmt: skip
model = Mamba3Transformer(small).eval()
with torch.no_grad():  # far from the start, where every gain is 1 and mixers are 1
    for name, weight in model.named_parameters():
        if weight.ndim == 1 and not weight.is_complex():
            weight.uniform_(0.5, 1.5)
        elif weight.ndim == 2 and "embed" not in name:
            weight.add_(0.1 * torch.randn_like(weight))


def operations(run):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        run()
    return counter.get_total_flops()


lengths = [16, 32, 64, 128, 256, 512]
text = torch.randint(61, (1, 512))
again = [operations(lambda n=n: model(text[:, :n])) for n in lengths]
_, states = model(text[:, :16], return_states=True)
onward = operations(lambda: model(text[:, 16:17], states=states, return_states=True))
assert 30 < again[-1] / again[0] < 34, "reading again grows with the text"
assert onward < again[0] / 10

# %%
fig, axis = plt.subplots()
axis.loglog(lengths, again, "o-", color=RED, label="read the text again")
axis.loglog(lengths, [onward] * 6, "o-", color=BLUE, label="go on from the state")
axis.set(xlabel="tokens so far", ylabel="operations a token (FLOP)")
axis.set_xticks(lengths, [str(n) for n in lengths], minor=False)
axis.minorticks_off()
axis.set_title("From a state, the next token costs the same wherever it stands")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## A cache of constant size
# The state of a layer is $H \times D \times N$ complex numbers. The default model has
# 28 layers of $16 \times 64 \times 64$; at 8 bytes each that is 14.7 MB a sequence. An
# attention layer of the same width keeps a key and a value of every token instead: 28
# layers times 2 times 1024 numbers, 115 kB a token in bfloat16. So where do the two
# cross?

# %%
state_bytes = 28 * 16 * 64 * 64 * 8
token_bytes = 28 * 2 * 1024 * 2
assert state_bytes == 14_680_064
assert state_bytes / token_bytes == 128, "tokens: the state weighs as much as these"
tokens = torch.logspace(0, 5, 60)
all_heads, shared = tokens * token_bytes / 1e6, tokens * token_bytes / 8e6

# %%
fig, axis = plt.subplots()
axis.loglog(tokens, all_heads, color=RED, label="keys and values, every head")
axis.loglog(tokens, shared, color=ORANGE, label="the same, 8 heads share one pair")
axis.axhline(state_bytes / 1e6, color=BLUE, label="state of this model, float32")
axis.plot([128, 1024], [state_bytes / 1e6] * 2, "o", color=BLACK)
axis.set(xlabel="tokens so far", ylabel="memory a sequence (MB)")
axis.set_title("The state weighs as much as the cache of 128 tokens, and never more")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# (*Derived* from shapes; nothing was measured here.) For a short text the state is the
# heavier one. It pays from a few hundred tokens on, and it is what makes the memory of
# a server predictable: a sequence is a *slot* of fixed size.
#
# The state is complex64, whatever the weights are in. It is a sum over the whole text,
# and each step adds a little to much; further down we round it and see.
#
# A batch of sequences comes and goes. So a step gets the slots of its entries as a
# tensor; an entry with slot $-1$ is a *padding lane*: it fills a batch whose size
# must not change, and touches nothing. One spare row takes what such lanes write.


# %% tags=["export"]
class RecurrentCache:
    """What a recurrent step remembers: one state per layer and sequence.

    A slot holds one sequence. A new or reset slot is the empty sequence.

    Args:
        model: a `Mamba3Transformer`; on a GPU its matrices are copied here once, in
            dtype, so that later changes to the model do not reach the cache.
        slots: sequences it has room for, S.
        dtype: of the products; None is bfloat16 on a GPU and that of the weights
            elsewhere. The states are complex64 in any case.

    Attributes:
        states: (L, S, H, D, N), complex64.
        nbytes_per_slot: bytes of state that a sequence takes, whatever its length.

    Raises: ValueError: slots below 1, or a dtype without products here.

    Source: notebook 09, "A cache of constant size".
    """

    def __init__(
        self, model: nn.Module, slots: int, dtype: torch.dtype | None = None
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; it must be at least 1")
        cfg, weight = model.cfg, model.lm_head.weight
        on_gpu = weight.is_cuda
        if dtype is None:
            dtype = torch.bfloat16 if on_gpu else weight.dtype
        if dtype not in (torch.bfloat16, weight.dtype):
            raise ValueError(f"dtype is {dtype}; wanted bfloat16 or {weight.dtype}")
        self.dtype = dtype
        shape = (cfg.n_heads, cfg.head_dim, cfg.state_dim)
        # One slot more than was asked for takes what padding lanes write.
        self._storage = torch.zeros(
            cfg.n_layers, slots + 1, *shape, dtype=torch.complex64, device=weight.device
        )
        self.states = self._storage[:, :slots]
        self.nbytes_per_slot = self.states[:, 0].numel() * self.states.itemsize
        self._weights = None
        if on_gpu and _has_step_kernels(cfg):
            self._weights = _StepWeights.of(model, dtype)

    def reset(self, slots: Int[Tensor, "E"]) -> None:
        """Make these slots the empty sequence; those below 0 are passed over."""
        self._storage[:, _rows_of(slots, self)] = 0


def _rows_of(slots: Int[Tensor, "E"], cache: RecurrentCache) -> Int[Tensor, "E"]:
    """The row of each slot in the storage; padding lanes share the spare one."""
    return torch.where(slots < 0, cache.states.shape[1], slots).long()


# %%
cache = RecurrentCache(model, slots=3)
assert cache.nbytes_per_slot == 2 * 2 * 16 * 8 * 8  # layers, heads, channels, states
cache.states.fill_(1)
cache.reset(torch.tensor([2, -1, 0], dtype=torch.int32))
assert torch.equal(cache.states.abs().amax((0, 2, 3, 4)), torch.tensor([0.0, 1.0, 0.0]))

# %% [markdown]
# ## The step in PyTorch
# Three lines are the recurrence. The rest of a block (notebook 07) looks at one token
# anyway, so it is the same code for a step and for a whole prompt: only the scan in the
# middle is exchanged.


# %% tags=["export"]
def _recurrence(layer, proj, state):
    """One step of the scan of a block.

    h = abar h + B x^T and y = Re(C h), in float32.

    Args: proj: (E, 1, columns), the projection of one token. state: (E, H, D, N).

    Returns: y (E, 1, H, D) and the state after the token.

    Source: notebook 09, "The step in PyTorch".
    """
    heads = (layer.cfg.n_heads, -1)
    *columns, dt = proj.float().split(layer._columns, dim=-1)
    x, B_re, B_im, C_re, C_im = (z[:, 0].unflatten(-1, heads) for z in columns)
    abar = _discretise(dt, layer.A)[:, 0]
    B, C = torch.complex(B_re, B_im), torch.complex(C_re, C_im)
    state = abar[..., None, None] * state + x.unsqueeze(-1) * B.unsqueeze(-2)
    y = _real_product(state, C.unsqueeze(-2)).squeeze(-1)
    return y.unsqueeze(1), state


def _through_block(layer, u, scan):
    """The block of notebook 07 around a scan of its projection, proj -> y."""
    y = scan(layer.in_proj(layer.norm_ssd(u)))
    if not torch.is_autocast_enabled(y.device.type):
        y = y.to(layer.mimo.weight.dtype)
    u = u + layer.out_proj(layer.mimo(y).flatten(-2))
    gate, up = layer.ffn_gate_up(layer.norm_ffn(u)).chunk(2, dim=-1)
    return u + layer.ffn_down(F.silu(gate) * up)


def _products_in(cache: RecurrentCache):
    """Autocast to the dtype of a cache, where that is not the one of the weights."""
    return torch.autocast(
        cache.states.device.type,
        torch.bfloat16,
        enabled=cache.dtype == torch.bfloat16,
        cache_enabled=False,
    )


def _step_in_pytorch(model, tokens, cache, slots):
    rows = _rows_of(slots, cache)
    u = model.embed(tokens)[:, None]
    with _products_in(cache):
        for layer, states in zip(model.layers, cache._storage, strict=True):

            def scan(proj, layer=layer, states=states):
                y, states[rows] = _recurrence(layer, proj, states[rows])
                return y

            u = _through_block(layer, u, scan)
        return model.lm_head(model.norm_f(u[:, 0])).float()


# %% [markdown]
# The oracle is notebook 02's loop over the whole sequence in complex128. Step sizes
# differ from token to token: with equal ones, a decay taken from the wrong step would
# not show.

# %%
torch.manual_seed(1)
layer, T = model.layers[0], 200
H, D, N = 2, 16, 8
proj = torch.randn(3, T, sum(layer._columns))
streams = [z.unflatten(-1, (H, -1)) for z in proj.double().split(layer._columns, -1)]
x, B, C = streams[0], torch.complex(*streams[1:3]), torch.complex(*streams[3:5])
A = layer.A.detach().to(torch.complex128)
oracle, final = ssd_naive_complex(
    x, A, B, C, streams[5].squeeze(-1), return_final_states=True
)


def decode(proj, keep=lambda state: state):
    """y of every step, one at a time; keep says what survives of a state."""
    state, y = torch.zeros(len(proj), H, D, N, dtype=torch.complex64), []
    with torch.no_grad():
        for t in range(proj.shape[1]):
            out, state = _recurrence(layer, proj[:, t : t + 1], state)
            state = keep(state)
            y.append(out)
    return torch.cat(y, 1), state


y, state = decode(proj)
assert distance(y, oracle.real) < 1e-6 and distance(state, final) < 1e-6

# %% [markdown]
# And what breaks if the state is kept in bfloat16, as one keeps keys and values? Each
# rounding is small and, for a head that forgets, it fades like everything else. A head
# that remembers collects them.


# %%
def in_bfloat16(state):
    return torch.view_as_complex(torch.view_as_real(state).bfloat16().float())


rounded, _ = decode(proj, keep=in_bfloat16)
error = {}
for name, result in ("float32 state", y), ("bfloat16 state", rounded):
    gap = (result - oracle.real).norm(dim=(0, 3)) / oracle.real.norm(dim=(0, 3))
    error[name] = gap.unfold(0, 20, 20).mean(-1)  # (10, H), means of 20 steps
slow = int(layer.A.real.argmax())
assert error["bfloat16 state"][-1, slow] > 1000 * error["float32 state"][-1, slow]
assert error["bfloat16 state"][-1, slow] > 1.5 * error["bfloat16 state"][-1, 1 - slow]

# %%
fig, axis = plt.subplots()
middle = torch.arange(10, 200, 20)
for (name, gap), style in zip(error.items(), ("-", "--"), strict=True):
    for head, color in (slow, BLUE), (1 - slow, ORANGE):
        memory = "remembers" if head == slow else "forgets"
        label = f"{name}, head that {memory}"
        axis.semilogy(middle, gap[:, head], style, color=color, label=label)
axis.set(xlabel="step", ylabel="relative error of y (no unit)")
axis.set_title("A rounded state costs four digits, most where memory is long")
axis.legend(frameon=False, fontsize=8, ncol=2)
plt.show()

# %% [markdown]
# ## Prefill
# Prompts of different lengths lie side by side, padded on the right. The scan runs over
# the padding as well, and the state it hands over must not notice. Two things would
# reach it: what a padding token writes, $B x^\top$, and that it lets time pass.
# Zeroing $x$ and $B$ removes the first. For the second, the step size must be exactly
# zero, and the step size is $\mathrm{softplus}(dt)$: so $dt = -\infty$.


# %% tags=["export"]
@torch.no_grad()
def recurrent_prefill(
    model: nn.Module,
    tokens: Int[Tensor, "E T"],
    lengths: Int[Tensor, "E"],
    cache: RecurrentCache,
    slots: Int[Tensor, "E"],
) -> Float[Tensor, "E V"]:
    """Read prompts by the chunkwise scan and leave their states in the cache.

    A slot continues from the state it holds, so that a prompt may come in pieces.

    Args:
        tokens: prompts side by side, padded on the right with any valid id.
        lengths: tokens of each row that count, 0 to T; 0 leaves the slot alone.
        slots: where each row lives; a row with a slot below 0 touches nothing.

    Returns: logits after the last token of each row, float32; without meaning for a row
        of length 0.

    Raises: ValueError: shapes that do not fit each other.

    Source: notebook 09, "Prefill".
    """
    _check_entries(tokens, 2, cache, slots)
    rows = _rows_of(slots, cache)
    counts = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    u = model.embed(tokens)
    with _products_in(cache):
        for layer, states in zip(model.layers, cache._storage, strict=True):

            def scan(proj, layer=layer, states=states):
                y, states[rows] = layer._ssd_with_dispatch(
                    _still_where(~counts, proj, layer._columns),
                    initial_states=states[rows],
                    return_final_states=True,
                )
                return y

            u = _through_block(layer, u, scan)
        last = u[torch.arange(len(u), device=u.device), lengths.clamp(min=1).long() - 1]
        return model.lm_head(model.norm_f(last)).float()


def _still_where(padding, proj, columns):
    """The projection with steps of no length, which write nothing, where padding is."""
    written = sum(columns[:3])  # x and both halves of B
    proj = proj.clone()
    proj[..., :written].masked_fill_(padding.unsqueeze(-1), 0)
    # softplus(-inf) = 0, and exp(0 A) = 1: the state stays as it is.
    proj[..., -columns[5] :].masked_fill_(padding.unsqueeze(-1), -torch.inf)
    return proj


def _check_entries(tokens, ndim, cache, slots) -> None:
    """Refuse what does not fit; values are looked at on a CPU alone."""
    if tokens.ndim != ndim or slots.shape != tokens.shape[:1]:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)} and slots {tuple(slots.shape)}; "
            f"wanted {'(E, T)' if ndim == 2 else '(E,)'} and (E,)"
        )
    if slots.device.type != "cpu":
        return  # reading them would wait for the device
    room = cache.states.shape[1]
    if slots.numel() and slots.max() >= room:
        raise ValueError(f"slots holds {slots.max()}; the cache has 0 to {room - 1}")
    used = slots[slots >= 0]
    if len(used.unique()) != len(used):
        raise ValueError("slots holds a slot twice; every sequence has its own")


# %%
torch.manual_seed(2)
texts = torch.randint(61, (3, 40))
counted = torch.tensor([40, 7, 16])
with torch.no_grad():
    whole = model(texts)
    alone = [
        model(texts[[row], :n], return_states=True) for row, n in enumerate(counted)
    ]
slots = torch.tensor([2, 0, 1], dtype=torch.int32)
cache = RecurrentCache(model, slots=3)
logits = recurrent_prefill(model, texts, counted, cache, slots)
for row, (of_text, states) in enumerate(alone):
    assert distance(logits[row], of_text[0, -1]) < 1e-5
    handed = cache.states[:, slots[row]]
    assert distance(handed, torch.stack(states)[:, 0]) < 1e-5

# %% [markdown]
# What breaks with the tempting $dt = 0$: softplus makes a step of length $\ln 2$ of
# it, and 33 of those wear the state of the short prompt down.


# %%
def with_dt_zero(padding, proj, columns):
    return proj.masked_fill(padding.unsqueeze(-1), 0)


wrong = RecurrentCache(model, slots=3)
with patch.dict(globals(), _still_where=with_dt_zero):
    recurrent_prefill(model, texts, counted, wrong, slots)
assert distance(wrong.states[:, 0], cache.states[:, 0]) > 0.5
assert distance(wrong.states[:, 2], cache.states[:, 2]) < 1e-5, "no padding, no harm"

# %% [markdown]
# A prompt may also come in pieces, since a slot continues from what it holds. That
# bounds the memory of the prefill: `mamba3lite generate` reads 4096 tokens at once.

# %%
pieces = RecurrentCache(model, slots=3)
for first in range(0, 40, 16):
    here = (counted - first).clamp(0, 16)
    recurrent_prefill(model, texts[:, first : first + 16], here, pieces, slots)
assert distance(pieces.states, cache.states) < 1e-5

# %% [markdown]
# Now the whole model, a step at a time from where each prompt ended. The truth is a
# full forward pass over the text.

# %%
torch.manual_seed(3)
texts = torch.randint(61, (3, 90))
with torch.no_grad():
    whole = model(texts)
cache = RecurrentCache(model, slots=3)
recurrent_prefill(model, texts, counted, cache, slots)
decoded = []
with torch.no_grad():
    for i in range(50):
        here = counted + i
        decoded.append(
            _step_in_pytorch(model, texts[torch.arange(3), here], cache, slots)
        )
decoded = torch.stack(decoded, 1)  # (3, 50, V)
positions = counted[:, None] + torch.arange(50)
expected = whole[torch.arange(3)[:, None], positions]
assert distance(decoded, expected) < 1e-5
assert torch.equal(decoded.argmax(-1), expected.argmax(-1))

# %% [markdown]
# ## Equal to rounding, not in bits
# The two are the same formula and not the same arithmetic. The scan adds the tokens of
# a chunk in a matrix product and enters the state once a chunk; the step enters it at
# every token. Sums in another order round differently. How often does it show?

# %%
same = (decoded == expected).all(-1)
off = (decoded - expected).abs().amax(-1)
share = 1 - same.float().mean().item()
print(f"{share:.0%} of {same.numel()} rows of logits differ in at least one bit")
assert share > 0.9 and off.max() < 1e-5

# %%
fig, axis = plt.subplots(figsize=(7.8, 2.2))
image = axis.imshow(1e6 * off, aspect="auto", cmap="cividis")
axis.set(xlabel="step after the prompt", ylabel="prompt", yticks=range(3))
axis.set_yticklabels([f"{n} tokens" for n in counted.tolist()])
axis.set_title("Nearly every row of logits is off, by a millionth")
fig.colorbar(image, ax=axis, label="largest difference (1e-6 nats)")
plt.show()

# %% [markdown]
# For text this is harmless: a token changes where two logits are equal to a millionth.
# It is not harmless where the probabilities of a sample are compared with those that
# training computes for it, as in reinforcement learning.
#
# ## What a step costs on a GPU
# A step multiplies one vector per sequence with every matrix of the model. On a GPU it
# is not arithmetic that takes time. Each weight is read once, 2 bytes in bfloat16, and
# used for two operations a sequence; each state is read and written once. *Derived*
# for the default model on an H200 (4.1 TB/s, the copy rate that
# `docs/benchmarks/h200-per-chunk.json` has measured):

# %%
weights, rate = 2 * 433_662_400, 4.1e12
batch = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
floor = (weights + 2 * batch * state_bytes) / rate * 1e3  # ms
assert 0.21 < floor[0] < 0.23 and 0.64 < floor[6] < 0.68
assert 2 * 30 * state_bytes > weights > 2 * 29 * state_bytes, "from 30 on, states win"

# %%
fig, axis = plt.subplots()
of_weights = torch.full((8,), weights / rate * 1e3)
axis.stackplot(
    batch, of_weights, floor - of_weights, colors=[SKY, ORANGE],
    labels=["weights", "states, read and written"],
)  # fmt: skip
axis.set(xscale="log", xlabel="sequences side by side", ylabel="least time (ms a step)")
axis.set_xticks(batch.tolist(), [str(n) for n in batch.tolist()])
axis.set_title("One sequence waits for weights, many wait for states")
axis.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# 0.2 ms for five or six small products in each of 28 layers: a microsecond each. A
# launch, and the wait for the one before, costs more than that. So a step has as few
# kernels as possible, and they overlap.
#
# ## Matrices for a step
# Some work can be done before. The gain of an RMSNorm is a factor on the columns of
# the matrix behind it, and two matrices in a row, mixer and output projection, are
# one:
# $$W (g \odot v) = (W \,\mathrm{diag}\, g)\, v, \qquad W_o (W_m y) = (W_o W_m)\, y .$$
# Both are exact algebra, and round differently.


# %% tags=["export"]
@dataclass(frozen=True)
class _LayerWeights:
    """What a step multiplies with in one layer, gains and mixer multiplied in."""

    in_proj: Float[Tensor, "columns d_model"]
    out_proj: Float[Tensor, "d_model width"]
    down: Float[Tensor, "d_model F"]
    gate_up: Float[Tensor, "2*F d_model"]
    A: Float[Tensor, "H 2"]

    @classmethod
    def of(cls, layer: nn.Module, dtype: torch.dtype) -> "_LayerWeights":
        return cls(
            (layer.in_proj.weight * layer.norm_ssd.weight).to(dtype),
            (layer.out_proj.weight @ layer.mimo.weight).to(dtype),
            layer.ffn_down.weight.to(dtype).contiguous(),
            (layer.ffn_gate_up.weight * layer.norm_ffn.weight).to(dtype),
            torch.view_as_real(layer.A).contiguous(),
        )


@dataclass(frozen=True)
class _StepWeights:
    """What a step multiplies with: the matrices of all layers, and the output head."""

    layers: list[_LayerWeights]
    head: Float[Tensor, "V d_model"]

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "_StepWeights":
        layers = [_LayerWeights.of(layer, dtype) for layer in model.layers]
        head = (model.lm_head.weight * model.norm_f.weight).to(dtype)
        return cls(layers, head)


def _has_step_kernels(cfg) -> bool:
    """Whether the kernels of a step take a model of these sizes."""
    sides = cfg.head_dim, cfg.state_dim
    widths = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.ffn_dim
    powers = all(side & (side - 1) == 0 for side in sides) and max(sides) <= 256
    fits = all(width % 16 == 0 and width <= 4096 for width in widths)
    return HAS_TRITON and powers and fits


# %% [markdown]
# ## A launch that does not wait
# Most of what a kernel reads are weights, which nobody writes. It could have asked for
# them while the kernel before was still at work. Hopper has a way to say so,
# *programmatic dependent launch*: the later kernel starts early, does what depends on
# nobody, and then waits in the middle of its code for the earlier one to end.

# %% tags=["export"]
# 0: a kernel starts when the one before has ended. 1: it starts when all programs of
# the one before have what they wait for. 2: as soon as they have started.
_OVERLAP = 2

if HAS_TRITON:

    @triton.jit
    def _wait_for_inputs(OVERLAP: tl.constexpr):
        """Past this line, what the kernel before has written is there."""
        if OVERLAP == 2:
            tl.extra.cuda.gdc_launch_dependents()
        if OVERLAP > 0:
            tl.extra.cuda.gdc_wait()
        if OVERLAP == 1:
            tl.extra.cuda.gdc_launch_dependents()


def _start(kernel, grid, *args, **constants) -> None:
    """Launch a kernel of the step so that it overlaps with the one before."""
    overlap = 0 if _interpreted() else _OVERLAP
    options = {"launch_pdl": True} if overlap else {}
    kernel[grid](*args, **constants, OVERLAP=overlap, **options)


# %% [markdown]
# ## A matrix times few vectors
# A program takes a few rows of the matrix, whole, into registers, and only then waits
# for the vector. A norm is a factor on the result, so it is computed on the side from
# the same numbers: $W \frac{v}{\mathrm{rms}(v)} = \frac{1}{\mathrm{rms}(v)} W v$. For
# the SwiGLU a program holds the same rows of both halves. The residual sum is in
# place.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _vectors_kernel(
        x_ptr, w_ptr, out_ptr, M, eps,
        K: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
        WHOLE: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
        ADD: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """out[e] = W x[e] for BLOCK_M rows of W, all of which are in registers."""
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        k = tl.arange(0, BLOCK_K)
        at = m.to(tl.int64)[:, None] * K + k[None, :]
        if WHOLE:
            w = tl.load(w_ptr + at)
            if SWIGLU:
                v = tl.load(w_ptr + M * K + at)
        else:
            inside = (m < M)[:, None] & (k < K)[None, :]
            w = tl.load(w_ptr + at, mask=inside, other=0.0)
            if SWIGLU:
                v = tl.load(w_ptr + M * K + at, mask=inside, other=0.0)
        _wait_for_inputs(OVERLAP)
        for e in tl.static_range(E):
            x = tl.load(x_ptr + e * K + k, mask=k < K, other=0.0).to(tl.float32)
            z = tl.sum(w.to(tl.float32) * x[None, :], 1)
            scale = 1.0
            if NORM:
                scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
                z *= scale
            if SWIGLU:
                up = tl.sum(v.to(tl.float32) * x[None, :], 1) * scale
                z = z * tl.sigmoid(z) * up
            here = out_ptr + e * M + m
            if ADD:
                z += tl.load(here, mask=m < M, other=0.0)
            tl.store(here, z.to(out_ptr.dtype.element_ty), mask=m < M)


# %%
def on(kernel, grid, *args, **constants):
    """Launch without overlap."""
    kernel[grid](*args, **constants, OVERLAP=0)


torch.manual_seed(4)
u, W = torch.randn(2, 24, device=device), torch.randn(2 * 11, 24, device=device)
unit, eps = F.rms_norm(u, (24,), eps=1e-5), 1e-5
common = {"K": 24, "E": 2, "BLOCK_M": 4, "BLOCK_K": 32, "WHOLE": False}
out = torch.empty(2, 11, device=device)
on(_vectors_kernel, (3,), u, W, out, 11, eps, **common,
   NORM=True, SWIGLU=True, ADD=False)  # fmt: skip
gate, up = (unit @ W.T).chunk(2, -1)
assert distance(out, F.silu(gate) * up) < 1e-5
stream = torch.ones(2, 22, device=device)
on(_vectors_kernel, (6,), u, W, stream, 22, eps, **common,
   NORM=False, SWIGLU=False, ADD=True)  # fmt: skip
assert distance(stream, 1 + u @ W.T) < 1e-5

# %% [markdown]
# ## A matrix times some vectors
# From a handful of sequences on, the arithmetic of that kernel is in the way, and the
# matrix units do it. A tile of them has 16 columns at least; entries that are not there
# repeat the last one, and are not stored. Here the weights do not fit into registers
# with everything else, so a program asks for them to be brought nearer, from memory
# into the second cache, and waits then.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _fetch(w_ptr, first, M, K: tl.constexpr, PIECES: tl.constexpr):
        """Ask for rows of a matrix, from memory into the second cache."""
        piece: tl.constexpr = 128  # numbers, 256 bytes of bfloat16
        here = first * K + tl.arange(0, PIECES) * piece
        here = tl.minimum(here, M * K - piece)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; // $0", "=r,l",
            [(w_ptr + here).to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def _tiles_kernel(
        x_ptr, w_ptr, out_ptr, half_ptr, M, E, eps,
        K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
        BLOCK_K: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr,
        SWIGLU: tl.constexpr, ADD: tl.constexpr, FETCH: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """out[e] = W x[e] for a tile of rows of W and of entries, by matrix units."""
        first = tl.program_id(0) * BLOCK_M
        m = first + tl.arange(0, BLOCK_M)
        e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
        k = tl.arange(0, BLOCK_K)
        if FETCH > 0 and OVERLAP > 0:
            _fetch(w_ptr, first, M, K, FETCH)
            if SWIGLU:
                _fetch(w_ptr + M * K, first, M, K, FETCH)
        _wait_for_inputs(OVERLAP)
        z = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        square = tl.zeros((BLOCK_E,), tl.float32)
        row = tl.minimum(m, M - 1)
        entry = tl.minimum(e, E - 1)
        for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            at = row.to(tl.int64)[:, None] * K + (k0 + k)[None, :]
            x = tl.load(x_ptr + entry[None, :] * K + (k0 + k)[:, None])
            z = tl.dot(tl.load(w_ptr + at), x, acc=z, input_precision="ieee")
            if SWIGLU:
                v = tl.load(w_ptr + M * K + at)
                up = tl.dot(v, x, acc=up, input_precision="ieee")
            if NORM:
                wide = x.to(tl.float32)
                square += tl.sum(wide * wide, 0)
        if NORM:
            scale = tl.rsqrt(square / K + eps)[None, :]
            z *= scale
            up *= scale
        if SWIGLU:
            z = z * tl.sigmoid(z) * up
        inside = (m < M)[:, None] & (e < E)[None, :]
        here = e[None, :] * M + m[:, None]
        if ADD:
            z += tl.load(out_ptr + here, mask=inside, other=0.0)
            tl.store(half_ptr + here, z.to(half_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + here, z.to(out_ptr.dtype.element_ty), mask=inside)


# %%
torch.manual_seed(5)
u, W = torch.randn(5, 32, device=device), torch.randn(2 * 24, 32, device=device)
unit, half = F.rms_norm(u, (32,), eps=1e-5), torch.empty(5, 48, device=device)
common = {"K": 32, "BLOCK_M": 16, "BLOCK_E": 16, "BLOCK_K": 16, "STAGES": 1}
common |= {"FETCH": 0}
out = torch.empty(5, 24, device=device)
on(_tiles_kernel, (2, 1), u, W, out, half, 24, 5, eps, **common,
   NORM=True, SWIGLU=True, ADD=False)  # fmt: skip
gate, up = (unit @ W.T).chunk(2, -1)
assert distance(out, F.silu(gate) * up) < 1e-5
stream = torch.ones(5, 48, device=device)
on(_tiles_kernel, (3, 1), u, W, stream, half, 48, 5, eps, **common,
   NORM=False, SWIGLU=False, ADD=True)  # fmt: skip
assert distance(stream, 1 + u @ W.T) < 1e-5 and torch.equal(half, stream)

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _norm_kernel(
        u_ptr, added_ptr, out_ptr, K, eps, BLOCK_K: tl.constexpr, ADD: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """u += added where there is something to add; out = u / rms(u). A row each."""
        _wait_for_inputs(OVERLAP)
        k = tl.arange(0, BLOCK_K)
        at = tl.program_id(0) * K + k
        u = tl.load(u_ptr + at, mask=k < K, other=0.0)
        if ADD:
            u += tl.load(added_ptr + at, mask=k < K, other=0.0).to(tl.float32)
            tl.store(u_ptr + at, u, mask=k < K)
        u *= tl.rsqrt(tl.sum(u * u, 0) / K + eps)
        tl.store(out_ptr + at, u.to(out_ptr.dtype.element_ty), mask=k < K)

    @triton.jit
    def _swiglu_kernel(
        z_ptr, out_ptr, F, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
    ):  # fmt: skip
        """out = silu(gate) * up, of rows that hold gate and up side by side."""
        _wait_for_inputs(OVERLAP)
        e, f = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(z_ptr + e * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + e * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
        z = gate * tl.sigmoid(gate) * up
        tl.store(out_ptr + e * F + f, z.to(out_ptr.dtype.element_ty), mask=f < F)


# %% [markdown]
# ## The state, in place
# The heart of the step moves 16 bytes for every eight operations. A program asks for
# its piece of the state before it waits, too: nobody but its own predecessor of the
# last step has written there.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _state_kernel(
        proj_ptr, A_ptr, slots_ptr, states_ptr, y_ptr, H, W,
        D: tl.constexpr, N: tl.constexpr, BLOCK_D: tl.constexpr,
        OVERLAP: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """h = abar h + B x^T in place and y = Re(C h), BLOCK_D channels of a head.

        Grid (E H D / BLOCK_D). A complex number of the state is one 64-bit word.
        """
        parts: tl.constexpr = D // BLOCK_D
        program = tl.program_id(0)
        part, h, e = program % parts, program // parts % H, program // parts // H
        d, n = part * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, N)
        slot = tl.load(slots_ptr + e).to(tl.int64)
        at = states_ptr + ((slot * H + h) * D + d)[:, None] * N + n[None, :]
        live = (slot >= 0) & (n >= 0)[None, :] & (d >= 0)[:, None]
        word = tl.load(at, mask=live, other=0)
        A_re, A_im = tl.load(A_ptr + 2 * h), tl.load(A_ptr + 2 * h + 1)
        _wait_for_inputs(OVERLAP)
        base = proj_ptr + e.to(tl.int64) * W
        x = tl.load(base + h * D + d).to(tl.float32)
        keys = base + H * D + h * N + n
        B_re, B_im = tl.load(keys), tl.load(keys + H * N)
        C_re, C_im = tl.load(keys + 2 * H * N), tl.load(keys + 3 * H * N)
        dt = tl.load(base + H * (D + 4 * N) + h).to(tl.float32)
        delta = _softplus(dt, EMULATE)
        turns = delta * (A_im * 0.15915494309189535)  # 1 / (2 pi)
        angle = (turns - tl.floor(turns + 0.5)) * 6.283185307179586
        size = tl.exp(delta * A_re)
        cos, sin = size * tl.cos(angle), size * tl.sin(angle)
        old_re = word.to(tl.int32).to(tl.float32, bitcast=True)
        old_im = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        x = x[:, None]
        re = old_re * cos - old_im * sin + x * B_re.to(tl.float32)[None, :]
        im = old_re * sin + old_im * cos + x * B_im.to(tl.float32)[None, :]
        low = re.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        high = im.to(tl.int32, bitcast=True).to(tl.int64) << 32
        tl.store(at, low | high, mask=live)
        read = re * C_re.to(tl.float32)[None, :] - im * C_im.to(tl.float32)[None, :]
        y_at = y_ptr + (e.to(tl.int64) * H + h) * D + d
        tl.store(y_at, tl.sum(read, 1).to(y_ptr.dtype.element_ty))


# %%
torch.manual_seed(6)
proj = torch.randn(3, 1, sum(layer._columns))
before = torch.randn(4, H, D, N, dtype=torch.complex64)
picked = torch.tensor([2, -1, 0], dtype=torch.int32)
after, y = before.to(device, copy=True), torch.empty(3, H, D, device=device)
rates = torch.view_as_real(layer.A.detach()).to(device)
on(_state_kernel, (3 * H * 2,), proj.to(device), rates, picked.to(device),
   after.view(torch.int64), y, H, proj.shape[-1], D=D, N=N, BLOCK_D=8,
   EMULATE=_interpreted())  # fmt: skip
with torch.no_grad():
    expected, state = _recurrence(layer, proj[[0, 2]], before[[2, 0]])
assert distance(y.cpu()[[0, 2]], expected[:, 0]) < 1e-6
assert distance(after.cpu()[[2, 0]], state) < 1e-6
assert torch.equal(after.cpu()[[1, 3]], before[[1, 3]]), "others are not touched"

# %% [markdown]
# ## The launch table
# How many rows a program takes is measured, not derived: few programs leave the memory
# idle, many small ones spend their time starting.

# %% tags=["export"]
# Rows of a matrix that a program takes and its warps, in `_vectors_kernel`; and its
# rows, columns at once, stages and warps in `_tiles_kernel`, by entries of a tile.
_STEP_VECTORS = {
    "in_proj": (8, 4), "out_proj": (4, 4), "gate_up": (4, 4), "down": (4, 4),
    "head": (16, 4),
}  # fmt: skip
_STEP_TILES = {
    16: (16, 256, 3, 4, True),
    32: (16, 256, 3, 4, True),
    64: (32, 128, 4, 4, True),
}
_STEP_STATE = {True: (8, 1), False: (16, 4)}  # few programs, or many
_VECTORS_UP_TO, _TILES_UP_TO = 4, 64


class _Stream:
    """The residual stream of a step: u, float32, and a copy that products read."""

    def __init__(self, u: Float[Tensor, "E d_model"], dtype: torch.dtype) -> None:
        self.u = u
        self.half = u.to(dtype) if len(u) > _VECTORS_UP_TO else None
        self.added = None  # what is still to be added to u


def _by_vectors(x, w, name, out, eps, norm, swiglu, add):
    M, (E, K) = out.shape[1], x.shape
    rows, warps = _STEP_VECTORS[name]
    BLOCK_K = triton.next_power_of_2(K)
    _start(
        _vectors_kernel, (triton.cdiv(M, rows),), x, w, out, M, eps, K=K, E=E,
        BLOCK_M=rows, BLOCK_K=BLOCK_K, WHOLE=M % rows == 0 and K == BLOCK_K, NORM=norm,
        SWIGLU=swiglu, ADD=add, num_warps=warps,
    )  # fmt: skip


def _by_tiles(x, w, out, half, eps, norm, swiglu, add):
    M, (E, K) = out.shape[1], x.shape
    block_e = 16 if E <= 16 else 32 if E <= 32 else 64
    rows, columns, stages, warps, fetch = _STEP_TILES[block_e]
    _start(
        _tiles_kernel, (triton.cdiv(M, rows), triton.cdiv(E, block_e)),
        x, w, out, half, M, E, eps, K=K, BLOCK_M=rows, BLOCK_E=block_e,
        BLOCK_K=min(columns, K & -K), STAGES=stages, NORM=norm, SWIGLU=swiglu, ADD=add,
        FETCH=triton.next_power_of_2(rows * K // 128) if fetch else 0,
        num_warps=warps,
    )  # fmt: skip


_CUBLAS_ADD = True


def _by_cublas(stream, x, w, out, eps, norm, swiglu, add):
    if norm:
        x = torch.empty_like(stream.half)
        _start(
            _norm_kernel, (len(x),), stream.u,
            stream.u if stream.added is None else stream.added, x, x.shape[1], eps,
            BLOCK_K=triton.next_power_of_2(x.shape[1]), ADD=stream.added is not None,
            num_warps=4,
        )  # fmt: skip
        stream.added = None
    if swiglu:
        z = x @ w.mT
        E, inner = out.shape
        _start(
            _swiglu_kernel, (E, triton.cdiv(inner, 512)), z, out, inner, BLOCK=512,
            num_warps=2,
        )  # fmt: skip
    elif add and _CUBLAS_ADD:
        torch.addmm(stream.u, x, w.mT, out_dtype=torch.float32, out=stream.u)
    elif add:
        stream.added = x @ w.mT
    elif out.dtype == w.dtype:
        torch.mm(x, w.mT, out=out)
    else:
        torch.mm(x, w.mT, out_dtype=out.dtype, out=out)


def _multiply(stream, x, w, name, out, eps, norm=False, swiglu=False, add=False):
    """out = W x; of the normalized stream, through SwiGLU, or added to the stream."""
    E = len(out)
    if E <= _VECTORS_UP_TO:
        x = stream.u if norm else x
        _by_vectors(x, w, name, out, eps, norm, swiglu, add)
    elif E <= _TILES_UP_TO:
        x = stream.half if norm else x
        _by_tiles(x, w, out, stream.half, eps, norm, swiglu, add)
    else:
        _by_cublas(stream, x, w, out, eps, norm, swiglu, add)
    return out


def _step_by_kernels(model, tokens, cache, slots):
    cfg, weights, E = model.cfg, cache._weights, len(tokens)
    H, D, N, eps = cfg.n_heads, cfg.head_dim, cfg.state_dim, cfg.rms_norm_eps
    stream = _Stream(F.embedding(tokens, model.embed.weight).float(), cache.dtype)
    new = stream.u.new_empty
    proj = new(E, H * (D + 4 * N + 1), dtype=cache.dtype)
    y, act = new(E, H * D, dtype=cache.dtype), new(E, cfg.ffn_dim, dtype=cache.dtype)
    words = cache._storage.view(torch.int64)
    block_d, warps = _STEP_STATE[E <= 8]
    block_d = min(block_d, D)
    for layer, states in zip(weights.layers, words, strict=True):
        _multiply(stream, None, layer.in_proj, "in_proj", proj, eps, norm=True)
        _start(
            _state_kernel, (E * H * (D // block_d),), proj, layer.A, slots, states, y,
            H, proj.shape[1], D=D, N=N, BLOCK_D=block_d, EMULATE=_interpreted(),
            num_warps=warps,
        )  # fmt: skip
        _multiply(stream, y, layer.out_proj, "out_proj", stream.u, eps, add=True)
        _multiply(
            stream, None, layer.gate_up, "gate_up", act, eps, norm=True, swiglu=True
        )
        _multiply(stream, act, layer.down, "down", stream.u, eps, add=True)
    logits = new(E, cfg.vocab_size)
    return _multiply(stream, None, weights.head, "head", logits, eps, norm=True)


# %% [markdown]
# ## The step
# One function, whatever it runs on.


# %% tags=["export"]
@torch.no_grad()
def recurrent_step(
    model: nn.Module,
    tokens: Int[Tensor, "E"],
    cache: RecurrentCache,
    slots: Int[Tensor, "E"],
) -> Float[Tensor, "E V"]:
    """Read one token of every sequence, and give the logits of the next.

    Time and memory do not depend on how many tokens came before. Nothing waits for the
    device, so that a CUDA graph can hold the call.

    Args:
        tokens: the token of each entry.
        slots: int32, the slot of each entry; one below 0 is a padding lane, which
            touches nothing and whose logits mean nothing.

    Returns: logits, float32; equal to those of a full forward pass to rounding.

    Raises: ValueError: shapes that do not fit each other.

    Source: notebook 09, "The step".
    """
    _check_entries(tokens, 1, cache, slots)
    if cache._weights is None:
        return _step_in_pytorch(model, tokens, cache, slots)
    return _step_by_kernels(model, tokens, cache, slots)


# %%
kernels = RecurrentCache(model, slots=3)
kernels._weights = _StepWeights.of(model, torch.float32)
plain = RecurrentCache(model, slots=3)
for each in (kernels, plain):
    recurrent_prefill(model, texts, counted, each, slots)
if device.type == "cpu":  # the interpreter takes tensors of the processor
    for token in texts[:, 60:63].T:
        got = recurrent_step(model, token, kernels, slots)
        assert distance(got, recurrent_step(model, token, plain, slots)) < 1e-5
    assert distance(kernels.states, plain.states) < 1e-5

# %% [markdown]
# ## Latency
# Back on the processor, in seconds this time. The step costs the same after ten tokens
# and after a thousand; reading again does not.


# %%
def seconds(run, repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


long = torch.randint(61, (1, 8192))
one = torch.zeros(1, dtype=torch.int32)
lengths, reading, stepping = [32, 256, 2048, 8192], [], []
with torch.no_grad():
    for n in lengths:
        cache = RecurrentCache(model, slots=1)
        recurrent_prefill(model, long[:, :n], torch.tensor([n]), cache, one)
        step = partial(recurrent_step, model, long[:, -1], cache, one)
        stepping.append(seconds(step))
        reading.append(seconds(lambda n=n: model(long[:, :n])))
assert max(stepping) < 4 * min(stepping)
assert reading[-1] > 4 * reading[0] and reading[-1] > 4 * stepping[-1]

# %%
fig, axis = plt.subplots()
axis.loglog(lengths, [1e3 * s for s in reading], "o-", color=RED, label="read again")
axis.loglog(lengths, [1e3 * s for s in stepping], "o-", color=BLUE, label="one step")
axis.set(xlabel="tokens so far", ylabel="time to the next token (ms)")
axis.set_title("The time of a step does not depend on the length of the text")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Pitfalls
#
# - **$dt = 0$ is not a step of length zero.** softplus(0) is 0.69; padding wants
#   $-\infty$.
# - **The state is the one thing not to round.** Weights in bfloat16 cost a little at
#   every token; a state in bfloat16 costs more with every token.
# - **A slot that is not reset continues the text before.** Nothing looks wrong: the
#   shapes fit.
# - **A cache belongs to the weights it was made with.** On a GPU it holds copies.
# - **A padding lane is not a token.** It must touch no slot, not even with zeros.
# - **Bits differ between the scan and the step**, and between batch sizes. Compare
#   with a tolerance, or do not compare.
