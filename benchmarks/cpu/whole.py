"""The codec as a whole: tensors to pages, pages to tensors, attention from pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dquantcodec import Codec
from dquantcodec.bench.codec import codec_works, copy_work, plan_for
from dquantcodec.bench.timing import Row, row

SECTION = "codec"
UNIT = "M values/s"
#: Profiles at n = 1024, each rotated where it can be, and with plans fitted to channels of unequal variance.
ROTATED = ("2.26", "paper-2.26", "paper-1.96")
FITTED = ("2.26", "1.96", "3.0", "2.26-t")
#: Small and large: one token, one page, narrow and wide streams, a long cache; heads, head_dim, tokens.
EDGES = ((8, 128, 1), (8, 128, 128), (1, 128, 2048), (3, 64, 2048), (64, 128, 512))


def geometry_rows(
    profile: str, heads: int, dim: int, tokens: int, counts: Sequence[int] = (1,), fitted: bool = False
) -> Iterator[Row]:
    """Encode, decode and attend on every number of threads; ``fitted``: in variance classes."""
    plan, keys, values = plan_for(profile, heads, dim, tokens, fitted)
    name = f"{profile}{', classes' if fitted else ''}, n = {heads * dim}, {tokens} tokens"
    for threads in counts:
        bits, works = codec_works(Codec(plan, threads=threads), keys, values)
        for work in works:
            yield row(
                SECTION, f"{name}: {work.name}", work.run, work.values / 1e6, UNIT, threads, bits, repeats=7,
                what=work.what,
            )  # fmt: skip


def copy_row(threads: int = 1) -> Row:
    work = copy_work(1 << 22, threads)
    return row(SECTION, work.name, work.run, work.values / 1e6, UNIT, threads, of="copy")


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
