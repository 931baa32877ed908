"""Slow, obvious counterparts of every stage, written from the definitions and from nothing in the package's kernels.

Exact arithmetic is integers, fractions and strings of bits; where the format fixes an order of FP32 operations, the
oracle performs them one after the other on NumPy scalars or whole columns.
"""

from __future__ import annotations

import heapq
import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import combinations_with_replacement, product
from typing import Any

import group_oracles
import numpy as np
from numpy.typing import NDArray

TILE = 32
ONE = 65536
LARGEST = float(np.finfo(np.float32).max)

# --- FP16 -----------------------------------------------------------------------------------------------------------

_HALVES = np.arange(65536, dtype=np.uint16).view(np.float16)
#: Every finite FP16 number, ascending, once.
HALVES: list[float] = sorted({float(h) for h in _HALVES[np.isfinite(_HALVES)]})


def smallest_half_not_below(x: float) -> float:
    return HALVES[bisect_left(HALVES, x)]


def largest_half_not_above(x: float) -> float:
    return -smallest_half_not_below(-x)


# --- Rotation -------------------------------------------------------------------------------------------------------

PALEY_PRIMES = {3: 11, 5: 19, 7: 13, 9: 17, 11: 43, 15: 59}


def quadratic_character(a: int, q: int) -> int:
    """Euler's criterion: 0, 1 or -1."""
    power = pow(a % q, (q - 1) // 2, q)
    return -1 if power == q - 1 else power


def paley(odd: int) -> list[list[int]]:
    """The Hadamard matrix of order ``4 * odd`` after Paley: I for q = 3 mod 4, II for q = 1 mod 4."""
    if odd == 1:
        return [[1]]
    q = PALEY_PRIMES[odd]
    corner = -1 if q % 4 == 3 else 1
    core = [[0] + [1] * q] + [[corner] + [quadratic_character(j - i, q) for j in range(q)] for i in range(q)]
    size = q + 1
    if q % 4 == 3:
        return [[core[i][j] + (i == j) for j in range(size)] for i in range(size)]
    zero, one = [[1, -1], [-1, -1]], [[1, 1], [1, -1]]

    def entry(i: int, j: int) -> int:
        sign = core[i // 2][j // 2]
        return sign * one[i % 2][j % 2] if sign else zero[i % 2][j % 2]

    return [[entry(i, j) for j in range(2 * size)] for i in range(2 * size)]


def split_order(order: int) -> tuple[int, int] | None:
    """``(odd, power of two)`` of an admissible order: the matrix is ``paley(odd)`` times Sylvester's; else None."""
    odd = order
    while odd % 2 == 0:
        odd //= 2
    if odd == 1:
        return 1, order
    if odd in PALEY_PRIMES and order % 4 == 0:
        return odd, order // (4 * odd)
    return None


def blocks(head_dim: int) -> list[int]:
    """The largest admissible order that still fits, again and again."""
    orders: list[int] = []
    while sum(orders) < head_dim:
        rest = head_dim - sum(orders)
        orders.append(max(order for order in range(1, rest + 1) if split_order(order)))
    return orders


def hadamard(order: int) -> NDArray[np.int64]:
    """Entries +1 and -1: ``paley[i][j] * (-1)**popcount(a & b)`` at row ``i*run + a``, column ``j*run + b``."""
    split = split_order(order)
    assert split is not None
    odd, run = split
    base = paley(odd)
    return np.array(
        [[base[r // run][c // run] * (-1) ** (r % run & c % run).bit_count() for c in range(order)]
         for r in range(order)]
    )  # fmt: skip


def rotation(head_dim: int) -> NDArray[np.float64]:
    """The orthonormal block matrix of a head, without signs."""
    matrix = np.zeros((head_dim, head_dim))
    at = 0
    for order in blocks(head_dim):
        matrix[at : at + order, at : at + order] = hadamard(order) / math.sqrt(order)
        at += order
    return matrix


def rotate(x: NDArray[np.float32], signs: NDArray[np.int8]) -> NDArray[np.float64]:
    return np.asarray((x.astype(np.float64) * signs) @ rotation(x.shape[-1]).T)


def unrotate_exactly(y: NDArray[np.float32], signs: NDArray[np.int8]) -> NDArray[np.float32]:
    """``signs * c * H^T y`` in the FP32 operations the format fixes; ``y`` ``[T, H, D]``."""
    x = y.copy()
    at = 0
    for order in blocks(y.shape[-1]):
        split = split_order(order)
        assert split is not None
        odd, run = split
        base = paley(odd)
        cell = [x[..., at + i].copy() for i in range(order)]
        h = 1
        while h < run:
            for i in range(order):
                if i & h == 0:
                    a, b = cell[i], cell[i + h]
                    cell[i], cell[i + h] = a + b, a - b
            h *= 2
        after = list(cell)
        if len(base) > 1:
            for i in range(len(base)):
                for b in range(run):
                    total = np.float32(base[0][i]) * cell[b]
                    for k in range(1, len(base)):
                        total = total + np.float32(base[k][i]) * cell[k * run + b]
                    after[i * run + b] = total
        for i in range(order):
            x[..., at + i] = after[i] * np.float32(1 / math.sqrt(order))
        at += order
    return x * signs.astype(np.float32)


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


# --- Letters --------------------------------------------------------------------------------------------------------


def letter_id(symbols: Sequence[int], levels: int) -> int:
    """First symbol least significant."""
    return sum(m * levels**i for i, m in enumerate(symbols))


def letter_symbols(letter: int, levels: int, k: int) -> list[int]:
    return [letter // levels**i % levels for i in range(k)]


def pack(row: Sequence[int], head_dim: int, levels: int, k: int, frequencies: Sequence[int]) -> list[int]:
    """Letters of one row of symbols; symbols past a head's end make the most frequent letter, then the lowest."""
    letters = []
    for head in range(0, len(row), head_dim):
        for at in range(head, head + head_dim, k):
            real = [int(m) for m in row[at : min(at + k, head + head_dim)]]
            free = k - len(real)
            candidates = sorted(letter_id([*real, *extra], levels) for extra in product(range(levels), repeat=free))
            letters.append(max(candidates, key=lambda letter: frequencies[letter]))
    return letters


def unpack(letters: Sequence[int], head_dim: int, levels: int, k: int) -> list[int]:
    per_head = -(-head_dim // k)
    row: list[int] = []
    for head in range(0, len(letters), per_head):
        symbols = [m for letter in letters[head : head + per_head] for m in letter_symbols(letter, levels, k)]
        row += symbols[:head_dim]
    return row


# --- Drift ----------------------------------------------------------------------------------------------------------


def best_levels(position: Sequence[int], rates: Sequence[float], kappa: float) -> list[int]:
    """The level of least ``(u - m)**2 + kappa * rate(m)`` for every position, by trying all."""
    levels = range(len(rates))
    return [min(levels, key=lambda m, u=u: (u / ONE - m) ** 2 + kappa * rates[m]) for u in position]


def drift_cost(position: Sequence[int], symbols: Sequence[int], rates: Sequence[float], kappa: float) -> float:
    return sum((u / ONE - m) ** 2 + kappa * rates[m] for u, m in zip(position, symbols, strict=True))


# --- rANS -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoded:
    """Letters (None after an overrun) and the reason code of what is wrong, or None."""

    letters: list[int] | None
    finding: str | None
    used: int = 0


@lru_cache(maxsize=8)
def cumulative(frequencies: tuple[int, ...]) -> list[int]:
    below = [0]
    for f in frequencies:
        below.append(below[-1] + f)
    return below


@lru_cache(maxsize=8)
def slots(frequencies: tuple[int, ...]) -> list[int]:
    return [letter for letter, f in enumerate(frequencies) for _ in range(f)]


def rans_encode(letters: Sequence[int], frequencies: tuple[int, ...], p: int) -> list[int]:
    """All 16-bit words of one container, without padding."""
    below = cumulative(frequencies)
    x = 1 << 16
    emitted: list[int] = []
    for letter in reversed(letters):
        f = frequencies[letter]
        while x >= f << (32 - p):
            emitted.append(x & 0xFFFF)
            x >>= 16
        x = (x // f << p) + x % f + below[letter]
        assert 1 << 16 <= x < 1 << 32
    return [x >> 16, x & 0xFFFF, *reversed(emitted)]


def rans_decode(words: Sequence[int], count: int, frequencies: tuple[int, ...], p: int) -> Decoded:
    letter_of, below = slots(frequencies), cumulative(frequencies)
    x = words[0] << 16 | words[1]
    at = 2
    letters = []
    for _ in range(count):
        slot = x & ((1 << p) - 1)
        letter = letter_of[slot]
        letters.append(letter)
        x = frequencies[letter] * (x >> p) + slot - below[letter]
        if x < 1 << 16:
            if at == len(words):
                return Decoded(None, "container-overrun")
            x = x << 16 | words[at]
            at += 1
    if x != 1 << 16:
        return Decoded(letters, "container-state", at)
    return Decoded(letters, "container-padding" if any(words[at:]) else None, at)


# --- Prefix code ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def canonical_codes(frequencies: tuple[int, ...], p: int) -> list[str]:
    """Codes as strings of bits, first bit first: counted up within a length, doubled between lengths (RFC 1951)."""
    lengths = [p - f.bit_length() + 1 for f in frequencies]
    codes = [""] * len(lengths)
    code = 0
    for length in range(1, p + 1):
        code <<= 1
        for letter, own in enumerate(lengths):
            if own == length:
                codes[letter] = format(code, f"0{length}b")
                code += 1
    return codes


def prefix_encode(letters: Sequence[int], frequencies: tuple[int, ...], p: int) -> list[int]:
    """All 32-bit words of one container, without padding words."""
    codes = canonical_codes(frequencies, p)
    bits = "0" + "".join(codes[letter] for letter in letters)
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32][::-1], 2) for i in range(0, len(bits), 32)]


def prefix_decode(words: Sequence[int], count: int, frequencies: tuple[int, ...], p: int) -> Decoded:
    letter_of = {code: letter for letter, code in enumerate(canonical_codes(frequencies, p))}
    bits = "".join(format(word, "032b")[::-1] for word in words)
    at = 1
    letters = []
    for _ in range(count):
        code = ""
        while code not in letter_of:
            if at == len(bits):
                return Decoded(None, "container-overrun")
            code += bits[at]
            at += 1
        letters.append(letter_of[code])
    spare = bits[0] + bits[at:]
    return Decoded(letters, "container-padding" if "1" in spare else None, -(-at // 32))


ENCODERS = {"rans": rans_encode, "prefix": prefix_encode}
DECODERS = {"rans": rans_decode, "prefix": prefix_decode}


# --- Pages ----------------------------------------------------------------------------------------------------------


def _align(at: int) -> int:
    return at + -at % 64


def decode_page(page: bytes, plan: Any, tokens: int) -> dict[str, NDArray[np.float32]]:
    """Keys and values ``[tokens, H, D]`` of page bytes, token by token, field by field."""
    heads, dim = plan.kv_heads, plan.head_dim
    exponents = struct.unpack_from("<2h", page, 0)
    at = 4
    means: dict[str, NDArray[np.float32] | None] = {"key": None, "value": None}
    for kind in ("key", "value"):
        if getattr(plan, kind).mean:
            scales = struct.unpack_from(f"<{heads}e", page, at)
            steps = struct.unpack_from(f"<{heads * dim}b", page, at + 2 * heads)
            at += 2 * heads + heads * dim
            means[kind] = np.array(
                [[np.float32(scales[h]) * np.float32(steps[h * dim + d]) for d in range(dim)] for h in range(heads)]
            )
    tile_at = _align(at)
    result = {kind: np.empty((tokens, heads, dim), np.float32) for kind in ("key", "value")}
    for first in range(0, tokens, TILE):
        for kind, exponent in zip(("key", "value"), exponents, strict=True):
            stream = getattr(plan, kind)
            affine_at = tile_at + stream.substreams * stream.words * TILE * stream.word_bytes
            rows = []
            for lane in range(min(TILE, tokens - first)):
                if stream.grouping is not None:
                    scale = np.float32(struct.unpack_from("<e", page, affine_at + 2 * lane)[0])
                    levels = _token_levels(page, tile_at, lane, stream)
                    rows.append(group_oracles.values(levels, scale, stream.grouping))
                    continue
                symbols = _token_symbols(page, tile_at, lane, stream, dim, heads)
                if stream.grid == "mid-tread":
                    scale = np.float32(struct.unpack_from("<e", page, affine_at + 2 * lane)[0])
                    offset = np.float32(-(stream.levels - 1) / 2) * scale
                else:
                    offset, scale = (np.float32(v) for v in struct.unpack_from("<2e", page, affine_at + 4 * lane))
                rows.append([offset + scale * np.float32(m) for m in symbols])
            y = np.array(rows, np.float32).reshape(-1, heads, dim)
            mean = means[kind]
            if mean is not None:
                y = y + mean
            x = unrotate_exactly(y, plan.signs) if stream.grouping is None else y
            # One rounding in FP64 at most; what errors lift beyond FP32 saturates.
            scaled = np.clip(x.astype(np.float64) * 2.0**exponent, -LARGEST, LARGEST)
            result[kind][first : first + len(rows)] = scaled.astype(np.float32)
            tile_at = affine_at + (2 if stream.grid == "mid-tread" else 4) * TILE
    return result


def _token_levels(page: bytes, words_at: int, lane: int, stream: Any) -> dict[int, int]:
    levels: dict[int, int] = {}
    for j, part in enumerate(group_oracles.parts(stream.grouping, stream.substreams)):
        decoded = group_oracles.decode(_words(page, words_at, lane, j, stream), stream.grouping, part)
        assert decoded.finding is None, decoded.finding
        levels |= decoded.levels
    return levels


def _words(page: bytes, words_at: int, lane: int, substream: int, stream: Any) -> list[int]:
    form, size = ("<H", 2) if stream.coder == "rans" else ("<I", 4)
    return [
        struct.unpack_from(form, page, words_at + ((substream * stream.words + w) * TILE + lane) * size)[0]
        for w in range(stream.words)
    ]


def _token_symbols(page: bytes, words_at: int, lane: int, stream: Any, dim: int, heads: int) -> list[int]:
    heads_each = heads // stream.substreams
    count = heads_each * -(-dim // stream.letter)
    symbols: list[int] = []
    for j in range(stream.substreams):
        words = _words(page, words_at, lane, j, stream)
        decoded = DECODERS[stream.coder](words, count, tuple(stream.frequencies.tolist()), stream.precision)
        assert decoded.finding is None, decoded.finding
        assert decoded.letters is not None
        symbols += unpack(decoded.letters, dim, stream.levels, stream.letter)
    return symbols


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


#: Kinds of tokens that make a codec of this sort fail; :func:`hostile` builds them.
HOSTILE = (
    "normal", "zeros", "equal", "alternating", "outlier", "denormal", "tiny", "huge", "mixed", "sparse", "spread",
    "impulse",
)  # fmt: skip


def hostile(kind: str, tokens: int, heads: int, dim: int, seed: int, signs: NDArray[np.int8]) -> NDArray[np.float32]:
    """Float32 ``[tokens, heads, dim]``."""
    rng = np.random.default_rng(seed)
    shape = (tokens, heads, dim)
    x = rng.standard_normal(shape)
    index = np.arange(tokens * heads * dim).reshape(shape)
    if kind == "zeros":
        x = np.zeros(shape)
    elif kind == "equal":
        x = np.full(shape, rng.standard_normal())
    elif kind == "alternating":
        x = np.where(index % 2, 300.0, -300.0)
    elif kind == "outlier":
        x[:, rng.integers(heads), rng.integers(dim)] = 500.0
    elif kind == "denormal":
        x = x * 1e-42
    elif kind == "tiny":
        x = x * 1e-40
    elif kind == "huge":
        x = np.clip(x / 3, -1, 1) * 3e38
    elif kind == "mixed":
        x = x * 10.0 ** rng.integers(-30, 30, (tokens, 1, 1))
    elif kind == "sparse":
        x = np.where(rng.random(shape) < 0.02, x * 100, 0)
    elif kind == "spread":
        # Rotated back from two far-apart values: every rotated value is an outermost level.
        y = np.where(rng.random(shape) < 0.5, 10.0, -10.0)
        x = (y @ rotation(dim)) * signs
    elif kind == "impulse":
        y = np.zeros(shape)
        y[:, :, rng.integers(dim)] = 400.0
        x = (y @ rotation(dim)) * signs
    return x.astype(np.float32)
