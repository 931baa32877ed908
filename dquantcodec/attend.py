"""Decode attention straight from levels: queries are rotated instead of keys (paper, section 4.5).

With ``k = R'(o + s m + mean)`` the logit of a query is ``o sum(q') + s (q' . m) + q' . mean`` for ``q' = R q``: one
dot product of the rotated query with the levels, the affine pair applied once.  Values likewise: the weighted sum of
levels is rotated back once per query, not once per token.  Partial results of pages merge by their log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import as_floats, to_float32
from .errors import InputError
from .kernels import inlined, kernel
from .means import mean_values
from .page import KindFields
from .plan import Plan
from .rotate import LANES, rotate, unrotate


@dataclass(frozen=True, eq=False)
class Problem:
    """Queries float32 ``[H, R, D]``, grouped by the KV head they read (``R`` = positions times group), scaled."""

    query: NDArray[np.float32]
    rotated: NDArray[np.float32]
    shape: tuple[int, ...]

    @staticmethod
    def of(query: ArrayLike | Any, plan: Plan, scale: float | None) -> Problem:
        q = as_floats(query, "query")
        if q.ndim not in (2, 3) or q.shape[-1] != plan.head_dim or q.shape[-2] % plan.kv_heads:
            raise InputError(
                f"query has shape {q.shape}; expected [Q, {plan.head_dim}] or [L, Q, {plan.head_dim}] "
                f"with Q a multiple of {plan.kv_heads} KV heads",
                code="input-shape",
                kind="query",
            )
        grouped = to_float32(q).reshape(-1, plan.kv_heads, q.shape[-2] // plan.kv_heads, plan.head_dim)
        rows = np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(plan.kv_heads, -1, plan.head_dim)
        rows *= np.float32(1 / math.sqrt(plan.head_dim) if scale is None else scale)
        rotated = rotate(np.ascontiguousarray(rows.transpose(1, 0, 2)), plan.signs)
        return Problem(rows, np.ascontiguousarray(rotated.transpose(1, 0, 2)), q.shape)

    def shaped(
        self, out: NDArray[np.float32], lse: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Results ``[H, R, D]`` and ``[H, R]`` in the caller's order."""
        heads, rows, dim = out.shape
        positions = self.shape[0] if len(self.shape) == 3 else 1
        group = rows // positions
        out = out.reshape(heads, positions, group, dim).transpose(1, 0, 2, 3).reshape(self.shape)
        lse = lse.reshape(heads, positions, group).transpose(1, 0, 2).reshape(self.shape[:-1])
        return np.ascontiguousarray(out), np.ascontiguousarray(lse)


@dataclass(frozen=True, eq=False)
class Levels:
    """One page's tiles of one kind: levels uint8 ``[tiles, n, 32]``, affine float32 ``[32 * tiles, 2]``.

    ``mean`` float32 ``[H, D]`` or empty; ``inside`` says which rows are wanted tokens; the page's exponent is kept
    apart as ``factor``.
    """

    levels: NDArray[np.uint8]
    affine: NDArray[np.float32]
    mean: NDArray[np.float32]
    factor: float
    inside: slice

    @staticmethod
    def of(fields: KindFields, levels: NDArray[np.uint8], inside: slice) -> Levels:
        if fields.scale is not None and fields.mean is not None:
            mean = mean_values(fields.scale, fields.mean)
        else:
            mean = np.zeros((0, 0), np.float32)
        return Levels(levels, fields.affine.astype(np.float32), mean, 2.0**fields.exponent, inside)


@dataclass(frozen=True, eq=False)
class Partial:
    """Running softmax: largest logit and sum of exponentials ``[H, R]``, weighted values ``[H, R, D]``, rotated."""

    largest: NDArray[np.float32]
    total: NDArray[np.float32]
    weighted: NDArray[np.float32]

    @staticmethod
    def empty(problem: Problem) -> Partial:
        rows = problem.query.shape[:2]
        return Partial(np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32), np.zeros_like(problem.query))

    def merge(self, other: Partial) -> Partial:
        largest = np.maximum(self.largest, other.largest)
        # -inf against -inf: both sides are empty and any factor serves.
        pivot = np.where(np.isfinite(largest), largest, 0)
        mine, theirs = np.exp(self.largest - pivot), np.exp(other.largest - pivot)
        return Partial(
            largest,
            self.total * mine + other.total * theirs,
            self.weighted * mine[..., None] + other.weighted * theirs[..., None],
        )


def over_levels(problem: Problem, key: Levels, value: Levels) -> Partial:
    """Attention of all queries over one page's tokens."""
    heads, rows, _ = problem.query.shape
    query = problem.rotated * np.float32(key.factor)
    bias = np.zeros((heads, rows), np.float32)
    if key.mean.size:
        bias = np.einsum("hrd,hd->hr", query, key.mean)
    result = Partial.empty(problem)
    attend_levels(
        query, query.sum(axis=2), bias, key.levels, key.affine, value.levels, value.affine,
        key.inside.start, key.inside.stop, result.largest, result.total, result.weighted,
    )  # fmt: skip
    if value.mean.size:
        result.weighted[...] += result.total[..., None] * value.mean[:, None, :]
    result.weighted[...] *= np.float32(value.factor)
    return result


def finish(
    problem: Problem, partial: Partial, signs: NDArray[np.int8]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Output ``[H, R, D]`` in the original basis and log-sum-exp ``[H, R]``; zero and ``-inf`` without tokens."""
    total = partial.total[..., None]
    rotated = np.divide(partial.weighted, total, out=np.zeros_like(partial.weighted), where=total > 0)
    out = unrotate(np.ascontiguousarray(rotated.transpose(1, 0, 2)), signs).transpose(1, 0, 2)
    with np.errstate(divide="ignore"):
        return out, partial.largest + np.log(partial.total)


def merge_exact(
    problem: Problem,
    out: NDArray[np.float32],
    lse: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Fold exact keys and values float32 ``[E, H, D]`` into a result over pages."""
    if not len(keys):
        return out, lse
    logits = np.matmul(problem.query, keys.transpose(1, 2, 0))
    largest = np.maximum(logits.max(axis=2), lse)
    weights = np.exp(logits - largest[..., None])
    before = np.exp(lse - largest)
    total = weights.sum(axis=2) + before
    mixed = np.matmul(weights, values.transpose(1, 0, 2)) + out * before[..., None]
    return mixed / total[..., None], largest + np.log(total)


@kernel
def attend_levels(
    query, query_sum, bias, keys, key_affine, values, value_affine, start, stop, largest, total, weighted
):
    """Two passes over a page's tiles, logits between them; 32 tokens side by side make every step a vector step."""
    heads, rows, dim = query.shape
    tiles = keys.shape[0]
    levels = np.empty((dim, LANES), np.float32)
    logits = np.empty((rows, tiles * LANES), np.float32)
    dot = np.empty(LANES, np.float32)
    sums = np.empty((rows, dim, 8), np.float32)
    shift = np.empty(rows, np.float32)
    for h in range(heads):
        for tile in range(tiles):
            first = tile * LANES
            widen_levels(keys[tile], h * dim, levels)
            for r in range(rows):
                for lane in range(LANES):
                    dot[lane] = np.float32(0)
                d = 0
                while d + 4 <= dim:
                    a, b, c, e = query[h, r, d], query[h, r, d + 1], query[h, r, d + 2], query[h, r, d + 3]
                    for lane in range(LANES):
                        dot[lane] += (a * levels[d, lane] + b * levels[d + 1, lane]) + (
                            c * levels[d + 2, lane] + e * levels[d + 3, lane]
                        )
                    d += 4
                while d < dim:
                    for lane in range(LANES):
                        dot[lane] += query[h, r, d] * levels[d, lane]
                    d += 1
                for lane in range(LANES):
                    t = first + lane
                    logits[r, t] = key_affine[t, 0] * query_sum[h, r] + key_affine[t, 1] * dot[lane] + bias[h, r]
        for r in range(rows):
            peak = np.float32(-np.inf)
            for t in range(start, stop):
                peak = logits[r, t] if logits[r, t] > peak else peak
            # Logits become weights times the value's scale; tokens outside the range weigh nothing.
            sum_ = np.float32(0)
            offsets = np.float32(0)
            for t in range(tiles * LANES):
                weight = np.float32(0)
                if start <= t < stop:
                    weight = np.float32(math.exp(logits[r, t] - peak))
                    offsets += weight * value_affine[t, 0]
                    sum_ += weight
                    weight *= value_affine[t, 1]
                logits[r, t] = weight
            largest[h, r] = peak
            total[h, r] = sum_
            shift[r] = offsets
        sums[:] = np.float32(0)
        for tile in range(tiles):
            widen_levels(values[tile], h * dim, levels)
            for r in range(rows):
                weight = logits[r, tile * LANES : (tile + 1) * LANES]
                for d in range(dim):
                    for k in range(8):
                        sums[r, d, k] += (weight[k] * levels[d, k] + weight[k + 8] * levels[d, k + 8]) + (
                            weight[k + 16] * levels[d, k + 16] + weight[k + 24] * levels[d, k + 24]
                        )
        for r in range(rows):
            for d in range(dim):
                value = shift[r]
                for k in range(8):
                    value += sums[r, d, k]
                weighted[h, r, d] = value


@inlined
def widen_levels(tile, first, out):
    for d in range(out.shape[0]):
        for lane in range(LANES):
            out[d, lane] = np.float32(np.int32(tile[first + d, lane]))
