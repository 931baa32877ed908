"""Files in memory: the layer that moves pages with checksums, and the command end to end.

They lie on tmpfs where there is one, so that no disk is timed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import dquantcodec as dq
from dquantcodec.bench.files import Coded, file_works, memory_folder
from dquantcodec.bench.timing import Row, row
from dquantcodec.file import compose

SECTION = "file"
LAYERS, HEADS, DIM, TOKENS = 16, 8, 128, 2048
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
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        path, source, back = (Path(folder) / name for name in ("cache.dqkv", "cache.safetensors", "back.safetensors"))
        coded = Coded.of(path, layers, keys, values)
        for work in file_works(coded):
            amount, unit = (work.nbytes / 1e9, "GB/s") if work.nbytes else (1, "files/s")
            yield row(SECTION, work.name, work.run, amount, unit, note=work.note)
        copy, window = path.with_suffix(".copy"), coded.window
        whole = coded.tokens // window / -(-coded.tokens // window)  # the share of pages that are whole windows

        def write_by_window() -> None:
            dq.create(copy, coded.layers, recent=0, sinks=0).close()
            with dq.append(copy) as out:
                for number in range(coded.tokens // window):
                    one = [[parts[0][number : number + 1]] for parts in coded.pages]
                    compose.write_pages(out._log, out._run, 0, number * window, window, one)

        def flush_tokens() -> None:
            dq.create(copy, coded.layers, recent=TOKENS, sinks=0).close()
            with dq.append(copy) as out:
                for token in range(FLUSHES):
                    out.append(*([array[token : token + 1] for array in arrays] for arrays in (keys, values)))
                    out.flush()

        yield row(
            SECTION, "append pages, a record and a sync for each window", write_by_window,
            whole * coded.content.nbytes / 1e9, "GB/s", note="in memory, where a sync is free",
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
