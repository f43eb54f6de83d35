"""Faults 13 and 14: damaged shards, and data that is empty or too short.

Each fault is injected into files on disk, and a run (and `verify`) is started on them:
one line that names the file and the counts, exit code 2 (or 1), and no run folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from trainer_cases import prepare_corpus, write_config, write_corpus
from typer.testing import CliRunner

from mamba3lite.cli import app
from mamba3lite.data.prepare import prepare

pytestmark = pytest.mark.slow

HEADER = struct.Struct("<8sIIQQ32s")  # stated again: the file format is a promise
FIELDS = ("magic", "version", "itemsize", "n_tokens", "vocab_size", "sha256")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which is empty and stays."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name != "prepare.lock"
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A folder with a source, text/, and its sound preparation, tokens/."""
    base = tmp_path_factory.mktemp("sound")
    prepare_corpus(base)
    return base


@pytest.fixture
def tokens(sound, tmp_path):
    """A copy of the preparation, to be damaged."""
    return Path(shutil.copytree(sound / "tokens", tmp_path / "tokens"))


# 13: a corrupted shard


def flip_a_token(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[HEADER.size + 2 * 10] ^= 4
    shard.write_bytes(data)


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-200])


def add_a_byte(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes() + b"x")


def change_header(shard: Path, **changes) -> None:
    data = shard.read_bytes()
    fields = dict(zip(FIELDS, HEADER.unpack(data[: HEADER.size]), strict=True))
    head = HEADER.pack(*(fields | changes).values())
    shard.write_bytes(head + data[HEADER.size :])


def count_one_less(shard: Path) -> None:
    n_tokens = (shard.stat().st_size - HEADER.size) // 2
    change_header(shard, n_tokens=n_tokens - 1)


def sign(folder: Path, index: dict) -> None:
    """Write an index that matches its own hash, whatever it says."""
    index = {key: value for key, value in index.items() if key != "sha256"}
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (folder / "index.json").write_text(json.dumps(index | {"sha256": sha256}))


def read_index(folder: Path) -> dict:
    return json.loads((folder / "index.json").read_text())


def leave_the_vocabulary(shard: Path) -> None:
    """Token 257 of 257, with every hash as it should be."""
    payload = np.frombuffer(shard.read_bytes()[HEADER.size :], "<u2").copy()
    payload[7] = 257
    digest = hashlib.sha256(payload.tobytes())
    shard.write_bytes(shard.read_bytes()[: HEADER.size] + payload.tobytes())
    change_header(shard, sha256=digest.digest())
    index = read_index(shard.parent.parent)
    index["splits"][shard.parent.name]["shards"][0]["sha256"] = digest.hexdigest()
    sign(shard.parent.parent, index)


# How, and what is said of a shard of n tokens in b bytes.
FAULTS = {
    "flipped token": (flip_a_token, "tokens have sha256 "),
    "truncated": (truncate, "found {b-200:,} bytes of tokens, wanted {b:,} ({n:,} "),
    "wrong magic": (lambda s: change_header(s, magic=b"NUMPYNPY"),
                    "header says magic b'NUMPYNPY', wanted b'M3LTOKEN'"),
    "odd bytes": (add_a_byte, "found {b+1:,} bytes of tokens, 1 odd, wanted {b:,} "),
    "token beyond the vocabulary": (leave_the_vocabulary, "found token 257, wanted "
                                    "less than the vocabulary size 257"),
    "count mismatch": (count_one_less, "header says tokens {n-1}, wanted {n}"),
    "missing": (Path.unlink, "cannot be read (No such file or directory)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_fault_13_a_corrupted_shard(sound, tokens, tmp_path, fault, split):
    """Refused by verify and by a run, and prepared again to the same bytes."""
    damage, message = FAULTS[fault]
    n_tokens = read_index(tokens)["splits"][split]["tokens"]
    counts = {"n": n_tokens, "b": 2 * n_tokens}
    counts |= {
        "n-1": n_tokens - 1,
        "b+1": 2 * n_tokens + 1,
        "b-200": 2 * n_tokens - 200,
    }
    message = message.format(**counts)
    shard = tokens / split / "shard_00000.bin"
    damage(shard)
    result = invoke("verify", tokens)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"mamba3lite verify: {shard}: {message}")
    assert result.stderr.count("\n") == 1
    config = write_config(tmp_path / "a.yaml", tokens, tmp_path / "run")
    result = invoke("train", "--config", config)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"mamba3lite train: {shard}: {message}")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    arguments = ["--source", sound / "text", "--val-fraction", 0.2, "--out", tokens]
    assert invoke("prepare", *arguments).exit_code == 0
    assert folder_bytes(tokens) == folder_bytes(sound / "tokens")


def test_fault_13_counts_of_the_index_that_do_not_add_up(tokens, tmp_path):
    index = read_index(tokens)
    n_tokens = index["splits"]["train"]["tokens"]
    index["splits"]["train"]["tokens"] += 1
    sign(tokens, index)
    config = write_config(tmp_path / "a.yaml", tokens, tmp_path / "run")
    result = invoke("train", "--config", config)
    assert result.exit_code == 2
    counts = f"hold {n_tokens:,} tokens, the index wants {n_tokens + 1:,}; "
    assert f"the shards of train {counts}" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    result = invoke("verify", tokens)
    assert result.exit_code == 1
    counts = f"{n_tokens + 1:,} tokens, but its shards hold {n_tokens:,}"
    assert f"{tokens}/index.json: train: {counts}" in result.stderr


def test_fault_13_damage_under_a_finished_run_is_named_on_resume(tokens, tmp_path):
    """What was saved stays as it is."""
    config = write_config(tmp_path / "a.yaml", tokens, tmp_path / "run", total_steps=2)
    short = ["train", "--config", config, "--set", "training.sample_interval=9"]
    assert invoke(*short).exit_code == 0
    before = folder_bytes(tmp_path / "run" / "checkpoints")
    flip_a_token(tokens / "train/shard_00000.bin")
    result = invoke(*short, "--set", "training.total_steps=4")
    assert result.exit_code == 2
    line = f"mamba3lite train: {tokens}/train/shard_00000.bin: tokens have sha256 "
    assert result.stderr.startswith(line)
    assert folder_bytes(tmp_path / "run" / "checkpoints") == before
    assert invoke("verify", tmp_path / "run").exit_code == 0


# 14: empty and too short data, empty validation


def nothing(folder: Path) -> None:
    """A folder without a file."""


def empty_files(folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}.txt").touch()


def one_document(folder: Path) -> None:
    (folder / "a.txt").write_text("too short\n")


EMPTY_SOURCES = {
    "nothing": (nothing, "found 0 files in this folder (0 hidden"),
    "empty files": (empty_files, "3 files, 3 documents of 0 bytes for training and 0 "),
    "one document": (one_document, "1 files, 1 documents of 10 bytes for training and "
                     "0 of 0 bytes for validation at val_fraction 0.05"),
}  # fmt: skip


@pytest.mark.parametrize("case", EMPTY_SOURCES)
def test_fault_14_a_source_without_enough_text(sound, tmp_path, monkeypatch, case):
    write, message = EMPTY_SOURCES[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts")
    config = write_config(tmp_path / "a.yaml", sound / "tokens", tmp_path / "run")
    source = ["--set", "data.train_data_path=null", "--set", "data.source=texts"]
    result = invoke("train", "--config", config, *source)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]  # above it, how far the reading came
    assert last.startswith("mamba3lite train: source") and message in last
    assert not (tmp_path / "run").exists() and not (tmp_path / "data").exists()
    result = invoke("prepare", "--source", "texts", "--out", tmp_path / "out")
    assert result.exit_code == 2 and message in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_fault_14_an_empty_file_and_an_empty_validation(tmp_path):
    (tmp_path / "a.txt").touch()
    result = invoke("prepare", "--source", tmp_path / "a.txt", "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert "0 documents of 0 bytes for training" in result.stderr.splitlines()[-1]
    texts = write_corpus(tmp_path / "texts")
    arguments = ["--source", texts, "--val-fraction", 1e-9, "--out", tmp_path / "o"]
    result = invoke("prepare", *arguments)
    assert result.exit_code == 2
    last = result.stderr.splitlines()[-1]
    assert "0 of 0 bytes for validation at val_fraction 1e-09" in last
    assert not (tmp_path / "o").exists()


def test_fault_14_a_prepared_folder_without_validation(tokens, tmp_path):
    index = read_index(tokens)
    keys = ("document_names", "document_offsets", "shards")
    empty = {"tokens": 0, "bytes": 0, "documents": 0} | {key: [] for key in keys}
    index["splits"]["val"] = empty
    sign(tokens, index)
    config = write_config(tmp_path / "a.yaml", tokens, tmp_path / "run")
    result = invoke("train", "--config", config)
    assert result.exit_code == 2
    assert result.stderr == (
        f"mamba3lite train: {tokens}: val has 0 tokens in 0 documents, wanted 2 or "
        "more (windows of 32 tokens and a target)\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_fault_14_training_data_shorter_than_a_window(tmp_path, dry_run):
    """Two documents of 10 bytes, one on each side: 11 tokens for windows of 32."""
    for number in range(40):
        text = f"text {number:04d}\n".encode()
        share = int(hashlib.sha256(text).hexdigest()[:16], 16) / 2**64
        side = "low" if share < 0.5 else "high"
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{side}.txt").write_bytes(text)
    out = tmp_path / "tokens"
    options = {"val_fraction": 0.5, "progress": lambda *_: None}
    prepare(tmp_path / "texts", "byte", out, **options)
    config = write_config(tmp_path / "a.yaml", out, tmp_path / "run")
    result = invoke("train", "--config", config, *dry_run)
    assert result.exit_code == 2
    assert result.stderr == (
        f"mamba3lite train: {out}: train has 11 tokens in 1 documents, wanted 33 or "
        "more (windows of 32 tokens and a target)\n"
    )
    assert not (tmp_path / "run").exists()
