"""Runs of the trainer with a stopwatch, for `mamba3lite.scaling`, which starts them.

    python -m mamba3lite.training.timed JOBS
    torchrun --nproc-per-node 2 -m mamba3lite.training.timed JOBS

JOBS is a JSON file: a list of `Job`s, done one after another by the same processes, and
sizes of exchanges to time before. The loop, the step and the checkpoints are the
trainer's own; left out is what would only take time, the reports at the end.
"""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mamba3lite.training.checkpoint import find_checkpoint, read_run_state
from mamba3lite.training.config import load_config
from mamba3lite.training.estimate import flops_per_token, parameter_floats
from mamba3lite.training.metrics import Display
from mamba3lite.training.parallel import Ranks, leave
from mamba3lite.training.profiling import peak_memory
from mamba3lite.training.run import Pretrainer
from mamba3lite.training.step import StepResult, count_parameters

RESULT = "timed.json"


@dataclass(frozen=True)
class Job:
    """One run: a configuration with a prepared folder and a run folder.

    saves: write checkpoints, but for that of step 0. reload: at the end, find and load
    the newest. stop_at: be asked to stop in this step.
    """

    config: str
    overrides: list[str]
    resume: str = "never"
    saves: bool = False
    reload: bool = False
    stop_at: int | None = None


class Timed(Pretrainer):
    """A run that notes how long its checkpoints take, and ends without reports."""

    def __init__(self, job: Job, ranks: Ranks):
        config = load_config(job.config, job.overrides)
        folder = Path(config.data.train_data_path)
        display = Display(config.total_steps, quiet=not ranks.main)
        super().__init__(config, folder, display, ranks)
        self.job = job
        self.times: dict[str, float] = {}

    def next_step(self) -> StepResult:
        """A step, in which rank 0 may be asked to stop."""
        if self.ranks.main and self.step + 1 == self.job.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next_step()

    def save(self) -> None:
        """Save, and note the seconds; not before there are moments to save."""
        if self.job.saves and self.step and self.saved_step != self.step:
            self.times["save_s"] = self.seconds(super().save)

    def finish(self) -> bool:
        """The run is at its end."""
        return True

    def reload(self) -> None:
        """Find the newest checkpoint and load it, as a run that resumes does."""
        found: list[Path] = []

        def find() -> None:
            look = self.ranks.first
            found.append(look(lambda: find_checkpoint(self.run_dir, print)))

        def load() -> None:
            self.load(found[0], self.ranks.first(lambda: read_run_state(found[0])))

        self.times["find_s"] = self.seconds(find)
        self.times["load_s"] = self.seconds(load)
        files = [*found[0].iterdir()]
        self.times["checkpoint_bytes"] = sum(f.stat().st_size for f in files)

    def seconds(self, action: Callable[[], object]) -> float:
        """How long all ranks take for an action together."""
        self.wait()
        begin = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until every rank and its device is here."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.ranks.sums()

    def facts(self) -> dict[str, Any]:
        """What the run has to say besides its metrics.jsonl."""
        matrices = sum(p.numel() for p in self.model.parameters() if p.ndim >= 2)
        return {
            "gpus": self.ranks.size,
            "dispatch": self.model.cfg.ssd_dispatch,
            "precision": "bf16" if self.bf16 else "fp32",
            "last_step": self.step,
            "parameters": count_parameters(self.model),
            "gradient_bytes": 4 * parameter_floats(self.model),
            "matrix_parameters": matrices,
            "flops_per_token": flops_per_token(self.model),
            "peak_bytes": self.ranks.gather(peak_memory(self.device)),
            **self.times,
        }


def run_job(job: Job, ranks: Ranks) -> None:
    """Do a job, and leave ``timed.json`` in its run folder."""
    # A run shards its parameters in the ranks that it is given: each has its own.
    ranks = Ranks(ranks.rank, ranks.size, ranks.local_rank, ranks.watch)
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    run = Timed(job, ranks)
    run.run(job.resume)
    facts = run.facts()
    if job.reload:
        run.reload()
        facts |= run.times
    if ranks.main:
        (run.run_dir / RESULT).write_text(json.dumps(facts), encoding="utf-8")


def time_exchanges(ranks: Ranks, megabytes: list[int]) -> list[dict[str, float]]:
    """Time all-reduces of float32 over the devices, each of some 2^20 bytes.

    Returns: for each size, the fastest of 10 in ms and its bus bandwidth in 10^9
    bytes/s: what a device sends in a ring, 2 (n - 1) / n of the size, per second.
    """
    rows = []
    for size in megabytes:
        numbers = torch.ones(size * 2**18, device=ranks.device)
        best = min(_seconds_of(numbers, ranks) for _ in range(12))
        sent = 2 * (ranks.size - 1) / ranks.size * numbers.nbytes
        rows.append({"mb": size, "ms": best * 1e3, "bus_gb_s": sent / best / 1e9})
    return rows


def _seconds_of(numbers: torch.Tensor, ranks: Ranks) -> float:
    ranks.sums()
    begin = time.perf_counter()
    dist.all_reduce(numbers)
    if numbers.is_cuda:
        torch.cuda.synchronize(numbers.device)
    return time.perf_counter() - begin


def main(file: Path) -> None:
    """Do everything that a file asks for; what goes wrong is raised."""
    asked = json.loads(file.read_text(encoding="utf-8"))
    jobs = [Job(**job) for job in asked["jobs"]]
    first = load_config(jobs[0].config, jobs[0].overrides)
    ranks = Ranks.join(first.training, "timed")
    if asked["exchanges_mb"] and ranks.size > 1:
        rows = time_exchanges(ranks, asked["exchanges_mb"])
        if ranks.main:
            text = json.dumps(rows)
            file.with_suffix(".exchanges").write_text(text, encoding="utf-8")
    for job in jobs:
        run_job(job, ranks)
        # A model in its wrapper is a cycle, which would stay on the device.
        gc.collect()
        torch.cuda.empty_cache()
    ranks.close()
    leave(0, ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
