"""Every decoder reads every encoder's pages: plain Python, the CPU with any threads, the C++ headers, device kernels on
the host, and on the device where there is one."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import gpu_support as gpu
import numpy as np
import pytest

from dquantcodec.codec import Codec, Pages
from dquantcodec.cuda import launches
from dquantcodec.file import Layer, create
from dquantcodec.page_layout import KINDS
from dquantcodec.plan import Plan
from dquantcodec.testing import properties
from dquantcodec.testing.strategies import PageCase
from dquantcodec.testing.tensors import HOSTILE, hostile

BUILDS = str(Path(__file__).parent.parent / ".pytest_cache" / "device-kernels")
TOKENS = 3


def on_threads(threads: int) -> Callable[[Plan, bytes, int], tuple[Any, Any]]:
    def decode(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
        # Six copies of the page are enough for threads to share.
        data = np.frombuffer(page * 6, np.uint8).reshape(6, -1)
        window = plan.window
        keys, values = Codec(plan, threads=threads).decode(Pages(data, 5 * window + tokens), 5 * window)
        for first in range(0, 5 * window, window):
            again, _ = Codec(plan, threads=threads).decode(Pages(data, 6 * window), first, first + tokens)
            assert again.tobytes() == keys.tobytes()
        return keys, values

    return decode


def emulated(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
    """The device's kernel as C++ of the host; a status other than zero as the ValueError that callers raise for it."""
    found = []
    pool = gpu.aligned_pages(Pages(np.frombuffer(page, np.uint8)[None], tokens))
    for kind in KINDS:
        launch = launches.decode_launch(plan, kind, "float32")
        out = np.empty((tokens, plan.kv_heads, plan.head_dim), np.float32)
        status = np.full((tokens, getattr(plan, kind).substreams), 99, np.uint8)
        gpu.decode(gpu.build(launch.options, BUILDS), launch, plan, kind, pool, None, 0, tokens, out, status)
        if status.any():
            raise ValueError(f"statuses of {kind}s are {status.tolist()}")
        found.append(out)
    return found[0], found[1]


@lru_cache(maxsize=8)
def header_of(plan: Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.dqkv"
        create(path, [Layer(plan.kv_heads, plan.head_dim, "float32", plan)]).close()
        return path.read_bytes()


def by_headers(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
    """The reader in C++, which learns the plan from the header of a file; a refusal as ValueError."""
    library = gpu.build(("-O0",), BUILDS, "pages.cpp")  # compiling takes longer than running
    header = header_of(plan)
    found = []
    for kind in range(2):
        out, code = np.empty((tokens, plan.kv_heads, plan.head_dim), np.float32), ctypes.create_string_buffer(64)
        if not library.decode_page(
            header, ctypes.c_uint64(len(header)), page, ctypes.c_uint64(len(page)), kind, ctypes.c_uint32(tokens),
            ctypes.c_void_p(out.ctypes.data), code,
        ):  # fmt: skip
            raise ValueError(f"{KINDS[kind]}s are refused: {code.value.decode()}")
        found.append(out)
    return found[0], found[1]


def on_device(plan: Plan, page: bytes, tokens: int) -> tuple[Any, Any]:
    cupy = gpu.cupy_with_device()
    from dquantcodec.cuda import Codec as DeviceCodec

    pages = Pages(cupy.asarray(np.frombuffer(page, np.uint8)[None].copy()), tokens)
    keys, values = (DeviceCodec(plan).decode_kind(pages, kind) for kind in KINDS)
    return cupy.asnumpy(keys), cupy.asnumpy(values)


DECODERS = {
    "one thread": on_threads(1),
    "three threads": on_threads(3),
    "emulated device": emulated,
    "headers": by_headers,
    "device": on_device,
}


@pytest.mark.parametrize("name", ["2.26", "paper-2.26"])
@pytest.mark.parametrize(
    "decoder", [pytest.param(name, marks=[pytest.mark.gpu] if name == "device" else []) for name in DECODERS]
)
def test_pages_of_hostile_tokens_and_damaged_ones(decoder: str, name: str) -> None:
    codec = Codec(name, 4, 64)
    rng = np.random.default_rng(len(decoder))
    for seed, kind in enumerate(HOSTILE[len(decoder) % 3 :: 3]):
        x, y = (hostile(kind, TOKENS, 4, 64, seed + i, codec.plan.signs) for i in range(2))
        page = codec.encode(x, y).data[0].tobytes()
        properties.pages_decode_to_the_specified_numbers(DECODERS[decoder], PageCase(codec.plan, page, TOKENS))
        damaged = bytearray(page)
        layout = codec.layout
        for at in rng.integers(0, layout.bytes_for(TOKENS), 40):
            damaged[at] ^= 1 << rng.integers(8)
        if seed % 2:
            damaged[: layout.head_bytes] = page[: layout.head_bytes]
        # Threads are given whole windows, so what the damage does to absent tokens must not count.
        if decoder not in ("one thread", "three threads"):
            case = PageCase(codec.plan, bytes(damaged), TOKENS)
            properties.pages_decode_to_the_specified_numbers(DECODERS[decoder], case)
