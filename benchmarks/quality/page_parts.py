"""Pieces of a Markdown page: wrapped paragraphs, tables, and numbers as they are written there."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from math import floor, log10

WIDTH = 120


def paragraph(text: str) -> str:
    """``text`` in lines of at most :data:`WIDTH` characters."""
    return _wrapped(" ".join(text.split()))


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in rows]
    return "\n".join(lines)


def image(name: str, what: str) -> str:
    return f"![{what}](images/quality/{name}.svg)"


def joined(names: Sequence[str]) -> str:
    """``a, b and c``, with semicolons where names have commas; "none" of nothing."""
    if len(names) < 2:
        return names[0] if names else "none"
    comma = "; " if any("," in name for name in names) else ", "
    return f"{comma.join(names[:-1])}{';' if comma == '; ' else ''} and {names[-1]}"


def significant(value: float | None, digits: int = 2) -> str:
    """So many significant digits, never with an exponent; ``-`` for what does not exist."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    decimals = digits - 1 - floor(log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{value:.{max(0, decimals)}f}"


def fixed(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def interval(mean: float, low: float, high: float) -> str:
    return f"{mean:.2f} [{low:.2f}, {high:.2f}]"


def bullet(text: str) -> str:
    """A list item in lines of at most :data:`WIDTH` characters."""
    return _wrapped(f"- {' '.join(text.split())}", "  ")
