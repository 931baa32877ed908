"""Decode attention straight from levels: queries are rotated instead of keys (paper, section 4.5).

With ``k = R'(o + s m + mean)`` the logit of a query is ``o sum(q') + s (q' . m) + q' . mean`` for ``q' = R q``: one
dot product of the rotated query with the levels, the affine pair applied once.  Values likewise: the weighted sum of
levels is rotated back once per query, not once per token.  Partial results of pages merge by their log-sum-exp.
Grouped streams need no rotation; the gains of their classes are multiplied into the query and out of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .arrays import as_floats, to_float32
from .errors import InputError
from .group_arrays import group_arrays
from .kernels import kernel
from .means import page_means
from .page import KindFields
from .plan import Plan, StreamPlan
from .rotate import rotate, unrotate
from .vector_step import LANES, WIDTH
from .vectors import dot_eight, dot_row, mix_four, mix_row, signed_row


@dataclass(frozen=True, eq=False)
class Problem:
    """Queries float32 ``[H, R, D]``, grouped by the KV head they read (``R`` = positions times group), scaled.

    ``basis`` are the same in the basis of coded keys, and ``weighted`` what the levels of keys are multiplied with.
    """

    query: NDArray[np.float32]
    basis: NDArray[np.float32]
    weighted: NDArray[np.float32]
    shape: tuple[int, ...]

    @staticmethod
    def of(query: ArrayLike | Any, plan: Plan, scale: float | None) -> Problem:
        q = checked_queries(query, plan.kv_heads, plan.head_dim)
        if not np.isfinite(rows := to_float32(q)).all():
            raise InputError("the query holds NaN or infinity", code="input-nonfinite", kind="query")
        grouped = rows.reshape(-1, plan.kv_heads, q.shape[-2] // plan.kv_heads, plan.head_dim)
        rows = np.ascontiguousarray(grouped.transpose(1, 0, 2, 3)).reshape(plan.kv_heads, -1, plan.head_dim)
        rows *= np.float32(1 / math.sqrt(plan.head_dim) if scale is None else scale)
        if plan.key.grouping is not None:
            gains = group_arrays(plan.key.grouping).factor.reshape(plan.kv_heads, 1, plan.head_dim)
            return Problem(rows, rows, rows * gains, q.shape)
        rotated = rotate(np.ascontiguousarray(rows.transpose(1, 0, 2)), plan.signs)
        basis = np.ascontiguousarray(rotated.transpose(1, 0, 2))
        return Problem(rows, basis, basis, q.shape)

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


def checked_queries(query: ArrayLike | Any, kv_heads: int, head_dim: int) -> NDArray[Any]:
    """``query`` as an array ``[Q, D]`` or ``[L, Q, D]`` with ``Q`` a multiple of the KV heads."""
    q = as_floats(query, "query")
    if q.ndim not in (2, 3) or q.shape[-1] != head_dim or q.shape[-2] % kv_heads:
        raise InputError(
            f"query has shape {q.shape}; expected [Q, {head_dim}] or [L, Q, {head_dim}] "
            f"with Q a multiple of {kv_heads} KV heads",
            code="input-shape",
            kind="query",
        )
    return q


@dataclass(frozen=True, eq=False)
class Levels:
    """Tiles of one kind of some pages: levels uint8 ``[tiles, n, 32]``, offset and scale float32 ``[32 * tiles]``.

    Levels count from ``middle`` float32 ``[n]``, half way up the grid, and the offset is that of the middle: sums of
    signed levels stay small, where sums of levels from 0 would cancel against the offset.  ``gain`` float32 ``[n]`` is
    that of the channels' classes; ``mean`` float32 ``[pages, H, D]``, or no page; ``inside`` says which rows are wanted
    tokens; the pages' exponent is kept apart as ``factor``.
    """

    levels: NDArray[np.uint8]
    offset: NDArray[np.float32]
    scale: NDArray[np.float32]
    mean: NDArray[np.float32]
    factor: float
    inside: slice
    middle: NDArray[np.float32]
    gain: NDArray[np.float32]

    @staticmethod
    def of(fields: KindFields, levels: NDArray[np.uint8], inside: slice, stream: StreamPlan) -> Levels:
        means, factor = page_means(fields.scale, fields.mean), 2.0**fields.exponent
        if stream.grouping is not None:
            arrays = group_arrays(stream.grouping)
            scale = fields.affine[:, 0].astype(np.float32)
            return Levels(levels, np.zeros_like(scale), scale, means, factor, inside, arrays.middle, arrays.factor)
        offset, scale = fields.grid(stream.levels)
        middle = np.float32((stream.levels - 1) / 2)
        offset += middle * scale
        one = np.ones(levels.shape[1], np.float32)
        return Levels(levels, offset, scale, means, factor, inside, middle * one, one)


@dataclass(frozen=True, eq=False)
class Partial:
    """Softmax of some parts: largest logit and sum of exponentials ``[P, H, R]``, weighted values ``[P, H, R, D]``,
    rotated."""

    largest: NDArray[np.float32]
    total: NDArray[np.float32]
    weighted: NDArray[np.float32]

    @staticmethod
    def empty(problem: Problem, parts: int = 1) -> Partial:
        """Of no token."""
        heads, rows, dim = problem.query.shape
        return Partial(
            np.full((parts, heads, rows), -np.inf, np.float32),
            np.zeros((parts, heads, rows), np.float32),
            np.zeros((parts, heads, rows, dim), np.float32),
        )


def over_levels(problem: Problem, key: Levels, value: Levels) -> Partial:
    """Attention of all queries over the tokens of some pages (of one, if values have means)."""
    weighted, basis = (q.reshape(-1) * np.float32(key.factor) for q in (problem.weighted, problem.basis))
    result = Partial.empty(problem)
    attend_levels(
        weighted, basis, problem.query.shape, key.mean, key.levels.reshape(-1), key.offset, key.scale, key.middle,
        value.levels.reshape(-1), value.offset, value.scale, value.middle,
        key.inside.start, key.inside.stop, result.largest[0], result.total[0], result.weighted[0],
    )  # fmt: skip
    finish_values(result, value)
    return result


def finish_values(result: Partial, value: Levels, first: int = 0) -> None:
    """Gains, means and exponent of the values, in place; where there are means a part is a page, from ``first`` on."""
    parts, heads, _, dim = result.weighted.shape
    result.weighted[...] *= value.gain.reshape(heads, 1, dim)
    if len(value.mean):
        result.weighted[...] += result.total[..., None] * value.mean[first : first + parts, :, None, :]
    result.weighted[...] *= np.float32(value.factor)


def together(parts: Sequence[Partial]) -> Partial:
    """The parts of all in one."""
    return Partial(*(np.concatenate(of_all) for of_all in zip(*((p.largest, p.total, p.weighted) for p in parts))))


def merge(into: Partial, parts: Partial) -> None:
    """Fold all parts into the one part of ``into``, from the first to the last."""
    merge_parts(parts.largest, parts.total, parts.weighted, into.largest[0], into.total[0], into.weighted[0])


def finish(problem: Problem, partial: Partial, plan: Plan) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Output ``[H, R, D]`` of one part in the original basis and log-sum-exp ``[H, R]``; zero and ``-inf`` without
    tokens."""
    (weighted,), (total,), (largest,) = partial.weighted, partial.total, partial.largest
    out = np.divide(weighted, total[..., None], out=np.zeros_like(weighted), where=total[..., None] > 0)
    if plan.value.grouping is None:
        out = unrotate(np.ascontiguousarray(out.transpose(1, 0, 2)), plan.signs).transpose(1, 0, 2)
    with np.errstate(divide="ignore"):
        return out, largest + np.log(total)


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
def merge_parts(part_largest, part_total, part_weighted, largest, total, weighted):
    parts, heads, rows, dim = part_weighted.shape
    for p in range(parts):
        for h in range(heads):
            for r in range(rows):
                # A part without tokens adds nothing, and nothing is known to be larger than its -inf.
                if part_total[p, h, r] == 0:
                    continue
                mine = theirs = np.float32(1)
                if part_largest[p, h, r] > largest[h, r]:
                    mine = np.float32(math.exp(largest[h, r] - part_largest[p, h, r]))
                    largest[h, r] = part_largest[p, h, r]
                else:
                    theirs = np.float32(math.exp(part_largest[p, h, r] - largest[h, r]))
                total[h, r] = total[h, r] * mine + part_total[p, h, r] * theirs
                for d in range(dim):
                    weighted[h, r, d] = weighted[h, r, d] * mine + part_weighted[p, h, r, d] * theirs


@kernel
def attend_levels(
    query,
    basis,
    shape,
    key_mean,
    keys,
    key_offset,
    key_scale,
    key_middle,
    values,
    value_offset,
    value_scale,
    value_middle,
    start,
    stop,
    largest,
    total,
    weighted,
):
    """Two passes over a page's tiles, logits between them; 32 tokens side by side make every step a vector step."""
    heads, rows, dim = shape
    tiles = key_offset.shape[0] // LANES
    tokens = tiles * LANES
    columns = np.empty(dim * LANES, np.float32)
    logits = np.empty(rows * tokens, np.float32)
    # Weighted values of every eighth token apart: one vector a channel, added up at the end.
    sums = np.empty(rows * dim * WIDTH, np.float32)
    eights = dim // 8 * 8
    fours = dim // 4 * 4
    for h in range(heads):
        logits[:] = np.float32(0)
        for tile in range(tiles):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                signed_row(keys, at + d * LANES, key_middle[h * dim + d], columns, d * LANES)
            for r in range(rows):
                q, first = (h * rows + r) * dim, tile * LANES
                to = r * tokens + first
                for d in range(0, eights, 8):
                    dot_eight(query, q + d, columns, d * LANES, logits, to)
                for d in range(eights, dim):
                    dot_row(query, q + d, columns, d * LANES, logits, to)
                every = np.float64(0)
                bias = np.float64(0)
                for d in range(dim):
                    every += basis[q + d]
                    if key_mean.shape[0] > 0:
                        bias += basis[q + d] * key_mean[tile * key_mean.shape[0] // tiles, h, d]
                for lane in range(LANES):
                    t = first + lane
                    logits[to + lane] = (
                        key_offset[t] * np.float32(every) + key_scale[t] * logits[to + lane] + np.float32(bias)
                    )
        for r in range(rows):
            row = logits[r * tokens : (r + 1) * tokens]
            peak = np.float32(-np.inf)
            for t in range(start, stop):
                peak = row[t] if row[t] > peak else peak
            # Logits become weights times the value's scale; tokens outside the range weigh nothing.
            sum_ = np.float32(0)
            shift = np.float32(0)
            for t in range(tokens):
                weight = np.float32(0)
                if start <= t < stop:
                    weight = np.float32(math.exp(row[t] - peak))
                    shift += weight * value_offset[t]
                    sum_ += weight
                    weight *= value_scale[t]
                row[t] = weight
            largest[h, r] = peak
            total[h, r] = sum_
            for d in range(dim):
                weighted[h, r, d] = shift
        sums[:] = np.float32(0)
        for tile in range(tiles):
            at = (tile * heads + h) * dim * LANES
            for d in range(dim):
                signed_row(values, at + d * LANES, value_middle[h * dim + d], columns, d * LANES)
            for r in range(rows):
                weights, to = r * tokens + tile * LANES, r * dim * WIDTH
                for d in range(0, fours, 4):
                    mix_four(logits, weights, columns, d * LANES, sums, to + d * WIDTH)
                for d in range(fours, dim):
                    mix_row(logits, weights, columns, d * LANES, sums, to + d * WIDTH)
        for r in range(rows):
            for d in range(dim):
                to = (r * dim + d) * WIDTH
                for k in range(WIDTH):
                    weighted[h, r, d] += sums[to + k]
