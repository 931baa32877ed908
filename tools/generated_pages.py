"""Pages of the documentation that are written by hand but for what scripts put between two marks.

A part of a page stands between the lines ``<!-- NAME -->`` and ``<!-- end of NAME -->``; the first may say where the
part comes from, ``<!-- NAME: from the results -->``, and stays as it is.  Scripts of ``tools`` and ``benchmarks``
import this module, and tests hold that pages are what the scripts make of the results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def updated(text: str, parts: Mapping[str, str]) -> str:
    """``text`` with the parts named in ``parts`` replaced; all else stays.

    Raises:
        ValueError: The marks of a part do not stand there exactly once, the second behind the first.
    """
    for name, made in parts.items():
        begin, end = rf"^<!-- {re.escape(name)}(?:: [^\n]*)? -->\n", rf"^<!-- end of {re.escape(name)} -->$"
        marks = [[found.span() for found in re.finditer(mark, text, re.MULTILINE)] for mark in (begin, end)]
        if [len(spans) for spans in marks] != [1, 1] or marks[0][0][1] > marks[1][0][0]:
            raise ValueError(f"the page does not have the two marks of {name!r} once, one behind the other")
        text = f"{text[: marks[0][0][1]]}\n{made}\n\n{text[marks[1][0][0] :]}"
    return text


def rewrite(page: Path, parts: Mapping[str, str]) -> None:
    """:func:`updated` for the page at ``page``."""
    page.write_text(updated(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))
