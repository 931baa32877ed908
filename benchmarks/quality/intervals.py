"""Ratios of a measure between two methods over the same documents, with paired bootstrap intervals.

Documents, not tokens, are what a result should carry over to, so whole documents are drawn with replacement and both
methods keep their pairing: what makes a document hard for one usually does for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 20_000


@dataclass(frozen=True)
class Interval:
    """A geometric mean and the percentile interval of its resamples."""

    mean: float
    low: float
    high: float


def geometric_mean(x: ArrayLike) -> float:
    """0 if any of ``x`` is 0."""
    with np.errstate(divide="ignore"):
        return float(np.exp(np.mean(np.log(np.asarray(x, np.float64)))))


def ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    resamples: int = RESAMPLES,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Geometric mean over documents ``[n]`` of ``numerators / denominators``, none negative.

    Where both are 0 the ratio counts as 1; where only the denominator is 0 it is infinite.
    """
    top, bottom = (np.asarray(x, np.float64) for x in (numerators, denominators))
    if top.shape != bottom.shape or top.ndim != 1 or not len(top):
        raise ValueError(f"paired measures of one or more documents needed, not {top.shape} and {bottom.shape}")
    equal = top == bottom
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(equal, 0.0, np.log(top) - np.log(bottom))
        drawn = np.random.default_rng(seed).integers(0, len(logs), (resamples, len(logs)))
        means = logs[drawn].mean(axis=1)
        # "nearest" never interpolates, which between an infinite and a finite mean would give NaN.
        tail = (1 - confidence) / 2
        low, high = np.quantile(means, [tail, 1 - tail], method="nearest")
        return Interval(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)))
