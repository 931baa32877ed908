"""Classes and groupings made to mislead, all checksums right: refused with their reason codes, and in little memory."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import SMALL, tensors, with_header_crc, write

import dquantcodec.file as dqkv
from dquantcodec import errors
from dquantcodec.file import Layer
from dquantcodec.file import structs as s
from dquantcodec.file.groupings import parse_classes, parse_groupings
from dquantcodec.grouping import Grouping, Levels, Table
from dquantcodec.plan import Plan, grouped, make_plan

THREE = Levels((4096, 8192, 4096), 256)
FIVE = Levels((1000, 3000, 8384, 3000, 1000), 300)
KEYS = Grouping(
    head_dim=8,
    classes=(THREE, FIVE),
    tables=(Table((0, 1), 8), Table((1, 0), 9), Table((0,), 8)),
    letters=(2, 2),
    fields=(2, 1),
    choice=np.array([[0, 2], [1, 2]], np.uint8),
    order=np.array([[8, 10, 12, 9, 11, 13], [5, 4, 3, 2, 1, 0]], np.uint16),
)
VALUES = replace(
    KEYS,
    classes=(FIVE,),
    tables=(Table((0,), 8),),
    letters=(3,),
    fields=(1,),
    choice=np.zeros((2, 1), np.uint8),
    order=np.array([[0, 1, 7], [15, 9, 8]], np.uint16),
)
#: Numbers of classes, and what a table of three letters looks like.
NONE = 0xFFFF


def plan() -> Plan:
    base = make_plan(SMALL, 2, 8)
    return replace(
        base,
        key=grouped(3, 2, True, 0.5, "least-squares", KEYS),
        value=grouped(2, 1, False, 0.75, "unbiased", VALUES),
        profile_name="crafted",
    )


LAYERS = [Layer(2, 8, "bfloat16", plan()), Layer(1, 3, "float32", storage="exact")]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "x.dqkv", LAYERS, tensors(LAYERS, 43), sinks=2, recent=4)


def refusal(path: Path, data: bytes) -> errors.DQuantError:
    """The error of opening ``data``, which must come without taking memory for what the file claims."""
    path.write_bytes(with_header_crc(data))
    open_file = dqkv.open  # what loads its modules stands before the counting
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


# --- Writing sections by hand ---------------------------------------------------------------------------------------


def padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // 8) * 8, b"\0")


def packed_class(most: int, gain: int, upper: Sequence[int], zero: int = 0) -> bytes:
    return padded(struct.pack(f"<BBH{len(upper)}H", most, zero, gain, *upper))


def packed_grouping(**changes: Any) -> bytes:
    """The entry of :data:`KEYS`, field by field, with changes."""
    f: dict[str, Any] = {
        "heads": 2, "dim": 8, "coded": 6, "groups": 2, "tables": None, "reserved": bytes(7),
        "table": [(8, 2, 0, 0, 1, NONE, NONE), (9, 2, 0, 1, 0, NONE, NONE), (8, 1, 0, 0, NONE, NONE, NONE)],
        "shapes": [2, 2, 2, 1], "head": [1, 0], "choice": [0, 2, 1, 2], "places": [0, 2, 4, 1, 3, 5, 5, 4, 3, 2, 1, 0],
        **changes,
    }  # fmt: skip
    count = len(f["table"]) if f["tables"] is None else f["tables"]
    data = struct.pack("<HHHHB7s", f["heads"], f["dim"], f["coded"], f["groups"], count, f["reserved"])
    data += b"".join(struct.pack("<BBH4H", *table) for table in f["table"])
    data += bytes(f["shapes"]) + struct.pack(f"<{len(f['head'])}H", *f["head"]) + bytes(f["choice"])
    form = "H" if f["dim"] > 256 else "B"
    return padded(data + struct.pack(f"<{len(f['places'])}{form}", *f["places"]))


def table(*numbers: int, precision: int = 8, fields: int | None = None, zero: int = 0) -> tuple[int, ...]:
    padding = [NONE] * (4 - len(numbers))
    return (precision, len(numbers) if fields is None else fields, zero, *numbers, *padding)


CLASSES = [packed_class(1, 256, [8192, 4096]), packed_class(2, 300, [8384, 3000, 1000])]


def rebuilt(data: bytes, classes: Sequence[bytes] | None = None, groupings: Sequence[bytes] | None = None) -> bytes:
    """The file with other classes and groupings, everything around them made to fit."""
    size, json_at, json_bytes = (int.from_bytes(data[at : at + 4], "little") for at in (12, 92, 96))
    classes_at, groupings_at = struct.unpack_from("<2I", data, 108)
    texts = [data[classes_at:groupings_at], data[groupings_at:json_at]]
    counts = list(struct.unpack_from("<2I", data, 100))
    for place, entries in enumerate((classes, groupings)):
        if entries is not None:
            texts[place], counts[place] = b"".join(entries), len(entries)
    body = data[:classes_at] + b"".join(texts)
    groupings_at = classes_at + len(texts[0])
    block = bytearray(body + data[json_at : json_at + json_bytes])
    block = block.ljust(s.align(len(block), s.BLOCK), b"\0")
    block[12:16] = len(block).to_bytes(4, "little")
    block[92:96] = len(body).to_bytes(4, "little")
    block[100:116] = struct.pack("<4I", *counts, classes_at, groupings_at)
    return bytes(block) + data[size:]


def with_groupings(**changes: Any) -> Callable[[bytes], bytes]:
    """The keys' grouping changed; the values' stays."""

    def change(data: bytes) -> bytes:
        at = struct.unpack_from("<I", data, 112)[0]
        end = int.from_bytes(data[92:96], "little")
        second = data[at:end][len(packed_grouping()) :]
        return rebuilt(data, groupings=[packed_grouping(**changes), second])

    return change


def with_class(number: int, entry: bytes) -> Callable[[bytes], bytes]:
    return lambda data: rebuilt(data, classes=[entry if i == number else c for i, c in enumerate(CLASSES)])


def stream(field: int, form: str, *values: Any, kind: int = 0) -> Callable[[bytes], bytes]:
    at = 128 + 64 * (1 + kind) + field
    return lambda data: data[:at] + struct.pack("<" + form, *values) + data[at + struct.calcsize("<" + form) :]


def test_the_sections_are_as_written_by_hand(good: bytes, tmp_path: Path) -> None:
    at, end = struct.unpack_from("<2I", good, 108)
    assert good[at:end] == b"".join(CLASSES)
    assert good[end : end + len(packed_grouping())] == packed_grouping()
    assert rebuilt(good) == good and rebuilt(good, classes=CLASSES) == good
    assert with_groupings()(good) == good
    assert struct.unpack_from("<2I", good, 100) == (2, 2)
    (tmp_path / "x.dqkv").write_bytes(good)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        read, mine = reader.layers[0].plan, plan()
        assert read is not None
        for kind in ("key", "value"):
            a, b = getattr(read, kind), getattr(mine, kind)
            assert a.grouping is not None
            for field, value in b.grouping.__dict__.items():
                got = getattr(a.grouping, field)
                assert np.array_equal(got, value) if isinstance(value, np.ndarray) else got == value
            own = [{k: v for k, v in x.__dict__.items() if k not in ("grouping", "frequencies")} for x in (a, b)]
            assert own[0] == own[1]
        assert list(reader.verify()) == []


BIG = 0xFFFF
REFUSED: list[tuple[str, type[errors.DQuantError], Callable[[bytes], bytes]]] = [
    ("class-weights", errors.FormatError, with_class(0, packed_class(1, 256, [16384, 0]))),
    ("class-weights", errors.FormatError, with_class(0, packed_class(1, 256, [8192, 4095]))),
    ("class-weights", errors.FormatError, with_class(0, packed_class(1, 256, [4096, 6144]))),
    ("class-weights", errors.FormatError, with_class(0, packed_class(0, 256, [16384, 0]))),
    ("class-weights", errors.FormatError, with_class(0, packed_class(1, 256, [0, 8192]))),
    ("class-weights", errors.FormatError, with_class(0, packed_class(1, 256, [0xFFFF, 0xFFFF]))),
    ("class-weights", errors.FormatError, with_class(1, packed_class(128, 256, [16128] + [1] * 128))),
    ("class-weights", errors.FormatError, with_class(1, packed_class(255, 256, [15874] + [1] * 255))),
    ("class-gain", errors.FormatError, with_class(0, packed_class(1, 0, [8192, 4096]))),
    ("class-gain", errors.FormatError, with_class(0, packed_class(1, 1024, [8192, 4096]))),
    ("header-reserved", errors.FormatError, with_class(0, packed_class(1, 256, [8192, 4096], zero=1))),
    ("header-reserved", errors.FormatError, with_class(1, CLASSES[1][:-1] + b"\1")),
    # The first grouping read as a class.
    ("class-weights", errors.FormatError, lambda data: rebuilt(data, classes=[CLASSES[0], b""])),
    ("grouping-table", errors.FormatError, lambda data: rebuilt(data, classes=CLASSES[:1])),
    ("grouping-table", errors.FormatError, lambda data: rebuilt(data, classes=[])),
    ("limit-grouping", errors.LimitError, with_groupings(heads=0)),
    ("limit-grouping", errors.LimitError, with_groupings(heads=1025)),
    ("limit-grouping", errors.LimitError, with_groupings(heads=BIG)),
    ("limit-grouping", errors.LimitError, with_groupings(dim=0)),
    ("limit-grouping", errors.LimitError, with_groupings(dim=1025)),
    ("limit-grouping", errors.LimitError, with_groupings(coded=0)),
    ("limit-grouping", errors.LimitError, with_groupings(coded=9)),
    ("limit-grouping", errors.LimitError, with_groupings(groups=513)),
    ("limit-grouping", errors.LimitError, with_groupings(groups=BIG)),
    ("limit-grouping", errors.LimitError, with_groupings(tables=17)),
    ("limit-grouping", errors.LimitError, with_groupings(tables=255)),
    ("header-coverage", errors.FormatError, with_groupings(heads=1024, groups=512)),
    ("grouping-classes", errors.FormatError, with_groupings(table=[], shapes=[6, 1], groups=1, choice=[0, 0])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 2), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, NONE), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, fields=1), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, fields=5), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, fields=255), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, fields=0), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, zero=1), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, precision=7), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, precision=15), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, precision=0), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(table=[table(0, 1, precision=255), table(1, 0), table(0)])),
    # 5**4 letters in 2**8 slots.
    ("grouping-table", errors.FormatError, with_groupings(table=[table(1, 1, 1, 1), table(1, 0), table(0)])),
    ("grouping-table", errors.FormatError, with_groupings(choice=[3, 2, 1, 2])),
    ("grouping-table", errors.FormatError, with_groupings(choice=[255, 2, 1, 2])),
    ("grouping-table", errors.FormatError, with_groupings(choice=[2, 2, 1, 2])),
    ("grouping-shape", errors.FormatError, with_groupings(groups=0, shapes=[], choice=[])),
    (
        "grouping-shape",
        errors.FormatError,
        with_groupings(shapes=[2, 2, 0, 1], coded=4, places=[0, 2, 1, 3, 3, 2, 1, 0]),
    ),
    (
        "grouping-shape",
        errors.FormatError,
        with_groupings(shapes=[2, 2, 2, 0], coded=4, places=[0, 2, 1, 3, 3, 2, 1, 0]),
    ),
    ("grouping-shape", errors.FormatError, with_groupings(shapes=[9, 2, 2, 1])),
    ("grouping-shape", errors.FormatError, with_groupings(shapes=[2, 5, 2, 1])),
    ("grouping-shape", errors.FormatError, with_groupings(shapes=[255, 255, 255, 255])),
    ("grouping-shape", errors.FormatError, with_groupings(shapes=[2, 2, 3, 1])),
    ("grouping-shape", errors.FormatError, with_groupings(shapes=[1, 2, 2, 1])),
    ("grouping-order", errors.FormatError, with_groupings(head=[2, 0])),
    ("grouping-order", errors.FormatError, with_groupings(head=[BIG, 0])),
    ("grouping-order", errors.FormatError, with_groupings(head=[0, 0])),
    ("grouping-order", errors.FormatError, with_groupings(places=[8, 2, 4, 1, 3, 5, 5, 4, 3, 2, 1, 0])),
    ("grouping-order", errors.FormatError, with_groupings(places=[255, 2, 4, 1, 3, 5, 5, 4, 3, 2, 1, 0])),
    ("grouping-order", errors.FormatError, with_groupings(places=[2, 2, 4, 1, 3, 5, 5, 4, 3, 2, 1, 0])),
    ("header-reserved", errors.FormatError, with_groupings(reserved=b"\0\0\0\0\0\0\1")),
    ("header-reserved", errors.FormatError, lambda data: rebuilt(data, groupings=padding_set(data))),
    ("profile-grouping", errors.FormatError, lambda data: rebuilt(data, groupings=[packed_grouping()])),
    ("profile-grouping", errors.FormatError, lambda data: rebuilt(data, groupings=[])),
    ("profile-grouping", errors.FormatError, stream(26, "H", 2)),
    ("profile-grouping", errors.FormatError, stream(26, "H", BIG)),
    ("profile-grouping", errors.FormatError, stream(0, "B", 1)),
    ("profile-grouping", errors.FormatError, stream(2, "B", 0)),
    ("profile-grouping", errors.FormatError, stream(3, "B", 1)),
    ("profile-grouping", errors.FormatError, stream(4, "B", 3)),
    ("profile-grouping", errors.FormatError, stream(5, "B", 8)),
    ("profile-grouping", errors.FormatError, stream(10, "H", 1)),
    ("profile-grouping", errors.FormatError, stream(16, "d", 0.0)),
    ("profile-grouping", errors.FormatError, stream(16, "d", -1.0)),
    ("profile-grouping", errors.FormatError, stream(16, "d", 64.1)),
    ("profile-grouping", errors.FormatError, stream(16, "d", float("nan"))),
    ("profile-grouping", errors.FormatError, stream(16, "d", float("inf"))),
    ("profile-grouping", errors.FormatError, with_groupings(heads=1, head=[0], choice=[0, 2], places=range(6))),
    ("profile-grouping", errors.FormatError, with_groupings(dim=9)),
    ("profile-levels", errors.LimitError, stream(12, "BBHd", 1, 0, 0, 0.5)),
    ("profile-gain", errors.UnsupportedError, stream(24, "B", 2)),
    ("profile-words", errors.LimitError, stream(8, "H", 1)),
    ("profile-substreams", errors.LimitError, stream(6, "B", 3)),
    ("profile-heads", errors.FormatError, stream(6, "B", 4)),
    ("profile-escape", errors.UnsupportedError, stream(28, "B", 1)),
    ("header-reserved", errors.FormatError, stream(32, "B", 1)),
    ("header-reserved", errors.FormatError, stream(63, "B", 1, kind=1)),
]


def padding_set(data: bytes) -> list[bytes]:
    at, end = struct.unpack_from("<I", data, 112)[0], int.from_bytes(data[92:96], "little")
    first = packed_grouping()
    return [first[:-1] + b"\1", data[at:end][len(first) :]]


@pytest.mark.parametrize(("code", "error", "change"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_headers(
    good: bytes, tmp_path: Path, code: str, error: type[errors.DQuantError], change: Callable[[bytes], bytes]
) -> None:
    data = change(good)
    assert data != good
    caught = refusal(tmp_path / "x.dqkv", data)
    assert (caught.code, type(caught)) == (code, error), str(caught)


def test_nothing_is_read_beyond_the_block(good: bytes, tmp_path: Path) -> None:
    """As many classes as fill the block, the last of which claims 128 frequencies."""
    classes_at = struct.unpack_from("<I", good, 108)[0]
    many = [CLASSES[0]] * ((4096 - classes_at) // 8 - 1) + [struct.pack("<BBHHH", 127, 0, 256, 8192, 4096)]
    data = rebuilt(good, classes=many, groupings=[])
    data = data[:12] + struct.pack("<I", 4096) + data[16:96] + struct.pack("<I", 0) + data[100:4096]
    caught = refusal(tmp_path / "x.dqkv", data)
    assert caught.code == "header-coverage" and f"class {len(many) - 1}" in str(caught)


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 7])
def test_entries_end_within_their_section(cut: int) -> None:
    with pytest.raises(errors.FormatError) as caught:
        parse_classes(bytes(16) + CLASSES[0], 16, 1, 16 + cut)
    assert caught.value.code == "header-coverage"


def test_every_truncation_of_a_grouping_is_told() -> None:
    entry = packed_grouping()
    classes = [THREE, FIVE]
    found, end = parse_groupings(bytes(8) + entry, 8, 1, 8 + len(entry), classes)
    assert end == 8 + len(entry) and found[0].coded == 6
    for cut in range(len(entry)):
        with pytest.raises(errors.FormatError) as caught:
            parse_groupings(bytes(8) + entry, 8, 1, 8 + cut, classes)
        assert caught.value.code == "header-coverage"


def test_files_cut_within_their_header_are_truncated(good: bytes, tmp_path: Path) -> None:
    for size in (127, 128, 400, struct.unpack_from("<I", good, 112)[0] + 5, 4095):
        (tmp_path / "x.dqkv").write_bytes(good[:size])
        with pytest.raises(errors.TruncatedError) as caught:
            dqkv.open(tmp_path / "x.dqkv")
        assert caught.value.code == "header-truncated"


def test_wide_heads_have_two_bytes_a_channel() -> None:
    places = list(range(295, 301)) + list(range(6))
    found, _ = parse_groupings(packed_grouping(dim=301, places=places), 0, 1, 4096, [THREE, FIVE])
    assert found[0].order.tolist() == [[301 + p for p in places[:6]], places[6:]]
    with pytest.raises(errors.FormatError) as caught:
        parse_groupings(packed_grouping(dim=300, places=[300, *places[1:]]), 0, 1, 4096, [THREE, FIVE])
    assert caught.value.code == "grouping-order"
    # A grouping of more values than a stream may have names channels that no u16 holds.
    with pytest.raises(errors.DQuantError) as refused:
        heads = 1024
        parse_groupings(
            packed_grouping(
                heads=heads, dim=1024, coded=6, head=range(heads), choice=[0, 2] * heads, places=[*range(6)] * heads
            ),
            0, 1, 1 << 20, [THREE, FIVE],
        )  # fmt: skip
    assert refused.value.code in ("grouping-order", "limit-grouping")


def test_any_single_byte_of_the_sections_is_safe(good: bytes, tmp_path: Path) -> None:
    """Whatever a byte becomes, opening either refuses with a code or gives a plan whose pages decode or are told."""
    classes_at = struct.unpack_from("<I", good, 108)[0]
    end = int.from_bytes(good[92:96], "little")
    rng = np.random.default_rng(0)
    path = tmp_path / "x.dqkv"
    opened = 0
    for at in range(classes_at, end):
        for value in {0, 255, int(rng.integers(256))} - {good[at]}:
            path.write_bytes(with_header_crc(good[:at] + bytes([value]) + good[at + 1 :]))
            try:
                with dqkv.open(path) as reader:
                    opened += 1
                    reader.layers[0].key[:]
                    reader.layers[0].value[:]
            except errors.DQuantError as error:
                assert error.code
    assert opened
