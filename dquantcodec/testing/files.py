"""Small ``.dqkv`` files, damage to them, checksums made right again, and a model of writer and reader."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from ..codec import Codec
from ..errors import DQuantError
from ..file import Layer, create
from ..file import open as open_file
from ..file import structs as s
from ..file.header import Header, parse_header
from ..file.reader import Reader
from ..file.records import RecordRules
from .plans import rotated_plan, small_plan

FILE_ID = bytes(range(16))


def layers_of(kinds: Sequence[str]) -> list[Layer]:
    """Layers of these kinds: ``"rotated"``, ``"grouped"``, ``"trellis"`` (coded), ``"exact"`` or ``"absent"``.

    Before the coded ones ``"tiny "`` makes them one head of four.
    """
    made = {
        "rotated": Layer(2, 8, "bfloat16", rotated_plan()),
        "grouped": Layer(2, 8, "float32", small_plan()),
        "trellis": Layer(2, 8, "float16", small_plan(4)),
        "tiny rotated": Layer(1, 4, "bfloat16", rotated_plan(True)),
        "tiny grouped": Layer(1, 4, "float32", small_plan(tiny=True)),
        "tiny trellis": Layer(1, 4, "float16", small_plan(4, True)),
        "exact": Layer(1, 5, "float32", storage="exact"),
        "absent": Layer(1, 3, storage="absent"),
    }
    return [made[kind] for kind in kinds]


Rows = list[tuple[NDArray[Any], NDArray[Any]] | None]


def rows_of(layers: Sequence[Layer], tokens: int, seed: int) -> Rows:
    """Keys and values ``[tokens, H, D]`` of every layer in its dtype, None for absent ones."""
    rng = np.random.default_rng(seed)
    made: Rows = []
    for layer in layers:
        shape = (2, tokens, layer.kv_heads, layer.head_dim)
        keys, values = rng.standard_normal(shape).astype(layer.array_dtype)
        made.append(None if layer.storage == "absent" else (keys, values))
    return made


def file_bytes(kinds: Sequence[str], tokens: int, *, cuts: Sequence[int] = (), seed: int = 0, **options: Any) -> bytes:
    """The bytes of a file of one sequence, appended in portions that end at ``cuts``; ``options`` of :func:`create`.

    Records hold a window, unless ``_record_target`` says more bytes.
    """
    layers = layers_of(kinds)
    rows = rows_of(layers, tokens, seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.dqkv"
        with create(path, layers, _file_id=FILE_ID, **{"_record_target": 1, **options}) as writer:
            for start, stop in zip([0, *cuts], [*cuts, tokens]):
                writer.append(*cut_rows(rows, start, stop))
        return path.read_bytes()


def cut_rows(rows: Rows, start: int, stop: int) -> tuple[list[Any], list[Any]]:
    """Tokens ``start`` to ``stop`` of all layers, as a writer takes them."""
    pairs = [(None, None) if pair is None else (pair[0][start:stop], pair[1][start:stop]) for pair in rows]
    return [keys for keys, _ in pairs], [values for _, values in pairs]


# --- Damage ---------------------------------------------------------------------------------------------------------


def repaired(
    data: bytes, header: bool = True, records: bool = True, bodies: bool = True, rules: RecordRules | None = None,
    first: int = s.BLOCK,
) -> bytes:  # fmt: skip
    """``data`` with checksums made right, as far as its structure can be followed.

    Of the header block, of record headers and their tables, and (``bodies``) of pages, rows and other payloads, so that
    damage reaches what lies behind the checksums.  ``rules`` are those of the header, where the caller has parsed it;
    records before byte ``first`` are left as they are.
    """
    made = bytearray(data)
    size = int.from_bytes(made[12:16], "little")
    if header and s.START.size <= size <= len(made):
        made[124:128] = s.crc32c(bytes(made[128:size]), s.crc32c(bytes(made[:124]))).to_bytes(4, "little")
    if not records or size % s.BLOCK:
        return bytes(made)
    if rules is None:
        found = header_of(bytes(made))
        rules = RecordRules(found) if found else None
    magic = s.RECORD_MAGIC.to_bytes(4, "little")
    for offset in range(max(first, size), len(made) - s.RECORD_BYTES + 1, s.BLOCK):
        if made[offset : offset + 4] == magic:
            _repair_record(made, offset, rules, bodies)
    return bytes(made)


def _repair_record(made: bytearray, offset: int, rules: RecordRules | None, bodies: bool) -> None:
    fields = list(s.RECORD.unpack(made[offset : offset + s.RECORD_BYTES]))
    kind, payload_bytes, tokens, flags = fields[1], fields[3], fields[5], fields[8]
    fields[9] = bytes(made[32:40])
    payload = offset + s.RECORD_BYTES
    end = payload + payload_bytes
    if end <= len(made):
        table_end = end
        if rules is not None and kind == s.PAGES and rules.run.layers and 0 < tokens <= 1 << 16:
            table_end = payload + rules.run.table_bytes(tokens)
            if bodies and rules.run.payload_bytes(tokens) == payload_bytes:
                for number, (_, _, place) in enumerate(rules.run.pages(tokens)):
                    crc = s.crc32c(bytes(made[payload + place.offset : payload + place.offset + place.size]))
                    made[payload + 4 * number : payload + 4 * number + 4] = crc.to_bytes(4, "little")
        elif rules is not None and kind == s.ROWS:
            blocks = 2 * len(rules.rows_layers(flags))
            table_end = payload + s.align(blocks * s.ROWS_ENTRY.size)
            at = table_end
            for entry in range(payload, payload + blocks * s.ROWS_ENTRY.size, s.ROWS_ENTRY.size):
                stored = int.from_bytes(made[entry + 8 : entry + 16], "little")
                if bodies and at + stored <= end:
                    made[entry + 4 : entry + 8] = s.crc32c(bytes(made[at : at + stored])).to_bytes(4, "little")
                at += s.align(min(stored, len(made)))
        elif kind == s.INDEX and payload_bytes >= s.TRAILER.size:
            made[end - 4 : end] = s.crc32c(bytes(made[end - s.TRAILER.size : end - 4])).to_bytes(4, "little")
        if table_end <= end:
            fields[11] = s.crc32c(bytes(made[payload:table_end]))
    body = s.RECORD.pack(*fields)[:-4]
    made[offset : offset + s.RECORD_BYTES] = body + s.crc32c(body).to_bytes(4, "little")


@dataclass(frozen=True)
class FileCase:
    """A whole file, the same file damaged, and whether the damage's checksums were made right."""

    whole: bytes
    data: bytes
    mended: bool

    def __repr__(self) -> str:
        changed = [i for i, (a, b) in enumerate(zip(self.whole, self.data)) if a != b]
        return f"FileCase({len(self.whole)} bytes cut to {len(self.data)}, changed at {changed[:8]})"


#: What :func:`layers_of` makes.
KINDS_OF_LAYERS = ("exact", "rotated", "grouped", "trellis", "absent")


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A small file: some layers of any kind, some tokens, exact ones at both ends."""
    kinds = draw(st.lists(st.sampled_from(KINDS_OF_LAYERS), min_size=1, max_size=3))
    tokens = draw(st.integers(0, 80))
    cuts = sorted(draw(st.lists(st.integers(0, tokens), max_size=3)))
    return file_bytes(
        kinds, tokens, cuts=cuts, sinks=draw(st.integers(0, 3)), recent=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@st.composite
def damaged_files(draw: st.DrawFn) -> FileCase:
    """A file with bytes changed, its end lost, or a block repeated; checksums as they were or made right."""
    whole = draw(files())
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        block = draw(st.integers(0, len(data) // s.BLOCK - 1)) * s.BLOCK
        data[block + draw(st.integers(0, 700))] ^= draw(st.integers(1, 255))
    if draw(st.booleans()):
        del data[draw(st.integers(0, len(data))) :]
    if draw(st.booleans()) and len(data) >= s.BLOCK:
        block = draw(st.integers(0, len(data) // s.BLOCK - 1)) * s.BLOCK
        data += data[block : block + s.BLOCK]
    mended = draw(st.booleans())
    return FileCase(whole, repaired(bytes(data)) if mended else bytes(data), mended)


def header_of(data: bytes) -> Header | None:
    """The header of a file in memory, or None if it is not whole and sound; parsed once for all files that have it."""
    size = int.from_bytes(data[12:16], "little")
    return _parsed(data[:size]) if s.START.size <= size <= len(data) else None


@lru_cache(maxsize=256)
def _parsed(block: bytes) -> Header | None:
    try:
        return parse_header(memoryview(block))
    except DQuantError:
        return None


def reader_of(data: bytes) -> Reader:
    """A reader of bytes in memory.  Raises what :func:`dquantcodec.open` raises."""
    return Reader("bytes", data, header=header_of(data))


def read_all(reader: Reader) -> list[tuple[int, int, str, NDArray[Any]]]:
    """Every stored tensor: sequence, layer, kind and all its tokens."""
    return [
        (sequence.number, layer.index, kind, getattr(layer, kind)[:])
        for sequence in reader.sequences
        for layer in sequence.layers
        if layer.spec.storage != "absent"
        for kind in ("key", "value")
    ]


def files_open_or_say_why(data: bytes) -> None:
    """Any bytes: a typed error, or a reader whose every tensor reads or says why; sound files read altogether."""
    try:
        reader = reader_of(data)
        findings = list(reader.verify())
    except DQuantError as error:
        assert error.code and "bytes" in str(error), error
        return
    try:
        for _, layer, kind, tensor in read_all(reader):
            spec = reader.header.layers[layer]
            assert tensor.shape[1:] == (spec.kv_heads, spec.head_dim), (layer, kind, tensor.shape)
            assert tensor.dtype == spec.array_dtype
    except DQuantError as error:
        assert error.code
        assert findings, f"verification finds nothing, reading says {error}"


# --- Writer and reader against a model ------------------------------------------------------------------------------


class FileMachine(RuleBasedStateMachine):
    """A writer of several sequences, and lists of arrays that say what its file must read as.

    Run it with ``run_state_machine_as_test(FileMachine)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "x.dqkv"

    @initialize(
        kinds=st.lists(st.sampled_from(KINDS_OF_LAYERS), min_size=1, max_size=3),
        sinks=st.integers(0, 3),
        recent=st.integers(0, 9),
        sequences=st.integers(1, 2),
        record_target=st.sampled_from([1, 1 << 20]),
    )
    def begin(self, kinds: list[str], sinks: int, recent: int, sequences: int, record_target: int) -> None:
        self.layers, self.sinks, self.recent = layers_of(kinds), sinks, recent
        self.writer = create(
            self.path, self.layers, sinks=sinks, recent=recent, sequences=sequences, _record_target=record_target
        )
        self.model: list[list[Rows]] = [[] for _ in range(sequences)]
        self.finished: set[int] = set()

    @rule(sequence=st.integers(0, 1), tokens=st.integers(0, 70), seed=st.integers(0, 99))
    def append(self, sequence: int, tokens: int, seed: int) -> None:
        sequence %= len(self.model)
        rows = rows_of(self.layers, tokens, seed)
        if sequence in self.finished:
            try:
                self.writer.append(*cut_rows(rows, 0, tokens), sequence=sequence)
            except DQuantError as error:
                assert error.code == "sequence-finished"
                return
            raise AssertionError("a finished sequence took tokens")
        self.writer.append(*cut_rows(rows, 0, tokens), sequence=sequence)
        self.model[sequence].append(rows)

    @rule(sequence=st.integers(0, 1))
    def finish(self, sequence: int) -> None:
        sequence %= len(self.model)
        self.writer.finish(sequence)
        if self.model[sequence]:
            self.finished.add(sequence)

    @invariant()
    def no_file_before_it_is_whole(self) -> None:
        assert not self.path.exists()

    @precondition(lambda self: any(self.model))
    @rule(data=st.data())
    def close_and_read(self, data: st.DataObject) -> None:
        """Close, open again and again, compare everything and a few slices, and begin anew."""
        self.writer.close()
        for _ in range(2):
            with open_file(self.path) as reader:
                assert not reader.torn and reader.indexed and not list(reader.verify())
                for number, sequence in enumerate(reader.sequences):
                    for index, layer in enumerate(sequence.layers):
                        if layer.spec.storage == "absent":
                            continue
                        for kind, expected in zip(("key", "value"), self._expected(number, index)):
                            tensor = getattr(layer, kind)
                            assert tensor[:].tobytes() == expected.tobytes(), (number, index, kind)
                            start, stop = data.draw(st.integers(-99, 99)), data.draw(st.integers(-99, 99))
                            assert tensor[start:stop].tobytes() == expected[start:stop].tobytes()
        self.path.unlink()
        sequences = len(self.model)
        self.writer = create(self.path, self.layers, sinks=self.sinks, recent=self.recent, sequences=sequences)
        self.model = [[] for _ in range(sequences)]
        self.finished = set()

    def _expected(self, sequence: int, index: int) -> list[NDArray[Any]]:
        """What a layer reads as: exact rows, and between the exact ends of coded layers a round trip of the codec."""
        layer = self.layers[index]
        shape = (0, layer.kv_heads, layer.head_dim)
        pairs = [rows[index] for rows in self.model[sequence]]
        made = [
            np.concatenate([np.zeros(shape, layer.array_dtype), *(pair[kind] for pair in pairs if pair is not None)])
            for kind in (0, 1)
        ]
        stop = max(self.sinks, len(made[0]) - self.recent)
        if layer.plan is not None and stop > self.sinks:
            codec = Codec(layer.plan)
            pages = codec.encode(*(array[self.sinks : stop] for array in made))
            for array, decoded in zip(made, codec.decode(pages, dtype=layer.array_dtype)):
                array[self.sinks : stop] = decoded
        return made

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.abort()
        self._folder.cleanup()
