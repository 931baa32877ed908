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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from dquantcodec.bench.device import CALLS, RUNS, DeviceCodec, device_description, device_times, device_tokens
from dquantcodec.bench.machine import versions
from dquantcodec.cuda import Cache, Codec
from dquantcodec.cuda.nvrtc import version as nvrtc_version
from dquantcodec.fit import fit_plan
from dquantcodec.plan import Plan, make_plan
from dquantcodec.profile import Profile

HEADS, HEAD_DIM = 8, 128
#: Tokens that are encoded at once, and how often to fill the pool that is decoded: several times the L2 cache.
TOKENS, PARTS = 65536, 8
NAMES = (
    "2.26 fitted", "1.96 fitted", "3.0 fitted", "2.26-t fitted", "1.96-t fitted", "2.26", "1.96", "3.0", "paper-2.26",
    "paper-1.96",
)  # fmt: skip


def row(profile: str, what: str, values: int, work: Callable[[], object], **more: object) -> dict[str, Any]:
    times = device_times(work)
    median = float(np.median(times))
    return {
        "profile": profile,
        "what": what,
        "values": values,
        "ms": round(median, 4),
        "ms_least": round(times[0], 4),
        "ms_most": round(times[-1], 4),
        "giga_values_per_s": round(values / median / 1e6, 1),
        **more,
    }


def plan_named(name: str) -> Plan:
    """The plan of a profile, rotated, or of "NAME fitted" with variance classes."""
    profile, _, fitted = name.partition(" ")
    if not fitted:
        return make_plan(Profile.named(profile), HEADS, HEAD_DIM)
    plan = fit_plan(profile, *(cupy.asnumpy(a[:1024]) for a in device_tokens(TOKENS, HEADS, HEAD_DIM)))
    assert plan.key.grouping is not None and plan.value.grouping is not None
    return plan


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    measured = DeviceCodec(plan_named(name), TOKENS, PARTS)
    for work in measured.works():
        tokens = TOKENS if work.name.startswith("encode") else measured.pages.tokens
        yield row(name, work.name, work.values, work.run, tokens=tokens)


def append_rows(name: str, sequences: int) -> Iterator[dict[str, Any]]:
    """Replays of a captured step: those in which no page is full, and those in which all sequences fill one."""
    codec = Codec(plan_named(name))
    window = codec.plan.window
    pool = cupy.empty((sequences * 40, codec.layout.page_bytes), cupy.uint8)
    numbers = cupy.arange(sequences * 40, dtype=cupy.int32).reshape(sequences, 40)
    cache = Cache(codec, pool, numbers)
    x = device_tokens(TOKENS, HEADS, HEAD_DIM)[:, :sequences].copy()
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


PACKAGES = ("dquantcodec", "cupy-cuda12x", "cupy-cuda13x", "numpy", "numba")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
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
        report = {
            "what": f"GPU codec, {HEADS} heads of {HEAD_DIM}, BF16, device time, {RUNS} runs of {CALLS} calls",
            "command": f"python benchmarks/gpu/codec.py --json {arguments.json.name}",
            **device_description(),
            "versions": {**versions(PACKAGES), "nvrtc": ".".join(map(str, nvrtc_version()))},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
