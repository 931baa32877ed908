"""Where the time goes: every stage of the codec alone, on one page of FP16 values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from timing import Row, row

from dquantcodec import Codec, attend, drift, means
from dquantcodec.arrays import check_finite, store_float32, to_float32
from dquantcodec.codec import decode_levels
from dquantcodec.coders import CODERS
from dquantcodec.encode import encode_pages, fit_grid, lay_grid
from dquantcodec.letters import letter_table, pack
from dquantcodec.page import read_kind
from dquantcodec.reconstruct import reconstruct
from dquantcodec.rotate import rotate

SECTION = "stage"
HEADS, DIM, TOKENS, GROUP = 8, 128, 128, 4


def rows(profile: str = "2.26") -> Iterator[Row]:
    codec = Codec(profile, HEADS, DIM)
    plan = codec.plan
    half = np.random.default_rng(0).standard_normal((TOKENS, HEADS, DIM), dtype=np.float32).astype(np.float16)
    x = to_float32(half)
    turned = rotate(x, plan.signs)
    flat = turned.reshape(TOKENS, -1)
    amount = x.size / 1e6

    def one(name: str, work: object) -> Row:
        return row(SECTION, f"{profile}: {name}", work, amount, "M values/s", repeats=7, least_seconds=0.03)

    yield one("FP16 to FP32", lambda: to_float32(half))
    yield one("check for NaN", lambda: check_finite(x, "key", 0))
    yield one("rotate", lambda: rotate(x, plan.signs))
    yield one("key means", lambda: means.window_means(turned))
    pages = codec.encode(half, half)
    query = np.random.default_rng(1).standard_normal((GROUP * HEADS, DIM), dtype=np.float32)
    problem = attend.Problem.of(query, plan, None)
    parts = []
    for kind in ("key", "value"):
        stream = getattr(plan, kind)
        coder = CODERS[stream.coder]
        offset, scale, position = lay_grid(flat, stream)
        symbols, _ = drift.drift(position, stream, DIM)
        letters = pack(symbols, stream, DIM).reshape(TOKENS, stream.substreams, -1)
        yield one(f"{kind}: grid and positions", lambda s=stream: lay_grid(flat, s))
        yield one(f"{kind}: drift", lambda s=stream, p=position: drift.drift(p, s, DIM))
        yield one(f"{kind}: refit", lambda p=position, m=symbols, o=offset, c=scale, s=stream: fit_grid(p, m, o, c, s))
        yield one(f"{kind}: letters", lambda s=stream, m=symbols: pack(m, s, DIM))
        yield one(f"{kind}: {stream.coder} encode", lambda s=stream, w=letters, c=coder: c.encode(w, s))
        yield one(f"{kind}: all of encoding", lambda s=stream: list(encode_pages(x, plan, s)))
        fields = read_kind(pages.data[:1], plan, kind, slice(0, codec.layout.tiles))
        levels, _ = decode_levels(fields, plan, stream)
        count = plan.kv_heads // stream.substreams * letter_table(stream, DIM).per_head
        yield one(f"{kind}: fields out of the page", lambda k=kind: read_kind(pages.data[:1], plan, k, slice(0, 4)))
        yield one(
            f"{kind}: {stream.coder} decode to levels",
            lambda f=fields, s=stream, c=coder, n=count: c.decode_levels(f.words, s, DIM, n),
        )
        yield one(f"{kind}: levels to FP32", lambda f=fields, m=levels, s=stream: reconstruct(f, m, plan, s))
        parts.append(attend.Levels.of(fields, levels, slice(0, TOKENS), stream.levels))
    yield one("FP32 to FP16", lambda: store_float32(x, half))
    yield row(
        SECTION, f"{profile}: attention from levels, {GROUP} queries a KV head",
        lambda: attend.over_levels(problem, *parts), 2 * amount, "M values/s", repeats=7, least_seconds=0.03,
    )  # fmt: skip
