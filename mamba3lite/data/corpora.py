"""Where text comes from: the standard library of the running Python, or a path.

A source is a list of files in a fixed order (by relative name), and each file holds
one or more documents:

- `stdlib`: every `.py` file of the interpreter's standard library is one document;
- a folder: every text file is one document, every line of a `.jsonl` file is one;
- a single text file: pieces of about 16 KiB cut at line ends, because one document
  alone could not be shared out between training and validation;
- any of these files with `.gz` at the end of its name.

Documents are *bytes*. Nothing is decoded, so a Latin-1 source with a coding cookie
stays as it lies on disk; only JSONL, which is UTF-8 by definition, is parsed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from mamba3lite.data import DataError

# Tests, generated grammars and bundled wheels are not the text one wants to imitate.
STDLIB_LEFT_OUT = {
    *("test", "tests", "idle_test", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages"),
}
STDLIB_LEAST_BYTES = 5_000_000  # an ordinary CPython has more than ten million
PIECE_BYTES = 16_384


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is relative, and the same on every machine."""

    name: str
    path: Path
    kind: Literal["whole", "pieces", "jsonl"]


@dataclass(frozen=True)
class Document:
    """One document: its name within the source, and its bytes."""

    name: str
    text: bytes

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the text: it identifies the document and chooses its split."""
        return hashlib.sha256(self.text).digest()


def source_files(source: str | Path) -> list[SourceFile]:
    """The files of `source`, ordered by name.

    Args: source: "stdlib", or the path of a text file, a `.jsonl` file, either of
    them with `.gz`, or a folder of such files.
    Raises: DataError, with counts, when there is nothing to read.
    """
    if source == "stdlib":
        return _stdlib_files(Path(sysconfig.get_path("stdlib")))
    path = Path(source)
    if source == "":  # which Path would read as the current folder
        raise DataError("source: got '', wanted 'stdlib', a file or a folder")
    if path.is_dir():
        return _folder_files(path)
    if path.is_file():
        kind = "jsonl" if _is_jsonl(path.name) else "pieces"
        return [SourceFile(path.name, path, kind)]
    raise DataError(f"source: got {str(source)!r}, wanted 'stdlib', a file or a folder")


def _stdlib_files(root: Path) -> list[SourceFile]:
    paths: list[Path] = []
    if root.is_dir():  # it is not when the library is a zip file
        paths, _ = _walk(root, left_out=lambda name: name in STDLIB_LEFT_OUT)
        paths = [path for path in paths if path.suffix == ".py"]
    n_bytes = sum(path.stat().st_size for path in paths)
    if n_bytes < STDLIB_LEAST_BYTES:
        raise DataError(
            f"source stdlib: found {len(paths):,} .py files of {n_bytes:,} bytes in "
            f"this Python's library, wanted {STDLIB_LEAST_BYTES:,} bytes or more "
            "(zipped or minimal installation?); give a path as source instead"
        )
    return _named(root, paths)


def _folder_files(root: Path) -> list[SourceFile]:
    paths, n_left_out = _walk(root, left_out=lambda name: name.startswith("."))
    if not paths:
        raise DataError(
            f"source {root}: found 0 files in this folder ({n_left_out:,} hidden "
            "entries and symlinks left out), wanted text or .jsonl files"
        )
    return _named(root, paths)


def _walk(root: Path, left_out) -> tuple[list[Path], int]:
    """Regular files under `root`, and how many entries were left out."""
    paths, n_left_out = [], 0
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        keep = [name for name in folders if not left_out(name)]
        n_left_out += len(folders) - len(keep)
        folders[:] = keep
        for path in (Path(folder, name) for name in names):
            # is_file() also keeps named pipes out, whose reading would never end.
            if path.is_symlink() or left_out(path.name) or not path.is_file():
                n_left_out += 1
            else:
                paths.append(path)
    return paths, n_left_out


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error


def _named(root: Path, paths: list[Path]) -> list[SourceFile]:
    files = []
    for path in paths:
        name = path.relative_to(root).as_posix()
        files.append(SourceFile(name, path, "jsonl" if _is_jsonl(name) else "whole"))
    return sorted(files, key=lambda file: os.fsencode(file.name))


def _is_jsonl(name: str) -> bool:
    return name.removesuffix(".gz").endswith(".jsonl")


def read_documents(file: SourceFile) -> Iterator[Document]:
    """The documents of one file, in order.

    Raises: DataError naming the file (and the line) for a file that cannot be read,
    is not text (it holds a NUL byte), or is not JSONL with a "text" in each line.
    """
    try:
        with _open(file.path) as stream:
            if file.kind == "jsonl":
                yield from _json_documents(file, stream)
            elif file.kind == "pieces":
                yield from _pieces(file, stream)
            else:
                yield _text_document(file, file.name, stream.read())
    except EOFError as error:
        raise DataError(f"{file.path}: this gzip file is cut short") from error
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file.path}: cannot be read ({reason})") from error


def _open(path: Path):
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _pieces(file: SourceFile, stream) -> Iterator[Document]:
    number = 0
    while lines := stream.readlines(PIECE_BYTES):
        number += 1
        yield _text_document(file, f"{file.name}:{number}", b"".join(lines))


def _text_document(file: SourceFile, name: str, text: bytes) -> Document:
    if (offset := text.find(0)) >= 0:
        raise DataError(f"{file.path}: not text, NUL byte at offset {offset} of {name}")
    return Document(name, text)


def _json_documents(file: SourceFile, stream) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            text = _json_text(f"{file.path}, line {number}", line)
            yield Document(f"{file.name}:{number}", text)


def _json_text(where: str, line: bytes) -> bytes:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: wanted an object with a string under "text"')
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f'{where}: "text" holds a lone surrogate') from error


def zlib_bits_per_byte(text: bytes) -> float:
    """Bits per byte that `zlib -9` needs for `text` as one stream.

    The yardstick for a byte model: better than this is better than gzip.
    Raises: ValueError for an empty text.
    """
    if not text:
        raise ValueError("text: got 0 bytes, wanted 1 or more")
    return 8 * len(zlib.compress(text, 9)) / len(text)
