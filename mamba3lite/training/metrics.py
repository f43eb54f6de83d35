"""How a run is shown: lines of metrics, curves, bits per byte, the progress line."""

import errno
import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mamba3lite.files import replacing
from mamba3lite.terminal import console_on, printable, show

# Okabe and Ito's palette, distinguishable with every common color vision.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


# Of a text that a run leaves: a thousand times what a long run writes.
MOST_BYTES = 2**28


class MetricsError(ValueError):
    """Metrics that cannot be read or drawn: one line."""


# --------------------------------------------------------------------------------------
# The lines of metrics.jsonl


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut short by a crash is left out.

    Each row has a step; what is drawn from it is a finite number or None.
    Raises: MetricsError naming the line for any other damage; OSError as `text_of`.
    """
    rows, fault = parse_metrics(text_of(path))
    if fault:
        raise MetricsError(
            f"{path}: {fault}; repair the line or move the file away (the checkpoints "
            "are intact and do not need it)"
        )
    return rows


def text_of(path: Path) -> str:
    """A text that a run left; what is not UTF-8 becomes U+FFFD.

    Raises: OSError for what cannot be read, for what is no file, which reading might
    wait for, and for more than `MOST_BYTES`.
    """
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a file", str(path))
    if path.stat().st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"larger than {MOST_BYTES:,} bytes", str(path))
    return path.read_bytes().decode("utf-8", "replace")


def parse_metrics(text: str) -> tuple[list[dict[str, Any]], str | None]:
    """The rows of the lines that can be used, and what is wrong with the first other.

    A last line that is cut short is no fault.
    """
    lines = text.removesuffix("\n").split("\n") if text else []
    rows, first_fault = [], None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            fault = "is not JSON"
        else:
            fault = _row_fault(row)
        if fault is None:
            rows.append(row)
        elif first_fault is None:
            first_fault = f"line {number} {fault}"
    return rows, first_fault


def _row_fault(row: Any) -> str | None:
    """What is wrong with a line that is JSON, or None."""
    if not isinstance(row, dict):
        return "is not a JSON object"
    step = row.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**63:
        return "has no step" if "step" not in row else "has a step that is no count"
    whole = ("val_bpb", "zlib_bpb") if row.get("val_windows") == "all" else ()
    if missing := [key for key in whole if key not in row]:
        return f"evaluates the whole split without {missing[0]}"
    for key in (*(key for key, _ in PANELS), "zlib_bpb", "time"):
        if not _drawable(row.get(key)):
            return f"has a {key} that is neither a finite number nor null"
    return None


def _drawable(value: Any) -> bool:
    """True for None and for numbers that a plot can show."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and abs(value) < 1e300)


def finite_or_none(value: Any) -> Any:
    """The value itself; None for a float that is infinite or not a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --------------------------------------------------------------------------------------
# Figures of merit


def bits_per_byte(loss_sum: float, n_bytes: float) -> float:
    """Summed cross-entropy in nats over text of ``n_bytes`` bytes, as bits a byte."""
    return loss_sum / math.log(2) / n_bytes


# --------------------------------------------------------------------------------------
# curves.png

PANELS = (
    ("loss", "training loss (nats per token)"),
    ("val_bpb", "validation (bits per byte)"),
    ("lr", "learning rate"),
    ("grad_norm", "gradient norm before clipping"),
    ("tokens_per_s", "speed (tokens per second)"),
)


def plot_runs(run_dirs: Sequence[Path], out: Path) -> None:
    """Draw the curves of one or several runs, overlaid, into a PNG.

    Raises: MetricsError for a folder without metrics or a place that cannot hold the
    PNG; OSError, and nothing left behind, when the disk refuses it.
    """
    if out.is_dir():
        raise MetricsError(f"{out}: is a folder; give the name of a PNG file")
    if not out.parent.is_dir():
        missing = f"there is no folder {out.parent}"
        if out.parent in run_dirs:
            raise MetricsError(f"{out.parent}: {missing}; name that of a run")
        raise MetricsError(f"{out}: {missing}; make it first")
    figure = _draw_runs({str(run_dir): _rows_of(run_dir) for run_dir in run_dirs})
    with warnings.catch_warnings(), replacing(out) as file:
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name's letters
        figure.savefig(file, format="png", dpi=110)


def _rows_of(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise MetricsError(f"{run_dir}: no metrics.jsonl here")
    if not (rows := read_metrics(path)):
        raise MetricsError(f"{path}: empty")
    return rows


def _draw_runs(runs: dict[str, list[dict]]) -> Figure:
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flat
    for axis, (key, label) in zip(axes, PANELS, strict=False):
        _draw_panel(axis, key, label, runs)
    last = axes[len(PANELS)]
    last.set_axis_off()
    curves = axes[0].get_lines()
    numbers = [str(number) for number in range(len(curves))]
    legend = last.legend(curves, numbers, loc="center", title="run", frameon=False)
    # Names are text: neither mathematics between dollars, nor hidden by an underscore.
    for text, name in zip(legend.get_texts(), runs, strict=True):
        text.set_parse_math(False)
        name = printable(name)
        text.set_text(name if len(name) <= 60 else f"...{name[-57:]}")
    return figure


def _draw_panel(axis, key: str, label: str, runs: dict[str, list[dict]]) -> None:
    for number, rows in enumerate(runs.values()):
        color = COLORS[number % len(COLORS)]
        # The whole validation split is another measure than the windows of the curve.
        whole = [r for r in rows if r.get("val_windows") == "all"]
        points = [
            (r["step"], r[key])
            for r in rows
            if r.get(key) is not None and r not in whole
        ]
        steps, values = zip(*points, strict=True) if points else ((), ())
        marker = "o" if len(points) < 40 else None
        axis.plot(steps, values, color=color, marker=marker, markersize=3)
        if key == "val_bpb":
            _draw_whole_split(axis, whole, color)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(label)
    if key == "grad_norm":
        axis.set_yscale("log")
    elif key in ("lr", "tokens_per_s"):
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _draw_whole_split(axis, rows: list[dict], color: str) -> None:
    """The final evaluation and the compressor that saw the same text."""
    for row in rows:
        if row["val_bpb"] is None or row["zlib_bpb"] is None:
            continue
        axis.plot(row["step"], row["val_bpb"], "*", color=color, markersize=10)
        axis.axhline(row["zlib_bpb"], color=color, linestyle="--", linewidth=1)
        axis.set_title("line: eval_windows; star: the whole split; dashes: zlib -9")


# --------------------------------------------------------------------------------------
# The progress line


class Display:
    """A progress bar on a terminal; plain lines, one per log interval, elsewhere.

    Args: quiet: show nothing; another process does.
    """

    def __init__(
        self, total_steps: int, console: Console | None = None, quiet: bool = False
    ):
        self.console = console or console_on(sys.stdout)
        self.console.quiet = self.console.quiet or quiet
        self.total_steps = total_steps
        self.bar = Progress(
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal or self.console.quiet,
        )
        self.task = self.bar.add_task("", total=total_steps, text="")

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def expect(self, total_steps: int) -> None:
        """Count up to another number of steps."""
        self.total_steps = total_steps
        self.bar.update(self.task, total=total_steps)

    def line(self, text: str) -> None:
        """Print text that stays, above the bar if there is one."""
        if self.console.is_terminal:
            as_it_is = {"highlight": False, "markup": False, "emoji": False}
            self.console.print(printable(text), soft_wrap=True, **as_it_is)
        elif not self.console.quiet:
            show(text)

    def step(self, row: dict[str, Any], eta_s: float) -> None:
        """Show one logged step."""
        text = (
            f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  "
            f"grad norm {row['grad_norm']:.2f}  {row['tokens_per_s']:,.0f} tokens/s  "
        )
        text += f"mfu {row['mfu']:.1%}  " if row["mfu"] is not None else ""
        text += f"ETA {clock(eta_s)}"
        if self.console.is_terminal:
            self.bar.update(self.task, completed=row["step"], text=text)
        else:
            self.line(f"step {row['step']:>6}/{self.total_steps}  {text}")


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
