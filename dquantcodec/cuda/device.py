"""CuPy, the device and its streams: what is missing said in one line, kernels loaded once.

CuPy is imported here and nowhere else, and only when a codec on a device is made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any

import numpy as np

from ..errors import DeviceError
from . import nvrtc
from .launches import Launch

#: Oldest architecture the kernels are compiled and tested for.
OLDEST = (8, 0)


@lru_cache(maxsize=1)
def cupy() -> Any:
    """The module CuPy, with at least one usable device.

    Raises :class:`DeviceError`: ``device-cupy`` or ``device-none``.
    """
    try:
        module = import_module("cupy")
    except ImportError as reason:
        raise DeviceError(
            "device='cuda' needs CuPy, which is not installed: pip install 'dquantcodec[gpu]'", code="device-cupy"
        ) from reason
    try:
        count = module.cuda.runtime.getDeviceCount()
    except Exception as reason:  # CuPy's own class, which cannot be named without CuPy
        raise DeviceError(f"device='cuda' needs an NVIDIA GPU and its driver: {reason}", code="device-none") from reason
    if count == 0:
        raise DeviceError("device='cuda' needs an NVIDIA GPU; the driver sees none", code="device-none")
    return module


@dataclass(frozen=True)
class Device:
    """One GPU: its number, architecture, multiprocessors and shared memory of each (bytes)."""

    number: int
    architecture: str
    multiprocessors: int
    shared_bytes: int

    @property
    def current(self) -> AbstractContextManager[Any]:
        """Makes this the current device."""
        device: AbstractContextManager[Any] = cupy().cuda.Device(self.number)
        return device


@lru_cache(maxsize=16)
def device(number: int) -> Device:
    """The device called ``number``.  Raises :class:`DeviceError` for one that is missing or too old."""
    runtime = cupy().cuda.runtime
    if not 0 <= number < runtime.getDeviceCount():
        raise DeviceError(
            f"there is no device {number}; the driver sees {runtime.getDeviceCount()}", code="device-number"
        )
    properties = runtime.getDeviceProperties(number)
    capability = properties["major"], properties["minor"]
    if capability < OLDEST:
        raise DeviceError(
            f"device {number} has compute capability {capability[0]}.{capability[1]}; "
            f"at least {OLDEST[0]}.{OLDEST[1]} is needed",
            code="device-old",
        )
    return Device(
        number=number,
        architecture=f"sm_{capability[0]}{capability[1]}",
        multiprocessors=properties["multiProcessorCount"],
        shared_bytes=properties["sharedMemPerMultiprocessor"],
    )


#: Shared memory asked for so far, by device, file and function.
_asked: dict[tuple[int, str, str], int] = {}
_lock = Lock()


class Kernel:
    """A launch specialised and loaded for one device."""

    def __init__(self, launch: Launch, on: Device, function: str) -> None:
        self.launch, self.on = launch, on
        # One at a time, so that threads that want the same machine code do not all make it.
        with on.current, _lock:
            path = nvrtc.cached_kernel(launch.name, launch.options, on.architecture)
            self.function = cupy().RawModule(path=str(path)).get_function(function)
            # Asked for once: the driver refuses more than 48 KB otherwise.  Plans that share machine code share what is
            # asked for, so it must never become less.
            key = on.number, str(path), function
            _asked[key] = max(_asked.get(key, 0), launch.shared_bytes)
            self.function.max_dynamic_shared_size_bytes = _asked[key]

    def __call__(self, blocks: int, record: np.ndarray[Any, Any]) -> None:
        """Launch ``blocks`` blocks on the current stream; ``record`` is the one parameter, passed by value."""
        self.function((blocks,), (self.launch.threads,), (record,), shared_mem=self.launch.shared_bytes)

    def fill(self, units: int) -> int:
        """Blocks for ``units`` of work, one a warp: no more than run at once."""
        most = self.on.multiprocessors * self.launch.residents
        return max(1, min(-(-units // self.launch.warps), most))


@lru_cache(maxsize=256)
def kernel(launch: Launch, on: Device, function: str) -> Kernel:
    """``function`` of a launch, loaded once in a process."""
    return Kernel(launch, on, function)


@dataclass(frozen=True)
class _Foreign:
    """A stream of another library by the CUDA stream protocol."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def stream_of(stream: Any, arrays: list[Any]) -> AbstractContextManager[Any]:
    """The stream to launch on, as a context: ``stream`` itself, else the current stream of the library that owns the
    first of ``arrays`` (PyTorch's), else CuPy's.

    ``stream`` is a CuPy stream, a PyTorch stream, anything with ``__cuda_stream__``, or an address.
    """
    if stream is None:
        owner = next((a for a in arrays if type(a).__module__.partition(".")[0] == "torch"), None)
        if owner is None:
            current: AbstractContextManager[Any] = cupy().cuda.get_current_stream()
            return current
        stream = import_module("torch").cuda.current_stream(owner.device)
    if isinstance(stream, int):
        stream = _Foreign(stream)
    elif not isinstance(stream, cupy().cuda.Stream) and hasattr(stream, "cuda_stream"):
        stream = _Foreign(int(stream.cuda_stream))
    if hasattr(stream, "__cuda_stream__") and not hasattr(stream, "__enter__"):
        stream = cupy().cuda.Stream.from_external(stream)
    entered: AbstractContextManager[Any] = stream
    return entered
