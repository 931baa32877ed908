"""``dqkv completion``: completion for shells, made from the command line itself.

The script knows commands, options and choices; nothing of Python runs when a shell asks for completions.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from .console import Console
from .options import CommandParser, common_options

SHELLS = ("bash", "zsh", "fish")

#: Metavars of options whose values are names of files or folders.
_PATHS = ("DIR", "FILE", "OUT", "PAGE", "Q")

EPILOG = """\
The script goes where the shell looks for it, or into its start-up file:

  bash  eval "$(dqkv completion bash)"          in ~/.bashrc
  zsh   eval "$(dqkv completion zsh)"           in ~/.zshrc, after compinit
  fish  dqkv completion fish > ~/.config/fish/completions/dqkv.fish
"""


class Argument(NamedTuple):
    """An option (with its names) or a positional argument: what it is for, and what may be put in its place.

    ``words`` are offered, and file names if ``files``; an option with neither and ``value`` takes something unknown.
    """

    names: tuple[str, ...]
    help: str
    value: bool
    words: tuple[str, ...]
    files: bool


class Command(NamedTuple):
    """A sub-command, or (with an empty name) what comes before one."""

    name: str
    help: str
    arguments: tuple[Argument, ...]


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "completion",
        parents=[common_options()],
        description="Print a script that completes this command in a shell.",
        epilog=EPILOG,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run, file="completion")


def run(args: argparse.Namespace, console: Console) -> int:
    from . import shells
    from .main import COMMANDS, build_parser

    script = getattr(shells, args.shell)(read_commands(build_parser(), COMMANDS))
    console.result(script.rstrip("\n"))
    console.answer({"shell": args.shell, "script": script})
    return 0


def read_commands(parser: argparse.ArgumentParser, summaries: dict[str, str]) -> list[Command]:
    """What ``parser`` takes before a sub-command, and then every sub-command."""
    subcommands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    read = [Command("", "", _arguments(parser))]
    read += [Command(name, summaries[name], _arguments(one)) for name, one in subcommands.choices.items()]
    return read


def _arguments(parser: argparse.ArgumentParser) -> tuple[Argument, ...]:
    return tuple(_argument(action) for action in parser._actions if not isinstance(action, argparse._SubParsersAction))


def _argument(action: argparse.Action) -> Argument:
    names = tuple(action.option_strings)
    words = tuple(str(choice) for choice in action.choices or ())
    if "--profile" in names and not words:  # a name, or a file that plan wrote
        from ..profile import PROFILES

        return Argument(names, action.help or "", True, tuple(PROFILES), True)
    files = not words and (not names or action.metavar in _PATHS)
    return Argument(names, action.help or "", action.nargs != 0, words, files)
