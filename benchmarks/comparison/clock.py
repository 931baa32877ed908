"""Speed on a machine that others use too: processor time of one thread, medians of interleaved repetitions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from contenders import Coder

#: A measured run lasts at least so many seconds.
LEAST = 0.05


@dataclass
class Times:
    """Processor seconds for one pass over all layers, one entry a repetition."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def repeat(work: Any, times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - began) / times


def interleaved(coders: Sequence[Sequence[Coder]], repetitions: int) -> list[Times]:
    """Of every contender (its coders, one a layer): what encoding and decoding all layers takes.

    Every repetition runs all contenders once, one after another, so that a busy minute of the machine meets all.
    """
    jobs = []
    for layers in coders:
        stored = [coder.encode() for coder in layers]

        def encode(layers: Sequence[Coder] = layers) -> None:
            for coder in layers:
                coder.encode()

        def decode(layers: Sequence[Coder] = layers, stored: Sequence[Any] = stored) -> None:
            for coder, part in zip(layers, stored):
                coder.decode(part)

        counts = [max(1, round(LEAST / max(repeat(work, 1), 1e-6))) for work in (encode, decode)]
        jobs.append((encode, decode, counts))
    found = [Times() for _ in jobs]
    for _ in range(repetitions):
        for (encode, decode, counts), times in zip(jobs, found):
            times.encode.append(repeat(encode, counts[0]))
            times.decode.append(repeat(decode, counts[1]))
    return found


def rate(seconds: Sequence[float], values: int) -> dict[str, float]:
    """Million values a second: median, slowest and fastest repetition."""
    rates = sorted(values / s / 1e6 for s in seconds)
    return {"median": round(statistics.median(rates), 3), "low": round(rates[0], 3), "high": round(rates[-1], 3)}
