"""INT8 window means, the min-max grid, positions on it, and the least-squares refit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import oracles
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dquantcodec import grid, means

# Rotated values of a page stay within plus and minus 2**14 and their means may be anything below.
values = st.floats(-16384, 16384, width=32) | st.floats(-2, 2, width=32) | st.sampled_from([0.0, 1e-30, -1e-8, 6e-8])


def tensors(tokens: int, heads: int, dim: int) -> st.SearchStrategy[NDArray[np.float32]]:
    shapes = st.tuples(st.integers(1, tokens), st.integers(1, heads), st.integers(1, dim))
    return shapes.flatmap(lambda shape: hnp.arrays(np.float32, shape, elements=values))


rows = st.tuples(st.integers(1, 4), st.integers(1, 40)).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=values)
)
level_counts = st.sampled_from([2, 3, 5, 6, 8, 17, 64])


@given(st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32))
def test_directed_rounding_to_half_finds_the_neighbours(x: float) -> None:
    array = np.array([x], np.float32)
    assert float(means.round_up_half(array)[0]) == oracles.smallest_half_not_below(x)
    assert float(means.round_down_half(array)[0]) == oracles.largest_half_not_above(x)


@given(tensors(5, 3, 6))
def test_means_equal_the_oracle(x: NDArray[np.float32]) -> None:
    scale, mean = means.window_means(x)
    expected_scale, expected_mean = oracles.window_means(x)
    assert scale.dtype == np.float16
    assert mean.dtype == np.int8
    assert scale.tolist() == expected_scale
    assert mean.tolist() == expected_mean


@given(tensors(5, 3, 6))
def test_means_never_need_more_than_127_steps_and_are_within_half_a_step(x: NDArray[np.float32]) -> None:
    scale, mean = means.window_means(x)
    assert mean.min() >= -127
    assert mean.max() <= 127
    for h in range(x.shape[1]):
        for d in range(x.shape[2]):
            exact = sum(Fraction(float(v)) for v in x[:, h, d]) / len(x)
            step = Fraction(float(scale[h]))
            # FP32 sums of up to five values and one division may each be off by one part in 2**24.
            slack = max(abs(Fraction(float(v))) for v in x[:, h, d]) * Fraction(8, 2**23) + Fraction(1, 2**140)
            assert abs(exact - step * int(mean[h, d])) <= step / 2 + slack


@given(tensors(5, 3, 6))
def test_what_the_encoder_subtracts_is_exactly_what_the_decoder_adds(x: NDArray[np.float32]) -> None:
    scale, mean = means.window_means(x)
    removed = means.mean_values(scale, mean)
    assert removed.dtype == np.float32
    for h in range(x.shape[1]):
        for d in range(x.shape[2]):
            stored = Fraction(float(scale[h])) * int(mean[h, d])
            assert Fraction(float(removed[h, d])) == stored, "FP16 times INT8 must be exact"


def test_a_window_of_one_value_has_that_value_as_its_mean() -> None:
    x = np.full((7, 1, 4), 63.5, np.float32)
    scale, mean = means.window_means(x)
    assert (means.mean_values(scale, mean) == 63.5).all()


@given(rows, level_counts)
def test_the_grid_is_the_least_one_of_half_precision_that_covers_the_stream(
    x: NDArray[np.float32], levels: int
) -> None:
    offset, scale = grid.min_max_grid(x, levels)
    for t, row in enumerate(x):
        assert (float(offset[t]), float(scale[t])) == oracles.min_max_grid(row.tolist(), levels)
        low, high = Fraction(float(offset[t])), Fraction(float(offset[t])) + (levels - 1) * Fraction(float(scale[t]))
        assert low <= Fraction(float(row.min()))
        # The span is taken in FP32, so the last level may fall short by roundings of FP32, never of FP16.
        span = Fraction(float(row.max())) - low
        assert high >= Fraction(float(row.max())) - span * Fraction(3, 2**24)


@given(rows, level_counts)
def test_positions_lie_on_the_grid_where_the_values_lie(x: NDArray[np.float32], levels: int) -> None:
    offset, scale = grid.min_max_grid(x, levels)
    position = grid.positions(x, offset, scale, levels)
    assert position.dtype == np.int32
    assert position.min() >= 0
    assert position.max() <= (levels - 1) * grid.ONE
    for t, row in enumerate(x):
        step = Fraction(float(scale[t]))
        for i, v in enumerate(row):
            exact = (Fraction(float(v)) - Fraction(float(offset[t]))) / step * grid.ONE if step else 0
            assert abs(int(position[t, i]) - exact) <= Fraction(1, 2) + exact * Fraction(4, 2**24) + Fraction(1, 2**20)


def test_positions_are_rounded_to_nearest_and_clamped() -> None:
    x = np.array([[-1.0, 0.0, 0.5, 1.0, 7.0, 9.0, 3.25 + 2.0**-17]], np.float32)
    position = grid.positions(x, np.zeros(1, np.float16), np.ones(1, np.float16), 8)
    assert position.tolist() == [[0, 0, 32768, 65536, 7 * 65536, 7 * 65536, 3 * 65536 + 16384]]


@st.composite
def assignments(
    draw: st.DrawFn,
) -> tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    levels = draw(level_counts)
    tokens, n = draw(st.integers(1, 3)), draw(st.integers(2, 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    position = rng.integers(0, (levels - 1) * grid.ONE + 1, (tokens, n)).astype(np.int32)
    nearest = (position + grid.ONE // 2 - 1) // grid.ONE
    moved = nearest + rng.integers(-1, 2, nearest.shape) * (rng.random(nearest.shape) < draw(st.sampled_from([0, 0.3])))
    kind = draw(st.sampled_from(["drifted", "drifted", "arbitrary", "constant"]))
    if kind == "arbitrary":
        moved = rng.integers(0, levels, nearest.shape)
    elif kind == "constant":
        moved = np.full(nearest.shape, draw(st.integers(0, levels - 1)))
    offset = rng.uniform(-100, 100, tokens).astype(np.float16)
    scale = rng.uniform(2.0**-10, 30, tokens).astype(np.float16)
    return position, np.clip(moved, 0, levels - 1).astype(np.uint8), offset, scale


def squared_error(x: NDArray[np.float64], symbols: NDArray[np.uint8], offset: float, scale: float) -> Fraction:
    o, s = Fraction(offset), Fraction(scale)
    return sum(((Fraction(float(v)) - o - s * int(m)) ** 2 for v, m in zip(x, symbols, strict=True)), Fraction(0))


@given(assignments())
def test_refit_never_raises_the_squared_error(
    case: tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]],
) -> None:
    position, symbols, offset, scale = case
    new_offset, new_scale = grid.refit(position, symbols, offset, scale)
    assert new_offset.dtype == new_scale.dtype == np.float16
    for t in range(len(position)):
        x = float(offset[t]) + float(scale[t]) * position[t] / grid.ONE
        before = squared_error(x, symbols[t], float(offset[t]), float(scale[t]))
        after = squared_error(x, symbols[t], float(new_offset[t]), float(new_scale[t]))
        # The error is compared in FP64 from exact moments: a gain below 1e-10 of it is noise.
        assert after <= before * (1 + Fraction(1, 10**10)) + Fraction(1, 10**10)


@given(assignments())
def test_refit_is_least_squares_rounded_to_half_precision(
    case: tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]],
) -> None:
    position, symbols, offset, scale = case
    new_offset, new_scale = grid.refit(position, symbols, offset, scale)
    for t in range(len(position)):
        assume(len(set(symbols[t].tolist())) > 1)
        x = float(offset[t]) + float(scale[t]) * position[t] / grid.ONE
        best_offset, best_scale = oracles.least_squares(x, symbols[t])
        unchanged = (new_offset[t], new_scale[t]) == (offset[t], scale[t])
        close = abs(float(new_offset[t]) - best_offset) <= 2.0**-11 * abs(best_offset) + 1e-6 and (
            abs(float(new_scale[t]) - best_scale) <= 2.0**-11 * abs(best_scale) + 1e-6
        )
        assert close or unchanged
        rounded = (float(np.float16(best_offset)), float(np.float16(best_scale)))
        gain = squared_error(x, symbols[t], float(offset[t]), float(scale[t])) - squared_error(x, symbols[t], *rounded)
        if unchanged and not close:
            assert gain <= Fraction(1, 10**6), "a fit that helps must be taken"


def test_refit_finds_a_line_that_is_there() -> None:
    symbols = np.array([[0, 1, 2, 3, 2, 1]], np.uint8)
    # The values are -1 + 0.75 * (0.5 + 1.5 m) seen from a grid of offset -1 and step 0.75.
    position = (np.array([[0.5, 2.0, 3.5, 5.0, 3.5, 2.0]]) * grid.ONE).astype(np.int32)
    offset, scale = grid.refit(position, symbols, np.array([-1], np.float16), np.array([0.75], np.float16))
    assert (float(offset[0]), float(scale[0])) == (-0.625, 1.125)


def test_refit_of_a_stream_of_step_zero_keeps_it() -> None:
    zero = np.zeros(1, np.float16)
    offset, scale = grid.refit(np.zeros((1, 9), np.int32), np.arange(9, dtype=np.uint8)[None] % 4, zero + 5, zero)
    assert (float(offset[0]), float(scale[0])) == (5, 0)


def test_refit_beyond_half_precision_keeps_the_grid_without_a_warning() -> None:
    # Drift may leave all but one value on level 31: the line through both, taken back to level 0, leaves FP16.
    position = np.zeros((1, 1024), np.int32)
    position[0, 5] = 63 * grid.ONE
    symbols = np.full((1, 1024), 31, np.uint8)
    symbols[0, 5] = 32
    offset, scale = np.zeros(1, np.float16), np.array([259], np.float16)
    assert grid.refit(position, symbols, offset, scale) == (offset, scale)


@given(assignments())
def test_moments_are_exact(
    case: tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]],
) -> None:
    position, symbols, _, _ = case
    sums = np.empty((len(position), 5), np.int64)
    grid.moments(position, symbols, sums)
    for t in range(len(position)):
        u, m = [int(v) for v in position[t]], [int(v) for v in symbols[t]]
        expected = [sum(m), sum(a * a for a in m), sum(u), sum(a * b for a, b in zip(u, m)), sum(a * a for a in u)]
        assert sums[t].tolist() == expected


def test_moments_of_the_longest_stream_at_the_last_level_do_not_overflow() -> None:
    n, top = 65536, 63
    sums = np.empty((1, 5), np.int64)
    grid.moments(np.full((1, n), top * grid.ONE, np.int32), np.full((1, n), top, np.uint8), sums)
    assert sums.tolist() == [[n * top, n * top**2, n * top * grid.ONE, n * top**2 * grid.ONE, n * top**2 * grid.ONE**2]]
