"""Grouped kinds on a device: kernels compiled for the host give the bits of the CPU; compiled for devices, they fit."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import gpu_support as gpu
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec import Codec, fit_plan
from dquantcodec.codec import Pages, decode_levels, read_kind
from dquantcodec.cuda import group_decode, launches, nvrtc, params
from dquantcodec.page_layout import KINDS
from dquantcodec.plan import Plan

BUILDS = str(Path(__file__).parent.parent / ".pytest_cache" / "device-kernels")
DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
CASES = [("2.26", 2, 128), ("2.26-t", 2, 64), ("1.96", 3, 80), ("2.26", 2, 33)]


def spread_tokens(heads: int, head_dim: int, tokens: int, hard: bool = True) -> NDArray[np.float32]:
    """Keys and values ``[2, T, H, D]`` whose channels differ, as real ones do; if hard, some tokens, too."""
    spread = np.exp(0.8 * np.random.default_rng(heads).standard_normal((2, 1, heads, head_dim)))
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((2, tokens, heads, head_dim)) * spread
    x[0] += 2 * spread[0, :, :, ::-1]
    if not hard:
        return x.astype(np.float32)
    for token, content in ((3, 0.0), (4, 60000.0), (5, 6e-8)):
        if token < tokens:
            x[:, token] = content
    if tokens > 9:
        x[:, 8] *= 100
        x[:, 9, :, ::2] = -3
    return x.astype(np.float32)


@lru_cache(maxsize=16)
def fitted(name: str, heads: int, head_dim: int) -> Plan:
    plan = fit_plan(name, *spread_tokens(heads, head_dim, 256, hard=False))
    assert plan.key.grouping is not None and plan.value.grouping is not None
    return plan


def decode(
    plan: Plan, kind: str, dtype: str, pool: NDArray[np.uint8], start: int, stop: int, out: NDArray[Any]
) -> NDArray[np.uint8]:
    """``dquant_decode_groups`` on the host; returns the statuses ``[stop - start, S]``."""
    stream = getattr(plan, kind)
    launch = group_decode.group_decode_launch(plan, kind, dtype)
    library = gpu.build(launch.options, BUILDS, "decode_groups.cpp")
    arrays = group_decode.group_decode_arrays(stream)
    status = np.full((stop - start, stream.substreams), 99, np.uint8)
    record = np.zeros(1, group_decode.GROUP_DECODE)
    for name, array in vars(arrays).items():
        record[name] = gpu.address(array)
    record["window_bytes"], record["groups_each"] = arrays.windows.nbytes, len(stream.grouping.letters)
    record["channel_rows"] = len(arrays.channels)
    rows = record["rows"]
    rows["pool"], rows["start"], rows["stop"] = (gpu.address(pool), 0, pool.strides[0]), start, stop
    rows["out"], rows["status"], rows["at"] = gpu.address(out), gpu.address(status), params.kind_layout(plan, kind)
    rows["token_stride"], rows["head_stride"] = (step // out.itemsize for step in out.strides[:2])
    rows["vectors"] = all(n % 16 == 0 for n in (gpu.address(out), *out.strides[:2]))
    lookups = arrays.windows.nbytes + arrays.groups.nbytes + arrays.channels.nbytes
    lookups = lookups if lookups <= group_decode.SHARED_LOOKUPS else 0
    assert launch.shared_bytes == lookups + launch.warps * library.group_warp_bytes()
    library.set_backwards(kind == "value")  # results may not depend on the order of lanes
    library.run_dquant_decode_groups(
        ctypes.c_void_p(gpu.address(record)), 3, launch.threads, ctypes.c_long(launch.shared_bytes)
    )
    return status


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_decode_gives_the_bits_of_the_cpu(name: str, heads: int, head_dim: int) -> None:
    plan = fitted(name, heads, head_dim)
    codec, tokens = Codec(plan), plan.window + 37
    pages = codec.encode(*spread_tokens(heads, head_dim, tokens))
    pool = gpu.aligned_pages(pages)
    dtype = sorted(DTYPES)[heads % 3]
    for kind in KINDS:
        for start, stop in ((0, tokens), (33, plan.window + 3), (tokens - 1, tokens)):
            want = codec.decode_kind(pages, kind, start, stop, dtype=DTYPES[dtype])
            out = np.full(want.shape, 0x7E7E, np.uint16 if dtype != "float32" else np.float32)
            assert not decode(plan, kind, dtype, pool, start, stop, out).any()
            assert out.tobytes() == want.tobytes(), (kind, start, stop)


def test_rows_apart_and_tables_too_large_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fitted("2.26", 2, 128)
    pages = Codec(plan).encode(*spread_tokens(2, 128, 100))
    monkeypatch.setattr(group_decode, "SHARED_LOOKUPS", 0)
    for first in (0, 1):  # rows that begin at multiples of 16 bytes, and others
        out = np.full((2, 100, 132), np.nan, np.float32).transpose(1, 0, 2)[:, :, first : first + 128]
        assert not decode(plan, "key", "float32", gpu.aligned_pages(pages), 0, 100, out).any()
        np.testing.assert_array_equal(out, Codec(plan).decode_kind(pages, "key"))


@pytest.mark.parametrize("name", ["2.26", "2.26-t"])
def test_any_bytes_decode_to_the_statuses_of_the_cpu(name: str) -> None:
    heads, head_dim = (2, 128) if name == "2.26" else (2, 64)
    plan = fitted(name, heads, head_dim)
    codec, rng = Codec(plan), np.random.default_rng(6)
    pages = codec.encode(*spread_tokens(heads, head_dim, 128))
    body = pages.data[0, codec.layout.head_bytes :]
    body ^= rng.integers(0, 256, body.shape, np.uint8) * (rng.random(body.shape) < 0.02)
    seen = set()
    for kind in KINDS:
        out = np.empty((128, heads, head_dim), np.float32)
        status = decode(plan, kind, "float32", gpu.aligned_pages(pages), 0, 128, out)
        fields = read_kind(pages.data, plan, kind, slice(0, 4))
        _, want = decode_levels(fields, plan, getattr(plan, kind))
        unfit = ~np.isfinite(fields.affine).all(axis=1)
        np.testing.assert_array_equal(status[unfit], 5)
        np.testing.assert_array_equal(status[~unfit], want[~unfit])
        seen |= set(status.reshape(-1).tolist())
    assert {0, 1} <= seen
    pages.data[0, :2].view(np.int16)[:] = 500
    out = np.empty((32, heads, head_dim), np.float32)
    assert (decode(plan, "key", "float32", gpu.aligned_pages(Pages(pages.data, 32)), 0, 32, out) == 4).all()


@pytest.mark.parametrize("architecture", sorted(launches.SHARED_BYTES))
def test_compiles(architecture: str) -> None:
    gpu.needs_nvrtc()
    shared = launches.SHARED_BYTES[architecture]
    for plan, kind in ((fitted("2.26", 2, 128), "key"), (fitted("2.26-t", 2, 64), "value")):
        launch = group_decode.group_decode_launch(plan, kind, "bfloat16", shared)
        assert launch.residents * (launch.shared_bytes + 1024) <= shared
        assert nvrtc.compile_kernel(launch.name, launch.options, architecture)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "heads", "head_dim"), [*CASES, ("2.26", 8, 128), ("3.0", 1, 100)])
def test_decode_on_a_device(name: str, heads: int, head_dim: int) -> None:
    cupy = gpu.cupy_with_device()
    from dquantcodec.cuda import Codec as DeviceCodec

    plan, tokens = fitted(name, heads, head_dim), 300
    pages = Codec(plan).encode(*spread_tokens(heads, head_dim, tokens))
    on_device = Pages(cupy.asarray(pages.data), tokens)
    codec = DeviceCodec(plan)
    for kind in KINDS:
        for dtype in ("float32", "float16"):
            for start, stop in ((0, tokens), (101, 290)):
                rows = codec.decode_kind(on_device, kind, start, stop, dtype=dtype)
                want = Codec(plan).decode_kind(pages, kind, start, stop, dtype=dtype)
                assert cupy.asnumpy(rows).tobytes() == want.tobytes()
    for content in (0, 255):
        pages.data[:] = content
        status = cupy.full((tokens, plan.key.substreams), 99, cupy.uint8)
        codec.decode_kind(Pages(cupy.asarray(pages.data), tokens), "key", status=status)
        assert int(status.max()) < 6
