"""Tokenizers: text to integer ids and back.

Both keep every byte: what `decode_bytes` gives back is what was encoded, so bits per
byte mean the same for either.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from mamba3lite.data import DataError
from mamba3lite.data.packages import (
    RANKS,
    cache_folder,
    checked,
    keep,
    read_checked,
    read_member,
)
from mamba3lite.json_files import shown


class ByteTokenizer:
    """The bytes of a text are its tokens; one more id opens each document.

    Ids 0-255 are the bytes, 256 is EOS. Nothing is learned and nothing can be out
    of vocabulary, so that any file, in any encoding, is kept exactly as it is.
    """

    name = "byte"
    vocab_size = 257
    eos_id = 256
    fingerprint = hashlib.sha256(
        b"mamba3lite byte tokenizer 1: ids 0-255 are the bytes, 256 is EOS"
    ).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes of `text` as uint16 ids, shape (n_bytes,), without EOS.

        Raises UnicodeEncodeError for a lone surrogate, which UTF-8 cannot hold.
        """
        return self.encode_bytes(text.encode("utf-8"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """`data` itself as uint16 ids, shape (n_bytes,), without EOS."""
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` (any 1-d integers) stand for; EOS is dropped.

        Raises ValueError for an id outside 0-256, TypeError for what is no integer.
        """
        return _known_ids(ids, self).astype(np.uint8).tobytes()

    def decode(self, ids) -> str:
        """The text that `ids` stand for; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


# Contractions, then words, numbers and other signs with the space before them, then
# white space, of which the last one is left to the word that follows.
GPT2_PATTERN = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
RANKS_MEMBER = "mlx_whisper/assets/gpt2.tiktoken"
RANKS_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
# tiktoken's matcher runs out of stack in white space of about a million characters.
LONG_SPACE = 100_000
APART = re.compile(rf"([\udc80-\udcff]+|(?<!\s)\s{{{LONG_SPACE},}})")


class GPT2Tokenizer:
    """The byte pairs of GPT-2: ids 0-50255 are its merges, 50256 is EOS.

    A byte that is not UTF-8 becomes the token of that one byte (every byte has one),
    so nothing is replaced and nothing is lost. Text that looks like a special token
    is text.

    Args: ranks: the rank file; without it the one in the cache is used, and when
    there is none, it is taken from the pinned package. A file given is kept in the
    cache, where training and generation find it.
    Raises: DataError when it cannot be had, or its sha256 is another.
    Source: Radford et al., "Language Models are Unsupervised Multitask Learners",
    2019, section 2.2; the pattern is that of the released encoder.py.
    """

    name = "gpt2"
    vocab_size = 50257
    eos_id = 50256
    fingerprint = hashlib.sha256(
        f"mamba3lite gpt2 tokenizer 1: ranks {RANKS_SHA256}, pattern {GPT2_PATTERN}, "
        "bytes that are not UTF-8 one by one, 50256 is EOS".encode()
    ).hexdigest()

    def __init__(self, ranks: str | Path | None = None):
        self.ranks = _parsed_ranks(_rank_file(ranks))
        self.encoding = tiktoken.Encoding(
            self.name,
            pat_str=GPT2_PATTERN,
            mergeable_ranks=self.ranks,
            special_tokens={"<|endoftext|>": self.eos_id},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        """`text` as uint16 ids, shape (n_tokens,), without EOS.

        Raises UnicodeEncodeError for a lone surrogate, which UTF-8 cannot hold.
        """
        return self.encode_bytes(text.encode("utf-8"))

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """`data` as uint16 ids, shape (n_tokens,), without EOS; nothing is lost."""
        ids: list[int] = []
        for piece in _pieces(data):
            if isinstance(piece, str):
                ids += self.encoding.encode_ordinary(piece)
            else:
                ids += [self.ranks[bytes([byte])] for byte in piece]
        return np.array(ids, dtype=np.uint16)

    def decode_bytes(self, ids) -> bytes:
        """The bytes that `ids` (any 1-d integers) stand for; EOS is dropped.

        Raises ValueError for an id outside 0-50256, TypeError for what is no integer.
        """
        return self.encoding.decode_bytes(_known_ids(ids, self).tolist())

    def decode(self, ids) -> str:
        """The text that `ids` stand for; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


Tokenizer = ByteTokenizer | GPT2Tokenizer
TOKENIZERS: dict[str, type[Tokenizer]] = {
    kind.name: kind for kind in (ByteTokenizer, GPT2Tokenizer)
}


def require_same_tokenizer(stored: Mapping[str, Any]) -> type[Tokenizer]:
    """The tokenizer that prepared data or a checkpoint describe, which is not loaded.

    Args: stored: its name, and maybe fingerprint, vocab_size and eos_id.
    Raises: ValueError, one line, for a name that does not exist, or when anything of it
    is not as here: then the same ids stand for other text.
    """
    name = stored["name"]
    kind = TOKENIZERS.get(name)
    if kind is None:
        raise ValueError(f"tokenizer: got {shown(name)}, allowed are 'byte' and 'gpt2'")
    for key in ("fingerprint", "vocab_size", "eos_id"):
        got, wanted = stored.get(key), getattr(kind, key)
        if got not in (None, wanted):
            raise ValueError(
                f"tokenizer {name}: has {key} {shown(got, 13)}, that of this version "
                f"is {shown(wanted, 13)}; its ids stand for other text"
            )
    return kind


def load_tokenizer(name: str, ranks: str | Path | None = None) -> Tokenizer:
    """The tokenizer called `name`, "byte" or "gpt2"; `ranks` as in GPT2Tokenizer.

    Raises: ValueError for a name that does not exist, or ranks for bytes; DataError
    when the rank file of gpt2 cannot be had.
    """
    if name == GPT2Tokenizer.name:
        return GPT2Tokenizer(ranks)
    if name != ByteTokenizer.name:
        raise ValueError(f"tokenizer: got {name!r}, allowed are 'byte' and 'gpt2'")
    if ranks is not None:
        raise ValueError(f"ranks: got {str(ranks)!r}, but only gpt2 has a rank file")
    return ByteTokenizer()


def require_integers(ids: np.ndarray) -> None:
    """TypeError for ids that a cast would make others: floats, booleans, objects."""
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"ids: got {ids.dtype}, wanted integers")


def _known_ids(ids, tokenizer: Tokenizer) -> np.ndarray:
    """The ids as int64 without EOS; ValueError for one outside the vocabulary.

    Raises: TypeError for ids that are no integers.
    """
    ids = np.asarray(ids)
    require_integers(ids)
    ids = ids.astype(np.int64)
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise ValueError(
            f"ids: got values from {ids.min()} to {ids.max()}, "
            f"allowed are 0 to {tokenizer.vocab_size - 1}"
        )
    return ids[ids != tokenizer.eos_id]


def _pieces(data: bytes) -> Iterator[str | bytes]:
    """Text that tiktoken takes at once, and between it bytes that are not UTF-8."""
    try:
        text = data.decode("utf-8")
        if len(text) < LONG_SPACE:
            yield text
            return
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
    for number, piece in enumerate(APART.split(text)):
        if number % 2 == 0:  # between what APART found
            yield piece
        elif piece.isspace():
            for start in range(0, len(piece), LONG_SPACE):
                yield piece[start : start + LONG_SPACE]
        else:
            yield piece.encode("utf-8", "surrogateescape")


def _rank_file(path: str | Path | None) -> bytes:
    name = Path(RANKS_MEMBER).name
    if path is not None:
        data = read_checked(Path(path), RANKS_SHA256)
        keep(data, name)
    elif os.path.lexists(cached := cache_folder() / name):
        data = read_checked(cached, RANKS_SHA256)
    else:
        try:
            data = read_member(RANKS, RANKS_MEMBER)
        except DataError as error:
            raise DataError(
                f"tokenizer gpt2: {error}; or give the rank file {name} as --ranks "
                "FILE to `mamba3lite prepare` once"
            ) from error
        keep(checked(data, RANKS_SHA256, f"{RANKS.file}: {RANKS_MEMBER}"), name)
    return data


def _parsed_ranks(data: bytes) -> dict[bytes, int]:
    lines = (line.split() for line in data.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}
