"""The ``prefix`` coder: a length-limited canonical prefix code, 32-bit words (specification, clause 6.3).

A letter of frequency ``f = 2**(p - length)`` has a code of ``length`` bits.  Codes are canonical (ordered by length,
then by letter) and written first bit first from bit 1 of word 0 on, least significant bits first; bit 0 of word 0 is a
zero pad, so that a decoder can address a table of 2-byte entries with the window itself.  A decoder looks at the next
``p`` bits: they index the table of all codes and what may follow them.

Lengths are integers and there is no state, so costs add up exactly and any number of sub-streams is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from . import plain_steps
from .kernels import COMPILED, inlined, kernel, read_only
from .letters import FIELD_BITS, by_token, letter_table, spread_fields
from .plan import StreamPlan
from .profile import TILE
from .status import OVERRUN, PADDING
from .tables import code_lengths
from .vector_step import LANES, WIDTH, Step
from .vectors import turn_words

# A window entry is uint16: code length in bits 0-3, the letter's symbols as fields in bits 4-15.
LENGTH_BITS = 4
assert LENGTH_BITS + FIELD_BITS <= 16

_I64 = ir.IntType(64)


@dataclass(frozen=True, eq=False)
class PrefixTable:
    """``codes`` uint32 ``[letters]``: ``length << 16 | bits`` (first bit lowest).  ``window`` uint16 ``[2**p]``."""

    codes: NDArray[np.uint32]
    window: NDArray[np.uint16]


@lru_cache(maxsize=64)
def prefix_table(plan: StreamPlan) -> PrefixTable:
    fields = letter_table(plan, plan.letter).fields
    return PrefixTable(*canonical(code_lengths(plan.frequencies, plan.precision), plan.precision, fields))


def canonical(
    lengths: NDArray[np.uint8], precision: int, fields: NDArray[Any]
) -> tuple[NDArray[np.uint32], NDArray[np.uint16]]:
    """Codes by letter and a window by the next ``precision`` bits, as in :class:`PrefixTable`, of a complete code."""
    codes = np.zeros(len(lengths), np.uint32)
    window = np.zeros(1 << precision, np.uint16)
    following = 0
    for letter in np.lexsort((np.arange(len(lengths)), lengths)):
        length = int(lengths[letter])
        # `following` counts in units of 2**-p, so its top `length` bits are the canonical code.
        code = following >> (precision - length)
        reversed_code = int(f"{code:0{length}b}"[::-1], 2)
        codes[letter] = length << 16 | reversed_code
        window[reversed_code :: 1 << length] = int(fields[letter]) << LENGTH_BITS | length
        following += 1 << (precision - length)
    return codes, window


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
    streams = stream_room(plan, letters)
    decode_tiles(
        read_only(words.reshape(-1)), tiles, levels.reshape(-1), status, streams, streams.view(np.uint8),
        *decode_steps(plan, head_dim, letters, strict),
    )  # fmt: skip
    return levels, status


@lru_cache(maxsize=1024)
def decode_steps(plan: StreamPlan, head_dim: int, letters: int, strict: bool = False) -> tuple[Any, ...]:
    """What :func:`decode_tiles` takes after its arrays."""
    return (
        plan.substreams, plan.words, prefix_table(plan).window, plan.precision, letters,
        letter_table(plan, head_dim).field_bits, plan.letter, head_dim, strict,
    )  # fmt: skip


def stream_room(plan: StreamPlan, letters: int) -> NDArray[np.uint32]:
    """Zeros for 32 streams of ``letters`` letters, one after another.

    No code is longer than ``precision`` bits: room up to the longest possible stream, and one read more, confines every
    read of any words without a check in the loop.
    """
    return np.zeros(stream_words(plan, letters), np.uint32)


def stream_words(plan: StreamPlan, letters: int) -> int:
    """The size of :func:`stream_room`."""
    longest = max(plan.words, (letters * plan.precision + 1) // 32 + 1) + 2
    return TILE * (-(-longest // WIDTH) * WIDTH)


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


# A read of 64 bits from a byte on holds at least this many of a stream: enough for four letters of 14 bits.
READ_BITS = 57
LOCKSTEP = 8


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
def stream_status(streams, first, bit, capacity, strict):
    """The status of a stream of ``capacity`` words whose last code ended at ``bit``."""
    if bit > 32 * capacity:
        return OVERRUN
    if strict:
        if streams[first] & np.uint32(1):
            return PADDING
        if bit & 31 and streams[first + (bit >> 5)] >> np.uint32(bit & 31):
            return PADDING
        for word in range((bit + 31) >> 5, capacity):
            if streams[first + word] != 0:
                return PADDING
    return 0


def _take(count: int) -> Callable[..., Any]:
    @intrinsic
    def take(_context: Any, stream: Any, ends: Any, window: Any, base: Any, mask: Any, entries: Any, place: Any) -> Any:
        """``count`` letters of eight lanes in lockstep, which hides the latency of the table.

        ``ends`` uint64 ``[8]`` says at which bit of ``stream`` uint8 a lane has arrived; entries, from the table that
        begins at ``base`` of ``window``, go to ``place``, and those of the next letter to the next row.
        """

        def generate(*call: Any) -> Any:
            step = Step(*call)
            build = step.builder
            _, _, _, base, mask, _, place = step.arguments
            lanes = range(LOCKSTEP)
            place_of = [ir.Constant(_I64, lane) for lane in lanes]
            ends = [step.scalar(1, place_of[lane]) for lane in lanes]
            bits = [
                build.lshr(step.bits(0, build.lshr(end, ir.Constant(_I64, 3))), build.and_(end, ir.Constant(_I64, 7)))
                for end in ends
            ]
            for k in range(count):
                for lane in lanes:
                    entry = step.scalar(2, build.add(base, build.and_(bits[lane], mask)))
                    step.store(entry, 5, step.offset(place, LANES * k + lane))
                    length = build.and_(build.zext(entry, _I64), ir.Constant(_I64, (1 << LENGTH_BITS) - 1))
                    bits[lane], ends[lane] = build.lshr(bits[lane], length), build.add(ends[lane], length)
            for lane in lanes:
                step.store(ends[lane], 1, place_of[lane])
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(stream, ends, window, i64, i64, entries, i64), generate

    return take


take_one, take_four = _take(1), _take(4)


def _walk(count: int) -> Callable[..., Any]:
    @intrinsic
    def walk(
        _context: Any, stream: Any, ends: Any, window: Any, base: Any, mask: Any, entries: Any, place: Any, states: Any,
        precision: Any, down: Any,
    ) -> Any:  # fmt: skip
        """As ``take``, where every state has a window of ``2**precision`` entries, one after another.

        ``states`` int64 ``[8]`` says in which state a lane is; the next one stands in an entry from bit ``down`` on.
        """

        def generate(*call: Any) -> Any:
            step = Step(*call)
            build = step.builder
            _, _, _, base, mask, _, place, _, precision, down = step.arguments
            lanes = range(LOCKSTEP)
            place_of = [ir.Constant(_I64, lane) for lane in lanes]
            ends = [step.scalar(1, place_of[lane]) for lane in lanes]
            states = [step.scalar(7, place_of[lane]) for lane in lanes]
            bits = [
                build.lshr(step.bits(0, build.lshr(end, ir.Constant(_I64, 3))), build.and_(end, ir.Constant(_I64, 7)))
                for end in ends
            ]
            for k in range(count):
                for lane in lanes:
                    first = build.add(base, build.shl(states[lane], precision))
                    entry = step.scalar(2, build.add(first, build.and_(bits[lane], mask)))
                    step.store(entry, 5, step.offset(place, LANES * k + lane))
                    entry = build.zext(entry, _I64)
                    length = build.and_(entry, ir.Constant(_I64, (1 << LENGTH_BITS) - 1))
                    states[lane] = build.lshr(entry, down)
                    bits[lane], ends[lane] = build.lshr(bits[lane], length), build.add(ends[lane], length)
            for lane in lanes:
                step.store(ends[lane], 1, place_of[lane])
                step.store(states[lane], 7, place_of[lane])
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(stream, ends, window, i64, i64, entries, i64, states, i64, i64), generate

    return walk


walk_one, walk_four = _walk(1), _walk(4)
if not COMPILED:
    plain_steps.replace_steps(globals())


@kernel
def decode_tiles(
    words,
    tiles,
    levels,
    status,
    streams,
    stream,
    substreams,
    capacity,
    window,
    precision,
    letters,
    field_bits,
    letter,
    head_dim,
    strict,
):
    mask = (1 << precision) - 1
    lanes = LANES
    size = levels.shape[0] // (tiles * substreams)
    stride = streams.shape[0] // lanes
    ends = np.empty(LOCKSTEP, np.uint64)
    used = np.empty(lanes, np.int64)
    entries = np.empty(letters * lanes, np.uint16)
    fours = letters // 4 * 4 if 4 * precision <= READ_BITS else 0
    for tile in range(tiles):
        for j in range(substreams):
            load_streams(words, (tile * substreams + j) * capacity * lanes, capacity, streams, stride)
            for lane in range(0, lanes, LOCKSTEP):
                for k in range(LOCKSTEP):
                    ends[k] = np.uint64(32 * stride * (lane + k) + 1)
                for i in range(0, fours, 4):
                    take_four(stream, ends, window, 0, mask, entries, i * lanes + lane)
                for i in range(fours, letters):
                    take_one(stream, ends, window, 0, mask, entries, i * lanes + lane)
                for k in range(LOCKSTEP):
                    used[lane + k] = np.int64(ends[k]) - 32 * stride * (lane + k)
            spread_fields(entries, 4, field_bits, letter, head_dim, levels, (tile * substreams + j) * size)
            for lane in range(lanes):
                status[tile, j, lane] = stream_status(streams, lane * stride, used[lane], capacity, strict)
