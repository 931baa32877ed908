"""Appending: flushes, sealing, rewinds, several sessions, and what readers see of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import FILE_ID, SMALL, expected, part, same, tensors, write
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import dquantcodec.file as dqkv
from dquantcodec.codec import Codec
from dquantcodec.errors import ChecksumError, DQuantError, IdentityError, InputError, TruncatedError
from dquantcodec.file import Layer, append, create, repack
from dquantcodec.file.structs import PAGES, REWIND, ROWS

LAYERS = [Layer(2, 8, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact"), Layer(1, 3, storage="absent")]


def code_of(action: Callable[[], Any]) -> str:
    with pytest.raises(DQuantError) as caught:
        action()
    return caught.value.code


def types(path: Path) -> list[str]:
    with dqkv.open(path) as reader:
        return [record.header.type_name for record in reader.log.records]


class Model:
    """What a sequence must hold: the rows given, whichever way they are stored."""

    def __init__(self, layers: list[Layer], room: int, seed: int = 0) -> None:
        self.layers = layers
        self.source = tensors(layers, room, seed)
        self.taken = 0
        self.rows: list[list[NDArray[Any]]] = [
            [np.asarray(array)[:0] for array in pair] for pair in self.source if pair[0] is not None
        ]

    def next(self, tokens: int) -> tuple[list[Any], list[Any]]:
        """Fresh tokens, as :meth:`Writer.append` takes them."""
        given = part(self.source, self.taken, self.taken + tokens)
        self.taken += tokens
        fresh = [[k, v] for k, v in zip(*given) if k is not None]
        self.rows = [[np.concatenate([a, b]) for a, b in zip(old, new)] for old, new in zip(self.rows, fresh)]
        return given

    def cut(self, tokens: int) -> None:
        self.rows = [[array[:tokens] for array in pair] for pair in self.rows]

    @property
    def tokens(self) -> int:
        return len(self.rows[0][0])

    def check(self, sequence: Any) -> None:
        """Every token is exact, or what the codec makes of its window; windows are where the stretches say."""
        assert sequence.tokens == self.tokens
        present = [layer for layer in sequence.layers if layer.spec.storage != "absent"]
        for layer, pair in zip(present, self.rows):
            for kind, rows in zip(("key", "value"), pair):
                wanted = rows.copy()
                for stretch in layer.stretches:
                    if stretch.paged:
                        # A page that a rewind cut was encoded with tokens that are gone; its own test looks at those.
                        head = stretch.record.header
                        whole = stretch.tokens if stretch.end == head.end else stretch.tokens // 32 * 32
                        piece = slice(head.first, head.first + whole)
                        codec = Codec(layer.plan)
                        pages = codec.encode(pair[0][piece], pair[1][piece])
                        wanted[piece] = codec.decode_kind(pages, kind, dtype=wanted.dtype)
                        wanted[piece.stop : stretch.end] = getattr(layer, kind)[piece.stop : stretch.end]
                assert same(getattr(layer, kind)[:], wanted)


def test_a_session_while_decoding(tmp_path: Path) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 400)
    with create(path, LAYERS, recent=8, sinks=2) as writer:
        writer.append(*model.next(50))
    held = types(path)
    with append(path, _record_target=1) as writer:
        for count in (1, 1, 40, 7):
            writer.append(*model.next(count))
            writer.flush()
            with dqkv.open(path) as reader:
                assert reader.torn and not reader.indexed
                model.check(reader.sequences[0])
        writer.append(*model.next(3))
        with dqkv.open(path) as reader:
            assert reader.tokens == model.tokens - 3
    with dqkv.open(path) as reader:
        assert not reader.torn and reader.indexed and list(reader.verify()) == []
        model.check(reader.sequences[0])
        assert types(path)[: len(held)] == held
        assert {record.header.epoch for record in reader.log.records} == {0, 1}
        layer = reader.layers[0]
        assert (layer.sinks, layer.recent) == (2, (model.tokens - 42 - 8) % 32 + 8)
        assert reader.accounting().dead_bytes > 0
    with append(path):  # nothing to add: not a byte changes
        pass
    assert types(path)[-1] == "INDEX" and types(path).count("INDEX") == 2


def test_flushed_tokens_are_exact_until_their_window_is_full(tmp_path: Path) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 100)
    create(path, LAYERS, recent=0, sinks=0).close()
    with append(path) as writer:
        writer.append(*model.next(31))
        writer.flush()
        writer.flush()
        with dqkv.open(path) as reader:
            assert [stretch.record.header.type for stretch in reader.layers[0].stretches] == [ROWS]
            assert reader.layers[0].key[:].tobytes() == model.rows[0][0].tobytes()
        writer.append(*model.next(6))
        writer.flush()
        with dqkv.open(path) as reader:
            # The pages cover flushed rows and one new token, whose exact layer follows alone.
            coded, exact = (reader.layers[place].stretches for place in (0, 1))
            assert [(s.record.header.type, s.first, s.end) for s in coded] == [(PAGES, 0, 32), (ROWS, 32, 37)]
            assert [(s.record.header.flags, s.first, s.end) for s in exact] == [(0, 0, 31), (1, 31, 32), (0, 32, 37)]
            model.check(reader.sequences[0])


def test_whole_windows_alone_leave_nothing_dead(tmp_path: Path) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 200)
    with create(path, LAYERS, recent=5, sinks=1) as writer:
        for tokens in range(1, 151):
            writer.append(*model.next(1))
            writer.flush(newest=False)
            with dqkv.open(path) as reader:
                assert reader.tokens == (max(0, tokens - 6) // 32 * 32 + 1)
    with dqkv.open(path) as reader:
        model.check(reader.sequences[0])
        assert reader.accounting().dead_bytes == 0


@pytest.mark.parametrize("cut", [1, 2, 20, 34, 40, 66, 70, 75, 79])
def test_rewind_and_go_on(tmp_path: Path, cut: int) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 200)
    with create(path, LAYERS, recent=4, sinks=2, _record_target=1 << 14) as writer:
        writer.append(*model.next(76))
        writer.flush()
        writer.append(*model.next(3))
        with dqkv.open(path) as reader:
            before = [reader.layers[0].key[:].copy(), reader.layers[0].value[:].copy()]
        writer.rewind(cut)
        assert writer.tokens() == cut
        model.cut(cut)
        with dqkv.open(path) as reader:
            assert reader.tokens == min(cut, 76)
            tensors_now = reader.layers[0].key, reader.layers[0].value
            assert all(same(now[:], was[: min(cut, 76)]) for now, was in zip(tensors_now, before))
        writer.append(*model.next(50))
        assert code_of(lambda: writer.rewind(cut + 51)) == code_of(lambda: writer.rewind(-1)) == "rewind-tokens"
    with dqkv.open(path) as reader:
        assert list(reader.verify()) == [] and (REWIND in [r.header.type for r in reader.log.records]) == (cut < 76)
        model.check(reader.sequences[0])
    repack_and_compare(path)


def repack_and_compare(path: Path) -> None:
    """Repacked, every token reads the same, nothing is dead, and attention sees the same tokens."""
    packed = path.with_name("packed.dqkv")
    with dqkv.open(path) as reader:
        size = repack(reader, packed, _file_id=FILE_ID)
        assert size == packed.stat().st_size
        with dqkv.open(packed) as other:
            assert list(other.verify()) == [] and other.accounting().dead_bytes == 0
            assert {record.header.epoch for record in other.log.records} == {0}
            assert other.header.layers == reader.header.layers or other.header.info.writer
            for mine, theirs in zip(reader.sequences, other.sequences):
                assert mine.tokens == theirs.tokens
                for a, b in zip(mine.layers, theirs.layers):
                    if a.spec.storage != "absent":
                        assert same(a.key[:], b.key[:]) and same(a.value[:], b.value[:])
                    if a.spec.storage == "coded" and mine.tokens:
                        attention_is_that_of_the_tokens(a)
        # What is packed already is packed to the same bytes.
        with dqkv.open(packed) as other:
            repack(other, path.with_name("again.dqkv"), _file_id=FILE_ID)
        assert path.with_name("again.dqkv").read_bytes() == packed.read_bytes()


def attention_is_that_of_the_tokens(layer: Any) -> None:
    query = np.random.default_rng(1).standard_normal((layer.spec.kv_heads, layer.spec.head_dim)).astype(np.float32)
    out, sums = layer.attend(query)
    keys, values = (tensor.read(dtype=np.float32).astype(np.float64) for tensor in (layer.key, layer.value))
    logits = np.einsum("hd,thd->ht", query, keys) / np.sqrt(layer.spec.head_dim)
    weights = np.exp(logits - logits.max(1, keepdims=True))
    wanted = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), values)
    assert np.allclose(out, wanted, atol=1e-3) and np.allclose(sums, np.log(weights.sum(1)) + logits.max(1), atol=1e-3)


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "flush", "rewind", "reopen"]), st.integers(0, 1), st.integers(0, 70)
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40)
@given(
    calls=CALLS,
    first=st.integers(0, 1),
    last=st.integers(2, 3),
    sinks=st.integers(0, 5),
    recent=st.integers(0, 40),
    target=st.sampled_from([1, 5000, 1 << 20]),
)
def test_any_sequence_of_calls(
    calls: list[tuple[str, int, int]],
    first: int,
    last: int,
    sinks: int,
    recent: int,
    target: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("calls") / "x.dqkv"
    models = [Model(LAYERS[first:last], 12 * 70, seed) for seed in range(2)]
    writer = create(path, LAYERS[first:last], sinks=sinks, recent=recent, sequences=2, _record_target=target)
    for call, number, size in calls:
        model = models[number]
        if call == "append":
            writer.append(*model.next(size), number)
        elif call == "rewind":
            tokens = max(0, model.tokens - 2 * size)
            writer.rewind(tokens, number)
            model.cut(tokens)
        elif call == "flush":
            writer.flush()
            with dqkv.open(path) as reader:
                for one, sequence in zip(models, reader.sequences):
                    one.check(sequence)
        else:
            writer.close()
            writer = append(path, _record_target=target)
    writer.close()
    with dqkv.open(path, mode="strict") as reader:
        assert list(reader.verify()) == []
        for one, sequence in zip(models, reader.sequences):
            one.check(sequence)
    with dqkv.open(path, mode="salvage") as reader:
        assert reader.lost == ()
        for one, sequence in zip(models, reader.sequences):
            one.check(sequence)
    repack_and_compare(path)


def test_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 200)
    with create(path, LAYERS, recent=4) as writer:
        writer.append(*model.next(60))
    with dqkv.open(path) as reader, append(path) as writer:
        before = reader.layers[0].key[:].copy()
        writer.rewind(7)
        model.cut(7)
        writer.append(*model.next(90))
        writer.flush()
        assert reader.tokens == 60 and same(reader.layers[0].key[:], before) and list(reader.verify()) == []


def test_one_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 200)
    with create(path, LAYERS) as writer:
        writer.append(*model.next(10))
        writer.flush()
        assert code_of(lambda: append(path)) == "file-locked"
        with dqkv.open(path) as reader:  # closing any handle of the file must not lose the lock
            assert reader.tokens == 10
        assert code_of(lambda: append(path)) == "file-locked"
    before = path.read_bytes()
    with append(path) as writer:
        assert code_of(lambda: append(path)) == "file-locked"
    assert path.read_bytes() == before
    with pytest.raises(IdentityError):
        append(path, expect={"layers": 9})
    assert code_of(lambda: append(path, threads=0)) == "input-threads"
    with pytest.raises(FileNotFoundError):
        append(tmp_path / "none.dqkv")
    append(path).close()  # the refusals above left no lock behind


def test_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = write_some(tmp_path)

    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    assert code_of(lambda: append(path)) == "lock-unsupported"
    with append(path, lock=False) as writer:
        assert writer.tokens() == 60


def write_some(folder: Path) -> Path:
    path = folder / "x.dqkv"
    write(path, LAYERS, tensors(LAYERS, 60), sinks=2, recent=4)
    return path


def test_leaving_by_an_exception_keeps_what_was_flushed(tmp_path: Path) -> None:
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 200)
    with pytest.raises(KeyboardInterrupt), create(path, LAYERS) as writer:
        writer.append(*model.next(30))
        writer.flush()
        writer.append(*part(model.source, 30, 40))
        raise KeyboardInterrupt
    with dqkv.open(path, mode="strict") as reader:
        model.check(reader.sequences[0])
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.dqkv"]
    with pytest.raises(InputError, match="token 33"), append(path) as writer:
        keys, values = part(model.source, 30, 200)
        keys[0] = keys[0].copy()
        keys[0][3, 0, 0] = np.nan
        writer.append(keys, values)
    with dqkv.open(path, mode="strict") as reader:
        model.check(reader.sequences[0])


def test_newest_tokens_that_are_not_finite_stay_exact(tmp_path: Path) -> None:
    """A file may hold NaN among its newest tokens; going on must not fail when their window is full."""
    path, model = tmp_path / "x.dqkv", Model(LAYERS, 300)
    np.asarray(model.source[0][0])[40, 1, 2] = np.nan
    with create(path, LAYERS, recent=50, sinks=1) as writer:
        writer.append(*model.next(51))
    with append(path) as writer:
        writer.append(*model.next(160))
    with dqkv.open(path) as reader:
        stretches = [(s.paged, s.first, s.end) for s in reader.layers[0].stretches]
        assert stretches == [(False, 0, 1), (True, 1, 33), (False, 33, 51), (True, 51, 147), (False, 147, 211)]
        assert np.isnan(reader.layers[0].key[40, 1, 2])
        assert list(reader.verify()) == []
    repack_and_compare_exact(path)


def repack_and_compare_exact(path: Path) -> None:
    with dqkv.open(path) as reader:
        repack(reader, path.with_name("packed.dqkv"))
        with dqkv.open(path.with_name("packed.dqkv")) as other:
            assert other.layers[0].key[:].tobytes() == reader.layers[0].key[:].tobytes()
            assert len(other.layers[0].page_runs()) == 2
            assert code_of(other.layers[0].pages) == "layer-page-runs"


def test_strict_mode_and_modes(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    data = path.read_bytes()
    dqkv.open(path, mode="strict").close()
    assert code_of(lambda: dqkv.open(path, mode="lenient")) == "open-mode"
    path.write_bytes(data[:-1])
    with pytest.raises(TruncatedError) as caught:
        dqkv.open(path, mode="strict")
    assert caught.value.code == "log-torn" and str(path) in str(caught.value)
    append(path).close()  # closes it again, at the same tokens
    with dqkv.open(path, mode="strict") as reader:
        assert reader.tokens == 60 and list(reader.verify()) == []


def test_appending_reports_damage_and_writes_nothing(tmp_path: Path) -> None:
    path = write_some(tmp_path)
    data = bytearray(path.read_bytes())
    with dqkv.open(path) as reader:
        second, index = reader.log.records[1], reader.log.records[-1]
    data[second.offset + 9] ^= 1
    del data[index.offset :]
    path.write_bytes(data)
    with pytest.raises(ChecksumError) as caught:
        append(path)
    assert caught.value.code == "record-header"
    assert path.read_bytes() == data


def test_first_flush_fits_plans_to_what_there_is(tmp_path: Path) -> None:
    layers = [Layer(2, 16, "float16", "2.26")]
    (tmp_path / "whole").mkdir()
    for tokens in (20, 300):
        path, pairs = tmp_path / f"{tokens}.dqkv", tensors(layers, tokens)
        with create(path, layers, recent=0) as writer:
            writer.append(*part(pairs, 0, tokens))
            writer.flush()
            with dqkv.open(path) as reader:
                assert reader.tokens == tokens
        with dqkv.open(path) as reader:
            assert list(reader.verify()) == []
            plan = reader.layers[0].plan
            for tensor, wanted in zip(
                (reader.layers[0].key, reader.layers[0].value), expected(layers[0], pairs[0], 1, 0, plan=plan)
            ):
                assert same(tensor[:], wanted)
