"""A look inside steps: a profiler's trace, a history of GPU memory, the peak."""

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from mamba3lite.training.config import TrainingConfig
from mamba3lite.training.parallel import local
from mamba3lite.training.trackers import reason_of

try:
    import resource
except ImportError:  # Windows
    import psutil

    resource = None


class ProfileWindow:
    """Profiles ``profile_steps`` steps from ``profile_start`` on, into the run folder.

    Writes ``profile/trace.json`` for chrome://tracing or Perfetto, ``profile/ops.txt``,
    the operators by time, and with ``memory_snapshot`` ``profile/memory.pickle`` for
    pytorch.org/memory_viz. Leaving the context ends a window that is still open.
    """

    def __init__(
        self,
        training: TrainingConfig,
        run_dir: Path,
        device: torch.device,
        log: Callable[[str], None],
    ):
        first = training.profile_start
        self.steps = range(first, first + training.profile_steps) if first else range(0)
        self.folder, self.log = run_dir / "profile", log
        self.on_gpu = device.type == "cuda"
        self.snapshot = training.memory_snapshot and self.on_gpu
        if training.memory_snapshot and not self.on_gpu:
            log(
                f"[warn] training.memory_snapshot: records the allocator of a GPU, and "
                f"this run is on the {device.type}; the run goes on without it"
            )
        self.profiler: profile | None = None

    def __enter__(self) -> "ProfileWindow":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def before(self, step: int) -> None:
        """Begin when this is the first step of the window that is taken."""
        if step not in self.steps or self.profiler is not None:
            return
        activities = [ProfilerActivity.CPU]
        activities += [ProfilerActivity.CUDA] if self.on_gpu else []
        self.profiler = _quiet_profile(activities=activities, record_shapes=True)
        self.profiler.start()
        if self.snapshot:
            torch.cuda.memory._record_memory_history()

    def after(self, step: int) -> None:
        """End when this step was the last one of the window."""
        if self.profiler is not None and step >= self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Stop, if it runs, and write what was seen; a full disk is a warning."""
        profiler, self.profiler = self.profiler, None
        if profiler is None:
            return
        self.steps = range(0)
        profiler.stop()
        try:
            self._write(profiler)
        except (OSError, RuntimeError) as error:  # the latter from the library's writer
            self.log(f"[warn] {self.folder}: {reason_of(error)}; no profile is there")
        else:
            self.log(f"profiled: {self.folder}")
        if self.snapshot:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, profiler: profile) -> None:
        self.folder.mkdir(exist_ok=True)
        for name in ("trace.json", "ops.txt", "memory.pickle"):
            (self.folder / name).unlink(
                missing_ok=True
            )  # a link is not written through
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        order = "self_cuda_time_total" if self.on_gpu else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=order, row_limit=40)
        (self.folder / "ops.txt").write_text(table, encoding="utf-8")
        if self.snapshot:
            torch.cuda.memory._dump_snapshot(str(self.folder / "memory.pickle"))


def allocator_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object]
) -> int:
    """Peak bytes of the allocator while ``step`` runs, parameters and moments included.

    On a GPU the allocator counts itself; on a CPU a profiler tells what is allocated
    and freed.
    """
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device)
    tensors = [*model.parameters()]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    before = sum(local(tensor).untyped_storage().nbytes() for tensor in tensors)
    cpu = [ProfilerActivity.CPU]
    with _quiet_profile(activities=cpu, profile_memory=True) as profiler:
        step()
    changes = [
        event.nbytes()
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return before + max(itertools.accumulate(changes), default=0)


def peak_memory(device: torch.device) -> int:
    """Peak bytes: of the GPU's allocator, or of this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        memory = psutil.Process().memory_info()
        return getattr(memory, "peak_wset", memory.rss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _quiet_profile(**options) -> profile:
    """A profiler whose library does not write its own progress to stderr."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when a profiler starts
    return profile(**options)
