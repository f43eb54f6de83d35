# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Training a language model
# From a folder of text files to a trained model, with the trainer of this package: the
# same functions that `make train` calls, on a smaller model and less text.
#
# **After it you can**
# - follow a document from the disk to the loss, and say which tokens are targets;
# - write one optimizer step by hand, and know what accumulation, clipping, the schedule
#   and the parameter groups each do to it;
# - read a run folder, and compare a model with `zlib` in bits per byte;
# - make a step fail, send a run back to its checkpoint, stop it and kill it in the
#   middle, and prove that none of it left a trace.
#
# **Before it** you need the model of
# [notebook 07](07_block_and_model.ipynb); from PyTorch, a loss, `backward` and an
# optimizer.
#
# **How long**: about an hour to read, an estimate, and a minute or two to run on two
# cores; the last cell prints how long it was.
#
# **Where its cells go**: nowhere. The trainer is plain modules, `mamba3lite/data` and
# `mamba3lite/training`, and this notebook imports what it shows.

# %% [markdown]
# ## The tools
# All files of this notebook go to an empty temporary folder, so paths below are
# relative to it. One thread, because the tensors are small, and because sums taken in
# one order give the same bits every time.

# %%
import contextlib
import hashlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
import yaml

# %% [markdown]
# And this is what we look at: data, checkpoints, configuration, metrics, the optimizer,
# and the loop, each in a module of its own.

# %%
from mamba3lite.data import DataError
from mamba3lite.data.corpora import zlib_bits_per_byte
from mamba3lite.data.prepare import prepare
from mamba3lite.data.shards import HEADER, Header
from mamba3lite.generate import generate
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.training.checkpoint import (
    list_checkpoints,
    load_model,
    verify_checkpoint,
)
from mamba3lite.training.config import ConfigError, TrainingConfig, load_config
from mamba3lite.training.data import TokenStream, permuted
from mamba3lite.training.metrics import (
    Display,
    bits_per_byte,
    plot_runs,
    read_metrics,
)
from mamba3lite.training.optim import (
    build_optimizer,
    learning_rate,
    parameter_groups,
    project_decay_rates,
)
from mamba3lite.training.pretrain import (
    PretrainDataset,
    Pretrainer,
    count_parameters,
    evaluate,
    train_step,
)
from mamba3lite.training.recovery import TrainingFailed

# %%
started = time.perf_counter()
torch.set_num_threads(1)
home, folder = Path.cwd(), tempfile.TemporaryDirectory()
os.chdir(folder.name)
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, RED, PINK = "#0072B2", "#D55E00", "#CC79A7"
plt.rcParams.update(
    {
        "figure.dpi": 62,
        "figure.figsize": (7.2, 3.0),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 11,
    }
)


def quiet(*_):
    """A progress report that nobody sees."""


# %% [markdown]
# ## What a document becomes
# A model reads one endless row of numbers. *Where does a document begin in it, and who
# decides which documents are held out?*
#
# With the byte tokenizer a text is its bytes, 0 to 255. One more number, 256, is called
# EOS, and it stands *in front of* every document: it is stored as `[EOS] text`. So the
# EOS has two jobs. To the document before it, it is the target after the last byte,
# from which the model learns to stop. To its own document it is the first input, from
# which the model learns to begin; a generation without a prompt starts exactly there.
#
# Held out for validation is a document whose own hash says so: the first 64 bits of the
# sha256 of its text, as a fraction of $2^{64}$, are below `val_fraction`. Neither its
# name nor its neighbors matter, and two equal documents are always on the same side.

# %%
texts = ["x = 1\n", "y = 2\n", "pass\n", "import re\n", "a, b = c\n", "return\n"]
records = [json.dumps({"text": text}) for text in texts]
Path("six.jsonl").write_text("\n".join(records))
index = prepare("six.jsonl", "byte", "six", val_fraction=0.3, progress=quiet)


def share(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


held_out = [text for text in texts if share(text) < 0.3]
kept = [text for text in texts if share(text) >= 0.3]
for text in texts:
    split = "val" if text in held_out else "train"
    print(f"{text!r:14s} share {share(text):.3f} -> {split}")
assert index["splits"]["train"]["documents"] == len(kept) > 1
assert index["splits"]["val"]["documents"] == len(held_out) > 0

# %% [markdown]
# On disk a split is a row of *shards*. A shard is a header of 64 bytes and then the
# tokens, two bytes each as long as the vocabulary fits into 16 bits. Nothing but
# `struct` and NumPy is needed to read one.

# %%
shard = Path("six/train/shard_00000.bin")
raw = shard.read_bytes()
header = Header(*HEADER.unpack(raw[: HEADER.size]))
tokens = np.frombuffer(raw[HEADER.size :], "<u2")
print(header.magic, "version", header.version, "bytes per token", header.itemsize)
print(header.n_tokens, "tokens of a vocabulary of", header.vocab_size)
print(tokens[:14])

by_hand = [token for text in kept for token in (256, *text.encode())]
assert tokens.tolist() == by_hand
assert header.sha256 == hashlib.sha256(raw[HEADER.size :]).digest()

# %% [markdown]
# ### What breaks: one bit
# A model does not crash on a wrong byte; it learns it. So every byte is checked
# when a shard is opened. Flip a single bit, and the trainer refuses to start:

# %%
damaged = bytearray(raw)
damaged[70] ^= 1
shard.write_bytes(damaged)
try:
    TokenStream("six", "train")
    raise AssertionError("the flipped bit went unseen")
except DataError as error:
    print(error)
shard.write_bytes(raw)
assert len(TokenStream("six", "train")) == len(by_hand)

# %% [markdown]
# ## Windows, targets, documents
# The row is cut into windows of $T$ tokens that do not overlap. Window $i$ and its
# targets are
#
# $$x_t = s_{iT + t}, \qquad y_t = s_{iT + t + 1}, \qquad 0 \le t < T :$$
#
# the target at a position is the token *after* it. The shift happens here, once; the
# model shifts nothing. With each token goes the number of its document inside the
# window, which rises at the EOS itself:
#
# $$d_t = \#\{u \le t : x_u = \mathrm{EOS}\} .$$
#
# Wherever $d$ changes, the model drops its state. Windows cut documents without mercy,
# but documents never leak into one another.

# %%
T = 8
six = PretrainDataset("six", seq_len=T, seed=0)
tokens, targets, doc_ids, windows = six.batch(0, range(six.n_windows), six.n_windows)
in_order = windows.argsort()
tokens, targets, doc_ids = (part[in_order] for part in (tokens, targets, doc_ids))

stream = torch.tensor(by_hand)
assert six.n_windows == (len(by_hand) - 1) // T
assert torch.equal(tokens.flatten(), stream[: six.n_windows * T])
assert torch.equal(targets.flatten(), stream[1 : six.n_windows * T + 1])
assert torch.equal(doc_ids, (tokens == 256).cumsum(1))


# %%
def glyph(token):
    return {256: "EOS", 10: "\\n", 32: "␣"}.get(token, chr(token % 256))


fig, ax = plt.subplots(figsize=(7.2, 0.9 * six.n_windows + 0.7))
palette = plt.matplotlib.colors.ListedColormap(["#ffffff", ORANGE, SKY])
ax.pcolormesh(doc_ids, cmap=palette, vmin=0, vmax=2, edgecolors=BLACK, alpha=0.45)
for row in range(six.n_windows):
    for t in range(T):
        ax.text(t + 0.5, row + 0.38, glyph(tokens[row, t].item()), ha="center")
        target = f"→ {glyph(targets[row, t].item())}"
        ax.text(t + 0.5, row + 0.78, target, ha="center", fontsize=9, color=BLUE)
ax.invert_yaxis()
ax.set_xticks(np.arange(T) + 0.5, range(T))
ax.set_yticks(np.arange(six.n_windows) + 0.5, range(six.n_windows))
ax.set(xlabel="position t (tokens)", ylabel="window i")
ax.set_title("Black: token; blue: its target; color: its document inside the window")
plt.show()

# %% [markdown]
# Validation windows are the same, with two differences: they come in order, and the
# last one is not dropped but padded, its missing targets set to $-100$, which the loss
# ignores. Each token of the split is a target exactly once, except the very first,
# which has nothing before it.

# %%
val = PretrainDataset("six", seq_len=T, seed=0, split="val")
parts = [targets.flatten() for _, targets, _ in val.eval_batches(batch_rows=2)]
seen = torch.cat(parts)
valid = seen[seen != -100]
everything = torch.from_numpy(val.stream.tokens(0, val.n_tokens))
assert torch.equal(valid, everything[1:])
assert len(seen) == val.n_eval_windows * T > len(valid)

# %% [markdown]
# ### What breaks: the documents forgotten
# Leave `doc_ids` out and nothing complains. But the prediction inside the second
# document now depends on what the first one said.

# %%
MODEL = {
    "vocab_size": 257,
    "d_model": 96,
    "n_layers": 2,
    "n_heads": 6,
    "head_dim": 16,
    "state_dim": 4,
    "chunk_size": 32,
    "ffn_dim": 192,
    "max_seq_len": 128,
    "init_std": 0.04,
}
torch.manual_seed(0)
model = Mamba3Transformer(MODEL)
row = torch.tensor([[256, *b"x = 1\n", 256, *b"pass\n"]])
other = torch.tensor([[256, *b"qqqqq\n", 256, *b"pass\n"]])
documents = (row == 256).cumsum(1)
with torch.no_grad():
    leak = (model(row) - model(other))[:, 7:].abs().max()
    clean = model(row, doc_ids=documents) - model(other, doc_ids=documents)
assert leak > 0.01
assert clean[:, 7:].abs().max() == 0, "not a bit comes through"
assert clean[:, :7].abs().max() > 0.01

# %% [markdown]
# ## An order that nobody stores
# Training visits the windows in random order, each once an epoch. The usual way is an
# iterator with a shuffled list inside. It has a past, so it must be saved, restored
# and, with several processes, kept in step. *Can the order be a formula?*
#
# Batch $p$ has $R$ rows. Its row $r$ is sample $g = pR + r$ of an endless sequence, and
# with $n$ windows an epoch
#
# $$\text{epoch} = \lfloor g / n \rfloor, \qquad
# \text{window} = \pi_{\text{seed},\,\text{epoch}}(g \bmod n) .$$
#
# What remains is a permutation $\pi$ that can be evaluated at one place without
# building the rest. A Feistel network is one: cut the number into two halves $(l, r)$
# and map them to $(r,\ l \oplus f(r))$, several times with different $f$. Each round
# can be undone whatever $f$ is, so no two numbers meet. It permutes a power of four; a
# result of $n$ or more is sent through again until it falls below $n$.
#
# Now to real text: the modules at the top of Python's own standard library, those of 3
# to 16 kB.

# %% tags=["nbval-ignore-output"]
library = Path(sysconfig.get_path("stdlib"))
Path("text").mkdir()
for path in sorted(library.glob("*.py")):
    if 3_000 < path.stat().st_size < 16_000:
        shutil.copy(path, "text")
begin = time.perf_counter()
index = prepare("text", "byte", "tokens", val_fraction=0.08, progress=quiet)
seconds = time.perf_counter() - begin
for split, entry in index["splits"].items():
    print(f"{split}: {entry['documents']} documents, {entry['bytes']:,} bytes")
print(f"prepared in {seconds:.2f} s")
assert index["splits"]["train"]["documents"] > 50

# %%
data = PretrainDataset("tokens", seq_len=128, seed=0)
n = data.n_windows
places = np.arange(n)
epochs = [permuted(places, n, seed=0, epochs=epoch) for epoch in (0, 1)]
for order in epochs:
    assert np.array_equal(np.sort(order), places), "each window exactly once"
    assert abs(np.corrcoef(places, order)[0, 1]) < 0.1
assert (epochs[0] == epochs[1]).mean() < 0.01, "another epoch, another order"

# %%
fig, axes = plt.subplots(1, 2, figsize=(7.2, 3.4), sharey=True)
for ax, order, color in zip(axes, epochs, (BLUE, RED), strict=True):
    ax.plot(places[:800], order[:800], ".", color=color, markersize=2)
    ax.set(xlabel="place in the epoch (samples)")
axes[0].set_ylabel("window")
axes[0].set_title("epoch 0: no pattern to see")
axes[1].set_title("epoch 1: an order of its own")
plt.show()

# %% [markdown]
# Because the batch is a function, whoever asks gets the same one: again, in halves as
# two processes would, or for a batch in the middle of a later epoch that nobody has
# walked to.


# %%
def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


R = 8
edge = n // R  # the batch in which epoch 0 ends and epoch 1 begins
for position in (0, 7, edge, 10 * edge):
    whole = data.batch(position, range(R), R)
    assert same(whole, data.batch(position, range(R), R))
    halves = [data.batch(position, range(r, r + R // 2), R) for r in (0, R // 2)]
    assert same(whole, [torch.cat(pair) for pair in zip(*halves, strict=True)])

rows = [data.batch(position, range(R), R)[3] for position in range(edge + 1)]
assert torch.cat(rows)[:n].unique().numel() == n

# %% [markdown]
# ### What breaks: drawing at random
# Drawing a random start for every row is shorter to write. After as many draws as there
# are windows, a share of $(1 - 1/n)^n \approx 1/e$ of them has never been seen.

# %%
drawn = torch.randint(n, (n,), generator=torch.Generator().manual_seed(0))
missed = 1 - drawn.unique().numel() / n
assert abs(missed - math.exp(-1)) < 0.03

# %% [markdown]
# ## Bits per byte
# A loss in nats per token says little: it depends on what a token is. A fairer unit is
# the length of the text when the model is used to compress it. A token of probability
# $p$ costs $-\log_2 p$ bits, so
#
# $$\text{bits per byte} = \frac{-\sum_{\text{targets}} \log_2 p(\text{target})}
# {\text{bytes of text}} .$$
#
# The EOS targets are in the sum, because the model must predict them too, but an EOS is
# no byte of text. Three yardsticks: a *uniform* guess over 257 tokens, the best guess
# that ignores all context (the frequencies of the bytes), and `zlib -9` on the same
# bytes. A model that has learned nothing must be at the first.

# %%
val = PretrainDataset("tokens", seq_len=128, seed=0, split="val")
n_targets = val.n_tokens - 1
uniform = math.log2(257) * n_targets / val.n_bytes

counts = np.bincount(data.stream.tokens(0, data.n_tokens), minlength=257) + 1
cost = -np.log2(counts / counts.sum())
unigram = cost[val.stream.tokens(1, val.n_tokens)].sum() / val.n_bytes
zlib_bpb = zlib_bits_per_byte(val.text_bytes())

loss_sum, counted = evaluate(model, val, batch_rows=32)
at_start = bits_per_byte(loss_sum, val.n_bytes)
assert counted == n_targets
assert 0.9 < at_start / uniform < 1
assert zlib_bpb < unigram < uniform

# %% [markdown]
# Near, but not quite there: a little below. Does the model know something
# already? Its embedding is also its output matrix, so the vector of the token just read
# scores highest with itself, and the untrained model expects that token once more. Code
# is full of spaces after spaces. Where the target is another token than the input,
# there is nothing to gain:

# %%
tokens, targets, doc_ids, _ = data.batch(0, range(8), 8)
with torch.no_grad():
    logits = model(tokens, doc_ids=doc_ids).flatten(0, 1)
nats = F.cross_entropy(logits, targets.flatten(), reduction="none")
again = (tokens == targets).flatten()
assert nats[again].mean() < math.log(257) - 1
assert abs(nats[~again].mean() / math.log(257) - 1) < 0.05

# %% [markdown]
# A start far from $\log_2 257 \approx 8.0$ is the cheapest warning there is. Above it,
# the initialization is too large: the model is not ignorant but wrong. Far below it,
# the model sees something that it should not.

# %%
torch.manual_seed(0)
loud = Mamba3Transformer(MODEL | {"init_std": 1.0})
loss_sum, counted = evaluate(loud, val, batch_rows=32, windows=range(32))
bpb = loss_sum / math.log(2) / counted  # of a few windows: a byte is nearly a target
assert bpb > 2 * uniform

# %% [markdown]
# ## One optimizer step
# `train_step` is twenty lines, and here they are by hand. A batch comes as
# micro-batches, small enough for the memory. With $V_m$ the valid targets of
# micro-batch $m$ the loss of the step is
#
# $$\mathcal{L} = \frac{\sum_m \sum_{v \in V_m} -\log p_v}{\sum_m |V_m|} ,$$
#
# one mean over *all* valid targets, and its gradient is the sum of what each
# micro-batch leaves in `.grad`. Then the gradient $g$, all parameters taken together,
# is clipped:
#
# $$g \leftarrow g \cdot \min\left(1, \frac{c}{\lVert g \rVert}\right) .$$


# %%
def step_by_hand(model, optimizer, batches, clip):
    n_valid = sum((targets != -100).sum() for _, targets, _ in batches)
    for tokens, targets, doc_ids in batches:
        logits = model(tokens, doc_ids=doc_ids).flatten(0, 1)
        nats = F.cross_entropy(
            logits, targets.flatten(), ignore_index=-100, reduction="sum"
        )
        (nats / n_valid).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(min(1.0, clip / norm.item()))
    optimizer.step()
    project_decay_rates(model)  # keeps Re(A) <= -0.0001
    optimizer.zero_grad()
    return norm.item()


# %% [markdown]
# To compare, take plain gradient descent with a step of 1: what it adds to the
# parameters *is* minus the gradient. (AdamW would hide a wrong scale, because it
# divides by it.)


# %%
def flat(model):
    """All parameters as one real vector."""
    parameters = [p.detach() for p in model.parameters()]
    real = [torch.view_as_real(p) if p.is_complex() else p for p in parameters]
    return torch.cat([p.flatten() for p in real])


def change(step, batches, clip=1e9):
    """What `step` returns, and what it adds to the parameters of a fresh model."""
    torch.manual_seed(0)
    model = Mamba3Transformer(MODEL)
    before = flat(model)
    result = step(model, torch.optim.SGD(model.parameters(), lr=1.0), batches, clip)
    return result, flat(model) - before


# %%
def package_step(model, optimizer, batches, clip):
    return train_step(model, optimizer, batches, grad_clip=clip)


def relative_error(got, wanted):
    return ((got - wanted).norm() / wanted.norm()).item()


def cut(batch, rows):
    """A batch in micro-batches of some rows each."""
    return list(zip(*(part.split(rows) for part in batch), strict=True))


batch = data.batch(0, range(8), 8)[:3]
norm, by_hand = change(step_by_hand, [batch])
result, whole = change(package_step, [batch])
assert math.isclose(result.grad_norm, norm, rel_tol=1e-5)
assert relative_error(whole, by_hand) < 1e-5

# %% [markdown]
# **Accumulation.** Two micro-batches of four rows are one batch of eight: the same
# loss, the same gradient. Memory for activations is halved, and nothing else changes.
# So is **clipping**: the length is cut, the direction kept.

# %%
accumulated, in_two = change(package_step, cut(batch, 4))
assert math.isclose(accumulated.loss, result.loss, rel_tol=1e-6)
assert relative_error(in_two, whole) < 1e-5

limit = 0.1
before_clip, clipped = change(package_step, [batch], clip=limit)
assert before_clip.grad_norm > 2 * limit, "the norm reported is the one before clipping"
assert math.isclose(clipped.norm().item(), limit, rel_tol=1e-3)
assert F.cosine_similarity(clipped, whole, dim=0) > 0.9999

# %% [markdown]
# ### What breaks: a mean in every micro-batch
# The tempting loop takes the mean loss of each micro-batch and divides by their number.
# While every target is valid this is the same. Mask some, as one does for padding or
# for prompts, and it is not: a target in a nearly empty micro-batch then counts many
# times as much as one in a full one.


# %%
def mean_of_means(model, optimizer, batches, clip):
    for tokens, targets, doc_ids in batches:
        loss = model(tokens, targets=targets, doc_ids=doc_ids)
        (loss / len(batches)).backward()
    optimizer.step()
    project_decay_rates(model)


# %%
tokens, targets, doc_ids = batch
some = targets.clone()
some[4:, 8:] = -100  # in the last four rows only the first 8 targets are left
masked = (tokens, some, doc_ids)
errors = {}
for name, case in (("all targets valid", batch), ("some masked", masked)):
    _, wanted = change(package_step, [case])
    errors[name] = [
        relative_error(change(step, cut(case, 4))[1], wanted)
        for step in (package_step, mean_of_means)
    ]
assert max(errors["all targets valid"]) < 1e-5, "no test without a mask sees it"
assert errors["some masked"][0] < 1e-5
assert errors["some masked"][1] > 0.1

valid = [(part != -100).sum().item() for part in some.split(4)]
weights = [1 / (len(valid) * count) for count in valid]
assert math.isclose(weights[1] / weights[0], 16), "16 times the weight"

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.9))
for i, name in enumerate(errors):
    for j, color in enumerate((GREEN, RED)):
        bar = ax.bar(i + 0.4 * j - 0.2, errors[name][j], 0.36, color=color)
        bar[0].set_hatch("//" if j else "")
ax.axhline(1e-5, color=BLACK, lw=0.8, ls=":")
ax.set_yscale("log")
ax.set_xticks(range(2), list(errors))
ax.set(ylabel="relative error of the gradient", ylim=(1e-9, 10))
ax.set_title("Hatched: a mean per micro-batch. Wrong as soon as targets are masked")
plt.show()

# %% [markdown]
# ## What decays, and what does not
# AdamW moves a parameter by its averaged gradient, scaled by the root of its averaged
# square, and shrinks it on its own account:
#
# $$\theta \leftarrow (1 - \eta \lambda)\, \theta
# - \eta\, \frac{\hat m}{\sqrt{\hat v} + \epsilon} .$$
#
# *Should everything shrink?* A matrix, yes. A norm's weight, no: its neutral value is
# 1. And the decay rates $A$, least of all: shrinking $A$ towards 0 slows the
# forgetting, and $A = 0$ is a state that never forgets. So there are three groups, and
# each parameter is in exactly one. (The complex $A$ also has a group of its own because
# the fused AdamW of a GPU takes no complex numbers.)

# %%
groups = parameter_groups(model, weight_decay=0.1, fused=False)
for group in groups:
    size = sum(p.numel() for p in group["params"])
    names = [re.sub(r"layers\.\d+\.", "", name) for name in group["param_names"]]
    print(f"{group['name']:9s} weight decay {group['weight_decay']:.1f} {size:7,d}")
    print(f"    {', '.join(sorted(set(names)))}")

placed = [name for group in groups for name in group["param_names"]]
assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
assert len(placed) == len(set(placed))
decays = {name: g["weight_decay"] for g in groups for name in g["param_names"]}
for name, parameter in model.named_parameters():
    assert (decays[name] > 0) == (parameter.ndim == 2 and not parameter.is_complex())

# %% [markdown]
# ### What breaks: decay on A
# With no gradient at all, $k$ steps multiply $A$ by $(1 - \eta\lambda)^k$, and the
# memory $1 / |\operatorname{Re} A|$ grows by the inverse: a state that remembers longer
# and longer for no reason in the data. The other guard is a projection after each step,
# $\operatorname{Re} A \le -10^{-4}$, so that no update can turn decay into growth.

# %%
A = torch.nn.Parameter(torch.tensor([-1.0 + 0.5j]))
optimizer = torch.optim.AdamW([A], lr=1e-2, weight_decay=0.1)
for _ in range(1000):
    A.grad = torch.zeros_like(A)
    optimizer.step()
memory = 1 / -A.detach().real.item()
assert math.isclose(memory, (1 - 1e-3) ** -1000, rel_tol=1e-4)
print(f"after 1000 steps without a gradient: {memory:.2f} times the memory")

torch.manual_seed(0)
growing = Mamba3Transformer(MODEL)
rates = [p for p in growing.parameters() if p.is_complex()]
with torch.no_grad():
    rates[0].real.fill_(0.5)  # a state that grows
project_decay_rates(growing)
assert all(rate.real.max() <= -1e-4 for rate in rates)

# %% [markdown]
# ## The learning rate is a function of the step
# With warm-up of $w$ steps, a peak $\eta$, a floor $\rho \eta$ and $S$ steps in all,
# step $k = 1 \dots S$ has
#
# $$\eta_k = \begin{cases}
# \eta \, k / w & k \le w \\
# \rho \eta + (1 - \rho)\, \eta \cdot \frac{1}{2}
# \left(1 + \cos \pi \frac{k - w}{S - w}\right) & k > w .
# \end{cases}$$
#
# It has no memory either: a run that resumes at step $k$ asks for $\eta_k$ and has it.
#
# The cosine knows where it ends: $S$ is in every value of it, and a run that shall go
# on longer should have gone slower from the start. `schedule: wsd` (warm-up, stable,
# decay) stays at $\eta$ and falls in the last $D$ steps alone,
#
# $$\eta_k = \rho \eta + (1 - \rho)\, \eta
# \left(1 - \sqrt{\frac{k - (S - D)}{D}}\right), \qquad k > S - D ,$$
#
# so a checkpoint from before the fall belongs to a run of any length.

# %%
S = 300
training = TrainingConfig(total_steps=S, warmup_steps=30, lr=5e-3, min_lr_ratio=0.05)
rates = [learning_rate(step, S, training) for step in range(1, S + 1)]
assert math.isclose(rates[0], 5e-3 / 30), "the first step is small, but not zero"
assert math.isclose(max(rates), 5e-3) and rates.index(max(rates)) == 30 - 1
assert math.isclose(rates[-1], 0.05 * 5e-3)
assert math.isclose(rates[165 - 1], (5e-3 + 0.05 * 5e-3) / 2), "half way down"

wsd = training.model_copy(update={"schedule": "wsd"})
falling = wsd.decay_steps(S)
stable = [learning_rate(step, S, wsd) for step in range(1, S + 1)]
longer = [learning_rate(step, 2 * S, wsd) for step in range(1, S + 1)]
assert falling == 60 and stable[:30] == rates[:30]
assert set(stable[30:240]) == {5e-3} and longer[:240] == stable[:240]
assert math.isclose(stable[255 - 1], 5e-3 * (0.05 + 0.95 / 2)), "a quarter in: half"
assert math.isclose(stable[-1], 0.05 * 5e-3)

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.7))
ax.plot(range(1, S + 1), stable, color=ORANGE, ls="--", label="wsd")
ax.plot(range(1, S + 1), rates, color=BLUE, label="cosine")
ax.axvline(30, color=BLACK, lw=0.8, ls=":")
ax.axhline(0.05 * 5e-3, color=BLACK, lw=0.8, ls=":")
ax.set(xlabel="optimizer step", ylabel="learning rate", ylim=(0, None))
ax.set_title("Up in a line; down half a cosine, or level and then down at the end")
ax.legend(fontsize=9, loc="lower left", bbox_to_anchor=(0.1, 0.1))
plt.show()

# %% [markdown]
# ## A run
# A run is described by one file with three sections, and every value in it is checked
# before anything else happens. A key that does not exist is not ignored:

# %%
settings = {
    "model": MODEL,
    "training": {
        "micro_batch_size": 8,
        "total_steps": 300,
        "warmup_steps": 30,
        "lr": 5e-3,
        "eval_interval": 50,
        "eval_windows": 64,
        "sample_interval": 100,
        "save_interval": 100,
        "log_interval": 10,
        "keep_last": 2,
    },
    "data": {"train_data_path": "tokens"},
}
with open("first.yaml", "w") as file:
    yaml.safe_dump(settings, file)

# %%
try:
    load_config("first.yaml", ["training.learning_rate=1"])
    raise AssertionError("a misspelt setting was accepted")
except ConfigError as error:
    print(error)
config = load_config("first.yaml", ["training.seed=1"])
assert config.training.seed == 1
assert config.tokens_per_step == 8 * 128
assert config.training.save_dir == "runs/first"

# %% [markdown]
# Everything met so far is one object now. `Pretrainer.run` loops over the steps,
# evaluates, samples, saves, and ends with an evaluation of the whole validation split.

# %% tags=["nbval-ignore-output"]
config = load_config("first.yaml")
run = Pretrainer(config, Path("tokens"), Display(config.total_steps))
run.final_sample_tokens = 200
report = io.StringIO()
with contextlib.redirect_stdout(report):
    assert run.run("never") is True
lines = report.getvalue().splitlines()
print(f"{count_parameters(run.model):,} parameters")
print("\n".join([*lines[:6], "...", *lines[-5:]]))
assert len(list_checkpoints(Path("runs/first/checkpoints"))) == 2
assert count_parameters(run.model) == sum(p.numel() for p in model.parameters())

# %% [markdown]
# What is left on the disk: the configuration as it was resolved, one JSON object a line
# for every measurement, a picture, the samples, and checkpoints. A checkpoint's
# manifest has the size and sha256 of its other files and is written last, then the
# folder gets its name; so a checkpoint is either whole or not there.

# %%
for path in sorted(Path("runs/first").rglob("*")):
    if path.is_file():
        print(path.as_posix())
newest = list_checkpoints(Path("runs/first/checkpoints"))[-1]
verify_checkpoint(newest)
assert newest.name == "step_00000300"
assert load_config("runs/first/config.yaml") == config
fresh = Mamba3Transformer(MODEL)
load_model(newest, fresh)
assert torch.equal(flat(fresh), flat(run.model))

# %% [markdown]
# The numbers first. The learning rate that was logged is the formula; the loss fell;
# and the last evaluation covers all of the validation split, on the same bytes as
# `zlib`.

# %%
rows = read_metrics(Path("runs/first/metrics.jsonl"))
steps = [row for row in rows if "loss" in row]
checks = [row for row in rows if "val_bpb" in row]
final = checks[-1]
assert [row["step"] for row in steps] == list(range(10, 301, 10))
for row in steps:
    assert row["lr"] == learning_rate(row["step"], 300, config.training)
    assert row["tokens"] == row["step"] * 8 * 128 and row["tokens_per_s"] > 0
assert steps[-1]["loss"] < 0.6 * steps[0]["loss"]
assert final["val_windows"] == "all" and final["step"] == 300
assert math.isclose(final["zlib_bpb"], zlib_bpb)
bpb = [row["val_bpb"] for row in checks]
assert bpb[-1] < bpb[0] < uniform
assert zlib_bpb < bpb[-1] < 0.8 * unigram, "better than counting, not yet than zlib"

# %%
fig, axes = plt.subplots(1, 3, figsize=(8.6, 2.9))
step = [row["step"] for row in steps]
nats = [row["loss"] / math.log(2) for row in steps]
axes[0].plot(step, nats, color=SKY, label="training")
axes[0].plot([row["step"] for row in checks], bpb, "o-", color=BLUE, label="validation")
axes[0].axhline(zlib_bpb, color=RED, ls="--", label="zlib -9")
axes[0].axhline(unigram, color=ORANGE, ls=":", label="byte frequencies")
axes[0].set(ylabel="bits per token, bits per byte", title="Loss falls below counting")
axes[0].legend(fontsize=8)
axes[1].plot(step, [row["lr"] for row in steps], color=GREEN)
axes[1].set(ylabel="learning rate", title="The schedule, as logged", ylim=(0, None))
axes[2].plot(step, [row["tokens_per_s"] for row in steps], color=PINK)
axes[2].set(ylabel="tokens per second", title="Speed, as logged", ylim=(0, None))
for ax in axes:
    ax.set_xlabel("optimizer step")
plt.show()

# %% [markdown]
# The yardsticks of the beginning, with the model among them:

# %% tags=["nbval-ignore-output"]
print(f"uniform guess    {uniform:.2f} bits per byte")
print(f"byte frequencies {unigram:.2f}")
print(f"this model       {final['val_bpb']:.2f} after {final['time']:.0f} s")
print(f"zlib -9          {zlib_bpb:.2f}")

# %% [markdown]
# `zlib` still wins: this run saw 300 thousand tokens. The configuration of `make train`
# reads several times as many, with a larger model.

# %%
tiny = load_config("tiny")
assert tiny.total_steps * tiny.tokens_per_step > 5 * 300 * 1024
larger = Mamba3Transformer(tiny.model_fields_of_run())
assert count_parameters(larger) > count_parameters(run.model)

# %% [markdown]
# Samples make the same progress visible. All start from the empty prompt with the same
# seed.

# %% tags=["nbval-ignore-output"]
samples = Path("runs/first/samples.txt").read_text()
parts = samples.split("===== step ")[1:]
assert [int(part[:8]) for part in parts] == [100, 200, 300]
print(f"three samples of one run of {final['time']:.0f} s")
for part in parts:
    text = part.split("\n", 1)[1]
    print(f"--- after {int(part[:8])} steps")
    print(text[:160].rstrip())

# %% [markdown]
# Sampling goes through the model's recurrent face: the prompt in one scan, then one
# step a token, from the states alone. The seed belongs to the call, so it repeats:

# %% tags=["nbval-ignore-output"]
prompt = data.tokenizer.encode("    def ").tolist()
options = {"eos_id": data.eos_id, "max_new_tokens": 100, "seed": 3}
begin = time.perf_counter()
first = generate(run.model, prompt, **options)
seconds = time.perf_counter() - begin
assert first == generate(run.model, prompt, **options)
print("    def " + data.tokenizer.decode(first))
print(f"{len(first)} bytes in {seconds:.1f} s")

# %% [markdown]
# ## What breaks: the rate and its warm-up
# Adam's first steps are its worst: with no history, each parameter moves by the full
# rate, whatever the size of its gradient. Warm-up makes these steps small. At a modest
# rate one hardly sees the difference. At a rate that is too high it is plain; and far
# above, the model is worse than knowing nothing.


# %%
def losses(steps, kind=Pretrainer, **changes):
    """Training losses of a fresh run, in memory; nothing is written."""
    overrides = [f"training.{key}={value}" for key, value in changes.items()]
    config = load_config("first.yaml", overrides)
    run = kind(config, Path("tokens"), Display(300))
    return [run.next_step().loss for _ in range(steps)], run


curves = {
    "0.005, warm-up 30": losses(60)[0],
    "0.03, warm-up 30": losses(60, lr=0.03)[0],
    "0.03, no warm-up": losses(60, lr=0.03, warmup_steps=0)[0],
    "0.3, no warm-up": losses(60, lr=0.3, warmup_steps=0)[0],
}
right, high, cold, wild = (np.array(curve) for curve in curves.values())
assert right[-10:].mean() < cold[-10:].mean() - 0.1
assert high[-10:].mean() < cold[-10:].mean() - 0.1, "warm-up saves part of it"
assert wild.max() > 1.5 * math.log(257), "worse than a uniform guess"
assert wild[-10:].mean() > right[-10:].mean() + 0.2

# %%
fig, ax = plt.subplots()
styles = zip(curves.items(), (BLUE, GREEN, ORANGE, RED), "osv^", strict=True)
for (name, curve), color, marker in styles:
    ax.plot(curve, color=color, marker=marker, markevery=10, label=f"rate {name}")
ax.axhline(math.log(257), color=BLACK, ls=":", lw=1)
ax.text(20, math.log(257), "uniform guess", va="bottom", fontsize=9)
ax.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
ax.set_yscale("log")
ax.set_yticks([2, 3, 4, 6, 10, 20], ["2", "3", "4", "6", "10", "20"])
ax.set_title("Too high a rate costs more than it brings; warm-up softens it")
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## What breaks: targets that are not shifted
# The loveliest loss curve of all. Give the model its own input as target and it learns
# to copy; the loss runs to zero within a few steps. Only an evaluation with the right
# targets tells, and it is far worse than a uniform guess.


# %%
class Unshifted(Pretrainer):
    def batches(self, position):
        return [(x, x, doc_ids) for x, _, doc_ids in super().batches(position)]


copying, copier = losses(60, kind=Unshifted)
assert copying[-1] < 0.1 * right[-1], "what a beautiful curve"
loss_sum, counted = evaluate(copier.model, val, batch_rows=32, windows=range(64))
honest = loss_sum / counted
assert honest > math.log(257), "and it predicts nothing"

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.9))
ax.plot(right, color=BLUE, label="shifted: predicts")
ax.plot(copying, color=RED, ls="--", label="not shifted: copies")
ax.plot([59], [honest], "X", color=RED, markersize=9, label="the copier, validated")
ax.axhline(math.log(257), color=BLACK, ls=":", lw=1)
ax.text(0, math.log(257) * 1.05, "uniform guess", va="bottom", fontsize=9)
ax.set(xlabel="optimizer step", ylabel="loss (nats per token)", ylim=(0, None))
ax.set_title("A loss near zero is a bug until a validation says otherwise")
ax.legend(fontsize=9, loc="upper center")
plt.show()

# %% [markdown]
# ## A step that must not happen
# One NaN in one gradient, and clipping, which multiplies by $c / \lVert g \rVert$,
# spreads it over all parameters at once. Nothing comes back from there. So between
# `backward` and the update stands a check: loss *and* gradient norm must be finite, or
# the step does not happen.
#
# For this and the next section a second text, which is the same on every machine.

# %%
rng = np.random.default_rng(0)
sums = []
for _ in range(300):
    pairs = rng.integers(0, 100, size=(8, 2))
    sums.append("".join(f"{a} + {b} = {a + b}\n" for a, b in pairs))
records = [json.dumps({"text": text}) for text in sums]
Path("sums.jsonl").write_text("\n".join(records))
prepare("sums.jsonl", "byte", "sums", val_fraction=0.05, progress=quiet)

short = settings["training"] | {"total_steps": 24, "warmup_steps": 4, "log_interval": 1}
short |= {"eval_interval": 100, "save_interval": 8}
sums_settings = settings | {"training": short, "data": {"train_data_path": "sums"}}
with open("sums.yaml", "w") as file:
    yaml.safe_dump(sums_settings, file)


# %%
def new_run(name, kind=Pretrainer, **changes):
    overrides = [f"training.{key}={value}" for key, value in changes.items()]
    overrides.append(f"training.save_dir=runs/{name}")
    run = kind(load_config("sums.yaml", overrides), Path("sums"), Display(24))
    run.final_sample_tokens = 20
    return run


# %% [markdown]
# The poison: a hook on one matrix that makes a single entry of its gradient NaN, when
# the batch at position 4 comes by. The loss stays finite; a check of the loss alone
# would see nothing.


# %%
def poison(run, *positions):
    def hook(grad):
        if run.step + run.skipped in positions:
            grad = grad.clone()
            grad[0, 0] = math.nan
        return grad

    run.model.layers[0].in_proj.weight.register_hook(hook)
    return run


def bits(run):
    """Copies of all that training changes: parameters and AdamW's state."""
    tensors = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state[parameter].items():
            tensors[f"{name}.{key}"] = value.clone()
    return tensors


# %%
run = poison(new_run("poisoned"), 4)
for _ in range(4):
    assert run.next_step().problem is None
before = bits(run)
result = run.next_step()
after = bits(run)
print(result.problem)
assert math.isfinite(result.loss) and math.isnan(result.grad_norm)
assert len(after) == 4 * len([*run.model.parameters()])
assert before.keys() == after.keys()
assert all(torch.equal(before[name], after[name]) for name in before)
assert run.step == 4, "a step that did not happen is not counted"

# %% [markdown]
# Not one bit moved, in any parameter or in AdamW's averages. Now the whole run: the bad
# batch is noted in `metrics.jsonl` and passed over, and all 24 steps are taken.

# %%
run = poison(new_run("poisoned"), 4)
report = io.StringIO()
with contextlib.redirect_stdout(report):
    assert run.run("never") is True
print(next(line for line in report.getvalue().splitlines() if "warn" in line))
rows = read_metrics(run.metrics.path)
skipped = [row for row in rows if "skipped" in row]
assert skipped == [{"step": 4, "skipped": 1, "problem": "gradient norm is nan"}]
poisoned = [row["loss"] for row in rows if "loss" in row]
assert run.step == len(poisoned) == 24 and run.skipped == 1
assert all(tensor.isfinite().all() for tensor in bits(run).values())

# %% [markdown]
# ### What breaks: without the check
# The same poison with `nan_guard` off: after this one step no parameter is a number.

# %%
careless = poison(new_run("careless", nan_guard="false"), 4)
unguarded = [careless.next_step().loss for _ in range(8)]
assert all(math.isfinite(loss) for loss in unguarded[:5])
assert all(math.isnan(loss) for loss in unguarded[5:])
dead = [parameter.isnan().all().item() for parameter in careless.model.parameters()]
assert all(dead), "every entry of every parameter"

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.8))
ax.plot(range(1, 25), poisoned, "o-", color=BLUE, label="guarded: goes on")
ax.plot(range(1, 6), unguarded[:5], "X--", color=RED, label="unguarded: then NaN")
ax.axvline(4.5, color=BLACK, ls=":", lw=1)
ax.text(4.7, 4.8, "the poisoned batch", fontsize=9)
ax.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
ax.set_title("One NaN ends a run, or costs it one batch")
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## Back, and past
# One bad batch is bad luck. Several in a row say something else: the weights may have
# gone wrong already, some good-looking steps ago, and no batch will ever do again. Then
# the run goes *back* to its newest checkpoint. If that were all, it would read the same
# batches once more and come to the same end; so it goes on *past* every batch that it
# has read.
#
# Here the batches at 12, 13 and 14 are poisoned, and three in a row are too many. Let
# us write down where the run has been.


# %%
class Recorded(Pretrainer):
    def next_step(self):
        position = self.step + self.skipped
        result = super().next_step()
        self.path.append((position, self.step, result.problem))
        return result


back = poison(new_run("back", Recorded, nan_guard_max_consecutive=3), 12, 13, 14)
back.path = []
report = io.StringIO()
with contextlib.redirect_stdout(report):
    assert back.run("never") is True
print("\n".join(line for line in report.getvalue().splitlines() if "warn" in line))

rows = read_metrics(back.metrics.path)
(rollback,) = (row for row in rows if "rollback" in row)
assert rollback["step"] == 8 and rollback["skipped"] == 15 - 8
assert [row["step"] for row in rows if "loss" in row] == [*range(1, 25)]
assert [position for position, _, _ in back.path] == [*range(31)], "each batch once"
assert [step for _, step, problem in back.path if problem] == [12, 12, 12]

# %%
fig, ax = plt.subplots(figsize=(7.2, 2.9))
first, second = back.path[:12], back.path[15:]
for part, color, mark, label in (
    (first[:8], BLUE, "o", "kept"),
    (first[8:], SKY, "o", "undone"),
    (back.path[12:15], RED, "X", "not applied"),
    (second, BLUE, "o", None),
):
    ax.plot(*list(zip(*part, strict=True))[:2], mark, color=color, label=label)
ax.annotate("", (14.9, 8.2), (14.1, 11.8), arrowprops={"arrowstyle": "->"})
ax.axhline(8, color=BLACK, ls=":", lw=1)
ax.text(18, 8.3, "checkpoint of step 8", fontsize=9)
ax.set(xlabel="batch, in the order of the data", ylabel="optimizer steps taken")
ax.set_title("Three bad steps in a row: back to the checkpoint, on with new data")
ax.legend(fontsize=9, loc="lower right")
plt.show()

# %% [markdown]
# What has become of batches 8 to 14? They must have left nothing. Then the run is
# equal, to the last bit, to one that takes eight steps, jumps to batch 15 and takes the
# other sixteen, and never hears of a NaN:

# %%
never_there = new_run("never-there")
for step in range(24):
    if step == 8:
        never_there.skipped = 7
    assert never_there.next_step().problem is None
wanted, got = bits(never_there), bits(back)
assert all(torch.equal(wanted[name], got[name]) for name in wanted), "bit for bit"
assert (back.step, back.skipped) == (never_there.step, never_there.skipped)

# %% [markdown]
# ### What breaks: data without end
# If *every* batch is bad, going back does not help, and going back for ever would only
# look like training. After `max_rollbacks` the run stops and says what to try; its
# checkpoints are as they were.

# %%
hopeless = poison(
    new_run("hopeless", nan_guard_max_consecutive=3, max_rollbacks=2), *range(10, 99)
)
with contextlib.redirect_stdout(io.StringIO()):
    try:
        hopeless.run("never")
        raise AssertionError("it cannot have trained")
    except TrainingFailed as error:
        message = str(error)
print(message)
left = list_checkpoints(Path("runs/hopeless/checkpoints"))
assert [path.name for path in left] == ["step_00000000", "step_00000008"]
for path in left:
    verify_checkpoint(path)

# %% [markdown]
# ## Interrupted is the same as uninterrupted
# What decides the rest of a run? Parameters, AdamW's averages, the step, the count of
# batches passed over, the random numbers still to come. A checkpoint holds these; the
# batch and the learning rate are functions of the step. So a run that was stopped and
# continued must end with *the same bits* as one that was not. *Does it?*
#
# First a run from start to end. Then one that gets a stop request in its step 9: it
# finishes the step, saves, and returns `False`. The request is what the trainer's
# signal handler notes when Ctrl-C or SIGTERM arrives.


# %%
class Interrupted(Pretrainer):
    def next_step(self):
        result = super().next_step()
        if self.step == 9:
            self.stop.received = signal.SIGTERM
        return result


whole = new_run("whole")
stopped = new_run("parts", kind=Interrupted)
with contextlib.redirect_stdout(io.StringIO()):
    assert whole.run("never") is True
    assert stopped.run("never") is False
stop = Path("kept/step_00000009")  # a copy, for the end of this section
shutil.copytree(stopped.run_dir / "checkpoints" / stop.name, stop)
saved = [path.name for path in list_checkpoints(Path("runs/parts/checkpoints"))]
assert saved == ["step_00000008", "step_00000009"]

# %% [markdown]
# Then a new object, which knows nothing, in the same folder. `must` means: fail rather
# than start over.

# %%
resumed = new_run("parts")
report = io.StringIO()
with contextlib.redirect_stdout(report):
    assert resumed.run("must") is True
print(report.getvalue().splitlines()[0])


def curve(run):
    rows = read_metrics(run.metrics.path)
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


wanted, got = bits(whole), bits(resumed)
assert wanted.keys() == got.keys()
assert all(torch.equal(wanted[name], got[name]) for name in wanted), "bit for bit"
assert curve(resumed) == curve(whole), "each step once, and the same loss"
assert whole.sample(20) == resumed.sample(20)

# %% [markdown]
# ### Killed, not asked
# A stop request is polite. `kill -9`, a power cut or a full memory are not: nothing
# runs after them, and the steps since the last checkpoint are gone. What must be true
# is that they come again, the same. So a process of its own trains here, by the
# plain-script door, and kills itself before step 14; its newest checkpoint is that of
# step 8.

# %%
CHILD = """
import os, signal, sys
from mamba3lite.training import pretrain

class Killed(pretrain.Pretrainer):
    def next_step(self):
        if self.step == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().next_step()

pretrain.Pretrainer = Killed
pretrain.main(sys.argv[1:])
"""
door = ["--config", "sums.yaml", "--checkpoint-dir", "runs/killed"]
dead = subprocess.run(
    [sys.executable, "-c", CHILD, *door],
    env=os.environ | {"OMP_NUM_THREADS": "1"},
    capture_output=True,
)
assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
there = [path.name for path in list_checkpoints(Path("runs/killed/checkpoints"))]
assert there == ["step_00000000", "step_00000008"]

# %%
revived = new_run("killed")
assert curve(revived)[-1][0] == 13, "it was at step 13 when it died"
report = io.StringIO()
with contextlib.redirect_stdout(report):
    assert revived.run("must") is True
print(report.getvalue().splitlines()[0])
got = bits(revived)
assert all(torch.equal(wanted[name], got[name]) for name in wanted), "bit for bit"
assert curve(revived) == curve(whole), "steps 9 to 13 stand there once"

# %% [markdown]
# ### What breaks: a part forgotten
# Saving the parameters alone is the classic shortcut. AdamW then begins again without
# history, in the middle of the run and at full rate, and the loss jumps. Or everything
# is restored but the place in the data: the run reads again what it has just read. On
# this text no curve tells; the bits do.


# %%
def resume(name, optimizer=True, position=True):
    """Losses of steps 10 to 24 after a resume that may forget something."""
    run = new_run(name)
    with contextlib.redirect_stdout(io.StringIO()):
        run.restore(stop)
    if not optimizer:
        run.optimizer = build_optimizer(run.model, run.config.training)
    if not position:
        run.skipped -= run.step  # so step 10 reads the batch of step 1 again
    return [run.next_step().loss for _ in range(15)]


expected = [loss for _, loss in curve(whole)]
complete = resume("complete")
no_moments = resume("no-moments", optimizer=False)
same_data = resume("same-data", position=False)
assert complete == expected[9:], "with everything restored, equal to the last bit"
assert no_moments[0] == expected[9], "the first loss still agrees: same weights, batch"
assert max(no_moments[1:4]) > max(expected[10:13]) + 0.05, "then it jumps"
assert same_data[0] != expected[9] and same_data[-1] != expected[-1]
assert max(abs(a - b) for a, b in zip(same_data, expected[9:], strict=True)) < 0.25

# %%
fig, ax = plt.subplots(figsize=(7.2, 3))
after = range(10, 25)
ax.plot(range(1, 25), expected, color=BLACK, lw=1.2, label="never interrupted")
ax.plot(after, complete, "o", color=GREEN, ms=11, mfc="none", label="resumed")
ax.plot(after, no_moments, "^--", color=RED, label="without AdamW's averages")
ax.plot(after, same_data, "s:", color=ORANGE, label="from the first batch again")
ax.axvline(9.5, color=BLACK, ls=":", lw=1)
ax.set(xlabel="optimizer step", ylabel="training loss (nats per token)")
ax.set_title("Only a complete checkpoint continues the same run")
ax.legend(fontsize=9)
plt.show()

# %% [markdown]
# ## How to go on
# The same from a shell, with the shipped configuration `tiny`:
#
# ```
# make train                                     # prepare, train, evaluate, sample
# mamba3lite train --config tiny --set training.lr=1e-3 --set training.save_dir=runs/b
# mamba3lite plot runs/tiny runs/b               # several runs in one picture
# mamba3lite generate --checkpoint runs/tiny --prompt "def "
# ```
#
# Ctrl-C stops a run after its step and saves it; the same command continues. For a text
# of your own, `--set data.source=PATH` with a file or a folder.
# [From text to a model](../docs/guides/pretrain-cli.md) walks through the commands,
# [when something goes wrong](../docs/guides/training-runbook.md) says what to do about
# each message, and [tuning](../docs/guides/tuning.md) which settings to turn first.
#
# The run folder holds what you have seen: `config.yaml`, `metrics.jsonl`, `curves.png`,
# `samples.txt`, `checkpoints/`. The step is in `mamba3lite/training/step.py`, the run
# around it in `run.py`, the schedule and the groups in `optim.py`, the sampler in
# `data.py`, checkpoints in `checkpoint.py`, and what keeps a run safe in `recovery.py`,
# all beside it.
#
# `mamba3lite plot` is one function:

# %%
plot_runs([Path("runs/whole"), Path("runs/poisoned")], Path("both.png"))
assert Path("both.png").read_bytes().startswith(b"\x89PNG")

# %% [markdown]
# ## Pitfalls
# - **Shift once.** A loss near zero means that the targets are the inputs.
# - **The first loss is $\ln V$**, to a few percent. Check it before anything else.
# - **Normalize by all valid targets** of the step, not by those of a micro-batch.
# - **Clip before the update, check before the clip's result is used**: a NaN in one
#   gradient is a NaN in all.
# - **No weight decay on $A$**, nor on norms.
# - **A step is an optimizer step**, whatever the accumulation: the schedule, the
#   intervals and the budget all count these.
# - **Bits per byte, over all of the validation text**, EOS targets included. A loss per
#   token cannot be compared across tokenizers.
# - **A checkpoint is more than weights**, and resuming is proven by equal bits, not by
#   a curve that looks right.
# - **Going back means going past**: the same batches would lead to the same end.
#
# Each of them is a test, in `tests/test_train_step.py`, `tests/test_data.py`,
# `tests/test_checkpoint.py`, `tests/test_faults.py` or `tests/test_fault_steps.py`.
#
# **Next:** [notebook 09](09_decoding.ipynb) lets the model write.

# %%
os.chdir(home)
folder.cleanup()

# %% tags=["nbval-ignore-output"]
print(f"this notebook ran in {time.perf_counter() - started:.0f} s")
