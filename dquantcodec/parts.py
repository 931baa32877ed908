"""Tokens of pages in parts that go through the stages together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .page import page_exponents
from .page_layout import PageLayout
from .plan import Plan
from .profile import TILE


@dataclass(frozen=True)
class Part:
    """Tokens of one page or of some whole ones: their tiles, the first token, and where the tokens lie in the tiles."""

    pages: slice
    tiles: slice
    first_token: int
    inside: slice

    @property
    def tokens(self) -> int:
        return int(self.inside.stop - self.inside.start)


def parts_of(pages: NDArray[np.uint8], plan: Plan, start: int, stop: int, most: int) -> Iterator[Part]:
    """The tokens ``start`` to ``stop`` of uint8 ``[pages, page_bytes]`` page by page, whole pages of one exponent up to
    ``most`` together."""
    window, tiles = plan.window, PageLayout.of(plan).tiles
    first = start // window
    exponents = page_exponents(pages[first : -(-stop // window)])
    while start < stop:
        page, skipped = divmod(start, window)
        count = 1
        if skipped == 0:
            at = page - first
            alike = (exponents[at : at + min(most, (stop - start) // window)] == exponents[at]).all(axis=1)
            count = max(1, len(alike) if alike.all() else int(alike.argmin()))
        tokens = min(stop - start, count * window - skipped)
        first_tile = skipped // TILE
        last_tile = tiles if count > 1 else -(-(skipped + tokens) // TILE)
        inside = slice(skipped - first_tile * TILE, skipped - first_tile * TILE + tokens)
        yield Part(slice(page, page + count), slice(first_tile, last_tile), start, inside)
        start += tokens
