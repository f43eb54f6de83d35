"""The configuration, the block and the language model.

Expected values come from the model's description written out again over the naive scan
in double precision, from closed forms, and from running parts alone.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import subprocess
import sys
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from cases import complex_normal, relative_error
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from mamba3lite.models import transformer
from mamba3lite.models.mamba_block import Mamba3Block, init_decay
from mamba3lite.models.ssd_complex import ssd_naive_complex
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig

SMALL = {
    "vocab_size": 37,
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 2,
    "head_dim": 4,
    "state_dim": 6,
    "chunk_size": 8,
    "ffn_dim": 24,
}


def random_model(seed: int = 0, **changes) -> Mamba3Transformer:
    """Every parameter away from its initial value, so that each one matters."""
    torch.manual_seed(seed)
    model = Mamba3Transformer(SMALL | changes)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_complex():
                p.copy_(torch.complex(-torch.rand(p.shape), 3 * torch.randn(p.shape)))
            else:
                p.add_(0.3 * torch.randn(p.shape))
    return model


def random_tokens(time: int = 21, batch: int = 2, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, SMALL["vocab_size"], (batch, time), generator=g)


# ---------------------------------------------------------------- configuration

DEFAULTS = {
    "vocab_size": 50257,
    "d_model": 1024,
    "n_layers": 28,
    "n_heads": 16,
    "head_dim": 64,
    "state_dim": 64,
    "chunk_size": 64,
    "ssd_dispatch": "pytorch",
    "ssd_precision": "tf32",
    "ffn_dim": 2048,
    "max_seq_len": 2048,
    "weight_tying": True,
    "rms_norm_eps": 1e-5,
    "init_std": 0.02,
    "grad_checkpoint": False,
    "batch_invariant": False,
    "a_init": "decay",
}


def test_config_fields_and_defaults():
    assert dataclasses.asdict(ModelConfig()) == DEFAULTS


def test_a_misspelt_field_is_a_type_error_naming_it():
    with pytest.raises(TypeError, match="d_modl"):
        ModelConfig(d_modl=16)
    with pytest.raises(TypeError, match="d_modl"):
        Mamba3Transformer({"d_modl": 16})


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *((f, v, "at least 1") for f in ("vocab_size", "n_layers") for v in (0, -3)),
        ("d_model", 16.0, "integer"),
        ("n_heads", True, "integer"),
        ("head_dim", "64", "integer"),
        ("chunk_size", 0, "at least 1"),
        ("ffn_dim", None, "integer"),
        ("max_seq_len", 0, "at least 1"),
        ("state_dim", 7, "even"),
        ("state_dim", 0, "at least 1"),
        ("ssd_dispatch", "cuda", "pytorch, triton, fused"),
        ("ssd_precision", "fp16", "ieee, tf32, bf16"),
        ("a_init", "random", "decay, spectrum"),
        ("weight_tying", 1, "True or False"),
        ("grad_checkpoint", "no", "True or False"),
        ("rms_norm_eps", 0.0, "above 0"),
        ("rms_norm_eps", math.nan, "finite"),
        ("init_std", -0.02, "above 0"),
        ("init_std", math.inf, "finite"),
        ("init_std", True, "number"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError) as error:
        ModelConfig(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field} is {value!r}")
    assert allowed in message
    assert "\n" not in message


def test_a_dict_is_accepted_wherever_a_config_is():
    tokens = random_tokens()
    torch.manual_seed(0)
    from_dict = Mamba3Transformer(SMALL)
    torch.manual_seed(0)
    from_config = Mamba3Transformer(ModelConfig(**SMALL))
    assert torch.equal(from_dict(tokens), from_config(tokens))
    assert isinstance(from_dict.cfg, ModelConfig)
    u = torch.randn(1, 5, 16)
    assert Mamba3Block(SMALL)(u).shape == Mamba3Block(ModelConfig(**SMALL))(u).shape


@pytest.mark.filterwarnings("ignore:layer:RuntimeWarning")
def test_the_callers_config_is_never_changed():
    """Not even by a dispatch that falls back, or by training with checkpoints."""
    given = SMALL | {"ssd_dispatch": "triton", "grad_checkpoint": True}
    for config in (given, ModelConfig(**given)):
        before = copy.deepcopy(config)
        model = Mamba3Transformer(config)
        tokens = random_tokens()
        model(tokens, tokens).backward()
        assert config == before


# ---------------------------------------------------------------- sizes and names


def on_meta(**changes) -> Mamba3Transformer:
    with torch.device("meta"):
        return Mamba3Transformer(ModelConfig(**changes))


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_the_default_model_has_433_662_400_parameters():
    model = on_meta()
    assert count(model) == 433_662_400
    assert count(model.layers[0]) == 13_649_936
    assert len(model.state_dict()) == 227
    assert len(list(model.parameters())) == 226  # the tied matrix counts once
    assert count(on_meta(weight_tying=False)) == 485_125_568
    assert len(list(on_meta(weight_tying=False).parameters())) == 227


def test_names_shapes_and_dtypes_of_a_layer():
    layer = on_meta().layers[3]
    got = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    sizes = {name: math.prod(shape) for name, shape in got.items()}
    assert got["A"] == (16,)
    assert layer.A.dtype == torch.complex64
    assert sizes["in_proj.weight"] == 1024 * 5136 == 5_259_264
    assert sizes["mimo.weight"] == sizes["out_proj.weight"] == 1_048_576
    assert sizes["ffn_gate_up.weight"] + sizes["ffn_down.weight"] == 6_291_456
    assert len(got) == 8
    assert not [name for name in got if name.endswith("bias")]
    assert {p.dtype for n, p in layer.named_parameters() if n != "A"} == {torch.float32}
    assert layer.layer_idx == 3


def test_the_head_is_the_embedding_when_tied_and_its_own_when_not():
    tied, untied = random_model(), random_model(weight_tying=False)
    assert tied.lm_head.weight is tied.embed.weight
    assert untied.lm_head.weight is not untied.embed.weight
    tokens = random_tokens()
    before = tied(tokens)
    with torch.no_grad():
        tied.lm_head.weight.mul_(2)
    assert torch.equal(tied.embed.weight, tied.lm_head.weight)
    assert not torch.allclose(tied(tokens), before)
    copied = copy.deepcopy(tied)
    copied.load_state_dict(random_model(5).state_dict())
    assert copied.lm_head.weight is copied.embed.weight


# ---------------------------------------------------------------- initial values


def test_a_init_decay_is_minus_one_everywhere():
    assert torch.equal(init_decay(5, "decay"), torch.full((5,), -1 + 0j))
    for layer in Mamba3Transformer(SMALL).layers:
        assert torch.equal(layer.A, torch.full((2,), -1 + 0j))


def test_a_init_spectrum_by_hand():
    """Im = pi h / H; Re = -10^(-3 + 3 frac(0.618 h)), frac = 0, .618, .236, .854."""
    A = init_decay(4, "spectrum")
    assert A.dtype == torch.complex64
    exponents = torch.tensor([-3.0, -1.146, -2.292, -0.438])
    torch.testing.assert_close(A.real, -(10**exponents))
    torch.testing.assert_close(A.imag, torch.tensor([0, 0.25, 0.5, 0.75]) * math.pi)
    for layer in Mamba3Transformer(SMALL | {"a_init": "spectrum"}).layers:
        assert torch.equal(layer.A, init_decay(2, "spectrum"))


@pytest.mark.parametrize("heads", [1, 16, 64])
def test_a_spectrum_is_stable_and_spread(heads):
    A = init_decay(heads, "spectrum")
    assert ((A.real <= -1e-3 + 1e-9) & (A.real > -1)).all()
    assert ((A.imag >= 0) & (A.imag < math.pi)).all()
    assert len(A.real.unique()) == len(A.imag.unique()) == heads


def test_the_initializer_respects_the_mixers_identity():
    model = Mamba3Transformer(SMALL)
    for layer in model.layers:
        assert torch.equal(layer.mimo.weight, torch.eye(8))
        assert torch.equal(layer.norm_ssd.weight, torch.ones(16))
    assert torch.equal(model.norm_f.weight, torch.ones(16))


def made_on_meta(fields: dict) -> Mamba3Transformer:
    with torch.device("meta"):
        model = Mamba3Transformer(fields)
    return model.to_empty(device="cpu")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "source",
    [lambda f: random_model(**f), lambda f: copy.deepcopy(random_model(**f)),
     lambda f: made_on_meta(SMALL | f)],
    ids=["trained", "copied", "made on meta"],
)  # fmt: skip
def test_a_model_can_be_started_again(source, tied):
    """With the bits of a new one: mixer, A, gains, matrices and the tie."""
    fields = {"weight_tying": tied, "a_init": "spectrum"}
    model, fresh = source(fields), Mamba3Transformer(SMALL | fields)
    for started in (model, fresh):
        torch.manual_seed(5)
        started.reset_parameters()
    assert (model.lm_head.weight is model.embed.weight) == tied
    assert torch.equal(model.layers[1].mimo.weight, torch.eye(8))
    assert torch.equal(model.layers[1].A, init_decay(2, "spectrum"))
    wanted = dict(fresh.named_parameters())
    for name, got in model.named_parameters():
        assert torch.equal(got, wanted[name]), name


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_matrices_start_with_init_std(std):
    wide = SMALL | {"vocab_size": 257, "d_model": 128, "ffn_dim": 256, "init_std": std}
    torch.manual_seed(0)
    model = Mamba3Transformer(wide | {"weight_tying": False})
    layer = model.layers[0]
    for m in (model.embed, model.lm_head, layer.in_proj, layer.ffn_gate_up):
        assert m.weight.std().item() == pytest.approx(std, rel=0.05)
        assert abs(m.weight.mean().item()) < 0.05 * std


def test_a_seed_fixes_every_initial_value():
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(Mamba3Transformer(SMALL).state_dict())
    first, same, other = states
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


# ---------------------------------------------------------------- what it computes


def rms_norm(u: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def block_by_hand(p: dict[str, torch.Tensor], u: torch.Tensor) -> torch.Tensor:
    """The block as model.md words it, in double precision over the naive scan."""
    proj = rms_norm(u, p["norm_ssd.weight"]) @ p["in_proj.weight"].T
    H, D, N = SMALL["n_heads"], SMALL["head_dim"], SMALL["state_dim"]
    ends = torch.tensor([0, H * D, H * N, H * N, H * N, H * N, H]).cumsum(0).tolist()
    x, B_re, B_im, C_re, C_im, dt = (proj[..., a:b] for a, b in pairwise(ends))
    heads = (*u.shape[:2], H, -1)
    y = ssd_naive_complex(
        x.reshape(heads),
        p["A"],
        torch.complex(B_re, B_im).reshape(heads),
        torch.complex(C_re, C_im).reshape(heads),
        dt,
    ).real
    u = u + y.flatten(2) @ p["mimo.weight"].T @ p["out_proj.weight"].T
    wide = rms_norm(u, p["norm_ffn.weight"]) @ p["ffn_gate_up.weight"].T
    gate, up = wide[..., : SMALL["ffn_dim"]], wide[..., SMALL["ffn_dim"] :]
    return u + (gate * torch.sigmoid(gate) * up) @ p["ffn_down.weight"].T


def in_double(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().to(torch.complex128 if p.is_complex() else torch.float64)
        for name, p in module.named_parameters(remove_duplicate=False)
    }


def logits_by_hand(model: Mamba3Transformer, tokens: torch.Tensor) -> torch.Tensor:
    p = in_double(model)
    u = p["embed.weight"][tokens]
    for layer in model.layers:
        u = block_by_hand(in_double(layer), u)
    return rms_norm(u, p["norm_f.weight"]) @ p["lm_head.weight"].T


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_match_the_description_in_double_precision(tied):
    model, tokens = random_model(weight_tying=tied), random_tokens()
    logits = model(tokens)
    assert logits.shape == (2, 21, 37)
    assert logits.dtype == torch.float32
    assert relative_error(logits, logits_by_hand(model, tokens)) < 1e-5


def test_the_scan_is_the_only_reader_of_the_projection():
    """`_ssd_with_dispatch` gives float32 (B, T, H, D), from float32 or bfloat16."""
    block = random_model().layers[0]
    proj = torch.randn(2, 11, 2 * (4 + 4 * 6 + 1))
    y = block._ssd_with_dispatch(proj)
    assert (y.shape, y.dtype) == ((2, 11, 2, 4), torch.float32)
    again, state = block._ssd_with_dispatch(proj, return_final_states=True)
    assert torch.equal(again, y)
    assert (state.shape, state.dtype) == ((2, 2, 4, 6), torch.complex64)
    rounded = block._ssd_with_dispatch(proj.bfloat16())
    assert rounded.dtype == torch.float32
    again = block._ssd_with_dispatch(proj.bfloat16().float())
    assert torch.equal(rounded, again)


def test_every_parameter_receives_a_gradient():
    model, tokens = random_model(), random_tokens()
    model(tokens, targets=tokens.roll(-1, 1)).backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype, name
        assert p.grad.any(), name
        assert torch.isfinite(torch.view_as_real(p.grad + 0j)).all(), name


@given(time=st.integers(2, 40), data=st.data())
def test_no_logit_depends_on_a_later_token(time, data):
    step = data.draw(st.integers(0, time - 2))
    model, tokens = random_model(), random_tokens(time)
    changed = tokens.clone()
    changed[:, step + 1 :] = (tokens[:, step + 1 :] + 1) % 37
    logits, other = model(tokens), model(changed)
    assert relative_error(other[:, : step + 1], logits[:, : step + 1]) < 1e-6
    assert relative_error(other[:, step + 1], logits[:, step + 1]) > 1e-3


def gradient_at_embeddings(model, loss) -> torch.Tensor:
    """Gradient of loss(logits) in the embedded tokens, (B, T, d_model)."""
    kept = []
    hook = model.embed.register_forward_hook(
        lambda module, args, out: kept.append(out) or out
    )
    value = loss()
    hook.remove()
    return torch.autograd.grad(value, kept[0])[0]


def test_no_gradient_reaches_a_later_token():
    model, tokens = random_model(), random_tokens()
    grad = gradient_at_embeddings(model, lambda: model(tokens)[:, :9].sum())
    assert grad[:, :9].any()
    assert not grad[:, 9:].any()


def test_a_row_does_not_see_its_neighbors():
    model, tokens = random_model(), random_tokens(batch=3)
    whole = model(tokens)
    for b in range(3):
        assert relative_error(whole[b : b + 1], model(tokens[b : b + 1])) < 1e-6


def test_the_length_is_not_limited_by_max_seq_len():
    model = random_model(max_seq_len=8)
    assert torch.isfinite(model(random_tokens(50))).all()


# ---------------------------------------------------------------- the loss


def plain_loss(model, tokens, targets, reduction="mean"):
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def gradients(model, loss) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(model.parameters()))


def masked_targets(tokens: torch.Tensor) -> torch.Tensor:
    targets = tokens.roll(-1, 1)
    targets[0, 3:7] = -100
    targets[1, -1] = -100
    return targets


@pytest.fixture
def few_logits_at_once(monkeypatch):
    """Room for eight tokens: two rows of 21 are chunks of 8, 8, 8, 8, 8, 2."""
    monkeypatch.setattr(transformer, "_TOKENS_AT_ONCE", 8)


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "chunked"])
def test_the_loss_is_the_plain_cross_entropy(chunked, request):
    """Targets are already shifted: target t is scored by logits t."""
    if chunked:
        request.getfixturevalue("few_logits_at_once")
    model, tokens = random_model(), random_tokens()
    targets = masked_targets(tokens)
    expected = plain_loss(model, tokens, targets)
    loss = model(tokens, targets=targets)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    pairs = zip(gradients(model, loss), gradients(model, expected), strict=True)
    for got, wanted in pairs:
        assert relative_error(got, wanted) < 1e-5


def test_reduction_sum_returns_the_sum_and_the_count():
    model, tokens = random_model(), random_tokens()
    targets = masked_targets(tokens)
    loss_sum, n_valid = model(tokens, targets=targets, reduction="sum")
    assert n_valid.item() == 2 * 21 - 4 - 1
    expected = plain_loss(model, tokens, targets, reduction="sum")
    assert loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    mean = model(tokens, targets=targets)
    assert mean.item() == pytest.approx(loss_sum.item() / n_valid.item(), rel=1e-6)


@pytest.mark.usefixtures("few_logits_at_once")
def test_an_ignored_target_takes_no_part():
    model, tokens = random_model(), random_tokens()
    targets = torch.full_like(tokens, -100)
    targets[0, 5] = 3
    expected = -model(tokens)[0, 5].log_softmax(0)[3]
    assert model(tokens, targets=targets).item() == pytest.approx(expected.item(), 1e-6)


@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "chunked"])
def test_no_valid_target_gives_zero_and_zero_gradients(chunked, request):
    if chunked:
        request.getfixturevalue("few_logits_at_once")
    model, tokens = random_model(), random_tokens()
    nothing = torch.full_like(tokens, -100)
    loss = model(tokens, targets=nothing)
    assert loss.item() == 0
    assert not any(grad.any() for grad in gradients(model, loss))
    loss_sum, n_valid = model(tokens, targets=nothing, reduction="sum")
    assert (loss_sum.item(), n_valid.item()) == (0, 0)


# ---------------------------------------------------------------- refused calls


@pytest.mark.parametrize(("bad", "named"), [(-1, "-1"), (37, "37"), (10**6, "1000000")])
def test_ids_out_of_range_are_named_before_the_lookup(bad, named):
    model, tokens = random_model(), random_tokens()
    wrong = tokens.clone()
    wrong[1, 7] = bad
    with pytest.raises(
        ValueError, match=f"tokens holds the id {named}; wanted 0 to 36"
    ):
        model(wrong)
    with pytest.raises(ValueError, match=f"targets holds the id {named}; .*0 to 36"):
        model(tokens, targets=wrong)


@pytest.mark.bad_input
def test_shapes_that_differ_from_the_tokens_are_refused():
    """A transposed target has as many ids: it would be scored in the wrong order."""
    model, tokens = random_model(), random_tokens()
    with pytest.raises(
        ValueError, match=r"targets has shape \(21, 2\); wanted \(2, 21\)"
    ):
        model(tokens, targets=tokens.T.contiguous())
    with pytest.raises(ValueError, match=r"targets has shape \(2, 20\)"):
        model(tokens, targets=tokens[:, 1:])
    with pytest.raises(ValueError, match=r"doc_ids has shape \(2, 20\)"):
        model(tokens, doc_ids=tokens[:, 1:])


@pytest.mark.bad_input
@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (4,), (1, 2, 4)])
def test_tokens_that_are_no_batch_are_named(shape):
    with pytest.raises(ValueError, match=r"tokens has shape .*; wanted \(B, T\)"):
        random_model()(torch.zeros(shape, dtype=torch.long))


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["tokens", "targets", "doc_ids"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float])
def test_ids_of_another_dtype_are_named(name, dtype):
    ids = {"tokens": random_tokens()}
    ids[name] = random_tokens().to(dtype)
    with pytest.raises(TypeError, match=f"{name} is {dtype}; wanted int64 or int32"):
        random_model()(**ids)


def test_int32_ids_give_the_same_loss():
    model, tokens = random_model(), random_tokens()
    wide = model(tokens, targets=tokens, doc_ids=tokens)
    narrow = model(*[tokens.int()] * 3)
    assert torch.equal(wide, narrow)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction is 'none'; wanted 'mean' or 'sum'"):
        random_model()(random_tokens(), targets=random_tokens(), reduction="none")


def test_states_are_not_returned_beside_a_loss():
    with pytest.raises(ValueError, match="return_states"):
        random_model()(random_tokens(), targets=random_tokens(), return_states=True)


# ---------------------------------------------------------------- packed documents

DOCUMENTS = (5, 9, 1, 13)  # lengths; chunk_size is 8


def packed_ids(lengths=DOCUMENTS) -> torch.Tensor:
    """Both rows the same documents; the last id was used before and still resets."""
    ids = [7, 3, 8, 7]
    return torch.tensor(ids).repeat_interleave(torch.tensor(lengths)).expand(2, -1)


def test_packed_documents_have_the_logits_of_each_alone():
    model, tokens = random_model(), random_tokens(sum(DOCUMENTS))
    logits = model(tokens, doc_ids=packed_ids())
    end = 0
    for length in DOCUMENTS:
        start, end = end, end + length
        alone = model(tokens[:, start:end])
        assert relative_error(logits[:, start:end], alone) < 1e-5
    assert relative_error(logits[:, 5:], model(tokens)[:, 5:]) > 1e-2  # it matters


def test_the_loss_of_packed_documents_is_that_of_their_parts():
    model, tokens = random_model(), random_tokens(sum(DOCUMENTS))
    targets = masked_targets(tokens)
    loss, n = model(tokens, targets=targets, doc_ids=packed_ids(), reduction="sum")
    parts = [
        model(t, targets=y, reduction="sum")
        for t, y in zip(
            tokens.split(DOCUMENTS, 1), targets.split(DOCUMENTS, 1), strict=True
        )
    ]
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in parts), rel=1e-5)
    assert n.item() == sum(m.item() for _, m in parts)


def test_no_gradient_flows_into_another_document():
    model, tokens = random_model(), random_tokens(sum(DOCUMENTS))
    grad = gradient_at_embeddings(
        model, lambda: model(tokens, doc_ids=packed_ids())[:, 5:14].square().sum()
    )
    assert not grad[:, :5].any() and not grad[:, 14:].any()
    leaking = gradient_at_embeddings(
        model, lambda: model(tokens)[:, 5:14].square().sum()
    )
    assert leaking[:, :5].norm() > 1e-2 * leaking.norm()


def test_rows_may_change_documents_at_different_steps():
    model, tokens = random_model(), random_tokens()
    ids = torch.zeros(2, 21, dtype=torch.int32)
    ids[1, 10:] = 1
    logits = model(tokens, doc_ids=ids)
    assert relative_error(logits[:1], model(tokens[:1])) < 1e-6
    assert relative_error(logits[1:, 10:], model(tokens[1:, 10:])) < 1e-5


def test_one_document_is_no_reset():
    model, tokens = random_model(), random_tokens()
    assert relative_error(model(tokens, doc_ids=tokens * 0 + 4), model(tokens)) < 1e-6


# ---------------------------------------------------------------- states in and out


@given(time=st.integers(2, 40), data=st.data())
def test_a_prompt_cut_anywhere_continues(time, data):
    step = data.draw(st.integers(1, time - 1))
    model, tokens = random_model(), random_tokens(time)
    first, states = model(tokens[:, :step], return_states=True)
    second, final = model(tokens[:, step:], states=states, return_states=True)
    whole, expected = model(tokens, return_states=True)
    assert relative_error(torch.cat([first, second], 1), whole) < 1e-5
    for got, wanted in zip(final, expected, strict=True):
        assert (got.shape, got.dtype) == ((2, 2, 4, 6), torch.complex64)
        assert relative_error(got, wanted) < 1e-5


def test_steps_of_one_token_give_the_logits_of_the_whole():
    model, tokens = random_model(), random_tokens()
    states, steps = None, []
    for t in range(21):
        logits, states = model(tokens[:, t : t + 1], states=states, return_states=True)
        steps.append(logits)
    assert relative_error(torch.cat(steps, 1), model(tokens)) < 1e-5


def test_a_continued_document_does_not_reset_at_its_first_step():
    model, tokens = random_model(), random_tokens()
    _, states = model(tokens[:, :8], return_states=True)
    second = model(tokens[:, 8:], states=states, doc_ids=tokens[:, 8:] * 0 + 9)
    assert relative_error(second, model(tokens)[:, 8:]) < 1e-5


def test_a_piece_may_begin_with_a_new_document():
    """In the first row the document goes on; in the second a new one begins."""
    model, tokens = random_model(), random_tokens()
    ids = torch.tensor([[4] * 21, [4] * 8 + [6] * 13])
    whole = model(tokens, doc_ids=ids)
    _, states = model(tokens[:, :8], return_states=True)
    piece = {"states": states, "doc_ids": ids[:, 8:]}
    second = model(tokens[:, 8:], previous_doc_ids=ids[:, 7], **piece)
    assert relative_error(second, whole[:, 8:]) < 1e-5
    leaking = model(tokens[:, 8:], **piece)
    assert relative_error(leaking[1], whole[1, 8:]) > 0.05


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.bad_input
def test_states_of_another_batch_are_refused(batch_invariant):
    model = random_model(batch_invariant=batch_invariant)
    _, states = model(random_tokens(8, batch=3), return_states=True)
    with pytest.raises(
        ValueError, match=r"states\[0\] has shape \(3, 2, 4, 6\); wanted"
    ):
        model(random_tokens(8), states=states)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"previous_doc_ids": torch.zeros(2, dtype=torch.int64)},
         ValueError, "previous_doc_ids goes with doc_ids"),
        ({"doc_ids": random_tokens(), "previous_doc_ids": torch.zeros(2)},
         TypeError, "previous_doc_ids is torch.float32"),
        ({"doc_ids": random_tokens(), "previous_doc_ids": random_tokens()},
         ValueError, r"previous_doc_ids has shape \(2, 21\); wanted \(2,\)"),
    ],
)  # fmt: skip
def test_previous_documents_that_do_not_fit_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        random_model()(random_tokens(), **options)


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["tokens", "targets", "doc_ids"])
def test_what_is_no_tensor_is_named(name):
    arguments = {"tokens": random_tokens()} | {name: [[1, 2]]}
    with pytest.raises(TypeError, match=f"^{name} is list; wanted a tensor$"):
        random_model()(**arguments)


@pytest.mark.bad_input
def test_one_state_for_each_layer_is_wanted():
    g = torch.Generator().manual_seed(0)
    state = complex_normal(2, 2, 4, 6, generator=g)
    with pytest.raises(ValueError, match=r"states holds 1; wanted 2, one per layer"):
        random_model()(random_tokens(), states=[state])
    with pytest.raises(TypeError, match=r"^states\[1\] is int; wanted a tensor$"):
        random_model()(random_tokens(), states=[None, 1])


# ---------------------------------------------------------------- precision


def test_autocast_leaves_logits_loss_and_states_in_full_precision():
    model, tokens = random_model(), random_tokens()
    exact, loss = model(tokens), model(tokens, targets=tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, states = model(tokens, return_states=True)
        cast_loss = model(tokens, targets=tokens)
    assert logits.dtype == cast_loss.dtype == torch.float32
    assert {state.dtype for state in states} == {torch.complex64}
    assert 1e-4 < relative_error(logits, exact) < 0.1  # the matrices were in bfloat16
    assert cast_loss.item() == pytest.approx(loss.item(), rel=0.1)
    cast_loss.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == p.dtype, name


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_that_drops_the_rotation_is_refused(dtype):
    model = random_model().to(dtype)
    with pytest.raises(TypeError, match=r"layer 0: A is torch\.\w+.*float32.*autocast"):
        model(random_tokens())


# ---------------------------------------------------------------- fallback


@pytest.mark.parametrize("dispatch", ["triton", "fused"])
def test_a_dispatch_that_cannot_run_warns_once_a_block_and_runs(dispatch):
    """No tile of a kernel has six states."""
    expected = random_model()
    model, tokens = random_model(ssd_dispatch=dispatch), random_tokens()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = [model(tokens) for _ in range(3)]
    caught = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    assert len(caught) == SMALL["n_layers"]
    for idx, warning in enumerate(caught):
        message = str(warning.message)
        assert message.startswith(
            f"layer {idx}: ssd_dispatch={dispatch!r} unavailable ("
        )
        assert message.endswith("falling back to 'pytorch'")
    for logits in outputs:
        assert torch.equal(logits, expected(tokens))
    assert model.cfg.ssd_dispatch == dispatch
    assert all(layer._triton_fallback_warned for layer in model.layers)


def test_the_default_dispatch_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        random_model()(random_tokens())


def test_any_other_failure_of_the_scan_is_not_hidden(monkeypatch):
    def out_of_memory(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(
        "mamba3lite.models.mamba_block.ssd_complex_chunkwise", out_of_memory
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        random_model()(random_tokens())


# ---------------------------------------------------------------- without numbers


@pytest.mark.parametrize("changes", [{}, {"batch_invariant": True}])
def test_meta_tensors_and_fake_ones_give_shapes(changes):
    tokens, ids = random_tokens(), (random_tokens() > 20).cumsum(1)
    model = random_model(**changes)
    wanted = model(tokens, doc_ids=ids).shape
    with torch.device("meta"):
        empty = Mamba3Transformer(SMALL | changes)
    on_meta = [z.to("meta") for z in (tokens, ids)]
    assert empty(on_meta[0], doc_ids=on_meta[1]).shape == wanted
    assert empty(on_meta[0], on_meta[0]).shape == ()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(z) for z in (tokens, ids)]
        assert model(fake[0], doc_ids=fake[1]).shape == wanted
        assert model(fake[0], fake[0], fake[1]).shape == ()


@pytest.mark.slow
@pytest.mark.parametrize("given", ["tokens", "targets", "doc_ids"])
def test_an_exported_model_takes_every_length(given):
    """In a program without a loop over chunks; lengths of 1 and of whole chunks too."""
    model = random_model(chunk_size=8).eval()
    sizes = {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("T", max=512)}

    def arguments(time, batch):
        tokens = random_tokens(time, batch)
        other = {
            "tokens": {},
            "targets": {"targets": masked_targets(tokens)},
            "doc_ids": {"doc_ids": (tokens > 20).cumsum(1)},
        }
        return {"tokens": tokens} | other[given]

    example = arguments(21, 2)
    program = torch.export.export(
        model, (), example, dynamic_shapes=dict.fromkeys(example, sizes)
    ).module()
    for time in (1, 2, 7, 8, 9, 16, 100):
        inputs = arguments(time, 3)
        got, wanted = program(**inputs), model(**inputs)
        assert got.shape == wanted.shape
        assert relative_error(got, wanted) < 1e-5


# ---------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("aot_eager", {"ssd_dispatch": "triton"}),
        ("aot_eager", {"ssd_dispatch": "fused"}),
        ("inductor", {"n_layers": 1}),
    ],
)
def test_the_compiled_model_is_one_graph_with_the_same_loss(backend, changes):
    """fullgraph: no break, neither at a check nor at the one warning of a fallback."""
    model, tokens = random_model(**changes), random_tokens(16)
    targets, ids = masked_targets(tokens), (tokens > 20).cumsum(1)
    expected = model(tokens, targets, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    loss = compiled(tokens, targets, ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    pairs = zip(gradients(model, loss), gradients(model, expected), strict=True)
    for got, wanted in pairs:
        assert relative_error(got, wanted) < 1e-4


# ---------------------------------------------------------------- at full width


@pytest.mark.slow
def test_a_full_width_block_is_finite_forward_and_backward():
    torch.manual_seed(0)
    model = Mamba3Transformer(ModelConfig(n_layers=1, vocab_size=257))
    tokens = torch.randint(0, 257, (1, 256))
    model(tokens, targets=tokens).backward()
    for name, p in model.named_parameters():
        assert torch.isfinite(torch.view_as_real(p.grad + 0j)).all(), name


@pytest.mark.gpu
@pytest.mark.gate
def test_logits_and_loss_on_a_gpu():
    model, tokens = random_model(), random_tokens()
    targets = masked_targets(tokens)
    loss = model(tokens, targets).item()
    expected = logits_by_hand(model, tokens)
    model, tokens = model.cuda(), tokens.cuda()
    assert relative_error(model(tokens).cpu(), expected) < 1e-5
    assert model(tokens, targets.cuda()).item() == pytest.approx(loss, rel=1e-5)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, states = model(tokens, return_states=True)
    assert logits.dtype == torch.float32
    assert {state.dtype for state in states} == {torch.complex64}


def test_the_package_imports_without_triton():
    """Neither triton nor the compiler, which imports it, is loaded with the model."""
    code = (
        "import sys; from mamba3lite import Mamba3Transformer, ModelConfig; "
        "print([m for m in ('triton', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
