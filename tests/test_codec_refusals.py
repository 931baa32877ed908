"""What the codec refuses: inputs that cannot be coded, and pages that are broken."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from codec_support import codec_of, coded, tensors
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec.codec import Codec, Pages
from dquantcodec.errors import CapacityError, ChecksumError, FormatError, InputError, LimitError
from dquantcodec.profile import PROFILES, Profile, StreamProfile

# --- Inputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_refused_with_their_place(bad: float, kind: str, threads: int, dtype: Any) -> None:
    keys, values = (x.astype(dtype) for x in tensors(300))
    for token, head, channel in ((270, 0, 0), (260, 2, 63), (131, 1, 7)):
        (keys if kind == "key" else values)[token, head, channel] = bad
    with pytest.raises(InputError) as caught:
        codec_of("2.26", threads=threads).encode(keys, values)
    assert caught.value.code == "input-nonfinite"
    assert caught.value.where == {"kind": kind, "token": 131, "head": 1, "channel": 7}
    for part in (kind, "131", "head 1", "channel 7"):
        assert part in str(caught.value)


def test_numbers_beyond_float32_are_refused_as_infinite_without_a_warning() -> None:
    keys = np.zeros((2, 3, 64))
    keys[1, 2, 3] = 1e300
    with pytest.raises(InputError) as caught:
        codec_of("2.26").encode(keys, np.zeros((2, 3, 64)))
    assert caught.value.where == {"kind": "key", "token": 1, "head": 2, "channel": 3}


@pytest.mark.parametrize("shape", [(5, 64), (5, 64, 3), (5, 2, 64), (1, 5, 3, 64), (), (192,)])
@pytest.mark.parametrize("kind", ["key", "value"])
def test_wrong_shapes_are_refused_with_the_shape_expected(shape: tuple[int, ...], kind: str) -> None:
    arrays = {"key": np.zeros((5, 3, 64), np.float32), "value": np.zeros((5, 3, 64), np.float32)}
    arrays[kind] = np.zeros(shape, np.float32)
    with pytest.raises(InputError, match="3, 64") as caught:
        codec_of("2.26").encode(arrays["key"], arrays["value"])
    assert caught.value.code == "input-shape"
    assert caught.value.where["kind"] == kind


def test_keys_and_values_of_different_length_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        codec_of("2.26").encode(np.zeros((5, 3, 64), np.float32), np.zeros((6, 3, 64), np.float32))
    assert caught.value.code == "input-shape"


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.complex64, np.bool_, ml_dtypes.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    good = np.zeros((2, 3, 64), np.float32)
    with pytest.raises(InputError) as caught:
        codec_of("2.26").encode(good, good.astype(dtype))
    assert caught.value.code == "input-dtype"
    assert caught.value.where["kind"] == "value"


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_decoding_to_other_dtypes_is_refused(dtype: Any) -> None:
    codec, pages, _ = coded("2.26", 290)
    with pytest.raises(InputError) as caught:
        codec.decode(pages, dtype=dtype)
    assert caught.value.code == "input-dtype"


def test_codecs_that_cannot_be_are_refused() -> None:
    for arguments, code in (
        (("2.26", None, None), "input-geometry"),
        (("2.26", 8, None), "input-geometry"),
        (("no such", 8, 128), "profile-unknown"),
    ):
        with pytest.raises(InputError) as caught:
            Codec(*arguments)
        assert caught.value.code == code
    with pytest.raises(InputError) as caught:
        Codec("2.26", 8, 128, threads=0)
    assert caught.value.code == "input-threads"
    for heads, dim in ((0, 64), (3, 0), (1025, 1), (1, 1025), (1024, 1024), (-1, 64)):
        with pytest.raises(LimitError) as limit:
            Codec("2.26", heads, dim)
        assert limit.value.code == "limit-geometry"
    with pytest.raises(CapacityError):
        Codec(Profile(StreamProfile(64, 300), StreamProfile(8, 330)), 8, 128)


def test_pages_of_another_shape_or_kind_are_refused() -> None:
    codec, pages, _ = coded("2.26", 290)
    for data, tokens in (
        (pages.data[:, 1:], 290),
        (pages.data[:2], 290),
        (pages.data, 100),
        (pages.data.view(np.int8), 290),
        (pages.data, -1),
    ):
        with pytest.raises(InputError) as caught:
            codec.decode(Pages(data, tokens))
        assert caught.value.code == "input-pages"
    with pytest.raises(InputError, match="keys"):
        codec.decode_kind(pages, "keys")


# --- Broken pages ---------------------------------------------------------------------------------------------------


def word_at(codec: Codec, kind: str, token: int, substream: int, word: int) -> int:
    """Byte offset in a page of a word of a container."""
    stream, layout = getattr(codec.plan, kind), codec.layout
    at = layout.head_bytes + token // 32 * layout.tile_bytes + getattr(layout, kind).words_at
    return int(at + ((substream * stream.words + word) * 32 + token % 32) * stream.word_bytes)


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("token", [0, 40, 127, 128 + 33])
def test_a_broken_rans_container_is_refused_and_found_where_it_is(kind: str, token: int) -> None:
    codec = codec_of("paper-2.26")
    pages = codec.encode(*tensors(200))
    before = codec.decode(pages)
    for word in range(4):
        at = word_at(codec, kind, token % 128, 0, word)
        pages.data[token // 128, at : at + 2] ^= 0x5A
    (finding,) = codec.check(pages)
    assert finding[:3] == (kind, token, 0)
    assert finding[3] in ("container-state", "container-overrun")
    for attempt in (codec.decode, lambda p: codec.decode_kind(p, kind), lambda p: codec.symbols(p, kind)):
        with pytest.raises(ChecksumError, match=f"{kind} container of token {token}") as caught:
            attempt(pages)
        assert caught.value.code == finding[3]
        assert caught.value.where == {"kind": kind, "token": token, "substream": 0}
    with pytest.raises(ChecksumError):
        codec.attend(np.ones((3, 64), np.float32), pages)
    # The other tokens, and the other kind, are as good as before.
    for start, stop in ((0, token), (token + 1, 200)):
        for got, all_ in zip(codec.decode(pages, start, stop), before):
            assert got.tobytes() == all_[start:stop].tobytes()
    other = "value" if kind == "key" else "key"
    assert (codec.decode_kind(pages, other) == before[("key", "value").index(other)]).all()


@pytest.mark.parametrize("substream", [0, 1])
def test_a_prefix_container_that_runs_over_is_refused_and_found_where_it_is(substream: int) -> None:
    codec = codec_of("2.26", 2, 64)
    pages = codec.encode(*tensors(50, 2, 64))
    stream = codec.plan.value
    assert stream.substreams == 2
    # All words ones is the longest code again and again.
    for word in range(stream.words):
        at = word_at(codec, "value", 37, substream, word)
        pages.data[0, at : at + 4] = 0xFE if word == 0 else 0xFF
    assert codec.check(pages) == [("value", 37, substream, "container-overrun")]
    with pytest.raises(ChecksumError) as caught:
        codec.decode(pages)
    assert caught.value.code == "container-overrun"
    assert caught.value.where == {"kind": "value", "token": 37, "substream": substream}


@pytest.mark.parametrize("profile", PROFILES)
def test_used_padding_is_found_by_the_strict_check_alone(profile: str) -> None:
    codec = codec_of(profile)
    # Constant values take the cheapest letters, which leave room.
    x = np.zeros((40, 3, 64), np.float32)
    pages = codec.encode(x, x)
    before = codec.decode(pages)
    stream = codec.plan.key
    at = word_at(codec, "key", 33, 0, stream.words - 1)
    assert not pages.data[0, at : at + stream.word_bytes].any()
    pages.data[0, at + stream.word_bytes - 1] = 0x80
    assert codec.check(pages) == [("key", 33, 0, "container-padding")]
    for got, put in zip(codec.decode(pages), before):
        assert got.tobytes() == put.tobytes()


@given(st.sampled_from([*PROFILES]), st.integers(0, 2**32), st.booleans())
def test_any_bytes_decode_or_are_refused_and_the_check_tells_which(profile: str, seed: int, head_too: bool) -> None:
    codec = codec_of(profile)
    rng = np.random.default_rng(seed)
    pages = codec.encode(*tensors(33))
    first = 0 if head_too else codec.layout.head_bytes
    # Nothing, a few bytes, or everything is replaced.
    hit = np.flatnonzero(rng.random(pages.data.shape[1] - first) < rng.choice([0, 1e-4, 1e-3, 1])) + first
    pages.data[0, hit] = rng.integers(0, 256, len(hit))
    findings = codec.check(pages)
    harmless = {"container-padding", "page-unused"}
    assert {code for *_, code in findings} <= harmless | {*FATAL}
    for kind in ("key", "value"):
        fatal = {code for found, _, _, code in findings if found == kind} - harmless
        try:
            decoded = codec.decode_kind(pages, kind)
        except (ChecksumError, FormatError) as error:
            assert error.code in fatal
        else:
            assert not fatal
            assert decoded.shape == (33, 3, 64)
            assert np.isfinite(decoded).all()


FATAL = ("container-state", "container-overrun", "page-exponent", "page-affine")


@pytest.mark.parametrize("exponent", [-32768, -2000, -158, 120, 300, 1024, 32767])
@pytest.mark.parametrize(("kind", "at"), [("key", 0), ("value", 2)])
def test_exponents_that_no_encoder_writes_are_refused(exponent: int, kind: str, at: int) -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(33))
    pages.data[0, at : at + 2].view("<i2")[:] = exponent
    with pytest.raises(FormatError, match=f"{kind} container of token 0") as caught:
        codec.decode(pages)
    assert caught.value.code == "page-exponent"
    assert caught.value.where == {"kind": kind, "token": 0}
    with pytest.raises(FormatError):
        codec.attend(np.ones((3, 64), np.float32), pages)
    assert (kind, 0, 0, "page-exponent") in codec.check(pages)


@pytest.mark.parametrize("exponent", [-157, -149, 1, 119])
def test_exponents_at_the_ends_of_the_range_are_read(exponent: int) -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(33))
    pages.data[0, :4].view("<i2")[:] = exponent
    assert codec.check(pages) == []
    for got in codec.decode(pages):
        assert np.isfinite(got).all()


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("part", [0, 1])
def test_offsets_and_scales_that_are_not_finite_are_refused(bits: int, kind: str, part: int) -> None:
    codec = codec_of("paper-2.26")
    pages = codec.encode(*tensors(50))
    layout = codec.layout
    at = layout.head_bytes + layout.tile_bytes + getattr(layout, kind).affine_at + 4 * 5 + 2 * part
    pages.data[0, at : at + 2].view("<u2")[:] = bits
    with pytest.raises(FormatError, match=f"{kind} container of token 37") as caught:
        codec.decode(pages)
    assert caught.value.code == "page-affine"
    assert caught.value.where == {"kind": kind, "token": 37}
    assert codec.check(pages) == [(kind, 37, 0, "page-affine")]


@pytest.mark.parametrize("kind", ["key", "value"])
def test_scales_of_mid_tread_grids_that_are_not_finite_are_refused(kind: str) -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(50))
    layout = codec.layout
    at = layout.head_bytes + layout.tile_bytes + getattr(layout, kind).affine_at + 2 * 5
    pages.data[0, at : at + 2].view("<u2")[:] = 0x7C00
    with pytest.raises(FormatError, match=f"{kind} container of token 37"):
        codec.decode(pages)
    assert codec.check(pages) == [(kind, 37, 0, "page-affine")]


def test_scales_of_means_that_are_not_finite_are_refused() -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(33))
    pages.data[0, codec.layout.key.scale_at :][:2].view("<u2")[:] = 0x7C00
    with pytest.raises(FormatError) as caught:
        codec.decode_kind(pages, "key")
    assert caught.value.code == "page-affine"
    assert "page-affine" in {code for *_, code in codec.check(pages)}
    codec.decode_kind(pages, "value")


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("field", ["words_at", "affine_at"])
def test_bytes_of_absent_tokens_in_a_used_tile_are_found(kind: str, field: str) -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(40))
    layout = codec.layout
    size = getattr(codec.plan, kind).word_bytes if field == "words_at" else 4
    at = layout.head_bytes + layout.tile_bytes + getattr(getattr(layout, kind), field) + 8 * size
    pages.data[0, at] = 1
    assert codec.check(pages) == [(kind, 39, 0, "page-unused")]
    codec.decode(pages)


def test_bytes_of_tiles_behind_the_last_token_are_found() -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(40))
    pages.data[0, codec.layout.bytes_for(40) + 7] = 1
    assert "page-unused" in {code for *_, code in codec.check(pages)}


def test_padding_of_a_page_head_is_checked() -> None:
    codec = codec_of("2.26")
    pages = codec.encode(*tensors(40))
    assert codec.layout.used_head_bytes < codec.layout.head_bytes
    pages.data[0, codec.layout.head_bytes - 1] = 1
    assert "page-unused" in {code for *_, code in codec.check(pages)}
