"""How the attention kernels are specialised for a plan: shapes, -D options, shared memory, tables and parameters.

The same numbers stand in the device headers as constants (``AttendShape`` and its like), which assert that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..letters import letter_table
from ..page_layout import KINDS, PageLayout
from ..plan import Plan, StreamPlan
from ..prefix import LENGTH_BITS, prefix_table
from ..profile import TILE
from ..rans import rans_table
from ..rotate import rotate, transform
from .group_attend import group_kind, group_kinds, group_memory, group_params, group_records, is_grouped
from .launches import ELEMENTS

#: ``AttendParams`` of the device code, byte for byte.
ATTEND = np.dtype(
    [(name, np.uint64) for name in ("pages",)]
    + [("page_stride", np.int64)]
    + [
        (name, np.uint64)
        for name in (
            "block_table", "lengths", "key_table", "value_table", "factors", "matrix", "query",
            "sink_keys", "sink_values", "sink_lengths", "tail_keys", "tail_values", "tail_lengths", "sink_logits",
            "partial", "state", "out", "lse", "before_out", "before_lse",
        )
    ]
    + [("sink_stride", np.int64), ("tail_stride", np.int64)]
    + [(name, np.int32) for name in ("table_stride", "batch", "blocks", "causal", "sliding_window")]
    + [(name, np.float32) for name in ("scale", "soft_cap", "lse_factor")]
)  # fmt: skip
assert ATTEND.itemsize == 224

#: Threads of the second kernel: more for a few blocks, fewer where blocks alone fill the device.
FINISH_THREADS = (512, 256)
#: Of an rANS table's entry: as many for the place within the letter's slots, and 12 for fields.
FREQUENCY_BITS = 10
#: Shared memory a block may ask for, by architecture.
BLOCK_SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}

#: Rows of words that a ring holds: what lanes of a warp are usually apart, a chunk's letters, and what is on its way.
RING_ROWS = {"rans": 64, "prefix": 32, "trellis": 16}
#: Where dynamic shared memory begins from Hopper on, counted in when rings are placed.
RING_START = 1024
#: Added to :data:`OPTIONS`, builds kernels that a race checker can follow.
CHECKED = "-DDQ_CHECKED=1"
#: Warps of a block to try.
_WARPS = (16, 15, 14, 13, 12, 10, 8, 6, 4, 2, 1)

# Contraction is welcome here: nothing that attention computes is promised to the bit.
OPTIONS = ("--fmad=true",)


@dataclass(frozen=True)
class StreamShape:
    """``Letters`` or ``GroupLetters`` of the device code: how one kind's letters go through shared memory.

    ``letters`` of a head take ``bits`` each at most; ``kept`` kinds keep rotated queries for page means.  ``ring`` rows
    of words are enough where a block has no room for whole streams.
    """

    letters: int
    bits: int
    tiles: int
    word_bytes: int
    stream_bytes: int
    table_bytes: int
    ring: int
    chunk_letters: int = 16
    kept: bool = False

    @staticmethod
    def of(plan: Plan, kind: str) -> StreamShape:
        stream: StreamPlan = getattr(plan, kind)
        stream_bytes = stream.words * TILE * stream.word_bytes
        if is_grouped(plan):
            group = group_kind(plan, kind)
            return StreamShape(
                letters=sum(group.letters),
                bits=group.precision,
                tiles=-(-group.halves // 2),
                word_bytes=4,
                stream_bytes=stream_bytes,
                table_bytes=group.table.nbytes,
                ring=RING_ROWS["trellis" if group.states > 1 else "prefix"],
                chunk_letters=8,
                kept=group.rotated and group.mean,
            )
        letters = -(-plan.head_dim // stream.letter)
        return StreamShape(
            letters=letters,
            bits=32 if stream.coder == "rans" else stream.precision,
            tiles=-(-letters // 16) * stream.letter,
            word_bytes=stream.word_bytes,
            stream_bytes=stream_bytes,
            table_bytes=(4 if stream.coder == "rans" else 2) << stream.precision,
            ring=RING_ROWS[stream.coder],
            kept=stream.mean and stream.coder != "rans",
        )

    def longest(self, heads: int) -> int:
        """Bytes that a tile's streams of arbitrary words reach at most."""
        return (heads * self.letters * self.bits // 32 + 4) * TILE * self.word_bytes


@dataclass(frozen=True)
class AttendShape:
    """``AttendShape`` of the device code; :attr:`shared_bytes` and sizes of the workspace follow from it."""

    heads: int
    rows: int
    passes: int
    groups: int
    warps: int
    pieces: int
    rings: tuple[int, int]
    shared_bytes: int

    @property
    def unit(self) -> int:
        """Tokens that a block takes together."""
        return self.warps * TILE

    @property
    def partial_floats(self) -> int:
        return self.heads * self.pieces * 8

    @property
    def state_floats(self) -> int:
        return self.heads * self.rows * 2

    @staticmethod
    def of(plan: Plan, group: int, positions: int, warps: int, *, ringed: bool = False) -> AttendShape:
        key, value = (StreamShape.of(plan, kind) for kind in KINDS)
        heads = plan.kv_heads // plan.key.substreams
        wanted = group * positions
        rows = 4 if wanted <= 4 else 8 if wanted <= 8 else 16
        passes = -(-wanted // rows)
        page_tiles = plan.window // TILE
        if warps % page_tiles == 0:
            mean_groups = warps // page_tiles
        else:
            mean_groups = 1 if page_tiles % warps == 0 else (warps + page_tiles - 2) // page_tiles + 1
        slot = value.tiles * 8 * (rows // 2) * 8
        pieces = slot // 16
        summing = min(-(-pieces // 32), warps)
        row_bytes = heads * rows * plan.head_dim * 2
        at = key.table_bytes + value.table_bytes
        at += warps * slot
        at += heads * key.tiles * min(rows, 8) * 32 * -(-rows // 8)
        at += row_bytes if key.kept else 0
        at += heads * rows * 8
        at += summing * (warps + 1) * rows * 4
        at += warps * (2 * rows + 4) * 4
        at += 2 * heads * rows * 2 * 4
        at = _align(at + 2 * mean_groups * heads * rows * 4, 16)
        sizes = [s.ring * TILE * s.word_bytes if ringed else s.stream_bytes for s in (key, value)]
        at = _align(at + (2 + 4 * warps) * 8, 16) + (warps * 64 if ringed else 0)
        streams_at = _align(RING_START + at, max(sizes) if ringed else 128) - RING_START
        stage_at = _align(streams_at + warps * sum(sizes), 128)
        stage_at += 1024 if CHECKED in OPTIONS else 0
        stage = warps * 4 * TILE * key.chunk_letters
        longest = 0 if ringed else max(key.longest(heads), value.longest(heads))
        return AttendShape(
            heads=heads,
            rows=rows,
            passes=passes,
            groups=passes * plan.key.substreams,
            warps=warps,
            pieces=pieces,
            rings=(key.ring, value.ring) if ringed else (0, 0),
            shared_bytes=stage_at + max(stage, longest, 0 if key.kept else row_bytes),
        )


def _align(at: int, to: int) -> int:
    return -(-at // to) * to


@dataclass(frozen=True, eq=False)
class AttendLaunch:
    """A specialisation: kernels (``gpu/kernels/NAME.cu``), NVRTC options, the shape they stand for, and the type of
    their parameters."""

    name: str
    options: tuple[str, ...]
    shape: AttendShape
    params: np.dtype[Any]


def attend_launch(
    plan: Plan,
    group: int,
    positions: int = 1,
    dtype: str = "bfloat16",
    *,
    masked: bool = False,
    soft_cap: bool = False,
    warps: int | None = None,
    ringed: bool | None = None,
    residents: int = 1,
    many: bool = False,
    out_dtype: str | None = None,
    shared: int = BLOCK_SHARED_BYTES["sm_90"],
) -> AttendLaunch:
    """The kernels for ``group`` query heads of a KV head and ``positions`` query tokens.

    ``warps`` of a block default to the most that fit into ``shared`` bytes; fewer suit little work.  ``ringed`` blocks
    have parts of their streams in shared memory, by default those that have no room for whole ones.  ``residents``
    blocks share a multiprocessor; ``many`` says that queries alone make more blocks than it has.  ``dtype`` is that of
    queries, and of outputs unless ``out_dtype`` is another.  Raises :class:`UnsupportedError` for plans that the
    kernels do not take.
    """
    grouped = is_grouped(plan)
    if not grouped:
        _check_letters(plan)
    if plan.value.mean or plan.head_dim % 32 or plan.head_dim > 256:
        raise UnsupportedError(
            f"attention on the GPU takes head sizes that are multiples of 32 up to 256 and values without means; here "
            f"are heads of {plan.head_dim}, means {plan.value.mean}",
            code="device-geometry",
        )
    # Sums of large heads or many rows need the registers of the other half.
    wide = plan.head_dim * AttendShape.of(plan, group, positions, 1).rows > 512
    shapes = [
        AttendShape.of(plan, group, positions, w, ringed=r)
        for w in ([w for w in _WARPS if w <= (8 if wide else 16)] if warps is None else [warps])
        for r in ((False, True) if ringed is None else (ringed,))
    ]
    fitting = [shape for shape in shapes if shape.shared_bytes <= shared]
    if not fitting:
        raise UnsupportedError("no block of this plan fits into shared memory", code="device-shared")
    shape = fitting[0]
    values: dict[str, int | str] = {
        "HEADS": plan.kv_heads,
        "HEAD_DIM": plan.head_dim,
        "WINDOW": plan.window,
        "SUBSTREAMS": plan.key.substreams,
        "GROUP": group,
        "POSITIONS": positions,
        "WARPS": shape.warps,
        "ELEMENT": ELEMENTS[dtype],
        "OUT_ELEMENT": ELEMENTS[out_dtype or dtype],
        "MASKED": int(masked),
        "SOFT_CAP": int(soft_cap),
        "PAGE_BYTES": PageLayout.of(plan).page_bytes,
        "SHARED_BYTES": shape.shared_bytes,
        "KEY_RING": shape.rings[0],
        "VALUE_RING": shape.rings[1],
        "BLOCKS": residents,
        "FINISH_THREADS": FINISH_THREADS[many],
    }
    params = group_params(plan, ATTEND) if grouped else ATTEND
    if grouped:
        values["PARAM_BYTES"] = params.itemsize
        for kind, of in group_kinds(plan).items():
            values |= of.values(kind.upper())
    else:
        for kind in KINDS:
            values |= _letter_values(kind.upper(), getattr(plan, kind))
    options = (*OPTIONS, *(f"-DDQ_{name}={value}" for name, value in values.items()))
    return AttendLaunch("attend_groups" if grouped else "attend", options, shape, params)


def _check_letters(plan: Plan) -> None:
    for kind in KINDS:
        stream: StreamPlan = getattr(plan, kind)
        bits = (stream.levels - 1).bit_length() * stream.letter
        if stream.coder == "rans" and (bits > 10 or stream.frequencies.max() >= 1 << FREQUENCY_BITS):
            raise UnsupportedError(
                f"attention on the GPU takes rANS letters of at most 10 bits and frequencies below "
                f"{1 << FREQUENCY_BITS}; decode these {kind}s instead",
                code="device-coder",
                kind=kind,
            )


def _letter_values(kind: str, stream: StreamPlan) -> dict[str, int]:
    return {
        f"{kind}_LEVELS": stream.levels,
        f"{kind}_LETTER": stream.letter,
        f"{kind}_PRECISION": stream.precision,
        f"{kind}_WORDS": stream.words,
        f"{kind}_RANS": int(stream.coder == "rans"),
        f"{kind}_MEAN": int(stream.mean),
        f"{kind}_MID_TREAD": int(stream.grid == "mid-tread"),
    }


def crowded(stream: StreamPlan) -> bool:
    """Whether an entry's fields begin at bit 4, right behind the code's length."""
    return (stream.levels - 1).bit_length() * stream.letter > 10


def attend_memory(plan: Plan) -> dict[str, NDArray[Any]]:
    """What the parameters of the plan's kernels point to, beside arguments and workspace."""
    tables = {
        kind: group_kind(plan, kind).table if is_grouped(plan) else device_table(getattr(plan, kind), plan.head_dim)
        for kind in KINDS
    }
    return {
        "key_table": tables["key"],
        "value_table": tables["value"],
        "factors": rotation_factors(plan),
        "matrix": rotation_matrix(plan.head_dim),
        **(group_memory(plan) if is_grouped(plan) else {}),
    }


def attend_params(plan: Plan, launch: AttendLaunch) -> NDArray[Any]:
    """Parameters with what depends on the plan alone."""
    params = np.zeros((), launch.params)
    if is_grouped(plan):
        for name, array in group_records(plan).items():
            params[name] = array
    return params


def device_table(stream: StreamPlan, head_dim: int) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Table entries ``[2**p]`` as the kernel takes them.

    ``prefix``: uint16, the code's length, fields from bit 4 or 6 on.  ``rans``: uint32, fields up to bit 11, then the
    place within the letter's slots and its frequency, 10 bits each.
    """
    field_bits = letter_table(stream, head_dim).field_bits
    if stream.coder == "rans":
        table = rans_table(stream)
        fields = table.fields.astype(np.uint32) << np.uint32(12 - field_bits * stream.letter)
        frequency, place = table.advance >> np.uint32(16), table.advance & np.uint32(0xFFFF)
        entries: NDArray[np.uint32] = frequency << np.uint32(22) | place << np.uint32(12) | fields
        return entries
    window = prefix_table(stream).window
    symbols, lengths = window >> LENGTH_BITS, window & ((1 << LENGTH_BITS) - 1)
    return (symbols << (4 if crowded(stream) else 6) | lengths).astype(np.uint16)


def rotation_factors(plan: Plan) -> NDArray[np.float32]:
    """float32 ``[H, D]``: sign over the square root of the block's order."""
    factors: NDArray[np.float32] = transform(plan.head_dim).scales * plan.signs.astype(np.float32)
    return factors


def rotation_matrix(head_dim: int) -> NDArray[np.int8]:
    """int8 ``[D, D]``: how input ``k`` (row) counts in output ``d``, without the factors."""
    ones = np.ones((1, head_dim), np.int8)
    turned = rotate(np.eye(head_dim, dtype=np.float32)[:, None, :], ones)[:, 0]
    matrix: NDArray[np.int8] = np.rint(turned / transform(head_dim).scales).astype(np.int8)
    return matrix
