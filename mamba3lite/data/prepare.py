"""Preparation: a source of text becomes shards of tokens for training and validation.

Every document is stored as `[EOS] text`. A document belongs to validation when the
first 64 bits of the sha256 of its text, read as a fraction of 2**64, are below
`val_fraction`: its own bytes alone decide, not its name, its place or the other
documents, and two equal documents are never on different sides.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mamba3lite.data import DataError
from mamba3lite.data.corpora import (
    PIECE_BYTES,
    Document,
    SourceFile,
    is_named,
    is_streamed,
    read_documents,
    source_files,
    source_parts,
)
from mamba3lite.data.encode import MOST_WORKERS, Encoder, default_workers
from mamba3lite.data.hub import copy_stream, parse_stream
from mamba3lite.data.shards import (
    INDEX_FORMAT,
    VERSION,
    ShardWriter,
    load_index,
    open_shard,
    save_index,
)
from mamba3lite.data.tokenizers import Tokenizer, load_tokenizer

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000  # 200 MB of uint16
STREAM_COPY = "stream-copy.tmp"  # a folder in the output, gone when all is done
Report = Callable[[str, int, int, int], None]


def prepare(
    source: str | Path,
    tokenizer: str,
    out: str | Path,
    *,
    val_fraction: float,
    ranks: str | Path | None = None,
    workers: int | None = None,
    progress: Report | None = None,
) -> dict:
    """Tokenize `source` into `out`, or find that this is done already.

    The source is read twice: every refusal comes from the first reading, before a
    shard in `out` is touched. A finished preparation of the same bytes is checked
    and kept; anything else that was prepared there is replaced. A stream of the hub
    is copied into `out` first, and removed at the end; one that was prepared is
    known by its name, and is not read again.

    Args:
        source: "stdlib", "shakespeare", "kjv", a path, several of them joined by
            "+", see `mamba3lite.data.corpora`, or "hf:NAME", see
            `mamba3lite.data.hub`.
        tokenizer: "byte" or "gpt2".
        out: the folder to write; made when missing.
        val_fraction: expected share of documents held out, above 0 and below 1.
        ranks: the rank file of gpt2; without it, from the cache or its package.
        workers: processes that tokenize, see `default_workers`. The shards do not
            depend on it.
        progress: called as progress(stage, files done, files in all, tokens so far),
            where 0 files in all mean that `stage` is a message; without it a bar is
            drawn on a terminal, and lines are printed elsewhere.
    Returns: the index, as it is in `out`/index.json.
    Raises: DataError, one line, for a source or folder that cannot be used;
        ValueError for an unknown tokenizer.
    """
    out = Path(out)
    check_arguments(source, out, val_fraction, workers)
    tokens = load_tokenizer(tokenizer, ranks)
    encoder = Encoder(tokens, ranks, workers or default_workers(tokens))
    with _reporting(progress) as report:
        if is_streamed(source):
            with _writing(out):
                return _prepare_stream(str(source), out, val_fraction, encoder, report)
        files = source_files(source)
        survey = _survey(files, val_fraction, report)
        survey.require_both_splits()
        with _writing(out):
            index = _finished(out, survey, tokens, report)
            return index or _write(out, files, survey, encoder, report)


def _prepare_stream(
    source: str, out: Path, val_fraction: float, encoder: Encoder, report: Report
) -> dict:
    known = Survey(0, val_fraction, source)
    if index := _finished(out, known, encoder.tokenizer, report):
        return index
    copy = out / STREAM_COPY
    try:
        copy.mkdir()
        files = copy_stream(source, copy, lambda line: report(line, 0, 0, 0))
        survey = _survey(files, val_fraction, report, source)
        survey.require_both_splits()
        return _write(out, files, survey, encoder, report)
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def is_prepared(
    source: str | Path,
    tokenizer: str,
    out: str | Path,
    *,
    val_fraction: float,
    progress: Report | None = None,
) -> bool:
    """Whether `out` was prepared from `source` as it is now; nothing is written.

    Arguments and errors are those of `prepare`. The source is read once (a stream is
    known by its name alone); the shards are not, so a damaged one is found by whoever
    opens them.
    """
    out = Path(out)
    check_arguments(source, out, val_fraction)
    tokens = load_tokenizer(tokenizer)
    if is_streamed(source):
        survey = Survey(0, val_fraction, str(source))
    else:
        with _reporting(progress) as report:
            survey = _survey(source_files(source), val_fraction, report)
        survey.require_both_splits()
    try:
        return survey.gave(load_index(out), tokens)
    except DataError:
        return False


def check_arguments(
    source: str | Path, out: Path, val_fraction: float, workers: int | None = None
) -> None:
    """DataError for what is wrong before anything is read."""
    if isinstance(val_fraction, bool) or not 0 < val_fraction < 1:
        raise DataError(
            f"val_fraction: got {val_fraction}, wanted a number above 0 and below 1"
        )
    if out == Path():
        raise DataError("out: got the current folder, wanted one of its own")
    if workers is not None and not 1 <= workers <= MOST_WORKERS:
        raise DataError(f"workers: got {workers}, wanted 1 to {MOST_WORKERS}")
    if is_streamed(source):
        parse_stream(str(source))
    for part in source_parts(source):
        inside = not is_named(part) and part and Path(part).exists()
        if inside and out.resolve().is_relative_to(Path(part).resolve()):
            raise DataError(f"out: {out} lies inside the source {part}")


def share_of(document: Document) -> float:
    """Where the document's hash falls in [0, 1): validation is what is below."""
    return int.from_bytes(document.digest[:8], "big") / 2**64


@dataclass
class Survey:
    """What a source holds: counts by split, and a hash of names and contents."""

    n_files: int
    val_fraction: float
    stream: str = ""  # its name, when the source is one
    in_pieces: bool = False
    documents: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    lowest: float = 1.0
    highest: float = 0.0
    hash: object = field(default_factory=hashlib.sha256)

    def add(self, document: Document) -> str:
        """Count one document; returns its split."""
        share = share_of(document)
        split = "val" if share < self.val_fraction else "train"
        self.documents[split] += 1
        self.bytes[split] += len(document.text)
        self.lowest, self.highest = min(self.lowest, share), max(self.highest, share)
        name = document.name.encode("utf-8", "surrogateescape")
        self.hash.update(len(name).to_bytes(8, "big") + name + document.digest)
        return split

    def identity(self, tokenizer: Tokenizer) -> dict:
        """The part of an index that says what was prepared, and how."""
        source = {"files": self.n_files, "sha256": self.hash.hexdigest()}
        return {
            "format": INDEX_FORMAT,
            "version": VERSION,
            "source": source | ({"stream": self.stream} if self.stream else {}),
            "tokenizer": {
                "name": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "fingerprint": tokenizer.fingerprint,
            },
            "val_fraction": self.val_fraction,
        }

    def gave(self, index: dict, tokenizer: Tokenizer) -> bool:
        """Whether an index is that of this source; a stream is known by its name."""
        identity = self.identity(tokenizer)
        if self.stream and index["source"].get("stream") == self.stream:
            identity["source"] = index["source"]
        return index | identity == index

    def require_both_splits(self) -> None:
        """DataError, with counts, when a split has no text."""
        if all(self.bytes.values()):
            return
        n_train, n_val = (self.documents[split] for split in SPLITS)
        advice = "more documents are needed"
        if n_train + n_val > 1 and not n_val:
            advice = f"a val_fraction above {self.lowest:.4g} would give it one"
        elif n_train + n_val > 1 and not n_train:
            advice = f"a val_fraction below {self.highest:.4g} would leave some"
        if self.in_pieces:
            rarer = min(self.val_fraction, 1 - self.val_fraction)
            enough = max(2, math.ceil(1 / rarer)) * PIECE_BYTES // 1024
            advice += (
                f"; a single file is cut into pieces of {PIECE_BYTES // 1024} KiB, and "
                f"about {enough:,} KiB of text give one of them to each split"
            )
        raise DataError(
            f"source: {self.n_files:,} files, {n_train:,} documents of "
            f"{self.bytes['train']:,} bytes for training and {n_val:,} of "
            f"{self.bytes['val']:,} bytes for validation at val_fraction "
            f"{self.val_fraction:g}; both need text: {advice}"
        )


def _survey(
    files: list[SourceFile], val_fraction: float, report: Report, stream: str = ""
) -> Survey:
    in_pieces = [file.kind for file in files] == ["pieces"]
    survey = Survey(len(files), val_fraction, stream, in_pieces)
    for number, file in enumerate(files):
        for document in read_documents(file):
            survey.add(document)
            report("reading", number, len(files), 0)
        report("reading", number + 1, len(files), 0)
    return survey


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Hold `out`; what the disk refuses is a DataError that names the file."""
    try:
        with _locked(out):
            # A stream that was killed leaves it, and its name is ours.
            shutil.rmtree(out / STREAM_COPY, ignore_errors=True)
            yield
    except OSError as error:
        where = error.filename or out
        raise DataError(f"{where}: cannot be written ({error.strerror})") from error


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold `out` against a second preparation; the kernel lets go at death."""
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{out}: another preparation is writing here") from error
        yield
    finally:
        os.close(folder)


def _finished(
    out: Path, survey: Survey, tokenizer: Tokenizer, report: Report
) -> dict | None:
    """The index in `out`, if it is that of this very preparation and all is well."""
    path = out / "index.json"
    if not path.exists():
        return None
    if f'"{INDEX_FORMAT}"'.encode() not in path.read_bytes():
        raise DataError(f"out: {path} is not ours; remove it or choose another folder")
    try:
        index = load_index(out)
        if not survey.gave(index, tokenizer):
            report("replacing what was prepared here otherwise", 0, 0, 0)
            return None
        for split in SPLITS:
            for entry in index["splits"][split]["shards"]:
                open_shard(out, entry, tokenizer.vocab_size)
    except DataError as error:
        report(f"replacing what is there: {error}", 0, 0, 0)
        return None
    n_tokens = sum(index["splits"][split]["tokens"] for split in SPLITS)
    n_files = index["source"]["files"]
    report("already prepared", n_files, n_files, n_tokens)
    return index


def _write(
    out: Path,
    files: list[SourceFile],
    survey: Survey,
    encoder: Encoder,
    report: Report,
) -> dict:
    _clear(out)
    tokenizer = encoder.tokenizer
    writers = {split: SplitWriter(out / split, tokenizer) for split in SPLITS}
    again = Survey(len(files), survey.val_fraction)
    n_tokens = 0
    try:
        with closing(encoder.documents(files)) as documents:
            for number, document, ids in documents:
                n_tokens += writers[again.add(document)].add(document, ids)
                report("writing", number, len(files), n_tokens)
        report("writing", len(files), len(files), n_tokens)
        splits = {split: writer.finish() for split, writer in writers.items()}
        if again.hash.digest() != survey.hash.digest():
            raise DataError("source: its files changed while they were read; try again")
        return save_index(out, survey.identity(tokenizer) | {"splits": splits})
    except BaseException:
        _clear(out)
        raise


def _clear(out: Path) -> None:
    """Remove a former preparation: the index first, so that it never misleads."""
    for path in (out / "index.json", out / "index.tmp"):
        path.unlink(missing_ok=True)
    for split in SPLITS:
        (out / split).mkdir(exist_ok=True)
        for pattern in ("shard_*.bin", "shard_*.tmp"):
            for path in (out / split).glob(pattern):
                path.unlink()


class SplitWriter:
    """The documents of one split, one after the other, cut into shards."""

    def __init__(self, folder: Path, tokenizer: Tokenizer):
        self.folder, self.tokenizer = folder, tokenizer
        self.shard: ShardWriter | None = None
        self.shards: list[dict] = []
        self.names: list[str] = []
        self.offsets: list[int] = []
        self.n_tokens = self.n_bytes = 0

    def add(self, document: Document, text: np.ndarray) -> int:
        """Append `[EOS] text`, given its tokens; returns how many they are."""
        ids = np.concatenate([np.array([self.tokenizer.eos_id], text.dtype), text])
        self.names.append(document.name)
        self.offsets.append(self.n_tokens)
        self.n_tokens += len(ids)
        self.n_bytes += len(document.text)
        n_added = len(ids)
        while len(ids):
            ids = self._fill(ids)
        return n_added

    def _fill(self, ids: np.ndarray) -> np.ndarray:
        """Put what fits into the open shard; returns what is left."""
        if self.shard is None:
            path = self.folder / f"shard_{len(self.shards):05d}.bin"
            self.shard = ShardWriter(path, self.tokenizer.vocab_size)
        room = SHARD_TOKENS - self.shard.n_tokens
        self.shard.append(ids[:room])
        if self.shard.n_tokens == SHARD_TOKENS:
            self._finish_shard()
        return ids[room:]

    def _finish_shard(self) -> None:
        self.shards.append(self.shard.finish())
        self.shard = None

    def finish(self) -> dict:
        """Close the last shard; returns the split's part of the index."""
        if self.shard is not None:
            self._finish_shard()
        return {
            "tokens": self.n_tokens,
            "bytes": self.n_bytes,
            "documents": len(self.names),
            "document_names": self.names,
            "document_offsets": self.offsets,
            "shards": self.shards,
        }


@contextmanager
def _reporting(progress: Report | None) -> Iterator[Report]:
    """The caller's callback; or a bar on a terminal, and lines elsewhere."""
    console = Console(stderr=True)
    if progress is not None:
        yield progress
    elif console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(16),
            MofNCompleteColumn(),
        )
        rates = TextColumn("files{task.fields[rates]}")
        with Progress(*columns, rates, console=console) as bar:
            yield ProgressReport(console, bar)
    else:
        yield ProgressReport(console)


class ProgressReport:
    """Shows how far a preparation is, with files/s and tokens/s."""

    def __init__(self, console: Console, bar: Progress | None = None):
        self.console, self.bar, self.stage = console, bar, ""

    def __call__(self, stage: str, files: int, n_files: int, tokens: int) -> None:
        if not n_files:
            return self.console.print(stage, highlight=False, soft_wrap=True)
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self.begun, self.shown = stage, now, now
            if self.bar:
                self.task = self.bar.add_task(stage, total=n_files, rates="")
        if files < n_files and now - self.shown < (0.1 if self.bar else 5):
            return
        self.shown = now
        rates = self._rates(files, tokens, now - self.begun)
        if self.bar:
            self.bar.update(self.task, completed=files, rates=rates)
        else:
            line = f"{stage}: {files:,}/{n_files:,} files{rates}"
            self.console.print(line, highlight=False, soft_wrap=True)

    def _rates(self, files: int, tokens: int, seconds: float) -> str:
        text = f", {tokens:,} tokens" if tokens else ""
        if seconds > 0:
            text += f", {files / seconds:,.0f} files/s"
        if tokens and seconds > 0:
            text += f", {tokens / seconds:,.0f} tokens/s"
        return text
