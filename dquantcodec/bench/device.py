"""The codec on a GPU: device time of encoding, decoding and attention, and of a plain copy on the same device."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays import BFLOAT16
from ..codec import Codec as CpuCodec
from ..codec import Pages
from ..cuda.codec import Codec
from ..cuda.device import cupy
from ..errors import DeviceError
from ..plan import Plan
from .work import Work

#: Runs that are timed, and calls of each: one behind another, so that the time of a call on the host hides behind the
#: device's.
RUNS, CALLS = 15, 6


def device_times(work: Callable[[], object], runs: int = RUNS, calls: int = CALLS) -> list[float]:
    """Milliseconds of a call on the device, one number a run, sorted."""
    events = cupy().cuda
    for _ in range(calls):
        work()
    taken = []
    for _ in range(runs):
        begin, end = events.Event(), events.Event()
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        taken.append(events.get_elapsed_time(begin, end) / calls)
    return sorted(taken)


def device_tokens(tokens: int, heads: int, dim: int, seed: int = 0) -> Any:
    """Keys and values ``[2, tokens, heads, dim]`` in BF16 on the device.

    Keys have a mean per channel, and channels and tokens differ in magnitude, as in real caches.
    """
    module = cupy()
    random = module.random.default_rng(seed)
    x = random.standard_normal((2, tokens, heads, dim), dtype=module.float32)
    x *= random.uniform(0.5, 2.0, (2, tokens, 1, 1)).astype(module.float32)
    # The same channels for every seed, so that a plan fitted to one serves all.
    channels = np.random.default_rng(0)
    x *= module.asarray(np.exp(0.8 * channels.standard_normal((2, 1, heads, dim))), module.float32)
    x[0] += module.asarray(2 * channels.standard_normal((1, heads, dim)), module.float32)
    return x.astype(BFLOAT16)


class DeviceCodec:
    """A codec on the device and a pool of pages it has encoded: ``parts`` times ``tokens`` tokens.

    The first pages are compared with the CPU's: :class:`DeviceError` ``device-bytes`` if they differ.
    """

    def __init__(self, plan: Plan, tokens: int, parts: int) -> None:
        module = cupy()
        self.codec, self.plan, self._tokens = Codec(plan), plan, tokens
        window = plan.window
        pool = module.empty((parts * tokens // window, self.codec.layout.page_bytes), module.uint8)
        self._status = module.empty((2, tokens), module.uint8)
        for part in range(parts):
            self._x = device_tokens(tokens, plan.kv_heads, plan.head_dim, part)
            self._target = pool[part * tokens // window :][: tokens // window]
            self._encode()
            if part == 0:
                self._compare(self._x[:, : 2 * window], pool[:2])
        if self._status.any():
            raise DeviceError("the GPU reports tokens that are not finite; report this", code="device-bytes")
        self.pages = Pages(pool, parts * tokens)

    def _encode(self) -> None:
        self.codec.encode(self._x[0], self._x[1], pages=self._target, status=self._status)

    def _compare(self, x: Any, pages: Any) -> None:
        want = CpuCodec(self.plan).encode(*(cupy().asnumpy(a) for a in x)).data
        if (cupy().asnumpy(pages[: len(want)]) != want).any():
            raise DeviceError("pages of the GPU are not those of the CPU; report this", code="device-bytes")

    def works(self) -> Iterator[Work]:
        """Encoding, and decoding to BF16 rows that are written to device memory."""
        module, plan = cupy(), self.plan
        amount = plan.kv_heads * plan.head_dim
        yield Work("encode keys and values", self._encode, 2 * self._tokens * amount, note=f"{self._tokens} tokens")
        out = module.empty((self.pages.tokens, plan.kv_heads, plan.head_dim), BFLOAT16)
        for kind in ("key", "value"):
            good = module.empty((self.pages.tokens, getattr(plan, kind).substreams), module.uint8)

            def decode(kind: str = kind, good: Any = good) -> None:
                self.codec.decode_kind(self.pages, kind, out=out, status=good)

            yield Work(f"decode {kind}s", decode, self.pages.tokens * amount, note=f"{self.pages.tokens} tokens")
            if good.any():
                raise DeviceError("the GPU reports damage in its own pages; report this", code="device-bytes")

    def attention(self, sequences: int, query_heads: int) -> Work:
        """Decode attention of one query a sequence over all pages, in random order of memory.

        Raises :class:`UnsupportedError` for plans that the kernel does not take.
        """
        from ..cuda.attend import PageAttention

        module, plan = cupy(), self.plan
        windows = len(self.pages.data) // sequences
        tokens = windows * plan.window
        attention = PageAttention(plan, sequences, query_heads, most_tokens=tokens)
        order = np.random.default_rng(1).permutation(sequences * windows).astype(np.int32)
        table = module.asarray(order.reshape(sequences, windows))
        lengths = module.full(sequences, tokens, module.int32)
        shape = (sequences, 1, query_heads, plan.head_dim)
        query = module.random.default_rng(2).standard_normal(shape, dtype=module.float32).astype(BFLOAT16)
        name = f"attend, {query_heads // plan.kv_heads} queries a KV head"
        note = f"{sequences} sequences of {tokens} tokens"
        amount = 2 * sequences * tokens * plan.kv_heads * plan.head_dim
        return Work(name, lambda: attention(query, self.pages.data, table, lengths), amount, note=note)


def copy_on_device(values: int) -> Work:
    """What moving BF16 values within the device's memory costs."""
    module = cupy()
    source = module.zeros(values, module.uint16)
    target = module.empty_like(source)
    return Work("device copy of BF16 values", lambda: module.copyto(target, source), values, 2 * values)


def device_description() -> dict[str, str | int]:
    """Name, multiprocessors and driver of the current device."""
    runtime = cupy().cuda.runtime
    properties = runtime.getDeviceProperties(cupy().cuda.Device().id)
    driver = runtime.driverGetVersion()
    return {
        "device": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "driver": driver_version(),
        "driver_cuda": f"{driver // 1000}.{driver % 1000 // 10}",
    }


def driver_version() -> str:
    """The driver's own version, if its tool is there to ask."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
