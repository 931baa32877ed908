"""One layer of a :class:`~dquantcodec.integrations.transformers.DQuantCache`: exact tokens, and pages between them.

Every sequence of a batch is a :class:`Row` of its own.  Rows never change: an update makes new ones, which share pages
with the old.  Reordering and repeating a batch therefore copies nothing, and beams share what they have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import BaseQuantizedLayer

from ..errors import InputError
from ..fit import fit_plan
from ..plan import Plan
from ..profile import Profile
from .tensors import DTYPES
from .transformers_rows import Row, Step
from .transformers_store import Store, host_rows, store_at

#: The name of the attention that reads pages, for ``model.set_attn_implementation``.
ATTENTION = "dquant"


@dataclass(frozen=True)
class Settings:
    """What all layers of a cache have in common; see :class:`DQuantCache`."""

    profile: Profile
    sinks: int
    recent: int
    fit_windows: int
    keep_decoded: bool
    threads: int


class DQuantLayer(BaseQuantizedLayer):  # type: ignore[misc]  # transformers has no types
    """Keys and values of one full-attention layer.

    ``update`` returns all tokens, those in pages decoded.  What an update adds is exact in what it returns, and coded
    afterwards if it is due.  A page is coded once and never again.
    """

    is_croppable = True

    cumulative_length: int

    def __init__(
        self,
        number: int,
        settings: Settings,
        config: Any,
        padding: Sequence[int] | None = None,
        plan: Plan | None = None,
    ) -> None:
        super().__init__()
        self.number = number
        self.settings = settings
        self.rows: list[Row] = []
        #: The plan of the pages, once it is fitted; kept over :meth:`reset`.
        self.plan = plan
        #: Where pages live, once there may be any.
        self.store: Store | None = None
        self._config = config
        self._padding = padding

    @property
    def window(self) -> int:
        return self.settings.profile.window

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape != value_states.shape or key_states.dtype not in DTYPES:
            raise InputError(
                f"layer {self.number} has keys {list(key_states.shape)} and values {list(value_states.shape)} of "
                f"{key_states.dtype}; pages hold equal shapes of float16, bfloat16 or float32: name the layer in "
                "exact_layers",
                code="cache-layer",
                layer=self.number,
            )
        super().lazy_initialization(key_states, value_states)
        batch, heads, _, dim = key_states.shape
        if self.plan and (self.plan.kv_heads, self.plan.head_dim) != (heads, dim):
            raise InputError(
                f"layer {self.number} has {heads} heads of {dim}, its plan {self.plan.kv_heads} of "
                f"{self.plan.head_dim}",
                code="layer-profile",
                layer=self.number,
            )
        padding = self._padding or [0]
        if batch % len(padding):
            raise InputError(
                f"a batch of {batch} sequences, but a mask of {len(padding)}", code="cache-batch", layer=self.number
            )
        empty = key_states.new_empty(heads, 0, dim)
        pages = np.empty((0, 0), np.uint8)
        repeats = batch // len(padding)  # beams of one prompt follow one another
        self.rows = [Row(p, empty, empty, pages) for p in padding for _ in range(repeats)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[B, H, t, D]``; returns keys and values ``[B, H, T, D]`` of all of them, padding as zeros.

        With the attention :data:`ATTENTION` and pages there, it returns the new tokens alone, marked with the
        :class:`Step` that the attention needs.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if len(self.rows) != len(key_states):
            raise InputError(
                f"layer {self.number} holds {len(self.rows)} sequences and gets {len(key_states)}",
                code="cache-batch",
                layer=self.number,
            )
        self._move(key_states.device)
        rows = self._appended(key_states, value_states)
        tokens = self.cumulative_length + key_states.shape[2]
        result: tuple[torch.Tensor, torch.Tensor]
        if self.store and any(len(row.pages) for row in rows):
            if getattr(self._config, "_attn_implementation", None) == ATTENTION:
                decoded = partial(self._all, rows, tokens)
                result = marked(key_states, Step(rows, self.store, self.settings.sinks, tokens, decoded)), value_states
            else:
                result = self._all(rows, tokens)
        elif any(row.padding for row in rows):
            result = self._all(rows, tokens)
        else:
            result = torch.stack([row.keys for row in rows]), torch.stack([row.values for row in rows])
        self.rows = self._coded(rows)
        self.cumulative_length = tokens
        return result

    def _move(self, device: torch.device) -> None:
        """Everything to ``device``, where keys are from now on, and pages to the store for it."""
        before = self.store
        if self.plan and (before is None or before.device != device):
            self.store = store_at(device, self.plan, self.settings.threads)
        if self.store is before and all(row.keys.device == device for row in self.rows):
            return
        moved: dict[int, NDArray[Any]] = {}  # rows share pages there as they did here
        rows = []
        for row in self.rows:
            if before and self.store and len(row.pages) and id(row.pages) not in moved:
                moved[id(row.pages)] = self.store.put(before.data(row.pages))
            keys, values = row.keys.to(device), row.values.to(device)
            decoded = row.decoded and (row.decoded[0].to(device), row.decoded[1].to(device))
            rows.append(Row(row.padding, keys, values, moved.get(id(row.pages), row.pages), decoded))
        self.rows = rows

    def _appended(self, keys: torch.Tensor, values: torch.Tensor) -> list[Row]:
        """Rows with tokens ``[B, H, t, D]`` more, padding left out."""
        skipped = [max(0, row.padding - self.cumulative_length) for row in self.rows]
        if self.store and not any(skipped):
            return self.store.append(self.rows, keys, values)
        return [row.appended(k[:, n:], v[:, n:]) for row, k, v, n in zip(self.rows, keys, values, skipped)]

    def _all(self, rows: Sequence[Row], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, H, tokens, D]`` of ``rows``."""
        heads, _, dim = rows[0].keys.shape
        keys, values = (rows[0].keys.new_empty(len(rows), heads, tokens, dim) for _ in range(2))
        for row, all_keys, all_values in zip(rows, keys, values):
            coded = len(row.pages) * self.window
            sinks = self.settings.sinks if coded else row.exact
            first = min(row.padding, tokens)
            end = first + sinks + coded
            for exact, part, out in zip((row.keys, row.values), self._decoded(row), (all_keys, all_values)):
                out[:, :first] = 0
                out[:, first : first + sinks] = exact[:, :sinks]
                out[:, first + sinks : end] = part
                out[:, end:] = exact[:, sinks:]
        return keys, values

    def _decoded(self, row: Row, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[H, C, D]`` of a row's coded tokens from ``start`` on."""
        if row.decoded is not None:
            return row.decoded[0][:, start:], row.decoded[1][:, start:]
        if not len(row.pages):
            return row.keys[:, :0], row.values[:, :0]
        assert self.store
        return self.store.decode(row.pages, start, row.keys)

    def _coded(self, rows: list[Row]) -> list[Row]:
        """``rows`` with every window in a page that is due."""
        due = [max(0, row.exact - self.settings.sinks - self.settings.recent) // self.window for row in rows]
        if not any(due):
            return rows
        if self.plan is None:
            # Of all rows the one that came first, had the tokens come one by one.
            first = min(range(len(rows)), key=lambda i: rows[i].padding)
            if due[first] < self.settings.fit_windows:
                return rows
            tokens = self.settings.fit_windows * self.window
            with self._telling(rows[first]):
                self.plan = fit_plan(self.settings.profile, *host_rows(*self._waiting(rows[first], tokens)))
        if self.store is None:
            self.store = store_at(rows[0].keys.device, self.plan, self.settings.threads)
        self.store.keep(rows)
        parts = {i: self._waiting(rows[i], windows * self.window) for i, windows in enumerate(due) if windows}
        try:
            made = dict(zip(parts, self.store.encode(list(parts.values()))))
        except InputError:
            for i, part in parts.items():  # one by one it is known whose numbers they are
                with self._telling(rows[i]):
                    self.store.encode([part])
            raise
        return [self._with_pages(row, made[i]) if i in made else row for i, row in enumerate(rows)]

    def _waiting(self, row: Row, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[H, tokens, D]`` of the oldest tokens that wait."""
        part = slice(self.settings.sinks, self.settings.sinks + tokens)
        return row.keys[:, part], row.values[:, part]

    def _with_pages(self, row: Row, made: NDArray[Any]) -> Row:
        """``row`` with its oldest waiting windows in the pages ``made``."""
        sinks, tokens = self.settings.sinks, len(made) * self.window
        keys, values = (torch.cat([x[:, :sinks], x[:, sinks + tokens :]], dim=1) for x in (row.keys, row.values))
        before = row.pages if len(row.pages) else made[:0]
        coded = replace(row, keys=keys, values=values, pages=np.concatenate([before, made]))
        if not self.settings.keep_decoded:
            return coded
        new = self._decoded(replace(coded, pages=made, decoded=None))
        old = row.decoded or (keys[:, :0], values[:, :0])
        return replace(coded, decoded=(torch.cat([old[0], new[0]], dim=1), torch.cat([old[1], new[1]], dim=1)))

    @contextmanager
    def _telling(self, row: Row) -> Iterator[None]:
        """Errors about numbers that are not finite, told in layers, and in tokens of the sequence without padding."""
        try:
            yield
        except InputError as error:
            if error.code != "input-nonfinite":
                raise
            token = self.settings.sinks + len(row.pages) * self.window + int(str(error.where["token"]))
            where: dict[str, Any] = {**error.where, "layer": self.number, "token": token}
            raise InputError(
                f"{where['kind']} of layer {self.number}, token {token}, head {where['head']}, channel "
                f"{where['channel']} is not finite: the model overflows in this dtype",
                code=error.code,
                **where,
            ) from None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens.

        Whole pages before the cut stay as they are.  Tokens left over from a page that is cut become exact ones that
        hold their decoded values; should their window fill again, they are coded a second time.
        """
        if tokens_to_remove > 0:
            raise InputError(
                f"crop takes minus the number of tokens to remove, not {tokens_to_remove}", code="cache-crop"
            )
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        self.cumulative_length = max(0, self.cumulative_length + tokens_to_remove)
        self.rows = [self._cut(row, max(0, self.cumulative_length - row.padding)) for row in self.rows]

    def _cut(self, row: Row, tokens: int) -> Row:
        """The first ``tokens`` tokens of a row, padding not counted."""
        coded = len(row.pages) * self.window
        exact = tokens - coded
        if exact >= (self.settings.sinks if coded else 0):
            return replace(row, keys=row.keys[:, :exact].clone(), values=row.values[:, :exact].clone())
        sinks = min(tokens, self.settings.sinks)
        pages, rest = divmod(tokens - sinks, self.window)
        cut = replace(row, pages=row.pages[: pages + 1], decoded=None)
        tail = self._decoded(cut, pages * self.window)
        keys, values = (
            torch.cat([x[:, :sinks], part[:, :rest]], dim=1) for x, part in zip((row.keys, row.values), tail)
        )
        decoded = None
        if row.decoded:
            decoded = tuple(x[:, : pages * self.window].clone() for x in row.decoded)
        return Row(row.padding, keys, values, row.pages[:pages].copy(), decoded)

    def restore(self, rows: list[Row], tokens: int) -> None:
        """Take over ``rows`` of a file, ``tokens`` long with their padding; they hold the pages themselves."""
        super().lazy_initialization(rows[0].keys[None], rows[0].values[None])
        self._move(rows[0].keys.device)
        if self.store:
            rows = [replace(row, pages=self.store.put(row.pages)) if len(row.pages) else row for row in rows]
        if self.settings.keep_decoded:
            rows = [replace(row, decoded=self._decoded(row)) if len(row.pages) else row for row in rows]
        self.rows, self.cumulative_length = rows, tokens

    def reset(self, padding: Sequence[int] | None = None) -> None:
        """Forget all tokens and the padding of their prompts; ``padding`` is that of the prompts to come."""
        super().reset()
        self.rows = []
        if self.store:
            self.store.keep(self.rows)
        self._padding = padding

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rows = [self.rows[i] for i in beam_idx.tolist()] if self.rows else []

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [row for row in self.rows for _ in range(repeats)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if not self.rows:
            return  # as the stock layers, which select nothing from nothing
        places = torch.arange(len(self.rows), device=indices.device)[indices]
        self.rows = [self.rows[i] for i in places.tolist()]

    def offload(self) -> None:
        """Nothing: pages are small and exact tokens are few."""

    def prefetch(self) -> None:
        """Nothing; see :meth:`offload`."""

    def held(self) -> Iterable[torch.Tensor | NDArray[Any]]:
        """All arrays that the layer keeps alive."""
        for row in self.rows:
            yield from (row.keys, row.values, row.pages, *(row.decoded or ()))
        if self.store:
            yield from self.store.held()

    def _quantize(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError("keys and values are coded together")

    def _dequantize(self, q_tensor: Any) -> torch.Tensor:
        raise NotImplementedError("keys and values are decoded together")


def marked(keys: torch.Tensor, step: Step) -> torch.Tensor:
    """``keys`` as another tensor object that carries ``step``."""
    keys = keys.view_as(keys)
    keys._dquant_step = step
    return keys
