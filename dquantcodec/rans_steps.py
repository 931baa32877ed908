"""The steps of the ``rans`` coder, as those of :mod:`dquantcodec.vectors`: words in pairs, letters from states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import plain_steps
from .kernels import COMPILED
from .vector_step import LANES, WIDTH, Step

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _every(value: int) -> ir.Constant:
    """``value`` in each lane, 32 bits."""
    return ir.Constant(ir.VectorType(_I32, WIDTH), [value] * WIDTH)


@intrinsic
def pair_rows(_context: Any, words: Any, at: Any, pairs: Any, to: Any) -> Any:
    """``pairs[to + i] = words[at + i] | words[at + 32 + i] << 16`` for a row; uint16 to uint32."""

    def generate(*call: Any) -> Any:
        step = Step(*call)
        build = step.builder
        _, at, _, to = step.arguments
        for lane in range(0, LANES, WIDTH):
            wide = step.vector(2, WIDTH)
            low = build.zext(step.load(0, step.offset(at, lane), WIDTH), wide)
            high = build.zext(step.load(0, step.offset(at, LANES + lane), WIDTH), wide)
            step.store(build.or_(low, build.shl(high, _every(16))), 2, step.offset(to, lane))
        return step.context.get_dummy_value()

    i64 = types.int64
    return types.void(words, i64, pairs, i64), generate


def _pop(count: int) -> Callable[..., Any]:
    """The step that takes ``count`` letters, one or two, from 32 states of the ``rans`` coder."""

    @intrinsic
    def pop(
        _context: Any, state: Any, at: Any, pairs: Any, advance: Any, fields: Any, precision: Any, entries: Any,
        place: Any,
    ) -> Any:  # fmt: skip
        """rANS letters of 32 lanes in lockstep, which hides the latency of the table and of the multiplication.

        ``state`` uint32 ``[32]``.  ``at`` uint32 ``[32]`` says where in ``pairs`` uint32 a lane's next word stands,
        with the one after it in the high half: two letters ask for no more.  The letters' fields go to ``entries``
        from ``place`` on, a row for each letter.
        """

        def generate(*call: Any) -> Any:
            step = Step(*call)
            build = step.builder
            _, _, _, _, _, precision, _, place = step.arguments
            p = step.splat(build.trunc(precision, _I32), WIDTH)
            mask = build.sub(build.shl(_every(1), p), _every(1))
            firsts = [ir.Constant(_I64, lane) for lane in range(0, LANES, WIDTH)]
            states = [step.load(0, first, WIDTH) for first in firsts]
            places = [step.load(1, first, WIDTH) for first in firsts]
            words = [step.gather(2, step.lanes(group)) for group in places]
            for k in range(count):
                for g in range(len(firsts)):
                    x, word = states[g], words[g]
                    slots = step.lanes(build.and_(x, mask))
                    for lane, slot in enumerate(slots, WIDTH * g):
                        step.store(step.scalar(4, slot), 6, step.offset(place, LANES * k + lane))
                    found = step.gather(3, slots)
                    x = build.mul(build.lshr(found, _every(16)), build.lshr(x, p))
                    x = build.add(x, build.and_(found, _every(0xFFFF)))
                    low = build.icmp_unsigned("<", x, _every(1 << 16))
                    longer = build.or_(build.shl(x, _every(16)), build.and_(word, _every(0xFFFF)))
                    states[g] = build.select(low, longer, x)
                    words[g] = build.select(low, build.lshr(word, _every(16)), word)
                    places[g] = build.add(places[g], build.select(low, _every(LANES), _every(0)))
            for first, x, group in zip(firsts, states, places):
                step.store(x, 0, first)
                step.store(group, 1, first)
            return step.context.get_dummy_value()

        i64 = types.int64
        return types.void(state, at, pairs, advance, fields, i64, entries, i64), generate

    return pop


pop_one, pop_two = _pop(1), _pop(2)

if not COMPILED:
    plain_steps.replace_steps(globals())
