"""What a file takes beside containers, affine numbers and means: by arithmetic, for a cache of usual size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dquantcodec.file import Layer
from dquantcodec.file.compose import RECORD_TARGET
from dquantcodec.file.header import Header
from dquantcodec.file.info import Info
from dquantcodec.file.runs import RunLayout
from dquantcodec.file.structs import BLOCK, RECORD_BYTES, align, index_bytes
from dquantcodec.fit import fit_plan
from dquantcodec.profile import PROFILES

LAYERS, HEADS, DIM, TOKENS = 36, 8, 128, 4096


def header_bytes(layer: Layer) -> int:
    """Of ``LAYERS`` layers, none of which shares anything with another: as many times what one adds."""
    info = Info("model", "revision", metadata={"source": "x" * 500})
    one = Header(bytes(16), (layer,), 1, 1, 128, info)
    block = one.pack()
    json_end = int.from_bytes(block[92:96], "little") + int.from_bytes(block[96:100], "little")
    return align(LAYERS * json_end, BLOCK)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("windows", [1, None], ids=["one window a record", "as create writes"])
def test_overhead_is_at_most_half_a_percent(name: str, windows: int | None) -> None:
    layer = Layer(HEADS, DIM, "bfloat16", name).resolved(0)
    if profile := Layer(HEADS, DIM, "bfloat16", name).fitted_profile:
        keys, values = np.random.default_rng(0).standard_normal((2, 512, HEADS, DIM)).astype(np.float16)
        layer = replace(layer, profile=fit_plan(profile, keys, values))
    run = RunLayout.of(Header(bytes(16), (layer,) * LAYERS, 1, 1, 128, Info()))
    layout = run.slots[0].layout
    run_windows = windows or max(1, RECORD_TARGET // run.window_bytes)
    left, end, records = TOKENS, header_bytes(layer), 0
    while left:
        tokens = min(left, run_windows * run.window)
        end += align(RECORD_BYTES + run.payload_bytes(tokens), BLOCK)
        left, records = left - tokens, records + 1
    end += index_bytes(end, records)
    content = LAYERS * TOKENS // run.window * (layout.used_head_bytes + layout.tiles * layout.tile_bytes)
    assert content < end <= 1.005 * content
