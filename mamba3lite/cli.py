"""The command line. Heavy imports stay inside the commands, so help is instant."""

import codecs
import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import mamba3lite
from mamba3lite.commands import Group, one_line_errors
from mamba3lite.sampling import (
    MODE_NAMES,
    OptionError,
    Sampling,
    check,
    check_lengths,
)
from mamba3lite.terminal import (
    say_that_torch_loads,
    show,
    to_stderr,
)
from mamba3lite.threads import spin_briefly

app = typer.Typer(
    cls=Group,
    name="mamba3lite",
    help="Train and use small state-space language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    str, typer.Option("--config", help="A shipped name (tiny) or a YAML file.")
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting."),
]


def main() -> None:
    """Entry point of the console script."""
    spin_briefly()
    app()


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        show(f"mamba3lite {mamba3lite.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Train and use small state-space language models."""


@app.command()
def train(
    config: Config = "tiny",
    overrides: Overrides = [],  # noqa: B006 (typer wants a list)
    resume: Annotated[
        str, typer.Option(help="auto, never, must, a step, or a checkpoint's path.")
    ] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, take one step, write nothing.")
    ] = False,
) -> None:
    """Train a model; a run that was stopped continues."""
    from mamba3lite.data import DataError
    from mamba3lite.training.arguments import checked_run
    from mamba3lite.training.config import ConfigError

    with one_line_errors("train", ConfigError, DataError):
        checked_run(config, overrides, resume)
    say_that_torch_loads()
    from mamba3lite.training.pretrain import run_training

    code = run_training(config, overrides, resume=resume, dry_run=dry_run)
    raise typer.Exit(code)


@app.command()
def prepare(
    source: Annotated[
        str,
        typer.Option(
            help="stdlib, shakespeare, kjv, hf:NAME, or the path of text, JSONL, .gz "
            "or a folder; several, but hf:, may be joined by +."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    tokenizer: Annotated[str, typer.Option(help="byte or gpt2.")] = "byte",
    val_fraction: Annotated[
        float, typer.Option(help="Share of the documents held out for validation.")
    ] = 0.05,
    ranks: Annotated[
        Path | None,
        typer.Option(help="gpt2.tiktoken; else from the cache or its package."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; default: 1 for bytes, else up to 8."),
    ] = None,
) -> None:
    """Turn text into token shards for training."""
    from mamba3lite.data.prepare import prepare as prepare_source

    with one_line_errors("prepare", ValueError):
        index = prepare_source(
            source,
            tokenizer,
            out,
            val_fraction=val_fraction,
            ranks=ranks,
            workers=workers,
        )
        for split, entry in index["splits"].items():
            show(
                f"{split}: {entry['documents']:,} documents, {entry['bytes']:,} bytes, "
                f"{entry['tokens']:,} tokens"
            )
        show(f"prepared in {out}")


@app.command()
def verify(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Prepared data, a run, its checkpoints, or one of them."
        ),
    ],
) -> None:
    """Check shards or checkpoints against their hashes; exit code 1 for a fault."""
    with one_line_errors("verify", OptionError):
        require_folder("DIR", str(folder))
    say_that_torch_loads()
    from mamba3lite.verify import verify_folder

    faults = verify_folder(folder, show)
    for fault in faults:
        to_stderr(f"mamba3lite verify: {fault}")
    if faults:
        raise typer.Exit(1)
    show(f"{folder}: all is well")


@app.command()
def info(config: Config = "tiny", overrides: Overrides = []) -> None:  # noqa: B006
    """Show sizes: parameters, tokens, memory and disk, derived from shapes."""
    from mamba3lite.training.config import ConfigError, load_config

    with one_line_errors("info", ConfigError):
        checked = load_config(config, overrides)
        say_that_torch_loads()
        from mamba3lite.training.estimate import describe

        show(describe(checked))


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The PNG; default curves.png in the run, or here for several."
        ),
    ] = None,
) -> None:
    """Draw loss, validation, learning rate, gradient norm and speed as a PNG."""
    from mamba3lite.training.metrics import MetricsError, plot_runs

    with one_line_errors("plot", MetricsError):
        where = out or (runs[0] if len(runs) == 1 else Path()) / "curves.png"
        plot_runs(runs, where)
        show(f"{where}")


@app.command()
def generate(
    checkpoint: Annotated[
        str,
        typer.Option(
            metavar="PATH", help="A checkpoint, a checkpoints folder or a run folder."
        ),
    ],
    prompts: Annotated[
        list[str],
        typer.Option("--prompt", help="May be given again. Empty: starts a document."),
    ] = [],  # noqa: B006
    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="One prompt a line, after those of --prompt."
        ),
    ] = None,
    num_samples: Annotated[
        int,
        typer.Option(help="Texts for each prompt, of --seed, --seed + 1 and so on."),
    ] = 1,
    max_new_tokens: Annotated[
        int, typer.Option(help="At most so many follow a prompt; EOS ends it before.")
    ] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 50,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 0.95,
    seed: Annotated[
        int, typer.Option(help="Decides the random numbers of the first sample.")
    ] = 0,
    streaming: Annotated[
        bool, typer.Option("--stream", help="Print each token when it is there.")
    ] = False,
    batch_size: Annotated[int, typer.Option(help="Texts computed side by side.")] = 64,
    mode: Annotated[
        str, typer.Option(help="How a step is computed: recurrent or exact.")
    ] = "recurrent",
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Let control characters reach a terminal as they are."
        ),
    ] = False,
) -> None:
    """Continue prompts with a trained model."""
    with one_line_errors("generate", OptionError):
        choice = Sampling(temperature, top_k, top_p)
        allowed = 1 <= num_samples <= 10**6
        check("num_samples", num_samples, allowed, "between 1 and 1000000")
        check("batch_size", batch_size, batch_size >= 1, "at least 1")
        check_lengths(max_new_tokens, [seed, seed + num_samples - 1])
        check("mode", mode, mode in MODE_NAMES, " or ".join(MODE_NAMES))
        require_folder("checkpoint", checkpoint)
        wanted = [bytes_of_argument(text) for text in prompts]
        wanted += lines_of(prompt_file) if prompt_file is not None else []
        wanted = wanted or [b""]
    say_that_torch_loads()
    from mamba3lite.data import DataError
    from mamba3lite.generate import Decoder, LogitsError, texts
    from mamba3lite.training.checkpoint import CheckpointError
    from mamba3lite.training.config import ConfigError

    mistakes = (CheckpointError, ConfigError, DataError, LogitsError, OptionError)
    count = len(wanted) * num_samples
    with one_line_errors("generate", *mistakes), sparing_memory():
        model, tokenizer = load_for_generation(
            Path(checkpoint), to_stderr, mode == "exact"
        )
        found = texts(
            Decoder(model, 1 if streaming else min(batch_size, count), mode),
            tokenizer,
            wanted,
            num_samples=num_samples,
            seed=seed,
            max_new_tokens=max_new_tokens,
            **dataclasses.asdict(choice),
        )
        for number, sample, pieces in found:
            if count > 1:
                show(f"===== prompt {number}, sample {sample} =====")
            show_text(pieces, streaming, raw)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure the scan: every version, forward and backward, against its floor."""
    from mamba3lite.bench_command import app as measurements

    measurements(context.args, prog_name="mamba3lite bench")


@app.command()
def doctor() -> None:
    """Check this installation: versions, device, kernels against the oracle."""
    say_that_torch_loads()
    from mamba3lite.doctor import examine

    raise typer.Exit(0 if examine(show) else 1)


def show_text(pieces: Iterable[str], streaming: bool, raw: bool) -> None:
    """Print a text whole, or piece by piece; Ctrl-C leaves what there is of it."""
    kept: list[str] = []
    try:
        for piece in pieces:
            if streaming:
                show(piece, end="", raw=raw)
            else:
                kept.append(piece)
    except KeyboardInterrupt:
        show("".join(kept), raw=raw)
        raise
    show("".join(kept), raw=raw)


@contextmanager
def sparing_memory() -> Iterator[None]:
    """OptionError, saying what to lower, where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from mamba3lite.training.pretrain import first_line, out_of_memory

        if not out_of_memory(error):
            raise
        raise OptionError(
            f"batch_size: out of memory ({first_line(error)}); lower it"
        ) from None


def require_folder(name: str, path: str) -> None:
    """Refuse what is no folder.

    Raises: OptionError naming the path, or the option when it is empty.
    """
    check(name, path, path != "", "a path")
    if not os.path.isdir(path):
        is_file = os.path.lexists(path)
        fault = "is a file, wants a folder" if is_file else "no such folder"
        raise OptionError(f"{path}: {fault}")


def bytes_of_argument(text: str) -> bytes:
    """What was typed, byte for byte: Python decodes it with surrogate escapes.

    Raises: OptionError for other lone surrogates, which stand for no bytes.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise OptionError(
            f"prompt: character {error.start + 1} is a lone surrogate, not text"
        ) from None


MOST_PROMPT_BYTES = 2**26


def lines_of(file: str) -> list[bytes]:
    """The prompts in a file, one a line; an empty line is an empty prompt.

    Lines end with LF or CR LF; the byte order mark of UTF-8 is no part of the first.

    Raises: OptionError for a file without a line, or one that cannot be read.
    """
    check("prompt_file", file, file != "", "a path")
    try:
        with open(file, "rb") as opened:
            data = opened.read(MOST_PROMPT_BYTES + 1).removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise OptionError(f"{file}: {error.strerror}") from None
    if len(data) > MOST_PROMPT_BYTES:
        raise OptionError(f"{file}: more than {MOST_PROMPT_BYTES:,} bytes of prompts")
    if not data:
        raise OptionError(f"{file}: holds no prompt; wants one a line")
    lines = data.removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") for line in lines]


def load_for_generation(
    path: Path, log: Callable[[str], None], exact: bool = False
) -> tuple:
    """Model and tokenizer of a checkpoint, on the GPU if there is one.

    Args: exact: compute every row by itself, by the fused scan or, on a CPU, PyTorch's.
    """
    import torch

    from mamba3lite.data.tokenizers import load_tokenizer
    from mamba3lite.models.transformer import Mamba3Transformer
    from mamba3lite.training.checkpoint import (
        find_checkpoint,
        load_model,
        read_run_state,
    )
    from mamba3lite.training.pretrain import _enforce_triton_env_var

    folder = find_checkpoint(path, log)
    state = read_run_state(folder)
    fields = dict(state["config"]["model"])
    _enforce_triton_env_var(fields, log)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if exact:
        fields["batch_invariant"] = True
        if device == "cpu" or fields["ssd_dispatch"] == "triton":
            fields["ssd_dispatch"] = "pytorch"
    model = Mamba3Transformer(fields)
    load_model(folder, model)
    return model.to(device).eval(), load_tokenizer(state["data"]["tokenizer"])


if __name__ == "__main__":
    sys.exit(main())
