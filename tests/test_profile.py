"""Profiles and plans: what is accepted, what is refused, and what the names stand for."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec.errors import CapacityError, DQuantError, InputError, LimitError
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import budget, make_plan, overhead_bits
from dquantcodec.profile import DEFAULT_PROFILE, PROFILES, Profile, StreamProfile

GOOD = StreamProfile(8, 330)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"levels": 1}, "profile-levels"),
        ({"levels": 65}, "profile-levels"),
        ({"coder": "huffman"}, "profile-coder"),
        ({"precision": 7}, "profile-precision"),
        ({"precision": 16}, "profile-precision"),
        ({"alpha": 0.2}, "profile-alpha"),
        ({"alpha": 8.1}, "profile-alpha"),
        ({"alpha": float("nan")}, "profile-alpha"),
        ({"container": 3}, "profile-container"),
        ({"container": 65536}, "profile-container"),
        ({"container": float("nan")}, "profile-container"),
        ({"letter": 0}, "profile-letter"),
        ({"letter": 5, "levels": 2}, "profile-letter"),
        ({"letter": 3, "levels": 17, "precision": 15}, "profile-letter"),
        ({"letter": 3, "levels": 8, "precision": 8}, "profile-letter"),
    ],
)
def test_stream_profiles_that_cannot_be_are_refused(change: dict[str, Any], code: str) -> None:
    arguments = {"levels": 8, "container": 330, **change}
    with pytest.raises(InputError) as caught:
        StreamProfile(**arguments)
    assert caught.value.code == code
    assert isinstance(caught.value, DQuantError)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"window": 0}, "profile-window"),
        ({"window": 48}, "profile-window"),
        ({"window": 4128}, "profile-window"),
        ({"substreams": 0}, "profile-substreams"),
        ({"substreams": 3}, "profile-substreams"),
        ({"substreams": 8}, "profile-substreams"),
    ],
)
def test_profiles_that_cannot_be_are_refused(change: dict[str, Any], code: str) -> None:
    with pytest.raises(InputError) as caught:
        Profile(GOOD, GOOD, **change)
    assert caught.value.code == code


def test_profiles_are_values() -> None:
    profile = Profile(GOOD, GOOD)
    assert profile == Profile(StreamProfile(8, 330), StreamProfile(8, 330))
    assert hash(profile) == hash(Profile(GOOD, GOOD))
    with pytest.raises(FrozenInstanceError):
        profile.window = 64  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        GOOD.levels = 3  # type: ignore[misc]


@given(st.integers(2, 64), st.integers(8, 15))
def test_the_letter_left_open_is_the_longest_up_to_three_with_sixteen_slots_a_letter(levels: int, p: int) -> None:
    letter = StreamProfile(levels, 65535, precision=p).symbols_per_letter
    fitting = [k for k in (1, 2, 3) if 16 * levels**k <= 2**p]
    assert letter == (max(fitting) if fitting else 1)


@given(st.floats(4, 2000), st.integers(1, 65536), st.sampled_from(["rans", "prefix"]))
def test_containers_scale_with_the_stream_to_whole_words(container: float, values: int, coder: str) -> None:
    stream = StreamProfile(8, container, coder)
    words = stream.words(values)
    assert type(words) is int
    assert words >= 2
    assert words == 2 or abs(words * stream.word_bytes - container * values / 1024) <= stream.word_bytes / 2


@pytest.mark.parametrize(
    ("name", "bits"), [("3.0", 3.0), ("2.26", 2.26), ("1.96", 1.96), ("paper-2.26", 2.265), ("paper-1.96", 1.965)]
)
def test_named_profiles_keep_their_bits_per_value_with_every_byte_of_a_page_counted(name: str, bits: float) -> None:
    plan = make_plan(Profile.named(name), 8, 128)
    layout = PageLayout.of(plan)
    # Exact leading tokens count too, over a context of 1024.
    exact = PROFILES[name].sinks * 16 / 1024
    assert layout.page_bytes * 8 / (plan.window * 2 * plan.values) + exact <= bits


def test_named_profiles_are_the_papers_and_the_prefix_coders() -> None:
    assert DEFAULT_PROFILE == "2.26"
    assert set(PROFILES) == {"3.0", "2.26", "1.96", "2.26-t", "1.96-t", "paper-2.26", "paper-1.96"}
    for name, profile in PROFILES.items():
        assert profile.name == name
        assert profile is Profile.named(name)
        assert profile.window == 128
        assert profile.key.mean
        assert not profile.value.mean
        if name.startswith("paper"):
            assert profile.key.coder == profile.value.coder == "rans"
            assert profile.key.grid == profile.value.grid == "min-max"
            assert profile.key.alpha == profile.value.alpha == 1.4
            assert profile.key.levels == 8
            assert profile.value.levels == (6 if name.endswith("2.26") else 5)
            assert profile.sinks == 0
        else:
            assert profile.key.coder == profile.value.coder == "prefix"
            assert profile.key.grid == profile.value.grid == "mid-tread"
            assert (profile.key.gain, profile.value.gain) == ("least-squares", "unbiased")
            assert profile.sinks == 1
    paper = make_plan(PROFILES["paper-2.26"], 8, 128)
    assert (paper.key.container, paper.value.container) == (332, 230)
    assert (paper.key.substreams, paper.value.substreams) == (1, 1)
    default = make_plan(PROFILES["2.26"], 8, 128)
    assert default.key.container + default.value.container <= 562
    assert default.key.substreams == 2


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InputError, match="paper-1") as caught:
        Profile.named("3.14")
    assert caught.value.code == "profile-unknown"


@pytest.mark.parametrize(("wanted", "heads", "got"), [(1, 8, 1), (2, 8, 2), (4, 8, 4), (4, 6, 2), (4, 3, 1), (2, 1, 1)])
def test_substreams_fall_back_to_what_divides_the_heads(wanted: int, heads: int, got: int) -> None:
    plan = make_plan(Profile(GOOD, GOOD, substreams=wanted), heads, 64)
    assert plan.key.substreams == plan.value.substreams == got
    assert plan.key.words == GOOD.words(heads * 64 // got)


@pytest.mark.parametrize(("heads", "dim"), [(0, 64), (1025, 1), (8, 0), (8, 1025), (1024, 65), (-8, 64)])
def test_geometries_the_format_cannot_hold_are_refused(heads: int, dim: int) -> None:
    with pytest.raises(LimitError) as caught:
        make_plan(PROFILES["2.26"], heads, dim)
    assert caught.value.code == "limit-geometry"


def test_plans_hold_what_the_profile_says() -> None:
    key = StreamProfile(5, 300, "rans", 11, 2.0, 2, mean=True)
    value = StreamProfile(17, 500, "prefix", 14, 1.0, 1)
    plan = make_plan(Profile(key, value, window=64, substreams=4, name="mine"), 4, 32)
    assert (plan.kv_heads, plan.head_dim, plan.window, plan.values, plan.profile_name) == (4, 32, 64, 128, "mine")
    for stream, profile in ((plan.key, key), (plan.value, value)):
        assert stream.coder == profile.coder
        assert stream.levels == profile.levels
        assert stream.letter == profile.letter
        assert stream.precision == profile.precision
        assert stream.mean == profile.mean
        assert stream.substreams == 4
        assert stream.container == 4 * stream.words * stream.word_bytes
        assert len(stream.frequencies) == profile.levels**profile.symbols_per_letter
        assert not stream.frequencies.flags.writeable
    assert plan.signs.shape == (4, 32)
    assert make_plan(Profile(key, value, window=64, substreams=4, name="mine"), 4, 32) is plan


def test_budgets_leave_room_for_what_is_not_letters() -> None:
    assert overhead_bits("rans") == 16.5
    assert overhead_bits("prefix") == 1
    plan = make_plan(PROFILES["2.26"], 8, 128)
    assert budget(plan.key) == (32 * plan.key.words - 1) * 1024
    paper = make_plan(PROFILES["paper-2.26"], 8, 128)
    assert budget(paper.key) == (16 * paper.key.words - 16) * 1024 - 512


def test_the_message_about_a_small_container_names_one_that_does() -> None:
    for coder in ("rans", "prefix"):
        with pytest.raises(CapacityError) as caught:
            make_plan(Profile(replace(GOOD, coder=coder, container=60), GOOD, substreams=1), 8, 128)
        found = re.search(r"alone take (\d+)", str(caught.value))
        assert found
        make_plan(Profile(replace(GOOD, coder=coder, container=int(found[1])), GOOD, substreams=1), 8, 128)
