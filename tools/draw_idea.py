"""The pictures of docs/idea.md, from the bundled sample.

    python tools/draw_idea.py [FOLDER]

Needs matplotlib; the same sample gives the same files.
"""

from __future__ import annotations

import sys
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from dquantcodec import Codec, fit_plan
from dquantcodec.encode import prepare
from dquantcodec.grid import nearest_levels
from dquantcodec.layer_report import expected_levels
from dquantcodec.letters import letter_table, pack
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import make_plan
from dquantcodec.profile import Profile
from dquantcodec.rotate import rotate
from dquantcodec.tensors import open_source

BLUE, ORANGE, GREY, GREEN = "#0072B2", "#E69F00", "0.6", "#009E73"
SETTINGS: Any = {
    "svg.hashsalt": "dquantcodec", "svg.fonttype": "path", "font.family": "DejaVu Sans", "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 9, "axes.titlelocation": "left",
}  # fmt: skip

Floats = NDArray[np.float32]


def sample(layer: int) -> tuple[Floats, Floats]:
    """Keys and values ``[511, 3, 64]`` of a layer of the bundled sample, the first token left out."""
    with as_file(files("dquantcodec").joinpath("data", "sample.safetensors")) as path:
        source = open_source(path)
        keys, values = (source.read(layer, kind, 0, 1, source.tokens) for kind in ("key", "value"))
    return keys.astype(np.float32), values.astype(np.float32)


def figure(width: float, height: float, columns: int) -> tuple[Figure, list[Any]]:
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    return drawn, list(np.atleast_1d(drawn.subplots(1, columns)))


def levels(folder: Path) -> None:
    """Deviations of channels before and after rotation, and how often levels are used."""
    keys, values = sample(14)
    drawn, (left, right) = figure(7.2, 2.5, 2)
    x = keys[:, 0]
    turned = rotate(keys, make_plan(Profile.named("2.26"), 3, 64).signs)[:, 0]
    left.plot(np.sort(x.std(axis=0))[::-1], color=BLUE, label="as they are")
    left.plot(np.sort(turned.std(axis=0))[::-1], color=ORANGE, label="rotated")
    left.set(title="Key channels of one head, by standard deviation", xlabel="channel, largest first", ylim=(0, None))
    left.legend(frameon=False)
    plan = fit_plan("2.26", keys, values)
    codec = Codec(plan)
    symbols = codec.symbols(codec.encode(keys, values), "value")
    middles, expected = expected_levels(plan.value, symbols.shape[1])
    offsets = np.clip(symbols.astype(int) - middles, -8, 8)
    shown = np.arange(-6, 7)
    right.bar(shown, [100 * (offsets == o).mean() for o in shown], color=BLUE, label="coded symbols")
    right.plot(shown, 100 * expected[shown + 8], "_", color="0.1", markersize=11, label="letter tables")
    right.set(title="Levels, counted from the middle", ylabel="% of symbols")
    right.legend(frameon=False)
    save(drawn, folder / "levels.svg")


def drift(folder: Path) -> None:
    """Bytes that every token would take at its nearest levels, and what its containers hold after drift."""
    _, values = sample(14)
    plan = make_plan(Profile.named("2.26"), 3, 64)
    stream = plan.value
    table = letter_table(stream, plan.head_dim)

    def coded_bytes(symbols: NDArray[np.uint8]) -> NDArray[np.float64]:
        letters = pack(symbols, stream, plan.head_dim)
        return np.asarray(table.costs[letters].sum(axis=1, dtype=np.int64) / 8192)

    windows = [values[first : first + plan.window] for first in range(0, len(values), plan.window)]
    natural = np.concatenate(
        [nearest_levels(prepare(window, plan, stream).position, stream.levels) for window in windows]
    )
    codec = Codec(plan)
    coded = codec.symbols(codec.encode(values, values), "value")
    drawn, (axes,) = figure(7.2, 2.4, 1)
    edges = np.arange(42, 54, 0.25)
    axes.hist(coded_bytes(natural), edges, color=GREY, label="nearest levels")
    axes.hist(coded_bytes(coded), edges, color=BLUE, alpha=0.8, label="after drift")
    axes.axvline(stream.container, color="0.1", linewidth=1)
    axes.text(stream.container + 0.3, axes.get_ylim()[1] * 0.9, f"container: {stream.container} bytes")
    axes.set(title="Values of 511 tokens, three rotated heads of 64", xlabel="bytes of a token", ylabel="tokens")
    axes.legend(frameon=False, loc="upper right")
    save(drawn, folder / "drift.svg")


def page(folder: Path) -> None:
    """A page as a strip of bytes, and one of its tiles."""
    plan = make_plan(Profile.named("2.26"), 8, 128)
    layout = PageLayout.of(plan)
    drawn, (axes,) = figure(7.2, 1.9, 1)
    axes.set(xlim=(0, 1), ylim=(0, 2.2))
    axes.axis("off")
    total = layout.page_bytes
    parts = [("head", layout.head_bytes, GREY)]
    parts += [(f"tile {i}", layout.tile_bytes, "#cfe3f1") for i in range(layout.tiles)]
    at = 0.0
    for name, size, colour in parts:
        axes.add_patch(Rectangle((at, 1.35), size / total, 0.6, facecolor=colour, edgecolor="0.3", linewidth=0.8))
        if size / total > 0.05:
            axes.text(at + size / total / 2, 1.65, f"{name}\n{size} bytes", ha="center", va="center", fontsize=8)
        at += size / total
    head = f"a page of 128 tokens, {total} bytes: head of {layout.head_bytes} (exponents, means), then tiles"
    axes.text(0, 2.02, head, fontsize=9)
    tile = [
        ("key words", layout.key.affine_at - layout.key.words_at, BLUE),
        ("", layout.key.end - layout.key.affine_at, GREEN),
        ("value words", layout.value.affine_at - layout.value.words_at, ORANGE),
        ("", layout.value.end - layout.value.affine_at, GREEN),
    ]
    at = 0.0
    for name, size, colour in tile:
        width = size / layout.tile_bytes
        axes.add_patch(Rectangle((at, 0.25), width, 0.6, facecolor=colour, edgecolor="0.3", linewidth=0.8, alpha=0.75))
        if name:
            axes.text(at + width / 2, 0.55, f"{name}\n{size} bytes", ha="center", va="center", fontsize=8)
        at += width
    axes.text(
        0, 0.92, "a tile of 32 tokens: word 0 of all 32, word 1 of all 32, ...; green: a scale per token", fontsize=9
    )
    save(drawn, folder / "page.svg")


def save(drawn: Figure, path: Path) -> None:
    drawn.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    folder = Path(sys.argv[1] if sys.argv[1:] else "docs/images/idea")
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        levels(folder)
        drift(folder)
        page(folder)


if __name__ == "__main__":
    main()
