"""What it costs to code heads in small groups, each with containers, scales and a plan of its own.

    python benchmarks/quality head_groups --capture FILE --json benchmarks/results/quality/head_groups.json

With tensor parallelism a rank codes the heads it has.  The capture's layers are coded as one group and as a group for
every head.  Small models have few KV heads, so streams of eight heads are put together as well: the heads of the layers
in order, eight at a time, keys and values of every layer scaled to a root mean square of one, because heads of one
layer are about as loud as one another; queries are scaled the other way, so that logits stay.  Errors of attention are
over the captured queries, which see all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from captures import WINDOW, Capture, Floats, centred, command_parser, read_capture, write_result
from page_parts import fixed, percent, table

from dquantcodec import PROFILES, Codec, fit_plan
from dquantcodec.allocate import attention
from dquantcodec.file.groupings import plan_bytes

#: Heads of a stream that is put together, and the groups it is cut into.
HEADS = 8
GROUPS = (1, 2, 4, 8)
PROFILES_SHOWN = ("2.26", "1.96", "2.26-t", "paper-2.26")


@dataclass(frozen=True, eq=False)
class Stream:
    """Keys and values ``[T, H, D]`` and, where captured, queries ``[L, Q, D]``, as many for every head."""

    keys: Floats
    values: Floats
    queries: Floats | None


def layers(capture: Capture) -> list[Stream]:
    return [
        Stream(layer.keys, layer.values, None if layer.queries is None else layer.queries.transpose(1, 0, 2))
        for layer in capture.layers
    ]


def joined(capture: Capture) -> list[Stream]:
    """Streams of eight heads, as many as the capture has heads for; what is left over stays out."""
    every = layers(capture)
    keys = np.concatenate([stream.keys / loudness(stream.keys) for stream in every], axis=1)
    values = np.concatenate([stream.values / loudness(stream.values) for stream in every], axis=1)
    asked = [stream.queries * loudness(stream.keys) for stream in every if stream.queries is not None]
    queries = np.concatenate(asked, axis=1) if len(asked) == len(every) else None
    shared = queries.shape[1] // keys.shape[1] if queries is not None else 0
    found = []
    for first in range(0, keys.shape[1] // HEADS * HEADS, HEADS):
        heads = slice(first, first + HEADS)
        part = None if queries is None else queries[:, shared * heads.start : shared * heads.stop]
        found.append(Stream(np.ascontiguousarray(keys[:, heads]), np.ascontiguousarray(values[:, heads]), part))
    return found


def loudness(x: Floats) -> np.float32:
    return np.float32(np.sqrt(np.square(x, dtype=np.float64).mean()))


def code(profile: str, rows: Sequence[Floats], groups: int) -> tuple[list[Floats], int, int]:
    """Keys and values ``[T, H, D]`` decoded from ``groups`` head groups, bytes of the pages and of the plans."""
    decoded = [np.empty_like(x) for x in rows]
    count = rows[0].shape[1]
    size = plans = 0
    for heads in (slice(first, first + count // groups) for first in range(0, count, count // groups)):
        part = [np.ascontiguousarray(x[:, heads]) for x in rows]
        codec = Codec(fit_plan(profile, *part))
        pages = codec.encode(*part)
        for out, found in zip(decoded, codec.decode(pages)):
            out[:, heads] = found
        size += pages.data.nbytes
        plans += plan_bytes(codec.plan)
    return decoded, size, plans


def measure(profile: str, stream: Stream, groups: int) -> dict[str, float]:
    """Bits per value of whole pages, bytes of the plans, and relative squared errors.

    The recoded ones are those of rows that were coded as one group before, as resharding a file of one group does.
    """
    sinks = PROFILES[profile].sinks
    tokens = sinks + (len(stream.keys) - sinks) // WINDOW * WINDOW
    exact = [x[sinks:tokens] for x in (stream.keys, stream.values)]
    decoded, size, plans = code(profile, exact, groups)
    facts = {
        "bits_per_value": 8 * size / (2 * exact[0].size),
        "plan_bytes": plans,
        "key_nmse": nmse(centred(exact[0]), centred(decoded[0])),
        "value_nmse": nmse(exact[1], decoded[1]),
    }
    if stream.queries is not None:
        whole = attention(stream.queries, *exact)
        facts["attention_error"] = nmse(whole, attention(stream.queries, *decoded)) ** 0.5
    if groups > 1:
        again, _, _ = code(profile, code(profile, exact, 1)[0], groups)
        facts["recoded_key_nmse"] = nmse(centred(exact[0]), centred(again[0]))
        facts["recoded_value_nmse"] = nmse(exact[1], again[1])
    return facts


def nmse(exact: Any, decoded: Any) -> float:
    exact, decoded = exact.astype(np.float64), decoded.astype(np.float64)
    return float(np.square(decoded - exact).sum() / np.square(exact).sum())


def markdown(result: dict[str, Any]) -> str:
    """The table of docs/sharding.md."""
    head = (
        "profile", "heads", "groups", "bits/value", "key NMSE", "value NMSE", "attention error", "recoded: key NMSE",
        "value NMSE", "plans, bytes a layer",
    )  # fmt: skip
    rows = []
    for row in result["rows"]:
        names = ("key_nmse", "value_nmse", "attention_error", "recoded_key_nmse", "recoded_value_nmse")
        errors = [percent(row.get(name)) for name in names]
        start = (row["profile"], str(row["heads"]), str(row["groups"]), fixed(row["bits_per_value"], 3))
        rows.append((*start, *errors, f"{row['plan_bytes']:.0f}"))
    return table(head, rows)


def main(argv: Sequence[str]) -> int:
    arguments = command_parser(__doc__).parse_args(argv)
    capture = read_capture(arguments.capture)
    real = layers(capture)
    heads = real[0].keys.shape[1]
    wanted = [(real, heads, groups) for groups in (1, heads)] + [(joined(capture), HEADS, groups) for groups in GROUPS]
    rows = []
    for profile in PROFILES_SHOWN:
        for found, heads, groups in wanted:
            facts = [measure(profile, stream, groups) for stream in found]
            means = {name: float(np.mean([one[name] for one in facts])) for name in facts[0]}
            rows.append({"profile": profile, "heads": heads, "streams": len(found), "groups": groups, **means})
    result = {"what": (__doc__ or "").splitlines()[0], "inputs": [capture.facts()], "rows": rows}
    print(markdown(result))
    write_result(arguments.json, "head_groups", list(argv), result)
    return 0
