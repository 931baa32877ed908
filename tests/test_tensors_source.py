"""Recognising and reading inputs: safetensors, ``.npz``, folders; what is refused, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from dquantcodec.errors import InputError
from dquantcodec.tensors import KVSource, open_queries, open_source

DTYPES = [np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)]
Arrays = dict[str, NDArray[Any]]


def cache(shape: tuple[int, ...] = (1, 2, 150, 8), layers: tuple[int, ...] = (0, 3), dtype: Any = np.float16) -> Arrays:
    rng = np.random.default_rng(5)
    return {
        f"layers.{layer}.{kind}": rng.standard_normal(shape).astype(dtype)
        for layer in layers
        for kind in ("key", "value")
    }


def tokens_heads(array: NDArray[Any], layout: str, sequence: int) -> NDArray[Any]:
    """The array of one sequence as ``[T, H, D]``."""
    whole = array[sequence] if "B" in layout else array
    return whole if layout.endswith("THD") else whole.transpose(1, 0, 2)


def assert_reads(source: KVSource, arrays: Arrays) -> None:
    for layer in source.layers:
        for kind in ("key", "value"):
            for sequence in range(source.sequences):
                expected = tokens_heads(arrays[layer.tensor(kind).name], source.layout, sequence)
                for start, stop in ((0, source.tokens), (0, 0), (3, 4), (7, source.tokens - 1)):
                    block = source.read(layer.number, kind, sequence, start, stop)
                    assert block.dtype == expected.dtype
                    assert block.flags.c_contiguous
                    assert block.tobytes() == expected[start:stop].tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("layout", "shape"),
    [("BHTD", (2, 3, 150, 8)), ("BTHD", (2, 150, 3, 8)), ("HTD", (3, 150, 8)), ("THD", (150, 3, 8))],
)
def test_safetensors(tmp_path: Path, layout: str, shape: tuple[int, ...], dtype: Any) -> None:
    arrays = cache(shape, dtype=dtype)
    save_file(arrays, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors", layout=layout)
    assert (source.layout, source.tokens, source.sequences) == (layout, 150, 2 if "B" in layout else 1)
    assert [(layer.number, layer.kv_heads, layer.head_dim) for layer in source.layers] == [(0, 3, 8), (3, 3, 8)]
    assert {layer.dtype for layer in source.layers} == {str(dtype)}
    assert source.values == sum(array.size for array in arrays.values())
    assert source.token_bytes * source.tokens * source.sequences == sum(array.nbytes for array in arrays.values())
    assert_reads(source, arrays)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_npz(tmp_path: Path, save: Any, dtype: Any) -> None:
    arrays = cache(dtype=dtype)
    save(tmp_path / "x.npz", **arrays)
    source = open_source(tmp_path / "x.npz")
    assert {layer.dtype for layer in source.layers} == {str(dtype)}
    assert_reads(source, arrays)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_in_other_orders(tmp_path: Path, save: Any) -> None:
    arrays = cache()
    save(
        tmp_path / "x.npz",
        **{
            "layers.0.key": np.asfortranarray(arrays["layers.0.key"]),
            "layers.0.value": arrays["layers.0.value"].astype(">f2"),
            "layers.3.key": np.asfortranarray(arrays["layers.3.key"].astype(">f2")),
            "layers.3.value": arrays["layers.3.value"],
        },
    )
    assert_reads(open_source(tmp_path / "x.npz"), arrays)


def test_npz_of_bfloat16_bits(tmp_path: Path) -> None:
    arrays = cache(dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", **{name: array.view(np.uint16) for name, array in arrays.items()})
    with pytest.raises(InputError, match="--bits bfloat16") as caught:
        open_source(tmp_path / "x.npz")
    assert caught.value.code == "dtype-unsupported"
    assert_reads(open_source(tmp_path / "x.npz", bits="bfloat16"), arrays)


def test_folder_of_shards(tmp_path: Path) -> None:
    arrays = cache(layers=(0, 1, 2))
    names = list(arrays)
    save_file({name: arrays[name] for name in names[:3]}, tmp_path / "a-1.safetensors")
    save_file({name: arrays[name] for name in names[3:4]}, tmp_path / "a-2.safetensors")
    np.savez(tmp_path / "b.npz", **{name: arrays[name] for name in names[4:]})
    (tmp_path / "notes.txt").write_text("not a tensor")
    (tmp_path / ".hidden.safetensors").write_text("nor this")
    source = open_source(tmp_path)
    assert [layer.number for layer in source.layers] == [0, 1, 2]
    assert_reads(source, arrays)


def test_index(tmp_path: Path) -> None:
    arrays = cache()
    names = list(arrays)
    where = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(names)}
    for part in set(where.values()):
        save_file({name: arrays[name] for name in names if where[name] == part}, tmp_path / part)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert_reads(open_source(index), arrays)
    assert_reads(open_source(tmp_path), arrays)
    (tmp_path / "part-1.safetensors").unlink()
    for path in (index, tmp_path):
        with pytest.raises(InputError, match=r"part-1\.safetensors") as caught:
            open_source(path)
        assert caught.value.code == "shard-missing"
    index.write_text("[]")
    with pytest.raises(InputError) as caught:
        open_source(index)
    assert caught.value.code == "input-damaged"


def test_layers_may_differ_in_heads_and_type(tmp_path: Path) -> None:
    arrays = {**cache((1, 2, 150, 8), (0,)), **cache((1, 4, 150, 16), (1,), np.float32)}
    save_file(arrays, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    assert [(layer.kv_heads, layer.head_dim, layer.dtype) for layer in source.layers] == [
        (2, 8, "float16"),
        (4, 16, "float32"),
    ]
    assert_reads(source, arrays)


def test_what_was_recognised_is_said_in_two_lines(tmp_path: Path) -> None:
    save_file({**cache(), "layers.0.query": np.zeros((1, 2, 3, 8), np.float16)}, tmp_path / "x.safetensors")
    source = open_source(tmp_path / "x.safetensors")
    assert source.describe() == (
        "2 layers (0, 3): layers.{layer}.key and layers.{layer}.value",
        "float16 [B,H,T,D] (the default for 4 axes): 1 sequence of 150 tokens, 2 KV heads of 8; "
        "besides, 1 other tensor",
    )
    assert source.record() == {"key": "layers.{layer}.key", "value": "layers.{layer}.value", "layout": "BHTD"}


def test_selected_layers_alone_must_agree(tmp_path: Path) -> None:
    arrays = {**cache(layers=(0, 2)), **cache((1, 2, 99, 8), (1,))}
    save_file(arrays, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="--layers") as caught:
        open_source(tmp_path / "x.safetensors")
    assert caught.value.code == "tokens-mismatch"
    assert "layer 1: layers.1.key [1, 2, 99, 8]" in str(caught.value)
    assert_reads(open_source(tmp_path / "x.safetensors", layers=[0, 2]), arrays)
    with pytest.raises(InputError, match="no layer 5; the layers are 0-2") as caught:
        open_source(tmp_path / "x.safetensors", layers=[0, 5])
    assert caught.value.code == "layer-missing"


def replaced(name: str, array: NDArray[Any]) -> Arrays:
    return {**cache(), name: array}


@pytest.mark.parametrize(
    ("arrays", "code", "says"),
    [
        (replaced("layers.3.value", np.zeros((1, 2, 99, 8), np.float16)), "shape-mismatch", "layer 3"),
        (replaced("layers.3.value", np.zeros((1, 2, 150, 8), np.float32)), "dtype-mismatch", "layers.3.value"),
        (replaced("layers.3.key", np.zeros((1, 2, 150, 8), np.int8)), "dtype-unsupported", "layers.3.key is int8"),
        (cache(dtype=np.float64), "dtype-unsupported", "convert them to float32"),
        (cache((1, 2, 0, 8)), "input-empty", "empty"),
        (cache((8, 100, 8)), "layout-ambiguous", "[8, 100, 8]"),
        (cache(layers=(0, 2000)), "limit-layers", "2000"),
        ({"a": np.zeros(3, np.float16)}, "names-unknown", "--key"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_name_file_and_tensor(tmp_path: Path, arrays: Arrays, code: str, says: str) -> None:
    path = tmp_path / "x.safetensors"
    save_file(arrays, path)
    with pytest.raises(InputError) as caught:
        open_source(path)
    assert caught.value.code == code
    assert caught.value.where["path"] == str(path)
    assert says in str(caught.value)


def test_a_name_in_two_files(tmp_path: Path) -> None:
    save_file(cache(), tmp_path / "a.safetensors")
    save_file(cache(), tmp_path / "b.safetensors")
    with pytest.raises(InputError, match="two files") as caught:
        open_source(tmp_path)
    assert caught.value.code == "tensor-duplicate"


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz", "x.txt", "x.dqkv"])
@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 100, b"PK\x03\x04" + b"z" * 100])
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_source(tmp_path / name)
    assert caught.value.code == ("input-damaged" if name in ("x.safetensors", "x.npz") else "input-unknown")


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    save_file(cache((1, 1, 8, 2), (0,)), tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", **cache((1, 1, 8, 2), (0,)))
    for name in ("x.safetensors", "x.npz"):
        whole = (tmp_path / name).read_bytes()
        cut = tmp_path / f"cut-{name}"
        for length in range(len(whole)):
            cut.write_bytes(whole[:length])
            with pytest.raises(InputError):
                open_source(cut)


def test_a_file_cut_while_open(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(cache(), path)
    source = open_source(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="ends too early") as caught:
        for layer in source.layers:
            source.read(layer.number, "key", 0, 0, 150)
            source.read(layer.number, "value", 0, 0, 150)
    assert caught.value.code == "input-truncated"


def test_damaged_npz_member(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", **cache())
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[len(data) // 3] ^= 0xFF
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(InputError) as caught:
        source = open_source(tmp_path / "x.npz")
        for layer in source.layers:
            for kind in ("key", "value"):
                source.read(layer.number, kind, 0, 0, 150)
    assert caught.value.code == "input-damaged"


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_source(tmp_path / "none.safetensors")
    with pytest.raises(InputError) as caught:
        open_source(tmp_path)
    assert caught.value.code == "input-empty"


def test_queries(tmp_path: Path) -> None:
    four, three = np.random.default_rng(1).standard_normal((2, 1, 6, 5, 8)).astype(np.float16)
    save_file({"layers.0.query": four, "layers.1.query": three[0], "layers.0.key": four}, tmp_path / "q.safetensors")
    queries = open_queries(tmp_path / "q.safetensors")
    assert queries is not None
    assert list(queries.layers) == [0, 1]
    assert (queries.read(0, 0) == four[0].astype(np.float32)).all()
    assert (queries.read(1, 0) == three[0].astype(np.float32)).all()
    with pytest.raises(InputError, match="sequence 1") as caught:
        queries.read(0, 1)
    assert caught.value.code == "query-mismatch"
    save_file(cache(), tmp_path / "x.safetensors")
    assert open_queries(tmp_path / "x.safetensors") is None
    save_file({"layers.0.query": np.zeros((3, 4), np.int8)}, tmp_path / "bad.safetensors")
    with pytest.raises(InputError) as caught:
        open_queries(tmp_path / "bad.safetensors")
    assert caught.value.code == "query-mismatch"
