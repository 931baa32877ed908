"""What there is under a path or a URL: whether, which files, and which version of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .remote import RemoteBytes
from .urls import base_name, filesystem, is_url, plain, scheme, storage

#: What storage calls the version of an object, best first.
_VERSIONS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "mtime", "LastModified", "last_modified", "Last-Modified",
    "created",
)  # fmt: skip


def exists(name: str) -> bool:
    """Whether there is a file or object of that name."""
    if not is_url(name):
        return Path(name).is_file()
    fs, path = filesystem(name)
    with storage(name):
        fs.invalidate_cache(fs._parent(path))
        return bool(fs.isfile(path))


def size_of(name: str) -> int:
    """Bytes of a file or object.  Raises OSError."""
    return RemoteBytes(name).size if is_url(name) else Path(plain(name)).stat().st_size


def is_folder(name: str) -> bool:
    """Whether there are files below ``name``; web addresses never are folders."""
    if not is_url(name):
        return Path(name).is_dir()
    if scheme(name).startswith("http"):
        return False
    fs, path = filesystem(name)
    with storage(name):
        fs.invalidate_cache(path)
        return bool(fs.isdir(path))


def listing(folder: str) -> list[str]:
    """Names of the files right in ``folder`` (a path or a URL), sorted, those that begin with a dot left out."""
    if not is_url(folder):
        names = [entry.name for entry in Path(folder).iterdir() if entry.is_file()]
    else:
        fs, path = filesystem(folder)
        with storage(folder):
            fs.invalidate_cache(path)
            names = [base_name(entry["name"]) for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
    return sorted(name for name in names if not name.startswith("."))


def stamp(name: str) -> list[Any]:
    """What tells a file from what it was before: its name, size, and what its storage says of its version.

    ``[name, bytes, version]``: the time of the last change in nanoseconds for a path, an ETag, checksum or time for an
    object, and None where the storage tells none.
    """
    if not is_url(name):
        status = Path(name).stat()
        return [Path(name).name, status.st_size, status.st_mtime_ns]
    info = RemoteBytes(name).info
    version = next((info[word] for word in _VERSIONS if info.get(word) is not None), None)
    return [base_name(name), int(info["size"]), None if version is None else str(version)]
