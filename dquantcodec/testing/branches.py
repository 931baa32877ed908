"""Branches that the library's Python code takes, as ``sys.monitoring`` tells them: a guide for fuzzing without Atheris.

Needs Python 3.12.  A line, and a branch of which both ways were seen, is not watched any more, so that watching
costs less the longer it goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

AVAILABLE = sys.version_info >= (3, 12)

_PACKAGE = str(Path(__file__).parents[1])


#: Where a branch, or a line, is: its code object, which stays where it is, since modules keep it, and a number in it.
Place = tuple[int, int]


def _watched(code: CodeType) -> bool:
    return code.co_filename.startswith(_PACKAGE) and code.co_filename != __file__


class Branches:
    """What was seen of the package's code while this context was open.

    Raises RuntimeError if every tool id is taken.
    """

    def __init__(self) -> None:
        self._lines: set[Place] = set()
        self._ways: dict[Place, tuple[int, ...]] = {}
        self._new: list[tuple[Place, int | None]] = []

    def __len__(self) -> int:
        """Ways of branches."""
        return sum(map(len, self._ways.values()))

    def fresh(self) -> list[tuple[Place, int | None]]:
        """Lines (with None) and ways of branches that were seen for the first time since this was last asked."""
        found, self._new = self._new, []
        return found

    def forget(self, found: list[tuple[Place, int | None]]) -> None:
        """What :meth:`fresh` gave counts as never seen."""
        for place, to in found:
            if to is None:
                self._lines.discard(place)
            else:
                self._ways[place] = tuple(way for way in self._ways[place] if way != to)
        sys.monitoring.restart_events()  # type: ignore[attr-defined, unused-ignore]

    def remember(self, found: list[tuple[Place, int | None]]) -> None:
        """The opposite of :meth:`forget`."""
        for place, to in found:
            if to is None:
                self._lines.add(place)
            elif to not in self._ways.get(place, ()):
                self._ways[place] = (*self._ways.get(place, ()), to)

    def watch(self, both: bool) -> None:
        """Watch lines, and ``both`` lines and branches, from now on."""
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        events = monitoring.events
        monitoring.set_events(self._tool, events.LINE | events.BRANCH if both else events.LINE)

    def __enter__(self) -> Branches:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        self._tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
        if self._tool is None:
            raise RuntimeError("sys.monitoring has no tool id left")
        monitoring.use_tool_id(self._tool, __name__)
        events, off = monitoring.events, monitoring.DISABLE

        def line(code: CodeType, number: int) -> Any:
            place = id(code), number
            if place not in self._lines and _watched(code):
                self._lines.add(place)
                self._new.append((place, None))
            return off

        def branch(code: CodeType, at: int, to: int) -> Any:
            place = id(code), at
            ways = self._ways.get(place, ())
            if to not in ways:
                if not _watched(code):
                    return off
                self._ways[place] = ways = *ways, to
                self._new.append((place, to))
            return off if len(ways) > 1 else None

        monitoring.register_callback(self._tool, events.LINE, line)
        monitoring.register_callback(self._tool, events.BRANCH, branch)
        self.watch(both=True)
        # What another watcher has switched off is on again.
        monitoring.restart_events()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        monitoring.set_events(self._tool, 0)
        monitoring.free_tool_id(self._tool)
