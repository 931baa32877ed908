"""Six fuzz targets: each takes any bytes and raises only if the library did something it must not.

Checksums are made right, otherwise no mutation would get behind them.  Files come in *packed* form: u16 lengths and
contents of the parts, each of which starts at the next multiple of 4096, so that a fuzzer has few zeros to learn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..codec import Codec
from ..errors import DQuantError
from ..file import Layer, create
from ..file import structs as s
from ..file.header import parse_header
from ..file.records import RecordRules
from ..file.scan import read_log, walk
from ..file.sequences import sequences
from ..file.verify import verify
from ..plan import Plan
from ..profile import TILE
from ..rotate import random_signs
from .containers import ContainerPlan, decode_tile, plain_decode
from .files import file_bytes, files_open_or_say_why, repaired
from .pages import decode_page
from .plans import drifting_plan, rans_plan, rotated_plan, small_plan

#: See :func:`longest`.
MOST_BYTES = 1 << 15
#: Tokens of an input of ``encode``.
MOST_TOKENS = 96
#: Unpacked files end at the first part behind so many bytes; the seeds have 60 KiB.
MOST_UNPACKED = 1 << 17


def pack_blocks(data: bytes) -> bytes:
    """A file in packed form: its stretches up to long runs of zeros at the ends of 4096-byte blocks."""
    parts, at = b"", 0
    while at < len(data):
        end = at + s.BLOCK
        while data[end - 1 : end] not in (b"", b"\0") and end < len(data):
            end += s.BLOCK
        body = data[at:end].rstrip(b"\0")
        assert len(body) < 1 << 16
        parts += len(body).to_bytes(2, "little") + body
        at = end
    return parts


def unpack_blocks(data: bytes) -> bytes:
    """The reverse, of any bytes; a part that is cut is taken as far as it goes."""
    parts: list[bytes] = []
    at = made = 0
    while len(data) - at >= 2 and made < MOST_UNPACKED:
        size = int.from_bytes(data[at : at + 2], "little")
        body = data[at + 2 : at + 2 + size]
        at += 2 + size
        parts.append(body.ljust(max(s.BLOCK, s.align(len(body), s.BLOCK)), b"\0"))
        made += len(parts[-1])
    return b"".join(parts)


@lru_cache(maxsize=8)
def _base(*kinds: str) -> bytes:
    return file_bytes(kinds, 43, cuts=(20,), sinks=2, recent=4)


@lru_cache(maxsize=8)
def _rules(*kinds: str) -> RecordRules:
    """Of :func:`_base`, whose header no record changes: parsed once, not for every input."""
    return RecordRules(parse_header(memoryview(_base(*kinds))))


@lru_cache(maxsize=8)
def _index_at(*kinds: str) -> int:
    return walk(memoryview(_base(*kinds)), _rules(*kinds)).records[-1].offset


def _records_at(data: bytes) -> int:
    return int.from_bytes(data[12:16], "little")


# --- The files that inputs stand for -------------------------------------------------------------------------------


def header_file(data: bytes) -> bytes:
    """A header block without its last zeros, or behind the start of one, made whole."""
    size = max(s.BLOCK, s.align(len(data), s.BLOCK))
    block = bytearray(data.ljust(size, b"\0"))
    if len(data) < 1 or data[0] == s.SIGNATURE[0]:
        block[:12] = s.SIGNATURE + bytes((s.VERSION[0], 0, s.VERSION[1], 0))
        block[12:16] = size.to_bytes(4, "little")
    return repaired(bytes(block), records=False)


def records_file(data: bytes) -> bytes:
    """Records, packed, behind a good header."""
    base, rules = _base("rotated", "exact"), _rules("rotated", "exact")
    return repaired(base[: _records_at(base)] + unpack_blocks(data), header=False, rules=rules)


def index_file(data: bytes) -> bytes:
    """An INDEX record behind good records, which are exact rows, so that verification is quick."""
    base, rules, offset = _base("exact", "exact"), _rules("exact", "exact"), _index_at("exact", "exact")
    body = bytearray(data.ljust(max(s.BLOCK, s.align(len(data), s.BLOCK)), b"\0"))
    if len(data) > s.RECORD_BYTES:
        # The trailer ends the block, as in a file.
        body[-s.TRAILER.size :] = data[-s.TRAILER.size :].rjust(s.TRAILER.size, b"\0")
    return repaired(base[:offset] + bytes(body), header=False, rules=rules, first=offset)


def packed_file(data: bytes) -> bytes:
    """A whole file, packed; the first byte says which checksums are made right."""
    flags = data[0] if data else 0
    return repaired(unpack_blocks(data[1:]), bool(flags & 1), bool(flags & 2), bool(flags & 4))


#: The file that an input of a target stands for; ``container`` and ``encode`` have none.
FILES: dict[str, Callable[[bytes], bytes]] = {
    "header": header_file,
    "records": records_file,
    "index": index_file,
    "file": packed_file,
}


# --- Targets --------------------------------------------------------------------------------------------------------


def header(data: bytes) -> None:
    """A header block without its last zeros: refused, or parsed, and what was parsed packs to the same meaning."""
    try:
        found = parse_header(memoryview(header_file(data)))
    except DQuantError as error:
        assert error.code
        return
    again = parse_header(memoryview(found.pack()))
    assert again.pack() == found.pack()
    assert len(again.layers) == len(found.layers) and again.info == found.info


def records(data: bytes) -> None:
    """Records, packed, behind a good header: a log that covers its tokens, or an error."""
    rules = _rules("rotated", "exact")
    file = memoryview(records_file(data))
    try:
        log = read_log(file, rules)
        found = sequences(log.records, log.torn, rules)
    except DQuantError as error:
        assert error.code
        return
    offset = rules.header.block_bytes
    for record in log.records:
        assert record.offset == offset and record.end <= len(file)
        offset = record.end
    for sequence in found:
        for side in (sequence.coded, sequence.exact):
            at = 0
            for stretch in side:
                assert stretch.first == at < stretch.end <= stretch.record.header.end
                at = stretch.end
            assert not side or at == sequence.tokens


def index(data: bytes) -> None:
    """An INDEX record behind good records: used only if it says what the records say, or verification tells."""
    rules = _rules("exact", "exact")
    file = memoryview(index_file(data))
    try:
        log = read_log(file, rules)
        tokens = [sequence.tokens for sequence in sequences(log.records, log.torn, rules)]
    except DQuantError as error:
        assert error.code
        return
    findings = list(verify(file, rules, log))
    if tokens != [43] or log.torn:
        assert findings, "the index hides tokens and verification finds nothing"


@lru_cache(maxsize=1)
def container_plans() -> tuple[ContainerPlan, ...]:
    """The plans that the target ``container`` takes by its first byte."""
    rotated = rotated_plan()
    made = [
        ContainerPlan(
            stream.coder, stream.levels, stream.letter, stream.precision, tuple(stream.frequencies.tolist()), 1, 8,
            stream.words,
        )
        for stream in (rotated.key, rotated.value)
    ]  # fmt: skip
    made.append(ContainerPlan("rans", 2, 1, 15, (1, 2**15 - 1), 1, 12, 4))
    made.append(ContainerPlan("rans", 3, 2, 8, (200, 1, 1, 1, 1, 1, 1, 1, 49), 2, 5, 5))
    made.append(ContainerPlan("prefix", 2, 2, 12, (2048, 1024, 512, 512), 2, 5, 2))
    for plan in (small_plan(), small_plan(4)):
        stream = plan.key
        made.append(ContainerPlan("prefix", 0, 0, 0, (), 2, 8, stream.words, stream.grouping))
    return tuple(made)


def container(data: bytes) -> None:
    """A container of any bytes, of the plan the first byte chooses: what plain Python decodes, and never outside.

    Further bytes are further containers of the same tile.
    """
    plan, bodies = _containers(data)
    for body, (found, finding) in zip(bodies, decode_tile(plan, bodies), strict=True):
        expected, code = plain_decode(plan, body)
        assert finding == code, (finding, code)
        if code in (None, "container-padding"):
            assert found == expected, (found, expected)


def _containers(data: bytes) -> tuple[ContainerPlan, list[bytes]]:
    """Plan and containers of an input of ``container``: one at least, a tile of them at most."""
    plan = container_plans()[kind_of("container", data)]
    count = min(max((len(data) - 1) // plan.bytes, 1), TILE)
    whole = data[1 : 1 + count * plan.bytes].ljust(plan.bytes, b"\0")
    return plan, [whole[at : at + plan.bytes] for at in range(0, len(whole), plan.bytes)]


@lru_cache(maxsize=1)
def page_plans() -> tuple[Plan, ...]:
    """The plans that the target ``encode`` takes by its first byte."""
    sizes = [
        (rotated_plan(tiny), small_plan(tiny=tiny), small_plan(4, tiny), drifting_plan(tiny=tiny),
         drifting_plan(4, tiny=tiny))
        for tiny in (False, True)
    ]  # fmt: skip
    return *sizes[0], *sizes[1], rans_plan()


@lru_cache(maxsize=16)
def _codec(plan: Plan) -> Codec:
    return Codec(plan)


def encode(data: bytes) -> None:
    """Keys and values of any finite float32 bits: they fit, are sound, and decode as in plain Python."""
    plan, rows = _rows(data)
    tokens = rows.shape[1]
    codec = _codec(plan)
    pages = codec.encode(*rows)
    assert codec.check(pages) == []
    decoded = codec.decode(pages)
    assert all(np.isfinite(array).all() for array in decoded)
    for page, first in enumerate(range(0, tokens, plan.window)):
        last = min(first + plan.window, tokens)
        expected = decode_page(pages.data[page].tobytes(), plan, last - first)
        for kind, array in zip(("key", "value"), decoded):
            assert array[first:last].tobytes() == expected[kind].tobytes()


def _rows(data: bytes) -> tuple[Plan, NDArray[np.float32]]:
    """Plan, keys and values ``[2, T, H, D]`` of an input of ``encode``: one token at least, 96 at most."""
    plan = page_plans()[kind_of("encode", data)]
    size = 2 * plan.values
    numbers = np.frombuffer(data, "<f4", min(max(len(data) - 1, 0) // 4, MOST_TOKENS * size), min(len(data), 1))
    tokens = max(1, len(numbers) // size)
    x = np.zeros(tokens * size, np.float32)
    x[: len(numbers)] = numbers[: len(x)]
    x[~np.isfinite(x)] = 0
    return plan, x.reshape(2, tokens, plan.kv_heads, plan.head_dim)


def file(data: bytes) -> None:
    """A whole file, packed; the first byte says which checksums are made right: opened, verified and read."""
    files_open_or_say_why(packed_file(data))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "header": header,
    "records": records,
    "index": index,
    "container": container,
    "encode": encode,
    "file": file,
}


# --- Inputs that run together ---------------------------------------------------------------------------------------
#
# Kernels decode 32 containers at a time, whatever they hold: an input that has a tile to itself takes ten times longer.


def kind_of(target: str, data: bytes) -> int:
    """The plan that the first byte of an input chooses; 0 where there is no choice."""
    plans = {"container": container_plans, "encode": page_plans}
    return (data[0] if data else 0) % len(plans[target]()) if target in plans else 0


def longest(target: str) -> int:
    """Bytes of an input: larger ones say nothing that smaller ones do not."""
    return 1 + 24 * max(plan.values for plan in page_plans()) if target == "encode" else MOST_BYTES


def together(target: str, inputs: Sequence[bytes]) -> list[tuple[list[bytes], bytes]]:
    """Inputs of a target in groups, each with the one input that runs them all: up to 32 that share a tile."""
    if target == "encode":
        inputs = sorted(inputs, key=_magnitudes)
    elif target != "container":
        return [([data], data) for data in inputs]
    of_kind: dict[int, list[bytes]] = {}
    for data in inputs:
        of_kind.setdefault(kind_of(target, data), []).append(data)
    body_of = _joined_rows if target == "encode" else _first_containers
    return [
        (group, group[0] if len(group) == 1 else bytes([kind]) + body_of(group))
        for kind, same in of_kind.items()
        for group in (same[at : at + TILE] for at in range(0, len(same), TILE))
    ]


def _first_containers(group: list[bytes]) -> bytes:
    return b"".join(_containers(data)[1][0] for data in group)


def _joined_rows(group: list[bytes]) -> bytes:
    """Up to three tokens of each."""
    return np.concatenate([_rows(data)[1][:, : MOST_TOKENS // TILE] for data in group], axis=1).tobytes()


def _magnitudes(data: bytes) -> list[int]:
    """Pages have one exponent for all keys and one for all values: small numbers beside large ones would be zeros."""
    largest = np.abs(_rows(data)[1]).max(axis=(1, 2, 3))
    return list((np.frexp(largest)[1] // 8).tolist())


def bases() -> dict[str, bytes]:
    """The files that ``gpu/fuzz`` puts its inputs into, by name; layer ``i`` of ``containers`` has plan ``i``."""
    layers = []
    for plan in container_plans():
        shape, stream = (plan.heads, plan.head_dim), plan.stream
        layers.append(Layer(*shape, "float32", Plan(*shape, 32, random_signs(*shape), stream, stream, "one")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "containers.dqkv"
        create(path, layers).close()
        containers = path.read_bytes()
    return {
        "rotated-exact": _base("rotated", "exact"),
        "exact-exact": _base("exact", "exact"),
        "containers": containers,
    }


def _long_record() -> bytes:
    """Records behind the header of the base of ``records``, the last of several blocks, which damage can cut short."""
    whole = file_bytes(("rotated", "exact"), 110, sinks=2, recent=4, _record_target=1 << 20)
    rules = _rules("rotated", "exact")
    end = next(record.end for record in walk(memoryview(whole), rules).records if record.end - record.offset > s.BLOCK)
    return whole[rules.header.block_bytes : end]


def seeds(target: str) -> list[bytes]:
    """Sound inputs to begin with."""
    kinds = [("rotated",), ("grouped", "exact"), ("trellis", "absent", "rotated")]
    bases = [_base(*k) for k in kinds]
    if target == "header":
        return [base[: _records_at(base)].rstrip(b"\0") for base in bases]
    if target in ("records", "index"):
        used = ("rotated", "exact") if target == "records" else ("exact", "exact")
        base, offset = _base(*used), _index_at(*used)
        if target == "index":
            return [base[offset:]]
        return [pack_blocks(base[_records_at(base) : offset]), pack_blocks(_long_record())]
    if target == "container":
        return [bytes([i]) + bytes(plan.bytes) for i, plan in enumerate(container_plans())]
    if target == "encode":
        rng = np.random.default_rng(0)
        # A token each.
        numbers = [rng.standard_normal(2 * plan.values).astype("<f4").tobytes() for plan in page_plans()]
        return [bytes([i]) + data for i, data in enumerate(numbers)]
    coded = ("rotated", "grouped", "trellis")
    small = [file_bytes((f"tiny {kind}",), 4, sinks=1, recent=1) for kind in coded]
    small += [file_bytes((kind,), 9, cuts=(6,), sinks=1, recent=2) for kind in (*coded, "exact")]
    small.append(file_bytes(("exact",), 110, _record_target=1 << 20))
    return [b"\7" + pack_blocks(base) for base in [*small, *bases]]
