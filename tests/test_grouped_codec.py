"""Grouped streams end to end: pages against the oracles, ranges, dtypes, attention, damage, and no clipping."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import group_prefix
from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import ChecksumError, InputError
from dquantcodec.fit import fit_plan
from dquantcodec.grid import ONE
from dquantcodec.group_drift import drift_grouped
from dquantcodec.group_grid import grouped_positions, grouped_scale
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import Plan, StreamPlan, make_plan
from dquantcodec.profile import PROFILES, Profile
from dquantcodec.testing import groups as slow
from dquantcodec.testing.pages import token_levels

#: (heads, head_dim, sub-streams, window)
GEOMETRIES = [
    (4, 8, 4, 32), (2, 64, 2, 32), (3, 80, 1, 128), (4, 96, 4, 128), (2, 128, 2, 128), (2, 256, 1, 32), (5, 7, 1, 32),
    (1, 1, 1, 32),
]  # fmt: skip


def profile_of(substreams: int, window: int) -> Profile:
    return replace(PROFILES["2.26"], substreams=substreams, window=window)


@lru_cache(maxsize=32)
def spread_of(heads: int, dim: int) -> NDArray[np.float64]:
    """Standard deviations ``[2, H, D]`` of keys and values."""
    rng = np.random.default_rng(heads * 1000 + dim)
    return rng.permuted(np.tile(np.geomspace(0.02, 5, dim), (2, heads, 1)), axis=2)


def tensors(tokens: int, heads: int, dim: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of channels with their own variances; keys have means."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(6, (2, tokens, heads, dim)) * spread_of(heads, dim)[:, None]
    x[0] += np.random.default_rng(dim).standard_normal((heads, dim)) * 2
    return x[0].astype(np.float32), x[1].astype(np.float32)


@lru_cache(maxsize=32)
def plan_of(heads: int, dim: int, substreams: int, window: int) -> Plan:
    return fit_plan(profile_of(substreams, window), *tensors(256, heads, dim, 99))


@lru_cache(maxsize=32)
def codec_of(heads: int, dim: int, substreams: int, window: int, threads: int = 1) -> Codec:
    return Codec(plan_of(heads, dim, substreams, window), threads=threads)


def mixed_plans() -> list[Plan]:
    """Keys grouped and values rotated, and the reverse."""
    fitted, rotated = plan_of(2, 64, 2, 32), make_plan(profile_of(2, 32), 2, 64)
    return [replace(fitted, value=rotated.value), replace(fitted, key=rotated.key)]


def by_oracle(codec: Codec, pages: Pages) -> list[NDArray[np.float32]]:
    window = codec.plan.window
    decoded = [
        oracles.decode_page(page.tobytes(), codec.plan, min(window, pages.tokens - number * window))
        for number, page in enumerate(pages.data)
    ]
    return [np.concatenate([page[kind] for page in decoded]) for kind in ("key", "value")]


def same_as_oracle(codec: Codec, pages: Pages) -> None:
    for got, wanted in zip(codec.decode(pages), by_oracle(codec, pages)):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("tokens", [1, 37])
def test_pages_are_what_the_oracle_reads(geometry: tuple[int, int, int, int], tokens: int) -> None:
    codec = codec_of(*geometry)
    keys, values = tensors(tokens, *geometry[:2])
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    same_as_oracle(codec, pages)
    if geometry[1] >= 64:
        assert codec.plan.key.grouping is not None and codec.plan.value.grouping is not None
        assert codec.plan.key.substreams == geometry[2]
        for got, put in zip(codec.decode(pages), (keys, values)):
            assert float(((got - put) ** 2).sum()) < 0.2 * float((put**2).sum())


@pytest.mark.parametrize("number", [0, 1])
def test_one_kind_may_be_grouped_and_the_other_rotated(number: int) -> None:
    codec = Codec(mixed_plans()[number])
    keys, values = tensors(70, 2, 64)
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    same_as_oracle(codec, pages)
    # Each kind is coded as it is coded beside any other.
    fitted, rotated = codec_of(2, 64, 2, 32), Codec(make_plan(profile_of(2, 32), 2, 64))
    pure = [fitted, rotated] if number == 0 else [rotated, fitted]
    for kind, other in zip(("key", "value"), pure):
        other_pages = other.encode(keys, values)
        assert codec.decode_kind(pages, kind).tobytes() == other.decode_kind(other_pages, kind).tobytes()


@pytest.mark.parametrize("geometry", [(2, 64, 2, 32), (3, 80, 1, 128)])
def test_words_are_those_the_oracle_writes_for_the_drifted_letters(geometry: tuple[int, int, int, int]) -> None:
    plan = plan_of(*geometry)
    for stream, x in zip((plan.key, plan.value), tensors(5, *geometry[:2], seed=4)):
        grouping = stream.grouping
        assert grouping is not None
        flat = x.reshape(len(x), -1)
        position = grouped_positions(flat, grouped_scale(flat, stream.step, grouping), grouping)
        letters, _, _ = drift_grouped(position, stream)
        words = group_prefix.encode(letters, stream)
        assert words.shape == (1, stream.substreams, stream.words, 32) and not words[..., 5:].any()
        width = letters.shape[1] // stream.substreams
        for t, row in enumerate(letters.tolist()):
            for j, part in enumerate(slow.parts(grouping, stream.substreams)):
                wanted = slow.encode(row[j * width : (j + 1) * width], grouping, part)
                wanted += [0] * (stream.words - len(wanted))
                assert words[0, j, :, t].tolist() == wanted


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_scale_is_the_usual_step_or_what_the_farthest_channel_needs(geometry: tuple[int, int, int, int]) -> None:
    stream = plan_of(*geometry).value
    if stream.grouping is None:
        pytest.skip("too small to be fitted")
    heads, dim = geometry[:2]
    x = tensors(20, heads, dim)[1].reshape(20, -1)
    x[10:, 0] *= 40
    x[19] = 0
    scale = grouped_scale(x, stream.step, stream.grouping)
    assert scale.dtype == np.float16
    classes = slow.classes_by_channel(stream.grouping)
    places = [
        pair
        for group in slow.groups(stream.grouping)
        for own, channels in zip(group.places, group.channels)
        for pair in zip(own, channels)
    ]
    position = grouped_positions(x, scale, stream.grouping)
    for t, row in enumerate(x.astype(np.float64)):
        usual = float(np.sqrt((row**2).mean())) * stream.step
        needed = max(abs(row[channel]) / (found.most + 0.5) for channel, found in classes.items())
        assert abs(float(scale[t]) - max(usual, needed)) <= 2.0**-11 * max(usual, needed) + 2.0**-25
        for place, channel in places:
            wanted = row[channel] / float(scale[t]) * ONE if scale[t] else 0
            assert abs(int(position[t, place]) - wanted) <= 1 + 1e-6 * abs(wanted)
        coded = {place for place, _ in places}
        assert not position[t, [p for p in range(position.shape[1]) if p not in coded]].any()


@given(st.integers(0, 150), st.integers(-200, 200), st.integers(-200, 200))
def test_ranges_are_slices_of_the_whole(tokens: int, start: int, stop: int) -> None:
    codec = codec_of(2, 64, 2, 32)
    keys, values = tensors(tokens, 2, 64)
    pages = codec.encode(keys, values)
    assert pages.tokens == tokens
    for whole, part in zip(codec.decode(pages), codec.decode(pages, start, stop)):
        assert part.tobytes() == whole[start:stop].tobytes()


def test_threads_do_not_change_a_byte() -> None:
    keys, values = tensors(300, 4, 96)
    keys[130:200] *= 1e20
    one, three = codec_of(4, 96, 4, 128), codec_of(4, 96, 4, 128, threads=3)
    pages = one.encode(keys, values)
    assert three.encode(keys, values).data.tobytes() == pages.data.tobytes()
    for a, b in zip(one.decode(pages, 5, 290), three.decode(pages, 5, 290)):
        assert a.tobytes() == b.tobytes()
    # Every page stands for itself.
    for page in range(3):
        cut = slice(page * 128, min(300, (page + 1) * 128))
        assert one.encode(keys[cut], values[cut]).data.tobytes() == pages.data[page].tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_converted_exactly(dtype: Any) -> None:
    codec = codec_of(2, 64, 2, 32)
    keys, values = (x.astype(dtype) for x in tensors(40, 2, 64))
    pages = codec.encode(keys, values)
    assert pages.data.tobytes() == codec.encode(keys.astype(np.float32), values.astype(np.float32)).data.tobytes()
    for narrow, wide in zip(codec.decode(pages, dtype=dtype), codec.decode(pages)):
        assert narrow.dtype == dtype and narrow.tobytes() == wide.astype(dtype).tobytes()


@pytest.mark.parametrize("factor", [1e-30, 1e-6, 1.0, 1e6, 1e30, 3e36])
def test_any_magnitude_is_coded_alike(factor: float) -> None:
    codec = codec_of(2, 64, 2, 32)
    keys, values = (x * np.float32(factor) for x in tensors(33, 2, 64))
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    same_as_oracle(codec, pages)
    for got, put in zip(codec.decode(pages), (keys, values)):
        error = got.astype(np.float64) - put
        assert (error**2).sum() < 0.2 * (put.astype(np.float64) ** 2).sum()


@pytest.mark.parametrize("kind", oracles.HOSTILE)
def test_hostile_tokens_fit_and_come_back_as_the_oracle_has_them(kind: str) -> None:
    codec = codec_of(2, 64, 2, 32)
    x = oracles.hostile(kind, 40, 2, 64, 1, codec.plan.signs)
    pages = codec.encode(x, x[::-1])
    assert codec.check(pages) == []
    same_as_oracle(codec, pages)


def test_numbers_that_are_not_finite_are_refused() -> None:
    keys, values = tensors(40, 2, 64)
    values[33, 1, 7] = np.nan
    with pytest.raises(InputError) as caught:
        codec_of(2, 64, 2, 32).encode(keys, values)
    assert caught.value.code == "input-nonfinite"
    assert {k: caught.value.where[k] for k in ("kind", "token", "head", "channel")} == {
        "kind": "value", "token": 33, "head": 1, "channel": 7,
    }  # fmt: skip


# --- No clipping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", [(2, 64, 2, 32), (2, 128, 2, 128), (3, 80, 1, 128)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_an_outlier_in_a_narrow_channel_comes_back(geometry: tuple[int, int, int, int], sign: int) -> None:
    codec = codec_of(*geometry)
    for kind, stream in (("key", codec.plan.key), ("value", codec.plan.value)):
        assert stream.grouping is not None
        classes = slow.classes_by_channel(stream.grouping)
        narrow = sorted(classes, key=lambda channel: classes[channel].most)
        for channel in (narrow[0], narrow[len(narrow) // 4], narrow[-1]):
            pair = dict(zip(("key", "value"), (x.copy() for x in tensors(64, *geometry[:2], seed=6))))
            flat = pair[kind].reshape(64, -1)
            flat[40] *= 1e-2
            flat[40, channel] = sign * 100.0
            pages = codec.encode(pair["key"], pair["value"])
            got = codec.decode_kind(pages, kind).reshape(64, -1)[40, channel]
            # Means move the value; what is left is the fit of one step to one dominating value.
            assert abs(got - sign * 100) < 4, (kind, channel, classes[channel].most)


@given(st.integers(0, 2**32), st.sampled_from([2.0, 10.0, 100.0]))
def test_no_coded_value_lies_beyond_the_last_level(seed: int, factor: float) -> None:
    stream = plan_of(2, 64, 2, 32).key
    assert stream.grouping is not None
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4, 128)) * rng.choice([1.0, factor], (4, 128))).astype(np.float32)
    position = grouped_positions(x, grouped_scale(x, stream.step, stream.grouping), stream.grouping)
    for group in slow.groups(stream.grouping):
        for places in group.places:
            for place, c in zip(places, stream.grouping.tables[group.table].classes):
                # The scale is rounded to FP16: half a unit in the last place.
                limit = (stream.grouping.classes[c].most + 0.5) * ONE * (1 + 2.0**-11) + 2
                assert np.abs(position[:, place]).max() <= limit


# --- Attention, symbols, drift --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["grouped", "key", "value", "wide"])
@pytest.mark.parametrize("tokens", [1, 100])
def test_attention_is_that_over_decoded_tensors(plan: str, tokens: int) -> None:
    if plan == "wide":
        codec = codec_of(3, 80, 1, 128)
    else:
        codec = Codec({"grouped": plan_of(2, 64, 2, 32), "key": mixed_plans()[0], "value": mixed_plans()[1]}[plan])
    heads, dim = codec.plan.kv_heads, codec.plan.head_dim
    pages = codec.encode(*tensors(tokens, heads, dim))
    query = np.random.default_rng(5).standard_normal((2, 2 * heads, dim)).astype(np.float32)
    keys, values = codec.decode(pages)
    extra = tensors(7, heads, dim, 8)
    for exact in (None, extra):
        out, lse = codec.attend(query, pages, exact=exact)
        all_keys, all_values = (keys, values) if exact is None else map(np.concatenate, zip((keys, values), exact))
        wanted, sums = oracles.attention(query, all_keys, all_values)
        np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-4)


def test_attention_takes_the_exponent_of_a_page() -> None:
    codec = codec_of(2, 64, 2, 32)
    keys, values = tensors(70, 2, 64)
    pages = codec.encode(keys * np.float32(1e-12), values * np.float32(1e12))
    query = np.random.default_rng(5).standard_normal((1, 2, 64)).astype(np.float32) * np.float32(1e12)
    out, lse = codec.attend(query, pages)
    wanted, sums = oracles.attention(query, *codec.decode(pages))
    np.testing.assert_allclose(out, wanted, rtol=2e-4, atol=2e8)
    np.testing.assert_allclose(lse, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("geometry", [(2, 64, 2, 32), (3, 80, 1, 128)])
def test_symbols_are_the_decoded_levels(geometry: tuple[int, int, int, int]) -> None:
    codec = codec_of(*geometry)
    pages = codec.encode(*tensors(40, *geometry[:2]))
    tile = PageLayout.of(codec.plan)
    for kind, stream in (("key", codec.plan.key), ("value", codec.plan.value)):
        symbols = codec.symbols(pages, kind)
        assert symbols.dtype == np.uint8 and symbols.shape == (40, codec.plan.values)
        for token in (0, 31, 39):
            page, inside = divmod(token, codec.plan.window)
            at = tile.head_bytes + inside // 32 * tile.tile_bytes + getattr(tile, kind).words_at
            levels = token_levels(pages.data[page].tobytes(), at, inside % 32, stream, ("key", inside))
            assert {channel: int(symbols[token, channel]) for channel in levels} == levels
            left_out = sorted(set(range(codec.plan.values)) - set(levels))
            assert not symbols[token, left_out].any()


def test_the_drift_share_counts_symbols_that_are_not_the_nearest() -> None:
    tight = plan_of(2, 64, 2, 32)
    roomy = replace(tight, key=replace(tight.key, words=40), value=replace(tight.value, words=40))
    keys, values = tensors(100, 2, 64)
    natural, codec = Codec(roomy), Codec(tight)
    easy, pages = natural.encode(keys, values), codec.encode(keys, values)
    assert natural.drift_share(keys, values, easy) == (0, 0)
    shares = codec.drift_share(keys, values, pages)
    for kind, share in zip(("key", "value"), shares):
        moved = codec.symbols(pages, kind).astype(int) - natural.symbols(easy, kind)
        assert 0 < share < 0.2
        assert abs(float((moved != 0).mean()) - share) < 1e-12
        # Drift goes towards zero, never past it.
        middle = natural.symbols(natural.encode(keys * 0, values * 0), kind)[:1].astype(int)
        assert (np.abs(codec.symbols(pages, kind) - middle) <= np.abs(natural.symbols(easy, kind) - middle)).all()


# --- Damage ---------------------------------------------------------------------------------------------------------


def words_of(stream: StreamPlan, tiles: int, seed: int, share: float) -> NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, (tiles, stream.substreams, stream.words, 32), dtype=np.uint64).astype(np.uint32)
    return np.where(rng.random(words.shape) < share, words, np.uint32(0xFFFFFFFF if seed % 2 else 0))


@given(st.sampled_from(GEOMETRIES), st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.0]))
def test_any_words_are_safe(geometry: tuple[int, int, int, int], seed: int, share: float) -> None:
    stream = plan_of(*geometry).key
    if stream.grouping is None:
        return
    words = words_of(stream, 1, seed, share)
    levels, status = group_prefix.decode_by_token(words, stream, strict=True)
    classes = slow.classes_by_channel(stream.grouping)
    for channel in range(levels.shape[1]):
        most = 2 * classes[channel].most if channel in classes else 0
        assert levels[:, channel].max() <= most
    parts = slow.parts(stream.grouping, stream.substreams)
    for lane in (0, 17):
        for j, part in enumerate(parts):
            found = slow.decode(words[0, j, :, lane].tolist(), stream.grouping, part)
            code = {None: 0, "container-overrun": 1, "container-padding": 2}[found.finding]
            assert (int(status[lane, j]) != 0) == (code != 0)
            if code != 1:
                assert {c: int(levels[lane, c]) for c in found.levels} == found.levels
            loose = group_prefix.decode_by_token(words, stream)[1]
            assert (int(loose[lane, j]) != 0) == (code == 1)


def test_containers_that_end_too_early_are_told() -> None:
    codec = codec_of(2, 64, 2, 32)
    pages = codec.encode(*tensors(40, 2, 64))
    at = codec.layout.head_bytes + codec.layout.value.words_at
    size = 4 * codec.plan.value.words * 32
    # The code of all ones is the longest: the container ends before its letters do.
    damaged = pages.data.copy()
    tile = damaged[1, at + size : at + 2 * size].view("<u4").reshape(-1, 32)
    tile[:, 3] = 0xFFFFFFFF
    with pytest.raises(ChecksumError) as caught:
        codec.decode(Pages(damaged, 40))
    assert caught.value.code == "container-overrun"
    assert caught.value.where == {"kind": "value", "token": 35, "substream": 1}
    assert ("value", 35, 1, "container-overrun") in codec.check(Pages(damaged, 40))


@pytest.mark.parametrize("kind", ["key", "value"])
def test_flips_in_padding_are_found_by_checking_alone(kind: str) -> None:
    codec = codec_of(2, 64, 2, 32)
    keys, values = tensors(35, 2, 64)
    pages = codec.encode(keys * 0, values * 0)  # all levels zero: every container has room
    stream = getattr(codec.plan, kind)
    at = codec.layout.head_bytes + getattr(codec.layout, kind).words_at
    clean = codec.decode_kind(pages, kind)
    ends = [1 + zero_bits(stream, part) for part in slow.parts(stream.grouping, stream.substreams)]
    assert max(ends) < 32 * stream.words
    flips = ((0, 0, 0), (5, 0, ends[0]), (31, 1, 32 * stream.words - 1), (34, 1, ends[1]))
    for token, substream, bit in flips:
        damaged = pages.data.copy()
        page, lane = divmod(token, 32)
        words = damaged[page, at : at + 4 * 32 * stream.words * stream.substreams].view("<u4")
        words[(substream * stream.words + bit // 32) * 32 + lane] ^= np.uint32(1 << bit % 32)
        assert codec.check(Pages(damaged, 35)) == [(kind, token, substream, "container-padding")]
        assert codec.decode_kind(Pages(damaged, 35), kind).tobytes() == clean.tobytes()
    damaged = pages.data.copy()
    damaged[1, at : at + 128].view("<u4")[35 - 32] = 1
    assert codec.check(Pages(damaged, 35)) == [(kind, 34, 0, "page-unused")]


def zero_bits(stream: StreamPlan, part: list[slow.Group]) -> int:
    """Bits of a sub-stream whose levels are all zero."""
    assert stream.grouping is not None
    zeros = [0] * (8 * stream.grouping.heads * sum(stream.grouping.fields))
    nothing: list[list[int]] = [[] for _ in stream.grouping.classes]
    return sum(slow.code_group(zeros, stream.grouping, group, nothing).bits for group in part)
