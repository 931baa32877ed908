"""Hypothesis strategies: plans, tables, symbols, containers, tensors and pages, sound, damaged and random.

Everything is small, so that plain Python can follow, and shrinks: towards few heads of few values, even tables, equal
symbols and containers of zeros.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from .. import tables as letter_tables
from ..codec import Codec
from ..encode import LEAST_EXPONENT, MOST_EXPONENT
from ..errors import CapacityError
from ..group_arrays import zero_bits
from ..grouping import Grouping, Levels, Table
from ..page_layout import KINDS, PageLayout
from ..plan import Plan, StreamPlan, grouped, make_plan
from ..profile import TILE, Profile, StreamProfile
from ..rotate import random_signs
from . import groups, trellises
from .containers import ContainerPlan, plain_encode, plain_words
from .plans import drifting_plan
from .tensors import HOSTILE, hostile

#: Kinds of container plans, in the order in which failing ones are made simpler.
CODERS = ("prefix", "rans", "grouped", "trellis")

_LEVELS = (2, 3, 4, 5, 6, 8, 17, 64)
#: Scales and offsets at the edges of FP16; exponents of pages at the edges of what they may be.
_NUMBERS = (math.nan, math.inf, -math.inf, 65504.0, -65504.0, 6e-8, -0.0)
_EXPONENTS = (LEAST_EXPONENT - 1, LEAST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT + 1, -(2**15), 2**15 - 1)


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


# --- Pages ----------------------------------------------------------------------------------------------------------


def page_geometries() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Heads, head size, window and sub-streams; head sizes of every kind of rotation block."""
    dims = st.sampled_from([4, 1, 2, 3, 7, 8, 12, 16, 20, 23, 28])
    return st.tuples(st.integers(1, 4), dims, st.sampled_from([32, 64]), st.sampled_from([1, 2, 4]))


@st.composite
def stream_profiles(draw: st.DrawFn, coder: str | None = None, container: float = 400.0) -> StreamProfile:
    """A profile of one kind, rotated: coder, levels, letters, grid and means at random."""
    coder, mean = coder or draw(st.sampled_from(["prefix", "rans"])), draw(st.booleans())
    precision = draw(st.integers(10, 13))
    if draw(st.booleans()):
        levels = draw(st.sampled_from([3, 5, 9]))
        step = draw(st.sampled_from([0.7, 1.2]))
        far = levels // 2
        weights = tuple(max(1, int(2**20 * math.exp(-((m * step) ** 2) / 2))) for m in range(-far, far + 1))
        gain = draw(st.sampled_from(["least-squares", "unbiased"]))
        return StreamProfile(
            levels, container, coder, precision, letter=2, mean=mean, grid="mid-tread", step=step, weights=weights,
            gain=gain,
        )  # fmt: skip
    levels = draw(st.sampled_from([2, 3, 4, 6, 8, 17]))
    letter = draw(st.sampled_from([k for k in (1, 2, 3) if levels**k <= 512]))
    return StreamProfile(levels, container, coder, precision, draw(st.sampled_from([1.4, 1.0, 2.5])), letter, mean)


def profiles() -> st.SearchStrategy[Profile]:
    """Profiles of any kind; their containers may be too small for a geometry (:class:`CapacityError`)."""
    return st.builds(
        Profile,
        key=stream_profiles(),
        value=stream_profiles(),
        window=st.sampled_from([32, 64, 128]),
        substreams=st.sampled_from([1, 2, 4]),
    )


@st.composite
def plans(draw: st.DrawFn, coders: Sequence[str] = CODERS) -> Plan:
    """A plan of pages whose containers are as small as they may be, or have up to four words more."""
    heads, dim, window, substreams = draw(page_geometries())
    substreams = max(s for s in (1, 2, 4) if s <= substreams and heads % s == 0)
    found = {}
    for kind in ("key", "value"):
        coder = draw(st.sampled_from(list(coders)))
        spare = draw(st.integers(0, 4))
        if coder in ("grouped", "trellis"):
            grouping = draw(groupings(heads, dim, 1 if coder == "grouped" else draw(st.sampled_from([4, 8]))))
            zeros = int(zero_bits(grouping).reshape(substreams, -1).sum(axis=1).max())
            words = max(2, -(-(1 + zeros) // 32)) + spare
            found[kind] = grouped(words, substreams, draw(st.booleans()), 0.7, "least-squares", grouping)
        else:
            found[kind] = tightest(draw(stream_profiles(coder)), heads, dim, substreams, spare)
    return Plan(heads, dim, window, random_signs(heads, dim), found["key"], found["value"], "testing")


def tightest(stream: StreamProfile, heads: int, dim: int, substreams: int, spare: int) -> StreamPlan:
    """The plan of a kind with ``spare`` words more than the cheapest letters need."""
    size = heads * dim // substreams
    words = 2
    while True:
        container = max(4.0, words * stream.word_bytes * 1024 / size)
        profile = replace(stream, container=min(container, 65535.0))
        try:
            plan = make_plan(Profile(profile, profile, window=32, substreams=substreams), heads, dim)
        except CapacityError:
            words += 1
            continue
        return replace(plan.key, words=plan.key.words + spare)


@st.composite
def kv_tensors(
    draw: st.DrawFn, heads: int, head_dim: int, tokens: int | None = None, signs: NDArray[np.int8] | None = None
) -> NDArray[np.float32]:
    """Finite float32 ``[tokens, heads, head_dim]``: natural, or with outliers, sinks, constant rows, denormals, huge or
    tiny scales; every kind of :data:`dquantcodec.testing.tensors.HOSTILE`."""
    tokens = draw(st.integers(1, 40)) if tokens is None else tokens
    signs = random_signs(heads, head_dim) if signs is None else signs
    x = hostile(draw(st.sampled_from(HOSTILE)), tokens, heads, head_dim, draw(st.integers(0, 2**16)), signs)
    for _ in range(draw(st.integers(0, 2))):
        # Single numbers that nothing around them prepares for.
        place = tuple(draw(st.integers(0, size - 1)) for size in x.shape)
        x[place] = draw(st.floats(allow_nan=False, allow_infinity=False, width=32))
    return x


@dataclass(frozen=True, eq=False)
class TensorCase:
    """A plan and float32 keys and values ``[tokens, H, D]`` of one page."""

    plan: Plan
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    def __repr__(self) -> str:
        return f"TensorCase({_named(self.plan)}, {len(self.keys)} tokens)"


@dataclass(frozen=True, eq=False)
class PageCase:
    """A plan, the bytes of one page, and how many tokens it holds."""

    plan: Plan
    page: bytes
    tokens: int

    def __repr__(self) -> str:
        return f"PageCase({_named(self.plan)}, {self.tokens} tokens)"


def _named(plan: Plan) -> str:
    kinds = [f"{s.coder} grouped" if s.grouping is not None else s.coder for s in (plan.key, plan.value)]
    return f"{plan.kv_heads} heads of {plan.head_dim}, {kinds[0]} and {kinds[1]}"


@st.composite
def page_tensors(draw: st.DrawFn, coders: Sequence[str] = CODERS) -> TensorCase:
    """A plan and hostile keys and values of up to a window of tokens.

    Containers of groups drawn at random are seldom too small for a token; plans are added in which most tokens drift.
    """
    tight = [drifting_plan()] if "grouped" in coders else []
    tight += [drifting_plan(4, 4)] if "trellis" in coders else []
    plan = draw(st.one_of(plans(coders), st.sampled_from(tight)) if tight else plans(coders))
    tokens = draw(st.integers(1, min(plan.window, 40)))
    keys, values = (draw(kv_tensors(plan.kv_heads, plan.head_dim, tokens, plan.signs)) for _ in range(2))
    return TensorCase(plan, keys, values)


def _corrupt_a_field(draw: st.DrawFn, plan: Plan, data: bytearray, tokens: int) -> None:
    """An exponent, a scale of means, or a number of a token."""
    kind, layout = draw(st.sampled_from(KINDS)), PageLayout.of(plan)
    stream, at = getattr(plan, kind), getattr(layout, kind)
    field = draw(st.sampled_from(["number", "exponent", "mean"] if stream.mean else ["number", "exponent"]))
    if field == "exponent":
        struct.pack_into("<h", data, 2 * KINDS.index(kind), draw(st.sampled_from(_EXPONENTS)))
        return
    if field == "mean":
        place = at.scale_at + 2 * draw(st.integers(0, plan.kv_heads - 1))
    else:
        tile, lane = divmod(draw(st.integers(0, tokens - 1)), TILE)
        number = stream.affine * lane + draw(st.integers(0, stream.affine - 1))
        place = layout.head_bytes + tile * layout.tile_bytes + at.affine_at + 2 * number
    struct.pack_into("<e", data, place, draw(st.sampled_from(_NUMBERS)))


@st.composite
def pages(draw: st.DrawFn, coders: Sequence[str] = CODERS, kind: str = "valid") -> PageCase:
    """One page that the library encoded: ``"valid"``, ``"corrupted"`` or ``"random"`` (any bytes).

    Corrupted ones have bits flipped anywhere, or a number or an exponent at an edge.
    """
    case = draw(page_tensors(coders))
    tokens = len(case.keys)
    data = bytearray(Codec(case.plan).encode(case.keys, case.values).data.tobytes())
    if kind == "corrupted" and draw(st.booleans()):
        used = PageLayout.of(case.plan).bytes_for(tokens)
        for _ in range(draw(st.integers(1, 4))):
            bit = draw(st.integers(0, 8 * used - 1))
            data[bit // 8] ^= 1 << bit % 8
    elif kind == "corrupted":
        _corrupt_a_field(draw, case.plan, data, tokens)
    elif kind == "random":
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        data[:] = rng.integers(0, 256, len(data), np.uint8).tobytes()
        if draw(st.booleans()):
            data[:4] = bytes(4)
    return PageCase(case.plan, bytes(data), tokens)
