"""Exact rows: blocks of one layer and kind, raw or as compressed byte planes (specification, clause 7).

The high bytes of floats repeat, the low bytes look random.  So a block may be cut into planes (all first bytes, all
second bytes, ...), each compressed alone, or kept as it is where that is no gain.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, FormatError, UnsupportedError

RAW = 0
PLANES = 1
LEVEL = 3


def encode_rows(rows: NDArray[Any]) -> tuple[int, bytes]:
    """Encoding number and block of exact rows ``[t, H, D]``, whichever of the two encodings is smaller."""
    import zstandard  # looking into a file does without

    raw = rows.tobytes()
    size = rows.dtype.itemsize
    planes = [raw[byte::size] for byte in range(size)]
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False, write_content_size=True)
    # The plane first: at equal length it wins, because that length is how a reader knows a plane kept as it is.
    packed = [min(plane, compressor.compress(plane), key=len) for plane in planes]
    block = np.array([len(plane) for plane in packed], "<u4").tobytes() + b"".join(packed)
    return (PLANES, block) if len(block) < len(raw) else (RAW, raw)


def decode_rows(encoding: int, block: memoryview, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Exact rows of ``shape`` from their block.

    The decoded size follows from ``shape`` alone; a frame that claims another is refused before it is decompressed.
    Raises :class:`UnsupportedError` (``rows-encoding``), :class:`FormatError` (``rows-length``) and
    :class:`ChecksumError` (``rows-frame``).
    """
    values = shape[0] * shape[1] * shape[2]
    if encoding == RAW:
        if block.nbytes != values * dtype.itemsize:
            raise FormatError(
                f"raw rows take {block.nbytes} bytes instead of {values * dtype.itemsize}", code="rows-length"
            )
        return np.frombuffer(block.tobytes(), dtype).reshape(shape)
    if encoding != PLANES:
        raise UnsupportedError(
            f"exact rows have encoding {encoding}; read them with a newer version", code="rows-encoding"
        )
    lengths = block[: 4 * dtype.itemsize].tobytes()
    sizes = [int(n) for n in np.frombuffer(lengths[: len(lengths) // 4 * 4], "<u4")]
    if len(sizes) != dtype.itemsize or max(sizes) > values or 4 * len(sizes) + sum(sizes) != block.nbytes:
        raise FormatError("the planes of exact rows do not fill their block", code="rows-length")
    planes = np.empty((values, dtype.itemsize), np.uint8)
    offset = 4 * len(sizes)
    for byte, size in enumerate(sizes):
        planes[:, byte] = _plane(block[offset : offset + size], values)
        offset += size
    return planes.reshape(-1).view(dtype).reshape(shape)


def _plane(stored: memoryview, values: int) -> NDArray[np.uint8]:
    if stored.nbytes == values:
        return np.frombuffer(stored, np.uint8)
    import zstandard

    frame = stored.tobytes()
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != values or parameters.dict_id:
            raise FormatError(
                f"a compressed plane claims {parameters.content_size} bytes instead of {values}", code="rows-length"
            )
        plane = zstandard.ZstdDecompressor().decompress(frame, max_output_size=values, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ChecksumError(f"a compressed plane cannot be decompressed: {error}", code="rows-frame") from None
    if len(plane) != values:
        raise ChecksumError(f"a compressed plane has {len(plane)} bytes instead of {values}", code="rows-frame")
    return np.frombuffer(plane, np.uint8)
