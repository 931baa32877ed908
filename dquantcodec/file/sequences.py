"""What the records of a sequence say its tokens are: which record holds which token (specification, clause 4.2).

A reader follows a log with the ends of the coded and of the exact layers and the floor below which nothing is coded
again.  Every record adds at most two stretches and every stretch goes once, so a log is read in linear time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from ..errors import FormatError
from .records import Record, RecordRules
from .structs import EXACT_ONLY, PAGES, REWIND, ROWS


@dataclass(frozen=True)
class Stretch:
    """Tokens ``first`` to before ``end`` of a sequence, which ``record`` holds."""

    record: Record
    first: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.first

    @property
    def paged(self) -> bool:
        return self.record.header.type == PAGES


@dataclass(frozen=True)
class SequenceLog:
    """One sequence as its records have it.

    coded, exact
        Which records the coded and the exact layers read, in token order and without gap; empty for files without
        such layers.
    floor
        Pages added from here on hold no token before this one.
    agreed
        Coded and exact layers ended at the same token; otherwise (in a torn log) the longer ones were cut.
    """

    tokens: int
    coded: tuple[Stretch, ...]
    exact: tuple[Stretch, ...]
    floor: int
    agreed: bool = True

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Of the coded layers where there are any, otherwise of the exact ones."""
        return self.coded or self.exact


def sequences(records: Iterable[Record], torn: bool, rules: RecordRules) -> tuple[SequenceLog, ...]:
    """The sequences of a file whose log is ``records``.

    In a ``torn`` log a sequence ends where the shorter of coded and exact layers ends.  Raises :class:`FormatError`
    (``coverage-tokens``, ``coverage-order``).
    """
    # Only sequences with records get an object of their own: a header of a few bytes may promise many.
    builders: dict[int, SequenceBuilder] = {}
    for record in records:
        if not record.header.ignorable:
            number = record.header.sequence
            if number not in builders:
                builders[number] = SequenceBuilder(rules)
            builders[number].add(record)
    logs = {number: builder.finish(torn) for number, builder in builders.items()}
    empty = SequenceBuilder(rules).finish(torn)
    return tuple(logs.get(number, empty) for number in range(rules.header.sequences))


@dataclass(frozen=True)
class Sound:
    """How much of a record can be read: tokens for the coded layers, and all or none for the exact ones."""

    coded: int
    exact: bool


class SequenceBuilder:
    """One sequence while its records come in.

    With ``gaps`` a record may begin behind the end of the one before, because others between them are lost; only
    tokens before the first gap count in the end.
    """

    def __init__(self, rules: RecordRules, gaps: bool = False) -> None:
        self._has = {"coded": bool(rules.run.layers), "exact": bool(rules.exact)}
        self._gaps = gaps
        #: Ends of both sides, as the headers have them.
        self._ends = {side: 0 for side, there in self._has.items() if there}
        self.floor = 0
        #: Stretches of the coded layers: those that nothing but a REWIND can touch, and the rows that pages may cover.
        self._settled: list[Stretch] = []
        self._rows: deque[Stretch] = deque()
        self._exact: list[Stretch] = []

    @property
    def end(self) -> int:
        """Tokens that all layers have, if every record can be read."""
        return min(self._ends.values(), default=0)

    def add(self, record: Record, sound: Sound | None = None) -> None:
        """Take in the next record of the sequence, of which ``sound`` (default: all) can be read.

        Raises :class:`FormatError` (``coverage-tokens``, ``coverage-order``).
        """
        head = record.header
        sound = sound or Sound(head.tokens, True)
        if head.type == REWIND:
            self._rewind(record)
        elif head.type == PAGES:
            self._add_pages(record, sound)
        else:
            assert head.type == ROWS
            both = not head.flags & EXACT_ONLY
            sides = list(self._ends) if both else ["exact"]
            for side in sides:
                self._meet(record, side)
            whole = Stretch(record, head.first, head.end)
            if "coded" in sides and sound.coded == head.tokens:
                self._rows.append(whole)
            if "exact" in sides and sound.exact:
                self._exact.append(whole)
            for side in sides:
                self._ends[side] = head.end

    def finish(self, torn: bool = False) -> SequenceLog:
        """The sequence as it stands.  Raises :class:`FormatError` (``coverage-tokens``) if the ends differ."""
        agreed = len(set(self._ends.values())) <= 1
        if not agreed and not torn and not self._gaps:
            raise FormatError(f"coded and exact layers end at different tokens: {self._ends}", code="coverage-tokens")
        sides = {"coded": [*self._settled, *self._rows], "exact": self._exact}
        tokens = min((_reach(sides[side]) for side in self._ends), default=0)
        coded, exact = (tuple(_before(stretches, tokens)) for stretches in sides.values())
        return SequenceLog(tokens, coded, exact, min(self.floor, tokens), agreed)

    def _meet(self, record: Record, side: str) -> None:
        """Check that ``record`` continues ``side``."""
        first, end = record.header.first, self._ends[side]
        if first != end and not (self._gaps and first > end):
            raise FormatError(
                f"record {record.header.number} begins at token {first} of sequence {record.header.sequence}, the "
                f"records of {side} layers before it end at {end}",
                code="coverage-tokens",
                record=record.header.number,
            )

    def _add_pages(self, record: Record, sound: Sound) -> None:
        head = record.header
        if head.first > self._ends["coded"]:
            self._meet(record, "coded")
        if head.first < self.floor:
            raise FormatError(
                f"record {head.number} codes tokens from {head.first} on of sequence {head.sequence}, which are coded "
                f"up to {self.floor}",
                code="coverage-order",
                record=head.number,
            )
        while self._rows and self._rows[0].end <= head.first:
            self._settled.append(self._rows.popleft())
        if self._rows and self._rows[0].first < head.first:
            self._settled.append(replace(self._rows[0], end=head.first))
            self._rows[0] = replace(self._rows[0], first=head.first)
        end = head.first + sound.coded
        while self._rows and self._rows[0].end <= end:
            self._rows.popleft()
        if self._rows and self._rows[0].first < end:
            self._rows[0] = replace(self._rows[0], first=end)
        if sound.coded:
            self._settled.append(Stretch(record, head.first, end))
        self._ends["coded"] = max(self._ends["coded"], head.end)
        self.floor = head.end

    def _rewind(self, record: Record) -> None:
        token = record.header.first
        if any(token > end for end in self._ends.values()) and not self._gaps:
            raise FormatError(
                f"record {record.header.number} ends sequence {record.header.sequence} at token {token}, which it has "
                f"not reached: {self._ends}",
                code="coverage-tokens",
                record=record.header.number,
            )
        for stretches in (self._rows, self._settled, self._exact):
            while stretches and stretches[-1].first >= token:
                stretches.pop()
            if stretches and stretches[-1].end > token:
                stretches[-1] = replace(stretches[-1], end=token)
        self._ends = dict.fromkeys(self._ends, token)
        self.floor = min(self.floor, token)


def _reach(stretches: list[Stretch]) -> int:
    """First token from 0 on that no stretch holds."""
    end = 0
    for stretch in stretches:
        if stretch.first != end:
            break
        end = stretch.end
    return end


def _before(stretches: Iterable[Stretch], end: int) -> Iterator[Stretch]:
    for stretch in stretches:
        if stretch.first < end:
            yield replace(stretch, end=min(stretch.end, end))


def live_records(logs: Iterable[SequenceLog]) -> dict[int, Record]:
    """The records that some layer reads tokens from, by number."""
    stretches = chain.from_iterable((*log.coded, *log.exact) for log in logs)
    return {stretch.record.header.number: stretch.record for stretch in stretches}
