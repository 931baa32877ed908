"""turbo-attn, the package itself (``tkv.TkvCodec``, PyTorch on the CPU): a packaged TurboQuant with Hadamard rotation.

Stored: the bytes of the arrays it returns, packed codes and a BF16 norm per head, for keys by ``compress_k`` and for
values by ``compress_v``.  Constants: its built-in codebooks and rotation.  Not used: the calibrated scales, codebooks
and rotations that its serving path loads.

    pip install torch && pip install --no-deps turbo-attn
"""

from __future__ import annotations

from functools import lru_cache, partial
from importlib import import_module
from typing import Any

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

SOURCE = "turbo-attn (PyPI), TkvCodec without calibration"
BITS = (2, 3, 4)


@lru_cache(maxsize=16)
def codec(bits: int, dim: int) -> Any:
    return import_module("tkv").TkvCodec(head_dim=dim, bit_width=bits)


def code_kind(x: NDArray[np.float32], bits: int, kind: str) -> tuple[NDArray[np.float32], int]:
    """Round trip of ``x`` ``[T, H, D]`` as keys (``kind="k"``) or values (``"v"``), and the bytes of its arrays."""
    torch = import_module("torch")
    tkv = codec(bits, x.shape[2])
    arrays = getattr(tkv, f"compress_{kind}")(torch.from_numpy(np.ascontiguousarray(x)))
    restored = getattr(tkv, f"decompress_{kind}")(*arrays).numpy()
    return restored.reshape(x.shape), sum(a.numel() * a.element_size() for a in arrays)


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, bits: int) -> Coded:
    coded_keys, key_bytes = code_kind(keys, bits, "k")
    coded_values, value_bytes = code_kind(values, bits, "v")
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    """Empty, with a message, where the package or PyTorch is missing."""
    try:
        import_module("torch")
        import_module("tkv")
    except ImportError as error:
        print(f"(turbo-attn is skipped: {error})")
        return []
    return [Method(f"turbo-attn {bits} bits", "turbo-attn", SOURCE, partial(code, bits=bits)) for bits in BITS]
