"""Groups: how the channels of a head are ordered into letters when every channel keeps its own variance.

    head   = group, group, ...                    the same shapes for every head of a layer and kind
    group  = 1 to 8 letters that share one table  a table may serve several groups and heads
    letter = 1 to 4 fields                        field f of all letters of a group: channels of one class

Channels stand in falling order of their variance, eight of a kind to a field, and wide fields are joined with narrow
ones until a letter is full.  Channels too narrow to be worth a bit are left out and decode to zero (to their mean).
Letter tables follow from the classes of the fields, in integers, so a file stores no table (specification, clause 6.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from . import tables
from .errors import InputError
from .profile import MAX_LETTERS
from .trellis import NEXT, letter_paths, state_bits

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
        dependent = any(c.second for c in self.classes)
        require(
            self.states in NEXT and dependent == (self.states > 1), "states", f"{self.states} states for its classes"
        )
        for table in self.tables:
            known = all(0 <= c < len(self.classes) for c in table.classes)
            require(1 <= len(table.classes) <= MAX_FIELDS and known, "table", f"a table of the classes {table.classes}")
            used = [self.classes[c] for c in table.classes]
            count, bits = prod(len(c.weights) for c in used), sum(c.field_bits for c in used)
            require(
                8 <= table.precision <= 14
                and count <= min(MAX_LETTERS, 1 << table.precision)
                and bits <= MAX_FIELD_BITS - state_bits(self.states),
                "table",
                f"a table of {count} letters, {bits} field bits, {self.states} states and precision {table.precision}",
            )
        heads = len(self.choice)
        groups = len(self.letters)
        shapes = max(self.letters, default=9) <= MAX_GROUP_LETTERS and max(self.fields, default=9) <= MAX_FIELDS
        some = min((*self.letters, *self.fields), default=0) >= 1
        require(
            shapes and some and groups == len(self.fields) <= MAX_GROUPS,
            "shape",
            f"groups of {self.letters} letters and {self.fields} fields",
        )
        coded = sum(n * f for n, f in zip(self.letters, self.fields))
        require(self.choice.shape == (heads, groups), "shape", f"tables of groups {self.choice.shape}")
        require(self.order.shape == (heads, coded), "shape", f"an order {self.order.shape} for {coded} coded channels")
        known = int(self.choice.max()) < len(self.tables)
        require(known, "table", f"table {self.choice.max()} of {len(self.tables)} for a group")
        fields = np.array([len(table.classes) for table in self.tables])[self.choice]
        require(
            bool((fields == np.array(self.fields)).all()), "table", "a table for a group of another number of fields"
        )
        head_of = self.order // self.head_dim
        whole = bool((head_of == head_of[:, :1]).all()) and sorted(head_of[:, 0].tolist()) == list(range(heads))
        require(whole, "order", "rows of the order that are not of one head each")
        distinct = bool((np.diff(np.sort(self.order, axis=1).astype(np.int64)) > 0).all())
        require(distinct, "order", "a channel that stands in the order twice")

    @property
    def heads(self) -> int:
        return len(self.choice)

    @property
    def letters_per_head(self) -> int:
        return sum(self.letters)

    @property
    def coded(self) -> int:
        """Coded channels of a head."""
        return int(self.order.shape[1])


def table_lengths(classes: tuple[Levels, ...], precision: int, states: int = 1) -> NDArray[np.uint8]:
    """Code lengths uint8 ``[states * letters]`` of fields of these classes, by the state a letter starts from.

    Letter ``m0 + M0 * (m1 + M1 * ...)``, levels from 0.  For every state the best prefix code for independent fields,
    its weights the exact products of frequencies.
    """
    return np.concatenate([tables.package_merge(row, precision) for row in letter_weights(classes, states)])


def letter_weights(classes: tuple[Levels, ...], states: int = 1) -> NDArray[np.int64]:
    """Products of frequencies int64 ``[states, letters]`` of fields of these classes."""
    quantisers, _, _ = letter_paths([c.most for c in classes], [bool(c.second) for c in classes], states)
    weights = np.ones(quantisers.shape[:2], np.int64)
    rest = np.arange(quantisers.shape[1])
    for f, levels in enumerate(classes):
        of = np.array([levels.weights, levels.second or levels.weights], np.int64)
        weights *= of[quantisers[:, :, f], rest % len(levels.weights)]
        rest = rest // len(levels.weights)
    return weights


@dataclass(frozen=True, eq=False)
class GroupArrays:
    """A grouping as the kernels take it; rows are the fields of groups, all heads in coded order.

    groups
        int64 ``[H * G, 4]``: first row, fields, letters and table of every group.
    row_channel
        int64 ``[rows, 8]``: the channel of every letter's field; -1 where a group has fewer than eight letters.
    row_class
        int64 ``[rows]``.
    strides, shifts
        int64 ``[tables, 4]``: what a level of field f adds to a letter's number, and the lowest bit of the field.
    lengths
        uint8, the tables one after another, each state by state; ``first`` int64 ``[tables]`` says where each begins
        and ``letters`` how many it has in a state.
    middle, factor, reach
        float32 ``[n]``: level of zero, gain and :attr:`Levels.reach` of every channel; 0, 1 and 0 of those left out.
    """

    groups: NDArray[np.int64]
    row_channel: NDArray[np.int64]
    row_class: NDArray[np.int64]
    strides: NDArray[np.int64]
    shifts: NDArray[np.int64]
    lengths: NDArray[np.uint8]
    first: NDArray[np.int64]
    letters: NDArray[np.int64]
    middle: NDArray[np.float32]
    factor: NDArray[np.float32]
    reach: NDArray[np.float32]


@lru_cache(maxsize=1024)
def group_arrays(grouping: Grouping) -> GroupArrays:
    groups: list[tuple[int, int, int, int]] = []
    row_channel: list[NDArray[np.int64]] = []
    row_class: list[int] = []
    middle = np.zeros(grouping.heads * grouping.head_dim, np.float32)
    factor, reach = np.ones_like(middle), np.zeros_like(middle)
    for order, choice in zip(grouping.order.astype(np.int64), grouping.choice):
        at = 0
        for letters, fields, number in zip(grouping.letters, grouping.fields, choice):
            groups.append((len(row_class), fields, letters, int(number)))
            for c in grouping.tables[number].classes:
                channels = order[at : at + letters]
                at += letters
                row_channel.append(np.pad(channels, (0, MAX_GROUP_LETTERS - letters), constant_values=-1))
                row_class.append(c)
                middle[channels] = grouping.classes[c].middle
                factor[channels] = grouping.classes[c].factor
                reach[channels] = grouping.classes[c].reach
    counts = [[len(grouping.classes[c].weights) for c in table.classes] for table in grouping.tables]
    bits = [[grouping.classes[c].field_bits for c in table.classes] for table in grouping.tables]
    lengths = [
        table_lengths(tuple(grouping.classes[c] for c in table.classes), table.precision, grouping.states)
        for table in grouping.tables
    ]
    return GroupArrays(
        groups=np.array(groups, np.int64),
        row_channel=np.array(row_channel, np.int64),
        row_class=np.array(row_class, np.int64),
        strides=np.array([[prod(m[:f]) for f in range(MAX_FIELDS)] for m in counts], np.int64),
        shifts=np.array([[sum(b[:f]) for f in range(MAX_FIELDS)] for b in bits], np.int64),
        lengths=np.concatenate(lengths),
        first=np.cumsum([0, *map(len, lengths[:-1])]).astype(np.int64),
        letters=np.array([prod(m) for m in counts], np.int64),
        middle=middle,
        factor=factor,
        reach=reach,
    )


def zero_bits(grouping: Grouping) -> NDArray[np.int64]:
    """Bits of every head, in coded order, when all levels are zero: what drift can always fall back to."""
    arrays = group_arrays(grouping)
    most = [[grouping.classes[c].most for c in table.classes] for table in grouping.tables]
    # Of tables with states too: those of state 0, which zeros never leave, stand first.
    zero = [sum(m * s for m, s in zip(row, strides.tolist())) for row, strides in zip(most, arrays.strides)]
    lengths = arrays.lengths[arrays.first + np.array(zero)].astype(np.int64)
    bits: NDArray[np.int64] = (lengths[grouping.choice] * np.array(grouping.letters)).sum(axis=1)
    return bits


def mean_bits(grouping: Grouping) -> NDArray[np.float64]:
    """Bits of every head, in coded order, of a token whose levels are as frequent as their classes say."""
    arrays = group_arrays(grouping)
    means = []
    for table, first, count in zip(grouping.tables, arrays.first, arrays.letters):
        classes = tuple(grouping.classes[c] for c in table.classes)
        weights = letter_weights(classes, grouping.states)
        lengths = arrays.lengths[first : first + grouping.states * count].reshape(weights.shape)
        means.append(float((weights * lengths.astype(np.float64)).sum() / weights.sum()))
    bits: NDArray[np.float64] = (np.array(means)[grouping.choice] * np.array(grouping.letters)).sum(axis=1)
    return bits
