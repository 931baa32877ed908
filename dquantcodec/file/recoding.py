"""Head groups encoded again from what their pages decode to: what resharding does where it cannot copy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..codec import Codec
from ..compare import ErrorSums, error_sums
from ..errors import InputError
from ..fit import SAMPLE_WINDOWS, fit_plan
from ..plan import Plan, StreamPlan, make_plan
from ..profile import PROFILES, Profile
from .layer import KINDS
from .shards import Shards
from .writer import LEAST_TOKENS


class Recoder:
    """Fits plans to decoded tokens and encodes these again.

    With a ``profile`` its containers are used, otherwise those of the pages there are, in proportion to the heads, and
    the profile that the pages name.
    """

    def __init__(self, shards: Shards, profile: Profile | None, threads: int) -> None:
        self._shards = shards
        self._profile = profile
        self._threads = threads
        self._codecs: dict[int, Codec] = {}

    def fit(self, place: int, heads: slice) -> Plan:
        """A plan for ``heads`` of a layer, fitted to windows from all over the cache.

        Raises :class:`InputError` (``profile-unknown``) where the pages name no profile that is known here.
        """
        head_dim = self._shards.header.layers[place].head_dim
        sources = [s for s in self._shards.groups(place) if s.heads.start < heads.stop and heads.start < s.heads.stop]
        plans = [self._shards.readers[s.file].view.layers[place].plans[s.group] for s in sources]
        profile = self._profile or _named(plans, place)
        words = None
        if self._profile is None:
            shares = [
                (min(s.heads.stop, heads.stop) - max(s.heads.start, heads.start)) / plan.kv_heads
                for s, plan in zip(sources, plans)
            ]
            usual = make_plan(profile, heads.stop - heads.start, head_dim)
            old = [[getattr(plan, kind) for plan in plans] for kind in KINDS]
            words = (_words(usual.key, old[0], shares), _words(usual.value, old[1], shares))
        keys, values = self._sample(place, heads, profile.window)
        if len(keys) < LEAST_TOKENS:
            # Too few tokens to tell channels apart: they stay rotated.
            plain = {kind: replace(getattr(profile, kind), classes=None, quantiser="scalar") for kind in KINDS}
            profile = replace(profile, **plain)
        return fit_plan(replace(profile, window=self._shards.window), keys, values, words=words)

    def _sample(self, place: int, heads: slice, window: int) -> list[NDArray[np.float32]]:
        """Keys and values of some coded windows, whole ones where there are any."""
        every = [
            (sequence, first, min(first + window, span.end))
            for sequence in range(self._shards.sequences)
            for span in self._shards.spans(sequence)
            if span.paged
            for first in range(span.first, span.end, window)
        ]
        windows = [part for part in every if part[2] - part[1] == window] or every[:1]
        count = min(SAMPLE_WINDOWS, len(windows))
        chosen = [windows[i * len(windows) // count] for i in range(count)]
        empty = np.zeros((0, heads.stop - heads.start, self._shards.header.layers[place].head_dim), np.float32)
        return [
            np.concatenate([empty, *(self._read(s, place, kind, (a, b), heads) for s, a, b in chosen)])
            for kind in KINDS
        ]

    def encode(
        self, plan: Plan, sequence: int, place: int, tokens: tuple[int, int], heads: slice
    ) -> tuple[NDArray[np.uint8], tuple[ErrorSums, ErrorSums]]:
        """Pages uint8 ``[pages, page_bytes]`` of ``tokens``, and how far keys and values are from what was read."""
        codec = self._codecs.setdefault(id(plan), Codec(plan, threads=self._threads))
        before = [self._read(sequence, place, kind, tokens, heads) for kind in KINDS]
        pages = codec.encode(*before)
        key, value = (error_sums(old, new, plan.window) for old, new in zip(before, codec.decode(pages)))
        return pages.data, (key, value)

    def _read(self, sequence: int, place: int, kind: str, tokens: tuple[int, int], heads: slice) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._shards.read(sequence, place, kind, tokens, heads, np.float32)
        return rows


def _named(plans: list[Plan], place: int) -> Profile:
    names = sorted({plan.profile_name for plan in plans})
    if len(names) > 1 or names[0] not in PROFILES:
        raise InputError(
            f"the pages of layer {place} were coded with {' and '.join(map(repr, names))}, which is no profile to code "
            "them with again; name one",
            code="profile-unknown",
            layer=place,
        )
    return PROFILES[names[0]]


def _words(usual: StreamPlan, old: list[StreamPlan], shares: list[float]) -> int:
    """Words of a sub-stream of as many bytes as the heads have now; ``shares`` are those of the old groups' heads."""
    size = sum(stream.container * share for stream, share in zip(old, shares))
    return max(2, round(size / (usual.substreams * usual.word_bytes)))
