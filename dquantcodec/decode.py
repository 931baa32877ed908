"""From words to rows of values in one kernel: decoding to levels and reconstruction, tile by tile.

What a tile becomes on the way never leaves the nearest caches, and a thread stays out of the interpreter for many pages
at a time.  The stages themselves are in the coders and in :mod:`dquantcodec.reconstruct`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import group_prefix, prefix, rans
from .arrays import BFLOAT16, store_float32
from .coders import CODERS
from .conversions import HARDWARE_HALF
from .kernels import inlined, kernel
from .letters import by_token, letter_table
from .page import KindFields, TileWords
from .plan import Plan, StreamPlan
from .reconstruct import (
    BFLOAT,
    FLOAT,
    HALF,
    NO_BITS,
    NO_VALUES,
    affine_steps,
    basis_steps,
    reconstruct_groups,
    reconstruct_tiles,
    scaled,
)
from .vector_step import LANES


def decode_levels(
    fields: KindFields, plan: Plan, stream: StreamPlan, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Levels uint8 ``[tiles, n, 32]`` and, one row per token, statuses uint8 ``[32 * tiles, S]``."""
    if stream.grouping is not None:
        levels, status = group_prefix.decode_levels(fields.words, stream, strict)
    else:
        letters = letters_each(plan, stream)
        levels, status = CODERS[stream.coder].decode_levels(fields.words, stream, plan.head_dim, letters, strict)
    return levels, by_token(status)


def letters_each(plan: Plan, stream: StreamPlan) -> int:
    """Letters of a sub-stream."""
    if stream.grouping is not None:
        return group_prefix.letters_each(stream)
    return plan.kv_heads // stream.substreams * letter_table(stream, plan.head_dim).per_head


class RowDecoder:
    """Decodes tiles of one kind of some pages to rows: made once, then called by several threads.

    ``fields`` are those of all tiles of all pages, without words; their exponent does not matter.
    """

    def __init__(self, fields: KindFields, words: TileWords, plan: Plan, stream: StreamPlan) -> None:
        letters = letters_each(plan, stream)
        self._words = words.data, words.places
        self._affine, self._basis = affine_steps(fields, stream), basis_steps(plan, stream)
        #: uint8 ``[tiles, S, 32]``; 0 where nothing was decoded or all was well.
        self.status = np.zeros((len(fields.words), stream.substreams, LANES), np.uint8)
        if stream.coder == "rans":
            self._kernel, self._coder = decode_rans_rows, rans.decode_steps(stream, plan.head_dim, letters)
            self._room: Any = 0
            return
        self._room = prefix.stream_words(stream, letters)
        if stream.grouping is None:
            self._kernel, self._coder = decode_prefix_rows, prefix.decode_steps(stream, plan.head_dim, letters)
        else:
            self._kernel, self._coder = decode_group_rows, group_prefix.decode_steps(stream)

    def rows(self, start: int, stop: int, out: NDArray[Any], exponent: int = 0) -> None:
        """Round rows ``start`` to ``stop``, times ``2**exponent``, into ``out`` ``[stop - start, H, D]``, with any
        strides; undefined where a status is then not 0."""
        form = form_of(out)
        if form is not None and not exponent:
            flat = out.reshape(-1)
            self._store(start, stop, form, *((NO_BITS, flat) if form == FLOAT else (flat.view(np.uint16), NO_VALUES)))
            return
        values = np.empty(out.shape, np.float32)
        self._store(start, stop, FLOAT, NO_BITS, values.reshape(-1))
        whole = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        store_float32(scaled(values, exponent), whole)
        if whole is not out:
            out[...] = whole

    def _store(self, start: int, stop: int, form: int, bits: NDArray[np.uint16], values: NDArray[np.float32]) -> None:
        to = start, stop, bits, values, form
        self._kernel(*self._words, self.status, self._room, *self._affine, to, self._coder, self._basis)


def form_of(out: NDArray[Any]) -> int | None:
    """How kernels store to ``out``, or None if they cannot."""
    if not (out.flags.c_contiguous and out.flags.aligned) or (out.dtype == np.float16 and not HARDWARE_HALF):
        return None
    return {np.dtype(np.float32): FLOAT, np.dtype(np.float16): HALF, BFLOAT16: BFLOAT}.get(out.dtype)


@inlined
def words_at(words, places, tile):
    """The words of a tile, of all tiles one after another; ``places`` as in :class:`dquantcodec.page.TileWords`."""
    first, page, step, tiles, size = places
    at = first + tile // tiles * page + tile % tiles * step
    return words[at : at + size]


# Of the tuples, ``to`` is rows to store, memory and form as the kernels of reconstruction take them, ``coder`` and
# ``basis`` what the functions ending in ``_steps`` give.


@inlined
def affine_of(tile, tiles, offset, scale, mean):
    """Offset, scale and means of a tile."""
    rows, page = slice(tile * LANES, (tile + 1) * LANES), tile * mean.shape[0] // tiles
    return offset[rows], scale[rows], mean[page : page + 1]


@kernel
def decode_prefix_rows(words, places, status, room, offset, scale, mean, to, coder, basis):
    start, stop, bits, out, form = to
    levels = np.empty(basis[3] * basis[4] * LANES, np.uint8)
    streams = np.zeros(room, np.uint32)
    stream = streams.view(np.uint8)
    for tile in range(start // LANES, (stop + LANES - 1) // LANES):
        one, first = status[tile : tile + 1], tile * LANES
        prefix.decode_tiles(words_at(words, places, tile), 1, levels, one, streams, stream, *coder)
        o, s, m = affine_of(tile, status.shape[0], offset, scale, mean)
        reconstruct_tiles(levels, 1, o, s, m, start - first, stop - first, bits, out, form, *basis)


@kernel
def decode_rans_rows(words, places, status, _room, offset, scale, mean, to, coder, basis):
    start, stop, bits, out, form = to
    levels = np.empty(basis[3] * basis[4] * LANES, np.uint8)
    for tile in range(start // LANES, (stop + LANES - 1) // LANES):
        one, first = status[tile : tile + 1], tile * LANES
        rans.decode_tiles(words_at(words, places, tile), levels, one.reshape(-1), *coder)
        o, s, m = affine_of(tile, status.shape[0], offset, scale, mean)
        reconstruct_tiles(levels, 1, o, s, m, start - first, stop - first, bits, out, form, *basis)


@kernel
def decode_group_rows(words, places, status, room, offset, scale, mean, to, coder, basis):
    start, stop, bits, out, form = to
    levels = np.empty(basis[3] * basis[4] * LANES, np.uint8)
    streams = np.zeros(room, np.uint32)
    stream = streams.view(np.uint8)
    for tile in range(start // LANES, (stop + LANES - 1) // LANES):
        one, first = status[tile : tile + 1], tile * LANES
        group_prefix.decode_group_tiles(words_at(words, places, tile), 1, levels, one, streams, stream, *coder)
        o, s, m = affine_of(tile, status.shape[0], offset, scale, mean)
        reconstruct_groups(levels, 1, o, s, m, start - first, stop - first, bits, out, form, *basis)
