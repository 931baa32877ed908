"""Device kernels without a GPU: compiled by the host's C++ compiler and run on NumPy arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dquantcodec.codec import Codec, Pages
from dquantcodec.cuda import group_tables, launches, nvrtc, params, sources, tables, trellis_tables
from dquantcodec.errors import DeviceError
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import Plan

#: What makes a host of the device's code; not part of the wheel.
HOST = Path(__file__).resolve().parents[1] / "gpu" / "host"
BUILD = ("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fcf-protection=none")


def needs_compiler() -> str:
    if sys.platform != "linux":
        pytest.skip("device kernels run on the host as fibers of Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no host C++ compiler: g++ is missing")
    return compiler


def needs_nvrtc() -> None:
    """Skip where device code cannot be compiled."""
    try:
        nvrtc.version()
    except DeviceError as missing:
        pytest.skip(f"no NVRTC: {missing}", allow_module_level=True)


def cupy_with_device() -> Any:
    """The module CuPy; skip, a whole module if need be, without it or without a GPU."""
    cupy = pytest.importorskip("cupy")
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        devices = 0
    if not devices:
        pytest.skip("no GPU", allow_module_level=True)
    return cupy


def build(options: tuple[str, ...], folder: str, source: str = "kernels.cpp") -> ctypes.CDLL:
    """The kernels of ``gpu/host/SOURCE`` for one set of options of a launch."""
    # What only matters to a device is left out, so that one library serves several launches.
    device_only = ("-DDQ_WARPS=", "-DDQ_BLOCKS=")
    options = tuple(option for option in options if not option.startswith(device_only))
    options += ("-DDQ_WARPS=1", "-DDQ_BLOCKS=1")
    if not any(option.startswith("-DDQ_SCRATCH=") for option in options):
        options += ("-DDQ_SCRATCH=0",)
    return library(tuple(sorted(options)), folder, source)


@lru_cache(maxsize=256)
def library(options: tuple[str, ...], folder: str, source: str) -> ctypes.CDLL:
    """``gpu/host/SOURCE`` compiled with ``options``, cached in ``folder`` by what it is built from."""
    digest = hashlib.sha256(" ".join((*BUILD, source, *options)).encode())
    for text in host_sources():
        digest.update(text)
    built = Path(folder) / f"kernels-{digest.hexdigest()[:24]}.so"
    if not built.is_file():
        include = (f"-I{sources.root() / 'include'}", f"-I{HOST}", "-include", str(standard_headers(folder)))
        warnings = ("-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable")
        compile_host((*options, *include, *warnings), HOST / source, built)
    return ctypes.CDLL(str(built))


@lru_cache(maxsize=1)
def host_sources() -> tuple[bytes, ...]:
    if not HOST.is_dir():
        pytest.skip("gpu/host is not beside the tests")
    endings = (".cuh", ".cu", ".h", ".hpp", ".cpp")
    files = sorted(path for top in (sources.root(), HOST) for path in top.rglob("*") if path.suffix in endings)
    return tuple(path.read_bytes() for path in files)


@lru_cache(maxsize=8)
def standard_headers(folder: str) -> Path:
    """The standard headers of ``gpu/host``, precompiled: they are a third of the time of a build."""
    lines = "\n".join(path.read_text() for path in HOST.glob("*.h")).splitlines()
    text = "\n".join(sorted({line for line in lines if line.startswith("#include <")})) + "\n"
    header = Path(folder) / f"standard-{hashlib.sha256(text.encode()).hexdigest()[:12]}.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.is_file():
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text(text)
        compile_host(("-x", "c++-header"), header, compiled)
    return header


def compile_host(options: tuple[str, ...], source: Path, target: Path) -> None:
    """Compile to ``target``, which appears whole: several processes may want it at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([needs_compiler(), *BUILD, *options, str(source), "-o", str(part)], check=True)
    part.replace(target)


def address(array: NDArray[Any] | None) -> int:
    return 0 if array is None else array.ctypes.data


def decode(
    library: ctypes.CDLL,
    launch: launches.Launch,
    plan: Plan,
    kind: str,
    pool: NDArray[np.uint8],
    numbers: NDArray[np.int32] | None,
    start: int,
    stop: int,
    out: NDArray[Any],
    status: NDArray[np.uint8],
    blocks: int = 3,
) -> None:
    """``dquant_decode`` on the host; ``out`` uint16 or float32 ``[stop - start, H, D]``, ``status`` ``[.., S]``."""
    arrays = tables.decode_arrays(plan, getattr(plan, kind))
    record = np.zeros(1, params.DECODE)
    record["pool"] = address(pool), address(numbers), pool.strides[0]
    record["tables"] = address(arrays.entries), address(arrays.advance)
    record["factors"], record["out"], record["status"] = address(arrays.factors), address(out), address(status)
    record["token_stride"] = out.strides[0] // out.itemsize
    record["head_stride"] = out.strides[1] // out.itemsize
    record["start"], record["stop"], record["at"] = start, stop, params.kind_layout(plan, kind)
    aligned = all(n % 16 == 0 for n in (address(out), *out.strides[:2]))
    record["vectors"] = aligned
    library.run_dquant_decode(
        ctypes.c_void_p(address(record)), blocks, launch.threads, ctypes.c_long(launch.shared_bytes)
    )


def encode(
    library: ctypes.CDLL,
    launch: launches.EncodeLaunches,
    plan: Plan,
    kind: str,
    rows: NDArray[Any],
    pool: NDArray[np.uint8],
    numbers: NDArray[np.int32] | None = None,
    ready: NDArray[np.int32] | None = None,
    blocks: int = 3,
) -> NDArray[np.uint8]:
    """The three encoding kernels on the host; ``rows`` uint16 or float32 ``[T, H, D]``.  Returns the statuses."""
    stream = getattr(plan, kind)
    arrays = tables.encode_arrays(plan, stream)
    scratch = np.full(blocks * launch.scratch_bytes, 0xEE, np.uint8)
    status = np.full(len(rows), 99, np.uint8)
    known = tables.encode_numbers(plan, stream)
    record = np.zeros(1, params.ENCODE)
    describe_rows(record, plan, kind, rows, pool, numbers, ready)
    record["factors"], record["codes"] = address(arrays.factors), address(arrays.codes)
    record["reciprocals"], record["status"] = address(arrays.reciprocals), address(status)
    record["scratch"], record["scratch_bytes"] = address(scratch), launch.scratch_bytes
    record["budget"] = known["budget"]
    for name in ("thresholds", "edges", "steps", "costs", "complete", "last_costs"):
        record["drift"][name] = address(getattr(arrays, name))
    for name in ("rungs", "columns", "cheapest"):
        record["drift"][name] = known[name]
    windows = int(record["windows"][0])
    for function, step, count in (
        (library.run_dquant_encode_head, launch.head, windows),
        (library.run_dquant_encode_means, launch.means, windows * plan.kv_heads),
        (library.run_dquant_encode, launch.tiles, blocks),
    ):
        if step is not None:
            function(ctypes.c_void_p(address(record)), count, step.threads, ctypes.c_long(step.shared_bytes))
    return status


def describe_rows(
    record: NDArray[Any],
    plan: Plan,
    kind: str,
    rows: NDArray[Any],
    pool: NDArray[np.uint8],
    numbers: NDArray[np.int32] | None,
    ready: NDArray[np.int32] | None,
) -> None:
    """What ``EncodeParams`` says of rows, pages and the plan's layout."""
    layout = PageLayout.of(plan)
    record["pool"] = address(pool), address(numbers), pool.strides[0]
    record["in"], record["tokens"], record["ready"] = address(rows), len(rows), address(ready)
    record["token_stride"] = rows.strides[0] // rows.itemsize
    record["head_stride"] = rows.strides[1] // rows.itemsize
    record["vectors"] = all(n % 16 == 0 for n in (address(rows), *rows.strides[:2]))
    record["windows"] = -(-len(rows) // plan.window)
    if ready is not None and numbers is not None:
        record["numbers_stride"] = numbers.shape[1]
    record["at"] = params.kind_layout(plan, kind)
    if kind == "key":
        record["clear_from"], record["clear_to"] = layout.used_head_bytes, layout.head_bytes


def encode_groups(
    folder: str,
    plan: Plan,
    kind: str,
    rows: NDArray[Any],
    pool: NDArray[np.uint8],
    numbers: NDArray[np.int32] | None = None,
    ready: NDArray[np.int32] | None = None,
    blocks: int = 2,
    shared: int = launches.SHARED_BYTES["sm_90"],
    warps: int = 4,
    element: str = "float16",
    backwards: bool = False,
) -> NDArray[np.uint8]:
    """The kernels of a grouped kind on the host, ``warps`` warps a block.  Returns the statuses."""
    stream = getattr(plan, kind)
    trellis = stream.grouping.states > 1
    arrays: Any = (trellis_tables.trellis_encode_arrays if trellis else group_tables.group_encode_arrays)(stream)
    launch = launches.group_launches(plan, kind, element, arrays, shared)
    assert bool(launch.scratch_bytes) == (launch.tokens.shared_bytes == 0)
    library = build(launch.tokens.options, folder, "encode_groups.cpp")
    record = np.zeros(1, params.TRELLIS_ENCODE if trellis else params.GROUP_ENCODE)
    status = np.full(len(rows), 99, np.uint8)
    warps = launch.tokens.warps if launch.scratch_bytes else min(warps, launch.tokens.warps)
    scratch = np.full(blocks * launch.scratch_bytes + 64, 0xEE, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 64 :]
    describe_rows(record["rows"], plan, kind, rows, pool, numbers, ready)
    record["rows"]["status"] = address(status)
    record["rows"]["scratch"], record["rows"]["scratch_bytes"] = address(scratch), launch.scratch_bytes
    held = [aligned(getattr(arrays, name)) for name in arrays.NAMES]
    for name, array in zip(arrays.NAMES, held):
        record["tables"][name] = address(array)
    for name, number in arrays.numbers(stream).items():
        record["tables"][name] = number
    record["tables"]["window_first"], record["tables"]["window_rungs"] = launch.first, launch.window
    at = ctypes.c_void_p(address(record))
    library.shared_bytes.restype = library.warp_bytes.restype = ctypes.c_long
    size = library.shared_bytes(at)
    assert library.warp_bytes(at) == arrays.warp_bytes(stream)
    if not launch.scratch_bytes:
        size += warps * arrays.warp_bytes(stream)
        more = (launch.tokens.warps - warps) * arrays.warp_bytes(stream)
        assert size + more == launch.tokens.shared_bytes
    windows = int(record["rows"]["windows"][0])
    library.set_backwards(backwards)
    for function, step, count, threads, memory in (
        (library.run_dquant_group_head, launch.head, windows, launch.head.threads, 16),
        (library.run_dquant_group_means, launch.means, -(-windows * plan.kv_heads // 8), 256, 0),
        (library.run_dquant_encode_groups, launch.tokens, blocks, 32 * warps, size),
    ):
        if step is not None:
            function(ctypes.c_void_p(address(record)), count, threads, ctypes.c_long(memory))
    library.set_backwards(False)
    return status


def aligned(array: NDArray[Any]) -> NDArray[Any]:
    """A copy that begins at a multiple of 64 bytes, as device memory does."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    copy = memory[-memory.ctypes.data % 64 :][: array.nbytes].view(array.dtype)
    copy[:] = array.reshape(-1)
    return copy


def aligned_pages(pages: Pages, poison: int = 0xA5) -> NDArray[np.uint8]:
    """The pages at a multiple of 64 bytes, with as much poison between them as a pool might hold."""
    count, size = pages.data.shape
    memory = np.full((count + 1) * (size + 64) + 64, poison, np.uint8)
    first = -memory.ctypes.data % 64
    pool = memory[first : first + count * (size + 64)].reshape(count, size + 64)[:, :size]
    pool[:] = pages.data
    return pool


def random_tokens(codec: Codec, tokens: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    shape = (2, tokens, codec.plan.kv_heads, codec.plan.head_dim)
    keys, values = np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
    return keys, values
