"""The affine grid: a stream's values as positions on ``offset + scale * m`` (paper, section 4.2).

After this stage the encoder is integer arithmetic: a position is the distance from the offset in 2**-16 steps.
Sums over positions are exact in any order, so every thread count and device gives the same bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel
from .means import round_down_half, round_up_half

#: Fraction bits of a position.  Positions stay below 64 * 2**16 = 2**22, their squares summed over 2**16 values
#: below 2**60.
FRACTION = 16
ONE = 1 << FRACTION


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
    x: NDArray[np.float32], offset: NDArray[np.float16], scale: NDArray[np.float16], levels: int
) -> NDArray[np.int32]:
    """Positions int32 ``[T, n]`` in ``[0, levels - 1] * 2**16``; a stream of scale zero has all of them zero."""
    step = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    out = np.empty(x.shape, np.int32)
    stream_positions(x, offset.astype(np.float32), inverse, np.float32((levels - 1) * ONE), out)
    return out


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
def stream_positions(x, offset, inverse, top, out):
    one = np.float32(65536)
    zero = np.float32(0)
    for t in range(x.shape[0]):
        o = offset[t]
        r = inverse[t]
        for i in range(x.shape[1]):
            v = np.rint((x[t, i] - o) * r * one)
            v = zero if v < zero else v
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
