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
from .letters import FIELD_BITS, by_token, letter_table, spread_fields
from .plan import StreamPlan
from .profile import TILE
from .status import OVERRUN, PADDING
from .tables import code_lengths
from .vectors import LANES, WIDTH, load_bits, turn_words

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
        table.field_bits, plan.letter, head_dim, strict, levels, status,
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


# A read of 64 bits from a byte on holds at least this many of a stream: enough for several letters.
READ_BITS = 57


@inlined
def load_streams(words, first, capacity, streams, stride):
    """Words ``[capacity, 32]`` of a tile, from place ``first`` on, to 32 streams ``stride`` words apart."""
    whole = capacity // WIDTH * WIDTH
    for row in range(0, whole, WIDTH):
        for lane in range(0, LANES, WIDTH):
            turn_words(words, first + row * LANES + lane, LANES, streams, lane * stride + row, stride)
    for row in range(whole, capacity):
        for lane in range(LANES):
            streams[lane * stride + row] = words[first + row * LANES + lane]


@inlined
def bits_from(stream, bit):
    return load_bits(stream, bit >> np.uint64(3)) >> (bit & np.uint64(7))


@inlined
def take_letter(bits, at, window, mask, entries, place):
    """Look up a letter, keep its entry, and step over its code."""
    entry = window[bits & mask]
    entries[place] = entry
    length = np.uint64(entry) & np.uint64(15)
    return bits >> length, at + length


@kernel
def decode_tiles(words, window, precision, letters, field_bits, letter, head_dim, strict, levels, status):
    mask = np.uint64((1 << precision) - 1)
    tiles, substreams, capacity, lanes = words.shape
    size = levels.shape[1] // substreams
    # No code is longer than `precision` bits, so a copy with zero words up to the longest possible stream, and one read
    # more, confines every read without a check in the loop.
    stride = (max(capacity, (letters * precision + 1) // 32 + 1) + 2 + WIDTH - 1) // WIDTH * WIDTH
    streams = np.zeros(lanes * stride, np.uint32)
    stream = streams.view(np.uint8)
    used = np.empty(lanes, np.uint64)
    entries = np.empty(letters * lanes, np.uint16)
    flat, out = words.reshape(-1), levels.reshape(-1)
    per_read = READ_BITS // precision
    one, row = np.uint64(1), np.uint64(lanes)
    for tile in range(tiles):
        for j in range(substreams):
            load_streams(flat, (tile * substreams + j) * capacity * lanes, capacity, streams, stride)
            # Eight lanes in lockstep hide the latency of the table.
            for lane in range(0, lanes, 8):
                place = np.uint64(lane)
                bits = np.uint64(32 * stride)
                begin = place * bits + one
                a, b, c, d = begin, begin + bits, begin + np.uint64(2) * bits, begin + np.uint64(3) * bits
                half = begin + np.uint64(4) * bits
                e, f, g, h = half, half + bits, half + np.uint64(2) * bits, half + np.uint64(3) * bits
                for first in range(0, letters, per_read):
                    s, t, u, v = bits_from(stream, a), bits_from(stream, b), bits_from(stream, c), bits_from(stream, d)
                    w, x, y, z = bits_from(stream, e), bits_from(stream, f), bits_from(stream, g), bits_from(stream, h)
                    for _ in range(min(per_read, letters - first)):
                        s, a = take_letter(s, a, window, mask, entries, place)
                        t, b = take_letter(t, b, window, mask, entries, place + np.uint64(1))
                        u, c = take_letter(u, c, window, mask, entries, place + np.uint64(2))
                        v, d = take_letter(v, d, window, mask, entries, place + np.uint64(3))
                        w, e = take_letter(w, e, window, mask, entries, place + np.uint64(4))
                        x, f = take_letter(x, f, window, mask, entries, place + np.uint64(5))
                        y, g = take_letter(y, g, window, mask, entries, place + np.uint64(6))
                        z, h = take_letter(z, h, window, mask, entries, place + np.uint64(7))
                        place += row
                ends = (a, b, c, d, e, f, g, h)
                for k in range(8):
                    used[lane + k] = ends[k] - np.uint64(lane + k) * bits
            spread_fields(entries, 4, field_bits, letter, head_dim, out, (tile * substreams + j) * size * lanes)
            for lane in range(lanes):
                bit = np.int64(used[lane])
                column = streams[lane * stride : lane * stride + capacity]
                state = 0
                if strict and bit <= 32 * capacity:
                    if column[0] & np.uint32(1):
                        state = PADDING
                    if bit & 31 and column[bit >> 5] >> np.uint32(bit & 31):
                        state = PADDING
                    for word in range((bit + 31) >> 5, capacity):
                        if column[word] != 0:
                            state = PADDING
                if bit > 32 * capacity:
                    state = OVERRUN
                status[tile, j, lane] = state
