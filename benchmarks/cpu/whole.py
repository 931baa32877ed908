"""The codec as a whole: tensors to pages, pages to tensors, attention from pages."""

from __future__ import annotations

from collections.abc import Iterator

from dquantcodec import Codec
from dquantcodec.bench.codec import codec_works, copy_work, plan_for
from dquantcodec.bench.timing import Row, row

SECTION = "codec"
UNIT = "M values/s"


def geometry_rows(profile: str, heads: int, dim: int, tokens: int, threads: int, fitted: bool = False) -> Iterator[Row]:
    """Encode, decode and attend ``tokens`` tokens of normal FP16 values; ``fitted``: classes of unequal channels."""
    plan, keys, values = plan_for(profile, heads, dim, tokens, fitted)
    bits, works = codec_works(Codec(plan, threads=threads), keys, values)
    what = f"{profile}{', classes' if fitted else ''}, n = {heads * dim}, {tokens} tokens"
    for work in works:
        yield row(SECTION, f"{what}: {work.name}", work.run, work.values / 1e6, UNIT, threads, bits, repeats=7)


def copy_row() -> Row:
    work = copy_work(1 << 22)
    return row(SECTION, work.name, work.run, work.values / 1e6, UNIT)


def rows() -> Iterator[Row]:
    yield copy_row()
    for profile in ("2.26", "1.96", "paper-2.26", "paper-1.96"):
        yield from geometry_rows(profile, 8, 128, 2048, 1)
    for profile in ("2.26", "1.96"):
        yield from geometry_rows(profile, 8, 128, 2048, 1, fitted=True)
    # Small and large: one token, one page, narrow and wide streams.
    for heads, dim, tokens in ((8, 128, 1), (8, 128, 128), (1, 128, 2048), (3, 64, 2048), (64, 128, 512)):
        yield from geometry_rows("2.26", heads, dim, tokens, 1)
