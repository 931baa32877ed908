"""``dqkv reshard``: files by rank and back, on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dquantcodec.cli.main import main


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sequences of two layers of four heads in two groups; one layer stays exact."""
    folder = tmp_path_factory.mktemp("reshard")
    rng = np.random.default_rng(3)
    names = [f"layers.{layer}.{kind}" for layer in (0, 1, 4) for kind in ("key", "value")]
    save_file({name: rng.standard_normal((2, 4, 200, 32), np.float32) for name in names}, folder / "x.safetensors")
    options = ["--head-groups", 2, "--exact-layers", 1, "--recent", 20, "--model", "m", "--quiet"]
    assert run("compress", folder / "x.safetensors", folder / "x.dqkv", *options) == 0
    return folder / "x.dqkv"


def test_ranks_and_back(coded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = tmp_path / "ranks"
    assert run("reshard", coded, "--ranks", 2, ranks) == 0
    assert "no page was encoded again" in capsys.readouterr().out
    files = [ranks / f"shard-{rank}-of-2.dqkv" for rank in (0, 1)]
    assert sorted(ranks.iterdir()) == files
    assert run("info", files[1]) == 0
    told = capsys.readouterr().out
    assert "2 KV heads of 32" in told and "part 1 of 2 of the model's KV heads" in told
    # Options before, between and after the files.
    assert run("reshard", "--ranks", 1, files[1], files[0], tmp_path / "a.dqkv") == 0
    assert run("reshard", files[0], files[1], "--ranks", 1, tmp_path / "b.dqkv") == 0
    assert run("reshard", *files, tmp_path / "c.dqkv", "--ranks", 1) == 0
    for name in ("a", "b", "c"):
        assert run("decompress", tmp_path / f"{name}.dqkv", tmp_path / f"{name}.safetensors", "--quiet") == 0
        assert run("verify", tmp_path / f"{name}.dqkv") == 0
    assert run("decompress", coded, tmp_path / "x.safetensors", "--quiet") == 0
    wanted = load_file(tmp_path / "x.safetensors")
    for name in ("a", "b", "c"):
        found = load_file(tmp_path / f"{name}.safetensors")
        assert {n: x.tobytes() for n, x in found.items()} == {n: x.tobytes() for n, x in wanted.items()}
    assert run("info", tmp_path / "a.dqkv") == 0
    assert "in 2 head groups" in capsys.readouterr().out


def test_cutting_a_group_must_be_asked_for(coded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "four"
    assert run("reshard", coded, out, "--ranks", 4) == 1
    assert "[shard-groups]" in capsys.readouterr().err and not list(out.iterdir())
    assert run("reshard", coded, out, "--ranks", 4, "--recode", "--threads", 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["layer 0", "layer 4"]
    assert "encoded heads 0, 1, 2, 3 again" in lines[0] and lines[0].count("%") == 8
    assert len(list(out.iterdir())) == 4


def test_comparing_measures_every_group(coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", coded.with_suffix(".safetensors"), coded, "--json") == 0
    found = {row["layer"]: row for row in json.loads(capsys.readouterr().out)["layers"]}
    assert found[1]["key_nmse"] == 0 and found[1]["key_drift"] is None
    for layer in (0, 4):
        assert 0 < found[layer]["key_drift"] < 0.2 and 0 < found[layer]["value_nmse"] < 0.3


def test_what_is_refused(coded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, code in (
        ((coded, tmp_path / "out", "--ranks", 3), "shard-heads"),
        ((coded, coded, tmp_path / "out.dqkv", "--ranks", 1), "identity-shard"),
        ((coded, coded, "--ranks", 1), "output-is-input"),
        ((coded, coded, "--ranks", 2), "not-folder"),
        ((coded, tmp_path / "no" / "out", "--ranks", 2), "not-found"),
        ((tmp_path / "no.dqkv", tmp_path / "out", "--ranks", 2), "not-found"),
    ):
        assert run("reshard", *argv) == 1
        assert f"[{code}]" in capsys.readouterr().err
    for argv in ((coded, "--ranks", 1), (coded, tmp_path / "out"), (coded, tmp_path / "out", "--ranks", 0)):
        with pytest.raises(SystemExit) as stop:
            run("reshard", *argv)
        assert stop.value.code == 2
    assert coded.stat().st_size and not list(tmp_path.glob("out.dqkv"))


def test_copying_needs_no_numba(coded: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from dquantcodec.cli.main import main\n"
        f"assert main(['reshard', {str(coded)!r}, {str(tmp_path / 'ranks')!r}, '--ranks', '2', '--quiet']) == 0\n"
        "assert 'numba' not in sys.modules, 'numba was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
