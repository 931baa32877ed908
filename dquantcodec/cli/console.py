"""What the command prints: text for people, coloured only on a terminal that wants it, or one JSON document."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32"}
#: Our own styles, or one character that no text is meant to have: control characters but newline and tab, and halves
#: of surrogate pairs, which stand for bytes of file names that are no text.
_UNPRINTABLE = re.compile(r"(\x1b\[(?:0|1|2|1;31|32)m)|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class Console:
    """Standard output and standard error.

    ``quiet``: results and errors alone.  ``json``: standard output takes one JSON document and nothing else.
    """

    def __init__(self, quiet: bool = False, json: bool = False) -> None:
        self.quiet = quiet
        self.json = json

    def say(self, text: str = "") -> None:
        """Something a person may like to know."""
        if not self.quiet:
            self.result(text)

    def result(self, text: str) -> None:
        """What the command was asked for, for people."""
        if not self.json:
            write(text, sys.stdout)

    def answer(self, facts: Mapping[str, object]) -> None:
        """The same for programs: the document of this command, once."""
        if self.json:
            print(document(facts))

    def warn(self, text: str) -> None:
        """Something that must not go unnoticed, though the work went on."""
        write(f"{paint('dqkv: warning:', 'bold', sys.stderr)} {text}", sys.stderr)

    def hint(self, text: str) -> None:
        """A line about the work going on, for terminals only."""
        if not self.quiet and sys.stderr.isatty():
            write(paint(text, "dim", sys.stderr), sys.stderr)


def write(text: str, stream: TextIO) -> None:
    """A line of ``text``, in which only our own styles control a terminal, whatever a file's names contain."""
    print(printable(text, stream), file=stream)


def printable(text: str, stream: TextIO) -> str:
    """``text`` with control characters as escapes; styles stay where ``stream`` shows them."""
    styled = shows_styles(stream)

    def escaped(found: re.Match[str]) -> str:
        if found[1] and styled:
            return found[1]
        return "".join(one.encode("unicode_escape").decode() if ord(one) < 32 or ord(one) > 126 else one
                       for one in found[0])  # fmt: skip

    return _UNPRINTABLE.sub(escaped, text)


def document(facts: object) -> str:
    """``facts`` as JSON that any parser reads: ASCII, numbers that are not finite as null, paths as text."""
    import json  # text for people does without

    return json.dumps(_plain(facts), indent=2, allow_nan=False)


def _plain(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {str(name): _plain(one) for name, one in item.items()}
    if isinstance(item, (list, tuple, range, set, frozenset)):
        return [_plain(one) for one in item]
    if isinstance(item, float):
        return float(item) if math.isfinite(item) else None
    if item is None or isinstance(item, (bool, int, str)):
        return item
    # A number of NumPy, which is not imported for this.
    return _plain(item.item()) if hasattr(item, "dtype") and not item.shape else str(item)


def shows_styles(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal and neither NO_COLOR nor TERM=dumb speaks against colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, style: str, stream: TextIO) -> str:
    """``text`` in ``style`` where ``stream`` shows it."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if shows_styles(stream) else text


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and texts in two columns; further lines of a text are indented like its first."""
    width = max(len(name) for name, _ in pairs)
    lines = []
    for name, text in pairs:
        first, *rest = text.split("\n")
        lines.append(f"{paint(name.ljust(width), 'dim', sys.stdout)}  {first}")
        lines.extend(" " * (width + 2) + line for line in rest)
    return "\n".join(lines)


def size(count: int) -> str:
    """Bytes for people: ``"1.29 MB"`` (powers of ten)."""
    if count < 1000:
        return f"{count} B"
    return _scaled(count, ("kB", "MB", "GB", "TB"))


def count(number: float) -> str:
    """A number of things for people: ``"590 k"``, ``"3.5 M"``."""
    if number < 1000:
        return f"{number:.0f}"
    return _scaled(number, ("k", "M", "G", "T"))


def _scaled(number: float, units: Sequence[str]) -> str:
    """``number`` (at least 1000) to three digits in the unit that keeps it below 1000."""
    power = next((power for power in range(1, len(units)) if number / 1000**power < 999.5), len(units))
    return f"{number / 1000**power:.3g} {units[power - 1]}"


def locate(where: Mapping[str, object], message: str, file: str) -> tuple[str, str, str]:
    """File, place within it, and message; nothing that the message says by itself is said twice."""
    from ..urls import shown

    path = shown(str(where.get("path") or file))
    message = message.removeprefix(f"{path}: ")
    plain = message.replace("-", "")
    facts = [("", it) if word == "kind" else (word.replace("_", " ") + " ", it) for word, it in where.items()]
    unsaid = [f"{word}{it}" for word, it in facts if word != "path " and f"{word}{it}" not in plain]
    return path, ", ".join(unsaid), message
