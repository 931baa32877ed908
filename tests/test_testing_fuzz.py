"""The fuzz targets: every input of the corpus, without a compiler; what targets are for; the command."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dquantcodec.testing import branches as watching
from dquantcodec.testing import fuzz, targets

CORPUS = Path(__file__).parent / "corpus"

REPLAY = """
import sys
from pathlib import Path
from dquantcodec import kernels
from dquantcodec.testing.fuzz import TARGET_NAMES, replay_corpus
assert not kernels.COMPILED
print(sum(replay_corpus(target, Path(sys.argv[1]) / target) for target in TARGET_NAMES))
"""


def test_the_corpus_replays_without_a_compiler() -> None:
    stored = sum(1 for path in CORPUS.rglob("*") if path.is_file())
    assert stored > 50, "the corpus is beside the tests"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", REPLAY, str(CORPUS)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= stored + 6


def test_files_in_packed_form_come_back() -> None:
    for data in targets.seeds("file"):
        whole = targets.unpack_blocks(data[1:])
        assert targets.pack_blocks(whole) == data[1:] and len(whole) % 4096 == 0
        targets.file(data)


def test_seeds_get_behind_the_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    monkeypatch.setattr(targets, "read_log", lambda *given: parsed.append(original(*given)) or parsed[-1])
    original = targets.walk
    for data in targets.seeds("records"):
        targets.records(data)
    assert len(parsed[0].records) > 4


def test_a_failing_input_is_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        assert data.count(b"\xff") < 3, "three of them"

    monkeypatch.setitem(targets.TARGETS, "container", fail)
    with pytest.raises(AssertionError, match="three of them"):
        fuzz.fuzz_at_random("container", 60, None, tmp_path / "failing.bin")
    assert (tmp_path / "failing.bin").read_bytes().count(b"\xff") >= 3


def test_the_command_says_when_nothing_guides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "find_spec", lambda name: None)
    monkeypatch.setattr(watching, "AVAILABLE", False)
    monkeypatch.chdir(tmp_path)
    assert fuzz.main(["container", "--time", "0.2"]) == 0
    said = capsys.readouterr().out
    assert "not guided by coverage" in said and re.search(r"^\d+ inputs of container in \d+ s$", said, re.MULTILINE)
    assert fuzz.main(["header", "--replay"]) == 0
    assert "inputs of header replayed" in capsys.readouterr().out


@pytest.mark.skipif(not watching.AVAILABLE, reason="sys.monitoring is of Python 3.12")
def test_branches_guide_the_search(tmp_path: Path) -> None:
    found = []
    for save in (tmp_path / "new", None):
        with watching.Branches() as branches:
            assert fuzz.fuzz_at_random(
                "container", 600, None, tmp_path / "failing.bin", most=400, save=save, branches=branches
            ) == 400  # fmt: skip
            found.append(len(branches))
            targets.container(b"")
            branches.fresh()
            targets.container(b"")
            assert not branches.fresh(), "what was seen is not new"
    new = list((tmp_path / "new").iterdir())
    assert found[0] > 100 and 0 < len(new) < 200
    with watching.Branches() as branches:
        assert fuzz.replay_corpus("container", tmp_path / "new") and branches.fresh()


TESTS = Path(__file__).parent
GUIDE = TESTS.parent / "docs" / "fuzzing.md"


def test_every_property_has_the_tests_the_guide_names() -> None:
    text = GUIDE.read_text(encoding="utf-8").split("## Branch coverage")[0]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"


@pytest.fixture(scope="module")
def fuzz_headers() -> ModuleType:
    tool = TESTS.parent / "tools" / "fuzz_headers.py"
    if not tool.exists():
        pytest.skip("tools/fuzz_headers.py is not beside the tests")
    spec = importlib.util.spec_from_file_location("fuzz_headers", tool)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_has_the_runs_on_record(fuzz_headers: ModuleType, tmp_path: Path) -> None:
    copy = tmp_path / "fuzzing.md"
    copy.write_bytes(GUIDE.read_bytes())
    fuzz_headers.write_table(TESTS.parent / "benchmarks" / "results" / "fuzz.json", copy)
    assert copy.read_bytes() == GUIDE.read_bytes()


def test_parts_of_a_run_add_up(tmp_path: Path) -> None:
    path = tmp_path / "fuzz.json"
    for target, inputs, seen, failed in (("header", 5, 7, 0), ("file", 2, 3, 0), ("header", 6, 6, 1)):
        fuzz.record(path, fuzz.Run(target, "random", inputs, 1.5, seen, failed, "command"))
    header, file = json.loads(path.read_text())["runs"]
    assert (header["inputs"], header["parts"], header["seconds"]) == (11, 2, 3.0)
    assert (header["branches"], header["failed"], file["inputs"]) == (7, 1, 2)


PROGRAM = """#!/bin/sh
echo "$DQ_TARGET $*"
for option in "$@"; do case $option in -runs=*) runs=${option#-runs=} ;; esac; done
echo "#$runs NEW cov: 7 ft: 9"
echo "#$runs DONE cov: 9 ft: 12"
echo "Done $runs runs in 3 second(s)"
echo "stat::number_of_executed_units: $runs"
case "$*" in *failing-index-1*) exit 77 ;; esac
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a shell")
def test_processes_share_the_inputs_of_a_target(
    fuzz_headers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(target: str, folder: Path) -> Path:
        program = folder / "program"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        return program

    monkeypatch.setattr(fuzz_headers, "build", build)
    (tmp_path / "pack").mkdir()
    fuzz_headers.pack(["index", "device-rans"], tmp_path / "pack")
    logs = tmp_path / "logs"
    run = subprocess.run(
        ["sh", str(tmp_path / "pack" / "run.sh"), str(logs), "100", "3", "1000"], capture_output=True, text=True
    )
    assert run.returncode == 0 and "index: 1000 inputs" in run.stdout, run
    assert "NEW" not in (logs / "index-0.log").read_text()
    index, rans = (
        fuzz_headers.run_of(t, texts) for t, texts in sorted(fuzz_headers.logs_of(logs).items(), reverse=True)
    )
    assert (index.target, index.inputs, index.seconds, index.branches, index.failed) == ("index", 1000, 9, 9, 1)
    assert (rans.target, rans.inputs, rans.failed) == ("device-rans", 1000, 0)
    commands = [(logs / f"index-{n}.log").read_text().split("\n")[0] for n in range(3)]
    assert len({re.findall(r"-seed=(\d+)", command)[0] for command in commands}) == 3
    # A process that was ended from outside, and one of Python.
    (logs / "index-1.log").write_text("#1 INITED cov: 3\n")
    fuzz.record(logs / "file-0.json", fuzz.Run("file", "sys.monitoring", 5, 1.5, 4, 0, "command"))
    table = tmp_path / "fuzz.json"
    monkeypatch.setattr(
        sys, "argv", ["fuzz_headers", "--logs", str(logs), "--machine", "elsewhere", "--json", str(table)]
    )
    assert fuzz_headers.main() == 0
    rows = {row["target"]: row for row in json.loads(table.read_text())["runs"]}
    assert rows["index"]["inputs"] == 667 and rows["file"]["inputs"] == 5
    assert {row["machine"] for row in rows.values()} == {"elsewhere"}
