"""The device kernels, compiled for the host and run as they are, against the CPU codec: the same bits."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import gpu_support as gpu
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import Codec, drift, encode, rans
from dquantcodec.codec import Pages
from dquantcodec.cuda import launches, params, tables
from dquantcodec.letters import pack
from dquantcodec.mid_tread import mid_tread
from dquantcodec.page_layout import KINDS
from dquantcodec.plan import budget
from dquantcodec.profile import PROFILES, Profile, StreamProfile

BUILDS = str(Path(__file__).parent.parent / ".pytest_cache" / "device-kernels")
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

# Profiles with parts that no named one has: other letters, means of values, wide tables, many levels.
UNUSUAL = {
    "single": Profile(StreamProfile(16, 520, letter=1, mean=True), mid_tread(33, 520, letter=1, gain="unbiased")),
    "quads": Profile(StreamProfile(4, 300, "rans", letter=4), StreamProfile(5, 330, letter=4, mean=True), substreams=4),
    "wide": Profile(
        StreamProfile(8, 340, "rans", precision=15, letter=3, mean=True),
        StreamProfile(15, 440, precision=15, letter=2),
        window=64,
    ),
    "fine": Profile(StreamProfile(64, 900, "rans", precision=13, letter=2, mean=True), mid_tread(63, 640, letter=2)),
}
# Geometries: heads and head size.  Every rotation: powers of two, Paley factors of both kinds, several blocks.
CASES = [
    ("2.26", 8, 128), ("2.26", 2, 64), ("2.26", 3, 80), ("2.26", 1, 96), ("2.26", 2, 112), ("2.26", 2, 192),
    ("2.26", 2, 256), ("3.0", 4, 128), ("paper-2.26", 8, 128),
    ("paper-2.26", 2, 80), ("paper-1.96", 2, 112), ("paper-1.96", 1, 256),
    ("single", 4, 64), ("quads", 4, 64), ("wide", 2, 128), ("fine", 2, 128), ("2.26", 2, 100), ("paper-2.26", 5, 33),
    ("1.96", 3, 44), ("2.26", 2, 576), ("2.26", 2, 512),
]  # fmt: skip


def profile_named(name: str) -> Profile:
    return UNUSUAL[name] if name in UNUSUAL else PROFILES[name]


def hard_tokens(codec: Codec, tokens: int, seed: int = 0) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Random tokens among which are all-equal, extreme, tiny, sparse and alternating ones."""
    keys, values = gpu.random_tokens(codec, tokens, seed)
    keys[:, :, 3 % keys.shape[2]] += 3
    for i, x in enumerate((keys, values)):
        for token, content in enumerate((0.0, 1.0, -65504.0, 6e-8, -0.0)):
            if token + 3 * i < tokens:
                x[token + 3 * i] = content
        if tokens > 12:
            x[9] = 0
            x[9, 0, 0] = 1
            x[10, :, ::2] = -3
            x[11, -1] *= 100
    return keys, values


@pytest.fixture(params=[False, True], ids=["forwards", "backwards"])
def backwards(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_encode_gives_the_bytes_of_the_cpu(name: str, heads: int, head_dim: int) -> None:
    codec = Codec(profile_named(name), heads, head_dim)
    tokens = codec.plan.window + 37
    rows = hard_tokens(codec, tokens)
    want = codec.encode(*rows)
    pool = poisoned(len(want.data) + 1, codec.layout.page_bytes)
    for kind, x in zip(KINDS, rows):
        launch = launches.encode_launches(codec.plan, kind, "float16")
        library = gpu.build(launch.tiles.options, BUILDS)
        assert library.encode_bytes(launch.tiles.warps) == launches.encode_bytes(codec.plan, kind, launch.tiles.warps)
        assert library.means_shared_bytes(launches.HEAD_WARPS) == launches.means_bytes(codec.plan)
        library.set_backwards(kind == "value")  # results may not depend on the order of lanes
        status = gpu.encode(library, launch, codec.plan, kind, x.view(np.uint16), pool)
        library.set_backwards(False)
        assert not status.any()
    np.testing.assert_array_equal(pool[:-1], want.data)
    assert (pool[-1] == 0x5A).all()


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_decode_gives_the_bits_of_the_cpu(name: str, heads: int, head_dim: int) -> None:
    codec = Codec(profile_named(name), heads, head_dim)
    tokens = codec.plan.window + 37
    pages = codec.encode(*hard_tokens(codec, tokens))
    pool = gpu.aligned_pages(pages)
    # FP16 shares its library with encoding; another type is built for every third case.
    kinds = [("key", "float16"), ("value", "float16")]
    if CASES.index((name, heads, head_dim)) % 3 == 0:
        kinds.append(("value", "bfloat16" if heads % 4 else "float32"))
    for kind, dtype in kinds:
        launch = launches.decode_launch(codec.plan, kind, dtype)
        library = gpu.build(launch.options, BUILDS)
        assert library.decode_shared_bytes(launch.warps) == launch.shared_bytes
        for start, stop in ((0, tokens), (33, codec.plan.window + 3), (tokens - 1, tokens)):
            want = codec.decode_kind(pages, kind, start, stop, dtype=DTYPES[dtype])
            out = np.full(want.shape, 0x7E7E, np.uint16 if dtype != "float32" else np.float32)
            status = np.full((stop - start, getattr(codec.plan, kind).substreams), 99, np.uint8)
            gpu.decode(library, launch, codec.plan, kind, pool, None, start, stop, out, status)
            assert not status.any()
            assert out.tobytes() == want.tobytes(), (kind, dtype, start, stop)


def poisoned(pages: int, size: int) -> NDArray[np.uint8]:
    memory = np.full(pages * (size + 64) + 64, 0x5A, np.uint8)
    return memory[-memory.ctypes.data % 64 :][: pages * (size + 64)].reshape(pages, size + 64)[:, :size]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1.0, 1e30])
def test_every_magnitude_of_float32(dtype: str, scale: float) -> None:
    codec = Codec("2.26", 2, 64)
    x = np.random.default_rng(4).standard_normal((2, 40, 2, 64)).astype(np.float32) * np.float32(scale)
    x[:, 3] *= np.float32(1e-5)
    rows = x.astype(DTYPES[dtype])
    want = codec.encode(*rows)
    pool = poisoned(1, codec.layout.page_bytes)
    for kind, r in zip(KINDS, rows):
        launch = launches.encode_launches(codec.plan, kind, dtype)
        library = gpu.build(launch.tiles.options, BUILDS)
        bits = r if dtype == "float32" else r.view(np.uint16)
        gpu.encode(library, launch, codec.plan, kind, bits, pool)
    np.testing.assert_array_equal(pool, want.data)
    for kind in KINDS:
        launch2 = launches.decode_launch(codec.plan, kind, "float32")
        library = gpu.build(launch2.options, BUILDS)
        out = np.full((40, 2, 64), np.nan, np.float32)
        status = np.full((40, 2), 99, np.uint8)
        gpu.decode(library, launch2, codec.plan, kind, gpu.aligned_pages(want), None, 0, 40, out, status)
        assert out.tobytes() == codec.decode_kind(want, kind).tobytes()


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 127])
def test_every_number_of_tokens(tokens: int) -> None:
    for name in ("2.26", "paper-1.96"):
        codec = Codec(name, 2, 64)
        rows = gpu.random_tokens(codec, tokens, tokens)
        want = codec.encode(*rows)
        pool = poisoned(1, codec.layout.page_bytes)
        for kind, x in zip(KINDS, rows):
            launch = launches.encode_launches(codec.plan, kind, "float16")
            gpu.encode(gpu.build(launch.tiles.options, BUILDS), launch, codec.plan, kind, x.view(np.uint16), pool)
        np.testing.assert_array_equal(pool, want.data)


def test_streams_too_long_for_shared_memory_take_scratch() -> None:
    codec = Codec("paper-2.26", 64, 128)
    rows = gpu.random_tokens(codec, 3, 1)
    want = codec.encode(*rows)
    pool = poisoned(1, codec.layout.page_bytes)
    for kind, x in zip(KINDS, rows):
        launch = launches.encode_launches(codec.plan, kind, "float16", launches.SHARED_BYTES["sm_89"])
        assert launch.scratch_bytes and not launch.tiles.shared_bytes
        gpu.encode(gpu.build(launch.tiles.options, BUILDS), launch, codec.plan, kind, x.view(np.uint16), pool)
    np.testing.assert_array_equal(pool, want.data)


def test_a_rans_stream_that_does_not_fit_is_tightened_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The estimate is never that wrong; a budget of 20 bits too much makes both devices find out by coding.
    codec = Codec("paper-2.26", 2, 64)
    for module in (drift, encode, tables):
        monkeypatch.setattr(module, "budget", lambda stream: budget(stream) + 20 * 1024)
    rows = gpu.random_tokens(codec, 150, 5)
    position = encode.prepare(rows[0].astype(np.float32), codec.plan, codec.plan.key).position
    letters = pack(drift.drift(position, codec.plan.key, 64)[0], codec.plan.key, 64).reshape(150, 1, -1)
    assert (rans.encode(letters, codec.plan.key)[1] > codec.plan.key.words).any()
    want = codec.encode(*rows)
    pool = poisoned(2, codec.layout.page_bytes)
    for kind, x in zip(KINDS, rows):
        launch = launches.encode_launches(codec.plan, kind, "float16")
        gpu.encode(gpu.build(launch.tiles.options, BUILDS), launch, codec.plan, kind, x.view(np.uint16), pool)
    np.testing.assert_array_equal(pool, want.data)


@pytest.mark.parametrize("name", ["2.26", "paper-2.26", "quads"])
def test_any_bytes_decode_to_the_statuses_of_the_cpu(name: str) -> None:
    from dquantcodec.codec import decode_levels, read_kind

    codec = Codec(profile_named(name), 4, 64)
    rng = np.random.default_rng(6)
    pages = codec.encode(*gpu.random_tokens(codec, 128, 2))
    damaged = Pages(pages.data.copy(), 128)
    damaged.data[0, codec.layout.head_bytes :] ^= rng.integers(0, 256, codec.layout.page_bytes, np.uint8)[
        codec.layout.head_bytes :
    ] * (rng.random(codec.layout.page_bytes - codec.layout.head_bytes) < 0.02)
    seen = set()
    for kind in KINDS:
        stream = getattr(codec.plan, kind)
        launch = launches.decode_launch(codec.plan, kind, "float32")
        out = np.empty((128, 4, 64), np.float32)
        status = np.full((128, stream.substreams), 99, np.uint8)
        library = gpu.build(launch.options, BUILDS)
        gpu.decode(library, launch, codec.plan, kind, gpu.aligned_pages(damaged), None, 0, 128, out, status)
        fields = read_kind(damaged.data, codec.plan, kind, slice(0, 4))
        _, want = decode_levels(fields, codec.plan, stream)
        unfit = ~np.isfinite(fields.affine).all(axis=1)
        np.testing.assert_array_equal(status[unfit], 5)
        np.testing.assert_array_equal(status[~unfit], want[~unfit])
        seen |= set(status.reshape(-1).tolist())
    assert 0 in seen and seen & {1, 2}


def test_page_fields_no_encoder_writes_have_statuses_of_their_own() -> None:
    codec = Codec("2.26", 2, 64)
    pages = codec.encode(*gpu.random_tokens(codec, 32, 2))
    launch = launches.decode_launch(codec.plan, "key", "float32")
    library = gpu.build(launch.options, BUILDS)
    for at, value, code in ((0, 500, 4), (codec.layout.key.scale_at, 0x7C00, 5)):
        damaged = Pages(pages.data.copy(), 32)
        damaged.data[0, at : at + 2].view(np.int16)[:] = value
        out, status = np.empty((32, 2, 64), np.float32), np.full((32, 2), 99, np.uint8)
        gpu.decode(library, launch, codec.plan, "key", gpu.aligned_pages(damaged), None, 0, 32, out, status)
        # A mean scale belongs to a head, and a sub-stream to some heads.
        assert status[:, 0].tolist() == [code] * 32


def test_numbers_that_are_not_finite_are_zero_and_flagged() -> None:
    codec = Codec("2.26", 2, 64)
    keys, _ = gpu.random_tokens(codec, 40, 3)
    bad = keys.copy()
    bad[7, 1, 5], bad[39, 0, 0] = np.nan, -np.inf
    keys[7, 1, 5] = keys[39, 0, 0] = 0
    launch = launches.encode_launches(codec.plan, "key", "float16")
    library = gpu.build(launch.tiles.options, BUILDS)
    pools = [poisoned(1, codec.layout.page_bytes) for _ in range(2)]
    statuses = [
        gpu.encode(library, launch, codec.plan, "key", x.view(np.uint16), pool) for x, pool in zip((bad, keys), pools)
    ]
    assert np.flatnonzero(statuses[0]).tolist() == [7, 39] and set(statuses[0].tolist()) == {0, 6}
    assert not statuses[1].any()
    np.testing.assert_array_equal(*pools)


def test_pages_of_a_pool_by_number() -> None:
    codec = Codec("1.96", 2, 64)
    rows = gpu.random_tokens(codec, 300, 3)
    want = codec.encode(*rows)
    pool = poisoned(7, codec.layout.page_bytes)
    numbers = np.array([5, 0, 3], np.int32)
    for kind, x in zip(KINDS, rows):
        launch = launches.encode_launches(codec.plan, kind, "float16")
        library = gpu.build(launch.tiles.options, BUILDS)
        gpu.encode(library, launch, codec.plan, kind, x.view(np.uint16), pool, numbers)
    np.testing.assert_array_equal(pool[numbers], want.data)
    assert (pool[[1, 2, 4, 6]] == 0x5A).all()
    launch2 = launches.decode_launch(codec.plan, "value", "float32")
    # Rows of a transposed array, and a page table.
    out = np.full((2, 300, 72), np.nan, np.float32).transpose(1, 0, 2)[:, :, :64]
    status = np.full((300, 2), 99, np.uint8)
    library = gpu.build(launch2.options, BUILDS)
    gpu.decode(library, launch2, codec.plan, "value", pool, numbers, 0, 300, out, status)
    np.testing.assert_array_equal(out, codec.decode_kind(want, "value"))


def test_append_fills_tails_and_pages() -> None:
    codec = Codec("2.26", 2, 64)
    window, sequences, most = codec.plan.window, 3, 1
    lengths = np.array([0, window - 2, 2 * window - 2], np.int32)
    ready = np.full(3, 9, np.int32)
    full = np.zeros(3, np.uint8)
    tails = [np.zeros((sequences, window, 2, 64), np.uint16) for _ in KINDS]
    rng = np.random.default_rng(8)
    launch = launches.encode_launches(codec.plan, "key", "float16")
    library = gpu.build(launch.tiles.options, BUILDS)
    given = []
    for step in range(3):
        rows = rng.standard_normal((2, sequences, 2, 64)).astype(np.float16)
        given.append(rows)
        record = np.zeros(1, params.APPEND)
        for kind, x, tail in zip(("keys", "values"), rows, tails):
            record[kind]["in"], record[kind]["sequence_stride"] = gpu.address(x), x.strides[0] // 2
            record[kind]["head_stride"], record[kind]["tails"] = x.strides[1] // 2, gpu.address(tail)
        for name, array in (("lengths", lengths), ("ready", ready), ("full", full)):
            record[name] = gpu.address(array)
        record["heads"], record["head_dim"], record["window"] = 2, 64, window
        record["pages"], record["tokens"], record["element_bytes"] = most, 1, 2
        library.run_dquant_append(ctypes.c_void_p(gpu.address(record)), sequences, 256, ctypes.c_long(0))
        if step == 1:
            # The second sequence has filled its page; the third has no page left for another.
            assert lengths.tolist() == [2, window, 2 * window - 1] and ready.tolist() == [-1, 0, -1]
            assert full.tolist() == [0, 0, 1]
            pool = poisoned(2, codec.layout.page_bytes)
            numbers = np.array([[0], [1], [0]], np.int32)
            rows_of_tails = tails[0].reshape(-1, 2, 64)
            gpu.encode(library, launch, codec.plan, "key", rows_of_tails, pool, numbers, ready)
            want = codec.encode(tails[0][1].view(np.float16), tails[1][1].view(np.float16))
            at = codec.layout.key
            body, tile = codec.layout.head_bytes, codec.layout.tile_bytes
            assert (pool[0] == 0x5A).all()
            np.testing.assert_array_equal(pool[1, at.scale_at : body], want.data[0, at.scale_at : body])
            for i in range(codec.layout.tiles):
                part = slice(body + i * tile + at.words_at, body + i * tile + at.end)
                np.testing.assert_array_equal(pool[1, part], want.data[0, part])
    assert lengths.tolist() == [3, window + 1, 2 * window - 1]
    for i, tail in enumerate(tails):
        np.testing.assert_array_equal(tail[0, :3].view(np.float16), [rows[i][0] for rows in given])
        np.testing.assert_array_equal(tail[1, 0].view(np.float16), given[2][i][1])
        np.testing.assert_array_equal(tail[2, window - 2].view(np.float16), given[0][i][2])


def test_numbers_round_as_numpy_rounds_them() -> None:
    launch = launches.decode_launch(Codec("2.26", 2, 64).plan, "key", "float32")
    library = gpu.build(launch.options, BUILDS)
    to_half, up, down = library.double_to_half, library.round_up_half, library.round_down_half
    to_half.argtypes, up.argtypes, down.argtypes = [ctypes.c_double], [ctypes.c_float], [ctypes.c_float]
    to_half.restype = up.restype = down.restype = ctypes.c_uint16
    rng = np.random.default_rng(9)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = (halves[1:] + halves[:-1]) / 2
    doubles = np.concatenate([
        rng.standard_normal(2000) * 10.0 ** rng.integers(-12, 8, 2000), middles[::7], np.nextafter(middles[::7], 9e9),
        [0.0, -0.0, 65519.999, 65520.0, -65520.0, 1e300, np.inf, -np.inf, 2.0**-25, 2.0**-25 * 1.0001, 5e-324],
    ])  # fmt: skip
    with np.errstate(over="ignore"):
        want = doubles.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal([to_half(x) for x in doubles], want)

    from dquantcodec.means import round_down_half, round_up_half

    floats = np.concatenate([doubles[np.abs(doubles) < 6e4], [1e-40, -1e-40]]).astype(np.float32)
    np.testing.assert_array_equal([up(x) for x in floats], round_up_half(floats).view(np.uint16))
    np.testing.assert_array_equal([down(x) for x in floats], round_down_half(floats).view(np.uint16))
