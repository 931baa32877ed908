"""Plans with variance classes as attention kernels take them: shapes for compiling, tables and records as data.

Letters are regrouped into 16-bit table entries whose fields a matrix product takes as they are (see
``gpu/include/dquant/attend_groups.cuh``).  A rotated kind beside a grouped one is written as groups of one table.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..group_arrays import group_arrays
from ..group_prefix import group_tables
from ..grouping import MAX_GROUP_LETTERS
from ..letters import letter_table
from ..page_layout import KINDS
from ..plan import Plan, StreamPlan
from ..prefix import LENGTH_BITS, prefix_table
from ..trellis import state_bits

#: Tables are rounded up to so many bytes, so that more layers share a kernel; those of a trellis, which take most of a
#: block's memory, to fewer.
TABLE_STEP, TRELLIS_TABLE_STEP = 8192, 2048
#: Parameters of a kernel.
MOST_PARAM_BYTES = 32000
#: What sums of levels are multiplied with (``OUTPUT_UNIT`` of the device code).
OUTPUT_UNIT = 1024.0


@dataclass(frozen=True, eq=False)
class GroupKind:
    """One kind of one plan.

    letters, fields
        Shapes of a head's groups; eight channels of a field are a *half*, counted group by group.
    first_field
        Lowest bit of an entry's fields: 6 for up to ten bits of them, which costs decoders least, 5 for eleven, 4 for
        twelve and for those of a trellis.
    low
        Whether the last of several fields stands lowest in an entry and is taken unshifted.
    table
        uint16: entries of all tables, the largest first; those of other states of a trellis at equal distances.
    widths
        Bits of every half's field: those of the widest of the tables that share places of fields.
    records
        uint32 ``[H, G, 2]``: index mask of the table and its place, both in bytes.
    order
        int64 ``[H, halves, 8]``: channels within their head, -1 where there is none.
    places
        int64 ``[halves]``: a level of the half is a number times two to this.
    gains, middles
        float64 ``[H, halves]``.
    heads
        int64 ``[H]``: the head at every place of the coded order.
    """

    letters: tuple[int, ...]
    fields: tuple[int, ...]
    widths: tuple[int, ...]
    words: int
    precision: int
    states: int
    mean: bool
    rotated: bool
    first_field: int
    low: bool
    table: NDArray[np.uint16]
    records: NDArray[np.uint32]
    order: NDArray[np.int64]
    places: NDArray[np.int64]
    gains: NDArray[np.float64]
    middles: NDArray[np.float64]
    heads: NDArray[np.int64]

    @property
    def halves(self) -> int:
        return sum(self.fields)

    def values(self, kind: str) -> dict[str, int | str]:
        """The -D options of ``kind`` (``"KEY"`` or ``"VALUE"``)."""
        numbers: dict[str, int | str] = {
            "WORDS": self.words,
            "PRECISION": self.precision,
            "TABLE_BYTES": self.table.nbytes,
            "STATES": self.states,
            "GROUPS": len(self.letters),
            "MEAN": int(self.mean),
            "ROTATED": int(self.rotated),
            "FIRST_FIELD": self.first_field,
            "LOW": int(self.low),
            "GROUP_LETTERS": ",".join(map(str, self.letters)),
            "GROUP_FIELDS": ",".join(map(str, self.fields)),
            "FIELD_WIDTHS": ",".join(map(str, self.widths)),
        }
        return {f"{kind}_{name}": number for name, number in numbers.items()}


@dataclass(frozen=True, eq=False)
class _Parts:
    """A kind as the codec has it: entries of every table ``[states, 2**p]`` with the lowest bits and widths of their
    fields, the table of every group, and of every half its channels, gain and middle."""

    letters: tuple[int, ...]
    fields: tuple[int, ...]
    windows: list[NDArray[np.uint16]]
    shifts: list[list[int]]
    widths: list[list[int]]
    choice: NDArray[np.int64]
    order: NDArray[np.int64]
    gains: NDArray[np.float64]
    middles: NDArray[np.float64]
    heads: NDArray[np.int64]


def is_grouped(plan: Plan) -> bool:
    return plan.key.grouping is not None or plan.value.grouping is not None


@lru_cache(maxsize=64)
def group_kind(plan: Plan, kind: str) -> GroupKind:
    """``kind`` of ``plan``; raises :class:`UnsupportedError` for what the kernels do not take."""
    stream: StreamPlan = getattr(plan, kind)
    if stream.coder != "prefix" or stream.grid != "mid-tread":
        raise UnsupportedError(
            f"attention on the GPU takes {kind}s of the prefix coder and a mid-tread grid beside grouped ones",
            code="device-classes",
            kind=kind,
        )
    parts = _rotated(stream, plan) if stream.grouping is None else _grouped(stream)
    states = 1 if stream.grouping is None else stream.grouping.states
    above = state_bits(states)
    first = 4 if states > 1 else max(4, min(6, 16 - max(map(sum, _widths(parts)))))
    layouts, layout_of = _layouts(parts, 16 - above - first)
    # An unshifted field lies in the eleven bits that an FP16 number can hold as an integer.
    low = all(first + w[-1] <= 11 for w in layouts if len(w) > 1)
    # Every table as often as it is read with different places of fields, the largest first.
    copies = sorted(
        {(int(n), layout_of[g]) for g, column in enumerate(parts.choice.T) for n in column},
        key=lambda copy: (-parts.windows[copy[0]].shape[1], copy),
    )
    sizes = [2 * parts.windows[n].shape[1] for n, _ in copies]
    distance = 1 << (16 - above) if states > 1 else 0
    if max(map(sum, layouts)) > 16 - above - first or (first < 6 and not low) or sum(sizes) > (distance or 1 << 16):
        raise UnsupportedError(
            f"attention on the GPU takes no tables like those of these {kind}s; decode them instead",
            code="device-classes",
            kind=kind,
        )
    begins: list[int] = np.cumsum([0, *sizes[:-1]]).tolist()
    used = (states - 1) * distance + sum(sizes)
    step = TRELLIS_TABLE_STEP if states > 1 else TABLE_STEP
    table = np.zeros(-(-used // step) * step // 2, np.uint16)
    for (number, layout), begin, size in zip(copies, begins, sizes):
        bits = _field_places(layouts[layout], first, low, above)
        for state in range(states):
            start = (begin + state * distance) // 2
            table[start : start + size // 2] = _entries(parts, number, state, bits, above)
    records = np.zeros((*parts.choice.shape, 2), np.uint32)
    for (h, g), wanted in np.ndenumerate(parts.choice):
        at = copies.index((int(wanted), layout_of[g]))
        records[h, g] = sizes[at] - 2, begins[at]
    widths = [layouts[layout] for layout in layout_of]
    taken = []
    for w in widths:
        bits = _field_places(w, first, low, above)
        taken += [bit - (0 if low and 0 < f == len(w) - 1 else 6) for f, bit in enumerate(bits)]
    return GroupKind(
        letters=parts.letters,
        fields=parts.fields,
        widths=tuple(width for w in widths for width in w),
        words=stream.words,
        precision=stream.precision,
        states=states,
        mean=stream.mean,
        rotated=stream.grouping is None,
        first_field=first,
        low=low,
        table=table,
        records=records,
        order=parts.order,
        places=np.array(taken),
        gains=parts.gains,
        middles=parts.middles,
        heads=parts.heads,
    )


def _field_places(widths: list[int], first: int, low: bool, above: int) -> list[int]:
    """Lowest bits of the fields in an entry."""
    if len(widths) == 1:
        return [16 - above - widths[0]]
    in_order = [len(widths) - 1, *range(len(widths) - 1)] if low else list(range(len(widths)))
    places, at = [0] * len(widths), first
    for f in in_order:
        places[f] = at
        at += widths[f]
    return places


def _widths(parts: _Parts) -> list[list[int]]:
    """Of every group, the most bits that any of its tables has for each field."""
    return [
        [max(parts.widths[n][f] for n in set(column.tolist())) for f in range(fields)]
        for column, fields in zip(parts.choice.T, parts.fields)
    ]


def _layouts(parts: _Parts, room: int) -> tuple[list[list[int]], list[int]]:
    """Widths of fields that groups have in common, and which of them each group has.

    Groups that share a table share widths as well, if those fit in ``room`` bits.
    """
    layouts = _widths(parts)
    layout_of = list(range(len(layouts)))
    for number in range(len(parts.windows)):
        sharing = np.flatnonzero((parts.choice == number).any(axis=0)).tolist()
        for g in sharing[1:]:
            ours, theirs = layout_of[sharing[0]], layout_of[g]
            widest = [max(pair) for pair in zip(layouts[ours], layouts[theirs])]
            if ours != theirs and sum(widest) <= room:
                layouts[ours] = widest
                layout_of = [ours if layout == theirs else layout for layout in layout_of]
    return layouts, layout_of


def _entries(parts: _Parts, number: int, state: int, places: list[int], above: int) -> NDArray[np.uint16]:
    window = parts.windows[number][state].astype(np.uint32)
    entries = window & ((1 << LENGTH_BITS) - 1)
    for shift, width, place in zip(parts.shifts[number], parts.widths[number], places):
        entries |= (window >> np.uint32(LENGTH_BITS + shift) & np.uint32((1 << width) - 1)) << np.uint32(place)
    if above:
        entries |= window >> np.uint32(16 - above) << np.uint32(16 - above)
    narrow: NDArray[np.uint16] = entries.astype(np.uint16)
    return narrow


def _grouped(stream: StreamPlan) -> _Parts:
    grouping = stream.grouping
    assert grouping is not None
    arrays, coded = group_arrays(grouping), group_tables(grouping)
    heads, halves = grouping.heads, sum(grouping.fields)
    ends = [*coded.window_first[1:], len(coded.window)]
    classes = [[grouping.classes[c] for c in table.classes] for table in grouping.tables]
    of_half = [grouping.classes[c] for c in arrays.row_class]
    order = np.where(arrays.row_channel >= 0, arrays.row_channel % grouping.head_dim, -1)
    return _Parts(
        letters=grouping.letters,
        fields=grouping.fields,
        windows=[coded.window[begin:end].reshape(grouping.states, -1) for begin, end in zip(coded.window_first, ends)],
        shifts=[row[: len(c)].tolist() for row, c in zip(arrays.shifts, classes)],
        widths=[[level.field_bits for level in c] for c in classes],
        choice=grouping.choice.astype(np.int64),
        order=order.reshape(heads, halves, MAX_GROUP_LETTERS),
        gains=np.array([level.factor for level in of_half]).reshape(heads, halves),
        middles=np.array([float(level.middle) for level in of_half]).reshape(heads, halves),
        heads=(grouping.order[:, 0] // grouping.head_dim).astype(np.int64),
    )


def _rotated(stream: StreamPlan, plan: Plan) -> _Parts:
    letters, fields = -(-plan.head_dim // stream.letter), stream.letter
    width = letter_table(stream, plan.head_dim).field_bits
    groups = [min(MAX_GROUP_LETTERS, letters - first) for first in range(0, letters, MAX_GROUP_LETTERS)]
    order = np.full((len(groups), fields, MAX_GROUP_LETTERS), -1, np.int64)
    for g, count in enumerate(groups):
        for f in range(fields):
            channels = (g * MAX_GROUP_LETTERS + np.arange(count)) * fields + f
            order[g, f, :count] = np.where(channels < plan.head_dim, channels, -1)
    halves = len(groups) * fields
    ones = np.ones((plan.kv_heads, halves))
    return _Parts(
        letters=tuple(groups),
        fields=(fields,) * len(groups),
        windows=[prefix_table(stream).window[None]],
        shifts=[[width * f for f in range(fields)]],
        widths=[[width] * fields],
        choice=np.zeros((plan.kv_heads, len(groups)), np.int64),
        order=np.tile(order.reshape(1, halves, MAX_GROUP_LETTERS), (plan.kv_heads, 1, 1)),
        gains=ones,
        middles=ones * ((stream.levels - 1) / 2),
        heads=np.arange(plan.kv_heads),
    )


def group_kinds(plan: Plan) -> dict[str, GroupKind]:
    """Both kinds; raises :class:`UnsupportedError` if their streams hold heads in different orders."""
    kinds = {kind: group_kind(plan, kind) for kind in KINDS}
    if not np.array_equal(kinds["key"].heads, kinds["value"].heads):
        raise UnsupportedError(
            "attention on the GPU takes keys and values whose streams hold heads in the same order; fit the plan "
            "again, or decode instead",
            code="device-heads",
        )
    return kinds


def group_params(plan: Plan, base: np.dtype[Any]) -> np.dtype[Any]:
    """``GroupAttendParams`` of the device code: ``base`` and what follows it, padded to a multiple of eight bytes."""
    key, value = group_kinds(plan).values()
    fields: list[Any] = [(name, base[name]) for name in base.names or ()]
    names = ("heads", "places", "key_order", "key_gains", "key_middles", "value_order")
    fields += [(name, np.uint64) for name in names]
    fields += [("keys", np.uint32, key.records.size), ("values", np.uint32, value.records.size)]
    fields += [("middles", np.float32, value.gains.size), ("units", np.float32, value.gains.size)]
    if np.dtype(fields).itemsize % 8:
        fields.append(("padding", np.uint32))
    params = np.dtype(fields)
    if params.itemsize > MOST_PARAM_BYTES:
        raise UnsupportedError("too many heads and groups for attention on the GPU", code="device-classes")
    return params


def group_records(plan: Plan) -> dict[str, NDArray[Any]]:
    """What ``GroupAttendParams`` holds itself."""
    key, value = group_kinds(plan).values()
    weights = 2.0**value.places
    return {
        "keys": key.records.reshape(-1),
        "values": value.records.reshape(-1),
        "middles": (value.middles * weights / 64).astype(np.float32).reshape(-1),
        "units": (OUTPUT_UNIT * value.gains / weights).astype(np.float32).reshape(-1),
    }


def group_memory(plan: Plan) -> dict[str, NDArray[Any]]:
    """What ``GroupAttendParams`` points to."""
    key, value = group_kinds(plan).values()
    exists = key.order >= 0
    weights = (2.0 ** (6 - key.places)).astype(np.float16).view(np.uint16).astype(np.uint32)
    order = np.where(exists, key.order, 0).astype(np.uint32) | weights[:, None] << np.uint32(16)
    gains, middles = np.zeros((2, plan.kv_heads, plan.head_dim), np.float32)
    for place, head in enumerate(key.heads):
        for half in range(key.halves):
            channels = key.order[place, half][exists[place, half]]
            gains[head, channels] = key.gains[place, half]
            middles[head, channels] = key.middles[place, half]
    tiles = -(-value.halves // 2)
    value_order = np.full((plan.kv_heads, 2 * tiles, MAX_GROUP_LETTERS), -1, np.int16)
    value_order[:, : value.halves] = value.order
    return {
        "heads": key.heads.astype(np.int32),
        "places": np.argsort(key.heads).astype(np.int32),
        "key_order": np.where(exists, order, 0).astype(np.uint32),
        "key_gains": gains,
        "key_middles": middles,
        "value_order": value_order,
    }
