"""Encoding reads like the paper: rotate, remove means, lay the grid, drift, refit, code (section 4).

Stages take any number of tokens; means and exponents belong to a page.  A few pages go through the stages together, so
that narrow streams do not spend their time between kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import drift, grid, group_prefix, means
from .coders import CODERS
from .group_arrays import group_arrays
from .group_drift import drift_grouped
from .group_grid import fit_scale, grouped_positions, grouped_scale
from .kernels import kernel
from .letters import pack
from .page import KindFields
from .plan import Plan, StreamPlan, budget
from .profile import TILE
from .rotate import rotate
from .trellis_drift import drift_dependent


@dataclass(frozen=True, eq=False)
class Prepared:
    """Tokens of one kind as positions on their grids, with all that the decoder will need to undo it.

    exponents, mean_scales, means
        One entry a page (FP16 ``[pages, H]``, int8 ``[pages, H, D]``); the latter two empty for kinds without means.
    offset, scale, position
        FP16 ``[T]``, FP16 ``[T]`` and int32 ``[T, n]``; of a grouped stream ``[T, rows * 8]``, in coded order.
    """

    exponents: list[int]
    mean_scales: NDArray[np.float16]
    means: NDArray[np.int8]
    offset: NDArray[np.float16]
    scale: NDArray[np.float16]
    position: NDArray[np.int32]


#: Of any finite FP32 page, from :func:`page_exponent`.
LEAST_EXPONENT, MOST_EXPONENT = -157, 119

#: Scaled values stay below this, so rotated values less their mean stay within FP16 for heads up to 1024.
_LARGEST = 2.0**9
_SMALLEST = 2.0**-4


def page_exponent(largest: float) -> int:
    """The power of two taken out of a page whose largest magnitude is ``largest``: 0 in the usual range.

    FP16 offsets and scales then serve any finite input; otherwise the largest magnitude comes to [256, 512).
    """
    if largest == 0 or _SMALLEST <= largest < _LARGEST:
        return 0
    return int(np.frexp(np.float64(largest))[1]) - 9


def page_magnitudes(x: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """The largest magnitude ``[pages]`` of every page of ``x`` float32 ``[T, H, D]``; NaN or infinity if it has any."""
    width = x.shape[1] * x.shape[2] * window
    out = np.empty(-(-x.size // width), np.uint32)
    largest_bits(x.reshape(-1).view(np.uint32), width, out)
    return out.view(np.float32)


@kernel
def largest_bits(bits, width, out):
    """Magnitudes of floats are in the order of their bits."""
    for p in range(out.shape[0]):
        page = bits[p * width : (p + 1) * width]
        most = np.uint32(0)
        for i in range(page.shape[0]):
            magnitude = page[i] & np.uint32(0x7FFFFFFF)
            most = magnitude if magnitude > most else most
        out[p] = most


class Room:
    """Memory for the positions of one part after another, so that the system need not find it each time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.int32)

    def positions(self, tokens: int, width: int) -> NDArray[np.int32]:
        if len(self._memory) < tokens * width:
            self._memory = np.empty(tokens * width, np.int32)
        return self._memory[: tokens * width].reshape(tokens, width)


def prepare(x: NDArray[np.float32], plan: Plan, stream: StreamPlan) -> Prepared:
    """Rotation, mean removal and grid of finite values ``x`` float32 ``[T, H, D]`` that begin with a page.

    Grouped streams are not rotated.
    """
    return prepare_in_place(x.copy(), plan, stream, page_magnitudes(x, plan.window), Room())


def prepare_in_place(
    x: NDArray[np.float32], plan: Plan, stream: StreamPlan, magnitudes: NDArray[np.float32], room: Room
) -> Prepared:
    """As :func:`prepare`, with ``x`` and ``room`` to work in and the result of :func:`page_magnitudes`."""
    exponents = [page_exponent(largest) for largest in magnitudes.tolist()]
    if any(exponents):
        pages = [slice(first, first + plan.window) for first in range(0, len(x), plan.window)]
        x = np.concatenate([np.ldexp(x[page], -exponent) for page, exponent in zip(pages, exponents)])
    if stream.grouping is None:
        rotate(x, plan.signs, out=x)
    mean_scales, page_means = np.zeros(0, np.float16), np.zeros(0, np.int8)
    if stream.mean:
        mean_scales, page_means = means.page_window_means(x, plan.window)
        means.remove_means(x, plan.window, mean_scales, page_means)
    return Prepared(exponents, mean_scales, page_means, *lay_grid(x.reshape(len(x), -1), stream, room))


def lay_grid(
    x: NDArray[np.float32], stream: StreamPlan, room: Room | None = None
) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.int32]]:
    """Offset, scale and positions of streams float32 ``[T, n]`` by the plan's rule; a mid-tread grid's offset is 0."""
    room = room or Room()
    if stream.grouping is not None:
        scale = grouped_scale(x, stream.step, stream.grouping)
        out = room.positions(len(x), group_arrays(stream.grouping).row_channel.size)
        return np.zeros_like(scale), scale, grouped_positions(x, scale, stream.grouping, out)
    out = room.positions(*x.shape)
    if stream.grid == "mid-tread":
        scale = grid.mid_tread_scale(x, stream.step, stream.levels)
        return np.zeros_like(scale), scale, grid.mid_tread_positions(x, scale, stream.levels, out)
    offset, scale = grid.min_max_grid(x, stream.levels)
    return offset, scale, grid.positions(x, offset, scale, stream.levels, out)


def fit_grid(
    position: NDArray[np.int32],
    symbols: NDArray[np.uint8],
    offset: NDArray[np.float16],
    scale: NDArray[np.float16],
    stream: StreamPlan,
) -> NDArray[np.float16]:
    """The affine numbers ``[T, 1 or 2]`` to store, fitted to the final symbols."""
    if stream.grid == "mid-tread":
        return grid.regain(position, symbols, scale, stream.levels, stream.gain == "unbiased")[:, None]
    return np.stack(grid.refit(position, symbols, offset, scale), axis=1)


def code_letters(prepared: Prepared, plan: Plan, stream: StreamPlan) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Tile words and affine numbers ``[T, 1 or 2]`` of rotated streams: drift, letters, coder, refit."""
    tokens = len(prepared.position)
    coder = CODERS[stream.coder]
    symbols, _ = drift.drift(prepared.position, stream, plan.head_dim)
    letters = pack(symbols, stream, plan.head_dim).reshape(tokens, stream.substreams, -1)
    words, used = coder.encode(letters, stream)
    # The true size decides.  A rANS stream may exceed its estimate by a fraction of a bit; one bit less of budget at
    # a time ends at the cheapest letters, which fit by construction of the plan.
    tight = np.flatnonzero((used > stream.words).any(axis=1))
    if len(tight):
        over = used[tight] > stream.words
        budgets = np.full(over.shape, budget(stream), np.int64)
        while over.any():
            budgets[over] -= 1024
            symbols[tight], _ = drift.drift(prepared.position[tight], stream, plan.head_dim, budgets)
            letters[tight] = pack(symbols[tight], stream, plan.head_dim).reshape(len(tight), stream.substreams, -1)
            over = coder.encode(letters[tight], stream)[1] > stream.words
        words, _ = coder.encode(letters, stream)
    return words, fit_grid(prepared.position, symbols, prepared.offset, prepared.scale, stream)


def code_groups(prepared: Prepared, plan: Plan, stream: StreamPlan) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """The same of grouped streams, whose scale is fitted alone."""
    assert stream.grouping is not None
    letters, levels = drift_groups(prepared.position, stream)
    fitted = fit_scale(prepared.position, levels, prepared.scale, stream.grouping, stream.gain == "unbiased")
    return group_prefix.encode(letters, stream), fitted[:, None]


def drift_groups(position: NDArray[np.int32], stream: StreamPlan) -> tuple[NDArray[np.uint16], NDArray[np.int8]]:
    """Letters and levels of a grouped stream, by its quantiser."""
    assert stream.grouping is not None
    drifted = drift_grouped if stream.grouping.states == 1 else drift_dependent
    letters, levels, _ = drifted(position, stream)
    return letters, levels


def encode_pages(
    x: NDArray[np.float32], plan: Plan, stream: StreamPlan, magnitudes: NDArray[np.float32], room: Room
) -> Iterator[tuple[slice, KindFields]]:
    """The fields of one kind of the pages of ``x`` (finite, float32 ``[T, H, D]``, beginning with a page).

    ``x`` and ``room`` are memory to work in; ``magnitudes`` are those of :func:`page_magnitudes`.  Whole pages of one
    exponent come together.
    """
    tokens = len(x)
    prepared = prepare_in_place(x, plan, stream, magnitudes, room)
    code = code_letters if stream.grouping is None else code_groups
    words, fitted = code(prepared, plan, stream)
    affine = np.zeros((len(words) * TILE, stream.affine), np.float16)
    affine[:tokens] = fitted
    tiles = plan.window // TILE
    exponents = prepared.exponents
    first = 0
    for last in range(1, len(exponents) + 1):
        if last < len(exponents) and exponents[last] == exponents[first] and (last + 1) * tiles <= len(words):
            continue
        run = slice(first, last)
        yield (
            run,
            KindFields(
                exponent=exponents[first],
                scale=prepared.mean_scales[run] if stream.mean else None,
                mean=prepared.means[run] if stream.mean else None,
                words=words[first * tiles : last * tiles],
                affine=affine[first * plan.window : last * plan.window],
            ),
        )
        first = last
