"""Arrays on a device from PyTorch, CuPy, JAX or anything with DLPack: addresses, strides and checks, never a copy."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ..errors import DeviceError, InputError
from .device import Device, cupy


@dataclass(frozen=True)
class View:
    """Where an array lies: ``strides`` count elements, ``dtype`` is a name, ``owner`` keeps it alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    owner: Any


def is_torch(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "torch"


def view(array: Any, what: str, on: Device) -> View:
    """``array`` as it lies on device ``on``.

    Raises :class:`DeviceError` for an array elsewhere.  PyTorch's tensors are read directly, because DLPack would
    make streams wait for one another, which breaks the capture of a graph.
    """
    if is_torch(array):
        if array.device.type != "cuda" or array.device.index != on.number:
            raise _elsewhere(what, str(array.device), on)
        name = str(array.dtype).removeprefix("torch.")
        return View(
            array.data_ptr(), tuple(array.shape), tuple(array.stride()), name, array.element_size(), array.detach()
        )
    if not isinstance(array, cupy().ndarray):
        if not hasattr(array, "__dlpack_device__"):
            raise DeviceError(
                f"{what} is a {type(array).__name__}; expected an array on a GPU", code="device-array", what=what
            )
        kind, number = array.__dlpack_device__()
        if int(kind) != 2 or int(number) != on.number:
            raise _elsewhere(what, f"DLPack device ({int(kind)}, {int(number)})", on)
        array = cupy().from_dlpack(array)
    if array.device.id != on.number:
        raise _elsewhere(what, f"device {array.device.id}", on)
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return View(array.data.ptr, array.shape, strides, array.dtype.name, array.itemsize, array)


def _elsewhere(what: str, place: str, on: Device) -> DeviceError:
    return DeviceError(
        f"{what} lies on {place}; this codec works on device {on.number}", code="device-array", what=what
    )


def rows(array: Any, what: str, shape: tuple[int | None, int, int], dtypes: tuple[str, ...], on: Device) -> View:
    """``array`` as rows ``[tokens, H, D]`` of one of ``dtypes``; any strides, but channels next to each other.

    uint16 is taken as the bits of bfloat16, as on the CPU.
    """
    found = view(array, what, on)
    wanted = [str(n) if n is not None else "tokens" for n in shape]
    if len(found.shape) != 3 or any(n is not None and n != m for n, m in zip(shape, found.shape)):
        raise InputError(f"{what} has shape {list(found.shape)}; expected [{', '.join(wanted)}]", code="input-shape")
    if found.dtype == "uint16":
        found = View(found.address, found.shape, found.strides, "bfloat16", 2, found.owner)
    if found.dtype not in dtypes:
        raise InputError(f"{what} has dtype {found.dtype}; expected {', '.join(dtypes)}", code="input-dtype")
    if found.shape[2] > 1 and found.shape[0] and found.strides[2] != 1:
        raise InputError(
            f"channels of {what} are {found.strides[2]} elements apart; expected next to each other",
            code="input-stride",
        )
    return found


def flat(array: Any, what: str, shape: tuple[int, ...], dtype: str, on: Device) -> View:
    """``array`` as a contiguous array of exactly this shape and dtype."""
    found = view(array, what, on)
    if found.shape != shape or found.dtype != dtype:
        raise InputError(
            f"{what} is {found.dtype} {list(found.shape)}; expected {dtype} {list(shape)}", code="input-shape"
        )
    step = 1
    if 0 in found.shape:
        return found
    for length, stride in zip(reversed(found.shape), reversed(found.strides)):
        if length > 1 and stride != step:
            raise InputError(f"{what} is not contiguous", code="input-stride")
        step *= length
    return found


def empty(like: Any, shape: tuple[int, ...], dtype: str, on: Device) -> Any:
    """A new array of the library that ``like`` comes from (PyTorch, else CuPy), on the current stream."""
    if is_torch(like):
        torch = import_module("torch")
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if dtype == "bfloat16":
        import ml_dtypes

        return cupy().empty(shape, ml_dtypes.bfloat16)
    return cupy().empty(shape, dtype)


def host(array: Any) -> Any:
    """A NumPy copy, after everything before it on the current stream; of bfloat16 tensors the bits, as uint16."""
    if is_torch(array):
        if str(array.dtype) == "torch.bfloat16":
            array = array.view(import_module("torch").uint16)
        return array.cpu().numpy()
    return cupy().asnumpy(array)
