"""Device code to machine code by NVRTC, called directly.

CuPy compiles with flushed denormals, whatever it is asked for, and leaves included headers out of its cache's key.
Pages need exact denormals, so this module compiles, and CuPy loads the result.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import DeviceError
from ..kernels import cache_directory
from . import sources

#: Every operation rounds as on the CPU: no contraction, no flushed denormals, exact division and square root.
EXACT = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """NVRTC, from a CUDA installation or the package ``nvidia-cuda-nvrtc``."""
    try:
        loaded = import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc")
        nvrtc = ctypes.CDLL(loaded.abs_path)
    except Exception as reason:
        raise DeviceError(
            "compiling device code needs NVRTC: pip install 'dquantcodec[gpu]'", code="device-nvrtc"
        ) from reason
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    return nvrtc


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def _check(result: int, log: str = "") -> None:
    if result:
        reason = library().nvrtcGetErrorString(result).decode()
        raise DeviceError(f"device code does not compile: {reason}\n{log}".rstrip(), code="device-compile")


def _text(size: Any, content: Any, program: ctypes.c_void_p) -> bytes:
    length = ctypes.c_size_t()
    _check(size(program, ctypes.byref(length)))
    buffer = ctypes.create_string_buffer(max(1, length.value))
    _check(content(program, buffer))
    return buffer.raw[: length.value]


def compile_kernel(name: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Machine code (a cubin) of ``gpu/kernels/NAME.cu`` for ``architecture``, such as ``sm_90``.

    Raises :class:`DeviceError` with the compiler's messages.
    """
    nvrtc, headers = library(), sources.headers()
    count = len(headers)
    program = ctypes.c_void_p()
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            sources.kernel_source(name).encode(),
            f"{name}.cu".encode(),
            count,
            (ctypes.c_char_p * count)(*(text.encode() for text in headers.values())),
            (ctypes.c_char_p * count)(*(header.encode() for header in headers)),
        )
    )
    try:
        all_options = [*EXACT, f"--gpu-architecture={architecture}", *options]
        arguments = (ctypes.c_char_p * len(all_options))(*(option.encode() for option in all_options))
        result = nvrtc.nvrtcCompileProgram(program, len(all_options), arguments)
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode(errors="replace")
        _check(result, log.rstrip("\0"))
        return _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def cached_kernel(name: str, options: tuple[str, ...], architecture: str) -> Path:
    """A file with :func:`compile_kernel`'s result, keyed by everything it depends on, headers included."""
    digest = hashlib.sha256()
    parts = [sources.kernel_source(name), *EXACT, architecture, repr(version()), *options]
    for part in (*parts, *sources.headers(), *sources.headers().values()):
        digest.update(part.encode() + b"\0")
    file = Path(f"device-{name}-{architecture}-{digest.hexdigest()[:32]}.cubin")
    for folder in (cache_directory().parent, Path(tempfile.gettempdir())):
        path = folder / file
        if path.is_file():
            return path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Written under another name, so that no other process ever loads half a file.
            handle, written = tempfile.mkstemp(dir=folder, suffix=".part")
        except OSError:
            continue
        with os.fdopen(handle, "wb") as out:
            out.write(compile_kernel(name, options, architecture))
        Path(written).replace(path)
        return path
    raise DeviceError("no directory can be written for compiled device code", code="device-cache")
