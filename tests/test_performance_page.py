"""docs/performance.md says what benchmarks/results/cpu*.json say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "cpu"))

import performance_page as page  # noqa: E402
from generated_pages import updated  # noqa: E402


def test_the_tables_are_the_results() -> None:
    text, results = page.PAGE.read_text(encoding="utf-8"), page.load()
    assert updated(text, page.parts(results)) == text
    row = results["cpu"]["rows"][0]
    results["cpu"]["rows"][0] = {**row, "rate": 2 * row["rate"]}
    assert updated(text, page.parts(results)) != text
