"""Quality measures against slow, obvious versions of themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec.compare import (
    AttentionSums,
    ErrorSums,
    LayerQuality,
    attend_block,
    error_sums,
    group_queries,
    relative_error,
)
from dquantcodec.errors import InputError


def attention_oracle(
    query: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], scale: float
) -> NDArray[np.float64]:
    """Causal attention of the last L positions, one query head and position at a time."""
    heads, positions, head_dim = query.shape
    tokens, kv_heads, _ = keys.shape
    out = np.zeros((heads, positions, head_dim))
    for head in range(heads):
        kv = head // (heads // kv_heads)
        for position in range(positions):
            seen = tokens - positions + position + 1
            logits = keys[:seen, kv].astype(np.float64) @ query[head, position].astype(np.float64) * scale
            weights = np.exp(logits - logits.max())
            out[head, position] = weights / weights.sum() @ values[:seen, kv].astype(np.float64)
    return out


def attend(
    query: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], step: int, scale: float | None
) -> NDArray[np.float32]:
    heads, positions, head_dim = query.shape
    tokens, kv_heads, _ = keys.shape
    grouped = group_queries(query, kv_heads)
    sums = AttentionSums.empty(kv_heads, grouped.shape[1], head_dim)
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        sums = attend_block(
            sums, grouped, keys[part], values[part], positions=positions, tokens=tokens, start=start, scale=scale
        )
    return sums.output().reshape(heads, positions, head_dim)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.data(), st.sampled_from([None, 0.1, 3.0]),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_attention_in_blocks(
    kv_heads: int, group: int, tokens: int, data: st.DataObject, scale: float | None, seed: int
) -> None:
    positions = data.draw(st.integers(1, tokens))
    step = data.draw(st.integers(1, tokens))
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((kv_heads * group, positions, 8)).astype(np.float32)
    keys, values = rng.standard_normal((2, tokens, kv_heads, 8)).astype(np.float16)
    expected = attention_oracle(query, keys, values, 1 / math.sqrt(8) if scale is None else scale)
    np.testing.assert_allclose(attend(query, keys, values, step, scale), expected, atol=2e-5)


def test_attention_survives_huge_logits() -> None:
    query = np.full((1, 3, 4), 1e4, np.float32)
    keys = np.linspace(-1e4, 1e4, 20).astype(np.float32).repeat(4).reshape(20, 1, 4)
    values = np.arange(80, dtype=np.float32).reshape(20, 1, 4)
    np.testing.assert_allclose(attend(query, keys, values, 3, None), values[None, 17:, 0])


def test_query_heads_must_divide() -> None:
    with pytest.raises(InputError) as caught:
        group_queries(np.zeros((5, 2, 4), np.float32), 2)
    assert caught.value.code == "query-mismatch"


@given(st.integers(1, 300), st.integers(1, 130), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_error_sums(tokens: int, window: int, windows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    original = (rng.standard_normal((tokens, 2, 4)) + rng.standard_normal((2, 4)) * 5).astype(np.float16)
    decoded = (original + rng.standard_normal(original.shape) * 0.1).astype(np.float32)
    centred = np.concatenate(
        [
            original[at : at + window] - original[at : at + window].astype(np.float64).mean(axis=0)
            for at in range(0, tokens, window)
        ]
    )
    error = original.astype(np.float64) - decoded
    whole = error_sums(original, decoded, window)
    assert whole.error == pytest.approx((error**2).sum())
    assert whole.energy == pytest.approx((original.astype(np.float64) ** 2).sum())
    assert whole.centred == pytest.approx((centred**2).sum())
    step = windows * window
    parts = ErrorSums()
    for at in range(0, tokens, step):
        parts += error_sums(original[at : at + step], decoded[at : at + step], window)
    assert parts.nmse == pytest.approx(whole.nmse)
    assert parts.centred_nmse == pytest.approx(whole.centred_nmse)


def test_exact_copies_have_no_error_even_of_nothing() -> None:
    zeros = np.zeros((3, 1, 4), np.float16)
    assert error_sums(zeros, zeros).nmse == 0.0
    assert error_sums(zeros, zeros + 1).nmse == math.inf
    assert error_sums(zeros + 2, zeros + 1).centred_nmse == math.inf
    with pytest.raises(InputError) as caught:
        error_sums(zeros, zeros[:2])
    assert caught.value.code == "shape-mismatch"


def test_relative_error() -> None:
    assert relative_error(np.array([3.0, 4.0]), np.array([3.0, 5.0])) == (1.0, 25.0)


def test_a_row_counts_every_byte() -> None:
    row = LayerQuality(
        layer=3, profile="2.26", values=1000, stored_bytes=500, key_nmse=0, key_centred_nmse=0, value_nmse=0
    )
    assert row.bits_per_value == 4.0
    assert row.ratio == 4.0
