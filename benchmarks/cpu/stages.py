"""Where the time goes: every stage of the codec alone, on one page of FP16 values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dquantcodec import Codec, attend, drift, fit_plan, group_prefix, means
from dquantcodec.arrays import store_float32, to_float32
from dquantcodec.bench.timing import Row, row
from dquantcodec.coders import CODERS
from dquantcodec.decode import decode_levels
from dquantcodec.encode import Room, drift_groups, encode_pages, fit_grid, lay_grid, page_magnitudes
from dquantcodec.group_grid import fit_scale
from dquantcodec.letters import pack
from dquantcodec.page import read_kind
from dquantcodec.reconstruct import reconstruct
from dquantcodec.rotate import rotate

SECTION = "stage"
HEADS, DIM, TOKENS, GROUP = 8, 128, 128, 4


Stage = tuple[str, int, Callable[[], object]]

#: After a profile's name: with variance classes, fitted to channels of unequal variance.
CLASSES = " classes"
OCTAVES = 5


def stages(profile: str) -> Iterator[Stage]:
    """Name, values, and work of every stage, one page of keys or values (of both for the last four)."""
    if profile.endswith(CLASSES):
        yield from grouped_stages(profile.removesuffix(CLASSES))
        return
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
    yield "check for NaN", n, lambda: page_magnitudes(x, plan.window)
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
        yield (
            f"{kind}: all of encoding",
            n,
            lambda s=stream: list(encode_pages(x.copy(), plan, s, page_magnitudes(x, plan.window), Room())),
        )
        yield f"{kind}: fields out of the page", n, lambda k=kind: read_kind(pages.data[:1], plan, k, slice(0, 4))
        yield f"{kind}: {stream.coder} decode to levels", n, lambda f=fields, s=stream: decode_levels(f, plan, s)
        parts.append(attend.Levels.of(fields, levels, slice(0, TOKENS), stream))
        yield f"{kind}: levels to FP32", n, lambda f=fields, m=levels, s=stream: reconstruct(f, m, plan, s)
    yield "FP32 to FP16", n, lambda: store_float32(x, half)
    attention = f"attention from levels, {GROUP} queries a KV head"
    yield attention, 2 * n, lambda: attend.over_levels(problem, *parts)
    yield "encode a page", 2 * n, lambda: codec.encode(half, half)
    yield "decode a page to FP16", 2 * n, lambda: codec.decode(pages, dtype=np.float16)
    yield f"attend to a page, {GROUP} queries a KV head", 2 * n, lambda: codec.attend(query, pages)


def grouped_stages(profile: str) -> Iterator[Stage]:
    """The stages that a plan with variance classes has of its own, and the whole."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, TOKENS, HEADS, DIM), dtype=np.float32)
    x *= np.exp2(OCTAVES * (rng.random((2, 1, HEADS, DIM), dtype=np.float32) - np.float32(0.5)))
    half = x.astype(np.float16)
    plan = fit_plan(profile, *half)
    codec = Codec(plan)
    pages = codec.encode(*half)
    n = x[0].size
    yield "fit a plan", 2 * n, lambda: fit_plan(profile, *half)
    for kind, values in zip(("key", "value"), x):
        stream = getattr(plan, kind)
        flat = values.reshape(TOKENS, -1)
        _, scale, position = lay_grid(flat, stream)
        letters, levels = drift_groups(position, stream)
        fields = read_kind(pages.data[:1], plan, kind, slice(0, codec.layout.tiles))
        decoded, _ = decode_levels(fields, plan, stream)

        yield f"{kind}: grid and positions", n, lambda f=flat, s=stream: lay_grid(f, s)
        yield f"{kind}: drift to letters", n, lambda p=position, s=stream: drift_groups(p, s)
        yield (
            f"{kind}: refit", n,
            lambda p=position, m=levels, c=scale, s=stream: fit_scale(p, m, c, s.grouping, s.gain == "unbiased"),
        )  # fmt: skip
        yield f"{kind}: prefix encode", n, lambda m=letters, s=stream: group_prefix.encode(m, s)
        yield (
            f"{kind}: all of encoding",
            n,
            lambda v=values, s=stream: list(encode_pages(v.copy(), plan, s, page_magnitudes(v, plan.window), Room())),
        )
        yield f"{kind}: prefix decode to levels", n, lambda f=fields, s=stream: decode_levels(f, plan, s)
        yield f"{kind}: levels to FP32", n, lambda f=fields, m=decoded, s=stream: reconstruct(f, m, plan, s)
    query = rng.standard_normal((GROUP * HEADS, DIM), dtype=np.float32)
    yield "encode a page", 2 * n, lambda: codec.encode(*half)
    yield "decode a page to FP16", 2 * n, lambda: codec.decode(pages, dtype=np.float16)
    yield f"attend to a page, {GROUP} queries a KV head", 2 * n, lambda: codec.attend(query, pages)


def rows(profile: str = "2.26") -> Iterator[Row]:
    for name, values, work in stages(profile):
        yield row(SECTION, f"{profile}: {name}", work, values / 1e6, "M values/s", repeats=7, least_seconds=0.03)
