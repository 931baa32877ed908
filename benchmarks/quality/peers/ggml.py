"""llama.cpp's cache types q8_0, q4_0 and q4_1: blocks of 32 neighbouring values of a token's row over all heads.

    q8_0   FP16 scale, 32 x int8                     34 bytes, 8.5 bits a value
    q4_0   FP16 scale, 16 x two 4-bit codes          18 bytes, 4.5 bits
    q4_1   FP16 scale, FP16 minimum, 16 x two codes  20 bytes, 5 bits

The blocks are made byte for byte as ggml's reference quantisers make them: codes are computed with the unrounded FP32
scale, low nibbles hold the first sixteen values.  A row that does not divide into blocks is padded with zeros and pays
for the whole last block (llama.cpp refuses such heads).  No constants.

Newer versions of llama.cpp rotate before these types; "rotated" does so with the plain Hadamard matrix of a whole head,
however llama.cpp divides it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

from dquantcodec.rotate import rotate, unrotate

SOURCE = "llama.cpp (ggml), block types of its KV cache; own code"
BLOCK = 32

Blocks = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def _half(x: NDArray[np.float32]) -> Bytes:
    return x.astype("<f2").view(np.uint8)


def _inverse(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _numbers(data: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(codes: NDArray[np.uint8]) -> Bytes:
    return codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4


def _codes(nibbles: Bytes) -> NDArray[np.float32]:
    return np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)


def pack_q8_0(blocks: Blocks) -> Bytes:
    """uint8 ``[B, 34]`` of float32 ``[B, 32]``."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    exact = np.abs(blocks * _inverse(scale))
    whole = np.floor(exact)
    # C's roundf: halves go away from zero.
    magnitude = whole + (exact - whole >= 0.5)
    codes = np.copysign(magnitude, blocks).astype(np.int8)
    return np.concatenate([_half(scale), codes.view(np.uint8)], axis=1)


def unpack_q8_0(data: Bytes) -> Blocks:
    return _numbers(data[:, :2]) * np.ascontiguousarray(data[:, 2:]).view(np.int8).astype(np.float32)


def pack_q4_0(blocks: Blocks) -> Bytes:
    """uint8 ``[B, 18]``: the value of largest magnitude, with its sign, becomes code 0, which stands for -8."""
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum((blocks * _inverse(scale) + np.float32(8.5)).astype(np.int8), 15).astype(np.uint8)
    return np.concatenate([_half(scale), _nibbles(codes)], axis=1)


def unpack_q4_0(data: Bytes) -> Blocks:
    return _numbers(data[:, :2]) * (_codes(data[:, 2:]) - np.float32(8))


def pack_q4_1(blocks: Blocks) -> Bytes:
    """uint8 ``[B, 20]``: codes count steps above the block's minimum."""
    low, high = blocks.min(axis=1, keepdims=True), blocks.max(axis=1, keepdims=True)
    scale = (high - low) / np.float32(15)
    codes = np.minimum(((blocks - low) * _inverse(scale) + np.float32(0.5)).astype(np.int8), 15).astype(np.uint8)
    return np.concatenate([_half(scale), _half(low), _nibbles(codes)], axis=1)


def unpack_q4_1(data: Bytes) -> Blocks:
    return _numbers(data[:, :2]) * _codes(data[:, 4:]) + _numbers(data[:, 2:4])


TYPES: dict[str, tuple[Callable[[Blocks], Bytes], Callable[[Bytes], Blocks]]] = {
    "q8_0": (pack_q8_0, unpack_q8_0),
    "q4_0": (pack_q4_0, unpack_q4_0),
    "q4_1": (pack_q4_1, unpack_q4_1),
}


def code_rows(x: NDArray[np.float32], kind: str) -> tuple[NDArray[np.float32], int]:
    """Round trip of ``x`` ``[T, H, D]`` row by row, and the bytes of its blocks."""
    pack, unpack = TYPES[kind]
    rows = x.reshape(len(x), -1)
    width = rows.shape[1]
    padded = np.pad(rows, ((0, 0), (0, -width % BLOCK)))
    data = pack(padded.reshape(-1, BLOCK))
    return unpack(data).reshape(padded.shape)[:, :width].reshape(x.shape), data.nbytes


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, kind: str, rotated: bool = False) -> Coded:
    signs = np.ones(keys.shape[1:], np.int8)
    coded, stored = [], []
    for x in (keys, values):
        restored, size = code_rows(rotate(np.ascontiguousarray(x), signs) if rotated else x, kind)
        restored = np.ascontiguousarray(restored)
        coded.append(unrotate(restored, signs) if rotated else restored)
        stored.append(size)
    return Coded(*coded, *stored)


def methods() -> list[Method]:
    plain = [Method(kind, "llama.cpp", SOURCE, partial(code, kind=kind)) for kind in ("q4_0", "q4_1", "q8_0")]
    return [
        *plain,
        Method("q4_0 rotated", "llama.cpp, rotated", SOURCE, partial(code, kind="q4_0", rotated=True)),
        Method("q8_0 rotated", "llama.cpp, rotated", SOURCE, partial(code, kind="q8_0", rotated=True)),
    ]
