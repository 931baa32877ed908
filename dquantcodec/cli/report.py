"""``dqkv compare --html``: the comparison as a page to look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..layer_report import KindSums
from ..page_layout import KINDS
from ..report_page import Facts, LayerPage, page
from .console import size
from .present import present_layers, profile_names
from .progress import Advance

if TYPE_CHECKING:
    from ..compare import LayerQuality
    from ..tensors import KVSource

BLOCK_BYTES = 16 << 20


def report_page(source: KVSource, reader: Any, rows: list[LayerQuality], name: str, advance: Advance) -> str:
    """The page about ``reader``'s file; reads original and file once more, block by block."""
    numbers = present_layers(reader)
    layers = [_layer(source, reader, row, numbers[row.layer], advance) for row in rows]
    sizes = reader.accounting()
    ratio = 16 / sizes.bits_per_value if sizes.bits_per_value else 0.0
    tokens = sorted({sequence.tokens for sequence in reader.sequences})
    lengths = " to ".join(map(str, tokens[:: max(1, len(tokens) - 1)]))
    facts = [
        ("model", reader.model or "(not given)"),
        ("profile", ", ".join(profile_names(reader))),
        ("layers", str(len(rows))),
        (
            "sequences",
            f"{len(reader.sequences)}, of {lengths} tokens",
        ),
        ("file", f"{size(sizes.bytes)}, {sizes.bits_per_value:.3f} bits/value, {ratio:.2f}x smaller than BF16"),
        ("coded pages", f"{sizes.bits_per_value_coded:.3f} bits/value" if sizes.coded_tokens else "none"),
    ]
    return page(Facts(name, facts, sizes.bytes, sizes.values, sizes.bits_per_value), layers)


def _layer(source: KVSource, reader: Any, row: LayerQuality, place: int, advance: Advance) -> LayerPage:
    from ..codec import Codec

    shape = source.layer(row.layer)
    sums = {kind: KindSums(shape.kv_heads, shape.head_dim) for kind in KINDS}
    coded = False
    for number, sequence in enumerate(reader.sequences):
        layer = sequence.layers[place]
        for start, stop in _blocks(layer.tokens, shape.kv_heads * shape.head_dim):
            first = (number, start) if len(reader.sequences) > 1 else (start,)
            for kind, one in sums.items():
                exact = source.read(row.layer, kind, number, start, stop)
                one.add_tokens(exact, getattr(layer, kind).read(start, stop, dtype=np.float32), first)
                advance(exact.nbytes)
        for group in layer.groups if layer.coded_tokens else ():
            coded = True
            codec = Codec(group.plan)
            for run in group.page_runs():
                for kind, one in sums.items():
                    one.add_pages(run.pages.data, codec.symbols(run.pages, kind), group.plan, kind)
    if not coded:
        return LayerPage(row, None, None)
    return LayerPage(row, sums["key"].report(), sums["value"].report())


def _blocks(tokens: int, values: int) -> Iterator[tuple[int, int]]:
    step = max(1, BLOCK_BYTES // (8 * values))
    for start in range(0, tokens, step):
        yield start, min(start + step, tokens)
