"""From levels back to values: affine step, means, inverse rotation, exponent (specification, clause 6.4).

FP16 scale times level is exact in FP32, so the affine step rounds once whether or not a device fuses it; adding a mean
rounds once more; the rotation only adds and subtracts before its last multiplication.  Every device that follows this
order gives the same bits.  Grouped streams are not rotated; a level times its gain is exact, times the scale rounds
once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .conversions import HARDWARE_HALF, narrow_bfloat, narrow_bits, narrow_half
from .group_arrays import group_arrays
from .kernels import inlined, kernel
from .means import page_means
from .page import KindFields
from .plan import Plan, StreamPlan
from .rotate import hadamard_columns, store_columns, transform
from .vector_step import LANES
from .vectors import add_row, affine_row, level_row

#: Compiled only where the processor has the instruction.
store_half = narrow_half if HARDWARE_HALF else narrow_bits

LARGEST = float(np.finfo(np.float32).max)


#: How kernels store rows.
FLOAT, HALF, BFLOAT = 0, 1, 2
NO_BITS, NO_VALUES = np.zeros(0, np.uint16), np.zeros(0, np.float32)


def reconstruct(fields: KindFields, levels: NDArray[np.uint8], plan: Plan, stream: StreamPlan) -> NDArray[np.float32]:
    """Values float32 ``[32 * tiles, H, D]`` of levels uint8 ``[tiles, n, 32]``."""
    out = np.empty((levels.shape[0] * LANES, plan.kv_heads, plan.head_dim), np.float32)
    fill = reconstruct_tiles if stream.grouping is None else reconstruct_groups
    to = 0, len(out), NO_BITS, out.reshape(-1), FLOAT
    fill(levels.reshape(-1), len(levels), *affine_steps(fields, stream), *to, *basis_steps(plan, stream))
    return scaled(out, fields.exponent)


def affine_steps(fields: KindFields, stream: StreamPlan) -> tuple[NDArray[np.float32], ...]:
    """Offset and scale of every token, and means: what the kernels take after the levels."""
    means = page_means(fields.scale, fields.mean)
    # Tokens that nobody reads may hold any bits, signalling NaNs among them.
    with np.errstate(invalid="ignore"):
        if stream.grouping is None:
            return *fields.grid(stream.levels), means
        scale = fields.affine[:, 0].astype(np.float32)
        return scale, scale, means


@lru_cache(maxsize=1024)
def basis_steps(plan: Plan, stream: StreamPlan) -> tuple[Any, ...]:
    """What the kernels take last."""
    if stream.grouping is None:
        rotation = transform(plan.head_dim)
        after = (rotation.scales * plan.signs.astype(np.float32)).reshape(-1)
        return rotation.blocks, rotation.transposed, after, plan.kv_heads, plan.head_dim
    arrays = group_arrays(stream.grouping)
    return arrays.middle, arrays.factor, np.ones(plan.values, np.float32), plan.kv_heads, plan.head_dim


def scaled(x: NDArray[np.float32], exponent: int) -> NDArray[np.float32]:
    """``x * 2**exponent``.  Errors may lift the largest inputs beyond FP32; they saturate."""
    if not exponent:
        return x
    # In FP64 the power of two is exact, so there is one rounding at most (to an FP32 denormal).
    with np.errstate(over="ignore"):
        wide = np.ldexp(x.astype(np.float64), exponent)
    return np.clip(wide, -LARGEST, LARGEST).astype(np.float32)


@inlined
def store_tile(values, start, stop, first, form, bits, out, width):
    """The rows of a tile, float32 ``[32 * width]``, that lie between ``start`` and ``stop`` of all rows; it begins with
    row ``first``."""
    low, high = max(start, first), min(stop, first + LANES)
    if low < high:
        part = values[(low - first) * width : (high - first) * width]
        to = (low - start) * width
        if form == HALF:
            store_half(part, bits[to : to + part.shape[0]])
        elif form == BFLOAT:
            narrow_bfloat(part.view(np.uint32), bits[to : to + part.shape[0]])
        else:
            for i in range(part.shape[0]):
                out[to + i] = part[i]


@kernel
def reconstruct_tiles(
    levels, tiles, offset, scale, mean, start, stop, bits, out, form, blocks, transposed, after, heads, dim
):
    """Rows ``start`` to ``stop`` of the tiles' to ``out`` or, as 16 bits, to ``bits``; see :data:`FLOAT`."""
    columns = np.empty(dim * LANES, np.float32)
    values = np.empty(LANES * heads * dim, np.float32)
    for tile in range(tiles):
        direct = form == FLOAT and start <= tile * LANES and (tile + 1) * LANES <= stop
        target, first = (out, tile * LANES - start) if direct else (values, 0)
        for h in range(heads):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                affine_row(levels, at + d * LANES, offset, scale, tile * LANES, columns, d * LANES)
            if mean.shape[0] > 0:
                page = tile * mean.shape[0] // tiles
                for d in range(dim):
                    add_row(mean[page, h, d], columns, d * LANES)
            hadamard_columns(columns, blocks, transposed)
            store_columns(columns, after, target, heads, dim, first, h, LANES)
        if not direct:
            store_tile(values, start, stop, tile * LANES, form, bits, out, heads * dim)


@kernel
def reconstruct_groups(
    levels, tiles, offset, scale, mean, start, stop, bits, out, form, middle, factor, one, heads, dim
):
    """As :func:`reconstruct_tiles`; there is no offset."""
    columns = np.empty(dim * LANES, np.float32)
    values = np.empty(LANES * heads * dim, np.float32)
    for tile in range(tiles):
        direct = form == FLOAT and start <= tile * LANES and (tile + 1) * LANES <= stop
        target, first = (out, tile * LANES - start) if direct else (values, 0)
        for h in range(heads):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                c = h * dim + d
                level_row(levels, at + d * LANES, middle[c], factor[c], scale, tile * LANES, columns, d * LANES)
            if mean.shape[0] > 0:
                page = tile * mean.shape[0] // tiles
                for d in range(dim):
                    add_row(mean[page, h, d], columns, d * LANES)
            store_columns(columns, one, target, heads, dim, first, h, LANES)
        if not direct:
            store_tile(values, start, stop, tile * LANES, form, bits, out, heads * dim)
