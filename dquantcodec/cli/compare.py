"""``dqkv compare``: how far a ``.dqkv`` file is from its original."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .console import Console, size
from .options import (
    CommandParser,
    add_source_options,
    check_output,
    check_source_options,
    common_options,
    layer_numbers,
    naming,
)
from .present import present_layers
from .progress import path_of, prepare_kernels, progress

if TYPE_CHECKING:
    from ..compare import LayerQuality
    from ..tensors import KVSource, QuerySource

EPILOG = """\
ORIGINAL is read as by compress. Queries (layers.0.query and the like, axes
[B,Q,L,D], the last L positions, after RoPE, not scaled) are taken from
--queries or, if it has any, from ORIGINAL; without them the error of attention
is left out. NMSE is error energy over energy; centred: over the energy of the
keys less their means of 128 tokens. Decoding speed is that of one thread
reading the file. The JSON gives shares as fractions, not percent.
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "compare",
        parents=[common_options()],
        description="Compare a .dqkv file with its original, layer by layer.",
        epilog=EPILOG,
    )
    parser.add_argument("original", metavar="ORIGINAL", help=".safetensors, .npz, or a folder of them")
    parser.add_argument("file", metavar="FILE", help="the .dqkv file")
    parser.add_argument("--queries", metavar="Q", help="file with queries, to measure the error of attention")
    parser.add_argument("--scale", type=float, metavar="S", help="scale of the attention logits (1/sqrt(head_dim))")
    parser.add_argument("--layers", type=layer_numbers, metavar="LIST", help="only these layers, as in 0-9,14")
    parser.add_argument(
        "--html", metavar="PAGE", help="page to write and look at, without network (replaced if it exists)"
    )
    add_source_options(parser)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file
    from ..tensors import open_queries, open_source
    from .table import quality_json, quality_table, totals

    check_source_options(parser, args)
    if args.html:
        check_output(args.html, args.file)
        check_output(args.html, args.original)
    with naming(args.file), open_file(args.file) as reader:
        wanted = list(present_layers(reader, args.layers))
        source = open_source(
            args.original, key=args.key, value=args.value, layout=args.layout, layers=wanted, bits=args.bits
        )
        queries = open_queries(args.queries or args.original)
        if args.queries and queries is None:
            raise InputError("no queries are recognised in it", code="names-unknown", path=args.queries)
        check_geometry(source, reader)
        rows = measure(source, reader, queries, console, scale=args.scale)
        sizes = reader.accounting()
        torn = bool(reader.torn)
        if args.html:
            write_page(args, source, reader, rows, console)
    if torn:
        console.warn(f"{args.file}: the file was not closed or lost its end [log-torn]")
    facts = {"original": args.original, "file": args.file, "torn": torn, "page": args.html}
    console.answer({**facts, "layers": quality_json(rows), "totals": totals(sizes)})
    console.result(quality_table(rows))
    ratio = 16 / sizes.bits_per_value if sizes.bits_per_value else math.inf
    console.say(
        f"whole file: {size(sizes.bytes)}, {sizes.bits_per_value:.3f} bits/value with headers and checksums, "
        f"{ratio:.2f}x smaller than BF16"
    )
    return 0


def write_page(
    args: argparse.Namespace, source: KVSource, reader: Any, rows: list[LayerQuality], console: Console
) -> None:
    from .replacing import replacing
    from .report import report_page

    total = source.tokens * source.sequences * source.token_bytes
    with progress(console, "drawing", total) as advance:
        text = report_page(source, reader, rows, Path(args.file).name, advance)
    with replacing(args.html) as partial:
        partial.write_text(text, encoding="utf-8")
    console.say(f"page: {args.html}")


def check_geometry(source: KVSource, reader: Any) -> None:
    """Refuse to compare caches that are not the same tokens, heads and dimensions."""
    differences = []
    numbers = present_layers(reader)
    for layer in source.layers:
        spec = reader.layers[numbers[layer.number]].spec
        if (layer.kv_heads, layer.head_dim) != (spec.kv_heads, spec.head_dim):
            differences.append(
                f"layer {layer.number} has {layer.kv_heads} KV heads of {layer.head_dim} in the original and "
                f"{spec.kv_heads} of {spec.head_dim} in the file"
            )
    lengths = [sequence.tokens for sequence in reader.sequences]
    if lengths != [source.tokens] * source.sequences:
        differences.append(
            f"the original has {source.sequences} x {source.tokens} tokens, the file "
            + " + ".join(str(length) for length in lengths)
        )
    if differences:
        raise InputError("not the same cache: " + "; ".join(differences[:3]), code="compare-mismatch", path=source.path)


def measure(
    source: KVSource,
    reader: Any,
    queries: QuerySource | None,
    console: Console,
    *,
    scale: float | None = None,
    encode_threads: int | None = None,
    repeats: int = 1,
) -> list[LayerQuality]:
    """One row per layer of ``source``."""
    from ..warm import DECODE, ENCODE
    from .measure import Subject, measure_layer

    prepare_kernels(console, (*ENCODE[:1], *DECODE), path_of(reader))
    numbers = present_layers(reader)
    total = source.tokens * source.sequences * source.token_bytes
    with progress(console, "comparing", total) as advance:
        subjects = [
            Subject(layer.number, numbers[layer.number], source, reader, queries, scale, encode_threads, repeats)
            for layer in source.layers
        ]
        return [measure_layer(subject, advance) for subject in subjects]
