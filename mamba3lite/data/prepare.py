"""Preparation: a source of text becomes shards of tokens for training and validation.

Every document is stored as `[EOS] text`. A document belongs to validation when the
first 64 bits of the sha256 of its text, read as a fraction of 2**64, are below
`val_fraction`: its own bytes alone decide, not its name, its place or the other
documents, and two equal documents are never on different sides.

What was prepared never changes: a run may have been trained on it, and others may be
reading it. So a preparation writes where there is none, or makes the same one again.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
    count_faults,
    is_shard,
    load_index,
    open_shard,
    read_index,
    save_index,
)
from mamba3lite.data.tokenizers import Tokenizer, load_tokenizer
from mamba3lite.files import leftovers, temporary_name, write_whole
from mamba3lite.locks import Locked, locked
from mamba3lite.terminal import console_on, one_line, to_stderr

SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000  # 200 MB of uint16
STREAM_COPY = "stream-copy"  # a folder in the output, gone when all is done
LOCK = "prepare.lock"
UNFINISHED = ".mamba3lite-unfinished"  # as long as there may be shards and no index
WHAT_IS_UNFINISHED = (
    "A preparation began to write train/ and val/ and has not ended. The next one "
    "clears its shards away.\n"
)
SHARD_NAME = re.compile(r"shard_[0-9]{5,9}\.bin")
BEING_WRITTEN = (STREAM_COPY, "index.json", UNFINISHED)  # and shards
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

    The source is read twice: every refusal comes from the first reading, before
    anything is written. A finished preparation of the same bytes is checked and kept,
    or made again where it is damaged; other data are never replaced. A stream of the
    hub is copied into `out` first, and removed at the end; one that was prepared is
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
    encoder.refuse_unguarded_script()
    with _reporting(progress) as report, _disk_explained(out):
        if is_streamed(source):
            return _prepare_stream(str(source), out, val_fraction, encoder, report)
        survey, files = _surveyed(source, val_fraction, report)
        return _prepare_files(out, files, survey, encoder, report)


def prepare_beside(
    source: str | Path,
    tokenizer: str,
    out: str | Path,
    *,
    val_fraction: float,
    progress: Report | None = None,
) -> tuple[Path, dict]:
    """As `prepare`; where `out` holds other data, in a folder of its own beside it.

    That folder's name ends in the first 8 digits of the sha256 of the text, so the same
    text finds it again.
    Returns: the folder that was prepared, and its index.
    """
    out = Path(out)
    if is_streamed(source):  # known by its name, which is in that of the folder
        options = {"val_fraction": val_fraction, "progress": progress}
        return out, prepare(source, tokenizer, out, **options)
    check_arguments(source, out, val_fraction)
    tokens = load_tokenizer(tokenizer)
    encoder = Encoder(tokens, None, default_workers(tokens))
    encoder.refuse_unguarded_script()
    with _reporting(progress) as report, _disk_explained(out):
        survey, files = _surveyed(source, val_fraction, report)
        if _holds_other(out, survey, tokens):
            other, out = out, beside(out, survey)
            report(f"{other} holds other data; this text goes to {out}", 0, 0, 0)
        return out, _prepare_files(out, files, survey, encoder, report)


def prepared_in(
    source: str | Path,
    tokenizer: str,
    out: str | Path,
    *,
    val_fraction: float,
    progress: Report | None = None,
) -> Path | None:
    """Where `prepare_beside` would find the source prepared already; None if nowhere.

    Arguments and errors are those of `prepare`. Nothing is written. The source is read
    once (a stream is known by its name alone); the shards are not, so a damaged one is
    found by whoever opens them.
    """
    out = Path(out)
    check_arguments(source, out, val_fraction)
    tokens = load_tokenizer(tokenizer)
    if is_streamed(source):
        survey = Survey(0, val_fraction, str(source))
    else:
        with _reporting(progress) as report:
            survey, _ = _surveyed(source, val_fraction, report)
    for folder in (out, beside(out, survey)):
        with suppress(DataError):
            if survey.gave(load_index(folder), tokens):
                return folder
    return None


def beside(out: Path, survey: Survey) -> Path:
    """The folder of a text whose own is taken by other data."""
    return out.with_name(f"{out.name}-{survey.hash.hexdigest()[:8]}")


def _surveyed(
    source: str | Path, val_fraction: float, report: Report
) -> tuple[Survey, list[SourceFile]]:
    files = source_files(source, lambda line: report(line, 0, 0, 0))
    survey = _survey(files, val_fraction, report)
    survey.require_both_splits()
    return survey, files


def _prepare_files(
    out: Path,
    files: list[SourceFile],
    survey: Survey,
    encoder: Encoder,
    report: Report,
) -> dict:
    if index := _finished(out, survey, encoder.tokenizer, report):
        return index
    with _writing(out, report):
        former, fault = _former(out, survey, encoder.tokenizer)
        if former and not fault:
            (out / UNFINISHED).unlink(missing_ok=True)
            return former
        return _write(out, files, survey, encoder, report)


def _prepare_stream(
    source: str, out: Path, val_fraction: float, encoder: Encoder, report: Report
) -> dict:
    known = Survey(0, val_fraction, source)
    if index := _finished(out, known, encoder.tokenizer, report):
        return index
    with _writing(out, report):
        former, fault = _former(out, known, encoder.tokenizer)
        if former and not fault:
            (out / UNFINISHED).unlink(missing_ok=True)
            return former
        copy = temporary_name(out / STREAM_COPY)
        try:
            copy.mkdir()
            files = copy_stream(source, copy, lambda line: report(line, 0, 0, 0))
            survey = _survey(files, val_fraction, report, source)
            survey.require_both_splits()
            now = survey.identity(encoder.tokenizer)["source"]
            if former and former["source"] != now:
                raise DataError(
                    f"out: {out} is damaged ({fault}), and {source} has changed since; "
                    "choose another folder"
                )
            return _write(out, files, survey, encoder, report)
        finally:
            shutil.rmtree(copy, ignore_errors=True)


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
    for name in ("checkpoints", "run.lock"):
        if os.path.lexists(out / name):
            raise DataError(f"out: {out} holds a run ({name}); choose another folder")
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
        rarer = min(self.val_fraction, 1 - self.val_fraction)
        enough = max(2, math.ceil(1 / rarer)) * PIECE_BYTES
        if self.in_pieces and sum(self.bytes.values()) < enough:
            advice += (
                f"; a single file is cut into pieces of {PIECE_BYTES // 1024} KiB, and "
                f"about {enough // 1024:,} KiB of text give one of them to each split"
            )
        elif n_train + n_val > 1 and self.lowest == self.highest:
            advice = "all documents are the same text, and that is on one side"
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
def _disk_explained(out: Path) -> Iterator[None]:
    """Make what the disk refuses a DataError that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or out
        raise DataError(f"{where}: cannot be written ({error.strerror})") from error


@contextmanager
def _writing(out: Path, report: Report) -> Iterator[None]:
    """Hold `out` against a second preparation, without what a killed one left."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        with locked(out / LOCK, lambda line: report(line, 0, 0, 0)):
            _remove_leftovers(out)
            yield
    except Locked:
        raise DataError(f"{out}: another preparation is writing here") from None


def _remove_leftovers(out: Path) -> None:
    """Remove what a killed preparation was writing; nobody else is."""
    for folder in (out, *(out / split for split in SPLITS)):
        for path in leftovers(folder):
            name = path.name[len(".tmp-") : -len("-01234567")]
            if name in BEING_WRITTEN or SHARD_NAME.fullmatch(name):
                whole_folder = path.is_dir() and not path.is_symlink()
                shutil.rmtree(path) if whole_folder else path.unlink()


def _finished(
    out: Path, survey: Survey, tokenizer: Tokenizer, report: Report
) -> dict | None:
    """The index in `out`, if this very preparation is there and sound.

    It never changes again, so nothing is locked. Raises: as `_former`.
    """
    index, fault = _former(out, survey, tokenizer)
    if fault:
        report(f"replacing what is there: {fault}", 0, 0, 0)
    if not index or fault or (out / UNFINISHED).exists():
        return None
    n_tokens = sum(index["splits"][split]["tokens"] for split in SPLITS)
    n_files = index["source"]["files"]
    report("already prepared", n_files, n_files, n_tokens)
    return index


def _former(
    out: Path, survey: Survey, tokenizer: Tokenizer
) -> tuple[dict[str, Any] | None, str]:
    """This very preparation in `out` and what is wrong with it; None for nothing.

    Raises: DataError when there is anything else: it is not replaced.
    """
    if not os.path.lexists(out / "index.json"):
        _require_free(out)
        return None, ""
    index = read_index(out)
    if not survey.gave(index, tokenizer):
        raise _other_data(out, load_index(out), survey.identity(tokenizer))
    try:
        index = load_index(out)
        for split, meta in index["splits"].items():
            shards = [open_shard(out, e, tokenizer.vocab_size) for e in meta["shards"]]
            if faults := count_faults(meta, shards, index["tokenizer"]):
                return index, f"{out / 'index.json'}: {split}: {faults[0]}"
    except DataError as error:
        return index, str(error)
    return index, ""


def _require_free(out: Path) -> None:
    """DataError for somebody's files where the shards would go."""
    if (out / UNFINISHED).is_file():
        return
    for split in SPLITS:
        found = next((out / split).glob("*"), None)
        if found is not None:
            raise DataError(
                f"out: {out} is not a prepared folder (no index.json), and {found} "
                "lies there; choose another folder, or move it away"
            )


def _other_data(out: Path, found: dict, wanted: dict) -> DataError:
    there, asked = (
        f"text {index['source']['sha256'][:12]}, tokenizer "
        f"{index['tokenizer']['name']}, val_fraction {index['val_fraction']:g}"
        for index in (found, wanted)
    )
    return DataError(
        f"out: {out} holds other data ({there}) than asked for ({asked}), and runs may "
        "have been trained on them; choose another folder, or remove that one"
    )


def _holds_other(out: Path, survey: Survey, tokenizer: Tokenizer) -> bool:
    """Whether there is an index in `out`, and none of this preparation."""
    if not os.path.lexists(out / "index.json"):
        return False
    try:
        return not survey.gave(read_index(out), tokenizer)
    except DataError:
        return True


def _write(
    out: Path,
    files: list[SourceFile],
    survey: Survey,
    encoder: Encoder,
    report: Report,
) -> dict:
    """Write shards and index, over the same ones where they are damaged."""
    repair = (out / "index.json").exists()
    write_whole(out / UNFINISHED, WHAT_IS_UNFINISHED)
    for split in SPLITS:
        if (out / split).is_symlink():
            raise DataError(
                f"out: {out / split} is a link, and shards are kept in {out} itself; "
                "choose another folder, or put a link in the place of all of it"
            )
        (out / split).mkdir(exist_ok=True)
    try:
        if not repair:
            _clear(out)
        splits = _write_shards(out, files, survey, encoder, report)
        index = survey.identity(encoder.tokenizer) | {"splits": splits}
        index = save_index(out, index)
    except BaseException:
        if not repair:
            _clear(out)
        (out / UNFINISHED).unlink(missing_ok=True)
        raise
    (out / UNFINISHED).unlink(missing_ok=True)
    return index


def _write_shards(
    out: Path,
    files: list[SourceFile],
    survey: Survey,
    encoder: Encoder,
    report: Report,
) -> dict[str, dict]:
    """Returns: what the index says of each split."""
    again, n_tokens = Survey(len(files), survey.val_fraction), 0
    with ExitStack() as unfinished, closing(encoder.documents(files)) as documents:
        writers = {
            split: SplitWriter(out / split, encoder.tokenizer, unfinished)
            for split in SPLITS
        }
        for number, document, ids in documents:
            n_tokens += writers[again.add(document)].add(document, ids)
            report("writing", number, len(files), n_tokens)
        report("writing", len(files), len(files), n_tokens)
        splits = {split: writer.finish() for split, writer in writers.items()}
    if again.hash.digest() != survey.hash.digest():
        raise DataError("source: its files changed while they were read; try again")
    return splits


def _clear(out: Path) -> None:
    """Remove the shards of a preparation that has not ended, and nothing else."""
    for path in (p for split in SPLITS for p in (out / split).glob("shard_*.bin")):
        if SHARD_NAME.fullmatch(path.name):
            if not is_shard(path):
                raise DataError(f"out: {path} is no shard; choose another folder")
            path.unlink()


class SplitWriter:
    """The documents of one split, one after the other, cut into shards.

    Args: unfinished: left with an exception, removes the shard that is being written.
    """

    def __init__(self, folder: Path, tokenizer: Tokenizer, unfinished: ExitStack):
        self.folder, self.tokenizer = folder, tokenizer
        self.unfinished = unfinished
        self.shard: ShardWriter | None = None
        self.shards: list[dict] = []
        self.names: list[str] = []
        self.offsets: list[int] = []
        self.n_tokens = self.n_bytes = 0

    def add(self, document: Document, text: np.ndarray) -> int:
        """Append `[EOS] text`, given its tokens; returns how many they are."""
        ids = np.concatenate([[self.tokenizer.eos_id], text])
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
            self.unfinished.push(self.shard.closing)
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
    console = console_on(sys.stderr)
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
            yield ProgressReport(bar)
    else:
        yield ProgressReport()


class ProgressReport:
    """Shows how far a preparation is, with files/s and tokens/s."""

    def __init__(self, bar: Progress | None = None):
        self.bar, self.stage = bar, ""

    def __call__(self, stage: str, files: int, n_files: int, tokens: int) -> None:
        if not n_files:
            return self._line(stage)
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
            self._line(f"{stage}: {files:,}/{n_files:,} files{rates}")

    def _line(self, text: str) -> None:
        if self.bar:  # it stands below the lines
            text = one_line(text)
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            to_stderr(text)

    def _rates(self, files: int, tokens: int, seconds: float) -> str:
        text = f", {tokens:,} tokens" if tokens else ""
        if seconds > 0:
            text += f", {files / seconds:,.0f} files/s"
        if tokens and seconds > 0:
            text += f", {tokens / seconds:,.0f} tokens/s"
        return text
