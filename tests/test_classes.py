"""Variance classes: the stored integers, what they promise, and the design against a numerical integration."""

from __future__ import annotations

import json
import math
from importlib.resources import files
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import classes as module
from dquantcodec.classes import COUNT, MOST, REACH, ChannelClass, classes, design, designed, deviation, nearest
from dquantcodec.profile import SOURCES
from dquantcodec.table_choice import entropy

ALL = [(source, number) for source in SOURCES for number in range(COUNT)]


def density(u: NDArray[np.float64], sigma: float, source: str) -> NDArray[np.float64]:
    """Of a normal distribution, or of Student's with 8 degrees of freedom, of standard deviation ``sigma``."""
    x = u / sigma
    if source == "normal":
        return np.exp(-x * x / 2) / math.sqrt(2 * math.pi) / sigma
    stretch = math.sqrt(8 / 6)
    constant = math.gamma(4.5) / (math.sqrt(8 * math.pi) * math.gamma(4))
    return np.asarray(constant * (1 + (x * stretch) ** 2 / 8) ** -4.5 * stretch / sigma)


def integrated(number: int, source: str) -> tuple[NDArray[np.float64], float, float]:
    """Shares of levels 0, 1, ... and both gains, by iterating rates and shares on a fine grid of the density."""
    sigma = deviation(number)
    most = classes(source)[number].most
    step = sigma / 512
    bounds = np.arange(40 * 512 + 1) * step
    u = (bounds[1:] + bounds[:-1]) / 2
    mass = density(u, sigma, source) * step
    below = np.append(0, np.cumsum(mass))
    nearest_edges = np.arange(most) + 0.5
    edges = nearest_edges
    for _ in range(400):
        at_edges = np.interp(edges, bounds, below)
        shares = np.diff(np.concatenate([[0], at_edges, [0.5]]))
        shares = np.maximum(shares * np.append(2, np.ones(most)), 1e-7)
        # Rates decide where the cheaper of two levels costs less, and that decides the rates.
        moved = np.maximum.accumulate(nearest_edges - np.diff(np.log2(shares)) / 16)
        if np.abs(moved - edges).max() < 1e-9:
            break
        edges = moved
    m = np.searchsorted(edges, u)
    uu, um, mm = ((mass * product).sum() for product in (u * u, u * m, m * m))
    least = um / mm
    kept = um * um / (uu * mm)
    return shares, float(least), float(least / (kept + (1 - kept) / 8))


def test_the_stored_numbers_are_what_the_design_prints() -> None:
    stored = files("dquantcodec").joinpath("classes.json").read_text(encoding="ascii")
    assert stored == designed()
    assert sorted(json.loads(stored)) == sorted(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_weights_follow_the_rules_of_the_format(source: str) -> None:
    assert len(classes(source)) == COUNT
    for found in classes(source):
        assert 1 <= found.most <= MOST
        assert found.weights == found.weights[::-1] and len(found.weights) == 2 * found.most + 1
        assert sum(found.weights) == 2**14 and min(found.weights) >= 1
        assert max(found.weights) == found.weights[found.most]
        upper = found.weights[found.most :]
        # Shares fall from level to level; the outermost takes the tail, whose cheapness reaches a little further in.
        assert all(b <= a + (found.most == MOST) for a, b in pairwise(upper[:-1]))
        for gain, wanted in (("least-squares", found.least_squares), ("unbiased", found.unbiased)):
            levels = found.levels(gain)
            assert (levels.weights, levels.gain) == (found.weights, wanted)
            assert 1 <= wanted <= 1023


@pytest.mark.parametrize("source", SOURCES)
def test_wider_classes_cost_more_and_reach_further(source: str) -> None:
    known = classes(source)
    for narrow, wide in pairwise(known):
        assert entropy(wide.weights) > entropy(narrow.weights) or narrow.most == 1
        assert wide.most >= narrow.most
    # A quarter octave is a quarter bit, once levels are many.
    for narrow, wide in pairwise(known[16:28]):
        assert 0.2 < entropy(wide.weights) - entropy(narrow.weights) < 0.27
    for number, found in enumerate(known):
        reached = (found.most + 0.5) / deviation(number)
        assert reached >= REACH - 1e-9 or found.most == MOST
        assert found.most == 1 or (found.most - 0.5) / deviation(number) < REACH
        # Where steps are fine and levels reach far, the rate is the differential entropy of the source.
        if 14 <= number < 28:
            assert abs(entropy(found.weights) - math.log2(deviation(number) * math.sqrt(2 * math.pi * math.e))) < 0.12


def test_gains_undo_what_narrow_classes_lose() -> None:
    for source in SOURCES:
        for found in classes(source):
            assert found.unbiased >= found.least_squares
        assert all(abs(c.least_squares - 256) <= 16 for c in classes(source)[3:])
        unbiased = [c.unbiased for c in classes(source)]
        assert unbiased[:2] == [768, 768]  # three, the most
        assert all(a >= b for a, b in pairwise(unbiased[:14]))


@pytest.mark.parametrize(("source", "number"), [pair for pair in ALL if pair[1] in (1, 3, 6, 9, 13, 18, 23)])
def test_the_numbers_are_those_of_a_numerical_integration(source: str, number: int) -> None:
    found = classes(source)[number]
    shares, least, unbiased = integrated(number, source)
    upper = np.array(found.weights[found.most :], np.float64) / 2**14
    # Integers are rounded down, and level 0 takes what they leave.
    assert np.abs(upper[1:] - shares[1:]).max() <= 1.2 / 2**14
    assert abs(upper[0] - shares[0]) <= (2 * found.most + 2) / 2**14
    assert abs(found.least_squares / 256 - min(3, least)) < 0.02 * min(3, least)
    assert abs(found.unbiased / 256 - min(3, unbiased)) < 0.02 * min(3, unbiased)


@pytest.mark.parametrize("source", SOURCES)
def test_the_entropy_is_that_of_the_weights(source: str) -> None:
    for found in classes(source):
        wanted = sum(w / 2**14 * (14 - math.log2(w)) for w in found.weights)
        assert abs(entropy(found.weights) - wanted) < 1e-9
    assert entropy(ChannelClass((4096, 8192, 4096), 256, 256).weights) == 1.5


def test_the_nearest_class_is_the_one_of_least_ratio() -> None:
    sigma = np.geomspace(0.01, 500, 4001)
    found = nearest(sigma)
    assert found.dtype == np.int64
    for s, number in zip(sigma.tolist(), found.tolist()):
        ratios = [abs(math.log(s / deviation(i))) for i in range(COUNT)]
        assert ratios[number] <= min(ratios) + 1e-9
    assert nearest(np.array([deviation(i) for i in range(COUNT)])).tolist() == list(range(COUNT))
    assert nearest(np.array([0.0, 1e-30, 1e30])).tolist() == [0, 0, COUNT - 1]


def test_neighbouring_classes_are_a_quarter_octave_apart() -> None:
    assert deviation(0) == 2**-1.75
    for number in range(COUNT):
        assert math.isclose(math.log2(deviation(number)), number / 4 - 1.75, abs_tol=1e-12)
    assert module.GAIN_ONE == 256


@pytest.mark.parametrize("source", SOURCES)
def test_a_class_is_designed_alone(source: str) -> None:
    for number in (0, 5, 12):
        assert design(number, source) == classes(source)[number]
