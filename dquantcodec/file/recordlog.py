"""Writing records: where the next one goes, in which order its bytes are written, when they are synced (clause 9.5)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import LimitError
from .disk import Disk
from .structs import (
    BLOCK,
    FILL,
    INDEX,
    MAX_INDEX,
    RECORD_BYTES,
    RecordHeader,
    align,
    crc32c,
    index_bytes,
    index_record,
)

#: Zeros in memory for a FILL, however long it is.
ZERO_BYTES = 1 << 20


class RecordLog:
    """The record log of a file being written.

    ``durable`` (a file that others may have open): every record is synced before the next begins, and its header is
    written last, so that at any moment at most one record is unsafe.  Otherwise nothing is synced before
    :meth:`sync`.  After a failed write or sync the log takes nothing more.

    headers
        The 64 bytes of every record so far.
    end
        Where the next record begins.
    broken
        A write or sync failed.
    """

    def __init__(
        self,
        disk: Disk,
        salt: bytes,
        headers: Sequence[bytes] = (),
        end: int = 0,
        epoch: int = 0,
        durable: bool = False,
    ) -> None:
        self.disk = disk
        self.headers = list(headers)
        self.end = end
        self.epoch = epoch
        self.durable = durable
        self.broken = False
        self._salt = salt
        self._closed = bool(headers) and RecordHeader.unpack(headers[-1]).type == INDEX  # type: ignore[union-attr]

    def put_block(self, block: bytes) -> None:
        """Write the header block, before any record."""
        self._write(0, [block])
        self.end = len(block)

    def put(
        self, kind: int, sequence: int, first: int, tokens: int, flags: int = 0, table: bytes = b"",
        parts: Iterable[Any] = (),
    ) -> None:  # fmt: skip
        """Write a record whose payload is ``table`` and ``parts``; the table's checksum goes into its header.

        Raises :class:`LimitError` (``limit-index``) for more records than an INDEX can list, and OSError.
        """
        buffers = [memoryview(buffer).cast("B") for buffer in (table, *parts) if len(buffer)]
        self._put(kind, buffers, crc32c(table), (sequence, first, tokens, flags))

    def close(self) -> None:
        """Write the INDEX, unless the log ends with one and with the file."""
        size = self.disk.size()
        if self._closed and size == self.end:
            return
        end = self.end + index_bytes(self.end, len(self.headers))
        if size > end:
            # What a crash left behind the log: the trailer must end the file, and nobody may cut it.
            self._put(FILL, *_zeros(align(size, BLOCK) - self.end - RECORD_BYTES))
        record = index_record(self.end, self.headers, self._salt, self.epoch)
        self._commit(record[:RECORD_BYTES], [memoryview(record)[RECORD_BYTES:]])
        self._closed = True

    def sync(self) -> None:
        try:
            self.disk.sync()
        except BaseException:
            self.broken = True
            raise

    def _put(
        self, kind: int, buffers: list[memoryview], crc: int, place: tuple[int, int, int, int] = (0, 0, 0, 0)
    ) -> None:
        """Write a record of ``buffers``; ``place`` is sequence, first token, tokens, flags."""
        # The INDEX must list this record, and a FILL if one is needed.
        if RECORD_BYTES * (len(self.headers) + 4) > MAX_INDEX:
            raise LimitError(
                f"the file has {len(self.headers)} records, more fit no index; repack it", code="limit-index"
            )
        sequence, first, tokens, flags = place
        size = sum(buffer.nbytes for buffer in buffers)
        header = RecordHeader(
            kind, size, first, tokens, sequence, len(self.headers), self._salt, crc, flags, epoch=self.epoch
        ).pack()
        buffers.append(memoryview(bytes(-(RECORD_BYTES + size) % BLOCK)))
        self._commit(header, buffers)

    def _commit(self, header: bytes, buffers: list[memoryview]) -> None:
        size = RECORD_BYTES + sum(buffer.nbytes for buffer in buffers)
        if self.durable:
            self._write(self.end + RECORD_BYTES, buffers)
            self._write(self.end, [header])
            self.sync()
        else:
            self._write(self.end, [header, *buffers])
        self.headers.append(header)
        self.end += size
        self._closed = False

    def _write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> None:
        rest = [buffer for buffer in buffers if len(buffer)]
        try:
            while rest:
                written = self.disk.write(offset, rest)
                if not written:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                offset += written
                rest = _behind(rest, written)
        except BaseException:
            self.broken = True
            raise


def _zeros(size: int) -> tuple[list[memoryview], int]:
    """``size`` zero bytes as buffers, all one piece of memory, and their checksum."""
    piece = bytes(min(size, ZERO_BYTES))
    buffers = [memoryview(piece)[: size - at] for at in range(0, size, len(piece) or 1)]
    crc = 0
    for buffer in buffers:
        crc = crc32c(bytes(buffer), crc)
    return buffers, crc


def _behind(buffers: Sequence[bytes | memoryview], written: int) -> list[bytes | memoryview]:
    """What of ``buffers`` follows the first ``written`` bytes."""
    for number, buffer in enumerate(buffers):
        if written < len(buffer):
            return [memoryview(buffer)[written:], *buffers[number + 1 :]]
        written -= len(buffer)
    return []
