"""One self-contained page about a compressed cache: bars drawn as SVG, no script, no network, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from .compare import LayerQuality
from .layer_report import KindReport, Worst

#: Bits a value of other ways to store the same cache, beside which its size is shown.
OTHER_FORMATS = (("BF16", 16.0), ("FP8", 8.0), ("INT4, groups of 32", 4.5))

STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5c6670;--page:#fff;--line:#d7dce1;--key:#1f6feb;--value:#b35900;
--warn:#b3261e}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa5b0;--page:#14171a;--line:#333a41;--key:#6cb0ff;
--value:#ffab5e;--warn:#ff8a80}}
body{font:16px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);max-width:60rem;margin:0 auto;
padding:1rem}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .25rem}p{margin:.25rem 0 .75rem}
.soft{color:var(--soft)}p.soft{font-size:.9rem}
figure{margin:.5rem 0}svg{display:block;max-width:100%;height:auto}svg text{fill:var(--ink);font-size:12px}
svg .soft{fill:var(--soft)}svg .axis{stroke:var(--line)}
.key{fill:var(--key)}.value{fill:var(--value)}.line-key{stroke:var(--key)}.line-value{stroke:var(--value)}
.mark{stroke:var(--ink);stroke-width:1.5}.other{fill:var(--soft)}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.15rem .5rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:600}.scroll{overflow-x:auto}
.wrap td{white-space:normal}
@media (max-width:30rem){table{font-size:.7rem}th,td{padding:.1rem .15rem}.wrap{min-width:100%}}
.chip{white-space:nowrap}.chip i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .8em}
i.k{background:var(--key)}i.v{background:var(--value)}
"""


@dataclass(frozen=True)
class LayerPage:
    """What the page shows of a layer; an exact layer has no reports of kinds."""

    quality: LayerQuality
    key: KindReport | None
    value: KindReport | None


@dataclass(frozen=True)
class Facts:
    """What the page says above its figures."""

    title: str
    rows: Sequence[tuple[str, str]]
    file_bytes: int
    values: int
    bits_per_value: float


def page(facts: Facts, layers: Sequence[LayerPage]) -> str:
    """The page as HTML text."""
    coded = [layer for layer in layers if layer.key and layer.value]
    sections = [
        f"<h1>{escape(facts.title)}</h1>",
        _table((), [(escape(name), escape(text)) for name, text in facts.rows], left=True),
        "<h2>Size</h2><p class=soft>Bits a value with every byte of the file counted, beside other ways to store the "
        "same numbers.</p>",
        _sizes(facts),
        "<h2>Errors by layer</h2><p class=soft>Error energy over energy (NMSE), keys over the energy that is left when "
        f"their means over 128 tokens are taken away.{_chips()}</p>",
        _layer_bars(layers, "errors by layer", lambda q: (q.key_centred_nmse, q.value_nmse)),
    ]
    if any(layer.quality.attention_error is not None for layer in layers):
        sections += [
            "<h2>Attention by layer</h2><p class=soft>Relative error of attention outputs of the saved queries.</p>",
            _layer_bars(layers, "attention error by layer", lambda q: (q.attention_error,)),
        ]
    if coded:
        sections += [
            "<h2>Containers by layer</h2><p class=soft>Drift: symbols moved to a cheaper level so that a token fits. "
            "Fill: mean part of a container up to its last bit that is set, and the fullest.</p>",
            _containers(coded),
            "<h2>Rate and distortion</h2><p class=soft>A dot is one kind of one layer: bits a value of its pages "
            "against its NMSE. The line is the Shannon bound of a normal source whose values all have one variance; "
            "layers whose channels differ can lie below it.</p>",
            _rate_distortion(coded),
            "<h2>Levels</h2><p class=soft>Shares of coded symbols by their distance from the middle level (bars) and "
            f"what the letter tables expect (marks), all layers together.{_chips()}</p>",
            _levels([layer.key for layer in coded if layer.key], "key", "keys"),
            _levels([layer.value for layer in coded if layer.value], "value", "values"),
            "<h2>Worst tokens and channels</h2><p class=soft>Error energy as a multiple of the layer's mean over "
            "tokens, or over channels.</p>",
            _worst(coded),
        ]
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(facts.title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _chips() -> str:
    return ' <span class="chip"><i class="k"></i>keys</span> <span class="chip"><i class="v"></i>values</span>'


def _svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    inside = "".join(parts)
    return (
        f'<figure><svg role="img" aria-label="{escape(label)}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{inside}</svg></figure>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" rx="1"/>'


def _percent(share: float) -> str:
    return f"{100 * share:.{2 if share < 0.0995 else 1}f} %"


def _sizes(facts: Facts) -> str:
    rows = [("this file", facts.bits_per_value, "key"), *((name, bits, "other") for name, bits in OTHER_FORMATS)]
    most = max(bits for _, bits, _ in rows)
    parts = []
    for i, (name, bits, kind) in enumerate(rows):
        y = 22 * i
        size = facts.values * bits / 8 / 1e6
        parts += [
            _text(0, y + 14, name),
            _bar(116, y + 3, 140 * bits / most, 15, kind),
            _text(122 + 140 * bits / most, y + 14, f"{bits:.2f} bits, {size:.3g} MB"),
        ]
    return _svg(386, 22 * len(rows) + 4, parts, "sizes")


def _layer_bars(
    layers: Sequence[LayerPage], label: str, measure: Callable[[LayerQuality], tuple[float | None, ...]]
) -> str:
    rows = [(layer.quality.layer, measure(layer.quality)) for layer in layers]
    most = max((value for _, values in rows for value in values if value is not None), default=0) or 1.0
    parts, y = [], 0
    for number, values in rows:
        parts.append(_text(34, y + 6 * len(values) + 5, str(number), "end"))
        for value, kind in zip(values, ("key", "value")):
            if value is not None:
                parts.append(_bar(42, y + 2, 270 * value / most, 9, kind))
                parts.append(_text(48 + 270 * value / most, y + 11, _percent(value), kind="soft"))
            y += 12
        y += 6
    return _svg(366, y + 2, parts, label)


def _containers(layers: Sequence[LayerPage]) -> str:
    head = ("layer", "profile", "", "bits/value", "drifted", "fill", "fullest")
    rows = []
    for layer in layers:
        q = layer.quality
        for kind, report, drift in (("keys", layer.key, q.key_drift), ("values", layer.value, q.value_drift)):
            assert report
            rows.append(
                (
                    str(q.layer) if kind == "keys" else "",
                    escape(q.profile) if kind == "keys" else "",
                    kind,
                    f"{report.bits_per_value:.3f}",
                    "-" if drift is None else _percent(drift),
                    _percent(report.fill),
                    _percent(report.fullest),
                )
            )
    return _table(head, rows)


def _rate_distortion(layers: Sequence[LayerPage]) -> str:
    dots = [
        (report.bits_per_value, nmse, kind)
        for layer in layers
        for report, nmse, kind in (
            (layer.key, layer.quality.key_centred_nmse, "key"),
            (layer.value, layer.quality.value_nmse, "value"),
        )
        if report and nmse > 0 and math.isfinite(nmse)
    ]
    if not dots:
        return ""
    low, high = min(x for x, _, _ in dots) - 0.3, max(x for x, _, _ in dots) + 0.3
    bound = [(low + (high - low) * i / 40, 4.0 ** -(low + (high - low) * i / 40)) for i in range(41)]
    floor = math.log10(min(min(y for _, y, _ in dots), bound[-1][1])) - 0.1
    ceiling = math.log10(max(max(y for _, y, _ in dots), bound[0][1])) + 0.1

    def place(x: float, y: float) -> tuple[float, float]:
        return 60 + 340 * (x - low) / (high - low), 250 - 230 * (math.log10(y) - floor) / (ceiling - floor)

    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in bound))
    parts = [f'<polyline points="{path}" fill="none" class="mark"/>']
    for exponent in range(math.floor(floor), math.ceil(ceiling) + 1):
        for nmse in (step * 10.0**exponent for step in (1, 2, 5)):
            if floor <= math.log10(nmse) <= ceiling:
                _, y = place(low, nmse)
                parts.append(f'<line class="axis" x1="60" x2="400" y1="{y:.1f}" y2="{y:.1f}"/>')
                parts.append(_text(54, y + 4, f"{100 * nmse:.3g} %", "end", "soft"))
    for tenth in range(math.ceil(low * 5), math.floor(high * 5) + 1):
        x, _ = place(tenth / 5, 10**floor)
        parts.append(_text(x, 268, f"{tenth / 5:.1f}", "middle", "soft"))
    parts.append(_text(400, 284, "bits/value", "end", "soft"))
    for x, y, kind in dots:
        cx, cy = place(x, y)
        parts.append(f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill-opacity=".7"/>')
    return _svg(420, 290, parts, "rate and distortion against the Shannon bound")


def _levels(reports: Sequence[KindReport], kind: str, name: str) -> str:
    offsets = sorted({offset for report in reports for offset in report.offsets})
    coded, expected = (dict.fromkeys(offsets, 0.0) for _ in range(2))
    for report in reports:
        for offset, share, table in zip(report.offsets, report.shares, report.expected):
            coded[offset] += share / len(reports)
            expected[offset] += table / len(reports)
    most = max((*coded.values(), *expected.values()), default=1) or 1
    step = min(40.0, 350 / max(1, len(offsets)))
    parts = []
    for i, offset in enumerate(offsets):
        x = 20 + i * step
        height = 110 * coded[offset] / most
        mark = 120 - 110 * expected[offset] / most
        parts += [
            _bar(x, 120 - height, step - 4, height, kind),
            f'<line class="mark" x1="{x - 1:.1f}" x2="{x + step - 3:.1f}" y1="{mark:.1f}" y2="{mark:.1f}"/>',
            _text(x + step / 2 - 2, 134, f"{offset:+d}" if offset else "0", "middle", "soft"),
        ]
    return f"<p>{name}</p>" + _svg(40 + step * len(offsets), 140, parts, f"levels of {name}")


def _worst(layers: Sequence[LayerPage]) -> str:
    head = ("layer", "", "tokens", "channels (head:channel)")
    rows = []
    for layer in layers:
        for kind, report in (("keys", layer.key), ("values", layer.value)):
            assert report
            lists = (", ".join(map(_place, places[:3])) for places in (report.tokens, report.channels))
            rows.append((str(layer.quality.layer) if kind == "keys" else "", kind, *lists))
    return _table(head, rows, wrap=True)


def _place(worst: Worst) -> str:
    return f"{':'.join(map(str, worst.place))} ({worst.times_mean:.1f}x)"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: bool = False, wrap: bool = False) -> str:
    style = ' style="text-align:left;white-space:normal"' if left else ""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td{style}>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    kind = ' class="wrap"' if wrap else ""
    return (
        f'<div class="scroll"><table{kind}>{"<thead><tr>" + top + "</tr></thead>" if head else ""}{lines}</table></div>'
    )
