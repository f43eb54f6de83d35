"""Exact decode: a decoded step has the bits of a full forward, whatever is around it.

On a CPU the model replays windows, and every promise is checked to the last bit. The
kernels run interpreted there, where NumPy multiplies and a row of a product may depend
on the tile; they are compared to rounding, and to the last bit on a GPU.
"""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import COMPILED, DEVICE, needs_triton, small_model

from mamba3lite.bench_decode import memory_row, step_rows
from mamba3lite.generate import Decoder
from mamba3lite.models import batch_invariant as rows_module
from mamba3lite.models import decode, ssd_fused
from mamba3lite.models.batch_invariant import log_softmax, token_log_probs
from mamba3lite.models.decode import ExactCache, exact_prefill, exact_step
from mamba3lite.models.transformer import ModelConfig

Q, V = 16, 37  # chunk and vocabulary of the small model
PROMPTS = [1, 7, 16, Q - 1, Q, Q + 1, 95, 2 * Q]
CPU = torch.device("cpu")
windows = pytest.mark.skipif(COMPILED, reason="the small model runs on the GPU here")
each_way = pytest.mark.parametrize(
    "dispatch", [pytest.param("pytorch", marks=windows),
                 pytest.param("fused", marks=needs_triton)]
)  # fmt: skip


def model_of(dispatch: str, seed: int = 0, **changes):
    """A small model in which every position matters."""
    model = small_model(dispatch, batch_invariant=True, **changes)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                noise = torch.randn(weight.shape, generator=g).to(DEVICE)
                weight += 0.1 * noise
    return model.requires_grad_(False)


def text(count: int, length: int, seed: int = 0, vocab: int = V):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count, length), generator=g).to(DEVICE)


def i32(*slots: int):
    return torch.tensor(slots, dtype=torch.int32, device=DEVICE)


def decoded(model, tokens, prompts, steps, slots, cache=None):
    """Logits after each prompt and each of the steps that follow, (E, steps + 1, V)."""
    cache = cache or ExactCache(model, max(slots) + 1)
    lengths = torch.tensor(prompts, device=DEVICE)
    ids = i32(*slots)
    out = [exact_prefill(model, tokens[:, : max(prompts)], lengths, cache, ids)]
    each = torch.arange(len(prompts), device=DEVICE)
    for i in range(steps):
        out.append(exact_step(model, tokens[each, lengths + i], cache, ids))
    return torch.stack(out, 1)


def wanted(model, tokens, prompts, steps):
    """The same rows of full forwards, each sequence alone."""
    full = [model(row[None])[0] for row in tokens]
    return torch.stack(
        [z[p - 1 : p + steps] for z, p in zip(full, prompts, strict=True)]
    )


# ---------------------------------------------------------- to the last bit, in windows


@pytest.mark.processor
@windows
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_step_has_the_bits_of_the_full_forward(prompt, seed):
    model, steps = model_of("pytorch", seed), Q + 5
    tokens = text(1, prompt + steps, seed)
    got = decoded(model, tokens, [prompt], steps, [1])
    assert torch.equal(got, wanted(model, tokens, [prompt], steps))


@windows
def test_the_plain_recurrence_has_other_bits():
    """What the mode is for: one step from the last state rounds differently."""
    plain = small_model("pytorch").requires_grad_(False)
    tokens = text(1, 60)
    full = plain(tokens)
    logits, states = plain(tokens[:, :20], return_states=True)
    differ = 0
    for t in range(20, 60):
        logits, states = plain(tokens[:, t : t + 1], states=states, return_states=True)
        differ += not torch.equal(logits[:, 0], full[:, t])
        torch.testing.assert_close(logits[:, 0], full[:, t], atol=1e-4, rtol=1e-4)
    assert differ > 20, "most rows of 40"


@pytest.mark.processor
@windows
def test_weak_decay_over_two_crossings():
    """Rounding of a state is not forgotten by the next chunk."""
    model = model_of("pytorch")
    for layer in model.layers:
        layer.A *= 0.01
    tokens = text(1, 3 * Q + 10)
    got = decoded(model, tokens, [5], 3 * Q, [0])
    assert torch.equal(got, wanted(model, tokens, [5], 3 * Q))


@pytest.mark.processor
@windows
def test_under_bf16_autocast():
    model = model_of("pytorch")
    tokens = text(2, 50)
    with torch.autocast("cpu", torch.bfloat16):
        got = decoded(model, tokens, [9, 20], 20, [0, 1])
        assert torch.equal(got, wanted(model, tokens, [9, 20], 20))


@pytest.mark.processor
@windows
def test_neighbors_slots_and_length_do_not_matter():
    model = model_of("pytorch")
    tokens, prompts, steps = text(8, 70), [1, 7, 15, 16, 17, 33, 40, 32], 20
    eight = decoded(model, tokens, prompts, steps, [3, 9, 0, 7, 1, 4, 8, 5])
    for e in (0, 4, 7):
        one = slice(e, e + 1)
        alone = decoded(model, tokens[one], prompts[one], steps, [2])
        assert torch.equal(alone[0], eight[e])
    other = decoded(model, tokens.flip(0), prompts[::-1], steps, list(range(8)))
    assert torch.equal(other.flip(0), eight)
    full = model(tokens)
    assert torch.equal(full[:, :41], model(tokens[:, :41]))
    assert torch.equal(full[2:3], model(tokens[2:3]))


@pytest.mark.processor
@windows
def test_padding_lanes_touch_nothing():
    model = model_of("pytorch")
    tokens = text(2, 40)
    cache = ExactCache(model, 4)
    exact_prefill(model, tokens[:, :20], torch.tensor([20, 3]), cache, i32(2, 0))
    held = [z.clone() for z in (cache.states, cache.open, cache.cursor)]
    exact_step(model, tokens[:, 20], cache, i32(-1, -1))
    exact_prefill(model, tokens[:, :20], torch.tensor([20, 3]), cache, i32(-1, -1))
    for before, after in zip(
        held, (cache.states, cache.open, cache.cursor), strict=True
    ):
        assert torch.equal(before, after)
    got = exact_step(model, tokens[:, 20].flip(0), cache, i32(-1, 2))
    assert torch.equal(got[1], model(tokens[:1])[0, 20])


@pytest.mark.processor
@windows
def test_a_prompt_may_come_in_pieces():
    model = model_of("pytorch")
    tokens = text(2, 4 * Q)
    cache, ids = ExactCache(model, 2), i32(1, 0)
    for piece in tokens[:, : 3 * Q].split([Q, 2 * Q], dim=1):
        whole = torch.tensor([piece.shape[1]] * 2)
        exact_prefill(model, piece, whole, cache, ids)
    got = exact_prefill(model, tokens[:, 3 * Q :], torch.tensor([3, Q]), cache, ids)
    full = model(tokens)
    assert torch.equal(got[0], full[0, 3 * Q + 2])
    assert torch.equal(got[1], full[1, 4 * Q - 1])


@pytest.mark.processor
@windows
def test_three_repeats_give_the_same_bits():
    model = model_of("pytorch")
    tokens = text(2, 50)
    first, *others = (decoded(model, tokens, [9, 20], 20, [0, 1]) for _ in range(3))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.processor
@windows
def test_a_slot_is_used_again_after_reset():
    model = model_of("pytorch")
    tokens = text(2, 50)
    cache = ExactCache(model, 2)
    decoded(model, tokens[:1], [21], 10, [1], cache)
    with pytest.raises(ValueError, match="slot 1 holds 15 tokens of an open chunk"):
        exact_prefill(model, tokens[1:], torch.tensor([20]), cache, i32(1))
    cache.reset(i32(1))
    got = decoded(model, tokens[1:], [20], 10, [1], cache)
    assert torch.equal(got, wanted(model, tokens[1:], [20], 10))


# -------------------------------------------------------------------- log-probabilities


@pytest.mark.processor
@windows
def test_log_probs_of_a_row_do_not_depend_on_the_others():
    logits = 5 * torch.randn(70, 50, generator=torch.Generator().manual_seed(0))
    log_p = log_softmax(logits)
    for rows in (slice(3, 4), slice(17, 40), slice(1, 70)):
        assert torch.equal(log_softmax(logits[rows]), log_p[rows])
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_p.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.gate
@pytest.mark.slow
@each_way
def test_the_loss_of_a_token_is_its_log_prob(dispatch):
    """One valid target at a time: nothing is summed."""
    model = model_of(dispatch)
    tokens = text(2, 21)
    full, targets = model(tokens), text(2, 21, seed=1)
    log_p = token_log_probs(full, targets)
    for b, t in ((0, 0), (1, 4), (0, 20)):
        one = torch.full_like(targets, -100)
        one[b, t] = targets[b, t]
        assert torch.equal(model(tokens, one), -log_p[b, t])


# ------------------------------------------------------------------ the kernels of rows


# A sum rounded otherwise may be cut to a neighboring number of the precision.
ROUNDING = {"ieee": 1e-6, "tf32": 1e-3, "bf16": 1e-2}


@pytest.mark.processor
@pytest.mark.gate
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("precision", ROUNDING)
def test_every_row_and_boundary_state_of_the_scan(precision):
    """Bits are promised of compiled kernels; interpreted, NumPy multiplies."""
    sizes = (16, 16, 16, precision, torch.float32)
    for want, got in zip(*decode.scanned_twice(DEVICE, *sizes), strict=True):
        assert (got - want).norm() < ROUNDING[precision] * want.norm()
        assert torch.equal(got, want) or not COMPILED


@pytest.mark.processor
@pytest.mark.gate
@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("autocast", [False, True])
def test_a_step_by_rows(autocast):
    """Mixed lengths and a padding lane with a NaN in every row that is not used."""
    model = model_of("fused", ssd_precision="tf32")
    tokens, prompts = text(2, 24), [15, 3]
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        full = model(tokens)
        cache = ExactCache(model, 3)
        cache.open.fill_(float("nan"))
        lengths = torch.tensor(prompts, device=DEVICE)
        got = [exact_prefill(model, tokens[:, :15], lengths, cache, i32(2, 0))]
        decode.launches.clear()
        for i in range(3):
            entry = torch.stack([tokens[0, 15 + i], tokens[1, 0], tokens[1, 3 + i]])
            got.append(exact_step(model, entry, cache, i32(2, -1, 0))[[0, 2]])
    assert dict(decode.launches) == {
        "bmm_rows": 6, "chunk_scan_rows": 6, "chunk_state_passing_rows": 3
    }, "two layers, three steps, and no training kernel"  # fmt: skip
    assert cache.open[:, 1].isnan().all(), "a slot that nobody used"
    assert cache.cursor.tolist() == [6, 0, 2]
    for e, prompt in enumerate(prompts):
        for i, logits in enumerate(got):
            expected = full[e, prompt - 1 + i]
            if COMPILED:
                assert torch.equal(logits[e], expected)
            bound = 0.1 if autocast else 1e-4
            torch.testing.assert_close(logits[e], expected, atol=bound, rtol=0)


@pytest.mark.slow
@needs_triton
def test_without_row_kernels_the_training_kernels_scan_the_chunk(monkeypatch):
    model = model_of("fused", ssd_precision="ieee")
    tokens = text(2, 18)
    monkeypatch.setattr(decode, "row_kernel_configs", lambda *_, **__: None)
    decode._warn_slow.cache_clear()
    decode.launches.clear()
    with pytest.warns(RuntimeWarning, match="slower"):
        got = decoded(model, tokens, [15, 14], 3, [0, 1])
    assert dict(decode.launches) == {"training kernels": 6}
    expected = wanted(model, tokens, [15, 14], 3)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@needs_triton
def test_no_row_kernels_while_a_tuner_chooses(monkeypatch):
    sizes = {"head_dim": 16, "state_dim": 16, "precision": "tf32"}
    C = torch.zeros(1, 64, device=DEVICE)
    configs = decode.row_kernel_configs(C, 16, **sizes)
    trained = ssd_fused._launch("output", "tf32", 16, 16)
    assert trained.items() <= configs["output"].items(), "launched as in training"
    assert decode._launch_options(configs["chunks"])["num_warps"] == 4
    assert decode._block_sizes(configs["output"])["BLOCK_C"] == 16
    monkeypatch.delitem(ssd_fused._LAUNCH, "output")
    assert decode._pinned_config("output") is None
    assert decode.row_kernel_configs(C, 16, **sizes) is None


def test_about_one_crossing_a_program():
    assert [decode._chunks_per_program(n) for n in (1, 31, 64, 127, 256, 9999)] == [
        1, 1, 4, 4, 16, 16
    ]  # fmt: skip


@needs_triton
def test_a_rounded_boundary_state_is_refused():
    model = model_of("fused")
    cache = ExactCache(model, 1)
    cache.states = torch.view_as_real(cache.states).bfloat16()
    for call in (
        lambda: exact_step(model, text(1, 1)[0], cache, i32(0)),
        lambda: exact_prefill(model, text(1, 3), text(1, 1)[0], cache, i32(0)),
        lambda: decode.chunk_scan_rows(*[None] * 8, cache.states, None),
        lambda: decode.chunk_state_passing_rows(*[None] * 5, cache.states, None),
    ):
        with pytest.raises(TypeError) as error:
            call()
        assert "boundary states are torch.bfloat16" in str(error.value)
        assert "\n" not in str(error.value)


@needs_triton
def test_memory_of_a_slot():
    """One layer of the default model; its 28 layers, below 40 MB in float32."""
    shape = {"n_heads": 16, "head_dim": 64, "state_dim": 64, "chunk_size": 64}
    model = small_model("fused", batch_invariant=True, n_layers=1, **shape)
    state, row = 16 * 64 * 64 * 8, 16 * (64 + 2 * 64 + 1)
    assert ExactCache(model, 3).nbytes_per_slot == state + 64 * row * 4 + 4
    assert 28 * ExactCache(model, 1).nbytes_per_slot < 40e6
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert ExactCache(model, 1).nbytes_per_slot == state + 64 * row * 2 + 4


# ------------------------------------------------------- what the model is made of then


@needs_triton
def test_operators_and_their_gradients():
    g = torch.Generator().manual_seed(0)
    x, gain, weight = (
        torch.randn(*shape, generator=g).to(DEVICE).requires_grad_()
        for shape in ((3, 5, 24), (24,), (20, 24))
    )
    norm = torch.nn.RMSNorm(24, 1e-5).to(DEVICE)
    norm.weight = torch.nn.Parameter(gain.detach().clone())
    pairs = [
        (rows_module.linear(x, weight), F.linear(x, weight), (x, weight)),
        (rows_module.swiglu(x), F.silu(x[..., :12]) * x[..., 12:], (x,)),
        (log_softmax(x), x.log_softmax(-1), (x,)),
        (rows_module.norm(x, norm), norm(x), (x, norm.weight)),
    ]
    for got, expected, leaves in pairs:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        seed = torch.randn(got.shape, generator=g).to(DEVICE)
        for a, b in zip(
            torch.autograd.grad(got, leaves, seed),
            torch.autograd.grad(expected, leaves, seed),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


@needs_triton
@pytest.mark.parametrize("name", ["linear", "norm", "swiglu", "log_softmax"])
def test_operators_keep_the_rules_of_operators(name):
    x = torch.randn(3, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(16, 16, device=DEVICE, requires_grad=True)
    arguments = {
        "linear": (rows_module._linear, (x, weight, False)),
        "norm": (rows_module._rms_norm, (x, weight[0], 1e-5, torch.float32)),
        "swiglu": (rows_module._swiglu, (x,)),
        "log_softmax": (rows_module._log_softmax, (x,)),
    }
    operator, values = arguments[name]
    values = tuple(z.detach().requires_grad_() if torch.is_tensor(z) else z
                   for z in values)  # fmt: skip
    torch.library.opcheck(operator, values)


@each_way
def test_it_is_the_same_model(dispatch):
    """Values and gradients of the loss agree with a model that is not invariant."""
    tokens, targets = text(2, 20), text(2, 20, seed=1)
    results = []
    for invariant in (False, True):
        which = dispatch if invariant else "pytorch"
        model = small_model(which, batch_invariant=invariant, ssd_precision="ieee")
        loss = model(tokens, targets)
        results.append([loss, *torch.autograd.grad(loss, [*model.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


@pytest.mark.processor
@windows
def test_it_continues_from_a_state_and_keeps_documents_apart():
    model = model_of("pytorch")
    tokens = text(2, 45)
    full = model(tokens)
    _, states = model(tokens[:, : 2 * Q], return_states=True)
    assert torch.equal(model(tokens[:, 2 * Q :], states=states), full[:, 2 * Q :])
    _, states = model(tokens[:, :21], return_states=True)
    plain = small_model("pytorch")
    plain.load_state_dict(model.state_dict())
    _, expected = plain(tokens[:, :21], return_states=True)
    for a, b in zip(states, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    documents = torch.tensor([[0] * 11 + [1] * 34, [0] * 45])
    packed = model(tokens, doc_ids=documents)
    assert torch.equal(packed[1], full[1])
    assert torch.equal(packed[0, :11], full[0, :11])
    torch.testing.assert_close(packed[0, 11:], model(tokens[:1, 11:])[0],
                               atol=1e-4, rtol=1e-4)  # fmt: skip


@pytest.mark.slow
@each_way
def test_it_compiles_whole(dispatch):
    model = model_of(dispatch)
    tokens = text(2, 20)
    whole = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, _ = model(tokens, tokens, reduction="sum")
    assert torch.equal(whole(tokens, tokens, reduction="sum")[0], expected)


# ---------------------------------------------------------------------- what is refused


def test_the_config_refuses_the_per_chunk_kernel():
    assert ModelConfig(batch_invariant=True).batch_invariant
    with pytest.raises(ValueError, match=r"batch_invariant is True.*not 'triton'"):
        ModelConfig(batch_invariant=True, ssd_dispatch="triton")


@windows
def test_what_does_not_fit_is_one_line():
    model, plain = model_of("pytorch"), small_model("pytorch")
    deeper = model_of("pytorch", n_layers=3)
    longer = model_of("pytorch", chunk_size=32)
    cache, one = ExactCache(model, 2), text(1, 3)
    length = torch.tensor([3])
    cases = [
        (lambda: ExactCache(plain, 2), ValueError, "batch_invariant=False"),
        (lambda: ExactCache(model, 0), ValueError, "slots is 0"),
        (lambda: exact_step(model, one[0], cache, i32(0)), ValueError,
         "got shapes tokens (3,), slots (1,)"),
        (lambda: exact_step(model, one[0, :1], cache, i32(0).long()), TypeError,
         "slots is torch.int64; wanted int32"),
        (lambda: exact_step(model, one[0, :2], cache, i32(1, 1)), ValueError,
         "slots holds a slot twice"),
        (lambda: exact_step(model, one[0, :2], cache, i32(0, 5)), ValueError,
         "slots holds 5; the cache has 0 to 1"),
        (lambda: exact_prefill(model, one + 300, length, cache, i32(0)), ValueError,
         "the model knows 0 to 36"),
        (lambda: exact_step(longer, one[0, :1], cache, i32(0)), ValueError,
         "chunks of 16 tokens"),
        (lambda: exact_step(model, one[0, :1], cache, torch.zeros(1)), TypeError,
         "slots is torch.float32"),
        (lambda: exact_step(deeper, one[0, :1], cache, i32(0)), ValueError,
         "the cache has layers, heads, channels and states (2, "),
        (lambda: exact_prefill(model, one, length + 1, cache, i32(0)), ValueError,
         "lengths holds 4; wanted 1 to 3"),
    ]  # fmt: skip
    for call, kind, message in cases:
        with pytest.raises(kind) as error:
            call()
        assert message in str(error.value) and "\n" not in str(error.value)
    assert not cache.cursor.any() and not cache.states.any(), "nothing was touched"


@each_way
def test_a_cache_belongs_to_one_autocast(dispatch):
    model = model_of(dispatch)
    cache = ExactCache(model, 1)
    refused = pytest.raises(ValueError, match="under the same autocast")
    with torch.autocast(DEVICE.type, torch.bfloat16), refused:
        exact_step(model, text(1, 1)[0], cache, i32(0))


@needs_triton
def test_a_changed_weight_is_read():
    """Copies in bfloat16 follow the parameters, in place."""
    model = model_of("fused")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        cache = ExactCache(model, 1)
        copy = cache.weight(model.lm_head.weight)
        assert cache.weight(model.lm_head.weight) is copy
        model.lm_head.weight.mul_(2)
        assert cache.weight(model.lm_head.weight) is copy
    assert torch.equal(copy, model.lm_head.weight.bfloat16())


# ----------------------------------------------------------------------------- on a GPU

SHAPE = {"d_model": 64, "n_heads": 2, "head_dim": 64, "state_dim": 64,
         "chunk_size": 64, "ffn_dim": 96, "init_std": 0.05}  # fmt: skip
ON_GPU = [1, 7, 16, 63, 64, 65, 95, 128]


def captured_steps(model, cache, tokens, ids):
    """A CUDA graph of one step that reads `tokens`, and its logits."""
    held = [z.clone() for z in (cache.states, cache.open, cache.cursor)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        exact_step(model, tokens, cache, ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = exact_step(model, tokens, cache, ids)
    for z, before in zip((cache.states, cache.open, cache.cursor), held, strict=True):
        z.copy_(before)
    return graph, logits


@pytest.mark.gpu
@pytest.mark.gate
class TestExactOnAGpu:
    def test_without_row_kernels_a_text_is_the_same(self, monkeypatch):
        """No graph holds those steps; the decoder and the benchmark do without."""
        model = model_of("fused", ssd_precision="tf32")
        prompts, options = [[1, 2, 3], [4]], {"eos_id": V - 1, "max_new_tokens": 20}
        found = []
        for patched in (False, True):
            if patched:
                monkeypatch.setattr(decode, "row_kernel_configs", lambda *_, **__: None)
            decoder = Decoder(model, 2, "exact")
            found.append(decoder.generate(prompts, seeds=[0, 1], **options))
        assert found[0] == found[1] and found[0][0]
        rows = [*step_rows(model, "exact", [2], copy_tb_s=1.0)]
        assert rows[0]["tokens_per_s"] > 0
        assert memory_row(model, "exact", [250])["held_bytes"]

    @pytest.mark.parametrize("precision", ["bf16", "tf32", "ieee"])
    @pytest.mark.parametrize("autocast", [True, False])
    @pytest.mark.parametrize("weak", [False, True])
    def test_steps_in_a_graph_have_the_bits_of_full_forwards(
        self, precision, autocast, weak
    ):
        model = model_of("fused", ssd_precision=precision, **SHAPE)
        if weak:
            for layer in model.layers:
                layer.A *= 0.01
        tokens, steps = text(8, 128 + 80), 69
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            expected = wanted(model, tokens, ON_GPU, steps)
            cache, ids = ExactCache(model, 12), i32(3, 9, 0, 7, 1, 4, 8, 5, -1)
            lengths = torch.tensor(ON_GPU, device=DEVICE)
            got = [exact_prefill(model, tokens[:, :128], lengths, cache, ids[:8])]
            now = torch.zeros(9, dtype=torch.long, device=DEVICE)
            each = torch.arange(8, device=DEVICE)
            now[:8] = tokens[each, lengths]
            graph, logits = captured_steps(model, cache, now, ids)
            for i in range(steps):
                now[:8] = tokens[each, lengths + i]
                graph.replay()
                got.append(logits[:8].clone())
        assert torch.equal(torch.stack(got, 1), expected)

    def test_the_batch_does_not_change_a_full_forward(self):
        model = model_of("fused", ssd_precision="bf16", **SHAPE)
        tokens = text(64, 150)
        with torch.autocast("cuda", torch.bfloat16):
            full = model(tokens)
            for rows in (slice(5, 6), slice(1, 9)):
                assert torch.equal(model(tokens[rows]), full[rows])
            assert torch.equal(model(tokens[:, :77]), full[:, :77])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("precision", ["bf16", "tf32", "ieee"])
    def test_rows_of_the_default_sizes(self, precision, dtype):
        assert decode._bits_agree(DEVICE, 64, 64, 64, precision, dtype)

    def test_tiles_agree(self):
        assert rows_module.tiles_agree(DEVICE)

    def test_it_trains_compiled(self):
        model = model_of("fused", ssd_precision="bf16", **SHAPE).requires_grad_(True)
        tokens = text(2, 100)
        with torch.autocast("cuda", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits = model(tokens)
            whole = torch.compile(model, fullgraph=True)
            assert torch.equal(whole(tokens), logits)
            whole(tokens, tokens).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
