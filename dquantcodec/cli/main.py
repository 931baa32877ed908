"""Entry point of ``dqkv``: picks the sub-command and turns every failure into one line and an exit status.

Exit status: 0 all went well, 1 an error or a finding, 2 wrong usage, 130 interrupted (143 terminated).
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from ..errors import DeviceError, DQuantError
from . import append, compare, compress, convert, decompress, demo, doctor, info, plan, repack, reshard, verify
from .console import Console, locate, paint
from .options import CommandParser, common_options

COMMANDS = (demo, compress, append, decompress, info, verify, compare, repack, reshard, convert, plan, doctor)

_SYSTEM_CODES = {
    errno.ENOENT: "not-found",
    errno.EACCES: "no-permission",
    errno.EPERM: "no-permission",
    errno.EROFS: "no-permission",
    errno.EISDIR: "is-folder",
    errno.ENOTDIR: "not-folder",
    errno.ENOSPC: "disk-full",
    errno.EDQUOT: "disk-full",
    errno.EFBIG: "disk-full",
}


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
    parser.set_defaults(quiet=False, debug=False)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dqkv`` with ``argv`` (default: the process's arguments); returns the exit status."""
    args = build_parser().parse_args(argv)
    try:
        with _termination_unwinds():
            status: int = args.run(args, Console(args.quiet))
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has gone (dqkv info FILE | head): nothing is left to say, nor a place to say it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        if args.debug:
            raise
        terminated = isinstance(stop, _Terminated)
        _complain("terminated" if terminated else "interrupted")
        return 143 if terminated else 130
    except Exception as error:
        if args.debug:
            raise
        _complain(_describe(error, args))
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
    print(f"{paint('dqkv:', 'bold', sys.stderr)} {text}", file=sys.stderr)


def _describe(error: Exception, args: argparse.Namespace) -> str:
    """``error: FILE: place: message [code]``, and the list that a message may end with on lines of its own."""
    if isinstance(error, OSError):
        code = _SYSTEM_CODES.get(error.errno or 0, "io")
        return _line(_system_path(error, args), "", error.strerror or str(error), code)
    if isinstance(error, MemoryError):
        return _line("", "", "out of memory", "no-memory")
    if isinstance(error, (DQuantError, DeviceError)):
        return _line(*locate(error.where, str(error), args.file), error.code)
    if isinstance(error, ModuleNotFoundError):
        return _line("", "", f"the package {error.name} is not installed", "not-installed")
    kind = type(error).__name__
    return _line("", "", f"internal error, please report it with the output of --debug: {kind}: {error}", "internal")


def _line(path: str, place: str, message: str, code: str) -> str:
    first, *rest = message.split("\n")
    colon = ":" if rest else ""
    parts = [part for part in (path, place, first.removesuffix(":")) if part]
    head = f"{paint('error:', 'red', sys.stderr)} {': '.join(parts)} [{code}]{colon}"
    return "\n".join([head, *rest])


def _system_path(error: OSError, args: argparse.Namespace) -> str:
    """The file a system error is about: writes do not say theirs, and it is the output that fills a disk."""
    if error.filename is not None:
        return os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else str(error.filename)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return str(getattr(args, "output", None) or args.file if full else args.file)
