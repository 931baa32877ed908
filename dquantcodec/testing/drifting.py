"""Properties of drift and refit, decided in exact arithmetic; for encoders that Python can call.

An encoder of containers need not drift as the library does.  One that does can show with these that it keeps a budget,
moves nothing without need, and that its fallback is never better than what it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from ..drift import drift as library_drift
from ..drift import ladder, symbol_rates
from ..grid import ONE
from ..letters import letter_table
from ..plan import StreamPlan
from ..plan import budget as whole_budget
from . import coders
from .page_strategies import stream_profiles, tightest
from .properties import require

#: ``drift(position, stream, head_dim, budget)``: the symbols, one row a token, of int32 positions ``[T, n]`` in 2**-16
#: steps of the grid, whose letters may cost ``budget`` in 1/1024 bit.  One sub-stream.
Drift = Callable[[NDArray[np.int32], StreamPlan, int, int], NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class DriftCase:
    """Positions of some tokens, a stream plan of one sub-stream, and what the letters may cost, in 1/1024 bit."""

    stream: StreamPlan
    head_dim: int
    position: NDArray[np.int32]
    budget: int

    def cost(self, symbols: Sequence[int]) -> int:
        """What the letters of one token's symbols cost, in 1/1024 bit."""
        stream, frequencies = self.stream, self.stream.frequencies.tolist()
        costs = letter_table(stream, self.head_dim).costs.tolist()
        return sum(costs[i] for i in coders.pack(symbols, self.head_dim, stream.levels, stream.letter, frequencies))

    @property
    def cheapest(self) -> list[int]:
        """The cheapest letter again and again: what a plan's container always holds."""
        stream = self.stream
        letter = int(np.argmax(stream.frequencies))
        row = coders.letter_symbols(letter, stream.levels, stream.letter)
        return [row[i % self.head_dim % stream.letter] for i in range(self.position.shape[1])]

    def error(self, token: int, symbols: Sequence[int]) -> Fraction:
        """``sum((u - m)**2)`` of a token's positions and symbols, exactly."""
        row = self.position[token].tolist()
        return Fraction(sum((u - (int(m) << 16)) ** 2 for u, m in zip(row, symbols, strict=True)), 1 << 32)


def drift_by_library(position: NDArray[np.int32], stream: StreamPlan, head_dim: int, budget: int) -> NDArray[np.uint8]:
    """The library's own drift as a :data:`Drift`."""
    return library_drift(position, stream, head_dim, np.full((len(position), 1), budget, np.int64))[0]


@st.composite
def drift_cases(draw: st.DrawFn) -> DriftCase:
    """Natural and hostile positions, and a budget between that of the cheapest letters and plenty."""
    heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from([4, 7, 12, 20, 33]))
    stream = tightest(draw(stream_profiles()), heads, dim, 1, 0)
    n, top = heads * dim, (stream.levels - 1) * ONE
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["zero", "top", "rarest", "alternating", "uniform", "normal", "ties", "outlier"]))
    shape = (draw(st.integers(1, 3)), n)
    u = {
        "zero": lambda: np.zeros(shape),
        "top": lambda: np.full(shape, top),
        "rarest": lambda: np.full(shape, int(symbol_rates(stream).argmax()) * ONE),
        "alternating": lambda: np.arange(n) % 2 * np.full(shape, top),
        "uniform": lambda: rng.uniform(0, top, shape),
        "normal": lambda: rng.normal(top / 2, top / 6.5, shape),
        "ties": lambda: rng.integers(0, stream.levels, shape) * ONE + ONE // 2,
        "outlier": lambda: np.where(np.arange(n) == draw(st.integers(0, n - 1)), top, np.zeros(shape)),
    }[kind]()
    position = np.clip(np.rint(u), 0, top).astype(np.int32)
    least = whole_budget(stream)
    ease = draw(st.integers(0, 32))
    return DriftCase(stream, dim, position, least + ease * n * 128)


def drift_keeps_its_budget(drift: Drift, case: DriftCase) -> None:
    """The letters cost no more than the budget, whatever the positions."""
    for row in drift(case.position, case.stream, case.head_dim, case.budget).tolist():
        cost = case.cost(row)
        require(cost <= case.budget, f"letters cost {cost} of {case.budget}")


def drift_moves_nothing_with_room(drift: Drift, case: DriftCase) -> None:
    """With room for all, every symbol is a nearest level."""
    symbols = drift(case.position, case.stream, case.head_dim, 1 << 40)
    distance = np.abs(case.position.astype(np.int64) - (symbols.astype(np.int64) << 16))
    require(int(distance.max()) <= ONE // 2, "a symbol is not the nearest level")


def drift_is_never_worse_than_its_fallback(drift: Drift, case: DriftCase) -> None:
    """The error is at most that of the cheapest letter throughout, the one assignment that always fits."""
    plain = case.cheapest
    for token, row in enumerate(drift(case.position, case.stream, case.head_dim, case.budget).tolist()):
        require(case.error(token, row) <= case.error(token, plain), "repeating the cheapest letter is better")


def rungs_trade_error_for_rate(case: DriftCase) -> None:
    """As kappa rises, the symbols' rate never rises and their error never falls (of the library's ladder)."""
    steps = ladder(case.stream, case.head_dim)
    limits = steps.thresholds[:, : case.stream.levels - 1]
    for token, row in enumerate(case.position):
        before: tuple[Fraction, float] | None = None
        for cuts in limits:
            symbols = (cuts[:, None] < row).sum(axis=0)
            now = case.error(token, symbols.tolist()), float(steps.rates[symbols].sum())
            require(before is None or now[0] >= before[0], "the error falls as kappa rises")
            require(before is None or now[1] <= before[1] + 1e-9, "the rate rises with kappa")
            before = now


def costs_are_enough(case: DriftCase) -> None:
    """No letter is charged less than its share is worth, so that a budget kept in costs is kept in bits."""
    frequencies, p = case.stream.frequencies.tolist(), case.stream.precision
    for cost, frequency in set(zip(letter_table(case.stream, case.head_dim).costs.tolist(), frequencies)):
        require(coders.cost_is_enough(cost, frequency, p), f"a letter of frequency {frequency} costs {cost}")
