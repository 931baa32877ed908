"""``dqkv plan``: sizes for people and programs, and profile files that ``compress`` takes."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import dquantcodec
from dquantcodec.cli.main import main
from dquantcodec.cli.plan import memory
from dquantcodec.layer_budgets import LayerBudgets

SAMPLE = Path(str(files("dquantcodec"))) / "data" / "sample.safetensors"
CONFIG = {
    "_name_or_path": "shape", "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip


def run(*argv: object) -> int:
    return main([str(arg) for arg in argv])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_configuration_gives_sizes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", config, "--memory", "10GiB", "--batch", 4, "--context", 8192) == 0
    out = capsys.readouterr().out
    assert "3 of 8 KV heads of 128" in out and "8192" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_json_holds_the_same_facts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", config / "config.json", "--json", "--memory", "10GiB", "--context", 8192) == 0
    facts = json.loads(capsys.readouterr().out)
    page = dquantcodec.Codec("2.26", 8, 128).layout.page_bytes
    assert facts["token_bytes"]["2.26"] == pytest.approx(3 * page / 128)
    assert facts["token_bytes"]["bf16"] == 3 * 2 * 2 * 1024
    row = facts["contexts"][0]
    assert row["sequences"]["bf16"] == 10 * 2**30 // row["bytes"]["bf16"]
    assert [one["groups"] for one in facts["head_groups"]] == [1, 2, 4, 8]


def test_targets_make_profile_files_that_compress_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, coded = tmp_path / "layers.json", tmp_path / "sample.dqkv"
    assert run("plan", SAMPLE, "--target-bits", 2.26, "--out", out, "--json") == 0
    target: dict[str, Any] = json.loads(capsys.readouterr().out.split("\n\nWritten")[0])["target"]
    assert 2.1 < target["bits_per_value"] <= 2.26
    assert run("compress", SAMPLE, coded, "--profile", out, "--recent", 0) == 0
    budgets = LayerBudgets.load(out)
    with dquantcodec.open(coded) as reader:
        for layer in reader.layers:
            words = (layer.plan.key.words, layer.plan.value.words)
            assert words == budgets.words(layer.spec.number, 3, 64)
        assert reader.accounting().bits_per_value_coded == pytest.approx(target["bits_per_value"], rel=0.01)
    assert len({words.words for words in budgets.layers.values()}) > 1, "layers differ"


def test_a_smaller_error_takes_more_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for error in (0.25, 0.15):
        assert run("plan", SAMPLE, "--target-error", error, "--out", tmp_path / "p.json", "--json", "--quiet") == 0
        target = json.loads(capsys.readouterr().out)["target"]
        found.append((target["bits_per_value"], target["attention_error"]))
        assert target["attention_error"] == pytest.approx(error, rel=0.1), "the model of errors holds"
    assert found[0][0] < found[1][0] and found[0][1] > found[1][1]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--target-bits", "9"], "target-bits"),
        (["--target-bits", "0.2"], "target-bits"),
        (["--target-error", "0.0001"], "target-error"),
    ],
)
def test_targets_out_of_reach_are_refused(
    options: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", SAMPLE, *options, "--out", tmp_path / "p.json", "--quiet") == 1
    assert f"[{code}]" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_a_configuration_has_no_errors_to_plan_by(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", config, "--target-bits", 2, "--out", config / "p.json") == 1
    assert "[plan-sample]" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--out", "x"], ["--target-bits", "2"], ["--batch", "3"], ["--memory", "lots"]])
def test_wrong_usage_exits_with_two(options: list[str], config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("plan", config, *options)
    assert stopped.value.code == 2
    assert "[usage]" in capsys.readouterr().err


def test_files_of_other_tensors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    path.write_text(
        '{"dqkv-profile": 1, "profile": "2.26", "layers": '
        '{"1": {"kv_heads": 8, "head_dim": 128, "key_words": 41, "value_words": 29}}}'
    )
    assert run("compress", SAMPLE, tmp_path / "x.dqkv", "--profile", path, "--quiet") == 1
    assert "[profile-geometry]" in capsys.readouterr().err
    assert not (tmp_path / "x.dqkv").exists()


def test_sizes_are_read_with_their_units() -> None:
    assert memory("80GiB") == 80 * 2**30
    assert memory("64GB") == 64 * 10**9
    assert memory("1.5k") == 1500
    assert memory("12") == 12
