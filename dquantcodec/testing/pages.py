"""Pages in plain Python: rotation and reconstruction, written from the specification, clauses 5 and 6.4 to 6.7.

Where the format fixes an order of FP32 operations, they are performed one after the other on NumPy scalars or columns.
"""

from __future__ import annotations

import math
import struct

import numpy as np
from numpy.typing import NDArray

from ..plan import Plan, StreamPlan
from . import groups, trellises
from .coders import DECODERS, unpack

TILE = 32
KINDS = ("key", "value")
LARGEST = float(np.finfo(np.float32).max)

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
                for c in range(run):
                    products = [cell[k * run + c] * np.float32(base[k][i]) for k in range(len(base))]
                    after[i * run + c] = products[0]
                    for product in products[1:]:
                        after[i * run + c] = after[i * run + c] + product
        for i in range(order):
            x[..., at + i] = after[i] * np.float32(1 / math.sqrt(order))
        at += order
    return x * signs.astype(np.float32)


# --- Pages ----------------------------------------------------------------------------------------------------------


class PageError(ValueError):
    """A page that no encoder wrote: ``code`` of clause 9.4, ``kind``, and ``token`` of the page."""

    def __init__(self, code: str, kind: str, token: int) -> None:
        super().__init__(f"{code}: {kind} of token {token}")
        self.code, self.kind, self.token = code, kind, token


def _align(at: int) -> int:
    return at + -at % 64


def decode_page(page: bytes, plan: Plan, tokens: int) -> dict[str, NDArray[np.float32]]:
    """Keys and values ``[tokens, H, D]`` of page bytes, token by token, field by field.

    Raises :class:`PageError` for what clauses 6.2 to 6.4 call an error, except padding that is not zero.
    """
    heads, dim = plan.kv_heads, plan.head_dim
    exponents = struct.unpack_from("<2h", page, 0)
    at = 4
    means: dict[str, NDArray[np.float32] | None] = {"key": None, "value": None}
    for kind, exponent in zip(KINDS, exponents, strict=True):
        if not -157 <= exponent <= 119:
            raise PageError("page-exponent", kind, 0)
        if getattr(plan, kind).mean:
            scales = _finite(struct.unpack_from(f"<{heads}e", page, at), kind, 0)
            steps = struct.unpack_from(f"<{heads * dim}b", page, at + 2 * heads)
            at += 2 * heads + heads * dim
            means[kind] = np.array(
                [[np.float32(scales[h]) * np.float32(steps[h * dim + d]) for d in range(dim)] for h in range(heads)]
            )
    tile_at = _align(at)
    result = {kind: np.empty((tokens, heads, dim), np.float32) for kind in KINDS}
    for first in range(0, tokens, TILE):
        for kind, exponent in zip(KINDS, exponents, strict=True):
            stream = getattr(plan, kind)
            affine_at = tile_at + stream.substreams * stream.words * TILE * stream.word_bytes
            numbers = 1 if stream.grid == "mid-tread" else 2
            rows = []
            for lane in range(min(TILE, tokens - first)):
                affine = struct.unpack_from(f"<{numbers}e", page, affine_at + 2 * numbers * lane)
                affine = _finite(affine, kind, first + lane)
                where = (kind, first + lane)
                if stream.grouping is not None:
                    levels = token_levels(page, tile_at, lane, stream, where)
                    coder = groups if stream.grouping.states == 1 else trellises
                    rows.append(coder.values(levels, np.float32(affine[0]), stream.grouping))
                    continue
                symbols = _token_symbols(page, tile_at, lane, stream, dim, heads, where)
                scale = np.float32(affine[-1])
                offset = np.float32(affine[0]) if numbers == 2 else np.float32(-(stream.levels - 1) / 2) * scale
                rows.append([offset + scale * np.float32(m) for m in symbols])
            y = np.array(rows, np.float32).reshape(-1, heads, dim)
            mean = means[kind]
            if mean is not None:
                y = y + mean
            x = unrotate_exactly(y, plan.signs) if stream.grouping is None else y
            # One rounding in FP64 at most; what errors lift beyond FP32 saturates.
            scaled = np.clip(x.astype(np.float64) * 2.0**exponent, -LARGEST, LARGEST)
            result[kind][first : first + len(rows)] = scaled.astype(np.float32)
            tile_at = affine_at + 2 * numbers * TILE
    return result


def _finite(numbers: tuple[float, ...], kind: str, token: int) -> tuple[float, ...]:
    if not all(map(math.isfinite, numbers)):
        raise PageError("page-affine", kind, token)
    return numbers


def token_levels(page: bytes, words_at: int, lane: int, stream: StreamPlan, where: tuple[str, int]) -> dict[int, int]:
    levels: dict[int, int] = {}
    assert stream.grouping is not None
    coder = groups if stream.grouping.states == 1 else trellises
    for j, part in enumerate(groups.parts(stream.grouping, stream.substreams)):
        decoded = coder.decode(container_words(page, words_at, lane, j, stream), stream.grouping, part)
        if decoded.finding not in (None, "container-padding"):
            raise PageError(str(decoded.finding), *where)
        levels |= decoded.levels
    return levels


def container_words(page: bytes, words_at: int, lane: int, substream: int, stream: StreamPlan) -> list[int]:
    """The words of one container of the tile whose words of this kind begin at byte ``words_at``."""
    form, size = ("<H", 2) if stream.coder == "rans" else ("<I", 4)
    return [
        struct.unpack_from(form, page, words_at + ((substream * stream.words + w) * TILE + lane) * size)[0]
        for w in range(stream.words)
    ]


def _token_symbols(
    page: bytes, words_at: int, lane: int, stream: StreamPlan, dim: int, heads: int, where: tuple[str, int]
) -> list[int]:
    heads_each = heads // stream.substreams
    count = heads_each * -(-dim // stream.letter)
    symbols: list[int] = []
    for j in range(stream.substreams):
        words = container_words(page, words_at, lane, j, stream)
        decoded = DECODERS[stream.coder](words, count, tuple(stream.frequencies.tolist()), stream.precision)
        if decoded.finding not in (None, "container-padding"):
            raise PageError(str(decoded.finding), *where)
        assert decoded.letters is not None
        symbols += unpack(decoded.letters, dim, stream.levels, stream.letter)
    return symbols
