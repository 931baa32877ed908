"""The design of mid-tread grids: step and weights for a container, and what profiles hold of it."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import pytest

from dquantcodec.errors import InputError
from dquantcodec.mid_tread import SLOPE, mid_tread, shares
from dquantcodec.plan import make_plan
from dquantcodec.profile import PROFILES, Profile, StreamProfile

#: Every mid-tread stream that a named profile holds.
NAMED = [
    pytest.param(getattr(profile, kind), id=f"{name}-{kind}")
    for name, profile in PROFILES.items()
    for kind in ("key", "value")
    if getattr(profile, kind).grid == "mid-tread"
]


def designed(stream: StreamProfile) -> StreamProfile:
    return mid_tread(
        stream.levels, stream.container, coder=stream.coder, precision=stream.precision, letter=stream.letter,
        mean=stream.mean, gain=stream.gain,
    )  # fmt: skip


def bits_per_symbol(stream: StreamProfile) -> float:
    """Mean cost of a symbol with the stream's own table, letter by letter, for independent symbols of its shares."""
    frequencies = make_plan(Profile(stream, stream), 8, 128).key.frequencies
    share = [weight / sum(stream.weights) for weight in stream.weights]
    total = 0.0
    for letter, frequency in enumerate(frequencies.tolist()):
        p, rest = 1.0, letter
        for _ in range(stream.symbols_per_letter):
            rest, m = divmod(rest, stream.levels)
            p *= share[m]
        total += p * (stream.precision - math.log2(frequency))
    return total / stream.symbols_per_letter


def after_one_more_iteration(p: list[float], step: float) -> list[float]:
    """Masses of the levels whose ``(u - m)**2 + SLOPE * rate(m)`` is least, for rates ``-log2 p``."""
    normal = NormalDist()
    middle = (len(p) - 1) / 2
    edges = [m + 0.5 + SLOPE * (math.log2(p[m]) - math.log2(p[m + 1])) / 2 for m in range(len(p) - 1)]
    assert edges == sorted(edges)
    below = [0.0, *(normal.cdf((edge - middle) * step) for edge in edges), 1.0]
    return [b - a for a, b in pairwise(below)]


@pytest.mark.parametrize(
    ("levels", "step"), [(3, 1.0), (3, 2.0), (5, 0.5), (7, 1.1609), (9, 0.7093), (15, 0.4318), (31, 0.2)]
)
def test_shares_are_symmetric_sum_to_one_and_reproduce_themselves(levels: int, step: float) -> None:
    p = shares(levels, step)
    assert len(p) == levels
    assert p == p[::-1]
    assert min(p) > 0
    assert sum(p) == pytest.approx(1, abs=1e-12)
    again = after_one_more_iteration(p, step)
    assert max(abs(a - b) for a, b in zip(p, again, strict=True)) < 1e-9


def test_shares_leave_more_to_the_middle_than_nearest_levels_would() -> None:
    normal = NormalDist()
    for levels, step in ((7, 1.1609), (9, 0.7093)):
        assert shares(levels, step)[levels // 2] > normal.cdf(step / 2) - normal.cdf(-step / 2) + 0.01


@pytest.mark.parametrize("stream", NAMED)
def test_named_profiles_hold_what_the_design_computes(stream: StreamProfile) -> None:
    found = designed(stream)
    # The last bits of erfc differ between mathematical libraries: a unit of 2**-40 may, the step must not.
    assert max(abs(a - b) for a, b in zip(found.weights, stream.weights, strict=True)) <= 1
    assert replace(found, weights=stream.weights, classes=stream.classes, quantiser=stream.quantiser) == stream


def test_names_other_than_the_papers_stand_for_mid_tread_grids() -> None:
    for name, profile in PROFILES.items():
        paper = name.startswith("paper-")
        assert {profile.key.grid, profile.value.grid} == {"min-max" if paper else "mid-tread"}
        assert (profile.key.gain, profile.value.gain) == ("least-squares", "least-squares" if paper else "unbiased")
        assert (profile.key.mean, profile.value.mean, profile.sinks) == (True, False, 0 if paper else 1)


@pytest.mark.parametrize(
    "stream",
    [
        *NAMED,
        mid_tread(5, 180),
        mid_tread(7, 300, letter=1),
        mid_tread(9, 328, coder="rans", letter=2),
        mid_tread(15, 460, coder="rans", precision=14),
    ],
    ids=lambda s: f"{s.levels}-{s.container}-{s.coder}",
)
def test_the_code_of_the_design_fills_the_container_but_for_a_small_margin(stream: StreamProfile) -> None:
    bits = bits_per_symbol(stream)
    assert bits * 1024 / (8 * stream.container) == pytest.approx(0.985, rel=0.002)
    total = sum(stream.weights)
    entropy = -sum(w / total * math.log2(w / total) for w in stream.weights)
    assert entropy < bits


def test_weights_are_the_shares_at_the_step() -> None:
    stream = mid_tread(9, 328, precision=13)
    assert stream.grid == "mid-tread"
    wanted = shares(9, stream.step)
    assert [w / 2**40 for w in stream.weights] == pytest.approx(wanted, abs=2.0**-40)
    assert stream.step == round(stream.step, 4), "a multiple of 1/10000 is the same number in every file and text"


@pytest.mark.parametrize(("levels", "containers"), [(7, range(180, 331, 30)), (9, range(260, 381, 30))])
def test_a_larger_container_gets_a_smaller_step(levels: int, containers: range) -> None:
    found = [mid_tread(levels, container).step for container in containers]
    assert all(a > b for a, b in pairwise(found))


@pytest.mark.parametrize(("levels", "container"), [(5, 328), (7, 360), (9, 410)])
def test_a_container_that_the_levels_cannot_fill_is_refused_or_gets_a_usable_step(levels: int, container: int) -> None:
    try:
        stream = mid_tread(levels, container)
    except InputError as error:
        assert error.code == "profile-grid"
    else:
        assert (levels - 1) / 2 * stream.step > 1, "outer levels within a standard deviation clip a third of the values"


@pytest.mark.parametrize("gain", ["least-squares", "unbiased"])
@pytest.mark.parametrize("mean", [False, True])
def test_mean_and_gain_are_passed_on_and_do_not_change_the_design(gain: str, mean: bool) -> None:
    stream = mid_tread(7, 232, letter=3, mean=mean, gain=gain)
    assert (stream.mean, stream.gain) == (mean, gain)
    assert replace(stream, mean=False, gain="least-squares") == mid_tread(7, 232, letter=3)


MID_TREAD = {"levels": 3, "container": 200, "grid": "mid-tread", "step": 1.0, "weights": (1, 2, 1)}


@pytest.mark.parametrize(
    "change",
    [
        {"levels": 4, "weights": (1, 2, 2, 1)},
        {"levels": 2, "weights": (1, 1)},
        {"weights": ()},
        {"weights": (1, 1)},
        {"weights": (1, 2, 2, 1)},
        {"weights": (1, 0, 1)},
        {"weights": (1, 1, -1)},
        {"step": 0.0},
        {"step": -1.0},
        {"step": 16.001},
        {"step": math.nan},
        {"step": math.inf},
        {"gain": "largest"},
        {"grid": "mid-rise"},
        {"grid": "min-max"},
        {"grid": "min-max", "weights": ()},
        {"grid": "min-max", "step": 0.0},
        {"grid": "min-max", "step": 0.0, "weights": (), "gain": "unbiased"},
    ],
    ids=str,
)
def test_grids_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    assert StreamProfile(**MID_TREAD).step == 1.0  # type: ignore[arg-type]
    with pytest.raises(InputError) as caught:
        StreamProfile(**{**MID_TREAD, **change})
    assert caught.value.code == "profile-grid"


def test_the_design_refuses_what_a_profile_would() -> None:
    with pytest.raises(InputError) as caught:
        mid_tread(8, 300)
    assert caught.value.code == "profile-grid"
    with pytest.raises(InputError) as caught:
        mid_tread(7, 232, gain="largest")
    assert caught.value.code == "profile-grid"


@pytest.mark.parametrize("sinks", [-1, 4097])
def test_sinks_out_of_range_are_refused(sinks: int) -> None:
    stream = StreamProfile(**MID_TREAD)  # type: ignore[arg-type]
    assert Profile(stream, stream, sinks=4096).sinks == 4096
    with pytest.raises(InputError) as caught:
        Profile(stream, stream, sinks=sinks)
    assert caught.value.code == "profile-sinks"
