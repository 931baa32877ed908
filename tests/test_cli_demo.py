"""``dqkv demo`` and ``dqkv compare``: the quality table."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from dquantcodec.cli.main import main
from dquantcodec.profile import PROFILES

SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


def compare(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run("compare", *argv, "--json") == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_sample_says_where_it_comes_from() -> None:
    assert SAMPLE.stat().st_size <= 1_500_000
    with safe_open(SAMPLE, framework="numpy") as file:
        note = file.metadata()
    assert note["licence"] == "Apache-2.0"
    assert "SmolLM2-135M-Instruct" in note["model"]
    assert "Persuasion" in note["text"]
    shapes = {name: array.shape for name, array in load_file(SAMPLE).items()}
    assert shapes == {
        f"layers.{layer}.{kind}": shape
        for layer in (1, 14, 29)
        for kind, shape in (("key", (1, 3, 512, 64)), ("value", (1, 3, 512, 64)), ("query", (1, 9, 32, 64)))
    }
    assert "Apache-2.0" in (SAMPLE.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("profile", PROFILES)
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str) -> None:
    assert run("demo", "--out", tmp_path / "demo", "--profile", profile) == 0
    lines = capsys.readouterr().out.splitlines()
    output = tmp_path / "demo" / "sample.dqkv"
    assert str(output) in lines[-1]
    assert f"dqkv info {output}" in lines[-1]
    rows = [line.split() for line in lines if re.match(r" +(1|14|29) ", line)]
    assert [row[0] for row in rows] == ["1", "14", "29"]
    for row in rows:
        bits, ratio, *measures = (float(cell.rstrip("x")) for cell in row[1:])
        assert 1.9 < bits < float(profile.removeprefix("paper-").removesuffix("-t")) + 0.5
        assert ratio == pytest.approx(16 / bits, abs=0.01)
        assert len(measures) == 8, "keys, centred keys, values, attention, two drifted shares, two speeds"
        assert all(measure > 0 for measure in measures)
    assert max(len(line) for line in lines[:-3] if line not in lines[:4]) <= 80
    assert [path.name for path in output.parent.iterdir()] == ["sample.dqkv"]
    assert run("verify", output) == 0


def test_quiet_demo_prints_the_table_and_the_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--quiet", "--out", tmp_path) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 3 + 1


@pytest.mark.parametrize("profile", ["2.26", "paper-2.26"])
def test_quality_on_real_data(tmp_path: Path, capsys: pytest.CaptureFixture[str], profile: str) -> None:
    assert run("compress", SAMPLE, tmp_path / "x.dqkv", "--recent", 0, "--profile", profile) == 0
    report = compare(capsys, SAMPLE, tmp_path / "x.dqkv")
    assert report["totals"]["bits_per_value"] <= 2.75
    for row in report["layers"]:
        assert row["key_centred_nmse"] <= 0.065
        assert row["value_nmse"] <= 0.18
        assert row["bits_per_value"] <= 2.75
        assert row["attention_error"] < 0.4


def test_figures_agree_with_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every measure of the table, once more from whole arrays, with sinks, exact tokens and two sequences."""
    sample = load_file(SAMPLE)
    arrays = {
        f"k{number}": np.concatenate([sample[f"layers.{layer}.key"][:, :, :stop], sample["layers.1.key"][:, :, :stop]])
        for stop in (400,)
        for number, layer in enumerate((14, 29))
    }
    arrays |= {name.replace("k", "v"): array[::-1].copy() for name, array in arrays.items()}
    queries = {"layers.0.query": np.concatenate([sample["layers.14.query"], sample["layers.1.query"]])}
    save_file(arrays, tmp_path / "in.safetensors")
    save_file(queries, tmp_path / "q.safetensors")
    options = ["--sinks", 3, "--recent", 50, "--exact-layers", 1]
    assert run("compress", tmp_path / "in.safetensors", tmp_path / "x.dqkv", *options) == 0
    assert run("decompress", tmp_path / "x.dqkv", tmp_path / "out.safetensors", "--dtype", "float32") == 0
    decoded = load_file(tmp_path / "out.safetensors")
    argv = (tmp_path / "in.safetensors", tmp_path / "x.dqkv", "--queries", tmp_path / "q.safetensors")
    first, second = compare(capsys, *argv)["layers"]
    for kind, column in (("k", "key_nmse"), ("v", "value_nmse")):
        exact = arrays[f"{kind}0"].astype(np.float64)
        error = ((exact - decoded[f"{kind}0"]) ** 2).sum() / (exact**2).sum()
        assert first[column] == pytest.approx(error)
        assert second[column] == 0
    assert second["attention_error"] is None
    assert second["key_drift"] is None
    assert second["profile"] == "exact"
    assert first["attention_error"] == pytest.approx(_attention_error(arrays, decoded, queries), rel=1e-3)
    assert 0 < first["key_drift"] < 0.5
    assert 0 < first["value_drift"] < 0.5


def _attention_error(original: dict[str, Any], decoded: dict[str, Any], queries: dict[str, Any]) -> float:
    outputs = []
    for side in (original, decoded):
        parts = []
        for sequence in range(2):
            keys, values = (side[f"{kind}0"][sequence].astype(np.float64).repeat(3, axis=0) for kind in "kv")
            logits = np.einsum("qld,qtd->qlt", queries["layers.0.query"][sequence].astype(np.float64), keys) / 8
            hidden = np.arange(keys.shape[1]) > np.arange(keys.shape[1] - 32, keys.shape[1])[:, None]
            logits[:, hidden] = -np.inf
            weights = np.exp(logits - logits.max(axis=2, keepdims=True))
            parts.append(np.einsum("qlt,qtd->qld", weights / weights.sum(axis=2, keepdims=True), values))
        outputs.append(np.stack(parts))
    return float(np.linalg.norm(outputs[0] - outputs[1]) / np.linalg.norm(outputs[0]))


def test_blocks_do_not_change_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("compress", SAMPLE, tmp_path / "x.dqkv", "--sinks", 2, "--recent", 30) == 0
    measures = ("key_nmse", "key_centred_nmse", "value_nmse", "attention_error", "key_drift", "value_drift")
    reports = []
    for block in (1, 1 << 30):
        monkeypatch.setattr("dquantcodec.cli.measure.BLOCK_BYTES", block)
        reports.append(compare(capsys, SAMPLE, tmp_path / "x.dqkv")["layers"])
    for one, other in zip(*reports, strict=True):
        assert [one[name] for name in measures] == pytest.approx([other[name] for name in measures], rel=1e-5)


def test_stored_bytes_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compress", SAMPLE, tmp_path / "x.dqkv", "--sinks", 2, "--exact-layers", 14) == 0
    report = compare(capsys, SAMPLE, tmp_path / "x.dqkv")
    stored = sum(row["stored_bytes"] for row in report["layers"])
    # What is left is header, record headers, tables and padding to 4 KiB.
    assert 0 < report["totals"]["bytes"] - stored < 8 * 4096 + 8192


def test_a_subset_of_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compress", SAMPLE, tmp_path / "x.dqkv", "--layers", "14,29") == 0
    assert [row["layer"] for row in compare(capsys, SAMPLE, tmp_path / "x.dqkv")["layers"]] == [14, 29]
    assert [row["layer"] for row in compare(capsys, SAMPLE, tmp_path / "x.dqkv", "--layers", 29)["layers"]] == [29]
    assert run("compare", SAMPLE, tmp_path / "x.dqkv") == 0
    assert "whole file: " in capsys.readouterr().out
