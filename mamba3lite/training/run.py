"""A run: build, resume, tidy, loop, finish.

The batch of a step and everything else that decides its result are functions of the
step number and of what the checkpoint holds, so a run that was interrupted ends with
the same bits as one that was not (on a CPU, at the same number of threads).
"""

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import mamba3lite
from mamba3lite.data import DataError
from mamba3lite.data.corpora import (
    zlib_bits_per_byte,
)
from mamba3lite.generate import LogitsError, stream
from mamba3lite.models.mamba_block import _unavailable
from mamba3lite.models.transformer import Mamba3Transformer, ModelConfig
from mamba3lite.seeds import seeded
from mamba3lite.terminal import (
    one_line,
)
from mamba3lite.training.checkpoint import (
    CheckpointError,
    find_checkpoint,
    read_run_state,
    remove_temporary,
    restore_rng,
    rng_state,
    rotate,
    write_checkpoint,
)
from mamba3lite.training.config import (
    ConfigError,
    RunConfig,
    dump_config,
)
from mamba3lite.training.data import PretrainDataset
from mamba3lite.training.estimate import (
    checkpoint_bytes,
    checkpoints_at_once,
    flops_per_token,
    memory_of,
    memory_of_step,
    peak_flops,
    setting_of,
)
from mamba3lite.training.metrics import Display, bits_per_byte, finite_or_none
from mamba3lite.training.optim import (
    build_optimizer,
    next_learning_rate,
    set_learning_rate,
    steps_in_all,
)
from mamba3lite.training.parallel import (
    Ranks,
    rows_of_rank,
)
from mamba3lite.training.profiling import ProfileWindow
from mamba3lite.training.recovery import (
    BadStepGuard,
    LossHistory,
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
from mamba3lite.training.step import (
    Batch,
    StepResult,
    evaluate,
    train_step,
)
from mamba3lite.training.trackers import Trackers


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
