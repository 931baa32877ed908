"""Where the pages of a layer live, and what is done to them there.

:func:`store_at` decides it, and nothing else does: pages of keys on a CUDA device are in a pool of that device, all
others are arrays of the CPU.  The layer knows only what :class:`Store` says.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..codec import Codec, Pages
from ..errors import DeviceError, InputError
from ..foreign import to_numpy
from ..plan import Plan
from .tensors import DTYPES, as_torch
from .transformers_rows import Row, Step

#: Keys and values ``[H, T, D]``.
Part = tuple[torch.Tensor, torch.Tensor]


class Store(Protocol):
    """The pages of one layer whose keys are on ``device``.

    What stands for pages in a :class:`Row` is an array with one entry for each of them; slicing it and joining such
    arrays gives other pages' entries.
    """

    device: torch.device
    plan: Plan

    def encode(self, parts: Sequence[Part]) -> list[NDArray[Any]]:
        """Pages of whole windows of several rows; raises :class:`InputError` for numbers that are not finite."""
        ...

    def decode(self, pages: NDArray[Any], start: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[H, C - start, D]`` of the tokens from ``start`` on, of the dtype of ``like``."""
        ...

    def append(self, rows: list[Row], keys: torch.Tensor, values: torch.Tensor) -> list[Row]:
        """``rows`` with tokens ``[B, H, t, D]`` more.  The old rows must not be appended to a second time."""
        ...

    def attend(self, step: Step, query: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Output ``[B, L, Q, D]`` of queries ``[B, Q, L, D]``; None where this store cannot read pages for them."""
        ...

    def keep(self, rows: Sequence[Row]) -> None:
        """Pages of others than ``rows`` may be overwritten from now on."""
        ...

    def data(self, pages: NDArray[Any]) -> NDArray[np.uint8]:
        """The pages themselves, uint8 ``[pages, page_bytes]`` in the CPU's memory."""
        ...

    def put(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """Take over pages in the CPU's memory."""
        ...

    def held(self) -> Iterable[torch.Tensor]:
        """Tensors that the store keeps alive beside those of the rows."""
        ...


def store_at(device: torch.device, plan: Plan, threads: int) -> Store:
    """The store for keys on ``device``.

    Without CuPy, or with a GPU that is too old for the kernels, pages stay in the CPU's memory, with a warning.
    """
    if on_gpu(device):
        from .transformers_device import DeviceStore

        try:
            return DeviceStore(plan, device)
        except DeviceError as reason:
            _warn(str(reason))
    return HostStore(plan, device, threads)


def on_gpu(device: torch.device) -> bool:
    """Whether pages of keys on ``device`` belong there."""
    return str(device.type) == "cuda"


@lru_cache(maxsize=8)
def _warn(reason: str) -> None:
    warnings.warn(f"pages stay in the CPU's memory, and every step moves data: {reason}", stacklevel=4)


class HostStore:
    """Pages as arrays uint8 ``[pages, page_bytes]`` in the CPU's memory."""

    def __init__(self, plan: Plan, device: torch.device, threads: int) -> None:
        self.plan, self.device = plan, device
        self._codec = Codec(plan, threads=threads)

    def encode(self, parts: Sequence[Part]) -> list[NDArray[Any]]:
        return [self._codec.encode(*host_rows(*part)).data for part in parts]

    def decode(self, pages: NDArray[Any], start: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = Pages(pages, len(pages) * self.plan.window)
        keys, values = self._codec.decode(found, start, dtype=DTYPES[like.dtype])
        return as_torch(keys).to(like.device).transpose(0, 1), as_torch(values).to(like.device).transpose(0, 1)

    def append(self, rows: list[Row], keys: torch.Tensor, values: torch.Tensor) -> list[Row]:
        return [row.appended(*new) for row, *new in zip(rows, keys, values)]

    def attend(self, step: Step, query: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor | None:
        masks = [None if mask is None else mask[i if len(mask) > 1 else 0] for i in range(len(query))]
        each = zip(step.rows, query, masks)
        return torch.stack([self._attend(step, row, of_row, scale, hidden) for row, of_row, hidden in each])

    def _attend(
        self, step: Step, row: Row, query: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Output float32 ``[L, Q, D]`` of one sequence; ``mask`` ``[1 or Q, L, T]``, true or zero where visible."""
        coded, exact = step.columns(row)
        heads, (all_heads, length, dim) = len(row.keys), query.shape
        queries = query.to(torch.float32).reshape(heads, -1, length, dim)
        logits = torch.matmul(queries, row.keys.to(torch.float32).transpose(1, 2)[:, None]) * scale
        if mask is None:
            # Only causal attention comes without a mask: the last query sees everything.
            visible = torch.arange(step.tokens)[None] <= torch.arange(step.tokens - length, step.tokens)[:, None]
            mask = visible[None].to(query.device)
        additive = as_additive(mask)
        if additive[..., coded.start : coded.stop].any():
            raise hidden_pages()
        columns = torch.from_numpy(exact).to(mask.device)
        bias = additive[..., columns].expand(all_heads, -1, -1) if len(additive) == 1 else additive[..., columns]
        logits = logits + bias.reshape(heads, -1, length, len(exact))
        lse = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - lse[..., None].nan_to_num(neginf=0.0))
        out = torch.matmul(weights, row.values.to(torch.float32)[:, None])
        out, lse = out.reshape(all_heads, length, dim).transpose(0, 1), lse.reshape(all_heads, length).T
        if not len(row.pages):
            return out
        pages = Pages(row.pages, len(row.pages) * self.plan.window)
        found, sums = self._codec.attend(query.transpose(0, 1).cpu(), pages, scale=scale)
        return merged(out, lse, as_torch(found).to(out.device), as_torch(sums).to(out.device))

    def keep(self, rows: Sequence[Row]) -> None:
        """Nothing: arrays live as long as rows."""

    def data(self, pages: NDArray[Any]) -> NDArray[np.uint8]:
        return pages

    def put(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        return data

    def held(self) -> Iterable[torch.Tensor]:
        return ()


def host_rows(keys: torch.Tensor, values: torch.Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values ``[H, T, D]`` as the codec's rows ``[T, H, D]`` in the CPU's memory."""
    return to_numpy(keys.transpose(0, 1).cpu(), "keys"), to_numpy(values.transpose(0, 1).cpu(), "values")


def as_additive(mask: torch.Tensor) -> torch.Tensor:
    """A mask of what is visible as numbers to add to logits; one of numbers as it is."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


def hidden_pages() -> InputError:
    return InputError("the mask hides tokens that are in pages; only padding may be hidden", code="attention-mask")


def merged(out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Attention ``[..., D]`` over two sets of tokens from that over each, by their log-sum-exps ``[...]``."""
    together = torch.logaddexp(lse, other_lse)
    share = torch.exp(other_lse - together)[..., None]
    return share * other_out + torch.exp(lse - together)[..., None] * out
