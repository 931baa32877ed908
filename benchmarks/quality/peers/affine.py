"""Asymmetric uniform quantisation of groups, which KIVI, QuaRot and OScaR share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: FP16 scale and FP16 zero point of a group.
GROUP_BYTES = 4


def code_channels(x: NDArray[np.float32], group: int, bits: int) -> tuple[NDArray[np.float32], float]:
    """As :func:`code_groups` for ``x`` ``[T, H, D]``, in groups of ``group`` tokens of one channel."""
    coded, stored = code_groups(np.ascontiguousarray(x.transpose(1, 2, 0)), group, bits)
    return np.ascontiguousarray(coded.transpose(2, 0, 1)), stored


def code_groups(x: NDArray[np.float32], group: int, bits: int, clip: float = 1.0) -> tuple[NDArray[np.float32], float]:
    """Round trip of ``x`` float32 ``[..., L]`` in groups of ``group`` neighbours of its last axis, and its bytes.

    A value is ``zero + scale * m`` with ``m`` of ``bits`` bits; the zero point is the group's minimum, the scale its
    range over ``2**bits - 1``, both kept in FP16.  ``clip`` shrinks minimum and maximum towards zero first.  The last
    group of an axis may be smaller; it pays for a scale and a zero point like the others.  Codes are counted without
    padding to words.
    """
    length = x.shape[-1]
    count = -(-length // group)
    # Repeating the last value changes neither minimum nor maximum.
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * group - length)]
    groups = np.pad(x, padding, mode="edge").reshape(*x.shape[:-1], count, group)
    low = groups.min(axis=-1, keepdims=True) * np.float32(clip)
    high = groups.max(axis=-1, keepdims=True) * np.float32(clip)
    top = np.float32(2**bits - 1)
    zero = low.astype(np.float16).astype(np.float32)
    scale = ((high - low) / top).astype(np.float16).astype(np.float32)
    steps = np.divide(groups - zero, scale, out=np.zeros_like(groups), where=scale > 0)
    restored = zero + scale * np.clip(np.rint(steps), 0, top)
    restored = restored.reshape(*x.shape[:-1], count * group)[..., :length]
    return restored, x.size * bits / 8 + low.size * GROUP_BYTES
