"""The kernels of grouped streams, compiled for the host and run as they are, against the CPU codec: the same bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gpu_support as gpu
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import Codec
from dquantcodec.cuda import group_tables, launches
from dquantcodec.fit import fit_plan
from dquantcodec.grid import ONE
from dquantcodec.group_drift import group_ladder
from dquantcodec.page_layout import KINDS
from dquantcodec.profile import PROFILES

#: The default profile with the trellis that no named one has.
EIGHT_STATES = replace(
    PROFILES["2.26-t"],
    key=replace(PROFILES["2.26-t"].key, quantiser="trellis-8"),
    value=replace(PROFILES["2.26-t"].value, quantiser="trellis-8"),
)
BUILDS = str(Path(__file__).parent.parent / ".pytest_cache" / "device-kernels")


def channel_tokens(tokens: int, heads: int, head_dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Keys and values ``[2, T, H, D]`` of channels and tokens of different magnitudes; keys have means."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, tokens, heads, head_dim)) * np.exp(rng.standard_normal((2, 1, heads, head_dim)))
    x *= rng.uniform(0.5, 2, (2, tokens, 1, 1))
    x[0] += 3 * rng.standard_normal((1, heads, head_dim))
    return x.astype(np.float32)


@lru_cache(maxsize=32)
def fitted(name: str, heads: int, head_dim: int, substreams: int = 2, window: int = 64) -> Codec:
    """A codec with classes, of small pages."""
    profile = replace(PROFILES.get(name, EIGHT_STATES), substreams=substreams, window=window)
    codec = Codec(fit_plan(profile, *channel_tokens(256, heads, head_dim)))
    assert codec.plan.key.grouping is not None and codec.plan.value.grouping is not None
    return codec


def encoded(codec: Codec, rows: NDArray[Any], **more: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Pages and statuses ``[2, T]`` of keys and values by the kernels, in a pool with a page too many."""
    pages = -(-rows.shape[1] // codec.plan.window)
    pool = poisoned(pages + 1, codec.layout.page_bytes)
    bits = rows if rows.dtype == np.float32 else rows.view(np.uint16)
    element = "bfloat16" if rows.dtype == ml_dtypes.bfloat16 else rows.dtype.name
    status = [
        # Results may not depend on the order of lanes.
        gpu.encode_groups(BUILDS, codec.plan, kind, x, pool, element=element, backwards=kind == "value", **more)
        for kind, x in zip(KINDS, bits)
    ]
    assert (pool[-1] == 0x5A).all()
    return pool[:-1], np.array(status)


def poisoned(pages: int, size: int) -> NDArray[np.uint8]:
    memory = np.full(pages * (size + 64) + 64, 0x5A, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: pages * (size + 64)].reshape(pages, size + 64)[:, :size]


def hard_tokens(x: NDArray[Any]) -> NDArray[Any]:
    """Tokens among which are all-equal, extreme, tiny, sparse, alternating ones, and ones far beyond the sample."""
    for i, rows in enumerate(x):
        for token, content in enumerate((0.0, 1.0, -65504.0, 6e-8, -0.0, 1e-6)):
            if token + 3 * i < len(rows):
                rows[token + 3 * i] = content
        if len(rows) > 20:
            rows[10] = 0
            rows[10, 0, 0] = 1
            rows[11, :, ::2] = -3
            rows[12, -1] *= 100
            rows[13:18] *= np.array([1e-2, 1e-3, 1e-4, 30, 200])[:, None, None]
            rows[18] = np.abs(rows[18])
    return x


def bytes_of(codec: Codec, kind: str) -> NDArray[np.bool_]:
    """Which bytes of a page the kernels of one kind write."""
    layout, stream = codec.layout, getattr(codec.plan, kind)
    at = getattr(layout, kind)
    mine = np.zeros(layout.page_bytes, np.bool_)
    exponent = 2 * KINDS.index(kind)
    mine[exponent : exponent + 2] = True
    if stream.mean:
        mine[at.scale_at : at.mean_at + codec.plan.values] = True
    if kind == "key":
        mine[layout.used_head_bytes : layout.head_bytes] = True
    for tile in range(layout.tiles):
        first = layout.head_bytes + tile * layout.tile_bytes
        mine[first + at.words_at : first + at.end] = True
    return mine


#: Profile, heads, head size, sub-streams, kinds: with more and fewer groups of a sub-stream than lanes, groups of fewer
#: than eight letters, letters of one to four fields, streams that a warp holds and that it does not, heads of a size
#: that is no multiple of eight, trellises.
CASES = [
    ("2.26", 8, 128, 1, "key"), ("3.0", 3, 80, 2, "value"), ("2.26", 1, 96, 2, "key"),
    ("1.96", 6, 192, 2, "value"), ("2.26", 5, 33, 1, "key"), ("2.26-t", 2, 64, 2, "key"), ("1.96-t", 4, 64, 4, "value"),
    ("2.26-8", 3, 80, 1, "key"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "heads", "head_dim", "substreams", "kind"), CASES)
def test_encode_gives_the_bytes_of_the_cpu(name: str, heads: int, head_dim: int, substreams: int, kind: str) -> None:
    codec = fitted(name, heads, head_dim, substreams)
    assert codec.plan.key.substreams == (substreams if heads % substreams == 0 else 1)
    tokens = 71 if heads * head_dim < 500 else 37
    rows = hard_tokens(channel_tokens(tokens, heads, head_dim, 1).astype(np.float16))
    want = codec.encode(*rows).data
    pool = poisoned(len(want) + 1, codec.layout.page_bytes)
    bits = rows[KINDS.index(kind)].view(np.uint16)
    assert not gpu.encode_groups(BUILDS, codec.plan, kind, bits, pool, backwards=heads % 2 == 0).any()
    mine = bytes_of(codec, kind)
    np.testing.assert_array_equal(pool[:-1, mine], want[:, mine])
    assert (pool[:, ~mine] == 0x5A).all() and (pool[-1] == 0x5A).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30])
def test_every_magnitude(dtype: Any, scale: float) -> None:
    codec = fitted("2.26", 2, 64)
    x = (channel_tokens(40, 2, 64, 4).astype(np.float64) * scale).astype(np.float32)
    x[:, 3] *= np.float32(1e-5)
    rows = x.astype(dtype)
    np.testing.assert_array_equal(encoded(codec, rows)[0], codec.encode(*rows).data)


@pytest.mark.parametrize("tokens", [1, 31, 33, 64])
def test_every_number_of_tokens(tokens: int) -> None:
    codec = fitted("2.26", 2, 64)
    rows = channel_tokens(tokens, 2, 64, tokens).astype(np.float16)
    np.testing.assert_array_equal(encoded(codec, rows)[0], codec.encode(*rows).data)


@pytest.mark.parametrize("name", ["2.26", "2.26-t"])
def test_rungs_outside_the_window_and_streams_without_shared_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = fitted(name, 2, 64)
    rows = hard_tokens(channel_tokens(30, 2, 64, 6).astype(np.float16))
    want = codec.encode(*rows).data
    # Shared memory that holds no block's tables.
    np.testing.assert_array_equal(encoded(codec, rows, shared=4 << 10)[0], want)
    monkeypatch.setattr(launches, "WINDOW_RUNGS", 3)
    np.testing.assert_array_equal(encoded(codec, rows)[0], want)


def test_rows_of_any_strides_and_pages_by_number() -> None:
    codec = fitted("1.96", 2, 64)
    x = channel_tokens(100, 2, 64, 7).astype(np.float16)
    # Heads before tokens, and rows that do not begin at multiples of 16 bytes.
    wide = np.zeros((2, 2, 100, 73), np.float16)
    wide[..., 3:67] = x.transpose(0, 2, 1, 3)
    rows = wide.transpose(0, 2, 1, 3)[..., 3:67]
    pool = poisoned(5, codec.layout.page_bytes)
    numbers = np.array([3, 1], np.int32)
    for kind, r in zip(KINDS, rows):
        gpu.encode_groups(BUILDS, codec.plan, kind, r.view(np.uint16), pool, numbers)
    np.testing.assert_array_equal(pool[numbers], codec.encode(*x).data)
    assert (pool[[0, 2, 4]] == 0x5A).all()


def test_numbers_that_are_not_finite_are_zero_and_flagged() -> None:
    codec = fitted("2.26", 2, 64)
    rows = channel_tokens(40, 2, 64, 8).astype(np.float16)
    bad = rows.copy()
    bad[:, 7, 1, 5], bad[:, 39, 0, 0] = np.nan, -np.inf
    rows[:, 7, 1, 5] = rows[:, 39, 0, 0] = 0
    pages, status = encoded(codec, bad)
    assert np.flatnonzero(status[0]).tolist() == np.flatnonzero(status[1]).tolist() == [7, 39]
    assert set(status.reshape(-1).tolist()) == {0, 6}
    np.testing.assert_array_equal(pages, codec.encode(*rows).data)


def test_tails_are_encoded_when_they_are_due() -> None:
    codec = fitted("2.26", 2, 64, window=32)
    tails = channel_tokens(3 * 32, 2, 64, 9).astype(np.float16)
    pool = poisoned(4, codec.layout.page_bytes)
    numbers, ready = np.array([[0, 1], [3, 2], [1, 0]], np.int32), np.array([-1, 1, -1], np.int32)
    for kind, x in zip(KINDS, tails):
        gpu.encode_groups(BUILDS, codec.plan, kind, x.view(np.uint16), pool, numbers, ready)
    np.testing.assert_array_equal(pool[2], codec.encode(*tails[:, 32:64]).data[0])
    assert (pool[[0, 1, 3]] == 0x5A).all()


def test_words_of_the_ladder_are_its_levels() -> None:
    stream = fitted("2.26", 8, 128, 1).plan.key
    assert stream.grouping is not None
    ladder, arrays = group_ladder(stream), group_tables.group_encode_arrays(stream)
    first = 0
    rng = np.random.default_rng(0)
    for kind, levels in enumerate(stream.grouping.classes):
        reach = group_tables.class_steps(levels)
        u = rng.integers(-reach * ONE, reach * ONE, 500)
        limits = ladder.thresholds[:, ladder.first[kind] :][:, : ladder.most[kind]].astype(np.int64)
        # Positions on both sides of every threshold, on both sides of zero.
        near = limits[limits < reach * ONE - 1]
        u = np.concatenate([u, *(sign * (near + step) for sign in (-1, 1) for step in (0, 1)), [-reach * ONE]])
        at = first + reach + (u >> 16)
        got = (arrays.ladder[:, at].astype(np.int64) + (u & 0xFFFF)).astype(np.uint32).view(np.int32) >> 16
        for rung, limit in enumerate(limits):
            want = np.sign(u) * np.searchsorted(limit, np.abs(u), side="left")
            np.testing.assert_array_equal(got[rung], want)
        first += 2 * reach
