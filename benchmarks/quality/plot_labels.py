"""Labels beside the curves they name, placed where they hide least: no legend to look things up in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray

#: Directions of a label from its point, and distances in points of a typographer.
DIRECTIONS = [(1, 0), (1, 1), (1, -1), (0, 1), (0, -1), (-1, 1), (-1, -1), (-1, 0)]
DISTANCES = (7.0, 14.0, 24.0, 36.0, 50.0, 66.0)
#: From this distance on a line leads from the label to its point.
LEADER = 12.0
#: Points of a curve that are tried, evenly chosen; size of labels and room for a marker before them, in points.
TRIED = 16
SIZE = 8.0
MARKER = 9.0
#: Space around a label, in points.
MARGIN = 2.0

Places = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """A curve in data coordinates; ``joined`` if a line connects its points.

    The label repeats the ``marker`` (none if empty), which says in black and white what it belongs to; beside a single
    point there is no doubt.
    """

    label: str
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    marker: str = ""
    filled: bool = True
    joined: bool = True

    @property
    def repeats_marker(self) -> bool:
        return bool(self.marker) and len(self.x) > 1


@dataclass(frozen=True, eq=False)
class Label:
    """A place for a label in pixels: box ``(x0, y0, x1, y1)``, the curve's point, and the end of a leader from it."""

    box: Places
    point: Places
    anchor: Places
    distance: float


def _sampled(points: Places, joined: bool) -> Places:
    """``points`` ``[n, 2]``, and with ``joined`` also places every few pixels between neighbours."""
    parts = [points]
    if joined:
        for a, b in zip(points, points[1:]):
            steps = np.linspace(0, 1, int(np.hypot(*(b - a)) // 3) + 2)[:, None]
            parts.append(a + steps * (b - a))
    return np.concatenate(parts)


def _inside(points: Places, box: Places) -> int:
    """How many of ``points`` lie in ``box``."""
    return int(((points > box[:2]) & (points < box[2:])).all(axis=1).sum())


def _overlap(a: Places, b: Places) -> float:
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    return float(np.prod(np.maximum(sides, 0)))


def _candidates(points: Places, size: Places, scale: float) -> list[Label]:
    """Labels of ``size`` around the ``points``; ``scale`` is pixels per point of a typographer."""
    found = []
    for point in points[:: -(-len(points) // TRIED)]:
        for distance in DISTANCES:
            for across, up in DIRECTIONS:
                anchor = point + scale * distance * np.array([across, up]) / np.hypot(across, up)
                low = anchor - size * (1 - np.array([across, up])) / 2
                box = np.concatenate([low - MARGIN * scale, low + size + MARGIN * scale])
                found.append(Label(box, point, anchor, distance))
    return found


def _cost(label: Label, lines: Places, markers: Places, taken: Sequence[Places], bounds: Places) -> float:
    """What a label hides or crosses; leaving the axes costs more than anything else."""
    outside = np.any(label.box[:2] < bounds[:2]) or np.any(label.box[2:] > bounds[2:])
    leader = _sampled(np.array([label.point, label.anchor]), label.distance >= LEADER)
    return (
        3.0 * label.distance
        + 25 * _inside(lines, label.box)
        + 120 * _inside(markers, label.box)
        + sum(50 * _overlap(label.box, other) + 60 * _inside(leader, other) for other in taken)
        + 1e6 * float(outside)
    )


def label_curves(figure: Figure, panels: Sequence[tuple[Axes, Sequence[Curve]]]) -> None:
    """Writes the label of every curve of all axes near one of its points; everything else must be drawn already."""
    figure.canvas.draw()  # the layout engine moves axes when drawing; after this they stay where labels expect them
    figure.set_layout_engine("none")
    for axes, curves in panels:
        _label_axes(axes, curves, figure.dpi / 72)


def _label_axes(axes: Axes, curves: Sequence[Curve], scale: float) -> None:
    """Curves with few points choose first, since they have the fewest places to go."""
    bounds = axes.get_window_extent().extents
    places = [axes.transData.transform(np.column_stack([curve.x, curve.y])) for curve in curves]
    lines = np.concatenate([_sampled(points, curve.joined) for points, curve in zip(places, curves)])
    markers = np.concatenate([points for points, curve in zip(places, curves) if curve.marker] or [np.empty((0, 2))])
    taken: list[Places] = []
    for curve, points in sorted(zip(curves, places), key=lambda pair: len(pair[1])):
        probe = axes.text(0, 0, curve.label, fontsize=SIZE)
        extent = probe.get_window_extent()
        probe.remove()
        size = np.array([extent.width + (MARKER * scale if curve.repeats_marker else 0), extent.height])
        labels = _candidates(points, size, scale)
        best = min(labels, key=lambda label: _cost(label, lines, markers, taken, bounds))
        taken.append(best.box)
        if best.distance >= LEADER:
            lines = np.concatenate([lines, _sampled(np.array([best.point, best.anchor]), True)])
        _write(axes, curve, best, scale)


def _write(axes: Axes, curve: Curve, label: Label, scale: float) -> None:
    colour = tuple(0.8 * part for part in to_rgb(curve.colour))  # thin letters look paler than thick lines
    back = axes.transData.inverted()
    if label.distance >= LEADER:
        ends = back.transform(np.array([label.point, label.anchor]))
        axes.plot(*ends.T, color=curve.colour, linewidth=0.6, zorder=1.5)
    left = label.box[0] + MARGIN * scale
    if curve.repeats_marker:
        # On a ground of its own, or the marker would pass for data.
        (x0, y0), (x1, y1) = back.transform(label.box.reshape(2, 2))
        axes.fill([x0, x1, x1, x0], [y0, y0, y1, y1], color="0.955", zorder=1)
        at = back.transform([left + 0.3 * MARKER * scale, (label.box[1] + label.box[3]) / 2])
        face = curve.colour if curve.filled else "white"
        axes.plot(*at, marker=curve.marker, markersize=4, color=curve.colour, markerfacecolor=face, linestyle="none")
        left += MARKER * scale
    x, y = back.transform([left, label.box[1] + MARGIN * scale])
    axes.text(x, y, curve.label, fontsize=SIZE, color=colour, va="bottom", ha="left")
