"""Many layers, long sequences and wide streams work as small ones do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dquantcodec as dq
from dquantcodec import Codec


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, dtype=np.float32).astype(np.float16)


@pytest.mark.parametrize("profile", ["2.26", "paper-2.26"])
@pytest.mark.parametrize(("heads", "dim"), [(64, 128), (128, 64), (8, 1024)])
def test_streams_of_8192_values(profile: str, heads: int, dim: int) -> None:
    keys = normal(33, heads, dim)
    codec = Codec(profile, heads, dim)
    pages = codec.encode(keys, keys)
    assert codec.check(pages) == []
    decoded, _ = codec.decode(pages)
    assert np.square(decoded - keys).sum() < 0.1 * np.square(keys.astype(np.float32)).sum()


def test_a_hundred_thousand_tokens(tmp_path: Path) -> None:
    tokens = 100_000
    keys = np.resize(normal(1000, 1, 64), (tokens, 1, 64))
    path = tmp_path / "long.dqkv"
    with dq.create(path, [dq.Layer(kv_heads=1, head_dim=64, dtype="float16")]) as out:
        for start in range(0, tokens, 7777):
            out.append([keys[start : start + 7777]], [keys[start : start + 7777]])
    with dq.open(path) as cache:
        assert cache.tokens == tokens
        assert (cache.layers[0].key[tokens - 128 :] == keys[-128:]).all()
        part = cache.layers[0].value.read(99_000, 99_100)
        assert cache.pages_checked <= 2
        assert np.square(part - keys[99_000:99_100]).sum() < 0.25 * np.square(keys[99_000:99_100].astype(float)).sum()


def test_two_hundred_tiny_layers(tmp_path: Path) -> None:
    rows = [normal(130, 1, 64) + np.float16(i) for i in range(200)]
    path = tmp_path / "wide.dqkv"
    with dq.create(path, [dq.Layer(kv_heads=1, head_dim=64, dtype="float16")] * 200, recent=1, threads=2) as out:
        out.append(rows, rows)
    with dq.open(path) as cache:
        assert len(cache.layers) == 200
        assert list(cache.verify()) == []
        for layer, exact in zip(cache.layers, rows):
            assert np.abs(layer.key[:] - exact.astype(np.float32)).max() < 3
