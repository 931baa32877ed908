"""The codec on a GPU for arrays of the host, as files have them: the same calls and errors as the CPU's codec.

Rows and pages pass through pinned memory on a stream of their own, a *lane*.  Threads that call at once take a lane
each, so that copies in both directions and kernels overlap; there are as many lanes as :data:`LANES`, whatever the
number of threads, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import LifoQueue
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..arrays import BFLOAT16, as_tensors, check_dtype, check_finite, to_float32
from ..codec import Pages
from ..page_layout import KINDS, PageLayout
from ..plan import Plan
from .codec import Codec, device_number, raise_statuses
from .device import cupy, device

#: Calls under way at a time: one each for the two directions of copying and for kernels, and one that is prepared.
LANES = 4


class Lane:
    """A stream, and memory beside it on both sides that grows to what is asked for.  For one thread at a time."""

    def __init__(self, number: int) -> None:
        self._on = device(number)
        with self._on.current:
            self.stream = cupy().cuda.Stream(non_blocking=True)
        self._pinned: dict[str, Any] = {}
        self._space: dict[str, Any] = {}

    def up(self, name: str, array: NDArray[Any]) -> Any:
        """A copy of ``array`` on the device, under way on the stream; bfloat16 as uint16."""
        bits = array.view(_bits(array.dtype))
        target = self.space(name, bits.shape, bits.dtype)
        if bits.size:
            staged = self._staged(name, bits.shape, bits.dtype)
            staged[...] = bits
            with self._on.current:
                target.set(staged, self.stream)
        return target

    def space(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """An array on the device, not initialised, that lasts until the next of that name."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if name not in self._space or self._space[name].size < size:
            with self._on.current, self.stream:
                self._space[name] = None
                self._space[name] = cupy().empty(max(size, 1), np.uint8)
        return self._space[name][:size].view(dtype).reshape(shape)

    def down(self, name: str, array: Any) -> NDArray[Any]:
        """``array`` in pinned memory once :meth:`wait` returns; lasts until the next of that name."""
        staged = self._staged(name, array.shape, array.dtype)
        if array.size:
            with self._on.current:
                array.get(self.stream, out=staged, blocking=False)
        return staged

    def wait(self) -> None:
        """Return when the stream is done."""
        self.stream.synchronize()

    def _staged(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        size = int(np.prod(shape)) * dtype.itemsize
        if name not in self._pinned or self._pinned[name].nbytes < size:
            self._pinned[name] = None
            memory = cupy().cuda.alloc_pinned_memory(max(size, 1))
            self._pinned[name] = np.frombuffer(memory, np.uint8, max(size, 1))
        staged: NDArray[Any] = self._pinned[name][:size].view(dtype).reshape(shape)
        return staged


class Lanes:
    """The lanes of one device that the codecs of a file share.  Raises :class:`DeviceError` where there is none."""

    def __init__(self, name: str, count: int = LANES) -> None:
        self.number = device_number(name)
        device(self.number)
        # None stands for a lane that nobody has needed yet.
        self._free: LifoQueue[Lane | None] = LifoQueue()
        for _ in range(count):
            self._free.put(None)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """A lane for the calling thread, which waits for one if all are taken."""
        lane = self._free.get()
        try:
            lane = lane or Lane(self.number)
            yield lane
        finally:
            self._free.put(lane)


class HostCodec:
    """What a file needs of a codec, on a device; several threads may use one."""

    def __init__(self, plan: Plan, lanes: Lanes) -> None:
        self.plan = plan
        self.layout = PageLayout.of(plan)
        self._lanes = lanes
        self._codec = Codec(plan, device=lanes.number)
        self._lock = Lock()
        self._ready: set[tuple[str, ...]] = set()

    def encode(self, keys: NDArray[Any], values: NDArray[Any]) -> Pages:
        """As :meth:`dquantcodec.Codec.encode`."""
        plan = self.plan
        tensors = as_tensors(keys, values, plan.kv_heads, plan.head_dim)
        tokens = len(tensors[0])
        self._prepare("encode", *(_element(tensor.dtype) for tensor in tensors))
        with self._lanes.lane() as lane:
            rows = [lane.up(kind, tensor) for kind, tensor in zip(KINDS, tensors)]
            pages = lane.space("pages", (-(-tokens // plan.window), self.layout.page_bytes), np.uint8)
            status = lane.space("status", (2, tokens), np.uint8)
            self._codec.encode(*rows, pages=pages, status=status, stream=lane.stream)
            data, found = lane.down("pages", pages), lane.down("status", status)
            lane.wait()
            for kind, tensor, wrong in zip(KINDS, tensors, found):
                if wrong.any():
                    token = int(wrong.argmax())
                    check_finite(to_float32(tensor[token : token + 1]), kind, token)
            return Pages(data.copy(), tokens)

    def decode_kind(
        self, pages: Pages, kind: str, start: int = 0, stop: int | None = None, *, dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """As :meth:`dquantcodec.Codec.decode_kind`."""
        wanted = check_dtype(dtype)
        element = wanted if wanted != np.float64 else np.dtype(np.float32)
        start, stop, _ = slice(start, stop).indices(pages.tokens)
        tokens = max(0, stop - start)
        plan = self.plan
        self._prepare("decode", kind, _element(element))
        with self._lanes.lane() as lane:
            data = lane.up("pages", pages.data)
            out = lane.space(kind, (tokens, plan.kv_heads, plan.head_dim), _bits(element))
            status = lane.space("status", (tokens, getattr(plan, kind).substreams), np.uint8)
            self._codec.decode_kind(
                Pages(data, pages.tokens), kind, start, stop, out=out, status=status, stream=lane.stream
            )
            rows, found = lane.down(kind, out), lane.down("status", status)
            lane.wait()
            raise_statuses(kind, start, found)
            return rows.view(element).astype(wanted)

    def _prepare(self, what: str, *elements: str) -> None:
        """Load kernels and tables once, and see them on the device before any lane uses them."""
        with self._lock:
            if (what, *elements) in self._ready:
                return
            with self._codec.device.current:
                if what == "encode":
                    for kind, element in zip(KINDS, elements):
                        self._codec.encoder(kind, element)
                else:
                    self._codec.decoder(*elements)
                cupy().cuda.runtime.deviceSynchronize()
            self._ready.add((what, *elements))


def _element(dtype: np.dtype[Any]) -> str:
    return "bfloat16" if dtype == BFLOAT16 else dtype.name


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """``dtype``, or what CuPy takes for the bits of bfloat16."""
    return np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
