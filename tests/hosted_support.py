"""A device that is none: lanes in the memory of this machine, and the CPU's codec behind the calls of a GPU's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from dquantcodec.codec import Codec, Pages
from dquantcodec.cuda import device, hosted
from dquantcodec.errors import ChecksumError
from dquantcodec.status import REASONS


class Lane:
    """Arrays that are poisoned whenever they are handed out, so that nothing can be read that was not written."""

    made = 0
    #: Threads that hold a lane now, and the most that ever did.
    held: set[int]
    most = 0

    def __init__(self, number: int) -> None:
        type(self).made += 1
        self.stream = self
        self.waited = True

    def up(self, name: str, array: Any) -> Any:
        self.waited = False
        return array.view(hosted._bits(array.dtype)).copy()

    def space(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, np.uint8).view(dtype).reshape(shape)

    def down(self, name: str, array: Any) -> Any:
        self.down_now = array
        return array

    def wait(self) -> None:
        self.waited = True


class DeviceCodec:
    """The calls of :class:`dquantcodec.cuda.Codec` that files make."""

    #: Threads inside a call, and the most there ever were.
    inside = 0
    most = 0
    lock = threading.Lock()
    device = None

    def __init__(self, plan: Any, *, device: int) -> None:
        self._cpu = Codec(plan)

    def encode(self, keys: Any, values: Any, *, pages: Any, status: Any, stream: Any) -> None:
        with self.lock:
            type(self).inside += 1
            type(self).most = max(self.most, self.inside)
        try:
            status[:] = 0
            rows = []
            for i, array in enumerate((keys, values)):
                array = array.view(hosted.BFLOAT16) if array.dtype == np.uint16 else array
                bad = ~np.isfinite(array.astype(np.float32))
                status[i][bad.any(axis=(1, 2))] = 6
                rows.append(np.where(bad, array.dtype.type(0), array))
            pages[:] = self._cpu.encode(*rows).data
        finally:
            with self.lock:
                type(self).inside -= 1

    def decode_kind(
        self, pages: Pages, kind: str, start: int, stop: int, *, out: Any, status: Any, stream: Any
    ) -> None:
        status[:] = 0
        dtype = hosted.BFLOAT16 if out.dtype == np.uint16 else out.dtype
        try:
            out.view(dtype)[:] = self._cpu.decode_kind(pages, kind, start, stop, dtype=dtype)
        except ChecksumError as error:
            number = next(number for number, code in REASONS.items() if code == error.code)
            status[int(str(error.where["token"])) - start, int(str(error.where["substream"]))] = number


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[DeviceCodec]:
    """``device="cuda"`` works here, on the CPU."""
    monkeypatch.setattr(hosted, "Lane", Lane)
    monkeypatch.setattr(hosted, "Codec", DeviceCodec)
    monkeypatch.setattr(hosted, "device", lambda number: None)
    monkeypatch.setattr(device, "device", lambda number: None)
    monkeypatch.setattr(hosted.HostCodec, "_prepare", lambda *_: None)
    Lane.made = DeviceCodec.most = 0
    return DeviceCodec
