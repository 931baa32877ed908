"""The file layer: pages in and out with checksums, beside plain writes of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..file import Layer, compose, create
from ..file import open as open_file
from ..file.structs import crc32c
from .work import Work

#: Times the pages of all tokens are written and read, so that opening and closing weigh as in a long cache.
RUNS = 8


def memory_folder() -> str | None:
    """A file system in memory, where the system has one, so that no disk is timed."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, eq=False)
class Coded:
    """Pages of a file at ``path`` and what it takes to write them again: ``tokens`` of every layer are coded.

    ``content`` is the whole file, ``pages`` one array a layer in the form that the file layer takes, ``layers`` have
    the plans that were fitted.
    """

    path: Path
    content: NDArray[np.uint8]
    layers: list[Layer]
    pages: list[list[NDArray[np.uint8]]]
    window: int
    tokens: int

    @staticmethod
    def of(
        path: Path, layers: Sequence[Layer], keys: Sequence[Any], values: Sequence[Any], *, threads: int = 1
    ) -> Coded:
        with create(path, layers, recent=0, threads=threads) as out:
            out.append(keys, values)
        with open_file(path) as cache:
            pages = [[layer.pages().data] for layer in cache.layers]
            planned = [replace(layer, profile=read.plan) for layer, read in zip(layers, cache.layers)]
            window, coded = cache.header.window, cache.layers[0].coded_tokens
        return Coded(path, np.fromfile(path, np.uint8), planned, pages, window, coded)

    def repeated(self, times: int) -> Coded:
        """As many layers ``times`` over, all with the same pages."""
        content = np.tile(self.content, times)
        return Coded(self.path, content, self.layers * times, self.pages * times, self.window, self.tokens)

    @property
    def values(self) -> int:
        return 2 * self.tokens * sum(layer.kv_heads * layer.head_dim for layer in self.layers)


def file_works(coded: Coded, runs: int = RUNS) -> Iterator[Work]:
    """Works in an order in which each must be run once before the next is asked for."""
    size, values = coded.content.nbytes, coded.values
    yield Work("CRC32C of the file's bytes", lambda: crc32c(coded.content), values, size)
    long = coded.path.with_suffix(".long")

    def write_long() -> None:
        with create(long, coded.layers, recent=0, sinks=0) as out:
            for number in range(runs):
                compose.write_pages(out._log, out._run, 0, number * coded.tokens, coded.tokens, coded.pages)

    def write_plain() -> None:
        with long.open("wb", buffering=0) as file:
            for _ in range(runs):
                file.write(coded.content.data)

    def read_long() -> None:
        with open_file(long) as cache:
            for layer in cache.layers:
                layer.page_runs()

    note = f"{runs * coded.tokens} tokens of {len(coded.layers)} layers"
    yield Work("write pages, CRC and index", write_long, runs * values, runs * size, note)
    yield Work("plain writes of as many bytes", write_plain, runs * values, runs * size)
    write_long()
    yield Work(
        "read all pages, CRC checked", read_long, runs * values, runs * size, "copied out of the mapping"
    )  # fmt: skip
    yield Work(
        f"open a file of {len(coded.layers)} fitted layers", lambda: open_file(long).close(), 0, 0, "plans included"
    )
    long.unlink()
