"""Reading payloads: pages and exact rows out of records, checksums verified once (specification, clause 9.2)."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ChecksumError, DQuantError
from ..plan import Plan
from .coding import Coding, coding
from .layer import KINDS
from .located import unless_closed
from .records import Record, RecordRules, RowsEntry, payload_bytes
from .rows import decode_rows
from .runs import RunLayout
from .sequences import Stretch
from .structs import PAGES, Bytes, crc32c

#: Decoded bytes of exact rows kept for the next read of the same block.
ROWS_CACHE_BYTES = 32 << 20


class PayloadReader:
    """The mapped file, what was verified in it, and the codecs its plans ask for.  Threads may share one."""

    def __init__(
        self,
        path: str,
        data: Bytes | None,
        rules: RecordRules,
        verify: bool,
        threads: int = 1,
        coded: Coding | None = None,
    ) -> None:
        self.path = path
        self._data = data
        self.rules = rules
        self._verify = verify
        self._threads = threads
        self.coding = coded or coding("cpu", threads)
        self._lock = Lock()
        self._page_tables: dict[int, NDArray[np.uint32]] = {}
        self._rows_tables: dict[int, list[RowsEntry]] = {}
        #: Per PAGES record, which pages were verified: bool [head groups, windows].
        self._verified: dict[int, NDArray[np.bool_]] = {}
        self._rows: OrderedDict[tuple[int, int], NDArray[Any]] = OrderedDict()
        self._rows_bytes = 0
        self._codecs: dict[int, Any] = {}
        self._decoders: dict[int, Any] = {}
        self.pages_checked = 0

    @property
    def data(self) -> Bytes:
        return unless_closed(self._data, self.path)

    def close(self) -> None:
        self._data = None
        self._rows.clear()
        self._rows_bytes = 0

    def codec(self, plan: Plan) -> Any:
        """The :class:`Codec` of ``plan`` on the CPU, loaded (with Numba) when something is first decoded."""
        with self._lock:
            if id(plan) not in self._codecs:
                from ..codec import Codec

                self._codecs[id(plan)] = Codec(plan, threads=self._threads)
            return self._codecs[id(plan)]

    def decoder(self, plan: Plan) -> Any:
        """What decodes pages of ``plan`` where the file was asked to be read: the codec, or one on another device."""
        with self._lock:
            if id(plan) not in self._decoders:
                self._decoders[id(plan)] = self.coding.codec(plan, self._threads)
            return self._decoders[id(plan)]

    @property
    def run(self) -> RunLayout:
        return self.rules.run

    def pages(self, record: Record, slot: int, first: int, last: int) -> NDArray[np.uint8]:
        """Windows ``first`` to before ``last`` of ``slot`` in ``record``, copied: uint8 ``[windows, page_bytes]``."""
        out = np.empty((last - first, self.run.slots[slot].layout.page_bytes), np.uint8)
        self.copy_pages(record, slot, first, out)
        return out

    def copy_pages(self, record: Record, slot: int, first: int, out: NDArray[np.uint8]) -> None:
        """Windows of ``slot`` in ``record``, from ``first`` on, into ``out`` uint8 ``[windows, page_bytes]``.

        A cut last page is filled up with zeros.  Raises :class:`ChecksumError` (``record-table``, ``page-crc``).
        """
        last = first + len(out)
        data, run = self.data, self.run
        tokens = record.header.tokens
        start = run.page_place(slot, first, tokens)
        end = run.page_place(slot, last - 1, tokens)
        stored = np.frombuffer(data[record.payload + start.offset : record.payload + end.offset + end.size], np.uint8)
        if self._verify:
            self._verify_pages(record, slot, first, stored)
        flat = out.reshape(-1)
        flat[: stored.size] = stored
        flat[stored.size :] = 0

    def _verify_pages(self, record: Record, slot: int, first: int, stored: NDArray[np.uint8]) -> None:
        number, run = record.header.number, self.run
        with self._lock:
            if number not in self._page_tables:
                self._page_tables[number] = np.array(self.rules.page_table(self.data, record), np.uint32)
                self._verified[number] = np.zeros(self._page_tables[number].shape, np.bool_)
        crcs, verified = self._page_tables[number][slot], self._verified[number][slot]
        size = run.slots[slot].layout.page_bytes
        for offset in range(0, stored.size, size):
            window = first + offset // size
            if verified[window]:
                continue
            if crc32c(stored[offset : offset + size]) != crcs[window]:
                token = record.header.first + window * run.window
                raise ChecksumError(
                    f"the page of {run.named(slot)} that begins at token {token} is damaged "
                    f"(record {number}); take another copy",
                    code="page-crc",
                    layer=run.slots[slot].layer,
                    token=token,
                    record=number,
                )
            with self._lock:
                self.pages_checked += not verified[window]
                verified[window] = True

    def rows(self, record: Record, layer: int, kind: str) -> NDArray[Any]:
        """All exact rows ``[t, H, D]`` of ``layer`` and ``kind`` in ``record``; not to be written to.

        Raises :class:`ChecksumError` (``record-table``, ``rows-crc``, ``rows-frame``) and :class:`FormatError`.
        """
        place = 2 * self.rules.rows_layers(record.header.flags).index(layer) + KINDS.index(kind)
        number = record.header.number
        with self._lock:
            if (number, place) in self._rows:
                self._rows.move_to_end((number, place))
                return self._rows[number, place]
        rows = decode_entry(self.data, self.rules, record, place, self._entry(record, place), self._verify)
        rows.setflags(write=False)
        with self._lock:
            self._rows_bytes += rows.nbytes if (number, place) not in self._rows else 0
            self._rows[number, place] = rows
            while self._rows_bytes > ROWS_CACHE_BYTES:
                self._rows_bytes -= self._rows.popitem(last=False)[1].nbytes
        return rows

    def stretch_rows(self, stretch: Stretch, layer: int, kind: str) -> NDArray[Any]:
        """The rows of ``stretch``, whose record is of rows; as :meth:`rows`."""
        before = stretch.record.header.first
        return self.rows(stretch.record, layer, kind)[stretch.first - before : stretch.end - before]

    def layer_bytes(self, record: Record, layer: int, slots: range) -> int:
        """Bytes that ``layer`` takes in ``record``: its pages (of ``slots``), or its blocks of exact rows as stored."""
        if record.header.type == PAGES:
            return self.run.slots_place(slots.start, slots.stop, record.header.tokens).size
        place = 2 * self.rules.rows_layers(record.header.flags).index(layer)
        return sum(self._entry(record, place + kind).place.size for kind in range(len(KINDS)))

    def _entry(self, record: Record, place: int) -> RowsEntry:
        number = record.header.number
        with self._lock:
            if number not in self._rows_tables:
                self._rows_tables[number] = self.rules.rows_table(self.data, record)
            return self._rows_tables[number][place]


def decode_entry(
    data: Bytes, rules: RecordRules, record: Record, place: int, entry: RowsEntry, verify: bool = True
) -> NDArray[Any]:
    """Rows of block ``place`` of a ROWS record; errors name record, layer and kind."""
    layer_number = rules.rows_layers(record.header.flags)[place // 2]
    layer, kind = rules.header.layers[layer_number], KINDS[place % 2]
    where = {"record": record.header.number, "layer": layer_number, "kind": kind}
    block = payload_bytes(data, record, entry.place)
    if verify and crc32c(block) != entry.crc:
        raise ChecksumError(
            f"exact {kind}s of layer {layer_number} from token {record.header.first} on are damaged "
            f"(record {record.header.number}); take another copy",
            code="rows-crc",
            **where,
        )
    try:
        return decode_rows(
            entry.encoding, block, (record.header.tokens, layer.kv_heads, layer.head_dim), layer.array_dtype
        )
    except DQuantError as error:
        error.where.update(where)
        raise
