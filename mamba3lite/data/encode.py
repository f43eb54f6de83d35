"""Documents to tokens, in this process or in several, always in the same order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mamba3lite.data import DataError
from mamba3lite.data.corpora import Document, SourceFile, read_documents
from mamba3lite.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer

BATCH_BYTES = 1 << 20  # of text handed to a process at a time
MOST_WORKERS = 256

Numbered = tuple[int, Document]
Encoded = tuple[int, Document, np.ndarray]


def default_workers(tokenizer: Tokenizer) -> int:
    """The processors, at most 8; bytes are tokens already, so 1 for them."""
    return 1 if tokenizer.name == ByteTokenizer.name else min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Encoder:
    """A tokenizer, the rank file it was made from if one was given, and processes."""

    tokenizer: Tokenizer
    ranks: str | Path | None
    workers: int

    def documents(self, files: list[SourceFile]) -> Iterator[Encoded]:
        """Every document with the number of its file and its tokens, in order.

        Documents are read here and encoded by the processes, with about 2 MiB of text
        on the way for each of them. With 1 worker no process is started.
        Raises: DataError as `read_documents`, or when a process dies.
        """
        begun = False
        if self.workers == 1:
            for number, document in _documents(files):
                yield number, document, self.tokenizer.encode_bytes(document.text)
            return
        pool = ProcessPoolExecutor(
            self.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=(self.tokenizer.name, self.ranks),
        )
        try:
            for encoded in _in_order(pool, _batches(files), 2 * self.workers):
                begun = True
                yield encoded
        except BrokenProcessPool as error:
            raise DataError(self._why_it_died(begun)) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def _why_it_died(self, begun: bool) -> str:
        why = "died (out of memory?)"
        script = getattr(sys.modules["__main__"], "__file__", None)
        if not begun and script is not None:
            why = (
                f"died at its start: {script} is run again by each, so what it does "
                f'belongs below `if __name__ == "__main__":` (or out of memory?)'
            )
        return (
            f"tokenizer {self.tokenizer.name}: one of {self.workers} processes {why}; "
            "--workers 1 starts none"
        )

    def refuse_unguarded_script(self) -> None:
        """End a process of the pool that runs the script of its parent from the top.

        Without a main guard it comes here again before it is ready for work. It leaves
        in silence; its parent says why.
        """
        process = multiprocessing.current_process()
        if self.workers > 1 and getattr(process, "_inheriting", False):
            sys.exit(1)


def _documents(files: list[SourceFile]) -> Iterator[Numbered]:
    for number, file in enumerate(files):
        for document in read_documents(file):
            yield number, document


def _batches(files: list[SourceFile]) -> Iterator[list[Numbered]]:
    batch, n_bytes = [], 0
    for number, document in _documents(files):
        batch.append((number, document))
        n_bytes += len(document.text)
        if n_bytes >= BATCH_BYTES:
            yield batch
            batch, n_bytes = [], 0
    if batch:
        yield batch


def _in_order(
    pool: ProcessPoolExecutor, batches: Iterator[list[Numbered]], most: int
) -> Iterator[Encoded]:
    """What the pool makes of each batch, first in, first out, `most` on the way."""
    waiting: deque[tuple[list[Numbered], Future]] = deque()
    for batch in batches:
        texts = [document.text for _, document in batch]
        waiting.append((batch, pool.submit(_encode, texts)))
        if len(waiting) == most:
            yield from _finished(*waiting.popleft())
    while waiting:
        yield from _finished(*waiting.popleft())


def _finished(batch: list[Numbered], future: Future) -> Iterator[Encoded]:
    for (number, document), ids in zip(batch, future.result(), strict=True):
        yield number, document, ids


# In the processes of the pool


def _start_worker(name: str, ranks: str | Path | None) -> None:
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _tokenizer = load_tokenizer(name, ranks)


def _die_with_parent() -> None:
    """A killed parent cannot stop its pool, which would wait for work for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode(texts: list[bytes]) -> list[np.ndarray]:
    return [_tokenizer.encode_bytes(text) for text in texts]
