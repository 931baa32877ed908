"""Where a file being written lies: beside its name until it is published, under its name from then on.

What is to become an object in storage lies in a temporary file until it is complete, and is then uploaded.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
import tempfile
from os import PathLike
from pathlib import Path

from ..errors import InputError
from ..staged import upload
from ..urls import check_writable, is_url, plain, shown
from .disk import DiskFile, sync_directory
from .recordlog import RecordLog


class Target:
    """The file of a writer.

    log
        Its record log, which writes to it.
    published
        It has its name: others may have it open, and what is synced stays whatever happens.
    """

    def __init__(self, path: Path, log: RecordLog, temporary: Path | None = None, lock: bool = True) -> None:
        self.path = path
        self.log = log
        self._temporary = temporary
        self._lock = lock

    @staticmethod
    def new(path: Path, salt: bytes, lock: bool) -> Target:
        """A new file that will be ``path``.  Raises OSError where there can be none."""
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory; name a file", str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path.parent))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        return Target(path, RecordLog(DiskFile(temporary, "xb"), salt), temporary, lock)

    @property
    def published(self) -> bool:
        return self._temporary is None

    def check_flush(self) -> None:
        """Refuse flushing where nothing can be published before it is complete."""

    def publish(self) -> None:
        """Give the file its name, with all that is written so far; no effect if it has it.

        Raises :class:`InputError` (``lock-unsupported``) and OSError, with the file as it was.
        """
        if self._temporary is None:
            return
        self.log.sync()
        if sys.platform == "win32":  # pragma: no cover (one platform)
            # An open file cannot be renamed there.
            self.log.disk.close()
            self._temporary.replace(self.path)
            self.log.disk = DiskFile(self.path, "r+b")
            if self._lock:
                self.log.disk.lock(self.path)
        else:
            if self._lock:
                self.log.disk.lock(self.path)
            self._temporary.replace(self.path)
        self._temporary = None
        self.log.durable = True
        sync_directory(self.path.parent)

    def complete(self) -> None:
        """Write the INDEX, close the file, and give it its name."""
        self.log.close()
        self.log.sync()
        self.log.disk.close()
        if self._temporary is not None:
            self._temporary.replace(self.path)
            sync_directory(self.path.parent)

    def leave(self, whole: bool) -> None:
        """Close the file without anything more; a file that has no name yet is removed.

        With ``whole`` a published file whose log is not broken still gets its INDEX.
        """
        # A full disk fails again; the file is closed all the same.
        with contextlib.suppress(OSError):
            if self.published and whole and not self.log.broken:
                self.log.close()
        with contextlib.suppress(OSError):
            self.log.disk.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                self._temporary.unlink()


class UploadedTarget(Target):
    """An object in storage: written to a temporary file, uploaded when it is complete, whole or not at all."""

    path: str  # type: ignore[assignment]  # of the object, to show to people

    def __init__(self, url: str, salt: bytes) -> None:
        check_writable(url)
        handle, name = tempfile.mkstemp(prefix="dqkv-", suffix=".partial")
        os.close(handle)
        super().__init__(Path(name), RecordLog(DiskFile(Path(name), "r+b"), salt), Path(name))
        self.path = shown(url)
        self._url = url

    def check_flush(self) -> None:
        raise InputError(
            f"{self.path}: objects in storage cannot grow, so there is nothing to flush to; close the writer, or write "
            "to a file of this machine",
            code="url-flush",
            path=self.path,
        )

    def publish(self) -> None:
        self.check_flush()

    def complete(self) -> None:
        assert self._temporary is not None
        self.log.close()
        self.log.disk.close()
        upload(self._temporary, self._url)
        self._temporary.unlink()


def new_target(path: str | PathLike[str], salt: bytes, lock: bool) -> Target:
    """A new file at a path, or a new object at a URL.  Raises OSError and what :func:`check_writable` raises."""
    name = plain(path)
    return UploadedTarget(name, salt) if is_url(name) else Target.new(Path(os.path.realpath(name)), salt, lock)
