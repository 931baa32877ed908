"""What the command prints: plain text, coloured only on a terminal that wants it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

_STYLES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32"}


class Console:
    """Standard output, less talkative if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, text: str = "") -> None:
        """Something a person may like to know."""
        if not self.quiet:
            print(text)

    def result(self, text: str) -> None:
        """What the command was asked for."""
        print(text)

    def warn(self, text: str) -> None:
        """Something that must not go unnoticed, though the work went on."""
        print(f"{paint('dqkv: warning:', 'bold', sys.stderr)} {text}", file=sys.stderr)

    def hint(self, text: str) -> None:
        """A line about the work going on, for terminals only."""
        if not self.quiet and sys.stderr.isatty():
            print(paint(text, "dim", sys.stderr), file=sys.stderr)


def paint(text: str, style: str, stream: TextIO) -> str:
    """``text`` in ``style`` if ``stream`` is a terminal and neither NO_COLOR nor TERM=dumb speaks against it."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m"


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
    path = str(where.get("path") or file)
    message = message.removeprefix(f"{path}: ")
    plain = message.replace("-", "")
    facts = [("", it) if word == "kind" else (word.replace("_", " ") + " ", it) for word, it in where.items()]
    unsaid = [f"{word}{it}" for word, it in facts if word != "path " and f"{word}{it}" not in plain]
    return path, ", ".join(unsaid), message
