"""The grid of grouped streams: one step a token, levels around zero, and a gain for every class.

    y_c = scale * (gain_class * level)

The step is a fixed part of the token's root mean square, or more: so much that no channel's level would lie beyond the
last of its class.  Positions are in coded order, eight places to every field of a group, those without a letter zero.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .grid import ONE, gained_scale, row_squares
from .group_arrays import group_arrays
from .grouping import MAX_FIELDS, MAX_GROUP_LETTERS, Grouping
from .kernels import kernel
from .letter_paths import letter_paths

#: Positions stay below 2**23 steps of 2**-16, whatever the values: their products with gains fit in 64 bits.
FARTHEST = (1 << 23) - 1
#: Gains of levels, whether in steps or in half steps, are whole in 1/512.
GAIN_ONE = 512


@lru_cache(maxsize=1024)
def inverse_reach(grouping: Grouping) -> NDArray[np.float32]:
    """One over the reach of every channel ``[n]``, zero of those left out."""
    reach = group_arrays(grouping).reach
    return np.divide(np.float32(1), reach, out=np.zeros_like(reach), where=reach > 0)


def grouped_scale(x: NDArray[np.float32], step: float, grouping: Grouping) -> NDArray[np.float16]:
    """FP16 scale ``[T]`` of streams float32 ``[T, n]``."""
    squares, peaks = np.empty(len(x), np.float64), np.empty(len(x), np.float64)
    row_squares(x, squares, peaks)
    needed = np.empty(len(x), np.float32)
    largest_parts(x, inverse_reach(grouping), needed)
    scale: NDArray[np.float16] = np.maximum(np.sqrt(squares / x.shape[1]) * step, needed).astype(np.float16)
    return scale


def grouped_positions(
    x: NDArray[np.float32], scale: NDArray[np.float16], grouping: Grouping, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Positions int32 ``[T, rows * 8]`` around zero, in 2**-16 steps, in ``out`` if it is given.

    A stream of scale zero has all of them zero.
    """
    channels = group_arrays(grouping).row_channel.reshape(-1)
    out = np.empty((len(x), len(channels)), np.int32) if out is None else out
    coded_positions(x, scale.astype(np.float32), channels, out)
    return out


def fit_scale(
    position: NDArray[np.int32],
    levels: NDArray[np.int8],
    scale: NDArray[np.float16],
    grouping: Grouping,
    unbiased: bool,
) -> NDArray[np.float16]:
    """The scale ``[T]`` to store for the final levels ``[T, rows * 8]``: as :func:`dquantcodec.grid.regain`, levels
    weighted by the gains of their classes."""
    gains = np.array([round(GAIN_ONE * c.factor) for c in grouping.classes], np.int64)[group_arrays(grouping).row_class]
    sums = np.empty((len(position), 3), np.int64)
    level_moments(position, levels, gains, sums)
    uu, uy, yy = sums.T.astype(np.float64)
    uu, uy, yy = uu / (ONE * ONE), uy / (ONE * GAIN_ONE), yy / (GAIN_ONE * GAIN_ONE)
    return gained_scale(scale, uu, uy, yy, unbiased)


def nearest_levels(position: NDArray[np.int32], grouping: Grouping) -> NDArray[np.uint8]:
    """The levels ``[T, n]`` nearest to positions, by channel and from the lowest of the class; ties towards zero."""
    arrays = group_arrays(grouping)
    channels = arrays.row_channel.reshape(-1)
    coded = channels >= 0
    middle = arrays.middle[channels[coded]].astype(np.int32)
    away = np.minimum((np.abs(position[:, coded]) + ONE // 2 - 1) // ONE, middle)
    levels = np.zeros((len(position), len(arrays.middle)), np.uint8)
    levels[:, channels[coded]] = np.where(position[:, coded] < 0, -away, away) + middle
    return levels


@lru_cache(maxsize=1024)
def letter_levels(grouping: Grouping) -> NDArray[np.int16]:
    """The levels, counted from zero's, of the fields of every letter of every table: int16 ``[all letters, 4]``.

    Letters as in :attr:`dquantcodec.grouping.GroupArrays.lengths`, state by state.
    """
    rows = []
    for table in grouping.tables:
        used = [grouping.classes[c] for c in table.classes]
        _, levels, _ = letter_paths([c.most for c in used], [bool(c.second) for c in used], grouping.states)
        rows.append(np.pad(levels.reshape(-1, len(used)), ((0, 0), (0, MAX_FIELDS - len(used)))))
    return np.concatenate(rows).astype(np.int16)


@kernel
def largest_parts(x, inverse, out):
    """Per row the largest magnitude as a part of its channel's limit."""
    for t in range(x.shape[0]):
        most = np.float32(0)
        for i in range(x.shape[1]):
            part = abs(x[t, i]) * inverse[i]
            most = part if part > most else most
        out[t] = most


@kernel
def coded_positions(x, step, channels, out):
    one = np.float32(ONE)
    farthest = np.float32(FARTHEST)
    for t in range(x.shape[0]):
        r = np.float32(1) / step[t] if step[t] > 0 else np.float32(0)
        for i in range(channels.shape[0]):
            if channels[i] >= 0:
                v = np.rint(x[t, channels[i]] * r * one)
                v = -farthest if v < -farthest else v
                v = farthest if v > farthest else v
                out[t, i] = np.int32(v)
            else:
                out[t, i] = 0


@kernel
def level_moments(position, levels, gains, sums):
    """Per row: sums of u * u, u * y and y * y as int64, exact, for levels y in 1/512; places without a letter are 0."""
    for t in range(position.shape[0]):
        uu = np.int64(0)
        uy = np.int64(0)
        yy = np.int64(0)
        for row in range(gains.shape[0]):
            um = np.int64(0)
            mm = np.int64(0)
            for i in range(row * MAX_GROUP_LETTERS, (row + 1) * MAX_GROUP_LETTERS):
                u = np.int64(position[t, i])
                m = np.int64(levels[t, i])
                uu += u * u
                um += u * m
                mm += m * m
            uy += gains[row] * um
            yy += gains[row] * gains[row] * mm
        sums[t, 0] = uu
        sums[t, 1] = uy
        sums[t, 2] = yy
