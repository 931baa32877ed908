"""A self-test for installed copies: golden pages from integers, and a small file there and back.

The inputs need no random generator and no floating-point accident, so every machine must give these checksums; a
compiler, cache or library that does not is found here before it is found in somebody's data.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .codec import Codec
from .file.structs import crc32c

KV_HEADS, HEAD_DIM, TOKENS = 2, 64, 33

#: CRC32C of the page of every profile's plan without data, and of the FP32 numbers decoded from it.
GOLDEN = {
    "2.26": (1846753059, 948134786),
    "paper-2.26": (4107608340, 458752965),
}


def integers(count: int, seed: int) -> NDArray[np.float32]:
    """``count`` integers from -128 to 127 by a linear congruence, summed over four draws: nearly normal."""
    state = np.uint32(seed)
    draws = np.empty((4, count), np.int64)
    with np.errstate(over="ignore"):
        for i in range(4):
            for j in range(count):
                state = state * np.uint32(1664525) + np.uint32(1013904223)
                draws[i, j] = int(state >> np.uint32(26)) - 32
    total: NDArray[np.int64] = draws.sum(axis=0)
    return total.astype(np.float32)


def tensors() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values ``[33, 2, 64]`` in steps of 1/64."""
    shape = (TOKENS, KV_HEADS, HEAD_DIM)
    keys, values = (integers(TOKENS * KV_HEADS * HEAD_DIM, seed).reshape(shape) / np.float32(64) for seed in (1, 2))
    return keys, values


def checksums(profile: str) -> tuple[int, int]:
    """What this installation makes of the tensors: checksums of the page and of what is decoded from it."""
    codec = Codec(profile, KV_HEADS, HEAD_DIM)
    pages = codec.encode(*tensors())
    decoded = codec.decode(pages, dtype=np.float32)
    return crc32c(pages.data.tobytes()), crc32c(b"".join(array.astype("<f4").tobytes() for array in decoded))


def wrong_checksums() -> list[str]:
    """Profiles whose golden page comes out differently; none is right."""
    return [profile for profile, golden in GOLDEN.items() if checksums(profile) != golden]


def file_faults() -> list[str]:
    """What is wrong about a small file written, verified and read back; none is right."""
    from .file import Layer, create
    from .file import open as open_file

    keys, values = (np.concatenate([array] * 8) for array in tensors())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "self-test.dqkv"
        with create(str(path), [Layer(KV_HEADS, HEAD_DIM, "float32")], recent=8) as writer:
            writer.append([keys], [values])
        with open_file(str(path)) as reader:
            faults = [finding.message for finding in reader.verify()]
            layer = reader.layers[0]
            if not np.array_equal(layer.value[-8:], values[-8:]):
                faults.append("exact rows come back changed")
            error = layer.value.read(0, len(values), dtype=np.float32) - values
            # Noise of a 2.26-bit code is about an eighth of the energy; half of it means another tensor.
            if not np.square(error).sum() < np.square(values).sum() / 2:
                faults.append("decoded values are not the ones encoded")
    return faults
