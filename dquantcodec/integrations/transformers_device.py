"""Pages of a layer in a pool on a CUDA device, and attention of decode steps over them there.

A row's pages are their numbers in the pool.  The exact tokens of all rows lie side by side in one batch, where a decode
step writes its tokens behind them; rows are views of it.  Everything that attention reads is on the device, and a step
launches work without waiting for it.  Whatever else happens to rows (pages made of them, beams, cropping) makes other
rows, from which the batch is filled again before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..codec import Pages
from ..cuda.attend import PageAttention
from ..cuda.codec import Codec
from ..cuda.device import device as cuda_device
from ..cuda.device import stream_of
from ..errors import UnsupportedError
from ..page_layout import PageLayout
from ..plan import Plan
from .transformers_exact import attend_exact, is_plain
from .transformers_rows import Row, Step
from .transformers_store import Part, merged

#: New tokens of a sequence that attention over pages takes at once; more are read like a prompt.
MOST_POSITIONS = 8
#: Pages that a pool grows by at least.
LEAST_GROWTH = 8


@dataclass(eq=False)
class Batch:
    """The rows of a layer side by side.

    ``keys`` and ``values`` ``[B, room, H, D]`` hold the exact tokens, ``exact`` of each row; ``coded`` tokens of each
    are in the pages of ``table`` ``[B, windows]``; ``padding`` of each stand before them.  The last four are int32 on
    the device; ``most_coded`` is the largest of ``coded``.
    """

    rows: list[Row]
    keys: torch.Tensor
    values: torch.Tensor
    exact: torch.Tensor
    coded: torch.Tensor
    padding: torch.Tensor
    table: torch.Tensor
    most_coded: int


class DeviceStore:
    """Pages in a pool uint8 ``[capacity, page_bytes]`` on one device; :class:`DeviceError` where that cannot be."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.plan, self.device = plan, device
        on = cuda_device(device.index or 0)
        self._pool = self._empty((0, PageLayout.of(plan).page_bytes), torch.uint8)
        with on.current, stream_of(None, [self._pool]):
            self.codec = Codec(plan, device=on.number)
        self._free: list[int] = []
        self._batch: Batch | None = None
        self._attentions: dict[int, tuple[tuple[Any, ...], PageAttention]] = {}
        self._refused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceStore:
        copied = object.__new__(DeviceStore)
        memo[id(self)] = copied
        # Kernels and tables are the same for all copies; the batch is filled again from the copied rows.
        copied.__dict__ = {**self.__dict__, "_free": list(self._free), "_batch": None, "_attentions": {}}
        copied._pool = self._empty(tuple(self._pool.shape), torch.uint8)
        copied._pool[:] = self._pool
        return copied

    def encode(self, parts: Sequence[Part]) -> list[NDArray[Any]]:
        ends = np.cumsum([keys.shape[1] // self.plan.window for keys, _ in parts])
        numbers = self._reserved(int(ends[-1]))
        # All in one call, which waits once to learn that numbers are finite.
        keys, values = parts[0] if len(parts) == 1 else (torch.cat(kind, dim=1) for kind in zip(*parts))
        rows = keys.transpose(0, 1), values.transpose(0, 1)
        self.codec.encode(*rows, pages=self._pool, numbers=self._uploaded(numbers))
        # Taken only now: after an error they are still free.
        self._free = self._free[len(numbers) :]
        return np.split(numbers, ends[:-1])

    def decode(self, pages: NDArray[Any], start: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = Pages(self._pool, len(pages) * self.plan.window)
        keys, values = self.codec.decode(found, start, dtype=like.dtype, numbers=self._uploaded(pages))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def keep(self, rows: Sequence[Row]) -> None:
        used = {int(number) for row in rows for number in row.pages}
        if not used:
            self._pool, self._batch = self._empty((0, self._pool.shape[1]), torch.uint8), None
        self._free = [number for number in range(len(self._pool)) if number not in used]

    def data(self, pages: NDArray[Any]) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._pool[self._uploaded(pages).long()].cpu().numpy()
        return found

    def put(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        numbers = self._reserved(len(data))
        self._pool[self._uploaded(numbers).long()] = torch.from_numpy(data.copy()).to(self.device)
        self._free = self._free[len(numbers) :]
        return numbers

    def held(self) -> Iterable[torch.Tensor]:
        yield self._pool
        if self._batch:
            yield from (x for x in vars(self._batch).values() if isinstance(x, torch.Tensor))

    def append(self, rows: list[Row], keys: torch.Tensor, values: torch.Tensor) -> list[Row]:
        length = keys.shape[2]
        if self._refused or not 1 <= length <= MOST_POSITIONS or not any(len(row.pages) for row in rows):
            self._batch = None
            return [row.appended(*new) for row, *new in zip(rows, keys, values)]
        batch = self._batch = self._filled(rows, length)
        ends = [row.exact for row in rows]
        with torch.no_grad():
            for held, new in ((batch.keys, keys), (batch.values, values)):
                if min(ends) == max(ends):
                    held[:, ends[0] : ends[0] + length] = new.transpose(1, 2)
                else:
                    numbers = torch.arange(len(rows), device=self.device)[:, None]
                    places = batch.exact.long()[:, None] + torch.arange(length, device=self.device)
                    held.index_put_((numbers, places), new.transpose(1, 2))
            batch.exact += length
        views = (held.transpose(1, 2).unbind(0) for held in (batch.keys, batch.values))
        batch.rows = [
            Row(row.padding, k[:, : end + length], v[:, : end + length], row.pages, row.decoded)
            for row, end, k, v in zip(rows, ends, *views)
        ]
        return batch.rows

    def _filled(self, rows: list[Row], length: int) -> Batch:
        """The batch with ``rows`` in it and room for ``length`` tokens more of each."""
        old, like = self._batch, rows[0].keys
        most = max(row.exact for row in rows) + length
        fits = old is not None and len(old.rows) == len(rows) and most <= old.keys.shape[1]
        if old and fits and old.rows is rows:
            return old
        changed = [i for i, row in enumerate(rows) if not old or not fits or row is not old.rows[i]]
        with torch.inference_mode(False), torch.no_grad():
            # Rows that moved within the batch would be overwritten before they are read.
            if old and fits and not any(_share(rows[i].keys, old.keys) for i in changed):
                keys, values = old.keys, old.values
            else:
                # A window waits until it is full, and is made a page after the step that fills it.
                shape = len(rows), most + self.plan.window + MOST_POSITIONS, like.shape[0], like.shape[2]
                keys, values = (self._empty(shape, like.dtype).zero_() for _ in range(2))
                changed = list(range(len(rows)))
            for i in changed:
                for held, of_row in ((keys, rows[i].keys), (values, rows[i].values)):
                    held[i, : rows[i].exact] = of_row.transpose(0, 1)
            # What the host knows of all rows, in one copy.
            windows = max(len(row.pages) for row in rows)
            facts = np.zeros((len(rows), 3 + windows), np.int32)
            for fact, row in zip(facts, rows):
                fact[:3] = row.exact, len(row.pages) * self.plan.window, row.padding
                if len(row.pages):
                    fact[3 : 3 + len(row.pages)] = row.pages
            there = self._uploaded(np.concatenate([facts[:, :3].T.reshape(-1), facts[:, 3:].reshape(-1)]))
            counts, table = there[: 3 * len(rows)].view(3, -1), there[3 * len(rows) :].view(len(rows), windows)
            exact, coded, padding = counts.unbind(0)
            return Batch(rows, keys, values, exact, coded, padding, table, windows * self.plan.window)

    def attend(self, step: Step, query: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor | None:
        batch = self._batch
        if self._refused or batch is None or batch.rows is not step.rows:
            return None
        length, dtype = query.shape[2], str(query.dtype).removeprefix("torch.")
        positions = 1 << (length - 1).bit_length()
        try:
            attention = self._attention(batch, query, positions, dtype)
        except UnsupportedError:
            self._refused = True
            return None
        plain = is_plain(mask, batch.padding, step, length)
        # The kernel's exact tokens are bfloat16; those of other models, and masks of one's own, are attended to apart.
        fused = plain and query.dtype == torch.bfloat16 and batch.keys.dtype == torch.bfloat16
        queries = query.transpose(1, 2)
        if positions > length:
            # The newest tokens are the last ones: what is put before them sees less, and is left out again.
            missing = queries.new_zeros(len(query), positions - length, *queries.shape[2:])
            queries = torch.cat([missing, queries], dim=1)
        queries = queries.contiguous()
        out = torch.empty_like(queries)
        lse = torch.empty(queries.shape[:3], dtype=torch.float32, device=self.device)
        tail = (batch.keys, batch.values, batch.exact) if fused else None
        attention(queries, self._pool, batch.table, batch.coded, tail=tail, scale=scale, causal=fused, out=out, lse=lse)
        out, lse = out[:, positions - length :], lse[:, positions - length :]
        if fused:
            return out
        exact, exact_lse = attend_exact(batch, step, query, scale, None if plain else mask)
        return merged(exact, exact_lse, out.to(torch.float32), lse)

    def _attention(self, batch: Batch, query: torch.Tensor, positions: int, dtype: str) -> PageAttention:
        """Kernels for this batch, made anew when it changes or has grown to twice as many tokens."""
        tokens = 1 << (batch.most_coded - 1).bit_length()
        wanted = (len(batch.rows), query.shape[1], dtype, tokens)
        found = self._attentions.get(positions)
        if found is None or found[0] != wanted:
            with self.codec.device.current, stream_of(None, [query]):
                made = PageAttention(
                    self.plan, len(batch.rows), query.shape[1], positions=positions, dtype=dtype, most_tokens=tokens,
                    masked=False,
                )  # fmt: skip
            found = self._attentions[positions] = wanted, made
        return found[1]

    def _reserved(self, count: int) -> NDArray[np.int32]:
        """Numbers of ``count`` free pages, the pool grown if there are too few."""
        have = len(self._pool)
        if count > len(self._free):
            wanted = have - len(self._free) + count
            pool = self._empty((wanted + max(LEAST_GROWTH, wanted // 4), self._pool.shape[1]), torch.uint8)
            pool[:have] = self._pool
            self._free += range(have, len(pool))
            self._pool = pool
        return np.array(self._free[:count], np.int32)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Tensors made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def _uploaded(self, numbers: NDArray[np.int32]) -> torch.Tensor:
        """``numbers`` on the device; from pinned memory, so that nobody waits."""
        with torch.inference_mode(False):
            found = torch.from_numpy(numbers)
            if self.device.type == "cuda":
                found = found.pin_memory()
            return found.to(self.device, non_blocking=True, copy=True)


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return int(a.untyped_storage().data_ptr()) == int(b.untyped_storage().data_ptr())
