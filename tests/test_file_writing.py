"""Writers: what they refuse, what they leave behind when something fails, how much memory they take."""

from __future__ import annotations

import errno
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from file_support import SMALL, part, tensors, write

import dquantcodec.file as dqkv
from dquantcodec.errors import DQuantError, InputError, LimitError
from dquantcodec.file import Layer, compose, create
from dquantcodec.file.disk import Disk
from dquantcodec.profile import Profile, StreamProfile

LAYERS = [Layer(2, 8, "bfloat16", SMALL), Layer(1, 5, "float32", storage="exact"), Layer(3, 4, storage="absent")]


def code_of(action: Callable[[], Any]) -> str:
    with pytest.raises(DQuantError) as caught:
        action()
    return caught.value.code


def test_leaving_by_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), create(tmp_path / "x.dqkv", LAYERS) as writer:
        writer.append(*part(tensors(LAYERS, 300), 0, 300))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_abort_keeps_the_older_file(tmp_path: Path) -> None:
    before = write(tmp_path / "x.dqkv", LAYERS, tensors(LAYERS, 10))
    writer = create(tmp_path / "x.dqkv", LAYERS)
    writer.append(*part(tensors(LAYERS, 300), 0, 300))
    writer.abort()
    writer.abort()
    assert [p.name for p in tmp_path.iterdir()] == ["x.dqkv"]
    assert (tmp_path / "x.dqkv").read_bytes() == before
    assert code_of(lambda: writer.append(*part(tensors(LAYERS, 1), 0, 1))) == "writer-closed"
    assert code_of(lambda: writer.finish(0)) == "writer-closed"


def test_file_appears_only_when_closed(tmp_path: Path) -> None:
    writer = create(tmp_path / "x.dqkv", LAYERS)
    writer.append(*part(tensors(LAYERS, 3), 0, 3))
    assert not (tmp_path / "x.dqkv").exists()
    writer.finish(0)
    writer.finish(0)
    writer.close()
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["x.dqkv"]
    assert code_of(lambda: writer.append(*part(tensors(LAYERS, 1), 0, 1))) == "writer-closed"


class FullDisk:
    """A disk that fails for good at its ``allowed``-th call."""

    def __init__(self, disk: Disk, allowed: int) -> None:
        self._disk = disk
        self._left = allowed

    def _spend(self) -> Disk:
        self._left -= 1
        if self._left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._disk

    def write(self, offset: int, data: bytes | memoryview) -> int:
        return self._spend().write(offset, data)

    def sync(self) -> None:
        self._spend().sync()

    def size(self) -> int:
        return self._spend().size()

    def lock(self, path: Path) -> None:
        self._disk.lock(path)

    def close(self) -> None:
        self._disk.close()
        self._spend()


def test_full_disk_at_every_call(tmp_path: Path) -> None:
    before = write(tmp_path / "x.dqkv", LAYERS, tensors(LAYERS, 10))
    pairs = tensors(LAYERS, 300)
    allowed = 0
    while True:
        writer = create(tmp_path / "x.dqkv", LAYERS, recent=20, sinks=3, _record_target=1)
        writer._log.disk = FullDisk(writer._log.disk, allowed)
        try:
            with writer:
                writer.append(*part(pairs, 0, 300))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            assert error.filename == str(tmp_path / "x.dqkv")
        else:
            break
        assert [p.name for p in tmp_path.iterdir()] == ["x.dqkv"]
        assert (tmp_path / "x.dqkv").read_bytes() == before
        allowed += 1
    assert allowed > 20
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.tokens == 300


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_system_calls(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match=r"x\.dqkv"), create(tmp_path / "x.dqkv", LAYERS) as writer:
        writer.append(*part(tensors(LAYERS, 20), 0, 20))
    assert list(tmp_path.iterdir()) == []


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        create(tmp_path, LAYERS)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        create(tmp_path / "nowhere" / "x.dqkv", LAYERS)
    (tmp_path / "real.dqkv").write_bytes(b"old")
    (tmp_path / "link.dqkv").symlink_to(tmp_path / "real.dqkv")
    write(tmp_path / "link.dqkv", LAYERS, tensors(LAYERS, 5))
    assert (tmp_path / "link.dqkv").is_symlink()
    with dqkv.open(str(tmp_path / "real.dqkv")) as reader:
        assert reader.tokens == 5


def test_refused_arrays_leave_the_writer_usable(tmp_path: Path) -> None:
    keys, values = part(tensors(LAYERS, 4), 0, 4)
    with create(tmp_path / "x.dqkv", LAYERS) as writer:

        def refused(keys: Any, values: Any, sequence: int = 0) -> str:
            return code_of(lambda: writer.append(keys, values, sequence))

        assert refused(keys[:2], values) == "layer-count"
        assert refused([None, *keys[1:]], values) == "layer-missing"
        assert refused([*keys[:2], keys[0]], values) == "layer-absent"
        assert refused([keys[0].astype(np.float32), *keys[1:]], values) == "dtype-mismatch"
        assert refused([keys[0][:, :1], *keys[1:]], values) == "input-shape"
        assert refused([keys[0][:3], *keys[1:]], values) == "input-shape"
        assert refused(keys, values, 1) == refused(keys, values, -1) == "sequence-range"
        writer.append([keys[0].view(np.uint16), *keys[1:]], values)  # the bits of bfloat16
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert reader.tokens == 4
        assert reader.layers[0].key[:].tobytes() == keys[0].tobytes()


def test_dtype_mismatch_names_layer_and_kind(tmp_path: Path) -> None:
    keys, values = part(tensors(LAYERS, 4), 0, 4)
    values[1] = values[1].astype(np.float16)
    with create(tmp_path / "x.dqkv", LAYERS) as writer, pytest.raises(InputError, match="values of layer 1") as caught:
        writer.append(keys, values)
    assert (caught.value.where["layer"], caught.value.where["kind"]) == (1, "value")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    pairs = tensors(LAYERS, 200)
    values = pairs[0][1]
    assert values is not None
    values[131, 1, 5] = bad
    with pytest.raises(InputError, match="layer 0, token 131, head 1, channel 5") as caught:
        write(tmp_path / "x.dqkv", LAYERS, pairs, [77], sinks=3, recent=10)
    where = caught.value.where
    assert caught.value.code == "input-nonfinite"
    assert (where["layer"], where["kind"], where["token"], where["head"], where["channel"]) == (0, "value", 131, 1, 5)
    assert list(tmp_path.iterdir()) == []


def test_exact_rows_keep_every_bit(tmp_path: Path) -> None:
    layer = Layer(1, 4, "bfloat16", storage="exact")
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1, 4)
    with create(tmp_path / "x.dqkv", [layer]) as writer:
        writer.append([bits], [bits[::-1]])
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert (reader.layers[0].key[:].view(np.uint16) == bits).all()
        assert (reader.layers[0].value[:].view(np.uint16) == bits[::-1]).all()


WIDE = Profile(key=StreamProfile(4, 4096), value=StreamProfile(3, 65535), name="wide")
MANY = [Layer(1, 1, storage="absent")] * 1025


@pytest.mark.parametrize(
    ("code", "layers", "options"),
    [
        ("limit-layers", [], {}),
        ("limit-layers", MANY, {}),
        ("limit-sequences", LAYERS, {"sequences": 0}),
        ("limit-sequences", LAYERS, {"sequences": 65537}),
        ("input-tokens", LAYERS, {"sinks": -1}),
        ("input-tokens", LAYERS, {"recent": 1 << 32}),
        ("input-threads", LAYERS, {"threads": 0}),
        ("info-field", LAYERS, {"shard": (4, 4)}),
        ("info-field", LAYERS, {"positions_start": -1}),
        ("info-field", LAYERS, {"model": 3}),
        ("info-json", LAYERS, {"metadata": {"a": np.zeros(2)}}),
        ("info-json", LAYERS, {"metadata": {"a": float("nan")}}),
        ("limit-json", LAYERS, {"metadata": {"a": "x" * 70000}}),
        ("limit-json", LAYERS, {"metadata": {"a": [[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]}}),
        ("profile-words", [Layer(1024, 64, "float16", WIDE)], {}),
        ("profile-window-differs", [Layer(2, 8, "float16", SMALL), Layer(2, 8, "float16", "2.26")], {}),
        ("layer-profile", [Layer(4, 4, "float16", Layer(2, 8, "float16", SMALL).resolved(0).profile)], {}),
        ("layer-number", [Layer(2, 8, "float16", SMALL, number=3), Layer(2, 8, "float16", SMALL, number=3)], {}),
        ("profile-unknown", [Layer(2, 8, "float16", "9.99")], {}),
    ],
)
def test_refused_before_anything_is_written(tmp_path: Path, code: str, layers: Any, options: Any) -> None:
    assert code_of(lambda: create(tmp_path / "x.dqkv", layers, **options)) == code
    assert list(tmp_path.iterdir()) == []


def test_refused_layers() -> None:
    assert code_of(lambda: Layer(2, 8, "float64")) == "layer-dtype"
    assert code_of(lambda: Layer(2, 8, storage="lost")) == "layer-storage"
    assert code_of(lambda: Layer(2, 8, profile=None)) == "layer-profile"
    for heads, head_dim in ((0, 8), (8, 0), (1025, 1), (1, 1025), (1024, 65)):
        assert code_of(lambda h=heads, d=head_dim: Layer(h, d)) == "limit-geometry"  # type: ignore[misc]


def test_tokens_have_a_limit(tmp_path: Path) -> None:
    with create(tmp_path / "x.dqkv", LAYERS) as writer:
        writer.append(*part(tensors(LAYERS, 1), 0, 1))
        writer._pending[0].end += (1 << 40) - 2
        with pytest.raises(LimitError) as caught:
            writer.append(*part(tensors(LAYERS, 1), 0, 1))
        assert caught.value.code == "limit-tokens"
        writer.abort()


def test_progress_counts_tokens(tmp_path: Path) -> None:
    seen: list[int] = []
    write(tmp_path / "x.dqkv", LAYERS, tensors(LAYERS, 500), [200], progress=seen.append)
    assert sum(seen) == 500


def test_rows_are_cut_into_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "RECORD_TARGET", 1000)
    pairs = tensors(LAYERS, 90)
    write(tmp_path / "x.dqkv", LAYERS, pairs, recent=90)
    with dqkv.open(tmp_path / "x.dqkv") as reader:
        assert len(reader.log.records) > 5
        assert reader.layers[0].key[3:80].tobytes() == np.asarray(pairs[0][0])[3:80].tobytes()
        assert list(reader.verify()) == []


def test_streaming_takes_constant_memory(tmp_path: Path) -> None:
    layers = [Layer(4, 64, "bfloat16", "2.26")] * 4
    pairs = tensors(layers, 512)

    def peak(rounds: int) -> int:
        tracemalloc.start()
        with create(tmp_path / "x.dqkv", layers, _record_target=1 << 18) as writer:
            for _ in range(rounds):
                writer.append(*part(pairs, 0, 512))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)  # loads what is loaded once
    few, many = peak(6), peak(18)
    assert many < few + (1 << 20)
    assert (tmp_path / "x.dqkv").stat().st_size > 5 << 20


def test_many_writers_and_readers_leak_no_descriptor(tmp_path: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("no list of open files on this system")
    write(tmp_path / "x.dqkv", LAYERS, tensors(LAYERS, 50))
    before = len(list(folder.iterdir()))
    for _ in range(300):
        with dqkv.open(tmp_path / "x.dqkv") as reader:
            reader.layers[1].key[:]
        create(tmp_path / "y.dqkv", LAYERS).abort()
    assert len(list(folder.iterdir())) <= before + 1
