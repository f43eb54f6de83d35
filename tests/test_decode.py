"""The recurrent step and its prefill: against the oracle and full forward passes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import tiny_model

from mamba3lite.models import decode, ssd_triton
from mamba3lite.models.config import ModelConfig
from mamba3lite.models.decode import (
    RecurrentCache,
    recurrent_prefill,
    recurrent_step,
)
from mamba3lite.models.ssd_complex import ssd_naive_complex
from mamba3lite.models.ssd_triton import HAS_TRITON
from mamba3lite.models.transformer import Mamba3Transformer

CHUNK, VOCAB = 16, 257
# The sides that the kernels of a step take; V and in_proj leave tiles half empty.
SIZES = {"d_model": 32, "head_dim": 16, "state_dim": 8, "ffn_dim": 48, "vocab_size": 37}
LENGTHS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 5, 2 * CHUNK + 7]


def awake_model(seed: int = 0, **sizes) -> Mamba3Transformer:
    """A model away from its start, where gains are 1 and mixers the identity."""
    model, g = tiny_model(seed, **sizes).eval(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1 and not p.is_complex():
                p.uniform_(0.5, 1.5, generator=g)
            elif p.ndim == 2:
                p.add_(0.1 * torch.randn(p.shape, generator=g))
    return model


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def random_tokens(*shape: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, shape, generator=g)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(seed=st.integers(0, 2**16), time=st.integers(1, 60))
def test_the_step_is_the_recurrence(seed, time):
    """Against the loop over the whole sequence in complex128, every step its own dt."""
    layer = tiny_model(seed % 7).layers[0]
    g = torch.Generator().manual_seed(seed)
    H, D, N = layer.cfg.n_heads, layer.cfg.head_dim, layer.cfg.state_dim
    proj = 2 * torch.randn(2, time, sum(layer._columns), generator=g)
    parts = [z.unflatten(-1, (H, -1)) for z in proj.double().split(layer._columns, -1)]
    y, final = ssd_naive_complex(
        parts[0],
        layer.A.detach().to(torch.complex128),
        torch.complex(*parts[1:3]),
        torch.complex(*parts[3:5]),
        parts[5].squeeze(-1),
        return_final_states=True,
    )
    state, got = torch.zeros(2, H, D, N, dtype=torch.complex64), []
    with torch.no_grad():
        for t in range(time):
            out, state = decode._recurrence(layer, proj[:, t : t + 1], state)
            got.append(out)
    assert relative_error(torch.cat(got, 1), y.real) < 1e-5
    assert relative_error(state, final) < 1e-5


def decode_all(model, cache, tokens, lengths, slots, step=recurrent_step):
    """Logits from the end of each prompt on, (E, steps + 1, V)."""
    rows, lengths = torch.arange(len(tokens)), torch.as_tensor(lengths)
    logits = [recurrent_prefill(model, tokens, lengths, cache, slots)]
    for i in range(tokens.shape[1] - int(lengths.max())):
        logits.append(step(model, tokens[rows, lengths + i], cache, slots))
    return torch.stack(logits, 1)


def full_logits(model, tokens, lengths, steps):
    """The same rows of one forward pass over the whole texts."""
    with torch.no_grad():
        logits = model(tokens)
    at = torch.as_tensor(lengths)[:, None] - 1 + torch.arange(steps)
    return logits[torch.arange(len(tokens))[:, None], at]


@pytest.mark.processor
def test_prefill_and_steps_equal_one_forward_pass():
    model, tokens = awake_model(), random_tokens(6, 2 * CHUNK + 7 + CHUNK + 5)
    cache = RecurrentCache(model, 8)
    got = decode_all(model, cache, tokens, LENGTHS, int32(3, 0, 7, 1, 6, 2))
    expected = full_logits(model, tokens, LENGTHS, got.shape[1])
    assert got.shape[1] == CHUNK + 6
    assert got.dtype == torch.float32
    assert relative_error(got, expected) < 1e-5
    assert (cache.states[:, 4:6] == 0).all(), "slots of nobody are not touched"


# Two values of every number, or what a kind of field may hold besides.
OTHER = {
    "vocab_size": 41, "d_model": 48, "n_layers": 2, "n_heads": 3, "head_dim": 32,
    "state_dim": 32, "chunk_size": 32, "ffn_dim": 48, "max_seq_len": 8,
    "rms_norm_eps": 0.1, "init_std": 0.3,
}  # fmt: skip
USUAL = {
    "vocab_size": 37, "d_model": 32, "n_layers": 1, "n_heads": 2, "head_dim": 16,
    "state_dim": 16, "chunk_size": 16, "ffn_dim": 32, "max_seq_len": 64,
    "rms_norm_eps": 1e-5, "init_std": 0.1,
}  # fmt: skip


def values_of(field: dataclasses.Field) -> tuple:
    """Every choice, both ways of a switch, two values of a number."""
    if field.name in ModelConfig._CHOICES:
        return ModelConfig._CHOICES[field.name]
    if isinstance(field.default, bool):
        return False, True
    return USUAL[field.name], OTHER[field.name]  # a new field: give it two values


def every_field() -> list:
    return [
        pytest.param({field.name: value}, id=f"{field.name}={value}")
        for field in dataclasses.fields(ModelConfig)
        for value in values_of(field)
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", every_field())
@pytest.mark.parametrize("mode", ["recurrent", "exact"])
def test_decode_equals_forward_for_every_field(changes, mode):
    """A field cannot be added to the model and forgotten by the step.

    Exact decode is compared in bits where PyTorch computes; interpreted kernels run on
    whatever NumPy's products are.
    """
    if changes.get("ssd_dispatch", "pytorch") != "pytorch" and not HAS_TRITON:
        pytest.skip("requires triton")
    if mode == "exact":
        if changes in ({"ssd_dispatch": "triton"}, {"batch_invariant": False}):
            pytest.skip("exact decode refuses it")
        changes = changes | {"batch_invariant": True}
    if "ssd_precision" in changes:
        changes = changes | {"ssd_dispatch": "fused"}
    model = awake_model(**{"a_init": "spectrum"} | USUAL | changes).requires_grad_(
        False
    )
    tokens, lengths = random_tokens(2, 24, vocab=USUAL["vocab_size"]), [19, 5]
    cache = (RecurrentCache if mode == "recurrent" else decode.ExactCache)(model, 2)
    slots, steps = int32(1, 0), 5
    rows, start = torch.arange(2), torch.tensor(lengths)
    read, step = {
        "recurrent": (recurrent_prefill, recurrent_step),
        "exact": (decode.exact_prefill, decode.exact_step),
    }[mode]
    got = [read(model, tokens[:, :19], start, cache, slots)]
    got += [step(model, tokens[rows, start + i], cache, slots) for i in range(steps)]
    wanted = full_logits(model, tokens, lengths, steps + 1)
    bound = {"tf32": 5e-3, "bf16": 5e-2}.get(changes.get("ssd_precision"), 1e-4)
    if model.cfg.ssd_dispatch == "fused":
        bound = max(bound, 5e-3)  # whose precision is tf32 unless it is set
    assert relative_error(torch.stack(got, 1), wanted) < bound
    if mode == "exact" and model.cfg.ssd_dispatch == "pytorch":
        assert torch.equal(torch.stack(got, 1), wanted)


def test_a_field_that_decoding_does_not_know_is_refused_unless_it_is_unused():
    """A new recurrence trains right; a step that was forgotten would write nonsense."""

    @dataclasses.dataclass
    class Extended(ModelConfig):
        input_rule: str = "plain"
        _CHOICES = ModelConfig._CHOICES | {"input_rule": ("plain", "scaled")}

    small = dataclasses.asdict(tiny_model().cfg)
    assert RecurrentCache(Mamba3Transformer(Extended(**small)), 1)
    model = Mamba3Transformer(Extended(**small, input_rule="scaled"))
    with pytest.raises(ValueError, match="input_rule is 'scaled'; decoding does not"):
        RecurrentCache(model, 1)


@pytest.mark.processor
@pytest.mark.parametrize("length", LENGTHS)
def test_padding_never_reaches_a_state(length):
    model, tokens = awake_model(), random_tokens(1, 3 * CHUNK)
    alone, padded = RecurrentCache(model, 1), RecurrentCache(model, 1)
    counted = torch.tensor([length])
    a = recurrent_prefill(model, tokens[:, :length], counted, alone, int32(0))
    b = recurrent_prefill(model, tokens, counted, padded, int32(0))
    assert relative_error(b, a) < 1e-5
    assert relative_error(padded.states, alone.states) < 1e-5
    other = random_tokens(1, 3 * CHUNK, seed=1)
    other[:, :length] = tokens[:, :length]
    again = RecurrentCache(model, 1)
    assert torch.equal(recurrent_prefill(model, other, counted, again, int32(0)), b)
    assert torch.equal(again.states, padded.states), "whatever the padding says"


@pytest.mark.processor
def test_a_prompt_in_pieces_and_one_that_is_over():
    model, tokens = awake_model(), random_tokens(2, 40)
    lengths = torch.tensor([40, 18])
    whole, pieces = RecurrentCache(model, 2), RecurrentCache(model, 2)
    expected = recurrent_prefill(model, tokens, lengths, whole, int32(0, 1))
    found = {}
    for first in (0, 15, 30):
        here = (lengths - first).clamp(0, 15)
        piece = tokens[:, first : first + 15]
        kept = pieces.states[:, 1].clone()
        logits = recurrent_prefill(model, piece, here, pieces, int32(0, 1))
        found |= {row: logits[row] for row in (0, 1) if here[row] > 0}
    assert torch.equal(pieces.states[:, 1], kept), "a length of 0 leaves its slot alone"
    assert relative_error(torch.stack([found[0], found[1]]), expected) < 1e-5
    assert relative_error(pieces.states, whole.states) < 1e-5


def with_kernels(model, slots: int) -> RecurrentCache:
    """A cache whose steps run the kernels, also without a GPU."""
    cache = RecurrentCache(model, slots)
    cache._weights = decode._StepWeights.of(model, torch.float32)
    return cache


def in_pytorch(model, slots: int) -> RecurrentCache:
    """A cache whose steps run in PyTorch, also on a GPU."""
    cache = RecurrentCache(model, slots)
    cache._weights = None
    return cache


both_steps = pytest.mark.parametrize("cache_of", [in_pytorch, with_kernels])
needs_triton = pytest.mark.skipif(not ssd_triton.HAS_TRITON, reason="needs triton")


@pytest.mark.processor
@both_steps
@needs_triton
def test_lanes_touch_nothing(cache_of):
    model, tokens = awake_model(**SIZES), random_tokens(3, vocab=37)
    cache = cache_of(model, 3)
    cache.states.copy_(torch.randn(cache.states.shape, dtype=torch.complex64))
    before = cache.states.clone()
    logits = recurrent_step(model, tokens, cache, int32(2, -1, 0))
    assert torch.equal(cache.states[:, 1], before[:, 1])
    assert not torch.isclose(cache.states[:, [0, 2]], before[:, [0, 2]]).any()
    cache.states.copy_(before)
    alone = recurrent_step(model, tokens[[0, 2]], cache, int32(2, 0))
    assert relative_error(logits[[0, 2]], alone) < 1e-5
    recurrent_prefill(model, tokens[:, None], int32(1, 1, 1), cache, int32(-1, -1, -1))


def test_a_reset_slot_is_the_empty_text():
    model, tokens = awake_model(), random_tokens(2, 9)
    fresh, used = RecurrentCache(model, 2), RecurrentCache(model, 2)
    lengths = torch.tensor([9, 9])
    expected = recurrent_prefill(model, tokens, lengths, fresh, int32(0, 1))
    recurrent_prefill(model, tokens.flip(1), lengths, used, int32(0, 1))
    kept = used.states[:, 1].clone()
    used.reset(int32(0, -1))
    assert torch.equal(used.states[:, 1], kept)
    got = recurrent_prefill(model, tokens[:1], lengths[:1], used, int32(0))
    assert relative_error(got, expected[:1]) < 1e-5


def test_a_sequence_takes_the_same_memory_whatever_its_length():
    with torch.device("meta"):
        model = Mamba3Transformer({})
        cache = RecurrentCache(model, 2, torch.float32)
    assert cache.nbytes_per_slot == 28 * 16 * 64 * 64 * 8 == 14_680_064
    assert cache._storage.nbytes == 3 * cache.nbytes_per_slot  # one to spare


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda m, c: RecurrentCache(m, 0), "slots is 0; it must be at least 1"),
        (
            lambda m, c: RecurrentCache(m, 1, torch.float16),
            "dtype is torch.float16; wanted bfloat16 or torch.float32",
        ),
        (
            lambda m, c: recurrent_step(m, torch.tensor([[1]]), c, int32(0)),
            "got shapes tokens (1, 1), slots (1,); wanted tokens (E,), the others (E,)",
        ),
        (
            lambda m, c: recurrent_step(m, torch.tensor([1]), c, int32(0, 1)),
            "got shapes tokens (1,), slots (2,); wanted tokens (E,), the others (E,)",
        ),
        (
            lambda m, c: recurrent_step(m, torch.tensor([1]), c, int32(2)),
            "slots holds 2; the cache has 0 to 1",
        ),
        (
            lambda m, c: recurrent_step(m, torch.tensor([1, 2]), c, int32(1, 1)),
            "slots holds a slot twice; every sequence has its own",
        ),
        (
            lambda m, c: recurrent_step(m, torch.tensor([1, 999]), c, int32(1, 0)),
            "tokens holds 999; the model knows 0 to 256",
        ),
        (lambda m, c: read(m, c, [4]), "lengths holds 4; wanted 0 to 3"),
        (lambda m, c: read(m, c, [-1]), "lengths holds -1; wanted 0 to 3"),
        (
            lambda m, c: read(m, c, [1, 1]),
            "got shapes tokens (1, 3), slots (1,), lengths (2,); wanted tokens (E, T), "
            "the others (E,)",
        ),
        (
            lambda m, c: recurrent_step(
                tiny_model(n_layers=1), torch.tensor([1]), c, int32(0)
            ),
            "the cache has layers, heads, channels and states (2, 2, 8, 4); the model "
            "has (1, 2, 8, 4)",
        ),
    ],
)
def test_what_is_refused(call, line):
    model = tiny_model()
    with pytest.raises(ValueError) as error:
        call(model, RecurrentCache(model, 2))
    assert str(error.value) == line
    assert "\n" not in line


def read(model, cache, lengths):
    tokens = torch.ones(1, 3, dtype=torch.int64)
    return recurrent_prefill(model, tokens, torch.tensor(lengths), cache, int32(0))


@pytest.mark.bad_input
@pytest.mark.parametrize("bad", [torch.tensor([1.9]), torch.tensor([True])])
def test_what_is_no_integer_is_refused(bad):
    model = tiny_model()
    cache = RecurrentCache(model, 2)
    with pytest.raises(TypeError, match=r"tokens is torch.*; wanted integers"):
        recurrent_step(model, bad, cache, int32(0))
    with pytest.raises(TypeError, match="cache is object; wanted RecurrentCache"):
        recurrent_step(model, torch.tensor([1]), object(), int32(0))
    assert not cache.states.any(), "nothing has been touched"


# --------------------------------------------------------------------------------------
# The kernels of a step


@pytest.mark.processor
@needs_triton
@pytest.mark.parametrize("entries", [1, 3, 5, 20])
def test_the_kernels_equal_the_step_in_pytorch(entries):
    model = awake_model(3, **SIZES)
    tokens = random_tokens(entries, 4, vocab=37)
    slots = torch.arange(entries, dtype=torch.int32).flip(0)
    found = []
    for cache in (with_kernels(model, entries), in_pytorch(model, entries)):
        lengths = torch.full((entries,), 2)
        found.append((decode_all(model, cache, tokens, lengths, slots), cache.states))
    for got, expected in zip(*found, strict=True):
        assert relative_error(got, expected) < 1e-5


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [({}, True), ({"head_dim": 24}, False), ({"ffn_dim": 40}, False)],
)
def test_sizes_without_kernels_are_known(sizes, taken):
    cfg = tiny_model(**(SIZES | sizes)).cfg
    assert decode._has_step_kernels(cfg) == (taken and ssd_triton.HAS_TRITON)


# --------------------------------------------------------------------------------------
# On a GPU

BIG = {"d_model": 128, "n_heads": 4, "head_dim": 32, "state_dim": 32, "ffn_dim": 256}


def gpu_model(**sizes) -> Mamba3Transformer:
    model = awake_model(5, **(BIG | sizes))
    with torch.no_grad():
        for layer in model.layers:  # the 0.1 above is for narrow matrices
            for p in layer.parameters():
                if p.ndim == 2:
                    p.mul_(0.5)
    return model.cuda()


@pytest.mark.gpu
@pytest.mark.gate
@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("entries", [1, 2, 4, 5, 16, 17, 33, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernels_equal_the_step_in_pytorch(entries, dtype):
    model = gpu_model()
    tokens = random_tokens(entries, 40).cuda()
    slots = torch.arange(entries, dtype=torch.int32).flip(0).cuda()
    lengths = torch.full((entries,), 30).cuda()
    kernels = RecurrentCache(model, entries, dtype)
    plain = RecurrentCache(model, entries, torch.float32)
    assert kernels._weights is not None
    plain._weights = None
    logits = [
        recurrent_prefill(model, tokens[:, :30], lengths, cache, slots)
        for cache in (kernels, plain)
    ]
    for t in range(30, 40):
        logits = [
            recurrent_step(model, tokens[:, t], cache, slots)
            for cache in (kernels, plain)
        ]
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    assert relative_error(*logits) < bound
    assert relative_error(kernels.states, plain.states) < bound


@pytest.mark.gpu
@pytest.mark.gate
@pytest.mark.parametrize("entries", [1, 8, 64])
def test_on_a_gpu_a_graph_replays_the_step(entries):
    model, tokens = gpu_model(), random_tokens(6, entries).cuda()
    slots = torch.arange(entries, dtype=torch.int32).cuda()
    eager, replayed = RecurrentCache(model, entries), RecurrentCache(model, entries)
    token = tokens[0].clone()
    idle = torch.full_like(slots, -1)
    recurrent_step(model, token, replayed, idle)  # compiles, and touches nothing
    assert (replayed.states == 0).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = recurrent_step(model, token, replayed, slots)
    for row in tokens:
        token.copy_(row)
        graph.replay()
        assert torch.equal(logits, recurrent_step(model, row, eager, slots))
        assert torch.equal(replayed.states, eager.states)


@pytest.mark.gpu
@pytest.mark.gate
@pytest.mark.parametrize("entries", [1, 8])
def test_on_a_gpu_overlap_changes_no_bit(entries, monkeypatch):
    model, tokens = gpu_model(), random_tokens(50, entries).cuda()
    slots = torch.arange(entries, dtype=torch.int32).cuda()
    found = []
    for early in (decode._early, lambda _: {"EARLY": False}):
        monkeypatch.setattr(decode, "_early", early)
        cache = RecurrentCache(model, entries)
        rows = [recurrent_step(model, row, cache, slots) for row in tokens]
        found.append((torch.stack(rows), cache.states))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.gpu
@pytest.mark.gate
def test_on_a_gpu_memory_does_not_grow():
    model, slots = gpu_model(), torch.zeros(1, dtype=torch.int32).cuda()
    cache, token, sizes = RecurrentCache(model, 1), random_tokens(1).cuda(), []
    for steps in (10, 500):
        for _ in range(steps):
            token = recurrent_step(model, token, cache, slots).argmax(-1)
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert sizes[0] == sizes[1]
    assert math.isfinite(torch.view_as_real(cache.states).norm())
