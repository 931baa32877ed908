"""Tiny ``.dqkv`` files record by record: what ``tools/vectors.py`` builds its vectors from.

Numbers come from integer arithmetic alone, letter tables from small integer weights, so that no library's last bit and
no generator's stream decides what a vector holds.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log2
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from dquantcodec import tables
from dquantcodec.codec import Codec
from dquantcodec.file import Layer
from dquantcodec.file import structs as s
from dquantcodec.file.header import Header
from dquantcodec.file.info import Info
from dquantcodec.file.layer import KINDS
from dquantcodec.file.records import RecordRules
from dquantcodec.file.rows import encode_rows
from dquantcodec.grouping import Grouping, Levels, Table
from dquantcodec.plan import Plan, StreamPlan, grouped, least_words
from dquantcodec.rotate import random_signs

FILE_ID = b"vectors of .dqkv"
assert len(FILE_ID) == 16

Edit = Callable[[int, NDArray[np.uint8]], None]
"""Changes pages uint8 ``[windows, page_bytes]`` of a layer in place, before their checksums are taken."""


# --- Numbers --------------------------------------------------------------------------------------------------------


def noise(count: int, seed: int) -> NDArray[np.float32]:
    """Bell-shaped multiples of 1/256 between -4 and 4, by a congruential generator."""
    state = (seed * 2654435761 + 12345) % 2**32
    out = []
    for _ in range(count):
        total = 0
        for _ in range(4):
            state = (state * 1664525 + 1013904223) % 2**32
            total += state >> 23
        out.append(total - 1022)
    return np.array(out, np.float32) / np.float32(256)


def source(layer: Layer, place: int, kind: int, sequence: int, first: int, tokens: int) -> NDArray[Any]:
    """Rows ``[tokens, H, D]`` in the layer's dtype; the same whichever tokens are asked for together."""
    shape = (layer.kv_heads, layer.head_dim)
    channels = np.arange(layer.values).reshape(shape)
    width, mean = (1 + channels % 5) / np.float32(4), (channels % 3 - 1) * np.float32(1 - kind)
    seeds = [(((sequence * 64 + place) * 2 + kind) << 16) + token for token in range(first, first + tokens)]
    rows = [noise(layer.values, seed).reshape(shape) * width + mean for seed in seeds]
    return np.array(rows, np.float32).reshape(tokens, *shape).astype(layer.array_dtype)


# --- Plans ----------------------------------------------------------------------------------------------------------


def stream(
    heads: int, dim: int, coder: str = "rans", levels: int = 5, letter: int = 2, precision: int = 10, **changes: Any
) -> StreamPlan:
    """A rotated stream with a table of triangular weights and a container that most tokens fill."""
    weights = [3 * levels - 3 * abs(2 * m - (levels - 1)) + 2 for m in range(levels)]
    build = tables.frequencies if coder == "rans" else tables.prefix_frequencies
    frequencies = build(tables.letter_weights(weights, letter), precision)
    options: dict[str, Any] = {"words": 2, "substreams": 1, "mean": False, **changes}
    if options.get("grid") == "mid-tread":
        options["step"] = 0.5
    plan = StreamPlan(coder, levels, letter, precision, frequencies=frequencies, **options)
    letters = heads // plan.substreams * -(-dim // letter)
    bits = letters * letter * log2(levels) * 0.9
    words = max(2, least_words(plan, letters), ceil(bits / (8 * plan.word_bytes)) + 1)
    return replace(plan, words=changes.get("words", words))


def rotated(heads: int, dim: int, key: StreamPlan, value: StreamPlan, window: int = 32, name: str = "vector") -> Plan:
    return Plan(heads, dim, window, random_signs(heads, dim, seed=dim), key, value, name)


def simple(heads: int, dim: int, window: int = 32, **options: Any) -> Plan:
    """The same stream for keys and values."""
    return rotated(heads, dim, stream(heads, dim, **options), stream(heads, dim, **options), window)


def levels_of(most: int, gain: int = 256, dependent: bool = False) -> Levels:
    """A class whose frequencies fall by a third from level to level."""
    falling = [max(1, 1500 * 2**m // 3**m) for m in range(1, most + 1)]
    upper = [2**14 - 2 * sum(falling), *falling]
    if not dependent:
        return Levels((*upper[:0:-1], *upper), gain)
    second = [upper[0] - 2000, upper[1] + 1000, *upper[2:]]
    return Levels((*upper[:0:-1], *upper), gain, (*second[:0:-1], *second))


def grouping(
    heads: int,
    dim: int,
    classes: Sequence[Levels],
    used: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, int]],
    states: int = 1,
    precision: int = 10,
) -> Grouping:
    """Heads backwards, channels in steps of seven; groups take in turn the tables ``used`` that fit them."""
    coded = sum(letters * fields for letters, fields in shapes)
    channels = [7 * d % dim if dim % 7 else dim - 1 - d for d in range(coded)]
    fitting = [[n for n, classes in enumerate(used) if len(classes) == fields] for _, fields in shapes]
    choice = [[numbers[(h + g) % len(numbers)] for g, numbers in enumerate(fitting)] for h in range(heads)]
    return Grouping(
        head_dim=dim,
        classes=tuple(classes),
        tables=tuple(Table(tuple(numbers), precision) for numbers in used),
        letters=tuple(letters for letters, _ in shapes),
        fields=tuple(fields for _, fields in shapes),
        choice=np.array(choice, np.uint8),
        order=np.array([[h * dim + d for d in channels] for h in reversed(range(heads))], np.uint16),
        states=states,
    )


def grouped_stream(found: Grouping, substreams: int = 1, mean: bool = False, **changes: Any) -> StreamPlan:
    bits = 5 * sum(found.letters) * found.heads // substreams
    options = {"words": bits // 32 + 2, "step": 0.5, "gain": "least-squares", **changes}
    return grouped(options["words"], substreams, mean, options["step"], options["gain"], found)


def by_groups(found: Grouping, window: int = 32, **options: Any) -> Plan:
    """The same grouped stream for keys and values."""
    one = grouped_stream(found, **options)
    return rotated(found.heads, found.head_dim, one, one, window)


# --- Files ----------------------------------------------------------------------------------------------------------


class File:
    """A file that grows by the records asked for; they hold what :func:`source` says of their tokens."""

    def __init__(
        self,
        layers: Sequence[Layer],
        sequences: int = 1,
        sinks: int = 0,
        recent: int = 0,
        scale: float = 1.0,
        **info: Any,
    ) -> None:
        resolved = tuple(layer.resolved(number) for number, layer in enumerate(layers))
        self.header = Header(FILE_ID, resolved, sequences, sinks, recent, Info(writer="vectors", **info))
        self.rules = RecordRules(self.header)
        self.data = self.header.pack()
        self.headers: list[bytes] = []
        self.epoch = 0
        self.scale = scale

    def record(self, kind: int, payload: bytes, crc: int | None = None, **fields: Any) -> File:
        """Any record; ``crc`` is that of the whole payload unless it is given."""
        head = s.RecordHeader(
            type=kind,
            payload_bytes=len(payload),
            table_crc=s.crc32c(payload) if crc is None else crc,
            **{
                "first": 0, "tokens": 0, "sequence": 0, "number": len(self.headers), "salt": FILE_ID[:8],
                "epoch": self.epoch, **fields,
            },
        )  # fmt: skip
        self.headers.append(head.pack())
        self.data += (self.headers[-1] + payload).ljust(s.align(64 + len(payload), s.BLOCK), b"\0")
        return self

    def pages(self, first: int, tokens: int, sequence: int = 0, edit: Edit | None = None) -> File:
        run = self.rules.run
        stored: list[bytes] = []
        for place, heads, plan, layout in run.slots:
            rows = [self._rows(place, kind, sequence, first, tokens).astype(np.float32)[:, heads] for kind in (0, 1)]
            pages = Codec(plan).encode(*(row * np.float32(self.scale) for row in rows)).data.copy()
            if edit:
                edit(place, pages)
            used = layout.bytes_for((tokens - 1) % run.window + 1)
            stored += [page.tobytes() for page in pages[:-1]] + [pages[-1][:used].tobytes()]
        table = struct.pack(f"<{len(stored)}I", *map(s.crc32c, stored)).ljust(run.table_bytes(tokens), b"\0")
        return self.record(
            s.PAGES, table + b"".join(stored), s.crc32c(table), first=first, tokens=tokens, sequence=sequence
        )

    def rows(
        self, first: int, tokens: int, sequence: int = 0, exact_only: bool = False, encoding: int | None = None,
        edit: Callable[[NDArray[Any]], None] | None = None,
    ) -> File:  # fmt: skip
        flags = s.EXACT_ONLY if exact_only else 0
        table, blocks = b"", b""
        for place in self.rules.rows_layers(flags):
            for kind in range(len(KINDS)):
                rows = self._rows(place, kind, sequence, first, tokens)
                if edit:
                    edit(rows)
                number, block = encode_rows(rows) if encoding is None else forced(rows, encoding)
                table += s.ROWS_ENTRY.pack(number, bytes(3), s.crc32c(block), len(block))
                blocks += block.ljust(s.align(len(block)), b"\0")
        table = table.ljust(s.align(len(table)), b"\0")
        return self.record(
            s.ROWS, table + blocks, s.crc32c(table), first=first, tokens=tokens, sequence=sequence, flags=flags
        )

    def rewind(self, token: int, sequence: int = 0) -> File:
        return self.record(3, b"", first=token, sequence=sequence)

    def fill(self, size: int) -> File:
        return self.record(0x8003, bytes(size))

    def index(self) -> File:
        """The INDEX; what comes behind it is another epoch."""
        record = s.index_record(len(self.data), self.headers, FILE_ID[:8], self.epoch)
        self.headers.append(record[:64])
        self.data += record
        self.epoch += 1
        return self

    def _rows(self, place: int, kind: int, sequence: int, first: int, tokens: int) -> NDArray[Any]:
        return source(self.header.layers[place], place, kind, sequence, first, tokens)


def forced(rows: NDArray[Any], encoding: int) -> tuple[int, bytes]:
    """A block in the encoding asked for; planes alternately compressed and as they are, where the former is shorter."""
    raw, size = rows.tobytes(), rows.dtype.itemsize
    if encoding == 0:
        return 0, raw
    planes = [raw[byte::size] for byte in range(size)]
    packed = [zstandard.ZstdCompressor(level=19, write_checksum=True).compress(plane) for plane in planes]
    chosen = [small if len(small) < len(plane) else plane for plane, small in zip(planes, packed, strict=True)]
    return 1, struct.pack(f"<{size}I", *map(len, chosen)) + b"".join(chosen)


def with_header_crc(data: bytes) -> bytes:
    """``data`` with the header block's checksum made right again."""
    size = min(int.from_bytes(data[12:16], "little"), len(data))
    crc = s.crc32c(data[128:size], s.crc32c(data[:124]))
    return data[:124] + crc.to_bytes(4, "little") + data[128:]


def put(data: bytes, offset: int, form: str, *values: Any) -> bytes:
    """``data`` with numbers written over what stands at ``offset``."""
    packed = struct.pack("<" + form, *values)
    return data[:offset] + packed + data[offset + len(packed) :]
