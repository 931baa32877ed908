"""Layers and tensors of an open file: what slices like an array and reads only what it must."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import index as as_index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import ChecksumError, FormatError, InputError
from .content import LayerContent
from .layer import KINDS
from .located import located
from .payload import PayloadReader
from .records import Record
from .sequences import SequenceLog, Stretch
from .structs import PAGES

if TYPE_CHECKING:
    from ..codec import Pages


class PageRun(NamedTuple):
    """Coded tokens that follow one another, from token ``first`` of the sequence on; only the last page may be cut."""

    first: int
    pages: Pages


class Piece(NamedTuple):
    """The part of a record that a token range needs, in tokens from the record's first."""

    record: Record
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class LayerReader(LayerContent):
    """One layer of one sequence and the numbers in it."""

    def __init__(self, payload: PayloadReader, log: SequenceLog, index: int, heads: slice | None = None) -> None:
        super().__init__(payload.rules, log, index, heads)
        self._payload = payload
        self._log = log
        #: The head groups, in stored order.
        self.slots = payload.run.slots_of(index, self.heads)
        self._ends = [stretch.end for stretch in self.stretches]

    @property
    def groups(self) -> tuple[LayerReader, ...]:
        """Every head group of a coded layer by itself; none of other layers."""
        if len(self.plans) == 1:
            return (self,)
        first = self.heads.start
        return tuple(
            LayerReader(self._payload, self._log, self.index, slice(first + heads.start, first + heads.stop))
            for heads in self.spec.groups
        )

    @property
    def key(self) -> TensorReader:
        return TensorReader(self._payload, self, "key")

    @property
    def value(self) -> TensorReader:
        return TensorReader(self._payload, self, "value")

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that are this layer's: its pages and its exact rows as stored (with those of other heads),
        whole for records that hold some of its tokens."""
        records = {stretch.record.header.number: stretch.record for stretch in self.stretches}
        return sum(self._payload.layer_bytes(record, self.index, self.slots) for record in records.values())

    def pages(self) -> Pages:
        """All coded tokens as one copied run of pages; page 0 begins at token ``sinks``.

        Raises :class:`InputError` for layers that are not coded (``layer-not-coded``) or are several head groups, which
        have pages each (``layer-groups``), and (``layer-page-runs``) where exact tokens or a page that is not full
        stand between pages; :meth:`page_runs` serves there.
        """
        runs = self.page_runs()
        if len(runs) > 1:
            raise InputError(
                f"layer {self.index} has {len(runs)} runs of pages, because the file was appended to; take page_runs",
                code="layer-page-runs",
                layer=self.index,
            )
        return runs[0].pages

    def page_runs(self) -> list[PageRun]:
        """All coded tokens as copied runs of pages, at least one (which may be empty).

        A run ends where an exact token follows, or a page that is not full because a writer closed the file or a rewind
        cut it.  Raises :class:`InputError` (``layer-not-coded``, ``layer-groups``) as :meth:`pages`.
        """
        from ..codec import Pages
        from ..page_layout import PageLayout

        if not self.plans:
            raise InputError(f"layer {self.index} is {self.spec.storage}, it has no pages", code="layer-not-coded")
        if self.plan is None:
            raise InputError(
                f"layer {self.index} is {len(self.plans)} head groups with pages of their own; take those of groups[0] "
                "and so on",
                code="layer-groups",
            )
        page_bytes = PageLayout.of(self.plan).page_bytes
        runs = []
        for stretches in page_stretches(self.stretches, self.plan.window):
            tokens = sum(stretch.tokens for stretch in stretches)
            data = np.empty((-(-tokens // self.plan.window), page_bytes), np.uint8)
            done = 0
            with located(self._payload.path):
                for stretch in stretches:
                    windows = -(-stretch.tokens // self.plan.window)
                    self._payload.copy_pages(stretch.record, self.slots.start, 0, data[done : done + windows])
                    done += windows
            runs.append(PageRun(stretches[0].first, Pages(data, tokens)))
        return runs or [PageRun(self.sinks, Pages(np.empty((0, page_bytes), np.uint8), 0))]

    def stored_pages(self, record: Record, first: int, last: int) -> NDArray[np.uint8]:
        """Windows ``first`` to before ``last`` of a PAGES ``record``, copied: uint8 ``[windows, page_bytes]``.

        Only for a layer that is one head group.
        """
        with located(self._payload.path):
            return self._payload.pages(record, self.slots.start, first, last)

    def exact_rows(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values ``[sinks + recent, H, D]`` of all tokens outside pages, in the layer's dtype."""
        if self.spec.storage == "absent":
            raise InputError(f"layer {self.index} is absent from this file", code="layer-absent", layer=self.index)
        exact = [stretch for stretch in self.stretches if not stretch.paged]
        empty = np.zeros((0, self.spec.kv_heads, self.spec.head_dim), self.spec.array_dtype)
        with located(self._payload.path):
            keys, values = (
                np.concatenate(
                    [empty, *(self._payload.stretch_rows(part, self.index, kind)[:, self.heads] for part in exact)]
                )
                for kind in KINDS
            )
        return keys, values

    def rows(self, record: Record, kind: str) -> NDArray[Any]:
        """Exact rows ``[t, H, D]`` of a ROWS record; not to be written to."""
        return self._payload.rows(record, self.index, kind)[:, self.heads]

    def attend(self, query: Any, scale: float | None = None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Attention of ``query`` ``[Q, D]`` or ``[L, Q, D]`` over all tokens, straight from pages and exact rows.

        Returns what :meth:`Codec.attend` returns.  Raises :class:`InputError` (``layer-not-coded``) for layers
        that are not coded: read those and attend as usual.
        """
        if not self.plans:
            raise InputError(
                f"layer {self.index} is {self.spec.storage}; attention from pages needs a coded layer",
                code="layer-not-coded",
            )
        if self.plan is None:
            from ..attend import checked_queries

            queries = checked_queries(query, self.spec.kv_heads, self.spec.head_dim)
            shared = queries.shape[-2] // self.spec.kv_heads  # queries of one KV head stand together
            parts = [
                group.attend(queries[..., shared * heads.start : shared * heads.stop, :], scale)
                for group, heads in zip(self.groups, self.spec.groups)
            ]
            outputs, all_sums = zip(*parts)
            return np.concatenate(outputs, axis=-2), np.concatenate(all_sums, axis=-1)
        first, *others = self.page_runs()
        codec = self._payload.codec(self.plan)
        out, sums = codec.attend(query, first.pages, exact=self.exact_rows(), scale=scale)
        for run in others:
            more, more_sums = codec.attend(query, run.pages, scale=scale)
            both = np.logaddexp(sums, more_sums)
            out = out * np.exp(sums - both)[..., None] + more * np.exp(more_sums - both)[..., None]
            sums = both
        return out, sums

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The records that hold tokens ``start`` to ``stop``, in order, and which of their tokens are meant."""
        for stretch in self.stretches[bisect_right(self._ends, start) :]:
            if stretch.first >= stop:
                return
            before = stretch.record.header.first
            yield Piece(stretch.record, max(start, stretch.first) - before, min(stop, stretch.end) - before)


def _windows(pieces: Iterable[Piece], window: int) -> int:
    return sum(-(-piece.stop // window) - piece.start // window for piece in pieces)


def page_stretches(stretches: Iterable[Stretch], window: int) -> list[list[Stretch]]:
    """The pages among ``stretches``, in runs whose pages are full but for the last."""
    runs: list[list[Stretch]] = []
    for stretch in stretches:
        if not stretch.paged:
            continue
        last = runs[-1][-1] if runs else None
        if last and last.end == stretch.first and last.tokens % window == 0:
            runs[-1].append(stretch)
        else:
            runs.append([stretch])
    return runs


class TensorReader:
    """Keys or values ``[T, H, D]`` of one layer; slices decode, everything else is free.

    ``t[a:b]`` and ``t[i]`` come in the layer's dtype, ``t.read(a, b, dtype)`` in any of the three.
    """

    def __init__(self, payload: PayloadReader, layer: LayerReader, kind: str) -> None:
        if layer.spec.storage == "absent":
            raise InputError(f"layer {layer.index} is absent from this file", code="layer-absent", layer=layer.index)
        self._payload = payload
        self._layer = layer
        self.kind = kind
        self.shape = (layer.tokens, layer.spec.kv_heads, layer.spec.head_dim)
        self.dtype = layer.spec.array_dtype

    def read(self, start: int = 0, stop: int | None = None, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Tokens ``start`` to ``stop`` (as slices count) as a new array ``[stop - start, H, D]`` of ``dtype`` (float16,
        bfloat16 or float32).

        Touches only the pages of these tokens.  Raises :class:`ChecksumError` (``page-crc``, ``rows-crc``,
        ``record-table``, ``container-*``) for damaged bytes.
        """
        start, stop, _ = slice(start, stop).indices(self.shape[0])
        from ..arrays import check_dtype  # brings BF16, which looking into a file does without

        out = np.empty((max(0, stop - start), *self.shape[1:]), check_dtype(dtype))
        done = 0
        with located(self._payload.path):
            for pieces in self._gathered(self._layer.pieces(start, stop)):
                part = out[done : done + sum(piece.tokens for piece in pieces)]
                if pieces[0].record.header.type == PAGES:
                    for slot, heads in zip(self._layer.slots, self._layer.spec.groups):
                        part[:, heads] = self._decode(pieces, slot, out.dtype)
                else:
                    piece = pieces[0]
                    part[:] = self._layer.rows(piece.record, self.kind)[piece.start : piece.stop]
                done += len(part)
        return out

    def __getitem__(self, item: Any) -> NDArray[Any]:
        first, rest = (item[0], item[1:]) if isinstance(item, tuple) and item else (item, ())
        if first is Ellipsis or isinstance(first, slice):
            start, stop, step = (slice(None) if first is Ellipsis else first).indices(self.shape[0])
            # The range that a step walks, forwards, then the step.
            count = len(range(start, stop, step))
            last = start + (count - 1) * step
            low, high = (min(start, last), max(start, last) + 1) if count else (0, 0)
            tokens = self.read(low, high, self.dtype)[:: step if count else 1]
            return tokens[(first, *rest)] if first is Ellipsis and rest else tokens[(slice(None), *rest)]
        token = as_index(first)
        if not -self.shape[0] <= token < self.shape[0]:
            raise IndexError(f"token {token} of {self.shape[0]}")
        row: NDArray[Any] = self.read(token % self.shape[0], token % self.shape[0] + 1, self.dtype)[0]
        return row[rest]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return self.read(dtype=self.dtype if dtype is None else dtype)

    def _gathered(self, pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
        """``pieces``, those together whose pages follow one another and are few enough to decode at once."""
        run, most = self._payload.run, self._payload.coding.gathered_bytes
        size = sum(run.slots[slot].layout.page_bytes for slot in self._layer.slots)
        together: list[Piece] = []
        for piece in pieces:
            if together:
                last = together[-1]
                both = last.record.header.type == piece.record.header.type == PAGES
                whole = both and last.stop == last.record.header.tokens and last.stop % run.window == 0
                if not (whole and piece.start == 0 and size * _windows([*together, piece], run.window) <= most):
                    yield together
                    together = []
            together.append(piece)
        if together:
            yield together

    def _decode(self, pieces: list[Piece], slot: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        from ..codec import Pages

        window, layout = self._payload.run.window, self._payload.run.slots[slot].layout
        spans = [(piece.start // window, -(-piece.stop // window)) for piece in pieces]
        data = np.empty((sum(last - first for first, last in spans), layout.page_bytes), np.uint8)
        done = 0
        for piece, (first, last) in zip(pieces, spans):
            self._payload.copy_pages(piece.record, slot, first, data[done : done + last - first])
            done += last - first
        # Tokens of the pages before those that are meant, and of all: only the last record may end within a page.
        before = spans[0][0] * window
        behind = pieces[-1].record.header.tokens - spans[-1][0] * window
        tokens = min(len(data) * window, (len(data) - (spans[-1][1] - spans[-1][0])) * window + behind)
        skipped = pieces[0].start - before
        wanted = sum(piece.tokens for piece in pieces)
        try:
            rows: NDArray[Any] = self._payload.decoder(self._payload.run.slots[slot].plan).decode_kind(
                Pages(data, tokens), self.kind, skipped, skipped + wanted, dtype=dtype
            )
        except (ChecksumError, FormatError) as error:
            token = pieces[0].record.header.first + before + int(str(error.where["token"]))
            where: dict[str, Any] = {**error.where, "layer": self._layer.index, "token": token}
            raise type(error)(
                f"the {self.kind} container of {self._payload.run.named(slot)}, token {token} is damaged or was never "
                "valid",
                code=error.code,
                **where,
            ) from None
        return rows
