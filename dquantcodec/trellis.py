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
