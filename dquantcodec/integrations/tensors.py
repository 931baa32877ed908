"""NumPy arrays as PyTorch tensors on the same memory, BF16 included; the other way is :mod:`dquantcodec.foreign`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

#: NumPy's types by PyTorch's.
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
}


def as_torch(array: NDArray[Any]) -> torch.Tensor:
    """``array`` as a tensor that shares its memory; it must be writable and have no negative strides.

    >>> as_torch(np.zeros((2, 3), ml_dtypes.bfloat16)).dtype
    torch.bfloat16
    """
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
