"""A new file of what is live in another: dead records dropped, small ones joined (specification, clause 9.6)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..page import cut_page
from .compose import write_pages, write_rows
from .layer import KINDS
from .reader import Reader, SequenceReader
from .recordlog import RecordLog
from .runs import RunLayout
from .sequences import Stretch
from .structs import EXACT_ONLY, MAX_RUN
from .target import new_target
from .tensor import LayerReader, page_stretches

#: Payload a record of pages aims at; twice what a writer that must hold it together with rows takes.
REPACKED_TARGET = 16 << 20


def repack(
    reader: Reader, path: str | PathLike[str], *, progress: Callable[[int], object] | None = None, _file_id: bytes = b""
) -> int:
    """Write what ``reader`` reads to a new file at ``path``, closed and in one epoch; returns the new file's bytes.

    Pages are copied as they are and exact rows compressed again: every token reads as before, bit for bit.  A reader of
    some heads alone (``open(..., shard=)``) makes a file of these.  With a
    reader of mode ``salvage`` this rescues a damaged file.  An older file at ``path`` is replaced when the new one is
    complete; it may be the one being read.  ``progress`` is called with the number of tokens just copied.

    Raises :class:`ChecksumError` for damage that is met (nothing is left behind then), and OSError.
    """
    from .. import __version__

    header = replace(
        reader.view,
        file_id=_file_id or secrets.token_bytes(16),
        info=replace(reader.view.info, writer=f"dquantcodec {__version__}"),
    )
    target = new_target(path, header.salt, lock=False)
    try:
        target.log.put_block(header.pack())
        for sequence in reader.sequences:
            for tokens in _Copy(reader, sequence, target.log).run():
                if progress:
                    progress(tokens)
        target.complete()
        return target.log.end
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(target.path)
        target.leave(whole=False)
        raise


class _Copy:
    """One sequence on its way from a file to a log."""

    def __init__(self, reader: Reader, sequence: SequenceReader, log: RecordLog) -> None:
        self._sequence = sequence
        self._log = log
        self._run = RunLayout.of(reader.view)
        self._layers = reader.view.layers
        self._groups = [group for layer in sequence.layers for group in layer.groups]
        self._exact = reader.rules.exact
        self._present = reader.rules.present

    def run(self) -> Iterator[int]:
        """Copy, telling tokens as they are done."""
        stretches = self._sequence.log.stretches
        for paged, group in groupby(stretches, key=lambda stretch: stretch.paged):
            part = list(group)
            if paged:
                for joined in page_stretches(part, self._run.window):
                    yield from self._copy_pages(joined)
            else:
                yield from self._copy_rows(part[0].first, part[-1].end, self._present)

    def _copy_pages(self, stretches: list[Stretch]) -> Iterator[int]:
        window = self._run.window
        most = max(1, min(MAX_RUN, REPACKED_TARGET // self._run.window_bytes))
        first, end = stretches[0].first, stretches[-1].end
        for start in range(first, end, most * window):
            stop = min(start + most * window, end)
            pages = [list(copied_pages(group, start, stop)) for group in self._groups]
            write_pages(self._log, self._run, self._sequence.number, start, stop - start, pages)
            for _ in self._copy_rows(start, stop, self._exact, EXACT_ONLY):
                pass
            yield stop - start

    def _copy_rows(self, start: int, stop: int, places: Iterable[int], flags: int = 0) -> Iterator[int]:
        layers = [self._layers[place] for place in places]
        readers = [self._sequence.layers[place] for place in places]
        step = max(1, REPACKED_TARGET // max(1, sum(2 * layer.row_bytes for layer in layers)))
        for first in range(start, stop, step) if layers else ():
            last = min(first + step, stop)
            rows: list[NDArray[Any]] = [
                getattr(layer, kind).read(first, last, layer.spec.array_dtype) for layer in readers for kind in KINDS
            ]
            write_rows(self._log, layers, self._sequence.number, first, rows, flags)
            yield last - first


def copied_pages(layer: LayerReader, start: int, stop: int) -> Iterator[NDArray[np.uint8]]:
    """The pages of tokens ``start`` to ``stop`` of a layer that is one head group, in parts as its records have them.

    All these tokens are in pages, and ``start`` begins one.  Of a page that was cut what lies behind the cut is zero.
    """
    assert layer.plan is not None
    window = layer.plan.window
    for stretch in layer.stretches:
        low, high = max(start, stretch.first), min(stop, stretch.end)
        if low >= high:
            continue
        before = stretch.record.header.first
        pages = layer.stored_pages(stretch.record, (low - before) // window, -(-(high - before) // window))
        last = (high - before - 1) % window + 1
        if last < window and high < stretch.record.header.end:
            cut_page(pages[-1], layer.plan, last)
        yield pages
