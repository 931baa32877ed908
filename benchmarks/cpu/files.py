"""The file layer: pages in and out of files in page cache, with checksums; and the command end to end.

Everything but the command runs on tmpfs and on the file system of temporary files, each beside plain writes and reads
of as many bytes there, so that what the kernel costs can be told from what the library does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from timing import Row, row

import dquantcodec as dq
from dquantcodec.file import compose
from dquantcodec.file.disk import DiskFile
from dquantcodec.file.header import Header
from dquantcodec.file.recordlog import RecordLog
from dquantcodec.file.runs import RunLayout
from dquantcodec.file.structs import crc32c

LAYERS, HEADS, DIM, TOKENS = 16, 8, 128, 2048
#: Times the pages of all tokens are written and read, so that opening and closing weigh as in a long cache.
RUNS = 8
#: Layers that the command compresses, so many that the start of Python weighs little.
COMMAND_LAYERS = 8
#: Tokens appended and flushed one by one.
FLUSHES = 64
MEMORY = Path("/dev/shm")

Arrays = list[NDArray[np.float16]]


@dataclass(frozen=True, eq=False)
class Content:
    """Tokens of all layers, and one file of them: its bytes, and the pages of every layer as they lie in a record."""

    keys: Arrays
    values: Arrays
    layers: list[dq.Layer]
    header: Header
    data: NDArray[np.uint8]
    pages: list[list[NDArray[np.uint8]]]
    tokens: int

    @property
    def long_gigabytes(self) -> float:
        return RUNS * self.data.nbytes / 1e9


def content(folder: Path) -> Content:
    rng = np.random.default_rng(0)
    shape = (TOKENS, HEADS, DIM)
    keys, values = (
        [rng.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in range(LAYERS)] for _ in range(2)
    )
    layers = [dq.Layer(kv_heads=HEADS, head_dim=DIM, dtype="float16")] * LAYERS
    path = folder / "cache.dqkv"
    with dq.create(path, layers, recent=0) as out:
        out.append(keys, values)
    with dq.open(path) as cache:
        pages = [[layer.pages().data] for layer in cache.layers]
        planned = [replace(layer, profile=read.plan) for layer, read in zip(layers, cache.layers)]
        return Content(
            keys, values, planned, cache.header, np.fromfile(path, np.uint8), pages, cache.layers[0].coded_tokens
        )


def file_system(folder: Path) -> str:
    """The type of the file system of ``folder``, where the system tells."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return "unknown"
    real, found = str(folder.resolve()), ("", "unknown")
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def places() -> list[Path]:
    """Where files are timed: tmpfs, and the place of temporary files if that is another kind of file system."""
    usual = Path(tempfile.gettempdir())
    if not MEMORY.is_dir():
        return [usual]
    return [MEMORY] if file_system(MEMORY) == file_system(usual) else [MEMORY, usual]


def rows() -> Iterator[Row]:
    """Rates of the file layer, one thread."""
    with tempfile.TemporaryDirectory(dir=places()[0]) as folder:
        given = content(Path(folder))
    yield row(
        "file", "CRC32C of the file's bytes", lambda: crc32c(given.data), given.data.nbytes / 1e9, "GB/s", repeats=5
    )
    for place in places():
        with tempfile.TemporaryDirectory(dir=place) as folder:
            yield from _page_rows(given, Path(folder), f"file on {file_system(place)}")


def _page_rows(given: Content, folder: Path, section: str) -> Iterator[Row]:
    long, copy, plain = (folder / name for name in ("long.dqkv", "copy.dqkv", "plain"))

    def write_pages(log: RecordLog, run: RunLayout) -> None:
        for number in range(RUNS):
            compose.write_pages(log, run, 0, number * given.tokens, given.tokens, given.pages)

    def write_log() -> None:
        disk = DiskFile(long, "xb")
        log = RecordLog(disk, given.header.salt)
        log.put_block(given.header.pack())
        write_pages(log, RunLayout.of(given.header))
        log.close()
        disk.close()

    def write_file() -> None:
        with dq.create(long, given.layers, recent=0, sinks=0) as out:
            write_pages(out._log, out._run)

    def write_plain(sync: bool = False) -> None:
        with plain.open("xb", buffering=0) as file:
            for _ in range(RUNS):
                file.write(given.data)
            if sync:
                os.fsync(file.fileno())

    def read_all() -> None:
        with dq.open(long) as cache:
            for layer in cache.layers:
                layer.page_runs()

    def read_plain() -> None:
        into = np.empty(given.data.size, np.uint8)
        with plain.open("rb", buffering=0) as file:
            for _ in range(RUNS):
                file.readinto(into)

    note = f"{RUNS * given.tokens} tokens of {LAYERS} layers"
    tests = (
        ("plain writes of as many bytes", write_plain, "write", "copy", plain.unlink, "no sync"),
        ("write pages, CRC and index", write_log, "write", "ours", long.unlink, f"{note}; no sync"),
        (
            "plain writes of as many bytes, synced", lambda: write_plain(True), "write a file", "copy", plain.unlink,
            "one sync",
        ),
        ("write a file of pages, synced and named", write_file, "write a file", "ours", long.unlink, note),
    )  # fmt: skip
    for name, work, what, of, after, note in tests:
        yield row(
            section, name, work, given.long_gigabytes, "GB/s", what=what, of=of, after=after, note=note, repeats=7
        )
    write_plain()
    write_file()
    yield row(
        section, "plain reads of as many bytes", read_plain, given.long_gigabytes, "GB/s", what="read", of="copy",
        note="into one buffer", repeats=7,
    )  # fmt: skip
    yield row(
        section, "read all pages, CRC checked", read_all, given.long_gigabytes, "GB/s", what="read", repeats=7,
        note="into memory of its own, opening included",
    )  # fmt: skip
    yield row(
        section, f"open a file of {LAYERS} fitted layers", lambda: dq.open(long).close(), 1, "files/s",
        note="plans included",
    )  # fmt: skip
    window, coded = given.header.window, given.tokens

    def write_by_window() -> None:
        dq.create(copy, given.layers, recent=0, sinks=0).close()
        with dq.append(copy) as out:
            for number in range(coded // window):
                one = [[parts[0][number : number + 1]] for parts in given.pages]
                compose.write_pages(out._log, out._run, 0, number * window, window, one)

    def flush_tokens() -> None:
        dq.create(copy, given.layers, recent=TOKENS, sinks=0).close()
        with dq.append(copy) as out:
            for token in range(FLUSHES):
                out.append(*([array[token : token + 1] for array in arrays] for arrays in (given.keys, given.values)))
                out.flush()

    yield row(
        section, "append pages, a record and a sync for each window", write_by_window,
        coded // window / -(-coded // window) * given.data.nbytes / 1e9, "GB/s", repeats=5, after=copy.unlink,
    )  # fmt: skip
    yield row(
        section, f"append and flush single tokens of {LAYERS} layers", flush_tokens, FLUSHES, "tokens/s", repeats=5,
        after=copy.unlink, note="exact rows, compressed; a sync each",
    )  # fmt: skip


def command_rows(all_threads: int) -> Iterator[Row]:
    """The commands as processes, start of Python and fitting of plans included."""
    with tempfile.TemporaryDirectory(dir=places()[0]) as name:
        folder = Path(name)
        path, source, back = (folder / name for name in ("cache.dqkv", "cache.safetensors", "back.safetensors"))
        rng = np.random.default_rng(0)
        tensors = {
            f"layers.{i}.{kind}": rng.standard_normal((1, HEADS, TOKENS, DIM), dtype=np.float32).astype(np.float16)
            for i in range(COMMAND_LAYERS)
            for kind in ("key", "value")
        }
        save_file(tensors, source)
        millions = sum(tensor.size for tensor in tensors.values()) / 1e6
        note = f"start of Python included, {millions:.0f} million values"

        def command(*arguments: object) -> None:
            subprocess.run([sys.executable, "-m", "dquantcodec", *map(str, arguments)], check=True, capture_output=True)

        for threads in sorted({1, all_threads}):
            for name, arguments in (
                ("compress", ("compress", source, path)),
                ("decompress", ("decompress", path, back)),
            ):
                yield row(
                    "command", f"dqkv {name}, whole process",
                    lambda a=arguments, t=threads: command(*a, "--threads", t),
                    millions, "M values/s", threads, repeats=3, least_seconds=0, note=note,
                )  # fmt: skip
