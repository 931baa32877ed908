"""Fitting a plan to data: variance classes, the order of channels, shapes of groups and their letter tables.

Nothing is trained: what is taken from the data is the standard deviation of every channel and how large its rare values
are.  The plan stores what follows from them, so any tokens of the same layer will do.  A file fits its layers to its
own first tokens or to a sample; an engine fits once per model and keeps the plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import means
from .arrays import as_tensor, check_finite, to_float32
from .classes import LEAST_ENTROPY, REACH, deviation, nearest
from .coding_loss import better_rotated
from .encode import page_exponent
from .errors import InputError
from .group_arrays import mean_bits, zero_bits
from .grouping import MAX_FIELDS, MAX_GROUP_LETTERS, Grouping, Table
from .mid_tread import FILL
from .page_layout import KINDS
from .plan import Plan, StreamPlan, check_capacity, grouped, make_plan
from .profile import ClassRule, Profile, StreamProfile
from .table_choice import Classes, Family, choose_tables, expected, field_room

#: Parts of a container that a typical token is fitted to, the first that works.
SHARES = (1.0, 0.8, 0.6, 0.45, 0.3)
#: Where levels of zero alone take more of a container than this, letters are too few to tell channels apart.
MOST_ZEROS = 0.85
#: The part of a channel's values that may lie beyond its class: a token with one of them takes a larger step.
RARE = 0.002
#: Windows of a sample from a long sequence.
SAMPLE_WINDOWS = 8


def fit_plan(
    profile: str | Profile, keys: ArrayLike | Any, values: ArrayLike | Any, *, words: tuple[int, int] | None = None
) -> Plan:
    """The plan of ``profile`` with variance classes fitted to keys and values ``[T, H, D]`` of one layer.

    ``T`` may be a sample of tokens: windows of consecutive ones, a few hundred tokens or more.  A kind whose profile
    has no ``classes``, or whose sample is all zero, stays rotated.  ``words`` are those of a sub-stream's container of
    keys and of values, in place of the profile's.

    >>> import numpy as np
    >>> keys, values = np.random.default_rng(0).standard_normal((2, 256, 2, 64)) * np.geomspace(0.1, 3, 64)
    >>> fit_plan("2.26", keys.astype(np.float32), values.astype(np.float32)).key.grouping.letters_per_head
    32

    Raises :class:`InputError` for a wrong shape or dtype and for NaN or infinity, and :class:`CapacityError` for a
    container that could not hold even the cheapest letters.
    """
    profile = Profile.named(profile) if isinstance(profile, str) else profile
    tensors = []
    for array, kind in zip((keys, values), KINDS):
        shape = np.shape(array)
        if len(shape) != 3:
            raise InputError(f"{kind}s have shape {shape}; expected [T, H, D]", code="input-shape", kind=kind)
        x = to_float32(as_tensor(array, kind, shape[1], shape[2]))
        check_finite(x, kind, 0)
        tensors.append(x)
    if tensors[0].shape != tensors[1].shape:
        raise InputError(
            f"keys have shape {tensors[0].shape} but values {tensors[1].shape}", code="input-shape", kind="value"
        )
    plan = make_plan(profile, *tensors[0].shape[1:])
    fitted = {}
    for x, kind, count in zip(tensors, KINDS, words or (plan.key.words, plan.value.words)):
        stream = replace(getattr(plan, kind), words=count) if words else getattr(plan, kind)
        fitted[kind] = fit_stream(x, getattr(profile, kind), plan, stream)
        if fitted[kind].grouping is None:
            check_capacity(kind, fitted[kind], plan.kv_heads, plan.head_dim)
    return with_heads_in_one_order(replace(plan, key=fitted["key"], value=fitted["value"]))


def sample_windows(tokens: int, sequences: int, window: int) -> Iterator[tuple[int, int, int]]:
    """``(sequence, start, stop)`` of up to eight windows, evenly spaced over ``sequences`` of ``tokens`` tokens each.

    >>> list(sample_windows(1000, 2, 128))[:3]
    [(0, 0, 128), (0, 256, 384), (0, 512, 640)]
    """
    windows = -(-tokens // window)
    count = min(SAMPLE_WINDOWS, windows * sequences)
    for i in range(count):
        sequence, number = divmod(i * windows * sequences // count, windows)
        yield sequence, number * window, min((number + 1) * window, tokens)


def fit_stream(x: NDArray[np.float32], profile: StreamProfile, plan: Plan, stream: StreamPlan) -> StreamPlan:
    """``stream`` with a grouping fitted to float32 ``[T, H, D]``; as it is without a rule or anything to fit to."""
    rule = profile.classes
    rows = unit_rows(x, plan.window, stream.mean) if rule else None
    if rule is None or rows is None:
        return stream
    bits = 32 * stream.words - 1
    sigma, width = (a.reshape(plan.kv_heads, plan.head_dim) for a in (deviations(rows), widths(rows)))
    # A loud head has no more than its own sub-stream, and in a small container zeros of wide channels are dear: then a
    # larger step for all.
    for share in SHARES:
        found = _Search(sigma, width, rule, profile.states, stream.gain, share * bits * stream.substreams * FILL).run()
        grouping = found.grouping(stream.substreams)
        zeros = zero_bits(grouping).reshape(stream.substreams, -1).sum(axis=1).max()
        if zeros <= MOST_ZEROS * bits:
            fitted = grouped(stream.words, stream.substreams, stream.mean, found.step, stream.gain, grouping)
            window = x[: plan.window]
            return stream if better_rotated(window, sigma, plan, fitted, stream) else fitted
    return stream


def unit_rows(x: NDArray[np.float32], window: int, mean: bool) -> NDArray[np.float64] | None:
    """Tokens of ``x`` float32 ``[T, H, D]`` scaled to a root mean square of one, float64 ``[T, n]``.

    Less the means that encoding removes.  Without tokens that are zero; None if all are.
    """
    rows = []
    for first in range(0, len(x), window):
        page = x[first : first + window]
        page = np.ldexp(page, -page_exponent(float(np.abs(page).max())))
        if mean:
            page = page - means.mean_values(*means.window_means(page))
        rows.append(page.reshape(len(page), -1).astype(np.float64))
    flat = np.concatenate(rows) if rows else np.zeros((0, 1))
    energy = (flat * flat).mean(axis=1)
    flat = flat[energy > 0] / np.sqrt(energy[energy > 0])[:, None]
    return flat if len(flat) else None


def deviations(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard deviation ``[n]`` of every channel, about zero."""
    sigma: NDArray[np.float64] = np.sqrt((rows * rows).mean(axis=0))
    return sigma


def widths(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The deviation ``[n]`` that every channel's class is made for: its own, or more if too many values are too large.

    A class reaches :data:`REACH` deviations.  A token with a value beyond takes a larger step, at the cost of all its
    other values; where that would happen to more than :data:`RARE` of the tokens for one channel alone, the bits of a
    wider class are the smaller price.
    """
    rank = len(rows) - max(1, round(RARE * len(rows)))
    largest = np.partition(np.abs(rows), rank, axis=0)[rank]
    width: NDArray[np.float64] = np.maximum(deviations(rows), largest / REACH)
    return width


@dataclass(frozen=True)
class _Band:
    """Fields of the channels that stand ``first`` to ``first + letters`` in every head's falling order.

    ``classes`` and ``sources`` have one class a head: the one that channels are given by their widths, and the one
    nearest to their deviations.
    """

    first: int
    letters: int
    classes: Classes
    sources: Classes
    field_bits: int


@dataclass(frozen=True, eq=False)
class _Found:
    """What a search settled on; ``bits`` of every head, ``wanted`` and ``tables`` of its groups.  ``surplus`` is what
    all bits are above the entropy of the channels."""

    step: float
    order: NDArray[np.int64]
    groups: list[list[_Band]]
    wanted: list[list[Classes]]
    tables: dict[Classes, tuple[Classes, int]]
    bits: list[float]
    surplus: float
    family: Family
    gain: str

    def grouping(self, substreams: int) -> Grouping:
        heads, dim = self.order.shape
        used = sorted(set(self.tables.values()))
        numbers = sorted({c for t, _ in used for c in t})
        classes = tuple(self.family.known[c].levels(self.gain) for c in numbers)
        rows = np.concatenate(
            [self.order[:, band.first : band.first + band.letters] for group in self.groups for band in group], axis=1
        )
        choice = np.array([[used.index(self.tables[t]) for t in row] for row in self.wanted], np.uint8)
        heads_in_order = balanced([self.bits], substreams)
        channels = rows + np.arange(heads)[:, None] * dim
        return Grouping(
            head_dim=dim,
            classes=classes,
            tables=tuple(Table(tuple(numbers.index(c) for c in t), p) for t, p in used),
            letters=tuple(group[0].letters for group in self.groups),
            fields=tuple(len(group) for group in self.groups),
            choice=choice[heads_in_order],
            order=channels[heads_in_order].astype(np.uint16),
            states=self.family.states if any(c.second for c in classes) else 1,
        )


def balanced(bits: Sequence[Sequence[float]], substreams: int) -> list[int]:
    """Heads in an order that cuts into parts of nearly equal ``bits``, of which there may be several rows.

    The dearest comes next, to the part that is then least full.
    """
    shares = np.array(bits, np.float64)
    shares /= np.maximum(shares.mean(axis=1, keepdims=True), 1e-300)
    size = shares.shape[1] // substreams
    parts: list[list[int]] = [[] for _ in range(substreams)]
    full = np.zeros((substreams, len(shares)))
    for head in sorted(range(shares.shape[1]), key=lambda h: -shares[:, h].max()):
        part = min(
            (i for i in range(substreams) if len(parts[i]) < size), key=lambda i: (full[i] + shares[:, head]).max()
        )
        parts[part].append(head)
        full[part] += shares[:, head]
    return [head for part in parts for head in sorted(part)]


def with_heads_in_one_order(plan: Plan) -> Plan:
    """``plan`` with the heads of keys and values in one order, which fused attention on a GPU takes for granted.

    Rotated kinds have no other order than that of heads.
    """
    grouped = {kind: stream for kind in KINDS if (stream := getattr(plan, kind)).grouping is not None}
    if not grouped or plan.key.substreams == 1:
        return plan
    if len(grouped) == 1:
        heads = list(range(plan.kv_heads))
    else:
        bits = []
        for stream in grouped.values():
            of_place = mean_bits(stream.grouping)
            places = np.argsort(stream.grouping.order[:, 0])
            bits.append(of_place[places].tolist())
        heads = balanced(bits, plan.key.substreams)
    changed = {}
    for kind, stream in grouped.items():
        places = np.argsort(stream.grouping.order[:, 0])[heads]
        grouping = stream.grouping
        changed[kind] = replace(
            stream, grouping=replace(grouping, choice=grouping.choice[places], order=grouping.order[places])
        )
    return replace(plan, **changed)


class _Search:
    """The step at which the letters of a typical token fill the container, and the groups at that step."""

    def __init__(
        self,
        sigma: NDArray[np.float64],
        width: NDArray[np.float64],
        rule: ClassRule,
        states: int,
        gain: str,
        bits: float,
    ) -> None:
        self.sigma, self.width, self.rule, self.gain, self.bits = sigma, width, rule, gain, bits
        self.family = Family(rule.source, states)
        self.known = self.family.known
        self.entropies = self.family.entropies()
        self.least = int(np.argmax(self.entropies >= LEAST_ENTROPY))
        self.logarithms = np.log([deviation(i) for i in range(len(self.known))])

    def run(self) -> _Found:
        # What codes of letters cost above the entropy of their classes hardly depends on the step: three rounds settle.
        surplus = 0.0
        for _ in range(3):
            low, high = 1e-3, 64.0
            while high / low > 1 + 1e-5:
                step = math.sqrt(low * high)
                if self.entropy(step) + surplus > self.bits:
                    low = step
                else:
                    high = step
            found = self.at(round(high, 4))
            surplus = found.surplus
        return found

    def entropy(self, step: float) -> float:
        """Bits of a token, were every channel coded at the entropy of its standard deviation."""
        return self._entropy(self.sigma / step)

    def _entropy(self, sigma: NDArray[np.float64]) -> float:
        return float(np.interp(np.log(np.maximum(sigma, 1e-9)), self.logarithms, self.entropies).sum())

    def at(self, step: float) -> _Found:
        order = np.argsort(-self.width, axis=1, kind="stable")
        sigma, width = (np.take_along_axis(a, order, axis=1) / step for a in (self.sigma, self.width))
        groups = join(self.bands(sigma, width), min(self.rule.field_bits, field_room(self.family)))
        heads = range(len(width))
        wanted = [[tuple(band.classes[h] for band in group) for group in groups] for h in heads]
        sources = [[tuple(band.sources[h] for band in group) for group in groups] for h in heads]
        letters: Counter[Classes] = Counter()
        for row in wanted:
            for t, group in zip(row, groups):
                letters[t] += group[0].letters
        tables = choose_tables(letters, self.rule, self.family)
        count = [group[0].letters for group in groups]
        bits = [
            sum(n * expected(s, *tables[t], self.family) for s, t, n in zip(own, row, count))
            for own, row in zip(sources, wanted)
        ]
        # Beside the entropies of the same classes, so that it does not matter how near a deviation is to its class.
        ideal = sum(n * float(self.entropies[list(s)].sum()) for own in sources for s, n in zip(own, count))
        left_out = self._entropy(sigma[:, sum(n * len(group) for n, group in zip(count, groups)) :])
        return _Found(step, order, groups, wanted, tables, bits, sum(bits) - ideal - left_out, self.family, self.gain)

    def bands(self, sigma: NDArray[np.float64], width: NDArray[np.float64]) -> list[_Band]:
        """Eight channels each, of as many as any head has worth coding; both in steps, ``width`` falling."""
        dim = width.shape[1]
        worth = int((width >= deviation(self.least) / math.sqrt(math.sqrt(1.5))).sum(axis=1).max())
        coded = min(dim, max(4, -(-worth // 4) * 4))
        bands = []
        for first in range(0, coded, MAX_GROUP_LETTERS):
            part = slice(first, min(first + MAX_GROUP_LETTERS, coded))
            sources, classes = (nearest(np.sqrt(np.square(a[:, part]).mean(axis=1))) for a in (sigma, width))
            classes = np.maximum(classes, self.least)
            field_bits = max(self.known[c].field_bits for c in classes)
            bands.append(_Band(first, part.stop - first, tuple(classes.tolist()), tuple(sources.tolist()), field_bits))
        return bands


def join(bands: list[_Band], most_bits: int) -> list[list[_Band]]:
    """Bands into groups of at most ``most_bits`` and four fields, as few as it takes: the widest first, with those that
    leave least room."""
    groups: list[list[_Band]] = []
    rest = sorted(bands, key=lambda band: (-band.letters, -band.field_bits))
    while rest:
        first = rest.pop(0)
        fitting = [band for band in rest if band.letters == first.letters]
        room = most_bits - first.field_bits
        best: tuple[int, ...] = ()
        for count in range(1, MAX_FIELDS):
            # Widths instead of bands: of a width the first is as good as any.
            for widths in combinations_with_replacement(sorted({b.field_bits for b in fitting}, reverse=True), count):
                enough = all(sum(b.field_bits == w for b in fitting) >= n for w, n in Counter(widths).items())
                if enough and sum(best) < sum(widths) <= room:
                    best = widths
        group = [first]
        for width in best:
            band = next(b for b in fitting if b.field_bits == width)
            group.append(band)
            fitting.remove(band)
            rest.remove(band)
        groups.append(group)
    return groups
