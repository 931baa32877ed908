"""The decoding kernels of one kind of one plan on one device, ready to launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..plan import Plan, StreamPlan
from ..profile import TILE
from . import params
from .arrays import View
from .device import Device, cupy, kernel
from .group_decode import GROUP_DECODE, group_decode_arrays, group_decode_launch
from .launches import decode_launch
from .tables import decode_arrays


class DecodeTables:
    """The tables of one kind, uploaded to the current device, and the parameters that depend on the plan alone."""

    def __init__(self, plan: Plan, kind: str) -> None:
        stream: StreamPlan = getattr(plan, kind)
        self.grouped = stream.grouping is not None
        found = group_decode_arrays(stream) if self.grouped else decode_arrays(plan, stream)
        self.arrays = {name: cupy().asarray(array) for name, array in vars(found).items()}
        self.record = np.zeros(1, GROUP_DECODE if self.grouped else params.DECODE)
        rows = self.rows(self.record)
        rows["at"] = params.kind_layout(plan, kind)
        if stream.grouping is None:
            rows["tables"] = self.arrays["entries"].data.ptr, self.arrays["advance"].data.ptr
            rows["factors"] = self.arrays["factors"].data.ptr
            return
        for name, array in self.arrays.items():
            self.record[name] = array.data.ptr
        self.record["window_bytes"] = self.arrays["windows"].nbytes
        self.record["groups_each"] = len(stream.grouping.letters)
        self.record["channel_rows"] = len(self.arrays["channels"])

    def rows(self, record: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The part of ``record`` that all decoders have."""
        rows: np.ndarray[Any, Any] = record["rows"] if self.grouped else record
        return rows


class Decoder:
    """The kernel of one kind and element type; loading it compiles it, once."""

    def __init__(self, plan: Plan, kind: str, dtype: str, on: Device, tables: DecodeTables) -> None:
        self.tables, self.substreams = tables, getattr(plan, kind).substreams
        if tables.grouped:
            self.kernel = kernel(group_decode_launch(plan, kind, dtype, on.shared_bytes), on, "dquant_decode_groups")
        else:
            self.kernel = kernel(decode_launch(plan, kind, dtype, on.shared_bytes), on, "dquant_decode")

    def launch(self, pool: tuple[int, int, int], start: int, stop: int, out: View, status: View) -> None:
        """Decode tokens ``start`` to ``stop`` to rows ``out`` and their ``status`` on the current stream."""
        record = self.tables.record.copy()
        rows = self.tables.rows(record)
        rows["pool"], rows["start"], rows["stop"] = pool, start, stop
        rows["out"], rows["status"] = out.address, status.address
        rows["token_stride"], rows["head_stride"] = out.strides[:2]
        starts = (out.address, *(stride * out.itemsize for stride in out.strides[:2]))
        rows["vectors"] = all(place % 16 == 0 for place in starts)
        tiles = -(-stop // TILE) - start // TILE
        self.kernel(self.kernel.fill(tiles * self.substreams), record)
