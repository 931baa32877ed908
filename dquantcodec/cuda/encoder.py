"""The encoding kernels of one kind of one plan on one device, ready to launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..page_layout import PageLayout
from ..plan import Plan, StreamPlan
from ..profile import TILE
from . import params
from .arrays import View
from .device import Device, cupy, kernel
from .group_tables import GroupEncodeArrays, group_encode_arrays
from .launches import encode_launches, group_launches
from .tables import encode_arrays, encode_numbers
from .trellis_tables import TrellisEncodeArrays, trellis_encode_arrays

_ARRAYS = ("thresholds", "edges", "steps", "costs", "complete", "last_costs")
_NUMBERS = ("rungs", "columns", "cheapest")


class EncodeTables:
    """The tables of one rotated kind, uploaded to the current device."""

    def __init__(self, plan: Plan, kind: str) -> None:
        stream: StreamPlan = getattr(plan, kind)
        self.arrays = {name: cupy().asarray(array) for name, array in vars(encode_arrays(plan, stream)).items()}
        known = encode_numbers(plan, stream)
        self.record = np.zeros(1, params.ENCODE)
        for name in _ARRAYS:
            self.record["drift"][name] = self.arrays[name].data.ptr
        for name in _NUMBERS:
            self.record["drift"][name] = known[name]
        for name in ("factors", "codes", "reciprocals"):
            self.record[name] = self.arrays[name].data.ptr
        self.record["budget"] = known["budget"]
        _describe_pages(self.record, plan, kind)


class GroupEncodeTables:
    """The tables of one grouped kind, uploaded to the current device."""

    def __init__(self, plan: Plan, kind: str) -> None:
        stream: StreamPlan = getattr(plan, kind)
        assert stream.grouping is not None
        trellis = stream.grouping.states > 1
        self.host: GroupEncodeArrays | TrellisEncodeArrays = (
            trellis_encode_arrays(stream) if trellis else group_encode_arrays(stream)
        )
        self.arrays = {name: cupy().asarray(getattr(self.host, name)) for name in self.host.NAMES}
        self.record = np.zeros(1, params.TRELLIS_ENCODE if trellis else params.GROUP_ENCODE)
        tables = self.record["tables"]
        for name, array in self.arrays.items():
            tables[name] = array.data.ptr
        for name, number in self.host.numbers(stream).items():
            tables[name] = number
        _describe_pages(self.record["rows"], plan, kind)


def upload_tables(plan: Plan, kind: str) -> EncodeTables | GroupEncodeTables:
    """The tables of a kind by what it is, on the current device."""
    stream: StreamPlan = getattr(plan, kind)
    return EncodeTables(plan, kind) if stream.grouping is None else GroupEncodeTables(plan, kind)


def _describe_pages(record: np.ndarray[Any, Any], plan: Plan, kind: str) -> None:
    record["at"] = params.kind_layout(plan, kind)
    if kind == "key":
        # One kind clears what neither holds.
        layout = PageLayout.of(plan)
        record["clear_from"], record["clear_to"] = layout.used_head_bytes, layout.head_bytes


class Encoder:
    """Kernels of one kind and element type; loading them compiles them, once."""

    def __init__(self, plan: Plan, kind: str, dtype: str, on: Device, tables: EncodeTables | GroupEncodeTables) -> None:
        self.plan, self.tables = plan, tables
        if isinstance(tables, GroupEncodeTables):
            grouped = group_launches(plan, kind, dtype, tables.host, on.shared_bytes)
            head, means, self.scratch_bytes = grouped.head, grouped.means, grouped.scratch_bytes
            names = "dquant_group_head", "dquant_group_means", "dquant_encode_groups"
            self.last = kernel(grouped.tokens, on, names[2])
            self.record = tables.record.copy()
            self.record["tables"]["window_first"], self.record["tables"]["window_rungs"] = grouped.first, grouped.window
            # Blocks share so much that each of them stays for all its tokens.
            self.unit, self.stays = grouped.tokens.warps, True
            self.means_unit = head.warps
        else:
            launches = encode_launches(plan, kind, dtype, on.shared_bytes)
            head, means, self.scratch_bytes = launches.head, launches.means, launches.scratch_bytes
            names = "dquant_encode_head", "dquant_encode_means", "dquant_encode"
            self.last = kernel(launches.tiles, on, names[2])
            self.record = tables.record
            # One block a tile (rANS) or a token a warp, but with scratch no more than run at once.
            self.unit = TILE if getattr(plan, kind).coder == "rans" else launches.tiles.warps
            self.stays = self.scratch_bytes > 0
            self.means_unit = 1
        self.head = kernel(head, on, names[0])
        self.means = kernel(means, on, names[1]) if means else None

    def blocks(self, windows: int) -> int:
        """Blocks of the last kernel."""
        blocks = -(-windows * self.plan.window // self.unit)
        most = self.last.on.multiprocessors * self.last.launch.residents
        return min(blocks, most) if self.stays else blocks

    def scratch(self, windows: int) -> Any:
        """Memory for :meth:`launch`; None where shared memory is enough."""
        return cupy().empty(self.blocks(windows) * self.scratch_bytes, np.uint8) if self.scratch_bytes else None

    def launch(
        self,
        rows: View,
        pool: tuple[int, int, int],
        windows: int,
        *,
        scratch: Any,
        status: int = 0,
        ready: int = 0,
        numbers_stride: int = 0,
    ) -> None:
        """Encode ``windows`` windows of ``rows`` into ``pool`` on the current stream.

        ``pool``, ``ready`` and ``numbers_stride`` as in ``EncodeParams``; addresses are integers.
        """
        all_records = self.record.copy()
        record = all_records if all_records.dtype == params.ENCODE else all_records["rows"]
        record["pool"], record["in"], record["tokens"] = pool, rows.address, rows.shape[0]
        record["token_stride"], record["head_stride"] = rows.strides[:2]
        starts = (rows.address, *(stride * rows.itemsize for stride in rows.strides[:2]))
        record["vectors"] = all(place % 16 == 0 for place in starts)
        record["ready"], record["numbers_stride"] = ready, numbers_stride
        record["status"], record["windows"] = status, windows
        if scratch is not None:
            record["scratch"], record["scratch_bytes"] = scratch.data.ptr, self.scratch_bytes
        self.head(windows, all_records)
        if self.means is not None:
            self.means(-(-windows * self.plan.kv_heads // self.means_unit), all_records)
        self.last(self.blocks(windows), all_records)
