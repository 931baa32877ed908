"""Results as lines of JSON in a file that only grows, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """All complete rows; what a killed process left of a line is no row."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]


def append(path: Path, row: Row) -> None:
    """Adds ``row`` as one line in one write; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with path.open("ab+") as file:
        _drop_torn_line(file.fileno())
        os.write(file.fileno(), line)
        os.fsync(file.fileno())


def key(row: Row, fields: Iterable[str]) -> str:
    """What tells rows apart: the JSON of the named fields."""
    return json.dumps([row.get(field) for field in fields], sort_keys=True)


def _drop_torn_line(file: int) -> None:
    end = size = os.lseek(file, 0, os.SEEK_END)
    while end and os.pread(file, 1, end - 1) != b"\n":
        end -= 1
    if end != size:
        os.ftruncate(file, end)
