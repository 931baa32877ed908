"""How kernels are specialised for a plan: -D options, shared memory, blocks.

The same numbers stand in the device headers as constants (``DecodeShape`` and its like); tests compare them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import DeviceError
from ..plan import Plan, StreamPlan
from ..profile import TILE
from .group_tables import GroupEncodeArrays
from .trellis_tables import TrellisEncodeArrays

_Sizes = tuple[tuple[int, int], ...]

#: Element types of rows, by the number the kernels know them by.
ELEMENTS = {"float32": 0, "float16": 1, "bfloat16": 2}

#: Shared memory of a multiprocessor, of which every block takes a KB more than it asks for.
SHARED_BYTES = {"sm_80": 164 << 10, "sm_89": 100 << 10, "sm_90": 228 << 10}


@dataclass(frozen=True)
class Launch:
    """One specialised kernel: source, options, warps and shared memory of a block, blocks of a multiprocessor."""

    name: str
    options: tuple[str, ...]
    warps: int
    shared_bytes: int
    residents: int

    @property
    def threads(self) -> int:
        return 32 * self.warps


def definitions(plan: Plan, kind: str) -> tuple[str, ...]:
    """The plan as -D options (``gpu/kernels/plan.cuh``)."""
    stream: StreamPlan = getattr(plan, kind)
    values: dict[str, object] = {
        "HEADS": plan.kv_heads,
        "HEAD_DIM": plan.head_dim,
        "LEVELS": stream.levels,
        "LETTER": stream.letter,
        "PRECISION": stream.precision,
        "WORDS": stream.words,
        "SUBSTREAMS": stream.substreams,
        "RANS": int(stream.coder == "rans"),
        "MEAN": int(stream.mean),
        "MID_TREAD": int(stream.grid == "mid-tread"),
        "UNBIASED": int(stream.gain == "unbiased"),
        "STEP": float(stream.step).hex(),
    }
    return tuple(f"-DDQ_{name}={value}" for name, value in values.items())


def decode_launch(plan: Plan, kind: str, dtype: str, shared: int = SHARED_BYTES["sm_90"]) -> Launch:
    """The kernel that decodes ``kind`` to rows of ``dtype``, one of :data:`ELEMENTS`.

    ``shared`` bytes of shared memory are what a multiprocessor has.
    """
    stream: StreamPlan = getattr(plan, kind)
    table = (8 if stream.coder == "rans" else 4) << stream.precision
    words = stream.words * TILE * stream.word_bytes
    by_lanes = plan.head_dim >= 64 and plan.head_dim & (plan.head_dim - 1) == 0
    wide = not by_lanes and plan.head_dim > 256
    tables = table if table <= 48 * 1024 and not wide else 0
    warp = words if words <= 24 * 1024 and not wide else 0
    if by_lanes:
        warp += TILE * (plan.head_dim + 8)
    else:
        warp += 2 * (-(-4 * plan.head_dim // 16) * 16) + TILE * (128 + 16)
        warp += 4 * TILE * plan.head_dim if plan.head_dim > 128 else 0
    sizes = _BY_LANES if plan.head_dim <= 256 and by_lanes else _BY_COLUMNS if plan.head_dim <= 256 else _WIDE
    warps, residents = fit_warps(tables, warp, shared, sizes)
    options = (
        *definitions(plan, kind),
        f"-DDQ_ELEMENT={ELEMENTS[dtype]}",
        f"-DDQ_WARPS={warps}",
        f"-DDQ_BLOCKS={residents}",
    )
    return Launch("decode", options, warps, tables + warps * warp, residents)


#: Warps of a block of the kernels that see to a page's head.
HEAD_WARPS = 8


#: Warps of a block and blocks of a multiprocessor to try, the most warps first.  Warps that code a token each have
#: nothing to do with one another but the costs, and small blocks make room for others sooner.
_TOKENS: _Sizes = ((4, 8), (4, 7), (4, 6), (4, 5), (4, 4), (4, 3), (4, 2), (2, 3), (2, 2))
_TILES: _Sizes = ((8, 3), (8, 2), (8, 1), (4, 1))


@dataclass(frozen=True)
class EncodeLaunches:
    """The three kernels of encoding, in order: exponents, means (None for kinds without), tiles.

    ``scratch_bytes`` of global memory for every block of the last one, if a tile does not fit in shared memory.
    """

    head: Launch
    means: Launch | None
    tiles: Launch
    scratch_bytes: int


def encode_bytes(plan: Plan, kind: str, warps: int) -> int:
    """What a block of so many warps keeps: letter costs, a stream for each, and of rANS a tile's letters."""
    stream: StreamPlan = getattr(plan, kind)
    extra = max(((stream.levels - 1) << 5) + 2, 64)
    count: int = stream.levels**stream.letter
    tile = -(-2 * count // 16) * 16
    if stream.coder == "rans":
        letters = plan.kv_heads * -(-plan.head_dim // stream.letter)
        tile += -(-2 * letters * (TILE + 1) // 16) * 16 + 4 * TILE * stream.substreams + 16
    else:
        extra = max(extra, stream.words)
    return tile + warps * (-(-4 * (plan.values + extra) // 16) * 16)


def means_bytes(plan: Plan) -> int:
    """What a block keeps of a head while it finds the means."""
    return 4 * (HEAD_WARPS * (plan.head_dim + 64) + plan.head_dim + 1)


def encode_launches(plan: Plan, kind: str, dtype: str, shared: int = SHARED_BYTES["sm_90"]) -> EncodeLaunches:
    """The kernels that encode ``kind`` from rows of ``dtype``."""
    stream: StreamPlan = getattr(plan, kind)
    fitting = (
        (warps, residents)
        for warps, residents in (_TILES if stream.coder == "rans" else _TOKENS)
        if residents * (encode_bytes(plan, kind, warps) + 1024) <= shared
    )
    warps, residents = next(fitting, (8, 0))
    scratch = 0 if residents else -(-encode_bytes(plan, kind, warps) // 128) * 128
    size, residents = (0, 3) if scratch else (encode_bytes(plan, kind, warps), residents)
    options = (
        *definitions(plan, kind),
        f"-DDQ_ELEMENT={ELEMENTS[dtype]}",
        f"-DDQ_WARPS={warps}",
        f"-DDQ_BLOCKS={residents}",
        f"-DDQ_SCRATCH={int(scratch > 0)}",
    )
    return EncodeLaunches(
        head=Launch("encode", options, HEAD_WARPS, 16, 1),
        means=Launch("encode", options, HEAD_WARPS, means_bytes(plan), 1) if stream.mean else None,
        tiles=Launch("encode", options, warps, size, residents),
        scratch_bytes=scratch,
    )


#: Rungs that tokens of typical layers end at; a block copies them to shared memory.
WINDOW_RUNGS = 32

#: Warps of a block of grouped streams, on a multiprocessor of its own, to try: more hide more waiting, until registers
#: run short.
_GROUPED = (28, 24, 20, 16, 12, 8, 6, 4, 3, 2)


@dataclass(frozen=True)
class GroupLaunches:
    """The kernels that encode a grouped stream, in order; ``window`` rungs are copied to shared memory, from
    ``first`` on."""

    head: Launch
    means: Launch | None
    tokens: Launch
    first: int
    window: int
    scratch_bytes: int


def group_launches(
    plan: Plan,
    kind: str,
    dtype: str,
    arrays: GroupEncodeArrays | TrellisEncodeArrays,
    shared: int = SHARED_BYTES["sm_90"],
) -> GroupLaunches:
    """The kernels that encode the grouped ``kind`` from rows of ``dtype``.

    They depend on the geometry alone, so layers share them; what a block needs of shared memory depends on the plan.
    """
    stream: StreamPlan = getattr(plan, kind)
    assert stream.grouping is not None
    warp = arrays.warp_bytes(stream)
    fixed, rung = arrays.block_bytes(), 4 * arrays.entries
    room = shared - 1024
    # Half of the window is better than half of the warps.
    fitting = (
        (warps, min((room - fixed - warps * warp) // rung, WINDOW_RUNGS, arrays.rungs))
        for warps in _GROUPED
        if fixed + warps * warp + rung * min(WINDOW_RUNGS // 2, arrays.rungs) <= room
    )
    warps, window = next(fitting, (8, 0))
    scratch = 0 if window else -(-warps * warp // 128) * 128
    size = 0 if scratch else fixed + window * rung + warps * warp
    options = (
        f"-DDQ_HEADS={plan.kv_heads}",
        f"-DDQ_HEAD_DIM={plan.head_dim}",
        f"-DDQ_SUBSTREAMS={stream.substreams}",
        f"-DDQ_STATES={stream.grouping.states}",
        f"-DDQ_MEAN={int(stream.mean)}",
        f"-DDQ_UNBIASED={int(stream.gain == 'unbiased')}",
        f"-DDQ_ELEMENT={ELEMENTS[dtype]}",
        f"-DDQ_WARPS={warps}",
        "-DDQ_BLOCKS=1",
        f"-DDQ_SCRATCH={int(scratch > 0)}",
    )
    return GroupLaunches(
        head=Launch("encode_groups", options, HEAD_WARPS, 16, 1),
        means=Launch("encode_groups", options, HEAD_WARPS, 0, 1) if stream.mean else None,
        tokens=Launch("encode_groups", options, warps, size, 3 if scratch else 1),
        first=max(0, min(arrays.start - 2 * window // 3, arrays.rungs - window)),
        window=window,
        scratch_bytes=scratch,
    )


def append_launch() -> Launch:
    """The kernel that puts new tokens into tails, the same for all plans."""
    return Launch("append", (), 8, 0, 1)


#: Warps of a block and blocks of a multiprocessor to try, the most warps first: the rotation by lanes needs about 80
#: registers a thread, by columns 168.
_BY_LANES: _Sizes = ((24, 1), (20, 1), (16, 1), (12, 1), (8, 1), (4, 1), (2, 1))
_BY_COLUMNS: _Sizes = ((12, 1), (8, 1), (4, 1), (2, 1))
_WIDE: _Sizes = ((8, 1), (4, 1), (2, 1))


def fit_warps(tables: int, warp: int, shared: int, sizes: _Sizes) -> tuple[int, int]:
    """Warps of a block and blocks of a multiprocessor: the first of ``sizes`` that fits."""
    for warps, residents in sizes:
        if residents * (tables + warps * warp + 1024) <= shared:
            return warps, residents
    if tables + warp + 1024 <= shared:
        return 1, 1
    raise DeviceError(
        f"heads of this size need {warp} bytes of shared memory, more than this device has", code="device-memory"
    )
