"""The tables of docs/gpu.md say what benchmarks/results/gpu-*.json say."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not part of this distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import gpu_page as page  # noqa: E402
from generated_pages import updated  # noqa: E402


def test_the_tables_are_the_results() -> None:
    text, results = page.PAGE.read_text(encoding="utf-8"), page.load()
    assert updated(text, page.parts(results)) == text
    assert re.findall(r"^<!-- end of (.+) -->$", text, re.MULTILINE) == list(page.PARTS)


def doubled(value: Any) -> Any:
    """Every number twice as large."""
    if isinstance(value, dict):
        return {key: doubled(part) for key, part in value.items()}
    if isinstance(value, list):
        return [doubled(part) for part in value]
    return 2 * value if isinstance(value, int | float) else value


@pytest.mark.parametrize("name", page.PARTS)
def test_other_results_give_another_table(name: str) -> None:
    results = page.load()
    changed = page.parts({**results, name: doubled(results[name])})
    assert [part for part, text in page.parts(results).items() if changed[part] != text] == [name]


@pytest.mark.parametrize("words", [page.OF_RINGS, page.OF_STARTS])
def test_shorter_words_are_of_steps_on_record(words: dict[str, str]) -> None:
    assert set(words) <= {step[key] for step in page.load()["ladder"]["steps"] for key in ("step", "predicted")}


def step(text: str, times: dict[str, float]) -> dict[str, Any]:
    """A step of the ladder: a profile's time in the first row, twice as much in the second, and so on."""
    rows = [
        {"row": name, "profile": profile, "letters": {"key": 2, "value": 1}, "ms": n * ms, "ratio_to_bf16": n * ms / 2}
        for n, name in enumerate(("16x8192", "64x8192", "1x32768"), 1)
        for profile, ms in times.items()
    ]
    return {"step": text, "predicted": f"{text} predicted", "rows": rows}


def test_steps_of_the_ladder() -> None:
    first, second, _ = page.OF_STARTS
    rings = [page.OF_RINGS[text] for text in (first, second)]
    steps = [
        step("a", {"2.26": 0.25}),
        {**step("b", {"2.26": 1, "2.26:classes=11": 0.5}), "note": "c"},
        step(first, {"paper-2.26": 1, "2.26": 2, "2.26-t:classes": 3, "2.26:classes": 4}),
        {**step(second, {"paper-2.26": 5, "2.26-t:classes": 6}), "predicted": "nothing was written down"},
    ]
    assert page.ladder({"steps": steps}).splitlines() == [
        "| step | predicted | letters a head | 16, 8,192 | 64, 8,192 |",
        "|---|---|---|---|---|",
        "| a | a predicted | 2 + 1 | 0.2500 (0.12) | 0.5000 (0.25) |",
        "| b; c | b predicted | 2 + 1 | 0.5000 (0.25) | 1.0000 (0.50) |",
    ]
    assert page.ladder_of_rings({"steps": steps}).splitlines() == [
        "| step | predicted | 16, 8,192: trellis | rANS | 64, 8,192: trellis | rANS |",
        "|---|---|---|---|---|---|",
        f"| {rings[0]} | {first} predicted | 3.0000 (1.50) | 1.0000 (0.50) | 6.0000 (3.00) | 2.0000 (1.00) |",
        f"| {rings[1]} | | 6.0000 (3.00) | 5.0000 (2.50) | 12.0000 (6.00) | 10.0000 (5.00) |",
    ]
    assert page.ladder_of_starts({"steps": steps}).splitlines() == [
        "| step | 1, 32,768: `2.26` | `2.26:classes` | 64, 8,192: `2.26` | `2.26:classes` |",
        "|---|---|---|---|---|",
        "| before | 6.0000 (3.00) | 12.0000 (6.00) | 4.0000 (2.00) | 8.0000 (4.00) |",
    ]
