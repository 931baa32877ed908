"""Drift of grouped streams: as :mod:`dquantcodec.drift`, with thresholds for every class.

Levels lie around zero, so a level is a count of thresholds below the magnitude of a position.  Rungs of the ladder are
wide apart here, a quarter octave of kappa: of the two neighbouring rungs of which only one fits, groups take the
letters of the finer one, in a scattered order, as long as they fit.  That fills the container to the last bits, also
where many values are equal and pass a threshold together.

Rung 0 is ``kappa = 0``; the last rung makes every level zero, which a plan's containers can always hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .drift import UNREACHABLE
from .errors import CapacityError
from .grid import ONE
from .group_arrays import group_arrays, zero_bits
from .grouping import MAX_GROUP_LETTERS
from .kernels import inlined, kernel
from .mid_tread import SLOPE
from .plan import StreamPlan, budget
from .vectors import add_field

LADDER_RATIO = 2.0**0.25
LOWEST_KAPPA = 2.0**-7
HIGHEST_KAPPA = 2.0**24
#: What a rung is taken to save of a stream's bits when the next one is guessed: 1/64.
RUNG_SAVES = 6


@dataclass(frozen=True, eq=False)
class GroupLadder:
    """The rungs of one grouped stream plan.

    thresholds
        int32 ``[rungs, all thresholds]`` in 2**-16 steps, those of a class together, rising.
    first, most
        int64 ``[classes]``: where the thresholds of a class begin, and how many there are.
    start
        The rung that the tables are designed for.
    fill
        int64 ``[H * G]``: groups of every sub-stream in the order in which they take the finer rung.
    """

    thresholds: NDArray[np.int32]
    first: NDArray[np.int64]
    most: NDArray[np.int64]
    start: int
    fill: NDArray[np.int64]


@lru_cache(maxsize=1024)
def check_zeros(plan: StreamPlan) -> None:
    """Raise :class:`CapacityError` (``capacity-container``) if a container does not hold the letters of zeros."""
    assert plan.grouping is not None
    needed = int(zero_bits(plan.grouping).reshape(plan.substreams, -1).sum(axis=1).max())
    if needed > budget(plan) // 1024:
        raise CapacityError(
            f"a container of {plan.words * plan.word_bytes} bytes cannot hold the letters of zeros, {needed} bits; "
            "fit a plan for a larger container",
            code="capacity-container",
        )


@lru_cache(maxsize=1024)
def group_ladder(plan: StreamPlan) -> GroupLadder:
    """The ladder of a plan.  Raises what :func:`check_zeros` raises."""
    assert plan.grouping is not None
    check_zeros(plan)
    classes = plan.grouping.classes
    # Rates that rise ever faster keep thresholds in order at any kappa.
    rises = [np.maximum.accumulate(-np.diff(np.log2(c.weights[c.most :]))) for c in classes]
    nearest = np.concatenate([np.arange(c.most) + 0.5 for c in classes])
    all_rises = np.concatenate(rises)
    kappas = [0.0]
    while kappas[-1] < HIGHEST_KAPPA:
        kappas.append(max(LOWEST_KAPPA, kappas[-1] * LADDER_RATIO))
    rungs = nearest + np.array(kappas)[:, None] * all_rises / 2
    thresholds = np.minimum(np.floor(rungs * ONE), UNREACHABLE).astype(np.int32)
    thresholds = np.vstack([thresholds, np.full_like(thresholds[:1], UNREACHABLE)])
    most = np.array([c.most for c in classes], np.int64)
    groups = len(group_arrays(plan.grouping).groups) // plan.substreams
    # Multiples of an odd number near the golden part of a power of two: scattered, and the same everywhere.
    scattered = sorted(range(groups), key=lambda g: (g * 2654435769) % (1 << 32))
    return GroupLadder(
        thresholds=np.ascontiguousarray(thresholds),
        first=np.cumsum(most) - most,
        most=most,
        start=1 + round(math.log(SLOPE / LOWEST_KAPPA) / math.log(LADDER_RATIO)),
        fill=np.concatenate([np.array(scattered, np.int64) + j * groups for j in range(plan.substreams)]),
    )


def drift_grouped(
    position: NDArray[np.int32], plan: StreamPlan
) -> tuple[NDArray[np.uint16], NDArray[np.int8], NDArray[np.int32]]:
    """Streams whose every sub-stream fits its container.

    ``position`` int32 ``[T, rows * 8]`` from :func:`dquantcodec.group_grid.grouped_positions`.  Returns letters uint16
    ``[T, letters]``, their levels int8 ``[T, rows * 8]`` around zero, and the rung int32 ``[T, S]`` (0: no drift).
    """
    assert plan.grouping is not None
    arrays, ladder = group_arrays(plan.grouping), group_ladder(plan)
    tokens, places = position.shape
    letters = np.empty((tokens, plan.grouping.heads * plan.grouping.letters_per_head), np.uint16)
    levels = np.empty((tokens, places), np.int8)
    rungs = np.empty((tokens, plan.substreams), np.int32)
    drift_group_rows(
        position, ladder.thresholds, ladder.first, ladder.most, ladder.start, ladder.fill, arrays.groups,
        arrays.row_class, arrays.strides, arrays.first, arrays.lengths, budget(plan) // 1024, letters, levels, rungs,
    )  # fmt: skip
    return letters, levels, rungs


@inlined
def letters_at(
    position,
    place,
    limits,
    class_first,
    class_most,
    groups,
    start,
    stop,
    row_class,
    strides,
    first,
    lengths,
    number,
    letters,
    levels,
    bits,
):
    """Letters and levels of the groups ``start`` to ``stop`` at one rung; ``bits`` receives what each group costs.

    ``position`` and ``levels`` are those of a sub-stream, whose rows begin at row ``place``.  Returns the bits of all.
    """
    total = np.int64(0)
    at = 0
    for g in range(start, stop):
        row, fields, count, table = groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3]
        number[:] = 0
        for f in range(fields):
            c = row_class[row + f]
            add_field(
                position, (row + f - place) * MAX_GROUP_LETTERS, limits, class_first[c], class_most[c],
                strides[table, f], levels, number,
            )  # fmt: skip
        cost = np.int64(0)
        base = first[table]
        for i in range(count):
            letters[at + i] = np.uint16(number[i])
            cost += np.int64(lengths[base + np.int64(number[i])])
        at += count
        bits[g - start] = cost
        total += cost
    return total


@kernel
def drift_group_rows(
    position,
    thresholds,
    class_first,
    class_most,
    start_rung,
    fill,
    groups,
    row_class,
    strides,
    first,
    lengths,
    budget_bits,
    letters,
    levels,
    rungs,
):
    substreams = rungs.shape[1]
    size = groups.shape[0] // substreams
    width = letters.shape[1] // substreams
    number = np.empty(MAX_GROUP_LETTERS, np.int32)
    coarse, fine, trial = np.empty(width, np.uint16), np.empty(width, np.uint16), np.empty(width, np.uint16)
    coarse_bits, fine_bits, trial_bits = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
    coarse_levels, fine_levels, trial_levels = (
        np.empty(levels.shape[1], np.int8),
        np.empty(levels.shape[1], np.int8),
        np.empty(levels.shape[1], np.int8),
    )
    before = np.empty(size, np.int64)
    last = np.int64(thresholds.shape[0] - 1)
    for j in range(substreams):
        first_row = groups[j * size, 0]
        last_row = groups[(j + 1) * size - 1, 0] + groups[(j + 1) * size - 1, 1]
        places = slice(first_row * MAX_GROUP_LETTERS, last_row * MAX_GROUP_LETTERS)
        at = np.int64(0)
        for g in range(size):
            before[g] = at
            at += groups[j * size + g, 2]
        for t in range(position.shape[0]):
            row = position[t, places]
            # Invariant: rung `fits` fits, rung `below` does not; their letters are `coarse` and `fine`.
            below, fits = np.int64(-1), last
            known = False
            room = np.int64(0)
            rung = np.int64(start_rung)
            trials = 0
            while below + 1 < fits or not known:
                total = letters_at(
                    row, first_row, thresholds[rung], class_first, class_most, groups, j * size, (j + 1) * size,
                    row_class, strides, first, lengths, number, trial, trial_levels, trial_bits,
                )  # fmt: skip
                surplus = total - budget_bits
                if surplus <= 0:
                    fits, known, room = rung, True, -surplus
                    coarse, trial = trial, coarse
                    coarse_bits, trial_bits = trial_bits, coarse_bits
                    coarse_levels, trial_levels = trial_levels, coarse_levels
                else:
                    below = rung
                    fine, trial = trial, fine
                    fine_bits, trial_bits = trial_bits, fine_bits
                    fine_levels, trial_levels = trial_levels, fine_levels
                # A guess by what a rung usually saves; after a few, halving.
                trials += 1
                step = (abs(surplus) << RUNG_SAVES) // budget_bits
                if trials > 4:
                    rung = (below + fits) // 2
                elif surplus > 0:
                    rung = min(below + 1 + step, fits - 1)
                else:
                    rung = max(fits - 1 - step, below + 1)
                if below + 1 >= fits:
                    rung = fits
            out, out_levels = letters[t, j * width : (j + 1) * width], levels[t, places]
            # Loops: to assign one array to another takes Numba seconds to compile.
            for i in range(width):
                out[i] = coarse[i]
            for i in range(out_levels.shape[0]):
                out_levels[i] = coarse_levels[i]
            if below >= 0:
                for k in range(size):
                    g = fill[j * size + k] - j * size
                    dearer = fine_bits[g] - coarse_bits[g]
                    if dearer <= room:
                        room -= dearer
                        for i in range(before[g], before[g] + groups[j * size + g, 2]):
                            out[i] = fine[i]
                        start = (groups[j * size + g, 0] - first_row) * MAX_GROUP_LETTERS
                        for i in range(start, start + groups[j * size + g, 1] * MAX_GROUP_LETTERS):
                            out_levels[i] = fine_levels[i]
            rungs[t, j] = fits
