"""Errors that say which file they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DQuantError, InputError
from .structs import Bytes


@contextmanager
def located(path: str) -> Iterator[None]:
    """Data errors raised inside begin with ``path`` and carry it in ``where``, once."""
    try:
        yield
    except DQuantError as error:
        if "path" not in error.where:
            error.where["path"] = path
            error.args = (f"{path}: {error}",)
        raise


def unless_closed(data: Bytes | None, path: str) -> Bytes:
    """The bytes of the file at ``path``.  Raises :class:`InputError` (``reader-closed``) where they are None."""
    if data is None:
        raise InputError(f"{path}: the reader is closed", code="reader-closed", path=path)
    return data
