"""The training loop: `train_step` is the step, `Pretrainer` is a run.

A step is an optimizer step everywhere. The batch of a step, its learning rate and
everything else that decides the result are functions of the step number and of what
the checkpoint holds, so a run that was interrupted ends with the same bits as one that
was not (on a CPU, at the same number of threads).
"""

if __name__ == "__main__":  # a slip of the keyboard is answered before torch loads
    from mamba3lite.threads import spin_briefly
    from mamba3lite.training.arguments import refuse_mistakes

    refuse_mistakes()
    spin_briefly()

import math
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import mamba3lite
from mamba3lite.data import DataError
from mamba3lite.data.corpora import (
    DEFAULT_SOURCE,
    is_named,
    source_name,
    source_parts,
    zlib_bits_per_byte,
)
from mamba3lite.data.prepare import prepare_beside, prepared_in
from mamba3lite.data.shards import load_index
from mamba3lite.generate import LogitsError, stream
from mamba3lite.models.mamba_block import _unavailable
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3lite.seeds import seeded
from mamba3lite.terminal import (
    lasting_streams,
    one_line,
    show,
    show_what_streams_can,
    to_stderr,
)
from mamba3lite.threads import how_threads_wait
from mamba3lite.training.arguments import (
    checked_run,
    read_arguments,
    require_prepared,
)
from mamba3lite.training.checkpoint import (
    CheckpointError,
    find_checkpoint,
    list_checkpoints,
    read_run_state,
    remove_temporary,
    restore_rng,
    rng_state,
    rotate,
    write_checkpoint,
)
from mamba3lite.training.config import (
    ConfigError,
    DataConfig,
    RunConfig,
    TrainingConfig,
    dump_config,
)
from mamba3lite.training.data import IGNORED_TARGET, PretrainDataset
from mamba3lite.training.estimate import (
    checkpoint_bytes,
    checkpoints_at_once,
    flops_per_token,
    memory_lines,
    memory_of,
    memory_of_step,
    peak_flops,
    setting_of,
)
from mamba3lite.training.metrics import Display, bits_per_byte, clock, finite_or_none
from mamba3lite.training.optim import (
    build_optimizer,
    next_learning_rate,
    project_decay_rates,
    set_learning_rate,
    steps_in_all,
)
from mamba3lite.training.parallel import (
    ALONE,
    Ranks,
    is_main_process,
    leave,
    lost_how,
    lost_rank,
    rows_of_rank,
    world_size,
)
from mamba3lite.training.profiling import ProfileWindow, allocator_peak, peak_memory
from mamba3lite.training.recovery import (
    BadStepGuard,
    LossHistory,
    RankFailed,
    RunError,
    StopSignals,
    TrainingFailed,
    choose_checkpoint,
    no_run_folder,
    require_memory,
    require_run_folder,
    require_space,
    rows_in_step,
    run_lock,
    set_newer_aside,
    windows_behind,
)
from mamba3lite.training.side_files import (
    MetricsLog,
    SampleLog,
    draw_curves,
    remove_leftovers,
    set_record_aside,
    write_settings,
)
from mamba3lite.training.trackers import Trackers, reason_of

__all__ = [
    "PretrainDataset",
    "Pretrainer",
    "StepResult",
    "TrainingConfig",
    "count_parameters",
    "evaluate",
    "main",
    "run_training",
    "train_step",
]

Batch = tuple[Tensor, Tensor, Tensor]


# --------------------------------------------------------------------------------------
# One step


class StepResult(NamedTuple):
    """Mean loss in nats per valid target, norm before clipping, why it was skipped."""

    loss: float
    grad_norm: float
    problem: str | None


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    grad_clip: float = 1.0,
    bf16: bool = False,
    nan_guard: bool = True,
    spike: Callable[[float], str | None] = lambda loss: None,
    ranks: Ranks = ALONE,
) -> StepResult:
    """One optimizer step over the micro-batches of a global batch.

    The loss is normalized by the valid targets of the whole global batch, so cutting
    it into micro-batches changes nothing. With ``nan_guard``, a loss or gradient norm
    that is not finite leaves parameters and optimizer as they were.

    Args: batches: (tokens, targets, doc_ids), each (rows, T) integers; targets are
    already shifted, -100 is ignored. bf16: run the forward pass under autocast. spike:
    why a step with this loss must not be applied either, or None. ranks: who has the
    other micro-batches of the global batch.
    """
    valid = sum(int((targets != IGNORED_TARGET).sum()) for _, targets, _ in batches)
    n_valid = int(ranks.sums(valid)[0])
    loss = torch.zeros((), device=batches[0][0].device)
    for number, (tokens, targets, doc_ids) in enumerate(batches, 1):
        with ranks.accumulating(model, last=number == len(batches)):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
                loss_sum, _ = model(
                    tokens, targets=targets, doc_ids=doc_ids, reduction="sum"
                )
            mean = loss_sum / max(1, n_valid)
            # Gradients are averaged over the ranks, and their sum is wanted.
            (mean * ranks.size).backward()
        loss += mean.detach()
    norm = ranks.clip(model, grad_clip)
    result = StepResult(*ranks.control(loss, norm), None)
    problem = find_problem(result, n_valid, nan_guard) or spike(result.loss)
    if problem is None:
        optimizer.step()
        project_decay_rates(model)
    optimizer.zero_grad(set_to_none=True)
    return result._replace(problem=problem)


def find_problem(
    result: StepResult, n_valid: int, nan_guard: bool = True
) -> str | None:
    """Why a step must not be applied, or None."""
    if n_valid == 0:
        return "no valid target in the batch"
    if not nan_guard:
        return None
    if not math.isfinite(result.loss):
        return f"loss is {result.loss}"
    if not math.isfinite(result.grad_norm):
        return f"gradient norm is {result.grad_norm}"
    return None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: PretrainDataset,
    *,
    batch_rows: int,
    windows: Sequence[int] | None = None,
    bf16: bool = False,
    stop: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    ranks: Ranks = ALONE,
) -> tuple[float, int] | None:
    """Summed loss in nats and number of targets over a validation split.

    Every window starts from a zero state, and the state resets at documents.

    Args: windows: some of the windows; all of them when None. progress: called after
    each batch as progress(windows done, windows in all). ranks: who shares the windows.
    Returns: (loss_sum, n_targets), or None when ``stop`` asked to give up.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    loss_sum, n_targets, done = 0.0, 0, 0
    total = data.n_eval_windows if windows is None else len(windows)
    try:
        for batch in data.eval_batches(batch_rows, windows, ranks.rank, ranks.size):
            if stop():
                return None
            tokens, targets, doc_ids = (part.to(device) for part in batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                part, n = model(
                    tokens, targets=targets, doc_ids=doc_ids, reduction="sum"
                )
            loss_sum += float(part)
            n_targets += int(n)
            done += len(tokens) * ranks.size
            progress(min(done, total), total)
    finally:
        model.train(training)
    loss_sum, n_targets = ranks.sums(loss_sum, n_targets)
    return loss_sum, int(n_targets)


def count_parameters(model: nn.Module) -> int:
    """Number of parameters: tied tensors once, a complex number counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _enforce_triton_env_var(
    model_config: dict[str, Any], log: Callable[[str], None]
) -> None:
    """Take the PyTorch path unless ENABLE_TRITON_KERNELS is exactly "1".

    Args: model_config: the trainer's own copy, edited in place. log: gets one line
    when the dispatch is changed.
    Raises: ConfigError for a launch variable of the kernel that is no allowed integer.
    """
    dispatch = model_config.get("ssd_dispatch", "pytorch")
    if dispatch == "pytorch":
        return
    if os.environ.get("ENABLE_TRITON_KERNELS") == "1":
        if dispatch == "triton":
            from mamba3lite.models.ssd_triton import _launch_options  # imports triton

            try:
                _launch_options("ieee")
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return
    log(
        f"[warn] ssd_dispatch={dispatch!r} requires ENABLE_TRITON_KERNELS=1; forcing "
        "ssd_dispatch='pytorch' for this run."
    )
    model_config["ssd_dispatch"] = "pytorch"


def take_usable_dispatch(
    model_config: dict[str, Any], device: torch.device, log: Callable[[str], None]
) -> None:
    """Take the PyTorch path, with one line for all layers, when a kernel cannot run.

    Args: model_config: the trainer's own copy, edited in place.
    """
    cfg = ModelConfig.of(model_config)
    shapes = (cfg.head_dim, cfg.state_dim, cfg.chunk_size)
    reason = _unavailable(cfg.ssd_dispatch, shapes, torch.float32, device)
    if reason is not None:
        log(
            f"[warn] ssd_dispatch={cfg.ssd_dispatch!r} cannot run here ({reason}); "
            "this run uses ssd_dispatch='pytorch'"
        )
        model_config["ssd_dispatch"] = "pytorch"


# --------------------------------------------------------------------------------------
# A run


class Pretrainer:
    """One run: build, resume, tidy, loop, finish.

    Args: config: checked, with ``training.save_dir`` filled in. data_folder: made by
    ``prepare``. display: where the lines go. ranks: the processes of the run.
    Raises: DataError, RunError or ConfigError when data and model do not fit.
    """

    sample_tokens = 200
    final_sample_tokens = 400
    seconds_between_lines = 5.0

    def __init__(
        self,
        config: RunConfig,
        data_folder: Path,
        display: Display,
        ranks: Ranks | None = None,
    ):
        self.config, self.display = config, display
        self.ranks = ranks or Ranks()
        self.rows = rows_of_rank(config, self.ranks.rank, self.ranks.size)
        self.data_folder = data_folder
        self.run_dir = Path(config.training.save_dir)
        self.metrics = MetricsLog(self.run_dir / "metrics.jsonl", display.line)
        self.samples = SampleLog(self.run_dir / "samples.txt", display.line)
        self.device = self.ranks.device
        precision = config.training.precision
        on_gpu = self.device.type == "cuda"
        self.bf16 = precision == "bf16" or (precision == "auto" and on_gpu)
        self.ranks.together(self._open_data)
        self._refuse_different_data()
        self._build_model()
        self.step = self.skipped = self.tokens = self.shift = 0
        self.saved_step: int | None = None
        self.warned: set[str] = set()
        self.validation: dict[str, Any] | None = None
        self.sampled = 0
        self.final: dict[str, Any] | None = None
        self.former_settings: list[str] = []  # as config.yaml has them
        training = config.training
        limit = training.nan_guard_max_consecutive
        self.guard = BadStepGuard(limit, training.max_rollbacks)
        self.losses = LossHistory(training.spike_zscore, training.spike_window)
        self.stop = StopSignals(quiet=not self.ranks.main)
        self.ranks.asked = lambda: self.stop.requested
        self.started, self.earlier_s = time.perf_counter(), 0.0
        self.meter_tokens, self.meter_s = 0, 0.0
        self.shown = time.monotonic()

    def _open_data(self) -> None:
        model, training = self.config.model, self.config.training
        folder, length, seed = self.data_folder, model.max_seq_len, training.seed
        self.train_data = PretrainDataset(folder, length, seed, "train")
        self.val_data = PretrainDataset(folder, length, seed, "val")
        vocab = self.train_data.vocab_size
        if model.vocab_size != vocab:
            raise ConfigError(
                f"model.vocab_size: got {model.vocab_size}, should be {vocab}, the "
                f"vocabulary of {folder}"
            )

    def _refuse_different_data(self) -> None:
        """DataError when the hosts of the ranks hold different data."""
        prints = self.ranks.gather(self.train_data.fingerprint)
        for rank, found in enumerate(prints):
            if found != prints[0]:
                raise DataError(
                    f"rank {rank}: {self.data_folder} is {found[:12]}, and rank 0 has "
                    f"{prints[0][:12]} there; copy one folder to every host"
                )

    def _build_model(self) -> None:
        training = self.config.training
        if self.device.type == "cuda":
            precision = "high" if training.tf32 else "highest"
            torch.set_float32_matmul_precision(precision)
        fields = self.config.model_fields_of_run()
        _enforce_triton_env_var(fields, self.display.line)
        take_usable_dispatch(fields, self.device, self.display.line)
        if self.ranks.size == 1:
            setting = setting_of(self.config, self.device.type == "cuda")
            peak = memory_of_step(ModelConfig.of(fields), setting).peak
            require_memory(peak, memory_of(self.device))
        torch.manual_seed(training.seed)
        seeded(training.seed, torch.default_generator)
        self.model = Mamba3Transformer(fields)
        # Checkpoints, evaluation and samples use the raw model.
        self.step_model = self.ranks.spread(self.model, training, self.bf16)
        self.optimizer = build_optimizer(self.model, training)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return steps_in_all(self.config, self.step, self.tokens)

    @property
    def windows(self) -> int:
        """Windows passed by, trained on or skipped: where the next batch begins."""
        return self.shift + (self.step + self.skipped) * self.config.global_rows

    @property
    def elapsed_s(self) -> float:
        """Seconds spent in this run, those before a resume included."""
        return self.earlier_s + time.perf_counter() - self.started

    def run(self, resume: str = "auto") -> bool:
        """Train to the end, or until a signal asks to stop.

        Args: resume: ``auto``, ``never``, ``must``, a step, or a checkpoint's path.
        Returns: True when the run is finished, False when it was stopped and saved.
        """
        first, line = self.ranks.first, self.display.line
        with ExitStack() as stack:
            first(lambda: self.claim(stack))
            stack.enter_context(self.stop)
            stack.enter_context(self.display)
            checkpoint = first(lambda: choose_checkpoint(self.run_dir, resume, line))
            if checkpoint is not None:
                self.restore(checkpoint)
            first(self.mend)
            if first(self.is_finished):
                line(f"{self.run_dir}: this run is already finished")
                return True
            first(lambda: self.tidy(checkpoint))
            # A rollback has to have somewhere to go, and a disk that refuses says so
            # before an hour of training and not after.
            self.save()
            with self.watched():
                self.loop()
                return self.step >= self.total_steps and self.finish()

    def claim(self, stack: ExitStack) -> None:
        """Make the run folder and lock it, until the stack is left."""
        require_run_folder(self.run_dir)
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise no_run_folder(self.run_dir, error.strerror) from None
        stack.enter_context(run_lock(self.run_dir, self.display.line))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The profiler and the trackers, open while the run trains; those of rank 0."""
        if not self.ranks.main:
            yield
            return
        training, log = self.config.training, self.display.line
        self.open_trackers()
        with ProfileWindow(training, self.run_dir, self.device, log) as self.profile:
            try:
                yield
            finally:
                self.trackers.close()

    def open_trackers(self) -> None:
        """TensorBoard and W&B, if asked for, from this step on."""
        self.trackers = Trackers(
            self.config, self.run_dir, self.step, self.display.line
        )

    def loop(self) -> None:
        """Step after step until the budget is used or a signal came; then save."""
        training = self.config.training
        main = self.ranks.main
        self.report_due()  # what a stop at this step left out
        while self.step < self.total_steps and not self.ranks.stopping:
            if main:
                self.profile.before(self.step + 1)
            result = self.next_step()
            if result.problem is not None:
                self.skip(result)
                continue
            if main:
                self.profile.after(self.step)
            last = self.step == self.total_steps
            if last or self.step % training.log_interval == 0:
                self.log_step(result)
            self.report_due()
            if self.step % training.save_interval == 0:
                self.save()
        if self.ranks.stopping and not self.stop.requested:
            self.display.line("Another rank was asked to stop.")
        self.save()

    def next_step(self) -> StepResult:
        """Read the next global batch and take one step on it."""
        begin = time.perf_counter()
        training = self.config.training
        lr = next_learning_rate(self.config, self.step, self.tokens)
        set_learning_rate(self.optimizer, lr)
        result = train_step(
            self.step_model,
            self.optimizer,
            self.batches(self.step + self.skipped),
            grad_clip=training.grad_clip,
            bf16=self.bf16,
            nan_guard=training.nan_guard,
            spike=self.losses.spike,
            ranks=self.ranks,
        )
        if result.problem is None:
            self.losses.add(result.loss)
            self.step += 1
            self.tokens += self.config.tokens_per_step
            self.guard.good()
        self.meter_tokens += self.config.tokens_per_step
        self.meter_s += time.perf_counter() - begin
        return result

    def batches(self, position: int) -> list[Batch]:
        """This rank's micro-batches of the global batch at a position."""
        rows, micro = self.config.global_rows, self.config.training.micro_batch_size
        batches = []
        for start in range(0, len(self.rows), micro):
            part = self.rows[start : start + micro]
            batch = self.train_data.batch(position, part, rows, self.shift)[:3]
            batches.append(tuple(x.to(self.device, non_blocking=True) for x in batch))
        return batches

    # ----------------------------------------------------------------------------------
    # Start and resume

    def restore(self, checkpoint: Path) -> None:
        """Load everything that decides the rest of the run."""
        state = self.ranks.first(lambda: read_run_state(checkpoint))
        self._refuse_other_data(checkpoint, state)
        self._refuse_other_shapes(checkpoint, state)
        self._refuse_other_windows(checkpoint, state)
        self._refuse_spent_budget(checkpoint, state)
        for change in config_changes(state["config"], self.config):
            self.display.line(f"changed since the checkpoint: {change}")
        if state["world_size"] == self.ranks.size:
            self.take_threads(state["threads"])
        self.load(checkpoint, state)
        self.former_settings = [dump_config(state["config"])]
        self.shift += windows_behind(state) - self.windows
        if self.total_steps != self.config.total_steps:
            self.display.line(
                f"training.total_tokens: {self.tokens:,} are behind; to go are "
                f"{self.total_steps - self.step:,} steps of "
                f"{self.config.tokens_per_step:,}"
            )
        self.earlier_s = state["elapsed_s"]
        self.started = time.perf_counter()
        ours = (self.run_dir / "checkpoints").resolve()  # may lie on another disk
        inside = checkpoint.resolve().is_relative_to(ours)
        self.saved_step = self.step if inside else None
        self.display.line(f"Continuing from {checkpoint}")

    def take_threads(self, threads: int) -> None:
        """Compute with as many threads as before: another number rounds otherwise."""
        here = torch.get_num_threads()
        if threads != here:
            torch.set_num_threads(threads)
            self.display.line(
                f"threads: {threads}, as the checkpoint was made, for the same bits; "
                f"without it they were {here} (OMP_NUM_THREADS, or the processors)"
            )

    def load(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """Take over weights, moments, random state and counters of a checkpoint."""
        self.ranks.load(checkpoint, self.model, self.optimizer)
        restore_rng(state["rng"])
        self.step, self.skipped = state["step"], state["skipped"]
        self.tokens = state["tokens"]
        self.guard.consecutive = state["consecutive_bad"]
        # Checkpoints from before there were rollbacks lack these three.
        self.guard.rollbacks = state.get("rollbacks", 0)
        self.losses.losses = state.get("losses", [])
        self.validation = state.get("validation")
        # Checkpoints of format 1 do not say: their runs wrote it again if need be.
        self.sampled = state.get("sampled", self.step)
        self.display.expect(self.total_steps)

    def _refuse_other_data(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """CheckpointError, with what differs, unless the data are those trained on."""
        former, now = state["data"]["fingerprint"], self.train_data.fingerprint
        if former == now:
            return
        changes = config_changes(state["config"], self.config)
        settings = [change for change in changes if change.startswith("data.")]
        why = ", ".join(settings) or "no setting changed, but the text did"
        raise CheckpointError(
            f"{checkpoint}: trained on data {former[:12]} "
            f"({state['data']['folder']}), but {self.data_folder} is {now[:12]} "
            f"({why}); give the run its own data again, or start a new "
            "training.save_dir"
        )

    def _refuse_other_shapes(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """CheckpointError, with what differs, when the weights would not fit."""
        changes = config_changes(state["config"], self.config)
        shapes = [c for c in changes if c.partition(":")[0] in SHAPE_SETTINGS]
        if shapes:
            raise CheckpointError(
                f"{checkpoint}: holds a model of another shape ({', '.join(shapes)}); "
                "set it back, or start a new training.save_dir"
            )

    def _refuse_other_windows(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """CheckpointError when what the run has read would be cut or ordered anew."""
        changes = config_changes(state["config"], self.config)
        cuts = [c for c in changes if c.partition(":")[0] in WINDOW_SETTINGS]
        if cuts and (behind := windows_behind(state)):
            raise CheckpointError(
                f"{checkpoint}: has read {behind:,} windows of another length or order "
                f"({', '.join(cuts)}), so text would be read twice or never; set it "
                "back, or start a new training.save_dir"
            )

    def _refuse_spent_budget(self, checkpoint: Path, state: dict[str, Any]) -> None:
        """RunError when the budget was used before the last step of a checkpoint."""
        stored, budget = state["config"], self.config.training.total_tokens
        in_step = rows_in_step(stored) * stored["model"]["max_seq_len"]
        what, behind, asked = "step", state["step"], self.config.total_steps
        spent = behind > asked
        if budget is not None:
            what, behind, asked = "token", state["tokens"], budget
            spent = behind - in_step >= budget
        if spent:
            raise RunError(
                f"{checkpoint}: already at {what} {behind:,}, but the run asked for "
                f"has {asked:,}; raise training.total_{what}s, or start a new "
                "training.save_dir"
            )

    def mend(self) -> None:
        """Make the side files readable, and remove what a killed writer left."""
        remove_leftovers(self.run_dir)
        self.metrics.mend()
        self.samples.mend()

    def tidy(self, checkpoint: Path | None) -> None:
        """Bring the run folder to the step that training starts from."""
        root = self.run_dir / "checkpoints"
        root.mkdir(exist_ok=True)
        remove_temporary(root, self.warn_once)
        if checkpoint is None:
            set_record_aside(self.run_dir, self.display.line)
        elif checkpoint.resolve().parent == root.resolve():
            set_newer_aside(root, checkpoint, self.display.line)
        self.forget_later_reports()
        self.require_space()
        text, path = dump_config(self.config), self.run_dir / "config.yaml"
        write_settings(path, text, self.former_settings, self.display.line)

    def forget_later_reports(self) -> None:
        """Cut what lies beyond this step: it will come again, and once is enough."""
        self.metrics.keep_until(self.step, self.skipped)
        # So does the sample of this step that is still due, and that of the end.
        to_come = self.sample_is_due() or self.step >= self.total_steps
        self.samples.keep_until(self.step - to_come)

    def require_space(self) -> None:
        """RunError when the checkpoints to come do not fit on the disk."""
        root = self.run_dir / "checkpoints"
        wanted = checkpoints_at_once(self.config) * checkpoint_bytes(self.model)
        have = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
        nearest = next(p for p in (root, *root.parents) if p.exists())
        require_space(nearest, wanted - have)

    def save(self) -> None:
        """Write and verify a checkpoint of this step, then delete old ones.

        Raises: TrainingFailed when the disk refuses, or what it took does not read
        back.
        """
        if self.saved_step == self.step:
            return
        weights, moments = self.ranks.collect(self.model, self.optimizer)
        self.ranks.first(lambda: self.write(weights, moments))
        self.saved_step = self.step

    def write(self, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """What of a save rank 0 does alone; raises as ``save`` does."""
        root, training = self.run_dir / "checkpoints", self.config.training
        try:
            path = write_checkpoint(root, weights, moments, self.state())
        except (CheckpointError, OSError) as error:
            on_disk = isinstance(error, OSError)
            reason = f"{root}: {error.strerror}" if on_disk else str(error)
            raise TrainingFailed(
                f"step {self.step:,} was not saved: {reason}; the older checkpoints "
                "are as they were, and the same command continues from them"
            ) from None
        rotate(root, training.keep_last, training.keep_every, self.warn_once)
        self.display.line(f"saved {path}")

    def warn_once(self, line: str) -> None:
        """Show a line that every save may repeat."""
        if line not in self.warned:
            self.warned.add(line)
            self.display.line(line)

    def state(self) -> dict[str, Any]:
        """What state.json holds."""
        return {
            "step": self.step,
            "skipped": self.skipped,
            "windows": self.windows,
            "tokens": self.tokens,
            "consecutive_bad": self.guard.consecutive,
            "rollbacks": self.guard.rollbacks,
            "losses": self.losses.losses,
            "validation": self.validation,
            "sampled": self.sampled,
            "elapsed_s": self.elapsed_s,
            "rng": rng_state(),
            "config": self.config.model_dump(mode="json"),
            "data": {
                "folder": str(self.data_folder),
                "fingerprint": self.train_data.fingerprint,
                "tokenizer": self.train_data.tokenizer.name,
                "tokenizer_fingerprint": self.train_data.tokenizer.fingerprint,
            },
            "versions": {
                "mamba3lite": mamba3lite.__version__,
                "torch": torch.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            "threads": torch.get_num_threads(),
            "world_size": self.ranks.size,
        }

    # ----------------------------------------------------------------------------------
    # Reports

    def report_due(self) -> None:
        """Evaluate and sample where the step asks for it and has not had it."""
        if self.evaluation_is_due():
            self.log_evaluation()
        if self.sample_is_due() and self.write_sample(self.sample_tokens) is not None:
            self.sampled = self.step

    def evaluation_is_due(self) -> bool:
        """Whether an evaluation of this step, not the last one, is missing."""
        done = self.validation is not None and self.validation["step"] == self.step
        return not done and self._is_multiple(self.config.training.eval_interval)

    def sample_is_due(self) -> bool:
        """Whether a sample of this step, not the last one, is missing."""
        done = self.sampled == self.step
        return not done and self._is_multiple(self.config.training.sample_interval)

    def _is_multiple(self, interval: int) -> bool:
        return 0 < self.step < self.total_steps and self.step % interval == 0

    def record(self, row: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, and hand it to the trackers; rank 0 does."""
        if self.ranks.main:
            self.metrics.append(row)
            self.trackers.append(row)

    def skip(self, result: StepResult) -> None:
        """Record a bad step, move past its batch, and roll back after too many."""
        self.skipped += 1
        number = self.step + 1
        row = {"step": self.step, "skipped": self.skipped, "problem": result.problem}
        self.record(row)
        self.display.line(f"[warn] step {number} not applied: {result.problem}")
        if self.guard.bad():
            self.roll_back(result.problem)

    def roll_back(self, problem: str) -> None:
        """Return to the newest intact checkpoint, and go on past every batch read.

        The batches between the checkpoint and the bad ones are passed by as well: on
        the way to them the weights may have gone wrong already.

        Raises: TrainingFailed after ``max_rollbacks``, or when none is intact.
        Source: Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1.
        """
        position = self.step + self.skipped
        self.guard.roll_back(self.step + 1, problem)
        count = self.guard.rollbacks
        root = self.run_dir / "checkpoints"
        line, first = self.display.line, self.ranks.first
        try:
            checkpoint = first(lambda: find_checkpoint(root, line))
        except CheckpointError as error:
            raise TrainingFailed(f"{problem}, and no way back: {error}") from None
        self.load(checkpoint, first(lambda: read_run_state(checkpoint)))
        self.guard.consecutive, self.guard.rollbacks = 0, count
        self.skipped = position - self.step
        self.saved_step = self.step
        first(lambda: self.go_back(root, checkpoint))
        row = {"step": self.step, "skipped": self.skipped, "rollback": count}
        self.record(row | {"problem": problem})
        self.display.line(
            f"[warn] rollback {count} of {self.guard.max_rollbacks}: back to step "
            f"{self.step} ({checkpoint.name}), on past batch {position}"
        )

    def go_back(self, root: Path, checkpoint: Path) -> None:
        """What of a rollback rank 0 does alone: files, and the trackers."""
        set_newer_aside(root, checkpoint, self.display.line)
        self.forget_later_reports()
        self.trackers.close()
        self.open_trackers()

    def log_step(self, result: StepResult) -> None:
        """Write a training line, and show it."""
        speed = self.meter_tokens / self.meter_s
        peak = (peak_flops(self.device) or 0) * self.ranks.size
        left = (self.total_steps - self.step) * self.config.tokens_per_step
        row = {
            "step": self.step,
            "tokens": self.tokens,
            "loss": result.loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": result.grad_norm,
            "tokens_per_s": speed,
            "mfu": speed * flops_per_token(self.model) / peak if peak else None,
            "time": self.elapsed_s,
        }
        self.record(row)
        self.display.step(row, left / speed)
        self.meter_tokens, self.meter_s = 0, 0.0

    def log_evaluation(self) -> None:
        """Evaluate on the fixed subset: windows spread evenly over the split."""
        n = self.val_data.n_eval_windows
        count = min(self.config.training.eval_windows, n)
        windows = [i * n // count for i in range(count)]
        row = self.evaluation(windows)
        if row is not None:
            bpb = finite_or_none(row["val_bpb"])
            self.validation = {"step": self.step, "val_bpb": bpb}
            self.record(row | {"val_windows": f"{count} evenly spaced"})
            self.display.line(
                f"step {self.step}: validation {row['val_bpb']:.4f} bits per byte on "
                f"{count} of {n} windows"
            )
            if self.ranks.main:
                draw_curves(self.run_dir, self.display.line)

    def evaluation(self, windows: Sequence[int] | None) -> dict[str, Any] | None:
        """Loss and bits per byte of some or all windows; None when asked to stop.

        Bits per byte count every target, EOS included, against the bytes of text; of a
        subset, against its share of them.
        """
        with self.ranks.raw():
            totals = evaluate(
                self.model,
                self.val_data,
                batch_rows=self.config.training.micro_batch_size,
                windows=windows,
                bf16=self.bf16,
                stop=self.ranks.poll,
                progress=self.show_evaluated if windows is None else lambda *_: None,
                ranks=self.ranks,
            )
        if totals is None:
            return None
        loss_sum, n_targets = totals
        share = n_targets / (self.val_data.n_tokens - 1)
        bpb = bits_per_byte(loss_sum, share * self.val_data.n_bytes)
        loss = loss_sum / n_targets
        return {"step": self.step, "val_loss": loss, "val_bpb": bpb}

    def show_evaluated(self, done: int, total: int) -> None:
        """How far the final evaluation is: in the bar, or a line every few seconds."""
        text = f"evaluated {done:,} of {total:,} windows"
        if self.display.console.is_terminal:
            self.display.bar.update(
                self.display.task, completed=self.step, text=text, refresh=True
            )
        elif time.monotonic() - self.shown > self.seconds_between_lines:
            self.shown = time.monotonic()
            self.display.line(text)

    def sample(self, n_tokens: int) -> str | None:
        """Text from the empty prompt with seed 0; None when asked to stop."""
        with self.ranks.as_rank_0_says(self.model, self.bf16):
            tokens = stream(
                self.model,
                [],
                eos_id=self.train_data.eos_id,
                max_new_tokens=n_tokens,
                stop=self.ranks.poll,
            )
            try:
                text = self.train_data.tokenizer.decode(list(tokens))
            except LogitsError as error:
                self.display.line(f"[warn] no sample of step {self.step:,}: {error}")
                text = f"({error})"
        return None if self.ranks.stopping else text

    def write_sample(self, n_tokens: int) -> str | None:
        """Append a sample to samples.txt; None when asked to stop."""
        text = self.sample(n_tokens)
        if text is not None and self.ranks.main:
            self.samples.append(self.step, text)
        return text

    # ----------------------------------------------------------------------------------
    # The end

    def is_finished(self) -> bool:
        """True when the budget is used and the final evaluation is on record."""
        if self.step < self.total_steps:
            return False
        for row in self.metrics.rows():
            if row["step"] == self.step and row.get("val_windows") == "all":
                self.final = row
        return self.final is not None

    def finish(self) -> bool:
        """Final evaluation, curves and sample; False when asked to stop before."""
        self.display.line("Evaluating on the whole validation split ...")
        self.shown = time.monotonic()
        row = self.evaluation(None)
        if row is None:
            return False
        text = self.write_sample(self.final_sample_tokens)
        if text is None:
            return False
        if self.ranks.main:
            zlib_bpb = zlib_bits_per_byte(self.val_data.text_bytes())
            row |= {"zlib_bpb": zlib_bpb, "time": self.elapsed_s, "val_windows": "all"}
            self.record(row)
            self.final = row
            draw_curves(self.run_dir, self.display.line)
        return True


# What the shapes of the weights depend on.
SHAPE_SETTINGS = tuple(
    f"model.{name}"
    for name in (
        *("vocab_size", "d_model", "n_layers", "n_heads", "head_dim", "state_dim"),
        *("ffn_dim", "weight_tying"),
    )
)

# What a window is, and when it is read.
WINDOW_SETTINGS = ("model.max_seq_len", "training.seed")


def config_changes(stored: dict[str, Any], config: RunConfig) -> list[str]:
    """Settings that differ from a checkpoint's, as 'training.lr: 0.001 -> 0.002'."""
    changes = []
    for section, values in config.model_dump(mode="json").items():
        before = stored.get(section, {})
        changes += [
            one_line(f"{section}.{key}: {before.get(key)} -> {value}")
            for key, value in values.items()
            if before.get(key) != value
        ]
    return changes


# --------------------------------------------------------------------------------------
# The two doors: `mamba3lite train` and `python -m mamba3lite.training.pretrain`


@lasting_streams()
def run_training(
    config_name: str,
    overrides: Sequence[str] = (),
    *,
    resume: str = "auto",
    dry_run: bool = False,
    program: str = "mamba3lite train",
) -> int:
    """Train as the command line asks; mistakes become one line on stderr.

    Returns: the exit code: 0 finished or stopped and saved, 130 the same by Ctrl-C, 1
    failed while training, 2 could not start.
    """
    show_what_streams_can()  # a sample may hold any character
    ranks, alone = ALONE, True
    try:
        alone = is_main_process()
        config = checked_run(config_name, overrides, resume)
        rows_of_rank(config, 0, world_size())
        ranks = Ranks.join(config.training, program)
        display = Display(config.total_steps, quiet=not ranks.main)
        with explained_failures(config, display.line, ranks):
            code = (rehearse if dry_run else train)(config, resume, display, ranks)
            ranks.close()
        return leave(code, ranks)
    except RankFailed as error:
        code, reason, alone = 1, str(error), True
    except TrainingFailed as error:
        code, reason = 1, str(error)
    except (
        ConfigError,
        DataError,
        CheckpointError,
        RunError,
    ) as error:
        code, reason = 2, str(error)
    except KeyboardInterrupt:
        code, reason = 130, "interrupted before training began"
    except OSError as error:
        where = error.filename or f"the disk of {config.training.save_dir}"
        code, reason = 1, f"{where}: {error.strerror or error}"
    # What all ranks know, rank 0 says.
    if alone:
        to_stderr(f"{program}: {reason}")
    return leave(code, ranks)


WHEN_MEMORY_IS_SHORT = (
    "lower training.micro_batch_size (and raise training.gradient_accumulation_steps "
    "as much), set training.grad_checkpoint=true, or shorten model.max_seq_len in a "
    "new training.save_dir; the checkpoints are as they were"
)


@contextmanager
def explained_failures(
    config: RunConfig, log: Callable[[str], None], ranks: Ranks
) -> Iterator[None]:
    """Turn what a device, a compiler or another rank does into one line.

    Running out of memory prints the memory table before it.
    Raises: TrainingFailed; of several ranks, RankFailed with its number.
    """

    def failed(reason: str) -> TrainingFailed:
        if ranks.size == 1:
            return TrainingFailed(reason)
        return RankFailed(f"rank {ranks.rank}: {reason}")

    try:
        yield
    except RunError:
        raise
    except (MemoryError, RuntimeError) as error:
        if out_of_memory(error):
            setting = setting_of(config, torch.cuda.is_available())
            model = ModelConfig.of(config.model_fields_of_run())
            log("\n".join(memory_lines(model, setting)))
            raise failed(
                f"out of memory: {reason_of(error)}; {WHEN_MEMORY_IS_SHORT}"
            ) from None
        if config.training.compile and from_compiler(error):
            raise failed(
                f"training.compile: torch.compile failed: {reason_of(error)}; set "
                "training.compile=false to train without it (the checkpoints are as "
                "they were)"
            ) from None
        if ranks.size > 1 and lost_rank(error):
            raise failed(
                f"another rank died or left ({lost_how(error)}); the checkpoints are "
                "as they were, and the same command continues from them"
            ) from None
        raise


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no class of its own.
    return "can't allocate memory" in str(error)


def from_compiler(error: Exception) -> bool:
    """Whether an error comes out of torch.compile."""
    exceptions = sys.modules.get("torch._dynamo.exc")  # loaded by the first compilation
    return exceptions is not None and isinstance(error, exceptions.TorchDynamoException)


def train(config: RunConfig, resume: str, display: Display, ranks: Ranks) -> int:
    """Prepare the data, run to the end or to a signal, say where the results are.

    Returns: the exit code; after Ctrl-C the 130 that ends a script around it as well.
    """
    folder = ranks.first(lambda: ready_data(config, display.line))
    run = Pretrainer(config, folder, display, ranks)
    print_config(config, display.line)
    several = f"{ranks.size} processes ({config.training.parallel}), "
    processes = several if ranks.size > 1 else ""
    display.line(
        f"{count_parameters(run.model):,} parameters, {run.total_steps:,} steps of "
        f"{config.tokens_per_step:,} tokens, {processes}{run.device}, "
        f"{'bf16 autocast' if run.bf16 else 'float32'}, scan by "
        f"{run.model.cfg.ssd_dispatch}, run folder {run.run_dir}"
    )
    if run.device.type == "cpu":
        display.line(how_threads_wait(torch.get_num_threads()))
    if run.run(resume):
        ranks.first(lambda: report(run))
        return 0
    display.line(
        f"Stopped at step {run.step:,} of {run.total_steps:,} and saved in "
        f"{run.run_dir}; the same command continues."
    )
    return 130 if run.stop.received == signal.SIGINT else 0


def require_places(run_dir: Path, data: DataConfig) -> None:
    """Refuse a run folder that cannot be one, or whose files would become text.

    Raises: RunError as `require_run_folder`, and for a folder inside the source.
    """
    require_run_folder(run_dir)
    if data.train_data_path is not None:
        return
    for part in source_parts(data.source or DEFAULT_SOURCE):
        place = Path(part).resolve()
        if not is_named(part) and run_dir.resolve().is_relative_to(place):
            raise no_run_folder(run_dir, f"it lies inside the source {part}")


def ready_data(config: RunConfig, log: Callable[[str], None]) -> Path:
    """The folder of the data, prepared unless the run has trained on it before."""
    run_dir = Path(config.training.save_dir)
    require_places(run_dir, config.data)
    folder = data_folder(config.data)
    if (former := folder_trained_on(run_dir, config.data)) is None:
        return prepare_data(config.data, folder, log)
    log(f"Data: {former}, as before")
    note_changed_source(config.data, folder, former, log)
    return former


def rehearse(config: RunConfig, resume: str, display: Display, ranks: Ranks) -> int:
    """The dry run: everything is checked, one step is taken, nothing is written."""
    line = display.line
    with ExitStack() as stack:
        folder = ranks.first(lambda: rehearsal_data(config, line, stack))
        run = Pretrainer(config, folder, display, ranks)
        print_config(config, line)
        checkpoint = ranks.first(lambda: choose_checkpoint(run.run_dir, resume, line))
        if checkpoint is not None:
            run.restore(checkpoint)
        ranks.first(run.require_space)
        rehearse_step(run)
        line(f"Dry run: nothing was written to {run.run_dir}")
        return 0


def rehearsal_data(
    config: RunConfig, log: Callable[[str], None], stack: ExitStack
) -> Path:
    """The folder of the data, or a temporary one that goes when the stack is left."""
    run_dir = Path(config.training.save_dir)
    require_places(run_dir, config.data)
    folder = data_folder(config.data)
    if (former := folder_trained_on(run_dir, config.data)) is not None:
        note_changed_source(config.data, folder, former, log)
        return former
    if config.data.train_data_path is None:
        if (found := source_prepared_in(config.data, folder)) is not None:
            return found
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    return prepare_data(config.data, folder, log)


def rehearse_step(run: Pretrainer) -> None:
    """Take a step, and a second one whose peak is compared with the estimate.

    The first one allocates AdamW's moments, so its own peak is not that of a run.
    """
    line, setting = run.display.line, setting_of(run.config, run.device.type == "cuda")
    line("\n".join(memory_lines(run.model.cfg, setting)))
    result = run.next_step()
    if result.problem is not None:
        raise TrainingFailed(f"dry run: {result.problem}")
    line(
        f"one step: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}, "
        f"{run.meter_s:.2f} s"
    )
    measured = allocator_peak(run.model, run.optimizer, run.next_step)
    if run.ranks.size > 1:
        line(
            f"peak of the tensors in a step: {measured:,} bytes measured on rank 0; "
            "the table above is of a process alone"
        )
        return
    estimate = memory_of_step(run.model.cfg, setting).peak
    line(
        f"peak of the tensors in a step: {estimate:,} bytes derived, {measured:,} "
        f"measured ({estimate / measured - 1:+.1%})"
    )


def data_folder(data: DataConfig) -> Path:
    """The prepared folder: the one given, or one under data/ named after the source.

    Two paths never share a folder, even with the same file name: a hash of the
    resolved path is part of the name.
    Raises: DataError for a source whose parts do not go together.
    """
    if data.train_data_path is not None:
        return Path(data.train_data_path)
    name = f"{source_name(data.source or DEFAULT_SOURCE)}-{data.tokenizer}"
    if data.val_fraction not in (None, DEFAULT_VAL_FRACTION):
        name += f"-val{data.val_fraction}"
    return Path("data") / name


DEFAULT_VAL_FRACTION = 0.05


def folder_trained_on(run_dir: Path, data: DataConfig) -> Path | None:
    """The folder of the data of a run's newest checkpoint, if the settings lead there.

    Returns: that of the settings, or one beside it for a source that was edited before
    the run; None without a checkpoint, or when its data are in neither.
    """
    folder = data_folder(data)
    for checkpoint in reversed(list_checkpoints(run_dir / "checkpoints")):
        try:
            stored = read_run_state(checkpoint)["data"]
        except CheckpointError:  # damaged: the next older
            continue
        named = Path(stored["folder"]).name
        found = [folder]
        if data.train_data_path is None and named.startswith(f"{folder.name}-"):
            found.append(folder.with_name(named))
        right = (p for p in found if prepared_fingerprint(p) == stored["fingerprint"])
        return next(right, None)
    return None


def prepared_fingerprint(folder: Path) -> str | None:
    """Fingerprint of a prepared folder; None when there is no sound index."""
    try:
        return load_index(folder)["sha256"]
    except DataError:
        return None


def source_prepared_in(data: DataConfig, folder: Path) -> Path | None:
    """Where the source is prepared as it is now, in the folder or beside it.

    Raises: DataError for a source that cannot be read or prepared.
    """
    source = data.source or DEFAULT_SOURCE
    fraction = data.val_fraction or DEFAULT_VAL_FRACTION
    return prepared_in(source, data.tokenizer, folder, val_fraction=fraction)


def note_changed_source(
    data: DataConfig, folder: Path, former: Path, log: Callable[[str], None]
) -> None:
    """Say so when a run goes on with data whose source has been edited or is gone.

    Args: folder: named after the source; former: where the data of the run are.
    """
    if data.train_data_path is not None:
        return
    try:
        if source_prepared_in(data, folder) == former:
            return
        what = "changed since it was prepared"
    except DataError as error:
        what = f"cannot be prepared any more ({error})"
    log(f"{data.source or DEFAULT_SOURCE} {what}; continuing on the prepared data")


def prepare_data(data: DataConfig, folder: Path, log: Callable[[str], None]) -> Path:
    """Make sure that the folder, or one beside it, is prepared; returns which.

    Raises: DataError when it is missing, or cannot be prepared.
    """
    if data.train_data_path is not None:
        require_prepared(folder)
        return folder
    source = data.source or DEFAULT_SOURCE
    fraction = data.val_fraction or DEFAULT_VAL_FRACTION
    log(f"Preparing {source} with the {data.tokenizer} tokenizer in {folder}")
    options = {"val_fraction": fraction}
    place, index = prepare_beside(source, data.tokenizer, folder, **options)
    if place != folder:
        log(f"{folder} holds other data; these are in {place}")
    for split, entry in index["splits"].items():
        log(
            f"{split}: {entry['documents']:,} documents, {entry['bytes']:,} bytes, "
            f"{entry['tokens']:,} tokens"
        )
    return place


def print_config(config: RunConfig, log: Callable[[str], None]) -> None:
    """The resolved configuration, one line a section; only what is read."""
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        if "train_data_path" in values:  # whose tokens are what they are
            values.pop("tokenizer")
        log(f"{section}: " + ", ".join(f"{k} {v}" for k, v in values.items()))


def report(run: Pretrainer) -> None:
    """Where the results of a finished run are, and how good they are."""
    final, folder = run.final, run.run_dir
    sample = run.samples.sample(run.step) or f"({run.samples.path} has it no more)\n"
    measured, zlib = (
        "not a finite number of" if bpb is None else f"{bpb:.4f}"
        for bpb in (finite_or_none(final["val_bpb"]), final["zlib_bpb"])
    )
    lines = [
        f"\nSample of seed 0, from the empty prompt:\n{sample}",
        f"run folder   {folder}",
        f"validation   {measured} bits per byte over all of it "
        f"(zlib -9: {zlib} on the same text)",
        f"trained on   {run.tokens:,} tokens",
        f"curves       {folder / 'curves.png'}",
        f"samples      {run.samples.path}",
        f"checkpoints  {folder / 'checkpoints'}",
        f"time         {clock(final.get('time') or run.elapsed_s)}",
        f"peak memory  {peak_memory(run.device) / 1e9:.2f} GB in this process",
    ]
    show("\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """The plain-script door; the same code as ``mamba3lite train``."""
    return run_training(**read_arguments(arguments))


if __name__ == "__main__":
    sys.exit(main())
