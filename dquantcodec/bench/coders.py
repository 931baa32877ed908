"""Our entropy coders alone, all on the same symbols."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import drift, letters
from ..coders import CODERS
from ..encode import lay_grid
from ..plan import Plan, make_plan
from ..profile import Profile, StreamProfile
from .work import Work

HEADS, HEAD_DIM = 8, 128
TOKENS = 2048


@lru_cache(maxsize=1)
def prefix_plan() -> Plan:
    """Eight levels on the paper's grid for every coder, so that all get the same symbols."""
    return make_plan(Profile(StreamProfile(8, 330, precision=13), StreamProfile(6, 230), substreams=2), HEADS, HEAD_DIM)


@lru_cache(maxsize=1)
def rans_plan() -> Plan:
    return make_plan(Profile.named("paper-2.26"), HEADS, HEAD_DIM)


def key_symbols(tokens: int = TOKENS) -> NDArray[np.uint8]:
    """Key symbols uint8 ``[tokens, 1024]`` of normal values, drifted into the containers of the prefix coder."""
    plan = prefix_plan()
    x = np.random.default_rng(1).standard_normal((tokens, plan.values), dtype=np.float32)
    _, _, position = lay_grid(x, plan.key)
    # A few bits to spare, so that no rANS stream overflows by its rounding and every coder gets the same symbols.
    budgets = np.full((tokens, plan.key.substreams), (8 * plan.key.container // plan.key.substreams - 24) * 1024)
    return drift.drift(position, plan.key, HEAD_DIM, budgets)[0]


def _words(symbols: NDArray[np.uint8], plan: Plan) -> tuple[Any, NDArray[Any], NDArray[Any]]:
    """The coder of ``plan``'s keys, the letters of ``symbols`` and their words, which must fit and come back."""
    stream = plan.key
    coder = CODERS[stream.coder]
    packed = letters.pack(symbols, stream, HEAD_DIM).reshape(len(symbols), stream.substreams, -1)
    words, used = coder.encode(packed, stream)
    assert (used <= stream.words).all()
    decoded, status = coder.decode(words, stream, HEAD_DIM, packed.shape[2])
    assert not status.any() and (decoded == symbols).all()
    return coder, packed, words


def coder_works(symbols: NDArray[np.uint8], plan: Plan) -> Iterator[Work]:
    """Decoding and encoding ``symbols`` on one thread."""
    coder, packed, words = _words(symbols, plan)
    stream = plan.key
    yield Work(
        "decode", lambda: coder.decode_levels(words, stream, HEAD_DIM, packed.shape[2]), symbols.size,
        note="any token alone in its tile of 32",
    )  # fmt: skip
    yield Work(
        "encode", lambda: coder.encode(letters.pack(symbols, stream, HEAD_DIM).reshape(packed.shape), stream),
        symbols.size, note="symbols to words, without drift",
    )  # fmt: skip


def threaded_decode(
    symbols: NDArray[np.uint8], plan: Plan, pool: ThreadPoolExecutor, threads: int, repeated: int = 1
) -> Work:
    """Decoding the tokens ``repeated`` times over on all cores: every thread takes a part of the tiles."""
    coder, packed, words = _words(symbols, plan)
    parts = np.array_split(np.concatenate([words] * repeated), min(threads, len(words)))

    def decode() -> None:
        list(pool.map(lambda part: coder.decode_levels(part, plan.key, HEAD_DIM, packed.shape[2]), parts))

    return Work("decode", decode, repeated * symbols.size)
