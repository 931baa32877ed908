"""Something to time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Work:
    """``run`` goes once through ``values`` key and value numbers, or through ``nbytes`` bytes that stand for them.

    ``what`` is done and ``of`` as in :class:`dquantcodec.bench.timing.Row`; ``after`` follows every run untimed.
    """

    name: str
    run: Callable[[], object]
    values: int
    nbytes: int = 0
    note: str = ""
    what: str = ""
    of: str = "ours"
    after: Callable[[], object] | None = None
