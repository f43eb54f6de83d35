"""Random numbers from a seed, every bit of which counts."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

# Where the 624 words of the Mersenne Twister lie in the state of a CPU generator: after
# its seed (8 bytes), words left (4), whether it is seeded (4), next word (8).
WORDS = slice(24, 24 + 624 * 8)


def seeded(seed: int, generator: torch.Generator | None = None) -> torch.Generator:
    """A generator of the CPU at the start of a seed's numbers; a new one if None.

    Of a seed, `manual_seed` takes 32 bits, so that seeds 2**32 apart give the same
    numbers. Seeds below 2**32 are given to it; for the others the words that it would
    derive come from a hash of the whole seed.

    Args: seed: 0 to 2**63 - 1.
    """
    generator = torch.Generator() if generator is None else generator
    generator.manual_seed(seed)
    if seed >= 2**32:
        digest = hashlib.shake_256(seed.to_bytes(8, "little")).digest(624 * 4)
        words = np.frombuffer(digest, dtype="<u4").astype(np.int64)
        state = generator.get_state()
        state[WORDS].view(torch.int64).copy_(torch.from_numpy(words))
        generator.set_state(state)
    return generator
