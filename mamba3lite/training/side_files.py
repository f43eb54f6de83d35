"""What a run leaves beside its checkpoints: metrics, samples, curves, its settings.

These files decide nothing, so they never stop a run: what cannot be read is set aside
under another name, and what cannot be written costs one warning.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from mamba3lite.files import leftovers, write_whole
from mamba3lite.training.metrics import (
    finite_or_none,
    parse_metrics,
    plot_runs,
    text_of,
)
from mamba3lite.training.trackers import reason_of

Log = Callable[[str], None]
SAMPLE = re.compile(r"^===== step (\d{8,18}), seed 0", re.MULTILINE)


class SideFile:
    """A file of UTF-8 text in a run folder that grows at its end and is cut there.

    Args: log: gets one line for what is set aside, and one when writing begins to fail.
    """

    def __init__(self, path: Path, log: Log):
        self.path, self.log = path, log
        self.failing = False

    def repaired(self, text: str) -> tuple[str, str | None]:
        """What of a text can be used, and what is wrong with the rest or None."""
        return text, None

    def read(self) -> str:
        """What of the file can be used; nothing when it cannot be read."""
        with suppress(OSError):
            return self.repaired(text_of(self.path))[0]
        return ""

    def mend(self) -> None:
        """Set a damaged file aside; what of it can be used goes on in a new one."""
        if not os.path.lexists(self.path):
            return
        sound = ""
        try:
            text = text_of(self.path)
            sound, fault = self.repaired(text)
            if fault is None and text.encode() != self.path.read_bytes():
                fault = "not UTF-8"
        except OSError as error:
            fault = error.strerror or str(error)
        if fault and set_aside(self.path, "damaged", fault, self.log) and sound:
            self.replace(sound)

    def replace(self, text: str) -> None:
        """Write the file anew; it stays as it was when the disk refuses."""
        self._attempt(lambda: write_whole(self.path, text))

    def extend(self, text: str) -> None:
        """Append a text, whole or not at all."""
        self._attempt(lambda: _append(self.path, text.encode()))

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self.failing:
                self.log(
                    f"[warn] {self.path}: {error.strerror or error}; the run goes on, "
                    "and what it reports there is lost until it can be written again"
                )
            self.failing = True
        else:
            self.failing = False


class MetricsLog(SideFile):
    """metrics.jsonl: one JSON object a line."""

    def repaired(self, text: str) -> tuple[str, str | None]:
        """The lines that can be used; a torn last one is no damage."""
        rows, fault = parse_metrics(text)
        return (_lines_of(rows), fault) if fault else (text, None)

    def rows(self) -> list[dict[str, Any]]:
        """The lines that can be used."""
        return parse_metrics(self.read())[0]

    def append(self, row: dict[str, Any]) -> None:
        """Write one line; a float that is not finite becomes null, as JSON has none."""
        finite = {key: finite_or_none(value) for key, value in row.items()}
        self.extend(_lines_of([finite]))

    def keep_until(self, step: int, skipped: int = 0) -> None:
        """Drop what will come again: a torn last line, and what is later than a step.

        Of the steps not applied right after it, the first ``skipped`` batches passed by
        in all are earlier.
        """
        if self.path.exists():
            here = (step, skipped)
            rows = [row for row in self.rows() if (row["step"], _skipped(row)) <= here]
            self.replace(_lines_of(rows))


class SampleLog(SideFile):
    """samples.txt: for each sample a header with its step, and the text."""

    def append(self, step: int, text: str) -> None:
        """Write the sample of a step."""
        self.extend(f"{sample_header(step)}{text}\n")

    def sample(self, step: int) -> str | None:
        """The last sample, if it is that of a step, with its line end; else None."""
        _, header, text = self.read().rpartition(sample_header(step))
        return text if header else None

    def keep_until(self, step: int) -> None:
        """Drop the samples after a step."""
        if self.path.exists():
            text = self.read()
            later = (h.start() for h in SAMPLE.finditer(text) if int(h[1]) > step)
            self.replace(text[: next(later, len(text))])


def sample_header(step: int) -> str:
    """The line that opens a sample in samples.txt."""
    return f"===== step {step:08d}, seed 0, from the empty prompt =====\n"


def write_settings(path: Path, text: str, known: Collection[str], log: Log) -> None:
    """Write config.yaml; one that no run wrote is set aside first.

    Args: known: what the run may have written there before.
    """
    ours = False
    with suppress(OSError):
        ours = not os.path.lexists(path) or text_of(path) in {text, *known}
    if ours or set_aside(path, "earlier", "not what this run wrote", log):
        SideFile(path, log).replace(text)


def draw_curves(run_dir: Path, log: Log) -> None:
    """Refresh curves.png; a picture that cannot be drawn is a warning."""
    try:
        plot_runs([run_dir], run_dir / "curves.png")
    except Exception as error:  # whatever the drawing library makes of a run
        log(f"[warn] curves.png was not refreshed: {reason_of(error)}")


def set_record_aside(run_dir: Path, log: Log) -> None:
    """Rename what an earlier run reported here: one from step 0 would replace it."""
    for name in ("metrics.jsonl", "samples.txt", "curves.png"):
        if (run_dir / name).is_file():
            set_aside(run_dir / name, "earlier", "of an earlier run", log)


def set_aside(path: Path, kind: str, reason: str, log: Log) -> Path | None:
    """Rename a file to KIND-1-NAME, or the next free number, and say why.

    Returns: the new name; None, after a warning, when the system refuses.
    """
    number = 1
    while os.path.lexists(aside := path.with_name(f"{kind}-{number}-{path.name}")):
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        log(f"[warn] {path}: {reason}, and stays so ({error.strerror or error})")
        return None
    log(f"[warn] {path.name}: {reason}; it is set aside as {aside.name}")
    return aside


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a process that was killed while it wrote left in a run folder."""
    for path in leftovers(run_dir):
        with suppress(OSError):
            path.unlink()


def _lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)


def _skipped(row: dict[str, Any]) -> int:
    """Batches passed by so far, in a line that counts them."""
    count = row.get("skipped", 0)
    return count if isinstance(count, int) else 0


def _append(path: Path, data: bytes) -> None:
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        with suppress(OSError):  # a torn line would be damage in the middle
            os.truncate(path, size)
        raise
