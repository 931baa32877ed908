"""A second decoder of ``.dqkv`` files, written from ``dqkv.md`` alone and in its order.

    python formats/reader.py FILE ...        what the files hold, and everything that is wrong with them

Plain Python on purpose: the standard library and ``zstandard`` (for RFC 8878), no arrays, nothing shared with the
library.  Every function is a clause of the specification, and structures are named tuples of its fields.  It is the
judge in tests: thousands of times slower than the library, and shorter.

An FP32 number is a Python float of the same value.  Python computes in FP64; a sum, difference or product of FP32
numbers rounded from there to FP32 is what FP32 arithmetic gives, because 53 bits are more than twice 24 and two.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace as Fields
from typing import Any

import zstandard

# --- 1 Scope and conventions ----------------------------------------------------------------------------------------

KINDS = ("key", "value")


class RefusedError(Exception):
    """The file breaks a rule; ``code`` is the reason code of clause 9.4."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


def need(holds: bool, code: str, message: str = "") -> None:
    if not holds:
        raise RefusedError(code, message)


def align(x: int, k: int) -> int:
    return -(-x // k) * k


def fields(names: str, form: str, data: bytes, at: int = 0) -> Fields:
    """A structure of the specification: the names of its fields and their types as :mod:`struct` has them."""
    return Fields(**dict(zip(names.split(), struct.unpack_from("<" + form, data, at), strict=True)))


@cache
def crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc


CRC_OF_BYTE = [crc_of_byte(byte) for byte in range(256)]


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC_OF_BYTE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def f32(x: float) -> float:
    """``x`` rounded to the nearest FP32 number, ties to even."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


# --- 3 Header block -------------------------------------------------------------------------------------------------

START = (
    "signature major minor block_bytes required optional file_id layers sequences profiles tables signs sinks recent "
    "profiles_at layers_at tables_at signs_at json_at json_bytes classes groupings classes_at groupings_at matrices "
    "reserved crc"
)


def read_header(data: bytes) -> Fields:
    """Clause 3.1: the start, then every section where the one before it ends."""
    need(data[:8] == b"\x89DQK\r\n\x1a\n"[: len(data)], "signature")
    need(len(data) >= 128, "header-truncated")
    h = fields(START, "8sHHIQQ16s7I6I4I3I", data)
    need(h.major == 1, "version-major", f"{h.major}.{h.minor}")
    need(h.block_bytes <= 16 << 20, "limit-header")
    need(h.block_bytes >= 4096 and h.block_bytes % 4096 == 0, "header-length")
    need(h.block_bytes <= len(data), "header-truncated")
    block = data[: h.block_bytes]
    need(crc32c(block[:124] + block[128:]) == h.crc, "header-crc")
    need(h.required == 0, "feature-required", f"bits {h.required:#x}")
    need(h.matrices == 0, "header-matrices")
    need(h.reserved == 0, "header-reserved")
    need(1 <= h.layers <= 1024, "limit-layers")
    need(1 <= h.sequences <= 65536, "limit-sequences")
    need(h.profiles <= 8192, "limit-profiles")
    need(h.tables <= 2048, "limit-tables")
    need(h.signs <= h.profiles, "limit-signs")
    need(h.classes <= 1024, "limit-classes")
    need(h.groupings <= 2 * h.profiles, "limit-groupings")
    need(h.json_bytes <= 65536, "limit-json")

    def section(begins: int, count: int, read: Callable[[Take], Any], at: int) -> tuple[list[Any], int]:
        """``count`` entries that begin at ``at``, as the header says with ``begins``; and where they end."""
        need(begins == at <= h.block_bytes, "header-coverage", f"a section at {begins} instead of {at}")
        take = Take(block, at)
        return [read(take) for _ in range(count)], take.at

    profiles, end = section(h.profiles_at, h.profiles, lambda take: take(192), 128)
    layers, end = section(h.layers_at, h.layers, lambda take: take(32), end)
    tables, end = section(h.tables_at, h.tables, read_table, end)
    signs, end = section(h.signs_at, h.signs, read_signs, end)
    classes, end = section(h.classes_at, h.classes, read_class, end)
    groupings, end = section(h.groupings_at, h.groupings, lambda take: read_grouping(take, classes), end)
    section(h.json_at, 0, lambda take: None, end)
    need(align(end + h.json_bytes, 4096) == h.block_bytes, "header-coverage")
    need(not any(block[end + h.json_bytes :]), "header-reserved")

    h.profiles = [read_profile(entry, tables, signs, groupings) for entry in profiles]
    windows = {profile.window for profile in h.profiles}
    need(len(windows) <= 1, "profile-window-differs")
    need(sum(int.from_bytes(entry[16:18], "little") for entry in layers) <= 8192, "limit-groups")
    h.layers = [read_layer(entry, h.profiles) for entry in layers]
    need(all(a.number < b.number for a, b in zip(h.layers, h.layers[1:])), "layer-number")
    h.info = read_json(block[end : end + h.json_bytes])
    h.salt, h.window = h.file_id[:8], max(windows, default=0)
    h.coded, h.exact = ([i for i, layer in enumerate(h.layers) if layer.storage == s] for s in (CODED, EXACT))
    h.stored = sorted(h.coded + h.exact)
    #: Clause 4.3: the head groups of all coded layers, as layer and profile.
    h.groups = [(i, profile) for i in h.coded for profile in h.layers[i].profiles]
    return h


class Take:
    """Bytes of the header block, one part after another; nothing is taken beyond the block."""

    def __init__(self, block: bytes, at: int) -> None:
        self.block, self.at = block, at

    def __call__(self, size: int) -> bytes:
        need(self.at + size <= len(self.block), "header-coverage")
        self.at += size
        return self.block[self.at - size : self.at]

    def numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack("<" + form, self(struct.calcsize("<" + form)))

    def padding(self, size: int) -> None:
        """Zeros behind ``size`` bytes, up to a multiple of 8."""
        need(not any(self(align(size, 8) - size)), "header-reserved")


def check_geometry(heads: int, dim: int) -> None:
    need(1 <= heads <= 1024 and 1 <= dim <= 1024 and heads * dim <= 65536, "limit-geometry")


def read_profile(entry: bytes, tables: list[Fields], signs: list[list[int]], groupings: list[Fields]) -> Fields:
    """Clause 3.2."""
    profile = fields("heads dim window reserved name rest", "III4s32s16s", entry)
    need(not any(profile.reserved + profile.rest), "header-reserved")
    check_geometry(profile.heads, profile.dim)
    need(profile.window % 32 == 0 and 32 <= profile.window <= 4096, "profile-window")
    profile.key, profile.value = (read_stream(entry[at : at + 64], profile, tables, groupings) for at in (64, 128))
    number = profile.key.vector
    need(number == profile.value.vector, "profile-rotation")
    need(number < len(signs) and len(signs[number]) == profile.heads * profile.dim, "profile-signs")
    profile.signs = signs[number]
    try:
        profile.name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise RefusedError("profile-name") from None
    return page_sizes(profile)


RANS, PREFIX = 1, 2
MIN_MAX, MID_TREAD = 0, 1
STREAM = (
    "coder quantiser grid k levels precision substreams mean words table rotation reserved vector step gain reserved2 "
    "grouping escape reserved3 matrix reserved4"
)


def read_stream(entry: bytes, profile: Fields, tables: list[Fields], groupings: list[Fields]) -> Fields:
    """Clause 3.2, per kind."""
    s = fields(STREAM, "8BHHBBHdBBHBBH32s", entry)
    need(s.coder in (RANS, PREFIX), "profile-coder")
    need(s.quantiser <= 2, "profile-quantiser")
    need(s.grid in (MIN_MAX, MID_TREAD), "profile-grid")
    need(s.gain <= 1, "profile-gain")
    need(s.mean <= 1, "profile-mean")
    need(s.rotation <= 1, "profile-rotation")
    need(s.escape == 0, "profile-escape")
    need(s.matrix == 0, "profile-matrix")
    need(s.reserved == s.reserved2 == s.reserved3 == 0 and not any(s.reserved4), "header-reserved")
    need(s.substreams in (1, 2, 4), "profile-substreams")
    need(profile.heads % s.substreams == 0, "profile-heads")
    need(2 <= s.words <= 32767, "profile-words")
    if s.rotation == 0:
        need((s.k, s.levels, s.precision, s.table) == (0, 0, 0, 0), "profile-grouping")
        need((s.coder, s.grid) == (PREFIX, MID_TREAD) and 0 < s.step <= 64, "profile-grouping")
        need(s.grouping < len(groupings), "profile-grouping")
        grouping = groupings[s.grouping]
        need((grouping.heads, grouping.dim) == (profile.heads, profile.dim), "profile-grouping")
        need(grouping.quantiser == s.quantiser, "profile-grouping")
        s.grouping = grouping
        return s
    need((s.grouping, s.quantiser) == (0, 0), "profile-grouping")
    s.grouping = None
    need(2 <= s.levels <= 64, "profile-levels")
    if s.grid == MID_TREAD:
        need(s.levels % 2 == 1, "profile-levels")
        need(0 < s.step <= 16, "profile-step")
    else:
        need((s.step, s.gain) == (0, 0), "profile-grid")
    need(8 <= s.precision <= 15, "profile-precision")
    need(1 <= s.k <= 4 and s.levels**s.k <= min(4096, 2**s.precision), "profile-letter")
    need(s.table < len(tables), "profile-table")
    s.table = tables[s.table]
    need((s.table.precision, len(s.table.frequencies)) == (s.precision, s.levels**s.k), "profile-table")
    need(s.coder == RANS or all(f & (f - 1) == 0 for f in s.table.frequencies), "profile-prefix")
    return s


CODED, EXACT, ABSENT = 1, 2, 3
ITEMSIZE = {1: 2, 2: 2, 3: 4}


def read_layer(entry: bytes, profiles: list[Fields]) -> Fields:
    """Clause 3.3."""
    layer = fields("storage dtype profile heads dim number groups reserved", "BBHIIIH14s", entry)
    need(layer.storage in (CODED, EXACT, ABSENT), "layer-storage")
    need(layer.dtype in ITEMSIZE, "layer-dtype")
    need(not any(layer.reserved), "header-reserved")
    need((1 <= layer.groups <= layer.heads) if layer.storage == CODED else layer.groups == 0, "layer-groups")
    layer.profiles = profiles[layer.profile : layer.profile + layer.groups]
    if layer.storage == CODED:
        need(len(layer.profiles) == layer.groups, "layer-profile")
        need(all(profile.dim == layer.dim for profile in layer.profiles), "layer-profile")
        need(sum(profile.heads for profile in layer.profiles) == layer.heads, "layer-profile")
    else:
        need(layer.profile == 0xFFFF, "layer-profile")
    check_geometry(layer.heads, layer.dim)
    layer.row_bytes = layer.heads * layer.dim * ITEMSIZE[layer.dtype]
    return layer


def read_table(take: Take) -> Fields:
    """Clause 3.4."""
    letters, precision = take.numbers("II")
    need(2 <= letters <= 4096 and 8 <= precision <= 15, "limit-table")
    frequencies = take.numbers(f"{letters}H")
    need(0 not in frequencies, "table-zero")
    need(sum(frequencies) == 2**precision, "table-sum")
    take.padding(8 + 2 * letters)
    return Fields(precision=precision, frequencies=frequencies)


def read_signs(take: Take) -> list[int]:
    """Clause 3.5."""
    bits, reserved = take.numbers("II")
    need(bits <= 65536, "limit-signs")
    packed = take(-(-bits // 8))
    ones = [byte >> i & 1 for byte in packed for i in range(8)]
    need(reserved == 0 and not any(ones[bits:]), "header-reserved")
    take.padding(8 + len(packed))
    return [-1 if one else 1 for one in ones[:bits]]


def read_json(data: bytes) -> dict[str, Any]:
    """Clause 3.6."""

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(pairs)) == len(pairs), "header-json", "a member twice")
        return dict(pairs)

    def number(text: str) -> int | float:
        integer = text.lstrip("-").isdigit()
        need(len(text) <= 400 and (integer or math.isfinite(float(text))), "header-json", "a number")
        return int(text) if integer else float(text)

    try:
        text = data.decode()
        need(json_depth(text) <= 16, "header-json", "nested too deep")
        hooks: dict[str, Any] = dict.fromkeys(("parse_constant", "parse_int", "parse_float"), number)
        info = json.loads(text, object_pairs_hook=members, **hooks)
        json.dumps(info, ensure_ascii=False).encode()  # no lone surrogates
    except ValueError as error:
        raise RefusedError("header-json", str(error)) from None
    need(isinstance(info, dict), "header-json")
    need(all(isinstance(info.get(name, ""), str) for name in ("model", "revision", "writer")), "header-json")
    need(isinstance(info.get("metadata", {}), dict), "header-json")
    start, shard = info.get("positions_start", 0), info.get("shard", [0, 1])
    need(type(start) is int and 0 <= start < 2**53, "header-json")
    need(isinstance(shard, list) and [type(n) for n in shard] == [int, int] and 0 <= shard[0] < shard[1], "header-json")
    return dict(info)


def json_depth(text: str) -> int:
    """How deep brackets nest outside strings, counted before anything is parsed."""
    depth = deepest = at = 0
    while at < len(text):
        if text[at] == '"':
            at += 1
            while at < len(text) and text[at] != '"':
                at += 2 if text[at] == "\\" else 1
        depth += (text[at : at + 1] in ("[", "{")) - (text[at : at + 1] in ("]", "}"))
        deepest = max(deepest, depth)
        at += 1
    return deepest


def read_class(take: Take) -> Fields:
    """Clause 3.7; ``sets`` are frequencies of the levels ``-q`` to ``q``, by quantiser."""
    q, dependent, gain = take.numbers("BBH")
    uppers = [take.numbers(f"{q + 1}H") for _ in range(2 if dependent == 1 else 1)]
    need(dependent <= 1, "header-reserved")
    take.padding(4 + 2 * (q + 1) * len(uppers))
    sets = [(*upper[:0:-1], *upper) for upper in uppers]
    need(1 <= q <= (63 if dependent else 127), "class-weights")
    need(all(0 not in f and sum(f) == 2**14 for f in sets) and max(sets[0]) == sets[0][q], "class-weights")
    need(1 <= gain <= 1023, "class-gain")
    return Fields(q=q, dependent=dependent, gain=gain, sets=sets)


def read_grouping(take: Take, classes: list[Fields]) -> Fields:
    """Clause 3.8."""
    begin = take.at
    g = fields("heads dim coded groups tables quantiser reserved", "HHHHBB6s", take(16))
    need(g.quantiser <= 2, "profile-quantiser")
    need(1 <= g.heads <= 1024 and 1 <= g.coded <= g.dim <= 1024 and g.heads * g.dim <= 65536, "limit-grouping")
    need(g.groups <= 512 and g.tables <= 16, "limit-grouping")
    tables = []
    for _ in range(g.tables):
        precision, count, reserved, *numbers = take.numbers("BBH4H")
        named = numbers[:count]
        need(reserved == 0 and count <= 4 and all(c == 0xFFFF for c in numbers[count:]), "grouping-table")
        need(all(c < len(classes) for c in named), "grouping-table")
        tables.append(Fields(precision=precision, classes=[classes[c] for c in named], codes={}))
    g.tables, g.shapes = tables, [take.numbers("BB") for _ in range(g.groups)]
    g.order = take.numbers(f"{g.heads}H")
    g.choice = [take(g.groups) for _ in range(g.heads)]
    g.channels = [take.numbers(f"{g.coded}{'H' if g.dim > 256 else 'B'}") for _ in range(g.heads)]
    need(not any(g.reserved), "header-reserved")
    take.padding(take.at - begin)

    need(max(g.order) < g.heads and all(max(row) < g.dim for row in g.channels), "grouping-order")
    used = [c for table in tables for c in table.classes]
    need(bool(used), "grouping-classes")
    need(any(c.dependent for c in used) == (g.quantiser > 0), "grouping-states")
    for table in tables:
        table.letters = math.prod(2 * c.q + 1 for c in table.classes)
        bits = sum((4 * c.q if c.dependent else 2 * c.q).bit_length() for c in table.classes)
        need(len(table.classes) >= 1 and 8 <= table.precision <= 14, "grouping-table")
        need(table.letters <= min(4096, 2**table.precision), "grouping-table")
        need(bits <= {0: 12, 1: 10, 2: 9}[g.quantiser], "grouping-table")
    need(g.groups >= 1 and all(1 <= n <= 8 and 1 <= f <= 4 for n, f in g.shapes), "grouping-shape")
    need(sum(n * f for n, f in g.shapes) == g.coded, "grouping-shape")
    for number, (_, count) in ((number, shape) for row in g.choice for number, shape in zip(row, g.shapes)):
        need(number < len(tables) and len(tables[number].classes) == count, "grouping-table")
    need(sorted(g.order) == list(range(g.heads)), "grouping-order")
    need(all(len(set(row)) == g.coded for row in g.channels), "grouping-order")
    return g


# --- 4 Records ------------------------------------------------------------------------------------------------------

PAGES, ROWS, REWIND, INDEX, FILL = 1, 2, 3, 0x8001, 0x8003
#: Types that say what tokens a sequence has.
TOKENS = (PAGES, ROWS, REWIND)
RECORD = "magic type version payload_bytes first tokens sequence number flags salt epoch table_crc reserved crc"


def record_at(raw: bytes, offset: int, salt: bytes) -> Fields | None:
    """Clauses 4.1 and 9.1: the record at ``offset`` if ``raw``, 64 bytes, is a valid header."""
    if len(raw) < 64 or raw[:4] != b"DQKR":
        return None
    r = fields(RECORD, "4sHHQQIIII8sIIII", raw)
    if r.crc != crc32c(raw[:60]) or r.salt != salt:
        return None
    r.offset, r.payload, r.payload_end = offset, offset + 64, offset + 64 + r.payload_bytes
    r.end, r.token_end = align(r.payload_end, 4096), r.first + r.tokens
    #: A ROWS record of all layers, not of the exact ones alone.
    r.all_layers = r.type == ROWS and r.flags == 0
    return r


def check_record(record: Fields, header: Fields, before: Sequence[Fields]) -> None:
    """Clauses 4.1 to 4.4: what a record header may say."""
    need(record.number == len(before), "record-number")
    need(record.epoch >= (before[-1].epoch if before else 0), "record-epoch")
    need(record.reserved == 0, "record-reserved")
    if record.type not in TOKENS:
        need(record.type >= 0x8000, "record-type", f"type {record.type}")
        return
    need(record.version == 1, "record-version")
    need(record.flags <= (1 if record.type == ROWS else 0), "record-flags")
    need(record.sequence < header.sequences, "record-sequence")
    need((record.tokens > 0) == (record.type != REWIND), "record-tokens")
    need(record.token_end <= 2**40, "limit-tokens")
    if record.type == REWIND:
        need(record.payload_bytes == record.table_crc == 0, "record-length")
        return
    need(bool(header.coded if record.type == PAGES else rows_layers(record, header)), "record-layers")
    if record.type == PAGES:
        need(windows_of(record, header) <= 1024, "limit-run")
        end = page_table_bytes(record, header) + sum(page.size for page in pages_of(record, header))
        need(record.payload_bytes == end, "record-length")
    else:
        layers = rows_layers(record, header)
        largest = record.tokens * max(header.layers[i].row_bytes for i in layers)
        need(record.tokens == 1 or largest <= 16 << 20, "limit-rows")
        need(record.payload_bytes >= align(32 * len(layers), 64), "record-length")
        need(record.payload_bytes % 64 == 0, "record-length")


def read_sequence(records: Sequence[Fields], header: Fields, torn: bool) -> Fields:
    """Clause 4.2, of one sequence: its ``tokens``, and the stretches that hold them for ``coded`` and ``exact`` layers.

    A stretch is a record and the tokens that are read from it, from the first to before the last.
    """
    found = Fields(coded=[], exact=[])
    ends = {side: 0 for side in ("coded", "exact") if getattr(header, side)}
    floor = 0
    for record in records:
        a, b = record.first, record.token_end
        if record.type == REWIND:
            need(all(a <= end for end in ends.values()), "coverage-tokens")
            ends, floor = dict.fromkeys(ends, a), min(floor, a)
            found.coded, found.exact = (cut(stretches, 0, a) for stretches in (found.coded, found.exact))
            continue
        if record.type == PAGES:
            need(a <= ends["coded"], "coverage-tokens")
            need(floor <= a, "coverage-order")
            floor = b
        for side in ends if record.all_layers else ["coded" if record.type == PAGES else "exact"]:
            need(record.type == PAGES or a == ends[side], "coverage-tokens")
            behind = cut(getattr(found, side), b, max(b, ends[side]))
            setattr(found, side, [*cut(getattr(found, side), 0, a), (record, a, b), *behind])
            ends[side] = max(ends[side], b)
    found.tokens = min(ends.values(), default=0)
    need(torn or all(end == found.tokens for end in ends.values()), "coverage-tokens")
    found.coded, found.exact = (cut(stretches, 0, found.tokens) for stretches in (found.coded, found.exact))
    return found


def cut(stretches: Sequence[tuple[Fields, int, int]], first: int, last: int) -> list[tuple[Fields, int, int]]:
    """What of ``stretches`` lies from token ``first`` to before ``last``."""
    kept = [(record, max(a, first), min(b, last)) for record, a, b in stretches]
    return [(record, a, b) for record, a, b in kept if a < b]


def windows_of(record: Fields, header: Fields) -> int:
    return int(-(-record.tokens // header.window))


def page_table_bytes(record: Fields, header: Fields) -> int:
    return align(4 * len(header.groups) * windows_of(record, header), 64)


def pages_of(record: Fields, header: Fields) -> Iterator[Fields]:
    """Clause 4.3: every page with its head group, layer, profile, tokens, offset in the payload and size."""
    at = page_table_bytes(record, header)
    for group, (layer, profile) in enumerate(header.groups):
        for window in range(windows_of(record, header)):
            tokens = min(header.window, record.tokens - window * header.window)
            size = page_bytes(profile, tokens)
            yield Fields(group=group, layer=layer, profile=profile, tokens=tokens, at=at, size=size)
            at += size


def checked_table(payload: bytes, size: int, used: int, record: Fields) -> bytes:
    """The table a payload begins with: ``used`` of its ``size`` bytes."""
    need(crc32c(payload[:size]) == record.table_crc, "record-table")
    need(not any(payload[used:size]), "table-padding")
    return payload[:used]


def page_crcs(payload: bytes, record: Fields, header: Fields) -> tuple[int, ...]:
    """Clause 4.3."""
    count = len(header.groups) * windows_of(record, header)
    return struct.unpack(f"<{count}I", checked_table(payload, page_table_bytes(record, header), 4 * count, record))


def rows_layers(record: Fields, header: Fields) -> list[int]:
    """Clause 4.4: the layers whose rows a record holds."""
    return list(header.exact if record.flags else header.stored)


def row_blocks(payload: bytes, record: Fields, header: Fields) -> list[Fields]:
    """Clause 4.4: the blocks of rows, with the fields of the table and with their layer, kind and offset."""
    stored = [(i, kind) for i in rows_layers(record, header) for kind in KINDS]
    at = align(16 * len(stored), 64)
    table = checked_table(payload, at, 16 * len(stored), record)
    blocks = []
    for place, (i, kind) in enumerate(stored):
        block = fields("encoding reserved crc size", "B3sIQ", table, 16 * place)
        need(not any(block.reserved), "record-reserved")
        need(1 <= block.size <= record.tokens * header.layers[i].row_bytes, "rows-length")
        need(at + block.size <= len(payload), "rows-length")
        block.layer, block.kind, block.at = i, kind, at
        blocks.append(block)
        at += align(block.size, 64)
    need(at == len(payload), "record-length")
    return blocks


def index_record(offset: int, headers: Sequence[bytes], salt: bytes, epoch: int) -> bytes:
    """Clause 4.5: the INDEX of record ``headers`` that begins at ``offset``, and the trailer it ends with."""
    rows = b"".join(headers)
    end = align(offset + 64 + len(rows) + 64, 4096)
    trailer = struct.pack("<4sHHQQ8sII20x", b"DQKT", 1, 0, offset, end, salt, epoch, len(headers))
    payload = rows.ljust(end - offset - 128, b"\0") + trailer + struct.pack("<I", crc32c(trailer))
    body = (INDEX, 1, len(payload), 0, 0, 0, len(headers), 0, salt, epoch, crc32c(payload), 0)
    header = struct.pack("<4sHHQQIIII8sIII", b"DQKR", *body)
    return header + struct.pack("<I", crc32c(header)) + payload


# --- 5 Pages --------------------------------------------------------------------------------------------------------


def page_sizes(profile: Fields) -> Fields:
    """Clause 5.1: ``profile`` with the sizes and offsets of its pages."""
    profile.head_used, profile.tile_bytes = 4, 0
    for stream in (profile.key, profile.value):
        stream.mean_at = profile.head_used
        profile.head_used += (2 * profile.heads + profile.heads * profile.dim) * stream.mean
        stream.words_at = profile.tile_bytes
        stream.word_bytes = 2 if stream.coder == RANS else 4
        stream.affine_at = stream.words_at + 32 * stream.substreams * stream.words * stream.word_bytes
        stream.affine_numbers = 2 if stream.grid == MIN_MAX else 1
        profile.tile_bytes = stream.affine_at + 64 * stream.affine_numbers
    profile.head_bytes = align(profile.head_used, 64)
    return profile


def page_bytes(profile: Fields, tokens: int) -> int:
    """Clause 4.3: a page cut after its last used tile."""
    return int(profile.head_bytes + -(-tokens // 32) * profile.tile_bytes)


def page_words(page: bytes, profile: Fields, stream: Fields, token: int, substream: int) -> list[int]:
    """Clause 5.2: words of 32 tokens are interleaved."""
    first = profile.head_bytes + token // 32 * profile.tile_bytes + stream.words_at
    places = [(substream * stream.words + w) * 32 + token % 32 for w in range(stream.words)]
    words = [page[first + stream.word_bytes * place :][: stream.word_bytes] for place in places]
    return [int.from_bytes(word, "little") for word in words]


def page_affine(page: bytes, profile: Fields, stream: Fields, token: int) -> tuple[float, ...]:
    """Clause 5.1: offset and scale of a token, or a scale alone."""
    at = profile.head_bytes + token // 32 * profile.tile_bytes + stream.affine_at
    return struct.unpack_from(f"<{stream.affine_numbers}e", page, at + 2 * stream.affine_numbers * (token % 32))


def page_mean(page: bytes, profile: Fields, stream: Fields) -> list[float]:
    """Clause 6.4: ``meanscale[h] * mean[h][d]``, exact, of every channel."""
    scales = struct.unpack_from(f"<{profile.heads}e", page, stream.mean_at)
    means = struct.unpack_from(f"<{profile.heads * profile.dim}b", page, stream.mean_at + 2 * profile.heads)
    need(all(map(math.isfinite, scales)), "page-affine")
    return [scales[i // profile.dim] * mean for i, mean in enumerate(means)]


def page_unused(page: bytes, profile: Fields, tokens: int) -> bool:
    """Clause 5: whether padding of the head, or what belongs to tokens that do not exist, is other than zero."""
    found = any(page[profile.head_used : profile.head_bytes])
    for stream in (profile.key, profile.value):
        for token in range(tokens, align(tokens, 32)):
            found |= any(any(page_words(page, profile, stream, token, j)) for j in range(stream.substreams))
            affine = page_affine(page, profile, stream, token)
            found |= any(struct.pack(f"<{len(affine)}e", *affine))
    return found


# --- 6 Decoder arithmetic -------------------------------------------------------------------------------------------

LARGEST = 2.0**128 - 2.0**104


def decode_page(page: bytes, profile: Fields, kind: str, tokens: int, strict: bool = False) -> list[list[float]]:
    """Clause 6.4: the FP32 values ``[H * D]`` of every token."""
    stream = getattr(profile, kind)
    exponent = struct.unpack_from("<h", page, 2 * KINDS.index(kind))[0]
    need(-157 <= exponent <= 119, "page-exponent")
    mean = page_mean(page, profile, stream) if stream.mean else []
    rows = []
    for token in range(tokens):
        affine = page_affine(page, profile, stream, token)
        need(all(map(math.isfinite, affine)), "page-affine")
        scale = affine[-1]
        if stream.grouping:
            y = [f32(scale * level) for level in read_groups(page, profile, stream, token, strict)]
        else:
            offset = affine[0] if stream.grid == MIN_MAX else -(stream.levels - 1) / 2 * scale
            y = [f32(offset + scale * m) for m in read_symbols(page, profile, stream, token, strict)]
        if mean:
            y = [f32(a + b) for a, b in zip(y, mean, strict=True)]
        if stream.rotation:
            y = [x for h in range(profile.heads) for x in rotate_back(y[h * profile.dim : (h + 1) * profile.dim])]
            y = [x * sign for x, sign in zip(y, profile.signs, strict=True)]
        rows.append([scaled(x, exponent) for x in y])
    return rows


def scaled(x: float, exponent: int) -> float:
    """Clause 6.4, last line: exact in FP64, so rounded once."""
    x = math.ldexp(x, exponent)
    return f32(math.copysign(min(abs(x), LARGEST), x))


def read_symbols(page: bytes, profile: Fields, stream: Fields, token: int, strict: bool) -> list[int]:
    """Clause 6.1: the symbols of a token, head by head."""
    per_head = -(-profile.dim // stream.k)
    count = profile.heads // stream.substreams * per_head
    symbols: list[int] = []
    for j in range(stream.substreams):
        words = page_words(page, profile, stream, token, j)
        letters = (read_rans if stream.coder == RANS else read_prefix)(words, stream.table, count, strict)
        for head in range(0, count, per_head):
            own = [
                letter // stream.levels**i % stream.levels
                for letter in letters[head : head + per_head]
                for i in range(stream.k)
            ]
            symbols += own[: profile.dim]
    return symbols


@cache
def rans_slots(frequencies: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """For every slot: the letter, its frequency, and the place of the slot among the letter's."""
    return [(letter, f, place) for letter, f in enumerate(frequencies) for place in range(f)]


def read_rans(words: list[int], table: Fields, count: int, strict: bool) -> list[int]:
    """Clause 6.2."""
    slots = rans_slots(table.frequencies)
    x, following, letters = words[0] * 65536 + words[1], 2, []
    for _ in range(count):
        letter, f, place = slots[x % 2**table.precision]
        x = f * (x >> table.precision) + place
        if x < 65536:
            x = x * 65536 + (words[following] if following < len(words) else 0)
            following += 1
        letters.append(letter)
    need(following <= len(words), "container-overrun")
    need(x == 65536, "container-state")
    need(not strict or not any(words[following:]), "container-padding")
    return letters


class Bits:
    """Clause 6.3: the bits of a container, read from bit 1 on."""

    def __init__(self, words: list[int]) -> None:
        self.bits, self.at = "".join(f"{word:032b}"[::-1] for word in words), 1

    def take(self, letter_of: dict[str, int]) -> int:
        """The letter whose code stands next."""
        end = self.at + 1
        while self.bits[self.at : end] not in letter_of:
            end += 1
            need(end <= len(self.bits), "container-overrun")
        letter = letter_of[self.bits[self.at : end]]
        self.at = end
        return letter

    def close(self, strict: bool) -> None:
        need(not strict or "1" not in self.bits[0] + self.bits[self.at :], "container-padding")


def canonical(lengths: Sequence[int]) -> dict[str, int]:
    """Clause 6.3: the letter of every code, a string of bits."""
    letter_of: dict[str, int] = {}
    code = before = 0
    for letter in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        code = (code + 1 if letter_of else 0) << (lengths[letter] - before)
        before = lengths[letter]
        letter_of[f"{code:0{before}b}"] = letter
    return letter_of


@cache
def prefix_codes(frequencies: tuple[int, ...], precision: int) -> dict[str, int]:
    return canonical([precision - (f.bit_length() - 1) for f in frequencies])


def read_prefix(words: list[int], table: Fields, count: int, strict: bool) -> list[int]:
    """Clause 6.3."""
    bits = Bits(words)
    letters = [bits.take(prefix_codes(table.frequencies, table.precision)) for _ in range(count)]
    bits.close(strict)
    return letters


PALEY = {3: (11, 1), 5: (19, 1), 7: (13, 2), 9: (17, 2), 11: (43, 1), 15: (59, 1)}


def rotate_back(y: list[float]) -> list[float]:
    """Clause 6.5 without the signs, of one head."""
    out: list[float] = []
    while len(out) < len(y):
        order = largest_order(len(y) - len(out))
        block = y[len(out) : len(out) + order]
        matrix = paley(odd_part(order))
        run, h = order // len(matrix), 1
        while h < run:
            for j in (i + j for i in range(0, order, 2 * h) for j in range(h)):
                block[j], block[j + h] = f32(block[j] + block[j + h]), f32(block[j] - block[j + h])
            h *= 2
        for c in range(run if len(matrix) > 1 else 0):
            u = block[c::run]
            for i in range(len(matrix)):
                block[i * run + c] = 0.0
                for row, x in zip(matrix, u, strict=True):
                    block[i * run + c] = f32(block[i * run + c] + row[i] * x)
        z = f32(1 / math.sqrt(order))
        out += [f32(x * z) for x in block]
    return out


def odd_part(n: int) -> int:
    return n // (n & -n)


@cache
def largest_order(room: int) -> int:
    return max(n for n in range(1, room + 1) if odd_part(n) == 1 or (odd_part(n) in PALEY and n % 4 == 0))


@cache
def paley(r: int) -> list[list[int]]:
    """Paley's matrix of order ``4r``; of order 1 for ``r = 1``."""
    if r == 1:
        return [[1]]
    q, construction = PALEY[r]
    chi = [0] + [1 if a in {b * b % q for b in range(1, q)} else -1 for a in range(1, q)]
    epsilon = -1 if construction == 1 else 1
    c = [[0] + [1] * q] + [[epsilon] + [chi[(j - i) % q] for j in range(q)] for i in range(q)]
    if construction == 1:
        return [[c[i][j] + (i == j) for j in range(q + 1)] for i in range(q + 1)]
    one, two = [[1, 1], [1, -1]], [[1, -1], [-1, -1]]
    return [
        [c[i // 2][j // 2] * one[i % 2][j % 2] + (i // 2 == j // 2) * two[i % 2][j % 2] for j in range(2 * q + 2)]
        for i in range(2 * q + 2)
    ]


def read_groups(page: bytes, profile: Fields, stream: Fields, token: int, strict: bool) -> list[float]:
    """Clauses 6.4 and 6.6: gain times level of every channel of a token, 0 where nothing is coded."""
    g = stream.grouping
    y = [0.0] * (g.heads * g.dim)
    part = g.heads // stream.substreams
    for j in range(stream.substreams):
        bits, state = Bits(page_words(page, profile, stream, token, j)), 0
        for place in range(j * part, (j + 1) * part):
            at = 0
            for (letters, count), number in zip(g.shapes, g.choice[place], strict=True):
                for letter in range(letters):
                    found, state = read_letter(bits, g.tables[number], g.quantiser, state)
                    for f, level in enumerate(found):
                        y[g.order[place] * g.dim + g.channels[place][at + f * letters + letter]] = level
                at += letters * count
        bits.close(strict)
    return y


def read_letter(bits: Bits, table: Fields, quantiser: int, state: int) -> tuple[list[float], int]:
    """Gain times level of the next letter's fields, and the state after it."""
    if state not in table.codes:
        table.codes[state] = group_codes(table, quantiser, state)
    letter = bits.take(table.codes[state])
    levels, _, state = follow(table, letter, quantiser, state)
    gains = [c.gain / (512 if c.dependent else 256) for c in table.classes]
    return [gain * level for gain, level in zip(gains, levels, strict=True)], state


def group_codes(table: Fields, quantiser: int, state: int) -> dict[str, int]:
    """Clauses 6.6 and 6.7: the codes of a table in a state."""
    weights = []
    for letter in range(table.letters):
        _, frequencies, _ = follow(table, letter, quantiser, state)
        weights.append(math.prod(frequencies))
    return canonical(package_merge(weights, table.precision))


def package_merge(weights: Sequence[int], p: int) -> list[int]:
    """Clause 6.6: code lengths.  A leaf is its weight and letter, a package its weight and -1."""
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    leaves = [(weights[i], i) for i in order]
    lists = [leaves]
    while len(lists) < p:
        last = [weight for weight, _ in lists[-1]]
        packages = [(a + b, -1) for a, b in zip(last[::2], last[1::2])]
        # Sorting keeps the order of equals: leaves first, and packages in the order of their pairs.
        lists.append(sorted(leaves + packages, key=lambda item: item[0]))
    lengths, taken = [0] * len(weights), 2 * len(weights) - 2
    for items in reversed(lists):
        k = sum(letter >= 0 for _, letter in items[:taken])
        for letter in order[:k]:
            lengths[letter] += 1
        taken = 2 * (taken - k)
    return lengths


TURN = {1: (0, 0, 1, 1), 2: (0, 1, 0, 1, 0, 1, 0, 1)}
NEXT = {
    1: ((0, 2), (2, 0), (1, 3), (3, 1)),
    2: ((0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)),
}


def follow(table: Fields, letter: int, quantiser: int, state: int) -> tuple[list[int], list[int], int]:
    """Clause 6.7: level (half steps if dependent) and frequency of every field of a letter, and the state after it."""
    levels, frequencies = [], []
    for c in table.classes:
        m = letter % (2 * c.q + 1)
        letter //= 2 * c.q + 1
        k, turn = m - c.q, 0
        if c.dependent:
            turn, state = TURN[quantiser][state], NEXT[quantiser][state][k % 2]
        levels.append(2 * k - turn * ((k > 0) - (k < 0)) if c.dependent else k)
        frequencies.append(c.sets[turn][m])
    return levels, frequencies, state


# --- 7 Exact rows ---------------------------------------------------------------------------------------------------


def decode_rows(block: bytes, encoding: int, tokens: int, layer: Fields) -> list[list[float]]:
    """The FP32 values ``[H * D]`` of every token."""
    values, size = tokens * layer.heads * layer.dim, ITEMSIZE[layer.dtype]
    need(encoding in (0, 1), "rows-encoding")
    if encoding == 1:
        need(len(block) >= 4 * size, "rows-length")
        lengths = struct.unpack_from(f"<{size}I", block)
        need(max(lengths) <= values and 4 * size + sum(lengths) == len(block), "rows-length")
        raw, at = bytearray(values * size), 4 * size
        for b, length in enumerate(lengths):
            plane = block[at : at + length]
            raw[b::size] = plane if length == values else inflate(plane, values)
            at += length
        block = bytes(raw)
    need(len(block) == values * size, "rows-length")
    if layer.dtype == 1:  # bfloat16 is the upper half of binary32
        block = b"".join(b"\0\0" + block[at : at + 2] for at in range(0, len(block), 2))
    numbers = struct.unpack(f"<{values}{'e' if layer.dtype == 2 else 'f'}", block)
    n = layer.heads * layer.dim
    return [list(numbers[at : at + n]) for at in range(0, values, n)]


def inflate(frame: bytes, size: int) -> bytes:
    """One Zstandard frame, of ``size`` bytes by what it says and by what it holds."""
    try:
        parameters = zstandard.get_frame_parameters(frame)
        need(parameters.content_size == size and not parameters.dict_id, "rows-length")
        plane = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RefusedError("rows-frame", str(error)) from None
    need(len(plane) == size, "rows-frame")
    return bytes(plane)


# --- 9 Reading, errors, recovery ------------------------------------------------------------------------------------


def open_file(data: bytes) -> Fields:
    """Clause 9.1: ``header``, ``records`` up to the end of the log, whether it is ``torn``, and ``sequences``."""
    header = read_header(data)
    indexed = read_index(data, header)
    records, torn = (indexed, False) if indexed is not None else walk(data, header)
    return Fields(data=data, header=header, records=records, torn=torn, sequences=read_sequences(records, header, torn))


def read_sequences(records: Sequence[Fields], header: Fields, torn: bool) -> list[Fields]:
    by_number: list[list[Fields]] = [[] for _ in range(header.sequences)]
    for record in records:
        if record.type in TOKENS:
            by_number[record.sequence].append(record)
    nothing = read_sequence((), header, torn)
    return [read_sequence(own, header, torn) if own else nothing for own in by_number]


def read_index(data: bytes, header: Fields) -> list[Fields] | None:
    """Clause 9.1, point 2: all records by trailer and INDEX, or None if anything about them is not as it should be."""
    t = fields("magic version reserved offset size salt epoch count rest crc", "4sHHQQ8sII20sI", data[-64:])
    if (t.magic, t.version, t.crc) != (b"DQKT", 1, crc32c(data[-64:-4])) or t.reserved or any(t.rest):
        return None
    if (t.salt, t.size, t.offset % 4096) != (header.salt, len(data), 0):
        return None
    if not header.block_bytes <= t.offset <= t.size - 128 - 64 * t.count:
        return None
    index = record_at(data[t.offset : t.offset + 64], t.offset, header.salt)
    if index is None or (index.type, index.version, index.payload_end) != (INDEX, 1, t.size) or index.epoch != t.epoch:
        return None
    if damage(data, header, index) or 64 * t.count > 256 << 20:
        return None
    records: list[Fields] = []
    at = header.block_bytes
    try:
        for place in range(index.payload, index.payload + 64 * t.count, 64):
            record = record_at(data[place : place + 64], at, header.salt)
            if record is None:
                return None
            check_record(record, header, records)
            records.append(record)
            at = record.end
        check_record(index, header, records)
    except RefusedError:
        return None
    return [*records, index] if at == t.offset else None


def walk(data: bytes, header: Fields) -> tuple[list[Fields], bool]:
    """Clause 9.1, points 3 and 4: the records by their headers, and whether the log is torn."""
    records: list[Fields] = []
    at = header.block_bytes
    while at < len(data):
        record = record_at(data[at : at + 64], at, header.salt)
        if record is None:
            for later in range(align(at + 1, 4096), len(data), 4096):
                behind = record_at(data[later : later + 64], later, header.salt)
                need(behind is None or behind.number < len(records), "record-header")
            break
        check_record(record, header, records)
        if record.end > len(data):
            break
        records.append(record)
        at = record.end
    if records and damage(data, header, records[-1]):
        at = records.pop().offset
    return records, not (records and records[-1].type == INDEX and at == len(data))


def parts(data: bytes, header: Fields, record: Fields) -> list[tuple[int, int, int, str]]:
    """Everything behind a record's table: offset in the payload, size, CRC, and the code of damage to it."""
    payload = data[record.payload : record.payload_end]
    if record.type == PAGES:
        crcs = page_crcs(payload, record, header)
        return [(page.at, page.size, crc, "page-crc") for crc, page in zip(crcs, pages_of(record, header))]
    if record.type == ROWS:
        return [(block.at, block.size, block.crc, "rows-crc") for block in row_blocks(payload, record, header)]
    return [(0, len(payload), record.table_crc, "payload-crc")]


def damage(data: bytes, header: Fields, record: Fields) -> str | None:
    """The reason code of the first thing in a record's payload that is not whole, or None."""
    try:
        for at, size, crc, code in parts(data, header, record):
            need(crc32c(data[record.payload + at : record.payload + at + size]) == crc, code)
    except RefusedError as refused:
        return refused.code
    return None


def read_tokens(file: Fields, layer: int, kind: str, sequence: int = 0) -> list[list[float]]:
    """Clause 9.2: the FP32 values ``[H * D]`` of every token of a sequence."""
    header, tokens = file.header, []
    side = {CODED: "coded", EXACT: "exact", ABSENT: ""}[header.layers[layer].storage]
    for record, first, last in getattr(file.sequences[sequence], side, []):
        payload = file.data[record.payload : record.payload_end]
        read = read_pages if record.type == PAGES else read_rows
        tokens += read(payload, record, header, layer, kind)[first - record.first : last - record.first]
    return tokens


def read_pages(payload: bytes, record: Fields, header: Fields, layer: int, kind: str) -> list[list[float]]:
    """The rows of a layer, its head groups side by side."""
    groups: dict[int, list[list[float]]] = {}
    for crc, page in zip(page_crcs(payload, record, header), pages_of(record, header), strict=True):
        if page.layer == layer:
            stored = payload[page.at : page.at + page.size]
            need(crc32c(stored) == crc, "page-crc")
            groups.setdefault(page.group, []).extend(decode_page(stored, page.profile, kind, page.tokens))
    return [[x for part in parts for x in part] for parts in zip(*groups.values(), strict=True)]


def read_rows(payload: bytes, record: Fields, header: Fields, layer: int, kind: str) -> list[list[float]]:
    blocks = row_blocks(payload, record, header)
    block = next(block for block in blocks if (block.layer, block.kind) == (layer, kind))
    stored = payload[block.at : block.at + block.size]
    need(crc32c(stored) == block.crc, "rows-crc")
    return decode_rows(stored, block.encoding, record.tokens, header.layers[layer])


def verify(file: Fields) -> list[str]:
    """Clause 9.3: the reason codes of everything that is wrong."""
    records, torn, codes = file.records, file.torn, []
    try:
        records, torn = walk(file.data, file.header)
        read_sequences(records, file.header, torn)
    except RefusedError as refused:
        codes.append(refused.code)
        records = file.records
    if torn:
        codes.append("log-torn")
    for record in records:
        codes += verify_record(file.data, file.header, record, records)
    return codes


def verify_record(data: bytes, header: Fields, record: Fields, records: Sequence[Fields]) -> Iterator[str]:
    """Clause 9.3: CRCs, then padding, then what is decoded."""
    payload = data[record.payload : record.payload_end]
    try:
        found = parts(data, header, record)
    except RefusedError as refused:
        yield refused.code
        return
    end = found[0][0]
    for at, size, crc, code in found:
        if any(data[record.payload + end : record.payload + at]):
            yield "padding-nonzero"
        if crc32c(payload[at : at + size]) != crc:
            yield code
        end = at + size
    if any(data[record.payload + end : record.end]):
        yield "padding-nonzero"
    for decode in verify_decoders(payload, header, record):
        try:
            decode()
        except RefusedError as refused:
            yield refused.code
    if record.type == FILL and any(payload):
        yield "padding-nonzero"
    if record.type == INDEX:
        headers = [data[before.offset : before.payload] for before in records[: record.number]]
        expected = index_record(record.offset, headers, header.salt, record.epoch)
        if data[record.offset : record.end] != expected:
            yield "index-mismatch"


def verify_decoders(payload: bytes, header: Fields, record: Fields) -> Iterator[Callable[[], Any]]:
    """Everything in a record that must decode."""
    if record.type == PAGES:
        for crc, page in zip(page_crcs(payload, record, header), pages_of(record, header)):
            stored, profile, tokens = payload[page.at : page.at + page.size], page.profile, page.tokens
            if crc32c(stored) == crc:  # what is damaged is told once
                yield lambda: need(not page_unused(stored, profile, tokens), "page-unused")  # noqa: B023
                for kind in KINDS:
                    yield lambda: decode_page(stored, profile, kind, tokens, strict=True)  # noqa: B023
    if record.type == ROWS:
        for block in row_blocks(payload, record, header):
            stored, layer = payload[block.at : block.at + block.size], header.layers[block.layer]
            yield lambda: decode_rows(stored, block.encoding, record.tokens, layer)  # noqa: B023


def main(paths: Sequence[str]) -> int:
    """Print what files hold; the exit status is 1 if anything is wrong."""
    wrong = 0
    for path in paths:
        try:
            file = open_file(Path(path).read_bytes())
            findings = verify(file)
            tokens = [sequence.tokens for sequence in file.sequences]
            print(f"{path}: {len(file.header.layers)} layers, tokens {tokens}; {findings or 'nothing wrong'}")
            wrong |= bool(findings)
        except RefusedError as refused:
            print(f"{path}: {refused}")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
