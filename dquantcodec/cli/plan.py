"""``dqkv plan``: what a cache takes, what fits a memory, and containers by layer for a target."""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from ..profile import Profile
from .console import Console, count, fields, paint, size
from .options import (
    CommandParser,
    add_profile,
    add_recent,
    add_source_options,
    check_output,
    check_source_options,
    common_options,
    positive,
)

if TYPE_CHECKING:
    from ..memory import CacheSize
    from ..model_shape import ModelShape
    from ..plan import Plan
    from ..tensors import KVSource

#: Contexts of the table, where none is asked for.
CONTEXTS = (1024, 8192, 32768, 131072)

EPILOG = """\
MODEL is a Hugging Face config.json, the folder it lies in, or saved keys and
values as compress reads them. The first tokens that the profile keeps exact and
the newest ones (--recent, and up to a window more until the next page is full)
are counted at 16 bits. "Fit" counts sequences of that context in --memory.

Saved keys and values also give containers by layer: --target-bits (pages, every
byte counted) or --target-error (relative error of attention outputs, predicted
from a sample that is coded; real queries in the file are used) and --out, which
compress takes as a profile.

  dqkv plan config.json --memory 80GiB --context 32768
  dqkv plan cache.safetensors --target-bits 2.26 --out layers.json
  dqkv compress cache.safetensors cache.dqkv --profile layers.json
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "plan",
        parents=[common_options()],
        description="Say what a KV cache takes, what fits a memory, and choose containers by layer.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="MODEL", help="config.json, its folder, or saved keys and values")
    add_profile(parser)
    add_recent(parser)
    parser.add_argument("--memory", type=memory, metavar="SIZE", help="memory for caches, as in 80GiB or 64GB")
    parser.add_argument("--context", type=positive, action="append", metavar="T", help="tokens; may be given again")
    parser.add_argument("--batch", type=positive, metavar="B", help="sequences, to ask for the longest context")
    parser.add_argument("--target-bits", type=number, metavar="B", help="bits/value that pages may take in all")
    parser.add_argument("--target-error", type=number, metavar="E", help="error of attention outputs to stay below")
    parser.add_argument("--out", metavar="FILE", help="profile file to write (.json; replaced if it exists)")
    add_source_options(parser)
    parser.set_defaults(run=lambda args, console: run(parser, args, console))


def memory(text: str) -> int:
    """``"80GiB"`` -> bytes; powers of 1024 with an i, of 1000 without."""
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not found or (found[3] and not found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GiB or 64GB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def run(parser: CommandParser, args: argparse.Namespace, console: Console) -> int:
    check_source_options(parser, args)
    targets = args.target_bits is not None, args.target_error is not None
    if all(targets):
        parser.error("give --target-bits or --target-error, not both")
    if bool(args.out) != any(targets):
        parser.error("--out FILE belongs to --target-bits or --target-error")
    if args.batch and not args.memory:
        parser.error("--batch needs --memory")
    source = None if is_config(args.file) else _open(args)
    if source is None and any(targets):
        raise InputError(
            "a configuration says nothing of errors; a target needs saved keys and values", code="plan-sample"
        )
    if args.out:
        check_output(args.out, args.file)
    facts = collect(args, _shape(source, args.file))
    facts["target"] = _target(args, source, console) if source and any(targets) else None
    facts["out"] = args.out
    console.answer(facts)
    console.result(describe(args, facts))
    if args.out:
        console.say(f"\nWritten to {args.out}. Use it: dqkv compress IN OUT.dqkv --profile {args.out}")
    return 0


def is_config(path: str) -> bool:
    """Whether ``path`` is a model's configuration and not saved tensors."""
    place = Path(path)
    return (place.name.endswith(".json") and not place.name.endswith(".index.json")) or (
        place / "config.json"
    ).is_file()


def _open(args: argparse.Namespace) -> KVSource:
    from ..tensors import open_source

    return open_source(args.file, key=args.key, value=args.value, layout=args.layout, bits=args.bits)


def _shape(source: KVSource | None, path: str) -> ModelShape:
    from ..model_shape import LayerShape, ModelShape

    if source is None:
        return ModelShape.load(path)
    layers = tuple(LayerShape(layer.number, layer.kv_heads, layer.head_dim) for layer in source.layers)
    return ModelShape(Path(path).name, layers)


def collect(args: argparse.Namespace, shape: ModelShape) -> dict[str, Any]:
    """Everything the plan says of sizes, as JSON values."""
    from ..memory import CacheSize

    profile = Profile.named(args.profile)
    coded = CacheSize(shape, profile, recent=args.recent)
    others = {"bf16": CacheSize(shape, None), "fp8": CacheSize(shape, None, bytes_per_value=1)}
    sizes = {args.profile: coded, **others}
    facts: dict[str, Any] = {
        "model": shape.name,
        "profile": args.profile,
        "layers": [
            {
                "layer": layer.number,
                "kv_heads": layer.kv_heads,
                "head_dim": layer.head_dim,
                "sliding_window": layer.sliding,
                "bits_per_value": coded.bits_per_value(layer),
                "bytes_per_token": coded.bits_per_value(layer) * layer.kv_heads * layer.head_dim / 4,
            }
            for layer in shape.layers
        ],
        "token_bytes": {name: one.token_bytes() for name, one in sizes.items()},
        "tokens_per_gib": {name: _per_gib(one.token_bytes()) for name, one in sizes.items()},
        "contexts": [
            {
                "tokens": context,
                "bytes": {name: one.bytes(context) for name, one in sizes.items()},
                "sequences": {name: one.most_sequences(args.memory, context) for name, one in sizes.items()}
                if args.memory
                else None,
            }
            for context in args.context or CONTEXTS
        ],
        "smaller_from": {name: coded.break_even(one) for name, one in others.items()},
        "head_groups": _head_groups(shape, profile, args.recent),
    }
    facts["memory"], facts["batch"], facts["longest_context"] = args.memory, args.batch, None
    if args.batch:
        facts["longest_context"] = {name: one.most_tokens(args.memory, args.batch) for name, one in sizes.items()}
    return facts


def _per_gib(token_bytes: float) -> int | None:
    """None where no layer grows with the context."""
    return int((1 << 30) / token_bytes) if token_bytes else None


def _head_groups(shape: ModelShape, profile: Profile, recent: int) -> list[dict[str, Any]]:
    """Bits a value of pages, all layers together, by the number of devices that share the heads."""
    from ..memory import CacheSize

    found = []
    for groups in (1, 2, 4, 8, 16, 32):
        if all(layer.kv_heads % groups == 0 for layer in shape.layers):
            one = CacheSize(shape, profile, recent=recent, groups=groups)
            found.append({"groups": groups, "bits_per_value": _mean_bits(one)})
    return found


def _mean_bits(one: CacheSize) -> float:
    values = [layer.kv_heads * layer.head_dim for layer in one.shape.layers]
    return sum(one.bits_per_value(layer) * n for layer, n in zip(one.shape.layers, values)) / sum(values)


def _target(args: argparse.Namespace, source: KVSource, console: Console) -> dict[str, Any]:
    """Allocate containers, write them, and say what the sample shows of them."""
    from ..allocate import allocate
    from ..layer_budgets import LayerBudgets
    from ..warm import DECODE, ENCODE, path_of
    from .progress import prepare_kernels
    from .replacing import replacing

    profile = Profile.named(args.profile)
    prepare_kernels(console, (*ENCODE, *DECODE), path_of(profile))
    samples = _samples(source, profile)
    plans = allocate(profile, samples, bits_per_value=args.target_bits, attention_error=args.target_error)
    numbers = [layer.number for layer in source.layers]
    with replacing(args.out) as partial:
        LayerBudgets.of(args.profile, dict(zip(numbers, plans))).save(partial)
    outcome = [Outcome.of(sample, plan) for sample, plan in zip(samples, plans)]
    values = [plan.values for plan in plans]
    return {
        "bits_per_value": sum(one.bits * n for one, n in zip(outcome, values)) / sum(values),
        "attention_error": math.sqrt(sum(one.error**2 for one in outcome) / len(outcome)),
        "layers": [
            {
                "layer": layer,
                "key_bytes": plan.key.container,
                "value_bytes": plan.value.container,
                "bits_per_value": one.bits,
                "attention_error": one.error,
            }
            for layer, plan, one in zip(numbers, plans, outcome)
        ],
    }


@dataclass(frozen=True)
class Outcome:
    """A layer's pages and what coding the sample with them does to attention outputs."""

    bits: float
    error: float

    @staticmethod
    def of(sample: Any, plan: Plan) -> Outcome:
        from ..allocate import coding_errors
        from ..page_layout import PageLayout

        bits = 8 * PageLayout.of(plan).page_bytes / (2 * plan.values * plan.window)
        return Outcome(bits, math.sqrt(sum(coding_errors(sample, plan))))


def _samples(source: KVSource, profile: Profile) -> list[Any]:
    """Windows from all over the source, with the first sequence's queries where it has any."""
    import numpy as np

    from ..allocate import LayerSample
    from ..fit import sample_windows
    from ..tensors import open_queries
    from .copying import read_finite

    queries = open_queries(source.path)
    samples = []
    for layer in source.layers:
        tensors = []
        for kind in ("key", "value"):
            parts = [
                read_finite(source, layer, kind, (sequence, profile.sinks + start, profile.sinks + stop), "error")[0]
                for sequence, start, stop in sample_windows(
                    source.tokens - profile.sinks, source.sequences, profile.window
                )
            ]
            tensors.append(np.concatenate(parts).astype(np.float32))
        asked = queries.read(layer.number, 0).transpose(1, 0, 2) if queries and layer.number in queries.layers else None
        samples.append(LayerSample(tensors[0], tensors[1], queries=asked))
    return samples


def describe(args: argparse.Namespace, facts: dict[str, Any]) -> str:
    """The same for people."""
    layers = facts["layers"]
    names = (facts["profile"], "bf16", "fp8")
    geometries = sorted({(layer["kv_heads"], layer["head_dim"]) for layer in layers})
    sliding = sum(layer["sliding_window"] is not None for layer in layers)
    rows = [
        ("model", facts["model"] or "(not named)"),
        (
            "layers",
            f"{len(layers)} of "
            + ", ".join(f"{heads} KV heads of {dim}" for heads, dim in geometries)
            + (f"; {sliding} slide over {max(layer['sliding_window'] or 0 for layer in layers)}" if sliding else ""),
        ),
        ("profile", f"{facts['profile']}, " + " to ".join(_range(layer["bits_per_value"] for layer in layers))
         + " bits/value in pages"),
    ]  # fmt: skip
    if any(facts["token_bytes"].values()):
        tokens = facts["token_bytes"]
        rows.append(("a token", "; ".join(f"{name.upper()}: {size(round(tokens[name]))}" for name in names)))
        per_gib = facts["tokens_per_gib"]
        rows.append(("a GiB holds", "; ".join(f"{name.upper()}: {count(per_gib[name])}" for name in names) + " tokens"))
    even = facts["smaller_from"]
    rows.append(
        ("smaller", "; ".join(f"than {name.upper()} from {at} tokens on" if at else f"never than {name.upper()}"
                              for name, at in even.items()))
    )  # fmt: skip
    groups = facts["head_groups"]
    if len(groups) > 1:
        rows.append(
            ("head groups", ", ".join(f"{one['groups']}: {one['bits_per_value']:.3f}" for one in groups)
             + " bits/value")
        )  # fmt: skip
    lines = [fields(rows), "", *_context_table(facts, names)]
    if facts["longest_context"]:
        longest = facts["longest_context"]
        lines += ["", f"{facts['batch']} sequences in {size(facts['memory'])} reach "
                  + ", ".join(f"{longest[name]} tokens ({name.upper()})" for name in names)]  # fmt: skip
    if facts["target"]:
        lines += ["", *_target_table(facts["target"])]
    return "\n".join(lines)


def _range(items: Any) -> list[str]:
    shown = [f"{item:.3f}" for item in sorted(items)]
    return list(dict.fromkeys((shown[0], shown[-1])))


def _context_table(facts: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    shown = [name.upper() for name in names]
    head = "context".rjust(9) + "".join(name.rjust(13) for name in shown)
    if facts["memory"]:
        head += "".join(f"fit {name}".rjust(15) for name in shown)
    lines = [paint(head, "bold", sys.stdout)]
    for row in facts["contexts"]:
        line = str(row["tokens"]).rjust(9) + "".join(size(row["bytes"][name]).rjust(13) for name in names)
        if row["sequences"]:
            line += "".join(str(row["sequences"][name]).rjust(15) for name in names)
        lines.append(line)
    return lines


def _target_table(target: dict[str, Any]) -> list[str]:
    head = f"{'layer':>9}{'key bytes':>13}{'value bytes':>13}{'bits/value':>13}{'attention':>13}"
    lines = [paint(head, "bold", sys.stdout)]
    for row in target["layers"]:
        lines.append(
            f"{row['layer']:>9}{row['key_bytes']:>13}{row['value_bytes']:>13}{row['bits_per_value']:>13.3f}"
            f"{row['attention_error']:>12.1%} "
        )
    lines.append(f"{'all':>9}{'':>26}{target['bits_per_value']:>13.3f}{target['attention_error']:>12.1%} ")
    lines.append("Errors are those of the sample; bits count every byte of pages.")
    return lines
