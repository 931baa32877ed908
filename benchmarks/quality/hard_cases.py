"""Inputs that are hard to code, made from a real captured layer, and what each remedy of the library does for them.

    python benchmarks/quality hard_cases [--capture FILE] [--layer N] [--json FILE]

Attention is that of the real queries at the last positions; they were not trained with the changed keys, so its error
says how far logits move, not what a model would answer.  Bits count whole pages and, for exact tokens, 16 per value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
from captures import Capture, CapturedLayer, Floats, command_parser, read_capture, write_result

from dquantcodec import PROFILES, Codec, Profile, fit_plan
from dquantcodec.attention_estimate import (
    AttentionEstimate,
    estimate_attention,
    layers_out_of_line,
    sample_tiles,
)
from dquantcodec.compare import AttentionSums, attend_block, error_sums, group_queries, relative_error
from dquantcodec.file.groupings import plan_bytes

#: RoPE base of the captured model (SmolLM2); channel c is paired with c + D/2, and turns the faster the smaller c is.
ROPE_THETA = 100000.0

Case = Callable[[CapturedLayer, int], CapturedLayer]


def turn_by_position(x: Floats, first_position: int, turns: int = 1) -> Floats:
    """RoPE of ``x`` ``[T, H, D]`` in rotate-half channel order; ``turns=-1`` undoes it."""
    half = x.shape[2] // 2
    positions = np.arange(first_position, first_position + len(x))
    angles = turns * positions[:, None] * ROPE_THETA ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    first, second = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=2).astype(np.float32)


def add_key_bias(keys: Floats, first_position: int, factor: float, channels: list[int]) -> Floats:
    """A constant of ``factor`` times the channel's RMS, added to some channels of every head before RoPE.

    This is what the key bias of Qwen2.5 does.  In channels that RoPE turns fast the constant becomes a wave that no
    mean over a window removes; in those it turns slowly it stays a constant.
    """
    plain = turn_by_position(keys, first_position, turns=-1)
    rms = np.sqrt(np.square(plain[..., channels]).mean(axis=0, keepdims=True))
    plain[..., channels] += np.float32(factor) * rms
    return turn_by_position(plain, first_position)


def scaled_token(x: Floats, token: int, factor: float) -> Floats:
    changed = x.copy()
    changed[token] *= np.float32(factor)
    return changed


def scaled_channel(x: Floats, channel: int, factor: float) -> Floats:
    """One channel of every head ``factor`` times as large."""
    changed = x.copy()
    changed[..., channel] *= np.float32(factor)
    return changed


def constant_head(x: Floats, heads: slice, value: float) -> Floats:
    changed = x.copy()
    changed[:, heads] = np.float32(value)
    return changed


def scaled_to(x: Floats, largest: float) -> Floats:
    """``x`` times the constant that brings its largest magnitude to ``largest``."""
    return x * np.float32(largest / np.abs(x).max())


def last_tokens(layer: CapturedLayer, tokens: int) -> CapturedLayer:
    """What a sliding window of ``tokens`` tokens keeps."""
    queries = layer.queries[:, -min(tokens, layer.queries.shape[1]) :] if layer.queries is not None else None
    return CapturedLayer(layer.number, layer.keys[-tokens:], layer.values[-tokens:], queries)


def cases(head_dim: int) -> dict[str, Case]:
    """The hard inputs by name: functions of a captured layer and the position of its first token."""
    half = head_dim // 2
    channels = {"fast": [0, 1], "slow": [half - 2, half - 1]}
    found: dict[str, Case] = {"unchanged": lambda layer, _: layer}

    def biased(factor: float, where: str) -> Case:
        return lambda layer, first: replace(layer, keys=add_key_bias(layer.keys, first, factor, channels[where]))

    def sink(token: int, key_factor: float, value_factor: float) -> Case:
        return lambda layer, _: replace(
            layer,
            keys=scaled_token(layer.keys, token, key_factor),
            values=scaled_token(layer.values, token, value_factor),
        )

    def same(x: Floats) -> Floats:
        return x

    def changed(keys: Callable[[Floats], Floats] = same, values: Callable[[Floats], Floats] = same) -> Case:
        return lambda layer, _: replace(layer, keys=keys(layer.keys), values=values(layer.values))

    def window(tokens: int) -> Case:
        return lambda layer, _: last_tokens(layer, tokens)

    for where in channels:
        for factor in (10, 30, 100):
            found[f"key bias {factor}x, {where} channels"] = biased(factor, where)
    found["sink: token 0, keys and values 0.1x"] = sink(0, 0.1, 0.1)
    found["sink: token 0, keys 30x, values 0.1x"] = sink(0, 30, 0.1)
    found["token 300, keys and values 30x"] = sink(300, 30, 30)
    found["outlier channel 50x, keys"] = changed(keys=lambda x: scaled_channel(x, 5, 50))
    found["outlier channel 50x, values"] = changed(values=lambda x: scaled_channel(x, 5, 50))
    found["one head constant 3"] = changed(
        keys=lambda x: constant_head(x, slice(0, 1), 3), values=lambda x: constant_head(x, slice(0, 1), 3)
    )
    found["all heads constant 3"] = changed(
        keys=lambda x: constant_head(x, slice(None), 3), values=lambda x: constant_head(x, slice(None), 3)
    )
    found["tiny: largest 1e-6"] = changed(keys=lambda x: scaled_to(x, 1e-6), values=lambda x: scaled_to(x, 1e-6))
    found["huge: largest 6e4"] = changed(keys=lambda x: scaled_to(x, 6e4), values=lambda x: scaled_to(x, 6e4))
    found |= {f"sliding window of {tokens}": window(tokens) for tokens in (1, 100, 511)}
    found["all zero"] = changed(keys=np.zeros_like, values=np.zeros_like)
    return found


@dataclass(frozen=True)
class Remedy:
    """A way to code a layer: ``profile`` ``None`` keeps all of it exact; the first ``sinks`` tokens are kept exact."""

    name: str
    profile: Profile | None
    sinks: int = 0


def remedies() -> list[Remedy]:
    default = PROFILES["2.26"]
    largest = replace(
        default,
        key=replace(default.key, container=2 * default.key.container),
        value=replace(default.value, container=2 * default.value.container),
    )
    return [
        Remedy("no mean removal", replace(default, key=replace(default.key, mean=False))),
        Remedy("2.26 (default)", default),
        Remedy("4 exact sinks", default, sinks=4),
        Remedy("larger budget", PROFILES["3.0"]),
        Remedy("twice the budget", largest),
        Remedy("exact layer", None),
    ]


@dataclass(frozen=True)
class CodedCase:
    """One case with one remedy; ``None`` where a ratio has no meaning or there are no queries."""

    case: str
    remedy: str
    bits_per_value: float
    key_nmse: float | None
    key_nmse_centred: float | None
    value_nmse: float | None
    attention_error: float | None
    estimated_logit_error: float
    estimated_attention_error: float
    warned: bool


def code_layer(layer: CapturedLayer, remedy: Remedy) -> tuple[Floats, Floats, float]:
    """Keys and values after the round trip, and bits per value."""
    tokens = len(layer.keys)
    sinks = tokens if remedy.profile is None else min(remedy.sinks, tokens)
    keys, values = layer.keys.copy(), layer.values.copy()
    stored = 4 * layer.keys[:sinks].size
    if remedy.profile is not None and sinks < tokens:
        codec = Codec(fit_plan(remedy.profile, keys[sinks:], values[sinks:]))
        pages = codec.encode(keys[sinks:], values[sinks:])
        keys[sinks:], values[sinks:] = codec.decode(pages)
        full, rest = divmod(pages.tokens, codec.plan.window)
        stored += full * codec.layout.page_bytes + (codec.layout.bytes_for(rest) if rest else 0)
        stored += plan_bytes(codec.plan)
    return keys, values, 8 * stored / (2 * layer.keys.size)


def attention_error(layer: CapturedLayer, keys: Floats, values: Floats) -> float | None:
    """Relative error of the attention output at the last positions, causal; ``None`` without queries."""
    if layer.queries is None:
        return None
    tokens, heads, head_dim = keys.shape
    grouped, positions = group_queries(layer.queries, heads), layer.queries.shape[1]
    empty = AttentionSums.empty(heads, grouped.shape[1], head_dim)
    outputs = [
        attend_block(empty, grouped, k, v, positions=positions, tokens=tokens, start=0).output()
        for k, v in ((layer.keys, layer.values), (keys, values))
    ]
    error, energy = relative_error(*outputs)
    return math.sqrt(error / energy) if energy else None


def sampled_estimate(layer: CapturedLayer, keys: Floats, values: Floats, window: int = 128) -> AttentionEstimate:
    """What ``dqkv compress`` would estimate: from the same few tokens."""
    tokens = np.concatenate([np.arange(a, b) for _, a, b in sample_tiles(len(keys), 1, window)])
    return estimate_attention(layer.keys[tokens], layer.values[tokens], keys[tokens], values[tokens])


def code_case(name: str, layer: CapturedLayer, remedy: Remedy, beside: dict[int, float]) -> CodedCase:
    """``beside``: estimated errors of the capture's own layers, which a warning compares with."""
    keys, values, bits = code_layer(layer, remedy)
    key, value = error_sums(layer.keys, keys), error_sums(layer.values, values)
    estimate = sampled_estimate(layer, keys, values)
    warned, _ = layers_out_of_line({**beside, layer.number: estimate.output_error})
    ratios = (key.nmse, key.centred_nmse, value.nmse)
    key_nmse, key_centred, value_nmse = (ratio if math.isfinite(ratio) else None for ratio in ratios)
    return CodedCase(
        name, remedy.name, bits, key_nmse, key_centred, value_nmse, attention_error(layer, keys, values),
        estimate.logit_error, estimate.output_error, layer.number in warned,
    )  # fmt: skip


def coded_cases(capture: Capture, number: int) -> Iterator[CodedCase]:
    """Every case with every remedy, made from layer ``number``."""
    chosen = next(layer for layer in capture.layers if layer.number == number)
    plain = Remedy("2.26 (default)", PROFILES["2.26"])
    beside = {
        layer.number: sampled_estimate(layer, *code_layer(layer, plain)[:2]).output_error for layer in capture.layers
    }
    for name, make in cases(chosen.keys.shape[2]).items():
        changed = make(chosen, capture.first_position)
        for remedy in remedies():
            if not remedy.sinks or "token 0" in name:
                yield code_case(name, changed, remedy, beside)


def main(argv: list[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--layer", type=int, metavar="N", help="the layer to change (the middle one captured)")
    arguments = parser.parse_args(argv)
    capture = read_capture(arguments.capture)
    numbers = [layer.number for layer in capture.layers]
    number = numbers[len(numbers) // 2] if arguments.layer is None else arguments.layer
    if number not in numbers:
        parser.error(f"--layer: there is no layer {number}; the layers are {numbers}")

    def shown(ratio: float | None) -> str:
        return "-" if ratio is None else f"{ratio:.4f}"

    found = []
    print(
        f"{'layer ' + str(number):<38}{'remedy':<18}{'bits':>7}{'K NMSE':>9}{'centred':>9}{'V NMSE':>9}"
        f"{'attention':>11}{'estimate':>10}  warned"
    )
    for one in coded_cases(capture, number):
        found.append(one)
        print(
            f"{one.case:<38}{one.remedy:<18}{one.bits_per_value:>7.2f}{shown(one.key_nmse):>9}"
            f"{shown(one.key_nmse_centred):>9}{shown(one.value_nmse):>9}{shown(one.attention_error):>11}"
            f"{one.estimated_attention_error:>10.2f}  {'yes' if one.warned else ''}"
        )
    result = {
        "what": "hard inputs made from one captured layer, with every remedy",
        "input": capture.facts(),
        "layer": number,
        "rope_theta": ROPE_THETA,
        "rows": [asdict(row) for row in found],
    }
    write_result(arguments.json, "hard_cases", argv, result)
    return 0
