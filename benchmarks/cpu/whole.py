"""The codec as a whole: tensors to pages, pages to tensors, attention from pages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from timing import Row, row

from dquantcodec import Codec, fit_plan
from dquantcodec.arrays import BFLOAT16

SECTION = "codec"
UNIT = "M values/s"
GROUP = 4


#: Standard deviations of channels are this many octaves apart at most, as in real keys.
OCTAVES = 5


def geometry_rows(profile: str, heads: int, dim: int, tokens: int, threads: int, fitted: bool = False) -> Iterator[Row]:
    """Encode, decode and attend ``tokens`` tokens of normal FP16 values; ``fitted``: classes of unequal channels."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, tokens, heads, dim), dtype=np.float32)
    if fitted:
        x *= np.exp2(OCTAVES * (rng.random((2, 1, heads, dim), dtype=np.float32) - np.float32(0.5)))
    keys, values = x.astype(np.float16)
    codec = (
        Codec(fit_plan(profile, keys, values), threads=threads)
        if fitted
        else Codec(profile, heads, dim, threads=threads)
    )
    pages = codec.encode(keys, values)
    amount = 2 * keys.size / 1e6
    bits = 8 * pages.nbytes / (2 * keys.size)
    query = np.random.default_rng(1).standard_normal((GROUP * heads, dim), dtype=np.float32)
    what = f"{profile}{', classes' if fitted else ''}, n = {heads * dim}, {tokens} tokens"

    def one(name: str, work: object) -> Row:
        return row(SECTION, f"{what}: {name}", work, amount, UNIT, threads, bits, repeats=7)

    yield one("encode FP16", lambda: codec.encode(keys, values))
    yield one("decode to FP16", lambda: codec.decode(pages, dtype=np.float16))
    yield one("decode to BF16", lambda: codec.decode(pages, dtype=BFLOAT16))
    yield one(f"attend, {GROUP} queries a KV head", lambda: codec.attend(query, pages))


def copy_row() -> Row:
    """What moving FP16 values costs: the yardstick for decoding."""
    source = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).astype(np.float16)
    target = np.empty_like(source)
    return row(SECTION, "memcpy of FP16 values", lambda: np.copyto(target, source), source.size / 1e6, UNIT)


def rows() -> Iterator[Row]:
    yield copy_row()
    for profile in ("2.26", "1.96", "paper-2.26", "paper-1.96"):
        yield from geometry_rows(profile, 8, 128, 2048, 1)
    for profile in ("2.26", "1.96"):
        yield from geometry_rows(profile, 8, 128, 2048, 1, fitted=True)
    # Small and large: one token, one page, narrow and wide streams.
    for heads, dim, tokens in ((8, 128, 1), (8, 128, 128), (1, 128, 2048), (3, 64, 2048), (64, 128, 512)):
        yield from geometry_rows("2.26", heads, dim, tokens, 1)
