"""A disk that may lose, tear, reorder and garble what was not synced, and that may fail at any call.

The model: a write that was not followed by a sync is cut into sectors, and of every sector the medium holds what was
there before, the new bytes, or something else, whatever happened to its neighbours and to other writes.  The length
of the file may be ahead of its data or behind.  What was synced stays.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dquantcodec.file.disk import DiskFile


@dataclass
class Trace:
    """What a writer did to a file that began as ``before``: its calls in order, a sync being ``None``.

    With ``fail_at`` that call fails in the way ``failure`` says: ``"short"`` (writes half, and says so), ``"full"``
    (writes half, then ENOSPC), ``"write"`` and ``"sync"`` (EIO).  All later calls fail as well if ``for_good``.
    """

    before: bytes = b""
    calls: list[tuple[int, bytes] | None] = field(default_factory=list)
    fail_at: int | None = None
    failure: str = ""
    for_good: bool = False
    count: int = 0

    def disk(self, path: Path, mode: str) -> TracedDisk:
        """A disk to put in the place of :class:`DiskFile`."""
        return TracedDisk(path, mode, self)

    def failing(self) -> bool:
        self.count += 1
        if self.fail_at is None:
            return False
        return self.count - 1 == self.fail_at or (self.for_good and self.count > self.fail_at)


class TracedDisk(DiskFile):
    """A real file whose calls are written down, and which fails when told to."""

    def __init__(self, path: Path, mode: str, trace: Trace) -> None:
        super().__init__(path, mode)
        self.trace = trace

    def write(self, offset: int, buffers: Sequence[bytes | memoryview]) -> int:
        whole = b"".join(buffers)
        if self.trace.failing():
            if self.trace.failure == "write":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if self.trace.failure in ("short", "full"):
                whole = whole[: max(1, len(whole) // 2)] if self.trace.failure == "short" else whole[: len(whole) // 2]
                self._put(offset, whole)
                if self.trace.failure == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return len(whole)
        self._put(offset, whole)
        return len(whole)

    def _put(self, offset: int, data: bytes) -> None:
        self.trace.calls.append((offset, data))
        written = super().write(offset, [data]) if data else 0
        assert written == len(data)

    def sync(self) -> None:
        if self.trace.failing() and self.trace.failure in ("sync", "full"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.trace.calls.append(None)


def crashed(trace: Trace, calls: int, rng: np.random.Generator, within: bool = False) -> bytes:
    """What the medium may hold if the machine stops after ``calls`` calls, or ``within`` the next one."""
    synced = max((number + 1 for number, call in enumerate(trace.calls[:calls]) if call is None), default=0)
    image = bytearray(trace.before)
    for call in trace.calls[:synced]:
        if call is not None:
            _overwrite(image, *call)
    unsafe = [call for call in trace.calls[synced:calls] if call is not None]
    if within and calls < len(trace.calls) and (call := trace.calls[calls]) is not None:
        unsafe.append((call[0], call[1][: rng.integers(1, len(call[1]) + 1)]))
    if not unsafe:
        return bytes(image)
    durable = len(image)
    longest = max(durable, *(offset + len(data) for offset, data in unsafe))
    style = rng.integers(4)
    sector = int(rng.choice([512, 4096]))
    for number in rng.permutation(len(unsafe)) if style else range(len(unsafe)):
        offset, data = unsafe[number]
        fates = _fates(int(style), -(-len(data) // sector) + 1, rng)
        for fate, (at, piece) in zip(fates, _sectors(offset, data, sector)):
            if fate == "kept":
                _overwrite(image, at, piece)
            elif fate == "garbled":
                _overwrite(image, at, _garbage(piece, rng))
    end = int(rng.choice([durable, longest, rng.integers(durable, longest + 1)], p=[0.1, 0.6, 0.3]))
    return bytes(image[:end].ljust(end, b"\0"))


def as_seen(trace: Trace, calls: int, rng: np.random.Generator) -> bytes:
    """What another process sees while the next call is under way: all calls before it, and the beginning of it."""
    image = bytearray(trace.before)
    for call in trace.calls[:calls]:
        if call is not None:
            _overwrite(image, *call)
    if calls < len(trace.calls) and (call := trace.calls[calls]) is not None:
        _overwrite(image, call[0], call[1][: rng.integers(0, len(call[1]) + 1)])
    return bytes(image)


def _fates(style: int, count: int, rng: np.random.Generator) -> Sequence[str]:
    """Of every sector: all alike, torn after some, or each on its own."""
    if style == 0:
        torn = int(rng.integers(count + 1))
        return ["kept"] * torn + ["lost"] * (count - torn)
    if style == 1:
        return [str(rng.choice(["kept", "lost", "garbled"]))] * count
    shares = [0.45, 0.45, 0.1] if style == 2 else [0.9, 0.05, 0.05]
    return [str(fate) for fate in rng.choice(["kept", "lost", "garbled"], count, p=shares)]


def _sectors(offset: int, data: bytes, sector: int) -> Iterator[tuple[int, bytes]]:
    end = offset + len(data)
    while offset < end:
        stop = min((offset // sector + 1) * sector, end)
        yield offset, data[len(data) - (end - offset) : len(data) - (end - stop)]
        offset = stop


def _garbage(piece: bytes, rng: np.random.Generator) -> bytes:
    kind = rng.integers(4)
    if kind == 0:
        return rng.bytes(len(piece))
    if kind == 1:
        return b"\xff" * len(piece)
    if kind == 2:
        return bytes(len(piece))
    flipped = bytearray(piece)
    flipped[rng.integers(len(piece))] ^= 1 << int(rng.integers(8))
    return bytes(flipped)


def _overwrite(image: bytearray, offset: int, data: bytes) -> None:
    if offset > len(image):
        image.extend(bytes(offset - len(image)))
    image[offset : offset + len(data)] = data
