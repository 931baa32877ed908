"""Writing ``.dqkv``: tokens in, records out, constant memory (specification, clause 4).

A token is coded once it is more than ``recent`` tokens behind the newest; until then its rows wait in their own dtype.
Full windows are encoded at once and collected into runs; every full run is a record.  The file takes its name only
when it is complete: it is written as a sibling and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, LimitError
from ..profile import Profile
from . import structs
from .header import Header
from .incoming import incoming_rows
from .info import Info
from .layer import Layer
from .pending import Pending
from .rows import encode_rows
from .runs import RunLayout
from .structs import EXACT_ONLY, PAGES, RECORD_BYTES, ROWS, ROWS_ENTRY, RecordHeader, align, crc32c, index_record

#: Payload a record aims at: large enough for long reads, small enough to hold in memory.
RECORD_TARGET = 8 << 20
#: Rows taken in at a time, all layers together.
PORTION_BYTES = 16 << 20
#: Tokens that plans are fitted to; a finished sequence may have fewer, but not fewer than the least.
FIT_TOKENS = 512
LEAST_TOKENS = 32
#: Sequences with too few tokens that wait for one with enough.
MOST_SHORT = 64


def create(
    path: str | PathLike[str],
    layers: Sequence[Layer],
    *,
    sinks: int | None = None,
    recent: int = 128,
    model: str = "",
    revision: str = "",
    positions_start: int = 0,
    shard: tuple[int, int] = (0, 1),
    metadata: Mapping[str, Any] | None = None,
    threads: int = 1,
    sequences: int = 1,
    progress: Callable[[int], object] | None = None,
    _file_id: bytes | None = None,
    _record_target: int = RECORD_TARGET,
) -> Writer:
    """A :class:`Writer` of a new file at ``path``; use it in a ``with`` block.

    The first ``sinks`` (default: what the layers' profiles ask for) and the newest ``recent`` tokens of every sequence
    stay exact.  ``positions_start`` is the
    position of token 0 in the model, ``shard`` (part, parts) by KV heads, ``metadata`` a mapping of JSON values.
    ``progress`` is called with the number of tokens just taken in.  Neither ``threads`` nor how tokens are portioned
    over calls changes a byte of the file.

    Layers whose profile has variance classes are fitted to the first 512 tokens that are to be coded, of the sequence
    that has them first; nothing is written until then.  Plans made by :func:`dquantcodec.fit_plan` need no waiting.

    Raises :class:`InputError` and :class:`LimitError` before anything is written, OSError where the file system does.
    """
    from .. import __version__

    if sinks is None:
        sinks = max((layer.profile_sinks for layer in layers), default=0)
    for name, count in (("sinks", sinks), ("recent", recent)):
        if not 0 <= count < 1 << 32:
            raise InputError(f"{name} must be 0 or more tokens, not {count}", code="input-tokens")
    if threads < 1:
        raise InputError(f"threads must be at least 1, not {threads}", code="input-threads")
    info = Info(model, revision, positions_start, shard, f"dquantcodec {__version__}", dict(metadata or {}))
    resolved = tuple(layer.resolved(number) for number, layer in enumerate(layers))
    header = Header(_file_id or secrets.token_bytes(16), resolved, sequences, sinks, recent, info)
    fitted = [layer.fitted_profile for layer in layers]
    return Writer(Path(os.path.realpath(path)), header, fitted, threads, progress, _record_target)


class Writer:
    """Appends tokens to a new file; made by :func:`create`.

    Leaving the ``with`` block closes the file and gives it its name; leaving by an exception removes it, and an older
    file of that name stays as it was.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        fitted: Sequence[Profile | None],
        threads: int,
        progress: Callable[[int], object] | None,
        record_target: int,
    ) -> None:
        header.pack()  # raises whatever the header has to say before anything is written
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory; name a file", str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such directory", str(path.parent))
        self.path = path
        self._header = header
        self._fitted = fitted
        self._begun = False
        #: Finished sequences with too few tokens to fit a plan to; they wait for one that has enough.
        self._short: list[tuple[int, Pending]] = []
        self._threads = threads
        self._progress = progress
        self._run = RunLayout.of(header)
        self._exact = [place for place, layer in enumerate(header.layers) if layer.storage == "exact"]
        self._present = [place for place, layer in enumerate(header.layers) if layer.storage != "absent"]
        # Threads take layers where there are several, otherwise the pages of the one layer.
        shared = len(self._run.layers) > 1
        self._pool = ThreadPoolExecutor(threads) if shared and threads > 1 else None
        #: Tokens encoded at a time; without coded layers any number serves.
        self._window = header.window or 128
        exact_bytes = self._window * sum(2 * header.layers[place].row_bytes for place in self._exact)
        per_window = self._run.window_bytes + exact_bytes
        self._run_windows = max(1, min(structs.MAX_RUN, record_target // max(1, per_window)))
        self._row_bytes = sum(2 * header.layers[place].row_bytes for place in self._present)
        self._pending: dict[int, Pending] = {}
        self._finished: set[int] = set()
        self._records: list[bytes] = []
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
        self._file: IO[bytes] | None = self._temporary.open("xb")
        if not any(fitted):
            with self._aborting():
                self._begin(header)

    def append(
        self, keys: Sequence[NDArray[Any] | None], values: Sequence[NDArray[Any] | None], sequence: int = 0
    ) -> None:
        """Add ``T`` tokens to ``sequence``: one array ``[T, kv_heads, head_dim]`` per layer, in the layer's dtype.

        Absent layers take None.  Arrays may be reused afterwards.  Raises :class:`InputError`
        (``writer-closed``, ``sequence-range``, ``sequence-finished``, ``layer-count``, ``layer-missing``,
        ``layer-absent``, ``input-shape``, ``dtype-mismatch``) and :class:`LimitError` (``limit-tokens``) with nothing
        taken in.  Anything raised later (NaN or infinity in a coded layer, OSError) ends the writer and removes
        the unfinished file.
        """
        self._open_file()
        if not 0 <= sequence < self._header.sequences:
            raise InputError(
                f"sequence {sequence} of a file created with {self._header.sequences}; say sequences= when creating",
                code="sequence-range",
            )
        if sequence in self._finished:
            raise InputError(f"sequence {sequence} is finished", code="sequence-finished")
        rows = incoming_rows(self._header.layers, keys, values)
        pending = self._pending.setdefault(sequence, Pending(len(rows)))
        tokens = len(rows[0]) if rows else 0
        if pending.end + tokens >= structs.MAX_TOKENS:
            raise LimitError(f"sequence {sequence} would pass 2**40 tokens", code="limit-tokens", sequence=sequence)
        step = max(self._window, PORTION_BYTES // max(1, self._row_bytes))
        with self._aborting():
            for start in range(0, tokens, step):
                portion = [array[start : start + step] for array in rows]
                pending.put(portion)
                self._advance(sequence, pending)
                if self._progress:
                    self._progress(len(portion[0]))

    def finish(self, sequence: int) -> None:
        """Write what ``sequence`` still has in memory; it takes no more tokens.  :meth:`close` does this for all."""
        self._open_file()
        if sequence in self._finished or sequence not in self._pending:
            return
        with self._aborting():
            pending = self._pending.pop(sequence)
            self._advance(sequence, pending, last=True)
            self._finished.add(sequence)

    def close(self) -> None:
        """Finish all sequences, write the index, and give the file its name.  A closed writer stays closed."""
        if self._file is None:
            return
        for sequence in sorted(self._pending):
            self.finish(sequence)
        with self._aborting():
            if not self._begun:
                self._begin(self._header)
            self._write_index()
            file = self._open_file()
            file.flush()
            os.fsync(file.fileno())
            file.close()
            self._temporary.replace(self.path)
        self._file = None
        self._stop_threads()
        _sync_directory(self.path.parent)

    def abort(self) -> None:
        """Remove the unfinished file.  Without effect on a closed writer."""
        file, self._file = self._file, None
        if file is None:
            return
        self._pending.clear()
        self._short.clear()
        self._stop_threads()
        # A full disk fails again while buffers are flushed; the file goes anyway.
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _open_file(self) -> IO[bytes]:
        if self._file is None:
            raise InputError("the writer is closed; create another", code="writer-closed", path=str(self.path))
        return self._file

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.path)  # a failing write does not say where
            self.abort()
            raise

    def _stop_threads(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _begin(self, header: Header) -> None:
        """Write the header block; pages are encoded by its plans from here on."""
        from ..codec import Codec

        self._header = header
        self._begun = True
        shared = len(self._run.layers) > 1
        plans = {id(layer.plan): layer.plan for layer in header.layers if layer.plan}
        codecs = {key: Codec(plan, threads=1 if shared else self._threads) for key, plan in plans.items()}
        self._codecs = [codecs[id(header.layers[place].plan)] for place in self._run.layers]
        self._write(header.pack())
        for sequence, pending in self._short:
            self._advance(sequence, pending, last=True)
        self._short.clear()

    def _fit(self, rows: list[NDArray[Any]]) -> Header:
        """The header with plans fitted to ``rows`` (key, value of each present layer), which follow the sinks."""
        from ..fit import fit_plan

        pairs = {place: rows[2 * i : 2 * i + 2] for i, place in enumerate(self._present)}

        def fit(place: int) -> Layer:
            layer, profile = self._header.layers[place], self._fitted[place]
            if profile is None:
                return layer
            with _telling_tokens(place, self._header.sinks):
                return replace(layer, profile=fit_plan(profile, *pairs[place]))

        places = range(len(self._header.layers))
        layers = self._pool.map(fit, places) if self._pool else map(fit, places)
        return replace(self._header, layers=tuple(layers))

    def _advance(self, sequence: int, pending: Pending, last: bool = False) -> None:
        """Write and encode whatever of ``pending`` need not wait; ``last``: all of it."""
        sinks, recent = self._header.sinks, self._header.recent
        if not self._begun:
            ready = min(FIT_TOKENS, pending.waiting - sinks - recent)
            if ready < FIT_TOKENS and not last:
                return
            if ready < LEAST_TOKENS and len(self._short) < MOST_SHORT:
                self._short.append((sequence, pending))
                return
            self._begin(self._fit(pending.peek(sinks, sinks + ready)) if ready >= LEAST_TOKENS else self._header)
        if pending.start < sinks and (last or pending.end >= sinks):
            self._write_rows(sequence, pending.start, pending.take(sinks - pending.start), self._present)
        if pending.start >= sinks:
            while (windows := (pending.waiting - recent) // self._window) > 0:
                windows = min(windows, self._run_windows - pending.collected // self._window)
                self._collect(pending, windows * self._window)
                if pending.collected == self._run_windows * self._window:
                    self._flush_run(sequence, pending)
            if last:
                self._collect(pending, max(0, pending.waiting - recent))
                self._flush_run(sequence, pending)
        if last:
            self._write_rows(sequence, pending.start, pending.take(pending.waiting), self._present)

    def _collect(self, pending: Pending, tokens: int) -> None:
        """Encode the next ``tokens`` tokens and keep the pages for the run."""
        if not tokens:
            return
        first = pending.start
        rows = pending.take(tokens)
        pairs = {place: rows[2 * i : 2 * i + 2] for i, place in enumerate(self._present)}

        def encode(slot: int) -> NDArray[np.uint8]:
            place = self._run.layers[slot]
            with _telling_tokens(place, first):
                pages: NDArray[np.uint8] = self._codecs[slot].encode(*pairs[place]).data
                return pages

        slots = range(len(self._run.layers))
        pages = list(self._pool.map(encode, slots) if self._pool else map(encode, slots))
        pending.collect(tokens, pages, [array for place in self._exact for array in pairs[place]])

    def _flush_run(self, sequence: int, pending: Pending) -> None:
        run = pending.take_run()
        if run is None:
            return
        if run.pages:
            self._write_pages(sequence, run.first, run.tokens, run.pages)
        self._write_rows(sequence, run.first, run.exact_rows, self._exact, EXACT_ONLY)

    def _write_pages(self, sequence: int, first: int, tokens: int, pages: list[list[NDArray[np.uint8]]]) -> None:
        crcs: list[int] = []
        stored: list[NDArray[np.uint8]] = []
        for slot, parts in enumerate(pages):
            used = self._run.layouts[slot].bytes_for((tokens - 1) % self._run.window + 1)
            cut = [page for part in parts for page in part]
            cut[-1] = cut[-1][:used]
            crcs += [crc32c(page) for page in cut]
            stored += cut
        table = np.array(crcs, "<u4").tobytes().ljust(self._run.table_bytes(tokens), b"\0")
        self._write_record(PAGES, sequence, first, tokens, 0, table, stored)

    def _write_rows(
        self, sequence: int, first: int, rows: list[NDArray[Any]], places: list[int], flags: int = 0
    ) -> None:
        """ROWS records of ``rows`` (key, value of each layer of ``places``), as many as the record size asks for."""
        tokens = len(rows[0]) if rows else 0
        token_bytes = sum(2 * self._header.layers[place].row_bytes for place in places)
        step = max(1, RECORD_TARGET // max(1, token_bytes))
        for start in range(0, tokens, step):
            table, blocks = b"", []
            for array in rows:
                encoding, block = encode_rows(array[start : start + step])
                table += ROWS_ENTRY.pack(encoding, bytes(3), crc32c(block), len(block))
                blocks.append(block.ljust(align(len(block)), b"\0"))
            table = table.ljust(align(len(table)), b"\0")
            self._write_record(ROWS, sequence, first + start, min(step, tokens - start), flags, table, blocks)

    def _write_record(
        self, kind: int, sequence: int, first: int, tokens: int, flags: int, table: bytes, parts: Iterable[Any]
    ) -> None:
        buffers = [table, *parts]
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        header = RecordHeader(
            kind, size, first, tokens, sequence, len(self._records), self._header.salt, crc32c(table), flags
        ).pack()
        self._records.append(header)
        for buffer in (header, *buffers, bytes(-(RECORD_BYTES + size) % structs.BLOCK)):
            self._write(buffer)

    def _write_index(self) -> None:
        if RECORD_BYTES * len(self._records) > structs.MAX_INDEX:
            raise LimitError(f"{len(self._records)} records are more than an index holds", code="limit-index")
        self._write(index_record(self._open_file().tell(), self._records, self._header.salt))

    def _write(self, buffer: Any) -> None:
        self._open_file().write(buffer)


@contextlib.contextmanager
def _telling_tokens(layer: int, first: int) -> Iterator[None]:
    """Errors about numbers that are not finite, told in tokens of the sequence."""
    try:
        yield
    except InputError as error:
        if error.code != "input-nonfinite":
            raise
        where: dict[str, Any] = {**error.where, "layer": layer, "token": first + int(str(error.where["token"]))}
        raise InputError(
            f"{where['kind']} of layer {layer}, token {where['token']}, head {where['head']}, channel "
            f"{where['channel']} is not finite; clean the tensor or choose what to put instead",
            code=error.code,
            **where,
        ) from None


def _sync_directory(directory: Path) -> None:
    """Make a rename durable, where the system lets directories be synced."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
