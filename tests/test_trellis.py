"""Dependent quantisation: paths, letters and pages against the oracles, the hard budget, files, damage, attention."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import dquantcodec as dqkv
from dquantcodec import errors, fit, group_prefix, warm
from dquantcodec.codec import Codec
from dquantcodec.file import Layer
from dquantcodec.file.header import Header, parse_header
from dquantcodec.file.info import Info
from dquantcodec.file.structs import crc32c
from dquantcodec.fit import fit_plan, zero_bits
from dquantcodec.grid import ONE
from dquantcodec.group_arrays import group_arrays, table_lengths
from dquantcodec.group_grid import grouped_positions, grouped_scale
from dquantcodec.grouping import Grouping, Levels
from dquantcodec.page import read_kind
from dquantcodec.plan import Plan, StreamPlan, budget
from dquantcodec.profile import PROFILES, Profile
from dquantcodec.testing import groups as slow
from dquantcodec.testing import trellises as oracle
from dquantcodec.trellis_drift import drift_dependent, rates, trellis, walk, walk_rows

#: (states, heads, head_dim, sub-streams)
CASES = [(4, 2, 64, 2), (4, 3, 40, 1), (4, 1, 20, 1), (8, 2, 64, 2), (8, 4, 12, 4), (4, 1, 300, 1)]


@pytest.fixture(scope="module", autouse=True)
def tiny_streams_have_classes() -> Iterator[None]:
    """Geometries small enough for slow oracles would stay rotated: zeros take most of their containers, or all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "MOST_ZEROS", 1.0)
        patch.setattr(fit, "better_rotated", lambda *_: False)
        yield


def profile_of(states: int, substreams: int) -> Profile:
    base = PROFILES["2.26-t"]
    key, value = (replace(s, quantiser=f"trellis-{states}") for s in (base.key, base.value))
    return replace(base, key=key, value=value, substreams=substreams, window=32)


def tensors(tokens: int, heads: int, dim: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values whose channels have variances of their own, from narrow to too wide for half steps."""
    spread = np.random.default_rng(dim).permuted(np.tile(np.geomspace(0.02, 9, dim), (2, heads, 1)), axis=2)
    x = np.random.default_rng(seed).standard_t(6, (2, tokens, heads, dim)) * spread[:, None]
    x[0] += np.random.default_rng(dim).standard_normal((heads, dim)) * 2
    return x[0].astype(np.float32), x[1].astype(np.float32)


@lru_cache(maxsize=16)
def plan_of(states: int, heads: int, dim: int, substreams: int) -> Plan:
    return fit_plan(profile_of(states, substreams), *tensors(256, heads, dim, 99))


def grouping_of(stream: StreamPlan) -> Grouping:
    assert stream.grouping is not None
    return stream.grouping


# --- Tables and paths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_state_has_the_code_of_its_weights(case: tuple[int, int, int, int]) -> None:
    for stream in (plan_of(*case).key, plan_of(*case).value):
        grouping = grouping_of(stream)
        assert grouping.states == case[0]
        for number, table in enumerate(grouping.tables[:2]):
            found = table_lengths(tuple(oracle.table_classes(grouping, number)), table.precision, grouping.states)
            for state, lengths in enumerate(found.reshape(grouping.states, -1)):
                by_letter = {letter: len(code) for code, letter in oracle.codes(grouping, number, state).items()}
                assert [by_letter[i] for i in range(len(lengths))] == lengths.tolist()


@pytest.mark.parametrize("states", [4, 8])
def test_fitted_groupings_mix_dependent_and_scalar_classes(states: int) -> None:
    kinds = [bool(c.second) for c in grouping_of(plan_of(states, 2, 64, 2).key).classes]
    assert any(kinds) and not all(kinds)


def few_levels(draw: Callable[..., Any]) -> Levels:
    """A class of three or five levels with any frequencies."""
    most = draw(st.integers(1, 2))

    def weights(largest_first: bool) -> tuple[int, ...]:
        upper = [draw(st.integers(1, 2700)) for _ in range(most)]
        middle = (1 << 14) - 2 * sum(upper)
        if largest_first and max(upper) > middle:
            upper = [1] * most
            middle = (1 << 14) - 2 * most
        return (*upper[::-1], middle, *upper)

    dependent = draw(st.booleans())
    return Levels(weights(True), 256, weights(False) if dependent else ())


@given(st.data(), st.sampled_from([4, 8]), st.sampled_from([0.0, 0.02, 0.115, 0.7, 5.0]))
def test_no_path_is_cheaper_than_the_one_taken(data: st.DataObject, states: int, kappa: float) -> None:
    used = tuple(few_levels(data.draw) for _ in range(2))
    kinds = [data.draw(st.integers(0, 1)) for _ in range(data.draw(st.integers(1, 5)))]
    row = [data.draw(st.integers(-3 * ONE, 3 * ONE)) for _ in kinds]
    found, costs = trellis(states), rates(used, [kappa])
    path = np.empty((1, len(row)), np.int8)
    walk_rows(
        np.array([row], np.int32), costs.costs[0], costs.first, costs.most, costs.dependent, np.arange(len(row)),
        np.array(kinds), found.before, found.branch, found.turn, path,
    )  # fmt: skip
    taken = [y / 2 if used[c].second else float(y) for y, c in zip(path[0].tolist(), kinds)]

    def cost(levels: list[float], rate: float) -> float:
        return sum((u / ONE - v) ** 2 for u, v in zip(row, levels)) + kappa * rate

    by_levels: dict[tuple[float, ...], float] = {}
    for levels, rate in oracle.all_paths([used[c] for c in kinds], states):
        # A level is reached by one index only, so levels name a path.
        by_levels[tuple(levels)] = cost(levels, rate)
    assert tuple(taken) in by_levels
    best = min(by_levels.values())
    assert by_levels[tuple(taken)] <= best + 1e-4 * (1 + best)


@pytest.mark.parametrize("case", CASES)
def test_letters_levels_and_budget_agree(case: tuple[int, int, int, int]) -> None:
    for x, stream in zip(tensors(40, *case[1:3], seed=3), (plan_of(*case).key, plan_of(*case).value)):
        grouping = grouping_of(stream)
        flat = x.reshape(40, -1)
        position = grouped_positions(flat, grouped_scale(flat, stream.step, grouping), grouping)
        letters, levels, _ = drift_dependent(position, stream)
        parts = slow.parts(grouping, stream.substreams)
        for t in range(0, 40, 13):
            following = iter(letters[t].tolist())
            for part in parts:
                state = bits = 0
                for group in part:
                    used = oracle.table_classes(grouping, group.table)
                    sizes = [len(c.weights) for c in used]
                    count = int(np.prod(sizes))
                    for places in group.places:
                        start, letter = divmod(next(following), count)
                        assert start == state
                        fields = list(zip(slow.letter_fields(letter, sizes), used, strict=True))
                        _, expected, state = oracle.follow(grouping.states, state, fields)
                        assert [int(levels[t, place]) for place in places] == expected
                        by_letter = {n: len(code) for code, n in oracle.codes(grouping, group.table, start).items()}
                        bits += by_letter[letter]
                assert bits <= budget(stream) // 1024


@pytest.mark.parametrize(("kind", "most"), [("key", 6), ("value", 5.3)])
def test_two_paths_are_joined_wherever_that_fills_the_container(kind: str, most: float) -> None:
    plan = plan_of(4, 8, 64, 1)
    x, stream = tensors(128, 8, 64, seed=8)[kind == "value"], getattr(plan, kind)
    flat, grouping = x.reshape(128, -1), grouping_of(stream)
    position = grouped_positions(flat, grouped_scale(flat, stream.step, grouping), grouping)
    letters, _, rungs = drift_dependent(position, stream)
    arrays = group_arrays(grouping)
    bits = arrays.lengths[arrays.first[walk(grouping).table] + letters].sum(axis=1, dtype=np.int64)
    # Joined at one place only they leave 8.6 and 5.9 bits.
    assert (budget(stream) // 1024 - bits)[rungs[:, 0] > 0].mean() < most


# --- Pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_pages_decode_as_the_specification_says(case: tuple[int, int, int, int]) -> None:
    plan = plan_of(*case)
    codec = Codec(plan)
    pages = codec.encode(*tensors(37, *case[1:3], seed=1))
    assert codec.check(pages) == []
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        grouping = grouping_of(stream)
        fields = read_kind(pages.data[:1], plan, kind, slice(0, 1))
        decoded, symbols = codec.decode_kind(pages, kind), codec.symbols(pages, kind)
        parts = slow.parts(grouping, stream.substreams)
        for t in (0, 9, 31):
            levels: dict[int, int] = {}
            for j, part in enumerate(parts):
                found = oracle.decode(fields.words[0, j, :, t].tolist(), grouping, part)
                assert found.finding is None
                levels |= found.levels
            assert all(symbols[t, channel] == level for channel, level in levels.items())
            row = np.array(oracle.values(levels, fields.affine[t, 0].astype(np.float32), grouping))
            if fields.scale is not None and fields.mean is not None:
                row = row + (fields.scale[0].astype(np.float32)[:, None] * fields.mean[0]).reshape(-1)
            row = np.ldexp(row, fields.exponent)
            assert (row.view(np.uint32) == decoded[t].reshape(-1).view(np.uint32)).all()


@given(st.data(), st.sampled_from(CASES))
def test_any_words_decode_as_the_specification_says(data: st.DataObject, case: tuple[int, int, int, int]) -> None:
    stream = plan_of(*case).value
    grouping = grouping_of(stream)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    words = rng.integers(0, 2**32, (1, stream.substreams, stream.words, 32), np.uint32)
    # Streams of many ones, of many zeros, and of none.
    words &= rng.integers(0, 2**32, words.shape, np.uint32) | np.uint32(data.draw(st.sampled_from([0, 2**32 - 1])))
    levels, status = group_prefix.decode_levels(words, stream, strict=True)
    middle = group_arrays(grouping).middle
    assert (levels[0] <= 2 * middle[:, None]).all()
    lane = data.draw(st.integers(0, 31))
    for j, part in enumerate(slow.parts(grouping, stream.substreams)):
        found = oracle.decode(words[0, j, :, lane].tolist(), grouping, part)
        assert (found.finding is None) == (status[0, j, lane] == 0)
        if found.finding != "container-overrun":
            assert all(levels[0, channel, lane] == level for channel, level in found.levels.items())


HARD: dict[str, Callable[[tuple[int, ...]], NDArray[Any]]] = {
    "zero": lambda shape: np.zeros(shape),
    "constant": lambda shape: np.ones(shape),
    "one value": lambda shape: np.where(np.arange(np.prod(shape)).reshape(shape) % np.prod(shape[1:]) == 3, 1e4, 0),
    "alternating": lambda shape: np.where(np.arange(np.prod(shape)).reshape(shape) % 2, 1.0, -1.0),
    "heavy": lambda shape: np.random.default_rng(0).standard_cauchy(shape).clip(-1e30, 1e30),
    "uniform": lambda shape: np.random.default_rng(0).uniform(-1, 1, shape),
    "tiny": lambda shape: np.random.default_rng(0).standard_normal(shape) * 1e-40,
    "huge": lambda shape: np.random.default_rng(0).standard_normal(shape) * 1e37,
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("case", CASES)
def test_every_stream_fits(case: tuple[int, int, int, int], name: str) -> None:
    codec = Codec(plan_of(*case))
    x = HARD[name]((33, *case[1:3])).astype(np.float32)
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    for decoded in codec.decode(pages):
        assert np.isfinite(decoded).all()


@given(st.data(), st.sampled_from(CASES))
def test_any_stream_fits(data: st.DataObject, case: tuple[int, int, int, int]) -> None:
    codec = Codec(plan_of(*case))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    channels = rng.permutation(np.geomspace(1, 10 ** data.draw(st.floats(0, 6)), case[1] * case[2]))
    x = (rng.standard_normal((3, channels.size)) * channels).reshape(3, *case[1:3]).astype(np.float32)
    assert codec.check(codec.encode(x, x)) == []


@pytest.mark.parametrize("states", [4, 8])
def test_nothing_is_clipped(states: int) -> None:
    plan = plan_of(states, 2, 64, 2)
    _, x = tensors(32, 2, 64, seed=5)
    codec = Codec(plan)
    grouping = grouping_of(plan.value)
    narrow = int(np.argmin(np.where(group_arrays(grouping).reach > 2, group_arrays(grouping).reach, 1e9)))
    x.reshape(32, -1)[:, narrow] = np.abs(x).max() * 20
    flat = x.reshape(32, -1)
    scale = grouped_scale(flat, plan.value.step, grouping).astype(np.float64)
    for channel, found in slow.classes_by_channel(grouping).items():
        # A scale is rounded to FP16.
        assert (np.abs(flat[:, channel]) <= scale * (len(found.weights) // 2 + 0.5) * (1 + 2**-10)).all()
    decoded = codec.decode_kind(codec.encode(x, x), "value").reshape(32, -1)
    assert (np.abs(decoded - flat)[:, narrow] < 0.2 * flat[:, narrow]).all()


def test_zeros_stay_in_the_first_state_and_cost_what_the_plan_counts() -> None:
    for case in CASES:
        for stream in (plan_of(*case).key, plan_of(*case).value):
            grouping = grouping_of(stream)
            zeros = np.zeros((1, len(group_arrays(grouping).row_class) * 8), np.int32)
            # Kappa so large that nothing but the least rate counts is not needed: zero is the nearest level of zero.
            _, levels, _ = drift_dependent(zeros, stream)
            assert zero_bits(grouping).reshape(stream.substreams, -1).sum(axis=1).max() <= budget(stream) // 1024
            assert not levels.any()


@pytest.mark.parametrize("threads", [1, 3])
def test_bytes_do_not_depend_on_threads(threads: int) -> None:
    plan, x = plan_of(4, 2, 64, 2), tensors(200, 2, 64, seed=4)
    assert (Codec(plan, threads=threads).encode(*x).data == Codec(plan).encode(*x).data).all()


@pytest.mark.parametrize("case", [(4, 2, 64, 2), (8, 2, 64, 2)])
def test_attention_is_that_over_decoded_rows(case: tuple[int, int, int, int]) -> None:
    codec = Codec(plan_of(*case))
    keys, values = tensors(70, *case[1:3], seed=2)
    pages = codec.encode(keys, values)
    query = np.random.default_rng(1).standard_normal((6, case[2])).astype(np.float32)
    out, lse = codec.attend(query, pages)
    k, v = (a.astype(np.float64) for a in codec.decode(pages))
    for q in range(6):
        logits = k[:, q // 3] @ query[q].astype(np.float64) / np.sqrt(case[2])
        weights = np.exp(logits - logits.max())
        np.testing.assert_allclose(out[q], weights @ v[:, q // 3] / weights.sum(), atol=2e-4 * np.abs(v).max())
        np.testing.assert_allclose(lse[q], logits.max() + np.log(weights.sum()), rtol=1e-4)


def test_drift_share_counts_levels_off_the_nearest_path() -> None:
    keys, values = tensors(64, 2, 64, seed=6)
    plan = plan_of(4, 2, 64, 2)
    shares = Codec(plan).drift_share(keys, values, Codec(plan).encode(keys, values))
    assert min(shares) > 0 and max(shares) < 1
    roomy = replace(plan, key=replace(plan.key, words=200), value=replace(plan.value, words=200))
    codec = Codec(roomy)
    assert max(codec.drift_share(keys, values, codec.encode(keys, values))) < min(shares)


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", ["2.26-t", "1.96-t"])
def test_file_round_trip(tmp_path: Path, profile: str) -> None:
    keys, values = tensors(300, 2, 64, seed=7)
    path = tmp_path / "x.dqkv"
    with dqkv.create(path, [Layer(2, 64, "float32", profile)], sinks=1, recent=3) as writer:
        writer.append([keys], [values])
    with dqkv.open(path) as reader:
        plan = reader.layers[0].plan
        assert plan is not None and grouping_of(plan.key).states == grouping_of(plan.value).states == 4
        codec = Codec(plan)
        coded = codec.decode(codec.encode(keys[1:-3], values[1:-3]))
        for exact, read, expected in zip((keys, values), (reader.layers[0].key, reader.layers[0].value), coded):
            got = np.asarray(read[:])
            assert (got[1:-3] == expected).all()
            assert (got[:1] == exact[:1]).all() and (got[-3:] == exact[-3:]).all()


def header_of(states: int) -> bytes:
    plan = plan_of(states, 2, 64, 2)
    return Header(bytes(16), (Layer(2, 64, "float32", plan, number=0),), 1, 0, 0, Info()).pack()


@pytest.mark.parametrize("states", [4, 8])
def test_header_brings_groupings_back(states: int) -> None:
    plan = plan_of(states, 2, 64, 2)
    read = parse_header(memoryview(header_of(states))).layers[0].plan
    assert read is not None
    for ours, theirs in ((plan.key, read.key), (plan.value, read.value)):
        a, b = grouping_of(ours), grouping_of(theirs)
        assert {table.classes for table in a.tables} and a.states == b.states
        for x, y in zip(a.tables, b.tables, strict=True):
            assert x.precision == y.precision
            assert [a.classes[c] for c in x.classes] == [b.classes[c] for c in y.classes]
        assert (a.order == b.order).all() and (a.choice == b.choice).all()


def crafted(data: bytes, at: int, *change: int) -> memoryview:
    """``data`` with bytes replaced and its checksum made right again."""
    block = bytearray(data)
    block[at : at + len(change)] = bytes(change)
    block[124:128] = crc32c(bytes(block[128:]), crc32c(bytes(block[:124]))).to_bytes(4, "little")
    return memoryview(bytes(block))


@pytest.mark.parametrize(
    ("code", "place", "change"),
    [
        ("profile-quantiser", "key", 3),
        ("profile-grouping", "key", 2),
        ("profile-grouping", "key", 0),
        ("profile-quantiser", "grouping", 3),
        ("grouping-states", "grouping", 0),
        ("header-reserved", "class", 2),
    ],
)
def test_crafted_headers_are_refused(code: str, place: str, change: int) -> None:
    data = header_of(4)
    classes_at, groupings_at = struct.unpack_from("<II", data, 108)
    at = {"key": 128 + 64 + 1, "grouping": groupings_at + 9, "class": classes_at + 1}[place]
    assert parse_header(crafted(data, at, data[at]))
    with pytest.raises(errors.DQuantError) as caught:
        parse_header(crafted(data, at, change))
    assert caught.value.code == code


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_damaged_headers_raise_typed_errors_or_give_plans_that_decode(seed: int, changes: int) -> None:
    data = header_of(4)
    rng = np.random.default_rng(seed)
    block = np.frombuffer(data, np.uint8).copy()
    classes_at, end = struct.unpack_from("<I", data, 108)[0], struct.unpack_from("<I", data, 92)[0]
    for _ in range(changes):
        block[rng.integers(classes_at, end)] = rng.integers(0, 256)
    try:
        header = parse_header(crafted(block.tobytes(), 0, block[0]))
    except errors.DQuantError:
        return
    plan = header.layers[0].plan
    assert plan is not None
    words = rng.integers(0, 2**32, (1, plan.value.substreams, plan.value.words, 32), np.uint32)
    group_prefix.decode_levels(words, plan.value, strict=True)


USE = """
import numpy as np
from dquantcodec import Codec, fit_plan
x = (np.random.default_rng(0).standard_normal((40, 2, 64)) * np.geomspace(0.1, 9, 64)).astype(np.float16)
codec = Codec(fit_plan("2.26-t", x, x))
codec.decode(codec.encode(x, x), dtype=np.float16)
"""


def test_kernels_compiled_ahead_are_those_a_trellis_needs(tmp_path: Path) -> None:
    def run(code: str) -> set[str]:
        environment = {**os.environ, "DQUANTCODEC_CACHE_DIR": str(tmp_path)}
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)
        return {path.name for path in tmp_path.rglob("*.nbc")}

    parts = (*warm.ENCODE, *warm.DECODE)
    ahead = run(f"from dquantcodec import warm; warm.compile_parts({parts!r}, {warm.path_of(PROFILES['2.26-t'])!r})")
    assert ahead
    assert run(USE) == ahead
