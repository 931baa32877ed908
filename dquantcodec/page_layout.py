"""Page layout: where every field of a page begins, as arithmetic on integers (specification, clause 5).

    page  = head, tile 0, tile 1, ...                        one window of tokens of one layer
    head  = i16 key exponent, i16 value exponent,
            (f16 scale [H], i8 mean [H, D]) for each kind with means; zero padding to 64 bytes
    tile  = key words    [substream][word][32 tokens]        u16 or u32
            key affine   [32 tokens] x (f16 offset, f16 scale), or x f16 scale for a mid-tread grid
            value words, value affine                        likewise

The same bytes on disk, in memory and on a GPU.  Rows of words and affine rows are 64 or 128 bytes, so every
tile is a multiple of 64 bytes.  A page of fewer tokens is a prefix of the full page, cut after its last used tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .plan import Plan
from .profile import TILE

ALIGNMENT = 64
KINDS = ("key", "value")


@dataclass(frozen=True)
class StreamLayout:
    """Byte offsets of one kind: means within the page, words and affine pairs within a tile."""

    scale_at: int
    mean_at: int
    words_at: int
    affine_at: int
    end: int


@dataclass(frozen=True)
class PageLayout:
    """Sizes in bytes of a plan's pages; pure arithmetic on Python integers."""

    used_head_bytes: int
    head_bytes: int
    tile_bytes: int
    tiles: int
    key: StreamLayout
    value: StreamLayout

    @property
    def page_bytes(self) -> int:
        """Bytes of a full page."""
        return self.head_bytes + self.tiles * self.tile_bytes

    def bytes_for(self, tokens: int) -> int:
        """Bytes of a page that holds only its first ``tokens`` tokens: whole tiles."""
        return self.head_bytes + -(-tokens // TILE) * self.tile_bytes

    @staticmethod
    def of(plan: Plan) -> PageLayout:
        """The layout of ``plan``'s pages."""
        return _layout(plan)


@lru_cache(maxsize=64)
def _layout(plan: Plan) -> PageLayout:
    at = 4  # the two exponents
    tile = 0
    streams = []
    for stream in (plan.key, plan.value):
        scale_at, mean_at = at, at + 2 * plan.kv_heads
        if stream.mean:
            at = mean_at + plan.values
        words_at = tile
        affine_at = words_at + TILE * stream.container
        tile = affine_at + TILE * 2 * stream.affine
        streams.append(StreamLayout(scale_at, mean_at, words_at, affine_at, tile))
    return PageLayout(
        used_head_bytes=at,
        head_bytes=-(-at // ALIGNMENT) * ALIGNMENT,
        tile_bytes=tile,
        tiles=plan.window // TILE,
        key=streams[0],
        value=streams[1],
    )
