"""The record log: through the index or by walking (specification, clauses 4.5 and 9.1).

The log alone defines the content.  The index is a copy of its record headers; it serves when it is whole, and nothing
depends on it otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import ChecksumError, DQuantError, TruncatedError
from .records import Record, RecordRules, record_at
from .structs import (
    BLOCK,
    INDEX,
    MAX_INDEX,
    RECORD_BYTES,
    RECORD_MAGIC,
    TRAILER,
    Bytes,
    RecordHeader,
    Trailer,
    align,
)

#: Bytes looked through at a time for record headers.
SEARCH_BYTES = 64 << 20
#: The magic as this machine reads its four bytes.
_NATIVE_MAGIC = int.from_bytes(RECORD_MAGIC.to_bytes(4, "little"), sys.byteorder)


@dataclass(frozen=True)
class Log:
    """All records up to the end of the log.

    torn
        The file was not closed, or its end was lost: a last record may be missing.
    indexed
        The records come from the index.
    end
        Offset after the last record.
    """

    records: tuple[Record, ...]
    torn: bool
    indexed: bool
    end: int


def read_log(data: Bytes, rules: RecordRules) -> Log:
    """The log of the whole file ``data``.

    Raises :class:`ChecksumError` for damage before the last record and :class:`FormatError`, :class:`LimitError` or
    :class:`UnsupportedError` for records that break the rules.
    """
    return indexed(data, rules) or walk(data, rules)


def indexed(data: Bytes, rules: RecordRules) -> Log | None:
    """The log as the index has it, or None where trailer and index are not whole and sound."""
    salt, start = rules.header.salt, rules.header.block_bytes
    trailer = Trailer.unpack(data[-TRAILER.size :].tobytes())
    if trailer is None or trailer.salt != salt or trailer.file_bytes != data.nbytes or trailer.index_offset % BLOCK:
        return None
    rows_bytes = trailer.records * RECORD_BYTES
    room = data.nbytes - trailer.index_offset - RECORD_BYTES - TRAILER.size
    if trailer.index_offset < start or rows_bytes > min(MAX_INDEX, room):
        return None
    index = record_at(data, trailer.index_offset)
    if index is None or (index.header.type, index.header.version, index.payload_end) != (INDEX, 1, data.nbytes):
        return None
    if index.header.epoch != trailer.epoch or rules.damage(data, index):
        return None
    rows = data[index.payload : index.payload + rows_bytes].tobytes()
    records: list[Record] = []
    offset, epoch = start, 0
    try:
        for at in range(0, rows_bytes, RECORD_BYTES):
            header = RecordHeader.unpack(rows[at : at + RECORD_BYTES])
            if header is None:
                return None
            record = Record(offset, header)
            rules.check(record, len(records), epoch, trailer.index_offset)
            records.append(record)
            offset, epoch = record.end, header.epoch
        rules.check(index, len(records), epoch, data.nbytes)
    except DQuantError:
        return None  # the log itself will tell
    if offset != trailer.index_offset:
        return None
    return Log((*records, index), torn=False, indexed=True, end=index.end)


def walk(data: Bytes, rules: RecordRules) -> Log:
    """The log as the record headers have it, from the first to the last that is whole.

    What follows the last whole record is a torn tail if no record of this file stands behind it, else damage.
    """
    records: list[Record] = []
    offset, epoch = rules.header.block_bytes, 0
    while offset < data.nbytes:
        record = own_record(data, rules, offset)
        later = None if record else next(later_records(data, rules, offset, len(records)), None)
        if later:
            # A writer may have finished a record here, and the next, since we looked.
            record = own_record(data, rules, offset)
            if not record:
                raise ChecksumError(
                    f"the record header at byte {offset} is damaged, and records follow it; take another copy, or "
                    "salvage what is whole",
                    code="record-header",
                    offset=offset,
                    record=len(records),
                )
        if not record:
            break
        try:
            rules.check(record, len(records), epoch, data.nbytes)
        except TruncatedError:
            break
        records.append(record)
        offset, epoch = record.end, record.header.epoch
    return ended(data, rules, records)


def ended(data: Bytes, rules: RecordRules, records: list[Record]) -> Log:
    """The log of the ``records`` found by walking, without a last one that is not whole.

    Every other record was followed by another, which no writer begins before the first is whole.
    """
    end = records[-1].end if records else rules.header.block_bytes
    if records and rules.damage(data, records[-1]):
        end = records.pop().offset
    closed = bool(records) and records[-1].header.type == INDEX and end == data.nbytes
    return Log(tuple(records), torn=not closed, indexed=False, end=end)


def own_record(data: Bytes, rules: RecordRules, offset: int) -> Record | None:
    """The record at ``offset`` if its header is whole and of this file."""
    record = record_at(data, offset)
    return record if record and record.header.salt == rules.header.salt else None


def later_records(data: Bytes, rules: RecordRules, offset: int, number: int) -> Iterator[Record]:
    """Records of this file behind ``offset``, found without knowing where they begin, from ``number`` on."""
    for start in range(align(offset + 1, BLOCK), data.nbytes - RECORD_BYTES + 1, SEARCH_BYTES):
        part = data[start : min(start + SEARCH_BYTES, data.nbytes - RECORD_BYTES + 4)]
        # The first four bytes of every block, as one strided view.
        magics = part[: part.nbytes // 4 * 4].cast("I")[:: BLOCK // 4].tolist()
        for place, magic in enumerate(magics):
            if magic != _NATIVE_MAGIC:
                continue
            record = own_record(data, rules, start + place * BLOCK)
            if record and record.header.number >= number:
                yield record
