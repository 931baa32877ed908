"""Files made to mislead, all checksums right: each is refused with its reason code, and before memory is taken."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from file_support import SMALL, edit_record, record_offsets, tensors, with_header_crc, write

import dquantcodec.file as dqkv
from dquantcodec import errors
from dquantcodec.file import Layer
from dquantcodec.file import structs as s
from dquantcodec.file.header import parse_header
from dquantcodec.file.records import Record, RecordRules
from dquantcodec.file.rows import PLANES, decode_rows, encode_rows
from dquantcodec.file.sequences import sequences

LAYERS = [Layer(2, 8, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact"), Layer(1, 3, storage="absent")]
PROFILES, LAYER_ENTRIES = 128, 128 + 192
TABLES = LAYER_ENTRIES + 3 * 32
#: Behind a table of 64 letters for keys and one of 27 for values.
SIGNS = TABLES + 8 + 128 + 8 + 56
#: Records of the file below: ROWS (sinks), PAGES, ROWS exact only, PAGES, ROWS exact only, ROWS (recent), INDEX.
SINKS, PAGES, EXACT, LAST_PAGES, LAST_EXACT, RECENT, INDEX = range(7)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "x.dqkv"
    return write(path, LAYERS, tensors(LAYERS, 43), sinks=2, recent=4, _record_target=1, metadata={"a": [1]})


def refusal(path: Path, data: bytes) -> errors.DQuantError:
    """The error of opening ``data``, which must come without taking memory for what the file claims."""
    path.write_bytes(data)
    open_file = dqkv.open  # its modules are loaded now, not while memory is counted
    tracemalloc.start()
    try:
        with pytest.raises(errors.DQuantError) as caught:
            open_file(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(data) + (1 << 20)
    assert str(path) in str(caught.value) and caught.value.where["path"] == str(path)
    return caught.value


def put(offset: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + struct.pack("<" + form, *values) + data[offset + struct.calcsize("<" + form) :]


def stream(field: int, form: str, *values: Any, kind: int = 0) -> Callable[[bytes], bytes]:
    return put(PROFILES + 64 * (1 + kind) + field, form, *values)


def layer(number: int, field: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    return put(LAYER_ENTRIES + 32 * number + field, form, *values)


def insert_profile(data: bytes) -> bytes:
    """A second profile entry with another window, all offsets moved."""
    block = int.from_bytes(data[12:16], "little")
    second = bytearray(data[PROFILES : PROFILES + 192])
    second[8:12] = (64).to_bytes(4, "little")
    body = (data[:LAYER_ENTRIES] + bytes(second) + data[LAYER_ENTRIES:block]).rstrip(b"\0")
    body = bytearray(body.ljust(s.align(len(body), s.BLOCK), b"\0"))
    body[12:16] = len(body).to_bytes(4, "little")
    body[56:60] = (2).to_bytes(4, "little")
    for at in (*range(80, 96, 4), 108, 112):
        body[at : at + 4] = (int.from_bytes(body[at : at + 4], "little") + 192).to_bytes(4, "little")
    return bytes(body) + data[block:]


def json_as(text: bytes) -> Callable[[bytes], bytes]:
    """The header's JSON replaced; longer blocks are not needed."""

    def change(data: bytes) -> bytes:
        block = int.from_bytes(data[12:16], "little")
        at = int.from_bytes(data[92:96], "little")
        assert at + len(text) <= block
        return put(96, "I", len(text))(data[:at] + text.ljust(block - at, b"\0") + data[block:])

    return change


BIG = 0xFFFFFFFF
HEADERS: list[tuple[str, type[errors.DQuantError], Callable[[bytes], bytes]]] = [
    ("signature", errors.FormatError, put(0, "8s", b"\x89DQK\n\n\x1a\n")),
    ("version-major", errors.UnsupportedError, put(8, "H", 2)),
    ("version-major", errors.UnsupportedError, put(8, "HH", 0, 9)),
    ("limit-header", errors.LimitError, put(12, "I", 0xFFFFF000)),
    ("header-length", errors.FormatError, put(12, "I", 4097)),
    ("header-length", errors.FormatError, put(12, "I", 0)),
    ("header-truncated", errors.TruncatedError, put(12, "I", 8 << 20)),
    ("feature-required", errors.UnsupportedError, put(16, "Q", 1 << 63)),
    ("limit-layers", errors.LimitError, put(48, "I", BIG)),
    ("limit-layers", errors.LimitError, put(48, "I", 0)),
    ("limit-sequences", errors.LimitError, put(52, "I", BIG)),
    ("limit-profiles", errors.LimitError, put(56, "I", BIG)),
    ("limit-profiles", errors.LimitError, put(56, "I", 8193)),
    ("limit-tables", errors.LimitError, put(60, "I", BIG)),
    ("limit-signs", errors.LimitError, put(64, "I", BIG)),
    ("limit-json", errors.LimitError, put(96, "I", BIG)),
    ("header-coverage", errors.FormatError, put(76, "I", 0)),
    ("header-coverage", errors.FormatError, put(80, "I", LAYER_ENTRIES + 32)),
    ("header-coverage", errors.FormatError, put(84, "I", BIG)),
    ("header-coverage", errors.FormatError, put(88, "I", TABLES)),
    ("header-coverage", errors.FormatError, put(92, "I", 4000)),
    ("header-coverage", errors.FormatError, put(48, "I", 1024)),
    ("limit-table", errors.LimitError, put(60, "I", 3)),  # the signs read as a table
    ("limit-signs", errors.LimitError, put(64, "I", 2)),  # of one profile
    ("header-coverage", errors.FormatError, put(96, "I", 60000)),
    ("limit-classes", errors.LimitError, put(100, "I", BIG)),
    ("limit-classes", errors.LimitError, put(100, "I", 1025)),
    ("limit-groupings", errors.LimitError, put(104, "I", BIG)),
    ("limit-groupings", errors.LimitError, put(104, "I", 3)),
    ("header-coverage", errors.FormatError, put(108, "I", 0)),
    ("header-coverage", errors.FormatError, put(112, "I", BIG)),
    # The JSON read as a class and as a grouping.
    ("header-reserved", errors.FormatError, put(100, "I", 1)),
    ("profile-quantiser", errors.UnsupportedError, put(104, "I", 1)),
    ("header-matrices", errors.UnsupportedError, put(116, "I", 1)),
    ("header-reserved", errors.FormatError, put(120, "B", 1)),
    ("header-reserved", errors.FormatError, put(123, "B", 1)),
    ("header-reserved", errors.FormatError, put(4095, "B", 1)),
    ("header-reserved", errors.FormatError, put(PROFILES + 12, "B", 1)),
    ("header-reserved", errors.FormatError, put(PROFILES + 63, "B", 1)),
    ("header-reserved", errors.FormatError, stream(63, "B", 1)),
    ("header-reserved", errors.FormatError, layer(2, 31, "B", 1)),
    ("limit-geometry", errors.LimitError, put(PROFILES, "I", 1 << 31)),
    ("limit-geometry", errors.LimitError, put(PROFILES, "II", 1024, 1024)),
    ("profile-signs", errors.FormatError, put(PROFILES, "I", 4)),
    ("profile-window", errors.LimitError, put(PROFILES + 8, "I", 33)),
    ("profile-window", errors.LimitError, put(PROFILES + 8, "I", 0)),
    ("profile-window", errors.LimitError, put(PROFILES + 8, "I", 1 << 20)),
    ("profile-window-differs", errors.FormatError, insert_profile),
    ("profile-name", errors.FormatError, put(PROFILES + 16, "B", 0xFF)),
    ("profile-coder", errors.UnsupportedError, stream(0, "B", 3)),
    ("profile-quantiser", errors.UnsupportedError, stream(1, "B", 3)),
    ("profile-grid", errors.UnsupportedError, stream(2, "B", 2)),
    ("profile-levels", errors.FormatError, stream(2, "B", 1)),
    ("profile-grid", errors.FormatError, stream(16, "d", 0.5)),
    ("profile-grid", errors.FormatError, stream(24, "B", 1)),
    ("profile-gain", errors.UnsupportedError, stream(24, "B", 2)),
    ("profile-letter", errors.LimitError, stream(3, "B", 0)),
    ("profile-letter", errors.LimitError, stream(3, "B", 255)),
    ("profile-levels", errors.LimitError, stream(4, "B", 65)),
    ("profile-precision", errors.LimitError, stream(5, "B", 7)),
    ("profile-substreams", errors.LimitError, stream(6, "B", 3)),
    ("profile-heads", errors.FormatError, stream(6, "B", 4)),
    ("profile-mean", errors.UnsupportedError, stream(7, "B", 2)),
    ("profile-words", errors.LimitError, stream(8, "H", 1)),
    ("profile-words", errors.LimitError, stream(8, "H", 32768)),
    ("profile-table", errors.FormatError, stream(10, "H", 2)),
    ("profile-table", errors.FormatError, stream(10, "H", 0, kind=1)),
    ("profile-prefix", errors.FormatError, stream(0, "B", 2, kind=1)),
    ("profile-rotation", errors.UnsupportedError, stream(12, "B", 2)),
    ("profile-grouping", errors.FormatError, stream(12, "B", 0)),
    ("profile-grouping", errors.FormatError, stream(26, "H", 1)),
    ("header-reserved", errors.FormatError, stream(25, "B", 1)),
    ("profile-escape", errors.UnsupportedError, stream(28, "B", 1)),
    ("header-reserved", errors.FormatError, stream(29, "B", 1)),
    ("profile-matrix", errors.UnsupportedError, stream(30, "H", 1)),
    ("header-reserved", errors.FormatError, stream(32, "B", 1)),
    ("profile-rotation", errors.UnsupportedError, stream(14, "H", 1)),
    ("header-reserved", errors.FormatError, stream(13, "B", 1)),
    ("layer-storage", errors.UnsupportedError, layer(0, 0, "B", 0)),
    ("layer-dtype", errors.UnsupportedError, layer(1, 1, "B", 9)),
    ("layer-profile", errors.FormatError, layer(0, 2, "H", 1)),
    ("layer-profile", errors.FormatError, layer(1, 2, "H", 0)),
    ("layer-profile", errors.FormatError, layer(0, 4, "I", 4)),
    ("limit-geometry", errors.LimitError, layer(1, 4, "I", BIG)),
    ("limit-groups", errors.LimitError, layer(0, 16, "H", 8193)),
    ("layer-groups", errors.FormatError, layer(0, 16, "H", 0)),
    ("layer-groups", errors.FormatError, layer(0, 16, "H", 3)),
    ("layer-groups", errors.FormatError, layer(1, 16, "H", 1)),
    ("layer-profile", errors.FormatError, layer(0, 16, "H", 2)),
    ("header-reserved", errors.FormatError, layer(0, 18, "B", 1)),
    ("layer-number", errors.FormatError, layer(1, 12, "I", 0)),
    ("limit-table", errors.LimitError, put(TABLES, "I", BIG)),
    ("limit-table", errors.LimitError, put(TABLES + 4, "I", 16)),
    ("header-coverage", errors.FormatError, put(TABLES, "I", 4096)),
    ("header-reserved", errors.FormatError, put(SIGNS + 4, "B", 1)),
    ("limit-signs", errors.LimitError, put(SIGNS, "I", BIG)),
    ("limit-signs", errors.LimitError, put(SIGNS, "I", 65537)),
    ("header-coverage", errors.FormatError, put(SIGNS, "I", 65536)),
    ("table-zero", errors.FormatError, put(TABLES + 8, "H", 0)),
    ("table-sum", errors.FormatError, put(TABLES + 8, "H", 9999)),
    ("header-json", errors.FormatError, json_as(b"{")),
    ("header-json", errors.FormatError, json_as(b"")),
    ("header-json", errors.FormatError, json_as(b"[]")),
    ("header-json", errors.FormatError, json_as(b"\xff")),
    ("header-json", errors.FormatError, json_as(b'{"model":1}')),
    ("header-json", errors.FormatError, json_as(b'{"model":"a","model":"b"}')),
    ("header-json", errors.FormatError, json_as(b'{"metadata":' + b"[" * 900 + b"]" * 900 + b"}")),
    ("header-json", errors.FormatError, json_as(b'{"metadata":{"a":NaN}}')),
    ("header-json", errors.FormatError, json_as(b'{"metadata":{"a":1e999}}')),
    ("header-json", errors.FormatError, json_as(b'{"metadata":{"a":"\\ud800"}}')),
    ("header-json", errors.FormatError, json_as(b'{"metadata":{"a":' + b"9" * 401 + b"}}")),
    ("header-json", errors.FormatError, json_as(b'{"metadata":{"a":0.' + b"9" * 401 + b"}}")),
    ("header-json", errors.FormatError, json_as(b'{"positions_start":-1}')),
    ("header-json", errors.FormatError, json_as(b'{"shard":[2,1]}')),
    ("header-json", errors.FormatError, json_as(b'{"shard":7}')),
]


@pytest.mark.parametrize(("code", "error", "change"), HEADERS, ids=lambda x: x if isinstance(x, str) else "")
def test_headers(
    good: bytes, tmp_path: Path, code: str, error: type[errors.DQuantError], change: Callable[[bytes], bytes]
) -> None:
    data = change(good)
    assert data != good
    caught = refusal(tmp_path / "x.dqkv", with_header_crc(data))
    assert (caught.code, type(caught)) == (code, error), str(caught)


def test_header_checksum(good: bytes, tmp_path: Path) -> None:
    assert refusal(tmp_path / "x.dqkv", put(68, "I", 5)(good)).code == "header-crc"


def test_what_may_be_unknown_is_read_on(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    unknown = json_as(b'{"model":"m","colour":{"deep":[1]}}')(put(24, "Q", 1 << 40)(put(10, "H", 9)(good)))
    path.write_bytes(with_header_crc(unknown))
    with dqkv.open(path) as reader:
        assert reader.model == "m" and reader.tokens == 43 and reader.header.optional_features == 1 << 40
        assert reader.format_version == (1, 9)


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header.update(fields)


RECORDS: list[tuple[str, type[errors.DQuantError], int, dict[str, Any]]] = [
    ("record-type", errors.UnsupportedError, PAGES, {"type": 4}),
    ("record-version", errors.UnsupportedError, PAGES, {"version": 2}),
    ("record-flags", errors.UnsupportedError, PAGES, {"flags": 1}),
    ("record-flags", errors.UnsupportedError, RECENT, {"flags": 2}),
    ("record-reserved", errors.FormatError, PAGES, {"reserved": 1}),
    ("record-number", errors.FormatError, PAGES, {"number": 7}),
    ("record-epoch", errors.FormatError, EXACT, {"epoch": 0}),
    ("record-sequence", errors.FormatError, PAGES, {"sequence": 1}),
    ("record-tokens", errors.FormatError, SINKS, {"tokens": 0}),
    ("limit-tokens", errors.LimitError, PAGES, {"first": 1 << 63}),
    ("limit-run", errors.LimitError, PAGES, {"tokens": BIG}),
    ("limit-rows", errors.LimitError, RECENT, {"tokens": BIG}),
    ("record-length", errors.FormatError, PAGES, {"tokens": 64}),
    ("record-length", errors.FormatError, PAGES, {"payload_bytes": 1 << 62}),
    ("record-length", errors.FormatError, PAGES, {"payload_bytes": 64}),
    ("record-length", errors.FormatError, SINKS, {"payload_bytes": 0}),
    ("record-length", errors.FormatError, SINKS, {"payload_bytes": 129}),
    ("record-tokens", errors.FormatError, PAGES, {"type": s.REWIND}),
    ("record-length", errors.FormatError, PAGES, {"type": s.REWIND, "tokens": 0}),
    ("record-length", errors.FormatError, PAGES, {"type": s.REWIND, "tokens": 0, "payload_bytes": 0}),
    ("record-flags", errors.UnsupportedError, PAGES, {"type": s.REWIND, "tokens": 0, "flags": 1}),
    ("coverage-tokens", errors.FormatError, PAGES, {"first": 3}),
    ("coverage-order", errors.FormatError, LAST_PAGES, {"first": 33}),
    ("coverage-tokens", errors.FormatError, SINKS, {"first": 1}),
    ("coverage-tokens", errors.FormatError, EXACT, {"first": 35}),
    ("coverage-tokens", errors.FormatError, EXACT, {"tokens": 31}),
    ("coverage-tokens", errors.FormatError, RECENT, {"first": 40}),
]


@pytest.mark.parametrize(("code", "error", "number", "fields"), RECORDS, ids=lambda x: str(x)[:40])
def test_records(
    good: bytes, tmp_path: Path, code: str, error: type[errors.DQuantError], number: int, fields: dict[str, Any]
) -> None:
    data = good
    if code == "record-epoch":
        data = edit_record(data, PAGES, change(epoch=1)) + data[record_offsets(data)[-1] :]
    caught = refusal(tmp_path / "x.dqkv", edit_record(data, number, change(**fields)))
    assert (caught.code, type(caught)) == (code, error), str(caught)


def reindexed(data: bytes) -> bytes:
    """``data``, which has no INDEX, with one that agrees."""
    offsets, offset = [], int.from_bytes(data[12:16], "little")
    while offset < len(data):
        offsets.append(offset)
        size = int.from_bytes(data[offset + 8 : offset + 16], "little")
        offset = s.align(offset + 64 + size, s.BLOCK)
    return data + s.index_record(len(data), [data[at : at + 64] for at in offsets], data[32:40])


def test_a_true_index_helps_no_false_record(good: bytes, tmp_path: Path) -> None:
    for code, fields in (
        ("record-type", {"type": 4}),
        ("coverage-tokens", {"first": 3}),
        ("limit-run", {"tokens": BIG}),
    ):
        data = reindexed(edit_record(good, PAGES, change(**fields)))
        assert refusal(tmp_path / "x.dqkv", data).code == code


def test_records_of_layers_the_file_does_not_have(good: bytes, tmp_path: Path) -> None:
    pairs = tensors([LAYERS[1]], 43)
    only_exact = write(tmp_path / "y.dqkv", [LAYERS[1]], pairs, sinks=2, recent=4)
    for fields in ({"type": s.PAGES, "flags": 0},):
        assert refusal(tmp_path / "x.dqkv", edit_record(only_exact, 1, change(**fields))).code == "record-layers"
    only_coded = write(tmp_path / "y.dqkv", [LAYERS[0]], tensors([LAYERS[0]], 43), sinks=2, recent=4)
    assert refusal(tmp_path / "x.dqkv", edit_record(only_coded, 0, change(flags=1))).code == "record-layers"


def test_layers_that_end_at_different_tokens(good: bytes, tmp_path: Path) -> None:
    """Closed, it is malformed; torn, it reads up to where the layers agree."""
    path = tmp_path / "x.dqkv"
    cut = good[: record_offsets(good)[LAST_EXACT]]
    assert refusal(path, reindexed(cut)).code == "coverage-tokens"
    path.write_bytes(cut)
    with dqkv.open(path) as reader:
        assert reader.torn and reader.tokens == 34 and len(reader.layers[0].key[:]) == 34


def test_pages_never_cover_pages(tmp_path: Path) -> None:
    layers = [LAYERS[0]]
    full = write(tmp_path / "y.dqkv", layers, tensors(layers, 70), recent=0, _record_target=1)  # 32 + 32 + 6 tokens
    offsets = record_offsets(full)
    pieces = [full[a:b] for a, b in zip(offsets, [*offsets[1:], len(full)])]
    swapped = full[: offsets[0]] + pieces[2] + pieces[1]
    first = edit_record(swapped + pieces[-1], 0, change(first=0, number=0))
    for start, code in ((0, "coverage-order"), (5, "coverage-order"), (6, ""), (7, "coverage-tokens")):
        both = edit_record(first + pieces[-1], 1, change(first=start, number=1))
        if code:
            assert refusal(tmp_path / "x.dqkv", both).code == code
            continue
        # Behind a page that is not full, windows count from the next record's first token.
        (tmp_path / "x.dqkv").write_bytes(both)
        with dqkv.open(tmp_path / "x.dqkv") as reader, dqkv.open(tmp_path / "y.dqkv") as source:
            tokens, wanted = reader.layers[0].key[:], source.layers[0].key[:]
            assert tokens.tobytes() == wanted[64:].tobytes() + wanted[32:64].tobytes()


def test_many_records_are_followed_in_linear_time(tmp_path: Path) -> None:
    """Rows, pages over the last of them, and rewinds, in the orders that would make a careless reader walk back."""
    layers = [LAYERS[0]]
    full = write(tmp_path / "y.dqkv", layers, tensors(layers, 33), recent=1, sinks=0)
    rules = RecordRules(parse_header(memoryview(full)))

    def record(kind: int, first: int, tokens: int) -> Record:
        return Record(0, s.RecordHeader(kind, 0, first, tokens, 0, 0, b"", 0))

    def steps(count: int) -> int:
        """Lines of the module run for ``count`` tokens of rows, then pages over the last one and a rewind, again and
        again, then pages over all."""
        records = [record(s.ROWS, token, 1) for token in range(count)]
        for _ in range(count):
            records += [record(s.PAGES, count - 1, 1), record(s.REWIND, count - 1, 0), record(s.ROWS, count - 1, 1)]
        taken = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal taken
            if frame.f_code.co_filename != sequences.__code__.co_filename:
                return None
            taken += event == "line"
            return trace

        before = sys.gettrace()  # that of coverage, where it is measured
        sys.settrace(trace)
        try:
            (log,) = sequences(records, False, rules)
        finally:
            sys.settrace(before)
        assert log.tokens == count and len(log.coded) == count
        return taken

    assert steps(800) < 4.5 * steps(200)


def test_unknown_records_that_may_be_skipped(good: bytes, tmp_path: Path) -> None:
    """A foreign record between ours, its number counted, changes nothing."""
    path = tmp_path / "x.dqkv"
    offsets = record_offsets(good)
    note = s.RecordHeader(0x8FFF, 5, 9, 9, 9, 1, good[32:40], s.crc32c(b"hello"), flags=77, version=5)
    middle = (note.pack() + b"hello").ljust(s.BLOCK, b"\0")
    data = good[: offsets[1]] + middle + good[offsets[1] : offsets[-1]]
    for number in range(2, len(offsets)):
        data = edit_record(data + good[offsets[-1] :], number, change(number=number))
    path.write_bytes(reindexed(data))
    with dqkv.open(path) as reader:
        assert reader.tokens == 43 and reader.indexed and list(reader.verify()) == []
    damaged = bytearray(reindexed(data))
    damaged[offsets[1] + 64] ^= 1
    path.write_bytes(damaged)
    with dqkv.open(path) as reader:
        assert [finding.code for finding in reader.verify()] == ["payload-crc"]


@pytest.mark.parametrize("field", ["index_offset", "file_bytes", "records", "salt", "epoch"])
def test_lying_trailers_are_not_believed(good: bytes, tmp_path: Path, field: str) -> None:
    trailer = s.Trailer.unpack(good[-64:])
    assert trailer is not None
    for value in (b"12345678",) if field == "salt" else (0, 1, 1 << 31, (1 << 32) - 1):
        fields = {**trailer.__dict__, field: value}
        if fields == trailer.__dict__:
            continue
        lying = good[:-64] + s.Trailer(**fields).pack()
        path = tmp_path / "x.dqkv"
        path.write_bytes(lying)
        with dqkv.open(path) as reader:
            # The log, whose last record is the INDEX, is whole; only the way in is not.
            assert not reader.indexed and not reader.torn and reader.tokens == 43
            assert [finding.code for finding in reader.verify()] == ["index-mismatch"]
        # Nor where the INDEX record's checksum vouches for the lie.
        offset = record_offsets(good)[-1]
        index = s.RecordHeader.unpack(good[offset : offset + 64])
        assert index is not None
        path.write_bytes(
            lying[:offset] + replace(index, table_crc=s.crc32c(lying[offset + 64 :])).pack() + lying[offset + 64 :]
        )
        with dqkv.open(path) as reader:
            assert not reader.indexed and reader.tokens == 43
            assert [finding.code for finding in reader.verify()] == ["index-mismatch"]


def test_an_index_with_right_checksums_must_equal_the_log(good: bytes, tmp_path: Path) -> None:
    """The index tells another table checksum: opening believes it, reading refuses, verification tells."""
    path = tmp_path / "x.dqkv"
    offsets = record_offsets(good)
    headers = [good[at : at + 64] for at in offsets[:-1]]
    header = s.RecordHeader.unpack(headers[PAGES])
    assert header is not None
    headers[PAGES] = s.RecordHeader(**{**header.__dict__, "table_crc": 1}).pack()
    path.write_bytes(good[: offsets[-1]] + s.index_record(offsets[-1], headers, good[32:40]))
    with dqkv.open(path) as reader:
        with pytest.raises(errors.ChecksumError):
            reader.layers[0].key[:]
        assert "index-mismatch" in [finding.code for finding in reader.verify()]


def rows_file(good: bytes, number: int, entries: list[tuple[int, bytes]], slack: int = 0) -> bytes:
    """``good`` with the blocks of a ROWS record replaced and everything around them made to fit."""
    table = b"".join(s.ROWS_ENTRY.pack(e, bytes(3), s.crc32c(block), len(block) + slack) for e, block in entries)
    table = table.ljust(s.align(len(table)), b"\0")
    payload = table + b"".join(block.ljust(s.align(len(block)), b"\0") for _, block in entries)
    offsets = record_offsets(good)
    body = (good[offsets[number] : offsets[number] + 64] + payload).ljust(s.align(64 + len(payload), s.BLOCK), b"\0")
    data = good[: offsets[number]] + body + good[offsets[number + 1] :]
    fields = {"payload_bytes": len(payload), "table_crc": s.crc32c(table)}
    # The walk over `data` needs the new length first.
    head = s.RecordHeader.unpack(good[offsets[number] : offsets[number] + 64])
    assert head is not None
    packed = s.RecordHeader(**{**head.__dict__, **fields}).pack()
    data = data[: offsets[number]] + packed + data[offsets[number] + 64 :]
    return reindexed(data[: record_offsets(data)[-1]])


FRAME = zstandard.ZstdCompressor().compress
PLAIN = bytes(4 * 5 * 32)  # the exact layer's rows of record EXACT: 32 tokens of 5 float32


@pytest.mark.parametrize(
    ("code", "encoding", "block", "slack"),
    [
        ("rows-encoding", 2, PLAIN, 0),
        ("rows-length", 0, PLAIN[:-4], 0),
        ("rows-length", 0, PLAIN + b"1234", 0),
        ("rows-length", 0, PLAIN[:64], 1 << 40),
        ("rows-length", 0, b"", 0),
        ("rows-length", 1, b"1", 0),
        ("rows-length", 1, struct.pack("<4I", 160, 160, 160, 160), 0),
        ("rows-length", 1, struct.pack("<4I", 1, 1, 1, 0) + b"1234", 0),
        ("rows-length", 1, struct.pack("<4I", 161, 0, 0, 0) + bytes(161), 0),
        # A bomb: few bytes that claim to become many.
        ("rows-length", 1, struct.pack("<4I", len(FRAME(bytes(1 << 22))), 0, 0, 0) + FRAME(bytes(1 << 22)), 0),
        ("rows-frame", 1, struct.pack("<4I", 8, 0, 0, 0) + b"notzstd.", 0),
        ("rows-frame", 1, struct.pack("<4I", 0, 0, 0, 0), 0),
        ("rows-frame", 1, struct.pack("<4I", len(FRAME(bytes(160))) + 1, 0, 0, 0) + FRAME(bytes(160)) + b"x", 0),
    ],
)
def test_rows(good: bytes, tmp_path: Path, code: str, encoding: int, block: bytes, slack: int) -> None:
    path = tmp_path / "x.dqkv"
    path.write_bytes(rows_file(good, EXACT, [(encoding, block), (0, PLAIN)], slack))
    with dqkv.open(path) as reader:
        with pytest.raises(errors.DQuantError) as caught:
            reader.layers[1].key[:]
        assert caught.value.code == code
        assert code in [finding.code for finding in reader.verify()]


def test_rows_tables(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    offset = record_offsets(good)[EXACT]
    for at, code in ((64 + 1, "record-reserved"), (64 + 33, "table-padding")):
        data = bytearray(good)
        data[offset + at] = 1
        crc = s.crc32c(bytes(data[offset + 64 : offset + 128]))
        path.write_bytes(edit_record(bytes(data), EXACT, change(table_crc=crc)))
        with dqkv.open(path) as reader:
            with pytest.raises(errors.FormatError) as caught:
                reader.layers[1].key[:]
            assert caught.value.code == code


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("values", [1, 3, 1000])
def test_rows_come_back_whatever_they_hold(dtype: Any, values: int) -> None:
    rng = np.random.default_rng(values)
    size = np.dtype(dtype).itemsize * values
    for raw in (bytes(size), rng.bytes(size), rng.integers(0, 3, size, np.uint8).tobytes()):
        rows = np.frombuffer(raw, dtype).reshape(values, 1, 1)
        encoding, block = encode_rows(rows)
        assert len(block) <= size
        again = decode_rows(encoding, memoryview(block), (values, 1, 1), np.dtype(dtype))
        assert again.tobytes() == raw


def test_real_rows_are_worth_planes() -> None:
    rows = np.random.default_rng(0).standard_normal((128, 8, 16)).astype(np.float16)
    encoding, block = encode_rows(rows)
    assert encoding == PLANES and len(block) < 0.95 * rows.nbytes
