"""Plots of the paper's Table 2 and Figure 6 beside what was measured here."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from plot_labels import Curve, label_curves
from plot_style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, figure, logarithmic, number
from result_files import Result

KINDS = ("key", "value")
#: The profile that is the paper's configuration.
PAPER_PROFILE = "paper-2.26"
#: What rows of the reproduction call their data, and how the plots call it.
DATA = {"normal": "normal numbers", "captured": "captured"}


def table_curves(alphabet: Result, kind: str) -> list[tuple[Curve, str]]:
    """Curves and their dashes: NMSE in per cent over levels, rANS as in the paper."""
    paper = {int(levels): nmse for levels, nmse in alphabet["paper_per_cent"][kind].items() if nmse is not None}
    curves = [(Curve("paper, Qwen3-8B", BLACK, list(paper), list(paper.values()), "X"), "-")]
    for row in alphabet["rows"]:
        if (row["kind"], row["coder"]) != (kind, "rans"):
            continue
        points = {int(levels): 100 * nmse for levels, nmse in row["nmse"].items() if nmse is not None}
        colour, marker, dashes = {"normal": (BLUE, "o", "-"), "captured": (GREEN, "s", "--")}.get(
            row["data"], (RED, "v", ":")
        )
        name = row["data"].replace("normal", "normal numbers")
        curves.append((Curve(name, colour, list(points), list(points.values()), marker, dashes == "-"), dashes))
    return curves


def levels(alphabet: Result) -> Figure:
    """Table 2: error at fixed storage."""
    found, panels = figure(7.4, 4.2, columns=2)
    drawn = []
    for axes, kind in zip(panels, KINDS):
        curves = table_curves(alphabet, kind)
        for curve, dashes in curves:
            face = curve.colour if curve.filled else "white"
            options = {"color": curve.colour, "marker": curve.marker, "markerfacecolor": face, "markersize": 4}
            axes.plot(curve.x, curve.y, linestyle=dashes, **options)
        axes.set_yscale("log")
        values = [y for curve, _ in curves for y in curve.y]
        low, high = 0.8 * min(values), 1.3 * max(values)
        axes.set_ylim(low, high)
        logarithmic(axes.yaxis, low, high, (1, 2, 3, 5, 7))
        axes.set_xticks(range(4, 17, 2))
        axes.set_xlim(3.5, 16.5)
        axes.set_title("keys" if kind == "key" else "values")
        axes.set_xlabel("reconstruction levels")
        axes.set_ylabel("relative squared error, %")
        drawn.append((axes, [curve for curve, _ in curves]))
    label_curves(found, drawn)
    return found


def payload(result: Result) -> Figure:
    """Figure 6, left: the most levels that a payload supports."""
    looks = {
        "with_drift": ("drift can make it fit", RED, ":"),
        "entropy_coded": ("entropy-coded, normal numbers", BLUE, "-"),
        "captured_key": ("entropy-coded, captured keys", GREEN, "--"),
        "ideal_fixed": ("fixed width, no rounding of bits", GREY, "--"),
        "fixed_width": ("fixed width, whole bits", ORANGE, "-"),
    }
    found, (axes,) = figure(7.4, 4.4)
    bits = result["payload_bits_per_value"]
    curves = []
    for name, (label, colour, dashes) in looks.items():
        # The corners of the steps, so that labels keep clear of what is really drawn.
        x, y = np.repeat(bits, 2)[1:], np.repeat(result["series"][name], 2)[:-1]
        axes.plot(x, y, color=colour, linestyle=dashes)
        curves.append(Curve(label, colour, x.tolist(), y.tolist()))
    for point in result["operating_points"]:
        x, y = point["payload"], point["levels"]
        axes.plot(x, y, color=BLACK, marker="*", markersize=11, linestyle="none", zorder=4)
        curves.append(Curve(f"paper's {point['kind']}s: {y} levels", BLACK, [x], [y], "*", joined=False))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator([2, 3, 4, 6, 8, 12, 16, 24, 32, 48]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(number))
    axes.set_xlim(bits[0], bits[-1])
    axes.set_ylim(1.7, 1.15 * max(max(result["series"][name]) for name in looks))
    axes.set_xlabel("payload, bits per value for symbols alone")
    axes.set_ylabel("most reconstruction levels")
    label_curves(found, [(axes, curves)])
    return found


def statistics_row(result: Result, data: str, kind: str) -> Result:
    found = (row for row in result["rows"] if (row["data"], row["profile"], row["kind"]) == (data, PAPER_PROFILE, kind))
    return next(found)


def symbols(result: Result) -> Figure:
    """Figure 6, middle: shares of levels, nearest and coded, and the two models."""
    found, panels = figure(7.4, 3.2, columns=2)
    for axes, kind in zip(panels, KINDS):
        row = statistics_row(result, "captured", kind)
        at = np.arange(len(row["shares_natural"]))
        series = {name: 100 * np.array(row[name]) for name in row if name.startswith(("shares_", "model_"))}
        axes.bar(at - 0.2, series["shares_natural"], 0.4, color="0.8", label="nearest level")
        axes.bar(at + 0.2, series["shares_coded"], 0.4, color=BLUE, label="after drift")
        axes.plot(at, series["model_analytic"], color=BLACK, marker="_", markersize=16, linestyle="none",
                  markeredgewidth=1.6, label="analytic model")  # fmt: skip
        axes.plot(at, series["model_sharpened"], color=RED, marker="x", linestyle="none", markersize=6,
                  markeredgewidth=1.6, label="sharpened model")  # fmt: skip
        axes.set_xticks(at)
        axes.grid(False, axis="x")
        axes.set_title("keys" if kind == "key" else "values")
        axes.set_xlabel("level")
        axes.set_ylabel("share of symbols, %")
    panels[0].legend(frameon=False, fontsize=7.5, loc="upper left", borderaxespad=0, handlelength=1.4)
    axes = panels[0]
    axes.set_ylim(0, 1.35 * axes.dataLim.y1)
    return found


def fill(result: Result) -> Figure:
    """Figure 6, right: symbols' cost over the budget of their container, before and after drift."""
    found, panels = figure(7.4, 4.6, columns=2, rows=2, sharex=True)
    edges = np.array(result["fill_edges"])
    for place, (data, kind) in enumerate((data, kind) for data in DATA for kind in KINDS):
        axes, row = panels[place], statistics_row(result, data, kind)
        before, after = (
            100 * np.array(counts) / sum(counts)
            for counts in (row["fill_before"]["histogram"], row["fill_after"]["histogram"])
        )
        axes.stairs(before, edges, fill=True, color="0.78")
        axes.stairs(after, edges, color=BLUE, linewidth=1.3)
        top = 1.5 * before.max()
        axes.set_ylim(0, top)
        axes.set_xlim(0.7, edges[-1])
        axes.axvline(1, color=BLACK, linewidth=0.8)
        _name_fill(axes, row, after.max() if after.max() > top else None)
        axes.set_title(f"{kind}s, {DATA[data]}, {row['stream_values']} a stream")
    for axes in panels[2:]:
        axes.set_xlabel("cost of symbols over budget (last bar: all beyond)")
    for axes in panels[::2]:
        axes.set_ylabel("share of streams, %")
    return found


def _name_fill(axes: Axes, row: Result, peak: float | None) -> None:
    """What is before and what after drift; ``peak`` is the height of a bar that leaves the axes."""
    before, after = 100 * row["fill_before"]["over_budget"], 100 * row["fill_after"]["over_budget"]
    place = {"transform": axes.transAxes, "va": "top", "fontsize": 8}
    axes.text(0.97, 0.95, f"nearest levels:\n{before:.1f} % over budget", ha="right", color="0.35", **place)
    note = f"after drift:\n{after:.1f} % over budget" + (f",\n{peak:.0f} % in the peak" if peak else "")
    axes.text(0.03, 0.95, note, ha="left", color=BLUE, **place)
