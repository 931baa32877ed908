"""Checking a whole file, byte by byte where a rule says what the byte must be (specification, clause 9.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import DQuantError
from ..status import EXPLANATIONS
from .payload import decode_entry
from .records import Record, RecordRules, payload_bytes
from .runs import Place
from .scan import Log, walk
from .sequences import sequences
from .structs import FILL, INDEX, PAGES, ROWS, Bytes, crc32c, index_bytes, index_record


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: reason code, a sentence, and the place as keyword facts."""

    code: str
    message: str
    where: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(error: DQuantError) -> Finding:
        return Finding(error.code, str(error), dict(error.where))


def verify(
    data: Bytes, rules: RecordRules, opened: Log, progress: Callable[[int], object] | None = None
) -> Iterator[Finding]:
    """Findings of the file ``data``, whose header was parsed into ``rules`` and whose log was ``opened``.

    Walks the log whatever the index says, compares both, checks every checksum and padding byte, decodes every
    container and every block of rows.  ``progress`` is called with the bytes just checked.
    """
    try:
        log = walk(data, rules)
        sequences(log.records, log.torn, rules)
    except DQuantError as error:
        yield Finding.of(error)
        log = opened
    if log.torn:
        yield Finding(
            "log-torn",
            f"the file was not closed or lost its end; {len(log.records)} records up to byte {log.end} are whole",
            {"offset": log.end},
        )
    for record in log.records:
        yield from _verify_record(data, rules, log, record)
        if progress:
            progress(record.end - record.offset)


def _verify_record(data: Bytes, rules: RecordRules, log: Log, record: Record) -> Iterator[Finding]:
    where: dict[str, Any] = {"record": record.header.number, "offset": record.offset}
    try:
        parts = list(rules.parts(data, record))
    except DQuantError as error:
        yield Finding.of(error)
        return
    covered = parts[0][1].offset  # the table
    for number, (name, place, crc) in enumerate(parts):
        yield from _zero(data, record, covered, place.offset, where)
        covered = place.offset + place.size
        if crc32c(payload_bytes(data, record, place)) != crc:
            code = {PAGES: "page-crc", ROWS: "rows-crc"}.get(record.header.type, "payload-crc")
            yield Finding(code, f"record {record.header.number}: {name} is damaged", where)
        elif record.header.type == PAGES:
            yield from _verify_page(data, rules, record, number, place, where)
    yield from _zero(data, record, covered, record.end - record.payload, where)
    if record.header.type == ROWS:
        yield from _verify_rows(data, rules, record)
    elif record.header.type == FILL:
        yield from _zero(data, record, 0, record.header.payload_bytes, where)
    elif record.header.type == INDEX and not _is_index(data, log, record):
        yield Finding("index-mismatch", "the index does not equal the record headers; rewrite the file", where)


def _is_index(data: Bytes, log: Log, record: Record) -> bool:
    """Whether an INDEX record says what clause 4.5 wants of the records before it.

    The length first: a file of many false indexes must not cost more than their bytes.
    """
    before = log.records[: record.header.number]
    if record.end - record.offset != index_bytes(record.offset, len(before)):
        return False
    headers = [data[earlier.offset : earlier.payload].tobytes() for earlier in before]
    expected = index_record(record.offset, headers, record.header.salt, record.header.epoch)
    return data[record.offset : record.end].tobytes() == expected


def _verify_page(
    data: Bytes, rules: RecordRules, record: Record, number: int, place: Place, where: dict[str, Any]
) -> Iterator[Finding]:
    """Decode every container of one page, the ``number``-th of its record."""
    from ..codec import Codec, Pages

    windows = rules.run.windows(record.header.tokens)
    slot, window = divmod(number, windows)
    layer, _, plan, layout = rules.run.slots[slot]
    page = np.zeros((1, layout.page_bytes), np.uint8)
    page[0, : place.size] = np.frombuffer(payload_bytes(data, record, place), np.uint8)
    first = record.header.first + window * rules.run.window
    used = min(rules.run.window, record.header.end - first)
    for kind, token, substream, code in Codec(plan).check(Pages(page, used)):
        what = f"the {kind} container of {rules.run.named(slot)}, token {first + token}, sub-stream {substream}"
        yield Finding(
            code,
            f"{what} {EXPLANATIONS[code]}",
            {**where, "layer": layer, "kind": kind, "token": first + token, "substream": substream},
        )


def _verify_rows(data: Bytes, rules: RecordRules, record: Record) -> Iterator[Finding]:
    """Decode every block of a ROWS record, damaged or not: what its checksum hides may break rules as well."""
    for number, entry in enumerate(rules.rows_table(data, record)):
        try:
            decode_entry(data, rules, record, number, entry, verify=False)
        except DQuantError as error:
            yield Finding.of(error)


def _zero(data: Bytes, record: Record, start: int, stop: int, where: dict[str, Any]) -> Iterator[Finding]:
    if np.frombuffer(data[record.payload + start : record.payload + stop], np.uint8).any():
        yield Finding(
            "padding-nonzero", f"record {record.header.number}: padding before byte {stop} is not zero", where
        )
