"""Hypothesis strategies of one container: plans, tables, symbols and bytes, sound, damaged and random.

Everything is small, so that plain Python can follow, and shrinks: towards few heads of few values, even tables, equal
symbols and containers of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from .. import tables as letter_tables
from ..grouping import Grouping, Levels, Table
from . import groups, trellises
from .containers import ContainerPlan, plain_encode, plain_words

#: Kinds of container plans, in the order in which failing ones are made simpler.
CODERS = ("prefix", "rans", "grouped", "trellis")

_LEVELS = (2, 3, 4, 5, 6, 8, 17, 64)


@st.composite
def tables(draw: st.DrawFn, coder: str, letters: int, precision: int) -> tuple[int, ...]:
    """Frequencies of a letter table, none zero, summing to ``2**precision``; powers of two for ``prefix``.

    Even, falling off steeply, at random, or one letter with nearly all slots and every other with one.
    """
    shape = draw(st.sampled_from(["even", "random", "steep", "one"]))
    if shape == "even":
        weights = [1] * letters
    elif shape == "steep":
        peak = draw(st.integers(0, letters - 1))
        weights = [max(1, int(2.0 ** (60 - 1.7 * abs(i - peak)))) for i in range(letters)]
    elif shape == "one":
        weights = [1] * letters
        weights[draw(st.integers(0, letters - 1))] = 2**60
    else:
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        weights = [int(w) for w in rng.integers(1, 10**6, letters)]
    build = letter_tables.frequencies if coder == "rans" else letter_tables.prefix_frequencies
    return tuple(build(weights, precision).tolist())


@st.composite
def classes(draw: st.DrawFn, dependent: bool) -> Levels:
    """A class of few levels, with a second set of frequencies if ``dependent``."""
    most = draw(st.integers(1, 3))

    def weights(largest_first: bool) -> tuple[int, ...]:
        upper = [draw(st.integers(1, 2000)) for _ in range(most)]
        middle = (1 << 14) - 2 * sum(upper)
        if largest_first and max(upper) > middle:
            upper = [1] * most
            middle = (1 << 14) - 2 * most
        return (*upper[::-1], middle, *upper)

    return Levels(weights(True), draw(st.integers(1, 1023)), weights(False) if dependent else ())


@st.composite
def groupings(draw: st.DrawFn, heads: int, head_dim: int, states: int = 1) -> Grouping:
    """A grouping of one to three groups a head, some channels left out, heads in any order."""
    used = [draw(classes(states > 1))] + [draw(classes(states > 1 and draw(st.booleans()))) for _ in range(2)]
    most_bits = 12 - (states - 1).bit_length()
    shapes: list[tuple[int, int]] = []
    room = head_dim
    for _ in range(draw(st.integers(1, 3))):
        fields = draw(st.integers(1, 2))
        if room < fields:
            break
        shapes.append((draw(st.integers(1, min(8, room // fields))), fields))
        room -= shapes[-1][0] * fields
    shapes = shapes or [(1, 1)]

    def table(fields: int) -> Table:
        chosen = [draw(st.integers(0, 2)) for _ in range(fields)]
        while sum(used[c].field_bits for c in chosen) > most_bits:
            chosen[-1] = 1
            chosen[0] = 2
        letters = int(np.prod([len(used[c].weights) for c in chosen]))
        return Table(tuple(chosen), draw(st.integers(max(8, (letters - 1).bit_length()), 12)))

    stored = [table(1), table(2), table(1), table(2)]
    if states > 1 and not any(used[c].second for one in stored for c in one.classes):
        stored[0] = Table((0,), stored[0].precision)
    choice = [[draw(st.sampled_from([0, 2] if f == 1 else [1, 3])) for _, f in shapes] for _ in range(heads)]
    coded = sum(n * f for n, f in shapes)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    order = [head * head_dim + rng.permutation(head_dim)[:coded] for head in rng.permutation(heads)]
    return Grouping(
        head_dim=head_dim,
        classes=tuple(used),
        tables=tuple(stored),
        letters=tuple(n for n, _ in shapes),
        fields=tuple(f for _, f in shapes),
        choice=np.array(choice, np.uint8),
        order=np.array(order, np.uint16),
        states=states,
    )


@st.composite
def container_plans(draw: st.DrawFn, coders: Sequence[str] = CODERS) -> ContainerPlan:
    """A plan of one container, of two words; :func:`containers` gives it room."""
    coder = draw(st.sampled_from(list(coders)))
    heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    if coder in ("grouped", "trellis"):
        states = 1 if coder == "grouped" else draw(st.sampled_from([4, 8]))
        found = draw(groupings(heads, head_dim, states))
        return ContainerPlan("prefix", 0, 0, 0, (), heads, head_dim, 2, found)
    levels = draw(st.sampled_from(_LEVELS))
    head_dim += draw(st.sampled_from([0, 0, 20]))
    precision = draw(st.integers(8, 15))
    letter = draw(st.sampled_from([k for k in (1, 2, 3, 4) if levels**k <= min(256, 2**precision)]))
    frequencies = draw(tables(coder, levels**letter, precision))
    return ContainerPlan(coder, levels, letter, precision, frequencies, heads, head_dim, 2)


@st.composite
def symbols(draw: st.DrawFn, plan: ContainerPlan) -> list[int]:
    """Symbols of one container: each drawn alone, a short pattern again and again, or the rarest ones throughout."""
    if plan.grouping is not None:
        return _grouped_symbols(draw, plan.grouping)
    kind = draw(st.sampled_from(["pattern", "any", "rarest"]))
    level = st.integers(0, plan.levels - 1)
    if kind == "rarest":
        rarest = int(np.argmin(plan.frequencies))
        row = [rarest // plan.levels**i % plan.levels for i in range(plan.letter)]
        return [row[d % plan.letter] for _ in range(plan.heads) for d in range(plan.head_dim)]
    if kind == "any":
        return draw(st.lists(level, min_size=plan.values, max_size=plan.values))
    pattern = draw(st.lists(level, min_size=1, max_size=7))
    return [pattern[i % len(pattern)] for i in range(plan.values)]


def _grouped_symbols(draw: st.DrawFn, grouping: Grouping) -> list[int]:
    """Level indices drawn in coded order; a trellis decides what levels they are."""
    pattern = draw(st.lists(st.integers(-3, 3), min_size=1, max_size=9))
    row = [0] * (grouping.heads * grouping.head_dim)
    state = count = 0
    for group in groups.groups(grouping):
        used = trellises.table_classes(grouping, group.table)
        for channels in group.channels:
            fields = []
            for c in used:
                most = len(c.weights) // 2
                fields.append((most + max(-most, min(most, pattern[count % len(pattern)])), c))
                count += 1
            _, levels, state = trellises.follow(grouping.states, state, fields)
            for channel, level, c in zip(channels, levels, used, strict=True):
                most = len(c.weights) // 2
                row[channel] = level + (2 * most if c.second else most)
    return row


@dataclass(frozen=True, eq=False)
class ContainerCase:
    """A plan, symbols that fit it (of sound containers) and the bytes of a container."""

    plan: ContainerPlan
    symbols: list[int] | None
    data: bytes

    def __repr__(self) -> str:
        return f"ContainerCase({self.plan.coder}, {self.plan.words} words, {self.data.hex()})"


@st.composite
def containers(draw: st.DrawFn, coders: Sequence[str] = CODERS, kind: str = "valid") -> ContainerCase:
    """One container: ``"valid"``, ``"corrupted"`` (some bits of a valid one flipped, or its end lost) or ``"random"``.

    Valid ones have none to three words to spare.
    """
    plan = draw(container_plans(coders))
    row = draw(symbols(plan))
    needed = len(plain_words(plan, row))
    plan = replace(plan, words=max(2, needed + draw(st.integers(0, 3))))
    data = plain_encode(plan, row)
    assert data is not None
    if kind == "valid":
        return ContainerCase(plan, row, data)
    if kind == "corrupted":
        return _corrupted(draw, plan, data, needed)
    filled = draw(st.sampled_from(["zeros", "ones", "any"]))
    size = plan.bytes
    if filled == "any":
        return ContainerCase(plan, None, draw(st.binary(min_size=size, max_size=size)))
    return ContainerCase(plan, None, (b"\0" if filled == "zeros" else b"\xff") * size)


def _corrupted(draw: st.DrawFn, plan: ContainerPlan, data: bytes, needed: int) -> ContainerCase:
    """Sound but for a word or two too few, sound but for one bit behind its words or in front, or bits flipped."""
    kind = draw(st.sampled_from(["cut", "padding", "flips"]))
    if kind == "cut":
        plan = replace(plan, words=max(2, needed - draw(st.integers(1, 2))))
        return ContainerCase(plan, None, data[: plan.bytes])
    damaged = bytearray(data)
    if kind == "padding":
        # Behind the words in use; the last bit of those, which codes seldom need; the bit in front of them all.
        first = 8 * plan.word_bytes * needed
        bits = [draw(st.sampled_from([first - 1, 0, min(first, 8 * len(data) - 1), 8 * len(data) - 1]))]
    else:
        bits = draw(st.lists(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=3))
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return ContainerCase(plan, None, bytes(damaged))


def streams(coders: Sequence[str] = CODERS) -> st.SearchStrategy[tuple[ContainerPlan, list[int]]]:
    """A container plan and symbols that fit into it, or do not."""

    def room(plan: ContainerPlan) -> st.SearchStrategy[tuple[ContainerPlan, list[int]]]:
        def with_words(row: list[int]) -> st.SearchStrategy[tuple[ContainerPlan, list[int]]]:
            needed = len(plain_words(plan, row))
            words = st.integers(max(2, needed - 1), needed + 3)
            return words.map(lambda count: (replace(plan, words=count), row))

        return symbols(plan).flatmap(with_words)

    return container_plans(coders).flatmap(room)
