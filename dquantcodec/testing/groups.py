"""Slow, obvious counterparts of what grouped streams do, written from the specification, clauses 3.7, 3.8, 6.4 and 6.6.

Everything is Python integers, strings of bits and NumPy scalars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

PLACES = 8


def package_merge(weights: Sequence[int], p: int) -> list[int]:
    """Code lengths by clause 6.6, list after list, and from the last one back."""
    leaves = sorted((weight, number) for number, weight in enumerate(weights))
    # (weight, 0 for leaves and 1 for packages, order among equals)
    first = [(weight, 0, order) for order, (weight, _) in enumerate(leaves)]
    lists = [first]
    for _ in range(p - 1):
        before = lists[-1]
        pairs = range(len(before) // 2)
        packages = [(before[2 * i][0] + before[2 * i + 1][0], 1, i) for i in pairs]
        lists.append(sorted(first + packages))
    lengths = [0] * len(weights)
    taken = 2 * len(weights) - 2
    for items in reversed(lists):
        k = sum(kind == 0 for _, kind, _ in items[:taken])
        for _, number in leaves[:k]:
            lengths[number] += 1
        taken = 2 * (taken - k)
    return lengths


def letter_weights(fields: Sequence[Sequence[int]]) -> list[int]:
    """Weights of letters ``m0 + M0 * (m1 + M1 * ...)``: products of the frequencies of their fields."""
    sizes = [len(weights) for weights in fields]
    return [
        prod(weights[m] for weights, m in zip(fields, letter_fields(letter, sizes), strict=True))
        for letter in range(prod(sizes))
    ]


def letter_number(fields: Sequence[int], sizes: Sequence[int]) -> int:
    """The reverse of :func:`letter_fields`."""
    return sum(m * prod(sizes[:f]) for f, m in enumerate(fields))


def letter_fields(letter: int, sizes: Sequence[int]) -> list[int]:
    found = []
    for size in sizes:
        found.append(letter % size)
        letter //= size
    return found


@lru_cache(maxsize=256)
def lengths_of(fields: tuple[tuple[int, ...], ...], p: int) -> tuple[int, ...]:
    return tuple(package_merge(letter_weights(fields), p))


@lru_cache(maxsize=256)
def codes_of(lengths: tuple[int, ...]) -> dict[str, int]:
    """The letter of every code, a string of bits: letters by (length, number) take increasing codes."""
    letter_of = {}
    code = before = 0
    for number, letter in enumerate(sorted(range(len(lengths)), key=lambda i: (lengths[i], i))):
        code = (code + 1 if number else 0) << (lengths[letter] - before)
        before = lengths[letter]
        letter_of[format(code, f"0{before}b")] = letter
    return letter_of


def table_fields(grouping: Any, number: int) -> tuple[tuple[int, ...], ...]:
    """Frequencies of the fields of a table."""
    return tuple(grouping.classes[c].weights for c in grouping.tables[number].classes)


def table_lengths(grouping: Any, number: int) -> tuple[int, ...]:
    return lengths_of(table_fields(grouping, number), grouping.tables[number].precision)


@dataclass(frozen=True)
class Group:
    """``places[l][f]``: where the position of field ``f`` of letter ``l`` stands; ``channels`` likewise."""

    table: int
    channels: list[list[int]]
    places: list[list[int]]


def groups(grouping: Any) -> Iterator[Group]:
    """All groups of a stream in coded order; eight places to a field."""
    row = 0
    for order, choice in zip(grouping.order.tolist(), grouping.choice.tolist(), strict=True):
        at = 0
        for letters, fields, table in zip(grouping.letters, grouping.fields, choice, strict=True):
            yield Group(
                table,
                [[order[at + f * letters + i] for f in range(fields)] for i in range(letters)],
                [[(row + f) * PLACES + i for f in range(fields)] for i in range(letters)],
            )
            row += fields
            at += letters * fields


def parts(grouping: Any, substreams: int) -> list[list[Group]]:
    """The groups of every sub-stream."""
    found = list(groups(grouping))
    size = len(found) // substreams
    return [found[j * size : (j + 1) * size] for j in range(substreams)]


# --- Decoding -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodedGroups:
    """Levels by channel, counted from the lowest, and the reason code of what is wrong, or None."""

    levels: dict[int, int]
    finding: str | None


def decode(words: Sequence[int], grouping: Any, part: Sequence[Group]) -> DecodedGroups:
    """One container, bit by bit."""
    bits = "".join(format(word, "032b")[::-1] for word in words)
    at = 1
    levels: dict[int, int] = {}
    for group in part:
        letter_of = codes_of(table_lengths(grouping, group.table))
        sizes = [len(weights) for weights in table_fields(grouping, group.table)]
        for channels in group.channels:
            code = ""
            while code not in letter_of:
                if at == len(bits):
                    return DecodedGroups(levels, "container-overrun")
                code += bits[at]
                at += 1
            levels.update(zip(channels, letter_fields(letter_of[code], sizes), strict=True))
    return DecodedGroups(levels, "container-padding" if "1" in bits[0] + bits[at:] else None)


def encode(letters: Sequence[int], grouping: Any, part: Sequence[Group]) -> list[int]:
    """All 32-bit words of one container, without padding words."""
    bits, following = "0", iter(letters)
    for group in part:
        code_of = {letter: code for code, letter in codes_of(table_lengths(grouping, group.table)).items()}
        bits += "".join(code_of[next(following)] for _ in group.channels)
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]


def classes_by_channel(grouping: Any) -> dict[int, Any]:
    """The class of every coded channel."""
    return {
        channel: grouping.classes[c]
        for group in groups(grouping)
        for channels in group.channels
        for channel, c in zip(channels, grouping.tables[group.table].classes, strict=True)
    }


def values(levels: dict[int, int], scale: np.float32, grouping: Any) -> list[np.float32]:
    """``s * (g * (m - q))`` of every channel in FP32, ``s * 0`` of those left out (clause 6.4)."""
    row = [scale * np.float32(0)] * (grouping.heads * grouping.head_dim)
    for channel, found in classes_by_channel(grouping).items():
        most = len(found.weights) // 2
        row[channel] = scale * (np.float32(found.gain / 256) * np.float32(levels[channel] - most))
    return row


# --- Drift ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coded:
    """Letters and bits of one group."""

    letters: list[int]
    bits: int


def code_group(row: Sequence[int], grouping: Any, group: Group, thresholds: Sequence[Sequence[int]]) -> Coded:
    """A group's letters if a level counts the thresholds of its class below the magnitude of a position."""
    lengths = table_lengths(grouping, group.table)
    letters = []
    for places in group.places:
        letter, stride = 0, 1
        for place, c in zip(places, grouping.tables[group.table].classes, strict=True):
            passed = sum(abs(row[place]) > limit for limit in thresholds[c])
            most = len(grouping.classes[c].weights) // 2
            letter += stride * (most + (passed if row[place] >= 0 else -passed))
            stride *= 2 * most + 1
        letters.append(letter)
    return Coded(letters, sum(lengths[letter] for letter in letters))


def fill(coarse: Sequence[Coded], fine: Sequence[Coded], order: Sequence[int], budget: int) -> list[Coded]:
    """Groups of the rung that fits, those of the finer rung instead as long as they fit, one after the other."""
    chosen = list(coarse)
    for g in order:
        trial = [*chosen[:g], fine[g], *chosen[g + 1 :]]
        if sum(coded.bits for coded in trial) <= budget:
            chosen = trial
    return chosen
