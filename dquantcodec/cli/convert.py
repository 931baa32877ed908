"""``dqkv convert``: states of llama.cpp into ``.dqkv`` files, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

from ..errors import InputError
from .console import Console, size
from .options import (
    CommandParser,
    add_model,
    add_profile,
    add_recent,
    add_sinks,
    add_threads,
    check_output,
    common_options,
    positive,
    threads,
)
from .progress import path_of, prepare_kernels, progress

EPILOG = """\
IN is a sequence state of llama.cpp (version 2; llama_state_seq_save_file, or
the server's /slots/ID?action=save) of an F16, F32 or BF16 cache, or a .dqkv
file that was made from one. A state does not say how long its heads are.

  dqkv convert slot.bin slot.dqkv --head-dim 128 --model my-model
  dqkv convert slot.dqkv slot.bin
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "convert",
        parents=[common_options()],
        description="Convert a sequence state of llama.cpp to a .dqkv file, or back.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="IN", help="a state, or a .dqkv file")
    parser.add_argument("output", metavar="OUT", help="the .dqkv file or state to write (replaced if it exists)")
    parser.add_argument("--head-dim", type=positive, metavar="D", help="values of a head (of a state: required)")
    add_profile(parser)
    add_recent(parser)
    add_sinks(parser)
    add_model(parser)
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    from ..integrations import llama_cpp
    from ..profile import Profile
    from ..warm import DECODE, ENCODE
    from ..warm import path_of as path_of_profile

    check_output(args.output, args.file)
    began = perf_counter()
    if llama_cpp.is_state(args.file):
        if args.head_dim is None:
            raise InputError("a state does not say how long its heads are; give --head-dim", code="state-heads")
        state = llama_cpp.read_state(args.file)
        prepare_kernels(console, ENCODE, path_of_profile(Profile.named(args.profile)))
        with progress(console, "encoding", len(state.keys[0]), "tok") as advance:
            llama_cpp.to_dqkv(
                state, args.output, args.head_dim, profile=args.profile, recent=args.recent, sinks=args.sinks,
                model=args.model, threads=threads(args), progress=advance,
            )  # fmt: skip
    else:
        from ..file import open as open_file

        with open_file(args.file, threads=threads(args)) as file:
            prepare_kernels(console, DECODE, path_of(file))
            llama_cpp.write_state(args.output, llama_cpp.from_dqkv(file))
    before, after = (Path(path).stat().st_size for path in (args.file, args.output))
    seconds = perf_counter() - began
    facts = {"input": args.file, "output": args.output, "bytes": after, "bytes_before": before, "seconds": seconds}
    console.answer(facts)
    console.say(f"{args.file} ({size(before)}) -> {args.output} ({size(after)})")
    return 0
