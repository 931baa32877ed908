"""What the model benchmark does around the models: documents, packages, rows on disk, bootstrap intervals."""

from __future__ import annotations

import io
import json
import math
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "quality"))

import intervals
import packages
import records
import texts


def test_ratio_of_two_documents_by_hand() -> None:
    # Two documents are drawn as (a, a), (a, b), (b, a), (b, b) with equal chances: means a, sqrt(ab) twice, b.
    found = intervals.ratio([2.0, 8.0], [1.0, 1.0])
    assert found.mean == pytest.approx(4.0)
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(8.0))
    middle = intervals.ratio([2.0, 8.0], [1.0, 1.0], confidence=0.4)
    assert (middle.low, middle.high) == (pytest.approx(4.0), pytest.approx(4.0))


def test_interval_of_many_documents_is_that_of_a_normal_mean() -> None:
    logs = np.random.default_rng(5).standard_normal(400)
    found = intervals.ratio(np.exp(logs), np.ones(400))
    half = 1.96 * logs.std() / math.sqrt(400)
    assert math.log(found.low) == pytest.approx(logs.mean() - half, abs=0.006)
    assert math.log(found.high) == pytest.approx(logs.mean() + half, abs=0.006)


def test_pairing_removes_what_documents_have_in_common() -> None:
    base = np.exp(np.random.default_rng(6).standard_normal(10) * 3)
    found = intervals.ratio(base, base / 2)
    assert (found.low, found.mean, found.high) == (pytest.approx(2), pytest.approx(2), pytest.approx(2))


def test_ratio_with_zeros() -> None:
    assert intervals.ratio([0.0, 0.0], [0.0, 0.0]) == intervals.Interval(1.0, 1.0, 1.0)
    found = intervals.ratio([1.0, 3.0], [0.0, 0.0])
    assert found == intervals.Interval(math.inf, math.inf, math.inf)
    assert intervals.geometric_mean([0.0, 5.0]) == 0.0
    with pytest.raises(ValueError, match="paired"):
        intervals.ratio([1.0], [1.0, 2.0])


def test_rows_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    assert records.read(path) == []
    records.append(path, {"a": 1})
    with path.open("ab") as file:
        file.write(b'{"a": 2, "b"')
    assert records.read(path) == [{"a": 1}]
    records.append(path, {"a": 3})
    assert records.read(path) == [{"a": 1}, {"a": 3}]
    assert path.read_bytes().count(b"\n") == 2


def test_key_ignores_the_order_of_fields_and_other_fields() -> None:
    row = {"model": "m", "window": {"context": 1, "recent": 2}, "kl": 0.5}
    other = {"window": {"recent": 2, "context": 1}, "model": "m", "kl": 0.7}
    assert records.key(row, ("model", "window")) == records.key(other, ("model", "window"))
    assert records.key(row, ("kl",)) != records.key(other, ("kl",))


def test_longbench_and_ruler_lines(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    rows = [
        {"context": "Long text.", "input": "Who?", "answers": ["Ann", "Anna"], "length": 2},
        {"input": "Para one.\n\nPara two.\n\nWhat is the number?", "outputs": ["7"]},
        {"input": "Text.\nWhat is the number?", "outputs": "8"},
        {"input": "one line"},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n", encoding="utf-8")
    found = texts.json_lines(path)
    assert found == [
        texts.Document("set-1", "Long text.", "Who?", ("Ann", "Anna")),
        texts.Document("set-2", "Para one.\n\nPara two.", "What is the number?", ("7",)),
        texts.Document("set-3", "Text.", "What is the number?", ("8",)),
        texts.Document("set-4", "one line"),
    ]
    path.write_text('{"text": "x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1: no field 'input'"):
        texts.json_lines(path)


def test_folder_of_texts(tmp_path: Path) -> None:
    with pytest.raises(packages.FetchError, match="holds no"):
        texts.folder(tmp_path)
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.md").write_text("third")
    assert texts.folder(tmp_path) == [texts.Document("a", "first"), texts.Document("b", "second")]


def test_preparing_texts() -> None:
    assert texts.flowing(" one\n  two\n\n \n three\n") == "one two\n\nthree"
    assert texts.joined_lines("He said\nthis.\nThen\nthat.") == "He said this.\nThen that."
    assert texts.verses('x = """\n1. In 10. the end. 2. And so.\n3. Then.\n"""\n') == "In the end. And so.\nThen."
    entry = [{"term": "foo", "senses": [{"definition": "See \x1b[36mbar\x1b[0m."}, {"definition": "Or not."}]}]
    assert texts.entries(json.dumps(entry)) == "foo: See bar. Or not."


def wheel(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    path = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_a_cached_package_is_opened_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(tmp_path / "packages" / "some-1.0", {"some/a.txt": b"hello", "some/b.txt": b"", "c/a.txt.gz": b""})
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: pytest.fail("pip was run"))
    assert packages.archive(packages.Package("some", "1.0"), tmp_path) == path
    with packages.member(path, "/a.txt") as stream:
        assert stream.read() == b"hello"
    with pytest.raises(packages.FetchError, match="2 files that end with"), packages.member(path, ".txt"):
        pass


def test_a_source_distribution_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "some-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("some-1.0/docs/a.txt")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"abc"))
    with packages.member(path, "/a.txt") as stream:
        assert stream.read() == b"abc"


def test_a_failed_download_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        returncode, stderr = 1, "no such thing"

    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: Failed())
    with pytest.raises(packages.FetchError, match="no such thing"):
        packages.archive(packages.Package("some", "1.0"), tmp_path)
    assert list((tmp_path / "packages").iterdir()) == []


def test_a_passage_is_cut_between_words_and_checked(tmp_path: Path) -> None:
    text = "A line to skip.\n" + "words, " * 5000
    wheel(tmp_path / "packages" / "some-1.0", {"some/a.txt": text.encode()})
    cut = " ".join(["words,"] * (texts.PASSAGE // len("words, ")))
    expected = texts.Document("x", cut)
    source = texts.Passage("x", packages.Package("some", "1.0"), "/a.txt", 3, texts.unchanged, expected.sha256)
    assert texts.passage(source, tmp_path) == expected
    wrong = texts.Passage("x", packages.Package("some", "1.0"), "/a.txt", 3, texts.unchanged, "0" * 64)
    with pytest.raises(packages.FetchError, match="SHA-256"):
        texts.passage(wrong, tmp_path)


def test_built_in_documents_are_pinned() -> None:
    assert len(texts.PASSAGES) >= 8
    assert len({source.name for source in texts.PASSAGES}) == len(texts.PASSAGES)
    assert all(len(source.sha256) == 64 for source in texts.PASSAGES)
