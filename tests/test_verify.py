"""`mamba3lite verify`: what it counts, and that each broken promise is named.

What a damaged shard looks like to it is in test_fault_data.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import source_cases
from trainer_cases import new_run, prepare_corpus, run_config, write_corpus
from typer.testing import CliRunner

import mamba3lite.data.prepare as prepare_module
import mamba3lite.verify as verify_module
from mamba3lite.cli import app
from mamba3lite.data import DataError
from mamba3lite.data.prepare import prepare
from mamba3lite.data.shards import load_index
from mamba3lite.training.checkpoint import CheckpointError
from mamba3lite.training.data import PretrainDataset, TokenStream


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
def test_an_index_that_its_shards_belie_is_named(sound, tokens, change, faults):
    """The index is signed again, so that only the shards can tell.

    Training refuses it too, and preparing the same text makes it right.
    """
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
    with pytest.raises(DataError, match=re.escape(f"val: {faults[0]}")):
        TokenStream(tokens, "val")
    options = {"val_fraction": 0.2, "progress": lambda *_: None}
    prepare(sound / "text", "byte", tokens, **options)
    assert verify(tokens).exit_code == 0


def test_a_checkpoint_that_goes_meanwhile_is_no_fault(tmp_path, monkeypatch):
    """A run that trains deletes its old ones."""
    path = tmp_path / "run" / "checkpoints" / "step_00000001"
    path.mkdir(parents=True)

    def vanish(path):
        path.rmdir()
        raise CheckpointError(f"{path}: model.safetensors is missing")

    monkeypatch.setattr(verify_module, "verify_checkpoint", vanish)
    said = []
    assert verify_module.verify_folder(tmp_path / "run", said.append) == []
    assert said == [f"{path}: deleted meanwhile, as a run does with old ones"]


@pytest.mark.parametrize("name", ["checkpoints", "run.lock"])
def test_data_are_not_prepared_in_the_folder_of_a_run(sound, tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    options = {"val_fraction": 0.2, "progress": lambda *_: None}
    with pytest.raises(DataError, match=rf"run holds a run \({name}\); choose another"):
        prepare(sound / "text", "byte", tmp_path / "run", **options)


def test_a_huge_shard_makes_no_index_huge(tokens):
    """Its size bounds what an index may have; none of that is taken in advance."""
    os.truncate(tokens / "train" / "shard_00000.bin", 2**40)
    result = verify(tokens)
    assert result.exit_code == 1
    assert "wanted" in result.stderr and "bytes of tokens" in result.stderr


def test_shards_are_not_written_through_a_link(sound, tokens, tmp_path):
    (tokens / "train").rename(tmp_path / "elsewhere")
    (tokens / "train").symlink_to(tmp_path / "elsewhere")
    before = times(tmp_path / "elsewhere")
    options = {"val_fraction": 0.2, "progress": lambda *_: None}
    with pytest.raises(DataError, match=r"train is a link, and shards are kept in"):
        prepare(sound / "text", "byte", tokens, **options)
    assert times(tmp_path / "elsewhere") == before


def shift_train(index: dict) -> None:
    index["splits"]["val"]["shards"] = index["splits"]["train"]["shards"]


def shard_entry(**changes):
    def change(index: dict) -> None:
        index["splits"]["train"]["shards"][0] |= changes

    return change


def put(place: str, value):
    def change(index: dict) -> None:
        *outer, key = place.split(".")
        for name in outer:
            index = index[name]
        index[key] = value

    return change


def drop(place: str):
    def change(index: dict) -> None:
        *outer, key = place.split(".")
        for name in outer:
            index = index[name]
        del index[key]

    return change


INDEXES = [  # what is changed before the index is signed again, what is said of it
    (drop("splits"), "splits is missing"),
    (put("splits", {}), "splits.train is missing"),
    (drop("splits.train"), "splits.train is missing"),
    (drop("splits.val"), "splits.val is missing"),
    (put("splits", []), r"splits: got \[\], should be a valid dictionary;"),
    (put("splits.test", {}), r"splits.test: got \{\}, Extra inputs are not permitted"),
    (put("splits.val", None), "splits.val: got None, should be a valid dictionary;"),
    (drop("splits.val.shards"), "splits.val.shards is missing"),
    (drop("splits.val.document_offsets"), "splits.val.document_offsets is missing"),
    (drop("splits.val.bytes"), "splits.val.bytes is missing"),
    (put("splits.val.shards", "ab"), "splits.val.shards: got 'ab', should be a valid"),
    (put("splits.val.tokens", "5"), "splits.val.tokens: got '5', should be a valid"),
    (put("splits.val.tokens", -5), "splits.val.tokens: got -5, should be greater"),
    (put("splits.val.documents", 1.5), "splits.val.documents: got 1.5, should be"),
    (put("splits.val.document_offsets", [0, -1]), "document_offsets.1: got -1, should"),
    (put("splits.val.document_offsets", [2**70]), "document_offsets.0: got 11805916"),
    (put("splits.val.document_names", [5]), "document_names.0: got 5, should be a val"),
    (shard_entry(file="/etc/passwd"), "shards.0.file: got '/etc/passwd', String"),
    (shard_entry(file="train/../val/shard_00000.bin"), "shards.0.file: got 'train/.."),
    (shard_entry(file="train/shard_00000.bin\n"), "shards.0.file: got 'train/shard_0"),
    (shard_entry(file=7), "shards.0.file: got 7, should be a valid string"),
    (shard_entry(tokens=0), "shards.0.tokens: got 0, should be greater than or equal"),
    (shard_entry(tokens=2**60), "shards.0.tokens: got 11529"),
    (shard_entry(sha256="x"), "shards.0.sha256: got 'x', String should match"),
    (shift_train, "val has the shard train/shard_00000.bin"),
    (drop("source"), "source is missing"),
    (put("source.files", None), "source.files: got None"),
    (drop("tokenizer"), "tokenizer is missing"),
    (drop("tokenizer.fingerprint"), "tokenizer.fingerprint is missing"),
    (put("tokenizer.fingerprint", "0" * 64),
     "tokenizer byte: has fingerprint '000000000000..., that of this version is "
     "'5035.*; its ids stand for other text; move .* away and run `mamba3lite prepare"),
    (put("tokenizer.name", "bytes"), "tokenizer: got 'bytes', allowed are 'byte' and"),
    (put("tokenizer.vocab_size", 300), "tokenizer byte: has vocab_size 300, that of"),
    (put("tokenizer.eos_id", 0), "tokenizer byte: has eos_id 0, that of this version"),
    (put("val_fraction", 2), "val_fraction: got 2, should be less than 1"),
    (put("val_fraction", True), "val_fraction: got True, should be a valid number"),
    (put("\u001b]0;", "[" * 900), None),  # what is not read does no harm
]  # fmt: skip


@pytest.mark.parametrize(("change", "told"), INDEXES)
def test_an_index_that_lacks_or_invents_something_is_one_line(tokens, change, told):
    """Signed again, so that its own hash is right; for every reader the same line."""
    path = tokens / "index.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    change(index)
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index | {"sha256": sha256}))
    result = verify(tokens)
    if told is None:
        assert result.exit_code == 0 and TokenStream(tokens)
        return
    assert result.exit_code == 1 and "all is well" not in result.stdout
    (line,) = result.stderr.splitlines()
    line = line.removeprefix("mamba3lite verify: ")
    assert re.match(f"{re.escape(str(path))}: .*{told}", line)
    for split in ("train", "val"):
        with pytest.raises(DataError) as error:
            PretrainDataset(tokens, 8, 0, split)
        assert str(error.value) == line


def test_prepare_repairs_no_tokens_of_another_tokenizer(sound, tokens):
    path = tokens / "index.json"
    index = json.loads(path.read_text())
    del index["sha256"]
    index["tokenizer"]["fingerprint"] = "0" * 64
    sha256 = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(index | {"sha256": sha256}))
    before = path.read_bytes()
    options = {"val_fraction": 0.2, "progress": lambda *_: None}
    with pytest.raises(
        DataError, match="tokenizer byte: has fingerprint '000000000000"
    ):
        prepare(sound / "text", "byte", tokens, **options)
    assert path.read_bytes() == before


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def a_link_outside(path: Path) -> None:
    path.rename(path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


OUTSIDE = "a link that leads out of its folder"
NOT_PLAIN = {a_pipe: "not a plain file", a_folder: "not a plain file",
             a_device: OUTSIDE, a_link_outside: OUTSIDE}  # fmt: skip


@pytest.mark.parametrize("name", ["index.json", "train/shard_00001.bin"])
@pytest.mark.parametrize("change", NOT_PLAIN)
def test_what_is_no_plain_file_of_the_folder_is_not_read(tokens, name, change):
    change(tokens / name)
    result = verify(tokens)
    assert result.exit_code == 1
    told = f"mamba3lite verify: {tokens / name}: cannot be read ({NOT_PLAIN[change]})"
    assert result.stderr.startswith(told) and result.stderr.count("\n") == 1
    with pytest.raises(DataError, match="cannot be read"):
        TokenStream(tokens)


def test_a_link_to_the_folder_itself_is_followed(tokens, tmp_path):
    (tmp_path / "link").symlink_to(tokens)
    assert verify(tmp_path / "link").exit_code == 0


def test_an_index_without_end_is_not_read_to_its_end(tokens):
    os.truncate(tokens / "index.json", 1 << 40)  # takes no room on the disk
    result = verify(tokens)
    assert result.exit_code == 1
    assert f"{tokens}/index.json: larger than 67," in result.stderr


@pytest.mark.parametrize(
    "text",
    ["[" * 10**6, '{"a":' * 10**6, '{"format": 1, "format": 2}', '{"format": NaN}',
     "9" * 10**5, '{"format": ' + "9" * 10**5 + "}", "\ufeff{}", "null", '"' ],
)  # fmt: skip
def test_json_with_tricks_is_one_line(tokens, text):
    (tokens / "index.json").write_text(text)
    result = verify(tokens)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and len(result.stderr) < 1000
    assert result.stderr.startswith(f"mamba3lite verify: {tokens}/index.json: ")


@pytest.mark.parametrize("depth", range(100, 1000, 25))
def test_nesting_of_any_depth_is_one_line_or_harmless(tokens, depth):
    path = tokens / "index.json"
    text = path.read_text().replace(
        '"source"', f'"x": {"[" * depth}{"]" * depth}, "source"'
    )
    path.write_text(text)
    with pytest.raises(DataError, match=r"its own sha256|nested too deeply"):
        load_index(tokens)


def test_any_flipped_bit_is_one_line_or_changes_nothing(tokens):
    """500 of them, anywhere in index and shards; what still loads, loads the same."""

    def read() -> list:
        streams = [TokenStream(tokens, split) for split in ("train", "val")]
        return [(s.index, s.tokens(0, len(s)).tolist()) for s in streams]

    wanted, draw, refused = read(), random.Random(0), 0
    files = ["index.json", *(p.relative_to(tokens) for p in tokens.glob("*/*.bin"))]
    for _ in range(500):
        path = tokens / draw.choice(files)
        whole = path.read_bytes()
        data, bit = bytearray(whole), draw.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert read() == wanted
        except DataError as error:
            refused += 1
            assert "\n" not in str(error) and str(path) in str(error), error
        path.write_bytes(whole)
    assert refused > 400


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
