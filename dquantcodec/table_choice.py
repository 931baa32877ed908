"""Letter tables for the groups of a layer: few enough for a decoder's memory, near enough to every group's classes.

Fields of a letter have classes; a table made for one combination of classes serves neighbouring ones at a small loss of
rate.  From a table for every combination, the one that is missed least is dropped again and again; of every number of
tables left, the longest codes are cut where that costs least until the tables fit, and the cheapest choice is taken.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .classes import ChannelClass
from .group_arrays import table_lengths
from .grouping import FREQUENCY_BITS, MAX_FIELD_BITS
from .letter_paths import letter_paths
from .profile import MAX_LETTERS, ClassRule
from .trellis import state_bits
from .trellis_classes import dependent_classes

Classes = tuple[int, ...]
"""Numbers of the classes of a letter's fields."""

#: Tables of one kind of a layer; more gain next to nothing.
MOST_TABLES = 8
#: Combinations that tables are made for, those of most letters.
MOST_CANDIDATES = 64
#: A table should serve fields of a class that reaches further than its own by at most this factor; beyond, tokens take
#: a larger step too often, which is charged as so many bits a letter.
SHORTEST_REACH = 0.8
SHORT_BITS = 4.0
SHORTEST_CODE = 8


@dataclass(frozen=True)
class Family:
    """Classes of a source for a number of states."""

    source: str
    states: int

    @property
    def known(self) -> tuple[ChannelClass, ...]:
        return dependent_classes(self.source, self.states)

    def entropies(self) -> NDArray[np.float64]:
        """Bits a value of every class.  By symmetry of the trellis all states are equally frequent."""
        return np.array([sum(entropy(w) for w in (c.weights, c.second or c.weights)) / 2 for c in self.known])


def entropy(weights: tuple[int, ...]) -> float:
    """Bits of frequencies that sum to 2**14."""
    return FREQUENCY_BITS - sum(w * math.log2(w) for w in weights) / (1 << FREQUENCY_BITS)


def field_room(family: Family) -> int:
    """Most bits of a letter's fields."""
    return MAX_FIELD_BITS - state_bits(family.states)


@lru_cache(maxsize=8192)
def _lengths(t: Classes, precision: int, family: Family) -> NDArray[np.float64]:
    """``[states * letters]``."""
    classes = tuple(family.known[c].levels("least-squares") for c in t)
    return table_lengths(classes, precision, family.states).astype(np.float64)


@lru_cache(maxsize=4096)
def _shares(c: int, most: int, quantiser: int, family: Family) -> NDArray[np.float64]:
    """Shares of the levels of class ``c`` in a table that reaches to ``most``: what lies beyond takes the last."""
    known = family.known[c]
    shares = np.array(known.second if quantiser and known.second else known.weights, np.float64) / (1 << FREQUENCY_BITS)
    beyond = len(shares) // 2 - most
    if beyond <= 0:
        return np.pad(shares, -beyond)
    inner = shares[beyond:-beyond].copy()
    inner[0] += shares[:beyond].sum()
    inner[-1] += shares[-beyond:].sum()
    return inner


@lru_cache(maxsize=4096)
def _letter_shares(wanted: Classes, used: Classes, family: Family) -> NDArray[np.float64]:
    """Shares ``[states * letters]`` of the letters of the table of ``used`` among letters of the classes ``wanted``."""
    known = [family.known[c] for c in used]
    quantisers, _, _ = letter_paths([c.most for c in known], [bool(c.second) for c in known], family.states)
    shares = np.full(quantisers.shape[:2], 1 / family.states)
    rest = np.arange(quantisers.shape[1])
    for f, (c, u) in enumerate(zip(wanted, known)):
        of = np.array([_shares(c, u.most, q, family) for q in (0, 1)])
        shares *= of[quantisers[:, :, f], rest % (2 * u.most + 1)]
        rest = rest // (2 * u.most + 1)
    return shares.reshape(-1)


def expected(wanted: Classes, used: Classes, precision: int, family: Family) -> float:
    """Mean length of a letter of the classes ``wanted`` in the table of ``used``."""
    return float(_lengths(used, precision, family) @ _letter_shares(wanted, used, family))


def choose_tables(letters: Counter[Classes], rule: ClassRule, family: Family) -> dict[Classes, tuple[Classes, int]]:
    """The table, by its classes and the longest code, of every combination in ``letters``, which counts their letters.

    Combinations of as many fields share tables, so there are always few enough.
    """
    wanted = sorted(letters)
    count = np.array([letters[t] for t in wanted], np.float64)
    candidates = _candidates(letters, rule, family)
    cost = count[:, None] * np.array([[_cost(t, u, rule, family) for u in candidates] for t in wanted])
    live = list(range(len(candidates)))
    best: tuple[tuple[float, int], dict[Classes, tuple[Classes, int]]] | None = None
    while True:
        part = cost[:, live]
        chosen = part.argmin(axis=1)
        if len(live) <= MOST_TABLES:
            served = {k: [(wanted[i], count[i]) for i in np.flatnonzero(chosen == k)] for k in set(chosen.tolist())}
            total, longest = _cut({candidates[live[k]]: groups for k, groups in served.items()}, rule, family)
            # Where none are small enough, the smallest.
            rank = total, 0 if math.isfinite(total) else sum(2 << p for p in longest.values())
            if best is None or rank < best[0]:
                tables = {t: candidates[live[k]] for k, groups in served.items() for t, _ in groups}
                best = rank, {t: (u, longest[u]) for t, u in tables.items()}
        if len(live) == 1:
            break
        second = np.partition(part, 1, axis=1)[:, 1]
        loss = [float((second - part.min(axis=1))[chosen == k].sum()) for k in range(len(live))]
        dropped = int(np.argmin(loss))
        if not math.isfinite(loss[dropped]):
            break  # one table is left for every number of fields
        del live[dropped]
    assert best is not None
    return best[1]


def _candidates(letters: Counter[Classes], rule: ClassRule, family: Family) -> list[Classes]:
    """Combinations worth a table: those of most letters, and one at least for every number of fields."""
    known = family.known

    def fits(t: Classes) -> bool:
        size = math.prod(len(known[c].weights) for c in t)
        bits = sum(known[c].field_bits for c in t)
        return size <= min(MAX_LETTERS, 1 << rule.precision) and bits <= field_room(family)

    found: dict[Classes, None] = {}
    fields: Counter[int] = Counter()
    for t, _ in sorted(letters.items(), key=lambda item: (-item[1], item[0])):
        if len(found) >= MOST_CANDIDATES and fields[len(t)]:
            continue
        while not fits(t):  # too many letters: narrower fields, whose tokens take a larger step more often
            widest = max(range(len(t)), key=lambda f: t[f])
            t = (*t[:widest], t[widest] - 1, *t[widest + 1 :])
        found[t] = None
        fields[len(t)] += 1
    return sorted(found)


def _cost(t: Classes, u: Classes, rule: ClassRule, family: Family) -> float:
    """Bits of a letter of classes ``t`` in the table of ``u``; infinite for another number of fields."""
    if len(t) != len(u):
        return math.inf
    known = family.known
    short = sum(max(0.0, SHORTEST_REACH * known[a].most / known[b].most - 1) for a, b in zip(t, u)) if t != u else 0.0
    return expected(t, u, rule.precision, family) + SHORT_BITS * short


def _cut(
    tables: dict[Classes, list[tuple[Classes, float]]], rule: ClassRule, family: Family
) -> tuple[float, dict[Classes, int]]:
    """Longest codes of tables that take at most ``rule.table_bytes`` together, and the bits of all letters then."""
    longest = dict.fromkeys(tables, rule.precision)

    def bits(u: Classes, precision: int) -> float:
        if precision < SHORTEST_CODE or len(_lengths(u, rule.precision, family)) > family.states << precision:
            return math.inf
        return sum(n * expected(t, u, precision, family) for t, n in tables[u])

    while sum(family.states * 2 << p for p in longest.values()) > rule.table_bytes:
        loss = {u: (bits(u, p - 1) - bits(u, p)) / (1 << p) for u, p in longest.items()}
        cheapest = min(loss, key=lambda u: (loss[u], u))
        if not math.isfinite(loss[cheapest]):
            return math.inf, longest
        longest[cheapest] -= 1
    return sum(bits(u, p) for u, p in longest.items()), longest
