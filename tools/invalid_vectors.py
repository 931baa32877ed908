"""The invalid vectors: files that break one rule each, all checksums right unless a checksum is the rule."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from valid_vectors import coded, exact, with_json
from vector_files import FILE_ID, File, by_groups, grouping, levels_of, put, rotated, simple, stream, with_header_crc

from dquantcodec.file import Layer
from dquantcodec.file import structs as s
from dquantcodec.page_layout import PageLayout

#: Keys prefix, values rans: two letter tables.
PLAN = rotated(2, 6, stream(2, 6, "prefix"), stream(2, 6))
LAYERS = [coded(PLAN), exact(), Layer(1, 3, storage="absent")]
PROFILE, KEY, VALUE, LAYER = 128, 192, 256, 320
TABLES = LAYER + 32 * len(LAYERS)
TABLE_BYTES = 8 + 2 * 25 + 6
SIGNS = TABLES + 2 * TABLE_BYTES
GROUPED = by_groups(grouping(2, 9, [levels_of(1), levels_of(3)], [(0, 1), (1,)], [(2, 2), (4, 1)]))
TURNING = by_groups(grouping(2, 9, [levels_of(1, 256, True)], [(0, 0)], [(3, 2)], 4))


@dataclass(frozen=True)
class Invalid:
    """``at`` says where ``code`` shows: at ``open``, ``read`` or ``verify``."""

    name: str
    shows: str
    code: str
    data: bytes
    at: str = "open"


def invalid() -> Iterator[Invalid]:
    """All of them, in the order of the specification."""
    for part in (
        starts,
        counts,
        profiles,
        layers,
        tables,
        texts,
        classes,
        groupings,
        records,
        coverage,
        reading,
        verifying,
    ):
        yield from part()


def header_of(plan: Any = None) -> bytes:
    """A header block alone; what is refused in it needs no records."""
    return File(LAYERS if plan is None else [coded(plan)]).data


def changed(name: str, shows: str, code: str, at: int, form: str, *values: Any, data: bytes | None = None) -> Invalid:
    """Numbers of a header block written over, its checksum right."""
    data = header_of() if data is None else data
    return Invalid(name, shows, code, with_header_crc(put(data, at, form, *values)))


def starts() -> Iterator[Invalid]:
    whole = header_of()
    yield Invalid(
        "signature-newlines",
        "a signature whose CR LF became LF",
        "signature",
        put(whole, 0, "8s", b"\x89DQK\n\x1a\n\0"),
    )
    yield Invalid("signature-bit-7", "a signature without its top bit", "signature", put(whole, 0, "B", 0x09))
    yield Invalid("file-empty", "no bytes at all", "header-truncated", b"")
    yield Invalid("file-start", "a file that ends within the first 128 bytes", "header-truncated", whole[:100])
    yield Invalid("file-block", "a file that ends within its header block", "header-truncated", whole[:4000])
    yield changed("version-draft", "the draft 0.9", "version-major", 8, "HH", 0, 9)
    yield changed("version-major", "major version 2", "version-major", 8, "H", 2)
    yield changed("block-bytes-odd", "a header block of 4097 bytes", "header-length", 12, "I", 4097)
    yield changed("block-bytes-none", "a header block of no bytes", "header-length", 12, "I", 0)
    yield changed("block-bytes-huge", "a header block of nearly 4 GiB", "limit-header", 12, "I", 0xFFFFF000)
    yield changed("block-bytes-beyond", "a header block longer than the file", "header-truncated", 12, "I", 8 << 20)
    yield Invalid("header-crc", "a bit of the header block flipped", "header-crc", put(whole, 68, "B", 1))
    yield changed("feature-required", "required feature 63", "feature-required", 16, "Q", 1 << 63)
    yield changed("header-matrices", "a stored transform matrix", "header-matrices", 116, "I", 1)
    yield changed("header-reserved", "reserved bytes of the start that are not zero", "header-reserved", 120, "I", 1)
    yield changed("header-padding", "bytes behind the JSON that are not zero", "header-reserved", 4095, "B", 1)


def counts() -> Iterator[Invalid]:
    most = 0xFFFFFFFF
    for name, at, number in (
        ("layers", 48, most), ("layers", 48, 0), ("sequences", 52, most), ("sequences", 52, 0), ("profiles", 56, most),
        ("tables", 60, most), ("signs", 64, most), ("json", 96, most), ("classes", 100, most), ("groupings", 104, most),
    ):  # fmt: skip
        many = "none" if number == 0 else "many"
        yield changed(f"{name}-{many}", f"{number} {name}", f"limit-{name}", at, "I", number)
    yield changed("section-overlap", "layers that begin within the profiles", "header-coverage", 80, "I", LAYER - 32)
    yield changed("section-gap", "tables that begin behind a gap", "header-coverage", 84, "I", TABLES + 8)
    yield changed("section-beyond", "sign vectors that begin beyond the block", "header-coverage", 88, "I", most)
    yield changed("section-count", "more layers than there is room for", "header-coverage", 48, "I", 1024)
    yield changed("section-end", "JSON that ends beyond the block", "header-coverage", 96, "I", 60000)


def profiles() -> Iterator[Invalid]:
    yield changed("profile-geometry", "2^31 heads", "limit-geometry", PROFILE, "I", 1 << 31)
    yield changed("profile-values", "1024 heads of 1024 values", "limit-geometry", PROFILE, "II", 1024, 1024)
    yield changed("profile-window", "a window of 33 tokens", "profile-window", PROFILE + 8, "I", 33)
    yield changed("profile-reserved", "reserved bytes of a profile", "header-reserved", PROFILE + 63, "B", 1)
    yield changed("profile-name", "a name that is not UTF-8", "profile-name", PROFILE + 16, "B", 0xFF)
    for name, at, form, number, code in (
        ("coder", 0, "B", 3, ""), ("quantiser", 1, "B", 3, ""), ("grid", 2, "B", 2, ""), ("letter", 3, "B", 5, ""),
        ("levels", 4, "B", 65, ""), ("precision", 5, "B", 16, ""), ("substreams", 6, "B", 3, ""),
        ("mean", 7, "B", 2, ""),
        ("words", 8, "H", 1, ""), ("table", 10, "H", 9, ""), ("rotation", 12, "B", 2, ""),
        ("gain", 24, "B", 2, ""), ("escape", 28, "B", 1, ""), ("matrix", 30, "H", 1, ""), ("heads", 6, "B", 4, ""),
        ("reserved-13", 13, "B", 1, "header-reserved"), ("reserved-25", 25, "B", 1, "header-reserved"),
        ("reserved-29", 29, "B", 1, "header-reserved"), ("reserved-rest", 63, "B", 1, "header-reserved"),
        ("trellis-rotated", 1, "B", 1, "profile-grouping"), ("grouping-rotated", 26, "H", 1, "profile-grouping"),
        ("levels-even", 2, "B", 1, ""),
    ):  # fmt: skip
        data = put(header_of(), KEY + 4, "B", 6) if name == "levels-even" else None
        refused = code or ("profile-levels" if name == "levels-even" else f"profile-{name}")
        yield changed(f"kind-{name}", f"{name} of a kind: {number}", refused, KEY + at, form, number, data=data)
    yield changed("kind-step", "a scale-only grid without a step", "profile-step", KEY + 2, "B", 1)
    yield changed("kind-grid-step", "a step without a scale-only grid", "profile-grid", KEY + 16, "d", 0.5)
    yield changed("kind-prefix", "prefix with frequencies that are no powers of two", "profile-prefix", VALUE, "B", 2)
    yield changed(
        "kind-signs",
        "a sign vector that is not there",
        "profile-signs",
        KEY + 14,
        "H",
        7,
        data=put(header_of(), VALUE + 14, "H", 7),
    )
    yield changed(
        "kind-signs-differ", "different sign vectors for keys and values", "profile-rotation", KEY + 14, "H", 1
    )
    for name, at, form, number in (
        ("step", 16, "d", float("nan")), ("letter", 3, "B", 1), ("coder", 0, "B", 1), ("number", 26, "H", 3),
        ("quantiser", 1, "B", 1),
    ):  # fmt: skip
        yield changed(
            f"grouped-{name}",
            f"{name} of a grouped kind: {number}",
            "profile-grouping",
            KEY + at,
            form,
            number,
            data=header_of(GROUPED),
        )
    two = File([coded(PLAN), coded(simple(2, 6))]).data
    yield changed(
        "profile-windows", "profiles of different windows", "profile-window-differs", PROFILE + 8, "I", 64, data=two
    )


def layers() -> Iterator[Invalid]:
    yield changed("layer-storage", "storage 4", "layer-storage", LAYER, "B", 4)
    yield changed("layer-dtype", "dtype 4", "layer-dtype", LAYER + 1, "B", 4)
    yield changed("layer-profile", "a profile that is not there", "layer-profile", LAYER + 2, "H", 1)
    yield changed("layer-profile-exact", "an exact layer with a profile", "layer-profile", LAYER + 32 + 2, "H", 0)
    yield changed("layer-geometry", "a layer of another geometry than its profile", "layer-profile", LAYER + 4, "I", 3)
    yield changed("layer-groups-none", "a coded layer of no head groups", "layer-groups", LAYER + 16, "H", 0)
    yield changed("layer-groups-many", "more head groups than heads", "layer-groups", LAYER + 16, "H", 3)
    yield changed("layer-groups-exact", "an exact layer with a head group", "layer-groups", LAYER + 32 + 16, "H", 1)
    yield changed("layer-groups-profiles", "more head groups than profiles", "layer-profile", LAYER + 16, "H", 2)
    yield changed("layer-groups-limit", "9000 head groups", "limit-groups", LAYER + 16, "H", 9000)
    yield changed("layer-heads", "an exact layer of 2^32-1 heads", "limit-geometry", LAYER + 32 + 4, "I", 0xFFFFFFFF)
    yield changed("layer-number", "layer numbers that do not rise", "layer-number", LAYER + 32 + 12, "I", 0)
    yield changed("layer-reserved", "reserved bytes of a layer", "header-reserved", LAYER + 31, "B", 1)


def tables() -> Iterator[Invalid]:
    yield changed("table-letters", "a table of 2^32-1 letters", "limit-table", TABLES, "I", 0xFFFFFFFF)
    yield changed("table-precision", "a table of 16 bits", "limit-table", TABLES + 4, "I", 16)
    yield changed("table-beyond", "a table that ends beyond the block", "header-coverage", TABLES, "I", 4096)
    yield changed("table-zero", "a frequency of zero", "table-zero", TABLES + 8, "H", 0)
    yield changed("table-sum", "frequencies that do not sum to 2^p", "table-sum", TABLES + 8, "H", 9999)
    yield changed("table-padding", "padding of a table", "header-reserved", TABLES + 8 + 50, "B", 1)
    yield changed("signs-bits", "a sign vector of 2^32-1 bits", "limit-signs", SIGNS, "I", 0xFFFFFFFF)
    yield changed("signs-beyond", "a sign vector that ends beyond the block", "header-coverage", SIGNS, "I", 65536)
    yield changed("signs-unused", "unused bits of a sign vector", "header-reserved", SIGNS + 9, "B", 0x10)


def texts() -> Iterator[Invalid]:
    for name, text in (
        ("cut", "{"), ("empty", ""), ("array", "[]"), ("twice", '{"model":"a","model":"b"}'),
        ("nan", '{"metadata":{"a":NaN}}'),
        ("infinity", '{"metadata":{"a":1e999}}'), ("deep", '{"metadata":{"a":' + "[" * 15 + "]" * 15 + "}}"),
        ("digits", '{"metadata":{"a":' + "9" * 401 + "}}"), ("surrogate", '{"metadata":{"a":"\\ud800"}}'),
        ("type", '{"model":1}'),
        ("positions", '{"positions_start":-1}'), ("shard", '{"shard":[2,2]}'), ("bomb", "[" * 3000),
    ):  # fmt: skip
        yield Invalid(f"json-{name}", f"JSON {text[:40]}", "header-json", with_json(header_of(), text))
    data = with_json(header_of(), '{"model":"ab"}')
    at = data.index(b'"ab"') + 1
    yield Invalid("json-utf-8", "JSON that is not UTF-8", "header-json", with_header_crc(put(data, at, "B", 0xFF)))


def classes() -> Iterator[Invalid]:
    data = header_of(GROUPED)
    at = int.from_bytes(data[108:112], "little")
    for name, shows, code, offset, form, number in (
        ("sum", "frequencies that do not sum to 2^14", "class-weights", 4, "H", 5000),
        ("gain", "a gain of 0", "class-gain", 2, "H", 0),
        ("gain-large", "a gain of 1024", "class-gain", 2, "H", 1024),
        ("dependent", "dependent: 2", "header-reserved", 1, "B", 2),
    ):  # fmt: skip
        yield changed(f"class-{name}", shows, code, at + offset, form, number, data=data)
    yield changed("class-none", "no level but zero", "class-weights", at, "BBHHH", 0, 0, 256, 1 << 14, 0, data=data)
    yield changed("class-zero", "a frequency of zero", "class-weights", at + 4, "HH", 1 << 14, 0, data=data)
    yield changed(
        "class-peak", "a level more frequent than level 0", "class-weights", at + 4, "HH", 4096, 6144, data=data
    )
    turning = header_of(TURNING)
    at = int.from_bytes(turning[108:112], "little")
    yield changed(
        "class-second", "frequencies of quantiser 1 that do not sum", "class-weights", at + 8, "H", 1, data=turning
    )


def groupings() -> Iterator[Invalid]:
    data = header_of(GROUPED)
    at = int.from_bytes(data[112:116], "little")
    table, shapes = at + 16, at + 16 + 2 * 12
    heads, choice, channels = shapes + 4, shapes + 8, shapes + 12
    for name, shows, code, offset, form, *numbers in (
        ("quantiser", "quantiser 3", "profile-quantiser", at + 9, "B", 3),
        ("heads", "no heads", "limit-grouping", at, "H", 0),
        ("coded", "more coded channels than channels", "limit-grouping", at + 4, "H", 10),
        ("values", "1024 heads of 1024 values", "limit-grouping", at, "HH", 1024, 1024),
        ("tables", "17 tables", "limit-grouping", at + 8, "B", 17),
        ("groups", "65535 groups", "limit-grouping", at + 6, "H", 65535),
        ("beyond", "lists that end beyond the block", "header-coverage", at, "HHHH", 1024, 9, 9, 512),
        ("reserved", "reserved bytes", "header-reserved", at + 15, "B", 1),
        ("class", "a class that is not there", "grouping-table", table + 4, "H", 2),
        ("unused", "a class where none is used", "grouping-table", table + 10, "H", 0),
        ("fields", "a table of five fields", "grouping-table", table + 1, "B", 5),
        ("precision", "codes of 15 bits", "grouping-table", table, "B", 15),
        ("shape", "a group of nine letters", "grouping-shape", shapes, "B", 9),
        ("shape-sum", "groups that do not hold the coded channels", "grouping-shape", shapes, "B", 1),
        ("choice", "a table that is not there", "grouping-table", choice, "B", 2),
        ("choice-fields", "a table of another number of fields than the group", "grouping-table", choice, "B", 1),
        ("head", "a head that is not there", "grouping-order", heads, "H", 2),
        ("head-twice", "a head twice", "grouping-order", heads, "HH", 0, 0),
        ("channel", "a channel that is not there", "grouping-order", channels, "B", 9),
        ("channel-twice", "a channel twice", "grouping-order", channels, "BB", 1, 1),
    ):  # fmt: skip
        yield changed(f"grouping-{name}", shows, code, offset, form, *numbers, data=data)
    turning = header_of(TURNING)
    at = int.from_bytes(turning[112:116], "little")
    yield changed(
        "grouping-states", "dependent classes without a trellis", "grouping-states", at + 9, "B", 0, data=turning
    )


# --- Records --------------------------------------------------------------------------------------------------------


def usual() -> File:
    """ROWS, PAGES, ROWS of the exact layer, ROWS."""
    return File(LAYERS).rows(0, 2).pages(2, 32).rows(2, 32, exact_only=True).rows(34, 3)


def edited(file: File, place: int, /, **fields: Any) -> File:
    """The header of a record with other fields, its checksum right."""
    before = file.headers[place]
    head = s.RecordHeader.unpack(before)
    assert head is not None
    file.headers[place] = s.RecordHeader(**{**head.__dict__, **fields}).pack()
    file.data = file.data.replace(before, file.headers[place])
    return file


def records() -> Iterator[Invalid]:
    for name, shows, code, number, fields in (
        ("type", "an unknown type that must be understood", "record-type", 1, {"type": 4}),
        ("version", "version 2 of PAGES", "record-version", 1, {"version": 2}),
        ("flags-pages", "flags of PAGES", "record-flags", 1, {"flags": 1}),
        ("flags-rows", "an unknown flag of ROWS", "record-flags", 3, {"flags": 2}),
        ("reserved", "reserved bytes", "record-reserved", 1, {"reserved": 1}),
        ("number", "a number out of turn", "record-number", 1, {"number": 7}),
        ("sequence", "a sequence the file does not have", "record-sequence", 1, {"sequence": 1}),
        ("tokens", "ROWS of no tokens", "record-tokens", 0, {"tokens": 0}),
        ("token-limit", "tokens beyond 2^40", "limit-tokens", 1, {"first": 1 << 63}),
        ("run", "PAGES of 2^32-1 tokens", "limit-run", 1, {"tokens": 0xFFFFFFFF}),
        ("rows", "ROWS of 2^32-1 tokens", "limit-rows", 3, {"tokens": 0xFFFFFFFF}),
        ("length-pages", "PAGES whose payload does not fit their tokens", "record-length", 1, {"tokens": 64}),
        ("length-rows", "ROWS shorter than their table", "record-length", 0, {"payload_bytes": 0}),
        ("length-odd", "ROWS of an odd length", "record-length", 0, {"payload_bytes": 129}),
        ("length-huge", "PAGES of 2^62 bytes", "record-length", 1, {"payload_bytes": 1 << 62}),
    ):  # fmt: skip
        yield Invalid(f"record-{name}", shows, code, edited(usual(), number, **fields).index().data)
    late = edited(edited(usual(), 1, epoch=1), 2, epoch=0)
    yield Invalid("record-epoch", "an epoch lower than the record's before", "record-epoch", late.index().data)
    base = usual()
    block = base.data.index(base.headers[0])
    replayed = base.data[block : block + 4096]
    base.data += replayed
    base.headers.append(replayed[:64])
    yield Invalid("record-replayed", "the first record again, at the end", "record-number", base.index().data)
    only = File([exact()]).rows(0, 3)
    yield Invalid(
        "record-layers",
        "PAGES in a file without coded layers",
        "record-layers",
        edited(only, 0, type=s.PAGES).index().data,
    )
    rewind = usual().rewind(5)
    yield Invalid("rewind-tokens", "a REWIND with tokens", "record-tokens", edited(rewind, 4, tokens=1).index().data)
    payload = usual().record(3, bytes(64), first=5)
    yield Invalid("rewind-payload", "a REWIND with a payload", "record-length", payload.index().data)
    yield Invalid(
        "rewind-flags", "a REWIND with flags", "record-flags", edited(usual().rewind(5), 4, flags=1).index().data
    )
    damaged = usual().data
    yield Invalid(
        "record-header",
        "a damaged record header before whole records",
        "record-header",
        put(damaged, block + 9, "B", 0xFF),
    )


def coverage() -> Iterator[Invalid]:
    one = [coded(PLAN)]
    yield Invalid(
        "tokens-missing", "rows that begin behind a gap", "coverage-tokens", edited(usual(), 3, first=35).index().data
    )
    yield Invalid(
        "tokens-first", "a sequence that begins at token 1", "coverage-tokens", File(one).rows(1, 2).index().data
    )
    yield Invalid(
        "tokens-twice",
        "rows of tokens that are there already",
        "coverage-tokens",
        File(one).rows(0, 3).rows(2, 3).index().data,
    )
    yield Invalid("pages-gap", "pages behind a gap", "coverage-tokens", File(one).rows(0, 3).pages(4, 3).index().data)
    yield Invalid(
        "pages-floor", "pages over pages", "coverage-order", File(one).pages(0, 32).pages(31, 32).index().data
    )
    yield Invalid(
        "pages-floor-rewound",
        "pages over pages below a rewind",
        "coverage-order",
        File(one).pages(0, 32).rewind(9).pages(8, 3).index().data,
    )
    yield Invalid(
        "rewind-beyond",
        "a rewind to a token that is not there",
        "coverage-tokens",
        File(one).rows(0, 3).rewind(4).index().data,
    )
    sides = File(LAYERS).pages(0, 32).rows(32, 1)
    yield Invalid(
        "sides-rows",
        "rows of all layers where coded and exact layers are not at one token",
        "coverage-tokens",
        sides.index().data,
    )
    apart = File(LAYERS).rows(0, 2).pages(2, 32).rows(2, 31, exact_only=True)
    yield Invalid("sides-end", "coded and exact layers that end apart", "coverage-tokens", apart.index().data)


# --- Payloads -------------------------------------------------------------------------------------------------------


def rows_record(
    blocks: Sequence[tuple[int, bytes]], tokens: int, *, reserved: int = 0, padding: int = 0, claim: int = 0
) -> bytes:
    """A file of one float32 layer of five values and one ROWS record with these blocks."""
    table = b"".join(
        struct.pack("<B3sIQ", number, bytes([reserved, 0, 0]), s.crc32c(block), len(block) + claim)
        for number, block in blocks
    )
    table += bytes([padding]) + bytes(31)
    body = b"".join(block.ljust(s.align(len(block)), b"\0") for _, block in blocks)
    return File([exact()]).record(s.ROWS, table + body, s.crc32c(table), tokens=tokens).index().data


def page_edit(
    kind: str, change: Callable[[NDArray[np.uint8], PageLayout, Any], None], plan: Any = PLAN, tokens: int = 5
) -> bytes:
    """A file of one page, changed before its checksum is taken."""

    def edit(place: int, pages: NDArray[np.uint8]) -> None:
        layout = PageLayout.of(plan)
        change(pages[0], layout, getattr(layout, kind))

    return File([coded(plan)]).pages(0, tokens, edit=edit).index().data


def reading() -> Iterator[Invalid]:
    whole = usual()
    at = [whole.data.index(head) for head in whole.headers]
    data = whole.index().data
    for name, shows, code, offset in (
        ("pages-table", "a damaged table of page checksums", "record-table", at[1] + 64),
        ("page-crc", "a damaged page", "page-crc", at[1] + 128 + 70),
        ("rows-table", "a damaged table of rows", "record-table", at[2] + 64),
        ("rows-crc", "a damaged block of rows", "rows-crc", at[2] + 128),
    ):  # fmt: skip
        yield Invalid(name, shows, code, put(data, offset, "B", data[offset] ^ 4), "read")

    plain, frame = bytes(4 * 5 * 32), zstandard.ZstdCompressor().compress
    good = (0, plain)
    zeros = frame(bytes(160))
    for name, shows, code, block in (
        ("rows-encoding", "an unknown encoding", "rows-encoding", (2, plain)),
        ("rows-short", "rows that are too short", "rows-length", (0, plain[:-4])),
        ("planes-lengths", "planes without their lengths", "rows-length", (1, b"123")),
        ("planes-sum", "planes that do not fill their block", "rows-length", planes(b"1", 1, 1, behind=b"234")),
        ("planes-long", "a plane longer than its values", "rows-length", planes(bytes(161))),
        ("planes-bomb", "a frame of 4 MiB in a few bytes", "rows-length", planes(frame(bytes(4 << 20)))),
        ("planes-frame", "a plane that is no frame", "rows-frame", planes(b"notzstd.")),
        ("planes-none", "a plane of no bytes", "rows-frame", (1, struct.pack("<4I", 0, 0, 0, 0))),
        ("planes-behind", "bytes behind a frame", "rows-frame", planes(zeros + b"x")),
        ("planes-cut", "a frame without its end", "rows-frame", planes(zeros[:-2])),
    ):  # fmt: skip
        yield Invalid(name, shows, code, rows_record([block, good], 32), "read")
    yield Invalid(
        "rows-long",
        "rows longer than rows as they are",
        "rows-length",
        rows_record([(0, plain + b"1234"), good], 32),
        "read",
    )
    yield Invalid(
        "rows-claim", "blocks of 2^40 bytes", "rows-length", rows_record([good, good], 32, claim=1 << 40), "read"
    )
    yield Invalid(
        "rows-reserved",
        "reserved bytes of a block's entry",
        "record-reserved",
        rows_record([good, good], 32, reserved=1),
        "read",
    )
    yield Invalid(
        "rows-padding", "padding of a table of rows", "table-padding", rows_record([good, good], 32, padding=1), "read"
    )

    def exponent(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[:2].view("<i2")[:] = 120

    def affine(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        first = layout.head_bytes + at.affine_at
        page[first : first + 2].view("<f2")[:] = np.inf

    def words(number: int, lane: int = 1) -> Callable[[NDArray[np.uint8], PageLayout, Any], None]:
        def change(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
            part = page[layout.head_bytes + at.words_at : layout.head_bytes + at.affine_at]
            part.view("<u2" if at is layout.value else "<u4").reshape(-1, 32)[:, lane] = number

        return change

    def state(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[layout.head_bytes + at.words_at :][:64].view("<u2")[1] ^= 1

    def mean(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[at.scale_at : at.scale_at + 2].view("<f2")[:] = np.nan

    yield Invalid("page-exponent", "an exponent of 120", "page-exponent", page_edit("key", exponent), "read")
    yield Invalid("page-affine", "an infinite offset", "page-affine", page_edit("key", affine), "read")
    yield Invalid(
        "page-mean",
        "a mean scale that is no number",
        "page-affine",
        page_edit("key", mean, simple(2, 6, mean=True)),
        "read",
    )
    tight = rotated(1, 24, stream(1, 24, "prefix", words=2), stream(1, 24))
    yield Invalid(
        "container-overrun-rans", "a container of zeros", "container-overrun", page_edit("value", words(0)), "read"
    )
    yield Invalid(
        "container-overrun-prefix",
        "a container of ones",
        "container-overrun",
        page_edit("key", words(0xFFFFFFFF), tight),
        "read",
    )
    yield Invalid(
        "container-overrun-groups",
        "a container of ones",
        "container-overrun",
        page_edit("key", words(0xFFFFFFFF), by_groups(grouping(1, 16, [levels_of(3)], [(0, 0)], [(8, 2)]), words=2)),
        "read",
    )
    yield Invalid(
        "container-state",
        "a rans container that ends in another state",
        "container-state",
        page_edit("value", state, simple(1, 4, words=6)),
        "read",
    )


def planes(first: bytes, second: int = 0, third: int = 0, behind: bytes = b"") -> tuple[int, bytes]:
    """A block of four planes: the first, the lengths of two others, and what stands behind it."""
    return 1, struct.pack("<4I", len(first), second, third, 0) + first + behind


def verifying() -> Iterator[Invalid]:
    """Nothing that a read of tokens depends on."""
    whole = usual()
    at = [whole.data.index(head) for head in whole.headers]
    offset = len(whole.data)
    headers = list(whole.headers)
    data = whole.index().data
    yield Invalid(
        "padding-record", "padding behind a record", "padding-nonzero", put(data, at[1] - 1, "B", 1), "verify"
    )
    blocks = File([exact()]).rows(0, 3, encoding=0).index().data
    first = blocks.index(b"DQKR")
    yield Invalid(
        "padding-block",
        "padding behind a block of rows",
        "padding-nonzero",
        put(blocks, first + 128 + 60, "B", 1),
        "verify",
    )

    def behind(kind: str) -> Callable[[NDArray[np.uint8], PageLayout, Any], None]:
        def change(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
            part = page[layout.head_bytes + at.words_at : layout.head_bytes + at.affine_at]
            part.view("<u2" if kind == "value" else "<u4").reshape(-1, 32)[-1, 0] |= 1 if kind == "value" else 1 << 31

        return change

    roomy = rotated(1, 4, stream(1, 4, "prefix", words=4), stream(1, 4, words=6))
    for kind in ("key", "value"):
        yield Invalid(
            f"container-padding-{kind}",
            f"bits behind the last letter of {kind}s",
            "container-padding",
            page_edit(kind, behind(kind), roomy),
            "verify",
        )

    def first_bit(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[layout.head_bytes + at.words_at] |= 1

    yield Invalid(
        "container-first-bit", "bit 0 of a prefix container", "container-padding", page_edit("key", first_bit), "verify"
    )

    def absent(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[layout.head_bytes + at.words_at + 4 * 31] = 1

    def head(page: NDArray[np.uint8], layout: PageLayout, at: Any) -> None:
        page[layout.head_bytes - 1] = 1

    yield Invalid(
        "page-unused-words", "words of a token that does not exist", "page-unused", page_edit("key", absent), "verify"
    )
    yield Invalid("page-unused-head", "padding of a page's head", "page-unused", page_edit("key", head), "verify")
    note = File([exact()]).rows(0, 1).record(0x8002, b"a note").index().data
    where = note.index(b"a note")
    yield Invalid("note-damaged", "a damaged NOTE", "payload-crc", put(note, where, "B", 65), "verify")
    yield Invalid(
        "record-header-indexed",
        "a damaged record header that the INDEX still knows",
        "record-header",
        put(data, at[1] + 9, "B", 0xFF),
        "verify",
    )
    full = File([exact()]).rows(0, 1).record(0x8003, bytes(99) + b"?").index().data
    yield Invalid("fill-nonzero", "a FILL that is not zero", "padding-nonzero", full, "verify")
    for name, shows, fields in (
        ("offset", "a trailer that points elsewhere", {"index_offset": 4096}),
        ("odd", "a trailer that points between blocks", {"index_offset": offset + 64}),
        ("bytes", "a trailer of another file length", {"file_bytes": 1 << 40}),
        ("records", "a trailer of 2^32-1 records", {"records": 0xFFFFFFFF}),
        ("salt", "a trailer of another file", {"salt": b"another!"}),
        ("epoch", "a trailer of another epoch", {"epoch": 9}),
    ):  # fmt: skip
        trailer = s.Trailer.unpack(data[-64:])
        assert trailer is not None
        lying = data[:-64] + s.Trailer(**{**trailer.__dict__, **fields}).pack()
        yield Invalid(f"trailer-{name}", shows, "index-mismatch", lying, "verify")
    shuffled = [headers[1], headers[0], *headers[2:]]
    for name, shows, listed in (
        ("order", "an INDEX that lists the records in another order", shuffled),
        ("cycle", "an INDEX that lists one record again and again", headers[:1] * len(headers)),
        ("omits", "an INDEX that leaves out the last record", headers[:-1]),
    ):  # fmt: skip
        made = data[:offset] + s.index_record(offset, listed, FILE_ID[:8])
        yield Invalid(
            f"index-{name}",
            shows,
            "record-number" if name == "omits" else "index-mismatch",
            made,
            "open" if name == "omits" else "verify",
        )
