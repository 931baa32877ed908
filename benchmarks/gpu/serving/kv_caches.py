"""Two caches of keys and values for :class:`decoder_model.Decoder`: BF16 rows, and pages of this library.

Both are filled without a prefill, with rows of the magnitudes that the model's own have: attention reads every byte
whatever it says.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import numpy as np
import torch
from decoder_model import DecoderShape
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from dquantcodec.codec import Pages
from dquantcodec.plan import Plan

#: PyTorch's attention kernels that decode BF16 on GPUs.
BACK_ENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


class NoCache:
    """Keeps nothing: what the rest of the model takes."""

    def __init__(self, batch: int, device: str = "cuda") -> None:
        self._positions = torch.zeros(batch, device=device, dtype=torch.int32)

    def restart(self) -> None:
        """Nothing."""

    def positions(self) -> torch.Tensor:
        return self._positions

    def attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return query


class ExactCache:
    """BF16 ``[B, H, S, D]`` of every layer, full: a step decodes the token of position ``S - 1``, over and over.

    That gives PyTorch's kernels what they are fastest with: all lengths equal and known when a graph is captured,
    neither mask nor pages.  ``back_end`` is one of :data:`BACK_ENDS`, or None for PyTorch's choice.
    """

    def __init__(
        self, shape: DecoderShape, batch: int, tokens: int, device: str = "cuda", back_end: str | None = None
    ) -> None:
        self.tokens, self.back_end = tokens, back_end
        size = (2, batch, shape.kv_heads, tokens, shape.head_dim)
        self.rows = [torch.empty(size, device=device, dtype=torch.bfloat16) for _ in range(shape.layers)]
        self._positions = torch.full((batch,), tokens - 1, device=device, dtype=torch.int32)

    def fill(self, sample: torch.Tensor) -> None:
        """Repeat ``sample`` BF16 ``[2, T, H, D]`` in all sequences of all layers."""
        sample = sample.permute(0, 2, 1, 3)[:, None]
        for rows in self.rows:
            for first in range(0, self.tokens, sample.shape[3]):
                part = rows[:, :, :, first : first + sample.shape[3]]
                part.copy_(sample[:, :, :, : part.shape[3]].expand_as(part))

    def restart(self) -> None:
        """Nothing: the length stays."""

    def positions(self) -> torch.Tensor:
        return self._positions

    def attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows = self.rows[layer]
        rows[:, :, :, -1] = _side_by_side(keys, values)
        with self._kernel():
            return scaled_dot_product_attention(query[:, :, None], *rows, enable_gqa=True)[:, :, 0]

    def _kernel(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(BACK_ENDS[self.back_end]) if self.back_end else nullcontext()


def _side_by_side(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``[2, B, H, D]`` of keys and values that lie one behind the other in memory, as one view: one copy a layer."""
    step = values.storage_offset() - keys.storage_offset()
    return keys.as_strided((2, *keys.shape), (step, *keys.stride()))


@dataclass(frozen=True)
class Backend:
    """The classes a :class:`PageCache` is made of."""

    codec: Any
    cache: Any
    attention: Any

    @staticmethod
    def of_gpu() -> Backend:
        cuda = import_module("dquantcodec.cuda")
        return Backend(cuda.Codec, cuda.Cache, import_module("dquantcodec.cuda.attend").PageAttention)


@dataclass(frozen=True, eq=False)
class Coded:
    """A plan, its codec, and pages of a sample to fill caches with; ``sinks`` leading tokens are kept exact."""

    name: str
    plan: Plan
    sinks: int
    backend: Backend
    device: str

    @cached_property
    def codec(self) -> Any:
        return self.backend.codec(self.plan)

    def pages(self, sample: torch.Tensor) -> torch.Tensor:
        """uint8 ``[pages, page_bytes]`` of all whole windows of ``sample`` BF16 ``[2, T, H, D]``."""
        whole = sample.shape[1] // self.plan.window * self.plan.window
        data = self.codec.encode(sample[0, :whole], sample[1, :whole]).data
        return torch.as_tensor(data, device=self.device)


class PageCache:
    """Pools of pages of every layer, one block table, exact tails, exact leading tokens.

    ``lengths`` int32 ``[B]`` are the tokens of every sequence to begin with, the leading ones included, and ``room``
    those that the longest sequence may come to.  All layers share one plan.
    """

    def __init__(self, shape: DecoderShape, coded: Coded, lengths: torch.Tensor, room: int) -> None:
        plan, device = coded.plan, coded.device
        self.shape, self.coded = shape, coded
        self._kept = lengths.to(device) - coded.sinks
        batch = len(lengths)
        windows = max(1, (room - coded.sinks) // plan.window)
        # Pages stand in memory in random order, as those of an engine that has run for a while.
        order = torch.randperm(batch * windows, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
        self.table = order.view(batch, windows).to(device)
        size = (batch * windows, coded.codec.layout.page_bytes)
        self.pools = [torch.empty(size, device=device, dtype=torch.uint8) for _ in range(shape.layers)]
        self.caches = [coded.backend.cache(coded.codec, pool, self.table) for pool in self.pools]
        self.lengths = [torch.from_dlpack(cache.lengths) for cache in self.caches]
        leading = (2, batch, coded.sinks, shape.kv_heads, shape.head_dim)
        exact = {"device": device, "dtype": torch.bfloat16}
        self.leading = [torch.empty(leading, **exact) for _ in self.pools] if coded.sinks else []
        counts = {"device": device, "dtype": torch.int32}
        self._sinks = torch.full((batch,), coded.sinks, **counts)
        self._in_pages, self._in_tail = torch.zeros(2, batch, **counts).unbind()
        self.attention = coded.backend.attention(plan, batch, shape.query_heads, most_tokens=windows * plan.window)
        self.out = torch.empty((batch, 1, shape.query_heads, shape.head_dim), **exact)
        #: False leaves attention out, for measuring what appending and encoding take.
        self.attending = True
        self.restart()

    def fill(self, sample: torch.Tensor, pages: torch.Tensor) -> None:
        """Repeat ``pages`` in all pools, and the first rows of ``sample`` BF16 ``[2, T, H, D]`` in all exact places."""
        for layer, (pool, cache) in enumerate(zip(self.pools, self.caches)):
            for first in range(0, len(pool), len(pages)):
                part = pool[first : first + len(pages)]
                part.copy_(pages[: len(part)])
            for i, tail in enumerate((cache.keys, cache.values)):
                tail.copy_(sample[i, : tail.shape[1]].expand_as(tail))
                if self.leading:
                    self.leading[layer][i].copy_(sample[i, : self.coded.sinks].expand_as(self.leading[layer][i]))

    def restart(self) -> None:
        """All sequences as long as they were to begin with."""
        for lengths in self.lengths:
            lengths.copy_(self._kept)

    def positions(self) -> torch.Tensor:
        return self.lengths[0] + self._sinks

    def attend(self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache = self.caches[layer]
        cache.append(keys, values)
        if not self.attending:
            return query
        if layer == 0:
            # Layers hold as many tokens of a sequence, all of them.
            torch.remainder(self.lengths[0], self.coded.plan.window, out=self._in_tail)
            torch.sub(self.lengths[0], self._in_tail, out=self._in_pages)
        leading = (*self.leading[layer], self._sinks) if self.leading else None
        self.attention(
            query[:, None], self.pools[layer], self.table, self._in_pages,
            sinks=leading, tail=(cache.keys, cache.values, self._in_tail), out=self.out,
        )  # fmt: skip
        return self.out[:, 0]

    def full(self) -> bool:
        """Whether a token of any layer found no room."""
        return any(bool(torch.from_dlpack(cache.full).any()) for cache in self.caches)

    def exact_rows(self, layer: int, sequence: int) -> torch.Tensor:
        """BF16 ``[2, T, H, D]``: a sequence as attention sees it, coded tokens decoded."""
        cache, coded = self.caches[layer], self.coded
        window = coded.plan.window
        whole = int(self.lengths[layer][sequence]) // window
        rest = int(self.lengths[layer][sequence]) - whole * window
        numbers = self.table[sequence, :whole].contiguous()
        decoded = coded.codec.decode(
            Pages(self.pools[layer], whole * window), dtype="bfloat16" if self.table.is_cuda else np.float32,
            numbers=numbers,
        )  # fmt: skip
        rows = torch.stack([torch.as_tensor(x, device=coded.device).to(torch.bfloat16) for x in decoded])
        tail = torch.stack((cache.keys[sequence, :rest], cache.values[sequence, :rest]))
        leading = [self.leading[layer][:, sequence]] if self.leading else []
        return torch.cat((*leading, rows, tail), dim=1)


def spread_lengths(batch: int, tokens: int, window: int, steps: int) -> torch.Tensor:
    """int32 ``[batch]``: lengths whose mean over ``steps`` steps is about ``tokens``, evenly far from a full page.

    So every step fills as many pages as any other (or every so many steps one), and a part of ``window`` steps tells
    what encoding costs on average.
    """
    phases = (2 * torch.arange(batch) + 1) * window // (2 * batch)
    return (tokens - window // 2 - steps // 2 + phases).to(torch.int32)
