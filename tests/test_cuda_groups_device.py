"""Plans with variance classes on a GPU: encode, append and decode as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
from gpu_support import cupy_with_device
from numpy.typing import NDArray

from dquantcodec.codec import Codec as CpuCodec
from dquantcodec.codec import Pages
from dquantcodec.fit import fit_plan
from dquantcodec.plan import Plan
from dquantcodec.profile import PROFILES

pytestmark = pytest.mark.gpu

cupy = cupy_with_device()

from dquantcodec.cuda import Cache, Codec  # noqa: E402

CASES = [
    ("2.26", 8, 128), ("1.96", 2, 64), ("3.0", 3, 80), ("2.26", 2, 256), ("2.26", 5, 33), ("1.96", 64, 128),
    ("2.26-t", 8, 128), ("1.96-t", 4, 64), ("2.26-8", 3, 80),
]  # fmt: skip


def channel_tokens(tokens: int, heads: int, head_dim: int, seed: int) -> NDArray[np.float32]:
    """Keys and values ``[2, T, H, D]`` of channels and tokens of different magnitudes; keys have means."""
    spread = np.exp(np.random.default_rng(0).standard_normal((2, 1, heads, head_dim)))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, tokens, heads, head_dim)) * spread
    x *= rng.uniform(0.5, 2, (2, tokens, 1, 1))
    x[0] += 2 * spread[0, :, :, ::-1]
    return x.astype(np.float32)


@lru_cache(maxsize=16)
def fitted(name: str, heads: int, head_dim: int) -> Plan:
    profile = PROFILES["2.26-t" if name == "2.26-8" else name]
    if name == "2.26-8":
        profile = replace(
            profile,
            key=replace(profile.key, quantiser="trellis-8"),
            value=replace(profile.value, quantiser="trellis-8"),
        )
    plan = fit_plan(profile, *channel_tokens(256, heads, head_dim, 0))
    assert plan.key.grouping is not None and plan.value.grouping is not None
    return plan


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_same_bytes_and_same_bits(name: str, heads: int, head_dim: int) -> None:
    plan = fitted(name, heads, head_dim)
    cpu, gpu = CpuCodec(plan), Codec(plan)
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        x = channel_tokens(300, heads, head_dim, 1)
        for i, content in enumerate((0.0, 1.0, -60000.0, 6e-8)):
            x[:, i::97] = content
        x[:, 9::50, :, ::2] = -3
        x[:, 150] *= 100
        rows = x.astype(dtype)
        want = cpu.encode(*rows)
        got = gpu.encode(*cupy.asarray(rows))
        np.testing.assert_array_equal(cupy.asnumpy(got.data), want.data)
    for kind in ("key", "value"):
        found = gpu.decode_kind(got, kind, 100, 290, dtype="float16")
        assert cupy.asnumpy(found).tobytes() == cpu.decode_kind(want, kind, 100, 290, dtype=np.float16).tobytes()


def test_magnitudes_and_numbers_that_are_not_finite() -> None:
    plan = fitted("2.26", 8, 128)
    cpu, gpu = CpuCodec(plan), Codec(plan)
    for scale in (1e-44, 1e-30, 1e30):
        x = (channel_tokens(140, 8, 128, 2).astype(np.float64) * scale).astype(np.float32)
        np.testing.assert_array_equal(cupy.asnumpy(gpu.encode(*cupy.asarray(x)).data), cpu.encode(*x).data)
    x = channel_tokens(140, 8, 128, 3)
    x[1, 130, 1, 7] = np.inf
    status = cupy.full((2, 140), 99, cupy.uint8)
    got = gpu.encode(*cupy.asarray(x), status=status)
    assert not status[0].any() and cupy.flatnonzero(status[1]).tolist() == [130] and int(status[1, 130]) == 6
    x[1, 130, 1, 7] = 0
    np.testing.assert_array_equal(cupy.asnumpy(got.data), cpu.encode(*x).data)


def test_a_kind_with_classes_and_one_without() -> None:
    plan = fitted("2.26", 2, 64)
    rotated = CpuCodec("2.26", 2, 64).plan
    mixed = replace(plan, key=rotated.key)
    x = channel_tokens(150, 2, 64, 4).astype(np.float16)
    got = Codec(mixed).encode(*cupy.asarray(x))
    np.testing.assert_array_equal(cupy.asnumpy(got.data), CpuCodec(mixed).encode(*x).data)
    empty = Codec(mixed).encode(*cupy.asarray(x[:, :0]))
    assert empty.data.shape == (0, got.data.shape[1])


@pytest.mark.parametrize("name", ["2.26", "2.26-t"])
def test_append_in_a_captured_graph(name: str) -> None:
    plan = fitted(name, 8, 128) if name == "2.26" else fitted("1.96-t", 4, 64)
    cpu, gpu = CpuCodec(plan), Codec(plan)
    heads, head_dim, window = plan.kv_heads, plan.head_dim, plan.window
    steps, sequences = 2 * window + 5, 3
    given = channel_tokens(steps * sequences, heads, head_dim, 5).astype(np.float16)
    given = given.reshape(2, steps, sequences, heads, head_dim)
    numbers = np.array([[5, 0], [2, 4], [1, 3]], np.int32)
    pool = cupy.full((6, gpu.layout.page_bytes), 0x5A, cupy.uint8)
    cache = Cache(gpu, pool, cupy.asarray(numbers), dtype="float16")
    prompt = given[:, :window, 1]
    cache.prefill(1, *(cupy.asarray(np.ascontiguousarray(a)) for a in prompt))
    rows = cupy.zeros((2, sequences, heads, head_dim), cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cache.append(rows[0], rows[1], stream=stream)
        graph = stream.end_capture()
        for step in range(steps):
            rows.set(np.ascontiguousarray(given[:, step]))
            graph.launch(stream)
        stream.synchronize()
    for sequence in range(sequences):
        all_rows = given[:, :, sequence]
        if sequence == 1:
            all_rows = np.concatenate([prompt, all_rows], axis=1)
        want = cpu.encode(*np.ascontiguousarray(all_rows[:, : 2 * window]))
        np.testing.assert_array_equal(cupy.asnumpy(pool[cupy.asarray(numbers[sequence])]), want.data)


def test_more_than_two_to_the_31_values_in_a_call() -> None:
    plan = fitted("2.26", 8, 128)
    free, _ = cupy.cuda.runtime.memGetInfo()
    tokens = (1 << 21) + 77
    assert tokens * plan.values > 1 << 31
    if free < 14 << 30:
        pytest.skip("14 GB of device memory are needed")
    cpu, gpu = CpuCodec(plan), Codec(plan)
    part = cupy.asarray(channel_tokens(4096, 8, 128, 6)).astype(cupy.float16)
    x = cupy.empty((2, tokens, 8, 128), cupy.float16)
    for first in range(0, tokens, 4096):
        # Other values everywhere, so that no page is another's.
        x[:, first : first + 4096] = part[:, : tokens - first] * cupy.float16(1 + first / tokens)
    status = cupy.full((2, tokens), 99, cupy.uint8)
    pages = gpu.encode(x[0], x[1], status=status)
    assert not status.any()
    for first in (0, 1 << 20, tokens // plan.window * plan.window):
        rows = x[:, first : first + 200]
        want = cpu.encode(*cupy.asnumpy(rows)).data
        page = first // plan.window
        whole = rows.shape[1] // plan.window or 1
        np.testing.assert_array_equal(cupy.asnumpy(pages.data[page : page + whole]), want[:whole])
    # And back: the last rows of the call.
    out = cupy.asnumpy(gpu.decode_kind(pages, "key", tokens - 50, tokens, dtype="float16"))
    np.testing.assert_array_equal(out, cpu.decode_kind(Pages(want, 77), "key", 27, 77, dtype=np.float16))
