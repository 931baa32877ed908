"""Entropy coders on the same symbols: ours, constriction, zstandard, and a plain copy of one byte per symbol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import zstandard
from timing import Row, row

from dquantcodec import Profile, StreamProfile, drift, letters
from dquantcodec.coders import CODERS
from dquantcodec.encode import lay_grid
from dquantcodec.plan import make_plan
from dquantcodec.profile import TILE

HEADS, HEAD_DIM = 8, 128
TOKENS = 2048
#: Times the tokens are decoded when threads share them, so that each has work for a while.
REPEATED = 8
SECTION = "coder"
#: Eight levels on the paper's grid for every coder, so that all get the same symbols.
PREFIX_PLAN = make_plan(
    Profile(StreamProfile(8, 330, precision=13), StreamProfile(6, 230), substreams=2), HEADS, HEAD_DIM
)
RANS_PLAN = make_plan(Profile.named("paper-2.26"), HEADS, HEAD_DIM)


def key_symbols() -> np.ndarray:
    """Key symbols uint8 ``[TOKENS, 1024]`` of normal values, drifted into the containers of the prefix coder."""
    plan = PREFIX_PLAN
    x = np.random.default_rng(1).standard_normal((TOKENS, plan.values), dtype=np.float32)
    _, _, position = lay_grid(x, plan.key)
    # A few bits to spare, so that no rANS stream overflows by its rounding and every coder gets the same symbols.
    budgets = np.full((TOKENS, plan.key.substreams), (8 * plan.key.container // plan.key.substreams - 24) * 1024)
    return drift.drift(position, plan.key, HEAD_DIM, budgets)[0]


def ours(name: str, symbols: np.ndarray, plan: object) -> Iterator[Row]:
    stream = plan.key
    coder = CODERS[stream.coder]
    packed = letters.pack(symbols, stream, HEAD_DIM).reshape(TOKENS, stream.substreams, -1)
    words, used = coder.encode(packed, stream)
    assert (used <= stream.words).all()
    decoded, status = coder.decode(words, stream, HEAD_DIM, packed.shape[2])
    assert not status.any() and (decoded == symbols).all()
    bits = 8 * stream.container / plan.values
    what = f"ours {name}, containers of {stream.container} B"

    def encode() -> None:
        coder.encode(letters.pack(symbols, stream, HEAD_DIM).reshape(packed.shape), stream)

    yield row(
        SECTION, f"{what}: decode", lambda: coder.decode_levels(words, stream, HEAD_DIM, packed.shape[2]),
        symbols.size / 1e9, "G symbols/s", bits=bits, note="any token alone in its tile of 32", what="decode",
    )  # fmt: skip
    yield row(
        SECTION, f"{what}: encode", encode,
        symbols.size / 1e9, "G symbols/s", bits=bits, note="symbols to words, without drift", what="encode",
    )  # fmt: skip


def thread_rows(counts: Sequence[int]) -> Iterator[Row]:
    """Our decoders on several threads, and on one for comparison: every thread takes a part of the tiles."""
    symbols = key_symbols()
    for name, plan_ in (("prefix", PREFIX_PLAN), ("rans (paper-2.26)", RANS_PLAN)):
        stream = plan_.key
        coder = CODERS[stream.coder]
        packed = letters.pack(symbols, stream, HEAD_DIM).reshape(TOKENS, stream.substreams, -1)
        words = np.concatenate([coder.encode(packed, stream)[0]] * REPEATED)
        for threads in counts:
            parts = np.array_split(words, threads)
            with ThreadPoolExecutor(threads) as pool:

                def decode(c=coder, s=stream, p=parts, n=packed.shape[2], pool=pool) -> None:
                    list(pool.map(lambda w: c.decode_levels(w, s, HEAD_DIM, n), p))

                yield row(
                    SECTION, f"ours {name}, {REPEATED * TOKENS} tokens: decode", decode,
                    REPEATED * symbols.size / 1e9, "G symbols/s", threads, what="decode", repeats=7,
                )  # fmt: skip


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
        what="decode",
        of="peer",
    )
    yield row(
        SECTION,
        "constriction AnsCoder, one stream a token: encode",
        encode,
        tokens.size / 1e9,
        "G symbols/s",
        bits=bits,
        what="encode",
        of="peer",
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
            what="decode all", of="peer",
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
            what="decode", of="peer",
        )  # fmt: skip
        yield row(
            SECTION, f"zstd -1, one frame a token, {name}: encode",
            lambda r=raws: [compressor.compress(x) for x in r], count / 1e9, "G symbols/s", bits=bits,
            what="encode", of="peer",
        )  # fmt: skip


def rows() -> Iterator[Row]:
    symbols = key_symbols()
    yield from ours("prefix", symbols, PREFIX_PLAN)
    yield from ours("rans (paper-2.26)", symbols, RANS_PLAN)
    yield from constriction_rows(symbols, PREFIX_PLAN.key.levels)
    yield from zstd_rows(symbols)
    out = np.empty_like(symbols)
    yield row(
        SECTION, "memcpy, a byte a symbol", lambda: np.copyto(out, symbols), symbols.size / 1e9, "G symbols/s",
        of="copy",
    )  # fmt: skip
    assert TOKENS % TILE == 0
