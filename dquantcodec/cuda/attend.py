"""Fused decode attention over pages on a GPU: queries in, outputs and log-sum-exps out, no keys or values in memory.

:class:`PageAttention` is made once for a geometry and owns all memory; calling it launches two kernels and neither
allocates nor waits, so that calls can be captured into CUDA graphs and replayed with other lengths.  The device code is
``gpu/include/dquant/attend*.cuh``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, InputError, UnsupportedError
from ..letters import letter_table
from ..page import PageLayout
from ..plan import Plan, StreamPlan
from ..prefix import LENGTH_BITS, prefix_table
from ..profile import TILE
from ..rans import rans_table
from ..rotate import rotate, transform
from .arrays import View, view
from .device import cupy, device, stream_of
from .launches import ELEMENTS
from .nvrtc import cached_kernel
from .tables import refuse_classes

#: ``AttendParams`` of the device code, byte for byte.
ATTEND = np.dtype(
    [(name, np.uint64) for name in ("pages",)]
    + [("page_stride", np.int64)]
    + [
        (name, np.uint64)
        for name in (
            "block_table", "lengths", "key_table", "value_table", "factors", "matrix", "query",
            "sink_keys", "sink_values", "sink_lengths", "tail_keys", "tail_values", "tail_lengths", "sink_logits",
            "partial", "state", "out", "lse",
        )
    ]
    + [("sink_stride", np.int64), ("tail_stride", np.int64)]
    + [(name, np.int32) for name in ("table_stride", "batch", "blocks", "causal", "sliding_window")]
    + [(name, np.float32) for name in ("scale", "soft_cap", "lse_factor")]
)  # fmt: skip
assert ATTEND.itemsize == 208

#: Threads of the second kernel: more for a few blocks, fewer where blocks alone fill the device.
FINISH_THREADS = (512, 256)
#: Of an rANS table's entry: as many for the place within the letter's slots, and 12 for fields.
FREQUENCY_BITS = 10
#: Shared memory a block may ask for, by architecture.
BLOCK_SHARED_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10}

# Contraction is welcome here: nothing that attention computes is promised to the bit.
OPTIONS = ("--fmad=true",)


@dataclass(frozen=True)
class StreamShape:
    """``Letters`` of the device code: how one kind's letters go through shared memory."""

    field_bits: int
    crowded: bool
    per_head: int
    tiles: int
    stream_bytes: int
    table_bytes: int

    @staticmethod
    def of(stream: StreamPlan, head_dim: int) -> StreamShape:
        bits = (stream.levels - 1).bit_length()
        per_head = -(-head_dim // stream.letter)
        return StreamShape(
            field_bits=bits,
            crowded=bits * stream.letter > 10,
            per_head=per_head,
            tiles=-(-per_head // 16) * stream.letter,
            stream_bytes=stream.words * TILE * stream.word_bytes,
            table_bytes=(4 if stream.coder == "rans" else 2) << stream.precision,
        )


@dataclass(frozen=True)
class AttendShape:
    """``AttendShape`` of the device code; :attr:`shared_bytes` and sizes of the workspace follow from it."""

    heads: int
    rows: int
    passes: int
    groups: int
    warps: int
    pieces: int
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
    def of(plan: Plan, group: int, positions: int, warps: int) -> AttendShape:
        refuse_classes(plan)
        key, value = (StreamShape.of(stream, plan.head_dim) for stream in (plan.key, plan.value))
        substreams = plan.key.substreams
        heads = plan.kv_heads // substreams
        wanted = group * positions
        rows = 4 if wanted <= 4 else 8 if wanted <= 8 else 16
        passes = -(-wanted // rows)
        page_tiles = plan.window // TILE
        mean_groups = warps // page_tiles if warps % page_tiles == 0 else 1 if page_tiles % warps == 0 else warps
        slot = value.tiles * 8 * (rows // 2) * 8
        pieces = slot // 16
        summing = min(-(-pieces // 32), warps)
        at = key.table_bytes + value.table_bytes
        at += warps * slot
        at += heads * key.tiles * min(rows, 8) * 32 * -(-rows // 8)
        at += heads * rows * plan.head_dim * 2
        at += heads * rows * 8
        at += summing * (warps + 1) * rows * 4
        at += warps * (2 * rows + 4) * 4
        at += 2 * heads * rows * 2 * 4
        at = _align(at + 2 * mean_groups * heads * rows * 4, 16)
        streams_at = _align(at + (2 + 4 * warps) * 8, 128)
        stage_at = _align(streams_at + warps * (key.stream_bytes + value.stream_bytes), 128)
        longest = 0
        for of, stream in ((key, plan.key), (value, plan.value)):
            bits = 32 if stream.coder == "rans" else stream.precision
            longest = max(longest, (heads * of.per_head * bits // 32 + 4) * TILE * stream.word_bytes)
        return AttendShape(
            heads=heads,
            rows=rows,
            passes=passes,
            groups=passes * substreams,
            warps=warps,
            pieces=pieces,
            shared_bytes=max(stage_at + warps * 2 * TILE * 32, stage_at + longest),
        )


def _align(at: int, to: int) -> int:
    return -(-at // to) * to


@dataclass(frozen=True)
class AttendLaunch:
    """A specialisation: NVRTC options and the shape they stand for."""

    options: tuple[str, ...]
    shape: AttendShape


def attend_launch(
    plan: Plan,
    group: int,
    positions: int = 1,
    dtype: str = "bfloat16",
    *,
    masked: bool = False,
    soft_cap: bool = False,
    warps: int | None = None,
    residents: int = 1,
    many: bool = False,
    shared: int = BLOCK_SHARED_BYTES["sm_90"],
) -> AttendLaunch:
    """The kernels for ``group`` query heads of a KV head and ``positions`` query tokens.

    ``warps`` of a block default to the most that fit into ``shared`` bytes; fewer suit little work.  ``residents``
    blocks share a multiprocessor; ``many`` says that queries alone make more blocks than it has.  Raises
    :class:`UnsupportedError` for plans that the kernels do not take.
    """
    for kind, stream in (("key", plan.key), ("value", plan.value)):
        bits = (stream.levels - 1).bit_length() * stream.letter
        if stream.coder == "rans" and (bits > 10 or stream.frequencies.max() >= 1 << FREQUENCY_BITS):
            raise UnsupportedError(
                f"attention on the GPU takes rANS letters of at most 10 bits and frequencies below "
                f"{1 << FREQUENCY_BITS}; decode these {kind}s instead",
                code="device-coder",
                kind=kind,
            )
    if plan.value.mean or plan.head_dim % 32 or plan.head_dim > 256:
        raise UnsupportedError(
            f"attention on the GPU takes head sizes that are multiples of 32 up to 256 and values without means; here "
            f"are heads of {plan.head_dim}, means {plan.value.mean}",
            code="device-geometry",
        )
    if warps is None:
        fitting = [w for w in (16, 8, 4, 2, 1) if AttendShape.of(plan, group, positions, w).shared_bytes <= shared]
        # Sums of large heads or many rows need the registers of the other half.
        wide = plan.head_dim * AttendShape.of(plan, group, positions, 1).rows > 512
        fitting = [w for w in fitting if w <= (8 if wide else 16)]
        if not fitting:
            raise UnsupportedError("no block of this plan fits into shared memory", code="device-shared")
        warps = fitting[0]
    shape = AttendShape.of(plan, group, positions, warps)
    values: dict[str, int] = {
        "HEADS": plan.kv_heads,
        "HEAD_DIM": plan.head_dim,
        "WINDOW": plan.window,
        "SUBSTREAMS": plan.key.substreams,
        "GROUP": group,
        "POSITIONS": positions,
        "WARPS": warps,
        "ELEMENT": ELEMENTS[dtype],
        "MASKED": int(masked),
        "SOFT_CAP": int(soft_cap),
        "PAGE_BYTES": PageLayout.of(plan).page_bytes,
        "SHARED_BYTES": shape.shared_bytes,
        "BLOCKS": residents,
        "FINISH_THREADS": FINISH_THREADS[many],
    }
    for kind, stream in (("KEY", plan.key), ("VALUE", plan.value)):
        values |= {
            f"{kind}_LEVELS": stream.levels,
            f"{kind}_LETTER": stream.letter,
            f"{kind}_PRECISION": stream.precision,
            f"{kind}_WORDS": stream.words,
            f"{kind}_RANS": int(stream.coder == "rans"),
            f"{kind}_MEAN": int(stream.mean),
            f"{kind}_MID_TREAD": int(stream.grid == "mid-tread"),
        }
    return AttendLaunch((*OPTIONS, *(f"-DDQ_{name}={value}" for name, value in values.items())), shape)


def device_table(stream: StreamPlan, head_dim: int) -> NDArray[np.uint16] | NDArray[np.uint32]:
    """Table entries ``[2**p]`` as the kernel takes them.

    ``prefix``: uint16, the code's length, fields from bit 4 or 6 on.  ``rans``: uint32, fields up to bit 11, then the
    place within the letter's slots and its frequency, 10 bits each.
    """
    shape = StreamShape.of(stream, head_dim)
    assert letter_table(stream, head_dim).field_bits == shape.field_bits
    if stream.coder == "rans":
        table = rans_table(stream)
        fields = table.fields.astype(np.uint32) << np.uint32(12 - shape.field_bits * stream.letter)
        frequency, place = table.advance >> np.uint32(16), table.advance & np.uint32(0xFFFF)
        entries: NDArray[np.uint32] = frequency << np.uint32(22) | place << np.uint32(12) | fields
        return entries
    window = prefix_table(stream).window
    symbols, lengths = window >> LENGTH_BITS, window & ((1 << LENGTH_BITS) - 1)
    return (symbols << (4 if shape.crowded else 6) | lengths).astype(np.uint16)


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


class PageAttention:
    """Decode attention for one plan, batch size and number of query heads, on the current device.

    ``most_tokens``, the longest sequence's tokens in pages, only chooses the size of blocks.  ``positions`` query
    tokens a sequence are the newest tokens; with ``causal`` each sees what is not newer than itself.  ``masked``
    kernels take a sliding window and positions whose own tokens may lie in pages; ``soft_cap`` ones a cap on logits.
    """

    def __init__(
        self,
        plan: Plan,
        batch: int,
        query_heads: int,
        *,
        positions: int = 1,
        dtype: str = "bfloat16",
        most_tokens: int | None = None,
        masked: bool | None = None,
        soft_cap: bool = False,
        warps: int | None = None,
        residents: int = 1,
    ) -> None:
        module = cupy()
        if batch < 1 or positions < 1 or query_heads < 1 or query_heads % plan.kv_heads:
            raise InputError(
                f"{batch} sequences of {positions} positions and {query_heads} query heads: at least one of each, "
                f"heads a multiple of {plan.kv_heads} KV heads",
                code="input-shape",
            )
        if dtype not in ELEMENTS:
            raise InputError(f"dtype must be one of {tuple(ELEMENTS)}, not {dtype!r}", code="input-dtype")
        self.plan, self.batch, self.query_heads, self.positions, self.dtype = plan, batch, query_heads, positions, dtype
        self.device = device(module.cuda.Device().id)
        attributes = module.cuda.Device().attributes
        processors = self.device.multiprocessors
        group = query_heads // plan.kv_heads
        self.masked = positions > 1 if masked is None else masked
        self.soft_cap = soft_cap
        many = batch * query_heads // 4 > 2 * processors

        def launch(of_block: int | None) -> AttendLaunch:
            return attend_launch(
                plan, group, positions, dtype, masked=self.masked, soft_cap=soft_cap, warps=of_block,
                residents=residents, many=many, shared=int(attributes["MaxSharedMemoryPerBlockOptin"]),
            )  # fmt: skip

        self.launch = launch(warps)
        if warps is None and most_tokens is not None:
            # Blocks as small as it takes to give every multiprocessor work.
            while self.launch.shape.warps > 4 and _items(self.launch.shape, batch, most_tokens) < processors // 3:
                self.launch = launch(self.launch.shape.warps // 2)
        shape = self.launch.shape
        self.blocks = processors * residents
        self._finish_threads = FINISH_THREADS[many]
        # Programmatic dependent launch: part of every kernel's start hides behind the end of the one before.
        self._overlap = self.device.architecture >= "sm_90"
        path = cached_kernel("attend", self.launch.options, self.device.architecture)
        loaded = module.RawModule(path=str(path))
        self._pages = loaded.get_function("attend_pages")
        self._pages.max_dynamic_shared_size_bytes = shape.shared_bytes
        self._finish = loaded.get_function("attend_finish")
        slots = self.blocks + batch * shape.groups
        self._memory = {
            "key_table": module.asarray(device_table(plan.key, plan.head_dim)),
            "value_table": module.asarray(device_table(plan.value, plan.head_dim)),
            "factors": module.asarray(rotation_factors(plan)),
            "matrix": module.asarray(rotation_matrix(plan.head_dim)),
            "partial": module.empty(slots * shape.partial_floats, np.float32),
            "state": module.empty(slots * shape.state_floats, np.float32),
        }
        self.lse = module.empty(self._rows, np.float32)
        bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
        self.out = module.empty((*self._rows, plan.head_dim), bits[dtype])

    @property
    def _rows(self) -> tuple[int, int, int]:
        return self.batch, self.positions, self.query_heads

    def __call__(
        self,
        query: Any,
        pages: Any,
        block_table: Any,
        lengths: Any,
        *,
        sinks: tuple[Any, Any, Any] | None = None,
        tail: tuple[Any, Any, Any] | None = None,
        scale: float | None = None,
        causal: bool = True,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
        sink_logits: Any = None,
        lse_base: str = "e",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Outputs ``[B, positions, Q, D]`` of the queries' dtype and log-sum-exps float32 ``[B, positions, Q]``.

        Arrays are PyTorch's, CuPy's, or anything with DLPack, on the object's device; bfloat16 also as uint16.

        query
            ``[B, positions, Q, D]``, contiguous, of the dtype the object was made for.
        pages
            uint8 ``[pages, page_bytes]``; pages may lie apart, each at a multiple of 16 bytes.
        block_table, lengths
            int32 ``[B, windows]`` and int32 ``[B]``: page of every window, and tokens in pages.  Entries beyond a
            length are not read; 0 tokens are allowed.
        sinks, tail
            Exact leading and newest tokens: keys and values bfloat16 ``[B, room, H, D]`` and int32 ``[B]`` tokens.
        sliding_window
            A query sees so many newest tokens, itself included; 0 all.
        sink_logits
            float32 ``[Q]``, natural: added to the softmax's total alone.
        lse_base
            ``"e"`` or ``"2"``.
        out, lse
            Where to write; by default arrays that the object owns and overwrites in every call (bfloat16 as uint16).
        stream
            A stream or its address; by default the current one of the library that the query comes from.

        Nothing that lies beyond the lengths reaches an output.  Sequences without any token give 0 and ``-inf``.
        Lengths and block tables are not checked: they are on the device.
        """
        plan = self.plan
        if sliding_window and not self.masked:
            raise InputError("a sliding window needs masked=True when the object is made", code="input-mask")
        if bool(soft_cap) != self.soft_cap:
            raise InputError("soft_cap must be given exactly if the object was made with it", code="input-soft-cap")
        if lse_base not in ("e", "2"):
            raise InputError(f"lse_base must be 'e' or '2', not {lse_base!r}", code="input-base")
        size = PageLayout.of(plan).page_bytes
        pool = view(pages, "pages", self.device)
        if pool.dtype != "uint8" or len(pool.shape) != 2 or pool.shape[1] != size or pool.strides[1] != 1:
            raise InputError(f"pages must be uint8 [pages, {size}]", code="input-pages")
        if pool.address % 16 or pool.strides[0] % 16:
            raise InputError("every page must begin at a multiple of 16 bytes", code="input-pages")
        table = self._array(block_table, "block_table", ("int32",), (self.batch, None))
        heads = (self.batch, None, plan.kv_heads, plan.head_dim)
        own = (self.dtype, "uint16") if self.dtype == "bfloat16" else (self.dtype,)
        params = np.zeros((), ATTEND)
        for name, array in self._memory.items():
            params[name] = array.data.ptr
        params["pages"], params["page_stride"] = pool.address, pool.strides[0]
        params["block_table"], params["table_stride"] = table.address, table.shape[1]
        params["lengths"] = self._array(lengths, "lengths", ("int32",), (self.batch,)).address
        params["query"] = self._array(query, "query", own, (*self._rows, plan.head_dim)).address
        for name, exact in (("sink", sinks), ("tail", tail)):
            if exact is not None:
                keys = self._array(exact[0], f"{name} keys", ("bfloat16", "uint16"), heads)
                values = self._array(exact[1], f"{name} values", ("bfloat16", "uint16"), keys.shape)
                tokens = self._array(exact[2], f"{name} lengths", ("int32",), (self.batch,))
                params[f"{name}_keys"], params[f"{name}_values"] = keys.address, values.address
                params[f"{name}_lengths"], params[f"{name}_stride"] = tokens.address, keys.shape[1]
        if sink_logits is not None:
            logits = self._array(sink_logits, "sink_logits", ("float32",), (self.query_heads,))
            params["sink_logits"] = logits.address
        out = self.out if out is None else out
        lse = self.lse if lse is None else lse
        params["out"] = self._array(out, "out", own, (*self._rows, plan.head_dim)).address
        params["lse"] = self._array(lse, "lse", ("float32",), self._rows).address
        params["batch"], params["blocks"], params["causal"] = self.batch, self.blocks, int(causal)
        params["sliding_window"] = sliding_window
        params["scale"] = 1 / math.sqrt(plan.head_dim) if scale is None else scale
        params["soft_cap"] = soft_cap
        params["lse_factor"] = 1.0 if lse_base == "2" else math.log(2)
        shape = self.launch.shape
        quads = shape.passes * shape.rows // 4
        with stream_of(stream, [query]):
            on = cupy().cuda.get_current_stream().ptr
            self._start(self._pages, self.blocks, shape.unit, shape.shared_bytes, on, params)
            self._start(self._finish, plan.kv_heads * quads * self.batch, self._finish_threads, 0, on, params)
        return out, lse

    def _array(self, array: Any, what: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...]) -> View:
        """``array`` as it lies on the device, contiguous, of one of ``dtypes`` and ``shape`` (None: any size)."""
        found = view(array, what, self.device)
        fits = len(found.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, found.shape))
        if not fits or found.dtype not in dtypes:
            raise InputError(
                f"{what} is {found.dtype} {list(found.shape)}; expected {dtypes[0]} with shape "
                f"{['any' if n is None else n for n in shape]}",
                code="input-shape",
                what=what,
            )
        expected = 1
        for size, stride in zip(found.shape[::-1], found.strides[::-1]):
            if size > 1 and stride != expected:
                raise InputError(f"{what} must be contiguous", code="input-layout", what=what)
            expected *= size
        return found

    def _start(self, function: Any, blocks: int, threads: int, shared: int, stream: int, params: NDArray[Any]) -> None:
        attributes = (_Attribute * 1)(_Attribute(id=_OVERLAP, value=1))
        config = _Configuration(blocks, 1, 1, threads, 1, 1, shared, stream, attributes, int(self._overlap))
        arguments = (ctypes.c_void_p * 1)(params.ctypes.data)
        result = _driver().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(function.kernel.ptr), arguments, None)
        if result:
            raise DeviceError(f"launching attention failed with CUDA error {result}", code="device-launch")


#: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a kernel may begin while the one before it ends.
_OVERLAP = 6


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: 64 bytes of value, the first of which is an int here."""

    _fields_ = (
        ("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60),
    )  # fmt: skip


class _Configuration(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _items(shape: AttendShape, batch: int, tokens: int) -> int:
    return batch * shape.groups * -(-tokens // shape.unit)
