"""Entropy coders on the same symbols: ours, constriction, zstandard, and a plain copy of one byte per symbol."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard

from dquantcodec.bench.coders import TOKENS, coder_works, key_symbols, prefix_plan, rans_plan, threaded_decode
from dquantcodec.bench.timing import Row, row
from dquantcodec.plan import Plan
from dquantcodec.profile import TILE

SECTION = "coder"
PLANS = {"prefix": prefix_plan, "rans (paper-2.26)": rans_plan}


def ours(name: str, symbols: np.ndarray, plan: Plan) -> Iterator[Row]:
    what = f"ours {name}, containers of {plan.key.container} B"
    bits = 8 * plan.key.container / plan.values
    for work in coder_works(symbols, plan):
        yield row(
            SECTION, f"{what}: {work.name}", work.run, work.values / 1e9, "G symbols/s", bits=bits, note=work.note
        )  # fmt: skip


def thread_rows(threads: int) -> Iterator[Row]:
    """Our coders on all cores."""
    symbols = key_symbols()
    with ThreadPoolExecutor(threads) as pool:
        for name, plan in PLANS.items():
            work = threaded_decode(symbols, plan(), pool, threads)
            yield row(SECTION, f"ours {name}: {work.name}", work.run, work.values / 1e9, "G symbols/s", threads)


def constriction_rows(symbols: np.ndarray, levels: int) -> Iterator[Row]:
    try:
        import constriction
    except ImportError:
        return
    counts = np.bincount(symbols.reshape(-1), minlength=levels).astype(np.float64)
    model = constriction.stream.model.Categorical(counts / counts.sum(), perfect=False)
    tokens = symbols[:512].astype(np.int32)

    def encode() -> list[np.ndarray]:
        coded = []
        for token in tokens:
            coder = constriction.stream.stack.AnsCoder()
            coder.encode_reverse(token, model)
            coded.append(coder.get_compressed())
        return coded

    coded = encode()

    def decode() -> list[np.ndarray]:
        return [constriction.stream.stack.AnsCoder(c).decode(model, tokens.shape[1]) for c in coded]

    assert all((a == b).all() for a, b in zip(decode(), tokens, strict=True))
    bits = 32 * sum(len(c) for c in coded) / tokens.size
    yield row(
        SECTION,
        "constriction AnsCoder, one stream a token: decode",
        decode,
        tokens.size / 1e9,
        "G symbols/s",
        bits=bits,
    )
    yield row(
        SECTION,
        "constriction AnsCoder, one stream a token: encode",
        encode,
        tokens.size / 1e9,
        "G symbols/s",
        bits=bits,
    )


def zstd_rows(symbols: np.ndarray) -> Iterator[Row]:
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    nibbles = (symbols[:, 0::2] | symbols[:, 1::2] << 4).astype(np.uint8)
    whole = {"a byte a symbol": symbols.tobytes(), "two symbols a byte": nibbles.tobytes()}
    for name, raw in whole.items():
        frame = compressor.compress(raw)
        bits = 8 * len(frame) / symbols.size
        yield row(
            SECTION, f"zstd -1, one buffer, {name}: decode", lambda f=frame: decompressor.decompress(f),
            symbols.size / 1e9, "G symbols/s", bits=bits, note="no access to a token; pairs not taken apart",
        )  # fmt: skip
    per_token = {"a byte a symbol": symbols, "two symbols a byte": nibbles}
    for name, rows in per_token.items():
        raws = [r.tobytes() for r in rows[:512]]
        frames = [compressor.compress(r) for r in raws]
        count = 512 * symbols.shape[1]
        bits = 8 * sum(map(len, frames)) / count
        yield row(
            SECTION, f"zstd -1, one frame a token, {name}: decode",
            lambda f=frames: [decompressor.decompress(x) for x in f], count / 1e9, "G symbols/s", bits=bits,
        )  # fmt: skip
        yield row(
            SECTION, f"zstd -1, one frame a token, {name}: encode",
            lambda r=raws: [compressor.compress(x) for x in r], count / 1e9, "G symbols/s", bits=bits,
        )  # fmt: skip


def rows() -> Iterator[Row]:
    symbols = key_symbols()
    for name, plan in PLANS.items():
        yield from ours(name, symbols, plan())
    yield from constriction_rows(symbols, prefix_plan().key.levels)
    yield from zstd_rows(symbols)
    out = np.empty_like(symbols)
    yield row(SECTION, "memcpy, a byte a symbol", lambda: np.copyto(out, symbols), symbols.size / 1e9, "G symbols/s")
    assert TOKENS % TILE == 0
