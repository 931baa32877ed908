"""The invalid vectors whose header block breaks a rule, its checksum right unless that is the rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from valid_vectors import coded, exact, with_json
from vector_files import File, by_groups, grouping, levels_of, put, rotated, simple, stream, with_header_crc

from dquantcodec.file import Layer

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


def headers() -> Iterator[Invalid]:
    """All of them, in the order of the specification."""
    for part in (starts, counts, profiles, layers, tables, texts, classes, groupings):
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
