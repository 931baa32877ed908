"""FP16 and BF16 to and from FP32, at the speed of memory.

FP16 uses the processor's own conversion instructions through LLVM, which vectorises them; without such instructions
NumPy's (slower) conversion gives the same bits.  Rounding is to nearest, ties to even.
"""

from __future__ import annotations

import platform
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from .kernels import COMPILED, kernel

#: Without hardware support LLVM would call a runtime function that a just-in-time compiled kernel cannot find.
HARDWARE_HALF = COMPILED and (
    platform.machine() in ("arm64", "aarch64") or bool(llvm.get_host_cpu_features().get("f16c"))
)


def half_to_float(bits: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """FP16 bits to float32, exactly; both contiguous and of one shape."""
    if HARDWARE_HALF:
        widen_half(bits.reshape(-1), out.reshape(-1))
    else:
        out[...] = bits.view(np.float16)


def bfloat_to_float(bits: NDArray[np.uint16], out: NDArray[np.float32]) -> None:
    """BF16 bits to float32, exactly; both contiguous and of one shape."""
    widen_bfloat(bits.reshape(-1), out.reshape(-1).view(np.uint32))


def float_to_half(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """float32 to FP16 bits, both contiguous and of one shape; too large becomes infinity."""
    if HARDWARE_HALF:
        narrow_half(values.reshape(-1), out.reshape(-1))
        return
    with np.errstate(over="ignore"):
        out.view(np.float16)[...] = values


def float_to_bfloat(values: NDArray[np.float32], out: NDArray[np.uint16]) -> None:
    """float32 to BF16 bits, both contiguous and of one shape; of NaN only those that arithmetic makes."""
    narrow_bfloat(values.reshape(-1).view(np.uint32), out.reshape(-1))


@intrinsic
def _half_from_float(_context: Any, x: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@intrinsic
def _float_from_half(_context: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@kernel
def widen_half(bits, out):
    for i in range(out.shape[0]):
        out[i] = _float_from_half(bits[i])


@kernel
def widen_bfloat(bits, out):
    for i in range(out.shape[0]):
        out[i] = np.uint32(bits[i]) << np.uint32(16)


@kernel
def narrow_half(values, out):
    for i in range(out.shape[0]):
        out[i] = _half_from_float(values[i])


@kernel
def narrow_bfloat(bits, out):
    for i in range(out.shape[0]):
        b = bits[i]
        # A carry out of the mantissa rounds to the next power of two or to infinity, as it should.
        out[i] = np.uint16(np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel
def narrow_bits(values, out):
    """Stands where :func:`narrow_half` cannot be compiled; never called."""
    out[:] = 0
