"""Opening a file to add tokens (specification, clause 9.5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError, LimitError
from ..urls import is_url, plain, refuse_appending
from .coding import coding
from .compose import RECORD_TARGET
from .disk import DiskFile
from .layer import KINDS
from .reader import Reader
from .reader import open as open_reader
from .recordlog import RecordLog
from .structs import REWIND
from .target import Target
from .writer import Resumed, Settings, Writer

#: Rows read at a time, all layers together.
PORTION_BYTES = 16 << 20
#: Epochs are u32.
_MOST_EPOCHS = 1 << 32


def append(
    path: str | PathLike[str],
    *,
    expect: Mapping[str, Any] | None = None,
    threads: int = 1,
    progress: Callable[[int], object] | None = None,
    lock: bool = True,
    device: str = "cpu",
    _record_target: int = RECORD_TARGET,
) -> Writer:
    """A :class:`Writer` that continues the file at ``path``; use it in a ``with`` block.

    The file keeps its layers, plans, sequences, ``sinks`` and ``recent``.  What was flushed is there after a crash of
    program or machine, bit for bit, or an error says that the file was damaged; it is never silently something else.  A
    file that a crash left is continued behind its last whole record.  Readers may have the file open, and may open
    it, all the time; they see what was written when they opened it.  ``expect`` is what :func:`open` takes.

    Only whole windows are coded, so a file closed by this writer holds more exact tokens than ``recent``, by less than
    a window.

    ``lock=False`` is for file systems without locks (``lock-unsupported``); nobody else may write then.  ``device`` is
    what :func:`create` takes.

    Raises :class:`InputError` (``file-locked``, ``file-replaced``, ``lock-unsupported``, ``input-threads``;
    ``url-append`` for URLs, because objects in storage cannot grow), OSError, and what :func:`open` raises,
    :class:`DeviceError` among it; the file is not changed then.
    """
    if threads < 1:
        raise InputError(f"threads must be at least 1, not {threads}", code="input-threads")
    if is_url(plain(path)):
        raise refuse_appending(plain(path))
    coded = coding(device, threads)
    place = Path(os.path.realpath(plain(path)))
    disk = DiskFile(place, "r+b")
    reader = None
    try:
        if lock:
            disk.lock(place)
        if not disk.names(place):
            raise InputError(f"{place}: another file took this name just now; try again", code="file-replaced")
        reader = open_reader(place, expect=expect)
        log = _continued(reader, disk)
        resume = _Held(reader)
        writer = Writer(
            Target(place, log),
            reader.header,
            Settings(threads, (), progress, _record_target, resume, False, reader.close, coded),
        )
        for number, sequence in enumerate(reader.sequences):
            if not sequence.log.agreed:
                log.put(REWIND, number, sequence.tokens, 0)
        return writer
    except BaseException:
        disk.close()
        if reader:
            reader.close()
        raise


def _continued(reader: Reader, disk: DiskFile) -> RecordLog:
    """The log behind the last whole record; all before it is on the medium."""
    records = reader.log.records
    epoch = records[-1].header.epoch + 1 if records else 0
    if epoch == _MOST_EPOCHS:
        raise LimitError(f"{reader.path}: the file was opened 2**32 times; repack it", code="limit-epoch")
    disk.sync()
    headers = [record.header.pack() for record in records]
    return RecordLog(disk, reader.header.salt, headers, reader.log.end, epoch, durable=True)


class _Held:
    """What a file holds of its sequences, read when it is asked for."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __call__(self, number: int) -> Resumed:
        sequence = self._reader.sequences[number]
        start = max(sequence.log.floor, min(self._reader.header.sinks, sequence.tokens))
        return Resumed(start, sequence.tokens, self._rows(number, start))

    def _rows(self, number: int, start: int) -> Iterator[list[NDArray[Any]]]:
        sequence = self._reader.sequences[number]
        layers = [layer for layer in sequence.layers if layer.spec.storage != "absent"]
        step = max(1, PORTION_BYTES // max(1, sum(2 * layer.spec.row_bytes for layer in layers)))
        for first in range(start, sequence.tokens, step):
            last = min(first + step, sequence.tokens)
            yield [getattr(layer, kind).read(first, last, layer.spec.array_dtype) for layer in layers for kind in KINDS]
