"""Generation: one scan over the prompts, then one recurrent step a token."""

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mamba3lite.models.decode import (
    ExactCache,
    RecurrentCache,
    exact_prefill,
    exact_step,
    recurrent_prefill,
    recurrent_step,
)
from mamba3lite.sampling import (
    MODE_NAMES,
    Sampling,
    check,
    check_lengths,
    check_prompt,
    check_seeds,
    integer,
)
from mamba3lite.sampling import OptionError as OptionError
from mamba3lite.seeds import seeded

# How a mode remembers and goes on: its cache, its prefill and its step.
MODES = dict(
    zip(
        MODE_NAMES,
        (
            (RecurrentCache, recurrent_prefill, recurrent_step),
            (ExactCache, exact_prefill, exact_step),
        ),
        strict=True,
    )
)


class LogitsError(ValueError):
    """A model whose logits are not finite: one line."""


# --------------------------------------------------------------------------------------
# Choosing tokens


GROUP = 64


def largest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row (E, V) and their ids; equal ones by id."""
    ids = None
    if 2 * k * GROUP < logits.shape[-1]:
        logits, ids = candidates(logits, k)
    ordered, index = logits.sort(dim=-1, descending=True, stable=True)
    ordered, index = ordered[:, :k], index[:, :k]
    return ordered, index if ids is None else ids.gather(-1, index)


def candidates(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Logits that hold the k largest of each row, and their ids in ascending order.

    Those of the k groups with the largest maxima: whatever lies in another group is
    beaten by k maxima. A whole vocabulary is much to sort for one token.
    """
    padded = F.pad(logits, (0, -logits.shape[-1] % GROUP), value=-torch.inf)
    groups = padded.unflatten(-1, (-1, GROUP))
    best = groups.amax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    best = best.sort(-1).values  # so that a stable sort orders equal logits by id
    ids = best[:, :, None] * GROUP + torch.arange(GROUP, device=logits.device)
    ids = ids.flatten(1)
    return padded.gather(-1, ids), ids


def sample(logits: Tensor, chance: Tensor, sampling: Sampling) -> Tensor:
    """Choose a token from each row of logits (E, V), on their device and at once.

    The tokens that `sampling` keeps lie side by side from the likeliest on, each as
    wide as it is likely; `chance` (E,), in [0, 1), says where along them to look.

    Returns: (E,) int64; -1 where the logits are not finite numbers.
    """
    logits = logits.float()
    top_k = 1 if sampling.temperature == 0 else sampling.top_k or logits.shape[-1]
    ordered, ids = largest(logits, top_k)
    gap = (ordered - ordered[:, :1]).double()
    p = torch.softmax(gap / (sampling.temperature or 1.0), dim=-1)
    p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0)
    edge = p.cumsum(-1)
    passed = (edge <= chance[:, None] * edge[:, -1:]).sum(-1)
    # A product rounded up to the last edge would pass them all.
    index = passed.clamp(max=(p > 0).sum(-1) - 1).clamp(min=0)
    tokens = ids.gather(-1, index[:, None]).squeeze(-1)
    return torch.where(ordered[:, 0].isfinite(), tokens, -1)


class Chances:
    """The random numbers of sequences, a stream of its own for each.

    Number n of a sequence follows from its seed alone: not from its neighbors, and not
    from the device.
    """

    at_once = 256

    def __init__(self, count: int, device: torch.device) -> None:
        self.block = torch.zeros(
            count, self.at_once, dtype=torch.float64, device=device
        )
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.generators: list[torch.Generator] = []

    def start(self, seeds: Sequence[int]) -> None:
        """Begin the streams of these seeds."""
        self.generators = [seeded(seed) for seed in seeds]

    def draw(self) -> None:
        """Draw the next numbers of every stream, `at_once` of each."""
        rows = [
            torch.rand(self.at_once, dtype=torch.float64, generator=generator)
            for generator in self.generators
        ]
        self.block[: len(rows)].copy_(torch.stack(rows))
        self.at.zero_()

    def take(self) -> Tensor:
        """One number of every stream, on the device; a graph may hold this call."""
        numbers = self.block.index_select(1, self.at).squeeze(1)
        self.at += 1
        return numbers


# --------------------------------------------------------------------------------------
# One sequence, by the forward pass of the model


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


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

    Every token is a call of the model itself, hooks and gathered shards included: the
    way for a model in training. `Decoder` is the fast one.

    Args: prompt: token ids; an empty one starts from EOS, which opens a document.
    temperature, top_k, top_p: as in `Sampling`. seed: of random numbers of its own.
    stop: polled before each token.
    Raises: as `Sampling`, `check_lengths` and `check_prompt` do; LogitsError.
    """
    sampling = Sampling(temperature, top_k, top_p)
    check_lengths(max_new_tokens, [seed])
    prompt = check_prompt(1, prompt, eos_id, model.cfg.vocab_size)
    device = next(model.parameters()).device
    generator = seeded(seed)
    tokens = torch.tensor([prompt], device=device)
    with evaluating(model):
        states = None
        for _ in range(max_new_tokens):
            if stop():
                return
            logits, states = model(tokens, states=states, return_states=True)
            chance = torch.rand(1, dtype=torch.float64, generator=generator).to(device)
            tokens = sample(logits[:, -1], chance, sampling)[None]
            token = int(tokens)
            if finished(token, eos_id):
                return
            yield token


def finished(token: int, eos_id: int) -> bool:
    """Whether this token ends its sequence.

    Raises: LogitsError for the mark of `sample`.
    """
    if token < 0:
        raise LogitsError("the model's logits are not finite: its weights diverged")
    return token == eos_id


# --------------------------------------------------------------------------------------
# Many sequences


@dataclass
class _Lanes:
    """Sequences side by side on the device; a graph reads and writes these tensors."""

    tokens: Tensor  # (E,) int64, chosen last
    slots: Tensor  # (E,) int32, -1 once a sequence has ended
    chances: Chances


def products_of(mode: str, device: torch.device) -> torch.autocast:
    """The context of a step: exact ones on a GPU compute as training does, in bfloat16.

    Recurrent ones have copies of the weights in the dtype of their own.
    """
    enabled = mode == "exact" and device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled, cache_enabled=False)


class Decoder:
    """Continues prompts side by side, in memory that their length does not change.

    On a GPU a step and the choice of its tokens are one CUDA graph, captured once for
    a number of lanes and a way of sampling, and replayed from then on; tokens come to
    the processor while the next step runs.

    One stream at a time: they share cache and lanes, and a newer one ends an older.

    Args: model: a `Mamba3Transformer`, not changed while this object is in use.
    lanes: sequences side by side, at most. mode: a name in `MODES`; "exact" wants a
    model with batch_invariant and gives, bit for bit, the logits of its full forward
    pass, on a GPU of that in bfloat16 autocast.
    Raises: OptionError for lanes or a mode that is not there; ValueError for a model
    that "exact" cannot keep its promise for.
    """

    prefill_tokens = 4096  # of each prompt at once

    def __init__(self, model: nn.Module, lanes: int = 64, mode: str = "recurrent"):
        check("lanes", lanes, integer("lanes", lanes) >= 1, "at least 1")
        check("mode", mode, mode in MODES, " or ".join(MODES))
        cache_of, self._prefill_piece, self._step = MODES[mode]
        self.model, self.lanes = model, lanes
        self.device = next(model.parameters()).device
        self._on_gpu = self.device.type == "cuda"
        self._products = partial(products_of, mode, self.device)
        with self._products():
            self._cache = cache_of(model, lanes)
        self._rounds: dict[tuple, tuple[_Lanes, Callable[[], None]]] = {}
        self._newest: object = None  # stands for the stream that has the cache

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        eos_id: int,
        seeds: Sequence[int],
        **options,
    ) -> list[list[int]]:
        """The tokens that follow each prompt; more prompts than lanes take turns.

        Args: as `stream`.
        Raises: as `stream`; for seeds and prompts of every turn before the first.
        """
        check_seeds(seeds)
        prompts = self._checked(prompts, seeds, eos_id)
        options["eos_id"] = eos_id
        results: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(prompts), self.lanes):
            turn = slice(first, first + self.lanes)
            for tokens in self.stream(prompts[turn], seeds=seeds[turn], **options):
                for result, token in zip(results[turn], tokens, strict=True):
                    result += [token] if token is not None else []
        return results

    @torch.inference_mode()
    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        eos_id: int,
        seeds: Sequence[int],
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 0.95,
    ) -> Iterator[list[int | None]]:
        """Yield one token of every sequence at a time; None for one that has ended.

        Args: prompts: token ids, at most as many as there are lanes; an empty one
        starts from EOS. seeds: one for each prompt; its random numbers follow from it
        alone. temperature, top_k, top_p: as in `Sampling`.
        Raises: OptionError naming the option, what was got and what is allowed;
        LogitsError; ValueError for a token the model does not know; TypeError for a
        token, seed or number that is no integer; RuntimeError once
        a newer stream of this decoder has been asked for a token.
        """
        sampling = Sampling(temperature, top_k, top_p)
        check_lengths(max_new_tokens, seeds)
        count = len(prompts)
        check("prompts", count, 1 <= count <= self.lanes, f"1 to {self.lanes}")
        prompts = self._checked(prompts, seeds, eos_id)
        self._newest = this = object()
        with evaluating(self.model):
            lanes, advance = self._round(count, sampling, eos_id)
            lanes.chances.start(seeds)
            choices = self._choices(lanes, advance, prompts, sampling, max_new_tokens)
            running = [True] * count
            for tokens in self._arrived(choices):
                for lane, token in enumerate(tokens):
                    running[lane] = running[lane] and not finished(token, eos_id)
                if not any(running):
                    return
                yield [
                    token if alive else None
                    for token, alive in zip(tokens, running, strict=True)
                ]
                if self._newest is not this:
                    raise RuntimeError(
                        "a newer stream of this decoder has begun; it has one at a time"
                    )

    def _checked(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], eos_id: int
    ) -> list[list[int]]:
        """The prompts as lists, EOS for an empty one, once all can be decoded."""
        count, vocab = len(prompts), self.model.cfg.vocab_size
        check("seeds", len(seeds), len(seeds) == count, f"{count}, one a prompt")
        return [
            check_prompt(number, prompt, eos_id, vocab)
            for number, prompt in enumerate(prompts, 1)
        ]

    def _choices(self, lanes, advance, prompts, sampling, max_new_tokens):
        """The device's tokens of every round; the caller may be rounds behind."""
        logits = self._prefill(prompts)
        lanes.slots.copy_(torch.arange(len(prompts)))
        for number in range(max_new_tokens):
            if number % Chances.at_once == 0:
                lanes.chances.draw()
            if number == 0:
                chance = lanes.chances.take()
                lanes.tokens.copy_(sample(logits, chance, sampling))
            else:
                advance()
            yield lanes.tokens

    def _prefill(self, prompts: list[list[int]]) -> Tensor:
        """Read prompts piece by piece; the logits after the last token of each."""
        slots = torch.arange(len(prompts), dtype=torch.int32, device=self.device)
        self._cache.reset(slots)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest, result = int(lengths.max()), None
        chunk = self.model.cfg.chunk_size
        piece = chunk * max(1, self.prefill_tokens // chunk)
        for first in range(0, longest, piece):
            width = min(piece, longest - first)
            tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
            for row, prompt in zip(tokens, prompts, strict=True):
                part = prompt[first : first + width]
                row[: len(part)] = torch.tensor(part, dtype=torch.int64)
            here = (lengths - first).clamp(0, width).to(self.device)
            some = torch.where(here > 0, slots, -1)  # the others have ended before
            with self._products():
                logits = self._prefill_piece(
                    *(self.model, tokens.to(self.device), here.clamp(min=1)),
                    *(self._cache, some),
                )
            reached = (here > 0)[:, None]
            result = logits if result is None else torch.where(reached, logits, result)
        return result

    def _round(self, count, sampling, eos_id):
        """The lanes for so many sequences, and what moves them on by one token."""
        key = count, sampling, eos_id
        if key not in self._rounds:
            lanes = _Lanes(
                torch.zeros(count, dtype=torch.int64, device=self.device),
                torch.full((count,), -1, dtype=torch.int32, device=self.device),
                Chances(count, self.device),
            )
            advance = partial(self._advance, lanes, sampling, eos_id)
            if self._on_gpu and self._cache.captures:
                advance = captured(advance)
            self._rounds[key] = lanes, advance
        return self._rounds[key]

    def _advance(self, lanes: _Lanes, sampling: Sampling, eos_id: int) -> None:
        """One step of every lane, and the choice of its next token, in place."""
        over = (lanes.tokens == eos_id) | (lanes.tokens < 0)
        lanes.slots.masked_fill_(over, -1)
        read = lanes.tokens.clamp(min=0)
        with self._products():
            logits = self._step(self.model, read, self._cache, lanes.slots)
        chosen = sample(logits, lanes.chances.take(), sampling)
        lanes.tokens.copy_(torch.where(lanes.slots < 0, lanes.tokens, chosen))

    def _arrived(self, choices: Iterator[Tensor]) -> Iterator[list[int]]:
        """Tokens as lists. A GPU computes round n + 1 while round n is on its way."""
        if not self._on_gpu:
            yield from (tokens.tolist() for tokens in choices)
            return
        flying: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        for tokens in choices:
            copy = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            copy.copy_(tokens, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            flying.append((copy, done))
            if len(flying) > 1:
                yield arrival(*flying.popleft())
        while flying:
            yield arrival(*flying.popleft())


def arrival(copy: Tensor, done: torch.cuda.Event) -> list[int]:
    """What was copied, once it is here."""
    done.synchronize()
    return copy.tolist()


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """The CUDA graph of run(), which must change nothing when it is called early."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def generate(
    model: nn.Module, prompt: Sequence[int], *, seed: int = 0, **options
) -> list[int]:
    """The tokens that follow one prompt; options are those of `Decoder.stream`."""
    return Decoder(model, lanes=1).generate([prompt], seeds=[seed], **options)[0]


# --------------------------------------------------------------------------------------
# Text


def texts(
    decoder: Decoder,
    tokenizer,
    prompts: Sequence[bytes],
    *,
    num_samples: int = 1,
    seed: int = 0,
    **options,
) -> Iterator[tuple[int, int, Iterator[str]]]:
    """Prompts with what follows them: prompt and sample number from 1, and the text.

    The text comes in pieces that end between characters; as it is computed where a turn
    of the decoder holds one sequence, at once where it holds several. A turn of several
    that is interrupted still gives what there is of each, before KeyboardInterrupt.

    Args: num_samples: texts for each prompt; number n has the seed seed + n - 1, and so
    a text depends on its prompt and its seed alone. options: as `Decoder.stream`.
    """
    check_seeds([seed, seed + integer("num_samples", num_samples) - 1])
    ids = [tokenizer.encode_bytes(prompt).tolist() for prompt in prompts]
    wanted = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
    for first in range(0, len(wanted), decoder.lanes):
        turn = wanted[first : first + decoder.lanes]
        rounds: Iterable = decoder.stream(
            [ids[p] for p, _ in turn],
            seeds=[seed + s for _, s in turn],
            eos_id=tokenizer.eos_id,
            **options,
        )
        interrupt = None
        if len(turn) > 1:
            rounds, interrupt = until_interrupted(rounds)
        for lane, (p, s) in enumerate(turn):
            yield p + 1, s + 1, as_text(tokenizer, ids[p], rounds, lane)
        if interrupt:
            raise interrupt


def until_interrupted(rounds: Iterable) -> tuple[list, KeyboardInterrupt | None]:
    """The rounds there are, and the Ctrl-C that ended them early, if one did."""
    kept = []
    try:
        for tokens in rounds:
            kept.append(tokens)
    except KeyboardInterrupt as interrupt:
        return kept, interrupt
    return kept, None


def as_text(
    tokenizer, prompt: list[int], rounds: Iterable[list[int | None]], lane: int
) -> Iterator[str]:
    """The text of one lane of `Decoder.stream`, prompt first."""
    text = TextStream()
    yield text.feed(tokenizer.decode_bytes(prompt))
    for tokens in rounds:
        if tokens[lane] is not None:
            yield text.feed(tokenizer.decode_bytes([tokens[lane]]))
    yield text.close()


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
