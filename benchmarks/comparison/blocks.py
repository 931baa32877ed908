"""llama.cpp's q8_0 and q4_0 compiled, so that their speed is that of a loop over blocks and not that of NumPy.

Bytes and numbers are those of ``benchmarks/quality/peers/ggml.py``, which says what the formats are; tests compare
them.  Scales lie apart from codes here.  llama.cpp's own code uses vector instructions by hand and is faster still.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

BLOCK = 32
Blocks = NDArray[np.float32]
Stored = tuple[NDArray[np.float16], NDArray[Any]]


@numba.njit(cache=True)
def _q8_0(blocks, scales, codes):
    for b in range(len(blocks)):
        largest = np.float32(0)
        for i in range(BLOCK):
            largest = max(largest, abs(blocks[b, i]))
        scale = largest / np.float32(127)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        scales[b] = scale
        for i in range(BLOCK):
            x = blocks[b, i] * inverse
            # C's roundf: halves go away from zero.
            whole = np.floor(abs(x))
            whole += abs(x) - whole >= np.float32(0.5)
            codes[b, i] = np.int8(whole if x >= 0 else -whole)


@numba.njit(cache=True)
def _from_q8_0(scales, codes, out):
    for b in range(len(out)):
        for i in range(BLOCK):
            out[b, i] = scales[b] * np.float32(codes[b, i])


@numba.njit(cache=True)
def _q4_0(blocks, scales, codes):
    for b in range(len(blocks)):
        largest = np.float32(0)
        for i in range(BLOCK):
            if abs(blocks[b, i]) > abs(largest):
                largest = blocks[b, i]
        scale = largest / np.float32(-8)
        inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
        scales[b] = scale
        for i in range(BLOCK // 2):
            low = min(np.int32(blocks[b, i] * inverse + np.float32(8.5)), np.int32(15))
            high = min(np.int32(blocks[b, i + BLOCK // 2] * inverse + np.float32(8.5)), np.int32(15))
            codes[b, i] = low | high << 4


@numba.njit(cache=True)
def _from_q4_0(scales, codes, out):
    for b in range(len(out)):
        for i in range(BLOCK // 2):
            out[b, i] = scales[b] * np.float32(np.int32(codes[b, i] & 15) - 8)
            out[b, i + BLOCK // 2] = scales[b] * np.float32(np.int32(codes[b, i] >> 4) - 8)


def _coder(
    encode: Any, decode: Any, width: int, dtype: Any
) -> tuple[Callable[[Blocks], Stored], Callable[[Stored], Blocks]]:
    def stored(blocks: Blocks) -> Stored:
        scales, codes = np.empty(len(blocks), np.float32), np.empty((len(blocks), width), dtype)
        encode(blocks, scales, codes)
        return scales.astype(np.float16), codes

    def restored(stored: Stored) -> Blocks:
        scales, codes = stored
        out = np.empty((len(codes), BLOCK), np.float32)
        decode(scales.astype(np.float32), codes, out)
        return out

    return stored, restored


#: Encoder and decoder of float32 ``[B, 32]`` by name.
CODERS = {
    "q8_0": _coder(_q8_0, _from_q8_0, BLOCK, np.int8),
    "q4_0": _coder(_q4_0, _from_q4_0, BLOCK // 2, np.uint8),
}
