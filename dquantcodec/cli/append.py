"""``dqkv append``: more tokens into a ``.dqkv`` file that is there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import DQuantError, InputError
from ..urls import is_url, refuse_appending
from .console import Console, count, size
from .copying import copy_tokens, reading_threads, tell_replaced
from .info import collect_file
from .options import (
    CommandParser,
    add_device,
    add_nonfinite,
    add_source_options,
    add_threads,
    check_device,
    check_source_options,
    common_options,
    naming,
    threads,
)
from .present import present_layers
from .progress import path_of, prepare_kernels, progress

if TYPE_CHECKING:
    from ..tensors import KVSource

EPILOG = """\
The tokens of IN follow those that FILE holds; with --whole, IN begins with the
tokens that FILE holds and only the others are taken. FILE keeps its layers, its
profile, and how many tokens stay exact; only whole windows are coded. It is
written in place: who has it open keeps what it had, and a crash loses nothing
that was there. An append that fails takes back what it added.

  dqkv append turn2.safetensors cache.dqkv
  dqkv append context.safetensors cache.dqkv --whole
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "append",
        parents=[common_options()],
        description="Append saved keys and values to the tokens of a .dqkv file.",
        epilog=EPILOG,
    )
    parser.add_argument("source", metavar="IN", help=".safetensors, .npz, or a folder of them")
    parser.add_argument("file", metavar="FILE", help="the .dqkv file to append to")
    parser.add_argument("--whole", action="store_true", help="skip as many tokens of IN as FILE holds")
    add_nonfinite(parser)
    add_threads(parser)
    add_device(parser, "encode")
    add_source_options(parser)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    from ..file import append as append_to
    from ..file import open as open_file
    from ..tensors import open_source
    from ..warm import ENCODE

    check_source_options(parser, args)
    if is_url(args.file):
        raise refuse_appending(args.file)
    check_device(args)
    with naming(args.file), open_file(args.file) as reader:
        _check_reader(reader)
        before = [sequence.tokens for sequence in reader.sequences]
        numbers = present_layers(reader)
        source = open_source(
            args.source, key=args.key, value=args.value, layout=args.layout, layers=numbers, bits=args.bits
        )
        for line in source.describe():
            console.say(line)
        _check_fits(source, reader)
        skipped = before if args.whole else [0] * source.sequences
        if args.whole and source.tokens < max(before):
            raise InputError(
                f"has {source.tokens} tokens, fewer than the {max(before)} that {args.file} holds",
                code="append-tokens",
                path=args.source,
            )
        if args.device == "cpu":
            prepare_kernels(console, ENCODE, path_of(reader))
    began = perf_counter()
    added = sum(source.tokens - first for first in skipped)
    with (
        naming(args.file),
        _taken_back(args.file, before, console),
        progress(console, "appending", added * source.token_bytes) as advance,
        append_to(args.file, threads=threads(args), device=args.device) as writer,
    ):
        readers = reading_threads(args.device, threads(args))
        replaced = copy_tokens(source, _Places(writer, reader), args.nonfinite, advance, skipped, readers)
    seconds = perf_counter() - began
    tell_replaced(replaced, args.nonfinite, console)
    if console.json:
        facts = {"input": args.source, "added_tokens": added, "replaced": replaced}
        console.answer({**facts, "info": collect_file(args.file), "seconds": seconds})
    held = ", ".join(str(tokens + source.tokens - first) for tokens, first in zip(before, skipped))
    speed = count(added * source.token_bytes / seconds)
    console.say(
        f"{args.file}: {added} token{'' if added == 1 else 's'} added, {held} held; "
        f"{size(Path(args.file).stat().st_size)}; {seconds:.1f} s ({speed}B/s)"
    )
    return 0


class _Places:
    """A writer that takes the stored layers only, and no word for absent ones."""

    def __init__(self, writer: Any, reader: Any) -> None:
        self._writer = writer
        self._absent = [layer.spec.storage == "absent" for layer in reader.layers]

    def append(self, keys: Sequence[Any], values: Sequence[Any], sequence: int) -> None:
        self._writer.append(self._spread(keys), self._spread(values), sequence=sequence)

    def finish(self, sequence: int) -> None:
        self._writer.finish(sequence)

    def _spread(self, arrays: Sequence[Any]) -> list[Any]:
        given = iter(arrays)
        return [None if absent else next(given) for absent in self._absent]


@contextmanager
def _taken_back(path: str, before: Sequence[int], console: Console) -> Iterator[None]:
    """If something fails, the file ends with as many tokens as it had, or a warning says that it does not."""
    from ..file import append as append_to

    try:
        yield
    except BaseException:
        try:
            with append_to(path) as writer:
                for sequence, tokens in enumerate(before):
                    if writer.tokens(sequence) > tokens:
                        writer.rewind(tokens, sequence)
        except InputError as error:
            if error.code != "file-locked":  # another writer was there first, and nothing was added
                console.warn(f"{path} may hold some of the new tokens: {error}")
        except (DQuantError, OSError) as error:
            console.warn(f"{path} may hold some of the new tokens: {error}")
        raise


def _check_reader(reader: Any) -> None:
    if all(layer.spec.storage == "absent" for layer in reader.layers):
        raise InputError("the file stores no layer, so nothing can be appended", code="append-layers")


def _check_fits(source: KVSource, reader: Any) -> None:
    """Refuse an input of other sequences, geometry or element type than the file's."""
    if source.sequences != len(reader.sequences):
        raise InputError(
            f"has {source.sequences} sequences, {reader.path} has {len(reader.sequences)}",
            code="append-sequences",
            path=source.path,
        )
    for number, place in present_layers(reader).items():
        given, spec = source.layer(number), reader.layers[place].spec
        found, wanted = ((one.kv_heads, one.head_dim, one.dtype) for one in (given, spec))
        if found != wanted:
            raise InputError(
                f"layer {number} has {found[0]} KV heads of {found[1]}, {found[2]}; in {reader.path} it has "
                f"{wanted[0]} of {wanted[1]}, {wanted[2]}",
                code="append-layers",
                path=source.path,
            )
