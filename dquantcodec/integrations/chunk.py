"""Chunks: the tokens of all layers that a key-value store keeps under one key, as bytes of a size known beforehand.

    header   64 bytes, see :data:`HEADER`
    payload  of every layer in order: its pages, the last one cut after its last used tile; of layers that are not
             coded, keys and then values as they are

The header says which plans the pages need, so that bytes of another model, dtype or version are refused and never
decoded into something else; the CRC32C of header and payload finds what was damaged on the way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from os import PathLike
from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codec import Codec, Pages
from ..errors import ChecksumError, FormatError, IdentityError, InputError, TruncatedError, UnsupportedError
from ..file.header import Header
from ..file.info import Info
from ..file.layer import Layer
from ..file.structs import crc32c
from ..page_layout import PageLayout

MAGIC = b"DQKVCHNK"
VERSION = 1
#: magic, version, header bytes, tokens, layers, zero, payload bytes, fingerprint, CRC32C of the payload, zeros, CRC32C
#: of the 60 bytes before.
HEADER = Struct("<8sHHIIIQ16sI8sI")
assert HEADER.size == 64


class ChunkCodec:
    """Chunks of one model: ``layers`` with their plans, as a file's header has them.

    >>> layers = [Layer(kv_heads=2, head_dim=64, dtype="float16")] * 3
    >>> codec = ChunkCodec(layers)
    >>> keys, values = np.random.default_rng(0).standard_normal((2, 3, 256, 2, 64)).astype(np.float16)
    >>> chunk = codec.encode(keys, values)
    >>> len(chunk) == codec.size(256)
    True
    >>> codec.decode(chunk, keys, values)
    """

    def __init__(self, layers: Sequence[Layer], threads: int = 1) -> None:
        if any(layer.storage == "absent" for layer in layers):
            raise InputError("a chunk holds every layer; store layers exact instead", code="layer-storage")
        self.layers = tuple(layer.resolved(number) for number, layer in enumerate(layers))
        # Plans equal by content are equal here; names, sinks and what files say of themselves do not matter.
        header = Header(bytes(16), self.layers, 1, 0, 0, Info()).pack()
        self.fingerprint = hashlib.sha256(header).digest()[:16]
        codecs = {id(layer.plan): Codec(layer.plan, threads=threads) for layer in self.layers if layer.plan}
        self._codecs = [codecs.get(id(layer.plan)) for layer in self.layers]

    @staticmethod
    def of_file(path: str | PathLike[str], *, dtype: str | None = None, threads: int = 1) -> ChunkCodec:
        """With the layers and plans of a ``.dqkv`` file, for instance one of a sample text."""
        from ..file.reader import open

        with open(path) as file:
            layers = [layer.spec for layer in file.layers]
        return ChunkCodec([replace(layer, dtype=dtype or layer.dtype, number=None) for layer in layers], threads)

    def size(self, tokens: int) -> int:
        """Bytes of a chunk of ``tokens`` tokens, exactly."""
        return HEADER.size + sum(self._layer_bytes(layer, tokens) for layer in self.layers)

    def encode(
        self, keys: Sequence[Any] | NDArray[Any], values: Sequence[Any] | NDArray[Any], out: Any = None
    ) -> NDArray[np.uint8]:
        """Code keys and values, one ``[T, H, D]`` a layer, into ``out`` (uint8, :meth:`size` bytes or more) or a new
        array; returns the bytes used.

        Raises what :meth:`Codec.encode` raises; ``out`` is then worthless.
        """
        tokens = self._checked(keys, values)
        size = self.size(tokens)
        target = np.empty(size, np.uint8) if out is None else np.frombuffer(out, np.uint8)
        if len(target) < size:
            raise InputError(f"{tokens} tokens take {size} bytes, not {len(target)}", code="chunk-size")
        at = HEADER.size
        for layer, codec, layer_keys, layer_values in zip(self.layers, self._codecs, keys, values):
            end = at + self._layer_bytes(layer, tokens)
            if codec:
                pages = codec.encode(layer_keys, layer_values).data.reshape(-1)
                target[at:end] = pages[: end - at]
            else:
                rows = target[at:end].view(layer.array_dtype).reshape(2, tokens, layer.kv_heads, layer.head_dim)
                rows[0], rows[1] = layer_keys, layer_values
            at = end
        payload = target[HEADER.size : size]
        fields = (MAGIC, VERSION, HEADER.size, tokens, len(self.layers), 0, len(payload), self.fingerprint)
        head = HEADER.pack(*fields, crc32c(payload), bytes(8), 0)
        target[: HEADER.size] = np.frombuffer(head[:-4] + crc32c(head[:-4]).to_bytes(4, "little"), np.uint8)
        return target[:size]

    def decode(self, chunk: Any, keys: Sequence[Any] | NDArray[Any], values: Sequence[Any] | NDArray[Any]) -> None:
        """Decode ``chunk`` into arrays ``[T, H, D]``, one a layer; any strides.

        Everything is checked before anything is written.  Raises :class:`FormatError`, :class:`UnsupportedError`,
        :class:`IdentityError` (``chunk-identity``), :class:`TruncatedError` and :class:`ChecksumError`.
        """
        data = np.frombuffer(chunk, np.uint8)
        tokens = self._checked(keys, values)
        self.check(data, tokens)
        at = HEADER.size
        for layer, codec, layer_keys, layer_values in zip(self.layers, self._codecs, keys, values):
            end = at + self._layer_bytes(layer, tokens)
            if codec:
                page_bytes = PageLayout.of(codec.plan).page_bytes
                pages = np.zeros((-(-tokens // codec.plan.window), page_bytes), np.uint8)
                pages.reshape(-1)[: end - at] = data[at:end]
                decoded = codec.decode(Pages(pages, tokens), dtype=layer.array_dtype)
                layer_keys[...], layer_values[...] = decoded
            else:
                rows = data[at:end].copy().view(layer.array_dtype)
                layer_keys[...], layer_values[...] = rows.reshape(2, tokens, layer.kv_heads, layer.head_dim)
            at = end

    def check(self, data: NDArray[np.uint8], tokens: int) -> None:
        """Raise what is wrong with a chunk that should hold ``tokens`` tokens of these layers."""
        if len(data) < HEADER.size:
            raise TruncatedError(f"{len(data)} bytes are no chunk", code="chunk-truncated")
        fields = HEADER.unpack(data[: HEADER.size].tobytes())
        magic, version, size, found, layers, zero, payload_bytes, fingerprint, crc, zeros, head_crc = fields
        if magic != MAGIC:
            raise FormatError("these bytes are no chunk", code="chunk-magic")
        if version != VERSION:
            raise UnsupportedError(f"a chunk of version {version}; this is {VERSION}", code="chunk-version")
        if crc32c(data[:60]) != head_crc:
            raise ChecksumError("the chunk's header is damaged", code="chunk-header-crc")
        if size != HEADER.size or zero or any(zeros):
            raise FormatError("reserved bytes of the chunk are not zero", code="chunk-reserved")
        if fingerprint != self.fingerprint or layers != len(self.layers):
            raise IdentityError("the chunk was written with other plans, dtypes or layers", code="chunk-identity")
        if found != tokens or payload_bytes != self.size(tokens) - HEADER.size:
            raise IdentityError(f"the chunk holds {found} tokens, not {tokens}", code="chunk-tokens")
        if len(data) < HEADER.size + payload_bytes:
            raise TruncatedError(f"{len(data)} bytes of a chunk of {self.size(tokens)}", code="chunk-truncated")
        if crc32c(data[HEADER.size : HEADER.size + payload_bytes]) != crc:
            raise ChecksumError("the chunk's payload is damaged", code="chunk-crc")

    def _checked(self, keys: Sequence[Any] | NDArray[Any], values: Sequence[Any] | NDArray[Any]) -> int:
        """Tokens of the arrays, which are one a layer and of the layer's shape."""
        if not len(keys) == len(values) == len(self.layers):
            raise InputError(
                f"{len(keys)} layers of keys and {len(values)} of values; expected {len(self.layers)}",
                code="layer-count",
            )
        tokens = len(keys[0]) if len(keys) else 0
        for number, (layer, pair) in enumerate(zip(self.layers, zip(keys, values))):
            for array in pair:
                if tuple(array.shape) != (tokens, layer.kv_heads, layer.head_dim):
                    raise InputError(
                        f"layer {number} has {list(array.shape)}; expected {[tokens, layer.kv_heads, layer.head_dim]}",
                        code="input-shape",
                        layer=number,
                    )
                if array.dtype != layer.array_dtype:
                    raise InputError(
                        f"layer {number} is {array.dtype}; expected {layer.dtype}", code="dtype-mismatch", layer=number
                    )
        return tokens

    @staticmethod
    def _layer_bytes(layer: Layer, tokens: int) -> int:
        if layer.plan is None:
            return 2 * tokens * layer.row_bytes
        layout = PageLayout.of(layer.plan)
        full, rest = divmod(tokens, layer.plan.window)
        return full * layout.page_bytes + (layout.bytes_for(rest) if rest else 0)


def chunk_codec(settings: dict[str, Any], layers: int, dtype: str) -> ChunkCodec:
    """What the configuration of an engine asks for.

    ``plans`` (a ``.dqkv`` file of the model), or ``profile`` with ``kv_heads`` and ``head_dim``: then every layer is
    rotated, as there is nothing to fit classes to.  ``exact_layers`` (numbers) are not coded, ``threads`` pages
    are worked on at once.  Raises :class:`InputError` (``chunk-settings``) for anything else, and for a file with
    another number of layers.
    """
    known = {"plans", "profile", "kv_heads", "head_dim", "exact_layers", "threads"}
    if unknown := set(settings) - known:
        raise InputError(
            f"unknown settings {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}",
            code="chunk-settings",
        )
    threads = int(settings.get("threads", 1))
    exact = set(settings.get("exact_layers", ()))
    if "plans" in settings:
        from ..file.reader import open

        with open(settings["plans"]) as file:
            specs = [replace(layer.spec, dtype=dtype, number=None) for layer in file.layers]
    elif {"kv_heads", "head_dim"} <= set(settings):
        profile = {"profile": settings["profile"]} if "profile" in settings else {}
        specs = [Layer(settings["kv_heads"], settings["head_dim"], dtype, **profile)] * layers
    else:
        raise InputError("name a file of plans, or kv_heads and head_dim", code="chunk-settings")
    if len(specs) != layers:
        raise InputError(f"plans of {len(specs)} layers for {layers}", code="chunk-settings")
    return ChunkCodec(
        [replace(s, storage="exact", profile=None) if n in exact else s for n, s in enumerate(specs)], threads
    )
