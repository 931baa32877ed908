"""Dependent quantisation: two quantisers whose turn it is follows from the levels before (specification, clause 6.7).

Quantiser 0 has the whole steps, quantiser 1 zero and the half steps between:

    level index k         ... -2   -1    0    1    2 ...
    quantiser 0           ... -2   -1    0    1    2 ...
    quantiser 1           ... -1.5 -0.5  0    0.5  1.5 ...

A state says which quantiser is next, and the parity of the index says which state follows.  The levels of a whole
stream are then points of a denser packing than those of a grid: at the same bits the error is up to 1 dB smaller.  The
states are those of dependent quantisation in video coding (Versatile Video Coding, ITU-T H.266, and its extensions).

Every sub-stream starts in state 0, where zeros stay.  Levels of a dependent class are counted in half steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: ``NEXT[states][state][k & 1]``.
NEXT: dict[int, tuple[tuple[int, int], ...]] = {
    1: ((0, 0),),
    4: ((0, 2), (2, 0), (1, 3), (3, 1)),
    8: ((0, 2), (5, 7), (1, 3), (6, 4), (2, 0), (4, 6), (3, 1), (7, 5)),
}
#: ``TURN[states][state]``: the quantiser whose turn it is.
TURN: dict[int, tuple[int, ...]] = {1: (0,), 4: (0, 0, 1, 1), 8: (0, 1, 0, 1, 0, 1, 0, 1)}


def state_bits(states: int) -> int:
    """Bits that hold a state.

    >>> [state_bits(states) for states in (1, 4, 8)]
    [0, 2, 3]
    """
    return (states - 1).bit_length()


def letter_paths(
    most: Sequence[int], dependent: Sequence[bool], states: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Where the letters of fields with the level indices ``-most`` to ``most`` lead from every state.

    Letters are ``m_0 + M_0 * (m_1 + M_1 * ...)`` with ``m = k + most``.  Returns, int64 ``[states, letters, fields]``,
    the quantiser of every field and its level (half steps for dependent fields, otherwise steps), and
    ``[states, letters]`` the state after the letter.  Fields that are not dependent leave the state alone.
    """
    count = int(np.prod([2 * q + 1 for q in most]))
    following, turn = np.array(NEXT[states]), np.array(TURN[states])
    state = np.repeat(np.arange(states)[:, None], count, axis=1)
    quantisers = np.zeros((states, count, len(most)), np.int64)
    levels = np.zeros_like(quantisers)
    rest = np.arange(count)
    for f, (q, moves) in enumerate(zip(most, dependent)):
        k = np.broadcast_to(rest % (2 * q + 1) - q, state.shape)
        rest = rest // (2 * q + 1)
        if moves:
            quantisers[:, :, f] = turn[state]
            levels[:, :, f] = 2 * k - quantisers[:, :, f] * np.sign(k)
            state = following[state, k & 1]
        else:
            levels[:, :, f] = k
    return quantisers, levels, state
