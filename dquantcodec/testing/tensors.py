"""Keys and values that make a codec of this sort fail, if anything does."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .pages import rotation

#: Kinds of tokens that :func:`hostile` builds.
HOSTILE = (
    "normal", "zeros", "equal", "alternating", "outlier", "denormal", "tiny", "huge", "mixed", "sparse", "spread",
    "impulse", "sink", "constant rows", "signed zeros", "largest",
)  # fmt: skip


def hostile(kind: str, tokens: int, heads: int, dim: int, seed: int, signs: NDArray[np.int8]) -> NDArray[np.float32]:
    """Finite float32 ``[tokens, heads, dim]`` of one of :data:`HOSTILE`; ``signs`` are those of the plan's rotation."""
    rng = np.random.default_rng(seed)
    shape = (tokens, heads, dim)
    x = rng.standard_normal(shape)
    index = np.arange(tokens * heads * dim).reshape(shape)
    if kind == "zeros":
        x = np.zeros(shape)
    elif kind == "signed zeros":
        x = np.where(rng.random(shape) < 0.5, -0.0, 0.0)
    elif kind == "equal":
        x = np.full(shape, rng.standard_normal())
    elif kind == "constant rows":
        x = np.broadcast_to(rng.standard_normal((tokens, 1, 1)) * 10.0 ** rng.integers(-6, 6, (tokens, 1, 1)), shape)
    elif kind == "alternating":
        x = np.where(index % 2, 300.0, -300.0)
    elif kind == "outlier":
        x[:, rng.integers(heads), rng.integers(dim)] = 500.0
    elif kind == "sink":
        # The first token of a model: a few channels far beyond everything that follows.
        x[0, :, rng.integers(dim)] = 3e4
    elif kind == "denormal":
        x = x * 1e-42
    elif kind == "tiny":
        x = x * 1e-40
    elif kind == "huge":
        x = np.clip(x / 3, -1, 1) * 3e38
    elif kind == "largest":
        x = np.where(rng.random(shape) < 0.5, -1.0, 1.0) * float(np.finfo(np.float32).max)
    elif kind == "mixed":
        x = x * 10.0 ** rng.integers(-30, 30, (tokens, 1, 1))
    elif kind == "sparse":
        x = np.where(rng.random(shape) < 0.02, x * 100, 0)
    elif kind == "spread":
        # Rotated back from two far-apart values: every rotated value is an outermost level.
        y = np.where(rng.random(shape) < 0.5, 10.0, -10.0)
        x = (y @ rotation(dim)) * signs
    elif kind == "impulse":
        y = np.zeros(shape)
        y[:, :, rng.integers(dim)] = 400.0
        x = (y @ rotation(dim)) * signs
    elif kind != "normal":
        raise ValueError(f"kinds are {HOSTILE}, not {kind!r}")
    return x.astype(np.float32)
