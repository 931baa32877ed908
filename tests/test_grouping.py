"""Groupings: what is refused, the arrays kernels take, and the code lengths of letter tables."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dquantcodec import tables
from dquantcodec.classes import COUNT, classes
from dquantcodec.errors import InputError
from dquantcodec.group_arrays import group_arrays, table_lengths
from dquantcodec.group_grid import nearest_levels
from dquantcodec.group_prefix import group_tables
from dquantcodec.grouping import Grouping, Levels, Table
from dquantcodec.profile import SOURCES
from dquantcodec.testing import groups as slow

THREE = Levels((4096, 8192, 4096), 256)
FIVE = Levels((1000, 3000, 8384, 3000, 1000), 300)
WIDE = Levels((*[64] * 127, 2**14 - 254 * 64, *[64] * 127), 1023)

#: Three heads of eight channels, in another order than their numbers; channels 6 and 7 of each are left out.
GOOD: dict[str, Any] = {
    "head_dim": 8,
    "classes": (THREE, FIVE),
    "tables": (Table((0, 1), 8), Table((1, 0), 9), Table((0,), 8)),
    "letters": (2, 2),
    "fields": (2, 1),
    "choice": np.array([[0, 2], [1, 2], [0, 2]], np.uint8),
    "order": np.array([[16, 18, 20, 17, 19, 21], [5, 4, 3, 2, 1, 0], [8, 9, 10, 11, 12, 13]], np.uint16),
}


def grouping(**changes: Any) -> Grouping:
    return Grouping(**{**GOOD, **changes})


def changed(name: str, place: tuple[int, int], value: int) -> dict[str, Any]:
    array = GOOD[name].copy()
    array[place] = value
    return {name: array}


# --- Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights",
    [
        (16384,),
        (8192, 8192),
        (4096, 8192, 4095),
        (4095, 8193, 4095),
        (4097, 8191, 4096),
        (0, 16384, 0),
        (-1, 16386, -1),
        (6000, 4384, 6000),
        (4096, 4096, 4096, 4096),
        tuple([64] * 128 + [2**14 - 256 * 64] + [64] * 128),
        (),
    ],
    ids=str,
)
def test_classes_that_are_no_classes_are_refused(weights: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Levels(weights, 256)
    assert caught.value.code == "class-weights"


@pytest.mark.parametrize("gain", [0, -1, 1024])
def test_gains_out_of_bounds_are_refused(gain: int) -> None:
    with pytest.raises(InputError) as caught:
        Levels(THREE.weights, gain)
    assert caught.value.code == "class-gain"


def test_levels_at_the_bounds_are_fine() -> None:
    assert (THREE.most, THREE.field_bits, FIVE.most, FIVE.field_bits) == (1, 2, 2, 3)
    assert (WIDE.most, WIDE.field_bits) == (127, 8)
    assert Levels(THREE.weights, 1).gain == 1
    for most, bits in ((1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (63, 7), (64, 8)):
        assert Levels((*[1] * most, 2**14 - 2 * most, *[1] * most), 1).field_bits == bits


SIXTEEN_LEVELS = Levels((*[1] * 8, 2**14 - 16, *[1] * 8), 256)


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("classes", {"classes": ()}),
        ("classes", {"classes": (THREE, FIVE) * 33}),
        ("tables", {"tables": ()}),
        ("tables", {"tables": GOOD["tables"] * 6}),
        ("table", {"tables": (Table((), 8), *GOOD["tables"][1:])}),
        ("table", {"tables": (Table((0, 2), 8), *GOOD["tables"][1:])}),
        ("table", {"tables": (Table((0, -1), 8), *GOOD["tables"][1:])}),
        ("table", {"tables": (Table((0, 1), 7), *GOOD["tables"][1:])}),
        ("table", {"tables": (Table((0, 1), 15), *GOOD["tables"][1:])}),
        ("table", {"tables": (Table((0, 0, 0, 0, 0), 12), *GOOD["tables"][1:])}),
        # 17 * 17 letters in 2**8 slots, and 17 * 17 * 17 beyond 4096.
        ("table", {"classes": (SIXTEEN_LEVELS, FIVE), "tables": (Table((0, 0), 8), *GOOD["tables"][1:])}),
        ("table", {"classes": (SIXTEEN_LEVELS, FIVE), "tables": (*GOOD["tables"], Table((0, 0, 0), 14))}),
        # Three fields of two bits beside one of eight, and 6885 letters.
        ("table", {"classes": (THREE, WIDE), "tables": (Table((0, 0, 0, 1), 14),)}),
        ("table", changed("choice", (1, 0), 3)),
        ("table", changed("choice", (1, 0), 2)),
        ("shape", {"letters": (), "fields": (), "choice": np.zeros((3, 0), np.uint8)}),
        ("shape", {"letters": (9, 2)}),
        ("shape", {"letters": (0, 2)}),
        ("shape", {"fields": (5, 1)}),
        ("shape", {"fields": (2, 0)}),
        ("shape", {"fields": (2,)}),
        ("shape", {"choice": GOOD["choice"][:, :1]}),
        ("shape", {"order": GOOD["order"][:, :5]}),
        ("shape", {"order": GOOD["order"][:2]}),
        ("shape", {"letters": (1,) * 513, "fields": (1,) * 513}),
        ("order", changed("order", (0, 0), 8)),
        ("order", changed("order", (0, 0), 18)),
        ("order", changed("order", (0, 0), 24)),
        ("order", {"order": np.stack([GOOD["order"][0]] * 3)}),
    ],
)  # fmt: skip
def test_groupings_that_no_decoder_could_follow_are_refused(code: str, changes: dict[str, Any]) -> None:
    grouping()
    with pytest.raises(InputError) as caught:
        grouping(**changes)
    assert caught.value.code == f"grouping-{code}"


def test_fields_of_more_than_twelve_bits_are_refused_even_with_few_letters() -> None:
    nine = Levels((*[1] * 4, 2**14 - 8, *[1] * 4), 256)  # four bits for nine levels
    tables_of = {n: (Table((0,) * n, 12),) for n in (3, 4)}
    one = {"classes": (nine,), "letters": (1,), "choice": np.zeros((1, 1), np.uint8)}
    fine = Grouping(
        head_dim=3, tables=tables_of[3], fields=(3,), order=np.array([[0, 1, 2]], np.uint16), **one
    )  # 729 letters, 12 bits
    assert group_arrays(fine).shifts.tolist()[0][:3] == [0, 4, 8]
    five = Levels((1, 1, 2**14 - 4, 1, 1), 256)  # three bits for five levels
    mixed = {**one, "classes": (nine, five), "order": np.array([[0, 1, 2, 3]], np.uint16)}
    with pytest.raises(InputError) as caught:  # 9 * 5 * 5 * 5 letters, 13 bits
        Grouping(head_dim=4, tables=(Table((0, 1, 1, 1), 14),), fields=(4,), **mixed)
    assert caught.value.code == "grouping-table"


def test_sizes_of_a_grouping() -> None:
    found = grouping()
    assert (found.heads, found.letters_per_head, found.coded) == (3, 4, 6)


def test_classes_that_no_table_names_give_no_states() -> None:
    """Files store the classes of tables alone: with states for others, what was written could not be read."""
    dependent = Levels((1, 16382, 1), 256, (1, 16382, 1))
    classes = (THREE, FIVE, dependent)
    assert grouping(classes=classes).states == 1
    with pytest.raises(InputError, match="4 states for its classes"):
        grouping(classes=classes, states=4)
    assert grouping(classes=classes, tables=(*GOOD["tables"], Table((2,), 8)), states=4).states == 4


# --- Arrays ---------------------------------------------------------------------------------------------------------


@st.composite
def groupings(draw: st.DrawFn) -> Grouping:
    """Any heads, shapes and tables of the designed classes."""
    source = draw(st.sampled_from(SOURCES))
    numbers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True))
    used = tuple(classes(source)[n].levels("unbiased") for n in sorted(numbers))
    drawn: dict[int, list[Table]] = {}
    for _ in range(draw(st.integers(1, 4))):
        fields = tuple(draw(st.lists(st.integers(0, len(used) - 1), min_size=1, max_size=4)))
        letters = int(np.prod([len(used[c].weights) for c in fields]))
        if letters <= 1024 and sum(used[c].field_bits for c in fields) <= 12:
            precision = draw(st.integers(max(8, (letters - 1).bit_length()), 12))
            drawn.setdefault(len(fields), []).append(Table(fields, precision))
    if not drawn:
        drawn = {1: [Table((0,), 8)]}
    every = [table for found in drawn.values() for table in found]
    heads = draw(st.integers(1, 3))
    shapes = draw(st.lists(st.tuples(st.integers(1, 8), st.sampled_from(sorted(drawn))), min_size=1, max_size=4))
    coded = sum(n * f for n, f in shapes)
    dim = coded + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    choice = [[every.index(drawn[f][rng.integers(len(drawn[f]))]) for _, f in shapes] for _ in range(heads)]
    order = [head * dim + rng.permutation(dim)[:coded] for head in rng.permutation(heads)]
    return Grouping(
        head_dim=dim,
        classes=used,
        tables=tuple(every),
        letters=tuple(n for n, _ in shapes),
        fields=tuple(f for _, f in shapes),
        choice=np.array(choice, np.uint8),
        order=np.array(order, np.uint16),
    )


@given(groupings())
def test_arrays_are_those_of_a_plain_walk(found: Grouping) -> None:
    arrays = group_arrays(found)
    walked = list(slow.groups(found))
    assert len(arrays.groups) == len(walked) == found.heads * len(found.letters)
    rows: dict[int, int] = {}
    row_class: dict[int, int] = {}
    row = 0
    for entry, group in zip(arrays.groups.tolist(), walked):
        fields = len(group.channels[0])
        assert entry == [row, fields, len(group.channels), group.table]
        for channels, places in zip(group.channels, group.places):
            rows.update(zip(places, channels))
        row_class.update({row + f: c for f, c in enumerate(found.tables[group.table].classes)})
        row += fields
    assert arrays.row_channel.shape == (row, 8)
    assert arrays.row_channel.reshape(-1).tolist() == [rows.get(place, -1) for place in range(8 * row)]
    assert arrays.row_class.tolist() == [row_class[r] for r in range(row)]
    by_channel = slow.classes_by_channel(found)
    for channel in range(found.heads * found.head_dim):
        own = by_channel.get(channel)
        assert arrays.middle[channel] == (own.most if own else 0)
        assert arrays.factor[channel] == (own.gain / 256 if own else 1)
    first = 0
    for number, table in enumerate(found.tables):
        sizes = [len(found.classes[c].weights) for c in table.classes]
        bits = [(size - 1).bit_length() for size in sizes]
        for f in range(len(sizes)):
            assert arrays.strides[number, f] == np.prod(sizes[:f])
            assert arrays.shifts[number, f] == sum(bits[:f])
        lengths = slow.table_lengths(found, number)
        assert int(arrays.first[number]) == first
        assert tuple(arrays.lengths[first : first + len(lengths)].tolist()) == lengths
        first += len(lengths)
    assert len(arrays.lengths) == first


@given(groupings())
def test_codes_and_windows_are_the_canonical_code_of_the_lengths(found: Grouping) -> None:
    coded, arrays = group_tables(found), group_arrays(found)
    at = 0
    for number, table in enumerate(found.tables):
        letter_of = slow.codes_of(slow.table_lengths(found, number))
        sizes = [len(weights) for weights in slow.table_fields(found, number)]
        assert (int(coded.window_first[number]), int(coded.precision[number])) == (at, table.precision)
        window = coded.window[at : at + 2**table.precision].tolist()
        at += 2**table.precision
        for code, letter in letter_of.items():
            entry = int(coded.codes[arrays.first[number] + letter])
            assert (entry >> 16, entry & 0xFFFF) == (len(code), int(code[::-1], 2))
            fields = slow.letter_fields(letter, sizes)
            packed = sum(m << int(arrays.shifts[number, f]) for f, m in enumerate(fields))
            # Whatever follows the code, the window names the letter.
            for following in (0, 1, 2 ** (table.precision - len(code)) - 1):
                index = int(code[::-1], 2) | following << len(code)
                if index < 2**table.precision:
                    assert window[index] == packed << 4 | len(code)


@given(groupings(), st.integers(0, 2**32))
def test_the_nearest_level_of_a_channel_is_rounded_towards_zero(found: Grouping, seed: int) -> None:
    arrays = group_arrays(found)
    rng = np.random.default_rng(seed)
    some = [0, 32768, -32768, 32769, -32769, 98304, 2**22, -(2**22), 70000]
    position = rng.choice(some, (2, arrays.row_channel.size))
    position = np.where(arrays.row_channel.reshape(-1) >= 0, position, 0).astype(np.int32)
    levels = nearest_levels(position, found)
    by_channel = slow.classes_by_channel(found)
    for place, channel in enumerate(arrays.row_channel.reshape(-1).tolist()):
        if channel >= 0:
            for t in range(2):
                u, most = int(position[t, place]), by_channel[channel].most
                # All levels tried, nearer to zero first.
                best = min(sorted(range(-most, most + 1), key=abs), key=lambda m, u=u: abs(u - m * 65536))
                assert int(levels[t, channel]) == most + best


# --- Lengths --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def known(source: str, number: int) -> Levels:
    return classes(source)[number].levels("least-squares")


@st.composite
def fields_of_tables(draw: st.DrawFn) -> tuple[tuple[Levels, ...], int]:
    source = draw(st.sampled_from(SOURCES))
    fields: list[Levels] = []
    for number in draw(st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=4)):
        if np.prod([len(f.weights) for f in (*fields, known(source, number))]) <= 1500:
            fields.append(known(source, number))
    letters = int(np.prod([len(f.weights) for f in fields])) if fields else 0
    if not fields:
        fields, letters = [THREE], 3
    return tuple(fields), draw(st.integers(max(8, (letters - 1).bit_length()), 14))


@given(fields_of_tables())
def test_lengths_are_those_of_the_specification(case: tuple[tuple[Levels, ...], int]) -> None:
    fields, p = case
    lengths = table_lengths(fields, p)
    assert lengths.dtype == np.uint8
    assert tuple(lengths.tolist()) == slow.lengths_of(tuple(f.weights for f in fields), p)
    assert sum(1 << (p - n) for n in lengths.tolist()) == 1 << p and lengths.max() <= p


@given(fields_of_tables())
def test_lengths_cost_no_more_than_huffmans_where_the_limit_does_not_bind(
    case: tuple[tuple[Levels, ...], int],
) -> None:
    fields, p = case
    weights = slow.letter_weights([f.weights for f in fields])
    lengths = table_lengths(fields, p).tolist()
    cost, best = sum(w * n for w, n in zip(weights, lengths)), oracles.huffman_cost(weights)
    assert cost >= best
    if max(lengths) < p:
        assert cost == best


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(3, 5))
def test_lengths_are_optimal_where_the_limit_binds(weights: list[int], longest: int) -> None:
    for array in (np.array(weights, np.int64), np.array(weights, object)):
        lengths = tables.package_merge(array, longest).tolist()
        assert sum(w * n for w, n in zip(weights, lengths)) == oracles.limited_cost(weights, longest)
        assert lengths == slow.package_merge(weights, longest)


@given(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=40), st.integers(6, 9))
def test_among_equals_the_lower_letter_is_first_and_letters_before_packages(weights: list[int], longest: int) -> None:
    """Small weights make ties everywhere, between letters and between letters and packages."""
    assert tables.package_merge(np.array(weights, np.int64), longest).tolist() == slow.package_merge(weights, longest)


def test_known_ties() -> None:
    # By hand: the first letters are the lightest of equals, and take the longer codes.
    assert tables.package_merge(np.array([1, 1, 1], np.int64), 8).tolist() == [2, 2, 1]
    assert tables.package_merge(np.array([1, 1, 2, 2, 2], np.int64), 8).tolist() == [3, 3, 2, 2, 2]
    # A letter of weight 2 stands before the package of both ones.
    assert tables.package_merge(np.array([2, 1, 1, 4], np.int64), 8).tolist() == slow.package_merge([2, 1, 1, 4], 8)
    assert tables.package_merge(np.array([5, 5], np.int64), 1).tolist() == [1, 1]


def test_products_of_four_classes_are_exact() -> None:
    """The heaviest letter weighs nearly 2**56; sums of all are 2**56."""
    narrow = known("normal", 0)
    lengths = table_lengths((narrow,) * 4, 14)
    assert tuple(lengths.tolist()) == slow.lengths_of((narrow.weights,) * 4, 14)
    assert lengths[40] == 1


def test_replaced_groupings_are_checked_again() -> None:
    with pytest.raises(InputError):
        replace(grouping(), letters=(1, 2))
