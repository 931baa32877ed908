"""Fused decode attention over pages on a GPU: queries in, outputs and log-sum-exps out, no keys or values in memory.

:class:`PageAttention` is made once for a geometry and owns all memory; calling it launches two kernels and neither
allocates nor waits, so that calls can be captured into CUDA graphs and replayed with other lengths.  The device code is
``gpu/include/dquant/attend*.cuh``.
"""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, InputError
from ..page_layout import PageLayout
from ..plan import Plan
from .arrays import View, view
from .attend_launch import FINISH_THREADS, AttendLaunch, AttendShape, attend_launch, attend_memory, attend_params
from .device import cupy, device, stream_of
from .launches import ELEMENTS
from .nvrtc import cached_kernel


class PageAttention:
    """Decode attention for one plan, batch size and number of query heads, on the current device.

    ``most_tokens``, the longest sequence's tokens in pages, only chooses the size of blocks.  ``positions`` query
    tokens a sequence are the newest tokens; with ``causal`` each sees what is not newer than itself.  ``masked``
    kernels take a sliding window and positions whose own tokens may lie in pages; ``soft_cap`` ones a cap on logits.
    ``dtype`` is that of queries, and of outputs unless ``out_dtype`` is another.
    """

    def __init__(
        self,
        plan: Plan,
        batch: int,
        query_heads: int,
        *,
        positions: int = 1,
        dtype: str = "bfloat16",
        out_dtype: str | None = None,
        most_tokens: int | None = None,
        masked: bool | None = None,
        soft_cap: bool = False,
        warps: int | None = None,
        ringed: bool | None = None,
        residents: int = 1,
    ) -> None:
        module = cupy()
        if batch < 1 or positions < 1 or query_heads < 1 or query_heads % plan.kv_heads:
            raise InputError(
                f"{batch} sequences of {positions} positions and {query_heads} query heads: at least one of each, "
                f"heads a multiple of {plan.kv_heads} KV heads",
                code="input-shape",
            )
        for wanted in (dtype, out_dtype or dtype):
            if wanted not in ELEMENTS:
                raise InputError(f"dtype must be one of {tuple(ELEMENTS)}, not {wanted!r}", code="input-dtype")
        self.plan, self.batch, self.query_heads, self.positions = plan, batch, query_heads, positions
        self.dtype, self.out_dtype = dtype, out_dtype or dtype
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
                ringed=ringed, residents=residents, many=many, out_dtype=out_dtype,
                shared=int(attributes["MaxSharedMemoryPerBlockOptin"]),
            )  # fmt: skip

        self.launch = launch(warps)
        if warps is None and most_tokens is not None:
            half = launch(self.launch.shape.warps // 2) if self.launch.shape.warps >= 8 else self.launch
            rounds, rounds_of_half = (_rounds(of.shape, batch, most_tokens, processors) for of in (self.launch, half))
            if HALF_UNIT * rounds_of_half < rounds:
                self.launch = half
        shape = self.launch.shape
        self.blocks = processors * residents
        self._finish_threads = FINISH_THREADS[many]
        # Programmatic dependent launch: part of every kernel's start hides behind the end of the one before.
        self._overlap = self.device.architecture >= "sm_90"
        path = cached_kernel(self.launch.name, self.launch.options, self.device.architecture)
        loaded = module.RawModule(path=str(path))
        self._pages = loaded.get_function("attend_pages")
        self._pages.max_dynamic_shared_size_bytes = shape.shared_bytes
        self._finish = loaded.get_function("attend_finish")
        slots = self.blocks + batch * shape.groups
        self._memory = {name: module.asarray(array) for name, array in attend_memory(plan).items()}
        self._memory["partial"] = module.empty(slots * shape.partial_floats, np.float32)
        self._memory["state"] = module.empty(slots * shape.state_floats, np.float32)
        self._params = attend_params(plan, self.launch)
        for name, array in self._memory.items():
            self._params[name] = array.data.ptr
        self.lse = module.empty(self._rows, np.float32)
        bits = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
        self.out = module.empty((*self._rows, plan.head_dim), bits[self.out_dtype])

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
        before: tuple[Any, Any] | None = None,
        lse_base: str = "e",
        out: Any = None,
        lse: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Outputs ``[B, positions, Q, D]`` of ``out_dtype`` and log-sum-exps float32 ``[B, positions, Q]``.

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
        before
            A result of the same queries over other tokens, which becomes part of this one: outputs float32
            ``[B, positions, Q, D]`` and log-sum-exps float32 ``[B, positions, Q]`` to the base of ``lse_base``.
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
        query_dtypes, out_dtypes = (
            (dtype, "uint16") if dtype == "bfloat16" else (dtype,) for dtype in (self.dtype, self.out_dtype)
        )
        params = self._params.copy()
        params["pages"], params["page_stride"] = pool.address, pool.strides[0]
        params["block_table"], params["table_stride"] = table.address, table.shape[1]
        params["lengths"] = self._array(lengths, "lengths", ("int32",), (self.batch,)).address
        params["query"] = self._array(query, "query", query_dtypes, (*self._rows, plan.head_dim)).address
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
        if before is not None:
            rows = (*self._rows, plan.head_dim)
            params["before_out"] = self._array(before[0], "outputs before", ("float32",), rows).address
            params["before_lse"] = self._array(before[1], "lse before", ("float32",), self._rows).address
        out = self.out if out is None else out
        lse = self.lse if lse is None else lse
        params["out"] = self._array(out, "out", out_dtypes, (*self._rows, plan.head_dim)).address
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


#: The time of a block of half as many warps for a unit, which is half as long: fewer warps hide less latency.
HALF_UNIT = 0.8


def _rounds(shape: AttendShape, batch: int, tokens: int, processors: int) -> int:
    """Units that a multiprocessor works on one after another, at most."""
    return -(-batch * shape.groups * -(-tokens // shape.unit) // processors)
