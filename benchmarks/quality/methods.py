"""All compared methods, by family and rate, and how far each is from a captured cache.

    python benchmarks/quality methods --capture CACHE.safetensors [--queries Q.safetensors] [--json OUT.json]

The table averages over layers.  Key error is given raw and centred: over the energy left after each channel's mean of
128 tokens, which attention hardly sees, is removed.  The attention error is that of the output of the captured queries.
Methods that plan all layers of a model together are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import ours
from method import Coded, Method
from numpy.typing import NDArray
from peers import fixed_width, fp8, ggml, kivi, oscar, quarot, turbo_attn, turboquant

from dquantcodec import compare
from dquantcodec.tensors import open_queries, open_source


def methods() -> list[Method]:
    """Every method, ours first; what cannot run here is left out with a message."""
    modules = (ours, fixed_width, kivi, quarot, turboquant, turbo_attn, oscar, ggml, fp8)
    return [method for module in modules for method in module.methods()]


@dataclass(frozen=True, eq=False)
class Layer:
    """Keys and values float32 ``[T, H, D]`` of one layer and sequence, and queries ``[Q, L, D]`` or None."""

    keys: NDArray[np.float32]
    values: NDArray[np.float32]
    queries: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class Row:
    """One method over all layers; errors are means of the layers' relative errors."""

    method: str
    family: str
    source: str
    bits_per_value: float
    key_nmse: float
    key_centred_nmse: float
    value_nmse: float
    attention_error: float | None


def layers(capture: Path, queries: Path | None = None) -> Iterator[Layer]:
    """Every layer of every sequence of a capture; queries are taken from ``queries`` or, if it has any, from it."""
    source = open_source(capture)
    positions = open_queries(queries or capture)
    for layer in source.layers:
        for sequence in range(source.sequences):
            keys, values = (
                np.ascontiguousarray(source.read(layer.number, kind, sequence, 0, source.tokens), np.float32)
                for kind in ("key", "value")
            )
            known = positions is not None and layer.number in positions.layers
            yield Layer(keys, values, positions.read(layer.number, sequence) if positions and known else None)


def attention(
    queries: NDArray[np.float32], keys: NDArray[np.float32], values: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Output ``[H, G*L, D]`` of the last ``L`` positions, causal, logits scaled by ``1/sqrt(D)``."""
    tokens, heads, dim = keys.shape
    grouped = compare.group_queries(queries, heads)
    sums = compare.AttentionSums.empty(heads, grouped.shape[1], dim)
    positions = queries.shape[1]
    return compare.attend_block(sums, grouped, keys, values, positions=positions, tokens=tokens, start=0).output()


def attention_error(layer: Layer, coded: Coded) -> float | None:
    """Norm of the output's error over the output's norm; None without queries."""
    if layer.queries is None:
        return None
    exact = attention(layer.queries, layer.keys, layer.values)
    error, energy = compare.relative_error(exact, attention(layer.queries, coded.keys, coded.values))
    return math.sqrt(error / energy)


def measure(method: Method, inputs: Iterable[Layer]) -> Row:
    bits, raw, centred, value, attended = [], [], [], [], []
    for layer in inputs:
        coded = method.code(layer.keys, layer.values)
        bits.append(coded.bits_per_value)
        key_sums = compare.error_sums(layer.keys, coded.keys)
        raw.append(key_sums.nmse)
        centred.append(key_sums.centred_nmse)
        value.append(compare.error_sums(layer.values, coded.values).nmse)
        attended.append(attention_error(layer, coded))
    known = [error for error in attended if error is not None]
    means = [float(np.mean(column)) for column in (bits, raw, centred, value)]
    return Row(method.name, method.family, method.source, *means, float(np.mean(known)) if known else None)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality methods", description=__doc__.splitlines()[0])
    parser.add_argument("--capture", type=Path, required=True, help="keys and values, as read by dqkv compress")
    parser.add_argument("--queries", type=Path, help="where the queries are, if not in the capture")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="methods whose name or family contains one of these")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    arguments = parser.parse_args(argv)
    inputs = list(layers(arguments.capture, arguments.queries))
    rows = []
    print(f"{'method':<28} {'family':<22} bits/value  K NMSE  K centred  V NMSE  attention")
    for method in methods():
        if method.together:
            continue
        if arguments.only and not any(text in method.name or text in method.family for text in arguments.only):
            continue
        row = measure(method, inputs)
        rows.append(row)
        attended = "" if row.attention_error is None else f"{row.attention_error:.4f}"
        print(
            f"{row.method:<28} {row.family:<22} {row.bits_per_value:>10.3f} {row.key_nmse:>7.4f} "
            f"{row.key_centred_nmse:>10.4f} {row.value_nmse:>7.4f} {attended:>10}",
            flush=True,
        )
    if arguments.json:
        first = inputs[0]
        result = {
            "what": "relative squared error of compared methods on a captured KV cache, metadata counted",
            "capture": arguments.capture.name,
            "layers": len(inputs),
            "tokens": len(first.keys),
            "kv_heads": first.keys.shape[1],
            "head_dim": first.keys.shape[2],
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0
