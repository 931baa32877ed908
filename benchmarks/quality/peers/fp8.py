"""FP8 e4m3 with one scale per tensor, as inference engines store 8-bit caches.

Keys and values of a layer are each divided by an FP32 scale that brings their largest magnitude to 448, the largest
finite number of the type.  Stored: a byte a value and the two scales.  No constants.  Engines fix the scale before
they see the tokens (often to 1); here it is that of the tokens themselves, which is never worse.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

SOURCE = "FP8 e4m3, per-tensor scale; Micikevicius et al., arXiv 2209.05433"
LARGEST = np.float32(448)
SCALE_BYTES = 4


def code_tensor(x: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    scale = np.float32(np.abs(x).max() / LARGEST) or np.float32(1)
    coded = np.clip(x / scale, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    return coded.astype(np.float32) * scale, coded.nbytes + SCALE_BYTES


def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
    coded_keys, key_bytes = code_tensor(keys)
    coded_values, value_bytes = code_tensor(values)
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    return [Method("FP8 e4m3", "FP8", SOURCE, code)]
