"""Names of element types: the three a codec takes, and what containers of tensors call them."""

from __future__ import annotations

from typing import Any

import numpy as np

#: Element types of keys and values, and their bytes.
FLOATS = {"bfloat16": 2, "float16": 2, "float32": 4}

_SAFETENSORS = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "U16": "uint16",
    "I16": "int16",
    "U8": "uint8",
    "I8": "int8",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "BOOL": "bool",
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of ``name``; ``bfloat16`` comes from ml_dtypes, imported only when it is needed."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def from_safetensors(code: str) -> str:
    """``"BF16"`` -> ``"bfloat16"``; a code without a NumPy name stays as it is, in lower case."""
    return _SAFETENSORS.get(code, code.lower())


def to_safetensors(name: str) -> str:
    """``"bfloat16"`` -> ``"BF16"``."""
    return next(code for code, known in _SAFETENSORS.items() if known == name)


def from_numpy(dtype: np.dtype[Any]) -> str:
    """The name of a dtype found in an ``.npy`` header.

    ``np.save`` stores bfloat16 as two untyped bytes (``V2``), so those are taken as bfloat16: nothing else is saved so.
    """
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None and dtype.subdtype is None:
        return "bfloat16"
    return dtype.newbyteorder("=").name if dtype.kind in "fiub" else str(dtype)
