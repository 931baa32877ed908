"""Work of several threads: one contiguous share of the windows each, found and given in order.

Kernels release the interpreter's lock, and whoever waits for it is woken late: a thread does best with few, long
kernels, and walks its share in parts that stay in its cache.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")


def window_shares(start: int, stop: int, window: int, count: int) -> list[tuple[int, int]]:
    """``start`` to ``stop`` in at most ``count`` ranges of about equally many windows, cut between windows.

    >>> window_shares(100, 1000, 128, 3)
    [(100, 256), (256, 640), (640, 1000)]
    >>> window_shares(5, 5, 128, 3)
    []
    """
    first, last = start // window, -(-stop // window)
    windows = last - first
    count = min(count, windows) if start < stop else 0
    cuts = [(first + windows * i // count) * window for i in range(1, count)]
    return list(zip([start, *cuts], [*cuts, stop])) if count else []


def by_threads(function: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
    """The results for ``items``, at most ``threads`` of which are worked on at once; the caller's thread is one.

    Whatever the number of threads, the exception raised is that of the first item to fail.
    """
    todo = deque(range(len(items)))
    results: dict[int, _R] = {}
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                return
            try:
                results[item] = function(items[item])
            except BaseException as failure:
                failures[item] = failure
                # Items are begun in order, so those not yet begun come after this one.
                todo.clear()

    others = min(threads, len(items)) - 1
    futures = [_pool(others).submit(work) for _ in range(others)]
    work()
    for future in futures:
        # One that has not begun, because others keep the pool busy, has nothing left to do.
        if not future.cancel():
            future.result()
    if failures:
        raise failures[min(failures)]
    return [results[item] for item in range(len(items))]


_lock = Lock()
_found: tuple[int, ThreadPoolExecutor] | None = None


def _pool(threads: int) -> ThreadPoolExecutor:
    """A pool of at least so many threads, which is kept: some calls are over before new threads have started.

    The threads of a smaller one end with what they are at.
    """
    global _found
    with _lock:
        if _found is None or _found[0] < threads:
            _found = threads, ThreadPoolExecutor(threads, "dquantcodec")
        return _found[1]


def _forget() -> None:
    """A forked process has none of the threads, and perhaps a lock that nobody will open."""
    global _lock, _found
    _lock, _found = Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
