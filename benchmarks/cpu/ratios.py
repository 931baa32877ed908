"""Rates beside those of a plain copy and of the best peer in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dquantcodec.bench.timing import Row


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Our rows with their ratios: to the copy of the section that moves as much in the same unit, on as many threads,
    and to the fastest peer of the section that does the same on one thread."""
    return [_beside(row, rows) if row.of == "ours" and row.what else row for row in rows]


def _beside(row: Row, rows: Sequence[Row]) -> Row:
    near = [other for other in rows if (other.section, other.unit) == (row.section, row.unit)]
    copies = [
        other
        for other in near
        if other.of == "copy" and other.threads == row.threads and other.what in ("", row.what)
    ]  # fmt: skip
    peers = [other for other in near if other.of == "peer" and other.what == row.what and row.threads == other.threads]
    if copies:
        row = replace(row, to_copy=row.rate / copies[0].rate)
    if peers:
        best = max(peers, key=lambda other: other.rate)
        row = replace(row, to_peer=row.rate / best.rate, peer=best.name)
    return row
