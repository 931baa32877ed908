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
    scale, mean = page_window_means(rotated, len(rotated))
    return scale[0], mean[0]


def page_window_means(rotated: NDArray[np.float32], window: int) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """:func:`window_means` of every ``window`` tokens: FP16 ``[pages, H]`` and int8 ``[pages, H, D]``."""
    tokens, heads, head_dim = rotated.shape
    mean = np.empty((-(-tokens // window), heads, head_dim), np.float32)
    channel_means(rotated.reshape(-1), window, mean.reshape(len(mean), -1))
    # Rounded up, so that no mean needs more than 127 steps.
    scale = round_up_half(np.abs(mean).max(axis=2) / LARGEST)
    step = scale.astype(np.float32)[:, :, None]
    steps = np.divide(mean, step, out=np.zeros_like(mean), where=step > 0)
    return scale, np.rint(steps).astype(np.int8)


def remove_means(rotated: NDArray[np.float32], window: int, scale: NDArray[np.float16], mean: NDArray[np.int8]) -> None:
    """Subtract from ``rotated`` in place what :func:`page_window_means` found."""
    values = mean_values(scale, mean)
    subtract_pages(rotated.reshape(-1), window, values.reshape(len(values), -1))


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
def channel_means(rows, window, out):
    """``out[p, c]`` = mean over the rows of a window, summed in FP32 in row order (the order is part of the encoder's
    determinism)."""
    pages, width = out.shape
    tokens = rows.shape[0] // width
    for p in range(pages):
        mean = out[p]
        first, last = p * window, min((p + 1) * window, tokens)
        for c in range(width):
            mean[c] = np.float32(0)
        for r in range(first, last):
            row = rows[r * width : (r + 1) * width]
            for c in range(width):
                mean[c] += row[c]
        count = np.float32(last - first)
        for c in range(width):
            mean[c] /= count


@kernel
def subtract_pages(rows, window, values):
    width = values.shape[1]
    for r in range(rows.shape[0] // width):
        row, less = rows[r * width : (r + 1) * width], values[r // window]
        for c in range(width):
            row[c] -= less[c]
