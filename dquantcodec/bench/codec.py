"""The codec as a whole on the CPU: tensors to pages, pages to tensors, attention from pages; and plain copies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import BFLOAT16
from ..codec import Codec
from ..fit import fit_plan
from ..plan import Plan, make_plan
from ..profile import Profile
from .work import Work

#: Query heads of a KV head.
GROUP = 4
#: Standard deviations of channels are this many octaves apart at most, as in real keys.
OCTAVES = 5
#: A plan is fitted to so many tokens.
LEAST_FITTED, MOST_FITTED = 512, 2048


def normal_tokens(tokens: int, heads: int, dim: int, unequal: bool) -> NDArray[np.float16]:
    """Keys and values ``[2, tokens, heads, dim]``, normal; ``unequal``: channels of unequal variance."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, tokens, heads, dim), dtype=np.float32)
    if unequal:
        x *= np.exp2(OCTAVES * (rng.random((2, 1, heads, dim), dtype=np.float32) - np.float32(0.5)))
    return x.astype(np.float16)


def plan_for(
    profile: str, heads: int, dim: int, tokens: int, fitted: bool
) -> tuple[Plan, NDArray[np.float16], NDArray[np.float16]]:
    """A plan, and keys and values of ``tokens`` tokens; ``fitted``: variance classes, fitted to tokens like these."""
    x = normal_tokens(max(tokens, LEAST_FITTED) if fitted else tokens, heads, dim, fitted)
    keys, values = x[:, :tokens]
    if not fitted:
        return make_plan(Profile.named(profile), heads, dim), keys, values
    return fit_plan(profile, *x[:, :MOST_FITTED]), keys, values


def codec_works(codec: Codec, keys: NDArray[Any], values: NDArray[Any]) -> tuple[float, list[Work]]:
    """Bits a value of the pages, and what is done with the tokens and with their pages."""
    tokens, heads, dim = keys.shape
    pages = codec.encode(keys, values)
    amount = 2 * keys.size
    query = np.random.default_rng(1).standard_normal((GROUP * heads, dim), dtype=np.float32)
    note = f"{tokens} tokens"
    return 8 * pages.nbytes / amount, [
        Work("encode FP16", lambda: codec.encode(keys, values), amount, note=note),
        Work("decode to FP16", lambda: codec.decode(pages, dtype=np.float16), amount, note=note),
        Work("decode to BF16", lambda: codec.decode(pages, dtype=BFLOAT16), amount, note=note),
        Work(f"attend, {GROUP} queries a KV head", lambda: codec.attend(query, pages), amount, note=note),
    ]


def copy_work(values: int, threads: int = 1) -> Work:
    """What moving FP16 values costs: the yardstick for decoding.  Every thread copies a part."""
    source = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32).astype(np.float16)
    source = np.resize(source, values)
    target = np.empty_like(source)
    if threads == 1:
        return Work("memcpy of FP16 values", lambda: np.copyto(target, source), values, 2 * values)
    pool = ThreadPoolExecutor(threads)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads)))

    def run() -> None:
        list(pool.map(lambda part: np.copyto(*part), parts))

    return Work("memcpy of FP16 values", run, values, 2 * values)
