"""Plans of a few values, so that plain Python and kernels without a compiler are quick with them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..group_arrays import zero_bits
from ..grouping import Grouping, Levels, Table
from ..plan import Plan, grouped, make_plan
from ..profile import Profile, StreamProfile
from ..rotate import random_signs

#: Pages of 32 tokens, so that small files have many.
SMALL = Profile(
    key=StreamProfile(4, 400, precision=10, mean=True),
    value=StreamProfile(3, 320, "rans", precision=10),
    window=32,
    substreams=2,
    name="small",
)

#: Geometries of grouped plans: values of a head, the coded channels of every head in order, letters of the two groups
#: of a head, which have one field and two, and words that containers have beyond those that zeros need.
_SMALL = 8, [[9, 8, 15, 14, 13, 12], [0, 7, 1, 6, 2, 5]], (2, 2), 1
_FOUR_HEADS = 8, [*_SMALL[1], *([16 + c for c in row] for row in _SMALL[1])], (2, 2), 1
_ONE_HEAD = 8, [[1, 0, 6, 7, 3, 5, 4, 2]], (2, 3), 0
_TINY = 4, [[3, 0, 2]], (1, 1), 1

_Geometry = tuple[int, list[list[int]], tuple[int, int], int]


@lru_cache(maxsize=8)
def small_plan(states: int = 1, tiny: bool = False) -> Plan:
    """A plan of two heads of eight with groups in both kinds; with ``states`` above 1 its keys walk a trellis.

    Its containers hold the dearest letters: nothing drifts.  ``tiny`` makes it one head of four.
    """
    wide = Levels((1000, 3000, 8384, 3000, 1000), 300)
    plain, dependent = (3000, 10384, 3000), Levels((2000, 12384, 2000), 200, (3000, 10384, 3000))
    geometry = _TINY if tiny else _SMALL
    return _grouped_plan(geometry, 0.7, (states, 1), wide, Levels(plain, 200), dependent, "small groups")


@lru_cache(maxsize=8)
def drifting_plan(key_states: int = 1, value_states: int = 1, tiny: bool = False) -> Plan:
    """As :func:`small_plan` with four heads in containers as small, and tables that expect zeros: most tokens drift.

    ``tiny`` makes it one head of eight.
    """
    wide = Levels((4, 8, 16, 32, 16264, 32, 16, 8, 4), 300)
    rest = (8, 16, 32, 16272, 32, 16, 8)
    dependent = Levels(rest, 200, rest)
    states = key_states, value_states
    geometry = _ONE_HEAD if tiny else _FOUR_HEADS
    return _grouped_plan(geometry, 0.3, states, wide, Levels(rest, 200), dependent, "small drifting groups")


def _grouped_plan(
    geometry: _Geometry, step: float, states: tuple[int, int], wide: Levels, plain: Levels, dependent: Levels, name: str
) -> Plan:
    head_dim, order, letters, spare = geometry
    heads = len(order)
    found = {}
    for kind, used in zip(("key", "value"), states):
        grouping = Grouping(
            head_dim=head_dim,
            classes=(wide, dependent if used > 1 else plain),
            tables=(Table((0,), 9), Table((0, 1), 10)),
            letters=letters,
            fields=(1, 2),
            choice=np.array([[0, 1]] * heads, np.uint8),
            order=np.array(order, np.uint16),
            states=used,
        )
        words = -(-(1 + int(zero_bits(grouping).sum())) // 32) + spare
        found[kind] = grouped(words, 1, kind == "key", step, "least-squares", grouping)
    return Plan(heads, head_dim, 32, random_signs(heads, head_dim), found["key"], found["value"], name)


@lru_cache(maxsize=2)
def rotated_plan(tiny: bool = False) -> Plan:
    """The plan of :data:`SMALL` for two heads of eight; ``tiny`` for one of four."""
    return make_plan(SMALL, 1, 4) if tiny else make_plan(SMALL, 2, 8)


@lru_cache(maxsize=1)
def rans_plan() -> Plan:
    """A plan of one head of twelve, which has a Paley factor, whose tokens take up to three words beyond the state."""
    profile = Profile(
        key=StreamProfile(11, 690, "rans", letter=2, mean=True), value=StreamProfile(16, 860, "rans", letter=1),
        window=32, substreams=1, name="words",
    )  # fmt: skip
    return make_plan(profile, 1, 12)
