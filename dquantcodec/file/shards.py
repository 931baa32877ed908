"""Files that hold parts of one cache by KV heads, read as if they were one file (specification, clause 3.6: shard)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import IdentityError, InputError
from .header import Header
from .layer import KINDS, Layer
from .reader import Reader
from .tensor import LayerReader, page_stretches


@dataclass(frozen=True)
class Span:
    """Tokens ``first`` to before ``end`` of a sequence that the coded layers hold in one run of pages, or exactly."""

    paged: bool
    first: int
    end: int


@dataclass(frozen=True)
class Source:
    """A head group where it stands: its heads among those of all files, the file, its number in the file's layer."""

    heads: slice
    file: int
    group: int


class Shards:
    """The files of one cache in the order of their heads: one file, or all parts.

    header
        That of a file with all these heads.

    Raises :class:`IdentityError` for files that do not belong together (``identity-<field>``), or of which one is
    missing (``identity-shard``).
    """

    def __init__(self, readers: Sequence[Reader]) -> None:
        if not readers:
            raise InputError("there is no file to read", code="shard-files")
        self.readers = sorted(readers, key=lambda reader: reader.view.info.shard)
        _check_complete(self.readers)
        _check_alike(self.readers)
        first = self.readers[0].view
        columns = zip(*(reader.view.layers for reader in self.readers))
        layers = tuple(_joined(layers) for layers in columns)
        info = first.info if len(self.readers) == 1 else replace(first.info, shard=(0, 1))
        self.header: Header = replace(first, layers=layers, info=info)
        self.window = self.header.window
        self.sequences = len(self.readers[0].sequences)

    def groups(self, place: int) -> list[Source]:
        """The head groups of a coded layer, in order."""
        found = []
        before = 0
        for number, reader in enumerate(self.readers):
            layer = reader.view.layers[place]
            for group, heads in enumerate(layer.groups):
                found.append(Source(slice(before + heads.start, before + heads.stop), number, group))
            before += layer.kv_heads
        return found

    def group(self, sequence: int, place: int, source: Source) -> LayerReader:
        return self.readers[source.file].sequences[sequence].layers[place].groups[source.group]

    def spans(self, sequence: int) -> list[Span]:
        return _spans(self.readers[0], sequence)

    def read(
        self, sequence: int, place: int, kind: str, tokens: tuple[int, int], heads: slice, dtype: DTypeLike
    ) -> NDArray[Any]:
        """``tokens`` of ``heads`` ``[t, heads, D]``; touches only head groups that have some of them."""
        parts = []
        for layer, first in self._layers(sequence, place):
            low, high = max(heads.start, first), min(heads.stop, first + layer.spec.kv_heads)
            if low < high:
                rows: NDArray[Any] = getattr(layer, kind).read(*tokens, dtype)
                parts.append(rows[:, low - first : high - first])
        return np.concatenate(parts, axis=1)

    def _layers(self, sequence: int, place: int) -> Iterator[tuple[LayerReader, int]]:
        """The layer in parts as small as they can be read, each with its first head among those of all files."""
        before = 0
        for reader in self.readers:
            layer = reader.sequences[sequence].layers[place]
            for part in layer.groups or (layer,):
                yield part, before
                before += part.spec.kv_heads


def _joined(layers: Sequence[Layer]) -> Layer:
    heads = sum(layer.kv_heads for layer in layers)
    plans = [plan for layer in layers for plan in layer.plans]
    return replace(layers[0], kv_heads=heads, profile=plans) if plans else replace(layers[0], kv_heads=heads)


def _spans(reader: Reader, sequence: int) -> list[Span]:
    found = []
    for paged, group in groupby(reader.sequences[sequence].log.stretches, key=lambda stretch: stretch.paged):
        part = list(group)
        runs = page_stretches(part, reader.rules.run.window) if paged else [part]
        found += [Span(paged, run[0].first, run[-1].end) for run in runs]
    return found


def _check_complete(readers: Sequence[Reader]) -> None:
    """One file may be any part; several must be all parts, once each."""
    shards = [reader.view.info.shard for reader in readers]
    count = shards[0][1]
    if len(readers) > 1 and shards != [(part, count) for part in range(count)]:
        raise IdentityError(
            f"the files are the parts {', '.join(f'{part} of {parts}' for part, parts in shards)} of a model's KV "
            "heads; give one file, or every part once",
            code="identity-shard",
            field="shard",
            found=shards,
        )


def _check_alike(readers: Sequence[Reader]) -> None:
    first, *others = readers
    expected = _identity(first)
    for reader in others:
        for field, found in _identity(reader).items():
            if found == expected[field]:
                continue
            mine, theirs, where = found, expected[field], ""
            if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
                item = next(i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b)
                mine, theirs = mine[item], theirs[item]
                where = f" in {'sequence' if field == 'tokens' else 'layer'} {item}"
            raise IdentityError(
                f"{field.replace('_', ' ')} {mine!r}{where} do not go with {theirs!r} of {first.path}; the files are "
                "parts of different caches",
                code=f"identity-{field.replace('_', '-')}",
                path=reader.path,
                field=field,
                found=mine,
                expected=theirs,
            )


def _identity(reader: Reader) -> dict[str, Any]:
    """What files of one cache agree in."""
    header = reader.view
    return {
        "model": header.info.model,
        "revision": header.info.revision,
        "positions_start": header.info.positions_start,
        "layers": [(layer.number, layer.storage) for layer in header.layers],
        "kv_heads": [layer.kv_heads for layer in header.layers],
        "head_dim": [layer.head_dim for layer in header.layers],
        "dtype": [layer.dtype for layer in header.layers],
        "window": header.window,
        "tokens": [
            [(span.paged, span.first, span.end) for span in _spans(reader, sequence)]
            for sequence in range(len(reader.sequences))
        ],
    }


def read_rows(
    shards: Shards, sequence: int, places: Sequence[int], heads: Sequence[slice], tokens: tuple[int, int]
) -> list[NDArray[Any]]:
    """Key and value of each of ``places``, of its ``heads``, in the layer's dtype."""
    layers = shards.header.layers
    return [
        shards.read(sequence, place, kind, tokens, part, layers[place].array_dtype)
        for place, part in zip(places, heads)
        for kind in KINDS
    ]
