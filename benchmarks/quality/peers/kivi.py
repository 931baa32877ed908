"""KIVI (Liu et al., ICML 2024, arXiv 2402.02750): keys in groups along tokens, values in groups along channels.

Stored: codes, and an FP16 scale and zero point for every group.  Keys are quantised per channel over a group of
tokens, values per token over a group of a head's channels (a head smaller than a group is one group).  No constants.

Left out: the window of recent tokens in FP16.  Keys that do not fill a last group are therefore quantised as a smaller
group; KIVI keeps them exact until the group is full.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

from .affine import code_channels, code_groups

SOURCE = "KIVI, arXiv 2402.02750; own code, without the exact recent window"


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, bits: int, group: int) -> Coded:
    coded_keys, key_bytes = code_channels(keys, group, bits)
    coded_values, value_bytes = code_groups(values, min(group, values.shape[2]), bits)
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    return [
        Method(
            f"KIVI {bits} bits, groups of {group}",
            f"KIVI, groups of {group}",
            SOURCE,
            partial(code, bits=bits, group=group),
        )
        for group in (32, 128)
        for bits in (2, 4)
    ]
