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


class Branches:
    """What was seen of the package's code while this context was open.

    Raises RuntimeError if every tool id is taken.
    """

    def __init__(self) -> None:
        self._ways: dict[tuple[int, int], int] = {}
        self._both = 0
        self._fresh = False

    def __len__(self) -> int:
        """Ways of branches."""
        return len(self._ways) + self._both

    def fresh(self) -> bool:
        """Whether a line, or a way of a branch, was seen for the first time since this was last asked."""
        found, self._fresh = self._fresh, False
        return found

    def __enter__(self) -> Branches:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        self._tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
        if self._tool is None:
            raise RuntimeError("sys.monitoring has no tool id left")
        monitoring.use_tool_id(self._tool, __name__)
        events, off = monitoring.events, monitoring.DISABLE

        def line(code: CodeType, number: int) -> Any:
            if code.co_filename.startswith(_PACKAGE):
                self._fresh = True
            return off

        def branch(code: CodeType, at: int, to: int) -> Any:
            # Code objects stay where they are: modules keep them.
            place = (id(code), at)
            before = self._ways.get(place)
            if before == to:
                return None
            if before is None:
                if not code.co_filename.startswith(_PACKAGE):
                    return off
                self._ways[place] = to
                self._fresh = True
                return None
            self._both += 1
            self._fresh = True
            return off

        monitoring.register_callback(self._tool, events.LINE, line)
        monitoring.register_callback(self._tool, events.BRANCH, branch)
        monitoring.set_events(self._tool, events.LINE | events.BRANCH)
        # What another watcher has switched off is on again.
        monitoring.restart_events()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
        monitoring.set_events(self._tool, 0)
        monitoring.free_tool_id(self._tool)
