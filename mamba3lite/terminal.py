"""What a person sees: text that is safe on a terminal, streams that do not fail."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console


def printable(text: str) -> str:
    r"""The text with its control characters spelled out, as \x1b; lines and tabs stay.

    Names, prompts and generated text may hold escape sequences, which move the cursor,
    rename the window or answer for the keyboard.
    """
    return "".join(z if _harmless(z) else _spelled(z) for z in text)


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


def can_redraw(stream: TextIO) -> bool:
    """Whether a progress bar can be redrawn: a terminal, and not a dumb one.

    FORCE_COLOR makes no terminal of a file.
    """
    try:
        terminal = stream.isatty()
    except (AttributeError, ValueError):  # no stream at all, or a closed one
        return False
    return terminal and os.environ.get("TERM", "") not in ("dumb", "unknown")


def console_on(stream: TextIO) -> Console:
    """A console whose `is_terminal` says whether a bar can be redrawn there."""
    return Console(file=stream, force_terminal=can_redraw(stream))
