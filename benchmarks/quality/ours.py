"""dquantcodec as compared methods: its named profiles, variance classes at a family of rates, and the paper's grid at a
family of rates for each coder.

A named profile keeps as many leading tokens exact as files do by default, and pays for them.

A family member is asked for bits per value, which are stated as for named profiles: every byte of a page counted, for
streams of 1024 values.  :func:`containers` splits them between keys and values; :func:`best_stream` then takes the
level count and the sharpening of least error on Gaussian streams, computed by :func:`gaussian_error` for the geometry
at hand.  The library allows 64 levels, whose entropy on streams of 1024 values is 5.3 bits; more bytes would stay
empty.  Keys, which get more bytes than values, are there at 5 bits per value, where :data:`RATES` ends.

The family of variance classes has no more to choose than containers.  A class has levels up to 127, which wide channels
use up from about 5.5 bits on; tokens then take a larger step, and more bytes help less.

Constants of the method: rotation signs and letter tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
from method import Coded, Method, Pair
from numpy.typing import NDArray

from dquantcodec import PROFILES, Codec, DQuantError, Profile, StreamProfile
from dquantcodec.allocate import LayerSample, allocate
from dquantcodec.drift import symbol_rates, thresholds
from dquantcodec.errors import InputError
from dquantcodec.file.groupings import plan_bytes
from dquantcodec.fit import fit_plan
from dquantcodec.grid import ONE
from dquantcodec.letters import letter_table
from dquantcodec.mid_tread import design
from dquantcodec.plan import StreamPlan, budget, make_plan
from dquantcodec.profile import TILE, ClassRule

#: Written by ``python benchmarks/quality sensitivities``.
SENSITIVITIES = Path(__file__).resolve().parents[1] / "results" / "quality" / "sensitivities.json"

SOURCE = "this library; D-Quant, arXiv 2609.19880"

#: Bits per value of the families.
RATES = (1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 4.5, 5.0)

#: Bits per value of the family with variance classes; the named profiles lie between.
CLASS_RATES = (1.6, 4.0, 5.0, 6.0, 8.0)

#: Sub-streams of a token as in the named profiles of each coder.
SUBSTREAMS = {"prefix": 2, "rans": 1}

#: Bytes that a token's keys and values of 1024 each keep beside their containers: two FP16 pairs, and an INT8 mean per
#: channel with FP16 scales per 128 tokens, padded (README, "What is stored for a token").
BESIDE_CONTAINERS = 16.5
#: The same where tokens keep a scale alone.
BESIDE_CLASSES = 12.5

#: The paper's containers (section 5.1).
PAPER_KEY, PAPER_VALUE = 331, 231

#: A rotated stream of at most 63 levels fills no more of 1024 values.
MOST_ROTATED = 600

LEVELS = range(2, 65)
SHARPENINGS = (1.0, 1.2, 1.4)
PRECISION = 13

#: The normal distribution, tabulated because NumPy has none; linear interpolation errs by less than 1e-7.
_TABLE = np.linspace(-9, 9, 18001)
_CDF = np.array([NormalDist().cdf(y) for y in _TABLE])


def containers(bits: float, beside: float = BESIDE_CONTAINERS) -> tuple[float, float]:
    """Container bytes of keys and of values, for streams of 1024 values, that make ``bits`` per value in all.

    ``beside`` are the bytes that a token keeps beside its containers.
    Up to the paper's budget they share in its ratio (331 to 231); above it, keys keep its 100 bytes more (section 5.4:
    moderately more for keys; a fixed ratio would give them several bits more at high rates).
    """
    both = bits * 2048 / 8 - beside
    paper = PAPER_KEY + PAPER_VALUE
    apart = (PAPER_KEY - PAPER_VALUE) * min(1.0, both / paper)
    return (both + apart) / 2, (both - apart) / 2


@lru_cache(maxsize=16)
def _extremes(values: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Minima and maxima, float64 ``[64]`` each, of streams of ``values`` standard normals: eight quantiles of either.

    Streams of narrow range decide at high rates: their steps are short and their symbols many and dear.
    """
    quantiles = (np.arange(8) + 0.5) / 8
    highest = np.array([NormalDist().inv_cdf(q ** (1 / values)) for q in quantiles])
    return np.repeat(-highest, 8), np.tile(highest, 8)


def _rungs(rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """Drift's thresholds float64 ``[rungs, M - 1]`` in grid steps, for zero and multipliers half octaves apart.

    The last rung is the first on which only one level is left.  Positions are clipped to the grid, so a threshold
    outside it is never passed, or always.
    """
    top = len(rates) - 1
    rungs = []
    for kappa in [0.0, *(2.0 ** (k / 2) for k in range(-18, 48))]:
        cuts = thresholds(rates, kappa) / ONE
        rungs.append(np.where(cuts >= top, np.inf, np.where(cuts <= 0, -np.inf, cuts)))
        if np.isinf(rungs[-1]).all():
            break
    return np.array(rungs)


def _mean_cost(costs: NDArray[np.float64], masses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over letters of independent symbols: ``costs`` ``[M] * k``, ``masses`` ``[..., M]``."""
    mean = masses @ costs.reshape(len(costs), -1)
    for _ in range(costs.ndim - 1):
        mean = (masses[..., None, :] @ mean.reshape(*masses.shape, -1))[..., 0, :]
    return mean[..., 0]


def gaussian_error(plan: StreamPlan, kv_heads: int, head_dim: int) -> float:
    """Relative squared error that ``plan`` leaves on streams of independent standard normals, without simulation.

    For quantiles of a stream's two extremes, between which its grid lies, and for every multiplier of drift, the masses
    of the levels follow from the normal distribution, the mean and variance of a letter's cost from the table's true
    costs (integer frequencies, whole code lengths), and the error from the least-squares refit.  A stream's cost is
    taken as normal, at three nodes; each finds the error at which it fits the container.
    """
    low, high = _extremes(kv_heads * head_dim)
    cuts = _rungs(symbol_rates(plan))
    step = (high - low)[:, None] / (plan.levels - 1)
    inner = cuts[:, None, :] * step + low[:, None]  # [rungs, pairs, M - 1]
    # A stream ends at its extremes, so its values follow the normal distribution cut there.
    edges = np.broadcast_to(np.stack([low, high], axis=1), (len(cuts), len(low), 2))
    bounds = np.concatenate([edges[..., :1], np.clip(inner, edges[..., :1], edges[..., 1:]), edges[..., 1:]], axis=2)
    below, density = np.interp(bounds, _TABLE, _CDF), np.exp(-(bounds**2) / 2) / math.sqrt(2 * math.pi)
    inside = (below[..., -1:] - below[..., :1])[0, :, 0]
    masses = np.diff(below, axis=2) / inside[:, None]
    moments = -np.diff(density, axis=2) / inside[:, None]
    seconds = 1 - np.diff((bounds * density)[0, :, [0, -1]], axis=0)[0] / inside
    m = np.arange(plan.levels) - (plan.levels - 1) / 2
    mean = moments.sum(axis=2)
    spread = masses @ m**2 - (masses @ m) ** 2
    shared = moments @ m - mean * (masses @ m)
    explained = np.divide(shared**2, spread, out=np.zeros_like(spread), where=spread > 1e-12)
    error = (seconds - mean**2 - explained) / (seconds - mean**2)

    costs = letter_table(plan, plan.letter).costs.astype(np.float64).reshape((plan.levels,) * plan.letter) / 1024
    letters = kv_heads // plan.substreams * -(-head_dim // plan.letter)
    cost = _mean_cost(costs, masses)
    deviation = np.sqrt(np.maximum(_mean_cost(costs**2, masses) - cost**2, 0) / letters)
    allowed = budget(plan) / 1024 / letters
    # Gauss-Hermite nodes of a normal.
    nodes = ((0.0, 2 / 3), (math.sqrt(3), 1 / 6), (-math.sqrt(3), 1 / 6))
    return sum(
        weight * float(np.interp(allowed, (cost + node * deviation)[::-1, pair], error[::-1, pair]))
        for pair in range(len(low))
        for node, weight in nodes
    ) / len(low)


def _candidate(container: float, coder: str, levels: int, alpha: float) -> StreamProfile:
    return StreamProfile(levels, container, coder, precision=PRECISION, alpha=alpha)


@lru_cache(maxsize=4096)
def _error(container: float, coder: str, levels: int, alpha: float, kv_heads: int, head_dim: int) -> float:
    """:func:`gaussian_error` of a candidate; infinite where the container cannot hold its cheapest letters."""
    if levels not in LEVELS:
        return math.inf
    stream = _candidate(container, coder, levels, alpha)
    try:
        plan = make_plan(Profile(stream, stream, substreams=SUBSTREAMS[coder]), kv_heads, head_dim).value
    except DQuantError:
        return math.inf
    return gaussian_error(plan, kv_heads, head_dim)


@lru_cache(maxsize=1024)
def best_stream(container: float, coder: str, kv_heads: int, head_dim: int) -> StreamProfile:
    """The level count and sharpening of least :func:`gaussian_error` in a container (of 1024 values).

    Letters are as long as the library's own rule allows.  Levels and sharpening are searched in turn, levels by descent
    over two neighbours on each side, because even and odd counts (without and with a level at zero) form two curves.
    """

    def error(levels: int, alpha: float) -> float:
        return _error(container, coder, levels, alpha, kv_heads, head_dim)

    # Entropy-coded levels of a normal take about half a bit less than the logarithm of their count.
    levels = min(max(round(2 ** (container * 8 / 1024 + 0.5)), LEVELS.start), LEVELS.stop - 1)
    alpha = SHARPENINGS[0]
    while math.isinf(error(levels, alpha)) and levels > LEVELS.start:
        levels -= 1
    while True:
        before = levels, alpha
        levels = min((error(m, alpha), m) for m in range(levels - 2, levels + 3))[1]
        alpha = min((error(levels, a), a) for a in SHARPENINGS)[1]
        if (levels, alpha) == before:
            return _candidate(container, coder, levels, alpha)


def rate_profile(bits: float, coder: str, kv_heads: int, head_dim: int) -> Profile:
    """The profile of about ``bits`` per value for a geometry; see the module."""
    key, value = (best_stream(container, coder, kv_heads, head_dim) for container in containers(bits))
    key = StreamProfile(key.levels, key.container, coder, PRECISION, key.alpha, key.letter, mean=True)
    return Profile(key, value, substreams=SUBSTREAMS[coder], name=f"{bits:.2f} {coder}")


def _class_stream(container: float, source: str, gain: str, mean: bool) -> StreamProfile:
    """A stream in classes; where those suit a layer badly it is rotated, with the fewest levels that fill it."""
    room = min(container, MOST_ROTATED)
    for levels in range(3, 65, 2):
        try:
            step, weights = design(levels, 1, "prefix", PRECISION, room)
        except InputError:
            continue
        return StreamProfile(
            levels, container, precision=PRECISION, letter=1, mean=mean, grid="mid-tread", step=step, weights=weights,
            gain=gain, classes=ClassRule(source),
        )  # fmt: skip
    raise ValueError(f"no mid-tread grid fills {room} bytes of 1024 values")


@lru_cache(maxsize=32)
def class_profile(bits: float) -> Profile:
    """The profile with variance classes of about ``bits`` per value; see the module."""
    key, value = containers(bits, BESIDE_CLASSES)
    return Profile(
        _class_stream(key, "student", "least-squares", mean=True),
        _class_stream(value, "normal", "unbiased", mean=False),
        sinks=1,
        name=f"{bits:.2f} classes",
    )


def stored_bytes(codec: Codec, tokens: int) -> tuple[int, int]:
    """Bytes of keys and of values in the pages of ``tokens`` tokens, the last page cut after its last used tile.

    Together they are what a page occupies.  The page's means and its padding belong to the keys.
    """
    plan, layout = codec.plan, codec.layout
    full, rest = divmod(tokens, plan.window)
    both = full * layout.page_bytes + (layout.bytes_for(rest) if rest else 0)
    tiles = full * layout.tiles + -(-rest // TILE)
    value = tiles * TILE * (plan.value.container + 2 * plan.value.affine) + 2 * -(-tokens // plan.window)
    return both - value, value


def round_trip(codec: Codec, keys: NDArray[np.float32], values: NDArray[np.float32], sinks: int = 0) -> Coded:
    """Encode and decode one layer, ``[T, H, D]`` each; the first ``sinks`` tokens stay exact, at 16 bits a value."""
    decoded = codec.decode(codec.encode(keys[sinks:], values[sinks:]))
    exact = (keys[:sinks], values[:sinks])
    rows = (np.concatenate(parts) for parts in zip(exact, decoded))
    fitted = plan_bytes(codec.plan) / 2
    stored = (coded + 2 * first.size + fitted for coded, first in zip(stored_bytes(codec, len(keys) - sinks), exact))
    return Coded(*rows, *stored)


def fitted(profile: Profile) -> Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]:
    """Round trip by the plan that is fitted to the very tokens, as files do it."""

    def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        sinks = min(profile.sinks, len(keys) - 1)
        return round_trip(Codec(fit_plan(profile, keys[sinks:], values[sinks:])), keys, values, sinks)

    return code


def named(name: str) -> Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]:
    return fitted(PROFILES[name])


def eight_states(name: str) -> Profile:
    """The named trellis profile with eight states instead of four, and twice the bytes of tables for them."""
    profile = PROFILES[name]
    key, value = (
        replace(
            stream,
            quantiser="trellis-8",
            classes=replace(stream.classes, table_bytes=2 * stream.classes.table_bytes),
        )
        for stream in (profile.key, profile.value)
        if stream.classes
    )
    return replace(profile, key=key, value=value, name=f"{name} of 8 states")


def _rotated(name: str) -> Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]:
    """The profile as it is without data to fit classes to."""

    def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        sinks = min(PROFILES[name].sinks, len(keys) - 1)
        return round_trip(Codec(name, *keys.shape[1:]), keys, values, sinks)

    return code


def equal_profile(name: str, keys: NDArray[np.float32], values: NDArray[np.float32]) -> Profile:
    """The paper's profile with containers that make it at least as large as the named profile is for these tokens.

    For short streams the paper's profiles take more bits per value than ours, which have no offset to store; a
    comparison at equal bytes takes that away from its containers, which share in the paper's ratio.
    """
    tokens, heads, dim = keys.shape
    sinks = min(PROFILES[name].sinks, tokens - 1)
    plan = fit_plan(name, keys[sinks:], values[sinks:])
    once = plan_bytes(plan) + 4 * sinks * heads * dim
    ours = Codec(plan).layout.page_bytes / plan.window * (tokens - sinks) / tokens + once / tokens
    paper = PROFILES[f"paper-{name}"]
    usual = Codec(paper, heads, dim)
    beside = usual.layout.page_bytes / paper.window - usual.plan.key.container - usual.plan.value.container
    words = math.ceil((ours - beside) / 2)
    key = round(words * PAPER_KEY / (PAPER_KEY + PAPER_VALUE))
    streams = (
        replace(stream, container=2 * part * 1024 / (heads * dim))
        for stream, part in zip((paper.key, paper.value), (key, words - key))
    )
    return Profile(*streams, substreams=1, name=f"paper as large as {name}")


def _equal(name: str) -> Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]:
    def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        return round_trip(Codec(equal_profile(name, keys, values), *keys.shape[1:]), keys, values)

    return code


@lru_cache(maxsize=1)
def measured_harm() -> list[list[list[float]]]:
    """Of every model that was measured, the harm of coding each layer's keys and values alone."""
    stored = json.loads(SENSITIVITIES.read_text(encoding="utf-8")) if SENSITIVITIES.exists() else {"models": {}}
    return [model["harm"] for model in stored["models"].values()]


def _planned(name: str, measured: bool) -> Callable[[Sequence[Pair]], list[Coded]]:
    """``measured``: by the harm in :data:`SENSITIVITIES`, of the model with as many layers; else by tokens alone."""

    def code(layers: Sequence[Pair]) -> list[Coded]:
        sinks = min(PROFILES[name].sinks, len(layers[0][0]) - 1)
        harm: Sequence[list[float] | None] = [None] * len(layers)
        if measured:
            known = [model for model in measured_harm() if len(model) == len(layers)]
            if len(known) != 1:
                raise ValueError(f"{len(known)} measured models have {len(layers)} layers")
            harm = known[0]
        samples = [
            LayerSample(keys[sinks:], values[sinks:], harm=(h[0], h[1]) if h else None)
            for (keys, values), h in zip(layers, harm)
        ]
        return [round_trip(Codec(plan), *pair, sinks) for plan, pair in zip(allocate(name, samples), layers)]

    return code


def _at_rate(bits: float, coder: str) -> Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]:
    def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        heads, dim = keys.shape[1:]
        return round_trip(Codec(rate_profile(bits, coder, heads, dim), heads, dim), keys, values)

    return code


def methods() -> list[Method]:
    """The named profiles and their variants, and families of rates."""
    profiles = [Method(f"dquantcodec {name}", _family(name), SOURCE, named(name)) for name in PROFILES]
    profiles += [
        Method(f"dquantcodec paper as large as {name}", "dquantcodec paper profiles", SOURCE, _equal(name))
        for name in ("2.26", "1.96")
    ]
    profiles += [
        Method(f"dquantcodec {name} rotated", "dquantcodec rotated", SOURCE, _rotated(name))
        for name in ("2.26", "1.96", "3.0")
    ]
    profiles += [
        Method(f"dquantcodec {name} {how}", "dquantcodec planned", SOURCE, named(name), _planned(name, measured))
        for name in ("2.26", "1.96", "2.26-t", "1.96-t")
        for how, measured in (("planned", True), ("planned without the model", False))
    ]
    eight = fitted(eight_states("2.26-t"))
    profiles.append(Method("dquantcodec 2.26-t of 8 states", "dquantcodec trellis", SOURCE, eight))
    rates = [
        Method(f"dquantcodec classes {bits:.2f}", "dquantcodec classes", SOURCE, fitted(class_profile(bits)))
        for bits in CLASS_RATES
    ]
    rates += [
        Method(f"dquantcodec {coder} {bits:.2f}", f"dquantcodec {coder}", SOURCE, _at_rate(bits, coder))
        for coder in SUBSTREAMS
        for bits in RATES
    ]
    return profiles + rates


def _family(name: str) -> str:
    if name.startswith("paper"):
        return "dquantcodec paper profiles"
    return "dquantcodec trellis" if name.endswith("-t") else "dquantcodec profiles"
