"""Attention straight from pages against attention in FP64 over the decoded tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import InputError
from dquantcodec.profile import PROFILES, Profile, StreamProfile

VALUE_MEANS = Profile(StreamProfile(8, 340, mean=True), StreamProfile(8, 340, mean=True), name="value-means")
NO_MEANS = Profile(StreamProfile(8, 340, "rans"), StreamProfile(6, 300), window=32, name="no-means")


@lru_cache(maxsize=32)
def codec_of(profile: str | Profile, heads: int, dim: int, threads: int = 1) -> Codec:
    return Codec(profile, heads, dim, threads=threads)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tensors(tokens: int, heads: int, dim: int, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys with channel means, as they are after RoPE, and values."""
    return normal(seed, tokens, heads, dim) + 2 * normal(seed + 1, heads, dim), normal(seed + 2, tokens, heads, dim)


def check(
    codec: Codec,
    query: NDArray[Any],
    pages: Pages,
    exact: tuple[NDArray[Any], NDArray[Any]] | None = None,
    scale: float | None = None,
    tolerance: float = 1e-5,
) -> None:
    out, lse = codec.attend(query, pages, exact=exact, scale=scale)
    keys, values = codec.decode(pages)
    if exact is not None:
        keys = np.concatenate([keys, exact[0].astype(np.float32)])
        values = np.concatenate([values, exact[1].astype(np.float32)])
    grouped = query.astype(np.float32).reshape(-1, query.shape[-2], query.shape[-1])
    expected_out, expected_lse = oracles.attention(grouped, keys, values, scale)
    assert out.dtype == lse.dtype == np.float32
    assert out.shape == query.shape
    assert lse.shape == query.shape[:-1]
    error = float(np.abs(out.reshape(expected_out.shape) - expected_out).max() / np.abs(expected_out).max())
    assert error <= tolerance, "relative to the largest output"
    np.testing.assert_allclose(lse.reshape(expected_lse.shape), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("profile", [*PROFILES, VALUE_MEANS, NO_MEANS])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (8, 128), (2, 65), (1, 96)])
def test_attention_over_pages_equals_attention_over_decoded_tensors(
    profile: str | Profile, heads: int, dim: int
) -> None:
    codec = codec_of(profile, heads, dim)
    pages = codec.encode(*tensors(300, heads, dim))
    check(codec, normal(9, 2 * heads, dim), pages)


@pytest.mark.parametrize("group", range(1, 9))
def test_query_heads_read_the_kv_head_of_their_group(group: int) -> None:
    codec = codec_of("2.26", 3, 64)
    pages = codec.encode(*tensors(140, 3, 64))
    check(codec, normal(group, 3 * group, 64), pages)


@pytest.mark.parametrize("positions", [1, 2, 3, 4])
def test_several_positions_at_once_equal_each_alone(positions: int) -> None:
    codec = codec_of("paper-2.26", 3, 64)
    pages = codec.encode(*tensors(140, 3, 64))
    query = normal(positions, positions, 6, 64)
    check(codec, query, pages)
    out, lse = codec.attend(query, pages)
    for i in range(positions):
        alone = codec.attend(query[i], pages)
        np.testing.assert_allclose(out[i], alone[0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(lse[i], alone[1], rtol=1e-6)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 127, 128, 129, 300])
def test_any_number_of_tokens(tokens: int) -> None:
    codec = codec_of("2.26", 2, 64)
    check(codec, normal(1, 4, 64), codec.encode(*tensors(tokens, 2, 64)))


@pytest.mark.parametrize(("tokens", "rows"), [(0, 1), (0, 70), (1, 0), (1, 1), (1, 70), (130, 0), (130, 1), (130, 70)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_exact_rows_share_one_softmax_with_the_pages(tokens: int, rows: int, dtype: Any) -> None:
    codec = codec_of("2.26", 2, 64)
    pages = codec.encode(*tensors(tokens, 2, 64))
    exact = tuple(x.astype(dtype) for x in tensors(rows, 2, 64, 50))
    check(codec, normal(1, 3, 4, 64), pages, (exact[0], exact[1]))


def test_no_token_at_all_gives_zero_and_minus_infinity() -> None:
    codec = codec_of("2.26", 2, 64)
    pages = codec.encode(*tensors(0, 2, 64))
    for exact in (None, tensors(0, 2, 64)):
        for query in (normal(1, 4, 64), normal(1, 2, 4, 64)):
            out, lse = codec.attend(query, pages, exact=exact)
            assert out.shape == query.shape
            assert not out.any()
            assert (lse == -np.inf).all()


@given(
    st.sampled_from(["2.26", "paper-1.96", VALUE_MEANS, NO_MEANS]),
    st.integers(1, 3),
    st.sampled_from([64, 65, 96]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0, 1, 20, 33, 129, 140]),
    st.integers(0, 5),
    st.sampled_from([None, 0.01, 0.125, 0.5]),
    st.integers(0, 2**31),
)
def test_attention_of_any_shape_equals_the_oracle(
    profile: str | Profile,
    heads: int,
    dim: int,
    group: int,
    positions: int,
    tokens: int,
    rows: int,
    scale: float | None,
    seed: int,
) -> None:
    codec = codec_of(profile, heads, dim)
    pages = codec.encode(*tensors(tokens, heads, dim, seed))
    if tokens + rows:
        check(codec, normal(seed + 5, positions, heads * group, dim), pages, tensors(rows, heads, dim, seed + 9), scale)


def test_a_peaked_softmax_finds_its_token() -> None:
    codec = codec_of("2.26", 2, 64)
    keys, values = tensors(300, 2, 64)
    pages = codec.encode(keys, values)
    decoded_keys, decoded_values = codec.decode(pages)
    for token in (0, 127, 128, 299):
        query = np.ascontiguousarray(normal(3, 2, 64) * 0 + (keys - keys.mean(axis=0))[token] * 10)
        check(codec, query, pages, scale=1.0, tolerance=1e-4)
        out, _ = codec.attend(query, pages, scale=1.0)
        assert (np.einsum("hd,thd->th", query, decoded_keys).argmax(axis=0) == token).all()
        np.testing.assert_allclose(out, decoded_values[token], atol=1e-3)


@pytest.mark.parametrize("key_factor", [1e-30, 1e-6, 1e4, 1e30])
@pytest.mark.parametrize("value_factor", [1e-30, 1e5, 1e30])
@pytest.mark.parametrize("profile", ["2.26", "paper-2.26", VALUE_MEANS])
def test_pages_with_exponents(profile: str | Profile, key_factor: float, value_factor: float) -> None:
    codec = codec_of(profile, 2, 64)
    keys, values = tensors(150, 2, 64)
    keys, values = keys * np.float32(key_factor), values * np.float32(value_factor)
    pages = codec.encode(keys, values)
    assert (pages.data[:, :4].view("<i2") != 0).all()
    # Queries that bring the logits back to the usual size.
    query = normal(4, 4, 64) / np.float32(key_factor)
    check(codec, query, pages)
    exact = tuple(x * np.float32(f) for x, f in zip(tensors(3, 2, 64, 77), (key_factor, value_factor)))
    check(codec, query, pages, (exact[0], exact[1]))


def test_pages_of_different_exponents_share_one_softmax() -> None:
    codec = codec_of("2.26", 2, 64)
    keys, values = tensors(384, 2, 64)
    keys[128:256] *= 2.0**-20
    values[256:] *= 2.0**12
    check(codec, normal(4, 4, 64), codec.encode(keys, values))


def test_keys_of_zero_give_the_mean_of_the_values() -> None:
    codec = codec_of("2.26", 2, 64)
    _, values = tensors(200, 2, 64)
    pages = codec.encode(np.zeros_like(values), values)
    out, lse = codec.attend(normal(1, 2, 64), pages)
    np.testing.assert_allclose(out, codec.decode_kind(pages, "value").mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(lse, np.log(200), rtol=1e-6)


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_does_not_change_the_result(threads: int) -> None:
    one, many = codec_of("2.26", 2, 64), codec_of("2.26", 2, 64, threads)
    pages = one.encode(*tensors(900, 2, 64))
    query = normal(1, 3, 4, 64)
    for a, b in zip(one.attend(query, pages), many.attend(query, pages)):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_queries_of_any_dtype_and_memory_order(dtype: Any) -> None:
    codec = codec_of("2.26", 2, 64)
    pages = codec.encode(*tensors(40, 2, 64))
    query = normal(1, 3, 4, 64).astype(dtype)
    expected = codec.attend(query.astype(np.float32), pages)
    for same in (query, np.asfortranarray(query), np.ascontiguousarray(query[:, ::-1])[:, ::-1]):
        for a, b in zip(codec.attend(same, pages), expected):
            assert a.tobytes() == b.tobytes()
    before = query.copy()
    codec.attend(query, pages)
    assert (query == before).all()


@pytest.mark.parametrize("shape", [(3, 64), (4, 63), (64,), (1, 1, 4, 64), (2, 5, 64)])
def test_queries_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    codec = codec_of("2.26", 2, 64)
    with pytest.raises(InputError) as caught:
        codec.attend(np.zeros(shape, np.float32), codec.encode(*tensors(4, 2, 64)))
    assert caught.value.code == "input-shape"
    assert caught.value.where["kind"] == "query"


def test_exact_rows_of_a_wrong_shape_are_refused() -> None:
    codec = codec_of("2.26", 2, 64)
    pages = codec.encode(*tensors(4, 2, 64))
    good, bad = np.zeros((3, 2, 64), np.float32), np.zeros((3, 2, 32), np.float32)
    for exact, kind in (((bad, good), "key"), ((good, bad), "value")):
        with pytest.raises(InputError) as caught:
            codec.attend(np.zeros((2, 64), np.float32), pages, exact=exact)
        assert caught.value.code == "input-shape"
        assert caught.value.where["kind"] == kind
    with pytest.raises(InputError):
        codec.attend(np.zeros((2, 64), np.float32), pages, exact=(good, good[:2]))


def test_attention_over_real_keys_and_values(real_layers: list[tuple[NDArray[Any], NDArray[Any]]]) -> None:
    for keys, values in real_layers[:3]:
        codec = codec_of("2.26", keys.shape[1], keys.shape[2])
        pages = codec.encode(keys, values)
        # Real keys have channels in the hundreds, so logits need scaling down to stay comparable in FP32.
        check(codec, normal(2, 3 * keys.shape[1], keys.shape[2]), pages)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_query_with_nan_or_infinity_is_refused(bad: float) -> None:
    codec = Codec("2.26", 2, 64)
    x = np.ones((40, 2, 64), np.float32)
    query = np.ones((4, 64), np.float32)
    query[3, 5] = bad
    with pytest.raises(InputError) as caught:
        codec.attend(query, codec.encode(x, x))
    assert caught.value.code == "input-nonfinite"
