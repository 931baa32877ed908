"""Sequences that grow: exact tails, and a page encoded in place whenever one is full.

A step launches kernels and nothing else: no memory is allocated and nothing is waited for, so steps can be captured in
a CUDA graph and replayed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..codec import Pages
from ..errors import InputError
from ..page_layout import KINDS
from . import arrays, params
from .codec import Codec
from .device import cupy, kernel, stream_of
from .launches import ELEMENTS, append_launch

#: A sequence's flag in ``full``: a token found no room and was left out.
NO_ROOM = 1


class Cache:
    """The tokens of ``B`` sequences of one layer: whole windows in pages, the newest ones exact.

    ``pages`` is a pool ``[pages, page_bytes]`` uint8; ``numbers`` int32 ``[B, most]`` says which page of it holds the
    first window of each sequence, the second, and so on.  Both belong to the caller, who may change numbers of pages
    that are not due yet.  A sequence has room for ``most`` whole windows and ``window - 1`` tokens more.

    Attributes, all on the device:

    lengths
        int32 ``[B]``: tokens of each sequence; the newest ``length % window`` of them are exact.
    keys, values
        ``[B, window, H, D]`` of ``dtype``: the tails.
    status
        uint8 ``[2, B * window]``: of the page a sequence filled last, 6 for keys and values that were not finite and
        were coded as zero.
    full
        uint8 ``[B]``: 1 once a token found no room.
    """

    def __init__(self, codec: Codec, pages: Any, numbers: Any, *, dtype: str = "bfloat16", stream: Any = None) -> None:
        if dtype not in ELEMENTS:
            raise InputError(f"tails are {', '.join(ELEMENTS)}, not {dtype}", code="input-dtype")
        plan, on = codec.plan, codec.device
        shape = arrays.view(numbers, "numbers", on).shape
        if len(shape) != 2:
            raise InputError(f"numbers has shape {list(shape)}; expected [sequences, pages]", code="input-shape")
        self.codec, self.dtype, self.sequences, self.most = codec, dtype, shape[0], shape[1]
        with on.current, stream_of(stream, [pages, numbers]):
            self._pool = codec.pool(pages, 0, None)
            self._numbers = arrays.flat(numbers, "numbers", shape, "int32", on)
            tail = (self.sequences, plan.window, plan.kv_heads, plan.head_dim)
            self.keys, self.values = (arrays.empty(pages, tail, dtype, on) for _ in KINDS)
            self.lengths = cupy().zeros(self.sequences, np.int32)
            self.full = cupy().zeros(self.sequences, np.uint8)
            self.status = cupy().zeros((2, self.sequences * plan.window), np.uint8)
            self._ready = cupy().full(self.sequences, -1, np.int32)
            self._append = kernel(append_launch(), on, "dquant_append")
            self._encoders = [codec.encoder(kind, dtype) for kind in KINDS]
            self._scratch = [encoder.scratch(self.sequences) for encoder in self._encoders]
            tails = [arrays.view(a, "tails", on) for a in (self.keys, self.values)]
            flat = (self.sequences * plan.window, plan.kv_heads, plan.head_dim)
            self._tails = [arrays.View(t.address, flat, t.strides[1:], t.dtype, t.itemsize, t.owner) for t in tails]

    def append(self, keys: Any, values: Any, *, active: Any = None, stream: Any = None) -> None:
        """One token more for every sequence: ``keys`` and ``values`` ``[B, H, D]`` of the tails' dtype.

        ``active`` uint8 ``[B]`` is 0 for sequences that get none.  Sequences without room are left as they are and
        flagged in ``full``.
        """
        plan, on = self.codec.plan, self.codec.device
        with on.current, stream_of(stream, [keys, values]):
            shape = (self.sequences, plan.kv_heads, plan.head_dim)
            rows = [
                arrays.rows(array, f"{kind}s", shape, (self.dtype,), on) for array, kind in zip((keys, values), KINDS)
            ]
            flags = arrays.flat(active, "active", (self.sequences,), "uint8", on).address if active is not None else 0
            record = self._record(1, flags)
            for i, kind in enumerate(KINDS):
                place = record[f"{kind}s"]
                place["in"], place["sequence_stride"], place["head_stride"] = rows[i].address, *rows[i].strides[:2]
                place["tails"] = self._tails[i].address
            self._append(self.sequences, record)
            address, _, stride = self._pool.record
            pool = (address, self._numbers.address, stride)
            for i, encoder in enumerate(self._encoders):
                encoder.launch(
                    self._tails[i],
                    pool,
                    self.sequences,
                    scratch=self._scratch[i],
                    status=self.status.data.ptr + i * self.sequences * plan.window,
                    ready=self._ready.data.ptr,
                    numbers_stride=self.most,
                )

    def prefill(self, sequence: int, keys: Any, values: Any, *, stream: Any = None) -> None:
        """Start ``sequence`` anew with ``keys`` and ``values`` ``[T, H, D]`` of the tails' dtype.

        Whole windows go to pages, the rest to the tail.  Values that are not finite are coded as zero.
        """
        plan, on = self.codec.plan, self.codec.device
        if not 0 <= sequence < self.sequences:
            raise InputError(f"there is no sequence {sequence} of {self.sequences}", code="input-sequence")
        with on.current, stream_of(stream, [keys, values]):
            shape = (None, plan.kv_heads, plan.head_dim)
            rows = [
                arrays.rows(array, f"{kind}s", shape, (self.dtype,), on) for array, kind in zip((keys, values), KINDS)
            ]
            tokens = rows[0].shape[0]
            if rows[1].shape[0] != tokens:
                raise InputError(f"{tokens} tokens of keys but {rows[1].shape[0]} of values", code="input-shape")
            whole = tokens // plan.window
            if whole > self.most:
                raise InputError(f"{tokens} tokens fill {whole} pages; a sequence has {self.most}", code="input-pages")
            address, _, stride = self._pool.record
            pool = (address, self._numbers.address + 4 * sequence * self.most, stride)
            for i, encoder in enumerate(self._encoders):
                if whole:
                    windows = replace(rows[i], shape=(whole * plan.window, *rows[i].shape[1:]))
                    encoder.launch(windows, pool, whole, scratch=encoder.scratch(whole))
            self.lengths[sequence] = whole * plan.window
            rest = tokens - whole * plan.window
            if rest:
                record = self._record(rest, 0)
                for name, step in (("lengths", 4), ("ready", 4), ("full", 1)):
                    record[name] += step * sequence
                for i, kind in enumerate(KINDS):
                    row, tail = rows[i], self._tails[i]
                    place = record[f"{kind}s"]
                    place["in"] = row.address + whole * plan.window * row.strides[0] * row.itemsize
                    place["token_stride"], place["head_stride"] = row.strides[:2]
                    place["tails"] = tail.address + sequence * plan.window * plan.values * tail.itemsize
                self._append(1, record)

    def pages(self, sequence: int) -> tuple[Pages, Any]:
        """The pages of a sequence and their numbers, as :meth:`Codec.decode` takes them.  Waits for the length."""
        length = int(self.lengths[sequence])
        whole = length // self.codec.plan.window
        return Pages(self._pool.owners[0], whole * self.codec.plan.window), self._numbers.owner[sequence, :whole]

    def _record(self, tokens: int, active: int) -> np.ndarray[Any, Any]:
        plan = self.codec.plan
        record = np.zeros(1, params.APPEND)
        record["lengths"], record["ready"] = self.lengths.data.ptr, self._ready.data.ptr
        record["full"], record["active"] = self.full.data.ptr, active
        record["heads"], record["head_dim"], record["window"] = plan.kv_heads, plan.head_dim, plan.window
        record["pages"], record["tokens"], record["element_bytes"] = self.most, tokens, self._tails[0].itemsize
        return record
