"""``dqkv completion``: the shells themselves are asked what they offer, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dquantcodec.cli.completion import SHELLS, read_commands
from dquantcodec.cli.main import COMMANDS, build_parser, main

#: What is on the line so far, and what is offered for its last word in a folder with a.dqkv and "b c.dqkv".
ASKED = [
    ("dqkv comp", {"compress", "compare", "completion"}),
    ("dqkv --v", {"--version"}),
    ("dqkv info --j", {"--json"}),
    ("dqkv --quiet info b", {"b c.dqkv"}),
    ("dqkv compress --layout B", {"BHTD", "BTHD"}),
    ("dqkv plan --profile paper", {"paper-2.26", "paper-1.96"}),
    ("dqkv compress --threads ", set()),
    ("dqkv completion ", set(SHELLS)),
]

BASH = """\
set -u
eval "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_dqkv
printf '%s\\n' "${COMPREPLY[@]-}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.dqkv", "b c.dqkv"):
        (tmp_path / name).touch()
    return tmp_path


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def answer(command: list[str], folder: Path, **environment: str) -> set[str]:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    assert done.stderr == ""
    return {line.split("\t")[0].replace("\\ ", " ") for line in done.stdout.splitlines()} - {""}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash is on the path")
def test_bash_offers_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    for line, offered in ASKED:
        assert answer(["bash", "-c", BASH, "bash", text, *line.split(" ")], folder) == offered, line
    assert answer(["bash", "-c", BASH, "bash", text, "dqkv", "compress", "--layout", "=", "B"], folder) == {
        "BHTD",
        "BTHD",
    }


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish is on the path")
def test_fish_offers_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "dqkv.fish").write_text(script("fish", capsys), encoding="utf-8")
    for line, offered in ASKED:
        command = ["fish", "--no-config", "-c", f"source dqkv.fish; complete -C '{line}'"]
        assert answer(command, folder, HOME=str(folder)) == offered, line


@pytest.mark.skipif(shutil.which("zsh") is None or sys.platform == "win32", reason="no zsh is on the path")
def test_zsh_completes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import pty

    (folder / "dqkv.zsh").write_text(script("zsh", capsys), encoding="utf-8")
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "HOME": str(folder), "PS1": ""}
    shell = subprocess.Popen(["zsh", "-f", "-i"], stdin=inner, stdout=inner, stderr=inner, cwd=folder, env=environment)
    os.close(inner)
    os.write(outer, b'autoload -U compinit; compinit -u -D; source dqkv.zsh; dqkv() { print -r -- "<$*>" }\n')
    # A completed line is run: the function above prints its words.
    for typed in (
        "doct\t",
        "info --js\ta.d\t",
        "compress --layout BT\t",
        "compress --profile paper-1\tb\t",
        "completion f\t",
    ):
        os.write(outer, f"dqkv {typed}\n".encode())
    os.write(outer, b"exit\n")
    text = b""
    try:
        while more := os.read(outer, 1 << 16):
            text += more
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(outer)
    assert shell.wait() == 0
    shown = text.decode()
    for words in (
        "doctor",
        "info --json a.dqkv",
        "compress --layout BTHD",
        "compress --profile paper-1.96 b c.dqkv",
        "completion fish",
    ):
        assert f"<{words}>" in shown, shown


def test_every_command_is_known() -> None:
    read = read_commands(build_parser(), COMMANDS)
    assert [command.name for command in read] == ["", *COMMANDS]
    modules = {path.stem for path in Path(str(sys.modules["dquantcodec.cli"].__path__[0])).glob("*.py")}
    assert set(COMMANDS) <= modules
    # Positional arguments of a command are of one kind: the script of bash counts on it.
    for command in read:
        places = {(argument.words, argument.files) for argument in command.arguments if not argument.names}
        assert len(places) <= 1, command.name
