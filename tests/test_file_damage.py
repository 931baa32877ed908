"""Damaged and cut files: a typed error, or exactly the tokens that are certainly whole, and never in silence."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import SMALL, record_offsets, same, tensors, write
from hypothesis import given
from hypothesis import strategies as st

import dquantcodec.file as dqkv
from dquantcodec.errors import ChecksumError, DQuantError, TruncatedError
from dquantcodec.file import Layer
from dquantcodec.file.structs import PAGES, RECORD_BYTES, ROWS, RecordHeader

LAYERS = [Layer(2, 8, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact"), Layer(1, 3, storage="absent")]
TOKENS = 2 + 32 + 5 + 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """A file with every kind of record (a full and a cut page among them), and what its layers read as."""
    path = tmp_path_factory.mktemp("small") / "x.dqkv"
    data = write(path, LAYERS, tensors(LAYERS, TOKENS), sinks=2, recent=4, _record_target=1)
    with dqkv.open(path) as reader:
        assert [r.header.type_name for r in reader.log.records].count("PAGES") == 2
        return data, everything(reader)


def everything(reader: dqkv.reader.Reader) -> list[Any]:  # type: ignore[name-defined]
    return [tensor[:] for layer in reader.layers[:2] for tensor in (layer.key, layer.value)]


#: The nightly run takes every byte and every length; otherwise padding and array bodies are sampled.
EXHAUSTIVE = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def meaningful(data: bytes) -> list[int]:
    """Offsets worth a flip or a cut: structures and the bytes around their edges, and samples of all others."""
    used = np.full(len(data), EXHAUSTIVE)
    used[:128] = True
    json_end = int.from_bytes(data[92:96], "little") + int.from_bytes(data[96:100], "little")
    used[128 : json_end + 2 : 3] = True
    for offset in record_offsets(data):
        header = RecordHeader.unpack(data[offset : offset + RECORD_BYTES])
        assert header is not None
        end = offset + RECORD_BYTES + header.payload_bytes
        used[offset - 2 : offset + RECORD_BYTES + 160] = True
        used[offset:end:11] = True
        used[end - 3 : end + 3] = True
    used[::61] = True
    used[-66:] = True
    return [int(offset) for offset in np.flatnonzero(used)]


def check_prefix(reader: Any, whole: list[Any]) -> None:
    for tensor, full in zip(everything(reader), whole):
        assert same(tensor, full[: reader.tokens])


def test_every_flip_is_noticed(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, whole = small
    path = tmp_path / "x.dqkv"
    path.write_bytes(data)
    with path.open("r+b", buffering=0) as file:
        for offset in meaningful(data):
            os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << offset % 8]), offset)
            try:
                with dqkv.open(path) as reader:
                    assert list(reader.verify()), f"the flip at byte {offset} went unnoticed"
                    # A damaged index costs no token; damage elsewhere is refused where it is read.
                    assert reader.tokens == TOKENS or reader.torn
                    check_prefix(reader, whole)
            except DQuantError as error:
                assert error.code and str(path) in str(error)
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
    assert path.read_bytes() == data


def test_every_length(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, whole = small
    path = tmp_path / "x.dqkv"
    path.write_bytes(data)
    header = int.from_bytes(data[12:16], "little")
    seen: set[int] = set()
    for length in reversed(meaningful(data)):
        os.truncate(path, length)
        if length < header:
            with pytest.raises(TruncatedError) as caught:
                dqkv.open(path)
            assert caught.value.code == "header-truncated"
            continue
        with dqkv.open(path) as reader:
            assert reader.torn
            if reader.tokens not in seen or length % 97 == 0:
                check_prefix(reader, whole)
                assert "log-torn" in [finding.code for finding in reader.verify()]
            seen.add(reader.tokens)
    assert seen == {0, 2, 34, 39, 43}


@given(data=st.data())
def test_flips_in_an_unclosed_file(
    small: tuple[bytes, list[Any]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Without an index the walk decides: never wrong tokens, and a break in the middle is an error."""
    whole_file, whole = small
    offsets = record_offsets(whole_file)
    cut = bytearray(whole_file[: offsets[-1]])
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.integers(offsets[0], len(cut) - 1))
        cut[offset] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("flips") / "x.dqkv"
    path.write_bytes(cut)
    with suppress(DQuantError), dqkv.open(path) as reader:
        assert reader.torn
        check_prefix(reader, whole)


@given(data=st.data())
def test_any_bytes_behind_a_whole_header(
    small: tuple[bytes, list[Any]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole_file, whole = small
    start = data.draw(st.sampled_from(record_offsets(whole_file)))
    path = tmp_path_factory.mktemp("garbage") / "x.dqkv"
    path.write_bytes(whole_file[:start] + data.draw(st.binary(max_size=9000)))
    with dqkv.open(path) as reader:
        assert reader.torn
        check_prefix(reader, whole)


def test_damaged_header_between_whole_records_is_no_torn_tail(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, whole = small
    offsets = record_offsets(data)
    path = tmp_path / "x.dqkv"
    broken = data[: offsets[1] + 9] + b"\xff" + data[offsets[1] + 10 :]
    path.write_bytes(broken[: offsets[-1]])
    with pytest.raises(ChecksumError) as caught:
        dqkv.open(path)
    assert caught.value.code == "record-header" and caught.value.where["offset"] == offsets[1]
    # The index still knows the record, so nothing is lost; verification tells.
    path.write_bytes(broken)
    with dqkv.open(path) as reader:
        check_prefix(reader, whole)
        assert "record-header" in [finding.code for finding in reader.verify()]


def test_a_last_record_that_is_not_whole_is_left_out(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    """Its header came to the medium, a part of its table or of what follows did not."""
    data, whole = small
    offsets = record_offsets(data)
    path = tmp_path / "x.dqkv"
    for number, (start, end) in enumerate(zip(offsets, offsets[1:])):
        for at in (start + RECORD_BYTES, start + RECORD_BYTES + 64):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 : end])
            with dqkv.open(path) as reader:
                assert reader.torn and len(reader.log.records) == number and reader.log.end == start
                check_prefix(reader, whole)


def test_reserved_room_is_the_end_of_the_log(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, whole = small
    path = tmp_path / "x.dqkv"
    path.write_bytes(data[: record_offsets(data)[-1]] + bytes(10_000))
    with dqkv.open(path) as reader:
        assert reader.torn and reader.tokens == TOKENS
        check_prefix(reader, whole)


def test_records_of_another_file_are_not_ours(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, _ = small
    path = tmp_path / "x.dqkv"
    start = record_offsets(data)[0]
    with dqkv.create(path, LAYERS):  # another file id
        pass
    path.write_bytes(path.read_bytes()[:start] + data[start:])
    with dqkv.open(path) as reader:
        assert reader.torn and reader.tokens == 0


def test_reading_names_the_damaged_place(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, whole = small
    path = tmp_path / "x.dqkv"
    for offset in record_offsets(data):
        header = RecordHeader.unpack(data[offset : offset + RECORD_BYTES])
        assert header is not None
        if header.type not in (PAGES, ROWS):
            continue
        for at, codes in ((RECORD_BYTES, {"record-table"}), (RECORD_BYTES + 64, {"page-crc", "rows-crc"})):
            path.write_bytes(data[: offset + at] + bytes([data[offset + at] ^ 4]) + data[offset + at + 1 :])
            place = 0 if header.type == PAGES or not header.flags else 1
            with dqkv.open(path) as reader:
                key = reader.layers[place].key
                with pytest.raises(ChecksumError) as caught:
                    key[header.first : header.end]
                assert caught.value.code in codes and caught.value.where["record"] == header.number
                assert str(path) in str(caught.value)
                # Everything before and behind is untouched.
                assert same(key[: header.first], whole[2 * place][: header.first])
                assert same(key[header.end :], whole[2 * place][header.end :])


def test_containers_are_checked_without_checksums(small: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    """A page rewritten with right checksums still fails on its coder's state, at the right token."""
    from file_support import edit_record

    from dquantcodec.file.structs import align, crc32c

    data, _ = small
    path = tmp_path / "x.dqkv"
    with dqkv.open(_written(path, data)) as reader:
        record = next(r for r in reader.log.records if r.header.type == PAGES)
        layout = reader.rules.run.slots[0].layout
        words = record.payload + 64 + layout.head_bytes + layout.value.words_at
    page = bytearray(data)
    lane = 9
    page[words + 2 * lane] ^= 1  # high half of the state of token 2 + 9, sub-stream 0
    start = record.payload + 64
    crc = crc32c(bytes(page[start : start + layout.page_bytes]))
    table = crc.to_bytes(4, "little").ljust(align(4), b"\0")
    page[record.payload : record.payload + 64] = table
    changed = edit_record(bytes(page), record.header.number, lambda f: f.update(table_crc=crc32c(table)))
    with dqkv.open(_written(path, changed)) as reader:
        with pytest.raises(ChecksumError) as caught:
            reader.layers[0].value[:]
        assert caught.value.code == "container-state"
        assert (caught.value.where["layer"], caught.value.where["token"]) == (0, 2 + lane)
        found = [finding for finding in reader.verify() if finding.code == "container-state"]
        assert [(f.where["token"], f.where["kind"], f.where["substream"]) for f in found] == [(2 + lane, "value", 0)]


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
