"""The summed cross-entropy that never holds the logits of a batch.

Truth: `F.cross_entropy` on full logits in double precision, finite differences, and
cases small enough to work out by hand.
"""

from __future__ import annotations

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mamba3lite.models import transformer
from mamba3lite.models.transformer import (
    Mamba3Transformer,
    _cross_entropy_sum,
    _loss_and_gradients,
)

V, D = 37, 8


@pytest.fixture
def few_tokens_at_once(monkeypatch):
    """Chunks of 8 tokens."""
    monkeypatch.setattr(transformer, "_TOKENS_AT_ONCE", 8)


def random_inputs(batch=2, time=15, *, vocab=V, dtype=torch.float32, scale=1.0, seed=0):
    """hidden and weight, which want gradients, and targets of which some are -100."""
    g = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(batch, time, D, generator=g, dtype=dtype)
    weight = torch.randn(vocab, D, generator=g, dtype=dtype)
    targets = torch.randint(vocab, (batch, time), generator=g)
    targets[0, 2 : time // 2] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def plain_sum(hidden, weight, targets):
    logits = hidden @ weight.T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def oracle(hidden, weight, targets):
    """Loss and gradients from full logits in double precision."""
    leaves = [z.detach().double().requires_grad_() for z in (hidden, weight)]
    loss = plain_sum(*leaves, targets)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def loss_and_gradients(hidden, weight, targets):
    loss = _cross_entropy_sum(hidden, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def assert_is(got, expected, *, loss=1e-6, gradients=1e-5):
    assert relative_error(got[0], expected[0]) < loss
    for gradient, wanted in zip(got[1:], expected[1:], strict=True):
        assert gradient.shape == wanted.shape
        assert relative_error(gradient, wanted) < gradients


# ---------------------------------------------------------------- the value


@given(
    batch=st.integers(1, 3),
    time=st.integers(1, 40),
    chunk=st.sampled_from([1, 5, 16, 2048]),
    seed=st.integers(0, 2**16),
)
def test_chunks_of_any_size_give_the_plain_cross_entropy(batch, time, chunk, seed):
    inputs = random_inputs(batch, time, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer, "_TOKENS_AT_ONCE", chunk)
        got = loss_and_gradients(*inputs)
    assert (got[0].shape, got[0].dtype) == ((), torch.float32)
    assert_is(got, oracle(*inputs))


def test_one_token_by_hand():
    """p = (1/4, 3/4) and target 1: the loss is ln(4/3), dlogits (1/4, -1/4)."""
    hidden = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    weight = torch.tensor([[0.0, 5.0], [math.log(3), 7.0]], requires_grad=True)
    loss, dhidden, dweight = loss_and_gradients(hidden, weight, torch.tensor([[1]]))
    assert loss.item() == pytest.approx(math.log(4 / 3), rel=1e-6)
    torch.testing.assert_close(dweight, torch.tensor([[0.25, 0], [-0.25, 0]]))
    torch.testing.assert_close(dhidden[0, 0], torch.tensor([-math.log(3) / 4, -0.5]))


@pytest.mark.usefixtures("few_tokens_at_once")
def test_gradients_are_those_of_finite_differences_whatever_arrives():
    hidden, weight, targets = random_inputs(dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: 0.3 * _cross_entropy_sum(h, w, targets), (hidden, weight)
    )
    assert _cross_entropy_sum(hidden, weight, targets).dtype == torch.float64


@pytest.mark.usefixtures("few_tokens_at_once")
def test_a_view_of_another_layout_is_read_as_it_is_meant():
    hidden, weight, targets = random_inputs(3, 20)
    view = hidden.transpose(0, 1)[1:, :2]
    loss = _cross_entropy_sum(view, weight, targets.T[1:, :2])
    (got,) = torch.autograd.grad(loss, hidden)
    expected = oracle(hidden.transpose(0, 1)[1:, :2], weight, targets.T[1:, :2])
    assert relative_error(loss.detach(), expected[0]) < 1e-6
    assert relative_error(got[:2, 1:], expected[1].transpose(0, 1)) < 1e-5
    assert not got[2].any()
    assert not got[:, 0].any()


@pytest.mark.usefixtures("few_tokens_at_once")
def test_a_matrix_read_and_predicted_with_collects_both_gradients():
    _, table, targets = random_inputs()
    tokens = targets.clamp(min=0).roll(1, 1)

    def tied(table, loss_sum):
        return loss_sum(F.embedding(tokens, table), table, targets)

    (got,) = torch.autograd.grad(tied(table, _cross_entropy_sum), table)
    exact = table.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(tied(exact, plain_sum), exact)
    assert relative_error(got, expected) < 1e-5


def test_logits_far_apart_neither_overflow_nor_lose_the_target():
    inputs = random_inputs(scale=300.0)
    expected = oracle(*inputs)
    assert expected[0] / inputs[2].numel() > 100  # exp(-loss) is 0 in float32
    assert_is(loss_and_gradients(*inputs), expected)


def test_a_nearly_sure_target_still_has_a_gradient_in_bfloat16():
    """p = 1 - 3.35e-4, which bfloat16 rounds to 1: 1 is subtracted before that."""
    hidden = torch.ones(1, 1, 1, requires_grad=True)
    weight = torch.tensor([[8.0], [0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, _, dweight = loss_and_gradients(hidden, weight, torch.tensor([[0]]))
    assert dweight[0].item() == pytest.approx(-1 / (1 + math.exp(8)), rel=5e-3)


# ---------------------------------------------------------------- targets


@pytest.mark.usefixtures("few_tokens_at_once")
def test_no_valid_target_is_zero_with_zero_gradients():
    hidden, weight, targets = random_inputs()
    got = loss_and_gradients(hidden, weight, torch.full_like(targets, -100))
    assert not any(z.any() for z in got)


@pytest.mark.usefixtures("few_tokens_at_once")
def test_an_ignored_token_has_no_say():
    """Chunks that are ignored in part and chunks that are ignored whole."""
    hidden, weight, targets = random_inputs(1, 32)
    targets[0, 5:27] = -100
    got = loss_and_gradients(hidden, weight, targets)
    assert not got[1][0, 5:27].any()
    kept = targets != -100
    alone = oracle(hidden[kept][None], weight, targets[kept][None])
    assert relative_error(got[0], alone[0]) < 1e-6
    assert relative_error(got[1][kept][None], alone[1]) < 1e-5
    assert relative_error(got[2], alone[2]) < 1e-5


def test_int32_targets_are_the_same_targets():
    hidden, weight, targets = random_inputs()
    narrow = _cross_entropy_sum(hidden, weight, targets.int())
    assert torch.equal(narrow, _cross_entropy_sum(hidden, weight, targets))


@pytest.mark.parametrize("bad", [-1, V])
def test_an_id_outside_the_vocabulary_is_not_scored_as_another(bad):
    hidden, weight, targets = random_inputs()
    targets[1, 3] = bad
    with pytest.raises(RuntimeError, match=f"index {bad} is out of bounds"):
        _cross_entropy_sum(hidden, weight, targets)


def test_a_hidden_vector_that_is_not_finite_is_seen_in_the_loss():
    hidden, weight, targets = random_inputs()
    with torch.no_grad():
        hidden[1, 3, 0] = math.nan
    assert _cross_entropy_sum(hidden, weight, targets).isnan()


# ---------------------------------------------------------------- memory


class Seen(TorchDispatchMode):
    """Numbers in the largest tensor an operation returned, and how many products."""

    def __init__(self):
        super().__init__()
        self.largest, self.products, self.results = 0, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.products += name in ("mm", "addmm", "addmm_")
        self.results[name] = out
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.usefixtures("few_tokens_at_once")
def test_no_tensor_is_larger_than_the_logits_of_a_chunk():
    """Thirty tokens in chunks of 8: four chunks, three products each."""
    hidden, weight, targets = (z.detach() for z in random_inputs())
    with Seen() as seen:
        _loss_and_gradients(hidden, weight, targets, torch.float32, True, True)
    assert (seen.largest, seen.products) == (8 * V, 12)


class Living(TorchDispatchMode):
    """The most numbers in tensors of vocabulary width alive at the same time."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (V,):
            self.made.append(weakref.ref(out))
        alive = [z for ref in self.made if (z := ref()) is not None]
        alive = {z.data_ptr(): z.numel() for z in alive}
        self.most = max(self.most, sum(alive.values()))
        return out


@pytest.mark.usefixtures("few_tokens_at_once")
def test_logits_and_their_softmax_are_all_that_lives_at_once():
    """The gradient of the logits takes their place; no chunk waits for the next."""
    hidden, weight, targets = (z.detach() for z in random_inputs())
    with Living() as living:
        _loss_and_gradients(hidden, weight, targets, torch.float32, True, True)
    assert living.most == 2 * 8 * V


def largest_allocation(call) -> int:
    """Bytes of the largest allocation of one operation, inside operators too."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        call()
    return max(event.self_cpu_memory_usage for event in profiler.events())


def test_a_step_allocates_no_more_than_a_chunk_of_logits_at_a_time(monkeypatch):
    """Forward and backward: 600 tokens in chunks of 100, vocabulary 1000."""
    hidden, weight, targets = random_inputs(2, 300, vocab=1000)
    monkeypatch.setattr(transformer, "_TOKENS_AT_ONCE", 100)
    of_a_chunk = 4 * 100 * 1000

    def step(loss_sum):
        return largest_allocation(lambda: loss_sum(hidden, weight, targets).backward())

    assert step(_cross_entropy_sum) == of_a_chunk
    assert step(plain_sum) >= 6 * of_a_chunk


def test_a_step_of_the_model_never_holds_the_logits_of_a_batch(monkeypatch):
    shape = {"d_model": 8, "n_layers": 1, "n_heads": 1, "head_dim": 4, "state_dim": 2}
    model = Mamba3Transformer(shape | {"vocab_size": 1000, "ffn_dim": 8})
    tokens = torch.randint(1000, (2, 300))
    monkeypatch.setattr(transformer, "_TOKENS_AT_ONCE", 100)
    step = largest_allocation(lambda: model(tokens, targets=tokens).backward())
    assert step == 4 * 100 * 1000
    assert largest_allocation(lambda: model(tokens)) >= 4 * 600 * 1000


def numbers_kept(call) -> list[int]:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda z: kept.append(z.numel()) or z, lambda z: z
    ):
        result = call()
    del result
    return kept


@pytest.mark.usefixtures("few_tokens_at_once")
def test_only_the_two_gradients_wait_for_the_backward_pass():
    hidden, weight, targets = random_inputs()
    kept = numbers_kept(lambda: _cross_entropy_sum(hidden, weight, targets))
    assert kept == [hidden.numel(), weight.numel()]


def test_a_gradient_that_nobody_wants_is_neither_computed_nor_kept():
    hidden, weight, targets = random_inputs()
    frozen = weight.detach()
    kept = numbers_kept(lambda: _cross_entropy_sum(hidden, frozen, targets))
    assert kept == [hidden.numel(), 0]
    with Seen() as seen:
        _loss_and_gradients(
            hidden.detach(), frozen, targets, torch.float32, True, False
        )
    assert seen.products == 2
    (got,) = torch.autograd.grad(_cross_entropy_sum(hidden, frozen, targets), hidden)
    assert relative_error(got, oracle(hidden, weight, targets)[1]) < 1e-5


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, targets = random_inputs()
    with torch.no_grad(), Seen() as seen:
        loss = _cross_entropy_sum(hidden, weight, targets)
    sizes = [z.numel() for z in seen.results["cross_entropy_sum"]]
    assert sizes == [1, 0, 0]
    with Seen() as seen:
        _loss_and_gradients(
            *(hidden.detach(), weight.detach(), targets, torch.float32, False, False)
        )
    assert seen.products == 1
    assert torch.equal(loss, _cross_entropy_sum(hidden, weight, targets))
    assert not loss.requires_grad


def test_the_default_chunk_cuts_a_full_size_batch():
    """16 x 2048 x 50257 logits are 6.6 GB in float32; a chunk of them is not."""
    assert 4 * transformer._TOKENS_AT_ONCE * 50257 <= 2**29
    assert transformer._TOKENS_AT_ONCE >= 1024  # or the products become narrow


# ---------------------------------------------------------------- precision


@pytest.mark.usefixtures("few_tokens_at_once")
def test_autocast_rounds_the_products_and_nothing_else():
    """Against the oracle on the rounded operands, so that only sums can differ."""
    hidden, weight, targets = random_inputs(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss_and_gradients(hidden, weight, targets)
    assert {z.dtype for z in got} == {torch.float32}
    rounded = oracle(hidden.bfloat16(), weight.bfloat16(), targets)
    assert_is(got, rounded, loss=2e-4, gradients=1e-2)
    assert relative_error(got[0], oracle(hidden, weight, targets)[0]) > 1e-6


def test_the_gradient_of_the_weight_is_summed_in_float32(monkeypatch):
    """1000 chunks add 1/2 each; a bfloat16 sum would stop at 128."""
    monkeypatch.setattr(transformer, "_TOKENS_AT_ONCE", 1)
    hidden = torch.ones(1, 1000, 1)
    weight = torch.zeros(2, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _cross_entropy_sum(hidden, weight, torch.zeros(1, 1000, dtype=int))
    loss.backward()
    assert weight.grad.flatten().tolist() == [-500.0, 500.0]
    assert loss.item() == pytest.approx(1000 * math.log(2), rel=1e-6)


def test_hidden_vectors_in_half_precision_get_gradients_in_it():
    hidden, weight, targets = random_inputs()
    half = hidden.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss, dhidden, dweight = loss_and_gradients(half, weight, targets)
    assert (loss.dtype, dweight.dtype) == (torch.float32, torch.float32)
    assert dhidden.dtype == torch.bfloat16
    assert relative_error(dhidden, oracle(half, weight, targets)[1]) < 2e-2


def test_autocast_leaves_double_precision_alone():
    inputs = random_inputs(dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss_and_gradients(*inputs)
    assert_is(got, oracle(*inputs), loss=1e-14, gradients=1e-13)


# ---------------------------------------------------------------- the padded head


@pytest.mark.usefixtures("few_tokens_at_once")
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_of_padding_get_no_probability(autocast, monkeypatch):
    """Every true logit is near -200: a padded logit of 0 would win."""
    hidden, weight, targets = random_inputs()
    with torch.no_grad():
        hidden[..., 0] = 1
        weight[:, 0] = -200
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = loss_and_gradients(hidden, weight, targets)
        monkeypatch.setattr(
            transformer,
            "_padded_head",
            lambda w, dtype: F.pad(w, (0, 0, 0, 27)).to(dtype),
        )
        got = loss_and_gradients(hidden, weight, targets)
    assert_is(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_the_head_is_the_weight(dtype):
    weight = torch.randn(V, D)
    assert torch.equal(transformer._padded_head(weight, dtype), weight.to(dtype))


# ---------------------------------------------------------------- the operator


def test_the_same_bits_every_time_and_a_second_backward_pass():
    hidden, weight, targets = random_inputs(4, 50)
    first, second = (loss_and_gradients(hidden, weight, targets) for _ in range(2))
    assert all(map(torch.equal, first, second))
    loss = _cross_entropy_sum(hidden, weight, targets)
    for scale in (1, 4):
        got = torch.autograd.grad(scale * loss, (hidden, weight), retain_graph=True)
        assert all(
            torch.equal(g, scale * e) for g, e in zip(got, first[1:], strict=True)
        )


def test_a_second_derivative_is_refused():
    """Not zero: the saved gradients are constants to autograd."""
    hidden, weight, targets = random_inputs()
    loss = _cross_entropy_sum(hidden, weight, targets)
    with pytest.raises(RuntimeError, match=r"no second derivative.*create_graph"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_it_may_be_checkpointed():
    inputs = random_inputs()
    loss = checkpoint(_cross_entropy_sum, *inputs, use_reentrant=False)
    got = loss.detach(), *torch.autograd.grad(loss, inputs[:2])
    assert all(map(torch.equal, got, loss_and_gradients(*inputs)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_tokens_at_once")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, False)])
def test_the_operator_keeps_what_its_registrations_promise(dtype, wanted):
    hidden, weight, targets = random_inputs()
    hidden, weight = (
        z.detach().requires_grad_(w)
        for z, w in zip((hidden, weight), wanted, strict=True)
    )
    torch.library.opcheck(
        transformer._cross_entropy, (hidden, weight, targets, dtype, *wanted)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_tokens_at_once")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph_it_is_the_same(backend):
    hidden, weight, targets = random_inputs()

    def mean(hidden, weight, targets):
        return _cross_entropy_sum(2 * hidden, weight, targets) / targets.numel()

    torch._dynamo.reset()
    compiled = torch.compile(mean, fullgraph=True, backend=backend)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = [f(hidden, weight, targets) for f in (compiled, mean)]
            with torch.no_grad():
                evaluated = compiled(hidden, weight, targets)
        got, expected = (
            (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
            for loss in losses
        )
        assert_is(got, expected)
        assert not evaluated.requires_grad
        assert relative_error(evaluated, expected[0]) < 1e-6


@pytest.mark.gpu
@pytest.mark.gate
@pytest.mark.parametrize("vocab", [V, 128])
def test_on_a_gpu_the_padding_does_not_show(vocab):
    inputs = random_inputs(4, 700, vocab=vocab)
    expected = oracle(*inputs)
    hidden, weight, targets = (z.detach().cuda() for z in inputs)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    got = [z.cpu() for z in loss_and_gradients(*leaves, targets)]
    assert_is(got, expected)
    again = [z.cpu() for z in loss_and_gradients(*leaves, targets)]
    assert all(map(torch.equal, got, again))
    with torch.autocast("cuda", torch.bfloat16):
        got = [z.cpu() for z in loss_and_gradients(*leaves, targets)]
    rounded = oracle(*(z.bfloat16() for z in inputs[:2]), inputs[2])
    assert_is(got, rounded, loss=2e-4, gradients=1e-2)
