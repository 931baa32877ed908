"""One look for all plots: a colour and a marker for every family, axes, and files that do not change without reason.

Colours are those of Okabe and Ito, told apart by nearly everyone; markers, fill and dashes carry the same in black and
white.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

#: Settings of every figure: text as outlines, so that it looks the same without the font, and no random identifiers.
SETTINGS: Any = {
    "svg.hashsalt": "dquantcodec",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.4",
    "axes.labelcolor": "0.15",
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "0.9",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "xtick.color": "0.4",
    "ytick.color": "0.4",
    "xtick.labelcolor": "0.15",
    "ytick.labelcolor": "0.15",
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
}

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY = "#56B4E9"
PURPLE, BLACK, GREY, BROWN = "#AA4499", "#000000", "#7F7F7F", "#882255"


@dataclass(frozen=True)
class Style:
    """How a family looks in every plot; open markers tell variants of one colour apart."""

    label: str
    colour: str
    marker: str
    filled: bool = True
    dashes: str = "-"

    def options(self) -> dict[str, Any]:
        """What ``plot`` and ``errorbar`` take."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markerfacecolor": self.colour if self.filled else "white",
        }


FAMILIES = {
    "dquantcodec classes": Style("ours, variance classes", BLUE, "o"),
    "dquantcodec profiles": Style("ours, named profiles", BLUE, "*", True, "none"),
    "dquantcodec trellis": Style("ours, trellis", BLUE, "*", False, "none"),
    "dquantcodec rotated": Style("ours, rotated", SKY, "p", True, "none"),
    "dquantcodec paper profiles": Style("paper's profiles", SKY, "*", False, "none"),
    "dquantcodec prefix": Style("paper's grid, prefix code", SKY, "o"),
    "dquantcodec rans": Style("paper's grid, rANS", SKY, "o", False, "--"),
    "fixed width": Style("fixed width", ORANGE, "s"),
    "KIVI, groups of 32": Style("KIVI, groups of 32", GREEN, "^"),
    "KIVI, groups of 128": Style("KIVI, groups of 128", GREEN, "^", False, "--"),
    "QuaRot": Style("QuaRot", RED, "v"),
    "TurboQuant": Style("TurboQuant", PURPLE, "D"),
    "turbo-attn": Style("turbo-attn", PURPLE, "D", False, "--"),
    "OScaR, groups of 32": Style("OScaR, groups of 32", BROWN, "P"),
    "OScaR, groups of 128": Style("OScaR, groups of 128", BROWN, "P", False, "--"),
    "llama.cpp": Style("llama.cpp", GREY, "X", True, ":"),
    "llama.cpp, rotated": Style("llama.cpp, rotated", GREY, "X", False, ":"),
    "FP8": Style("FP8", BLACK, "h", True, "none"),
}


def style(family: str) -> Style:
    """A family that nobody has named yet gets dots and its own name."""
    return FAMILIES.get(family, Style(family, GREY, "."))


def figure(width: float, height: float, columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches and its axes, row by row."""
    found = Figure(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(found)
    return found, list(found.subplots(rows, columns, squeeze=False, **options).flat)


def number(value: float, _: Any = None) -> str:
    """A tick's number without exponent or superfluous zeros."""
    return f"{value:.10f}".rstrip("0").rstrip(".") if value < 1e4 else f"{value:g}"


def logarithmic(axis: Any, low: float, high: float, steps: tuple[float, ...] = (1, 2, 5)) -> None:
    """Ticks at ``steps`` times powers of ten within ``low`` to ``high``, written out."""
    ticks = [step * 10.0**power for power in range(-9, 7) for step in steps]
    axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(number))


def rate_axis(axes: Axes, bits: list[float]) -> None:
    """Stored bits per value on a logarithmic axis: methods are crowded at low rates."""
    low, high = 0.94 * min(bits), 1.12 * max(bits)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    ticks = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(number))
    axes.set_xlabel("stored bits per value")


def save(found: Figure, path: Path) -> None:
    """As SVG: the same bytes for the same data and the same matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        found.savefig(path, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
