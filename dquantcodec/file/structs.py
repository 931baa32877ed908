"""Byte layouts of the ``.dqkv`` structures and the checksum (specification, clauses 3 and 4).

Everything is little-endian and fixed-size; the sizes are asserted here, beside the formats that produce them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import google_crc32c

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Bytes(Protocol):
    """The bytes of a file: a memoryview of its mapping, or what stands for one that lies elsewhere."""

    @property
    def nbytes(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


SIGNATURE: Final = b"\x89DQK\r\n\x1a\n"
VERSION: Final = (1, 0)

#: Blocks of the file (header, records) start and end on multiples of this.
BLOCK: Final = 4096
#: Arrays inside a record start on multiples of this.
ALIGN: Final = 64
#: Tables, sign vectors, classes and groupings of the header start on multiples of this.
STEP: Final = 8

#: Bytes of a view that are copied at a time for their checksum.
_PIECE: Final = 256 << 10

MAX_HEADER = 16 << 20
MAX_JSON = 64 << 10
MAX_JSON_DEPTH = 16
#: Characters of a number in JSON.
MAX_JSON_NUMBER = 400
MAX_LAYERS = 1024
#: Profiles, and head groups of all layers together: small layer entries could name a million otherwise.
MAX_PROFILES = 8192
MAX_SEQUENCES = 65536
MAX_TABLES = 2048
MAX_FILE_CLASSES = 1024
MAX_WORDS = 32767
MAX_WINDOW = 4096
MAX_RUN = 1024
MAX_TOKENS = 1 << 40
MAX_INDEX = 256 << 20
#: Decoded bytes of one block of exact rows: the most a reader allocates for a few compressed bytes.
MAX_ROWS_BLOCK = 16 << 20

NO_PROFILE: Final = 0xFFFF

#: signature, major, minor, block bytes, required and optional features, file id, counts (layers, sequences,
#: profiles, tables, sign vectors), sinks, recent, offsets (profiles, layers, tables, signs, JSON), JSON bytes,
#: classes, groupings and their offsets, stored matrices, reserved, CRC32C of the block without this field.
START = struct.Struct("<8sHHIQQ16s5I2I6I4I2II")
#: heads, head_dim, window, reserved, name, reserved; the key and value stream entries follow.
PROFILE = struct.Struct("<III4s32s16s")
#: coder, quantiser, grid, letter, levels, precision, substreams, mean mode, words, table, rotation, reserved,
#: sign vector, step, gain, reserved, grouping, escape, reserved, stored matrix, reserved.
STREAM = struct.Struct("<8BHHBBHdBBHBBH32s")
#: storage, dtype, profile of the first head group, heads, head_dim, layer number of the model, head groups, reserved.
LAYER = struct.Struct("<BBHIIIH14s")
#: letters, precision; the u16 frequencies follow.
TABLE = struct.Struct("<II")
#: bits, reserved; the packed signs follow.
SIGNS = struct.Struct("<I4s")
#: largest level, 1 if dependent, gain; the u16 frequencies of the levels from 0 up follow, by one or two quantisers.
CLASS = struct.Struct("<BBH")
#: heads, head_dim, coded channels of a head, groups of a head, tables, quantiser, reserved; tables, shapes of groups,
#: heads, tables of groups and the channels' order follow.
GROUPING = struct.Struct("<HHHHBB6s")
#: precision, fields, reserved, classes of the fields.
GROUPING_TABLE = struct.Struct("<BBH4H")
#: magic, type, version, payload bytes, first token, tokens, sequence, number, flags, salt, epoch, table CRC,
#: reserved, CRC32C of the bytes before it.
RECORD = struct.Struct("<IHHQQIIII8sIIII")
#: encoding, reserved, CRC32C of the block, stored bytes.
ROWS_ENTRY = struct.Struct("<B3sIQ")
#: magic, version, reserved, INDEX offset, file bytes, salt, epoch, records before INDEX, reserved, CRC32C.
TRAILER = struct.Struct("<IHHQQ8sII20sI")

PROFILE_BYTES: Final = PROFILE.size + 2 * STREAM.size
RECORD_BYTES: Final = RECORD.size

assert START.size == 128
assert (PROFILE.size, STREAM.size, PROFILE_BYTES, LAYER.size) == (64, 64, 192, 32)
assert (TABLE.size, SIGNS.size) == (8, 8)
assert (CLASS.size, GROUPING.size, GROUPING_TABLE.size) == (4, 16, 12)
assert (RECORD.size, ROWS_ENTRY.size, TRAILER.size) == (64, 16, 64)
assert BLOCK % ALIGN == 0 and RECORD.size % ALIGN == 0

RECORD_MAGIC: Final = int.from_bytes(b"DQKR", "little")
TRAILER_MAGIC: Final = int.from_bytes(b"DQKT", "little")

IGNORABLE: Final = 0x8000
PAGES: Final = 1
ROWS: Final = 2
REWIND: Final = 3
INDEX: Final = IGNORABLE | 1
NOTE: Final = IGNORABLE | 2
FILL: Final = IGNORABLE | 3
TYPE_NAMES: Final = {PAGES: "PAGES", ROWS: "ROWS", REWIND: "REWIND", INDEX: "INDEX", NOTE: "NOTE", FILL: "FILL"}

#: Flag of a ROWS record: it holds the exact layers only (the coded layers have PAGES for these tokens).
EXACT_ONLY: Final = 1

CODERS: Final = {"rans": 1, "prefix": 2}
DTYPES: Final = {"bfloat16": 1, "float16": 2, "float32": 3}
STORAGES: Final = {"coded": 1, "exact": 2, "absent": 3}
#: By the number of states of the trellis.
QUANTISERS: Final = {1: 0, 4: 1, 8: 2}
GRIDS: Final = {"min-max": 0, "mid-tread": 1}
GAINS: Final = {"least-squares": 0, "unbiased": 1}
MEAN_NONE: Final = 0
MEAN_INT8: Final = 1
ROTATION_NONE: Final = 0
ROTATION_HADAMARD: Final = 1


def align(size: int, step: int = ALIGN) -> int:
    """``size`` rounded up to a multiple of ``step``."""
    return -(-size // step) * step


def crc32c(data: bytes | memoryview | NDArray[np.uint8], before: int = 0) -> int:
    """CRC32C (Castagnoli) of ``data``, continuing from ``before``, the checksum of what precedes it."""
    if not isinstance(data, memoryview):
        return int(google_crc32c.extend(before, data))
    # The extension takes no views.  What is copied for it stays in the processor's cache.
    for at in range(0, data.nbytes, _PIECE):
        before = google_crc32c.extend(before, data[at : at + _PIECE].tobytes())
    return int(before)


@dataclass(frozen=True)
class RecordHeader:
    """The 64 bytes before a record's payload (specification, clause 4.1)."""

    type: int
    payload_bytes: int
    first: int
    tokens: int
    sequence: int
    number: int
    salt: bytes
    table_crc: int
    flags: int = 0
    version: int = 1
    epoch: int = 0
    reserved: int = 0

    def pack(self) -> bytes:
        body = RECORD.pack(
            RECORD_MAGIC, self.type, self.version, self.payload_bytes, self.first, self.tokens, self.sequence,
            self.number, self.flags, self.salt, self.epoch, self.table_crc, self.reserved, 0,
        )[:-4]  # fmt: skip
        return body + crc32c(body).to_bytes(4, "little")

    @staticmethod
    def unpack(data: bytes) -> RecordHeader | None:
        """The header in ``data`` (64 bytes), or None where magic or checksum say that none stands there."""
        if len(data) < RECORD_BYTES:
            return None
        (magic, kind, version, payload_bytes, first, tokens, sequence, number, flags, salt, epoch, table_crc, reserved,
         crc) = RECORD.unpack(data)  # fmt: skip
        if magic != RECORD_MAGIC or crc != crc32c(data[:-4]):
            return None
        return RecordHeader(
            kind, payload_bytes, first, tokens, sequence, number, salt, table_crc, flags, version, epoch, reserved
        )

    @property
    def end(self) -> int:
        """First token after the record's tokens."""
        return self.first + self.tokens

    @property
    def ignorable(self) -> bool:
        return bool(self.type & IGNORABLE)

    @property
    def type_name(self) -> str:
        return TYPE_NAMES.get(self.type, f"type {self.type:#06x}")


@dataclass(frozen=True)
class Trailer:
    """The last 64 bytes of a closed file (specification, clause 4.5)."""

    index_offset: int
    file_bytes: int
    salt: bytes
    epoch: int
    records: int

    def pack(self) -> bytes:
        body = TRAILER.pack(
            TRAILER_MAGIC, 1, 0, self.index_offset, self.file_bytes, self.salt, self.epoch, self.records, bytes(20), 0
        )[:-4]
        return body + crc32c(body).to_bytes(4, "little")

    @staticmethod
    def unpack(data: bytes) -> Trailer | None:
        """The trailer in ``data`` (64 bytes), or None where there is none this version can use."""
        magic, version, reserved, index_offset, file_bytes, salt, epoch, records, rest, crc = TRAILER.unpack(data)
        if magic != TRAILER_MAGIC or crc != crc32c(data[:-4]) or version != 1 or reserved or any(rest):
            return None
        return Trailer(index_offset, file_bytes, salt, epoch, records)


def index_bytes(offset: int, records: int) -> int:
    """Bytes of the INDEX record at ``offset`` that lists ``records`` headers."""
    return align(offset + RECORD_BYTES * (records + 1) + TRAILER.size, BLOCK) - offset


def index_record(offset: int, headers: Sequence[bytes], salt: bytes, epoch: int = 0) -> bytes:
    """The INDEX record at ``offset`` (clause 4.5): ``headers`` of all records before it, trailer as its last bytes."""
    rows = b"".join(headers)
    end = offset + index_bytes(offset, len(headers))
    trailer = Trailer(offset, end, salt, epoch, len(headers)).pack()
    payload = rows.ljust(end - offset - RECORD_BYTES - TRAILER.size, b"\0") + trailer
    header = RecordHeader(INDEX, len(payload), 0, 0, 0, len(headers), salt, crc32c(payload), epoch=epoch)
    return header.pack() + payload
