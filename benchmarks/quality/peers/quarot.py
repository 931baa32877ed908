"""QuaRot's KV cache (Ashkboos et al., NeurIPS 2024, arXiv 2404.00456): Hadamard, then per token and group.

Stored: codes, and an FP16 scale and zero point for every group of up to 128 channels of a head.  Minimum and maximum
are clipped to 0.95 of themselves, the value the paper uses for its caches.  Constant: the Hadamard matrix of a head
(for heads that are no power of two, the one that this library builds).

Left out: weights and activations, which QuaRot quantises too.  Its code rounds zero points to integers; real ones cost
the same here and leave less error on every capture we tried.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

from dquantcodec.rotate import rotate, unrotate

from .affine import code_groups

SOURCE = "QuaRot, arXiv 2404.00456; own code of its KV cache alone, real instead of integer zero points"
GROUP = 128
CLIP = 0.95


def rotated_groups(
    x: NDArray[np.float32], bits: int, group: int, clip: float = 1.0
) -> tuple[NDArray[np.float32], float]:
    """Round trip of ``x`` ``[T, H, D]`` in groups of channels of the rotated heads, and its bytes."""
    plain = np.ones(x.shape[1:], np.int8)
    coded, stored = code_groups(rotate(np.ascontiguousarray(x), plain), min(group, x.shape[2]), bits, clip)
    return unrotate(np.ascontiguousarray(coded), plain), stored


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, bits: int) -> Coded:
    coded_keys, key_bytes = rotated_groups(keys, bits, GROUP, CLIP)
    coded_values, value_bytes = rotated_groups(values, bits, GROUP, CLIP)
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    return [Method(f"QuaRot {bits} bits", "QuaRot", SOURCE, partial(code, bits=bits)) for bits in (2, 3, 4)]
