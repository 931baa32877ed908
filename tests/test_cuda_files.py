"""Files on a GPU against the CPU's: the same bytes and numbers, for real data and odd lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gpu_support import cupy_with_device
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import dquantcodec as dq
from dquantcodec.cli.main import main
from dquantcodec.errors import InputError

pytestmark = pytest.mark.gpu

cupy_with_device()

FILE_ID = bytes(range(16))


def make(path: Path, device: str, layers: list[dq.Layer], arrays: list[Any], cuts: list[int]) -> bytes:
    with dq.create(path, layers, recent=40, _file_id=FILE_ID, _record_target=1 << 18, device=device) as out:
        for start, stop in zip([0, *cuts], [*cuts, len(arrays[0][0])]):
            out.append(*([pair[kind][start:stop] for pair in arrays] for kind in (0, 1)))
    return path.read_bytes()


@pytest.mark.parametrize("profile", ["2.26", "2.26-t", "paper-2.26", "1.96"])
def test_real_data(
    profile: str, tmp_path: Path, real_layers: list[tuple[NDArray[np.float16], NDArray[np.float16]]]
) -> None:
    # Every layer several times over, so that there are more of them than lanes.
    arrays = [(np.tile(k, (2, 1, 1))[:777], np.tile(v, (2, 1, 1))[:777]) for k, v in real_layers[:3] * 3]
    layers = [dq.Layer(k.shape[1], k.shape[2], "float16", profile) for k, _ in arrays]
    want = make(tmp_path / "cpu.dqkv", "cpu", layers, arrays, [])
    for cuts in ([], [1, 300, 650]):
        assert make(tmp_path / "gpu.dqkv", "cuda", layers, arrays, cuts) == want
    with dq.open(tmp_path / "cpu.dqkv") as cpu, dq.open(tmp_path / "cpu.dqkv", device="cuda") as gpu:
        for layer, other in zip(cpu.layers, gpu.layers):
            for start, stop in ((0, 777), (33, 34), (100, 650)):
                for kind in ("key", "value"):
                    a, b = (getattr(of, kind).read(start, stop, np.float16) for of in (layer, other))
                    assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("tokens", [1, 32, 41, 127, 128, 129, 300, 1157])
def test_odd_lengths_dtypes_and_head_groups(tokens: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(tokens)
    layers = [
        dq.Layer(8, 128, "bfloat16", "2.26"),
        dq.Layer(4, 64, "float32", "1.96", head_groups=2),
        dq.Layer(2, 80, "float16", "paper-2.26"),
        dq.Layer(2, 64, "float16", "2.26", "exact"),
    ]
    arrays = [
        [rng.standard_normal((tokens, of.kv_heads, of.head_dim)).astype(of.array_dtype) for _ in range(2)]
        for of in layers
    ]
    want = make(tmp_path / "cpu.dqkv", "cpu", layers, arrays, [])
    assert make(tmp_path / "gpu.dqkv", "cuda", layers, arrays, [tokens // 3]) == want
    with dq.open(tmp_path / "gpu.dqkv") as cpu, dq.open(tmp_path / "gpu.dqkv", device="cuda") as gpu:
        for layer, other in zip(cpu.layers, gpu.layers):
            dtype = layer.spec.array_dtype
            assert layer.value.read(0, tokens, dtype).tobytes() == other.value.read(0, tokens, dtype).tobytes()


def test_a_number_that_is_not_finite(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_normal((2, 900, 8, 128)).astype(ml_dtypes.bfloat16)
    values[513, 3, 77] = np.inf
    told = []
    for device in ("cpu", "cuda"):
        with (
            pytest.raises(InputError) as caught,
            dq.create(tmp_path / "x.dqkv", [dq.Layer(8, 128)], device=device) as out,
        ):
            out.append([keys], [values])
        told.append((str(caught.value), caught.value.where))
    assert told[0] == told[1]
    assert not list(tmp_path.iterdir())


def test_the_commands(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    names = [f"layers.{layer}.{kind}" for layer in range(5) for kind in ("key", "value")]
    spread = np.exp(rng.standard_normal((1, 4, 1, 128)))
    arrays = {name: (rng.standard_normal((2, 4, 1801, 128)) * spread).astype(np.float16) for name in names}
    save_file({name: array[:, :, :1301].copy() for name, array in arrays.items()}, tmp_path / "in.safetensors")
    save_file(arrays, tmp_path / "all.safetensors")
    decoded = []
    for device in ("cpu", "cuda"):
        coded, back = tmp_path / f"{device}.dqkv", tmp_path / f"{device}.safetensors"
        assert main(["compress", str(tmp_path / "in.safetensors"), str(coded), "--device", device]) == 0
        assert main(["append", str(tmp_path / "all.safetensors"), str(coded), "--whole", "--device", device]) == 0
        assert main(["decompress", str(coded), str(back), "--device", device]) == 0
        decoded.append(load_file(back))
    sizes = {path.stat().st_size for path in tmp_path.glob("*.dqkv")}
    assert len(sizes) == 1
    for name in names:
        assert decoded[0][name].tobytes() == decoded[1][name].tobytes()
