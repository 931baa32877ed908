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
    layout = PageLayout.of(plan)
    page[:] = 0
    page[:4].view("<i2")[:] = key.exponent, value.exponent
    for fields, at in ((key, layout.key), (value, layout.value)):
        if fields.scale is not None and fields.mean is not None:
            page[at.scale_at : at.mean_at].view("<f2")[:] = fields.scale
            page[at.mean_at : at.mean_at + plan.values].view(np.int8)[:] = fields.mean.reshape(-1)
        body = page[layout.head_bytes : layout.head_bytes + len(fields.words) * layout.tile_bytes]
        tiles = body.reshape(-1, layout.tile_bytes)
        words = fields.words.astype(fields.words.dtype.newbyteorder("<"), copy=False).reshape(len(tiles), -1)
        tiles[:, at.words_at : at.affine_at] = words.view(np.uint8)
        affine = fields.affine.astype("<f2", copy=False).reshape(len(tiles), -1)
        tiles[:, at.affine_at : at.end] = affine.view(np.uint8)


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


def read_kind(pages: NDArray[np.uint8], plan: Plan, kind: str, tiles: slice) -> KindFields:
    """The fields of ``kind`` in ``tiles`` of every page of uint8 ``[pages, page_bytes]``, which share an exponent.

    They are copies, aligned and contiguous.
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
    word = np.dtype(np.uint16 if stream.coder == "rans" else np.uint32)
    words = np.ascontiguousarray(body[:, :, at.words_at : at.affine_at]).view(word.newbyteorder("<"))
    affine = np.ascontiguousarray(body[:, :, at.affine_at : at.end]).view("<f2")
    return KindFields(
        exponent=int(page_exponents(pages[:1])[0, KINDS.index(kind)]),
        scale=scale,
        mean=mean,
        words=words.astype(word, copy=False).reshape(-1, stream.substreams, stream.words, TILE),
        affine=affine.astype(np.float16, copy=False).reshape(-1, stream.affine),
    )
