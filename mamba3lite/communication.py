"""How long gradients travel between 8, 64 and 512 GPUs, against a measured step.

    python -m mamba3lite.communication docs/benchmarks/NAME.json

The step of one GPU and the bytes of its gradients come from a file that
`mamba3lite.scaling` wrote. Everything else is derived from them and from the
assumptions below, with rates of links as their vendor states them: nothing here was run
on so many GPUs.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from mamba3lite.terminal import one_line, show_what_streams_can


class Link(NamedTuple):
    """What the GPUs of a host send through: name, 10^9 bytes/s of all its rings."""

    name: str
    gb_s: float


# 900 GB/s of NVLink a GPU are 450 in each direction (NVIDIA H200 data sheet).
NVLINK = Link("NVLink, 450 GB/s a GPU", 450)
# NCCL runs a ring through each network card, and all cards of a host at once: eight of
# 400 Gb/s are 8 x 50 GB/s (NVIDIA DGX H200 data sheet). The other is a plain cluster.
NETWORKS = (
    Link("8 x 400 Gb/s a host", 400),
    Link("1 x 100 Gb/s a host", 12.5),
)
GPUS_OF_A_HOST = 8
SIZES = (8, 64, 512)
# A backward pass multiplies twice as much as its forward pass: two thirds of a step.
BACKWARD = 2 / 3


class Row(NamedTuple):
    """One line of the table; times in ms, shares of 1.

    sent_gb: 10^9 bytes that a GPU sends in a step. ratio: exchange over compute.
    one_by_one, overlapped: weak-scaling efficiency when nothing runs beside the
    exchange, and when all does that can.
    """

    gpus: int
    parallel: str
    link: str
    sent_gb: float
    exchange_ms: float
    ratio: float
    one_by_one: float
    overlapped: float


def links_of(gpus: int) -> tuple[Link, ...]:
    """What a ring of so many GPUs has as its slowest link."""
    return (NVLINK,) if gpus <= GPUS_OF_A_HOST else NETWORKS


def sent_bytes(parallel: str, gpus: int, model: dict) -> tuple[float, float]:
    """Bytes that a GPU sends in a step: beside the forward, beside the backward pass.

    ``ddp``: one all-reduce of the gradient, of which a ring sends 2 (n - 1) / n.
    ``fsdp2``: matrices are gathered in bfloat16 for either pass and their gradients
    scattered in float32, (n - 1) / n of each; the rest is reduced as in ``ddp``.

    Args: model: ``gradient_bytes`` of all parameters, ``matrix_parameters`` sharded.
    Source: Patarasuk and Yuan 2009 (rings); Rajbhandari et al., arXiv 1910.02054,
    section 7 (shards).
    """
    part = (gpus - 1) / gpus
    if parallel == "ddp":
        return 0.0, 2 * part * model["gradient_bytes"]
    gathered = part * 2 * model["matrix_parameters"]
    scattered = part * 4 * model["matrix_parameters"]
    whole = 2 * part * (model["gradient_bytes"] - 4 * model["matrix_parameters"])
    return gathered, gathered + scattered + whole


def row_of(parallel: str, gpus: int, link: Link, step_ms: float, model: dict) -> Row:
    """The line of one number of GPUs and one link, for a step of that long alone."""
    sent = sent_bytes(parallel, gpus, model)
    forward, backward = (n / link.gb_s / 1e6 for n in sent)
    hidden = (1 - BACKWARD) * step_ms, BACKWARD * step_ms
    late = max(0.0, forward - hidden[0]) + max(0.0, backward - hidden[1])
    exchange = forward + backward
    return Row(
        gpus,
        parallel,
        link.name,
        sum(sent) / 1e9,
        exchange,
        exchange / step_ms,
        step_ms / (step_ms + exchange),
        step_ms / (step_ms + late),
    )


def table_of(report: dict) -> list[Row]:
    """The lines for a file of measurements; none when one GPU was not measured."""
    alone = next((row for row in report["rows"] if row["gpus"] == 1), None)
    if alone is None:
        return []
    return [
        row_of(parallel, gpus, link, alone["step_ms"], report["model"])
        for gpus in SIZES
        for parallel in ("ddp", "fsdp2")
        for link in links_of(gpus)
    ]


def main(file: Path) -> None:
    """Print the table of a file.

    Raises: OSError, ValueError, KeyError: a file that does not hold it.
    """
    rows = table_of(json.loads(file.read_text(encoding="utf-8")))
    if not rows:
        raise ValueError("one GPU was not measured")
    print(
        "GPUs kind  link                    sent GB   ms  ratio one by one overlapped"
    )
    for row in rows:
        print(
            f"{row.gpus:4} {row.parallel:5} {row.link:23} {row.sent_gb:7.3f} "
            f"{row.exchange_ms:6.1f} {row.ratio:5.1%} {row.one_by_one:8.1%} "
            f"{row.overlapped:8.1%}"
        )


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m mamba3lite.communication FILE.json")
    show_what_streams_can()
    try:
        main(Path(sys.argv[1]))
    except OSError as error:
        sys.exit(one_line(f"{error.filename or 'output'}: {error.strerror}"))
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        what = "is not what `python -m mamba3lite.scaling` writes"
        sys.exit(one_line(f"{sys.argv[1]}: {what}"))
