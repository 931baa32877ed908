"""The fields of pages as arrays, and pages made of them; :mod:`dquantcodec.page_layout` says where a byte stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .page_layout import KINDS, PageLayout, StreamLayout
from .plan import Plan, StreamPlan
from .profile import TILE


@dataclass(frozen=True, eq=False)
class KindFields:
    """The fields of one kind of consecutive pages, often just one, as arrays of their own.

    exponent
        Values were scaled by ``2**-exponent`` before coding; pages are taken together only if they share it.
    scale, mean
        FP16 ``[pages, H]`` and int8 ``[pages, H, D]``, or None.
    words
        uint16 or uint32 ``[tiles, S, words, 32]``, equally many tiles of every page.
    affine
        FP16 ``[32 * tiles, 2]``: offset and scale of every stream; ``[32 * tiles, 1]``: the scale of a mid-tread grid.
    """

    exponent: int
    scale: NDArray[np.float16] | None
    mean: NDArray[np.int8] | None
    words: NDArray[Any]
    affine: NDArray[np.float16]

    def grid(self, levels: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Offset and scale of every stream, float32 ``[32 * tiles]``: of ``M`` levels, the first and their distance."""
        if self.affine.shape[1] == 2:
            offset, scale = np.ascontiguousarray(self.affine.T, np.float32)
            return offset, scale
        # Tokens that nobody reads may hold any bits, signalling NaNs among them.
        with np.errstate(invalid="ignore"):
            scale = self.affine[:, 0].astype(np.float32)
            return np.float32(-(levels - 1) / 2) * scale, scale


def write_page(page: NDArray[np.uint8], plan: Plan, key: KindFields, value: KindFields) -> None:
    """Put both kinds' fields into ``page`` uint8 ``[page_bytes]``; whatever they do not cover becomes zero."""
    page[:] = 0
    for kind, fields in zip(KINDS, (key, value)):
        write_kind(page[None], plan, kind, fields)


def write_kind(pages: NDArray[np.uint8], plan: Plan, kind: str, fields: KindFields) -> None:
    """Put the fields of ``kind``, which are of so many pages, into ``pages`` uint8 ``[pages, page_bytes]``."""
    layout = PageLayout.of(plan)
    at: StreamLayout = getattr(layout, kind)
    exponent_at = 2 * KINDS.index(kind)
    pages[:, exponent_at : exponent_at + 2] = np.array([fields.exponent], "<i2").view(np.uint8)
    if fields.scale is not None and fields.mean is not None:
        scale = np.ascontiguousarray(fields.scale, "<f2").reshape(len(pages), -1)
        pages[:, at.scale_at : at.mean_at] = scale.view(np.uint8)
        mean = np.ascontiguousarray(fields.mean).reshape(len(pages), -1)
        pages[:, at.mean_at : at.mean_at + plan.values] = mean.view(np.uint8)
    each = len(fields.words) // len(pages)
    body = pages[:, layout.head_bytes :].reshape(len(pages), layout.tiles, layout.tile_bytes)[:, :each]
    words = fields.words.astype(fields.words.dtype.newbyteorder("<"), copy=False).reshape(len(pages), each, -1)
    body[:, :, at.words_at : at.affine_at] = words.view(np.uint8)
    affine = fields.affine.astype("<f2", copy=False).reshape(len(pages), each, -1)
    body[:, :, at.affine_at : at.end] = affine.view(np.uint8)


def cut_page(page: NDArray[np.uint8], plan: Plan, tokens: int) -> None:
    """Make ``page`` uint8 ``[page_bytes]`` hold its first ``tokens`` tokens only: bytes of all others become zero."""
    layout = PageLayout.of(plan)
    page[layout.bytes_for(tokens) :] = 0
    if not tokens % TILE:
        return
    tile = page[layout.bytes_for(tokens) - layout.tile_bytes :][: layout.tile_bytes]
    for stream, at in ((plan.key, layout.key), (plan.value, layout.value)):
        word = 2 if stream.coder == "rans" else 4
        tile[at.words_at : at.affine_at].reshape(-1, TILE, word)[:, tokens % TILE :] = 0
        tile[at.affine_at : at.end].reshape(TILE, 2 * stream.affine)[tokens % TILE :] = 0


def page_exponents(pages: NDArray[np.uint8]) -> NDArray[np.int16]:
    """The exponents of keys and of values ``[pages, 2]``."""
    return np.ascontiguousarray(pages[:, :4]).view("<i2")


def read_kind(pages: NDArray[np.uint8], plan: Plan, kind: str, tiles: slice, words: bool = True) -> KindFields:
    """The fields of ``kind`` in ``tiles`` of every page of uint8 ``[pages, page_bytes]``, which share an exponent.

    They are copies, aligned and contiguous.  Without ``words`` those are left out: ``[tiles, S, 0, 32]``.
    """
    layout = PageLayout.of(plan)
    stream: StreamPlan = getattr(plan, kind)
    at: StreamLayout = getattr(layout, kind)
    scale = mean = None
    if stream.mean:
        scale = np.ascontiguousarray(pages[:, at.scale_at : at.mean_at]).view("<f2").astype(np.float16, copy=False)
        mean = np.ascontiguousarray(pages[:, at.mean_at : at.mean_at + plan.values]).view(np.int8)
        mean = mean.reshape(-1, plan.kv_heads, plan.head_dim)
    body = pages[:, layout.head_bytes :].reshape(len(pages), layout.tiles, layout.tile_bytes)[:, tiles]
    word = word_type(stream)
    affine = np.ascontiguousarray(body[:, :, at.affine_at : at.end]).view("<f2")
    affine = affine.astype(np.float16, copy=False).reshape(-1, stream.affine)
    if words:
        found = np.ascontiguousarray(body[:, :, at.words_at : at.affine_at]).view(word.newbyteorder("<"))
        found = found.astype(word, copy=False).reshape(-1, stream.substreams, stream.words, TILE)
    else:
        found = np.zeros((len(affine) // TILE, stream.substreams, 0, TILE), word)
    return KindFields(
        exponent=int(page_exponents(pages[:1])[0, KINDS.index(kind)]),
        scale=scale,
        mean=mean,
        words=found,
        affine=affine,
    )


def word_type(stream: StreamPlan) -> np.dtype[Any]:
    """What a coder's words are in memory."""
    return np.dtype(np.uint16 if stream.coder == "rans" else np.uint32)


@dataclass(frozen=True, eq=False)
class TileWords:
    """Words of one kind where they lie in pages: those of tile ``t`` of page ``p``, of ``tiles`` a page, are ``size``
    words of ``data`` (one-dimensional, not to be written) from ``first + p * page + t * tile`` on."""

    data: NDArray[Any]
    first: int
    page: int
    tile: int
    tiles: int
    size: int

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """What kernels take beside ``data``."""
        return self.first, self.page, self.tile, self.tiles, self.size


def tile_words(pages: NDArray[np.uint8], plan: Plan, kind: str) -> TileWords:
    """The words of ``kind`` in uint8 ``[pages, page_bytes]``, without a copy if memory is contiguous, aligned, and of
    the byte order of pages."""
    layout = PageLayout.of(plan)
    stream: StreamPlan = getattr(plan, kind)
    at: StreamLayout = getattr(layout, kind)
    word = word_type(stream)
    data = np.ascontiguousarray(pages).reshape(-1).view(word.newbyteorder("<")).astype(word, copy=False)
    data = data if data.flags.aligned else data.copy()
    data.flags.writeable = False
    step = word.itemsize
    return TileWords(
        data, (layout.head_bytes + at.words_at) // step, layout.page_bytes // step, layout.tile_bytes // step,
        layout.tiles, (at.affine_at - at.words_at) // step,
    )  # fmt: skip
