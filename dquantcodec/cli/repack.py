"""``dqkv repack``: what is live in a ``.dqkv`` file, in a new one."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

from ..errors import TruncatedError
from .console import Console, size
from .options import CommandParser, add_accept_torn, check_output, common_options, naming
from .progress import progress

EPILOG = """\
Appending leaves records behind that hold nothing any more, and small ones. OUT
has neither; every token reads as before, bit for bit: pages are copied, not
coded again. OUT is replaced if it exists, but only once the new file is
complete and on the disk.

  dqkv repack cache.dqkv smaller.dqkv
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "repack",
        parents=[common_options()],
        description="Copy what a .dqkv file holds into a new one, without what appending left behind.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="IN", help="the .dqkv file")
    parser.add_argument("output", metavar="OUT", help="the .dqkv file to write (replaced if it exists)")
    add_accept_torn(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file

    check_output(args.output, args.file)
    with naming(args.file), open_file(args.file) as reader:
        if reader.torn and not args.accept_torn:
            raise TruncatedError(
                "the file was not closed or lost its end; --accept-torn takes the tokens that are whole",
                code="log-torn",
            )
        console.answer({"input": args.file, **copy(reader, args.output, console)})
    return 0


def copy(reader: Any, output: str, console: Console) -> dict[str, Any]:
    """Repack ``reader`` to ``output`` and say how large it is; the same as JSON values."""
    from ..file import repack

    began = perf_counter()
    before = reader.accounting().bytes
    with progress(console, "copying", sum(one.tokens for one in reader.sequences), " tokens") as advance:
        after = repack(reader, output, progress=advance)
    seconds = perf_counter() - began
    held = [one.tokens for one in reader.sequences]
    told = ", ".join(map(str, held))
    console.say(f"{output}: {size(after)} instead of {size(before)}; {told} tokens; {seconds:.1f} s")
    return {
        "output": output, "bytes": after, "bytes_before": before, "tokens_by_sequence": held, "seconds": seconds,
    }  # fmt: skip
