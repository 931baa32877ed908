"""The codec on mid-tread grids: normal data, hostile input, and files that keep the grid and the sinks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
from file_support import expected, same
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

import dquantcodec
from dquantcodec.codec import Codec, Pages
from dquantcodec.compare import error_sums
from dquantcodec.file import Layer, create
from dquantcodec.profile import PROFILES, Profile

# --- Normal data ----------------------------------------------------------------------------------------------------

LEAST_SQUARES = replace(PROFILES["2.26"], value=replace(PROFILES["2.26"].value, gain="least-squares"), name="ls")


@lru_cache(maxsize=1)
def normal() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    keys, values = np.random.default_rng(226).standard_normal((2, 512, 8, 128)).astype(np.float32)
    return keys, values


@lru_cache(maxsize=4)
def decoded(profile: str | Profile) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    codec = Codec(profile, 8, 128)
    keys, values = codec.decode(codec.encode(*normal()))
    return keys, values


def test_keys_of_normal_data_lose_a_quarter_less_than_on_the_papers_grid() -> None:
    # 328 bytes against the paper's 332.
    new = error_sums(normal()[0], decoded("2.26")[0]).nmse
    paper = error_sums(normal()[0], decoded("paper-2.26")[0]).nmse
    assert new < 0.046
    assert new < 0.75 * paper


def test_values_of_normal_data_in_232_bytes() -> None:
    assert PROFILES["2.26"].value.container == 232
    assert error_sums(normal()[1], decoded(LEAST_SQUARES)[1]).nmse < 0.127


def test_unbiased_values_keep_the_signal_as_far_as_the_rule_says() -> None:
    exact = normal()[1].astype(np.float64)
    kept = 1 - error_sums(normal()[1], decoded(LEAST_SQUARES)[1]).nmse

    def slope(profile: str | Profile) -> float:
        return float((exact * decoded(profile)[1]).sum() / (exact**2).sum())

    # Least squares shrinks by what it loses; the rule's minimum keeps k / (k + (1 - k) / 8).
    assert slope(LEAST_SQUARES) == pytest.approx(kept, rel=0.001)
    assert slope("2.26") == pytest.approx(kept / (kept + (1 - kept) / 8), rel=0.002)


def test_the_gain_alone_tells_unbiased_from_least_squares() -> None:
    codecs = [Codec(profile, 8, 128) for profile in ("2.26", LEAST_SQUARES)]
    pages = [codec.encode(*(x[:64] for x in normal())) for codec in codecs]
    symbols = [codec.symbols(p, "value") for codec, p in zip(codecs, pages)]
    assert (symbols[0] == symbols[1]).all()
    assert not (pages[0].data == pages[1].data).all()


def test_a_decoded_token_takes_only_levels_symmetric_about_zero() -> None:
    codec = Codec("2.26", 8, 128)
    y = oracles.rotate(decoded("2.26")[1][:3], codec.plan.signs).reshape(3, -1)
    symbols = codec.symbols(codec.encode(*(x[:3] for x in normal())), "value")
    for t in range(3):
        scale = np.abs(y[t][symbols[t] != 3]).min()
        assert y[t] == pytest.approx(scale * (symbols[t] - 3.0), abs=1e-5)


# --- Hostile input --------------------------------------------------------------------------------------------------


def coded(codec: Codec, x: NDArray[np.float32]) -> tuple[Pages, NDArray[np.float32], NDArray[np.float32]]:
    """Pages and decoded keys and values of ``x`` as both; every container holds its stream."""
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    keys, values = codec.decode(pages)
    assert np.isfinite(keys).all()
    assert np.isfinite(values).all()
    return pages, keys, values


heads_and_dim = pytest.mark.parametrize(("heads", "dim"), [(8, 64), (5, 80), (8, 128), (1, 128), (32, 64)])


@heads_and_dim
@pytest.mark.parametrize("huge", [1.0, -6e4, 3.4e38, 1e-45])
def test_a_single_value_among_zeros(heads: int, dim: int, huge: float) -> None:
    codec = Codec("2.26", heads, dim)
    x = np.zeros((40, heads, dim), np.float32)
    x[7, heads // 2, 3] = huge
    _, keys, values = coded(codec, x)
    others = np.arange(40) != 7
    assert not values[others].any(), "tokens of zeros have scale zero"
    if heads > 1:
        # An impulse is flat in its own head after rotation and stands out from the heads of zeros.
        assert values[7, heads // 2, 3] == pytest.approx(x[7, heads // 2, 3], rel=0.6, abs=1e-45)
    assert keys.shape == x.shape


@pytest.mark.parametrize("profile", ["2.26", "1.96"])
def test_values_that_rotation_makes_flat_are_not_lost(profile: str) -> None:
    # One channel carries each head: after rotation all magnitudes are equal, and drift moves all or none of them.
    x = np.zeros((32, 8, 128), np.float32)
    x[:, np.arange(8), np.arange(8) * 7] = 100
    codec = Codec(profile, 8, 128)
    keys, values = codec.decode(codec.encode(x, x))
    assert error_sums(x, keys).nmse < 0.75
    # The nearly unbiased gain of values makes up for what was dropped, so their direction is what counts.
    assert np.corrcoef(x.reshape(-1), values.reshape(-1))[0, 1] > 0.5


@heads_and_dim
def test_zeros_decode_to_zeros(heads: int, dim: int) -> None:
    _, keys, values = coded(Codec("2.26", heads, dim), np.zeros((130, heads, dim), np.float32))
    assert not keys.any()
    assert not values.any()


@heads_and_dim
@pytest.mark.parametrize("value", [1.0, -0.37, 65504.0, 3.4028234e38, 1e-30, 1e-45])
def test_all_values_equal(heads: int, dim: int, value: float) -> None:
    x = np.full((130, heads, dim), value, np.float32)
    _, keys, values = coded(Codec("2.26", heads, dim), x)
    wide = x.astype(np.float64)
    # Keys are their mean, an INT8 step at most half off; values are a constant pattern after rotation.
    assert np.abs(keys - wide).max() <= np.abs(wide).max() * 0.1 + 1e-45
    assert ((values - wide) ** 2).sum() <= 0.5 * (wide**2).sum() + 1e-80


@heads_and_dim
def test_denormal_values(heads: int, dim: int) -> None:
    x = (np.random.default_rng(1).standard_normal((130, heads, dim)) * 1e-42).astype(np.float32)
    _, keys, values = coded(Codec("2.26", heads, dim), x)
    # Denormals this small keep about ten bits; the codec itself loses what it loses of any normal data.
    assert error_sums(x, keys).nmse < 0.06
    assert error_sums(x, values).nmse < 0.16


@heads_and_dim
def test_a_token_beyond_all_others_harms_no_other_page(heads: int, dim: int) -> None:
    codec = Codec("2.26", heads, dim)
    x = np.random.default_rng(2).standard_normal((256, heads, dim)).astype(np.float32)
    before, _, _ = coded(codec, x)
    x[200] *= np.float32(1e30)
    after, _, values = coded(codec, x)
    assert (before.data[0] == after.data[0]).all()
    assert error_sums(x[:128], values[:128]).nmse < 0.16
    assert error_sums(x[200:201], values[200:201]).nmse < 0.18


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("kind", oracles.HOSTILE)
@pytest.mark.parametrize("profile", [name for name in PROFILES if not name.startswith("paper-")])
def test_every_hostile_stream_fits(profile: str, kind: str, dim: int) -> None:
    codec = Codec(profile, 2, dim)
    coded(codec, oracles.hostile(kind, 130, 2, dim, 3, codec.plan.signs))


@given(
    hnp.arrays(np.float32, (33, 2, 64), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)),
    st.sampled_from(["2.26", "1.96", "3.0"]),
)
def test_any_finite_values_fit(x: NDArray[np.float32], profile: str) -> None:
    coded(Codec(profile, 2, 64), x)


# --- Files ----------------------------------------------------------------------------------------------------------


def rotated(name: str) -> Profile:
    """A named profile without the classes that a file would be fitted with."""
    profile = PROFILES[name]
    return replace(profile, key=replace(profile.key, classes=None), value=replace(profile.value, classes=None))


def write(path: Path, layers: list[Layer], **options: Any) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    rng = np.random.default_rng(8)
    pairs = []
    for layer in layers:
        keys, values = rng.standard_normal((2, 300, layer.kv_heads, layer.head_dim)).astype(layer.array_dtype)
        keys[0] *= 9  # a first token unlike all others, as models make it
        pairs.append((keys, values))
    with dquantcodec.create(path, layers, **options) as writer:
        writer.append([keys for keys, _ in pairs], [values for _, values in pairs])
    return pairs


@pytest.mark.parametrize(("options", "sinks"), [({}, 1), ({"sinks": 0}, 0), ({"sinks": 5}, 5)], ids=str)
def test_a_file_keeps_the_sinks_its_profile_asks_for(tmp_path: Path, options: dict[str, int], sinks: int) -> None:
    layer = Layer(8, 128, "float32", rotated("2.26"))
    (pair,) = write(tmp_path / "x.dqkv", [layer], **options)
    with dquantcodec.open(tmp_path / "x.dqkv") as reader:
        read = reader.layers[0]
        for tensor, exact, wanted in zip((read.key, read.value), pair, expected(layer, pair, sinks, 128)):
            assert same(tensor[:], wanted)
            assert same(tensor[:sinks], exact[:sinks])
            assert not (tensor[sinks] == exact[sinks]).all(), "the first token after the sinks is coded"
            assert same(tensor[-128:], exact[-128:])


def test_layers_of_several_profiles_keep_the_most_sinks_any_of_them_asks_for(tmp_path: Path) -> None:
    three = replace(PROFILES["2.26"], sinks=3, name="three")
    layers = [Layer(2, 64, "float16", "paper-2.26"), Layer(2, 64, "float16", three), Layer(2, 64, "float16", "3.0")]
    pairs = write(tmp_path / "x.dqkv", layers)
    with dquantcodec.open(tmp_path / "x.dqkv") as reader:
        for read, (keys, _) in zip(reader.layers, pairs, strict=True):
            assert same(read.key[:3], keys[:3])
            assert not (read.key[3] == keys[3]).all()


def test_paper_profiles_keep_no_sinks(tmp_path: Path) -> None:
    ((keys, _),) = write(tmp_path / "x.dqkv", [Layer(2, 64, "float32", "paper-2.26")])
    with dquantcodec.open(tmp_path / "x.dqkv") as reader:
        assert not (reader.layers[0].key[0] == keys[0]).all()


@pytest.mark.parametrize("name", ["2.26", "1.96", "3.0", "paper-2.26"])
def test_a_header_keeps_grid_step_and_gain(tmp_path: Path, name: str) -> None:
    profile = rotated(name)
    write(tmp_path / "x.dqkv", [Layer(8, 128, "float32", profile)])
    with dquantcodec.open(tmp_path / "x.dqkv") as reader:
        plan = reader.layers[0].plan
    assert plan is not None
    for found, asked in ((plan.key, profile.key), (plan.value, profile.value)):
        assert (found.grid, found.step, found.gain) == (asked.grid, asked.step, asked.gain)
        assert found.affine == (2 if asked.grid == "min-max" else 1)
    some = [x[:140] for x in normal()]
    assert (Codec(plan).encode(*some).data == Codec(profile, 8, 128).encode(*some).data).all()


def test_a_file_continues_with_the_plan_it_was_read_with(tmp_path: Path) -> None:
    write(tmp_path / "x.dqkv", [Layer(2, 64, "float32", "2.26")])
    with dquantcodec.open(tmp_path / "x.dqkv") as reader:
        plan = reader.layers[0].plan
    keys, values = (x[:200, :2, :64] for x in normal())
    layer = Layer(2, 64, "float32", plan)
    # A plan says how to code, not what to leave out: without a profile there are no sinks.
    with create(tmp_path / "y.dqkv", [layer], recent=0) as writer:
        writer.append([keys], [values])
    with dquantcodec.open(tmp_path / "y.dqkv") as reader:
        wanted = expected(layer, (keys, values), 0, 0)
        assert same(reader.layers[0].key[:], wanted[0])
        assert same(reader.layers[0].value[:], wanted[1])
