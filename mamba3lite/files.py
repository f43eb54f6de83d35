"""Files that are whole or not there.

What is written goes to a new file of a random name beside the one that it replaces,
reaches the disk, and is renamed. A link or a file that somebody left under any name is
never written through. What others may have written is read as plain files alone.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

LEFTOVER = re.compile(r"\.tmp-.+-[0-9a-f]{8}")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new binary file that takes the place of `path` when the block ends well.

    After an exception `path` is as it was, and the new file is gone.
    Raises: OSError, which names `path` and not the file beside it.
    """
    beside = temporary_name(path)
    try:
        with open(beside, "xb", opener=_open_no_link) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError) and error.filename in (str(beside), None):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    flush_folder(path.parent)


def write_whole(path: Path, content: bytes | str) -> None:
    """Replace a file by these bytes, or this text as UTF-8; raises as `replacing`."""
    with replacing(path) as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)


def temporary_name(path: Path) -> Path:
    """A name beside `path` that nobody can have prepared."""
    return path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")


def leftovers(folder: Path) -> list[Path]:
    """What a process that was killed while it wrote into `folder` left there."""
    return sorted(p for p in folder.glob(".tmp-*") if LEFTOVER.fullmatch(p.name))


def open_plain(path: Path, inside: Path) -> IO[bytes]:
    """Open a file of a folder that a stranger may have made, for reading bytes.

    Raises: OSError for what cannot be read, is no plain file (a pipe would never end),
    or is a link that leads out of the folder `inside`.
    """
    name = str(path)
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(inside)):
        raise OSError(errno.EXDEV, "a link that leads out of its folder", name)
    _require_plain(os.stat(path), name)  # to open a device may already do something
    return open(path, "rb", opener=_open_plain)


def _require_plain(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a plain file", name)


def _open_plain(name: str, flags: int) -> int:
    descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _require_plain(os.fstat(descriptor), name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable, where the system has such a thing."""
    if os.name == "nt":  # no folder can be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _open_no_link(name: str, flags: int) -> int:
    # "x" is O_EXCL, which follows no link either; some file systems forget that.
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
