"""Where the time goes: every stage of the codec alone, on one page of FP16 values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from timing import Row, row

from dquantcodec import Codec, attend, drift, means
from dquantcodec.arrays import check_finite, store_float32, to_float32
from dquantcodec.codec import decode_levels
from dquantcodec.coders import CODERS
from dquantcodec.encode import encode_pages, fit_grid, lay_grid
from dquantcodec.letters import pack
from dquantcodec.page import read_kind
from dquantcodec.reconstruct import reconstruct
from dquantcodec.rotate import rotate

SECTION = "stage"
HEADS, DIM, TOKENS, GROUP = 8, 128, 128, 4


def stages(profile: str) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, values, and work of every stage, one page of keys or values (of both for the last four)."""
    codec = Codec(profile, HEADS, DIM)
    plan = codec.plan
    half = np.random.default_rng(0).standard_normal((TOKENS, HEADS, DIM), dtype=np.float32).astype(np.float16)
    x = to_float32(half)
    turned = rotate(x, plan.signs)
    flat = turned.reshape(TOKENS, -1)
    n = x.size
    pages = codec.encode(half, half)
    query = np.random.default_rng(1).standard_normal((GROUP * HEADS, DIM), dtype=np.float32)
    problem = attend.Problem.of(query, plan, None)
    parts = []
    yield "FP16 to FP32", n, lambda: to_float32(half)
    yield "check for NaN", n, lambda: check_finite(x, "key", 0)
    yield "rotate", n, lambda: rotate(x, plan.signs)
    yield "key means", n, lambda: means.window_means(turned)
    for kind in ("key", "value"):
        stream = getattr(plan, kind)
        coder = CODERS[stream.coder]
        offset, scale, position = lay_grid(flat, stream)
        symbols, _ = drift.drift(position, stream, DIM)
        letters = pack(symbols, stream, DIM).reshape(TOKENS, stream.substreams, -1)
        fields = read_kind(pages.data[:1], plan, kind, slice(0, codec.layout.tiles))
        levels, _ = decode_levels(fields, plan, stream)

        yield f"{kind}: grid and positions", n, lambda s=stream: lay_grid(flat, s)
        yield f"{kind}: drift", n, lambda s=stream, p=position: drift.drift(p, s, DIM)
        yield (
            f"{kind}: refit", n,
            lambda p=position, m=symbols, o=offset, c=scale, s=stream: fit_grid(p, m, o, c, s),
        )  # fmt: skip
        yield f"{kind}: letters", n, lambda s=stream, m=symbols: pack(m, s, DIM)
        yield f"{kind}: {stream.coder} encode", n, lambda s=stream, w=letters, c=coder: c.encode(w, s)
        yield f"{kind}: all of encoding", n, lambda s=stream: list(encode_pages(x, plan, s))
        yield f"{kind}: fields out of the page", n, lambda k=kind: read_kind(pages.data[:1], plan, k, slice(0, 4))
        yield f"{kind}: {stream.coder} decode to levels", n, lambda f=fields, s=stream: decode_levels(f, plan, s)
        parts.append(attend.Levels.of(fields, levels, slice(0, TOKENS), stream.levels))
        yield f"{kind}: levels to FP32", n, lambda f=fields, m=levels, s=stream: reconstruct(f, m, plan, s)
    yield "FP32 to FP16", n, lambda: store_float32(x, half)
    attention = f"attention from levels, {GROUP} queries a KV head"
    yield attention, 2 * n, lambda: attend.over_levels(problem, *parts)
    yield "encode a page", 2 * n, lambda: codec.encode(half, half)
    yield "decode a page to FP16", 2 * n, lambda: codec.decode(pages, dtype=np.float16)
    yield f"attend to a page, {GROUP} queries a KV head", 2 * n, lambda: codec.attend(query, pages)


def rows(profile: str = "2.26") -> Iterator[Row]:
    for name, values, work in stages(profile):
        yield row(SECTION, f"{profile}: {name}", work, values / 1e6, "M values/s", repeats=7, least_seconds=0.03)
