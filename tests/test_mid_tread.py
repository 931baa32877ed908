"""The mid-tread grid: scale, positions and gain."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dquantcodec import grid
from dquantcodec.page import KindFields

# Step times root mean square stays within FP16, as it does for rotated values of a page.
values = st.floats(-4000, 4000, width=32) | st.floats(-2, 2, width=32) | st.sampled_from([0.0, 1e-30, -1e-8, 6e-8])
rows = st.tuples(st.integers(1, 4), st.integers(1, 40)).flatmap(
    lambda shape: hnp.arrays(np.float32, shape, elements=values)
)
odd_levels = st.sampled_from([3, 5, 7, 9, 15, 63])
steps = st.floats(0.02, 16)


# --- Scale and positions --------------------------------------------------------------------------------------------


@given(rows, steps, odd_levels)
def test_the_scale_is_the_step_times_the_root_mean_square_but_reaches_the_largest_value(
    x: NDArray[np.float32], step: float, levels: int
) -> None:
    scale = grid.mid_tread_scale(x, step, levels)
    assert scale.dtype == np.float16
    for t, row in enumerate(x):
        usual = step * math.sqrt(sum(Fraction(float(v)) ** 2 for v in row) / len(row))
        # The largest magnitude lies no further than two steps outside the outer level.
        exact = max(usual, float(max(abs(row))) / ((levels - 1) / 2 + 2))
        found = oracles.HALVES.index(float(scale[t]))
        # Neighbours of the result enclose the exact number: it is at most one unit in the last place away.
        assert oracles.HALVES[max(found - 1, 0)] <= exact * (1 + 2.0**-50)
        assert exact * (1 - 2.0**-50) <= oracles.HALVES[found + 1]


@given(
    hnp.arrays(np.int16, st.tuples(st.integers(1, 3), st.integers(1, 200)), elements=st.integers(-4000, 4000)),
    steps,
    odd_levels,
)
def test_the_scale_of_integers_is_exact_because_their_squares_add_up_exactly(
    x: NDArray[np.int16], step: float, levels: int
) -> None:
    squares = [sum(int(v) ** 2 for v in row) for row in x]
    peaks = [max(abs(int(v)) for v in row) for row in x]
    wanted = [
        max(math.sqrt(total / x.shape[1]) * step, peak / ((levels + 3) / 2)) for total, peak in zip(squares, peaks)
    ]
    scale = grid.mid_tread_scale(x.astype(np.float32), step, levels)
    assert scale.tolist() == np.array(wanted).astype(np.float16).tolist()


def test_one_large_value_widens_the_grid_until_it_is_two_steps_outside() -> None:
    x = np.ones((3, 1024), np.float32)
    x[1, 1000] = -5.5
    x[2, 1023] = -100
    scale = grid.mid_tread_scale(x, 1.125, 7)
    # 5.5 is within five steps of 1.14, a root mean square of 1.0145 times 1.125.
    assert scale.tolist() == [1.125, float(np.float16(1.125 * math.sqrt((1023 + 5.5**2) / 1024))), 20]


@given(st.integers(1, 700), st.data())
def test_every_value_counts_in_the_sum_of_squares_and_in_the_peak(n: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, n - 1))
    x = np.zeros((2, n), np.float32)
    x[1, place] = -3
    squares, peaks = np.empty(2, np.float64), np.empty(2, np.float64)
    grid.row_squares(x, squares, peaks)
    assert squares.tolist() == [0, 9]
    assert peaks.tolist() == [0, 3]


@pytest.mark.parametrize("n", [5, 256, 700])
def test_squares_are_added_in_the_order_of_a_gpus_lanes(n: int) -> None:
    x = np.random.default_rng(n).standard_normal((1, n)).astype(np.float32)
    squares, peaks = np.empty(1), np.empty(1)
    grid.row_squares(x, squares, peaks)
    padded = np.pad(x[0], (0, -n % 256)).astype(np.float64).reshape(-1, 256) ** 2
    sums = padded[0]
    for row in padded[1:]:
        sums = sums + row
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    assert squares[0] == sums[0]


@given(odd_levels, steps, st.integers(1, 60))
def test_a_stream_of_zeros_has_scale_zero_and_every_position_in_the_middle(levels: int, step: float, n: int) -> None:
    x = np.zeros((3, n), np.float32)
    scale = grid.mid_tread_scale(x, step, levels)
    assert scale.tolist() == [0, 0, 0]
    assert (grid.mid_tread_positions(x, scale, levels) == (levels - 1) // 2 * grid.ONE).all()


@given(rows, odd_levels)
def test_scale_zero_puts_every_position_in_the_middle_whatever_the_values(x: NDArray[np.float32], levels: int) -> None:
    position = grid.mid_tread_positions(x, np.zeros(len(x), np.float16), levels)
    assert position.tolist() == [[(levels - 1) // 2 * grid.ONE] * x.shape[1]] * len(x)


@given(rows, odd_levels, st.lists(st.sampled_from([6e-8, 1e-3, 0.1, 0.7, 1.0, 30.0, 9e3]), min_size=4, max_size=4))
def test_positions_count_steps_from_the_middle_level(x: NDArray[np.float32], levels: int, scales: list[float]) -> None:
    scale = np.array(scales[: len(x)], np.float16)
    position = grid.mid_tread_positions(x, scale, levels)
    assert position.dtype == np.int32
    lowest, highest = -32 * grid.ONE, (levels - 1 + 32) * grid.ONE
    for t, row in enumerate(x):
        inverse = np.float32(1) / np.float32(scale[t])
        for i, v in enumerate(row):
            in_order = np.rint((v * inverse + np.float32((levels - 1) / 2)) * np.float32(65536))
            assert position[t, i] == min(max(int(in_order), lowest), highest)
            exact = (Fraction(float(v)) / Fraction(float(scale[t])) + (levels - 1) // 2) * grid.ONE
            clipped = min(max(exact, Fraction(lowest)), Fraction(highest))
            # Three roundings of FP32 at magnitudes up to (31 + 63) steps, then one to the nearest integer.
            assert abs(int(position[t, i]) - clipped) <= Fraction(1, 2) + 3 * 94 * Fraction(grid.ONE, 2**24)


def test_positions_are_clipped_32_steps_beyond_the_outer_levels() -> None:
    x = np.array([[0.0, 0.5, -1.0, 3.0, 3 + 31.5, 3 + 32, 3 + 33, 1e6, -3 - 31.5, -3 - 32, -3 - 33, -1e6]], np.float32)
    position = grid.mid_tread_positions(x, np.ones(1, np.float16), 7)
    assert (position / grid.ONE).tolist() == [[3, 3.5, 2, 6, 37.5, 38, 38, 38, -31.5, -32, -32, -32]]


@given(st.integers(1, 31).map(lambda half: 2 * half + 1), hnp.arrays(np.uint16, 32, elements=st.integers(0, 0x7BFF)))
def test_a_decoder_gets_level_values_symmetric_about_zero(levels: int, bits: NDArray[np.uint16]) -> None:
    fields = KindFields(0, None, None, np.zeros((1, 1, 2, 32), np.uint32), bits.view(np.float16)[:, None])
    offset, scale = fields.grid(levels)
    assert offset.dtype == scale.dtype == np.float32
    for t in range(32):
        step = Fraction(float(bits.view(np.float16)[t]))
        assert Fraction(float(scale[t])) == step
        assert Fraction(float(offset[t])) == -step * (levels - 1) / 2, "half-levels times FP16 are exact in FP32"


# --- Gain -----------------------------------------------------------------------------------------------------------

Case = tuple[NDArray[np.int32], NDArray[np.uint8], NDArray[np.float16], int]


@st.composite
def assignments(draw: st.DrawFn) -> Case:
    """Positions, symbols, scales and the number of levels: as drift leaves them, or anything at all."""
    levels = draw(odd_levels)
    tokens, n = draw(st.integers(1, 3)), draw(st.integers(1, 64))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    middle = (levels - 1) // 2
    spread = draw(st.sampled_from([0.05, 0.5, 1.4, 5.0, 40.0]))
    position = np.rint((rng.standard_normal((tokens, n)) * spread + middle) * grid.ONE)
    position = np.clip(position, -32 * grid.ONE, (levels - 1 + 32) * grid.ONE).astype(np.int32)
    kind = draw(st.sampled_from(["nearest", "drifted", "drifted", "arbitrary", "opposite", "middle"]))
    symbols = np.rint(position / grid.ONE)
    if kind == "drifted":
        symbols = np.rint((position / grid.ONE - middle) * draw(st.floats(0.2, 1))) + middle
    elif kind == "arbitrary":
        symbols = rng.integers(0, levels, position.shape)
    elif kind == "opposite":
        symbols = 2 * middle - symbols
    elif kind == "middle":
        symbols = np.full(position.shape, middle)
    scale = (2.0 ** rng.uniform(-20, 15.9, tokens)).astype(np.float16)
    scale[rng.random(tokens) < 0.1] = 0
    return position, np.clip(symbols, 0, levels - 1).astype(np.uint8), scale, levels


def about_the_middle(case: Case, t: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What was to be coded and what its symbols stand for before a gain, in steps."""
    position, symbols, _, levels = case
    middle = (levels - 1) / 2
    return position[t] / grid.ONE - middle, symbols[t] - middle


def error_of(gains: NDArray[np.float64], v: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared error of ``gain * y`` relative to the energy of ``v``."""
    return np.asarray(((gains[:, None] * y - v) ** 2).sum(axis=1) / (v @ v))


def loss_of(gains: NDArray[np.float64], v: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """``bias**2 + noise / 8``: the part of the signal that is lost, and all error but that."""
    bias = 1 - gains * (v @ y) / (v @ v)
    noise = error_of(gains, v, y) - bias**2
    return np.asarray(bias**2 + noise / 8)


@pytest.mark.parametrize("unbiased", [False, True])
@given(case=assignments())
def test_the_gain_is_the_best_there_is_up_to_three(unbiased: bool, case: Case) -> None:
    position, symbols, scale, levels = case
    new = grid.regain(position, symbols, scale, levels, unbiased)
    assert new.dtype == np.float16
    assert np.isfinite(new).all()
    objective = loss_of if unbiased else error_of
    for t in range(len(position)):
        v, y = about_the_middle(case, t)
        if not v @ y > 0:
            assert new[t] == scale[t], "symbols that say nothing about the signal must not change the scale"
            continue
        # Zero of the derivative: for the error, (y.y) g = v.y; for the loss, with noise g**2 (b - a**2),
        # -a (1 - a g) + g (b - a**2) / 8 = 0, where a = v.y / v.v and b = y.y / v.v.
        a, b = (v @ y) / (v @ v), (y @ y) / (v @ v)
        best = min(float(a / (a * a + (b - a * a) / 8) if unbiased else a / b), 3.0)
        dense = np.concatenate([np.linspace(0, 3, 1001), np.clip(best * np.linspace(0.99, 1.01, 201), 0, 3)])
        least = objective(np.array([best]), v, y)[0]
        assert least <= objective(dense, v, y).min() * (1 + 1e-9) + 1e-12
        with np.errstate(over="ignore"):
            wanted = np.float64(float(scale[t]) * best).astype(np.float16)
        if np.isfinite(wanted):
            # The sums of the kernel and of this oracle may round to the two sides of a tie.
            assert abs(float(new[t]) - float(scale[t]) * best) <= abs(float(np.spacing(wanted))) / 2 * (1 + 1e-6)
        else:
            assert new[t] == scale[t] or new[t] == np.finfo(np.float16).max


@given(assignments())
def test_least_squares_never_raises_the_error_beyond_rounding(case: Case) -> None:
    position, symbols, scale, levels = case
    new = grid.regain(position, symbols, scale, levels, False)
    for t in range(len(position)):
        v, y = about_the_middle(case, t)
        if scale[t] > 2.0**-14 and v @ v > 0:
            gain = float(new[t]) / float(scale[t])
            # FP16 keeps eleven bits, and the error is flat around its minimum.
            slack = (gain * 2.0**-11) ** 2 * (y @ y) / (v @ v)
            assert error_of(np.array([gain]), v, y)[0] <= error_of(np.ones(1), v, y)[0] + slack + 1e-9


def test_an_unbiased_gain_lies_between_least_squares_and_no_bias_at_all() -> None:
    rng = np.random.default_rng(5)
    v = rng.standard_normal((1, 4096)) / 1.16
    position = np.rint((v + 3) * grid.ONE).astype(np.int32)
    symbols = np.clip(np.rint(v * 0.8) + 3, 0, 6).astype(np.uint8)
    one = np.ones(1, np.float16)
    y = symbols - 3.0
    least = float((v * y).sum() / (y * y).sum())
    none = float((v * v).sum() / (v * y).sum())
    assert float(grid.regain(position, symbols, one, 7, False)[0]) == pytest.approx(least, rel=2.0**-11)
    unbiased = float(grid.regain(position, symbols, one, 7, True)[0])
    assert least * 1.05 < unbiased < none * 0.995


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("levels", [3, 9, 63])
def test_degenerate_streams_keep_their_scale(unbiased: bool, levels: int) -> None:
    middle = (levels - 1) // 2
    scale = np.array([0, 1, 2.0**-24, 65504], np.float16)
    still = np.full((4, 80), middle * grid.ONE, np.int32)
    at_middle = np.full((4, 80), middle, np.uint8)
    moving = still + np.arange(80, dtype=np.int32) * 1000
    at_top = np.full((4, 80), levels - 1, np.uint8)
    for position, symbols in ((still, at_middle), (moving, at_middle), (still, at_top)):
        assert grid.regain(position, symbols, scale, levels, unbiased).tolist() == scale.tolist()


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_gain_ends_at_three_and_where_half_precision_ends(unbiased: bool) -> None:
    position = np.tile(np.array([[-32, 38], [3 + 2, 3 - 2]], np.int32) * grid.ONE, (2, 1))
    symbols = np.tile(np.array([[2, 4], [4, 2]], np.uint8), (2, 1))
    scale = np.array([1.5, 1.5, 30000, 30000], np.float16)
    # Gains of 35 and 2: cut to 3 (4.5) and taken (3), then 90000, beyond FP16, and 60000.
    assert grid.regain(position, symbols, scale, 7, unbiased).tolist() == [4.5, 3, 30000, 60000]


def test_the_gain_of_the_longest_stream_at_the_outermost_positions() -> None:
    position = np.full((1, 65536), (62 + 32) * grid.ONE, np.int32)
    symbols = np.full((1, 65536), 62, np.uint8)
    for unbiased in (False, True):
        new = grid.regain(position, symbols, np.ones(1, np.float16), 63, unbiased)
        assert float(new[0]) == float(np.float16(63 / 31)), "without noise the gain is the ratio, rule or not"
