"""Where the pages of a PAGES record stand: pure arithmetic (specification, clause 4.3).

A record holds a *run*: consecutive windows of one sequence, for every coded layer.  All windows of the first layer
come first, so reading one layer touches one stretch of the file.  Only the last window may be short; its page is then
cut after its last used tile, in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..page import PageLayout
from .header import Header
from .structs import align


class Place(NamedTuple):
    """Offset from the start of the payload, and size."""

    offset: int
    size: int


@dataclass(frozen=True)
class RunLayout:
    """The page layouts of the coded layers in file order, their common window, and which layers they are."""

    layouts: tuple[PageLayout, ...]
    window: int
    layers: tuple[int, ...]

    @staticmethod
    def of(header: Header) -> RunLayout:
        coded = [(place, layer.plan) for place, layer in enumerate(header.layers) if layer.plan]
        return RunLayout(
            tuple(PageLayout.of(plan) for _, plan in coded), header.window, tuple(place for place, _ in coded)
        )

    @property
    def window_bytes(self) -> int:
        """Bytes of one full window, all coded layers."""
        return sum(layout.page_bytes for layout in self.layouts)

    def windows(self, tokens: int) -> int:
        return -(-tokens // self.window)

    def table_bytes(self, tokens: int) -> int:
        """Bytes of the CRC table: one u32 per layer and window, zero-padded."""
        return align(4 * len(self.layouts) * self.windows(tokens))

    def layer_bytes(self, slot: int, tokens: int) -> int:
        """Bytes of all pages of coded layer ``slot``."""
        layout = self.layouts[slot]
        full, rest = divmod(tokens, self.window)
        return full * layout.page_bytes + (layout.bytes_for(rest) if rest else 0)

    def payload_bytes(self, tokens: int) -> int:
        return self.table_bytes(tokens) + sum(self.layer_bytes(slot, tokens) for slot in range(len(self.layouts)))

    def layer_place(self, slot: int, tokens: int) -> Place:
        """Where the pages of coded layer ``slot`` stand."""
        before = sum(self.layer_bytes(earlier, tokens) for earlier in range(slot))
        return Place(self.table_bytes(tokens) + before, self.layer_bytes(slot, tokens))

    def pages(self, tokens: int) -> Iterator[tuple[int, int, Place]]:
        """Slot, window and place of every page, in stored order."""
        offset = self.table_bytes(tokens)
        for slot, layout in enumerate(self.layouts):
            for window in range(self.windows(tokens)):
                size = layout.bytes_for(min(self.window, tokens - window * self.window))
                yield slot, window, Place(offset, size)
                offset += size

    def page_place(self, slot: int, window: int, tokens: int) -> Place:
        """Where one page stands."""
        layout = self.layouts[slot]
        used = min(self.window, tokens - window * self.window)
        start = self.layer_place(slot, tokens).offset + window * layout.page_bytes
        return Place(start, layout.bytes_for(used))
