"""A short run through every kernel of the codec, for NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck|initcheck|synccheck python benchmarks/gpu/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/gpu/sanitize.py --races
    compute-sanitizer --tool TOOL python benchmarks/gpu/sanitize.py --classes|--attend

Racecheck knows neither the copy engine nor one lane's arrival at a barrier for its warp; ``--races`` builds attention
without them.  With ``--classes`` plans with variance classes are coded, and nothing else; with ``--attend`` pages are
attended to, and nothing else.

Whole and cut windows, both coders, all forms of the rotation, variance classes and a trellis, damaged pages, appending,
and attention over pages in scattered order with exact tokens.  Exits 1 if bytes differ between two runs.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

from dquantcodec import Profile, fit_plan
from dquantcodec.codec import Codec as CpuCodec
from dquantcodec.codec import Pages
from dquantcodec.cuda import Cache, Codec, attend_launch
from dquantcodec.cuda.attend import PageAttention
from dquantcodec.plan import Plan, make_plan

CASES = (("2.26", 2, 64), ("2.26", 2, 80), ("paper-2.26", 2, 64), ("paper-1.96", 1, 192), ("3.0", 1, 256))
TOKENS = 145


def run(plan: Plan) -> bool:
    codec, heads, head_dim = Codec(plan), plan.kv_heads, plan.head_dim
    x = cupy.asarray(np.random.default_rng(0).standard_normal((2, TOKENS, heads, head_dim)).astype(np.float16))
    status = cupy.zeros((2, TOKENS), cupy.uint8)
    first, second = (codec.encode(x[0], x[1], status=status).data for _ in range(2))
    same = bool((first == second).all())
    damaged = first.copy()
    damaged[0, codec.layout.head_bytes :] ^= cupy.arange(codec.layout.page_bytes - codec.layout.head_bytes).astype(
        cupy.uint8
    )
    for kind in ("key", "value"):
        for pages in (first, damaged):
            good = cupy.zeros((TOKENS - 3, getattr(codec.plan, kind).substreams), cupy.uint8)
            out = cupy.zeros((TOKENS - 3, heads, head_dim), cupy.float16)
            codec.decode_kind(Pages(pages, TOKENS), kind, 3, out=out, status=good)
    return same


def append(plan: Plan) -> None:
    codec = Codec(plan)
    pool = cupy.zeros((2, codec.layout.page_bytes), cupy.uint8)
    cache = Cache(codec, pool, cupy.asarray([[1], [0]], cupy.int32), dtype="float16")
    x = cupy.ones((2, 127, 2, 64), cupy.float16)
    cache.prefill(0, x[0], x[1])
    for _ in range(2):
        cache.append(x[0, :2], x[1, :2])


def fitted(name: str, heads: int, head_dim: int) -> Plan:
    """A plan with variance classes."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 256, heads, head_dim)) * np.exp(rng.standard_normal((2, 1, heads, head_dim)))
    return fit_plan(name, *x.astype(np.float32))


def attend(plan: Plan, lengths: tuple[int, ...], ringed: bool) -> bool:
    rng = np.random.default_rng(1)
    window, heads, head_dim = plan.window, plan.kv_heads, plan.head_dim
    counts = [-(-length // window) for length in lengths]
    x = rng.standard_normal((2, sum(counts) * window, heads, head_dim)).astype(np.float16)
    pages = cupy.asarray(CpuCodec(plan).encode(*x).data)
    for kind in ("key", "value"):
        Codec(plan).decode_kind(Pages(pages, len(x[0])), kind, 1)
    table = np.full((len(lengths), max(counts)), -1, np.int32)
    order = rng.permutation(sum(counts)).astype(np.int32)
    for row, count, end in zip(table, counts, np.cumsum(counts)):
        row[:count] = order[end - count : end]
    attention = PageAttention(plan, len(lengths), 4 * heads, dtype="float16", ringed=ringed)
    query = cupy.asarray(rng.standard_normal((len(lengths), 1, 4 * heads, head_dim)).astype(np.float16))
    exact = cupy.asarray(rng.integers(0, 1 << 14, (2, len(lengths), 5, heads, head_dim)).astype(np.uint16))
    tail = exact[0], exact[1], cupy.asarray([3] * len(lengths), cupy.int32)
    arrays = query, pages, cupy.asarray(table), cupy.asarray(lengths, cupy.int32)
    first, second = (attention(*arrays, tail=tail)[0].copy() for _ in range(2))
    return bool((first.view(cupy.uint16) == second.view(cupy.uint16)).all())


def main() -> None:
    same = True
    classes_only, attend_only = (option in sys.argv for option in ("--classes", "--attend"))
    rotated = [] if classes_only or attend_only else [make_plan(Profile.named(name), *shape) for name, *shape in CASES]
    with_classes = [] if attend_only else [fitted("2.26", 2, 64), fitted("2.26-t", 2, 64)]
    for plan in rotated + with_classes:
        same &= run(plan)
    for plan in rotated[:1] + with_classes[:1]:
        append(plan)
    if "--races" in sys.argv:
        attend_launch.OPTIONS += (attend_launch.CHECKED,)
    if not classes_only:
        paper, classes, trellis = (
            make_plan(Profile.named("paper-2.26"), 2, 128), fitted("2.26", 2, 128), fitted("2.26-t", 2, 64),
        )  # fmt: skip
        for plan, ringed in ((paper, False), (classes, False), (trellis, False), (paper, True), (trellis, True)):
            same &= attend(plan, (700, 0, 33), ringed)
    cupy.cuda.Device().synchronize()
    print("same bytes twice" if same else "bytes differ between runs")
    sys.exit(not same)


if __name__ == "__main__":
    main()
