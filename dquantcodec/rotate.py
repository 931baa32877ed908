"""Rotation: random signs, then an orthonormal Hadamard transform over each head (paper, section 3.2).

A head of ``D`` values is cut into blocks whose orders are ``2**a * r`` with ``r`` in 1, 3, 5, 7, 9, 11, 15
(specification, clause 6.5).  A block is the Kronecker product of a Paley matrix of order ``4r`` (none for ``r = 1``)
and Sylvester's power-of-two matrix, so every entry is +1 or -1 and only additions and subtractions occur before the
last multiplication by ``1/sqrt(order)``: fused multiply-add cannot change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel
from .vector_step import LANES, WIDTH
from .vectors import (
    butterfly2,
    butterfly4,
    butterfly8,
    copy_row,
    dot_four,
    turn_tokens_in,
    turn_tokens_out,
)

#: Odd factors of admissible block orders and the prime of the Paley matrix of order 4r; I: q + 1, II: 2(q + 1).
PALEY = {3: (11, "I"), 5: (19, "I"), 7: (13, "II"), 9: (17, "II"), 11: (43, "I"), 15: (59, "I")}

_GOLDEN = 0x9E3779B97F4A7C15


def random_signs(kv_heads: int, head_dim: int, seed: int = 0) -> NDArray[np.int8]:
    """Signs int8 ``[kv_heads, head_dim]``: the top bits of SplitMix64 from ``seed``; a set bit is -1.

    >>> random_signs(1, 8).tolist()
    [[-1, 1, 1, -1, 1, 1, 1, -1]]
    """
    counter = np.arange(1, kv_heads * head_dim + 1, dtype=np.uint64)
    z = counter * np.uint64(_GOLDEN) + np.uint64(seed)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return np.where(z >> np.uint64(63), -1, 1).astype(np.int8).reshape(kv_heads, head_dim)


def odd_factor(order: int) -> int | None:
    """``r`` of an admissible block order ``2**a * r``, or None."""
    odd = order // (order & -order)
    if odd == 1:
        return 1
    return odd if odd in PALEY and order % 4 == 0 else None


@lru_cache(maxsize=256)
def block_orders(head_dim: int) -> tuple[int, ...]:
    """Orders of the blocks a head is cut into: greedily the largest admissible order that still fits.

    >>> block_orders(128), block_orders(80), block_orders(100)
    ((128,), (80,), (96, 4))
    """
    orders = []
    rest = head_dim
    while rest:
        order = next(o for o in range(rest, 0, -1) if odd_factor(o) is not None)
        orders.append(order)
        rest -= order
    return tuple(orders)


@lru_cache(maxsize=16)
def paley_matrix(odd: int) -> NDArray[np.float32]:
    """The Hadamard matrix of order ``4 * odd`` (order 1 for ``odd = 1``), entries +1 and -1 as float32."""
    if odd == 1:
        return np.ones((1, 1), np.float32)
    q, construction = PALEY[odd]
    squares = {i * i % q for i in range(1, q)}
    character = np.array([0] + [1 if i in squares else -1 for i in range(1, q)])
    index = np.arange(q)
    jacobsthal = character[(index[None, :] - index[:, None]) % q]
    core = np.zeros((q + 1, q + 1), int)
    core[0, 1:] = 1
    core[1:, 1:] = jacobsthal
    if construction == "I":
        core[1:, 0] = -1
        matrix = core + np.eye(q + 1, dtype=int)
    else:
        core[1:, 0] = 1
        plus, minus = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
        matrix = np.kron(core, plus) + np.kron(np.eye(q + 1, dtype=int), minus)
    result = matrix.astype(np.float32)
    result.setflags(write=False)
    return result


@dataclass(frozen=True, eq=False)
class Transform:
    """The blocks of a head, in the form kernels take.

    blocks
        int64 ``[blocks, 4]``: start, order, order of the Paley factor, where its matrix begins in ``matrices``.
    matrices, transposed
        float32, the Paley matrices end to end, for the forward and for the inverse transform.
    scales
        float32 ``[D]``: ``1 / sqrt(order)`` of the block a value belongs to.
    """

    blocks: NDArray[np.int64]
    matrices: NDArray[np.float32]
    transposed: NDArray[np.float32]
    scales: NDArray[np.float32]


@lru_cache(maxsize=64)
def transform(head_dim: int) -> Transform:
    """The Hadamard transform of a head of ``head_dim`` values."""
    blocks, matrices = [], []
    start = at = 0
    for order in block_orders(head_dim):
        matrix = paley_matrix(odd_factor(order) or 1)
        blocks.append((start, order, len(matrix), at))
        matrices.append(matrix)
        start += order
        at += matrix.size
    return Transform(
        blocks=np.array(blocks, np.int64),
        matrices=np.concatenate([m.reshape(-1) for m in matrices]),
        transposed=np.concatenate([m.T.reshape(-1) for m in matrices]),
        scales=np.concatenate([np.full(order, 1 / np.sqrt(order), np.float32) for _, order, _, _ in blocks]),
    )


@lru_cache(maxsize=64)
def stream_scales(head_dim: int, heads: int) -> NDArray[np.float32]:
    """:attr:`Transform.scales` of all heads, one after another."""
    return np.tile(transform(head_dim).scales, heads)


def rotate(
    values: NDArray[np.float32], signs: NDArray[np.int8], out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """``H (signs * values) / sqrt(order)`` for every head.

    ``values`` float32 ``[T, H, D]``, ``signs`` int8 ``[H, D]``; returns a float32 array of the same shape: a new one,
    or ``out``, which may be ``values``.
    """
    rotated = np.empty(values.shape, np.float32) if out is None else out
    plan = transform(values.shape[2])
    scales = stream_scales(values.shape[2], len(signs))
    before = signs.astype(np.float32).reshape(-1)
    turn_tokens(values.reshape(-1), values.shape, before, plan.blocks, plan.matrices, scales, rotated.reshape(-1))
    return rotated


def unrotate(rotated: NDArray[np.float32], signs: NDArray[np.int8]) -> NDArray[np.float32]:
    """The inverse of :func:`rotate`, in the order of operations that the specification fixes (clause 6.5)."""
    values = np.empty(rotated.shape, np.float32)
    plan = transform(rotated.shape[2])
    before = np.ones(signs.size, np.float32)
    after = (plan.scales * signs.astype(np.float32)).reshape(-1)
    turn_tokens(rotated.reshape(-1), rotated.shape, before, plan.blocks, plan.transposed, after, values.reshape(-1))
    return values


@kernel
def turn_tokens(values, shape, before, blocks, matrices, after, out):
    """``out = after * (transform of (before * values))`` per token and head.

    Arrays are flat: ``values`` and ``out``, which may be the same, are ``[T, H, D]`` = ``shape``, factors ``[H, D]``.
    (Numba compiles a function of its own for every reshape in a kernel.)
    """
    tokens, heads, dim = shape
    columns = np.zeros(dim * LANES, np.float32)
    for first in range(0, tokens, LANES):
        lanes = min(LANES, tokens - first)
        for h in range(heads):
            load_columns(values, heads, dim, first, h, lanes, before, columns)
            hadamard_columns(columns, blocks, matrices)
            store_columns(columns, after, out, heads, dim, first, h, lanes)


# One head of up to 32 tokens side by side is float32 ``[D * 32]``, lanes (tokens) fastest: every step of the transform
# is a vector step.  Whole blocks of WIDTH tokens and channels are turned in registers, what is left one by one.


@inlined
def load_columns(values, heads, dim, first, h, lanes, factor, columns):
    for lane in range(0, lanes, WIDTH):
        at = ((first + lane) * heads + h) * dim
        whole = dim // WIDTH * WIDTH if lane + WIDTH <= lanes else 0
        for d in range(0, whole, WIDTH):
            turn_tokens_in(values, at + d, heads * dim, factor, h * dim + d, columns, d * LANES + lane, LANES)
        for k in range(lane, min(lane + WIDTH, lanes)):
            for d in range(whole, dim):
                value = values[((first + k) * heads + h) * dim + d]
                columns[d * LANES + k] = value * factor[h * dim + d]


@inlined
def store_columns(columns, factor, out, heads, dim, first, h, lanes):
    """The inverse of :func:`load_columns`."""
    for lane in range(0, lanes, WIDTH):
        to = ((first + lane) * heads + h) * dim
        whole = dim // WIDTH * WIDTH if lane + WIDTH <= lanes else 0
        for d in range(0, whole, WIDTH):
            turn_tokens_out(columns, d * LANES + lane, LANES, factor, h * dim + d, out, to + d, heads * dim)
        for k in range(lane, min(lane + WIDTH, lanes)):
            for d in range(whole, dim):
                out[((first + k) * heads + h) * dim + d] = columns[d * LANES + k] * factor[h * dim + d]


@inlined
def hadamard_columns(columns, blocks, matrices):
    """In place on ``columns``, not yet scaled.

    Butterflies run h = 1, 2, 4, ... as the specification has them; up to three of them share a pass over memory.
    """
    for b in range(blocks.shape[0]):
        start, order, size, at = blocks[b, 0], blocks[b, 1], blocks[b, 2], blocks[b, 3]
        end = start + order
        run = order // size
        h = 1
        while 8 * h <= run:
            for i in range(start, end, 8 * h):
                for j in range(i, i + h):
                    butterfly8(columns, j * LANES, h * LANES)
            h *= 8
        if 4 * h <= run:
            for i in range(start, end, 4 * h):
                for j in range(i, i + h):
                    butterfly4(columns, j * LANES, h * LANES)
            h *= 4
        if 2 * h <= run:
            for i in range(start, end, 2 * h):
                for j in range(i, i + h):
                    butterfly2(columns, j * LANES, h * LANES)
        if size > 1:
            paley_columns(columns, start, run, size, matrices, at)


@inlined
def paley_columns(columns, start, run, size, matrices, at):
    """The Paley factor of one block: ``run`` products of a matrix with rows that stand ``run`` apart."""
    # Orders of Paley factors are at most 60 and multiples of four; the row behind them stays zero.
    scratch = np.zeros(61 * LANES, np.float32)
    for c in range(start, start + run):
        for i in range(size):
            copy_row(columns, (c + i * run) * LANES, scratch, i * LANES)
        # Sums run in ascending order from zero, as the specification has them; products with +1 and -1 are exact.
        for i in range(size):
            copy_row(scratch, 60 * LANES, columns, (c + i * run) * LANES)
            for k in range(0, size, 4):
                dot_four(matrices, at + i * size + k, scratch, k * LANES, columns, (c + i * run) * LANES)
