"""The header's JSON: identity and provenance, which people and tools read and no decoder needs (clause 3.6)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from ..errors import FormatError, InputError, LimitError
from .structs import MAX_JSON, MAX_JSON_DEPTH, MAX_JSON_NUMBER

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class Info:
    """Whose cache this is.

    positions_start
        Position of token 0 in the model's context.
    shard
        ``(i, n)``: part ``i`` of ``n`` parts by KV heads.
    writer
        Program and version that wrote the file.
    metadata
        Whatever the caller gave; JSON values only.
    """

    model: str = ""
    revision: str = ""
    positions_start: int = 0
    shard: tuple[int, int] = (0, 1)
    writer: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise InputError(f"{problem}", code="info-field")

    def _problem(self) -> str:
        for name in ("model", "revision", "writer"):
            if not isinstance(getattr(self, name), str):
                return f"{name} must be a string"
        if type(self.positions_start) is not int or not 0 <= self.positions_start < 1 << 53:
            return "positions_start must be a whole number, 0 or more"
        if (
            len(self.shard) != 2
            or any(type(n) is not int for n in self.shard)
            or not 0 <= self.shard[0] < self.shard[1]
        ):
            return "shard must be (part, parts) with 0 <= part < parts"
        if not isinstance(self.metadata, Mapping):
            return "metadata must be a mapping"
        return ""

    def pack(self) -> bytes:
        """Canonical UTF-8 JSON.

        Raises :class:`InputError` (``info-json``) and :class:`LimitError` (``limit-json``).
        """
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        fields["metadata"] = dict(self.metadata)
        try:
            text = json.dumps(fields, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
            data = text.encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"metadata is not plain JSON: {error}", code="info-json") from None
        if len(data) > MAX_JSON or _depth(text) > MAX_JSON_DEPTH:
            raise LimitError(
                f"metadata takes {len(data)} bytes and {_depth(text)} levels; at most {MAX_JSON} bytes and "
                f"{MAX_JSON_DEPTH} levels fit a header",
                code="limit-json",
            )
        try:
            Info.parse(data)
        except FormatError as error:
            raise InputError(f"metadata is not JSON that a reader takes: {error}", code="info-json") from None
        return data

    @staticmethod
    def parse(data: bytes) -> Info:
        """The reverse.  Unknown members are ignored.  Raises :class:`FormatError` (``header-json``)."""
        try:
            text = data.decode()
            if _depth(text) > MAX_JSON_DEPTH:
                raise ValueError(f"nested deeper than {MAX_JSON_DEPTH} levels")
            fields = json.loads(
                text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_short(int),
                parse_float=_short(float),
            )  # fmt: skip
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()  # refuses lone surrogates and 1e999
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            known = {name: value for name, value in fields.items() if name in Info.__dataclass_fields__}
            if "shard" in known:
                known["shard"] = tuple(known["shard"])
            return Info(**known)
        except (ValueError, TypeError) as error:
            raise FormatError(f"the header's JSON is malformed: {error}", code="header-json") from None


def _depth(text: str) -> int:
    """Deepest nesting of ``text``, counted before any parser recurses into it."""
    depth = deepest = 0
    quoted = escaped = False
    for c in text:
        if quoted:
            quoted, escaped = escaped or c != '"', c == "\\" and not escaped
        elif c == '"':
            quoted = True
        elif c in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in "]}":
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a member occurs twice")
    return members


def _short(number: Callable[[str], _Number]) -> Callable[[str], _Number]:
    """``number`` for texts of bounded length: reading n digits takes n**2 steps."""

    def parse(text: str) -> _Number:
        if len(text) > MAX_JSON_NUMBER:
            raise ValueError(f"a number of {len(text)} characters")
        return number(text)

    return parse


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
