"""Files in memory: the layer that moves pages with checksums, and the command end to end.

They lie on tmpfs where there is one, so that no disk is timed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from timing import Row, row

import dquantcodec as dq
from dquantcodec.file import compose
from dquantcodec.file.structs import crc32c

SECTION = "file"
LAYERS, HEADS, DIM, TOKENS = 16, 8, 128, 2048
#: Times the pages of all tokens are written and read, so that opening and closing weigh as in a long cache.
RUNS = 8
#: Tokens appended and flushed one by one.
FLUSHES = 64


def rows(all_threads: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    layers = [dq.Layer(kv_heads=HEADS, head_dim=DIM, dtype="float16")] * LAYERS
    keys, values = (
        [rng.standard_normal((TOKENS, HEADS, DIM), dtype=np.float32).astype(np.float16) for _ in range(LAYERS)]
        for _ in range(2)
    )
    total = 2 * LAYERS * keys[0].size
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path, source, back = (Path(folder) / name for name in ("cache.dqkv", "cache.safetensors", "back.safetensors"))
        with dq.create(path, layers, recent=0) as out:
            out.append(keys, values)
        page = np.fromfile(path, np.uint8)
        yield row(SECTION, "CRC32C of the file's bytes", lambda: crc32c(page), page.nbytes / 1e9, "GB/s")

        with dq.open(path) as cache:
            run = [[layer.pages().data] for layer in cache.layers]
            planned = [replace(layer, profile=read.plan) for layer, read in zip(layers, cache.layers)]
            window, coded = cache.header.window, cache.layers[0].coded_tokens
        copy, long = path.with_suffix(".copy"), path.with_suffix(".long")

        def write_long() -> None:
            with dq.create(long, planned, recent=0, sinks=0) as out:
                for number in range(RUNS):
                    compose.write_pages(out._log, out._run, 0, number * coded, coded, run)

        def write_plain() -> None:
            with long.open("wb", buffering=0) as file:
                for _ in range(RUNS):
                    file.write(page)

        def open_long() -> None:
            dq.open(long).close()

        def read_long() -> None:
            with dq.open(long) as cache:
                for layer in cache.layers:
                    layer.page_runs()

        yield row(
            SECTION, "write pages, CRC and index", write_long, RUNS * page.nbytes / 1e9, "GB/s",
            note=f"{RUNS * coded} tokens of {LAYERS} layers",
        )  # fmt: skip
        yield row(SECTION, "plain writes of as many bytes", write_plain, RUNS * page.nbytes / 1e9, "GB/s")
        write_long()
        yield row(
            SECTION, "read all pages, CRC checked", read_long, RUNS * page.nbytes / 1e9, "GB/s",
            note="copied out of the mapping",
        )  # fmt: skip
        yield row(SECTION, f"open a file of {LAYERS} fitted layers", open_long, 1, "files/s", note="plans included")
        long.unlink()

        def write_by_window() -> None:
            dq.create(copy, planned, recent=0, sinks=0).close()
            with dq.append(copy) as out:
                for number in range(coded // window):
                    one = [[parts[0][number : number + 1]] for parts in run]
                    compose.write_pages(out._log, out._run, 0, number * window, window, one)

        def flush_tokens() -> None:
            dq.create(copy, planned, recent=TOKENS, sinks=0).close()
            with dq.append(copy) as out:
                for token in range(FLUSHES):
                    out.append(*([array[token : token + 1] for array in arrays] for arrays in (keys, values)))
                    out.flush()

        yield row(
            SECTION, "append pages, a record and a sync for each window", write_by_window,
            coded // window / -(-coded // window) * page.nbytes / 1e9, "GB/s", note="in memory, where a sync is free",
        )  # fmt: skip
        yield row(
            SECTION, f"append and flush single tokens of {LAYERS} layers", flush_tokens, FLUSHES, "tokens/s",
            note="exact rows, compressed; in memory, where a sync is free",
        )  # fmt: skip
        tensors = {}
        for i in range(LAYERS):
            tensors[f"layers.{i}.key"] = keys[i].transpose(1, 0, 2)[None].copy()
            tensors[f"layers.{i}.value"] = values[i].transpose(1, 0, 2)[None].copy()
        save_file(tensors, source)

        def command(*arguments: object) -> None:
            subprocess.run([sys.executable, "-m", "dquantcodec", *map(str, arguments)], check=True, capture_output=True)

        for threads in dict.fromkeys((1, all_threads)):
            for name, arguments in (
                ("compress", ("compress", source, path, "--recent", 0)),
                ("decompress", ("decompress", path, back)),
            ):
                yield row(
                    SECTION, f"dqkv {name}, whole process", lambda a=arguments, t=threads: command(*a, "--threads", t),
                    total / 1e6, "M values/s", threads, repeats=3, note="start of Python included",
                )  # fmt: skip
