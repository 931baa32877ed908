"""The codec on a GPU against the CPU codec: the same bytes, whoever owns the arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_support import cupy_with_device
from numpy.typing import NDArray

import dquantcodec
from dquantcodec.codec import Codec as CpuCodec
from dquantcodec.codec import Pages
from dquantcodec.errors import ChecksumError, DeviceError, FormatError, InputError
from dquantcodec.profile import PROFILES

pytestmark = pytest.mark.gpu

cupy = cupy_with_device()

from dquantcodec.cuda import Cache, Codec  # noqa: E402

#: Heads and head size; profiles take them in turn, and the default profile takes all.
GEOMETRIES = [(8, 128), (2, 64), (2, 80), (4, 96), (2, 112), (2, 192), (2, 256), (1, 128), (64, 128)]
CASES = [("2.26", *g) for g in GEOMETRIES] + [
    (name, *GEOMETRIES[(2 * i + j) % len(GEOMETRIES)])
    for i, name in enumerate(sorted(set(PROFILES) - {"2.26"}))
    for j in range(3)
]


def tokens_for(codec: CpuCodec, tokens: int, dtype: Any = np.float16, seed: int = 0) -> NDArray[Any]:
    """Keys and values ``[2, T, H, D]`` among which are all-equal, extreme, tiny and sparse streams."""
    shape = (2, tokens, codec.plan.kv_heads, codec.plan.head_dim)
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[0, :, :, 3] += 3
    for i, content in enumerate((0.0, 1.0, -60000.0, 6e-8)):
        x[:, i::97] = np.where(np.arange(tokens)[i::97, None, None] % 2, x[:, i::97], content)
    x[:, 9::50, :, ::2] = -3
    return x.astype(dtype)


@pytest.mark.parametrize(("name", "heads", "head_dim"), CASES)
def test_same_bytes_and_same_bits(name: str, heads: int, head_dim: int) -> None:
    cpu, gpu = CpuCodec(name, heads, head_dim), Codec(name, heads, head_dim)
    tokens = 1 if heads == 1 else 300
    for dtype in (np.float16, np.float32):
        x = tokens_for(cpu, tokens, dtype)
        want = cpu.encode(*x)
        got = gpu.encode(*cupy.asarray(x))
        np.testing.assert_array_equal(cupy.asnumpy(got.data), want.data)
    for kind in ("key", "value"):
        for dtype in ("float32", "float16"):
            start, stop = tokens // 3, tokens
            rows = gpu.decode_kind(got, kind, start, stop, dtype=dtype)
            reference = cpu.decode_kind(want, kind, start, stop, dtype=dtype)
            assert cupy.asnumpy(rows).tobytes() == reference.tobytes()


def test_no_tokens() -> None:
    gpu = Codec("2.26", 2, 64)
    empty = cupy.zeros((0, 2, 64), cupy.float16)
    pages = gpu.encode(empty, empty)
    assert pages.data.shape == (0, gpu.layout.page_bytes) and gpu.decode_kind(pages, "key").shape == (0, 2, 64)


def test_dispatch_by_name() -> None:
    assert type(dquantcodec.Codec("2.26", 2, 64, device="cuda")) is Codec
    assert dquantcodec.Codec("2.26", 2, 64, device="cuda:0").device.number == 0


def test_pool_numbers_strides_and_poison() -> None:
    cpu, gpu = CpuCodec("2.26", 4, 128), Codec("2.26", 4, 128)
    x = tokens_for(cpu, 500)
    want = cpu.encode(*x)
    pool = cupy.full((9, gpu.layout.page_bytes + 64), 0x5A, cupy.uint8)[:, : gpu.layout.page_bytes]
    numbers = cupy.asarray([7, 1, 4, 2], cupy.int32)
    # Heads before tokens in memory, and a gap behind every head.
    wide = cupy.zeros((2, 4, 500, 160), cupy.float16)
    wide[:, :, :, :128] = cupy.asarray(x).transpose(0, 2, 1, 3)
    rows = wide.transpose(0, 2, 1, 3)[..., :128]
    pages = gpu.encode(rows[0], rows[1], pages=pool, numbers=numbers)
    np.testing.assert_array_equal(cupy.asnumpy(pool[numbers]), want.data)
    assert (cupy.asnumpy(pool[cupy.asarray([0, 3, 5, 6, 8])]) == 0x5A).all()
    for first in (0, 1):  # rows that begin at multiples of 16 bytes, and others
        out = cupy.full((4, 450, 129), cupy.nan, cupy.float32).transpose(1, 0, 2)[:, :, first : first + 128]
        status = cupy.full((450, 2), 99, cupy.uint8)
        gpu.decode_kind(pages, "key", 33, 483, out=out, numbers=numbers, status=status)
        assert not status.any()
        np.testing.assert_array_equal(cupy.asnumpy(out), cpu.decode_kind(want, "key", 33, 483))


def test_torch_tensors_and_streams() -> None:
    torch = pytest.importorskip("torch")
    cpu, gpu = CpuCodec("1.96", 2, 128), Codec("1.96", 2, 128)
    x = torch.from_numpy(tokens_for(cpu, 200)).to(torch.bfloat16)
    want = cpu.encode(*x.view(torch.uint16).numpy())
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = x.to("cuda", non_blocking=True)
        pages = gpu.encode(moved[0], moved[1])
        rows = gpu.decode_kind(pages, "value", dtype=torch.bfloat16)
        assert rows.dtype == torch.bfloat16 and rows.is_cuda
    stream.synchronize()
    np.testing.assert_array_equal(pages.data.cpu().numpy(), want.data)
    reference = cpu.decode_kind(want, "value", dtype="float32")
    np.testing.assert_array_equal(rows.float().cpu().numpy(), torch.from_numpy(reference).to(torch.bfloat16).float())
    # An explicit stream: nothing may run before what it already holds.
    for given in (stream, stream.cuda_stream):
        late = torch.zeros_like(moved)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(moved)
        status = torch.zeros((2, 200), dtype=torch.uint8, device="cuda")
        again = gpu.encode(late[0], late[1], status=status, stream=given)
        stream.synchronize()
        np.testing.assert_array_equal(again.data.cpu().numpy(), want.data)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    cpu, gpu = CpuCodec("2.26", 2, 64), Codec("2.26", 2, 64)
    x = tokens_for(cpu, 50)
    pages = gpu.encode(jax.numpy.asarray(x[0]), jax.numpy.asarray(x[1]))
    np.testing.assert_array_equal(cupy.asnumpy(pages.data), cpu.encode(*x).data)


def test_unfit_arrays() -> None:
    gpu = Codec("2.26", 2, 64)
    x = cupy.zeros((5, 2, 64), cupy.float16)
    for bad, error, code in (
        (np.zeros((5, 2, 64), np.float16), DeviceError, "device-array"),
        ([1.0], DeviceError, "device-array"),
        (x.astype(cupy.float64), InputError, "input-dtype"),
        (x[:, :1], InputError, "input-shape"),
        (cupy.zeros((5, 2, 128), cupy.float16)[:, :, ::2], InputError, "input-stride"),
        (x[:4], InputError, "input-shape"),
    ):
        with pytest.raises(error) as failed:
            gpu.encode(x, bad)
        assert failed.value.code == code
    size = gpu.layout.page_bytes
    for pool, code in (
        (cupy.zeros((1, size - 64), cupy.uint8), "input-pages"),
        (cupy.zeros((1, size), cupy.int8), "input-pages"),
        (cupy.zeros((0, size), cupy.uint8), "input-pages"),
        (cupy.zeros(size + 16, cupy.uint8)[8:][:size].reshape(1, size), "input-stride"),
    ):
        with pytest.raises(InputError) as failed:
            gpu.encode(x, x, pages=pool)
        assert failed.value.code == code
    pages = gpu.encode(x, x)
    with pytest.raises(InputError) as failed:
        gpu.decode_kind(pages, "key", dtype="int8")
    assert failed.value.code == "input-dtype"
    with pytest.raises(InputError) as failed:
        gpu.decode_kind(pages, "key", status=cupy.zeros((5, 1), cupy.uint8))
    assert failed.value.code == "input-shape"


def test_numbers_that_are_not_finite() -> None:
    gpu = Codec("2.26", 2, 64)
    x = cupy.ones((200, 2, 64), cupy.float16)
    bad = x.copy()
    bad[130, 1, 7] = cupy.inf
    with pytest.raises(InputError, match="value of token 130, head 1, channel 7") as failed:
        gpu.encode(x, bad)
    assert failed.value.code == "input-nonfinite"
    status = cupy.full((2, 200), 99, cupy.uint8)
    gpu.encode(x, bad, status=status)
    assert not status[0].any() and cupy.flatnonzero(status[1]).tolist() == [130] and int(status[1, 130]) == 6


@pytest.mark.parametrize("name", ["2.26", "paper-2.26"])
def test_damaged_pages(name: str) -> None:
    cpu, gpu = CpuCodec(name, 8, 128), Codec(name, 8, 128)
    pages = cpu.encode(*tokens_for(cpu, 256))
    rng = np.random.default_rng(3)
    noise = Pages(rng.integers(0, 256, pages.data.shape, np.uint8), 256)
    for damaged in (noise, Pages(np.full_like(pages.data, 255), 256), Pages(np.zeros_like(pages.data), 256)):
        for kind in ("key", "value"):
            status = cupy.full((256, getattr(cpu.plan, kind).substreams), 99, cupy.uint8)
            out = cupy.full((256, 8, 128), cupy.nan, cupy.float32)
            gpu.decode_kind(Pages(cupy.asarray(damaged.data), 256), kind, out=out, status=status)
            assert int(status.max()) < 6
    flipped = pages.data.copy()
    flipped[1, cpu.layout.head_bytes + 5 * 128 : cpu.layout.head_bytes + 7 * 128] ^= 0xFF
    with pytest.raises(ChecksumError) as from_cpu:
        cpu.decode_kind(Pages(flipped, 256), "key")
    with pytest.raises(ChecksumError) as from_gpu:
        gpu.decode_kind(Pages(cupy.asarray(flipped), 256), "key")
    assert (from_gpu.value.code, from_gpu.value.where) == (from_cpu.value.code, from_cpu.value.where)
    assert str(from_gpu.value) == str(from_cpu.value)
    flipped = pages.data.copy()
    flipped[0, :2].view(np.int16)[:] = 1000
    with pytest.raises(FormatError) as unfit:
        gpu.decode_kind(Pages(cupy.asarray(flipped), 256), "key")
    assert unfit.value.code == "page-exponent"


@pytest.mark.parametrize("name", ["2.26", "paper-2.26"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_append_in_a_captured_graph(name: str, library: str) -> None:
    heads, head_dim, sequences, steps = 2, 64, 3, 300
    cpu, gpu = CpuCodec(name, heads, head_dim), Codec(name, heads, head_dim)
    rng = np.random.default_rng(1)
    given = rng.standard_normal((steps, 2, sequences, heads, head_dim)).astype(np.float16)
    prompt = rng.standard_normal((2, 200, heads, head_dim)).astype(np.float16)
    numbers = np.array([[8, 0, 3], [2, 5, 1], [4, 6, 7]], np.int32)
    if library == "torch":
        torch = pytest.importorskip("torch")

        def to_device(a: NDArray[Any]) -> Any:
            return torch.from_numpy(a).cuda()
    else:
        to_device = cupy.asarray
    pool = to_device(np.full((9, gpu.layout.page_bytes), 0x5A, np.uint8))
    cache = Cache(gpu, pool, to_device(numbers), dtype="float16")
    cache.prefill(1, *to_device(prompt))
    rows = to_device(np.zeros((2, sequences, heads, head_dim), np.float16))
    if library == "torch":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            cache.append(rows[0], rows[1])
        for step in given:
            rows.copy_(torch.from_numpy(step))
            graph.replay()
        torch.cuda.synchronize()
        pages = pool.cpu().numpy()
        tails = cache.keys.cpu().numpy(), cache.values.cpu().numpy()
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            cache.append(rows[0], rows[1], stream=stream)
            captured = stream.end_capture()
            for step in given:
                rows.set(step)
                captured.launch(stream)
            stream.synchronize()
        pages = cupy.asnumpy(pool)
        tails = cupy.asnumpy(cache.keys), cupy.asnumpy(cache.values)
    window = cpu.plan.window
    for sequence in range(sequences):
        all_rows = given[:, :, sequence].transpose(1, 0, 2, 3)
        if sequence == 1:
            all_rows = np.concatenate([prompt, all_rows], axis=1)
        tokens = all_rows.shape[1]
        whole = min(tokens // window, 3)
        room = min(tokens, 3 * window + window - 1)
        assert int(cache.lengths[sequence]) == room and int(cache.full[sequence]) == (room < tokens)
        want = cpu.encode(*all_rows[:, : whole * window])
        np.testing.assert_array_equal(pages[numbers[sequence, :whole]], want.data)
        assert (pages[numbers[sequence, whole:]] == 0x5A).all()
        for i, tail in enumerate(tails):
            np.testing.assert_array_equal(tail[sequence, : room - whole * window], all_rows[i, whole * window : room])
        held, held_numbers = cache.pages(sequence)
        decoded = gpu.decode_kind(held, "key", numbers=held_numbers)
        decoded = decoded.cpu().numpy() if library == "torch" else cupy.asnumpy(decoded)
        np.testing.assert_array_equal(decoded, cpu.decode_kind(want, "key"))


def test_append_leaves_inactive_sequences_alone() -> None:
    gpu = Codec("2.26", 2, 64)
    pool = cupy.zeros((2, gpu.layout.page_bytes), cupy.uint8)
    cache = Cache(gpu, pool, cupy.asarray([[0], [1]], cupy.int32), dtype="float32")
    rows = cupy.ones((2, 2, 64), cupy.float32)
    cache.append(rows, rows, active=cupy.asarray([1, 0], cupy.uint8))
    assert cache.lengths.tolist() == [1, 0]
    with pytest.raises(InputError) as failed:
        cache.append(rows.astype(cupy.float16), rows)
    assert failed.value.code == "input-dtype"
