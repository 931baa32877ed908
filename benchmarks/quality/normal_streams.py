"""Normal streams in the paper's containers: the error that is left, beside what the rate allows.

    python benchmarks/quality normal_streams [--json FILE] [--tokens N]

Streams of 1024 independent normal values (8 heads of 128, one container each) stand for perfect preprocessing.  Every
design is coded in the two neighbouring sizes that it has around 331 bytes (keys) and 231 (values), and the logarithm of
the error interpolated, because words have two or four bytes.  All gains are least squares.

ideal_scalar    the least error of a scalar quantiser whose levels cost their entropy and no stream has a budget
above_entropy   what the code of letters takes above the entropy of the levels it is made for, bits a value
loss            the error beside ``ideal_scalar`` as bits a value: half the binary logarithm of the quotient
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist

import numpy as np
from captures import Floats, command_parser, normal_tokens, write_result

from dquantcodec import Codec, Profile, StreamProfile, fit_plan
from dquantcodec.group_arrays import mean_bits
from dquantcodec.mid_tread import code_bits, entropy, mid_tread, shares
from dquantcodec.plan import StreamPlan
from dquantcodec.profile import ClassRule

CONTAINERS = {"key": 331, "value": 231}
VALUES = 1024
#: More than any rate here needs.
IDEAL_LEVELS = 41


@dataclass(frozen=True)
class Design:
    """``stream`` gives the profile for a container of so many bytes; ``sizes`` lie on both sides of the wanted one."""

    kind: str
    name: str
    sizes: tuple[int, int]
    stream: Callable[[int], StreamProfile]


def scalar(
    kind: str, levels: int, letter: int, precision: int, coder: str = "prefix", sizes: tuple[int, int] | None = None
) -> Design:
    name = f"{coder}, {levels} levels, letters of {letter}, p = {precision}"
    usual = {"key": (328, 332), "value": (228, 232)}[kind]
    return Design(
        kind, name, sizes or usual, lambda c: mid_tread(levels, c, coder=coder, precision=precision, letter=letter)
    )


def trellis(kind: str, states: int, kilobytes: int) -> Design:
    """Classes fitted to the streams themselves, with so many kilobytes of tables."""
    rule = ClassRule("normal", table_bytes=kilobytes << 10)

    def stream(container: int) -> StreamProfile:
        base = mid_tread(9 if kind == "key" else 7, container)
        return replace(base, classes=rule, quantiser=f"trellis-{states}")

    sizes = {"key": (328, 332), "value": (228, 232)}[kind]
    return Design(kind, f"trellis of {states} states, {kilobytes} KB of tables", sizes, stream)


#: The first of each kind has the levels, letters and tables of profile `2.26` where it rotates.
DESIGNS = (
    scalar("key", 9, 3, 13),
    scalar("key", 9, 2, 12),
    scalar("key", 11, 2, 12),
    scalar("key", 11, 2, 13),
    scalar("key", 11, 2, 12, "rans", (330, 332)),
    trellis("key", 4, 48),
    trellis("key", 8, 96),
    scalar("value", 7, 3, 12),
    scalar("value", 7, 3, 13),
    scalar("value", 5, 3, 12),
    scalar("value", 5, 4, 13),
    scalar("value", 7, 2, 12),
    scalar("value", 7, 2, 12, "rans", (230, 232)),
    trellis("value", 4, 48),
    trellis("value", 8, 96),
)


@dataclass(frozen=True)
class Row:
    """``nmse`` at the two ``sizes``, and ``error`` between them, all per cent; bits as the module says."""

    kind: str
    design: str
    sizes: tuple[int, int]
    nmse: tuple[float, float]
    error: float
    above_entropy: float
    loss: float


def ideal_scalar(bits: float) -> float:
    """The least error of a scalar quantiser of a standard normal value at an entropy of ``bits``."""
    low, high = 2 / (IDEAL_LEVELS - 1), 16.0
    for _ in range(50):
        step = (low + high) / 2
        low, high = (step, high) if entropy(shares(IDEAL_LEVELS, step)) > bits else (low, step)
    masses = np.array(shares(IDEAL_LEVELS, high))
    normal = NormalDist()
    edges = [normal.inv_cdf(min(max(p, 1e-15), 1 - 1e-15)) for p in np.cumsum(masses)[:-1]]
    density = np.array([0.0, *map(normal.pdf, edges), 0.0])
    level = np.arange(IDEAL_LEVELS) - IDEAL_LEVELS // 2
    shared = float((level * (density[:-1] - density[1:])).sum())
    return 1 - shared**2 / float((level**2 * masses).sum())


def coded(x: Floats, stream: StreamProfile) -> tuple[float, StreamPlan]:
    """Relative squared error of ``x`` ``[T, H, D]``, and the plan it was coded with."""
    profile = Profile(stream, stream, substreams=1)
    codec = Codec(fit_plan(profile, x, x)) if stream.classes else Codec(profile, *x.shape[1:])
    decoded = codec.decode_kind(codec.encode(x, x), "value")
    exact = x.astype(np.float64)
    return float(np.square(exact - decoded).sum() / np.square(exact).sum()), codec.plan.value


def above_entropy(stream: StreamProfile, plan: StreamPlan) -> float:
    if plan.grouping is None:
        weights = stream.weights
        share = [w / sum(weights) for w in weights]
        return code_bits(weights, stream.symbols_per_letter, stream.coder, stream.precision) - entropy(share)
    grouping = plan.grouping
    # Both quantisers have their turn equally often.
    bits = [
        sum(entropy([w / sum(row) for w in row]) for row in (c.weights, c.second or c.weights)) / 2
        for c in grouping.classes
    ]
    ideal = 0.0
    for row in grouping.choice:
        for table, letters in zip(row, grouping.letters):
            ideal += letters * sum(bits[c] for c in grouping.tables[table].classes)
    return float(mean_bits(grouping).sum() - ideal) / VALUES


def row(x: Floats, design: Design) -> Row:
    wanted = CONTAINERS[design.kind]
    found = [coded(x, design.stream(size)) for size in design.sizes]
    low, high = (math.log(error) for error, _ in found)
    small, large = (plan.container for _, plan in found)
    error = math.exp(low + (high - low) * (wanted - small) / (large - small))
    ideal = ideal_scalar(8 * wanted / VALUES)
    return Row(
        design.kind,
        design.name,
        (small, large),
        (100 * found[0][0], 100 * found[1][0]),
        100 * error,
        above_entropy(design.stream(design.sizes[1]), found[1][1]),
        math.log2(error / ideal) / 2,
    )


def main(argv: list[str]) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="streams (2048)")
    arguments = parser.parse_args(argv)
    x, _ = normal_tokens(arguments.tokens)
    bounds = {
        kind: {"shannon": 100 * 2 ** (-16 * size / VALUES), "ideal_scalar": 100 * ideal_scalar(8 * size / VALUES)}
        for kind, size in CONTAINERS.items()
    }
    found = [row(x, design) for design in DESIGNS]
    for kind, size in CONTAINERS.items():
        print(
            f"{kind}s, {size} bytes: Shannon {bounds[kind]['shannon']:.3f} %, "
            f"ideal scalar {bounds[kind]['ideal_scalar']:.3f} %"
        )
        for r in found:
            if r.kind == kind:
                print(
                    f"  {r.design:<45} {r.error:7.3f} %   above entropy {r.above_entropy:.4f}   loss {r.loss:+.4f} bits"
                )
    result = {
        "what": "normal streams of 1024 values in 331 and 231 bytes; terms in benchmarks/quality/normal_streams.py",
        "tokens": arguments.tokens,
        "containers": CONTAINERS,
        "bounds_per_cent": bounds,
        "rows": [asdict(r) for r in found],
    }
    write_result(arguments.json, "normal_streams", argv, result)
    return 0
