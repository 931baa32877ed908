"""Drift of dependent streams: the cheapest path through the trellis, at the slope that makes the letters fit.

A path costs ``sum((u - level)**2 + kappa * rate)`` over the values of a sub-stream in coded order.  Of all paths the
Viterbi algorithm finds the best: of every quantiser and parity only the best level matters, and of the paths into a
state only the cheapest.  Rates are those of the classes; the true lengths of letters decide whether a path fits.

Rungs of kappa are those of :mod:`dquantcodec.group_drift`.  Of two near rungs of which only one fits, parts of the
finer path, from one letter that both begin in the same state to another, are taken as long as they fit.  Both paths are
the best at their rungs, so no such part is further from the values than the part it replaces.
The last rung is the path of zeros, which a plan's containers can always hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .grid import ONE
from .group_arrays import group_arrays
from .group_drift import HIGHEST_KAPPA, LADDER_RATIO, LOWEST_KAPPA, check_zeros
from .grouping import FREQUENCY_BITS, MAX_GROUP_LETTERS, Grouping, Levels
from .kernels import inlined, kernel
from .plan import StreamPlan, budget
from .trellis import NEXT, TURN

#: The slope that dependent classes are designed for, in squared steps per bit: of 0.085 to 0.125 the least error at the
#: same bits for normal sources of 1.7 to 2.5 bits a value.
SLOPE = 0.115
#: What a rung is taken to save of a stream's bits when the next one is guessed: 1/64.
RUNG_SAVES = 6
#: Paths whose bits differ by less than 1/64 of the container are close enough to be joined.
NEAR = 6
#: Cost of what is not possible.
_NEVER = np.float32(1e30)


@dataclass(frozen=True, eq=False)
class Trellis:
    """``before`` int64 ``[states, 2]``: the two states that lead to a state, and ``branch`` the quantiser and parity
    (``2 * quantiser + parity``) by which they do; ``following`` int64 ``[states, 2]`` and ``turn`` ``[states]``."""

    before: NDArray[np.int64]
    branch: NDArray[np.int64]
    following: NDArray[np.int64]
    turn: NDArray[np.int64]


@lru_cache(maxsize=4)
def trellis(states: int) -> Trellis:
    leading = [
        [(s, 2 * TURN[states][s] + parity) for s in range(states) for parity in (0, 1) if NEXT[states][s][parity] == to]
        for to in range(states)
    ]
    before, branch = np.array(leading, np.int64).transpose(2, 0, 1)
    return Trellis(
        np.ascontiguousarray(before),
        np.ascontiguousarray(branch),
        np.array(NEXT[states], np.int64),
        np.array(TURN[states], np.int64),
    )


@dataclass(frozen=True, eq=False)
class Rates:
    """``costs`` float32 ``[rungs, all]``: ``kappa * rate`` of the indices 0, 1, ... ``most`` of every class and of two
    more that are never taken, first of quantiser 0, then of quantiser 1; ``first``, ``most`` and ``dependent`` int64
    ``[classes]``."""

    costs: NDArray[np.float32]
    first: NDArray[np.int64]
    most: NDArray[np.int64]
    dependent: NDArray[np.int64]


def rates(classes: tuple[Levels, ...], kappas: list[float]) -> Rates:
    most = np.array([c.most for c in classes], np.int64)
    parts = []
    for c in classes:
        for weights in (c.weights, c.second or c.weights):
            bits = FREQUENCY_BITS - np.log2(weights[c.most :])
            parts += [np.array(kappas)[:, None] * bits, np.full((len(kappas), 2), _NEVER)]
    return Rates(
        costs=np.concatenate(parts, axis=1).astype(np.float32),
        first=np.cumsum(2 * (most + 3)) - 2 * (most + 3),
        most=most,
        dependent=np.array([bool(c.second) for c in classes], np.int64),
    )


@lru_cache(maxsize=1024)
def path_rates(grouping: Grouping) -> tuple[Rates, int]:
    """Rates at every rung but the last, and the rung that classes are designed for."""
    kappas = [0.0]
    while kappas[-1] < HIGHEST_KAPPA:
        kappas.append(max(LOWEST_KAPPA, kappas[-1] * LADDER_RATIO))
    return rates(grouping.classes, kappas), 1 + round(math.log(SLOPE / LOWEST_KAPPA) / math.log(LADDER_RATIO))


@dataclass(frozen=True, eq=False)
class Walk:
    """The values of all sub-streams in coded order: int64 ``[values]`` the place of each in a row of positions, its
    class, and what a level adds to its letter's number; ``letter`` int64 ``[letters + 1]``: where letters begin, and
    ``table`` ``[letters]`` their tables."""

    place: NDArray[np.int64]
    kind: NDArray[np.int64]
    stride: NDArray[np.int64]
    letter: NDArray[np.int64]
    table: NDArray[np.int64]


@lru_cache(maxsize=1024)
def walk(grouping: Grouping) -> Walk:
    """The walk of a grouping."""
    arrays = group_arrays(grouping)
    values, letters, tables = [], [0], []
    for row, fields, count, table in arrays.groups.tolist():
        for i in range(count):
            for f in range(fields):
                place = (row + f) * MAX_GROUP_LETTERS + i
                values.append((place, int(arrays.row_class[row + f]), int(arrays.strides[table, f])))
            letters.append(len(values))
            tables.append(table)
    place, kind, stride = (np.ascontiguousarray(column) for column in np.array(values, np.int64).T)
    return Walk(place, kind, stride, np.array(letters, np.int64), np.array(tables, np.int64))


def drift_dependent(
    position: NDArray[np.int32], plan: StreamPlan
) -> tuple[NDArray[np.uint16], NDArray[np.int8], NDArray[np.int32]]:
    """As :func:`dquantcodec.group_drift.drift_grouped`, for a grouping with states.

    Letters are ``state * letters of the table + letter``, and levels of dependent classes count half steps.
    """
    grouping = plan.grouping
    assert grouping is not None
    check_zeros(plan)
    arrays, found, (costs, start), steps = (
        group_arrays(grouping), trellis(grouping.states), path_rates(grouping), walk(grouping)
    )  # fmt: skip
    letters = np.empty((len(position), len(steps.table)), np.uint16)
    levels = np.zeros(position.shape, np.int8)
    rungs = np.empty((len(position), plan.substreams), np.int32)
    drift_paths(
        position, costs.costs, costs.first, costs.most, costs.dependent, start, steps.place, steps.kind, steps.stride,
        steps.letter, steps.table, arrays.first, arrays.letters, arrays.lengths, found.before, found.branch,
        found.following, found.turn, budget(plan) // 1024, letters, levels, rungs,
    )  # fmt: skip
    return letters, levels, rungs


def undrifted(position: NDArray[np.int32], grouping: Grouping) -> NDArray[np.uint8]:
    """The levels ``[T, n]`` of the paths nearest to positions, by channel, from the lowest of the class."""
    arrays, found, (costs, _), steps = (
        group_arrays(grouping), trellis(grouping.states), path_rates(grouping), walk(grouping)
    )  # fmt: skip
    path = np.empty((len(position), len(steps.place)), np.int8)
    walk_rows(
        position, costs.costs[0], costs.first, costs.most, costs.dependent, steps.place, steps.kind, found.before,
        found.branch, found.turn, path,
    )  # fmt: skip
    channels = arrays.row_channel.reshape(-1)[steps.place]
    levels = np.zeros((len(position), len(arrays.middle)), np.uint8)
    levels[:, channels] = path + arrays.middle[channels].astype(np.int16)
    return levels


@inlined
def best_pair(magnitude, level, index, costs, at):
    """Cost and index of the better of ``index``, whose level is ``level``, and ``index + 2``, two steps further."""
    near = magnitude - level
    far = near - np.float32(2)
    one, other = near * near + costs[at + index], far * far + costs[at + index + np.uint64(2)]
    return (other, index + np.uint64(2)) if other < one else (one, index)


@inlined
def best_of_parities(magnitude, half, costs, at, most):
    """Cost and index of the best even and of the best odd index of a quantiser.

    Those next to the magnitude and, which counts where rates weigh much, the least.  ``half``: what a level is less
    than its index, except for index 0, whose level is 0.
    """
    one, two = np.uint64(1), np.uint64(2)
    shifted = magnitude + half
    down = min(np.uint64(np.int64(shifted)), most)
    even = down & ~one
    odd = (max(down, one) - one) | one
    odd_cost, best_odd = best_pair(shifted, np.float32(np.int64(odd)), odd, costs, at)
    least = shifted - np.float32(1)
    least = least * least + costs[at + one]
    if least < odd_cost:
        odd_cost, best_odd = least, one
    if even > 0:
        even_cost, best_even = best_pair(shifted, np.float32(np.int64(even)), even, costs, at)
    else:
        far = shifted - np.float32(2)
        even_cost, best_even = far * far + costs[at + two], two
    zero = magnitude * magnitude + costs[at]
    if zero <= even_cost:
        even_cost, best_even = zero, np.uint64(0)
    return even_cost, best_even, odd_cost, best_odd


@inlined
def best_path(
    row, costs, first, most, dependent, place, kind, start, stop, before, branch, turn, cost, fresh, chosen, index, path
):
    """The levels around zero, int8 from ``path[0]`` on, of the values ``start`` to ``stop`` of the walk.

    ``cost`` and ``fresh`` float32 ``[states]``, ``chosen`` uint8 ``[values]`` (bit ``s``: which of the two ways into
    state ``s``) and ``index`` uint8 ``[values, 4]`` (the best of every quantiser and parity) are room to work in.
    """
    states = np.uint64(cost.shape[0])
    whole, half = np.float32(0), np.float32(0.5)
    cost[:] = _NEVER
    cost[0] = whole
    step = np.empty(4, np.float32)
    # Unsigned places throughout: signed ones are checked for being counted from the end.
    count, origin = np.uint64(stop - start), np.uint64(start)
    for j in range(count):
        i = origin + j
        c = np.uint64(kind[i])
        at, reach = np.uint64(first[c]), np.uint64(most[c])
        magnitude = np.float32(abs(row[np.uint64(place[i])])) * np.float32(1 / ONE)
        step[0], even, step[1], odd = best_of_parities(magnitude, whole, costs, at, reach)
        index[j, 0], index[j, 1] = np.uint8(even), np.uint8(odd)
        if not dependent[c]:
            # No state moves, so the better one is taken at once.
            index[j, 2] = index[j, 1] if step[1] < step[0] else index[j, 0]
            continue
        step[2], even, step[3], odd = best_of_parities(magnitude, half, costs, at + reach + np.uint64(3), reach)
        index[j, 2], index[j, 3] = np.uint8(even), np.uint8(odd)
        ways = np.uint64(0)
        for s in range(states):
            one = cost[np.uint64(before[s, 0])] + step[np.uint64(branch[s, 0])]
            other = cost[np.uint64(before[s, 1])] + step[np.uint64(branch[s, 1])]
            way = np.uint64(other < one)
            fresh[s] = other if other < one else one
            ways |= way << s
        chosen[j] = np.uint8(ways)
        for s in range(states):
            cost[s] = fresh[s]
    state = np.uint64(0)
    for s in range(states):
        if cost[s] < cost[state]:
            state = s
    for back in range(count):
        j = count - np.uint64(1) - back
        i = origin + j
        if dependent[np.uint64(kind[i])]:
            way = (np.uint64(chosen[j]) >> state) & np.uint64(1)
            by = np.uint64(branch[state, way])
            k = np.int64(index[j, by])
            y = 2 * k - (np.int64(by >> np.uint64(1)) & np.int64(k > 0))
            state = np.uint64(before[state, way])
        else:
            y = np.int64(index[j, 2])
        path[j] = -y if row[np.uint64(place[i])] < 0 else y


@inlined
def path_letters(
    path, start, kind, dependent, most, stride, letter, table, low, high, table_first, table_letters, lengths,
    following, letters, bits, state_at,
):  # fmt: skip
    """Letters ``low`` to ``high`` of a path, what each costs and the state it starts from; returns all bits."""
    state = np.uint64(0)
    total = np.int64(0)
    i = np.uint64(start)
    for j in range(np.uint64(high - low)):
        number = np.int64(0)
        state_at[j] = np.uint8(state)
        before = np.int64(state)
        end = np.uint64(letter[np.uint64(low) + j + np.uint64(1)])
        while i < end:
            c = np.uint64(kind[i])
            y = np.int64(path[i - np.uint64(start)])
            if dependent[c]:
                # Half steps to the index: away from zero, for quantiser 1 gives odd half steps.
                k = (y + np.int64(y > 0)) >> 1
                state = np.uint64(following[state, np.uint64(k & 1)])
            else:
                k = y
            number += (k + most[c]) * stride[i]
            i += np.uint64(1)
        t = np.uint64(table[np.uint64(low) + j])
        number += before * table_letters[t]
        letters[j] = np.uint16(number)
        bits[j] = lengths[np.uint64(table_first[t] + number)]
        total += np.int64(bits[j])
    return total


@kernel
def walk_rows(position, costs, first, most, dependent, place, kind, before, branch, turn, path):
    """Best paths of rows that are one sub-stream each, without letters."""
    states = before.shape[0]
    size = place.shape[0]
    cost, fresh = np.empty(states, np.float32), np.empty(states, np.float32)
    chosen, index = np.empty(size, np.uint8), np.empty((size, 4), np.uint8)
    for t in range(position.shape[0]):
        best_path(
            position[t], costs, first, most, dependent, place, kind, 0, size, before, branch, turn, cost, fresh, chosen,
            index, path[t],
        )  # fmt: skip


@kernel
def drift_paths(
    position, costs, class_first, class_most, dependent, start_rung, place, kind, stride, letter, table, table_first,
    table_letters, lengths, before, branch, following, turn, budget_bits, letters, levels, rungs,
):  # fmt: skip
    states = before.shape[0]
    substreams = rungs.shape[1]
    width = letters.shape[1] // substreams
    longest = np.int64(0)
    for j in range(substreams):
        longest = max(longest, letter[(j + 1) * width] - letter[j * width])
    cost, fresh = np.empty(states, np.float32), np.empty(states, np.float32)
    chosen, index = np.empty(longest, np.uint8), np.empty((longest, 4), np.uint8)
    coarse, fine, trial = np.empty(longest, np.int8), np.empty(longest, np.int8), np.empty(longest, np.int8)
    coarse_letters, fine_letters, trial_letters = (
        np.empty(width, np.uint16),
        np.empty(width, np.uint16),
        np.empty(width, np.uint16),
    )
    coarse_bits, fine_bits, trial_bits = np.empty(width, np.uint8), np.empty(width, np.uint8), np.empty(width, np.uint8)
    coarse_state, fine_state, trial_state = (
        np.empty(width, np.uint8),
        np.empty(width, np.uint8),
        np.empty(width, np.uint8),
    )
    last = np.int64(costs.shape[0])
    for j in range(substreams):
        low, high = j * width, (j + 1) * width
        start, stop = letter[low], letter[high]
        for t in range(position.shape[0]):
            # Invariant: rung `fits` fits, rung `below` does not; their paths are `coarse` and `fine`, and by so much.
            below, fits = np.int64(-1), last
            excess, room = np.int64(0), np.int64(0)
            known = False
            rung = np.int64(start_rung)
            trials = 0
            while below + 1 < fits or not known:
                if rung == last:
                    trial[:] = 0
                else:
                    best_path(
                        position[t], costs[rung], class_first, class_most, dependent, place, kind, start, stop, before,
                        branch, turn, cost, fresh, chosen, index, trial,
                    )  # fmt: skip
                total = path_letters(
                    trial, start, kind, dependent, class_most, stride, letter, table, low, high, table_first,
                    table_letters, lengths, following, trial_letters, trial_bits, trial_state,
                )  # fmt: skip
                surplus = total - budget_bits
                if surplus <= 0:
                    fits, known, room = rung, True, -surplus
                    coarse, trial = trial, coarse
                    coarse_letters, trial_letters = trial_letters, coarse_letters
                    coarse_bits, trial_bits = trial_bits, coarse_bits
                    coarse_state, trial_state = trial_state, coarse_state
                else:
                    below, excess = rung, surplus
                    fine, trial = trial, fine
                    fine_letters, trial_letters = trial_letters, fine_letters
                    fine_bits, trial_bits = trial_bits, fine_bits
                    fine_state, trial_state = trial_state, fine_state
                trials += 1
                if known and below >= 0:
                    if (excess + room) << NEAR < budget_bits:
                        break
                    # Between the two in proportion; after a few trials, halving.
                    rung = (below + fits) // 2
                    if trials <= 4:
                        rung = below + (fits - below) * excess // (excess + room)
                    rung = min(max(rung, below + 1), fits - 1)
                else:
                    # A guess by what a rung usually saves, twice as bold each time.
                    step = 1 + ((abs(surplus) << (RUNG_SAVES + trials - 1)) // budget_bits)
                    rung = min(below + step, fits - 1) if surplus > 0 else max(fits - step, np.int64(0))
                if below + 1 >= fits:
                    rung = fits
            # Parts of the finer path between letters that both paths begin in one state, last first, as room allows.
            if below >= 0:
                dearer, end = np.int64(0), width
                for i in range(width - 1, -1, -1):
                    dearer += np.int64(fine_bits[i]) - np.int64(coarse_bits[i])
                    if fine_state[i] != coarse_state[i] or fine_letters[i] == coarse_letters[i]:
                        continue
                    if dearer <= room:
                        room -= dearer
                        for k in range(i, end):
                            coarse_letters[k] = fine_letters[k]
                        for k in range(letter[low + i] - start, letter[low + end] - start):
                            coarse[k] = fine[k]
                    dearer, end = np.int64(0), i
            for i in range(width):
                letters[t, low + i] = coarse_letters[i]
            for i in range(start, stop):
                levels[t, place[i]] = coarse[i - start]
            rungs[t, j] = fits
