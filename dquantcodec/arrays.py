"""Arrays from outside: accepted dtypes, BF16, and the checks every public function makes before a kernel runs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from .errors import InputError
from .foreign import to_numpy

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float16), np.dtype(np.float32), BFLOAT16)


def as_tensor(array: ArrayLike | Any, kind: str, kv_heads: int, head_dim: int) -> NDArray[Any]:
    """``array`` as a NumPy array ``[T, kv_heads, head_dim]`` of float16, float32 or bfloat16, without a copy.

    A uint16 array is taken as the bits of bfloat16; for arrays of other libraries see :mod:`dquantcodec.foreign`.
    """
    tensor = as_floats(array, kind)
    if tensor.ndim != 3 or tensor.shape[1:] != (kv_heads, head_dim):
        raise InputError(
            f"{kind}s have shape {tensor.shape}; expected [tokens, {kv_heads}, {head_dim}]",
            code="input-shape",
            kind=kind,
        )
    return tensor


def as_tensors(
    keys: ArrayLike | Any, values: ArrayLike | Any, kv_heads: int, head_dim: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Keys and values of the same tokens, each as :func:`as_tensor` gives it."""
    key, value = as_tensor(keys, "key", kv_heads, head_dim), as_tensor(values, "value", kv_heads, head_dim)
    if len(key) != len(value):
        raise InputError(f"{len(key)} tokens of keys but {len(value)} of values", code="input-shape", kind="value")
    return key, value


def as_floats(array: ArrayLike | Any, kind: str) -> NDArray[Any]:
    """``array`` as a NumPy array of float16, float32 or bfloat16 (uint16 means the bits of bfloat16)."""
    tensor = to_numpy(array, f"{kind}s" if kind in ("key", "value") else kind)
    if tensor.dtype == np.uint16:
        tensor = tensor.view(BFLOAT16)
    if tensor.dtype == np.float64:
        with np.errstate(over="ignore"):  # becomes infinite, and is refused as such with its place
            tensor = tensor.astype(np.float32)
    if tensor.dtype not in FLOATS:
        raise InputError(
            f"{kind}s have dtype {tensor.dtype}; expected float16, float32 or bfloat16", code="input-dtype", kind=kind
        )
    return tensor


def to_float32(tensor: NDArray[Any], out: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """A contiguous float32 copy, in ``out`` if it is given; exact for every accepted dtype."""
    from . import conversions  # brings Numba, which naming dtypes does not need

    if out is None:
        out = np.empty(tensor.shape, np.float32)
    if tensor.dtype == np.float32:
        out[...] = tensor
        return out
    bits = np.ascontiguousarray(tensor).view(np.uint16)
    widen = conversions.bfloat_to_float if tensor.dtype == BFLOAT16 else conversions.half_to_float
    widen(bits, out)
    return out


def store_float32(values: NDArray[np.float32], out: NDArray[Any]) -> None:
    """Round float32 ``values`` into ``out`` (to nearest, ties to even; beyond FP16 becomes infinity).

    Both are contiguous and of one shape; see :func:`check_dtype` for the dtypes.
    """
    from . import conversions

    if out.dtype == BFLOAT16:
        conversions.float_to_bfloat(values, out.view(np.uint16))
    elif out.dtype == np.float16:
        conversions.float_to_half(values, out.view(np.uint16))
    else:
        out[...] = values


def check_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """``dtype`` if values can be stored as it: one of :data:`FLOATS` or float64."""
    wanted = np.dtype(dtype)
    if wanted not in (*FLOATS, np.dtype(np.float64)):
        raise InputError(
            f"cannot decode to {wanted}; ask for float16, bfloat16, float32 or float64", code="input-dtype"
        )
    return wanted


def check_finite(values: NDArray[np.float32], kind: str, first_token: int) -> None:
    """Raise an :class:`InputError` that names the first NaN or infinity in float32 ``[T, H, D]``."""
    finite = np.isfinite(values)
    if finite.all():
        return
    token, head, channel = (int(i) for i in np.argwhere(~finite)[0])
    raise InputError(
        f"{kind} of token {first_token + token}, head {head}, channel {channel} is {values[token, head, channel]}; "
        "clean the tensor or choose what to put instead",
        code="input-nonfinite",
        kind=kind,
        token=first_token + token,
        head=head,
        channel=channel,
    )
