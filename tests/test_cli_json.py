"""``--json``: one document of the documented shape and nothing else; and no control characters without a terminal."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from answer_support import check
from safetensors.numpy import save_file

from dquantcodec.cli.answers import ANSWERS, ERROR, rows
from dquantcodec.cli.console import document, paint, printable
from dquantcodec.cli.main import build_parser, main
from dquantcodec.integrations import llama_cpp

#: Arguments of every command; a word in capitals is a file or folder of the test's.
ARGUMENTS = {
    "demo": "--out DEMO",
    "compress": "IN NEW --recent 10 --nonfinite zero",
    "append": "IN GROWN --threads 1",
    "decompress": "CODED BACK",
    "info": "CODED",
    "verify": "CODED --salvage RESCUED",
    "compare": "IN CODED --html PAGE",
    "repack": "CODED PACKED",
    "reshard": "CODED RANKS --ranks 2 --recode",
    "convert": "STATE STATED --head-dim 32",
    "plan": "IN --memory 1GiB --batch 2",
    "bench": "--quick --device cpu --kv-heads 2 --head-dim 64 --tokens 128 --threads 2",
    "doctor": "",
    "completion": "bash",
}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files for the commands; the model has a name that no terminal should be given as it is."""
    folder = tmp_path_factory.mktemp("json")
    rng = np.random.default_rng(7)
    names = [f"layers.{layer}.{kind}" for layer in (0, 3) for kind in ("key", "value")]
    save_file({name: rng.standard_normal((1, 2, 300, 64)).astype(np.float16) for name in names}, folder / "IN")
    (folder / "IN").rename(folder / "in.safetensors")
    tensors = [rng.standard_normal((300, 64)).astype(np.float16)]
    llama_cpp.write_state(folder / "STATE", llama_cpp.State(np.arange(300, dtype=np.int32), tensors, tensors))
    for name in ("CODED", "GROWN"):
        argv = ["compress", "--quiet", str(folder / "in.safetensors"), str(folder / name), "--model", "\x1b[31mred\x07"]
        assert main(argv) == 0
    return folder


def arguments(command: str, folder: Path) -> list[str]:
    words = {"IN": "in.safetensors", "BACK": "back.safetensors", "PAGE": "page.html"}
    return [
        str(folder / words.get(word, word)) if word.isupper() else word for word in ARGUMENTS[command].split()
    ]  # fmt: skip


def commands() -> list[str]:
    actions = build_parser()._actions
    return [name for action in actions if isinstance(action, argparse._SubParsersAction) for name in action.choices]


@pytest.mark.parametrize("command", commands())
def test_every_command_answers_in_its_documented_shape(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [command, *arguments(command, folder)]
    assert main([*argv, "--json"]) == 0
    out, err = capsys.readouterr()
    check(json.loads(out), ANSWERS[command])
    assert not CONTROL.search(out + err)
    if command != "demo":  # what it prints is tested elsewhere
        assert main(["--quiet", *argv]) == 0
        out, err = capsys.readouterr()
        assert not CONTROL.search(out + err)
        assert "\nTraceback" not in err


def test_the_reference_says_what_every_key_is() -> None:
    assert set(ANSWERS) == set(commands())
    for command, shape in ANSWERS.items():
        for path, kind, meaning in rows(shape):
            assert meaning or "object" in kind, f"{command}: {path}"


def fails(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """The error of a command that must fail; the line on standard error is the same as ever."""
    try:
        status = main([*map(str, argv), "--json"])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    answer = json.loads(out)
    check(answer, ERROR)
    error: dict[str, Any] = answer["error"]
    assert status == (2 if error["code"] == "usage" else 1)
    assert f"[{error['code']}]" in err
    return error


@pytest.mark.parametrize("command", sorted(set(commands()) - {"doctor"}))
def test_usage_is_an_error_object_too(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, command, "--no-such-option")
    assert error["type"] == "UsageError"


def test_errors_are_objects(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gone = folder / "gone"
    assert fails(capsys, "info", gone) == {
        "type": "OSError", "code": "not-found", "message": "No such file or directory", "where": {"path": str(gone)},
    }  # fmt: skip
    arrays = {f"layers.0.{kind}": np.zeros((1, 2, 9, 64), np.float16) for kind in ("key", "value")}
    arrays["layers.0.key"][0, 1, 5, 3] = np.nan
    save_file(arrays, folder / "bad.safetensors")
    error = fails(capsys, "compress", folder / "bad.safetensors", folder / "bad.dqkv")
    assert (error["type"], error["code"]) == ("InputError", "input-nonfinite")
    assert {name: error["where"][name] for name in ("tensor", "token", "head", "channel")} == {
        "tensor": "layers.0.key", "token": 5, "head": 1, "channel": 3,
    }  # fmt: skip
    error = fails(capsys, "compare", folder / "in.safetensors", folder / "CODED", "--key", "x")
    assert "--value" in error["message"]

    def stop(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr("dquantcodec.cli.info.collect", stop)
    assert main(["info", str(folder / "CODED"), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "interrupted"


def test_findings_are_in_the_document_and_in_the_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((folder / "CODED").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "broken.dqkv").write_bytes(data)
    assert main(["verify", str(folder / "broken.dqkv"), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    check(answer, ANSWERS["verify"])
    assert not answer["sound"] and answer["findings"][0]["code"].endswith("-crc")


def test_names_in_files_cannot_reach_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(folder / "CODED")]) == 0
    out = capsys.readouterr().out
    assert r"\x1b[31mred\x07" in out and not CONTROL.search(out)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are bytes there")
def test_file_names_that_are_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / os.fsdecode(b"\xff.dqkv")
    path.write_bytes((folder / "CODED").read_bytes())
    assert main(["info", str(path)]) == 0
    assert r"\udcff.dqkv" in capsys.readouterr().out
    assert main(["info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(path)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_styles_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    red = paint("x", "red", Terminal())
    assert red == "\x1b[1;31mx\x1b[0m"
    assert printable(red + "\x1b[2J\t\n", Terminal()) == red + "\\x1b[2J\t\n"
    assert printable(red, StringIO()) == r"\x1b[1;31mx\x1b[0m"
    assert paint("x", "red", StringIO()) == "x"
    monkeypatch.setenv("NO_COLOR", "")
    assert paint("x", "red", Terminal()) == red, "an empty NO_COLOR asks for nothing"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red", Terminal()) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert paint("x", "red", Terminal()) == "x"


def test_documents_are_plain_json() -> None:
    facts = {"a": np.float32(0.5), "b": float("nan"), 3: (np.int64(2), Path("p")), "c": "é\x1b", "d": np.inf}
    text = document(facts)
    assert text.isascii() and "\x1b" not in text
    assert json.loads(text) == {"a": 0.5, "b": None, "3": [2, "p"], "c": "é\x1b", "d": None}
