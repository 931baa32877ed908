"""What happens to files seldom or never: races, full disks, counters at their end, indexes that contradict the log."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from file_support import SMALL, edit_record, part, record_offsets, tensors, write

import dquantcodec.file as dqkv
from dquantcodec.errors import ChecksumError, DQuantError, FormatError, InputError, LimitError
from dquantcodec.file import Layer, append, create, groupings, header, plans, recordlog, repack, rows, scan
from dquantcodec.file import structs as s
from dquantcodec.file.disk import DiskFile
from dquantcodec.file.info import Info
from dquantcodec.file.resharding import reshard
from dquantcodec.file.scan import read_log, walk
from dquantcodec.page import cut_page
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import make_plan
from dquantcodec.testing.files import cut_rows, file_bytes, layers_of, reader_of, rows_of
from dquantcodec.testing.plans import small_plan

EXACT = [Layer(2, 3, "float32", storage="exact"), Layer(4, 3, storage="absent")]


def exact_file(path: Path, tokens: int = 9) -> bytes:
    return write(path, EXACT, tensors(EXACT, tokens), cuts=range(2, tokens, 2), recent=0, sinks=0)


def flushed(path: Path, times: int = 4) -> bytes:
    """A file of exact rows with a record for every flush, and its INDEX."""
    with create(path, EXACT) as writer:
        for seed in range(times):
            writer.append(*part(tensors(EXACT, 2, seed), 0, 2))
            writer.flush()
    return path.read_bytes()


def indexed_as(data: bytes, headers: list[bytes]) -> bytes:
    """``data`` with an INDEX of right checksums that lists ``headers``."""
    at = record_offsets(data)[-1]
    return data[:at] + s.index_record(at, headers, data[32:40])


def test_an_index_that_contradicts_the_log_is_not_used(tmp_path: Path) -> None:
    data = flushed(tmp_path / "x.dqkv")
    headers = [data[at : at + 64] for at in record_offsets(data)[:-1]]
    garbled = indexed_as(data, [headers[0], bytes(64), *headers[2:]])
    reader = reader_of(garbled)
    assert not reader.indexed and reader.tokens == 8
    assert [finding.code for finding in reader.verify()] == ["index-mismatch"]
    # One record fewer, and the INDEX numbered as if there were one fewer.
    with pytest.raises(FormatError) as caught:
        reader_of(indexed_as(data, headers[:-1]))
    assert caught.value.code == "record-number"


def test_a_record_finished_between_two_looks_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = flushed(tmp_path / "x.dqkv")
    reader = reader_of(data)
    late = record_offsets(data)[1]
    looks = []
    own_record = scan.own_record

    def looked(data: Any, rules: Any, offset: int) -> Any:
        looks.append(offset)
        return None if offset == late and looks.count(late) == 1 else own_record(data, rules, offset)

    monkeypatch.setattr(scan, "own_record", looked)
    assert walk(reader.data, reader.rules) == replace(reader.log, indexed=False)


def test_records_are_searched_for_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a lost header an older record's number says nothing, and a later one may be portions away."""
    data = bytearray(flushed(tmp_path / "x.dqkv"))
    offsets = record_offsets(bytes(data))
    rules = reader_of(bytes(data)).rules
    data[offsets[2] : offsets[2] + 64] = data[offsets[0] : offsets[0] + 64]
    data[offsets[1]] ^= 1
    monkeypatch.setattr(scan, "SEARCH_BYTES", s.BLOCK)
    found = [r.header.number for r in scan.later_records(memoryview(bytes(data)), rules, offsets[1], 1)]
    assert found == [3, 4]
    with pytest.raises(ChecksumError) as caught:
        read_log(memoryview(bytes(data[: offsets[-1]])), rules)
    assert caught.value.code == "record-header" and caught.value.where["offset"] == offsets[1]


def test_salvage_ends_at_a_record_that_breaks_a_rule_or_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    data = flushed(path)
    for change, lost in (({"reserved": 1}, ["record-reserved"]), ({"payload_bytes": 1 << 30}, [])):
        path.write_bytes(edit_record(data, 2, lambda fields, change=change: fields.update(change)))
        with dqkv.open(path, mode="salvage") as reader:
            assert reader.tokens == 4 and [finding.code for finding in reader.lost] == lost


def test_a_rewind_to_a_token_not_reached_is_refused(tmp_path: Path) -> None:
    rewind = {"type": s.REWIND, "first": 99, "tokens": 0, "payload_bytes": 0, "table_crc": 0}
    with pytest.raises(FormatError) as caught:
        reader_of(edit_record(flushed(tmp_path / "x.dqkv"), 3, lambda fields: fields.update(rewind)))
    assert caught.value.code == "coverage-tokens"


def test_what_a_crash_left_behind_the_log_is_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    data = flushed(path)
    path.write_bytes(data[: record_offsets(data)[-1]] + b"\xff" * 50_000)
    append(path).close()
    with dqkv.open(path, mode="strict") as reader:
        assert [record.header.type_name for record in reader.log.records][-2:] == ["FILL", "INDEX"]
        assert reader.tokens == 8 and not list(reader.verify())


def test_layers_that_a_crash_left_uneven_are_made_even(tmp_path: Path) -> None:
    """Pages were written, and the exact layers' rows of the same tokens were not."""
    path = tmp_path / "x.dqkv"
    data = file_bytes(["rotated", "exact"], 80, sinks=2, recent=5)
    records = reader_of(data).log.records
    last = next(record for record in records if record.header.flags == s.EXACT_ONLY)
    path.write_bytes(data[: last.offset])
    append(path).close()
    with dqkv.open(path, mode="strict") as reader:
        assert reader.tokens == last.header.first and not list(reader.verify())
        assert "REWIND" in [record.header.type_name for record in reader.log.records]


def test_a_file_may_be_opened_so_often_and_no_oftener(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    data = flushed(path)
    path.write_bytes(edit_record(data, 3, lambda fields: fields.update(epoch=(1 << 32) - 1)))
    before = path.read_bytes()
    with pytest.raises(LimitError) as caught:
        append(path)
    assert caught.value.code == "limit-epoch" and path.read_bytes() == before
    path.rename(tmp_path / "y.dqkv")  # nobody holds it any more, on systems where that matters


def test_a_file_that_lost_its_name_while_it_was_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.dqkv"
    data = flushed(path)
    (tmp_path / "y.dqkv").write_bytes(data)
    lock = DiskFile.lock

    def replaced(disk: DiskFile, place: Path) -> None:
        lock(disk, place)
        (tmp_path / "y.dqkv").replace(place)

    monkeypatch.setattr(DiskFile, "lock", replaced)
    with pytest.raises(InputError) as caught:
        append(path)
    assert caught.value.code == "file-replaced" and path.read_bytes() == data


def test_the_index_bounds_the_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.dqkv"
    monkeypatch.setattr(recordlog, "MAX_INDEX", 64 * 6)
    with pytest.raises(LimitError) as caught:
        flushed(path)
    assert caught.value.code == "limit-index"
    with dqkv.open(path) as reader:
        assert reader.tokens == 6 and not list(reader.verify())


def test_a_disk_that_takes_no_byte_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a writer, a copy and a part, each of which names its file and leaves none behind."""
    source = tmp_path / "x.dqkv"
    exact_file(source)
    monkeypatch.setattr(DiskFile, "write", lambda disk, offset, data: 0)
    with dqkv.open(source) as reader:
        for work in (
            lambda path: create(path, EXACT),
            lambda path: repack(reader, path),
            lambda path: reshard([reader], [path]),
        ):
            with pytest.raises(OSError) as caught:
                work(tmp_path / "new.dqkv")
            assert caught.value.errno == errno.EIO and caught.value.filename == str(tmp_path / "new.dqkv")
            assert [path.name for path in tmp_path.iterdir()] == ["x.dqkv"]


@pytest.mark.parametrize("most", [1, 700, 1 << 40], ids=str)
def test_a_disk_that_takes_less_gets_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Bytes at a time, and on systems that take one buffer a call."""
    whole = DiskFile.write

    def some(disk: DiskFile, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        return whole(disk, offset, buffers if most > 1 << 20 else [b"".join(buffers)[:most]])

    monkeypatch.setattr(DiskFile, "write", some)
    monkeypatch.delattr(os, "pwritev", raising=False)
    # A flush writes a record before its header, so not all goes on where the last write ended.
    reader = reader_of(flushed(tmp_path / "x.dqkv", 3))
    assert reader.indexed and not list(reader.verify())
    given = zip(*(tensors(EXACT, 2, seed)[0] for seed in range(3)))
    assert [rows.tobytes() for rows in reader.layers[0].exact_rows()] == [
        np.concatenate(rows).tobytes() for rows in given
    ]


def test_copies_of_exact_caches_tell_their_progress_and_refuse_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    data = bytearray(exact_file(path))
    told: list[int] = []
    with dqkv.open(path) as reader:
        repack(reader, tmp_path / "a.dqkv", progress=told.append)
        reshard([reader], [tmp_path / "b0.dqkv", tmp_path / "b1.dqkv"], progress=told.append)
        whole = reader.layers[0].key[:]
    assert told == [9, 9]
    with dqkv.open(tmp_path / "a.dqkv") as reader:
        assert reader.layers[0].key[:].tobytes() == whole.tobytes()
    for rank in range(2):
        with dqkv.open(tmp_path / f"b{rank}.dqkv") as reader:
            assert reader.layers[0].key[:].tobytes() == whole[:, rank : rank + 1].tobytes()
    data[record_offsets(bytes(data))[0] + 128] ^= 1
    path.write_bytes(data)
    with dqkv.open(path) as reader, pytest.raises(ChecksumError):
        repack(reader, tmp_path / "c.dqkv")
    assert not (tmp_path / "c.dqkv").exists()
    with pytest.raises(InputError) as caught:
        reshard([], [])
    assert caught.value.code == "shard-files"


def test_too_few_tokens_are_coded_again_without_classes(tmp_path: Path) -> None:
    layers = [Layer(2, 8, "float32", replace(SMALL, substreams=1), head_groups=2)]
    write(tmp_path / "x.dqkv", layers, tensors(layers, 9), recent=0)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        (recoded,) = reshard([reader], [tmp_path / "y.dqkv"], head_groups=1, recode=True, profile=SMALL)
    assert recoded.value_nmse is not None and 0 < recoded.value_nmse < 1
    with dqkv.open(tmp_path / "y.dqkv") as reader:
        assert len(reader.layers[0].plans) == 1 and reader.layers[0].plan and reader.layers[0].plan.key.grouping is None


def test_head_groups_of_a_whole_file(tmp_path: Path) -> None:
    layers = [Layer(2, 8, "float32", replace(SMALL, substreams=1)), EXACT[0]]
    with create(tmp_path / "x.dqkv", layers, head_groups=2, lock=False) as writer:
        writer.flush()
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert [len(layer.plans) for layer in reader.layers] == [2, 0]


def test_bytes_of_a_layer_are_its_pages_and_blocks() -> None:
    reader = reader_of(file_bytes(["rotated", "exact"], 80, sinks=2, recent=5))
    accounting, rules = reader.accounting(), reader.rules
    blocks = sum(
        entry.place.size
        for record in reader.log.records
        if record.header.type == s.ROWS
        for entry in rules.rows_table(reader.data, record)
    )
    assert accounting.coded_tokens == 73 and accounting.coded_bytes > 0
    assert sum(layer.stored_bytes for layer in reader.layers) == accounting.coded_bytes + blocks
    reader.close()
    with pytest.raises(InputError) as caught:
        _ = reader.data
    assert caught.value.code == "reader-closed"


def test_headers_and_metadata_no_reader_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError) as caught:
        Info(metadata={"large": 10**500}).pack()
    assert caught.value.code == "info-json"
    with pytest.raises(InputError) as caught:
        Info(metadata=[1])  # type: ignore[arg-type]
    assert caught.value.code == "info-field"
    found = reader_of(file_bytes(["exact"], 1)).header
    monkeypatch.setattr(header, "MAX_HEADER", s.BLOCK - 1)
    with pytest.raises(LimitError) as limit:
        found.pack()
    assert limit.value.code == "limit-header"


@pytest.mark.parametrize("tokens", [1, 31, 32, 33])
def test_pages_are_cut_to_tokens(tokens: int) -> None:
    """Every byte of a token that stays is as it was, every other behind the head is zero."""
    plan = make_plan(replace(SMALL, window=64), 2, 8)
    layout = PageLayout.of(plan)
    page = np.full(layout.page_bytes, 255, np.uint8)
    cut_page(page, plan, tokens)
    assert (page[: layout.head_bytes] == 255).all() and not page[layout.bytes_for(tokens) :].any()
    of_a_token = sum(stream.container + 2 * stream.affine for stream in (plan.key, plan.value))
    assert np.count_nonzero(page[layout.head_bytes :]) == tokens * of_a_token


def test_files_cut_within_their_header_or_a_record_header(tmp_path: Path) -> None:
    path = tmp_path / "x.dqkv"
    data = flushed(path)
    for length in (0, 50):
        path.write_bytes(data[:length])
        with pytest.raises(DQuantError) as caught:
            dqkv.open(path)
        assert caught.value.code == "header-truncated"
    reader = reader_of(data[: record_offsets(data)[2] + 10])
    assert reader.torn and reader.tokens == 4


def test_a_header_holds_so_many_tables_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reader_of(file_bytes(["rotated", "grouped"], 0)).header
    for module, name, code in ((groupings, "MAX_FILE_CLASSES", "classes"), (plans, "MAX_TABLES", "tables")):
        with monkeypatch.context() as patch, pytest.raises(LimitError) as caught:
            patch.setattr(module, name, 1)
            found.pack()
        assert caught.value.code == f"limit-{code}"


def test_what_groupings_take() -> None:
    used = [stream.grouping for stream in (small_plan().key, small_plan().value) if stream.grouping]
    assert groupings.plan_bytes(small_plan()) == sum(map(len, groupings.pack_groupings(used)[1])) > 0


@pytest.mark.parametrize("parse", [plans.parse_tables, plans.parse_signs])
def test_entries_that_begin_at_the_end_of_the_header(parse: Any) -> None:
    with pytest.raises(FormatError) as caught:
        parse(bytes(16), 12, 1, 16)
    assert caught.value.code == "header-coverage"


def test_verification_tells_its_progress_and_finds_padding_and_long_indexes(tmp_path: Path) -> None:
    data = flushed(tmp_path / "x.dqkv")
    told: list[int] = []
    assert not list(reader_of(data).verify(told.append)) and sum(told) == len(data) - record_offsets(data)[0]
    *offsets, at = record_offsets(data)
    padded = data[: offsets[1] - 1] + b"\1" + data[offsets[1] :]
    assert [finding.code for finding in reader_of(padded).verify()] == ["padding-nonzero"]
    end = len(data) + s.BLOCK
    trailer = s.Trailer(at, end, data[32:40], 0, len(offsets)).pack()
    payload = data[at + 64 : -64] + bytes(s.BLOCK) + trailer
    index = s.RecordHeader(s.INDEX, len(payload), 0, 0, 0, len(offsets), data[32:40], s.crc32c(payload)).pack()
    assert [finding.code for finding in reader_of(data[:at] + index + payload).verify()] == ["index-mismatch"]


def test_rewinding_into_pages_that_are_not_written_yet(tmp_path: Path) -> None:
    layers = layers_of(["rotated"])
    taken = rows_of(layers, 80, 0)
    with create(tmp_path / "x.dqkv", layers, recent=0) as writer:
        writer.append(*cut_rows(taken, 0, 80))
        writer.rewind(40)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.tokens == reader.layers[0].key[:].shape[0] == 40 and not list(reader.verify())


def test_a_plane_shorter_than_its_frame_claims_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zstandard as it is refuses such a frame itself."""
    values = np.zeros((4, 5, 6), np.float32)
    encoding, block = rows.encode_rows(values)
    assert encoding == rows.PLANES

    class Short:
        def decompress(self, *_: Any, **__: Any) -> bytes:
            return b"\0"

    monkeypatch.setattr(zstandard, "ZstdDecompressor", Short)
    with pytest.raises(ChecksumError) as caught:
        rows.decode_rows(encoding, memoryview(block), values.shape, values.dtype)
    assert caught.value.code == "rows-frame"


@pytest.mark.parametrize("size", [0, 1, s._PIECE - 1, s._PIECE, s._PIECE + 1, 3 * s._PIECE + 5])
def test_checksums_of_views_and_arrays_are_those_of_bytes(size: int) -> None:
    array = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    for before in (0, 0xE3069283):
        want = s.crc32c(array.tobytes(), before)
        assert s.crc32c(memoryview(array), before) == s.crc32c(array, before) == want
