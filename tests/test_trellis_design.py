"""Classes for a trellis as they are designed and stored, and what they save of normal streams."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import errors
from dquantcodec.classes import classes
from dquantcodec.codec import Codec
from dquantcodec.fit import fit_plan
from dquantcodec.grouping import Levels
from dquantcodec.profile import PROFILES, ClassRule, Profile, StreamProfile
from dquantcodec.trellis_classes import NARROWEST_DEPENDENT, dependent_classes, design, quantiles


@pytest.mark.parametrize(
    ("weights", "second"),
    [
        ((1, 16382, 1), (1, 16381, 1)),
        ((1, 16382, 1), (1, 16381, 2)),
        ((1, 16382, 1), (16384,)),
        ((1, 16382, 1), (0, 16384, 0)),
        ((1,) * 64 + (16384 - 128,) + (1,) * 64, (1,) * 64 + (16384 - 128,) + (1,) * 64),
    ],
)
def test_dependent_classes_no_decoder_could_follow(weights: tuple[int, ...], second: tuple[int, ...]) -> None:
    assert Levels(weights, 256)
    with pytest.raises(errors.InputError) as caught:
        Levels(weights, 256, second)
    assert caught.value.code == "class-weights"


@pytest.mark.parametrize(("source", "states", "number"), [("normal", 4, 6), ("student", 8, 9)])
def test_stored_classes_are_the_designed_ones(source: str, states: int, number: int) -> None:
    found, stored = design(number, source, states), dependent_classes(source, states)[number]
    assert stored.most == found.most
    # A mathematical library's last bits may move a value over a threshold, not more.
    assert np.abs(np.array(stored.weights) - found.weights).max() <= 8
    assert np.abs(np.array(stored.second) - found.second).max() <= 8
    assert abs(stored.least_squares - found.least_squares) <= 1 and abs(stored.unbiased - found.unbiased) <= 1


def test_only_classes_worth_a_trellis_have_one() -> None:
    for source in ("normal", "student"):
        assert dependent_classes(source, 1) == classes(source)
        for states in (4, 8):
            found = dependent_classes(source, states)
            assert len(found) == len(classes(source))
            kinds = [bool(c.second) for c in found]
            assert kinds.index(True) == NARROWEST_DEPENDENT
            assert found[-1] == classes(source)[-1]


@pytest.mark.parametrize("source", ["normal", "student"])
def test_quantiles_are_of_unit_variance_and_in_no_order(source: str) -> None:
    u = quantiles(source)
    assert abs(u.var() - 1) < 1e-2 and abs(u.mean()) < 1e-9
    assert all(abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 0.02 for lag in (1, 2, 3))


def test_quantiser_belongs_to_classes() -> None:
    with pytest.raises(errors.InputError) as caught:
        StreamProfile(9, 300, quantiser="trellis-4")
    assert caught.value.code == "profile-quantiser"
    with pytest.raises(errors.InputError) as caught:
        replace(PROFILES["2.26"].key, quantiser="trellis-5")
    assert caught.value.code == "profile-quantiser"


@lru_cache(maxsize=1)
def normals() -> NDArray[np.float32]:
    return np.random.default_rng(20).standard_normal((256, 8, 128)).astype(np.float32)


def measured(container: int, kind: str, quantiser: str) -> float:
    """NMSE in per cent of normal streams of 1024 values in one container."""
    base: StreamProfile = getattr(PROFILES["2.26"], kind)
    rule = ClassRule("normal", table_bytes=48 << 10)
    stream = replace(base, container=container, quantiser=quantiser, gain="least-squares", mean=False, classes=rule)
    x = normals()
    codec = Codec(fit_plan(Profile(stream, stream, substreams=1), x, x))
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    assert codec.plan.value.container == container
    return float(100 * ((codec.decode_kind(pages, "value") - x) ** 2).sum() / (x.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize(("kind", "containers", "wanted"), [("key", (328, 332), 3.35), ("value", (228, 232), 10.0)])
def test_normal_streams_meet_the_goals_of_331_and_231_bytes(
    kind: str, containers: tuple[int, int], wanted: float
) -> None:
    # Words have four bytes: the error at three quarters between two containers, on a logarithmic scale.
    low, high = (measured(container, kind, "trellis-4") for container in containers)
    between = low**0.25 * high**0.75
    print(f"{kind}: {low:.3f} and {high:.3f} %, {between:.3f} % between")
    assert between <= wanted


@pytest.mark.parametrize(("kind", "container"), [("key", 328), ("value", 232)])
def test_a_trellis_is_a_good_half_decibel_better(kind: str, container: int) -> None:
    assert measured(container, kind, "trellis-4") < 0.86 * measured(container, kind, "scalar")


@pytest.mark.parametrize("name", ["2.26-t", "1.96-t"])
def test_named_profiles_take_the_bytes_of_their_scalar_ones(name: str) -> None:
    trellis_profile, scalar = PROFILES[name], PROFILES[name.removesuffix("-t")]
    assert Profile.named(name) == trellis_profile
    for a, b in ((trellis_profile.key, scalar.key), (trellis_profile.value, scalar.value)):
        assert a.container == b.container and a.quantiser == "trellis-4"


def test_stored_classes_are_plain_json() -> None:
    from importlib.resources import files

    stored = json.loads(files("dquantcodec").joinpath("trellis_classes.json").read_text(encoding="ascii"))
    assert sorted(stored) == ["normal-4", "normal-8", "student-4", "student-8"]
