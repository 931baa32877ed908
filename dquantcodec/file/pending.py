"""What a writer holds of one sequence: rows that must still wait, and the encoded pages of an unfinished run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive tokens ready to be a record: pages per coded layer, rows per exact layer and kind."""

    first: int
    tokens: int
    pages: list[list[NDArray[np.uint8]]]
    exact_rows: list[NDArray[Any]]


class Pending:
    """Rows ``[start, end)`` that no record holds, one queue of copied portions per layer and kind.

    ``collected`` tokens just before ``start`` are encoded and wait for their run to fill.
    """

    def __init__(self, queues: int) -> None:
        self.start = 0
        self.end = 0
        self.collected = 0
        self._portions: list[list[NDArray[Any]]] = [[] for _ in range(queues)]
        self._pages: list[list[NDArray[np.uint8]]] = []
        self._exact: list[list[NDArray[Any]]] = []

    @property
    def waiting(self) -> int:
        return self.end - self.start

    def put(self, rows: list[NDArray[Any]]) -> None:
        """Add rows, one array ``[t, H, D]`` per queue; they are copied, so the caller may reuse its arrays."""
        for queue, array in zip(self._portions, rows, strict=True):
            queue.append(np.array(array, order="C"))
        self.end += len(rows[0])

    def peek(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Rows ``start`` to ``stop`` of those that wait, which stay."""
        return [np.concatenate(queue)[start:stop] for queue in self._portions]

    def take(self, tokens: int) -> list[NDArray[Any]]:
        """Remove and return the oldest ``tokens`` tokens (or all, if fewer wait)."""
        tokens = min(tokens, self.waiting)
        self.start += tokens
        return [_take(queue, tokens) for queue in self._portions] if tokens else []

    def collect(self, tokens: int, pages: list[NDArray[np.uint8]], exact: list[NDArray[Any]]) -> None:
        """Add ``tokens`` tokens just taken to the run: pages per coded layer, rows per exact layer and kind."""
        if not self.collected:
            self._pages = [[] for _ in pages]
            self._exact = [[] for _ in exact]
        for parts, part in zip(self._pages, pages, strict=True):
            parts.append(part)
        for rows, array in zip(self._exact, exact, strict=True):
            rows.append(array)
        self.collected += tokens

    def take_run(self) -> Run | None:
        """Remove and return the run, or None if nothing was collected."""
        if not self.collected:
            return None
        run = Run(self.start - self.collected, self.collected, self._pages, [np.concatenate(r) for r in self._exact])
        self.collected = 0
        self._pages, self._exact = [], []
        return run


def _take(queue: list[NDArray[Any]], tokens: int) -> NDArray[Any]:
    taken = []
    while tokens:
        portion = queue[0]
        if len(portion) <= tokens:
            taken.append(queue.pop(0))
        else:
            taken.append(portion[:tokens])
            queue[0] = portion[tokens:]
        tokens -= len(taken[-1])
    return taken[0] if len(taken) == 1 else np.concatenate(taken)
