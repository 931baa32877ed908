"""What a layer's containers hold, and where its errors are: what a page for people shows beside the table.

Everything is a sum or a maximum over blocks of tokens, so a cache of any length takes constant memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grouping import Levels
from .page import read_kind
from .plan import Plan, StreamPlan
from .profile import TILE

#: Tokens and channels that are listed.
WORST = 5
#: Of a levels' histogram, beyond which the rest is one bar on either side.
MOST_OFFSET = 8


@dataclass(frozen=True)
class Worst:
    """A token, or a channel of a head, and its error energy over the mean of all."""

    place: tuple[int, ...]
    times_mean: float


@dataclass(frozen=True)
class KindReport:
    """Keys or values of one layer.

    ``offsets`` counts levels from the middle one (half steps of a trellis count as steps), ``shares`` are those of
    coded symbols and ``expected`` those of the letter tables.  ``fill`` is the mean, and ``fullest`` the largest, part
    of a container up to its last bit that is set.
    """

    nmse: float
    bits_per_value: float
    offsets: tuple[int, ...]
    shares: tuple[float, ...]
    expected: tuple[float, ...]
    fill: float
    fullest: float
    tokens: tuple[Worst, ...]
    channels: tuple[Worst, ...]


@dataclass
class KindSums:
    """Sums of one kind over blocks of tokens; :meth:`report` closes them."""

    heads: int
    head_dim: int
    energy: float = 0.0
    bits: float = 0.0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2 * MOST_OFFSET + 1, np.int64))
    expected: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2 * MOST_OFFSET + 1))
    used: float = 0.0
    fullest: float = 0.0
    containers: int = 0
    by_token: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    tokens: int = 0

    def __post_init__(self) -> None:
        self.by_channel = np.zeros((self.heads, self.head_dim))

    def add_tokens(self, exact: NDArray[Any], decoded: NDArray[Any], first: tuple[int, ...]) -> None:
        """Originals and what came back, ``[t, H, D]``, of tokens from ``first``: number, or sequence and number."""
        original = exact.astype(np.float64)
        squared = np.square(original - decoded)
        self.energy += float(np.square(original).sum())
        self.by_channel += squared.sum(axis=0)
        self.tokens += len(squared)
        rows = squared.sum(axis=(1, 2))
        worst = np.argsort(-rows, kind="stable")[:WORST]
        found = [(float(rows[i]), (*first[:-1], first[-1] + int(i))) for i in worst]
        self.by_token = sorted([*self.by_token, *found], key=lambda pair: (-pair[0], pair[1]))[:WORST]

    def add_pages(self, data: NDArray[np.uint8], symbols: NDArray[np.uint8], plan: Plan, kind: str) -> None:
        """Pages uint8 ``[pages, page_bytes]`` of a head group and their symbols uint8 ``[t, n]``."""
        stream: StreamPlan = getattr(plan, kind)
        middles, shares = expected_levels(stream, symbols.shape[1])
        offsets = np.clip(symbols.astype(np.int64) - middles, -MOST_OFFSET, MOST_OFFSET)
        self.counts += np.bincount((offsets + MOST_OFFSET).reshape(-1), minlength=2 * MOST_OFFSET + 1)
        self.expected += shares * symbols.size
        filled = container_fill(data, plan, kind)[: len(symbols)]
        self.used += float(filled.sum())
        self.containers += filled.size
        self.fullest = max(self.fullest, float(filled.max(initial=0)))
        beside = 16 * stream.affine + (16 * plan.kv_heads + 8 * plan.values) / plan.window * stream.mean
        self.bits += len(symbols) * (8 * stream.container + beside)

    def report(self) -> KindReport:
        total = max(1, int(self.counts.sum()))
        seen = np.flatnonzero((self.counts > 0) | (self.expected > total * 1e-4))
        error = float(self.by_channel.sum())
        mean_token, mean_channel = error / max(1, self.tokens), error / max(1, self.by_channel.size)
        order = np.argsort(-self.by_channel.reshape(-1), kind="stable")[:WORST]
        return KindReport(
            nmse=error / self.energy if self.energy else 0.0,
            bits_per_value=self.bits / total if self.bits else 0.0,
            offsets=tuple(int(i) - MOST_OFFSET for i in seen),
            shares=tuple((self.counts[seen] / total).tolist()),
            expected=tuple((self.expected[seen] / total).tolist()),
            fill=self.used / max(1, self.containers),
            fullest=self.fullest,
            tokens=tuple(Worst(token, value / mean_token) for value, token in self.by_token if mean_token),
            channels=tuple(
                Worst((int(i) // self.head_dim, int(i) % self.head_dim), float(self.by_channel.flat[i]) / mean_channel)
                for i in order
                if mean_channel
            ),
        )


def expected_levels(stream: StreamPlan, values: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The middle level of every channel int64 ``[n]``, and the tables' shares by offset float64 ``[2 * 8 + 1]``."""
    shares = np.zeros(2 * MOST_OFFSET + 1)
    if stream.grouping is None:
        frequencies = stream.frequencies.astype(np.float64)
        marginal = frequencies.reshape(-1, stream.levels).sum(axis=0) / frequencies.sum()
        middle = stream.levels // 2
        _spread(shares, np.arange(stream.levels) - middle, marginal)
        return np.full(values, middle, np.int64), shares
    grouping = stream.grouping
    middles = np.zeros(values, np.int64)
    coded = 0
    for row, tables in zip(grouping.order, grouping.choice):
        at = 0
        for letters, fields, table in zip(grouping.letters, grouping.fields, tables):
            for number in grouping.tables[table].classes:
                levels = grouping.classes[number]
                middles[row[at : at + letters]] = levels.middle
                _spread(shares, *class_shares(levels), letters)
                at += letters
            coded += fields * letters
    # Channels that are left out decode to zero.
    shares[MOST_OFFSET] += values - coded
    return middles, shares / values


def class_shares(levels: Levels) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Offsets and shares of a class; of a dependent one as if both quantisers had equal turns."""
    index = np.arange(-levels.most, levels.most + 1)
    weights = np.array(levels.weights, np.float64) / sum(levels.weights)
    if not levels.second:
        return index, weights
    second = np.array(levels.second, np.float64) / sum(levels.second)
    return np.concatenate([2 * index, 2 * index - np.sign(index)]), np.concatenate([weights, second]) / 2


def _spread(
    shares: NDArray[np.float64], offsets: NDArray[np.int64], part: NDArray[np.float64], times: float = 1.0
) -> None:
    np.add.at(shares, np.clip(offsets, -MOST_OFFSET, MOST_OFFSET) + MOST_OFFSET, times * part)


def container_fill(data: NDArray[np.uint8], plan: Plan, kind: str) -> NDArray[np.float64]:
    """Part of every container ``[tokens, S]`` up to its last bit that is set; pages uint8 ``[pages, page_bytes]``."""
    words = read_kind(data, plan, kind, slice(0, plan.window // TILE)).words
    rows = words.transpose(0, 3, 1, 2).reshape(-1, words.shape[1], words.shape[2])
    bits = 8 * words.dtype.itemsize
    used = rows != 0
    last = np.where(used.any(axis=2), words.shape[2] - 1 - np.argmax(used[:, :, ::-1], axis=2), 0)
    word = np.take_along_axis(rows, last[:, :, None], axis=2)[:, :, 0]
    top = np.frexp(word.astype(np.float64))[1]
    # rANS fills words whole; a prefix code begins with the least significant bit.
    inside = np.where(word > 0, bits, 0) if getattr(plan, kind).coder == "rans" else top
    return np.asarray((last * bits + inside) / (bits * words.shape[2]))
