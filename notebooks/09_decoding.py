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
# - find the floor under the time of a step, and the reason why launches are in the way;
# - build a product, a norm and a softmax whose rows do not depend on their neighbors;
# - decode from the open chunk of a sequence, so that every logit has the bits of a full
#   forward pass, on a GPU by kernels for single rows and on a CPU by windows.
#
# **You need** the loop of [notebook 02](02_naive_scan.ipynb), the chunks of
# [notebook 03](03_chunkwise_ssd.ipynb) and the block of
# [notebook 07](07_block_and_model.ipynb); for its kernels, Triton as in
# [notebook 05](05_triton_kernel.ipynb), and for exact decode notebook
# [06](06_rotary_fusion.ipynb).
#
# **It takes** about 30 seconds to run on two CPU cores, and about two hours to read
# with care.
#
# **Where its cells go**: the exported cells make `mamba3lite/models/decode.py`, which
# `mamba3lite generate` runs on, and `mamba3lite/models/batch_invariant.py`, what a
# batch-invariant model is made of.

# %% [markdown]
# ## The tools
# The kernels of this notebook are compiled on a GPU and interpreted elsewhere, which
# is decided before triton is imported. The models stay on the processor up to "The same
# numbers, and other bits".

# %%
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# %%
import json
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import matplotlib.pyplot as plt

from mamba3lite.models.ssd_complex import ssd_naive_complex
from mamba3lite.models.transformer import Mamba3Transformer

torch.set_num_threads(1)  # the tensors here are small: a second thread costs time
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
BLUE, RED = "#0072B2", "#D55E00"
plt.rcParams.update(
    {
        "figure.dpi": 55,
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
from dataclasses import dataclass, fields

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
#
# From here on the recurrence stands in two places, the scan and the step. Whoever gives
# the scan a new input rule and forgets the step gets a model that trains right and
# writes nonsense. So the fields of the configuration that a step knows are listed, a
# cache refuses any other that is set, and a test decodes with every value of each.


# %% tags=["export"]
# The fields of ModelConfig whose every value a step computes as the scan does.
DECODED_FIELDS = frozenset((
    "vocab_size", "d_model", "n_layers", "n_heads", "head_dim", "state_dim",
    "chunk_size", "ssd_dispatch", "ssd_precision", "ffn_dim", "max_seq_len",
    "weight_tying", "rms_norm_eps", "init_std", "grad_checkpoint", "batch_invariant",
    "a_init",
))  # fmt: skip


def _refuse_unknown_fields(cfg) -> None:
    """Raises: ValueError for a field that decoding knows nothing of, unless unused."""
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name not in DECODED_FIELDS and value != field.default:
            raise ValueError(
                f"{field.name} is {value!r}; decoding does not know this field, and "
                "its step may compute another recurrence than the scan: see notebook "
                '09, "A cache of constant size"'
            )


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
        captures: whether a CUDA graph can hold a step.

    Raises: ValueError: slots below 1, a dtype without products here, or a field of the
        config that is not among `DECODED_FIELDS`.

    Source: notebook 09, "A cache of constant size".
    """

    captures = True

    def __init__(
        self, model: nn.Module, slots: int, dtype: torch.dtype | None = None
    ) -> None:
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots is {slots!r}; it must be at least 1")
        _refuse_unknown_fields(model.cfg)
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
            from mamba3lite.models.batch_invariant import tiles_agree

            self._weights = _StepWeights.of(model, dtype)
            tiles_agree(weight.device)  # looks once: a captured step could not

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
            u, proj = layer._project(u)
            y, states[rows] = _recurrence(layer, proj, states[rows])
            u = layer._finish(u, y)
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
    _check_call(RecurrentCache, model, cache, tokens, slots, lengths)
    if not tokens.is_cuda:
        _check_lengths(lengths, slots, 0, tokens.shape[1])
    rows = _rows_of(slots, cache)
    counts = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
    u = model.embed(tokens)
    with _products_in(cache):
        for layer, states in zip(model.layers, cache._storage, strict=True):
            u, proj = layer._project(u)
            y, states[rows] = layer._ssd_with_dispatch(
                _still_where(~counts, proj, layer._columns),
                initial_states=states[rows],
                return_final_states=True,
            )
            u = layer._finish(u, y)
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


def _check_call(kind, model, cache, tokens, slots, lengths=None) -> None:
    """Refuse what does not fit; values are looked at on a CPU alone.

    Args: kind: class of the cache. lengths: of prompts, where tokens are (E, T).

    Raises: TypeError, ValueError, naming the argument.
    """
    if not isinstance(cache, kind):
        raise TypeError(f"cache is {type(cache).__name__}; wanted {kind.__name__}")
    cfg = model.cfg
    sizes = (cfg.n_layers, cfg.n_heads, cfg.head_dim, cfg.state_dim)
    held = (cache.states.shape[0], *cache.states.shape[2:5])
    if held != sizes:
        raise ValueError(
            f"the cache has layers, heads, channels and states {held}; the model has "
            f"{sizes}"
        )
    each = {"tokens": tokens, "slots": slots}
    each |= {} if lengths is None else {"lengths": lengths}
    for name, z in each.items():
        if z.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{name} is {z.dtype}; wanted integers")
    shapes, entries = [tuple(z.shape) for z in each.values()], tuple(tokens.shape[:1])
    if tokens.ndim != (1 if lengths is None else 2) or {*shapes[1:]} != {entries}:
        got = ", ".join(map("{} {}".format, each, shapes))
        wanted = "(E,)" if lengths is None else "(E, T)"
        raise ValueError(f"got shapes {got}; wanted tokens {wanted}, the others (E,)")
    if tokens.is_cuda or not tokens.numel():
        return  # reading them would wait for the device
    room = cache.states.shape[1]
    if slots.max() >= room:
        raise ValueError(f"slots holds {slots.max()}; the cache has 0 to {room - 1}")
    used = slots[slots >= 0]
    if len(used.unique()) != len(used):
        raise ValueError("slots holds a slot twice; every sequence has its own")
    for bad in (tokens.min(), tokens.max()):
        if not 0 <= bad < cfg.vocab_size:
            most = cfg.vocab_size - 1
            raise ValueError(f"tokens holds {bad}; the model knows 0 to {most}")


def _check_lengths(lengths, slots, least: int, most: int) -> None:
    """Refuse lengths out of range, but for rows that are left out."""
    bad = (slots >= 0) & ((lengths < least) | (lengths > most))
    if bad.any():
        raise ValueError(f"lengths holds {lengths[bad][0]}; wanted {least} to {most}")


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
# for the default model on an H200 (4.26 TB/s, the copy rate that
# `docs/benchmarks/h200-per-chunk.json` has measured):

# %%
weights, rate = 2 * 433_662_400, 4.26e12
batch = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128])
floor = (weights + 2 * batch * state_bytes) / rate * 1e3  # ms
assert 0.20 < floor[0] < 0.22 and 0.64 < floor[6] < 0.68
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
    no_gain: Float[Tensor, "d_model"]

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, dtype: torch.dtype) -> "_StepWeights":
        layers = [_LayerWeights.of(layer, dtype) for layer in model.layers]
        head = (model.lm_head.weight * model.norm_f.weight).to(dtype)
        return cls(layers, head, torch.ones_like(model.norm_f.weight))


def _has_step_kernels(cfg) -> bool:
    """Whether the kernels of a step take a model of these sizes."""
    sides = cfg.head_dim, cfg.state_dim
    widths = cfg.d_model, cfg.n_heads * cfg.head_dim, cfg.ffn_dim
    powers = all(side & (side - 1) == 0 for side in sides) and max(sides) <= 256
    fits = all(width % 16 == 0 and width <= 4096 for width in widths)
    return HAS_TRITON and powers and fits


# %% [markdown]
# ## A launch that does not wait
# Most of what a kernel reads are weights, which nobody writes: it could ask for them
# while the kernel before is still at work. Hopper has a way to say so, *programmatic
# dependent launch*. The later kernel starts early, asks for what depends on nobody, and
# waits in the middle of its code for the earlier one to end. Once all its programs are
# past that line, the next kernel may start. So what a kernel reads before the line must
# have been written at least two kernels before. (Both halves of the notebook use these
# cells; they go to `batch_invariant.py`.)

# %% tags=["export:batch_invariant"]
import functools

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from mamba3lite.models.row_kernels import _over_rows
from mamba3lite.models.ssd_complex import autocast_dtype
from mamba3lite.models.ssd_triton import HAS_TRITON, _interpreted

if HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    from mamba3lite.models.row_kernels import _gated, _normed, _swiglu_kernel

# %% tags=["export:batch_invariant"]
if HAS_TRITON:

    @triton.jit
    def _wait(EARLY: tl.constexpr):
        """Go on when the kernel before has ended, and let the next one start."""
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()

    @triton.jit
    def _ask_for(at):
        """Ask for the lines of these addresses, from memory into the second cache."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip

    @triton.jit
    def _ask_for_columns(ptr, width, columns: tl.constexpr, rows: tl.constexpr):
        """Ask for the first columns of some rows, `width` numbers apart."""
        line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth
        lines: tl.constexpr = triton.next_power_of_2((columns + line - 1) // line)
        column = tl.minimum(tl.arange(0, lines) * line, columns - 1)
        _ask_for(ptr + tl.arange(0, rows)[:, None] * width + column[None, :])

    @triton.jit
    def _fetch_rows(w_ptr, column, columns, K: tl.constexpr, EARLY: tl.constexpr):
        """Ask for rows of w before it is this kernel's turn: w is there already."""
        if EARLY:
            line: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
            lines: tl.constexpr = triton.next_power_of_2((K + line - 1) // line)
            k = tl.minimum(tl.arange(0, lines) * line, K - 1)
            row = tl.minimum(column, columns - 1).to(tl.int64)
            _ask_for(w_ptr + row[:, None] * K + k[None, :])


_LATE = {"EARLY": False}  # options of a kernel that starts when others have ended


def _early(z: Tensor) -> dict[str, bool]:
    """Options of a kernel of a step that may start early, where the device has that."""
    early = z.is_cuda and torch.cuda.get_device_capability(z.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if early else _LATE


# %% [markdown]
# ## A matrix times few vectors
# A program takes a few rows of the matrix, whole, into registers, and only then waits
# for the vector. A norm is a factor on the result, so it is computed on the side from
# the same numbers: $W \frac{v}{\mathrm{rms}(v)} = \frac{1}{\mathrm{rms}(v)} W v$. For
# the SwiGLU a program holds the same rows of both halves. The residual sum is in
# place.

# %% tags=["export"]
if HAS_TRITON:
    from mamba3lite.models.batch_invariant import _wait

    @triton.jit
    def _vectors_kernel(
        x_ptr, w_ptr, out_ptr, M, eps,
        K: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
        WHOLE: tl.constexpr, NORM: tl.constexpr, SWIGLU: tl.constexpr,
        ADD: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """out[e] = W x[e]; NORM: W x[e] / rms(x[e]); ADD: added to out.

        SWIGLU: silu(gate) up, with both halves in W. Grid (M / BLOCK_M): a program
        holds its rows of W in registers before it waits.
        """
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
        _wait(EARLY)
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
torch.manual_seed(4)
u, W = torch.randn(2, 24, device=device), torch.randn(2 * 11, 24, device=device)
unit, eps = F.rms_norm(u, (24,), eps=1e-5), 1e-5
common = {"K": 24, "E": 2, "BLOCK_M": 4, "BLOCK_K": 32, "WHOLE": False}
common |= {"EARLY": False}
out = torch.empty(2, 11, device=device)
_vectors_kernel[(3,)](u, W, out, 11, eps, **common, NORM=True, SWIGLU=True, ADD=False)
gate, up = (unit @ W.T).chunk(2, -1)
assert distance(out, F.silu(gate) * up) < 1e-5
stream = torch.ones(2, 22, device=device)
_vectors_kernel[(6,)](
    u, W, stream, 22, eps, **common, NORM=False, SWIGLU=False, ADD=True
)
assert distance(stream, 1 + u @ W.T) < 1e-5

# %% [markdown]
# ## A matrix times some vectors
# From three sequences on, the arithmetic of that kernel is in the way, and the matrix
# units do it. A tile of them has 16 rows at least; those that are not there are zero.
# The weights do not fit into registers with everything else, so a program asks for
# them to be brought nearer, from memory into the second cache, and waits then. The
# SwiGLU's two halves come from one product whose columns lie in turns, gate, up, gate,
# up, so that a tile holds both.
#
# The same kernels serve training and exact decode, further below; that is why they know
# tiles for thousands of rows, and why a sum over $k$ always runs from the first to the
# last.

# %% tags=["export:batch_invariant"]
if HAS_TRITON:

    @triton.jit
    def _products(
        x_ptr, w_ptr, row, rows, column, columns, K: tl.constexpr,
        BLOCK_K: tl.constexpr, EMULATE: tl.constexpr,
    ):  # fmt: skip
        """Rows of x times rows of w, float32, summed from the first k to the last."""
        k = tl.arange(0, BLOCK_K)
        x_ptr += row.to(tl.int64)[:, None] * K + k[None, :]
        w_ptr += column.to(tl.int64)[:, None] * K + k[None, :]
        x_here, w_here = (row < rows)[:, None], (column < columns)[:, None]
        acc = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
        for k0 in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                x = tl.load(x_ptr + k0, mask=x_here, other=0.0)
                w = tl.load(w_ptr + k0, mask=w_here, other=0.0)
            else:
                inside = (k0 + k < K)[None, :]
                x = tl.load(x_ptr + k0, mask=x_here & inside, other=0.0)
                w = tl.load(w_ptr + k0, mask=w_here & inside, other=0.0)
            if EMULATE:  # the interpreter multiplies bfloat16 wrongly
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc=acc, input_precision="ieee")
        return acc

    @triton.jit
    def _tile_of(rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        """Rows and columns of a program's tile; eight tiles of rows share columns."""
        program, across = tl.program_id(0), tl.cdiv(columns, BLOCK_N)
        group = program // (8 * across)
        size = tl.minimum(tl.cdiv(rows, BLOCK_M) - group * 8, 8)
        place = program % (8 * across)
        row = (group * 8 + place % size) * BLOCK_M + tl.arange(0, BLOCK_M)
        return row, place // size * BLOCK_N + tl.arange(0, BLOCK_N)

    @triton.jit(do_not_specialize=["rows"])
    def _row_linear_kernel(
        x_ptr, w_ptr, u_ptr, out_ptr, rows, columns, K: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        ADD: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """out = x w^T; ADD: u + x w^T, the product rounded to the dtype of x.

        One program a (BLOCK_M, BLOCK_N) tile.
        """
        row, column = _tile_of(rows, columns, BLOCK_M, BLOCK_N)
        _fetch_rows(w_ptr, column, columns, K, EARLY)
        _wait(EARLY)
        acc = _products(x_ptr, w_ptr, row, rows, column, columns, K, BLOCK_K, EMULATE)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        if ADD:
            acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)
            # Not a plain sum: the compiler would begin the product with u.
            acc = tl.fma(acc, 1.0, tl.load(u_ptr + at, mask=mask, other=0.0))
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["rows"])
    def _gate_up_kernel(
        v_ptr, w_ptr, out_ptr, rows, width, K: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        EMULATE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """silu(gate) up for [gate, up] = v w^T; a tile holds both halves, in turns."""
        kind = out_ptr.dtype.element_ty
        row, column = _tile_of(rows, 2 * width, BLOCK_M, BLOCK_N)
        source = column // 2 + column % 2 * width
        inside = tl.where(column < 2 * width, source, 2 * width)
        _fetch_rows(w_ptr, inside, 2 * width, K, EARLY)
        _wait(EARLY)
        acc = _products(v_ptr, w_ptr, row, rows, inside, 2 * width, K, BLOCK_K, EMULATE)
        acc = tl.reshape(acc.to(kind), (BLOCK_M, BLOCK_N // 2, 2))
        gate, up = tl.split(acc)
        out, _ = tl.split(tl.reshape(column, (BLOCK_N // 2, 2)))
        out = out // 2
        at = row.to(tl.int64)[:, None] * width + out[None, :]
        mask = (row < rows)[:, None] & (out < width)[None, :]
        tl.store(out_ptr + at, _gated(gate, up).to(kind), mask=mask)


# (BLOCK_M, BLOCK_N, BLOCK_K, warps, stages) by how many rows there are at most, for
# numbers of 2 and of 4 bytes. A sum over k is the same in every tile, which
# `tiles_agree` checks on each device.
_TILES = {
    2: {16: (16, 8, 256, 1, 4), 256: (64, 32, 128, 4, 4), None: (128, 128, 64, 8, 3)},
    4: {16: (16, 16, 32, 4, 5), 256: (32, 32, 32, 4, 4), None: (64, 64, 32, 8, 3)},
}


def _tile(rows: int, bytes_: int) -> tuple[int, ...]:
    """The tile for so many rows."""
    tiles = _TILES[bytes_]
    return next(tiles[most] for most in tiles if most is None or rows <= most)


def _tiling(tile: tuple[int, ...]) -> dict[str, int]:
    """Launch options of a tile."""
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    return dict(zip(names, tile, strict=True))


def _launch_linear(x, weight, out, u=None, tile=None, early=_LATE) -> Tensor:
    """out = x weight^T, plus u; rounded to the dtype of x unless out has another.

    early: from `_early`, in a step; else the kernel waits for the one before.

    Shapes: x (rows, K), weight (columns, K), out and u (rows, columns). Returns: out.
    """
    rows, K = x.shape
    columns = weight.shape[0]
    tile = tile or _checked_tile(rows, x)
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]),)
    with torch.cuda.device_of(x):
        _row_linear_kernel[grid](
            x, weight, out if u is None else u, out, rows, columns, K=K,
            ADD=u is not None, EMULATE=_interpreted(), **_tiling(tile),
            **early,
        )  # fmt: skip
    return out


def _launch_gate_up(x, weight, out, early=_LATE) -> Tensor:
    """out = silu(gate) up for [gate, up] = x weight^T, in the dtype of x.

    Shapes: x (rows, K), weight (2 width, K), out (rows, width). Returns: out.
    """
    (rows, K), columns = x.shape, len(weight)
    tile = _checked_tile(rows, x)
    grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]),)
    with torch.cuda.device_of(x):
        _gate_up_kernel[grid](
            x, weight, out, rows, columns // 2, K=K, EMULATE=_interpreted(),
            **_tiling(tile), **early,
        )  # fmt: skip
    return out


def _checked_tile(rows: int, x: Tensor) -> tuple[int, ...]:
    """A tile for so many rows, or the largest where tiles do not agree."""
    agree = not x.is_cuda or tiles_agree(x.device)
    return _tile(rows if agree else 2**31, x.element_size())


@functools.cache
def tiles_agree(device: torch.device) -> bool:
    """Whether a row of a product has the same bits in every tile, on this device."""
    g = torch.Generator(device).manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = (
            torch.randn(rows, 512, generator=g, device=device).to(dtype)
            for rows in (128, 192)
        )
        wanted, *others = (
            _launch_linear(
                x, weight, x.new_empty(128, 192, dtype=torch.float32), tile=t
            )
            for t in reversed(_TILES[x.element_size()].values())
        )
        if not all(torch.equal(wanted, other) for other in others):
            return False
    return True


# %% [markdown]
# The norm before a product is a kernel too, one program a row. Its arithmetic is that
# of notebook 07, as is the SwiGLU's.

# %% tags=["export:batch_invariant"]
if HAS_TRITON:

    @triton.jit
    def _row_norm_kernel(
        u_ptr, gain_ptr, out_ptr, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """out = u / sqrt(mean(u^2) + eps) * gain; one program a row."""
        _wait(EARLY)
        i = tl.arange(0, BLOCK)
        row = tl.program_id(0).to(tl.int64) * WIDTH
        u = tl.load(u_ptr + row + i, mask=i < WIDTH, other=0.0).to(tl.float32)
        gain = tl.load(gain_ptr + i, mask=i < WIDTH, other=0.0)
        out = _normed(u, gain, eps, WIDTH)
        tl.store(out_ptr + row + i, out.to(out_ptr.dtype.element_ty), mask=i < WIDTH)


def _block(width: int, most: int) -> int:
    """The power of two that holds a row, or the most."""
    return min(triton.next_power_of_2(width), most)


def _launch_rms_norm(u, gain, out, eps, early=_LATE) -> Tensor:
    """RMSNorm of each row of u into out, in the dtype of out. Returns: out."""
    width = u.shape[-1]
    with torch.cuda.device_of(u):
        _row_norm_kernel[(u.numel() // width,)](
            u, gain, out, eps, WIDTH=width, BLOCK=_block(width, 2**16), num_warps=4,
            **early,
        )  # fmt: skip
    return out


# %%
torch.manual_seed(5)
u, W = torch.randn(5, 32, device=device), torch.randn(2 * 24, 32, device=device)
unit = _launch_rms_norm(u, torch.ones(32, device=device), torch.empty_like(u), 1e-5)
assert distance(unit, F.rms_norm(u, (32,), eps=1e-5)) < 1e-6
gate, up = (unit @ W.T).chunk(2, -1)
out = _launch_gate_up(unit, W, torch.empty(5, 24, device=device))
assert distance(out, F.silu(gate) * up) < 1e-5
stream = torch.ones(5, 48, device=device)
_launch_linear(u, W, stream, stream)
assert distance(stream, 1 + u @ W.T) < 1e-5

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
        EARLY: tl.constexpr, EMULATE: tl.constexpr,
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
        _wait(EARLY)
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
_state_kernel[(3 * H * 2,)](
    proj.to(device), rates, picked.to(device), after.view(torch.int64), y, H,
    proj.shape[-1], D=D, N=N, BLOCK_D=8, EARLY=False, EMULATE=_interpreted(),
)  # fmt: skip
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
from mamba3lite.models.batch_invariant import (
    _early,
    _launch_gate_up,
    _launch_linear,
    _launch_rms_norm,
)

# Rows of a matrix that a program of `_vectors_kernel` takes, and its warps.
_STEP_VECTORS = {
    "in_proj": (16, 4), "out_proj": (4, 1), "gate_up": (8, 8), "down": (4, 4),
    "head": (16, 4),
}  # fmt: skip
_VECTORS_UP_TO = 2  # sequences; more go through `_launch_linear`
_STATE_CHANNELS, _STATE_WARPS = 16, 4  # of a program of `_state_kernel`


class _StepProducts:
    """Products of a step, and the stream u (E, d_model), float32, that they change."""

    def __init__(self, u: Tensor, weights: _StepWeights, eps: float) -> None:
        self.u, self.weights, self.eps = u, weights, eps
        self.few, self.early = len(u) <= _VECTORS_UP_TO, _early(u)

    def of_stream(self, w: Tensor, name: str, out: Tensor, swiglu=False) -> Tensor:
        """out = W u / rms(u), or the SwiGLU of that. Returns: out."""
        if self.few:
            return self._by_vectors(self.u, w, name, out, norm=True, swiglu=swiglu)
        v = torch.empty_like(self.u, dtype=w.dtype)
        _launch_rms_norm(self.u, self.weights.no_gain, v, self.eps, self.early)
        launch = _launch_gate_up if swiglu else _launch_linear
        return launch(v, w, out, early=self.early)

    def add(self, x: Tensor, w: Tensor, name: str) -> None:
        """u += W x"""
        if self.few:
            self._by_vectors(x, w, name, self.u, add=True)
        else:
            _launch_linear(x, w, self.u, self.u, early=self.early)

    def _by_vectors(self, x, w, name, out, norm=False, swiglu=False, add=False):
        """Each number a sum in registers."""
        M, (E, K) = out.shape[1], x.shape
        rows, warps = _STEP_VECTORS[name]
        BLOCK_K = triton.next_power_of_2(K)
        _vectors_kernel[(triton.cdiv(M, rows),)](
            x, w, out, M, self.eps, K=K, E=E, BLOCK_M=rows, BLOCK_K=BLOCK_K,
            WHOLE=M % rows == 0 and K == BLOCK_K, NORM=norm, SWIGLU=swiglu, ADD=add,
            num_warps=warps, **self.early,
        )  # fmt: skip
        return out


def _step_by_kernels(model, tokens, cache, slots):
    """One step of every layer in kernels; logits (E, V)."""
    cfg, weights, E = model.cfg, cache._weights, len(tokens)
    H, D, N = cfg.n_heads, cfg.head_dim, cfg.state_dim
    u = F.embedding(tokens, model.embed.weight).float()
    products = _StepProducts(u, weights, cfg.rms_norm_eps)
    proj = u.new_empty(E, H * (D + 4 * N + 1), dtype=cache.dtype)
    y = u.new_empty(E, H * D, dtype=cache.dtype)
    inner = u.new_empty(E, cfg.ffn_dim, dtype=cache.dtype)
    words = cache._storage.view(torch.int64)
    block_d = min(_STATE_CHANNELS, D)
    for layer, states in zip(weights.layers, words, strict=True):
        products.of_stream(layer.in_proj, "in_proj", proj)
        _state_kernel[(E * H * (D // block_d),)](
            proj, layer.A, slots, states, y, H, proj.shape[1], D=D, N=N,
            BLOCK_D=block_d, EMULATE=_interpreted(), num_warps=_STATE_WARPS,
            **products.early,
        )  # fmt: skip
        products.add(y, layer.out_proj, "out_proj")
        products.of_stream(layer.gate_up, "gate_up", inner, swiglu=True)
        products.add(inner, layer.down, "down")
    return products.of_stream(weights.head, "head", u.new_empty(E, cfg.vocab_size))


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
    _check_call(RecurrentCache, model, cache, tokens, slots)
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
# ## Latency on a GPU
# *Measured* on an H200 with the default model in bfloat16, in a CUDA graph
# (`docs/benchmarks/h200-decode.json`). Much of the distance to the floor is the start
# and the end of kernels *[INFERENCE]*: a step has 142 launches for one or two
# sequences, and 199 for more, where norms are kernels of their own. The curve *exact*
# is the mode that the rest of this notebook makes.

# %%
folders = (path / "docs/benchmarks" for path in (Path.cwd(), *Path.cwd().parents))
folder = next(path for path in folders if (path / "h200-decode.json").exists())
rows = json.loads((folder / "h200-decode.json").read_text())["decode"]
of = {mode: [row for row in rows if row["mode"] == mode]
      for mode in ("recurrent", "exact")}  # fmt: skip
side = [row["batch"] for row in of["recurrent"]]
took = {mode: [row["step_ms"]["median"] for row in of[mode]] for mode in of}
assert took["recurrent"][0] < 1 / 1.6 and took["recurrent"][-1] < 64 / 40
assert all(e < 2.5 * r for r, e in zip(*took.values(), strict=True))

fig, axis = plt.subplots()
axis.plot(side, took["exact"], "o-", color=BLUE, label="exact")
axis.plot(side, took["recurrent"], "o-", color=ORANGE, label="recurrent")
axis.plot(side, [row["floor_ms"] for row in of["recurrent"]], "--", color=BLACK,
          label="floor of recurrent")  # fmt: skip
axis.set(xscale="log", xlabel="sequences side by side", ylabel="a step (ms)", ylim=0)
axis.set_xticks(side, [str(n) for n in side])
axis.minorticks_off()
axis.set_title("64 sequences take two to three times as long as one")
axis.legend(frameon=False, loc="upper left")
plt.show()

# %% [markdown]
# The rest of this notebook is about bits.

# %% [markdown]
# ## The same numbers, and other bits
# A model writes a text. Afterwards the text is read again, in one forward pass, and the
# probability of each of its tokens is computed a second time. Is it the same number?
# Reinforcement learning divides the one by the other; where the quotient should be 1,
# rounding must not decide. And whoever serves several users would like the answer to
# one of them not to depend on who else is there.
#
# A small model, decoded by its recurrence, against its own full forward: which of the
# logits are the same in every bit?


# %%
def tiny_model(**changes):
    """A model whose every position matters; the same weights at each call."""
    torch.manual_seed(0)
    fields = dict(vocab_size=61, d_model=32, n_layers=2, n_heads=2, head_dim=16)
    fields |= dict(state_dim=16, chunk_size=16, ffn_dim=48, init_std=0.3)
    fields |= dict(a_init="spectrum") | changes
    return Mamba3Transformer(fields).requires_grad_(False).to(device)


model = tiny_model()
torch.manual_seed(1)
tokens = torch.randint(61, (1, 64), device=device)
full = model(tokens)[0]
states, steps = None, []
for token in tokens.T:
    logits, states = model(token[None], states=states, return_states=True)
    steps.append(logits[0, 0])
steps = torch.stack(steps)
assert (steps - full).norm() < 1e-5 * full.norm(), "equal to rounding"
ulps = steps.view(torch.int32).int() - full.view(torch.int32).int()
differ = (ulps != 0).any(1)
print(f"{differ.sum()} of {len(differ)} rows differ in some bit")
assert differ.float().mean() > 0.9

# %%
fig, axis = plt.subplots(figsize=(7.2, 2.6))
shown = ulps.abs().clamp(max=64).float().cpu().T
image = axis.imshow(shown, aspect="auto", cmap="cividis", interpolation="nearest")
axis.set(xlabel="token (position)", ylabel="logit (index)")
axis.set_title("Recurrent decode: hardly a logit has the bits of the full forward")
fig.colorbar(image, label="distance in float32 numbers\n(64: at least so many)")
plt.show()

# %% [markdown]
# The formula is the same, and no step of it is wrong. But a sum in floating point
# depends on its order, and the scan adds in another order than the loop; the products
# around it do too, because a library picks another kernel for one row than for sixty.

# %%
one, big = torch.tensor(1.0), torch.tensor(2.0**24)
assert (big + one) + one == big and big + (one + one) == big + 2

# %% [markdown]
# There are three places to repair. Every layer must compute a row in one way, however
# many rows there are: that is the first half of what follows. The scan must always take
# the same of its two ways. And decoding must not switch to the recurrence: it has to
# repeat, for its one row, what the scan did.
#
# ## Rows that do not see their neighbors
# On a GPU the tools are kernels of our own. On a CPU the matrix library is not ours;
# "On a CPU", further below, shows what to do there.

# %% [markdown]
# ### One product
# A number of $x W^\top$ is a sum over $k$. What decides its bits is the order of that
# sum, nothing else: not which rows lie in the same tile, nor how wide the tile is. So
# `_products` of above takes $k$ in steps from the first to the last, whatever the
# shape, and never splits it over programs, the usual trick where there are few rows.
# Then a tile of 16 rows for decoding and one of 128 for training agree, provided the
# matrix unit itself adds alike in both. On an H200 it does; `tiles_agree` looks on each
# device, and where it does not, decoding takes the large tile.
#
# float32 operands are multiplied as they are (`"ieee"`), whatever PyTorch has been told
# about TF32.

# %%
x, weight = torch.randn(40, 48, device=device), torch.randn(24, 48, device=device)
product = _launch_linear(x, weight, x.new_empty(40, 24))
assert (product - x @ weight.T).abs().max() < 1e-4
for tile in _TILES[4].values():
    again = _launch_linear(x, weight, x.new_empty(40, 24), tile=tile)
    assert (again - product).abs().max() < 1e-5  # on a GPU: the same bits
if device.type == "cuda":
    assert tiles_agree(device)

# %% [markdown]
# ### Its operator
# The forward is promised, bit for bit; the backward is two ordinary products.


# %% tags=["export:batch_invariant"]
@torch.library.custom_op(
    "mamba3lite::row_linear",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, bool in_float32) -> Tensor",
)
def _linear(x, weight, in_float32):
    """x weight^T in the dtype of x, or as summed."""
    dtype = torch.float32 if in_float32 else x.dtype
    out = x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    _launch_linear(rows, weight.contiguous(), out.view(-1, len(weight)))
    return out


@_linear.register_fake
def _fake_linear(x, weight, in_float32):
    dtype = torch.float32 if in_float32 else x.dtype
    return x.new_empty(*x.shape[:-1], len(weight), dtype=dtype)


def _save_linear(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])


def _differentiate_linear(ctx, dout):
    x, weight = ctx.saved_tensors
    dout = dout.to(x.dtype)
    flat = dout.flatten(0, -2)
    return dout @ weight, flat.T @ x.flatten(0, -2), None


_linear.register_autograd(_differentiate_linear, setup_context=_save_linear)


def _working_dtype(device: torch.device) -> torch.dtype:
    """What products multiply: the dtype of autocast where it is on, else float32."""
    return autocast_dtype(device.type) or torch.float32


def linear(
    x: Float[Tensor, "*rows K"], weight: Float[Tensor, "columns K"], *,
    in_float32: bool = False,
) -> Float[Tensor, "*rows columns"]:  # fmt: skip
    """x weight^T; a row of it depends on that row of x alone, in every bit.

    Operands are rounded to the dtype of autocast where it is on; else they are float32,
    and so are the products ("ieee"). Sums are float32.

    Args: in_float32: return the sums, not rounded.

    Source: notebook 09, "One product".
    """
    dtype = _working_dtype(x.device)
    return _linear(x.to(dtype), weight.to(dtype), in_float32)


# %% [markdown]
# ### Sums over a row
# RMSNorm and the softmax add up a row. One program takes one row, in blocks that depend
# neither on how many rows there are nor on where a row starts. The norm is the kernel
# of above. SwiGLU adds nothing up, but its exponential must be the same one everywhere:
# the kernels of training and decoding call one device function.

# %% tags=["export:batch_invariant"]
if HAS_TRITON:

    @triton.jit(do_not_specialize=["width"])
    def _row_log_softmax_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
        """out = x - log(sum(exp(x))); one program a row, in blocks of always BLOCK.

        Compiled once for all widths: rows that start on a boundary would be read in
        larger pieces, and a thread would add up other numbers.
        """
        i = tl.arange(0, BLOCK)
        row = tl.program_id(0).to(tl.int64) * width
        most = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + row + start + i, mask=start + i < width,
                        other=float("-inf"))  # fmt: skip
            most = tl.maximum(most, x)
        top = tl.max(most, 0)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            x = tl.load(x_ptr + row + start + i, mask=start + i < width,
                        other=float("-inf"))  # fmt: skip
            total += tl.exp(x - top)
        norm = tl.log(tl.sum(total, 0))
        for start in range(0, width, BLOCK):
            here = start + i < width
            x = tl.load(x_ptr + row + start + i, mask=here, other=0.0)
            tl.store(out_ptr + row + start + i, x - top - norm, mask=here)


def _launch_log_softmax(logits, out) -> Tensor:
    """log_softmax of each row into out, which may be logits. Returns: out."""
    width = logits.shape[-1]
    with torch.cuda.device_of(logits):
        _row_log_softmax_kernel[(logits.numel() // width,)](
            logits, out, width, BLOCK=2048, num_warps=8
        )
    return out


# %% [markdown]
# ### Their operators


# %% tags=["export:batch_invariant"]
@torch.library.custom_op(
    "mamba3lite::row_rms_norm",
    mutates_args=(),
    schema="(Tensor u, Tensor gain, float eps, ScalarType dtype) -> Tensor",
)
def _rms_norm(u, gain, eps, dtype):
    """RMSNorm of each row, in dtype."""
    u = u.contiguous()
    return _launch_rms_norm(u, gain, torch.empty_like(u, dtype=dtype), eps)


@_rms_norm.register_fake
def _fake_rms_norm(u, gain, eps, dtype):
    return u.new_empty(u.shape, dtype=dtype)


def _save_rms_norm(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def _differentiate_rms_norm(ctx, dout):
    u, gain = ctx.saved_tensors
    dout, u_ = dout.float(), u.float()
    scale = torch.rsqrt(u_.square().mean(-1, keepdim=True) + ctx.eps)
    unit = u_ * scale
    dunit = dout * gain
    du = (dunit - unit * (dunit * unit).mean(-1, keepdim=True)) * scale
    return du.to(u.dtype), (dout * unit).flatten(0, -2).sum(0), None, None


_rms_norm.register_autograd(_differentiate_rms_norm, setup_context=_save_rms_norm)


@torch.library.custom_op(
    "mamba3lite::row_swiglu", mutates_args=(), schema="(Tensor both) -> Tensor"
)
def _swiglu(both):
    """silu(gate) up for each row of both."""
    both = both.contiguous()
    out = both.new_empty(*both.shape[:-1], both.shape[-1] // 2)
    _over_rows(_swiglu_kernel, out.shape[-1], both, out)
    return out


@_swiglu.register_fake
def _fake_swiglu(both):
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


def _save_swiglu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _differentiate_swiglu(ctx, dout):
    (both,) = ctx.saved_tensors
    gate, up = both.chunk(2, -1)
    dgate = torch.ops.aten.silu_backward(dout * up, gate)
    return torch.cat([dgate, dout * nn.functional.silu(gate)], -1)


_swiglu.register_autograd(_differentiate_swiglu, setup_context=_save_swiglu)


def swiglu(both: Float[Tensor, "*rows two_f"]) -> Float[Tensor, "*rows f"]:
    """silu(gate) up for both = [gate, up].

    Source: notebook 09, "Sums over a row".
    """
    return _swiglu(both)


def norm(u: Float[Tensor, "*rows d"], module: nn.RMSNorm) -> Float[Tensor, "*rows d"]:
    """RMSNorm of each row by a program of its own, in the dtype that products read.

    Args: module: whose gain and epsilon are used.

    Source: notebook 09, "Sums over a row".
    """
    return _rms_norm(u, module.weight, module.eps, _working_dtype(u.device))


def add_norm(
    u: Float[Tensor, "*rows d"],
    branch: Float[Tensor, "*rows d"] | None,
    module: nn.RMSNorm,
) -> tuple[Float[Tensor, "*rows d"], Float[Tensor, "*rows d"]]:
    """The stream with a branch added to it, and `norm` of that.

    Source: notebook 09, "Sums over a row".
    """
    total = u if branch is None else u + branch
    return total, norm(total, module)


# %% [markdown]
# ### Log-probabilities
# Sampling and training meet here: both read the log-probability of a token from this
# function, and so does the loss of a batch-invariant model. On a CPU, rows are taken 16
# at a time, because PyTorch treats the last few of a number that is no multiple of the
# vector length in another way.

# %% tags=["export:batch_invariant"]
_ROWS_AT_ONCE = 16  # on a CPU, where the bits of a row depend on how many there are


@torch.library.custom_op(
    "mamba3lite::row_log_softmax", mutates_args=(), schema="(Tensor logits) -> Tensor"
)
def _log_softmax(logits):
    """log_softmax of each row of (rows, V) float32."""
    if HAS_TRITON and logits.is_cuda:
        logits = logits.contiguous()
        return _launch_log_softmax(logits, torch.empty_like(logits))
    rows = len(logits)
    blocks = torch.nn.functional.pad(logits, (0, 0, 0, -rows % _ROWS_AT_ONCE))
    done = [block.log_softmax(-1) for block in blocks.split(_ROWS_AT_ONCE)]
    return torch.cat(done)[:rows].contiguous()


@_log_softmax.register_fake
def _fake_log_softmax(logits):
    return torch.empty_like(logits)


def _save_log_softmax(ctx, inputs, output):
    ctx.save_for_backward(output)


def _differentiate_log_softmax(ctx, dout):
    (log_p,) = ctx.saved_tensors
    return dout - log_p.exp() * dout.sum(-1, keepdim=True)


_log_softmax.register_autograd(
    _differentiate_log_softmax, setup_context=_save_log_softmax
)


def log_softmax(logits: Float[Tensor, "*rows V"]) -> Float[Tensor, "*rows V"]:
    """log_softmax over the last axis, float32; a row depends on that row alone.

    Source: notebook 09, "Log-probabilities".
    """
    flat = logits.float().reshape(-1, logits.shape[-1])
    return _log_softmax(flat).view(logits.shape)


def token_log_probs(
    logits: Float[Tensor, "*rows V"], tokens: Int[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Log-probability of one token a row, float32.

    The logits of a decoded step and those of a full forward give the same bits, and so
    does the loss, which uses the same function.

    Args: tokens: ids in [0, V).

    Source: notebook 09, "Log-probabilities".
    """
    return log_softmax(logits).gather(-1, tokens.long().unsqueeze(-1)).squeeze(-1)


# %%
logits = 5 * torch.randn(37, 61, device=device)
log_p = log_softmax(logits)
assert (log_p.double() - logits.double().log_softmax(-1)).abs().max() < 1e-5
assert torch.equal(log_softmax(logits[20:23]), log_p[20:23])

# %% [markdown]
# ### The scan, one way only
# The fused scan of notebook 06 walks through the chunks when there are many sequences
# and heads, and computes all chunks at once when there are few. Both are right, and
# they round differently: one carries the state in registers, the other puts what a
# chunk adds into memory first. A batch-invariant model always takes the second
# (`walk=False`), which also fills the device when a single long sequence is read.

# %%
from mamba3lite.models.ssd_fused import ssd_fused

torch.manual_seed(2)
A = torch.complex(-torch.rand(2), torch.randn(2)).to(device)
proj = torch.randn(1, 48, 2 * (16 + 4 * 16 + 1), device=device)
sizes = dict(n_heads=2, head_dim=16, state_dim=16, chunk_size=16, precision="bf16")
walked, at_once = (ssd_fused(proj, A, **sizes, walk=walk) for walk in (True, False))
assert (walked - at_once).norm() < 1e-2 * at_once.norm()
rows = (walked != at_once).flatten(2).any(2)[0]
print(f"{rows.sum()} of {len(rows)} rows differ between the two ways")
assert rows[32:].all(), "of the third chunk, the first whose state both had to add up"

# %% [markdown]
# ## Exact decode
# The output of a token needs two things: the state at the last chunk boundary, and the
# tokens since. The scan never looks further, so neither need decoding:
# $$y_l = \underbrace{e^{U_l}\, q_l\, G}_{\text{the past, as one state}} +
# \sum_{s \le l} \underbrace{q_l \cdot k_s\, e^{U_l - U_s}\, x_s}_{\text{the open
# chunk}} .$$
# A slot therefore keeps $G$ at the last boundary, not after the last token, and the raw
# $x$, $B$ and dt of the open chunk. A step writes its token into the chunk, computes
# the one row $l$ in a tile of 16 rows whose others are zero, and only when the chunk is
# full carries the state over it, by the expressions of training.

# %%
C, at, total = 16, 37, 48
start = at // C * C
kinds = ["state" if t < start else "open" if t <= at else "none" for t in range(total)]
assert kinds.count("open") == at - start + 1 <= C
fig, axis = plt.subplots(figsize=(7.6, 1.7))
fills = {"state": SKY, "open": ORANGE, "none": "#EEEEEE"}
for t, kind in enumerate(kinds):
    axis.barh(0, 0.9, left=t, color=RED if t == at else fills[kind])
for edge in range(0, total + 1, C):
    axis.axvline(edge - 0.05, color=BLACK, lw=1.2)
axis.text(start / 2, 0.6, "only their state G is kept", ha="center")
axis.text(start + 0.5, 0.6, "open chunk")
axis.set(xlim=(0, total), ylim=(-0.5, 0.9), yticks=[], xlabel="token (position)")
axis.spines["left"].set_visible(False)
axis.set_title("What the red token reads, with chunks of 16")
plt.show()

# %% [markdown]
# ### What a slot keeps
# `open` holds the columns of `in_proj` as they came, all but those of C, which only the
# current token needs. In float32 that and the state are 36.8 MB for the default model,
# 25.7 MB with a chunk in bfloat16, after a thousand tokens or a million.
#
# On a CPU, and wherever the kernels cannot run, the chunk is kept as tokens.

# %% tags=["export"]
import warnings
from collections import Counter
import functools

from mamba3lite.models import batch_invariant
from mamba3lite.models.batch_invariant import (
    _LATE,
    _block,
    _checked_tile,
    _tiling,
    _working_dtype,
)

if HAS_TRITON:
    from mamba3lite.models.batch_invariant import (
        _ask_for_columns,
        _fetch_rows,
        _products,
        _tile_of,
    )
    from mamba3lite.models.ssd_fused import (
        _chunk_sum,
        _dot,
        _from_entry,
        _load_edge,
        _load_pair,
        _operand,
        _operands,
        _passed_on,
        _read_gates,
        _span,
        _store_edge,
        _store_gates,
        _turned,
    )

ROW_BLOCK_SIZE_M = 16  # height of the tile that holds the one row of a step

# How often each part of exact decode was launched, by name; "training kernels" counts
# the steps of layers that had to do without the row kernels.
launches: Counter[str] = Counter()


class ExactCache:
    """What exact decode keeps of the sequences in `slots` slots.

    For each layer and slot, the float32 state at the last completed chunk boundary,
    and the open chunk. Where the row kernels run (`ssd_dispatch="fused"`) that is x, B
    and dt of its tokens, as the projection gave them; elsewhere it is the tokens, which
    are replayed. The memory does not depend on how long a sequence is.

    Args:
        model: a `Mamba3Transformer` with batch_invariant. Autocast decides, here and in
            each later call alike, whether the chunk is kept in bfloat16 or float32.
        slots: how many sequences at most.

    Attributes:
        config: from `row_kernel_configs`; None where a step scans the open chunk with
            the training kernels, or replays a window.

    Raises: ValueError: the model is not batch-invariant, slots below 1, or, where the
        row kernels run, a field of the config that is not among `DECODED_FIELDS`.

    Source: notebook 09, "What a slot keeps".
    """

    def __init__(self, model: nn.Module, slots: int) -> None:
        cfg = model.cfg
        if not cfg.batch_invariant:
            raise ValueError(
                "ExactCache: the model has batch_invariant=False; its full forward "
                "depends on the batch. Set batch_invariant: true"
            )
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"ExactCache: slots is {slots!r}; wanted at least 1")
        device = model.embed.weight.device
        self.slots, self.by_rows = slots, model.by_rows()
        self.chunk = model.chunk()
        if self.by_rows:  # a replayed window is the model's own forward
            _refuse_unknown_fields(cfg)
        H, D, N = cfg.n_heads, cfg.head_dim, cfg.state_dim
        self.dtype = _working_dtype(device)
        self.states = torch.zeros(
            cfg.n_layers, slots, H, D, N, dtype=torch.complex64, device=device
        )
        self.cursor = torch.zeros(slots, dtype=torch.int32, device=device)
        shape = (slots, self.chunk)
        kind = {"dtype": torch.int64, "device": device}
        if self.by_rows:  # columns x, Re B, Im B and dt
            shape = (cfg.n_layers, *shape, H * (D + 2 * N + 1))
            kind["dtype"] = self.dtype
        self.open = torch.zeros(shape, **kind)
        self.config = None
        if self.by_rows:
            self.config = row_kernel_configs(
                self.open, self.chunk, head_dim=D, state_dim=N,
                precision=cfg.ssd_precision,
            )  # fmt: skip
        self._weights: dict[int, tuple[tuple, Tensor]] = {}

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold a step."""
        return self.config is not None

    @property
    def nbytes_per_slot(self) -> int:
        """Bytes of a slot, over all layers."""
        held = (self.states, self.cursor, self.open)
        return sum(z.numel() * z.element_size() for z in held) // self.slots

    def reset(self, slots: Int[Tensor, "E"]) -> None:
        """Empty these slots: the next token is the first of a sequence."""
        slots = slots[slots >= 0].long()
        self.states[:, slots] = 0
        self.cursor[slots] = 0

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """A parameter in the dtype that products read, copied when it has changed."""
        if parameter.dtype == self.dtype:
            return parameter.detach()
        # What was made in inference mode does not count its changes.
        counted = not parameter.is_inference()
        version = (parameter._version if counted else 0, parameter.data_ptr())
        held = self._weights.get(id(parameter))
        if held is None:
            copy = parameter.detach().to(self.dtype)
        elif held[0] == version:
            return held[1]
        else:  # in place: a captured graph reads the copy
            copy = held[1].copy_(parameter.detach())
        self._weights[id(parameter)] = (version, copy)
        return copy


def _check_states(states: Tensor) -> None:
    """Refuse boundary states that are not float32."""
    if states.dtype not in (torch.float32, torch.complex64):
        raise TypeError(
            f"boundary states are {states.dtype}; wanted complex64 (or float32 pairs, "
            "for row kernels): another precision changes every later chunk"
        )


# %%
layers, H, D, N, Q = 28, 16, 64, 64, 64
state, row = H * D * N * 8, H * (D + 2 * N + 1)
slot = {
    kind: layers * (state + Q * row * size) for kind, size in (("f32", 4), ("bf16", 2))
}
assert round(slot["f32"] / 1e6, 1) == 36.8 and round(slot["bf16"] / 1e6, 1) == 25.7
assert round(layers * state / 1e6, 1) == 14.7, "what the recurrence keeps"

# %% [markdown]
# ### What a row shares with a chunk
# From notebook 06: within a chunk $U_t$ is the sum of the log decays up to $t$ and
# $V_t$ that of the phases, together the *gates*. $q$ and $k$ are $C$ and $B$ *turned*
# back by $V$, so that scores are real products. $G$ is the state that enters the chunk.
#
# The products of notebook 06's `_output_kernel`, one by one, made of the same device
# functions in the same order. The kernel itself keeps them in its body: taken out of
# it they are the same instructions, but the compiler puts them into another order.
#
# One trap is hidden in where a number comes from. A tile of 64 rows and more goes to
# all four matrix units of a Hopper processor at once, and in tf32 they take $k$ eight
# at a time, in order. A tile of 16 rows goes to one of them; and if the compiler sees
# that its numbers came from memory in 16 bits, it hands them out in pairs, so that the
# unit adds the even $k$ first and then the odd ones: another order, other bits.
# `_whole` hides from it where they came from.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _exp_where(seen, span):
        """exp(span) where a step is seen, else 0."""
        # Select before exp: in the future the exponent is positive and overflows.
        return tl.exp(tl.where(seen, span, float("-inf")))

    @triton.jit
    def _whole(z, WHOLE: tl.constexpr):
        """z in float32; WHOLE: as if memory had held that."""
        z = z.to(tl.float32)
        if WHOLE:
            z = tl.inline_asm_elementwise(
                "mov.f32 $0, $1;", "=f,f", [z],
                dtype=tl.float32, is_pure=False, pack=1,
            )  # fmt: skip
        return z

    @triton.jit
    def _keys(
        B_re, B_im, cos, sin,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Both halves of k, turned back by V; of q for C and its conjugate."""
        B_re, B_im = _whole(B_re, WHOLE), _whole(B_im, WHOLE)
        return _turned(B_re, B_im, cos, -sin, PRECISION, EMULATE)

    @triton.jit
    def _scores(q_re, q_im, k_re, k_im, M, PRECISION: tl.constexpr):
        """M + q k^T for tiles of both halves."""
        M = _dot(q_re, tl.trans(k_re), M, PRECISION)
        return _dot(q_im, tl.trans(k_im), M, PRECISION)

    @triton.jit
    def _from_state(q_re, q_im, G_re, G_im, Y, PRECISION: tl.constexpr):
        """Y + q G for tiles of both halves."""
        return _dot(q_im, G_im, _dot(q_re, G_re, Y, PRECISION), PRECISION)

    @triton.jit
    def _from_tokens(
        M, decay, x, Y, entry,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr, WHOLE: tl.constexpr,
    ):  # fmt: skip
        """Y e^U + (M decay) x: the outputs."""
        x = _operand(_whole(x, WHOLE), PRECISION, EMULATE)
        P = _operand(M * decay, PRECISION, EMULATE)
        return _dot(P, x, Y * entry[:, None], PRECISION)


# %% [markdown]
# ### Scores of one row
# The gates first, by the very function that the training kernel calls, over the whole
# chunk: cumulative sums depend on the shape of the tile and on the number of warps, so
# both are those of training. Then the row $q_l k_s^\top$, in the blocks of training.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _bmm_row_kernel(
        C_ptr, open_ptr, A_ptr, gates_ptr, cb_ptr, slots_ptr, target_ptr, start_ptr,
        H, W, D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr, WHOLE: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """Gates of the open chunk, and one row of scores q k^T.

        Grid (E H). Tokens after the row count as if they were not there; the row is the
        first of a tile whose others are zero.
        """
        program = tl.program_id(0)
        e, h = program // H, program % H
        start = tl.maximum(tl.load(start_ptr + e), 0)
        if EARLY:
            B_ptr = open_ptr + start.to(tl.int64) * W + H * D + h * N
            _ask_for_columns(B_ptr, W, N, BLOCK_C)
            _ask_for_columns(B_ptr + H * N, W, N, BLOCK_C)
        _wait(EARLY)
        if tl.load(slots_ptr + e) >= 0:
            target = tl.load(target_ptr + e)
            open_ptr += start.to(tl.int64) * W
            gates = gates_ptr + program.to(tl.int64) * 5 * BLOCK_C
            step, lane = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
            here, one = step <= target, (lane == 0)[:, None]
            _store_gates(
                open_ptr + H * (D + 2 * N) + h, A_ptr + 2 * h, A_ptr, gates, step,
                here, W, BLOCK_C, False, EMULATE,
            )  # fmt: skip
            cos, sin, _, _, _ = _read_gates(gates, step, BLOCK_C, False)
            cos_row, sin_row, _, _, _ = _read_gates(
                gates, target + 0 * lane, BLOCK_C, False
            )
            M = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
            for n0 in tl.static_range(0, N, BLOCK_N):
                n = h * N + n0 + tl.arange(0, BLOCK_N)[None, :]
                B_re, B_im = _load_pair(
                    open_ptr + H * D, H * N, step[:, None] * W + n, here[:, None]
                )
                C_re, C_im = _load_pair(
                    C_ptr + e.to(tl.int64) * 2 * H * N,
                    H * N,
                    0 * lane[:, None] + n,
                    one,
                )
                k_re, k_im = _keys(B_re, B_im, cos, sin, PRECISION, EMULATE, WHOLE)
                q_re, q_im = _keys(
                    C_re, -C_im, cos_row, sin_row, PRECISION, EMULATE, WHOLE
                )
                M = _scores(q_re, q_im, k_re, k_im, M, PRECISION)
            at = program.to(tl.int64) * BLOCK_C + 0 * lane[:, None] + step[None, :]
            tl.store(cb_ptr + at, M, mask=one & (step[None, :] >= 0))


# %% [markdown]
# ### Outputs of one row
# Every line below has its twin in the output kernel of notebook 06, in the same order:
# `_keys` turns as its `_turned` does, `_from_state` reads the state, `_from_tokens`
# adds what the chunk brings.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit
    def _as_kept(re, im, PRECISION: tl.constexpr):
        """A state as training keeps it between its kernels."""
        if PRECISION == "bf16":
            re, im = re.to(tl.bfloat16), im.to(tl.bfloat16)
        return re.to(tl.float32), im.to(tl.float32)

    @triton.jit
    def _chunk_scan_row_kernel(
        cb_ptr, open_ptr, gates_ptr, C_ptr, out_ptr, slots_ptr, target_ptr, start_ptr,
        states_ptr, H, W, D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr, WHOLE: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """y of one row: from the tokens of the open chunk and the state before it.

        Grid (E H); 0 for a padding lane.
        """
        program = tl.program_id(0)
        e, h = program // H, program % H
        step, lane = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_M)
        d, one = tl.arange(0, D), (lane == 0)[:, None]
        Y = tl.zeros((BLOCK_M, D), tl.float32)
        slot = tl.load(slots_ptr + e)
        start = tl.maximum(tl.load(start_ptr + e), 0)
        if EARLY:
            state = (tl.maximum(slot, 0).to(tl.int64) * H + h) * D * N
            _ask_for_columns(states_ptr + 2 * state, 2 * N, 2 * N, D)
            _ask_for_columns(open_ptr + start.to(tl.int64) * W + h * D, W, D, BLOCK_C)
        _wait(EARLY)
        if slot >= 0:
            target = tl.load(target_ptr + e)
            open_ptr += start.to(tl.int64) * W
            gates = gates_ptr + program.to(tl.int64) * 5 * BLOCK_C
            cos, sin, U_row, low_row, document = _read_gates(
                gates, target + 0 * lane, BLOCK_C, False
            )
            _, _, U, low, _ = _read_gates(gates, step, BLOCK_C, False)
            edge = (slot.to(tl.int64) * H + h) * D * N
            for n0 in tl.static_range(0, N, BLOCK_N):
                n = n0 + tl.arange(0, BLOCK_N)
                C_re, C_im = _load_pair(
                    C_ptr + e.to(tl.int64) * 2 * H * N, H * N,
                    0 * lane[:, None] + h * N + n[None, :], one,
                )  # fmt: skip
                G_re, G_im = _load_edge(
                    states_ptr, edge + d[None, :] * N + n[:, None], False, True
                )
                q_re, q_im = _keys(C_re, -C_im, cos, sin, PRECISION, EMULATE, WHOLE)
                G_re, G_im = _as_kept(G_re, G_im, PRECISION)
                G_re, G_im = _operands(G_re, G_im, PRECISION, EMULATE)
                Y = _from_state(q_re, q_im, G_re, G_im, Y, PRECISION)
            here = step <= target
            cb_at = program.to(tl.int64) * BLOCK_C + 0 * lane[:, None] + step[None, :]
            M = tl.load(cb_ptr + cb_at, mask=one & here[None, :], other=0.0)
            x_at = step[:, None] * W + h * D + d[None, :]
            x = tl.load(open_ptr + x_at, mask=here[:, None], other=0.0)
            span = _span(
                U_row[:, None], low_row[:, None], U[None, :], low[None, :], PRECISION
            )
            decay, entry = _exp_where(here[None, :], span), _from_entry(U_row, document)
            Y = _from_tokens(M, decay, x, Y, entry, PRECISION, EMULATE, WHOLE)
        y_at = program.to(tl.int64) * D + 0 * lane[:, None] + d[None, :]
        tl.store(
            out_ptr + y_at, Y.to(out_ptr.dtype.element_ty), mask=one & (d >= 0)[None, :]
        )


# %% [markdown]
# ### When a chunk is full
# After the row was read, the state moves to the new boundary. In the bf16 mode training
# puts what a chunk adds into memory as bfloat16 before it is added; so does this. The
# state itself stays float32. All layers go in one launch: a layer counts as more slots.
# `_passed_on` of notebook 06 moves the state, with its multiply-adds written out.

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit(do_not_specialize=["entries"])
    def _chunk_state_passing_rows_kernel(
        open_ptr, gates_ptr, start_ptr, flag_ptr, slots_ptr, states_ptr, entries, H, W,
        D: tl.constexpr, N: tl.constexpr, BLOCK_C: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, ENTRIES: tl.constexpr,
        PRECISION: tl.constexpr, EMULATE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """The boundary state of every entry whose chunk is full, in place.

        Grid (entries / ENTRIES, H, tiles of a state).
        """
        _wait(EARLY)
        h, part = tl.program_id(1), tl.program_id(2)
        step = tl.arange(0, BLOCK_C)
        d = part % (D // BLOCK_D) * BLOCK_D + tl.arange(0, BLOCK_D)
        n = part // (D // BLOCK_D) * BLOCK_N + tl.arange(0, BLOCK_N)
        for i in range(ENTRIES):
            e = tl.program_id(0) * ENTRIES + i
            if tl.load(flag_ptr + e, mask=e < entries, other=0) != 0:
                slot = tl.load(slots_ptr + e).to(tl.int64)
                base = open_ptr + tl.load(start_ptr + e).to(tl.int64) * W
                gates = gates_ptr + (e.to(tl.int64) * H + h) * 5 * BLOCK_C
                x = tl.load(base + step[:, None] * W + h * D + d[None, :])
                K_re, K_im = _load_pair(
                    base + H * D, H * N, step[:, None] * W + h * N + n[None, :], None
                )
                zero = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
                added_re, added_im = _chunk_sum(
                    x, K_re, K_im, zero, zero, gates, BLOCK_C, False, False,
                    PRECISION, EMULATE,
                )  # fmt: skip
                added_re, added_im = _as_kept(added_re, added_im, PRECISION)
                at = (slot * H + h) * D * N + d[None, :] * N + n[:, None]
                S_re, S_im = _load_edge(states_ptr, at, False, True)
                cos, sin, U, _, last = _read_gates(gates, BLOCK_C - 1, BLOCK_C, False)
                S_re, S_im = _passed_on(
                    S_re, S_im, cos, sin, _from_entry(U, last), added_re, added_im
                )
                _store_edge(states_ptr, at, S_re, S_im, False)


# %% [markdown]
# ### Launched as training launches
# The row kernels take their tiles and warps from the launch table of notebook 06.
# `row_kernel_configs` says None when that would not be enough, and the step falls back
# to the training kernels themselves.


# %% tags=["export"]
def _pinned_config(kernel: str) -> dict[str, tuple[int, ...]] | None:
    """The one row of the launch table that a kernel uses, by precision.

    None while there is no such row, and a tuner would choose.
    """
    from mamba3lite.models.ssd_fused import _LAUNCH  # it imports triton

    return _LAUNCH.get(kernel)


def row_kernel_configs(
    C: Float[Tensor, "E columns"], chunk_size: int, *,
    head_dim: int, state_dim: int, precision: str,
) -> dict[str, dict] | None:  # fmt: skip
    """Launch options of the training kernels that the row kernels mirror.

    Args: C: the read vectors of a step, or what else has their device and dtype.
        chunk_size: of the kernels.

    Returns: options of "chunks" and "output"; None when a row is not sure to have the
        bits of training here: a tuner still chooses, or this device failed the check.

    Source: notebook 09, "Launched as training launches".
    """
    sizes = (head_dim, state_dim, chunk_size, precision)
    if any(_pinned_config(kernel) is None for kernel in ("chunks", "output")):
        return None
    if C.is_cuda and not _bits_agree(C.device, *sizes, C.dtype):
        return None
    return _mirrored(C.device, *sizes)


def _mirrored(device, head_dim, state_dim, chunk_size, precision) -> dict[str, dict]:
    """Options of "chunks" and "output", and what row kernels are compiled for."""
    from mamba3lite.models.ssd_fused import _launch  # it imports triton

    shared = {"D": head_dim, "N": state_dim, "BLOCK_C": chunk_size}
    shared["PRECISION"] = precision
    chunks, output = (
        shared | _launch(kernel, precision, head_dim, state_dim)
        for kernel in ("chunks", "output")
    )
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    by_warp_groups = hopper and chunk_size >= 64 and output["num_warps"] >= 4
    output["WHOLE"] = by_warp_groups and precision == "tf32"
    return {"chunks": chunks, "output": output}


_LAUNCH_NAMES = ("num_warps", "num_stages", "maxnreg")


def _launch_options(config: dict) -> dict[str, int]:
    """Warps, stages and registers of a config."""
    return {k: v for k, v in config.items() if k in _LAUNCH_NAMES}


def _block_sizes(config: dict) -> dict[str, object]:
    """What a kernel is compiled for: the sizes of its tiles, and its precision."""
    rest = {k: v for k, v in config.items() if k not in _LAUNCH_NAMES}
    return rest | {"EMULATE": _interpreted()}


def _heads(x: Tensor, config: dict) -> int:
    """Heads H of rows x, B and dt."""
    return x.shape[-1] // (config["D"] + 2 * config["N"] + 1)


def bmm_rows(
    C: Float[Tensor, "E columns"],
    B: Float[Tensor, "rows width"],
    chunk_size: int,
    target_rows: Int[Tensor, "E"],
    chunk_starts: Int[Tensor, "E"],
    config: dict[str, dict],
    *,
    A: Tensor,
    slots: Int[Tensor, "E"],
    dA_cumsum: Float[Tensor, "E H 5 Q"],
    early: dict[str, bool] = _LATE,
) -> Float[Tensor, "E H Q"]:
    """One row of scores q k^T for each entry and head; computes the gates on the way.

    The fused path multiplies rotated vectors, so that its scores need the gates; and
    only the row is kept.

    Args:
        C: Re C and Im C of the tokens, 2 H N columns.
        B: rows of x, Re B, Im B and dt, H (D + 2 N + 1) columns; row chunk_starts[e] is
            the first of the open chunk.
        target_rows: position of the token in its chunk; later rows are not read.
        config: from `row_kernel_configs`.
        A: decay rates, complex64.
        slots: below 0 for a padding lane, whose row is not written.
        dA_cumsum: gets the gates of the chunk: cos V, sin V, U in two parts, and a row
            that is not read.
        early: from `_early`, in a step whose entries were there two kernels before.

    Source: notebook 09, "Scores of one row".
    """
    gates_like, output = config["chunks"], config["output"]
    H = _heads(B, output)
    cb = C.new_empty(len(C), H, chunk_size, dtype=torch.float32)
    launches["bmm_rows"] += 1
    # Sums over a chunk depend on the number of warps: those of the kernel that, in
    # training, computes the gates.
    options = _launch_options(output) | {"num_warps": gates_like["num_warps"]}
    with torch.cuda.device_of(C):
        _bmm_row_kernel[(len(C) * H,)](
            C, B, torch.view_as_real(A), dA_cumsum, cb, slots, target_rows,
            chunk_starts, H, B.shape[-1], BLOCK_M=ROW_BLOCK_SIZE_M,
            **_block_sizes(output), **options, **early,
        )  # fmt: skip
    return cb


def chunk_scan_rows(
    cb: Float[Tensor, "E H Q"],
    x: Float[Tensor, "rows width"],
    dA_cumsum: Float[Tensor, "E H 5 Q"],
    C: Float[Tensor, "E columns"],
    out: Float[Tensor, "E H D"],
    slots: Int[Tensor, "E"],
    target_rows: Int[Tensor, "E"],
    chunk_starts: Int[Tensor, "E"],
    initial_states: Tensor,
    config: dict[str, dict],
    early: dict[str, bool] = _LATE,
) -> Float[Tensor, "E H D"]:
    """The outputs of one row for each entry and head, into `out`.

    Args:
        cb, dA_cumsum: from `bmm_rows`. (dt has done its work there.)
        x: rows of x, Re B, Im B and dt, as in `bmm_rows`.
        initial_states: float32 pairs (S, H, D, N, 2), or complex64: before the chunk.
        slots: row of initial_states; below 0 for a padding lane, which gets 0.
        early: as in `bmm_rows`.

    Raises: TypeError for states that are not float32.

    Source: notebook 09, "Outputs of one row".
    """
    _check_states(initial_states)
    output = config["output"]
    H = _heads(x, output)
    launches["chunk_scan_rows"] += 1
    with torch.cuda.device_of(x):
        _chunk_scan_row_kernel[(len(C) * H,)](
            cb, x, dA_cumsum, C, out, slots, target_rows, chunk_starts,
            _as_pairs(initial_states), H, x.shape[-1], BLOCK_M=ROW_BLOCK_SIZE_M,
            **_block_sizes(output), **_launch_options(output),
            **early,
        )  # fmt: skip
    return out


def chunk_state_passing_rows(
    x: Float[Tensor, "rows width"],
    dA_cumsum: Float[Tensor, "E H 5 Q"],
    chunk_starts: Int[Tensor, "E"],
    chunk_flags: Int[Tensor, "E"],
    slots: Int[Tensor, "E"],
    states: Tensor,
    config: dict[str, dict],
    early: dict[str, bool] = _LATE,
) -> None:
    """Carry the boundary states of flagged entries over their full chunk, in place.

    Args: as in `chunk_scan_rows`. chunk_flags: not 0 where the chunk is full.
        early: as in `bmm_rows`.

    Raises: TypeError for states that are not float32.

    Source: notebook 09, "When a chunk is full".
    """
    _check_states(states)
    chunks = config["chunks"]
    H, entries = _heads(x, chunks), len(slots)
    together = _chunks_per_program(entries)
    parts = chunks["D"] // chunks["BLOCK_D"] * (chunks["N"] // chunks["BLOCK_N"])
    launches["chunk_state_passing_rows"] += 1
    with torch.cuda.device_of(x):
        _chunk_state_passing_rows_kernel[(-(-entries // together), H, parts)](
            x, dA_cumsum, chunk_starts, chunk_flags, slots, _as_pairs(states), entries,
            H, x.shape[-1], ENTRIES=together, **_block_sizes(chunks),
            **_launch_options(chunks), **early,
        )  # fmt: skip


def _as_pairs(states: Tensor) -> Tensor:
    """Complex numbers as pairs, where they are not yet."""
    return torch.view_as_real(states) if states.is_complex() else states


def _chunks_per_program(n: int) -> int:
    """Entries per program, so that about one of them crosses a boundary in a step."""
    return max(1, min(16, 2 ** (max(n // 16, 1).bit_length() - 1)))


# %% [markdown]
# ### Does this device keep the promise?
# That a row in a tile of 16 has the bits of the same row in a tile of 64 is a fact
# about a matrix unit, not a law. The first cache on a device, and `mamba3lite doctor`,
# decode two chunks and a half of random numbers and compare every row. Compiled, the
# bits must be the same. Interpreted, NumPy multiplies, and how it adds up a row depends
# on the processor and on the rows beside it: there, values are compared, to rounding.


# %% tags=["export"]
@functools.cache
def _bits_agree(
    device: torch.device, head_dim: int, state_dim: int, chunk: int, precision: str,
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether the row kernels give the bits of the training kernels on this device.

    Every row of two chunks and a half, each from the chunk before it, and the state
    between them.

    Args: dtype: of the projection.
    """
    sizes = head_dim, state_dim, chunk
    trained, decoded = scanned_twice(device, *sizes, precision, dtype)
    return all(map(torch.equal, trained, decoded))


def scanned_twice(
    device: torch.device, head_dim: int, state_dim: int, chunk: int, precision: str,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
    """A random sequence by the training kernels, and row by row.

    Returns: twice y (T, H, D) of two chunks and a half, and the state (H, D, N) between
        the second and the third.
    """
    from mamba3lite.models.ssd_fused import ssd_fused  # it imports triton

    H = 16 if device.type == "cuda" else 2  # interpreted, a head takes long
    D, N, T = head_dim, state_dim, 2 * chunk + chunk // 2
    sizes = {"head_dim": D, "state_dim": N, "precision": precision}
    g = torch.Generator(device).manual_seed(0)
    proj = torch.randn(1, T, H * (D + 4 * N + 1), generator=g, device=device).to(dtype)
    A = torch.complex(-torch.logspace(-2, 0, H), torch.linspace(-3, 3, H)).to(device)
    options = {"n_heads": H, "chunk_size": chunk, "walk": False} | sizes
    wanted = ssd_fused(proj, A, **options)[0]
    _, boundary = ssd_fused(
        proj[:, : 2 * chunk].contiguous(), A, **options, return_final_states=True
    )
    config = _mirrored(device, D, N, chunk, precision)
    rows, C = _split_columns(proj[0], H, D, N)
    states = torch.zeros(1, H, D, N, dtype=torch.complex64, device=device)
    slots = torch.zeros(chunk, dtype=torch.int32, device=device)
    targets = torch.arange(chunk, dtype=torch.int32, device=device)
    decoded, early = torch.empty_like(wanted), _early(proj)
    for start in range(0, T, chunk):
        here = slice(start, min(start + chunk, T))
        n = here.stop - start
        gates = proj.new_empty(n, H, 5, chunk, dtype=torch.float32)
        entry = (slots[:n], targets[:n], slots[:n] + start)
        step_C = C[here].contiguous()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what starts early finds its entries
        cb = bmm_rows(step_C, rows, chunk, *entry[1:], config, A=A, slots=entry[0],
                      dA_cumsum=gates, early=early)  # fmt: skip
        chunk_scan_rows(
            cb, rows, gates, step_C, decoded[here], *entry, states, config, early
        )
        if n == chunk:
            ends = entry[2][-1:], slots[:1] + 1, slots[:1]
            chunk_state_passing_rows(rows, gates[-1:], *ends, states, config, early)
    return (wanted, boundary[0]), (decoded, states[0])


def _split_columns(
    proj: Float[Tensor, "*rows columns"], H: int, D: int, N: int
) -> tuple[Tensor, Tensor]:
    """The columns that an open chunk keeps, x, B and dt; and those of C."""
    first, last = H * (D + 2 * N), H * (D + 4 * N)
    return torch.cat([proj[..., :first], proj[..., last:]], -1), proj[..., first:last]


# %%
trained, decoded = scanned_twice(device, 16, 16, 16, "tf32", torch.float32)
for want, got in zip(trained, decoded, strict=True):
    if device.type == "cuda":
        assert torch.equal(got, want), "the same bits"
    else:  # a product rounded otherwise may be cut to another number of tf32
        assert (got - want).norm() < 1e-3 * want.norm()

# %% [markdown]
# ### A token enters
# Two kernels, new in their addresses alone. The first finds the place of each token.
# The second is a product that writes where the token belongs. Gate and up come from the
# kernel of "A matrix times some vectors".

# %% tags=["export"]
if HAS_TRITON:

    @triton.jit(do_not_specialize=["slots_in_all"])
    def _begin_kernel(
        tokens_ptr, slots_ptr, cursor_ptr, embed_ptr, u_ptr, target_ptr, entry_ptr,
        slots_in_all, layers, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
        LAYERS: tl.constexpr, BLOCK_C: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Vector and place of each entry's token; the slot's cursor moves on.

        One program an entry. Slots are counted through all layers: entry_ptr gets, for
        each layer, slot, first row of its open chunk, and whether the chunk is now
        full. A padding lane has vector 0 and slot -1.
        """
        _wait(EARLY)
        e, entries = tl.program_id(0), tl.num_programs(0)
        slot = tl.load(slots_ptr + e)
        real = slot >= 0
        target = tl.load(cursor_ptr + slot, mask=real, other=0)
        full = target == BLOCK_C - 1
        tl.store(cursor_ptr + slot, tl.where(full, 0, target + 1), mask=real)
        tl.store(target_ptr + e, target)
        layer = tl.arange(0, LAYERS)
        place = tl.where(real, layer * slots_in_all + slot, -1)
        at = layer * entries + e
        exists = layer < layers
        tl.store(entry_ptr + at, place, mask=exists)
        tl.store(entry_ptr + layers * entries + at, place * BLOCK_C, mask=exists)
        flag = (real & full).to(tl.int32) + 0 * layer
        tl.store(entry_ptr + 2 * layers * entries + at, flag, mask=exists)
        i = tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + e).to(tl.int64)
        u = tl.load(embed_ptr + token * WIDTH + i, mask=(i < WIDTH) & real, other=0.0)
        tl.store(u_ptr + e.to(tl.int64) * WIDTH + i, u, mask=i < WIDTH)

    @triton.jit(do_not_specialize=["rows"])
    def _project_kernel(
        v_ptr, w_ptr, open_ptr, C_ptr, slots_ptr, target_ptr, start_ptr,
        rows, columns, first, last, K: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        EMULATE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """v w^T; columns [first, last) to C, the rest to the row's open chunk."""
        row, column = _tile_of(rows, columns, BLOCK_M, BLOCK_N)
        _fetch_rows(w_ptr, column, columns, K, EARLY)
        _wait(EARLY)
        acc = _products(v_ptr, w_ptr, row, rows, column, columns, K, BLOCK_K, EMULATE)
        acc = acc.to(open_ptr.dtype.element_ty)
        exists = row < rows
        slot = tl.load(slots_ptr + row, mask=exists, other=-1)
        to = tl.load(start_ptr + row, mask=exists, other=0).to(tl.int64)
        to += tl.load(target_ptr + row, mask=exists, other=0)
        read = (column >= first) & (column < last)
        kept = column - tl.where(column >= last, last - first, 0)
        at = to[:, None] * (columns - last + first) + kept[None, :]
        own = (slot >= 0)[:, None] & (~read & (column < columns))[None, :]
        tl.store(open_ptr + at, acc, mask=own)
        at = row.to(tl.int64)[:, None] * (last - first) + (column - first)[None, :]
        tl.store(C_ptr + at, acc, mask=exists[:, None] & read[None, :])

# %% [markdown]
# ### One step
# Nine launches a layer, in a CUDA graph, each of which starts before the one ahead has
# ended. For one sequence a step still takes 4.6 times its floor (*measured*,
# `docs/benchmarks/h200-decode.json`).


# %% tags=["export"]
class _Step:
    """One step's entries: where each token goes, in every layer, and its vector."""

    def __init__(self, model, tokens, cache, slots) -> None:
        cfg, weight = model.cfg, model.embed.weight
        E, L = len(tokens), cfg.n_layers
        self.u = weight.new_empty(E, cfg.d_model)
        self.targets = slots.new_empty(E)
        entries = slots.new_empty(3, L, E)
        self.slots, self.starts, self.full = entries
        C = cache.chunk
        self.gates = self.u.new_empty(L, E, cfg.n_heads, 5, C, dtype=torch.float32)
        with torch.cuda.device_of(weight):
            _begin_kernel[(E,)](
                tokens, slots, cache.cursor, weight, self.u, self.targets, entries,
                cache.slots, L, WIDTH=cfg.d_model, BLOCK=_block(cfg.d_model, 2**16),
                LAYERS=_block(L, 2**16), BLOCK_C=C, **_early(weight),
            )  # fmt: skip
        self.rows = cache.open.flatten(0, 2)
        self.states = cache.states.flatten(0, 1)
        self.cache, self.early = cache, _early(weight)

    def norm(self, module: nn.RMSNorm) -> Tensor:
        """The residual stream as products read it."""
        out = torch.empty_like(self.u, dtype=self.cache.dtype)
        return _launch_rms_norm(self.u, module.weight, out, module.eps, self.early)

    def product(self, z: Tensor, weight: nn.Parameter, add=False) -> Tensor:
        """z weight^T; add: to the residual stream."""
        weight = self.cache.weight(weight)
        if add:
            out = torch.empty_like(self.u)
            return _launch_linear(z, weight, out, self.u, early=self.early)
        out = z.new_empty(len(z), len(weight))
        return _launch_linear(z, weight, out, early=self.early)

    def project(self, v: Tensor, layer: int, block: nn.Module) -> Tensor:
        """Write x, B and dt of the tokens into their chunks. Returns: C."""
        cfg, weight = block.cfg, self.cache.weight(block.in_proj.weight)
        first = cfg.n_heads * (cfg.head_dim + 2 * cfg.state_dim)
        last = first + 2 * cfg.n_heads * cfg.state_dim
        C = v.new_empty(len(v), last - first)
        (rows, K), columns = v.shape, len(weight)
        tile = _checked_tile(rows, v)
        grid = (triton.cdiv(rows, tile[0]) * triton.cdiv(columns, tile[1]),)
        with torch.cuda.device_of(v):
            _project_kernel[grid](
                v, weight, self.rows, C, self.slots[layer], self.targets,
                self.starts[layer], rows, columns, first, last, K=K,
                EMULATE=_interpreted(), **_tiling(tile), **self.early,
            )  # fmt: skip
        return C

    def gate_up(self, v: Tensor, weight: nn.Parameter) -> Tensor:
        """The inner vector of the SwiGLU."""
        weight = self.cache.weight(weight)
        out = v.new_empty(len(v), len(weight) // 2)
        return _launch_gate_up(v, weight, out, self.early)


def _row_block(step: _Step, layer: int, block: nn.Module, config) -> None:
    """One block for the row of each entry; the residual stream moves on."""
    C = step.project(step.norm(block.norm_ssd), layer, block)
    y = C.new_empty(len(C), block.cfg.n_heads, block.cfg.head_dim)
    entry = (step.slots[layer], step.targets, step.starts[layer])
    if config is None:
        _scan_by_training_kernels(step, layer, block, C, y)
    else:
        gates = step.gates[layer]
        cb = bmm_rows(
            C, step.rows, step.cache.chunk, *entry[1:], config, A=block.A.detach(),
            slots=entry[0], dA_cumsum=gates, early=step.early,
        )  # fmt: skip
        chunk_scan_rows(
            cb, step.rows, gates, C, y, *entry, step.states, config, step.early
        )
    mixed = step.product(y.flatten(1), block.mimo.weight)
    step.u = step.product(mixed, block.out_proj.weight, add=True)
    inner = step.gate_up(step.norm(block.norm_ffn), block.ffn_gate_up.weight)
    step.u = step.product(inner, block.ffn_down.weight, add=True)


def _scan_by_training_kernels(step, layer, block, C, y) -> None:
    """The row of each entry, and full chunks' states, by scanning the open chunks."""
    launches["training kernels"] += 1
    cfg, Q = block.cfg, step.cache.chunk
    real = (step.slots[layer] >= 0).nonzero().flatten()
    slots, starts, full = (
        z[layer][real].long() for z in (step.slots, step.starts, step.full)
    )
    targets = step.targets[real].long()
    place = torch.arange(Q, device=C.device)
    rows = step.rows[starts[:, None] + place].clone()  # (E, Q, width)
    rows[place > targets[:, None]] = 0
    read = rows.new_zeros(len(real), Q, C.shape[-1])
    read[torch.arange(len(real)), targets] = C[real]
    first = cfg.n_heads * (cfg.head_dim + 2 * cfg.state_dim)
    proj = torch.cat([rows[..., :first], read, rows[..., first:]], -1)
    outputs, final = block._scan(
        proj, "fused", initial_states=step.states[slots], return_final_states=True
    )
    y.zero_()
    y[real] = outputs[torch.arange(len(real)), targets]
    step.states[slots[full > 0]] = final[full > 0]


@torch.no_grad()
def exact_step(
    model: nn.Module,
    tokens: Int[Tensor, "E"],
    cache: ExactCache,
    slots: Int[Tensor, "E"],
) -> Float[Tensor, "E V"]:
    """Logits of the next position of each slot, after one more token in it.

    Bit for bit those of a full forward of the batch-invariant model on the slot's whole
    sequence, whoever else is in the batch. Where `cache.captures`, a CUDA graph can
    hold it, after one step outside.

    Args:
        tokens: one id an entry.
        slots: int32, no slot twice; below 0 for a padding lane, whose logits mean
            nothing and which touches nothing.

    Raises: TypeError, ValueError: a shape, dtype or cache that does not fit.

    Source: notebook 09, "One step".
    """
    _check_exact(model, cache, tokens, slots)
    if not cache.by_rows:
        return _step_in_windows(model, tokens, cache, slots)
    step = _Step(model, tokens, cache, slots)
    config = cache.config
    if config is None:
        _warn_slow()
    for i, block in enumerate(model.layers):
        _row_block(step, i, block, config)
    if config is not None:
        chunk_state_passing_rows(
            step.rows, step.gates.flatten(0, 1), step.starts.flatten(),
            step.full.flatten(), step.slots.flatten(), step.states, config, step.early,
        )  # fmt: skip
    weight = cache.weight(model.lm_head.weight)
    logits = step.u.new_empty(len(tokens), len(weight), dtype=torch.float32)
    hidden = step.norm(model.norm_f)
    return _launch_linear(hidden, weight, logits, early=step.early)


@functools.cache
def _warn_slow() -> None:
    """Once a process."""
    warnings.warn(
        "exact decode: on this device the row kernels do not have the bits of the "
        "training kernels; each step scans the open chunk with those, which is slower",
        RuntimeWarning,
        stacklevel=3,
    )


def _check_exact(model, cache, tokens, slots, lengths=None) -> None:
    """Refuse what does not fit.

    Raises: TypeError, ValueError, naming the argument.
    """
    _check_call(ExactCache, model, cache, tokens, slots, lengths)
    if slots.dtype != torch.int32:
        raise TypeError(f"slots is {slots.dtype}; wanted int32")
    _check_states(cache.states)
    made_for = (True, cache.chunk, cache.by_rows)
    if (model.cfg.batch_invariant, model.chunk(), model.by_rows()) != made_for:
        raise ValueError(
            "the cache was made for a batch-invariant model with chunks of "
            f"{cache.chunk} tokens that computes {'' if cache.by_rows else 'not '}by "
            "row kernels; this model is another"
        )
    dtype = _working_dtype(tokens.device)
    if dtype != cache.dtype:
        raise ValueError(
            f"the cache was made for {cache.dtype} and autocast now gives {dtype}; "
            "make and use it under the same autocast"
        )


# %% [markdown]
# ### The prompt
# A prompt goes through the training kernels. Its last whole chunk leaves a state, which
# differs in position from prompt to prompt in a batch; a second scan finds it, in which
# the rest of each row has no input and takes no step.


# %% tags=["export"]
@torch.no_grad()
def exact_prefill(
    model: nn.Module,
    tokens: Int[Tensor, "E T"],
    lengths: Int[Tensor, "E"],
    cache: ExactCache,
    slots: Int[Tensor, "E"],
) -> Float[Tensor, "E V"]:
    """Put prompts into slots; the logits after the last token of each.

    The whole chunks of a prompt go into the slot's state, what is left into its open
    chunk. A prompt may come in pieces: all but the last end on a chunk boundary. A slot
    that held another sequence is emptied first, by `cache.reset`.

    Args:
        tokens: prompts side by side, padded on the right with any valid id.
        lengths: tokens of each prompt, 1 to T.
        slots: int32, no slot twice; below 0 for a row to be left out.

    Raises: TypeError, ValueError: what does not fit, or a slot with an open chunk.

    Source: notebook 09, "The prompt".
    """
    _check_exact(model, cache, tokens, slots, lengths)
    _check_lengths(lengths, slots, 1, tokens.shape[1])
    _check_closed(cache, slots)
    logits = model.embed.weight.new_zeros(
        len(tokens), model.cfg.vocab_size, dtype=torch.float32
    )
    real = (slots >= 0).nonzero().flatten()
    if len(real):
        fill = _prefill_rows if cache.by_rows else _prefill_in_windows
        some = (tokens[real], lengths[real].long(), cache, slots[real].long())
        logits[real] = fill(model, *some)
    return logits


def _check_closed(cache, slots) -> None:
    """Refuse slots with an open chunk."""
    held = torch.where(slots >= 0, cache.cursor[slots.clamp(min=0).long()], 0)
    if held.any():
        slot, rows = slots[held > 0][0], held[held > 0][0]
        raise ValueError(
            f"slot {slot} holds {rows} tokens of an open chunk; a prompt goes on at a "
            f"multiple of {cache.chunk} tokens, or into an empty slot (cache.reset)"
        )


def _prefill_rows(model, tokens, lengths, cache, slots) -> Tensor:
    """By the training kernels; the state of the last whole chunk from a second scan."""
    cfg, Q = model.cfg, cache.chunk
    whole = lengths // Q * Q
    u = model.embed(tokens)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    later = place >= whole[:, None]
    tail = whole[:, None] + torch.arange(Q, device=tokens.device)
    unused = tail >= lengths[:, None]
    tail = tail.clamp(max=tokens.shape[1] - 1)
    each = torch.arange(len(tokens), device=tokens.device)
    sizes = cfg.n_heads, cfg.head_dim, cfg.state_dim
    for i, block in enumerate(model.layers):
        u, proj = block._project(u)
        entering = cache.states[i, slots]
        y = block._scan(proj, "fused", initial_states=entering)
        rows = proj[each[:, None], tail].masked_fill(unused[..., None], 0)
        cache.open[i, slots] = _split_columns(rows, *sizes)[0]
        _, state = block._scan(
            _still_where(later, proj, block._columns), "fused",
            initial_states=entering, return_final_states=True,
        )  # fmt: skip
        cache.states[i, slots] = state
        u = block._finish(u, y)
    cache.cursor[slots] = (lengths - whole).int()
    hidden = batch_invariant.norm(u[each, lengths - 1], model.norm_f)
    return model._head(hidden)


# %% [markdown]
# ### On a CPU
# There the matrix library decides, and one row is not computed like sixteen. But the
# same *shape* is computed in the same way. So a batch-invariant model on a CPU reads
# one sequence and one window of chunk_size tokens at a time, padded where it ends, and
# a step of decoding replays the window of its token through all layers. That is slow,
# some chunk_size times the work of a step, and it is the oracle of the kernels.


# %% tags=["export"]
def _prefill_in_windows(model, tokens, lengths, cache, slots) -> Tensor:
    """One sequence and one window at a time, as the model's own forward does."""
    logits = []
    for row, length, slot in zip(tokens, lengths.tolist(), slots.tolist(), strict=True):
        for part in row[:length].split(cache.chunk):
            cache.open[slot] = F.pad(part, (0, cache.chunk - len(part)))
            cache.cursor[slot] = len(part) - 1
            last = _replay(model, cache, slot)
        logits.append(last)
    return torch.stack(logits)


def _step_in_windows(model, tokens, cache, slots) -> Tensor:
    """Replay the window of each slot, with one more token in it."""
    logits = model.embed.weight.new_zeros(
        len(tokens), model.cfg.vocab_size, dtype=torch.float32
    )
    for e, slot in enumerate(slots.tolist()):
        if slot >= 0:
            cache.open[slot, cache.cursor[slot]] = tokens[e]
            logits[e] = _replay(model, cache, slot)
    return logits


def _replay(model, cache, slot: int) -> Float[Tensor, "V"]:
    """Logits of the token at the cursor, from the window around it through all layers.

    The cursor moves on; a full window leaves its state.
    """
    states = [state[slot : slot + 1] for state in cache.states]
    hidden, states = model._through_layers(cache.open[slot : slot + 1], None, states)
    target = int(cache.cursor[slot])
    full = target == cache.chunk - 1
    cache.cursor[slot] = 0 if full else target + 1
    if full:
        cache.states[:, slot] = torch.cat(states)
    return model._head(hidden)[0, target]


# %% [markdown]
# ## Every bit
# Now the promise, on prompts that end everywhere in a chunk, and then on what could
# break it: neighbors, slots, the way a prompt was cut. On a GPU this proves the row
# kernels, on a CPU the windows; there `scanned_twice` of above has run the kernels
# interpreted.

# %%
dispatch = "fused" if device.type == "cuda" else "pytorch"
exact = tiny_model(batch_invariant=True, ssd_dispatch=dispatch)
Q = exact.chunk()
torch.manual_seed(3)
texts = torch.randint(61, (4, 6 * Q), device=device)
reference = torch.stack([exact(row[None])[0] for row in texts])


def decode_texts(prompts, steps, slots, rows=texts):
    """Logits (E, steps + 1, V) of some of the texts, decoded together."""
    ids = torch.tensor(slots, dtype=torch.int32, device=device)
    lengths = torch.tensor(prompts, device=device)
    cache, each = ExactCache(exact, 8), torch.arange(len(prompts), device=device)
    prompt = rows[: len(prompts), : max(prompts)]
    out = [exact_prefill(exact, prompt, lengths, cache, ids)]
    for i in range(steps):
        out.append(exact_step(exact, rows[each, lengths + i], cache, ids))
    return torch.stack(out, 1), cache


for prompts in ([1, 7, Q - 1, Q], [Q + 1, 2 * Q, 3 * Q + 2, 5]):
    got, cache = decode_texts(prompts, Q + 5, [3, 0, 6, 1])
    for e, p in enumerate(prompts):
        assert torch.equal(got[e], reference[e, p - 1 : p + Q + 5])
alone, _ = decode_texts([Q + 1], Q + 5, [2])
together, _ = decode_texts([Q + 1, 2 * Q, 3 * Q + 2, 5], Q + 5, [7, 6, 5, 4])
assert torch.equal(alone[0], together[0]), "the neighbors do not matter"
cache, slot = ExactCache(exact, 1), torch.zeros(1, dtype=torch.int32, device=device)
for piece in texts[:1].split(2 * Q, 1):
    length = torch.tensor([piece.shape[1]], device=device)
    last = exact_prefill(exact, piece, length, cache, slot)
assert torch.equal(last[0], reference[0, -1]), "nor where a prompt was cut"
if device.type == "cuda":
    assert launches["bmm_rows"] and not launches["training kernels"]
sampled = token_log_probs(alone[0, :-1], texts[0, Q + 1 : 2 * Q + 6])
again = token_log_probs(reference[0, Q : 2 * Q + 5], texts[0, Q + 1 : 2 * Q + 6])
assert torch.equal(sampled, again), "log-probabilities: the quotient is 1"

# %% [markdown]
# ### What breaks: a rounded state
# Why is the boundary state float32? Round it to bfloat16 once, at the first boundary,
# and look at every row that follows, with the decay as it is and with one a hundred
# times slower.


# %%
def rows_after_rounding(slow):
    """For each later row: does it still have its bits?"""
    model = tiny_model(batch_invariant=True, ssd_dispatch=dispatch)
    for layer in model.layers:
        layer.A *= 0.01 if slow else 1
    cache = ExactCache(model, 1)
    slot = torch.zeros(1, dtype=torch.int32, device=device)
    want, same = model(texts[:1])[0], []
    exact_prefill(model, texts[:1, :Q], torch.tensor([Q], device=device), cache, slot)
    pairs = torch.view_as_real(cache.states)
    pairs.copy_(pairs.bfloat16().float())
    for t in range(Q, 5 * Q):
        got = exact_step(model, texts[:1, t], cache, slot)[0]
        same.append((got - want[t]).abs().max().item())
    return same


errors = {slow: rows_after_rounding(slow) for slow in (False, True)}
assert all(min(error) > 0 for error in errors.values()), "no row is ever right again"

fig, axis = plt.subplots(figsize=(7.2, 2.5))
for (slow, error), color in zip(errors.items(), (BLUE, RED), strict=True):
    label = "A / 100" if slow else "A as it is"
    axis.semilogy(range(Q, 5 * Q), error, color=color, label=label)
axis.set(xlabel="token (position)", ylabel="largest error of a logit (no unit)")
axis.set_title("One state rounded to bfloat16: every later row has other bits")
axis.legend(frameon=False)
plt.show()

cache = ExactCache(exact, 1)
cache.states = torch.view_as_real(cache.states).bfloat16()
try:
    exact_step(exact, texts[0, :1], cache, torch.zeros(1, dtype=torch.int32))
    raise AssertionError("a rounded state was accepted")
except TypeError as error:
    print(error)

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
# - *Equal to 1e-6* is no step on the way to *equal*. One launch that picks its kernel
#   by shape undoes the rest; count rows, not errors.
# - A cumulative sum in float32 has the bits of its tile and of its number of warps.
# - A complex product has two legal ways to fuse multiply and add. Two kernels that call
#   the same function got different ones, and every boundary state another last bit;
#   `tl.fma` says which.
# - Where a number came from can show in its sum: `_whole` above.
# - A sum behind a product may become the product's beginning: $u + x W^\top$ is not
#   $x W^\top$ plus $u$ when the compiler starts the sum over $k$ with $u$.
# - A weight that changes while a sequence is open breaks the promise for it: the state
#   is of the old model.
# - float32 layers on a CPU are not invariant at one or two rows, nor are softplus and
#   SiLU at the end of a vector. Shapes are, hence windows.
