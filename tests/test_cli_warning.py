"""``dqkv compress`` warns of layers whose estimated attention error is out of line, and of no others."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from dquantcodec.attention_estimate import (
    ABSOLUTE_LEVEL,
    MEDIAN_FACTOR,
    MOST_TILES,
    UNRELATED_LEVEL,
    estimate_attention,
    layers_out_of_line,
    sample_tiles,
)
from dquantcodec.cli.main import main
from dquantcodec.cli.out_of_line import estimate_layers
from dquantcodec.codec import Codec
from dquantcodec.tensors import open_source

Arrays = dict[str, NDArray[Any]]
SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
FIRST_POSITION = 512


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]


@pytest.fixture
def sample() -> Arrays:
    return {name: array for name, array in load_file(SAMPLE).items() if not name.endswith("query")}


def with_key_bias(keys: NDArray[np.float16], factor: float) -> NDArray[np.float16]:
    """Keys ``[1, H, T, D]`` as if the two channels that RoPE turns fastest had a large bias before RoPE.

    Turning is linear, so the turned bias is added: at position p channel c gets ``b cos(p w)``, c + D/2 ``b sin(p w)``.
    """
    biased = keys.astype(np.float64)
    half = keys.shape[3] // 2
    size = factor * float(np.sqrt(np.mean(biased**2)))
    positions = FIRST_POSITION + np.arange(keys.shape[2])
    for channel in (0, 1):
        angle = positions * 100000.0 ** (-channel / half)
        biased[..., channel] += size * np.cos(angle)
        biased[..., channel + half] += size * np.sin(angle)
    return biased.astype(np.float16)


def test_an_exact_copy_is_estimated_without_error() -> None:
    keys, values = np.random.default_rng(0).standard_normal((2, 32, 2, 64)).astype(np.float32)
    found = estimate_attention(keys, values, keys, values)
    assert (found.logit_error, found.output_error) == (0.0, 0.0)
    zero = np.zeros_like(keys)
    assert estimate_attention(zero, zero, zero, zero).output_error == 0.0


@pytest.mark.parametrize(("key_size", "key_error", "value_error"), [(1.0, 0.2, 0.3), (3.0, 0.5, 0.0), (0.5, 0.0, 0.4)])
def test_independent_errors_are_estimated_as_the_formula_says(
    key_size: float, key_error: float, value_error: float
) -> None:
    rng = np.random.default_rng(1)
    keys, values, ek, ev = rng.standard_normal((4, 4096, 2, 32))
    keys *= key_size
    found = estimate_attention(keys, values, keys + key_error * ek, values + value_error * ev)
    # A query of such channels meets an error of such channels: D products of variance (size * error)**2, over D.
    logit = key_size * key_error
    assert found.logit_error == pytest.approx(logit, rel=0.03)
    expected = math.sqrt(2 * (1 - math.exp(-(logit**2) / 2)) + value_error**2)
    assert found.output_error == pytest.approx(expected, rel=0.03)


def test_a_channel_of_constants_does_not_stand_for_huge_queries() -> None:
    rng = np.random.default_rng(2)
    keys, values, error = rng.standard_normal((3, 256, 1, 64))
    plain = estimate_attention(keys, values, keys + 0.1 * error, values).logit_error
    keys[..., 5] += 1000
    biased = estimate_attention(keys, values, keys + 0.1 * error, values).logit_error
    # One of 64 channels counts nine times as much as the median one, not a million times.
    assert plain < biased < plain * math.sqrt(1 + 9.5 / 64)


def test_real_queries_agree_with_the_estimated_logit_error() -> None:
    tensors = load_file(SAMPLE)
    for name in (n for n in tensors if n.endswith(".key")):
        key, value = (tensors[n][0].transpose(1, 0, 2) for n in (name, name.replace("key", "value")))
        codec = Codec("2.26", *key.shape[1:])
        decoded = codec.decode(codec.encode(key, value))
        found = estimate_attention(key, value, *decoded)
        query = tensors[name.replace("key", "query")][0].astype(np.float64)
        grouped = query.reshape(key.shape[1], -1, key.shape[2])
        error = key.astype(np.float64) - decoded[0]
        logits = np.einsum("hqd,thd->hqt", grouped, error - error.mean(axis=0)) / math.sqrt(key.shape[2])
        true = float(np.sqrt(np.mean(logits**2)))
        assert true / 1.6 < found.logit_error < true * 1.6, name


@given(coded=st.integers(1, 100_000), sequences=st.integers(1, 9), window=st.sampled_from([32, 96, 128, 4096]))
def test_sampled_tiles_lie_within_pages(coded: int, sequences: int, window: int) -> None:
    tiles = list(sample_tiles(coded, sequences, window))
    assert 1 <= len(tiles) <= MOST_TILES
    assert len(set(tiles)) == len(tiles)
    for sequence, start, stop in tiles:
        assert 0 <= sequence < sequences
        assert 0 <= start < stop <= min(coded, start + 32)
        assert start // window == (stop - 1) // window
        assert start % window % 32 == 0


def test_a_layer_must_be_bad_in_itself_and_beside_the_others() -> None:
    usual = dict.fromkeys(range(10), 0.6)
    assert layers_out_of_line({}) == ([], 0.0)
    assert layers_out_of_line(usual) == ([], 0.6)
    assert layers_out_of_line({**usual, 4: ABSOLUTE_LEVEL, 2: 1.2}) == ([2, 4], 0.6)
    assert layers_out_of_line({**usual, 4: ABSOLUTE_LEVEL - 0.01})[0] == []
    assert layers_out_of_line({**dict.fromkeys(range(10), 0.1), 4: 0.5})[0] == [], "small, though five times the median"
    high = dict.fromkeys(range(10), 0.8)
    assert layers_out_of_line({**high, 4: 0.8 * MEDIAN_FACTOR - 0.01})[0] == []
    assert layers_out_of_line({**high, 4: 0.8 * MEDIAN_FACTOR})[0] == [4]
    assert layers_out_of_line(dict.fromkeys(range(3), UNRELATED_LEVEL))[0] == [0, 1, 2], "nothing left to compare"


def test_usual_layers_are_not_warned_about(tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays) -> None:
    save_file(sample, tmp_path / "in.safetensors")
    for profile in ("2.26", "1.96", "paper-2.26"):
        assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--profile", profile) == 0
        assert warnings(capsys) == []


@pytest.mark.parametrize("layer", [1, 14, 29])
@pytest.mark.parametrize("factor", [30, 100])
def test_the_layer_with_biased_keys_is_named_and_nothing_else_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays, layer: int, factor: float
) -> None:
    sample[f"layers.{layer}.key"] = with_key_bias(sample[f"layers.{layer}.key"], factor)
    save_file(sample, tmp_path / "in.safetensors")
    arguments = ("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--profile", "paper-2.26")
    assert run(*arguments) == 0
    (line,) = warnings(capsys)
    assert line.startswith(f"dqkv: warning: layer {layer}: estimated attention error 1.")
    assert "the median of 3 layers is 0." in line
    assert f"--exact-layers {layer}" in line
    assert run(*arguments, "--quiet") == 0
    assert capsys.readouterr().err == ""
    assert run(*arguments, "--exact-layers", layer) == 0, "what the line advises"
    assert warnings(capsys) == []
    assert run(*arguments, "--recent", 512) == 0
    assert warnings(capsys) == [], "nothing is coded"


def test_one_layer_alone_is_warned_about_when_little_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays
) -> None:
    keys, values = with_key_bias(sample["layers.14.key"], 30), sample["layers.14.value"]
    save_file({"layers.14.key": keys, "layers.14.value": values}, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--profile", "paper-2.26") == 0
    (line,) = warnings(capsys)
    assert "layer 14" in line
    assert "median" not in line


def test_classes_take_biased_keys_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays
) -> None:
    """A bias that RoPE turns makes a few channels large; a rotation spreads them over all, classes do not."""
    sample["layers.14.key"] = with_key_bias(sample["layers.14.key"], 30)
    save_file(sample, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert warnings(capsys) == []


def test_sinks_sequences_and_replaced_numbers_are_read_where_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays
) -> None:
    two = {name: np.concatenate([array, array[:, :, ::-1]]) for name, array in sample.items()}
    # A shift by the sinks, or the other sequence, would compare tokens that have nothing to do with each other.
    for array in two.values():
        array[:, :, 3::20, 0] = np.inf
        array[:, :, 7::20, 3] = np.nan
    save_file(two, tmp_path / "in.safetensors")
    for policy in ("clamp", "zero"):
        options = ("--sinks", 5, "--recent", 7, "--nonfinite", policy)
        assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
        assert warnings(capsys) == []
        estimates = estimate_layers(open_source(tmp_path / "in.safetensors"), str(tmp_path / "x.dqkv"), policy)
        assert estimates.keys() == {1, 14, 29}
        assert all(0.1 < found.output_error < 1 for found in estimates.values())


def test_exact_tokens_are_no_part_of_the_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays
) -> None:
    sample["layers.14.key"] = with_key_bias(sample["layers.14.key"], 30)
    save_file(sample, tmp_path / "in.safetensors")
    for options in (("--sinks", 300, "--recent", 0), ("--sinks", 0, "--recent", 450), ("--sinks", 40, "--recent", 470)):
        arguments = ("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--profile", "paper-2.26", *options)
        assert run(*arguments) == 0
        assert len(warnings(capsys)) == 1


def test_values_that_overflow_nothing_are_warned_about_without_other_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sample: Arrays
) -> None:
    key = sample["layers.14.key"].astype(np.float32)
    sample["layers.14.key"] = (key * (60000 / np.abs(key).max())).astype(np.float16)
    sample["layers.29.key"] = np.zeros_like(sample["layers.29.key"])
    sample["layers.29.value"] = np.zeros_like(sample["layers.29.value"])
    save_file(sample, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    (line,) = warnings(capsys)
    assert "layer 14" in line
