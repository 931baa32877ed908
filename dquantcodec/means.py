"""Windowed channel means of keys (paper, section 3.2), one INT8 per channel and page, one FP16 scale per head.

Keys carry a large, slowly varying mean per channel that a token's single offset cannot describe.  The mean of a
page's tokens is rounded to INT8 *before* it is subtracted, so what the decoder adds back is exactly what was removed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .kernels import kernel

LARGEST = np.float32(127)


def window_means(rotated: NDArray[np.float32]) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """INT8 means of one page of rotated values float32 ``[T, H, D]``.

    Returns the FP16 scale ``[H]`` and the means int8 ``[H, D]``; a channel's mean is ``scale * mean``.
    """
    tokens, heads, head_dim = rotated.shape
    mean = np.empty((heads, head_dim), np.float32)
    channel_means(rotated.reshape(tokens, -1), mean.reshape(-1))
    # Rounded up, so that no mean needs more than 127 steps.
    scale = round_up_half(np.abs(mean).max(axis=1) / LARGEST)
    step = scale.astype(np.float32)[:, None]
    steps = np.divide(mean, step, out=np.zeros_like(mean), where=step > 0)
    return scale, np.rint(steps).astype(np.int8)


def mean_values(scale: NDArray[np.float16], mean: NDArray[np.int8]) -> NDArray[np.float32]:
    """float32 ``[..., H, D]`` that the encoder subtracts and the decoder adds; FP16 times INT8 is exact in FP32."""
    return scale.astype(np.float32)[..., None] * mean.astype(np.float32)


def page_means(scale: NDArray[np.float16] | None, mean: NDArray[np.int8] | None) -> NDArray[np.float32]:
    """:func:`mean_values` ``[pages, H, D]`` of page fields; of no page for a kind without means."""
    if scale is None or mean is None:
        return np.zeros((0, 1, 1), np.float32)
    return mean_values(scale, mean)


def round_up_half(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """The smallest FP16 not below ``x``."""
    half = x.astype(np.float16)
    below = half.astype(np.float32) < x
    half[below] = np.nextafter(half[below], np.float16(np.inf))
    return half


def round_down_half(x: NDArray[np.float32]) -> NDArray[np.float16]:
    """The largest FP16 not above ``x``."""
    return -round_up_half(-x)


@kernel
def channel_means(rows, out):
    """``out[c]`` = mean over rows, summed in FP32 in row order (the order is part of the encoder's determinism)."""
    count = np.float32(rows.shape[0])
    for c in range(out.shape[0]):
        out[c] = np.float32(0)
    for r in range(rows.shape[0]):
        for c in range(out.shape[0]):
            out[c] += rows[r, c]
    for c in range(out.shape[0]):
        out[c] /= count
