"""The plots of docs/serving.md in the look of all plots: tokens a second by batch, memory by batch and by length."""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from serving_page import ROOT, Result, caches, largest

sys.path.insert(0, str(ROOT / "benchmarks" / "quality"))

from plot_style import BLACK, BLUE, ORANGE, SETTINGS, SKY, Style, figure, logarithmic, save

IMAGES = ROOT / "docs" / "images" / "serving"

STYLES = {
    "bf16": Style("BF16", BLACK, "X"),
    "2.26:classes": Style("2.26 fitted", BLUE, "o"),
    "2.26": Style("2.26 rotated", SKY, "p"),
    "2.26-t:classes": Style("2.26-t fitted", BLUE, "o", False, "--"),
    "paper-2.26": Style("paper-2.26", ORANGE, "s", False, "--"),
}


def by_batch(axes: Axes, result: Result, measure: str, unit: float) -> None:
    """A curve a cache over its batches; its largest batch is marked with its number, once where several agree."""
    marked = set()
    for name in caches(result):
        rows = sorted((row for row in result["batches"] if row["cache"] == name), key=lambda row: row["batch"])
        axes.plot(
            [row["batch"] for row in rows], [row[measure] / unit for row in rows],
            label=STYLES[name].label, **STYLES[name].options(),
        )  # fmt: skip
        most = largest(result, name)
        if most and (most["batch"], most[measure]) not in marked:
            marked.add((most["batch"], most[measure]))
            axes.annotate(
                f"{most['batch']}", (most["batch"], most[measure] / unit), textcoords="offset points", xytext=(0, 6),
                ha="center", fontsize=8, color=STYLES[name].colour,
            )  # fmt: skip
    batches = [row["batch"] for row in result["batches"]]
    axes.set_xscale("log")
    axes.set_xlim(0.8 * min(batches), 1.6 * max(batches))
    logarithmic(axes.xaxis, 0.8 * min(batches), 1.6 * max(batches), (1, 3))
    axes.set_xlabel("sequences in a batch")
    axes.set_ylim(0, 1.1 * max(row[measure] for row in result["batches"] if row["cache"] != "none") / unit)


def throughput(result: Result) -> Figure:
    found, (axes,) = figure(7.4, 4.0)
    by_batch(axes, result, "tokens_per_s", 1000)
    axes.set_ylabel("thousand tokens a second")
    axes.set_title(f"decoding, {result['prompt']:,} tokens a sequence; numbers: the largest batch that fits")
    axes.legend(frameon=False)
    return found


def memory(result: Result) -> Figure:
    found, (left, right) = figure(7.4, 3.6, columns=2)
    by_batch(left, result, "card_used_bytes", 2**30)
    left.axhline(result["card_bytes"] / 2**30, color="0.5", linewidth=0.8, linestyle=":")
    left.set_ylabel("memory of the card in use, GiB")
    left.set_title(f"{result['prompt']:,} tokens a sequence")
    left.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.93))
    rows = result["growth"]
    for name in STYLES:
        points = sorted((row["tokens"], row["cache_bytes"] / 2**20) for row in rows if row["cache"] == name)
        if points:
            right.plot(*zip(*points), label=STYLES[name].label, **STYLES[name].options())
    right.set_xscale("log")
    right.set_yscale("log")
    tokens = sorted({row["tokens"] for row in rows})
    right.set_xticks(tokens, [f"{count // 1024}K" for count in tokens])
    right.minorticks_off()
    sizes = [row["cache_bytes"] / 2**20 for row in rows]
    right.set_ylim(0.7 * min(sizes), 1.4 * max(sizes))
    logarithmic(right.yaxis, 0.7 * min(sizes), 1.4 * max(sizes))
    right.set_xlabel("tokens of the one sequence")
    right.set_ylabel("keys and values, MiB")
    right.set_title("one sequence that grows")
    return found


FIGURES = {"throughput": throughput, "memory": memory}


def draw(result: Result, folder: Path = IMAGES, ending: str = "svg") -> None:
    with rc_context(SETTINGS):
        for name, plot in FIGURES.items():
            save(plot(result), folder / f"{name}.{ending}")
