"""Letters of dependent fields: which quantiser every field meets, and the state a letter ends in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .trellis import NEXT, TURN


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
