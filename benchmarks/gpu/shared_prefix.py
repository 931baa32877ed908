"""Attention of requests that share a prefix: its pages decoded for several requests at a time, and for each alone.

    python benchmarks/gpu/shared_prefix.py --out benchmarks/results/gpu-shared-prefix.json

Every row has ``requests`` requests of ``prefix`` shared tokens and ``own`` of their own.  ``shared`` is
``SharedPrefixAttention``; ``alone`` is ``PageAttention`` whose block tables all name the same pages of the prefix;
BF16 is the faster of PyTorch's back ends, which read the prefix once a request.  Times as in ``attend.py``, one set of
inputs in each of several copies, so that no cache holds what the last replay left.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from attend import (
    CACHE_BYTES,
    HEAD_DIM,
    QUERY_HEADS,
    Call,
    Pool,
    bf16_times,
    machine,
    replay_times,
    spread,
)

from dquantcodec.cuda.attend import PageAttention
from dquantcodec.cuda.shared_prefix import SharedPrefixAttention

#: Requests, shared tokens, tokens of each request's own.
ROWS = ((16, 8192, 1024), (64, 8192, 1024), (64, 32768, 512), (256, 8192, 256))


class Requests:
    """Pages of one prefix and of all requests, in random order, and what either kernel takes."""

    def __init__(self, pool: Pool, requests: int, prefix: int, own: int, seed: int) -> None:
        windows, of_own = prefix // pool.window, own // pool.window
        total = windows + requests * of_own
        self.pages = torch.empty((total, pool.pages.shape[1]), dtype=torch.uint8, device="cuda")
        for first in range(0, total, len(pool.pages)):
            self.pages[first : first + len(pool.pages)] = pool.pages[: total - first]
        generator = torch.Generator(device="cuda").manual_seed(seed)
        order = torch.randperm(total, generator=generator, device="cuda", dtype=torch.int32)
        self.prefix_table = order[:windows].reshape(1, -1).contiguous()
        self.own_table = order[windows:].reshape(requests, of_own).contiguous()
        self.whole_table = torch.cat([self.prefix_table.expand(requests, -1), self.own_table], dim=1).contiguous()
        self.prefix_length = torch.tensor([prefix], dtype=torch.int32, device="cuda")
        self.own_lengths = torch.full((requests,), own, dtype=torch.int32, device="cuda")
        shape = (requests, 1, QUERY_HEADS, HEAD_DIM)
        self.query = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)


def measure(pool: Pool, requests: int, prefix: int, own: int) -> dict[str, Any]:
    plan = pool.codec.plan
    shared = SharedPrefixAttention(plan, 1, requests, QUERY_HEADS, most_prefix_tokens=prefix, most_tokens=own)
    alone = PageAttention(plan, requests, QUERY_HEADS, most_tokens=prefix + own)
    sets = max(2, min(16, -(-CACHE_BYTES // pool.bytes_of([prefix, *[own] * requests]))))
    inputs = [Requests(pool, requests, prefix, own, seed) for seed in range(sets)]

    def of_shared(x: Requests) -> Call:
        return lambda stream: shared(
            x.query, x.pages, x.prefix_table, x.prefix_length, x.own_table, x.own_lengths, stream=stream
        )

    def of_alone(x: Requests) -> Call:
        lengths = x.own_lengths + prefix
        return lambda stream: alone(x.query, x.pages, x.whole_table, lengths, stream=stream)

    of_shared(inputs[0])(0)
    of_alone(inputs[0])(0)
    torch.cuda.synchronize()
    results = [torch.as_tensor(of._own.out if of is shared else of.out, device="cuda") for of in (shared, alone)]
    a, b = (x.view(torch.bfloat16).float() for x in results)
    times = {
        "shared": spread(replay_times([of_shared(x) for x in inputs])),
        "alone": spread(replay_times([of_alone(x) for x in inputs])),
    }
    bf16 = bf16_times([prefix + own] * requests)
    fastest = min(of["median_ms"] for of in bf16.values())
    mine = times["shared"]["median_ms"]
    return {
        "requests": requests,
        "prefix": prefix,
        "own": own,
        **times,
        "bf16": bf16,
        "faster_than_alone": round(times["alone"]["median_ms"] / mine, 2),
        "ratio_to_bf16": round(mine / fastest, 3),
        "difference": float((a - b).norm() / b.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profiles", default="2.26:classes,2.26")
    parser.add_argument("--keep", type=Path, help="folder for plans and coded pages, made once")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: nothing is measured")
    rows = []
    for profile in chosen.profiles.split(","):
        pool = Pool(profile, chosen.keep)
        for row in ROWS:
            rows.append({"profile": profile, **measure(pool, *row)})
            torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), flush=True)
    if chosen.out:
        command = f"python benchmarks/gpu/shared_prefix.py --out benchmarks/results/{chosen.out.name}"
        chosen.out.write_text(json.dumps({"command": command, **machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
