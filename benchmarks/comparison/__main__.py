"""How it compares: our codec beside other ways to store a KV cache, all in one run on the same keys and values.

    python benchmarks/comparison CAPTURE.safetensors --queries QUERIES.safetensors --json benchmarks/results/peers.json

Everybody gets the same tokens of the same layers, keys after RoPE, the numbers of a float16 cache, and everything that
has to be kept is counted: scales, zero points, norms, means, plans, exact tokens.  The key error is relative to the
energy left after each channel's mean of 128 tokens is removed, the value error to all energy, the attention error is
that of the output of the captured queries (``benchmarks/quality/methods.py``).

Speeds are processor time of one thread, medians of interleaved repetitions, over all layers: arrays in the order and
dtype that the implementation wants, in memory, to what it stores and back.

The docs' page is written from the result: ``docs/comparison.md``.  ``--only-page`` writes it from an existing file.
"""

# Threads are counted by what is imported below, so it comes after their number is set.
# ruff: noqa: E402

from __future__ import annotations

import os

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ[variable] = "1"

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE), str(REPOSITORY / "benchmarks" / "quality")]

import clock
import comparison_page
import methods
from contenders import Coder, Contender, contenders
from method import Method

SAMPLE = REPOSITORY / "dquantcodec" / "data" / "sample.safetensors"
PAGE = REPOSITORY / "docs" / "comparison.md"
PACKAGES = (
    "dquantcodec", "numpy", "numba", "ml_dtypes", "torch", "transformers", "hqq", "optimum-quanto", "turbo-attn",
    "aither-kvcache",
)  # fmt: skip


def prepared(contender: Contender, layers: list[methods.Layer]) -> tuple[list[Coder], float]:
    """Its coders, one a layer, and the processor seconds that making them took: for ours, fitting plans, with compiling
    kernels that were not cached."""
    began = time.process_time()
    coders = [contender.make(layer.keys, layer.values) for layer in layers]
    return coders, time.process_time() - began


def row(contender: Contender, coders: list[Coder], layers: list[methods.Layer]) -> dict[str, Any]:
    """Bytes and errors, measured by the code that measures all methods of the page on quality."""
    waiting = iter(coders)
    method = Method(contender.name, contender.family, "", lambda keys, values: next(waiting).code())
    found = asdict(methods.measure(method, layers))
    kept = ("bits_per_value", "key_centred_nmse", "key_nmse", "value_nmse", "attention_error")
    return {
        "name": contender.name, "family": contender.family, "runs": contender.runs,
        **{name: None if found[name] is None else float(f"{found[name]:.5g}") for name in kept},
    }  # fmt: skip


def processor() -> str:
    """What the system calls its processor."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    layers = list(methods.layers(arguments.capture, arguments.queries))
    ready, missing = [], []
    for contender in contenders():
        if arguments.only and not any(text in contender.name for text in arguments.only):
            continue
        try:
            coders, seconds = prepared(contender, layers)
            found = row(contender, coders, layers)
        except (ImportError, RuntimeError) as error:  # not installed, or its extension cannot be built
            reason = str(error).strip().partition("\n")[0][:200]
            missing.append({"name": contender.name, "package": contender.package, "reason": reason})
            print(f"{contender.name}: not run: {reason}", flush=True)
            continue
        if contender.family == "dquantcodec" or contender.family == "the paper's profile":
            found["fit_seconds_a_layer"] = round(seconds / len(layers), 3)
        ready.append((coders, found))
        print(f"{contender.name:<42} {found['bits_per_value']:>7.3f} bits", flush=True)
    first = layers[0].keys
    amount = sum(layer.keys.size + layer.values.size for layer in layers)
    for (_, found), times in zip(ready, clock.interleaved([coders for coders, _ in ready], arguments.repetitions)):
        found["encode"], found["decode"] = clock.rate(times.encode, amount), clock.rate(times.decode, amount)
    return {
        "what": "our codec beside other ways to store a KV cache, one run on the same keys and values",
        "command": f"python benchmarks/comparison {arguments.capture.name}"
        + (f" --queries {arguments.queries.name}" if arguments.queries else "")
        + " --json benchmarks/results/peers.json",
        "capture": arguments.capture.name,
        "layers": len(layers),
        "tokens": len(first),
        "kv_heads": first.shape[1],
        "head_dim": first.shape[2],
        "query_positions": None if layers[0].queries is None else layers[0].queries.shape[1],
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
        "load_average": [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "repetitions": arguments.repetitions,
        "speed_unit": "million values a second of processor time, one thread",
        "versions": versions(),
        "rows": [found for _, found in ready],
        "not_run": missing,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/comparison", description=__doc__.splitlines()[0])
    parser.add_argument("capture", type=Path, nargs="?", default=SAMPLE, help="keys and values; default: the sample")
    parser.add_argument("--queries", type=Path, help="where the queries are, if not in the capture")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="those whose name contains one of these")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here, and the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--only-page", action="store_true", help="write the page of the result in --json")
    arguments = parser.parse_args()
    kept = arguments.only_page
    result = json.loads(arguments.json.read_text(encoding="utf-8")) if kept else run(arguments)
    print(comparison_page.table_of(result))
    if arguments.json:
        if not kept:
            arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        arguments.page.write_text(comparison_page.page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
