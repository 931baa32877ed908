"""A process of a batch: items in on standard input, outcomes out on standard output, both pickled.

    python -m dquantcodec.batch.worker

It ends when its input does.  SIGTERM unwinds, once, so that nothing half written stays behind.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from types import FrameType
from typing import BinaryIO


def _unwind(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(143)


def main(incoming: BinaryIO, outgoing: BinaryIO) -> None:
    from .outcome import run_item

    work, retries, redo = pickle.load(incoming)
    while True:
        try:
            item = pickle.load(incoming)
        except EOFError:
            return
        pickle.dump(run_item(work, item, retries=retries, redo=redo), outgoing)
        outgoing.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _unwind)
    # Whatever libraries print must not get between the outcomes.
    with os.fdopen(os.dup(1), "wb") as outcomes:
        os.dup2(2, 1)
        main(sys.stdin.buffer, outcomes)
