"""Where a file's pages are encoded and decoded: on the CPU, or on a GPU with copies and kernels side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..plan import Plan


@dataclass(frozen=True, eq=False)
class Coding:
    """How pages are made and read.

    codec
        Makes the codec of a plan, which may use so many threads itself: :class:`dquantcodec.Codec`, or one with the
        same calls.
    threads
        Calls that are worth having under way at a time.
    portion_bytes
        Rows taken in at a time, all layers together.
    overlapped
        Encoding waits for something else than this machine's cores, so a thread of its own writes meanwhile, and a
        layer's rows are shared out among threads.
    gathered_bytes
        Pages of several records that are decoded together.
    """

    codec: Callable[[Plan, int], Any]
    threads: int
    portion_bytes: int
    gathered_bytes: int
    overlapped: bool


def coding(device: str, threads: int) -> Coding:
    """On the device called ``device``: ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.

    Raises :class:`DeviceError` in one line for a device that is none or cannot be used.
    """
    if device != "cpu":
        from ..cuda.hosted import LANES, HostCodec, Lanes

        lanes = Lanes(device)
        # A thread more than lanes, so that the next rows are at hand when one is free.
        return Coding(lambda plan, _: HostCodec(plan, lanes), LANES + 1, 128 << 20, 16 << 20, True)

    def codec(plan: Plan, its_threads: int) -> Any:
        from ..codec import Codec

        return Codec(plan, threads=its_threads)

    return Coding(codec, threads, 16 << 20, 0, False)
