"""Objects in storage, read by ranges."""

from __future__ import annotations

import errno
from collections import OrderedDict
from threading import Lock
from typing import Any

from .urls import filesystem, shown, storage

#: Small reads fetch whole blocks, which stay for the next.
BLOCK_BYTES = 64 << 10
CACHE_BYTES = 16 << 20
#: A read of so much is fetched as it is and not kept.
LARGE_BYTES = 1 << 20
#: Reads that follow one another fetch up to so much more at a time.
AHEAD_BYTES = 4 << 20


class RemoteBytes:
    """The bytes of an object, read by ranges as they are asked for.

    Stands where readers have a memoryview of a mapped file: it has ``nbytes``, and slices of it are views.  Threads may
    share one.  An object that is replaced while it is read gives bytes that the checksums of a file refuse.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._path = filesystem(url)
        with storage(url):
            # What a listing said before may be outdated.
            self._fs.invalidate_cache(self._fs._parent(self._path))
            self.info: dict[str, Any] = dict(self._fs.info(self._path))
        if self.info.get("type") == "directory":
            raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", shown(url))
        if self.info.get("size") is None:
            raise OSError(errno.EIO, "the server does not say how large it is; download it first", shown(url))
        self.size = int(self.info["size"])
        self._lock = Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._next = -1
        self._ahead = 1

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` in one request, past the cache.  Raises OSError."""
        if start == stop:
            return b""
        with storage(self._url):
            data = bytes(self._fs.cat_file(self._path, start=start, end=stop))
        if len(data) != stop - start:
            raise OSError(
                errno.EIO,
                f"{len(data)} bytes came where {stop - start} were asked for; the server gives no "
                "ranges, or the object changed",
                shown(self._url),
            )
        return data

    @property
    def nbytes(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> memoryview:
        start, stop, step = part.indices(self.size)
        assert step == 1
        return self._read(start, max(start, stop))

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()

    def _read(self, start: int, stop: int) -> memoryview:
        if stop - start >= LARGE_BYTES:
            return memoryview(self.fetch(start, stop))
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        with self._lock:
            self._hold(first, last)
            blocks = [self._blocks[block] for block in range(first, last)]
            for block in range(first, last):
                self._blocks.move_to_end(block)
            while len(self._blocks) * BLOCK_BYTES > CACHE_BYTES:
                self._blocks.popitem(last=False)
        joined = memoryview(blocks[0] if len(blocks) == 1 else b"".join(blocks))
        return joined[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    def _hold(self, first: int, last: int) -> None:
        """Have the blocks ``first`` to before ``last``, in one request from the first to the last that is missing."""
        missing = [block for block in range(first, last) if block not in self._blocks]
        if not missing:
            return
        # Who reads on where the last request ended gets twice as much each time; others what they ask for.
        self._ahead = min(2 * self._ahead, AHEAD_BYTES // BLOCK_BYTES) if missing[0] == self._next else 1
        begin, end = missing[0], max(missing[-1] + 1, missing[0] + self._ahead)
        data = self.fetch(begin * BLOCK_BYTES, min(end * BLOCK_BYTES, self.size))
        for at in range(0, len(data), BLOCK_BYTES):
            self._blocks[begin + at // BLOCK_BYTES] = data[at : at + BLOCK_BYTES]
        self._next = end
