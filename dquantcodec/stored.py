"""Integers that a file holds: bytes until something calculates with them, then a NumPy array.

Whoever only looks into a file calculates nothing, and loading NumPy takes longer than such a look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from struct import unpack
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from numpy.typing import NDArray

_T = TypeVar("_T")


class Stored:
    """What becomes an array on first use."""

    def array(self) -> NDArray[Any]:
        """An array of its own."""
        raise NotImplementedError

    def as_array(self) -> NDArray[Any]:
        """Itself, for a field that :func:`arrays_on_use` names and that types call an array."""
        return cast("NDArray[Any]", self)


@dataclass(frozen=True)
class Integers(Stored):
    """Little-endian integers of :mod:`struct`'s ``format`` (``"b"``, ``"B"`` or ``"H"``)."""

    data: bytes
    format: str
    shape: tuple[int, ...]

    def numbers(self) -> Sequence[int]:
        """All of them, row after row."""
        return self.data if self.format == "B" else unpack(f"<{prod(self.shape)}{self.format}", self.data)

    def rows(self) -> list[Sequence[int]]:
        """Those of two axes."""
        count, length = self.shape
        numbers = self.numbers()
        return [numbers[row * length : (row + 1) * length] for row in range(count)]

    def array(self) -> NDArray[Any]:
        import numpy as np

        little = np.dtype(self.format).newbyteorder("<")
        return np.frombuffer(self.data, little).astype(little.newbyteorder("=")).reshape(self.shape)


class _OnUse:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        held = instance.__dict__[self._name]
        if isinstance(held, Stored):
            held = instance.__dict__[self._name] = held.array()
        return held

    def __set__(self, instance: Any, value: Any) -> None:
        instance.__dict__[self._name] = value


def arrays_on_use(*names: str) -> Callable[[type[_T]], type[_T]]:
    """Let a dataclass's array fields called ``names`` be given as :class:`Stored`: read, they are arrays."""

    def decorated(cls: type[_T]) -> type[_T]:
        for name in names:
            setattr(cls, name, _OnUse(name))
        return cls

    return decorated


def as_given(instance: object, name: str) -> Any:
    """The field ``name`` as it is held: an array, or :class:`Stored`."""
    return vars(instance)[name]
