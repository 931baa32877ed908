"""Arguments that sub-commands share, and how their values are read."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ..errors import InputError
from .console import write


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, and leaves room for the names of sub-commands, whose indent argparse forgets."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = 14


class CommandParser(argparse.ArgumentParser):
    """Says what is wrong about the usage in the same form as every other error.

    ``intermixed``: options may stand between positional arguments of which one takes several.
    """

    intermixed = False

    def __init__(self, **settings: object) -> None:
        settings.setdefault("formatter_class", _Help)
        super().__init__(**settings)  # type: ignore[arg-type]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if not self.intermixed:
            return super().parse_known_args(args, namespace)
        self.intermixed = False  # the method calls this one for its two passes
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self.intermixed = True

    def error(self, message: str) -> NoReturn:
        write(f"dqkv: error: {message} [usage]\nhelp: {self.prog} --help", sys.stderr)
        raise UsageError(message)


class UsageError(SystemExit):
    """Wrong usage, said on standard error already: ends the process with status 2."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


def common_options() -> argparse.ArgumentParser:
    """``--quiet``, ``--json`` and ``--debug``, accepted before and after the sub-command."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--quiet", action="store_true", default=argparse.SUPPRESS, help="print nothing but results and errors"
    )
    parser.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document, for programs"
    )
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
    )
    return parser


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """How to find keys and values in an input."""
    group = parser.add_argument_group("reading the input (all optional; by default it is recognised)")
    group.add_argument("--key", metavar="PATTERN", help="names of the key tensors, as in 'cache.{layer}.K'")
    group.add_argument("--value", metavar="PATTERN", help="names of the value tensors, as in 'cache.{layer}.V'")
    group.add_argument(
        "--layout",
        choices=("BHTD", "HTD", "THD", "BTHD"),
        type=str.upper,
        help="axes of the tensors: B sequences, H KV heads, T tokens, D head_dim (4 axes: BHTD)",
    )
    group.add_argument(
        "--bits",
        choices=("bfloat16", "float16"),
        help="what 16-bit integers stand for (NumPy cannot save bfloat16 by itself)",
    )


def check_source_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if (args.key is None) != (args.value is None):
        parser.error("--key and --value must be given together")


def add_profile(parser: argparse.ArgumentParser) -> None:
    from ..profile import DEFAULT_PROFILE, PROFILES

    parser.add_argument(
        "--profile",
        choices=tuple(PROFILES),
        default=DEFAULT_PROFILE,
        metavar="NAME",
        help=f"bits/value and codec: {', '.join(PROFILES)} ({DEFAULT_PROFILE})",
    )


def add_recent(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recent", type=not_negative, default=128, metavar="N", help="newest tokens to keep exact (128)"
    )


def add_sinks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sinks", type=not_negative, metavar="N", help="first tokens to keep exact (what the profile asks for: 1)"
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", metavar="NAME", help="name of the model, kept in the file")


def add_accept_torn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--accept-torn", action="store_true", help="take the tokens that are whole in a file that lost its end"
    )


def add_nonfinite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nonfinite",
        choices=("error", "clamp", "zero"),
        default="error",
        help="what to do with NaN and infinity: refuse them (error), or count them and put 0 (zero), or put 0 for NaN "
        "and the largest finite magnitude of the same token for infinity (clamp)",
    )


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=positive, default=None, metavar="N", help="threads to use (all cores)")


def add_device(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help=f"{what} on cpu, cuda or cuda:1, with the same result (cpu)"
    )


def check_device(args: argparse.Namespace) -> None:
    """Raise, before any work, the :class:`DeviceError` of a device that cannot be used."""
    if args.device != "cpu":
        from ..cuda.codec import device_number
        from ..cuda.device import device

        device(device_number(args.device))


def threads(args: argparse.Namespace) -> int:
    """The threads to use: as asked, else as many as this process may run on."""
    if args.threads is not None:
        return int(args.threads)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def layer_numbers(text: str) -> list[int]:
    """``"0-9,14"`` -> the numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
        if not found:
            raise argparse.ArgumentTypeError(f"{text!r} is no list of layers such as 0-9,14")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise argparse.ArgumentTypeError(f"the range {part.strip()} runs backwards")
        numbers.extend(range(first, last + 1))
    return sorted(set(numbers))


def token_range(text: str) -> tuple[int | None, int | None]:
    """``"a:b"`` with either end left out or negative, as in Python."""
    found = re.fullmatch(r"\s*(-?\d{1,13})?\s*:\s*(-?\d{1,13})?\s*", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of tokens such as 128:256, :256 or -128:")
    return (int(found[1]) if found[1] else None, int(found[2]) if found[2] else None)


def resolve_tokens(wanted: tuple[int | None, int | None] | None, tokens: int) -> tuple[int, int]:
    """First token and the one after the last, of ``tokens``; :class:`InputError` if the range reaches outside."""
    if not tokens:
        raise InputError("the file holds no tokens", code="tokens-range")
    start, stop = wanted or (None, None)
    first = 0 if start is None else start + tokens if start < 0 else start
    last = tokens if stop is None else stop + tokens if stop < 0 else stop
    if not 0 <= first < last <= tokens:
        shown = f"{'' if start is None else start}:{'' if stop is None else stop}"
        raise InputError(f"tokens {shown} do not lie within the {tokens} tokens of the file", code="tokens-range")
    return first, last


def not_negative(text: str) -> int:
    if not re.fullmatch(r"\d{1,13}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    number = not_negative(text)
    if not number:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def check_output(output: str, file: str) -> None:
    """Refuse, before any work, an output that cannot or must not be written."""
    from pathlib import Path  # the help does without

    from ..urls import check_writable, is_url, plain, shown

    if is_url(output):
        check_writable(output)
        if output == file:
            raise InputError("input and output are the same object", code="output-is-input", path=shown(output))
        return
    path = Path(plain(output))
    if path.is_dir():
        raise InputError("is a folder; give the name of a file", code="is-folder", path=output)
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write it to", code="not-found", path=output)
    if path.exists() and Path(file).exists() and path.samefile(file):
        raise InputError("input and output are the same file", code="output-is-input", path=output)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Errors about data raised inside say ``path`` unless they know better."""
    from ..urls import shown

    try:
        yield
    except Exception as error:
        where = getattr(error, "where", None)
        if isinstance(where, dict):
            where.setdefault("path", shown(path))
        raise
