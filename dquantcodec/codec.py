"""The codec on the CPU: ``[T, H, D]`` keys and values to pages and back; the reference for every other device.

Pages are independent, so threads take whole pages and the bytes never depend on their number.  The stages of encoding
are in :mod:`dquantcodec.encode`, those of decoding in the coders and :mod:`dquantcodec.reconstruct`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import attend, encode, grid, group_prefix
from .arrays import as_tensor, as_tensors, check_dtype, check_finite, store_float32, to_float32
from .coders import CODERS
from .errors import ChecksumError, FormatError, InputError
from .group_grid import nearest_levels
from .letters import by_token, letter_table
from .page import KindFields, page_exponents, read_kind, write_page
from .page_layout import KINDS, PageLayout
from .plan import Plan, StreamPlan, plan_of
from .profile import DEFAULT_PROFILE, TILE, Profile
from .reconstruct import reconstruct
from .status import EXPLANATIONS, REASONS
from .trellis_drift import undrifted

#: Values of one kind that go through the stages together: enough to make kernels worth calling, few enough to stay in
#: a cache of a megabyte or two.
GROUP_VALUES = 1 << 17

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, eq=False)
class Pages:
    """Coded tokens: ``data`` uint8 ``[pages, page_bytes]`` and how many ``tokens`` they hold.

    Every page but the last holds a full window; what the last one does not need is zero.
    """

    data: NDArray[np.uint8]
    tokens: int

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Codec:
    """Encoder and decoder for one geometry.

    ``profile`` is a name, a :class:`Profile`, or the :class:`Plan` a file was written with.  ``threads`` bounds how
    many pages are worked on at once.  ``device="cuda"`` or ``"cuda:1"`` makes a :class:`dquantcodec.cuda.Codec`
    instead, which takes and gives arrays on that GPU; it raises :class:`DeviceError` where none can be used.

    >>> import numpy as np
    >>> keys, values = np.random.default_rng(0).standard_normal((2, 300, 8, 128)).astype(np.float16)
    >>> codec = Codec("2.26", kv_heads=8, head_dim=128)
    >>> pages = codec.encode(keys, values)
    >>> pages.data.shape, pages.tokens
    ((3, 73280), 300)
    >>> decoded_keys, decoded_values = codec.decode(pages, 100, 200, dtype=np.float16)
    >>> decoded_keys.shape
    (100, 8, 128)
    """

    def __new__(
        cls,
        profile: str | Profile | Plan = DEFAULT_PROFILE,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        threads: int = 1,
        device: str = "cpu",
    ) -> Codec:
        if device == "cpu":
            return super().__new__(cls)
        from .cuda.codec import on_device

        return on_device(device, profile, kv_heads, head_dim)  # type: ignore[return-value]  # the same methods

    def __init__(
        self,
        profile: str | Profile | Plan = DEFAULT_PROFILE,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        self.plan = plan_of(profile, kv_heads, head_dim)
        if threads < 1:
            raise InputError(f"threads must be at least 1, not {threads}", code="input-threads")
        self.threads = threads
        self.layout = PageLayout.of(self.plan)

    def encode(self, keys: ArrayLike | Any, values: ArrayLike | Any) -> Pages:
        """Code keys and values ``[T, H, D]`` (float16, bfloat16 or float32; keys after RoPE) into pages.

        Every stream fits its container, whatever the values.  Raises :class:`InputError` for a wrong shape or dtype
        and for NaN or infinity, naming kind, token, head and channel.
        """
        plan = self.plan
        tensors = as_tensors(keys, values, plan.kv_heads, plan.head_dim)
        tokens = len(tensors[0])
        count = -(-tokens // plan.window)
        data = np.empty((count, self.layout.page_bytes), np.uint8)

        group = self._group

        def encode_group(first_page: int) -> None:
            first = first_page * plan.window
            last = min(first + group * plan.window, tokens)
            fields = []
            for tensor, kind in zip(tensors, KINDS):
                x = to_float32(tensor[first:last])
                check_finite(x, kind, first)
                fields.append(encode.encode_pages(x, plan, getattr(plan, kind)))
            for page, (key, value) in enumerate(zip(*fields), first_page):
                write_page(data[page], plan, key, value)

        for _ in self._map(encode_group, range(0, count, group)):
            pass
        return Pages(data, tokens)

    def decode(
        self, pages: Pages, start: int = 0, stop: int | None = None, *, dtype: DTypeLike = np.float32
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values ``[stop - start, H, D]`` of tokens ``start`` to ``stop``; touches only their tiles."""
        keys = self.decode_kind(pages, "key", start, stop, dtype=dtype)
        return keys, self.decode_kind(pages, "value", start, stop, dtype=dtype)

    def decode_kind(
        self,
        pages: Pages,
        kind: str,
        start: int = 0,
        stop: int | None = None,
        *,
        dtype: DTypeLike = np.float32,
        out: NDArray[Any] | None = None,
    ) -> NDArray[Any]:
        """Keys (``kind="key"``) or values (``"value"``) alone.

        ``out`` ``[stop - start, H, D]`` takes the rows, with any strides; its dtype then decides.

        Raises :class:`ChecksumError` (``container-overrun``, ``container-state``) for a container that no encoder
        wrote and :class:`FormatError` (``page-exponent``, ``page-affine``) for page fields that none wrote; the
        content of ``out`` is undefined then.  :class:`InputError` (``input-out``) if ``out`` cannot take the rows.
        """
        plan = self.plan
        start, stop, _ = slice(start, stop).indices(self._checked(pages, kind).tokens)
        shape = (max(0, stop - start), plan.kv_heads, plan.head_dim)
        rows = np.empty(shape, check_dtype(dtype)) if out is None else _writable(out, shape)

        def decode_part(part: _Part) -> None:
            fields, levels = self._levels(pages, kind, part)
            x = reconstruct(fields, levels, plan, getattr(plan, kind))
            place = rows[part.first_token - start :][: part.tokens]
            whole = place if place.flags.c_contiguous else np.empty(place.shape, place.dtype)
            store_float32(x[part.inside], whole)
            if whole is not place:
                place[...] = whole

        # Threads hand the interpreter's lock around between kernels, so theirs should be long.
        share = -(-(stop - start) // (plan.window * self.threads))
        most = max(self._group, min(4 * self.threads * self._group, share))
        for _ in self._map(decode_part, self._parts(pages, start, stop, most)):
            pass
        return rows

    def symbols(self, pages: Pages, kind: str) -> NDArray[np.uint8]:
        """The decoded symbols uint8 ``[T, n]`` of ``kind``, counted from the lowest level of the grid or class."""
        out = np.empty((self._checked(pages, kind).tokens, self.plan.values), np.uint8)
        for part in self._parts(pages, 0, pages.tokens):
            _, levels = self._levels(pages, kind, part)
            out[part.first_token :][: part.tokens] = by_token(levels)[part.inside]
        return out

    def check(self, pages: Pages) -> list[tuple[str, int, int, str]]:
        """Everything about ``pages`` that can be wrong: one ``(kind, token, substream, reason code)`` each.

        Decodes every container strictly (``container-overrun``, ``container-state``, ``container-padding``) and looks
        at page fields: ``page-exponent``, ``page-affine`` (not finite), ``page-unused`` (padding, or bytes of absent
        tokens, that are not zero).
        """

        def check_part(part: _Part) -> list[tuple[str, int, int, str]]:
            found = []
            for kind in KINDS:
                fields = read_kind(pages.data[part.pages], self.plan, kind, part.tiles)
                _, status = decode_levels(fields, self.plan, getattr(self.plan, kind), strict=True)
                for token, substream in np.argwhere(status[part.inside]):
                    code = REASONS[int(status[part.inside][token, substream])]
                    found.append((kind, part.first_token + int(token), int(substream), code))
                unfit = list(unfit_fields(fields, part.inside))
                behind = pages.data[part.pages, self.layout.bytes_for(part.tokens) :]
                head = pages.data[part.pages, self.layout.used_head_bytes : self.layout.head_bytes]
                if behind.any() or head.any() or unused_bytes(fields, part.tokens):
                    unfit.append((part.tokens - 1, "page-unused"))
                found += [(kind, part.first_token + token, 0, code) for token, code in unfit]
            return found

        parts = self._parts(self._checked(pages), 0, pages.tokens, most=1)
        return [finding for found in self._map(check_part, parts) for finding in found]

    def drift_share(self, keys: ArrayLike | Any, values: ArrayLike | Any, pages: Pages) -> tuple[float, float]:
        """Shares of key and of value symbols that are not the nearest level of their grid (paper, appendix).

        ``keys`` and ``values`` ``[T, H, D]`` are what ``pages`` was encoded from.
        """
        plan = self.plan
        shares = []
        for array, kind in zip((keys, values), KINDS):
            tensor = as_tensor(array, kind, plan.kv_heads, plan.head_dim)
            stream: StreamPlan = getattr(plan, kind)
            coded = self.symbols(pages, kind)
            moved = 0
            for first in range(0, pages.tokens, plan.window):
                part = slice(first, min(first + plan.window, pages.tokens))
                position = encode.prepare(to_float32(tensor[part]), plan, stream).position
                if stream.grouping is None:
                    nearest = grid.nearest_levels(position, stream.levels)
                elif stream.grouping.states == 1:
                    nearest = nearest_levels(position, stream.grouping)
                else:
                    nearest = undrifted(position, stream.grouping)
                moved += int((nearest != coded[part]).sum())
            shares.append(moved / max(1, coded.size))
        return shares[0], shares[1]

    def attend(
        self,
        query: ArrayLike | Any,
        pages: Pages,
        *,
        exact: tuple[ArrayLike | Any, ArrayLike | Any] | None = None,
        scale: float | None = None,
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Attention of queries over all tokens of ``pages`` and of ``exact`` rows, without materialised keys.

        ``query`` ``[Q, D]`` or ``[L, Q, D]`` (after RoPE; ``Q`` a multiple of the KV heads; no mask: every query
        sees every token), ``exact`` keys and values ``[E, H, D]`` kept outside the pages, ``scale`` of the logits
        (default ``1/sqrt(D)``).  Returns the output, shaped as the query, and the natural-log sum of exponentials
        ``[Q]`` or ``[L, Q]``, both float32.  Softmax is taken over pages and exact rows together; with no token at
        all the output is zero and the sum ``-inf``.
        """
        plan = self.plan
        self._checked(pages)
        problem = attend.Problem.of(query, plan, scale)

        def attend_part(part: _Part) -> attend.Partial:
            decoded = []
            for kind in KINDS:
                fields, levels = self._levels(pages, kind, part)
                decoded.append(attend.Levels.of(fields, levels, part.inside, getattr(plan, kind)))
            return attend.over_levels(problem, *decoded)

        partial = attend.Partial.empty(problem)
        parts = self._parts(pages, 0, pages.tokens, most=1 if plan.value.mean else 4 * self._group)
        for other in self._map(attend_part, parts):
            partial = partial.merge(other)
        result, sums = attend.finish(problem, partial, plan)
        if exact is not None:
            rows = [as_tensor(a, kind, plan.kv_heads, plan.head_dim) for a, kind in zip(exact, KINDS)]
            if len(rows[0]) != len(rows[1]):
                raise InputError(
                    f"{len(rows[0])} exact keys but {len(rows[1])} exact values", code="input-shape", kind="value"
                )
            result, sums = attend.merge_exact(problem, result, sums, *(to_float32(r) for r in rows))
        return problem.shaped(result, sums)

    def _checked(self, pages: Pages, kind: str = "key") -> Pages:
        """``pages`` if they are pages of this codec, whatever their content, and ``kind`` is one."""
        data, window = pages.data, self.plan.window
        shape = (-(-pages.tokens // window), self.layout.page_bytes)
        if pages.tokens < 0 or data.dtype != np.uint8 or data.shape != shape:
            raise InputError(
                f"{pages.tokens} tokens of this codec are uint8 pages {list(shape)}, "
                f"not {data.dtype} {list(data.shape)}",
                code="input-pages",
            )
        if kind not in KINDS:
            raise InputError(f"there are keys ('key') and values ('value'), not {kind!r}", code="input-kind")
        return pages

    def _levels(self, pages: Pages, kind: str, part: _Part) -> tuple[KindFields, NDArray[np.uint8]]:
        """Fields and levels ``[tiles, n, 32]`` of a part, everything about them checked."""
        fields = read_kind(pages.data[part.pages], self.plan, kind, part.tiles)
        for token, code in unfit_fields(fields, part.inside):
            raise FormatError(
                f"the {kind} container of token {part.first_token + token} {EXPLANATIONS[code]}",
                code=code,
                kind=kind,
                token=part.first_token + token,
            )
        levels, status = decode_levels(fields, self.plan, getattr(self.plan, kind))
        wrong = np.argwhere(status[part.inside])
        if len(wrong):
            token, substream = int(wrong[0][0]), int(wrong[0][1])
            code = REASONS[int(status[part.inside][token, substream])]
            raise ChecksumError(
                f"the {kind} container of token {part.first_token + token}, sub-stream {substream} "
                f"{EXPLANATIONS[code]}",
                code=code,
                kind=kind,
                token=part.first_token + token,
                substream=substream,
            )
        return fields, levels

    def _parts(self, pages: Pages, start: int, stop: int, most: int | None = None) -> Iterator[_Part]:
        """The tokens ``start`` to ``stop`` page by page, whole pages of one exponent up to ``most`` together."""
        window, tiles = self.plan.window, self.layout.tiles
        first = start // window
        exponents = page_exponents(pages.data[first : -(-stop // window)])
        most = most or self._group
        while start < stop:
            page, skipped = divmod(start, window)
            count = 1
            if skipped == 0:
                at = page - first
                alike = (exponents[at : at + min(most, (stop - start) // window)] == exponents[at]).all(axis=1)
                count = max(1, len(alike) if alike.all() else int(alike.argmin()))
            tokens = min(stop - start, count * window - skipped)
            first_tile = skipped // TILE
            last_tile = tiles if count > 1 else -(-(skipped + tokens) // TILE)
            inside = slice(skipped - first_tile * TILE, skipped - first_tile * TILE + tokens)
            yield _Part(slice(page, page + count), slice(first_tile, last_tile), start, inside)
            start += tokens

    @property
    def _group(self) -> int:
        """Pages that go through the stages together."""
        return max(1, GROUP_VALUES // (self.plan.window * self.plan.values))

    def _map(self, function: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        work = list(items)
        if self.threads == 1 or len(work) < 2:
            yield from map(function, work)
            return
        with ThreadPoolExecutor(min(self.threads, len(work))) as pool:
            yield from pool.map(function, work)


def _writable(out: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """``out`` if rows of ``shape`` can be written to it."""
    if not isinstance(out, np.ndarray) or out.shape != shape or not out.flags.writeable:
        found = f"{list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError(f"out must be a writable NumPy array {list(shape)}, not {found}", code="input-out")
    check_dtype(out.dtype)
    return out


@dataclass(frozen=True)
class _Part:
    """Tokens of one page or of some whole ones: their tiles, the first token, and where the tokens lie in the tiles."""

    pages: slice
    tiles: slice
    first_token: int
    inside: slice

    @property
    def tokens(self) -> int:
        return int(self.inside.stop - self.inside.start)


def decode_levels(
    fields: KindFields, plan: Plan, stream: StreamPlan, strict: bool = False
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Levels uint8 ``[tiles, n, 32]`` and, one row per token, statuses uint8 ``[32 * tiles, S]``."""
    if stream.grouping is not None:
        levels, status = group_prefix.decode_levels(fields.words, stream, strict)
        return levels, by_token(status)
    letters = plan.kv_heads // stream.substreams * letter_table(stream, plan.head_dim).per_head
    levels, status = CODERS[stream.coder].decode_levels(fields.words, stream, plan.head_dim, letters, strict)
    return levels, by_token(status)


def unfit_fields(fields: KindFields, tokens: slice) -> Iterator[tuple[int, str]]:
    """Reason codes of fields that no encoder writes, each with a token counted from the first of ``tokens``."""
    if not encode.LEAST_EXPONENT <= fields.exponent <= encode.MOST_EXPONENT:
        yield 0, "page-exponent"
    if fields.scale is not None and not np.isfinite(fields.scale).all():
        yield 0, "page-affine"
    finite = np.isfinite(fields.affine[tokens]).all(axis=1)
    yield from ((int(token), "page-affine") for token in np.flatnonzero(~finite))


def unused_bytes(fields: KindFields, tokens: int) -> bool:
    """Whether tiles hold anything for tokens from ``tokens`` on, which do not exist."""
    by_token = fields.words.transpose(0, 3, 1, 2).reshape(len(fields.affine), -1)
    return bool(by_token[tokens:].any() or fields.affine[tokens:].view(np.uint16).any())
