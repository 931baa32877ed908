"""CPU speed of coders, codec, files and peers, everything in one run.

    python benchmarks/cpu [--json benchmarks/results/cpu.json] [--only coder codec stage peer file]

Medians of several runs with the slowest and fastest; one thread is pinned to one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import coders
import files
import peers
import stages
import whole

from dquantcodec.bench.machine import description, usable_threads, versions
from dquantcodec.bench.timing import Row, pinned

PACKAGES = (
    "dquantcodec", "numpy", "numba", "zstandard", "constriction", "google-crc32c", "turbo-attn", "torch",
)  # fmt: skip


def sections(wanted: list[str], threads: int) -> Iterator[Row]:
    with pinned():
        if "coder" in wanted:
            yield from coders.rows()
        if "codec" in wanted:
            yield from whole.rows()
        if "stage" in wanted:
            yield from stages.rows("2.26 classes")
            yield from stages.rows("2.26")
            yield from stages.rows("paper-2.26")
        if "peer" in wanted:
            yield from peers.rows()
    if threads > 1:
        if "coder" in wanted:
            yield from coders.thread_rows(threads)
        if "codec" in wanted:
            yield from whole.geometry_rows("2.26", 8, 128, 2048, threads)
    if "file" in wanted:
        yield from files.rows(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=["coder", "codec", "stage", "peer", "file"])
    arguments = parser.parse_args()
    threads = usable_threads()
    rows = []
    for row in sections(arguments.only, threads):
        rows.append(row)
        spread = f"{row.low:.4g}-{row.high:.4g}"
        bits = f"{row.bits:.3f}" if row.bits else ""
        print(f"{row.name:<66} {row.threads:>2} {row.rate:>9.4g} {row.unit:<12} {spread:>15} {bits:>6}", flush=True)
    if arguments.json:
        result = {
            "what": "CPU speed, medians of runs in one process; low and high are the slowest and fastest run",
            "command": "python benchmarks/cpu " + " ".join(sys.argv[1:]),
            "machine": description(),
            "versions": versions(PACKAGES),
            "rows": [row.as_json() for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
