"""What is asked of a run, checked before torch loads: a slip is answered at once."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba3lite.data import DataError
from mamba3lite.data.corpora import DEFAULT_SOURCE, require_source
from mamba3lite.data.tokenizers import ByteTokenizer, GPT2Tokenizer
from mamba3lite.terminal import say_that_torch_loads, show_what_streams_can, to_stderr
from mamba3lite.training.config import ConfigError, RunConfig, load_config

SCRIPT = "python -m mamba3lite.training.pretrain"
SCRIPT_HELP = (
    "Train a state-space language model, or continue a run that was stopped; the same "
    "as `mamba3lite train`. Results go to runs/NAME: metrics, curves, samples and "
    "checkpoints. Ctrl-C finishes the step and saves."
)


def checked_run(
    config_name: str, overrides: Sequence[str] = (), resume: str = "auto"
) -> RunConfig:
    """The configuration of a run, once nothing typed for it is a mistake.

    Raises: ConfigError, or DataError for a source or folder that is not there.
    """
    config = load_config(config_name, overrides)
    require_vocabulary(config)
    if os.environ.get("WORLD_SIZE", "1") == "1":  # of several, rank 0 has the disk
        require_resume(resume)
        require_data(config)
    return config


def require_vocabulary(config: RunConfig) -> None:
    """ConfigError before text is prepared as tokens that the model does not have."""
    kinds = {kind.name: kind for kind in (ByteTokenizer, GPT2Tokenizer)}
    wanted = kinds[config.data.tokenizer].vocab_size
    got = config.model.vocab_size
    if config.data.train_data_path is None and got != wanted:
        raise ConfigError(
            f"model.vocab_size: got {got}, should be {wanted}, the vocabulary of "
            f"data.tokenizer={config.data.tokenizer}"
        )


def require_resume(resume: str) -> None:
    """ConfigError for what is neither a word, nor a step, nor a folder."""
    words = ("auto", "never", "must")
    is_step = resume.isascii() and resume.isdigit()
    if not (resume in words or is_step or os.path.isdir(resume)):
        raise ConfigError(
            f"--resume {resume}: {resume} is no checkpoint ({', '.join(words)}, a step "
            "or a path)"
        )


def require_data(config: RunConfig) -> None:
    """DataError for data that are not there; a run that goes on may lack its source."""
    data, checkpoints = config.data, Path(config.training.save_dir, "checkpoints")
    if data.train_data_path is not None:
        require_prepared(Path(data.train_data_path))
    elif not os.path.isdir(checkpoints):
        require_source(data.source or DEFAULT_SOURCE)


def require_prepared(folder: Path) -> None:
    """DataError, with the command that makes one, for a prepared folder not there."""
    if not os.path.isdir(folder):
        raise DataError(
            f"data.train_data_path: {folder} does not exist; `mamba3lite prepare "
            f"--source stdlib --out {shlex.quote(str(folder))}` makes such a "
            "folder; --source may be the path of your own text"
        )


# --------------------------------------------------------------------------------------
# The plain-script door


def read_arguments(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What the plain script was asked for, as the arguments of ``run_training``."""
    parser = argparse.ArgumentParser(prog=SCRIPT, description=SCRIPT_HELP)
    add = parser.add_argument
    add("--config", default="tiny", help="a shipped name (default: tiny) or YAML file")
    add(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting, as training.lr=1e-3; may be repeated",
    )
    add("--data-path", metavar="DIR", help="a prepared folder: data.train_data_path")
    add("--checkpoint-dir", metavar="DIR", help="the run folder: training.save_dir")
    add(
        "--resume",
        default="auto",
        metavar="auto|never|must|STEP|PATH",
        help="auto (default) continues the newest intact checkpoint or starts, never "
        "starts, must continues, a step or path continues from there",
    )
    add(
        "--no-grad-checkpoint",
        action="store_true",
        help="keep activations instead of computing them twice: more memory, faster",
    )
    add("--no-compile", action="store_true", help="run the step without torch.compile")
    add(
        "--dry-run",
        action="store_true",
        help="check everything, take one step, print the memory table, write nothing",
    )
    options = parser.parse_args(arguments)
    overrides = list(options.set)
    if options.data_path is not None:
        overrides.append(f"data.train_data_path={options.data_path}")
    if options.checkpoint_dir is not None:
        overrides.append(f"training.save_dir={options.checkpoint_dir}")
    if options.no_grad_checkpoint:
        overrides.append("training.grad_checkpoint=false")
        overrides.append("model.grad_checkpoint=false")
    if options.no_compile:
        overrides.append("training.compile=false")
    return {
        "config_name": options.config,
        "overrides": overrides,
        "resume": options.resume,
        "dry_run": options.dry_run,
        "program": SCRIPT,
    }


def refuse_mistakes() -> None:
    """End this process, on rank 0 with one line, where what was typed cannot run.

    From then on Ctrl-C ends it without a traceback, also while torch loads.
    """
    sys.excepthook = _say_interrupted
    show_what_streams_can()
    asked = read_arguments()
    try:
        checked_run(asked["config_name"], asked["overrides"], asked["resume"])
    except (ConfigError, DataError) as error:
        if os.environ.get("RANK", "0") == "0":
            to_stderr(f"{SCRIPT}: {error}")
        sys.exit(2)
    say_that_torch_loads()


def _say_interrupted(kind, error, trace) -> None:
    if issubclass(kind, KeyboardInterrupt):
        to_stderr(f"{SCRIPT}: interrupted before training began")
    else:
        sys.__excepthook__(kind, error, trace)
