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


def quantise_groups(
    x: NDArray[np.float32], group: int, bits: int, clip: float = 1.0
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    """Codes ``[..., G, group]``, scales and zero points ``[..., G, 1]`` of groups of the last axis of ``x``.

    A value is ``zero + scale * m`` with ``m`` of ``bits`` bits; the zero point is the group's minimum, the scale its
    range over ``2**bits - 1``, both kept in FP16.  ``clip`` shrinks minimum and maximum towards zero first.
    """
    length = x.shape[-1]
    count = -(-length // group)
    # Repeating the last value changes neither minimum nor maximum.
    padding = [(0, 0)] * (x.ndim - 1) + [(0, count * group - length)]
    groups = np.pad(x, padding, mode="edge").reshape(*x.shape[:-1], count, group)
    low = groups.min(axis=-1, keepdims=True) * np.float32(clip)
    high = groups.max(axis=-1, keepdims=True) * np.float32(clip)
    top = np.float32(2**bits - 1)
    zero, scale = low.astype(np.float16), ((high - low) / top).astype(np.float16)
    rounded = scale.astype(np.float32)
    steps = np.divide(groups - zero.astype(np.float32), rounded, out=np.zeros_like(groups), where=rounded > 0)
    return np.clip(np.rint(steps), 0, top).astype(np.uint8), scale, zero


def restore_groups(
    codes: NDArray[np.uint8], scale: NDArray[np.float16], zero: NDArray[np.float16], length: int
) -> NDArray[np.float32]:
    """``[..., length]`` of what :func:`quantise_groups` returned."""
    restored = zero.astype(np.float32) + scale.astype(np.float32) * codes.astype(np.float32)
    return restored.reshape(*codes.shape[:-2], -1)[..., :length]


def code_groups(x: NDArray[np.float32], group: int, bits: int, clip: float = 1.0) -> tuple[NDArray[np.float32], float]:
    """Round trip of ``x`` float32 ``[..., L]`` in groups of ``group`` neighbours of its last axis, and its bytes.

    The last group of an axis may be smaller; it pays for a scale and a zero point like the others.  Codes are counted
    without padding to words.
    """
    codes, scale, zero = quantise_groups(x, group, bits, clip)
    return restore_groups(codes, scale, zero, x.shape[-1]), x.size * bits / 8 + scale.size * GROUP_BYTES
