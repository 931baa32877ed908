"""The fuzz targets: every input of the corpus, without a compiler; what targets are for; the command."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dquantcodec import Codec, Pages
from dquantcodec.testing import ContainerPlan, fuzz, targets
from dquantcodec.testing import branches as watching
from dquantcodec.testing.containers import Decoded

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


def some_inputs(target: str) -> list[bytes]:
    rng = random.Random(0)
    return [fuzz.mutated(rng.choice(targets.seeds(target)), b"", rng) for _ in range(200)]


def test_inputs_that_share_a_tile_are_all_there() -> None:
    inputs = some_inputs("container")
    groups = targets.together("container", inputs)
    assert sorted(data for group, _ in groups for data in group) == sorted(inputs)
    assert max(len(group) for group, _ in groups) == 32
    for group, joined in groups:
        plan, bodies = targets._containers(joined)
        assert [(plan, body) for body in bodies] == [(p, first) for p, (first, *_) in map(targets._containers, group)]


def test_inputs_that_share_pages_are_all_there() -> None:
    inputs = some_inputs("encode")
    groups = targets.together("encode", inputs)
    assert sorted(data for group, _ in groups for data in group) == sorted(inputs)
    for group, joined in groups:
        plan, rows = targets._rows(joined)
        alone = [targets._rows(data) for data in group]
        assert all(p is plan for p, _ in alone)
        assert rows.tobytes() == np.concatenate([x[:, :3] for _, x in alone], axis=1).tobytes()
    assert targets.together("file", [b"a", b"b"]) == [([b"a"], b"a"), ([b"b"], b"b")]


def test_a_wrong_level_of_one_lane_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one input that fails alone is written, not all that ran with it."""

    def broken(plan: ContainerPlan, bodies: Sequence[bytes]) -> list[Decoded]:
        found = decode(plan, bodies)
        return [
            ([level + (body[0] == 7) for level in levels or ()], code)
            for (levels, code), body in zip(found, bodies, strict=True)
        ]

    decode = targets.decode_tile
    monkeypatch.setattr(targets, "decode_tile", broken)
    with pytest.raises(AssertionError):
        fuzz.fuzz_at_random("container", 600, None, tmp_path / "failing.bin")
    _, bodies = targets._containers((tmp_path / "failing.bin").read_bytes())
    assert bodies[0][0] == 7 and len(bodies) < 32


def test_inputs_that_fail_together_alone_are_written_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(data: bytes) -> None:
        assert len(targets._containers(data)[1]) < 32, "a full tile"

    monkeypatch.setitem(targets.TARGETS, "container", crowded)
    with pytest.raises(AssertionError, match="a full tile"):
        fuzz.fuzz_at_random("container", 600, None, tmp_path / "failing.bin")
    with pytest.raises(AssertionError, match="a full tile"):
        crowded((tmp_path / "failing.bin").read_bytes())


def test_values_that_decode_wrongly_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Codec.decode

    def broken(self: Codec, pages: Pages, *given: Any, **named: Any) -> Any:
        keys, values = original(self, pages, *given, **named)
        values[:, :, -1] += values[:, :, -1] > 2
        return keys, values

    monkeypatch.setattr(Codec, "decode", broken)
    with pytest.raises(AssertionError):
        fuzz.fuzz_at_random("encode", 600, None, tmp_path / "failing.bin")


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


@pytest.mark.skipif(not watching.AVAILABLE, reason="sys.monitoring is of Python 3.12")
def test_what_was_seen_can_be_forgotten() -> None:
    targets.container(b"")  # plans are made
    with watching.Branches() as branches:
        seen = []
        for _ in range(2):
            targets.container(b"")
            seen.append(branches.fresh())
            branches.forget(seen[-1])
        assert set(seen[0]) == set(seen[1]) != set()
        found = seen[0]
        branches.remember(found)
        branches.forget(found[::2])
        branches.remember(found)
        branches.fresh()
        targets.container(b"")
        assert not branches.fresh()


TESTS = Path(__file__).parent
GUIDE = TESTS.parent / "docs" / "fuzzing.md"


def test_every_property_has_the_tests_the_guide_names() -> None:
    text = GUIDE.read_text(encoding="utf-8").split("## Branch coverage")[0]
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"


def tool(name: str) -> ModuleType:
    path = TESTS.parent / "tools" / f"{name}.py"
    if not path.exists():
        pytest.skip(f"tools/{name}.py is not beside the tests")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fuzz_headers() -> ModuleType:
    return tool("fuzz_headers")


@pytest.fixture(scope="module")
def fuzz_python() -> ModuleType:
    return tool("fuzz_python")


def test_processes_are_shared_out_by_the_time_that_is_missing(fuzz_python: ModuleType) -> None:
    runs = [
        {"target": target, "engine": engine, "inputs": inputs, "seconds": seconds}
        for target, engine, inputs, seconds in (
            ("header", "sys.monitoring", 900, 9.0), ("header", "atheris", 100, 1.0), ("header", "libFuzzer", 99, 1.0),
            ("index", "sys.monitoring", 500, 10.0), ("file", "sys.monitoring", 10, 1.0),
        )
    ]  # fmt: skip
    lacking = fuzz_python.missing(runs, ["header", "index", "file"], 1000)
    assert lacking == {"header": 0, "index": 500, "file": 990}
    assert sorted(fuzz_python.shared_out(lacking, runs, 12)) == ["file"] * 10 + ["index"] * 2
    assert sorted(fuzz_python.shared_out({**lacking, "file": 90}, runs, 3)) == ["file", "index", "index"]
    assert fuzz_python.shared_out({"header": 0}, runs, 3) == []


@pytest.mark.skipif(sys.platform == "win32", reason="a shell")
def test_python_targets_run_in_processes_until_nothing_is_missing(
    fuzz_python: ModuleType, fuzz_headers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "fuzz.json"
    table.write_text(json.dumps({"what": "", "runs": []}))
    given = ["header", "records", "--processes", "3", "--inputs", "60", "--seconds", "300", "--json", str(table)]
    engine = "sys.monitoring" if watching.AVAILABLE else "random"
    for logs in (tmp_path / "first", tmp_path / "second"):
        new = ["--new", str(tmp_path / "first" / "new.tar.gz")] if (tmp_path / "first" / "new.tar.gz").exists() else []
        monkeypatch.setattr(sys, "argv", ["fuzz_python", *given, "--logs", str(logs), *new])
        assert fuzz_python.main() == 0
        monkeypatch.setattr(sys, "argv", ["fuzz_headers", "--logs", str(logs), "--json", str(table)])
        assert fuzz_headers.main() == 0
        rows = {row["target"]: row for row in json.loads(table.read_text())["runs"]}
        assert {name: row["inputs"] for name, row in rows.items()} == {"header": 60, "records": 60}
        assert sum(row["parts"] for row in rows.values()) == 3 and {row["engine"] for row in rows.values()} == {engine}
    assert (tmp_path / "first" / "new.tar.gz").exists() == watching.AVAILABLE


def test_the_guide_has_the_runs_on_record(fuzz_headers: ModuleType, tmp_path: Path) -> None:
    copy = tmp_path / "fuzzing.md"
    copy.write_bytes(GUIDE.read_bytes())
    fuzz_headers.write_table(TESTS.parent / "benchmarks" / "results" / "fuzz.json", copy)
    assert copy.read_bytes() == GUIDE.read_bytes()


def test_the_guide_has_the_coverage_on_record(tmp_path: Path) -> None:
    branch_coverage = tool("branch_coverage")
    copy = tmp_path / "fuzzing.md"
    copy.write_bytes(GUIDE.read_bytes())
    found = json.loads((TESTS.parent / "benchmarks" / "results" / "branch_coverage.json").read_text(encoding="utf-8"))
    branch_coverage.write_sentence(copy, found)
    assert copy.read_bytes() == GUIDE.read_bytes()
    assert branch_coverage.sentence({**found, "percent": 99.5}).startswith("99.5 % of")


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
