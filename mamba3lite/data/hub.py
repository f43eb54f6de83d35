"""Streams of the Hugging Face hub, copied to disk once so that they can be read twice.

`hf:NAME` is the training split of a dataset with a string under "text" in every
record; `hf:NAME:CONFIG` one of its configurations; `hf:NAME:CONFIG:COUNT` the first
COUNT records (CONFIG may be empty). No more than one record is in memory at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from mamba3lite.data import DataError
from mamba3lite.data.corpora import STREAM_PREFIX, SourceFile

COPY_BYTES = 1 << 26  # of JSONL in one file of the copy
SECONDS_BETWEEN_LINES = 5.0


class Stream(NamedTuple):
    """What a source of the hub names; config None is the default, count None all."""

    name: str
    config: str | None
    count: int | None


def parse_stream(source: str) -> Stream:
    """The parts of "hf:NAME:CONFIG:COUNT"; DataError for anything else."""
    name, *rest = source.removeprefix(STREAM_PREFIX).split(":")
    config, count = (*rest, "", "")[:2]
    sound = count.isascii() and count.isdigit() and int(count) > 0
    if not name or len(rest) > 2 or (len(rest) == 2 and not sound):
        raise DataError(
            f"source: got {source!r}, wanted hf:NAME, hf:NAME:CONFIG or "
            "hf:NAME:CONFIG:COUNT with a COUNT of 1 or more"
        )
    return Stream(name, config or None, int(count) if sound else None)


def copy_stream(
    source: str, folder: Path, log: Callable[[str], None]
) -> list[SourceFile]:
    """Copy the records of a stream into JSONL files in `folder`, in their order.

    Args: log: gets a line with counts every few seconds.
    Returns: the files, for `read_documents`.
    Raises: DataError when `datasets` is not installed, the hub refuses, or a record
    holds no text.
    """
    stream = parse_stream(source)
    texts = _told(_texts(source, stream), source, log)
    files: list[SourceFile] = []
    for first in texts:
        path = folder / f"{len(files):05d}.jsonl"
        with path.open("wb") as file:
            for text in chain([first], texts):
                file.write(json.dumps({"text": text}).encode() + b"\n")
                if file.tell() >= COPY_BYTES:
                    break
        files.append(SourceFile(f"{stream.name}/{path.name}", path, "jsonl"))
    return files


def _told(
    texts: Iterator[str], source: str, log: Callable[[str], None]
) -> Iterator[str]:
    """The same texts, with a line now and then."""
    n_characters, shown = 0, time.monotonic()
    for number, text in enumerate(texts, start=1):
        yield text
        n_characters += len(text)
        if time.monotonic() - shown > SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            log(f"{source}: {number:,} records, {n_characters:,} characters so far")


def _texts(source: str, stream: Stream) -> Iterator[str]:
    records = _records(source, stream)
    for number, record in enumerate(records, start=1):
        text = record.get("text")
        if not isinstance(text, str):
            raise DataError(
                f'{source}, record {number}: wanted a string under "text", the record '
                f"has {', '.join(record)}"
            )
        yield text
        if number == stream.count:
            return


def _records(source: str, stream: Stream) -> Iterator[dict]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"source {source}: wants the package datasets; run "
            '`pip install "mamba3lite[hf]"`'
        ) from error
    try:
        yield from datasets.load_dataset(
            stream.name, stream.config, split="train", streaming=True
        )
    except Exception as error:  # whatever the hub, the network or a script raises
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"source {source}: {reason[0]}") from error
