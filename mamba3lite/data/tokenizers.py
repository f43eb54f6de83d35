"""Tokenizers: text to integer ids and back."""

from __future__ import annotations

import hashlib

import numpy as np


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

        Raises ValueError for an id outside 0-256.
        """
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"ids: got values from {ids.min()} to {ids.max()}, "
                f"allowed are 0 to {self.vocab_size - 1}"
            )
        return ids[ids != self.eos_id].astype(np.uint8).tobytes()

    def decode(self, ids) -> str:
        """The text that `ids` stand for; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def load_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer called `name`; ValueError for a name that does not exist."""
    if name != ByteTokenizer.name:
        raise ValueError(f"tokenizer: got {name!r}, allowed is {ByteTokenizer.name!r}")
    return ByteTokenizer()
