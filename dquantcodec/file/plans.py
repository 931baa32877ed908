"""Plans as numbers: profile entries, letter tables, sign vectors (specification, clauses 3.2, 3.4 and 3.5).

Nothing a decoder needs is derived: tables and signs are stored, because libraries and generators differ between
machines.  Parsing rebuilds exactly the :class:`Plan` that was packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DQuantError, FormatError, LimitError, UnsupportedError
from ..grouping import Grouping
from ..plan import MAX_VALUES, Plan, StreamPlan, grouped
from ..profile import MAX_LETTERS, TILE
from ..stored import Integers
from .layer import check_geometry
from .structs import (
    CODERS,
    GAINS,
    GRIDS,
    MAX_TABLES,
    MAX_WINDOW,
    MAX_WORDS,
    MEAN_INT8,
    MEAN_NONE,
    PROFILE,
    PROFILE_BYTES,
    QUANTISERS,
    ROTATION_HADAMARD,
    ROTATION_NONE,
    SIGNS,
    STEP,
    STREAM,
    TABLE,
    align,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_POWERS = frozenset(1 << bit for bit in range(16))
#: Bits, lowest first, as text: 1 stands for the sign -1.
_SIGN_OF_BIT = str.maketrans({"0": "\x01", "1": "\xff"})


class Table(NamedTuple):
    """A letter table: its precision ``p``, frequencies that sum to ``2**p``, and whether they are powers of two."""

    precision: int
    frequencies: Integers
    powers: bool


def pack_plans(plans: Sequence[Plan]) -> tuple[bytes, list[bytes], list[bytes], list[Grouping]]:
    """Profile entries of ``plans`` in order, then what they number: tables and sign vectors, each stored once, and
    groupings."""
    tables: dict[bytes, int] = {}
    signs: dict[bytes, int] = {}
    groupings: dict[Grouping, int] = {}
    entries = b"".join(_pack_plan(plan, tables, signs, groupings) for plan in plans)
    if len(tables) > MAX_TABLES:
        raise LimitError(
            f"the layers use {len(tables)} different letter tables; a file holds at most {MAX_TABLES}",
            code="limit-tables",
        )
    return entries, list(tables), list(signs), list(groupings)


def _pack_plan(plan: Plan, tables: dict[bytes, int], signs: dict[bytes, int], groupings: dict[Grouping, int]) -> bytes:
    name = plan.profile_name.encode()[:32].decode(errors="ignore").encode()
    packed_signs = _padded(SIGNS.pack(plan.values, bytes(4)) + _sign_bits(plan.signs))
    sign_vector = signs.setdefault(packed_signs, len(signs))
    entry = PROFILE.pack(plan.kv_heads, plan.head_dim, plan.window, bytes(4), name, bytes(16))
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        if stream.words > MAX_WORDS:
            raise LimitError(
                f"a {kind} container has {stream.words} words; the file holds at most {MAX_WORDS} "
                "(give fewer bytes or more sub-streams)",
                code="profile-words",
            )
        states = stream.grouping.states if stream.grouping else 1
        shared = (CODERS[stream.coder], QUANTISERS[states], GRIDS[stream.grid])
        mean = MEAN_INT8 if stream.mean else MEAN_NONE
        if stream.grouping is not None:
            entry += STREAM.pack(
                *shared, 0, 0, 0, stream.substreams, mean, stream.words, 0, ROTATION_NONE, 0, sign_vector, stream.step,
                GAINS[stream.gain], 0, groupings.setdefault(stream.grouping, len(groupings)), 0, 0, 0, bytes(32),
            )  # fmt: skip
            continue
        frequencies = stream.frequencies.astype("<u2")
        packed = _padded(TABLE.pack(frequencies.size, stream.precision) + frequencies.tobytes())
        entry += STREAM.pack(
            *shared, stream.letter, stream.levels, stream.precision, stream.substreams, mean, stream.words,
            tables.setdefault(packed, len(tables)), ROTATION_HADAMARD, 0, sign_vector, stream.step,
            GAINS[stream.gain], 0, 0, 0, 0, 0, bytes(32),
        )  # fmt: skip
    return entry


def _sign_bits(signs: NDArray[np.int8]) -> bytes:
    """One bit a sign, the lowest first: 1 for -1."""
    text = "".join("1" if sign < 0 else "0" for sign in reversed(signs.reshape(-1).tolist()))
    return int(text, 2).to_bytes(-(-len(text) // 8), "little")


def _padded(data: bytes) -> bytes:
    return data.ljust(align(len(data), STEP), b"\0")


def parse_tables(block: bytes, offset: int, count: int, end: int) -> tuple[list[Table], int]:
    """``count`` tables from ``offset``, none reaching past ``end``; returns them and the offset after the last."""
    tables = []
    for number in range(count):
        if offset + TABLE.size > end:
            raise FormatError(f"letter table {number} lies outside the header", code="header-coverage", table=number)
        letters, precision = TABLE.unpack_from(block, offset)
        if not 2 <= letters <= MAX_LETTERS or not 8 <= precision <= 15:
            raise LimitError(
                f"letter table {number} has {letters} letters and {precision} bits; allowed are 2 to {MAX_LETTERS} "
                "letters and 8 to 15 bits",
                code="limit-table",
                table=number,
            )
        size = TABLE.size + 2 * letters
        if offset + align(size, STEP) > end:
            raise FormatError(f"letter table {number} lies outside the header", code="header-coverage", table=number)
        frequencies = Integers(block[offset + TABLE.size : offset + size], "H", (letters,))
        numbers = frequencies.numbers()
        if not all(numbers):
            raise FormatError(f"letter table {number} has a frequency of zero", code="table-zero", table=number)
        if sum(numbers) != 1 << precision:
            raise FormatError(
                f"the frequencies of letter table {number} do not sum to 2**{precision}", code="table-sum", table=number
            )
        _require_zero(block[offset + size : offset + align(size, STEP)], f"letter table {number}")
        tables.append(Table(precision, frequencies, _POWERS.issuperset(numbers)))
        offset += align(size, STEP)
    return tables, offset


def parse_signs(block: bytes, offset: int, count: int, end: int) -> tuple[list[bytes], int]:
    """``count`` sign vectors (a signed byte each, +1 and -1) from ``offset``, as :func:`parse_tables`."""
    vectors = []
    for number in range(count):
        if offset + SIGNS.size > end:
            raise FormatError(f"sign vector {number} lies outside the header", code="header-coverage", signs=number)
        bits, reserved = SIGNS.unpack_from(block, offset)
        if bits > MAX_VALUES:
            raise LimitError(
                f"sign vector {number} has {bits} bits; at most {MAX_VALUES} are allowed",
                code="limit-signs",
                signs=number,
            )
        size = SIGNS.size + -(-bits // 8)
        if offset + align(size, STEP) > end:
            raise FormatError(f"sign vector {number} lies outside the header", code="header-coverage", signs=number)
        negative = int.from_bytes(block[offset + SIGNS.size : offset + align(size, STEP)], "little")
        if any(reserved) or negative >> bits:
            raise FormatError(f"unused bits of sign vector {number} are not zero", code="header-reserved", signs=number)
        lowest_first = f"{negative:0{bits}b}"[::-1] if bits else ""
        vectors.append(lowest_first.translate(_SIGN_OF_BIT).encode("latin-1"))
        offset += align(size, STEP)
    return vectors, offset


@dataclass(frozen=True, eq=False)
class Numbered:
    """What profile entries name by number."""

    tables: Sequence[Table]
    signs: Sequence[bytes]
    groupings: Sequence[Grouping]


def parse_plan(entry: bytes, number: int, named: Numbered) -> Plan:
    """The plan of profile entry ``number`` (192 bytes).

    Raises :class:`FormatError`, :class:`LimitError` or, for fields this version cannot decode,
    :class:`UnsupportedError`; codes ``profile-*`` and ``limit-geometry``.
    """
    assert len(entry) == PROFILE_BYTES
    kv_heads, head_dim, window, reserved, name, rest = PROFILE.unpack_from(entry)
    _require_zero(reserved + rest, f"profile {number}")
    check_geometry(kv_heads, head_dim)
    _require(
        window % TILE == 0 and TILE <= window <= MAX_WINDOW,
        LimitError,
        number,
        "window",
        f"a window of {window} tokens",
    )
    key, key_signs = _parse_stream(entry, PROFILE.size, number, "key", (kv_heads, head_dim), named)
    value, value_signs = _parse_stream(entry, PROFILE.size + STREAM.size, number, "value", (kv_heads, head_dim), named)
    _require(key_signs == value_signs, UnsupportedError, number, "rotation", "different signs for keys and values")
    _require(
        key_signs < len(named.signs), FormatError, number, "signs", f"sign vector {key_signs} of {len(named.signs)}"
    )
    vector = named.signs[key_signs]
    _require(len(vector) == kv_heads * head_dim, FormatError, number, "signs", f"a vector of {len(vector)} signs")
    try:
        text = name.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise FormatError(f"the name of profile {number} is not UTF-8", code="profile-name", profile=number) from None
    signs = Integers(vector, "b", (kv_heads, head_dim)).as_array()
    return Plan(kv_heads, head_dim, window, signs, key, value, text)


def _parse_stream(
    entry: bytes, offset: int, number: int, kind: str, geometry: tuple[int, int], named: Numbered
) -> tuple[StreamPlan, int]:
    (coder, quantiser, grid, letter, levels, precision, substreams, mean, words, table, rotation, unused, sign_vector,
     step, gain, zero, grouping, escape, zero2, matrix, reserved) = STREAM.unpack_from(entry, offset)  # fmt: skip
    tables, kv_heads = named.tables, geometry[0]
    coders, grids, gains = ({code: name for name, code in names.items()} for names in (CODERS, GRIDS, GAINS))

    def require(holds: bool, error: type[DQuantError], field: str, found: str) -> None:
        _require(holds, error, number, field, f"{found} for {kind}s")

    require(coder in coders, UnsupportedError, "coder", f"coder {coder}")
    require(quantiser in QUANTISERS.values(), UnsupportedError, "quantiser", f"quantiser {quantiser}")
    require(grid in grids, UnsupportedError, "grid", f"grid {grid}")
    require(gain in gains, UnsupportedError, "gain", f"gain {gain}")
    require(mean in (MEAN_NONE, MEAN_INT8), UnsupportedError, "mean", f"mean mode {mean}")
    known_rotation = rotation in (ROTATION_NONE, ROTATION_HADAMARD)
    require(known_rotation, UnsupportedError, "rotation", f"rotation {rotation}")
    require(escape == 0, UnsupportedError, "escape", f"escape {escape}")
    require(matrix == 0, UnsupportedError, "matrix", f"stored matrix {matrix}")
    _require_zero(bytes([unused, zero, zero2]) + reserved, f"profile {number}")
    require(substreams in (1, 2, 4), LimitError, "substreams", f"{substreams} sub-streams")
    require(kv_heads % substreams == 0, FormatError, "heads", f"{substreams} sub-streams of {kv_heads} heads")
    require(2 <= words <= MAX_WORDS, LimitError, "words", f"{words} words")
    if rotation == ROTATION_NONE:
        require((letter, levels, precision, table) == (0, 0, 0, 0), FormatError, "grouping", "a letter table, too,")
        require(
            (coders[coder], grids[grid]) == ("prefix", "mid-tread") and 0 < step <= 64, FormatError, "grouping",
            f"a grouping with coder {coder}, grid {grid} and step {step}",
        )  # fmt: skip
        require(grouping < len(named.groupings), FormatError, "grouping", f"grouping {grouping}")
        found = named.groupings[grouping]
        require(
            (found.heads, found.head_dim) == geometry, FormatError, "grouping",
            f"a grouping of {found.heads} heads of {found.head_dim} values",
        )  # fmt: skip
        same = QUANTISERS[found.states] == quantiser
        require(same, FormatError, "grouping", f"quantiser {quantiser} but not its grouping")
        return grouped(words, substreams, mean == MEAN_INT8, step, gains[gain], found), sign_vector
    require((grouping, quantiser) == (0, 0), FormatError, "grouping", "a grouping or a trellis beside a rotation")
    require(2 <= levels <= 64, LimitError, "levels", f"{levels} levels")
    if grids[grid] == "mid-tread":
        require(levels % 2 == 1, FormatError, "levels", f"a mid-tread grid of {levels} levels")
        require(0 < step <= 16, FormatError, "step", f"a step of {step}")
    else:
        require((step, gain) == (0, 0), FormatError, "grid", "a step or gain without a mid-tread grid")
    require(8 <= precision <= 15, LimitError, "precision", f"{precision} probability bits")
    letters = levels**letter
    require(
        1 <= letter <= 4 and letters <= min(MAX_LETTERS, 1 << precision),
        LimitError,
        "letter",
        f"{letter} symbols a letter",
    )
    require(table < len(tables), FormatError, "table", f"letter table {table} of {len(tables)}")
    bits, frequencies, powers = tables[table]
    (count,) = frequencies.shape
    require((bits, count) == (precision, letters), FormatError, "table", f"a table of {count} letters and {bits} bits")
    if coders[coder] == "prefix":
        require(powers, FormatError, "prefix", "frequencies that are no powers of two")
    stream = StreamPlan(
        coders[coder], levels, letter, precision, words, substreams, mean == MEAN_INT8, frequencies.as_array(),
        grids[grid], step, gains[gain],
    )  # fmt: skip
    return stream, sign_vector


def _require(holds: bool, error: type[DQuantError], number: int, field: str, found: str) -> None:
    if not holds:
        verdict = "this version cannot decode it" if error is UnsupportedError else "the format does not allow it"
        raise error(f"profile {number} has {found}; {verdict}", code=f"profile-{field}", profile=number)


def _require_zero(data: bytes, place: str) -> None:
    if any(data):
        raise FormatError(f"reserved bytes of {place} are not zero", code="header-reserved")
