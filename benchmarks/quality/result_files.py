"""The result files that plots and page are made of, and what things are called there.

A result that has not been measured has no file; whoever reads results says so instead of failing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Results = dict[str, Result]

NAMES = (
    "alphabet",
    "preprocessing",
    "drift_statistics",
    "payload",
    "methods",
    "hard_cases",
    "models",
    "retrieval",
)

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results" / "quality"

#: How models that the harness knows by a short name are called; others go by the name of their folder.
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}

#: The fixed-width method whose levels fit the containers of 2.26 bits, as in the paper's Table 4.
FIXED_WIDTH = "fixed width 6/3 levels"


@dataclass(frozen=True)
class PaperComparison:
    """A model in the paper's Table 4 (arXiv 2609.19880) and what is said below it.

    ``ratio`` is KL of fixed width over KL of D-Quant: mean, low and high of the 95 % interval.  The pairs are D-Quant
    and fixed width: KL in nats, NMSE in per cent.  ``more_bits`` per value bring fixed width to the same KL.
    """

    ratio: tuple[float, float, float]
    kl: tuple[float, float]
    key: tuple[float, float]
    value: tuple[float, float]
    more_bits: float


PAPER_TABLE_4 = {
    "Qwen3-8B": PaperComparison((2.26, 2.09, 2.46), (0.0312, 0.0705), (1.22, 2.07), (14.31, 39.98), 0.234),
    "Llama-3.1-8B": PaperComparison((2.00, 1.85, 2.16), (0.0410, 0.0818), (2.54, 4.34), (14.82, 41.49), 0.267),
}

#: The appendix of the paper: no changed symbol moves by more levels.
PAPER_LEVELS_MOVED = 1


def load(folder: Path) -> Results:
    """The results that ``folder`` holds, by name."""
    paths = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def model_name(name: str) -> str:
    return MODELS.get(name, name)


def models_of(result: Result) -> list[str]:
    """The models of rows, in their order."""
    return list(dict.fromkeys(row["model"] for row in result["rows"]))


def method_row(models: Result, model: str, method: str) -> Result | None:
    """The row of one model and method."""
    found = (row for row in models["rows"] if (row["model"], row["method"]) == (model, method))
    return next(found, None)


def on_all_texts(models: Result, row: Result) -> Result:
    """``row`` with the KL that it would have on all texts if its ratio to the baseline were the same on the others."""
    base = method_row(models, row["model"], models["baseline"])
    if base is None or not row["kl_ratio"] or row["documents"] == base["documents"]:
        return row
    return {**row, "kl": base["kl"] / row["kl_ratio"]["mean"]}


def inverse(ratio: Result) -> tuple[float, float, float]:
    """Mean, low and high of the ratio the other way round: geometric means and quantiles only change places."""
    low, mean, high = (1 / ratio[name] if ratio[name] else float("inf") for name in ("high", "mean", "low"))
    return mean, low, high
