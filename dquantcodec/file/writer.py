"""Writing ``.dqkv``: tokens in, records out, constant memory (specification, clauses 4 and 9.5).

A token is coded once it is more than ``recent`` tokens behind the newest; until then its rows wait in their own dtype.
Full windows are encoded at once, by :class:`PageEncoder`, and collected into runs; every full run is a record.  A flush
writes the rows that the file does not hold yet; pages replace them when their time has come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from numpy.typing import NDArray

from ..errors import InputError, LimitError
from ..profile import Profile
from . import structs
from .coding import Coding, coding
from .compose import RECORD_TARGET, write_pages, write_rows
from .encoder import PageEncoder
from .header import Header
from .incoming import incoming_rows
from .overlap import Behind
from .pending import Pending
from .runs import RunLayout
from .structs import EXACT_ONLY, REWIND
from .target import Target

#: Records that may wait for the thread that writes them.
MOST_BEHIND = 2
#: Tokens that plans are fitted to; a finished sequence may have fewer, but not fewer than the least.
FIT_TOKENS = 512
LEAST_TOKENS = 32
#: Sequences with too few tokens that wait for one with enough.
MOST_SHORT = 64


class Resumed(NamedTuple):
    """A sequence that the file holds already: what is coded or stays exact ends at ``start``, all at ``held``, and
    ``portions`` are the rows between, key and value of each stored layer."""

    start: int
    held: int
    portions: Iterator[list[NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class Settings:
    """How a writer works.

    fitted
        Profiles of layers whose plans are to be fitted to the first tokens.
    progress
        Called with the number of tokens just taken in.
    resume
        What the file holds of a sequence, for a file that is appended to.
    cut_pages
        Closing codes all but the ``recent`` newest tokens, in pages that may not be full.  Otherwise only whole
        windows are coded, so that the next writer can fill the last one.
    ended
        Called when the writer is closed or aborted.
    coding
        Where pages are encoded; by default on the CPU.
    """

    threads: int = 1
    fitted: Sequence[Profile | None] = ()
    progress: Callable[[int], object] | None = None
    record_target: int = RECORD_TARGET
    resume: Callable[[int], Resumed] | None = None
    cut_pages: bool = True
    ended: Callable[[], object] | None = None
    coding: Coding | None = None


class Writer:
    """Takes tokens; made by :func:`create` for a new file and by :func:`append` for one that is there.

    Leaving the ``with`` block closes the file.  A new file gets its name when it is closed or first flushed.  Leaving
    by an exception removes a file that has no name yet, and an older file of that name stays as it was; a file that was
    flushed or opened for appending keeps what is written, which is at least what was flushed.
    """

    def __init__(self, target: Target, header: Header, settings: Settings) -> None:
        self.path = target.path
        self._target = target
        self._log = target.log
        self._header = header
        self._settings = settings
        self._open = True
        self._begun = False
        #: Pages are written, and the rows of the exact layers for the same tokens are not.
        self._halfway = False
        #: Finished sequences with too few tokens to fit a plan to; they wait for one that has enough.
        self._short: list[tuple[int, Pending]] = []
        self._run = RunLayout.of(header)
        self._exact = [place for place, layer in enumerate(header.layers) if layer.storage == "exact"]
        self._present = [place for place, layer in enumerate(header.layers) if layer.storage != "absent"]
        self._coding = settings.coding or coding("cpu", settings.threads)
        self._encoder = PageEncoder(self._coding, self._run, self._present)
        self._behind = Behind(MOST_BEHIND) if self._coding.overlapped else None
        #: Tokens encoded at a time; without coded layers any number serves.
        self._window = header.window or 128
        exact_bytes = self._window * sum(2 * header.layers[place].row_bytes for place in self._exact)
        per_window = self._run.window_bytes + exact_bytes
        self._run_windows = max(1, min(structs.MAX_RUN, settings.record_target // max(1, per_window)))
        self._row_bytes = sum(2 * header.layers[place].row_bytes for place in self._present)
        #: Tokens taken in at a time.
        self._portion = max(self._window, self._coding.portion_bytes // max(1, self._row_bytes))
        self._pending: dict[int, Pending] = {}
        self._finished: set[int] = set()
        if settings.resume:
            self._use(header)
        elif not any(settings.fitted):
            with self._aborting():
                self._begin(header)

    def tokens(self, sequence: int = 0) -> int:
        """Tokens of ``sequence``, those in memory among them.

        Raises :class:`InputError` (``writer-closed``, ``sequence-range``, ``sequence-finished``).
        """
        return self._sequence(sequence).end

    def append(
        self, keys: Sequence[NDArray[Any] | None], values: Sequence[NDArray[Any] | None], sequence: int = 0
    ) -> None:
        """Add ``T`` tokens to ``sequence``: one array ``[T, kv_heads, head_dim]`` per layer, in the layer's dtype.

        Absent layers take None.  Arrays may be reused afterwards.  Raises :class:`InputError`
        (``writer-closed``, ``sequence-range``, ``sequence-finished``, ``layer-count``, ``layer-missing``,
        ``layer-absent``, ``input-shape``, ``dtype-mismatch``) and :class:`LimitError` (``limit-tokens``) with nothing
        taken in.  Anything raised later (NaN or infinity in a coded layer, OSError) ends the writer as an exception
        in its ``with`` block does.
        """
        pending = self._sequence(sequence)
        rows = incoming_rows(self._header.layers, keys, values)
        tokens = len(rows[0]) if rows else 0
        if pending.end + tokens >= structs.MAX_TOKENS:
            raise LimitError(f"sequence {sequence} would pass 2**40 tokens", code="limit-tokens", sequence=sequence)
        with self._aborting():
            for start in range(0, tokens, self._portion):
                portion = [array[start : start + self._portion] for array in rows]
                pending.put(portion, self._encoder.pool if self._coding.overlapped else None)
                self._advance(sequence, pending)
                if self._settings.progress:
                    self._settings.progress(len(portion[0]))

    def flush(self, *, newest: bool = True) -> None:
        """Return when every token taken in is in the file and on the medium.

        From then on they survive a crash, bit for bit: tokens that are not coded yet as exact rows, which pages replace
        later.  These rows are then dead bytes, several times as many as the pages have, until the file is repacked;
        ``newest=False`` leaves tokens that are not coded yet in memory and writes whole windows only, once.  The first
        flush of a new file gives it its name (and fits plans to the tokens there are), and the writer takes the lock of
        one writer.  A flush that has something to write costs at least 4 KiB and one sync.

        Raises :class:`InputError` (``writer-closed``, ``lock-unsupported``; ``url-flush`` for objects in storage, which
        take tokens until the writer is closed) and OSError.
        """
        self._check_open()
        self._target.check_flush()
        with self._aborting():
            if not self._begun:
                longest = max(self._pending.values(), key=lambda one: one.waiting, default=Pending(0))
                self._begin_with(longest, min(FIT_TOKENS, longest.waiting - self._header.sinks))
            for sequence, pending in self._pending.items():
                if pending.collected and pending.start > pending.held:
                    self._flush_run(sequence, pending)
                first = max(pending.start, pending.held)
                if newest:
                    self._hold(sequence, pending, first, pending.peek(first - pending.start, pending.waiting))
            self._settle()
            self._target.publish()

    def rewind(self, tokens: int, sequence: int = 0) -> None:
        """Shorten ``sequence`` to its first ``tokens`` tokens; the next :meth:`append` continues there.

        In a file that has its name this is as durable as a flush when it returns.  The tokens taken back stay in the
        file as dead bytes until it is repacked.  Raises :class:`InputError` (``rewind-tokens`` for more tokens than
        there are, or what :meth:`tokens` raises) and OSError.
        """
        pending = self._sequence(sequence)
        if not 0 <= tokens <= pending.end:
            raise InputError(
                f"sequence {sequence} has {pending.end} tokens, it cannot be rewound to {tokens}", code="rewind-tokens"
            )
        with self._aborting():
            if pending.start - pending.collected < tokens < pending.start:
                self._flush_run(sequence, pending)
            if tokens < pending.held:
                self._write(partial(self._log.put, REWIND, sequence, tokens, 0))
            self._settle()
            pending.cut(tokens)

    def finish(self, sequence: int) -> None:
        """Write what ``sequence`` still has in memory; it takes no more tokens.  :meth:`close` does this for all."""
        self._check_open()
        if sequence in self._finished or sequence not in self._pending:
            return
        with self._aborting():
            pending = self._pending.pop(sequence)
            self._advance(sequence, pending, last=True)
            self._finished.add(sequence)

    def close(self) -> None:
        """Finish all sequences, write the index, and give the file its name.  A closed writer stays closed."""
        if not self._open:
            return
        for sequence in sorted(self._pending):
            self.finish(sequence)
        with self._aborting():
            if not self._begun:
                self._begin(self._header)
            self._settle()
            self._target.complete()
        self._end()

    def abort(self) -> None:
        """Drop what is in memory only; see the class for what becomes of the file.  No effect on a closed writer."""
        if self._open:
            if self._behind:
                self._behind.stop()
            self._target.leave(whole=not self._halfway)
            self._end()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _check_open(self) -> None:
        if not self._open:
            raise InputError("the writer is closed; create another", code="writer-closed", path=str(self.path))

    def _end(self) -> None:
        self._open = False
        self._pending.clear()
        self._short.clear()
        self._encoder.close()
        if self._behind:
            self._behind.stop()
        if self._settings.ended:
            self._settings.ended()

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(self.path)  # a failing write does not say where
            self.abort()
            raise

    def _write(self, call: Callable[[], object]) -> None:
        """Make a call that writes, behind all others; :meth:`_settle` waits for them."""
        if self._behind:
            self._behind.do(call)
        else:
            call()

    def _settle(self) -> None:
        if self._behind:
            self._behind.wait()

    def _sequence(self, sequence: int) -> Pending:
        """What is held of a sequence that takes tokens; of a resumed one its rows are read first."""
        self._check_open()
        if not 0 <= sequence < self._header.sequences:
            raise InputError(
                f"sequence {sequence} of a file created with {self._header.sequences}; say sequences= when creating",
                code="sequence-range",
            )
        if sequence in self._finished:
            raise InputError(f"sequence {sequence} is finished", code="sequence-finished")
        if sequence not in self._pending:
            with self._aborting():
                self._pending[sequence] = self._resumed(sequence)
        return self._pending[sequence]

    def _resumed(self, sequence: int) -> Pending:
        queues = 2 * len(self._present)
        if self._settings.resume is None:
            return Pending(queues)
        start, held, portions = self._settings.resume(sequence)
        pending = Pending(queues, start, held)
        for rows in portions:
            pending.put(rows)
            self._advance(sequence, pending)
        return pending

    def _begin(self, header: Header) -> None:
        """Write the header block; pages are encoded by its plans from here on."""
        self._use(header)
        self._log.put_block(header.pack())
        for sequence, pending in self._short:
            self._advance(sequence, pending, last=True)
        self._short.clear()

    def _begin_with(self, pending: Pending, tokens: int) -> None:
        """:meth:`_begin` with plans fitted to ``tokens`` tokens behind the sinks, if these are enough."""
        header = self._header
        if tokens >= LEAST_TOKENS:
            rows = pending.peek(header.sinks, header.sinks + tokens)
            header = self._encoder.fit(header, self._settings.fitted, rows)
        self._begin(header)

    def _use(self, header: Header) -> None:
        self._header = header
        self._begun = True
        self._run = RunLayout.of(header)
        self._encoder.use(self._run)

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
            self._begin_with(pending, ready)
        if pending.start < sinks and (last or pending.end >= sinks):
            self._hold(sequence, pending, pending.start, pending.take(sinks - pending.start))
        if pending.start >= sinks:
            while (windows := (pending.waiting - recent) // self._window) > 0:
                if not self._coding.overlapped:
                    windows = min(windows, self._run_windows - pending.collected // self._window)
                self._collect(sequence, pending, windows * self._window)
            if last:
                if self._settings.cut_pages:
                    self._collect(sequence, pending, max(0, pending.waiting - recent))
                self._flush_run(sequence, pending)
        if last:
            self._hold(sequence, pending, pending.start, pending.take(pending.waiting))

    def _collect(self, sequence: int, pending: Pending, tokens: int) -> None:
        """Encode the next ``tokens`` tokens and keep the pages for the run, which is written whenever it is full."""
        if not tokens:
            return
        first = pending.start
        rows = pending.peek(0, tokens)
        try:
            pages = self._encoder.encode(rows, first)
        except InputError as error:
            bad = int(str(error.where.get("token", pending.held)))
            if error.code != "input-nonfinite" or bad >= pending.held:
                raise
            # The file holds this token exactly, from when it was too new to be coded.  So it stays, with its window.
            before = (bad - first) // self._window * self._window
            self._collect(sequence, pending, before)
            self._flush_run(sequence, pending)
            pending.drop(min(first + before + self._window, pending.held) - pending.start)
            return
        places = [place for place in self._present for _ in range(2)]
        exact = [array for place, array in zip(places, rows) if place in self._exact]
        full, start = self._run_windows * self._window, 0
        while start < tokens:
            stop = min(tokens, start + full - pending.collected)
            window = slice(start // self._window, -(-stop // self._window))
            pending.drop(stop - start)
            pending.collect(stop - start, [page[window] for page in pages], [array[start:stop] for array in exact])
            if pending.collected == full:
                self._flush_run(sequence, pending)
            start = stop

    def _flush_run(self, sequence: int, pending: Pending) -> None:
        run = pending.take_run()
        if run is None:
            return
        exact = self._unheld(pending, run.first, run.exact_rows)

        def write() -> None:
            self._halfway = True
            if run.pages:
                write_pages(self._log, self._run, sequence, run.first, run.tokens, run.pages)
            self._write_rows(self._exact, sequence, *exact, EXACT_ONLY)
            self._halfway = False

        self._write(write)
        pending.held = max(pending.held, run.first + run.tokens)

    def _hold(self, sequence: int, pending: Pending, first: int, rows: list[NDArray[Any]]) -> None:
        """Write those of ``rows`` of all layers, from token ``first`` on, that the file does not hold."""
        self._write(partial(self._write_rows, self._present, sequence, *self._unheld(pending, first, rows)))
        if rows:
            pending.held = max(pending.held, first + len(rows[0]))

    @staticmethod
    def _unheld(pending: Pending, first: int, rows: list[NDArray[Any]]) -> tuple[int, list[NDArray[Any]]]:
        """Those of ``rows``, from token ``first`` on, that the file does not hold, and their first token."""
        new = max(first, pending.held) - first
        return first + new, [array[new:] for array in rows]

    def _write_rows(
        self, places: Sequence[int], sequence: int, first: int, rows: list[NDArray[Any]], flags: int = 0
    ) -> None:
        write_rows(self._log, [self._header.layers[place] for place in places], sequence, first, rows, flags)
