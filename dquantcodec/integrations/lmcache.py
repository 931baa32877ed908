"""LMCache: a serde that stores chunks coded (``lmcache`` 0.5, multiprocess mode, ``"serde": {"type": "dquant"}``).

Importing this module registers the serde, which the server must do before it reads its configuration:

    python -m dquantcodec.integrations.lmcache server ...

Settings beside ``type`` are those of :func:`dquantcodec.integrations.chunk.chunk_codec`, ``head_dim`` and ``kv_heads``
(which shapes alone do not tell) and ``max_workers``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory
from numpy.typing import NDArray

from ..errors import InputError, UnsupportedError
from ..foreign import to_numpy
from .chunk import ChunkCodec, chunk_codec

NAME = "dquant"


class ChunkSerde:
    """Codecs by number of layers and dtype, made when the first object of a kind comes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.pop("mla", False):
            raise UnsupportedError("MLA caches have no keys and values to code apart", code="serde-mla")
        for name in ("kv_heads", "head_dim"):
            if name not in settings:
                raise InputError(f"the serde needs {name}; shapes of objects do not tell it", code="chunk-settings")
        self.heads, self.dim = int(settings["kv_heads"]), int(settings["head_dim"])
        self._settings = settings
        self._codecs: dict[tuple[int, str], ChunkCodec] = {}

    def codec(self, layers: int, dtype: str) -> ChunkCodec:
        if (layers, dtype) not in self._codecs:
            self._codecs[layers, dtype] = chunk_codec(self._settings, layers, dtype)
        return self._codecs[layers, dtype]

    def shape(self, shape: Any) -> tuple[int, int, bool]:
        """Layers, tokens, and whether keys and values are fused, of an object ``[planes, layers, tokens, width]``."""
        if len(shape) == 4:
            planes, layers, tokens, width = (int(n) for n in shape)
            if (planes, width) == (2, self.heads * self.dim):
                return layers, tokens, False
            if (planes, width) == (1, 2 * self.heads * self.dim):
                return layers, tokens, True
        raise InputError(
            f"an object of shape {list(shape)}; expected [2, layers, tokens, {self.heads * self.dim}] or "
            f"[1, layers, tokens, {2 * self.heads * self.dim}]",
            code="input-shape",
        )

    def planes(self, array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values ``[layers, tokens, H, D]``, views of an object's array."""
        layers, tokens, fused = self.shape(array.shape)
        if fused:
            heads = array.reshape(layers, tokens, self.heads, 2 * self.dim)
            return heads[..., : self.dim], heads[..., self.dim :]
        keys, values = array.reshape(2, layers, tokens, self.heads, self.dim)
        return keys, values


class DQuantSerializer(Serializer):  # type: ignore[misc]
    """``serialize`` of LMCache 0.5: object, bytes, key."""

    def __init__(self, serde: ChunkSerde) -> None:
        self._serde = serde

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        """The size that :meth:`serialize` will take, exactly."""
        (shape,), (dtype,) = layout_desc.shapes, layout_desc.dtypes
        layers, tokens, _ = self._serde.shape(shape)
        return self._serde.codec(layers, str(dtype).removeprefix("torch.")).size(tokens)

    def serialize(self, src: Any, dst: Any, key: Any) -> int:
        keys, values = self._serde.planes(to_numpy(src.tensor, "the object"))
        codec = self._serde.codec(len(keys), keys.dtype.name)
        return len(codec.encode(keys, values, to_numpy(dst.tensor, "the buffer").reshape(-1)))


class DQuantDeserializer(Deserializer):  # type: ignore[misc]
    """Raises for damaged or foreign bytes, which LMCache takes for a miss."""

    def __init__(self, serde: ChunkSerde) -> None:
        self._serde = serde

    def deserialize(self, src: Any, dst: Any, key: Any) -> None:
        keys, values = self._serde.planes(to_numpy(dst.tensor, "the object"))
        codec = self._serde.codec(len(keys), keys.dtype.name)
        codec.decode(np.ascontiguousarray(to_numpy(src.tensor, "the buffer").reshape(-1)), keys, values)


def create(settings: dict[str, Any]) -> Any:
    """The factory that LMCache calls with the members of ``serde`` beside ``type``."""
    settings = dict(settings)
    workers = int(settings.pop("max_workers", 1))
    serde = ChunkSerde(settings)
    return AsyncSerdeProcessor(DQuantSerializer(serde), DQuantDeserializer(serde), max_workers=workers)


register_serde_factory(NAME, create)


if __name__ == "__main__":
    import runpy

    runpy.run_module("lmcache.cli.main", run_name="__main__")
