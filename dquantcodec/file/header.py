"""The header block: written once, never changed, all a decoder needs (specification, clause 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..errors import (
    ChecksumError,
    FormatError,
    IdentityError,
    InputError,
    LimitError,
    TruncatedError,
    UnsupportedError,
)
from ..plan import Plan
from .groupings import pack_groupings, parse_classes, parse_groupings
from .info import Info
from .layer import Layer, compose
from .plans import Numbered, pack_plans, parse_plan, parse_signs, parse_tables
from .structs import (
    BLOCK,
    DTYPES,
    LAYER,
    MAX_FILE_CLASSES,
    MAX_HEADER,
    MAX_JSON,
    MAX_LAYERS,
    MAX_PROFILES,
    MAX_SEQUENCES,
    MAX_TABLES,
    NO_PROFILE,
    PROFILE_BYTES,
    SIGNATURE,
    START,
    STORAGES,
    VERSION,
    Bytes,
    align,
    crc32c,
)

_CRC = slice(START.size - 4, START.size)


@dataclass(frozen=True)
class Header:
    """What the header block says.

    layers
        Resolved layers: coded ones carry the :class:`Plan` of every head group, all carry their model layer number.
    sinks, recent
        What the writer was asked to keep exact; the records say what it did.
    """

    file_id: bytes
    layers: tuple[Layer, ...]
    sequences: int
    sinks: int
    recent: int
    info: Info
    optional_features: int = 0
    block_bytes: int = 0
    version: tuple[int, int] = VERSION

    @property
    def salt(self) -> bytes:
        """Marks the records of this file, so that stale bytes of another never pass as one of them."""
        return self.file_id[:8]

    @property
    def window(self) -> int:
        """Tokens of a page, the same for all coded layers; 0 without any."""
        return next((layer.plans[0].window for layer in self.layers if layer.plans), 0)

    def heads_of(self, part: int, parts: int) -> list[slice]:
        """The heads of every layer that are in part ``part`` of ``parts`` equal parts of the model's KV heads.

        Raises :class:`IdentityError` (``identity-shard``) where this file does not hold that part, and
        :class:`InputError` (``info-field``, ``shard-heads``) where heads cannot be cut so.
        """
        shard = replace(self.info, shard=(part, parts)).shard
        first, count = self.info.shard
        inside = parts // count
        if parts % count or not first * inside <= part < (first + 1) * inside:
            raise IdentityError(
                f"the file has part {first} of {count} of the KV heads, which does not hold part {part} of {parts}",
                code="identity-shard",
                field="shard",
                found=self.info.shard,
                expected=shard,
            )
        cut = []
        for place, layer in enumerate(self.layers):
            heads = layer.kv_heads // inside
            if layer.kv_heads % inside:
                raise InputError(
                    f"layer {place} has {layer.kv_heads} KV heads, which do not make {inside} equal parts",
                    code="shard-heads",
                    layer=place,
                )
            cut.append(slice((part - first * inside) * heads, (part - first * inside + 1) * heads))
        return cut

    def part(self, part: int, parts: int) -> Header:
        """The header of a file with that part alone.

        Raises what :meth:`heads_of` raises, and :class:`InputError` (``shard-groups``) where a head group would be cut.
        """
        cut = [layer.cut(heads.start, heads.stop) for layer, heads in zip(self.layers, self.heads_of(part, parts))]
        return replace(self, layers=tuple(cut), info=replace(self.info, shard=(part, parts)))

    def pack(self) -> bytes:
        """The block.  Raises :class:`LimitError` (``limit-*``, ``profile-words``) and :class:`InputError`."""
        _check_counts(len(self.layers), self.sequences)
        _check_order([layer.number or 0 for layer in self.layers], InputError)
        _check_groups(sum(len(layer.plans) for layer in self.layers))
        # Layers of the same plans share their profiles.
        places: dict[tuple[int, ...], int] = {}
        plans: list[Plan] = []
        for layer in self.layers:
            if layer.plans and _identities(layer) not in places:
                places[_identities(layer)] = len(plans)
                plans += layer.plans
        _check_windows(plans, InputError)
        profiles, tables, signs, used = pack_plans(plans)
        classes, groupings = pack_groupings(used)
        layers = b"".join(
            LAYER.pack(
                STORAGES[layer.storage], DTYPES[layer.dtype], places.get(_identities(layer), NO_PROFILE),
                layer.kv_heads, layer.head_dim, layer.number or 0, len(layer.plans), bytes(14),
            )
            for layer in self.layers
        )  # fmt: skip
        sections = [profiles, layers, *map(b"".join, (tables, signs, classes, groupings)), self.info.pack()]
        offsets = [START.size]
        for section in sections:
            offsets.append(offsets[-1] + len(section))
        size = align(offsets[-1], BLOCK)
        if size > MAX_HEADER:
            raise LimitError(f"the header takes {size} bytes; at most {MAX_HEADER} are allowed", code="limit-header")
        start = START.pack(
            SIGNATURE, *VERSION, size, 0, self.optional_features, self.file_id, len(self.layers), self.sequences,
            len(plans), len(tables), len(signs), self.sinks, self.recent, *offsets[:4], offsets[6], len(sections[-1]),
            len(classes), len(groupings), *offsets[4:6], 0, 0, 0,
        )  # fmt: skip
        block = bytearray((start + b"".join(sections)).ljust(size, b"\0"))
        block[_CRC] = _block_crc(bytes(block)).to_bytes(4, "little")
        return bytes(block)


def parse_header(data: Bytes) -> Header:
    """The header at the start of the file's bytes ``data``.

    Every count and length is checked against the limits and the file's length before anything is built from it.
    Raises :class:`TruncatedError`, :class:`FormatError`, :class:`UnsupportedError`, :class:`ChecksumError` and
    :class:`LimitError`; the codes are listed in the specification, clause 9.4.
    """
    block = _checked_block(data)
    (_, major, minor, size, required, optional, file_id, layers, sequences, profiles, tables, signs, sinks, recent,
     profiles_at, layers_at, tables_at, signs_at, json_at, json_bytes, classes, groupings, classes_at, groupings_at,
     matrices, reserved, _) = START.unpack_from(block)  # fmt: skip
    if required:
        bit = (required & -required).bit_length() - 1
        raise UnsupportedError(
            f"the file needs feature {bit}, which this version does not have; read it with a newer version",
            code="feature-required",
            bit=bit,
        )
    if matrices:
        raise UnsupportedError(
            f"the file stores {matrices} transform matrices, which this version does not have; read it with a newer "
            "version",
            code="header-matrices",
        )
    if reserved:
        raise FormatError("reserved bytes of the header's start are not zero", code="header-reserved")
    _check_counts(layers, sequences)
    for name, count, most in (
        ("profiles", profiles, MAX_PROFILES),
        ("tables", tables, MAX_TABLES),
        ("signs", signs, profiles),
        ("classes", classes, MAX_FILE_CLASSES),
        ("groupings", groupings, 2 * profiles),
    ):
        if count > most:
            raise LimitError(f"the header counts {count} {name}; at most {most} are allowed", code=f"limit-{name}")
    if json_bytes > MAX_JSON:
        raise LimitError(f"the header's JSON takes {json_bytes} bytes; at most {MAX_JSON}", code="limit-json")

    _check_section("profiles", profiles_at, START.size, size)
    _check_section("layers", layers_at, profiles_at + profiles * PROFILE_BYTES, size)
    _check_section("tables", tables_at, layers_at + layers * LAYER.size, size)
    stored_tables, end = parse_tables(block, tables_at, tables, size)
    _check_section("sign vectors", signs_at, end, size)
    stored_signs, end = parse_signs(block, signs_at, signs, size)
    _check_section("classes", classes_at, end, size)
    stored_classes, end = parse_classes(block, classes_at, classes, size)
    _check_section("groupings", groupings_at, end, size)
    stored_groupings, end = parse_groupings(block, groupings_at, groupings, size, stored_classes)
    _check_section("JSON", json_at, end, size)
    _check_section("end", align(json_at + json_bytes, BLOCK), size, size)
    if any(block[json_at + json_bytes :]):
        raise FormatError("the bytes after the header's JSON are not zero", code="header-reserved")

    entries = [block[at : at + PROFILE_BYTES] for at in range(profiles_at, layers_at, PROFILE_BYTES)]
    named = Numbered(stored_tables, stored_signs, stored_groupings)
    # Head groups often have equal profiles: one plan then, and one codec.
    distinct: dict[bytes, Plan] = {}
    for number, entry in enumerate(entries):
        if entry not in distinct:
            distinct[entry] = parse_plan(entry, number, named)
    plans = [distinct[entry] for entry in entries]
    _check_windows(plans, FormatError)
    entries = [block[at : at + LAYER.size] for at in range(layers_at, tables_at, LAYER.size)]
    _check_groups(sum(LAYER.unpack(entry)[6] for entry in entries))
    parsed = tuple(_parse_layer(entry, place, plans) for place, entry in enumerate(entries))
    _check_order([layer.number or 0 for layer in parsed], FormatError)
    info = Info.parse(block[json_at : json_at + json_bytes])
    return Header(file_id, parsed, sequences, sinks, recent, info, optional, size, (major, minor))


def _checked_block(data: Bytes) -> bytes:
    """The header block, once signature, version, length and checksum hold."""
    start = data[: START.size].tobytes()
    if start[: len(SIGNATURE)] != SIGNATURE[: len(start)]:
        raise FormatError(
            "the file does not begin with the .dqkv signature; it is another kind of file", code="signature"
        )
    if len(start) < START.size:
        raise TruncatedError(f"the file ends after {len(start)} bytes, within its header", code="header-truncated")
    _, major, minor, size, *_ = START.unpack(start)
    if major != VERSION[0]:
        draft = "the file is a draft from before 1.0, and drafts promised nothing; write it again" if major == 0 else ""
        raise UnsupportedError(
            f"the file has format version {major}.{minor}, this library reads {VERSION[0]}: "
            f"{draft or 'use a version of the library that reads it'}",
            code="version-major",
        )
    if size > MAX_HEADER:
        raise LimitError(
            f"the header says it takes {size} bytes; at most {MAX_HEADER} are allowed", code="limit-header"
        )
    if size < BLOCK or size % BLOCK:
        raise FormatError(f"the header says it takes {size} bytes, no multiple of {BLOCK}", code="header-length")
    if size > data.nbytes:
        raise TruncatedError(f"the file has {data.nbytes} bytes, its header alone {size}", code="header-truncated")
    block = data[:size].tobytes()
    if _block_crc(block) != int.from_bytes(block[_CRC], "little"):
        raise ChecksumError("the header's checksum is wrong; the file is damaged, take another copy", code="header-crc")
    return block


def _block_crc(block: bytes) -> int:
    return crc32c(block[_CRC.stop :], crc32c(block[: _CRC.start]))


def _check_section(name: str, offset: int, expected: int, size: int) -> None:
    """Sections follow one another without gap or overlap, so no byte of the block means two things or nothing."""
    if offset != expected or offset > size:
        raise FormatError(
            f"the header's {name} should begin at byte {expected} and do at {offset}", code="header-coverage"
        )


def _check_counts(layers: int, sequences: int) -> None:
    if not 1 <= layers <= MAX_LAYERS:
        raise LimitError(f"{layers} layers; a file has 1 to {MAX_LAYERS}", code="limit-layers")
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise LimitError(f"{sequences} sequences; a file has 1 to {MAX_SEQUENCES}", code="limit-sequences")


def _check_groups(count: int) -> None:
    if count > MAX_PROFILES:
        raise LimitError(
            f"the layers have {count} head groups together; at most {MAX_PROFILES} are allowed", code="limit-groups"
        )


def _identities(layer: Layer) -> tuple[int, ...]:
    return tuple(map(id, layer.plans))


def _check_windows(plans: Sequence[Plan], error: type[FormatError] | type[InputError]) -> None:
    windows = sorted({plan.window for plan in plans})
    if len(windows) > 1:
        raise error(f"coded layers have windows of {windows} tokens; all must share one", code="profile-window-differs")


def _check_order(numbers: Sequence[int], error: type[FormatError] | type[InputError]) -> None:
    if any(a >= b for a, b in pairwise(numbers)) or not all(0 <= n < 1 << 32 for n in numbers):
        raise error("model layer numbers must rise from layer to layer", code="layer-number")


def _parse_layer(entry: bytes, place: int, plans: Sequence[Plan]) -> Layer:
    storage, dtype, profile, kv_heads, head_dim, number, groups, reserved = LAYER.unpack(entry)
    storages = {code: name for name, code in STORAGES.items()}
    dtypes = {code: name for name, code in DTYPES.items()}
    if storage not in storages:
        raise UnsupportedError(f"layer {place} has the unknown storage {storage}", code="layer-storage", layer=place)
    if dtype not in dtypes:
        raise UnsupportedError(f"layer {place} has the unknown dtype {dtype}", code="layer-dtype", layer=place)
    if any(reserved):
        raise FormatError(f"reserved bytes of layer {place} are not zero", code="header-reserved", layer=place)
    coded = storages[storage] == "coded"
    if not (1 <= groups <= kv_heads if coded else groups == 0):
        raise FormatError(
            f"layer {place} of {kv_heads} heads, {storages[storage]}, has {groups} head groups",
            code="layer-groups",
            layer=place,
        )
    found = tuple(plans[profile : profile + groups])
    if coded:
        if len(found) != groups or not compose(found, kv_heads, head_dim):
            raise FormatError(
                f"layer {place} names {groups} profiles from {profile} on, which are missing or have another geometry",
                code="layer-profile",
                layer=place,
            )
    elif profile != NO_PROFILE:
        raise FormatError(f"layer {place} is not coded but names a profile", code="layer-profile", layer=place)
    return Layer(kv_heads, head_dim, dtypes[dtype], found or None, storages[storage], number)
