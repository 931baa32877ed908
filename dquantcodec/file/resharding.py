"""One cache in other files: its KV heads cut for other numbers of ranks.

Pages of head groups that stay whole are copied byte by byte.  A group that must be cut or joined is decoded and encoded
again, which loses something, so it is done only when asked for, and what it lost is measured.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..plan import Plan
from ..profile import Profile
from .compose import write_pages, write_rows
from .header import Header
from .layer import Layer
from .reader import Reader
from .repacking import REPACKED_TARGET, copied_pages
from .runs import RunLayout
from .shards import Shards, Source, Span, read_rows
from .structs import EXACT_ONLY, MAX_RUN
from .target import Target, new_target

if TYPE_CHECKING:
    from ..compare import ErrorSums
    from .recoding import Recoder


@dataclass(frozen=True)
class Recoded:
    """A head group that was encoded again: the layer's number in the model, its heads there, and what was lost beside
    the pages before: error energy over energy, of keys without the means of their windows."""

    layer: int
    heads: range
    key_nmse: float | None
    value_nmse: float | None


def reshard(
    readers: Sequence[Reader],
    paths: Sequence[str | PathLike[str]],
    *,
    head_groups: int | None = None,
    recode: bool = False,
    profile: str | Profile | None = None,
    threads: int = 1,
    progress: Callable[[int], object] | None = None,
) -> list[Recoded]:
    """Write the cache of ``readers`` (one file, or all parts of one cache) to ``paths``, equal parts of its KV heads.

    Every layer has the head groups it had, cut where ``paths`` ask for it, or ``head_groups`` in every file.  What
    cannot be copied is encoded again if ``recode`` allows it, with the profile that the pages name and containers in
    proportion, or with ``profile``; returns what became of it.  Exact rows stay exact.  ``progress`` is called with the
    number of tokens just written, once for all files.

    Raises :class:`IdentityError` for files that do not belong together, :class:`InputError` (``shard-heads``,
    ``shard-groups``, ``layer-groups``, ``profile-unknown``) before anything is written, what reading raises for damaged
    files, and OSError.  Nothing is left behind then.
    """
    shards = Shards(readers)
    outputs = [_Output(shards, part, len(paths), head_groups) for part in range(len(paths))]
    cut = sorted({group.place for output in outputs for group in output.groups if group.source is None})
    if cut and not recode:
        numbers = [shards.header.layers[place].number for place in cut]
        raise InputError(
            f"head groups of {len(cut)} of {len(shards.header.layers)} layers, the first of them layer {numbers[0]}, "
            "would be cut or joined; encoding them again loses something and must be allowed (--recode)",
            code="shard-groups",
            layers=numbers,
        )
    recoder = None
    if cut:
        from .recoding import Recoder  # brings Numba along, which copying does not need

        named = Profile.named(profile) if isinstance(profile, str) else profile
        recoder = Recoder(shards, named, threads)
    for output in outputs:
        output.prepare(recoder)
    targets: list[Target] = []
    try:
        for path, output in zip(paths, outputs):
            targets.append(new_target(path, output.header.salt, lock=False))
            output.begin(targets[-1])
        for sequence in range(shards.sequences):
            for span, first, end in _portions(shards, sequence):
                for output in outputs:
                    output.write(sequence, span, first, end)
                if progress:
                    progress(end - first)
        for target in targets:
            target.complete()
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None and targets:
            error.filename = str(targets[-1].path)
        for target in targets:
            target.leave(whole=False)
        raise
    return [recoded for output in outputs for recoded in output.recoded()]


def _portions(shards: Shards, sequence: int) -> Iterator[tuple[Span, int, int]]:
    """The spans of a sequence, cut to what records and memory hold."""
    run = RunLayout.of(shards.header)
    row_bytes = sum(2 * layer.row_bytes for layer in shards.header.layers if layer.storage != "absent")
    windows = max(1, min(MAX_RUN, REPACKED_TARGET // max(1, run.window_bytes)))
    for span in shards.spans(sequence):
        step = windows * shards.window if span.paged else max(1, REPACKED_TARGET // max(1, row_bytes))
        for first in range(span.first, span.end, step):
            yield span, first, min(first + step, span.end)


def cut_groups(groups: Sequence[slice], heads: slice, count: int | None) -> list[slice]:
    """The groups of ``heads``: ``count`` equal ones, or what ``groups`` leave when they are cut at its ends.

    >>> cut_groups([slice(0, 4), slice(4, 8)], slice(0, 6), None)
    [slice(0, 4, None), slice(4, 6, None)]
    """
    size = heads.stop - heads.start
    if count is not None:
        if not 1 <= count <= size or size % count:
            raise InputError(f"{size} KV heads cannot be cut into {count} equal head groups", code="layer-groups")
        bounds = list(range(heads.start, heads.stop + 1, size // count))
    else:
        ends = {end for group in groups for end in (group.start, group.stop)}
        bounds = sorted({heads.start, heads.stop, *(end for end in ends if heads.start < end < heads.stop)})
    return [slice(*pair) for pair in zip(bounds, bounds[1:])]


@dataclass(eq=False)
class _Group:
    """A head group of an output: ``heads`` among all of the cache, and where its pages are copied from, if they are."""

    place: int
    heads: slice
    source: Source | None
    plan: Plan | None = None
    errors: list[tuple[ErrorSums, ErrorSums]] = field(default_factory=list)


class _Output:
    """One of the files to write."""

    def __init__(self, shards: Shards, part: int, parts: int, head_groups: int | None) -> None:
        first, count = shards.header.info.shard
        self._shards = shards
        self._recoder: Recoder | None = None
        self._shard = (first * parts + part, count * parts)
        self.heads = shards.header.heads_of(*self._shard)
        self.groups: list[_Group] = []
        for place, layer in enumerate(shards.header.layers):
            if layer.storage != "coded":
                continue
            sources = shards.groups(place)
            whole = {(source.heads.start, source.heads.stop): source for source in sources}
            for heads in cut_groups([source.heads for source in sources], self.heads[place], head_groups):
                self.groups.append(_Group(place, heads, whole.get((heads.start, heads.stop))))

    def prepare(self, recoder: Recoder | None) -> None:
        """Settle the plans, and with them the header."""
        self._recoder = recoder
        for group in self.groups:
            if group.source is None:
                assert recoder is not None
                group.plan = recoder.fit(group.place, group.heads)
            else:
                layer = self._shards.readers[group.source.file].view.layers[group.place]
                group.plan = layer.plans[group.source.group]
        self.header = self._new_header()
        self._block = self.header.pack()
        self._run = RunLayout.of(self.header)

    def _new_header(self) -> Header:
        from .. import __version__

        def cut(place: int, layer: Layer) -> Layer:
            heads = self.heads[place].stop - self.heads[place].start
            plans = [group.plan for group in self.groups if group.place == place and group.plan]
            return replace(layer, kv_heads=heads, profile=plans or None)

        old = self._shards.header
        return replace(
            old,
            file_id=secrets.token_bytes(16),
            layers=tuple(cut(place, layer) for place, layer in enumerate(old.layers)),
            info=replace(old.info, shard=self._shard, writer=f"dquantcodec {__version__}"),
        )

    def begin(self, target: Target) -> None:
        self._log = target.log
        self._log.put_block(self._block)

    def write(self, sequence: int, span: Span, first: int, end: int) -> None:
        """Records of tokens ``first`` to ``end``, which lie in ``span``."""
        if span.paged:
            pages = [list(self._pages(group, sequence, first, end)) for group in self.groups]
            write_pages(self._log, self._run, sequence, first, end - first, pages)
            exact = [place for place, layer in enumerate(self.header.layers) if layer.storage == "exact"]
            self._write_rows(sequence, first, end, exact, EXACT_ONLY)
        else:
            present = [place for place, layer in enumerate(self.header.layers) if layer.storage != "absent"]
            self._write_rows(sequence, first, end, present)

    def _pages(self, group: _Group, sequence: int, first: int, end: int) -> Iterator[NDArray[np.uint8]]:
        if group.source is not None:
            yield from copied_pages(self._shards.group(sequence, group.place, group.source), first, end)
            return
        assert group.plan is not None and self._recoder is not None
        pages, errors = self._recoder.encode(group.plan, sequence, group.place, (first, end), group.heads)
        group.errors.append(errors)
        yield pages

    def _write_rows(self, sequence: int, first: int, end: int, places: list[int], flags: int = 0) -> None:
        heads = [self.heads[place] for place in places]
        layers = [self.header.layers[place] for place in places]
        step = max(1, REPACKED_TARGET // max(1, sum(2 * layer.row_bytes for layer in layers)))
        for start in range(first, end, step) if places else ():
            tokens = (start, min(start + step, end))
            rows = read_rows(self._shards, sequence, places, heads, tokens)
            write_rows(self._log, layers, sequence, start, rows, flags)

    def recoded(self) -> Iterator[Recoded]:
        """What was encoded again, heads as the model counts them."""
        first, _ = self._shards.header.info.shard
        for group in self.groups:
            if group.source is None:
                layer = self._shards.header.layers[group.place]
                before = first * layer.kv_heads
                heads = range(before + group.heads.start, before + group.heads.stop)
                key, value = (sum(sums[1:], sums[0]) for sums in zip(*group.errors)) if group.errors else (None, None)
                yield Recoded(
                    layer.number or 0, heads, key.centred_nmse if key else None, value.nmse if value else None
                )
