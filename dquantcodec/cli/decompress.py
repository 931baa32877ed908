"""``dqkv decompress``: a ``.dqkv`` file back into safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import InputError, TruncatedError
from .console import Console, count, size
from .options import (
    CommandParser,
    add_threads,
    check_output,
    common_options,
    layer_numbers,
    naming,
    resolve_tokens,
    threads,
    token_range,
)
from .present import present_layers, profile_names
from .progress import Advance, path_of, prepare_kernels, progress

if TYPE_CHECKING:
    from ..tensors import OutputTensor, SafetensorsWriter

BLOCK_BYTES = 16 << 20

#: Names and layout for files that were not made by ``dqkv compress`` and so remember none.
DEFAULT_SOURCE = {"key": "layers.{layer}.key", "value": "layers.{layer}.value", "layout": "BHTD"}

EPILOG = """\
Names, layout and element type are those of the original unless told otherwise.
Coded tokens come back with the loss of their profile, exact ones bit for bit.
OUT is replaced if it exists, but only once the new file is complete and on the
disk. A range that starts with a minus sign is written with =: --tokens=-128:

  dqkv decompress cache.dqkv cache.safetensors
  dqkv decompress cache.dqkv part.safetensors --layers 0-3 --tokens 1024:2048
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "decompress",
        parents=[common_options()],
        description="Decompress a .dqkv file into a safetensors file.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="IN", help="the .dqkv file")
    parser.add_argument("output", metavar="OUT", help="the .safetensors file to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="element type (the original's)")
    parser.add_argument("--layers", type=layer_numbers, metavar="LIST", help="only these layers, as in 0-9,14")
    parser.add_argument(
        "--tokens", type=token_range, metavar="A:B", help="only tokens A to B-1; ends may be left out or negative"
    )
    parser.add_argument(
        "--accept-torn", action="store_true", help="take the tokens that are whole in a file that lost its end"
    )
    add_threads(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Item:
    """One tensor to decode: ``output`` holds the given sequences of one layer and kind, one after the other."""

    output: OutputTensor
    place: int
    kind: str
    sequences: Sequence[int]


def run(args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file
    from ..tensors import SafetensorsWriter
    from ..warm import DECODE

    check_output(args.output, args.file)
    if Path(args.output).suffix in (".npz", ".dqkv"):
        raise InputError("decompress writes .safetensors; name OUT so", code="output-type", path=args.output)
    with naming(args.file), open_file(args.file, threads=threads(args)) as reader:
        if reader.torn and not args.accept_torn:
            whole = ", ".join(str(sequence.tokens) for sequence in reader.sequences)
            raise TruncatedError(
                f"the file was not closed or lost its end; {whole} tokens are whole, --accept-torn takes them",
                code="log-torn",
            )
        numbers = present_layers(reader, args.layers)
        # Sequences of different length share no range; each is cut by its own.
        ranges = [resolve_tokens(args.tokens, sequence.tokens) for sequence in reader.sequences]
        items = plan_items(reader, numbers, ranges, args.dtype)
        prepare_kernels(console, DECODE, path_of(reader))
        began = perf_counter()
        total = sum(item.output.nbytes for item in items)
        note = {"decoded_from": Path(args.file).name, "codec": "dqkv " + ", ".join(profile_names(reader))}
        with (
            progress(console, "decompressing", total) as advance,
            SafetensorsWriter(args.output, [item.output for item in items], note) as writer,
        ):
            for item in items:
                _decode(reader, item, ranges, writer, advance)
    seconds = perf_counter() - began
    values = sum(item.output.values for item in items)
    console.say(
        f"{args.output}: {size(Path(args.output).stat().st_size)}, {len(items)} tensors as "
        f"{items[0].output.name} {items[0].output.dtype} {list(items[0].output.shape)}; "
        f"{seconds:.1f} s ({count(values / seconds)} values/s)"
    )
    return 0


def plan_items(
    reader: Any, numbers: dict[int, int], ranges: Sequence[tuple[int, int]], dtype: str | None
) -> list[Item]:
    """The tensors to write, in the order keys and values of each layer.

    Sequences of equal length are stacked where the layout has an axis for them; otherwise each is a tensor of its own,
    named with ``sequence.{s}.`` in front.
    """
    from ..tensors import Geometry, OutputTensor, recorded_source, spell

    source = recorded_source(reader.metadata) or DEFAULT_SOURCE
    lengths = [stop - start for start, stop in ranges]
    everything = range(len(ranges))
    stacked = len(set(lengths)) == 1 and ("B" in source["layout"] or len(ranges) == 1)
    groups = [("", everything)] if stacked else [(f"sequence.{s}.", range(s, s + 1)) for s in everything]
    items = []
    for number, place in numbers.items():
        spec = reader.layers[place].spec
        for kind in ("key", "value"):
            for prefix, sequences in groups:
                geometry = Geometry(len(sequences), spec.kv_heads, lengths[sequences[0]], spec.head_dim)
                name = prefix + spell(source[kind], number)
                output = OutputTensor(name, dtype or spec.dtype, source["layout"], geometry)
                items.append(Item(output, place, kind, sequences))
    return items


def _decode(
    reader: Any, item: Item, ranges: Sequence[tuple[int, int]], writer: SafetensorsWriter, advance: Advance
) -> None:
    from ..tensors import numpy_dtype

    geometry = item.output.geometry
    token_bytes = 4 * geometry.heads * geometry.head_dim
    step = max(128, BLOCK_BYTES // token_bytes // 128 * 128)
    for slot, sequence in enumerate(item.sequences):
        tensor = getattr(reader.sequences[sequence].layers[item.place], item.kind)
        first, last = ranges[sequence]
        for start in range(first, last, step):
            stop = min(start + step, last)
            block = tensor.read(start, stop, dtype=numpy_dtype(item.output.dtype))
            writer.write(item.output.name, slot, start - first, block)
            advance(block.nbytes)
