"""What a grouped stream's encoder looks up on a device, as NumPy arrays (``gpu/include/dquant/groups.cuh``).

Positions carry where they stand among the levels of their class, so the ladder has a word for every whole step of
every class at every rung: the level at the step's beginning, and where within the step the next level begins.
Thresholds are at least a step apart, so one word says it all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..grid import ONE
from ..group_arrays import group_arrays
from ..group_drift import GroupLadder, group_ladder
from ..group_grid import GAIN_ONE, inverse_reach
from ..group_prefix import group_tables
from ..grouping import MAX_FIELDS, MAX_GROUP_LETTERS, Grouping, Levels
from ..plan import StreamPlan
from ..profile import TILE

#: Groups whose letters 32 lanes have.
ROUND_GROUPS = TILE // MAX_GROUP_LETTERS
PLACE_BITS = 17
LEFT_OUT = (1 << PLACE_BITS) - 1
#: Channels that a warp loads at once, eight a lane.
RUN = 8 * TILE


@dataclass(frozen=True, eq=False)
class Rounds:
    """How the groups of a sub-stream are dealt out to rounds of four, the same for all sub-streams.

    group
        int64 ``[rounds, 4]``: the number of a group in coded order; -1 for none.
    fields, row
        int64 ``[rounds]``: the most fields of a round's groups, and its first row of 32 positions.
    """

    group: NDArray[np.int64]
    fields: NDArray[np.int64]
    row: NDArray[np.int64]

    @property
    def slots(self) -> int:
        return int(self.fields.sum())

    def counts(self) -> list[int]:
        """Rounds of four, three, two and one fields."""
        return [int((self.fields == f).sum()) for f in range(MAX_FIELDS, 0, -1)]


def deal_rounds(fields: NDArray[np.int64]) -> Rounds:
    """Rounds for groups of so many fields, those with the most first.

    >>> deal_rounds(np.array([2, 2, 3, 2, 3])).fields.tolist()
    [3, 2]
    """
    order = np.argsort(-fields, kind="stable")
    group = np.pad(order, (0, -len(order) % ROUND_GROUPS), constant_values=-1).reshape(-1, ROUND_GROUPS)
    most = fields[group[:, 0]]
    return Rounds(group, most, np.cumsum(most) - most)


@dataclass(frozen=True, eq=False)
class GroupEncodeArrays:
    """The arrays of ``GroupTables``, by its names, and its numbers."""

    channels: NDArray[np.uint32]
    inverses: NDArray[np.float32]
    ladder: NDArray[np.uint32]
    codes: NDArray[np.uint32]
    initial: NDArray[np.uint32]
    letters: NDArray[np.uint32]
    fields: NDArray[np.uint32]
    groups: NDArray[np.uint32]
    numbers_of_ranks: NDArray[np.uint32]
    rounds: Rounds
    start: int

    #: Arrays that ``GroupTables`` has the addresses of.
    NAMES = ("channels", "inverses", "ladder", "codes", "initial", "letters", "fields", "groups", "numbers_of_ranks")

    @property
    def rungs(self) -> int:
        return len(self.ladder)

    @property
    def entries(self) -> int:
        """Words of a rung."""
        return int(self.ladder.shape[1])

    @property
    def groups_each(self) -> int:
        return len(self.numbers_of_ranks)

    def block_bytes(self) -> int:
        """What a block shares beside rungs: codes, letters, fields, groups."""
        return -(-self.codes.nbytes // 16) * 16 + self.letters.nbytes + self.fields.nbytes + self.groups.nbytes

    def warp_bytes(self, plan: StreamPlan) -> int:
        """What a warp has: positions, bits and beginnings of groups, words."""
        return -(-(self.initial.nbytes + 4 * (2 * self.groups_each + plan.words)) // 16) * 16

    def numbers(self, plan: StreamPlan) -> dict[str, object]:
        """The numbers of ``GroupTables`` that the plan gives; a launch adds the window."""
        return {
            "step": plan.step,
            "rungs": self.rungs,
            "entries": self.entries,
            "start": self.start,
            "words": plan.words,
            "rounds": self.rounds.counts(),
            "slots": self.rounds.slots,
            "groups_each": self.groups_each,
            "code_count": len(self.codes),
        }


def class_steps(levels: Levels) -> int:
    """Whole steps on either side of zero that positions of a class can come to.

    A token's scale is no less than every magnitude over its channel's reach, but where it is denormal in FP16: there,
    rounding makes two thirds of it at worst.
    """
    return int(1.5 * levels.reach * (1 + 1e-5)) + 1


@lru_cache(maxsize=256)
def group_encode_arrays(plan: StreamPlan) -> GroupEncodeArrays:
    """The arrays of a grouped stream plan.

    Raises :class:`UnsupportedError` (``device-groups``) for a grouping that would need more room than any fit makes.
    """
    grouping = plan.grouping
    assert grouping is not None
    arrays, ladder = group_arrays(grouping), group_ladder(plan)
    each = len(arrays.groups) // plan.substreams
    rounds = deal_rounds(arrays.groups[:each, 1])
    steps = [class_steps(c) for c in grouping.classes]
    zeros = np.cumsum([0, *(2 * s for s in steps[:-1])]) + np.array(steps)
    places = plan.substreams * rounds.slots * TILE
    if places > LEFT_OUT or each > 0xFFFF:
        raise UnsupportedError(
            f"a grouping of {len(arrays.groups)} groups has no room on a device; fit a plan anew", code="device-groups"
        )
    n = len(arrays.middle)
    channels = np.full(-(-n // RUN) * RUN, LEFT_OUT, np.uint32)
    # Some class's zero where there is no channel: the first field counts even where there is no group.
    initial = np.full(
        (plan.substreams, rounds.slots, ROUND_GROUPS, MAX_GROUP_LETTERS), int(zeros[0]) << 16, np.uint32
    )  # fmt: skip
    letters = np.zeros((plan.substreams, len(rounds.group), ROUND_GROUPS, 4), np.uint32)
    fields = np.zeros_like(letters)
    most = [[grouping.classes[c].most for c in table.classes] for table in grouping.tables]
    zero_letter = [sum(m * int(s) for m, s in zip(row, strides)) for row, strides in zip(most, arrays.strides)]
    gains = [round(GAIN_ONE * c.factor) for c in grouping.classes]
    for j in range(plan.substreams):
        for r, row in enumerate(rounds.group.tolist()):
            for q, number in enumerate(row):
                if number < 0:
                    continue
                first, count, size, table = arrays.groups[j * each + number].tolist()
                strides = arrays.strides[table, 1:count].tolist()
                letters[j, r, q] = [
                    int(arrays.first[table]) + zero_letter[table] | size << 24, *strides, *[0] * (4 - count)
                ]  # fmt: skip
                for f in range(count):
                    kind = int(arrays.row_class[first + f])
                    zero = int(zeros[kind])
                    slot = int(rounds.row[r]) + f
                    fields[j, r, q, f] = zero << 16 | gains[kind]
                    initial[j, slot, q] = zero << 16
                    place = ((j * rounds.slots + slot) * ROUND_GROUPS + q) * MAX_GROUP_LETTERS
                    coded = arrays.row_channel[first + f][:size]
                    channels[coded] = place + np.arange(size) | zero << PLACE_BITS
    rank = np.argsort(ladder.fill[:each])
    words = np.where(rounds.group < 0, 0xFFFFFFFF, rank[rounds.group] | rounds.group << 16).astype(np.uint32)
    inverses = np.zeros(len(channels), np.float32)
    inverses[:n] = inverse_reach(grouping)
    return GroupEncodeArrays(
        channels=channels,
        inverses=inverses,
        ladder=ladder_words(grouping, ladder, steps),
        # An empty code at the end, for lanes without a letter.
        codes=np.append(group_tables(grouping).codes, np.uint32(0)),
        initial=initial.reshape(-1),
        letters=letters,
        fields=fields,
        groups=words,
        numbers_of_ranks=ladder.fill[:each].astype(np.uint32),
        rounds=rounds,
        start=ladder.start,
    )


def ladder_words(grouping: Grouping, ladder: GroupLadder, steps: list[int]) -> NDArray[np.uint32]:
    """The ladder uint32 ``[rungs, entries]``: of every class its whole steps, from the lowest on."""
    parts = []
    for first, most, reach in zip(ladder.first.tolist(), ladder.most.tolist(), steps):
        thresholds = ladder.thresholds[:, None, first : first + most].astype(np.int64)
        begin = (np.arange(-reach, reach) * ONE)[:, None]
        at_begin, at_end = (_levels(u, thresholds) for u in (begin, begin + ONE - 1))
        rises = at_end - at_begin
        if rises.max() > 1:
            raise UnsupportedError("levels of a class lie less than a step apart", code="device-groups")
        # The first position of the next level: behind a threshold, or on its negative.
        up = np.where(begin >= 0, thresholds + 1, -thresholds) - begin
        within = np.where((up > 0) & (up < ONE), ONE - up, 0).max(axis=2)
        parts.append((at_begin << 16) + within)
    words = np.concatenate(parts, axis=1)
    return np.pad(words, ((0, 0), (0, -words.shape[1] % 4))).astype(np.uint32)


def _levels(u: NDArray[np.int64], thresholds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Signed counts of the thresholds that magnitudes exceed."""
    count: NDArray[np.int64] = (np.abs(u) > thresholds).sum(axis=2) * np.sign(u[:, 0])
    return count
