"""The grid: a stream's values as positions on uniformly spaced levels.

Two rules.  ``min-max`` (paper, section 4.2): ``offset + scale * m``, the first and the last level at the extremes.
``mid-tread``: ``scale * (m - (M - 1) / 2)``, an odd number of levels around zero whose spacing is a fixed part of the
stream's root mean square; what lies beyond the last level is clipped.  After rotation and mean removal streams are
centred, so an offset says nothing, and the extremes of a thousand values say little about the other ones.

After this stage the encoder is integer arithmetic: a position is the distance from the offset in 2**-16 steps.
Sums over positions are exact in any order, so every thread count and device gives the same bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel
from .means import round_down_half, round_up_half

#: Fraction bits of a position.  Positions stay within 96 * 2**16 < 2**23, their squares summed over 2**16 values
#: below 2**62.
FRACTION = 16
ONE = 1 << FRACTION

#: Steps beyond the outer levels that a value may lie; normal streams of a thousand values hardly ever go so far.
REACH = 2
#: Steps beyond the outer levels up to which a mid-tread position is exact: clipped values still count in the gain.
BEYOND = 32
#: A gain that is not allowed to grow beyond this, however little of a stream is left after coding.
MOST_GAIN = 3.0
#: Attention averages values over many tokens, which averages noise away but not bias: of the error of values, bias
#: counts in full and noise as this part.
NOISE_SHARE = 1 / 8


def min_max_grid(x: NDArray[np.float32], levels: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """FP16 offset and scale ``[T]`` of streams float32 ``[T, n]``: level 0 at the minimum, the last at the maximum.

    The offset is rounded down and the scale up, so that the grid always covers the stream.
    """
    low, high = np.empty(x.shape[0], np.float32), np.empty(x.shape[0], np.float32)
    row_ranges(x, low, high)
    offset = round_down_half(low)
    scale = round_up_half((high - offset.astype(np.float32)) / np.float32(levels - 1))
    return offset, scale


def positions(
    x: NDArray[np.float32],
    offset: NDArray[np.float16],
    scale: NDArray[np.float16],
    levels: int,
    out: NDArray[np.int32] | None = None,
) -> NDArray[np.int32]:
    """Positions int32 ``[T, n]`` in ``[0, levels - 1] * 2**16``, in ``out`` if it is given.

    A stream of scale zero has all of them zero.
    """
    return _positions(x, offset.astype(np.float32), scale, 0.0, 0, (levels - 1) * ONE, out)


def mid_tread_scale(x: NDArray[np.float32], step: float, levels: int) -> NDArray[np.float16]:
    """FP16 scale ``[T]`` of streams float32 ``[T, n]``: ``step`` times the root mean square.

    More if the largest magnitude would lie further than ``REACH`` steps outside: a stream of which one head is much
    larger than the others must not lose that head.
    """
    squares, peaks = np.empty(x.shape[0], np.float64), np.empty(x.shape[0], np.float64)
    row_squares(x, squares, peaks)
    usual = np.sqrt(squares / x.shape[1]) * step
    scale: NDArray[np.float16] = np.maximum(usual, peaks / ((levels - 1) / 2 + REACH)).astype(np.float16)
    return scale


def mid_tread_positions(
    x: NDArray[np.float32], scale: NDArray[np.float16], levels: int, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Positions int32 ``[T, n]`` within ``BEYOND`` steps of ``[0, levels - 1] * 2**16``, in ``out`` if it is given.

    Those of a stream of scale zero are the middle.
    """
    offset = np.zeros(len(x), np.float32)
    return _positions(x, offset, scale, (levels - 1) / 2, -BEYOND * ONE, (levels - 1 + BEYOND) * ONE, out)


def _positions(
    x: NDArray[np.float32],
    offset: NDArray[np.float32],
    scale: NDArray[np.float16],
    middle: float,
    bottom: int,
    top: int,
    out: NDArray[np.int32] | None,
) -> NDArray[np.int32]:
    """``(x - offset) / scale + middle`` in 2**-16 steps, within ``bottom`` and ``top``; scale zero: ``middle``."""
    out = np.empty(x.shape, np.int32) if out is None else out
    limits = np.float32(middle), np.float32(bottom), np.float32(top)
    stream_positions(x, offset, scale.astype(np.float32), *limits, out)
    return out


def nearest_levels(position: NDArray[np.int32], levels: int) -> NDArray[np.uint8]:
    """The levels nearest to positions; ties to the lower level, as drift has it."""
    return ((position + ONE // 2 - 1) // ONE).clip(0, levels - 1).astype(np.uint8)


def refit(
    position: NDArray[np.int32],
    symbols: NDArray[np.uint8],
    offset: NDArray[np.float16],
    scale: NDArray[np.float16],
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Least-squares offset and scale ``[T]`` for the final symbols uint8 ``[T, n]`` (paper, appendix).

    Kept only where it lowers the squared error after rounding to FP16, so refitting never hurts.
    """
    sums = np.empty((position.shape[0], 5), np.int64)
    moments(position, symbols, sums)
    values = np.float64(position.shape[1])
    grid = np.stack([offset, scale], axis=1).astype(np.float64)
    fitted = np.empty_like(grid)
    fit_rows(sums, values, grid, fitted)
    with np.errstate(over="ignore"):
        candidate = fitted.astype(np.float16)
    better = np.empty(len(sums), np.bool_)
    compare_rows(sums, values, grid, candidate.astype(np.float64), better)
    return np.where(better, candidate[:, 0], offset), np.where(better, candidate[:, 1], scale)


def regain(
    position: NDArray[np.int32], symbols: NDArray[np.uint8], scale: NDArray[np.float16], levels: int, unbiased: bool
) -> NDArray[np.float16]:
    """The scale ``[T]`` of a mid-tread grid for the final symbols.

    Least squares makes reconstructions too small by the distortion ``D``: fine for keys.  ``unbiased`` divides that
    out as far as the noise it adds allows: of all gains, that with the least ``bias**2 + NOISE_SHARE * noise``.
    """
    sums = np.empty((position.shape[0], 5), np.int64)
    moments(position, symbols, sums)
    m, mm, u, um, uu = sums.T.astype(np.float64)
    u, um, uu = u / ONE, um / ONE, uu / (ONE * ONE)
    # About the middle level: y for the symbols, v for the positions.
    middle = (levels - 1) / 2
    n = position.shape[1]
    yy = mm - 2 * middle * m + n * middle**2
    vy = um - middle * (u + m) + n * middle**2
    vv = uu - 2 * middle * u + n * middle**2
    return gained_scale(scale, vv, vy, yy, unbiased)


def gained_scale(
    scale: NDArray[np.float16],
    vv: NDArray[np.float64],
    vy: NDArray[np.float64],
    yy: NDArray[np.float64],
    unbiased: bool,
) -> NDArray[np.float16]:
    """``scale`` ``[T]`` times the gain that sums of squares and products of positions v and levels y ask for."""
    gained = np.empty(len(scale), np.float64)
    gain_rows(scale.astype(np.float64), vv, vy, yy, unbiased, gained)
    with np.errstate(over="ignore"):
        candidate = gained.astype(np.float16)
    return np.where(np.isfinite(candidate), candidate, scale)


@kernel
def gain_rows(scale, vv, vy, yy, unbiased, out):
    for t in range(out.shape[0]):
        gain = 1.0
        if yy[t] > 0 and vy[t] > 0:
            gain = vy[t] / yy[t]
            if unbiased:
                kept = vy[t] * vy[t] / (vv[t] * yy[t])
                gain /= kept + (1 - kept) * NOISE_SHARE
        out[t] = scale[t] * min(gain, MOST_GAIN)


@kernel
def row_squares(x, squares, peaks):
    """Sums of squares in FP64, and largest magnitudes.

    The order is that of a GPU's lanes: of eight neighbours in every 256 values each is summed alone, then the eight are
    added, then the sums of those 32 eights, always neighbours first.
    """
    lanes = 32
    sums = np.empty(8 * lanes, np.float64)
    eights = np.empty(lanes, np.float64)
    for t in range(x.shape[0]):
        row = x[t]
        used = min(row.shape[0], 8 * lanes)
        sums[:] = 0
        for k in range(used):
            sums[k] = np.float64(row[k]) * np.float64(row[k])
        for first in range(8 * lanes, row.shape[0], 8 * lanes):
            part = row[first : first + 8 * lanes]
            for k in range(part.shape[0]):
                sums[k] += np.float64(part[k]) * np.float64(part[k])
        for k in range(lanes):
            a = sums[8 * k : 8 * k + 8]
            eights[k] = ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]))
        for half in (16, 8, 4, 2, 1):
            for k in range(half):
                eights[k] = eights[2 * k] + eights[2 * k + 1]
        squares[t] = eights[0]
        largest = np.float32(0)
        for i in range(row.shape[0]):
            magnitude = abs(row[i])
            largest = magnitude if magnitude > largest else largest
        peaks[t] = largest


@kernel
def row_ranges(x, low, high):
    for t in range(x.shape[0]):
        smallest = x[t, 0]
        largest = x[t, 0]
        for i in range(1, x.shape[1]):
            v = x[t, i]
            smallest = v if v < smallest else smallest
            largest = v if v > largest else largest
        low[t] = smallest
        high[t] = largest


@kernel
def stream_positions(x, offset, step, middle, bottom, top, out):
    one = np.float32(65536)
    for t in range(x.shape[0]):
        o = offset[t]
        r = np.float32(1) / step[t] if step[t] > 0 else np.float32(0)
        for i in range(x.shape[1]):
            v = np.rint(((x[t, i] - o) * r + middle) * one)
            v = bottom if v < bottom else v
            v = top if v > top else v
            out[t, i] = np.int32(v)


@kernel
def moments(position, symbols, sums):
    """Per row: sums of m, m*m, u, u*m, u*u as int64, exact (bounds at :data:`FRACTION`)."""
    for t in range(position.shape[0]):
        sm = np.int64(0)
        smm = np.int64(0)
        su = np.int64(0)
        sum_ = np.int64(0)
        suu = np.int64(0)
        for i in range(position.shape[1]):
            u = np.int64(position[t, i])
            m = np.int64(symbols[t, i])
            sm += m
            smm += m * m
            su += u
            sum_ += u * m
            suu += u * u
        sums[t, 0] = sm
        sums[t, 1] = smm
        sums[t, 2] = su
        sums[t, 3] = sum_
        sums[t, 4] = suu


@kernel
def fit_rows(sums, n, grid, fitted):
    """Least-squares offset and scale per row of :func:`moments`; a single level has no slope."""
    for t in range(sums.shape[0]):
        m, mm = np.float64(sums[t, 0]), np.float64(sums[t, 1])
        u, um = np.float64(sums[t, 2]) / ONE, np.float64(sums[t, 3]) / ONE
        spread = n * mm - m * m
        slope = (n * um - m * u) / spread if spread > 0 else 0.0
        intercept = (u - slope * m) / n
        fitted[t, 0] = grid[t, 0] + grid[t, 1] * intercept
        fitted[t, 1] = grid[t, 1] * slope


@inlined
def squared_error(sums, n, a, b):
    """Sum of ``(u - a - b m)**2`` by moments, in squared steps of the old grid."""
    m, mm = np.float64(sums[0]), np.float64(sums[1])
    u, um, uu = np.float64(sums[2]) / ONE, np.float64(sums[3]) / ONE, np.float64(sums[4]) / (ONE * ONE)
    return uu - 2 * (a * u + b * um) + n * a * a + 2 * a * b * m + b * b * mm


@kernel
def compare_rows(sums, n, grid, candidate, better):
    """Whether the candidate's error is the smaller one; beyond FP16 it is infinite or NaN, which never is."""
    for t in range(sums.shape[0]):
        step = grid[t, 1]
        if step > 0:
            a = (candidate[t, 0] - grid[t, 0]) / step
            before = squared_error(sums[t], n, 0.0, 1.0)
            better[t] = squared_error(sums[t], n, a, candidate[t, 1] / step) < before
        else:
            better[t] = False
