"""vLLM: a secondary tier of its KV offloading that keeps coded chunks in a folder (``vllm`` 0.33, no fork, no patch).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "block_size": 128,
        "secondary_tiers": [{"type": "DQuantTier", "module_path": "dquantcodec.integrations.vllm",
                             "folder": "/cache", "kv_heads": 8, "head_dim": 128, "plans": "model.dqkv"}]}}'

One chunk is one file, named by vLLM's key and a fingerprint of plans and dtype; files appear whole or not at all.  A
chunk is a row of the primary tier's memory: of every layer, in the order of the layers' names, its blocks one after
another, keys and values of a head side by side.  One worker with plain attention layers is supported; everything else
is refused when the tier is made.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ..errors import DQuantError, UnsupportedError
from .chunk import chunk_codec

logger = logging.getLogger(__name__)

#: Order of the axes of a block in memory, by the name vLLM has for its layout: heads first or tokens first.
LAYOUTS = {"LBHNC": "heads", "LBNHC": "tokens"}


class DQuantTier(SecondaryTierManager):  # type: ignore[misc]
    """Chunks in files, coded in ``workers`` threads.

    ``settings`` are those of :func:`dquantcodec.integrations.chunk.chunk_codec`; ``kv_heads`` and ``head_dim`` are
    needed.  Raises :class:`UnsupportedError` (``tier-parallel``, ``tier-groups``, ``tier-layout``, ``tier-size``).
    """

    medium: ClassVar[Any] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        folder: str,
        kv_heads: int,
        head_dim: int,
        workers: int = 4,
        backpressure_detector: Any = None,
        locality: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = offloading_spec.config
        parallel = config.parallel
        sizes = [getattr(parallel, f"{name}_size") for name in ("tp", "pp", "pcp", "dcp")]
        if sizes != [1, 1, 1, 1] or config.canonical_layout or config.replicated_layout:
            raise UnsupportedError(
                "this tier codes what one worker stores in vLLM's direct layout; it needs tensor, pipeline and context "
                "parallelism of 1",
                code="tier-parallel",
            )
        if len(config.groups) != 1 or config.groups[0].sliding_window_size_in_chunks is not None:
            raise UnsupportedError("models with several kinds of layers cannot be coded", code="tier-groups")
        if config.kv_cache_layout not in LAYOUTS:
            raise UnsupportedError(
                f"blocks of layout {config.kv_cache_layout!r}; set one of {', '.join(LAYOUTS)}", code="tier-layout"
            )
        (group,) = config.groups
        names = [int(found[0]) for name in group.layer_names if (found := re.findall(r"\d+", name))]
        if len(names) != len(group.layer_names) or names != sorted(names):
            raise UnsupportedError(f"layers are named {list(group.layer_names)}", code="tier-groups")
        layers, blocks, tokens = len(names), config.cache.blocks_per_chunk, group.tokens_per_block
        dtype = str(config.model.dtype).removeprefix("torch.")
        self._codec = chunk_codec({"kv_heads": kv_heads, "head_dim": head_dim, **settings}, layers, dtype)
        self._dtype = self._codec.layers[0].array_dtype
        self._heads_first = LAYOUTS[config.kv_cache_layout] == "heads"
        inner = (kv_heads, tokens) if self._heads_first else (tokens, kv_heads)
        self._shape = (layers, blocks, *inner, 2 * head_dim)
        self._bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        if config.worker_kv_bytes_per_block * blocks != self._bytes or self._bytes > self.block_size_bytes:
            raise UnsupportedError(
                f"a chunk has {config.worker_kv_bytes_per_block * blocks} bytes, {layers} layers of {kv_heads} heads "
                f"of {head_dim} make {self._bytes}",
                code="tier-size",
            )
        self._primary = np.asarray(primary_kv_view).view(np.uint8)
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._name = f"{config.model.name.replace('/', '-')}.{self._codec.fingerprint.hex()}.dqkvchunk"
        self._pool = ThreadPoolExecutor(workers)
        self._lock = threading.Lock()
        self._running: set[Any] = set()
        self._finished: list[Any] = []

    def lookup(self, key: bytes, req_context: Any) -> Any:
        return LookupResult.HIT if self._path(key).exists() else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._store)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, self._load)

    def get_finished_jobs(self) -> Iterable[Any]:
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def has_pending_work(self) -> bool:
        with self._lock:
            return bool(self._running or self._finished)

    def on_new_request(self, req_context: Any) -> Any:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        with self._lock:
            running = set(self._running)
        wait(running)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)

    def _submit(self, job: Any, work: Any) -> None:
        # The lock is held until the job is known to run, so that it cannot finish before.
        with self._lock:
            future = self._pool.submit(self._run, job, work)
            self._running.add(future)
        future.add_done_callback(self._done)

    def _run(self, job: Any, work: Any) -> Any:
        began = time.monotonic()
        good = [key for key, chunk in zip(job.keys, job.chunk_ids) if work(key, int(chunk))]
        return JobResult(
            job_id=job.job_id,
            success=len(good) == len(job.keys),
            successful_keys=good if job.is_promotion else None,
            transfer_time=time.monotonic() - began,
            transfer_bytes=len(good) * self._bytes,
        )

    def _done(self, future: Any) -> None:
        with self._lock:
            self._finished.append(future.result())
            self._running.discard(future)

    def _store(self, key: bytes, chunk: int) -> bool:
        """Code row ``chunk`` of the primary tier into the key's file."""
        path = self._path(key)
        if path.exists():
            return True
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        try:
            rows = self._rows(chunk)
            keys, values = (self._by_token(part).copy() for part in np.split(rows, 2, axis=-1))
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(self._codec.encode(keys, values).data)
            partial.replace(path)
        except (DQuantError, OSError) as error:
            logger.warning("chunk %s is not stored: %s", key.hex(), error)
            return False
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()
        return True

    def _load(self, key: bytes, chunk: int) -> bool:
        """Decode the key's file into row ``chunk`` of the primary tier, which stays as it is if that fails."""
        try:
            data = self._path(key).read_bytes()
            rows = self._rows(chunk)
            halves = np.split(rows, 2, axis=-1)
            keys, values = (np.empty_like(self._by_token(half)) for half in halves)
            self._codec.decode(data, keys, values)
        except (DQuantError, OSError) as error:
            logger.warning("chunk %s is a miss: %s", key.hex(), error)
            # What cannot be read now is not found the next time either.
            if isinstance(error, DQuantError):
                self._path(key).unlink(missing_ok=True)
            return False
        for half, decoded in zip(halves, (keys, values)):
            layers, blocks = half.shape[:2]
            by_block = decoded.reshape(layers, blocks, -1, *decoded.shape[2:])
            half[...] = by_block.transpose(0, 1, 3, 2, 4) if self._heads_first else by_block
        return True

    def _rows(self, chunk: int) -> NDArray[Any]:
        """``[layers, blocks, ...]`` of one row, a view of the primary tier."""
        return self._primary[chunk, : self._bytes].view(self._dtype).reshape(self._shape)

    def _by_token(self, half: NDArray[Any]) -> NDArray[Any]:
        """Keys or values of a row as ``[layers, tokens, H, D]``."""
        rows = half.transpose(0, 1, 3, 2, 4) if self._heads_first else half
        return rows.reshape(len(rows), -1, *rows.shape[3:])

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}.{self._name}"
