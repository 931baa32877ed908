"""Drift: the assignment of least squared error whose code fits the container (paper, section 4.3).

    minimise  sum (u_i - m_i)**2   subject to   sum cost(letters of m) <= budget

Every symbol minimises ``(u - m)**2 + kappa * rate(m)``, with ``kappa`` (the Lagrange multiplier in squared steps)
searched on a fixed ladder.  On a uniform grid the best level for a given ``kappa`` is a count of thresholds below
``u``, so a rung is tried by comparisons of integers, and the ladder's thresholds depend on the plan alone.  Rates are
per symbol; whether an assignment fits is decided by the letters' true costs.

A bisection with true costs would try ten rungs.  A histogram of the stream predicts the cost of any rung from its
thresholds, up to a difference that hardly changes between rungs, so the true cost of one rung corrects the prediction
of the next.  The search ends at a rung that fits and either fills all but 1/512 (or two bits) of the budget or has a
neighbour below that does not fit; three trials are usual.

On mid-tread grids, where neighbouring rungs differ by many symbols, as for streams of equal magnitudes, symbols of
both are mixed.  (The paper's grid is refitted to whatever level such a stream drifts to.)

Rung 0 is ``kappa = 0``: the nearest level, nothing drifts.  The last rung ignores the data and repeats the cheapest
letter, which is what makes the budget hard: a plan exists only if that letter fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .grid import ONE
from .kernels import kernel
from .letters import letter_table
from .plan import StreamPlan, budget
from .vector_step import LANES
from .vectors import count_below

#: Neighbouring kappas differ by this factor; a rung moves about two symbols of a thousand across a threshold.
LADDER_RATIO = 2.0 ** (1 / 32)
#: The lowest kappa above zero moves no threshold by more than about 1/200 of a step.
LOWEST_KAPPA = 2.0**-9
HIGHEST_KAPPA = 2.0**24
#: A threshold above every position.
UNREACHABLE = 2**30


@dataclass(frozen=True, eq=False)
class Ladder:
    """The rungs of one stream plan.

    thresholds
        int32 ``[rungs, M - 1]`` in grid positions: a value's level is the number of thresholds below it.  Columns up
        to a multiple of eight follow, which no position exceeds.
    steps
        int32 ``[M - 1]``: what passing a threshold adds to the rate, in 1/1024 bit.
    cheapest
        uint8 ``[k]``: the symbols of the letter of least cost.
    """

    thresholds: NDArray[np.int32]
    steps: NDArray[np.int32]
    cheapest: NDArray[np.uint8]
    kappas: NDArray[np.float64]
    rates: NDArray[np.float64]


def ladder(plan: StreamPlan, head_dim: int) -> Ladder:
    """The ladder of a stream plan; it ends where every value in range takes a level of least rate."""
    return _ladder(plan.levels, plan.letter, plan.precision, plan.frequencies.tobytes(), head_dim)


# By content: every opened file has plans of its own, and a ladder takes a tenth of a second.
@lru_cache(maxsize=64)
def _ladder(levels: int, letter: int, precision: int, frequencies: bytes, head_dim: int) -> Ladder:
    plan = StreamPlan("prefix", levels, letter, precision, 0, 1, False, np.frombuffer(frequencies, np.uint16))
    rates = symbol_rates(plan)
    rungs = [thresholds(rates, 0.0)]
    kappas = [0.0]
    kappa = LOWEST_KAPPA
    least = np.flatnonzero(rates == rates.min())
    while kappa < HIGHEST_KAPPA:
        rungs.append(thresholds(rates, kappa))
        kappas.append(kappa)
        reached = [int((rungs[-1] < u).sum()) for u in (0, (plan.levels - 1) * ONE)]
        if all(level in least for level in reached):
            break
        kappa *= LADDER_RATIO
    table = letter_table(plan, head_dim)
    return Ladder(
        thresholds=np.pad(
            np.array(rungs, np.int32), ((0, 0), (0, -(plan.levels - 1) % 8)), constant_values=UNREACHABLE
        ),
        steps=np.rint(np.diff(rates) * 1024).astype(np.int32),
        cheapest=table.levels_of[int(plan.frequencies.argmax())],
        kappas=np.array(kappas),
        rates=rates,
    )


def symbol_rates(plan: StreamPlan) -> NDArray[np.float64]:
    """Bits a symbol adds to its letter, up to a constant: the mean letter cost with the other symbols at random.

    A table of letters is not exactly a product, so the marginal ``-log2 p(m)`` would overstate how cheap a level of
    rare letters is.  ``rates[m]`` averages the letters that hold ``m``, weighted by the marginals of the rest.
    """
    shape = (plan.levels,) * plan.letter
    share = plan.frequencies.astype(np.float64).reshape(shape)
    cost = letter_table(plan, plan.letter).costs.astype(np.float64).reshape(shape) / 1024
    axes = range(plan.letter)
    marginal = sum(share.sum(axis=tuple(b for b in axes if b != a)) for a in axes) / share.sum() / plan.letter
    marginal = (marginal + marginal[::-1]) / 2
    rates = np.zeros(plan.levels)
    for axis in axes:
        weighted = np.moveaxis(cost, axis, 0)
        while weighted.ndim > 1:
            weighted = weighted @ marginal
        rates += weighted / plan.letter
    return (rates + rates[::-1]) / 2


def thresholds(rates: NDArray[np.float64], kappa: float) -> NDArray[np.int32]:
    """Thresholds int32 ``[M - 1]`` of ``argmin_m (u - m)**2 + kappa * rates[m]``, the lower level at a tie.

    The costs are parabolas of one curvature, so their minimum is the lower envelope of the lines
    ``m**2 + kappa * rates[m] - 2 u m``; levels off the envelope are stepped over.
    """
    intercepts = np.arange(len(rates)) ** 2 + kappa * rates
    hull: list[int] = []
    crossings: list[float] = []
    for m in range(len(rates)):
        while hull:
            crossing = (intercepts[m] - intercepts[hull[-1]]) / (2 * (m - hull[-1]))
            if crossings and crossing <= crossings[-1]:
                hull.pop()
                crossings.pop()
                continue
            crossings.append(crossing)
            break
        hull.append(m)
    # Levels below the envelope's first are never taken: their thresholds lie below every position (u >= 0).
    result = np.full(len(rates) - 1, -1.0)
    for low, high, crossing in zip(hull, hull[1:], crossings, strict=False):
        result[low:high] = np.clip(np.floor(crossing * ONE), -1, UNREACHABLE)
    result[hull[-1] :] = UNREACHABLE
    return result.astype(np.int32)


def drift(
    position: NDArray[np.int32], plan: StreamPlan, head_dim: int, budgets: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Symbols of streams whose every sub-stream fits its container.

    ``position`` int32 ``[T, n]`` from :func:`dquantcodec.grid.positions`; ``budgets`` int64 ``[T, S]`` in 1/1024
    bit replaces the plan's own.  Returns symbols uint8 ``[T, n]`` and the rung int32 ``[T, S]`` (0: no drift).
    """
    rungs_ = ladder(plan, head_dim)
    table = letter_table(plan, head_dim)
    tokens, n = position.shape
    if budgets is None:
        budgets = np.full((tokens, plan.substreams), budget(plan), np.int64)
    symbols = np.empty((tokens, n), np.uint8)
    rungs = np.empty((tokens, plan.substreams), np.int32)
    drift_rows(
        position, rungs_.thresholds, rungs_.steps, rungs_.cheapest, table.costs, table.complete,
        head_dim, plan.letter, plan.levels, plan.grid == "mid-tread", budgets, symbols, rungs,
    )  # fmt: skip
    return symbols, rungs


@kernel
def assign_levels(position, threshold, out):
    """Levels of one row: how many thresholds lie below each position."""
    out[:] = 0
    whole = out.shape[0] // LANES * LANES
    for first in range(0, threshold.shape[0], 8):
        for i in range(0, whole, LANES):
            count_below(position, i, threshold, first, out, i)
    for i in range(whole, out.shape[0]):
        for k in range(threshold.shape[0]):
            out[i] += np.uint8(position[i] > threshold[k])


@kernel
def row_cost(symbols, head_dim, letter, levels, costs, complete):
    """What the letters of one row of symbols cost, in 1/1024 bit."""
    full = head_dim // letter
    rest = head_dim - full * letter
    base = np.uint32(levels)
    square = np.uint32(base * base)
    total = np.int64(0)
    for head in range(0, symbols.shape[0], head_dim):
        source = symbols[head : head + head_dim]
        if letter == 3:
            # Unsigned, so that no index is checked for counting from the end.
            j = np.uint64(0)
            for _ in range(full):
                value = (
                    np.uint32(source[j])
                    + base * np.uint32(source[j + np.uint64(1)])
                    + square * np.uint32(source[j + np.uint64(2)])
                )
                total += np.int64(costs[value])
                j += np.uint64(3)
        else:
            for i in range(full):
                code = np.uint32(0)
                for k in range(letter - 1, -1, -1):
                    code = np.uint32(code * base + np.uint32(source[i * letter + k]))
                total += np.int64(costs[code])
        if rest > 0:
            code = np.uint32(0)
            for k in range(rest - 1, -1, -1):
                code = np.uint32(code * base + np.uint32(source[full * letter + k]))
            total += np.int64(costs[complete[code]])
    return total


#: A rung that leaves less than this part (2**-9) of the budget unused, or two bits, is good enough: filling the rest
#: would lower the error by a few thousandths at most.
SLACK_BITS = 9
LEAST_SLACK = 2 * 1024

#: Positions per bin of the histogram: 1/32 of a step.
BIN_BITS = 11


@kernel
def count_above(position, above):
    """``above[b]`` = how many positions lie in bin ``b`` or higher, those beyond the levels in the outer bins; the last
    entry is 0."""
    last = above.shape[0] - 2
    for b in range(above.shape[0]):
        above[b] = 0
    for i in range(position.shape[0]):
        above[min(max(position[i] >> BIN_BITS, 0), last)] += 1
    for b in range(above.shape[0] - 2, -1, -1):
        above[b] += above[b + 1]


@kernel
def predicted_cost(threshold, steps, above):
    """The stream's rate at a rung in 2**-21 bit, up to a constant: the histogram with evenly filled bins."""
    top = np.int64(above.shape[0] - 1) << BIN_BITS
    total = np.int64(0)
    for k in range(steps.shape[0]):
        t = min(max(np.int64(threshold[k]), 0), top - 1)
        b = t >> BIN_BITS
        within = t & ((1 << BIN_BITS) - 1)
        count = (np.int64(above[b]) << BIN_BITS) - (np.int64(above[b]) - np.int64(above[b + 1])) * within
        total += np.int64(steps[k]) * count
    return total


@kernel
def predicted_rung(ladder_thresholds, steps, above, target, low, high):
    """The first rung in ``[low, high)`` predicted to cost at most ``target``, or ``high - 1``."""
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if predicted_cost(ladder_thresholds[middle], steps, above) <= target:
            high = middle
        else:
            low = middle + 1
    return low


#: A rung that leaves more than this part (2**-5) of the budget stands before one that moves many symbols at once.
ROOM_BITS = 5


#: Places of a mixture are ordered by so many bits of a multiplicative hash.
PLACE_BITS = 12


@kernel
def take_places(finer, coarser, below, out):
    for i in range(out.shape[0]):
        place = np.uint32(np.uint32(i) * np.uint32(2654435769)) >> np.uint32(32 - PLACE_BITS)
        out[i] = finer[i] if np.int64(place) < below else coarser[i]


@kernel
def mix_rungs(finer, out, budget, head_dim, letter, levels, costs, complete, coarser):
    """As many symbols of ``finer`` in ``out`` as fit; places are taken in a scattered order, so that no head has them
    all.

    Where many values of a stream are equal (one channel carries a head, and the rotation spreads it evenly), all of
    them pass a threshold together: one rung does not fit, and the next may leave nothing of the stream.
    """
    for i in range(out.shape[0]):
        coarser[i] = out[i]
    # Invariant: the first `fits` of 4096 parts of the order fit, `beyond` do not.
    fits, beyond = 0, 1 << PLACE_BITS
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        take_places(finer, coarser, middle, out)
        if row_cost(out, head_dim, letter, levels, costs, complete) <= budget:
            fits = middle
        else:
            beyond = middle
    take_places(finer, coarser, fits, out)


@kernel
def drift_rows(
    position,
    ladder_thresholds,
    steps,
    cheapest,
    costs,
    complete,
    head_dim,
    letter,
    levels,
    mix,
    budgets,
    symbols,
    rungs,
):
    substreams = budgets.shape[1]
    size = position.shape[1] // substreams
    above = np.empty(((levels - 1) << (16 - BIN_BITS)) + 2, np.int32)
    finer, coarser = np.empty(size, np.uint8), np.empty(size, np.uint8)
    last = ladder_thresholds.shape[0]
    for t in range(position.shape[0]):
        for j in range(substreams):
            row = position[t, j * size : (j + 1) * size]
            out = symbols[t, j * size : (j + 1) * size]
            slack = max(budgets[t, j] >> SLACK_BITS, LEAST_SLACK)
            # Invariant: rung `fits` fits, rung `below` does not.  Rung `last` is the cheapest letter throughout.
            below = -1
            fits = last
            rung = 0
            trials = 0
            while below + 1 < fits:
                assign_levels(row, ladder_thresholds[rung], out)
                surplus = row_cost(out, head_dim, letter, levels, costs, complete) - budgets[t, j]
                done = rung
                if surplus <= 0:
                    fits = rung
                    if surplus >= -slack:
                        break
                else:
                    below = rung
                if below + 1 < fits:
                    if trials == 0:
                        count_above(row, above)
                    trials += 1
                    if trials < 8:
                        target = predicted_cost(ladder_thresholds[rung], steps, above) - (surplus << BIN_BITS)
                        rung = predicted_rung(ladder_thresholds, steps, above, target, below + 1, fits)
                    else:
                        rung = (below + fits) // 2
            if fits == last:
                for i in range(size):
                    out[i] = cheapest[i % head_dim % letter]
            elif done != fits:
                assign_levels(row, ladder_thresholds[fits], out)
            # Symbols of the rung below are no further from their values, so every one of them helps.
            if mix and below >= 0 and fits < last:
                room = budgets[t, j] - row_cost(out, head_dim, letter, levels, costs, complete)
                if room > budgets[t, j] >> ROOM_BITS:
                    assign_levels(row, ladder_thresholds[below], finer)
                    mix_rungs(finer, out, budgets[t, j], head_dim, letter, levels, costs, complete, coarser)
            rungs[t, j] = fits
