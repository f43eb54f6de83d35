"""Checkpoints that are either whole or not there.

A checkpoint is a folder ``step_00000100`` with ``model.safetensors``,
``optimizer.safetensors``, ``state.json`` and ``manifest.json``, which lists size and
SHA-256 of the other three. It is written under a temporary name, flushed to the disk
file by file and renamed last, so a crash at any moment leaves the older ones as they
were. Nothing points to the latest: the newest folder that passes its manifest wins.

What is read may be damaged, or a stranger's: plain files inside the folder, whose sizes
and types are checked before anything is made of them.
"""

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mamba3lite.data.tokenizers import require_same_tokenizer
from mamba3lite.files import flush_folder, open_plain, temporary_name
from mamba3lite.json_files import (
    Checked,
    Count,
    parse_object,
    read_json,
    require_form,
    shown,
)
from mamba3lite.models.config import ModelConfig
from mamba3lite.training.config import parameter_count, refuse_absurd_sizes

FORMAT = 2
READABLE = (1, FORMAT)  # format 1 counts batches, not windows
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
MOST_JSON_BYTES = 1 << 24  # of a state or manifest; an ordinary state has 10 kB
MOST_HEADER_BYTES = 1 << 23  # of tensors' names and places; 1,024 layers take 4 MB
MOST_THREADS = 1024
MOST_WINDOWS = 2**60  # behind a run; beyond it 64 bits do not hold the next ones
DTYPES = {  # as safetensors calls them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What a save, a rotation or a version before this one calls what it has not finished.
UNFINISHED = re.compile(r"\.tmp-(deleted-)?step_[0-9]+(-[0-9a-f]{8})?")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit: one line."""


class Validation(Checked):
    """The newest evaluation; bits per byte None when they were not finite."""

    step: Count
    val_bpb: float | None


class Generators(Checked):
    """States of PyTorch's generators in base64."""

    cpu: str
    cuda: list[str] = Field(default=[])


Setting = Annotated[str, Field(max_length=4096)] | int | float | bool | None
Finite32 = Annotated[float, Field(ge=-3.5e38, le=3.5e38)]


class StoredData(Checked):
    """What a run was trained on."""

    folder: Annotated[str, Field(max_length=4096)]
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    tokenizer: str
    tokenizer_fingerprint: str | None = None


class StoredModel(Checked):
    """What of the model section is asked for by name."""

    max_seq_len: int
    ssd_dispatch: str


class StoredTraining(Checked):
    """The training section, of which one must know how many rows a step had."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Setting]

    micro_batch_size: Annotated[int, Field(ge=1, le=10**10)]
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=10**10)]


class StoredConfig(Checked):
    """The three sections of a run's configuration."""

    model: StoredModel
    training: StoredTraining
    data: dict[str, Setting]


class SavedState(Checked):
    """What every state.json holds."""

    step: Count
    validation: Validation | None = None


class RunState(SavedState):
    """What the state.json of a run holds besides."""

    skipped: Count
    windows: Count = 0  # format 1 has none
    sampled: Count = 0  # nor this
    tokens: Count
    consecutive_bad: Count
    rollbacks: Count = 0
    losses: Annotated[list[Finite32], FailFast()] = Field(default=[])
    elapsed_s: float = Field(ge=0, le=10**12)
    rng: Generators
    config: StoredConfig
    data: StoredData
    threads: int = Field(ge=1, le=MOST_THREADS)
    world_size: int = Field(ge=1, le=2**20)


# --------------------------------------------------------------------------------------
# Writing


def save_checkpoint(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> Path:
    """Write ``root/step_<state['step']>`` atomically and verify what was written.

    Args: root: the run's ``checkpoints`` folder. model: the raw model, not a compiled
    wrapper, and whole. state: JSON values; ``step`` names the folder.
    Returns: the folder.
    Raises: OSError when the disk refuses (the temporary folder is removed again),
    CheckpointError when what was written does not read back.
    """
    tensors = model_tensors(model), optimizer_tensors(model, optimizer)
    return write_checkpoint(root, *tensors, state)


def write_checkpoint(
    root: Path,
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """``save_checkpoint`` for tensors by name; raises and returns the same."""
    final = root / step_name(state["step"])
    temporary = temporary_name(final)
    root.mkdir(parents=True, exist_ok=True)
    try:
        temporary.mkdir()
        _write_files(temporary, weights, moments, state)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    flush_folder(root)
    verify_checkpoint(final)
    return final


def _write_files(folder: Path, weights, moments, state: dict[str, Any]) -> None:
    _save_tensors(weights, folder / MODEL)
    _save_tensors(moments, folder / OPTIMIZER)
    _write_json(folder / STATE, {"format": FORMAT, **state})
    for name in (MODEL, OPTIMIZER):  # safetensors gives them to their owner alone
        shutil.copymode(folder / STATE, folder / name)
    for name in FILES:
        _fsync(folder / name)
    files = {name: _fingerprint(folder / name) for name in FILES}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": files})
    _fsync(folder / MANIFEST)
    flush_folder(folder)


def rotate(
    root: Path,
    keep_last: int,
    keep_every: int | None,
    log: Callable[[str], None],
) -> None:
    """Delete old checkpoints, and what could not be deleted before.

    What stays: the ``keep_last`` newest, those of every ``keep_every``-th step, and the
    best by validation. Call it after the newest one was verified. A folder is renamed
    before its files go, so an interrupted deletion never looks like a checkpoint.

    Args: log: gets a line for each folder that the system keeps, every time.
    """
    remove_temporary(root, log)
    found = list_checkpoints(root)
    kept = {*found[-keep_last:], best_checkpoint(found)}
    if keep_every is not None:
        kept |= {p for p in found if step_of(p) and step_of(p) % keep_every == 0}
    for path in found:
        if path not in kept:
            _delete(path, log)


def remove_temporary(root: Path, log: Callable[[str], None]) -> None:
    """Delete what an interrupted save or rotation left; ``log`` as for ``rotate``."""
    for path in sorted(root.glob(".tmp-*")):
        if UNFINISHED.fullmatch(path.name):
            _delete(path, log)


def _delete(path: Path, log: Callable[[str], None]) -> None:
    grave = path
    try:
        if not path.name.startswith("."):
            grave = temporary_name(path.with_name(f"deleted-{path.name}"))
            os.rename(path, grave)
        shutil.rmtree(grave)
    except OSError as error:
        shutil.rmtree(grave, ignore_errors=True)  # what else is in it
        log(
            f"[warn] {grave}: cannot be deleted ({error.strerror or error}); it is "
            "tried again at the next save"
        )


def best_checkpoint(paths: Iterable[Path]) -> Path | None:
    """The checkpoint of lowest validation loss; None when no one has been evaluated.

    Each holds the newest evaluation from before it. Of several with the same, the
    oldest is the one that was evaluated.
    """
    scores = {path: _validation(path) for path in paths}
    measured = [path for path, score in scores.items() if score is not None]
    return min(measured, key=lambda p: (scores[p], step_of(p)), default=None)


def _validation(path: Path) -> float | None:
    """Bits per byte of a checkpoint's validation, None without or when damaged."""
    try:
        evaluation = read_state(path).get("validation") or {}
    except CheckpointError:
        return None
    return evaluation.get("val_bpb")


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that training will write again; it is kept, not used."""
    aside, count = path.with_name(f"aside_{path.name}"), 1
    while aside.exists():
        count += 1
        aside = path.with_name(f"aside_{path.name}_{count}")
    os.rename(path, aside)
    return aside


# --------------------------------------------------------------------------------------
# Finding


def step_name(step: int) -> str:
    """Folder name of a step; the names sort like the steps."""
    return f"step_{step:08d}"


def is_step(text: str) -> bool:
    """True for the digits 0-9 alone, few enough for a step."""
    return re.fullmatch("[0-9]{1,18}", text) is not None


def step_of(path: Path) -> int:
    """The step that a checkpoint folder is named after."""
    return int(path.name.removeprefix("step_"))


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first, good or not; none where there is no folder.

    Raises: CheckpointError for a folder that cannot be listed: it may hold some.
    """
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read ({error.strerror})") from None
    found = (n for n in names if n.startswith("step_") and is_step(n[len("step_") :]))
    return sorted((root / name for name in found), key=step_of)


def checkpoints_of(folder: Path) -> list[Path]:
    """Those of a run folder, or those in a checkpoints folder, oldest first."""
    return list_checkpoints(folder / "checkpoints") or list_checkpoints(folder)


def verify_checkpoint(path: Path) -> None:
    """Check a checkpoint against its manifest: files, sizes, hashes, format.

    Raises: CheckpointError naming folder and fault; what cannot be read is one.
    """
    manifest = _read_json(path / MANIFEST)
    if manifest.get("format") not in READABLE:
        raise CheckpointError(
            f"{path}: {MANIFEST} has format {manifest.get('format')!r}, this version "
            f"reads {' and '.join(map(str, READABLE))}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or set(files) != set(FILES):
        raise CheckpointError(f"{path}: {MANIFEST} should list {', '.join(FILES)}")
    for name, expected in files.items():
        if not _is_fingerprint(expected):
            raise CheckpointError(
                f"{path}: {MANIFEST} should give bytes and sha256 of {name}"
            )
        _verify_file(path / name, expected)
    step = read_state(path)["step"]
    if is_step(path.name.removeprefix("step_")) and step != step_of(path):
        raise CheckpointError(
            f"{path}: renamed, it holds step {step}; its name was {step_name(step)}"
        )


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    folder, name = path.parent, path.name
    try:
        with open_plain(path, folder) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{folder}: {name} has {size} bytes, the manifest says "
                    f"{expected['bytes']}"
                )
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None
    if digest != expected["sha256"]:
        raise CheckpointError(f"{folder}: {name} does not have its SHA-256")


def newest_checkpoint(root: Path, log: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that verifies, or None when there is none at all.

    Each bad one is named through ``log`` and the next older is tried.
    Raises: CheckpointError when there are checkpoints and all of them are bad.
    """
    candidates = list_checkpoints(root)
    for path in reversed(candidates):
        try:
            verify_checkpoint(path)
            return path
        except CheckpointError as error:
            log(f"[warn] bad checkpoint, trying the next older: {error}")
    if candidates:
        raise CheckpointError(
            f"{root}: none of its {len(candidates)} checkpoints can be used, for the "
            "reasons above; a run that starts anew wants another folder"
        )
    return None


def find_checkpoint(path: Path, log: Callable[[str], None]) -> Path:
    """A verified checkpoint from a checkpoint, a checkpoints folder or a run folder.

    Raises: CheckpointError when there is none.
    """
    if not os.path.isdir(path):
        there = os.path.lexists(path)
        fault = "is a file, wants a folder" if there else "no such folder"
        raise CheckpointError(f"{path}: {fault}")
    if os.path.lexists(path / MANIFEST) or path.name.startswith("step_"):
        verify_checkpoint(path)
        return path
    for root in (path / "checkpoints", path):
        newest = newest_checkpoint(root, log)
        if newest is not None:
            return newest
    raise CheckpointError(
        f"{path}: no checkpoint here; wants a step_... folder, a checkpoints folder or "
        "a run folder"
    )


# --------------------------------------------------------------------------------------
# Reading


def read_state(path: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint, whoever wrote it: its step, and what else it has.

    Raises: CheckpointError naming file and fault.
    """
    state = _read_json(path / STATE)
    _require(path, state, SavedState)
    return state


def read_run_state(path: Path) -> dict[str, Any]:
    """The JSON state of a run's checkpoint: step, position, config, random state etc.

    It is safe to use: everything is there, of its type and within bounds, and the model
    that it describes fits into the file of weights.

    Raises: CheckpointError naming file and fault.
    """
    state = read_state(path)
    _require(path, state, RunState)
    try:
        torch.Generator().set_state(_decode(state["rng"]["cpu"]))
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path / STATE}: rng.cpu: {error}") from None
    try:
        model = ModelConfig(**state["config"]["model"])
        refuse_absurd_sizes(model)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path / STATE}: config.model: {error}") from None
    _require_weights_for(path, model)
    _require_tokenizer_of(path, model, state["data"])
    training = state["config"]["training"]
    rows = training["micro_batch_size"] * training["gradient_accumulation_steps"]
    if (behind := (state["step"] + state["skipped"]) * rows) > MOST_WINDOWS:
        raise CheckpointError(f"{path / STATE}: {behind:,} windows behind it")
    return state


def _require_tokenizer_of(path: Path, model: ModelConfig, data: dict) -> None:
    stored = {"name": data["tokenizer"]}
    stored["fingerprint"] = data.get("tokenizer_fingerprint")  # older ones lack it
    try:
        kind = require_same_tokenizer(stored)
    except ValueError as error:
        raise CheckpointError(f"{path / STATE}: data: {error}") from None
    if model.vocab_size != kind.vocab_size:
        raise CheckpointError(
            f"{path / STATE}: describes a model of {model.vocab_size} tokens, but the "
            f"tokenizer {kind.name} has {kind.vocab_size}"
        )


def _require_weights_for(path: Path, model: ModelConfig) -> None:
    """CheckpointError before a model is built that the file of weights cannot fill."""
    count = parameter_count(model)
    try:
        size = (path / MODEL).stat().st_size
    except OSError as error:
        raise _unreadable(path / MODEL, error) from None
    if size < 4 * count:
        raise CheckpointError(
            f"{path}: {STATE} describes a model of {count:,} parameters, but {MODEL} "
            f"has {size:,} bytes"
        )


def load_model(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model, tied names included.

    Raises: CheckpointError listing the tensors that differ in name, shape or dtype.
    """
    stored = read_weights(path, model)
    _, ties = split_tied(model.state_dict())
    model.load_state_dict(stored | {name: stored[ties[name]] for name in ties})


def read_weights(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's weights, tied ones once, which fit the model.

    Raises: CheckpointError listing the tensors that differ in name, shape or dtype.
    """
    require_tensors(path, model)
    return _load_tensors(path / MODEL)


def load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Copy a checkpoint's AdamW moments into an optimizer of the same model.

    Raises: CheckpointError listing the tensors that differ in name, shape or dtype.
    """
    put_moments(optimizer, read_moments(path, model))


def read_moments(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's AdamW moments, which fit the model; none before the first update.

    Raises: CheckpointError listing the tensors that differ in name, shape or dtype, or
    when there are none after the first update.
    """
    require_tensors(path, model)
    return _load_tensors(path / OPTIMIZER)


def require_tensors(path: Path, model: nn.Module) -> None:
    """Compare a checkpoint's tensors with a model, which may lie on the meta device.

    The headers of the files say which there are, so nothing is made of one that does
    not fit. Raises: CheckpointError as `read_weights` and `read_moments`.
    """
    weights = _kinds(dict(model.named_parameters()))
    moments: Kinds = {}
    for name, kind in weights.items():
        moments |= {f"{name}.exp_avg": kind, f"{name}.exp_avg_sq": kind}
        moments[f"{name}.step"] = ((), DTYPES[torch.float32])
    _refuse_difference(path / MODEL, _read_header(path / MODEL), weights)
    stored = _read_header(path / OPTIMIZER)
    # Before the first update there are no moments to store.
    begun = stored or read_state(path)["step"] > 0
    _refuse_difference(path / OPTIMIZER, stored, moments if begun else {})


def put_moments(optimizer: torch.optim.Optimizer, moments: dict[str, Tensor]) -> None:
    """Copy AdamW moments by parameter name into an optimizer; none empties it."""
    packed = optimizer.state_dict()
    names = [n for group in packed["param_groups"] for n in group["param_names"]]
    packed["state"] = {
        index: {key: moments[f"{name}.{key}"] for key in MOMENTS}
        for index, name in enumerate(names)
        if moments
    }
    optimizer.load_state_dict(packed)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint holds of a whole model: its weights, tied ones once."""
    weights, _ = split_tied(model.state_dict())
    return {name: weight.detach().contiguous() for name, weight in weights.items()}


def optimizer_tensors(model: nn.Module, optimizer) -> dict[str, Tensor]:
    """What a checkpoint holds of its optimizer: AdamW's moments by parameter name."""
    return {
        f"{name}.{key}": value.detach().contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def split_tied(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate a state dict into distinct tensors and names that repeat one of them.

    Returns: tensors by name, each storage once; and {repeated name: first name}.
    """
    unique: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and place in first:
            ties[name] = first[place]
        else:
            first[place] = name
            unique[name] = tensor
    return unique, ties


def rng_state() -> dict[str, Any]:
    """The state of PyTorch's generators, as text that JSON can hold."""
    states = {"cpu": _encode(torch.get_rng_state())}
    if torch.cuda.is_available():
        states["cuda"] = [_encode(s) for s in torch.cuda.get_rng_state_all()]
    return states


def restore_rng(states: dict[str, Any]) -> None:
    """Put the generators back; those of GPUs only if as many GPUs are here.

    Raises: CheckpointError for what is no state of a generator.
    """
    stored = states.get("cuda", [])
    try:
        torch.set_rng_state(_decode(states["cpu"]))
        if stored and len(stored) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all([_decode(s) for s in stored])
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{STATE}: rng: {error}") from None


# --------------------------------------------------------------------------------------
# Small pieces


Kinds = dict[str, tuple[tuple[int, ...], str]]


def _kinds(tensors: dict[str, Tensor]) -> Kinds:
    """Shape and dtype, as a file of tensors names it, of each tensor."""
    return {
        name: (tuple(tensor.shape), DTYPES[tensor.dtype])
        for name, tensor in tensors.items()
    }


def _refuse_difference(path: Path, stored: Kinds, expected: Kinds) -> None:
    names = sorted(stored.keys() | expected.keys())
    differing = [n for n in names if stored.get(n) != expected.get(n)]
    if not differing:
        return
    listed = ", ".join(
        f"{shown(n)[1:-1]}: stored {_named(stored, n)}, model {_named(expected, n)}"
        for n in differing[:3]
    )
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise CheckpointError(f"{path}: does not fit this model: {listed}{more}")


def _named(kinds: Kinds, name: str) -> str:
    if name not in kinds:
        return "nothing"
    shape, dtype = kinds[name]
    names = {code: str(kind).removeprefix("torch.") for kind, code in DTYPES.items()}
    return f"{shown(shape)} {names.get(dtype, dtype)}"


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Raises: OSError when the disk refuses, which safetensors says in words only."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from None


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def _read_header(path: Path) -> Kinds:
    """Shapes and dtypes in a file of tensors, by name; the data are all there.

    Source: the safetensors format: the header's length, 8 bytes, and then it, as JSON.
    """
    try:
        with open_plain(path, path.parent) as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MOST_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: a header of {length:,} bytes, wanted "
                    f"{MOST_HEADER_BYTES:,} or less"
                )
            entries = parse_object(file.read(length))
        entries.pop("__metadata__", None)
        kinds = {n: (tuple(e["shape"]), e["dtype"]) for n, e in entries.items()}
        with safe_open(path, "pt"):
            return kinds
    except OSError as error:
        raise _unreadable(path, error) from None
    except (TypeError, KeyError):
        raise CheckpointError(f"{path}: header: wants shape and dtype of all") from None
    except (ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: header: {error}") from None


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _is_fingerprint(entry: Any) -> bool:
    kinds = {"bytes": int, "sha256": str}
    return isinstance(entry, dict) and kinds == {k: type(v) for k, v in entry.items()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)  # Windows flushes no file open to read
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, path.parent, MOST_JSON_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path.parent}: {path.name} is missing")
    return CheckpointError(f"{path}: {error.strerror}")


def _require(path: Path, state: dict[str, Any], form: type[BaseModel]) -> None:
    try:
        require_form(state, form)
    except ValueError as error:
        raise CheckpointError(f"{path / STATE}: {error}") from None


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    data = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(data, dtype=torch.uint8)
