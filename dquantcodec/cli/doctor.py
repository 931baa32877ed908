"""``dqkv doctor``: whether this installation is sound, and how to mend it."""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import asdict
from typing import Any

from .console import Console, paint
from .options import CommandParser, common_options

EPILOG = """\
Exits with 1 if something does not work. What is merely not there (a GPU, CuPy)
or slower than it could be is said and is no failure.
"""

_MARKS = {"good": ("ok", "green"), "absent": ("-", "dim"), "poor": ("slow", "bold"), "bad": ("BAD", "red")}


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "doctor",
        parents=[common_options()],
        description="Check versions, processor, accelerators and caches; run a self-test.",
        epilog=EPILOG,
    )
    parser.set_defaults(run=run, file="dquantcodec")


def run(args: argparse.Namespace, console: Console) -> int:
    from ..doctor import BAD, GOOD, examine

    facts = []
    for fact in examine():
        facts.append(fact)
        if console.quiet and fact.state == GOOD:
            continue
        mark, style = _MARKS[fact.state]
        console.result(f"{paint(mark.rjust(4), style, sys.stdout)}  {fact.name.ljust(20)}{fact.found}")
        if fact.remedy:
            console.result(textwrap.indent(textwrap.fill(fact.remedy, 72), " " * 26))
    broken = sum(fact.state == BAD for fact in facts)
    console.answer({"sound": not broken, "facts": [asdict(fact) for fact in facts]})
    if broken:
        console.say(paint(f"{broken} of {len(facts)} checks failed", "red", sys.stdout))
    else:
        console.say(f"everything that is needed {paint('works', 'green', sys.stdout)}")
    return 1 if broken else 0
