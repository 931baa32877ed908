"""What goes into a ``.dqkv`` file comes out: every geometry, storage, cut and way of slicing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from file_support import SMALL, expected, part, same, tensors, write
from hypothesis import given
from hypothesis import strategies as st

import dquantcodec.file as dqkv
from dquantcodec.errors import IdentityError, InputError
from dquantcodec.file import Layer, create
from dquantcodec.page_layout import PageLayout

GEOMETRIES = [
    Layer(1, 1, "float32", SMALL),
    Layer(2, 7, "bfloat16", SMALL),
    Layer(3, 80, "float16", "paper-2.26"),
    Layer(4, 96, "bfloat16", "2.26"),
    Layer(8, 128, "bfloat16", "1.96"),
    Layer(1, 576, "bfloat16", "paper-1.96"),
    Layer(3, 64, "float32", storage="exact"),
    Layer(5, 3, "bfloat16", storage="exact"),
]
MIXED = [
    Layer(2, 8, "bfloat16", SMALL),
    Layer(1, 5, "float32", storage="exact"),
    Layer(3, 4, storage="absent"),
    Layer(1, 16, "float16", SMALL),
    Layer(2, 3, "float16", storage="exact"),
]


@pytest.mark.parametrize("layer", GEOMETRIES, ids=lambda x: f"{x.kv_heads}x{x.head_dim}-{x.dtype}-{x.storage}")
def test_geometries(tmp_path: Path, layer: Layer) -> None:
    pairs = tensors([layer], 300)
    write(tmp_path / "x.dqkv", [layer], pairs, sinks=3, recent=20)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        read = reader.layers[0]
        for tensor, wanted in zip((read.key, read.value), expected(layer, pairs[0], 3, 20, plan=read.plan)):
            assert same(tensor[:], wanted)
            assert tensor.shape == wanted.shape and tensor.dtype == wanted.dtype and len(tensor) == 300
        assert not reader.torn and reader.indexed
        assert list(reader.verify()) == []


@pytest.mark.parametrize("sinks", [0, 1, 5, 40])
@pytest.mark.parametrize("recent", [0, 1, 33])
def test_every_boundary(tmp_path: Path, sinks: int, recent: int) -> None:
    edges = {0, 1, sinks, sinks + recent, sinks + recent + 32, sinks + recent + 64, 3 * 32 + 17}
    for tokens in sorted({max(0, edge + step) for edge in edges for step in (-1, 0, 1)}):
        pairs = tensors(MIXED, tokens)
        write(tmp_path / "x.dqkv", MIXED, pairs, sinks=sinks, recent=recent)
        with dqkv.open(tmp_path / "x.dqkv") as reader:
            assert reader.tokens == tokens and not reader.torn
            for layer, read, pair in zip(MIXED, reader.layers, pairs):
                if layer.storage == "absent":
                    continue
                for tensor, wanted in zip((read.key, read.value), expected(layer, pair, sinks, recent)):
                    assert same(tensor[:], wanted)
                coded = max(0, tokens - sinks - recent) if layer.storage == "coded" else 0
                assert read.coded_tokens == coded
                assert read.sinks == (min(sinks, tokens) if layer.storage == "coded" else 0)
                assert read.sinks + read.coded_tokens + read.recent == tokens
            assert list(reader.verify()) == []


@given(data=st.data())
def test_portions_do_not_change_a_byte(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("portions")
    tokens = data.draw(st.integers(0, 260))
    options: dict[str, Any] = {
        "sinks": data.draw(st.integers(0, 40)),
        "recent": data.draw(st.integers(0, 70)),
        "_record_target": data.draw(st.sampled_from([1, 20_000, 8 << 20])),
    }
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=6)))
    pairs = tensors(MIXED, tokens)
    whole = write(folder / "a.dqkv", MIXED, pairs, **options)
    assert write(folder / "b.dqkv", MIXED, pairs, cuts, threads=2, **options) == whole


def test_caller_may_reuse_its_arrays(tmp_path: Path) -> None:
    pairs = tensors(MIXED, 100)
    whole = write(tmp_path / "a.dqkv", MIXED, pairs, recent=40)
    with create(tmp_path / "b.dqkv", MIXED, recent=40, _file_id=bytes(range(16))) as writer:
        for token in range(100):
            keys, values = part(pairs, token, token + 1)
            buffers = [[None if a is None else a.copy() for a in arrays] for arrays in (keys, values)]
            writer.append(*buffers)
            for array in (a for arrays in buffers for a in arrays if a is not None):
                array[...] = np.nan
    assert (tmp_path / "b.dqkv").read_bytes() == whole


def test_file_ids_differ(tmp_path: Path) -> None:
    ids = set()
    for _ in range(2):
        with create(tmp_path / "x.dqkv", MIXED):
            pass
        ids.add((tmp_path / "x.dqkv").read_bytes()[32:48])
    assert len(ids) == 2


def test_sequences_interleave(tmp_path: Path) -> None:
    lengths = [150, 0, 70, 33]
    pairs = [tensors(MIXED, length, seed) for seed, length in enumerate(lengths)]
    with create(tmp_path / "x.dqkv", MIXED, sinks=2, recent=10, sequences=5, _record_target=1) as writer:
        for start in range(0, 150, 25):
            for sequence, length in enumerate(lengths):
                writer.append(*part(pairs[sequence], min(start, length), min(start + 25, length)), sequence=sequence)
        writer.finish(2)
        with pytest.raises(InputError) as caught:
            writer.append(*part(pairs[2], 0, 1), sequence=2)
        assert caught.value.code == "sequence-finished"
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert [sequence.tokens for sequence in reader.sequences] == [*lengths, 0]
        for sequence, mine in zip(reader.sequences, pairs):
            for layer, read, pair in zip(MIXED, sequence.layers, mine):
                if layer.storage != "absent":
                    assert same(read.value[:], expected(layer, pair, 2, 10)[1])
        assert list(reader.verify()) == []


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("ranges") / "x.dqkv"
    write(path, MIXED, tensors(MIXED, 333), sinks=5, recent=30, _record_target=20_000)
    with dqkv.open(path) as reader:
        yield reader, [None if read.spec.storage == "absent" else read.key[:] for read in reader.layers]


@given(place=st.sampled_from([0, 1, 3, 4]), start=st.integers(-400, 400), stop=st.integers(-400, 400))
def test_range_is_slice_of_whole(opened: Any, place: int, start: int, stop: int) -> None:
    reader, wholes = opened
    assert same(reader.layers[place].key[start:stop], wholes[place][start:stop])


@given(
    place=st.sampled_from([0, 1]),
    bounds=st.tuples(*[st.none() | st.integers(-350, 350)] * 2),
    step=st.integers(-40, 40).filter(bool),
)
def test_steps(opened: Any, place: int, bounds: tuple[int | None, int | None], step: int) -> None:
    reader, wholes = opened
    assert same(reader.layers[place].key[bounds[0] : bounds[1] : step], wholes[place][bounds[0] : bounds[1] : step])


def test_indexing_as_arrays(opened: Any) -> None:
    reader, wholes = opened
    tensor, whole = reader.layers[0].key, wholes[0]
    assert same(tensor[7], whole[7]) and same(tensor[-1], whole[-1]) and same(tensor[np.int64(100)], whole[100])
    assert same(tensor[3:50, 1], whole[3:50, 1]) and same(tensor[9, :, 2:4], whole[9, :, 2:4])
    assert same(tensor[...], whole) and same(tensor[..., 0], whole[..., 0]) and same(np.asarray(tensor), whole)
    assert tensor[5, 0, 0] == whole[5, 0, 0]
    assert tensor[10:10].shape == (0, 2, 8)
    for outside in (333, -334):
        with pytest.raises(IndexError):
            tensor[outside]
    with pytest.raises(TypeError):
        tensor["a"]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_read_in_any_dtype(opened: Any, dtype: Any) -> None:
    reader, _ = opened
    pairs = tensors(MIXED, 333)
    for place in (0, 1):
        wanted = expected(MIXED[place], pairs[place], 5, 30, np.dtype(dtype))[0]
        assert same(reader.layers[place].key.read(dtype=dtype), wanted)
        with pytest.raises(InputError) as caught:
            reader.layers[place].key.read(dtype=np.int8)
        assert caught.value.code == "input-dtype"


def test_reads_only_the_pages_it_needs(tmp_path: Path) -> None:
    layers = [Layer(2, 8, "bfloat16", SMALL)] * 3
    write(tmp_path / "x.dqkv", layers, tensors(layers, 500), sinks=4, recent=16, _record_target=30_000)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.pages_checked == 0
        key = reader.layers[1].key
        key[0:4]
        key[490:]
        assert reader.pages_checked == 0
        key[4:36]
        assert reader.pages_checked == 1
        key[35:37]
        assert reader.pages_checked == 2
        key[4:68]
        reader.layers[1].value[4:68]
        assert reader.pages_checked == 2  # each once, for both kinds
        reader.layers[1].key[:]
        assert reader.pages_checked == 15
        reader.layers[0].pages()
        assert reader.pages_checked == 30
    with dqkv.open(tmp_path / "x.dqkv", verify=False) as reader:
        reader.layers[0].key[:]
        assert reader.pages_checked == 0


def test_pages_and_exact_rows(opened: Any) -> None:
    reader, _ = opened
    pairs = tensors(MIXED, 333)
    layer = reader.layers[0]
    pages = layer.pages()
    assert pages.tokens == layer.coded_tokens == 298
    assert pages.data.shape == (10, PageLayout.of(layer.plan).page_bytes)
    keys, values = layer.exact_rows()
    for rows, array in zip((keys, values), pairs[0]):
        assert array is not None and same(rows, np.concatenate([array[:5], array[-30:]]))
    assert same(reader.layers[1].exact_rows()[0], np.asarray(pairs[1][0]))
    for use in (reader.layers[1].pages, lambda: reader.layers[1].attend(np.zeros((1, 5)))):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.code == "layer-not-coded"
    with pytest.raises(InputError) as caught:
        reader.layers[2].key  # noqa: B018 (the property raises)
    assert caught.value.code == "layer-absent"
    with pytest.raises(InputError) as caught:
        reader.layers[2].exact_rows()
    assert caught.value.code == "layer-absent"


@pytest.mark.parametrize("tokens", [0, 20, 200])
def test_attention_is_that_over_read_tensors(tmp_path: Path, tokens: int) -> None:
    layers = [Layer(2, 8, "float32", SMALL)]
    write(tmp_path / "x.dqkv", layers, tensors(layers, tokens), sinks=4, recent=16)
    query = np.random.default_rng(1).standard_normal((3, 4, 8)).astype(np.float32)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        out, lse = reader.layers[0].attend(query)
        keys, values = (
            np.repeat(t[:].astype(float), 2, axis=1) for t in (reader.layers[0].key, reader.layers[0].value)
        )
    logits = np.einsum("lqd,tqd->lqt", query.astype(float), keys) / np.sqrt(8)
    if not tokens:
        assert not out.any() and (lse == -np.inf).all()
        return
    sums = np.exp(logits).sum(axis=2)
    np.testing.assert_allclose(lse, np.log(sums), atol=1e-5)
    wanted = np.einsum("lqt,tqd->lqd", np.exp(logits) / sums[..., None], values)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_decoded_rows_are_kept_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Layer(1, 16, "float32", storage="exact")]
    pairs = tensors(layers, 1000)
    write(tmp_path / "x.dqkv", layers, pairs, _record_target=10_000)
    monkeypatch.setattr("dquantcodec.file.payload.ROWS_CACHE_BYTES", 30_000)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert same(reader.layers[0].key[:], np.asarray(pairs[0][0]))
        assert 0 < sum(rows.nbytes for rows in reader._opened.payload()._rows.values()) <= 30_000
        assert same(reader.layers[0].key[5], np.asarray(pairs[0][0])[5])


def test_accounting_counts_every_byte(tmp_path: Path) -> None:
    layers = [Layer(8, 128, "bfloat16", "2.26"), Layer(8, 128, storage="absent")]
    write(tmp_path / "x.dqkv", layers, tensors(layers, 1408), sinks=0, recent=128)
    size = (tmp_path / "x.dqkv").stat().st_size
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        account = reader.accounting()
        page = PageLayout.of(reader.layers[0].plan).page_bytes  # type: ignore[arg-type]
    assert (account.bytes, account.values) == (size, 1408 * 2048)
    assert (account.coded_tokens, account.exact_tokens, account.coded_bytes) == (1280, 128, 10 * page)
    assert account.bits_per_value == 8 * size / account.values
    assert account.bits_per_value_coded == 8 * page / (128 * 2048)
    # Header, table, record headers, padding and index of a small file; per page it is four bytes.
    assert 0 <= size - account.coded_bytes - account.exact_bytes < 5 * 4096


def test_empty_file_has_no_ratio(tmp_path: Path) -> None:
    write(tmp_path / "x.dqkv", MIXED, tensors(MIXED, 0))
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.accounting().bits_per_value == reader.accounting().bits_per_value_coded == 0
        assert reader.layers[0].key[:].shape == (0, 2, 8)


def test_plan_comes_back_as_numbers(tmp_path: Path) -> None:
    layers = [Layer(3, 80, "bfloat16", "paper-2.26"), Layer(3, 80, "bfloat16", "2.26", number=7)]
    write(tmp_path / "x.dqkv", layers, tensors(layers, 0))
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.layers[1].spec.number == 7
        for layer, read in zip(layers, reader.layers):
            ours, theirs = layer.resolved(0).plan, read.plan
            assert ours is not None and theirs is not None
            assert same(ours.signs, theirs.signs)
            assert (ours.kv_heads, ours.head_dim, ours.window) == (theirs.kv_heads, theirs.head_dim, theirs.window)
            assert ours.profile_name == theirs.profile_name == layer.profile
            for a, b in ((ours.key, theirs.key), (ours.value, theirs.value)):
                assert same(a.frequencies, b.frequencies)
                assert {k: v for k, v in a.__dict__.items() if k != "frequencies"} == {
                    k: v for k, v in b.__dict__.items() if k != "frequencies"
                }


def test_equal_plans_and_tables_are_stored_once(tmp_path: Path) -> None:
    def size(count: int) -> int:
        layers = [Layer(8, 128, "bfloat16", "2.26")] * count
        return int.from_bytes(write(tmp_path / "x.dqkv", layers, tensors(layers, 0))[12:16], "little")

    assert size(1) == size(40)


IDENTITY = {
    "model": ("a/b", "other"),
    "revision": ("r1", "r2"),
    "layers": (5, 4),
    "kv_heads": ([2, 1, 1, 2], 2),
    "head_dim": ([8, 5, 16, 3], [8, 5, 16]),
    "dtype": (["bfloat16", "float32", "float16", "float16"], "bfloat16"),
    "positions_start": (100, 0),
    "shard": ([1, 4], (0, 4)),
}


def test_identity(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": "a/b",
        "revision": "r1",
        "positions_start": 100,
        "shard": (1, 4),
        "metadata": {"names": ["ü", 1, None]},
    }
    write(tmp_path / "x.dqkv", MIXED, tensors(MIXED, 3), **options)
    with dqkv.open(tmp_path / "x.dqkv", expect={field: right for field, (right, _) in IDENTITY.items()}) as reader:
        assert reader.model == "a/b" and reader.metadata == options["metadata"]
        assert reader.format_version == (1, 0)
    for field, (right, wrong) in IDENTITY.items():
        with pytest.raises(IdentityError) as caught:
            dqkv.open(tmp_path / "x.dqkv", expect={field: wrong})
        assert caught.value.code == "identity-" + field.replace("_", "-")
        for value in (right, wrong):
            told = tuple(value) if field == "shard" else value
            assert repr(told) in str(caught.value)
        assert "x.dqkv" in str(caught.value)
    with pytest.raises(InputError) as unknown:
        dqkv.open(tmp_path / "x.dqkv", expect={"modle": "a/b"})
    assert unknown.value.code == "expect-field"


def test_one_number_stands_for_all_layers(tmp_path: Path) -> None:
    layers = [Layer(2, 8, "float16", SMALL)] * 3
    write(tmp_path / "x.dqkv", layers, tensors(layers, 3))
    dqkv.open(tmp_path / "x.dqkv", expect={"kv_heads": 2, "head_dim": 8, "dtype": "float16"}).close()


def test_closed_reader_says_so(tmp_path: Path) -> None:
    write(tmp_path / "x.dqkv", MIXED, tensors(MIXED, 50))
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        kept = reader.layers[0].key[:]
    assert kept.sum() == kept.sum()
    for use in (lambda: reader.layers[0].key[:], lambda: list(reader.verify())):
        with pytest.raises(InputError) as caught:
            use()
        assert caught.value.code == "reader-closed"


def test_looking_into_a_file_needs_no_numba(tmp_path: Path) -> None:
    write(tmp_path / "x.dqkv", MIXED, tensors(MIXED, 50), recent=10)
    program = (
        "import sys; from dquantcodec.file import open\n"
        f"with open({str(tmp_path / 'x.dqkv')!r}) as r:\n"
        "    print(r.tokens, r.accounting().bits_per_value, r.layers[0].plan.profile_name, r.layers[1].key[:].shape)\n"
        "assert 'numba' not in sys.modules, 'numba was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "small" in done.stdout
