"""Drift: thresholds against the brute-force minimum, the ladder, and the hard budget."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dquantcodec import drift, grid, prefix, rans
from dquantcodec.codec import Codec
from dquantcodec.errors import CapacityError
from dquantcodec.letters import letter_table, pack
from dquantcodec.plan import Plan, StreamPlan, budget, make_plan
from dquantcodec.profile import PROFILES, Profile, StreamProfile

#: (coder, levels, letter, precision, kv_heads, head_dim, sub-streams)
CASES = [
    ("prefix", 2, 3, 8, 2, 16, 2),
    ("rans", 3, 2, 8, 1, 65, 1),
    ("prefix", 5, 3, 12, 1, 128, 1),
    ("rans", 6, 3, 12, 4, 32, 4),
    ("rans", 8, 2, 11, 2, 64, 1),
    ("prefix", 8, 3, 13, 3, 64, 1),
    ("prefix", 17, 2, 13, 2, 7, 2),
    ("rans", 17, 1, 15, 1, 96, 1),
    ("rans", 64, 1, 12, 2, 64, 2),
    ("prefix", 64, 1, 10, 1, 100, 1),
]  # fmt: skip

streams = st.sampled_from(CASES)


@lru_cache(maxsize=64)
def tightest(case: tuple[str, int, int, int, int, int, int], alpha: float = 1.4) -> Plan:
    """The plan of the least container that is not refused."""
    coder, levels, letter, precision, heads, dim, substreams = case
    size = heads * dim // substreams
    word = 2 if coder == "rans" else 4
    for words in range(2, 10000):
        container = words * word * 1024 / size
        if container < 4:
            continue
        stream = StreamProfile(levels, container, coder, precision, alpha, letter)
        try:
            plan = make_plan(Profile(stream, stream, substreams=substreams), heads, dim)
        except CapacityError:
            continue
        assert plan.key.words == words
        return plan
    raise AssertionError("no container is large enough")


def cost_of(symbols: NDArray[np.uint8], stream: StreamPlan, dim: int) -> NDArray[np.int64]:
    """Letter costs ``[T, S]`` in 1/1024 bit."""
    costs = letter_table(stream, dim).costs
    return costs[pack(symbols, stream, dim)].astype(np.int64).reshape(len(symbols), stream.substreams, -1).sum(axis=2)


def words_of(symbols: NDArray[np.uint8], stream: StreamPlan, dim: int) -> NDArray[np.int32]:
    """Words ``[T, S]`` that the coder really needs."""
    letters = pack(symbols, stream, dim).reshape(len(symbols), stream.substreams, -1)
    coder = rans if stream.coder == "rans" else prefix
    return coder.encode(letters, stream)[1]


@st.composite
def positions(draw: st.DrawFn, stream: StreamPlan, n: int) -> NDArray[np.int32]:
    """Positions of a few tokens, natural and hostile."""
    tokens = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    top = (stream.levels - 1) * grid.ONE
    kind = draw(st.sampled_from(["normal", "uniform", "rarest", "alternating", "zero", "top", "ties", "outlier"]))
    shape = (tokens, n)
    if kind == "normal":
        u = rng.normal(top / 2, top / 6.5, shape)
    elif kind == "uniform":
        u = rng.uniform(0, top, shape)
    elif kind == "rarest":
        u = np.full(shape, int(drift.symbol_rates(stream).argmax()) * grid.ONE)
    elif kind == "alternating":
        u = np.arange(n) % 2 * np.full(shape, top)
    elif kind == "zero":
        u = np.zeros(shape)
    elif kind == "top":
        u = np.full(shape, top)
    elif kind == "ties":
        u = rng.integers(0, stream.levels, shape) * grid.ONE + grid.ONE // 2
    else:
        u = np.zeros(shape)
        u[:, rng.integers(n)] = top
    return np.clip(np.rint(u), 0, top).astype(np.int32)


@given(st.lists(st.floats(0, 40), min_size=2, max_size=64), st.floats(0, 200) | st.just(0.0), st.integers(0, 2**32))
def test_thresholds_give_the_brute_force_minimum_for_any_rates(rates: list[float], kappa: float, seed: int) -> None:
    cuts = drift.thresholds(np.array(rates), kappa)
    assert cuts.shape == (len(rates) - 1,)
    assert (np.diff(cuts.astype(np.int64)) >= 0).all()
    top = (len(rates) - 1) * grid.ONE
    near = [int(c) + d for c in cuts for d in (0, 1) if 0 <= int(c) + d <= top]
    for u in [0, top, *near, *np.random.default_rng(seed).integers(0, top + 1, 50).tolist()]:
        level = int((cuts < u).sum())
        (best,) = oracles.best_levels([u], rates, kappa)
        chosen, least = (oracles.drift_cost([u], [m], rates, kappa) for m in (level, best))
        assert chosen <= least + 1e-9 * (1 + least)


def test_a_tie_goes_to_the_lower_level() -> None:
    assert drift.thresholds(np.zeros(4), 0.0).tolist() == [32768, 32768 + 65536, 32768 + 2 * 65536]
    stream = replace(tightest(CASES[6]).key, substreams=1)
    u = [[0, 32768, 32769, 98304, 98305, 3 * 65536, 4 * 65536 - 32768]]
    symbols, _ = drift.drift(np.array(u, np.int32), stream, 7, np.full((1, 1), 1 << 40, np.int64))
    assert symbols.tolist() == [[0, 0, 1, 1, 2, 3, 3]]


@pytest.mark.parametrize("case", CASES)
def test_every_rung_is_the_brute_force_minimum_of_its_kappa(case: tuple[str, int, int, int, int, int, int]) -> None:
    plan = tightest(case)
    steps = drift.ladder(plan.key, plan.head_dim)
    top = (plan.key.levels - 1) * grid.ONE
    u = np.unique(np.linspace(0, top, 97).astype(np.int32))
    levels = np.arange(plan.key.levels)
    assert steps.kappas[0] == 0
    assert (np.diff(steps.kappas) > 0).all()
    for kappa, cuts in zip(steps.kappas, steps.thresholds):
        chosen = (cuts[None, :] < u[:, None]).sum(axis=1)
        costs = (u[:, None] / grid.ONE - levels) ** 2 + kappa * steps.rates
        assert (costs[np.arange(len(u)), chosen] <= costs.min(axis=1) * (1 + 1e-9) + 1e-9).all(), kappa


@pytest.mark.parametrize("case", CASES)
def test_rungs_lower_the_rate_step_by_step_down_to_the_least(case: tuple[str, int, int, int, int, int, int]) -> None:
    plan = tightest(case)
    steps = drift.ladder(plan.key, plan.head_dim)
    top = (plan.key.levels - 1) * grid.ONE
    u = np.linspace(0, top, 500).astype(np.int32)
    rates = np.array([steps.rates[(cuts[None, :] < u[:, None]).sum(axis=1)] for cuts in steps.thresholds])
    assert (np.diff(rates, axis=0) <= 1e-12).all(), "for every single value"
    np.testing.assert_allclose(rates[-1], steps.rates.min())
    # Rates are mirrored, so positive and negative values drift alike.
    assert (steps.rates == steps.rates[::-1]).all()


@given(streams, st.data())
def test_rung_zero_is_the_nearest_level(case: tuple[str, int, int, int, int, int, int], data: st.DataObject) -> None:
    plan = tightest(case)
    position = data.draw(positions(plan.key, plan.values))
    plenty = np.full((len(position), plan.key.substreams), 1 << 40, np.int64)
    symbols, rungs = drift.drift(position, plan.key, plan.head_dim, plenty)
    assert (rungs == 0).all(), "with room enough nothing drifts"
    distance = np.abs(position - symbols.astype(np.int64) * grid.ONE)
    assert distance.max() <= grid.ONE // 2


@given(streams, st.floats(0, 1.3), st.data())
def test_the_chosen_rung_fits_and_nearly_fills_its_budget_or_the_one_below_does_not_fit(
    case: tuple[str, int, int, int, int, int, int], ease: float, data: st.DataObject
) -> None:
    plan = tightest(case)
    stream = plan.key
    position = data.draw(positions(stream, plan.values))
    least = budget(stream)
    natural, _ = drift.drift(position, stream, plan.head_dim, np.full((len(position), stream.substreams), 1 << 40))
    natural_cost = cost_of(natural, stream, plan.head_dim)
    budgets = (least + ease * (natural_cost - least)).astype(np.int64)
    budgets = np.maximum(budgets, least)
    symbols, rungs = drift.drift(position, stream, plan.head_dim, budgets)
    assert symbols.max() < stream.levels
    assert (cost_of(symbols, stream, plan.head_dim) <= budgets).all()
    steps = drift.ladder(stream, plan.head_dim)
    size = plan.values // stream.substreams
    for t in range(len(position)):
        for j in range(stream.substreams):
            rung, part = int(rungs[t, j]), slice(j * size, (j + 1) * size)
            u, m = position[t, part], symbols[t, part]
            if rung < len(steps.kappas):
                best = oracles.best_levels(u.tolist(), steps.rates.tolist(), steps.kappas[rung])
                costs = [oracles.drift_cost(u, c, steps.rates, steps.kappas[rung]) for c in (m.tolist(), best)]
                assert costs[0] <= costs[1] * (1 + 1e-9) + 1e-9
            else:
                cheapest = [int(steps.cheapest[i % plan.head_dim % stream.letter]) for i in range(size)]
                assert m.tolist() == cheapest
            if rung > 0:
                below = (steps.thresholds[rung - 1][None, :] < u[:, None]).sum(axis=1).astype(np.uint8)
                costs = letter_table(stream, plan.head_dim).costs
                frequencies = stream.frequencies.tolist()
                letters = oracles.pack(below.tolist(), plan.head_dim, stream.levels, stream.letter, frequencies)
                # A rung that leaves less than one part in 512 of the budget, or two bits, need not be improved.
                left = int(budgets[t, j]) - int(cost_of(symbols, stream, plan.head_dim)[t, j])
                assert int(costs[letters].sum()) > budgets[t, j] or left <= max(int(budgets[t, j]) >> 9, 2048)


@given(streams, st.data())
def test_no_room_at_all_leaves_the_cheapest_letter_again_and_again(
    case: tuple[str, int, int, int, int, int, int], data: st.DataObject
) -> None:
    plan = tightest(case)
    stream = plan.key
    position = data.draw(positions(stream, plan.values))
    symbols, rungs = drift.drift(
        position, stream, plan.head_dim, np.zeros((len(position), stream.substreams), np.int64)
    )
    assert (rungs == len(drift.ladder(stream, plan.head_dim).kappas)).all()
    table = letter_table(stream, plan.head_dim)
    letters = pack(symbols, stream, plan.head_dim)
    assert (table.costs[letters] <= table.costs.min()).all()


@given(streams, st.data())
def test_tokens_drift_alone(case: tuple[str, int, int, int, int, int, int], data: st.DataObject) -> None:
    plan = tightest(case)
    position = data.draw(positions(plan.key, plan.values))
    symbols, rungs = drift.drift(position, plan.key, plan.head_dim)
    for t in range(len(position)):
        alone = drift.drift(position[t : t + 1], plan.key, plan.head_dim)
        assert (alone[0] == symbols[t]).all()
        assert (alone[1] == rungs[t]).all()


@pytest.mark.parametrize("case", CASES)
def test_the_least_container_holds_the_cheapest_letters(case: tuple[str, int, int, int, int, int, int]) -> None:
    plan = tightest(case)
    steps = drift.ladder(plan.key, plan.head_dim)
    symbols = np.array([[steps.cheapest[i % plan.head_dim % plan.key.letter] for i in range(plan.values)]], np.uint8)
    assert (words_of(symbols, plan.key, plan.head_dim) <= plan.key.words).all()


@pytest.mark.parametrize("kind", oracles.HOSTILE)
@pytest.mark.parametrize("case", CASES)
def test_hostile_tokens_fit_the_least_container(case: tuple[str, int, int, int, int, int, int], kind: str) -> None:
    plan = tightest(case)
    codec = Codec(plan)
    x = oracles.hostile(kind, 5, plan.kv_heads, plan.head_dim, 0, plan.signs)
    pages = codec.encode(x, x)
    assert codec.check(pages) == []
    for which, stream in (("key", plan.key), ("value", plan.value)):
        assert (words_of(codec.symbols(pages, which), stream, plan.head_dim) <= stream.words).all()


@pytest.mark.parametrize(
    ("levels", "letter", "precision", "heads", "dim"),
    [
        (5, 1, 15, 1, 115),
        (5, 3, 13, 8, 112),
        (9, 1, 15, 8, 112),
        (11, 1, 15, 2, 128),
        (15, 2, 15, 8, 128),
        (26, 1, 15, 8, 64),
    ],
)
def test_a_rans_plan_that_is_not_refused_holds_its_cheapest_letters(
    levels: int, letter: int, precision: int, heads: int, dim: int
) -> None:
    # Repeating one letter of frequency f at a state near 2**16 costs more than p - log2 f: states are integers.  If
    # the cheapest letters do not fit, the encoder has nowhere left to go and never ends.
    plan = tightest(("rans", levels, letter, precision, heads, dim, 1))
    steps = drift.ladder(plan.key, plan.head_dim)
    symbols = np.array([[steps.cheapest[i % dim % letter] for i in range(plan.values)]], np.uint8)
    needed = int(words_of(symbols, plan.key, dim).max())
    assert needed <= plan.key.words


@pytest.mark.parametrize("kind", ["key", "value"])
@pytest.mark.parametrize("coder", ["rans", "prefix"])
def test_impossible_budgets_are_refused_when_the_codec_is_built(coder: str, kind: str) -> None:
    good, bad = StreamProfile(8, 330, coder, 13), StreamProfile(8, 100, coder, 13)
    profile = Profile(bad, good) if kind == "key" else Profile(good, bad)
    with pytest.raises(CapacityError, match=f"{kind} container of") as caught:
        Codec(profile, 8, 128)
    assert caught.value.code == "capacity-container"
    assert caught.value.where == {"kind": kind}


@pytest.mark.parametrize("case", CASES)
def test_a_word_less_than_the_least_container_is_refused(case: tuple[str, int, int, int, int, int, int]) -> None:
    coder, levels, letter, precision, heads, dim, substreams = case
    plan = tightest(case)
    container = (plan.key.words - 1) * plan.key.word_bytes * 1024 / (plan.values // substreams)
    stream = StreamProfile(levels, container, coder, precision, 1.4, letter)
    if plan.key.words == 2:
        return  # the least there are
    with pytest.raises(CapacityError):
        make_plan(Profile(stream, stream, substreams=substreams), heads, dim)


@pytest.mark.parametrize("name", PROFILES)
def test_a_larger_container_never_costs_quality(name: str) -> None:
    rng = np.random.default_rng(0)
    profile = PROFILES[name].value
    errors = []
    for extra in (0, 20, 60, 400):
        stream = StreamProfile(
            profile.levels, profile.container + extra, profile.coder, profile.precision, 1.4, profile.letter
        )
        plan = make_plan(Profile(stream, stream, substreams=1), 2, 128)
        position = positions_of_normals(rng, plan.value, 64, 256)
        symbols, rungs = drift.drift(position, plan.value, 128)
        errors.append(float(((position / grid.ONE - symbols) ** 2).sum()))
        rng = np.random.default_rng(0)
    assert errors == sorted(errors, reverse=True)
    assert (rungs == 0).all(), "400 bytes more is room for all"


def positions_of_normals(rng: np.random.Generator, stream: StreamPlan, tokens: int, n: int) -> NDArray[np.int32]:
    x = rng.standard_normal((tokens, n)).astype(np.float32)
    offset, scale = grid.min_max_grid(x, stream.levels)
    return grid.positions(x, offset, scale, stream.levels)
