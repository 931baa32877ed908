"""``dqkv compress`` and ``dqkv decompress``: what goes in comes out under its own names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dquantcodec.cli.main import main

Arrays = dict[str, NDArray[Any]]


def cache(
    shape: tuple[int, ...] = (1, 2, 300, 64),
    layers: tuple[int, ...] = (0, 3),
    dtype: Any = np.float16,
    names: tuple[str, str] = ("layers.{}.key", "layers.{}.value"),
) -> Arrays:
    rng = np.random.default_rng(7)
    return {name.format(layer): rng.standard_normal(shape).astype(dtype) for layer in layers for name in names}


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def info(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert run("info", path, "--json") == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    return facts


def nmse(original: NDArray[Any], decoded: NDArray[Any]) -> float:
    exact = original.astype(np.float64)
    return float(((exact - decoded.astype(np.float64)) ** 2).sum() / (exact**2).sum())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("BHTD", (2, 2, 300, 64)),
        ("BTHD", (2, 300, 2, 64)),
        ("HTD", (2, 300, 64)),
        ("THD", (300, 2, 64)),
        (None, (1, 2, 300, 64)),
        (None, (300, 2, 64)),
    ],
)
def test_names_layout_dtype_and_shape_come_back(
    tmp_path: Path, layout: str | None, shape: tuple[int, ...], dtype: Any
) -> None:
    arrays = cache(shape, dtype=dtype, names=("past_key_values.{}.0", "past_key_values.{}.1"))
    save_file(arrays, tmp_path / "in.safetensors")
    options = ["--layout", layout] if layout else []
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--sinks", 4, *options) == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    decoded = load_file(tmp_path / "out.safetensors")
    assert decoded.keys() == arrays.keys()
    axis = (layout or ("BHTD" if len(shape) == 4 else "THD")).index("T")
    for name, array in arrays.items():
        assert decoded[name].dtype == array.dtype
        assert decoded[name].shape == array.shape
        assert 0 < nmse(array, decoded[name]) < 0.2
        tokens, got = np.moveaxis(array, axis, 0), np.moveaxis(decoded[name], axis, 0)
        assert got[:4].tobytes() == tokens[:4].tobytes(), "sinks are exact"
        assert got[-128:].tobytes() == tokens[-128:].tobytes(), "the newest tokens are exact"
        assert not (got[4:-128] == tokens[4:-128]).all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.safetensors", "out.safetensors", "x.dqkv"]


def test_the_file_says_where_it_comes_from(tmp_path: Path) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    with safe_open(tmp_path / "out.safetensors", framework="numpy") as file:
        assert file.metadata() == {"decoded_from": "x.dqkv", "codec": "dqkv 2.26"}


def test_layers_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = cache(layers=(0, 3, 4, 9))
    save_file(arrays, tmp_path / "in.safetensors")
    options = ["--layers", "3-4,9", "--exact-layers", "4", "--model", "toy", "--recent", "0", "--threads", "1"]
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
    facts = info(tmp_path / "x.dqkv", capsys)
    assert facts["layer_numbers"] == [3, 4, 9]
    assert facts["exact_layers"] == [4]
    assert facts["model"] == "toy"
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors", "--layers", "4,9") == 0
    decoded = load_file(tmp_path / "out.safetensors")
    assert sorted(decoded) == ["layers.4.key", "layers.4.value", "layers.9.key", "layers.9.value"]
    assert (decoded["layers.4.key"] == arrays["layers.4.key"]).all()
    assert not (decoded["layers.9.key"] == arrays["layers.9.key"]).all()


@pytest.mark.parametrize(
    ("tokens", "part"),
    [
        ("100:170", slice(100, 170)),
        (":5", slice(0, 5)),
        ("-128:", slice(172, 300)),
        ("290:", slice(290, 300)),
        ("-3:-1", slice(297, 299)),
        (":", slice(0, 300)),
    ],
)
def test_a_range_is_a_slice_of_the_whole(tmp_path: Path, tokens: str, part: slice) -> None:
    save_file(cache((2, 2, 300, 64)), tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--recent", "40") == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "all.safetensors", "--dtype", "float32") == 0
    options = [f"--tokens={tokens}", "--dtype", "float32"]
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "part.safetensors", *options) == 0
    whole, cut = load_file(tmp_path / "all.safetensors"), load_file(tmp_path / "part.safetensors")
    for name, array in whole.items():
        assert array.dtype == cut[name].dtype == np.float32
        assert cut[name].tobytes() == np.ascontiguousarray(array[:, :, part]).tobytes()


def test_blocks_and_threads_do_not_change_what_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(cache((1, 2, 700, 64), layers=(0,)), tmp_path / "in.safetensors")
    decoded = []
    for number, block in enumerate((1, 300_000, 1 << 30)):
        monkeypatch.setattr("dquantcodec.cli.copying.BLOCK_BYTES", block)
        monkeypatch.setattr("dquantcodec.cli.decompress.BLOCK_BYTES", block)
        assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--threads", number + 1) == 0
        assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
        decoded.append((tmp_path / "out.safetensors").read_bytes())
    assert decoded[0] == decoded[1] == decoded[2]


def test_npz_and_shards_give_the_same_file_content(tmp_path: Path) -> None:
    arrays = cache()
    folder = tmp_path / "shards"
    folder.mkdir()
    names = list(arrays)
    save_file({name: arrays[name] for name in names[:1]}, folder / "1.safetensors")
    np.savez_compressed(folder / "2.npz", **{name: arrays[name] for name in names[1:]})
    np.savez(tmp_path / "in.npz", **arrays)
    results = []
    for source in (folder, tmp_path / "in.npz"):
        assert run("compress", source, tmp_path / "x.dqkv") == 0
        assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
        results.append(load_file(tmp_path / "out.safetensors"))
    for name, array in results[0].items():
        assert array.tobytes() == results[1][name].tobytes()


def test_patterns_of_the_caller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = {**cache(), **cache(names=("odd{:02}+K", "odd{:02}+V"))}
    save_file(arrays, tmp_path / "in.safetensors")
    options = ["--key", "odd{layer}+K", "--value", "odd{layer}+V"]
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
    assert "odd{layer:02}+K and odd{layer:02}+V" in capsys.readouterr().out
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["odd00+K", "odd00+V", "odd03+K", "odd03+V"]


@pytest.mark.parametrize("policy", ["zero", "clamp"])
def test_numbers_that_are_not_finite_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    arrays = cache()
    arrays["layers.0.key"][0, 1, 5, :3] = np.nan
    arrays["layers.3.value"][0, 0, 299, 9] = -np.inf
    save_file(arrays, tmp_path / "in.safetensors")
    options = ["--nonfinite", policy, "--sinks", "10"]
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
    assert "replaced 4 numbers that were not finite" in capsys.readouterr().out
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    decoded = load_file(tmp_path / "out.safetensors")
    assert all(np.isfinite(array).all() for array in decoded.values())
    assert not decoded["layers.0.key"][0, 1, 5, :3].any()
    rest = np.delete(np.abs(arrays["layers.3.value"][0, :, 299]), 9, axis=1)
    assert decoded["layers.3.value"][0, 0, 299, 9] <= 0
    if policy == "clamp":
        assert -decoded["layers.3.value"][0, 0, 299, 9] >= rest.max()


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    assert run("compress", "--quiet", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert run("--quiet", "decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    assert run("verify", tmp_path / "x.dqkv", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_files_of_the_library_need_no_recorded_names(tmp_path: Path) -> None:
    from dquantcodec.file import Layer, create

    rows = np.random.default_rng(0).standard_normal((200, 2, 64)).astype(np.float16)
    layers = [Layer(2, 64, "float16"), Layer(2, 64, "float16", storage="absent"), Layer(2, 64, "float16")]
    with create(tmp_path / "x.dqkv", layers, sequences=2) as writer:
        writer.append([rows, None, rows], [rows, None, rows], sequence=0)
        writer.append([rows[:50], None, rows[:50]], [rows[:50], None, rows[:50]], sequence=1)
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    shapes = {name: array.shape for name, array in load_file(tmp_path / "out.safetensors").items()}
    assert shapes == {
        f"sequence.{sequence}.layers.{layer}.{kind}": (1, 2, tokens, 64)
        for sequence, tokens in ((0, 200), (1, 50))
        for layer in (0, 2)
        for kind in ("key", "value")
    }


def test_an_existing_output_is_replaced(tmp_path: Path) -> None:
    save_file(cache(), tmp_path / "in.safetensors")
    for name in ("x.dqkv", "out.safetensors"):
        (tmp_path / name).write_text("old")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    assert run("verify", tmp_path / "x.dqkv") == 0


@pytest.mark.parametrize("metadata", [{"source": "my run"}, {"source": {"key": 3}}, {"source": {"layout": "XY"}}, {}])
def test_metadata_of_others_is_not_taken_for_names(tmp_path: Path, metadata: dict[str, Any]) -> None:
    from dquantcodec.file import Layer, create

    rows = np.ones((5, 2, 64), np.float16)
    with create(tmp_path / "x.dqkv", [Layer(2, 64, "float16")], metadata=metadata) as writer:
        writer.append([rows], [rows])
    assert run("info", tmp_path / "x.dqkv") == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    assert sorted(load_file(tmp_path / "out.safetensors")) == ["layers.0.key", "layers.0.value"]


def test_an_empty_file_has_nothing_to_decompress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dquantcodec.file import Layer, create

    with create(tmp_path / "x.dqkv", [Layer(2, 64, "float16")]):
        pass
    assert run("info", tmp_path / "x.dqkv") == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 1
    assert "holds no tokens [tokens-range]" in capsys.readouterr().err


def test_a_cache_shorter_than_the_exact_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = cache((1, 2, 40, 64))
    save_file(arrays, tmp_path / "in.safetensors")
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert "nothing was coded" in capsys.readouterr().out
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors") == 0
    assert all((array == arrays[name]).all() for name, array in load_file(tmp_path / "out.safetensors").items())
