"""Where the pages of a PAGES record stand: pure arithmetic (specification, clause 4.3).

A record holds a *run*: consecutive windows of one sequence, for every head group of every coded layer.  All windows of
the first group come first, so reading a group, or a layer, touches one stretch of the file.  Only the last window may
be short; its page is then cut after its last used tile, in every group.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..page_layout import PageLayout
from ..plan import Plan
from ..profile import TILE
from .header import Header
from .structs import align


class Place(NamedTuple):
    """Offset from the start of the payload, and size."""

    offset: int
    size: int


class Slot(NamedTuple):
    """A head group of a coded layer: the layer's place in the file, the group's heads, and how its pages are coded."""

    layer: int
    heads: slice
    plan: Plan
    layout: PageLayout


class RunLayout:
    """The head groups of the coded layers in stored order, and the window that all share (0 without any)."""

    def __init__(self, slots: Sequence[Slot], window: int) -> None:
        self.slots = tuple(slots)
        self.window = window
        self._layer_of = [slot.layer for slot in slots]
        #: The coded layers.
        self.layers = tuple(dict.fromkeys(self._layer_of))
        # Bytes before every slot, and in the end of all: of full pages, of heads and of tiles.
        layouts = [slot.layout for slot in slots]
        self._full = (0, *accumulate(layout.page_bytes for layout in layouts))
        self._heads = (0, *accumulate(layout.head_bytes for layout in layouts))
        self._tiles = (0, *accumulate(layout.tile_bytes for layout in layouts))

    @staticmethod
    def of(header: Header) -> RunLayout:
        slots = [
            Slot(place, heads, plan, PageLayout.of(plan))
            for place, layer in enumerate(header.layers)
            for heads, plan in zip(layer.groups, layer.plans)
        ]
        return RunLayout(slots, header.window)

    def slots_of(self, layer: int, heads: slice) -> range:
        """The slots of ``layer`` that lie within ``heads``."""
        found = [
            number
            for number in range(bisect_left(self._layer_of, layer), bisect_right(self._layer_of, layer))
            if heads.start <= self.slots[number].heads.start < heads.stop
        ]
        return range(found[0], found[-1] + 1) if found else range(0)

    def named(self, slot: int) -> str:
        """The layer of ``slot``, and its heads if they are not all of the layer's."""
        layer, heads, _, _ = self.slots[slot]
        alone = sum(other.layer == layer for other in self.slots[max(0, slot - 1) : slot + 2]) == 1
        if alone:
            return f"layer {layer}"
        last = heads.stop - 1
        return f"layer {layer}, head {last}" if heads.start == last else f"layer {layer}, heads {heads.start} to {last}"

    @property
    def window_bytes(self) -> int:
        """Bytes of one full window, all head groups."""
        return self._full[-1]

    def windows(self, tokens: int) -> int:
        return -(-tokens // self.window)

    def table_bytes(self, tokens: int) -> int:
        """Bytes of the CRC table: one u32 per head group and window, zero-padded."""
        return align(4 * len(self.slots) * self.windows(tokens))

    def payload_bytes(self, tokens: int) -> int:
        return self._before(len(self.slots), tokens)

    def slots_place(self, first: int, last: int, tokens: int) -> Place:
        """Where the pages of slots ``first`` to before ``last`` stand."""
        start = self._before(first, tokens)
        return Place(start, self._before(last, tokens) - start)

    def _before(self, slot: int, tokens: int) -> int:
        """Bytes of table and pages before those of ``slot``."""
        full, rest = divmod(tokens, self.window)
        cut = self._heads[slot] + -(-rest // TILE) * self._tiles[slot] if rest else 0
        return self.table_bytes(tokens) + full * self._full[slot] + cut

    def pages(self, tokens: int) -> Iterator[tuple[int, int, Place]]:
        """Slot, window and place of every page, in stored order."""
        offset = self.table_bytes(tokens)
        for number, slot in enumerate(self.slots):
            for window in range(self.windows(tokens)):
                size = slot.layout.bytes_for(min(self.window, tokens - window * self.window))
                yield number, window, Place(offset, size)
                offset += size

    def page_place(self, slot: int, window: int, tokens: int) -> Place:
        """Where one page stands."""
        layout = self.slots[slot].layout
        used = min(self.window, tokens - window * self.window)
        return Place(self._before(slot, tokens) + window * layout.page_bytes, layout.bytes_for(used))
