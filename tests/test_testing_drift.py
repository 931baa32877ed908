"""Drift and refit by the public properties, in exact arithmetic, and what more budget does to the error."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from dquantcodec import grid
from dquantcodec.codec import Codec
from dquantcodec.drift import LEAST_SLACK, SLACK_BITS
from dquantcodec.group_drift import drift_grouped
from dquantcodec.group_grid import grouped_positions, grouped_scale
from dquantcodec.plan import Plan, StreamPlan, grouped
from dquantcodec.testing import drifting, strategies
from dquantcodec.testing.drifting import DriftCase, drift_by_library, drift_cases
from dquantcodec.testing.plans import drifting_plan, small_plan
from dquantcodec.testing.tensors import HOSTILE, hostile
from dquantcodec.trellis_drift import drift_dependent


@settings(max_examples=30)
@given(drift_cases())
def test_the_librarys_drift_holds_every_property(case: DriftCase) -> None:
    drifting.drift_keeps_its_budget(drift_by_library, case)
    drifting.drift_moves_nothing_with_room(drift_by_library, case)
    drifting.drift_is_never_worse_than_its_fallback(drift_by_library, case)
    drifting.costs_are_enough(case)


@settings(max_examples=10)
@given(drift_cases())
def test_rungs_trade_error_for_rate(case: DriftCase) -> None:
    drifting.rungs_trade_error_for_rate(case)


@settings(max_examples=40)
@given(drift_cases(), st.integers(1, 3))
def test_a_byte_more_of_budget_never_raises_the_error(case: DriftCase, more: int) -> None:
    """Of containers of up to 512 bytes: there the search leaves less than a byte unused that it could have used."""
    assert max(case.budget >> SLACK_BITS, LEAST_SLACK) < 8 * 1024
    one, two = (drift_by_library(case.position, case.stream, case.head_dim, case.budget + b) for b in (0, 8192 * more))
    for token in range(len(case.position)):
        before, after = case.error(token, one[token].tolist()), case.error(token, two[token].tolist())
        assert after <= before


def squared(
    position: np.ndarray, symbols: np.ndarray, offset: np.ndarray, scale: np.ndarray, steps: np.ndarray
) -> list:
    """Exact errors ``sum((steps_0 + steps_1 u - offset - scale m)**2)`` of rows; a grid of ``steps`` made positions."""
    errors = []
    for u, m, o, s, (first, distance) in zip(position.tolist(), symbols.tolist(), offset, scale, steps):
        a, b = Fraction(float(o)), Fraction(float(s))
        errors.append(sum(
            (Fraction(float(first)) + Fraction(float(distance)) * Fraction(v, grid.ONE) - a - b * k) ** 2
            for v, k in zip(u, m)
        ))  # fmt: skip
    return errors


@settings(max_examples=25)
@given(drift_cases(), st.integers(0, 2**16), st.sampled_from([1.0, 1e-4, 37.5]))
def test_refit_never_raises_the_error(case: DriftCase, seed: int, size: float) -> None:
    stream, tokens = case.stream, len(case.position)
    rng = np.random.default_rng(seed)
    symbols = drift_by_library(case.position, stream, case.head_dim, case.budget)
    scale = (size * rng.uniform(0.1, 1, tokens)).astype(np.float16)
    if stream.grid == "min-max":
        offset = (size * rng.standard_normal(tokens)).astype(np.float16)
        fitted = grid.refit(case.position, symbols, offset, scale)
    else:
        # Least squares about the middle level; the unbiased gain gives up squared error on purpose.
        offset = np.zeros(tokens, np.float16)
        position = case.position - (stream.levels - 1) * grid.ONE // 2
        fitted = offset, grid.regain(case.position, symbols, scale, stream.levels, False)
        symbols = symbols.astype(np.int64) - (stream.levels - 1) // 2
        steps = np.stack([offset, scale], axis=1)
        compared = zip(squared(position, symbols, *fitted, steps), squared(position, symbols, offset, scale, steps))
        assert all(after <= before for after, before in compared)
        return
    steps = np.stack([offset, scale], axis=1)
    before = squared(case.position, symbols, offset, scale, steps)
    assert all(a <= b for a, b in zip(squared(case.position, symbols, *fitted, steps), before))


@settings(max_examples=60)
@given(st.integers(0, 2**16), st.integers(2, 17), st.integers(1, 40), st.integers(0, 2**12))
def test_refit_of_rows_that_hardly_miss_their_levels(seed: int, levels: int, values: int, most: int) -> None:
    """The best offset and scale are so near the old ones that rounding them to FP16 may cost more than they gain."""
    rng = np.random.default_rng(seed)
    symbols = rng.integers(0, levels, (4, values), np.uint8)
    position = (symbols.astype(np.int64) * grid.ONE + rng.integers(-most, most + 1, symbols.shape)).astype(np.int32)
    position = position.clip(0, (levels - 1) * grid.ONE)
    offset, scale = (x.astype(np.float16) for x in (rng.standard_normal(4), rng.uniform(0.1, 1, 4)))
    steps = np.stack([offset, scale], axis=1)
    before = squared(position, symbols, offset, scale, steps)
    after = squared(position, symbols, *grid.refit(position, symbols, offset, scale), steps)
    assert all(a <= b for a, b in zip(after, before))


def drifted(stream: StreamPlan, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions, levels and rungs of a few hostile tokens of a grouped stream."""
    assert stream.grouping is not None
    x = hostile(kind, 3, 2, 8, seed, small_plan().signs).clip(-60000, 60000).reshape(3, -1)
    position = grouped_positions(x, grouped_scale(x, stream.step, stream.grouping), stream.grouping)
    _, levels, rungs = (drift_grouped if stream.grouping.states == 1 else drift_dependent)(position, stream)
    return position, levels, rungs


@settings(max_examples=20)
@given(st.sampled_from(HOSTILE), st.sampled_from([1, 4]), st.integers(0, 2**16))
def test_groups_drift_no_further_with_more_words(kind: str, states: int, seed: int) -> None:
    stream = small_plan(states).key
    assert stream.grouping is not None
    coarsest = len(drifted(stream, kind, seed)[2])
    rungs, errors = [], []

    def note(position: np.ndarray, levels: np.ndarray, used: np.ndarray) -> None:
        rungs.append(used)
        # In steps of every value's own grid: the finer rung is nearer in each, so weights do not matter.
        errors.append(np.square(position.astype(np.int64) - (levels.astype(np.int64) << 16)).sum(axis=1))

    for words in range(stream.words - 1, stream.words + 3):
        wider = grouped(words, 1, stream.mean, stream.step, stream.gain, stream.grouping)
        note(*drifted(wider, kind, seed))
    plenty = grouped(64, 1, stream.mean, stream.step, stream.gain, stream.grouping)
    note(*drifted(plenty, kind, seed))
    assert coarsest and not rungs[-1].any(), "with room for all nothing drifts"
    if states == 1:
        assert (np.diff(np.stack(errors), axis=0) <= 0).all()
        assert (np.diff(np.stack(rungs).astype(int), axis=0) <= 0).all()


def tokens_that_drift(plan: Plan, keys: np.ndarray, values: np.ndarray) -> list[int]:
    """How many keys and how many values decode to something else than with room for all."""
    roomy = replace(plan, key=replace(plan.key, words=200), value=replace(plan.value, words=200))
    found = [codec.decode(codec.encode(keys, values)) for codec in (Codec(plan), Codec(roomy))]
    return [int((a != b).any(axis=(1, 2)).sum()) for a, b in zip(*found)]


@pytest.mark.parametrize("tiny", [False, True], ids=["four heads", "one head"])
@pytest.mark.parametrize("states", [1, 4], ids=["groups", "trellis"])
def test_most_tokens_of_the_drifting_plans_drift(states: int, tiny: bool) -> None:
    plan = drifting_plan(states, tiny=tiny)
    x = np.random.default_rng(0).standard_normal((2, 20, plan.kv_heads, plan.head_dim)).astype(np.float32)
    assert min(tokens_that_drift(plan, *x)) > 10


@pytest.mark.parametrize("coder", strategies.CODERS)
def test_pages_of_the_checks_drift(coder: str) -> None:
    case = find(
        strategies.page_tensors([coder]),
        lambda case: min(tokens_that_drift(case.plan, case.keys, case.values)) > 0,
        settings=settings(max_examples=60, derandomize=True, database=None, phases=[Phase.generate]),
    )
    assert len(case.keys)
