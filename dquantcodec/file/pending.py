"""What a writer holds of one sequence: rows that must still wait, and the encoded pages of an unfinished run."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
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
    """Rows ``[start, end)`` that are not coded yet, one queue of copied portions per layer and kind.

    ``collected`` tokens just before ``start`` are encoded and wait for their run to fill.  The file holds ``held``
    tokens: those before the run and, after a flush, some of the run and of the waiting rows as exact rows.
    """

    def __init__(self, queues: int, start: int = 0, held: int = 0) -> None:
        self.start = start
        self.end = start
        self.held = held
        self.collected = 0
        self._portions: list[list[NDArray[Any]]] = [[] for _ in range(queues)]
        self._pages: list[list[NDArray[np.uint8]]] = []
        self._exact: list[list[NDArray[Any]]] = []

    @property
    def waiting(self) -> int:
        return self.end - self.start

    def put(self, rows: list[NDArray[Any]], pool: Executor | None = None) -> None:
        """Add rows, one array ``[t, H, D]`` per queue; they are copied (by ``pool``, if given), so the caller may reuse
        its arrays."""
        copied = (pool.map if pool else map)(partial(np.array, order="C"), rows)
        for queue, array in zip(self._portions, copied, strict=True):
            queue.append(array)
        self.end += len(rows[0])

    def peek(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Rows ``start`` to ``stop`` of those that wait, which stay."""
        return [_part(queue, start, stop) for queue in self._portions] if start < stop else []

    def take(self, tokens: int) -> list[NDArray[Any]]:
        """Remove and return the oldest ``tokens`` tokens (or all, if fewer wait)."""
        tokens = min(tokens, self.waiting)
        taken = self.peek(0, tokens)
        self.drop(tokens)
        return taken

    def drop(self, tokens: int) -> None:
        """Remove the oldest ``tokens`` tokens."""
        self.start += tokens
        for queue in self._portions:
            left = tokens
            while left:
                if len(queue[0]) <= left:
                    left -= len(queue.pop(0))
                else:
                    queue[0], left = queue[0][left:], 0

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

    def cut(self, end: int) -> None:
        """Forget the tokens from ``end`` on: waiting rows, and a run that begins behind ``end``."""
        if end < self.start:
            assert end <= self.start - self.collected, "the run holds tokens that stay"
            self.take_run()
        kept = self.peek(0, end - self.start)
        self._portions = [[array] for array in kept] or [[] for _ in self._portions]
        self.start = min(self.start, end)
        self.held = min(self.held, end)
        self.end = end

    def take_run(self) -> Run | None:
        """Remove and return the run, or None if nothing was collected."""
        if not self.collected:
            return None
        run = Run(self.start - self.collected, self.collected, self._pages, [np.concatenate(r) for r in self._exact])
        self.collected = 0
        self._pages, self._exact = [], []
        return run


def _part(queue: list[NDArray[Any]], start: int, stop: int) -> NDArray[Any]:
    parts = []
    for portion in queue:
        if max(0, start) < min(len(portion), stop):
            parts.append(portion[max(0, start) : stop])
        start, stop = start - len(portion), stop - len(portion)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
