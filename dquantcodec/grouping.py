"""Groups: how the channels of a head are ordered into letters when every channel keeps its own variance.

    head   = group, group, ...                    the same shapes for every head of a layer and kind
    group  = 1 to 8 letters that share one table  a table may serve several groups and heads
    letter = 1 to 4 fields                        field f of all letters of a group: channels of one class

Channels stand in falling order of their variance, eight of a kind to a field, and wide fields are joined with narrow
ones until a letter is full.  Channels too narrow to be worth a bit are left out and decode to zero (to their mean).
Letter tables follow from the classes of the fields, in integers, so a file stores no table (specification, clause 6.6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from .errors import InputError
from .profile import MAX_LETTERS
from .stored import Integers, Stored, arrays_on_use, as_given
from .trellis import NEXT, state_bits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_GROUP_LETTERS = 8
MAX_FIELDS = 4
MAX_GROUPS = 512
MAX_TABLES = 16
#: Fields of a letter, together: a decoder's table entry has no room for more.
MAX_FIELD_BITS = 12
MAX_CLASSES = 64
MAX_GAIN = 1023
#: Largest level index of a dependent class: its levels in half steps are bytes.
MOST_DEPENDENT = 63
#: Frequencies of a class sum to 2**14: the products of four fit in 64 bits with room for sums of them.
FREQUENCY_BITS = 14


@dataclass(frozen=True)
class Levels:
    """The levels ``-most`` to ``most`` of a class as a decoder knows them: their frequencies and a gain in 1/256.

    ``second`` has the frequencies of quantiser 1 (:mod:`dquantcodec.trellis`) and makes the class *dependent*: its
    levels are counted in half steps.
    """

    weights: tuple[int, ...]
    gain: int
    second: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        upper = self.weights[len(self.weights) // 2 :]
        if not (
            3 <= len(self.weights) <= 255
            and len(self.weights) % 2
            and self.weights == (*upper[:0:-1], *upper)
            and min(self.weights) >= 1
            and max(self.weights) == upper[0]
            and sum(self.weights) == 1 << FREQUENCY_BITS
        ):
            raise InputError(
                f"a class has 3 to 255 levels, symmetric frequencies that sum to 2**{FREQUENCY_BITS}, none zero and "
                "none above the middle's",
                code="class-weights",
            )
        upper = self.second[len(self.second) // 2 :]
        if self.second and not (
            len(self.second) == len(self.weights) <= 2 * MOST_DEPENDENT + 1
            and self.second == (*upper[:0:-1], *upper)
            and min(self.second) >= 1
            and sum(self.second) == 1 << FREQUENCY_BITS
        ):
            raise InputError(
                f"a dependent class has as many frequencies of quantiser 1 as of quantiser 0, at most "
                f"{2 * MOST_DEPENDENT + 1}, symmetric, none zero, and they sum to 2**{FREQUENCY_BITS}",
                code="class-weights",
            )
        if not 1 <= self.gain <= MAX_GAIN:
            raise InputError(f"the gain of a class is 1 to {MAX_GAIN}, not {self.gain}", code="class-gain")

    @property
    def most(self) -> int:
        return len(self.weights) // 2

    @property
    def middle(self) -> int:
        """Zero, counted from the lowest level: in half steps for a dependent class."""
        return 2 * self.most if self.second else self.most

    @property
    def factor(self) -> float:
        """What a level, as it is counted, is multiplied with."""
        return self.gain / (512 if self.second else 256)

    @property
    def reach(self) -> float:
        """The largest magnitude in steps whose nearest level is not further than half a step.

        Quantiser 1 ends half a step earlier; the best path meets such a value with quantiser 0.
        """
        return self.most + 0.5

    @property
    def field_bits(self) -> int:
        return (2 * self.middle).bit_length()


@dataclass(frozen=True)
class Table:
    """A letter table: the classes of its fields, by their number in the grouping, and the longest code ``p``."""

    classes: tuple[int, ...]
    precision: int


@dataclass(frozen=True)
class Channels(Stored):
    """The channels of every head in coded order: row ``i`` of ``places`` within head ``heads[i]``."""

    heads: tuple[int, ...]
    places: Integers
    head_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.places.shape

    def array(self) -> NDArray[np.uint16]:
        import numpy as np

        channels: NDArray[np.int64] = np.array(self.heads)[:, None] * self.head_dim + self.places.array()
        return channels.astype(np.uint16)


@arrays_on_use("choice", "order")
@dataclass(frozen=True, eq=False)
class Grouping:
    """How one kind's channels become letters.

    classes, tables
        The classes and letter tables in use.
    letters, fields
        Shapes of a head's groups.
    choice
        uint8 ``[H, G]``: the table of every group of every head.
    order
        uint16 ``[H, coded]``: the channels (``h * D + d``) of every head in coded order: by group, field and letter.
        Heads may be in any order; all channels of a row belong to one head.
    states
        Of the trellis that fields of dependent classes walk; 1 where there are none.

    Raises :class:`InputError` (``class-*``, ``grouping-*``) for anything no decoder could follow.
    """

    head_dim: int
    classes: tuple[Levels, ...]
    tables: tuple[Table, ...]
    letters: tuple[int, ...]
    fields: tuple[int, ...]
    choice: NDArray[np.uint8]
    order: NDArray[np.uint16]
    states: int = 1

    def __post_init__(self) -> None:
        def require(holds: bool, code: str, message: str) -> None:
            if not holds:
                raise InputError(message, code=f"grouping-{code}")

        require(1 <= len(self.classes) <= MAX_CLASSES, "classes", f"{len(self.classes)} classes")
        require(1 <= len(self.tables) <= MAX_TABLES, "tables", f"{len(self.tables)} tables")
        for table in self.tables:
            known = all(0 <= c < len(self.classes) for c in table.classes)
            require(1 <= len(table.classes) <= MAX_FIELDS and known, "table", f"a table of the classes {table.classes}")
        # Classes that no table names are not stored, so they do not count.
        dependent = any(self.classes[c].second for table in self.tables for c in table.classes)
        require(
            self.states in NEXT and dependent == (self.states > 1), "states", f"{self.states} states for its classes"
        )
        for table in self.tables:
            used = [self.classes[c] for c in table.classes]
            count, bits = prod(len(c.weights) for c in used), sum(c.field_bits for c in used)
            require(
                8 <= table.precision <= 14
                and count <= min(MAX_LETTERS, 1 << table.precision)
                and bits <= MAX_FIELD_BITS - state_bits(self.states),
                "table",
                f"a table of {count} letters, {bits} field bits, {self.states} states and precision {table.precision}",
            )
        choice, order = self._given
        heads, groups = choice.shape[0], len(self.letters)
        shapes = max(self.letters, default=9) <= MAX_GROUP_LETTERS and max(self.fields, default=9) <= MAX_FIELDS
        some = min((*self.letters, *self.fields), default=0) >= 1
        require(
            shapes and some and groups == len(self.fields) <= MAX_GROUPS,
            "shape",
            f"groups of {self.letters} letters and {self.fields} fields",
        )
        coded = sum(n * f for n, f in zip(self.letters, self.fields))
        require(choice.shape == (heads, groups), "shape", f"tables of groups {choice.shape}")
        require(order.shape == (heads, coded), "shape", f"an order {order.shape} for {coded} coded channels")
        tables = choice.rows() if isinstance(choice, Integers) else choice.tolist()
        most = max(map(max, tables))
        require(most < len(self.tables), "table", f"table {most} of {len(self.tables)} for a group")
        counts = [len(table.classes) for table in self.tables]
        for row in tables:
            fits = tuple(map(counts.__getitem__, row)) == self.fields
            require(fits, "table", "a table for a group of another number of fields")
        head_of, rows = _heads_and_rows(order, self.head_dim)
        require(sorted(head_of) == list(range(heads)), "order", "rows of the order that are not of one head each")
        require(all(len({*row}) == coded for row in rows), "order", "a channel that stands in the order twice")

    @property
    def _given(self) -> tuple[NDArray[np.uint8] | Integers, NDArray[np.uint16] | Channels]:
        """Choice and order as they are held: of a file that is only looked into they never become arrays."""
        return as_given(self, "choice"), as_given(self, "order")

    @property
    def heads(self) -> int:
        return self._given[0].shape[0]

    @property
    def letters_per_head(self) -> int:
        return sum(self.letters)

    @property
    def coded(self) -> int:
        """Coded channels of a head."""
        return self._given[1].shape[1]


def _heads_and_rows(
    order: NDArray[np.uint16] | Channels, head_dim: int
) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
    """The head of every row, -1 if its channels are of several, and its channels, or their places in the head."""
    if isinstance(order, Channels):
        return order.heads, order.places.rows()
    rows = order.tolist()
    ends = [(min(row) // head_dim, max(row) // head_dim) for row in rows]
    return [first if first == last else -1 for first, last in ends], rows
