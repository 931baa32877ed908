"""A batch on this machine: processes that take one item after another."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread

from ..urls import shown
from .items import Item
from .outcome import Outcome
from .work import Work

#: How libraries are told how many threads a process may have.
THREADS = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: Seconds that a worker has to clean up when it is told to end.
GRACE = 60


def run_all(
    work: Work,
    items: Sequence[Item],
    *,
    jobs: int,
    threads: int = 1,
    retries: int = 1,
    redo: bool = False,
    progress: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """:func:`run_item` for all ``items`` in ``jobs`` processes of ``threads`` threads each; outcomes in their order.

    An item at which a process dies (killed for its memory, say) counts as failed at that attempt, and is tried again
    like others.  ``progress`` is called with every outcome as it comes.  An exception here, Ctrl-C among them, ends the
    processes; each removes what it had not finished.  Memory is that of ``jobs`` single runs.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(items)):
        waiting.put(number)
    came: queue.SimpleQueue[tuple[int, Outcome] | BaseException] = queue.SimpleQueue()
    lanes = [_Lane(work, threads, retries, redo) for _ in range(min(jobs, len(items)))]
    feeders = [Thread(target=lane.feed, args=(items, waiting, came), daemon=True) for lane in lanes]
    outcomes: dict[int, Outcome] = {}
    try:
        for feeder in feeders:
            feeder.start()
        while len(outcomes) < len(items):
            found = came.get()
            if isinstance(found, BaseException):
                raise found
            number, outcome = found
            outcomes[number] = outcome
            if progress:
                progress(outcome)
    finally:
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.wait()
    return [outcomes[number] for number in range(len(items))]


class _Lane:
    """One process at a time, fed by a thread; another takes its place when it dies."""

    def __init__(self, work: Work, threads: int, retries: int, redo: bool) -> None:
        self._work = work
        self._threads = threads
        self._retries = retries
        self._redo = redo
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    def feed(
        self,
        items: Sequence[Item],
        waiting: queue.SimpleQueue[int],
        came: queue.SimpleQueue[tuple[int, Outcome] | BaseException],
    ) -> None:
        try:
            while not self._stopped:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    break
                outcome = self._outcome(items[number])
                if outcome:
                    came.put((number, outcome))
        except BaseException as error:
            came.put(error)

    def _outcome(self, item: Item) -> Outcome | None:
        for _attempt in range(self._retries + 1):
            process = self._running()
            try:
                assert process.stdin and process.stdout
                pickle.dump(item, process.stdin)
                process.stdin.flush()
                found: Outcome = pickle.load(process.stdout)
                return found
            except (EOFError, OSError, pickle.UnpicklingError):
                status = self._end(process)
                if self._stopped:
                    return None
        name = shown(item.input)
        message = f"{name}: its process died with status {status}, of too little memory perhaps; give fewer --jobs"
        return Outcome(name, shown(item.output), "failed", self._retries + 1, "worker-died", message)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            environment = {**os.environ, **dict.fromkeys(THREADS, str(self._threads))}
            # Ctrl-C goes to all that a terminal has in front; in a session of its own a worker is ended by us alone.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dquantcodec.batch.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=os.name != "nt",
            )
            assert self._process.stdin
            pickle.dump((self._work, self._retries, self._redo), self._process.stdin)
            if self._stopped:
                self._process.terminate()
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()
        self._process = None
        return process.wait()

    def stop(self) -> None:
        self._stopped = True
        if self._process:
            self._process.terminate()

    def wait(self) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        self._end(process)
