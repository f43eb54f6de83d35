"""`mamba3lite verify`: what it counts, and that each broken promise is named.

What a damaged shard looks like to it is in test_fault_data.py.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import source_cases
from trainer_cases import new_run, prepare_corpus, run_config, write_corpus
from typer.testing import CliRunner

import mamba3lite.data.prepare as prepare_module
from mamba3lite.cli import app
from mamba3lite.data.prepare import prepare


def verify(folder):
    return CliRunner().invoke(app, ["verify", str(folder)])


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A preparation in several shards, and a run with two checkpoints."""
    base = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "SHARD_TOKENS", 3000)
        prepare_corpus(base)
    new_run(run_config(base / "tokens", base / "run", total_steps=6)).run()
    return base


@pytest.fixture
def tokens(sound, tmp_path):
    return Path(shutil.copytree(sound / "tokens", tmp_path / "tokens"))


@pytest.fixture
def run(sound, tmp_path):
    return Path(shutil.copytree(sound / "run", tmp_path / "run"))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_sound_data_is_counted_and_left_alone(tokens):
    before = times(tokens)
    result = verify(tokens)
    assert result.exit_code == 0 and result.stderr == ""
    assert times(tokens) == before
    splits = json.loads((tokens / "index.json").read_text())["splits"]
    lines = result.stdout.splitlines()
    for split, meta in splits.items():
        assert (
            f"{split}: {meta['documents']:,} documents at their offsets, "
            f"{meta['tokens']:,} tokens, {meta['bytes']:,} bytes of text"
        ) in lines
        for entry in meta["shards"]:
            assert (
                f"{tokens}/{entry['file']}: header, sha256 and ids of "
                f"{entry['tokens']:,} tokens"
            ) in lines
    assert len(splits["train"]["shards"]) > 2
    assert lines[-1] == f"{tokens}: all is well"


def move_an_offset(meta: dict) -> None:
    meta["document_offsets"][3] += 1


def add_a_name(meta: dict) -> None:
    meta["document_names"].append("one more")


def count_a_document(meta: dict) -> None:
    meta["documents"] += 1


def count_a_byte(meta: dict) -> None:
    meta["bytes"] += 1


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (move_an_offset, ["{n} document offsets, which are not the places of its {n} "
                          "EOS tokens"]),
        (add_a_name, ["{n} documents, but {n+1} names"]),
        (count_a_document, ["{n+1} documents, but {n} names",
                            "{n+1} documents, but {n} EOS tokens"]),
        (count_a_byte, ["{b+1} bytes, but its shards hold {b}"]),
    ],
)  # fmt: skip
def test_an_index_that_its_shards_belie_is_named(tokens, change, faults):
    """The index is signed again, so that only the shards can tell."""
    path = tokens / "index.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    meta = index["splits"]["val"]
    n, b = meta["documents"], meta["bytes"]
    counts = {"{n}": n, "{n+1}": n + 1, "{b}": b, "{b+1}": b + 1}
    change(meta)
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index | {"sha256": sha256}))
    result = verify(tokens)
    assert result.exit_code == 1
    for key, count in counts.items():
        faults = [fault.replace(key, f"{count:,}") for fault in faults]
    lines = [f"mamba3lite verify: {path}: val: {fault}" for fault in faults]
    assert result.stderr.splitlines() == lines
    assert "all is well" not in result.stdout


def test_every_damaged_shard_is_named_at_once(tokens):
    names = ["train/shard_00001.bin", "val/shard_00000.bin"]
    for name in names:
        (tokens / name).write_bytes((tokens / name).read_bytes()[:-2])
    result = verify(tokens)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(f"mamba3lite verify: {tokens / name}: found ")
    assert f"{tokens}/train/shard_00000.bin: header" in result.stdout


@pytest.mark.parametrize("text", ["", "{}", '{"format": "mamba3lite tokens"}'])
def test_a_damaged_index_is_named(tokens, text):
    (tokens / "index.json").write_text(text)
    result = verify(tokens)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"mamba3lite verify: {tokens}/index.json: ")


def test_tokens_of_gpt2_are_verified_without_its_rank_file(tmp_path, monkeypatch):
    source_cases.use_small_ranks(monkeypatch, tmp_path / "cache")
    texts, out = write_corpus(tmp_path / "texts"), tmp_path / "out"
    options = {"workers": 1, "progress": lambda *_: None}
    prepare(texts, "gpt2", out, val_fraction=0.3, **options)
    monkeypatch.setenv("MAMBA3LITE_CACHE", "/dev/null")
    result = verify(out)
    assert result.exit_code == 0
    assert result.stdout.count("bytes of text (by the index alone)") == 2


# Checkpoints


def test_all_checkpoints_of_a_run_are_checked(run):
    before = times(run)
    for folder in (run, run / "checkpoints"):
        result = verify(folder)
        assert result.exit_code == 0 and result.stderr == ""
        for step in (3, 6):
            path = run / f"checkpoints/step_{step:08d}"
            size = sum(file.stat().st_size for file in path.iterdir())
            line = f"{path}: 4 files of {size:,} bytes, as in its manifest\n"
            assert line in result.stdout
    assert times(run) == before


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"],
)
def test_a_flipped_bit_of_a_checkpoint_is_named(run, name):
    good, bad = (run / f"checkpoints/step_{step:08d}" for step in (3, 6))
    data = bytearray((bad / name).read_bytes())
    data[len(data) // 2] ^= 1
    (bad / name).write_bytes(data)
    for folder in (run, bad):
        result = verify(folder)
        assert result.exit_code == 1
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith(f"mamba3lite verify: {bad}")
        assert name == "manifest.json" or f"{name} does not have its" in result.stderr
    assert f"{good}: 4 files" in verify(run).stdout
    assert verify(good).exit_code == 0


def test_a_checkpoint_without_a_manifest_is_named(run):
    bad = run / "checkpoints/step_00000006"
    (bad / "manifest.json").unlink()
    result = verify(bad)
    assert result.exit_code == 1
    assert result.stderr == f"mamba3lite verify: {bad}: manifest.json is missing\n"


def test_where_nothing_can_be_verified_it_says_so(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for name, fault in {
        "none": "no such folder",
        "file": "is a file, wants a folder",
        "empty": "found no index.json of prepared data, and no checkpoint step_... "
        "here or in checkpoints/",
    }.items():
        result = verify(tmp_path / name)
        assert result.exit_code == (1 if name == "empty" else 2)
        assert result.stderr == f"mamba3lite verify: {tmp_path / name}: {fault}\n"
