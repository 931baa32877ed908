"""Measuring a decoded layer against its original, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..compare import AttentionSums, ErrorSums, LayerQuality, attend_block, error_sums, group_queries, relative_error
from ..errors import InputError
from .progress import Advance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tensors import KVSource, QuerySource

BLOCK_BYTES = 16 << 20

_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Subject:
    """One layer to measure: its number, its place in the file, the original, the open file, and queries if any.

    ``scale`` multiplies the logits, ``None`` means ``1/sqrt(D)``; ``encode_threads`` asks for the encoding speed too.
    Speeds are those of the fastest of ``repeats`` runs: a sample of milliseconds needs more than one.
    """

    number: int
    place: int
    source: KVSource
    reader: Any
    queries: QuerySource | None = None
    scale: float | None = None
    encode_threads: int | None = None
    repeats: int = 1


def measure_layer(subject: Subject, advance: Advance) -> LayerQuality:
    """The row of one layer over all its sequences; ``advance`` is called with the bytes of original just compared."""
    totals = _Totals()
    for sequence in range(subject.source.sequences):
        _measure_sequence(subject, sequence, totals, advance)
    layer = subject.reader.layers[subject.place]
    coded = layer.spec.storage == "coded"
    values = subject.source.layer(subject.number).key.values * 2
    return LayerQuality(
        layer=subject.number,
        profile=layer.plans[0].profile_name if coded else layer.spec.storage,
        values=values,
        stored_bytes=sum(s.layers[subject.place].stored_bytes for s in subject.reader.sequences),
        key_nmse=totals.key.nmse,
        key_centred_nmse=totals.key.centred_nmse,
        value_nmse=totals.value.nmse,
        attention_error=math.sqrt(totals.attention[0] / totals.attention[1]) if totals.attention[1] else None,
        key_drift=totals.drifted[0] / totals.coded if totals.coded else None,
        value_drift=totals.drifted[1] / totals.coded if totals.coded else None,
        encode_speed=_rate(totals.encoded_values, totals.encode_seconds),
        decode_speed=_rate(values, totals.decode_seconds),
    )


@dataclass
class _Totals:
    """Sums over sequences and blocks; ``drifted`` counts heads' worth of drifted key and value symbols."""

    key: ErrorSums = field(default_factory=ErrorSums)
    value: ErrorSums = field(default_factory=ErrorSums)
    attention: tuple[float, float] = (0.0, 0.0)
    drifted: tuple[float, float] = (0.0, 0.0)
    coded: int = 0
    encoded_values: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


def _measure_sequence(subject: Subject, sequence: int, totals: _Totals, advance: Advance) -> None:
    layer = subject.reader.sequences[sequence].layers[subject.place]
    coded = layer.coded_tokens
    window = layer.plans[0].window if coded else 128
    parts = _parts(layer, subject.encode_threads) if coded else []
    firsts = [run.first for run in parts[0].runs] if parts else []  # those of all head groups
    attention = _Attention.of(subject, sequence)
    _warm(subject, layer, parts, firsts[0] if firsts else 0)
    for start, stop, number in _blocks(layer, firsts, window):
        exact = [subject.source.read(subject.number, kind, sequence, start, stop) for kind in ("key", "value")]
        decoded, seconds = _timed(partial(_decode, layer, start, stop), subject.repeats)
        totals.decode_seconds += seconds
        totals.key += error_sums(exact[0], decoded[0], window)
        totals.value += error_sums(exact[1], decoded[1], window)
        if attention:
            attention.add(exact, decoded, start)
        for part in parts:
            run = None if number is None else part.runs[number]
            tokens = min(stop, run.first + run.pages.tokens) - start if run else 0
            if not run or tokens <= 0:
                continue
            rows = [array[:tokens, part.heads] for array in exact]
            shares = part.codec.drift_share(*rows, _cut(run.pages, start - run.first, tokens, window))
            streams = tokens * rows[0].shape[1]
            totals.drifted = (totals.drifted[0] + shares[0] * streams, totals.drifted[1] + shares[1] * streams)
            totals.coded += streams
            if subject.encode_threads:
                totals.encode_seconds += _timed(partial(part.codec.encode, *rows), subject.repeats)[1]
                totals.encoded_values += 2 * rows[0].size
        advance(sum(array.nbytes for array in exact))
    if attention:
        error, energy = attention.error()
        totals.attention = (totals.attention[0] + error, totals.attention[1] + energy)


def _decode(layer: Any, start: int, stop: int) -> list[NDArray[np.float32]]:
    return [getattr(layer, kind).read(start, stop, dtype=np.float32) for kind in ("key", "value")]


def _timed(work: Callable[[], _T], repeats: int) -> tuple[_T, float]:
    """What ``work`` returns, and the seconds of the fastest of its runs."""
    fastest = math.inf
    for _ in range(repeats):
        began = perf_counter()
        result = work()
        fastest = min(fastest, perf_counter() - began)
    return result, fastest


@dataclass(frozen=True, eq=False)
class _Part:
    """A head group of a layer: its heads, its runs of pages, its codec."""

    heads: slice
    runs: Sequence[Any]
    codec: Any


def _parts(layer: Any, threads: int | None) -> list[_Part]:
    from ..codec import Codec

    return [
        _Part(heads, group.page_runs(), Codec(group.plan, threads=threads or 1))
        for group, heads in zip(layer.groups, layer.spec.groups)
    ]


def _warm(subject: Subject, layer: Any, parts: list[_Part], first: int) -> None:
    """Run each kernel once, so that compiling it is not taken for its speed."""
    if parts:
        rows = _decode(layer, first, first + 1)
        if subject.encode_threads:
            for part in parts:
                part.codec.encode(*(array[:, part.heads] for array in rows))


def _blocks(layer: Any, firsts: Sequence[int], window: int) -> Iterator[tuple[int, int, int | None]]:
    """Token ranges that cover the layer, each with the number of the run of pages before whose successor it lies, or
    None; those that reach into a run begin with one of its pages."""
    token_bytes = 8 * layer.spec.kv_heads * layer.spec.head_dim
    step = max(1, BLOCK_BYTES // token_bytes // window) * window
    edges = [(0, None), *((first, number) for number, first in enumerate(firsts)), (layer.tokens, None)]
    for (first, number), (end, _) in pairwise(edges):
        for start in range(first, end, step):
            yield start, min(start + step, end), number


def _cut(pages: Any, first: int, tokens: int, window: int) -> Any:
    """The pages of ``tokens`` tokens from ``first``, a multiple of ``window``, on."""
    from ..codec import Pages

    return Pages(pages.data[first // window : -(-(first + tokens) // window)], tokens)


class _Attention:
    """Attention over the original and over the decoded tokens, side by side."""

    def __init__(self, subject: Subject, query: NDArray[np.float32]) -> None:
        layer = subject.source.layer(subject.number)
        self._grouped = group_queries(query, layer.kv_heads)
        self._positions = query.shape[1]
        self._tokens = subject.source.tokens
        self._scale = subject.scale
        empty = AttentionSums.empty(layer.kv_heads, self._grouped.shape[1], layer.head_dim)
        self._sums = [empty, empty]

    @staticmethod
    def of(subject: Subject, sequence: int) -> _Attention | None:
        if subject.queries is None or subject.number not in subject.queries.layers:
            return None
        query = subject.queries.read(subject.number, sequence)
        layer = subject.source.layer(subject.number)
        heads, positions, width = query.shape
        if width != layer.head_dim or heads % layer.kv_heads or positions > subject.source.tokens:
            raise InputError(
                f"queries of layer {subject.number} are {heads} heads of {width} at {positions} positions; the cache "
                f"has {layer.kv_heads} KV heads of {layer.head_dim} and {subject.source.tokens} tokens",
                code="query-mismatch",
                path=subject.queries.path,
            )
        return _Attention(subject, query)

    def add(self, exact: list[NDArray[Any]], decoded: list[NDArray[Any]], start: int) -> None:
        # Scores are [query heads, positions, tokens]: a few thousand tokens at a time keep them small.
        step = max(128, BLOCK_BYTES // (4 * self._grouped.shape[0] * self._grouped.shape[1]))
        for side, (keys, values) in enumerate((exact, decoded)):
            for low in range(0, len(keys), step):
                self._sums[side] = attend_block(
                    self._sums[side],
                    self._grouped,
                    keys[low : low + step],
                    values[low : low + step],
                    positions=self._positions,
                    tokens=self._tokens,
                    start=start + low,
                    scale=self._scale,
                )

    def error(self) -> tuple[float, float]:
        return relative_error(self._sums[0].output(), self._sums[1].output())


def _rate(values: int, seconds: float) -> float | None:
    return values / seconds if values and seconds else None
