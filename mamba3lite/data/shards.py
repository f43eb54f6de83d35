"""The files of prepared data: token shards, and the index that binds them.

    OUT/train/shard_00000.bin ...   OUT/val/shard_00000.bin ...   OUT/index.json

A shard is a 64-byte little-endian header and then its tokens, uint16 or uint32:

    magic 8 bytes | version u32 | bytes per token u32 | tokens u64 | vocab u64 | sha256

where sha256 is that of the payload. `index.json` is written last; it holds the
sha256 of each shard and of itself, no time and no path of the machine, so that the
same source always gives the same bytes.

A folder may be damaged, or a stranger's: plain files inside it are read, and sizes and
types are checked before anything is made of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import struct
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, FailFast, Field

from mamba3lite.data import DataError
from mamba3lite.data.tokenizers import (
    ByteTokenizer,
    require_integers,
    require_same_tokenizer,
)
from mamba3lite.files import open_plain, replacing, write_whole
from mamba3lite.json_files import Checked, Count, read_json, require_form

MAGIC = b"M3LTOKEN"
VERSION = 1
HEADER = struct.Struct("<8sIIQQ32s")
DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}  # by bytes per token
INDEX_FORMAT = "mamba3lite tokens"
BLOCK = 1 << 22  # tokens checked at a time
INDEX_BYTES = 1 << 26  # an index may have, and four more for each byte of its shards


class Header(NamedTuple):
    """The fields of a shard's header, in file order."""

    magic: bytes
    version: int
    itemsize: int
    n_tokens: int
    vocab_size: int
    sha256: bytes


Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ShardEntry(Checked):
    """A shard in the index; its file lies in the folder of its split."""

    file: Annotated[str, Field(pattern=r"^(train|val)/shard_[0-9]{5,9}\.bin$")]
    tokens: Annotated[int, Field(ge=1, le=2**48)]
    sha256: Sha256


class SplitEntry(Checked):
    """A split in the index; offsets are those of its documents, in tokens."""

    tokens: Count
    bytes: Count
    documents: Count
    document_names: Annotated[list[str], FailFast()]
    document_offsets: Annotated[list[Count], FailFast()]
    shards: Annotated[list[ShardEntry], FailFast()]


class Splits(Checked):
    """Both splits, one of which may be empty, and no other."""

    model_config = ConfigDict(extra="forbid")

    train: SplitEntry
    val: SplitEntry


class SourceEntry(Checked):
    """The source in the index: its files, the hash of its text, a stream's name."""

    files: Count
    sha256: Sha256
    stream: str = ""


class TokenizerEntry(Checked):
    """The tokenizer in the index."""

    name: str
    vocab_size: Annotated[int, Field(ge=1, le=2**32)]
    eos_id: Count
    fingerprint: str


class Index(Checked):
    """What an index holds besides format, version and its own sha256."""

    source: SourceEntry
    tokenizer: TokenizerEntry
    val_fraction: Annotated[float, Field(gt=0, lt=1)]
    splits: Splits


def token_dtype(vocab_size: int) -> np.dtype:
    """The smaller of uint16 and uint32 that holds ids 0 to vocab_size - 1."""
    return DTYPES[2 if vocab_size <= 1 << 16 else 4]


class ShardWriter:
    """Writes one shard under a temporary name; `finish` gives it its own.

    Attributes: closing: left with an exception, removes what was written so far.
    """

    def __init__(self, path: Path, vocab_size: int):
        self.path, self.vocab_size, self.n_tokens = path, vocab_size, 0
        self.dtype = token_dtype(vocab_size)
        self.sha256 = hashlib.sha256()
        self.closing = ExitStack()
        self.file = self.closing.enter_context(replacing(path))
        self.file.write(bytes(HEADER.size))

    def append(self, ids: np.ndarray) -> None:
        """Add tokens (1-d integers).

        Raises: TypeError for what is no integer, ValueError for an id outside the
        vocabulary: a shard would hold another one.
        """
        require_integers(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"ids: got values from {ids.min()} to {ids.max()}, allowed are 0 to "
                f"{self.vocab_size - 1}"
            )
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
        self.closing.close()
        entry = {"file": f"{self.path.parent.name}/{self.path.name}"}
        return entry | {"tokens": self.n_tokens, "sha256": digest.hex()}


def is_shard(path: Path) -> bool:
    """Whether a file begins as a shard does."""
    try:
        with open_plain(path, path.parent) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_shard(folder: Path, entry: dict, vocab_size: int) -> np.ndarray:
    """Map one shard into memory, after checking every byte of it.

    Args: folder: the prepared folder; entry: the shard's entry in the index;
    vocab_size: that of the index.
    Returns: its tokens, read-only, uint16 or uint32, shape (n_tokens,).
    Raises: DataError naming the file, what was found and what is wanted.
    """
    path = folder / entry["file"]
    try:
        with open_plain(path, folder) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                wanted = f"a header alone has {HEADER.size}"
                raise _fault(path, f"found {size} bytes, {wanted}")
            header = Header(*HEADER.unpack(head))
            _check_header(path, size, header, entry, vocab_size)
            dtype = token_dtype(vocab_size)
            tokens = np.memmap(file, dtype, mode="r", offset=HEADER.size)
    except OSError as error:
        raise _fault(path, f"cannot be read ({error.strerror})") from error
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


def counts_bytes(tokenizer: dict) -> bool:
    """Whether tokens alone tell how many bytes they stand for."""
    return tokenizer["name"] == ByteTokenizer.name


def count_faults(meta: dict, shards: list[np.ndarray], tokenizer: dict) -> list[str]:
    """What the index says of a split and its tokens do not.

    Args: meta: the split in the index; tokenizer: that of the index.
    """
    faults = []
    n_tokens = sum(len(shard) for shard in shards)
    if n_tokens != meta["tokens"]:
        faults.append(f"{meta['tokens']:,} tokens, but its shards hold {n_tokens:,}")
    opened = _places_of(tokenizer["eos_id"], shards)
    offsets = np.array(meta["document_offsets"], dtype=np.int64)
    if not np.array_equal(opened, offsets):
        faults.append(
            f"{len(offsets):,} document offsets, which are not the places of its "
            f"{len(opened):,} EOS tokens"
        )
    for what, count in (("names", len(meta["document_names"])),
                        ("EOS tokens", len(opened))):  # fmt: skip
        if count != meta["documents"]:
            faults.append(f"{meta['documents']:,} documents, but {count:,} {what}")
    n_bytes = n_tokens - len(opened)
    if counts_bytes(tokenizer) and n_bytes != meta["bytes"]:
        faults.append(f"{meta['bytes']:,} bytes, but its shards hold {n_bytes:,}")
    return faults


def _places_of(token: int, shards: list[np.ndarray]) -> np.ndarray:
    """Where a token stands in the stream that the shards make, int64."""
    places, begin = [np.empty(0, np.int64)], 0
    for shard in shards:
        for start in range(0, len(shard), BLOCK):
            block = shard[start : start + BLOCK]
            places.append(np.flatnonzero(block == token) + begin + start)
        begin += len(shard)
    return np.concatenate(places)


def _fault(path: Path, what: str) -> DataError:
    run = _again(path.parent.parent)
    return DataError(
        f"{path}: {what}; `{run}`, with the SOURCE that it came from, replaces it"
    )


def _index_fault(path: Path, what: str) -> DataError:
    folder = path.parent
    return DataError(
        f"{path}: {what}; move {folder} away and run `{_again(folder)}`, with the "
        "SOURCE that it came from"
    )


def _again(folder: Path) -> str:
    return f"mamba3lite prepare --source SOURCE --out {shlex.quote(str(folder))}"


def save_index(folder: Path, index: dict) -> dict:
    """Write index.json with its own sha256; returns what was written."""
    index = index | {"sha256": _index_hash(index)}
    text = json.dumps(index, indent=1, sort_keys=True)
    write_whole(folder / "index.json", f"{text}\n")
    return index


def load_index(folder: Path) -> dict:
    """The index of a prepared folder: complete, of the right types, its tokenizer ours.

    Raises: DataError as `read_index`, when it has changed since it was written, lacks
    something, or was made with another tokenizer.
    """
    path, index = folder / "index.json", read_index(folder)
    if index.get("sha256") != _index_hash(index):
        raise _index_fault(path, "does not match its own sha256 (changed by hand?)")
    try:
        require_form(index, Index)
        require_same_tokenizer(index["tokenizer"])
    except ValueError as error:
        raise _index_fault(path, str(error)) from None
    for split, entry in index["splits"].items():
        for shard in entry["shards"]:
            if not shard["file"].startswith(f"{split}/"):
                raise _index_fault(path, f"{split} has the shard {shard['file']}")
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """What lies in index.json, which nothing but its format and version is known of.

    Raises: DataError when it is missing (saying what to run), cannot be read, is not
    JSON, no index, or one of another version.
    """
    path = folder / "index.json"
    try:
        index = read_json(path, folder, _most_index_bytes(folder))
    except (FileNotFoundError, NotADirectoryError) as error:
        run = f"mamba3lite prepare --source stdlib --out {shlex.quote(str(folder))}"
        raise DataError(
            f"{folder}: no prepared data here (no index.json); run `{run}`, or give "
            "the path of your own text as --source"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise _index_fault(path, str(error)) from None
    if index.get("format") != INDEX_FORMAT:
        raise DataError(f"{path}: not an index of prepared data; choose another folder")
    if index.get("version") != VERSION:
        got = index.get("version")
        raise _index_fault(path, f"has format version {got!r}, wanted {VERSION}")
    return index


def _most_index_bytes(folder: Path) -> int:
    """An index has a name and a place for each document, and that has a token."""
    shards = [p for split in ("train", "val") for p in folder.glob(f"{split}/*.bin")]
    return INDEX_BYTES + 4 * sum(path.lstat().st_size for path in shards)


def _index_hash(index: dict) -> str:
    body = {key: value for key, value in index.items() if key != "sha256"}
    try:
        text = json.dumps(body, sort_keys=True)
    except RecursionError:  # nested too deeply to have been written by `save_index`
        return ""
    return hashlib.sha256(text.encode()).hexdigest()
