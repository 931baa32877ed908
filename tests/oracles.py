"""Slow, obvious counterparts of every stage, written from the definitions and from nothing in the package's kernels.

Those that decode and encode containers and pages are public, in :mod:`dquantcodec.testing`.

Exact arithmetic is integers, fractions and strings of bits; where the format fixes an order of FP32 operations, the
oracle performs them one after the other on NumPy scalars or whole columns.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dquantcodec.testing.coders import (  # noqa: F401
    DECODERS,
    ENCODERS,
    canonical_codes,
    letter_id,
    letter_symbols,
    pack,
    prefix_decode,
    prefix_encode,
    rans_decode,
    rans_encode,
    unpack,
)
from dquantcodec.testing.pages import (  # noqa: F401
    LARGEST,
    PALEY_PRIMES,
    TILE,
    blocks,
    decode_page,
    hadamard,
    paley,
    quadratic_character,
    rotate,
    rotation,
    split_order,
    unrotate_exactly,
)
from dquantcodec.testing.tensors import HOSTILE, hostile  # noqa: F401

ONE = 65536

# --- FP16 -----------------------------------------------------------------------------------------------------------

_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
#: Every finite FP16 number, ascending, once.
HALVES: list[float] = sorted({float(h) for h in _HALVES[np.isfinite(_HALVES)]})


def smallest_half_not_below(x: float) -> float:
    return HALVES[bisect_left(HALVES, x)]


def largest_half_not_above(x: float) -> float:
    return -smallest_half_not_below(-x)


# --- Means and grid -------------------------------------------------------------------------------------------------


def window_means(x: NDArray[np.float32]) -> tuple[list[float], list[list[int]]]:
    """FP16 scale of every head and INT8 steps of every channel; FP32 sums in token order."""
    tokens, heads, dim = x.shape
    scales, steps = [], []
    for h in range(heads):
        means = []
        for d in range(dim):
            total = np.float32(0)
            for t in range(tokens):
                total = total + x[t, h, d]
            means.append(total / np.float32(tokens))
        scale = smallest_half_not_below(float(max(abs(m) for m in means) / np.float32(127)))
        scales.append(scale)
        steps.append([round(Fraction(float(m / np.float32(scale)))) if scale else 0 for m in means])
    return scales, steps


def min_max_grid(row: Sequence[float], levels: int) -> tuple[float, float]:
    """Offset and scale of one stream: FP16, rounded outwards."""
    offset = largest_half_not_above(min(row))
    span = np.float32(np.float32(max(row)) - np.float32(offset))
    return offset, smallest_half_not_below(float(span / np.float32(levels - 1)))


def least_squares(x: NDArray[np.float64], symbols: NDArray[np.uint8]) -> tuple[float, float]:
    """Offset and scale that fit ``offset + scale * symbols`` to ``x`` best."""
    design = np.stack([np.ones(len(x)), symbols.astype(np.float64)], axis=1)
    offset, scale = np.linalg.lstsq(design, x, rcond=None)[0]
    return float(offset), float(scale)


# --- Tables ---------------------------------------------------------------------------------------------------------


def huffman_cost(weights: Sequence[int]) -> int:
    """Total cost ``sum(weight * length)`` of the best prefix code without a limit on lengths."""
    heap = list(weights)
    heapq.heapify(heap)
    cost = 0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        cost += merged
        heapq.heappush(heap, merged)
    return cost


def limited_cost(weights: Sequence[int], longest: int) -> int:
    """The same with no length above ``longest``, by trying every complete set of lengths (few letters only)."""
    descending = sorted(weights, reverse=True)
    best = None
    for lengths in combinations_with_replacement(range(1, longest + 1), len(weights)):
        if sum(1 << (longest - n) for n in lengths) <= 1 << longest:
            cost = sum(w * n for w, n in zip(descending, lengths, strict=True))
            best = cost if best is None or cost < best else best
    assert best is not None
    return best


# --- Drift ----------------------------------------------------------------------------------------------------------


def best_levels(position: Sequence[int], rates: Sequence[float], kappa: float) -> list[int]:
    """The level of least ``(u - m)**2 + kappa * rate(m)`` for every position, by trying all."""
    levels = range(len(rates))
    return [min(levels, key=lambda m, u=u: (u / ONE - m) ** 2 + kappa * rates[m]) for u in position]


def drift_cost(position: Sequence[int], symbols: Sequence[int], rates: Sequence[float], kappa: float) -> float:
    return sum((u / ONE - m) ** 2 + kappa * rates[m] for u, m in zip(position, symbols, strict=True))


# --- Attention ------------------------------------------------------------------------------------------------------


def attention(
    query: NDArray[Any], keys: NDArray[Any], values: NDArray[Any], scale: float | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Output and log-sum-exp in FP64 of ``query`` ``[L, Q, D]`` over ``[T, H, D]``; head q reads KV head q//(Q/H)."""
    positions, queries, dim = query.shape
    group = queries // keys.shape[1]
    out = np.zeros(query.shape)
    lse = np.full((positions, queries), -np.inf)
    factor = 1 / math.sqrt(dim) if scale is None else scale
    for i in range(positions):
        for q in range(queries):
            logits = keys[:, q // group].astype(np.float64) @ query[i, q].astype(np.float64) * factor
            if len(logits):
                weights = np.exp(logits - logits.max())
                out[i, q] = weights @ values[:, q // group].astype(np.float64) / weights.sum()
                lse[i, q] = logits.max() + math.log(weights.sum())
    return out, lse


# --- Inputs ---------------------------------------------------------------------------------------------------------


def integers(count: int, seed: int = 0) -> list[int]:
    """Integers in [-128, 127], bell-shaped, by integer arithmetic alone, so that no generator's stream can change."""
    state = (seed * 2654435761 + 12345) % 2**32
    result = []
    for _ in range(count):
        total = 0
        for _ in range(4):
            state = (state * 1664525 + 1013904223) % 2**32
            total += state >> 24
        result.append(total // 4 - 128)
    return result
