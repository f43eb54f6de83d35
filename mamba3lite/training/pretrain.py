"""The door of the trainer: data found or prepared, a run or a rehearsal, exit codes.

`train_step` is in `mamba3lite/training/step.py`, `Pretrainer` in
`mamba3lite/training/run.py`.
"""

if __name__ == "__main__":  # a slip of the keyboard is answered before torch loads
    from mamba3lite.threads import spin_briefly
    from mamba3lite.training.arguments import refuse_mistakes

    refuse_mistakes()
    spin_briefly()

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from mamba3lite.data import DataError
from mamba3lite.data.corpora import (
    DEFAULT_SOURCE,
    is_named,
    source_name,
    source_parts,
)
from mamba3lite.data.prepare import prepare_beside, prepared_in
from mamba3lite.data.shards import load_index
from mamba3lite.models.transformer import ModelConfig
from mamba3lite.terminal import (
    lasting_streams,
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
    list_checkpoints,
    read_run_state,
)
from mamba3lite.training.config import (
    ConfigError,
    DataConfig,
    RunConfig,
    TrainingConfig,
)
from mamba3lite.training.data import PretrainDataset
from mamba3lite.training.estimate import (
    memory_lines,
    memory_of_step,
    setting_of,
)
from mamba3lite.training.metrics import Display, clock, finite_or_none
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
from mamba3lite.training.profiling import allocator_peak, peak_memory
from mamba3lite.training.recovery import (
    RankFailed,
    RunError,
    TrainingFailed,
    choose_checkpoint,
    no_run_folder,
    require_run_folder,
)
from mamba3lite.training.run import (
    Pretrainer,
)
from mamba3lite.training.run import (
    _enforce_triton_env_var as _enforce_triton_env_var,
)
from mamba3lite.training.step import StepResult, count_parameters, evaluate, train_step
from mamba3lite.training.trackers import reason_of

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
