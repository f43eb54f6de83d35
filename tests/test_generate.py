"""Generation: the recurrent step against full forward passes, sampling, UTF-8."""

import pytest
import torch
from trainer_cases import tiny_model

from mamba3lite.data.tokenizers import ByteTokenizer
from mamba3lite.generate import OptionError, TextStream, choose, generate, stream

EOS = ByteTokenizer.eos_id
CHUNK = 16


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_greedy_equals_the_argmax_of_full_forward_passes(length):
    model = tiny_model(seed=length).eval()
    prompt = torch.randint(0, 256, (length,), generator=seeded(length)).tolist()
    expected = list(prompt)
    for _ in range(2 * CHUNK + 1):
        with torch.no_grad():
            logits = model(torch.tensor([expected]))[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-5, "a tie would make this test say nothing"
        if int(logits.argmax()) == EOS:
            break
        expected.append(int(logits.argmax()))
    got = generate(
        model, prompt, eos_id=EOS, max_new_tokens=len(expected) - length, temperature=0
    )
    assert got == expected[length:] and got


def test_an_empty_prompt_starts_from_eos():
    model = tiny_model()
    options = {"eos_id": EOS, "max_new_tokens": 20, "seed": 3}
    assert generate(model, [], **options) == generate(model, [EOS], **options)


def test_it_stops_at_eos_and_does_not_return_it():
    model = tiny_model()
    greedy = {"max_new_tokens": 30, "temperature": 0}
    tokens = generate(model, [65], eos_id=EOS, **greedy)
    stop = tokens[10]
    cut = generate(model, [65], eos_id=stop, **greedy)
    assert cut == tokens[: tokens.index(stop)]


def test_a_seed_decides_and_other_random_numbers_do_not():
    model = tiny_model()
    options = {"eos_id": EOS, "max_new_tokens": 20, "temperature": 1.5, "top_p": 1}
    first = generate(model, [65], seed=1, **options)
    torch.rand(100)
    state = torch.get_rng_state()
    assert generate(model, [65], seed=1, **options) == first
    assert generate(model, [65], seed=2, **options) != first
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stop_request_ends_it_between_tokens():
    model, asked = tiny_model(), iter([False] * 4 + [True] * 10)
    tokens = stream(model, [65], eos_id=EOS, temperature=0, stop=lambda: next(asked))
    assert len(list(tokens)) == 4


def test_training_mode_comes_back():
    model = tiny_model().train()
    generate(model, [65], eos_id=EOS, max_new_tokens=2)
    assert model.training


# --------------------------------------------------------------------------------------
# Choosing one token

LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()


def frequencies(draws: int = 1500, **options) -> torch.Tensor:
    generator = seeded()
    counts = torch.zeros(len(LOGITS))
    for _ in range(draws):
        counts[choose(LOGITS, generator=generator, **options)] += 1
    return counts / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1, "top_k": 0, "top_p": 1}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 1, "top_k": 2, "top_p": 1}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1, "top_k": 0, "top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1, "top_k": 0, "top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"temperature": 0.5, "top_k": 0, "top_p": 1}, [16 / 30, 1 / 30, 0.3, 4 / 30]),
        ({"temperature": 1, "top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0, "top_k": 0, "top_p": 1}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_by_hand(options, expected):
    # Standard deviation of a frequency is at most 0.5 / sqrt(1500) = 0.013.
    got = frequencies(**options)
    assert torch.allclose(got, torch.tensor(expected).float(), atol=0.05)
    assert ((got > 0) == (torch.tensor(expected) > 0)).all()


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-320])
def test_a_tiny_temperature_takes_the_likeliest(temperature):
    assert choose(LOGITS, temperature, 0, 1.0, seeded()) == 0


def test_a_huge_temperature_makes_all_alike():
    got = frequencies(temperature=1e300, top_k=0, top_p=1)
    assert torch.allclose(got, torch.full((4,), 0.25), atol=0.05)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([1e4, 2e4, -1e4])
    assert choose(logits, 0.01, 0, 1.0, seeded()) == 1


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert 0 <= choose(LOGITS, 1.0, 99, 1.0, seeded()) < 4


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("max_new_tokens", 0, "max_new_tokens: got 0, should be at least 1"),
        ("temperature", -1.0, "temperature: got -1.0, should be at least 0"),
        ("temperature", float("nan"), "temperature: got nan, should be at least 0"),
        ("top_k", -1, "top_k: got -1, should be at least 0 (0 keeps all)"),
        ("top_p", 0.0, "top_p: got 0.0, should be above 0 and at most 1"),
        ("top_p", 1.1, "top_p: got 1.1, should be above 0 and at most 1"),
        ("seed", -1, "seed: got -1, should be between 0 and 2**63 - 1"),
    ],
)
def test_an_option_outside_its_range_is_one_line(option, value, line):
    with pytest.raises(OptionError) as error:
        generate(tiny_model(), [65], eos_id=EOS, **{option: value})
    assert str(error.value) == line


# --------------------------------------------------------------------------------------
# UTF-8


def test_characters_come_out_whole():
    text = "aé€𝄞z"
    out, pieces = TextStream(), []
    for byte in text.encode():
        pieces.append(out.feed(bytes([byte])))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) + out.close() == text
    assert [piece for piece in pieces if piece] == list(text)


def test_broken_bytes_become_one_mark_each():
    out = TextStream()
    assert out.feed(b"a\xffb") == "a\ufffdb"
    assert out.feed("€".encode()[:2]) == ""
    assert out.close() == "\ufffd"
