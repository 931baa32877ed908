"""The tables device code looks things up in, as NumPy arrays; :mod:`dquantcodec.cuda.codec` uploads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..drift import BIN_BITS, ladder
from ..grid import ONE
from ..letters import letter_table
from ..plan import Plan, StreamPlan, budget
from ..prefix import LENGTH_BITS, prefix_table
from ..rans import rans_table
from ..rotate import transform


@dataclass(frozen=True, eq=False)
class DecodeArrays:
    """``entries`` and ``advance`` uint32 ``[2**p]`` (the latter of no entry for prefix codes), as ``LetterTables`` has
    them, and ``factors`` float32 ``[H * D]``."""

    entries: NDArray[np.uint32]
    advance: NDArray[np.uint32]
    factors: NDArray[np.float32]


def decode_arrays(plan: Plan, stream: StreamPlan) -> DecodeArrays:
    if stream.coder == "rans":
        table = rans_table(stream)
        return DecodeArrays(_entries(table.fields, stream), table.advance, _factors(plan))
    window = prefix_table(stream).window
    fields = (window >> LENGTH_BITS).astype(np.uint16)
    lengths = window & np.uint16((1 << LENGTH_BITS) - 1)
    return DecodeArrays(_entries(fields, stream) | lengths, np.zeros(0, np.uint32), _factors(plan))


def _entries(fields: NDArray[np.uint16], stream: StreamPlan) -> NDArray[np.uint32]:
    """The symbols of letters, from their narrow fields, at the places where device code has them."""
    narrow = (stream.levels - 1).bit_length()
    wide = 6 if stream.letter == 4 else 8
    entries = np.zeros(fields.shape, np.uint32)
    for k in range(stream.letter):
        symbol = fields >> np.uint16(narrow * k) & np.uint16((1 << narrow) - 1)
        entries |= symbol.astype(np.uint32) << np.uint32(8 + wide * k)
    return entries


@dataclass(frozen=True, eq=False)
class EncodeArrays:
    """The arrays of ``EncodeParams``: the ladder and letter costs, ``codes`` uint32 ``[letters]`` (codes of the prefix
    coder, steps of rANS), ``reciprocals`` uint64 ``[letters]`` (of no entry for prefix codes) and ``factors``."""

    thresholds: NDArray[np.int32]
    edges: NDArray[np.int32]
    steps: NDArray[np.int32]
    costs: NDArray[np.uint16]
    complete: NDArray[np.int32]
    last_costs: NDArray[np.uint16]
    codes: NDArray[np.uint32]
    reciprocals: NDArray[np.uint64]
    factors: NDArray[np.float32]


def encode_arrays(plan: Plan, stream: StreamPlan) -> EncodeArrays:
    rungs, letters = ladder(stream, plan.head_dim), letter_table(stream, plan.head_dim)
    if stream.coder == "rans":
        coder = rans_table(stream)
        codes, reciprocals = coder.step, coder.reciprocal
    else:
        codes, reciprocals = prefix_table(stream).codes, np.zeros(0, np.uint64)
    return EncodeArrays(
        thresholds=rungs.thresholds,
        edges=rungs.thresholds.clip(0, ((stream.levels - 1) * ONE + (1 << BIN_BITS)) - 1),
        steps=rungs.steps,
        costs=letters.costs.astype(np.uint16),
        complete=letters.complete,
        last_costs=letters.costs[letters.complete].astype(np.uint16),
        codes=codes,
        reciprocals=reciprocals,
        factors=_factors(plan),
    )


def encode_numbers(plan: Plan, stream: StreamPlan) -> dict[str, int]:
    """The numbers of ``DriftTables`` and the budget of a sub-stream."""
    thresholds = ladder(stream, plan.head_dim).thresholds
    return {
        "rungs": thresholds.shape[0],
        "columns": thresholds.shape[1],
        "cheapest": int(stream.frequencies.argmax()),
        "budget": budget(stream),
    }


def _factors(plan: Plan) -> NDArray[np.float32]:
    """``1 / sqrt(order)`` of the block, times the sign, float32 ``[H * D]``."""
    factors: NDArray[np.float32] = (transform(plan.head_dim).scales * plan.signs.astype(np.float32)).reshape(-1)
    return factors
