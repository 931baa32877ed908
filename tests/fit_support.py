"""Tokens of unlike channels, and plans compared, for the tests of fitting."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dquantcodec.plan import Plan, StreamPlan


def normal(tokens: int, spread: NDArray[np.float64], seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of independent normal channels, ``spread`` ``[H, D]``."""
    x = np.random.default_rng(seed).standard_normal((2, tokens, *spread.shape)) * spread
    return x[0].astype(np.float32), x[1].astype(np.float32)


def random_spread(heads: int, dim: int, low: float = 0.05, high: float = 3.0, seed: int = 1) -> NDArray[np.float64]:
    return np.random.default_rng(seed).permuted(np.tile(np.geomspace(low, high, dim), (heads, 1)), axis=1)


def same_plans(a: Plan, b: Plan) -> bool:
    def numbers(stream: StreamPlan) -> tuple[Any, ...]:
        g = stream.grouping
        own = tuple(v for k, v in sorted(stream.__dict__.items()) if k not in ("grouping", "frequencies"))
        if g is None:
            return own, stream.frequencies.tolist()
        return own, g.head_dim, g.classes, g.tables, g.letters, g.fields, g.choice.tolist(), g.order.tolist()

    return all(numbers(getattr(a, kind)) == numbers(getattr(b, kind)) for kind in ("key", "value"))
