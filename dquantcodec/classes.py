"""Variance classes: how channels of one standard deviation are quantised and what their levels weigh.

Without a rotation every channel keeps its own variance.  All channels of a token share one step, so a channel needs as
many levels, and costs as many bits, as its standard deviation has steps: that ratio, in quarter octaves, is its class.
Levels lie around zero, and their shares follow from a source model as for mid-tread grids
(:mod:`dquantcodec.mid_tread`): a normal distribution for values, one of heavier tails (Student's with 8 degrees of
freedom) for keys.

A class reaches :data:`REACH` standard deviations.  Tokens with a value beyond get a larger step
(:func:`dquantcodec.group_grid.grouped_scale`), because clipped values are rare, large, and what attention looks at.

The numbers of all classes are kept as integers in ``classes.json`` (``python -m dquantcodec.classes`` prints it), so no
table depends on the last bit of a mathematical library.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from .grouping import FREQUENCY_BITS, Levels
from .mid_tread import SLOPE
from .profile import SOURCES

#: Standard deviations, in steps, of neighbouring classes differ by this factor.
RATIO = 2.0**0.25
#: Standard deviation of class 0 in steps: narrower channels are not worth a bit whatever the source.
NARROWEST = 2.0**-1.75
COUNT = 31
#: Largest level of any class: levels are bytes.
MOST = 127
#: Levels of a class reach so many standard deviations.
REACH = 3.5
#: Gains are stored in 1/256.
GAIN_ONE = 256
#: A reconstruction is not lifted beyond this, however much of a narrow class is lost.
MOST_GAIN = 3.0
#: Channels of less entropy a value, in bits, are left out of the stream.
LEAST_ENTROPY = 0.03


@dataclass(frozen=True)
class ChannelClass:
    """One class of one source.

    weights
        ``2 * most + 1`` integer frequencies of the levels ``-most`` to ``most``, summing to ``2**14``.
    least_squares, unbiased
        What a level is multiplied by when it is reconstructed, in 1/256, by either gain rule of
        :class:`dquantcodec.profile.StreamProfile`.
    second
        Of a dependent class (:mod:`dquantcodec.trellis_classes`): likewise the frequencies of quantiser 1.
    """

    weights: tuple[int, ...]
    least_squares: int
    unbiased: int
    second: tuple[int, ...] = ()

    @property
    def most(self) -> int:
        return len(self.weights) // 2

    @property
    def field_bits(self) -> int:
        return self.levels("unbiased").field_bits

    def levels(self, gain: str) -> Levels:
        """What a decoder needs of it, by a gain rule of :class:`dquantcodec.profile.StreamProfile`."""
        return Levels(self.weights, self.unbiased if gain == "unbiased" else self.least_squares, self.second)


def deviation(number: int) -> float:
    """Standard deviation of class ``number`` in steps."""
    return NARROWEST * RATIO**number


def nearest(deviations: NDArray[np.float64]) -> NDArray[np.int64]:
    """The classes nearest to standard deviations given in steps; the outermost for those beyond."""
    number = np.rint(np.log2(np.maximum(deviations, 1e-9) / NARROWEST) / math.log2(RATIO))
    return number.clip(0, COUNT - 1).astype(np.int64)


@lru_cache(maxsize=1)
def _all_classes() -> dict[str, tuple[ChannelClass, ...]]:
    stored = json.loads(files(__package__).joinpath("classes.json").read_text(encoding="ascii"))
    return {
        source: tuple(ChannelClass((*upper[:0:-1], *upper), *gains) for upper, *gains in stored[source])
        for source in SOURCES
    }


def classes(source: str) -> tuple[ChannelClass, ...]:
    """The classes of ``"normal"`` or ``"student"``, narrowest first.

    >>> [c.most for c in classes("normal")][::8]
    [1, 4, 17, 67]
    """
    return _all_classes()[source]


def _normal_tail(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([0.5 * math.erfc(v / math.sqrt(2)) for v in x])


def _student_tail(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper tail of Student's distribution with 8 degrees of freedom, scaled to unit variance."""
    t = x * math.sqrt(8 / 6)
    cos2 = 8 / (8 + t * t)
    inside = t / np.sqrt(8 + t * t) * (1 + cos2 / 2 * (1 + cos2 * 3 / 4 * (1 + cos2 * 5 / 6)))
    return (1 - inside) / 2


#: Mass of a source beyond a number of standard deviations, on one side.
TAILS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "normal": _normal_tail,
    "student": _student_tail,
}


def design(number: int, source: str) -> ChannelClass:
    """Levels of least ``error**2 + SLOPE * rate``, where rates are those of the shares that result."""
    tail, sigma = TAILS[source], deviation(number)
    most = min(MOST, max(1, math.ceil(REACH * sigma - 0.5)))
    nearest_edges = np.arange(most, dtype=np.float64) + 0.5
    edges = nearest_edges
    for _ in range(400):
        beyond = tail(edges / sigma)
        shares = np.maximum(np.append(1 - 2 * beyond[0], beyond - np.append(beyond[1:], 0)), 1e-7)
        # Edges never fall: a level that nothing takes must not take from its neighbours.
        moved = np.maximum.accumulate(nearest_edges - SLOPE / 2 * np.diff(np.log2(shares)))
        if np.abs(moved - edges).max() < 1e-10:
            break
        edges = moved
    upper = np.maximum(1, np.floor(shares * (1 << FREQUENCY_BITS))).astype(int)
    upper[0] += (1 << FREQUENCY_BITS) - upper[0] - 2 * upper[1:].sum()
    # Moments of position u and level m, on a grid fine enough for the third decimal of a gain.
    bounds = np.linspace(0, 40 * sigma, 40001)
    mass = -np.diff(tail(bounds / sigma))
    u = (bounds[1:] + bounds[:-1]) / 2
    m = np.searchsorted(edges, u)
    uu, um, mm = (float((mass * product).sum()) for product in (u * u, u * m, m * m))
    kept = um * um / (uu * mm) if mm else 0.0
    least_squares = um / mm if mm else 1.0
    unbiased = least_squares / (kept + (1 - kept) / 8)
    gains = [round(GAIN_ONE * min(MOST_GAIN, gain)) for gain in (least_squares, unbiased)]
    return ChannelClass((*map(int, upper[:0:-1]), *map(int, upper)), gains[0], gains[1])


def designed() -> str:
    """``classes.json``: of every source and class the frequencies from level 0 up and both gains."""
    lines = []
    for source in SOURCES:
        rows = [
            (list(c.weights[c.most :]), c.least_squares, c.unbiased) for c in (design(i, source) for i in range(COUNT))
        ]
        lines.append(f'"{source}": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    print(designed(), end="")
