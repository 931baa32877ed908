"""CPU speed of coders, codec, files and peers, everything in one run.

    python benchmarks/cpu [--json benchmarks/results/cpu.json] [--only SECTION ...] [--quick]

Medians of several runs with the slowest and fastest; one thread is pinned to one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import coders
import files
import first_use
import peers
import stages
import whole
from ratios import with_ratios

from dquantcodec import warm
from dquantcodec.bench import timing
from dquantcodec.bench.machine import description, usable_threads, versions
from dquantcodec.bench.timing import Row, pinned

PACKAGES = (
    "dquantcodec", "numpy", "numba", "zstandard", "constriction", "google-crc32c", "turbo-attn", "torch",
)  # fmt: skip
SECTIONS = ("coder", "codec", "stage", "peer", "file", "first", "command")
#: Profiles whose stages are timed one by one.
STAGES = ("2.26 classes", "2.26-t classes", "2.26", "paper-2.26")


def sections(wanted: list[str], threads: int) -> Iterator[Row]:
    counts = sorted({1, min(2, threads), threads})
    with pinned():
        if "coder" in wanted:
            yield from coders.rows()
        if "codec" in wanted:
            yield from whole.rows()
        if "peer" in wanted:
            yield from peers.rows()
        if "stage" in wanted:
            for profile in STAGES:
                yield from stages.rows(profile)
        if "file" in wanted:
            yield from files.rows()
    if threads > 1:
        if "coder" in wanted:
            yield from coders.thread_rows(counts)
        if "codec" in wanted:
            yield from whole.thread_rows(counts)
    if "first" in wanted:
        yield from first_use.rows()
    if "command" in wanted:
        yield from files.command_rows(threads)


def compile_kernels(threads: int) -> float:
    """Seconds it takes to compile what is measured, on all cores; next to none if the cache has it."""
    began = time.perf_counter()
    parts = [*warm.ENCODE, *warm.DECODE, "attend"]
    with ThreadPoolExecutor(max(1, threads // len(parts))) as pool:
        for path in ("prefix", "rans", "grouped", "trellis"):
            pool.submit(warm.compile_parts, warm.missing(parts, path), path)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="at most five runs a row, each a fifth as long")
    arguments = parser.parse_args()
    if arguments.quick:
        timing.PACE.most_repeats, timing.PACE.part = 5, 0.2
    threads = usable_threads()
    began = time.perf_counter()
    print(f"kernels compiled in {compile_kernels(threads):.1f} s", flush=True)
    rows = []
    for row in sections(arguments.only, threads):
        rows.append(row)
        spread = f"{row.low:.4g}-{row.high:.4g}"
        bits = f"{row.bits:.3f}" if row.bits else ""
        name = f"{row.section}: {row.name}"
        print(f"{name:<76} {row.threads:>2} {row.rate:>9.4g} {row.unit:<11} {spread:>15} {bits:>6}", flush=True)
        if arguments.json:
            write(arguments.json, rows)
    print(f"{time.perf_counter() - began:.0f} s in all")


def write(path: Path, rows: list[Row]) -> None:
    """The result so far; written after every row, so that an interrupted run is not lost."""
    result = {
        "what": "CPU speed, medians of runs in one process; low and high are the slowest and fastest run",
        "command": "python benchmarks/cpu " + " ".join(word for word in sys.argv[1:] if word != str(path)),
        "machine": description(),
        "versions": versions(PACKAGES),
        "rows": [row.as_json() for row in with_ratios(rows)],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
