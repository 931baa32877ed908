"""``dqkv verify``: every byte of a ``.dqkv`` file that can be checked."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from ..errors import DQuantError
from ..urls import shown
from .console import Console, locate, paint, size
from .many import add_batch_options, batched, run_batch
from .options import CommandParser, check_output, common_options, naming
from .progress import path_of, prepare_kernels, progress
from .repack import copy

EPILOG = """\
Prints one line per finding and exits with 1 if there is any. Reads and decodes
everything: headers, records, checksums, padding, the index against the records,
and every container. With --salvage, what can be read goes into another file:
every sequence up to its first token that is lost.

  dqkv verify cache.dqkv
  dqkv verify damaged.dqkv --salvage rescued.dqkv
  dqkv verify coded/ --jobs 4
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "verify",
        parents=[common_options()],
        description="Check every byte of a .dqkv file that can be checked; decode every container.",
        epilog=EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="the .dqkv file; with --jobs several, or a folder")
    parser.add_argument("--salvage", metavar="OUT", help="file to write what can be read to (replaced if it exists)")
    add_batch_options(parser, redo=False)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    args.file = args.files[0]
    if batched(args):
        from ..batch import Verify

        if args.salvage is not None:
            parser.error("--salvage takes one file")
        return run_batch(parser, Verify(), args, console)
    if args.salvage is not None:
        check_output(args.salvage, args.file)
    facts = check(args, console)
    facts["salvaged"] = None if args.salvage is None else salvage(args, console)
    console.answer(facts)
    return 0 if facts["sound"] else 1


def salvage(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Copy what can be read of the file, and say what cannot."""
    from ..file import open as open_file

    with naming(args.file), open_file(args.file, mode="salvage") as reader:
        for finding in reader.lost:
            console.result("lost: " + _line(finding.where, finding.message, finding.code, args.file))
        lost = [{"code": one.code, "message": one.message, "where": one.where} for one in reader.lost]
        return {**copy(reader, args.salvage, console), "lost": lost}


def check(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Print all findings; they and what was checked as JSON values."""
    from ..file import open as open_file
    from ..places import size_of
    from ..warm import DECODE

    findings: list[dict[str, Any]] = []
    total = size_of(args.file)
    try:
        with open_file(args.file) as reader:
            prepare_kernels(console, DECODE, path_of(reader))
            with progress(console, "verifying", total) as advance:
                for finding in reader.verify(advance):
                    findings.append({"code": finding.code, "message": finding.message, "where": finding.where})
                    console.result(_line(finding.where, finding.message, finding.code, args.file))
    except DQuantError as error:
        # A file that cannot even be opened is one finding more, not a failure of the check.
        findings.append({"code": error.code, "message": str(error), "where": error.where})
        console.result(_line(error.where, str(error), error.code, args.file))
    if findings:
        console.say(paint(f"{len(findings)} finding{'s' if len(findings) > 1 else ''}", "red", sys.stdout))
    else:
        console.say(f"{shown(args.file)}: {paint('sound', 'green', sys.stdout)} ({size(total)} checked)")
    return {"file": shown(args.file), "bytes": total, "sound": not findings, "findings": findings}


def _line(where: Mapping[str, object], message: str, code: str, file: str) -> str:
    parts = locate(where, " ".join(message.split()), shown(file))
    return ": ".join(part for part in parts if part) + f" [{code}]"
