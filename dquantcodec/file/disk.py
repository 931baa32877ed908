"""The few things a writer asks of the system: write somewhere, sync, how long, close; and the lock of one writer.

Everything goes through :class:`Disk`, so that tests can put a failing one in its place.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..errors import InputError

#: Errors of systems that have no locks for a file, as opposed to a lock that another holds.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
#: Buffers of one write: IOV_MAX of Linux and of macOS.
MOST_BUFFERS = 1024
#: Where Windows locks a byte; far behind every file, because its locks forbid reading what they cover.
_LOCKED_BYTE = 1 << 62


class Disk(Protocol):
    """A file open for writing."""

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        """Write a beginning of ``buffers``, none of them empty, from ``offset`` on and say how many bytes."""

    def sync(self) -> None:
        """Return when everything written is on the medium."""

    def size(self) -> int: ...

    def lock(self, path: Path) -> None:
        """Take the lock of the one writer, which ends when the file is closed, however that happens.

        Raises :class:`InputError` (``file-locked``, ``lock-unsupported``).
        """

    def close(self) -> None: ...


class DiskFile:
    """A :class:`Disk` of the file system.  ``mode`` is ``"xb"`` for a new file, ``"r+b"`` for one that is there."""

    def __init__(self, path: Path, mode: str) -> None:
        self._file = path.open(mode, buffering=0)

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        some = buffers[:MOST_BUFFERS]
        if hasattr(os, "pwritev"):
            # One call a record: nothing is joined here, and the kernel can take memory for the file in large pieces.
            return os.pwritev(self._file.fileno(), some, offset)
        self._file.seek(offset)
        return self._file.write(some[0] if len(some) == 1 else b"".join(some)) or 0

    def sync(self) -> None:
        if sys.platform == "darwin":  # pragma: no cover (one platform)
            import fcntl

            # Only this asks the drive itself; file systems that do not know it fail.
            try:
                fcntl.fcntl(self._file.fileno(), fcntl.F_FULLFSYNC)
                return
            except OSError:
                pass
        os.fsync(self._file.fileno())

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()

    def names(self, path: Path) -> bool:
        """Whether ``path`` still is this file, and not another that took its name."""
        return os.path.samestat(os.fstat(self._file.fileno()), path.stat())

    def lock(self, path: Path) -> None:
        try:
            if sys.platform == "win32":  # pragma: no cover (one platform)
                import msvcrt

                self._file.seek(_LOCKED_BYTE)
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                # Not lockf: a process loses those locks when it closes any other handle of the file.
                fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise InputError(
                    f"{path}: its file system has no locks; say lock=False if nobody else writes to it",
                    code="lock-unsupported",
                    path=str(path),
                ) from None
            raise InputError(
                f"{path}: another writer has it open; wait until it is closed", code="file-locked", path=str(path)
            ) from None


def sync_directory(directory: Path) -> None:
    """Make a rename durable, where the system lets directories be synced."""
    if not hasattr(os, "O_DIRECTORY"):  # pragma: no cover (one platform)
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
