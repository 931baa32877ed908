"""Threads that read ahead and write behind: order, bounds, and errors in the middle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from dquantcodec.file.overlap import Behind, ahead, in_order


def test_results_come_in_order_and_no_more_are_held_than_asked() -> None:
    begun, taken = [], []
    first_waits = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        if number == 0:
            first_waits.wait(5)
        elif number == 2:
            first_waits.set()
        return number

    with ThreadPoolExecutor(4) as pool:
        for number in in_order(pool, work, range(20), 3):
            taken.append(number)
            assert len(begun) - len(taken) < 3
    assert taken == list(range(20))


def test_an_error_is_raised_in_its_place_and_begins_nothing_more() -> None:
    begun = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 5:
            raise KeyError("five")
        return number

    with ThreadPoolExecutor(1) as pool:
        results = in_order(pool, work, range(100), 2)
        taken = []
        with pytest.raises(KeyError, match="five"):
            taken.extend(results)
    assert max(begun) <= 6
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyError):
            list(in_order(pool, work, [5, 6, 7], 1))
        assert list(in_order(pool, work, [8], 1)) == [8]


def test_what_waits_is_not_begun_when_its_taker_stops() -> None:
    class Made(Future[int]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            assert self.done(), "nobody makes it any more"
            return super().exception(timeout)

    class TwoOnly(Executor):
        """Makes two results; what is asked for later waits."""

        def __init__(self) -> None:
            self.made: list[Made] = []

        def submit(self, function: Any, /, *given: Any, **named: Any) -> Any:
            self.made.append(Made())
            if len(self.made) <= 2:
                self.made[-1].set_result(function(*given, **named))
            return self.made[-1]

    pool = TwoOnly()
    results = in_order(pool, lambda number: -number, range(1, 100), 3)
    assert next(results) == -1
    results.close()
    assert [future.cancelled() for future in pool.made] == [False, False, True]


def test_items_are_made_one_ahead() -> None:
    made: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(4):
            if number == 2:
                third.set()
            made.append(number)
            yield number

    taken = []
    for number in ahead(items()):
        if number == 1:
            assert third.wait(5), "the next item is made while this one is used"
        assert len(made) <= number + 2
        taken.append(number)
    assert taken == [0, 1, 2, 3]


def test_an_error_of_the_maker_comes_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("two")

    taken = []
    with pytest.raises(ValueError, match="two"):
        for number in ahead(items()):
            taken.append(number)
    assert taken == [1]


def test_calls_are_made_in_order_behind_their_giver() -> None:
    made: list[int] = []
    go = threading.Event()
    behind = Behind(2)
    behind.do(lambda: go.wait(5))
    behind.do(lambda: made.append(1))
    assert made == []
    go.set()
    for number in range(2, 30):
        behind.do(lambda n=number: made.append(n))  # type: ignore[misc]
        assert number - len(made) <= 3, "a giver waits for room"
    behind.wait()
    assert made == list(range(1, 30))
    behind.stop()


def test_after_an_error_nothing_more_is_called() -> None:
    made: list[int] = []
    go = threading.Event()

    def fail() -> None:
        go.wait(5)
        raise OSError("full")

    behind = Behind(3)
    behind.do(fail)
    behind.do(lambda: made.append(1))
    go.set()
    with pytest.raises(OSError, match="full"):
        behind.wait()
    behind.do(lambda: made.append(2))
    behind.stop()
    assert made == []
