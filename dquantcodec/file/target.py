"""Where a file being written lies: beside its name until it is published, under its name from then on."""

from __future__ import annotations

import contextlib
import errno
import secrets
import sys
from pathlib import Path

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
