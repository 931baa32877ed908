"""Rows of a file's layers into pages, by plans that are given or fitted to the first rows.

What is not finite is told in layers, tokens and heads of the file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..profile import Profile
from .coding import Coding
from .header import Header
from .layer import Layer
from .runs import RunLayout


class PageEncoder:
    """Where a writer's pages come from.

    ``run`` says which head groups there are, ``present`` which layers the file stores.  Threads take head groups where
    there are several, otherwise the pages of the one.
    """

    def __init__(self, coding: Coding, run: RunLayout, present: Sequence[int]) -> None:
        self._coding = coding
        self._run = run
        self._present = present
        self._shared = len(run.slots) > 1 or coding.overlapped
        self.pool = ThreadPoolExecutor(coding.threads) if self._shared and coding.threads > 1 else None

    def close(self) -> None:
        if self.pool:
            self.pool.shutdown(cancel_futures=True)

    def use(self, run: RunLayout) -> None:
        """Encode by the plans of ``run`` from here on."""
        self._run = run
        plans = {id(slot.plan): slot.plan for slot in run.slots}
        threads = 1 if self._shared else self._coding.threads
        codecs = {key: self._coding.codec(plan, threads) for key, plan in plans.items()}
        self._codecs = [codecs[id(slot.plan)] for slot in run.slots]

    def fit(self, header: Header, profiles: Sequence[Profile | None], rows: list[NDArray[Any]]) -> Header:
        """``header`` with plans fitted to ``rows`` (key, value of each present layer), which follow the sinks.

        ``profiles`` has one for each layer that is to be fitted, None for the others.
        """
        from ..fit import fit_plan

        pairs = {place: rows[2 * i : 2 * i + 2] for i, place in enumerate(self._present)}

        def fit(place: int) -> Layer:
            layer, profile = header.layers[place], profiles[place]
            if profile is None:
                return layer
            plans = []
            for heads in layer.groups:
                with _telling_tokens(place, header.sinks, heads.start):
                    plans.append(fit_plan(profile, *(rows[:, heads] for rows in pairs[place])))
            return replace(layer, profile=plans)

        places = range(len(header.layers))
        layers = self.pool.map(fit, places) if self.pool else map(fit, places)
        return replace(header, layers=tuple(layers))

    def encode(self, rows: list[NDArray[Any]], first: int) -> list[NDArray[np.uint8]]:
        """Pages of each coded layer for ``rows`` (key, value of each present layer) from token ``first`` on."""
        pairs = {place: rows[2 * i : 2 * i + 2] for i, place in enumerate(self._present)}

        tokens = len(rows[0])
        slots = range(len(self._run.slots))
        # Threads that wait for a device share out a layer's windows where there are fewer layers than threads.
        shares = -(-2 * self._coding.threads // max(1, len(slots))) if self._coding.overlapped else 1
        step = max(1, -(-self._run.windows(tokens) // shares)) * self._run.window if slots else tokens

        def encode(part: tuple[int, int]) -> NDArray[np.uint8]:
            number, begin = part
            slot = self._run.slots[number]
            with _telling_tokens(slot.layer, first + begin, slot.heads.start):
                arrays = [array[begin : begin + step, slot.heads] for array in pairs[slot.layer]]
                pages: NDArray[np.uint8] = self._codecs[number].encode(*arrays).data
                return pages

        parts = [(number, begin) for number in slots for begin in range(0, tokens, step)]
        coded = list(self.pool.map(encode, parts) if self.pool else map(encode, parts))
        if step >= tokens:
            return coded
        each = len(parts) // len(slots)
        return [np.concatenate(coded[i : i + each]) for i in range(0, len(coded), each)]


@contextlib.contextmanager
def _telling_tokens(layer: int, first: int, first_head: int) -> Iterator[None]:
    """Errors about numbers that are not finite, told in tokens of the sequence and heads of the layer."""
    try:
        yield
    except InputError as error:
        assert error.code == "input-nonfinite", "shapes are checked when rows are taken in"
        # The codec counts from the rows it was given.
        token, head = (int(str(error.where[name])) for name in ("token", "head"))
        where: dict[str, Any] = {**error.where, "layer": layer, "token": first + token, "head": first_head + head}
        raise InputError(
            f"{where['kind']} of layer {layer}, token {where['token']}, head {where['head']}, channel "
            f"{where['channel']} is not finite; clean the tensor or choose what to put instead",
            code=error.code,
            **where,
        ) from None
