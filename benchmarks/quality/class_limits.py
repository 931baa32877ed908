"""What the limits of variance classes cost: how far levels reach, what becomes of values beyond, letters and tables.

    python benchmarks/quality class_limits --out FOLDER [--model smollm2] [--json FILE]

Letters are what a GPU decodes one after another, tables what its shared memory holds, so both are limited, and so are
the levels of a class.  Every variant changes one choice of profile ``2.26``.  The library itself has no switch for
reach and clipping: here its classes are designed anew and its stretching of the step is taken out.  Choices were made
on three documents (novel, jargon, config), which are the default here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import models
import numpy as np
import ours
import texts
import torch
from divergence import Window
from evaluate import evaluate, summary
from method import Coded, Method, Pair
from numpy.typing import NDArray

from dquantcodec import PROFILES, Codec, Profile, classes, encode, fit, table_choice
from dquantcodec.grid import ONE, row_squares
from dquantcodec.group_arrays import group_arrays
from dquantcodec.group_grid import grouped_positions
from dquantcodec.grouping import MAX_GROUP_LETTERS, Grouping
from dquantcodec.plan import Plan, StreamPlan
from dquantcodec.profile import SOURCES, ClassRule

PROFILE = "2.26"
BASELINE = f"dquantcodec paper as large as {PROFILE}"
DOCUMENTS = ("novel", "jargon", "config")
#: Of an entry in a page's list of exceptions: its token, its channel and its value in FP16.
LISTED_BYTES = 5


@dataclass(frozen=True)
class Variant:
    """A change of the classes: what a :class:`ClassRule` can say, how far levels reach in standard deviations, and
    whether values beyond are clipped instead of stretching the token's step, or clipped and listed: kept exactly, at
    :data:`LISTED_BYTES` each; what part of a channel's values may lie beyond its class (all: a class follows from the
    standard deviation alone); and how many of 1024 values' bytes move from values to keys."""

    name: str
    field_bits: int = 10
    table_bytes: int = 24 << 10
    precision: int = 12
    reach: float = classes.REACH
    clip: bool = False
    listed: bool = False
    rare: float = fit.RARE
    moved: int = 0

    def profile(self) -> Profile:
        profile = PROFILES[PROFILE]
        kinds = {
            kind: replace(
                getattr(profile, kind),
                container=getattr(profile, kind).container + moved,
                classes=ClassRule(source, self.field_bits, self.precision, self.table_bytes),
            )
            for kind, source, moved in (("key", "student", self.moved), ("value", "normal", -self.moved))
        }
        return replace(profile, **kinds, name=self.name)


VARIANTS = (
    Variant("as it is"),
    Variant("classes of deviations alone", rare=1.0),
    Variant("clipped at 3 deviations", reach=3.0, clip=True),
    Variant("clipped at 3.5 deviations", clip=True),
    Variant("clipped at 4.5 deviations", reach=4.5, clip=True),
    Variant("listed beyond 2.5 deviations", reach=2.5, clip=True, listed=True),
    Variant("listed beyond 3.5 deviations", clip=True, listed=True),
    Variant("reach 2.5", reach=2.5),
    Variant("reach 3", reach=3.0),
    Variant("8 field bits", field_bits=8),
    Variant("12 field bits", field_bits=12),
    Variant("tables of 16 KB", table_bytes=16 << 10),
    Variant("tables of 48 KB", table_bytes=48 << 10),
    Variant("reach 6, 96 KB", reach=6.0, table_bytes=96 << 10, precision=14),
    Variant("32 bytes from values to keys", moved=32),
    Variant("32 bytes from keys to values", moved=-32),
)


@contextmanager
def designed(variant: Variant) -> Iterator[None]:
    """The library with the classes and the step rule of ``variant``."""
    known = _designed(variant.reach)
    scale = _clipping_scale if variant.clip else encode.grouped_scale
    positions = _last_level_positions if variant.clip else encode.grouped_positions
    _forget()
    with (
        mock.patch.object(encode, "grouped_scale", scale),
        mock.patch.object(encode, "grouped_positions", positions),
        mock.patch.object(fit, "REACH", variant.reach),
        mock.patch.object(fit, "RARE", variant.rare),
        mock.patch.object(table_choice, "dependent_classes", lambda source, _states: known[source]),
    ):
        yield
    _forget()


@lru_cache(maxsize=8)
def _designed(reach: float) -> dict[str, tuple[classes.ChannelClass, ...]]:
    with mock.patch.object(classes, "REACH", reach):
        return {source: tuple(classes.design(n, source) for n in range(classes.COUNT)) for source in SOURCES}


def _forget() -> None:
    """Codes and shares are remembered by the numbers of classes, which mean others now."""
    for cache in (table_choice._lengths, table_choice._shares, table_choice._letter_shares):
        cache.cache_clear()


def _clipping_scale(x: NDArray[np.float32], step: float, _grouping: Grouping) -> NDArray[np.float16]:
    squares, peaks = np.empty(len(x), np.float64), np.empty(len(x), np.float64)
    row_squares(x, squares, peaks)
    scale: NDArray[np.float16] = (np.sqrt(squares / x.shape[1]) * step).astype(np.float16)
    return scale


def _last_positions(grouping: Grouping) -> NDArray[np.int64]:
    """Of every place of coded order, the position of the last level of its class."""
    last = np.array([c.most for c in grouping.classes])[group_arrays(grouping).row_class]
    return np.repeat(last, MAX_GROUP_LETTERS) * ONE


def _last_level_positions(
    x: NDArray[np.float32], scale: NDArray[np.float16], grouping: Grouping, out: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Positions that end at the last level, so that scales are not fitted to what lies beyond."""
    position, last = grouped_positions(x, scale, grouping, out), _last_positions(grouping)
    beyond = np.abs(position) > last + ONE // 2
    np.copyto(position, np.sign(position) * last, where=beyond, casting="same_kind")
    return position


def list_exceptions(x: NDArray[np.float32], decoded: NDArray[np.float32], plan: Plan, stream: StreamPlan) -> int:
    """Puts the values beyond the last level of their class into ``decoded``, and counts them; both ``[T, H, D]``."""
    if stream.grouping is None:
        return 0
    with mock.patch.object(encode, "grouped_positions", grouped_positions):
        position = encode.prepare(x, plan, stream).position
    tokens, places = np.nonzero(np.abs(position) > _last_positions(stream.grouping) + ONE // 2)
    channels = group_arrays(stream.grouping).row_channel.reshape(-1)[places]
    flat = decoded.reshape(len(x), -1)
    flat[tokens, channels] = x.reshape(len(x), -1)[tokens, channels].astype(np.float16)
    return len(tokens)


class Letters:
    """Letters of 128 channels and table bytes of the plans a variant was given, keys and values."""

    def __init__(self) -> None:
        self.letters: list[tuple[float, float]] = []
        self.tables: list[tuple[int, int]] = []

    def note(self, plan: object) -> None:
        groupings = [getattr(plan, kind).grouping for kind in ("key", "value")]
        self.letters.append(tuple(128 * g.letters_per_head / g.head_dim for g in groupings))  # type: ignore[arg-type]
        self.tables.append(tuple(sum(2 << t.precision for t in g.tables) for g in groupings))  # type: ignore[arg-type]

    def facts(self) -> dict[str, float]:
        means = [*np.mean(self.letters, axis=0).tolist(), *np.mean(self.tables, axis=0).tolist()]
        return dict(zip(("key_letters", "value_letters", "key_table_bytes", "value_table_bytes"), means))


def method(variant: Variant, letters: Letters) -> Method:
    profile = variant.profile()

    def code(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        return together([(keys, values)])[0]

    def together(layers: Sequence[Pair]) -> list[Coded]:
        with designed(variant):
            return [one(*pair) for pair in layers]

    def one(keys: NDArray[np.float32], values: NDArray[np.float32]) -> Coded:
        pair = tuple(x[profile.sinks :] for x in (keys, values))
        plan = fit.fit_plan(profile, *pair)
        letters.note(plan)
        coded = ours.round_trip(Codec(plan), keys, values, profile.sinks)
        if not variant.listed:
            return coded
        decoded = [x[profile.sinks :] for x in (coded.keys, coded.values)]
        streams = (plan.key, plan.value)
        key, value = (list_exceptions(x, d, plan, stream) for x, d, stream in zip(pair, decoded, streams))
        return replace(
            coded,
            key_bytes=coded.key_bytes + LISTED_BYTES * key,
            value_bytes=coded.value_bytes + LISTED_BYTES * value,
        )

    return Method(f"classes: {variant.name}", "class limits", ours.SOURCE, code, together)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/quality class_limits", description=__doc__.splitlines()[0])
    models.add_arguments(parser)
    texts.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="a new folder: letters are counted while coding"
    )
    parser.add_argument("--documents", nargs="+", default=list(DOCUMENTS), metavar="NAME")
    parser.add_argument("--context", type=int, default=1152, help="tokens read first; the newest 128 stay exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    window = Window(context=arguments.context, continuation=0)
    documents = [d for d in texts.chosen(arguments, arguments.models) if d.name in arguments.documents]
    baseline = next(m for m in ours.methods() if m.name == BASELINE)
    rows = []
    for name in arguments.model or list(models.WEIGHTS):
        noted = {variant.name: Letters() for variant in VARIANTS}
        methods = [baseline, *(method(variant, noted[variant.name]) for variant in VARIANTS)]
        model = models.load(name, arguments.models, arguments.device, arguments.dtype)
        found, _ = evaluate(model, documents, methods, window, arguments.out)
        for row in summary(found, BASELINE):
            letters = noted.get(row["method"].removeprefix("classes: "), Letters())
            facts = letters.facts() if letters.letters else {}
            rows.append({**row, **facts})
            shown = " ".join(f"{key} {value:.1f}" for key, value in facts.items())
            ratio = row["kl_ratio"]["mean"]
            print(f"{row['model']:<9} {row['method']:<44} {row['bits_per_value']:.3f} {ratio:6.2f} {shown}")
    if arguments.json:
        document = {
            "what": __doc__.splitlines()[0],
            "documents": {document.name: document.sha256 for document in documents},
            "context": arguments.context,
            "baseline": BASELINE,
            "versions": {package: version(package) for package in ("dquantcodec", "numpy", "torch", "transformers")},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0
