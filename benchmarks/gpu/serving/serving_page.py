"""The figures of docs/serving.md, out of the committed result.

    python benchmarks/gpu/serving/serving_page.py        # rewrites what stands between the marks, and draws the plots

Every figure of the page, and every statement that depends on one, stands in one of these parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import generated_pages
from generated_pages import table

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "benchmarks" / "results" / "gpu-serving.json"
PAGE = ROOT / "docs" / "serving.md"

Result = dict[str, Any]

#: Caches as the page calls them, in its order.
NAMES = {
    "bf16": "BF16",
    "2.26:classes": "`2.26` fitted",
    "2.26": "`2.26` rotated",
    "2.26-t:classes": "`2.26-t` fitted",
    "paper-2.26": "`paper-2.26`",
}


def load() -> Result:
    result: Result = json.loads(RESULT.read_text(encoding="utf-8"))
    return result


def caches(result: Result) -> list[str]:
    """Caches that have rows, BF16 first."""
    found = {row["cache"] for row in result["batches"]}
    return [name for name in NAMES if name in found]


def row_of(result: Result, cache: str, batch: int) -> Result | None:
    rows = [row for row in result["batches"] if (row["cache"], row["batch"]) == (cache, batch)]
    return rows[0] if rows else None


def largest(result: Result, cache: str) -> Result | None:
    """The row of the largest batch of a cache."""
    found = [row["batch"] for row in result["largest"] if row["cache"] == cache]
    return row_of(result, cache, found[0]) if found else None


def ratio(ours: Result, theirs: Result) -> float:
    """Tokens a second over tokens a second."""
    return float(ours["tokens_per_s"] / theirs["tokens_per_s"])


def setup(result: Result) -> str:
    shape, weights = result["shape"], result["weights"]
    return (
        f"`{result['command']}` on one {result['card']} of {result['card_bytes'] / 2**30:.0f} GiB "
        f"(driver {result['driver']}, CUDA {result['cuda']}, PyTorch {result['torch']}, cuDNN {result['cudnn']}, "
        f"CuPy {result['cupy']}): {shape['layers']} layers, hidden size {shape['hidden']}, "
        f"{shape['query_heads']} query heads on {shape['kv_heads']} KV heads of {shape['head_dim']}, "
        f"{weights['parameters'] / 1e9:.2f} billion parameters in BF16 "
        f"({weights['card_bytes'] / 2**30:.1f} GiB). {result['prompt']:,} tokens a sequence."
    )


def verdict(result: Result) -> str:
    """What the rows say of each plan: at its largest batch, and who is faster at equal ones."""
    exact = largest(result, "bf16")
    lines = []
    for name in caches(result)[1:]:
        most = largest(result, name)
        said = []
        if exact and most:
            said.append(
                f"The largest batch is {most['batch']} sequences instead of {exact['batch']} "
                f"({most['batch'] / exact['batch']:.1f} times), which decode {most['tokens_per_s']:,.0f} tokens a "
                f"second instead of {exact['tokens_per_s']:,.0f} ({ratio(most, exact):.2f} times)."
            )
        faster, slower = [], []
        for row in result["batches"]:
            other = row_of(result, "bf16", row["batch"])
            if row["cache"] == name and other:
                (faster if ratio(row, other) >= 1 else slower).append((row["batch"], ratio(row, other)))
        for found, what in ((slower, "BF16 is faster"), (faster, "pages are as fast or faster")):
            if found:
                ratios = [value for _, value in found]
                sizes = ", ".join(str(batch) for batch, _ in sorted(found))
                share = f"{min(ratios):.2f}" if len(found) == 1 else f"{min(ratios):.2f} to {max(ratios):.2f}"
                said.append(f"At equal batches {what} with {sizes} ({share} of BF16's tokens a second).")
        lines.append(f"- {NAMES[name]}: {' '.join(said)}")
    return "\n".join(lines)


def left_out(result: Result) -> str:
    """What was asked for and not measured."""
    missing = [f"{row['what']} ({row['why']})" for row in result["left_out"]]
    return f"Not measured: {'; '.join(missing)}." if missing else "Nothing that was asked for is missing."


def batches(result: Result) -> str:
    names = caches(result)
    sizes = sorted({row["batch"] for row in result["batches"]})
    lines = []
    for batch in sizes:
        exact, alone = (row_of(result, name, batch) for name in ("bf16", "none"))
        cells = []
        for name in names:
            row = row_of(result, name, batch)
            beside = f" ({ratio(row, exact):.2f})" if row and exact and name != "bf16" else ""
            cells.append(f"{row['median_ms']:.2f} ms, {row['tokens_per_s']:,.0f}/s{beside}" if row else "")
        lines.append((str(batch), f"{alone['median_ms']:.2f} ms" if alone else "", *cells))
    return table(("batch", "without a cache", *(NAMES[name] for name in names)), lines)


def memory(result: Result) -> str:
    exact = largest(result, "bf16")
    lines = []
    for name in caches(result):
        row = largest(result, name)
        if row is None or exact is None:
            continue
        each, other = row["cache_bytes"] / row["batch"], exact["cache_bytes"] / exact["batch"]
        lines.append(
            (
                NAMES[name],
                f"{each / 2**20:,.1f} MiB",
                f"{other / each:.2f}",
                str(row["batch"]),
                f"{row['card_used_bytes'] / 2**30:.1f} GiB",
                f"{row['tokens_per_s']:,.0f}",
                f"{ratio(row, exact):.2f}",
            )
        )
    head = ("", "a sequence takes", "times smaller", "largest batch", "of the card", "tokens a second", "over BF16's")
    return table(head, lines)


def growth(result: Result) -> str:
    rows = result["growth"]
    names = [name for name in NAMES if any(row["cache"] == name for row in rows)]
    lines = []
    for tokens in sorted({row["tokens"] for row in rows}):
        found = {row["cache"]: row for row in rows if row["tokens"] == tokens}
        exact = found.get("bf16")
        cells = []
        for name in names:
            row = found.get(name)
            less = f" ({exact['cache_bytes'] / row['cache_bytes']:.2f})" if row and exact and name != "bf16" else ""
            cells.append(f"{row['cache_bytes'] / 2**20:,.0f} MiB{less}, {row['median_ms']:.2f} ms" if row else "")
        lines.append((f"{tokens:,}", *cells))
    return table(("tokens", *(NAMES[name] for name in names)), lines)


def checks(result: Result) -> str:
    columns = {"relative_error": "difference of logits", "back_ends_error": "the same between PyTorch's two kernels"}
    known = [key for key in columns if all(row.get(key) is not None for row in result["checks"])]
    lines = [
        (NAMES[row["cache"]], f"{row['tokens']:,}", *(f"{100 * row[key]:.2f}%" for key in known))
        for row in result["checks"]
    ]
    return table(("", "tokens", *(columns[key] for key in known)), lines)


def parts_of_a_step(result: Result) -> str:
    """Where the time of a step with pages goes, by what is left out."""
    lines = []
    for name in caches(result)[1:]:
        for row in sorted(result["batches"], key=lambda row: row["batch"]):
            alone = row_of(result, "none", row["batch"])
            if row["cache"] != name or alone is None:
                continue
            whole, appended = row["median_ms"], row["without_attention_ms"]
            spent = (alone["median_ms"], appended - alone["median_ms"], whole - appended)
            lines.append((NAMES[name], str(row["batch"]), *(f"{time:.2f}" for time in spent)))
    return table(("ms of a step", "batch", "the rest of the model", "appending and encoding", "attention"), lines)


PARTS: dict[str, Callable[[Result], str]] = {
    "setup": setup,
    "verdict": verdict,
    "left-out": left_out,
    "memory": memory,
    "batches": batches,
    "parts": parts_of_a_step,
    "growth": growth,
    "checks": checks,
}


def parts(result: Result) -> dict[str, str]:
    """What stands between the marks of the page."""
    return {name: part(result) for name, part in PARTS.items()}


if __name__ == "__main__":
    import serving_plots

    generated_pages.rewrite(PAGE, parts(load()))
    serving_plots.draw(load())
