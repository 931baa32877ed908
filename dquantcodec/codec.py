"""The codec on the CPU: ``[T, H, D]`` keys and values to pages and back; the reference for every other device.

Pages are independent, so threads take whole pages and the bytes never depend on their number.  The stages of encoding
are in :mod:`dquantcodec.encode`, those of decoding in the coders and :mod:`dquantcodec.reconstruct`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from . import attend, encode, grid
from .arrays import as_tensor, as_tensors, check_dtype, check_finite, to_float32
from .attend import Partial, Problem
from .attend_parts import PartAttention, one_path
from .decode import RowDecoder, decode_levels, form_of
from .errors import ChecksumError, FormatError, InputError
from .faults import fit, unfit_fields, unused_bytes, wrong
from .group_grid import nearest_levels
from .letters import by_token
from .page import KindFields, page_exponents, read_kind, tile_words, write_kind
from .page_layout import KINDS, PageLayout
from .parts import Part, parts_of
from .plan import Plan, StreamPlan, plan_of
from .profile import DEFAULT_PROFILE, TILE, Profile
from .shares import by_threads, window_shares
from .status import EXPLANATIONS, REASONS
from .trellis_drift import undrifted

#: Values of one kind that go through the stages of encoding together: so many that a thread seldom asks for the
#: interpreter's lock, so few that they stay in a cache.
ENCODED_VALUES = 1 << 19
#: Values that are decoded together where they pass through memory on their way to the caller's.
DECODED_VALUES = 1 << 21
#: Values whose softmax is taken together.
ATTENDED_VALUES = 1 << 19
#: Numbers that partial results of attention may have together.
PARTIAL_VALUES = 1 << 24


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

        # Of several threads each asks for the interpreter's lock less often.
        each = self._pages(ENCODED_VALUES * min(self.threads, 2)) * plan.window

        def encode_share(share: tuple[int, int]) -> None:
            room = encode.Room()
            memory = np.empty((min(each, share[1] - share[0]), plan.kv_heads, plan.head_dim), np.float32)
            for first in range(*share, each):
                last = min(first + each, share[1])
                part = data[first // plan.window : -(-last // plan.window)]
                part[:] = 0
                for tensor, kind in zip(tensors, KINDS):
                    x = to_float32(tensor[first:last], memory[: last - first])
                    magnitudes = encode.page_magnitudes(x, plan.window)
                    if not np.isfinite(magnitudes).all():
                        self._refuse_values(tensors, first, last)
                    for run, fields in encode.encode_pages(x, plan, getattr(plan, kind), magnitudes, room):
                        write_kind(part[run], plan, kind, fields)

        by_threads(encode_share, window_shares(0, tokens, plan.window, self.threads), self.threads)
        return Pages(data, tokens)

    def _refuse_values(self, tensors: tuple[NDArray[Any], NDArray[Any]], first: int, last: int) -> None:
        """Raise for the first page of the tokens ``first`` to ``last`` with NaN or infinity."""
        for page in range(first, last, self.plan.window):
            for tensor, kind in zip(tensors, KINDS):
                check_finite(to_float32(tensor[page : min(page + self.plan.window, last)]), kind, page)

    def decode(
        self, pages: Pages, start: int = 0, stop: int | None = None, *, dtype: DTypeLike = np.float32
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values ``[stop - start, H, D]`` of tokens ``start`` to ``stop``; touches only their tiles."""
        start, stop, shape = self._rows(pages, "key", start, stop)
        keys, values = (np.empty(shape, check_dtype(dtype)) for _ in KINDS)
        self._decode(pages, start, stop, {"key": keys, "value": values})
        return keys, values

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
        start, stop, shape = self._rows(pages, kind, start, stop)
        rows = np.empty(shape, check_dtype(dtype)) if out is None else _writable(out, shape)
        self._decode(pages, start, stop, {kind: rows})
        return rows

    def _rows(self, pages: Pages, kind: str, start: int, stop: int | None) -> tuple[int, int, tuple[int, int, int]]:
        """The tokens that a slice of ``pages`` means, and the shape of their rows."""
        start, stop, _ = slice(start, stop).indices(self._checked(pages, kind).tokens)
        return start, stop, (max(0, stop - start), self.plan.kv_heads, self.plan.head_dim)

    def _decode(self, pages: Pages, start: int, stop: int, rows: dict[str, NDArray[Any]]) -> None:
        """Tokens ``start`` to ``stop`` of every kind in ``rows``."""
        if start >= stop:
            return
        window = self.plan.window
        run = slice(start // window, -(-stop // window))
        whole, origin = slice(0, self.layout.tiles), run.start * window
        exponents = page_exponents(pages.data[run])
        inside = slice(start - origin, stop - origin)
        decoders = {}
        for kind in rows:
            fields = read_kind(pages.data[run], self.plan, kind, whole, words=False)
            if not fit(exponents[:, KINDS.index(kind)], fields, inside):
                self._refuse_pages(pages, rows, start, stop)
            words = tile_words(pages.data[run], self.plan, kind)
            decoders[kind] = RowDecoder(fields, words, self.plan, getattr(self.plan, kind))

        def decode_share(share: tuple[str, int, int]) -> None:
            kind, first, last = share
            out, decoder, of_kind = rows[kind][first - start : last - start], decoders[kind], KINDS.index(kind)
            if form_of(out) is not None and not exponents[:, of_kind].any():
                decoder.rows(first - origin, last - origin, out)
                return
            # Rows that pass through memory of their own: a few pages at a time.
            for part in self._parts(pages, first, last, self._pages(DECODED_VALUES)):
                at = part.first_token
                exponent = int(exponents[part.pages.start - run.start, of_kind])
                decoder.rows(at - origin, at - origin + part.tokens, out[at - first :][: part.tokens], exponent)

        shares = window_shares(start, stop, window, self.threads)
        by_threads(decode_share, [(kind, *share) for kind in rows for share in shares], self.threads)
        if any(wrong(decoder.status, inside) for decoder in decoders.values()):
            self._refuse_pages(pages, rows, start, stop)

    def symbols(self, pages: Pages, kind: str) -> NDArray[np.uint8]:
        """The decoded symbols uint8 ``[T, n]`` of ``kind``, counted from the lowest level of the grid or class."""
        out = np.empty((self._checked(pages, kind).tokens, self.plan.values), np.uint8)
        for part in self._parts(pages, 0, pages.tokens, 1):
            _, levels = self._levels(pages, kind, part)
            out[part.first_token :][: part.tokens] = by_token(levels)[part.inside]
        return out

    def check(self, pages: Pages) -> list[tuple[str, int, int, str]]:
        """Everything about ``pages`` that can be wrong: one ``(kind, token, substream, reason code)`` each.

        Decodes every container strictly (``container-overrun``, ``container-state``, ``container-padding``) and looks
        at page fields: ``page-exponent``, ``page-affine`` (not finite), ``page-unused`` (padding, or bytes of absent
        tokens, that are not zero).
        """

        def check_part(part: Part) -> list[tuple[str, int, int, str]]:
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

        parts = list(self._parts(self._checked(pages), 0, pages.tokens, 1))
        return [finding for found in by_threads(check_part, parts, self.threads) for finding in found]

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
        problem = Problem.of(query, plan, scale)

        # Parts, and the order in which they are merged, are the same for every number of threads.
        most = 1 if plan.value.mean else self._pages(ATTENDED_VALUES)
        parts = list(self._parts(pages, 0, pages.tokens, most))
        over, statuses = self._attention(problem, pages, parts)
        partial = Partial.empty(problem)
        # Results of many queries are merged before there are too many of them.
        together = max(self.threads, PARTIAL_VALUES // max(1, problem.query.size))
        for first in range(0, len(parts), together):
            shares = window_shares(first, min(first + together, len(parts)), 1, self.threads)
            for others in by_threads(lambda share: over(*share), shares, self.threads):
                attend.merge(partial, others)
        if any(wrong(status, slice(0, pages.tokens)) for status in statuses):
            self._refuse_pages(pages, KINDS, 0, pages.tokens, by_page=True)
        result, sums = attend.finish(problem, partial, plan)
        if exact is not None:
            rows = [as_tensor(a, kind, plan.kv_heads, plan.head_dim) for a, kind in zip(exact, KINDS)]
            if len(rows[0]) != len(rows[1]):
                raise InputError(
                    f"{len(rows[0])} exact keys but {len(rows[1])} exact values", code="input-shape", kind="value"
                )
            result, sums = attend.merge_exact(problem, result, sums, *(to_float32(r) for r in rows))
        return problem.shaped(result, sums)

    def _attention(
        self, problem: Problem, pages: Pages, parts: list[Part]
    ) -> tuple[Callable[[int, int], Partial], list[NDArray[np.uint8]]]:
        """What attends to the parts from one to another, and statuses of kinds that tell afterwards what is wrong."""
        plan, tiles = self.plan, self.layout.tiles
        exponents = page_exponents(pages.data)
        if parts and one_path(plan) and (exponents == exponents[0]).all():
            fields = [read_kind(pages.data, plan, kind, slice(0, tiles), words=False) for kind in KINDS]
            if not all(fit(exponents, found, slice(0, pages.tokens)) for found in fields):
                self._refuse_pages(pages, KINDS, 0, pages.tokens, by_page=True)
            tokens = np.array([part.tokens for part in parts])
            first = np.array([part.pages.start for part in parts]) * tiles
            ends = np.stack([first, first - (-tokens // TILE)], axis=1)
            words = [tile_words(pages.data, plan, kind) for kind in KINDS]
            attention = PartAttention(problem, plan, fields, words, ends, tokens)
            return attention.over, attention.statuses

        def over(first: int, last: int) -> Partial:
            """Part by part."""
            partials = []
            for part in parts[first:last]:
                decoded = []
                for kind in KINDS:
                    fields, levels = self._levels(pages, kind, part)
                    decoded.append(attend.Levels.of(fields, levels, part.inside, getattr(plan, kind)))
                partials.append(attend.over_levels(problem, *decoded))
            return attend.together(partials)

        return over, []

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

    def _refuse_pages(self, pages: Pages, kinds: Iterable[str], start: int, stop: int, by_page: bool = False) -> None:
        """Raise for the first page, kind by kind or page by page, that does not check out; there is one."""
        order = [(kind, page) for kind in kinds for page in self._parts(pages, start, stop, 1)]
        if by_page:
            order.sort(key=lambda found: found[1].first_token)
        for kind, page in order:
            self._levels(pages, kind, page)
        raise AssertionError("nothing is wrong with any of the pages")

    def _levels(self, pages: Pages, kind: str, part: Part) -> tuple[KindFields, NDArray[np.uint8]]:
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
        if not status.any():
            return fields, levels
        for row, substream in np.argwhere(status[part.inside]).tolist():
            token, code = part.first_token + row, REASONS[int(status[part.inside][row, substream])]
            raise ChecksumError(
                f"the {kind} container of token {token}, sub-stream {substream} {EXPLANATIONS[code]}",
                code=code,
                kind=kind,
                token=token,
                substream=substream,
            )
        return fields, levels

    def _parts(self, pages: Pages, start: int, stop: int, most: int) -> Iterator[Part]:
        return parts_of(pages.data, self.plan, start, stop, most)

    def _pages(self, values: int) -> int:
        """Pages that hold about so many values of a kind."""
        return max(1, values // (self.plan.window * self.plan.values))


def _writable(out: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """``out`` if rows of ``shape`` can be written to it."""
    if not isinstance(out, np.ndarray) or out.shape != shape or not out.flags.writeable:
        found = f"{list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
        raise InputError(f"out must be a writable NumPy array {list(shape)}, not {found}", code="input-out")
    check_dtype(out.dtype)
    return out
