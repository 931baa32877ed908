"""The steps of ``vectors``, ``rans_steps`` and ``prefix`` in plain NumPy, for ``NUMBA_DISABLE_JIT=1``.

Compiled steps exist only inside compiled kernels.  Without compilation Python runs the kernels line by line, which is
what debuggers, coverage and fuzzers want to see, and these take the place of the steps: the same arguments, the same
results, slowly.  Unlike compiled steps they cannot leave an array: NumPy checks every slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LANES = 32
_WIDTH = 8

Array = NDArray[Any]


def _row(array: Array, at: int, count: int = _LANES) -> Array:
    """A view of ``count`` elements from ``at`` on, all of which exist."""
    at = int(at)
    found = array[at : at + count]
    if at < 0 or len(found) != count:
        raise IndexError(f"{count} elements from {at} on, of an array of {len(array)}")
    return found


def _rows(array: Array, at: int, stride: int, rows: int, count: int, step: int = 1) -> Array:
    """A view ``[rows, count]`` of elements from ``at`` on, all of which exist: rows begin ``stride`` elements apart."""
    size = array.itemsize
    return np.ndarray((rows, count), array.dtype, array.data, int(at) * size, (int(stride) * size, int(step) * size))


def spread_row(entries: Array, at: int, down: int, mask: int, levels: Array, to: int) -> None:
    _row(levels, to)[:] = (_row(entries, at).astype(np.int64) >> int(down)) & int(mask)


def affine_row(levels: Array, at: int, offset: Array, scale: Array, first: int, out: Array, to: int) -> None:
    level = _row(levels, at).astype(np.float32)
    _row(out, to)[:] = _row(offset, first) + _row(scale, first) * level


def add_row(value: np.float32, out: Array, to: int) -> None:
    _row(out, to)[:] += np.float32(value)


def _dot(count: int) -> Callable[..., None]:
    def dot(weights: Array, first: int, rows: Array, at: int, out: Array, to: int) -> None:
        for k in range(count):
            _row(out, to)[:] += weights[int(first) + k] * _row(rows, int(at) + _LANES * k)

    return dot


dot_row, dot_four, dot_eight = _dot(1), _dot(4), _dot(8)


def _mix(count: int) -> Callable[..., None]:
    def mix(weights: Array, first: int, rows: Array, at: int, out: Array, to: int) -> None:
        for k in range(count):
            for lane in range(0, _LANES, _WIDTH):
                products = _row(weights, int(first) + lane, _WIDTH) * _row(rows, int(at) + _LANES * k + lane, _WIDTH)
                _row(out, int(to) + _WIDTH * k, _WIDTH)[:] += products

    return mix


mix_row, mix_four = _mix(1), _mix(4)


def count_below(positions: Array, at: int, thresholds: Array, first: int, levels: Array, to: int) -> None:
    below = _row(thresholds, first, 8)[:, None] < _row(positions, at)
    _row(levels, to)[:] += below.sum(axis=0, dtype=np.uint8)


def copy_row(rows: Array, at: int, out: Array, to: int) -> None:
    _row(out, to)[:] = _row(rows, at)


def pair_rows(words: Array, at: int, pairs: Array, to: int) -> None:
    both = _row(words, at, 2 * _LANES).astype(np.uint32)
    _row(pairs, to)[:] = both[:_LANES] | both[_LANES:] << 16


def fill_row(value: int, out: Array, to: int) -> None:
    _row(out, to)[:] = value


def signed_row(levels: Array, at: int, middle: np.float32, out: Array, to: int) -> None:
    _row(out, to)[:] = _row(levels, at).astype(np.float32) - np.float32(middle)


def level_row(
    levels: Array, at: int, middle: np.float32, factor: np.float32, scale: Array, first: int, out: Array, to: int
) -> None:
    value = (_row(levels, at).astype(np.float32) - np.float32(middle)) * np.float32(factor)
    _row(out, to)[:] = value * _row(scale, first)


def add_field(
    position: Array, at: int, limits: Array, first: int, most: int, stride: int, level: Array, number: Array
) -> None:
    value = _row(position, at, _WIDTH)
    count = (np.abs(value)[:, None] > limits[int(first) : int(first) + int(most)]).sum(axis=1)
    found = np.where(value < 0, -count, count)
    _row(level, at, _WIDTH)[:] = found
    _row(number, 0, _WIDTH)[:] += ((found + int(most)) * int(stride)).astype(np.int32)


def _butterfly(radix: int) -> Callable[..., None]:
    def butterfly(columns: Array, at: int, stride: int) -> None:
        rows = _rows(columns, at, stride, radix, _LANES)
        half = 1
        while half < radix:
            pairs = rows.reshape(-1, 2, half, _LANES)
            rows = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1)
            half *= 2
        _rows(columns, at, stride, radix, _LANES)[:] = rows.reshape(radix, _LANES)

    return butterfly


butterfly2, butterfly4, butterfly8 = _butterfly(2), _butterfly(4), _butterfly(8)


def turn_words(source: Array, at: int, stride: int, out: Array, to: int, out_stride: int) -> None:
    _rows(out, to, 1, _WIDTH, _WIDTH, out_stride)[:] = _rows(source, at, stride, _WIDTH, _WIDTH)


def turn_tokens_in(
    source: Array, at: int, stride: int, factor: Array, first: int, out: Array, to: int, out_stride: int
) -> None:
    turned = _rows(source, at, stride, _WIDTH, _WIDTH) * _row(factor, first, _WIDTH)
    _rows(out, to, 1, _WIDTH, _WIDTH, out_stride)[:] = turned


def turn_tokens_out(
    source: Array, at: int, stride: int, factor: Array, first: int, out: Array, to: int, out_stride: int
) -> None:
    turned = _rows(source, at, stride, _WIDTH, _WIDTH) * _row(factor, first, _WIDTH)[:, None]
    _rows(out, to, 1, _WIDTH, _WIDTH, out_stride)[:] = turned


def _take(count: int) -> Callable[..., None]:
    def take(stream: Array, ends: Array, window: Array, base: int, mask: int, entries: Array, place: int) -> None:
        states = np.zeros(len(ends), np.int64)
        _letters(count, stream, ends, window, base, mask, entries, place, states, 0, 16)

    return take


def _walk(count: int) -> Callable[..., None]:
    def walk(
        stream: Array, ends: Array, window: Array, base: int, mask: int, entries: Array, place: int, states: Array,
        precision: int, down: int,
    ) -> None:  # fmt: skip
        _letters(count, stream, ends, window, base, mask, entries, place, states, precision, down)

    return walk


#: Letters of eight lanes by all that they depend on, with the table they were looked up in: noise and lanes of absent
#: tokens are decoded again and again.
_SEEN: dict[tuple[Any, ...], tuple[Array, Array, Array, Array]] = {}
_MOST_SEEN = 1 << 12


def _letters(
    count: int, stream: Array, ends: Array, window: Array, base: int, mask: int, entries: Array, place: int,
    states: Array, precision: int, down: int,
) -> None:  # fmt: skip
    # Streams of lanes follow one another.
    first, last = int(ends[0]) >> 3, (int(ends[-1]) >> 3) + 8
    data = stream[first:last].tobytes()
    key = (data, ends.tobytes(), states.tobytes(), id(window), count, int(base), int(mask), int(precision), int(down))
    known = _SEEN.get(key)
    if known is None or known[0] is not window:
        if len(_SEEN) >= _MOST_SEEN:
            _SEEN.clear()
        _SEEN[key] = known = window, *_looked_up(data, first, ends, states, window.data, *key[4:])
    _, found, ends[:], states[:] = known
    _rows(entries, place, _LANES, count, len(ends))[:] = found


def _looked_up(
    data: bytes, first: int, ends: Array, states: Array, window: memoryview, count: int, base: int, mask: int,
    precision: int, down: int,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Entries ``[count, lanes]``, ends and states.  Python's numbers: eight lanes are too few for NumPy."""
    found, ended, left = [], [], []
    for end, state in zip(ends.tolist(), states.tolist()):
        at = (end >> 3) - first
        if not 0 <= at <= len(data) - 8:
            raise IndexError(f"8 bytes from {end >> 3} on, of {len(data)} from {first} on")
        bits = int.from_bytes(data[at : at + 8], "little") >> (end & 7)
        for _ in range(count):
            entry = window[base + (state << precision) + (bits & mask)]
            found.append(entry)
            state = entry >> down
            bits >>= entry & 15
            end += entry & 15
        ended.append(end)
        left.append(state)
    return (
        np.array(found, np.uint16).reshape(-1, count).T, np.array(ended, ends.dtype), np.array(left, states.dtype)
    )  # fmt: skip


take_one, take_four = _take(1), _take(4)
walk_one, walk_four = _walk(1), _walk(4)


def _pop(count: int) -> Callable[..., None]:
    def pop(
        state: Array, at: Array, pairs: Array, advance: Array, fields: Array, precision: int, entries: Array, place: int
    ) -> None:
        p = int(precision)
        x, words = state.astype(np.int64), pairs[at].astype(np.int64)
        for k in range(count):
            slot = x & ((1 << p) - 1)
            _row(entries, int(place) + _LANES * k)[:] = fields[slot]
            found = advance[slot].astype(np.int64)
            x = (found >> 16) * (x >> p) + (found & 0xFFFF)
            low = x < 1 << 16
            x = np.where(low, x << 16 | words & 0xFFFF, x)
            words = np.where(low, words >> 16, words)
            at += np.where(low, _LANES, 0).astype(at.dtype)
        state[:] = x

    return pop


pop_one, pop_two = _pop(1), _pop(2)


def replace_steps(module: dict[str, Any]) -> None:
    """Put these steps in place of the compiled ones of the same names in ``module``, which is its ``globals()``."""
    public = {name: step for name, step in globals().items() if name[0] != "_" and name[0].islower()}
    module.update({name: step for name, step in public.items() if callable(step) and name in module})
