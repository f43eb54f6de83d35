"""TensorBoard and Weights & Biases beside metrics.jsonl, each of them optional.

Neither decides anything: a package that is not installed, a service that cannot be
reached or a disk that is full costs one warning and that one tracker, never the run.
"""

import math
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mamba3lite.files import write_whole
from mamba3lite.training.config import RunConfig


class Tracker(Protocol):
    """Where the lines of metrics.jsonl go too."""

    def append(self, row: dict[str, Any]) -> None:
        """Take one line."""

    def close(self) -> None:
        """Flush and let go."""


class TensorBoard:
    """Event files in ``tensorboard/`` of the run folder.

    Args: step: where training starts; what lies beyond it is purged, because it will
    be written again.
    """

    def __init__(self, config: RunConfig, run_dir: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # optional

        folder = str(run_dir / "tensorboard")
        self.writer = SummaryWriter(folder, purge_step=step + 1)

    def append(self, row: dict[str, Any]) -> None:
        """Write the numbers of one line."""
        for key, value in numbers_of(row).items():
            self.writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """Flush to the disk."""
        self.writer.close()


class WeightsAndBiases:
    """A run at Weights & Biases; its id lies in the run folder, so a resume goes on."""

    def __init__(self, config: RunConfig, run_dir: Path, step: int):
        import wandb  # optional

        self.run = wandb.init(
            project=config.training.wandb_project,
            name=run_dir.name,
            id=_id_in(run_dir / "wandb_id.txt"),
            resume="allow",
            dir=str(run_dir),
            config=config.model_dump(mode="json"),
        )
        # Its own counter only rises; after a rollback ours does not.
        self.run.define_metric("*", step_metric="step")

    def append(self, row: dict[str, Any]) -> None:
        """Send the numbers of one line."""
        self.run.log({"step": row["step"]} | numbers_of(row))

    def close(self) -> None:
        """Upload what is left."""
        self.run.finish()


def _id_in(path: Path) -> str:
    """The id that a file holds; a new one where it holds none."""
    data = path.read_bytes() if path.is_file() else b""
    if re.fullmatch(rb"[0-9a-z]{8}", data):
        return data.decode("ascii")
    new = secrets.token_hex(4)
    write_whole(path, new)
    return new


def numbers_of(row: dict[str, Any]) -> dict[str, float]:
    """What can be drawn of a line: its finite numbers, without the step."""
    return {
        key: value
        for key, value in row.items()
        if key != "step"
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    }


def reason_of(error: Exception) -> str:
    """The first line of what an error says, or its name; of the system, its words."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


KINDS = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


class Trackers:
    """The trackers that a configuration asks for, those that work.

    Args: step: where training starts. log: gets one line for each that does not work.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, step: int, log: Callable[[str], None]
    ):
        self.log = log
        self.working: dict[str, Tracker] = {}
        for name, kind in KINDS.items():
            if getattr(config.training, name):
                self._open(name, kind, config, run_dir, step)

    def _open(self, name: str, kind: type, config, run_dir, step) -> None:
        try:
            self.working[name] = kind(config, run_dir, step)
        except ImportError:
            missing = f"the package {name} is not installed (pip install {name})"
            self._warn(name, missing)
        except Exception as error:  # theirs to raise, and never worth a run
            self._warn(name, reason_of(error))

    def append(self, row: dict[str, Any]) -> None:
        """Hand a line of metrics.jsonl to each."""
        self._each(lambda tracker: tracker.append(row))

    def close(self) -> None:
        """Let all of them go."""
        self._each(lambda tracker: tracker.close())
        self.working = {}

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.working.items()):
            try:
                action(tracker)
            except Exception as error:  # as above
                self._warn(name, reason_of(error))
                del self.working[name]

    def _warn(self, name: str, reason: str) -> None:
        self.log(
            f"[warn] training.{name}: {reason}; the run goes on without it, "
            "metrics.jsonl has everything"
        )
