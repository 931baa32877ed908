"""``dqkv reshard``: a cache in files for another number of ranks."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..profile import PROFILES
from .console import Console, size
from .options import CommandParser, add_threads, check_output, common_options, positive, threads
from .progress import path_of, prepare_kernels, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..file.resharding import Recoded

EPILOG = """\
IN is one file, or the files of all ranks of one cache in any order. With one
rank OUT is a file, otherwise a folder for shard-0-of-N.dqkv and so on. Head
groups are copied as they are where that serves; where they would be cut or
joined, they are decoded and encoded again only with --recode, and what that
loses is told. To make a file that can be cut later: compress --head-groups.

  dqkv reshard cache.dqkv ranks/ --ranks 4
  dqkv reshard ranks/*.dqkv whole.dqkv --ranks 1
  dqkv reshard whole.dqkv one.dqkv --ranks 1 --head-groups 1 --recode
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "reshard",
        parents=[common_options()],
        description="Cut or join .dqkv files by KV heads, for the ranks of tensor parallelism.",
        epilog=EPILOG,
    )
    parser.intermixed = True
    parser.add_argument("files", nargs="+", metavar="IN", help="the .dqkv file, or those of all ranks")
    parser.add_argument("output", metavar="OUT", help="the file to write (replaced if it exists), or a folder")
    parser.add_argument("--ranks", type=positive, required=True, metavar="N", help="files to write")
    parser.add_argument(
        "--head-groups", type=positive, metavar="G", help="head groups of a layer in every file (as they are)"
    )
    parser.add_argument("--recode", action="store_true", help="encode again what cannot be copied, with some loss")
    parser.add_argument(
        "--profile", choices=tuple(PROFILES), metavar="NAME", help="encode that with this profile (the pages' own)"
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file
    from ..file import reshard
    from ..warm import DECODE, ENCODE

    args.file = args.files[0]
    began = perf_counter()
    with ExitStack() as stack:
        readers = [stack.enter_context(open_file(path, mode="strict")) for path in args.files]
        shard = readers[0].header.info.shard if len(readers) == 1 else (0, 1)
        outputs = _outputs(args.output, args.ranks, shard)
        for path in args.files:
            for output in outputs:
                check_output(str(output), path)
        if args.recode:
            prepare_kernels(console, (*ENCODE, *DECODE), path_of(readers[0]))
        tokens = sum(sequence.tokens for sequence in readers[0].sequences)
        with progress(console, "resharding", tokens, "token") as advance:
            recoded = reshard(
                readers,
                outputs,
                head_groups=args.head_groups,
                recode=args.recode,
                profile=args.profile,
                threads=threads(args),
                progress=advance,
            )
    seconds = perf_counter() - began
    facts = {"inputs": args.files, "outputs": [{"file": one, "bytes": one.stat().st_size} for one in outputs]}
    console.answer({**facts, "recoded": [asdict(group) for group in recoded], "seconds": seconds})
    for line in describe(recoded):
        console.result(line)
    for output in outputs:
        console.say(f"{output}: {size(output.stat().st_size)}")
    console.say(f"{'no page was' if not recoded else 'pages were'} encoded again; {seconds:.1f} s")
    return 0


def _outputs(output: str, ranks: int, shard: tuple[int, int]) -> list[Path]:
    """The files to write; the folder for several is made if only it is missing."""
    path = Path(output)
    if ranks == 1:
        return [path]
    if path.is_file():
        raise InputError(f"is a file; {ranks} files need a folder", code="not-folder", path=output)
    if not path.is_dir():
        if not path.parent.is_dir():
            raise InputError(f"there is no folder {path.parent} to make it in", code="not-found", path=output)
        path.mkdir()
    first, count = shard
    return [path / f"shard-{first * ranks + part}-of-{count * ranks}.dqkv" for part in range(ranks)]


def describe(recoded: Sequence[Recoded]) -> list[str]:
    """A line for every layer that was encoded again: which heads, and what it cost."""
    lines = []
    for number in dict.fromkeys(group.layer for group in recoded):
        groups = [group for group in recoded if group.layer == number]
        heads = ", ".join(_span(group.heads) for group in groups)
        lines.append(
            f"layer {number}: encoded heads {heads} again; NMSE to the pages before: keys "
            f"{_shares([group.key_nmse for group in groups])}, values "
            f"{_shares([group.value_nmse for group in groups])} (keys: without their means)"
        )
    return lines


def _span(heads: range) -> str:
    return str(heads.start) if len(heads) == 1 else f"{heads.start}-{heads.stop - 1}"


def _shares(found: list[float | None]) -> str:
    known = [share for share in found if share is not None]
    return ", ".join(f"{100 * share:.2f} %" for share in known) if known else "none coded"
