"""The valid vectors: files that every reader reads, each with what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vector_files import (
    FILE_ID,
    File,
    by_groups,
    grouped_stream,
    grouping,
    levels_of,
    put,
    rotated,
    simple,
    source,
    stream,
    with_header_crc,
)

from dquantcodec.file import Layer, append, create
from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import Plan

#: A coded layer of two heads of six values; most vectors about records use it.
PLAN = simple(2, 6)


@dataclass(frozen=True)
class Valid:
    """``shows`` says what is special; ``findings`` is what verification reports."""

    name: str
    shows: str
    data: bytes
    findings: tuple[str, ...] = ()


def coded(plan: Plan = PLAN, dtype: str = "float32", **options: Any) -> Layer:
    return Layer(plan.kv_heads, plan.head_dim, dtype, plan, **options)


def exact(heads: int = 1, dim: int = 5, dtype: str = "float32", **options: Any) -> Layer:
    return Layer(heads, dim, dtype, storage="exact", **options)


def pages_of(plan: Plan, tokens: int = 5, **options: Any) -> bytes:
    """A closed file of one layer and one PAGES record."""
    return File([coded(plan)], **options).pages(0, tokens).index().data


def valid() -> Iterator[Valid]:
    """All of them, in the order of the specification."""
    for part in (
        header,
        coders,
        grids,
        rotations,
        groups,
        head_groups,
        pages,
        records,
        rows,
        sequences,
        growth,
        torn,
        releases,
    ):
        yield from part()


def header() -> Iterator[Valid]:
    base = File([coded(), exact()])
    yield Valid("header-empty", "no records: an INDEX of none", base.index().data)
    layers = [coded(number=3), exact(number=4), Layer(1, 3, storage="absent", number=9), coded(number=4294967295)]
    yield Valid(
        "header-layers", "model layers 3, 4, 9 and 2^32-1: coded, exact, absent, coded; two share a profile",
        File(layers, model="m", revision="r", positions_start=2**53 - 1, shard=(1, 3), metadata={"é": [1]})
        .pages(0, 3).rows(0, 3, exact_only=True).index().data,
    )  # fmt: skip
    data = File([coded()]).pages(0, 3).index().data
    yield Valid("header-minor", "minor version 9 is read on", with_header_crc(put(data, 10, "H", 9)))
    yield Valid(
        "header-optional", "optional features that nobody knows", with_header_crc(put(data, 24, "Q", 1 << 63 | 5))
    )
    text = '{"colour":"Grün","metadata":{"a":' + "[" * 14 + "]" * 14 + ',"b":"\\"[{","c":1e308}}'
    yield Valid("header-json", "JSON of 16 levels with an unknown member, escapes and raw UTF-8", with_json(data, text))
    digits = json.dumps({"metadata": {"n": int("9" * 400)}})
    yield Valid("header-json-number", "a number of 400 characters", with_json(data, digits))
    large = File([coded()], metadata={"text": "x" * 5000}).pages(0, 3).index().data
    yield Valid("header-two-blocks", "a header block of 8192 bytes", large)
    named = replace(PLAN, profile_name="ein Name von zweiunddreißig Bytes")
    yield Valid(
        "header-name",
        "a profile's name that fills its field, and two profiles",
        File([coded(named), coded()]).pages(0, 2).index().data,
    )


def with_json(data: bytes, text: str) -> bytes:
    """A closed file's JSON replaced, in the same block."""
    size, at = int.from_bytes(data[12:16], "little"), int.from_bytes(data[92:96], "little")
    packed = text.encode()
    block = put(data[:at] + packed, 96, "I", len(packed))
    assert len(block) <= size
    return with_header_crc(block.ljust(size, b"\0") + data[size:])


def coders() -> Iterator[Valid]:
    for coder in ("rans", "prefix"):
        for letter, levels in ((1, 7), (2, 6), (3, 5), (4, 4)):
            plan = simple(2, 5, coder=coder, letter=letter, levels=levels)
            yield Valid(
                f"{coder}-letter-{letter}",
                f"{letter} of {levels} levels to a letter; heads end within letters",
                pages_of(plan),
            )
    yield Valid("rans-two-levels", "the fewest levels, 16 letters", pages_of(simple(2, 9, levels=2, letter=4)))
    yield Valid("rans-64-levels", "the most levels, 4096 letters", pages_of(simple(1, 6, levels=64, precision=12), 3))
    yield Valid(
        "prefix-64-levels",
        "64 letters of one symbol, codes of up to 15 bits",
        pages_of(simple(1, 6, coder="prefix", levels=64, letter=1, precision=15)),
    )
    yield Valid(
        "rans-precision-8", "256 slots, nearly as many as letters", pages_of(simple(1, 8, levels=15, precision=8))
    )
    yield Valid("rans-precision-15", "32768 slots", pages_of(simple(1, 8, levels=3, precision=15)))
    for coder in ("rans", "prefix"):
        for substreams in (2, 4):
            plan = simple(4, 5, coder=coder, substreams=substreams)
            yield Valid(f"{coder}-substreams-{substreams}", f"{substreams} containers to a token", pages_of(plan))
    plan = rotated(4, 3, stream(4, 3, substreams=2), stream(4, 3, "prefix", 4, 3, 9, substreams=4))
    yield Valid("coders-differ", "keys rans in two containers, values prefix in four", pages_of(plan))
    for coder in ("rans", "prefix"):
        roomy = simple(1, 4, coder=coder, words=9)
        yield Valid(f"{coder}-spare-words", "containers that end in words of zero", pages_of(roomy))


def grids() -> Iterator[Valid]:
    yield Valid("mid-tread-rans", "scale-only grid of 5 levels", pages_of(simple(2, 5, grid="mid-tread")))
    yield Valid(
        "mid-tread-prefix",
        "scale-only grid of 7 levels, unbiased gain",
        pages_of(simple(2, 5, coder="prefix", levels=7, grid="mid-tread", gain="unbiased")),
    )
    for name, means in (("keys", (True, False)), ("values", (False, True)), ("both", (True, True))):
        plan = rotated(2, 5, stream(2, 5, mean=means[0]), stream(2, 5, mean=means[1]))
        yield Valid(f"means-{name}", f"channel means of {name}", pages_of(plan))
    yield Valid(
        "means-mid-tread", "channel means under a scale-only grid", pages_of(simple(2, 5, mean=True, grid="mid-tread"))
    )
    for name, scale, shows in (
        ("large", 1e37, "an exponent above 0"), ("small", 1e-40, "an exponent below 0, values below the normal FP32"),
    ):  # fmt: skip
        yield Valid(f"exponent-{name}", shows, pages_of(simple(2, 5, mean=True), scale=scale))

    def exponent(number: int) -> Callable[[int, NDArray[np.uint8]], None]:
        return lambda place, pages: pages[:, :4].view("<i2").__setitem__(slice(None), number)

    for number, shows in (
        (119, "values beyond FP32 become its largest"),
        (-157, "values that vanish keep their signs"),
    ):
        data = File([coded()]).pages(0, 5, edit=exponent(number)).index().data
        yield Valid(f"exponent-{number}", shows, data)

    def numbers(place: int, pages: NDArray[np.uint8]) -> None:
        at = PageLayout.of(PLAN)
        for kind in (at.key, at.value):
            first = at.head_bytes + kind.affine_at
            pairs = pages[:, first : first + 4 * 6].view("<f2").reshape(-1, 2)
            pairs[:] = [[-0.0, 0.0], [65504, -65504], [6e-8, 6e-8], [-1, 0], [0.0, -0.0], [-65504, 65504]]

    yield Valid(
        "affine-edges",
        "offsets and scales: both zeros, negative, least, largest",
        File([coded()]).pages(0, 6, edit=numbers).index().data,
    )
    mean_plan = simple(1, 12, mean=True)

    def means(place: int, pages: NDArray[np.uint8]) -> None:
        at = PageLayout.of(mean_plan)
        for kind, scale in ((at.key, 65504.0), (at.value, -0.0)):
            pages[:, kind.scale_at : kind.mean_at].view("<f2")[:] = scale
            pages[:, kind.mean_at : kind.mean_at + 12].view(np.int8)[:] = [-128, 127, 0, 1, -1, 64, -64, 2, -2, 3, 5, 8]

    yield Valid(
        "means-edges",
        "means of -128, a mean scale of -0",
        File([coded(mean_plan)]).pages(0, 3, edit=means).index().data,
    )


def rotations() -> Iterator[Valid]:
    for dims, shows in (
        ((1, 2, 4, 8, 16), "powers of two"), ((3, 5, 6, 7), "heads of several blocks, down to order 1"),
        ((12, 20), "Paley I: orders 12 and 20"), ((28, 36), "Paley II: orders 28 and 36"), ((44,), "Paley I: order 44"),
        ((60,), "Paley I: order 60"), ((24, 40), "Paley and Sylvester: orders 24 and 40"),
        ((27, 100), "blocks 24, 2, 1 and 96, 4"),
    ):  # fmt: skip
        layers = [coded(simple(1, dim, mean=dim % 3 == 0)) for dim in dims]
        yield Valid(f"rotation-{'-'.join(map(str, dims))}", shows, File(layers).pages(0, 2).index().data)


def groups() -> Iterator[Valid]:
    some = [levels_of(1, 200), levels_of(3), levels_of(6, 300)]
    two = grouping(2, 9, some, [(0, 1), (2,), (1,)], [(2, 2), (4, 1)])
    yield Valid(
        "groups",
        "groups of two fields and of one, three tables, heads backwards, a channel left out",
        pages_of(by_groups(two)),
    )
    yield Valid(
        "groups-means", "channel means, also of channels that are not coded", pages_of(by_groups(two, mean=True))
    )
    four = grouping(4, 16, some, [(0, 0, 0, 1), (1, 2)], [(2, 4), (4, 2)])
    for substreams in (1, 2, 4):
        yield Valid(
            f"groups-substreams-{substreams}",
            f"letters of four fields; {substreams} containers",
            pages_of(by_groups(four, substreams=substreams)),
        )
    eight = grouping(1, 20, some, [(1,), (0, 2)], [(8, 1), (1, 2), (5, 2)], precision=9)
    yield Valid("groups-of-eight", "groups of eight, one and five letters", pages_of(by_groups(eight)))
    wide = grouping(1, 300, [levels_of(2)], [(0, 0, 0)], [(8, 3)])
    yield Valid(
        "groups-wide", "channel numbers of two bytes, 276 of 300 channels left out", pages_of(by_groups(wide), 3)
    )
    most = grouping(1, 4, [levels_of(127, 1023), levels_of(1, 1)], [(0,), (1,)], [(1, 1), (1, 1), (2, 1)], precision=14)
    yield Valid(
        "groups-most-levels",
        "255 levels, codes of up to 14 bits, gains of 1 and 1023",
        pages_of(by_groups(most, words=6)),
    )
    mixed = rotated(2, 9, stream(2, 9, mean=True), grouped_stream(two, gain="unbiased"))
    yield Valid("groups-values", "keys rotated, values in groups", pages_of(mixed))
    shared = [coded(by_groups(two)), coded(simple(2, 9)), coded(by_groups(two, mean=True))]
    yield Valid(
        "groups-shared", "two profiles of one grouping, a third beside them", File(shared).pages(0, 4).index().data
    )
    for states, quantiser in ((4, "trellis-4"), (8, "trellis-8")):
        turning = [levels_of(1, 256, True), levels_of(3, 300, True), levels_of(2, 512)]
        found = grouping(2, 9, turning, [(0, 1), (2,), (1,)], [(2, 2), (4, 1)], states)
        yield Valid(quantiser, "dependent classes with one that is not", pages_of(by_groups(found), 9))
        split = grouping(4, 6, turning, [(0, 0, 2)], [(2, 3)], states)
        yield Valid(
            f"{quantiser}-substreams",
            "states begin anew in each of four containers",
            pages_of(by_groups(split, substreams=4, mean=True), 9),
        )
        long = grouping(1, 3, [levels_of(63, 100, True)], [(0,)], [(3, 1)], states, 12)
        yield Valid(f"{quantiser}-most-levels", "127 dependent levels", pages_of(by_groups(long, words=4), 9))


def head_groups() -> Iterator[Valid]:
    two, equal = [exact()], simple(2, 5)
    layers = [Layer(4, 5, "float32", equal, head_groups=2), *two, coded(simple(1, 5))]
    usual = File(layers).rows(0, 2).pages(2, 40).rows(2, 40, exact_only=True)
    yield Valid("head-groups", "a layer of two equal head groups beside layers of one", usual.index().data)
    narrow = grouping(1, 5, [levels_of(2)], [(0,)], [(5, 1)])
    plans = [simple(2, 5, coder="prefix"), by_groups(narrow), simple(3, 5, mean=True)]
    sealed = File([Layer(6, 5, "bfloat16", plans)]).rows(0, 9).pages(0, 7)
    yield Valid(
        "head-groups-differ", "head groups of two, one and three heads, each coded in its own way", sealed.index().data
    )
    single = [simple(1, 3, coder=coder) for coder in ("rans", "prefix", "rans", "prefix")]
    run = File([Layer(4, 3, "float32", single), coded(simple(1, 2))]).pages(0, 70)
    yield Valid("head-groups-run", "a run of three windows of five head groups", run.index().data)


def pages() -> Iterator[Valid]:
    for window, counts in ((64, (1, 32, 33, 64)), (96, (70,)), (4096, (40,))):
        plan = simple(1, 4, window=window)
        for tokens in counts:
            yield Valid(
                f"page-{tokens}-of-{window}",
                f"windows of {window}, the last cut behind token {tokens}",
                pages_of(plan, tokens),
            )
    yield Valid(
        "page-run",
        "a record of three windows and a cut one, of two layers",
        File([coded(), coded(simple(1, 3))]).pages(0, 101).index().data,
    )
    yield Valid(
        "page-records",
        "records of one and of two windows",
        File([coded()]).pages(0, 32).pages(32, 64).pages(96, 1).index().data,
    )


def records() -> Iterator[Valid]:
    base = [coded(), exact()]
    usual = File(base, sinks=2, recent=3).rows(0, 2).pages(2, 40).rows(2, 40, exact_only=True).rows(42, 3)
    yield Valid("records-usual", "leading rows, pages, exact layers' rows, newest rows", usual.index().data)
    cuts = (
        File(base).rows(0, 7, exact_only=True).pages(0, 40).rows(7, 20, exact_only=True).rows(27, 13, exact_only=True)
    )
    yield Valid("records-cuts", "exact layers' rows in other cuts than the pages, some before them", cuts.index().data)
    note = File(base).rows(0, 2).record(0x8002, b'{"note":1}').rows(2, 2)
    yield Valid("records-note", "a NOTE among records", note.index().data)
    strange = File(base).record(0xFFFF, b"?" * 100, first=9, tokens=9, sequence=9, flags=77, version=5).rows(0, 2)
    yield Valid(
        "records-unknown", "an unknown record that may be skipped, whatever its fields say", strange.index().data
    )
    yield Valid(
        "records-fill", "FILL records, empty and of two blocks", File(base).rows(0, 2).fill(0).fill(5000).index().data
    )
    only = File([exact(2, 3, "bfloat16"), exact(1, 4, "float16")], recent=9).rows(0, 3).rows(3, 2, exact_only=True)
    yield Valid(
        "records-exact-only", "no coded layer: rows of all layers and of the exact ones are the same", only.index().data
    )
    yield Valid("records-absent", "every layer absent", File([Layer(1, 3, storage="absent")]).index().data)


def rows() -> Iterator[Valid]:
    three = [exact(2, 9, dtype) for dtype in ("bfloat16", "float16", "float32")]
    yield Valid("rows-plain", "rows as they are", File(three).rows(0, 3, encoding=0).index().data)
    yield Valid(
        "rows-planes", "byte planes, compressed where that is shorter", File(three).rows(0, 60, encoding=1).index().data
    )

    def same(rows: NDArray[Any]) -> None:
        rows[:] = rows[:1, :1, :1]

    yield Valid(
        "rows-constant", "planes of one byte repeated", File(three).rows(0, 60, encoding=1, edit=same).index().data
    )

    def edges(rows: NDArray[Any]) -> None:
        rows.reshape(-1)[:8] = np.array([0.0, -0.0, np.inf, -np.inf, 6e-8, -6e-8, 65504, np.nan], rows.dtype)

    yield Valid(
        "rows-edges",
        "zeros of both signs, infinities, NaN, least and large numbers",
        File(three).rows(0, 3, edit=edges).index().data,
    )
    yield Valid(
        "rows-of-coded", "rows of a coded layer in float16", File([coded(dtype="float16")]).rows(0, 4).index().data
    )


def sequences() -> Iterator[Valid]:
    base = [coded(), exact()]
    mixed = (
        File(base, sequences=4).rows(0, 2, 3).pages(0, 33, 1).rows(2, 2, 3).rows(0, 33, 1, exact_only=True).rows(0, 1)
    )
    yield Valid("sequences", "four sequences, one of them empty, their records in turn", mixed.index().data)
    yield Valid(
        "sequences-many",
        "65536 sequences, the last alone has tokens",
        File([exact()], sequences=65536).rows(0, 1, 65535).index().data,
    )


def growth() -> Iterator[Valid]:
    """Files that were appended to: sealing, rewinding, epochs."""
    base, one = [coded(), exact()], [coded()]
    yield Valid(
        "seal",
        "pages over rows: tokens 0 to 31 are read from the pages",
        File(one).rows(0, 20).rows(20, 20).pages(0, 32).index().data,
    )
    yield Valid(
        "seal-exact",
        "exact layers go on reading the rows that pages sealed",
        File(base).rows(0, 20).rows(20, 20).pages(0, 32).index().data,
    )
    yield Valid(
        "seal-middle",
        "pages that begin within a record of rows; the rows before stay",
        File(base).rows(0, 40).pages(3, 32).index().data,
    )
    beyond = File(base).rows(0, 20).pages(4, 32).rows(20, 16, exact_only=True)
    yield Valid("seal-beyond", "pages that reach beyond the rows they seal", beyond.index().data)
    twice = File(one).rows(0, 40).pages(0, 32).rows(40, 30).pages(32, 32).rows(70, 2)
    yield Valid("seal-twice", "rows and pages in turn, as a decoding model writes them", twice.index().data)
    short = File(one).rows(0, 9).pages(0, 5).pages(5, 4).pages(9, 33)
    yield Valid("seal-short", "pages of fewer tokens than a window, others behind them", short.index().data)
    yield Valid(
        "rewind-rows",
        "a rewind into rows, other tokens after it",
        File(base).rows(0, 9).rewind(4).rows(4, 3).index().data,
    )
    cut = File(base).pages(0, 40).rows(0, 40, exact_only=True).rewind(35).rows(35, 2)
    yield Valid("rewind-pages", "a rewind into a page; the page keeps the tokens before", cut.index().data)
    again = File(one).pages(0, 64).rewind(33).pages(33, 32).rewind(20).pages(20, 5)
    yield Valid("rewind-again", "pages from the token of a rewind on, twice", again.index().data)
    yield Valid(
        "rewind-all", "a rewind to token 0, then other tokens", File(base).rows(0, 9).rewind(0).rows(0, 2).index().data
    )
    yield Valid("rewind-nothing", "a rewind to the end changes nothing", File(base).rows(0, 9).rewind(9).index().data)
    sealed = File(one).rows(0, 40).pages(0, 32).rewind(10).rows(10, 30).pages(10, 32)
    yield Valid("rewind-sealed", "a rewind below the floor; pages again over rows from there on", sealed.index().data)
    other = File(base, sequences=2).rows(0, 5).rows(0, 5, 1).rewind(2, 1).rows(5, 1).rows(2, 1, 1)
    yield Valid("rewind-sequence", "a rewind of one of two sequences", other.index().data)
    yield Valid(
        "epochs",
        "closed, appended to and closed again: the first INDEX is dead",
        File(base).rows(0, 3).index().rows(3, 2).index().data,
    )
    yield Valid("epochs-empty", "closed twice with nothing between", File(base).rows(0, 3).index().index().data)
    repaired = File(base).rows(0, 3).pages(3, 32)
    repaired.epoch += 1
    repaired.rewind(3).rows(3, 1)
    yield Valid(
        "epochs-interrupted",
        "pages whose exact rows never came, taken back when the file was opened again",
        repaired.index().data,
    )


def releases() -> Iterator[Valid]:
    """Files as a release's own writer makes them, from data to close."""
    for name, (keys, others), heads, dim in (
        ("default", ("2.26", "1.96"), 2, 16),
        ("trellis", ("2.26-t", "1.96-t"), 2, 16),
        ("paper", ("paper-2.26", "paper-1.96"), 4, 24),
    ):
        layers = [Layer(heads, dim, "bfloat16", keys), Layer(heads, dim, "float16", others), exact(1, 4)]
        yield Valid(f"release-0.1-{name}", f"version 0.1.0 with profiles {keys} and {others}", written(layers))
    grown = written([Layer(4, 16, "bfloat16", "2.26", head_groups=2)], more=(2, 150))
    yield Valid("release-0.1-grown", "version 0.1.0: head groups, flushed, rewound, closed, appended to", grown)


def written(layers: Sequence[Layer], more: tuple[int, int] | None = None) -> bytes:
    """45 tokens with 2 leading and 8 newest ones exact; ``more``: rewound by so many, then up to so many tokens."""

    def rows(first: int, last: int) -> list[list[NDArray[Any]]]:
        return [[source(layer, i, kind, 0, first, last - first) for i, layer in enumerate(layers)] for kind in (0, 1)]

    with TemporaryDirectory() as folder:
        path = Path(folder) / "x.dqkv"
        with create(path, layers, sinks=2, recent=8, model="vector", _file_id=FILE_ID) as writer:
            writer.append(*rows(0, 45))
            if more:
                writer.flush()
                writer.rewind(45 - more[0])
        if more:
            with append(path) as writer:
                writer.append(*rows(45 - more[0], more[1]))
        return path.read_bytes()


def torn() -> Iterator[Valid]:
    """Files without an INDEX at their end: read as far as they are whole, and reported."""
    base = [coded(), exact()]
    told = ("log-torn",)
    whole = File(base).rows(0, 3).pages(3, 32).rows(3, 32, exact_only=True)
    yield Valid("torn-open", "not closed", whole.data, told)
    yield Valid("torn-reserved", "zeros behind the log", whole.data + bytes(8192), told)
    yield Valid("torn-rest", "bytes behind the log that are no record", whole.data + b"rest" * 100, told)
    before = len(whole.data)
    more = whole.rows(35, 4).data
    yield Valid("torn-cut", "the last record's end is missing", more[: before + 300], told)
    yield Valid("torn-header", "the last record's header is half there", more[: before + 40], told)
    yield Valid(
        "torn-payload",
        "the last record is as long as it says, its payload was not written",
        more[: before + 128] + bytes(len(more) - before - 128),
        told,
    )
    yield Valid(
        "torn-sides",
        "pages without the exact layers' rows: the sequence ends before them",
        File(base).rows(0, 3).pages(3, 32).data,
        told,
    )
    foreign = File(base).rows(0, 3)
    foreign.record(2, b"", number=1, salt=b"another!")
    yield Valid("torn-salt", "a record of another file ends the log", foreign.data, told)
    yield Valid("torn-block", "nothing but a header block", File(base).data, told)
    stale = File(base).rows(0, 3).record(2, b"", number=0).data
    yield Valid("torn-index", "an INDEX whose last byte is missing", File(base).rows(0, 3).index().data[:-1], told)
    assert stale
