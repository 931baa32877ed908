"""The ``rans`` coder: one 32-bit state per sub-stream, 16-bit words (paper, section 3.1; specification, clause 6.2).

State ``x`` stays in ``[2**16, 2**32)`` between letters.  The encoder runs backwards from ``x = 2**16`` and writes its
last state first, so the decoder runs forwards and must end at ``2**16``: an integrity check that costs nothing.

    encode letter (f, c):  while x >= f * 2**(32 - p): emit low 16 bits, x >>= 16;   x = (x // f) * 2**p + x % f + c
    decode:                slot = x mod 2**p;   x = f * (x >> p) + slot - c;   if x < 2**16: x = x * 2**16 + word

With ``p <= 15`` one word per letter is always enough in both directions.

Container: word 0 and 1 are the state (high half first), then the words in the order the decoder asks for them; what is
left over is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel, read_only
from .letters import by_token, letter_table, spread_fields
from .plan import StreamPlan
from .profile import TILE
from .rans_steps import pair_rows, pop_one, pop_two
from .status import OVERRUN, PADDING, STATE
from .vector_step import LANES


@dataclass(frozen=True, eq=False)
class RansTable:
    """For the encoder, per letter: ``step`` uint32 ``f << 16 | c``, and ``reciprocal`` uint64 ``2**(32 + p) / f``,
    rounded up.

    ``x * reciprocal >> (32 + p)`` is ``x // f`` for every state below ``f * 2**(32 - p)``: the rounding adds less
    than ``x / 2**(32 + p) < 1 / f`` to the quotient, and the product stays below 2**64 because ``f < 2**p``.
    For the decoder, per slot: ``advance`` uint32 ``[2**p]``: ``f << 16 | slot - c``, and ``fields`` uint16
    ``[2**p]``: the letter's symbols.
    """

    step: NDArray[np.uint32]
    reciprocal: NDArray[np.uint64]
    advance: NDArray[np.uint32]
    fields: NDArray[np.uint16]


@lru_cache(maxsize=64)
def rans_table(plan: StreamPlan) -> RansTable:
    f = plan.frequencies.astype(np.uint32)
    cumulative = np.cumsum(f, dtype=np.uint32) - f
    letter_of = np.repeat(np.arange(len(f)), f)
    slots = np.arange(1 << plan.precision, dtype=np.uint32)
    return RansTable(
        step=(f << np.uint32(16)) | cumulative,
        reciprocal=np.array([-(-(1 << 32 + plan.precision) // int(v)) for v in f], np.uint64),
        advance=(f[letter_of] << np.uint32(16)) | (slots - cumulative[letter_of]),
        fields=letter_table(plan, plan.letter).fields[letter_of],
    )


def encode(letters: NDArray[np.uint16], plan: StreamPlan) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Tile words of letters uint16 ``[T, S, L]``.

    Returns words uint16 ``[tiles, S, words, 32]`` (unused lanes zero) and the words each stream needed, int32
    ``[T, S]``.  A stream that needed more than ``plan.words`` is left zero: the caller must shorten it.
    """
    tokens, substreams, _ = letters.shape
    words = np.zeros((-(-tokens // TILE), substreams, plan.words, TILE), np.uint16)
    used = np.empty((tokens, substreams), np.int32)
    table = rans_table(plan)
    encode_tiles(letters, table.step, table.reciprocal, plan.precision, words, used)
    return words, used


def decode(
    words: NDArray[np.uint16], plan: StreamPlan, head_dim: int, letters: int, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Symbols uint8 ``[32 * tiles, n]`` and a status uint8 ``[32 * tiles, S]`` of tile words.

    ``letters`` counts the letters of one sub-stream.  Any words are safe: a stream that does not check out has a
    status other than zero (see :mod:`dquantcodec.status`) and symbols in range.  ``strict`` also checks that
    unneeded words are zero.
    """
    levels, status = decode_levels(words, plan, head_dim, letters, strict)
    return by_token(levels), by_token(status)


def decode_levels(
    words: NDArray[np.uint16], plan: StreamPlan, head_dim: int, letters: int, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """As :func:`decode`, but laid out as it is decoded: levels ``[tiles, n, 32]``, status ``[tiles, S, 32]``."""
    tiles, substreams = words.shape[:2]
    letter = letter_table(plan, head_dim)
    levels = np.empty((tiles, substreams * letters // letter.per_head * head_dim, TILE), np.uint8)
    status = np.empty((tiles, substreams, TILE), np.uint8)
    decode_tiles(
        read_only(words).reshape(-1), levels.reshape(-1), status.reshape(-1),
        *decode_steps(plan, head_dim, letters, strict),
    )  # fmt: skip
    return levels, status


@lru_cache(maxsize=1024)
def decode_steps(plan: StreamPlan, head_dim: int, letters: int, strict: bool = False) -> tuple[Any, ...]:
    """What :func:`decode_tiles` takes after its arrays."""
    table, letter = rans_table(plan), letter_table(plan, head_dim)
    return (
        plan.words, table.advance, table.fields, plan.precision, letters, letter.field_bits, plan.letter, head_dim,
        strict,
    )  # fmt: skip


@inlined
def push_letter(x, step, reciprocal, p, pending, at):
    """The state after one more letter, and where the next word goes; a word is kept only if the index moves on."""
    f = np.uint32(step >> np.uint32(16))
    pending[at] = np.uint16(x & np.uint32(0xFFFF))
    # x >= f * 2**(32 - p), without its overflow.
    full = np.uint32(x >> (np.uint32(32) - p)) >= f
    at = at + 1 if full else at
    x = np.uint32(x >> np.uint32(16)) if full else x
    q = np.uint32((np.uint64(x) * reciprocal) >> np.uint64(np.uint32(32) + p))
    return np.uint32(x + np.uint32(q * np.uint32((np.uint32(1) << p) - f)) + (step & np.uint32(0xFFFF))), at


@kernel
def encode_tiles(letters, step, reciprocal, precision, words, used):
    p = np.uint32(precision)
    substreams, count = letters.shape[1:]
    tile = words.shape[3]
    capacity = words.shape[2]
    streams = letters.reshape(-1, count)
    needed = used.reshape(-1)
    pending = np.empty((4, count + 1), np.uint16)
    state = np.empty(4, np.uint32)
    emitted = np.empty(4, np.int64)
    for first in range(0, streams.shape[0], 4):
        # Four streams in lockstep hide the latency of the multiplications; a short last group repeats its last one.
        last = streams.shape[0] - 1
        a, b = streams[first], streams[min(first + 1, last)]
        c, d = streams[min(first + 2, last)], streams[min(first + 3, last)]
        w = x = y = z = np.uint32(65536)
        at_w = at_x = at_y = at_z = 0
        for i in range(count - 1, -1, -1):
            e, f, g, h = a[i], b[i], c[i], d[i]
            w, at_w = push_letter(w, step[e], reciprocal[e], p, pending[0], at_w)
            x, at_x = push_letter(x, step[f], reciprocal[f], p, pending[1], at_x)
            y, at_y = push_letter(y, step[g], reciprocal[g], p, pending[2], at_y)
            z, at_z = push_letter(z, step[h], reciprocal[h], p, pending[3], at_z)
        state[0], state[1], state[2], state[3] = w, x, y, z
        emitted[0], emitted[1], emitted[2], emitted[3] = at_w, at_x, at_y, at_z
        for k in range(min(4, streams.shape[0] - first)):
            t, j = (first + k) // substreams, (first + k) % substreams
            needed[first + k] = emitted[k] + 2
            if emitted[k] + 2 <= capacity:
                column = words[t // tile, j, :, t % tile]
                column[0] = np.uint16(state[k] >> np.uint32(16))
                column[1] = np.uint16(state[k] & np.uint32(0xFFFF))
                for i in range(emitted[k]):
                    column[2 + i] = pending[k, emitted[k] - 1 - i]


@kernel
def decode_tiles(
    words, levels, status, capacity, advance, fields, precision, letters, field_bits, letter, head_dim, strict
):
    streams = status.shape[0] // LANES
    size = levels.shape[0] // max(streams, 1)
    # A letter asks for one word at most, so zero rows up to that confine every read without a check in the loop.
    # Places in them fit 32 bits: more rows would take 16 GiB.
    pairs = np.zeros(max(capacity, letters + 2) * LANES, np.uint32)
    entries = np.empty(letters * LANES, np.uint16)
    state = np.empty(LANES, np.uint32)
    at = np.empty(LANES, np.uint32)
    for stream in range(streams):
        first = stream * capacity * LANES
        for row in range(capacity - 1):
            pair_rows(words, first + row * LANES, pairs, row * LANES)
        for i in range(max(capacity - 1, 0) * LANES, capacity * LANES):
            pairs[i] = words[first + i]
        for lane in range(LANES):
            state[lane] = pairs[lane] << np.uint32(16) | pairs[lane] >> np.uint32(16)
            at[lane] = 2 * LANES + lane
        for i in range(0, letters - 1, 2):
            pop_two(state, at, pairs, advance, fields, precision, entries, i * LANES)
        if letters % 2:
            pop_one(state, at, pairs, advance, fields, precision, entries, (letters - 1) * LANES)
        spread_fields(entries, 0, field_bits, letter, head_dim, levels, stream * size)
        for lane in range(LANES):
            used = at[lane] // LANES
            verdict = 0
            if strict:
                for word in range(used, capacity):
                    if words[first + word * LANES + lane] != 0:
                        verdict = PADDING
            if state[lane] != np.uint32(65536):
                verdict = STATE
            if used > capacity:
                verdict = OVERRUN
            status[stream * LANES + lane] = verdict
