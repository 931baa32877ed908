"""``dqkv info``, ``verify``, ``--help``, ``--version``: what they print, and what they do not load."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dquantcodec.cli.main import build_parser, main


def cache(shape: tuple[int, ...] = (1, 2, 300, 64), layers: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    return {
        f"layers.{layer}.{kind}": rng.standard_normal(shape).astype(np.float16)
        for layer in layers
        for kind in ("key", "value")
    }


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


@pytest.fixture
def coded(tmp_path: Path) -> Path:
    save_file(cache((2, 2, 300, 64), (0, 1, 5)), tmp_path / "in.safetensors")
    options = ["--sinks", 4, "--recent", 100, "--model", "toy", "--exact-layers", 5]
    assert run("compress", "--quiet", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
    return tmp_path / "x.dqkv"


def python(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, argv)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_json(coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", coded, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert {
        key: facts[key] for key in ("profile", "layers", "sequences", "tokens", "kv_heads", "head_dim", "model")
    } == {
        "profile": "2.26",
        "layers": 3,
        "sequences": 2,
        "tokens": 300,
        "kv_heads": 2,
        "head_dim": 64,
        "model": "toy",
    }
    assert facts["format_version"].count(".") == 1
    assert facts["bytes"] == coded.stat().st_size
    assert facts["values"] == 2 * 2 * 3 * 300 * 128
    assert facts["bits_per_value"] == pytest.approx(8 * facts["bytes"] / facts["values"])
    assert 2 < facts["bits_per_value_coded"] < 3.5 < facts["bits_per_value"]
    assert facts["names"] == {"key": "layers.{layer}.key", "value": "layers.{layer}.value"}
    assert facts["layout"] == "BHTD"


def test_differing_layers_are_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({**cache(), **cache((1, 4, 300, 32), (2,))}, tmp_path / "in.safetensors")
    assert run("compress", "--quiet", tmp_path / "in.safetensors", tmp_path / "x.dqkv") == 0
    assert run("info", tmp_path / "x.dqkv", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kv_heads"] == [2, 2, 4]
    assert facts["head_dim"] == [64, 64, 32]


def test_text_for_people(coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", coded) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"file        {coded}" in lines
    assert "layers      3 (0-1, 5)" in lines
    assert "            kept exact: 5" in lines
    assert "length      2 sequences of 300 tokens; exact: 4 first and 100 newest" in lines
    assert "geometry    2 KV heads of 64, float16" in lines
    assert "\x1b" not in "".join(lines)


def test_verify_says_sound(coded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", coded) == 0
    assert capsys.readouterr().out.startswith(f"{coded}: sound (")


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6, 0.97])
def test_verify_finds_a_changed_byte(coded: Path, capsys: pytest.CaptureFixture[str], share: float) -> None:
    data = bytearray(coded.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    coded.write_bytes(data)
    assert run("verify", coded) == 1
    *findings, last = capsys.readouterr().out.splitlines()
    assert findings
    assert all(line.startswith(f"{coded}: ") and line.endswith("]") for line in findings)
    assert last == f"{len(findings)} finding{'s' if len(findings) > 1 else ''}"


#: Never needed to say what a file holds, and slow to load.
HEAVY = (
    "numpy", "numba", "llvmlite", "scipy", "torch", "cupy", "safetensors", "tqdm", "zstandard", "ml_dtypes",
    "statistics", "dquantcodec.codec", "dquantcodec.rotate", "dquantcodec.drift", "dquantcodec.file.verify",
    "dquantcodec.tensors.source", "dquantcodec.cli.compress",
)  # fmt: skip
#: Nor these to help with the command line.
PLAIN = (*HEAVY, "google_crc32c", "json", "inspect")


@pytest.mark.parametrize(
    ("argv", "absent"),
    [
        (("--help",), (*PLAIN, "dquantcodec.profile", "dquantcodec.cli.info")),
        (("--version",), (*PLAIN, "dquantcodec.profile", "dquantcodec.cli.info")),
        (("compress", "--help"), HEAVY[:-1]),
        (("doctor", "--help"), HEAVY),
        (("completion", "bash"), HEAVY[:-1]),
        (("info", "FILE"), HEAVY),
        (("info", "FILE", "--json"), HEAVY),
        (("info", "TORN", "--json"), HEAVY),
        (("info", "DAMAGED", "--json"), HEAVY),
        # fsspec looks for every compression there is.
        (("info", "memory://FILE", "--json"), tuple(name for name in HEAVY if name != "zstandard")),
    ],
)
def test_light_commands_load_no_heavy_package(
    coded: Path, tmp_path: Path, argv: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    data = coded.read_bytes()
    files = {"FILE": coded, "TORN": tmp_path / "torn.dqkv", "DAMAGED": tmp_path / "damaged.dqkv"}
    files["TORN"].write_bytes(data[:-5000])
    files["DAMAGED"].write_bytes(data[:4096] + bytes(64) + data[4160:-5000])
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "if sys.argv[2:3] == ['memory://FILE']:\n"
        "    import fsspec\n"
        f"    fsspec.filesystem('memory').pipe_file('/FILE', Path({str(coded)!r}).read_bytes())\n"
        "from dquantcodec.cli.main import build_parser, main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        f"loaded = [name for name in {absent!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)\n"
    )
    result = python("-c", script, *(str(files.get(arg, arg)) for arg in argv))
    assert result.returncode == 0, result.stderr
    assert result.stdout
    if "--json" in argv:
        found = json.loads(result.stdout)
        assert found["error"]["code"] == "record-header" if "DAMAGED" in argv else found["torn"] == ("TORN" in argv)


def test_the_package_runs_as_a_module() -> None:
    import dquantcodec

    result = python("-m", "dquantcodec", "--version")
    assert (result.returncode, result.stdout) == (0, f"dqkv {dquantcodec.__version__}\n")
    result = python("-m", "dquantcodec", "--help")
    assert all(
        f"  {name} " in result.stdout for name in ("demo", "compress", "decompress", "info", "verify", "compare")
    )
    assert result.stderr == ""


def test_every_command_has_help_that_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = build_parser()
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for name, command in {"": parser, **actions[0].choices}.items():
        lines = command.format_help().splitlines()
        assert max(map(len, lines)) <= 80, name
        # The options that all have come first and say the same everywhere.
        common = [line.split()[0] for line in lines if line.startswith("  -")][:4]
        assert common == ["-h,", "--quiet", "--json", "--debug"], name


def test_a_reader_that_has_gone_is_no_traceback(coded: Path) -> None:
    script = (
        "import os, subprocess, sys\n"
        "run = subprocess.Popen([sys.executable, '-m', 'dquantcodec', 'info', sys.argv[1]],\n"
        "                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "run.stdout.close()\n"
        "sys.stdout.write(run.stderr.read().decode())\n"
        "run.wait()\n"
    )
    assert python("-c", script, coded).stdout == ""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(coded: Path, environment: dict[str, str], coloured: bool) -> None:
    import pty

    outer, inner = pty.openpty()
    clean = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    process = subprocess.Popen(
        [sys.executable, "-m", "dquantcodec", "info", str(coded)],
        stdout=inner,
        env={**clean, "TERM": "xterm", **environment},
    )
    os.close(inner)
    assert process.wait() == 0
    text = os.read(outer, 1 << 16)
    os.close(outer)
    assert (b"\x1b[" in text) == coloured
