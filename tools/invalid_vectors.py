"""The invalid vectors: files that break one rule each, all checksums right unless a checksum is the rule."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import zstandard
from invalid_headers import LAYERS, PLAN, Invalid, headers
from numpy.typing import NDArray
from valid_vectors import coded, exact
from vector_files import FILE_ID, File, by_groups, grouping, levels_of, put, rotated, simple, stream

from dquantcodec.file import structs as s
from dquantcodec.page_layout import PageLayout


def invalid() -> Iterator[Invalid]:
    """All of them, in the order of the specification."""
    for part in (headers, records, coverage, reading, verifying):
        yield from part()


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
