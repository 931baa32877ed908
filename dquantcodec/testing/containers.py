"""One container as a third party's coder sees it: a plan, bytes, symbols; and three coders of that kind.

A *decoder* is ``decode(plan, data)``.  It gets a :class:`ContainerPlan` and the container's bytes: words one after
another, little-endian (in a page they are interleaved with those of other tokens; clause 5.2).  It returns the symbols
and a finding: ``(symbols, None)`` for a sound container, otherwise the reason code of clause 6.2 or 6.3.  With
``container-overrun`` or ``container-state`` the symbols may be anything, None included.

An *encoder* is ``encode(plan, symbols)``.  It returns all bytes of the container, or None if the symbols do not fit.

Symbols are counted from the lowest level, one for every value, heads in order.  In grouped plans channels that are not
coded are 0, and symbols of dependent classes are counted in half steps (clause 6.7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from .. import group_prefix
from ..coders import CODERS
from ..group_arrays import group_arrays
from ..grouping import Grouping, Levels, Table
from ..letters import letter_table
from ..letters import pack as pack_letters
from ..plan import StreamPlan, grouped
from ..profile import TILE
from . import coders, groups, trellises

Decoded = tuple[Sequence[int] | None, str | None]


@dataclass(frozen=True)
class ContainerPlan:
    """All that decides what the bytes of one container mean: a sub-stream that stands alone.

    coder, levels, letter, precision, frequencies
        As in clause 3.2 and 3.4 of the specification.  For a grouped plan: ``"prefix"``, 0, 0, 0 and ().
    heads, head_dim
        Of the sub-stream.
    words
        Of the container: 16 bits each for ``rans``, 32 for ``prefix``.
    grouping
        Of a grouped plan (clauses 3.8, 6.6 and 6.7), else None.
    """

    coder: str
    levels: int
    letter: int
    precision: int
    frequencies: tuple[int, ...]
    heads: int
    head_dim: int
    words: int
    grouping: Grouping | None = None

    @property
    def word_bytes(self) -> int:
        return 2 if self.coder == "rans" else 4

    @property
    def bytes(self) -> int:
        """Bytes of the container."""
        return self.words * self.word_bytes

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def letters(self) -> int:
        """Letters of the container."""
        if self.grouping is not None:
            return self.heads * self.grouping.letters_per_head
        return self.heads * -(-self.head_dim // self.letter)

    @cached_property
    def stream(self) -> StreamPlan:
        """The same for the library's own coders."""
        if self.grouping is not None:
            return grouped(self.words, 1, False, 1.0, "least-squares", self.grouping)
        frequencies = np.array(self.frequencies, np.uint16)
        return StreamPlan(self.coder, self.levels, self.letter, self.precision, self.words, 1, False, frequencies)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_json` is the reverse."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["frequencies"] = list(self.frequencies)
        found = self.grouping
        if found is not None:
            fields["grouping"] = {
                "classes": [[list(c.weights), c.gain, list(c.second)] for c in found.classes],
                "tables": [[list(table.classes), table.precision] for table in found.tables],
                "letters": list(found.letters),
                "fields": list(found.fields),
                "choice": found.choice.tolist(),
                "order": found.order.tolist(),
                "states": found.states,
            }
        return fields

    @staticmethod
    def from_json(fields: dict[str, Any]) -> ContainerPlan:
        fields = {**fields, "frequencies": tuple(fields["frequencies"])}
        stored = fields["grouping"]
        if stored is not None:
            fields["grouping"] = Grouping(
                head_dim=fields["head_dim"],
                classes=tuple(Levels(tuple(w), gain, tuple(second)) for w, gain, second in stored["classes"]),
                tables=tuple(Table(tuple(used), precision) for used, precision in stored["tables"]),
                letters=tuple(stored["letters"]),
                fields=tuple(stored["fields"]),
                choice=np.array(stored["choice"], np.uint8),
                order=np.array(stored["order"], np.uint16),
                states=stored["states"],
            )
        return ContainerPlan(**fields)


Decode = Callable[[ContainerPlan, bytes], Decoded]
Encode = Callable[[ContainerPlan, list[int]], bytes | None]


def words_of(plan: ContainerPlan, data: bytes) -> list[int]:
    """The words of container bytes."""
    size = plan.word_bytes
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def bytes_of(plan: ContainerPlan, words: Sequence[int]) -> bytes | None:
    """The container of words, filled up with zeros; None if they are too many."""
    if len(words) > plan.words:
        return None
    return b"".join(int(word).to_bytes(plan.word_bytes, "little") for word in words).ljust(plan.bytes, b"\0")


# --- Plain Python ---------------------------------------------------------------------------------------------------


def plain_letters(plan: ContainerPlan, symbols: Sequence[int]) -> list[int]:
    """The letters of symbols; those of a trellis as they are numbered within a state."""
    if plan.grouping is None:
        return coders.pack(symbols, plan.head_dim, plan.levels, plan.letter, plan.frequencies)
    letters = []
    state = 0
    for group in groups.groups(plan.grouping):
        classes = trellises.table_classes(plan.grouping, group.table)
        for channels in group.channels:
            fields = []
            for channel, c in zip(channels, classes, strict=True):
                m, state = trellises.index_of(plan.grouping.states, state, symbols[channel], c)
                fields.append(m)
            letters.append(groups.letter_number(fields, [len(c.weights) for c in classes]))
    return letters


def plain_words(plan: ContainerPlan, symbols: Sequence[int]) -> list[int]:
    """All words of symbols, however many."""
    letters = plain_letters(plan, symbols)
    if plan.grouping is None:
        return coders.ENCODERS[plan.coder](letters, plan.frequencies, plan.precision)
    part = list(groups.groups(plan.grouping))
    if plan.grouping.states == 1:
        return groups.encode(letters, plan.grouping, part)
    return trellises.encode(letters, plan.grouping, part)


def plain_encode(plan: ContainerPlan, symbols: Sequence[int]) -> bytes | None:
    """The encoder that follows the specification word for word."""
    return bytes_of(plan, plain_words(plan, symbols))


def plain_decode(plan: ContainerPlan, data: bytes) -> Decoded:
    """The decoder that follows the specification word for word, padding checked."""
    words = words_of(plan, data)
    if plan.grouping is not None:
        coder = groups if plan.grouping.states == 1 else trellises
        found = coder.decode(words, plan.grouping, list(groups.groups(plan.grouping)))
        if found.finding == "container-overrun":
            return None, found.finding
        return [found.levels.get(channel, 0) for channel in range(plan.values)], found.finding
    decoded = coders.DECODERS[plan.coder](words, plan.letters, plan.frequencies, plan.precision)
    if decoded.letters is None:
        return None, decoded.finding
    return coders.unpack(decoded.letters, plan.head_dim, plan.levels, plan.letter), decoded.finding


# --- The library ----------------------------------------------------------------------------------------------------


def library_encode(plan: ContainerPlan, symbols: Sequence[int]) -> bytes | None:
    """The library's kernels as an encoder of one container."""
    stream = plan.stream
    if plan.grouping is None:
        letters = pack_letters(np.array([symbols], np.uint8), stream, plan.head_dim)
        words, used = CODERS[plan.coder].encode(letters[None], stream)
        return bytes_of(plan, words[0, 0, :, 0].tolist()) if used[0, 0] <= plan.words else None
    arrays = group_arrays(plan.grouping)
    tables = [group.table for group in groups.groups(plan.grouping) for _ in group.channels]
    states = trellises.states_before(plan.grouping, symbols)
    numbers = np.array(plain_letters(plan, symbols)) + np.array(states) * arrays.letters[tables]
    bits = 1 + int(arrays.lengths[arrays.first[tables] + numbers].sum(dtype=np.int64))
    if bits > 32 * plan.words:
        return None  # the kernel has no room for what does not fit; drift sees to it
    return bytes_of(plan, group_prefix.encode(numbers[None].astype(np.uint16), stream)[0, 0, :, 0].tolist())


def library_decode(plan: ContainerPlan, data: bytes) -> Decoded:
    """The library's kernels as a decoder of one container, in a tile whose other 31 containers are noise."""
    return decode_tile(plan, [data])[0]


def decode_tile(plan: ContainerPlan, containers: Sequence[bytes]) -> list[Decoded]:
    """As :func:`library_decode`, of up to 32 containers in one tile; noise takes the rest."""
    from ..status import REASONS

    stream = plan.stream
    lanes = (np.arange(len(containers)) + containers[0][-1]) % TILE
    words = _noise(plan.words, plan.word_bytes).copy()
    stored = np.frombuffer(b"".join(containers), f"<u{plan.word_bytes}")
    words[0, 0][:, lanes] = stored.reshape(len(containers), plan.words).T
    if plan.grouping is not None:
        levels, status = group_prefix.decode_levels(words, stream, strict=True)
    else:
        count = plan.heads * letter_table(stream, plan.head_dim).per_head
        levels, status = CODERS[plan.coder].decode_levels(words, stream, plan.head_dim, count, strict=True)
    rows, codes = levels[0].T[lanes].tolist(), status[0, 0, lanes].tolist()
    return [(row, REASONS.get(code)) for row, code in zip(rows, codes)]


@lru_cache(maxsize=64)
def _noise(words: int, size: int) -> Any:
    rng = np.random.default_rng(words)
    return rng.integers(0, 1 << 8 * size, (1, 1, words, TILE)).astype(f"u{size}")
