"""Work of several threads in the order of one: what is made ahead of its use, and what is done behind its giving."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def in_order(pool: Executor, function: Callable[[_T], _R], items: Iterable[_T], most: int) -> Generator[_R, None, None]:
    """``function`` of every item, in order, worked on by ``pool``; at most ``most`` results are held or being made.

    The first exception is raised where its result would be; nothing that had not begun by then is begun.
    """
    waiting: deque[Future[_R]] = deque()
    try:
        for item in items:
            if len(waiting) >= most:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, item))
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for future in waiting:
            if not future.cancelled():
                future.exception()  # what it works with may be closed next


def ahead(items: Iterator[_T]) -> Generator[_T, None, None]:
    """``items``, each made by a thread of its own while the one before it is used.

    At most two are held: the one in use and the next.  An exception is raised where its item would be.
    """
    with ThreadPoolExecutor(1) as pool:
        next_one = pool.submit(next, items, _END)
        try:
            while (item := next_one.result()) is not _END:
                next_one = pool.submit(next, items, _END)
                yield item
                del item
        finally:
            next_one.cancel()


_END: Any = object()


class Behind:
    """Calls made in order by one thread of its own, while their giver goes on.

    At most ``most`` wait; a giver of more waits for room.  After a call that raises, the others are dropped, and its
    exception is raised to the giver's next :meth:`do` or :meth:`wait`.
    """

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._most = most
        self._waiting: deque[Future[None]] = deque()
        self._failed = Event()

    def do(self, call: Callable[[], object]) -> None:
        while self._waiting and (len(self._waiting) >= self._most or self._waiting[0].done()):
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._run, call))

    def wait(self) -> None:
        """Return when every call is made."""
        while self._waiting:
            self._waiting.popleft().result()

    def stop(self) -> None:
        """Drop what has not begun, and return when nothing runs any more."""
        self._failed.set()
        self._pool.shutdown(cancel_futures=True)
        self._waiting.clear()

    def _run(self, call: Callable[[], object]) -> None:
        if self._failed.is_set():
            return
        try:
            call()
        except BaseException:
            self._failed.set()
            raise
