"""Files on a device: the bytes and errors of the CPU's, with threads that read ahead and write behind.

A stand-in makes the pages here; the same on a GPU is in ``test_cuda_files.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import FILE_ID, SMALL, part, same, tensors
from hosted_support import DeviceCodec, Lane, stand_in
from safetensors.numpy import load_file, save_file

import dquantcodec as dq
from dquantcodec.cli.main import main
from dquantcodec.cuda import device, hosted
from dquantcodec.errors import DeviceError, DQuantError, InputError
from dquantcodec.file import coding as coding_module
from dquantcodec.file.disk import DiskFile

__all__ = ["stand_in"]

LAYERS = [
    dq.Layer(4, 64, "float16", SMALL, head_groups=2),
    dq.Layer(4, 64, "float16", SMALL, "absent"),
    dq.Layer(4, 64, "float32", SMALL, "exact"),
    dq.Layer(4, 64, "bfloat16", SMALL),
]
RECORD = 60_000


def steps(out: dq.file.writer.Writer, pairs: Any) -> None:
    """Odd portions of two sequences, a flush and a rewind between them."""
    out.append(*part(pairs, 0, 150))
    out.append(*part(pairs, 0, 37), sequence=1)
    out.append(*part(pairs, 150, 151))
    out.flush()
    out.append(*part(pairs, 151, 420))
    out.rewind(333)
    out.append(*part(pairs, 333, 700))
    out.append(*part(pairs, 37, 90), sequence=1)


def made(path: Path, device: str, do: Callable[[Any, Any], object], layers: Any = LAYERS, **options: Any) -> bytes:
    with dq.create(
        path, layers, sinks=3, recent=20, sequences=2, _file_id=FILE_ID, _record_target=RECORD, device=device, **options
    ) as out:
        do(out, tensors(layers, 700))
    return path.read_bytes()


@pytest.mark.parametrize("layers", [LAYERS, LAYERS[3:]], ids=["many", "one"])
def test_files_are_the_same_to_the_byte(tmp_path: Path, stand_in: type[DeviceCodec], layers: Any) -> None:
    want = made(tmp_path / "cpu.dqkv", "cpu", steps, layers)
    got = made(tmp_path / "gpu.dqkv", "cuda", steps, layers)
    assert got == want
    assert 1 <= Lane.made <= hosted.LANES and stand_in.most <= hosted.LANES
    for name, where in (("cpu", "cpu"), ("gpu", "cuda")):
        with dq.append(tmp_path / f"{name}.dqkv", device=where) as out:
            out.append(*part(tensors(layers, 700), 90, 400), sequence=1)
    assert (tmp_path / "gpu.dqkv").read_bytes() == (tmp_path / "cpu.dqkv").read_bytes()


def test_reading_gives_the_same_numbers(
    tmp_path: Path, stand_in: type[DeviceCodec], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.dqkv"
    made(path, "cpu", steps)
    # So few together that long reads take several calls.
    whole = coding_module.coding
    size = dq.Codec(SMALL, 4, 64).layout.page_bytes
    monkeypatch.setattr("dquantcodec.file.reader.coding", lambda *a: replace(whole(*a), gathered_bytes=5 * size))
    calls: list[int] = []
    decode = stand_in.decode_kind

    def counted(self: DeviceCodec, pages: Any, *arguments: Any, **options: Any) -> None:
        calls.append(len(pages.data))
        decode(self, pages, *arguments, **options)

    monkeypatch.setattr(stand_in, "decode_kind", counted)
    with dq.open(path) as cpu, dq.open(path, device="cuda") as gpu:
        for sequence, other in zip(cpu.sequences, gpu.sequences):
            for layer, on_device in zip(sequence.layers, other.layers):
                if layer.spec.storage == "absent":
                    continue
                for start, stop in ((0, sequence.tokens), (64, 96), (40, 41), (130, 333), (7, 7)):
                    want = layer.value.read(start, stop, np.float16)
                    assert same(on_device.value.read(start, stop, np.float16), want)
                for dtype in (layer.spec.array_dtype, np.float64):
                    assert same(on_device.key.read(5, 70, dtype), layer.key.read(5, 70, dtype))
        assert gpu.pages_checked == cpu.pages_checked
        query = np.ones((4, 64), np.float32)
        assert same(gpu.layers[3].attend(query)[0], cpu.layers[3].attend(query)[0])
    assert max(calls) == 5 and min(calls) == 1


def test_a_damaged_container_is_named_as_on_the_cpu(tmp_path: Path, stand_in: type[DeviceCodec]) -> None:
    path = tmp_path / "x.dqkv"
    made(path, "cpu", lambda out, pairs: out.append(*part(pairs, 0, 700)))
    with dq.open(path, verify=False) as file:
        layer = file.layers[3]
        record = next(layer.pieces(300, 301)).record
        run, slot = file.rules.run, layer.slots.start
        place = run.page_place(slot, 0, record.header.tokens)
        layout = run.slots[slot].layout
        # The first words of a tile of values: states of rANS.
        offset = record.payload + place.offset + layout.head_bytes + layout.value.words_at
    data = bytearray(path.read_bytes())
    data[offset : offset + 400] = bytes(range(200)) * 2
    path.write_bytes(data)
    told = []
    for where in ("cpu", "cuda"):
        with dq.open(path, verify=False, device=where) as file, pytest.raises(DQuantError) as caught:
            file.layers[3].value.read()
        told.append((caught.value.code, caught.value.where, str(caught.value)))
    assert told[0] == told[1]


def test_a_number_that_is_not_finite_leaves_nothing(tmp_path: Path, stand_in: type[DeviceCodec]) -> None:
    told = []
    for where in ("cpu", "cuda"):
        pairs = tensors(LAYERS, 700)
        pairs[3][1][517, 2, 9] = np.nan  # type: ignore[index]
        with (
            pytest.raises(InputError) as caught,
            dq.create(tmp_path / "x.dqkv", LAYERS, _record_target=RECORD, device=where) as out,
        ):
            out.append(*part(pairs, 0, 700))
        told.append((caught.value.code, caught.value.where, str(caught.value)))
    assert told[0] == told[1] and told[0][1]["token"] == 517
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("after", [1, 3, 7])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, stand_in: type[DeviceCodec], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The thread that writes fails; its giver learns it, and the file goes."""
    writes = []
    write_really = DiskFile.write

    def write(self: DiskFile, offset: int, buffers: Any) -> int:
        writes.append(offset)
        if len(writes) > after:
            raise OSError(28, "No space left on device")
        return write_really(self, offset, buffers)

    monkeypatch.setattr(DiskFile, "write", write)
    with (
        pytest.raises(OSError, match="No space") as caught,
        dq.create(tmp_path / "x.dqkv", LAYERS, _record_target=RECORD, device="cuda") as out,
    ):
        pairs = tensors(LAYERS, 700)
        for start in range(0, 700, 100):
            out.append(*part(pairs, start, start + 100))
    assert caught.value.filename == str(tmp_path / "x.dqkv")
    assert not list(tmp_path.iterdir())


def test_the_commands_give_what_the_cpu_gives(tmp_path: Path, stand_in: type[DeviceCodec]) -> None:
    rng = np.random.default_rng(5)
    names = [f"layers.{layer}.{kind}" for layer in (0, 3) for kind in ("key", "value")]
    arrays = {name: rng.standard_normal((2, 2, 930, 64)).astype(np.float16) for name in names}
    save_file({name: array[:, :, :401].copy() for name, array in arrays.items()}, tmp_path / "in.safetensors")
    save_file(arrays, tmp_path / "all.safetensors")
    stored, decoded = [], []
    for where in ("cpu", "cuda"):
        coded, back = tmp_path / f"{where}.dqkv", tmp_path / f"{where}.safetensors"
        common = ["--device", where, "--threads", "2", "--quiet"]
        assert main(["compress", str(tmp_path / "in.safetensors"), str(coded), *common]) == 0
        stand_in.most = 0
        assert main(["append", str(tmp_path / "all.safetensors"), str(coded), "--whole", *common]) == 0
        assert (stand_in.most > 0) == (where == "cuda")
        assert main(["decompress", str(coded), str(back), *common]) == 0
        with dq.open(coded) as file:
            layers = [layer for sequence in file.sequences for layer in sequence.layers]
            assert {layer.tokens for layer in layers} == {930}
            stored.append([run.pages.data for layer in layers for run in layer.page_runs()])
        decoded.append(load_file(back))
    assert all((a == b).all() for a, b in zip(*stored, strict=True))
    assert all(same(decoded[0][name], decoded[1][name]) for name in names)
    assert stand_in.most <= hosted.LANES


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("dqkv: error: ")
    return said


def test_a_device_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    device.cupy.cache_clear()
    device.device.cache_clear()
    pairs = tensors(LAYERS, 40)
    names = (f"layers.0.{kind}" for kind in ("key", "value"))
    save_file(dict(zip(names, pairs[0])), tmp_path / "in.safetensors")  # type: ignore[arg-type]
    before = sorted(tmp_path.iterdir())
    for command in ("compress", "decompress", "append"):
        arguments = [command, str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors"), "--device"]
        assert main([*arguments, "cuda"]) == 1
        assert "CuPy" in (said := complaint(capsys)) and said.endswith("[device-cupy]\n")
        assert main([*arguments, "tpu"]) == 1
        assert complaint(capsys).endswith("[device-name]\n")
    with pytest.raises(DeviceError, match="CuPy"):
        dq.create(tmp_path / "x.dqkv", LAYERS, device="cuda")
    with pytest.raises(DeviceError, match="CuPy"):
        dq.open(tmp_path / "in.safetensors", device="cuda")
    assert sorted(tmp_path.iterdir()) == before
