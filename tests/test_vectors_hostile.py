"""Vectors with a byte flipped or an end missing: a typed error, or exactly what the file said at some record's end."""

from __future__ import annotations

import hashlib
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from file_support import FORMATS, create, record_offsets
from file_support import plain_reader as plain

import dquantcodec.file as dqkv
from dquantcodec.errors import DQuantError
from dquantcodec.file import Layer
from dquantcodec.file import structs as s

VALID = FORMATS / "vectors" / "valid"
#: Every kind of record, both coders, groups, a trellis, byte planes, several sequences, growth, an open file.
NAMES = (
    "records-usual", "rans-substreams-2", "groups", "trellis-4", "rows-planes", "sequences", "seal-beyond",
    "rewind-pages", "epochs-interrupted", "torn-sides",
)  # fmt: skip
#: The nightly run takes every byte and every length, CI a sample that the offsets alone decide.
EXHAUSTIVE = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def everything(reader: Any) -> tuple[Any, ...]:
    """All tokens of a file, as a digest for every sequence."""
    found = []
    for sequence in reader.sequences:
        values = hashlib.sha256()
        for layer in sequence.layers if sequence.tokens else ():
            if layer.spec.storage != "absent":
                values.update(layer.key.read().tobytes() + layer.value.read().tobytes())
        found.append((sequence.tokens, values.hexdigest()))
    return tuple(found)


def verdict(reader: Any) -> tuple[set[str], int]:
    """What verification finds, and how many records are whole."""
    return {finding.code for finding in reader.verify()}, len(reader.log.records)


def states(path: Path, data: bytes) -> dict[int, tuple[Any, ...]]:
    """What the file said after its header block and after every record, by the offset of their ends."""
    ends = [int.from_bytes(data[12:16], "little"), *(record.end for record in plain.open_file(data).records)]
    found = {}
    for end in ends:
        path.write_bytes(data[:end])
        with dqkv.open(path) as reader:
            found[end] = everything(reader)
    return found


def offsets(data: bytes) -> list[int]:
    """Structures and their edges, and samples of the rest; every byte if asked for."""
    if EXHAUSTIVE:
        return list(range(len(data)))
    used = {*range(0, 128, 5), *range(128, len(data), 97)}
    records = record_offsets(data) if data[-64:-60] == b"DQKT" else [r.offset for r in plain.open_file(data).records]
    for at in records:
        end = at + 64 + int.from_bytes(data[at + 8 : at + 16], "little")
        used |= {
            *range(at, at + 64, 3),
            *range(at + 64, min(end, at + 200), 7),
            *range(at + 64, end, 41),
            end - 1,
            end,
            at - 1,
        }
    return sorted(offset for offset in used if offset < len(data))


@pytest.mark.parametrize("name", NAMES)
def test_every_flip(tmp_path: Path, name: str) -> None:
    data = (VALID / f"{name}.dqkv").read_bytes()
    path = tmp_path / "x.dqkv"
    known = set(states(path, data).values())
    path.write_bytes(data)
    with dqkv.open(path) as reader:
        before = verdict(reader)
    with path.open("r+b", buffering=0) as file:
        for offset in offsets(data):
            os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << offset % 8]), offset)
            try:
                with dqkv.open(path) as reader:
                    assert verdict(reader) != before, f"the flip at byte {offset} went unnoticed"
                    assert everything(reader) in known, f"the flip at byte {offset} changed tokens"
            except DQuantError as error:
                assert error.code and str(path) in str(error)
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert path.read_bytes() == data


@pytest.mark.parametrize("name", NAMES)
def test_every_length(tmp_path: Path, name: str) -> None:
    data = (VALID / f"{name}.dqkv").read_bytes()
    path = tmp_path / "x.dqkv"
    after = states(path, data)
    path.write_bytes(data)
    for length in reversed(offsets(data)[:: 1 if EXHAUSTIVE else 2]):
        os.truncate(path, length)
        if length < min(after):
            with pytest.raises(DQuantError) as caught:
                dqkv.open(path)
            assert caught.value.code == "header-truncated"
            continue
        with dqkv.open(path) as reader:
            assert everything(reader) == after[max(end for end in after if end <= length)]
            closed = length in after and reader.indexed
            assert ("log-torn" in [finding.code for finding in reader.verify()]) != closed


def test_sequences_without_records_take_no_memory(tmp_path: Path) -> None:
    """A file of two blocks claims the most sequences there may be."""
    path = tmp_path / "x.dqkv"
    with create(path, [Layer(1, 4, "float32", storage="exact")], sequences=65536):
        pass
    tracemalloc.start()
    with dqkv.open(path) as reader:
        assert len(reader.sequences) == 65536 and reader.sequences[65535].tokens == 0
        assert list(reader.verify()) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_rows_of_a_few_bytes_take_bounded_memory(tmp_path: Path) -> None:
    """A block whose planes unpack to the most that the format allows, the last of them cut short."""
    path = tmp_path / "x.dqkv"
    tokens = s.MAX_ROWS_BLOCK // 4
    with create(path, [Layer(1, 1, "float32", storage="exact")], _file_id=bytes(16)):
        pass
    frame = zstandard.ZstdCompressor().compress(bytes(tokens))
    block = struct.pack("<4I", *[len(frame)] * 3, len(frame) - 1) + 3 * frame + frame[:-1]
    table = 2 * s.ROWS_ENTRY.pack(1, bytes(3), s.crc32c(block), len(block)) + bytes(32)
    payload = table + 2 * block.ljust(s.align(len(block)), b"\0")
    start = path.read_bytes()[: s.BLOCK]
    head = s.RecordHeader(s.ROWS, len(payload), 0, tokens, 0, 0, bytes(8), s.crc32c(table))
    path.write_bytes(start + (head.pack() + payload).ljust(s.align(64 + len(payload), s.BLOCK), b"\0"))
    tracemalloc.start()
    with dqkv.open(path) as reader:
        assert reader.tokens == tokens
        codes = {finding.code for finding in reader.verify()}
        with pytest.raises(DQuantError):
            reader.layers[0].key.read(0, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert codes == {"log-torn", "rows-frame"} and peak < 64 << 20
