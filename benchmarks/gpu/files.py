"""Speed of whole files on a GPU beside the CPU: from page cache to page cache, everything in one run.

    python benchmarks/gpu/files.py --out benchmarks/results/gpu-files.json

Medians of wall-clock time with the fastest and the slowest run.  Input and output lie on tmpfs where there is one, so
no disk is timed; checksums, indexes and renaming are part of every row.  Layers have 8 heads of 128, FP16; there are a
few with many tokens, because fitting a plan to a layer takes as long whatever its tokens are, on one core, and has a
row of its own.  "command" rows run ``dqkv --quiet`` in this process: with reading or writing safetensors, the search
for NaN and fitting; "library" rows write and read a file whose plans are given, from and to NumPy arrays.  The CPU, on
all cores, has fewer tokens.  Both kinds of files are compared byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from attend import machine
from safetensors.numpy import save_file

import dquantcodec as dq
from dquantcodec.cli.main import main as dqkv

LAYERS, HEADS, DIM = 4, 8, 128
TOKENS = {"cuda": 32768, "cpu": 4096}
RUNS = {"cuda": 3, "cpu": 3}
FILE_ID = bytes(16)

Arrays = list[np.ndarray[Any, Any]]


def model_cache(tokens: int) -> tuple[Arrays, Arrays]:
    """Keys and values of every layer, ``[T, H, D]``; channels, and every layer's, differ in magnitude."""
    random = cupy.random.default_rng(0)
    found: tuple[Arrays, Arrays] = [], []
    for _ in range(LAYERS):
        for arrays in found:
            x = random.standard_normal((tokens, HEADS, DIM), dtype=cupy.float32)
            x *= cupy.exp(0.6 * random.standard_normal((1, HEADS, DIM), dtype=cupy.float32))
            arrays.append(cupy.asnumpy(x.astype(cupy.float16)))
    return found


def row(device: str, what: str, tokens: int, work: Callable[[], object], layers: int = LAYERS) -> dict[str, Any]:
    work()
    times = []
    for _ in range(RUNS[device]):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    values = 2 * layers * HEADS * DIM * tokens
    median = statistics.median(times)
    found = {
        "device": device,
        "what": what,
        "tokens": tokens,
        "values": values,
        "median_s": round(median, 4),
        "least_s": round(min(times), 4),
        "largest_s": round(max(times), 4),
        "mega_values_per_s": round(values / median / 1e6, 1),
        "fp16_giga_bytes_per_s": round(2 * values / median / 1e9, 3),
    }
    print(json.dumps(found), flush=True)
    return found


def rows_of(device: str, folder: Path, layers: list[dq.Layer], keys: Arrays, values: Arrays) -> list[dict[str, Any]]:
    tokens, threads = TOKENS[device], len(os.sched_getaffinity(0))
    some = [[array[:tokens] for array in arrays] for arrays in (keys, values)]
    source, coded, back = (folder / f"{device}{ending}" for ending in (".safetensors", ".dqkv", ".back.safetensors"))
    tensors = {
        f"layers.{i}.{kind}": np.ascontiguousarray(array.transpose(1, 0, 2)[None])
        for kind, arrays in zip(("key", "value"), some)
        for i, array in enumerate(arrays)
    }
    save_file(tensors, source)
    del tensors

    def command(*arguments: object) -> None:
        options = ["--quiet", "--device", device, "--threads", threads]
        assert dqkv([str(a) for a in (*arguments, *options)]) == 0

    def write() -> None:
        with dq.create(coded, layers, recent=0, _file_id=FILE_ID, threads=threads, device=device) as out:
            out.append(*some)

    def read() -> None:
        with dq.open(coded, threads=threads, device=device) as file:
            for layer in file.layers:
                for tensor in (layer.key, layer.value):
                    for start in range(0, tokens, 4096):
                        tensor.read(start, min(start + 4096, tokens), np.float16)

    found = [
        row(device, "command: compress", tokens, lambda: command("compress", source, coded, "--recent", 0)),
        row(device, "command: decompress", tokens, lambda: command("decompress", coded, back)),
    ]
    source.unlink()
    back.unlink()
    found += [
        row(device, "library: write", tokens, write),
        row(device, "library: read, one thread", tokens, read),
    ]
    return found


def plain_copy(folder: Path, arrays: Arrays) -> dict[str, Any]:
    """What this machine does without a codec: as many bytes written to a file of the same place."""

    def work() -> None:
        with (folder / "plain").open("wb", buffering=0) as file:
            for array in arrays:
                file.write(array.view(np.uint8).data)

    found = row("cuda", "plain writes of the FP16 keys and values", len(arrays[0]), work)
    (folder / "plain").unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    keys, values = model_cache(max(TOKENS.values()))
    about = {
        "command": "python benchmarks/gpu/files.py --out benchmarks/results/gpu-files.json",
        **machine(),
        "cores": len(os.sched_getaffinity(0)),
        "profile": "2.26, fitted; all tokens but one in pages",
    }
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        plan = dq.fit_plan("2.26", keys[0][:1024], values[0][:1024])
        layers = [dq.Layer(HEADS, DIM, "float16", plan)] * LAYERS
        sample = [array[:1024] for array in (keys[0], values[0])]
        rows = [
            plain_copy(folder, [*keys, *values]),
            row("cpu", "fit the plan of one layer", 1024, lambda: dq.fit_plan("2.26", *sample), layers=1),
        ]
        for device in ("cuda", "cpu"):
            rows += rows_of(device, folder, layers, keys, values)
            if chosen.out:
                report = {**about, "place": "tmpfs" if memory else "disk", "rows": rows}
                chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        sizes = []
        for device in ("cuda", "cpu"):
            path = folder / f"compared-{device}"
            with dq.create(path, layers, _file_id=FILE_ID, threads=16, device=device) as out:
                out.append([array[:300] for array in keys], [array[:300] for array in values])
            sizes.append(path.read_bytes())
        assert sizes[0] == sizes[1]


if __name__ == "__main__":
    sys.exit(main())
