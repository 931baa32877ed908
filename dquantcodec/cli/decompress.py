"""``dqkv decompress``: a ``.dqkv`` file back into safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import InputError, TruncatedError
from ..file.overlap import in_order
from ..urls import base_name, shown
from .console import Console, count, size
from .many import add_batch_options, batched, run_batch
from .options import (
    CommandParser,
    add_accept_torn,
    add_device,
    add_threads,
    check_device,
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
    from numpy.typing import NDArray

    from ..tensors import OutputTensor, SafetensorsWriter

BLOCK_BYTES = 16 << 20
#: Threads that keep a device at work: each has a block of at most 16 MB, and as many blocks wait to be written.
MOST_WORKERS = 8

#: Names and layout for files that were not made by ``dqkv compress`` and so remember none.
DEFAULT_SOURCE = {"key": "layers.{layer}.key", "value": "layers.{layer}.value", "layout": "BHTD"}

EPILOG = """\
Names, layout and element type are those of the original unless told otherwise.
Coded tokens come back with the loss of their profile, exact ones bit for bit.
OUT is replaced if it exists, but only once the new file is complete and on the
disk. A range that starts with a minus sign is written with =: --tokens=-128:

  dqkv decompress cache.dqkv cache.safetensors
  dqkv decompress cache.dqkv part.safetensors --layers 0-3 --tokens 1024:2048
  dqkv decompress s3://bucket/cache.dqkv cache.safetensors
  dqkv decompress coded/ restored/ --jobs 4
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "decompress",
        parents=[common_options()],
        description="Decompress a .dqkv file into a safetensors file.",
        epilog=EPILOG,
    )
    parser.intermixed = True
    parser.add_argument("files", nargs="+", metavar="IN", help="the .dqkv file, or with --jobs several or a folder")
    parser.add_argument("output", metavar="OUT", help="the .safetensors file to write, or a folder for several")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="element type (the original's)")
    parser.add_argument("--layers", type=layer_numbers, metavar="LIST", help="only these layers, as in 0-9,14")
    parser.add_argument(
        "--tokens", type=token_range, metavar="A:B", help="only tokens A to B-1; ends may be left out or negative"
    )
    add_accept_torn(parser)
    add_threads(parser)
    add_device(parser, "decode")
    add_batch_options(parser)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


@dataclass(frozen=True)
class Item:
    """One tensor to decode: ``output`` holds the given sequences of one layer and kind, one after the other."""

    output: OutputTensor
    place: int
    kind: str
    sequences: Sequence[int]


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    args.file = args.files[0]
    check_device(args)
    if batched(args):
        from ..batch import Decompress

        return run_batch(parser, Decompress(decoding(args)), args, console)
    decode_file(args.file, args.output, decoding(args), console)
    return 0


@dataclass(frozen=True)
class Decoding:
    """What to decode and how: everything ``decompress`` may be told beyond input and output."""

    dtype: str | None = None
    layers: Sequence[int] | None = None
    tokens: tuple[int | None, int | None] | None = None
    accept_torn: bool = False
    threads: int = 1
    device: str = "cpu"


def decoding(args: argparse.Namespace) -> Decoding:
    return Decoding(args.dtype, args.layers, args.tokens, args.accept_torn, threads(args), args.device)


def decode_file(file: str, output: str, how: Decoding, console: Console, note: Mapping[str, str] | None = None) -> None:
    """Write what the ``.dqkv`` file (a path or URL) holds to ``output``; ``note`` goes into its metadata."""
    from ..file import open as open_file
    from ..staged import written
    from ..tensors import SafetensorsWriter
    from ..warm import DECODE

    check_output(output, file)
    if base_name(output).endswith((".npz", ".dqkv")):
        raise InputError("decompress writes .safetensors; name OUT so", code="output-type", path=shown(output))
    with (
        naming(file),
        open_file(file, threads=how.threads, device=how.device) as reader,
        written(output) as place,
    ):
        if reader.torn and not how.accept_torn:
            whole = ", ".join(str(sequence.tokens) for sequence in reader.sequences)
            raise TruncatedError(
                f"the file was not closed or lost its end; {whole} tokens are whole, --accept-torn takes them",
                code="log-torn",
            )
        numbers = present_layers(reader, how.layers)
        # Sequences of different length share no range; each is cut by its own.
        ranges = [resolve_tokens(how.tokens, sequence.tokens) for sequence in reader.sequences]
        items = plan_items(reader, numbers, ranges, how.dtype)
        if how.device == "cpu":
            prepare_kernels(console, DECODE, path_of(reader))
        began = perf_counter()
        total = sum(item.output.nbytes for item in items)
        about = {"decoded_from": base_name(file), "codec": "dqkv " + ", ".join(profile_names(reader))}
        with (
            progress(console, "decompressing", total) as advance,
            SafetensorsWriter(place, [item.output for item in items], {**about, **(note or {})}) as writer,
        ):
            # On the CPU the codec shares out every block among threads itself.
            workers = 0 if how.device == "cpu" else min(MOST_WORKERS, how.threads)
            _decode(reader, items, ranges, writer, advance, workers)
        stored = Path(place).stat().st_size
    seconds = perf_counter() - began
    values = sum(item.output.values for item in items)
    console.answer(
        {
            "input": shown(file),
            "output": shown(output),
            "bytes": stored,
            "values": values,
            "tensors": [
                {"name": item.output.name, "dtype": item.output.dtype, "shape": item.output.shape} for item in items
            ],
            "seconds": seconds,
        }
    )
    console.say(
        f"{shown(output)}: {size(stored)}, {len(items)} tensors as "
        f"{items[0].output.name} {items[0].output.dtype} {list(items[0].output.shape)}; "
        f"{seconds:.1f} s ({count(values / seconds)} values/s)"
    )


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


@dataclass(frozen=True)
class _Block:
    """Tokens ``start`` to ``stop`` of one sequence of ``item``, the ``slot``th of its output."""

    item: Item
    slot: int
    first: int
    start: int
    stop: int


def _blocks(items: Sequence[Item], ranges: Sequence[tuple[int, int]]) -> Iterator[_Block]:
    for item in items:
        geometry = item.output.geometry
        step = max(128, BLOCK_BYTES // (4 * geometry.heads * geometry.head_dim) // 128 * 128)
        for slot, sequence in enumerate(item.sequences):
            first, last = ranges[sequence]
            for start in range(first, last, step):
                yield _Block(item, slot, first, start, min(start + step, last))


def _decode(
    reader: Any,
    items: Sequence[Item],
    ranges: Sequence[tuple[int, int]],
    writer: SafetensorsWriter,
    advance: Advance,
    workers: int,
) -> None:
    """Write all blocks, in order; so many ``workers``, threads, decode the next ones meanwhile."""
    import numpy as np

    from ..tensors import numpy_dtype

    def decode(block: _Block) -> tuple[_Block, NDArray[Any]]:
        item = block.item
        tensor = getattr(reader.sequences[item.sequences[block.slot]].layers[item.place], item.kind)
        rows: NDArray[Any] = tensor.read(block.start, block.stop, dtype=numpy_dtype(item.output.dtype))
        if workers and not item.output.layout.endswith("THD"):
            # Heads one after the other, as they are written: not a matter for the one thread that writes.
            rows = np.ascontiguousarray(rows.transpose(1, 0, 2)).transpose(1, 0, 2)
        return block, rows

    blocks = _blocks(items, ranges)
    with ExitStack() as opened:
        results: Iterator[tuple[_Block, NDArray[Any]]] = map(decode, blocks)
        if workers:
            pool = opened.enter_context(ThreadPoolExecutor(workers))
            results = opened.enter_context(closing(in_order(pool, decode, blocks, 2 * MOST_WORKERS)))
        for block, rows in results:
            writer.write(block.item.output.name, block.slot, block.start - block.first, rows)
            advance(rows.nbytes)
