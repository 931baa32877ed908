"""Many files at once: what fails is told and tried again, what is finished is not done again, nothing is left half."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from answer_support import check
from safetensors.numpy import load_file, save_file

import dquantcodec as dq
from dquantcodec import batch
from dquantcodec.batch import Compress, Decompress, Item, Outcome, Settings, Verify, plan_items, run_all, run_item
from dquantcodec.batch import outcome as outcomes
from dquantcodec.cli.answers import BATCH
from dquantcodec.cli.main import main
from dquantcodec.errors import InputError
from dquantcodec.integrations.ray import on_batch, on_row

#: Exact layers alone: these tests are not about coding, and processes start sooner without it.
WORK = Compress(Settings(exact_layers=frozenset({0})))
ROWS = np.random.default_rng(7).standard_normal((1, 2, 200, 64)).astype(np.float16)


def save(path: Path, factor: float = 1) -> str:
    save_file({"key_0": ROWS * np.float16(factor), "value_0": ROWS}, path)
    return str(path)


@dataclass(frozen=True)
class Told:
    """Work that does as the name of its input says; other processes find it in this file."""

    log: str = ""
    name: ClassVar[str] = "compress"
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors",)
    made: ClassVar[str] = ".dqkv"

    def finished(self, _item: Item) -> bool:
        return False

    def run(self, item: Item) -> None:
        with Path(self.log).open("a") as log:
            log.write(f"{item.input} {os.environ['NUMBA_NUM_THREADS']}\n")
        if item.input == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif item.input == "stuck":
            with dq.create(item.output, [dq.Layer(2, 64, "float16", storage="exact")]):
                time.sleep(600)
        elif item.input == "waits":
            while not list(Path(item.output).parent.glob(".*.partial")):
                time.sleep(0.02)
        else:
            time.sleep(0.1)


@dataclass(frozen=True)
class Fails(Told):
    """Work that raises what it is given, one after the other."""

    errors: list[Exception] = field(default_factory=list)
    unknown: bool = False

    def finished(self, _item: Item) -> bool:
        if self.unknown:
            raise ConnectionError("no answer")
        return False

    def run(self, _item: Item) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes find the classes of this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))


@pytest.mark.parametrize(
    ("errors", "retries", "expected"),
    [
        ([], 1, ("done", 1, "")),
        ([OSError(5, "gone", "s3://me:secret@x/y"), MemoryError()], 2, ("done", 3, "")),
        ([OSError(5, "gone", "s3://me:secret@x/y")] * 2, 1, ("failed", 2, "io")),
        ([InputError("bad", code="input-shape")], 5, ("failed", 1, "input-shape")),
        ([RuntimeError("https://x/y?key=secret")], 0, ("failed", 1, "internal")),
    ],
)
def test_failures_that_may_pass_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], retries: int, expected: tuple[str, int, str]
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(outcomes.time, "sleep", pauses.append)
    found = run_item(Fails(errors=errors), Item("https://me:secret@a/b", ""), retries=retries)
    assert (found.state, found.attempts, found.code) == expected
    assert len(pauses) == found.attempts - 1
    assert "secret" not in f"{found}"


def test_storage_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes.time, "sleep", lambda _: None)
    found = run_item(Fails(unknown=True), Item("a", "b"), retries=2)
    assert (found.state, found.attempts, found.code) == ("failed", 3, "io")
    assert run_item(Fails(unknown=True), Item("a", "b"), redo=True).state == "done"


def test_finished_outputs_are_not_made_again(tmp_path: Path) -> None:
    source, out = save(tmp_path / "a.safetensors"), tmp_path / "deep" / "a.dqkv"
    item = Item(source, str(out))

    def state(work: batch.Work = WORK, it: Item = item, **options: Any) -> str:
        found = run_item(work, it, **options)
        assert not found.message
        return found.state

    assert [state(), state(), state(redo=True), state()] == ["done", "skipped", "done", "skipped"]
    more_threads = replace(WORK, settings=replace(WORK.settings, threads=2))
    other_model = replace(WORK, settings=replace(WORK.settings, model="m"))
    assert [state(more_threads), state(other_model), state(other_model)] == ["skipped", "done", "skipped"]
    assert [state(), state()] == ["done", "skipped"]
    save(tmp_path / "a.safetensors", 2)
    assert [state(), state()] == ["done", "skipped"]
    with out.open("r+b") as file:
        file.truncate(out.stat().st_size - 1)
    assert [state(), state()] == ["done", "skipped"]
    main(["compress", "--quiet", "--exact-layers", "0", source, str(out)])  # says nothing of its input
    assert state() == "done"

    back = Item(str(out), str(tmp_path / "back.safetensors"))
    assert [state(Decompress(), back), state(Decompress(), back)] == ["done", "skipped"]
    assert np.array_equal(load_file(back.output)["key_0"], ROWS * np.float16(2))
    with Path(back.output).open("r+b") as file:
        file.truncate(1000)
    assert [state(Decompress(), back), state(Decompress(), back)] == ["done", "skipped"]
    assert state(Verify(), Item(str(out))) == "done"
    with out.open("r+b") as file:
        file.seek(20_000)
        file.write(b"damage")
    assert run_item(Verify(), Item(str(out))).code == "rows-crc"


def test_items_of_folders_patterns_and_indexes(tmp_path: Path) -> None:
    for name in ("runs/a/kv.safetensors", "runs/b/kv.safetensors", "runs/c.npz", "runs/note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("one.safetensors", "s-1.safetensors", "s-2.safetensors", ".hidden.safetensors"):
        (tmp_path / "shards").mkdir(exist_ok=True)
        (tmp_path / "shards" / name).touch()
    index = tmp_path / "shards" / "big.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "s-1.safetensors", "b": "s-2.safetensors"}}))
    suffixes = Compress.suffixes
    runs = str(tmp_path / "runs")
    pattern = plan_items([f"{runs}/**/*.*s"], "s3://bucket/out", suffixes, ".dqkv")
    assert [item.output for item in pattern] == ["s3://bucket/out/a/kv.dqkv", "s3://bucket/out/b/kv.dqkv"]
    folder = plan_items([str(tmp_path / "shards"), f"{runs}/c.npz"], "out", suffixes, ".dqkv")
    assert [Path(item.output).name for item in folder] == ["big.dqkv", "one.dqkv", "c.dqkv"]
    assert [Path(name).name for name in folder[0].files] == [index.name, "s-1.safetensors", "s-2.safetensors"]
    for inputs, code in (
        ([f"{runs}/a/kv.safetensors", f"{runs}/b/kv.safetensors"], "output-duplicate"),
        ([f"{runs}/*.gguf"], "input-empty"),
    ):
        with pytest.raises(InputError) as refused:
            plan_items(inputs, "out", suffixes, ".dqkv")
        assert refused.value.code == code


def in_turn(work: batch.Work, items: list[Item], *, progress: Any, retries: int, redo: bool, **_: Any) -> list[Outcome]:
    found = [run_item(work, item, retries=retries, redo=redo) for item in items]
    for outcome in found:
        progress(outcome)
    return found


def test_steps_of_data_sets_are_the_same_work(tmp_path: Path) -> None:
    """Without a cluster; ``test_ray.py`` has one."""
    row = {"input": save(tmp_path / "a.safetensors"), "output": str(tmp_path / "a.dqkv")}
    assert on_row(WORK)(row)["state"] == "done"
    columns = on_batch(WORK)({"input": np.array([row["input"], "none"]), "output": np.array([row["output"], "x"])})
    assert columns["state"].tolist() == ["skipped", "failed"]
    assert columns["code"].tolist() == ["", "not-found"]


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_process_that_dies_costs_one_file(tmp_path: Path, importable: None) -> None:
    names = ["a", "b", "dies", "c", "d"]
    work = Told(str(tmp_path / "log"))
    told: list[Outcome] = []
    items = [Item(name, str(tmp_path / name)) for name in names]
    found = run_all(work, items, jobs=2, threads=3, retries=1, progress=told.append)
    assert [outcome.input for outcome in found] == names
    assert [outcome.state for outcome in found] == ["done", "done", "failed", "done", "done"]
    assert (found[2].code, found[2].attempts) == ("worker-died", 2)
    assert sorted(outcome.input for outcome in told) == sorted(names)
    assert sorted((tmp_path / "log").read_text().split("\n")[:-1]) == sorted(f"{name} 3" for name in [*names, "dies"])


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_an_interrupt_ends_the_processes_and_leaves_no_half_file(tmp_path: Path, importable: None) -> None:
    """The first file is done only once another is being written; then the work is interrupted."""

    def interrupt(_outcome: Outcome) -> None:
        assert list(tmp_path.glob(".*.partial"))
        raise KeyboardInterrupt

    items = [Item(name, str(tmp_path / f"{name}.dqkv")) for name in ("waits", "stuck", "never")]
    with pytest.raises(KeyboardInterrupt):
        run_all(Told(str(tmp_path / "log")), items, jobs=2, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_the_command_tells_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dquantcodec.cli.many.prepare_kernels", lambda *_: None)
    Path("in").mkdir()
    for name in ("a", "b"):
        save(Path("in") / f"{name}.safetensors")
    Path("in/bad.safetensors").write_bytes(b"no tensors")
    command = ["compress", "in", "out", "--jobs", "2", "--exact-layers", "0"]
    assert main(command) == 1
    first = capsys.readouterr().out
    assert "       1  input-damaged  in/bad.safetensors: not a valid safetensors file" in first
    assert "2 compressed, 1 failed; " in first
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.dqkv", "b.dqkv"]
    # The rest in this process; how files are done elsewhere was seen.
    monkeypatch.setattr("dquantcodec.batch.run_all", in_turn)
    before = Path("out/a.dqkv").stat().st_mtime_ns
    save(Path("in/bad.safetensors"))
    assert main(command) == 0
    assert "1 compressed, 2 finished before; " in capsys.readouterr().out
    assert Path("out/a.dqkv").stat().st_mtime_ns == before
    assert main(["verify", "out", "--jobs", "1", "--quiet"]) == 0
    assert capsys.readouterr().out == ""
    Path("out/bad.dqkv").write_bytes(b"nothing")
    assert main(["verify", "out", "--jobs", "1", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    check(answer, BATCH)
    assert [(one["state"], one["code"]) for one in answer["files"]] == [
        ("done", ""),
        ("done", ""),
        ("failed", "signature"),
    ]
    assert main(["decompress", "out/a.dqkv", "out/b.dqkv", "back", "--quiet"]) == 0
    assert np.array_equal(load_file("back/b.safetensors")["value_0"], ROWS)
