"""Draws the results, from their JSON files alone.

    python benchmarks/quality plots [--results FOLDER] [--out FOLDER] [--format svg]

What has not been measured is left out with a message.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import plot_reproduction
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plot_labels import Curve, label_curves
from plot_style import BLACK, BLUE, SETTINGS, figure, logarithmic, rate_axis, save, style
from result_files import (
    FIXED_WIDTH,
    PAPER_TABLE_4,
    REPOSITORY,
    RESULTS,
    Result,
    Results,
    inverse,
    load,
    method_row,
    model_name,
    models_of,
    on_all_texts,
)

CLASSES = ("dquantcodec classes", "dquantcodec profiles")
IMAGES = REPOSITORY / "docs" / "images" / "quality"


def by_family(rows: list[Result], measure: str) -> dict[str, list[Result]]:
    """Rows by family in the order of stored bits; what a logarithmic axis cannot show is left out."""
    found: dict[str, list[Result]] = {}
    for row in sorted(rows, key=lambda row: row["bits_per_value"]):
        if row[measure] and row[measure] > 0:
            found.setdefault(row["family"], []).append(row)
    return found


def relative_interval(row: Result) -> tuple[float, float]:
    """Lengths of the error bar of a KL: the paired interval of its ratio to the baseline, about the KL itself."""
    ratio = row["kl_ratio"]
    if not ratio or not 0 < ratio["low"] <= ratio["high"] < float("inf"):
        return 0.0, 0.0
    kl, mean = row["kl"], ratio["mean"]
    return kl - kl * mean / ratio["high"], kl * mean / ratio["low"] - kl


def rate_curves(axes: Axes, rows: list[Result], measure: str, bars: bool = False) -> list[Curve]:
    """A curve a family over stored bits, logarithmic both ways; what is to be labelled."""
    curves = []
    families = by_family(rows, measure)
    # Named profiles are points of this family's curve, whose rates leave room for them.
    if "dquantcodec classes" in families:
        points = sorted((row["bits_per_value"], row[measure]) for name in CLASSES for row in families.get(name, []))
        axes.plot(*zip(*points), color=style(CLASSES[0]).colour)
    for family, members in families.items():
        look = style(family)
        x = [row["bits_per_value"] for row in members]
        y = [row[measure] for row in members]
        options: dict[str, Any] = look.options()
        if family == CLASSES[0]:
            options["linestyle"] = "none"
        if look.marker == "*":
            options |= {"markersize": 9, "zorder": 4}
        if bars:
            lengths = list(zip(*(relative_interval(row) for row in members)))
            axes.errorbar(x, y, yerr=lengths, elinewidth=0.8, **options)
        else:
            axes.plot(x, y, **options)
        curves.append(Curve(look.label, look.colour, x, y, look.marker, look.filled, look.dashes != "none"))
    measured = [row for members in families.values() for row in members]
    if not measured:
        return []
    axes.set_yscale("log")
    values = [row[measure] for row in measured]
    low, high = 0.6 * min(values), 1.7 * max(values)
    axes.set_ylim(low, high)
    logarithmic(axes.yaxis, low, high, (1, 3))
    rate_axis(axes, [row["bits_per_value"] for row in measured])
    return curves


def rate_kl(models: Result, model: str) -> Figure:
    found, (axes,) = figure(7.4, 5.4)
    axes.set_ylabel("KL divergence from full precision, nats a token")
    rows = [on_all_texts(models, row) for row in models["rows"] if row["model"] == model]
    curves = rate_curves(axes, rows, "kl", bars=True)
    label_curves(found, [(axes, curves)])
    return found


def rate_nmse(methods: Result) -> Figure:
    found, panels = figure(7.4, 9.6, rows=2)
    curves = []
    for axes, measure, label in zip(panels, ("key_centred_nmse", "value_nmse"), ("keys, means removed", "values")):
        axes.set_ylabel(f"relative squared error of {label}")
        curves.append(rate_curves(axes, methods["rows"], measure))
    label_curves(found, list(zip(panels, curves)))
    return found


def fixed_width_bars(models: Result) -> list[tuple[str, tuple[float, ...], bool]]:
    """Label, ratio (mean, low, high) and whether it is the paper's, a bar each."""
    bars: list[tuple[str, tuple[float, ...], bool]] = []
    for model in models_of(models):
        row = method_row(models, model, FIXED_WIDTH)
        if row and row["kl_ratio"] and isfinite(sum(inverse(row["kl_ratio"]))):
            bars.append((model_name(model), inverse(row["kl_ratio"]), False))
    return [*bars, *((f"{model}, paper", paper.ratio, True) for model, paper in PAPER_TABLE_4.items())]


def kl_ratios(models: Result) -> Figure:
    bars = fixed_width_bars(models)
    found, (axes,) = figure(6, 0.45 * len(bars) + 0.8)
    for place, (_, (mean, low, high), is_paper) in enumerate(bars):
        colour = "0.75" if is_paper else BLUE
        error = [[mean - low], [high - mean]]
        axes.barh(place, mean, height=0.6, color=colour, xerr=error, error_kw={"elinewidth": 1, "capsize": 3})
        axes.text(high + 0.04, place, f"{mean:.2f}", va="center", fontsize=8)
    axes.axvline(1, color=BLACK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.1 * max(high for _, (_, _, high), _ in bars))
    axes.set_xlabel("KL of fixed width over KL of entropy-coded containers, 95 % interval")
    return found


def drawings(results: Results) -> Iterator[tuple[str, Callable[[], Figure]]]:
    """File names without ending, and what draws them, for everything that was measured."""
    if models := results.get("models"):
        for model in models_of(models):
            yield f"rate-kl-{model}", partial(rate_kl, models, model)
        yield "kl-ratios", partial(kl_ratios, models)
    for name, result, draw in (
        ("rate-nmse", "methods", rate_nmse),
        ("levels", "alphabet", plot_reproduction.levels),
        ("payload", "payload", plot_reproduction.payload),
        ("symbols", "drift_statistics", plot_reproduction.symbols),
        ("fill", "drift_statistics", plot_reproduction.fill),
    ):
        if result in results:
            yield name, partial(draw, results[result])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where the JSON files are")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="FOLDER", help="where the plots go")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    arguments = parser.parse_args(argv)
    results = load(arguments.results)
    drawn = 0
    with rc_context(SETTINGS):
        for name, draw in drawings(results):
            path = arguments.out / f"{name}.{arguments.format}"
            save(draw(), path)
            print(path)
            drawn += 1
    for name in ("alphabet", "payload", "drift_statistics", "methods", "models"):
        if name not in results:
            print(f"not measured, not drawn: {name}.json", file=sys.stderr)
    return 0 if drawn else 1
