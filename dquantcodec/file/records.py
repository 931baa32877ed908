"""One record: where it stands, the rules its header must keep, its table and checksums (clauses 4.1 to 4.4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import unpack_from
from typing import NamedTuple

from ..errors import ChecksumError, DQuantError, FormatError, LimitError, TruncatedError, UnsupportedError
from .header import Header
from .layer import KINDS
from .runs import Place, RunLayout
from .structs import (
    ALIGN,
    BLOCK,
    EXACT_ONLY,
    MAX_ROWS_BLOCK,
    MAX_RUN,
    MAX_TOKENS,
    PAGES,
    RECORD_BYTES,
    REWIND,
    ROWS,
    ROWS_ENTRY,
    Bytes,
    RecordHeader,
    align,
    crc32c,
)


@dataclass(frozen=True)
class Record:
    """A record header and the file offset it stands at."""

    offset: int
    header: RecordHeader

    @property
    def payload(self) -> int:
        return self.offset + RECORD_BYTES

    @property
    def payload_end(self) -> int:
        return self.payload + self.header.payload_bytes

    @property
    def end(self) -> int:
        """Where the next record begins."""
        return align(self.payload_end, BLOCK)


class RowsEntry(NamedTuple):
    """One block of exact rows: its place in the payload, its encoding, its checksum."""

    place: Place
    encoding: int
    crc: int


def record_at(data: Bytes, offset: int) -> Record | None:
    """The record at ``offset``, or None where no header with a right checksum stands."""
    header = RecordHeader.unpack(data[offset : offset + RECORD_BYTES].tobytes())
    return None if header is None else Record(offset, header)


class RecordRules:
    """What the header of a file says about its records."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self.run = RunLayout.of(header)
        self.exact = tuple(place for place, layer in enumerate(header.layers) if layer.storage == "exact")
        self.present = tuple(place for place, layer in enumerate(header.layers) if layer.storage != "absent")

    def rows_layers(self, flags: int) -> tuple[int, ...]:
        """Layers a ROWS record with ``flags`` holds, in order."""
        return self.exact if flags & EXACT_ONLY else self.present

    def check(self, record: Record, number: int, epoch: int, end: int) -> None:
        """Check a record header against the rules, the ``number`` it should have, the ``epoch`` of the record before it
        and the first byte it may not reach.

        Its checksum holds already.  Raises :class:`TruncatedError` if only the last rule is broken, else
        :class:`FormatError`, :class:`LimitError` or :class:`UnsupportedError`; codes ``record-*`` and ``limit-*``.
        """
        head = record.header
        self._require(head.salt == self.header.salt, FormatError, "record-salt", record, "belongs to another file")
        self._require(head.number == number, FormatError, "record-number", record, f"should be {number}")
        self._require(head.epoch >= epoch, FormatError, "record-epoch", record, f"has epoch {head.epoch} after {epoch}")
        self._require(
            head.reserved == 0, FormatError, "record-reserved", record, "has reserved bytes that are not zero"
        )
        if head.type in (PAGES, ROWS, REWIND):
            self._check_sequence(record)
        else:
            self._require(head.ignorable, UnsupportedError, "record-type", record, "is unknown to this version")
        self._require(
            record.end <= end, TruncatedError, "record-truncated", record, f"reaches byte {record.end} of {end}"
        )

    def _check_sequence(self, record: Record) -> None:
        head = record.header
        self._require(head.version == 1, UnsupportedError, "record-version", record, f"has version {head.version}")
        self._require(
            head.flags <= (EXACT_ONLY if head.type == ROWS else 0), UnsupportedError, "record-flags", record,
            f"has unknown flags {head.flags:#x}",
        )  # fmt: skip
        self._require(
            head.sequence < self.header.sequences, FormatError, "record-sequence", record,
            f"is of sequence {head.sequence} of {self.header.sequences}",
        )  # fmt: skip
        fits = (head.tokens > 0) == (head.type != REWIND)
        self._require(fits, FormatError, "record-tokens", record, f"counts {head.tokens} tokens")
        self._require(head.end <= MAX_TOKENS, LimitError, "limit-tokens", record, f"ends at token {head.end}")
        if head.type == REWIND:
            empty = (head.payload_bytes, head.table_crc) == (0, 0)
            self._require(empty, FormatError, "record-length", record, "has a payload")
        else:
            self._check_tokens(record)

    def _check_tokens(self, record: Record) -> None:
        head = record.header
        pages = head.type == PAGES
        layers = self.run.layers if pages else self.rows_layers(head.flags)
        self._require(bool(layers), FormatError, "record-layers", record, "holds no layer")
        if pages:
            windows = self.run.windows(head.tokens)
            self._require(windows <= MAX_RUN, LimitError, "limit-run", record, f"holds {windows} windows")
            length_fits = head.payload_bytes == self.run.payload_bytes(head.tokens)
        else:
            block = head.tokens * max(self.header.layers[place].row_bytes for place in layers)
            # One row may always be stored, whatever its size.
            self._require(
                block <= MAX_ROWS_BLOCK or head.tokens == 1, LimitError, "limit-rows", record,
                f"holds blocks of {block} bytes",
            )  # fmt: skip
            length_fits = head.payload_bytes >= _rows_table_bytes(layers) and head.payload_bytes % ALIGN == 0
        self._require(
            length_fits, FormatError, "record-length", record,
            f"has {head.payload_bytes} payload bytes, which do not fit its {head.tokens} tokens",
        )  # fmt: skip

    @staticmethod
    def _require(holds: bool, error: type[DQuantError], code: str, record: Record, found: str) -> None:
        if not holds:
            head = record.header
            raise error(
                f"record {head.number} ({head.type_name}) at byte {record.offset} {found}",
                code=code,
                record=head.number,
                offset=record.offset,
            )

    def page_table(self, data: Bytes, record: Record) -> list[tuple[int, ...]]:
        """Page checksums of a PAGES record, themselves checked: of every head group, one a window."""
        windows = self.run.windows(record.header.tokens)
        table = self._checked_table(data, record, self.run.table_bytes(record.header.tokens))
        count = len(self.run.slots) * windows
        self._require(not any(table[4 * count :]), FormatError, "table-padding", record, "has a padded table not zero")
        crcs = unpack_from(f"<{count}I", table)
        return [crcs[at : at + windows] for at in range(0, count, windows)]

    def rows_table(self, data: Bytes, record: Record) -> list[RowsEntry]:
        """Entries of a ROWS record, checked; key and value of each layer of :meth:`rows_layers`."""
        head = record.header
        layers = self.rows_layers(head.flags)
        table = self._checked_table(data, record, _rows_table_bytes(layers))
        self._require(
            not any(table[2 * len(layers) * ROWS_ENTRY.size :]), FormatError, "table-padding", record,
            "has a padded table not zero",
        )  # fmt: skip
        entries = []
        offset = len(table)
        for place, layer in enumerate(layer for layer in layers for _ in range(2)):
            encoding, reserved, crc, size = ROWS_ENTRY.unpack_from(table, place * ROWS_ENTRY.size)
            self._require(not any(reserved), FormatError, "record-reserved", record, "has a table entry not zero")
            # No encoding is larger than the rows as they are.
            fits = 0 < size <= head.tokens * self.header.layers[layer].row_bytes
            self._require(
                fits and offset + size <= head.payload_bytes, FormatError, "rows-length", record,
                f"has a block of {size} bytes at {offset} of {head.payload_bytes}",
            )  # fmt: skip
            entries.append(RowsEntry(Place(offset, size), encoding, crc))
            offset += align(size)
        self._require(
            offset == head.payload_bytes, FormatError, "record-length", record,
            f"has blocks up to byte {offset} of {head.payload_bytes}",
        )  # fmt: skip
        return entries

    def parts(self, data: Bytes, record: Record) -> Iterator[tuple[str, Place, int]]:
        """Everything behind the table that has a checksum: what it is, where it stands, the checksum.

        Raises what the tables raise.
        """
        head = record.header
        if head.type == PAGES:
            crcs = self.page_table(data, record)
            for slot, window, place in self.run.pages(head.tokens):
                yield f"page {window} of {self.run.named(slot)}", place, crcs[slot][window]
        elif head.type == ROWS:
            layers = self.rows_layers(head.flags)
            for number, entry in enumerate(self.rows_table(data, record)):
                yield f"exact {KINDS[number % 2]}s of layer {layers[number // 2]}", entry.place, entry.crc
        else:
            yield "payload", Place(0, head.payload_bytes), head.table_crc

    def damage(self, data: Bytes, record: Record) -> str | None:
        """The first thing in the record's payload that is not as it was written, or None."""
        try:
            for name, place, crc in self.parts(data, record):
                if crc32c(payload_bytes(data, record, place)) != crc:
                    return name
        except DQuantError as error:
            return str(error)
        return None

    def _checked_table(self, data: Bytes, record: Record, size: int) -> bytes:
        table = payload_bytes(data, record, Place(0, size)).tobytes()
        self._require(
            crc32c(table) == record.header.table_crc, ChecksumError, "record-table", record, "has a damaged table"
        )
        return table


def payload_bytes(data: Bytes, record: Record, place: Place) -> memoryview:
    """A view of ``place`` in the record's payload."""
    return data[record.payload + place.offset : record.payload + place.offset + place.size]


def _rows_table_bytes(layers: Sequence[int]) -> int:
    return align(2 * len(layers) * ROWS_ENTRY.size)
