"""Fitting plans: what channels of known deviations become, odd geometries, limits, refusals, and real data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fit_support import normal, random_spread, same_plans
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import fit
from dquantcodec.classes import COUNT, LEAST_ENTROPY, REACH, classes, deviation, nearest
from dquantcodec.codec import Codec
from dquantcodec.fit import balanced, deviations, fit_plan, join, sample_windows, unit_rows, widths, zero_bits
from dquantcodec.group_arrays import group_arrays
from dquantcodec.grouping import Grouping
from dquantcodec.plan import StreamPlan, make_plan
from dquantcodec.profile import PROFILES, ClassRule
from dquantcodec.table_choice import MOST_TABLES, Family, choose_tables, entropy
from dquantcodec.testing import groups as slow

RULES = {"key": ClassRule("student"), "value": ClassRule("normal")}


def grouping_of(stream: StreamPlan) -> Grouping:
    assert stream.grouping is not None
    return stream.grouping


# --- What is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (4, 128), (1, 300)])
def test_channels_take_the_classes_of_their_deviations(heads: int, dim: int) -> None:
    spread = random_spread(heads, dim)
    plan = fit_plan("2.26", *normal(2048, spread))
    # Of tokens scaled to a root mean square of one.
    relative = spread / math.sqrt(float((spread**2).mean()))
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        grouping = grouping_of(stream)
        known = [c.levels(stream.gain) for c in classes(RULES[kind].source)]
        by_channel = slow.classes_by_channel(grouping)
        missed = []
        for channel, sigma in enumerate(relative.reshape(-1)):
            wanted = int(nearest(np.array([sigma / stream.step]))[0])
            if channel in by_channel:
                missed.append(known.index(by_channel[channel]) - wanted)
            else:
                # Left out: hardly any entropy.
                assert entropy(classes(RULES[kind].source)[wanted].weights) < 0.5
        # Eight channels share a class and tables serve classes near their own: mostly within one, hardly beyond two.
        assert np.mean(np.abs(missed) <= 1) >= 0.75
        assert abs(float(np.mean(missed))) < 1
        assert max(missed) <= 6 and min(missed) >= -4


def test_each_band_of_equal_channels_takes_its_class() -> None:
    """Eight channels of one deviation in both heads and few bands: every class is met exactly or by its neighbour."""
    steps = np.repeat([4.0, 1.0, 0.25, 0.001], 8)
    spread = np.stack([steps, steps[::-1]])
    keys, values = normal(4096, spread)
    plan = fit_plan("2.26", keys, values)
    relative = spread.reshape(-1) / math.sqrt(float((spread**2).mean()))
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        source = RULES[kind].source
        known = [c.levels(stream.gain) for c in classes(source)]
        by_channel = slow.classes_by_channel(grouping_of(stream))
        for channel, sigma in enumerate(relative):
            wanted = int(nearest(np.array([sigma / stream.step]))[0])
            worth = entropy(classes(source)[wanted].weights) >= 0.3
            if channel in by_channel:
                assert abs(known.index(by_channel[channel]) - wanted) <= 1 or not worth
            else:
                assert not worth
        assert not any(channel in by_channel for channel in np.flatnonzero(spread.reshape(-1) < 0.01))


def test_channels_stand_in_falling_order_of_their_width() -> None:
    keys, values = normal(1024, random_spread(4, 64))
    plan = fit_plan("2.26", keys, values)
    for x, stream in ((keys, plan.key), (values, plan.value)):
        grouping = grouping_of(stream)
        rows = unit_rows(x, plan.window, stream.mean)
        assert rows is not None
        found = widths(rows)
        for order in grouping.order.astype(int):
            sigma = found[order].tolist()
            at = 0
            fields: list[list[float]] = []
            for letters, count in zip(grouping.letters, grouping.fields):
                fields += [sigma[at + f * letters : at + (f + 1) * letters] for f in range(count)]
                at += letters * count
            for field in fields:
                assert field == sorted(field, reverse=True)
            # Fields are the stretches of the falling order: they do not overlap.
            stretches = sorted(fields, key=lambda field: -field[0])
            assert all(a[-1] >= b[0] for a, b in zip(stretches, stretches[1:]))
            left_out = sorted(set(range(64)) - {c % 64 for c in order.tolist()})
            head = int(order[0]) // 64
            assert all(found[head * 64 + c] <= stretches[-1][-1] for c in left_out)


def test_deviations_are_those_of_scaled_tokens_about_their_windows_means() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((200, 2, 8)) * np.geomspace(0.1, 2, 8) + rng.standard_normal((2, 8)) * 3
    x = x.astype(np.float32)
    x *= rng.uniform(0.5, 2, (200, 1, 1)).astype(np.float32)
    x[77] = 0
    for mean in (False, True):
        flat = x.reshape(200, -1).astype(np.float64)
        if mean:
            flat = np.concatenate([part - part.mean(axis=0) for part in (flat[:128], flat[128:])])
        energy = (flat**2).mean(axis=1, keepdims=True)
        kept = flat[energy[:, 0] > 0] / np.sqrt(energy[energy[:, 0] > 0])
        rows = unit_rows(x, 128, mean)
        assert rows is not None
        np.testing.assert_allclose(deviations(rows), np.sqrt((kept**2).mean(axis=0)), rtol=0.02)
    # Powers of two change nothing; silence tells nothing.
    found, huge = unit_rows(x, 128, True), unit_rows(x * np.float32(2.0**100), 128, True)
    assert found is not None and huge is not None
    np.testing.assert_allclose(deviations(huge), deviations(found), rtol=2e-3)
    assert unit_rows(x * 0, 128, True) is None and unit_rows(x[:0], 128, False) is None


def test_rare_large_values_widen_a_channel_and_usual_tails_do_not() -> None:
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((2000, 40))
    # In 1 of 100 tokens: the deviation grows to 1.4, of which 3.5 reach half as far.
    rows[:, 7] = np.where(rng.random(2000) < 0.01, 10.0, rows[:, 7])
    # In 1 of 1000, few enough to stretch those tokens instead.
    rows[:2, 9] = 50.0
    found, sigma = widths(rows), deviations(rows)
    assert found[7] == pytest.approx(10 / REACH)
    assert sigma[7] < 1.6
    usual = np.delete(np.arange(40), 7)
    # The fourth largest of 2000 normal values lies three deviations away, give or take a half.
    assert (found[usual] >= sigma[usual]).all() and (found[usual] <= 1.1 * sigma[usual]).all()


def test_tokens_whose_channels_have_heavy_tails_keep_their_step() -> None:
    keys, values = normal(1024, random_spread(2, 64))
    rng = np.random.default_rng(9)
    heavy = np.where(rng.random(keys.shape) < 0.01, 8, 1).astype(np.float32)
    heavy[..., ::2] = 1
    plan = fit_plan("2.26", keys * heavy, values * heavy)
    for x, stream in ((keys * heavy, plan.key), (values * heavy, plan.value)):
        rows = unit_rows(x, plan.window, stream.mean)
        assert rows is not None
        reach = group_arrays(grouping_of(stream)).reach
        beyond = np.abs(rows)[:, reach > 0] > reach[reach > 0] * stream.step
        # Without wider classes three tokens of ten have such a value.
        assert beyond.any(axis=1).mean() < 0.2


def test_the_step_does_not_jump_between_classes() -> None:
    """All channels are alike, so all pass from one class to the next at once, where the codes of both cost alike."""
    x, _ = normal(1024, np.ones((8, 128)))
    steps = []
    for container in range(220, 340, 8):
        stream = replace(PROFILES["2.26"].value, container=container)
        steps.append(fit_plan(replace(PROFILES["2.26"], key=stream, value=stream, substreams=1), x, x).value.step)
    # Eight bytes more of 1024 values: a sixteenth of a bit.
    ratios = np.array(steps[1:]) / steps[:-1]
    print(np.round(ratios, 4).tolist())
    assert ratios.max() < 0.97 and ratios.min() > 0.94


def test_the_step_lets_typical_tokens_fill_their_containers() -> None:
    keys, values = normal(512, random_spread(4, 128), 5)
    plan = fit_plan("2.26", *normal(512, random_spread(4, 128), 6))
    codec = Codec(plan)
    pages = codec.encode(keys, values)
    shares = codec.drift_share(keys, values, pages)
    assert 0 < shares[0] < 0.1 and 0 < shares[1] < 0.1
    # A coarser step would leave more room than this: nearly every container is filled to its last word.
    at = codec.layout.head_bytes + codec.layout.value.words_at
    words = pages.data[0, at : at + 4 * 32 * plan.value.substreams * plan.value.words].view("<u4")
    assert (words.reshape(plan.value.substreams, -1, 32)[:, -1] != 0).mean() > 0.95


@given(
    st.integers(1, 6).flatmap(lambda n: st.lists(st.floats(0, 1000), min_size=4 * n, max_size=4 * n)),
    st.sampled_from([1, 2, 4]),
)
def test_substreams_are_balanced(bits: list[float], substreams: int) -> None:
    order = balanced([bits], substreams)
    assert sorted(order) == list(range(len(bits)))
    size = len(bits) // substreams
    sums = [sum(bits[h] for h in order[j * size : (j + 1) * size]) for j in range(substreams)]
    # No further apart than the dearest head.
    assert max(sums) - min(sums) <= max(bits) + 1e-6


def test_keys_and_values_hold_heads_in_one_order() -> None:
    base = PROFILES["2.26"]
    for profile in (base, replace(base, value=replace(base.value, classes=None))):
        plan = fit_plan(profile, *normal(512, random_spread(8, 32)))
        orders = [
            (s.grouping.order[:, 0] // 32).tolist() if s.grouping is not None else list(range(8))
            for s in (plan.key, plan.value)
        ]
        assert orders[0] == orders[1] and sorted(orders[0]) == list(range(8))


def test_heads_of_very_different_cost_share_the_substreams() -> None:
    spread = random_spread(4, 64) * np.array([4.0, 4.0, 0.1, 0.1])[:, None]
    plan = fit_plan("2.26", *normal(1024, spread))
    for stream in (plan.key, plan.value):
        heads = (grouping_of(stream).order[:, 0] // 64).tolist()
        assert stream.substreams == 2
        assert {0, 1} & set(heads[:2]) and {0, 1} & set(heads[2:])


# --- Limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 3), (5, 7), (2, 8), (3, 80), (2, 256), (1, 1024), (64, 16)])
@pytest.mark.parametrize("name", ["2.26", "1.96", "3.0"])
def test_any_geometry_is_fitted_and_coded(heads: int, dim: int, name: str) -> None:
    keys, values = normal(64, random_spread(heads, dim))
    plan = fit_plan(name, keys, values)
    rotated = make_plan(PROFILES[name], heads, dim)
    for kind in ("key", "value"):
        stream, base = getattr(plan, kind), getattr(rotated, kind)
        assert (stream.words, stream.substreams, stream.mean, stream.gain) == (
            base.words, base.substreams, base.mean, base.gain,
        )  # fmt: skip
        if stream.grouping is None:
            continue
        grouping = stream.grouping
        rule = getattr(PROFILES[name], kind).classes
        assert grouping.heads == heads and grouping.head_dim == dim and 0 < stream.step <= 64
        assert len(grouping.tables) <= MOST_TABLES
        assert sum(2 << table.precision for table in grouping.tables) <= rule.table_bytes
        assert all(table.precision <= rule.precision for table in grouping.tables)
        for table in grouping.tables:
            bits = sum(grouping.classes[c].field_bits for c in table.classes)
            assert bits <= rule.field_bits or len(table.classes) == 1
        # Zeros always fit.
        zeros = [0] * (8 * heads * sum(grouping.fields))
        nothing: list[list[int]] = [[] for _ in grouping.classes]
        costs = [
            [slow.code_group(zeros, grouping, group, nothing).bits for group in part]
            for part in slow.parts(grouping, stream.substreams)
        ]
        assert max(map(sum, costs)) < 32 * stream.words
        assert int(zero_bits(grouping).sum()) == sum(map(sum, costs))
    codec = Codec(plan)
    pages = codec.encode(keys[:40], values[:40])
    assert codec.check(pages) == []
    for got, put in zip(codec.decode(pages), (keys, values)):
        # Containers of two or three words are rounded hard.
        most = 0.3 if heads * dim >= 64 else 0.8
        assert float(((got - put[:40]) ** 2).sum()) < most * float((put[:40] ** 2).sum())


def test_small_containers_take_a_larger_step_or_stay_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty-five channels in two words; seven channels of a head make letters of one field only."""
    keys, values = normal(64, random_spread(5, 7))
    plan = fit_plan("1.96", keys, values)
    for stream in (plan.key, plan.value):
        assert zero_bits(grouping_of(stream)).sum() <= fit.MOST_ZEROS * (32 * stream.words - 1)
    codec = Codec(plan)
    assert codec.check(codec.encode(keys, values)) == []
    with monkeypatch.context() as patch:
        patch.setattr(fit, "SHARES", fit.SHARES[:1])
        assert fit_plan("1.96", keys, values).key.grouping is None
    monkeypatch.setattr(fit, "MOST_ZEROS", 0.05)
    plan, rotated = fit_plan("1.96", keys, values), make_plan(PROFILES["1.96"], 5, 7)
    assert plan.key is rotated.key and plan.value is rotated.value


@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([1, 3, 8, 20, 33, 64]), st.floats(0, 3))
def test_any_deviations_give_a_plan_that_codes(seed: int, heads: int, dim: int, width: float) -> None:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal((heads, dim)) * width)
    keys, values = normal(40, spread, seed % 1000)
    plan = fit_plan("2.26", keys, values)
    for stream in (plan.key, plan.value):
        if stream.grouping is not None:
            worst = zero_bits(stream.grouping).reshape(stream.substreams, -1).sum(axis=1).max()
            assert worst <= 32 * stream.words - 1
            assert sum(2 << table.precision for table in stream.grouping.tables) <= 24 << 10
    codec = Codec(plan)
    assert codec.check(codec.encode(keys, values)) == []


def test_joined_bands_keep_to_the_bits_and_to_their_letters() -> None:
    keys, values = normal(512, random_spread(2, 100))
    for most in (4, 6, 8, 12):
        base = PROFILES["2.26"]
        rule = replace(base.key.classes or ClassRule(), field_bits=most)
        profile = replace(base, key=replace(base.key, classes=rule))
        grouping = grouping_of(fit_plan(profile, keys, values).key)
        assert sum(n * f for n, f in zip(grouping.letters, grouping.fields)) == grouping.coded
        for fields, number in zip(grouping.fields, grouping.choice[0]):
            table = grouping.tables[number]
            assert len(table.classes) == fields
            assert fields == 1 or sum(grouping.classes[c].field_bits for c in table.classes) <= most + 2
        if most == 12:
            assert max(grouping.fields) > 1
    assert join([], 10) == []


@given(st.lists(st.tuples(st.sampled_from([8, 8, 8, 4, 1]), st.integers(2, 8)), max_size=12), st.integers(8, 12))
def test_bands_join_the_widest_first_with_those_that_leave_least_room(shapes: list[tuple[int, int]], most: int) -> None:
    bands: list[Any] = [SimpleNamespace(letters=n, field_bits=bits, place=i) for i, (n, bits) in enumerate(shapes)]
    groups = join(bands, most)
    assert sorted(band.place for group in groups for band in group) == list(range(len(bands)))
    for i, group in enumerate(groups):
        bits = sum(band.field_bits for band in group)
        assert len({band.letters for band in group}) == 1 and len(group) <= 4 and bits <= most
        later = [band for other in groups[i + 1 :] for band in other if band.letters == group[0].letters]
        assert all(band.field_bits <= group[0].field_bits for band in later)
        # No other three, of those that were left, would have filled it better.
        for count in range(4):
            for others in combinations(group[1:] + later, count):
                assert not bits < group[0].field_bits + sum(band.field_bits for band in others) <= most


def test_joining_leaves_few_letters() -> None:
    def bands(*widths: int) -> list[Any]:
        return [SimpleNamespace(letters=8, field_bits=bits) for bits in widths]

    assert len(join(bands(6, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3), 10)) == 7
    assert len(join(bands(5, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3), 11)) == 5


# --- Determinism ----------------------------------------------------------------------------------------------------


def test_the_same_data_in_any_dtype_give_the_same_plan() -> None:
    keys, values = (x.astype(ml_dtypes.bfloat16) for x in normal(200, random_spread(3, 40)))
    first = fit_plan("2.26", keys, values)
    assert same_plans(first, fit_plan("2.26", keys, values))
    assert same_plans(first, fit_plan("2.26", keys.astype(np.float32), values.astype(np.float32)))
    assert same_plans(first, fit_plan(PROFILES["2.26"], keys, values))
    assert not same_plans(first, fit_plan("2.26", values, keys))


def test_powers_of_two_give_the_same_plan() -> None:
    keys, values = normal(200, random_spread(2, 40))
    first = fit_plan("2.26", keys * np.float32(2.0**40), values * np.float32(2.0**-60))
    second = fit_plan("2.26", keys * np.float32(2.0**50), values * np.float32(2.0**-50))
    assert same_plans(first, second)


def test_sampled_windows_are_whole_distinct_and_spread() -> None:
    for tokens, sequences, window in [(1000, 2, 128), (1, 1, 32), (128, 3, 128), (5000, 1, 32), (129, 40, 128)]:
        found = list(sample_windows(tokens, sequences, window))
        assert len(found) == min(8, sequences * -(-tokens // window)) == len(set(found))
        for sequence, start, stop in found:
            assert 0 <= sequence < sequences and start % window == 0 and start < stop <= tokens
            assert stop == min(start + window, tokens)
        assert found == sorted(found)
    assert list(sample_windows(0, 3, 128)) == []


# --- Real data ------------------------------------------------------------------------------------------------------


def test_real_keys_and_values_lose_less_than_with_the_rotation(
    real_layers: list[tuple[NDArray[Any], NDArray[Any]]],
) -> None:
    worse = []
    for keys, values in real_layers:
        tokens, heads, dim = keys.shape
        sinks = min(PROFILES["2.26"].sinks, tokens - 1)
        keys, values = keys[sinks:], values[sinks:]
        errors = []
        for plan in (fit_plan("2.26", keys, values), make_plan(PROFILES["2.26"], heads, dim)):
            codec = Codec(plan)
            pages = codec.encode(keys, values)
            assert codec.check(pages) == []
            pairs = zip(codec.decode(pages), (keys, values))
            errors.append([float(((a - b.astype(np.float64)) ** 2).sum()) for a, b in pairs])
        worse.append(np.array(errors[0]) / np.array(errors[1]))
    # Keys gain much, values a little.
    key, value = np.mean(worse, axis=0)
    assert key < 0.9 and value < 1.05, worse


def test_classes_below_the_least_entropy_are_not_used() -> None:
    # What is worth coding in the first head is silent in the second.
    plan = fit_plan(
        replace(PROFILES["2.26"], substreams=1),
        *normal(2048, random_spread(2, 128, 0.001, 3) * np.array([[1.0], [0.02]])),
    )
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        known = classes(RULES[kind].source)
        least = min(e for c in known if (e := entropy(c.weights)) >= LEAST_ENTROPY)
        for levels in grouping_of(stream).classes:
            number = [c.levels(stream.gain) for c in known].index(levels)
            assert entropy(known[number].weights) >= least
        assert grouping_of(stream).coded < 128 and grouping_of(stream).coded % 4 == 0
    assert deviation(COUNT - 1) < 64


def test_a_quiet_head_beside_a_loud_one_has_classes_too() -> None:
    """The loud head has no more than its own sub-stream, so all take a larger step."""
    sigma = np.geomspace(0.001, 3, 128) * np.array([[1.0], [0.02]])
    x = (np.random.default_rng(0).standard_normal((2, 300, 2, 128)) * sigma).astype(np.float32)
    plan = fit_plan("2.26", *x)
    assert plan.key.substreams == 2
    assert plan.key.grouping is not None and plan.value.grouping is not None


@pytest.mark.parametrize(("field_bits", "precision", "table_bytes"), [(12, 11, 8192), (10, 9, 1024), (12, 14, 32768)])
def test_tables_keep_their_bytes_or_are_the_smallest(field_bits: int, precision: int, table_bytes: int) -> None:
    rng = np.random.default_rng(1)
    letters = Counter({tuple(rng.integers(0, 12, 3).tolist()): int(rng.integers(1, 9)) for _ in range(40)})
    rule = ClassRule("normal", field_bits, precision, table_bytes)
    tables = set(choose_tables(letters, rule, Family(rule.source, 1)).values())
    needed = sum(2 << p for _, p in tables)
    smallest = min(math.prod(len(classes("normal")[c].weights) for c in t) for t in letters)
    assert needed <= table_bytes or 2 * smallest > table_bytes or len(tables) == 1
