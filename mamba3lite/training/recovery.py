"""What keeps a run safe: a lock, an orderly stop, bad steps, where to resume."""

import fcntl
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mamba3lite.training.checkpoint import (
    CheckpointError,
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


class RunLock:
    """Holds ``run.lock`` in the run folder; the kernel frees it when the process dies.

    Raises: RunError on entry when another trainer holds it.
    """

    def __init__(self, run_dir: Path):
        self.path = run_dir / "run.lock"

    def __enter__(self) -> "RunLock":
        self.file = self.path.open("a")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise RunError(
                f"{self.path.parent}: another trainer is working in this folder; wait "
                "for it, or set training.save_dir to another one"
            ) from None
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()


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
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise no_run_folder(run_dir, f"{nearest} cannot be written")
        lock = RunLock(run_dir)
        if lock.path.exists():
            with lock:
                pass
    except OSError as error:
        raise no_run_folder(run_dir, error.strerror) from None


def no_run_folder(run_dir: Path, reason: str) -> RunError:
    """The refusal of a run folder, with what is wanted."""
    return RunError(
        f"training.save_dir: {run_dir}: {reason}; wanted a folder that can be made and "
        "written"
    )


class StopSignals:
    """Turns the first SIGTERM or SIGINT into a request; the second ends the process.

    ``requested`` is polled between steps, evaluation batches and sampled tokens.
    """

    def __init__(self):
        self.received: signal.Signals | None = None

    @property
    def requested(self) -> bool:
        """True once a signal has arrived."""
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        signals = (signal.SIGTERM, signal.SIGINT)
        self.previous = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        # Not print: the signal may have come in the middle of one.
        note = f"{self.received.name}: finishing this step, then saving; again: quit\n"
        os.write(2, note.encode())


class BadStepGuard:
    """Counts steps without a finite loss and gradient norm, and gives up in time.

    Args: limit: bad steps in a row that end the run. consecutive: where a resumed run
    left off.
    """

    def __init__(self, limit: int, consecutive: int = 0):
        self.limit = limit
        self.consecutive = consecutive

    def good(self) -> None:
        """A step was applied."""
        self.consecutive = 0

    def bad(self, step: int, reason: str) -> None:
        """A step was skipped.

        Raises: TrainingFailed at the limit, with what was seen and what to try.
        """
        self.consecutive += 1
        if self.consecutive >= self.limit:
            raise TrainingFailed(
                f"step {step}: {reason}, {self.consecutive} times in a row on "
                "different batches; parameters are those of the last good step. Try a "
                "lower training.lr or a longer training.warmup_steps"
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
    verify_checkpoint(chosen)
    if existing and chosen.resolve().parent != root.resolve():
        raise RunError(
            f"--resume {resume}: {run_dir} has checkpoints of its own; a free name is "
            f"--set training.save_dir={free_name(run_dir)}"
        )
    return chosen


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
