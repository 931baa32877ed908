"""Letter tables from the standard normal distribution, as integers (paper, sections 3.2 and 4.4).

After rotation and mean removal a stream is close to normal, so the masses of the grid's cells are known without
calibration.  They are sharpened, because drift moves symbols towards the cheap levels, multiplied out to letters and
rounded to integer frequencies.  Everything after :func:`level_weights` is exact integer arithmetic; files store the
result, so no decoder repeats it.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Level probabilities are integers in 2**-40: the last bits of a C library's erfc then cannot reach a table.
WEIGHT_BITS = 40


def half_range(values: int) -> float:
    """Expected maximum of ``values`` standard normals (Blom's plotting position), at least one standard deviation.

    >>> round(half_range(1024), 3)
    3.234
    """
    from statistics import NormalDist  # slow to load; reading files needs no distribution

    return max(1.0, NormalDist().inv_cdf((values - 0.375) / (values + 0.25)))


def level_weights(levels: int, values: int, alpha: float) -> list[int]:
    """Sharpened cell masses ``p**alpha`` of the min-max grid, as integers summing to about 2**40, none zero.

    The grid spans plus and minus :func:`half_range`; the outer cells take the tails.  Mirrored cells are equal.
    """
    edge = half_range(values)
    step = 2 * edge / (levels - 1)
    # Upper tail beyond the lower edge of each cell of the upper half, outermost last.
    tails = [0.5 * math.erfc((-edge + (m - 0.5) * step) / math.sqrt(2)) for m in range(levels // 2, levels)] + [0.0]
    upper = [max(a - b, 1e-300) for a, b in zip(tails, tails[1:], strict=False)]
    if levels % 2:
        upper[0] = 1.0 - 2 * tails[1]
    sharpened = [p**alpha for p in upper]
    total = 2 * sum(sharpened) - (sharpened[0] if levels % 2 else 0.0)
    half = [max(1, round(p / total * 2**WEIGHT_BITS)) for p in sharpened]
    mirrored = half[:0:-1] if levels % 2 else half[::-1]
    return mirrored + half


def letter_weights(weights: list[int], letter: int) -> list[int]:
    """Products over the symbols of a letter; letter id ``m0 + M*m1 + ...``, first symbol least significant."""
    products = [1]
    for _ in range(letter):
        products = [w * product for w in weights for product in products]
    return products


def frequencies(weights: list[int], precision: int) -> NDArray[np.uint16]:
    """Integer frequencies, none zero, summing to ``2**precision`` (for the rANS coder).

    Webster's rule with a minimum of one: a slot more is worth about ``w / (f + 1/2)``, the derivative of the code
    length.  Ties go to the lower letter.
    """
    total, slots = sum(weights), 1 << precision
    share = [max(1, w * slots // total) for w in weights]
    surplus = sum(share) - slots

    def priority(i: int) -> tuple[int, int]:
        # The value of the next slot (or of the last one, when slots are to be taken away), scaled so that integer
        # division keeps the order; the heap gives the most worth giving, or the least worth keeping.
        if surplus < 0:
            return -((weights[i] << 64) // (2 * share[i] + 1)), i
        return (weights[i] << 64) // (2 * share[i] - 1), i

    heap = [priority(i) for i in range(len(share)) if surplus < 0 or share[i] > 1]
    heapq.heapify(heap)
    for _ in range(abs(surplus)):
        _, i = heapq.heappop(heap)
        share[i] += 1 if surplus < 0 else -1
        if surplus < 0 or share[i] > 1:
            heapq.heappush(heap, priority(i))
    return np.array(share, np.uint16)


def prefix_frequencies(weights: list[int], precision: int) -> NDArray[np.uint16]:
    """Frequencies ``2**(precision - length)`` of the best prefix code with no length above ``precision``.

    The code is complete, so the frequencies sum to ``2**precision``.
    """
    lengths = package_merge(np.array(weights, object), precision)
    return (1 << (precision - lengths.astype(np.int64))).astype(np.uint16)


def package_merge(weights: NDArray[Any], longest: int) -> NDArray[np.uint8]:
    """Code lengths, at most ``longest``, of the best prefix code for integer ``weights`` (Larmore and Hirschberg 1990).

    Lists are in order of weight; among equals the lower letter and a letter before a package.  int64 weights must sum
    to less than ``2**63 / longest``; arrays of Python integers may be any size.
    """
    count = len(weights)
    order = np.argsort(weights, kind="stable")
    leaves = weights[order]
    packages = leaves
    leaf_in = [np.ones(count, np.bool_)]
    for _ in range(longest - 1):
        even = len(packages) // 2 * 2
        merged = np.concatenate([leaves, packages[0:even:2] + packages[1:even:2]])
        place = np.argsort(merged, kind="stable")
        packages = merged[place]
        leaf_in.append(place < count)
    lengths = np.zeros(count, np.uint8)
    # The first 2n - 2 of the last list; every package among them stands for two of the list before.
    taken = 2 * count - 2
    for leaf in reversed(leaf_in):
        found = int(leaf[:taken].sum())
        lengths[:found] += 1
        taken = 2 * (taken - found)
    result = np.empty_like(lengths)
    result[order] = lengths
    return result


def code_lengths(table: NDArray[np.uint16], precision: int) -> NDArray[np.uint8]:
    """Lengths in bits of a prefix table's codes; frequencies must be powers of two."""
    return (precision - np.log2(table.astype(np.float64)).astype(np.int64)).astype(np.uint8)


def letter_costs(table: NDArray[np.uint16], precision: int) -> NDArray[np.int32]:
    """Cost of every letter in 1/1024 bit, rounded up; exact for prefix tables."""
    bits = precision - np.log2(table.astype(np.float64))
    return np.ceil(np.round(bits * 1024, 6)).astype(np.int32)
