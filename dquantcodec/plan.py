"""Plans: the integers that encoder, decoder and file share for one profile and one tensor geometry.

A plan is all that is needed to decode a page.  Files store it field by field, so a reader rebuilds the same plan
without ever evaluating a normal distribution or a random generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from .errors import CapacityError, InputError, LimitError
from .grouping import Grouping
from .profile import Profile, StreamProfile
from .stored import Integers, arrays_on_use

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_VALUES = 65536


@arrays_on_use("frequencies")
@dataclass(frozen=True, eq=False)
class StreamPlan:
    """One kind (keys or values) of one geometry.

    ``frequencies`` is uint16 ``[levels**letter]``: letter ``m0 + M*m1 + M*M*m2`` (first symbol least significant)
    has ``frequencies[letter]`` of the ``2**precision`` slots, none zero; for ``prefix`` every one is a power of two.
    ``words`` counts words of one sub-stream's container.  ``grid`` is ``"min-max"`` or ``"mid-tread"``; ``step`` (in
    root mean squares) and ``gain`` tell an encoder how to lay a mid-tread grid, decoders do without.

    With a ``grouping`` channels keep their own variance instead of being rotated, and the letters are the grouping's:
    ``frequencies`` is empty, ``levels`` counts those of the widest class, ``letter`` is 0 and ``precision`` the longest
    code's.
    """

    coder: str
    levels: int
    letter: int
    precision: int
    words: int
    substreams: int
    mean: bool
    frequencies: NDArray[np.uint16]
    grid: str = "min-max"
    step: float = 0.0
    gain: str = "least-squares"
    grouping: Grouping | None = None

    @property
    def affine(self) -> int:
        """FP16 numbers a token carries: offset and scale, or the scale alone."""
        return 2 if self.grid == "min-max" else 1

    @property
    def word_bytes(self) -> int:
        return 2 if self.coder == "rans" else 4

    @property
    def container(self) -> int:
        """Container bytes of one token over all its sub-streams."""
        return self.substreams * self.words * self.word_bytes


def grouped(words: int, substreams: int, mean: bool, step: float, gain: str, grouping: Grouping) -> StreamPlan:
    """The plan of a grouped stream; what rotated streams need is empty."""
    return StreamPlan(
        coder="prefix",
        levels=max(len(levels.weights) for levels in grouping.classes),
        letter=0,
        precision=max(table.precision for table in grouping.tables),
        words=words,
        substreams=substreams,
        mean=mean,
        frequencies=Integers(b"", "H", (0,)).as_array(),
        grid="mid-tread",
        step=step,
        gain=gain,
        grouping=grouping,
    )


@arrays_on_use("signs")
@dataclass(frozen=True, eq=False)
class Plan:
    """Geometry and both stream plans.

    ``signs`` is int8 ``[kv_heads, head_dim]`` of +1 and -1, applied before the Hadamard transform.
    """

    kv_heads: int
    head_dim: int
    window: int
    signs: NDArray[np.int8]
    key: StreamPlan
    value: StreamPlan
    profile_name: str = "custom"

    @property
    def values(self) -> int:
        """``n``: values of one stream."""
        return self.kv_heads * self.head_dim


@lru_cache(maxsize=64)
def make_plan(profile: Profile, kv_heads: int, head_dim: int) -> Plan:
    """The plan of ``profile`` for streams of ``kv_heads * head_dim`` values.

    Raises :class:`LimitError` for a geometry the format cannot hold and :class:`CapacityError` for a container that
    could not hold even the cheapest letters.
    """
    if not 1 <= kv_heads <= MAX_HEADS or not 1 <= head_dim <= MAX_HEAD_DIM or kv_heads * head_dim > MAX_VALUES:
        raise LimitError(
            f"{kv_heads} heads of {head_dim} values: at most {MAX_HEADS} heads, {MAX_HEAD_DIM} values a head and "
            f"{MAX_VALUES} values a stream",
            code="limit-geometry",
        )
    # Rotation kernels bring Numba along, and tables NumPy: opening a file needs neither.
    from .rotate import random_signs

    substreams = max(s for s in (1, 2, 4) if s <= profile.substreams and kv_heads % s == 0)
    return Plan(
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=profile.window,
        signs=random_signs(kv_heads, head_dim),
        key=_stream_plan("key", profile.key, kv_heads, head_dim, substreams),
        value=_stream_plan("value", profile.value, kv_heads, head_dim, substreams),
        profile_name=profile.name,
    )


def plan_of(profile: str | Profile | Plan, kv_heads: int | None, head_dim: int | None) -> Plan:
    """The plan that a codec is asked for: ready, or of a profile, by name or not, for a geometry."""
    if isinstance(profile, Plan):
        return profile
    if kv_heads is None or head_dim is None:
        raise InputError("a codec needs kv_heads and head_dim", code="input-geometry")
    return make_plan(Profile.named(profile) if isinstance(profile, str) else profile, kv_heads, head_dim)


def _stream_plan(kind: str, profile: StreamProfile, kv_heads: int, head_dim: int, substreams: int) -> StreamPlan:
    from . import tables

    values = kv_heads * head_dim // substreams
    levels = list(profile.weights) or tables.level_weights(profile.levels, kv_heads * head_dim, profile.alpha)
    weights = tables.letter_weights(levels, profile.symbols_per_letter)
    build = tables.frequencies if profile.coder == "rans" else tables.prefix_frequencies
    plan = StreamPlan(
        coder=profile.coder,
        levels=profile.levels,
        letter=profile.symbols_per_letter,
        precision=profile.precision,
        words=profile.words(values),
        substreams=substreams,
        mean=profile.mean,
        frequencies=build(weights, profile.precision),
        grid=profile.grid,
        step=profile.step,
        gain=profile.gain,
    )
    plan.frequencies.setflags(write=False)
    check_capacity(kind, plan, kv_heads, head_dim)
    return plan


def check_capacity(kind: str, plan: StreamPlan, kv_heads: int, head_dim: int) -> None:
    """Raise :class:`CapacityError` unless the container of a rotated stream holds the cheapest letters."""
    needed = least_words(plan, kv_heads // plan.substreams * -(-head_dim // plan.letter))
    if needed > plan.words:
        raise CapacityError(
            f"a {kind} container of {plan.words * plan.word_bytes} bytes cannot hold "
            f"{kv_heads * head_dim // plan.substreams} values: the cheapest letters alone take "
            f"{needed * plan.word_bytes}; give a larger container or fewer levels",
            code="capacity-container",
            kind=kind,
        )


def least_words(plan: StreamPlan, letters: int) -> int:
    """Words that ``letters`` times the cheapest letter take: what drift can always fall back to."""
    p = plan.precision
    f = int(plan.frequencies.max())
    if plan.coder == "prefix":
        return (1 + letters * (p + 1 - f.bit_length()) + 31) // 32
    # The coder itself, because near a full container its rounding (a fraction of a bit) decides.
    c = int(plan.frequencies[: int(plan.frequencies.argmax())].sum(dtype=int))
    x, words = 1 << 16, 2
    for _ in range(letters):
        if x >= f << (32 - p):
            x >>= 16
            words += 1
        x = (x // f << p) + x % f + c
    return words


def overhead_bits(coder: str) -> float:
    """Bits of a container that are not letters: ``sigma`` of the paper's budget ``B = 8C - sigma``.

    rANS: the coder starts from a state worth 16 bits and stores one of 32, so letters of total cost L take
    ``2 + floor(L / 16)`` words, which fits when ``L < 8C - 16``; half a bit more covers what its divisions round.
    prefix: one pad bit.
    """
    return 16.5 if coder == "rans" else 1


def budget(plan: StreamPlan) -> int:
    """What the letters of one sub-stream may cost, in 1/1024 bit."""
    return int((8 * plan.words * plan.word_bytes - overhead_bits(plan.coder)) * 1024)
