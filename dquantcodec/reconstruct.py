"""From levels back to values: affine step, means, inverse rotation, exponent (specification, clause 6.4).

FP16 scale times level is exact in FP32, so the affine step rounds once whether or not a device fuses it; adding a mean
rounds once more; the rotation only adds and subtracts before its last multiplication.  Every device that follows this
order gives the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import kernel
from .means import mean_values
from .page import KindFields
from .plan import Plan
from .rotate import LANES, hadamard_columns, store_columns, transform

LARGEST = float(np.finfo(np.float32).max)


def reconstruct(fields: KindFields, levels: NDArray[np.uint8], plan: Plan) -> NDArray[np.float32]:
    """Values float32 ``[32 * tiles, H, D]`` of levels uint8 ``[tiles, n, 32]``."""
    out = np.empty((levels.shape[0] * LANES, plan.kv_heads, plan.head_dim), np.float32)
    if fields.scale is not None and fields.mean is not None:
        mean = mean_values(fields.scale, fields.mean)
    else:
        mean = np.zeros((0, 0), np.float32)
    rotation = transform(plan.head_dim)
    reconstruct_tiles(
        levels, fields.affine.astype(np.float32), mean,
        rotation.blocks, rotation.transposed, rotation.scales * plan.signs.astype(np.float32), out,
    )  # fmt: skip
    if fields.exponent:
        # In FP64 the power of two is exact, so there is one rounding at most (to an FP32 denormal).  Errors may lift
        # the largest inputs beyond FP32; they saturate.
        with np.errstate(over="ignore"):
            scaled = np.ldexp(out.astype(np.float64), fields.exponent)
        out = np.clip(scaled, -LARGEST, LARGEST).astype(np.float32)
    return out


@kernel
def reconstruct_tiles(levels, affine, mean, blocks, transposed, after, out):
    _, heads, dim = out.shape
    columns = np.empty((dim, LANES), np.float32)
    offset = np.empty(LANES, np.float32)
    scale = np.empty(LANES, np.float32)
    lanes = columns.shape[1]
    for tile in range(levels.shape[0]):
        first = tile * LANES
        for lane in range(LANES):
            offset[lane] = affine[first + lane, 0]
            scale[lane] = affine[first + lane, 1]
        for h in range(heads):
            for d in range(dim):
                # A row of bytes, then a row of numbers: two loops that both become vector loops.
                row = levels[tile, h * dim + d]
                column = columns[d]
                for lane in range(lanes):
                    column[lane] = np.float32(np.int32(row[lane]))
                for lane in range(lanes):
                    column[lane] = offset[lane] + scale[lane] * column[lane]
            if mean.shape[0] > 0:
                for d in range(dim):
                    for lane in range(lanes):
                        columns[d, lane] += mean[h, d]
            hadamard_columns(columns, blocks, transposed)
            store_columns(columns, after[h], out, first, h, lanes)
