"""The files of prepared data: token shards, and the index that binds them.

    OUT/train/shard_00000.bin ...   OUT/val/shard_00000.bin ...   OUT/index.json

A shard is a 64-byte little-endian header and then its tokens, uint16 or uint32:

    magic 8 bytes | version u32 | bytes per token u32 | tokens u64 | vocab u64 | sha256

where sha256 is that of the payload. `index.json` is written last; it holds the
sha256 of each shard and of itself, no time and no path of the machine, so that the
same source always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mamba3lite.data import DataError

MAGIC = b"M3LTOKEN"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")
DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes per token
INDEX_FORMAT = "mamba3lite tokens"
BLOCK = 1 << 22  # tokens checked at a time


class Header(NamedTuple):
    """The fields of a shard's header, in file order."""

    magic: bytes
    version: int
    itemsize: int
    n_tokens: int
    vocab_size: int
    sha256: bytes


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds ids 0 to vocab_size - 1."""
    return DTYPES[2 if vocab_size <= 1 << 16 else 4]


class ShardWriter:
    """Writes one shard under a temporary name; `finish` gives it its own."""

    def __init__(self, path: Path, vocab_size: int):
        self.path, self.vocab_size, self.n_tokens = path, vocab_size, 0
        self.dtype = token_dtype(vocab_size)
        self.sha256 = hashlib.sha256()
        self.temporary = path.with_suffix(".tmp")
        self.file = self.temporary.open("wb")
        self.file.write(bytes(HEADER.size))

    def append(self, ids: np.ndarray) -> None:
        """Add tokens (1-d, below the vocabulary size)."""
        payload = ids.astype(self.dtype).tobytes()
        self.sha256.update(payload)
        self.file.write(payload)
        self.n_tokens += len(ids)

    def finish(self) -> dict:
        """Write the header, make the file durable; returns its entry in the index."""
        self.file.seek(0)
        digest = self.sha256.digest()
        fields = (VERSION, self.dtype.itemsize, self.n_tokens, self.vocab_size, digest)
        self.file.write(HEADER.pack(MAGIC, *fields))
        publish(self.file, self.temporary, self.path)
        entry = {"file": f"{self.path.parent.name}/{self.path.name}"}
        return entry | {"tokens": self.n_tokens, "sha256": digest.hex()}


def publish(file, temporary: Path, path: Path) -> None:
    """Flush `file` to disk, close it, and move it to `path` in one step."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_shard(folder: Path, entry: dict, vocab_size: int) -> np.ndarray:
    """Map one shard into memory, after checking every byte of it.

    Args: folder: the prepared folder; entry: the shard's entry in the index;
    vocab_size: that of the index.
    Returns: its tokens, read-only, uint16 or uint32, shape (n_tokens,).
    Raises: DataError naming the file, what was found and what is wanted.
    """
    path = folder / entry["file"]
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from error
    if len(head) < HEADER.size:
        raise _fault(path, f"found {size} bytes, a header alone has {HEADER.size}")
    _check_header(path, size, Header(*HEADER.unpack(head)), entry, vocab_size)
    tokens = np.memmap(path, token_dtype(vocab_size), mode="r", offset=HEADER.size)
    _check_payload(path, tokens, entry["sha256"], vocab_size)
    return tokens


def _check_header(path, size, header: Header, entry: dict, vocab_size: int) -> None:
    itemsize = token_dtype(vocab_size).itemsize
    wanted = (MAGIC, VERSION, itemsize, entry["tokens"], vocab_size)
    labels = ("magic", "format version", "bytes per token", "tokens", "vocabulary")
    for label, got, want in zip(labels, header, wanted, strict=False):
        if got != want:
            raise _fault(path, f"header says {label} {got!r}, wanted {want!r}")
    if header.sha256.hex() != entry["sha256"]:
        raise _fault(
            path,
            f"header says sha256 {header.sha256.hex()[:12]}..., the "
            f"index wants {entry['sha256'][:12]}...",
        )
    payload, want = size - HEADER.size, entry["tokens"] * itemsize
    if payload != want:
        odd = f", {payload % itemsize} odd" if payload % itemsize else ""
        raise _fault(
            path,
            f"found {payload:,} bytes of tokens{odd}, wanted {want:,} "
            f"({entry['tokens']:,} tokens of {itemsize} bytes)",
        )


def _check_payload(path, tokens: np.ndarray, sha256: str, vocab_size: int) -> None:
    found = hashlib.sha256()
    highest = 0
    for start in range(0, len(tokens), BLOCK):
        block = tokens[start : start + BLOCK]
        found.update(block)
        highest = max(highest, int(block.max()))
    if found.hexdigest() != sha256:
        raise _fault(
            path,
            f"tokens have sha256 {found.hexdigest()[:12]}..., wanted "
            f"{sha256[:12]}... (changed since they were written)",
        )
    if highest >= vocab_size:
        raise _fault(
            path,
            f"found token {highest}, wanted less than the vocabulary size {vocab_size}",
        )


def _fault(path: Path, what: str) -> DataError:
    folder = path.parent if path.name == "index.json" else path.parent.parent
    run = f"mamba3lite prepare --source SOURCE --out {shlex.quote(str(folder))}"
    return DataError(
        f"{path}: {what}; `{run}`, with the SOURCE that it came from, replaces it"
    )


def save_index(folder: Path, index: dict) -> dict:
    """Write index.json with its own sha256; returns what was written."""
    index = index | {"sha256": _index_hash(index)}
    path = folder / "index.json"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(json.dumps(index, indent=1, sort_keys=True).encode() + b"\n")
        publish(file, temporary, path)
    return index


def load_index(folder: Path) -> dict:
    """The index of a prepared folder.

    Raises: DataError when it is missing (saying what to run), not an index, of
    another version, or changed since it was written.
    """
    path = folder / "index.json"
    try:
        index = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        run = f"mamba3lite prepare --source stdlib --out {shlex.quote(str(folder))}"
        raise DataError(
            f"{folder}: no prepared data here (no index.json); run `{run}`, or give "
            "the path of your own text as --source"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise _fault(path, f"not JSON ({error})") from error
    if not isinstance(index, dict) or index.get("format") != INDEX_FORMAT:
        raise DataError(f"{path}: not an index of prepared data")
    if index.get("version") != VERSION:
        got = index.get("version")
        raise _fault(path, f"has format version {got!r}, wanted {VERSION}")
    if index.get("sha256") != _index_hash(index):
        raise _fault(path, "does not match its own sha256 (changed by hand?)")
    return index


def _index_hash(index: dict) -> str:
    body = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
