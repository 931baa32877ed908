"""Steps on rows of 32 lanes for which Python has no words: LLVM vectors, one short function a step.

LLVM turns them into whatever vectors the processor has (SSE, AVX2, AVX-512, NEON); lanes never mix except where a block
is turned, so results do not depend on the width.  Arrays are one-dimensional and contiguous, places in them int64;
nothing is checked: the calling kernel keeps every access inside.  Steps that one coder alone takes stand with it, in
:mod:`dquantcodec.rans_steps` and :mod:`dquantcodec.prefix`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from . import plain_steps
from .kernels import COMPILED
from .vector_step import LANES, WIDTH, Step

_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def spread_row(_context: Any, entries: Any, at: Any, down: Any, mask: Any, levels: Any, to: Any) -> Any:
    """``levels[to + i] = (entries[at + i] >> down) & mask`` for a row; uint16 to uint8."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, down, mask, _, to = step.arguments
        down, mask = (step.splat(step.builder.trunc(x, ir.IntType(16)), LANES) for x in (down, mask))
        field = step.builder.and_(step.builder.lshr(step.load(0, at, LANES), down), mask)
        step.store(step.builder.trunc(field, step.vector(4, LANES)), 4, to)
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(entries, i64, i64, i64, levels, i64), generate


@intrinsic
def affine_row(_context: Any, levels: Any, at: Any, offset: Any, scale: Any, first: Any, out: Any, to: Any) -> Any:
    """``out[to + i] = offset[first + i] + scale[first + i] * levels[at + i]`` for a row; uint8 to float32."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, _, _, first, _, to = step.arguments
        for lane in range(0, LANES, WIDTH):
            here = step.offset(first, lane)
            level = step.builder.uitofp(step.load(0, step.offset(at, lane), WIDTH), step.vector(5, WIDTH))
            value = step.builder.fadd(step.load(2, here, WIDTH), step.builder.fmul(step.load(3, here, WIDTH), level))
            step.store(value, 5, step.offset(to, lane))
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(levels, i64, offset, scale, i64, out, i64), generate


@intrinsic
def add_row(_context: Any, value: Any, out: Any, to: Any) -> Any:
    """``out[to + i] += value`` for a row of float32."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        value = step.splat(step.arguments[0], WIDTH)
        for lane in range(0, LANES, WIDTH):
            here = step.offset(step.arguments[2], lane)
            step.store(step.builder.fadd(step.load(1, here, WIDTH), value), 1, here)
        return step.context.get_dummy_value()

    return types.void(types.float32, out, types.int64), generate


def _dot(count: int) -> Callable[..., Any]:
    @intrinsic
    def dot(_context: Any, weights: Any, first: Any, rows: Any, at: Any, out: Any, to: Any) -> Any:
        """``out[to + i] += sum over k < count of weights[first + k] * rows[at + 32 * k + i]`` for a row of float32."""

        def generate(*call: Any) -> Any:
            step = Step(*call)
            _, first, _, at, _, to = step.arguments
            weights = [step.splat(step.scalar(0, step.offset(first, k)), WIDTH) for k in range(count)]
            for lane in range(0, LANES, WIDTH):
                total = step.load(4, step.offset(to, lane), WIDTH)
                for k, weight in enumerate(weights):
                    total = step.add_product(weight, step.load(2, step.offset(at, LANES * k + lane), WIDTH), total)
                step.store(total, 4, step.offset(to, lane))
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, rows, i64, out, i64), generate

    return dot


dot_row, dot_four, dot_eight = _dot(1), _dot(4), _dot(8)


def _mix(count: int) -> Callable[..., Any]:
    @intrinsic
    def mix(_context: Any, weights: Any, first: Any, rows: Any, at: Any, out: Any, to: Any) -> Any:
        """``out[to + 8 * k + i] += sum over g of weights[first + 8 * g + i] * rows[at + 32 * k + 8 * g + i]``.

        For ``count`` rows ``k``: the products of a row of lanes with as many weights, every eighth added up.
        """

        def generate(*call: Any) -> Any:
            step = Step(*call)
            _, first, _, at, _, to = step.arguments
            weights = [step.load(0, step.offset(first, lane), WIDTH) for lane in range(0, LANES, WIDTH)]
            for k in range(count):
                total = step.load(4, step.offset(to, WIDTH * k), WIDTH)
                for g, weight in enumerate(weights):
                    total = step.add_product(weight, step.load(2, step.offset(at, LANES * k + WIDTH * g), WIDTH), total)
                step.store(total, 4, step.offset(to, WIDTH * k))
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(weights, i64, rows, i64, out, i64), generate

    return mix


mix_row, mix_four = _mix(1), _mix(4)


@intrinsic
def count_below(_context: Any, positions: Any, at: Any, thresholds: Any, first: Any, levels: Any, to: Any) -> Any:
    """``levels[to + i] += how many of eight thresholds from first on lie below positions[at + i]`` for a row.

    int32 positions and thresholds, uint8 levels.
    """

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, _, first, _, to = step.arguments
        limits = [step.splat(step.scalar(2, step.offset(first, k)), WIDTH) for k in range(8)]
        for lane in range(0, LANES, WIDTH):
            position = step.load(0, step.offset(at, lane), WIDTH)
            level = step.builder.zext(step.load(4, step.offset(to, lane), WIDTH), position.type)
            for limit in limits:
                # A comparison that holds is all ones, which is -1.
                above = step.builder.sext(step.builder.icmp_signed(">", position, limit), position.type)
                level = step.builder.sub(level, above)
            step.store(step.builder.trunc(level, step.vector(4, WIDTH)), 4, step.offset(to, lane))
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(positions, i64, thresholds, i64, levels, i64), generate


@intrinsic
def copy_row(_context: Any, rows: Any, at: Any, out: Any, to: Any) -> Any:
    """``out[to + i] = rows[at + i]`` for a row."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, _, to = step.arguments
        for lane in range(0, LANES, WIDTH):
            step.store(step.load(0, step.offset(at, lane), WIDTH), 2, step.offset(to, lane))
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(rows, i64, out, i64), generate


@intrinsic
def fill_row(_context: Any, value: Any, out: Any, to: Any) -> Any:
    """``out[to + i] = value`` for a row; uint8."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        value, _, to = step.arguments
        step.store(step.splat(step.builder.trunc(value, ir.IntType(8)), LANES), 1, to)
        return step.context.get_dummy_value()

    return types.void(types.int64, out, types.int64), generate


@intrinsic
def signed_row(_context: Any, levels: Any, at: Any, middle: Any, out: Any, to: Any) -> Any:
    """``out[to + i] = levels[at + i] - middle`` for a row; uint8 to float32."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, middle, _, to = step.arguments
        middle = step.splat(middle, WIDTH)
        for lane in range(0, LANES, WIDTH):
            level = step.builder.uitofp(step.load(0, step.offset(at, lane), WIDTH), step.vector(3, WIDTH))
            step.store(step.builder.fsub(level, middle), 3, step.offset(to, lane))
        return step.context.get_dummy_value()

    return types.void(levels, types.int64, types.float32, out, types.int64), generate


@intrinsic
def level_row(
    _context: Any, levels: Any, at: Any, middle: Any, factor: Any, scale: Any, first: Any, out: Any, to: Any
) -> Any:
    """``out[to + i] = (levels[at + i] - middle) * factor * scale[first + i]`` for a row; uint8 to float32."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        build = step.builder
        _, at, middle, factor, _, first, _, to = step.arguments
        middle, factor = step.splat(middle, WIDTH), step.splat(factor, WIDTH)
        for lane in range(0, LANES, WIDTH):
            level = build.uitofp(step.load(0, step.offset(at, lane), WIDTH), step.vector(6, WIDTH))
            value = build.fmul(build.fsub(level, middle), factor)
            value = build.fmul(value, step.load(4, step.offset(first, lane), WIDTH))
            step.store(value, 6, step.offset(to, lane))
        return step.context.get_dummy_value()

    i64, f32 = types.int64, types.float32
    return types.void(levels, i64, f32, f32, scale, i64, out, i64), generate


@intrinsic
def add_field(
    _context: Any, position: Any, at: Any, limits: Any, first: Any, most: Any, stride: Any, level: Any, number: Any
) -> Any:
    """The levels of eight positions, from ``at`` on, and what they add to eight letters' numbers.

    A level counts the ``limits``, ``most`` of them from ``first`` on, that the magnitude of a position exceeds, and has
    its sign; it goes to ``level`` int8 from ``at`` on, and ``stride * (level + most)`` is added to ``number`` int32.
    """

    def generate(*call: Any) -> Any:
        step = Step(*call)
        build = step.builder
        _, at, _, first, most, stride, _, _ = step.arguments
        value = step.load(0, at, WIDTH)
        zero = ir.Constant(value.type, [0] * WIDTH)
        negative = build.icmp_signed("<", value, zero)
        magnitude = build.select(negative, build.sub(zero, value), value)
        count = cgutils.alloca_once_value(build, zero)
        with cgutils.for_range(build, most, intp=_I64) as loop:
            limit = step.splat(step.scalar(2, build.add(first, loop.index)), WIDTH)
            passed = build.sext(build.icmp_signed(">", magnitude, limit), value.type)
            build.store(build.sub(build.load(count), passed), count)
        found = build.load(count)
        found = build.select(negative, build.sub(zero, found), found)
        step.store(build.trunc(found, ir.VectorType(ir.IntType(8), WIDTH)), 6, at)
        stride, most = (step.splat(build.trunc(x, _I32), WIDTH) for x in (stride, most))
        origin = ir.Constant(_I64, 0)
        total = build.add(step.load(7, origin, WIDTH), build.mul(build.add(found, most), stride))
        step.store(total, 7, origin)
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(position, i64, limits, i64, i64, i64, level, number), generate


def _butterfly(radix: int) -> Callable[..., Any]:
    @intrinsic
    def butterfly(_context: Any, columns: Any, at: Any, stride: Any) -> Any:
        """The Hadamard transform of ``radix`` rows ``stride`` apart, in place: log2 stages of sums and differences."""

        def generate(*call: Any) -> Any:
            step = Step(*call)
            _, at, stride = step.arguments
            for lane in range(0, LANES, WIDTH):
                first = step.offset(at, lane)
                places = [step.place(first, stride, i) for i in range(radix)]
                rows = [step.load(0, place, WIDTH) for place in places]
                half = 1
                while half < radix:
                    for i in (i for i in range(radix) if not i & half):
                        x, y = rows[i], rows[i + half]
                        rows[i], rows[i + half] = step.builder.fadd(x, y), step.builder.fsub(x, y)
                    half *= 2
                for row, place in zip(rows, places):
                    step.store(row, 0, place)
            return step.context.get_dummy_value()

        return types.void(columns, types.int64, types.int64), generate

    return butterfly


butterfly2, butterfly4, butterfly8 = _butterfly(2), _butterfly(4), _butterfly(8)


@intrinsic
def turn_words(_context: Any, source: Any, at: Any, stride: Any, out: Any, to: Any, out_stride: Any) -> Any:
    """``out[to + out_stride * i + k] = source[at + stride * k + i]`` for i, k < WIDTH; any 32-bit elements."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        _, at, stride, _, to, out_stride = step.arguments
        rows = step.turned([step.load(0, step.place(at, stride, k), WIDTH) for k in range(WIDTH)])
        for i, row in enumerate(rows):
            step.store(row, 3, step.place(to, out_stride, i))
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(source, i64, i64, out, i64, i64), generate


def _turn_scaled(factors_by_row: bool) -> Callable[..., Any]:
    @intrinsic
    def turn(
        _context: Any, source: Any, at: Any, stride: Any, factor: Any, first: Any, out: Any, to: Any, out_stride: Any
    ) -> Any:
        """As :func:`turn_words` for float32, each element times the ``factor`` of its place in a source row or column.

        Rows of tokens have a factor each lane (``factor[first + i]``); rows of channels one for all lanes
        (``factor[first + k]``), which is again one each lane once they are turned.
        """

        def generate(*call: Any) -> Any:
            step = Step(*call)
            _, at, stride, _, first, _, to, out_stride = step.arguments
            factor = step.load(3, first, WIDTH)
            rows = [step.load(0, step.place(at, stride, k), WIDTH) for k in range(WIDTH)]
            if not factors_by_row:
                rows = [step.builder.fmul(row, factor) for row in rows]
            rows = step.turned(rows)
            if factors_by_row:
                rows = [step.builder.fmul(row, factor) for row in rows]
            for i, row in enumerate(rows):
                step.store(row, 5, step.place(to, out_stride, i))
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(source, i64, i64, factor, i64, out, i64, i64), generate

    return turn


#: From rows of channels (one token's) to rows of lanes, and back.
turn_tokens_in, turn_tokens_out = _turn_scaled(factors_by_row=False), _turn_scaled(factors_by_row=True)

if not COMPILED:
    plain_steps.replace_steps(globals())
