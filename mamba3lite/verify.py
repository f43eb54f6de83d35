"""Verification: prepared data and checkpoints against everything that they promise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from mamba3lite.data import DataError
from mamba3lite.data.shards import (
    count_faults,
    counts_bytes,
    load_index,
    open_shard,
)
from mamba3lite.models.transformer import Mamba3Transformer
from mamba3lite.training.checkpoint import (
    FILES,
    MANIFEST,
    CheckpointError,
    checkpoints_of,
    read_run_state,
    require_tensors,
    verify_checkpoint,
)


def verify_folder(folder: Path, say: Callable[[str], None]) -> list[str]:
    """Check prepared data, a run, its checkpoints, or one of them; nothing is written.

    Args: say: called with a line on each thing that was found sound.
    Returns: the faults, a line each, which names the file; none when all is well.
    """
    if not folder.is_dir():
        return [f"{folder}: {'not a' if folder.exists() else 'no such'} folder"]
    if (folder / "index.json").exists():
        return verify_prepared(folder, say)
    if (folder / MANIFEST).exists() or folder.name.startswith("step_"):
        return verify_checkpoints([folder], say)
    try:
        found = checkpoints_of(folder)
    except CheckpointError as error:
        return [str(error)]
    if found:
        return verify_checkpoints(found, say)
    return [
        f"{folder}: found no index.json of prepared data, and no checkpoint step_... "
        "here or in checkpoints/"
    ]


def verify_checkpoints(
    checkpoints: list[Path], say: Callable[[str], None]
) -> list[str]:
    """Check the files of checkpoints against their manifests, states and models.

    Args and returns are those of `verify_folder`.
    """
    faults = []
    for path in checkpoints:
        try:
            verify_checkpoint(path)
            fields = read_run_state(path)["config"]["model"]
            with torch.device("meta"):  # its shapes alone
                require_tensors(path, Mamba3Transformer(fields))
        except CheckpointError as error:
            if path.exists():
                faults.append(str(error))
            else:
                say(f"{path}: deleted meanwhile, as a run does with old ones")
            continue
        sizes = [(path / name).stat().st_size for name in (*FILES, MANIFEST)]
        say(f"{path}: {len(sizes)} files of {sum(sizes):,} bytes, as in its manifest")
    return faults


def verify_prepared(folder: Path, say: Callable[[str], None]) -> list[str]:
    """Check index, shards, token ids, documents and counts, as `verify_folder`."""
    try:
        index = load_index(folder)
    except DataError as error:
        return [str(error)]
    say(f"{folder / 'index.json'}: matches its own sha256")
    return [
        fault
        for split in index["splits"]
        for fault in _split_faults(folder, index, split, say)
    ]


def _split_faults(
    folder: Path, index: dict, split: str, say: Callable[[str], None]
) -> list[str]:
    meta, tokenizer = index["splits"][split], index["tokenizer"]
    faults, shards = [], []
    for entry in meta["shards"]:
        try:
            shards.append(open_shard(folder, entry, tokenizer["vocab_size"]))
        except DataError as error:
            faults.append(str(error))
            continue
        say(
            f"{folder / entry['file']}: header, sha256 and ids of {entry['tokens']:,} "
            "tokens"
        )
    if not faults:  # what is said about documents needs every shard
        where = f"{folder / 'index.json'}: {split}"
        faults = [
            f"{where}: {fault}" for fault in count_faults(meta, shards, tokenizer)
        ]
    if not faults:
        counted = "" if counts_bytes(tokenizer) else " (by the index alone)"
        say(
            f"{split}: {meta['documents']:,} documents at their offsets, "
            f"{meta['tokens']:,} tokens, {meta['bytes']:,} bytes of text{counted}"
        )
    return faults
