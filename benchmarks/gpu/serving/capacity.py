"""How many bytes a sequence takes, and how many sequences fit a card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoder_model import DecoderShape

from dquantcodec.page_layout import PageLayout
from dquantcodec.plan import Plan

#: BF16.
BYTES = 2
#: Batches between two tries, as a part of the batch: how exactly the largest is found.
FINENESS = 128


def exact_bytes(shape: DecoderShape, tokens: int) -> int:
    """Keys and values of a sequence in BF16."""
    return shape.layers * tokens * 2 * shape.kv_heads * shape.head_dim * BYTES


def paged_bytes(shape: DecoderShape, plan: Plan, sinks: int, tokens: int) -> int:
    """Pages, tail and leading tokens of a sequence of up to ``tokens`` tokens: the tail takes a window, full or not."""
    windows = max(1, (tokens - sinks) // plan.window)
    page = PageLayout.of(plan).page_bytes
    return shape.layers * (windows * page) + exact_bytes(shape, plan.window + sinks)


def largest(first: int, fits: Callable[[int], Any]) -> tuple[int, Any, list[int]]:
    """The largest batch from ``first`` downwards for which ``fits`` does not run out of memory.

    Returns the batch, what ``fits`` said, and the batches that were too large; 0 and None if none fits.  Steps are
    one in :data:`FINENESS`.
    """
    failed: list[int] = []
    batch = first
    while batch > 0:
        try:
            return batch, fits(batch), failed
        except Exception as reason:
            if not is_out_of_memory(reason):
                raise
        failed.append(batch)
        batch -= max(1, batch // FINENESS)
    return 0, None, failed


def is_out_of_memory(reason: Exception) -> bool:
    """Whether PyTorch, CuPy or the driver found too little memory: each has a class or a message of its own."""
    return "OutOfMemory" in type(reason).__name__ or "out of memory" in str(reason).lower()
