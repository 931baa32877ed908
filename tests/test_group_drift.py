"""Drift of grouped streams against oracles: thresholds, the hard budget, the rung, and how the finer rung fills up."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import group_prefix
from dquantcodec.codec import Codec
from dquantcodec.errors import CapacityError
from dquantcodec.fit import fit_plan
from dquantcodec.grid import ONE
from dquantcodec.group_arrays import group_arrays
from dquantcodec.group_drift import UNREACHABLE, drift_grouped, group_ladder
from dquantcodec.group_grid import FARTHEST, fit_scale, grouped_positions, grouped_scale, nearest_levels
from dquantcodec.grouping import Grouping, Levels, Table
from dquantcodec.plan import Plan, StreamPlan, grouped
from dquantcodec.profile import PROFILES
from dquantcodec.testing import groups as slow

BUMPY = (4, 11)
GEOMETRIES = [BUMPY, (1, 3), (2, 8), (4, 16), (3, 20), (2, 40), (1, 64)]
KINDS = (
    "normal", "heavy", "zeros", "equal", "one huge", "alternating", "denormal", "ties", "outermost", "sparse", "few",
    "between",
)  # fmt: skip


@lru_cache(maxsize=32)
def plan_of(heads: int, dim: int, substreams: int = 4) -> Plan:
    rng = np.random.default_rng(heads * dim)
    spread = rng.permuted(np.tile(np.geomspace(0.03, 4, dim), (heads, 1)), axis=1)
    keys, values = (rng.standard_normal((2, 128, heads, dim)) * spread).astype(np.float32)
    return fit_plan(replace(PROFILES["2.26"], substreams=substreams), keys, values)


@lru_cache(maxsize=1)
def bumpy() -> StreamPlan:
    """Four heads of ten; a class whose outermost level is cheap, as wide classes have it, so that drift may cost."""
    bump = Levels((2000, 100, 12184, 100, 2000), 256)
    plain = Levels((3000, 10384, 3000), 200)
    found = Grouping(
        head_dim=11,
        classes=(bump, plain),
        tables=(Table((0,), 8), Table((0, 1), 8), Table((1, 0), 9)),
        letters=(6, 2),
        fields=(1, 2),
        choice=np.array([[0, 1], [0, 2], [0, 2], [0, 1]], np.uint8),
        order=np.array([[11 * head + (7 * i + head) % 11 for i in range(10)] for head in (2, 0, 3, 1)], np.uint16),
    )
    return grouped(2, 2, False, 0.5, "least-squares", found)


def stream_of(heads: int, dim: int) -> StreamPlan:
    if (heads, dim) == BUMPY:
        return bumpy()
    stream = plan_of(heads, dim).key
    assert stream.grouping is not None
    return stream


def hostile_streams(kind: str, tokens: int, n: int, seed: int) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, n))
    if kind == "heavy":
        x = rng.standard_t(1.5, (tokens, n)).clip(-400, 400)
    elif kind == "zeros":
        x = np.zeros((tokens, n))
    elif kind == "equal":
        x = np.full((tokens, n), rng.uniform(-5, 5))
    elif kind == "one huge":
        x *= 1e-3
        x[:, rng.integers(n)] = 500
    elif kind == "alternating":
        x = np.tile(np.where(np.arange(n) % 2, 3.0, -3.0), (tokens, 1))
    elif kind == "denormal":
        x *= 1e-41
    elif kind == "sparse":
        x = np.where(rng.random((tokens, n)) < 0.1, 20 * x, 0)
    elif kind == "few":
        x = rng.integers(-1, 2, (tokens, n)) * 0.7
    return x.astype(np.float32)


def positions(kind: str, tokens: int, stream: StreamPlan, seed: int) -> NDArray[np.int32]:
    """Positions of natural and hostile streams; some kinds are made in the middle between levels or at the far end."""
    grouping = stream.grouping
    assert grouping is not None
    places = group_arrays(grouping).row_channel.reshape(-1) >= 0
    rng = np.random.default_rng(seed)
    if kind == "between":
        found = rng.integers(-3 * ONE, 3 * ONE, (tokens, len(places))).astype(np.int32)
    elif kind == "ties":
        found = (rng.integers(-5, 5, (tokens, len(places))) * ONE + ONE // 2).astype(np.int32)
    elif kind == "outermost":
        found = np.where(rng.random((tokens, len(places))) < 0.5, FARTHEST, -FARTHEST).astype(np.int32)
    else:
        x = hostile_streams(kind, tokens, grouping.heads * grouping.head_dim, seed)
        return grouped_positions(x, grouped_scale(x, stream.step, grouping), grouping)
    return np.where(places, found, 0).astype(np.int32)


cases = st.tuples(
    st.sampled_from(GEOMETRIES), st.sampled_from(KINDS), st.integers(1, 3), st.integers(0, 2**32), st.integers(0, 40)
)


def drawn(case: tuple[tuple[int, int], str, int, int, int]) -> tuple[StreamPlan, NDArray[np.int32]]:
    """A stream, its container up to a tenth of what it was, and positions."""
    geometry, kind, tokens, seed, tighter = case
    stream = stream_of(*geometry)
    least = -(-(least_bits(stream) + 1) // 32)
    stream = tightened(*geometry, max(least, stream.words * (40 - tighter) // 40, 1))
    return stream, positions(kind, tokens, stream, seed)


@lru_cache(maxsize=256)
def tightened(heads: int, dim: int, words: int) -> StreamPlan:
    return replace(stream_of(heads, dim), words=words)


def least_bits(stream: StreamPlan) -> int:
    """Bits of the dearest sub-stream when all levels are zero."""
    zeros = [0] * group_arrays(stream.grouping).row_channel.size  # type: ignore[arg-type]
    none: list[list[int]] = [[] for _ in stream.grouping.classes]  # type: ignore[union-attr]
    parts = slow.parts(stream.grouping, stream.substreams)
    return max(sum(slow.code_group(zeros, stream.grouping, g, none).bits for g in part) for part in parts)


def thresholds_of(stream: StreamPlan, rung: int) -> list[list[int]]:
    ladder = group_ladder(stream)
    return [ladder.thresholds[rung, a : a + n].tolist() for a, n in zip(ladder.first.tolist(), ladder.most.tolist())]


def by_rung(row: list[int], stream: StreamPlan, part: list[slow.Group]) -> list[list[slow.Coded]]:
    """Groups of a sub-stream at every rung."""
    rungs = range(len(group_ladder(stream).thresholds))
    return [[slow.code_group(row, stream.grouping, g, thresholds_of(stream, rung)) for g in part] for rung in rungs]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_thresholds_are_where_the_best_level_changes(geometry: tuple[int, int]) -> None:
    """Least ``(u - m)**2 + kappa * rate``, all levels tried, for rates that rise ever faster."""
    stream = stream_of(*geometry)
    assert stream.grouping is not None
    kappas = [0.0, 2.0**-7]
    while kappas[-1] < 2.0**24:
        kappas.append(kappas[-1] * 2**0.25)
    ladder = group_ladder(stream)
    assert len(ladder.thresholds) == len(kappas) + 1
    assert (ladder.thresholds[-1] == UNREACHABLE).all() and (np.diff(ladder.thresholds, axis=0) >= 0).all()
    assert abs(math.log2(kappas[ladder.start] * 8)) <= 1 / 8
    for c, found in enumerate(stream.grouping.classes):
        upper = found.weights[found.most :]
        rises = accumulate((math.log2(a / b) for a, b in zip(upper, upper[1:])), max)
        rates = [0.0, *accumulate(rises)]
        for rung in range(0, len(kappas), 5):
            limits = thresholds_of(stream, rung)[c]
            assert limits == sorted(limits)
            for level, limit in enumerate(limits):
                if limit == UNREACHABLE:
                    continue
                for u, wanted in ((limit - 2, level), (limit + 2, level + 1)):
                    costs = [(u / ONE - m) ** 2 + kappas[rung] * rate for m, rate in enumerate(rates)]
                    # Levels whose thresholds fall together are passed together.
                    passed = sum(u > other for other in limits)
                    assert abs(costs[passed] - min(costs)) <= 1e-9 * max(1.0, *costs)
                    assert passed == wanted or abs(costs[passed] - costs[wanted]) < 1e-3


@given(cases)
def test_no_stream_passes_its_container_and_letters_are_in_range(
    case: tuple[tuple[int, int], str, int, int, int],
) -> None:
    stream, position = drawn(case)
    grouping = stream.grouping
    letters, levels, rungs = drift_grouped(position, stream)
    assert letters.dtype == np.uint16 and levels.dtype == np.int8 and levels.shape == position.shape
    assert rungs.shape == (len(position), stream.substreams)
    ladder = group_ladder(stream)
    assert rungs.min() >= 0 and rungs.max() < len(ladder.thresholds)
    for row, own in zip(letters.tolist(), levels):
        at = 0
        for part in slow.parts(grouping, stream.substreams):
            bits = 1
            for group in part:
                lengths = slow.table_lengths(grouping, group.table)
                sizes = [len(w) for w in slow.table_fields(grouping, group.table)]
                for places in group.places:
                    assert row[at] < len(lengths)
                    bits += lengths[row[at]]
                    fields = slow.letter_fields(row[at], sizes)
                    assert [int(own[p]) + size // 2 for p, size in zip(places, sizes)] == fields
                    at += 1
            assert bits <= 32 * stream.words
        assert at == len(row)
    # And the decoder agrees that nothing is missing and nothing left over.
    _, status = group_prefix.decode_by_token(group_prefix.encode(letters, stream), stream, strict=True)
    assert not status.any()


@given(cases)
def test_the_rung_is_the_lowest_that_fits_and_the_rest_takes_finer_letters_in_order(
    case: tuple[tuple[int, int], str, int, int, int],
) -> None:
    stream, position = drawn(case)
    budget = 32 * stream.words - 1
    letters, _, rungs = drift_grouped(position, stream)
    width = letters.shape[1] // stream.substreams
    order = group_ladder(stream).fill.tolist()
    for t, row in enumerate(position.tolist()):
        for j, part in enumerate(slow.parts(stream.grouping, stream.substreams)):
            found = by_rung(row, stream, part)
            fits = [sum(coded.bits for coded in groups) <= budget for groups in found]
            rung = int(rungs[t, j])
            assert fits[-1] and fits[rung] and (rung == 0 or not fits[rung - 1])
            if fits == sorted(fits):  # costs of letters need not fall with every level
                assert rung == fits.index(True)
            mine = order[j * len(part) : (j + 1) * len(part)]
            chosen = found[rung]
            if rung:
                chosen = slow.fill(chosen, found[rung - 1], [g - j * len(part) for g in mine], budget)
            assert letters[t, j * width : (j + 1) * width].tolist() == [x for coded in chosen for x in coded.letters]


@given(cases)
def test_nothing_drifts_where_everything_fits(case: tuple[tuple[int, int], str, int, int, int]) -> None:
    geometry, kind, tokens, seed, _ = case
    grouping = stream_of(*geometry).grouping
    assert grouping is not None
    # The longest code for every letter, and one bit.
    heads_each = grouping.heads // stream_of(*geometry).substreams
    stream = tightened(*geometry, heads_each * grouping.letters_per_head * 14 // 32 + 1)
    position = positions(kind, tokens, stream, seed)
    letters, _, rungs = drift_grouped(position, stream)
    assert not rungs.any()
    decoded, _ = group_prefix.decode_by_token(group_prefix.encode(letters, stream), stream)
    assert (decoded[:tokens] == nearest_levels(position, grouping)).all()
    classes = slow.classes_by_channel(grouping)
    arrays = group_arrays(grouping)
    for place, channel in enumerate(arrays.row_channel.reshape(-1).tolist()):
        if channel < 0:
            assert not position[:, place].any()
            continue
        most = classes[channel].most
        for t in range(tokens):
            u = int(position[t, place])
            level = min(most, (abs(u) + ONE // 2 - 1) // ONE)
            assert int(decoded[t, channel]) == most + (level if u >= 0 else -level)
    left_out = sorted(set(range(grouping.heads * grouping.head_dim)) - set(classes))
    assert not decoded[:, left_out].any()


def test_a_finer_group_that_is_cheaper_gives_its_room_to_others() -> None:
    """What only a class with a cheap outermost level does: the finer rung of a group takes fewer bits."""
    stream = replace(bumpy(), words=1)
    position = positions("between", 400, stream, 7)
    letters, _, rungs = drift_grouped(position, stream)
    cheaper = 0
    for t, row in enumerate(position.tolist()):
        for j, part in enumerate(slow.parts(stream.grouping, stream.substreams)):
            if not (rung := int(rungs[t, j])):
                continue
            coarse, fine = (
                [slow.code_group(row, stream.grouping, g, thresholds_of(stream, r)) for g in part]
                for r in (rung, rung - 1)
            )
            order = group_ladder(stream).fill[j * len(part) : (j + 1) * len(part)] - j * len(part)
            cheaper += any(a.bits > b.bits for a, b in zip(coarse, fine))
            wanted = slow.fill(coarse, fine, order.tolist(), 32 * stream.words - 1)
            width = letters.shape[1] // stream.substreams
            assert letters[t, j * width : (j + 1) * width].tolist() == [x for coded in wanted for x in coded.letters]
    assert cheaper > 10


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_groups_fill_in_a_scattered_order_that_names_every_group_once(geometry: tuple[int, int]) -> None:
    stream = stream_of(*geometry)
    assert stream.grouping is not None
    count = len(list(slow.groups(stream.grouping))) // stream.substreams
    order = group_ladder(stream).fill.reshape(stream.substreams, count)
    for j, mine in enumerate(order.tolist()):
        assert mine == sorted(range(j * count, (j + 1) * count), key=lambda g: (g - j * count) * 2654435769 % 2**32)


@given(cases)
def test_the_stored_scale_is_the_least_squares_one_or_the_nearly_unbiased(
    case: tuple[tuple[int, int], str, int, int, int],
) -> None:
    stream, position = drawn(case)
    grouping = stream.grouping
    assert grouping is not None
    _, levels, _ = drift_grouped(position, stream)
    scale = np.full(len(position), 0.37, np.float16)
    plain, unbiased = (fit_scale(position, levels, scale, grouping, flag) for flag in (False, True))
    gains = np.zeros(position.shape[1])
    for group in slow.groups(grouping):
        for places in group.places:
            for place, c in zip(places, grouping.tables[group.table].classes):
                gains[place] = grouping.classes[c].gain / 256
    for t in range(len(position)):
        u = position[t].astype(np.float64) / ONE
        y = gains * levels[t]
        uu, uy, yy = float(u @ u), float(u @ y), float(y @ y)
        if yy <= 0 or uy <= 0:
            assert plain[t] == unbiased[t] == scale[t]
            continue
        least = uy / yy
        kept = uy * uy / (uu * yy)
        for got, gain in ((plain[t], least), (unbiased[t], least / (kept + (1 - kept) / 8))):
            np.testing.assert_allclose(float(got), float(scale[t]) * min(gain, 3.0), rtol=2e-3)


def test_a_container_too_small_for_zeros_is_refused_and_does_not_hang() -> None:
    x = np.random.default_rng(0).standard_normal((2, 64, 2, 64)).astype(np.float32)
    plan = fit_plan("2.26", *x)
    small = replace(plan, key=replace(plan.key, words=2))
    with pytest.raises(CapacityError, match="zeros") as caught:
        Codec(small).encode(*x)
    assert caught.value.code == "capacity-container"
