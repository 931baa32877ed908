"""``dqkv demo``: the whole way on bundled real data."""

from __future__ import annotations

import argparse
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from ..profile import Profile
from .compare import measure
from .compress import Settings, encode_source
from .console import Console, size
from .options import CommandParser, add_profile, add_threads, common_options, threads
from .progress import prepare_kernels

EPILOG = """\
The sample is a cut of a real KV cache: SmolLM2-135M-Instruct reading the
opening of Jane Austen's Persuasion; layers 1, 14 and 29, 512 tokens, with the
queries of the last 32 positions. It is written to DIR as sample.dqkv.
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "demo",
        parents=[common_options()],
        description="Compress a bundled real KV cache, read it back; show size, quality and speed.",
        epilog=EPILOG,
    )
    parser.add_argument("--out", default="dqkv-demo", metavar="DIR", help="folder to write to (dqkv-demo)")
    add_profile(parser)
    add_threads(parser)
    parser.set_defaults(run=run, file="sample.safetensors")


def run(args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file
    from ..tensors import open_queries, open_source
    from ..warm import DECODE, ENCODE, path_of
    from .table import LEGEND, quality_json, quality_table, totals

    prepare_kernels(console, (*ENCODE, *DECODE), path_of(Profile.named(args.profile)))
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    output = str(folder / "sample.dqkv")
    workers = threads(args)
    with as_file(files("dquantcodec").joinpath("data", "sample.safetensors")) as sample:
        source = open_source(sample)
        console.say("A real KV cache: SmolLM2-135M-Instruct reading Jane Austen, Persuasion (3 of its 30 layers)")
        for line in source.describe():
            console.say(f"  {line}")
        console.say("All tokens but the first are coded here; by default the newest 128 tokens stay exact too.")
        console.say()
        # The default keeps the newest 128 tokens exact; a quarter of so short a sample would hide what coding does.
        settings = Settings(profile=args.profile, recent=0, model="SmolLM2-135M-Instruct", threads=workers)
        encode_source(source, output, settings, console)
        with open_file(output) as reader:
            rows = measure(source, reader, open_queries(sample), console, encode_threads=workers, repeats=5)
            sizes = reader.accounting()
    facts = {"output": output, "profile": args.profile, "threads": workers}
    console.answer({**facts, "layers": quality_json(rows), "totals": totals(sizes)})
    console.result(quality_table(rows))
    console.say()
    console.say(LEGEND)
    console.say("Attention is that of the last 32 positions, with their real queries.")
    console.say(f"Encoding ran on {workers} thread{'s' if workers > 1 else ''}, decoding from the file on one.")
    console.say(
        f"Whole file: {size(sizes.bytes)}, {sizes.bits_per_value:.3f} bits/value with headers and checksums, "
        f"{16 / sizes.bits_per_value:.2f}x smaller than BF16"
    )
    console.say("Your own: dqkv compress IN.safetensors OUT.dqkv")
    console.result(f"Written to {output}. Look into it: dqkv info {output}")
    return 0
