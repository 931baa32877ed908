"""The ``prefix`` coder: a length-limited canonical prefix code, 32-bit words (specification, clause 6.3).

A letter of frequency ``f = 2**(p - length)`` has a code of ``length`` bits.  Codes are canonical (ordered by length,
then by letter) and written first bit first from bit 1 of word 0 on, least significant bits first; bit 0 of word 0 is a
zero pad, so that a decoder can address a table of 2-byte entries with the window itself.  A decoder looks at the next
``p`` bits: they index the table of all codes and what may follow them.

Lengths are integers and there is no state, so costs add up exactly and any number of sub-streams is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .kernels import inlined, kernel
from .letters import FIELD_BITS, by_token, entry_rows, entry_slot, letter_table, spread_fields
from .plan import StreamPlan
from .profile import TILE
from .status import OVERRUN, PADDING
from .tables import code_lengths

# A window entry is uint16: code length in bits 0-3, the letter's symbols as fields in bits 4-15.
LENGTH_BITS = 4
assert LENGTH_BITS + FIELD_BITS <= 16


@dataclass(frozen=True, eq=False)
class PrefixTable:
    """``codes`` uint32 ``[letters]``: ``length << 16 | bits`` (first bit lowest).  ``window`` uint16 ``[2**p]``."""

    codes: NDArray[np.uint32]
    window: NDArray[np.uint16]


@lru_cache(maxsize=64)
def prefix_table(plan: StreamPlan) -> PrefixTable:
    p = plan.precision
    fields = letter_table(plan, plan.letter).fields
    lengths = code_lengths(plan.frequencies, p).astype(int)
    order = np.lexsort((np.arange(len(lengths)), lengths))
    codes = np.zeros(len(lengths), np.uint32)
    window = np.zeros(1 << p, np.uint16)
    following = 0
    for letter in order:
        length = int(lengths[letter])
        # `following` counts in units of 2**-p, so its top `length` bits are the canonical code.
        code = following >> (p - length)
        reversed_code = int(f"{code:0{length}b}"[::-1], 2)
        codes[letter] = length << 16 | reversed_code
        window[reversed_code :: 1 << length] = int(fields[letter]) << LENGTH_BITS | length
        following += 1 << (p - length)
    return PrefixTable(codes, window)


def encode(letters: NDArray[np.uint16], plan: StreamPlan) -> tuple[NDArray[np.uint32], NDArray[np.int32]]:
    """Tile words of letters uint16 ``[T, S, L]``.

    Returns words uint32 ``[tiles, S, words, 32]`` (unused lanes zero) and the words each stream needed, int32
    ``[T, S]``.  A stream that needed more than ``plan.words`` is left zero: the caller must shorten it.
    """
    tokens, substreams, _ = letters.shape
    words = np.zeros((-(-tokens // TILE), substreams, plan.words, TILE), np.uint32)
    used = np.empty((tokens, substreams), np.int32)
    encode_tiles(letters, prefix_table(plan).codes, words, used)
    return words, used


def decode(
    words: NDArray[np.uint32], plan: StreamPlan, head_dim: int, letters: int, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Symbols uint8 ``[32 * tiles, n]`` and a status uint8 ``[32 * tiles, S]`` of tile words.

    ``letters`` counts the letters of one sub-stream.  Any words are safe: a stream that does not check out has a
    status other than zero (see :mod:`dquantcodec.status`) and symbols in range.  ``strict`` also checks that
    unneeded bits are zero.
    """
    levels, status = decode_levels(words, plan, head_dim, letters, strict)
    return by_token(levels), by_token(status)


def decode_levels(
    words: NDArray[np.uint32], plan: StreamPlan, head_dim: int, letters: int, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """As :func:`decode`, but laid out as it is decoded: levels ``[tiles, n, 32]``, status ``[tiles, S, 32]``."""
    tiles, substreams = words.shape[:2]
    table = letter_table(plan, head_dim)
    levels = np.empty((tiles, substreams * letters // table.per_head * head_dim, TILE), np.uint8)
    status = np.empty((tiles, substreams, TILE), np.uint8)
    decode_tiles(
        words, prefix_table(plan).window, plan.precision, letters,
        table.field_bits, plan.letter, head_dim, strict, *entry_rows(letters), levels, levels.view(np.uint64), status,
    )  # fmt: skip
    return levels, status


@kernel
def encode_tiles(letters, codes, words, used):
    tile = np.int64(words.shape[3])
    capacity = np.int64(words.shape[2])
    count = letters.shape[2]
    for t in range(letters.shape[0]):
        for j in range(letters.shape[1]):
            bits = np.int64(1)
            for i in range(count):
                bits += np.int64(codes[letters[t, j, i]] >> np.uint32(16))
            needed = (bits + 31) // 32
            used[t, j] = needed
            if needed > capacity:
                continue
            column = words[t // tile, j, :, t % tile]
            pending = np.uint64(0)
            held = np.uint64(1)
            at = 0
            for i in range(count):
                code = codes[letters[t, j, i]]
                pending |= np.uint64(code & np.uint32(0xFFFF)) << held
                held += np.uint64(code >> np.uint32(16))
                if held >= np.uint64(32):
                    column[at] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                    at += 1
                    pending >>= np.uint64(32)
                    held -= np.uint64(32)
            if held > np.uint64(0):
                column[at] = np.uint32(pending)


@inlined
def bits_from(flat, lane, bit):
    """At least 33 bits of a lane's stream from ``bit`` on, the next one lowest: enough for two letters."""
    at = lane + (bit & ~np.uint64(31))  # row bit // 32 of 32 words
    both = (np.uint64(flat[at + np.uint64(32)]) << np.uint64(32)) | np.uint64(flat[at])
    return both >> (bit & np.uint64(31))


@kernel
def decode_tiles(
    words, window, precision, letters, field_bits, letter, head_dim, strict, entries, pairs, levels, bytes_, status
):
    mask = np.uint64((1 << precision) - 1)
    length = np.uint64(15)
    tiles, substreams, capacity, lanes = words.shape
    size = levels.shape[1] // substreams
    # No code is longer than `precision` bits, so a copy with zero rows up to the longest possible stream confines
    # every read without a check in the loop.
    rows = np.zeros((max(capacity, (letters * precision + 1) // 32 + 1) + 2, 32), np.uint32)
    flat = rows.reshape(-1)
    used = np.empty(32, np.uint64)
    for tile in range(tiles):
        for j in range(substreams):
            for row in range(capacity):
                for lane in range(lanes):
                    rows[row, lane] = words[tile, j, row, lane]
            # Four lanes in lockstep hide the latency of the table; two letters share a read of the stream.
            for lane in range(0, lanes, 4):
                a, b, c, d = np.uint64(lane), np.uint64(lane + 1), np.uint64(lane + 2), np.uint64(lane + 3)
                o, x, y, z = entry_slot(a), entry_slot(b), entry_slot(c), entry_slot(d)
                p = q = r = s = np.uint64(1)
                for i in range(0, letters - 1, 2):
                    first, second = entries[i], entries[i + 1]
                    t, u = bits_from(flat, a, p), bits_from(flat, b, q)
                    v, w = bits_from(flat, c, r), bits_from(flat, d, s)
                    e, f, g, h = window[t & mask], window[u & mask], window[v & mask], window[w & mask]
                    first[o], first[x], first[y], first[z] = e, f, g, h
                    e, f, g, h = e & length, f & length, g & length, h & length
                    p, q, r, s = p + e, q + f, r + g, s + h
                    e, f = window[(t >> e) & mask], window[(u >> f) & mask]
                    g, h = window[(v >> g) & mask], window[(w >> h) & mask]
                    second[o], second[x], second[y], second[z] = e, f, g, h
                    p, q, r, s = p + (e & length), q + (f & length), r + (g & length), s + (h & length)
                if letters & 1:
                    last = entries[letters - 1]
                    e, f = window[bits_from(flat, a, p) & mask], window[bits_from(flat, b, q) & mask]
                    g, h = window[bits_from(flat, c, r) & mask], window[bits_from(flat, d, s) & mask]
                    last[o], last[x], last[y], last[z] = e, f, g, h
                    p, q, r, s = p + (e & length), q + (f & length), r + (g & length), s + (h & length)
                used[lane], used[lane + 1], used[lane + 2], used[lane + 3] = p, q, r, s
            spread_fields(pairs, 4, field_bits, letter, head_dim, bytes_[tile], j * size)
            for lane in range(lanes):
                bit = np.int64(used[lane])
                state = 0
                if strict and bit <= 32 * capacity:
                    if rows[0, lane] & np.uint32(1):
                        state = PADDING
                    if bit & 31 and rows[bit >> 5, lane] >> np.uint32(bit & 31):
                        state = PADDING
                    for row in range((bit + 31) >> 5, capacity):
                        if rows[row, lane] != 0:
                            state = PADDING
                if bit > 32 * capacity:
                    state = OVERRUN
                status[tile, j, lane] = state
