"""Speed of encoding, decoding and appending on a GPU, everything in one run.

    python benchmarks/gpu/codec.py [--json benchmarks/results/gpu-codec.json]

Medians of device time between events, with the fastest and the slowest run; 8 heads of 128, BF16.  A run is several
calls one behind another, so that the time of a call on the host hides behind the device's.  Keys have a mean per
channel, and channels and tokens differ in magnitude.  "fitted" plans have variance classes, as files and `fit_plan`
make them, others rotate.  The first pages are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import dquantcodec
from dquantcodec.codec import Codec as CpuCodec
from dquantcodec.codec import Pages
from dquantcodec.cuda import Cache, Codec
from dquantcodec.cuda.nvrtc import version as nvrtc_version
from dquantcodec.fit import fit_plan
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile

HEADS, HEAD_DIM = 8, 128
VALUES = HEADS * HEAD_DIM
#: Tokens that are encoded at once, and how often to fill the pool that is decoded: several times the L2 cache.
TOKENS, PARTS = 65536, 8
RUNS, CALLS = 15, 6
NAMES = (
    "2.26 fitted", "1.96 fitted", "3.0 fitted", "2.26-t fitted", "1.96-t fitted", "2.26", "1.96", "3.0", "paper-2.26",
    "paper-1.96",
)  # fmt: skip


def timed(work: Callable[[], object]) -> tuple[float, float, float]:
    """Median, least and most milliseconds of ``work`` on the device."""
    work()
    taken = []
    for _ in range(RUNS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for _ in range(CALLS):
            work()
        end.record()
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(begin, end) / CALLS)
    return float(np.median(taken)), min(taken), max(taken)


def row(profile: str, what: str, values: int, work: Callable[[], object], **more: object) -> dict[str, Any]:
    median, least, most = timed(work)
    return {
        "profile": profile,
        "what": what,
        "values": values,
        "ms": round(median, 4),
        "ms_least": round(least, 4),
        "ms_most": round(most, 4),
        "giga_values_per_s": round(values / median / 1e6, 1),
        **more,
    }


def tokens(seed: int) -> Any:
    """Keys and values ``[2, TOKENS, H, D]`` in BF16 on the device."""
    random = cupy.random.default_rng(seed)
    x = random.standard_normal((2, TOKENS, HEADS, HEAD_DIM), dtype=cupy.float32)
    x *= random.uniform(0.5, 2.0, (2, TOKENS, 1, 1)).astype(cupy.float32)
    # The same channels for every seed, so that a plan fitted to one serves all.
    channels = np.random.default_rng(0)
    x *= cupy.asarray(np.exp(0.8 * channels.standard_normal((2, 1, HEADS, HEAD_DIM))), cupy.float32)
    x[0] += cupy.asarray(2 * channels.standard_normal((1, HEADS, HEAD_DIM)), cupy.float32)
    return x.astype(ml_dtypes.bfloat16)


def plan_named(name: str) -> Plan:
    """The plan of a profile, rotated, or of "NAME fitted" with variance classes."""
    profile, _, fitted = name.partition(" ")
    if not fitted:
        return make_plan(Profile.named(profile), HEADS, HEAD_DIM)
    plan = fit_plan(profile, *(cupy.asnumpy(a[:1024]) for a in tokens(0)))
    assert plan.key.grouping is not None and plan.value.grouping is not None
    return plan


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    plan = plan_named(name)
    codec = Codec(plan)
    window = codec.plan.window
    pool = cupy.empty((PARTS * TOKENS // window, codec.layout.page_bytes), cupy.uint8)
    status = cupy.empty((2, TOKENS), cupy.uint8)
    for part in range(PARTS):
        x = tokens(part)
        target = pool[part * TOKENS // window :][: TOKENS // window]
        codec.encode(x[0], x[1], pages=target, status=status)
        assert not status.any()
        if part == 0:
            want = CpuCodec(plan).encode(*(cupy.asnumpy(a[: 2 * window]) for a in x))
            assert (cupy.asnumpy(pool[:2]) == want.data).all()
    yield row(
        name, "encode keys and values", 2 * TOKENS * VALUES,
        lambda: codec.encode(x[0], x[1], pages=target, status=status), tokens=TOKENS,
    )  # fmt: skip
    pages = Pages(pool, PARTS * TOKENS)
    out = cupy.empty((pages.tokens, HEADS, HEAD_DIM), ml_dtypes.bfloat16)
    for kind in ("key", "value"):
        good = cupy.empty((pages.tokens, getattr(codec.plan, kind).substreams), cupy.uint8)

        def decode(kind: str = kind, good: Any = good) -> None:
            codec.decode_kind(pages, kind, out=out, status=good)

        yield row(name, f"decode {kind}s", pages.tokens * VALUES, decode, tokens=pages.tokens)
        assert not good.any()


def append_rows(name: str, sequences: int) -> Iterator[dict[str, Any]]:
    """Replays of a captured step: those in which no page is full, and those in which all sequences fill one."""
    codec = Codec(plan_named(name))
    window = codec.plan.window
    pool = cupy.empty((sequences * 40, codec.layout.page_bytes), cupy.uint8)
    numbers = cupy.arange(sequences * 40, dtype=cupy.int32).reshape(sequences, 40)
    cache = Cache(codec, pool, numbers)
    x = tokens(0)[:, :sequences].copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(x[0], x[1], stream=stream)
        graph = stream.end_capture()
        taken: dict[bool, list[float]] = {False: [], True: []}
        for step in range(1, 16 * window + 1):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            graph.launch(stream)
            end.record()
            end.synchronize()
            taken[step % window == 0].append(cupy.cuda.get_elapsed_time(begin, end))
    for full, times in taken.items():
        what = f"append a token to {sequences} sequences, graph, {'all pages full' if full else 'no page full'}"
        yield {
            "profile": name, "what": what, "ms": round(float(np.median(times)), 4), "ms_least": round(min(times), 4),
            "ms_most": round(max(times), 4),
        }  # fmt: skip


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "dquantcodec": dquantcodec.__version__}
    found["nvrtc"] = ".".join(map(str, nvrtc_version()))
    for package in ("cupy-cuda12x", "cupy-cuda13x", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """The driver's own version, if its tool is there to ask."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    rows = []
    for name in NAMES:
        for found in rows_of(name):
            rows.append(found)
            print(f"{found['profile']:14} {found['what']:28} {found['ms']:9.3f} ms "
                  f"({found['ms_least']:.3f} to {found['ms_most']:.3f}) {found['giga_values_per_s']:8.1f} G values/s",
                  flush=True)  # fmt: skip
    for name in ("2.26 fitted", "2.26"):
        for found in append_rows(name, 64):
            rows.append(found)
            span = f"({found['ms_least']} to {found['ms_most']})"
            print(f"{name:14} {found['what']}: {found['ms']} ms {span}", flush=True)
    if arguments.json:
        driver = cupy.cuda.runtime.driverGetVersion()
        report = {
            "what": f"GPU codec, {HEADS} heads of {HEAD_DIM}, BF16, device time, {RUNS} runs of {CALLS} calls",
            "command": f"python benchmarks/gpu/codec.py --json {arguments.json.name}",
            "device": properties["name"].decode(),
            "multiprocessors": properties["multiProcessorCount"],
            "driver": driver_version(),
            "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
            "versions": versions(),
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
