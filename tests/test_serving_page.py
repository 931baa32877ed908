"""docs/serving.md says what gpu-serving.json says, and its plots can be drawn of whatever was measured."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "gpu" / "serving"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import serving_page as page  # noqa: E402
from generated_pages import updated  # noqa: E402


def row(cache: str, batch: int, ms: float, size: float, tokens: int = 8192) -> dict[str, Any]:
    return {
        "cache": cache, "batch": batch, "tokens": tokens, "median_ms": ms, "tokens_per_s": 1000 * batch / ms,
        "without_attention_ms": ms / 2, "cache_bytes": int(size * 2**20), "card_used_bytes": 2**34,
    }  # fmt: skip


def made_up() -> dict[str, Any]:
    return {
        "command": "python", "card": "card", "card_bytes": 2**37, "driver": "1", "cuda": "2", "torch": "3",
        "cudnn": "4", "cupy": "5", "prompt": 8192, "weights": {"parameters": 8e9, "card_bytes": 2**34},
        "shape": {"layers": 2, "hidden": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 5},
        "batches": [
            {"cache": "none", "batch": 1, "median_ms": 1.0, "tokens_per_s": 1000.0},
            row("bf16", 1, 2.0, 100), row("bf16", 64, 8.0, 6400), row("bf16", 100, 10.0, 10000),
            row("2.26", 1, 2.5, 20), row("2.26", 64, 4.0, 1280), row("2.26", 500, 20.0, 10000),
        ],
        "largest": [{"cache": "bf16", "batch": 100}, {"cache": "2.26", "batch": 500}],
        "left_out": [{"what": "x", "why": "time"}],
        "growth": [row("bf16", 1, 2, 10, 1024), row("bf16", 1, 4, 80, 8192), row("2.26", 1, 3, 16, 8192)],
        "checks": [{"cache": "2.26", "tokens": 1001, "relative_error": 0.0123, "back_ends_error": 0.01}],
    }  # fmt: skip


def test_the_page_is_the_result() -> None:
    text, result = page.PAGE.read_text(encoding="utf-8"), page.load()
    assert updated(text, page.parts(result)) == text
    for name in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text):
        assert (page.PAGE.parent / name).is_file(), name
    changed = copy.deepcopy(result)
    for found in changed["batches"]:
        found["median_ms"] *= 2
    assert updated(text, page.parts(changed)) != text


def test_the_verdict_says_who_is_faster_where() -> None:
    assert page.verdict(made_up()) == (
        "- `2.26` rotated: The largest batch is 500 sequences instead of 100 (5.0 times), which decode 25,000 tokens a "
        "second instead of 10,000 (2.50 times). At equal batches BF16 is faster with 1 (0.80 of BF16's tokens a "
        "second). At equal batches pages are as fast or faster with 64 (2.00 of BF16's tokens a second)."
    )
    assert page.left_out(made_up()) == "Not measured: x (time)."


def test_tables() -> None:
    result = made_up()
    assert page.batches(result).splitlines()[2:4] == [
        "| 1 | 1.00 ms | 2.00 ms, 500/s | 2.50 ms, 400/s (0.80) |",
        "| 64 |  | 8.00 ms, 8,000/s | 4.00 ms, 16,000/s (2.00) |",
    ]
    assert page.batches(result).splitlines()[-1] == "| 500 |  |  | 20.00 ms, 25,000/s |"
    assert (
        page.memory(result).splitlines()[-1] == "| `2.26` rotated | 20.0 MiB | 5.00 | 500 | 16.0 GiB | 25,000 | 2.50 |"
    )
    assert page.growth(result).splitlines()[-2:] == [
        "| 1,024 | 10 MiB, 2.00 ms |  |", "| 8,192 | 80 MiB, 4.00 ms | 16 MiB (5.00), 3.00 ms |",
    ]  # fmt: skip
    assert page.parts_of_a_step(result).splitlines()[2:] == ["| `2.26` rotated | 1 | 1.00 | 0.25 | 1.25 |"]
    assert page.checks(result).splitlines()[-1] == "| `2.26` rotated | 1,001 | 1.23% | 1.00% |"
    assert "8.00 billion" in page.setup(result) and "128 GiB" in page.setup(result)


def test_plots_of_whatever_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import serving_plots

    result = made_up()
    serving_plots.draw(result, tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(first) == ["memory.svg", "throughput.svg"]
    serving_plots.draw(result, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    result["batches"][-1]["tokens_per_s"] *= 2
    serving_plots.draw(result, tmp_path)
    assert (tmp_path / "throughput.svg").read_bytes() != first["throughput.svg"]
