"""``dqkv info``: what a ``.dqkv`` file holds, from its headers alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from .console import Console, fields, size
from .options import CommandParser, common_options, naming
from .present import present_layers, profile_names

EPILOG = """\
bits_per_value counts every byte of the file over all key and value numbers in
it; bits_per_value_coded the coded pages alone. In the JSON, layers counts the
stored layers, kv_heads and head_dim are numbers, or lists by layer where layers
differ, and so is head_groups, of coded layers; tokens is the length of the
longest sequence; shard [i, n] means part i of n of the model's KV heads.
"""


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "info",
        parents=[common_options()],
        description="Say what a .dqkv file holds. Reads headers only; verify checks the rest.",
        epilog=EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="the .dqkv file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, console: Console) -> int:
    from ..file import open as open_file

    with naming(args.file), open_file(args.file) as reader:
        facts = collect(args.file, reader)
    console.answer(facts)
    console.result(describe(facts))
    return 0


def collect(path: str, reader: Any) -> dict[str, Any]:
    """Everything ``info`` says of the file at ``path``, as JSON values."""
    from ..tensors import recorded_source

    sizes = reader.accounting()
    numbers = present_layers(reader)
    every = reader.contents
    layers = [every[place] for place in numbers.values()]
    source = recorded_source(reader.metadata)
    return {
        "file": path,
        "format_version": ".".join(str(part) for part in reader.format_version),
        "model": reader.model,
        "profile": ", ".join(profile_names(reader)),
        "layers": len(numbers),
        "layer_numbers": list(numbers),
        "exact_layers": [number for number, place in numbers.items() if every[place].spec.storage == "exact"],
        "sequences": len(reader.sequences),
        "tokens": max(sequence.tokens for sequence in reader.sequences),
        "tokens_by_sequence": [sequence.tokens for sequence in reader.sequences],
        "kv_heads": _common(layer.spec.kv_heads for layer in layers),
        "head_dim": _common(layer.spec.head_dim for layer in layers),
        "dtype": _common(layer.spec.dtype for layer in layers),
        "sinks": max((layer.sinks for layer in layers if layer.spec.storage == "coded"), default=0),
        "recent": max((layer.recent for layer in layers if layer.spec.storage == "coded"), default=0),
        "torn": bool(reader.torn),
        "head_groups": _common(len(layer.plans) for layer in layers if layer.plans) or None,
        "shard": list(reader.header.info.shard),
        "window": next((layer.plans[0].window for layer in layers if layer.plans), None),
        "bytes": sizes.bytes,
        "values": sizes.values,
        "dead_bytes": sizes.dead_bytes,
        "bits_per_value": sizes.bits_per_value,
        "bits_per_value_coded": sizes.bits_per_value_coded,
        "names": {kind: source[kind] for kind in ("key", "value")} if source else None,
        "layout": source["layout"] if source else None,
    }


def describe(facts: dict[str, Any]) -> str:
    """The same for people."""
    from ..tensors import format_numbers

    tokens = facts["tokens_by_sequence"]
    if len(tokens) == 1:
        length = f"{tokens[0]} tokens"
    elif len(set(tokens)) == 1:
        length = f"{len(tokens)} sequences of {tokens[0]} tokens"
    else:
        length = f"{len(tokens)} sequences of {min(tokens)} to {max(tokens)} tokens"
    kept = [f"{facts[part]} {word}" for part, word in (("sinks", "first"), ("recent", "newest")) if facts[part]]
    if kept:
        length += f"; exact: {' and '.join(kept)}"
    layers = f"{facts['layers']} ({format_numbers(facts['layer_numbers'])})"
    if facts["exact_layers"]:
        layers += f"\nkept exact: {format_numbers(facts['exact_layers'])}"
    if facts["torn"]:
        length += "\nthe file was not closed or lost its end: more may be missing"
    geometry = f"{_shown(facts['kv_heads'])} KV heads of {_shown(facts['head_dim'])}, {_shown(facts['dtype'])}"
    if facts["head_groups"] not in (None, 1):
        geometry += f"\nin {_shown(facts['head_groups'])} head groups"
    if facts["shard"][1] > 1:
        geometry += f"\npart {facts['shard'][0]} of {facts['shard'][1]} of the model's KV heads"
    coded = facts["bits_per_value_coded"]
    ratio = f", {16 / facts['bits_per_value']:.2f}x smaller than BF16" if facts["bits_per_value"] else ""
    dead = f"\n{size(facts['dead_bytes'])} of them hold nothing any more: see repack" if facts["dead_bytes"] else ""
    rows = [
        ("file", facts["file"]),
        ("format", f"dqkv {facts['format_version']}"),
        ("model", facts["model"] or "(not given)"),
        ("profile", facts["profile"]),
        ("layers", layers),
        ("length", length),
        ("geometry", geometry),
        ("size", f"{size(facts['bytes'])} for {facts['values']} values{dead}"),
        ("bits/value", f"{facts['bits_per_value']:.3f} with every byte counted{ratio}"),
    ]
    if coded:
        rows.append(("", f"{coded:.3f} in the coded pages alone"))
    if facts["names"]:
        rows.append(("names", f"{facts['names']['key']}\n{facts['names']['value']}"))
        rows.append(("layout", f"[{','.join(facts['layout'])}]"))
    return fields(rows)


def collect_file(path: str) -> dict[str, Any]:
    """The same of a file that was just written."""
    from ..file import open as open_file

    with open_file(path) as reader:
        return collect(path, reader)


def _common(items: Iterable[Any]) -> Any:
    """The one item that all are, else the list of all."""
    every = list(items)
    return every[0] if len(set(every)) == 1 else every


def _shown(item: Any) -> str:
    if isinstance(item, list):
        return "/".join(str(one) for one in sorted(set(item)))
    return str(item)
