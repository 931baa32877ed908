"""CPU speed of coders, codec, files and peers, everything in one run.

    python benchmarks/cpu [--json benchmarks/results/cpu.json] [--only coder codec stage peer file]

Medians of several runs with the slowest and fastest; one thread is pinned to one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import coders
import files
import peers
import stages
import whole
from timing import Row, pinned


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def simd() -> str:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return " ".join(name for name in ("avx2", "f16c", "bmi2", "avx512f", "neon") if features.get(name))


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in (
        "dquantcodec",
        "numpy",
        "numba",
        "zstandard",
        "constriction",
        "google-crc32c",
        "turbo-attn",
        "torch",
    ):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


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
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
            "machine": {"processor": processor(), "cores": os.cpu_count(), "simd": simd(), "system": platform.system()},
            "versions": versions(),
            "rows": [row.as_json() for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
