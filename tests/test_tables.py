"""Letter tables: weights from the normal distribution, integer frequencies, prefix lengths, costs."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec import tables
from dquantcodec.plan import make_plan
from dquantcodec.profile import PROFILES

counts = st.sampled_from([1, 2, 64, 128, 192, 1024, 65536])
weights_of_letters = st.lists(st.integers(1, 2**40) | st.integers(1, 20), min_size=2, max_size=64)


@given(st.integers(2, 64), counts, st.floats(0.25, 8))
def test_level_weights_sum_to_their_scale_are_mirrored_and_none_is_zero(levels: int, n: int, alpha: float) -> None:
    weights = tables.level_weights(levels, n, alpha)
    assert len(weights) == levels
    assert min(weights) >= 1
    assert abs(sum(weights) - 2**tables.WEIGHT_BITS) <= levels
    assert weights == weights[::-1]


@pytest.mark.parametrize("levels", [2, 3, 5, 6, 8, 17, 64])
@pytest.mark.parametrize("alpha", [1.0, 1.4])
def test_level_weights_are_sharpened_masses_of_the_cells_of_the_min_max_grid(levels: int, alpha: float) -> None:
    edge = tables.half_range(1024)
    cdf = NormalDist().cdf
    cuts = [-math.inf, *(-edge + (m + 0.5) * 2 * edge / (levels - 1) for m in range(levels - 1)), math.inf]
    masses = [(cdf(b) - cdf(a)) ** alpha for a, b in pairwise(cuts)]
    expected = [mass / sum(masses) for mass in masses]
    weights = tables.level_weights(levels, 1024, alpha)
    np.testing.assert_allclose([w / sum(weights) for w in weights], expected, rtol=1e-6, atol=1e-11)


def test_half_range_is_the_expected_maximum_of_as_many_normals() -> None:
    largest = np.abs(np.random.default_rng(0).standard_normal((4000, 512))).max(axis=1)
    assert abs(tables.half_range(1024) - largest.mean()) < 0.05
    assert tables.half_range(1) == 1


@given(st.integers(2, 6), st.integers(1, 4), st.data())
def test_a_letter_weighs_the_product_of_its_symbols(levels: int, k: int, data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=levels, max_size=levels))
    products = tables.letter_weights(weights, k)
    assert len(products) == levels**k
    for letter, weight in enumerate(products):
        assert weight == math.prod(weights[m] for m in oracles.letter_symbols(letter, levels, k))


@given(weights_of_letters, st.integers(8, 15))
def test_frequencies_sum_to_all_slots_none_is_zero_and_order_is_kept(weights: list[int], p: int) -> None:
    table = tables.frequencies(weights, p)
    assert table.dtype == np.uint16
    assert int(table.astype(int).sum()) == 1 << p
    assert table.min() >= 1
    for (w, f), (v, g) in pairwise(sorted(zip(weights, table.tolist()))):
        assert f <= g or w == v
    assert (tables.frequencies(weights, p) == table).all()


@given(weights_of_letters, st.integers(10, 15))
def test_frequencies_lose_little_rate(weights: list[int], p: int) -> None:
    table = tables.frequencies(weights, p).astype(float)
    share = np.array([w / sum(weights) for w in weights])
    entropy = -(share * np.log2(share)).sum()
    # A letter forced to one slot takes it from the others: at most 64 of 1024 slots.
    assert (share * (p - np.log2(table))).sum() - entropy <= -math.log2(1 - len(weights) / 2**p) + 0.01


def test_frequencies_of_equal_letters_are_equal_and_spare_slots_go_to_the_lower_ones() -> None:
    assert tables.frequencies([5, 5, 5, 5], 8).tolist() == [64] * 4
    assert tables.frequencies([7, 7, 7], 8).tolist() == [86, 85, 85]


@given(weights_of_letters, st.integers(8, 15))
def test_prefix_codes_are_complete_and_no_length_is_above_the_limit(weights: list[int], p: int) -> None:
    table = tables.prefix_frequencies(weights, p)
    assert int(table.astype(int).sum()) == 1 << p
    assert all(f & (f - 1) == 0 and f >= 1 for f in table.tolist())
    lengths = tables.code_lengths(table, p).tolist()
    assert all(1 << (p - n) == f for n, f in zip(lengths, table.tolist()))
    assert max(lengths) <= p
    assert min(lengths) >= 1


@given(weights_of_letters, st.integers(8, 15))
def test_prefix_codes_cost_no_more_than_huffmans_where_the_limit_does_not_bind(weights: list[int], p: int) -> None:
    lengths = tables.code_lengths(tables.prefix_frequencies(weights, p), p).tolist()
    cost = sum(w * n for w, n in zip(weights, lengths))
    best = oracles.huffman_cost(weights)
    assert cost >= best
    # An optimal tree is never deeper than the letters less one, nor than the golden ratio lets it be.
    depth = math.ceil(math.log(sum(weights) / min(weights)) / math.log((1 + math.sqrt(5)) / 2)) + 1
    if p >= min(len(weights) - 1, depth):
        assert cost == best


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(3, 5))
def test_prefix_codes_are_optimal_where_the_limit_binds(weights: list[int], longest: int) -> None:
    lengths = tables.code_lengths(tables.prefix_frequencies(weights, longest), longest).tolist()
    assert sum(w * n for w, n in zip(weights, lengths)) == oracles.limited_cost(weights, longest)


def test_prefix_codes_of_a_full_table_all_have_the_longest_length() -> None:
    assert tables.prefix_frequencies(list(range(1, 257)), 8).tolist() == [1] * 256


@pytest.mark.parametrize("p", [8, 11, 12, 15])
def test_letter_costs_are_rounded_up_to_a_thousandth_of_a_bit(p: int) -> None:
    table = np.array(sorted({*range(1, 600), *range(600, 1 << p, 37), *(1 << i for i in range(p)), (1 << p) - 1}))
    table = table[table < 1 << p].astype(np.uint16)
    for f, cost in zip(table.tolist(), tables.letter_costs(table, p).tolist()):
        # cost / 1024 >= p - log2 f > (cost - 1) / 1024, in integers.
        assert (1 << 1024 * p) <= f**1024 << cost
        assert f**1024 << (cost - 1) < 1 << 1024 * p


def test_small_tables_are_as_they_always_were() -> None:
    assert tables.level_weights(2, 1024, 1.4) == [2**39] * 2
    assert tables.level_weights(3, 1024, 1.4) == [20239273842, 1059033080091, 20239273842]
    assert tables.level_weights(4, 192, 1.4) == [14214083371, 535541730517, 535541730517, 14214083371]
    assert tables.frequencies(tables.level_weights(8, 1024, 1.4), 12).tolist() == [2, 53, 493, 1500, 1500, 493, 53, 2]
    assert tables.frequencies(tables.level_weights(5, 128, 1.4), 8).tolist() == [2, 53, 146, 53, 2]
    lengths = tables.code_lengths(tables.prefix_frequencies(tables.level_weights(6, 1024, 1.4), 8), 8)
    assert lengths.tolist() == [5, 4, 2, 1, 3, 5]


GOLDEN = {
    ("2.26", 8): "bdb43bfca17413bc430edd1faaedf9c3",
    ("2.26", 3): "bdb43bfca17413bc430edd1faaedf9c3",
    ("1.96", 8): "691545ee802b804aa8b02b504bbffaf6",
    ("1.96", 3): "691545ee802b804aa8b02b504bbffaf6",
    ("3.0", 8): "bae9b15abe5d5b9820e46eda13ff50fa",
    ("3.0", 3): "bae9b15abe5d5b9820e46eda13ff50fa",
    ("paper-2.26", 8): "ba5fabd957086beb0a5a1dba7123da9a",
    ("paper-2.26", 3): "bb4b96e5181d434fe774c20bfb45edee",
    ("paper-1.96", 8): "88f6d7d92a727847775d5a9e8d6ad6d5",
    ("paper-1.96", 3): "a094744b8f9b08a1ace4c47567247619",
}


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("heads", [8, 3])
def test_tables_of_named_profiles_are_as_they_always_were(name: str, heads: int) -> None:
    plan = make_plan(PROFILES[name], heads, 128 if heads == 8 else 64)
    digest = hashlib.sha256()
    for stream in (plan.key, plan.value):
        assert int(stream.frequencies.astype(int).sum()) == 1 << stream.precision
        assert stream.frequencies.min() >= 1
        digest.update(stream.frequencies.astype("<u2").tobytes())
    # Without data a profile with a trellis has the tables of the one of its size without.
    assert digest.hexdigest()[:32] == GOLDEN[name.removesuffix("-t"), heads]
