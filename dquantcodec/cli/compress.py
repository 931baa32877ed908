"""``dqkv compress``: saved keys and values into a ``.dqkv`` file."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..profile import DEFAULT_PROFILE, PROFILES, Profile
from ..urls import shown
from .console import Console, count, size
from .copying import copy_tokens, read_finite, reading_threads, tell_replaced
from .info import collect_file
from .many import add_batch_options, batched, run_batch
from .options import (
    CommandParser,
    add_device,
    add_model,
    add_nonfinite,
    add_recent,
    add_sinks,
    add_source_options,
    add_threads,
    check_device,
    check_output,
    check_source_options,
    common_options,
    layer_numbers,
    naming,
    positive,
    threads,
)
from .out_of_line import estimate_layers, warn_out_of_line
from .progress import prepare_kernels, progress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..layer_budgets import LayerBudgets
    from ..plan import Plan
    from ..tensors import KVLayer, KVSource

EPILOG = """\
IN is a .safetensors or .npz file, a *.safetensors.index.json, or a folder of
such files. Names as in layers.0.key, key_cache.0, past_key_values.0.key, 0.k
are recognised; what was recognised is printed. Compressed .npz members are
first unpacked to a temporary file. OUT is replaced if it exists, but only once
the new file is complete and on the disk.

  dqkv compress cache.safetensors cache.dqkv --model my-model
  dqkv compress shards/ cache.dqkv --profile 1.96 --sinks 4 --exact-layers 0,1
  dqkv compress odd.npz c.dqkv --key 'L{layer}_K' --value 'L{layer}_V'
  dqkv compress s3://bucket/cache.safetensors s3://bucket/cache.dqkv

With --jobs, several INs, patterns such as 'caches/**/*.npz', or the files of a
folder are compressed each by itself into the folder OUT. Those that OUT holds
already, made of the same input with the same options, are passed over.

  dqkv compress caches/ coded/ --jobs 4
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "compress",
        parents=[common_options()],
        description="Compress saved keys and values (keys after RoPE) into a .dqkv file.",
        epilog=EPILOG,
    )
    parser.intermixed = True
    parser.add_argument(
        "files", nargs="+", metavar="IN", help=".safetensors, .npz, or a folder of them; several with --jobs"
    )
    parser.add_argument("output", metavar="OUT", help="the .dqkv file to write, or a folder for several")
    parser.add_argument(
        "--profile",
        type=profile_or_file,
        default=DEFAULT_PROFILE,
        metavar="NAME",
        help=f"bits/value and codec: {', '.join(PROFILES)} ({DEFAULT_PROFILE}), or a file that plan wrote (.json)",
    )
    add_recent(parser)
    add_sinks(parser)
    parser.add_argument("--layers", type=layer_numbers, metavar="LIST", help="only these layers, as in 0-9,14")
    parser.add_argument("--exact-layers", type=layer_numbers, default=[], metavar="LIST", help="layers to keep exact")
    parser.add_argument(
        "--head-groups",
        type=positive,
        default=1,
        metavar="G",
        help="groups of KV heads with pages of their own, for ranks of tensor parallelism (1)",
    )
    add_model(parser)
    parser.add_argument("--revision", default="", metavar="NAME", help="revision of the model, kept in the file")
    add_nonfinite(parser)
    add_threads(parser)
    add_device(parser, "encode")
    add_batch_options(parser)
    add_source_options(parser)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


def profile_or_file(text: str) -> str:
    """The name of a profile, or the path of a profile file; neither is opened here."""
    if text not in PROFILES and not text.endswith(".json"):
        known = ", ".join(repr(name) for name in PROFILES)
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {known}, or give a .json file)")
    return text


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    from ..tensors import open_source
    from ..warm import DECODE, ENCODE, path_of

    check_source_options(parser, args)
    args.file = args.files[0]
    check_device(args)
    reading = {word: getattr(args, word) for word in ("key", "value", "layout", "layers", "bits")}
    if batched(args):
        from ..batch import Compress

        return run_batch(parser, Compress(_settings(parser, args), reading), args, console)
    check_output(args.output, args.file)
    source = open_source(args.file, **reading)
    for line in source.describe():
        console.say(line)
    for number in args.exact_layers:
        source.layer(number)
    settings = _settings(parser, args)
    if args.device == "cpu":
        parts = ENCODE if console.quiet else (*ENCODE, *DECODE)
        prepare_kernels(console, parts, path_of(Profile.named(settings.profile)))
    began = perf_counter()
    replaced = encode_source(source, args.output, settings, console)
    seconds = perf_counter() - began
    report(source, args.output, replaced, seconds, args.nonfinite, console)
    out_of_line = None
    if not console.quiet:
        out_of_line = warn_out_of_line(estimate_layers(source, args.output, args.nonfinite, args.device), console)
    if console.json:
        place = {"input": shown(args.file), "output": shown(args.output)}
        facts = {**place, "info": collect_file(args.output), "replaced": replaced}
        console.answer({**facts, "out_of_line": out_of_line, "seconds": seconds})
    return 0


def _settings(parser: CommandParser, args: argparse.Namespace) -> Settings:
    from ..layer_budgets import LayerBudgets

    budgets = None if args.profile in PROFILES else LayerBudgets.load(args.profile)
    if budgets and args.head_groups > 1:
        parser.error("--head-groups does not go with a profile file, whose containers are for whole layers")
    return Settings(
        profile=budgets.profile if budgets else args.profile,
        budgets=budgets,
        exact_layers=frozenset(args.exact_layers),
        head_groups=args.head_groups,
        sinks=args.sinks,
        recent=args.recent,
        model=args.model,
        revision=args.revision,
        nonfinite=args.nonfinite,
        threads=threads(args),
        device=args.device,
    )


@dataclass(frozen=True)
class Settings:
    """How to encode: everything ``compress`` may be told beyond input and output."""

    profile: str = DEFAULT_PROFILE
    budgets: LayerBudgets | None = None
    exact_layers: Collection[int] = ()
    head_groups: int = 1
    sinks: int | None = None
    recent: int = 128
    model: str = ""
    revision: str = ""
    nonfinite: str = "error"
    threads: int = 1
    device: str = "cpu"

    @property
    def leading(self) -> int:
        """Leading tokens to keep exact."""
        return Profile.named(self.profile).sinks if self.sinks is None else self.sinks


def encode_source(
    source: KVSource, output: str, settings: Settings, console: Console, note: Mapping[str, Any] | None = None
) -> int:
    """Write ``source`` to ``output`` block by block; returns how many NaN and infinite numbers were replaced.

    ``note`` goes into the file's metadata.

    The file takes its name when it is complete; an exception of any kind leaves nothing behind.
    """
    from ..file import create

    layers = [_file_layer(layer, source, settings) for layer in source.layers]
    with (
        naming(output),
        progress(console, "compressing", source.tokens * source.sequences * source.token_bytes) as advance,
        create(
            output,
            layers,
            sinks=settings.leading,
            recent=settings.recent,
            model=settings.model,
            revision=settings.revision,
            metadata={"source": source.record(), **(note or {})},
            threads=settings.threads,
            sequences=source.sequences,
            device=settings.device,
        ) as writer,
    ):
        readers = reading_threads(settings.device, settings.threads)
        return copy_tokens(source, writer, settings.nonfinite, advance, [0] * source.sequences, readers)


def _file_layer(layer: KVLayer, source: KVSource, settings: Settings) -> Any:
    from ..file import Layer

    exact = layer.number in settings.exact_layers
    return Layer(
        layer.kv_heads,
        layer.head_dim,
        layer.dtype,
        None if exact else _fitted(layer, source, settings),
        "exact" if exact else "coded",
        layer.number,
        1 if exact else settings.head_groups,
    )


def _fitted(layer: KVLayer, source: KVSource, settings: Settings) -> str | list[Plan]:
    """Plans of the head groups, fitted to windows from all over the source, or the profile's name if it needs none or
    there is too little.

    The writer would fit one too, but to the first tokens alone.
    """
    import numpy as np

    from ..file import Layer
    from ..file.writer import LEAST_TOKENS
    from ..fit import fit_plan, sample_windows

    profile = Profile.named(settings.profile)
    coded = source.tokens - settings.leading - settings.recent
    budgets = settings.budgets
    words = budgets.words(layer.number, layer.kv_heads, layer.head_dim) if budgets else None
    fits = words or profile.key.classes or profile.value.classes
    if not fits or coded * source.sequences < (1 if words else LEAST_TOKENS):
        return settings.profile
    sample: dict[str, list[NDArray[Any]]] = {"key": [], "value": []}
    for sequence, start, stop in sample_windows(coded, source.sequences, profile.window):
        part = (sequence, settings.leading + start, settings.leading + stop)
        for kind, arrays in sample.items():
            arrays.append(read_finite(source, layer, kind, part, settings.nonfinite)[0])
    keys, values = (np.concatenate(arrays) for arrays in sample.values())
    groups = Layer(layer.kv_heads, layer.head_dim, profile=profile, head_groups=settings.head_groups).groups
    return [fit_plan(profile, keys[:, heads], values[:, heads], words=words) for heads in groups]


def report(source: KVSource, output: str, replaced: int, seconds: float, policy: str, console: Console) -> None:
    """What became of the input, in two lines."""
    from ..file import open as open_file

    tell_replaced(replaced, policy, console)
    with open_file(output) as reader:
        sizes = reader.accounting()
    speed = f"{seconds:.1f} s ({count(source.values / seconds)} values/s)"
    console.say(
        f"{shown(output)}: {size(sizes.bytes)}, {sizes.bits_per_value:.3f} bits/value, "
        f"{16 / sizes.bits_per_value:.2f}x smaller than BF16; {speed}"
    )
    if not sizes.coded_tokens:
        console.say("nothing was coded: all tokens or layers are among those to keep exact (see --recent)")
    elif sizes.exact_tokens:
        console.say(f"coded pages alone: {sizes.bits_per_value_coded:.3f} bits/value; the rest is kept exact")
