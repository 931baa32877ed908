"""Something to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Work:
    """``run`` goes once through ``values`` key and value numbers, or through ``nbytes`` bytes that stand for them."""

    name: str
    run: Callable[[], object]
    values: int
    nbytes: int = 0
    note: str = ""
