"""States of llama.cpp, written here by code of its own from the layout that llama.cpp reads, there and back."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dquantcodec as dq
from dquantcodec.cli.main import main
from dquantcodec.errors import DQuantError, IdentityError, LimitError, UnsupportedError
from dquantcodec.integrations import llama_cpp

HEADS, DIM, CELLS, LAYERS = 2, 32, 300, 2
TOKENS = np.random.default_rng(3).integers(0, 150_000, CELLS)


def numbers(dtype: Any = np.float16) -> Any:
    return np.random.default_rng(1).standard_normal((2, LAYERS, CELLS, HEADS * DIM)).astype(dtype)


def state(
    arrays: Any, *, ggml_type: int = 1, transposed: bool = False, streams: int = 1, stream: int = 0, first: int = 0,
    version: int = 2, magic: int = 0x67677371, order: Any = None, ids: int = 1,
) -> bytes:  # fmt: skip
    """``order``: which position each cell holds."""
    order = range(CELLS) if order is None else order
    out = [struct.pack("<3I", magic, version, CELLS), b"".join(struct.pack("<i", t) for t in TOKENS)]
    out += [struct.pack("<I", streams), struct.pack("<I", 0) * stream, struct.pack("<I", CELLS)]
    for position in order:
        out.append(struct.pack("<iI", first + position, ids) + b"".join(struct.pack("<i", 7) for _ in range(ids)))
    out.append(struct.pack("<II", transposed, LAYERS))
    for kind, layers in enumerate(arrays):
        for rows in layers:
            rows = rows[list(order)]
            size = rows.dtype.itemsize
            if kind and transposed:
                out.append(struct.pack("<iII", ggml_type, size, HEADS * DIM))
                out += [np.ascontiguousarray(rows[:, channel]).tobytes() for channel in range(HEADS * DIM)]
            else:
                out.append(struct.pack("<iQ", ggml_type, size * HEADS * DIM))
                out += [row.tobytes() for row in rows]
    return b"".join([*out, struct.pack("<I", 0) * (streams - stream - 1)])


@pytest.mark.parametrize(
    ("dtype", "ggml_type"), [(np.float16, 1), (np.float32, 0), (ml_dtypes.bfloat16, 30)], ids=["f16", "f32", "bf16"]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_to_a_file_and_back(tmp_path: Path, dtype: Any, ggml_type: int, transposed: bool) -> None:
    arrays = numbers(dtype)
    original = state(arrays, ggml_type=ggml_type, transposed=transposed, streams=3, stream=1, first=11)
    source, coded, back = tmp_path / "slot.bin", tmp_path / "slot.dqkv", tmp_path / "back.bin"
    source.write_bytes(original)
    assert main(["convert", "--quiet", str(source), str(coded), "--head-dim", str(DIM), "--model", "toy"]) == 0
    assert main(["convert", "--quiet", str(coded), str(back)]) == 0
    with dq.open(coded, expect={"model": "toy", "kv_heads": HEADS, "head_dim": DIM, "positions_start": 11}) as file:
        decoded = np.array([[getattr(layer, kind)[:] for layer in file.layers] for kind in ("key", "value")])
    expected = decoded.reshape(arrays.shape)
    assert back.read_bytes() == state(
        expected, ggml_type=ggml_type, transposed=transposed, streams=3, stream=1, first=11
    )
    np.testing.assert_array_equal(expected[:, :, -128:], arrays[:, :, -128:])
    error = np.square((expected - arrays).astype(np.float64)).sum() / np.square(arrays.astype(np.float64)).sum()
    assert 0 < error < 0.1


def test_nothing_coded_comes_back_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "slot.bin").write_bytes(state(numbers()))
    main(
        [
            "convert",
            "--quiet",
            str(tmp_path / "slot.bin"),
            str(tmp_path / "x.dqkv"),
            "--head-dim",
            "32",
            "--recent",
            "999",
        ]
    )
    main(["convert", "--quiet", str(tmp_path / "x.dqkv"), str(tmp_path / "back.bin")])
    assert (tmp_path / "back.bin").read_bytes() == (tmp_path / "slot.bin").read_bytes()


@pytest.mark.parametrize("fewer", [0, 5])
def test_ids_of_long_sequences_stand_in_a_layer_of_their_own(tmp_path: Path, fewer: int) -> None:
    cells, generator = 40_000, np.random.default_rng(4)
    ids = generator.integers(-(2**31), 2**31, cells - fewer).astype(np.int32)
    rows = [generator.standard_normal((cells, 4)).astype(np.float16) for _ in range(2)]
    original = llama_cpp.State(ids, rows[:1], rows[1:], position=3)
    llama_cpp.to_dqkv(original, tmp_path / "x.dqkv", 4, recent=cells)  # nothing is coded
    with dq.open(tmp_path / "x.dqkv") as file:
        assert not list(file.verify())
        found = llama_cpp.from_dqkv(file)
    np.testing.assert_array_equal(found.tokens, ids)
    assert len(found.keys) == 1 and found.position == 3
    np.testing.assert_array_equal([found.keys[0], found.values[0]], rows)


def test_ids_that_find_no_place_are_refused(tmp_path: Path) -> None:
    ids = np.random.default_rng(4).integers(0, 2**31, 40_000).astype(np.int32)
    rows = [np.ones((100, 4), np.float16)]
    with pytest.raises(LimitError, match="40000 token ids"):
        llama_cpp.to_dqkv(llama_cpp.State(ids, rows, rows), tmp_path / "x.dqkv", 4)


def test_cells_are_put_in_the_order_of_positions(tmp_path: Path) -> None:
    order = np.random.default_rng(2).permutation(CELLS)
    (tmp_path / "slot.bin").write_bytes(state(numbers(), order=order))
    found = llama_cpp.read_state(tmp_path / "slot.bin")
    np.testing.assert_array_equal(found.keys, numbers()[0])
    np.testing.assert_array_equal(found.values, numbers()[1])
    np.testing.assert_array_equal(found.tokens, TOKENS)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"version": 1}, "state-version"),
        ({"version": 3}, "state-version"),
        ({"magic": 0x6767736E}, "state-session"),
        ({"magic": 0x46554747}, "state-magic"),
        ({"ggml_type": 8}, "state-type"),
        ({"ggml_type": 0}, "state-truncated"),  # the rows are half as long as such a type needs
        ({"ids": 2}, "state-cells"),
        ({"order": [*range(CELLS - 1), CELLS]}, "state-cells"),
        ({"first": -5}, "state-cells"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals(tmp_path: Path, change: dict[str, Any], code: str) -> None:
    data = state(numbers(), **{k: v for k, v in change.items() if k != "order"})
    if "order" in change:
        at = 12 + 4 * CELLS + 8 + 12 * (CELLS - 1)
        data = data[:at] + struct.pack("<i", change["order"][-1]) + data[at + 4 :]
    if change.get("ggml_type") == 0:
        data = data[:-100]
    (tmp_path / "slot.bin").write_bytes(data)
    with pytest.raises(DQuantError) as caught:
        llama_cpp.read_state(tmp_path / "slot.bin")
    assert caught.value.code == code


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = state(numbers())
    for cut in [*range(0, 40, 3), 1212, 1220, 5000, len(whole) - 1]:
        (tmp_path / "cut.bin").write_bytes(whole[:cut])
        with pytest.raises(DQuantError):
            llama_cpp.read_state(tmp_path / "cut.bin")
    (tmp_path / "more.bin").write_bytes(whole + b"recurrent layers")
    with pytest.raises(UnsupportedError, match="plain attention"):
        llama_cpp.read_state(tmp_path / "more.bin")


def test_other_files_do_not_become_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = np.ones((200, 2, 32), np.float16)
    with dq.create(tmp_path / "other.dqkv", [dq.Layer(2, 32, "float16")]) as out:
        out.append([keys], [keys])
    with dq.open(tmp_path / "other.dqkv") as file, pytest.raises(IdentityError):
        llama_cpp.from_dqkv(file)
    (tmp_path / "slot.bin").write_bytes(state(numbers()))
    assert main(["convert", str(tmp_path / "slot.bin"), str(tmp_path / "x.dqkv")]) == 1
    assert "--head-dim" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "slot.bin"), str(tmp_path / "x.dqkv"), "--head-dim", "48"]) == 1
    assert not (tmp_path / "x.dqkv").exists()
