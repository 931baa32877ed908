"""Arrays of other libraries as NumPy arrays on the same memory: PyTorch, JAX, CuPy, anything with DLPack.

BF16 needs care of its own, because NumPy's DLPack does not know it: PyTorch's tensors are read as their bits, JAX's
arrays say by themselves what they are in NumPy.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import DeviceError, InputError

#: DLPack's numbers of memory that the CPU reads in place: the CPU's own, and what CUDA and ROCm pin there.
HOST_DEVICES = (1, 3, 11)


def to_numpy(array: Any, what: str) -> NDArray[Any]:
    """``array`` as a NumPy array, strides and all, without a copy where its library allows.

    Raises :class:`DeviceError` (``device-array``) for an array that is not in the CPU's memory and
    :class:`InputError` (``input-dtype``) for numbers that NumPy cannot name.
    """
    if isinstance(array, np.ndarray):
        return array
    if type(array).__module__.partition(".")[0] == "torch":
        return _from_torch(array, what)
    if not hasattr(array, "__dlpack_device__"):
        return np.asarray(array)
    kind, number = array.__dlpack_device__()
    if int(kind) not in HOST_DEVICES:
        raise _elsewhere(what, f"DLPack device ({int(kind)}, {int(number)})")
    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError):  # a type that NumPy's DLPack does not know
        if hasattr(array, "__array__"):
            return np.asarray(array)
        raise _unnamed(what, str(getattr(array, "dtype", type(array).__name__))) from None


def _from_torch(tensor: Any, what: str) -> NDArray[Any]:
    if tensor.device.type != "cpu":
        raise _elsewhere(what, str(tensor.device))
    if str(tensor.layout) != "torch.strided":
        raise InputError(f"{what} is a {tensor.layout} tensor; expected a dense one", code="input-layout", what=what)
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        import torch

        bits: NDArray[Any] = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    try:
        found: NDArray[Any] = tensor.numpy()
    except TypeError:
        raise _unnamed(what, str(tensor.dtype)) from None
    return found


def _elsewhere(what: str, place: str) -> DeviceError:
    return DeviceError(
        f"{what} lies on {place}; this codec reads the CPU's memory: move it there, or make the codec for the device",
        code="device-array",
        what=what,
    )


def _unnamed(what: str, dtype: str) -> InputError:
    return InputError(f"{what}: dtype {dtype}; expected float16, float32 or bfloat16", code="input-dtype", kind=what)
