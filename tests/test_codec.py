"""The codec end to end: what goes in and what comes out."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from codec_support import codec_of, coded, tensors
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from dquantcodec import arrays, drift, letters, means, prefix, rans, rotate
from dquantcodec.codec import Codec, Pages
from dquantcodec.encode import lay_grid, page_exponent
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import StreamPlan, budget, make_plan
from dquantcodec.profile import PROFILES, Profile, StreamProfile

#: Any finite float32, with most in the range of FP16.
FINITE = st.floats(-(2.0**17), 2.0**17, width=32) | st.floats(allow_nan=False, allow_infinity=False, width=32)

COUNTS = (0, 1, 31, 32, 33, 127, 128, 129, 300)


def by_stages(codec: Codec, x: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Symbols of a page, one stage after the other."""
    plan = codec.plan
    stream = getattr(plan, kind)
    rotated = rotate.rotate(x, plan.signs)
    if stream.mean:
        rotated = rotated - means.mean_values(*means.window_means(rotated))
    flat = rotated.reshape(len(x), -1)
    _, _, position = lay_grid(flat, stream)
    budgets = np.full((len(x), stream.substreams), budget(stream), np.int64)
    while True:
        symbols, _ = drift.drift(position, stream, plan.head_dim, budgets)
        over = words_used(symbols, stream, plan.head_dim) > stream.words
        if not over.any():
            return symbols
        assert stream.coder == "rans", "costs of prefix codes are exact"
        budgets[over] -= 1024


def words_used(symbols: NDArray[np.uint8], stream: StreamPlan, dim: int) -> NDArray[np.int32]:
    packed = letters.pack(symbols, stream, dim).reshape(len(symbols), stream.substreams, -1)
    return (rans if stream.coder == "rans" else prefix).encode(packed, stream)[1]


# --- Round trip -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("tokens", COUNTS)
def test_any_number_of_tokens_goes_in_and_comes_out(profile: str, tokens: int) -> None:
    codec = codec_of(profile)
    keys, values = tensors(tokens)
    pages = codec.encode(keys, values)
    assert pages.tokens == tokens
    assert pages.data.dtype == np.uint8
    assert pages.data.flags.c_contiguous
    assert pages.data.shape == (-(-tokens // 128), codec.layout.page_bytes)
    assert pages.nbytes == pages.data.nbytes
    decoded = codec.decode(pages)
    for got, put in zip(decoded, (keys, values)):
        assert got.shape == put.shape
        assert got.dtype == np.float32
        if tokens:
            assert ((got - put) ** 2).sum() < 0.25 * (put**2).sum()
    assert codec.check(pages) == []


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 64), (2, 128), (4, 64), (5, 65), (3, 100), (1, 193), (7, 63)])
def test_small_and_odd_streams_work(profile: str, heads: int, dim: int) -> None:
    codec = codec_of(profile, heads, dim)
    keys, values = tensors(40, heads, dim)
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    for got, put, most in zip(codec.decode(pages), (keys, values), (0.2, 0.4)):
        assert ((got - put) ** 2).sum() < most * (put**2).sum()


@pytest.mark.parametrize("coder", ["rans", "prefix"])
@pytest.mark.parametrize("levels", [2, 3, 4, 5, 7, 9, 16, 17, 32, 33, 63, 64])
def test_every_number_of_levels_works(levels: int, coder: str) -> None:
    stream = StreamProfile(levels, 128 * (math.log2(levels) + 1.2), coder, precision=13, mean=True)
    codec = codec_of(Profile(stream, stream), 2, 96)
    keys, values = tensors(33, 2, 96)
    pages = codec.encode(keys, values)
    assert codec.check(pages) == []
    symbols = codec.symbols(pages, "key")
    assert symbols.max() == levels - 1
    assert symbols.min() == 0
    # There is room for all: the error is that of a uniform grid over about 5.6 standard deviations.
    error = float(((codec.decode_kind(pages, "key") - keys) ** 2).mean())
    assert error < 1.4 * (5.6 / (levels - 1)) ** 2 / 12 + 0.001


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128), (5, 65)])
def test_symbols_are_the_drifted_symbols_of_the_stages(profile: str, heads: int, dim: int) -> None:
    codec = codec_of(profile, heads, dim)
    keys, values = tensors(200, heads, dim)
    pages = codec.encode(keys, values)
    for kind, x in (("key", keys), ("value", values)):
        expected = np.concatenate([by_stages(codec, x[:128], kind), by_stages(codec, x[128:], kind)])
        assert (codec.symbols(pages, kind) == expected).all()


@given(st.sampled_from([*PROFILES]), st.sampled_from(oracles.HOSTILE), st.integers(1, 40), st.integers(0, 2**32))
def test_every_stream_of_hostile_tokens_fits_its_container(profile: str, kind: str, tokens: int, seed: int) -> None:
    codec = codec_of(profile, 2, 64)
    x = oracles.hostile(kind, tokens, 2, 64, seed, codec.plan.signs)
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    for which in ("key", "value"):
        stream = getattr(codec.plan, which)
        symbols = codec.symbols(pages, which)
        assert symbols.max() < stream.levels
        assert (words_used(symbols, stream, 64) <= stream.words).all()
    for got in codec.decode(pages):
        assert np.isfinite(got).all()
        # Refitting never hurts and the grid covers the stream, so nothing is further off than the range of its page.
        distance = np.abs(got.astype(np.float64) - x).max()
        assert distance <= 2 * np.sqrt(64) * float(np.abs(x).max())


@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 3), st.just(2), st.just(16)),
        elements=st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=True),
    ),
    st.sampled_from(["prefix", "rans"]),
)
def test_any_finite_values_fit_and_come_back_finite(x: NDArray[np.float32], coder: str) -> None:
    stream = StreamProfile(6, 360, coder, mean=True)
    codec = codec_of(Profile(stream, stream, window=32), 2, 16)
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    for got in codec.decode(pages):
        assert np.isfinite(got).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5, 1e-45, 6e-8, 511.9, 512.0, 3e38])
def test_constant_pages_come_back(value: float) -> None:
    for profile in PROFILES:
        codec = codec_of(profile)
        x = np.full((40, 3, 64), value, np.float32)
        pages = codec.encode(x, x)
        assert codec.check(pages) == []
        if value == 0:
            assert (codec.decode_kind(pages, "key") == 0).all()
        # A channel's mean is what a constant page is made of; INT8 means and FP16 scales leave half a percent.
        keys = codec.decode_kind(pages, "key").astype(np.float64)
        assert np.abs(keys - np.float32(value)).max() <= abs(value) * 0.02 + 1e-45


def test_the_largest_numbers_saturate_without_a_warning() -> None:
    codec = codec_of("2.26")
    largest = np.finfo(np.float32).max
    x = np.where(np.random.default_rng(0).random((8, 3, 64)) < 0.5, -largest, largest)
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    for got in codec.decode(pages):
        assert np.isfinite(got).all()
        assert np.abs(got).max() == largest


@pytest.mark.parametrize("exponent", [-140, -126, -60, -8, 0, 8, 60, 110])
def test_a_power_of_two_changes_nothing_but_the_exponent(exponent: int) -> None:
    codec = codec_of("2.26")
    keys, values = tensors(20)
    # Multiples of 2**-8, so that denormals hold them whole.
    keys, values = (np.rint(x * 2**4).astype(np.float32) * np.float32(2.0**4) for x in (keys, values))
    base = codec.encode(keys, values)
    for x, scaled in ((keys, np.ldexp(keys, exponent)), (values, np.ldexp(values, exponent))):
        assert (scaled.astype(np.float64) == x.astype(np.float64) * 2.0**exponent).all()
    pages = codec.encode(np.ldexp(keys, exponent), np.ldexp(values, exponent))
    taken = [np.abs(x).max() for x in (keys, values)]
    for kind, largest in zip(("key", "value"), taken):
        if page_exponent(float(largest)) + exponent == page_exponent(float(np.ldexp(largest, exponent))):
            assert (codec.symbols(pages, kind) == codec.symbols(base, kind)).all()
    for got, put in zip(codec.decode(pages), codec.decode(base)):
        np.testing.assert_allclose(
            got.astype(np.float64), put.astype(np.float64) * 2.0**exponent, rtol=0.05, atol=0.05 * 2.0**exponent * 32
        )


@given(st.floats(0, 2.0**127, width=32) | st.floats(2.0**-10, 2.0**12, width=32))
def test_page_exponents_bring_the_largest_magnitude_into_range(largest: float) -> None:
    e = page_exponent(largest)
    assert -(2**15) <= e < 2**15
    scaled = largest * 2.0**-e if e > -1000 else 0
    assert scaled < 512
    assert largest == 0 or scaled >= 2.0**-4
    if largest and not 2.0**-4 <= largest < 512:
        assert 256 <= scaled < 512


def test_the_encoder_does_not_change_its_input() -> None:
    keys, values = tensors(50)
    before = keys.copy(), values.copy()
    codec_of("2.26").encode(keys, values)
    assert (keys == before[0]).all()
    assert (values == before[1]).all()


def test_a_plan_makes_a_codec_of_its_own() -> None:
    plan = make_plan(PROFILES["2.26"], 3, 64)
    codec = Codec(plan)
    keys, values = tensors(5)
    assert codec.plan is plan
    assert codec.layout == PageLayout.of(plan)
    assert (codec.encode(keys, values).data == codec_of("2.26").encode(keys, values).data).all()


def test_drift_share_counts_symbols_that_are_not_the_nearest_level() -> None:
    codec = codec_of("paper-1.96")
    keys, values = tensors(200)
    pages = codec.encode(keys, values)
    shares = codec.drift_share(keys, values, pages)
    for kind, x, share in zip(("key", "value"), (keys, values), shares):
        moved = 0
        for first in (0, 128):
            part = x[first : first + 128]
            plan, stream = codec.plan, getattr(codec.plan, kind)
            rotated = oracles.rotate(part, plan.signs)
            if stream.mean:
                scale, steps = means.window_means(rotate.rotate(part, plan.signs))
                rotated = rotated - scale.astype(np.float64)[:, None] * steps
            flat = rotated.reshape(len(part), -1)
            symbols = codec.symbols(pages, kind)[first : first + 128]
            for row, m in zip(flat, symbols):
                offset, step = oracles.min_max_grid(row.astype(np.float32).tolist(), stream.levels)
                moved += int((np.abs(row - offset - step * m) > (0.5 + 1e-4) * step).sum())
        assert 0 < share < 0.5
        assert abs(share - moved / x.size) < 2e-3
    roomy = StreamProfile(8, 600)
    easy = codec_of(Profile(roomy, roomy))
    assert easy.drift_share(keys, values, easy.encode(keys, values)) == (0, 0)


# --- Ranges, threads, dtypes ----------------------------------------------------------------------------------------


@given(st.sampled_from([*PROFILES]), st.integers(0, 300), st.integers(0, 300))
def test_a_range_is_the_slice_of_the_whole(profile: str, start: int, stop: int) -> None:
    codec, pages, whole = coded(profile, 290)
    for kind, got, all_ in zip(("key", "value"), codec.decode(pages, start, stop), whole):
        assert got.tobytes() == all_[start:stop].tobytes()
        assert got.shape == all_[start:stop].shape
        assert codec.decode_kind(pages, kind, start, stop).tobytes() == got.tobytes()


@pytest.mark.parametrize("profile", ["2.26", "paper-2.26"])
def test_a_range_may_start_and_stop_at_any_lane_of_a_tile(profile: str) -> None:
    codec, pages, whole = coded(profile, 290)
    for edge in range(291):
        for start, stop in ((edge, edge + 3), (edge - 3, edge), (edge, 290)):
            start = max(start, 0)
            assert codec.decode_kind(pages, "value", start, stop).tobytes() == whole[1][start:stop].tobytes()


def test_ranges_count_from_the_end_as_slices_do() -> None:
    codec, pages, whole = coded("2.26", 290)
    for start, stop in ((-5, None), (0, -1), (-300, 10), (280, 1000), (0, None)):
        assert codec.decode_kind(pages, "key", start, stop).tobytes() == whole[0][start:stop].tobytes()


def test_a_range_touches_only_the_pages_and_tiles_of_its_tokens() -> None:
    codec, pages, whole = coded("2.26", 290)
    layout = codec.layout
    broken = np.full_like(pages.data, 0xFF)
    broken[1, : layout.head_bytes] = pages.data[1, : layout.head_bytes]
    tile = slice(layout.head_bytes + layout.tile_bytes, layout.head_bytes + 2 * layout.tile_bytes)
    broken[1, tile] = pages.data[1, tile]
    start, stop = 128 + 32, 128 + 64
    for got, all_ in zip(codec.decode(Pages(broken, 290), start, stop), whole):
        assert got.tobytes() == all_[start:stop].tobytes()


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_does_not_change_a_byte(profile: str, threads: int) -> None:
    keys, values = tensors(900)
    one, many = codec_of(profile), codec_of(profile, threads=threads)
    pages = one.encode(keys, values)
    for _ in range(3):
        assert (many.encode(keys, values).data == pages.data).all()
    for a, b in zip(one.decode(pages, 77, 801), many.decode(pages, 77, 801)):
        assert a.tobytes() == b.tobytes()
    pages.data[3, one.layout.head_bytes :] ^= 0x55
    assert one.check(pages) == many.check(pages) != []


def test_one_codec_serves_many_threads_of_the_caller() -> None:
    codec = codec_of("2.26")
    inputs = [tensors(150, seed=seed) for seed in range(6)]
    alone = [codec.encode(*pair) for pair in inputs]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda pair: codec.encode(*pair), inputs * 3))
        decoded = list(pool.map(codec.decode_kind, together, ["key"] * len(together)))
    for i, (pages, keys) in enumerate(zip(together, decoded)):
        assert (pages.data == alone[i % 6].data).all()
        assert (keys == codec.decode_kind(alone[i % 6], "key")).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_inputs_of_any_dtype_and_memory_order_give_the_bytes_of_the_float32_copy(dtype: Any) -> None:
    codec = codec_of("2.26")
    keys, values = (x.astype(dtype) for x in tensors(150))
    expected = codec.encode(keys.astype(np.float32), values.astype(np.float32)).data
    assert (codec.encode(keys, values).data == expected).all()

    def transposed(x: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2)

    def strided(x: NDArray[Any]) -> NDArray[Any]:
        wide = np.zeros((x.shape[0], x.shape[1], 2 * x.shape[2]), x.dtype)
        wide[..., ::2] = x
        return wide[..., ::2]

    def backwards(x: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]

    for arrange in (transposed, np.asfortranarray, strided, backwards):
        assert (codec.encode(arrange(keys), arrange(values)).data == expected).all()


def test_uint16_is_taken_as_the_bits_of_bfloat16() -> None:
    codec = codec_of("2.26")
    keys, values = (x.astype(ml_dtypes.bfloat16) for x in tensors(40))
    expected = codec.encode(keys, values).data
    assert (codec.encode(keys.view(np.uint16), values.view(np.uint16)).data == expected).all()


def test_arrays_of_other_libraries_come_in_through_dlpack() -> None:
    class Foreign:
        def __init__(self, array: NDArray[Any]) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.array.__dlpack_device__()

    codec = codec_of("2.26")
    keys, values = tensors(5)
    assert (codec.encode(Foreign(keys), Foreign(values)).data == codec.encode(keys, values).data).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_decoding_to_a_dtype_is_decoding_to_float32_and_rounding(dtype: Any) -> None:
    codec, pages, whole = coded("2.26", 290)
    for got, all_ in zip(codec.decode(pages, 100, 250, dtype=dtype), whole):
        assert got.dtype == np.dtype(dtype)
        assert got.tobytes() == all_[100:250].astype(dtype).tobytes()


def test_decoding_to_a_narrow_dtype_turns_what_is_too_large_to_infinity_without_a_warning() -> None:
    codec = codec_of("2.26")
    keys, values = (x * 1e6 for x in tensors(5))
    decoded = codec.decode_kind(codec.encode(keys, values), "key", dtype=np.float16)
    assert np.isinf(decoded).any()


# --- Conversions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_sixteen_bits_becomes_the_float32_it_is_and_comes_back(dtype: Any) -> None:
    narrow = np.arange(65536, dtype=np.uint16).view(dtype)
    wide = arrays.to_float32(narrow)
    finite = ~np.isnan(narrow.astype(np.float32))
    assert (wide[finite] == narrow[finite].astype(np.float32)).all()
    assert np.isnan(wide[~finite]).all()
    back = np.empty(65536, dtype)
    arrays.store_float32(wide, back)
    assert back[finite].tobytes() == narrow[finite].tobytes()


@given(hnp.arrays(np.float32, 64, elements=FINITE))
def test_rounding_to_sixteen_bits_is_to_nearest_and_ties_to_even(values: NDArray[np.float32]) -> None:
    # Midpoints between neighbours of the narrow type are among the values.
    bits = values.view(np.uint32)
    ties = np.concatenate([values, (bits & 0xFFFF0000 | 0x8000).view(np.float32)])
    ties = np.concatenate([ties, (bits & 0xFFFFE000 | 0x1000).view(np.float32)])
    ties = ties[np.isfinite(ties)]
    for dtype in (np.float16, ml_dtypes.bfloat16):
        out = np.empty(ties.shape, dtype)
        arrays.store_float32(ties, out)
        with np.errstate(over="ignore"):
            assert out.tobytes() == ties.astype(dtype).tobytes()
