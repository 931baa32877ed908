"""``dqkv doctor`` finds what is broken, says how to mend it, and is content with what is merely absent."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from dquantcodec import doctor, self_test
from dquantcodec.cli.main import main
from dquantcodec.doctor import ABSENT, BAD, GOOD, POOR, Fact, examine


def found(check: str) -> list[Fact]:
    return list(doctor.CHECKS[check]())


def test_this_installation_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "golden pages" in out and "works" in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_a_kernel_that_computes_wrongly_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, decoded = self_test.GOLDEN["2.26"]
    monkeypatch.setitem(self_test.GOLDEN, "2.26", (page ^ 1, decoded))
    assert self_test.wrong_checksums() == ["2.26"]
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["sound"]
    (fact,) = [fact for fact in answer["facts"] if fact["state"] == BAD]
    assert fact["name"] == "golden pages" and "2.26" in fact["found"] and fact["remedy"]


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Fact]:
        yield Fact("first", "fine")
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", {"odd": broken, "after": lambda: iter([Fact("last", "reached")])})
    assert [(fact.name, fact.state) for fact in examine()] == [("first", GOOD), ("odd", BAD), ("last", GOOD)]
    assert main(["doctor", "--quiet"]) == 1
    assert "OSError: no such thing" in capsys.readouterr().out


def test_slow_checksums_and_missing_packages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google_crc32c.implementation", "python")
    assert [fact.state for fact in found("CRC32C")] == [POOR]
    monkeypatch.setattr("dquantcodec.file.structs.crc32c", lambda data: 0)
    assert [fact.state for fact in found("CRC32C")] == [POOR, BAD]
    monkeypatch.setattr(doctor, "CORE", ("numpy", "no-such-package"))
    assert [fact.state for fact in found("versions")[2:]] == [GOOD, BAD]


def test_an_unwritable_cache_is_slow_and_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dquantcodec.kernels.cache_is_writable", lambda: False)
    (fact,) = found("kernel cache")
    assert fact.state == POOR and "DQUANTCODEC_CACHE_DIR" in fact.remedy


def test_no_gpu_is_no_failure() -> None:
    assert all(fact.state in (GOOD, ABSENT) for fact in found("accelerator"))


def test_a_file_that_comes_back_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert self_test.file_faults() == []
    reader = "dquantcodec.file.tensor.TensorReader"
    monkeypatch.setattr(f"{reader}.__getitem__", lambda *_: np.zeros((8, 2, 64)))
    monkeypatch.setattr(f"{reader}.read", lambda *_, **__: 3.0)
    assert len(self_test.file_faults()) == 2
