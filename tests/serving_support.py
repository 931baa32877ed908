"""Stand-ins for a card and for the classes of ``dquantcodec.cuda`` that the serving benchmark uses: the CPU's codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dquantcodec.codec import Codec, Pages
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import Plan


def floats(rows: torch.Tensor) -> Any:
    return rows.float().numpy()


class HostCodec:
    """``dquantcodec.cuda.Codec`` for tensors of the host."""

    def __init__(self, profile: Plan) -> None:
        self.plan, self.layout, self.host = profile, PageLayout.of(profile), Codec(profile)

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> Pages:
        return self.host.encode(floats(keys), floats(values))

    def decode(self, pages: Pages, *, dtype: Any, numbers: torch.Tensor) -> tuple[Any, Any]:
        return self.host.decode(Pages(pages.data[numbers.long()].numpy(), pages.tokens), dtype=dtype)


class HostCache:
    """``dquantcodec.cuda.Cache``: a full tail becomes the sequence's next page."""

    def __init__(self, codec: HostCodec, pages: torch.Tensor, numbers: torch.Tensor) -> None:
        plan, (batch, self.most) = codec.plan, numbers.shape
        self.codec, self.pool, self.numbers = codec, pages, numbers
        shape = (2, batch, plan.window, plan.kv_heads, plan.head_dim)
        # What lies behind a length must never reach an output.
        self.keys, self.values = torch.full(shape, torch.nan, dtype=torch.bfloat16).unbind()
        self.lengths, self.full = np.zeros(batch, np.int32), np.zeros(batch, np.uint8)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        window = self.codec.plan.window
        for b, length in enumerate(self.lengths):
            place = length % window
            if (length + 1) // window > self.most:
                self.full[b] = 1
                continue
            self.keys[b, place], self.values[b, place] = keys[b], values[b]
            self.lengths[b] += 1
            if place + 1 == window:
                page = self.codec.encode(self.keys[b], self.values[b]).data
                self.pool[self.numbers[b, length // window]] = torch.from_numpy(page[0])


class HostAttention:
    """``dquantcodec.cuda.attend.PageAttention``."""

    def __init__(self, plan: Plan, batch: int, query_heads: int, *, most_tokens: int) -> None:
        self.codec, self.batch, self.query_heads, self.most_tokens = Codec(plan), batch, query_heads, most_tokens

    def __call__(
        self, query: torch.Tensor, pages: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor, *,
        sinks: Any, tail: Any, out: torch.Tensor,
    ) -> None:  # fmt: skip
        assert query.shape == out.shape == (self.batch, 1, self.query_heads, self.codec.plan.head_dim)
        assert query.is_contiguous()
        for b in range(self.batch):
            length = int(lengths[b])
            assert length <= self.most_tokens
            taken = Pages(pages[block_table[b, : length // self.codec.plan.window].long()].numpy(), length)
            parts = [(part[0][b, : part[2][b]], part[1][b, : part[2][b]]) for part in (sinks, tail) if part is not None]
            exact = [np.concatenate([floats(part[i]) for part in parts]) for i in range(2)]
            out[b, 0] = torch.from_numpy(self.codec.attend(floats(query[b, 0]), taken, exact=tuple(exact))[0])


@dataclass
class HostCard:
    """A card of ``total`` bytes that pools and rows must fit; a few steps are run, and times are made up.

    ``cases`` are the batches, steps and repeats asked for.
    """

    total: int = 1 << 40
    device: str = "cpu"
    cases: list[tuple[str, int, int, int]] = field(default_factory=list)

    def allocated(self) -> int:
        return 0

    def free(self) -> int:
        return self.total

    def used(self) -> int:
        return 0

    def release(self) -> None:
        pass

    def times(self, model: Any, cache: Any, batch: int, steps: int, repeats: int) -> list[float]:
        name = type(cache).__name__
        size = {"ExactCache": lambda: sum(rows.nbytes for rows in cache.rows),
                "PageCache": lambda: sum(pool.nbytes for pool in cache.pools)}.get(name, lambda: 0)()  # fmt: skip
        if size > self.total:
            raise torch.OutOfMemoryError(f"{size} bytes")
        self.cases.append((name, batch, steps, repeats))
        ids = torch.zeros(batch, dtype=torch.int64)
        for _ in range(min(steps, 2)):
            model.step(ids, cache)
        cache.restart()
        return [0.5 * batch + step for step in range(repeats)]
