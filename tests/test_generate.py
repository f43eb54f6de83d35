"""Generation: against full forward passes, sampling, many sequences, UTF-8."""

import math

import numpy as np
import pytest
import torch
from trainer_cases import tiny_model

from mamba3lite.data.tokenizers import ByteTokenizer
from mamba3lite.generate import (
    GROUP,
    Chances,
    Decoder,
    LogitsError,
    OptionError,
    Sampling,
    TextStream,
    generate,
    largest,
    sample,
    stream,
    texts,
)

EOS = ByteTokenizer.eos_id
CHUNK = 16


def by_forward_passes(model, prompt, **options):
    return list(stream(model, prompt, **options))


both_ways = pytest.mark.parametrize("run", [generate, by_forward_passes])


def random_prompt(length: int) -> list[int]:
    g = torch.Generator().manual_seed(length)
    return torch.randint(0, 256, (length,), generator=g).tolist()


def expected_greedy(model, prompt: list[int], steps: int) -> list[int]:
    """The likeliest continuation, one full forward pass a token."""
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-5, "a tie would make this test say nothing"
        if int(logits.argmax()) == EOS:
            break
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@both_ways
@pytest.mark.parametrize("length", [1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_greedy_equals_the_argmax_of_full_forward_passes(run, length):
    model = tiny_model(seed=length).eval()
    prompt = random_prompt(length)
    expected = expected_greedy(model, prompt, 2 * CHUNK + 1)
    greedy = {"max_new_tokens": len(expected), "temperature": 0}
    assert run(model, prompt, eos_id=EOS, **greedy) == expected and expected


@both_ways
def test_an_empty_prompt_starts_from_eos(run):
    model = tiny_model()
    options = {"eos_id": EOS, "max_new_tokens": 20, "seed": 3}
    assert run(model, [], **options) == run(model, [EOS], **options)


@both_ways
def test_it_stops_at_eos_and_does_not_return_it(run):
    model = tiny_model()
    greedy = {"max_new_tokens": 30, "temperature": 0}
    tokens = run(model, [65], eos_id=EOS, **greedy)
    stop = tokens[10]
    cut = run(model, [65], eos_id=stop, **greedy)
    assert cut == tokens[: tokens.index(stop)]


@both_ways
def test_a_seed_decides_and_other_random_numbers_do_not(run):
    model = tiny_model()
    options = {"eos_id": EOS, "max_new_tokens": 20, "temperature": 1.5, "top_p": 1}
    first = run(model, [65], seed=1, **options)
    torch.rand(100)
    state = torch.get_rng_state()
    assert run(model, [65], seed=1, **options) == first
    assert run(model, [65], seed=2, **options) != first
    assert torch.equal(torch.get_rng_state(), state)


@both_ways
def test_seeds_that_share_their_low_bits_give_other_texts(run):
    model = tiny_model()
    options = {"eos_id": EOS, "max_new_tokens": 20, "temperature": 1.5, "top_p": 1}
    seeds = (0, 2**32, 2**33, 2**62)
    assert len({tuple(run(model, [65], seed=seed, **options)) for seed in seeds}) == 4


def test_both_ways_choose_alike():
    model, options = tiny_model(), {"eos_id": EOS, "max_new_tokens": 40, "seed": 4}
    got = generate(model, [65, 66], **options)
    assert got == by_forward_passes(model, [65, 66], **options) and got


def test_a_stop_request_ends_it_between_tokens():
    model, asked = tiny_model(), iter([False] * 4 + [True] * 10)
    tokens = stream(model, [65], eos_id=EOS, temperature=0, stop=lambda: next(asked))
    assert len(list(tokens)) == 4


@both_ways
def test_training_mode_comes_back(run):
    model = tiny_model().train()
    run(model, [65], eos_id=EOS, max_new_tokens=2)
    assert model.training


@both_ways
def test_a_model_that_diverged_is_one_line(run):
    model = tiny_model()
    with torch.no_grad():
        model.norm_f.weight[3] = math.nan
    with pytest.raises(LogitsError, match=r"^the model's logits are not finite:"):
        run(model, [65], eos_id=EOS)


# --------------------------------------------------------------------------------------
# Many sequences

PROMPTS = [random_prompt(length) for length in (0, 1, CHUNK + 3, 5, 2 * CHUNK)]
SEEDS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("lanes", [1, 2, 5, 8])
def test_a_text_does_not_depend_on_its_neighbors(lanes):
    model, options = tiny_model(), {"eos_id": EOS, "max_new_tokens": 2 * CHUNK}
    alone = [
        generate(model, prompt, seed=seed, **options)
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]
    assert len({tuple(tokens) for tokens in alone}) == 5
    decoder = Decoder(model, lanes)
    for _ in range(2):  # what the first call left behind must not matter
        assert decoder.generate(PROMPTS, seeds=SEEDS, **options) == alone


def test_each_sequence_ends_at_its_own_eos():
    model, options = tiny_model(), {"max_new_tokens": 24, "temperature": 0.5}
    whole = Decoder(model, 5).generate(PROMPTS, seeds=SEEDS, eos_id=EOS, **options)
    stop = whole[2][6]
    got = Decoder(model, 5).generate(
        PROMPTS[1:], seeds=SEEDS[1:], eos_id=stop, **options
    )
    for tokens, cut in zip(whole[1:], got, strict=True):
        assert cut == (tokens[: tokens.index(stop)] if stop in tokens else tokens)
    assert len({len(cut) for cut in got}) > 1, "they end at different times"


def test_a_prompt_read_in_pieces_is_the_same_prompt(monkeypatch):
    model, options = tiny_model(), {"eos_id": EOS, "max_new_tokens": CHUNK}
    whole = Decoder(model, 5).generate(PROMPTS, seeds=SEEDS, **options)
    monkeypatch.setattr(Decoder, "prefill_tokens", 20)  # cut to one chunk of 16
    assert Decoder(model, 5).generate(PROMPTS, seeds=SEEDS, **options) == whole


def test_a_longer_run_begins_with_the_shorter_one(monkeypatch):
    monkeypatch.setattr(Chances, "at_once", 8)
    model, options = tiny_model(), {"eos_id": EOS, "temperature": 2.0, "top_k": 0}
    short = generate(model, [65], max_new_tokens=21, **options)
    monkeypatch.setattr(Chances, "at_once", 5)
    assert generate(model, [65], max_new_tokens=40, **options)[:21] == short
    assert len(set(short)) > 15, "a repeated random number would repeat tokens"


def test_memory_does_not_grow_with_the_length():
    model, slots = tiny_model(), torch.zeros(1, dtype=torch.int32)
    decoder = Decoder(model, 1)
    sizes = set()
    for length in (10, 200):
        generated = decoder.stream(
            [[65] * length], seeds=[0], eos_id=EOS, max_new_tokens=length
        )
        for _ in generated:
            held = [t for t in vars(decoder._cache).values() if torch.is_tensor(t)]
            sizes.add(sum(t.untyped_storage().nbytes() for t in held))
    assert len(sizes) == 1 and slots.numel() == 1


class TestExactMode:
    @pytest.fixture
    def model(self):
        return tiny_model(batch_invariant=True).eval()

    @pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
    def test_tokens_are_those_of_full_forward_passes(self, model, length):
        prompt = random_prompt(length)
        expected = expected_greedy(model, prompt, CHUNK + 2)
        options = {"eos_id": EOS, "temperature": 0, "max_new_tokens": CHUNK + 2}
        got = Decoder(model, 1, "exact").generate([prompt], seeds=[0], **options)
        assert got == [expected] and expected

    def test_neighbors_and_pieces_change_no_token(self, model, monkeypatch):
        options = {"eos_id": EOS, "max_new_tokens": 20}
        alone = [
            Decoder(model, 1, "exact").generate([prompt], seeds=[seed], **options)[0]
            for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
        ]
        monkeypatch.setattr(Decoder, "prefill_tokens", CHUNK)
        together = Decoder(model, 5, "exact").generate(PROMPTS, seeds=SEEDS, **options)
        assert together == alone

    def test_it_wants_a_batch_invariant_model(self):
        with pytest.raises(ValueError, match="batch_invariant"):
            Decoder(tiny_model(), 1, "exact")


def test_texts_number_prompts_and_samples():
    model, tokenizer = tiny_model(), ByteTokenizer()
    options = {"max_new_tokens": 12, "num_samples": 2, "seed": 7}
    found = {}
    for lanes in (1, 3, 4):
        rows = texts(Decoder(model, lanes), tokenizer, [b"def", b"\xc3\xa9"], **options)
        found[lanes] = [(p, s, "".join(pieces)) for p, s, pieces in rows]
    assert found[1] == found[3] == found[4]
    assert [row[:2] for row in found[1]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    alone = generate(model, b"def", eos_id=EOS, seed=8, max_new_tokens=12)
    assert found[1][1][2] == "def" + tokenizer.decode(alone)
    assert found[1][2][2].startswith("é")


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda m: Decoder(m, 0), "lanes: got 0, should be at least 1"),
        (
            lambda m: Decoder(m, 1, "fast"),
            "mode: got 'fast', should be recurrent or exact",
        ),
        (
            lambda m: next(Decoder(m, 2).stream([[1]] * 3, eos_id=EOS, seeds=[0] * 3)),
            "prompts: got 3, should be 1 to 2",
        ),
        (
            lambda m: next(Decoder(m, 2).stream([[1]], eos_id=EOS, seeds=[0, 1])),
            "seeds: got 2, should be 1, one a prompt",
        ),
    ],
)
def test_what_a_decoder_refuses(call, line):
    with pytest.raises(OptionError) as error:
        call(tiny_model())
    assert str(error.value) == line


NO_INTEGERS = [1.5, 2.0, True, torch.tensor(1.5), torch.tensor(True), np.float32(2)]
ONE_BY_ONE = {"temperature": 0, "max_new_tokens": 3}


@both_ways
@pytest.mark.parametrize("bad", NO_INTEGERS)
def test_an_id_that_is_no_integer_is_a_type_error(run, bad):
    with pytest.raises(TypeError, match=r"^an id of prompt 1: got .*, should be an in"):
        run(tiny_model(), [65, bad], eos_id=EOS)


@both_ways
@pytest.mark.parametrize("bad", [*NO_INTEGERS, None, "0", -1, 257, 10**30])
def test_the_end_of_a_document_is_an_id_of_the_model(run, bad):
    """Any other would never end a text."""
    kind = ValueError if type(bad) is int else TypeError
    with pytest.raises(kind, match=r"^eos_id(:| is) "):
        run(tiny_model(), [65], eos_id=bad)


@both_ways
@pytest.mark.parametrize("option", ["seed", "max_new_tokens", "top_k"])
@pytest.mark.parametrize("bad", NO_INTEGERS)
def test_a_count_or_seed_that_is_no_integer_is_a_type_error(run, option, bad):
    with pytest.raises(TypeError, match=rf"^{option}: got .*, should be an integer$"):
        run(tiny_model(), [65], eos_id=EOS, **{option: bad})


@both_ways
@pytest.mark.parametrize("option", ["temperature", "top_p"])
def test_a_share_that_is_no_number_is_a_type_error(run, option):
    with pytest.raises(TypeError, match=rf"^{option}: got True, should be a number$"):
        run(tiny_model(), [65], eos_id=EOS, **{option: True})


@both_ways
@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_a_prompt_may_be_a_tensor_of_integers(run, kind):
    model = tiny_model()
    got = run(model, kind([65, 66]), eos_id=EOS, **ONE_BY_ONE)
    assert got == run(model, [65, 66], eos_id=EOS, **ONE_BY_ONE)
    with pytest.raises(TypeError, match=r"^an id of prompt 1: got 1\.5, should be"):
        run(model, kind([1.5, 2.0]), eos_id=EOS)


def test_the_number_of_lanes_and_of_samples_are_integers():
    with pytest.raises(TypeError, match=r"^lanes: got 1\.5, should be an integer$"):
        Decoder(tiny_model(), 1.5)
    decoder = Decoder(tiny_model(), 1)
    with pytest.raises(TypeError, match=r"^num_samples: got 2\.0, should be"):
        next(texts(decoder, ByteTokenizer(), [b""], num_samples=2.0))


@pytest.mark.parametrize("bad", [-1, 257])
def test_an_unknown_token_is_named(bad):
    with pytest.raises(ValueError, match=rf"^prompt 2 holds the id {bad}; wanted 0 to"):
        Decoder(tiny_model(), 2).generate([[1], [2, bad]], eos_id=EOS, seeds=[0, 0])


@pytest.mark.parametrize(
    ("prompts", "seeds", "line"),
    [
        ([[1]] * 3, [0, 1], "seeds: got 2, should be 3, one a prompt"),
        ([[1]] * 3, [0] * 4, "seeds: got 4, should be 3, one a prompt"),
        ([[1]] * 3, [0, 1, -1], "seed: got -1, should be between 0 and 2**63 - 1"),
        ([[1], [], [257]], [0] * 3, "prompt 3 holds the id 257; wanted 0 to 256"),
    ],
)
def test_every_turn_is_checked_before_the_first_is_decoded(
    prompts, seeds, line, monkeypatch
):
    decoder = Decoder(tiny_model(), 1)
    monkeypatch.setattr(decoder, "stream", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ValueError) as error:
        decoder.generate(prompts, eos_id=EOS, seeds=seeds)
    assert str(error.value) == line


def test_a_newer_stream_ends_an_older_one_and_is_whole():
    decoder = Decoder(tiny_model(), 1)
    options = {"eos_id": EOS, "max_new_tokens": 9, "seeds": [1]}
    whole = list(decoder.stream([[66]], **options))
    older, newer = (decoder.stream([[id]], **options) for id in (65, 66))
    next(older)
    got = [next(newer)]
    with pytest.raises(
        RuntimeError, match=r"^a newer stream of this decoder has begun"
    ):
        next(older)
    assert got + list(newer) == whole and len(whole) > 1


def test_a_refused_stream_leaves_the_other_alone():
    decoder = Decoder(tiny_model(), 1)
    running = decoder.stream([[65]], eos_id=EOS, seeds=[1], temperature=0)
    next(running)
    with pytest.raises(OptionError):
        next(decoder.stream([[65]], eos_id=EOS, seeds=[-1]))
    next(running)


# --------------------------------------------------------------------------------------
# Choosing tokens

LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()
DRAWS = 3000


def frequencies(logits=LOGITS, **options) -> torch.Tensor:
    """How often each token is chosen when chances are spread evenly over [0, 1)."""
    chances = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    options = {"temperature": 1, "top_k": 0, "top_p": 1} | options
    tokens = sample(logits.expand(DRAWS, -1), chances, Sampling(**options))
    return torch.bincount(tokens, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.1, 0.3, 0.2]),
        ({"top_k": 2}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.65}, [4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.75}, [4 / 9, 0, 3 / 9, 2 / 9]),
        ({"temperature": 0.5}, [16 / 30, 1 / 30, 0.3, 4 / 30]),
        ({"top_k": 2, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.1, 0.3, 0.2]),
        ({"temperature": 1e300}, [0.25, 0.25, 0.25, 0.25]),
        ({"temperature": 1e-30}, [1, 0, 0, 0]),
        ({"temperature": 1e-320}, [1, 0, 0, 0]),
    ],
)
def test_probabilities_by_hand(options, expected):
    got, expected = frequencies(**options), torch.tensor(expected).float()
    assert torch.allclose(got, expected, atol=1.5 / DRAWS)
    assert ((got > 0) == (expected > 0)).all()


@pytest.mark.parametrize(
    ("logits", "top_k", "kept"),
    [
        ([1.0, 2, 2, 2], 2, [1, 2]),
        ([0.0, -0.0, 0.0, -1], 2, [0, 1]),
        ([-1.0, -3, -2, -2], 2, [0, 2]),
        ([-2.0, -2, 5, -2], 3, [0, 1, 2]),
    ],
)
def test_equal_logits_are_ordered_by_id(logits, top_k, kept):
    got = frequencies(torch.tensor(logits), temperature=1e6, top_k=top_k)
    assert got.nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("kind", ["distinct", "few values", "infinite"])
@pytest.mark.parametrize("k", [1, 7, 20])
def test_the_largest_of_many_logits_are_those_of_a_whole_sort(kind, k):
    g = torch.Generator().manual_seed(k)
    logits = torch.randn(3, 2 * 20 * GROUP + 9, generator=g)
    if kind == "few values":
        logits = torch.randint(3, logits.shape, generator=g).float()
    elif kind == "infinite":
        logits[torch.rand(logits.shape, generator=g) < 0.999] = -math.inf
    ordered, ids = largest(logits, k)
    for row in range(3):
        by_hand = sorted(range(logits.shape[1]), key=lambda i: (-logits[row, i], i))
        assert ids[row].tolist() == by_hand[:k]
        assert torch.equal(ordered[row], logits[row, ids[row]])


def test_greedy_takes_the_first_of_equal_logits():
    assert sample(torch.zeros(1, 9), torch.rand(1), Sampling(temperature=0)) == 0


def test_chances_at_both_ends_stay_inside():
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    for options in ({}, {"top_p": 0.65}, {"top_k": 3}):
        tokens = sample(LOGITS.expand(2, -1), ends, Sampling(1.0, 0, 1.0))
        tokens = sample(LOGITS.expand(2, -1), ends, Sampling(1.0, **options))
        chosen = frequencies(**options)
        assert tokens[0] == 0 and (chosen[tokens] > 0).all()


def test_rows_are_chosen_one_by_one():
    logits, chances = torch.randn(6, 40), torch.rand(6, dtype=torch.float64)
    together = sample(logits, chances, Sampling())
    for row in range(6):
        assert sample(logits[[row]], chances[[row]], Sampling()) == together[row]


@pytest.mark.parametrize("temperature", [0.0, 0.01, 1.0])
def test_large_logits_do_not_overflow(temperature):
    logits = torch.tensor([[1e4, 2e4, -1e4]])
    assert sample(logits, torch.zeros(1), Sampling(temperature, 0, 1.0)) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked(bad, temperature):
    logits = torch.zeros(2, 5)
    logits[1, 3] = bad
    tokens = sample(logits, torch.zeros(2), Sampling(temperature))
    assert tokens.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        (
            "max_new_tokens",
            0,
            "max_new_tokens: got 0, should be between 1 and 2**31 - 1",
        ),
        (
            "temperature",
            -1.0,
            "temperature: got -1.0, should be at least 0, and finite",
        ),
        (
            "temperature",
            math.nan,
            "temperature: got nan, should be at least 0, and finite",
        ),
        ("top_k", -1, "top_k: got -1, should be at least 0 (0 keeps all)"),
        ("top_p", 0.0, "top_p: got 0.0, should be above 0 and at most 1"),
        ("top_p", 1.1, "top_p: got 1.1, should be above 0 and at most 1"),
        ("seed", -1, "seed: got -1, should be between 0 and 2**63 - 1"),
    ],
)
@both_ways
def test_an_option_outside_its_range_is_one_line(run, option, value, line):
    with pytest.raises(OptionError) as error:
        run(tiny_model(), [65], eos_id=EOS, **{option: value})
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
