"""Design of mid-tread grids: the step, and the shares of the levels after drift.

Drift takes the level of least ``(u - m)**2 + kappa * rate(m)``.  Shares of levels decide the rates, and rates decide
the shares: the design iterates until both agree for a normal stream, at the slope that serves the usual rates best,
and moves the step until the code of the letters fills the container but for a small margin.  The rest is for drift.

Named profiles keep what this module computed as integers (``python -m dquantcodec.mid_tread`` prints them), so no table
depends on the last bit of a mathematical library.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from . import tables
from .errors import InputError
from .profile import PROFILES, REFERENCE_VALUES, StreamProfile

#: The Lagrange multiplier a table is designed for, in squared steps per bit.
SLOPE = 1 / 8
#: The part of a container that the letters of a typical stream fill without further drift.
FILL = 0.985


def mid_tread(
    levels: int,
    container: float,
    *,
    coder: str = "prefix",
    precision: int = 12,
    letter: int | None = None,
    mean: bool = False,
    gain: str = "least-squares",
) -> StreamProfile:
    """A :class:`StreamProfile` with the mid-tread grid designed for ``container`` bytes a stream of 1024 values.

    >>> mid_tread(7, 232).step
    1.1478
    """
    if levels % 2 == 0:
        raise InputError(f"a mid-tread grid has an odd number of levels, not {levels}", code="profile-grid")
    base = StreamProfile(levels, container, coder, precision, letter=letter, mean=mean)
    step, weights = design(levels, base.symbols_per_letter, coder, precision, container)
    return replace(base, grid="mid-tread", step=step, weights=weights, gain=gain)


@lru_cache(maxsize=64)
def design(levels: int, letter: int, coder: str, precision: int, container: float) -> tuple[float, tuple[int, ...]]:
    """Step in root mean squares, a multiple of 1/10000, and weights of the levels."""
    wanted = FILL * 8 * container / REFERENCE_VALUES
    # Finer steps would draw the outer levels within one root mean square, and clip a third of the values.
    least = 2 / (levels - 1)
    if entropy(shares(levels, least)) < wanted:
        raise InputError(
            f"{levels} levels cannot fill {container} bytes of 1024 values; take more levels or fewer bytes",
            code="profile-grid",
        )
    # What the code of letters costs above their entropy hardly depends on the step, so three rounds settle it.
    surplus = 0.0
    for _ in range(3):
        low, high = least, 16.0
        while high - low > 5e-5:
            step = (low + high) / 2
            if entropy(shares(levels, step)) + surplus > wanted:
                low = step
            else:
                high = step
        step = round(high, 4)
        weights = tuple(max(1, round(p * 2**tables.WEIGHT_BITS)) for p in shares(levels, step))
        surplus = code_bits(weights, letter, coder, precision) - entropy(shares(levels, step))
    return step, weights


def shares(levels: int, step: float) -> list[float]:
    """Shares of the levels of a normal stream, ``step`` apart in standard deviations, after drift at :data:`SLOPE`."""
    middle = (levels - 1) / 2
    half = [0.5 * math.erfc((m + 0.5 - middle) * step / math.sqrt(2)) for m in range(levels // 2, levels - 1)]
    for _ in range(200):
        p = _masses(half)
        rates = [-math.log2(max(v, 1e-12)) for v in p]
        edge = 0.0
        upper = []
        for m in range(levels // 2, levels - 1):
            # Never below the threshold before: a level that nothing takes must not take from its neighbours.
            edge = max(edge, m + 0.5 - middle + SLOPE * (rates[m + 1] - rates[m]) / 2)
            upper.append(0.5 * math.erfc(edge * step / math.sqrt(2)))
        if max(abs(a - b) for a, b in zip(upper, half)) < 1e-13:
            break
        half = upper
    return _masses(half)


def _masses(tails: list[float]) -> list[float]:
    """Shares from the upper tails beyond each threshold of the upper half; mirrored levels are equal."""
    upper = [max(a - b, 1e-13) for a, b in zip(tails, [*tails[1:], 0.0])]
    return [*upper[::-1], 1 - 2 * tails[0], *upper]


def entropy(p: list[float]) -> float:
    return -sum(v * math.log2(v) for v in p)


def code_bits(weights: tuple[int, ...], letter: int, coder: str, precision: int) -> float:
    """Mean code length of a symbol in letters of independent symbols."""
    products = tables.letter_weights(list(weights), letter)
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    bits = precision - np.log2(build(products, precision).astype(np.float64))
    share = np.array(products, np.float64)
    return float((share * bits).sum() / share.sum()) / letter


if __name__ == "__main__":
    for name, profile in PROFILES.items():
        for kind in ("key", "value"):
            stream = getattr(profile, kind)
            if stream.grid == "mid-tread":
                found = design(
                    stream.levels, stream.symbols_per_letter, stream.coder, stream.precision, stream.container
                )
                print(name, kind, *found)
