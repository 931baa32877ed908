"""Instructions a value, stage by stage: what timing on a shared machine cannot show steadily.

    python benchmarks/cpu/instructions.py [--json FILE]          # needs valgrind (callgrind) and a minute or two

Counts are those of one processor model (``haswell``: AVX2, no AVX-512) so that they can be compared between machines.
A marker, a system call that nothing else makes, divides the run: callgrind writes its counts at every marker.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from dquantcodec import Codec, drift, means
from dquantcodec.arrays import store_float32, to_float32
from dquantcodec.codec import decode_levels
from dquantcodec.coders import CODERS
from dquantcodec.encode import fit_grid, lay_grid
from dquantcodec.letters import pack
from dquantcodec.page import read_kind
from dquantcodec.reconstruct import reconstruct
from dquantcodec.rotate import rotate

MARKER = "getpriority"
PROCESSOR = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe,+popcnt,+sse4.1,+sse4.2,+ssse3",
    "NUMBA_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
TOKENS, HEADS, DIM, GROUP = 128, 8, 128, 4


def stages(profile: str) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, values, and work of every stage, one page of keys or values (both for the last three)."""
    codec = Codec(profile, HEADS, DIM)
    plan = codec.plan
    half = np.random.default_rng(0).standard_normal((TOKENS, HEADS, DIM), dtype=np.float32).astype(np.float16)
    x = to_float32(half)
    turned = rotate(x, plan.signs)
    flat = turned.reshape(TOKENS, -1)
    n = x.size
    pages = codec.encode(half, half)
    query = np.random.default_rng(1).standard_normal((GROUP * HEADS, DIM), dtype=np.float32)
    yield "FP16 to FP32", n, lambda: to_float32(half)
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
        yield f"{kind}: {stream.coder} decode to levels", n, lambda f=fields, s=stream: decode_levels(f, plan, s)
        yield f"{kind}: levels to FP32", n, lambda f=fields, m=levels, s=stream: reconstruct(f, m, plan, s)
    yield "FP32 to FP16", n, lambda: store_float32(x, half)
    yield "encode a page", 2 * n, lambda: codec.encode(half, half)
    yield "decode a page to FP16", 2 * n, lambda: codec.decode(pages, dtype=np.float16)
    yield f"attend to a page, {GROUP} queries a KV head", 2 * n, lambda: codec.attend(query, pages)


def run_stages(profile: str) -> None:
    """Every stage once to load its kernels, then once between two markers."""
    for name, values, work in stages(profile):
        work()
        os.getpriority(os.PRIO_PROCESS, 0)
        work()
        os.getpriority(os.PRIO_PROCESS, 0)
        print(f"{values}\t{name}", flush=True)


def count(profile: str) -> list[dict[str, object]]:
    """Instructions a value of every stage of ``profile``."""
    command = [sys.executable, __file__, "--stages", profile]
    environment = {**os.environ, **PROCESSOR}
    subprocess.run(command, env=environment, check=True, capture_output=True)  # compiles into the cache
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", f"--dump-before={MARKER}"]
        done = subprocess.run([*valgrind, *command], env=environment, check=True, capture_output=True, text=True)
        totals = []
        for number in range(1, len(list(Path(folder).iterdir())) + 1):
            part = Path(f"{out}.{number}")
            if part.exists():
                totals.append(int(re.search(r"^(?:totals|summary): (\d+)", part.read_text(), re.M).group(1)))  # type: ignore[union-attr]
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    # Dump 2k + 1 ends what lies before a stage, dump 2k + 2 the stage.
    return [
        {"profile": profile, "stage": name, "instructions": round(totals[2 * k + 1] / int(values), 2)}
        for k, (values, name) in enumerate(rows)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", nargs="+", default=["2.26", "paper-2.26"])
    parser.add_argument("--json", type=Path, help="also write the counts here")
    parser.add_argument("--stages", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stages:
        run_stages(arguments.stages)
        return
    rows = [row for profile in arguments.profiles for row in count(profile)]
    for row in rows:
        print(f"{row['profile']:12} {row['stage']:45} {row['instructions']:8.2f} instructions a value")
    if arguments.json:
        what = "instructions a value, one page of 128 tokens of 1024 values, by callgrind"
        document = {"what": what, "command": " ".join(["python", *sys.argv]), "processor": PROCESSOR, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
