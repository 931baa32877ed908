"""The tables of docs/performance.md, out of the committed results.

    python benchmarks/cpu/performance_page.py        # rewrites what stands between the marks of the page

Every figure of the page stands in one of these tables, so new results need no change of its sentences.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import generated_pages
from generated_pages import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"

Rows = list[dict[str, Any]]
Results = dict[str, dict[str, Any]]

NAMES = ("cpu", "cpu-instructions", "cpu-instructions-before")
DEFAULT = "2.26, classes, n = 1024, 2048 tokens"


def load() -> Results:
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in NAMES}


def find(rows: Rows, section: str, name: str, threads: int = 1) -> dict[str, Any] | None:
    """The row whose name begins with ``name``; None where the run did not get so far, or the peer was missing."""
    for row in rows:
        if row["section"] == section and row["name"].startswith(name) and row["threads"] == threads:
            return row
    return None


def number(value: float | None) -> str:
    """Two to three digits; an empty cell for what was not measured."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if value < 10 else 1}f}" if value >= 0.095 else f"{value:.3f}"


def rate(row: dict[str, Any] | None) -> str:
    """Median, and the slowest and fastest run."""
    return "" if row is None else f"{number(row['rate'])} ({number(row['low'])} to {number(row['high'])})"


def times(value: float | None) -> str:
    return "" if value is None else f"{number(value)}x"


def machine(results: Results) -> str:
    result = results["cpu"]
    versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items())
    about = result["machine"]
    return (
        f"`{result['command']}` on {about['processor']}, {about['cores']} cores ({about['simd']}), {about['system']}; "
        f"{versions}."
    )


def aims(results: Results) -> str:
    rows = results["cpu"]["rows"]

    def value(section: str, name: str, threads: int = 1, field: str = "rate") -> float | None:
        row = find(rows, section, name, threads)
        return None if row is None else row[field]

    def most(what: str) -> float | None:
        found = [r["rate"] for r in rows if r["section"].startswith("file on") and r["name"].startswith(what)]
        return max(found, default=None)

    def gain(name: str) -> float | None:
        one, two = value("codec", name, 1), value("codec", name, 2)
        return two / one if one and two else None

    decode = value("codec", f"{DEFAULT}: decode to FP16")
    attend = value("codec", f"{DEFAULT}: attend")
    many = "2.26, classes, n = 1024, 8192 tokens"
    lines = [
        ("rANS decode, G symbols/s", 2.0, value("coder", "ours rans (paper-2.26), containers of 332 B: decode")),
        ("prefix decode, G symbols/s", 3.0, value("coder", "ours prefix, containers of 328 B: decode")),
        ("rANS encode, G symbols/s", 0.5, value("coder", "ours rans (paper-2.26), containers of 332 B: encode")),
        ("prefix encode, G symbols/s", 0.5, value("coder", "ours prefix, containers of 328 B: encode")),
        ("encode, rotated, M values/s", 50, value("codec", "2.26, n = 1024, 2048 tokens: encode")),
        ("encode, fitted, M values/s", 50, value("codec", f"{DEFAULT}: encode")),
        ("decode to FP16, rotated, M values/s", 300, value("codec", "2.26, n = 1024, 2048 tokens: decode to FP16")),
        ("decode to FP16, fitted, M values/s", 300, decode),
        ("attend against decode, fitted", 1.0, attend / decode if attend and decode else None),
        ("two threads against one: encode, fitted", 1.8, gain(f"{many}: encode")),
        ("two threads against one: decode, fitted", 1.8, gain(f"{many}: decode to FP16")),
        ("write pages, GB/s", 1.5, most("write pages")),
        ("read pages, GB/s", 1.5, most("read all pages")),
    ]
    return table(
        ("aim, one core", "wanted", "measured", ""),
        [
            (name, f"{wanted:g}", number(found), "" if found is None else "reached" if found >= wanted else "missed")
            for name, wanted, found in lines
        ],
    )


#: Coders as the page calls them, access, section of the rows, beginnings of the names of decoding and encoding, and
#: what brings their rates to G symbols/s.
CODERS = (
    ("`prefix`", "of a tile of 32", "coder", "ours prefix, containers", 1.0),
    ("`rans`", "of a tile of 32", "coder", "ours rans (paper-2.26), containers", 1.0),
    ("`prefix` of `2.26` fitted, its own symbols", "of a tile of 32", "stage", "2.26 classes: key: prefix", 1e-3),
    ("constriction ANS, one stream a token", "any token", "coder", "constriction AnsCoder", 1.0),
    ("zstd -1, one frame a token, two symbols a byte", "any token", "coder", "zstd -1, one frame a token, two", 1.0),
    ("zstd -1, one frame a token", "any token", "coder", "zstd -1, one frame a token, a byte", 1.0),
    ("zstd -1, one buffer, two symbols a byte", "none", "coder", "zstd -1, one buffer, two", 1.0),
)  # fmt: skip


def coders(results: Results) -> str:
    rows = results["cpu"]["rows"]
    copy = find(rows, "coder", "memcpy")
    near = [
        row for row in rows if row.get("of") == "peer" and row.get("what") == "decode" and row["section"] == "coder"
    ]
    best = max((row["rate"] for row in near), default=None)
    lines = []
    for name, access, section, begins, unit in CODERS:
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            match = re.search(r"(decode|encode)(?: to levels)?$", row["name"])
            if (row["section"], row["threads"]) == (section, 1) and row["name"].startswith(begins) and match:
                found.setdefault(match[1], {key: unit * row[key] for key in ("rate", "low", "high")})
        if "decode" in found:
            decoded = found["decode"]["rate"]
            ratios = [times(decoded / other if other else None) for other in (copy and copy["rate"], best)]
            lines.append((name, access, rate(found["decode"]), *ratios, rate(found.get("encode"))))
    lines.append(("memcpy, one byte a symbol", "", rate(copy), "1x", "", ""))
    head = ("coder", "access", "decode, G symbols/s", "against memcpy", "against the best peer with access",
            "encode, G symbols/s")  # fmt: skip
    return table(head, lines)


def codec(results: Results) -> str:
    rows = results["cpu"]["rows"]
    lines = []
    names = (
        ("2.26, classes", "`2.26` fitted, the default of files"),
        ("2.26", "`2.26` rotated"),
        ("2.26-t, classes", "`2.26-t` fitted"),
        ("1.96, classes", "`1.96` fitted"),
        ("3.0, classes", "`3.0` fitted"),
        ("paper-2.26", "`paper-2.26`"),
        ("paper-1.96", "`paper-1.96`"),
    )
    for profile, shown in names:
        for what, named in (("encode", "encode"), ("decode to FP16", "decode"), ("attend", "attend")):
            row = find(rows, "codec", f"{profile}, n = 1024, 2048 tokens: {what}")
            if row:
                lines.append((shown, named, rate(row), times(row.get("to_copy")), times(row.get("to_peer"))))
                shown = ""
    for row in rows:
        if row["section"] == "codec" and row.get("of") == "peer":
            lines.append((row["name"], row["what"], rate(row), "", ""))
    lines.append(("memcpy of FP16 values", "", rate(find(rows, "codec", "memcpy")), "1x", ""))
    return table(("", "", "M values/s", "against memcpy", "against the best peer"), lines)


def threads(results: Results) -> str:
    rows = results["cpu"]["rows"]
    counts = sorted({row["threads"] for row in rows if row["section"] == "codec"})
    names = dict.fromkeys(
        row["name"] for row in rows
        if row["section"] in ("coder", "codec") and row["threads"] > 1 and row.get("of") != "copy"
    )  # fmt: skip
    lines = []
    for name in names:
        found = {row["threads"]: row["rate"] for row in rows if row["name"] == name}
        cells = [number(found.get(1))]
        for count in counts[1:]:
            both = count in found and 1 in found
            cells.append(f"{number(found[count])} ({times(found[count] / found[1])})" if both else "")
        lines.append((name.removeprefix("ours "), *cells))
    return table(("G symbols/s or M values/s", "one thread", *(f"{count} threads" for count in counts[1:])), lines)


def edges(results: Results) -> str:
    rows = results["cpu"]["rows"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        match = re.match(r"2\.26, classes, (n = .*): (encode|decode to FP16|attend)", row["name"])
        if row["section"] == "codec" and row["threads"] == 1 and match:
            found.setdefault(match[1], {})[match[2]] = row["rate"]
    kinds = ("encode", "decode to FP16", "attend")
    lines = [
        (name.replace(", 1 tokens", ", one token"), *(number(rates.get(kind)) for kind in kinds))
        for name, rates in found.items()
    ]
    return table(("`2.26` fitted, one thread, M values/s", *kinds), lines)


def files(results: Results) -> str:
    rows = results["cpu"]["rows"]
    sections = [s for s in dict.fromkeys(row["section"] for row in rows) if s.startswith("file on")]
    names = dict.fromkeys(row["name"] for row in rows if row["section"] in sections)
    lines = [("CRC32C alone, GB/s", *[rate(find(rows, "file", "CRC32C"))] * len(sections))]
    for name in names:
        cells, unit = [], ""
        for section in sections:
            row = next((r for r in rows if r["section"] == section and r["name"] == name), None)
            beside = f", {times(row['to_copy'])}" if row and "to_copy" in row else ""
            cells.append(rate(row) + beside)
            unit = row["unit"] if row else unit
        lines.append((f"{name}, {unit}", *cells))
    return table(("one thread", *(section.removeprefix("file ") for section in sections)), lines)


def commands(results: Results) -> str:
    rows = [row for row in results["cpu"]["rows"] if row["section"] in ("command", "first use")]
    return table(
        ("process", "threads or cores", ""),
        [
            (row["name"], str(row["threads"]), f"{number(row['rate'])} {row['unit']}")
            for row in sorted(rows, key=lambda row: row["section"])
        ],
    )


def _counts(result: dict[str, Any], profile: str) -> dict[str, float]:
    return {row["stage"]: row["instructions"] for row in result["rows"] if row["profile"] == profile}


def instructions(results: Results) -> str:
    """Before and now of the profiles that were there before."""
    before, now = results["cpu-instructions-before"], results["cpu-instructions"]
    columns = [_counts(result, profile) for profile in ("paper-2.26", "2.26") for result in (before, now)]
    stages = dict.fromkeys(stage.replace("rans ", "").replace("prefix ", "") for column in columns for stage in column)

    def cell(column: dict[str, float], stage: str) -> str:
        named = {name.replace("rans ", "").replace("prefix ", ""): value for name, value in column.items()}
        return f"{named[stage]:.1f}" if stage in named else ""

    head = ("stage", "`paper-2.26` before", "now", "`2.26` rotated before", "now")
    return table(head, [(stage, *(cell(column, stage) for column in columns)) for stage in stages])


def grouped_instructions(results: Results) -> str:
    """Of fitted plans, which were not there before."""
    columns = [_counts(results["cpu-instructions"], f"{profile} classes") for profile in ("2.26", "2.26-t")]
    stages = dict.fromkeys(stage for column in columns for stage in column)
    cells = [(s, *(f"{column[s]:.1f}" if s in column else "" for column in columns)) for s in stages]
    return table(("stage", "`2.26` fitted", "`2.26-t` fitted"), cells)


def stage_times(results: Results) -> str:
    rows = results["cpu"]["rows"]
    profiles = ("2.26 classes", "2.26-t classes", "2.26", "paper-2.26")
    columns = [
        {
            row["name"].removeprefix(f"{profile}: ").replace("rans ", "").replace("prefix ", ""): row["rate"]
            for row in rows
            if row["section"] == "stage" and row["name"].startswith(f"{profile}: ")
        }
        for profile in profiles
    ]
    stages = dict.fromkeys(stage for column in columns for stage in column)
    lines = [(s, *(f"{1e3 / column[s]:.2f}" if s in column else "" for column in columns)) for s in stages]
    head = ("ns a value, one thread", "`2.26` fitted", "`2.26-t` fitted", "`2.26` rotated", "`paper-2.26`")
    return table(head, lines)


PARTS: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "aims": aims,
    "coders": coders,
    "codec": codec,
    "threads": threads,
    "edges": edges,
    "files": files,
    "commands": commands,
    "stages": stage_times,
    "instructions": instructions,
    "grouped-instructions": grouped_instructions,
}


def parts(results: Results) -> dict[str, str]:
    """What stands between the marks of the page."""
    return {name: part(results) for name, part in PARTS.items()}


if __name__ == "__main__":
    generated_pages.rewrite(PAGE, parts(load()))
