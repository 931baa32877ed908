"""The steps of :mod:`dquantcodec.vectors` and :mod:`dquantcodec.prefix` in plain NumPy, for ``NUMBA_DISABLE_JIT=1``.

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


def _row(array: Array, at: int, count: int = _LANES, stride: int = 1) -> Array:
    """A view of ``count`` elements from ``at`` on, all of which exist."""
    at = int(at)
    found = array[at : at + (count - 1) * int(stride) + 1 : int(stride)]
    if at < 0 or len(found) != count:
        raise IndexError(f"{count} elements from {at} on, {stride} apart, of an array of {len(array)}")
    return found


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
    _row(pairs, to)[:] = _row(words, at) | _row(words, int(at) + _LANES).astype(np.uint32) << 16


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
        rows = [_row(columns, int(at) + i * int(stride)).copy() for i in range(radix)]
        half = 1
        while half < radix:
            for i in (i for i in range(radix) if not i & half):
                rows[i], rows[i + half] = rows[i] + rows[i + half], rows[i] - rows[i + half]
            half *= 2
        for i, row in enumerate(rows):
            _row(columns, int(at) + i * int(stride))[:] = row

    return butterfly


butterfly2, butterfly4, butterfly8 = _butterfly(2), _butterfly(4), _butterfly(8)


def turn_words(source: Array, at: int, stride: int, out: Array, to: int, out_stride: int) -> None:
    for k in range(_WIDTH):
        _row(out, int(to) + k, _WIDTH, out_stride)[:] = _row(source, int(at) + int(stride) * k, _WIDTH)


def turn_tokens_in(
    source: Array, at: int, stride: int, factor: Array, first: int, out: Array, to: int, out_stride: int
) -> None:
    for k in range(_WIDTH):
        turned = _row(source, int(at) + int(stride) * k, _WIDTH) * _row(factor, first, _WIDTH)
        _row(out, int(to) + k, _WIDTH, out_stride)[:] = turned


def turn_tokens_out(
    source: Array, at: int, stride: int, factor: Array, first: int, out: Array, to: int, out_stride: int
) -> None:
    for k in range(_WIDTH):
        turned = _row(source, int(at) + int(stride) * k, _WIDTH) * factor[int(first) + k]
        _row(out, int(to) + k, _WIDTH, out_stride)[:] = turned


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


def _letters(
    count: int, stream: Array, ends: Array, window: Array, base: int, mask: int, entries: Array, place: int,
    states: Array, precision: int, down: int,
) -> None:  # fmt: skip
    for lane in range(len(ends)):
        end = int(ends[lane])
        bits = int.from_bytes(_row(stream, end >> 3, 8).tobytes(), "little") >> (end & 7)
        for k in range(count):
            entry = int(window[int(base) + (int(states[lane]) << int(precision)) + (bits & int(mask))])
            entries[int(place) + _LANES * k + lane] = entry
            states[lane] = entry >> int(down)
            bits >>= entry & 15
            end += entry & 15
        ends[lane] = end


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
