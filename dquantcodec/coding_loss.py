"""What coding a few tokens loses, by classes and by rotation: which of the two suits a layer.

Classes suit what models produce.  Streams in which nearly all values have one magnitude (constant heads) pass a
threshold together and keep little; a rotation gathers them in a few large values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import drift
from .encode import drift_groups, fit_grid, prepare
from .grid import ONE
from .group_arrays import group_arrays
from .group_grid import fit_scale
from .plan import Plan, StreamPlan, least_words

#: Losses beyond this multiple of what a uniform grid of the plan's step would leave ask for a comparison.
SUSPICIOUS = 2.5


def better_rotated(
    x: NDArray[np.float32], sigma: NDArray[np.float64], plan: Plan, stream: StreamPlan, rotated: StreamPlan
) -> bool:
    """Whether tokens float32 ``[T, H, D]`` of one window lose less by ``rotated`` than by the grouped ``stream``.

    ``sigma`` are the channels' standard deviations that the plan was fitted to; usual losses are not compared.
    """
    usual = float(np.minimum(sigma**2, stream.step**2 / 8).sum() / (sigma**2).sum())
    loss = grouped_loss(x, plan, stream)
    if loss <= SUSPICIOUS * usual:
        return False
    letters = plan.kv_heads // rotated.substreams * -(-plan.head_dim // rotated.letter)
    return least_words(rotated, letters) <= rotated.words and rotated_loss(x, plan, rotated) < loss


def grouped_loss(x: NDArray[np.float32], plan: Plan, stream: StreamPlan) -> float:
    """Squared error over energy, of coded channels, about the means."""
    assert stream.grouping is not None
    prepared = prepare(x, plan, stream)
    _, levels = drift_groups(prepared.position, stream)
    fitted = fit_scale(prepared.position, levels, prepared.scale, stream.grouping, stream.gain == "unbiased")
    arrays = group_arrays(stream.grouping)
    factor = arrays.factor[arrays.row_channel].reshape(-1)
    exact = prepared.position / ONE * prepared.scale.astype(np.float64)[:, None]
    return _loss(exact, levels * factor * fitted.astype(np.float64)[:, None])


def rotated_loss(x: NDArray[np.float32], plan: Plan, stream: StreamPlan) -> float:
    """The same of a rotated stream on a mid-tread grid."""
    prepared = prepare(x, plan, stream)
    symbols, _ = drift.drift(prepared.position, stream, plan.head_dim)
    fitted = fit_grid(prepared.position, symbols, prepared.offset, prepared.scale, stream)
    middle = (stream.levels - 1) / 2
    exact = (prepared.position / ONE - middle) * prepared.scale.astype(np.float64)[:, None]
    return _loss(exact, (symbols - middle) * fitted.astype(np.float64))


def _loss(exact: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    energy = float(np.square(exact).sum())
    return float(np.square(exact - other).sum()) / energy if energy else 0.0
