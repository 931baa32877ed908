"""What every compared method is: a function from one layer's keys and values to what comes back, and what it stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Pair = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Keys and values of one layer."""


@dataclass(frozen=True, eq=False)
class Coded:
    """One layer after its round trip.

    ``keys`` and ``values`` float32 ``[T, H, D]`` are the reconstructions; ``key_bytes`` and ``value_bytes`` count
    everything that has to be kept for these ``T`` tokens: code words, scales, offsets, norms, means, indices, exact
    outliers.  Constants of a method (codebooks, rotation signs, frequency tables) are not counted; whoever adds a
    method says in its docstring what its constants are.
    """

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    key_bytes: float
    value_bytes: float

    @property
    def bits_per_value(self) -> float:
        return 8 * (self.key_bytes + self.value_bytes) / (self.keys.size + self.values.size)


@dataclass(frozen=True)
class Method:
    """``code(keys, values)`` takes float32 ``[T, H, D]`` (keys after RoPE) of one layer.

    ``family`` groups the rates of one method into a line of a plot; ``name`` is unique; ``source`` says where the
    method was published, and what was left out of it here.  ``together``, where there is one, takes all layers of a
    cache at once, for methods that give some layers more bytes than others.
    """

    name: str
    family: str
    source: str
    code: Callable[[NDArray[np.float32], NDArray[np.float32]], Coded]
    together: Callable[[Sequence[Pair]], list[Coded]] | None = None

    def code_layers(self, layers: Sequence[Pair]) -> list[Coded]:
        return self.together(layers) if self.together else [self.code(*pair) for pair in layers]
