"""Containers by layer: never more bytes in all, more where an error does more, bounds kept."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import Codec
from dquantcodec.allocate import LEAST_PART, MOST_PART, LayerSample, allocate, attention, coding_errors, share_words
from dquantcodec.errors import InputError
from dquantcodec.fit import fit_plan
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import PROFILES


def tensors(seed: int, tokens: int = 256, scale: float = 1.0) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    sigma = np.exp(rng.standard_normal((2, 1, 2, 64)))
    return (scale * rng.standard_normal((2, tokens, 2, 64)) * sigma).astype(np.float32)


def total(plans: list[Plan], tokens: list[int]) -> int:
    return sum(count * (p.key.container + p.value.container) for p, count in zip(plans, tokens))


@given(
    errors=st.lists(st.floats(0, 1e6), min_size=2, max_size=12).filter(lambda e: len(e) % 2 == 0),
    tokens=st.integers(1, 2000),
    factor=st.integers(1, 5),
)
def test_bytes_are_never_more_and_containers_stay_within_bounds(errors: list[float], tokens: int, factor: int) -> None:
    plan = make_plan(PROFILES["2.26"], 8, 128)
    streams = [plan.key, plan.value] * (len(errors) // 2)
    counts = [tokens if i % 2 else tokens * factor for i in range(len(errors) // 2) for _ in range(2)]
    least = [math.ceil(LEAST_PART * stream.words) for stream in streams]
    words = share_words(errors, [1024] * len(errors), counts, streams, least)
    used = sum(w * s.word_bytes * s.substreams * n for w, s, n in zip(words, streams, counts))
    uniform = sum(s.container * n for s, n in zip(streams, counts))
    assert used <= uniform
    for count, stream in zip(words, streams):
        assert LEAST_PART * stream.words <= count <= MOST_PART * stream.words
    # Of equal layers the one whose error does more never gets less.
    for kind in (0, 1):
        of_kind = sorted((errors[i], words[i]) for i in range(kind, len(errors), 2) if counts[i] == counts[kind])
        assert all(a[1] <= b[1] for a, b in zip(of_kind, of_kind[1:]) if a[0] < b[0])


def test_equal_errors_leave_containers_as_they_are() -> None:
    plan = make_plan(PROFILES["2.26"], 8, 128)
    assert share_words([1.0] * 6, [1024] * 6, [10] * 6, [plan.value] * 6, [2] * 6) == [plan.value.words] * 6


def test_the_sum_of_errors_is_least() -> None:
    """No word moved from one stream to another would lower it."""
    plan = make_plan(PROFILES["2.26"], 8, 128)
    rng = np.random.default_rng(0)
    errors = np.exp(rng.standard_normal(8)).tolist()
    words = share_words(errors, [1024] * 8, [10] * 8, [plan.value] * 8, [2] * 8)
    bits = 8 * 4 * plan.value.substreams / 1024

    def left(i: int, count: int) -> float:
        return float(errors[i] * 4.0 ** (-bits * (count - plan.value.words)))

    for i in range(8):
        for j in range(8):
            assert left(i, words[i] - 1) + left(j, words[j] + 1) >= left(i, words[i]) + left(j, words[j]) or i == j


def test_layers_get_bytes_by_harm_and_no_more_in_all() -> None:
    samples = [LayerSample(*tensors(seed), harm=(harm, harm)) for seed, harm in enumerate((0.001, 0.1, 10.0))]
    plans = allocate("2.26", samples)
    uniform = [fit_plan("2.26", sample.keys, sample.values) for sample in samples]
    assert total(plans, [256] * 3) <= total(uniform, [256] * 3)
    assert plans[0].key.container < uniform[0].key.container < plans[2].key.container
    for plan, sample in zip(plans, samples):
        assert plan.key.grouping is not None
        codec = Codec(plan)
        assert codec.check(codec.encode(sample.keys, sample.values)) == []
    assert [p.key.words for p in allocate("2.26", samples)] == [p.key.words for p in plans]


def test_a_layer_with_fewer_tokens_counts_for_less() -> None:
    samples = [LayerSample(*tensors(0, 64), harm=(1, 1)), LayerSample(*tensors(1, 640), harm=(1, 1))]
    plans = allocate("2.26", samples)
    uniform = [fit_plan("2.26", sample.keys, sample.values) for sample in samples]
    assert plans[0].key.container > uniform[0].key.container, "a byte costs a tenth there"
    assert total(plans, [64, 640]) <= total(uniform, [64, 640])


def test_queries_say_what_an_error_does() -> None:
    keys, values = tensors(3)
    plan = fit_plan("1.96", keys, values)
    rng = np.random.default_rng(4)
    queries = rng.standard_normal((8, 4, 64)).astype(np.float32)
    from_keys, from_values = coding_errors(LayerSample(keys, values, queries), plan)
    assert 0 < from_values < 1 and from_keys > 0
    # Keys that no query looks at do no harm.
    looked_at = queries.copy()
    looked_at[..., :] = 0
    assert coding_errors(LayerSample(keys, values, looked_at), plan)[0] < 1e-12


def test_attention_is_the_softmax_of_scaled_products() -> None:
    keys, values = tensors(5, 16)
    query = np.random.default_rng(6).standard_normal((3, 4, 64)).astype(np.float32)
    out = attention(query, keys, values)
    for position in range(3):
        for head in range(4):
            logits = keys[:, head // 2].astype(np.float64) @ query[position, head] / 8
            weights = np.exp(logits) / np.exp(logits).sum()
            assert np.allclose(out[position, head], weights @ values[:, head // 2])


def test_no_layers_are_refused() -> None:
    with pytest.raises(InputError, match="no layers"):
        allocate("2.26", [])
