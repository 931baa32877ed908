"""Attention over many pages in one kernel: decoding to levels and attention from levels, part by part.

Levels of a part stay in a cache, and a thread stays out of the interpreter for all of its pages.  The stages themselves
are in the coders and in :mod:`dquantcodec.attend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import group_prefix, prefix, rans
from .attend import Levels, Partial, Problem, attend_levels, finish_values
from .decode import letters_each, words_at
from .kernels import inlined, kernel
from .page import KindFields, TileWords
from .plan import Plan, StreamPlan
from .vector_step import LANES


def one_path(plan: Plan) -> bool:
    """Whether keys and values take the same path: for two paths at once there is no kernel."""
    return plan.key.coder == plan.value.coder and (plan.key.grouping is None) == (plan.value.grouping is None)


class PartAttention:
    """Attention of all queries over parts of some pages of one exponent: made once, then called by several threads.

    ``fields`` and ``words`` are those of keys and of values, of all tiles of all pages; fields need no words.
    ``tiles`` int64 ``[parts, 2]`` says where in the tiles a part begins and ends, ``tokens`` int64 ``[parts]`` how many
    of its rows are tokens.  Parts are of whole pages but for the last, and of one page if values have means.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        fields: Sequence[KindFields],
        words: Sequence[TileWords],
        tiles: NDArray[np.int64],
        tokens: NDArray[np.int64],
    ) -> None:
        self._problem, self._tiles, self._tokens = problem, tiles, tokens
        #: Of keys and of values uint8 ``[tiles, S, 32]``; 0 where nothing was decoded or all was well.
        self.statuses = [np.zeros((*found.words.shape[:2], LANES), np.uint8) for found in fields]
        room = int((tiles[:, 1] - tiles[:, 0]).max()) * plan.values * LANES
        nothing = np.empty((0, plan.values, LANES), np.uint8)
        kinds = []
        for found, lie, status, stream in zip(fields, words, self.statuses, (plan.key, plan.value)):
            part = Levels.of(found, nothing, slice(0, 0), stream)
            affine = part.offset, part.scale, part.mean, part.middle
            memory, coder = _coder(plan, stream)
            kinds.append((part, affine, status, (lie.data, lie.places), (room, *memory), coder))
        (keys, *self._key), (self._values, *self._value) = kinds
        factor = np.float32(keys.factor)
        self._queries = problem.weighted.reshape(-1) * factor, problem.basis.reshape(-1) * factor, problem.query.shape
        self._kernel = attend_rans if plan.key.coder == "rans" else attend_prefix
        if plan.key.grouping is not None:
            self._kernel = attend_groups

    def over(self, first: int, last: int) -> Partial:
        """Of the parts ``first`` to ``last``, each alone; undefined where a token's status is then not 0."""
        result = Partial.empty(self._problem, last - first)
        self._kernel(
            self._tiles[first:last], self._tokens[first:last], self._queries, *self._key, *self._value,
            result.largest, result.total, result.weighted,
        )  # fmt: skip
        finish_values(result, self._values, first)
        return result


def _coder(plan: Plan, stream: StreamPlan) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What memory the kernels need to decode, and what a decoder's function ending in ``_steps`` gives."""
    letters = letters_each(plan, stream)
    if stream.coder == "rans":
        return (), rans.decode_steps(stream, plan.head_dim, letters)
    streams = (prefix.stream_words(stream, letters),)
    if stream.grouping is None:
        return streams, prefix.decode_steps(stream, plan.head_dim, letters)
    return streams, group_prefix.decode_steps(stream)


@inlined
def attend_part(first, last, tokens, queries, key, value, key_levels, value_levels, largest, total, weighted):
    """Attention from the levels of the tiles ``first`` to ``last``."""
    query, basis, shape = queries
    key_offset, key_scale, key_mean, key_middle = key
    value_offset, value_scale, _, value_middle = value
    rows = slice(first * LANES, last * LANES)
    tiles, pages = key_offset.shape[0] // LANES, key_mean.shape[0]
    mean = key_mean[first * pages // tiles : (last * pages + tiles - 1) // tiles]
    attend_levels(
        query, basis, shape, mean, key_levels, key_offset[rows], key_scale[rows], key_middle,
        value_levels, value_offset[rows], value_scale[rows], value_middle, 0, tokens, largest, total, weighted,
    )  # fmt: skip


@inlined
def level_slice(levels, tile, width):
    return levels[tile * width * LANES : (tile + 1) * width * LANES]


@inlined
def prefix_levels(words, levels, streams, stream, first, last, width, status, coder):
    data, places = words
    for tile in range(first, last):
        to, one = level_slice(levels, tile - first, width), status[tile : tile + 1]
        prefix.decode_tiles(words_at(data, places, tile), 1, to, one, streams, stream, *coder)


@inlined
def group_levels(words, levels, streams, stream, first, last, width, status, coder):
    data, places = words
    for tile in range(first, last):
        to, one = level_slice(levels, tile - first, width), status[tile : tile + 1]
        group_prefix.decode_group_tiles(words_at(data, places, tile), 1, to, one, streams, stream, *coder)


@inlined
def rans_levels(words, levels, first, last, width, status, coder):
    data, places = words
    for tile in range(first, last):
        to, one = level_slice(levels, tile - first, width), status[tile].reshape(-1)
        rans.decode_tiles(words_at(data, places, tile), to, one, *coder)


@kernel
def attend_prefix(
    tiles, tokens, queries, key, key_status, key_words, key_room, key_coder, value, value_status, value_words,
    value_room, value_coder, largest, total, weighted,
):  # fmt: skip
    keys, values = np.empty(key_room[0], np.uint8), np.empty(value_room[0], np.uint8)
    key_streams, value_streams = np.zeros(key_room[1], np.uint32), np.zeros(value_room[1], np.uint32)
    key_stream, value_stream = key_streams.view(np.uint8), value_streams.view(np.uint8)
    width = key[3].shape[0]
    for p in range(tokens.shape[0]):
        first, last = tiles[p, 0], tiles[p, 1]
        prefix_levels(key_words, keys, key_streams, key_stream, first, last, width, key_status, key_coder)
        prefix_levels(value_words, values, value_streams, value_stream, first, last, width, value_status, value_coder)
        attend_part(first, last, tokens[p], queries, key, value, keys, values, largest[p], total[p], weighted[p])


@kernel
def attend_groups(
    tiles, tokens, queries, key, key_status, key_words, key_room, key_coder, value, value_status, value_words,
    value_room, value_coder, largest, total, weighted,
):  # fmt: skip
    keys, values = np.empty(key_room[0], np.uint8), np.empty(value_room[0], np.uint8)
    key_streams, value_streams = np.zeros(key_room[1], np.uint32), np.zeros(value_room[1], np.uint32)
    key_stream, value_stream = key_streams.view(np.uint8), value_streams.view(np.uint8)
    width = key[3].shape[0]
    for p in range(tokens.shape[0]):
        first, last = tiles[p, 0], tiles[p, 1]
        group_levels(key_words, keys, key_streams, key_stream, first, last, width, key_status, key_coder)
        group_levels(value_words, values, value_streams, value_stream, first, last, width, value_status, value_coder)
        attend_part(first, last, tokens[p], queries, key, value, keys, values, largest[p], total[p], weighted[p])


@kernel
def attend_rans(
    tiles, tokens, queries, key, key_status, key_words, key_room, key_coder, value, value_status, value_words,
    value_room, value_coder, largest, total, weighted,
):  # fmt: skip
    keys, values = np.empty(key_room[0], np.uint8), np.empty(value_room[0], np.uint8)
    width = key[3].shape[0]
    for p in range(tokens.shape[0]):
        first, last = tiles[p, 0], tiles[p, 1]
        rans_levels(key_words, keys, first, last, width, key_status, key_coder)
        rans_levels(value_words, values, first, last, width, value_status, value_coder)
        attend_part(first, last, tokens[p], queries, key, value, keys, values, largest[p], total[p], weighted[p])
