"""Entry point of ``dqkv``: picks the sub-command and turns every failure into one line and an exit status.

Exit status: 0 all went well, 1 an error or a finding, 2 wrong usage, 130 interrupted (143 terminated).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from . import append, bench, compare, compress, convert, decompress, demo, doctor, info, plan, repack, reshard, verify
from .console import Console, document, paint, write
from .options import CommandParser, UsageError, common_options

COMMANDS = (demo, compress, append, decompress, info, verify, compare, repack, reshard, convert, plan, bench, doctor)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, unwound like Ctrl-C so that no unfinished file stays behind."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from .. import __version__

        print(f"dqkv {__version__}")
        parser.exit(0)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; imports nothing heavy."""
    parser = CommandParser(
        prog="dqkv",
        parents=[common_options()],
        description="Compress saved key/value caches of language models to .dqkv files, and back.",
        epilog="dqkv COMMAND --help tells the rest. Try it on bundled real data: dqkv demo",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.set_defaults(quiet=False, json=False, debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dqkv`` with ``argv`` (default: the process's arguments); returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(build_parser().parse_args(argv))
    except UsageError as error:
        # What could not be parsed cannot say whether it asked for JSON.
        if "--json" in argv:
            from .failure import Failure

            print(document(Failure("UsageError", "usage", error.message).answer()))
        raise


def _run(args: argparse.Namespace) -> int:
    try:
        with _termination_unwinds():
            status: int = args.run(args, Console(args.quiet, args.json))
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has gone (dqkv info FILE | head): nothing is left to say, nor a place to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, _Terminated)
        word = "terminated" if terminated else "interrupted"
        if args.json:
            from .failure import Failure

            print(document(Failure(word.capitalize(), word, word).answer()))
        if args.debug:
            raise
        _complain(word)
        return 143 if terminated else 130
    except Exception as error:
        from .failure import Failure

        failure = Failure.of(error, args)
        if args.json:
            print(document(failure.answer()))
        if args.debug:
            raise
        _complain(failure.line())
        return 1


@contextmanager
def _termination_unwinds() -> Iterator[None]:
    """SIGTERM raises like Ctrl-C, where signals may be handled at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise _Terminated


def _complain(text: str) -> None:
    write(f"{paint('dqkv:', 'bold', sys.stderr)} {text}", sys.stderr)
