"""Fused attention over pages beside BF16 decode attention of PyTorch and FlashInfer, on one card in one run.

    python benchmarks/gpu/attend.py --out benchmarks/results/gpu-attend.json [--rows 16x8192,ragged]

Every case is captured into a CUDA graph over several sets of inputs, so that neither launch overhead of the host nor a
cache that happens to hold the last set counts: the sets together are larger than the second-level cache.  The time of a
call is the time of a replay over the number of sets; medians of replays, with the least and the largest.
``ratio_to_bf16`` is our time over the fastest BF16 time of the same row.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flashinfer_decode
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from dquantcodec import Codec, Profile, fit_plan
from dquantcodec.cuda.attend import PageAttention
from dquantcodec.plan import Plan, make_plan

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROWS = ((1, 8192), (1, 32768), (1, 131072), (16, 8192), (64, 8192), (16, 32768), (128, 8192))
#: Lengths of the ragged batch.
RAGGED = (100, 30000, 64)
#: Standard deviation of the logarithm of a channel's.
SPREAD = 0.6
#: More than the second-level cache of any card.
CACHE_BYTES = 150_000_000
REPLAYS = 15
#: Exact tokens of the second layout: a leading one and the newest ones.
SINKS, RECENT = 1, 128

Call = Callable[[int], Any]


def replay_times(calls: list[Call]) -> list[float]:
    """Milliseconds of a call, one number a replay of a graph of all ``calls``."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call(stream.cuda_stream)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call(stream.cuda_stream)
        times = []
        for replay in range(REPLAYS + 3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if replay >= 3:
                times.append(begin.elapsed_time(end) / len(calls))
    return times


def spread(times: list[float]) -> dict[str, float]:
    return {
        "median_ms": round(statistics.median(times), 5),
        "least_ms": round(min(times), 5),
        "largest_ms": round(max(times), 5),
    }


def bf16_times(lengths: list[int]) -> dict[str, Any]:
    """BF16 attention: FlashInfer's kernels where they are installed, and PyTorch's back ends.

    PyTorch has no ragged decode attention to compare with: as many tokens in sequences of equal length.
    """
    batch, tokens = len(lengths), math.ceil(sum(lengths) / len(lengths))
    size = 2 * batch * tokens * KV_HEADS * HEAD_DIM * 2
    sets = max(2, min(24, -(-CACHE_BYTES // size)))
    found = {}
    if flashinfer_decode.installed():
        for name, calls in flashinfer_decode.calls(lengths, QUERY_HEADS, KV_HEADS, HEAD_DIM, sets):
            try:
                found[name] = spread(replay_times(calls))
            except RuntimeError as reason:
                print(f"{name}, {batch} sequences: left out, {reason}"[:600], flush=True)
        torch.cuda.empty_cache()
    shape = (2, batch, KV_HEADS, tokens, HEAD_DIM)
    cached = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    query = torch.randn(batch, QUERY_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def call(keys_values: Any) -> Call:
        return lambda _: torch.nn.functional.scaled_dot_product_attention(query, *keys_values, enable_gqa=True)

    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            found[name] = spread(replay_times([call(x) for x in cached]))
    return found


def plan_named(name: str) -> Plan:
    """The plan of a profile, or fitted: ``2.26:classes``, or with letters of at most 11 bits ``2.26:classes=11``."""
    name, _, rule = name.partition(":")
    profile = Profile.named(name)
    if not rule:
        return make_plan(profile, KV_HEADS, HEAD_DIM)
    bits = rule.partition("=")[2]
    if bits:
        kinds = {kind: getattr(profile, kind) for kind in ("key", "value")}
        profile = replace(
            profile,
            **{k: replace(s, classes=replace(s.classes, field_bits=int(bits))) for k, s in kinds.items()},
        )
    return fit_plan(profile, *tokens(1024, 1))


def tokens(count: int, seed: int) -> NDArray[np.float32]:
    """Keys and values ``[2, count, H, D]`` whose channels differ, as those of models do."""
    spread = np.exp(SPREAD * np.random.default_rng(0).standard_normal((2, 1, KV_HEADS, HEAD_DIM), dtype=np.float32))
    shape = (2, count, KV_HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * spread


class Pool:
    """A few hundred coded pages of random tokens, repeated as often as a case needs."""

    def __init__(self, profile: str, kept: Path | None = None, pages: int = 64) -> None:
        file = kept / f"{profile.replace(':', '-')}.pickle" if kept else None
        if file and file.is_file():
            plan, data = pickle.loads(file.read_bytes())
        else:
            plan = plan_named(profile)
            data = Codec(plan).encode(*tokens(pages * plan.window, 2)).data
            if file:
                file.write_bytes(pickle.dumps((plan, data)))
        self.codec = Codec(plan)
        self.window = plan.window
        self.pages = torch.from_numpy(data).cuda() if torch.cuda.is_available() else data

    @property
    def letters(self) -> dict[str, int]:
        """Letters of a head."""
        found = {}
        for kind in ("key", "value"):
            stream = getattr(self.codec.plan, kind)
            letters = -(-HEAD_DIM // stream.letter) if stream.letter else stream.grouping.letters_per_head
            found[kind] = letters
        return found

    def bytes_of(self, lengths: list[int]) -> int:
        """Bytes of pages that a pass over sequences must read."""
        layout = self.codec.layout
        return sum(
            length // self.window * layout.page_bytes
            + (layout.bytes_for(rest) if (rest := length % self.window) else 0)
            for length in lengths
        )

    def calls(self, attention: PageAttention, lengths: list[int], exact: bool) -> Iterator[Call]:
        """Calls on one set of inputs after another; the pages of each stand in memory in random order."""
        counts = [-(-length // self.window) for length in lengths]
        generator = torch.Generator(device="cuda").manual_seed(1)
        while True:
            total = sum(counts)
            pool = torch.empty((total, self.pages.shape[1]), dtype=torch.uint8, device="cuda")
            for first in range(0, total, len(self.pages)):
                pool[first : first + len(self.pages)] = self.pages[: total - first]
            order = torch.randperm(total, generator=generator, device="cuda", dtype=torch.int32)
            table = torch.zeros((len(lengths), max(counts)), dtype=torch.int32, device="cuda")
            for row, part in zip(table, order.split(counts)):
                row[: len(part)] = part
            shape = (len(lengths), 1, QUERY_HEADS, HEAD_DIM)
            query = torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)
            device_lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
            options: dict[str, Any] = {}
            for name, tokens in (("sinks", SINKS), ("tail", RECENT)) if exact else ():
                rows = (2, len(lengths), tokens, KV_HEADS, HEAD_DIM)
                keys, values = torch.randn(rows, device="cuda").to(torch.bfloat16)
                options[name] = keys, values, torch.full((len(lengths),), tokens, dtype=torch.int32, device="cuda")

            def call(
                stream: int,
                arrays: tuple[Any, ...] = (query, pool, table, device_lengths),
                options: dict[str, Any] = options,
            ) -> None:
                attention(*arrays, stream=stream, **options)

            yield call

    def times(self, lengths: list[int], exact: bool) -> tuple[list[float], int]:
        """Times, and the warps of the blocks that the library chose."""
        attention = PageAttention(self.codec.plan, len(lengths), QUERY_HEADS, most_tokens=max(lengths))
        sets = max(2, min(24, -(-CACHE_BYTES // self.bytes_of(lengths))))
        calls = self.calls(attention, lengths, exact)
        return replay_times([next(calls) for _ in range(sets)]), attention.launch.shape.warps


def ask(what: str) -> str:
    """What the driver's own tool says."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def copy_rate() -> float:
    """Bytes read and written a nanosecond by a copy on the device."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / statistics.median(replay_times([lambda _: target.copy_(source)] * 2)) / 1e6


def machine() -> dict[str, str]:
    import cupy

    return {
        "card": torch.cuda.get_device_name(),
        "driver": ask("driver_version"),
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "cupy": cupy.__version__,
        **({"flashinfer": version("flashinfer-python")} if flashinfer_decode.installed() else {}),
        "numpy": np.__version__,
    }


def measure(
    name: str, lengths: list[int], profile: str, pool: Pool, bf16: dict[str, Any], copied: float
) -> dict[str, Any]:
    """One row; ``bf16`` holds times of as many tokens, ``copied`` is :func:`copy_rate`."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    fastest = min(of["median_ms"] for of in bf16.values())
    times, warps = pool.times(lengths, exact=False)
    kept = [max(1, length - SINKS - RECENT) for length in lengths]
    with_exact, _ = pool.times(kept, exact=True)
    ours = spread(times)
    values = 2 * sum(lengths) * KV_HEADS * HEAD_DIM
    return {
        "row": name,
        "batch": len(lengths),
        "tokens": sum(lengths),
        "profile": profile,
        "warps": warps,
        "letters": pool.letters,
        **ours,
        "bf16": bf16,
        "ratio_to_bf16": round(ours["median_ms"] / fastest, 3),
        "with_exact": {
            **spread(with_exact), "ratio_to_bf16": round(statistics.median(with_exact) / fastest, 3),
            "sinks": SINKS, "recent": RECENT,
        },
        "bytes": pool.bytes_of(lengths),
        "bf16_bytes": 2 * values,
        "values_per_ns": round(values / ours["median_ms"] / 1e6),
        "values_per_ns_and_multiprocessor": round(values / ours["median_ms"] / 1e6 / processors, 2),
        "share_of_copy_rate": round(pool.bytes_of(lengths) / ours["median_ms"] / 1e6 / copied, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", default=",".join([*(f"{b}x{s}" for b, s in ROWS), "ragged"]))
    parser.add_argument("--profiles", default="2.26,2.26:classes,2.26-t:classes,paper-2.26")
    parser.add_argument("--keep", type=Path, help="folder for plans and coded pages, made once")
    chosen = parser.parse_args()
    pools = {profile: Pool(profile, chosen.keep) for profile in chosen.profiles.split(",")}
    if not torch.cuda.is_available():
        sys.exit("no GPU: plans and pages are made, nothing is measured")
    copied = copy_rate()
    torch.cuda.empty_cache()
    rows = []
    for name in chosen.rows.split(","):
        if name == "ragged":
            least, largest, batch = RAGGED
            lengths = [int(x) for x in np.random.default_rng(0).integers(least, largest + 1, batch)]
        else:
            batch, tokens = (int(x) for x in name.split("x"))
            lengths = [tokens] * batch
        bf16 = bf16_times(lengths)
        torch.cuda.empty_cache()
        for profile, pool in pools.items():
            rows.append(measure(name, lengths, profile, pool, bf16, copied))
            torch.cuda.empty_cache()
            print(json.dumps(rows[-1]), flush=True)
    command = f"python benchmarks/gpu/attend.py --rows {chosen.rows} --profiles {chosen.profiles}"
    if chosen.out:
        command += f" --out benchmarks/results/{chosen.out.name}"
    result = {
        "command": command,
        **machine(),
        "copy_bytes_per_ns": round(copied),
        "rows": rows,
    }
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
