"""``--jobs``: several files, patterns or folders, each file by itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import DQuantError
from .console import Console, paint
from .options import CommandParser, not_negative, positive, threads
from .progress import path_of, prepare_kernels, progress

if TYPE_CHECKING:
    from ..batch import Item, Outcome, Work

_PAST = {"compress": "compressed", "decompress": "decompressed", "verify": "sound"}


def add_batch_options(parser: argparse.ArgumentParser, redo: bool = True) -> None:
    group = parser.add_argument_group("many files")
    group.add_argument("--jobs", type=positive, metavar="N", help="files at a time, a process each")
    group.add_argument(
        "--retries", type=not_negative, default=1, metavar="N", help="further attempts at a file that fails (1)"
    )
    if redo:
        group.add_argument("--redo", action="store_true", help="make outputs that are finished already again")


def batched(args: argparse.Namespace) -> bool:
    """Whether every file is to be taken by itself."""
    return args.jobs is not None or len(args.files) > 1


def run_batch(parser: CommandParser, work: Work, args: argparse.Namespace, console: Console) -> int:
    """Do ``work`` to all files and say what came of it; the exit status."""
    from dataclasses import replace

    from ..batch import Compress, Decompress, plan_items, run_all

    began = perf_counter()
    jobs = args.jobs or 1
    items = plan_items(args.files, getattr(args, "output", ""), work.suffixes, work.made)
    # Every process gets its share of the cores, unless told otherwise.
    cores = threads(argparse.Namespace(threads=None))
    share = getattr(args, "threads", None) or max(1, cores // min(jobs, len(items)))
    if isinstance(work, Compress):
        work = replace(work, settings=replace(work.settings, threads=share))
    elif isinstance(work, Decompress):
        work = replace(work, decoding=replace(work.decoding, threads=share))
    _compile(work, items, console)
    with progress(console, work.name, len(items), " files") as advance:
        outcomes = run_all(
            work,
            items,
            jobs=jobs,
            threads=share,
            retries=args.retries,
            redo=getattr(args, "redo", False),
            progress=lambda _outcome: advance(1),
        )
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    console.answer({"files": [outcome.row() for outcome in outcomes], "seconds": perf_counter() - began})
    if failed:
        console.result(_table(failed))
    counts = [
        f"{sum(outcome.state == state for outcome in outcomes)} {word}"
        for state, word in (("done", _PAST[work.name]), ("skipped", "finished before"), ("failed", "failed"))
        if any(outcome.state == state for outcome in outcomes)
    ]
    console.say(f"{', '.join(counts)}; {perf_counter() - began:.1f} s")
    return 1 if failed else 0


def _compile(work: Work, items: Sequence[Item], console: Console) -> None:
    """Kernels that the processes will need, once, before all would compile them at the same time."""
    from ..batch import Compress
    from ..file import open as open_file
    from ..profile import Profile
    from ..warm import DECODE, ENCODE
    from ..warm import path_of as path_of_profile

    if isinstance(work, Compress):
        prepare_kernels(console, ENCODE, path_of_profile(Profile.named(work.settings.profile)))
        return
    # What is wrong with the file is told when its turn comes.
    with suppress(DQuantError, OSError), open_file(items[0].input) as reader:
        prepare_kernels(console, DECODE, path_of(reader))


def _table(failed: Sequence[Outcome]) -> str:
    """A line for each file that failed: attempts, reason code, and words, which begin with the file."""
    rows = [("attempts", "reason", "what went wrong")]
    for outcome in failed:
        rows.append((str(outcome.attempts), outcome.code, outcome.message))
    width = max(len(code) for _, code, _ in rows)
    lines = [f"{attempts:>8}  {code:<{width}}  {words}" for attempts, code, words in rows]
    return "\n".join([paint(lines[0], "bold", sys.stdout), *lines[1:]])
