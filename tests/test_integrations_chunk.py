"""Chunks for key-value stores: their size is known beforehand, and damaged or foreign bytes never become numbers."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dquantcodec as dq
from dquantcodec.errors import ChecksumError, DQuantError, IdentityError, InputError, TruncatedError
from dquantcodec.integrations import chunk as chunk_module
from dquantcodec.integrations.chunk import HEADER, ChunkCodec, chunk_codec

LAYERS = [
    dq.Layer(2, 32, "float16"),
    dq.Layer(2, 32, "float16", None, "exact"),
    dq.Layer(1, 64, "float16", "paper-2.26"),
]


def tensors(layers: Any, tokens: int, seed: int = 0) -> list[list[Any]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.standard_normal((tokens, s.kv_heads, s.head_dim)).astype(s.array_dtype) for s in layers] for _ in range(2)
    ]


@pytest.mark.parametrize("tokens", [1, 32, 100, 128, 129, 300])
def test_size_is_known_and_what_comes_back_is_what_the_codec_gives(tokens: int) -> None:
    codec = ChunkCodec(LAYERS)
    keys, values = tensors(LAYERS, tokens)
    buffer = np.full(codec.size(tokens) + 100, 7, np.uint8)
    chunk = codec.encode(keys, values, buffer)
    assert len(chunk) == codec.size(tokens)
    assert (buffer[len(chunk) :] == 7).all()
    # Heads-first memory, as some engines have it: arrays to write to may have any strides.
    out = [[np.zeros((s.kv_heads, tokens, s.head_dim), s.array_dtype).transpose(1, 0, 2) for s in LAYERS] for _ in "kv"]
    codec.decode(bytes(chunk), *out)
    for number, layer in enumerate(codec.layers):
        given = keys[number], values[number]
        if layer.plan:
            one = dq.Codec(layer.plan)
            given = one.decode(one.encode(*given), dtype=np.float16)
        for expected, found in zip(given, (out[0][number], out[1][number])):
            np.testing.assert_array_equal(expected, found)


def test_every_damaged_bit_and_every_cut_is_found() -> None:
    codec = ChunkCodec(LAYERS)
    keys, values = tensors(LAYERS, 40)
    chunk = codec.encode(keys, values)
    out = [[np.zeros_like(x) for x in kind] for kind in (keys, values)]
    places = [*range(HEADER.size), *range(HEADER.size, len(chunk), 997), len(chunk) - 1]
    for place in places:
        damaged = chunk.copy()
        damaged[place] ^= 1 << place % 8
        with pytest.raises(DQuantError) as caught:
            codec.decode(damaged, *out)
        if place >= HEADER.size:
            assert isinstance(caught.value, ChecksumError)
    for cut in (0, 10, 63, 64, len(chunk) - 1):
        with pytest.raises(TruncatedError):
            codec.decode(chunk[:cut], *out)
    assert not any(x.any() for kind in out for x in kind)  # nothing was written


def test_other_plans_dtypes_layers_and_lengths_are_refused() -> None:
    keys, values = tensors(LAYERS, 40)
    chunk = ChunkCodec(LAYERS).encode(keys, values)
    others = [
        [*LAYERS[:2], dq.Layer(1, 64, "float16", "paper-1.96")],
        LAYERS[:2],
        [dq.Layer(2, 32, "bfloat16"), *LAYERS[1:]],
        [dq.Layer(1, 64, "float16"), *LAYERS[1:]],
    ]
    for layers in others:
        with pytest.raises(IdentityError):
            ChunkCodec(layers).decode(chunk, *tensors(layers, 40))
    with pytest.raises(IdentityError, match="40 tokens, not 41"):
        ChunkCodec(LAYERS).decode(chunk, *tensors(LAYERS, 41))
    with pytest.raises(InputError, match="expected float16"):
        ChunkCodec(LAYERS).encode([x.astype(np.float32) for x in keys], values)
    with pytest.raises(InputError, match="bytes, not 100"):
        ChunkCodec(LAYERS).encode(keys, values, np.zeros(100, np.uint8))


def test_plans_come_from_a_file(tmp_path: Path) -> None:
    layers = [dq.Layer(2, 32, "float16")] * 2
    keys, values = tensors(layers, 700)
    for name in ("a.dqkv", "b.dqkv"):  # other ids, the same plans
        with dq.create(tmp_path / name, layers, model=name) as out:
            out.append(keys, values)
    first, second = (ChunkCodec.of_file(tmp_path / name) for name in ("a.dqkv", "b.dqkv"))
    assert first.layers[0].plan and first.layers[0].plan.key.grouping
    part = [[x[:128] for x in kind] for kind in (keys, values)]
    found = [[np.empty_like(x) for x in kind] for kind in part]
    second.decode(first.encode(*part), *found)
    assert first.fingerprint != ChunkCodec(layers).fingerprint
    settings = {"plans": str(tmp_path / "a.dqkv")}
    assert chunk_codec(settings, 2, "float16").fingerprint == first.fingerprint
    exact = chunk_codec({**settings, "exact_layers": [1]}, 2, "bfloat16")
    assert exact.layers[1].plan is None and exact.layers[0].array_dtype == ml_dtypes.bfloat16
    for wrong in ({}, {"plan": "x"}, {"kv_heads": 2}):
        with pytest.raises(InputError):
            chunk_codec(wrong, 2, "float16")
    with pytest.raises(InputError, match="2 layers for 3"):
        chunk_codec(settings, 3, "float16")


def test_the_example_in_the_documentation_runs() -> None:
    assert doctest.testmod(chunk_module).failed == 0
