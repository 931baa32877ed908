"""Page layout and bytes, against a decoder that knows nothing but the byte table of the format."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec.codec import Codec, Pages
from dquantcodec.page import KindFields, page_exponents, read_kind, write_page
from dquantcodec.page_layout import ALIGNMENT, PageLayout
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import PROFILES, Profile, StreamProfile

GEOMETRIES = [(8, 128), (3, 64), (1, 128), (2, 96), (5, 80), (2, 65), (7, 40)]

CUSTOM = {
    "value-means": Profile(StreamProfile(8, 340, mean=True), StreamProfile(8, 340, "rans", mean=True)),
    "no-means": Profile(StreamProfile(5, 300, "rans", letter=2), StreamProfile(17, 460, letter=1), window=64),
    "four-parts": Profile(
        StreamProfile(3, 260, letter=4, mean=True), StreamProfile(64, 800, "rans", 15), window=32, substreams=4
    ),
}


@lru_cache(maxsize=64)
def codec_of(profile: str, heads: int, dim: int) -> Codec:
    return Codec(PROFILES[profile] if profile in PROFILES else CUSTOM[profile], heads, dim)


def tensor(tokens: int, heads: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Normal values with channel means and per-token scales, as keys have them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, heads, dim)) * rng.uniform(0.5, 2, (tokens, 1, 1)) + 3 * rng.standard_normal(dim)
    return x.astype(np.float32)


# --- Layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [*PROFILES, *CUSTOM])
@pytest.mark.parametrize(("heads", "dim"), [*GEOMETRIES, (4, 32)])
def test_sizes_follow_the_byte_table(profile: str, heads: int, dim: int) -> None:
    codec = codec_of(profile, heads, dim)
    plan, layout = codec.plan, codec.layout
    head = 4 + sum(2 * heads + heads * dim for stream in (plan.key, plan.value) if stream.mean)
    tile = sum(
        32 * stream.container + 32 * (2 if stream.grid == "mid-tread" else 4) for stream in (plan.key, plan.value)
    )
    assert layout.head_bytes == -(-head // 64) * 64
    assert layout.tile_bytes == tile
    assert layout.tiles * 32 == plan.window
    assert layout.page_bytes == layout.head_bytes + layout.tiles * tile
    assert layout.bytes_for(plan.window) == layout.page_bytes
    for tokens in (1, 31, 32):
        assert layout.bytes_for(tokens) == layout.head_bytes + tile
    for size in (layout.head_bytes, layout.tile_bytes, layout.page_bytes, layout.key.words_at, layout.value.words_at):
        assert size % ALIGNMENT == 0
    for at in (layout.key.affine_at, layout.value.affine_at):
        assert at % ALIGNMENT == 0
    assert all(type(v) is int for v in (layout.head_bytes, layout.tile_bytes, layout.page_bytes, layout.bytes_for(5)))


def test_the_layout_of_the_paper_counts_258_hundredths_of_a_byte_per_four_values() -> None:
    layout = PageLayout.of(make_plan(PROFILES["paper-2.26"], 8, 128))
    # 332 + 230 bytes of containers, two affine pairs of 4; 1024 means, 8 FP16 scales and two exponents a page.
    assert layout.page_bytes == 128 * (332 + 230 + 8) + 1088
    assert layout.page_bytes * 8 / (128 * 2048) < 2.265


@given(st.data())
def test_fields_come_back_from_a_page_as_they_went_in(data: st.DataObject) -> None:
    profile = data.draw(st.sampled_from([*PROFILES, *CUSTOM]))
    heads, dim = data.draw(st.sampled_from([(3, 64), (4, 32), (1, 128)]))
    plan = codec_of(profile, heads, dim).plan
    layout = PageLayout.of(plan)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tiles = data.draw(st.integers(1, layout.tiles))

    def fields(stream: Any) -> KindFields:
        dtype = np.uint16 if stream.coder == "rans" else np.uint32
        return KindFields(
            exponent=int(rng.integers(-200, 128)),
            scale=rng.standard_normal((1, heads)).astype(np.float16) if stream.mean else None,
            mean=rng.integers(-127, 128, (1, heads, dim)).astype(np.int8) if stream.mean else None,
            words=rng.integers(0, np.iinfo(dtype).max, (tiles, stream.substreams, stream.words, 32), dtype=dtype),
            affine=rng.standard_normal((tiles * 32, stream.affine)).astype(np.float16),
        )

    written = {"key": fields(plan.key), "value": fields(plan.value)}
    page = np.full(layout.page_bytes, 0xAA, np.uint8)
    write_page(page, plan, **written)
    for kind, put in written.items():
        got = read_kind(page[None], plan, kind, slice(0, tiles))
        assert got.exponent == put.exponent
        for name in ("scale", "mean", "words", "affine"):
            a, b = getattr(got, name), getattr(put, name)
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and a.tobytes() == b.tobytes() and a.flags.c_contiguous)
        middle = slice(tiles // 2, tiles)
        assert (read_kind(page[None], plan, kind, middle).words == put.words[middle]).all()
    head = 4 + sum(2 * heads + heads * dim for stream in (plan.key, plan.value) if stream.mean)
    assert not page[head : layout.head_bytes].any(), "padding of the head is zero"
    assert not page[layout.head_bytes + tiles * layout.tile_bytes :].any(), "tiles without tokens are zero"


# --- Bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [*PROFILES, *CUSTOM])
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (1, 128), (2, 65), (4, 96)])
def test_the_byte_table_alone_decodes_to_the_same_bits(profile: str, heads: int, dim: int) -> None:
    codec = codec_of(profile, heads, dim)
    tokens = min(codec.plan.window, 45)
    keys, values = tensor(tokens, heads, dim), tensor(tokens, heads, dim, 1)
    pages = codec.encode(keys, values)
    decoded = oracles.decode_page(pages.data[0].tobytes(), codec.plan, tokens)
    for kind, got in zip(("key", "value"), codec.decode(pages)):
        assert got.dtype == np.float32
        assert got.tobytes() == decoded[kind].tobytes()


@pytest.mark.parametrize("profile", PROFILES)
def test_the_byte_table_alone_decodes_a_full_page_of_a_common_model_to_the_same_bits(profile: str) -> None:
    codec = codec_of(profile, 8, 128)
    pages = codec.encode(tensor(128, 8, 128), tensor(128, 8, 128, 1))
    decoded = oracles.decode_page(pages.data[0].tobytes(), codec.plan, 128)
    for kind, got in zip(("key", "value"), codec.decode(pages)):
        assert got.tobytes() == decoded[kind].tobytes()


@given(
    st.sampled_from([*PROFILES, *CUSTOM]), st.sampled_from(oracles.HOSTILE), st.integers(1, 4), st.integers(0, 2**32)
)
def test_the_byte_table_alone_decodes_hostile_tokens_to_the_same_bits(
    profile: str, kind: str, tokens: int, seed: int
) -> None:
    codec = codec_of(profile, 4, 32)
    x = oracles.hostile(kind, tokens, 4, 32, seed, codec.plan.signs)
    pages = codec.encode(x, x[::-1])
    decoded = oracles.decode_page(pages.data[0].tobytes(), codec.plan, tokens)
    for which, got in zip(("key", "value"), codec.decode(pages)):
        assert got.tobytes() == decoded[which].tobytes()


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 96, 127])
def test_a_page_of_fewer_tokens_is_a_prefix_and_the_rest_is_zero(tokens: int) -> None:
    codec = codec_of("2.26", 3, 64)
    keys, values = tensor(128, 3, 64), tensor(128, 3, 64, 1)
    page = codec.encode(keys[:tokens], values[:tokens]).data[0]
    used = codec.layout.bytes_for(tokens)
    assert used % ALIGNMENT == 0
    assert not page[used:].any()
    decoded = oracles.decode_page(page[:used].tobytes(), codec.plan, tokens)
    padded = np.zeros((1, codec.layout.page_bytes), np.uint8)
    padded[0, :used] = page[:used]
    for kind, got in zip(("key", "value"), codec.decode(Pages(padded, tokens))):
        assert got.tobytes() == decoded[kind].tobytes()


@pytest.mark.parametrize("profile", PROFILES)
def test_unused_lanes_of_a_used_tile_are_zero(profile: str) -> None:
    codec = codec_of(profile, 3, 64)
    pages = codec.encode(tensor(37, 3, 64), tensor(37, 3, 64, 1))
    for kind in ("key", "value"):
        fields = read_kind(pages.data[:1], codec.plan, kind, slice(0, 2))
        assert fields.words[1, :, :, :5].any()
        assert not fields.words[1, :, :, 5:].any()
        assert not fields.affine[37:].astype(np.float32).any()


def test_pages_do_not_know_of_each_other() -> None:
    codec = codec_of("2.26", 3, 64)
    keys, values = tensor(300, 3, 64), tensor(300, 3, 64, 1)
    whole = codec.encode(keys, values)
    for page in range(3):
        part = slice(128 * page, 128 * (page + 1))
        assert (codec.encode(keys[part], values[part]).data[0] == whole.data[page]).all()


def test_tokens_keep_their_symbols_where_means_are_not_taken() -> None:
    # Without means a token's stream depends on nothing but the token (the page's exponent aside).
    codec = codec_of("no-means", 4, 32)
    x = tensor(64, 4, 32)
    whole = codec.symbols(codec.encode(x, x), "value")
    for t in (0, 33, 63):
        assert (codec.symbols(codec.encode(x[t : t + 1], x[t : t + 1]), "value")[0] == whole[t]).all()


def test_plan_and_layout_are_python_integers() -> None:
    plan: Plan = make_plan(PROFILES["2.26"], 8, 128)
    for stream in (plan.key, plan.value):
        assert type(stream.words) is int
        assert type(stream.container) is int


def test_pages_decoded_together_are_the_pages_decoded_alone() -> None:
    # Narrow streams: several whole pages go through the stages at once, as long as their exponents agree.
    codec = codec_of("2.26", 3, 64)
    keys, values = tensor(1200, 3, 64), tensor(1200, 3, 64, 1)
    keys[256:384] *= np.float32(2.0**90)
    values[640:768] *= np.float32(2.0**-90)
    pages = codec.encode(keys, values)
    exponents = page_exponents(pages.data)
    assert exponents[2, 0] > 0 > exponents[5, 1]
    assert not np.delete(exponents[:, 0], 2).any() and not np.delete(exponents[:, 1], 5).any()
    together = codec.decode(pages, 70, 1190)
    for page in range(len(pages.data)):
        part = slice(128 * page, min(1200, 128 * (page + 1)))
        alone = codec.decode(Pages(pages.data[page : page + 1], part.stop - part.start))
        low, high = max(part.start, 70), min(part.stop, 1190)
        for whole, piece in zip(together, alone):
            expected = piece[low - part.start : high - part.start]
            assert whole[low - 70 : high - 70].tobytes() == expected.tobytes()


def test_a_range_looks_at_no_page_outside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Pages may be a memory map of a large file, where one byte of each would read it all.
    codec = codec_of("2.26", 3, 64)
    pages = codec.encode(tensor(1200, 3, 64), tensor(1200, 3, 64, 1))
    seen: list[int] = []

    def recorded(data: NDArray[np.uint8]) -> NDArray[np.int16]:
        seen.append(len(data))
        return page_exponents(data)

    monkeypatch.setattr("dquantcodec.codec.page_exponents", recorded)
    codec.decode(pages, 600, 700)
    assert seen == [2], "pages 4 and 5"
