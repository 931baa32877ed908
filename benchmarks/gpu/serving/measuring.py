"""A card: steps of decoding in CUDA graphs, timed, and the memory of both allocators and of the card."""

from __future__ import annotations

import gc
import statistics
from importlib import import_module
from typing import Any

import torch
from decoder_model import Decoder

#: Replays before those that count.
WARM = 3


class Card:
    """The current GPU."""

    device = "cuda"

    def allocated(self) -> int:
        """Bytes that arrays of PyTorch and CuPy take."""
        torch.cuda.synchronize()
        pool = import_module("cupy").get_default_memory_pool()
        return int(torch.cuda.memory_allocated() + pool.used_bytes())

    def free(self) -> int:
        """Bytes that nobody has taken."""
        return int(torch.cuda.mem_get_info()[0])

    def used(self) -> int:
        """Bytes that are taken, by whatever."""
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def release(self) -> None:
        """Give memory that nothing uses back."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        import_module("cupy").get_default_memory_pool().free_all_blocks()

    def times(self, model: Decoder, cache: Any, batch: int, steps: int, repeats: int) -> list[float]:
        """Milliseconds of a step of ``model`` with ``cache``, one number a repeat.

        A step is captured once; a repeat is ``steps`` replays on end, from the same lengths on, and its number their
        mean.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ids = torch.randint(model.shape.vocabulary, (batch,), device=self.device)
            for _ in range(2):
                model.step(ids, cache)
            cache.restart()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                model.step(ids, cache)
            found = []
            for repeat in range(repeats + 1):
                count = steps if repeat else WARM
                cache.restart()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record(stream)
                for _ in range(count):
                    graph.replay()
                end.record(stream)
                end.synchronize()
                if repeat:
                    found.append(begin.elapsed_time(end) / count)
        return found


def spread(times: list[float], digits: int = 4) -> dict[str, float]:
    """Median, least and largest."""
    found = {"median": statistics.median(times), "least": min(times), "largest": max(times)}
    return {f"{name}_ms": round(value, digits) for name, value in found.items()}
