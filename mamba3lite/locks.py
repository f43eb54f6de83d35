"""One process at a time in a folder: a lock that goes when its process dies.

filelock's native locks alone. Its soft lock is a file whose presence counts: it would
outlive a kill, and refuse the run for ever.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout, UnixFileLock, WindowsFileLock, has_fcntl

# What a file system without locks answers: Lustre mounted without flock, some NFS.
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP}


class Locked(Exception):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock file `path`, made when missing and left behind, inside the block.

    Args: log: gets one line where the file system or the system has no locks; the
    block then runs without one.
    Raises: Locked when another process holds it; OSError when it cannot be opened.
    """
    windows = sys.platform == "win32"
    lock = None
    if windows or has_fcntl:
        native = WindowsFileLock if windows else UnixFileLock
        lock = native(path, blocking=False, fallback_to_soft=False)
    try:
        if lock is not None:
            lock.acquire()
    except Timeout:
        raise Locked from None
    except (OSError, NotImplementedError) as error:
        missing = isinstance(error, NotImplementedError) or error.errno in NO_LOCKS
        if not missing:
            raise
        lock = None
    if lock is None:
        log(
            f"[warn] {path.parent}: no locks on this file system; nothing keeps a "
            "second process from writing here at the same time"
        )
    try:
        yield
    finally:
        if lock is not None:
            lock.release()
