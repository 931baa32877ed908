"""``dqkv append``, ``dqkv repack`` and ``dqkv verify --salvage``."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dquantcodec.file as dqkv
from dquantcodec.cli.main import main
from dquantcodec.file import Layer, create

RNG = np.random.default_rng(5)
WHOLE = {
    f"layers.{layer}.{kind}": RNG.standard_normal((2, 2, 420, 64)).astype(np.float16)
    for layer in (0, 3)
    for kind in ("key", "value")
}


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def save(path: Path, start: int, stop: int) -> Path:
    save_file({name: array[:, :, start:stop].copy() for name, array in WHOLE.items()}, path)
    return path


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    """The first 200 tokens of both sequences, 40 of them exact."""
    path = tmp_path / "c.dqkv"
    assert run("compress", save(tmp_path / "first.st.safetensors", 0, 200), path, "--recent", 40, "--quiet") == 0
    return path


def tokens(path: Path) -> list[int]:
    with dqkv.open(path, mode="strict") as reader:
        assert list(reader.verify()) == []
        return [sequence.tokens for sequence in reader.sequences]


def test_append_repack_and_back(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = save(tmp_path / "rest.safetensors", 200, 350)
    assert run("append", rest, coded) == 0
    out = capsys.readouterr().out
    assert f"{coded}: 300 tokens added, 350, 350 held" in out
    assert run("append", save(tmp_path / "all.safetensors", 0, 420), coded, "--whole") == 0
    assert f"{coded}: 140 tokens added, 420, 420 held" in capsys.readouterr().out
    assert tokens(coded) == [420, 420]
    assert run("info", coded, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 420 and facts["dead_bytes"] > 0
    assert run("info", coded) == 0
    assert "hold nothing any more: see repack" in capsys.readouterr().out
    assert run("compare", tmp_path / "all.safetensors", coded) == 0
    packed = tmp_path / "p.dqkv"
    assert run("repack", coded, packed) == 0
    assert f"{packed}: " in capsys.readouterr().out and packed.stat().st_size < coded.stat().st_size
    assert tokens(packed) == [420, 420]
    backs = []
    for path in (coded, packed):
        assert run("decompress", path, tmp_path / "back.safetensors", "--quiet") == 0
        backs.append(load_file(tmp_path / "back.safetensors"))
    for name, array in WHOLE.items():
        assert backs[0][name].tobytes() == backs[1][name].tobytes() and backs[0][name].shape == array.shape
        # Newest tokens are exact; older ones are near.
        assert (backs[0][name][:, :, -40:] == array[:, :, -40:]).all()
        error = backs[0][name].astype(np.float64) - array
        assert (error**2).mean() < 0.2


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_what_append_refuses(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = coded.read_bytes()
    other = {name: array[:1] for name, array in WHOLE.items()}
    bad = {name: array[:, :, :9].copy() for name, array in WHOLE.items()}
    bad["layers.3.value"][1, 0, 5, 2] = np.inf
    cases: list[tuple[dict[str, Any], list[str], str]] = [
        (other, [], "[append-sequences]"),
        ({name: array[..., :32].copy() for name, array in WHOLE.items()}, [], "[append-layers]"),
        ({name: array.astype(np.float32) for name, array in WHOLE.items()}, [], "[append-layers]"),
        ({name: array for name, array in WHOLE.items() if "0" in name}, [], "[layer-missing]"),
        ({name: array[:, :, :100].copy() for name, array in WHOLE.items()}, ["--whole"], "[append-tokens]"),
    ]
    for arrays, options, code in cases:
        save_file(arrays, tmp_path / "in.safetensors")
        assert run("append", tmp_path / "in.safetensors", coded, *options) == 1
        assert complaint(capsys).endswith(code)
    assert coded.read_bytes() == before
    with dqkv.append(coded):
        assert run("append", save(tmp_path / "in.safetensors", 0, 9), coded) == 1
        assert complaint(capsys).endswith("[file-locked]")
    assert coded.read_bytes() == before
    with create(tmp_path / "empty.dqkv", [Layer(2, 64, "float16", storage="absent")]):
        pass
    assert run("append", tmp_path / "in.safetensors", tmp_path / "empty.dqkv") == 1
    assert complaint(capsys).endswith("[append-layers]")


def test_a_failed_append_takes_back_what_it_added(
    tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {name: array[:, :, 200:].copy() for name, array in WHOLE.items()}
    bad["layers.3.value"][1, 0, 219, 2] = np.inf  # of the second sequence, when the first is in
    save_file(bad, tmp_path / "in.safetensors")
    assert run("append", tmp_path / "in.safetensors", coded) == 1
    assert complaint(capsys).endswith("[input-nonfinite]")
    assert tokens(coded) == [200, 200]
    assert run("append", tmp_path / "in.safetensors", coded, "--nonfinite", "zero") == 0
    assert "replaced 1 number" in capsys.readouterr().out
    assert tokens(coded) == [420, 420]

    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("dquantcodec.file.disk.DiskFile.write", full)
        assert run("append", save(tmp_path / "in.safetensors", 0, 200), coded) == 1
    assert complaint(capsys) == f"dqkv: error: {coded}: No space left on device [disk-full]"
    assert tokens(coded) == [420, 420]


def test_repack_refuses_a_torn_file(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    coded.write_bytes(coded.read_bytes()[:-1])
    assert run("repack", coded, tmp_path / "p.dqkv") == 1
    assert complaint(capsys).endswith("[log-torn]")
    assert run("repack", coded, coded) == 1
    assert complaint(capsys).endswith("[output-is-input]")
    assert run("repack", coded, tmp_path / "p.dqkv", "--accept-torn") == 0
    assert tokens(tmp_path / "p.dqkv") == [200, 200]


def test_verify_salvage(tmp_path: Path, coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rescued.dqkv"
    assert run("verify", coded, "--salvage", out) == 0
    assert "200, 200 tokens" in capsys.readouterr().out
    assert tokens(out) == [200, 200]
    with dqkv.open(coded) as reader:
        record = next(r for r in reader.log.records if r.header.sequence == 1 and r.header.type_name == "PAGES")
    data = bytearray(coded.read_bytes())
    data[record.payload + 5000] ^= 1
    coded.write_bytes(data)
    assert run("verify", coded, "--salvage", out) == 1
    printed = capsys.readouterr().out
    assert "[page-crc]" in printed and f"{coded}: " in printed
    assert "lost: " in printed and "of sequence 1 are lost [tokens-lost]" in printed
    found = tokens(out)
    assert found[0] == 200 and found[1] < 200
    data[9] ^= 1
    coded.write_bytes(data)
    assert run("verify", coded, "--salvage", tmp_path / "none.dqkv") == 1
    assert not (tmp_path / "none.dqkv").exists()
