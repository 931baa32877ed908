"""The file layer: pages in and out with checksums, beside plain writes and reads of as many bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..file import Layer, compose, create
from ..file import open as open_file
from ..file.disk import DiskFile
from ..file.header import Header
from ..file.recordlog import RecordLog
from ..file.runs import RunLayout
from ..file.structs import crc32c
from .work import Work

#: Times the pages of all tokens are written and read, so that opening and closing weigh as in a long cache.
RUNS = 8
MEMORY = Path("/dev/shm")


def memory_folder() -> str | None:
    """A file system in memory, where the system has one, so that no disk is timed."""
    return str(MEMORY) if MEMORY.is_dir() else None


@dataclass(frozen=True, eq=False)
class Coded:
    """What a file holds and what it takes to write it again: ``tokens`` of every layer are coded.

    ``data`` is the whole file, ``pages`` one array a layer in the form that the file layer takes, ``layers`` have the
    plans that were fitted.
    """

    layers: list[Layer]
    header: Header
    data: NDArray[np.uint8]
    pages: list[list[NDArray[np.uint8]]]
    tokens: int

    @staticmethod
    def of(
        path: Path, layers: Sequence[Layer], keys: Sequence[Any], values: Sequence[Any], *, threads: int = 1
    ) -> Coded:
        """Tokens of all layers, written to ``path``."""
        with create(path, layers, recent=0, threads=threads) as out:
            out.append(keys, values)
        with open_file(path) as cache:
            pages = [[layer.pages().data] for layer in cache.layers]
            planned = [replace(layer, profile=read.plan) for layer, read in zip(layers, cache.layers)]
            return Coded(planned, cache.header, np.fromfile(path, np.uint8), pages, cache.layers[0].coded_tokens)

    def repeated(self, times: int, path: Path) -> Coded:
        """As many layers ``times`` over, all with the same pages; ``path`` is written and removed."""
        layers = self.layers * times
        create(path, layers, recent=0, sinks=0).close()
        with open_file(path) as empty:
            header = empty.header
        path.unlink()
        return Coded(layers, header, np.tile(self.data, times), self.pages * times, self.tokens)

    @property
    def values(self) -> int:
        return 2 * self.tokens * sum(layer.kv_heads * layer.head_dim for layer in self.layers)

    def checksum_work(self) -> Work:
        return Work("CRC32C of the file's bytes", lambda: crc32c(self.data), self.values, self.data.nbytes)


def file_works(coded: Coded, folder: Path, runs: int = RUNS) -> Iterator[Work]:
    """Pages and plain bytes in and out of files in ``folder``; each work is to be done before the next is asked for."""
    long, plain = folder / "long.dqkv", folder / "plain"
    values, size = runs * coded.values, runs * coded.data.nbytes

    def write_pages(log: RecordLog, run: RunLayout) -> None:
        for number in range(runs):
            compose.write_pages(log, run, 0, number * coded.tokens, coded.tokens, coded.pages)

    def write_log() -> None:
        disk = DiskFile(long, "xb")
        log = RecordLog(disk, coded.header.salt)
        log.put_block(coded.header.pack())
        write_pages(log, RunLayout.of(coded.header))
        log.close()
        disk.close()

    def write_file() -> None:
        with create(long, coded.layers, recent=0, sinks=0) as out:
            write_pages(out._log, out._run)

    def write_plain(sync: bool = False) -> None:
        with plain.open("xb", buffering=0) as file:
            for _ in range(runs):
                file.write(coded.data.data)
            if sync:
                os.fsync(file.fileno())

    def read_all() -> None:
        with open_file(long) as cache:
            for layer in cache.layers:
                layer.page_runs()

    def read_plain() -> None:
        into = np.empty(coded.data.size, np.uint8)
        with plain.open("rb", buffering=0) as file:
            for _ in range(runs):
                file.readinto(into.data)

    def work(
        name: str, run: Callable[[], object], note: str, what: str, of: str = "ours",
        after: Callable[[], object] | None = None,
    ) -> Work:  # fmt: skip
        return Work(name, run, values, size, note, what, of, after)

    note = f"{runs * coded.tokens} tokens of {len(coded.layers)} layers"
    yield work("plain writes of as many bytes", write_plain, "no sync", "write", "copy", plain.unlink)
    yield work("write pages, CRC and index", write_log, f"{note}; no sync", "write", after=long.unlink)
    yield work(
        "plain writes of as many bytes, synced", lambda: write_plain(True), "one sync", "write a file", "copy",
        plain.unlink,
    )  # fmt: skip
    yield work("write a file of pages, synced and named", write_file, note, "write a file", after=long.unlink)
    write_plain()
    write_file()
    yield work("plain reads of as many bytes", read_plain, "into one buffer", "read", "copy")
    yield work("read all pages, CRC checked", read_all, "into memory of its own, opening included", "read")
    name = f"open a file of {len(coded.layers)} fitted layers"
    yield Work(name, lambda: open_file(long).close(), 0, note="plans included")
    long.unlink()
    plain.unlink()
