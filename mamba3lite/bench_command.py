"""The command `mamba3lite bench`: its options, checked before torch loads."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from mamba3lite.commands import Command, check_new_file
from mamba3lite.terminal import console_on, say_that_torch_loads, to_stderr
from mamba3lite.threads import spin_briefly
from mamba3lite.training.config import ConfigError, load_config

PARTS = ("per_chunk", "scan", "block_fp32", "block_bf16")
DECODE_PARTS = ("steps", "memory", "bits")  # with --decode

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Command)
def main(
    batch: Annotated[
        int | None, typer.Option(help="Sequences B; 8 on a GPU, 1 on a CPU.", min=1)
    ] = None,
    time_steps: Annotated[
        int | None,
        typer.Option("--time", help="Steps T; 2048 on a GPU, 512 on a CPU.", min=1),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads H; 16.", min=1)] = None,
    head_dim: Annotated[
        int | None, typer.Option(help="Channels D per head; 64.", min=1)
    ] = None,
    state_dim: Annotated[
        int | None, typer.Option(help="Complex states N; 64.", min=1)
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Steps per chunk; 64.", min=1)
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Also sweep the launch parameters.")
    ] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Also measure fla and mamba_ssm, where installed."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Also train this configuration for 20 steps: pretrain_434m."),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help=f"Only this part of the scan: {', '.join(PARTS)}. With --decode only "
            f"this one of it: {', '.join(DECODE_PARTS)}.",
        ),
    ] = None,
    no_scan: Annotated[
        bool, typer.Option("--no-scan", help="Leave the scan out, for --model.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="One setting of --model, as for training."),
    ] = None,
    decode: Annotated[
        bool, typer.Option("--decode", help="Measure decoding of --model instead.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write all numbers to this file.")
    ] = None,
) -> None:
    """Measure the scan: every version, forward and backward, against its floor."""
    given = (batch, time_steps, heads, head_dim, state_dim, chunk_size)
    if not decode:
        check_steps(time_steps or 2048, chunk_size or 64)
    if json_file:
        check_new_file(json_file, "--json")
    if overrides and not model:
        raise typer.BadParameter("--set changes the configuration of --model; name one")
    if decode and not model:
        raise typer.BadParameter("--decode measures a model; name one with --model")
    if decode and any((tune, peers, no_scan, *given)):
        raise typer.BadParameter(
            "--decode leaves the scan out; no option of it goes along"
        )
    if decode:
        known_parts(parts, DECODE_PARTS)
    else:
        parts = check_parts(parts, not no_scan, peers, model)
    if model:
        check_model(model, overrides or [])
    say_that_torch_loads()
    spin_briefly()
    import torch

    from mamba3lite import bench

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    faults: list[str | None] = []
    options: dict[str, Callable] = {
        "say": to_stderr,
        "save": lambda part: faults.append(bench.write_report(json_file, part)),
    }
    console = console_on(sys.stdout)
    console.width = max(console.width, 100)
    if decode:
        from mamba3lite.bench_decode import print_decode_report, run_decode_bench

        report = run_decode_bench(
            model, overrides or [], device, parts=parts or DECODE_PARTS, **options
        )
        print_decode_report(report, console)
    else:
        shape, checked = shapes(given, device.type == "cuda")
        report = bench.run_bench(
            shape, checked, device, tune=tune, peers=peers, parts=parts, model=model,
            overrides=overrides, **options,
        )  # fmt: skip
        bench.print_report(report, console)
    if any(faults):
        to_stderr(faults[-1])
        raise typer.Exit(2)


def shapes(given: Sequence[int | None], on_gpu: bool) -> tuple:
    """The shape to measure, and a smaller one for the errors.

    Args: given: B, T, H, D, N and chunk; None for what is usual on this device.
    """
    from mamba3lite.reference import Shape

    usual = (8, 2048, 16, 64, 64, 64) if on_gpu else (1, 512, 16, 64, 64, 64)
    shape = Shape(*(a or b for a, b in zip(given, usual, strict=True)))
    check_steps(shape.T, shape.chunk)
    # The oracle is a loop over time in double precision: a smaller batch for it.
    few = (
        {"B": 2, "T": 2048, "H": 4}
        if on_gpu
        else {"B": 1, "T": 2 * shape.chunk, "H": 2}
    )
    return shape, dataclasses.replace(shape, **few)


def check_steps(time_steps: int, chunk_size: int) -> None:
    """Refuse a number of steps that is not one of whole chunks."""
    if time_steps % chunk_size:
        raise typer.BadParameter(
            f"--time {time_steps} is not a multiple of --chunk-size {chunk_size}"
        )


def known_parts(parts: list[str] | None, known: Sequence[str]) -> None:
    """Refuse a name of a part that there is not."""
    for name in parts or ():
        if name not in known:
            raise typer.BadParameter(f"--part {name}: there are {', '.join(known)}")


def check_parts(
    parts: list[str] | None, scan: bool, peers: bool, model: str | None
) -> Sequence[str]:
    """The parts to measure; refuses a name that is none, and nothing to measure."""
    known_parts(parts, PARTS)
    if not scan and (parts or peers or not model):
        raise typer.BadParameter(
            "--no-scan measures --model alone; name one, and no --part or --peers"
        )
    return (parts or PARTS) if scan else ()


def check_model(config: str, overrides: list[str]) -> None:
    """Refuse a configuration that cannot be loaded, before anything is measured."""
    try:
        load_config(config, overrides)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
