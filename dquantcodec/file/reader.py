"""Reading ``.dqkv``: a mapped file whose tensors slice like arrays (specification, clause 9).

Opening reads the header and the index (or the record headers); a read touches the pages it needs and no others.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import IdentityError, InputError, TruncatedError
from ..remote import RemoteBytes
from ..urls import is_url, plain, shown
from .coding import Coding, coding
from .content import LayerContent
from .header import Header, parse_header
from .located import located, unless_closed
from .records import RecordRules
from .scan import read_log
from .sequences import SequenceLog, live_records, sequences
from .structs import ROWS, Bytes

# What reads numbers (payloads and tensors) brings NumPy along, and saying what a file holds needs none.
if TYPE_CHECKING:
    from .payload import PayloadReader
    from .tensor import LayerReader
    from .verify import Finding

#: Ways to open a file (specification, clause 9.6).
MODES = ("tail", "strict", "salvage")


def open(
    path: str | PathLike[str],
    *,
    expect: Mapping[str, Any] | None = None,
    shard: tuple[int, int] | None = None,
    verify: bool = True,
    threads: int = 1,
    mode: str = "tail",
    device: str = "cpu",
) -> Reader:
    """A :class:`Reader` of the file at ``path``; use it in a ``with`` block.

    ``expect`` names what the file must be: any of ``model``, ``revision``, ``layers`` (how many), ``kv_heads``,
    ``head_dim``, ``dtype`` (one for all stored layers, or a list), ``positions_start``, ``shard``.
    ``shard`` ``(i, n)`` reads part ``i`` of ``n`` of the model's KV heads alone: layers are as those of a file that has
    no other heads, ``expect`` looks at that, and no page of another rank is touched.
    ``verify=False`` skips the checksums of pages and rows on reading.  ``threads`` bounds how many pages are decoded
    at once.  ``device="cuda"`` or ``"cuda:1"`` decodes pages on that GPU, to the same numbers, in NumPy arrays as
    before; threads that read at once overlap there.  Attention stays on the CPU.

    ``path`` may be a URL such as ``s3://bucket/key`` (extras ``s3`` and ``fsspec``): then only the ranges that are read
    are fetched, in requests for whole 64 KiB or more.

    The file may be written to at the same time (:func:`append`): the reader keeps what it held when it was opened.
    ``mode="strict"`` refuses a file that was not closed; ``mode="salvage"`` also opens damaged files, checks every
    checksum, and reads each sequence up to its first token that is lost (:attr:`Reader.lost` says what is).

    Raises :class:`DeviceError`, :class:`IdentityError` (``identity-<field>``; ``identity-shard`` for a file without
    that part), :class:`InputError` (``open-mode``) and where heads or head groups do not allow the cut
    (``shard-heads``, ``shard-groups``), and for files that are not whole and sound :class:`FormatError`,
    :class:`UnsupportedError`, :class:`ChecksumError`, :class:`TruncatedError` or :class:`LimitError` (specification,
    clause 9.4).  A torn tail is
    no error unless ``mode`` is strict (``log-torn``): see :attr:`Reader.torn`.
    """
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, not {mode!r}", code="open-mode")
    coded = coding(device, threads)
    name = plain(path)
    mapping = RemoteBytes(name) if is_url(name) else _mapped(name)
    name = shown(name)
    try:
        reader = Reader(name, mapping, verify, threads, mode, shard, coded)
        with located(name):
            _check_identity(reader.view, expect or {})
        return reader
    except BaseException:
        if isinstance(mapping, mmap.mmap):
            with suppress(BufferError):  # the traceback still holds views
                mapping.close()
        raise


def _mapped(name: str) -> mmap.mmap | bytes:
    with Path(name).open("rb") as file:
        # An empty file cannot be mapped; it fails as any other file without a header.
        size = os.fstat(file.fileno()).st_size
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""


@dataclass(frozen=True)
class Accounting:
    """Where the bytes go.  Token counts are sums over sequences.

    values
        Key and value numbers of all stored layers, tokens and sequences.
    coded_values, coded_bytes
        Numbers held by pages, and the bytes of these pages.
    exact_bytes
        Payloads of ROWS records that hold tokens.
    dead_bytes
        Bytes of records that hold no token any more; :func:`repack` drops them.
    coded_tokens, exact_tokens
        Tokens in pages, and tokens kept exact beside them (for files without coded layers: all).
    """

    bytes: int
    values: int
    coded_values: int
    coded_bytes: int
    exact_bytes: int
    tokens: int
    coded_tokens: int
    exact_tokens: int
    dead_bytes: int

    @property
    def bits_per_value(self) -> float:
        """Every byte of the file over every value in it; 0 for a file without tokens."""
        return 8 * self.bytes / self.values if self.values else 0.0

    @property
    def bits_per_value_coded(self) -> float:
        """Coded pages alone; 0 where nothing is coded."""
        return 8 * self.coded_bytes / self.coded_values if self.coded_values else 0.0


class _Opened:
    """The bytes of an open file, and what all its layers read numbers with, made with the first of them."""

    def __init__(self, path: str, data: Bytes, rules: RecordRules, reading: tuple[bool, int, Coding | None]) -> None:
        self._path = path
        self._data: Bytes | None = data
        self.rules = rules
        self._reading = reading
        self._lock = Lock()
        self._payload: PayloadReader | None = None

    @property
    def data(self) -> Bytes:
        return unless_closed(self._data, self._path)

    @property
    def pages_checked(self) -> int:
        return self._payload.pages_checked if self._payload else 0

    def payload(self) -> PayloadReader:
        with self._lock:
            if self._payload is None:
                from .payload import PayloadReader

                self._payload = PayloadReader(self._path, self._data, self.rules, *self._reading)
            return self._payload

    def close(self) -> None:
        self._data = None
        if self._payload:
            self._payload.close()


class SequenceReader:
    """One sequence of a file."""

    # A header may promise many sequences that have no records.
    __slots__ = ("_heads", "_layers", "_opened", "log", "number")

    def __init__(self, opened: _Opened, log: SequenceLog, number: int, heads: Sequence[slice]) -> None:
        self._opened = opened
        self._heads = heads
        self._layers: tuple[LayerReader, ...] | None = None
        self.log = log
        self.number = number

    @property
    def tokens(self) -> int:
        return self.log.tokens

    @property
    def contents(self) -> tuple[LayerContent, ...]:
        """What :attr:`layers` say without reading anything."""
        rules, heads = self._opened.rules, self._heads
        return tuple(LayerContent(rules, self.log, index, part) for index, part in enumerate(heads))

    @property
    def layers(self) -> tuple[LayerReader, ...]:
        if self._layers is None:
            from .tensor import LayerReader

            payload = self._opened.payload()
            self._layers = tuple(LayerReader(payload, self.log, i, heads) for i, heads in enumerate(self._heads))
        return self._layers


class Reader:
    """An open file; made by :func:`open`, or of bytes in memory.

    header, view
        The file's header, and what it would be if the file had no other heads than those that are read.
    torn
        The file was not closed, or lost its end: it reads as the tokens that are certainly whole.
    indexed
        The index was used; otherwise the records were walked.
    lost
        What mode ``salvage`` found to be lost; empty in other modes.
    """

    def __init__(
        self,
        path: str,
        mapping: mmap.mmap | bytes | RemoteBytes,
        verify: bool = True,
        threads: int = 1,
        mode: str = "tail",
        shard: tuple[int, int] | None = None,
        coded: Coding | None = None,
        header: Header | None = None,
    ) -> None:
        self.path = path
        self._mapping = mapping
        data: Bytes = mapping if isinstance(mapping, RemoteBytes) else memoryview(mapping)
        with located(path):
            # ``header``: of a file whose header the caller has parsed.
            self.header: Header = parse_header(data) if header is None else header
            self.view = self.header.part(*shard) if shard else self.header
            heads = self.header.heads_of(*self.view.info.shard)
            self.rules = RecordRules(self.header)
            self.lost: tuple[Finding, ...] = ()
            if mode == "salvage":
                from .salvage import salvage  # like checking a file, no part of opening a sound one

                self.log, logs, self.lost = salvage(data, self.rules)
            else:
                self.log = read_log(data, self.rules)
                logs = sequences(self.log.records, self.log.torn, self.rules)
            if mode == "strict" and self.log.torn:
                raise TruncatedError(
                    f"the file was not closed or lost its end; {len(self.log.records)} records are whole",
                    code="log-torn",
                )
        self.torn = self.log.torn
        self.indexed = self.log.indexed
        self._opened = _Opened(path, data, self.rules, (verify, threads, coded))
        self.sequences = tuple(SequenceReader(self._opened, log, number, heads) for number, log in enumerate(logs))

    @property
    def format_version(self) -> tuple[int, int]:
        return self.header.version

    @property
    def model(self) -> str:
        return self.header.info.model

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.header.info.metadata

    @property
    def contents(self) -> tuple[LayerContent, ...]:
        """What :attr:`layers` say without reading anything."""
        return self.sequences[0].contents

    @property
    def layers(self) -> tuple[LayerReader, ...]:
        """Layers of sequence 0."""
        return self.sequences[0].layers

    @property
    def tokens(self) -> int:
        """Tokens of sequence 0."""
        return self.sequences[0].tokens

    @property
    def pages_checked(self) -> int:
        """Pages whose checksum was verified so far; each is verified at most once."""
        return self._opened.pages_checked

    def accounting(self) -> Accounting:
        """Sizes, from the record headers alone."""
        layers, run = self.header.layers, self.rules.run
        stored = sum(2 * layers[place].values for place in self.rules.present)
        coded = sum(2 * layers[place].values for place in run.layers)
        tokens = sum(sequence.tokens for sequence in self.sequences)
        logs = [sequence.log for sequence in self.sequences]
        pages = [stretch.tokens for log in logs for stretch in log.coded if stretch.paged]
        live = live_records(logs)
        content = [record for record in self.log.records if record.header.number not in live]
        index = self.log.records[-1:] if not self.torn else ()
        return Accounting(
            bytes=self.data.nbytes,
            values=tokens * stored,
            coded_values=sum(pages) * coded,
            coded_bytes=sum(run.payload_bytes(count) - run.table_bytes(count) for count in pages),
            exact_bytes=sum(record.header.payload_bytes for record in live.values() if record.header.type == ROWS),
            tokens=tokens,
            coded_tokens=sum(pages),
            exact_tokens=tokens - sum(pages),
            dead_bytes=sum(record.end - record.offset for record in content if record not in index),
        )

    def verify(self, progress: Callable[[int], object] | None = None) -> Iterator[Finding]:
        """Check everything that can be checked and yield a :class:`Finding` for each thing that is wrong.

        ``progress`` is called with the bytes just checked.
        """
        from .verify import verify

        return verify(self.data, self.rules, self.log, progress)

    @property
    def data(self) -> Bytes:
        """The mapped bytes.  Raises :class:`InputError` (``reader-closed``) after :meth:`close`."""
        return self._opened.data

    def close(self) -> None:
        """Unmap the file.  Arrays read from it stay valid: they are copies."""
        self._opened.close()
        if isinstance(self._mapping, mmap.mmap):
            # An exception being handled may hold views of the mapping; it goes with the last of them.
            with suppress(BufferError):
                self._mapping.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_identity(header: Header, expect: Mapping[str, Any]) -> None:
    stored = [layer for layer in header.layers if layer.storage != "absent"]
    found: dict[str, Any] = {
        "model": header.info.model,
        "revision": header.info.revision,
        "positions_start": header.info.positions_start,
        "shard": header.info.shard,
        "layers": len(header.layers),
        "kv_heads": [layer.kv_heads for layer in stored],
        "head_dim": [layer.head_dim for layer in stored],
        "dtype": [layer.dtype for layer in stored],
    }
    for field, wanted in expect.items():
        if field not in found:
            raise InputError(
                f"expect cannot name {field!r}; it knows {', '.join(found)}", code="expect-field", field=field
            )
        actual = found[field]
        if field == "shard":
            wanted = tuple(wanted)
        elif isinstance(actual, list):
            if isinstance(wanted, (list, tuple)):
                wanted = list(wanted)
            elif len(set(actual)) <= 1:
                actual = actual[0] if actual else wanted
        if actual != wanted:
            raise IdentityError(
                f"the file has {field} {actual!r}, expected {wanted!r}",
                code=f"identity-{field.replace('_', '-')}",
                field=field,
                found=actual,
                expected=wanted,
            )
