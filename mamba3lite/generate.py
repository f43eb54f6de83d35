"""Generation: one scan over the prompt, then one recurrent step a token."""

import codecs
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class OptionError(ValueError):
    """A sampling option outside its range: one line."""


@torch.inference_mode()
def stream(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    eos_id: int,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, one by one, up to and without EOS.

    The prompt goes through the chunkwise scan at once; every later token continues from
    the states it left, in time and memory that do not depend on the length.

    Args: prompt: token ids; an empty one starts from EOS, which opens a document.
    temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all.
    seed: of a generator used for this call alone. stop: polled before each token.
    Raises: OptionError naming the option, what was got and what is allowed.
    """
    check_options(max_new_tokens, temperature, top_k, top_p, seed)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt) or [eos_id]], device=device)
    training = model.training
    model.eval()
    try:
        states = None
        for _ in range(max_new_tokens):
            if stop():
                return
            logits, states = model(tokens, states=states, return_states=True)
            token = choose(logits[0, -1], temperature, top_k, top_p, generator)
            if token == eos_id:
                return
            yield token
            tokens = torch.tensor([[token]], device=device)
    finally:
        model.train(training)


def generate(model: nn.Module, prompt: Sequence[int], **options) -> list[int]:
    """The tokens that follow a prompt, as a list; options are those of ``stream``."""
    return list(stream(model, prompt, **options))


def choose(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> int:
    """Draw one token from logits (V,).

    Tokens outside the top_k likeliest are dropped, then those beyond the smallest set
    that holds a share top_p of what is left; the likeliest always stays. Equal logits
    are ordered by id.
    """
    logits = logits.float().cpu()
    if temperature == 0:
        return int(logits.argmax())
    ordered, ids = logits.sort(descending=True, stable=True)
    if top_k:
        ordered, ids = ordered[:top_k], ids[:top_k]
    # Below the least float32 it would divide 0 by 0; the limit is the likeliest token.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    probabilities = torch.softmax((ordered - ordered[0]) / temperature, dim=0)
    before = probabilities.cumsum(0) - probabilities
    probabilities = torch.where(before < top_p, probabilities, 0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def check_options(
    max_new_tokens: int, temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Refuse options outside their range.

    Raises: OptionError naming the option, what was got and what is allowed.
    """
    checks = [
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < float("inf"), "at least 0"),
        ("top_k", top_k, top_k >= 0, "at least 0 (0 keeps all)"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < 2**63, "between 0 and 2**63 - 1"),
    ]
    for name, value, allowed, wanted in checks:
        if not allowed:
            raise OptionError(f"{name}: got {value}, should be {wanted}")


class TextStream:
    """Turns bytes into text as they come, never splitting a UTF-8 character."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """The characters that are complete after these bytes."""
        return self.decoder.decode(data)

    def close(self) -> str:
        """What is left: U+FFFD for a character cut short."""
        return self.decoder.decode(b"", final=True)
