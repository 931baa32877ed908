"""Slow, obvious counterparts of the trellis, written from the specification, clause 6.7."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import log2, prod
from typing import Any

import numpy as np

from . import groups as slow

TURN = {1: "0", 4: "0011", 8: "01010101"}
NEXT = {1: "0/0", 4: "0/2 2/0 1/3 3/1", 8: "0/2 5/7 1/3 6/4 2/0 4/6 3/1 7/5"}


def turn(states: int, state: int) -> int:
    return int(TURN[states][state])


def after(states: int, state: int, k: int) -> int:
    return int(NEXT[states].split()[state].split("/")[k % 2])


def half_steps(k: int, quantiser: int) -> int:
    return 2 * k - ((k > 0) - (k < 0)) * quantiser


def follow(states: int, state: int, fields: Sequence[tuple[int, Any]]) -> tuple[list[int], list[int], int]:
    """Quantisers, levels (half steps of dependent classes, else steps) and the last state of ``(m, class)`` fields."""
    quantisers, levels = [], []
    for m, found in fields:
        k = m - len(found.weights) // 2
        quantisers.append(turn(states, state) if found.second else 0)
        levels.append(half_steps(k, quantisers[-1]) if found.second else k)
        state = after(states, state, k) if found.second else state
    return quantisers, levels, state


def index_of(states: int, state: int, level: int, found: Any) -> tuple[int, int]:
    """The field ``m`` and the next state of a decoded level, counted from the lowest.

    Raises ValueError for half steps that the state's quantiser does not have.
    """
    q = len(found.weights) // 2
    if not found.second:
        return level, state
    v = level - 2 * q
    quantiser = turn(states, state)
    k = (v + ((v > 0) - (v < 0)) * quantiser) // 2
    if half_steps(k, quantiser) != v or abs(k) > q:
        raise ValueError(f"quantiser {quantiser} has no level of {v} half steps")
    return k + q, after(states, state, k)


def states_before(grouping: Any, symbols: Sequence[int]) -> list[int]:
    """The state in which every letter of a stream begins."""
    found, state = [], 0
    for group in slow.groups(grouping):
        classes = table_classes(grouping, group.table)
        for channels in group.channels:
            found.append(state)
            for channel, c in zip(channels, classes, strict=True):
                _, state = index_of(grouping.states, state, symbols[channel], c)
    return found


def encode(letters: Sequence[int], grouping: Any, part: Sequence[slow.Group]) -> list[int]:
    """All 32-bit words of one container, without padding words; letters are numbered within a state."""
    bits, state, following = "0", 0, iter(letters)
    for group in part:
        classes = table_classes(grouping, group.table)
        sizes = [len(c.weights) for c in classes]
        for _ in group.channels:
            letter = next(following)
            bits += code_of(grouping, group.table, state)[letter]
            fields = list(zip(slow.letter_fields(letter, sizes), classes, strict=True))
            _, _, state = follow(grouping.states, state, fields)
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]


@lru_cache(maxsize=256)
def code_of(grouping: Any, number: int, state: int) -> dict[int, str]:
    """The code of every letter of a table in a state."""
    return {letter: code for code, letter in codes(grouping, number, state).items()}


def table_classes(grouping: Any, number: int) -> list[Any]:
    return [grouping.classes[c] for c in grouping.tables[number].classes]


@lru_cache(maxsize=256)
def codes(grouping: Any, number: int, state: int) -> dict[str, int]:
    """The letter of every code of a table in a state."""
    classes = table_classes(grouping, number)
    sizes = [len(c.weights) for c in classes]
    weights = []
    for letter in range(prod(sizes)):
        fields = slow.letter_fields(letter, sizes)
        quantisers, _, _ = follow(grouping.states, state, list(zip(fields, classes, strict=True)))
        of = [c.second if q else c.weights for c, q in zip(classes, quantisers, strict=True)]
        weights.append(prod(w[m] for w, m in zip(of, fields, strict=True)))
    return slow.codes_of(tuple(slow.package_merge(weights, grouping.tables[number].precision)))


def decode(words: Sequence[int], grouping: Any, part: Sequence[slow.Group]) -> slow.DecodedGroups:
    """One container, bit by bit; levels are counted from the lowest, half steps from ``-2q``."""
    bits = "".join(format(word, "032b")[::-1] for word in words)
    at, state = 1, 0
    levels: dict[int, int] = {}
    for group in part:
        classes = table_classes(grouping, group.table)
        sizes = [len(c.weights) for c in classes]
        for channels in group.channels:
            letter_of, code = codes(grouping, group.table, state), ""
            while code not in letter_of:
                if at == len(bits):
                    return slow.DecodedGroups(levels, "container-overrun")
                code += bits[at]
                at += 1
            fields = list(zip(slow.letter_fields(letter_of[code], sizes), classes, strict=True))
            _, found, state = follow(grouping.states, state, fields)
            for channel, level, c in zip(channels, found, classes, strict=True):
                q = len(c.weights) // 2
                levels[channel] = level + (2 * q if c.second else q)
    return slow.DecodedGroups(levels, "container-padding" if "1" in bits[0] + bits[at:] else None)


def values(levels: dict[int, int], scale: np.float32, grouping: Any) -> list[np.float32]:
    """Clause 6.4: ``s * (g/2 * v)`` of dependent classes, ``s * (g * (m - q))`` of others, 0 of what is not coded."""
    row = [scale * np.float32(0)] * (grouping.heads * grouping.head_dim)
    for channel, found in slow.classes_by_channel(grouping).items():
        q = len(found.weights) // 2
        if found.second:
            row[channel] = scale * (np.float32(found.gain / 256 / 2) * np.float32(levels[channel] - 2 * q))
        else:
            row[channel] = scale * (np.float32(found.gain / 256) * np.float32(levels[channel] - q))
    return row


def all_paths(classes: Sequence[Any], states: int) -> Iterator[tuple[list[float], float]]:
    """Every path through a few values: its levels in steps, and its rate in bits."""
    for indices in product(*(range(len(c.weights)) for c in classes)):
        quantisers, levels, _ = follow(states, 0, list(zip(indices, classes, strict=True)))
        of = [c.second if q else c.weights for c, q in zip(classes, quantisers, strict=True)]
        rate = sum(14 - log2(w[m]) for w, m in zip(of, indices, strict=True))
        yield [v / 2 if c.second else float(v) for v, c in zip(levels, classes, strict=True)], rate
