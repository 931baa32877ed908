"""TurboQuant for squared error (Zandieh et al., ICLR 2026, arXiv 2504.19874): norm, random rotation, Lloyd-Max.

Every head of a token is divided by its norm and turned by one random orthogonal matrix; then each coordinate is
distributed like one of a uniform point on the sphere and is rounded to the best scalar codebook for that density.
Stored: codes and one FP16 norm per head.  Constants: the matrix (from a seed) and the codebook of each head size.

Left out: the inner-product variant with its extra sign bits, and the fractional rates that give outlier channels more
bits.  Values are coded like keys.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import numpy as np
from method import Coded, Method
from numpy.typing import NDArray

SOURCE = "TurboQuant (MSE), arXiv 2504.19874; own code, without its outlier channels"
NORM_BYTES = 2

_POINTS = 1 << 16
_ITERATIONS = 5000
_SHIFT = 1e-9


@lru_cache(maxsize=32)
def codebook(bits: int, dim: int) -> NDArray[np.float32]:
    """Lloyd-Max levels ``[2**bits]``, ascending, of a coordinate of a uniform point on the sphere of ``dim`` axes.

    The density is proportional to ``(1 - x**2)**((dim - 3) / 2)``.  Lloyd's iteration runs on tabulated integrals of
    the density and of its first moment, in units of the standard deviation ``1 / sqrt(dim)``.
    """
    widest = min(math.sqrt(dim), 10.0)
    y = np.linspace(-widest, widest, _POINTS + 1)
    inside = np.clip(1 - y**2 / dim, 0, None)
    density = inside ** ((dim - 3) / 2)
    step = y[1] - y[0]

    def integral(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2) * step])

    mass, first = integral(density), integral(density * y)
    levels = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass / mass[-1], y)
    for _ in range(_ITERATIONS):
        bounds = np.concatenate([[-widest], (levels[1:] + levels[:-1]) / 2, [widest]])
        moved = np.diff(np.interp(bounds, y, first)) / np.diff(np.interp(bounds, y, mass))
        shift = float(np.abs(moved - levels).max())
        levels = moved
        if shift < _SHIFT:
            break
    return (levels / math.sqrt(dim)).astype(np.float32)


@lru_cache(maxsize=32)
def random_rotation(dim: int, seed: int = 0x54517561) -> NDArray[np.float32]:
    """A uniformly random orthogonal matrix ``[dim, dim]``: QR of a Gaussian matrix, signs of the diagonal fixed.

    The seed is one that nobody picks: data from the same generator and seed would come out triangular.
    """
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    return np.asarray(q * np.sign(np.diag(r)), np.float32)


def code_heads(x: NDArray[np.float32], bits: int) -> tuple[NDArray[np.float32], float]:
    """Round trip of ``x`` ``[T, H, D]``, and its bytes; codes are counted without padding to words."""
    dim = x.shape[2]
    rotation, levels = random_rotation(dim), codebook(bits, dim)
    norm = np.linalg.norm(x, axis=2, keepdims=True).astype(np.float32)
    unit = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0) @ rotation.T
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit)
    kept = norm.astype(np.float16).astype(np.float32)
    return kept * (levels[codes] @ rotation), x.size * bits / 8 + norm.size * NORM_BYTES


def code(keys: NDArray[np.float32], values: NDArray[np.float32], *, bits: int) -> Coded:
    coded_keys, key_bytes = code_heads(keys, bits)
    coded_values, value_bytes = code_heads(values, bits)
    return Coded(coded_keys, coded_values, key_bytes, value_bytes)


def methods() -> list[Method]:
    return [Method(f"TurboQuant {bits} bits", "TurboQuant", SOURCE, partial(code, bits=bits)) for bits in (2, 3, 4)]
