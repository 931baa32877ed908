"""All errors of the library.

Every error carries ``code``, a stable reason code (lower-case words joined by hyphens) that programs, the command
line and the invalid test vectors share, and ``where``, the place it happened (``path``, ``offset``, ``record``,
``layer``, ``kind``, ``token``, ... as far as known).  Bad data is a :class:`ValueError`; a missing or unfit device is
a :class:`RuntimeError`.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "ChecksumError",
    "DQuantError",
    "DeviceError",
    "FormatError",
    "IdentityError",
    "InputError",
    "LimitError",
    "TruncatedError",
    "UnsupportedError",
]


class DQuantError(ValueError):
    """Base of everything the library raises about data.

    ``code`` is the stable reason code, ``where`` the place as keyword facts.
    """

    def __init__(self, message: str, *, code: str, **where: object) -> None:
        super().__init__(message)
        self.code = code
        self.where = where


class FormatError(DQuantError):
    """The bytes break a rule of the format."""


class UnsupportedError(DQuantError):
    """The bytes follow the format, but need a feature or version this library does not have."""


class ChecksumError(DQuantError):
    """Bytes are not the bytes that were written: a checksum or a coder's final state is wrong."""


class TruncatedError(DQuantError):
    """The data ends too early (a torn tail, a cut file)."""


class LimitError(DQuantError):
    """A number is beyond what the format allows; checked before anything is allocated."""


class CapacityError(DQuantError):
    """The container cannot hold even the cheapest symbols, so no budget can be kept."""


class IdentityError(DQuantError):
    """The file belongs to another model, layer plan or geometry than the caller expects."""


class InputError(DQuantError):
    """The caller's arrays or arguments do not fit: shape, dtype, layout, NaN or infinity."""


class DeviceError(RuntimeError):
    """A device is missing, or an array lies on another one than asked for."""

    def __init__(self, message: str, *, code: str, **where: object) -> None:
        super().__init__(message)
        self.code = code
        self.where = where
