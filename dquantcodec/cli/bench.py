"""``dqkv bench``: how fast the codec is on this machine, beside copying memory."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError, UnsupportedError
from .console import Console, fields, paint
from .options import CommandParser, add_profile, add_threads, common_options, positive, threads
from .progress import Advance, prepare_kernels, progress

if TYPE_CHECKING:
    from ..bench.suite import Measured, Settings

#: Versions of these are part of the JSON.
PACKAGES = ("dquantcodec", "numpy", "numba", "zstandard", "google-crc32c", "cupy-cuda12x", "cupy-cuda13x")

LEGEND = """\
M values/s: millions of key and value numbers a second, the median run; beside
it the slowest and the fastest. GB/s BF16: what the same numbers take in BF16.
Of copy: beside copying BF16 numbers in memory in this run, with as many
threads; 1x is as fast as copying the cache itself. Coders alone work on
symbols, one a number. Files lie in memory; their pages are about seven times
smaller than the BF16 numbers they stand for, so they may be above 1x."""

EPILOG = """\
Encodes, decodes and attends to random keys and values, runs the coders alone,
and writes and reads files: with one thread, with all, and on a GPU if there is
one. Takes about half a minute; kernels compile first, once after installation.
Plans are fitted to the data, as files have them, where the profile has classes.
Other work on the machine shows as a wide spread: measure when it is idle.

  dqkv bench
  dqkv bench --profile 1.96 --kv-heads 4 --head-dim 256 --json > bench.json
"""

_TITLES = {"memory": "", "codec": "", "coder": "coders alone", "file": "files"}
#: Widths of name and numbers; a line of the table fits 80 characters.
_WIDTHS = (32, 12, 16, 10, 9)


def add_parser(commands: Any) -> None:
    parser: CommandParser = commands.add_parser(
        "bench",
        parents=[common_options()],
        help="how fast this machine is",
        description="Measure codec, coders and files on this machine, beside copying memory.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="measure only this (the CPU, and a GPU if there is one)"
    )
    add_profile(parser)
    parser.add_argument("--kv-heads", type=positive, default=8, metavar="H", help="KV heads of a layer (8)")
    parser.add_argument("--head-dim", type=positive, default=128, metavar="D", help="values of a head (128)")
    parser.add_argument("--tokens", type=positive, metavar="T", help="tokens at once (enough for all threads)")
    parser.add_argument("--quick", action="store_true", help="fewer runs of less work, in a few seconds")
    add_threads(parser)
    parser.set_defaults(run=run, file="dquantcodec")


def run(args: argparse.Namespace, console: Console) -> int:
    from ..bench import machine
    from ..bench.suite import Settings, measure_cpu, steps

    began = perf_counter()
    settings = Settings(args.profile, args.kv_heads, args.head_dim, args.tokens, threads(args), args.quick)
    gpu, reason = _gpu(args.device)
    if args.device != "cuda":
        _prepare(settings, console)
    console.hint("making keys, values and files to measure with")
    rows: list[Measured] = []
    with progress(console, "measuring", steps(settings, args.device != "cuda", bool(gpu)), " lines") as advance:
        if args.device != "cuda":
            for row in measure_cpu(settings):
                rows.append(row)
                advance(1)
        if gpu:
            rows += _measure_gpu(settings, args.device, console, advance)
    facts = {
        "profile": settings.profile,
        "fitted": settings.fitted,
        "kv_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "threads": settings.threads,
        "quick": settings.quick,
        "machine": machine.description(),
        "gpu": gpu,
        "versions": machine.versions(PACKAGES),
        "rows": [{**asdict(row), "bf16_bytes_per_s": row.bf16_bytes_per_s} for row in rows],
        "seconds": perf_counter() - began,
    }
    console.answer(facts)
    console.say(describe(facts, rows, reason))
    console.say()
    console.result(table(rows))
    console.say()
    console.say(LEGEND)
    return 0


def _gpu(wanted: str | None) -> tuple[dict[str, str | int] | None, str]:
    """The GPU to measure, None with the reason if there is none.

    Raises :class:`DeviceError` if one was asked for and is missing.
    """
    if wanted == "cpu":
        return None, ""
    from ..bench.device import device_description
    from ..cuda.device import cupy, device

    try:
        device(cupy().cuda.Device().id)
        return device_description(), ""
    except DeviceError as error:
        if wanted:
            raise
        return None, str(error)


def _prepare(settings: Settings, console: Console) -> None:
    from ..profile import Profile
    from ..warm import DECODE, ENCODE, path_of

    # The coders are measured by themselves, whichever the profile uses.
    for path in dict.fromkeys((path_of(Profile.named(settings.profile)), "prefix", "rans")):
        prepare_kernels(console, (*ENCODE, *DECODE), path)


def _measure_gpu(settings: Settings, wanted: str | None, console: Console, advance: Advance) -> list[Measured]:
    """What the GPU does; if it was not asked for and cannot do it, a warning and what was measured until then."""
    from ..bench.suite import measure_gpu

    rows = []
    try:
        for row in measure_gpu(settings):
            rows.append(row)
            advance(1)
    except (DeviceError, UnsupportedError) as error:
        # Wrong bytes are no matter of what is installed.
        if wanted or error.code == "device-bytes":
            raise
        console.warn(f"the GPU is not measured: {error}")
    return rows


def describe(facts: dict[str, Any], rows: Sequence[Measured], reason: str) -> str:
    """What was measured, where and with what."""
    machine, gpu = facts["machine"], facts["gpu"]
    coded = next(row for row in rows if row.section == "codec")
    how = "fitted to data" if facts["fitted"] else "rotated"
    pairs = [
        ("machine", f"{machine['processor']}\n{machine['cores']} cores, {machine['simd']}, {machine['system']}"),
        ("profile", f"{facts['profile']}, {how}: {coded.bits_per_value:.3f} bits/value"),
        ("cache", f"{facts['kv_heads']} KV heads of {facts['head_dim']}, {coded.note}"),
    ]
    if gpu:
        pairs.append(("GPU", f"{gpu['device']}, driver {gpu['driver']}"))
    elif reason:
        pairs.append(("GPU", textwrap.fill(f"not measured: {reason}", 68)))
    return fields(pairs)


def table(rows: Sequence[Measured]) -> str:
    """Aligned lines, a heading for every device and number of threads."""
    titles = ("", "M values/s", "from-to", "GB/s BF16", "of copy")
    lines = [paint("".join(title.rjust(width) for title, width in zip(titles, _WIDTHS)), "bold", sys.stdout)]
    before: object = None
    for row in rows:
        group = row.device, row.threads, _TITLES[row.section]
        if group != before:
            lines.append(paint(_heading(row), "bold", sys.stdout))
        before = group
        lines.append(_line(row))
    return "\n".join(lines)


def _heading(row: Measured) -> str:
    names = {None: "GPU", 1: "one thread"}
    where = names.get(row.threads, f"{row.threads} threads")
    title = _TITLES[row.section]
    return f"{where}, {title}" if title else where


def _line(row: Measured) -> str:
    millions = [_digits(rate / 1e6) for rate in (row.values_per_s, row.values_per_s_least, row.values_per_s_most)]
    cells = (
        millions[0],
        f"{millions[1]}-{millions[2]}",
        _digits(row.bf16_bytes_per_s / 1e9),
        f"{_digits(row.ratio_to_copy)}x",
    )
    return f"  {row.name}".ljust(_WIDTHS[0]) + "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS[1:]))


def _digits(number: float) -> str:
    """Three digits, no exponent."""
    if number >= 99.95:
        return f"{number:.0f}"
    return f"{number:.3g}" if number >= 0.001 else f"{number:.4f}"
