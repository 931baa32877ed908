"""Damaged files read in mode ``salvage``: what is whole comes back, what is lost is named, nothing else is returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import SMALL, part, record_offsets, same, tensors

import dquantcodec.file as dqkv
from dquantcodec.errors import ChecksumError, FormatError
from dquantcodec.file import Layer, append, create, repack
from dquantcodec.file.structs import RECORD_BYTES, RecordHeader

LAYERS = [Layer(8, 16, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact")]
PAIRS = tensors(LAYERS, 200)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Any]]:
    """Pages written at once, then flushed rows with pages over them, then a rewind; and what its layers read as.

    Records of pages are longer than 4096 bytes.
    """
    path = tmp_path_factory.mktemp("whole") / "x.dqkv"
    with create(path, LAYERS, recent=2, sinks=1, _record_target=1 << 14) as writer:
        writer.append(*part(PAIRS, 0, 99))
    with append(path, _record_target=1 << 13) as writer:
        for start in range(99, 180, 9):
            writer.append(*part(PAIRS, start, start + 9))
            writer.flush()
        writer.rewind(178)
    with dqkv.open(path) as reader:
        assert reader.tokens == 178
        return path.read_bytes(), everything(reader)


def everything(reader: Any) -> list[Any]:
    return [tensor[:] for layer in reader.layers for tensor in (layer.key, layer.value)]


def rescued(path: Path, data: bytes) -> tuple[int, list[Any], list[str]]:
    """Tokens, what they read as, and reason codes, of what is salvaged from ``data``; the copy must be sound."""
    path.write_bytes(data)
    with dqkv.open(path, mode="salvage") as reader:
        found = everything(reader)
        repack(reader, path.with_name("out.dqkv"))
        codes = [finding.code for finding in reader.lost]
        tokens = reader.tokens
    with dqkv.open(path.with_name("out.dqkv"), mode="strict") as reader:
        assert list(reader.verify()) == [] and reader.tokens == tokens
        assert all(map(same, everything(reader), found))
    return tokens, found, codes


def numbers(data: bytes, kind: str) -> list[int]:
    headers = [RecordHeader.unpack(data[offset : offset + RECORD_BYTES]) for offset in record_offsets(data)]
    return [header.number for header in headers if header and header.type_name == kind]


def without_index(data: bytes) -> bytes:
    return data[: record_offsets(data)[-1]]


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def test_a_sound_file_is_rescued_whole(whole: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, content = whole
    for given in (data, without_index(data)):
        tokens, found, codes = rescued(tmp_path / "x.dqkv", given)
        assert tokens == 178 and codes == [] and all(map(same, found, content))


def test_every_record_damaged_in_header_or_payload(whole: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    """A prefix of the tokens comes back: as they were, or exact where pages over exact rows are damaged."""
    data, content = whole
    exact = [np.asarray(array) for pair in PAIRS for array in pair]
    lengths = set()
    for given in (data, without_index(data)):
        for number, offset in enumerate(record_offsets(given)):
            for at in (offset + 9, offset + RECORD_BYTES, offset + RECORD_BYTES + 70):
                tokens, found, codes = rescued(tmp_path / "x.dqkv", damaged(given, at))
                assert codes or tokens >= 178
                lengths.add(tokens)
                # Only a rewind that ends an unclosed file can be lost unnoticed: it looks like one never finished.
                torn_rewind = given is not data and number == numbers(data, "REWIND")[0]
                assert tokens <= (180 if torn_rewind else 178)
                for mine, was, rows in zip(found, content, exact):
                    assert all(a.tobytes() in (b.tobytes(), c.tobytes()) for a, b, c in zip(mine, was, rows))
    assert len(lengths) > 4


def test_pages_over_rows_fall_back_to_the_rows(whole: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, content = whole
    pages = numbers(data, "PAGES")[-1]
    offset = record_offsets(data)[pages]
    header = RecordHeader.unpack(data[offset : offset + RECORD_BYTES])
    assert header
    tokens, found, codes = rescued(tmp_path / "x.dqkv", damaged(data, offset + RECORD_BYTES + 100))
    assert tokens == 178 and codes == ["page-crc"]
    for mine, was, rows in zip(found[:2], content, PAIRS[0]):
        assert same(mine[header.first : header.end], np.asarray(rows)[header.first : header.end])
        assert same(mine[: header.first], was[: header.first]) and same(mine[header.end :], was[header.end :])
    with dqkv.open(tmp_path / "x.dqkv") as reader, pytest.raises(ChecksumError):
        reader.layers[0].key[:]


def test_a_lost_header_is_passed_over_only_if_it_was_no_rewind(whole: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    data, _ = whole
    data = without_index(data)
    offsets = [*record_offsets(data), len(data)]
    behind = {}
    for number in range(1, len(offsets) - 2):
        (tmp_path / "x.dqkv").write_bytes(damaged(data, offsets[number] + 9))
        with pytest.raises(ChecksumError):
            dqkv.open(tmp_path / "x.dqkv")
        with dqkv.open(tmp_path / "x.dqkv", mode="salvage") as reader:
            assert reader.torn and reader.lost[0].code == "record-header"
            behind[offsets[number + 1] - offsets[number]] = len(reader.log.records) - number
    assert behind.pop(4096) == 0 and behind and all(count > 0 for count in behind.values())


def test_records_that_contradict_one_another(whole: tuple[bytes, list[Any]], tmp_path: Path) -> None:
    """Valid headers that no writer wrote: what came before them is all that is believed."""
    data = without_index(whole[0])
    offset = record_offsets(data)[numbers(data, "ROWS")[-2]]
    header = RecordHeader.unpack(data[offset : offset + RECORD_BYTES])
    assert header
    wrong = RecordHeader(**{**header.__dict__, "first": header.first - 1}).pack()
    path = tmp_path / "x.dqkv"
    path.write_bytes(data[:offset] + wrong + data[offset + RECORD_BYTES :])
    with pytest.raises(FormatError):
        dqkv.open(path)
    with dqkv.open(path, mode="salvage") as reader:
        assert reader.lost[-1].code in ("coverage-tokens", "coverage-order", "tokens-lost")
        assert 0 < reader.tokens <= header.first
