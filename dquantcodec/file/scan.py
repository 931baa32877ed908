"""The record log: through the index or by walking, and what its records say of every sequence (clauses 4 and 9).

The log alone defines the content.  The index is a copy of its record headers; it serves when it is whole, and nothing
depends on it otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..errors import ChecksumError, DQuantError, FormatError, TruncatedError
from .records import Record, RecordRules, record_at
from .structs import (
    BLOCK,
    EXACT_ONLY,
    INDEX,
    MAX_INDEX,
    PAGES,
    RECORD_BYTES,
    RECORD_MAGIC,
    ROWS,
    TRAILER,
    Bytes,
    RecordHeader,
    Trailer,
    align,
)


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


@dataclass
class SequenceLog:
    """The records of one sequence, in token order; see :func:`sequences`."""

    tokens: int = 0
    leading: list[Record] = field(default_factory=list)
    pages: list[Record] = field(default_factory=list)
    trailing: list[Record] = field(default_factory=list)
    exact: list[Record] = field(default_factory=list)


def read_log(data: Bytes, rules: RecordRules) -> Log:
    """The log of the whole file ``data``.

    Raises :class:`ChecksumError` for damage before the last record and :class:`FormatError`, :class:`LimitError` or
    :class:`UnsupportedError` for records that break the rules.
    """
    return _indexed(data, rules) or walk(data, rules)


def _indexed(data: Bytes, rules: RecordRules) -> Log | None:
    """The log as the index has it, or None where trailer and index are not whole and sound."""
    salt, start = rules.header.salt, rules.header.block_bytes
    trailer = Trailer.unpack(data[-TRAILER.size :].tobytes())
    if trailer is None or trailer.salt != salt or trailer.file_bytes != data.size or trailer.index_offset % BLOCK:
        return None
    rows_bytes = trailer.records * RECORD_BYTES
    room = data.size - trailer.index_offset - RECORD_BYTES - TRAILER.size
    if trailer.index_offset < start or rows_bytes > min(MAX_INDEX, room):
        return None
    index = record_at(data, trailer.index_offset)
    if index is None or (index.header.type, index.header.version, index.payload_end) != (INDEX, 1, data.size):
        return None
    if index.header.epoch != trailer.epoch or rules.damage(data, index):
        return None
    rows = data[index.payload : index.payload + rows_bytes].tobytes()
    records: list[Record] = []
    offset = start
    try:
        for at in range(0, rows_bytes, RECORD_BYTES):
            header = RecordHeader.unpack(rows[at : at + RECORD_BYTES])
            if header is None:
                return None
            record = Record(offset, header)
            rules.check(record, records, trailer.index_offset)
            records.append(record)
            offset = record.end
        rules.check(index, records, data.size)
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
    offset = rules.header.block_bytes
    while offset < data.size:
        record = record_at(data, offset)
        if record is None or record.header.salt != rules.header.salt:
            _refuse_later_records(data, rules, offset, len(records))
            break
        try:
            rules.check(record, records, data.size)
        except TruncatedError:
            break
        records.append(record)
        offset = record.end
    # Only the last record can be half-written: every other one was followed by another.
    if records and rules.damage(data, records[-1]):
        offset = records.pop().offset
    closed = bool(records) and records[-1].header.type == INDEX and offset == data.size
    return Log(tuple(records), torn=not closed, indexed=False, end=offset)


def _refuse_later_records(data: Bytes, rules: RecordRules, offset: int, number: int) -> None:
    start = align(offset + 1, BLOCK)
    starts = np.arange(start, data.size - RECORD_BYTES + 1, BLOCK)
    magics = data[starts[:, None] + np.arange(4)].view("<u4")[:, 0]
    for later in starts[magics == RECORD_MAGIC].tolist():
        record = record_at(data, later)
        if record and record.header.salt == rules.header.salt and record.header.number >= number:
            raise ChecksumError(
                f"the record header at byte {offset} is damaged, and records follow it; take another copy",
                code="record-header",
                offset=offset,
                record=number,
            )


def sequences(log: Log, rules: RecordRules) -> tuple[SequenceLog, ...]:
    """The records of every sequence, checked to cover its tokens in order.

    A sequence is: rows of all layers (``leading``), pages of the coded layers with rows of the exact layers for
    the same tokens, rows of all layers (``trailing``).  In a torn log a sequence ends where coded and exact layers
    last agree.  Raises :class:`FormatError` (``coverage-tokens``, ``coverage-order``).
    """
    builders = [_Builder(rules) for _ in range(rules.header.sequences)]
    for record in log.records:
        if record.header.type in (PAGES, ROWS):
            builders[record.header.sequence].add(record)
    return tuple(builder.finish(log.torn) for builder in builders)


class _Builder:
    """One sequence while its records come in."""

    def __init__(self, rules: RecordRules) -> None:
        self._window = rules.run.window
        self._log = SequenceLog()
        #: Next token of the coded layers and of the exact layers, as far as the file has such.
        self._ends = {side: 0 for side, layers in (("coded", rules.run.layers), ("exact", rules.exact)) if layers}
        self._agreed = (0, 0)

    def add(self, record: Record) -> None:
        log, head = self._log, record.header
        both = head.type == ROWS and not head.flags & EXACT_ONLY
        sides = list(self._ends) if both else ["coded" if head.type == PAGES else "exact"]
        for side in sides:
            if head.first != self._ends[side]:
                raise FormatError(
                    f"record {head.number} begins at token {head.first} of sequence {head.sequence}, the records of "
                    f"{side} layers before it end at {self._ends[side]}",
                    code="coverage-tokens",
                    record=head.number,
                )
            self._ends[side] = head.end
        short_page = bool(log.pages) and log.pages[-1].header.tokens % self._window != 0
        if (log.trailing and not both) or (head.type == PAGES and short_page):
            raise FormatError(
                f"record {head.number} ({head.type_name}) continues a run of pages that has ended",
                code="coverage-order",
                record=head.number,
            )
        if both:
            (log.trailing if log.pages or log.exact else log.leading).append(record)
        else:
            (log.pages if head.type == PAGES else log.exact).append(record)
        if len(set(self._ends.values())) == 1:
            log.tokens = head.end
            self._agreed = (len(log.pages), len(log.exact))

    def finish(self, torn: bool) -> SequenceLog:
        log = self._log
        if any(end != log.tokens for end in self._ends.values()):
            if not torn:
                raise FormatError(
                    f"coded and exact layers end at different tokens: {self._ends}", code="coverage-tokens"
                )
            pages, exact = self._agreed
            del log.pages[pages:], log.exact[exact:]
        return log
