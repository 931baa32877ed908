"""The kernels of grouped streams, compiled for the host and run as they are, against the CPU codec: the same bytes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import gpu_support as gpu
import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import Codec
from dquantcodec.fit import fit_plan
from dquantcodec.page import KINDS

BUILDS = str(Path(__file__).parent.parent / ".pytest_cache" / "device-kernels")


def channel_tokens(tokens: int, heads: int, head_dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Keys and values ``[2, T, H, D]`` of channels and tokens of different magnitudes; keys have means."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, tokens, heads, head_dim)) * np.exp(rng.standard_normal((2, 1, heads, head_dim)))
    x *= rng.uniform(0.5, 2, (2, tokens, 1, 1))
    x[0] += 3 * rng.standard_normal((1, heads, head_dim))
    return x.astype(np.float32)


@lru_cache(maxsize=32)
def fitted(name: str, heads: int, head_dim: int) -> Codec:
    x = channel_tokens(256, heads, head_dim)
    codec = Codec(fit_plan(name, *x))
    assert codec.plan.key.grouping is not None and codec.plan.value.grouping is not None
    return codec


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


CASES = [
    ("2.26", 8, 128), ("1.96", 2, 64), ("3.0", 3, 80), ("2.26", 1, 96), ("2.26", 2, 112), ("1.96", 2, 192),
    ("2.26", 2, 256), ("2.26", 5, 33),
]  # fmt: skip


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_encode_gives_the_bytes_of_the_cpu(name: str, heads: int, head_dim: int) -> None:
    codec = fitted(name, heads, head_dim)
    tokens = codec.plan.window + 37
    rows = hard_tokens(channel_tokens(tokens, heads, head_dim, 1).astype(np.float16))
    want = codec.encode(*rows)
    pool = poisoned(len(want.data) + 1, codec.layout.page_bytes)
    for kind, x in zip(KINDS, rows):
        status = gpu.encode_groups(BUILDS, codec.plan, kind, x.view(np.uint16), pool, backwards=kind == "value")
        assert not status.any()
    np.testing.assert_array_equal(pool[:-1], want.data)
    assert (pool[-1] == 0x5A).all()
