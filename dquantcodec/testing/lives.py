"""The life of a file against a model: appended to, rewound, opened again, repacked, cut for ranks and joined.

The model is trivial: the rows that every sequence was given and has not taken back.  A token reads as it was given, or,
where pages hold it, as the codec decodes its window; whatever happens to the file, it never changes again after that.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from numpy.typing import NDArray

from ..codec import Codec
from ..file import Layer, append, create, repack, reshard
from ..file import open as open_file
from ..file.reader import Reader
from ..file.tensor import LayerReader
from ..page_layout import KINDS
from .files import Rows, cut_rows, rows_of
from .plans import SMALL

#: Two head groups, so that two ranks can share the pages without a new coding.
LAYERS = (
    Layer(4, 8, "float32", SMALL, head_groups=2),
    Layer(2, 5, "bfloat16", storage="exact"),
    Layer(2, 3, storage="absent"),
)

#: Of every sequence, layer and kind: what reads.
Reading = list[NDArray[Any]]


def reading(reader: Reader) -> Reading:
    """All tokens of all stored layers."""
    return [
        getattr(layer, kind)[:]
        for sequence in reader.sequences
        for layer in sequence.layers
        if layer.spec.storage != "absent"
        for kind in KINDS
    ]


def same(one: Reading, other: Reading) -> bool:
    """The same tokens, bit for bit."""
    return [(x.shape, x.tobytes()) for x in one] == [(x.shape, x.tobytes()) for x in other]


class LifeMachine(RuleBasedStateMachine):
    """A file through any calls, and rows that say what it must read as.

    Run it with ``run_state_machine_as_test(LifeMachine)``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "x.dqkv"
        self.layers = list(LAYERS)

    @initialize(
        sinks=st.integers(0, 3),
        recent=st.integers(0, 9),
        sequences=st.integers(1, 2),
        record_target=st.sampled_from([1, 1 << 20]),
    )
    def begin(self, sinks: int, recent: int, sequences: int, record_target: int) -> None:
        self.record_target = record_target
        self.writer = create(
            self.path, self.layers, sinks=sinks, recent=recent, sequences=sequences, _record_target=record_target
        )
        self.model: list[Rows] = [rows_of(self.layers, 0, 0) for _ in range(sequences)]
        #: Of every sequence the lengths it was cut to; a page that ends there may have been coded with more tokens.
        self.cuts: list[set[int]] = [set() for _ in range(sequences)]

    @rule(sequence=st.integers(0, 1), tokens=st.integers(0, 70), seed=st.integers(0, 99))
    def append(self, sequence: int, tokens: int, seed: int) -> None:
        sequence %= len(self.model)
        rows = rows_of(self.layers, tokens, seed)
        self.writer.append(*cut_rows(rows, 0, tokens), sequence=sequence)
        self.model[sequence] = [
            None if a is None or b is None else (np.concatenate([a[0], b[0]]), np.concatenate([a[1], b[1]]))
            for a, b in zip(self.model[sequence], rows)
        ]

    @rule(sequence=st.integers(0, 1), back=st.integers(0, 80))
    def rewind(self, sequence: int, back: int) -> None:
        sequence %= len(self.model)
        tokens = max(0, self._tokens(sequence) - back)
        self.writer.rewind(tokens, sequence)
        self.cuts[sequence].add(tokens)
        self.model[sequence] = [
            None if pair is None else (pair[0][:tokens], pair[1][:tokens]) for pair in self.model[sequence]
        ]

    @rule()
    def flush(self) -> None:
        """A reader sees all of it while the writer goes on."""
        self.writer.flush()
        with open_file(self.path) as reader:
            self._check(reader)

    @rule(start=st.integers(-99, 99), stop=st.integers(-99, 99))
    def close_and_open_again(self, start: int, stop: int) -> None:
        self.writer.close()
        with open_file(self.path, mode="strict") as reader:
            assert not list(reader.verify())
            self._check(reader)
            for array, part in zip(reading(reader), self._slices(reader, start, stop)):
                assert array[start:stop].tobytes() == part.tobytes()
        self.writer = append(self.path, _record_target=self.record_target)

    @rule()
    def repack(self) -> None:
        self.writer.close()
        with open_file(self.path) as reader:
            before = reading(reader)
            repack(reader, self.path)
        with open_file(self.path, mode="strict") as reader:
            assert same(reading(reader), before) and reader.accounting().dead_bytes == 0
            self._check(reader)
        self.writer = append(self.path, _record_target=self.record_target)

    @rule()
    def cut_for_two_ranks_and_join(self) -> None:
        self.writer.close()
        parts = [self.path.with_name(f"{rank}.dqkv") for rank in range(2)]
        joined = self.path.with_name("joined.dqkv")
        with open_file(self.path) as reader:
            before = reading(reader)
            assert reshard([reader], parts) == []
        with open_file(parts[0]) as first, open_file(parts[1]) as second:
            halves = [np.concatenate(pair, axis=1) for pair in zip(reading(first), reading(second))]
            assert same(halves, before)
            assert reshard([second, first], [joined]) == []
        joined.replace(self.path)
        with open_file(self.path, mode="strict") as reader:
            assert same(reading(reader), before) and not list(reader.verify())
            self._check(reader)
        self.writer = append(self.path, _record_target=self.record_target)

    def _tokens(self, sequence: int) -> int:
        pair = self.model[sequence][0]
        assert pair is not None
        return len(pair[0])

    def _slices(self, reader: Reader, start: int, stop: int) -> Reading:
        return [
            getattr(layer, kind)[start:stop]
            for sequence in reader.sequences
            for layer in sequence.layers
            if layer.spec.storage != "absent"
            for kind in KINDS
        ]

    def _check(self, reader: Reader) -> None:
        """Every token is as given, or what the codec makes of its window."""
        for number, (sequence, rows) in enumerate(zip(reader.sequences, self.model)):
            assert sequence.tokens == self._tokens(number)
            for layer, pair in zip(sequence.layers, rows):
                if pair is None:
                    continue
                for kind in KINDS:
                    found = getattr(layer, kind)[:]
                    wanted = self._wanted(layer, kind, pair, found, self.cuts[number])
                    assert found.tobytes() == wanted.tobytes(), (number, layer.index, kind)

    def _wanted(
        self,
        layer: LayerReader,
        kind: str,
        pair: tuple[NDArray[Any], NDArray[Any]],
        found: NDArray[Any],
        cuts: set[int],
    ) -> NDArray[Any]:
        wanted = pair[KINDS.index(kind)].copy()
        for stretch in layer.stretches:
            if not stretch.paged:
                continue
            head = stretch.record.header
            # Of a page that was cut by rewinding the tokens it was coded with are gone: it reads as it does.
            whole = stretch.tokens // 32 * 32 if stretch.end in cuts else stretch.tokens
            piece = slice(head.first, head.first + whole)
            for heads, plan in zip(layer.spec.groups, layer.spec.plans):
                codec = Codec(plan)
                pages = codec.encode(*(array[piece, heads] for array in pair))
                wanted[piece, heads] = codec.decode_kind(pages, kind, dtype=wanted.dtype)
            wanted[piece.stop : stretch.end] = found[piece.stop : stretch.end]
        return wanted

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()
            with open_file(self.path, mode="strict") as reader:
                self._check(reader)
        self._folder.cleanup()
