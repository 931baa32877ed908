"""PAGES and ROWS records out of pages and rows (specification, clauses 4.3 and 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .layer import Layer
from .recordlog import RecordLog
from .rows import encode_rows
from .runs import RunLayout
from .structs import PAGES, ROWS, ROWS_ENTRY, align, crc32c

#: Payload a record aims at: large enough for long reads, small enough to hold in memory.
RECORD_TARGET = 8 << 20


def write_pages(
    log: RecordLog, run: RunLayout, sequence: int, first: int, tokens: int, pages: Sequence[Sequence[NDArray[np.uint8]]]
) -> None:
    """A PAGES record of ``tokens`` tokens from ``first`` on; ``pages`` are, of each head group, parts of whole pages
    uint8 ``[pages, page_bytes]``.  The last page is cut to its tokens."""
    crcs: list[int] = []
    stored: list[NDArray[np.uint8]] = []
    for slot, parts in enumerate(pages):
        used = run.slots[slot].layout.bytes_for((tokens - 1) % run.window + 1)
        for number, part in enumerate(parts):
            size = part.shape[1]
            flat = np.ascontiguousarray(part).reshape(-1)
            if number == len(parts) - 1:
                flat = flat[: part.size - size + used]
            crcs += [crc32c(flat[start : start + size]) for start in range(0, flat.size, size)]
            stored.append(flat)
    table = np.array(crcs, "<u4").tobytes().ljust(run.table_bytes(tokens), b"\0")
    log.put(PAGES, sequence, first, tokens, 0, table, stored)


def write_rows(
    log: RecordLog, layers: Sequence[Layer], sequence: int, first: int, rows: Sequence[NDArray[Any]], flags: int = 0
) -> None:
    """ROWS records of ``rows`` (key, value of each of ``layers``), as many as the record size asks for."""
    tokens = len(rows[0]) if rows else 0
    token_bytes = sum(2 * layer.row_bytes for layer in layers)
    step = max(1, RECORD_TARGET // max(1, token_bytes))
    for start in range(0, tokens, step):
        table, blocks = b"", []
        for array in rows:
            encoding, block = encode_rows(array[start : start + step])
            table += ROWS_ENTRY.pack(encoding, bytes(3), crc32c(block), len(block))
            blocks.append(block.ljust(align(len(block)), b"\0"))
        table = table.ljust(align(len(table)), b"\0")
        log.put(ROWS, sequence, first + start, min(step, tokens - start), flags, table, blocks)
