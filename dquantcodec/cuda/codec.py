"""The codec on a GPU: ``[T, H, D]`` keys and values to pages and back, the same bytes as :class:`dquantcodec.Codec`.

Calls launch kernels on the caller's stream and return; they wait for the device only to raise an error, which a caller
prevents by giving an array ``status`` to look at later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ..arrays import as_floats, check_finite, to_float32
from ..codec import Pages
from ..errors import ChecksumError, DeviceError, FormatError, InputError
from ..page_layout import KINDS, PageLayout
from ..plan import Plan, StreamPlan, plan_of
from ..profile import DEFAULT_PROFILE, Profile
from ..status import EXPLANATIONS, REASONS
from . import arrays
from .decoder import Decoder, DecodeTables
from .device import Device, device, stream_of
from .encoder import Encoder, EncodeTables, GroupEncodeTables, upload_tables
from .launches import ELEMENTS

#: Reason codes of the statuses that only device kernels give (``gpu/include/dquant/decode.cuh``).
PAGE_REASONS = {4: "page-exponent", 5: "page-affine"}


@dataclass(frozen=True, eq=False)
class Pool:
    """Pages as kernels see them, and what keeps them alive."""

    record: tuple[int, int, int]
    owners: tuple[Any, ...]


class Codec:
    """Encoder and decoder for one geometry on one device.

    ``profile`` is a name, a :class:`Profile`, or the :class:`Plan` a file was written with; ``device`` the number of a
    GPU.  Arrays may come from PyTorch, CuPy, JAX or anything with DLPack; results come from the same library as the
    first argument (PyTorch, else CuPy).

    Pages may be a pool ``[pages, page_bytes]`` uint8 of the caller's, whose rows begin at multiples of 16 bytes;
    ``numbers`` int32 then says which page of it holds the first window of tokens, the second, and so on.  Numbers are
    not checked.

    ``stream`` is a CuPy or PyTorch stream, anything with ``__cuda_stream__``, or an address; by default the current
    stream of PyTorch for its tensors, otherwise CuPy's.
    """

    def __init__(
        self,
        profile: str | Profile | Plan = DEFAULT_PROFILE,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        device: int = 0,
    ) -> None:
        self.plan = plan_of(profile, kv_heads, head_dim)
        self.layout = PageLayout.of(self.plan)
        self.device = _device(device)
        self._encoders: dict[tuple[str, str], Encoder] = {}
        self._decoders: dict[tuple[str, str], Decoder] = {}
        with self.device.current:
            self._encode_tables: dict[str, EncodeTables | GroupEncodeTables] = {}
            self._decode_tables = {kind: DecodeTables(self.plan, kind) for kind in KINDS}

    def encode(
        self,
        keys: Any,
        values: Any,
        *,
        pages: Any = None,
        numbers: Any = None,
        status: Any = None,
        stream: Any = None,
    ) -> Pages:
        """Code keys and values ``[T, H, D]`` (float16, bfloat16 or float32; keys after RoPE) into pages.

        ``pages`` is the pool to write to, by default a new one; bytes of other pages are left alone.  ``status``
        uint8 ``[2, T]`` takes 0 for every good token of keys and of values, and 6 where a value was NaN or infinite
        and was coded as zero; without it, the call waits and raises :class:`InputError` for one, as
        :meth:`dquantcodec.Codec.encode` does.
        """
        plan, at = self.plan, self.device
        with at.current, stream_of(stream, [keys, values]):
            rows = [
                arrays.rows(array, f"{kind}s", (None, plan.kv_heads, plan.head_dim), tuple(ELEMENTS), at)
                for array, kind in zip((keys, values), KINDS)
            ]
            tokens = rows[0].shape[0]
            if rows[1].shape[0] != tokens:
                raise InputError(
                    f"{tokens} tokens of keys but {rows[1].shape[0]} of values", code="input-shape", kind="value"
                )
            windows = -(-tokens // plan.window)
            if pages is None:
                pages = arrays.empty(keys, (windows, self.layout.page_bytes), "uint8", at)
            result = Pages(pages, tokens)
            pool = self.pool(pages, tokens, numbers)
            checked = status is None
            if checked:
                status = arrays.empty(keys, (2, tokens), "uint8", at)
            statuses = arrays.flat(status, "status", (2, tokens), "uint8", at)
            if tokens == 0:
                return result
            for i, kind in enumerate(KINDS):
                encoder = self.encoder(kind, rows[i].dtype)
                scratch = encoder.scratch(windows)
                encoder.launch(rows[i], pool.record, windows, scratch=scratch, status=statuses.address + i * tokens)
            if checked:
                found = arrays.host(status)
                for i, kind in enumerate(KINDS):
                    if found[i].any():
                        token = int(found[i].argmax())
                        check_finite(_row(rows[i], token), kind, token)
        return result

    def decode(
        self,
        pages: Pages,
        start: int = 0,
        stop: int | None = None,
        *,
        dtype: DTypeLike | str = np.float32,
        numbers: Any = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Keys and values ``[stop - start, H, D]`` of tokens ``start`` to ``stop``; see :meth:`decode_kind`."""
        keys = self.decode_kind(pages, "key", start, stop, dtype=dtype, numbers=numbers, stream=stream)
        return keys, self.decode_kind(pages, "value", start, stop, dtype=dtype, numbers=numbers, stream=stream)

    def decode_kind(
        self,
        pages: Pages,
        kind: str,
        start: int = 0,
        stop: int | None = None,
        *,
        dtype: DTypeLike | str = np.float32,
        numbers: Any = None,
        out: Any = None,
        status: Any = None,
        stream: Any = None,
    ) -> Any:
        """Keys (``kind="key"``) or values (``"value"``) ``[stop - start, H, D]`` as float32, float16 or bfloat16.

        ``out`` takes the rows, with any strides of tokens and heads; its dtype then decides.  ``status`` uint8
        ``[stop - start, S]`` takes 0 for every good stream; without it, the call waits and raises
        :class:`ChecksumError` or :class:`FormatError` as :meth:`dquantcodec.Codec.decode_kind` does.
        """
        plan, at = self.plan, self.device
        if kind not in KINDS:
            raise InputError(f"there are keys ('key') and values ('value'), not {kind!r}", code="input-kind")
        start, stop, _ = slice(start, stop).indices(pages.tokens)
        tokens = max(0, stop - start)
        plan_stream = self._stream(kind)
        with at.current, stream_of(stream, [out, pages.data]):
            pool = self.pool(pages.data, pages.tokens, numbers)
            if out is None:
                out = arrays.empty(pages.data, (tokens, plan.kv_heads, plan.head_dim), _dtype_name(dtype), at)
            row = arrays.rows(out, "out", (tokens, plan.kv_heads, plan.head_dim), tuple(ELEMENTS), at)
            checked = status is None
            if checked:
                status = arrays.empty(pages.data, (tokens, plan_stream.substreams), "uint8", at)
            statuses = arrays.flat(status, "status", (tokens, plan_stream.substreams), "uint8", at)
            if tokens == 0:
                return out
            self.decoder(kind, row.dtype).launch(pool.record, start, stop, row, statuses)
            if checked:
                raise_statuses(kind, start, arrays.host(status))
        return out

    def encoder(self, kind: str, dtype: str) -> Encoder:
        """The kernels that encode ``kind`` from rows of ``dtype``, loaded once."""
        if (kind, dtype) not in self._encoders:
            if kind not in self._encode_tables:
                self._encode_tables[kind] = upload_tables(self.plan, kind)
            encoder = Encoder(self.plan, kind, dtype, self.device, self._encode_tables[kind])
            self._encoders[kind, dtype] = encoder
        return self._encoders[kind, dtype]

    def decoder(self, kind: str, dtype: str) -> Decoder:
        """The kernel that decodes ``kind`` to rows of ``dtype``, loaded once."""
        if (kind, dtype) not in self._decoders:
            self._decoders[kind, dtype] = Decoder(self.plan, kind, dtype, self.device, self._decode_tables[kind])
        return self._decoders[kind, dtype]

    def _stream(self, kind: str) -> StreamPlan:
        stream: StreamPlan = getattr(self.plan, kind)
        return stream

    def pool(self, data: Any, tokens: int, numbers: Any) -> Pool:
        """The pool ``data``, checked, and the numbers of the pages that hold ``tokens`` tokens."""
        found = arrays.view(data, "pages", self.device)
        needed = -(-tokens // self.plan.window)
        wanted = f"uint8 [pages, {self.layout.page_bytes}]"
        if found.dtype != "uint8" or len(found.shape) != 2 or found.shape[1] != self.layout.page_bytes:
            raise InputError(
                f"pages of this codec are {wanted}, not {found.dtype} {list(found.shape)}", code="input-pages"
            )
        if numbers is None and found.shape[0] < needed:
            raise InputError(f"{tokens} tokens take {needed} pages; there are {found.shape[0]}", code="input-pages")
        if found.shape[0] and (found.address % 16 or found.strides[0] % 16 or found.strides[1] != 1):
            raise InputError(
                f"pages begin at multiples of 16 bytes and are contiguous; strides are {list(found.strides)}",
                code="input-stride",
            )
        if numbers is None:
            return Pool((found.address, 0, found.strides[0]), (found.owner,))
        table = arrays.flat(numbers, "numbers", (needed,), "int32", self.device)
        return Pool((found.address, table.address, found.strides[0]), (found.owner, table.owner))


def raise_statuses(kind: str, start: int, status: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Raise for the first token of ``status`` ``[tokens, S]`` that is not good, page fields before containers.

    ``start`` is the token of the first row.
    """
    if not status.any():
        return
    for reasons, error in ((PAGE_REASONS, FormatError), (REASONS, ChecksumError)):
        wrong = np.argwhere(np.isin(status, list(reasons)))
        if len(wrong):
            token, substream = int(wrong[0][0]), int(wrong[0][1])
            code = reasons[int(status[token, substream])]
            part = f", sub-stream {substream}" if error is ChecksumError else ""
            raise error(
                f"the {kind} container of token {start + token}{part} {EXPLANATIONS[code]}",
                code=code,
                kind=kind,
                token=start + token,
                substream=substream,
            )


def on_device(name: str, profile: str | Profile | Plan, kv_heads: int | None, head_dim: int | None) -> Codec:
    """A codec on the device called ``"cuda"`` or ``"cuda:1"``."""
    return Codec(profile, kv_heads, head_dim, device=device_number(name))


def device_number(name: str) -> int:
    """The number of the device called ``"cuda"`` or ``"cuda:1"``.  Raises :class:`DeviceError` (``device-name``)."""
    kind, _, number = name.partition(":")
    if kind != "cuda" or not ((number.isascii() and number.isdigit()) or name == "cuda"):
        raise DeviceError(f"no device is called {name!r}; there are 'cpu', 'cuda' and 'cuda:1'", code="device-name")
    return int(number or 0)


def _device(number: int) -> Device:
    return device(number)


def _row(rows: arrays.View, token: int) -> Any:
    """One token of rows as float32 ``[1, H, D]`` on the host."""
    return to_float32(as_floats(arrays.host(rows.owner[token : token + 1]), "row"))


def _dtype_name(dtype: DTypeLike | str) -> str:
    """The name of a NumPy or PyTorch dtype that rows can have."""
    name = np.dtype(dtype).name if isinstance(dtype, type) else str(dtype).removeprefix("torch.")
    if name not in ELEMENTS:
        raise InputError(f"cannot decode to {name}; ask for {', '.join(ELEMENTS)}", code="input-dtype")
    return name
