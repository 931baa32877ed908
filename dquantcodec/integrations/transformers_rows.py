"""Sequences of one layer of a cache, and what attention of one forward pass reads of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .transformers_store import Store


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence: ``padding`` tokens that are not stored, exact leading ones, ``pages``, exact newest ones.

    ``keys`` and ``values`` ``[H, E, D]`` are all exact tokens, leading ones first; ``pages`` is whatever the layer's
    store keeps for each whole window; ``decoded`` are keys and values ``[H, C, D]`` of the pages, if they are kept.
    """

    padding: int
    keys: torch.Tensor
    values: torch.Tensor
    pages: NDArray[Any]
    decoded: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def exact(self) -> int:
        return int(self.keys.shape[1])

    def appended(self, keys: torch.Tensor, values: torch.Tensor) -> Row:
        """With tokens ``[H, t, D]`` more."""
        return replace(self, keys=torch.cat([self.keys, keys], dim=1), values=torch.cat([self.values, values], dim=1))


@dataclass(frozen=True, eq=False)
class Step:
    """What attention of one forward pass reads instead of keys: the rows with the new tokens still exact.

    ``decoded`` makes keys and values ``[B, H, tokens, D]`` of everything, for attention that cannot read pages.
    """

    rows: Sequence[Row]
    store: Store
    sinks: int
    tokens: int
    decoded: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def columns(self, row: Row) -> tuple[range, NDArray[np.intp]]:
        """Columns of the attention mask: those of the pages, and those of the exact tokens."""
        first = row.padding + self.sinks
        coded = range(first, first + len(row.pages) * self.store.plan.window)
        before = np.arange(row.padding, coded.start)
        return coded, np.concatenate([before, np.arange(coded.stop, self.tokens)])
