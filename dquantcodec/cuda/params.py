"""Parameters of kernels as NumPy dtypes, byte for byte the structs of ``gpu/include/dquant``.

Sizes are asserted there and here; addresses are integers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..page_layout import PageLayout, StreamLayout
from ..plan import Plan

KIND_LAYOUT = np.dtype(
    [
        (name, np.uint32)
        for name in (
            "exponent_at", "scale_at", "mean_at", "words_at", "affine_at", "head_bytes", "tile_bytes", "tiles",
        )
    ]
)  # fmt: skip
PAGE_POOL = np.dtype([("pages", np.uint64), ("numbers", np.uint64), ("stride", np.int64)])
LETTER_TABLES = np.dtype([("entries", np.uint64), ("advance", np.uint64)])
DECODE = np.dtype(
    [
        ("pool", PAGE_POOL),
        ("tables", LETTER_TABLES),
        ("factors", np.uint64),
        ("out", np.uint64),
        ("token_stride", np.int64),
        ("head_stride", np.int64),
        ("status", np.uint64),
        ("start", np.int64),
        ("stop", np.int64),
        ("at", KIND_LAYOUT),
        ("vectors", np.int32),
        ("reserved", np.int32),
    ]
)
DRIFT_TABLES = np.dtype(
    [
        ("thresholds", np.uint64),
        ("edges", np.uint64),
        ("steps", np.uint64),
        ("costs", np.uint64),
        ("complete", np.uint64),
        ("last_costs", np.uint64),
        ("rungs", np.int32),
        ("columns", np.int32),
        ("cheapest", np.int32),
        ("reserved", np.int32),
    ]
)
ENCODE = np.dtype(
    [
        ("pool", PAGE_POOL),
        ("in", np.uint64),
        ("token_stride", np.int64),
        ("head_stride", np.int64),
        ("tokens", np.int64),
        ("ready", np.uint64),
        ("numbers_stride", np.int64),
        ("factors", np.uint64),
        ("drift", DRIFT_TABLES),
        ("codes", np.uint64),
        ("reciprocals", np.uint64),
        ("status", np.uint64),
        ("scratch", np.uint64),
        ("scratch_bytes", np.int64),
        ("budget", np.int32),
        ("windows", np.int32),
        ("clear_from", np.uint32),
        ("clear_to", np.uint32),
        ("vectors", np.int32),
        ("reserved", np.int32),
        ("at", KIND_LAYOUT),
    ]
)
GROUP_TABLES = np.dtype(
    [
        *((name, np.uint64) for name in (
            "channels", "inverses", "ladder", "codes", "initial", "letters", "fields", "groups", "numbers_of_ranks",
        )),
        ("step", np.float64),
        ("rungs", np.int32),
        ("entries", np.int32),
        ("start", np.int32),
        ("words", np.int32),
        ("rounds", np.int32, 4),
        ("slots", np.int32),
        ("groups_each", np.int32),
        ("code_count", np.int32),
        ("window_first", np.int32),
        ("window_rungs", np.int32),
        ("reserved", np.int32),
    ]
)  # fmt: skip
TRELLIS_TABLES = np.dtype(
    [
        *((name, np.uint64) for name in ("channels", "inverses", "costs", "codes", "classes", "groups", "kinds")),
        ("step", np.float64),
        *((name, np.int32) for name in (
            "rungs", "entries", "start", "words", "values", "pitch", "groups_each", "code_count", "class_count",
            "window_first", "window_rungs", "reserved",
        )),
    ]
)  # fmt: skip
TRELLIS_ENCODE = np.dtype([("rows", ENCODE), ("tables", TRELLIS_TABLES)])
GROUP_ENCODE = np.dtype([("rows", ENCODE), ("tables", GROUP_TABLES)])
APPEND_ROWS = np.dtype(
    [
        ("in", np.uint64),
        ("sequence_stride", np.int64),
        ("token_stride", np.int64),
        ("head_stride", np.int64),
        ("tails", np.uint64),
    ]
)
APPEND = np.dtype(
    [
        ("keys", APPEND_ROWS),
        ("values", APPEND_ROWS),
        ("lengths", np.uint64),
        ("ready", np.uint64),
        ("full", np.uint64),
        ("active", np.uint64),
        ("heads", np.int32),
        ("head_dim", np.int32),
        ("window", np.int32),
        ("pages", np.int32),
        ("tokens", np.int32),
        ("element_bytes", np.int32),
    ]
)

_SIZES = (
    (KIND_LAYOUT, 32), (PAGE_POOL, 24), (LETTER_TABLES, 16), (DECODE, 136), (DRIFT_TABLES, 64), (ENCODE, 240),
    (GROUP_TABLES, 136), (GROUP_ENCODE, 376), (TRELLIS_TABLES, 112), (TRELLIS_ENCODE, 352), (APPEND_ROWS, 40),
    (APPEND, 136),
)  # fmt: skip
for _dtype, _size in _SIZES:
    assert _dtype.itemsize == _size


def kind_layout(plan: Plan, kind: str) -> NDArray[np.void]:
    """``KIND_LAYOUT`` of one kind of ``plan``'s pages, of no dimension."""
    layout = PageLayout.of(plan)
    at: StreamLayout = getattr(layout, kind)
    record = np.zeros((), KIND_LAYOUT)
    record["exponent_at"] = 0 if kind == "key" else 2
    for name in ("scale_at", "mean_at", "words_at", "affine_at"):
        record[name] = getattr(at, name)
    record["head_bytes"], record["tile_bytes"], record["tiles"] = layout.head_bytes, layout.tile_bytes, layout.tiles
    return record
