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
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

from .console import Console, document, paint, write
from .options import CommandParser, UsageError, common_options

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
    "bench": "how fast this machine is",
    "doctor": "check this installation",
    "completion": "completion of this command for bash, zsh or fish",
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
    parser.set_defaults(quiet=False, json=False, debug=False)
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
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run(build_parser(argv).parse_args(argv))
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
