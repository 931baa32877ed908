"""SGLang: a HiCache storage backend that keeps coded pages in a folder (``sglang`` 0.5, ``dynamic``).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "dquant", "module_path": "dquantcodec.integrations.sglang", "class_name": "DQuantStorage",
        "folder": "/cache", "plans": "model.dqkv"}'

One page is one file, named by the page's key, the rank and a fingerprint of plans and layout; files appear whole or not
at all.  A page that is missing, damaged or of another model is a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ..errors import DQuantError, UnsupportedError
from ..foreign import to_numpy
from .chunk import ChunkCodec, chunk_codec

logger = logging.getLogger(__name__)

#: Members of the extra configuration that are SGLang's.
FOREIGN = {"backend_name", "module_path", "class_name", "folder"}


class DQuantStorage(HiCacheStorage):  # type: ignore[misc]
    """Pages of keys and values in files; see the module's configuration.

    Raises :class:`UnsupportedError` (``storage-mla``, ``storage-heads``, ``storage-layout``) for caches it cannot code.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        config = storage_config
        if config.is_mla_model:
            raise UnsupportedError("MLA caches have no keys and values to code apart", code="storage-mla")
        if config.should_split_heads:
            raise UnsupportedError("a coded page cannot be split into heads", code="storage-heads")
        extra = dict(config.extra_config or {})
        self._folder = Path(extra["folder"])
        self._settings = {name: value for name, value in extra.items() if name not in FOREIGN}
        self._identity = (
            f"{(config.model_name or '').replace('/', '-')}.tp{config.tp_rank}-{config.tp_size}"
            f".pp{config.pp_rank}-{config.pp_size}"
        )
        self._codec: ChunkCodec | None = None
        self._folder.mkdir(parents=True, exist_ok=True)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool whose pages come: its layout, layers, heads and dtype are known from here on."""
        super().register_mem_pool_host(mem_pool_host)
        pool = self.mem_pool_host = mem_pool_host
        layers, tokens, heads, dim = (int(n) for n in (pool.layer_num, pool.page_size, pool.head_num, pool.head_dim))
        # Every layout, and its axes in the order [layer, token, head, value].
        shapes = {
            "layer_first": ((2, layers, tokens, heads, dim), (0, 1, 2, 3, 4)),
            "page_first": ((2, tokens, layers, heads, dim), (0, 2, 1, 3, 4)),
            "page_first_direct": ((2, layers, tokens, heads, dim), (0, 1, 2, 3, 4)),
            "page_head": ((2, heads, tokens, layers, dim), (0, 3, 2, 1, 4)),
        }
        if pool.layout not in shapes:
            raise UnsupportedError(f"pages of layout {pool.layout!r} are not known", code="storage-layout")
        self._shape, self._axes = shapes[pool.layout]
        dtype = str(pool.dtype).removeprefix("torch.")
        self._codec = chunk_codec({"kv_heads": heads, "head_dim": dim, **self._settings}, layers, dtype)
        self._tokens = tokens
        self._suffix = f"{self._identity}.{self._codec.fingerprint.hex()}.dqkvchunk"

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Code a flat page and store it; false where that fails, and the page is then not stored."""
        path = self._path(key)
        if path.exists():
            return True
        try:
            keys, values = self._planes(to_numpy(value, "the page"))
            chunk = self._made().encode(keys, values)
            partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
            try:
                partial.write_bytes(chunk.data)
                partial.replace(path)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    partial.unlink()
        except (DQuantError, OSError) as error:
            logger.warning("page %s is not stored: %s", key, error)
            return False
        return True

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Decode a page into ``target_location``, a flat page of the pool's dtype, and return it; None for a miss."""
        try:
            chunk = self._path(key).read_bytes()
            keys, values = self._planes(to_numpy(target_location, "the page"))
            self._made().decode(chunk, keys, values)
        except FileNotFoundError:
            return None
        except (DQuantError, OSError) as error:
            logger.warning("page %s is a miss: %s", key, error)
            return None
        return target_location

    def exists(self, key: str) -> bool:
        return self._path(key).exists()

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        stored = [self.set(key, value) for key, value in zip(keys, values)]
        return all(stored)

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [self.get(key, location) for key, location in zip(keys, target_locations)]

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        pool = self.mem_pool_host
        return [self.set(key, pool.get_data_page(index, flat=True)) for key, index in self._places(keys, host_indices)]

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        pool, found = self.mem_pool_host, []
        for key, index in self._places(keys, host_indices):
            page = self.get(key, pool.get_dummy_flat_data_page())
            if page is not None:
                pool.set_from_flat_data_page(index, page)
            found.append(page is not None)
        return found

    def clear(self) -> None:
        """Remove this rank's pages of these plans."""
        for path in self._folder.glob(f"*.{self._suffix}"):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing is held open."""

    def _places(self, keys: Sequence[str], host_indices: Any) -> list[tuple[str, int]]:
        return [(key, int(host_indices[i * self._tokens])) for i, key in enumerate(keys)]

    def _path(self, key: str) -> Path:
        self._made()
        return self._folder / f"{key.replace(os.sep, '-')}.{self._suffix}"

    def _made(self) -> ChunkCodec:
        if self._codec is None:
            raise RuntimeError("SGLang registers its host pool before it stores pages")
        return self._codec

    def _planes(self, flat: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and values ``[layers, tokens, H, D]``, views of a flat page."""
        keys, values = np.reshape(flat, self._shape, copy=False).transpose(self._axes)
        return keys, values
