"""OScaR (Su et al. 2026, arXiv 2605.19660): rotated keys without their token norms, per channel; rotated values.

Keys are rotated per head ("canalized rotation"), divided by the norm of their token over all heads ("omni-token
scaling"), and quantised per channel in groups of tokens; values are rotated and quantised per token in groups of a
head's channels.  Both asymmetric, unclipped.  Groups of 32 are the setting of the authors' evaluation, groups of 128
that of the D-Quant paper's comparison.  Stored: codes, FP16 scale and zero point of every group, an FP16 norm per
token.  Constant: the Hadamard matrix of a head.

Left out: the window of recent tokens in FP16.  The authors' kernels keep scales, zero points and norms in FP32 and
round zero points to integers; FP16 and real ones are both cheaper and closer, and are what the D-Quant paper's 2.26
bits for OScaR count.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

from dquantcodec.rotate import rotate, unrotate

from .affine import code_channels
from .quarot import rotated_groups

SOURCE = "OScaR, arXiv 2605.19660; own code, without the exact recent window, FP16 metadata"
NORM_BYTES = 2


def code_keys(keys: NDArray[np.float32], bits: int, group: int) -> tuple[NDArray[np.float32], float]:
    plain = np.ones(keys.shape[1:], np.int8)
    rotated = rotate(np.ascontiguousarray(keys), plain)
    norm = np.sqrt(np.square(rotated).sum(axis=(1, 2), keepdims=True)).astype(np.float16).astype(np.float32)
    unit = rotated / np.where(norm > 0, norm, np.float32(1))
    coded, stored = code_channels(unit, group, bits)
    return unrotate(coded * norm, plain), stored + NORM_BYTES * len(keys)


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, bits: int, group: int) -> Coded:
    coded_keys, key_bytes = code_keys(keys, bits, group)
    coded_values, value_bytes = rotated_groups(values, bits, group)
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    return [
        Method(
            f"OScaR {bits} bits, groups of {group}",
            f"OScaR, groups of {group}",
            SOURCE,
            partial(code, bits=bits, group=group),
        )
        for group in (32, 128)
        for bits in (2, 4)
    ]
