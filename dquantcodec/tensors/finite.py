"""NaN and infinity in the input: found, named, and replaced if asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Exponent bits, all ones in NaN and infinity, by element type.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


@dataclass(frozen=True)
class Place:
    """Where the first number that is not finite stands, and what it is (``"NaN"`` or ``"infinity"``)."""

    token: int
    head: int
    channel: int
    what: str


def find_nonfinite(block: NDArray[Any]) -> Place | None:
    """The first NaN or infinity of ``block`` ``[t, H, D]`` (float16, bfloat16 or float32), by token, or ``None``."""
    mask = _nonfinite(block)
    if not mask.any():
        return None
    token, head, channel = (int(index) for index in np.unravel_index(int(mask.argmax()), block.shape))
    what = "NaN" if np.isnan(np.float32(block[token, head, channel])) else "infinity"
    return Place(token, head, channel, what)


def replace_nonfinite(block: NDArray[Any], policy: str) -> tuple[NDArray[Any], int]:
    """``block`` with every NaN and infinity replaced, and how many there were.

    ``"zero"`` puts 0. ``"clamp"`` puts 0 for NaN and, for an infinity, its sign times the largest finite magnitude of
    the same token: the largest number of the element type would leave that token's grid nothing for its other values.
    The result depends on nothing outside the token, so it is the same however the input is cut into blocks.
    """
    mask = _nonfinite(block)
    count = int(np.count_nonzero(mask))
    if not count:
        return block, 0
    fixed = np.where(mask, block.dtype.type(0), block)
    if policy == "clamp":
        largest = np.abs(fixed.astype(np.float32)).max(axis=(1, 2), keepdims=True)
        wide = block.astype(np.float32)
        sign = np.where(np.isnan(wide), np.float32(0), np.sign(wide))
        fixed = np.where(mask, (sign * largest).astype(block.dtype), fixed)
    return fixed, count


def _nonfinite(block: NDArray[Any]) -> NDArray[np.bool_]:
    # On the bits: exact, and several times faster than converting bfloat16 or float16 to ask isfinite.
    bits: NDArray[Any] = block.view(np.uint32 if block.dtype.itemsize == 4 else np.uint16)
    exponent = np.asarray(_EXPONENT[block.dtype.name], bits.dtype)
    return np.asarray((bits & exponent) == exponent)
