"""Seeds: every bit counts, and small ones give what they always gave."""

import hashlib

import numpy as np
import pytest
import torch
from trainer_cases import MODEL, assert_same_bits, new_run, prepare_corpus, run_config

from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.seeds import seeded


def numbers(generator, count=2000):
    return torch.rand(count, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_a_small_seed_is_that_of_torch(seed):
    expected = torch.Generator().manual_seed(seed)
    assert torch.equal(seeded(seed).get_state(), expected.get_state())


@pytest.mark.parametrize("seed", [2**32, 2**32 + 1, 2**63 - 1])
def test_a_large_seed_starts_the_twister_at_its_hash(seed):
    key = hashlib.shake_256(seed.to_bytes(8, "little")).digest(4 * 624)
    twister = np.random.MT19937()
    words = np.frombuffer(key, dtype="<u4").astype(np.uint32)
    twister.state = {
        "bit_generator": "MT19937",
        "state": {"key": words, "pos": 624},
    }
    high, low = twister.random_raw((2000, 2)).T
    expected = ((high << 32 | low) % 2**53) / 2**53  # torch takes the last 53 bits
    assert numbers(seeded(seed)).tolist() == expected.tolist()


def test_every_bit_of_a_seed_counts():
    found = {tuple(numbers(seeded(1 << bit), 4).tolist()) for bit in range(63)}
    assert len(found) == 63


def test_normal_numbers_too_are_of_the_seed_alone():
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)  # torch keeps the second number of a pair
    again = torch.randn(5, generator=seeded(2**40, generator))
    assert torch.equal(again, torch.randn(5, generator=seeded(2**40)))


def test_every_seed_of_a_run_counts_in_its_weights(tmp_path):
    prepared = prepare_corpus(tmp_path)
    weights = {}
    for seed in (7, 2**32, 2**32 + 7, 2**63 - 1):
        run = new_run(run_config(prepared, tmp_path / "run", seed=seed))
        weights[seed] = dict(run.model.named_parameters())
    torch.manual_seed(7)
    expected = dict(Mamba3Transformer(MODEL).named_parameters())
    assert_same_bits(weights[7], expected)
    found = {tuple(w["embed.weight"][0].tolist()) for w in weights.values()}
    assert len(found) == 4
