"""One file of a batch from beginning to end: passed over, done, tried again, or failed with a reason."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import asdict, dataclass
from typing import Any

from ..cli.failure import Failure
from ..errors import DeviceError, DQuantError
from ..urls import shown
from .items import Item
from .work import Work

#: Seconds before the second attempt; twice as many before each further one, up to the most.
PAUSE = 0.5
MOST_PAUSE = 30.0


@dataclass(frozen=True)
class Outcome:
    """What became of an item; plain values, so that it travels.

    input, output
        As in the item, without secrets.
    state
        ``"done"``, ``"skipped"`` (it was there already) or ``"failed"``.
    attempts
        How often it was tried.
    code, message
        Reason code and words of the last failure; empty without.
    seconds
        All attempts together.
    """

    input: str
    output: str
    state: str
    attempts: int = 0
    code: str = ""
    message: str = ""
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        """As a mapping of plain values."""
        return asdict(self)


def run_item(work: Work, item: Item, *, retries: int = 1, redo: bool = False) -> Outcome:
    """Do ``work`` to ``item`` and say what came of it; never raises an Exception.

    A failure that may pass (of storage, network, memory or disk) is tried ``retries`` more times, with a pause; one of
    the data or the arguments (:class:`DQuantError`) would be the same again and is not.  A finished output is not made
    again unless ``redo``.
    """
    began = time.perf_counter()
    name = shown(item.input)

    def outcome(state: str, attempts: int, code: str = "", message: str = "") -> Outcome:
        return Outcome(name, shown(item.output), state, attempts, code, message, time.perf_counter() - began)

    attempt = 1
    while True:
        try:
            if not redo and work.finished(item):
                return outcome("skipped", attempt - 1)
            work.run(item)
            return outcome("done", attempt)
        except Exception as error:
            if isinstance(error, (DQuantError, DeviceError)) or attempt > retries:
                return outcome("failed", attempt, *_failed(error, name))
        time.sleep(min(PAUSE * 2 ** (attempt - 1), MOST_PAUSE))
        attempt += 1


def _failed(error: Exception, file: str) -> tuple[str, str]:
    """Reason code and words of ``error`` (file, place, message) in one line, without secrets."""
    failure = Failure.of(error, Namespace(file=file))
    parts = (failure.path or file, failure.place, " ".join(failure.message.split()))
    return failure.code, shown(": ".join(part for part in parts if part))
