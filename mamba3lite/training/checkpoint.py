"""Checkpoints that are either whole or not there.

A checkpoint is a folder ``step_00000100`` with ``model.safetensors``,
``optimizer.safetensors``, ``state.json`` and ``manifest.json``, which lists size and
SHA-256 of the other three. It is written under a temporary name, flushed to the disk
file by file and renamed last, so a crash at any moment leaves the older ones as they
were. Nothing points to the latest: the newest folder that passes its manifest wins.
"""

import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FORMAT = 2
READABLE = (1, FORMAT)  # format 1 counts batches, not windows
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
MANIFEST = "manifest.json"
FILES = (MODEL, OPTIMIZER, STATE)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or does not fit: one line."""


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
    temporary = root / f".tmp-{final.name}"
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        _write_files(temporary, weights, moments, state)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _fsync(root)
    verify_checkpoint(final)
    return final


def _write_files(folder: Path, weights, moments, state: dict[str, Any]) -> None:
    _save_tensors(weights, folder / MODEL)
    _save_tensors(moments, folder / OPTIMIZER)
    _write_json(folder / STATE, {"format": FORMAT, **state})
    for name in FILES:
        _fsync(folder / name)
    files = {name: _fingerprint(folder / name) for name in FILES}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": files})
    _fsync(folder / MANIFEST)
    _fsync(folder)


def rotate(root: Path, keep_last: int, keep_every: int | None = None) -> list[Path]:
    """Delete old checkpoints; returns those deleted.

    What stays: the ``keep_last`` newest, those of every ``keep_every``-th step, and the
    best by validation. Call it after the newest one was verified. A folder is renamed
    before its files go, so an interrupted deletion never looks like a checkpoint.
    """
    found = list_checkpoints(root)
    kept = {*found[-keep_last:], best_checkpoint(found)}
    if keep_every is not None:
        kept |= {p for p in found if step_of(p) and step_of(p) % keep_every == 0}
    doomed = [path for path in found if path not in kept]
    for path in doomed:
        grave = root / f".tmp-deleted-{path.name}"
        os.rename(path, grave)
        shutil.rmtree(grave)
    return doomed


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
        score = evaluation.get("val_bpb")
    except (CheckpointError, AttributeError):
        return None
    return score if isinstance(score, int | float) else None


def remove_temporary(root: Path) -> None:
    """Delete what an interrupted save or rotation left behind."""
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path)


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
    """Checkpoint folders, oldest first, good or not."""
    found = (p for p in root.glob("step_*") if is_step(p.name.removeprefix("step_")))
    return sorted(found, key=step_of)


def checkpoints_of(folder: Path) -> list[Path]:
    """Those of a run folder, or those in a checkpoints folder, oldest first."""
    return list_checkpoints(folder / "checkpoints") or list_checkpoints(folder)


def verify_checkpoint(path: Path) -> None:
    """Check a checkpoint against its manifest: files, sizes, hashes, format.

    Raises: CheckpointError naming folder and fault.
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
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {name} has {size} bytes, the manifest says "
                f"{expected['bytes']}"
            )
        if _fingerprint(path / name) != expected:
            raise CheckpointError(f"{path}: {name} does not have its SHA-256")
    step = read_state(path).get("step")
    if is_step(path.name.removeprefix("step_")) and step != step_of(path):
        raise CheckpointError(
            f"{path}: renamed, it holds step {step}; its name was {step_name(step)}"
        )


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
            f"{root}: none of its {len(candidates)} checkpoints is intact; move them "
            "away to start over"
        )
    return None


def find_checkpoint(path: Path, log: Callable[[str], None]) -> Path:
    """A verified checkpoint from a checkpoint, a checkpoints folder or a run folder.

    Raises: CheckpointError when there is none.
    """
    if not path.is_dir():
        fault = "is a file, wants a folder" if path.exists() else "no such folder"
        raise CheckpointError(f"{path}: {fault}")
    if (path / MANIFEST).exists() or path.name.startswith("step_"):
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
    """The JSON state of a checkpoint: step, windows, config, versions and so on."""
    return _read_json(path / STATE)


def load_model(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model, tied names included.

    Raises: CheckpointError listing the tensors that differ in name or shape.
    """
    stored = read_weights(path, model)
    _, ties = split_tied(model.state_dict())
    model.load_state_dict(stored | {name: stored[ties[name]] for name in ties})


def read_weights(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's weights, tied ones once, which fit the model.

    Raises: CheckpointError listing the tensors that differ in name or shape.
    """
    stored, own = _load_tensors(path / MODEL), dict(model.named_parameters())
    _refuse_difference(path / MODEL, _shapes(stored), _shapes(own))
    return stored


def load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Copy a checkpoint's AdamW moments into an optimizer of the same model.

    Raises: CheckpointError listing the tensors that differ in name or shape.
    """
    put_moments(optimizer, read_moments(path, model))


def read_moments(path: Path, model: nn.Module) -> dict[str, Tensor]:
    """A checkpoint's AdamW moments, which fit the model; none before the first update.

    Raises: CheckpointError listing the tensors that differ in name or shape.
    """
    stored = _load_tensors(path / OPTIMIZER)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    expected = {}
    for name, shape in shapes.items():
        expected |= {f"{name}.exp_avg": shape, f"{name}.exp_avg_sq": shape}
        expected[f"{name}.step"] = ()
    # Before the first update there are no moments to store.
    _refuse_difference(path / OPTIMIZER, _shapes(stored), expected if stored else {})
    return stored


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
    """Put the generators back; those of GPUs only if as many GPUs are here."""
    torch.set_rng_state(_decode(states["cpu"]))
    stored = states.get("cuda", [])
    if stored and len(stored) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_decode(s) for s in stored])


# --------------------------------------------------------------------------------------
# Small pieces


def _shapes(tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _refuse_difference(path: Path, stored: dict, expected: dict) -> None:
    names = sorted(stored.keys() | expected.keys())
    differing = [n for n in names if stored.get(n) != expected.get(n)]
    if not differing:
        return
    shown = ", ".join(
        f"{n}: stored {stored.get(n, 'nothing')}, model {expected.get(n, 'nothing')}"
        for n in differing[:3]
    )
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise CheckpointError(f"{path}: does not fit this model: {shown}{more}")


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


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _is_fingerprint(entry: Any) -> bool:
    kinds = {"bytes": int, "sha256": str}
    return isinstance(entry, dict) and kinds == {k: type(v) for k, v in entry.items()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False), encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: {path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not JSON") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: wants a JSON object")
    return value


def _encode(tensor: Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
