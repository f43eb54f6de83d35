"""Data: what is prepared, that damage is named, and which window comes when."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import random
import re
import struct
import subprocess
import sys
import sysconfig
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mamba3lite.data.prepare as prepare_module
from mamba3lite.data import DataError
from mamba3lite.data.corpora import read_documents, source_files, zlib_bits_per_byte
from mamba3lite.data.prepare import prepare, prepare_beside, prepared_in
from mamba3lite.data.shards import ShardWriter, open_shard, save_index
from mamba3lite.data.tokenizers import ByteTokenizer, load_tokenizer
from mamba3lite.locks import locked
from mamba3lite.training.data import PretrainDataset, TokenStream, permuted

TOKENIZER = ByteTokenizer()
HEADER = "<8sIIQQ32s"  # stated again: the file format is a promise


def quiet(stage, files, n_files, tokens):
    """A progress callback that shows nothing."""


def make(source, out, val_fraction=0.3):
    return prepare(source, "byte", out, val_fraction=val_fraction, progress=quiet)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but the lock, which is empty and stays."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.name != "prepare.lock"
    }


def belongs_to_validation(text: bytes, val_fraction: float) -> bool:
    """The documented rule, in other words."""
    return int(hashlib.sha256(text).hexdigest()[:16], 16) < val_fraction * 2**64


def write_texts(folder: Path, n: int) -> dict[str, bytes]:
    """n small documents, one with Latin-1 bytes, one empty, one without newline."""
    texts = {f"sub/{i:03d}.txt": f"document {i}\n".encode() * (i % 7) for i in range(n)}
    texts["latin.txt"] = "# -*- coding: latin-1 -*-\nna\xefve caf\xe9".encode("latin-1")
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return texts


@pytest.fixture
def texts(tmp_path):
    """A folder of 41 documents; returns their bytes by name."""
    return write_texts(tmp_path / "texts", 40)


@pytest.fixture
def prepared(tmp_path, texts):
    """The same, prepared; returns the folder."""
    make(tmp_path / "texts", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    """The standard library, prepared once; returns (folder, index)."""
    out = tmp_path_factory.mktemp("stdlib")
    return out, make("stdlib", out, 0.02)


# Tokenizer


@given(st.binary())
def test_bytes_survive_the_tokenizer(data):
    ids = TOKENIZER.encode_bytes(data)
    assert ids.dtype == np.uint16 and len(ids) == len(data)
    opened = np.concatenate([[TOKENIZER.eos_id], ids, [TOKENIZER.eos_id]])
    assert TOKENIZER.decode_bytes(opened) == data


@given(st.text())
def test_text_survives_the_tokenizer(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_half_a_character_is_shown_as_replacement():
    assert TOKENIZER.decode(TOKENIZER.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("ids", [[257], [-1], [3, 70000]])
def test_ids_outside_the_vocabulary_are_refused(ids):
    with pytest.raises(ValueError, match="allowed are 0 to 256"):
        TOKENIZER.decode_bytes(ids)


@pytest.mark.parametrize("ids", [[65.0], [65, 66.5], [True], np.array([1.5])])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError, match=r"^ids: got (float64|bool), wanted integers$"):
        TOKENIZER.decode_bytes(ids)


def test_unknown_tokenizer_names_what_is_allowed():
    assert load_tokenizer("byte").vocab_size == 257
    with pytest.raises(ValueError, match="'bytes', allowed are 'byte' and 'gpt2'"):
        load_tokenizer("bytes")


# Sources


def test_stdlib_is_the_library_of_this_interpreter():
    root = Path(sysconfig.get_path("stdlib"))
    left_out = "test tests idle_test lib2to3 ensurepip site-packages dist-packages"
    expected = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not set(left_out.split()) & set(path.relative_to(root).parts[:-1])
        and not path.is_symlink()
        and not any(parent.is_symlink() for parent in path.parents if parent > root)
    }
    files = source_files("stdlib")
    assert {file.name for file in files} == expected
    assert [file.name for file in files] == sorted(expected, key=os.fsencode)
    assert len(expected) > 400 and "os.py" in expected


def test_stdlib_is_one_document_a_file_and_no_byte_is_changed(stdlib):
    folder, index = stdlib
    root = Path(sysconfig.get_path("stdlib"))
    n_documents = 0
    for split in ("train", "val"):
        stream, meta = TokenStream(folder, split), index["splits"][split]
        ends = [*meta["document_offsets"][1:], meta["tokens"]]
        for name, start, stop in zip(
            meta["document_names"], meta["document_offsets"], ends, strict=True
        ):
            tokens = stream.tokens(start, stop)
            assert tokens[0] == 256
            assert bytes(tokens[1:].tolist()) == (root / name).read_bytes(), name
            n_documents += 1
    assert n_documents == index["source"]["files"] == len(source_files("stdlib"))


def test_stdlib_twice_gives_the_same_bytes_and_is_reused(stdlib, tmp_path):
    folder, _ = stdlib
    make("stdlib", tmp_path, 0.02)
    first = folder_bytes(tmp_path)
    assert first == folder_bytes(folder)
    assert not any(str(tmp_path).encode() in data for data in first.values())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    stages = []
    prepare("stdlib", "byte", tmp_path, val_fraction=0.02,
            progress=lambda *state: stages.append(state[0]))  # fmt: skip
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert set(stages) == {"reading", "already prepared"}


@pytest.mark.parametrize("present", [False, True])
def test_zipped_or_minimal_stdlib_is_an_error_with_counts(
    monkeypatch, tmp_path, present
):
    library = tmp_path / "python311.zip"
    if present:
        library.mkdir()
        (library / "os.py").write_text("import sys\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    counts = "1 .py files of 11 bytes" if present else "0 .py files of 0 bytes"
    with pytest.raises(DataError, match=f"found {counts}.*wanted 5,000,000"):
        make("stdlib", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def documents(source) -> list[tuple[str, bytes]]:
    return [(d.name, d.text) for f in source_files(source) for d in read_documents(f)]


def test_a_folder_gives_each_text_file_as_it_lies_on_disk(tmp_path, texts):
    (tmp_path / "texts/.git").mkdir()
    (tmp_path / "texts/.git/config").write_text("hidden")
    os.mkfifo(tmp_path / "texts/pipe")
    lines = []
    files = source_files(tmp_path / "texts", lines.append)
    found = [(d.name, d.text) for file in files for d in read_documents(file)]
    assert found == sorted(texts.items())
    assert lines == [
        f"source {tmp_path / 'texts'}: 2 hidden entries, dead links and files of other "
        "kinds left out"
    ]


def test_links_are_followed_and_each_file_is_read_once(tmp_path, texts):
    source, other = tmp_path / "texts", tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_bytes(b"beyond\n")
    (other / "a.jsonl").write_text('{"text": "line"}\n')
    links = {
        "again.txt": source / "latin.txt",  # a file that is here already
        "far": other,
        "far too": other,
        "one.txt": other / "b.txt",  # a file that comes before its folder, by name
        "loop": source,
        "up": tmp_path,  # the source, and what lies beside it, other/ once more
        "dead.txt": tmp_path / "nothing",
        "self": source / "self",
    }
    for name, target in links.items():
        (source / name).symlink_to(target)
    (other / "back").symlink_to(source)
    lines = []
    files = source_files(source, lines.append)
    found = [(d.name, d.text) for file in files for d in read_documents(file)]
    more = {"far/a.jsonl:1": b"line", "far/b.txt": b"beyond\n"}
    assert found == sorted((texts | more).items())
    (line,) = lines
    assert "2 hidden entries, dead links" in line


def test_a_folder_of_links_alone_is_prepared(tmp_path, texts):
    (tmp_path / "farm").mkdir()
    (tmp_path / "farm/all").symlink_to(tmp_path / "texts")
    index = make(tmp_path / "farm", tmp_path / "out")
    assert index["source"]["files"] == len(texts)


def test_gzip_is_the_same_text_under_another_name(tmp_path):
    lines = b'{"text": "one\\n"}\n\n{"text": "caf\xc3\xa9", "id": 3}\n'
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"hello\n", mtime=0))
    (tmp_path / "b.jsonl").write_bytes(lines)
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    assert documents(tmp_path) == [
        ("a.txt.gz", b"hello\n"),
        ("b.jsonl:1", b"one\n"),
        ("b.jsonl:3", "café".encode()),
        ("c.jsonl.gz:1", b"one\n"),
        ("c.jsonl.gz:3", "café".encode()),
    ]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_single_text_is_cut_at_line_ends_and_nothing_is_lost(tmp_path, suffix):
    text = b"".join(b"line %d of a long text\r\n" % i for i in range(4000)) + b"end"
    path = tmp_path / f"book{suffix}"
    path.write_bytes(gzip.compress(text, mtime=0) if suffix.endswith("gz") else text)
    pieces = [text for _, text in documents(path)]
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") for piece in pieces[:-1])
    assert all(16_384 <= len(piece) < 16_384 + 40 for piece in pieces[:-1])
    assert make(path, tmp_path / "out")["splits"]["val"]["bytes"] > 0


@pytest.mark.parametrize("letters", ["abc def", "é€😀", "日本語"])
def test_one_long_line_is_cut_between_characters_and_shared_out(tmp_path, letters):
    path = tmp_path / "line.txt"
    data = "".join(random.Random(0).choices(letters, k=1_000_000)).encode()
    path.write_bytes(b"a line\n" + data)
    pieces = [piece for _, piece in documents(path)]
    assert b"".join(pieces) == b"a line\n" + data
    for piece in pieces:
        piece.decode()  # no character is cut
    assert {len(piece) for piece in pieces[:-1]} <= set(range(16_380, 16_400))
    assert make(path, tmp_path / "out", 0.05)["splits"]["val"]["documents"] > 0


def test_bytes_of_another_encoding_are_cut_and_kept_too(tmp_path):
    for number, data in enumerate((b"\xe9" * 99_999, b"\x80" * 99_999, b"\xff" * 99)):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(data)
        pieces = [piece for _, piece in documents(path)]
        assert b"".join(pieces) == data and all(map(len, pieces))


@pytest.mark.parametrize("ending", [b"", b"\n", b"caf\xe9", b"x" * 16_384])
def test_lines_that_fit_are_cut_as_they_always_were(tmp_path, ending):
    """A text that was prepared keeps its documents: whole lines, just over 16 KiB."""
    draw = random.Random(0)
    lines = [b"y" * draw.randrange(16_384) + b"\n" for _ in range(50)]
    path = tmp_path / "a.txt"
    path.write_bytes(b"".join([*lines, b"z" * 16_383 + b"\n", ending]))
    with path.open("rb") as file:
        wanted = [b"".join(part) for part in iter(lambda: file.readlines(16_384), [])]
    assert [piece for _, piece in documents(path)] == wanted


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.bin", b"ab\0c", "not text, NUL byte at offset 2"),
        ("a.txt.gz", gzip.compress(b"hello" * 99, mtime=0)[:-9], "cut short"),
        ("a.txt.gz", b"hello", "cannot be read"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 3}\n', 'line 2: .*string under "text"'),
        ("a.jsonl", b'["text"]\n', 'line 1: .*string under "text"'),
        ("a.jsonl", b'{"text": "a"\n', "line 1: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', "line 1: not JSON"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: .*lone surrogate"),
        ("a.jsonl", b"[" * 200_000, "line 1: not JSON"),
    ],
)
def test_what_is_not_text_is_named_and_nothing_is_written(
    tmp_path, name, data, message
):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}.*{message}") as caught:
        make(tmp_path / "texts", tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sources_without_files_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"'stdlb', wanted stdlib, .*, a file or a"):
        make("stdlb", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/.hidden").write_text("x")
    with pytest.raises(DataError, match=r"found 0 files.*\(1 hidden"):
        make(tmp_path / "empty", tmp_path / "out")


# Preparation


def test_shards_and_index_are_what_the_format_says(prepared, texts):
    index = json.loads((prepared / "index.json").read_text())
    for split in ("train", "val"):
        wanted = {
            name: text
            for name, text in sorted(texts.items())
            if belongs_to_validation(text, 0.3) == (split == "val")
        }
        meta = index["splits"][split]
        data = (prepared / split / "shard_00000.bin").read_bytes()
        header, payload = data[:64], data[64:]
        tokens = []
        offsets = []
        for text in wanted.values():
            offsets.append(len(tokens))
            tokens += [256, *text]
        assert payload == struct.pack(f"<{len(tokens)}H", *tokens)
        sha256 = hashlib.sha256(payload)
        fields = (b"M3LTOKEN", 1, 2, len(tokens), 257, sha256.digest())
        assert struct.unpack(HEADER, header) == fields
        entry = {"file": f"{split}/shard_00000.bin", "tokens": len(tokens)}
        assert meta["shards"] == [entry | {"sha256": sha256.hexdigest()}]
        assert meta["document_names"] == list(wanted)
        assert meta["document_offsets"] == offsets
        assert meta["documents"] == len(wanted) > 0
        assert meta["tokens"] == len(tokens)
        assert meta["bytes"] == sum(map(len, wanted.values()))
    assert index["tokenizer"]["fingerprint"] == TOKENIZER.fingerprint
    assert index["val_fraction"] == 0.3


def test_the_split_depends_on_content_alone(tmp_path, texts):
    """Renamed, reordered, doubled: each text stays on its side."""
    for i, text in enumerate(reversed(list(texts.values()))):
        for copy in ("a", "b"):
            path = tmp_path / f"other/{copy}{i:02d}.md"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(text)
    sides = []
    for source in ("texts", "other"):
        index = make(tmp_path / source, tmp_path / f"out-{source}")
        names = index["splits"]["val"]["document_names"]
        sides.append({(tmp_path / source / name).read_bytes() for name in names})
    assert sides[0] == sides[1]


def test_a_higher_fraction_only_adds_to_validation(tmp_path, texts):
    few, more = (
        set(make(tmp_path / "texts", tmp_path / f"{f}", f)["splits"]["val"][
            "document_names"
        ])
        for f in (0.2, 0.6)
    )  # fmt: skip
    assert few < more


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan"), True])
def test_val_fraction_must_leave_both_splits(tmp_path, texts, fraction):
    with pytest.raises(DataError, match=r"val_fraction: got .* above 0 and below 1"):
        make(tmp_path / "texts", tmp_path / "out", fraction)


@pytest.mark.parametrize(
    ("fraction", "counts", "word"),
    [
        (1e-6, "41 documents of .* 0 of 0 bytes for validation", "above"),
        (1 - 1e-6, "0 documents of 0 bytes for training and 41 of", "below"),
    ],
)
def test_an_empty_split_is_an_error_whose_advice_works(
    tmp_path, texts, fraction, counts, word
):
    with pytest.raises(DataError, match=counts) as caught:
        make(tmp_path / "texts", tmp_path / "out", fraction)
    advised = float(str(caught.value).split(f"{word} ")[1].split()[0])
    wider = advised * 1.001 if word == "above" else advised * 0.999
    splits = make(tmp_path / "texts", tmp_path / "out", wider)["splits"]
    assert splits["train"]["documents"] and splits["val"]["documents"]


def test_one_document_cannot_be_shared_out(tmp_path):
    (tmp_path / "a.txt").write_text("short\n")
    with pytest.raises(DataError, match="more documents are needed") as caught:
        make(tmp_path / "a.txt", tmp_path / "out", 0.05)
    assert str(caught.value).endswith(
        "a single file is cut into pieces of 16 KiB, and about 320 KiB of text give "
        "one of them to each split"
    )
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("short\n")
    with pytest.raises(DataError, match=r"more documents are needed$"):
        make(texts, tmp_path / "out")


def test_the_same_text_over_and_over_is_not_shared_out_either(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 16_384 * 200)
    told = r"all documents are the same text, and that is on one side$"
    with pytest.raises(DataError, match=told):
        make(tmp_path / "a.txt", tmp_path / "out")


def test_an_empty_source_is_not_the_current_folder(tmp_path, monkeypatch):
    write_texts(tmp_path / "here", 20)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(DataError, match="source: got '', wanted stdlib, "):
        make("", tmp_path / "out")


def test_what_is_prepared_is_found_and_nothing_is_written(tmp_path, texts, prepared):
    source = tmp_path / "texts"

    def asked(out, fraction=0.3):
        return prepared_in(source, "byte", out, val_fraction=fraction, progress=quiet)

    before = folder_bytes(tmp_path)
    assert asked(prepared) == prepared
    assert not asked(prepared, 0.4)
    assert not asked(tmp_path / "nothing")
    with pytest.raises(DataError, match="lies inside the source"):
        asked(source / "out")
    assert folder_bytes(tmp_path) == before
    assert not (tmp_path / "nothing").exists()
    (source / "new.txt").write_text("one more")
    assert not asked(prepared)


def prepare_more(source, out, **options):
    (source / "sub/new.txt").write_text("one more")
    return make(source, out, **options)


OTHER_DATA = {
    "another fraction": lambda source, out: make(source, out, 0.5),
    "an edited text": prepare_more,
}


@pytest.mark.parametrize("how", OTHER_DATA)
def test_other_data_never_replace_what_was_prepared(tmp_path, prepared, how):
    """A run may have been trained on it; the refusal names both."""
    before = folder_bytes(prepared)
    with pytest.raises(DataError) as caught:
        OTHER_DATA[how](tmp_path / "texts", prepared)
    there, asked = re.findall(r"text ([0-9a-f]{12}), tokenizer byte, val_fraction "
                              r"(0\.[35])", str(caught.value))  # fmt: skip
    index = json.loads(before["index.json"])
    assert there == (index["source"]["sha256"][:12], "0.3") != asked
    assert str(caught.value).endswith("choose another folder, or remove that one")
    assert "\n" not in str(caught.value)
    assert folder_bytes(prepared) == before


def test_other_data_have_a_folder_beside_and_find_it_again(tmp_path, prepared):
    source, before = tmp_path / "texts", folder_bytes(prepared)

    def beside():
        options = {"val_fraction": 0.3, "progress": quiet}
        folder, index = prepare_beside(source, "byte", prepared, **options)
        assert index == json.loads((folder / "index.json").read_text())
        assert prepared_in(source, "byte", prepared, **options) == folder
        return folder

    assert beside() == prepared
    (source / "latin.txt").write_text("edited")
    once = beside()
    assert re.fullmatch("out-[0-9a-f]{8}", once.name) and once.parent == prepared.parent
    assert beside() == once
    (source / "latin.txt").write_text("edited again")
    assert beside() not in (once, prepared)
    (source / "latin.txt").write_bytes(write_texts(tmp_path / "same", 0)["latin.txt"])
    assert beside() == prepared
    assert folder_bytes(prepared) == before


SOMEBODYS = {
    "a shard of old": "train/shard_0.bin",
    "a shard by name": "val/shard_00000.bin",
    "a hidden file": "train/.notes",
    "a folder": "val/notes/mine.txt",
}


@pytest.mark.parametrize("name", SOMEBODYS.values(), ids=SOMEBODYS)
def test_files_of_somebody_are_never_deleted(tmp_path, texts, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_bytes(b"years of work")
    with pytest.raises(
        DataError, match=r"out: .*out is not a prepared folder .*; choo"
    ):
        make(tmp_path / "texts", tmp_path / "out")
    assert folder_bytes(tmp_path / "out") == {name: b"years of work"}


def test_what_a_killed_preparation_left_is_known_by_its_mark(tmp_path, texts):
    """Its shards are cleared away; files of others in the same folder are not."""
    make(tmp_path / "texts", tmp_path / "whole")
    out = tmp_path / "out"
    make(tmp_path / "texts", out, 0.6)
    (out / "index.json").unlink()
    (out / "train/shard_00007.bin").write_bytes(b"M3LTOKEN and more")
    (out / "train/shard_0.bin").write_bytes(b"years of work")
    (out / ".mamba3lite-unfinished").touch()
    make(tmp_path / "texts", out)
    mine = {"train/shard_0.bin": b"years of work"}
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole") | mine
    (out / "index.json").unlink()
    (out / ".mamba3lite-unfinished").touch()
    (out / "val/shard_00000.bin").write_bytes(b"years of work")
    with pytest.raises(DataError, match=r"val/shard_00000\.bin is no shard"):
        make(tmp_path / "texts", out)
    assert (out / "val/shard_00000.bin").read_bytes() == b"years of work"


@pytest.mark.parametrize("name", ["index.json", "train/shard_00000.bin"])
def test_nothing_is_written_through_a_planted_link(tmp_path, texts, name):
    """The temporary names of before could be guessed."""
    (tmp_path / "precious").write_text("years of work")
    planted = (tmp_path / "out" / name).with_suffix(".tmp")
    planted.parent.mkdir(parents=True)
    planted.symlink_to(tmp_path / "precious")
    if name == "index.json":
        make(tmp_path / "texts", tmp_path / "out")
    else:
        with pytest.raises(DataError, match="not a prepared folder"):
            make(tmp_path / "texts", tmp_path / "out")
    assert (tmp_path / "precious").read_text() == "years of work"
    assert planted.is_symlink()


def test_readers_of_prepared_data_take_no_lock(tmp_path, texts, prepared):
    with locked(prepared / "prepare.lock", pytest.fail):
        index = make(tmp_path / "texts", prepared)
    assert index == json.loads((prepared / "index.json").read_text())


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_one_line(tmp_path, texts, monkeypatch, number):
    def refuse(descriptor, operation):
        raise OSError(number, os.strerror(number))

    make(tmp_path / "texts", tmp_path / "whole")
    monkeypatch.setattr(fcntl, "flock", refuse)
    notes, out = [], tmp_path / "out"
    prepare(tmp_path / "texts", "byte", out, val_fraction=0.3,
            progress=lambda *state: notes.append(state[0]))  # fmt: skip
    told = [note for note in notes if "locks" in note]
    assert told == [
        f"[warn] {out}: no locks on this file system; nothing keeps a second process "
        "from writing here at the same time"
    ]
    assert folder_bytes(out) == folder_bytes(tmp_path / "whole")


def test_a_bad_source_leaves_the_former_preparation_alone(tmp_path, prepared):
    before = folder_bytes(prepared)
    (tmp_path / "texts/bad.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        make(tmp_path / "texts", prepared)
    assert folder_bytes(prepared) == before


@pytest.mark.parametrize("out", ["", "."])
def test_data_get_a_folder_of_their_own(tmp_path, texts, monkeypatch, out):
    """An empty name is an unset variable; it would fill the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"out: got the current folder"):
        prepare(texts, "byte", out, val_fraction=0.3)
    assert not (tmp_path / "index.json").exists()


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, texts):
    def meddle(stage, files, n_files, tokens):
        if stage == "writing" and files == 1:
            (tmp_path / "texts/sub/039.txt").write_text("changed")

    with pytest.raises(DataError, match="changed while they were read"):
        prepare(tmp_path / "texts", "byte", tmp_path / "out", val_fraction=0.3,
                progress=meddle)  # fmt: skip
    assert folder_bytes(tmp_path / "out") == {}


def test_output_folders_that_cannot_be_used_are_named(tmp_path, texts):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="file: cannot be written"):
        make(tmp_path / "texts", tmp_path / "file")
    with pytest.raises(DataError, match="lies inside the source"):
        make(tmp_path / "texts", tmp_path / "texts/out")
    (tmp_path / "index.json").write_text('{"mine": 1}')
    with pytest.raises(
        DataError, match="not an index of prepared data; choose another"
    ):
        make(tmp_path / "texts", tmp_path)
    assert (tmp_path / "index.json").read_text() == '{"mine": 1}'


def test_a_second_preparation_at_the_same_time_is_refused(tmp_path, texts):
    refusals = []

    def second(stage, files, n_files, tokens):
        if stage == "writing" and not refusals:
            with pytest.raises(DataError) as caught:
                make(tmp_path / "texts", tmp_path / "out")
            refusals.append(str(caught.value))

    prepare(tmp_path / "texts", "byte", tmp_path / "out", val_fraction=0.3,
            progress=second)  # fmt: skip
    assert refusals == [f"{tmp_path / 'out'}: another preparation is writing here"]
    TokenStream(tmp_path / "out", "train")


def test_progress_off_a_terminal_is_plain_lines_with_rates(tmp_path, texts, capfd):
    prepare(tmp_path / "texts", "byte", tmp_path / "out", val_fraction=0.3)
    prepare(tmp_path / "texts", "byte", tmp_path / "out", val_fraction=0.3)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        *("reading", "writing"),
        *("reading", "already prepared"),
    ]
    assert "41/41 files" in lines[1]
    assert " files/s" in lines[1] and " tokens/s" in lines[1]


KILLED_EVERYWHERE = """
import os, pathlib, shutil, signal, sys
import mamba3lite.data.prepare as p
from mamba3lite.data import DataError
from mamba3lite.data.shards import load_index, open_shard

source, out = sys.argv[1], pathlib.Path(sys.argv[2])
p.SHARD_TOKENS = 500
quiet = lambda *state: None
run = lambda f: p.prepare(source, "byte", out, val_fraction=f, progress=quiet)
seen = lambda: {str(x.relative_to(out)): x.read_bytes()
                for x in sorted(out.rglob("*"))
                if x.is_file() and x.name != "prepare.lock"}

def kill_at(moment):
    left = [moment]
    def hook(event, args):
        if event in ("open", "os.rename", "os.remove", "os.mkdir"):
            if str(out) in str(args[0]):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

run(0.3)
wanted = seen()
former = {}
if sys.argv[3] == "damaged":
    former = dict(wanted)
    for name in list(former):
        if "shard" in name:
            former[name] = former[name][:-1] + b"?"
moment = kills = 0
while True:
    shutil.rmtree(out)
    for name, data in former.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    child = os.fork()
    if not child:
        kill_at(moment)
        run(0.3)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert status == 0
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills += 1
    try:
        for split in load_index(out)["splits"].values():
            for entry in split["shards"]:
                open_shard(out, entry, 257)
    except DataError as error:
        told = "have sha256" if former else "no prepared data"
        assert told in str(error), error
    else:
        marks = (".tmp-", ".mamba3lite-unfinished")
        left = {name for name in seen() if not any(mark in name for mark in marks)}
        assert left == set(wanted)
    run(0.3)
    assert seen() == wanted, moment
    moment += 1
assert seen() == wanted
print(kills)
"""


@pytest.mark.parametrize("former", ["nothing", "damaged"])
def test_killed_anywhere_and_run_again_gives_identical_bytes(tmp_path, texts, former):
    """SIGKILL at every open, rename and removal, where nothing or something bad is."""
    command = [sys.executable, "-c", KILLED_EVERYWHERE]
    command += [str(tmp_path / "texts"), str(tmp_path / "out"), former]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


DISK_FULL = """
import resource, sys
from mamba3lite.data.prepare import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
prepare(sys.argv[1], "byte", sys.argv[2], val_fraction=0.3, progress=lambda *s: None)
"""


def test_a_full_disk_is_named_and_leaves_no_litter(tmp_path):
    write_texts(tmp_path / "texts", 400)
    command = [sys.executable, "-c", DISK_FULL, tmp_path / "texts", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    assert "DataError" in last and "cannot be written (File too large)" in last
    assert "Exception ignored" not in done.stderr
    assert folder_bytes(tmp_path / "out") == {}


@pytest.mark.parametrize("absent", ["fcntl resource", "torch"])
def test_preparation_needs_no_torch_and_not_what_windows_lacks(tmp_path, texts, absent):
    code = f"""if True:
        import sys
        for name in {absent!r}.split():
            sys.modules[name] = None
        from mamba3lite.data.prepare import prepare
        prepare(*sys.argv[1:], val_fraction=0.3, progress=lambda *state: None)
        """
    out = tmp_path / "out"
    command = [sys.executable, "-c", code, str(tmp_path / "texts"), "byte", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    make(tmp_path / "texts", tmp_path / "again")
    assert folder_bytes(out) == folder_bytes(tmp_path / "again")


# Shards and their faults


@given(cut=st.integers(19, 600), start=st.integers(0, 999), length=st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_a_stream_does_not_depend_on_where_shards_end(
    tmp_path_factory, cut, start, length
):
    folder = tmp_path_factory.mktemp("cut")
    texts = write_texts(folder / "texts", 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "SHARD_TOKENS", cut)
        make(folder / "texts", folder / "out")
    stream = TokenStream(folder / "out", "train")
    wanted = []
    for _, text in sorted(texts.items()):
        if not belongs_to_validation(text, 0.3):
            wanted += [256, *text]
    assert len(stream) == len(wanted)
    assert len(stream.shards) == -(-len(wanted) // cut)
    start = min(start, len(wanted))
    stop = min(start + length, len(wanted))
    assert stream.tokens(start, stop).tolist() == wanted[start:stop]
    with pytest.raises(IndexError, match="allowed are 0 to"):
        stream.tokens(0, len(wanted) + 1)


@pytest.mark.parametrize(("vocab_size", "size"), [(65536, 2), (65537, 4)])
def test_tokens_take_two_bytes_while_the_vocabulary_fits(tmp_path, vocab_size, size):
    ids = np.array([0, 1, 65535, vocab_size - 1])
    (tmp_path / "s").mkdir()
    writer = ShardWriter(tmp_path / "s/shard_00000.bin", vocab_size)
    writer.append(ids)
    entry = writer.finish()
    assert (tmp_path / entry["file"]).stat().st_size == 64 + 4 * size
    assert open_shard(tmp_path, entry, vocab_size).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (np.array([65_536]), "got values from 65536 to 65536, allowed are 0 to 65535"),
        (np.array([3, 70_000]), "got values from 3 to 70000"),
        (np.array([-1, 5]), "got values from -1 to 5"),
        (np.array([2**64 - 1], np.uint64), "got values from 1844"),
        (np.array([1.0, 2.5]), "got float64, wanted integers"),
        (np.array([True]), "got bool, wanted integers"),
        (np.array([2**70]), "got object, wanted integers"),
    ],
)
def test_ids_that_a_cast_would_change_are_refused(tmp_path, ids, error):
    writer = ShardWriter(tmp_path / "shard_00000.bin", 65_536)
    writer.append(np.array([65_535]))
    with pytest.raises((TypeError, ValueError), match=error):
        writer.append(ids)
    writer.append(np.array([]))
    assert writer.n_tokens == 1
    writer.finish()
    data = (tmp_path / "shard_00000.bin").read_bytes()
    assert data[64:] == b"\xff\xff"


def rewrite(path: Path, **changes) -> None:
    """Change header fields of a shard, leaving the payload."""
    names = ("magic", "version", "itemsize", "n_tokens", "vocab_size", "sha256")
    data = path.read_bytes()
    fields = dict(zip(names, struct.unpack(HEADER, data[:64]), strict=True)) | changes
    path.write_bytes(struct.pack(HEADER, *fields.values()) + data[64:])


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])


FAULTS = {
    "flipped token": (lambda p: flip(p, 100), "tokens have sha256 .* wanted"),
    "flipped last bit": (lambda p: flip(p, -1), "tokens have sha256 .* wanted"),
    "truncated": (lambda p: cut(p, 264), r"found 200 bytes of tokens, wanted [\d,]+"),
    "odd bytes": (
        lambda p: p.write_bytes(p.read_bytes() + b"x"),
        r"bytes of tokens, 1 odd, wanted [\d,]+",
    ),
    "empty": (lambda p: cut(p, 0), "found 0 bytes, a header alone has 64"),
    "half a header": (lambda p: cut(p, 40), "found 40 bytes, a header alone has 64"),
    "magic": (
        lambda p: rewrite(p, magic=b"NUMPYNPY"),
        "magic b'NUMPYNPY', wanted b'M3LTOKEN'",
    ),
    "version": (lambda p: rewrite(p, version=2), "format version 2, wanted 1"),
    "dtype": (lambda p: rewrite(p, itemsize=4), "bytes per token 4, wanted 2"),
    "count": (lambda p: rewrite(p, n_tokens=7), r"says tokens 7, wanted \d+"),
    "vocabulary": (lambda p: rewrite(p, vocab_size=50257), "50257, wanted 257"),
    "hash": (lambda p: rewrite(p, sha256=bytes(32)), "sha256 000000000000.*index"),
    "missing": (lambda p: p.unlink(), "cannot be read .No such file"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_damaged_shard_is_named_and_prepare_repairs_it(
    tmp_path, prepared, fault, split
):
    before = folder_bytes(prepared)
    damage, message = FAULTS[fault]
    damage(prepared / split / "shard_00000.bin")
    with pytest.raises(DataError, match=message) as caught:
        PretrainDataset(prepared, 8, 0, split)
    assert str(caught.value).startswith(str(prepared / split / "shard_00000.bin: "))
    run = f"`mamba3lite prepare --source SOURCE --out {prepared}`"
    assert str(caught.value).endswith(
        f"; {run}, with the SOURCE that it came from, replaces it"
    )
    assert "\n" not in str(caught.value)
    notes = []
    prepare(tmp_path / "texts", "byte", prepared, val_fraction=0.3,
            progress=lambda *state: notes.append(state[0]))  # fmt: skip
    assert any("replacing what is there" in note for note in notes)
    assert folder_bytes(prepared) == before


def test_a_token_beyond_the_vocabulary_is_refused_even_with_a_good_hash(prepared):
    index = json.loads((prepared / "index.json").read_text())
    path = prepared / "train/shard_00000.bin"
    writer = ShardWriter(path, 258)
    writer.append(np.array([256, 65, 257, 66]))
    index["splits"]["train"] |= {"shards": [writer.finish()], "tokens": 4}
    rewrite(path, vocab_size=257)
    save_index(prepared, index)
    message = r"train/shard_00000.bin: found token 257, .* vocabulary size 257"
    with pytest.raises(DataError, match=message):
        TokenStream(prepared, "train")


def test_shards_that_do_not_add_up_to_the_index_are_refused(prepared):
    index = json.loads((prepared / "index.json").read_text())
    n_tokens = index["splits"]["train"]["tokens"]
    index["splits"]["train"]["tokens"] += 1
    save_index(prepared, index)
    message = f"hold {n_tokens:,} tokens, the index wants {n_tokens + 1:,}"
    with pytest.raises(DataError, match=message):
        TokenStream(prepared, "train")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text.replace('"bytes": ', '"bytes": 1', 1), "its own sha256"),
        (lambda text: text[:-20], "not JSON"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "2, wanted 1"),
        (lambda text: "[]", "wants a JSON object"),
        (lambda text: "{}", "not an index"),
        (lambda text: "\0\xff", "not JSON"),
    ],
)
def test_a_damaged_index_is_named(prepared, damage, message):
    path = prepared / "index.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(DataError, match=rf"index\.json: .*{message}"):
        TokenStream(prepared, "train")


@pytest.mark.parametrize("exists", [False, True])
def test_a_missing_preparation_says_what_to_run(tmp_path, exists):
    folder = tmp_path / "no data"
    if exists:
        folder.mkdir()
    with pytest.raises(DataError) as caught:
        PretrainDataset(folder, 8, 0)
    assert f"run `mamba3lite prepare --source stdlib --out '{folder}'`" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)


def test_too_short_data_is_an_error_with_counts(prepared):
    n_tokens = len(TokenStream(prepared, "train"))
    assert PretrainDataset(prepared, n_tokens - 1, 0).n_windows == 1
    message = f"train has {n_tokens:,} tokens in .* wanted {n_tokens + 1:,} or more"
    with pytest.raises(DataError, match=message):
        PretrainDataset(prepared, n_tokens, 0)
    with pytest.raises(ValueError, match="seq_len: got 0"):
        PretrainDataset(prepared, 0, 0)
    with pytest.raises(ValueError, match="allowed are train, val"):
        PretrainDataset(prepared, 8, 0, "test")


def test_validation_shorter_than_a_window_is_evaluated_but_not_trained_on(prepared):
    val = PretrainDataset(prepared, 10_000, 0, "val")
    ((tokens, targets, _),) = val.eval_batches(4)
    assert tokens.shape == (1, 10_000)
    assert (targets != -100).sum() == val.n_tokens - 1
    with pytest.raises(DataError, match="no whole window of 10000"):
        val.batch(0, range(1), 1)


# The order of windows


@given(
    n=st.integers(1, 3000), seed=st.integers(-(2**63), 2**64), epoch=st.integers(0, 99)
)
def test_an_epoch_visits_every_window_once(n, seed, epoch):
    places = np.arange(n)
    assert sorted(permuted(places, n, seed, epoch).tolist()) == places.tolist()


def test_a_large_epoch_visits_every_window_once():
    n = 1_000_003
    seen = np.zeros(n, bool)
    seen[permuted(np.arange(n), n, 5, 2)] = True
    assert seen.all()


@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 2**32))
def test_seed_and_epoch_give_orders_of_their_own(seed, epoch):
    places = np.arange(500)
    orders = [
        permuted(places, 500, seed, epoch),
        permuted(places, 500, seed + 1, epoch),
        permuted(places, 500, seed, epoch + 1),
        permuted(places, 500, seed + 1, epoch + 1),
    ]
    # Two random orders agree at one place on average; 20 has odds below 1e-18.
    for i, one in enumerate(orders):
        assert all((one == other).sum() < 20 for other in orders[:i])


@pytest.mark.parametrize("n", [2, 3, 5, 17, 100])
def test_every_window_is_as_likely_at_every_place(n):
    """Pearson's chi-square over 3000 epochs, at each place, within 6 deviations."""
    n_epochs = 3000
    places, epochs = np.tile(np.arange(n), n_epochs), np.repeat(np.arange(n_epochs), n)
    orders = permuted(places, n, 0, epochs).reshape(n_epochs, n)
    expected = n_epochs / n
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < (n - 1) + 6 * np.sqrt(2 * (n - 1))


def test_neighbors_do_not_stay_neighbors():
    """Mean distance of successive windows: n/3 for a random order (+- 1 %)."""
    order = permuted(np.arange(100_000), 100_000, 0, 0)
    assert np.abs(np.diff(order)).mean() == pytest.approx(100_000 / 3, rel=0.01)
    # The correlation with the identity has deviation n ** -0.5 = 0.0032.
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.016


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_global_batch_does_not_depend_on_the_world(prepared, world):
    data = PretrainDataset(prepared, 16, seed=3)
    for position in (0, 1, 7, 10**9):
        whole = data.batch(position, range(8), 8)
        share = 8 // world
        parts = [
            data.batch(position, range(rank * share, (rank + 1) * share), 8)
            for rank in range(world)
        ]
        for tensor, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert tensor.dtype == torch.int64
            assert torch.equal(tensor, torch.cat(pieces))


def test_batches_walk_through_whole_epochs(prepared):
    """A batch may lie across the end of an epoch, and none is lost or doubled."""
    data = PretrainDataset(prepared, 16, seed=3)
    n, rows = data.n_windows, 7
    assert n % rows
    windows = torch.cat([data.batch(p, range(rows), rows)[3] for p in range(n)])
    epochs = windows.reshape(rows, n)  # n batches of 7 rows are 7 epochs of n windows
    assert all(torch.equal(e.sort().values, torch.arange(n)) for e in epochs)
    assert len({tuple(e.tolist()) for e in epochs}) == rows


def test_a_batch_larger_than_an_epoch_wraps(prepared):
    data = PretrainDataset(prepared, len(TokenStream(prepared)) // 2 - 1, seed=0)
    assert data.n_windows == 2
    ids = data.batch(0, range(6), 6)[3]
    assert ids.reshape(3, 2).sum(1).tolist() == [1, 1, 1]


def test_a_batch_is_its_windows_and_the_targets_come_one_later(prepared):
    data = PretrainDataset(prepared, 16, seed=11)
    stream = data.stream.tokens(0, data.n_tokens)
    tokens, targets, doc_ids, windows = data.batch(4, [5, 0, 3], 6)
    assert tokens.shape == targets.shape == doc_ids.shape == (3, 16)
    for row, window in enumerate(windows.tolist()):
        start = window * 16
        assert tokens[row].tolist() == stream[start : start + 16].tolist()
        assert targets[row].tolist() == stream[start + 1 : start + 17].tolist()


@pytest.mark.parametrize(
    ("position", "rows", "message"),
    [
        (-1, [0], "position: got -1"),
        (0, [4], r"rows: got \[4\], wanted some of 0 to 3"),
        (0, [-1], "rows: got"),
        (0, [], "rows: got"),
    ],
)
def test_batches_that_do_not_exist_are_refused(prepared, position, rows, message):
    with pytest.raises(ValueError, match=message):
        PretrainDataset(prepared, 16, 0).batch(position, rows, 4)


def test_a_shifted_batch_begins_where_smaller_or_larger_ones_ended(prepared):
    data = PretrainDataset(prepared, 16, 0)
    order = data.batch(0, range(24), 24)[3].tolist()
    # Three batches of 4 rows, then the batches 3 and 4 of 6: 12 = shift + 3 * 6.
    after = [data.batch(p, range(6), 6, shift=-6)[3].tolist() for p in (3, 4)]
    assert after == [order[12:18], order[18:24]]
    with pytest.raises(ValueError, match=r"position: got 0 \(shift -6\)"):
        data.batch(0, range(6), 6, shift=-6)


# Documents and evaluation


def test_doc_ids_change_at_the_eos_that_opens_a_document(prepared):
    data = PretrainDataset(prepared, 37, seed=0)
    tokens, _, doc_ids, _ = data.batch(0, range(data.n_windows), data.n_windows)
    for row, ids in zip(tokens.tolist(), doc_ids.tolist(), strict=True):
        document, wanted = 0, []
        for token in row:
            if token == 256:
                document += 1
            wanted.append(document)
        assert ids == wanted
    assert doc_ids.max() > 1


@given(seq_len=st.integers(1, 700), batch_rows=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_evaluation_meets_every_target_once_and_nothing_else(
    evaluated, seq_len, batch_rows
):
    """Against a loop over the stream: (token before, target) pairs, in order."""
    data = PretrainDataset(evaluated, seq_len, 0, "val")
    stream = data.stream.tokens(0, data.n_tokens).tolist()
    pairs, eos_targets = [], 0
    for tokens, targets, doc_ids in data.eval_batches(batch_rows):
        assert tokens.shape == targets.shape == doc_ids.shape
        assert tokens.shape[1] == seq_len and len(tokens) <= batch_rows
        assert tokens.min() >= 0 and tokens.max() < data.vocab_size
        assert torch.equal(doc_ids, (tokens == 256).cumsum(1))
        valid = targets != -100
        pairs += zip(tokens[valid].tolist(), targets[valid].tolist(), strict=True)
        eos_targets += int((targets == 256).sum())
    assert pairs == list(pairwise(stream))
    assert len(pairs) - eos_targets == data.n_bytes
    assert eos_targets == data.stream.meta["documents"] - 1


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    write_texts(folder / "texts", 40)
    make(folder / "texts", folder / "out")
    return folder / "out"


def test_chosen_evaluation_windows_are_those_windows(evaluated):
    data = PretrainDataset(evaluated, 16, 0, "val")
    everything = [torch.cat(part) for part in zip(*data.eval_batches(3), strict=True)]
    chosen = [data.n_eval_windows - 1, 0, 4]
    some = [torch.cat(part) for part in zip(*data.eval_batches(2, chosen), strict=True)]
    for one, all_of_them in zip(some, everything, strict=True):
        assert torch.equal(one, all_of_them[chosen])
    with pytest.raises(ValueError, match=r"windows: got 99999, allowed are 0 to \d+"):
        list(data.eval_batches(2, [99999]))
    with pytest.raises(ValueError, match="batch_rows: got 0"):
        next(data.eval_batches(0))


def test_the_fingerprint_changes_with_anything_that_was_prepared(tmp_path, texts):
    source = tmp_path / "texts"
    prints = []
    for out, fraction in (("a", 0.3), ("b", 0.3), ("c", 0.4)):
        make(source, tmp_path / out, fraction)
        prints.append(PretrainDataset(tmp_path / out, 8, 0).fingerprint)
    (source / "latin.txt").write_text("one byte more")
    make(source, tmp_path / "d")
    prints.append(PretrainDataset(tmp_path / "d", 8, 0).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


# The yardstick


def test_zlib_figure_is_bits_of_one_stream_per_byte(stdlib):
    folder, index = stdlib
    val = PretrainDataset(folder, 256, 0, "val")
    root = Path(sysconfig.get_path("stdlib"))
    names = index["splits"]["val"]["document_names"]
    text = b"".join((root / name).read_bytes() for name in names)
    assert val.text_bytes() == text and val.n_bytes == len(text)
    coder = zlib.compressobj(level=9)
    stream = b"".join(coder.compress(bytes([byte])) for byte in text) + coder.flush()
    assert zlib_bits_per_byte(text) == pytest.approx(8 * len(stream) / len(text))
    noise = np.random.default_rng(0).bytes(100_000)
    assert 8 < zlib_bits_per_byte(noise) < 8.01, "nothing is gained on noise"
    with pytest.raises(ValueError, match="got 0 bytes"):
        zlib_bits_per_byte(b"")
