"""Attention over pages for tests: a geometry, a batch of sequences with its float64 reference, and the kernels run on
the host or behind a stand-in for CuPy."""

from __future__ import annotations

import ctypes
import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_support import library
from numpy.typing import NDArray

from dquantcodec import Codec, Profile, StreamProfile, fit_plan
from dquantcodec.cuda import arrays, attend_launch
from dquantcodec.cuda import attend as device_attend
from dquantcodec.cuda.device import Device
from dquantcodec.fit import with_heads_in_one_order
from dquantcodec.plan import Plan, make_plan

Array = NDArray[Any]


@dataclass(frozen=True)
class Geometry:
    """What one kernel is compiled for, and the options of a call that go with it."""

    profile: str | Profile = "2.26"
    kv_heads: int = 8
    head_dim: int = 128
    group: int = 4
    positions: int = 1
    dtype: str = "float16"
    warps: int | None = None
    ringed: bool | None = None
    sliding_window: int = 0
    soft_cap: float = 0.0
    spread: float = 1.0
    #: Variance classes: "" for none, the kinds that have them otherwise.
    classes: str = ""

    @property
    def masked(self) -> bool:
        return self.positions > 1 or self.sliding_window > 0

    @property
    def plan(self) -> Plan:
        profile = Profile.named(self.profile) if isinstance(self.profile, str) else self.profile
        return fitted(profile, self.kv_heads, self.head_dim, self.classes)

    def launch(self, shared: int) -> attend_launch.AttendLaunch:
        return attend_launch.attend_launch(
            self.plan, self.group, self.positions, self.dtype, masked=self.masked, soft_cap=self.soft_cap > 0,
            warps=self.warps, ringed=self.ringed, shared=shared,
        )  # fmt: skip


def channel_spread(kv_heads: int, head_dim: int) -> Array:
    """Standard deviations ``[2, 1, H, D]`` of channels of keys and values, as unlike as real ones."""
    spread = np.exp(0.8 * np.random.default_rng(kv_heads).standard_normal((2, 1, kv_heads, head_dim)))
    return spread.astype(np.float32)


@lru_cache(maxsize=32)
def fitted(profile: Profile, kv_heads: int, head_dim: int, classes: str) -> Plan:
    plan = make_plan(profile, kv_heads, head_dim)
    if not classes:
        return plan
    shape = (2, 384, kv_heads, head_dim)
    x = np.random.default_rng(9).standard_normal(shape).astype(np.float32) * channel_spread(kv_heads, head_dim)
    found = fit_plan(profile, *x)
    assert found.key.grouping is not None and found.value.grouping is not None
    if classes != "both":
        other = "value" if classes == "key" else "key"
        found = with_heads_in_one_order(replace(found, **{other: getattr(plan, other)}))
    return found


#: Offsets as well as scales, even numbers of levels, letters of two and of four, one stream a token.
MIN_MAX = Profile(
    key=StreamProfile(8, 330, precision=11, letter=2, mean=True),
    value=StreamProfile(6, 260, precision=13, letter=4),
    window=64,
    substreams=1,
)


@dataclass
class Batch:
    """Sequences of one geometry on the device, and what the CPU decodes of them."""

    geometry: Geometry
    lengths: list[int]
    tails: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)
    seed: int = 0
    real: tuple[Array, Array] | None = None

    def __post_init__(self) -> None:
        g = self.geometry
        rng = np.random.default_rng(self.seed)
        self.tails = self.tails or [0] * len(self.lengths)
        self.sinks = self.sinks or [0] * len(self.lengths)
        self.codec = codec = Codec(g.plan)
        window, size = codec.plan.window, codec.layout.page_bytes
        counts = [-(-length // window) for length in self.lengths]
        free = rng.permutation(sum(counts) + 3)
        # Pages that nobody uses, and the unused rest of used ones, hold NaN wherever a float might be read.
        self.pool = np.full((len(free), size), 0xFF, np.uint8)
        self.table = np.full((len(counts), max([*counts, 0]) + 2), -1, np.int32)
        self.decoded = []
        room = max([*self.tails, *self.sinks, 1])
        shape = (2, len(counts), room, g.kv_heads, g.head_dim)
        self.exact = {"tail": np.full(shape, np.nan, np.float32), "sinks": np.full(shape, np.nan, np.float32)}
        for b, length in enumerate(self.lengths):
            if self.real is not None:
                keys, values = (x[:length] for x in self.real)
            else:
                keys, values = rng.standard_normal((2, length, g.kv_heads, g.head_dim)).astype(np.float32)
                keys = keys * rng.uniform(0.5, 1.5, (length, 1, 1)).astype(np.float32) + rng.standard_normal(
                    (1, g.kv_heads, g.head_dim)
                ).astype(np.float32)
                if g.classes:
                    keys, values = (keys, values) * channel_spread(g.kv_heads, g.head_dim)
            pages = codec.encode(keys, values)
            for i, page in enumerate(pages.data):
                number, free = free[0], free[1:]
                self.table[b, i] = number
                self.pool[number] = page
                self._poison(self.pool[number], min(length - i * window, window))
            k, v = (x.astype(np.float64) for x in codec.decode(pages))
            rows = {}
            for name, count in (("sinks", self.sinks[b]), ("tail", self.tails[b])):
                exact = rng.standard_normal((2, count, g.kv_heads, g.head_dim)).astype(np.float32)
                exact = (exact.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
                self.exact[name][:, b, :count] = exact
                rows[name] = exact.astype(np.float64)
            self.decoded.append(
                tuple(np.concatenate([rows["sinks"][i], x, rows["tail"][i]]) for i, x in enumerate((k, v)))
            )
        shape = (len(counts), g.positions, g.kv_heads * g.group, g.head_dim)
        self.query = (rng.standard_normal(shape) * g.spread).astype(np.float16).astype(np.float32)
        if g.dtype == "bfloat16":
            self.query = (self.query.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def _poison(self, page: Array, tokens: int) -> None:
        """Words and affine numbers of the tokens from ``tokens`` on become 0xFF: NaN as FP16."""
        layout, plan = self.codec.layout, self.codec.plan
        tiles = page[layout.head_bytes :].reshape(layout.tiles, layout.tile_bytes)
        for at, stream in ((layout.key, plan.key), (layout.value, plan.value)):
            words = tiles[:, at.words_at : at.affine_at].reshape(layout.tiles, -1, 32, stream.word_bytes)
            affine = tiles[:, at.affine_at : at.end].reshape(layout.tiles, 32, 2 * stream.affine)
            for token in range(tokens, plan.window):
                words[token // 32, :, token % 32] = 0xFF
                affine[token // 32, token % 32] = 0xFF

    def reference(self, scale: float, sink_logits: Array | None = None, causal: bool = True) -> tuple[Array, Array]:
        g = self.geometry
        out = np.zeros(self.query.shape)
        lse = np.full(self.query.shape[:3], -np.inf)
        for b, (k, v) in enumerate(self.decoded):
            for i in range(g.positions):
                self_at = len(k) - g.positions + i
                seen = np.arange(len(k))
                allowed = np.ones(len(k), bool)
                if causal:
                    allowed &= seen <= self_at
                if g.sliding_window:
                    allowed &= seen > self_at - g.sliding_window
                for q in range(g.kv_heads * g.group):
                    h = q // g.group
                    x = k[allowed, h] @ self.query[b, i, q].astype(np.float64) * scale
                    if g.soft_cap:
                        x = g.soft_cap * np.tanh(x / g.soft_cap)
                    everything = x if sink_logits is None else np.append(x, sink_logits[q])
                    if not len(everything):
                        continue
                    peak = everything.max()
                    total = np.exp(everything - peak).sum()
                    lse[b, i, q] = peak + math.log(total)
                    out[b, i, q] = np.exp(x - peak) / total @ v[allowed, h]
        return out, lse

    def run(self, cupy: Any, **options: Any) -> tuple[Array, Array]:
        g = self.geometry
        attention = device_attend.PageAttention(
            g.plan, len(self.lengths), g.kv_heads * g.group, positions=g.positions, dtype=g.dtype, masked=g.masked,
            soft_cap=g.soft_cap > 0, warps=g.warps, ringed=g.ringed,
        )  # fmt: skip
        attention.out.view(np.uint8).fill(0xFF)
        attention.lse.fill(np.nan)
        for name in ("partial", "state"):
            attention._memory[name].fill(np.nan)
        for name, (keys, values, counts) in self.exact_arrays().items():
            options[name] = cupy.asarray(keys), cupy.asarray(values), cupy.asarray(counts)
        out, lse = attention(
            cupy.asarray(self.device_query()), cupy.asarray(self.pool), cupy.asarray(self.table),
            cupy.asarray(np.array(self.lengths, np.int32)), sliding_window=g.sliding_window, soft_cap=g.soft_cap,
            **options,
        )  # fmt: skip
        return as_float(out.get(), g.dtype), lse.get().astype(np.float64)

    def run_on_host(self, folder: Path, blocks: int = 3, backwards: bool = False) -> tuple[Array, Array]:
        """The same kernels, compiled for the host: blocks of one warp, one after another."""
        g = self.geometry
        launch = replace(g, warps=1).launch(1 << 20)
        library = host_library(launch, folder)
        shape, plan = launch.shape, g.plan
        slots = blocks + len(self.lengths) * shape.groups
        pool = np.full(self.pool.size + 16, 0xFF, np.uint8)
        pool = pool[-pool.ctypes.data % 16 :][: self.pool.size]
        pool[:] = self.pool.reshape(-1)
        arrays = {
            "pages": pool,
            "block_table": self.table,
            "lengths": np.array(self.lengths, np.int32),
            **attend_launch.attend_memory(plan),
            "query": self.device_query(),
            "partial": np.full(slots * shape.partial_floats, np.nan, np.float32),
            "state": np.full(slots * shape.state_floats, np.nan, np.float32),
            "out": np.full(self.query.shape, 0xFFFF, np.uint16),
            "lse": np.full(self.query.shape[:3], np.nan, np.float32),
        }
        if g.dtype == "float32":
            arrays["out"] = np.full(self.query.shape, np.nan, np.float32)
        params = attend_launch.attend_params(plan, launch)
        for name, (keys, values, counts) in self.exact_arrays().items():
            kind = "sink" if name == "sinks" else "tail"
            arrays |= {f"{kind}_keys": keys, f"{kind}_values": values, f"{kind}_lengths": counts}
            params[f"{kind}_stride"] = keys.shape[1]
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        for name, array in arrays.items():
            params[name] = array.ctypes.data
        params["page_stride"], params["table_stride"] = self.pool.shape[1], self.table.shape[1]
        params["batch"], params["blocks"], params["causal"] = len(self.lengths), blocks, 1
        params["sliding_window"], params["soft_cap"] = g.sliding_window, g.soft_cap
        params["scale"], params["lse_factor"] = 1 / math.sqrt(g.head_dim), math.log(2)
        library.set_backwards(int(backwards))
        finish = g.kv_heads * len(self.lengths) * shape.passes * shape.rows // 4
        library.run_attend(ctypes.c_void_p(params.ctypes.data), finish)
        return as_float(arrays["out"], g.dtype), arrays["lse"].astype(np.float64)

    def exact_arrays(self) -> dict[str, tuple[Array, Array, Array]]:
        """Keys and values as bfloat16 bits, and counts, of ``tail`` and ``sinks`` where there are any."""
        found = {}
        for name, counts in (("tail", self.tails), ("sinks", self.sinks)):
            if any(counts):
                keys, values = (self.exact[name].view(np.uint32) >> 16).astype(np.uint16)
                found[name] = keys, values, np.array(counts, np.int32)
        return found

    def device_query(self) -> Array:
        dtype = self.geometry.dtype
        if dtype == "bfloat16":
            return (self.query.view(np.uint32) >> 16).astype(np.uint16)
        return self.query.astype(dtype)


def as_float(bits: Array, dtype: str) -> Array:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return (bits.view(np.float16) if dtype == "float16" else bits).astype(np.float64)


def check(batch: Batch, got: tuple[Array, Array], want: tuple[Array, Array]) -> None:
    for b in range(len(batch.lengths)):
        out, lse = got[0][b], got[1][b]
        if not len(batch.decoded[b][0]) and not np.isfinite(want[1][b]).any():
            assert (out == 0).all() and (lse == -np.inf).all()
            continue
        error = np.linalg.norm(out - want[0][b]) / np.linalg.norm(want[0][b])
        # Rounding the output to bfloat16 alone is an error of 1.7e-3.
        assert error < (3e-3 if batch.geometry.dtype == "bfloat16" else 2e-3), (b, batch.lengths[b], error)
        assert np.abs(lse - want[1][b]).max() < 1e-2, (b, batch.lengths[b])


def host_library(launch: attend_launch.AttendLaunch, folder: Path) -> ctypes.CDLL:
    defined = tuple(option for option in launch.options if option.startswith("-D"))
    return library(defined, str(folder), f"{launch.name}.cpp")


class DeviceArray(np.ndarray[Any, Any]):
    """Stands for CuPy's array: the same memory, with an address."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)


def device_array(array: Any, dtype: Any = None) -> DeviceArray:
    return np.array(array, dtype).view(DeviceArray)


def launch_on_the_host(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[str, int, int, int]]:
    """From now on attention objects take host arrays and run on the host; returns the list that launches go to."""
    launches: list[tuple[str, int, int, int]] = []

    def start(self: Any, function: Any, blocks: int, threads: int, shared: int, stream: int, params: Array) -> None:
        launches.append((function.name, blocks, threads, shared))
        if function.name == "attend_finish":
            host_library(self.launch, folder).run_attend(ctypes.c_void_p(params.ctypes.data), blocks)

    stand_in = SimpleNamespace(
        ndarray=DeviceArray,
        asarray=device_array,
        empty=lambda shape, dtype: device_array(np.full(shape, np.nan, dtype)),
        RawModule=lambda path: SimpleNamespace(get_function=lambda name: SimpleNamespace(name=name)),
        cuda=SimpleNamespace(
            Device=lambda: SimpleNamespace(id=0, attributes={"MaxSharedMemoryPerBlockOptin": 227 << 10}),
            get_current_stream=lambda: SimpleNamespace(ptr=0),
        ),
    )
    for module in (device_attend, arrays):
        monkeypatch.setattr(module, "cupy", lambda: stand_in)
    monkeypatch.setattr(device_attend, "device", lambda number: Device(number, "sm_90", 3, 228 << 10))
    monkeypatch.setattr(device_attend, "stream_of", lambda stream, arrays: nullcontext())
    monkeypatch.setattr(device_attend, "cached_kernel", lambda name, options, architecture: Path(name))
    monkeypatch.setattr(device_attend.PageAttention, "_start", start)
    return launches
