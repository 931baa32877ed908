"""Decoding grouped kinds on a device: what the kernel looks up, and how it is launched.

Shapes, channels and tables are data, so layers of one geometry and container share a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..group_arrays import group_arrays
from ..group_prefix import group_tables
from ..grouping import MAX_FIELDS, MAX_GROUP_LETTERS, Grouping
from ..plan import Plan, StreamPlan
from ..prefix import LENGTH_BITS
from ..profile import TILE
from .launches import ELEMENTS, SHARED_BYTES, Launch, fit_warps
from .params import DECODE

#: ``GroupDecodeParams`` of the device code, byte for byte.
GROUP_DECODE = np.dtype(
    [("rows", DECODE)]
    + [(name, np.uint64) for name in ("windows", "groups", "channels", "heads", "multipliers", "offsets")]
    + [(name, np.int32) for name in ("window_bytes", "groups_each", "channel_rows", "reserved")]
)
assert GROUP_DECODE.itemsize == 200

#: Windows, groups and channels of more bytes stay in global memory.
SHARED_LOOKUPS = 96 << 10
#: Streams of more bytes are read where they stand.
STAGED_STREAM = 24 << 10

_SIZES = ((20, 1), (16, 1), (12, 1), (8, 1), (4, 1), (2, 1))


@dataclass(frozen=True, eq=False)
class GroupDecodeArrays:
    """What ``GroupDecodeParams`` points to.

    windows
        uint16: :attr:`~dquantcodec.group_prefix.GroupTables.window`, zeros behind up to a multiple of 16 bytes.
    groups
        uint32 ``[H * G, 4]``: first entry of the table; precision, letters and fields, a byte each; lowest bit and,
        from bit 4 on, width of every field, a byte each; first row in ``channels``.
    channels
        uint32 ``[rows, 8]``: the channels of a field, counted within their head.
    heads
        int32 ``[H]``: the head at every place of the coded order.
    multipliers, offsets
        float32 ``[H * D]``: a value is its level times the one plus the other, times the scale.
    """

    windows: NDArray[np.uint16]
    groups: NDArray[np.uint32]
    channels: NDArray[np.uint32]
    heads: NDArray[np.int32]
    multipliers: NDArray[np.float32]
    offsets: NDArray[np.float32]


def window_bytes(grouping: Grouping) -> int:
    """Bytes of all tables by the next bits, as device code has them."""
    size = sum(2 * grouping.states << table.precision for table in grouping.tables)
    return -(-size // 16) * 16


def lookup_bytes(grouping: Grouping) -> int:
    """Bytes of what a block looks up: windows, groups and channels."""
    channels = 4 * MAX_GROUP_LETTERS * sum(grouping.fields)
    return window_bytes(grouping) + grouping.heads * (16 * len(grouping.letters) + channels)


def levels_pitch(head_dim: int) -> int:
    """Bytes of a token's levels of a head in shared memory: whole runs of 8, 16 or 32 lanes, and a word more."""
    run = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    return -(-head_dim // run) * run + 4


def group_decode_arrays(stream: StreamPlan) -> GroupDecodeArrays:
    grouping = stream.grouping
    assert grouping is not None
    arrays, coded = group_arrays(grouping), group_tables(grouping)
    windows = np.zeros(window_bytes(grouping) // 2, np.uint16)
    windows[: len(coded.window)] = coded.window
    widths = np.zeros((len(grouping.tables), MAX_FIELDS), np.int64)
    for row, table in zip(widths, grouping.tables):
        row[: len(table.classes)] = [grouping.classes[c].field_bits for c in table.classes]
    places = (LENGTH_BITS + arrays.shifts) % 16 | widths << 4
    first, fields, letters, table = arrays.groups.T
    groups = np.stack(
        [
            coded.window_first[table],
            coded.precision[table] | letters << 8 | fields << 16,
            (places << 8 * np.arange(MAX_FIELDS))[table].sum(axis=1),
            first,
        ],
        axis=1,
    )
    exists = arrays.row_channel >= 0
    channels = np.where(exists, arrays.row_channel % grouping.head_dim, 0)
    coded_channels = np.zeros(len(arrays.factor), bool)
    coded_channels[arrays.row_channel[exists]] = True
    assert channels.shape[1] == MAX_GROUP_LETTERS
    return GroupDecodeArrays(
        windows=windows,
        groups=groups.astype(np.uint32),
        channels=channels.astype(np.uint32),
        heads=(grouping.order[:, 0] // grouping.head_dim).astype(np.int32),
        multipliers=np.where(coded_channels, arrays.factor, 0).astype(np.float32),
        offsets=np.where(coded_channels, -arrays.middle * arrays.factor, 0).astype(np.float32),
    )


def group_decode_launch(plan: Plan, kind: str, dtype: str, shared: int = SHARED_BYTES["sm_90"]) -> Launch:
    """The kernel that decodes the grouped ``kind`` to rows of ``dtype``; ``shared`` as for :func:`decode_launch`."""
    stream: StreamPlan = getattr(plan, kind)
    grouping = stream.grouping
    assert grouping is not None
    lookups = needed if (needed := lookup_bytes(grouping)) <= SHARED_LOOKUPS else 0
    words = stream.words * TILE * stream.word_bytes
    warp = (words if words <= STAGED_STREAM else 0) + TILE * levels_pitch(plan.head_dim)
    warps, residents = fit_warps(lookups, warp, shared, _SIZES)
    values = {
        "HEADS": plan.kv_heads,
        "HEAD_DIM": plan.head_dim,
        "WORDS": stream.words,
        "SUBSTREAMS": stream.substreams,
        "STATES": grouping.states,
        "MEAN": int(stream.mean),
        "SHARED_LOOKUPS": int(lookups > 0),
        "ELEMENT": ELEMENTS[dtype],
        "WARPS": warps,
        "BLOCKS": residents,
    }
    options = tuple(f"-DDQ_{name}={value}" for name, value in values.items())
    return Launch("decode_groups", options, warps, lookups + warps * warp, residents)
