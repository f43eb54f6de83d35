"""What generation is asked for, checked before torch loads."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

MODE_NAMES = ("recurrent", "exact")


class OptionError(ValueError):
    """A sampling option outside its range: one line."""


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Tokens outside the top_k likeliest are dropped, then those beyond the smallest set
    that holds a share top_p of what is left; the likeliest always stays. Equal logits
    are ordered by id.

    Args: temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p: 1 keeps
    all.
    Raises: OptionError naming the option, what was got and what is allowed; TypeError
    for what is no number, or for top_k no integer.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise TypeError(f"{name}: got {value!r}, should be a number")
        integer("top_k", self.top_k)
        finite = 0 <= self.temperature < float("inf")
        check("temperature", self.temperature, finite, "at least 0, and finite")
        check("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 keeps all)")
        inside = 0 < self.top_p <= 1
        check("top_p", self.top_p, inside, "above 0 and at most 1")


def check(name: str, value: object, allowed: bool, wanted: str) -> None:
    """Refuse an option.

    Raises: OptionError naming the option, what was got and what is allowed.
    """
    if not allowed:
        raise OptionError(f"{name}: got {value!r}, should be {wanted}")


def check_lengths(max_new_tokens: int, seeds: Sequence[int]) -> None:
    """Refuse a length or a seed outside its range.

    Raises: OptionError naming the option, what was got and what is allowed; TypeError
    for one that is no integer.
    """
    allowed = 1 <= integer("max_new_tokens", max_new_tokens) < 2**31
    check("max_new_tokens", max_new_tokens, allowed, "between 1 and 2**31 - 1")
    check_seeds(seeds)


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse a seed outside its range; raises as `check_lengths`."""
    for seed in seeds:
        allowed = 0 <= integer("seed", seed) < 2**63
        check("seed", seed, allowed, "between 0 and 2**63 - 1")


def check_prompt(
    number: int, prompt: Sequence[int], eos_id: int, vocab_size: int
) -> list[int]:
    """The ids of a prompt as a list; an empty one is EOS, which opens a document.

    Args: number: of the prompt, for the message. prompt: integers, or a tensor of them.
    Raises: TypeError for an id that is no integer; ValueError for one that the model
    does not know; eos_id is one of them.
    """
    eos_id = integer("eos_id", eos_id)
    if not 0 <= eos_id < vocab_size:
        raise ValueError(f"eos_id is {eos_id}; wanted 0 to {vocab_size - 1}")
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    ids = [integer(f"an id of prompt {number}", id) for id in ids] or [eos_id]
    for bad in (min(ids), max(ids)):
        if not 0 <= bad < vocab_size:
            raise ValueError(
                f"prompt {number} holds the id {bad}; wanted 0 to {vocab_size - 1}"
            )
    return ids


def integer(name: str, value: object) -> int:
    """An integer of any library as Python's; neither a float nor a bool is one.

    Raises: TypeError naming what it is, and what was got.
    """
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        if not is_bool:
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: got {value!r}, should be an integer")
