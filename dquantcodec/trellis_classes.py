"""Variance classes of dependent quantisation: how often each of the two quantisers takes which level.

As :mod:`dquantcodec.classes`, but shares cannot be computed cell by cell: which level a value takes depends on its
neighbours.  A class is designed on values that stand for its source (as many quantiles, in a scattered order): rates
give the best path, the path gives shares, and shares give rates, until they settle.

The numbers are kept as integers in ``trellis_classes.json`` (``python -m dquantcodec.trellis_classes`` prints it).
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from .classes import COUNT, GAIN_ONE, MOST_GAIN, REACH, TAILS, ChannelClass, classes, deviation
from .grid import ONE
from .grouping import FREQUENCY_BITS, MOST_DEPENDENT, Levels
from .profile import SOURCES
from .trellis import NEXT, TURN
from .trellis_drift import SLOPE, rates, trellis, walk_rows

#: Narrower classes stay scalar: their levels are nearly all zero either way, and in steps they take fewer bits.
NARROWEST_DEPENDENT = 3
#: Values that stand for a source.
SAMPLE = 1 << 16
#: Rounds of design; the last ones are averaged, because shares keep moving by a few counts.
ROUNDS, AVERAGED = 14, 6


@lru_cache(maxsize=1)
def _all_classes() -> dict[str, tuple[ChannelClass, ...]]:
    stored = json.loads(files(__package__).joinpath("trellis_classes.json").read_text(encoding="ascii"))
    return {
        key: tuple(
            ChannelClass((*upper[:0:-1], *upper), least_squares, unbiased, (*second[:0:-1], *second))
            for upper, second, least_squares, unbiased in rows
        )
        for key, rows in stored.items()
    }


def dependent_classes(source: str, states: int) -> tuple[ChannelClass, ...]:
    """The classes of ``"normal"`` or ``"student"`` for 1, 4 or 8 states, narrowest first.

    With states, the narrowest are not worth a trellis and the widest have too many levels for half steps: these are
    scalar.
    """
    scalar = classes(source)
    if states == 1:
        return scalar
    found = _all_classes()[f"{source}-{states}"]
    return (*scalar[:NARROWEST_DEPENDENT], *found, *scalar[NARROWEST_DEPENDENT + len(found) :])


def quantiles(source: str) -> NDArray[np.float64]:
    """Values that share the mass of a source of unit variance equally, in an order without pattern."""
    x = np.linspace(0, 40, 400001)
    # The tail falls, and interpolation wants abscissae that rise.
    upper = np.interp(-(np.arange(SAMPLE // 2) + 0.5) / SAMPLE, -TAILS[source](x), x)
    values = np.concatenate([upper, -upper])
    # The multiplicative hash of Knuth, twice, with a shift between: neighbours end up far apart.
    number = np.arange(SAMPLE, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    number = (number ^ (number >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return values[np.argsort(number ^ (number >> np.uint64(32)), kind="stable")]


def _most(number: int) -> int:
    return max(1, math.ceil(REACH * deviation(number) - 0.5))


def design(number: int, source: str, states: int) -> ChannelClass:
    """Class ``number`` of a source, by iteration from shares that fall like a geometric series."""
    sigma, most = deviation(number), _most(number)
    u = quantiles(source) * sigma
    position = np.rint(np.clip(u, -most - 0.5, most + 0.5) * ONE).astype(np.int32)[None]
    k = np.arange(most + 1)
    start = np.exp2(-1 - 1.2 * k / max(sigma, 0.4))
    shares = [start, start]
    kept = np.zeros((2, most + 1))
    for round_ in range(ROUNDS):
        levels = Levels(_integers(shares[0], True), 256, _integers(shares[1], False))
        turns = _by_turn(_path(position, levels, states), states)
        counts = np.array([np.bincount(np.abs(index)[turn], minlength=most + 1) for index, turn in turns])
        # One count in all for what the sample did not show, shared like the source itself.
        seen = counts.astype(np.float64) + start / (start[0] + 2 * start[1:].sum())
        seen[:, 1:] /= 2
        shares = list(seen)
        if round_ >= ROUNDS - AVERAGED:
            kept += seen
    levels = Levels(_integers(kept[0], True), 256, _integers(kept[1], False))
    y = _path(position, levels, states) / 2
    x = position[0] / ONE
    uu, um, mm = float((x * x).sum()), float((x * y).sum()), float((y * y).sum())
    useful = mm > 0 and um > 0
    least_squares = um / mm if useful else 1.0
    share = um * um / (uu * mm) if useful else 0.0
    unbiased = least_squares / (share + (1 - share) / 8)
    gains = [round(GAIN_ONE * min(MOST_GAIN, gain)) for gain in (least_squares, unbiased)]
    return ChannelClass(levels.weights, gains[0], gains[1], levels.second)


def _integers(shares: NDArray[np.float64], middle_largest: bool) -> tuple[int, ...]:
    """Frequencies of all levels, summing to ``2**14``, from shares of the magnitudes (each sign's own)."""
    total = shares[0] + 2 * shares[1:].sum()
    upper = np.maximum(1, np.floor(shares / total * (1 << FREQUENCY_BITS))).astype(int)
    upper[0] += (1 << FREQUENCY_BITS) - upper[0] - 2 * upper[1:].sum()
    if middle_largest:
        while upper[1:].max() > upper[0]:
            widest = 1 + int(upper[1:].argmax())
            upper[widest] -= 1
            upper[0] += 2
    return (*map(int, upper[:0:-1]), *map(int, upper))


def _path(position: NDArray[np.int32], levels: Levels, states: int) -> NDArray[np.int64]:
    """Half steps of the best path through a row of one class."""
    found, costs = trellis(states), rates((levels,), [SLOPE])
    size = position.shape[1]
    path = np.empty((1, size), np.int8)
    walk_rows(
        position, costs.costs[0], costs.first, costs.most, costs.dependent, np.arange(size), np.zeros(size, np.int64),
        found.before, found.branch, found.turn, path,
    )  # fmt: skip
    half_steps: NDArray[np.int64] = path[0].astype(np.int64)
    return half_steps


def _by_turn(y: NDArray[np.int64], states: int) -> list[tuple[NDArray[np.int64], NDArray[np.bool_]]]:
    """Level indices of a path and where it was the turn of either quantiser."""
    k = np.sign(y) * ((np.abs(y) + 1) // 2)
    turn = np.empty(len(k), np.int64)
    state = 0
    for i, odd in enumerate((k & 1).tolist()):
        turn[i] = TURN[states][state]
        state = NEXT[states][state][odd]
    return [(k, turn == q) for q in (0, 1)]


def designed() -> str:
    """``trellis_classes.json``: of every source, number of states and class the frequencies of the levels from 0 up by
    either quantiser, and both gains."""
    parts = []
    for states in (4, 8):
        for source in SOURCES:
            numbers = [i for i in range(NARROWEST_DEPENDENT, COUNT) if _most(i) <= MOST_DEPENDENT]
            found = [design(i, source, states) for i in numbers]
            rows = [(list(c.weights[c.most :]), list(c.second[c.most :]), c.least_squares, c.unbiased) for c in found]
            parts.append(f'"{source}-{states}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    print(designed(), end="")
