"""A grouping as arrays: the code lengths of its letter tables, and what kernels ask of its groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from . import tables
from .grouping import MAX_FIELDS, MAX_GROUP_LETTERS, Grouping, Levels
from .letter_paths import letter_paths


@lru_cache(maxsize=256)
def table_lengths(classes: tuple[Levels, ...], precision: int, states: int = 1) -> NDArray[np.uint8]:
    """Code lengths uint8 ``[states * letters]`` of fields of these classes, by the state a letter starts from.

    Letter ``m0 + M0 * (m1 + M1 * ...)``, levels from 0.  For every state the best prefix code for independent fields,
    its weights the exact products of frequencies.
    """
    found = np.concatenate([tables.package_merge(row, precision) for row in letter_weights(classes, states)])
    found.setflags(write=False)
    return found


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
