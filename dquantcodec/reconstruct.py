"""From levels back to values: affine step, means, inverse rotation, exponent (specification, clause 6.4).

FP16 scale times level is exact in FP32, so the affine step rounds once whether or not a device fuses it; adding a mean
rounds once more; the rotation only adds and subtracts before its last multiplication.  Every device that follows this
order gives the same bits.  Grouped streams are not rotated; a level times its gain is exact, times the scale rounds
once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .group_arrays import group_arrays
from .kernels import kernel
from .means import page_means
from .page import KindFields
from .plan import Plan, StreamPlan
from .rotate import hadamard_columns, store_columns, transform
from .vectors import LANES, add_row, affine_row, level_row

LARGEST = float(np.finfo(np.float32).max)


def reconstruct(fields: KindFields, levels: NDArray[np.uint8], plan: Plan, stream: StreamPlan) -> NDArray[np.float32]:
    """Values float32 ``[32 * tiles, H, D]`` of levels uint8 ``[tiles, n, 32]``."""
    out = np.empty((levels.shape[0] * LANES, plan.kv_heads, plan.head_dim), np.float32)
    if stream.grouping is not None:
        arrays = group_arrays(stream.grouping)
        reconstruct_groups(
            levels.reshape(-1), levels.shape[0], arrays.middle, arrays.factor, fields.affine[:, 0].astype(np.float32),
            page_means(fields.scale, fields.mean), np.ones(plan.values, np.float32), out.reshape(-1),
            plan.kv_heads, plan.head_dim,
        )  # fmt: skip
        return scaled(out, fields.exponent)
    rotation = transform(plan.head_dim)
    reconstruct_tiles(
        levels.reshape(-1), levels.shape[0], *fields.grid(stream.levels), page_means(fields.scale, fields.mean),
        rotation.blocks, rotation.transposed, (rotation.scales * plan.signs.astype(np.float32)).reshape(-1),
        out.reshape(-1), plan.kv_heads, plan.head_dim,
    )  # fmt: skip
    return scaled(out, fields.exponent)


def scaled(x: NDArray[np.float32], exponent: int) -> NDArray[np.float32]:
    """``x * 2**exponent``.  Errors may lift the largest inputs beyond FP32; they saturate."""
    if not exponent:
        return x
    # In FP64 the power of two is exact, so there is one rounding at most (to an FP32 denormal).
    with np.errstate(over="ignore"):
        wide = np.ldexp(x.astype(np.float64), exponent)
    return np.clip(wide, -LARGEST, LARGEST).astype(np.float32)


@kernel
def reconstruct_tiles(levels, tiles, offset, scale, mean, blocks, transposed, after, out, heads, dim):
    columns = np.empty(dim * LANES, np.float32)
    for tile in range(tiles):
        for h in range(heads):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                affine_row(levels, at + d * LANES, offset, scale, tile * LANES, columns, d * LANES)
            if mean.shape[0] > 0:
                page = tile * mean.shape[0] // tiles
                for d in range(dim):
                    add_row(mean[page, h, d], columns, d * LANES)
            hadamard_columns(columns, blocks, transposed)
            store_columns(columns, after, out, heads, dim, tile * LANES, h, LANES)


@kernel
def reconstruct_groups(levels, tiles, middle, factor, scale, mean, one, out, heads, dim):
    columns = np.empty(dim * LANES, np.float32)
    for tile in range(tiles):
        for h in range(heads):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                c = h * dim + d
                level_row(levels, at + d * LANES, middle[c], factor[c], scale, tile * LANES, columns, d * LANES)
            if mean.shape[0] > 0:
                page = tile * mean.shape[0] // tiles
                for d in range(dim):
                    add_row(mean[page, h, d], columns, d * LANES)
            store_columns(columns, one, out, heads, dim, tile * LANES, h, LANES)
