"""What a person sees: text that is safe on a terminal, streams that do not fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


def printable(text: str) -> str:
    r"""The text with its control characters spelled out, as \x1b; lines and tabs stay.

    Names, prompts and generated text may hold escape sequences, which move the cursor,
    rename the window or answer for the keyboard.
    """
    return "".join(z if _harmless(z) else _spelled(z) for z in text)


def one_line(text: str) -> str:
    """The text as `printable`, its line ends and tabs spelled out too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _harmless(character: str) -> bool:
    # C0, DEL and C1 steer a terminal; the two directions of Unicode turn text around.
    code = ord(character)
    if character in "\n\t":
        return True
    control = code < 0x20 or 0x7F <= code < 0xA0
    turning = 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return not (control or turning or 0xD800 <= code <= 0xDFFF)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def show_what_streams_can() -> None:
    """Let stdout and stderr replace what their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def to_stderr(text: str) -> None:
    """Print one line where it does not mix with the output, whatever it quotes."""
    if sys.stderr is not None:
        print(one_line(text), file=sys.stderr, flush=True)


def show(text: str, end: str = "\n", raw: bool = False) -> None:
    """Write to stdout at once: to a terminal as `printable`, elsewhere as it is.

    Args: raw: to a terminal as it is, too.
    """
    if sys.stdout is not None:
        safe = _is_terminal(sys.stdout) and not raw
        print(printable(text) if safe else text, end=end, flush=True)


def note(text: str) -> None:
    """A line on stderr from a signal's handler or a thread, where print may be busy.

    One that cannot be written is lost.
    """
    with suppress(AttributeError, OSError, ValueError):  # no stream, closed, no file
        os.write(sys.stderr.fileno(), f"{one_line(text)}\n".encode())


class Lasting:
    """A stream that falls silent once it cannot be written, instead of failing.

    Args: stream: stdout or stderr; None where there is none. name: of the two.
    """

    def __init__(self, stream: TextIO | None, name: str):
        self._name = name
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 (for good)
        self._silent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """As a stream does it; what cannot be written is lost."""
        return self._attempt(lambda: self._stream.write(text)) or len(text)

    def flush(self) -> None:
        """As a stream does it; what cannot be written is lost."""
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], int | None]) -> int | None:
        try:
            return action()
        except OSError as error:
            self._fall_silent(error)
            return None

    def _fall_silent(self, error: OSError) -> None:
        if self._silent:
            return
        self._silent = True
        with suppress(OSError, ValueError):
            # What is left in the buffer would fail once more at the end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if self._name == "stdout":
            to_stderr(
                f"[warn] stdout cannot be written ({error.strerror or error}); the run "
                "goes on without lines"
            )


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, nobody has to read stdout and stderr: a run outlives its readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        Lasting(sys.stdout, "stdout"),
        Lasting(sys.stderr, "stderr"),
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def say_that_torch_loads() -> None:
    """Say on a terminal why nothing happens for some seconds."""
    if _is_terminal(sys.stderr) and "torch" not in sys.modules:
        to_stderr("Loading PyTorch ...")


def can_redraw(stream: TextIO) -> bool:
    """Whether a progress bar can be redrawn: a terminal, and not a dumb one.

    FORCE_COLOR makes no terminal of a file.
    """
    return _is_terminal(stream) and os.environ.get("TERM") not in ("dumb", "unknown")


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False


def console_on(stream: TextIO) -> Console:
    """A console whose `is_terminal` says whether a bar can be redrawn there."""
    from rich.console import Console  # help does not wait for it

    return Console(file=stream, force_terminal=can_redraw(stream))
