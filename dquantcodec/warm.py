"""Compile kernels ahead of their first use, several processes side by side.

Numba compiles one kernel at a time, so a first command would spend its cores one after another.  Each process here
compiles a part of the kernels into the shared cache (:mod:`dquantcodec.kernels`), by running a stage on a few numbers.

    python -m dquantcodec.warm prefix rotate decode
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

from .plan import Plan, make_plan
from .profile import Profile

#: What encoding, decoding and measuring drift need, cut into parts that take about as long to compile.
ENCODE = ("rotate", "drift")
DECODE = ("decode",)


def missing(parts: Iterable[str], coder: str) -> list[str]:
    """The parts that no process has compiled into the cache yet; none where the cache cannot be written."""
    from .kernels import cache_directory

    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return []
    return [part for part in parts if not (folder / f"{part}-{coder}.done").exists()]


def compile_parts(parts: Iterable[str], coder: str) -> None:
    """Compile ``parts`` for ``coder``, one process each.  A part that fails is compiled on first use instead."""
    command = [sys.executable, "-m", "dquantcodec.warm", coder]
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen([*command, part], stdout=quiet, stderr=quiet) for part in parts]
    for process in processes:
        process.wait()


def main(arguments: list[str]) -> None:
    from .kernels import cache_directory

    coder, *parts = arguments
    for part in parts:
        STAGES[part](coder)
        (cache_directory() / f"{part}-{coder}.done").touch()


def _rotate(coder: str) -> None:
    import numpy as np

    from . import means
    from .arrays import to_float32
    from .encode import fit_grid, lay_grid
    from .rotate import random_signs, rotate

    x = rotate(to_float32(np.ones((33, 2, 8), np.float16)), random_signs(2, 8))
    means.window_means(x)
    flat = x.reshape(33, -1)
    # The named profiles of a coder share a grid; another grid's kernels are compiled on first use.
    stream = _plan(coder).key
    offset, scale, position = lay_grid(flat, stream)
    fit_grid(position, np.zeros(position.shape, np.uint8), offset, scale, stream)


def _drift(coder: str) -> None:
    import numpy as np

    from . import drift, letters
    from .coders import CODERS

    plan = _plan(coder)
    symbols, _ = drift.drift(np.zeros((33, plan.values), np.int32), plan.key, plan.head_dim)
    packed = letters.pack(symbols, plan.key, plan.head_dim).reshape(33, plan.key.substreams, -1)
    CODERS[coder].encode(packed, plan.key)


def _decode(coder: str) -> None:
    import numpy as np

    from .arrays import BFLOAT16, store_float32
    from .codec import decode_levels
    from .page import PageLayout, read_kind
    from .reconstruct import reconstruct

    plan = _plan(coder)
    page = np.zeros(PageLayout.of(plan).page_bytes, np.uint8)
    fields = read_kind(page[None], plan, "key", slice(0, 1))
    levels, _ = decode_levels(fields, plan, plan.key)
    x = reconstruct(fields, levels, plan, plan.key)
    for dtype in (np.dtype(np.float16), BFLOAT16):
        store_float32(x, np.empty(x.shape, dtype))


def _attend(_coder: str) -> None:
    import numpy as np

    from .attend import Levels, Problem, over_levels

    query = np.ones((2, 1, 8), np.float32)
    levels = np.zeros((1, 16, 32), np.uint8)
    part = Levels(
        levels,
        np.zeros(32, np.float32),
        np.zeros(32, np.float32),
        np.zeros((0, 1, 1), np.float32),
        1.0,
        slice(0, 1),
        np.float32(0),
    )
    over_levels(Problem(query, query, (2, 8)), part, part)


def _plan(coder: str) -> Plan:
    return make_plan(Profile.named("paper-2.26" if coder == "rans" else "2.26"), 2, 64)


STAGES: dict[str, Callable[[str], None]] = {"rotate": _rotate, "drift": _drift, "decode": _decode, "attend": _attend}

if __name__ == "__main__":
    main(sys.argv[1:])
