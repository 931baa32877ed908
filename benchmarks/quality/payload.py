"""Figure 6 (left) of the paper: the most reconstruction levels that a payload supports.

    python benchmarks/quality payload [--capture FILE] [--json FILE] [--stream-values N]

The payload is bits per value for symbols alone: ``B / n`` of the paper, without the coder's own bits and metadata.  The
paper does not define its curves; these are, for every payload, the largest M such that

fixed_width     an integer number of bits holds M levels: 2 ** floor(payload)
ideal_fixed     log2(M) fits, as the appendix charges its fixed-width counterpart: floor(2 ** payload)
entropy_coded   the entropy of nearest-level symbols of a standard normal stream fits, so that the average stream needs
                no drift; the grid spans the expected range of n values
captured_key, captured_value
                the same with the entropy of captured symbols after rotation and mean removal (keys), mean over layers
with_drift      the sharpened code's cheapest level fits, so that drift can always make a stream fit, at whatever error;
                beyond it Table 2 has dashes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from statistics import mean
from typing import Any

import numpy as np
from captures import Capture, Floats, command_parser, read_capture, write_result
from preprocessing import entropy, nearest_levels, normal_model, stages, symbol_shares

#: The format's limit.
MOST_LEVELS = 64
PAYLOADS = tuple(float(step) / 32 for step in range(32, 4 * 32 + 1))
ALPHA = 1.4

#: The paper's operating points: levels, and bytes of a container for 1024 values.
OPERATING_POINTS = {"key": (8, 331), "value": (6, 231)}


@cache
def normal_entropy(levels: int, stream_values: int) -> float:
    """Bits of a nearest-level symbol of a standard normal stream of ``stream_values`` values."""
    return entropy(normal_model(levels, stream_values))


@cache
def cheapest_level(levels: int, stream_values: int) -> float:
    """Bits of the most probable level in the sharpened model."""
    return float(-np.log2(normal_model(levels, stream_values, ALPHA).max()))


def most_levels(payload: float, bits: Callable[[int], float]) -> int:
    """The largest M up to the format's limit whose ``bits(M)`` are at most ``payload``; 1 if not even two fit.

    Bits need not grow with every level (an odd alphabet has a level in the middle), so all are tried.
    """
    return max((levels for levels in range(2, MOST_LEVELS + 1) if bits(levels) <= payload), default=1)


def captured_entropies(tensors: Sequence[Floats], keys: bool) -> dict[int, float]:
    """Entropy of nearest-level symbols by number of levels, mean over layers ``[T, H, D]``."""
    prepared = [dict(stages(x))["+ mean removal" if keys else "+ rotation"] for x in tensors]
    streams = [x.reshape(len(x), -1).astype(np.float64) for x in prepared]
    return {
        levels: mean(entropy(symbol_shares(nearest_levels(x, levels)[0], levels)) for x in streams)
        for levels in range(2, MOST_LEVELS + 1)
    }


def series(capture: Capture, stream_values: int) -> dict[str, list[int]]:
    """The curves, one value per entry of :data:`PAYLOADS`."""
    captured = {
        "captured_key": captured_entropies([layer.keys for layer in capture.layers], keys=True),
        "captured_value": captured_entropies([layer.values for layer in capture.layers], keys=False),
    }
    return {
        "fixed_width": [min(MOST_LEVELS, 2 ** int(payload)) for payload in PAYLOADS],
        "ideal_fixed": [min(MOST_LEVELS, int(2**payload + 1e-9)) for payload in PAYLOADS],
        "entropy_coded": [most_levels(p, lambda m: normal_entropy(m, stream_values)) for p in PAYLOADS],
        **{name: [most_levels(p, bits.__getitem__) for p in PAYLOADS] for name, bits in captured.items()},
        "with_drift": [most_levels(p, lambda m: cheapest_level(m, stream_values)) for p in PAYLOADS],
    }


def operating_points(stream_values: int) -> list[dict[str, Any]]:
    """The paper's configurations: payload of the container less 16 bits of coder state, and what their levels need."""
    return [
        {
            "kind": kind,
            "levels": levels,
            "payload": (8 * container - 16) / 1024,
            "normal_entropy": normal_entropy(levels, stream_values),
        }
        for kind, (levels, container) in OPERATING_POINTS.items()
    ]


def main(argv: list[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--stream-values", type=int, default=1024, metavar="N", help="n of the normal streams (1024)")
    arguments = parser.parse_args(argv)
    capture = read_capture(arguments.capture)
    curves = series(capture, arguments.stream_values)
    print(f"{'bits per value':<16}" + "".join(f"{name:>16}" for name in curves))
    for i in range(0, len(PAYLOADS), 8):
        print(f"{PAYLOADS[i]:<16.2f}" + "".join(f"{values[i]:>16}" for values in curves.values()))
    points = operating_points(arguments.stream_values)
    for point in points:
        print(
            f"{point['kind']}: {point['levels']} levels need {point['normal_entropy']:.3f} of "
            f"{point['payload']:.3f} bits"
        )
    result = {
        "what": "most levels by payload (paper, Figure 6, left); definitions in benchmarks/quality/payload.py",
        "input": capture.facts(),
        "stream_values": {"normal": arguments.stream_values, "captured": capture.stream_values},
        "alpha": ALPHA,
        "payload_bits_per_value": PAYLOADS,
        "series": curves,
        "operating_points": points,
    }
    write_result(arguments.json, "payload", argv, result)
    return 0
