"""Processes to kill, starve and interrupt: forked, so that torch is imported once."""

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from trainer_cases import new_run, run_config, tensors_of, write_corpus

from mamba3lite.data.prepare import prepare
from mamba3lite.training.checkpoint import (
    list_checkpoints,
    step_of,
    verify_checkpoint,
)
from mamba3lite.training.metrics import read_metrics
from mamba3lite.training.pretrain import Pretrainer, run_training

# A forked process cannot use CUDA; these promises are kept on the CPU.
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="forks without CUDA")


class Ended(NamedTuple):
    """How a process ended: exit code, or minus the signal; what it wrote."""

    code: int
    out: str
    err: str


class Child:
    """An action in a forked process; its return value is the exit code."""

    def __init__(self, action: Callable[[], int]):
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            self._work(action)

    def _work(self, action: Callable[[], int]) -> None:
        code = 99
        try:
            for number, file in enumerate(self.files, 1):
                os.dup2(file.fileno(), number)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", 1) for n in (1, 2))
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            code = action()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(AttributeError, OSError):  # none, or one that nobody reads
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def kill(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if not self.ended():
            os.kill(self.pid, number)

    def ended(self) -> bool:
        """True when there is nothing left to wait for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def wait(self, timeout: float = 60) -> Ended:
        """Wait for the end; a process that hangs is killed and fails the test."""
        deadline = time.monotonic() + timeout
        while not self.ended():
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.002)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        assert time.monotonic() <= deadline, f"hung: {texts}"
        return Ended(code, *texts)


def in_child(action: Callable[[], int]) -> Ended:
    """Run an action in a forked process to its end."""
    return Child(action).wait()


def command(config: Path, *overrides: str, **options) -> Callable[[], int]:
    """`mamba3lite train` as an action, with short samples."""

    def action() -> int:
        Pretrainer.sample_tokens = Pretrainer.final_sample_tokens = 4
        return run_training(str(config), overrides, **options)

    return action


def wait_for_step(run_dir: Path, step: int, child: Child) -> None:
    """Wait until metrics.jsonl has a step."""
    metrics, mark = run_dir / "metrics.jsonl", f'{{"step": {step}, "tokens"'
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not child.ended():
        if metrics.exists() and mark in metrics.read_text():
            return
        time.sleep(0.002)
    pytest.fail(f"never reached step {step}: {child.wait()}")


def one_line(ended: Ended, code: int) -> str:
    """The one line on stderr of a command that ended with this code."""
    assert ended.code == code, ended
    assert ended.err.count("\n") == 1 and ended.err.endswith("\n"), ended.err
    assert ended.err.startswith("mamba3lite train: "), ended.err
    return ended.err[len("mamba3lite train: ") : -1]


# --------------------------------------------------------------------------------------
# What is left


def losses(run_dir: Path) -> dict[int, float]:
    """The logged loss of each step, which must be there once."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    pairs = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    assert len(pairs) == len(dict(pairs)), "a step appears twice"
    return dict(pairs)


def problems(run_dir: Path) -> list[dict]:
    """The lines of steps that were not applied, and of rollbacks."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return [row for row in rows if "problem" in row]


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints, each of which must verify."""
    found = list_checkpoints(run_dir / "checkpoints")
    for path in found:
        verify_checkpoint(path)
    return [step_of(path) for path in found]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder, byte for byte."""
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def saved_bytes(run_dir: Path) -> dict[Path, bytes]:
    """Every file of every checkpoint that has its final name."""
    root = run_dir / "checkpoints"
    return {p: data for p, data in contents(root).items() if ".tmp-" not in str(p)}


# --------------------------------------------------------------------------------------
# Runs


def packed_corpus(base: Path) -> Path:
    """A prepared folder of documents shorter than a window of 32 tokens."""
    source = write_corpus(base / "short", documents=500, words=4)
    tokens = base / "packed"
    prepare(source, "byte", tokens, val_fraction=0.2, progress=lambda *_: None)
    return tokens


def copy_of(run_dir: Path, to: Path) -> Path:
    """A copy of a run folder, to be damaged."""
    return Path(shutil.copytree(run_dir, to))


def finished(prepared: Path, run_dir: Path, kind=Pretrainer, **training) -> Pretrainer:
    """A run that is taken to its end, in this process."""
    run = new_run(run_config(prepared, run_dir, **training), kind)
    assert run.run() is True
    return run


def results(run: Pretrainer) -> dict[str, torch.Tensor]:
    """Weights and moments of a run, copied."""
    return {name: tensor.clone() for name, tensor in tensors_of(run).items()}
