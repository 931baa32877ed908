"""The tables of docs/gpu.md on reading pages, out of the committed results.

    python benchmarks/gpu/gpu_page.py        # rewrites what stands between the marks of the page

Sentences, and the tables of prefills and files, are written by hand; sentences quote some of these figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quality"))

import generated_pages
from page_parts import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "gpu.md"

Result = dict[str, Any]
Rows = list[Result]

#: The trellis and rANS, whose blocks were small before they had rings of words, as the page calls them.
RINGED = {"2.26-t:classes": "trellis", "paper-2.26": "rANS"}
PREFIX = {"2.26": "`2.26`", "2.26:classes": "`2.26:classes`"}
#: What the steps that have to do with lanes say they are of, and their profiles.
LANES = "lanes"
ALL = PREFIX | RINGED
#: Less of a warp's cycles than this is not shown.
LEAST_STALL = 0.02
#: Steps of rings and their predictions where the page says less than the record.
OF_RINGS = {
    "whole streams in shared memory: blocks of 16 warps for prefix codes of half the heads, of 8 for rANS of all heads "
    "and for four states' tables": "whole streams in shared memory: blocks of 8 warps",
    "nothing was written down": "",
    "rings of words instead, refilled while letters are decoded: 16 warps; what a warp knows of its rings spilled "
    "registers in every chunk": "rings of words, refilled while letters are decoded: 16 warps; what a warp knows of "
    "its rings fills registers, and others spill in every chunk",
    "0.125 (rANS) and 0.138 ms at 16x8192, as 16 instead of 8 warps did for prefix codes": "0.138 and 0.125 ms at "
    "16x8192",
    "the rings' states in shared memory, a word of rANS taken in by one predicate": "states of rings in shared memory; "
    "a word of rANS is taken in by one predicate",
    "17 % for rANS, a few for the trellis: the share of waiting for local memory": "17 % for rANS, the share of "
    "waiting for local memory",
    "look-ups before the words that nobody waits for yet; queries are loaded before most of the first words, which "
    "all blocks ask for at once": "look-ups before words that nobody waits for yet; queries before most of the first "
    "words, which all blocks ask for at once",
    "1 to 3 %; 3 us of 132 at 16x8192": "1 to 3 %",
    "what plans hold is near before it is asked for, divisions of 32 bits, partial sums loaded beside their factors; "
    "rotated queries kept for page means where there is room": "what plans hold is near before it is asked for, "
    "divisions of 32 bits, partial sums loaded beside their factors",
    "3 us of 42 at 1x32768, as much of 110 and 132 at 16x8192": "3 us",
}
#: What the same steps are for prefix codes.
OF_STARTS = {
    "whole streams in shared memory: blocks of 16 warps for prefix codes of half the heads, of 8 for rANS of all heads "
    "and for four states' tables": "before",
    "look-ups before the words that nobody waits for yet; queries are loaded before most of the first words, which "
    "all blocks ask for at once": "queries before most of the first words",
    "what plans hold is near before it is asked for, divisions of 32 bits, partial sums loaded beside their factors; "
    "rotated queries kept for page means where there is room": "what plans hold is near, and so on; rotated queries "
    "are kept for page means",
}


def load() -> dict[str, Result]:
    """The results by the names of their parts of the page."""
    paths = {name: RESULTS / f"{file}.json" for name, (file, _) in PARTS.items()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def fastest(bf16: dict[str, Result]) -> tuple[str, float]:
    """The kernel of the least median, and its milliseconds."""
    return min(((name, times["median_ms"]) for name, times in bf16.items()), key=lambda pair: pair[1])


def attention(result: Result) -> str:
    profiles = list(dict.fromkeys(row["profile"] for row in result["rows"]))
    lines = []
    for name in dict.fromkeys(row["row"] for row in result["rows"]):
        found = {row["profile"]: row for row in result["rows"] if row["row"] == name}
        rows = [found[profile] for profile in profiles]
        first = rows[0]
        # The bounds of attend.RAGGED, which the result does not hold.
        tokens = "100 to 30,000" if name == "ragged" else f"{first['tokens'] // first['batch']:,}"
        kernel, ms = fastest(first["bf16"])
        ours = [f"{row['median_ms']:.4f} ({row['ratio_to_bf16']:.2f})" for row in rows]
        lines.append((f"{first['batch']}, {tokens}", f"{ms:.4f} {kernel}", *ours))
    return table(("B, S", "BF16, ms", *(f"`{profile}`" for profile in profiles)), lines)


def shared_prefix(result: Result) -> str:
    profiles = list(dict.fromkeys(row["profile"] for row in result["rows"]))
    by_case: dict[tuple[int, int, int], dict[str, Result]] = {}
    for row in result["rows"]:
        by_case.setdefault((row["requests"], row["prefix"], row["own"]), {})[row["profile"]] = row
    lines = []
    for case, found in by_case.items():
        cells = [f"{fastest(found[profiles[0]]['bf16'])[1]:.3f}"]
        for row in (found[profile] for profile in profiles):
            cells.append(f"{row['alone']['median_ms']:.3f}")
            cells.append(f"{row['shared']['median_ms']:.3f} ({row['ratio_to_bf16']:.2f})")
        lines.append((*(f"{count:,}" for count in case), *cells))
    columns = [name for profile in profiles for name in (f"`{profile}` alone", "shared")]
    return table(("requests", "shared", "own", "BF16, ms", *columns), lines)


def decoding(result: Result) -> str:
    rates: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        rates.setdefault(row["profile"], {})[row["kind"]] = row["giga_values_per_s"]
    lines = [(f"`{profile}`", *(f"{of[kind]:,.0f}" for kind in ("key", "value"))) for profile, of in rates.items()]
    return table(("profile", "keys", "values"), lines)


def time_and_ratio(row: Result) -> str:
    return f"{row['ms']:.4f} ({row['ratio_to_bf16']:.2f})"


def heading(name: str) -> str:
    return ", ".join(f"{int(number):,}" for number in name.split("x"))


def by_row(step: Result) -> dict[tuple[str, str], Result]:
    """The rows of a step of the ladder by name and profile."""
    return {(row["row"], row["profile"]): row for row in step["rows"]}


def ladder(result: Result) -> str:
    """The steps before rings: a fitted plan's rows, a rotated one's where there was no other."""
    shown = ("16x8192", "64x8192")
    lines = []
    for step in result["steps"]:
        found = by_row(step)
        profiles = dict.fromkeys(profile for _, profile in found)
        if profiles.keys() & RINGED.keys():
            continue
        fitted = next((profile for profile in profiles if ":" in profile), "2.26")
        rows = [found[name, fitted] for name in shown]
        letters = f"{rows[0]['letters']['key']} + {rows[0]['letters']['value']}"
        what = "; ".join(step[key] for key in ("step", "note") if key in step)
        lines.append((what, step["predicted"], letters, *map(time_and_ratio, rows)))
    return table(("step", "predicted", "letters a head", *map(heading, shown)), lines)


def compared(
    steps: Rows, shown: tuple[str, ...], profiles: dict[str, str], texts: dict[str, str], words: dict[str, str]
) -> str:
    """The steps that have all rows named in ``shown`` of all profiles; ``texts`` are their keys and columns."""
    cells = [(name, profile) for name in shown for profile in profiles]
    lines = []
    for step in steps:
        found = by_row(step)
        if found.keys() >= set(cells):
            said = [words.get(step[key], step[key]) for key in texts]
            lines.append((*said, *(time_and_ratio(found[cell]) for cell in cells)))
    first, *others = profiles.values()
    columns = [column for name in shown for column in (f"{heading(name)}: {first}", *others)]
    return table((*texts.values(), *columns), lines)


def ladder_of_rings(result: Result) -> str:
    texts = {"step": "step", "predicted": "predicted"}
    return compared(before_lanes(result), ("16x8192", "64x8192"), RINGED, texts, OF_RINGS)


def ladder_of_starts(result: Result) -> str:
    return compared(before_lanes(result), ("1x32768", "64x8192"), PREFIX, {"step": "step"}, OF_STARTS)


def ladder_of_lanes(result: Result) -> str:
    """The steps that all profiles had in common, and the one before them."""
    before = before_lanes(result)[-1] | {"step": "before", "predicted": ""}
    steps = [before, *(step for step in result["steps"] if step.get("of") == LANES)]
    return compared(steps, ("64x8192",), ALL, {"step": "step", "predicted": "predicted"}, {})


def before_lanes(result: Result) -> Rows:
    return [step for step in result["steps"] if step.get("of") != LANES]


def stalls(result: Result) -> str:
    """What a multiprocessor does, and what its warps wait for, in the order of the default's fitted plan."""
    profiles: dict[str, Result] = result["profiles"]
    figures: tuple[tuple[str, str, str], ...] = (
        ("cycles of a multiprocessor", "cycles_active", ",.0f"),
        ("values a cycle and multiprocessor", "values_per_clk_and_multiprocessor", ".2f"),
        ("cycles in which shared memory works", "share_of_cycles", ".0%"),
        ("issue slots used", "issue_slots_used", ".0%"),
    )
    lines = [(what, *(f"{of[key]:{shown}}" for of in profiles.values())) for what, key, shown in figures]
    shares = profiles["2.26:classes"]["stalls"]
    for stall in sorted((name for name in shares if shares[name] >= LEAST_STALL), key=lambda name: -shares[name]):
        lines.append((stall.replace("_", " "), *(f"{of['stalls'][stall]:.1%}" for of in profiles.values())))
    return table(("", *(f"`{name}`" for name in profiles)), lines)


#: Parts of the page, the files their figures are in, and what makes them.
PARTS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "attention": ("gpu-attend", attention),
    "shared-prefix": ("gpu-shared-prefix", shared_prefix),
    "decoding": ("gpu-decode", decoding),
    "ladder": ("gpu-attend-ladder", ladder),
    "ladder-of-rings": ("gpu-attend-ladder", ladder_of_rings),
    "ladder-of-starts": ("gpu-attend-ladder", ladder_of_starts),
    "ladder-of-lanes": ("gpu-attend-ladder", ladder_of_lanes),
    "profile": ("gpu-attend-profile", stalls),
}


def parts(results: dict[str, Result]) -> dict[str, str]:
    """What stands between the marks of the page."""
    return {name: make(results[name]) for name, (_, make) in PARTS.items()}


if __name__ == "__main__":
    generated_pages.rewrite(PAGE, parts(load()))
