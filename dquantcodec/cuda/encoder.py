"""The encoding kernels of one kind of one plan on one device, ready to launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..page import PageLayout
from ..plan import Plan, StreamPlan
from ..profile import TILE
from . import params
from .arrays import View
from .device import Device, cupy, kernel
from .launches import encode_launches
from .tables import encode_arrays, encode_numbers

_ARRAYS = ("thresholds", "edges", "steps", "costs", "complete", "last_costs")
_NUMBERS = ("rungs", "columns", "cheapest")


class EncodeTables:
    """The tables of one kind, uploaded to the current device."""

    def __init__(self, plan: Plan, kind: str) -> None:
        stream: StreamPlan = getattr(plan, kind)
        self.arrays = {name: cupy().asarray(array) for name, array in vars(encode_arrays(plan, stream)).items()}
        layout, known = PageLayout.of(plan), encode_numbers(plan, stream)
        self.record = np.zeros(1, params.ENCODE)
        for name in _ARRAYS:
            self.record["drift"][name] = self.arrays[name].data.ptr
        for name in _NUMBERS:
            self.record["drift"][name] = known[name]
        for name in ("factors", "codes", "reciprocals"):
            self.record[name] = self.arrays[name].data.ptr
        self.record["budget"], self.record["at"] = known["budget"], params.kind_layout(plan, kind)
        if kind == "key":
            # One kind clears what neither holds.
            self.record["clear_from"], self.record["clear_to"] = layout.used_head_bytes, layout.head_bytes


class Encoder:
    """Kernels of one kind and element type; loading them compiles them, once."""

    def __init__(self, plan: Plan, kind: str, dtype: str, on: Device, tables: EncodeTables) -> None:
        launches = encode_launches(plan, kind, dtype, on.shared_bytes)
        self.plan, self.tables, self.scratch_bytes = plan, tables, launches.scratch_bytes
        self.rans = getattr(plan, kind).coder == "rans"
        self.head = kernel(launches.head, on, "dquant_encode_head")
        self.means = kernel(launches.means, on, "dquant_encode_means") if launches.means else None
        self.tiles = kernel(launches.tiles, on, "dquant_encode")

    def blocks(self, windows: int) -> int:
        """Blocks of the last kernel: one a tile (rANS) or a token a warp, but with scratch no more than run at once."""
        launch = self.tiles.launch
        tokens = windows * self.plan.window
        blocks = tokens // TILE if self.rans else -(-tokens // launch.warps)
        most = self.tiles.on.multiprocessors * launch.residents
        return min(blocks, most) if self.scratch_bytes else blocks

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
        record = self.tables.record.copy()
        record["pool"], record["in"], record["tokens"] = pool, rows.address, rows.shape[0]
        record["token_stride"], record["head_stride"] = rows.strides[:2]
        record["ready"], record["numbers_stride"] = ready, numbers_stride
        record["status"], record["windows"] = status, windows
        if scratch is not None:
            record["scratch"], record["scratch_bytes"] = scratch.data.ptr, self.scratch_bytes
        self.head(windows, record)
        if self.means is not None:
            self.means(windows * self.plan.kv_heads, record)
        self.tiles(self.blocks(windows), record)
