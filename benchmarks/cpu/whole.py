"""The codec as a whole: tensors to pages, pages to tensors, attention from pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from timing import Row, row

from dquantcodec import Codec, fit_plan
from dquantcodec.arrays import BFLOAT16

SECTION = "codec"
UNIT = "M values/s"
GROUP = 4
#: Profiles at n = 1024, each rotated where it can be, and with plans fitted to channels of unequal variance.
ROTATED = ("2.26", "paper-2.26", "paper-1.96")
FITTED = ("2.26", "1.96", "3.0", "2.26-t")
#: Small and large: one token, one page, narrow and wide streams, a long cache; heads, head_dim, tokens.
EDGES = ((8, 128, 1), (8, 128, 128), (1, 128, 2048), (3, 64, 2048), (64, 128, 512))

#: Standard deviations of channels are this many octaves apart at most, as in real keys.
OCTAVES = 5


def tensors(heads: int, dim: int, tokens: int, fitted: bool) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Normal keys and values FP16 ``[tokens, heads, dim]``; ``fitted``: of channels of unequal variance."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, tokens, heads, dim), dtype=np.float32)
    if fitted:
        x *= np.exp2(OCTAVES * (rng.random((2, 1, heads, dim), dtype=np.float32) - np.float32(0.5)))
    keys, values = x.astype(np.float16)
    return keys, values


def geometry_rows(
    profile: str, heads: int, dim: int, tokens: int, counts: Sequence[int] = (1,), fitted: bool = False
) -> Iterator[Row]:
    """Encode, decode and attend on every number of threads; ``fitted``: in variance classes."""
    keys, values = tensors(heads, dim, tokens, fitted)
    plan = fit_plan(profile, *tensors(heads, dim, max(tokens, 512), fitted)) if fitted else None
    amount = 2 * keys.size / 1e6
    query = np.random.default_rng(1).standard_normal((GROUP * heads, dim), dtype=np.float32)
    name = f"{profile}{', classes' if fitted else ''}, n = {heads * dim}, {tokens} tokens"
    for threads in counts:
        codec = Codec(plan, threads=threads) if plan else Codec(profile, heads, dim, threads=threads)
        pages = codec.encode(keys, values)
        bits = 8 * pages.nbytes / (2 * keys.size)

        def one(
            what: str, details: str, work: object, name: str = name, threads: int = threads, bits: float = bits
        ) -> Row:
            return row(SECTION, f"{name}: {what}{details}", work, amount, UNIT, threads, bits, repeats=7, what=what)

        yield one("encode", " FP16", lambda c=codec: c.encode(keys, values))
        yield one("decode", " to FP16", lambda c=codec, p=pages: c.decode(p, dtype=np.float16))
        if len(counts) == 1:
            yield one("decode", " to BF16", lambda c=codec, p=pages: c.decode(p, dtype=BFLOAT16))
        yield one("attend", f", {GROUP} queries a KV head", lambda c=codec, p=pages: c.attend(query, p))


def copy_row(threads: int = 1) -> Row:
    """What moving FP16 values costs: the yardstick for decoding."""
    source = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32).astype(np.float16)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads)))
    with ThreadPoolExecutor(threads) as pool:
        work = (lambda: list(pool.map(np.copyto, *zip(*parts)))) if threads > 1 else lambda: np.copyto(target, source)
        return row(SECTION, "memcpy of FP16 values", work, source.size / 1e6, UNIT, threads, of="copy")


def rows() -> Iterator[Row]:
    yield copy_row()
    for profile in FITTED:
        yield from geometry_rows(profile, 8, 128, 2048, fitted=True)
    for profile in ROTATED:
        yield from geometry_rows(profile, 8, 128, 2048)
    for edge in EDGES:
        yield from geometry_rows("2.26", *edge, fitted=True)


def thread_rows(counts: Sequence[int]) -> Iterator[Row]:
    """On several threads, and on one for comparison: the same work, and enough of it for all."""
    for threads in counts:
        if threads > 1:
            yield copy_row(threads)
    yield from geometry_rows("2.26", 8, 128, 8192, counts, fitted=True)
    yield from geometry_rows("2.26", 8, 128, 8192, counts)
    yield from geometry_rows("2.26-t", 8, 128, 4096, counts, fitted=True)
