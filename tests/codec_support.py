"""Codecs, tokens and pages for the tests of the codec."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dquantcodec.codec import Codec, Pages
from dquantcodec.profile import Profile


@lru_cache(maxsize=64)
def codec_of(profile: str | Profile, heads: int = 3, dim: int = 64, threads: int = 1) -> Codec:
    return Codec(profile, heads, dim, threads=threads)


def tensors(tokens: int, heads: int = 3, dim: int = 64, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, tokens, heads, dim)) + rng.standard_normal((2, 1, heads, dim))
    return x[0].astype(np.float32), x[1].astype(np.float32)


@lru_cache(maxsize=4)
def coded(profile: str, tokens: int) -> tuple[Codec, Pages, tuple[NDArray[Any], NDArray[Any]]]:
    codec = codec_of(profile)
    pages = codec.encode(*tensors(tokens))
    return codec, pages, codec.decode(pages)
