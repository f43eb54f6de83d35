"""What keeps a run safe: a lock, an orderly stop, bad steps, where to resume."""

import math
import os
import shutil
import signal
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from mamba3lite.locks import Locked, locked
from mamba3lite.terminal import note
from mamba3lite.training.checkpoint import (
    CheckpointError,
    checkpoints_of,
    is_step,
    list_checkpoints,
    newest_checkpoint,
    set_aside,
    step_name,
    step_of,
    verify_checkpoint,
)


class RunError(RuntimeError):
    """A run that cannot start or go on, for a reason one line can give."""


class TrainingFailed(RunError):
    """A run that was going and cannot go on; what it saved is intact."""


class RankFailed(TrainingFailed):
    """A failure that one of several processes has for itself, so it says so itself."""


@contextmanager
def run_lock(run_dir: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold ``run.lock`` in the run folder; the kernel frees it when the process dies.

    Args: log: gets one line where there are no locks.
    Raises: RunError on entry when another trainer holds it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(run_dir / "run.lock", log))
        except Locked:
            raise RunError(
                f"{run_dir}: another trainer is working in this folder; wait for it, "
                "or set training.save_dir to another one"
            ) from None
        yield


def require_run_folder(run_dir: Path) -> None:
    """Refuse a run folder that cannot be made, written or locked; writes nothing.

    Raises: RunError naming training.save_dir, or the trainer that works there.
    """
    try:
        nearest = run_dir
        while not os.path.lexists(nearest):
            nearest = nearest.parent
        if not nearest.is_dir():
            raise no_run_folder(run_dir, f"{nearest} is not a folder")
        if (run_dir / "index.json").exists():
            raise no_run_folder(run_dir, "prepared data lie there")
        root = run_dir / "checkpoints"
        if os.path.lexists(root) and not root.is_dir():
            raise no_run_folder(run_dir, "checkpoints is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise no_run_folder(run_dir, f"{nearest} cannot be written")
        if (run_dir / "run.lock").exists():
            with run_lock(run_dir, lambda line: None):  # who claims the folder says it
                pass
    except OSError as error:
        name = Path(error.filename or run_dir).name
        reason = error.strerror if name == run_dir.name else f"{name}: {error.strerror}"
        raise no_run_folder(run_dir, reason) from None


def no_run_folder(run_dir: Path, reason: str) -> RunError:
    """The refusal of a run folder, with what is wanted."""
    return RunError(
        f"training.save_dir: {run_dir}: {reason}; wanted a folder that can be made and "
        "written"
    )


HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


class StopSignals:
    """Turns the first SIGTERM or SIGINT into a request; the second ends the process.

    SIGHUP asks as well, once or many times: a terminal that closes sends several. Where
    it is ignored, as under nohup, it stays so. ``requested`` is polled between steps,
    evaluation batches and sampled tokens.

    Args: quiet: write no note; another process does.
    """

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.received: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """True once a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        signals = [signal.SIGTERM, signal.SIGINT]
        if HANGUP is not None and signal.getsignal(HANGUP) != signal.SIG_IGN:
            signals.append(HANGUP)
        self.previous = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == HANGUP and self.requested:
            return
        if self.received not in (None, HANGUP):
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if not self.quiet:
            again = "" if number == HANGUP else "; again: quit"
            note(f"{self.received.name}: finishing this step, then saving{again}")


class BadStepGuard:
    """Counts bad steps in a row and rollbacks: when to go back, when to give up.

    Args: limit: bad steps in a row that call for a rollback. max_rollbacks: how many a
    run may have.
    """

    def __init__(self, limit: int, max_rollbacks: int):
        self.limit, self.max_rollbacks = limit, max_rollbacks
        self.consecutive = self.rollbacks = 0

    def good(self) -> None:
        """A step was applied."""
        self.consecutive = 0

    def bad(self) -> bool:
        """A step was skipped; returns True when it is time to roll back."""
        self.consecutive += 1
        return self.consecutive >= self.limit

    def roll_back(self, step: int, problem: str) -> None:
        """Count a rollback.

        Raises: TrainingFailed when the run has had all that it may have.
        """
        if self.rollbacks >= self.max_rollbacks:
            raise TrainingFailed(
                f"step {step}: {problem}, {self.consecutive} times in a row on "
                f"different batches, after {self.rollbacks} of "
                f"training.max_rollbacks={self.max_rollbacks}; the checkpoints are as "
                "they were. Try a lower training.lr, a longer training.warmup_steps, "
                "or --resume STEP with an older checkpoint"
            )
        self.rollbacks += 1
        self.consecutive = 0


class LossHistory:
    """The losses of the latest applied steps, to which a spike is compared.

    Args: zscore: standard deviations above their mean that make a spike; None judges
    nothing. window: how many losses; before there are so many, nothing is a spike.
    Attributes: losses: oldest first, finite, at most ``window``; a checkpoint keeps
    them, so a resumed run judges alike.
    """

    def __init__(self, zscore: float | None, window: int):
        self.zscore, self.window = zscore, window
        self.losses: list[float] = []

    def add(self, loss: float) -> None:
        """Remember the loss of an applied step; without a zscore nothing is kept."""
        if self.zscore is not None and math.isfinite(loss):
            self.losses = [*self.losses, loss][-self.window :]

    def spike(self, loss: float) -> str | None:
        """Why a step with this loss must not be applied, or None."""
        if self.zscore is None or len(self.losses) < self.window:
            return None
        mean, deviation = statistics.fmean(self.losses), statistics.stdev(self.losses)
        if loss - mean <= self.zscore * deviation:
            return None
        return (
            f"loss is {loss:.4f}, a spike: the {self.window} steps before had a mean "
            f"of {mean:.4f} and a standard deviation of {deviation:.4f}"
        )


def choose_checkpoint(
    run_dir: Path, resume: str, log: Callable[[str], None]
) -> Path | None:
    """Apply ``--resume`` to a run folder.

    Args: resume: ``auto``, ``never``, ``must``, a step, or the path of a checkpoint.
    Returns: a verified checkpoint to continue from, or None to start at step 0.
    Raises: RunError or CheckpointError, one line with what to do.
    """
    root = run_dir / "checkpoints"
    existing = list_checkpoints(root)
    if resume == "never":
        if existing:
            raise RunError(
                f"--resume never: {run_dir} holds {len(existing)} checkpoints; a free "
                f"name is --set training.save_dir={free_name(run_dir)}"
            )
        return None
    if resume in ("auto", "must"):
        newest = newest_checkpoint(root, log)
        if newest is None and resume == "must":
            raise RunError(f"--resume must: {root} holds no checkpoint")
        return newest
    chosen = root / step_name(int(resume)) if is_step(resume) else Path(resume)
    if not chosen.is_dir():
        have = ", ".join(str(step_of(path)) for path in existing) or "none"
        raise CheckpointError(
            f"--resume {resume}: {chosen} is no checkpoint (auto, never, must, a step "
            f"or a path; steps in {run_dir}: {have})"
        )
    if inside := checkpoints_of(chosen):
        raise CheckpointError(
            f"--resume {resume}: {chosen} holds {len(inside)} checkpoints; name one, "
            f"such as {inside[-1]}"
        )
    verify_checkpoint(chosen)
    if existing and chosen.resolve().parent != root.resolve():
        raise RunError(
            f"--resume {resume}: {run_dir} has checkpoints of its own; a free name is "
            f"--set training.save_dir={free_name(run_dir)}"
        )
    return chosen


def rows_in_step(stored: dict[str, Any]) -> int:
    """Rows of a step under the configuration that a checkpoint holds."""
    training = stored["training"]
    return training["micro_batch_size"] * training["gradient_accumulation_steps"]


def windows_behind(state: dict[str, Any]) -> int:
    """Windows that a run has passed by, trained on or skipped, when it was saved.

    Args: state: of a checkpoint; format 1 counts batches alone, all of one size.
    """
    if "windows" in state:
        return state["windows"]
    return (state["step"] + state["skipped"]) * rows_in_step(state["config"])


def set_newer_aside(root: Path, chosen: Path, log: Callable[[str], None]) -> None:
    """Rename the checkpoints after the chosen one, which training will write anew."""
    for path in list_checkpoints(root):
        if step_of(path) > step_of(chosen):
            log(f"[warn] {path.name} is set aside as {set_aside(path).name}")


def free_name(run_dir: Path) -> Path:
    """The first of NAME-2, NAME-3, ... that does not exist."""
    number = 2
    while (path := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return path


def require_memory(wanted: int, there: int | None) -> None:
    """Refuse a run that would swap for hours, or be killed without a word.

    What is derived is no more than an estimate, and some machines get memory as they
    use it: only what would need twice the memory there is refused.

    Args: wanted: bytes at the peak of a step. there: bytes of the device, if known.
    """
    if there is not None and wanted > 2 * there:
        raise RunError(
            f"a step needs {wanted / 1e9:,.0f} GB of memory (derived from shapes), and "
            f"there are {there / 1e9:,.0f} GB here; `mamba3lite info` shows what takes "
            "it; lower the sizes of the model or training.micro_batch_size"
        )


def require_space(folder: Path, wanted: int) -> None:
    """Refuse to start a run whose checkpoints cannot fit.

    Args: folder: an existing folder on the disk in question. wanted: bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise RunError(
            f"{folder}: {free / 1e9:.1f} GB free, the checkpoints of this run need "
            f"{wanted / 1e9:.1f} GB; lower training.keep_last or choose another "
            "training.save_dir"
        )
