"""What the trainer reads: windows of prepared tokens, in a reproducible order.

Which window a row of a batch holds is a pure function of (seed, position, row): the
order of an epoch is a permutation computed by index arithmetic, never stored and
never iterated. So a run resumes anywhere, and one rank or eight make the same batch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mamba3lite.data import DataError
from mamba3lite.data.shards import count_faults, load_index, open_shard
from mamba3lite.data.tokenizers import load_tokenizer

FEISTEL_ROUNDS = 6
IGNORED_TARGET = -100


class TokenStream:
    """One split of a prepared folder as one long row of tokens, mapped from disk.

    Raises: DataError on opening, when a shard differs from what the index promises
    (magic, version, dtype, counts, payload hash, ids within the vocabulary).
    """

    def __init__(self, folder: str | Path, split: str = "train"):
        folder = Path(folder)
        self.index = load_index(folder)
        if split not in self.index["splits"]:
            allowed = ", ".join(self.index["splits"])
            raise ValueError(f"split: got {split!r}, allowed are {allowed}")
        self.meta = self.index["splits"][split]
        vocab_size = self.index["tokenizer"]["vocab_size"]
        self.shards = [open_shard(folder, e, vocab_size) for e in self.meta["shards"]]
        self.ends = np.cumsum([len(shard) for shard in self.shards], dtype=np.int64)
        if len(self) != self.meta["tokens"]:
            raise DataError(
                f"{folder}: the shards of {split} hold {len(self):,} tokens, the index "
                f"wants {self.meta['tokens']:,}; `mamba3lite prepare --source SOURCE "
                f"--out {shlex.quote(str(folder))}`, with the SOURCE that it came "
                "from, replaces it"
            )
        tokenizer = self.index["tokenizer"]
        if faults := count_faults(self.meta, self.shards, tokenizer):
            raise DataError(
                f"{folder / 'index.json'}: {split}: {faults[0]}; `mamba3lite verify "
                f"{shlex.quote(str(folder))}` shows all that is wrong"
            )

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens start to stop - 1 as int64; IndexError outside the stream."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(
                f"tokens: got {start} to {stop}, allowed are 0 to {len(self)}"
            )
        parts = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop:
            begin = int(self.ends[shard]) - len(self.shards[shard])
            part = self.shards[shard][start - begin : stop - begin]
            parts.append(part.astype(np.int64))
            start += len(part)
            shard += 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class PretrainDataset:
    """Windows of `seq_len` tokens over one split of a prepared folder.

    Window i has the tokens i*T to i*T + T - 1, and as targets the tokens one later;
    windows do not overlap. For training a last, partial window is left out.

    Args: folder: made by `mamba3lite prepare`; seq_len: T; seed: of the order of the
    windows; split: "train" or "val".
    Attributes: n_windows (whole ones), n_eval_windows (with the partial one),
    n_tokens, n_bytes (of text: an EOS is not a byte), vocab_size, eos_id, tokenizer,
    fingerprint (sha256 over everything that was prepared).
    Raises: DataError when the folder is missing, damaged, or too short for one window
    of training or one target of validation.
    """

    def __init__(
        self, folder: str | Path, seq_len: int, seed: int, split: str = "train"
    ):
        if seq_len < 1:
            raise ValueError(f"seq_len: got {seq_len}, wanted 1 or more")
        self.stream = TokenStream(folder, split)
        self.seq_len, self.seed, self.split = seq_len, seed, split
        about = self.stream.index["tokenizer"]
        self.tokenizer = load_tokenizer(about["name"])
        self.vocab_size, self.eos_id = about["vocab_size"], about["eos_id"]
        self.fingerprint = self.stream.index["sha256"]
        self.n_tokens, self.n_bytes = len(self.stream), self.stream.meta["bytes"]
        self.n_windows = max(self.n_tokens - 1, 0) // seq_len
        self.n_eval_windows = -(-max(self.n_tokens - 1, 0) // seq_len)
        least = seq_len + 1 if split == "train" else 2
        if self.n_tokens < least:
            raise DataError(
                f"{folder}: {split} has {self.n_tokens:,} tokens in "
                f"{self.stream.meta['documents']:,} documents, wanted {least:,} or "
                f"more (windows of {seq_len} tokens and a target)"
            )

    def batch(
        self,
        position: int,
        rows: range | Sequence[int],
        global_rows: int,
        shift: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some rows of one global batch, for training.

        Row r of batch p is sample g = shift + p * global_rows + r of an endless
        sequence; epoch g // n_windows visits each window once, in an order of its own.

        Args: position: number of the batch, from 0; rows: which of its rows, each
        below global_rows, at least one; shift: where batch 0 would begin, in windows
        and maybe below 0, had every batch been of global_rows rows.
        Returns: tokens, targets, doc_ids (R, T) and window_ids (R,), all int64.
        Raises: ValueError for a position or row that does not exist.
        """
        rows = np.asarray(rows, dtype=np.int64)
        start = shift + position * global_rows
        if position < 0 or start < 0:
            raise ValueError(
                f"position: got {position} (shift {shift}), wanted 0 or more"
            )
        if not rows.size or rows.min() < 0 or rows.max() >= global_rows:
            raise ValueError(
                f"rows: got {rows.tolist()}, wanted some of 0 to {global_rows - 1}"
            )
        if not self.n_windows:
            raise DataError(
                f"{self.split}: {self.n_tokens:,} tokens hold no whole window of "
                f"{self.seq_len} and a target"
            )
        samples = start + rows
        epochs, places = np.divmod(samples, self.n_windows)
        windows = permuted(places, self.n_windows, self.seed, epochs)
        return *self._windows(windows), torch.from_numpy(windows)

    def eval_batches(
        self,
        batch_rows: int,
        windows: Sequence[int] | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Windows in order, for evaluation: each target of the split exactly once.

        The first token of the split has nothing before it and is no target; all
        others are. The last window is padded with EOS, and its targets with -100.

        Args: batch_rows: windows at a time; windows: some of 0 to n_eval_windows - 1,
        or all of them; rank, size: every size-th window, from number rank on. All
        ranks get as many batches: one that has no window left, one without targets.
        Yields: tokens, targets, doc_ids, int64, (batch_rows, T) or fewer at the end.
        Raises: ValueError for a window that does not exist.
        """
        if batch_rows < 1:
            raise ValueError(f"batch_rows: got {batch_rows}, wanted 1 or more")
        windows = range(self.n_eval_windows) if windows is None else windows
        longest = len(windows[::size])
        mine = windows[rank::size]
        for start in range(0, longest, batch_rows):
            if part := mine[start : start + batch_rows]:
                yield self._windows(part)
            else:
                tokens, targets, doc_ids = self._windows(windows[:1])
                yield tokens, torch.full_like(targets, IGNORED_TARGET), doc_ids

    def text_bytes(self) -> bytes:
        """All text of the split as one row of bytes, without EOS."""
        return self.tokenizer.decode_bytes(self.stream.tokens(0, self.n_tokens))

    def _windows(self, windows) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.from_numpy(np.stack([self._window(int(w)) for w in windows]))
        tokens, targets = both[:, :-1].clone(), both[:, 1:].clone()
        tokens[tokens == IGNORED_TARGET] = self.eos_id
        return tokens, targets, document_ids(tokens, self.eos_id)

    def _window(self, window: int) -> np.ndarray:
        """The T tokens of a window and the one after, -100 beyond the end."""
        if not 0 <= window < self.n_eval_windows:
            raise ValueError(
                f"windows: got {window}, allowed are 0 to {self.n_eval_windows - 1}"
            )
        start = window * self.seq_len
        found = self.stream.tokens(start, min(start + self.seq_len + 1, self.n_tokens))
        padding = self.seq_len + 1 - len(found)
        return np.pad(found, (0, padding), constant_values=IGNORED_TARGET)


def document_ids(tokens: Tensor, eos_id: int) -> Tensor:
    """Number of the document that each token belongs to, within its window.

    An EOS opens its document, so the number rises at the EOS itself, and a window
    that begins inside a document begins with number 0.
    Args: tokens: (..., T) integers. Returns: (..., T) int64.
    """
    return (tokens == eos_id).cumsum(-1)


def permuted(
    places: np.ndarray, n: int, seed: int, epochs: np.ndarray | int
) -> np.ndarray:
    """Where each place of an epoch goes: a permutation of 0 to n - 1, unstored.

    A Feistel network permutes the 2h-bit numbers whatever its round function is; a
    result of n or more is sent through again until it falls below n (cycle walking:
    the walk stays on the cycle of a place below n, so it must come back below n).

    Args: places: int64, below n; epochs: one number, or one for each place.
    Returns: int64, the shape of `places`.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    half = np.uint64(max(2, ((n - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, np.broadcast_to(epochs, np.shape(places)))
    result = _feistel(np.asarray(places).astype(np.uint64), keys, half)
    while (outside := result >= n).any():
        result[outside] = _feistel(result[outside], keys[:, outside], half)
    return result.astype(np.int64)


def _feistel(numbers: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << half) | right


def _round_keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """One 64-bit key for each round and place, (rounds, *epochs.shape)."""
    base = _mix(np.array([seed % 2**64], dtype=np.uint64))
    base = _mix(base ^ epochs.astype(np.uint64))
    return np.stack([_mix(base + np.uint64(r + 1)) for r in range(FEISTEL_ROUNDS)])


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: each bit of the input reaches every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
