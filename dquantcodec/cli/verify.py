"""``dqkv verify``: every byte of a ``.dqkv`` file that can be checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DQuantError
from .console import Console, locate, paint, size
from .options import CommandParser, check_output, common_options, naming
from .progress import path_of, prepare_kernels, progress
from .repack import copy

EPILOG = """\
Prints one line per finding and exits with 1 if there is any. Reads and decodes
everything: headers, records, checksums, padding, the index against the records,
and every container. With --salvage, what can be read goes into a new file: every
sequence up to its first token that is lost.

  dqkv verify cache.dqkv
  dqkv verify damaged.dqkv --salvage rescued.dqkv
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "verify",
        parents=[common_options()],
        description="Check every byte of a .dqkv file that can be checked, and decode every container.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="the .dqkv file")
    parser.add_argument("--salvage", metavar="OUT", help="also write what can be read to a new file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    if args.salvage is not None:
        check_output(args.salvage, args.file)
    status = check(args, console)
    if args.salvage is not None:
        salvage(args, console)
    return status


def salvage(args: argparse.Namespace, console: Console) -> None:
    """Copy what can be read of the file, and say what cannot."""
    from ..file import open as open_file

    with naming(args.file), open_file(args.file, mode="salvage") as reader:
        for finding in reader.lost:
            console.result("lost: " + _line(finding.where, finding.message, finding.code, args.file))
        copy(reader, args.salvage, console)


def check(args: argparse.Namespace, console: Console) -> int:
    """Print all findings; the exit status."""
    from ..file import open as open_file
    from ..warm import DECODE

    findings = 0
    total = Path(args.file).stat().st_size
    try:
        with open_file(args.file) as reader:
            prepare_kernels(console, DECODE, path_of(reader))
            with progress(console, "verifying", total) as advance:
                for finding in reader.verify(advance):
                    findings += 1
                    console.result(_line(finding.where, finding.message, finding.code, args.file))
    except DQuantError as error:
        # A file that cannot even be opened is one finding more, not a failure of the check.
        findings += 1
        console.result(_line(error.where, str(error), error.code, args.file))
    if findings:
        console.say(paint(f"{findings} finding{'s' if findings > 1 else ''}", "red", sys.stdout))
        return 1
    console.say(f"{args.file}: {paint('sound', 'green', sys.stdout)} ({size(total)} checked)")
    return 0


def _line(where: Mapping[str, object], message: str, code: str, file: str) -> str:
    parts = locate(where, " ".join(message.split()), file)
    return ": ".join(part for part in parts if part) + f" [{code}]"
