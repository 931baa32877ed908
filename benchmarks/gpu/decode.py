"""Speed of decoding plans with variance classes on a GPU.

    python benchmarks/gpu/decode.py --out benchmarks/results/gpu-decode.json

Medians of device time between events, with the fastest and the slowest run; 8 heads of 128 to BF16, half a million
tokens.  A run is several calls one behind another, so that the time of a call on the host hides behind the device's.
The first pages are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from attend import HEAD_DIM, KV_HEADS, Pool, machine, spread

from dquantcodec import Codec as CpuCodec
from dquantcodec.bench.device import device_times
from dquantcodec.codec import Pages
from dquantcodec.cuda import Codec

TOKENS = 524288


def rows_of(name: str, pool: Pool) -> list[dict[str, Any]]:
    plan = pool.codec.plan
    codec, some = Codec(plan), cupy.asarray(pool.pages)
    pages = Pages(cupy.tile(some, (TOKENS // plan.window // len(some), 1)), TOKENS)
    out = cupy.empty((TOKENS, KV_HEADS, HEAD_DIM), cupy.uint16)
    found = []
    for kind in ("key", "value"):
        first = Pages(cupy.asnumpy(some[:2]), 2 * plan.window)
        want = CpuCodec(plan).decode_kind(first, kind)
        got = codec.decode_kind(Pages(some, first.tokens), kind)
        assert cupy.asnumpy(got).tobytes() == want.tobytes()
        status = cupy.empty((TOKENS, getattr(plan, kind).substreams), cupy.uint8)

        def decode(kind: str = kind, status: Any = status) -> None:
            codec.decode_kind(pages, kind, out=out, status=status)

        times = device_times(decode)
        assert not status.any()
        values = TOKENS * KV_HEADS * HEAD_DIM
        rate = round(values / float(np.median(times)) / 1e6, 1)
        found.append({"profile": name, "kind": kind, "values": values, **spread(times), "giga_values_per_s": rate})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profiles", default="2.26:classes,2.26-t:classes")
    parser.add_argument("--keep", type=Path, help="folder for plans and coded pages, made once")
    chosen = parser.parse_args()
    rows = []
    for name in chosen.profiles.split(","):
        for row in rows_of(name, Pool(name, chosen.keep)):
            rows.append(row)
            print(json.dumps(row), flush=True)
    if chosen.out:
        command = "python benchmarks/gpu/decode.py --out benchmarks/results/gpu-decode.json"
        chosen.out.write_text(json.dumps({"command": command, **machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
