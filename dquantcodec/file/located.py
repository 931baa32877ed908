"""Errors that say which file they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DQuantError


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
