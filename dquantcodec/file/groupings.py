"""Classes and groupings as bytes (specification, clauses 3.7 and 3.8).

A file keeps each class once; groupings name them by number.  Letter tables are not stored: they follow from classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack

from ..errors import FormatError, InputError, LimitError, UnsupportedError
from ..grouping import MAX_FIELDS, MAX_GROUPS, MAX_TABLES, Channels, Grouping, Levels, Table
from ..plan import MAX_HEAD_DIM, MAX_HEADS, MAX_VALUES, Plan
from ..stored import Integers
from .structs import CLASS, GROUPING, GROUPING_TABLE, MAX_FILE_CLASSES, QUANTISERS, STEP, align

#: Places of a table without a class.
NO_CLASS = 0xFFFF


def pack_groupings(groupings: Sequence[Grouping]) -> tuple[list[bytes], list[bytes]]:
    """Class entries, each once, and the entries of ``groupings`` in order."""
    classes: dict[Levels, int] = {}
    entries = []
    for grouping in groupings:
        numbers = [classes.setdefault(levels, len(classes)) for levels in grouping.classes]
        entries.append(_pack_grouping(grouping, numbers))
    if len(classes) > MAX_FILE_CLASSES:
        raise LimitError(
            f"the layers use {len(classes)} different classes; a file holds at most {MAX_FILE_CLASSES}",
            code="limit-classes",
        )
    return [_pack_class(levels) for levels in classes], entries


def _pack_class(levels: Levels) -> bytes:
    sets = (levels.weights, levels.second) if levels.second else (levels.weights,)
    upper = b"".join(_u16(*weights[levels.most :]) for weights in sets)
    return _padded(CLASS.pack(levels.most, len(sets) - 1, levels.gain) + upper)


def _pack_grouping(grouping: Grouping, numbers: Sequence[int]) -> bytes:
    tables = b"".join(
        GROUPING_TABLE.pack(
            table.precision, len(table.classes), 0,
            *(numbers[c] for c in table.classes), *[NO_CLASS] * (MAX_FIELDS - len(table.classes)),
        )
        for table in grouping.tables
    )  # fmt: skip
    shapes = bytes(x for shape in zip(grouping.letters, grouping.fields) for x in shape)
    heads = (grouping.order[:, 0] // grouping.head_dim).astype("<u2")
    places = (grouping.order % grouping.head_dim).astype("<u2" if grouping.head_dim > 256 else "u1")
    start = GROUPING.pack(
        grouping.heads, grouping.head_dim, grouping.coded, len(grouping.letters), len(grouping.tables),
        QUANTISERS[grouping.states], bytes(6),
    )  # fmt: skip
    return _padded(start + tables + shapes + heads.tobytes() + grouping.choice.tobytes() + places.tobytes())


def _u16(*numbers: int) -> bytes:
    return pack(f"<{len(numbers)}H", *numbers)


def _padded(data: bytes) -> bytes:
    return data.ljust(align(len(data), STEP), b"\0")


def plan_bytes(plan: Plan) -> int:
    """What a file spends on a plan's groupings; classes, which all layers share, are not counted."""
    return sum(len(_pack_grouping(s.grouping, [0] * 64)) for s in (plan.key, plan.value) if s.grouping is not None)


def parse_classes(block: bytes, offset: int, count: int, end: int) -> tuple[list[Levels], int]:
    """``count`` classes from ``offset``, none reaching past ``end``, and the offset after the last."""
    classes = []
    for number in range(count):
        take = _Taker(block, offset, end, f"class {number}")
        most, dependent, gain = CLASS.unpack(take(CLASS.size))
        sets = [unpack(f"<{most + 1}H", take(2 * (most + 1))) for _ in range(2 if dependent == 1 else 1)]
        offset = take.close(dependent > 1)
        weights, *second = [(*upper[:0:-1], *upper) for upper in sets]
        try:
            classes.append(Levels(weights, gain, *second))
        except InputError as error:
            raise FormatError(f"class {number}: {error}", code=error.code, number=number) from None
    return classes, offset


def parse_groupings(
    block: bytes, offset: int, count: int, end: int, classes: Sequence[Levels]
) -> tuple[list[Grouping], int]:
    """``count`` groupings from ``offset``, as :func:`parse_classes`."""
    groupings = []
    states_of = {code: states for states, code in QUANTISERS.items()}
    for number in range(count):
        take = _Taker(block, offset, end, f"grouping {number}")
        heads, dim, coded, groups, tables, quantiser, reserved = GROUPING.unpack(take(GROUPING.size))
        if quantiser not in states_of:
            raise UnsupportedError(
                f"grouping {number} has quantiser {quantiser}; this version cannot decode it",
                code="profile-quantiser",
                number=number,
            )
        geometry = 1 <= heads <= MAX_HEADS and 1 <= coded <= dim <= MAX_HEAD_DIM and heads * dim <= MAX_VALUES
        if not (geometry and groups <= MAX_GROUPS and tables <= MAX_TABLES):
            raise LimitError(
                f"grouping {number} has {heads} heads of {dim} values, {coded} of them coded, {groups} groups and "
                f"{tables} tables",
                code="limit-grouping",
                number=number,
            )
        used: dict[int, int] = {}
        stored_tables = []
        for _ in range(tables):
            precision, fields, zero, *numbers = GROUPING_TABLE.unpack(take(GROUPING_TABLE.size))
            named = numbers[:fields]
            unnamed = all(c == NO_CLASS for c in numbers[fields:])
            if zero or fields > MAX_FIELDS or not unnamed or any(c >= len(classes) for c in named):
                raise FormatError(
                    f"a table of grouping {number} names classes {numbers}, of which it uses {fields}; "
                    f"the file has {len(classes)}",
                    code="grouping-table",
                    number=number,
                )
            stored_tables.append(Table(tuple(used.setdefault(c, len(used)) for c in named), precision))
        shapes = take(2 * groups)
        head = unpack(f"<{heads}H", take(2 * heads))
        choice = Integers(take(heads * groups), "B", (heads, groups))
        wide = dim > 256
        places = Integers(take(heads * coded * (1 + wide)), "H" if wide else "B", (heads, coded))
        offset = take.close(any(reserved))
        last = max(places.numbers())
        if max(head) >= heads or last >= dim:
            raise FormatError(
                f"grouping {number} names head {max(head)} of {heads} or channel {last} of {dim}",
                code="grouping-order",
                number=number,
            )
        try:
            grouping = Grouping(
                head_dim=dim,
                classes=tuple(classes[c] for c in used),
                tables=tuple(stored_tables),
                letters=tuple(shapes[::2]),
                fields=tuple(shapes[1::2]),
                choice=choice.as_array(),
                order=Channels(head, places, dim).as_array(),
                states=states_of[quantiser],
            )
        except InputError as error:
            raise FormatError(f"grouping {number} has {error}", code=error.code, number=number) from None
        groupings.append(grouping)
    return groupings, offset


class _Taker:
    """Bytes of one entry, one part after another, none of them beyond the header's end."""

    def __init__(self, block: bytes, offset: int, end: int, name: str) -> None:
        self._block, self._at, self._end, self._name = block, offset, end, name

    def __call__(self, size: int) -> bytes:
        if self._at + size > self._end:
            raise FormatError(f"{self._name} lies outside the header", code="header-coverage")
        self._at += size
        return self._block[self._at - size : self._at]

    def close(self, reserved: bool) -> int:
        """The offset after the entry's padding, which is zero as its ``reserved`` bytes are."""
        padding = self(-self._at % STEP)
        if reserved or any(padding):
            raise FormatError(f"reserved bytes of {self._name} are not zero", code="header-reserved")
        return self._at
