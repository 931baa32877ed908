"""What went wrong, as one line for people and as one object for programs."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import DeviceError, DQuantError
from .console import locate, paint

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


@dataclass(frozen=True)
class Failure:
    """``kind`` is the class of the error, ``code`` its stable reason code, ``where`` the place as facts.

    ``message`` may end with a list on lines of its own.  ``place`` is ``where`` in words, without what the message
    says itself.
    """

    kind: str
    code: str
    message: str
    where: Mapping[str, object] = field(default_factory=dict)
    path: str = ""
    place: str = ""

    @staticmethod
    def of(error: Exception, args: argparse.Namespace) -> Failure:
        kind = type(error).__name__
        if isinstance(error, OSError):
            code = _SYSTEM_CODES.get(error.errno or 0, "io")
            path = _system_path(error, args)
            return Failure("OSError", code, error.strerror or str(error), {"path": path}, path)
        if isinstance(error, MemoryError):
            return Failure("MemoryError", "no-memory", "out of memory")
        if isinstance(error, (DQuantError, DeviceError)):
            path, place, message = locate(error.where, str(error), args.file)
            return Failure(kind, error.code, message, {"path": path, **error.where}, path, place)
        if isinstance(error, ModuleNotFoundError):
            return Failure(kind, "not-installed", f"the package {error.name} is not installed")
        message = f"internal error, please report it with the output of --debug: {kind}: {error}"
        return Failure(kind, "internal", message)

    def line(self) -> str:
        """``error: FILE: place: message [code]``, and the list that a message may end with below it."""
        first, *rest = self.message.split("\n")
        colon = ":" if rest else ""
        parts = [part for part in (self.path, self.place, first.removesuffix(":")) if part]
        head = f"{paint('error:', 'red', sys.stderr)} {': '.join(parts)} [{self.code}]{colon}"
        return "\n".join([head, *rest])

    def answer(self) -> dict[str, object]:
        """The document that stands in the place of a command's own."""
        return {"error": {"type": self.kind, "code": self.code, "message": self.message, "where": self.where}}


def _system_path(error: OSError, args: argparse.Namespace) -> str:
    """The file a system error is about: writes do not say theirs, and it is the output that fills a disk."""
    if error.filename is not None:
        return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return str(getattr(args, "output", None) or args.file if full else args.file)
