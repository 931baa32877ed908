"""The prefix coder for grouped streams: every group has a table of its own choice (specification, clause 6.6).

Bits, words and codes are those of :mod:`dquantcodec.prefix`; letters of a group take the table of the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .group_arrays import group_arrays
from .group_grid import letter_levels
from .grouping import MAX_GROUP_LETTERS, Grouping
from .kernels import kernel, read_only
from .letter_paths import letter_paths
from .letters import FIELD_BITS, by_token
from .plan import StreamPlan
from .prefix import (
    LENGTH_BITS,
    LOCKSTEP,
    READ_BITS,
    canonical,
    load_streams,
    stream_room,
    stream_status,
    take_four,
    take_one,
    walk_four,
    walk_one,
)
from .profile import TILE
from .trellis import state_bits
from .vector_step import LANES
from .vectors import fill_row, spread_row

# Codes of a group's table are at most 14 bits long, so four letters always fit one read.
assert READ_BITS >= 4 * 14


@dataclass(frozen=True, eq=False)
class GroupTables:
    """Of all tables, one after another, each state by state: ``codes`` uint32 by letter, ``window`` uint16 by the next
    ``p`` bits.

    ``window_first``, ``precision`` int64 ``[tables]``: where the windows of a table begin, and its ``p``.
    """

    codes: NDArray[np.uint32]
    window: NDArray[np.uint16]
    window_first: NDArray[np.int64]
    precision: NDArray[np.int64]


@lru_cache(maxsize=1024)
def group_tables(grouping: Grouping) -> GroupTables:
    arrays = group_arrays(grouping)
    states = grouping.states
    levels = letter_levels(grouping).astype(np.int64)
    codes, windows = [], []
    for number, (table, first, count) in enumerate(zip(grouping.tables, arrays.first, arrays.letters)):
        classes = [grouping.classes[c] for c in table.classes]
        used, all_letters = len(classes), slice(first, first + states * count)
        middle = np.array([c.middle for c in classes])
        fields = ((levels[all_letters, :used] + middle) << arrays.shifts[number, :used]).sum(axis=1)
        # The state that follows a letter stands above its fields.
        _, _, following = letter_paths([c.most for c in classes], [bool(c.second) for c in classes], states)
        room = FIELD_BITS - state_bits(states)
        assert int(fields.max()) < 1 << room
        fields += following.reshape(-1) << room
        for lengths, entries in zip(arrays.lengths[all_letters].reshape(states, -1), fields.reshape(states, -1)):
            code, window = canonical(lengths, table.precision, entries)
            codes.append(code)
            windows.append(window)
    precision = np.array([table.precision for table in grouping.tables], np.int64)
    sizes = states << precision
    return GroupTables(np.concatenate(codes), np.concatenate(windows), np.cumsum(sizes) - sizes, precision)


def encode(letters: NDArray[np.uint16], plan: StreamPlan) -> NDArray[np.uint32]:
    """Tile words uint32 ``[tiles, S, words, 32]`` of letters uint16 ``[T, letters]``, which must fit."""
    assert plan.grouping is not None
    arrays = group_arrays(plan.grouping)
    words = np.zeros((-(-len(letters) // TILE), plan.substreams, plan.words, TILE), np.uint32)
    encode_group_tiles(letters, arrays.groups, arrays.first, group_tables(plan.grouping).codes, words)
    return words


def decode_levels(
    words: NDArray[np.uint32], plan: StreamPlan, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Levels uint8 ``[tiles, n, 32]`` by channel, from the lowest of their class, and status ``[tiles, S, 32]``.

    Those of dependent classes are half steps.  Channels left out are 0.  Any words are safe, as for
    :func:`dquantcodec.prefix.decode_levels`.
    """
    grouping = plan.grouping
    assert grouping is not None
    tiles = len(words)
    levels = np.empty((tiles, grouping.heads * grouping.head_dim, TILE), np.uint8)
    status = np.empty((tiles, plan.substreams, TILE), np.uint8)
    streams = stream_room(plan, letters_each(plan))
    decode_group_tiles(
        read_only(words.reshape(-1)), tiles, levels.reshape(-1), status, streams, streams.view(np.uint8),
        *decode_steps(plan, strict),
    )  # fmt: skip
    return levels, status


def letters_each(plan: StreamPlan) -> int:
    """Letters of a sub-stream of a grouped stream."""
    assert plan.grouping is not None
    return plan.grouping.heads // plan.substreams * plan.grouping.letters_per_head


@lru_cache(maxsize=1024)
def decode_steps(plan: StreamPlan, strict: bool = False) -> tuple[Any, ...]:
    """What :func:`decode_group_tiles` takes after its arrays."""
    grouping = plan.grouping
    assert grouping is not None
    arrays, coded = group_arrays(grouping), group_tables(grouping)
    return (
        plan.substreams, plan.words, arrays.groups, arrays.row_channel.reshape(-1), arrays.row_class,
        np.array([c.field_bits for c in grouping.classes], np.int64), arrays.shifts, coded.window, coded.window_first,
        coded.precision, state_bits(grouping.states), np.flatnonzero(arrays.middle == 0), strict, letters_each(plan),
    )  # fmt: skip


def decode_by_token(
    words: NDArray[np.uint32], plan: StreamPlan, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """As :func:`decode_levels`, one row a token: ``[32 * tiles, n]`` and ``[32 * tiles, S]``."""
    levels, status = decode_levels(words, plan, strict)
    return by_token(levels), by_token(status)


@kernel
def encode_group_tiles(letters, groups, first, codes, words):
    tile = np.int64(words.shape[3])
    substreams = words.shape[1]
    size = groups.shape[0] // substreams
    for t in range(letters.shape[0]):
        letter = 0
        for j in range(substreams):
            column = words[t // tile, j, :, t % tile]
            pending = np.uint64(0)
            held = np.uint64(1)
            at = 0
            for g in range(j * size, (j + 1) * size):
                base = first[groups[g, 3]]
                for _ in range(groups[g, 2]):
                    code = codes[base + np.int64(letters[t, letter])]
                    letter += 1
                    pending |= np.uint64(code & np.uint32(0xFFFF)) << held
                    held += np.uint64(code >> np.uint32(16))
                    if held >= np.uint64(32):
                        column[at] = np.uint32(pending & np.uint64(0xFFFFFFFF))
                        at += 1
                        pending >>= np.uint64(32)
                        held -= np.uint64(32)
            if held > np.uint64(0):
                column[at] = np.uint32(pending)


@kernel
def decode_group_tiles(
    words,
    tiles,
    levels,
    status,
    streams,
    stream,
    substreams,
    capacity,
    groups,
    row_channel,
    row_class,
    field_bits,
    shifts,
    window,
    window_first,
    precision,
    state_bits,
    left_out,
    strict,
    letters,
):
    lanes = LANES
    size = levels.shape[0] // tiles
    stride = streams.shape[0] // lanes
    per_stream = groups.shape[0] // substreams
    ends = np.empty(LOCKSTEP, np.uint64)
    used = np.empty(lanes, np.int64)
    entries = np.empty(letters * lanes, np.uint16)
    states = np.empty(LOCKSTEP, np.int64)
    state_down = 16 - state_bits
    for tile in range(tiles):
        for channel in left_out:
            fill_row(0, levels, tile * size + channel * lanes)
        for j in range(substreams):
            load_streams(words, (tile * substreams + j) * capacity * lanes, capacity, streams, stride)
            for lane in range(0, lanes, LOCKSTEP):
                for k in range(LOCKSTEP):
                    ends[k] = np.uint64(32 * stride * (lane + k) + 1)
                    states[k] = 0
                place = lane
                for g in range(j * per_stream, (j + 1) * per_stream):
                    count, table = groups[g, 2], groups[g, 3]
                    base, bits = window_first[table], precision[table]
                    mask = (1 << bits) - 1
                    fours = count // 4 * 4
                    for _ in range(0, fours, 4):
                        if state_bits:
                            walk_four(stream, ends, window, base, mask, entries, place, states, bits, state_down)
                        else:
                            take_four(stream, ends, window, base, mask, entries, place)
                        place += 4 * lanes
                    for _ in range(fours, count):
                        if state_bits:
                            walk_one(stream, ends, window, base, mask, entries, place, states, bits, state_down)
                        else:
                            take_one(stream, ends, window, base, mask, entries, place)
                        place += lanes
                for k in range(LOCKSTEP):
                    used[lane + k] = np.int64(ends[k]) - 32 * stride * (lane + k)
            row = 0
            for g in range(j * per_stream, (j + 1) * per_stream):
                first, fields, count, table = groups[g, 0], groups[g, 1], groups[g, 2], groups[g, 3]
                for f in range(fields):
                    down = LENGTH_BITS + shifts[table, f]
                    mask = (1 << field_bits[row_class[first + f]]) - 1
                    for i in range(count):
                        channel = row_channel[(first + f) * MAX_GROUP_LETTERS + i]
                        spread_row(entries, (row + i) * lanes, down, mask, levels, tile * size + channel * lanes)
                row += count
            for lane in range(lanes):
                status[tile, j, lane] = stream_status(streams, lane * stride, used[lane], capacity, strict)
