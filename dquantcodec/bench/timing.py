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
    """One measurement: ``rate`` in ``unit`` (median run), between ``low`` and ``high`` (slowest and fastest run)."""

    section: str
    name: str
    threads: int
    rate: float
    low: float
    high: float
    unit: str
    bits: float | None = None
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(self).items() if v not in (None, "")}


def measure(work: Callable[[], Any], amount: float, repeats: int = 9, least_seconds: float = 0.05) -> list[float]:
    """``amount`` per second of each run, sorted; short work is repeated within a run."""
    work()
    began = time.perf_counter()
    work()
    once = time.perf_counter() - began
    inner = max(1, round(least_seconds / max(once, 1e-9)))
    rates = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(inner):
            work()
        rates.append(amount * inner / (time.perf_counter() - began))
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
) -> Row:
    rates = measure(work, amount, repeats, least_seconds)
    return Row(section, name, threads, statistics.median(rates), rates[0], rates[-1], unit, bits, note)


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
