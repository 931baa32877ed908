"""The quality table that ``demo`` and ``compare`` print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .console import paint

if TYPE_CHECKING:
    from ..compare import LayerQuality

#: Names and widths of the columns; a line of the table fits 80 characters.
_COLUMNS = (
    ("layer", 5), ("value", 6), ("BF16", 6), ("keys", 7), ("centred", 8), ("values", 7), ("error, %", 10), ("keys", 7),
    ("values", 7), ("encode", 9), ("decode", 7),
)  # fmt: skip
#: What stands above them, and over how many columns.
_GROUPS = (("", 1), ("bits/", 1), ("vs", 1), ("NMSE, %", 3), ("attention", 1), ("drift, %", 2), ("M values/s", 2))

LEGEND = """\
bits/value counts every stored byte of the layer. NMSE is error energy over
energy; centred: over the energy of the keys less their means of 128 tokens.
Drifted symbols were moved to a cheaper level so that a token fits its bytes."""


def quality_table(rows: Sequence[LayerQuality]) -> str:
    """Aligned lines, a line per layer."""
    heads = (_groups(), "".join(name.rjust(width) for name, width in _COLUMNS))
    lines = [paint(head, "bold", sys.stdout) for head in heads]
    return "\n".join(lines + [_line(row) for row in rows])


def _groups() -> str:
    """The first header line: a rule around the name of every group of several columns."""
    text, at = "", 0
    for name, columns in _GROUPS:
        width = sum(width for _, width in _COLUMNS[at : at + columns])
        ruled = f" {name} ".center(width - 2, "-") if columns > 1 else name
        text += ruled.rjust(width)
        at += columns
    return text


def _line(row: LayerQuality) -> str:
    cells = (
        str(row.layer),
        f"{row.bits_per_value:.3f}",
        f"{row.ratio:.2f}x",
        _percent(row.key_nmse),
        _percent(row.key_centred_nmse),
        _percent(row.value_nmse),
        _percent(row.attention_error),
        _percent(row.key_drift),
        _percent(row.value_drift),
        _millions(row.encode_speed),
        _millions(row.decode_speed),
    )
    return "".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))


def quality_json(rows: Sequence[LayerQuality]) -> list[dict[str, Any]]:
    """The rows as JSON objects, shares and errors as fractions, speeds in values a second."""
    return [{**asdict(row), "bits_per_value": row.bits_per_value, "ratio_to_bf16": row.ratio} for row in rows]


def totals(sizes: Any) -> dict[str, Any]:
    """What a whole file takes, as JSON values."""
    return {"bytes": sizes.bytes, "values": sizes.values, "bits_per_value": sizes.bits_per_value}


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.2f}" if share < 0.995 else f"{100 * share:.0f}"


def _millions(speed: float | None) -> str:
    if speed is None:
        return "-"
    return f"{speed / 1e6:.1f}" if speed < 9.95e6 else f"{speed / 1e6:.0f}"
