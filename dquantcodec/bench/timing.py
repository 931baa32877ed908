"""Timing: medians with spread, wall clock, one process, after a warm-up."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One measurement: ``rate`` in ``unit`` (median run), between ``low`` and ``high`` (slowest and fastest run).

    what
        The thing that is done (decode, encode, ...); rows of a section that do the same are set beside each other.
    of
        Whose work it is: ``"ours"``, ``"peer"`` or, for moving the same bytes and nothing else, ``"copy"``.
    to_copy, to_peer, peer
        The rate in parts of the copy's and of the best peer's, and that peer's name; see ``ratios.py``.
    """

    section: str
    name: str
    threads: int
    rate: float
    low: float
    high: float
    unit: str
    bits: float | None = None
    note: str = ""
    what: str = ""
    of: str = "ours"
    to_copy: float | None = None
    to_peer: float | None = None
    peer: str = ""

    def as_json(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items() if v not in (None, "")}


@dataclass
class Pace:
    """How long a row is measured: at most so many runs, each in the given part of its full length."""

    most_repeats: int = 99
    part: float = 1.0


#: Set once by the command, before anything is measured.
PACE = Pace()


def measure(
    work: Callable[[], Any],
    amount: float,
    repeats: int = 9,
    least_seconds: float = 0.05,
    after: Callable[[], Any] | None = None,
) -> list[float]:
    """``amount`` per second of each run, sorted; short work is repeated within a run.

    ``after`` follows every run untimed; the work is then done once a run.
    """
    repeats, least_seconds = min(repeats, PACE.most_repeats), least_seconds * PACE.part
    work()
    inner = 1
    if after is not None:
        after()
    elif least_seconds:
        began = time.perf_counter()
        work()
        inner = max(1, round(least_seconds / max(time.perf_counter() - began, 1e-9)))
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(inner):
            work()
        rates.append(amount * inner / (time.perf_counter() - began))
        if after is not None:
            after()
    return sorted(rates)


def row(
    section: str,
    name: str,
    work: Callable[[], Any],
    amount: float,
    unit: str,
    threads: int = 1,
    bits: float | None = None,
    note: str = "",
    repeats: int = 9,
    least_seconds: float = 0.05,
    what: str = "",
    of: str = "ours",
    after: Callable[[], Any] | None = None,
) -> Row:
    rates = measure(work, amount, repeats, least_seconds, after)
    return Row(section, name, threads, statistics.median(rates), rates[0], rates[-1], unit, bits, note, what, of)


@contextmanager
def pinned() -> Iterator[None]:
    """This process on one core, where the system lets it choose."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(everywhere)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)
