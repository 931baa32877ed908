"""Hypothesis strategies of pages: profiles, plans, keys and values, and pages, sound, damaged and random.

Everything is small, so that plain Python can follow, and shrinks: towards few heads of few values, even tables, equal
symbols and tokens of zeros.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ..codec import Codec
from ..encode import LEAST_EXPONENT, MOST_EXPONENT
from ..errors import CapacityError
from ..group_arrays import zero_bits
from ..page_layout import KINDS, PageLayout
from ..plan import Plan, StreamPlan, grouped, make_plan
from ..profile import TILE, Profile, StreamProfile
from ..rotate import random_signs
from .container_strategies import CODERS, groupings
from .plans import drifting_plan
from .tensors import HOSTILE, hostile

#: Scales and offsets at the edges of FP16; exponents of pages at the edges of what they may be.
_NUMBERS = (math.nan, math.inf, -math.inf, 65504.0, -65504.0, 6e-8, -0.0)
_EXPONENTS = (LEAST_EXPONENT - 1, LEAST_EXPONENT, MOST_EXPONENT, MOST_EXPONENT + 1, -(2**15), 2**15 - 1)


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
