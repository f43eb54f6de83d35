"""How every command answers a mistake: one line on stderr, and exit code 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from mamba3lite.terminal import show_what_streams_can, to_stderr

UsageError = typer.BadParameter.__base__  # of the click that this typer carries


@contextmanager
def one_line_errors(command: str, *mistakes: type[Exception]) -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit code 2.

    Args: command: after "mamba3lite". mistakes: what the command raises for wrong
    input; anything else is a fault of the program and keeps its traceback.
    """
    try:
        yield
    except mistakes as error:
        to_stderr(f"mamba3lite {command}: {error}")
        raise typer.Exit(2) from None


def check_new_file(file: Path, option: str) -> None:
    """Refuse a file that exists already, or cannot be made.

    Raises: typer.BadParameter naming file and option.
    """
    try:
        file.lstat()
    except FileNotFoundError:
        if not file.parent.is_dir():
            raise typer.BadParameter(f"{file.parent} is not a folder") from None
        return
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}") from None
    raise typer.BadParameter(f"{file} exists; name a new file for {option}")


class Group(TyperGroup):
    """Commands of which a wrong option is one line, and what the system refuses."""

    def make_context(self, name: str | None, *rest: Any, **extra: Any) -> typer.Context:
        """Read the options before the command."""
        show_what_streams_can()
        return super().make_context(name, *rest, **extra)

    def invoke(self, context: typer.Context) -> Any:
        """Run the command that was named."""
        with _one_line_usage(
            lambda: f"{context.command_path} {context.invoked_subcommand}"
        ):
            return super().invoke(context)


class Command(TyperCommand):
    """A command of its own that answers as one of a `Group` does."""

    def make_context(self, name: str | None, *rest: Any, **extra: Any) -> typer.Context:
        """Read the options."""
        show_what_streams_can()
        with _one_line_usage(lambda: name):
            return super().make_context(name, *rest, **extra)

    def invoke(self, context: typer.Context) -> Any:
        """Run it."""
        with _one_line_usage(lambda: context.command_path):
            return super().invoke(context)


@contextmanager
def _one_line_usage(command: Callable[[], str | None]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        where = error.ctx.command_path if error.ctx else command()
        to_stderr(f"{where}: {error.format_message()}")
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:  # nobody reads any more: typer ends with code 1
        raise
    except OSError as error:
        reason = f"{error.filename or 'output'}: {error.strerror or error}"
        to_stderr(f"{command()}: {reason}")
        raise typer.Exit(2) from None
