"""Reason codes of every error that a command may end with, those of the system among them."""

from __future__ import annotations

import errno

from ..errors import DeviceError, DQuantError

_SYSTEM_CODES = {
    errno.ENOENT: "not-found",
    errno.EACCES: "no-permission",
    errno.EPERM: "no-permission",
    errno.EROFS: "no-permission",
    errno.EISDIR: "is-folder",
    errno.ENOTDIR: "not-folder",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EFBIG: "disk-full",
}


def code_of(error: Exception) -> str:
    """The stable reason code of ``error``; ``"internal"`` for what should not happen."""
    if isinstance(error, (DQuantError, DeviceError)):
        return error.code
    if isinstance(error, OSError):
        return _SYSTEM_CODES.get(error.errno or 0, "io")
    if isinstance(error, MemoryError):
        return "no-memory"
    return "not-installed" if isinstance(error, ModuleNotFoundError) else "internal"
