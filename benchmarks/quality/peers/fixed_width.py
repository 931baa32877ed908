"""Fixed width (D-Quant, arXiv 2609.19880, appendix): the same codec without entropy coding and drift.

Rotation, windowed INT8 means of keys, min-max grid per token, least-squares refit and FP16 metadata are those of this
library; symbols take the nearest level.  As in the paper, a symbol of M levels is charged the ideal ``log2 M`` bits
(mixed radix without rounding to bytes), and keys and values get the most levels that the containers of our rate family
allow: 6 and 3 in those of the paper.  Only what the symbols take is counted, not the rest of the container (28 bytes
of the paper's 231 for values), so the points lie left of ours.

Stored: the symbols, an FP16 offset and scale per token, and for keys an INT8 mean per channel and an FP16 scale per
head for every 128 tokens.  Constant: the rotation signs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import ours
from method import Coded, Method
from numpy.typing import NDArray

from dquantcodec import grid
from dquantcodec.encode import prepare
from dquantcodec.means import mean_values
from dquantcodec.plan import Plan, StreamPlan, make_plan
from dquantcodec.profile import PROFILES, REFERENCE_VALUES
from dquantcodec.rotate import unrotate

SOURCE = "fixed-width counterpart of D-Quant, arXiv 2609.19880, appendix; ideal packing"
AFFINE_BYTES = 4


def most_levels(container: float) -> int:
    """The most levels whose symbols fit a container that is stated for 1024 values; at least 2."""
    return max(2, int(2 ** (8 * container / REFERENCE_VALUES)))


def code_stream(x: NDArray[np.float32], plan: Plan, stream: StreamPlan) -> tuple[NDArray[np.float32], float]:
    """Round trip of ``x`` ``[T, H, D]``, and its bytes; of ``stream`` only ``levels`` and ``mean`` matter."""
    prepared = prepare(x, plan, stream)
    symbols = ((prepared.position + grid.ONE // 2 - 1) // grid.ONE).astype(np.uint8)
    offset, scale = grid.refit(prepared.position, symbols, prepared.offset, prepared.scale)
    rotated = offset.astype(np.float32)[:, None] + scale.astype(np.float32)[:, None] * symbols.astype(np.float32)
    rotated = rotated.reshape(x.shape)
    stored = x.size * math.log2(stream.levels) / 8 + len(x) * AFFINE_BYTES
    pages = range(0, len(x), plan.window)
    if stream.mean:
        for first, mean_scale, mean in zip(pages, prepared.mean_scales, prepared.means):
            rotated[first : first + plan.window] += mean_values(mean_scale, mean)
            stored += mean.nbytes + mean_scale.nbytes
    values = unrotate(rotated, plan.signs)
    for first, exponent in zip(pages, prepared.exponents):
        if exponent:
            part = values[first : first + plan.window]
            part[:] = np.ldexp(part, exponent)
    return values, stored


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, key_levels: int, value_levels: int) -> Coded:
    plan = make_plan(PROFILES["paper-2.26"], *keys.shape[1:])
    coded_keys, key_bytes = code_stream(keys, plan, replace(plan.key, levels=key_levels))
    coded_values, value_bytes = code_stream(values, plan, replace(plan.value, levels=value_levels))
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


#: Bits per value whose containers are taken: those of ours, the paper's 2.26, and two that 64 levels do not reach.
RATES = (*ours.RATES, 2.26, 6.0, 7.0)


def methods() -> list[Method]:
    pairs = {tuple(most_levels(container) for container in ours.containers(bits)) for bits in RATES}
    return [
        Method(
            f"fixed width {key}/{value} levels",
            "fixed width",
            SOURCE,
            partial(code, key_levels=key, value_levels=value),
        )
        for key, value in sorted(pairs)
    ]
