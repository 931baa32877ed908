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
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from ..errors import DeviceError, DQuantError
from .console import Console, locate, paint
from .options import CommandParser, common_options

#: What each sub-command does, in the order of the help.  A command's module is imported when it is asked for.
COMMANDS = {
    "demo": "compress bundled real data and show what it costs",
    "compress": "saved keys and values into a .dqkv file",
    "append": "more tokens into a .dqkv file",
    "decompress": "a .dqkv file back into safetensors",
    "info": "what a .dqkv file holds",
    "verify": "check every byte of a .dqkv file",
    "compare": "how far a .dqkv file is from its original",
    "repack": "a smaller file after appending",
    "reshard": "a cache in files for another number of ranks",
    "convert": "a state of llama.cpp into a .dqkv file, or back",
    "plan": "what a cache takes, and containers by layer",
    "doctor": "check this installation",
    "completion": "completion of this command for bash, zsh or fish",
}

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


class _Listed:
    """Gives the parsers of sub-commands, made by their modules, the help that :data:`COMMANDS` has for them."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands

    def add_parser(self, name: str, **settings: Any) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = self._commands.add_parser(name, **{**settings, "help": COMMANDS[name]})
        return parser


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """The whole command line, or as much of it as parsing ``argv`` needs: other sub-commands are names alone."""
    parser = CommandParser(
        prog="dqkv",
        parents=[common_options()],
        description="Compress saved key/value caches of language models to .dqkv files, and back.",
        epilog="dqkv COMMAND --help tells the rest. Try it on bundled real data: dqkv demo",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    parser.set_defaults(quiet=False, debug=False)
    # No option before the sub-command takes a value.
    asked = None if argv is None else next((word for word in argv if not word.startswith("-")), "")
    nameless = CommandParser(add_help=False)
    parser_class: Any = lambda named=True, **settings: CommandParser(**settings) if named else nameless  # noqa: E731
    commands = _Listed(
        parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=parser_class)
    )
    for name in COMMANDS:
        if asked in (None, name):
            import_module(f"{__package__}.{name}").add_parser(commands)
        else:
            commands.add_parser(name, named=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dqkv`` with ``argv`` (default: the process's arguments); returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = build_parser(words).parse_args(words)
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
