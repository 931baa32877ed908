"""Letters: neighbouring symbols of one head coded in one step (specification, clause 6.1).

A head of ``D`` symbols is ``ceil(D / k)`` letters of ``k`` symbols; letters never span heads.  The places of a head's
last letter beyond ``D`` are free: the decoder drops them, and the encoder fills them with whatever makes the letter
cheapest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel
from .plan import StreamPlan
from .tables import letter_costs
from .vector_step import LANES
from .vectors import spread_row

#: Symbols of any letter fit in so many bits: ``levels**letter`` is at most 4096 and a field wastes less than a bit.
FIELD_BITS = 12


@dataclass(frozen=True, eq=False)
class LetterTable:
    """What packing, costing and unpacking letters needs, derived from a stream plan's frequencies.

    costs
        int32 ``[letters]``, 1/1024 bit, rounded up.
    complete
        int32 ``[M**r]`` for a last letter of only ``r`` real symbols: the cheapest letter that begins with them.
        Equal to the identity when heads divide evenly.
    levels_of
        uint8 ``[letters, k]``: the symbols of every letter.
    fields
        uint16 ``[letters]``: the same symbols side by side, ``field_bits`` each, first symbol lowest; at most 12 bits.
    per_head
        Letters of one head.
    """

    costs: NDArray[np.int32]
    complete: NDArray[np.int32]
    levels_of: NDArray[np.uint8]
    fields: NDArray[np.uint16]
    field_bits: int
    per_head: int


@lru_cache(maxsize=64)
def letter_table(plan: StreamPlan, head_dim: int) -> LetterTable:
    """The tables of ``plan`` for heads of ``head_dim`` symbols; among equals the lower letter is cheapest."""
    costs = letter_costs(plan.frequencies, plan.precision)
    real = head_dim % plan.letter or plan.letter
    prefixes = plan.levels**real
    # Letter id = prefix + M**real * completion, so a column of this array holds all completions of one prefix.
    by_completion = plan.frequencies.reshape(-1, prefixes)
    complete = np.arange(prefixes) + prefixes * by_completion.argmax(axis=0)
    powers = plan.levels ** np.arange(plan.letter)
    levels_of = np.arange(len(costs))[:, None] // powers % plan.levels
    field_bits = (plan.levels - 1).bit_length()
    assert field_bits * plan.letter <= FIELD_BITS
    fields = (levels_of << field_bits * np.arange(plan.letter)).sum(axis=1)
    return LetterTable(
        costs=costs,
        complete=complete.astype(np.int32),
        levels_of=levels_of.astype(np.uint8),
        fields=fields.astype(np.uint16),
        field_bits=field_bits,
        per_head=-(-head_dim // plan.letter),
    )


def pack(symbols: NDArray[np.uint8], plan: StreamPlan, head_dim: int) -> NDArray[np.uint16]:
    """Letters uint16 ``[T, letters]`` of symbols uint8 ``[T, h * D]`` (any whole number ``h`` of heads)."""
    table = letter_table(plan, head_dim)
    heads = symbols.shape[1] // head_dim
    out = np.empty((symbols.shape[0], heads * table.per_head), np.uint16)
    pack_rows(symbols, head_dim, plan.letter, plan.levels, table.complete, out)
    return out


def unpack(letters: NDArray[np.uint16], plan: StreamPlan, head_dim: int) -> NDArray[np.uint8]:
    """The inverse of :func:`pack`."""
    table = letter_table(plan, head_dim)
    symbols = table.levels_of[letters].reshape(len(letters), -1, table.per_head * plan.letter)
    return np.ascontiguousarray(symbols[:, :, :head_dim]).reshape(len(letters), -1)


def by_token(lanes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``[tiles, x, 32]`` as ``[32 * tiles, x]``: from the layout of a tile to one row per token."""
    return np.ascontiguousarray(lanes.transpose(0, 2, 1)).reshape(-1, lanes.shape[1])


@inlined
def spread_fields(entries, shift, field_bits, letter, head_dim, levels, first):
    """Levels of one sub-stream's letters, uint16 ``[letters * 32]`` with fields from bit ``shift`` on.

    ``levels`` uint8, flat, receives a row of 32 lanes for every channel, from place ``first`` on.
    """
    per_head = (head_dim + letter - 1) // letter
    mask = (1 << field_bits) - 1
    to = first
    for row in range(entries.shape[0] // LANES):
        channel = row % per_head * letter
        for k in range(min(letter, head_dim - channel)):
            spread_row(entries, row * LANES, shift + k * field_bits, mask, levels, to)
            to += LANES


@kernel
def pack_rows(symbols, head_dim, letter, levels, complete, out):
    for t in range(symbols.shape[0]):
        row_letters(symbols[t], head_dim, letter, levels, complete, out[t])


@kernel
def row_letters(symbols, head_dim, letter, levels, complete, out):
    full = head_dim // letter
    rest = head_dim - full * letter
    per_head = out.shape[0] // (symbols.shape[0] // head_dim)
    base = np.int32(levels)
    for head in range(symbols.shape[0] // head_dim):
        source = symbols[head * head_dim : (head + 1) * head_dim]
        target = out[head * per_head : (head + 1) * per_head]
        if letter == 3:
            square = base * base
            for i in range(full):
                j = 3 * i
                target[i] = np.uint16(
                    np.int32(source[j]) + base * np.int32(source[j + 1]) + square * np.int32(source[j + 2])
                )
        elif letter == 2:
            for i in range(full):
                j = 2 * i
                target[i] = np.uint16(np.int32(source[j]) + base * np.int32(source[j + 1]))
        else:
            for i in range(full):
                value = np.int32(0)
                for k in range(letter - 1, -1, -1):
                    value = value * base + np.int32(source[i * letter + k])
                target[i] = np.uint16(value)
        if rest > 0:
            value = np.int32(0)
            for k in range(rest - 1, -1, -1):
                value = value * base + np.int32(source[full * letter + k])
            target[full] = np.uint16(complete[value])
