"""Compile kernels ahead of their first use, several processes side by side.

Numba compiles one kernel at a time, so a first command would spend its cores one after another.  Each process here
compiles a part of the kernels into the shared cache (:mod:`dquantcodec.kernels`), by running a stage on a few numbers.

    python -m dquantcodec.warm grouped prepare decode
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable

from .plan import Plan, grouped, make_plan
from .profile import TILE, Profile, StreamProfile

#: What encoding, decoding and measuring drift need, cut into parts that take about as long to compile.
ENCODE = ("prepare", "drift")
DECODE = ("decode",)
#: Paths of variance classes, without and with a trellis.
GROUPED = ("grouped", "trellis")


def path_of(profile: Profile | Plan) -> str:
    """The kernels that a profile's or plan's keys go through, as the other functions here name them."""
    stream = profile.key
    if isinstance(stream, StreamProfile):
        states = stream.states if stream.classes else 0
    else:
        states = stream.grouping.states if stream.grouping else 0
    if not states:
        return stream.coder
    return "trellis" if states > 1 else "grouped"


def missing(parts: Iterable[str], path: str) -> list[str]:
    """The parts that no process has compiled into the cache yet; none where the cache cannot be written."""
    from .kernels import cache_directory

    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return []
    return [part for part in parts if not (folder / f"{part}-{path}.done").exists()]


def compile_parts(parts: Iterable[str], path: str) -> None:
    """Compile ``parts`` for ``path``, one process each.  A part that fails is compiled on first use instead."""
    command = [sys.executable, "-m", "dquantcodec.warm", path]
    quiet = subprocess.DEVNULL
    processes = [subprocess.Popen([*command, part], stdout=quiet, stderr=quiet) for part in parts]
    for process in processes:
        process.wait()


def main(arguments: list[str]) -> None:
    from .kernels import cache_directory

    path, *parts = arguments
    for part in parts:
        STAGES[part](path)
        (cache_directory() / f"{part}-{path}.done").touch()


def _prepare(path: str) -> None:
    import numpy as np

    from .arrays import BFLOAT16, to_float32
    from .encode import Room, fit_grid, page_magnitudes, prepare_in_place

    # The named profiles of a path share a grid; another grid's kernels are compiled on first use.
    plan = _any_plan(path)
    x = to_float32(np.ones((33, plan.kv_heads, plan.head_dim), np.float16))
    to_float32(x.astype(BFLOAT16))
    found = prepare_in_place(x, plan, plan.key, page_magnitudes(x, plan.window), Room())
    if path not in GROUPED:
        symbols = np.zeros(found.position.shape, np.uint8)
        fit_grid(found.position, symbols, found.offset, found.scale, plan.key)


def _drift(path: str) -> None:
    import numpy as np

    from . import drift, letters
    from .coders import CODERS
    from .encode import Prepared, code_groups

    if path in GROUPED:
        plan = _grouped_plan(path)
        scale = np.ones(33, np.float16)
        code_groups(
            Prepared([0], scale, np.zeros(0, np.int8), scale, scale, np.zeros((33, 16), np.int32)), plan, plan.key
        )
        return
    plan = _plan(path)
    symbols, _ = drift.drift(np.zeros((33, plan.values), np.int32), plan.key, plan.head_dim)
    packed = letters.pack(symbols, plan.key, plan.head_dim).reshape(33, plan.key.substreams, -1)
    CODERS[path].encode(packed, plan.key)


def _decode(path: str) -> None:
    import numpy as np

    from .decode import RowDecoder
    from .page import read_kind, tile_words
    from .page_layout import PageLayout

    plan = _any_plan(path)
    page = np.zeros((1, PageLayout.of(plan).page_bytes), np.uint8)
    fields = read_kind(page, plan, "key", slice(0, plan.window // TILE), words=False)
    decoder = RowDecoder(fields, tile_words(page, plan, "key"), plan, plan.key)
    decoder.rows(0, 1, np.empty((1, plan.kv_heads, plan.head_dim), np.float16))


def _attend(path: str) -> None:
    import numpy as np

    from .attend import Partial, Problem, finish, merge
    from .attend_parts import PartAttention
    from .page import read_kind, tile_words
    from .page_layout import KINDS, PageLayout

    plan = _any_plan(path)
    page = np.zeros((1, PageLayout.of(plan).page_bytes), np.uint8)
    fields = [read_kind(page, plan, kind, slice(0, plan.window // TILE), words=False) for kind in KINDS]
    words = [tile_words(page, plan, kind) for kind in KINDS]
    problem = Problem.of(np.ones((plan.kv_heads, plan.head_dim), np.float32), plan, None)
    attention = PartAttention(problem, plan, fields, words, np.array([[0, 1]]), np.array([1]))
    partial = Partial.empty(problem)
    merge(partial, attention.over(0, 1))
    finish(problem, partial, plan)


def _any_plan(path: str) -> Plan:
    return _grouped_plan(path) if path in GROUPED else _plan(path)


def _plan(coder: str) -> Plan:
    return make_plan(Profile.named("paper-2.26" if coder == "rans" else "2.26"), 2, 64)


def _grouped_plan(path: str) -> Plan:
    """Two heads of eight channels, all of one class; fitting one would need kernels of its own."""
    import numpy as np

    from .grouping import Grouping, Levels, Table

    grouping = Grouping(
        head_dim=8,
        classes=(Levels((1, 16382, 1), 256, (1, 16382, 1) if path == "trellis" else ()),),
        tables=(Table((0,), 8),),
        letters=(8,),
        fields=(1,),
        choice=np.zeros((2, 1), np.uint8),
        order=np.arange(16, dtype=np.uint16).reshape(2, 8),
        states=4 if path == "trellis" else 1,
    )
    stream = grouped(8, 1, True, 1.0, "least-squares", grouping)
    return Plan(2, 8, 128, np.ones((2, 8), np.int8), stream, stream)


STAGES: dict[str, Callable[[str], None]] = {"prepare": _prepare, "drift": _drift, "decode": _decode, "attend": _attend}

if __name__ == "__main__":
    main(sys.argv[1:])
